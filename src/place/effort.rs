//! The effort of a search, and the meter that counts its steps.

use std::thread;
use std::time::Instant;

/// The most that [`place`](super::place) spends. It stops earlier if it cannot do better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// A number of elementary steps, of one or two nanoseconds each. The result is the same on every machine.
    Steps(u64),
    /// A deadline. The first placement is made even if it is later. A later deadline never gives a worse result.
    Until(Instant),
}

impl Effort {
    /// The effort for one order of steps when a graph is planned: a few tens of milliseconds at most.
    pub const PLAN: Effort = Effort::Steps(20_000_000);
}

/// Counts steps and, now and then, looks at the clock.
pub(super) struct Meter {
    effort: Effort,
    spent: u64,
    /// Number of steps after which to look at the clock again.
    look: u64,
    over: bool,
    /// True if a second thread may be used.
    threads: bool,
}

impl Meter {
    /// Steps between two looks at the clock: far less than a millisecond.
    const LOOK: u64 = 1 << 17;

    pub fn new(effort: Effort) -> Meter {
        Meter { effort, spent: 0, look: 0, over: false, threads: true }
    }

    /// The same meter without threads. The result is the same.
    #[cfg(test)]
    pub fn without_threads(self) -> Meter {
        Meter { threads: false, ..self }
    }

    /// Counts steps. Returns true when the effort is spent, and from then on.
    pub fn spend(&mut self, steps: u64) -> bool {
        self.spent = self.spent.saturating_add(steps);
        match self.effort {
            Effort::Steps(limit) => self.over |= self.spent >= limit,
            Effort::Until(time) if self.spent >= self.look => {
                self.over |= Instant::now() >= time;
                self.look = self.spent.saturating_add(Meter::LOOK);
            }
            Effort::Until(_) => {}
        }
        self.over
    }

    /// Does two pieces of work on two threads, each with half of the remaining effort. If one runs out, so does this meter.
    pub fn both<T: Send>(&mut self, work: impl Fn(usize, &mut Meter) -> T + Sync) -> [T; 2] {
        let [mut first, mut second] = self.halves();
        let mut beside = || work(1, &mut second);
        let (one, other) = thread::scope(|scope| {
            let other = self.threads.then(|| thread::Builder::new().spawn_scoped(scope, &mut beside).ok()).flatten();
            (work(0, &mut first), other.map(|other| other.join().expect("what places items does not panic")))
        });
        // If the system gives no thread, the second piece runs here afterwards. The result is the same.
        let other = other.unwrap_or_else(beside);
        for half in [first, second] {
            self.spend(half.spent);
            self.over |= half.over;
        }
        [one, other]
    }

    fn halves(&self) -> [Meter; 2] {
        let effort = match self.effort {
            Effort::Steps(limit) => Effort::Steps(limit.saturating_sub(self.spent) / 2),
            until => until,
        };
        [(); 2].map(|()| Meter { over: self.over, threads: self.threads, ..Meter::new(effort) })
    }

    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The number of steps counted so far.
    pub fn spent(&self) -> u64 {
        self.spent
    }
}
