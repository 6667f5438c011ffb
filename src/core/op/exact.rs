//! The meaning of a call on tensors, in their own types. Constant folding uses it.
//!
//! `f64` is exact for every type but `i64` and `u64`. So a row that only moves elements moves their bytes. Elementwise rows and
//! plain reductions of integers compute in integers, which wrap around as they do in kernels.

use super::fact::{Fact, OpResult};
use super::input::Arity;
use super::{Args, Call, Eval, Lower, Tensors};
use crate::dtype::DType;
use crate::expr::{self, Binary, Body, Code, Expr, Instr, Unary};
use crate::kernel::Reduction;
use crate::shape::{Access, Shape, indices};
use crate::tensor::Tensor;

impl Call<'_> {
    /// Computes every output from these inputs.
    ///
    /// The result is exact, with one exception: integers beyond 2^53 in a row that is not elementwise, not a plain
    /// reduction, and does more than move elements.
    ///
    /// # Errors
    /// The reason why the row refuses the call.
    pub fn compute(&self, inputs: &[Option<&Tensor>]) -> OpResult<Vec<Tensor>> {
        let facts = self.infer()?;
        let any =
            |is: fn(DType) -> bool| self.inputs.iter().flatten().copied().chain(&facts).any(|fact| is(fact.dtype));
        // Narrow numbers are few: `f64` has all of them.
        let ints = any(DType::is_int) && !any(DType::is_narrow);
        match (self.op.lower, self.op.eval) {
            (Lower::View(view), _) if inputs.first().is_some_and(Option::is_some) => {
                if let Some(access) = view(self, &Access::contiguous(self.shape(0).clone())) {
                    return Ok(inputs[..1].iter().flatten().map(|input| input.gather(&access)).collect());
                }
            }
            (_, Eval::Known(f)) => return Ok(vec![f(self)?]),
            (Lower::Concat, _) => return self.join(&facts[0], inputs).map(|t| vec![t]),
            (_, Eval::Move(f)) => return self.move_elements(f, &facts, inputs),
            (Lower::Map(f), _) if ints => return self.map_ints(f, &facts[0], inputs).map(|t| vec![t]),
            (Lower::Reduce(reduction), _) if ints => {
                return self.reduce_ints(reduction, &facts[0], inputs).map(|t| vec![t]);
            }
            _ => {}
        }
        let values: Vec<_> = inputs.iter().map(|input| input.map(Tensor::to_f64)).collect();
        let values: Vec<_> = values.iter().map(Option::as_deref).collect();
        let tensor = |(fact, values): (&Fact, Vec<f64>)| Tensor::from_f64(fact.dtype, fact.shape.clone(), &values);
        Ok(facts.iter().zip(self.eval(&values)?).map(tensor).collect())
    }

    /// Concatenates the inputs along attribute `axis`, run by run.
    fn join(&self, fact: &Fact, inputs: &[Option<&Tensor>]) -> OpResult<Tensor> {
        let outer: usize = fact.shape[..self.axis("axis", 0, &fact.shape)?].iter().product();
        let mut bytes = Vec::with_capacity(fact.shape.numel() * fact.dtype.size());
        for o in 0..outer {
            for (slot, input) in inputs.iter().enumerate() {
                let input = input.ok_or_else(|| format!("input {slot} has no value"))?.bytes();
                let run = input.len() / outer;
                bytes.extend_from_slice(&input[o * run..][..run]);
            }
        }
        Tensor::new(fact.dtype, fact.shape.clone(), bytes).map_err(|e| e.to_string())
    }

    /// Moves elements of any type: numbers the elements, moves the numbers in `f64`, then copies the elements.
    fn move_elements(&self, rule: Tensors, facts: &[Fact], inputs: &[Option<&Tensor>]) -> OpResult<Vec<Tensor>> {
        let variadic = self.op.inputs.first().is_some_and(|input| input.arity == Arity::Variadic);
        let moved = if variadic { inputs.len() } else { 1 };
        let mut bytes = Vec::new();
        let mut values = Vec::with_capacity(inputs.len());
        let mut next = 0;
        for (slot, input) in inputs.iter().enumerate() {
            let Some(tensor) = input else { return Err(format!("input {slot} has no value")) };
            values.push(if slot < moved {
                let first = next;
                next += tensor.shape().numel();
                bytes.extend_from_slice(tensor.bytes());
                (first..next).map(|number| number as f64).collect()
            } else {
                tensor.to_f64()
            });
        }
        let values: Vec<_> = values.iter().map(|values: &Vec<f64>| Some(values.as_slice())).collect();
        let outputs = rule(&Args(&values), self)?.into_iter().zip(facts).map(|(numbers, fact)| {
            let size = fact.dtype.size();
            let element = |number: &f64| &bytes[*number as usize * size..][..size];
            let bytes: Vec<u8> = numbers.iter().flat_map(element).copied().collect();
            Tensor::new(fact.dtype, fact.shape.clone(), bytes).map_err(|e| e.to_string())
        });
        outputs.collect()
    }

    /// Runs the code of the elementwise kernel on integers.
    fn map_ints(&self, lower: fn(&Args, &Call) -> Expr, fact: &Fact, inputs: &[Option<&Tensor>]) -> OpResult<Tensor> {
        let body = Body::new(&[self.map(lower)]);
        let mut operands = Vec::with_capacity(inputs.len());
        for tensor in inputs {
            operands.push(
                tensor.map(|tensor| {
                    (Values::of(tensor), Access::contiguous(tensor.shape().clone()).broadcast(&fact.shape))
                }),
            );
        }
        let mut out = Values::new(fact.dtype);
        let mut values = Vec::with_capacity(body.code.len());
        for index in indices(&fact.shape) {
            let input = |slot: u32| match operands.get(slot as usize) {
                Some(Some((values, access))) => values.at(access.at(&index) as usize),
                _ => Value::Float(f64::NAN),
            };
            values.clear();
            for &Instr { code, dtype } in &body.code {
                let value = step(code, dtype, &values, &input, &index);
                values.push(value);
            }
            out.push(values[body.results[0] as usize]);
        }
        Ok(out.tensor(fact))
    }

    fn reduce_ints(&self, reduction: Reduction, fact: &Fact, inputs: &[Option<&Tensor>]) -> OpResult<Tensor> {
        let values = inputs[0].and_then(Tensor::to_integers).ok_or("input 'data' has no value")?;
        let (axes, shape) = (self.reduced_axes()?, self.shape(0));
        let kept: Shape = (0..shape.len()).map(|k| if axes.contains(&k) { 1 } else { shape[k] }).collect();
        let results = Access::contiguous(kept).broadcast(shape);
        let (low, high) = bounds(fact.dtype);
        let (start, op) = match reduction {
            Reduction::Sum => (0, Binary::Add),
            Reduction::Prod => (1, Binary::Mul),
            Reduction::Max => (low, Binary::Max),
            Reduction::Min => (high, Binary::Min),
        };
        let mut out = vec![start; fact.shape.numel()];
        for (value, result) in values.into_iter().zip(results.elements()) {
            let at = &mut out[result as usize];
            *at = wrap(integers(op, *at, value), fact.dtype);
        }
        Ok(Values::Ints(out).tensor(fact))
    }
}

/// An element. A `bool` is the integer 0 or 1.
#[derive(Clone, Copy)]
enum Value {
    Int(i128),
    Float(f64),
}

impl Value {
    fn float(self) -> f64 {
        match self {
            Value::Int(v) => v as f64,
            Value::Float(v) => v,
        }
    }

    fn holds(self) -> bool {
        self.float() != 0.0
    }
}

enum Values {
    Ints(Vec<i128>),
    Floats(Vec<f64>),
}

impl Values {
    fn new(dtype: DType) -> Values {
        if dtype.is_float() { Values::Floats(Vec::new()) } else { Values::Ints(Vec::new()) }
    }

    fn of(tensor: &Tensor) -> Values {
        tensor.to_integers().map_or_else(|| Values::Floats(tensor.to_f64()), Values::Ints)
    }

    fn at(&self, i: usize) -> Value {
        match self {
            Values::Ints(values) => Value::Int(values[i]),
            Values::Floats(values) => Value::Float(values[i]),
        }
    }

    fn push(&mut self, value: Value) {
        match (self, value) {
            (Values::Ints(values), Value::Int(v)) => values.push(v),
            (Values::Ints(values), Value::Float(v)) => values.push(v as i128),
            (Values::Floats(values), v) => values.push(v.float()),
        }
    }

    fn tensor(self, fact: &Fact) -> Tensor {
        let shape = fact.shape.clone();
        match self {
            Values::Ints(values) if fact.dtype.size() == 8 => {
                // Of both types with eight bytes, these are the lowest bits.
                let bytes: Vec<u8> = values.into_iter().flat_map(|v| (v as u64).to_le_bytes()).collect();
                Tensor::new(fact.dtype, shape, bytes).expect("one value per element was pushed")
            }
            Values::Ints(values) => {
                Tensor::from_f64(fact.dtype, shape, &values.into_iter().map(|v| v as f64).collect::<Vec<_>>())
            }
            Values::Floats(values) => Tensor::from_f64(fact.dtype, shape, &values),
        }
    }
}

/// The smallest and the largest value of an integer type or `bool`.
fn bounds(dtype: DType) -> (i128, i128) {
    match dtype {
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::Bool => (0, 1),
        _ => (i64::MIN.into(), i64::MAX.into()),
    }
}

/// The value of the type with the same lowest bits.
fn wrap(value: i128, dtype: DType) -> i128 {
    if dtype == DType::Bool {
        return (value != 0).into();
    }
    let (low, high) = bounds(dtype);
    if (low..=high).contains(&value) { value } else { low + (value - low).rem_euclid(high - low + 1) }
}

fn step(code: Code, dtype: DType, values: &[Value], input: &dyn Fn(u32) -> Value, index: &[usize]) -> Value {
    let v = |i: u32| values[i as usize];
    let value = match code {
        Code::Const(value) if dtype.is_float() => Value::Float(value),
        Code::Const(value) => Value::Int(value as i128),
        Code::Input(slot) => input(slot),
        Code::Index(axis) => Value::Int(index[axis as usize] as i128),
        Code::Reduction(_) => unreachable!("elementwise code has no reductions"),
        Code::Unary(op, a) => match (op, v(a)) {
            (Unary::Neg, Value::Int(a)) => Value::Int(a.wrapping_neg()),
            (Unary::Abs, Value::Int(a)) => Value::Int(a.wrapping_abs()),
            (Unary::Sign, Value::Int(a)) => Value::Int(a.signum()),
            (Unary::Not, a) => Value::Int((!a.holds()).into()),
            (op, a) => Value::Float(expr::unary(op, a.float())),
        },
        Code::Binary(op, a, b) => match (v(a), v(b)) {
            (Value::Int(a), Value::Int(b)) => Value::Int(integers(op, a, b)),
            (a, b) if dtype.is_float() => Value::Float(expr::binary(op, a.float(), b.float(), false)),
            (a, b) => Value::Int((expr::binary(op, a.float(), b.float(), false) != 0.0).into()),
        },
        Code::Select(c, a, b) => v(if v(c).holds() { a } else { b }),
        Code::Bits(a) => match (v(a), dtype) {
            (Value::Int(a), DType::F64) => Value::Float(f64::from_bits(a as u64)),
            (Value::Int(a), _) => Value::Float(expr::bits(a as f64, dtype)),
            (Value::Float(a), DType::I64) => Value::Int((a.to_bits() as i64).into()),
            (Value::Float(a), _) => Value::Int(expr::bits(a, dtype) as i128),
        },
        Code::Cast(a) => match v(a) {
            a if dtype == DType::Bool => Value::Int(a.holds().into()),
            // Rounded once.
            Value::Int(a) if dtype == DType::F32 => Value::Float((a as f32).into()),
            a if dtype.is_float() => Value::Float(a.float()),
            Value::Int(a) => Value::Int(a),
            Value::Float(a) => {
                let (low, high) = bounds(dtype);
                Value::Int((a as i128).clamp(low, high))
            }
        },
    };
    match value {
        Value::Int(value) => Value::Int(wrap(value, dtype)),
        float => float,
    }
}

fn integers(op: Binary, a: i128, b: i128) -> i128 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div | Binary::Rem if b == 0 => 0,
        Binary::Div => a.wrapping_div(b),
        Binary::Rem => a.wrapping_rem(b),
        // Of a base or a count without a sign beyond `i64`, the lowest bits are the same.
        Binary::Pow if b < 0 => expr::power(a as i64, b as i64).into(),
        Binary::Pow => expr::wrapping_power(a as i64, b as u64).into(),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::Lt => (a < b).into(),
        Binary::Le => (a <= b).into(),
        Binary::Eq => (a == b).into(),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::Shl | Binary::Shr => expr::shift(op, a as i32, b as i32).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Attr, Attrs};
    use crate::ops::find;

    const ODD: i64 = (1 << 53) + 1;

    fn compute(op: &str, inputs: &[Tensor], attrs: Attrs) -> Vec<Tensor> {
        let facts: Vec<_> = inputs.iter().map(|t| Fact::new(t.dtype(), t.shape().clone())).collect();
        let facts: Vec<_> = facts.iter().map(Some).collect();
        let call = Call { op: find(op).expect("a row"), attrs: &attrs, inputs: &facts };
        call.compute(&inputs.iter().map(Some).collect::<Vec<_>>()).expect("values")
    }

    fn ints(values: &[i64]) -> Tensor {
        Tensor::from_i64([values.len()], values).expect("one axis")
    }

    fn result(op: &str, inputs: &[&[i64]], attrs: Attrs) -> Vec<i64> {
        let inputs: Vec<_> = inputs.iter().map(|values| ints(values)).collect();
        compute(op, &inputs, attrs)[0].to_i64().expect("integers")
    }

    #[test]
    fn integers_beyond_doubles_stay_what_they_are() {
        let ends = [ODD, i64::MIN, i64::MAX];
        let none = Attrs::new;
        assert_eq!(result("Add", &[&ends, &[0]], none()), ends);
        assert_eq!(result("Add", &[&[i64::MAX], &[1]], none()), [i64::MIN]);
        assert_eq!(result("Sub", &[&ends, &[1]], none()), [ODD - 1, i64::MAX, i64::MAX - 1]);
        assert_eq!(result("Mul", &[&[ODD], &[3]], none()), [3 * ODD]);
        assert_eq!(result("Div", &[&[ODD, i64::MIN, 7], &[1, -1, 0]], none()), [ODD, i64::MIN, 0]);
        assert_eq!(result("Mod", &[&[ODD, i64::MIN], &[10, 10]], none()), [ODD % 10, i64::MIN.rem_euclid(10)]);
        assert_eq!(result("Max", &[&ends, &[ODD - 1]], none()), [ODD, ODD - 1, i64::MAX]);
        assert_eq!(result("Neg", &[&ends], none()), [-ODD, i64::MIN, -i64::MAX]);
        assert_eq!(result("Pow", &[&[3, -1, 2, 2], &[39, -3, -1, 64]], none()), [3i64.pow(39), -1, 0, 0]);
        assert_eq!(result("Equal", &[&[ODD], &[ODD - 1]], none()), [0]);
        assert_eq!(result("Gather", &[&ends, &[2, 0, -2]], none()), [i64::MAX, ODD, i64::MIN]);
        assert_eq!(result("Concat", &[&ends, &[-ODD]], none().with("axis", 0)), [ODD, i64::MIN, i64::MAX, -ODD]);
        assert_eq!(result("Tile", &[&[ODD]], none().with("repeats", vec![2])), [ODD, ODD]);
        assert_eq!(result("Slice", &[&ends], none().with("starts", vec![2]).with("ends", vec![3])), [i64::MAX]);
        assert_eq!(result("ReduceSum", &[&[i64::MAX, i64::MIN, ODD]], none()), [ODD - 1]);
        assert_eq!(result("ReduceMax", &[&[ODD, ODD - 1]], none()), [ODD]);
        assert_eq!(result("ReduceMin", &[&[]], none()), [i64::MAX]);
        let halves = compute("Split", &[ints(&ends)], none().with("split", vec![1, 2]));
        assert_eq!(halves.iter().map(Tensor::to_i64).collect::<Vec<_>>(), [Some(vec![ODD]), Some(ends[1..].to_vec())]);
        let choice = Tensor::from_f64(DType::Bool, [3], &[1.0, 0.0, 1.0]);
        let chosen = compute("Where", &[choice, ints(&ends), ints(&[ODD + 1])], none());
        assert_eq!(chosen[0].to_i64(), Some(vec![ODD, ODD + 1, i64::MAX]));
    }

    #[test]
    fn conversions_round_once_and_saturate() {
        let cast = |t: Tensor, to: DType| compute("Cast", &[t], Attrs::new().with("to", to.onnx())).remove(0);
        // Halfway between two singles, and one more: by way of a double it would be rounded down.
        let above = (1 << 60) + (1 << 36) + 1;
        assert_eq!(cast(ints(&[above]), DType::F32).to_f64(), [f64::from(above as f32)]);
        assert_ne!(above as f32, above as f64 as f32, "the case tells the two apart");
        let wild = Tensor::from_f64(DType::F32, [3], &[1e30, -1e30, f64::NAN]);
        assert_eq!(cast(wild.clone(), DType::I64).to_i64(), Some(vec![i64::MAX, i64::MIN, 0]));
        assert_eq!(cast(wild, DType::I32).to_i64(), Some(vec![i32::MAX.into(), i32::MIN.into(), 0]));
        assert_eq!(cast(ints(&[0, i64::MIN]), DType::Bool).to_i64(), Some(vec![0, 1]));
    }

    #[test]
    fn what_attributes_say_is_exact() {
        let range = Attrs::new().with("start", ODD).with("limit", ODD + 4).with("delta", 2);
        assert_eq!(compute("Range", &[], range)[0].to_i64(), Some(vec![ODD, ODD + 2]));
        let whole = Attrs::new().with("start", i64::MIN).with("limit", i64::MAX).with("delta", i64::MAX);
        assert_eq!(compute("Range", &[], whole)[0].to_i64(), Some(vec![i64::MIN, -1, i64::MAX - 1]));
        let filled = Attrs::new().with("input", vec![2]).with("value", Attr::Tensor(ints(&[ODD])));
        assert_eq!(compute("ConstantOfShape", &[], filled)[0].to_i64(), Some(vec![ODD; 2]));
        let given = Attrs::new().with("value_ints", vec![i64::MIN, ODD]);
        assert_eq!(compute("Constant", &[], given)[0].to_i64(), Some(vec![i64::MIN, ODD]));
    }
}
