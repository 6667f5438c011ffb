//! The backend's threads: a fork-join pool that allocates nothing once it is made.
//!
//! A kernel is cut into tasks. The calling thread publishes the job, takes tasks itself, and waits only for the workers that took part: one
//! that wakes up late finds the gate closed and costs nothing. Between jobs a worker spins for a moment, because kernels of one run follow
//! each other within microseconds, and then sleeps.
//!
//! A general pool such as rayon does not serve: its broadcasts and its injector queue allocate, and a run must not.

use plimsoll_core::target::STACK_ADDRESSES;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// The number of times that a worker looks for the next job before it sleeps: some tens of microseconds.
const SPINS: usize = 1 << 10;

/// A job: calls `work(task, worker)` for tasks taken from a common counter.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that share tasks with the thread that calls [`ThreadPool::run`].
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<(JoinHandle<()>, Thread)>,
}

struct Shared {
    /// Bit 0: a job may be entered. Above it: how many workers are inside.
    gate: AtomicUsize,
    /// Counts jobs, so that a worker enters each at most once.
    epoch: AtomicUsize,
    /// The next task that nobody has taken.
    next: AtomicUsize,
    /// Written by the caller only while the gate is closed and nobody is inside.
    job: UnsafeCell<Option<Job>>,
    asleep: Vec<AtomicBool>,
    panicked: AtomicBool,
    quit: AtomicBool,
}

#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    tasks: usize,
}

// SAFETY: `job` is written only while the gate is closed and empty, and read only by workers that entered through it; what it
// points to is `Sync` and outlives the job, because the caller waits until the gate is empty.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed inside a job.
unsafe impl Send for Shared {}

impl ThreadPool {
    /// A pool of `threads` threads, the caller's own among them; fewer when the system refuses one.
    pub fn new(threads: usize) -> ThreadPool {
        let helpers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            gate: AtomicUsize::new(0),
            epoch: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            panicked: AtomicBool::new(false),
            quit: AtomicBool::new(false),
        });
        let mut pool = ThreadPool { shared, workers: Vec::with_capacity(helpers) };
        for worker in 0..helpers {
            let shared = Arc::clone(&pool.shared);
            let name = format!("plimsoll-{}", worker + 1);
            let builder = std::thread::Builder::new().name(name).stack_size(STACK_ADDRESSES as usize);
            match builder.spawn(move || shared.serve(worker)) {
                Ok(handle) => {
                    let thread = handle.thread().clone();
                    pool.workers.push((handle, thread));
                }
                Err(error) => {
                    tracing::warn!("{} threads instead of {threads}: {error}", worker + 1);
                    break;
                }
            }
        }
        pool
    }

    /// Number of threads, the caller's own among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task, worker)` once for every `task < tasks`, with `worker < threads()` telling the threads apart; returns when
    /// all are done.
    ///
    /// # Panics
    /// When `work` does.
    pub fn run(&mut self, tasks: usize, work: &Work<'_>) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(|task| work(task, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is followed by workers inside the gate alone, and `Finish` waits
        // for them before this borrow ends, whichever way the function is left.
        let work_ptr = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: `&mut self` and the end of the previous job: the gate is closed and nobody is inside.
        unsafe { *shared.job.get() = Some(Job { work: work_ptr, tasks }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.gate.fetch_or(1, Ordering::Release);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (asleep, (_, thread)) in shared.asleep.iter().zip(&self.workers).take(tasks - 1) {
            if asleep.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let finish = Finish(shared);
        shared.take_tasks(work, tasks, 0);
        drop(finish);
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a kernel panicked on another thread");
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker's own panic was caught and reported where the job was run.
            let _ = handle.join();
        }
    }
}

/// Closes the gate and waits until the last worker has left.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        // No further task is handed out if the caller is unwinding.
        self.0.next.store(usize::MAX / 2, Ordering::Relaxed);
        let mut inside = self.0.gate.fetch_and(!1, Ordering::AcqRel) & !1;
        let mut spins = 0;
        while inside != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            inside = self.0.gate.load(Ordering::Acquire);
        }
    }
}

impl Shared {
    fn take_tasks(&self, work: &Work<'_>, tasks: usize, worker: usize) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task, worker);
        }
    }

    /// A worker's life.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait(worker, seen);
            if self.quit.load(Ordering::SeqCst) {
                return;
            }
            if self.gate.fetch_add(2, Ordering::Acquire) & 1 == 1 {
                // SAFETY: the gate was open when this worker was counted in, so the job is valid until it is counted out.
                let job = unsafe { (*self.job.get()).expect("an open gate has a job") };
                // SAFETY: as above, for the function that the job points to.
                let work = unsafe { &*job.work };
                let run = AssertUnwindSafe(|| self.take_tasks(work, job.tasks, worker + 1));
                if let Err(payload) = catch_unwind(run) {
                    self.panicked.store(true, Ordering::Relaxed);
                    drop(catch_unwind(AssertUnwindSafe(|| drop(payload))));
                }
            }
            self.gate.fetch_sub(2, Ordering::Release);
        }
    }

    /// Waits for an epoch other than `seen`.
    fn wait(&self, worker: usize, seen: usize) -> usize {
        for _ in 0..SPINS {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        loop {
            self.asleep[worker].store(true, Ordering::SeqCst);
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.asleep[worker].store(false, Ordering::SeqCst);
                return epoch;
            }
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once_whoever_comes_late() {
        for threads in [1, 2, 3] {
            let mut pool = ThreadPool::new(threads);
            for round in 0..300 {
                let hits: Vec<AtomicU32> = (0..round % 40).map(|_| AtomicU32::new(0)).collect();
                pool.run(hits.len(), &|task, worker| {
                    assert!(worker < threads);
                    hits[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "round {round}");
                if round % 100 == 50 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let mut pool = ThreadPool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|task, _| assert!(task != 5, "task 5"))));
        assert!(result.is_err());
        let done = AtomicU32::new(0);
        pool.run(8, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 8);
    }
}
