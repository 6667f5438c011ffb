//! Products by numbers of few bits: a number is widened to a float in a register, on its way into the sum.

use super::block::Repr;
use super::map::{Core, CoreSpec};
use super::nest::Motion;
use super::operands::stored;
use super::simd::Isa;
use super::task::Args;
use crate::error::ensure;
use crate::kernel::{Kernel, Packing, ZeroPoints};
use crate::shape::Access;

/// Prepares a product by numbers of few bits.
pub fn core(kernel: &Kernel, isa: Isa) -> Result<CoreSpec<'_>, String> {
    let (packing, zeros) = kernel.packing();
    let floats = kernel.reads[..kernel.template.core_reads()].iter().enumerate();
    for (number, operand) in floats.filter(|(number, _)| *number != 1 && (*number != 3 || zeros == ZeroPoints::Floats))
    {
        ensure(stored(operand)? == Repr::F32, || format!("operand {number} read: products of {}", operand.dtype))?;
    }
    let rank = kernel.shape.len();
    let mut number = Motion::still(rank);
    for axis in 0..rank {
        number.steps[axis] = kernel.shape[axis + 1..].iter().product::<usize>() as isize;
    }
    let access = |slot: usize| kernel.reads[slot].access.clone();
    let left = access(0);
    let terms = left.shape[rank - 1];
    Ok(CoreSpec {
        repr: Repr::F32,
        motions: vec![number],
        cost: 0.1 * terms as f64,
        tables: 0,
        build: Box::new(move |steps, _| {
            Box::new(Product {
                isa,
                packing,
                zeros,
                terms,
                columns: kernel.shape[rank - 1],
                words: access(1),
                scales: access(2),
                points: (kernel.template.core_reads() > 3).then(|| access(3)),
                left,
                step: steps[0],
            })
        }),
    })
}

struct Product {
    isa: Isa,
    packing: Packing,
    zeros: ZeroPoints,
    /// Terms of a sum, and elements of a row.
    terms: usize,
    columns: usize,
    left: Access,
    words: Access,
    scales: Access,
    points: Option<Access>,
    /// From an element's number to the next one's, along the innermost axis.
    step: isize,
}

/// The bytes of an element of all operands.
const SIZE: isize = 4;

impl Product {
    /// An element of a column.
    ///
    /// # Safety
    /// `row` must be the place of the left operand's row among `args`, which must be the kernel's.
    unsafe fn element(&self, args: &Args, row: *const f32, column: usize) -> f32 {
        let Packing { bits, words_per_block, blocks, .. } = self.packing;
        let words = self.words.offset + (column * blocks * words_per_block) as isize;
        let run = Run {
            row,
            step: self.left.strides[self.left.strides.len() - 1],
            words: args.at(1, words * SIZE).cast(),
            packing: self.packing,
            terms: self.terms,
        };
        let scale = |block: usize| {
            // SAFETY: it is inside the operand, which was checked to span its memory.
            unsafe { args.at(2, self.scales.at(&[column, block]) * SIZE).cast::<f32>().read() }
        };
        // SAFETY: `args` are the kernel's.
        let zero = |block: usize| unsafe { self.zero(args, column, block) };
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

    /// The zero point of a block.
    ///
    /// # Safety
    /// `args` must be the kernel's.
    #[inline(always)]
    unsafe fn zero(&self, args: &Args, column: usize, block: usize) -> f32 {
        match (self.zeros, &self.points) {
            (ZeroPoints::Number(zero), _) => zero as f32,
            // SAFETY: it is inside the operand.
            (ZeroPoints::Floats, Some(points)) => unsafe {
                args.at(3, points.at(&[column, block]) * SIZE).cast::<f32>().read()
            },
            (ZeroPoints::Packed, Some(points)) => {
                let place = self.packing.zeros_per_row() * column + block;
                // SAFETY: as above.
                let word = |at| unsafe { args.at(3, points.at(&[at]) * SIZE).cast::<u32>().read() };
                self.packing.number(place, word) as f32
            }
            (_, None) => unreachable!("zero points that are no number are an operand"),
        }
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
    use super::{Run, plain};
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
                let (x, numbers) = unsafe { (_mm256_loadu_ps(run.row.add(first)), eight_at::<BITS>(run.words, first)) };
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

    /// Eight numbers of a list of words, from one whose place is a multiple of eight.
    ///
    /// # Safety
    /// The processor has AVX2. The words must have them.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn eight_at<const BITS: usize>(words: *const u32, first: usize) -> __m256i {
        // SAFETY: guaranteed by the caller.
        let spread = |at: usize| _mm256_set1_epi32(unsafe { words.add(at).read() } as i32);
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        match BITS {
            // A byte is a number.
            // SAFETY: as above.
            8 => _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(words.add(first / 4).cast()) }),
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
