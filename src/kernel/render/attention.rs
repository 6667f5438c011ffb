//! The holes of the attention templates.

use super::locate::{Space, Var, locate, over};
use super::scalar::Type::{BF16, F16, F32, I32};
use super::scalar::convert;
use super::templates::Launch;
use super::wide::{BYTES, matrix};
use super::{Dialect, Input, Module};
use crate::expr::Body;
use std::collections::{BTreeMap, BTreeSet};

/// Sums that an invocation holds at most.
const SUMS: usize = 16;
/// Slices of the inner axis that pass through workgroup memory at a time.
const STEP: usize = 16;

/// Extents of an attention: heads, rows of queries, columns of queries, rows and columns of values.
struct Extents {
    batch: usize,
    m: usize,
    k: usize,
    n: usize,
    e: usize,
}

/// How an attention is cut into workgroups, and what these hold.
enum Cut {
    /// Scores pass through workgroup memory.
    Plain,
    /// Rows of the result and keys at a time; scores and sums are held in registers.
    Tile { rows: usize, columns: usize },
    /// The same on tensor cores.
    Warps(Warps),
}

/// How an attention of halves is shared among the warps of a workgroup.
struct Warps {
    /// Rows of the result; a warp has 16.
    rows: usize,
    /// Warps that share these rows, each with keys of its own.
    teams: usize,
    /// Keys of a team at a time.
    columns: usize,
}

impl Module<'_> {
    /// Rows of the result in a workgroup of `size`: many, so that keys and values are read seldom, but not so many that a row's
    /// sums do not fit in registers, or that few workgroups are left.
    fn attention_rows(&self, size: usize, &Extents { batch, m, e, .. }: &Extents) -> usize {
        let fits = |rows: usize| e.div_ceil(size / rows) <= SUMS;
        let busy = |rows: usize| batch * m.div_ceil(rows) >= 128;
        let most = m.next_power_of_two().min(32);
        let all = || (0..=5).rev().map(|i| 1usize << i).filter(|&rows| rows <= most && fits(rows));
        all().find(|&rows| busy(rows)).or_else(|| all().find(|&rows| rows <= 8)).unwrap_or(1)
    }

    pub(super) fn attention(&mut self, score: &Body, guarded: bool) -> Launch {
        let shape = &self.kernel.shape;
        let rank = shape.len();
        let extents = Extents {
            batch: shape[..rank - 2].iter().product(),
            m: shape[rank - 2],
            k: self.access(0).shape[rank - 1],
            n: self.access(1).shape[rank - 1],
            e: shape[rank - 1],
        };
        if !self.value[..3].iter().all(|ty| *ty == F32) {
            return Err("attention is of floats".into());
        }
        for (slot, name, names) in [(0, "a", ["m", "k"]), (1, "b", ["k", "n"]), (2, "c", ["n", "e"])] {
            let (mut body, address) = self.address(slot, &space(&self.access(slot).shape, names));
            let load = self.load(slot, &address);
            if name == "c" {
                // The last lanes may have no column.
                body.push("var value = 0.0f;".into());
                body.push(format!("if (e < {}) {{ value = {load}; }}", extents.e));
                body.push("return value;".into());
            } else {
                body.push(format!("return {load};"));
            }
            self.function(name, &matrix(names), Some(F32), body);
        }
        self.constant("LOWEST", f32::MIN.into(), F32);
        let Extents { m, k, n, e, .. } = extents;
        [("M", m), ("N", n), ("K", k), ("COLUMNS_OUT", e)].iter().for_each(|&(name, v)| self.int(name, v as isize));
        if guarded {
            self.flags.push("GUARDED");
        }
        let cut = self.cut(&extents);
        match &cut {
            Cut::Plain => self.score_each(score, n)?,
            &Cut::Tile { rows, columns } => self.score_pairs(score, &extents, [rows, columns])?,
            Cut::Warps(warps) => self.score_pairs(score, &extents, [warps.rows, warps.teams * warps.columns])?,
        }
        let outs: Vec<Var> = space(shape, ["m", "n"]);
        self.store(&outs, Some(F32), Some("m < M && n < COLUMNS_OUT"), &[])?;
        match &cut {
            Cut::Plain => self.attention_plain(&extents),
            &Cut::Tile { rows, columns } => self.attention_tile(&extents, [rows, columns]),
            Cut::Warps(warps) => self.attention_mma(&extents, warps),
        }
    }

    /// CUDA's kernels take as many rows and keys at a time as fit, and fewer rows where multiprocessors would be idle.
    fn cut(&self, extents: &Extents) -> Cut {
        let &Extents { batch, m, k, e, .. } = extents;
        if self.dialect != Dialect::Cuda || m <= FEW || k == 0 {
            return Cut::Plain;
        }
        if let Some(warps) = self.warps(extents) {
            return Cut::Warps(warps);
        }
        let most = self.target.max_shared as usize;
        let fits = |&(rows, columns): &(usize, usize)| {
            let width = tile_width(e).0;
            rows / 8 * (width / 16) <= 64 && 4 * tile_len(rows, columns, k, width) <= most
        };
        let cuts = [(64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32)].into_iter().filter(fits);
        let busy = |rows: usize| batch * m.div_ceil(rows) >= 2 * self.target.multiprocessors as usize;
        let enough = cuts.clone().find(|&(rows, _)| m > rows / 2 && busy(rows));
        match enough.or_else(|| cuts.clone().find(|&(rows, _)| rows == 16)) {
            Some((rows, columns)) => Cut::Tile { rows, columns },
            None => Cut::Plain,
        }
    }

    /// A function `score(batch, m, n, value)`; what is outside is lowest.
    fn score_each(&mut self, score: &Body, n: usize) -> Result<(), String> {
        let mut columns = self.kernel.shape.clone();
        columns[self.kernel.shape.len() - 1] = n;
        let input = |j: u32| match j {
            0 => Input::Value("value".into(), F32),
            _ => Input::Slot(2 + j as usize),
        };
        let code = self.body(score, &space(&columns, ["m", "n"]), input, &[], &[])?;
        let (value, from) = &code.results[0];
        let mut body = vec!["var result = LOWEST;".to_owned(), "if (m < M && n < N) {".to_owned()];
        body.extend(code.statements.iter().map(|line| format!("    {line}")));
        body.push(format!("    result = {};", convert(value, *from, F32)));
        body.extend(["}".to_owned(), "return result;".to_owned()]);
        let [b, first, second] = matrix(["m", "n"]);
        self.function("score", &[b, first, second, ("value", F32)], Some(F32), body);
        Ok(())
    }

    fn attention_plain(&mut self, extents: &Extents) -> Launch {
        let &Extents { batch, m, e, .. } = extents;
        let rank = self.kernel.shape.len();
        let most = 1usize << self.target.max_workgroup.min(256).ilog2();
        let rows = self.attention_rows(most, extents);
        let width = (1024 / rows).clamp(32, 128);
        let size = most.min(rows * width);
        let lanes = size / rows;
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let (along_a, along_b) = (!dense(0, rank - 2) || dense(0, rank - 1), !dense(1, rank - 1));
        let (am, ak) = if along_a { (STEP, 1) } else { (1, rows) };
        let (bn, bk) = if along_b { (STEP, 1) } else { (1, width) };
        let groups = m.div_ceil(rows);
        let constants = [
            ("ROWS", rows),
            ("COLUMNS", width),
            ("LANES", lanes),
            ("GROUPS", groups),
            ("STEP", STEP),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.lists.insert("sum", vec![Vec::new(); e.div_ceil(lanes)]);
        self.lists.insert("product", vec![Vec::new(); rows * width / size]);
        self.shared.push(("tile_a", F32, rows * STEP));
        self.shared.push(("tile_b", F32, width * STEP));
        self.shared.push(("scores", F32, rows * width));
        self.shared.push(("partial", F32, size));
        Ok(("attention", size as u32, (batch * groups) as u64))
    }

    /// How tensor cores compute an attention: of halves, by instructions that came with compute capability 8.0,
    /// whose sums, scores and queries fit in registers, and of whose keys and values some fit in workgroup memory. Rows are shared among
    /// more workgroups, and their keys among the warps of each, where multiprocessors would be idle.
    fn warps(&self, &Extents { batch, m, k, n, e }: &Extents) -> Option<Warps> {
        let element = self.storage[0];
        let halves = matches!(element, F16 | BF16) && self.storage[..3].iter().all(|ty| *ty == element);
        if self.target.compute < 80 || !halves || k.max(e) > WIDEST {
            return None;
        }
        let busy = |rows: usize| batch * m.div_ceil(rows) >= 2 * self.target.multiprocessors as usize;
        let rows = [64, 32].into_iter().find(|&rows| m > rows / 2 && busy(rows)).unwrap_or(16);
        let all = [64, 32, 16].into_iter().flat_map(|columns| [4, 2, 1].map(|teams| Warps { rows, teams, columns }));
        let fits = |w: &Warps| {
            w.teams * rows <= 64
                && w.teams * w.columns < n + 16 * w.teams
                && w.columns * k.max(e) <= 64 * 128
                && w.bytes(k, e) <= self.target.max_shared as usize
        };
        let keys = |w: &Warps| w.teams * w.columns;
        // The more keys at a time, the fewer barriers; of as many, in more teams.
        all.filter(fits).max_by_key(|w| (keys(w).min(128), w.teams))
    }
}

/// An attention of so few rows has next to nothing that could stay in registers.
const FEW: usize = 4;
/// The widest queries and results that are held in registers.
const WIDEST: usize = 256;

impl Warps {
    /// Bytes of workgroup memory: keys and values, in whose place teams leave what they found.
    fn bytes(&self, k: usize, e: usize) -> usize {
        let (depth, width) = (k.next_multiple_of(16), e.next_multiple_of(16));
        let tiles = 2 * self.teams * self.columns * (depth + 8 + width + 8);
        let kept = 4 * (self.teams - 1) * (4 + width / 2) * self.rows * 2;
        tiles.max(kept)
    }
}

/// Columns of the values in workgroup memory for a result of `e`, and how many neighbours an invocation has.
fn tile_width(e: usize) -> (usize, usize) {
    let each = (e.div_ceil(16).next_power_of_two()).min(4);
    (e.next_multiple_of(16 * each), each)
}

/// Elements of workgroup memory: queries, keys or else weights, values.
fn tile_len(rows: usize, columns: usize, k: usize, width: usize) -> usize {
    k * rows + k.max(rows) * columns + columns * width
}

impl Module<'_> {
    fn attention_tile(&mut self, extents: &Extents, [rows, columns]: [usize; 2]) -> Launch {
        let &Extents { batch, m, k, e, .. } = extents;
        let rank = self.kernel.shape.len();
        let (width, each) = tile_width(e);
        for (slot, name, flag, names, axis) in [
            (0, "a_wide", "A_WIDE", ["m", "k"], rank - 1),
            (1, "b_wide", "B_WIDE", ["k", "n"], rank - 2),
            (2, "c_wide", "C_WIDE", ["n", "e"], rank - 1),
        ] {
            if self.storage[slot] == F32 && self.lies(slot, axis, 4) {
                let (mut body, address) = self.address(slot, &space(&self.access(slot).shape, names));
                body.push(format!("return {};", self.read_wide(slot, 4, &address)));
                self.wide_function(name, &matrix(names), "wide<f32, 4>".into(), body);
                self.flags.push(flag);
            }
        }
        if each > 1 {
            self.store_pairs(e);
        }
        let groups = m.div_ceil(rows);
        let first = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let (rows_first, keys_first) = (first(0, rank - 2), first(1, rank - 1));
        let steps = |first: bool, count: usize| if first { (1, count) } else { (k, 1) };
        let ((am, ak), (bn, bk)) = (steps(rows_first, rows), steps(keys_first, columns));
        let constants = [
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("WIDTH", width),
            ("EACH", each),
            ("GROUPS", groups),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.shared.push(("tile", F32, tile_len(rows, columns, k, width)));
        Ok(("attention_tile", 128, (batch * groups) as u64))
    }

    fn attention_mma(&mut self, extents: &Extents, warps: &Warps) -> Launch {
        let &Extents { batch, m, k, e, .. } = extents;
        let &Warps { rows, teams, columns } = warps;
        let (rank, element) = (self.kernel.shape.len(), self.storage[0]);
        self.declarations.push(format!("typedef {} element;", element.name()));
        if self.lies(0, rank - 1, 2) {
            let (mut body, address) = self.address(0, &space(&self.access(0).shape, ["m", "k"]));
            body.push(format!("return {};", self.read_wide(0, 2, &address)));
            self.wide_function("a_wide", &matrix(["m", "k"]), "wide<element, 2>".into(), body);
            self.flags.push("A_WIDE");
        }
        let wide = BYTES / element.size();
        for (slot, name, flag, names, axis) in
            [(1, "b_at", "B_WIDE", ["k", "n"], rank - 2), (2, "c_at", "C_WIDE", ["n", "e"], rank - 1)]
        {
            if self.lies(slot, axis, wide) {
                self.address_function(name, slot, &space(&self.access(slot).shape, names), names);
                self.flags.push(flag);
            }
        }
        self.store_pairs(e);
        let groups = m.div_ceil(rows);
        let keys_first = self.access(1).strides[rank - 1] == 1;
        let stripe = teams * columns;
        let (depth, width) = (k.next_multiple_of(16), e.next_multiple_of(16));
        let constants = [
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("TEAMS", teams),
            ("STRIPE", stripe),
            ("DEPTH", depth),
            ("WIDTH", width),
            ("GROUPS", groups),
            ("B_N_STEP", if keys_first { 1 } else { depth }),
            ("B_K_STEP", if keys_first { stripe } else { 1 }),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if teams > 1 {
            self.flags.push("TEAMS");
        }
        self.shared.push(("tile", element, warps.bytes(k, e) / 2));
        Ok(("attention_mma", (rows / 16 * teams * 32) as u32, (batch * groups) as u64))
    }

    /// Functions for two scores side by side: `look(batch, m, n)` reads what they are made of beside products, where it lies side by
    /// side, and `score(batch, m, n, v, value)` makes the one at `n`, the second if `v` is 1. What is outside never weighs.
    fn score_pairs(&mut self, score: &Body, extents: &Extents, [rows, keys]: [usize; 2]) -> Result<(), String> {
        let rank = self.kernel.shape.len();
        let mut columns = self.kernel.shape.clone();
        columns[rank - 1] = extents.n;
        let space = space(&columns, ["m", "n"]);
        let further = 3..self.kernel.template.core_reads();
        let pairs: Vec<usize> = further.filter(|&slot| self.lies(slot, rank - 1, 2)).collect();
        let accesses: Vec<_> = pairs.iter().map(|&slot| self.access(slot)).collect();
        let located = locate(&space, &accesses, &BTreeSet::new());
        let guard = |body: Vec<String>| {
            let ragged = |extent: usize, step: usize, text| (!extent.is_multiple_of(step)).then_some(text);
            let inside = [ragged(extents.m, rows, "m < M"), ragged(extents.n, keys, "n < N")];
            let inside: Vec<_> = inside.into_iter().flatten().collect();
            if inside.is_empty() || body.is_empty() {
                return body;
            }
            let head = format!("if ({}) {{", inside.join(" && "));
            [head].into_iter().chain(body.into_iter().map(|line| format!("    {line}"))).chain(["}".into()]).collect()
        };
        let mut body = if pairs.is_empty() { Vec::new() } else { located.statements };
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (&slot, address) in pairs.iter().zip(&located.addresses) {
            let ty = self.storage[slot];
            self.declarations.push(format!("wide<{}, 2> x{slot};", ty.name()));
            body.push(format!("x{slot} = {};", self.read_wide(slot, 2, address)));
            names.insert(slot, convert(&format!("x{slot}.v[v]"), ty, self.value[slot]));
        }
        let [b, first, second] = matrix(["m", "n"]);
        self.function("look", &[b, first, second], None, guard(body));
        let input = |j: u32| match (j, 2 + j as usize) {
            (0, _) => Input::Value("value".into(), F32),
            (_, slot) => match names.get(&slot) {
                Some(name) => Input::Value(name.clone(), self.value[slot]),
                None => Input::Slot(slot),
            },
        };
        let code = self.body(score, &space, input, &[], &[])?;
        let (value, from) = &code.results[0];
        let mut body = code.statements;
        body.push(format!("result = {};", convert(value, *from, F32)));
        let lines = ["var result = bitcast<f32>(0xff800000u);".to_owned()].into_iter();
        let lines = lines.chain(guard(body)).chain(["return result;".into()]).collect();
        self.function("score", &[b, first, second, ("v", I32), ("value", F32)], Some(F32), lines);
        Ok(())
    }

    /// A function that stores two elements side by side, where the result is stored as it is, and so lies.
    fn store_pairs(&mut self, e: usize) {
        let (slot, rank) = (self.kernel.reads.len(), self.kernel.shape.len());
        let Some(b) = self.bindings.of[slot] else { return };
        let ty = self.storage[slot];
        let same = self.bound[b] == ty && matches!(ty, F16 | BF16 | F32) && self.kernel.body.is_identity();
        if !same || self.kernel.writes.len() != 1 || !self.lies(slot, rank - 1, 2) {
            return;
        }
        let (mut body, address) = self.address(slot, &space(&self.kernel.shape, ["m", "n"]));
        let [low, high] = ["low", "high"].map(|value| convert(value, F32, ty));
        body.push(format!("write(b{b} + ({address}), wide<{}, 2>{{{low}, {high}}});", ty.name()));
        body.iter_mut().for_each(|line| line.insert_str(0, "    "));
        body.insert(0, format!("if (m < M && n < {e}) {{"));
        body.push("}".into());
        let [batch, first, second] = matrix(["m", "n"]);
        self.function("store_wide", &[batch, first, second, ("low", F32), ("high", F32)], None, body);
        self.flags.push("STORE_WIDE");
    }
}

/// A batch of matrices, walked by these names.
fn space(extents: &[usize], names: [&'static str; 2]) -> Space {
    let rank = extents.len();
    let matrix = [over(names[0], extents, [rank - 2]), over(names[1], extents, [rank - 1])];
    [over("batch", extents, 0..rank - 2)].into_iter().chain(matrix).collect()
}
