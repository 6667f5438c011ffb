//! Time as sections.

use super::Problem;
use std::ops::Range;

/// Time, cut into sections: a run of births, then a run of deaths. Two items overlap in time exactly when they share a section,
/// and the live sum of a section is that between its births and its deaths.
pub(super) struct Timeline {
    /// The sections that each item spans; none if it has no bytes.
    pub spans: Vec<Range<usize>>,
    /// Live bytes by section.
    pub live: Vec<u64>,
}

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
        Timeline { spans, live }
    }

    pub fn bound(&self) -> u64 {
        self.live.iter().copied().max().unwrap_or(0)
    }

    /// By item, the largest live sum in its span.
    pub fn busiest(&self) -> Vec<u64> {
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
}
