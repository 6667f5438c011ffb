//! Inlines operators that hold graphs, called bodies, in their attributes.
//!
//! [Control](super::control) inlines an `If` and a `Loop`. A `Scan` becomes the nodes of its body, once per iteration. A `FlexAttention`
//! becomes products, a softmax, and the nodes of the bodies that change its scores and its weights.

use super::sequence::Named;
use super::*;
use crate::constant::Constant;
use crate::error::ensure;
use crate::tensor::Tensor;

/// Their domains and names.
pub(super) const OPERATORS: [(&str, &str); 4] = [("", "If"), ("", "Loop"), ("", "Scan"), (PREVIEW, "FlexAttention")];

impl<'a> Call<'_, 'a> {
    pub(super) fn body(&self, key: &str) -> Result<&'a GraphProto> {
        let body = self.attribute(key).and_then(|a| a.g.as_deref());
        body.ok_or_else(|| self.fail(format!("attribute '{key}': expected a graph, found none")))
    }

    /// The `i`-th integer of a list attribute; 0 if the list is left out or shorter.
    fn listed(&self, key: &str, i: usize) -> i64 {
        self.attribute(key).and_then(|a| a.ints.get(i)).copied().unwrap_or(0)
    }

    /// Appends each output of an iteration to its column: one part of an output that all iterations make together.
    pub(super) fn collect(&self, columns: &mut [Vec<ValueId>], outputs: impl Iterator<Item = Named>) -> Result<()> {
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
pub(super) struct Body<'n, 'a> {
    proto: &'a GraphProto,
    scope: Scope<'n, 'a>,
}

impl Body<'_, '_> {
    /// An empty column for each output after the first `before`, which no iteration collects.
    pub(super) fn columns(&self, call: &Call, before: usize) -> Result<Vec<Vec<ValueId>>> {
        let found = self.proto.output.len();
        let collected = found.checked_sub(before);
        let collected = collected
            .ok_or_else(|| call.fail(format!("expected a body of {before} outputs or more, found {found}")))?;
        Ok(vec![Vec::new(); collected])
    }

    /// The outputs behind the first `before`.
    pub(super) fn collected(&self, before: usize) -> usize {
        self.proto.output.len().saturating_sub(before)
    }
}

/// What a `FlexAttention` says of itself.
struct Attention {
    scale: f64,
    /// The type of scores and weights.
    wide: DType,
    /// Heads of queries that share one of keys and values.
    sharing: usize,
    dtype: DType,
}

impl Attention {
    fn of(importer: &mut Importer, call: &Call) -> Result<Attention> {
        let mut fact = |at: usize| -> Result<Fact> {
            let value = call.tensor(at)?.ok_or_else(|| call.fail(format!("input {at} is missing")))?;
            importer.notes.rely(Relied::Shape(value));
            let fact = importer.graph.fact(value);
            let fits = fact.shape.len() == 4 && fact.dtype.is_float();
            ensure(fits, || {
                call.fail(format!("input {at}: expected floats [batch, heads, sequence, width], found {fact}"))
            })?;
            Ok(fact.clone())
        };
        let (q, k, v) = (fact(0)?, fact(1)?, fact(2)?);
        let (heads, shared) = (q.shape[1], k.shape[1]);
        let fits = k.shape[..3] == v.shape[..3]
            && q.shape[0] == k.shape[0]
            && q.shape[3] == k.shape[3]
            && shared > 0
            && heads.is_multiple_of(shared)
            && [k.dtype, v.dtype] == [q.dtype; 2];
        ensure(fits, || call.fail(format!("expected keys and values that fit the queries {q}, found {k} and {v}")))?;
        let wide = match call.attribute("softmax_precision").map(|a| a.i) {
            None if q.dtype == DType::F64 => DType::F64,
            None => DType::F32,
            Some(code) => DType::from_onnx(code).filter(|dtype| dtype.is_float()).ok_or_else(|| {
                call.fail(format!("attribute 'softmax_precision': expected a floating-point type, found {code}"))
            })?,
        };
        let own = 1.0 / (q.shape[3].max(1) as f64).sqrt();
        let scale = call.attribute("scale").map_or(own, |a| a.f.into());
        Ok(Attention { scale, wide, sharing: heads / shared, dtype: q.dtype })
    }
}

fn cast(dtype: DType) -> Attrs {
    Attrs::new().with("to", dtype.onnx())
}

/// The axis that parts are stacked along, and the direction.
pub(super) struct Along {
    pub(super) axis: i64,
    pub(super) backwards: bool,
}

impl<'a> Importer<'a> {
    /// Inlines a node with one of [`OPERATORS`].
    pub(super) fn bodies(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        match &call.node.op_type[..] {
            "If" => self.inline_if(call),
            "Loop" => self.inline_loop(call),
            "FlexAttention" => self.inline_attention(call),
            _ if call.scope.opset < 9 => self.inline_old_scan(call),
            _ => self.inline_scan(call),
        }
    }

    /// Inlines an attention `[batch, heads, sequence, width]` whose scores and weights bodies may change.
    fn inline_attention(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let Attention { scale, wide, sharing, dtype } = Attention::of(self, call)?;
        let mut operands = Vec::with_capacity(3);
        for at in 0..3 {
            let value = call.tensor(at)?.ok_or_else(|| call.fail(format!("expected 3 inputs, found none at {at}")))?;
            let name = ["q", "k", "v"][at];
            // A head of keys is shared by the queries that follow one another.
            let value = if at > 0 && sharing > 1 { self.repeat_heads(call, name, value, sharing)? } else { value };
            operands.push(self.step(call, &format!("{name}.wide"), "Cast", &[value], cast(wide))?);
        }
        let [q, k, v] = operands[..] else { return Err(call.fail("expected 3 inputs")) };
        let turned = self.step(call, "turned", "Transpose", &[k], Attrs::new().with("perm", vec![0, 1, 3, 2]))?;
        let factor = Constant::new(format!("{}/scale", call.name), Tensor::from_f64(wide, [], &[scale]));
        let factor = self.graph.constant(factor);
        let q = self.step(call, "scaled", "Mul", &[q, factor], Attrs::new())?;
        let scores = self.step(call, "scores", "MatMul", &[q, turned], Attrs::new())?;
        let scores = self.modified(call, "score_mod", scores)?;
        let weights = self.step(call, "weights", "Softmax", &[scores], Attrs::new().with("axis", -1))?;
        let weights = self.modified(call, "prob_mod", weights)?;
        let y = self.step(call, "sums", "MatMul", &[weights, v], Attrs::new())?;
        Ok(vec![Named::Tensor(self.step(call, "y", "Cast", &[y], cast(dtype))?)])
    }

    /// Adds a node that is part of a call, and returns its output.
    pub(super) fn step(
        &mut self,
        call: &Call,
        name: &str,
        op: &str,
        inputs: &[ValueId],
        attrs: Attrs,
    ) -> Result<ValueId> {
        if op == "Cast" && attrs.get("to") == Some(&Attr::Int(self.graph.fact(inputs[0]).dtype.onnx())) {
            return Ok(inputs[0]);
        }
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        let name = shortened(format!("{}/{name}", call.name));
        Ok(self.add(self.rows[op], &name, &inputs, attrs, &[])?[0])
    }

    /// A value after the body of an attribute, if the attribute is there.
    fn modified(&mut self, call: &Call<'_, 'a>, key: &str, value: ValueId) -> Result<ValueId> {
        if call.attribute(key).is_none() {
            return Ok(value);
        }
        let body = self.body(call, call.body(key)?)?;
        let made = self.inline(call, &body, format!("{}/{key}/", call.name), &[Named::Tensor(value)])?;
        let [Named::Tensor(made)] = made[..] else {
            return Err(call.fail(format!("attribute '{key}': expected a body with one output")));
        };
        [value, made].into_iter().for_each(|value| self.notes.rely(Relied::Shape(value)));
        let (expected, found) = (self.graph.fact(value), self.graph.fact(made));
        ensure(expected == found, || call.fail(format!("attribute '{key}': expected {expected}, found {found}")))?;
        Ok(made)
    }

    /// `[batch, heads, ..]` with each head as often as `times` says, one after another.
    fn repeat_heads(&mut self, call: &Call, name: &str, value: ValueId, times: usize) -> Result<ValueId> {
        self.notes.rely(Relied::Shape(value));
        let shape = self.graph.fact(value).shape.clone();
        let (head, rest) = (&shape[..2], &shape[2..]);
        let axes: Vec<_> = (0..shape.len()).map(|axis| self.dependence.extent(value, axis)).collect();
        let more = [&axes[..2], &[Form::Fixed], &axes[2..]].concat();
        let mut value = value;
        for (step, op, extents, forms) in [
            ("raised", "Reshape", [head, &[1], rest].concat(), &more),
            ("repeated", "Expand", [head, &[times], rest].concat(), &more),
            ("heads", "Reshape", [&[shape[0], shape[1] * times], rest].concat(), &axes),
        ] {
            let attrs = Attrs::new().with("shape", &extents[..]);
            let attrs = if op == "Reshape" { attrs.with("allowzero", 1) } else { attrs };
            let (step, shaped) =
                (format!("{}/{name}.{step}", call.name), Shaping::from(vec![("shape", Forms::Each(forms.clone()))]));
            value = self.add_shaped(self.rows[op], &shortened(step), &[Some(value)], (attrs, &shaped), &[])?[0];
        }
        Ok(value)
    }

    /// Inlines a `Scan` as opset 8 had it: all inputs have a batch in front, and each of its elements is scanned on its own.
    fn inline_old_scan(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        ensure(matches!(call.inputs.first(), Some(Named::Nothing)), || {
            call.fail("input 'sequence_lens': expected none; export the model with sequences of one length")
        })?;
        let body = self.body(call, call.body("body")?)?;
        let mut parts = Vec::with_capacity(call.inputs.len());
        for at in 1..call.inputs.len() {
            let value = call.tensor(at)?.ok_or_else(|| call.fail(format!("input {at} is missing")))?;
            let name = shortened(format!("{}/{}", call.name, call.node.input[at]));
            parts.push(self.unstack(&name, value, 0).map_err(|what| call.fail(what))?);
        }
        let batch = parts.first().map_or(0, Vec::len);
        ensure(batch > 0 && parts.iter().all(|part| part.len() == batch), || {
            call.fail("expected inputs with one batch in front, of one element or more")
        })?;
        let mut columns = vec![Vec::new(); body.proto.output.len()];
        for element in 0..batch {
            let inputs = parts.iter().map(|part| Named::Tensor(part[element])).collect();
            let one = Call { inputs, attributes: call.attributes.clone(), ..*call };
            let outputs = self.scan(&one, &body, "directions", &format!("{}/{element}", call.name))?;
            call.collect(&mut columns, outputs.into_iter())?;
        }
        let columns = columns.into_iter().enumerate();
        columns.map(|(i, column)| self.stack_column(call, i, column, Along { axis: 0, backwards: false })).collect()
    }

    fn inline_scan(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let body = self.body(call, call.body("body")?)?;
        self.scan(call, &body, "scan_input_directions", call.name)
    }

    /// Inlines the iterations of a `Scan`, under this name. An attribute says which inputs are walked backwards.
    fn scan(&mut self, call: &Call<'_, 'a>, body: &Body<'_, 'a>, directions: &str, name: &str) -> Result<Vec<Named>> {
        let scanned = call.attribute("num_scan_inputs").map_or(0, |a| a.i);
        let states = usize::try_from(scanned).ok().filter(|&n| n > 0).and_then(|n| call.inputs.len().checked_sub(n));
        let states = states.ok_or_else(|| {
            call.fail(format!("attribute 'num_scan_inputs': expected 1 to {}, found {scanned}", call.inputs.len()))
        })?;
        if let Some(made) = self.scanned(call, body, (directions, name), states)? {
            return Ok(made);
        }
        let slices = self.scan_slices(call, states, directions)?;
        let mut carried = call.inputs[..states].to_vec();
        let mut columns = body.columns(call, states)?;
        for i in 0..slices[0].len() {
            let given: Vec<_> = carried.drain(..).chain(slices.iter().map(|parts| Named::Tensor(parts[i]))).collect();
            let mut outputs = self.inline(call, body, format!("{name}/{i}/"), &given)?.into_iter();
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

    /// The outputs of a `Scan` that is a loop of the graph.
    fn scanned(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        (directions, name): (&str, &str),
        states: usize,
    ) -> Result<Option<Vec<Named>>> {
        let (first, mut scanned) = (call.tensors()?, Vec::new());
        let Some(first) = first.into_iter().collect::<Option<Vec<_>>>() else { return Ok(None) };
        let (first, walked) = first.split_at(states);
        let outputs = body.collected(states);
        let back = |list: &str, count: usize| (0..count).map(|i| call.listed(list, i) == 1).collect::<Vec<_>>();
        let (read, written) = (back(directions, walked.len()), back("scan_output_directions", outputs));
        // Where all go backwards, the loop does. Else each that does is turned.
        let reverse = read.iter().chain(&written).all(|&back| back);
        for (at, &value) in walked.iter().enumerate() {
            self.notes.rely(Relied::Rank(value));
            let shape = &self.graph.fact(value).shape;
            let Some(axis) = shape.axis(call.listed("scan_input_axes", at)) else { return Ok(None) };
            if self.dependence.is_uneven(value) {
                return Ok(None);
            }
            let value = self.moved(call, &format!("scanned.{at}"), value, (axis, 0))?;
            let turns = read[at] && !reverse;
            scanned.push(if turns { self.turned(call, &format!("scanned.{at}/turned"), value)? } else { value });
        }
        let lengths: HashSet<usize> = scanned.iter().map(|&value| self.graph.fact(value).shape[0]).collect();
        if lengths.len() != 1 {
            return Ok(None);
        }
        let Some(mut made) = self.scan_as_loop(call, body, name, (first, &scanned, reverse)) else { return Ok(None) };
        for (at, value) in made[states..].iter_mut().enumerate() {
            if written[at] && !reverse {
                *value = self.turned(call, &format!("output.{at}/turned"), *value)?;
            }
            let shape = &self.graph.fact(*value).shape;
            let axis = call.listed("scan_output_axes", at);
            let axis = shape.axis(axis).ok_or_else(|| call.fail(format!("axis {axis} is outside {shape}")))?;
            *value = self.moved(call, &format!("output.{at}"), *value, (0, axis))?;
        }
        Ok(Some(made.into_iter().map(Named::Tensor).collect()))
    }

    /// A value with one of its axes at another place.
    fn moved(&mut self, call: &Call, name: &str, value: ValueId, (from, to): (usize, usize)) -> Result<ValueId> {
        if from == to {
            return Ok(value);
        }
        let mut order: Vec<usize> = (0..self.graph.fact(value).shape.len()).filter(|&axis| axis != from).collect();
        order.insert(to, from);
        self.step(call, name, "Transpose", &[value], Attrs::new().with("perm", &order[..]))
    }

    /// A value with its rows in reverse.
    fn turned(&mut self, call: &Call, name: &str, value: ValueId) -> Result<ValueId> {
        let one = |number: i64| vec![number];
        let attrs = Attrs::new().with("starts", one(-1)).with("ends", one(i64::MIN)).with("axes", one(0));
        self.step(call, name, "Slice", &[value], attrs.with("steps", one(-1)))
    }

    /// The slices of each input that a `Scan` walks along; its first `states` inputs are carried instead.
    fn scan_slices(&mut self, call: &Call<'_, 'a>, states: usize, directions: &str) -> Result<Vec<Vec<ValueId>>> {
        let mut slices: Vec<Vec<ValueId>> = Vec::new();
        for at in states..call.inputs.len() {
            let value = call.tensor(at)?.ok_or_else(|| call.fail(format!("input {at} is missing")))?;
            let axis = call.listed("scan_input_axes", at - states);
            let name = shortened(format!("{}/{}", call.name, call.node.input[at]));
            let mut parts = self.unstack(&name, value, axis).map_err(|what| call.fail(what))?;
            if call.listed(directions, at - states) == 1 {
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
    pub(super) fn stack_column(
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
    pub(super) fn body<'n>(&mut self, call: &'n Call<'n, 'a>, proto: &'a GraphProto) -> Result<Body<'n, 'a>> {
        let Scope { opset, depth, .. } = *call.scope;
        let inner = Scope::new(format!("{}/", call.name), opset, depth + 1);
        let mut scope = Scope { outer: Some(call.scope), ..inner };
        let work = proto.initializer.iter().map(|tensor| 1 + copied(tensor) / BYTES_PER_UNIT).sum();
        self.spend(work).map_err(|what| call.fail(what))?;
        self.initializers(proto, &Initial::new(), &mut scope)?;
        Ok(Body { proto, scope })
    }

    /// Adds the nodes of a body for these inputs, and returns the body's outputs.
    pub(super) fn inline(
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
}
