//! Inlines operators that hold graphs, called bodies, in their attributes.
//!
//! An `If` becomes the nodes of the branch it takes. A `Loop` or `Scan` becomes the nodes of its body, once per iteration.
//! The branch and the number of iterations must follow from shapes and constants.

use super::sequence::Named;
use super::*;
use crate::constant::Constant;
use crate::error::ensure;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) const OPERATORS: [&str; 3] = ["If", "Loop", "Scan"];

/// The most iterations of a loop.
const MAX_ITERATIONS: i64 = 1 << 13;

impl<'a> Call<'_, 'a> {
    fn body(&self, key: &str) -> Result<&'a GraphProto> {
        let body = self.attribute(key).and_then(|a| a.g.as_deref());
        body.ok_or_else(|| self.fail(format!("attribute '{key}': expected a graph, found none")))
    }

    /// The `i`-th integer of a list attribute; 0 if the list is left out or shorter.
    fn listed(&self, key: &str, i: usize) -> i64 {
        self.attribute(key).and_then(|a| a.ints.get(i)).copied().unwrap_or(0)
    }

    /// Appends each output of an iteration to its column: one part of an output that all iterations make together.
    fn collect(&self, columns: &mut [Vec<ValueId>], outputs: impl Iterator<Item = Named>) -> Result<()> {
        for (column, value) in columns.iter_mut().zip(outputs) {
            let Named::Tensor(value) = value else {
                return Err(self.fail("expected a tensor from every iteration, found a sequence"));
            };
            column.push(value);
        }
        Ok(())
    }
}

/// A graph in an attribute, and the scope of its initializers, which all iterations share.
struct Body<'n, 'a> {
    proto: &'a GraphProto,
    scope: Scope<'n, 'a>,
}

impl Body<'_, '_> {
    /// An empty column for each output after the first `before`, which no iteration collects.
    fn columns(&self, call: &Call, before: usize) -> Result<Vec<Vec<ValueId>>> {
        let found = self.proto.output.len();
        let collected = found.checked_sub(before);
        let collected = collected
            .ok_or_else(|| call.fail(format!("expected a body of {before} outputs or more, found {found}")))?;
        Ok(vec![Vec::new(); collected])
    }
}

/// The axis that parts are stacked along, and the direction.
struct Along {
    axis: i64,
    backwards: bool,
}

impl<'a> Importer<'a> {
    /// Inlines a node with one of [`OPERATORS`].
    pub(super) fn bodies(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        match &call.node.op_type[..] {
            "If" => self.inline_if(call),
            "Loop" => self.inline_loop(call),
            _ => self.inline_scan(call),
        }
    }

    fn inline_if(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let (1, Some(condition)) = (call.inputs.len(), call.tensor(0)?) else {
            return Err(call.fail(format!("expected 1 input, found {}", call.inputs.len())));
        };
        let key = if self.is_true(call, "cond", condition)? { "then_branch" } else { "else_branch" };
        let body = self.body(call, call.body(key)?)?;
        self.inline(call, &body, format!("{}/", call.name), &[])
    }

    fn inline_loop(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let body = self.body(call, call.body("body")?)?;
        let limit = match call.tensor(0)? {
            Some(limit) => self.number(call, "M", limit)?,
            None => i64::MAX,
        };
        let mut going = match call.tensor(1)? {
            Some(condition) => self.is_true(call, "cond", condition)?,
            None => true,
        };
        let mut carried = call.inputs.get(2..).unwrap_or(&[]).to_vec();
        let mut columns = body.columns(call, 1 + carried.len())?;
        for i in 0.. {
            if !going || i >= limit {
                break;
            }
            ensure(i != MAX_ITERATIONS, || {
                call.fail(format!("it runs more than {MAX_ITERATIONS} times: expected an 'M' or a 'cond' that ends it"))
            })?;
            let mut outputs = self.iteration(call, &body, i, &carried)?.into_iter();
            going = match outputs.next() {
                Some(Named::Tensor(condition)) => self.is_true(call, "cond", condition)?,
                _ => return Err(call.fail("expected a body whose first output is a condition")),
            };
            carried = outputs.by_ref().take(carried.len()).collect();
            call.collect(&mut columns, outputs)?;
        }
        let start = carried.len();
        if columns.first().is_some_and(Vec::is_empty) && call.node.output.len() > start {
            let empty = self.empty_columns(call, &body, columns, &carried)?;
            carried.extend(empty);
            return Ok(carried);
        }
        for (i, column) in columns.into_iter().enumerate() {
            carried.push(self.stack_column(call, start + i, column, Along { axis: 0, backwards: false })?);
        }
        Ok(carried)
    }

    /// The collected outputs of a `Loop` that runs no iteration.
    ///
    /// They hold no parts, but have the type and the shape of the parts that a first iteration would make.
    fn empty_columns(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        mut columns: Vec<Vec<ValueId>>,
        carried: &[Named],
    ) -> Result<Vec<Named>> {
        let outputs = self.iteration(call, body, 0, carried)?;
        call.collect(&mut columns, outputs.into_iter().skip(1 + carried.len()))?;
        let mut empty = Vec::with_capacity(columns.len());
        for (i, part) in columns.concat().into_iter().enumerate() {
            let Fact { dtype, shape } = self.graph.fact(part);
            let shape: Shape = std::iter::once(0).chain(shape.iter().copied()).collect();
            let name = call.scope.name(call.node.output.get(carried.len() + i).map_or("", String::as_str));
            let none = Constant::new(name, Tensor::new(*dtype, shape, Vec::new())?);
            empty.push(Named::Tensor(self.graph.constant(none)));
        }
        Ok(empty)
    }

    /// Inlines one iteration of a `Loop` and returns the outputs of its body.
    fn iteration(&mut self, call: &Call<'_, 'a>, body: &Body<'_, 'a>, i: i64, carried: &[Named]) -> Result<Vec<Named>> {
        let prefix = format!("{}/{i}/", call.name);
        let number = Constant::new(format!("{prefix}i"), Tensor::from_i64([], &[i])?);
        let condition = Constant::new(format!("{prefix}cond"), Tensor::from_f64(DType::Bool, [], &[1.0]));
        let mut given = [number, condition].map(|constant| Named::Tensor(self.graph.constant(constant))).to_vec();
        given.extend_from_slice(carried);
        self.inline(call, body, prefix, &given)
    }

    fn inline_scan(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        ensure(call.scope.opset >= 9, || call.fail(format!("expected opset 9 or newer, found {}", call.scope.opset)))?;
        let body = self.body(call, call.body("body")?)?;
        let scanned = call.attribute("num_scan_inputs").map_or(0, |a| a.i);
        let states = usize::try_from(scanned).ok().filter(|&n| n > 0).and_then(|n| call.inputs.len().checked_sub(n));
        let states = states.ok_or_else(|| {
            call.fail(format!("attribute 'num_scan_inputs': expected 1 to {}, found {scanned}", call.inputs.len()))
        })?;
        let slices = self.scan_slices(call, states)?;
        let mut carried = call.inputs[..states].to_vec();
        let mut columns = body.columns(call, states)?;
        for i in 0..slices[0].len() {
            let given: Vec<_> = carried.drain(..).chain(slices.iter().map(|parts| Named::Tensor(parts[i]))).collect();
            let mut outputs = self.inline(call, &body, format!("{}/{i}/", call.name), &given)?.into_iter();
            carried = outputs.by_ref().take(states).collect();
            call.collect(&mut columns, outputs)?;
        }
        for (i, column) in columns.into_iter().enumerate() {
            let backwards = call.listed("scan_output_directions", i) == 1;
            let along = Along { axis: call.listed("scan_output_axes", i), backwards };
            carried.push(self.stack_column(call, states + i, column, along)?);
        }
        Ok(carried)
    }

    /// The slices of each input that a `Scan` walks along; its first `states` inputs are carried instead.
    fn scan_slices(&mut self, call: &Call<'_, 'a>, states: usize) -> Result<Vec<Vec<ValueId>>> {
        let mut slices: Vec<Vec<ValueId>> = Vec::new();
        for at in states..call.inputs.len() {
            let value = call.tensor(at)?.ok_or_else(|| call.fail(format!("input {at} is missing")))?;
            let axis = call.listed("scan_input_axes", at - states);
            let name = shortened(format!("{}/{}", call.name, call.node.input[at]));
            let mut parts = self.unstack(&name, value, axis).map_err(|what| call.fail(what))?;
            if call.listed("scan_input_directions", at - states) == 1 {
                parts.reverse();
            }
            if let Some(first) = slices.first().filter(|first| first.len() != parts.len()) {
                let what = format!("expected scan inputs of one length, found {} and {}", first.len(), parts.len());
                return Err(call.fail(what));
            }
            slices.push(parts);
        }
        Ok(slices)
    }

    /// Stacks one tensor per iteration into an output.
    fn stack_column(
        &mut self,
        call: &Call<'_, 'a>,
        output: usize,
        mut values: Vec<ValueId>,
        along: Along,
    ) -> Result<Named> {
        let Some(name) = call.node.output.get(output).filter(|o| !o.is_empty()) else { return Ok(Named::Nothing) };
        if values.is_empty() {
            return Err(call.fail(format!("output '{name}' has no shape: no iteration makes a part of it")));
        }
        if along.backwards {
            values.reverse();
        }
        let name = call.scope.name(name);
        self.stack(&name, values, along.axis).map(Named::Tensor).map_err(|what| call.fail(what))
    }

    /// Adds the initializers of a body, once for all of its iterations.
    fn body<'n>(&mut self, call: &'n Call<'n, 'a>, proto: &'a GraphProto) -> Result<Body<'n, 'a>> {
        let Scope { opset, depth, .. } = *call.scope;
        let inner = Scope::new(format!("{}/", call.name), opset, depth + 1);
        let mut scope = Scope { outer: Some(call.scope), ..inner };
        let work = proto.initializer.iter().map(|tensor| 1 + copied(tensor) / BYTES_PER_UNIT).sum();
        self.spend(work).map_err(|what| call.fail(what))?;
        self.initializers(proto, &Initial::new(), &mut scope)?;
        Ok(Body { proto, scope })
    }

    /// Adds the nodes of a body for these inputs, and returns the body's outputs.
    fn inline(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        prefix: String,
        given: &[Named],
    ) -> Result<Vec<Named>> {
        let Body { proto, scope } = body;
        if proto.input.len() != given.len() {
            let (expected, found) = (given.len(), proto.input.len());
            return Err(call.fail(format!("graph '{}': expected {expected} inputs, found {found}", proto.name)));
        }
        self.spend(1 + given.len() + proto.output.len()).map_err(|what| call.fail(what))?;
        let mut inner = Scope { outer: Some(scope), ..Scope::new(prefix, scope.opset, scope.depth) };
        inner.values.extend(proto.input.iter().map(|i| i.name.as_str()).zip(given.iter().cloned()));
        self.nodes(&proto.node, &mut inner)?;
        let output = |o: &ValueInfoProto| {
            let value = inner.find(&o.name).filter(|value| !matches!(value, Named::Nothing));
            value
                .ok_or_else(|| call.fail(format!("graph '{}': output '{}' is produced by no node", proto.name, o.name)))
        };
        proto.output.iter().map(output).collect()
    }

    /// The first element of a constant input.
    fn number(&mut self, call: &Call<'_, 'a>, input: &str, value: ValueId) -> Result<i64> {
        let numbers = self.numbers(input, value).map_err(|what| call.fail(what))?;
        numbers.first().copied().ok_or_else(|| call.fail(format!("input '{input}': expected one element, found none")))
    }

    /// True if a constant condition is not 0.
    fn is_true(&mut self, call: &Call<'_, 'a>, input: &str, value: ValueId) -> Result<bool> {
        self.number(call, input, value).map(|n| n != 0)
    }
}
