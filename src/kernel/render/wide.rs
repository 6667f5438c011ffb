//! What moves up to 16 bytes at a time: CUDA's elementwise kernels and rows that lie densely, and operands of products and attention.

use super::locate::{Space, locate, over};
use super::scalar::Type::{self, BF16, F16, F32, F64, I32, Vec4};
use super::scalar::convert;
use super::thin::THIN;
use super::{Dialect, Input, Module, Scalars};
use crate::expr::{Body, Code};
use crate::kernel::RowFold;
use crate::kernel::layout::prologue::suits_warps;
use crate::kernel::library::{SPLIT_TILE, WARPGROUP_BYTES, WARPGROUP_TILE, few_tiles, fill_warpgroups};
use crate::shape::Access;
use crate::target::FEW_GROUPS;
use std::collections::{BTreeMap, BTreeSet};

/// A launch, or that the kernel is not one of these.
type Maybe = Result<Option<(&'static str, u32, u64)>, String>;

/// Bytes of the widest access.
pub(super) const BYTES: usize = 16;
/// Elements of one operand that an invocation may hold in registers, and of all together.
const HELD: usize = 32;
const HELD_ALL: usize = 64;

/// How an access moves along some axes, walked as one.
#[derive(Clone, Copy, PartialEq)]
enum Along {
    /// Element by element: from run to run of this many.
    Dense(usize),
    /// Not at all, for this many elements.
    Still(usize),
    /// In another way.
    Other,
}

/// How an access moves along the axes from `first` on.
fn along(access: &Access, first: usize) -> Along {
    let axes = || (first..access.shape.len()).rev().filter(|&k| access.shape[k] != 1);
    let run = |expected: fn(usize) -> isize| {
        let mut run = 1usize;
        for k in axes() {
            if access.strides[k] != expected(run) {
                break;
            }
            run *= access.shape[k];
        }
        run
    };
    match (run(|run| run as isize), run(|_| 0)) {
        (1, 1) if axes().next().is_none() => Along::Still(1),
        (1, 1) => Along::Other,
        (dense, 1) => Along::Dense(dense),
        (_, still) => Along::Still(still),
    }
}

/// Whether every run of `run` elements starts at a multiple of `width`.
fn aligned(access: &Access, run: usize, width: usize) -> bool {
    let mut inside = 1;
    let step = |(&extent, &stride): (&usize, &isize)| {
        let within = inside < run;
        inside *= extent;
        extent == 1 || within || stride.unsigned_abs().is_multiple_of(width)
    };
    access.offset.unsigned_abs().is_multiple_of(width) && access.shape.iter().zip(&access.strides).rev().all(step)
}

pub(super) fn inputs(body: &Body) -> BTreeSet<usize> {
    let input = |code| if let Code::Input(j) = code { Some(j as usize) } else { None };
    body.code.iter().filter_map(|i| input(i.code)).collect()
}

fn indexed(body: &Body) -> bool {
    body.code.iter().any(|i| matches!(i.code, Code::Index(_)))
}

/// How a large product is computed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Tile {
    /// With 8 by 8 sums of this type per invocation.
    Plain(Type),
    /// In tiles of this many rows, whose inner axis warps share.
    Split(usize),
    /// On tensor cores, in tiles of this many rows and columns, from elements of this type.
    Halves(usize, Type),
    /// On those of compute capability 9.0, from elements of this type.
    Warpgroups(Type),
}

/// The parameters of a function of an element of a batch of matrices.
pub(super) fn matrix([first, second]: [&'static str; 2]) -> [(&'static str, Type); 3] {
    [("batch", I32), (first, I32), (second, I32)]
}

impl Module<'_> {
    /// The tiles of CUDA for a product, `sent` if its operands lie 16 bytes at a time, the right one along the inner axis if `b_k`.
    pub(super) fn tile(&self, [batch, m, k, n]: [usize; 4], sent: bool, b_k: bool) -> Option<Tile> {
        let tiles = |size: usize| batch * m.div_ceil(size) * n.div_ceil(size);
        let element = self.storage[0];
        if self.dialect != Dialect::Cuda || m <= THIN || n <= THIN {
            return None;
        }
        match element {
            F16 | BF16 if self.storage[1] == element && suits_warps([m, k, n]) => Some(match () {
                () if sent && b_k && fill_warpgroups([batch, m, n], self.target) => Tile::Warpgroups(element),
                () if tiles(128) >= 96 => Tile::Halves(128, element),
                () => Tile::Halves(64, element),
            }),
            F64 if m > 16 && n > 16 => Some(Tile::Plain(F64)),
            F32 if sent && few_tiles(tiles(SPLIT_TILE) as u64, self.target) => {
                let full = m > 16 && tiles(SPLIT_TILE) >= self.target.multiprocessors as usize;
                Some(Tile::Split(if full { SPLIT_TILE } else { SPLIT_TILE / 2 }))
            }
            _ if tiles(128) >= 96 => Some(Tile::Plain(self.value[0])),
            _ => None,
        }
    }

    /// The constants of a product of few rows whose right operand is read by `b_wide`.
    pub(super) fn slim(&mut self, [batch, k, n]: [usize; 3], b_k: bool) -> (&'static str, u32, u64) {
        let width = BYTES / self.storage[0].size();
        self.int("WIDTH", width as isize);
        let (size, each) = if b_k {
            (128, 4)
        } else {
            // Many bytes have to be on their way at once: as many workgroups as occupy a large device, of as many warps as share the inner axis.
            let busy = |lanes: &usize| lanes * width <= n && batch * n.div_ceil(lanes * width) >= 2 * FEW_GROUPS;
            let lanes = [32, 16, 8, 4].into_iter().find(busy).unwrap_or(2);
            let size = (lanes * k.next_power_of_two()).clamp(64, 512);
            let slices = size / lanes;
            self.flags.push("B_ROWS");
            self.int("LANES", lanes as isize);
            self.int("SLICES", slices as isize);
            self.int("UNROLL", if k < 16 * slices { 4 } else { 8 });
            self.shared.push(("partial", F32, size / 32 * lanes * width));
            (size as u32, lanes * width)
        };
        let tiles = n.div_ceil(each);
        self.int("TILES_N", tiles as isize);
        ("matmul_slim", size, (batch * tiles) as u64)
    }

    /// A function that reads 16 bytes of a product's operand at once, where they lie so along an axis.
    pub(super) fn wide_operand(&mut self, name: &'static str, slot: usize, space: &Space, axis: usize) {
        let width = BYTES / self.storage[slot].size();
        let plain = self.storage[0] == self.storage[1] && self.value[slot] == F32;
        // What a prologue makes of elements is not in memory.
        if !self.lies(slot, axis, width) || !plain || self.kernel.prologue(slot).is_some() {
            return;
        }
        let (mut body, address) = self.address(slot, space);
        body.push(format!("return {};", self.read_wide(slot, width, &address)));
        let result = format!("wide<{}, {width}>", self.storage[slot].name());
        let (params, flag) = if name == "a_wide" { (["m", "k"], "A_WIDE") } else { (["k", "n"], "B_WIDE") };
        self.wide_function(name, &matrix(params), result, body);
        self.flags.push(flag);
    }

    /// Declares a function that reads four elements of a matrix at once along an axis of it, if they lie so. `space` is the operand's.
    pub(super) fn fours(
        &mut self,
        name: &str,
        slot: usize,
        space: &Space,
        names: [&'static str; 2],
        axis: usize,
    ) -> bool {
        if self.storage[slot] != F32 || self.kernel.prologue(slot).is_some() || !self.lies(slot, axis, 4) {
            return false;
        }
        let (mut body, address) = self.address(slot, space);
        if self.dialect == Dialect::Cuda {
            body.push(format!("return {};", self.read_wide(slot, 4, &address)));
            self.wide_function(name, &matrix(names), "wide<f32, 4>".into(), body);
            return true;
        }
        // The binding is one of vectors then: it may hold nothing else.
        let alone = |b: &usize| self.bindings.of.iter().filter(|other| **other == Some(*b)).count() == 1;
        let Some(binding) = self.bindings.of[slot].filter(alone) else {
            return false;
        };
        self.bound[binding] = Vec4;
        body.push(format!("return b{binding}[({address}) >> 2u];"));
        self.function(name, &matrix(names), Some(Vec4), body);
        true
    }

    /// Whether an operand has elements that can be moved `width` at a time along an axis.
    pub(super) fn lies(&self, slot: usize, axis: usize, width: usize) -> bool {
        self.bindings.of[slot].is_some() && self.access(slot).lies(axis, width)
    }

    /// Where an operand's element lies at a point of a space.
    pub(super) fn address(&self, slot: usize, space: &Space) -> (Vec<String>, String) {
        let mut located = locate(space, &[self.access(slot)], &BTreeSet::new());
        (located.statements, located.addresses.remove(0))
    }

    /// A function that gives the address of an element of a batch of matrices.
    pub(super) fn address_function(&mut self, name: &str, slot: usize, space: &Space, params: [&'static str; 2]) {
        let (mut body, address) = self.address(slot, space);
        let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
        body.push(format!("return b{b} + ({address});"));
        self.wide_function(name, &matrix(params), "const void*".into(), body);
    }

    /// The constants of a tile, whose operands are dense along the inner axis or not.
    pub(super) fn tiled(
        &mut self,
        tile: Tile,
        [batch, m, n]: [usize; 3],
        [a_k, b_k]: [bool; 2],
        sent: Option<[(usize, &Space); 2]>,
    ) -> Result<(&'static str, u32, u64), String> {
        let (rows, columns) = match tile {
            Tile::Plain(_) => (128, 128),
            Tile::Split(rows) => (rows, SPLIT_TILE),
            Tile::Halves(size, _) => (if sent.is_some() && m <= 64 { 64 } else { size }, size),
            Tile::Warpgroups(_) => WARPGROUP_TILE.into(),
        };
        let (tiles_m, tiles_n) = (m.div_ceil(rows), n.div_ceil(columns));
        self.int("TILES_M", tiles_m as isize);
        self.int("TILES_N", tiles_n as isize);
        let groups = (batch * tiles_m * tiles_n) as u64;
        if let Some([(a, of_a), (b, of_b)]) = sent.filter(|_| !matches!(tile, Tile::Plain(_))) {
            self.address_function("a_at", a, of_a, ["m", "k"]);
            self.address_function("b_at", b, of_b, ["k", "n"]);
        }
        match tile {
            Tile::Plain(ty) => {
                self.declarations.push(format!("typedef {} value;", ty.name()));
                let steps = |inner: bool| if inner { (8, 1) } else { (1, 128) };
                let ((am, ak), (bn, bk)) = (steps(a_k), steps(b_k));
                for (name, step) in [("A_M_STEP", am), ("A_K_STEP", ak), ("B_N_STEP", bn), ("B_K_STEP", bk)] {
                    self.int(name, step);
                }
                self.shared.push(("tile_a", ty, 2 * 8 * 132));
                self.shared.push(("tile_b", ty, 2 * 8 * 132));
                Ok(("matmul_tile", 256, groups))
            }
            Tile::Split(_) => {
                self.int("TILE_M", rows as isize);
                if !b_k {
                    self.flags.push("B_ROWS");
                }
                self.shared.push(("tile", F32, 8 * (rows + columns).saturating_mul(3 * 8).max(rows * columns)));
                Ok(("matmul_split", 256, groups))
            }
            Tile::Halves(_, element) | Tile::Warpgroups(element) => {
                self.declarations.push(format!("typedef {} element;", element.name()));
                self.int("TILE_M", rows as isize);
                self.int("TILE_N", columns as isize);
                if matches!(tile, Tile::Warpgroups(_)) {
                    self.shared.push(("tile", element, WARPGROUP_BYTES / element.size()));
                    return Ok(("matmul_warpgroup", 256, groups));
                }
                if !b_k {
                    self.flags.push("B_ROWS");
                }
                if !a_k {
                    self.flags.push("A_ROWS");
                }
                if sent.is_some() {
                    let stages = 3 * (rows + columns) * 32;
                    let sums = 2 * (rows / 2) * (columns + 8);
                    self.shared.push(("tile", element, stages.max(sums)));
                    return Ok(("matmul_stream", 128, groups));
                }
                let half = |inner: bool, lines: usize| if inner { lines * 40 } else { 32 * (lines + 8) };
                self.shared.push(("tile_a", element, 2 * half(a_k, rows)));
                self.shared.push(("tile_b", element, 2 * half(b_k, columns)));
                Ok(("matmul_mma", 256, groups))
            }
        }
    }

    /// An expression for `width` elements of an operand at an address.
    pub(super) fn read_wide(&self, slot: usize, width: usize, address: &str) -> String {
        let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
        format!("read<{}, {width}>(b{b} + ({address}))", self.storage[slot].name())
    }

    /// The body for `width` elements from variable `at` on: reads by way of `input`, results into `o0`, `o1` ...
    fn wide_loop(&self, scalars: Scalars, width: usize) -> Vec<String> {
        let mut lines = Vec::new();
        for (w, _) in scalars.results.iter().enumerate() {
            let slot = self.kernel.reads.len() + w;
            lines.push(format!("wide<{}, {width}> o{w};", self.storage[slot].name()));
        }
        lines.push("#pragma unroll".into());
        lines.push(format!("for (i32 v = 0; v < {width}; v++) {{"));
        lines.extend(scalars.statements.into_iter().map(|s| format!("    {s}")));
        for (w, (value, ty)) in scalars.results.iter().enumerate() {
            let stored = convert(value, *ty, self.storage[self.kernel.reads.len() + w]);
            lines.push(format!("    o{w}.v[v] = {stored};"));
        }
        lines.push("}".into());
        for (w, address) in scalars.addresses.iter().enumerate() {
            let slot = self.kernel.reads.len() + w;
            let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
            lines.push(format!("write(b{b} + ({address}), o{w});"));
        }
        lines
    }

    /// The widest access that all operands allow, one element at least.
    fn width(&self, slots: impl Iterator<Item = usize>, fits: impl Fn(usize, usize) -> bool) -> usize {
        let slots: Vec<usize> = slots.collect();
        let most = slots.iter().map(|&s| BYTES / self.storage[s].size()).min().unwrap_or(1);
        let mut width = most;
        while width > 1 && !slots.iter().all(|&slot| fits(slot, width)) {
            width /= 2;
        }
        width
    }

    pub(super) fn map_wide(&mut self) -> Maybe {
        let kernel = self.kernel;
        let count = kernel.shape.numel();
        let reads = kernel.reads.len();
        if self.dialect != Dialect::Cuda || count == 0 || indexed(&kernel.body) {
            return Ok(None);
        }
        let used = inputs(&kernel.body);
        let slots: Vec<usize> = used.iter().copied().chain(reads..reads + kernel.writes.len()).collect();
        let ways: BTreeMap<usize, Along> = slots.iter().map(|&s| (s, along(self.access(s), 0))).collect();
        let fits = |slot: usize, width: usize| match ways[&slot] {
            Along::Dense(run) => (run == count || run.is_multiple_of(width)) && aligned(self.access(slot), run, width),
            Along::Still(run) => slot < reads && (run == count || run.is_multiple_of(width)),
            Along::Other => false,
        };
        let width = self.width(slots.iter().copied(), fits);
        let whole = |slot: &usize| matches!(ways[slot], Along::Dense(run) | Along::Still(run) if run == count);
        let tail = !count.is_multiple_of(width);
        if width == 1 || tail && !slots.iter().all(whole) {
            return Ok(None);
        }
        let space = self.flat();
        let accesses: Vec<&Access> = used.iter().map(|&s| self.access(s)).collect();
        let located = locate(&space, &accesses, &BTreeSet::new());
        let mut lines = located.statements;
        for (&slot, address) in used.iter().zip(&located.addresses) {
            let value = match ways[&slot] {
                Along::Dense(_) => self.read_wide(slot, width, address),
                _ => self.load(slot, address),
            };
            lines.push(format!("const auto x{slot} = {value};"));
        }
        let input = |j: u32| {
            let slot = j as usize;
            match ways[&slot] {
                Along::Dense(_) => {
                    let element = format!("x{slot}.v[v]");
                    Input::Value(convert(&element, self.storage[slot], self.value[slot]), self.value[slot])
                }
                _ => Input::Value(format!("x{slot}"), self.value[slot]),
            }
        };
        let scalars = self.body(&kernel.body, &space, input, &[], &[])?;
        let writes: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
        let stores = locate(&space, &writes, &BTreeSet::new());
        let Scalars { statements, results, .. } = scalars;
        let mut wide = self.wide_loop(Scalars { statements, results, addresses: stores.addresses }, width);
        // Coordinates of reads and of writes may have the same names: the stores stand in a block of their own.
        let store = wide.len() - kernel.writes.len();
        let tail_lines: Vec<String> = wide.drain(store..).collect();
        lines.extend(wide);
        lines.push("{".into());
        lines.extend(stores.statements.into_iter().chain(tail_lines).map(|s| format!("    {s}")));
        lines.push("}".into());
        self.function("store_wide", &[("i", I32)], None, lines);
        if tail {
            self.flags.push("TAIL");
            self.store(&space, None, None, &[])?;
        }
        let size = if count < 1 << 18 { 128 } else { 256 };
        let turns = if count < 1 << 22 { 1 } else { 2 };
        for (name, value) in [("COUNT", count), ("WIDTH", width), ("TURNS", turns)] {
            self.int(name, value as isize);
        }
        let each = size as usize * width * turns;
        Ok(Some(("map_wide", size, count.div_ceil(each) as u64)))
    }

    pub(super) fn row_team(&mut self, inner: usize, folds: &[RowFold], per_row: bool) -> Maybe {
        let kernel = self.kernel;
        let shape = &kernel.shape;
        let outer = shape.len() - inner;
        let rows: usize = shape[..outer].iter().product();
        let length: usize = shape[outer..].iter().product();
        let reads = kernel.reads.len();
        let bodies = || folds.iter().map(|f| &f.body).chain([&kernel.body]);
        let few = rows > 0 && rows < 1 << 30 && length < 1 << 30;
        if self.dialect != Dialect::Cuda || !few || length < 32 || bodies().any(indexed) {
            return Ok(None);
        }
        // What moves along the row: of the reads, what folds use is held; what only the body uses comes when it runs.
        let folded: BTreeSet<usize> = folds.iter().flat_map(|f| inputs(&f.body)).collect();
        let finished: BTreeSet<usize> = inputs(&kernel.body);
        let writes = reads..reads + kernel.writes.len();
        let mut moving = Vec::new();
        for slot in folded.union(&finished).copied().chain(writes.clone().filter(|_| !per_row)) {
            match along(self.access(slot), outer) {
                Along::Dense(run) if run == length => moving.push(slot),
                Along::Still(run) if run == length && slot < reads => {}
                _ => return Ok(None),
            }
        }
        let fits =
            |slot: usize, width: usize| length.is_multiple_of(width) && aligned(self.access(slot), length, width);
        let width = self.width(moving.iter().copied(), fits);
        let mut team = 32;
        let wants = |team: usize| length > HELD / 2 * team || rows * team < 1 << 16 && length > 2 * width * team;
        while team < 1024 && wants(team) {
            team *= 2;
        }
        let per_group = (128 / team).max(1);
        let size = team * per_group;
        let chunks = length.div_ceil(team * width);
        let held: Vec<usize> = moving.iter().copied().filter(|s| folded.contains(s)).collect();
        let late: Vec<usize> =
            moving.iter().copied().filter(|s| *s < reads && !folded.contains(s) && !per_row).collect();
        let keeps = chunks * width <= HELD && chunks * width * held.len() <= HELD_ALL;
        let space: Space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (letter, list, length) in [("x", &held, if keeps { chunks } else { 1 }), ("y", &late, 1)] {
            for (k, &slot) in list.iter().enumerate() {
                self.declarations.push(format!("wide<{}, {width}> {letter}{k}[{length}];", self.storage[slot].name()));
                let at = if letter == "x" { "c" } else { "0" };
                names.insert(slot, format!("{letter}{k}[{at}].v[v]"));
                let located = locate(&space, &[self.access(slot)], &BTreeSet::new());
                let mut body = located.statements;
                body.push(format!("return {};", self.read_wide(slot, width, &located.addresses[0])));
                let result = format!("wide<{}, {width}>", self.storage[slot].name());
                self.wide_function(&format!("load_{letter}{k}"), &[("row", I32), ("j", I32)], result, body);
            }
        }
        let input = |module: &Module, j: u32| {
            let slot = j as usize;
            match names.get(&slot) {
                Some(name) => Input::Value(convert(name, module.storage[slot], module.value[slot]), module.value[slot]),
                None => Input::Slot(slot),
            }
        };
        let parameters = [("row", I32), ("j", I32), ("c", I32), ("v", I32)];
        let types = self.folds(folds, &space, &parameters, input)?;
        if per_row {
            self.store(&vec![over("row", shape, 0..outer)], None, None, &types)?;
            self.flags.push("PER_ROW");
        } else {
            let code = self.body(&kernel.body, &space, |j| input(self, j), &[], &types)?;
            let accesses: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
            let stores = locate(&space, &accesses, &BTreeSet::new());
            let Scalars { statements, results, .. } = code;
            let mut lines = self.wide_loop(Scalars { statements, results, addresses: stores.addresses }, width);
            let last = lines.len() - kernel.writes.len();
            lines.splice(last..last, stores.statements);
            self.function("finish", &parameters[..3], None, lines);
        }
        let constants = [
            ("COUNT", rows),
            ("LENGTH", length),
            ("TEAM", team),
            ("ROWS", per_group),
            ("WIDTH", width),
            ("CHUNKS", chunks),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if keeps {
            self.flags.push("KEEPS");
        } else {
            let loads = (0..held.len()).map(|k| format!("x{k}[0] = load_x{k}(row, j);")).collect();
            self.function("again", &parameters[..2], None, loads);
        }
        self.share(&types, size / 32);
        self.lists.insert("held", vec![Vec::new(); held.len()]);
        self.lists.insert("late", vec![Vec::new(); late.len()]);
        Ok(Some(("row_team", size as u32, rows.div_ceil(per_group) as u64)))
    }

    /// A function whose result is several elements.
    pub(super) fn wide_function(
        &mut self,
        name: &str,
        params: &[(&'static str, Type)],
        result: String,
        body: Vec<String>,
    ) {
        let params: Vec<String> = params.iter().map(|(name, ty)| format!("{} {name}", ty.name())).collect();
        let head = format!("const auto {name} = [&]({}) -> {result} {{", params.join(", "));
        self.declarations.push(head);
        self.declarations.extend(body.into_iter().map(|line| format!("    {}", line.replace("let ", "const auto "))));
        self.declarations.push("};".into());
    }
}
