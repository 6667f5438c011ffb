//! Products by numbers of few bits: a number is widened to a float on its way into the sum. For few rows it is in a register, and multiplied by
//! all of them; for more, a panel of numbers is widened for the kernels that multiply floats.

use super::block::{Repr, from_bf16, from_f16};
use super::gemm::{FewRows, PANEL_COLS, Produce, View};
use super::operands::stored;
use super::simd::{Isa, Lanes, Plain, per_isa};
use super::task::Args;
use plimsoll_core::dtype::DType;
use plimsoll_core::error::ensure;
use plimsoll_core::kernel::{Kernel, Operand, Packing, ZeroPoints};
use plimsoll_core::shape::Access;
use std::ops::Range;

/// The right operand of a product: rows of numbers of few bits, which are its columns.
pub struct Weights {
    packing: Packing,
    zeros: ZeroPoints,
    /// The same as [`Packing::raised`].
    raised: f32,
    words: Access,
    scales: Floats,
    points: Option<Floats>,
    codes: Option<Floats>,
    /// Packed zero points.
    zero_words: isize,
}

/// Floats, one per block of a column, or one per number that there can be.
struct Floats {
    arg: usize,
    access: Access,
    dtype: DType,
}

impl Floats {
    fn new(kernel: &Kernel, arg: usize) -> Result<Floats, String> {
        let Operand { dtype, ref access, .. } = kernel.reads[arg];
        let known = dtype == DType::F32 || dtype.is_half();
        ensure(known, || format!("operand {arg} read: products of {dtype}"))?;
        Ok(Floats { arg, access: access.clone(), dtype })
    }

    /// The float of a block.
    ///
    /// # Safety
    /// `args` must be the kernel's, and have the block.
    #[inline(always)]
    unsafe fn at(&self, args: &Args, column: usize, block: usize) -> f32 {
        let Access { offset, ref strides, .. } = self.access;
        let place = offset + column as isize * strides[0] + block as isize * strides.get(1).copied().unwrap_or(0);
        let at = args.at(self.arg, place * self.dtype.size() as isize).cast_const();
        // SAFETY: it is inside the operand, which was checked to span its memory.
        unsafe {
            match self.dtype {
                DType::F16 => from_f16(at.cast::<u16>().read()),
                DType::BF16 => from_bf16(at.cast::<u16>().read()),
                _ => at.cast::<f32>().read(),
            }
        }
    }

    /// The floats of the first blocks of a range, in as many places.
    ///
    /// # Safety
    /// As for [`at`](Self::at).
    #[inline(always)]
    unsafe fn fill(&self, args: &Args, column: usize, first: usize, to: &mut [f32]) {
        let Access { offset, ref strides, .. } = self.access;
        let place = offset + column as isize * strides[0] + first as isize * strides[1];
        let at = args.at(self.arg, place * self.dtype.size() as isize).cast_const();
        if strides[1] != 1 {
            for (block, to) in to.iter_mut().enumerate() {
                // SAFETY: guaranteed by the caller.
                *to = unsafe { self.at(args, column, first + block) };
            }
            return;
        }
        // SAFETY: the blocks lie one after another.
        unsafe {
            match self.dtype {
                DType::F16 => (0..to.len()).for_each(|block| to[block] = from_f16(*at.cast::<u16>().add(block))),
                DType::BF16 => (0..to.len()).for_each(|block| to[block] = from_bf16(*at.cast::<u16>().add(block))),
                _ => to.copy_from_slice(std::slice::from_raw_parts(at.cast::<f32>(), to.len())),
            }
        }
    }
}

/// The right operand of one launch.
pub struct Bound<'a> {
    /// The operand.
    pub weights: &'a Weights,
    /// The kernel's arguments.
    pub args: &'a Args,
}

/// The bytes of an element of all operands.
const SIZE: isize = 4;

impl Weights {
    /// Finds the operand of a kernel that was checked.
    pub fn new(kernel: &Kernel) -> Result<Weights, String> {
        let (packing, zeros) = kernel.packing();
        let data = &kernel.reads[0];
        ensure(stored(data)? == Repr::F32, || format!("operand 0 read: products of {}", data.dtype))?;
        let points = (zeros == ZeroPoints::Floats).then(|| Floats::new(kernel, 3)).transpose()?;
        let codes = (zeros == ZeroPoints::Codes).then(|| Floats::new(kernel, 3)).transpose()?;
        let zero_words = kernel.reads.get(3).filter(|_| zeros == ZeroPoints::Packed).map_or(0, |o| o.access.offset);
        let (words, raised) = (kernel.reads[1].access.clone(), packing.raised() as f32);
        Ok(Weights { packing, zeros, raised, words, scales: Floats::new(kernel, 2)?, points, codes, zero_words })
    }

    /// The first word of a column.
    #[inline(always)]
    fn column(&self, args: &Args, column: usize) -> *const u32 {
        let words = self.words.offset + (column * self.packing.words_per_row) as isize;
        args.at(1, words * SIZE).cast_const().cast()
    }

    /// The scale of a block.
    ///
    /// # Safety
    /// `args` must be the kernel's, and have the block.
    #[inline(always)]
    unsafe fn scale(&self, args: &Args, column: usize, block: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.scales.at(args, column, block) }
    }

    /// The zero point of a block of numbers that are larger by [`Packing::raised`].
    ///
    /// # Safety
    /// As for [`scale`](Self::scale).
    #[inline(always)]
    unsafe fn zero(&self, args: &Args, column: usize, block: usize) -> f32 {
        match (self.zeros, &self.points) {
            (ZeroPoints::Number(zero), _) => zero as f32 + self.raised,
            // SAFETY: guaranteed by the caller.
            (ZeroPoints::Floats, Some(points)) => unsafe { points.at(args, column, block) + self.raised },
            (ZeroPoints::Packed, _) => {
                let bit = self.packing.zero_bit(column, block);
                // SAFETY: it is inside the operand.
                let word =
                    |at: usize| unsafe { args.at(3, (self.zero_words + at as isize) * SIZE).cast::<u32>().read() };
                self.packing.number(bit, word) as f32
            }
            (ZeroPoints::Codes, _) => 0.0,
            (ZeroPoints::Floats, None) => unreachable!("zero points that are floats are an operand"),
        }
    }
}

impl Produce for Bound<'_> {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        assert_eq!(step, PANEL_COLS, "panels of a right operand are padded");
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.weights.packing.by_words {
                widen(isa, self, k, lanes, panel);
            } else {
                one_by_one(self, k, lanes, panel);
            }
        }
    }

    fn few(&self) -> usize {
        if self.weights.packing.by_words { FEW } else { 0 }
    }

    unsafe fn multiply(&self, isa: Isa, few: &FewRows) {
        // SAFETY: guaranteed by the caller.
        unsafe { few_rows(isa, self, few) }
    }
}

/// Widens numbers that may begin in one word and end in the next, or that are places in a list.
///
/// # Safety
/// As for [`Produce::panel`].
unsafe fn one_by_one(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let &Bound { weights, args } = from;
    let Packing { bits, block, .. } = weights.packing;
    let mut codes = [0.0; 256];
    for (place, code) in codes[..1 << bits].iter_mut().enumerate() {
        // SAFETY: the operand has a code for each number.
        *code = unsafe { weights.codes.as_ref().map_or(place as f32, |codes| codes.at(args, place, 0)) };
    }
    for lane in 0..PANEL_COLS {
        let column = lanes.start + lane;
        for p in k.clone() {
            // SAFETY: the column has the number, and the panel the place.
            unsafe {
                let number = if lane < lanes.len() {
                    let words = weights.column(args, column);
                    let number = weights.packing.number(p * bits, |at| words.add(at).read());
                    let above = codes[number as usize] - weights.zero(args, column, p / block);
                    above * weights.scale(args, column, p / block)
                } else {
                    0.0
                };
                panel.add((p - k.start) * PANEL_COLS + lane).write(number);
            }
        }
    }
}

/// Vectors of words, whose numbers become vectors of floats.
trait Words: Lanes {
    /// A vector of words.
    type Ints: Copy;
    /// The first `n <= LEN` words, then zeros; with some bits flipped.
    unsafe fn words(from: *const u32, n: usize, flip: u32) -> Self::Ints;
    /// The numbers at place `j` of each word.
    unsafe fn numbers<const BITS: usize>(words: Self::Ints, j: usize) -> Self;
    /// Each of `count` floats for `each` lanes, a power of two.
    unsafe fn spread(from: *const f32, count: usize, each: usize) -> Self;
}

/// The bits of a number at place `j` of a word.
fn number<const BITS: usize>(word: u32, j: usize) -> u32 {
    word >> (j * BITS) & (u32::MAX >> (32 - BITS))
}

impl Words for Plain {
    type Ints = [u32; Plain::LEN];

    #[inline(always)]
    unsafe fn words(from: *const u32, n: usize, flip: u32) -> Self::Ints {
        // SAFETY: guaranteed by the caller.
        std::array::from_fn(|lane| if lane < n { unsafe { *from.add(lane) ^ flip } } else { 0 })
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(words: Self::Ints, j: usize) -> Self {
        let floats = words.map(|word| number::<BITS>(word, j) as f32);
        // SAFETY: these are as many.
        unsafe { Plain::load(floats.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn spread(from: *const f32, count: usize, each: usize) -> Self {
        // SAFETY: guaranteed by the caller.
        let float = |lane: usize| if lane / each < count { unsafe { *from.add(lane / each) } } else { 0.0 };
        let floats: [f32; Plain::LEN] = std::array::from_fn(float);
        // SAFETY: these are as many.
        unsafe { Plain::load(floats.as_ptr()) }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::super::simd::{Lanes, Neon, Plain};
    use super::Words;
    use std::arch::aarch64::*;

    impl Words for Neon {
        type Ints = [uint32x4_t; 2];

        #[inline(always)]
        unsafe fn words(from: *const u32, n: usize, flip: u32) -> Self::Ints {
            // SAFETY: guaranteed by the caller; a vector that is cut is made of its words alone.
            unsafe {
                if n < Neon::LEN {
                    let words = Plain::words(from, n, flip);
                    return [vld1q_u32(words.as_ptr()), vld1q_u32(words.as_ptr().add(4))];
                }
                [0, 4].map(|at| veorq_u32(vld1q_u32(from.add(at)), vdupq_n_u32(flip)))
            }
        }

        #[inline(always)]
        unsafe fn numbers<const BITS: usize>(words: Self::Ints, j: usize) -> Self {
            // SAFETY: NEON is part of the baseline.
            let [a, b] = words.map(|words| unsafe {
                let shifted = vshlq_u32(words, vdupq_n_s32(-((j * BITS) as i32)));
                vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(u32::MAX >> (32 - BITS))))
            });
            Neon(a, b)
        }

        #[inline(always)]
        unsafe fn spread(from: *const f32, count: usize, each: usize) -> Self {
            // SAFETY: guaranteed by the caller.
            let float = |lane: usize| if lane / each < count { unsafe { *from.add(lane / each) } } else { 0.0 };
            let floats: [f32; Neon::LEN] = std::array::from_fn(float);
            // SAFETY: these are as many.
            unsafe { Neon::load(floats.as_ptr()) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{Lanes, Ymm, Zmm};
    use super::Words;
    use std::arch::x86_64::*;

    impl Words for Ymm {
        type Ints = __m256i;

        #[inline(always)]
        unsafe fn words(from: *const u32, n: usize, flip: u32) -> __m256i {
            // SAFETY: guaranteed by the caller; a masked load reads no other lanes.
            unsafe {
                let words = if n == Ymm::LEN {
                    _mm256_loadu_si256(from.cast())
                } else {
                    let first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                    _mm256_maskload_epi32(from.cast(), _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), first))
                };
                _mm256_xor_si256(words, _mm256_set1_epi32(flip as i32))
            }
        }

        #[inline(always)]
        unsafe fn numbers<const BITS: usize>(words: __m256i, j: usize) -> Ymm {
            // SAFETY: the CPU has AVX2, by the contract of `Lanes`.
            unsafe {
                let shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128((j * BITS) as i32));
                let numbers = _mm256_and_si256(shifted, _mm256_set1_epi32((1 << BITS) - 1));
                _mm256_cvtepi32_ps(numbers).into()
            }
        }

        #[inline(always)]
        unsafe fn spread(from: *const f32, count: usize, each: usize) -> Ymm {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let floats: __m256 = Ymm::load_first(from, count).into();
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let places = _mm256_srl_epi32(lanes, _mm_cvtsi32_si128(each.ilog2() as i32));
                _mm256_permutevar8x32_ps(floats, places).into()
            }
        }
    }

    impl Words for Zmm {
        type Ints = __m512i;

        #[inline(always)]
        unsafe fn words(from: *const u32, n: usize, flip: u32) -> __m512i {
            // SAFETY: guaranteed by the caller; a masked load reads no other lanes.
            unsafe {
                let words = _mm512_maskz_loadu_epi32(((1u32 << n) - 1) as u16, from.cast());
                _mm512_xor_si512(words, _mm512_set1_epi32(flip as i32))
            }
        }

        #[inline(always)]
        unsafe fn numbers<const BITS: usize>(words: __m512i, j: usize) -> Zmm {
            // SAFETY: the CPU has AVX-512, by the contract of `Lanes`.
            unsafe {
                let shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128((j * BITS) as i32));
                if BITS == 8 {
                    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255))).into();
                }
                // A table of the numbers, of which the four lowest bits choose one.
                let table: [f32; 16] = std::array::from_fn(|bits| (bits % (1 << BITS)) as f32);
                _mm512_permutexvar_ps(shifted, _mm512_loadu_ps(table.as_ptr())).into()
            }
        }

        #[inline(always)]
        unsafe fn spread(from: *const f32, count: usize, each: usize) -> Zmm {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let floats: __m512 = Zmm::load_first(from, count).into();
                let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let places = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(each.ilog2() as i32));
                _mm512_permutexvar_ps(places, floats).into()
            }
        }
    }
}

per_isa! {
    /// Widens the numbers of some columns, row of the panel by row: those at the same place of each column's word.
    ///
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn widen(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => widen_by
}

/// # Safety
/// As for [`widen`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn widen_by<L: Words>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match from.weights.packing.bits {
            2 => widen_bits::<L, 2>(from, k, lanes, panel),
            4 => widen_bits::<L, 4>(from, k, lanes, panel),
            _ => widen_bits::<L, 8>(from, k, lanes, panel),
        }
    }
}

/// # Safety
/// As for [`widen_by`].
#[inline(always)]
unsafe fn widen_bits<L: Words, const BITS: usize>(from: &Bound, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let &Bound { weights, args } = from;
    let Packing { words_per_block, flip, .. } = weights.packing;
    let per = 32 / BITS;
    let numbers = words_per_block * per;
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
            let until = end.min((p / per + 1) * per);
            // SAFETY: the columns have the word, and the panel the rows.
            unsafe {
                let row = words.map(|words| words.add(p / per).read());
                for first in (0..PANEL_COLS).step_by(L::LEN) {
                    let row = L::words(row.as_ptr().add(first), L::LEN, flip);
                    let (zero, scale) = (L::load(zeros.as_ptr().add(first)), L::load(scales.as_ptr().add(first)));
                    for p in p..until {
                        let above = L::numbers::<BITS>(row, p % per).sub(zero);
                        above.mul(scale).store(panel.add((p - k.start) * PANEL_COLS + first));
                    }
                }
            }
            p = until;
        }
    }
}

/// Each number is widened for [some](ROWS) rows at a time. For so many rows, that is faster than panels of numbers.
const FEW: usize = 8;

/// Rows that are multiplied by a number at a time.
const ROWS: usize = 4;

/// Numbers of a row whose sums are computed in one go: rows of data that are as long stay in the L1 cache.
const STRETCH: usize = 2048;

/// Rows of data in the order in which numbers come out of words: a vector of the first numbers of neighbouring words, then one of the
/// second numbers, and so on. Zeros are behind the end.
struct Ordered([[f32; STRETCH]; ROWS]);

/// The zero points and the scales of the blocks of a stretch. They are written well before vectors of them are read: a processor waits for a
/// vector whose parts were just written.
struct Blocks {
    zeros: [f32; MOST_BLOCKS],
    scales: [f32; MOST_BLOCKS],
}

/// The most blocks that a stretch is in: of a word each, and what vectors reach beyond.
const MOST_BLOCKS: usize = STRETCH / 4 + MOST_LANES;

impl Ordered {
    /// Orders a stretch of some rows for vectors of so many words, of `per` numbers each.
    ///
    /// # Safety
    /// The view must have them.
    #[inline(always)]
    unsafe fn fill(&mut self, rows: View, count: usize, terms: Range<usize>, per: usize, vector: usize) {
        let len = terms.len().next_multiple_of(per * vector);
        for (row, to) in self.0[..count].iter_mut().enumerate() {
            for (group, to) in to[..len].chunks_exact_mut(per * vector).enumerate() {
                let first = terms.start + group * per * vector;
                for (j, to) in to.chunks_exact_mut(vector).enumerate() {
                    for (word, to) in to.iter_mut().enumerate() {
                        let k = first + word * per + j;
                        // SAFETY: it is one of the row's elements.
                        *to = if k < terms.end { unsafe { *rows.at(row, k) } } else { 0.0 };
                    }
                }
            }
        }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Produce::multiply`].
    unsafe fn few_rows(from: &Bound, few: &FewRows) => few_rows_by
}

/// # Safety
/// As for [`Produce::multiply`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn few_rows_by<L: Words>(from: &Bound, few: &FewRows) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match from.weights.packing.bits {
            2 => few_rows_bits::<L, 2>(from, few),
            4 => few_rows_bits::<L, 4>(from, few),
            _ => few_rows_bits::<L, 8>(from, few),
        }
    }
}

/// # Safety
/// As for [`few_rows_by`].
#[inline(always)]
unsafe fn few_rows_bits<L: Words, const BITS: usize>(from: &Bound, few: &FewRows) {
    let &FewRows { left, rows, terms, ref columns, to, stride } = few;
    let per = 32 / BITS;
    let mut ordered = Ordered([[0.0; STRETCH]; ROWS]);
    let mut blocks = Blocks { zeros: [0.0; MOST_BLOCKS], scales: [0.0; MOST_BLOCKS] };
    for first in (0..rows).step_by(ROWS) {
        let count = (rows - first).min(ROWS);
        for start in (0..terms).step_by(STRETCH) {
            let end = terms.min(start + STRETCH);
            let words = start / per..end.div_ceil(per);
            // SAFETY: guaranteed by the caller.
            unsafe {
                ordered.fill(View { ptr: left.at(first, 0), ..left }, count, start..end, per, L::LEN);
                for column in columns.clone() {
                    let sums = match count {
                        1 => sums::<L, BITS, 1>(from, &ordered, &mut blocks, column, words.clone()),
                        2 => sums::<L, BITS, 2>(from, &ordered, &mut blocks, column, words.clone()),
                        3 => sums::<L, BITS, 3>(from, &ordered, &mut blocks, column, words.clone()),
                        _ => sums::<L, BITS, ROWS>(from, &ordered, &mut blocks, column, words.clone()),
                    };
                    for (row, sum) in sums.into_iter().enumerate().take(count) {
                        let to = to.offset((first + row) as isize * stride).add(column - columns.start);
                        *to = if start == 0 { sum } else { *to + sum };
                    }
                }
            }
        }
    }
}

/// A vector of what the blocks of some words have, of which the list begins with the first word's.
///
/// # Safety
/// The CPU must have the instruction set of `L`, and the list the blocks.
#[inline(always)]
unsafe fn lanes_of<L: Words>(list: &[f32], at: usize, count: usize, block: usize) -> L {
    // Lanes that share a block.
    let each = block.min(L::LEN);
    let blocks = (at + count).div_ceil(block) - at / block;
    // SAFETY: guaranteed by the caller.
    unsafe {
        if blocks == 1 {
            return L::splat(list[0]);
        }
        if block.is_multiple_of(each) && L::LEN.is_multiple_of(each) {
            return L::spread(list.as_ptr(), blocks, each);
        }
        let mut lanes = [0.0; MOST_LANES];
        for lane in 0..count {
            lanes[lane] = list[(at + lane) / block - at / block];
        }
        L::load(lanes.as_ptr())
    }
}

/// The sums of `COUNT` ordered rows over some words of a column.
///
/// # Safety
/// The column has the words, and the CPU the instruction set of `L`.
#[inline(always)]
unsafe fn sums<L: Words, const BITS: usize, const COUNT: usize>(
    from: &Bound,
    ordered: &Ordered,
    blocks: &mut Blocks,
    column: usize,
    words: Range<usize>,
) -> [f32; ROWS] {
    let &Bound { weights, args } = from;
    let Packing { words_per_block: block, flip, .. } = weights.packing;
    let first_word = weights.column(args, column);
    let is_number = matches!(weights.zeros, ZeroPoints::Number(_));
    // The first of its blocks, and the one behind the last.
    let (start, end) = (words.start / block, words.end.div_ceil(block));
    // SAFETY: the column has the words and their blocks; ordered data are there for whole vectors of words.
    unsafe {
        let mut zeros = L::splat(if is_number { weights.zero(args, column, 0) } else { 0.0 });
        weights.scales.fill(args, column, start, &mut blocks.scales[..end - start]);
        for of in if is_number { 0..0 } else { start..end } {
            blocks.zeros[of - start] = weights.zero(args, column, of);
        }
        let mut sums = [L::splat(0.0); COUNT];
        let mut data = 0;
        for at in words.clone().step_by(L::LEN) {
            let count = L::LEN.min(words.end - at);
            let own = L::words(first_word.add(at), count, flip);
            if !is_number {
                zeros = lanes_of::<L>(&blocks.zeros[at / block - start..], at, count, block);
            }
            let scales = lanes_of::<L>(&blocks.scales[at / block - start..], at, count, block);
            let mut parts = [L::splat(0.0); COUNT];
            for j in 0..32 / BITS {
                let numbers = L::numbers::<BITS>(own, j).sub(zeros);
                for (part, row) in parts.iter_mut().zip(&ordered.0) {
                    *part = L::load(row.as_ptr().add(data)).mul_add(numbers, *part);
                }
                data += L::LEN;
            }
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum = part.mul_add(scales, *sum);
            }
        }
        let mut found = [0.0; ROWS];
        for (found, sum) in found.iter_mut().zip(sums) {
            let mut lanes = [0.0; MOST_LANES];
            sum.store(lanes.as_mut_ptr());
            // Pairs of halves, in an order that is the same whatever the number of lanes behind is.
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
            }
            *found = lanes[0];
        }
        found
    }
}

/// Lanes of the widest vector.
const MOST_LANES: usize = 16;
