//! The first elements of groups, in order.
//!
//! A key becomes an unsigned integer of the same order, and with its element's number in the lower half an integer that no other element has.
//! These are sorted. Where few are kept, a row is read once: a heap of candidates is cut to the best whenever it is full, and what is behind
//! the last of them is passed by.

use super::block::Repr;
use super::operands::stored;
use super::task::{Args, Compiled, Needs, Scratch, Workspace};
use half::{bf16, f16};
use plimsoll_core::kernel::cpu::candidates;
use plimsoll_core::kernel::{Kernel, Template};
use plimsoll_core::shape::Access;

pub struct Sort {
    largest: bool,
    repr: Repr,
    /// The first key of each row, and of each of its groups the first index, if they are given.
    keys: Access,
    given: Option<Access>,
    /// Bytes of a key, and from one key to the next.
    step: isize,
    /// From one index to the next of a run, and from one run to the next.
    index_steps: [isize; 2],
    /// Keys of a row, groups of a row, runs of a group, indices of a run, elements of a group that are kept.
    n: usize,
    groups: usize,
    runs: usize,
    from: usize,
    kept: usize,
    /// Where the rows of the result begin, and the step along one.
    result: Access,
    result_step: isize,
    rows: usize,
    /// Candidates for which there is room.
    room: usize,
    workspace: Workspace,
}

impl Sort {
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Sort, String> {
        let &Template::Sort { largest, given, runs } = &kernel.template else {
            return Err(format!("an order of template '{}'", kernel.template.name()));
        };
        let outer = kernel.shape.len() - 2;
        let first = |access: &Access, axes: usize| Access {
            shape: access.shape[..axes].iter().copied().collect(),
            strides: access.strides[..axes].to_vec(),
            offset: access.offset,
        };
        let (keys, write) = (&kernel.reads[0], &kernel.writes[0].access);
        let repr = stored(keys)?;
        let indices = given.then(|| &kernel.reads[1].access);
        let rows: usize = kernel.shape[..=outer].iter().product();
        Ok(Sort {
            largest,
            repr,
            keys: first(&keys.access, outer),
            given: indices.map(|access| first(access, outer + 1)),
            step: keys.access.strides[outer] * repr.size() as isize,
            index_steps: indices.map_or([0, 0], |access| [access.strides[outer + 2], access.strides[outer + 1]]),
            n: keys.access.shape[outer],
            groups: kernel.shape[outer],
            runs,
            from: indices.map_or(1, |access| access.shape[outer + 2]),
            kept: kernel.shape[outer + 1],
            result: first(write, outer + 1),
            result_step: write.strides[outer + 1],
            rows,
            room: candidates(kernel),
            workspace: Workspace::new(kernel, threads, rows.min(4 * threads))?,
        })
    }

    /// The order of one row.
    ///
    /// # Safety
    /// The addresses must lead to the row's keys, its group's indices, if they are given, and its results, and `room` to memory for as many
    /// candidates as there is room for.
    unsafe fn row<C: Candidate>(
        &self,
        group: usize,
        keys: *const u8,
        indices: *const i32,
        to: *mut i32,
        room: &mut [C],
        key: impl Fn(*const u8) -> C::Key,
    ) {
        let (n, kept) = (self.n, self.kept);
        let (mut len, mut bound) = (0, C::LAST);
        let mut take = |i: usize, number: usize| {
            // SAFETY: the number is below `n`.
            let candidate = C::new(key(unsafe { keys.offset(number as isize * self.step) }), i, self.largest);
            if candidate < bound {
                room[len] = candidate;
                len += 1;
                if len == room.len() && len > kept {
                    room[..len].select_nth_unstable(kept - 1);
                    (len, bound) = (kept, room[kept - 1]);
                }
            }
        };
        if kept == 0 {
            return;
        }
        let all = self.runs * self.from;
        let number = |i: usize| {
            if indices.is_null() {
                return group * self.runs + i;
            }
            let (run, at) = ((i / self.from) as isize, (i % self.from) as isize);
            // SAFETY: guaranteed by the caller.
            let index =
                unsafe { indices.offset(run * self.index_steps[1] + at * self.index_steps[0]).read_unaligned() };
            usize::try_from(index).unwrap_or(n)
        };
        if indices.is_null() {
            let first = group * self.runs;
            (0..all.min(n.saturating_sub(first))).for_each(|i| take(i, first + i));
        } else {
            (0..all).map(|i| (i, number(i))).filter(|&(_, number)| number < n).for_each(|(i, number)| take(i, number));
        }
        let found = len.min(kept);
        if len > kept {
            room[..len].select_nth_unstable(kept - 1);
        }
        room[..found].sort_unstable();
        for (place, candidate) in (0..kept).map(|place| (place, room.get(place))) {
            // Behind what was found there is nothing.
            let index = candidate.filter(|_| place < found).map_or(n, |candidate| number(candidate.element()));
            // SAFETY: guaranteed by the caller.
            unsafe { to.offset(place as isize * self.result_step).write_unaligned(index as i32) };
        }
    }
}

/// A key with the number of its element, which tells equal keys apart.
trait Candidate: Copy + Ord {
    type Key;
    /// What is behind all candidates.
    const LAST: Self;
    fn new(key: Self::Key, element: usize, largest: bool) -> Self;
    fn element(self) -> usize;
}

impl Candidate for u64 {
    type Key = u32;
    const LAST: u64 = u64::MAX;
    #[inline(always)]
    fn new(key: u32, element: usize, largest: bool) -> u64 {
        let key = if largest { !key } else { key };
        u64::from(key) << 32 | element as u64
    }
    fn element(self) -> usize {
        self as u32 as usize
    }
}

impl Candidate for u128 {
    type Key = u64;
    const LAST: u128 = u128::MAX;
    #[inline(always)]
    fn new(key: u64, element: usize, largest: bool) -> u128 {
        let key = if largest { !key } else { key };
        u128::from(key) << 64 | element as u128
    }
    fn element(self) -> usize {
        self as u64 as usize
    }
}

/// An integer in the order of floats: zeros of both signs are equal, and what is not a number stands above all.
fn of_f32(x: f32) -> u32 {
    let bits = (if x == 0.0 { 0.0 } else { x }).to_bits();
    let ordered = if bits >> 31 != 0 { !bits } else { bits | 1 << 31 };
    if x.is_nan() { u32::MAX } else { ordered }
}

fn of_f64(x: f64) -> u64 {
    let bits = (if x == 0.0 { 0.0 } else { x }).to_bits();
    let ordered = if bits >> 63 != 0 { !bits } else { bits | 1 << 63 };
    if x.is_nan() { u64::MAX } else { ordered }
}

impl Compiled for Sort {
    fn needs(&self) -> Needs {
        Needs { tile: self.workspace.tile_bytes(), ..Needs::default() }
    }

    fn tasks(&self, _: usize) -> usize {
        self.workspace.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        // SAFETY: a task holds one slot.
        let room = unsafe { self.workspace.slot(args, task, scratch) };
        let (of_32, of_64) = (room.as_mut_ptr().cast::<u64>(), room.as_mut_ptr().cast::<u128>());
        let size = self.repr.size() as isize;
        for row in self.workspace.share(self.rows, task) {
            let (outer, group) = (row / self.groups, row % self.groups);
            let keys = args.at(0, self.keys.element(outer) * size).cast_const();
            let indices = self.given.as_ref().map(|given| args.at(1, given.element(row) * size_of::<i32>() as isize));
            let indices = indices.map_or(std::ptr::null(), |at| at.cast_const().cast::<i32>());
            let result = 1 + usize::from(self.given.is_some());
            let to = args.at(result, self.result.element(row) * size_of::<i32>() as isize).cast::<i32>();
            macro_rules! sorted {
                ($room:expr, $T:ty, $key:expr) => {{
                    // SAFETY: operands were checked to span their memory when the launch was recorded; a slot has room for the candidates, and
                    // lies at a multiple of 64 bytes.
                    unsafe {
                        let room = std::slice::from_raw_parts_mut($room, self.room);
                        let key = |at: *const u8| ($key)(at.cast::<$T>().read_unaligned());
                        self.row(group, keys, indices, to, room, key)
                    }
                }};
            }
            match self.repr {
                Repr::F32 => sorted!(of_32, f32, of_f32),
                Repr::F64 => sorted!(of_64, f64, of_f64),
                Repr::F16 => sorted!(of_32, f16, |x: f16| of_f32(x.to_f32())),
                Repr::BF16 => sorted!(of_32, bf16, |x: bf16| of_f32(x.to_f32())),
                Repr::I64 => sorted!(of_64, i64, |x: i64| x as u64 ^ 1 << 63),
                Repr::U64 => sorted!(of_64, u64, |x: u64| x),
                Repr::I32 => sorted!(of_32, i32, |x: i32| x as u32 ^ 1 << 31),
                Repr::U32 => sorted!(of_32, u32, |x: u32| x),
                Repr::I16 => sorted!(of_32, i16, |x: i16| i32::from(x) as u32 ^ 1 << 31),
                Repr::U16 => sorted!(of_32, u16, u32::from),
                Repr::I8 => sorted!(of_32, i8, |x: i8| i32::from(x) as u32 ^ 1 << 31),
                Repr::U8 | Repr::Bool => sorted!(of_32, u8, u32::from),
            }
        }
    }
}
