//! Rows of training data: mapped files, the order of the rows, batches.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::npy;
use crate::op::Fact;
use crate::shape::Shape;
use crate::tensor::Tensor;
use bytes::Bytes;
use std::path::{Path, PathBuf};

/// A file whose first axis counts rows. It is mapped: its rows take no memory of the process.
#[derive(Clone, Debug)]
pub struct Rows {
    path: PathBuf,
    dtype: DType,
    shape: Shape,
    bytes: Bytes,
}

impl Rows {
    /// Maps an `.npy` file.
    ///
    /// # Errors
    /// When it is no array, or has no rows.
    pub fn open(path: &Path) -> Result<Rows> {
        let (dtype, shape, bytes) = npy::map(path)?;
        let rows = Rows { path: path.to_owned(), dtype, shape, bytes };
        ensure(rows.shape.first().is_some_and(|&count| count > 0), || {
            rows.fail(format!("expected an array of rows, found {dtype}{}", rows.shape))
        })?;
        Ok(rows)
    }

    /// The number of rows.
    pub fn count(&self) -> usize {
        self.shape[0]
    }

    /// The shape, with the rows' axis first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// An error that names the file.
    pub fn fail(&self, what: String) -> Error {
        Error::File { path: self.path.clone(), what, source: None }
    }

    /// Refuses rows that are not those of a batch of this fact.
    ///
    /// # Errors
    /// Expected and found.
    pub fn suit(&self, name: &str, batch: &Fact) -> Result<()> {
        let [expected, found] = [&batch.shape, &self.shape].map(|shape| shape[1..].iter().product::<usize>());
        let converts = self.dtype == batch.dtype || batch.dtype.is_float() || self.dtype.is_int();
        ensure(expected == found && converts, || {
            let row = Fact::new(batch.dtype, &batch.shape[1..]);
            let own = Fact::new(self.dtype, &self.shape[1..]);
            self.fail(format!("'{name}': expected rows of {row}, found {own}"))
        })
    }

    /// Writes rows one after another, in the type of a batch.
    ///
    /// # Errors
    /// When a row has an element that is not finite: its number.
    pub fn fill(&self, rows: impl Iterator<Item = usize>, batch: &Fact, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.bytes.len() / self.count();
        out.clear();
        for row in rows {
            let from = &self.bytes[row * bytes..][..bytes];
            if self.dtype == batch.dtype {
                out.extend_from_slice(from);
            } else {
                let own = Tensor::new(self.dtype, [bytes / self.dtype.size()], from.to_vec())?;
                out.extend_from_slice(Tensor::from_f64(batch.dtype, own.shape().clone(), &own.to_f64()).bytes());
            }
            if batch.dtype == DType::F32 {
                let start = out.len() - bytes / self.dtype.size() * 4;
                let finite =
                    |element: &[u8]| f32::from_le_bytes([element[0], element[1], element[2], element[3]]).is_finite();
                if let Some(at) = out[start..].chunks_exact(4).position(|element| !finite(element)) {
                    return Err(self.fail(format!("row {row}: element {at} is not a finite number")));
                }
            }
        }
        Ok(())
    }

    /// Refuses labels that name no class.
    ///
    /// # Errors
    /// The first row with such a label.
    pub fn check_labels(&self, classes: usize) -> Result<()> {
        let bytes = self.bytes.len() / self.count();
        for row in 0..self.count() {
            let own =
                Tensor::new(self.dtype, [bytes / self.dtype.size()], self.bytes[row * bytes..][..bytes].to_vec())?;
            let wrong = |label: &f64| *label != -100.0 && !(0.0..classes as f64).contains(label);
            if let Some(label) = own.to_f64().into_iter().find(wrong) {
                let range = format!("0 to {}, or -100 for one that does not count", classes - 1);
                return Err(self.fail(format!("row {row}: expected a label of {range}, found {label}")));
            }
        }
        Ok(())
    }
}

/// The order of the rows in an epoch: a permutation that takes no memory.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    count: usize,
    /// `None` keeps the order of the file.
    key: Option<u64>,
    half: u32,
}

/// Rounds of the permutation. Four make it a good one (Luby and Rackoff, 1988).
const ROUNDS: u64 = 4;

impl Order {
    /// The order of `count` rows in an epoch.
    pub fn new(count: usize, seed: Option<u64>, epoch: u64) -> Order {
        let bits = usize::BITS - (count.max(2) - 1).leading_zeros();
        Order { count, key: seed.map(|seed| mix(seed ^ mix(epoch))), half: bits.div_ceil(2) }
    }

    /// The row at a place. Halves of its number are mixed by turns; a result beyond the rows is mixed again.
    pub fn row(self, place: usize) -> usize {
        let Some(key) = self.key else { return place };
        let mask = (1u64 << self.half) - 1;
        let mut at = place as u64;
        loop {
            for round in 0..ROUNDS {
                let (left, right) = (at >> self.half, at & mask);
                at = right << self.half | (left ^ mix(key ^ mix(right << 8 | round))) & mask;
            }
            if at < self.count as u64 {
                return at as usize;
            }
        }
    }
}

/// Mixes the bits of a number (the finalizer of SplitMix64).
fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_place() {
        for count in [1, 2, 3, 10, 64, 1000, 1797] {
            for epoch in 0..3 {
                let order = Order::new(count, Some(7), epoch);
                let mut rows: Vec<usize> = (0..count).map(|place| order.row(place)).collect();
                if count > 10 {
                    assert!(rows.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < count / 8);
                }
                rows.sort_unstable();
                assert!(rows.into_iter().eq(0..count), "{count}");
            }
        }
        assert_ne!(Order::new(1000, Some(7), 0).row(5), Order::new(1000, Some(7), 1).row(5));
        assert_eq!(Order::new(1000, None, 3).row(5), 5);
    }
}
