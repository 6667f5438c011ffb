//! The holes of each template: constants and functions, the shape of its workgroups, and how many there are.

use super::locate::{Piece, Space, Var, beyond, locate, over, split, sum, within};
use super::scalar::Type::{self, F32, F64, I32, I64, Vec4};
use super::scalar::{convert, extreme, literal};
use super::thin::THIN;
use super::wide::{BYTES, Tile, matrix};
use super::{Dialect, Input, Module};
use crate::kernel::layout::prologue::{by_patches, unfolds, unfolds_transposed};
use crate::kernel::{Fold, Nearest, PadMode, Pool, ResizeMode, RowFold, Window};
use crate::shape::Access;
use crate::target::FEW_GROUPS;
use std::collections::BTreeSet;

/// A template's text, invocations per workgroup, workgroups.
pub(super) type Launch = Result<(&'static str, u32, u64), String>;

impl Module<'_> {
    /// One invocation per element.
    fn per_element(&mut self, name: &'static str) -> Launch {
        let count = self.kernel.shape.numel() as u64;
        let size = if count < 1 << 14 { 64 } else { 256 }.min(self.target.max_workgroup);
        self.int("COUNT", count as isize);
        Ok((name, size, count.div_ceil(u64::from(size))))
    }

    /// Axes apart from those `still`: function `base(i)` for the address that the latter add up to, and per other axis
    /// `coordinate$(i)`, `EXTENT$` and `STRIDE$` of the data.
    fn walk(&mut self, still: impl Fn(usize) -> bool) -> Vec<usize> {
        let data = self.access(0);
        let moving: Vec<usize> = (0..data.shape.len()).filter(|&a| !still(a)).collect();
        let mut base = data.clone();
        moving.iter().for_each(|&a| base.strides[a] = 0);
        let space = self.flat();
        let located = locate(&space, &[&base], &BTreeSet::new());
        let mut body = located.statements;
        body.push(format!("return {};", located.addresses[0]));
        self.function("base", &[("i", I32)], Some(I32), body);
        for (k, &axis) in moving.iter().enumerate() {
            let located = locate(&space, &[], &BTreeSet::from([axis]));
            let mut body = located.statements;
            body.push(format!("return {};", located.coordinates[&axis]));
            self.function(&format!("coordinate{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), data.shape[axis] as isize);
            self.int(format!("STRIDE{k}"), data.strides[axis]);
        }
        self.lists.insert("axis", vec![Vec::new(); moving.len()]);
        moving
    }

    pub(super) fn map(&mut self) -> Launch {
        if let Some(launch) = self.map_wide()? {
            return Ok(launch);
        }
        self.store(&self.flat(), None, None, &[])?;
        self.per_element("map")
    }

    pub(super) fn row(&mut self, inner: usize, folds: &[RowFold], per_row: bool) -> Launch {
        let shape = &self.kernel.shape;
        let outer = shape.len() - inner;
        let rows: usize = shape[..outer].iter().product();
        let length: usize = shape[outer..].iter().product();
        if let Some(launch) = self.row_team(inner, folds, per_row)? {
            return Ok(launch);
        }
        let space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let types = self.folds(folds, &space, &[("row", I32), ("j", I32)], |_, j| Input::Slot(j as usize))?;
        if per_row {
            let space = vec![over("row", shape, 0..outer)];
            self.store(&space, None, None, &types)?;
            self.flags.push("PER_ROW");
        } else {
            self.store(&space, None, None, &types)?;
        }
        // Lanes lie along the axis in which elements are dense: that of the row, or else that of the rows.
        let dense_row = self.kernel.reads.first().is_none_or(|r| {
            let along = |axes: std::ops::Range<usize>| {
                axes.rev().find(|&a| shape[a] > 1).is_some_and(|a| r.access.strides[a].abs() == 1)
            };
            along(outer..shape.len()) || !along(0..outer)
        });
        let most = 1usize << self.target.max_workgroup.min(256).ilog2();
        let side_by_side = rows.max(1).next_power_of_two();
        let lanes = if dense_row {
            length / 4
        } else {
            // As many as occupy the device, of which those that lie together still read whole lines.
            let room = 4 * most * (self.target.multiprocessors as usize).max(FEW_GROUPS);
            (length / 8).min(room / rows.max(1)).min(most / side_by_side.min(16))
        };
        let lanes = lanes.max(1).next_power_of_two().min(most);
        let per_group = (most / lanes).min(side_by_side);
        let size = lanes * per_group;
        let (lane_step, row_step) = if dense_row { (1, lanes) } else { (per_group, 1) };
        let constants = [
            ("COUNT", rows),
            ("LENGTH", length),
            ("LANES", lanes),
            ("ROWS", per_group),
            ("LANE_STEP", lane_step),
            ("ROW_STEP", row_step),
            ("BLOCK", lanes * 64),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if lanes > 1 {
            self.flags.push("LANES");
            self.share(&types, size);
        }
        let rows = if per_row || length > 0 { rows } else { 0 };
        Ok(("row", size as u32, rows.div_ceil(per_group) as u64))
    }

    /// Per fold `k` of a row kernel `element{k}`, its value at a point of the space, `combine{k}`, `START{k}` and, for its result, `fold{k}`.
    /// The folds' types come back; the list `fold` has the arrays in which invocations exchange values.
    pub(super) fn folds(
        &mut self,
        folds: &[RowFold],
        space: &Space,
        parameters: &[(&'static str, Type)],
        input: impl Fn(&Self, u32) -> Input,
    ) -> Result<Vec<Type>, String> {
        let mut types = Vec::with_capacity(folds.len());
        for (k, RowFold { fold, body }) in folds.iter().enumerate() {
            let result = body.code[body.results[0] as usize].dtype;
            let ty = match Type::register(result, self.target.family) {
                Type::Bool => I32,
                ty => ty,
            };
            let code = self.body(body, space, |j| input(self, j), &[], &types)?;
            let mut lines = code.statements;
            let (value, from) = &code.results[0];
            lines.push(format!("return {};", convert(value, *from, ty)));
            self.private.push((format!("fold{k}"), ty));
            self.function(&format!("element{k}"), parameters, Some(ty), lines);
            let (low, high) = ty.bounds();
            let (combine, start) = match fold {
                Fold::Sum => ("return a + b;".into(), 0.0),
                Fold::Prod => ("return a * b;".into(), 1.0),
                Fold::Max => (format!("return {}(a, b);", extreme(true, ty)), low),
                Fold::Min => (format!("return {}(a, b);", extreme(false, ty)), high),
            };
            self.function(&format!("combine{k}"), &[("a", ty), ("b", ty)], Some(ty), vec![combine]);
            self.start(format!("START{k}"), start, ty);
            types.push(ty);
        }
        self.lists.insert("fold", types.iter().map(|ty| vec![("SHARED", shared(*ty).to_owned())]).collect());
        Ok(types)
    }

    /// Arrays of so many elements for folds of these types.
    pub(super) fn share(&mut self, types: &[Type], len: usize) {
        for ty in [F32, I32, F64, I64].into_iter().filter(|ty| types.contains(ty)) {
            self.shared.push((shared(ty), ty, len));
        }
    }

    /// The first of the axes that form the rows of a product: batch axes over which the right operand stands still lengthen them.
    fn first_row_axis(&self) -> usize {
        let batch = self.kernel.shape.len() - 2;
        let beside = self.kernel.prologue(1).map_or(0..0, |(_, own)| own);
        let still = |axis: usize| {
            let mut right = beside.clone().chain([1]);
            right.all(|slot| self.access(slot).shape[axis] == 1 || self.access(slot).strides[axis] == 0)
        };
        let first = (0..batch).rev().take_while(|&axis| still(axis)).last().unwrap_or(batch);
        // The right operand of a few rows comes from the caches of CUDA devices; more workgroups ask for it sooner.
        let few = self.kernel.shape[first..=batch].iter().product::<usize>() <= THIN;
        if self.dialect == Dialect::Cuda && self.storage[0].size() > 2 && few { batch } else { first }
    }

    pub(super) fn matmul(&mut self) -> Launch {
        let shape = &self.kernel.shape;
        let rank = shape.len();
        let first = self.first_row_axis();
        let m: usize = shape[first..rank - 1].iter().product();
        let (n, k) = (shape[rank - 1], self.access(0).shape[rank - 1]);
        let batch: usize = shape[..first].iter().product();
        // The thinner side is the rows: (a b)' = b' a'.
        let swap = n < m && n <= 16;
        let (rows, columns) = if swap { ("n", "m") } else { ("m", "n") };
        let (m, n, right) = if swap { (n, m, 0) } else { (m, n, 1) };
        let spaces = [(rows, first..rank - 1, "k"), ("k", rank - 2..rank - 1, columns)];
        let space = |slot: usize| -> Space {
            let (name, axes, last) = spaces[slot].clone();
            let extents = &self.kernel.reads[slot].access.shape;
            vec![over("batch", extents, 0..first), over(name, extents, axes), over(last, extents, [rank - 1])]
        };
        let spaces = [space(0), space(1)];
        // Along the last axis, or along the one before it where that is one alone.
        let single = [Some(rank - 1), (right == 1 || first == rank - 2).then_some(rank - 2)];
        let mut axes = single.into_iter().flatten().filter(|_| m <= THIN);
        let fours = axes.find(|&axis| self.reads_fours(right, &spaces[right], axis, m));
        for (slot, space) in spaces.iter().enumerate().filter(|(slot, _)| *slot != right || fours.is_none()) {
            let (mut body, value) = self.element(slot, space)?;
            body.push(format!("return {value};"));
            // `a` is called with (batch, m, k), `b` with (batch, k, n).
            let (name, params) = if slot == right { ("b", ["k", "n"]) } else { ("a", ["m", "k"]) };
            self.function(name, &[("batch", I32), (params[0], I32), (params[1], I32)], Some(self.value[slot]), body);
        }
        if !self.value[..2].iter().all(|ty| ty.is_float()) {
            return Err("a matrix product is of floats".into());
        }
        let space: Space =
            vec![over("batch", shape, 0..first), over(rows, shape, first..rank - 1), over(columns, shape, [rank - 1])];
        if self.dialect == Dialect::Cuda {
            // Of `a(batch, m, k)` and `b(batch, k, n)`.
            let (a, b) = if swap { (1, 0) } else { (0, 1) };
            let (a_inner, b_inner, b_outer) =
                if swap { (rank - 2, rank - 1, rank - 2) } else { (rank - 1, rank - 2, rank - 1) };
            let (slim, half) = (m <= THIN, self.storage[0].size() == 2);
            if half && !slim {
                self.wide_operand("a_wide", a, &spaces[a], a_inner);
            }
            if half || slim {
                let dense = self.access(b).strides[b_outer] == 1;
                self.wide_operand("b_wide", b, &spaces[b], if dense { b_outer } else { b_inner });
            }
        }
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let a_along_k = if swap { dense(1, rank - 2) } else { !dense(0, rank - 2) || dense(0, rank - 1) };
        let b_along_k = match fours {
            Some(axis) => (axis == rank - 1) == swap,
            None if swap => !dense(0, rank - 2),
            None => !dense(1, rank - 1) && dense(1, rank - 2),
        };
        // What lies 16 bytes at a time can be sent to workgroup memory by instructions of compute capability 8.0.
        let lie = match self.storage[0].size() {
            2 => ["A_WIDE", "B_WIDE"].iter().all(|flag| self.flags.contains(flag)),
            _ => self.split_operands(a_along_k, b_along_k),
        };
        let sent = lie && !swap && self.dialect == Dialect::Cuda && self.target.compute >= 80;
        self.product(space, [batch, m, k, n], a_along_k, b_along_k, sent.then_some([(0, &spaces[0]), (1, &spaces[1])]))
    }

    /// Whether both operands of a product are `f32` as they lie in memory, 16 bytes at a time, the left one along the inner axis.
    fn split_operands(&self, a_along_k: bool, b_along_k: bool) -> bool {
        let last = self.kernel.shape.len() - 1;
        let plain = |slot: usize| self.storage[slot] == F32 && self.kernel.prologue(slot).is_none();
        let lies = |slot: usize, axis: usize| plain(slot) && self.lies(slot, axis, 4);
        a_along_k && lies(0, last) && lies(1, if b_along_k { last - 1 } else { last })
    }

    /// The product of `a(batch, m, k)` and `b(batch, k, n)`, whose space has the variables `batch`, `m` and `n`; the slots of its operands
    /// and their spaces where they can be sent to workgroup memory, 16 bytes at a time.
    fn product(
        &mut self,
        mut space: Space,
        [batch, m, k, n]: [usize; 4],
        a_k: bool,
        b_k: bool,
        sent: Option<[(usize, &Space); 2]>,
    ) -> Launch {
        // `store` is called with (batch, m, n).
        space.sort_by_key(|var| ["batch", "m", "n"].iter().position(|name| *name == var.name));
        let wide = self.tile([batch, m, k, n], sent.is_some(), b_k);
        let core = if wide == Some(Tile::Plain(F64)) { F64 } else { F32 };
        self.store(&space, Some(core), Some("m < M && n < N"), &[])?;
        [("M", m), ("K", k), ("N", n)].iter().for_each(|&(name, value)| self.int(name, value as isize));
        if m == 0 || n == 0 {
            return Ok(("matmul", 64, 0));
        }
        if m <= THIN {
            return Ok(match () {
                () if self.flags.contains(&"B_WIDE") => self.slim([batch, k, n], b_k),
                () if self.flags.contains(&"B_FOURS") => self.quad([batch, m, k, n], b_k),
                () => self.thin([batch, m, k, n], b_k),
            });
        }
        let tiles = |tm: usize, tn: usize| m.div_ceil(tm) * n.div_ceil(tn);
        if let Some(tile) = wide {
            return self.tiled(tile, [batch, m, n], [a_k, b_k], sent);
        }
        let (steps, most) = (16, self.target.max_shared as usize);
        let busy = 4 * batch * tiles(128, 128) >= 3 * FEW_GROUPS;
        if busy && self.target.max_workgroup >= 256 && most >= 2 * steps * 128 * 4 {
            let along = |inner: bool| if inner { (steps, 1) } else { (1, 32) };
            let ((am, ak), (bn, bk)) = (along(a_k), along(b_k));
            let constants = [
                ("TILES_M", m.div_ceil(128)),
                ("TILES_N", n.div_ceil(128)),
                ("STEP", steps),
                ("A_M_STEP", am),
                ("A_K_STEP", ak),
                ("B_N_STEP", bn),
                ("B_K_STEP", bk),
            ];
            constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
            self.lists
                .insert("sum", SUMS.iter().map(|sum| sum.map(|(from, to)| (from, to.to_owned())).to_vec()).collect());
            self.lists.insert("part", vec![Vec::new(); 32 * steps / 256]);
            self.shared.push(("tile_a", Vec4, 32 * steps));
            self.shared.push(("tile_b", Vec4, 32 * steps));
            return Ok(("matmul_large", 256, (batch * tiles(128, 128)) as u64));
        }
        if k >= DEEP && self.target.max_workgroup >= 256 && most >= 16 << 10 {
            // Sixteen teams where larger tiles would leave much of a large device idle.
            let (tile, depth) = if batch * tiles(32, 32) >= FEW_GROUPS { (32, 8) } else { (16, 4) };
            let slices = 256 * 16 / (tile * tile);
            let (step, pitch) = (slices * depth, tile / 4 + 1);
            let along = |inner: bool| if inner { (step, 1) } else { (1, tile / 4) };
            let ((am, ak), (bn, bk)) = (along(a_k), along(b_k));
            let constants = [
                ("TILE", tile),
                ("TILES_M", m.div_ceil(tile)),
                ("TILES_N", n.div_ceil(tile)),
                ("SLICES", slices),
                ("DEPTH", depth),
                ("STEP", step),
                ("PITCH", pitch),
                ("RIGHT", step * pitch),
                ("A_M_STEP", am),
                ("A_K_STEP", ak),
                ("B_N_STEP", bn),
                ("B_K_STEP", bk),
            ];
            constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
            self.shared.push(("tile", Vec4, (2 * step * pitch).max(slices * tile * tile / 4)));
            return Ok(("matmul_deep", 256, (batch * tiles(tile, tile)) as u64));
        }
        let (tile_m, tile_n) = match () {
            () if m <= 16 => (16, 64),
            () if batch * tiles(64, 64) >= 64 && self.target.max_workgroup >= 256 => (64, 64),
            () => (32, 32),
        };
        let step = 16;
        let (am, ak) = if a_k { (step, 1) } else { (1, tile_m) };
        let (bn, bk) = if b_k { (step, 1) } else { (1, tile_n) };
        let constants = [
            ("TILE_M", tile_m),
            ("TILE_N", tile_n),
            ("TILES_M", m.div_ceil(tile_m)),
            ("TILES_N", n.div_ceil(tile_n)),
            ("STEP", step),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.shared.push(("tile_a", F32, tile_m * step));
        self.shared.push(("tile_b", F32, tile_n * step));
        Ok(("matmul", (tile_m * tile_n / 16) as u32, (batch * tiles(tile_m, tile_n)) as u64))
    }

    /// Constants of a windowed template: output extents, data extents, strides of the data (and weights), the window; which of the
    /// spatial axes goes by the names of Z, Y and X.
    pub(super) fn windowed(&mut self, window: &Window, channels: Option<(usize, usize)>, axes: &[usize]) {
        if let Some((out, input)) = channels {
            self.int("GROUP_OUT", out as isize);
            self.int("GROUP_IN", input as isize);
        }
        let data = self.access(0);
        let shape = &self.kernel.shape;
        let order = [0, 1].into_iter().chain(axes.iter().map(|axis| axis + 2));
        for (k, axis) in order.zip(["N", "C", "Z", "Y", "X"]) {
            self.int(format!("OUT_{axis}"), shape[k] as isize);
            self.int(format!("IN_{axis}"), data.shape[k] as isize);
            self.int(format!("DATA_{axis}"), data.strides[k]);
            if self.kernel.template.core_reads() > 1 {
                self.int(format!("WEIGHT_{axis}"), self.access(1).strides[k]);
            }
            if let Some(k) = k.checked_sub(2) {
                self.int(format!("KERNEL_{axis}"), window.kernel[k] as isize);
                self.int(format!("STRIDE_{axis}"), window.strides[k] as isize);
                self.int(format!("DILATION_{axis}"), window.dilations[k] as isize);
                self.int(format!("PAD_{axis}"), window.pads[k] as isize);
            }
        }
        self.int("DATA_0", data.offset);
        if self.kernel.template.core_reads() > 1 {
            self.int("WEIGHT_0", self.access(1).offset);
        }
    }

    /// Output and input channels per group.
    fn channels(&self, groups: usize) -> Result<(usize, usize), String> {
        let (o, c) = (self.kernel.shape[1], self.access(0).shape[1]);
        if groups == 0 || o % groups != 0 || c % groups != 0 {
            return Err(format!("{c} and {o} channels do not form {groups} groups"));
        }
        if !self.value[..2].iter().all(|ty| ty.is_float()) {
            return Err("a convolution is of floats".into());
        }
        Ok((o / groups, c / groups))
    }

    pub(super) fn conv(&mut self, groups: usize, window: &Window) -> Launch {
        let (out, input) = self.channels(groups)?;
        let [kz, ky, kx] = window.kernel;
        if !unfolds(out, input * kz * ky * kx) {
            return self.strips([out, input], window);
        }
        // As the product of weights [o, c * kernel] and unfolded data [c * kernel, n * positions], per group.
        let s = &self.kernel.shape;
        let [m, k, n] = [out, input * kz * ky * kx, s[0] * s[2] * s[3] * s[4]];
        let weights = self.access(1);
        let located = locate(&self.conv_weights([groups, out], [1, 2, 3, 4]), &[weights], &BTreeSet::new());
        let mut body = located.statements;
        body.push(format!("return {};", self.load(1, &located.addresses[0])));
        self.function("a", &[("batch", I32), ("m", I32), ("k", I32)], Some(F32), body);
        let mut body = Vec::new();
        let c = split("k", &[input, kz, ky, kx], &[true; 4], &mut body);
        let p = split("n", &[s[0], s[2], s[3], s[4]], &[true; 4], &mut body);
        let mut inside = Vec::new();
        let data = self.access(0);
        for a in 0..3 {
            let (stride, dilation, pad) =
                (window.strides[a] as isize, window.dilations[a] as isize, window.pads[a] as isize);
            let terms = [(p[a + 1].as_str(), stride), (c[a + 1].as_str(), dilation)];
            body.push(format!("let p{a} = {};", sum(-pad, &terms)));
            if pad > 0 {
                inside.push(format!("p{a} >= 0"));
            }
            let reach = (s[a + 2] as isize - 1) * stride + (window.kernel[a] as isize - 1) * dilation - pad;
            if reach >= data.shape[a + 2] as isize {
                inside.push(format!("p{a} < {}", data.shape[a + 2]));
            }
        }
        let strides = &data.strides;
        let terms = [
            (p[0].as_str(), strides[0]),
            ("batch", strides[1] * input as isize * isize::from(groups > 1)),
            (c[0].as_str(), strides[1]),
            ("p0", strides[2] * isize::from(data.shape[2] > 1)),
            ("p1", strides[3] * isize::from(data.shape[3] > 1)),
            ("p2", strides[4] * isize::from(data.shape[4] > 1)),
        ];
        let mut load = self.load(0, &sum(data.offset, &terms));
        let mut before = Vec::new();
        if self.kernel.prologue(0).is_some() {
            // The same point of the data in terms of its axes.
            let channel = [("batch", input as isize * isize::from(groups > 1)), (c[0].as_str(), 1)];
            before.push(format!("let image = {};", p[0]));
            before.push(format!("let channel = {};", sum(0, &channel)));
            let names = ["image", "channel", "p0", "p1", "p2"];
            let space = names.into_iter().zip(0..).map(|(name, axis)| over(name, &data.shape, [axis])).collect();
            let (statements, value) = self.element(0, &space)?;
            before.extend(statements);
            load = value;
        }
        if inside.is_empty() {
            body.extend(before);
            body.push(format!("return {load};"));
        } else {
            body.push("var value = 0.0f;".into());
            if before.is_empty() {
                body.push(format!("if ({}) {{ value = {load}; }}", inside.join(" && ")));
            } else {
                body.push(format!("if ({}) {{", inside.join(" && ")));
                body.extend(before.into_iter().map(|line| format!("    {line}")));
                body.push(format!("    value = {load};"));
                body.push("}".into());
            }
            body.push("return value;".into());
        }
        self.function("b", &[("batch", I32), ("k", I32), ("n", I32)], Some(F32), body);
        let channel = |extent, step| Piece::new(1, extent, step);
        let space = vec![
            Var { name: "batch", pieces: vec![channel(groups, out)] },
            Var { name: "m", pieces: vec![channel(out, 1)] },
            over("n", s, [0, 2, 3, 4]),
        ];
        let order = by_patches(self.kernel, groups, window, self.target);
        let spaces =
            order.map(|order| [self.conv_weights([groups, out], order), self.conv_patches(groups, window, order)]);
        let sent = spaces.as_ref().map(|[weights, patches]| [(1, weights), (0, patches)]);
        self.product(space, [groups, m, k, n], true, sent.is_some(), sent)
    }

    /// The data of a convolution as a matrix per group, whose rows are those under these axes of the weights.
    fn conv_patches(&self, groups: usize, window: &Window, rows: [usize; 4]) -> Space {
        let (s, input) = (&self.kernel.shape, self.access(1).shape[1]);
        let under = |axis: usize| match axis {
            1 => Piece::new(1, input, 1),
            _ => Piece::new(axis, window.kernel[axis - 2], window.dilations[axis - 2]),
        };
        let position = |axis: usize| Piece::new(axis, s[axis], if axis == 0 { 1 } else { window.strides[axis - 2] });
        vec![
            Var { name: "batch", pieces: vec![Piece::new(1, groups, input)] },
            Var { name: "k", pieces: rows.map(under).into() },
            Var { name: "n", pieces: [0, 2, 3, 4].map(position).into() },
        ]
    }

    /// The weights of a convolution as a matrix per group, whose columns are these axes.
    fn conv_weights(&self, [groups, out]: [usize; 2], columns: [usize; 4]) -> Space {
        let group = |extent, step| Piece::new(0, extent, step);
        vec![
            Var { name: "batch", pieces: vec![group(groups, out)] },
            Var { name: "m", pieces: vec![group(out, 1)] },
            over("k", &self.access(1).shape, columns),
        ]
    }

    pub(super) fn conv_transpose(&mut self, groups: usize, window: &Window) -> Launch {
        let (out, input) = self.channels(groups)?;
        if !unfolds_transposed(out, input, window) {
            self.windowed(window, Some((out, input)), &[0, 1, 2]);
            self.loader("data", 0);
            self.loader("weight", 1);
            self.store(&self.flat(), Some(F32), None, &[])?;
            return self.per_element("conv_transpose");
        }
        // As the product of weights [o * phases, taps * c] and data [taps * c, n * positions], per group. Position q and phase p of an axis
        // stand for p + q * stride of the padded result: what reaches it comes by taps p + j * stride from q - j.
        let (s, x) = (&self.kernel.shape, &self.access(0).shape);
        let phases = window.strides;
        let taps: [usize; 3] = std::array::from_fn(|a| window.kernel[a].div_ceil(phases[a]));
        let cut: [usize; 3] = std::array::from_fn(|a| window.pads[a] % phases[a]);
        let covered = |a: usize| if s[a + 2] == 0 { 0 } else { (s[a + 2] + cut[a]).div_ceil(phases[a]) };
        let positions: [usize; 3] = std::array::from_fn(covered);
        let var = |name, first: Option<Piece>, each: &dyn Fn(usize) -> Piece, last: Option<Piece>| {
            let pieces = first.into_iter().chain((0..3).map(each)).chain(last).collect();
            Var { name, pieces }
        };
        let group = |axis, step| Var { name: "batch", pieces: vec![Piece::new(axis, groups, step)] };
        let weights = vec![
            group(0, input),
            var("m", Some(Piece::new(1, out, 1)), &|a| Piece::new(a + 2, phases[a], 1), None),
            var("k", None, &|a| Piece::new(a + 2, taps[a], phases[a]), Some(Piece::new(0, input, 1))),
        ];
        let back = |a: usize| Piece { step: -(window.dilations[a] as isize), ..Piece::new(a + 2, taps[a], 1) };
        let from =
            |a: usize| Piece { start: (window.pads[a] / phases[a]) as isize, ..Piece::new(a + 2, positions[a], 1) };
        let data = vec![
            group(1, input),
            var("k", None, &back, Some(Piece::new(1, input, 1))),
            var("n", Some(Piece::new(0, x[0], 1)), &from, None),
        ];
        let to = |a: usize| Piece { start: -(cut[a] as isize), ..Piece::new(a + 2, positions[a], phases[a]) };
        let space = vec![
            group(1, out),
            var("m", Some(Piece::new(1, out, 1)), &|a| Piece::new(a + 2, phases[a], 1), None),
            var("n", Some(Piece::new(0, s[0], 1)), &to, None),
        ];
        let b_k = self.access(0).strides[1] == 1;
        self.part_operand("a", 1, &weights, ["m", "k"], "m")?;
        self.part_operand("b", 0, &data, ["k", "n"], if b_k { "k" } else { "n" })?;
        let product = |first: usize, each: [usize; 3]| each.iter().product::<usize>() * first;
        let [m, k, n] = [product(out, phases), product(input, taps), product(s[0], positions)];
        self.product(space, [groups, m, k, n], false, b_k, None)
    }

    /// A function of a product's operand at a point of a space over the operand's axes, zero where that goes beyond them; and one of as many
    /// halves as move together along a variable, if they lie so.
    fn part_operand(
        &mut self,
        name: &'static str,
        slot: usize,
        space: &Space,
        names: [&'static str; 2],
        along: &str,
    ) -> Result<(), String> {
        let access = self.access(slot);
        let outside = beyond(space, &access.shape);
        // By coordinates that are compared the element is addressed, too.
        let mut rest = access.clone();
        outside.keys().for_each(|&axis| rest.strides[axis] = 0);
        let plain = self.kernel.prologue(slot).is_none();
        // What a prologue makes of an element it addresses itself.
        let accesses: &[&Access] = if plain { &[&rest] } else { &[] };
        let located = locate(space, accesses, &outside.keys().copied().collect());
        let origin = |piece: &Piece| piece.start * access.strides[piece.axis];
        let start = access.offset + space.iter().flat_map(|var| &var.pieces).map(origin).sum::<isize>();
        let mut body = located.statements;
        let inside = within(&outside, &located.coordinates, &access.shape, &mut body);
        let mut terms: Vec<_> = located.addresses.into_iter().map(|address| (address, 1)).collect();
        terms.extend(outside.keys().map(|&axis| (format!("p{axis}"), access.strides[axis])));
        let address = sum(0, &terms.iter().map(|(term, stride)| (term.as_str(), *stride)).collect::<Vec<_>>());
        let guarded = |none: &str, before: Vec<String>, value: String| {
            let mut lines = body.clone();
            if inside.is_empty() {
                lines.extend(before);
                lines.push(format!("return {value};"));
                return lines;
            }
            lines.push(none.to_owned());
            lines.push(format!("if ({inside}) {{"));
            lines.extend(before.into_iter().map(|line| format!("    {line}")));
            lines.extend([format!("    value = {value};"), "}".into(), "return value;".into()]);
            lines
        };
        let (before, value) = if plain { (Vec::new(), self.load(slot, &address)) } else { self.element(slot, space)? };
        let each = guarded("var value = 0.0f;", before, value);
        // Neighbours that lie side by side, all of them within or none.
        let element = self.storage[slot];
        let width = BYTES / element.size();
        let mut run = 1;
        let mut aligned = start.unsigned_abs().is_multiple_of(width);
        for var in space {
            let mut dense = var.name == along;
            for piece in var.pieces.iter().rev().filter(|p| p.extent != 1) {
                let step = access.strides[piece.axis] * piece.step;
                dense &= step == run as isize && !outside.contains_key(&piece.axis);
                if dense {
                    run *= piece.extent;
                } else {
                    aligned &= step.unsigned_abs().is_multiple_of(width);
                }
            }
        }
        let halves = element.size() == 2 && self.storage[..2] == [element; 2] && self.value[slot] == F32;
        let lies = self.bindings.of[slot].is_some() && aligned && run.is_multiple_of(width);
        if self.dialect == Dialect::Cuda && halves && lies && plain {
            let result = format!("wide<{}, {width}>", element.name());
            let wide = guarded(&format!("{result} value = {{}};"), Vec::new(), self.read_wide(slot, width, &address));
            let (name, flag) = if name == "a" { ("a_wide", "A_WIDE") } else { ("b_wide", "B_WIDE") };
            self.wide_function(name, &matrix(names), result, wide);
            self.flags.push(flag);
        }
        self.function(name, &matrix(names), Some(F32), each);
        Ok(())
    }

    pub(super) fn pool(&mut self, window: &Window, pool: Pool) -> Launch {
        self.windowed(window, None, &[0, 1, 2]);
        self.loader("data", 0);
        let ty = if pool == Pool::Max { self.value[0] } else { F32 };
        if pool != Pool::Max && !self.value[0].is_float() {
            return Err("a mean is of floats".into());
        }
        let lowest = ty.bounds().0;
        self.start("START", if pool == Pool::Max { lowest } else { 0.0 }, ty);
        let combine = match pool {
            Pool::Max => format!("return {}(a, b);", extreme(true, ty)),
            _ => "return a + b;".into(),
        };
        self.function("combine", &[("a", ty), ("b", ty)], Some(ty), vec![combine]);
        let finish = if pool == Pool::Max { "return a;" } else { "return a / f32(max(count, 1));" };
        self.function("finish", &[("a", ty), ("count", I32)], Some(ty), vec![finish.into()]);
        for (a, axis) in ["Z", "Y", "X"].into_iter().enumerate() {
            let extent = self.access(0).shape[a + 2] as isize;
            let (low, high) = match pool {
                Pool::MeanPadded { pads_end } => (-(window.pads[a] as isize), extent + pads_end[a] as isize),
                _ => (0, extent),
            };
            self.int(format!("LOW_{axis}"), low);
            self.int(format!("HIGH_{axis}"), high);
        }
        let written = &self.kernel.writes[0].access;
        if written.has_channels_last() && !written.is_contiguous() {
            self.flags.push("CHANNELS_LAST");
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element("pool")
    }

    pub(super) fn gather(&mut self, strides: &[isize], extents: &[usize]) -> Launch {
        self.walk(|_| true);
        self.loader("data", 0);
        let space = self.flat();
        for (k, (&stride, &extent)) in strides.iter().zip(extents).enumerate() {
            let slot = 1 + k;
            let located = locate(&space, &[self.access(slot)], &BTreeSet::new());
            let mut body = located.statements;
            let (mut at, ty) = (self.load(slot, &located.addresses[0]), self.value[slot]);
            if ty == I64 {
                // What is far outside stays so.
                let [low, high] = I32.bounds().into();
                at = format!("clamp({at}, {}, {})", literal(low, I64), literal(high, I64));
            }
            body.push(format!("return {};", convert(&at, ty, I32)));
            self.function(&format!("index{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), extent as isize);
            self.int(format!("STRIDE{k}"), stride);
        }
        self.lists.insert("index", vec![Vec::new(); strides.len()]);
        self.store(&space, Some(self.value[0]), None, &[])?;
        self.per_element("gather")
    }

    pub(super) fn pad(&mut self, before: &[isize], mode: PadMode) -> Launch {
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| before[a] == 0 && data.shape[a] == shape[a]);
        moving.iter().enumerate().for_each(|(k, &a)| self.int(format!("BEFORE{k}"), before[a]));
        self.loader("data", 0);
        let ty = self.value[0];
        let fill = if let PadMode::Constant(value) = mode { value } else { 0.0 };
        self.constant("FILL", fill, ty);
        let outside: &[&str] = match mode {
            PadMode::Constant(_) => &[],
            PadMode::Edge => &["return clamp(at, 0, n - 1);"],
            PadMode::Wrap => &["let r = at % n;", "return select(r, r + n, r < 0);"],
            PadMode::Reflect => &[
                "let period = max(2 * (n - 1), 1);",
                "let r = at % period;",
                "let p = select(r, r + period, r < 0);",
                "return min(p, 2 * (n - 1) - p);",
            ],
        };
        if outside.is_empty() {
            self.flags.push("CONSTANT");
        } else {
            let outside = outside.iter().map(|&line| line.to_owned()).collect();
            self.function("outside", &[("at", I32), ("n", I32)], Some(I32), outside);
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element("pad")
    }

    pub(super) fn resize(&mut self, scales: &[f64], offsets: &[f64], mode: ResizeMode) -> Launch {
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| {
            let stays = |i: usize| match mode {
                ResizeMode::Nearest(rule) => choose(rule, i as f64 * scales[a] + offsets[a]) == i as f64,
                _ => scales[a] == 1.0 && offsets[a] == 0.0,
            };
            data.shape[a] == shape[a] && (0..shape[a]).all(stays)
        });
        for (k, &a) in moving.iter().enumerate() {
            let offset = match mode {
                ResizeMode::Nearest(rule) => nearest(rule, scales[a], offsets[a], shape[a]),
                _ => offsets[a],
            };
            self.constant(format!("SCALE{k}"), scales[a], F32);
            self.constant(format!("OFFSET{k}"), offset, F32);
        }
        self.loader("data", 0);
        let (width, first, inside, place, falloff): (usize, isize, bool, &str, Vec<String>) = match mode {
            ResizeMode::Nearest(_) => {
                self.flags.push("NEAREST");
                self.store(&self.flat(), Some(self.value[0]), None, &[])?;
                return self.per_element("resize");
            }
            ResizeMode::Linear => {
                (2, 0, false, "return clamp(x, 0.0f, f32(n - 1));", vec!["return max(1.0f - abs(d), 0.0f);".into()])
            }
            ResizeMode::Cubic { a, exclude_outside } => {
                let near = "((A + 2.0f) * e - (A + 3.0f)) * e * e + 1.0f";
                let far = "((A * e - 5.0f * A) * e + 8.0f * A) * e - 4.0f * A";
                self.constant("A", a, F32);
                let body =
                    vec!["let e = min(abs(d), 2.0f);".into(), format!("return select({far}, {near}, e <= 1.0f);")];
                (4, -1, exclude_outside, "return x;", body)
            }
        };
        self.int("WIDTH", width as isize);
        self.int("FIRST", first);
        self.int("TAPS", width.pow(moving.len() as u32) as isize);
        if inside {
            self.flags.push("INSIDE");
        }
        self.function("place", &[("x", F32), ("n", I32)], Some(F32), vec![place.into()]);
        self.function("falloff", &[("d", F32)], Some(F32), falloff);
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element("resize")
    }
}

/// From this inner extent on, the invocations of a workgroup share the inner axis of a product of few tiles.
const DEEP: usize = 128;

/// The sums of an invocation of `matmul_large`: which rows and columns of the tile each is of.
#[rustfmt::skip]
const SUMS: [[(&str, &str); 4]; 16] = [
    [("LEFT", "a0.x"), ("RIGHT", "b0"), ("DOWN", "0"), ("OVER", "0")],
    [("LEFT", "a0.x"), ("RIGHT", "b1"), ("DOWN", "0"), ("OVER", "64")],
    [("LEFT", "a0.y"), ("RIGHT", "b0"), ("DOWN", "1"), ("OVER", "0")],
    [("LEFT", "a0.y"), ("RIGHT", "b1"), ("DOWN", "1"), ("OVER", "64")],
    [("LEFT", "a0.z"), ("RIGHT", "b0"), ("DOWN", "2"), ("OVER", "0")],
    [("LEFT", "a0.z"), ("RIGHT", "b1"), ("DOWN", "2"), ("OVER", "64")],
    [("LEFT", "a0.w"), ("RIGHT", "b0"), ("DOWN", "3"), ("OVER", "0")],
    [("LEFT", "a0.w"), ("RIGHT", "b1"), ("DOWN", "3"), ("OVER", "64")],
    [("LEFT", "a1.x"), ("RIGHT", "b0"), ("DOWN", "64"), ("OVER", "0")],
    [("LEFT", "a1.x"), ("RIGHT", "b1"), ("DOWN", "64"), ("OVER", "64")],
    [("LEFT", "a1.y"), ("RIGHT", "b0"), ("DOWN", "65"), ("OVER", "0")],
    [("LEFT", "a1.y"), ("RIGHT", "b1"), ("DOWN", "65"), ("OVER", "64")],
    [("LEFT", "a1.z"), ("RIGHT", "b0"), ("DOWN", "66"), ("OVER", "0")],
    [("LEFT", "a1.z"), ("RIGHT", "b1"), ("DOWN", "66"), ("OVER", "64")],
    [("LEFT", "a1.w"), ("RIGHT", "b0"), ("DOWN", "67"), ("OVER", "0")],
    [("LEFT", "a1.w"), ("RIGHT", "b1"), ("DOWN", "67"), ("OVER", "64")],
];

/// The array in which lanes exchange values of a type.
fn shared(ty: Type) -> &'static str {
    match ty {
        F32 => "shared_f32",
        F64 => "shared_f64",
        I64 => "shared_i64",
        _ => "shared_i32",
    }
}

fn choose(rule: Nearest, x: f64) -> f64 {
    match rule {
        Nearest::Floor => x.floor(),
        Nearest::Ceil => x.ceil(),
        Nearest::RoundPreferFloor => (x - 0.5).ceil(),
        Nearest::RoundPreferCeil => (x + 0.5).floor(),
    }
}

/// The offset with which `floor(f32(index) * scale + offset)` in `f32` is the neighbour that the rule chooses in `f64`, for
/// every index, with room for rounding. Ties are moved by less than any other coordinate is away from one.
fn nearest(rule: Nearest, scale: f64, offset: f64, extent: usize) -> f64 {
    let shift = match rule {
        Nearest::Floor => 0.0,
        Nearest::Ceil => 1.0,
        Nearest::RoundPreferFloor | Nearest::RoundPreferCeil => 0.5,
    };
    let agrees = |moved: f64| {
        (0..extent).all(|i| {
            let wanted = choose(rule, i as f64 * scale + offset);
            let got = i as f64 * f64::from(scale as f32) + f64::from(moved as f32);
            let room = (i as f64 * scale).abs().max(1.0) * f64::from(f32::EPSILON) * 2.0;
            (got - room).floor() == wanted && (got + room).floor() == wanted
        })
    };
    let nudges = [0.0, 1e-4, -1e-4, 1e-3, -1e-3, 1e-2, -1e-2];
    let exact = offset + shift;
    nudges.iter().map(|nudge| exact + nudge).find(|&moved| agrees(moved)).unwrap_or(exact)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rendered formula, in the device's precision, against the rule.
    #[test]
    fn neighbours_are_exact_at_ties() {
        let rules = [Nearest::Floor, Nearest::Ceil, Nearest::RoundPreferFloor, Nearest::RoundPreferCeil];
        for rule in rules {
            for (from, to) in [(1, 3), (3, 1), (4, 8), (7, 5), (100, 300), (333, 1000), (1000, 333), (5, 5)] {
                let scale = f64::from(from) / f64::from(to);
                // Ties that f64 itself cannot tell are moved, as the operator's row does.
                let away = f64::from(from) * (-21f64).exp2();
                let away = if matches!(rule, Nearest::Floor | Nearest::RoundPreferCeil) { away } else { -away };
                let exact = to == 8 || to == 5 && from == 5;
                for offset in [0.0, 0.5 * scale - 0.5].map(|o| if exact { o } else { o + away }) {
                    let moved = nearest(rule, scale, offset, to as usize) as f32;
                    for i in 0..to {
                        let got = (i as f32 * scale as f32 + moved).floor();
                        let wanted = choose(rule, f64::from(i) * scale + offset);
                        assert_eq!(f64::from(got), wanted, "{rule:?} {from}/{to} + {offset} at {i}");
                    }
                }
            }
        }
    }
}
