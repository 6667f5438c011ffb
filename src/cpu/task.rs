//! A kernel that is ready to run: its tasks, and the memory that a thread needs for one.

use super::memory::Line;
use super::nest::Nest;
use super::shares::{Shares, portion};
use plimsoll_core::error::ensure;
use plimsoll_core::kernel::Kernel;
use plimsoll_core::kernel::cpu::{Slots, slots};
use std::ops::Range;

/// Addresses of a launch's arguments.
pub struct Args(pub Vec<*mut u8>);

// SAFETY: these are addresses; whoever uses them keeps the contract of `Compiled::run`.
unsafe impl Send for Args {}
// SAFETY: as above.
unsafe impl Sync for Args {}

impl Args {
    /// The address `position` bytes into argument `arg`.
    #[inline(always)]
    pub fn at(&self, arg: usize, position: isize) -> *mut u8 {
        self.0[arg].wrapping_offset(position)
    }

    /// True if none of these reads begins where the argument does. The backend refuses launches whose slices overlap and are not equal.
    pub fn are_apart(&self, arg: usize, reads: &[usize]) -> bool {
        reads.iter().all(|&read| self.0[read] != self.0[arg])
    }
}

/// The scratch memory that a kernel needs of each thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// Bytes of block registers.
    pub bytes: usize,
    /// Base pointers.
    pub bases: usize,
    /// Axes of its nest.
    pub rank: usize,
    /// Operands of its nest.
    pub motions: usize,
    /// Bytes of tile memory for the blocks of products and windows.
    pub tile: u64,
    /// Bytes of tables that the kernel holds, whatever the number of threads.
    pub tables: u64,
}

impl Needs {
    /// Bytes of scratch memory per thread: registers, then tile memory.
    pub fn thread_bytes(&self) -> u64 {
        let whole = |bytes: u64| bytes.next_multiple_of(size_of::<Line>() as u64);
        whole(self.bytes as u64) + whole(self.tile)
    }
}

/// A thread's own memory: block registers from its start on, tile memory up to its end, and loop counters.
pub struct Scratch {
    /// The thread's number.
    pub worker: usize,
    /// Aligned to 256 bytes, as is the end.
    pub mem: *mut u8,
    pub end: *mut u8,
    pub bases: Vec<*mut u8>,
    pub index: Vec<usize>,
    pub at: Vec<isize>,
}

impl Scratch {
    pub fn new(worker: usize) -> Scratch {
        let none = std::ptr::null_mut();
        Scratch { worker, mem: none, end: none, bases: Vec::new(), index: Vec::new(), at: Vec::new() }
    }

    /// Grows the loop counters to the needs of a kernel.
    pub fn provide(&mut self, needs: Needs) {
        fn grow<T: Clone>(list: &mut Vec<T>, len: usize, value: T) {
            if list.len() < len {
                list.resize(len, value);
            }
        }
        grow(&mut self.bases, needs.bases, std::ptr::null_mut());
        grow(&mut self.index, needs.rank, 0);
        grow(&mut self.at, needs.motions, 0);
    }
}

/// Calls `each` for every item of a task: with the positions of the nest's operands in the item's row, and the elements of the row.
#[inline(always)]
pub fn walk(
    nest: &Nest,
    shares: &Shares,
    task: usize,
    scratch: &mut Scratch,
    mut each: impl FnMut(&[isize], Range<usize>),
) {
    let items = shares.of(task);
    let (index, at) = (&mut scratch.index[..nest.rank()], &mut scratch.at[..nest.start.len()]);
    let mut row = shares.row(items.start);
    nest.seek(row, index, at);
    for item in items {
        if shares.row(item) != row {
            row += 1;
            nest.advance(index, at);
        }
        each(at, shares.elements(item));
    }
}

/// A kernel that is ready to run.
pub trait Compiled: Send + Sync {
    /// The scratch memory that it needs of each thread.
    fn needs(&self) -> Needs;

    /// The number of phases, which follow one another.
    fn phases(&self) -> usize {
        1
    }

    /// The number of tasks of a phase. They are independent.
    fn tasks(&self, phase: usize) -> usize;

    /// Runs one task.
    ///
    /// # Safety
    /// `args` must have passed the check of launches for the same kernel, `scratch` have what [`Compiled::needs`] says, and nothing else may
    /// use the memory behind `args` but other tasks of the same phase, each once. Earlier phases must be complete.
    unsafe fn run(&self, phase: usize, task: usize, args: &Args, scratch: &mut Scratch);
}

/// A kernel's workspace, as its tasks share it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Workspace {
    /// The launch's argument.
    pub arg: usize,
    /// Bytes in front that all share.
    pub shared: u64,
    /// Bytes of each slot, and how many there are; none when the threads' tile memory serves.
    each: u64,
    count: u64,
    /// Number of tasks: as many as slots at most, or any number if there is a slot for every thread.
    pub tasks: usize,
}

impl Workspace {
    /// For a kernel that would like to be cut into `tasks` tasks.
    pub fn new(kernel: &Kernel, threads: usize, tasks: usize) -> Result<Workspace, String> {
        let slots = slots(kernel);
        let Slots { shared, each, .. } = slots;
        let arg = kernel.reads.len() + kernel.writes.len();
        if kernel.workspace == 0 && slots.in_tile() {
            return Ok(Workspace { arg, shared, each, count: 0, tasks });
        }
        let count = match kernel.workspace.checked_sub(shared) {
            Some(_) if each == 0 => u64::MAX,
            Some(rest) => rest / each,
            None => 0,
        };
        ensure(count != 0, || format!("a workspace of {} bytes, at least {} needed", kernel.workspace, shared + each))?;
        let tasks = if count >= threads as u64 { tasks } else { tasks.min(count as usize) };
        Ok(Workspace { arg, shared, each, count, tasks })
    }

    /// Bytes of a slot in the threads' tile memory, if it serves.
    pub fn tile_bytes(&self) -> u64 {
        if self.count == 0 { self.each } else { 0 }
    }

    /// The share of `items` that is a task's.
    pub fn share(&self, items: usize, task: usize) -> Range<usize> {
        portion(items, task, self.tasks)
    }

    /// The slot of a task that a worker runs.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; a task may hold one slot at a time.
    pub unsafe fn slot<'a>(&self, args: &Args, task: usize, scratch: &mut Scratch) -> &'a mut [f32] {
        if self.each == 0 {
            return &mut [];
        }
        if self.count == 0 {
            let bytes = self.each.next_multiple_of(size_of::<Line>() as u64) as usize;
            let tile = scratch.end.wrapping_sub(bytes);
            // SAFETY: the scratch memory has room for the slot behind the registers, by `Needs`; it is the worker's own until the task ends.
            return unsafe { std::slice::from_raw_parts_mut(tile.cast(), self.each as usize / 4) };
        }
        let worker = scratch.worker;
        let slot = if self.tasks as u64 <= self.count { task as u64 } else { worker as u64 };
        let at = args.at(self.arg, (self.shared + slot * self.each) as isize);
        // SAFETY: inside the workspace, whose size was checked; slots are apart, and no two tasks at work have the same.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), self.each as usize / 4) }
    }
}
