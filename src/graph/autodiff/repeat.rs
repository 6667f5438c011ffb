//! The gradients of loops: another loop, which walks the steps back.
//!
//! ```text
//! forward    carried, x[t], captured            -> carried', y[t]                and, kept: carried before each step
//! backward   d carried', sums of d captured     -> d carried, sums + d captured  and d x[t]
//!            of the kept values, x[t], d y[t]
//! ```
//! A step of the backward loop computes its step of the forward one again, from what that began with.

use super::{Sweep, ancestors, gradients};
use crate::body::{inline, outline};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Decomposer, GRADIENT, Graph};
use crate::op::{Body, Call, Fact, NodeId, ValueId, build};
use crate::ops::{self, Loop, REPEAT, loop_attrs};
use std::ops::Range;

/// What the backward loop of a body is: its body, and which inputs of the forward one it gives gradients of.
struct Walk {
    body: Body,
    /// Carried inputs that are floats: their gradients are handed on.
    handed: Vec<usize>,
    /// Inputs that stay, whose gradients are summed.
    summed: Vec<usize>,
    /// Inputs that are read row by row, whose gradients are rows.
    rows: Vec<usize>,
    /// Further outputs whose gradients are read row by row.
    seeds: Vec<usize>,
    /// Inputs that it reads: carried ones as they were before each step, rows, and those that stay.
    read: [Vec<usize>; 3],
}

impl Sweep<'_> {
    /// Hands the gradients of a loop's outputs to its inputs.
    pub(super) fn repeat(&mut self, id: NodeId, dy: &[Option<ValueId>]) -> Result<()> {
        let node = self.graph.node(id).clone();
        let operands: Vec<ValueId> = self.graph.operands(id).into_iter().flatten().collect();
        let facts: Vec<Fact> = operands.iter().map(|&value| self.graph.fact(value).clone()).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Some).collect();
        let call = Call { op: node.op().expect("it is an operator"), attrs: &node.attrs, inputs: &facts };
        let of = Loop::of(&call).map_err(|what| node.error(what))?;
        let wanted: Vec<bool> = operands.iter().map(|value| self.active.contains(value)).collect();
        let walk = walk(&of, &wanted, dy).map_err(|e| self.refuse(id, &e.to_string()))?;

        let kept = self.keeping(id, &of, &operands, &walk.read[0])?;
        let fail = |what: String| node.error(what);
        let made = build(self.nodes_of(&format!("{GRADIENT}{}", node.name)), |b| {
            let zeros = |fact: &Fact| {
                let one = vec![1; fact.shape.len()];
                b.constant(fact.dtype, one, || vec![0.0]).expand(&fact.shape)
            };
            let mut inputs = Vec::new();
            for &input in &walk.handed {
                inputs.push(dy[input].map_or_else(|| zeros(&of.body.inputs()[input]), |value| b.value(value)));
            }
            inputs.extend(walk.summed.iter().map(|&input| zeros(&of.body.inputs()[input].unhalved())));
            let carried = inputs.len();
            inputs.extend(kept.iter().map(|&value| b.value(value)));
            inputs.extend(walk.read[1].iter().map(|&input| b.value(operands[input])));
            inputs.extend(walk.seeds.iter().map(|&port| b.value(dy[port].expect("it has a gradient"))));
            let scanned = inputs.len() - carried;
            inputs.extend(walk.read[2].iter().map(|&input| b.value(operands[input])));
            let attrs = loop_attrs(walk.body.clone(), of.times, (carried, scanned), !of.reverse);
            let made = b.all_outputs(REPEAT, &inputs, attrs);
            let given = walk.handed.iter().chain(&walk.summed).chain(&walk.rows);
            Ok(made.into_iter().zip(given).map(|(made, &input)| made.cast(of.body.inputs()[input].dtype)).collect())
        });
        let made = made.map_err(fail)?;
        let given = walk.handed.iter().chain(&walk.summed).chain(&walk.rows);
        given.zip(made).for_each(|(&input, gradient)| self.add(operands[input], gradient));
        Ok(())
    }

    /// Puts a loop in the place of another that also gives what its steps began with of these carried inputs, and returns these rows.
    fn keeping(&mut self, id: NodeId, of: &Loop, operands: &[ValueId], kept: &[usize]) -> Result<Vec<ValueId>> {
        let node = self.graph.node(id).clone();
        let mut body = Body::clone(of.body);
        let begun = kept.iter().map(|&input| of.body.input(input));
        body.set_outputs(of.body.outputs().iter().copied().chain(begun).collect());
        let attrs = loop_attrs(body, of.times, (of.carried, of.scanned), of.reverse);
        let inputs: Vec<_> = operands.iter().copied().map(Some).collect();
        self.graph.insert_at(id);
        let row = ops::find(REPEAT).expect("the table has the row");
        let made = self.graph.add(row, &node.name, &inputs, attrs, &[])?;
        let outputs = of.body.outputs().len();
        (0..outputs).for_each(|port| self.graph.replace(id.output(port), made.output(port)));
        Ok((outputs..outputs + kept.len()).map(|port| made.output(port)).collect())
    }
}

/// The backward loop of a loop whose outputs have these gradients. `wanted` says which inputs are asked for.
fn walk(of: &Loop, wanted: &[bool], dy: &[Option<ValueId>]) -> Result<Walk> {
    let mut graph = Graph::new("step");
    let facts = of.body.inputs();
    let given: Vec<ValueId> =
        facts.iter().enumerate().map(|(at, fact)| graph.input(format!("input {at}"), fact.clone())).collect();
    let outputs = inline(&mut graph, of.body, "step", &given)?;
    let is_float = |input: &usize| facts[*input].dtype.is_float();
    let handed: Vec<usize> = (0..of.carried).filter(is_float).collect();
    let rows: Vec<usize> = (of.carried..of.carried + of.scanned).filter(|&at| wanted[at] && is_float(&at)).collect();
    let summed: Vec<usize> = (of.carried + of.scanned..facts.len()).filter(|&at| wanted[at] && is_float(&at)).collect();
    let seeds: Vec<usize> = (of.carried..outputs.len()).filter(|&port| dy[port].is_some()).collect();
    let mut seed = |port: usize| {
        let fact = graph.fact(outputs[port]).clone();
        graph.input(format!("gradient of output {port}"), fact)
    };
    let [next, read] = [&handed, &seeds].map(|ports| ports.iter().map(|&port| seed(port)).collect::<Vec<_>>());
    // The sum of all outputs by their gradients has the gradients of the inputs as its derivatives.
    let pairs = handed.iter().zip(&next).chain(seeds.iter().zip(&read));
    let pairs: Vec<_> = pairs.map(|(&port, &seed)| (outputs[port], seed)).collect();
    let total = build(&mut Decomposer::new(&mut graph, "total".into()), |b| {
        let mut sum = b.scalar(0.0, DType::F32);
        for &(output, seed) in &pairs {
            let (output, seed) = (b.value(output), b.value(seed));
            let wide = output.fact()?.dtype.unhalved();
            let all: Vec<i64> = (0..output.shape()?.len() as i64).collect();
            let product = output.cast(wide) * seed.cast(wide);
            let part = if all.is_empty() { product } else { product.reduce_sum(&all, false) };
            sum = sum + part.cast(DType::F32);
        }
        Ok(vec![sum])
    });
    let total = total.map_err(Error::graph)?[0];
    let by: Vec<ValueId> = handed.iter().chain(&summed).chain(&rows).map(|&input| given[input]).collect();
    let found = gradients(&mut graph, total, &by)?;
    let sums: Vec<ValueId> =
        summed.iter().map(|&input| graph.input(format!("sum {input}"), facts[input].unhalved())).collect();
    let results = build(&mut Decomposer::new(&mut graph, "step".into()), |b| {
        let gradient = |at: usize, fact: &Fact| match found[at] {
            Some(value) => b.value(value),
            None => b.constant(fact.dtype, vec![1; fact.shape.len()], || vec![0.0]).expand(&fact.shape),
        };
        let inputs = handed.iter().chain(&summed).chain(&rows);
        let result = |(at, &input): (usize, &usize)| {
            let fact = &facts[input];
            let own = gradient(at, fact);
            match at.checked_sub(handed.len()).and_then(|at| sums.get(at)) {
                Some(&sum) => b.value(sum) + own.cast(fact.dtype.unhalved()),
                None => own,
            }
        };
        Ok(inputs.enumerate().map(result).collect())
    });
    let results = results.map_err(Error::graph)?;
    let reads = ancestors(&graph, results.iter().map(|value| value.node));
    let walked = of.carried + of.scanned;
    let among = |inputs: Range<usize>| inputs.filter(|&input| reads.contains(&given[input].node)).collect::<Vec<_>>();
    let found = [among(0..of.carried), among(of.carried..walked), among(walked..facts.len())];
    let [kept, scanned, stay] = found.each_ref().map(|list| list.iter().map(|&at| given[at]).collect::<Vec<_>>());
    let body = outline(&graph, &[&next[..], &sums, &kept, &scanned, &read, &stay].concat(), &results)?;
    Ok(Walk { body, handed, summed, rows, seeds, read: found })
}
