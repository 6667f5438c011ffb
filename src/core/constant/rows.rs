//! Numbers of few bits, as a file has them, in rows as a kernel reads them.

use std::sync::Arc;

/// Rows of numbers of few bits. A row is filled up with zeros to some bytes, so that each begins in a byte of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of rows.
    pub count: usize,
    /// Numbers of a row.
    pub len: usize,
    /// Bits of a number, at most 8. The first number of a byte is in its lowest bits, and one may end in the next byte.
    pub bits: usize,
    /// Bits that each takes in the source, of which it has the lowest.
    pub held: usize,
    /// Bytes from a row to the next.
    pub row_bytes: usize,
    /// True if the source has them column by column.
    pub transposed: bool,
    /// True if the first number of a byte is in the source's highest bits.
    pub high_first: bool,
    /// The number of the source's row that is at each place; `None` if the numbers stay in their order.
    pub order: Option<Arc<[u32]>>,
}

/// Columns of a source that are read together, so that the lines of the cache that their numbers share are read once.
const TOGETHER: usize = 64;

impl Rows {
    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.count * self.row_bytes
    }

    /// The rows of a source whose numbers lie without gaps; the result is filled up to whole words of 32 bits.
    pub fn laid(&self, source: &[u8]) -> Vec<u8> {
        let &Rows { count, len, bits, held, row_bytes, transposed, high_first, ref order } = self;
        let mut laid = vec![0; self.bytes().next_multiple_of(4)];
        let mask = u8::MAX >> (8 - bits);
        for first in (0..len).step_by(TOGETHER) {
            for row in 0..count {
                let to = &mut laid[row * row_bytes..][..row_bytes];
                for j in first..len.min(first + TOGETHER) {
                    let place = order.as_ref().map_or(j, |order| order[j] as usize);
                    let from = held * if transposed { place * count + row } else { row * len + place };
                    let (byte, shift) = (from / 8, if high_first { 8 - held - from % 8 } else { from % 8 });
                    let mut number = source[byte] >> shift;
                    if shift + bits > 8 {
                        number |= source[byte + 1] << (8 - shift);
                    }
                    number &= mask;
                    let (byte, shift) = (j * bits / 8, j * bits % 8);
                    to[byte] |= number << shift;
                    if shift + bits > 8 {
                        to[byte + 1] |= number >> (8 - shift);
                    }
                }
            }
        }
        laid
    }
}

#[cfg(test)]
mod tests {
    use super::Rows;

    #[test]
    fn rows_are_filled_up() {
        let rows = Rows {
            count: 2,
            len: 3,
            bits: 4,
            held: 4,
            row_bytes: 2,
            transposed: false,
            high_first: false,
            order: None,
        };
        assert_eq!(rows.laid(&[0x21, 0x43, 0x65]), [0x21, 0x03, 0x54, 0x06]);
    }

    #[test]
    fn numbers_are_moved_within_their_rows() {
        let order = Some([2, 0, 1].into());
        let rows =
            Rows { count: 2, len: 3, bits: 4, held: 4, row_bytes: 2, transposed: false, high_first: false, order };
        assert_eq!(rows.laid(&[0x21, 0x43, 0x65]), [0x13, 0x02, 0x46, 0x05]);
    }

    #[test]
    fn numbers_lie_across_bytes() {
        let order = None;
        let rows =
            Rows { count: 2, len: 6, bits: 3, held: 3, row_bytes: 4, transposed: false, high_first: false, order };
        // 1 2 3 4 5 6 and 7 0 1 2 3 4.
        let source = (0..12).fold(0u64, |all, place| all | ((place + 1) % 8) << (3 * place)).to_le_bytes();
        let row = |first: u32| (0..6).fold(0u32, |all, place| all | ((first + place) % 8) << (3 * place));
        assert_eq!(rows.laid(&source), [row(1).to_le_bytes(), row(7).to_le_bytes()].concat());
    }

    #[test]
    fn numbers_in_high_bits_come_first() {
        let order = None;
        let rows =
            Rows { count: 2, len: 3, bits: 4, held: 4, row_bytes: 2, transposed: false, high_first: true, order };
        assert_eq!(rows.laid(&[0x12, 0x34, 0x56]), [0x21, 0x03, 0x54, 0x06]);
    }

    #[test]
    fn columns_become_rows() {
        // 1 2 / 3 4 / 5 6
        let rows =
            Rows { count: 2, len: 3, bits: 4, held: 4, row_bytes: 2, transposed: true, high_first: false, order: None };
        assert_eq!(rows.laid(&[0x21, 0x43, 0x65]), [0x31, 0x05, 0x42, 0x06]);
        let rows =
            Rows { count: 2, len: 3, bits: 8, held: 8, row_bytes: 3, transposed: true, high_first: false, order: None };
        assert_eq!(rows.laid(&[1, 2, 3, 4, 5, 6]), [1, 3, 5, 2, 4, 6, 0, 0]);
        // Numbers of four bits with a sign, in bytes of their own.
        let rows =
            Rows { count: 2, len: 3, bits: 4, held: 8, row_bytes: 2, transposed: true, high_first: false, order: None };
        assert_eq!(rows.laid(&[1, 0xff, 3, 4, 5, 6]), [0x31, 0x05, 0x4f, 0x06]);
    }
}
