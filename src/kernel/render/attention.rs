//! The holes of the attention templates.

use super::locate::{Space, Var, locate, over};
use super::scalar::Type::{BF16, F16, F32, I32, Vec4};
use super::scalar::convert;
use super::templates::Launch;
use super::wide::{BYTES, matrix};
use super::{Dialect, Input, Module};
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code};
use crate::kernel::Guard;
use crate::target::FEW_GROUPS;
use std::collections::{BTreeMap, BTreeSet};

/// Sums that an invocation holds at most, or vectors of scores and sums.
const SUMS: usize = 16;
/// Slices of the inner axis that pass through workgroup memory at a time.
const STEP: usize = 16;

/// Extents of an attention: heads of keys, rows of all queries that share one, columns of queries, rows and columns of values.
struct Extents {
    batch: usize,
    m: usize,
    k: usize,
    n: usize,
    e: usize,
    /// Axes in front of the rows along which keys and values stand still, as those of grouped queries: rows like any other.
    grouped: usize,
}

impl Extents {
    /// A batch of matrices, walked by these names. Rows are called `m`, but keys and values have none.
    fn space(&self, extents: &[usize], names: [&'static str; 2]) -> Space {
        let rank = extents.len();
        let first = rank - 2 - self.grouped;
        let rows = if names[0] == "m" { first } else { rank - 2 };
        vec![
            over("batch", extents, 0..first),
            over(names[0], extents, rows..rank - 1),
            over(names[1], extents, [rank - 1]),
        ]
    }
}

/// How an attention is cut into workgroups, and what these hold.
enum Cut {
    /// Scores pass through workgroup memory.
    Plain,
    /// So do parts of them, of few rows.
    Few(Few),
    /// Sums are held in registers, four neighbours as one vector.
    Quad(Quad),
    /// Scores and sums are held in registers.
    Tile(Tile),
    /// The same on tensor cores.
    Warps(Warps),
}

/// What a workgroup of [`Few::SIZE`] invocations has of an attention of few rows, of vectors of four: `attention_thin` in WGSL,
/// `attention_slim` in CUDA C++.
#[derive(Clone, Copy)]
struct Few {
    /// Rows of the result.
    rows: usize,
    /// Keys at a time.
    columns: usize,
    /// Invocations that share a key.
    lanes: usize,
    /// Places for vectors of a row of values.
    across: usize,
    /// Workgroups that share the rows, each with keys of its own.
    cluster: usize,
}

/// What a workgroup of [`Quad::SIZE`] invocations has of an attention, of vectors of four.
#[derive(Clone, Copy)]
struct Quad {
    /// Rows of the result.
    rows: usize,
    /// Invocations that share a row; each has four keys of it at a time.
    lanes: usize,
    /// Whether values have a place of their own in workgroup memory, or else that of the keys.
    apart: bool,
}

/// What a workgroup of invocations with registers has of an attention.
struct Tile {
    /// Rows of the result.
    rows: usize,
    /// Keys at a time.
    columns: usize,
    /// Workgroups that share these rows, each with keys of its own.
    cluster: usize,
}

/// How an attention of halves is shared among the warps of a workgroup.
struct Warps {
    /// Rows of the result.
    rows: usize,
    /// Of which a warp has so many times 16.
    each: usize,
    /// Warps that share these rows, each with keys of its own.
    teams: usize,
    /// Keys of a team at a time.
    columns: usize,
    /// Stripes of keys and values in workgroup memory: what is used, and what is on its way.
    stages: usize,
    /// Workgroups that share the rows, each with keys of its own.
    cluster: usize,
}

impl Module<'_> {
    /// Rows of the result in a workgroup of `size`: many, so that keys and values are read seldom, but not so many that a row's
    /// sums do not fit in registers, or that few workgroups are left.
    fn attention_rows(&self, size: usize, &Extents { batch, m, e, .. }: &Extents) -> usize {
        let fits = |rows: usize| e.div_ceil(size / rows) <= SUMS;
        let busy = |rows: usize| batch * m.div_ceil(rows) >= FEW_GROUPS;
        let most = m.next_power_of_two().min(32);
        let all = || (0..=5).rev().map(|i| 1usize << i).filter(|&rows| rows <= most && fits(rows));
        all().find(|&rows| busy(rows)).or_else(|| all().find(|&rows| rows <= 8)).unwrap_or(1)
    }

    pub(super) fn attention(&mut self, score: &Body, guarded: Option<Guard>) -> Launch {
        let shape = &self.kernel.shape;
        let rank = shape.len();
        let still =
            |axis: &usize| shape[*axis] == 1 || [1, 2].iter().all(|&slot| self.access(slot).strides[*axis] == 0);
        let grouped = (0..rank - 2).rev().take_while(still).count();
        let extents = Extents {
            batch: shape[..rank - 2 - grouped].iter().product(),
            m: shape[rank - 2 - grouped..rank - 1].iter().product(),
            k: self.access(0).shape[rank - 1],
            n: self.access(1).shape[rank - 1],
            e: shape[rank - 1],
            grouped,
        };
        if !self.value[..3].iter().all(|ty| *ty == F32) {
            return Err("attention is of floats".into());
        }
        let cut = self.cut(&extents);
        for (slot, name, names, inner, axis, flag) in [
            (0, "a", ["m", "k"], ("k", extents.k), rank - 1, "A_WIDE"),
            (1, "b", ["k", "n"], ("k", extents.k), rank - 2, "B_WIDE"),
            (2, "c", ["n", "e"], ("e", extents.e), rank - 1, "C_WIDE"),
        ] {
            let space = extents.space(&self.access(slot).shape, names);
            let wide = match cut {
                Cut::Few(_) => slot > 0,
                Cut::Tile(_) => true,
                _ => false,
            };
            if wide && self.fours(&format!("{name}_wide"), slot, &space, names, axis) {
                self.flags.push(flag);
                // Elements of a binding of vectors cannot be had one by one.
                if self.dialect == Dialect::Wgsl {
                    continue;
                }
            }
            // The last lanes may have no column, and the last vectors fewer than four.
            let (mut body, address) = self.address(slot, &space);
            let load = self.load(slot, &address);
            let ragged = match cut {
                Cut::Quad(_) | Cut::Few(_) => !inner.1.is_multiple_of(4),
                _ => name == "c",
            };
            if ragged {
                body.push("var value = 0.0f;".into());
                body.push(format!("if ({} < {}) {{ value = {load}; }}", inner.0, inner.1));
                body.push("return value;".into());
            } else {
                body.push(format!("return {load};"));
            }
            self.function(name, &matrix(names), Some(F32), body);
        }
        self.constant("LOWEST", f32::MIN.into(), F32);
        let Extents { m, k, n, e, .. } = extents;
        [("M", m), ("N", n), ("K", k), ("COLUMNS_OUT", e)].iter().for_each(|&(name, v)| self.int(name, v as isize));
        if let Some(guard) = guarded {
            self.flags.push("GUARDED");
            // Of a row's sum of powers: whether it weighs nothing.
            if self.dialect == Dialect::Cuda {
                let whole = if guard == Guard::Unseen { "whole == 0.0f" } else { "!(whole > 0.0f)" };
                self.declarations.push(format!("const auto weightless = [](f32 whole) {{ return {whole}; }};"));
            }
        }
        match &cut {
            Cut::Plain => self.score_each(score, &extents, true)?,
            Cut::Few(_) | Cut::Quad(_) => self.score_each(score, &extents, false)?,
            Cut::Tile(tile) => self.score_pairs(score, &extents, [tile.rows, tile.columns], [1, 1])?,
            Cut::Warps(warps) => {
                // The powers of what is only scaled take one instruction to prepare.
                let (identity, scale) = (Body::identity(DType::F32), scale(score));
                let score = if scale.is_some() { &identity } else { score };
                self.constant("UNIT", scale.unwrap_or(1.0) * std::f64::consts::LOG2_E, F32);
                if scale.is_some() {
                    self.flags.push("LINEAR");
                }
                let tiles = warps.columns / 8;
                let pairs = [2 * warps.each * tiles, tiles];
                self.score_pairs(score, &extents, [warps.rows, warps.teams * warps.columns], pairs)?;
            }
        }
        let outs: Vec<Var> = extents.space(shape, ["m", "n"]);
        self.store(&outs, Some(F32), Some("m < M && n < COLUMNS_OUT"), &[])?;
        match &cut {
            Cut::Plain => self.attention_plain(&extents),
            Cut::Few(few) => self.attention_few(&extents, few),
            Cut::Quad(quad) => self.attention_quad(&extents, quad),
            Cut::Tile(tile) => self.attention_tile(&extents, tile),
            Cut::Warps(warps) => self.attention_mma(&extents, warps),
        }
    }

    /// Kernels take as many rows and keys at a time as fit, and fewer rows where multiprocessors would be idle.
    fn cut(&self, extents: &Extents) -> Cut {
        if [extents.k, extents.n, extents.e].contains(&0) {
            return Cut::Plain;
        }
        let few = || self.few(extents).map(Cut::Few);
        let cut = match self.dialect {
            Dialect::Wgsl => few().or_else(|| self.vectors(extents).map(Cut::Quad)),
            Dialect::Cuda => {
                let halves = self.warps(extents).map(Cut::Warps);
                halves.or_else(few).or_else(|| self.in_registers(extents).map(Cut::Tile))
            }
        };
        cut.unwrap_or(Cut::Plain)
    }

    /// How invocations with vectors of four compute an attention of few rows, whose sums they can share, with as many keys at a time as fit in
    /// workgroup memory: a row of its own for each workgroup, unless there are plenty.
    fn few(&self, extents: &Extents) -> Option<Few> {
        let &Extents { batch, m, k, e, n, .. } = extents;
        if m > Few::ROWS || (self.target.max_workgroup as usize) < Few::SIZE || e > 4 * Few::SIZE {
            return None;
        }
        let enough = match self.target.multiprocessors {
            0 => FEW_GROUPS,
            multiprocessors => multiprocessors as usize,
        };
        let lanes = k.div_ceil(4).next_power_of_two().min(8);
        let across = e.div_ceil(4).next_power_of_two();
        let least = Few::SIZE / lanes;
        let room = (self.target.max_shared as usize).min(Few::MOST);
        let of = |rows: usize| {
            let groups = batch * m.div_ceil(rows);
            let useful = |columns: &usize| *columns == least || *columns < 2 * n;
            let all = (0..=3).rev().map(|i| least << i).filter(useful).map(|columns| {
                let cluster = self.cluster(groups, n.div_ceil(columns), 2 * enough);
                Few { rows, columns, lanes, across, cluster }
            });
            all.into_iter().find(|few| few.bytes(k, e) <= room)
        };
        let busy = |rows: &usize| *rows < 2 * m && batch * m.div_ceil(*rows) >= enough;
        [8, 4, 2].into_iter().filter(busy).chain([1]).find_map(of)
    }

    /// How invocations with vectors of four compute an attention of any rows, whose sums fit in registers, and of which some
    /// rows and keys fit in workgroup memory.
    fn vectors(&self, extents: &Extents) -> Option<Quad> {
        let &Extents { batch, m, k, e, .. } = extents;
        if (self.target.max_workgroup as usize) < Quad::SIZE {
            return None;
        }
        let fits = |quad: &Quad| {
            let held = quad.each() * (1 + quad.pieces(e));
            quad.each() > 0 && held <= SUMS && quad.bytes(k, e) <= self.target.max_shared as usize
        };
        let of = |rows: usize| {
            let all = [16, 8].into_iter().flat_map(|lanes| [true, false].map(|apart| Quad { rows, lanes, apart }));
            all.into_iter().find(fits)
        };
        let all = || [64, 32, 16, 8].into_iter().filter_map(of);
        let busy = |quad: &Quad| 2 * batch * m.div_ceil(quad.rows) >= FEW_GROUPS;
        let enough = all().find(|quad| m > quad.rows / 2 && busy(quad));
        enough.or_else(|| all().next_back())
    }

    /// How invocations with registers compute an attention whose scores and sums fit there, and of which a few rows and keys fit in workgroup
    /// memory: with as many rows as there are and as still occupy all multiprocessors.
    fn in_registers(&self, extents: &Extents) -> Option<Tile> {
        let &Extents { batch, m, k, e, n, .. } = extents;
        let (most, width) = (self.target.max_shared as usize, tile_width(e).0);
        let room = 2 * self.target.multiprocessors as usize;
        let fits = |tile: &Tile| tile.rows / 8 * (width + tile.columns) / 16 <= 112 && 4 * tile.len(k, e) <= most;
        let spread = |rows: usize, columns: usize| {
            let cluster = self.cluster(batch * m.div_ceil(rows), n.div_ceil(columns), room);
            Tile { rows, columns, cluster }
        };
        let sizes = [(64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32), (8, 64), (8, 32)];
        let all = || sizes.into_iter().map(|(rows, columns)| spread(rows, columns)).filter(fits);
        let busy = |tile: &Tile| 2 * batch * m.div_ceil(tile.rows) * tile.cluster >= room;
        let enough = all().find(|tile| (m > tile.rows / 2 || tile.rows == 8) && busy(tile));
        enough.or_else(|| all().find(|tile| tile.rows <= m.next_power_of_two().clamp(8, 16)))
    }

    /// How many workgroups share the stripes of keys of each of `groups`, where these are fewer than there is room for. Clusters came with
    /// compute capability 9.0, and 8 workgroups are the most that every device has.
    fn cluster(&self, groups: usize, stripes: usize, room: usize) -> usize {
        let fits = |cluster: &usize| self.target.compute >= 90 && groups * cluster <= room && *cluster <= stripes;
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// A function `score(batch, m, n, value)`; what is outside is lowest, if it may be asked for.
    fn score_each(&mut self, score: &Body, extents: &Extents, outside: bool) -> Result<(), String> {
        let mut columns = self.kernel.shape.clone();
        columns[self.kernel.shape.len() - 1] = extents.n;
        let input = |j: u32| match j {
            0 => Input::Value("value".into(), F32),
            _ => Input::Slot(2 + j as usize),
        };
        let code = self.body(score, &extents.space(&columns, ["m", "n"]), input, &[], &[])?;
        let (value, from) = &code.results[0];
        let (mut body, value) = (code.statements, convert(value, *from, F32));
        if outside {
            body.push(format!("result = {value};"));
            body.iter_mut().for_each(|line| line.insert_str(0, "    "));
            body.splice(0..0, ["var result = LOWEST;".to_owned(), "if (m < M && n < N) {".to_owned()]);
            body.extend(["}".to_owned(), "return result;".to_owned()]);
        } else {
            body.push(format!("return {value};"));
        }
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
    fn warps(&self, &Extents { batch, m, k, n, e, .. }: &Extents) -> Option<Warps> {
        let element = self.storage[0];
        let halves = matches!(element, F16 | BF16) && self.storage[..3].iter().all(|ty| *ty == element);
        if self.target.compute < 80 || !halves || k.max(e) > WIDEST {
            return None;
        }
        let (room, d) = (self.target.multiprocessors as usize, k.max(e));
        let groups = |rows: usize| batch * m.div_ceil(rows);
        // Rows, times 16 per warp, teams, keys of a team, stages: what was fastest where it fills the card, the more rows the better.
        let (rows, each, teams, columns, stages) = match d {
            ..=80 if m > 64 && groups(128) >= 2 * room => (128, 2, 1, 64, 2),
            ..=128 if m > 64 && groups(128) >= 2 * room => (128, 2, 1, 16, 3),
            129.. if m > 64 && groups(128) >= 2 * room => (128, 1, 1, 64, 2),
            ..=128 if m > 32 && groups(64) >= room => (64, 1, 1, 64, 2),
            _ if m > 16 && 2 * groups(32) >= room => (32, 1, 2, 64, 2),
            // Where a cluster shares the keys, fewer teams have less to collect.
            _ if 2 * groups(16) <= room => (16, 1, 2, 32, 4),
            _ => (16, 1, 4, 32, 2),
        };
        // No more keys at a time than there are, and no more than fit.
        let narrower = (0..3).flat_map(|by| [teams, 2, 1].map(|teams| (columns >> by, teams)));
        let narrower = narrower.filter(|&(columns, other)| columns >= 16 && other <= teams);
        let all = narrower.map(|(columns, teams)| Warps { rows, each, teams, columns, stages, cluster: 1 });
        let fits = |w: &Warps| {
            let (stripe, least) = (w.teams * w.columns, w.teams == 1 && w.columns == 16);
            let held = w.columns * d <= 64 * 160;
            held && (least || stripe < n + 16 * w.teams) && w.bytes(k, e) <= self.target.max_shared as usize
        };
        let warps = all.into_iter().find(fits)?;
        let cluster = self.cluster(groups(rows), n.div_ceil(warps.teams * warps.columns), room);
        Some(Warps { cluster, ..warps }).filter(fits).or(Some(warps))
    }
}

/// The widest queries and results that are held in registers.
const WIDEST: usize = 256;

impl Warps {
    /// Bytes of workgroup memory: keys and values, in whose place warps leave what they found.
    fn bytes(&self, k: usize, e: usize) -> usize {
        let (depth, width) = (k.next_multiple_of(16), e.next_multiple_of(16));
        let tiles = 2 * self.stages * self.teams * self.columns * (depth + 8 + width + 8);
        let found = 4 * self.rows * 2 * (4 + width / 2);
        let kept = match (self.teams, self.cluster) {
            (1, 1) => 0,
            (teams, cluster) => (teams + usize::from(cluster > 1)) * found,
        };
        tiles.max(kept)
    }
}

/// What a score is times its product, if it is nothing more, and so little that the lowest value times it has a power of two.
fn scale(score: &Body) -> Option<f64> {
    let at = |mut i: u32| {
        // All floats are computed in one type.
        while let Code::Cast(from) = score.code[i as usize].code
            && [i, from].iter().all(|&value| score.code[value as usize].dtype.is_float())
        {
            i = from;
        }
        score.code[i as usize].code
    };
    let scaled = |value: u32, by: u32| match (at(value), at(by)) {
        (Code::Input(0), Code::Const(by)) => Some(by),
        _ => None,
    };
    let factor = match at(*score.results.first()?) {
        Code::Input(0) => 1.0,
        Code::Binary(Binary::Mul, a, b) => scaled(a, b).or_else(|| scaled(b, a))?,
        _ => return None,
    };
    (factor > 0.0 && factor <= 0.5).then_some(factor)
}

/// Columns of the values in workgroup memory for a result of `e`, and how many neighbours an invocation has.
fn tile_width(e: usize) -> (usize, usize) {
    let each = (e.div_ceil(16).next_power_of_two()).min(4);
    (e.next_multiple_of(16 * each), each)
}

impl Few {
    /// Invocations of a workgroup.
    const SIZE: usize = 256;
    /// The most rows that are few.
    const ROWS: usize = 8;
    /// Bytes of workgroup memory that leave room for other workgroups on the same multiprocessor.
    const MOST: usize = 48 << 10;

    /// Invocations that share four columns of the values.
    fn parts(&self) -> usize {
        (Few::SIZE / self.across).min(self.columns / 4)
    }

    /// Places from one lane's parts of the scores to the next one's, so that those of a warp lie in different banks.
    fn pitch(&self) -> usize {
        self.rows * self.columns + 32 / self.lanes
    }

    /// Places for parts of the scores, and at the end for sums.
    fn tile(&self) -> usize {
        (self.lanes * self.pitch()).max(4 * Few::SIZE)
    }

    /// What workgroups of a cluster leave for each other: sums, totals and largest scores.
    fn found(&self, e: usize) -> usize {
        if self.cluster > 1 { self.rows * (e + 2) } else { 0 }
    }

    /// Bytes of workgroup memory: queries, parts of scores, scores, largest of them, totals, what others collect.
    fn bytes(&self, k: usize, e: usize) -> usize {
        let scores = self.tile() + self.rows * (self.columns + 16);
        16 * self.rows * k.div_ceil(4) + 4 * (scores + Few::SIZE + self.found(e))
    }
}

impl Quad {
    /// Invocations of a workgroup.
    const SIZE: usize = 128;

    /// Rows of an invocation.
    fn each(&self) -> usize {
        self.rows * self.lanes / Quad::SIZE
    }

    /// Vectors of a row's sums that an invocation holds.
    fn pieces(&self, e: usize) -> usize {
        e.div_ceil(4).div_ceil(self.lanes)
    }

    /// Vectors from one row of queries or keys to the next: odd, so that neighbours' lie in different banks.
    fn pitch(k: usize) -> usize {
        k.div_ceil(4) | 1
    }

    /// Where keys and values begin among the vectors of workgroup memory, and where these end.
    fn places(&self, k: usize, e: usize) -> [usize; 3] {
        let keys = self.rows * Quad::pitch(k);
        let [keys_end, values_len] = [keys + 4 * self.lanes * Quad::pitch(k), 4 * self.lanes * e.div_ceil(4)];
        let values = if self.apart { keys_end } else { keys };
        [keys, values, keys_end.max(values + values_len)]
    }

    /// Bytes of workgroup memory: queries, keys, values, weights, and what lanes exchange.
    fn bytes(&self, k: usize, e: usize) -> usize {
        let scores = self.rows * self.lanes;
        16 * (self.places(k, e)[2] + scores) + 4 * scores
    }
}

impl Tile {
    /// Elements of workgroup memory: queries, keys or else weights, values, in whose place workgroups of a cluster leave what they found.
    fn len(&self, k: usize, e: usize) -> usize {
        let &Tile { rows, columns, cluster } = self;
        let width = tile_width(e).0;
        let tiles = k * rows + k.max(rows) * columns + columns * width;
        if cluster > 1 { tiles.max(rows * (32 + width)) } else { tiles }
    }
}

impl Module<'_> {
    fn attention_few(&mut self, &Extents { batch, m, k, n, e, .. }: &Extents, few: &Few) -> Launch {
        let &Few { rows, columns, lanes, across, cluster } = few;
        let rank = self.kernel.shape.len();
        let (depth, keys, groups) = (k.div_ceil(4), Few::SIZE / lanes, m.div_ceil(rows));
        let along = self.access(1).strides[rank - 1] != 1;
        let (key_step, lane_step) = if along { (lanes, 1) } else { (1, keys) };
        let constants = [
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("LANES", lanes),
            ("KEYS", keys),
            ("KEY_STEP", key_step),
            ("LANE_STEP", lane_step),
            ("PITCH", few.pitch()),
            ("PARTS", few.parts()),
            ("ACROSS", across),
            ("CLUSTER", cluster),
            ("GROUPS", groups),
            ("DEPTH", depth),
            ("WIDTH", e.div_ceil(4)),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if !n.is_multiple_of(columns) {
            self.flags.push("RAGGED");
        }
        let cuda = self.dialect == Dialect::Cuda;
        if cuda {
            self.shared.push(("queries", F32, 4 * rows * depth));
            self.clustered(cluster);
        } else {
            self.shared.push(("queries", Vec4, rows * depth));
            self.list_few(rows, columns / keys);
        }
        self.shared.push(("tile", F32, few.tile()));
        self.shared.push(("scores", F32, rows * columns));
        self.shared.push(("maxima", F32, rows * 16));
        self.shared.push(("totals", F32, Few::SIZE));
        if cluster > 1 {
            self.shared.push(("found", F32, few.found(e)));
        }
        let name = if cuda { "attention_slim" } else { "attention_thin" };
        Ok((name, Few::SIZE as u32, (batch * groups * cluster) as u64))
    }

    /// What WGSL writes out for each of the rows, and for each of their keys at a time.
    fn list_few(&mut self, rows: usize, passes: usize) {
        let product = |i: usize| {
            let (down, over) = (i / passes, i % passes);
            vec![("DOWN", down.to_string()), ("OVER", over.to_string()), ("FOUR", format!("four{over}"))]
        };
        let weight = |i: usize| {
            let numbered = |names: &[(&'static str, &str)], at: usize| -> Vec<_> {
                names.iter().map(|&(name, to)| (name, format!("{to}{at}"))).collect()
            };
            let of_row = numbered(&[("TOTAL", "total"), ("TOP", "top"), ("SUM", "sum"), ("DOWN", "")], i / 4);
            [of_row, numbered(&[("VALUE", "value"), ("AT", "t")], i % 4)].concat()
        };
        self.lists.insert("row", vec![Vec::new(); rows]);
        self.lists.insert("pass", vec![Vec::new(); passes]);
        self.lists.insert("product", (0..rows * passes).map(product).collect());
        self.lists.insert("four", vec![Vec::new(); 4]);
        self.lists.insert("weight", (0..rows * 4).map(weight).collect());
    }

    fn attention_quad(&mut self, &Extents { batch, m, k, n, e, .. }: &Extents, quad: &Quad) -> Launch {
        let &Quad { rows, lanes, apart } = quad;
        let rank = self.kernel.shape.len();
        let (depth, columns, groups) = (k.div_ceil(4), 4 * lanes, m.div_ceil(rows));
        let [keys, values, len] = quad.places(k, e);
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let (along_a, along_b) = (!dense(0, rank - 2) || dense(0, rank - 1), !dense(1, rank - 1));
        let steps = |along: bool, count: usize| if along { (depth, 1) } else { (1, count) };
        let ((am, ak), (bn, bk)) = (steps(along_a, rows), steps(along_b, columns));
        let constants = [
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("LANES", lanes),
            ("SIDE", Quad::SIZE / lanes),
            ("GROUPS", groups),
            ("DEPTH", depth),
            ("PITCH", Quad::pitch(k)),
            ("WIDTH", e.div_ceil(4)),
            ("KEYS", keys),
            ("VALUES", values),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if apart {
            self.flags.push("APART");
        }
        if !n.is_multiple_of(columns) {
            self.flags.push("RAGGED");
        }
        let sum = |piece: usize, row: usize| {
            let of_row = [("FADE", "fade"), ("WEIGHT", "weight"), ("WHOLE", "whole"), ("TOP", "top"), ("DOWN", "")];
            let of_piece =
                [("FIRST", "first"), ("SECOND", "second"), ("THIRD", "third"), ("FOURTH", "fourth"), ("OVER", "")];
            let numbered =
                |names: [(&'static str, &str); 5], at: usize| names.map(|(name, to)| (name, format!("{to}{at}")));
            [numbered(of_row, row), numbered(of_piece, piece)].concat()
        };
        let (each, pieces) = (quad.each(), quad.pieces(e));
        let sums = (0..pieces).flat_map(|piece| (0..each).map(move |row| sum(piece, row))).collect();
        self.lists.insert("sum", sums);
        self.lists.insert("row", vec![Vec::new(); each]);
        self.lists.insert("piece", vec![Vec::new(); pieces]);
        self.lists.insert("four", vec![Vec::new(); 4]);
        self.shared.push(("tile", Vec4, len));
        self.shared.push(("weights", Vec4, rows * lanes));
        self.shared.push(("partial", F32, rows * lanes));
        Ok(("attention_quad", Quad::SIZE as u32, (batch * groups) as u64))
    }

    fn attention_tile(&mut self, extents: &Extents, tile: &Tile) -> Launch {
        let &Extents { batch, m, k, e, .. } = extents;
        let &Tile { rows, columns, cluster } = tile;
        let rank = self.kernel.shape.len();
        let (width, each) = tile_width(e);
        if each > 1 {
            self.store_pairs(extents);
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
            ("CLUSTER", cluster),
            ("GROUPS", groups),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.clustered(cluster);
        self.shared.push(("tile", F32, tile.len(k, e)));
        Ok(("attention_tile", 128, (batch * groups * cluster) as u64))
    }

    fn clustered(&mut self, cluster: usize) {
        self.cluster = cluster as u32;
        if cluster > 1 {
            self.flags.push("CLUSTERED");
        }
    }

    fn attention_mma(&mut self, extents: &Extents, warps: &Warps) -> Launch {
        let &Extents { batch, m, k, e, .. } = extents;
        let &Warps { rows, each, teams, columns, stages, cluster } = warps;
        let (rank, element) = (self.kernel.shape.len(), self.storage[0]);
        self.declarations.push(format!("typedef {} element;", element.name()));
        if self.lies(0, rank - 1, 2) {
            let (mut body, address) = self.address(0, &extents.space(&self.access(0).shape, ["m", "k"]));
            body.push(format!("return {};", self.read_wide(0, 2, &address)));
            self.wide_function("a_wide", &matrix(["m", "k"]), "wide<element, 2>".into(), body);
            self.flags.push("A_WIDE");
        }
        let wide = BYTES / element.size();
        for (slot, name, flag, names, axis) in
            [(1, "b_at", "B_WIDE", ["k", "n"], rank - 2), (2, "c_at", "C_WIDE", ["n", "e"], rank - 1)]
        {
            if self.lies(slot, axis, wide) {
                self.address_function(name, slot, &extents.space(&self.access(slot).shape, names), names);
                self.flags.push(flag);
            }
        }
        self.store_pairs(extents);
        let groups = m.div_ceil(rows);
        let keys_first = self.access(1).strides[rank - 1] == 1;
        let stripe = teams * columns;
        let (depth, width) = (k.next_multiple_of(16), e.next_multiple_of(16));
        let constants = [
            ("ROWS", rows),
            ("EACH", each),
            ("COLUMNS", columns),
            ("STAGES", stages),
            ("CLUSTER", cluster),
            ("TEAMS", teams),
            ("STRIPE", stripe),
            ("DEPTH", depth),
            ("WIDTH", width),
            ("GROUPS", groups),
            ("B_N_STEP", if keys_first { 1 } else { depth }),
            ("B_K_STEP", if keys_first { stripe } else { 1 }),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if teams * cluster > 1 {
            self.flags.push("PARTS");
        }
        self.clustered(cluster);
        self.shared.push(("tile", element, warps.bytes(k, e) / 2));
        Ok(("attention_mma", (rows / 16 / each * teams * 32) as u32, (batch * groups * cluster) as u64))
    }

    /// Functions for two scores side by side, of which an invocation has `pairs`, so many of them `along` the keys: `look(batch, m, n, pair)`
    /// reads what they are made of beside products, where it lies side by side, and `score(batch, m, n, pair, v, value)` makes the one at
    /// `n`, the second if `v` is 1. What is outside is for the template to mend where keys are `RAGGED`.
    fn score_pairs(
        &mut self,
        score: &Body,
        extents: &Extents,
        [rows, keys]: [usize; 2],
        [pairs, along]: [usize; 2],
    ) -> Result<(), String> {
        let rank = self.kernel.shape.len();
        let mut columns = self.kernel.shape.clone();
        columns[rank - 1] = extents.n;
        let space = extents.space(&columns, ["m", "n"]);
        let further = 3..self.kernel.template.core_reads();
        let side: Vec<usize> = further.clone().filter(|&slot| self.lies(slot, rank - 1, 2)).collect();
        let accesses: Vec<_> = side.iter().map(|&slot| self.access(slot)).collect();
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
        let mut body = if side.is_empty() { Vec::new() } else { located.statements };
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (&slot, address) in side.iter().zip(&located.addresses) {
            let ty = self.storage[slot];
            // As many at a time as lie so, and as an invocation has along the keys.
            let mut width = (BYTES / ty.size()).min(2 * along);
            while width > 2 && !self.lies(slot, rank - 1, width) {
                width /= 2;
            }
            self.declarations.push(format!("wide<{}, {width}> x{slot}[{}];", ty.name(), 2 * pairs / width));
            let read = self.read_wide(slot, width, address);
            body.push(format!("if (pair * 2 % {width} == 0) {{ x{slot}[pair * 2 / {width}] = {read}; }}"));
            let element = format!("x{slot}[(pair * 2 + v) / {width}].v[(pair * 2 + v) % {width}]");
            names.insert(slot, convert(&element, ty, self.value[slot]));
        }
        let [b, first, second] = matrix(["m", "n"]);
        self.function("look", &[b, first, second, ("pair", I32)], None, guard(body));
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
        // Nothing outside may be read.
        let body = if further.len() > side.len() { guard(body) } else { body };
        let lines = ["var result = value;".to_owned()].into_iter();
        let lines = lines.chain(body).chain(["return result;".into()]).collect();
        let params = [b, first, second, ("pair", I32), ("v", I32), ("value", F32)];
        self.function("score", &params, Some(F32), lines);
        if !extents.n.is_multiple_of(keys) {
            self.flags.push("RAGGED");
        }
        Ok(())
    }

    /// A function that stores two elements side by side, where the result is stored as it is, and so lies.
    fn store_pairs(&mut self, extents: &Extents) {
        let (slot, rank) = (self.kernel.reads.len(), self.kernel.shape.len());
        let Some(b) = self.bindings.of[slot] else { return };
        let ty = self.storage[slot];
        let same = self.bound[b] == ty && matches!(ty, F16 | BF16 | F32) && self.kernel.body.is_identity();
        if !same || self.kernel.writes.len() != 1 || !self.lies(slot, rank - 1, 2) {
            return;
        }
        let (mut body, address) = self.address(slot, &extents.space(&self.kernel.shape, ["m", "n"]));
        let [low, high] = ["low", "high"].map(|value| convert(value, F32, ty));
        body.push(format!("write(b{b} + ({address}), wide<{}, 2>{{{low}, {high}}});", ty.name()));
        body.iter_mut().for_each(|line| line.insert_str(0, "    "));
        body.insert(0, format!("if (m < M && n < {}) {{", extents.e));
        body.push("}".into());
        let [batch, first, second] = matrix(["m", "n"]);
        self.function("store_wide", &[batch, first, second, ("low", F32), ("high", F32)], None, body);
        self.flags.push("STORE_WIDE");
    }
}
