//! Rows of training data: mapped files and folders of them, the order of the rows, batches.

use super::LABELS;
use super::loss::IGNORED;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file::{self, Access, advise};
use crate::npz;
use crate::op::Fact;
use crate::shape::Shape;
use crate::tensor::{Tensor, convert};
use bytes::Bytes;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arrays of fewer bytes are left to the system, which keeps them in memory once they were read.
const LARGE: usize = 1 << 30;

/// Arrays whose first axis counts rows, one after another. They are mapped: their rows take no memory of the process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Rows {
    array: Arc<Array>,
}

/// The arrays as one.
#[derive(Debug)]
struct Array {
    /// The file, or the folder of the files.
    path: PathBuf,
    dtype: DType,
    shape: Shape,
    /// Bytes of a row.
    row_bytes: usize,
    files: Vec<Part>,
}

/// A file's rows.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    /// The number of the first row among all rows.
    first: usize,
    bytes: Bytes,
}

impl Array {
    fn is_large(&self) -> bool {
        self.files.iter().map(|part| part.bytes.len()).sum::<usize>() >= LARGE
    }
}

impl Rows {
    /// Maps an `.npy` file, a member of an `.npz` archive (`FILE.npz:NAME`, or `FILE.npz` if it has one member), or all such files of a
    /// folder, which are one array along the first axis. Numbers in the files' names give their order: `part2` comes before `part10`.
    ///
    /// # Errors
    /// When it is no array, has no rows, or is deflated; when two files of a folder have rows of different types or shapes.
    pub fn open(path: &Path) -> Result<Rows> {
        let paths = if path.is_dir() { shards(path)? } else { vec![path.to_owned()] };
        let mut all: Option<Array> = None;
        for file in paths {
            let (dtype, shape, bytes) = npz::map(&file).map_err(|error| of_other_format(&file, error))?;
            let fail = |what: String| Error::File { path: file.clone(), what, source: None };
            ensure(shape.first().is_some_and(|&count| count > 0), || {
                fail(format!("expected an array of rows, found {dtype}{shape}"))
            })?;
            match &mut all {
                None => {
                    let row_bytes = bytes.len() / shape[0];
                    let files = vec![Part { path: file, first: 0, bytes }];
                    all = Some(Array { path: path.to_owned(), dtype, shape, row_bytes, files });
                }
                Some(all) => {
                    ensure(dtype == all.dtype && shape[1..] == all.shape[1..], || {
                        let (other, found) = (Fact::new(all.dtype, &all.shape[1..]), Fact::new(dtype, &shape[1..]));
                        fail(format!("expected rows of {other}, as in {}, found {found}", all.files[0].path.display()))
                    })?;
                    all.files.push(Part { path: file, first: all.shape[0], bytes });
                    all.shape[0] += shape[0];
                }
            }
        }
        if let Some(array) = all.iter().find(|array| array.is_large()) {
            // Each batch says which rows it needs.
            array.files.iter().for_each(|part| advise(&part.bytes, Access::Scattered));
        }
        all.map(|array| Rows { array: Arc::new(array) }).ok_or_else(|| {
            let what = "expected a folder with .npy or .npz files, found none in it".to_owned();
            Error::File { path: path.to_owned(), what, source: None }
        })
    }

    /// Rows of an array in memory.
    ///
    /// # Errors
    /// When it has no rows.
    pub fn of(tensor: &Tensor) -> Result<Rows> {
        let path = PathBuf::from("(memory)");
        let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape().clone(), tensor.bytes().clone());
        ensure(shape.first().is_some_and(|&count| count > 0), || {
            Error::usage(format!("expected an array of rows, found {dtype}{shape}"))
        })?;
        let row_bytes = bytes.len() / shape[0];
        let files = vec![Part { path: path.clone(), first: 0, bytes }];
        Ok(Rows { array: Arc::new(Array { path, dtype, shape, row_bytes, files }) })
    }

    /// The number of rows.
    pub fn count(&self) -> usize {
        self.array.shape[0]
    }

    /// The shape, with the rows' axis first.
    pub fn shape(&self) -> &Shape {
        &self.array.shape
    }

    /// True if both are one array that was opened once.
    pub fn is_same(&self, other: &Rows) -> bool {
        Arc::ptr_eq(&self.array, &other.array)
    }

    /// An error that names the file, or the folder.
    pub fn fail(&self, what: String) -> Error {
        Error::File { path: self.array.path.clone(), what, source: None }
    }

    /// The file that has a row.
    fn part_of(&self, row: usize) -> &Part {
        &self.array.files[self.array.files.partition_point(|part| part.first <= row) - 1]
    }

    /// The bytes of a row.
    fn row(&self, row: usize) -> &[u8] {
        let part = self.part_of(row);
        &part.bytes[(row - part.first) * self.array.row_bytes..][..self.array.row_bytes]
    }

    /// An error that names a row and its file.
    fn fail_at(&self, row: usize, what: &str) -> Error {
        let part = self.part_of(row);
        Error::File { path: part.path.clone(), what: format!("row {}: {what}", row - part.first), source: None }
    }

    /// Refuses rows that are not those of a batch of this fact.
    ///
    /// # Errors
    /// Expected and found.
    pub fn suit(&self, name: &str, batch: &Fact) -> Result<()> {
        // Axes of one element change no element's place.
        let row = |shape: &Shape| shape[1..].iter().copied().filter(|&extent| extent != 1).collect::<Vec<_>>();
        let [expected, found] = [row(&batch.shape), row(&self.array.shape)];
        let converts = self.array.dtype == batch.dtype || batch.dtype.is_float() || self.array.dtype.is_int();
        ensure(expected == found && converts, || {
            let row = Fact::new(batch.dtype, &batch.shape[1..]);
            let own = Fact::new(self.array.dtype, &self.array.shape[1..]);
            let remedy = match (expected == found, name == LABELS) {
                (false, true) => "; give labels of that shape, another loss, or a model whose first output has theirs",
                (false, false) => "; give rows of that shape",
                (true, _) => "; convert the file, as with NumPy's astype",
            };
            self.fail(format!("'{name}': expected rows of {row}, found {own}{remedy}"))
        })
    }

    /// Writes rows one after another, in the type of a batch, to memory that has room for exactly these.
    ///
    /// # Errors
    /// When a row has an element that is not finite: its number. When the rows do not fill the memory.
    pub fn fill(&self, rows: impl ExactSizeIterator<Item = usize> + Clone, batch: &Fact, out: &mut [u8]) -> Result<()> {
        let Array { dtype, row_bytes, .. } = *self.array;
        let bytes = row_bytes / dtype.size() * batch.dtype.size();
        let (expected, found) = (rows.len() * bytes, out.len());
        ensure(expected == found, || self.fail(format!("expected a batch of {expected} bytes, found {found}")))?;
        if bytes == 0 {
            return Ok(());
        }
        if self.array.is_large() {
            // All of them are on their way before the first is waited for, and nothing else is read.
            rows.clone().for_each(|row| advise(self.row(row), Access::Soon));
        }
        for (row, to) in rows.zip(out.chunks_exact_mut(bytes)) {
            let from = self.row(row);
            if dtype == batch.dtype {
                to.copy_from_slice(from);
            } else {
                convert(dtype, from, batch.dtype, to);
            }
            if batch.dtype == DType::F32 {
                let finite =
                    |element: &[u8]| f32::from_le_bytes([element[0], element[1], element[2], element[3]]).is_finite();
                // Without a way out of the loop, it takes several elements at once.
                if !to.chunks_exact(4).fold(true, |all, element| all & finite(element)) {
                    let at = to.chunks_exact(4).position(|element| !finite(element)).expect("one is not");
                    return Err(self.fail_at(row, &format!("element {at} is not a finite number")));
                }
            }
        }
        Ok(())
    }

    /// Refuses labels that a loss cannot judge.
    ///
    /// # Errors
    /// The first row with such a label; that no label counts.
    pub fn check_labels(&self, labels: Labels) -> Result<()> {
        let mut counts = false;
        if labels != Labels::Any {
            self.array.files.iter().for_each(|part| advise(&part.bytes, Access::Soon));
        }
        for row in 0..self.count() {
            let range = match labels {
                Labels::Any => return Ok(()),
                Labels::Classes(classes) => 0.0..=classes as f64 - 1.0,
                Labels::Shares => 0.0..=1.0,
            };
            let ignores = |label: f64| labels != Labels::Shares && label == IGNORED;
            for label in self.elements(row) {
                counts |= !ignores(label);
                if !ignores(label) && !range.contains(&label) {
                    let ignored = if labels == Labels::Shares { "" } else { ", or -100 for one that does not count" };
                    let expected = format!("{} to {}{ignored}", range.start(), range.end());
                    let remedy = match (labels, label) {
                        (Labels::Classes(1), 1.0) => "; the first output has one class: for 0/1 labels take bce_logits",
                        _ => "",
                    };
                    return Err(self.fail_at(row, &format!("expected a label of {expected}, found {label}{remedy}")));
                }
            }
        }
        ensure(counts, || self.fail(format!("all labels are {IGNORED}: expected one that counts")))
    }

    /// True if no label of a row counts.
    pub fn is_ignored(&self, row: usize) -> bool {
        self.elements(row).into_iter().all(|label| label == IGNORED)
    }

    /// The elements of a row.
    fn elements(&self, row: usize) -> Vec<f64> {
        let shape = [self.array.row_bytes / self.array.dtype.size()];
        let row = Tensor::new(self.array.dtype, shape, self.row(row).to_vec()).expect("a row has whole elements");
        row.to_f64()
    }
}

/// The error of an array that cannot be read, or what its file is in the place of one.
pub fn of_other_format(path: &Path, error: Error) -> Error {
    let mut start = [0; 256];
    let read = file::open(path).and_then(|mut file| file.read(&mut start)).unwrap_or(0);
    let start = &start[..read];
    let is_text = !start.is_empty() && !start.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace());
    let what = if start.starts_with(b"version https://git-lfs") {
        "it is a pointer of Git LFS, which stands for the array: `git lfs pull` brings the file".to_owned()
    } else if is_text && start.is_ascii() && path.extension().is_none_or(|extension| extension != "npz") {
        format!(
            "it is text: expected an .npy file; one of numbers with commas between them is written by np.save(\"x.npy\", np.loadtxt({:?}, delimiter=\",\", dtype=np.float32))",
            path.file_name().unwrap_or_default().to_string_lossy()
        )
    } else {
        return error;
    };
    Error::File { path: path.to_owned(), what, source: None }
}

/// The allowed labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    /// Anything.
    Any,
    /// The numbers of so many classes, and -100, which is ignored.
    Classes(usize),
    /// From 0 to 1.
    Shares,
}

/// The arrays of a folder, in the order of the numbers in their names. Hidden files and others are left out.
fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e| Error::file(folder, "list the files", e);
    let mut found = Vec::new();
    for entry in folder.read_dir().map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if npz::is_array(&path) && !name.starts_with('.') && path.is_file() {
            found.push((natural(&name), name, path));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, _, path)| path).collect())
}

/// The sort key of a name: its text, and its numbers, which come before text. Of a number's digits, the count decides first.
fn natural(name: &str) -> Vec<(bool, usize, String)> {
    let mut parts: Vec<(bool, usize, String)> = Vec::new();
    for letter in name.chars() {
        let is_text = !letter.is_ascii_digit();
        match parts.last_mut() {
            Some((last, _, text)) if *last == is_text => text.push(letter),
            _ => parts.push((is_text, 0, letter.into())),
        }
    }
    for (is_text, digits, text) in &mut parts {
        if !*is_text {
            *text = text.trim_start_matches('0').to_owned();
            *digits = text.len();
        }
    }
    parts
}

/// The order of the rows in an epoch: a permutation that takes no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    fn numbers_in_names_are_numbers() {
        let mut names = ["b1", "a10", "a2", "a", "a02b", "10", "9", "a100000000000000000000000", "a2b10", "a2b9"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["9", "10", "a", "a2", "a02b", "a2b9", "a2b10", "a10", "a100000000000000000000000", "b1"]);
    }

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
