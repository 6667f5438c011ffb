//! What the driver takes for this process, by its own count of each process. The memory that is free on the card would not serve: other
//! processes change it, too.

/// A process on the card, and the bytes that it holds, if the driver counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) bytes: Option<u64>,
}

/// The part that is NCCL's.
pub(super) const NCCL: &str = "NCCL";

/// Bytes that the driver was seen to take for a device and its forks, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// Bytes of this process before and after the context was made, and now; all or none of them are known.
    readings: Option<Readings>,
    /// Bytes of the segments, without those in memory that the host program lends.
    pub(super) segments: i64,
    pub(super) libraries: i64,
    pub(super) modules: i64,
    pub(super) graphs: i64,
    /// What NCCL took when the device joined others.
    pub(super) nccl: i64,
    /// True if that is within a segment of its own.
    pub(super) reserved: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Readings {
    before: i64,
    open: i64,
    now: i64,
}

/// Bytes that a process holds on a card, by the list of the processes there. A process that has no context yet is not in the list.
fn held(list: Option<&[Process]>, pid: u32, has_context: bool) -> Option<i64> {
    match list?.iter().find(|process| process.pid == pid) {
        Some(process) => process.bytes?.try_into().ok(),
        // In a container, the driver may count by pids that the process does not know.
        None => (!has_context).then_some(0),
    }
}

impl Taken {
    /// By the list before the context was made and the list after it; none where there is no library that tells.
    pub(super) fn open(before: Option<&[Process]>, after: Option<&[Process]>, pid: u32) -> Taken {
        let readings = held(before, pid, false).zip(held(after, pid, true));
        Taken { readings: readings.map(|(before, open)| Readings { before, open, now: open }), ..Taken::default() }
    }

    /// Notes the list as it is now. What was taken since the last time is of this part, if one is named. What is not told once is not known
    /// from then on.
    pub(super) fn measure(&mut self, list: Option<&[Process]>, pid: u32, part: Option<fn(&mut Taken) -> &mut i64>) {
        let fresh =
            self.readings.zip(held(list, pid, true)).map(|(last, now)| (Readings { now, ..last }, now - last.now));
        self.readings = fresh.map(|(readings, _)| readings);
        if let Some((part, (_, fresh))) = part.zip(fresh) {
            *part(self) += fresh;
        }
    }

    /// True if it is known what the process holds.
    pub(super) fn is_known(&self) -> bool {
        self.readings.is_some()
    }

    /// What was taken beside the segments, by purpose; none if it is not known.
    pub(super) fn parts(&self) -> Option<Vec<(&'static str, u64)>> {
        let Readings { before, open, now } = self.readings?;
        let Taken { segments, libraries, modules, graphs, nccl, reserved, .. } = *self;
        let since = now - open;
        // Before the first record, nothing has been measured.
        let rounding = if since == 0 { 0 } else { since - libraries - modules - graphs - nccl - segments };
        let parts = [
            ("context", open - before),
            ("libraries", libraries),
            ("modules", modules),
            ("graphs", graphs),
            ("allocations rounded up", rounding),
        ];
        let nccl = (nccl != 0 && !reserved).then_some((NCCL, nccl));
        // What was given back since it was counted is held no more.
        Some(parts.into_iter().chain(nccl).map(|(part, bytes)| (part, bytes.max(0) as u64)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 7;

    fn list(own: Option<Option<u64>>, other: Option<u64>) -> Option<Vec<Process>> {
        let other = other.map(|bytes| Process { pid: 9, bytes: Some(bytes) });
        Some(own.map(|bytes| Process { pid: OWN, bytes }).into_iter().chain(other).collect())
    }

    /// Opens, loads a library and allocates a segment, with these readings.
    fn parts(readings: [Option<Vec<Process>>; 4]) -> Option<Vec<u64>> {
        let [before, open, library, segment] = &readings;
        let mut taken = Taken::open(before.as_deref(), open.as_deref(), OWN);
        taken.measure(library.as_deref(), OWN, Some(|taken| &mut taken.libraries));
        taken.segments += 60;
        taken.measure(segment.as_deref(), OWN, None);
        assert_eq!(taken.is_known(), taken.parts().is_some());
        Some(taken.parts()?.iter().map(|(_, bytes)| *bytes).collect())
    }

    #[test]
    fn what_other_processes_do_changes_nothing() {
        let own = [None, Some(Some(500)), Some(Some(530)), Some(Some(600))];
        let with = |others: [Option<u64>; 4]| {
            let mut others = others.into_iter();
            parts(own.map(|own| list(own, others.next().flatten())))
        };
        let expected = Some(vec![500, 30, 0, 0, 10]);
        for others in [
            [None; 4],
            [Some(1 << 30); 4],
            [None, Some(1 << 30), Some(2 << 30), Some(3 << 30)],
            [Some(3 << 30), Some(2 << 30), Some(1 << 30), None],
        ] {
            assert_eq!(with(others), expected, "{others:?}");
        }
    }

    #[test]
    fn what_the_driver_does_not_tell_is_not_known() {
        let told = || [None, Some(Some(500)), Some(Some(530)), Some(Some(600))].map(|own| list(own, Some(40)));
        for at in 0..4 {
            let mut absent = told();
            absent[at] = None;
            assert_eq!(parts(absent), None, "no library at {at}");
            let mut uncounted = told();
            uncounted[at] = list(Some(None), Some(40));
            assert_eq!(parts(uncounted), None, "not counted at {at}");
            let mut unlisted = told();
            unlisted[at] = list(None, Some(40));
            assert_eq!(parts(unlisted).is_some(), at == 0, "not listed at {at}");
        }
        assert_eq!(parts([None, None, None, None]), None);
    }

    #[test]
    fn what_nccl_takes_is_a_part_of_its_own() {
        let [before, open, joined] = [None, Some(Some(500)), Some(Some(676))].map(|own| list(own, Some(40)));
        let mut taken = Taken::open(before.as_deref(), open.as_deref(), OWN);
        taken.measure(joined.as_deref(), OWN, Some(|taken| &mut taken.nccl));
        let parts = taken.parts().expect("they are known");
        assert_eq!((parts.len(), parts[5]), (6, (NCCL, 176)));
        assert_eq!(parts[4].1, 0);
        taken.reserved = true;
        assert_eq!(taken.parts().expect("they are known").len(), 5);
    }

    /// A second device in one process.
    #[test]
    fn a_context_that_was_there_before_is_not_counted_again() {
        let own = [500, 500, 510, 570].map(|bytes| list(Some(Some(bytes)), None));
        assert_eq!(parts(own), Some(vec![0, 10, 0, 0, 0]));
    }
}
