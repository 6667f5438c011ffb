//! Several pieces of data share a staging slot when they are read at once.

/// Bytes of a piece that pass through a slot together with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Number of the piece.
    pub piece: usize,
    /// Where they begin in the piece.
    pub from: usize,
    /// Where they are in the slot.
    pub at: usize,
    pub bytes: usize,
}

/// Pieces of these lengths in rounds, each of which fits the slot of its number, by `room`; parts begin at multiples of `alignment`.
pub(super) fn rounds(lengths: &[usize], alignment: usize, room: impl Fn(usize) -> usize) -> Vec<Vec<Part>> {
    let (mut rounds, mut round, mut used) = (Vec::new(), Vec::new(), 0);
    for (piece, &length) in lengths.iter().enumerate() {
        let mut from = 0;
        while from < length {
            let free = room(rounds.len()).saturating_sub(used);
            if free == 0 {
                assert!(!round.is_empty(), "slots have room");
                rounds.push(std::mem::take(&mut round));
                used = 0;
                continue;
            }
            let bytes = free.min(length - from);
            round.push(Part { piece, from, at: used, bytes });
            from += bytes;
            used = (used + bytes).next_multiple_of(alignment);
        }
    }
    rounds.extend((!round.is_empty()).then_some(round));
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fill_rounds_in_order() {
        let part = |[piece, from, at, bytes]: [usize; 4]| Part { piece, from, at, bytes };
        let found = rounds(&[4, 0, 12, 40, 8], 8, |round| if round % 2 == 0 { 32 } else { 20 });
        let first = [[0, 0, 0, 4], [2, 0, 8, 12], [3, 0, 24, 8]].map(part).to_vec();
        let last = [[3, 28, 0, 12], [4, 0, 16, 8]].map(part).to_vec();
        assert_eq!(found, [first, vec![part([3, 8, 0, 20])], last]);
        assert!(rounds(&[0, 0], 8, |_| 0).is_empty());
    }
}
