//! How long to search.

use std::thread;
use std::time::Instant;

/// When [`place`](super::place) stops, unless it cannot do better before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// After so many elementary steps, of one or two nanoseconds each. The result is the same on every machine.
    Steps(u64),
    /// At this time, or when the first placement is there. Later is never worse.
    Until(Instant),
}

impl Effort {
    /// What planning a graph spends on an order of steps: a few tens of milliseconds at most.
    pub const PLAN: Effort = Effort::Steps(20_000_000);
}

/// Counts steps, and looks at the clock now and then.
pub(super) struct Meter {
    effort: Effort,
    spent: u64,
    /// When to look at the clock again.
    look: u64,
    over: bool,
    /// Whether two may work side by side.
    threads: bool,
}

impl Meter {
    /// Steps between two looks at the clock: far less than a millisecond.
    const LOOK: u64 = 1 << 17;

    pub fn new(effort: Effort) -> Meter {
        Meter { effort, spent: 0, look: 0, over: false, threads: true }
    }

    /// The same meter for one core, which leads to the same result.
    #[cfg(test)]
    pub fn without_threads(self) -> Meter {
        Meter { threads: false, ..self }
    }

    /// Counts steps. True when it is time to stop, and from then on.
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

    /// Does two pieces of work side by side, each within half of what is left. Where time was up for one it is up.
    pub fn both<T: Send>(&mut self, work: impl Fn(usize, &mut Meter) -> T + Sync) -> [T; 2] {
        let [mut first, mut second] = self.halves();
        let mut beside = || work(1, &mut second);
        let (one, other) = thread::scope(|scope| {
            let other = self.threads.then(|| thread::Builder::new().spawn_scoped(scope, &mut beside).ok()).flatten();
            (work(0, &mut first), other.map(|other| other.join().expect("what places items does not panic")))
        });
        // A system that gives no thread gets the same answer, later.
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

    /// How many steps were counted.
    pub fn spent(&self) -> u64 {
        self.spent
    }
}
