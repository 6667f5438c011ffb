//! Products whose right operand is rows of numbers of few bits, as files have them.

use super::*;

/// The zero points of numbers of few bits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroPoints {
    /// All are this number.
    Number(#[serde(with = "crate::expr::literal")] f64),
    /// Numbers of as many bits, with a sign if the others have one. Those of a row begin in a byte of their own.
    Packed,
    /// Floats, one per block.
    Floats,
    /// None: a number is a place in a list of floats, which has what it stands for before it is scaled.
    Codes,
}

/// How numbers of few bits lie in words of 32 bits, the first in the lowest bits. Each row begins in a word of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Bits of a number.
    pub bits: usize,
    /// The bits of a word that are flipped before numbers are read: of those with a sign, the highest ones. What is read is then larger by
    /// [`raised`](Self::raised), and has no sign.
    pub flip: u32,
    /// Numbers of a block.
    pub block: usize,
    /// True if kernels read them word by word: all numbers of a word are whole, and of one block, and affine. Others are read one by one.
    pub by_words: bool,
    /// Numbers of a word, if they are whole.
    pub per_word: usize,
    /// Words of a block, if it has whole ones.
    pub words_per_block: usize,
    /// Words of a row.
    pub words_per_row: usize,
    /// Blocks of a row.
    pub blocks: usize,
    /// Bytes of a row's packed zero points.
    pub zero_bytes: usize,
}

impl Packing {
    /// The packing of `k` numbers per row, of `bits` bits each, with a sign or without, of which each `block` numbers have one scale.
    ///
    /// # Errors
    /// What is not possible of it.
    pub fn new(bits: usize, signed: bool, block: usize, k: usize) -> Result<Packing, String> {
        ensure((2..=8).contains(&bits), || format!("expected numbers of 2 to 8 bits, found {bits}"))?;
        ensure(block > 0 && block <= MOST_EXTENT && (block * bits).is_multiple_of(8), || {
            format!("expected blocks of whole bytes, found {block} numbers of {bits} bits")
        })?;
        let blocks = k.div_ceil(block);
        let zero_bytes = (blocks * bits).div_ceil(8);
        let words_per_row = blocks.checked_mul(block * bits).ok_or("more numbers than can be counted")?.div_ceil(32);
        let highest = (u32::MAX / (u32::MAX >> (32 - bits))).wrapping_shl(bits as u32 - 1);
        Ok(Packing {
            bits,
            flip: if signed { highest } else { 0 },
            block,
            by_words: bits.is_power_of_two() && (block * bits).is_multiple_of(32),
            per_word: 32 / bits,
            words_per_block: block * bits / 32,
            words_per_row,
            blocks,
            zero_bytes,
        })
    }

    /// The numbers that a row's packed zero points have room for.
    pub fn zeros_per_row(&self) -> usize {
        8 * self.zero_bytes / self.bits
    }

    /// The number that numbers with a sign are larger by when their sign is flipped; 0 for others.
    pub fn raised(&self) -> u32 {
        if self.flip == 0 { 0 } else { 1 << (self.bits - 1) }
    }

    /// The bit at which a number of a row begins.
    pub fn bit(&self, row: usize, place: usize) -> usize {
        32 * self.words_per_row * row + place * self.bits
    }

    /// The bit at which the packed zero point of a row's block begins.
    pub fn zero_bit(&self, row: usize, block: usize) -> usize {
        8 * self.zero_bytes * row + block * self.bits
    }

    /// The number that begins at a bit of a list of words, larger by [`raised`](Self::raised).
    pub fn number(&self, bit: usize, mut word: impl FnMut(usize) -> u32) -> u32 {
        let (at, shift) = (bit / 32, bit % 32);
        let mut number = word(at) >> shift;
        if shift + self.bits > 32 {
            number |= word(at + 1) << (32 - shift);
        }
        number & (u32::MAX >> (32 - self.bits)) ^ self.raised()
    }

    /// The number that begins at a bit of a list of words that are held as floats.
    pub fn number_in(&self, bit: usize, mut word: impl FnMut(usize) -> f64) -> f64 {
        f64::from(self.number(bit, |at| word(at) as i64 as u32)) - f64::from(self.raised())
    }
}

impl Template {
    /// The packing of a product of numbers of few bits, and its zero points; `None` for another template.
    pub fn packing(&self, k: usize) -> Option<Result<(Packing, ZeroPoints), String>> {
        match *self {
            Template::MatMulBits { bits, signed, block, zeros } => {
                let of =
                    |packing: Packing| Packing { by_words: packing.by_words && zeros != ZeroPoints::Codes, ..packing };
                Some(Packing::new(bits, signed, block, k).map(|packing| (of(packing), zeros)))
            }
            _ => None,
        }
    }
}

impl Kernel {
    /// The packing of the right operand of a kernel that was checked, and its zero points.
    ///
    /// # Panics
    /// The kernel has another template.
    pub fn packing(&self) -> (Packing, ZeroPoints) {
        let k = self.reads[0].access.shape.last().copied().unwrap_or(0);
        let packing = self.template.packing(k).unwrap_or_else(|| mismatch(&self.template));
        packing.expect("the kernel was checked")
    }
}

pub(super) static MATMUL_BITS: TemplateDef = TemplateDef {
    name: "matmul_bits",
    doc: "matrix product by numbers of few bits",
    kind: Kind::Product,
    core_reads: |template| match template {
        Template::MatMulBits { zeros: ZeroPoints::Number(_), .. } => 3,
        _ => 4,
    },
    widens: |kernel, operand, is_constant| match (&kernel.template, operand) {
        (_, 2) => is_constant,
        (Template::MatMulBits { zeros, .. }, 3) => {
            is_constant && matches!(zeros, ZeroPoints::Floats | ZeroPoints::Codes)
        }
        _ => false,
    },
    check: |kernel, _| {
        let (shape, reads) = (&kernel.shape, &kernel.reads);
        let (batch, m, n) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        let k = reads[0].access.shape[batch.len() + 1];
        let (packing, zeros) = kernel.template.packing(k).unwrap_or_else(|| mismatch(&kernel.template))?;
        let filled = packing.blocks.saturating_mul(packing.block);
        // Numbers that are read one by one are found by their first bit.
        let unit = if packing.by_words { 1 } else { packing.bits };
        let zeros_of = if zeros == ZeroPoints::Packed { 8 * packing.zero_bytes / packing.bits } else { 0 };
        let largest = m.max(n).max(filled.max(n.saturating_mul(zeros_of)).saturating_mul(unit));
        ensure(largest <= MOST_EXTENT, || format!("a product of {m} by {k} by {n} is too large"))?;
        kernel.reads_extents(0, &[batch, &[m, k]].concat())?;
        let words = |operand: usize, bytes: usize| {
            kernel.reads_extents(operand, &[bytes.div_ceil(4)])?;
            let read = &reads[operand];
            ensure(read.dtype == DType::I32 && read.access.is_contiguous(), || {
                format!("operand {operand} read: expected words of 32 bits, found {} {:?}", read.dtype, read.access)
            })
        };
        let floats = |operand: usize| {
            kernel.reads_extents(operand, &[n, packing.blocks])?;
            let read = &reads[operand];
            ensure(is_small_float(read.dtype), || {
                format!("operand {operand} read: expected f32, f16 or bf16, found {}", read.dtype)
            })
        };
        ensure(is_small_float(reads[0].dtype), || format!("expected f32, f16 or bf16, found {}", reads[0].dtype))?;
        words(1, 4 * n * packing.words_per_row)?;
        floats(2)?;
        match zeros {
            ZeroPoints::Number(_) => Ok(()),
            ZeroPoints::Packed => words(3, n * packing.zero_bytes),
            ZeroPoints::Floats => floats(3),
            ZeroPoints::Codes => {
                kernel.reads_extents(3, &[1 << packing.bits])?;
                ensure(packing.flip == 0, || "expected numbers without a sign, which are places".to_owned())?;
                ensure(is_small_float(reads[3].dtype), || {
                    format!("operand 3 read: expected f32, f16 or bf16, found {}", reads[3].dtype)
                })
            }
        }
    },
    axis_of: |kernel, operand, axis| match operand {
        0 if axis + 1 == kernel.shape.len() => Along::Whole,
        0 => Along::Axis(axis),
        _ if axis + 1 == kernel.shape.len() => Along::Tied,
        _ => Along::Whole,
    },
    meaning: product,
    samples: || {
        let of = |(bits, signed), block, zeros, [m, k, n]: [usize; 3]| {
            let template = Template::MatMulBits { bits, signed, block, zeros };
            let packing = Packing::new(bits, signed, block, k).expect("a sample");
            let words = |count| Operand { dtype: DType::I32, ..floats(&[count]) };
            let mut reads = vec![floats(&[m, k]), words(n * packing.words_per_row), floats(&[n, packing.blocks])];
            match zeros {
                ZeroPoints::Number(_) => {}
                ZeroPoints::Packed => reads.push(words((n * packing.zero_bytes).div_ceil(4))),
                ZeroPoints::Floats => reads.push(floats(&[n, packing.blocks])),
                ZeroPoints::Codes => reads.push(floats(&[1 << bits])),
            }
            sample(template, &[m, n], reads, Expr::input(0, DType::F32))
        };
        vec![
            of((4, false), 16, ZeroPoints::Number(8.0), [2, 40, 5]),
            of((4, false), 32, ZeroPoints::Packed, [3, 96, 4]),
            of((8, false), 16, ZeroPoints::Floats, [1, 32, 3]),
            of((2, false), 16, ZeroPoints::Packed, [2, 33, 6]),
            of((8, true), 16, ZeroPoints::Number(0.0), [3, 20, 5]),
            of((4, true), 16, ZeroPoints::Packed, [1, 48, 5]),
            of((2, true), 16, ZeroPoints::Floats, [2, 16, 3]),
            of((3, false), 16, ZeroPoints::Packed, [2, 40, 5]),
            of((5, true), 32, ZeroPoints::Packed, [1, 70, 3]),
            of((6, false), 16, ZeroPoints::Number(32.0), [3, 33, 4]),
            of((7, false), 8, ZeroPoints::Floats, [2, 40, 3]),
            of((4, false), 4, ZeroPoints::Packed, [2, 18, 3]),
            of((4, false), 16, ZeroPoints::Codes, [2, 40, 5]),
        ]
    },
    ..PLAIN
};

/// True for the floats that sums in `f32` are of.
fn is_small_float(dtype: DType) -> bool {
    dtype == DType::F32 || dtype.is_half()
}

fn product(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let [row @ .., column] = index else { panic!("a product has at least two axes") };
    let (packing, zeros) = kernel.packing();
    let left = elements.along(0, &[row, &[0]].concat(), row.len());
    let mut sum = 0.0;
    for block in 0..packing.blocks {
        let zero = match zeros {
            ZeroPoints::Number(zero) => zero,
            ZeroPoints::Floats => elements.at(3, &[*column, block]),
            ZeroPoints::Packed => packing.number_in(packing.zero_bit(*column, block), |word| elements.at(3, &[word])),
            ZeroPoints::Codes => 0.0,
        };
        let scale = elements.at(2, &[*column, block]);
        for (j, x) in left.iter().enumerate().skip(block * packing.block).take(packing.block) {
            let mut number = packing.number_in(packing.bit(*column, j), |word| elements.at(1, &[word]));
            if zeros == ZeroPoints::Codes {
                number = elements.at(3, &[number as usize]);
            }
            sum += x * (number - zero) * scale;
        }
    }
    single(sum)
}
