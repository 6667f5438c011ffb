//! Which launches must wait for which: those that touch bytes that another writes. All others may run side by side.

use super::{SegmentId, Slice};
use std::collections::BTreeMap;

/// Launches in order, as far as they were told.
#[derive(Debug, Default)]
pub struct Conflicts {
    /// Bytes that launches touched, by their first one: apart from each other, and without a gap where all of a slice was touched.
    touched: BTreeMap<(SegmentId, u64), Touched>,
    /// Per launch, a bit for each launch that is over before it starts.
    before: Vec<Vec<u64>>,
}

/// Bytes up to `end`, whoever wrote them last, and those that have read them since.
#[derive(Clone, Debug)]
struct Touched {
    end: u64,
    writer: Option<usize>,
    readers: Vec<usize>,
}

impl Conflicts {
    /// The next launch, which touches these slices, each for reading only or not. Returns the launches that it has to wait for, without those that
    /// these wait for.
    pub fn next(&mut self, slices: impl IntoIterator<Item = (Slice, bool)>) -> Vec<usize> {
        let number = self.before.len();
        let mut waits = Vec::new();
        for (slice, only_read) in slices.into_iter().filter(|(slice, _)| slice.bytes > 0) {
            self.touch(slice, only_read, number, &mut waits);
        }
        waits.retain(|&other| other != number);
        waits.sort_unstable_by(|a, b| b.cmp(a));
        waits.dedup();
        let mut before = vec![0; number / 64 + 1];
        waits.retain(|&other| {
            let is_known = before[other / 64] >> (other % 64) & 1 == 1;
            before.iter_mut().zip(&self.before[other]).for_each(|(bits, own)| *bits |= own);
            before[other / 64] |= 1 << (other % 64);
            !is_known
        });
        self.before.push(before);
        waits
    }

    fn touch(&mut self, at: Slice, only_read: bool, number: usize, waits: &mut Vec<usize>) {
        let (start, end) = (at.offset, at.offset.saturating_add(at.bytes));
        self.split(at.segment, start);
        self.split(at.segment, end);
        let own = (at.segment, start)..(at.segment, end);
        if !only_read {
            let starts: Vec<_> = self.touched.range(own).map(|(key, _)| *key).collect();
            for key in starts {
                let found = self.touched.remove(&key).expect("it was just found");
                waits.extend(found.writer.into_iter().chain(found.readers));
            }
            self.touched.insert((at.segment, start), Touched { end, writer: Some(number), readers: Vec::new() });
            return;
        }
        let (mut next, mut gaps) = (start, Vec::new());
        for (&(_, from), found) in self.touched.range_mut(own) {
            gaps.extend((next < from).then_some((next, from)));
            waits.extend(found.writer);
            found.readers.push(number);
            next = found.end;
        }
        gaps.extend((next < end).then_some((next, end)));
        for (from, end) in gaps {
            self.touched.insert((at.segment, from), Touched { end, writer: None, readers: vec![number] });
        }
    }

    /// Lets no range have this byte within it.
    fn split(&mut self, segment: SegmentId, at: u64) {
        let before = self.touched.range_mut((segment, 0)..(segment, at)).next_back();
        if let Some((_, found)) = before.filter(|(_, found)| found.end > at) {
            let rest = found.clone();
            found.end = at;
            self.touched.insert((segment, at), rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(offset: u64, bytes: u64) -> Slice {
        Slice { segment: SegmentId(0), offset, bytes }
    }

    #[test]
    fn who_touches_what_another_writes_waits() {
        let mut all = Conflicts::default();
        // Written by 0, read by 1 and 2 in parts that overlap, a part written again by 3.
        assert_eq!(all.next([(slice(0, 100), false)]), [0; 0]);
        assert_eq!(all.next([(slice(0, 60), true), (slice(200, 10), false)]), [0]);
        assert_eq!(all.next([(slice(40, 60), true)]), [0]);
        assert_eq!(all.next([(slice(50, 5), false)]), [2, 1]);
        // What 3 left is of 0; who reads it all waits for 3, which waited for 0.
        assert_eq!(all.next([(slice(0, 50), true)]), [0]);
        assert_eq!(all.next([(slice(0, 100), true)]), [3]);
        // Another segment, and nothing.
        assert_eq!(all.next([(Slice { segment: SegmentId(1), ..slice(0, 100) }, false), (slice(0, 0), false)]), [0; 0]);
        // In place: both sides are its own.
        assert_eq!(all.next([(slice(200, 10), true), (slice(200, 10), false)]), [1]);
        assert_eq!(all.next([(slice(150, 100), true)]), [7]);
    }

    /// Against the plain meaning: every pair that conflicts is ordered, by waits of waits, and nothing waits for what it does not conflict with.
    #[test]
    fn pairs_that_conflict_are_ordered_and_no_others() {
        let mut draw = 7u64;
        let mut next = |most: u64| {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draw >> 33) % most
        };
        for _ in 0..40 {
            let (mut all, mut launches, mut reached): (_, Vec<Vec<(Slice, bool)>>, Vec<Vec<bool>>) =
                (Conflicts::default(), Vec::new(), Vec::new());
            for number in 0..60 {
                let slices: Vec<_> = (0..1 + next(3)).map(|_| (slice(next(40), 1 + next(12)), next(2) == 0)).collect();
                let waits = all.next(slices.iter().copied());
                let mut own = vec![false; number];
                for other in &waits {
                    own[*other] = true;
                    (0..*other).for_each(|n| own[n] |= reached[*other][n]);
                }
                let meet = |(a, a_reads): (Slice, bool), (b, b_reads): (Slice, bool)| {
                    !(a_reads && b_reads) && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
                };
                for (other, theirs) in launches.iter().enumerate() {
                    let conflict = slices.iter().any(|a| theirs.iter().any(|b| meet(*a, *b)));
                    assert!(!conflict || own[other], "{number} and {other}");
                    assert!(conflict || !waits.contains(&other), "{number} and {other}");
                }
                launches.push(slices);
                reached.push(own);
            }
        }
    }
}
