//! How GPUs cut an attention into workgroups, and what a workgroup holds.

use super::Launch;
use crate::dtype::DType;
use crate::kernel::algorithm::{Cut, Decode, Mma, Regs, Shared, Vec4};
use crate::kernel::meaning::mismatch;
use crate::kernel::product::is_vectorizable;
use crate::kernel::space::{Space, over};
use crate::kernel::{Fold, Kernel, Template};
use crate::target::{FEW_GROUPS, Family, Target, WIDEST_SCORES};

/// The most sums that an invocation holds, or the most vectors of scores and sums.
const SUMS: usize = 16;
/// Slices of the inner axis that pass through workgroup memory at a time.
pub(in crate::kernel) const STEP: usize = 16;
/// The widest queries and results that tensor cores' registers hold.
const WIDEST: usize = 256;

/// Extents of an attention: heads of keys, rows of all queries that share one, columns of queries, rows and columns of values.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct Extents {
    pub(in crate::kernel) batch: usize,
    pub(in crate::kernel) m: usize,
    pub(in crate::kernel) k: usize,
    pub(in crate::kernel) n: usize,
    pub(in crate::kernel) e: usize,
    /// Columns of the second product's operands, if there is one.
    pub(in crate::kernel) f: usize,
    pub(in crate::kernel) fold: Fold,
    /// Axes before the rows along which keys and values stand still, such as those of grouped queries. They count as rows.
    grouped: usize,
}

impl Extents {
    pub(in crate::kernel) fn new(kernel: &Kernel) -> Extents {
        let (shape, reads) = (&kernel.shape, &kernel.reads);
        let rank = shape.len();
        let Template::Attention { fold, .. } = kernel.template else { mismatch(&kernel.template) };
        let shared = [1, 2, 4].into_iter().filter(|&operand| operand < fold.operands());
        let shared: Vec<_> = shared.map(|operand| &reads[operand].access.strides).collect();
        let still = |axis: &usize| shape[*axis] == 1 || shared.iter().all(|strides| strides[*axis] == 0);
        let grouped = (0..rank - 2).rev().take_while(still).count();
        Extents {
            batch: shape[..rank - 2 - grouped].iter().product(),
            m: shape[rank - 2 - grouped..rank - 1].iter().product(),
            k: reads[0].access.shape[rank - 1],
            n: reads[1].access.shape[rank - 1],
            e: shape[rank - 1],
            f: if fold.products() == 2 { reads[3].access.shape[rank - 1] } else { 0 },
            fold,
            grouped,
        }
    }

    /// Columns of the tensor cores' operands in workgroup memory: keys, values, and keys of the second product.
    pub(in crate::kernel) fn padded(&self) -> [usize; 3] {
        let values = if self.fold == Fold::LogSum { 0 } else { self.e };
        [self.k, values, self.f].map(|columns| columns.next_multiple_of(16))
    }

    /// A batch of matrices, walked by these names. Rows are called `m`, but keys and values have none.
    pub(in crate::kernel) fn space(&self, extents: &[usize], names: [&'static str; 2]) -> Space {
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

/// The attention of a kernel on a target.
struct Problem<'a> {
    kernel: &'a Kernel,
    target: &'a Target,
    extents: Extents,
}

impl Cut {
    /// The text, a row of [`crate::kernel::render::KERNELS`], for a family of targets.
    pub fn text(&self, family: Family) -> &'static str {
        match self {
            Cut::Shared(_) => "attention",
            Cut::Decode(_) if family == Family::Cuda => "attention_decode_vec16b",
            Cut::Decode(_) => "attention_decode",
            Cut::Vec4(_) => "attention_vec4",
            Cut::Regs(_) => "attention_regs",
            Cut::Mma(_) => "attention_mma",
        }
    }

    pub(in crate::kernel) fn launch(&self, kernel: &Kernel) -> Launch {
        let Extents { batch, m, k, e, .. } = Extents::new(kernel);
        let (rows, cluster, threads, shared) = match self {
            Cut::Shared(shared) => (shared.rows, 1, shared.rows * shared.lanes, shared.bytes()),
            Cut::Decode(decode) => (decode.rows, decode.cluster, Decode::THREADS, decode.bytes(k, e)),
            Cut::Vec4(vec4) => (vec4.rows, 1, Vec4::THREADS, vec4.bytes(k, e)),
            Cut::Regs(regs) => (regs.rows, regs.cluster, 128, 4 * regs.len(k, e)),
            Cut::Mma(mma) => (mma.rows, mma.cluster, mma.threads(), mma.bytes(&Extents::new(kernel))),
        };
        let groups = batch.saturating_mul(m.div_ceil(rows.max(1))).saturating_mul(cluster);
        Launch { threads: threads as u32, groups: groups as u64, cluster: cluster as u32, shared: shared as u64 }
    }

    pub(in crate::kernel) fn check(&self, kernel: &Kernel, target: &Target) -> Result<(), String> {
        let text = self.text(target.family);
        let rule = |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("{text}: {what}")) };
        let problem = Problem { kernel, target, extents: Extents::new(kernel) };
        let Extents { k, n, e, m, .. } = problem.extents;
        let power = |n: usize, range: std::ops::RangeInclusive<usize>| n.is_power_of_two() && range.contains(&n);
        let cuda = target.family == Family::Cuda;
        let second = problem.extents.fold.products() == 2;
        let empty = [k, n, e].contains(&0) || second && problem.extents.f == 0;
        let some = || rule(!empty, "it has no keys, or no columns");
        let clusters = |cluster: usize| {
            let known = cluster == 1 || cuda && target.compute >= 90 && power(cluster, 2..=8);
            rule(known, "expected a cluster of 1, or of up to 8 workgroups from compute capability 9.0 on")
        };
        let computes = problem.extents.fold == Fold::Softmax || matches!(self, Cut::Mma(_));
        rule(computes, "it computes a softmax alone; without tensor cores, scores have to be stored")?;
        match *self {
            Cut::Shared(Shared { rows, columns, lanes }) => {
                let fits = power(rows, 1..=32) && power(columns, 32..=128) && lanes.is_power_of_two();
                rule(
                    fits && columns >= lanes,
                    "expected powers of two: 1 to 32 rows, 32 to 128 keys, no more lanes than keys",
                )?;
                rule((rows * columns).is_multiple_of(rows * lanes), "lanes do not divide the keys")
            }
            Cut::Decode(Decode { rows, columns, lanes, across, cluster, vectors }) => {
                some()?;
                clusters(cluster)?;
                rule(m <= Decode::ROWS, "it has at most 8 rows")?;
                let powers = power(rows, 1..=8) && power(lanes, 1..=8) && across == e.div_ceil(4).next_power_of_two();
                rule(powers && across <= Decode::THREADS, "expected powers of two: 1 to 8 rows, 1 to 8 lanes")?;
                let least = Decode::THREADS / lanes;
                rule(power(columns, least..=8 * least), "expected 1 to 8 keys for each invocation of a lane")?;
                let vectorizable = [0, 1].map(|i| !vectors[i] || problem.reads_fours(1 + i));
                rule(vectorizable == [true; 2], "keys or values do not lie four at a time")
            }
            Cut::Vec4(vec4) => {
                some()?;
                rule(!cuda, "it is written for WGSL")?;
                let powers = power(vec4.rows, 8..=64) && power(vec4.lanes, 8..=16);
                rule(powers, "expected powers of two: 8 to 64 rows, 8 or 16 lanes")?;
                let held = vec4.each() * (1 + vec4.pieces(e));
                rule(vec4.each() > 0 && held <= SUMS, "its sums do not fit in registers")
            }
            Cut::Regs(Regs { rows, columns, cluster }) => {
                some()?;
                clusters(cluster)?;
                rule(cuda, "it is written for CUDA")?;
                rule(REGS.contains(&(rows, columns)), &format!("expected rows and keys of {REGS:?}"))?;
                let held = rows / 8 * (tile_width(e).0 + columns) / 16;
                rule(held <= 112, "its scores and sums do not fit in registers")
            }
            Cut::Mma(mma) => {
                some()?;
                clusters(mma.cluster)?;
                rule(problem.has_tensor_cores(), "the target has no tensor cores for it")?;
                let known = SHARES.iter().any(|s| (mma.rows, mma.each, mma.stages) == (s.0, s.1, s.4));
                let powers = power(mma.teams, 1..=4) && power(mma.columns, 16..=64);
                rule(known && powers, "expected rows, warps and stages as it is written for")?;
                rule(mma.columns * problem.widest() <= 64 * 160, "its keys do not fit in registers")?;
                let alone =
                    mma.teams * mma.cluster == 1 && (mma.each == 1 || !second) && problem.widest() <= WIDEST_SCORES;
                rule(problem.extents.fold == Fold::Softmax || alone, "expected a team for all keys of a row")
            }
        }
    }
}

/// Rows and keys of [`Regs`]. More are better.
const REGS: [(usize, usize); 8] = [(64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32), (8, 64), (8, 32)];

/// Fields of [`Mma`]: rows, multiples of 16 rows per warp, teams, keys of a team, stages.
const SHARES: [(usize, usize, usize, usize, usize); 7] = [
    (128, 2, 1, 64, 2),
    (128, 2, 1, 16, 3),
    (128, 1, 1, 64, 2),
    (64, 1, 1, 64, 2),
    (32, 1, 2, 64, 2),
    (16, 1, 2, 32, 4),
    (16, 1, 4, 32, 2),
];

/// The cut that is expected to be fastest. It has as many rows and keys at a time as fit, but fewer rows if multiprocessors would be
/// idle. `own` tells which operands' buffers no other argument of the launch reads or writes.
pub(super) fn best(kernel: &Kernel, target: &Target, own: &dyn Fn(usize) -> bool) -> Cut {
    let problem = Problem { kernel, target, extents: Extents::new(kernel) };
    let Extents { k, n, e, .. } = problem.extents;
    let shared = || Cut::Shared(problem.shared());
    if [k, n, e].contains(&0) {
        return shared();
    }
    if problem.extents.fold != Fold::Softmax {
        return problem.unshared().map_or_else(shared, Cut::Mma);
    }
    let decode = || problem.decode(own).map(Cut::Decode);
    let cut = match target.family {
        Family::Cuda => {
            let mma = problem.mma().map(Cut::Mma);
            mma.or_else(decode).or_else(|| problem.regs().map(Cut::Regs))
        }
        _ => decode().or_else(|| problem.vec4().map(Cut::Vec4)),
    };
    cut.unwrap_or_else(shared)
}

/// Every cut that may be worth a try.
pub(super) fn all(kernel: &Kernel, target: &Target, own: &dyn Fn(usize) -> bool) -> Vec<Cut> {
    let problem = Problem { kernel, target, extents: Extents::new(kernel) };
    let Extents { k, n, e, .. } = problem.extents;
    let mut all = vec![best(kernel, target, own)];
    if [k, n, e].contains(&0) {
        return all;
    }
    if problem.extents.fold != Fold::Softmax {
        let fits = |columns: usize| columns * problem.widest() <= 64 * 160;
        let second = problem.extents.fold.products() == 2;
        let alone = SHARES.iter().filter(|share| share.1 == 1 || !second).flat_map(|&(rows, each, _, _, stages)| {
            let of = move |columns| Mma { rows, each, teams: 1, columns, stages, cluster: 1 };
            [64, 32, 16].into_iter().filter(|&columns| fits(columns)).map(of)
        });
        all.extend(alone.map(Cut::Mma));
        return all;
    }
    all.extend(problem.decode(own).map(Cut::Decode));
    if target.family == Family::Cuda {
        let narrow = |&(rows, each, teams, columns, stages)| Mma { rows, each, teams, columns, stages, cluster: 1 };
        all.extend(SHARES.iter().map(narrow).map(Cut::Mma));
        all.extend(problem.regs().map(Cut::Regs));
        all.extend(REGS.map(|(rows, columns)| Cut::Regs(Regs { rows, columns, cluster: 1 })));
    } else {
        all.extend(problem.vec4().map(Cut::Vec4));
        let sizes = [64, 32, 16, 8].into_iter().flat_map(|rows| [16, 8].map(|lanes| (rows, lanes)));
        all.extend(sizes.map(|(rows, lanes)| Cut::Vec4(Vec4 { rows, lanes, split: true })));
    }
    all.push(Cut::Shared(problem.shared()));
    all
}

impl Problem<'_> {
    /// The rows, keys and lanes of a workgroup. With many rows, keys and values are read seldom. But a row's sums must fit in
    /// registers, and enough workgroups must be left.
    fn shared(&self) -> Shared {
        let Extents { batch, m, e, .. } = self.extents;
        let size = 1usize << self.target.max_workgroup.min(256).ilog2();
        let fits = |rows: usize| rows <= size && e.div_ceil(size / rows) <= SUMS;
        let busy = |rows: usize| batch * m.div_ceil(rows) >= FEW_GROUPS;
        let most = m.next_power_of_two().min(32);
        let all = || (0..=5).rev().map(|i| 1usize << i).filter(|&rows| rows <= most && fits(rows));
        let rows = all().find(|&rows| busy(rows)).or_else(|| all().find(|&rows| rows <= 8)).unwrap_or(1);
        let columns = (1024 / rows).clamp(32, 128);
        Shared { rows, columns, lanes: size.min(rows * columns) / rows }
    }

    /// True if an operand's elements lie four at a time along the axis that its text reads.
    fn reads_fours(&self, slot: usize) -> bool {
        let rank = self.kernel.shape.len();
        let axis = if slot == 1 { rank - 2 } else { rank - 1 };
        let operand = &self.kernel.reads[slot];
        operand.dtype == DType::F32 && self.kernel.prologue(slot).is_none() && is_vectorizable(operand, axis, 4)
    }

    /// How invocations with vectors of four compute an attention of few rows, whose sums they can share, with as many keys at a time as
    /// fit in workgroup memory: a row of its own for each workgroup, unless there are plenty.
    fn decode(&self, own: &dyn Fn(usize) -> bool) -> Option<Decode> {
        let Extents { batch, m, k, e, n, .. } = self.extents;
        if m > Decode::ROWS || (self.target.max_workgroup as usize) < Decode::THREADS || e > 4 * Decode::THREADS {
            return None;
        }
        let enough = match self.target.multiprocessors {
            0 => FEW_GROUPS,
            multiprocessors => multiprocessors as usize,
        };
        // In WGSL, a binding of vectors must not hold other data.
        let alone = |slot: usize| self.target.family == Family::Cuda || own(slot);
        let vectors = [1, 2].map(|slot| self.reads_fours(slot) && alone(slot));
        let lanes = k.div_ceil(4).next_power_of_two().min(8);
        let across = e.div_ceil(4).next_power_of_two();
        let least = Decode::THREADS / lanes;
        let room = (self.target.max_shared as usize).min(Decode::MOST);
        let of = |rows: usize| {
            let groups = batch * m.div_ceil(rows);
            let useful = |columns: &usize| *columns == least || *columns < 2 * n;
            let all = (0..=3).rev().map(|i| least << i).filter(useful).map(|columns| {
                let cluster = self.cluster(groups, n.div_ceil(columns), 2 * enough);
                Decode { rows, columns, lanes, across, cluster, vectors }
            });
            all.into_iter().find(|decode| decode.bytes(k, e) <= room)
        };
        let busy = |rows: &usize| *rows < 2 * m && batch * m.div_ceil(*rows) >= enough;
        [8, 4, 2].into_iter().filter(busy).chain([1]).find_map(of)
    }

    /// How invocations with vectors of four compute an attention of any rows, whose sums fit in registers, and of which some
    /// rows and keys fit in workgroup memory.
    fn vec4(&self) -> Option<Vec4> {
        let Extents { batch, m, k, e, .. } = self.extents;
        if (self.target.max_workgroup as usize) < Vec4::THREADS {
            return None;
        }
        let fits = |vec4: &Vec4| {
            let held = vec4.each() * (1 + vec4.pieces(e));
            vec4.each() > 0 && held <= SUMS && vec4.bytes(k, e) <= self.target.max_shared as usize
        };
        let of = |rows: usize| {
            let all = [16, 8].into_iter().flat_map(|lanes| [true, false].map(|split| Vec4 { rows, lanes, split }));
            all.into_iter().find(fits)
        };
        let all = || [64, 32, 16, 8].into_iter().filter_map(of);
        let busy = |vec4: &Vec4| 2 * batch * m.div_ceil(vec4.rows) >= FEW_GROUPS;
        let enough = all().find(|vec4| m > vec4.rows / 2 && busy(vec4));
        enough.or_else(|| all().next_back())
    }

    /// How invocations with registers compute an attention whose scores and sums fit there, and of which a few rows and keys fit in
    /// workgroup memory: with as many rows as there are and as still occupy all multiprocessors.
    fn regs(&self) -> Option<Regs> {
        let Extents { batch, m, k, e, n, .. } = self.extents;
        let (most, width) = (self.target.max_shared as usize, tile_width(e).0);
        let room = 2 * self.target.multiprocessors as usize;
        let fits = |regs: &Regs| regs.rows / 8 * (width + regs.columns) / 16 <= 112 && 4 * regs.len(k, e) <= most;
        let spread = |rows: usize, columns: usize| {
            let cluster = self.cluster(batch * m.div_ceil(rows), n.div_ceil(columns), room);
            Regs { rows, columns, cluster }
        };
        let all = || REGS.into_iter().map(|(rows, columns)| spread(rows, columns)).filter(fits);
        let busy = |regs: &Regs| 2 * batch * m.div_ceil(regs.rows) * regs.cluster >= room;
        let enough = all().find(|regs| (m > regs.rows / 2 || regs.rows == 8) && busy(regs));
        enough.or_else(|| all().find(|regs| regs.rows <= m.next_power_of_two().clamp(8, 16)))
    }

    /// The number of workgroups that share the stripes of keys of each of `groups`, if these are fewer than there is room for.
    /// Clusters came with compute capability 9.0. The most workgroups that every such device supports in one is 8.
    fn cluster(&self, groups: usize, stripes: usize, room: usize) -> usize {
        let fits = |cluster: &usize| self.target.compute >= 90 && groups * cluster <= room && *cluster <= stripes;
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// True if tensor cores compute the attention: of 16-bit floats, by instructions that came with compute capability 8.0.
    fn has_tensor_cores(&self) -> bool {
        let element = self.kernel.reads[0].dtype;
        let matrices = &self.kernel.reads[..self.extents.fold.operands()];
        let is_half = element.is_half() && matrices.iter().all(|o| o.dtype == element);
        self.target.compute >= 80 && is_half && self.widest() <= WIDEST
    }

    /// The most columns of a tensor cores' operand.
    fn widest(&self) -> usize {
        self.extents.padded().into_iter().max().unwrap_or(0)
    }

    /// How tensor cores compute a row whose scores no other warp has a part of: with as many rows as there are and as occupy the card.
    fn unshared(&self) -> Option<Mma> {
        let Extents { batch, m, n, .. } = self.extents;
        if !self.has_tensor_cores() || self.widest() > WIDEST_SCORES {
            return None;
        }
        let room = self.target.multiprocessors as usize;
        let busy = |rows: usize| batch * m.div_ceil(rows) >= room;
        let rows = match m {
            65.. if busy(256) => 128,
            33.. if busy(64) => 64,
            17.. if busy(32) => 32,
            _ => 16,
        };
        let fits = |mma: &Mma| {
            let columns = mma.columns;
            let held = columns * self.widest() <= 64 * 80;
            held && (columns == 16 || columns < n + 16) && mma.bytes(&self.extents) <= self.target.max_shared as usize
        };
        let of = |columns: usize| Mma { rows, each: 1, teams: 1, columns, stages: 2, cluster: 1 };
        [64, 32, 16].map(of).into_iter().find(fits)
    }

    /// How tensor cores compute an attention. Its sums, scores and queries must fit in registers, and some of its keys and values in
    /// workgroup memory. If multiprocessors would be idle, more workgroups share the rows, and the warps of each share their keys.
    fn mma(&self) -> Option<Mma> {
        let Extents { batch, m, k, n, e, .. } = self.extents;
        if !self.has_tensor_cores() {
            return None;
        }
        let (room, d) = (self.target.multiprocessors as usize, k.max(e));
        let groups = |rows: usize| batch * m.div_ceil(rows);
        // The shares that were fastest if they fill the card. More rows are better.
        let (rows, each, teams, columns, stages) = match d {
            ..=80 if m > 64 && groups(128) >= 2 * room => SHARES[0],
            ..=128 if m > 64 && groups(128) >= 2 * room => SHARES[1],
            129.. if m > 64 && groups(128) >= 2 * room => SHARES[2],
            ..=128 if m > 32 && groups(64) >= room => SHARES[3],
            _ if m > 16 && 2 * groups(32) >= room => SHARES[4],
            // If a cluster shares the keys, fewer teams have less to collect.
            _ if 2 * groups(16) <= room => SHARES[5],
            _ => SHARES[6],
        };
        // At a time, no more keys than there are, and no more than fit.
        let narrower = (0..3).flat_map(|by| [teams, 2, 1].map(|teams| (columns >> by, teams)));
        let narrower = narrower.filter(|&(columns, other)| columns >= 16 && other <= teams);
        let all = narrower.map(|(columns, teams)| Mma { rows, each, teams, columns, stages, cluster: 1 });
        let fits = |w: &Mma| {
            let (stripe, least) = (w.teams * w.columns, w.teams == 1 && w.columns == 16);
            let held = w.columns * d <= 64 * 160;
            held && (least || stripe < n + 16 * w.teams) && w.bytes(&self.extents) <= self.target.max_shared as usize
        };
        let mma = all.into_iter().find(fits)?;
        let cluster = self.cluster(groups(rows), n.div_ceil(mma.teams * mma.columns), room);
        Some(Mma { cluster, ..mma }).filter(fits).or(Some(mma))
    }
}

impl Shared {
    /// Bytes of workgroup memory: slices of queries and keys, scores, and what lanes exchange.
    fn bytes(&self) -> usize {
        4 * ((self.rows + self.columns) * STEP + self.rows * self.columns + self.rows * self.lanes)
    }
}

impl Mma {
    /// Invocations of a workgroup.
    pub(in crate::kernel) fn threads(&self) -> usize {
        self.rows / 16 / self.each * self.teams * 32
    }

    /// Bytes of workgroup memory: keys and values, and keys of a second product. Warps leave their results in the same place.
    pub(in crate::kernel) fn bytes(&self, extents: &Extents) -> usize {
        let padded = extents.padded();
        let width = padded[1];
        let pitches = padded.into_iter().filter(|&columns| columns > 0).map(|columns| columns + 8);
        let tiles = 2 * self.stages * self.teams * self.columns * pitches.sum::<usize>();
        let found = 4 * self.rows * 2 * (4 + width / 2);
        let kept = match (self.teams, self.cluster) {
            (1, 1) => 0,
            (teams, cluster) => (teams + usize::from(cluster > 1)) * found,
        };
        tiles.max(kept)
    }
}

/// Columns of the values in workgroup memory for a result of `e`, and how many neighbours an invocation has.
pub(in crate::kernel) fn tile_width(e: usize) -> (usize, usize) {
    let each = (e.div_ceil(16).next_power_of_two()).min(4);
    (e.next_multiple_of(16 * each), each)
}

impl Decode {
    /// Invocations of a workgroup.
    pub(in crate::kernel) const THREADS: usize = 256;
    /// The most rows of an attention that counts as one of few rows.
    const ROWS: usize = 8;
    /// Bytes of workgroup memory that leave room for other workgroups on the same multiprocessor.
    const MOST: usize = 48 << 10;

    /// Invocations that share four columns of the values.
    pub(in crate::kernel) fn parts(&self) -> usize {
        (Decode::THREADS / self.across).min(self.columns / 4)
    }

    /// Places from one lane's parts of the scores to the next one's, so that those of a warp lie in different banks.
    pub(in crate::kernel) fn pitch(&self) -> usize {
        self.rows * self.columns + 32 / self.lanes
    }

    /// Places for parts of the scores, and at the end for sums.
    pub(in crate::kernel) fn tile(&self) -> usize {
        (self.lanes * self.pitch()).max(4 * Decode::THREADS)
    }

    /// Places for the results that workgroups of a cluster exchange: sums, totals and largest scores.
    pub(in crate::kernel) fn found(&self, e: usize) -> usize {
        if self.cluster > 1 { self.rows * (e + 2) } else { 0 }
    }

    /// Bytes of workgroup memory: queries, parts of scores, scores, largest of them, totals, what others collect.
    pub(in crate::kernel) fn bytes(&self, k: usize, e: usize) -> usize {
        let scores = self.tile() + self.rows * (self.columns + 16);
        16 * self.rows * k.div_ceil(4) + 4 * (scores + Decode::THREADS + self.found(e))
    }
}

impl Vec4 {
    /// Invocations of a workgroup.
    pub(in crate::kernel) const THREADS: usize = 128;

    /// Rows of an invocation.
    pub(in crate::kernel) fn each(&self) -> usize {
        self.rows * self.lanes / Vec4::THREADS
    }

    /// Vectors of a row's sums that an invocation holds.
    pub(in crate::kernel) fn pieces(&self, e: usize) -> usize {
        e.div_ceil(4).div_ceil(self.lanes)
    }

    /// Vectors from one row of queries or keys to the next: odd, so that neighbours' lie in different banks.
    pub(in crate::kernel) fn pitch(k: usize) -> usize {
        k.div_ceil(4) | 1
    }

    /// Where keys and values begin among the vectors of workgroup memory, and where these end.
    pub(in crate::kernel) fn places(&self, k: usize, e: usize) -> [usize; 3] {
        let keys = self.rows * Vec4::pitch(k);
        let [keys_end, values_len] = [keys + 4 * self.lanes * Vec4::pitch(k), 4 * self.lanes * e.div_ceil(4)];
        let values = if self.split { keys_end } else { keys };
        [keys, values, keys_end.max(values + values_len)]
    }

    /// Bytes of workgroup memory: queries, keys, values, weights, and what lanes exchange.
    pub(in crate::kernel) fn bytes(&self, k: usize, e: usize) -> usize {
        let scores = self.rows * self.lanes;
        16 * (self.places(k, e)[2] + scores) + 4 * scores
    }
}

impl Regs {
    /// Elements of workgroup memory: queries, keys or else weights, values, in whose place workgroups of a cluster leave what they found.
    pub(in crate::kernel) fn len(&self, k: usize, e: usize) -> usize {
        let &Regs { rows, columns, cluster } = self;
        let width = tile_width(e).0;
        let tiles = k * rows + k.max(rows) * columns + columns * width;
        if cluster > 1 { tiles.max(rows * (32 + width)) } else { tiles }
    }
}
