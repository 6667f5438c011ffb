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
use plimsoll_core::expr::{Binary, Unary};
use std::ops::RangeInclusive;

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
    /// The values are stored as bytes, quantized.
    end: Option<Quantizing>,
}

/// The way from numbers to whole ones: they are divided, rounded, and moved.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Quantizing {
    by: Option<Loc>,
    zero: f32,
}

/// Bytes of an operand that become floats on their way: `(byte - less) scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Widened {
    repr: Repr,
    less: Option<Loc>,
    scale: Option<Loc>,
}

/// Rows that a chain runs over. Those of a tile lie in different ways for each operand.
pub struct Rows<'a> {
    pub count: usize,
    /// Elements of a row.
    pub len: usize,
    /// Bytes from one row to the next, by base pointer; `None` if the operand is the tile itself.
    pub steps: &'a [Option<isize>],
    /// Bytes from one row of the tile to the next.
    pub stride: isize,
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
    /// It is bytes.
    widened: Option<Widened>,
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
    /// Quantized, then as [`Step::Whole`].
    Quantize(Quantizing, f32, f32),
    /// A byte is the same number as a float.
    Nothing,
    /// No less, or no more, than a number.
    AtLeast(f32),
    AtMost(f32),
    /// The steps from sums to what is quantized, one behind the other.
    Scale(Scaling),
}

/// `(sum - less) scale + plus` of a sum in `i32`, each of one value for the whole block.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scaling {
    less: Option<Loc>,
    scale: Loc,
    plus: Option<Loc>,
}

impl Link {
    /// An instruction as a part of a chain, if it can be one. Its value comes from the operand at `from`, or from either operand.
    fn new(op: &Op, from: Option<Loc>) -> Option<Link> {
        let link = |step| Link { step, swapped: false, operand: Loc::default(), still: true, widened: None };
        let alone = |step| Some(link(step));
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
                Some(Link { swapped, operand, still: form != Form::VV, ..link(step) })
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

/// True if nothing reads a register that an instruction has written, but the first one of those behind it.
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
                let divides = |link: &&Link| link.step == Step::Float(Binary::Div) && !link.swapped && link.still;
                let by = begin.checked_sub(2).and_then(|before| links.get(before)).filter(divides).map(|by| by.operand);
                links[at].step = Step::Quantize(Quantizing { by, zero }, low, high);
                let mut start = begin - 1 - usize::from(by.is_some());
                while start > 0 && is_beyond(&links[start - 1], by, (low, high), zero, consts) {
                    start -= 1;
                }
                links.drain(start..at);
                at = start;
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

/// True if a link bounds numbers that are then quantized, where all that it changes gets the same lowest or highest byte anyway.
fn is_beyond(link: &Link, by: Option<Loc>, (low, high): (f32, f32), zero: f32, consts: &[u64]) -> bool {
    let by = by.map_or(Some(1.0), |by| number(by, consts)).filter(|&by| by > 0.0);
    let Some((bound, by)) = constant(link, consts).zip(by) else { return false };
    let whole = (bound / by).round_ties_even() + zero;
    match link.step {
        Step::Float(Binary::Max) => whole <= low,
        Step::Float(Binary::Min) => whole >= high,
        _ => false,
    }
}

/// Bounds that are numbers need no look at what is no number.
fn bound(links: &mut [Link], consts: &[u64]) {
    for link in links {
        let number = constant(link, consts).filter(|number| !number.is_nan());
        link.step = match (link.step, number) {
            (Step::Float(Binary::Max), Some(low)) => Step::AtLeast(low),
            (Step::Float(Binary::Min), Some(high)) => Step::AtMost(high),
            (step, _) => step,
        };
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
    let end = first + 2 + usize::from(plus.is_some());
    let step = Step::Scale(Scaling { less, scale, plus });
    let start = first - usize::from(less.is_some());
    links.splice(start..end, [Link { step, swapped: false, operand: scale, still: true, widened: None }]);
}

/// The operand of a link, if it is a constant.
fn constant(link: &Link, consts: &[u64]) -> Option<f32> {
    number(link.operand, consts).filter(|_| link.still)
}

/// The number at a place, if it is a constant.
fn number(at: Loc, consts: &[u64]) -> Option<f32> {
    let Loc { base: 1, offset } = at else { return None };
    consts.get(offset as usize / size_of::<u64>()).map(|&bits| f32::from_bits(bits as u32))
}

/// The number that a link adds, if it is a whole one.
fn whole_number(link: &Link, consts: &[u64]) -> Option<f32> {
    let adds = link.step == Step::Float(Binary::Add);
    constant(link, consts).filter(|number| adds && number.fract() == 0.0 && number.abs() <= FARTHEST)
}

/// Takes a program's instructions apart into chains and others. Constants are read from the base pointer 1.
pub fn pieces(ops: &[Op], kept: &[Loc], consts: &[u64]) -> Vec<Piece> {
    if let Some(chain) = with_branches(ops, kept, consts) {
        return vec![Piece::Chain(chain)];
    }
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < ops.len() {
        if let Some((chain, end)) = chain(&ops[at..], kept, consts, &[]) {
            pieces.push(Piece::Chain(chain));
            at += end;
            continue;
        }
        match pieces.last_mut() {
            Some(Piece::Ops(list)) => list.push(ops[at]),
            _ => pieces.push(Piece::Ops(vec![ops[at]])),
        }
        at += 1;
    }
    pieces
}

/// The chain of the first instructions, of which there are at least two, and their number. The operands in `branches` are read where
/// [`branch`] has said.
fn chain(ops: &[Op], kept: &[Loc], consts: &[u64], branches: &[(Loc, Widened)]) -> Option<(Chain, usize)> {
    let mut links: Vec<Link> = vec![Link::new(&ops[0], None)?];
    let mut end = 1;
    while end < ops.len() && dies(&ops[end - 1], &ops[end..], kept) {
        let Some(link) = Link::new(&ops[end], Some(ops[end - 1].to)) else { break };
        links.push(link);
        end += 1;
    }
    let ((from, _), (_, to)) = reprs(ops[0].kind).zip(reprs(ops[end - 1].kind))?;
    if links.len() < 2 {
        return None;
    }
    if ops[0].args[0].base >= BRANCHES {
        (links[0].swapped, links[0].operand) = (true, ops[0].args[0]);
    }
    let source = ops[0].args[usize::from(links[0].swapped)];
    for link in &mut links {
        let number = link.operand.base.checked_sub(BRANCHES).map(|number| number as usize);
        if let Some(&(bytes, widened)) = number.and_then(|number| branches.get(number)) {
            (link.operand, link.widened) = (bytes, Some(widened));
        }
    }
    shorten(&mut links, consts);
    bound(&mut links, consts);
    join(&mut links);
    let quantizing = match links.last()?.step {
        Step::Quantize(quantizing, ..) if matches!(to, Repr::U8 | Repr::I8) => Some(quantizing),
        _ => None,
    };
    links.truncate(links.len() - usize::from(quantizing.is_some()));
    Some((Chain { from: (source, from), to: (ops[end - 1].to, to), links, end: quantizing }, end))
}

/// The chain that is all of a program once operands of bytes are widened on their way into it.
fn with_branches(ops: &[Op], kept: &[Loc], consts: &[u64]) -> Option<Chain> {
    let mut trunk = ops.to_vec();
    let mut branches = Vec::new();
    while let Some(found) = (0..trunk.len()).find_map(|at| branch(&mut trunk, at, kept, branches.len() as u32)) {
        branches.push(found);
    }
    if branches.is_empty() {
        return None;
    }
    let (chain, end) = chain(&trunk, kept, consts, &branches)?;
    (end == trunk.len()).then_some(chain)
}

/// Takes out the instructions from number `at` on that make floats of bytes in memory, for one instruction that has another operand, too. That
/// one then reads number `number` of the branches.
fn branch(ops: &mut Vec<Op>, at: usize, kept: &[Loc], number: u32) -> Option<(Loc, Widened)> {
    let Kind::Cast(repr @ (Repr::U8 | Repr::I8), to @ (Repr::F32 | Repr::I32)) = ops[at].kind else { return None };
    let bytes = ops[at].args[0];
    if bytes.base < 2 || bytes.base >= BRANCHES {
        return None;
    }
    let plain = Widened { repr, less: None, scale: None };
    let (mut taken, mut widened, mut is_float) = (vec![at], plain, to == Repr::F32);
    loop {
        let last = *taken.last().expect("it has the first one");
        let from = ops[last].to;
        let after = &ops[last + 1..];
        let reader = last + 1 + after.iter().position(|op| op.args.contains(&from) || op.to == from)?;
        if !dies(&ops[last], &ops[reader..], kept) {
            return None;
        }
        let link = Link::new(&ops[reader], Some(from))?;
        match link.step {
            Step::ToFloat if !is_float => is_float = true,
            _ if !is_float => return None,
            Step::Float(Binary::Sub) if link.still && !link.swapped && widened == plain => {
                widened.less = Some(link.operand);
            }
            Step::Float(Binary::Mul) if link.still && widened.scale.is_none() => widened.scale = Some(link.operand),
            Step::Float(_) if !link.still && link.operand.base < BRANCHES => {
                let place = Loc { base: BRANCHES + number, offset: 0 };
                ops[reader].args.iter_mut().filter(|arg| **arg == from).for_each(|arg| *arg = place);
                for place in taken.into_iter().rev() {
                    ops.remove(place);
                }
                return Some((bytes, widened));
            }
            _ => return None,
        }
        taken.push(reader);
    }
}

impl Chain {
    /// True if a program that is this chain alone has no value in a register, though its instructions name some for the operands of bytes.
    pub fn spares_registers(&self) -> bool {
        self.links.iter().any(|link| link.widened.is_some()) && self.from.0.base > 1 && self.to.0.base > 1
    }

    /// Runs the chain over rows, which may be longer than a block, if all operands are memory.
    ///
    /// # Safety
    /// As for [`block::exec`], of every row.
    pub unsafe fn run(&self, isa: Isa, rows: &Rows, bases: &[*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { walk(isa, self, rows, bases) }
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
                Piece::Chain(chain) => chain.run(isa, &Rows { count: 1, len: n, steps: &[], stride: 0 }, bases),
            }
        }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Chain::run`].
    unsafe fn walk(chain: &Chain, rows: &Rows, bases: &[*mut u8]) => walk_by
}

/// # Safety
/// As for [`walk`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn walk_by<V: Numbers>(chain: &Chain, rows: &Rows, bases: &[*mut u8]) {
    for row in 0..rows.count {
        let step = |base: u32| rows.steps.get(base as usize).map_or(0, |step| step.unwrap_or(rows.stride));
        let at = |loc: Loc| {
            let behind = loc.offset as isize + row as isize * step(loc.base);
            bases[loc.base as usize].wrapping_offset(behind)
        };
        let (mut first, n) = (0, rows.len);
        // SAFETY: the vectors begin within the row. The caller guarantees the rest.
        unsafe {
            while first < n {
                let whole = (n - first) / V::LEN;
                first += V::LEN
                    * match (n - first).div_ceil(V::LEN) {
                        _ if V::LEN == MOST && whole >= WIDE => group::<V, WIDE, true>(chain, first, n, at),
                        _ if whole >= WIDE / 2 => group::<V, { WIDE / 2 }, true>(chain, first, n, at),
                        1 => group::<V, 1, false>(chain, first, n, at),
                        2 => group::<V, 2, false>(chain, first, n, at),
                        _ => group::<V, { WIDE / 2 }, false>(chain, first, n, at),
                    };
            }
        }
    }
}

/// Computes `W` vectors from element `first` of `n` on, and returns `W`. `FULL`: all of their elements are among these. The row's operands are
/// `at` an address.
///
/// # Safety
/// As for [`walk_by`].
#[inline(always)]
unsafe fn group<V: Numbers, const W: usize, const FULL: bool>(
    chain: &Chain,
    first: usize,
    n: usize,
    at: impl Fn(Loc) -> *mut u8,
) -> usize {
    let count = |v: usize| if FULL { V::LEN } else { n.saturating_sub(first + v * V::LEN).min(V::LEN) };
    let ((from, from_repr), (to, to_repr)) = (chain.from, chain.to);
    let (from, to) = (at(from).cast_const(), at(to));
    // SAFETY: vectors that reach beyond the block are read and written in part. The caller guarantees the rest.
    unsafe {
        let mut values = [V::splat(0.0); W];
        each(&mut values, |v, _| V::read(from, from_repr, first + v * V::LEN, count(v)));
        for link in &chain.links {
            let operand = at(link.operand).cast::<f32>().cast_const();
            let among = (first, n);
            if let Some(Widened { repr, less, scale }) = link.widened {
                let number = |loc: Loc| V::splat(*at(loc).cast::<f32>());
                let (less, scale) = (less.map(number), scale.map(number));
                // Less nothing, and times one, it is the same number.
                let (less, scale) = (less.unwrap_or(V::splat(0.0)), scale.unwrap_or(V::splat(1.0)));
                let byte = |v| V::read(operand.cast(), repr, first + v * V::LEN, count(v));
                let other = |v| byte(v).sub(less).mul(scale);
                match link.step {
                    Step::Float(Binary::Add) => each(&mut values, |v, x| x.add(other(v))),
                    _ if link.swapped => each(&mut values, |v, x| other(v).combined(x, link.step)),
                    _ => each(&mut values, |v, x| x.combined(other(v), link.step)),
                }
                continue;
            }
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
                Step::Round => each(&mut values, |_, x| x.round()),
                Step::ToFloat => each(&mut values, |_, x| x.to_floats()),
                Step::ToInteger => each(&mut values, |_, x| x.to_integers()),
                Step::Whole(low, high) => each(&mut values, |_, x| x.whole(low, high)),
                Step::AtLeast(low) => each(&mut values, |_, x| V::splat(low).max(x)),
                Step::AtMost(high) => each(&mut values, |_, x| V::splat(high).min(x)),
                Step::Quantize(Quantizing { by, zero }, low, high) => {
                    if let Some(by) = by {
                        V::divide(&mut values, *at(by).cast::<f32>());
                    }
                    let zero = V::splat(zero);
                    each(&mut values, |_, x| x.round().add(zero).within(low, high));
                }
                Step::Nothing => {}
                Step::Scale(Scaling { less, scale, plus }) => {
                    let number = |loc: Loc| V::splat(*at(loc).cast::<f32>());
                    // Less zero, and plus what is less than zero by nothing, is the same number.
                    let (less, scale) = (less.map_or(V::splat(0.0), number), number(scale));
                    let plus = plus.map_or(V::splat(-0.0), number);
                    each(&mut values, |_, x| x.sub_integers(less).to_floats().mul(scale).add(plus));
                }
            }
        }
        if let Some(Quantizing { by, zero }) = chain.end {
            if let Some(by) = by {
                V::divide(&mut values, *at(by).cast::<f32>());
            }
            V::quantize(values, zero, to_repr, to.wrapping_add(first), (n - first).min(W * V::LEN));
            return W;
        }
        each(&mut values, |v, x| {
            x.write(to, to_repr, first + v * V::LEN, count(v));
            x
        });
    }
    W
}

/// Changes each vector, by its number. They stay in registers, which they would not by way of an iterator.
#[inline(always)]
fn each<V: Copy, const W: usize>(values: &mut [V; W], f: impl Fn(usize, V) -> V) {
    let mut v = 0;
    while v < W {
        values[v] = f(v, values[v]);
        v += 1;
    }
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
            return each(values, |_, x| ordered(x, y));
        }
        each(values, |v, x| {
            let start = first + v * V::LEN;
            let y = match n.saturating_sub(start) {
                whole if FULL || whole >= V::LEN => V::load(operand.add(start)),
                rest => V::load_first(operand.wrapping_add(start), rest),
            };
            ordered(x, y)
        });
    }
}

/// The largest number of lanes.
const MOST: usize = 16;

/// Base pointers from this number on stand for branches.
const BRANCHES: u32 = 1 << 31;

/// Divisors by whose reciprocal [`Numbers::divide`] multiplies, and the largest quotients that it then computes exactly.
const USUAL: RangeInclusive<f32> = 1e-25..=1e25;
const LARGE: f32 = 1e6;

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

    /// A step of floats.
    #[inline(always)]
    unsafe fn combined(self, other: Self, step: Step) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match step {
                Step::Float(Binary::Add) => self.add(other),
                Step::Float(Binary::Sub) => self.sub(other),
                Step::Float(Binary::Mul) => self.mul(other),
                Step::Float(Binary::Div) => self.div(other),
                Step::Float(Binary::Max) => self.maximum(other),
                _ => self.minimum(other),
            }
        }
    }

    /// Divides vectors by a number. Quotients up to [`LARGE`] in size are what a division computes, and others larger than a byte, of the
    /// same sign.
    ///
    /// A product by the reciprocal is less than one bit off, and the remainder that it leaves is exact: with it, the product becomes the
    /// quotient (Markstein, 1990). No such step over- or underflows for divisors of a usual size.
    #[inline(always)]
    unsafe fn divide<const W: usize>(values: &mut [Self; W], by: f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let divisor = Self::splat(by);
            if !Self::FMA || !USUAL.contains(&by.abs()) {
                return each(values, |_, x| x.div(divisor));
            }
            let (reciprocal, negative) = (Self::splat(by.recip()), Self::splat(-by));
            let (low, high) = (Self::splat(-LARGE), Self::splat(LARGE));
            each(values, |_, x| {
                // What is no number stays what it is.
                let product = low.max(high.min(x.mul(reciprocal)));
                product.mul_add(negative, x).mul_add(reciprocal, product)
            });
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

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::super::simd::Neon;
    use super::{Lanes, Numbers, Plain, Repr};
    use std::arch::aarch64::*;

    /// A function of both registers.
    #[inline(always)]
    fn each(x: Neon, f: impl Fn(float32x4_t) -> float32x4_t) -> Neon {
        Neon(f(x.0), f(x.1))
    }

    // SAFETY of every block: NEON is part of the baseline. A vector that is cut is read and written as the portable one is, which has as many
    // lanes.
    impl Numbers for Neon {
        #[inline(always)]
        unsafe fn read(from: *const u8, repr: Repr, start: usize, n: usize) -> Self {
            // SAFETY: as above.
            unsafe {
                match repr {
                    Repr::U8 if n == Self::LEN => {
                        let wide = vmovl_u8(vld1_u8(from.wrapping_add(start)));
                        let floats = |half| vcvtq_f32_u32(vmovl_u16(half));
                        Neon(floats(vget_low_u16(wide)), floats(vget_high_u16(wide)))
                    }
                    Repr::I8 if n == Self::LEN => {
                        let wide = vmovl_s8(vld1_s8(from.wrapping_add(start).cast()));
                        let floats = |half| vcvtq_f32_s32(vmovl_s16(half));
                        Neon(floats(vget_low_s16(wide)), floats(vget_high_s16(wide)))
                    }
                    Repr::U8 | Repr::I8 => {
                        let mut lanes = [0f32; 8];
                        Plain::read(from, repr, start, n).store(lanes.as_mut_ptr());
                        Self::load(lanes.as_ptr())
                    }
                    _ if n == Self::LEN => Self::load(from.cast::<f32>().add(start)),
                    _ => Self::load_first(from.cast::<f32>().wrapping_add(start), n),
                }
            }
        }
        #[inline(always)]
        unsafe fn write(self, to: *mut u8, repr: Repr, start: usize, n: usize) {
            // SAFETY: as above.
            unsafe {
                match repr {
                    Repr::U8 | Repr::I8 => {
                        let half = |x| vmovn_s32(vcvtq_s32_f32(x));
                        let bytes = vmovn_s16(vcombine_s16(half(self.0), half(self.1)));
                        let mut lanes = [0i8; 8];
                        vst1_s8(lanes.as_mut_ptr(), bytes);
                        to.wrapping_add(start).copy_from_nonoverlapping(lanes.as_ptr().cast(), n);
                    }
                    _ if n == Self::LEN => self.store(to.cast::<f32>().add(start)),
                    _ => self.store_first(to.cast::<f32>().wrapping_add(start), n),
                }
            }
        }
        #[inline(always)]
        unsafe fn add_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            let add =
                |a, b| unsafe { vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b))) };
            Neon(add(self.0, other.0), add(self.1, other.1))
        }
        #[inline(always)]
        unsafe fn sub_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            let sub =
                |a, b| unsafe { vreinterpretq_f32_s32(vsubq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b))) };
            Neon(sub(self.0, other.0), sub(self.1, other.1))
        }
        #[inline(always)]
        unsafe fn to_floats(self) -> Self {
            // SAFETY: as above.
            each(self, |x| unsafe { vcvtq_f32_s32(vreinterpretq_s32_f32(x)) })
        }
        #[inline(always)]
        unsafe fn to_integers(self) -> Self {
            // SAFETY: as above.
            each(self, |x| unsafe { vreinterpretq_f32_s32(vcvtq_s32_f32(x)) })
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            // SAFETY: as above.
            each(self, |x| unsafe { vrndnq_f32(x) })
        }
        #[inline(always)]
        unsafe fn whole(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            unsafe { each(self.within(low, high), |x| vcvtq_f32_s32(vcvtq_s32_f32(x))) }
        }
        #[inline(always)]
        unsafe fn within(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            each(self, |x| unsafe {
                let within = vminq_f32(vmaxq_f32(x, vdupq_n_f32(low)), vdupq_n_f32(high));
                let number = vandq_u32(vceqq_f32(x, x), vreinterpretq_u32_f32(within));
                vreinterpretq_f32_u32(number)
            })
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, Numbers, Plain, Repr, Ymm, Zmm};
    use std::arch::x86_64::*;

    /// Ones for the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as u16
    }

    // SAFETY of every block: AVX2, by the contract of `Numbers`. A vector that is cut is read and written as the portable one is, which has as
    // many lanes.
    impl Numbers for Ymm {
        #[inline(always)]
        unsafe fn read(from: *const u8, repr: Repr, start: usize, n: usize) -> Self {
            // SAFETY: as above.
            unsafe {
                match repr {
                    Repr::U8 | Repr::I8 if n == Self::LEN => {
                        let bytes = _mm_loadl_epi64(from.wrapping_add(start).cast());
                        let wide =
                            if repr == Repr::U8 { _mm256_cvtepu8_epi32(bytes) } else { _mm256_cvtepi8_epi32(bytes) };
                        Ymm::from(_mm256_cvtepi32_ps(wide))
                    }
                    Repr::U8 | Repr::I8 => {
                        let mut lanes = [0f32; 8];
                        Plain::read(from, repr, start, n).store(lanes.as_mut_ptr());
                        Self::load(lanes.as_ptr())
                    }
                    _ if n == Self::LEN => Self::load(from.cast::<f32>().add(start)),
                    _ => Self::load_first(from.cast::<f32>().wrapping_add(start), n),
                }
            }
        }
        #[inline(always)]
        unsafe fn write(self, to: *mut u8, repr: Repr, start: usize, n: usize) {
            // SAFETY: as above.
            unsafe {
                match repr {
                    Repr::U8 | Repr::I8 => {
                        // The low byte of each word, four of each half.
                        let order = _mm256_set1_epi32(0x0c08_0400);
                        let bytes = _mm256_shuffle_epi8(_mm256_cvttps_epi32(self.into()), order);
                        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
                        let bytes = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)).to_le_bytes();
                        to.wrapping_add(start).copy_from_nonoverlapping(bytes.as_ptr(), n);
                    }
                    _ if n == Self::LEN => self.store(to.cast::<f32>().add(start)),
                    _ => self.store_first(to.cast::<f32>().wrapping_add(start), n),
                }
            }
        }
        #[inline(always)]
        unsafe fn add_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                let (a, b) = (_mm256_castps_si256(self.into()), _mm256_castps_si256(other.into()));
                Ymm::from(_mm256_castsi256_ps(_mm256_add_epi32(a, b)))
            }
        }
        #[inline(always)]
        unsafe fn sub_integers(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                let (a, b) = (_mm256_castps_si256(self.into()), _mm256_castps_si256(other.into()));
                Ymm::from(_mm256_castsi256_ps(_mm256_sub_epi32(a, b)))
            }
        }
        #[inline(always)]
        unsafe fn to_floats(self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm::from(_mm256_cvtepi32_ps(_mm256_castps_si256(self.into()))) }
        }
        #[inline(always)]
        unsafe fn to_integers(self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm::from(_mm256_castsi256_ps(_mm256_cvttps_epi32(self.into()))) }
        }
        #[inline(always)]
        unsafe fn round(self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm::from(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.into())) }
        }
        #[inline(always)]
        unsafe fn whole(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            unsafe { Ymm::from(_mm256_cvtepi32_ps(_mm256_cvttps_epi32(self.within(low, high).into()))) }
        }
        #[inline(always)]
        unsafe fn within(self, low: f32, high: f32) -> Self {
            // SAFETY: as above.
            unsafe {
                let x: __m256 = self.into();
                let number = _mm256_cmp_ps::<_CMP_ORD_Q>(x, x);
                let raised = _mm256_and_ps(number, _mm256_max_ps(x, _mm256_set1_ps(low)));
                Ymm::from(_mm256_min_ps(raised, _mm256_set1_ps(high)))
            }
        }
    }

    // SAFETY of every block: AVX-512, by the contract of `Numbers`. Lanes that are masked out are neither read nor written.
    impl Numbers for Zmm {
        #[inline(always)]
        unsafe fn quantize<const W: usize>(values: [Self; W], zero: f32, repr: Repr, to: *mut u8, n: usize) {
            let mut first = 0;
            while first < W {
                // SAFETY: as above.
                unsafe {
                    let mut whole = [_mm512_setzero_si512(); 4];
                    let mut v = 0;
                    while v < 4 && first + v < W {
                        // What is too low, or no number, becomes the lowest `i32`, and what is too high stays a number that is too high.
                        let x = _mm512_min_ps(_mm512_set1_ps(65536.0), values[first + v].into());
                        let x = match repr {
                            Repr::U8 => x,
                            _ => _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), _mm512_set1_ps(-zero)),
                        };
                        whole[v] = _mm512_cvtps_epi32(x);
                        v += 1;
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
                    let (to, n) = (to.wrapping_add(first * Self::LEN), n.saturating_sub(first * Self::LEN).min(64));
                    if n == 64 {
                        _mm512_storeu_si512(to.cast(), bytes);
                    } else {
                        _mm512_mask_storeu_epi8(to.cast(), (1u64 << n) - 1, bytes);
                    }
                }
                first += 4;
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
