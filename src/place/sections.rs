//! Sections: ranges of time within which the same items are live.

use super::Problem;
use std::ops::Range;
use std::sync::OnceLock;

/// Time, cut into sections. A section is a run of starts of items, then a run of ends.
///
/// Two items overlap in time exactly if they share a section. The live sum of a section is that between its starts and its ends.
pub(super) struct Sections {
    /// The sections that each item spans; none if it has no bytes.
    pub spans: Vec<Range<usize>>,
    /// Live bytes by section.
    pub live: Vec<u64>,
    busiest: OnceLock<Vec<u64>>,
}

/// The worth of a section without spare room. It may double [`MORE`] times, and the sum over all sections takes 31 bits more.
const FULL: u64 = 1 << 20;
const MORE: u32 = 8;

impl Sections {
    pub fn new(problem: &Problem) -> Sections {
        let mut spans = vec![0..0; problem.items.len()];
        let mut live = Vec::new();
        // Ranges are half-open, so the ends at a time (false) come before its starts (true).
        let mut events = Vec::with_capacity(2 * spans.len());
        for (index, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
            events.push((item.lower, true, index as u32));
            events.push((item.upper, false, index as u32));
        }
        events.sort_unstable();
        let (mut now, mut growing) = (0, false);
        for (_, starts, index) in events {
            if growing && !starts {
                live.push(now);
            }
            growing = starts;
            let index = index as usize;
            if starts {
                spans[index].start = live.len();
                now += problem.size(index);
            } else {
                spans[index].end = live.len();
                now -= problem.size(index);
            }
        }
        Sections { spans, live, busiest: OnceLock::new() }
    }

    pub fn bound(&self) -> u64 {
        self.live.iter().copied().max().unwrap_or(0)
    }

    /// The average number of items in a section.
    pub fn crowd(&self) -> u64 {
        self.spans.iter().map(|span| span.len() as u64).sum::<u64>() / self.live.len().max(1) as u64
    }

    /// Per item, the largest live sum of its sections.
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

    /// The worth of room, as prefix sums over the sections.
    ///
    /// A section without spare room is worth [`FULL`]. Its worth halves with each `1 / parts` of the bound that it has to spare,
    /// and doubles with each that it lacks according to `lacking`.
    pub fn worth(&self, parts: u64, lacking: &[u64]) -> Vec<u64> {
        let (bound, mut sum) = (self.bound(), 0);
        let mut worth = Vec::with_capacity(self.live.len() + 1);
        worth.push(0);
        for (section, &live) in self.live.iter().enumerate() {
            let (slack, lack) = (bound - live, lacking.get(section).copied().unwrap_or(0));
            let doublings = |bytes: u64, most: u32| (bytes / (bound / parts + 1)).min(most.into());
            sum += match slack.checked_sub(lack) {
                Some(slack) => FULL >> doublings(slack, FULL.ilog2()),
                None => FULL << doublings(lack - slack, MORE),
            };
            worth.push(sum);
        }
        worth
    }
}
