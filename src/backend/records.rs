//! Records of a backend, by the segments that they use.

use super::{RecordId, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Records of a backend. Ids rise and are never given twice, so that the id of a record that is gone stays without one.
pub struct Records<R> {
    next: u32,
    records: BTreeMap<RecordId, (R, Vec<SegmentId>)>,
    users: BTreeMap<SegmentId, BTreeSet<RecordId>>,
}

impl<R> Default for Records<R> {
    fn default() -> Self {
        Records { next: 0, records: BTreeMap::new(), users: BTreeMap::new() }
    }
}

impl<R> Records<R> {
    /// Keeps a record that uses these segments; `None` when ids have run out.
    pub fn insert(&mut self, record: R, segments: impl IntoIterator<Item = SegmentId>) -> Option<RecordId> {
        let id = RecordId(self.next);
        self.next = id.0.checked_add(1)?;
        let mut segments: Vec<SegmentId> = segments.into_iter().collect();
        segments.sort_unstable();
        segments.dedup();
        for &segment in &segments {
            self.users.entry(segment).or_default().insert(id);
        }
        self.records.insert(id, (record, segments));
        Some(id)
    }

    pub fn get(&self, id: RecordId) -> Option<&R> {
        self.records.get(&id).map(|(record, _)| record)
    }

    /// Drops all records.
    pub fn clear(&mut self) {
        self.records.clear();
        self.users.clear();
    }

    /// Drops the records that use a segment.
    pub fn free(&mut self, segment: SegmentId) {
        for id in self.users.remove(&segment).unwrap_or_default() {
            let Some((_, others)) = self.records.remove(&id) else { continue };
            for other in others {
                if let Some(users) = self.users.get_mut(&other) {
                    users.remove(&id);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_go_with_any_of_their_segments() {
        let [a, b, c] = [0, 1, 2].map(SegmentId);
        let mut records = Records::default();
        let ab = records.insert("ab", [b, a, b]).expect("an id");
        let bc = records.insert("bc", [b, c]).expect("an id");
        let none = records.insert("none", []).expect("an id");
        records.free(a);
        assert_eq!([ab, bc, none].map(|r| records.get(r).copied()), [None, Some("bc"), Some("none")]);
        assert_eq!(records.users[&b], [bc].into(), "nothing is left of a record that is gone");
        records.free(b);
        records.free(b);
        assert_eq!([ab, bc, none].map(|r| records.get(r).copied()), [None, None, Some("none")]);
        let again = records.insert("again", [c]).expect("an id");
        assert!(![ab, bc, none].contains(&again));
    }
}
