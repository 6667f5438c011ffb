//! Time as sections.

use super::Problem;
use std::ops::Range;
use std::sync::OnceLock;

/// Time, cut into sections: a run of births, then a run of deaths. Two items overlap in time exactly when they share a section,
/// and the live sum of a section is that between its births and its deaths.
pub(super) struct Timeline {
    /// The sections that each item spans; none if it has no bytes.
    pub spans: Vec<Range<usize>>,
    /// Live bytes by section.
    pub live: Vec<u64>,
    busiest: OnceLock<Vec<u64>>,
}

/// The worth of a section that has nothing to spare, and how often it may double. All sections have 31 bits more.
const FULL: u64 = 1 << 20;
const MORE: u32 = 8;

impl Timeline {
    pub fn new(problem: &Problem) -> Timeline {
        let mut spans = vec![0..0; problem.items.len()];
        let mut live = Vec::new();
        // Ranges are half-open, so the deaths at a time (false) come before its births (true).
        let mut events = Vec::with_capacity(2 * spans.len());
        for (index, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
            events.push((item.lower, true, index as u32));
            events.push((item.upper, false, index as u32));
        }
        events.sort_unstable();
        let (mut now, mut growing) = (0, false);
        for (_, birth, index) in events {
            if growing && !birth {
                live.push(now);
            }
            growing = birth;
            let index = index as usize;
            if birth {
                spans[index].start = live.len();
                now += problem.size(index);
            } else {
                spans[index].end = live.len();
                now -= problem.size(index);
            }
        }
        Timeline { spans, live, busiest: OnceLock::new() }
    }

    pub fn bound(&self) -> u64 {
        self.live.iter().copied().max().unwrap_or(0)
    }

    /// How many items a section has on average.
    pub fn crowd(&self) -> u64 {
        self.spans.iter().map(|span| span.len() as u64).sum::<u64>() / self.live.len().max(1) as u64
    }

    /// By item, the largest live sum in its span.
    pub fn busiest(&self) -> &[u64] {
        self.busiest.get_or_init(|| self.find_busiest())
    }

    fn find_busiest(&self) -> Vec<u64> {
        let leaves = self.live.len();
        let mut tree = vec![0; leaves];
        tree.extend(&self.live);
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].max(tree[2 * node + 1]);
        }
        let busiest = |span: &Range<usize>| {
            let (mut from, mut to, mut most) = (span.start + leaves, span.end + leaves, 0);
            while from < to {
                if from % 2 == 1 {
                    most = tree[from].max(most);
                }
                if to % 2 == 1 {
                    most = tree[to - 1].max(most);
                }
                (from, to) = (from.div_ceil(2), to / 2);
            }
            most
        };
        self.spans.iter().map(busiest).collect()
    }

    /// How much room matters in the sections before each, in sum: half as much with each such part of the bound (one in `parts`) that a
    /// section has to spare, twice as much with each that it lacks, where `lacking` says so.
    pub fn worth(&self, parts: u64, lacking: &[u64]) -> Vec<u64> {
        let (bound, mut sum) = (self.bound(), 0);
        let mut worth = Vec::with_capacity(self.live.len() + 1);
        worth.push(0);
        for (section, &live) in self.live.iter().enumerate() {
            let (spare, lack) = (bound - live, lacking.get(section).copied().unwrap_or(0));
            let doublings = |bytes: u64, most: u32| (bytes / (bound / parts + 1)).min(most.into());
            sum += match spare.checked_sub(lack) {
                Some(spare) => FULL >> doublings(spare, FULL.ilog2()),
                None => FULL << doublings(lack - spare, MORE),
            };
            worth.push(sum);
        }
        worth
    }
}
