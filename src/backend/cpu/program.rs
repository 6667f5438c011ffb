//! Scalar bodies compiled to block instructions, registers assigned.
//!
//! What is the same for all elements of a run (literals, broadcast operands, results of folds and all that follows from them) is
//! computed once per run by the `still` instructions, the rest block by block.

use super::block::{BLOCK, Form, Kind, Loc, Op, Repr, exec};
use super::simd::Isa;
use crate::expr::{Binary, Body, Code, Unary};
use std::collections::BTreeMap;

/// A value that comes from outside the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// How its elements lie where its base pointer points.
    pub repr: Repr,
    /// Whether it is one value for the whole run.
    pub still: bool,
    /// Whether its blocks have room for a whole number of vectors.
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
    /// The source of `Fold(j)`.
    pub folds: Vec<usize>,
}

/// What becomes of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// Converted to this representation and stored where its base pointer points.
    Store(Repr),
    /// Left where it is; [`Program::kept`] says where.
    Keep,
    /// Computed where its base pointer points, in its own representation, with room for a whole number of vectors. Nothing that the
    /// body reads lies there.
    Place,
}

/// A compiled body.
#[derive(Debug)]
pub struct Program {
    still: Vec<Op>,
    each: Vec<Op>,
    consts: Vec<u64>,
    outs: usize,
    outputs: usize,
    /// Bytes of registers.
    pub registers: usize,
    /// Where results that are kept lie, in order.
    pub kept: Vec<Loc>,
    /// About how many nanoseconds one element costs.
    pub cost: f64,
}

/// The base pointer of source `k`.
pub const fn source(k: usize) -> usize {
    2 + k
}

struct Builder<'a> {
    body: &'a Body,
    frame: &'a Frame,
    reprs: Vec<Repr>,
    is_still: Vec<bool>,
    loc: Vec<Loc>,
    /// Instructions that read each value after it is computed, results counted once more.
    uses: Vec<usize>,
    consts: Vec<u64>,
    still: Vec<Op>,
    each: Vec<Op>,
    still_slots: u32,
    /// Free registers by element size: 1, 4, 8.
    free: [Vec<u32>; 3],
    /// Offsets count from the end of the still slots until `finish`.
    registers: u32,
    cost: f64,
}

const SLOT: u32 = 8;

fn class(size: usize) -> usize {
    match size {
        1 => 0,
        4 => 1,
        _ => 2,
    }
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
        let mut b = Builder {
            body,
            frame,
            reprs: Vec::new(),
            is_still: Vec::new(),
            loc: vec![Loc::default(); body.code.len()],
            uses: vec![0; body.code.len()],
            consts: Vec::new(),
            still: Vec::new(),
            each: Vec::new(),
            still_slots: 0,
            free: Default::default(),
            registers: 0,
            cost: 0.0,
        };
        b.check()?;
        b.count_uses();
        let direct = b.direct_result(sinks);
        let mut placed: Vec<Option<Loc>> = vec![None; body.code.len()];
        for (k, (&r, &sink)) in body.results.iter().zip(sinks).enumerate() {
            let computed = !b.is_still[r as usize] && b.source(body.code[r as usize].code).is_none();
            if direct == Some(r as usize) || (sink == Sink::Place && computed) {
                placed[r as usize].get_or_insert(Loc { base: b.out(k), offset: 0 });
            }
        }
        for (i, &to) in placed.iter().enumerate() {
            if b.uses[i] > 0 {
                b.emit(i, to);
            }
        }
        // Results that are sources themselves are saved before the first store: a destination may lie where they do.
        let mut values: Vec<(Loc, Repr)> = Vec::new();
        for &r in &body.results {
            let (r, mut loc) = (r as usize, b.loc[r as usize]);
            let stores = sinks.iter().filter(|s| matches!(s, Sink::Store(_))).count();
            if stores > 1 && !b.is_still[r] && loc.base >= 2 && placed[r].is_none() {
                let size = b.reprs[r].size();
                let to = b.register(size);
                b.each.push(Op { kind: Kind::Copy(size), to, args: [loc; 3], padded: false });
                loc = to;
            }
            values.push((loc, b.reprs[r]));
        }
        let mut kept = Vec::new();
        for (k, (&sink, &(loc, repr))) in sinks.iter().zip(&values).enumerate() {
            let still = b.is_still[body.results[k] as usize];
            let out = Loc { base: b.out(k), offset: 0 };
            match sink {
                Sink::Keep if still => {
                    let to = b.register(repr.size());
                    b.each.push(Op { kind: Kind::Splat(repr.size()), to, args: [loc; 3], padded: false });
                    kept.push(to);
                }
                Sink::Keep => kept.push(loc),
                Sink::Place if still => {
                    b.each.push(Op { kind: Kind::Splat(repr.size()), to: out, args: [loc; 3], padded: false })
                }
                Sink::Place if loc != out => {
                    b.each.push(Op { kind: Kind::Copy(repr.size()), to: out, args: [loc; 3], padded: false })
                }
                Sink::Place => {}
                Sink::Store(_) if direct == Some(body.results[k] as usize) => {}
                Sink::Store(stored) => {
                    let (mut loc, mut still) = (loc, still);
                    if still && stored != repr {
                        let to = b.slot();
                        b.still.push(Op { kind: Kind::Cast(repr, stored), to, args: [loc; 3], padded: false });
                        loc = to;
                    } else if stored != repr {
                        b.each.push(Op { kind: Kind::Cast(repr, stored), to: out, args: [loc; 3], padded: false });
                        still = false;
                        loc = out;
                    }
                    if still {
                        b.each.push(Op { kind: Kind::Splat(stored.size()), to: out, args: [loc; 3], padded: false });
                    } else if loc != out {
                        b.each.push(Op { kind: Kind::Copy(stored.size()), to: out, args: [loc; 3], padded: false });
                    }
                }
            }
        }
        // Blocks start behind the slots.
        let shift = (b.still_slots * SLOT).next_multiple_of(64);
        let place = |loc: &mut Loc| {
            if loc.base == 0 && loc.offset >= BLOCKS {
                loc.offset = loc.offset - BLOCKS + shift;
            }
        };
        for op in &mut b.each {
            let roomy = |loc: Loc| match loc.base {
                0 => true,
                1 => false,
                base => match frame.sources.get(base as usize - 2) {
                    Some(source) => source.padded,
                    None => sinks[base as usize - 2 - frame.sources.len()] == Sink::Place,
                },
            };
            op.padded =
                roomy(op.to) && op.args.iter().zip(op.kind.sizes().0).all(|(&arg, size)| size == 0 || roomy(arg));
        }
        for op in b.still.iter_mut().chain(&mut b.each) {
            place(&mut op.to);
            op.args.iter_mut().for_each(place);
        }
        kept.iter_mut().for_each(place);
        Ok(Program {
            still: b.still,
            each: b.each,
            consts: b.consts,
            outs: 2 + frame.sources.len(),
            outputs: sinks.len(),
            registers: (shift + b.registers) as usize,
            kept,
            cost: b.cost,
        })
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

    /// Computes what is the same for the whole run.
    ///
    /// # Safety
    /// Base pointers of still sources must be readable for one element, the registers writable for `registers` bytes.
    pub unsafe fn run_still(&self, isa: Isa, bases: &[*mut u8]) {
        // SAFETY: the caller's word.
        unsafe { exec(isa, &self.still, 1, bases) }
    }

    /// Computes `n <= BLOCK` elements.
    ///
    /// # Safety
    /// As above, and the other sources readable, the destinations writable for `n` elements.
    pub unsafe fn run_each(&self, isa: Isa, n: usize, bases: &[*mut u8]) {
        // SAFETY: the caller's word.
        unsafe { exec(isa, &self.each, n, bases) }
    }

    /// Number of destinations.
    pub fn outputs(&self) -> usize {
        self.outputs
    }
}

/// Offsets of block registers while the number of slots is not yet known.
const BLOCKS: u32 = 1 << 31;

impl Builder<'_> {
    fn out(&self, k: usize) -> u32 {
        (2 + self.frame.sources.len() + k) as u32
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

    fn release(&mut self, loc: Loc, size: usize) {
        if loc.base == 0 && loc.offset >= BLOCKS {
            self.free[class(size)].push(loc.offset);
        }
    }

    fn source(&self, code: Code) -> Option<usize> {
        match code {
            Code::Input(j) => self.frame.inputs.get(j as usize).copied().flatten(),
            Code::Index(axis) => self.frame.index.get(&axis).copied(),
            Code::Fold(j) => self.frame.folds.get(j as usize).copied(),
            _ => None,
        }
    }

    /// Types, and what is still.
    fn check(&mut self) -> Result<(), String> {
        for (i, instr) in self.body.code.iter().enumerate() {
            let wrong = || format!("instruction {i} of a body is malformed: {instr:?}");
            let repr = Repr::computed(instr.dtype).ok_or_else(|| format!("no kernels for {}", instr.dtype))?;
            let operands = || instr.code.operands();
            if operands().any(|a| a as usize >= i) {
                return Err(wrong());
            }
            let of = |a: u32| self.reprs[a as usize];
            let typed = match instr.code {
                Code::Const(_) | Code::Cast(_) => true,
                Code::Input(_) | Code::Index(_) | Code::Fold(_) => self.source(instr.code).is_some(),
                Code::Unary(_, a) => of(a) == repr,
                Code::Binary(op, a, b) => of(a) == of(b) && (of(a) == repr || (op.compares() && repr == Repr::Bool)),
                Code::Select(c, a, b) => of(c) == Repr::Bool && of(a) == repr && of(b) == repr,
            };
            if !typed {
                return Err(wrong());
            }
            let still = match self.source(instr.code) {
                Some(k) => self.frame.sources[k].still,
                None => operands().all(|a| self.is_still[a as usize]),
            };
            self.reprs.push(repr);
            self.is_still.push(still);
        }
        if self.body.results.iter().any(|&r| r as usize >= self.body.code.len()) {
            return Err("a result of a body is not one of its instructions".into());
        }
        Ok(())
    }

    fn count_uses(&mut self) {
        for &r in &self.body.results {
            self.uses[r as usize] += 1;
        }
        for i in (0..self.body.code.len()).rev() {
            if self.uses[i] == 0 {
                continue;
            }
            self.body.code[i].code.operands().for_each(|a| self.uses[a as usize] += 1);
        }
    }

    /// The instruction that may write to the destination itself: the only result, computed last, and stored as it is.
    fn direct_result(&self, sinks: &[Sink]) -> Option<usize> {
        let (&[r], &[Sink::Store(stored)]) = (&self.body.results[..], sinks) else { return None };
        let r = r as usize;
        let small = self.body.code[r].dtype.is_small_int();
        let computes = self.source(self.body.code[r].code).is_none();
        (!self.is_still[r] && computes && !small && stored == self.reprs[r]).then_some(r)
    }

    /// The operand as a block; one that is still is spread over a temporary register.
    fn spread(&mut self, value: u32, temps: &mut Vec<(Loc, usize)>) -> Loc {
        let value = value as usize;
        let loc = self.loc[value];
        if !self.is_still[value] {
            return loc;
        }
        let size = self.reprs[value].size();
        let to = self.register(size);
        self.each.push(Op { kind: Kind::Splat(size), to, args: [loc; 3], padded: false });
        temps.push((to, size));
        to
    }

    fn operand_done(&mut self, value: u32) {
        let value = value as usize;
        self.uses[value] -= 1;
        if self.uses[value] == 0 && !self.is_still[value] {
            self.release(self.loc[value], self.reprs[value].size());
        }
    }

    /// Emits instruction `i`, into `to` if given.
    fn emit(&mut self, i: usize, to: Option<Loc>) {
        let instr = self.body.code[i];
        let (repr, still) = (self.reprs[i], self.is_still[i]);
        if let Code::Const(value) = instr.code {
            self.consts.push(literal(value, repr));
            self.loc[i] = Loc { base: 1, offset: (self.consts.len() as u32 - 1) * SLOT };
            return;
        }
        if let Some(k) = self.source(instr.code) {
            let (from, stored) = (Loc { base: source(k) as u32, offset: 0 }, self.frame.sources[k].repr);
            self.loc[i] = from;
            if stored != repr {
                let to = if still { self.slot() } else { self.register(repr.size()) };
                self.push(still, Kind::Cast(stored, repr), to, [from; 3]);
                self.loc[i] = to;
            }
            return;
        }
        let mut temps = Vec::new();
        let operands: Vec<u32>;
        let (mut kind, args): (Kind, [Loc; 3]);
        match instr.code {
            Code::Unary(op, a) => {
                let loc = self.loc[a as usize];
                (kind, args, operands) = (Kind::Unary(op, repr), [loc; 3], vec![a]);
                self.price(still, unary_cost(op));
            }
            Code::Cast(a) => {
                let loc = self.loc[a as usize];
                (kind, args, operands) = (Kind::Cast(self.reprs[a as usize], repr), [loc; 3], vec![a]);
                if let Some(small) = Repr::stored(instr.dtype).filter(|&stored| stored != repr) {
                    // By way of the small type, for its range.
                    let mid = if still { self.slot() } else { self.register(1) };
                    self.push(still, Kind::Cast(self.reprs[a as usize], small), mid, args);
                    let to = to.unwrap_or_else(|| if still { self.slot() } else { self.register(repr.size()) });
                    self.push(still, Kind::Cast(small, repr), to, [mid; 3]);
                    self.operand_done(a);
                    if !still {
                        self.release(mid, 1);
                    }
                    self.loc[i] = to;
                    return;
                }
                if self.reprs[a as usize] == repr {
                    kind = Kind::Copy(repr.size());
                }
                self.price(still, 0.1);
            }
            Code::Binary(op, a, b) => {
                let of = self.reprs[a as usize];
                let form = match (self.is_still[a as usize], self.is_still[b as usize]) {
                    (false, true) if of == Repr::F32 => Form::VS,
                    (true, false) if of == Repr::F32 => Form::SV,
                    _ => Form::VV,
                };
                let (x, y) = if form == Form::VV && !still {
                    (self.spread(a, &mut temps), self.spread(b, &mut temps))
                } else {
                    (self.loc[a as usize], self.loc[b as usize])
                };
                (kind, args, operands) = (Kind::Binary(op, of, form), [x, y, y], vec![a, b]);
                self.price(still, binary_cost(op));
            }
            Code::Select(c, a, b) => {
                let (one_a, one_b) = (self.is_still[a as usize], self.is_still[b as usize]);
                let condition = if still { self.loc[c as usize] } else { self.spread(c, &mut temps) };
                kind = Kind::Select(repr.size(), one_a, one_b);
                args = [condition, self.loc[a as usize], self.loc[b as usize]];
                operands = vec![c, a, b];
                self.price(still, 0.1);
            }
            Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Fold(_) => unreachable!("leaves return above"),
        }
        // The result's register is chosen before those of dying operands are free: instructions are fastest when they are apart.
        let to = to.unwrap_or_else(|| if still { self.slot() } else { self.register(repr.size()) });
        for a in operands {
            self.operand_done(a);
        }
        for (loc, size) in temps {
            self.release(loc, size);
        }
        self.push(still, kind, to, args);
        self.loc[i] = to;
    }

    fn push(&mut self, still: bool, kind: Kind, to: Loc, args: [Loc; 3]) {
        let ops = if still { &mut self.still } else { &mut self.each };
        ops.push(Op { kind, to, args, padded: false });
    }

    fn price(&mut self, still: bool, cost: f64) {
        if !still {
            self.cost += cost;
        }
    }
}

/// A value as its representation's bits, the lowest bytes first.
pub fn literal(value: f64, repr: Repr) -> u64 {
    match repr {
        Repr::F32 => u64::from((value as f32).to_bits()),
        Repr::F64 => value.to_bits(),
        Repr::I64 => value as i64 as u64,
        Repr::I32 => u64::from(value as i32 as u32),
        Repr::U8 => u64::from(value as u8),
        Repr::I8 => u64::from(value as i8 as u8),
        Repr::Bool => u64::from(value != 0.0),
    }
}

/// Nanoseconds per element, to the nearest factor of two or so.
fn unary_cost(op: Unary) -> f64 {
    match op {
        Unary::Exp | Unary::Tanh | Unary::Erf | Unary::Log | Unary::Sin | Unary::Cos => 0.5,
        Unary::Sqrt | Unary::Recip => 0.2,
        _ => 0.05,
    }
}

/// Nanoseconds per element, to the nearest factor of two or so.
fn binary_cost(op: Binary) -> f64 {
    match op {
        Binary::Rem => 8.0,
        Binary::Pow => 1.0,
        Binary::Div => 0.2,
        _ => 0.05,
    }
}
