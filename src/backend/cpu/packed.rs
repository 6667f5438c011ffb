//! Products by numbers of few bits: a number is widened to a float on its way into the sum. For few rows each sum widens its own, in registers;
//! for more, a panel of them is widened once.

use super::block::Repr;
use super::gemm::{PANEL_COLS, Produce};
use super::map::{Core, CoreSpec};
use super::nest::Motion;
use super::operands::stored;
use super::simd::{Isa, Lanes, per_isa};
use super::task::Args;
use crate::error::ensure;
use crate::kernel::{Kernel, Packing, ZeroPoints};
use crate::shape::Access;
use std::ops::Range;

/// Prepares a product by numbers of few bits whose sums are computed one by one.
pub fn core(kernel: &Kernel, isa: Isa) -> Result<CoreSpec<'_>, String> {
    let weights = Weights::new(kernel)?;
    let rank = kernel.shape.len();
    let mut number = Motion::still(rank);
    for axis in 0..rank {
        number.steps[axis] = kernel.shape[axis + 1..].iter().product::<usize>() as isize;
    }
    let left = kernel.reads[0].access.clone();
    let terms = left.shape[rank - 1];
    let columns = kernel.shape[rank - 1];
    Ok(CoreSpec {
        repr: Repr::F32,
        motions: vec![number],
        cost: 0.1 * terms as f64,
        tables: 0,
        build: Box::new(move |steps, _| Box::new(Product { isa, weights, terms, columns, left, step: steps[0] })),
    })
}

/// The right operand of a product: rows of numbers of few bits, which are its columns.
pub struct Weights {
    packing: Packing,
    zeros: ZeroPoints,
    /// The same as [`Packing::raised`].
    raised: f32,
    words: Access,
    scales: Access,
    points: Option<Access>,
}

/// The right operand of one launch.
pub struct Bound<'a> {
    /// The operand.
    pub weights: &'a Weights,
    /// The kernel's arguments.
    pub args: &'a Args,
}

struct Product {
    isa: Isa,
    weights: Weights,
    /// Terms of a sum, and elements of a row.
    terms: usize,
    columns: usize,
    left: Access,
    /// From an element's number to the next one's, along the innermost axis.
    step: isize,
}

/// The bytes of an element of all operands.
const SIZE: isize = 4;

impl Weights {
    /// Finds the operand of a kernel that was checked.
    pub fn new(kernel: &Kernel) -> Result<Weights, String> {
        let (packing, zeros) = kernel.packing();
        let floats = kernel.reads[..kernel.template.core_reads()].iter().enumerate();
        for (number, operand) in
            floats.filter(|(number, _)| *number != 1 && (*number != 3 || zeros == ZeroPoints::Floats))
        {
            ensure(stored(operand)? == Repr::F32, || format!("operand {number} read: products of {}", operand.dtype))?;
        }
        let access = |slot: usize| kernel.reads[slot].access.clone();
        let points = (kernel.template.core_reads() > 3).then(|| access(3));
        Ok(Weights { packing, zeros, raised: packing.raised() as f32, words: access(1), scales: access(2), points })
    }

    /// The first word of a column.
    #[inline(always)]
    fn column(&self, args: &Args, column: usize) -> *const u32 {
        let words = self.words.offset + (column * self.packing.blocks * self.packing.words_per_block) as isize;
        args.at(1, words * SIZE).cast_const().cast()
    }

    /// The scale of a block.
    ///
    /// # Safety
    /// `args` must be the kernel's, and have the block.
    #[inline(always)]
    unsafe fn scale(&self, args: &Args, column: usize, block: usize) -> f32 {
        // SAFETY: it is inside the operand, which was checked to span its memory.
        unsafe { args.at(2, place(&self.scales, column, block) * SIZE).cast::<f32>().read() }
    }

    /// The zero point of a block of numbers that are larger by [`Packing::raised`].
    ///
    /// # Safety
    /// As for [`scale`](Self::scale).
    #[inline(always)]
    unsafe fn zero(&self, args: &Args, column: usize, block: usize) -> f32 {
        match (self.zeros, &self.points) {
            (ZeroPoints::Number(zero), _) => zero as f32 + self.raised,
            // SAFETY: it is inside the operand.
            (ZeroPoints::Floats, Some(points)) => unsafe {
                args.at(3, place(points, column, block) * SIZE).cast::<f32>().read() + self.raised
            },
            (ZeroPoints::Packed, Some(points)) => {
                let place = self.packing.zeros_per_row() * column + block;
                // SAFETY: as above.
                let word = |at: usize| unsafe { args.at(3, (points.offset + at as isize) * SIZE).cast::<u32>().read() };
                self.packing.number(place, word) as f32
            }
            (_, None) => unreachable!("zero points that are no number are an operand"),
        }
    }
}

/// The place of a block of a column in an operand that has one element for each.
#[inline(always)]
fn place(access: &Access, column: usize, block: usize) -> isize {
    access.offset + column as isize * access.strides[0] + block as isize * access.strides[1]
}

impl Produce for Bound<'_> {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        assert_eq!(step, PANEL_COLS, "panels of a right operand are padded");
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.weights.packing.bits {
                2 => widen_2(isa, self, k, lanes, panel),
                4 => widen_4(isa, self, k, lanes, panel),
                _ => widen_8(isa, self, k, lanes, panel),
            }
        }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn widen_2(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => widen_2_by
}
per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn widen_4(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => widen_4_by
}
per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn widen_8(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => widen_8_by
}

/// # Safety
/// As for [`Produce::panel`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn widen_2_by<L: Lanes>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { widen::<2>(from, k, lanes, panel) }
}

/// # Safety
/// As for [`widen_2_by`].
#[inline(always)]
unsafe fn widen_4_by<L: Lanes>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { widen::<4>(from, k, lanes, panel) }
}

/// # Safety
/// As for [`widen_2_by`].
#[inline(always)]
unsafe fn widen_8_by<L: Lanes>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { widen::<8>(from, k, lanes, panel) }
}

/// Widens the numbers of some columns to floats, row of the panel by row: those at the same bits of each column's word. Loops over the
/// columns of a panel have a fixed length, so that compilers make vectors of them.
///
/// # Safety
/// As for [`Produce::panel`].
#[inline(always)]
unsafe fn widen<const BITS: usize>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let &Bound { weights, args } = from;
    let per = 32 / BITS;
    let numbers = weights.packing.words_per_block * per;
    // Columns behind the last one are it once more, times zero.
    let columns: [usize; PANEL_COLS] = std::array::from_fn(|j| lanes.start + j.min(lanes.len() - 1));
    let words = columns.map(|column| weights.column(args, column));
    let mut p = k.start;
    while p < k.end {
        let block = p / numbers;
        let end = k.end.min((block + 1) * numbers);
        let (mut zeros, mut scales) = ([0.0; PANEL_COLS], [0.0; PANEL_COLS]);
        for j in 0..lanes.len() {
            // SAFETY: the columns have the block.
            (zeros[j], scales[j]) =
                unsafe { (weights.zero(args, columns[j], block), weights.scale(args, columns[j], block)) };
        }
        while p < end {
            // SAFETY: the columns have the word.
            let row = words.map(|words| unsafe { words.add(p / per).read() } ^ weights.packing.flip);
            for p in p..end.min((p / per + 1) * per) {
                let shift = (p % per * BITS) as u32;
                let mut floats = [0.0; PANEL_COLS];
                for j in 0..PANEL_COLS {
                    let number = row[j] >> shift & (u32::MAX >> (32 - BITS));
                    floats[j] = (number as i32 as f32 - zeros[j]) * scales[j];
                }
                // SAFETY: the panel has this row.
                unsafe { panel.add((p - k.start) * PANEL_COLS).cast::<[f32; PANEL_COLS]>().write(floats) };
            }
            p = end.min((p / per + 1) * per);
        }
    }
}

impl Product {
    /// An element of a column.
    ///
    /// # Safety
    /// `row` must be the place of the left operand's row among `args`, which must be the kernel's.
    unsafe fn element(&self, args: &Args, row: *const f32, column: usize) -> f32 {
        let weights = &self.weights;
        let Packing { bits, blocks, .. } = weights.packing;
        let run = Run {
            row,
            step: self.left.strides[self.left.strides.len() - 1],
            words: weights.column(args, column),
            packing: weights.packing,
            terms: self.terms,
        };
        // SAFETY: `args` are the kernel's.
        let scale = |block: usize| unsafe { weights.scale(args, column, block) };
        // SAFETY: as above.
        let zero = |block: usize| unsafe { weights.zero(args, column, block) };
        #[cfg(target_arch = "x86_64")]
        if run.step == 1 && self.isa != Isa::PORTABLE {
            // SAFETY: the processor has AVX2 and FMA; the run is inside the operands.
            return unsafe {
                match bits {
                    2 => x86::sum::<2>(&run, scale, zero),
                    4 => x86::sum::<4>(&run, scale, zero),
                    _ => x86::sum::<8>(&run, scale, zero),
                }
            };
        }
        let blocks = (0..blocks).map(|block| {
            let numbers = block * run.block()..run.terms.min((block + 1) * run.block());
            // SAFETY: the run is inside the operands.
            scale(block) * unsafe { plain(&run, numbers, zero(block)) }
        });
        blocks.sum()
    }
}

/// A row of floats, and the words of the numbers that it is multiplied by.
struct Run {
    row: *const f32,
    /// From a float to the next one.
    step: isize,
    words: *const u32,
    packing: Packing,
    /// Numbers of the run.
    terms: usize,
}

impl Run {
    /// Numbers of a block.
    fn block(&self) -> usize {
        self.packing.words_per_block * self.packing.per_word
    }
}

/// The sum over some numbers of a block, before its scale.
///
/// # Safety
/// The run must have them.
#[inline]
unsafe fn plain(run: &Run, numbers: std::ops::Range<usize>, zero: f32) -> f32 {
    let mut sum = 0.0;
    for j in numbers {
        // SAFETY: guaranteed by the caller.
        let (x, word) = unsafe { (run.row.offset(j as isize * run.step).read(), |at| run.words.add(at).read()) };
        sum += x * (run.packing.number(j, word) as f32 - zero);
    }
    sum
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Packing, Run, plain};
    use std::arch::x86_64::*;

    /// The sum over all blocks of a run, eight numbers at a time.
    ///
    /// # Safety
    /// The processor has AVX2 and FMA. The run must have its floats, side by side, and its words.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn sum<const BITS: usize>(run: &Run, scale: impl Fn(usize) -> f32, zero: impl Fn(usize) -> f32) -> f32 {
        let (mut sums, mut rest) = (_mm256_setzero_ps(), 0.0);
        let mut start = 0;
        for block in 0..run.packing.blocks {
            let end = run.terms.min(start + run.block());
            let zeros = _mm256_set1_ps(zero(block));
            let term = |first: usize, part: __m256| {
                // SAFETY: eight floats and as many numbers are there.
                let (x, numbers) = unsafe { (_mm256_loadu_ps(run.row.add(first)), eight_at::<BITS>(run, first)) };
                _mm256_fmadd_ps(x, _mm256_sub_ps(_mm256_cvtepi32_ps(numbers), zeros), part)
            };
            // Two sums: a term need not wait for the one before it.
            let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            let mut first = start;
            while first + 16 <= end {
                even = term(first, even);
                odd = term(first + 8, odd);
                first += 16;
            }
            if first + 8 <= end {
                even = term(first, even);
                first += 8;
            }
            sums = _mm256_fmadd_ps(_mm256_add_ps(even, odd), _mm256_set1_ps(scale(block)), sums);
            if first < end {
                // SAFETY: guaranteed by the caller.
                rest += scale(block) * unsafe { plain(run, first..end, zero(block)) };
            }
            start = end;
        }
        let half = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        rest + _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
    }

    /// Eight numbers of a run, from one whose place is a multiple of eight.
    ///
    /// # Safety
    /// The processor has AVX2. The run must have them.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_at<const BITS: usize>(run: &Run, first: usize) -> __m256i {
        let &Run { words, packing: Packing { flip, .. }, .. } = run;
        // SAFETY: guaranteed by the caller.
        let spread = |at: usize| _mm256_set1_epi32((unsafe { words.add(at).read() } ^ flip) as i32);
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        match BITS {
            // A byte is a number.
            // SAFETY: as above.
            8 => {
                let bytes = unsafe { _mm_loadl_epi64(words.add(first / 4).cast()) };
                _mm256_cvtepu8_epi32(_mm_xor_si128(bytes, _mm_set1_epi32(flip as i32)))
            }
            4 => _mm256_and_si256(
                _mm256_srlv_epi32(spread(first / 8), _mm256_slli_epi32::<2>(lanes)),
                _mm256_set1_epi32(15),
            ),
            // Half of a word.
            _ => {
                let half = _mm256_set1_epi32((2 * (first % 16)) as i32);
                let shifts = _mm256_add_epi32(_mm256_slli_epi32::<1>(lanes), half);
                _mm256_and_si256(_mm256_srlv_epi32(spread(first / 16), shifts), _mm256_set1_epi32(3))
            }
        }
    }
}

impl Core for Product {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let rank = self.left.shape.len();
        let mut row = (usize::MAX, std::ptr::null());
        for i in 0..n {
            let number = (at[0] + (start + i) as isize * self.step) as usize;
            let (own, column) = (number / self.columns, number % self.columns);
            if row.0 != own {
                let (mut rest, mut place) = (own, self.left.offset);
                for axis in (0..rank - 1).rev() {
                    place += (rest % self.left.shape[axis]) as isize * self.left.strides[axis];
                    rest /= self.left.shape[axis];
                }
                row = (own, args.at(0, place * SIZE).cast_const().cast::<f32>());
            }
            // SAFETY: `args` are the kernel's; `to` has room for `n` elements.
            unsafe { to.cast::<f32>().add(i).write(self.element(args, row.1, column)) };
        }
        to
    }
}
