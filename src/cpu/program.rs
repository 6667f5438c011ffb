//! Scalar bodies compiled to block instructions, registers assigned.
//!
//! The `still` instructions compute, once per run, what is the same for all its elements: literals, broadcast operands, results of
//! reductions, and what follows from them. The others run block by block.

use super::block::{BLOCK, Form, Kind, Loc, Op, Repr, exec, to_bf16, to_f16};
use super::epilogue::{Chain, Piece, pieces};
use super::simd::Isa;
use plimsoll_core::dtype::DType;
use plimsoll_core::error::ensure;
use plimsoll_core::expr::{Binary, Body, Code, Instr, Unary};
use std::collections::BTreeMap;

/// A value that comes from outside the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The representation of its elements where its base pointer points.
    pub repr: Repr,
    /// It is one value for the whole run.
    pub still: bool,
    /// Its blocks have room for a whole number of vectors.
    pub padded: bool,
}

/// The outside of a body: which source each leaf reads.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    /// Every source; number `k` has base pointer [`source`]`(k)`.
    pub sources: Vec<Source>,
    /// The source of `Input(j)`; `None` where the body must not use it.
    pub inputs: Vec<Option<usize>>,
    /// The source of `Index(axis)`.
    pub index: BTreeMap<u32, usize>,
    /// The source of `Reduction(j)`.
    pub reductions: Vec<usize>,
}

/// The destination of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// Converted to this representation and stored where its base pointer points.
    Store(Repr),
    /// Left in its register; [`Program::kept`] says in which.
    Keep,
    /// Computed where its base pointer points, in its own representation, with room for a whole number of vectors. The body reads nothing
    /// there.
    Place,
}

/// A compiled body.
#[derive(Debug)]
pub struct Program {
    still: Vec<Op>,
    each: Vec<Piece>,
    consts: Vec<u64>,
    outs: usize,
    outputs: usize,
    /// Bytes of registers.
    pub registers: usize,
    /// The registers of results that are kept, in order.
    pub kept: Vec<Loc>,
    /// About how many nanoseconds one element costs.
    pub cost: f64,
}

/// The base pointer of source `k`.
pub const fn source(k: usize) -> usize {
    2 + k
}

/// Bytes of a slot: a register of one value, for the whole run.
const SLOT: u32 = 8;

/// Offsets of block registers while the number of slots is not yet known.
const BLOCKS: u32 = 1 << 31;

/// An instruction of the body as a value.
#[derive(Clone, Copy)]
struct Value {
    repr: Repr,
    is_still: bool,
    /// Its location, once it is computed.
    loc: Loc,
    /// The number of instructions that have yet to read it; a result counts once more.
    uses: usize,
    /// The destination that it is computed in, if it is computed in one.
    to: Option<Loc>,
    /// It is computed there in the representation of the destination, not in its own.
    narrowed: bool,
}

struct Builder<'a> {
    body: &'a Body,
    frame: &'a Frame,
    sinks: &'a [Sink],
    values: Vec<Value>,
    consts: Vec<u64>,
    still: Vec<Op>,
    each: Vec<Op>,
    still_slots: u32,
    /// Free registers by element size: 1, 2, 4, 8.
    free: [Vec<u32>; 4],
    /// Offsets count from the end of the still slots until `finish`.
    registers: u32,
    cost: f64,
}

fn class(size: usize) -> usize {
    size.ilog2() as usize
}

impl Program {
    /// Compiles `body`.
    ///
    /// # Errors
    /// When the body is malformed or has types that this backend lacks.
    pub fn new(body: &Body, frame: &Frame, sinks: &[Sink]) -> Result<Program, String> {
        if sinks.len() != body.results.len() {
            return Err(format!("a body with {} results for {} destinations", body.results.len(), sinks.len()));
        }
        let mut builder = Builder {
            body,
            frame,
            sinks,
            values: Vec::new(),
            consts: Vec::new(),
            still: Vec::new(),
            each: Vec::new(),
            still_slots: 0,
            free: Default::default(),
            registers: 0,
            cost: 0.0,
        };
        builder.check()?;
        builder.count_uses();
        builder.place_results();
        for i in 0..body.code.len() {
            if builder.values[i].uses > 0 {
                builder.emit(i);
            }
        }
        let kept = builder.store_results();
        Ok(builder.finish(kept))
    }

    /// The base pointer of destination `k`.
    pub fn out(&self, k: usize) -> usize {
        self.outs + k
    }

    /// Sets the base pointers that are the program's own.
    pub fn bind(&self, registers: *mut u8, bases: &mut [*mut u8]) {
        bases[0] = registers;
        bases[1] = self.consts.as_ptr().cast_mut().cast();
    }

    /// Computes the values that are the same for the whole run.
    ///
    /// # Safety
    /// Base pointers of still sources must be readable for one element, the registers writable for `registers` bytes.
    pub unsafe fn run_still(&self, isa: Isa, bases: &[*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { exec(isa, &self.still, 1, bases) }
    }

    /// Computes `n <= BLOCK` elements.
    ///
    /// # Safety
    /// As for [`Program::run_still`], and the other sources must be readable, the destinations writable for `n` elements.
    pub unsafe fn run_each(&self, isa: Isa, n: usize, bases: &[*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.each.iter().for_each(|piece| piece.run(isa, n, bases)) }
    }

    /// The chain that is all of the program, if it is one.
    pub fn chain(&self) -> Option<&Chain> {
        match &self.each[..] {
            [Piece::Chain(chain)] if self.still.is_empty() => Some(chain),
            _ => None,
        }
    }

    /// Number of destinations.
    pub fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Builder<'_> {
    fn out(&self, k: usize) -> Loc {
        Loc { base: source(self.frame.sources.len() + k) as u32, offset: 0 }
    }

    fn slot(&mut self) -> Loc {
        self.still_slots += 1;
        Loc { base: 0, offset: (self.still_slots - 1) * SLOT }
    }

    fn register(&mut self, size: usize) -> Loc {
        let offset = self.free[class(size)].pop().unwrap_or_else(|| {
            self.registers += (BLOCK * size) as u32;
            BLOCKS + self.registers - (BLOCK * size) as u32
        });
        Loc { base: 0, offset }
    }

    /// A slot for a value that is the same for the whole run, else a register.
    fn place(&mut self, still: bool, size: usize) -> Loc {
        if still { self.slot() } else { self.register(size) }
    }

    fn release(&mut self, loc: Loc, size: usize) {
        if loc.base == 0 && loc.offset >= BLOCKS {
            self.free[class(size)].push(loc.offset);
        }
    }

    fn push(&mut self, still: bool, kind: Kind, to: Loc, args: [Loc; 3]) {
        let ops = if still { &mut self.still } else { &mut self.each };
        ops.push(Op { kind, to, args, padded: false });
    }

    fn source(&self, code: Code) -> Option<usize> {
        match code {
            Code::Input(j) => self.frame.inputs.get(j as usize).copied().flatten(),
            Code::Index(axis) => self.frame.index.get(&axis).copied(),
            Code::Reduction(j) => self.frame.reductions.get(j as usize).copied(),
            _ => None,
        }
    }

    fn value(&self, i: u32) -> Value {
        self.values[i as usize]
    }

    /// Finds the representations, and the values that are still.
    fn check(&mut self) -> Result<(), String> {
        for (i, instr) in self.body.code.iter().enumerate() {
            let wrong = || format!("instruction {i} of a body is malformed: {instr:?}");
            let repr = Repr::computed(instr.dtype).ok_or_else(|| format!("no kernels for {}", instr.dtype))?;
            let operands = || instr.code.operands();
            ensure(!operands().any(|a| a as usize >= i), wrong)?;
            let of = |a: u32| self.value(a).repr;
            let typed = match instr.code {
                Code::Const(_) | Code::Cast(_) => true,
                Code::Bits(a) => of(a).size() == repr.size(),
                Code::Input(_) | Code::Index(_) | Code::Reduction(_) => self.source(instr.code).is_some(),
                Code::Unary(_, a) => of(a) == repr,
                Code::Binary(op, a, b) => of(a) == of(b) && (of(a) == repr || (op.compares() && repr == Repr::Bool)),
                Code::Select(c, a, b) => of(c) == Repr::Bool && of(a) == repr && of(b) == repr,
            };
            ensure(typed, wrong)?;
            let is_still = match self.source(instr.code) {
                Some(k) => self.frame.sources[k].still,
                None => operands().all(|a| self.value(a).is_still),
            };
            self.values.push(Value { repr, is_still, loc: Loc::default(), uses: 0, to: None, narrowed: false });
        }
        if self.body.results.iter().any(|&r| r as usize >= self.body.code.len()) {
            return Err("a result of a body is not one of its instructions".into());
        }
        Ok(())
    }

    fn count_uses(&mut self) {
        for &r in &self.body.results {
            self.values[r as usize].uses += 1;
        }
        for i in (0..self.body.code.len()).rev() {
            if self.values[i].uses > 0 {
                self.body.code[i].code.operands().for_each(|a| self.values[a as usize].uses += 1);
            }
        }
    }

    /// Finds the results that are computed in their destinations.
    fn place_results(&mut self) {
        for (k, (&r, &sink)) in self.body.results.iter().zip(self.sinks).enumerate() {
            let out = self.out(k);
            let instr = self.body.code[r as usize];
            let computes = !self.value(r).is_still && self.source(instr.code).is_none();
            // The only result, computed last, may be stored at once if it is stored as it is.
            let as_it_is = sink == Sink::Store(self.value(r).repr) && !instr.dtype.is_small_int();
            if computes && (sink == Sink::Place || (as_it_is && self.sinks.len() == 1)) {
                self.values[r as usize].to.get_or_insert(out);
            }
            // So may a small integer that is cast, and that nothing else reads.
            let is_cast =
                matches!(instr.code, Code::Cast(_)) && Repr::stored(instr.dtype).map(Sink::Store) == Some(sink);
            if computes && is_cast && instr.dtype.is_small_int() && self.sinks.len() == 1 && self.value(r).uses == 1 {
                self.values[r as usize].to = Some(out);
                self.values[r as usize].narrowed = true;
            }
        }
    }

    /// The operand as a block; one that is still is spread over a temporary register.
    fn spread(&mut self, value: u32, temps: &mut Vec<(Loc, usize)>) -> Loc {
        let Value { loc, is_still, repr, .. } = self.value(value);
        if !is_still {
            return loc;
        }
        let to = self.register(repr.size());
        self.push(false, Kind::Splat(repr.size()), to, [loc; 3]);
        temps.push((to, repr.size()));
        to
    }

    /// Emits instruction `i`.
    fn emit(&mut self, i: usize) {
        let Instr { code, dtype } = self.body.code[i];
        let Value { repr, is_still: still, .. } = self.values[i];
        if !still {
            self.cost += cost(code);
        }
        let mut temps = Vec::new();
        self.values[i].loc = match code {
            Code::Const(value) => {
                self.consts.push(literal(value, repr));
                Loc { base: 1, offset: (self.consts.len() as u32 - 1) * SLOT }
            }
            Code::Input(_) | Code::Index(_) | Code::Reduction(_) => self.load(code, repr, still),
            Code::Unary(op, a) => self.compute(i, Kind::Unary(op, repr), [self.value(a).loc; 3], &[]),
            Code::Cast(a) => self.cast(i, a, dtype),
            Code::Bits(a) => self.compute(i, Kind::Copy(repr.size()), [self.value(a).loc; 3], &[]),
            Code::Binary(op, a, b) => {
                let (x, y) = (self.value(a), self.value(b));
                let form = match (x.is_still, y.is_still) {
                    (false, true) if has_forms(op, x.repr) => Form::VS,
                    (true, false) if has_forms(op, x.repr) => Form::SV,
                    _ => Form::VV,
                };
                let (to_x, to_y) = if form == Form::VV && !still {
                    (self.spread(a, &mut temps), self.spread(b, &mut temps))
                } else {
                    (x.loc, y.loc)
                };
                self.compute(i, Kind::Binary(op, x.repr, form), [to_x, to_y, to_y], &temps)
            }
            Code::Select(c, a, b) => {
                let (x, y) = (self.value(a), self.value(b));
                let condition = if still { self.value(c).loc } else { self.spread(c, &mut temps) };
                let kind = Kind::Select(repr.size(), x.is_still, y.is_still);
                self.compute(i, kind, [condition, x.loc, y.loc], &temps)
            }
        };
    }

    /// A leaf, in the representation that it is computed with.
    fn load(&mut self, code: Code, repr: Repr, still: bool) -> Loc {
        let k = self.source(code).expect("`check` has found the source");
        let (from, stored) = (Loc { base: source(k) as u32, offset: 0 }, self.frame.sources[k].repr);
        if stored == repr {
            return from;
        }
        let to = self.place(still, repr.size());
        self.push(still, Kind::Cast(stored, repr), to, [from; 3]);
        to
    }

    fn cast(&mut self, i: usize, a: u32, dtype: DType) -> Loc {
        let Value { repr, is_still: still, .. } = self.values[i];
        let Value { repr: from, loc, .. } = self.value(a);
        // Results of halves are rounded where they are stored. A cast of another type rounds at once.
        let is_half_already = dtype.is_half() && self.body.code[a as usize].dtype == dtype;
        let Some(small) = Repr::stored(dtype).filter(|&stored| stored != repr && !is_half_already) else {
            let kind = if from == repr { Kind::Copy(repr.size()) } else { Kind::Cast(from, repr) };
            return self.compute(i, kind, [loc; 3], &[]);
        };
        if self.values[i].narrowed {
            return self.compute(i, Kind::Cast(from, small), [loc; 3], &[]);
        }
        // By way of the small type, for its range. Only floats become halves.
        let mut temps = Vec::new();
        let mut loc = loc;
        if dtype.is_half() && from != Repr::F32 {
            let wide = self.place(still, Repr::F32.size());
            self.push(still, Kind::Cast(from, Repr::F32), wide, [loc; 3]);
            temps.push((wide, Repr::F32.size()));
            loc = wide;
        }
        let middle = self.place(still, small.size());
        let from = if dtype.is_half() { Repr::F32 } else { from };
        self.push(still, Kind::Cast(from, small), middle, [loc; 3]);
        temps.push((middle, small.size()));
        self.compute(i, Kind::Cast(small, repr), [middle; 3], &temps)
    }

    /// Computes value `i`, the last use of `temps`.
    fn compute(&mut self, i: usize, kind: Kind, args: [Loc; 3], temps: &[(Loc, usize)]) -> Loc {
        let Value { repr, is_still: still, to, .. } = self.values[i];
        // The result's register is chosen before those of dying operands are free: instructions are fastest when they are apart.
        let to = to.unwrap_or_else(|| self.place(still, repr.size()));
        for a in self.body.code[i].code.operands() {
            self.values[a as usize].uses -= 1;
            let Value { repr, is_still, loc, uses, .. } = self.value(a);
            if uses == 0 && !is_still {
                self.release(loc, repr.size());
            }
        }
        temps.iter().for_each(|&(loc, size)| self.release(loc, size));
        self.push(still, kind, to, args);
        to
    }

    /// Brings every result to its destination. Returns the registers of the results that are kept.
    fn store_results(&mut self) -> Vec<Loc> {
        self.save_sources();
        let mut kept = Vec::new();
        for (k, &r) in self.body.results.iter().enumerate() {
            let Value { repr, is_still: still, loc, narrowed, .. } = self.value(r);
            let out = self.out(k);
            match self.sinks[k] {
                Sink::Store(_) if narrowed => {}
                Sink::Keep if still => {
                    let to = self.register(repr.size());
                    self.deliver(true, repr, loc, to);
                    kept.push(to);
                }
                Sink::Keep => kept.push(loc),
                Sink::Place => self.deliver(still, repr, loc, out),
                Sink::Store(stored) if stored == repr => self.deliver(still, repr, loc, out),
                Sink::Store(stored) if still => {
                    let to = self.slot();
                    self.push(true, Kind::Cast(repr, stored), to, [loc; 3]);
                    self.deliver(true, stored, to, out);
                }
                Sink::Store(stored) => self.push(false, Kind::Cast(repr, stored), out, [loc; 3]),
            }
        }
        kept
    }

    /// Saves results that are sources themselves before the first of several stores: a destination may be the same memory.
    fn save_sources(&mut self) {
        if self.sinks.iter().filter(|s| matches!(s, Sink::Store(_))).count() < 2 {
            return;
        }
        for &r in &self.body.results {
            let Value { repr, is_still, loc, to, .. } = self.value(r);
            if !is_still && loc.base >= 2 && to.is_none() {
                let saved = self.register(repr.size());
                self.push(false, Kind::Copy(repr.size()), saved, [loc; 3]);
                self.values[r as usize].loc = saved;
            }
        }
    }

    /// Copies a value to a block, unless it is there; one that is still to each of its elements.
    fn deliver(&mut self, still: bool, repr: Repr, from: Loc, to: Loc) {
        if still {
            self.push(false, Kind::Splat(repr.size()), to, [from; 3]);
        } else if from != to {
            self.push(false, Kind::Copy(repr.size()), to, [from; 3]);
        }
    }

    /// Moves block registers behind the slots, and marks the instructions whose blocks all have room for whole vectors.
    fn finish(mut self, mut kept: Vec<Loc>) -> Program {
        let shift = (self.still_slots * SLOT).next_multiple_of(64);
        let place = |loc: &mut Loc| {
            if loc.base == 0 && loc.offset >= BLOCKS {
                loc.offset = loc.offset - BLOCKS + shift;
            }
        };
        let sources = &self.frame.sources;
        let roomy = |loc: Loc| match loc.base {
            0 => true,
            1 => false,
            base => match sources.get(base as usize - 2) {
                Some(source) => source.padded,
                None => self.sinks[base as usize - 2 - sources.len()] == Sink::Place,
            },
        };
        for op in &mut self.each {
            op.padded =
                roomy(op.to) && op.args.iter().zip(op.kind.sizes().0).all(|(&arg, size)| size == 0 || roomy(arg));
        }
        for op in self.still.iter_mut().chain(&mut self.each) {
            place(&mut op.to);
            op.args.iter_mut().for_each(place);
        }
        kept.iter_mut().for_each(place);
        let each = pieces(&self.each, &kept, &self.consts);
        let spares = matches!(&each[..], [Piece::Chain(chain)] if chain.spares_registers());
        let blocks = if spares { 0 } else { self.registers };
        Program {
            still: self.still,
            each,
            consts: self.consts,
            outs: source(sources.len()),
            outputs: self.sinks.len(),
            registers: (shift + blocks) as usize,
            kept,
            cost: self.cost,
        }
    }
}

/// The bits of a value in a representation, the lowest bytes first.
pub fn literal(value: f64, repr: Repr) -> u64 {
    match repr {
        Repr::F32 => u64::from((value as f32).to_bits()),
        Repr::F16 => u64::from(to_f16(value as f32)),
        Repr::BF16 => u64::from(to_bf16(value as f32)),
        Repr::F64 => value.to_bits(),
        Repr::I64 => value as i64 as u64,
        Repr::I32 => u64::from(value as i32 as u32),
        Repr::I16 => u64::from(value as i16 as u16),
        Repr::I8 => u64::from(value as i8 as u8),
        Repr::U64 => value as u64,
        Repr::U32 => u64::from(value as u32),
        Repr::U16 => u64::from(value as u16),
        Repr::U8 => u64::from(value as u8),
        Repr::Bool => u64::from(value != 0.0),
    }
}

/// True if an instruction can take one value for the whole block.
fn has_forms(op: Binary, repr: Repr) -> bool {
    use Binary::{Add, Mul, Or, Shl, Shr, Sub, Xor};
    repr == Repr::F32 || repr == Repr::I32 && matches!(op, Add | Sub | Mul | Or | Xor | Shl | Shr)
}

/// Nanoseconds per element, to the nearest factor of two or so.
fn cost(code: Code) -> f64 {
    match code {
        Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Reduction(_) => 0.0,
        Code::Unary(Unary::Exp | Unary::Tanh | Unary::Erf | Unary::Log | Unary::Sin | Unary::Cos, _) => 0.5,
        Code::Unary(Unary::Sqrt | Unary::Recip, _) | Code::Binary(Binary::Div, _, _) => 0.2,
        Code::Binary(Binary::Rem, _, _) => 8.0,
        Code::Binary(Binary::Pow, _, _) => 1.0,
        Code::Unary(..) | Code::Binary(..) => 0.05,
        Code::Cast(_) | Code::Bits(_) | Code::Select(..) => 0.1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::expr::Expr;

    /// The bytes of a body over `n` elements of each source, on an instruction set. It must be one chain.
    fn bytes(body: &Expr, sources: &[(Repr, *const u8)], n: usize, isa: Isa) -> Vec<u8> {
        let source_of = |&(repr, _): &(Repr, *const u8)| Source { repr, still: false, padded: false };
        let inputs = (0..sources.len()).map(Some).collect();
        let frame = Frame { sources: sources.iter().map(source_of).collect(), inputs, ..Frame::default() };
        let stored = Repr::stored(body.dtype()).expect("a type that is stored");
        let program =
            Program::new(&Body::new(std::slice::from_ref(body)), &frame, &[Sink::Store(stored)]).expect("compiles");
        assert!(program.chain().is_some(), "{:?}", program.each);
        let mut found = vec![0; n];
        for first in (0..n).step_by(BLOCK) {
            let mut bases = vec![std::ptr::null_mut(); source(sources.len() + 1)];
            program.bind(std::ptr::null_mut(), &mut bases);
            for (k, (repr, at)) in sources.iter().enumerate() {
                bases[source(k)] = at.wrapping_add(first * repr.size()).cast_mut();
            }
            bases[program.out(0)] = found[first..].as_mut_ptr();
            // SAFETY: the sources and the result have `n` elements, and a chain has no registers.
            unsafe { program.run_each(isa, BLOCK.min(n - first), &bases) }
        }
        found
    }

    fn quantized(x: &Expr, by: f32, zero: f64, dtype: DType) -> Expr {
        let (low, high) = dtype.range();
        let whole = (x.clone() / f64::from(by)).round() + zero;
        whole.max(&x.like(low)).min(&x.like(high)).cast(dtype)
    }

    /// What `quantized` is of one number, step by step.
    fn expected(x: f32, by: f32, zero: f32, dtype: DType) -> u8 {
        let whole = (x / by).round_ties_even() + zero;
        if dtype == DType::U8 { whole as u8 } else { (whole as i8).cast_unsigned() }
    }

    /// Near ties, and of numbers that no byte has, quotients are what a division computes.
    #[test]
    fn numbers_are_quantized_as_a_division_rounds_them() {
        for by in [0.3f32, 1.7e-3, 0.019_607_844, 3.162_277_7, 1.999_999_9, 1e-20, 1e22, -0.7, 1e-40, 1e35] {
            let near = |k: i32| {
                let tie = (f64::from(k) + 0.5) * f64::from(by);
                (-4..5).map(move |ulps| f32::from_bits((tie as f32).to_bits().wrapping_add_signed(ulps)))
            };
            let mut x: Vec<f32> = (-300..300).flat_map(near).collect();
            x.extend([0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE]);
            for (dtype, zero) in [(DType::U8, 0.0f32), (DType::U8, 131.0), (DType::I8, -7.0)] {
                let body = quantized(&Expr::input(0, DType::F32), by, zero.into(), dtype);
                for isa in Isa::available() {
                    let found = bytes(&body, &[(Repr::F32, x.as_ptr().cast())], x.len(), isa);
                    for (x, found) in x.iter().zip(found) {
                        assert_eq!(found, expected(*x, by, zero, dtype), "{x:e} / {by:e} + {zero} on {}", isa.name());
                    }
                }
            }
        }
    }

    /// Bytes on either side of floats in memory.
    #[test]
    fn bytes_begin_a_chain() {
        let n = BLOCK + 21;
        let floats: Vec<f32> = (0..n).map(|i| (i % 113) as f32 * 0.31 - 9.0).collect();
        let codes: Vec<u8> = (0..n).map(|i| (i * 89 % 256) as u8).collect();
        let (x, y) = (Expr::input(0, DType::F32), Expr::input(1, DType::U8).cast(DType::F32) * f64::from(0.07f32));
        for is_left in [false, true] {
            let both = if is_left { y.clone() - x.clone() } else { x.clone() - y.clone() };
            let body = quantized(&both, 0.13, 90.0, DType::U8);
            let sources = [(Repr::F32, floats.as_ptr().cast()), (Repr::U8, codes.as_ptr())];
            for isa in Isa::available() {
                for (i, found) in bytes(&body, &sources, n, isa).into_iter().enumerate() {
                    let y = f32::from(codes[i]) * 0.07;
                    let both = if is_left { y - floats[i] } else { floats[i] - y };
                    assert_eq!(found, expected(both, 0.13, 90.0, DType::U8), "{i} on {}", isa.name());
                }
            }
        }
    }

    /// Sums are scaled, added to bytes on either side, and quantized twice, in one chain that computes what its instructions would.
    #[test]
    fn bytes_join_a_chain_of_sums() {
        let n = 2 * BLOCK + 37;
        let sums: Vec<i32> = (0..n as i32).map(|i| (i * 7919) % 60_001 - 30_000).collect();
        let bias: Vec<f32> = (0..n).map(|i| (i % 13) as f32 * 0.37 - 2.0).collect();
        let left: Vec<u8> = (0..n).map(|i| (i * 89 % 256) as u8).collect();
        let (sum, bias_of, bytes_of) =
            (Expr::input(0, DType::I32), Expr::input(1, DType::F32), |dtype| Expr::input(2, dtype).cast(DType::F32));
        for (dtype, repr) in [(DType::U8, Repr::U8), (DType::I8, Repr::I8)] {
            let scaled = (sum.clone() - 5.0).cast(DType::F32) * f64::from(0.0123f32) + bias_of.clone();
            let inner = quantized(&scaled, 0.9, 100.0, DType::U8).cast(DType::F32);
            let inner = (inner - 100.0) * f64::from(0.9f32);
            for is_left in [false, true] {
                let other = (bytes_of(dtype) - 3.0) * f64::from(0.77f32);
                let joined = if is_left { other - inner.clone() } else { inner.clone() + other };
                let body = quantized(&joined.max(&joined.like(0.0)), 0.41, 2.0, DType::U8);
                for isa in Isa::available() {
                    let sources =
                        [(Repr::I32, sums.as_ptr().cast()), (Repr::F32, bias.as_ptr().cast()), (repr, left.as_ptr())];
                    let found = bytes(&body, &sources, n, isa);
                    for i in 0..n {
                        let scaled = (sums[i] - 5) as f32 * 0.0123 + bias[i];
                        let inner = (f32::from(expected(scaled, 0.9, 100.0, DType::U8)) - 100.0) * 0.9;
                        let byte = if repr == Repr::U8 { left[i].into() } else { f32::from(left[i].cast_signed()) };
                        let other = (byte - 3.0) * 0.77f32;
                        let joined = if is_left { other - inner } else { inner + other };
                        assert_eq!(found[i], expected(joined.max(0.0), 0.41, 2.0, DType::U8), "{i} on {}", isa.name());
                    }
                }
            }
        }
    }
}
