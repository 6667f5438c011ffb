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
        cost: 0.2 * terms as f64,
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
        let Packing { block, blocks, per_word, .. } = self.packing;
        let numbers = block * per_word;
        let step = self.left.strides[self.left.strides.len() - 1];
        let words = args.at(1, (self.words.offset + (column * blocks * block) as isize) * SIZE).cast::<u32>();
        let mut sum = 0.0;
        for b in 0..blocks {
            let (first, end) = (b * numbers, self.terms.min((b + 1) * numbers));
            // SAFETY: all of this is inside the operands, which were checked to span their memory.
            unsafe {
                let x = row.offset(first as isize * step);
                let zero = self.zero(args, column, b);
                let part = self.part(x, step, words.add(b * block), end - first, zero);
                sum += part * args.at(2, self.scales.at(&[column, b]) * SIZE).cast::<f32>().read();
            }
        }
        sum
    }

    /// The zero point of a block.
    ///
    /// # Safety
    /// `args` must be the kernel's.
    unsafe fn zero(&self, args: &Args, column: usize, block: usize) -> f32 {
        let Packing { bits, zeros, per_word, .. } = self.packing;
        match (self.zeros, &self.points) {
            (ZeroPoints::Number(zero), _) => zero as f32,
            // SAFETY: it is inside the operand.
            (ZeroPoints::Floats, Some(points)) => unsafe {
                args.at(3, points.at(&[column, block]) * SIZE).cast::<f32>().read()
            },
            (ZeroPoints::Packed, Some(points)) => {
                let place = 8 * zeros / bits * column + block;
                // SAFETY: as above.
                let word = unsafe { args.at(3, points.at(&[place / per_word]) * SIZE).cast::<u32>().read() };
                (word >> (place % per_word * bits) & mask(bits)) as f32
            }
            (_, None) => unreachable!("zero points that are no number are an operand"),
        }
    }

    /// The sum over a block, before its scale.
    ///
    /// # Safety
    /// There must be `count` floats at `x`, `step` apart, and the words of as many numbers.
    unsafe fn part(&self, x: *const f32, step: isize, words: *const u32, count: usize, zero: f32) -> f32 {
        #[cfg(target_arch = "x86_64")]
        if step == 1 && self.isa != Isa::PORTABLE {
            // SAFETY: the processor has AVX2 and FMA; otherwise as of this function.
            return unsafe { x86::part(self.packing.bits, x, words, count, zero) };
        }
        // SAFETY: as of this function.
        unsafe { plain(self.packing.bits, x, step, words, 0..count, zero) }
    }
}

/// The bits of a number.
fn mask(bits: usize) -> u32 {
    u32::MAX >> (32 - bits)
}

/// The sum over some numbers of a block.
///
/// # Safety
/// As of [`Product::part`].
unsafe fn plain(
    bits: usize,
    x: *const f32,
    step: isize,
    words: *const u32,
    numbers: std::ops::Range<usize>,
    zero: f32,
) -> f32 {
    let per_word = 32 / bits;
    let mut sum = 0.0;
    for j in numbers {
        // SAFETY: guaranteed by the caller.
        let (word, x) = unsafe { (words.add(j / per_word).read_unaligned(), x.offset(j as isize * step).read()) };
        sum += x * ((word >> (j % per_word * bits) & mask(bits)) as f32 - zero);
    }
    sum
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{mask, plain};
    use std::arch::x86_64::*;

    /// As [`plain`], eight numbers at a time.
    ///
    /// # Safety
    /// The processor has AVX2 and FMA. There must be `count` floats side by side at `x`, and the words of as many numbers.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn part(bits: usize, x: *const f32, words: *const u32, count: usize, zero: f32) -> f32 {
        let zeros = _mm256_set1_ps(zero);
        let ones = _mm256_set1_epi32(mask(bits) as i32);
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let shifts = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(bits as i32));
        let mut sums = [_mm256_setzero_ps(); 2];
        let whole = count / 8;
        for eight in 0..whole {
            // SAFETY: eight floats and as many numbers are there.
            let numbers = unsafe {
                match bits {
                    // A byte is a number.
                    8 => _mm256_cvtepu8_epi32(_mm_loadl_epi64(words.add(2 * eight).cast())),
                    4 => _mm256_and_si256(_mm256_srlv_epi32(spread(words.add(eight)), shifts), ones),
                    // Half a word.
                    _ => {
                        let upper = _mm256_set1_epi32((eight % 2 * 16) as i32);
                        let word = _mm256_srlv_epi32(spread(words.add(eight / 2)), upper);
                        _mm256_and_si256(_mm256_srlv_epi32(word, shifts), ones)
                    }
                }
            };
            let floats = _mm256_sub_ps(_mm256_cvtepi32_ps(numbers), zeros);
            // SAFETY: as above.
            let x = unsafe { _mm256_loadu_ps(x.add(8 * eight)) };
            sums[eight % 2] = _mm256_fmadd_ps(x, floats, sums[eight % 2]);
        }
        let all = _mm256_add_ps(sums[0], sums[1]);
        let half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        let sum = _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)));
        // SAFETY: guaranteed by the caller.
        sum + unsafe { plain(bits, x, 1, words, 8 * whole..count, zero) }
    }

    /// A word in all lanes.
    ///
    /// # Safety
    /// There must be a word.
    #[target_feature(enable = "avx2")]
    unsafe fn spread(word: *const u32) -> __m256i {
        // SAFETY: guaranteed by the caller.
        _mm256_set1_epi32(unsafe { word.read_unaligned() } as i32)
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
