//! Scalar code: [`Expr`] as a row writes it, [`Body`] as kernels hold it.
//!
//! An `Expr` is a tree with shared branches, built by operators (`(&x * 0.5) + 1.0`). [`Body::new`] turns trees into
//! straight-line code in which equal subexpressions occur once. Every instruction has a type; there are no implicit
//! conversions.

use crate::dtype::DType;
use crate::hash::FastMap;
use serde::{Deserialize, Serialize};
use std::ops;
use std::sync::Arc;

/// Operations on one value. The result has the operand's type unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Sign,
    Exp,
    Log,
    Sqrt,
    Recip,
    Sin,
    Cos,
    Tanh,
    Erf,
    Floor,
    Ceil,
    /// To the nearest integer, ties to even.
    Round,
    /// Logical negation of a `bool`.
    Not,
}

/// Operations on two values of one type. Comparisons return `bool`. Logical operations work on `bool`, or bit by bit
/// on integers. Shifts work on `i32`, by the second value modulo 32. `Max` and `Min` of a NaN are NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// Division. Of integers: rounded toward zero, and 0 if the divisor is 0.
    Div,
    /// Remainder with the sign of the dividend (C's `fmod`). Of integers: 0 if the divisor is 0.
    Rem,
    Pow,
    Max,
    Min,
    Lt,
    Le,
    Eq,
    And,
    Or,
    Xor,
    /// To the left; zeros come in.
    Shl,
    /// To the right; zeros come in, whatever the sign.
    Shr,
}

impl Binary {
    /// True if the result is `bool` for every operand type.
    pub fn compares(self) -> bool {
        matches!(self, Binary::Lt | Binary::Le | Binary::Eq)
    }
}

/// One instruction; operands are indices of earlier instructions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A literal. Integers are exact up to 2^53.
    Const(#[serde(with = "literal")] f64),
    /// The value of the kernel's input with this number, at the current index.
    Input(u32),
    /// The current index along this axis of the kernel's index space, as an integer.
    Index(u32),
    /// The result of the row kernel's reduction with this number, for the current row.
    #[serde(rename = "fold")]
    Reduction(u32),
    /// An operation on one value.
    Unary(Unary, u32),
    /// An operation on two values of one type.
    Binary(Binary, u32, u32),
    /// `Select(c, a, b)`: `a` if `c` is true, else `b`.
    Select(u32, u32, u32),
    /// Conversion to the instruction's own type. To `bool`: not equal to zero. Float to integer: truncated and
    /// saturated. Integer to integer: the lowest bits.
    Cast(u32),
    /// The bits of a value, read as the instruction's own type: `f32` as `i32`, `f64` as `i64`, and back.
    Bits(u32),
}

impl Code {
    /// The same operation on other operands.
    pub fn map(self, at: impl Fn(u32) -> u32) -> Code {
        match self {
            Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Reduction(_) => self,
            Code::Unary(op, a) => Code::Unary(op, at(a)),
            Code::Binary(op, a, b) => Code::Binary(op, at(a), at(b)),
            Code::Select(c, a, b) => Code::Select(at(c), at(a), at(b)),
            Code::Cast(a) => Code::Cast(at(a)),
            Code::Bits(a) => Code::Bits(at(a)),
        }
    }

    /// The operands: instructions, in order.
    pub fn operands(self) -> impl Iterator<Item = u32> {
        let list = match self {
            Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Reduction(_) => [None; 3],
            Code::Unary(_, a) | Code::Cast(a) | Code::Bits(a) => [Some(a), None, None],
            Code::Binary(_, a, b) => [Some(a), Some(b), None],
            Code::Select(c, a, b) => [Some(c), Some(a), Some(b)],
        };
        list.into_iter().flatten()
    }
}

/// An instruction and the type of its result. Arithmetic on small integers may leave their range, so [`Body::new`]
/// computes it in a [wider](DType::wide) type and casts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instr {
    /// The operation.
    pub code: Code,
    /// The type of the result.
    pub dtype: DType,
}

/// Straight-line code with one or more results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Body {
    /// Instructions in order of evaluation, each once.
    pub code: Vec<Instr>,
    /// The instructions that compute the results.
    pub results: Vec<u32>,
}

/// An operation. The operands that its code names are positions in `operands`.
#[derive(Debug)]
struct Tree {
    code: Code,
    operands: Vec<Expr>,
    dtype: DType,
    /// True if the value depends on the index.
    is_indexed: bool,
}

/// A scalar expression. Cheap to clone; clones share their branches.
#[derive(Clone, Debug)]
pub struct Expr(Arc<Tree>);

impl Expr {
    fn new(code: Code, operands: &[&Expr], dtype: DType) -> Expr {
        let is_indexed = matches!(code, Code::Index(_)) || operands.iter().any(|operand| operand.is_indexed());
        Expr(Arc::new(Tree { code, operands: operands.iter().copied().cloned().collect(), dtype, is_indexed }))
    }

    /// A literal of the given type.
    pub fn lit(value: f64, dtype: DType) -> Expr {
        Expr::new(Code::Const(value), &[], dtype)
    }

    /// The kernel's input with this number.
    pub fn input(number: usize, dtype: DType) -> Expr {
        Expr::new(Code::Input(number as u32), &[], dtype)
    }

    /// The current index along `axis`, as `i64`.
    pub fn index(axis: usize) -> Expr {
        Expr::new(Code::Index(axis as u32), &[], DType::I64)
    }

    /// The result of a row kernel's reduction.
    pub fn reduction(number: usize, dtype: DType) -> Expr {
        Expr::new(Code::Reduction(number as u32), &[], dtype)
    }

    /// The type of the value.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// True if the value depends on the index of the element.
    pub fn is_indexed(&self) -> bool {
        self.0.is_indexed
    }

    /// The literal's value, if this is one.
    pub fn as_lit(&self) -> Option<f64> {
        if let Code::Const(value) = self.0.code { Some(value) } else { None }
    }

    /// A literal of this expression's type.
    pub fn like(&self, value: f64) -> Expr {
        Expr::lit(value, self.dtype())
    }

    /// An operation on this value.
    pub fn unary(&self, op: Unary) -> Expr {
        Expr::new(Code::Unary(op, 0), &[self], self.dtype())
    }

    /// An operation on this value and another of its type.
    pub fn binary(&self, op: Binary, other: &Expr) -> Expr {
        let dtype = if op.compares() { DType::Bool } else { self.dtype() };
        Expr::new(Code::Binary(op, 0, 1), &[self, other], dtype)
    }

    /// `a` if this `bool` is true, else `b`.
    pub fn select(&self, a: &Expr, b: &Expr) -> Expr {
        Expr::new(Code::Select(0, 1, 2), &[self, a, b], a.dtype())
    }

    /// Conversion to another type.
    pub fn cast(&self, dtype: DType) -> Expr {
        if dtype == self.dtype() { self.clone() } else { Expr::new(Code::Cast(0), &[self], dtype) }
    }

    /// The bits, read as another type. Those of two integer types are the same as a conversion gives.
    pub fn bits(&self, dtype: DType) -> Expr {
        let as_int = |dtype: DType| if dtype.size() == 8 { DType::I64 } else { DType::I32 };
        match (self.dtype().is_float(), dtype.is_float()) {
            (true, true) | (false, false) => self.cast(dtype),
            (true, false) => Expr::new(Code::Bits(0), &[self], as_int(dtype)).cast(dtype),
            (false, true) => Expr::new(Code::Bits(0), &[&self.cast(as_int(self.dtype()))], dtype),
        }
    }
}

macro_rules! methods {
    (unary: $($name:ident $op:ident),*; binary: $($name2:ident $op2:ident),*) => {
        #[allow(missing_docs)]
        impl Expr {
            $(pub fn $name(&self) -> Expr { self.unary(Unary::$op) })*
            $(pub fn $name2(&self, other: &Expr) -> Expr { self.binary(Binary::$op2, other) })*
        }
    };
}
methods! {
    unary: abs Abs, sign Sign, exp Exp, log Log, sqrt Sqrt, recip Recip, sin Sin, cos Cos, tanh Tanh, erf Erf,
        floor Floor, ceil Ceil, round Round, not Not;
    binary: pow Pow, max Max, min Min, rem Rem, lt Lt, le Le, eq Eq, and And, or Or, xor Xor, shl Shl, shr Shr
}

macro_rules! operators {
    ($($trait:ident $method:ident),*) => {$(
        impl ops::$trait<&Expr> for &Expr {
            type Output = Expr;
            fn $method(self, other: &Expr) -> Expr { self.binary(Binary::$trait, other) }
        }
        impl ops::$trait<Expr> for &Expr {
            type Output = Expr;
            fn $method(self, other: Expr) -> Expr { self.binary(Binary::$trait, &other) }
        }
        impl ops::$trait<&Expr> for Expr {
            type Output = Expr;
            fn $method(self, other: &Expr) -> Expr { self.binary(Binary::$trait, other) }
        }
        impl ops::$trait<Expr> for Expr {
            type Output = Expr;
            fn $method(self, other: Expr) -> Expr { self.binary(Binary::$trait, &other) }
        }
        impl ops::$trait<f64> for &Expr {
            type Output = Expr;
            fn $method(self, other: f64) -> Expr { self.binary(Binary::$trait, &self.like(other)) }
        }
        impl ops::$trait<f64> for Expr {
            type Output = Expr;
            fn $method(self, other: f64) -> Expr { self.binary(Binary::$trait, &self.like(other)) }
        }
    )*};
}
operators!(Add add, Sub sub, Mul mul, Div div);

impl ops::Neg for &Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        self.unary(Unary::Neg)
    }
}

impl ops::Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        self.unary(Unary::Neg)
    }
}

/// True if the result on small integers may leave their range, or needs the bits of an `i32`.
fn leaves_range(op: Binary) -> bool {
    use Binary::{Add, Div, Mul, Pow, Shl, Shr, Sub};
    matches!(op, Add | Sub | Mul | Div | Pow | Shl | Shr)
}

/// Interns instructions while a body is built.
#[derive(Default)]
struct Interner {
    body: Body,
    seen: FastMap<(Key, DType), u32>,
    trees: FastMap<*const Tree, u32>,
}

#[derive(PartialEq, Eq, Hash)]
enum Key {
    Const(u64),
    Input(u32),
    Index(u32),
    Reduction(u32),
    Unary(Unary, u32),
    Binary(Binary, u32, u32),
    Select(u32, u32, u32),
    Cast(u32),
    Bits(u32),
}

impl Interner {
    fn push(&mut self, code: Code, dtype: DType) -> u32 {
        let key = match code {
            Code::Const(v) => Key::Const(v.to_bits()),
            Code::Input(i) => Key::Input(i),
            Code::Index(i) => Key::Index(i),
            Code::Reduction(i) => Key::Reduction(i),
            Code::Unary(op, a) => Key::Unary(op, a),
            Code::Binary(op, a, b) => Key::Binary(op, a, b),
            Code::Select(c, a, b) => Key::Select(c, a, b),
            Code::Cast(a) => Key::Cast(a),
            Code::Bits(a) => Key::Bits(a),
        };
        *self.seen.entry((key, dtype)).or_insert_with(|| {
            self.body.code.push(Instr { code, dtype });
            self.body.code.len() as u32 - 1
        })
    }

    /// Pushes an instruction. Arithmetic on [small](DType::is_small_int) integers wraps around after each operation, so that storing a value
    /// in between makes no difference.
    fn push_wrapping(&mut self, code: Code, dtype: DType) -> u32 {
        if !dtype.is_small_int() {
            return self.push(code, dtype);
        }
        let held = dtype.wide();
        let wide = match code {
            Code::Unary(op @ (Unary::Neg | Unary::Abs), a) => Code::Unary(op, self.push(Code::Cast(a), held)),
            Code::Binary(op, a, b) if leaves_range(op) => {
                let [a, b] = [a, b].map(|value| self.push(Code::Cast(value), held));
                Code::Binary(op, a, b)
            }
            _ => return self.push(code, dtype),
        };
        let wide = self.push(wide, held);
        self.push(Code::Cast(wide), dtype)
    }

    /// Walks the shared tree in post-order with an explicit stack: fused chains can be thousands of operations deep.
    fn intern(&mut self, root: &Expr) -> u32 {
        let mut stack = vec![(root, false)];
        while let Some((expr, expanded)) = stack.pop() {
            let id = Arc::as_ptr(&expr.0);
            if self.trees.contains_key(&id) {
                continue;
            }
            let Tree { code, operands, dtype, .. } = &*expr.0;
            if !expanded {
                stack.push((expr, true));
                stack.extend(operands.iter().rev().map(|operand| (operand, false)));
                continue;
            }
            let code = code.map(|k| self.trees[&Arc::as_ptr(&operands[k as usize].0)]);
            let number = self.push_wrapping(code, *dtype);
            self.trees.insert(id, number);
        }
        self.trees[&Arc::as_ptr(&root.0)]
    }
}

impl Drop for Expr {
    /// Unlinks long chains iteratively, so that dropping one cannot overflow the stack.
    fn drop(&mut self) {
        let take = |expr: &mut Expr| Arc::get_mut(&mut expr.0).map(|tree| std::mem::take(&mut tree.operands));
        let mut stack = take(self).unwrap_or_default();
        while let Some(mut expr) = stack.pop() {
            stack.extend(take(&mut expr).unwrap_or_default());
        }
    }
}

impl Body {
    /// Straight-line code for the given results.
    pub fn new(results: &[Expr]) -> Body {
        let mut interner = Interner::default();
        let results = results.iter().map(|e| interner.intern(e)).collect();
        Body { results, ..interner.body }
    }

    /// The code that returns input 0 unchanged.
    pub fn identity(dtype: DType) -> Body {
        Body::new(&[Expr::input(0, dtype)])
    }

    /// True if the code returns input 0 unchanged.
    pub fn is_identity(&self) -> bool {
        matches!((&self.code[..], &self.results[..]), ([Instr { code: Code::Input(0), .. }], [0]))
    }

    /// Marks the instructions that a result depends on. Operands that are not earlier instructions are ignored.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.code.len()];
        for &result in &self.results {
            if let Some(live) = live.get_mut(result as usize) {
                *live = true;
            }
        }
        for (i, instr) in self.code.iter().enumerate().rev() {
            if live[i] {
                instr.code.operands().filter(|o| (*o as usize) < i).for_each(|o| live[o as usize] = true);
            }
        }
        live
    }

    /// Number of arithmetic instructions: the cost of one evaluation.
    pub fn cost(&self) -> usize {
        let free = |i: &&Instr| matches!(i.code, Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Reduction(_));
        self.code.len() - self.code.iter().filter(free).count()
    }

    /// Evaluates one element in `f64`. Tests compare every backend's code with it.
    pub fn eval(&self, inputs: &[f64], index: &[usize], reductions: &[f64]) -> Vec<f64> {
        let mut values: Vec<f64> = Vec::with_capacity(self.code.len());
        for instr in &self.code {
            let int = !instr.dtype.is_float();
            let v = |i: u32| values[i as usize];
            let value = match instr.code {
                Code::Const(value) => value,
                Code::Input(i) => inputs[i as usize],
                Code::Index(axis) => index[axis as usize] as f64,
                Code::Reduction(i) => reductions[i as usize],
                Code::Unary(op, a) if instr.dtype == DType::U64 => small(unary(op, v(a)), false, DType::U64),
                Code::Unary(op, a) => unary(op, v(a)),
                Code::Binary(op, a, b) => match binary(op, v(a), v(b), int) {
                    value if matches!(instr.dtype, DType::I32 | DType::U64) && value.is_finite() => {
                        small(value, false, instr.dtype)
                    }
                    value => value,
                },
                Code::Select(c, a, b) => v(if v(c) != 0.0 { a } else { b }),
                Code::Cast(a) => match instr.dtype {
                    DType::Bool => f64::from(v(a) != 0.0),
                    d if d.is_small_int() || d == DType::U64 => small(v(a), self.code[a as usize].dtype.is_float(), d),
                    d if d.is_int() => v(a).trunc(),
                    _ => v(a),
                },
                Code::Bits(a) => bits(v(a), instr.dtype),
            };
            values.push(value);
        }
        self.results.iter().map(|&r| values[r as usize]).collect()
    }
}

/// The bits of a value of a type as wide as `dtype`, read as that. Of an `i64` beyond 2^53 they are rounded.
pub(crate) fn bits(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::I32 => ((value as f32).to_bits() as i32).into(),
        DType::F32 => f32::from_bits(value as i64 as u32).into(),
        DType::F64 => f64::from_bits(value as i64 as u64),
        _ => value.to_bits() as i64 as f64,
    }
}

pub fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sign if x == 0.0 => 0.0,
        Unary::Sign => x.signum(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Erf => libm::erf(x),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Not => f64::from(x == 0.0),
    }
}

/// Converts a value to an integer type: a float saturates, and is 0 if it is no number; an integer keeps its lowest bits.
pub fn small(value: f64, float: bool, dtype: DType) -> f64 {
    let (low, high) = dtype.range();
    match value.trunc() {
        nan if nan.is_nan() => 0.0,
        whole if float => whole.clamp(low, high),
        whole if (low..=high).contains(&whole) => whole,
        whole => low + (whole - low).rem_euclid((high - low).floor() + 1.0),
    }
}

/// `a^b` of integers, wrapping around. A fraction becomes 0.
pub fn power(a: i64, b: i64) -> i64 {
    match (u64::try_from(b), a) {
        (Ok(b), _) => wrapping_power(a, b),
        (_, 1) => 1,
        (_, -1) if b % 2 == 0 => 1,
        (_, -1) => -1,
        _ => 0,
    }
}

/// The lowest 64 bits of `a^b`, whether `a` has a sign or not.
pub fn wrapping_power(mut a: i64, mut b: u64) -> i64 {
    let mut result = 1i64;
    while b > 0 {
        if b & 1 == 1 {
            result = result.wrapping_mul(a);
        }
        a = a.wrapping_mul(a);
        b >>= 1;
    }
    result
}

/// The larger value. NaN if either is NaN.
pub fn maximum(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The smaller value. NaN if either is NaN.
pub fn minimum(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}

pub(crate) fn binary(op: Binary, a: f64, b: f64, int: bool) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div | Binary::Rem if int && b == 0.0 => 0.0,
        Binary::Div if int => (a / b).trunc(),
        Binary::Div => a / b,
        Binary::Rem => a % b,
        Binary::Pow if int => a.powf(b).trunc(),
        Binary::Pow => a.powf(b),
        Binary::Max => maximum(a, b),
        Binary::Min => minimum(a, b),
        Binary::Lt => f64::from(a < b),
        Binary::Le => f64::from(a <= b),
        Binary::Eq => f64::from(a == b),
        Binary::And if int => (a as i64 & b as i64) as f64,
        Binary::Or if int => (a as i64 | b as i64) as f64,
        Binary::Xor if int => (a as i64 ^ b as i64) as f64,
        Binary::And => f64::from(a != 0.0 && b != 0.0),
        Binary::Or => f64::from(a != 0.0 || b != 0.0),
        Binary::Xor => f64::from((a != 0.0) != (b != 0.0)),
        Binary::Shl | Binary::Shr => shift(op, a as i64 as i32, b as i64 as i32).into(),
    }
}

/// A shift of 32 bits; of other operations, none.
pub fn shift(op: Binary, bits: i32, count: i32) -> i32 {
    match op {
        Binary::Shl => bits.wrapping_shl(count as u32),
        _ => (bits as u32).wrapping_shr(count as u32) as i32,
    }
}

/// Serializes a float. Infinities and NaN become text, because JSON has none.
pub(crate) mod literal {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Literal {
        Number(f64),
        Text(String),
    }

    pub fn serialize<S: Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() { value.serialize(s) } else { value.to_string().serialize(s) }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        match Literal::deserialize(d)? {
            Literal::Number(value) => Ok(value),
            Literal::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_subexpressions_stand_once() {
        let x = Expr::input(0, DType::F32);
        let y = (&x * 2.0) + (&x * 2.0);
        let body = Body::new(&[y.clone(), y.exp()]);
        assert_eq!(body.code.len(), 5, "{body:?}");
        assert_eq!(body.eval(&[3.0], &[], &[]), [12.0, 12f64.exp()]);
    }

    #[test]
    fn small_integers_wrap_wherever_they_are_computed() {
        let value = |e: Expr, inputs: &[f64]| Body::new(&[e]).eval(inputs, &[], &[250.0 + 10.0])[0];
        let [a, b] = [0, 1].map(|i| Expr::input(i, DType::U8));
        assert_eq!(value((&a + &b).cast(DType::F32), &[200.0, 100.0]), 44.0);
        assert_eq!(value((&a - &b) / &a.like(2.0), &[1.0, 2.0]), 127.0);
        assert_eq!(value(Expr::reduction(0, DType::I32).cast(DType::U8).cast(DType::F32), &[]), 4.0);
        let c = Expr::input(0, DType::I8);
        assert_eq!(value((-&c).cast(DType::I64), &[-128.0]), -128.0);
        assert_eq!(value(c.pow(&c.like(3.0)).cast(DType::I32), &[10.0]), -24.0);
        let [wide, real] = [DType::I32, DType::F32].map(|dtype| Expr::input(0, dtype));
        assert_eq!(value(wide.cast(DType::U8).cast(DType::F32), &[-1.0]), 255.0);
        assert_eq!(value(real.cast(DType::U8).cast(DType::F32), &[-1.0]), 0.0);
        assert_eq!(value(real.cast(DType::I8), &[f64::NAN]), 0.0);
    }

    #[test]
    fn deep_chains_neither_blow_up_nor_overflow() {
        let mut x = Expr::input(0, DType::F32);
        for _ in 0..200_000 {
            x = &x * &x.like(1.0) + 1.0;
        }
        assert_eq!(Body::new(&[x]).eval(&[0.0], &[], &[]), [200_000.0]);
    }

    #[test]
    fn json_keeps_what_json_lacks() {
        let body = Body::new(&[Expr::lit(f64::NEG_INFINITY, DType::F32), Expr::lit(0.1, DType::F32)]);
        let text = serde_json::to_string(&body).expect("serialises");
        assert_eq!(serde_json::from_str::<Body>(&text).expect("reads back"), body);
    }
}
