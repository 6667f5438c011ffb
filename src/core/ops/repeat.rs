//! Loops: `plimsoll.Repeat` runs a body so many times. It is one node, and one step of a plan, however long it runs.
//!
//! ```text
//! carried --+-> body --+-> carried of the next step ... carried after the last
//! x[t] -----+          '-> y[t]
//! captured -'
//! ```

use super::ensure;
use crate::dtype::DType;
use crate::op::{
    Args, Attr, Attrs, Body, BodyKind, BodyNode, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Sample, Var, build,
    inputs, names,
};
use crate::shape::Shape;
use std::sync::Arc;

/// The row of loops.
pub const REPEAT: &str = "plimsoll.Repeat";

pub(super) static OPS: &[OpDef] = &[OpDef::new(
    REPEAT,
    "Runs `body` step after step: `carried` inputs are what each step hands on to the next, `scanned` ones are read row by row along the \
     first axis, the others are the same for all steps. There are as many steps as rows, or `times` without such. Gives the carried values after the last step, and of each further output of the body \
     one row per step. With `reverse` the last rows come first",
    inputs![values*],
    |call| Loop::of(call)?.facts(),
    Eval::Tensor(eval),
    Lower::Repeat,
)
.attrs(names![body times carried scanned reverse])
.flop(|call| Loop::of(call).map_or(0.0, |of| of.times as f64 * flop(of.body)))
.sample(sample)];

/// A loop, as a call of its row says it.
pub struct Loop<'a> {
    /// What a step computes.
    pub body: &'a Arc<Body>,
    /// The number of steps.
    pub times: usize,
    /// Inputs that are handed on: the first of the call, of the body, and of both outputs.
    pub carried: usize,
    /// Inputs that are read row by row, behind those.
    pub scanned: usize,
    /// True if the last row comes first.
    pub reverse: bool,
}

impl<'a> Loop<'a> {
    /// The loop of a call.
    ///
    /// # Errors
    /// When an attribute is missing, or an input is not what the body takes.
    pub fn of(call: &Call<'a>) -> OpResult<Loop<'a>> {
        let body = match call.attrs.get("body") {
            Some(Attr::Body(body)) => body,
            other => {
                let found = other.map_or("none", Attr::kind);
                return Err(format!("attribute 'body': expected a graph, found {found}"));
            }
        };
        let number = |name: &str| {
            let found = call.int(name, 0)?;
            usize::try_from(found).map_err(|_| format!("attribute '{name}': expected 0 or more, found {found}"))
        };
        let (carried, scanned) = (number("carried")?, number("scanned")?);
        let rows = call.inputs.get(carried).copied().flatten().filter(|_| scanned > 0);
        let times = match rows {
            Some(rows) => *rows.shape.first().ok_or("expected rows to walk along, found a scalar")?,
            None => number("times")?,
        };
        let of = Loop { body, times, carried, scanned, reverse: call.int("reverse", 0)? != 0 };
        of.check(call)?;
        Ok(of)
    }

    fn check(&self, call: &Call) -> OpResult<()> {
        let (taken, given) = (self.body.inputs().len(), call.inputs.len());
        ensure(taken == given && self.carried.saturating_add(self.scanned) <= given, || {
            format!("expected {taken} inputs, {} carried and {} scanned, found {given}", self.carried, self.scanned)
        })?;
        ensure(self.times < i32::MAX as usize, || format!("expected fewer than 2^31 steps, found {}", self.times))?;
        for (input, fact) in self.body.inputs().iter().enumerate() {
            let expected = if self.is_scanned(input) { self.rows_of(fact) } else { fact.clone() };
            let found = call.fact(input);
            ensure(*found == expected, || format!("input {input}: expected {expected}, found {found}"))?;
        }
        let handed = self.body.outputs().get(..self.carried).unwrap_or(&[]);
        let fits = handed.len() == self.carried
            && handed.iter().zip(self.body.inputs()).all(|(&output, fact)| self.body.fact_of(output) == fact);
        ensure(fits, || format!("expected a body that hands {} inputs on as they were", self.carried))
    }

    /// True for an input that is read row by row.
    pub fn is_scanned(&self, input: usize) -> bool {
        (self.carried..self.carried + self.scanned).contains(&input)
    }

    /// One row for each step.
    pub fn rows_of(&self, row: &Fact) -> Fact {
        let shape: Shape = std::iter::once(self.times).chain(row.shape.iter().copied()).collect();
        Fact::new(row.dtype, shape)
    }

    /// The row of a step.
    pub fn row(&self, step: usize) -> usize {
        if self.reverse { self.times - 1 - step } else { step }
    }

    fn facts(&self) -> OpResult<Vec<Fact>> {
        let outputs = self.body.outputs().iter().enumerate().map(|(port, &value)| {
            let fact = self.body.fact_of(value);
            if port < self.carried { fact.clone() } else { self.rows_of(fact) }
        });
        Ok(outputs.collect())
    }
}

/// Floating-point operations of a step: those of products, and one for each other element.
fn flop(body: &Body) -> f64 {
    let of = |node: &BodyNode| {
        let facts: Vec<_> = node.inputs.iter().map(|value| value.map(|value| body.fact_of(value))).collect();
        match &node.kind {
            BodyKind::Constant(_) => 0.0,
            BodyKind::Op(op, attrs) => match op.flop {
                Some(flop) => flop(&Call { op, attrs, inputs: &facts }),
                None => node.outputs.iter().map(|fact| fact.shape.numel() as f64).sum(),
            },
        }
    };
    body.nodes().iter().map(of).sum()
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let of = Loop::of(call)?;
    let facts = of.facts()?;
    let mut results: Vec<Vec<f64>> = (0..of.carried).map(|input| x[input].to_vec()).collect();
    results.extend(facts[of.carried..].iter().map(|fact| vec![0.0; fact.shape.numel()]));
    for step in 0..of.times {
        let row = of.row(step);
        let given = of.body.inputs().iter().enumerate().map(|(input, fact)| {
            let len = fact.shape.numel();
            match input {
                _ if input < of.carried => results[input].clone(),
                _ if of.is_scanned(input) => x[input][row * len..][..len].to_vec(),
                _ => x[input].to_vec(),
            }
        });
        let made = of.body.eval(given.collect())?;
        for (port, values) in made.into_iter().enumerate() {
            match port < of.carried {
                true => results[port] = values,
                false => results[port][row * values.len()..][..values.len()].copy_from_slice(&values),
            }
        }
    }
    Ok(results)
}

/// The attributes of a loop of this body, of so many carried and scanned inputs. Where rows are scanned, these say how often it runs.
pub fn attrs(body: Body, times: usize, (carried, scanned): (usize, usize), reverse: bool) -> Attrs {
    let attrs = if scanned == 0 { Attrs::new().with("times", times as i64) } else { Attrs::new() };
    attrs
        .with("body", Attr::Body(Arc::new(body)))
        .with("carried", carried as i64)
        .with("scanned", scanned as i64)
        .with("reverse", i64::from(reverse))
}

/// What a loop reads: the values that are handed on, those that are read row by row, and those that stay.
pub(crate) struct Inputs<'g> {
    pub(crate) carried: Vec<Var<'g>>,
    pub(crate) scanned: Vec<Var<'g>>,
    pub(crate) captured: Vec<Var<'g>>,
}

/// A loop of as many steps as there are rows, or `times` if nothing is read row by row. `make` builds the body of its inputs, in order: it returns what is handed on, then a row of each further output.
pub(crate) fn repeat<'g>(
    b: Nodes<'g>,
    (times, reverse): (usize, bool),
    Inputs { carried, scanned, captured }: Inputs<'g>,
    make: &dyn for<'h> Fn(Nodes<'h>, &[Var<'h>]) -> OpResult<Vec<Var<'h>>>,
) -> OpResult<Vec<Var<'g>>> {
    let mut facts = Vec::new();
    for value in &carried {
        facts.push(value.fact()?);
    }
    for value in &scanned {
        let fact = value.fact()?;
        facts.push(Fact::new(fact.dtype, Shape::new(&fact.shape[1..])));
    }
    for value in &captured {
        facts.push(value.fact()?);
    }
    let mut body = Body::new(facts);
    let given: Vec<_> = (0..body.inputs().len()).map(|input| body.input(input)).collect();
    let made = build(&mut body, |b| make(b, &given.iter().map(|&value| b.value(value)).collect::<Vec<_>>()))?;
    body.set_outputs(made);
    let attrs = attrs(body, times, (carried.len(), scanned.len()), reverse);
    Ok(b.all_outputs(REPEAT, &[carried, scanned, captured].concat(), attrs))
}

/// `h' = tanh(x[t] + h w)`, whose rows are the outputs.
fn sample(s: Sample) -> Sample {
    let fact = |shape: [usize; 2]| Fact::new(DType::F32, shape);
    let mut body = Body::new(vec![fact([2, 3]), fact([2, 3]), fact([3, 3])]);
    let [h, x, w] = [0, 1, 2].map(|input| body.input(input));
    let made = build(&mut body, |b| {
        let [h, x, w] = [h, x, w].map(|value| b.value(value));
        let next = (x + h.matmul(w)).tanh();
        Ok(vec![next, next])
    });
    body.set_outputs(made.expect("the table has these rows"));
    s.floats(&[&[2, 3], &[4, 2, 3], &[3, 3]])
        .attr("body", Attr::Body(Arc::new(body)))
        .attr("times", 4)
        .attr("carried", 1)
        .attr("scanned", 1)
        .attr("reverse", 1)
}
