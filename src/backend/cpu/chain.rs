//! Chains of instructions: each takes what the one before it computes, which nothing else reads. Their values stay in registers, a few vectors
//! at a time. Quantizing the sums of a product, say, is one walk from sums to bytes.
//!
//! ```text
//! sums i32 --less points--> i32 --to floats, scaled, plus bias, / scale, rounded, plus point, clipped--> u8
//! ```
//!
//! A value is what its instruction alone computes, bit for bit.

use super::block::{self, Form, Kind, Loc, Op, Repr};
use super::simd::{Isa, Lanes, Plain, per_isa};
#[cfg(target_arch = "x86_64")]
use super::simd::{Ymm, Zmm};
use crate::expr::{Binary, Unary};

/// Vectors that are computed together, where there are 32 registers: one instruction's dispatch is for all of them. Elsewhere it is half.
const WIDE: usize = 8;

/// Instructions of a program, in their order.
#[derive(Debug)]
pub enum Piece {
    /// Those that run block by block.
    Ops(Vec<Op>),
    /// Those that are one chain.
    Chain(Chain),
}

/// Instructions whose values stay in registers.
#[derive(Debug)]
pub struct Chain {
    from: (Loc, Repr),
    links: Vec<Link>,
    to: (Loc, Repr),
    /// The values are stored as bytes, rounded, plus this whole number.
    zero: Option<f32>,
}

/// The largest zero point, in either direction, that a byte may have.
const FARTHEST: f32 = 255.0;

/// An instruction of a chain.
#[derive(Clone, Copy, Debug)]
struct Link {
    step: Step,
    /// The chain's value is the second operand.
    swapped: bool,
    /// The other operand, if there is one.
    operand: Loc,
    /// It is one value for the whole block.
    still: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Float(Binary),
    Integer(Binary),
    Round,
    /// From `i32` to `f32`.
    ToFloat,
    /// From a float that is a byte's number to `i32`.
    ToInteger,
    /// Within bounds, and truncated; zero if it is no number.
    Whole(f32, f32),
    /// Rounded, plus a whole number, then as [`Step::Whole`].
    Quantize(f32, f32, f32),
    /// A byte is the same number as a float.
    Nothing,
    /// The steps from sums to what is quantized, one behind the other.
    Scale(Scaling),
}

/// `(sum - less) scale + plus) / by` of a sum in `i32`, each of one value for the whole block.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scaling {
    less: Option<Loc>,
    scale: Loc,
    plus: Option<Loc>,
    by: Option<Loc>,
}

impl Link {
    /// An instruction as a part of a chain, if it can be one. Its value comes from the operand at `from`, or from either operand.
    fn new(op: &Op, from: Option<Loc>) -> Option<Link> {
        let alone = |step| Some(Link { step, swapped: false, operand: Loc::default(), still: true });
        let first = from.is_none_or(|from| op.args[0] == from);
        match op.kind {
            Kind::Unary(Unary::Round, Repr::F32) => alone(Step::Round).filter(|_| first),
            Kind::Cast(Repr::I32, Repr::F32) => alone(Step::ToFloat).filter(|_| first),
            Kind::Cast(Repr::F32, Repr::U8) => alone(Step::Whole(0.0, 255.0)).filter(|_| first),
            Kind::Cast(Repr::F32, Repr::I8) => alone(Step::Whole(-128.0, 127.0)).filter(|_| first),
            Kind::Cast(Repr::U8 | Repr::I8, Repr::F32) => alone(Step::Nothing).filter(|_| first),
            Kind::Cast(Repr::U8 | Repr::I8, Repr::I32) => alone(Step::ToInteger).filter(|_| first),
            Kind::Binary(binary, repr, form) => {
                use Binary::{Add, Div, Max, Min, Mul, Sub};
                let step = match (repr, binary) {
                    (Repr::F32, Add | Sub | Mul | Div | Max | Min) => Step::Float(binary),
                    (Repr::I32, Add | Sub) => Step::Integer(binary),
                    _ => return None,
                };
                let [a, b, _] = op.args;
                let swapped = match (form, from) {
                    (_, Some(_)) if a == b => return None,
                    (Form::VV | Form::VS, Some(from)) if a == from => false,
                    (Form::VV | Form::SV, Some(from)) if b == from => true,
                    (_, Some(_)) => return None,
                    (form, None) => form == Form::SV,
                };
                let operand = if swapped { a } else { b };
                Some(Link { step, swapped, operand, still: form != Form::VV })
            }
            _ => None,
        }
    }
}

/// The representations of an instruction's chained operand and of its result.
fn reprs(kind: Kind) -> Option<(Repr, Repr)> {
    match kind {
        Kind::Unary(_, repr) | Kind::Binary(_, repr, _) => Some((repr, repr)),
        Kind::Cast(from, to) => Some((from, to)),
        _ => None,
    }
}

/// True if nothing reads a register that an instruction has written, but the next one.
fn dies(op: &Op, after: &[Op], kept: &[Loc]) -> bool {
    if op.to.base != 0 || kept.contains(&op.to) {
        return false;
    }
    let reads = |op: &Op, loc: Loc| op.args.contains(&loc);
    let later = after.iter().skip(1);
    let overwritten = after.iter().position(|next| next.to == op.to).unwrap_or(after.len());
    !later.enumerate().take_while(|(i, _)| *i < overwritten).any(|(_, next)| reads(next, op.to))
}

/// Drops links that change nothing: bounds and a point of zero of a value that goes to a byte, which has the bounds itself, and a byte's way
/// to a float by an integer. Joins those that quantize.
fn shorten(links: &mut Vec<Link>, consts: &[u64]) {
    let mut at = 0;
    while at < links.len() {
        if let Step::Whole(low, high) = links[at].step {
            while at > 0 && is_idle(&links[at - 1], low, high, consts) {
                links.remove(at - 1);
                at -= 1;
            }
            let added = at.checked_sub(1).and_then(|before| whole_number(&links[before], consts));
            let (begin, zero) = added.map_or((at, 0.0), |zero| (at - 1, zero));
            if begin > 0 && links[begin - 1].step == Step::Round {
                links[at].step = Step::Quantize(zero, low, high);
                links.drain(begin - 1..at);
                at = begin - 1;
            }
        }
        if at > 0 && [links[at - 1].step, links[at].step] == [Step::ToInteger, Step::ToFloat] {
            links.drain(at - 1..=at);
            at -= 1;
            continue;
        }
        at += 1;
    }
}

/// True if a link changes no number that is then brought within bounds and truncated.
fn is_idle(link: &Link, low: f32, high: f32, consts: &[u64]) -> bool {
    let Some(number) = constant(link, consts) else { return false };
    match link.step {
        Step::Float(Binary::Max) => number <= low,
        Step::Float(Binary::Min) => number >= high,
        Step::Float(Binary::Add) => number == 0.0,
        _ => false,
    }
}

/// Joins the links that scale sums, where they are all there.
fn join(links: &mut Vec<Link>) {
    let Some(first) = links.iter().position(|link| link.step == Step::ToFloat) else { return };
    let operand = |at: usize, step: Step| {
        let link = links.get(at)?;
        let commutes = matches!(step, Step::Float(Binary::Mul | Binary::Add));
        (link.step == step && link.still && (commutes || !link.swapped)).then_some(link.operand)
    };
    let Some(scale) = operand(first + 1, Step::Float(Binary::Mul)) else { return };
    let less = first.checked_sub(1).and_then(|before| operand(before, Step::Integer(Binary::Sub)));
    let plus = operand(first + 2, Step::Float(Binary::Add));
    let behind = first + 2 + usize::from(plus.is_some());
    let by = operand(behind, Step::Float(Binary::Div));
    let end = behind + usize::from(by.is_some());
    let step = Step::Scale(Scaling { less, scale, plus, by });
    let start = first - usize::from(less.is_some());
    links.splice(start..end, [Link { step, swapped: false, operand: scale, still: true }]);
}

/// The operand of a link, if it is a constant.
fn constant(link: &Link, consts: &[u64]) -> Option<f32> {
    let Loc { base: 1, offset } = link.operand else { return None };
    let bits = consts.get(offset as usize / size_of::<u64>()).filter(|_| link.still)?;
    Some(f32::from_bits(*bits as u32))
}

/// The number that a link adds, if it is a whole one.
fn whole_number(link: &Link, consts: &[u64]) -> Option<f32> {
    let adds = link.step == Step::Float(Binary::Add);
    constant(link, consts).filter(|number| adds && number.fract() == 0.0 && number.abs() <= FARTHEST)
}

/// Takes a program's instructions apart into chains and others. Constants are read from the base pointer 1.
pub fn pieces(ops: &[Op], kept: &[Loc], consts: &[u64]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < ops.len() {
        let mut links: Vec<Link> = Link::new(&ops[at], None).into_iter().collect();
        let mut end = at + links.len();
        while !links.is_empty() && end < ops.len() && dies(&ops[end - 1], &ops[end..], kept) {
            let Some(link) = Link::new(&ops[end], Some(ops[end - 1].to)) else { break };
            links.push(link);
            end += 1;
        }
        let ends = reprs(ops[at].kind).zip(ops[end.max(at + 1) - 1..].first().and_then(|op| reprs(op.kind)));
        match (ends, &links[..]) {
            (Some(((from, _), (_, to))), [first, _, ..]) => {
                let source = ops[at].args[usize::from(first.swapped)];
                shorten(&mut links, consts);
                join(&mut links);
                let zero = match links.last().map(|last| last.step) {
                    Some(Step::Quantize(zero, ..)) if matches!(to, Repr::U8 | Repr::I8) => Some(zero),
                    _ => None,
                };
                links.truncate(links.len() - usize::from(zero.is_some()));
                pieces.push(Piece::Chain(Chain { from: (source, from), to: (ops[end - 1].to, to), links, zero }));
                at = end;
            }
            _ => {
                match pieces.last_mut() {
                    Some(Piece::Ops(list)) => list.push(ops[at]),
                    _ => pieces.push(Piece::Ops(vec![ops[at]])),
                }
                at += 1;
            }
        }
    }
    pieces
}

impl Chain {
    /// Runs the chain over `n` elements, of which there may be more than a block has, if all operands are memory.
    ///
    /// # Safety
    /// As for [`block::exec`].
    pub unsafe fn run(&self, isa: Isa, n: usize, bases: &[*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { walk(isa, self, n, bases) }
    }
}

impl Piece {
    /// Runs the instructions over the first `n` elements of each block.
    ///
    /// # Safety
    /// As for [`block::exec`].
    pub unsafe fn run(&self, isa: Isa, n: usize, bases: &[*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Piece::Ops(ops) => block::exec(isa, ops, n, bases),
                Piece::Chain(chain) => chain.run(isa, n, bases),
            }
        }
    }
}

per_isa! {
    /// # Safety
    /// As for [`block::exec`].
    unsafe fn walk(chain: &Chain, n: usize, bases: &[*mut u8]) => walk_by
}

/// # Safety
/// As for [`walk`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn walk_by<V: Numbers>(chain: &Chain, n: usize, bases: &[*mut u8]) {
    let wide = if V::LEN == MOST { WIDE } else { WIDE / 2 };
    let mut first = 0;
    // SAFETY: the vectors begin within the block. The caller guarantees the rest.
    unsafe {
        while n - first >= wide * V::LEN {
            if V::LEN == MOST {
                group::<V, WIDE, true>(chain, first, n, bases);
            } else {
                group::<V, { WIDE / 2 }, true>(chain, first, n, bases);
            }
            first += wide * V::LEN;
        }
        while first < n {
            first += V::LEN
                * match (n - first).div_ceil(V::LEN) {
                    1 => group::<V, 1, false>(chain, first, n, bases),
                    2 => group::<V, 2, false>(chain, first, n, bases),
                    _ => group::<V, { WIDE / 2 }, false>(chain, first, n, bases),
                };
        }
    }
}

/// Computes `W` vectors from element `first` on, and returns `W`. `FULL`: all of their elements are among the first `n`.
///
/// # Safety
/// As for [`walk_by`].
#[inline(always)]
unsafe fn group<V: Numbers, const W: usize, const FULL: bool>(
    chain: &Chain,
    first: usize,
    n: usize,
    bases: &[*mut u8],
) -> usize {
    let at = |loc: Loc| bases[loc.base as usize].wrapping_add(loc.offset as usize);
    let count = |v: usize| if FULL { V::LEN } else { n.saturating_sub(first + v * V::LEN).min(V::LEN) };
    let ((from, from_repr), (to, to_repr)) = (chain.from, chain.to);
    let (from, to) = (at(from).cast_const(), at(to));
    // SAFETY: vectors that reach beyond the block are read and written in part. The caller guarantees the rest.
    unsafe {
        let mut values = [V::splat(0.0); W];
        for (v, value) in values.iter_mut().enumerate() {
            *value = V::read(from, from_repr, first + v * V::LEN, count(v));
        }
        for link in &chain.links {
            let operand = at(link.operand).cast::<f32>().cast_const();
            let among = (first, n);
            match link.step {
                Step::Float(Binary::Add) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.add(b)),
                Step::Float(Binary::Sub) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.sub(b)),
                Step::Float(Binary::Mul) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.mul(b)),
                Step::Float(Binary::Div) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.div(b)),
                Step::Float(Binary::Max) => {
                    binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.maximum(b))
                }
                Step::Float(_) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.minimum(b)),
                Step::Integer(Binary::Add) => {
                    binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.add_integers(b))
                }
                Step::Integer(_) => binary::<V, W, FULL>(link, operand, among, &mut values, |a, b| a.sub_integers(b)),
                Step::Round => values.iter_mut().for_each(|x| *x = x.round()),
                Step::ToFloat => values.iter_mut().for_each(|x| *x = x.to_floats()),
                Step::ToInteger => values.iter_mut().for_each(|x| *x = x.to_integers()),
                Step::Whole(low, high) => values.iter_mut().for_each(|x| *x = x.whole(low, high)),
                Step::Quantize(zero, low, high) => {
                    let zero = V::splat(zero);
                    values.iter_mut().for_each(|x| *x = x.round().add(zero).within(low, high));
                }
                Step::Nothing => {}
                Step::Scale(Scaling { less, scale, plus, by }) => {
                    let number = |loc: Loc| V::splat(*at(loc).cast::<f32>());
                    // Less zero, and plus what is less than zero by nothing, is the same number.
                    let (less, scale) = (less.map_or(V::splat(0.0), number), number(scale));
                    let plus = plus.map_or(V::splat(-0.0), number);
                    values.iter_mut().for_each(|x| *x = x.sub_integers(less).to_floats().mul(scale).add(plus));
                    if let Some(by) = by {
                        let by = number(by);
                        values.iter_mut().for_each(|x| *x = x.div(by));
                    }
                }
            }
        }
        if let Some(zero) = chain.zero {
            V::quantize(values, zero, to_repr, to.wrapping_add(first), (n - first).min(W * V::LEN));
            return W;
        }
        for (v, value) in values.into_iter().enumerate() {
            value.write(to, to_repr, first + v * V::LEN, count(v));
        }
    }
    W
}

/// # Safety
/// As for [`group`].
#[inline(always)]
unsafe fn binary<V: Lanes, const W: usize, const FULL: bool>(
    link: &Link,
    operand: *const f32,
    (first, n): (usize, usize),
    values: &mut [V; W],
    f: impl Fn(V, V) -> V,
) {
    let ordered = |x: V, y: V| if link.swapped { f(y, x) } else { f(x, y) };
    // SAFETY: guaranteed by the caller.
    unsafe {
        if link.still {
            let y = V::splat(*operand);
            values.iter_mut().for_each(|x| *x = ordered(*x, y));
            return;
        }
        for (v, x) in values.iter_mut().enumerate() {
            let start = first + v * V::LEN;
            let y = match n.saturating_sub(start) {
                whole if FULL || whole >= V::LEN => V::load(operand.add(start)),
                rest => V::load_first(operand.wrapping_add(start), rest),
            };
            *x = ordered(*x, y);
        }
    }
}

/// The largest number of lanes.
const MOST: usize = 16;

/// Vectors of numbers that are `f32`, or `i32` in their bits.
///
/// # Safety
/// As of [`Lanes`].
trait Numbers: Lanes {
    /// Elements `start..start + n` of a block of `f32`, of `i32`, or of bytes as floats.
    #[inline(always)]
    unsafe fn read(from: *const u8, repr: Repr, start: usize, n: usize) -> Self {
        // SAFETY: the elements are the block's.
        unsafe {
            match repr {
                Repr::U8 | Repr::I8 => {
                    let mut bytes = [0u8; MOST];
                    bytes.as_mut_ptr().copy_from_nonoverlapping(from.wrapping_add(start), n);
                    let number = |x: u8| if repr == Repr::U8 { f32::from(x) } else { f32::from(x.cast_signed()) };
                    Self::load(bytes.map(number).as_ptr())
                }
                _ if n == Self::LEN => Self::load(from.cast::<f32>().add(start)),
                _ => Self::load_first(from.cast::<f32>().wrapping_add(start), n),
            }
        }
    }

    /// Writes elements `start..start + n` of a block of `f32`, of `i32`, or of bytes, which are whole numbers of their range.
    #[inline(always)]
    unsafe fn write(self, to: *mut u8, repr: Repr, start: usize, n: usize) {
        // SAFETY: the elements are the block's.
        unsafe {
            match repr {
                Repr::U8 | Repr::I8 => {
                    let bytes = self.each(|x| x.to_int_unchecked::<i32>() as u8);
                    to.wrapping_add(start).copy_from_nonoverlapping(bytes.as_ptr(), n);
                }
                _ if n == Self::LEN => self.store(to.cast::<f32>().add(start)),
                _ => self.store_first(to.cast::<f32>().wrapping_add(start), n),
            }
        }
    }

    /// Rounds vectors, adds a whole number, and writes the first `n` elements as bytes.
    #[inline(always)]
    unsafe fn quantize<const W: usize>(values: [Self; W], zero: f32, repr: Repr, to: *mut u8, n: usize) {
        let (low, high) = if repr == Repr::U8 { (0.0, 255.0) } else { (-128.0, 127.0) };
        for (v, value) in values.into_iter().enumerate() {
            let start = v * Self::LEN;
            // SAFETY: guaranteed by the caller.
            unsafe {
                let whole = value.round().add(Self::splat(zero)).within(low, high);
                whole.write(to, repr, start, n.saturating_sub(start).min(Self::LEN));
            }
        }
    }

    /// A function of each lane.
    #[inline(always)]
    unsafe fn each<T>(self, f: impl Fn(f32) -> T) -> [T; MOST] {
        let mut lanes = [0f32; MOST];
        // SAFETY: no register has more lanes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes.map(f)
    }

    /// A function of each lane of two vectors, as bits.
    #[inline(always)]
    unsafe fn both(self, other: Self, f: impl Fn(i32, i32) -> i32) -> Self {
        // SAFETY: as above.
        unsafe {
            let (a, b) = (self.each(f32::to_bits), other.each(f32::to_bits));
            let bits = |i: usize| f(a[i].cast_signed(), b[i].cast_signed()).cast_unsigned();
            Self::load(std::array::from_fn::<f32, MOST, _>(|i| f32::from_bits(bits(i))).as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn add_integers(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.both(other, i32::wrapping_add) }
    }

    #[inline(always)]
    unsafe fn sub_integers(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.both(other, i32::wrapping_sub) }
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::load(self.each(|x| x.to_bits().cast_signed() as f32).as_ptr()) }
    }

    /// Of whole numbers that `i32` has.
    #[inline(always)]
    unsafe fn to_integers(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::load(self.each(|x| f32::from_bits(x.to_int_unchecked::<i32>().cast_unsigned())).as_ptr()) }
    }

    /// To the nearest whole number, to the even one of two.
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::load(self.each(f32::round_ties_even).as_ptr()) }
    }

    /// Within bounds, and truncated; zero where it is no number.
    #[inline(always)]
    unsafe fn whole(self, low: f32, high: f32) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::load(self.each(|x| block::whole(x, low, high) as f32).as_ptr()) }
    }

    /// As [`Numbers::whole`], of whole numbers.
    #[inline(always)]
    unsafe fn within(self, low: f32, high: f32) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.whole(low, high) }
    }
}

impl Numbers for Plain {}

#[cfg(target_arch = "x86_64")]
impl Numbers for Ymm {}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, Numbers, Repr, Zmm};
    use std::arch::x86_64::*;

    /// Ones for the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as u16
    }

    // SAFETY of every block: AVX-512, by the contract of `Numbers`. Lanes that are masked out are neither read nor written.
    impl Numbers for Zmm {
        #[inline(always)]
        unsafe fn quantize<const W: usize>(values: [Self; W], zero: f32, repr: Repr, to: *mut u8, n: usize) {
            for (first, four) in values.chunks(4).enumerate() {
                // SAFETY: as above.
                unsafe {
                    let mut whole = [_mm512_setzero_si512(); 4];
                    for (whole, &x) in whole.iter_mut().zip(four) {
                        // What is too low, or no number, becomes the lowest `i32`, and what is too high stays a number that is too high.
                        let x = _mm512_min_ps(_mm512_set1_ps(65536.0), x.into());
                        let x = match repr {
                            Repr::U8 => x,
                            _ => _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), _mm512_set1_ps(-zero)),
                        };
                        *whole = _mm512_cvtps_epi32(x);
                    }
                    let [a, b, c, d] = whole;
                    let zero = _mm512_set1_epi16(zero as i16);
                    let low = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zero);
                    let high = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zero);
                    let bytes =
                        if repr == Repr::U8 { _mm512_packus_epi16(low, high) } else { _mm512_packs_epi16(low, high) };
                    // The packing has left each quarter of a vector in a quarter.
                    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                    let bytes = _mm512_permutexvar_epi32(order, bytes);
                    let (to, n) = (to.wrapping_add(64 * first), n.saturating_sub(64 * first).min(64));
                    if n == 64 {
                        _mm512_storeu_si512(to.cast(), bytes);
                    } else {
                        _mm512_mask_storeu_epi8(to.cast(), (1u64 << n) - 1, bytes);
                    }
                }
            }
        }
        #[inline(always)]
        unsafe fn read(from: *const u8, repr: Repr, start: usize, n: usize) -> Self {
            // SAFETY: as above.
            unsafe {
                Zmm::from(match repr {
                    Repr::U8 => {
                        let bytes = _mm_maskz_loadu_epi8(mask(n), from.wrapping_add(start).cast());
                        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
                    }
                    Repr::I8 => {
                        let bytes = _mm_maskz_loadu_epi8(mask(n), from.wrapping_add(start).cast());
                        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
                    }
                    _ => _mm512_maskz_loadu_ps(mask(n), from.cast::<f32>().wrapping_add(start)),
                })
            }
        }
        #[inline(always)]
        unsafe fn write(self, to: *mut u8, repr: Repr, start: usize, n: usize) {
            // SAFETY: as above.
            unsafe {
                let is_byte = matches!(repr, Repr::U8 | Repr::I8);
                let bytes = || _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(self.into()));
                match (is_byte, n == Self::LEN) {
                    (true, true) => _mm_storeu_si128(to.wrapping_add(start).cast(), bytes()),
                    (true, false) => _mm_mask_storeu_epi8(to.wrapping_add(start).cast(), mask(n), bytes()),
                    (false, true) => self.store(to.cast::<f32>().add(start)),
                    (false, false) => self.store_first(to.cast::<f32>().wrapping_add(start), n),
                }
            }
        }
        #[inline(always)]
        unsafe fn add_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { integers(_mm512_add_epi32(bits(self), bits(other))) }
        }
        #[inline(always)]
        unsafe fn sub_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { integers(_mm512_sub_epi32(bits(self), bits(other))) }
        }
        #[inline(always)]
        unsafe fn to_floats(self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm::from(_mm512_cvtepi32_ps(bits(self))) }
        }
        #[inline(always)]
        unsafe fn to_integers(self) -> Self {
            // SAFETY: as above.
            unsafe { integers(_mm512_cvttps_epi32(self.into())) }
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm::from(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.into())) }
        }
        #[inline(always)]
        unsafe fn whole(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            unsafe {
                let within = self.within(low, high).into();
                Zmm::from(_mm512_cvtepi32_ps(_mm512_cvttps_epi32(within)))
            }
        }
        #[inline(always)]
        unsafe fn within(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            unsafe {
                let x: __m512 = self.into();
                let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x);
                let raised = _mm512_maskz_max_ps(number, x, _mm512_set1_ps(low));
                Zmm::from(_mm512_min_ps(raised, _mm512_set1_ps(high)))
            }
        }
    }

    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn bits(x: Zmm) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_castps_si512(x.into()) }
    }

    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn integers(x: __m512i) -> Zmm {
        // SAFETY: guaranteed by the caller.
        unsafe { Zmm::from(_mm512_castsi512_ps(x)) }
    }
}
