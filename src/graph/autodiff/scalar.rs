//! The gradients of elementwise rows, from their expressions.

use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Expr, Instr, Unary};
use crate::op::{Args, Attrs, Back, Call, Nodes, OpResult, Var};
use std::f64::consts::FRAC_2_SQRT_PI;

/// Adds the nodes of the gradients of an elementwise call.
pub fn gradients<'g>(
    b: Nodes<'g>,
    call: &Call,
    map: fn(&Args, &Call) -> Expr,
    back: &Back<'_, 'g>,
) -> OpResult<Vec<Option<Var<'g>>>> {
    let inputs = call.inputs.iter().enumerate();
    let args: Vec<_> = inputs.map(|(slot, fact)| fact.map(|fact| Expr::input(slot, fact.dtype))).collect();
    let value = map(&Args(&args), call);
    let dy = Expr::input(args.len(), value.dtype());
    let derived = derivatives(&Body::new(&[value]), &dy, args.len());
    let (slots, wanted): (Vec<_>, Vec<_>) =
        derived.iter().enumerate().filter_map(|(slot, expr)| Some((slot, expr.clone()?))).unzip();
    let mut inputs: Vec<_> = (0..args.len()).map(|slot| back.x.given(slot)).collect();
    inputs.push(Some(back.first()?));
    let mut found = vec![None; args.len()];
    for (slot, var) in slots.into_iter().zip(nodes(b, &Body::new(&wanted), &inputs)?) {
        found[slot] = Some(var);
    }
    Ok(found)
}

/// Per input, `dy` times the derivative of the body's result; `None` where it is zero.
fn derivatives(body: &Body, dy: &Expr, inputs: usize) -> Vec<Option<Expr>> {
    let mut values: Vec<Expr> = Vec::with_capacity(body.code.len());
    for &Instr { code, dtype } in &body.code {
        values.push(match code {
            Code::Const(value) => Expr::lit(value, dtype),
            Code::Input(input) => Expr::input(input as usize, dtype),
            Code::Index(axis) => Expr::index(axis as usize),
            Code::Reduction(number) => Expr::reduction(number as usize, dtype),
            Code::Unary(op, a) => values[a as usize].unary(op),
            Code::Binary(op, a, b) => values[a as usize].binary(op, &values[b as usize]),
            Code::Select(c, a, b) => values[c as usize].select(&values[a as usize], &values[b as usize]),
            Code::Cast(a) => values[a as usize].cast(dtype),
            Code::Bits(a) => values[a as usize].bits(dtype),
        });
    }
    let mut found: Vec<Option<Expr>> = vec![None; values.len()];
    found[body.results[0] as usize] = Some(dy.clone());
    let mut of_inputs = vec![None; inputs];
    for at in (0..values.len()).rev() {
        let Some(g) = found[at].clone() else { continue };
        let mut add = |operand: u32, gradient: Expr| {
            let operand = operand as usize;
            if values[operand].dtype().is_float() {
                found[operand] = Some(plus(found[operand].take(), gradient));
            }
        };
        match body.code[at].code {
            Code::Input(input) => of_inputs[input as usize] = Some(g),
            Code::Unary(op, a) => {
                unary(op, &values[a as usize], &values[at], &g).into_iter().for_each(|gradient| add(a, gradient));
            }
            Code::Binary(op, a, b) => {
                for (operand, gradient) in
                    [a, b].into_iter().zip(binary(op, [a, b].map(|i| &values[i as usize]), &values[at], &g))
                {
                    gradient.into_iter().for_each(|gradient| add(operand, gradient));
                }
            }
            Code::Select(c, a, b) => {
                let (c, zero) = (&values[c as usize], g.like(0.0));
                add(a, c.select(&g, &zero));
                add(b, c.select(&zero, &g));
            }
            Code::Cast(a) => add(a, g.cast(values[a as usize].dtype())),
            // What bits stand for does not change smoothly.
            Code::Bits(_) | Code::Const(_) | Code::Index(_) | Code::Reduction(_) => {}
        }
    }
    of_inputs
}

fn plus(sum: Option<Expr>, more: Expr) -> Expr {
    match sum {
        Some(sum) => sum + more,
        None => more,
    }
}

/// The gradient of `y = op(x)`, given that of `y`; `None` if it is zero.
fn unary(op: Unary, x: &Expr, y: &Expr, g: &Expr) -> Option<Expr> {
    Some(match op {
        Unary::Neg => -g,
        Unary::Abs => g * x.sign(),
        Unary::Exp => g * y,
        Unary::Log => g / x,
        Unary::Sqrt => g * 0.5 / y,
        Unary::Recip => -(g * y * y),
        Unary::Sin => g * x.cos(),
        Unary::Cos => -(g * x.sin()),
        Unary::Tanh => g * (y.like(1.0) - y * y),
        Unary::Erf => g * ((-(x * x)).exp() * FRAC_2_SQRT_PI),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Not => return None,
    })
}

/// The gradients of `y = op(a, b)`. Two equal values share that of their larger or smaller one.
fn binary(op: Binary, [a, b]: [&Expr; 2], y: &Expr, g: &Expr) -> [Option<Expr>; 2] {
    let zero = g.like(0.0);
    // The gradient of the first, which is chosen where a condition holds.
    let chosen = |wins: Expr| Some(wins.select(g, &a.eq(b).select(&(g * 0.5), &zero)));
    match op {
        Binary::Add => [Some(g.clone()), Some(g.clone())],
        Binary::Sub => [Some(g.clone()), Some(-g)],
        Binary::Mul => [Some(g * b), Some(g * a)],
        Binary::Div => [Some(g / b), Some(-(g * y / b))],
        Binary::Rem => {
            let ratio = a / b;
            [Some(g.clone()), Some(-(g * (ratio.sign() * ratio.abs().floor())))]
        }
        Binary::Pow => {
            let base = zero.lt(a).select(&a.log(), &zero);
            // 0 to a negative power is infinite, but the derivative of x^0 is 0.
            let first = b.eq(&zero).select(&zero, &(g * b * a.pow(&(b - 1.0))));
            [Some(first), Some(g * y * base)]
        }
        Binary::Max => [chosen(b.lt(a)), chosen(a.lt(b))],
        Binary::Min => [chosen(a.lt(b)), chosen(b.lt(a))],
        Binary::Lt | Binary::Le | Binary::Eq => [None, None],
        Binary::And | Binary::Or | Binary::Xor | Binary::Shl | Binary::Shr => [None, None],
    }
}

/// Adds the nodes that compute the results of a body: one per instruction.
fn nodes<'g>(b: Nodes<'g>, body: &Body, inputs: &[Option<Var<'g>>]) -> OpResult<Vec<Var<'g>>> {
    let mut values: Vec<Var<'g>> = Vec::with_capacity(body.code.len());
    for &Instr { code, dtype } in &body.code {
        let at = |number: u32| values[number as usize];
        let apply = |op: &str, operands: &[Var<'g>]| b.op(op, operands, Attrs::new());
        let value = match code {
            Code::Const(value) => b.scalar(value, dtype),
            Code::Input(input) => inputs[input as usize].ok_or("a derivative reads an omitted input")?,
            Code::Unary(op, a) => apply(unary_row(op), &[at(a)]),
            Code::Binary(op @ (Binary::And | Binary::Or | Binary::Xor | Binary::Shl | Binary::Shr), ..)
                if dtype != DType::Bool =>
            {
                return Err(format!("no derivative of {op:?} on {dtype}"));
            }
            Code::Binary(Binary::Rem, a, c) => b.op("Mod", &[at(a), at(c)], Attrs::new().with("fmod", 1)),
            Code::Binary(op, a, c) => apply(binary_row(op), &[at(a), at(c)]),
            Code::Select(c, a, d) => apply("Where", &[at(c), at(a), at(d)]),
            Code::Cast(a) => at(a).cast(dtype),
            Code::Bits(a) => at(a).op("BitCast", &[], Attrs::new().with("to", dtype.onnx())),
            Code::Index(_) | Code::Reduction(_) => return Err("it depends on the index of an element".into()),
        };
        values.push(value);
    }
    Ok(body.results.iter().map(|&result| values[result as usize]).collect())
}

fn unary_row(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "Neg",
        Unary::Abs => "Abs",
        Unary::Sign => "Sign",
        Unary::Exp => "Exp",
        Unary::Log => "Log",
        Unary::Sqrt => "Sqrt",
        Unary::Recip => "Reciprocal",
        Unary::Sin => "Sin",
        Unary::Cos => "Cos",
        Unary::Tanh => "Tanh",
        Unary::Erf => "Erf",
        Unary::Floor => "Floor",
        Unary::Ceil => "Ceil",
        Unary::Round => "Round",
        Unary::Not => "Not",
    }
}

fn binary_row(op: Binary) -> &'static str {
    match op {
        Binary::Add => "Add",
        Binary::Sub => "Sub",
        Binary::Mul => "Mul",
        Binary::Div => "Div",
        Binary::Rem => "Mod",
        Binary::Pow => "Pow",
        Binary::Max => "Max",
        Binary::Min => "Min",
        Binary::Lt => "Less",
        Binary::Le => "LessOrEqual",
        Binary::Eq => "Equal",
        Binary::And => "And",
        Binary::Or => "Or",
        Binary::Xor => "Xor",
        Binary::Shl | Binary::Shr => "BitShift",
    }
}
