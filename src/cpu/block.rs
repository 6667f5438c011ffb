//! Instructions over blocks: each runs one scalar operation over up to [`BLOCK`] elements in a loop that the compiler vectorises.
//!
//! Operands are addresses relative to a small table of base pointers: the registers, the constants, and blocks of the kernel's operands in
//! memory. The result of an instruction may take the place of an operand, element for element.

use super::math::{self, Elementary};
use super::simd::{Isa, Lanes, per_isa};
use half::{bf16, f16};
use plimsoll_core::dtype::DType;
use plimsoll_core::expr::{self, Binary, Unary};
use std::mem::MaybeUninit;
use std::ops::{BitAnd, BitOr, BitXor};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Elements per block: registers of a typical fused body stay in the L1 cache, and the cost of an instruction's dispatch is spread thin.
pub const BLOCK: usize = 1024;

/// The checker of plans holds to it.
const SHIFTS: &str = "shifts are of i32";

/// Elements of the widest vector of `f32`. Blocks are padded to it.
pub const VECTOR: usize = 16;

/// The representation of values in a register or in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repr {
    F32,
    F64,
    /// Stored, and computed in `F32`.
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    /// A byte that is zero or not.
    Bool,
}

impl Repr {
    /// The representation of this type's elements in memory, if this backend has them.
    pub fn stored(dtype: DType) -> Option<Repr> {
        Some(match dtype.held() {
            DType::F32 => Repr::F32,
            DType::F64 => Repr::F64,
            DType::I64 => Repr::I64,
            DType::I32 => Repr::I32,
            DType::I16 => Repr::I16,
            DType::I8 => Repr::I8,
            DType::U64 => Repr::U64,
            DType::U32 => Repr::U32,
            DType::U16 => Repr::U16,
            DType::U8 => Repr::U8,
            DType::Bool => Repr::Bool,
            DType::F16 => Repr::F16,
            DType::BF16 => Repr::BF16,
            narrow => unreachable!("{narrow} is held by another type"),
        })
    }

    /// The representation that this type is computed in: 32 bits for 16-bit floats, a wider one for small integers.
    pub fn computed(dtype: DType) -> Option<Repr> {
        match dtype {
            DType::F16 | DType::BF16 => Some(Repr::F32),
            _ => Repr::stored(dtype.wide()),
        }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Repr::F64 | Repr::I64 | Repr::U64 => 8,
            Repr::F32 | Repr::I32 | Repr::U32 => 4,
            Repr::I16 | Repr::U16 | Repr::F16 | Repr::BF16 => 2,
            Repr::U8 | Repr::I8 | Repr::Bool => 1,
        }
    }
}

/// The location of a block: bytes from a base pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Loc {
    /// Index into the table of base pointers.
    pub base: u32,
    /// Bytes from there.
    pub offset: u32,
}

/// The operands of an instruction that are one value for the whole block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// None.
    VV,
    /// The second.
    VS,
    /// The first.
    SV,
}

/// The operation of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Unary(Unary, Repr),
    /// Forms other than `VV` exist for `F32` alone.
    Binary(Binary, Repr, Form),
    /// By element size; true if `a`, if `b` is one value.
    Select(usize, bool, bool),
    Cast(Repr, Repr),
    /// One value, of this many bytes, to all elements.
    Splat(usize),
    Copy(usize),
}

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    pub kind: Kind,
    pub to: Loc,
    pub args: [Loc; 3],
    /// All its blocks may be read and written up to a whole number of vectors.
    pub padded: bool,
}

/// Runs instructions over the first `n` elements of each block.
///
/// # Safety
/// Every location must be readable (or writable) for `n` elements of its instruction's type, or one where the form says so, and aligned for it;
/// blocks that overlap must be equal.
pub unsafe fn exec(isa: Isa, ops: &[Op], n: usize, bases: &[*mut u8]) {
    for op in ops {
        let at = |loc: Loc| bases[loc.base as usize].wrapping_add(loc.offset as usize);
        let p = Ptrs { to: at(op.to), args: op.args.map(at) };
        let n = if op.padded { n.next_multiple_of(VECTOR) } else { n };
        // SAFETY: guaranteed by the caller.
        unsafe {
            if p.args.contains(&p.to) {
                in_place(isa, op.kind, n, &p);
            } else {
                one(isa, isa, op.kind, n, &p);
            }
        }
    }
}

/// Runs an instruction whose result takes the place of an operand, by way of copies of the operands: loops can count on sources and
/// destination to be apart.
///
/// # Safety
/// As for [`exec`].
pub unsafe fn in_place(isa: Isa, kind: Kind, n: usize, p: &Ptrs) {
    const PART: usize = 256;
    #[repr(align(64))]
    struct Copies([[MaybeUninit<u64>; PART]; 3]);
    if matches!(kind, Kind::Copy(_)) {
        return;
    }
    let (sizes, to_size) = kind.sizes();
    let mut copies = Copies([[MaybeUninit::uninit(); PART]; 3]);
    for first in (0..n).step_by(PART) {
        let len = PART.min(n - first);
        let mut part = Ptrs { to: p.to.wrapping_add(first * to_size), args: p.args };
        for (k, (arg, size)) in part.args.iter_mut().zip(sizes).enumerate() {
            *arg = arg.wrapping_add(first * size);
            // An operand of size zero is one value for the whole block, in memory of its own.
            if p.args[k] == p.to && size > 0 {
                let copy = copies.0[k].as_mut_ptr().cast::<u8>();
                // SAFETY: guaranteed by the caller; a part fits the copy.
                unsafe { copy.copy_from_nonoverlapping(*arg, len * size) }
                *arg = copy;
            }
        }
        // SAFETY: guaranteed by the caller.
        unsafe { one(isa, isa, kind, len, &part) }
    }
}

impl Kind {
    /// Bytes per element of the operands (0 for those that are one value, or not used) and of the result.
    pub fn sizes(self) -> ([usize; 3], usize) {
        match self {
            Kind::Unary(_, repr) => ([repr.size(), 0, 0], repr.size()),
            Kind::Binary(op, repr, form) => {
                let (a, b) = match form {
                    Form::VV => (repr.size(), repr.size()),
                    Form::VS => (repr.size(), 0),
                    Form::SV => (0, repr.size()),
                };
                ([a, b, 0], if op.compares() { 1 } else { repr.size() })
            }
            Kind::Select(size, one_a, one_b) => ([1, if one_a { 0 } else { size }, if one_b { 0 } else { size }], size),
            Kind::Cast(from, to) => ([from.size(), 0, 0], to.size()),
            Kind::Splat(size) => ([0; 3], size),
            Kind::Copy(size) => ([size, 0, 0], size),
        }
    }
}

per_isa! {
    /// Runs one instruction whose result is apart from its operands. Elementary functions choose their own copy by `for_isa`.
    ///
    /// # Safety
    /// As for [`exec`].
    unsafe fn one(for_isa: Isa, kind: Kind, n: usize, p: &Ptrs) => one_body
}

/// # Safety
/// `a` readable and `to` writable for `n` elements, apart.
#[inline(always)]
unsafe fn each<A: Copy, R: Copy>(n: usize, a: *const A, to: *mut R, f: impl Fn(A) -> R) {
    // SAFETY: guaranteed by the caller.
    let (a, to) = unsafe { (from_raw_parts(a, n), from_raw_parts_mut(to, n)) };
    for (to, &a) in to.iter_mut().zip(a) {
        *to = f(a);
    }
}

/// # Safety
/// `a`, `b` readable and `to` writable for `n` elements, `to` apart from both.
#[inline(always)]
unsafe fn each2<A: Copy, B: Copy, R: Copy>(n: usize, a: *const A, b: *const B, to: *mut R, f: impl Fn(A, B) -> R) {
    // SAFETY: guaranteed by the caller.
    let (a, b, to) = unsafe { (from_raw_parts(a, n), from_raw_parts(b, n), from_raw_parts_mut(to, n)) };
    for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
        *to = f(a, b);
    }
}

/// `to = f(a, b)` in one of the forms, with whole registers and one masked end: blocks are often short.
///
/// # Safety
/// As for [`formed`]; the CPU must have the instruction set of `L`.
#[inline(always)]
unsafe fn registers<L: Lanes>(n: usize, form: Form, p: &Ptrs, f: impl Fn(L, L) -> L) {
    let (a, b, to) = (p.args[0].cast::<f32>(), p.args[1].cast::<f32>(), p.to.cast::<f32>());
    let (whole, rest) = (n - n % L::LEN, n % L::LEN);
    // SAFETY: guaranteed by the caller; `whole` and `rest` are within `n`.
    unsafe {
        macro_rules! run {
            ($a:expr, $b:expr, $a_rest:expr, $b_rest:expr) => {
                for i in (0..whole).step_by(L::LEN) {
                    f($a(i), $b(i)).store(to.add(i));
                }
                if rest > 0 {
                    f($a_rest, $b_rest).store_first(to.add(whole), rest);
                }
            };
        }
        match form {
            Form::VV => {
                let (a_rest, b_rest) = (a.wrapping_add(whole), b.wrapping_add(whole));
                run!(
                    |i| L::load(a.add(i)),
                    |i| L::load(b.add(i)),
                    L::load_first(a_rest, rest),
                    L::load_first(b_rest, rest)
                );
            }
            Form::VS => {
                let b = L::splat(*b);
                run!(|i| L::load(a.add(i)), |_| b, L::load_first(a.add(whole), rest), b);
            }
            Form::SV => {
                let a = L::splat(*a);
                run!(|_| a, |i| L::load(b.add(i)), a, L::load_first(b.add(whole), rest));
            }
        }
    }
}

/// `to = f(a, b)` in one of the forms.
///
/// # Safety
/// Operands readable for `n` elements, or one where the form says so; `to` writable for `n`.
#[inline(always)]
unsafe fn formed<T: Copy, R: Copy>(n: usize, form: Form, p: &Ptrs, f: impl Fn(T, T) -> R) {
    let (a, b, to) = (p.args[0].cast::<T>(), p.args[1].cast::<T>(), p.to.cast::<R>());
    // SAFETY: guaranteed by the caller.
    unsafe {
        match form {
            Form::VV => each2(n, a, b, to, f),
            Form::VS => {
                let b = b.read_unaligned();
                each(n, a, to, |a| f(a, b));
            }
            Form::SV => {
                let a = a.read_unaligned();
                each(n, b, to, |b| f(a, b));
            }
        }
    }
}

/// `to = if c { a } else { b }`.
///
/// # Safety
/// As for [`formed`].
#[inline(always)]
unsafe fn select<T: Copy>(n: usize, p: &Ptrs, one_a: bool, one_b: bool) {
    let (c, a, b) = (p.args[0].cast_const(), p.args[1].cast::<T>(), p.args[2].cast::<T>());
    let to = p.to.cast::<T>();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (one_a, one_b) {
            (true, true) => {
                let (a, b) = (a.read_unaligned(), b.read_unaligned());
                each(n, c, to, |c| if c != 0 { a } else { b });
            }
            (true, false) => {
                let a = a.read_unaligned();
                each2(n, c, b, to, |c, b| if c != 0 { a } else { b });
            }
            (false, true) => {
                let b = b.read_unaligned();
                each2(n, c, a, to, |c, a| if c != 0 { a } else { b });
            }
            (false, false) => {
                let (c, a, b) = (from_raw_parts(c, n), from_raw_parts(a, n), from_raw_parts(b, n));
                for (((to, &c), &a), &b) in from_raw_parts_mut(to, n).iter_mut().zip(c).zip(a).zip(b) {
                    *to = if c != 0 { a } else { b };
                }
            }
        }
    }
}

/// An instruction's operands as addresses.
pub struct Ptrs {
    pub to: *mut u8,
    pub args: [*mut u8; 3],
}

/// # Safety
/// As for [`one`]; the CPU must have the instruction set of `L`.
#[inline(always)]
unsafe fn one_body<L: Lanes>(isa: Isa, kind: Kind, n: usize, p: &Ptrs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match kind {
            Kind::Unary(op, Repr::F32) => unary_f32(isa, op, n, p),
            Kind::Binary(op, Repr::F32, form) => binary_f32::<L>(isa, op, form, n, p),
            Kind::Binary(Binary::Add, Repr::I32, form) => formed(n, form, p, i32::wrapping_add),
            Kind::Binary(Binary::Sub, Repr::I32, form) => formed(n, form, p, i32::wrapping_sub),
            Kind::Binary(Binary::Mul, Repr::I32, form) => formed(n, form, p, i32::wrapping_mul),
            Kind::Binary(Binary::Or, Repr::I32, form) => formed(n, form, p, |a: i32, b| a | b),
            Kind::Binary(Binary::Xor, Repr::I32, form) => formed(n, form, p, |a: i32, b| a ^ b),
            Kind::Binary(op @ (Binary::Shl | Binary::Shr), Repr::I32, form) => {
                if op == Binary::Shl {
                    formed(n, form, p, |a, b| expr::shift(Binary::Shl, a, b));
                } else {
                    formed(n, form, p, |a, b| expr::shift(Binary::Shr, a, b));
                }
            }
            Kind::Select(4, a, b) => select::<u32>(n, p, a, b),
            Kind::Binary(op @ (Binary::And | Binary::Or | Binary::Xor), Repr::Bool, _) => {
                let (a, b, to) = (p.args[0].cast_const(), p.args[1].cast_const(), p.to);
                match op {
                    Binary::And => each2(n, a, b, to, |a, b| u8::from((a != 0) & (b != 0))),
                    Binary::Or => each2(n, a, b, to, |a, b| u8::from((a != 0) | (b != 0))),
                    _ => each2(n, a, b, to, |a, b| u8::from((a != 0) ^ (b != 0))),
                }
            }
            Kind::Cast(Repr::Bool, Repr::F32) => {
                each(n, p.args[0].cast_const(), p.to.cast::<f32>(), |a| if a != 0 { 1.0 } else { 0.0 });
            }
            Kind::Cast(Repr::F32, Repr::U8) => each(n, p.args[0].cast::<f32>(), p.to, |x| whole(x, 0.0, 255.0) as u8),
            Kind::Cast(Repr::F32, Repr::I8) => {
                each(n, p.args[0].cast::<f32>(), p.to.cast::<i8>(), |x| whole(x, -128.0, 127.0) as i8);
            }
            Kind::Cast(Repr::I32, Repr::U8) => each(n, p.args[0].cast::<i32>(), p.to, |x| x as u8),
            Kind::Cast(Repr::I32, Repr::I8) => each(n, p.args[0].cast::<i32>(), p.to.cast::<i8>(), |x| x as i8),
            Kind::Cast(Repr::U8, Repr::I32) => each(n, p.args[0].cast_const(), p.to.cast::<i32>(), i32::from),
            Kind::Cast(Repr::U8, Repr::F32) => each(n, p.args[0].cast_const(), p.to.cast::<f32>(), f32::from),
            Kind::Cast(Repr::I8, Repr::I32) => each(n, p.args[0].cast::<i8>(), p.to.cast::<i32>(), i32::from),
            Kind::Cast(Repr::I8, Repr::F32) => each(n, p.args[0].cast::<i8>(), p.to.cast::<f32>(), f32::from),
            Kind::Cast(Repr::I32, Repr::F32) => each(n, p.args[0].cast::<i32>(), p.to.cast::<f32>(), |x| x as f32),
            Kind::Cast(Repr::F16, Repr::F32) => each(n, p.args[0].cast::<u16>(), p.to.cast::<f32>(), from_f16),
            Kind::Cast(Repr::F32, Repr::F16) => each(n, p.args[0].cast::<f32>(), p.to.cast::<u16>(), to_f16),
            Kind::Cast(Repr::BF16, Repr::F32) => each(n, p.args[0].cast::<u16>(), p.to.cast::<f32>(), from_bf16),
            Kind::Cast(Repr::F32, Repr::BF16) => each(n, p.args[0].cast::<f32>(), p.to.cast::<u16>(), to_bf16),
            Kind::Splat(4) => fill(n, p.to.cast::<u32>(), *p.args[0].cast::<u32>()),
            kind => exec_plain(kind, n, p),
        }
    }
}

/// A float within bounds of a few bits, truncated; zero if it is no number. Unlike the conversion of Rust it is a few instructions of a vector.
#[inline(always)]
pub fn whole(x: f32, low: f32, high: f32) -> i32 {
    let x = if x.is_nan() { 0.0 } else { x };
    let x = if x < low { low } else { x };
    let x = if x > high { high } else { x };
    // SAFETY: the bounds are within `i32`, and `x` is between them.
    unsafe { x.to_int_unchecked() }
}

/// The bits of an `f16` as a float. A few instructions of a vector: its bits are those of a float that is 2^112 times smaller.
#[inline(always)]
pub fn from_f16(bits: u16) -> f32 {
    f16_of_word(bits.into())
}

/// The same of bits that are a word.
#[inline(always)]
pub fn f16_of_word(bits: u32) -> f32 {
    let magnitude = (bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let magnitude = if bits & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { finite };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// The bits of the nearest `f16`, of two the even one.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let (sign, magnitude) = ((x.to_bits() >> 16) as u16 & 0x8000, x.to_bits() & 0x7fff_ffff);
    let normal = (magnitude + 0xfff + (magnitude >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Added to one half, the last bit counts as that of the smallest numbers.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let rounded = if magnitude < 0x3880_0000 { small } else { normal };
    let rounded = if magnitude >= 0x477f_f000 { 0x7c00 } else { rounded };
    sign | if magnitude > 0x7f80_0000 { 0x7e00 } else { rounded as u16 }
}

/// The bits of a `bf16` as a float.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bits of the nearest `bf16`, of two the even one.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}

/// # Safety
/// `to` writable for `n` elements.
#[inline(always)]
unsafe fn fill<T: Copy>(n: usize, to: *mut T, x: T) {
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { *to.add(i) = x }
    }
}

/// # Safety
/// As for [`exec`].
#[inline(always)]
unsafe fn unary_f32(isa: Isa, op: Unary, n: usize, p: &Ptrs) {
    let (a, to) = (p.args[0].cast::<f32>().cast_const(), p.to.cast::<f32>());
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            Unary::Neg => each(n, a, to, |x| -x),
            Unary::Abs => each(n, a, to, f32::abs),
            Unary::Sign => each(n, a, to, |x| if x == 0.0 { 0.0 } else { x.signum() }),
            Unary::Sqrt => each(n, a, to, f32::sqrt),
            Unary::Recip => each(n, a, to, |x| 1.0 / x),
            Unary::Floor => each(n, a, to, f32::floor),
            Unary::Ceil => each(n, a, to, f32::ceil),
            Unary::Round => each(n, a, to, f32::round_ties_even),
            Unary::Exp => elementary(isa, Elementary::Exp, n, a, to),
            Unary::Log => elementary(isa, Elementary::Log, n, a, to),
            Unary::Tanh => elementary(isa, Elementary::Tanh, n, a, to),
            Unary::Erf => elementary(isa, Elementary::Erf, n, a, to),
            Unary::Sin => elementary(isa, Elementary::Sin, n, a, to),
            Unary::Cos => elementary(isa, Elementary::Cos, n, a, to),
            Unary::Not => each(n, a, to, |x| if x == 0.0 { 1.0 } else { 0.0 }),
        }
    }
}

/// # Safety
/// As for [`exec`].
unsafe fn elementary(isa: Isa, function: Elementary, n: usize, a: *const f32, to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    let (a, to) = unsafe { (from_raw_parts(a, n), from_raw_parts_mut(to, n)) };
    math::elementary(isa, function, a, to);
}

/// # Safety
/// As for [`formed`].
unsafe fn power(isa: Isa, form: Form, n: usize, p: &Ptrs) {
    let (a, b) = (p.args[0].cast::<f32>().cast_const(), p.args[1].cast::<f32>().cast_const());
    // SAFETY: guaranteed by the caller.
    unsafe {
        let to = from_raw_parts_mut(p.to.cast::<f32>(), n);
        match form {
            Form::VV => math::pow(isa, from_raw_parts(a, n), from_raw_parts(b, n), to),
            Form::VS => math::pow_scalar(isa, from_raw_parts(a, n), *b, to),
            Form::SV => {
                let base = [*a; 64];
                for (exponents, to) in from_raw_parts(b, n).chunks(64).zip(to.chunks_mut(64)) {
                    math::pow(isa, &base[..exponents.len()], exponents, to);
                }
            }
        }
    }
}

/// # Safety
/// As for [`exec`].
#[inline(always)]
unsafe fn binary_f32<L: Lanes>(isa: Isa, op: Binary, form: Form, n: usize, p: &Ptrs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            Binary::Add => registers::<L>(n, form, p, |a, b| a.add(b)),
            Binary::Sub => registers::<L>(n, form, p, |a, b| a.sub(b)),
            Binary::Mul => registers::<L>(n, form, p, |a, b| a.mul(b)),
            Binary::Div => registers::<L>(n, form, p, |a, b| a.div(b)),
            Binary::Max => registers::<L>(n, form, p, |a, b| a.maximum(b)),
            Binary::Min => registers::<L>(n, form, p, |a, b| a.minimum(b)),
            Binary::Lt => formed(n, form, p, |a: f32, b: f32| u8::from(a < b)),
            Binary::Le => formed(n, form, p, |a: f32, b: f32| u8::from(a <= b)),
            Binary::Eq => formed(n, form, p, |a: f32, b: f32| u8::from(a == b)),
            Binary::Rem => formed(n, form, p, |a: f32, b| a % b),
            Binary::Pow => power(isa, form, n, p),
            Binary::And => formed(n, form, p, |a: f32, b: f32| f32::from(u8::from(a != 0.0 && b != 0.0))),
            Binary::Or => formed(n, form, p, |a: f32, b: f32| f32::from(u8::from(a != 0.0 || b != 0.0))),
            Binary::Xor => formed(n, form, p, |a: f32, b: f32| f32::from(u8::from((a != 0.0) != (b != 0.0)))),
            Binary::Shl | Binary::Shr => unreachable!("{SHIFTS}"),
        }
    }
}

/// Instructions that are rare or gain nothing from wider vectors: built once, for the baseline.
///
/// # Safety
/// As for [`exec`].
#[inline(never)]
unsafe fn exec_plain(kind: Kind, n: usize, p: &Ptrs) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match kind {
            Kind::Unary(op, Repr::F64) => number(n, p, op, |x: f64| x, |x| x),
            Kind::Unary(op, Repr::I64) => integer::<i64>(n, p, op),
            Kind::Unary(op, Repr::I32) => integer::<i32>(n, p, op),
            Kind::Unary(op, Repr::U64) => integer::<u64>(n, p, op),
            Kind::Unary(_, _) => each(n, p.args[0].cast_const(), p.to, |x| u8::from(x == 0)),
            Kind::Binary(op, Repr::F64, _) => binary_f64(op, n, p),
            Kind::Binary(op, Repr::I64, _) => binary_int::<i64>(op, n, p),
            Kind::Binary(op, Repr::I32, _) => binary_int::<i32>(op, n, p),
            Kind::Binary(op, Repr::U64, _) => binary_int::<u64>(op, n, p),
            Kind::Binary(op, _, _) => {
                let (a, b, to) = (p.args[0].cast_const(), p.args[1].cast_const(), p.to);
                let truth = |f: fn(bool, bool) -> bool| each2(n, a, b, to, |a: u8, b: u8| u8::from(f(a != 0, b != 0)));
                match op {
                    Binary::Add | Binary::Max | Binary::Or => truth(|a, b| a | b),
                    Binary::Mul | Binary::Min | Binary::And => truth(|a, b| a & b),
                    Binary::Sub | Binary::Xor => truth(|a, b| a ^ b),
                    Binary::Eq => truth(|a, b| a == b),
                    Binary::Lt => truth(|a, b| !a & b),
                    Binary::Le => truth(|a, b| !a | b),
                    Binary::Div => truth(|a, b| a & b),
                    Binary::Rem => truth(|_, _| false),
                    Binary::Pow => truth(|a, b| a | !b),
                    Binary::Shl | Binary::Shr => unreachable!("{SHIFTS}"),
                }
            }
            Kind::Select(1, a, b) => select::<u8>(n, p, a, b),
            Kind::Select(8, a, b) => select::<u64>(n, p, a, b),
            Kind::Select(_, a, b) => select::<u32>(n, p, a, b),
            Kind::Cast(from, to) => cast(from, to, n, p),
            Kind::Splat(1) => p.to.write_bytes(*p.args[0], n),
            Kind::Splat(2) => fill(n, p.to.cast::<u16>(), p.args[0].cast::<u16>().read_unaligned()),
            Kind::Splat(8) => fill(n, p.to.cast::<u64>(), p.args[0].cast::<u64>().read_unaligned()),
            Kind::Splat(_) => fill(n, p.to.cast::<u32>(), p.args[0].cast::<u32>().read_unaligned()),
            Kind::Copy(size) => {
                if p.to != p.args[0] {
                    p.to.copy_from_nonoverlapping(p.args[0], n * size);
                }
            }
        }
    }
}

/// A unary operation by way of `f64`.
///
/// # Safety
/// As for [`exec`].
unsafe fn number<T: Copy>(n: usize, p: &Ptrs, op: Unary, to64: fn(T) -> f64, from64: fn(f64) -> T) {
    // SAFETY: guaranteed by the caller.
    unsafe { each(n, p.args[0].cast::<T>(), p.to.cast::<T>(), |x| from64(expr::unary(op, to64(x)))) }
}

/// Integers of a register.
pub trait Int: Copy + Default + Ord + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self> {
    const ZERO: Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn rem(self, other: Self) -> Self;
    fn pow(self, other: Self) -> Self;
    fn to64(self) -> f64;
    fn from64(value: f64) -> Self;
}

macro_rules! int {
    ($($ty:ident $power:path, $count:ident;)*) => {$(
        impl Int for $ty {
            const ZERO: Self = 0;
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn sub(self, other: Self) -> Self { self.wrapping_sub(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn div(self, other: Self) -> Self { if other == 0 { 0 } else { self.wrapping_div(other) } }
            fn rem(self, other: Self) -> Self { if other == 0 { 0 } else { self.wrapping_rem(other) } }
            fn pow(self, other: Self) -> Self { $power(self as i64, other as $count) as $ty }
            fn to64(self) -> f64 { self as f64 }
            fn from64(value: f64) -> Self { value as $ty }
        }
    )*};
}
int! { i64 expr::power, i64; i32 expr::power, i64; u64 expr::wrapping_power, u64; }

/// # Safety
/// As for [`exec`].
unsafe fn integer<T: Int>(n: usize, p: &Ptrs, op: Unary) {
    let (a, to) = (p.args[0].cast::<T>().cast_const(), p.to.cast::<T>());
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            Unary::Neg => each(n, a, to, |x| T::ZERO.sub(x)),
            Unary::Abs => each(n, a, to, |x| if x < T::ZERO { T::ZERO.sub(x) } else { x }),
            Unary::Floor | Unary::Ceil | Unary::Round => each(n, a, to, |x| x),
            _ => number(n, p, op, T::to64, T::from64),
        }
    }
}

/// # Safety
/// As for [`exec`].
unsafe fn binary_int<T: Int>(op: Binary, n: usize, p: &Ptrs) {
    let (a, b, to) = (p.args[0].cast::<T>().cast_const(), p.args[1].cast::<T>().cast_const(), p.to.cast::<T>());
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            Binary::Add => each2(n, a, b, to, T::add),
            Binary::Sub => each2(n, a, b, to, T::sub),
            Binary::Mul => each2(n, a, b, to, T::mul),
            Binary::Div => each2(n, a, b, to, T::div),
            Binary::Rem => each2(n, a, b, to, T::rem),
            Binary::Pow => each2(n, a, b, to, T::pow),
            Binary::Max => each2(n, a, b, to, T::max),
            Binary::Min => each2(n, a, b, to, T::min),
            Binary::Lt => each2(n, a, b, p.to, |a, b| u8::from(a < b)),
            Binary::Le => each2(n, a, b, p.to, |a, b| u8::from(a <= b)),
            Binary::Eq => each2(n, a, b, p.to, |a, b| u8::from(a == b)),
            Binary::And => each2(n, a, b, to, T::bitand),
            Binary::Or => each2(n, a, b, to, T::bitor),
            Binary::Xor => each2(n, a, b, to, T::bitxor),
            Binary::Shl | Binary::Shr => unreachable!("{SHIFTS}"),
        }
    }
}

/// # Safety
/// As for [`exec`].
unsafe fn binary_f64(op: Binary, n: usize, p: &Ptrs) {
    let (a, b, to) = (p.args[0].cast::<f64>().cast_const(), p.args[1].cast::<f64>().cast_const(), p.to.cast::<f64>());
    let truth = |x: bool| f64::from(u8::from(x));
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            Binary::Add => each2(n, a, b, to, |a, b| a + b),
            Binary::Sub => each2(n, a, b, to, |a, b| a - b),
            Binary::Mul => each2(n, a, b, to, |a, b| a * b),
            Binary::Div => each2(n, a, b, to, |a, b| a / b),
            Binary::Rem => each2(n, a, b, to, |a, b| a % b),
            Binary::Pow => each2(n, a, b, to, f64::powf),
            Binary::Max => each2(n, a, b, to, expr::maximum),
            Binary::Min => each2(n, a, b, to, expr::minimum),
            Binary::Lt => each2(n, a, b, p.to, |a, b| u8::from(a < b)),
            Binary::Le => each2(n, a, b, p.to, |a, b| u8::from(a <= b)),
            Binary::Eq => each2(n, a, b, p.to, |a, b| u8::from(a == b)),
            Binary::And => each2(n, a, b, to, |a, b| truth(a != 0.0 && b != 0.0)),
            Binary::Or => each2(n, a, b, to, |a, b| truth(a != 0.0 || b != 0.0)),
            Binary::Xor => each2(n, a, b, to, |a, b| truth((a != 0.0) != (b != 0.0))),
            Binary::Shl | Binary::Shr => unreachable!("{SHIFTS}"),
        }
    }
}

/// Between any two representations: floats to integers by truncation (saturating), integers by wrapping, anything to `bool` by
/// comparing with zero.
///
/// # Safety
/// As for [`exec`].
unsafe fn cast(from: Repr, to: Repr, n: usize, p: &Ptrs) {
    macro_rules! from {
        ($a:ty) => {
            from!($a, |x| x)
        };
        ($a:ty, $number:expr) => {{
            let a = p.args[0].cast::<$a>().cast_const();
            let number = $number;
            // SAFETY: guaranteed by the caller.
            unsafe {
                match to {
                    Repr::F32 => each(n, a, p.to.cast::<f32>(), |x| number(x) as f32),
                    Repr::F64 => each(n, a, p.to.cast::<f64>(), |x| number(x) as f64),
                    Repr::F16 => each(n, a, p.to.cast::<u16>(), |x| f16::from_f64(number(x) as f64).to_bits()),
                    Repr::BF16 => each(n, a, p.to.cast::<u16>(), |x| bf16::from_f64(number(x) as f64).to_bits()),
                    Repr::I64 => each(n, a, p.to.cast::<i64>(), |x| number(x) as i64),
                    Repr::I32 => each(n, a, p.to.cast::<i32>(), |x| number(x) as i32),
                    Repr::I16 => each(n, a, p.to.cast::<i16>(), |x| number(x) as i16),
                    Repr::I8 => each(n, a, p.to.cast::<i8>(), |x| number(x) as i8),
                    Repr::U64 => each(n, a, p.to.cast::<u64>(), |x| number(x) as u64),
                    Repr::U32 => each(n, a, p.to.cast::<u32>(), |x| number(x) as u32),
                    Repr::U16 => each(n, a, p.to.cast::<u16>(), |x| number(x) as u16),
                    Repr::U8 => each(n, a, p.to.cast::<u8>(), |x| number(x) as u8),
                    Repr::Bool => each(n, a, p.to.cast::<u8>(), |x| u8::from(number(x) as f64 != 0.0)),
                }
            }
        }};
    }
    match from {
        Repr::F32 => from!(f32),
        Repr::F64 => from!(f64),
        Repr::F16 => from!(u16, from_f16),
        Repr::BF16 => from!(u16, from_bf16),
        Repr::I64 => from!(i64),
        Repr::I32 => from!(i32),
        Repr::I16 => from!(i16),
        Repr::I8 => from!(i8),
        Repr::U64 => from!(u64),
        Repr::U32 => from!(u32),
        Repr::U16 => from!(u16),
        Repr::U8 => from!(u8),
        Repr::Bool => {
            let a = p.args[0].cast_const();
            let bit = |x: u8| u8::from(x != 0);
            // SAFETY: guaranteed by the caller.
            unsafe {
                match to {
                    Repr::F32 => each(n, a, p.to.cast::<f32>(), |x| f32::from(bit(x))),
                    Repr::F64 => each(n, a, p.to.cast::<f64>(), |x| f64::from(bit(x))),
                    Repr::F16 => each(n, a, p.to.cast::<u16>(), |x| to_f16(f32::from(bit(x)))),
                    Repr::BF16 => each(n, a, p.to.cast::<u16>(), |x| to_bf16(f32::from(bit(x)))),
                    Repr::I64 | Repr::U64 => each(n, a, p.to.cast::<i64>(), |x| i64::from(bit(x))),
                    Repr::I32 | Repr::U32 => each(n, a, p.to.cast::<i32>(), |x| i32::from(bit(x))),
                    Repr::I16 | Repr::U16 => each(n, a, p.to.cast::<i16>(), |x| i16::from(bit(x))),
                    Repr::U8 | Repr::I8 | Repr::Bool => each(n, a, p.to, bit),
                }
            }
        }
    }
}
