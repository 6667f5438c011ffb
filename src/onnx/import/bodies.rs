//! Operators with graphs in their attributes: the branch of an `If` that is taken, and the bodies of a `Loop` and a `Scan`, once per
//! iteration. Which branch, and how many iterations, must follow from shapes and constants.

use super::sequence::Named;
use super::*;
use crate::constant::Constant;
use crate::op::Fact;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) const OPERATORS: [&str; 3] = ["If", "Loop", "Scan"];

/// A loop is unrolled no further.
const MAX_ITERATIONS: i64 = 1 << 13;

/// A node that has bodies.
struct Site<'n, 'a> {
    node: &'a NodeProto,
    name: &'n str,
    inputs: &'n [Named],
    attributes: &'n [(&'a str, &'a AttributeProto)],
    scope: &'n Scope<'n, 'a>,
}

impl<'a> Site<'_, 'a> {
    fn fail(&self, what: impl Into<String>) -> Error {
        Error::Node { node: self.name.into(), op: full_name(self.node), what: what.into(), file: None }
    }

    fn body(&self, key: &str) -> Result<&'a GraphProto> {
        let body = self.attributes.iter().find(|(k, _)| *k == key).and_then(|(_, a)| a.g.as_deref());
        body.ok_or_else(|| self.fail(format!("attribute '{key}' is missing or no graph")))
    }

    /// The `i`-th integer of an attribute that may be left out.
    fn listed(&self, key: &str, i: usize) -> i64 {
        let list = self.attributes.iter().find(|(k, _)| *k == key);
        list.and_then(|(_, a)| a.ints.get(i)).copied().unwrap_or(0)
    }

    fn tensor(&self, at: usize) -> Result<Option<ValueId>> {
        let name = self.node.input.get(at).map_or("", String::as_str);
        self.inputs.get(at).cloned().unwrap_or(Named::Nothing).tensor(name).map_err(|what| self.fail(what))
    }

    /// Keeps what an iteration makes for the outputs that have a part of each.
    fn collect(&self, columns: &mut [Vec<ValueId>], outputs: impl Iterator<Item = Named>) -> Result<()> {
        for (column, value) in columns.iter_mut().zip(outputs) {
            let Named::Tensor(value) = value else {
                return Err(self.fail("expected tensors to put together, found a sequence"));
            };
            column.push(value);
        }
        Ok(())
    }
}

/// A graph of an attribute, and the names that its initializers give it, whatever its inputs are.
struct Body<'n, 'a> {
    proto: &'a GraphProto,
    scope: Scope<'n, 'a>,
}

impl<'a> Importer<'a> {
    /// The outputs of a node with one of [`OPERATORS`].
    pub(super) fn bodies(
        &mut self,
        node: &'a NodeProto,
        name: &str,
        inputs: &[Named],
        attributes: &[(&'a str, &'a AttributeProto)],
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<Named>> {
        let site = Site { node, name, inputs, attributes, scope };
        match &node.op_type[..] {
            "If" => self.branch(&site),
            "Loop" => self.iterate(&site),
            _ => self.scan(&site),
        }
    }

    fn branch(&mut self, site: &Site<'_, 'a>) -> Result<Vec<Named>> {
        let (1, Some(condition)) = (site.inputs.len(), site.tensor(0)?) else {
            return Err(site.fail(format!("expected 1 input, found {}", site.inputs.len())));
        };
        let key = if self.holds(site, "cond", condition)? { "then_branch" } else { "else_branch" };
        let body = self.body(site, site.body(key)?)?;
        self.inline(site, &body, format!("{}/", site.name), &[])
    }

    fn iterate(&mut self, site: &Site<'_, 'a>) -> Result<Vec<Named>> {
        let body = self.body(site, site.body("body")?)?;
        let most = match site.tensor(0)? {
            Some(most) => self.number(site, "M", most)?,
            None => i64::MAX,
        };
        let mut going = match site.tensor(1)? {
            Some(condition) => self.holds(site, "cond", condition)?,
            None => true,
        };
        let mut carried = site.inputs.get(2..).unwrap_or(&[]).to_vec();
        let collected = body.proto.output.len().checked_sub(1 + carried.len());
        let collected = collected.ok_or_else(|| {
            site.fail(format!(
                "expected a body of {} outputs or more, found {}",
                1 + carried.len(),
                body.proto.output.len()
            ))
        })?;
        let mut columns = vec![Vec::new(); collected];
        for i in 0.. {
            if !going || i >= most {
                break;
            }
            if i == MAX_ITERATIONS {
                return Err(site.fail(format!(
                    "it runs more than {MAX_ITERATIONS} times: expected an 'M' or a 'cond' that ends it"
                )));
            }
            let mut outputs = self.iteration(site, &body, i, &carried)?.into_iter();
            going = match outputs.next() {
                Some(Named::Tensor(condition)) => self.holds(site, "cond", condition)?,
                _ => return Err(site.fail("expected a body whose first output is a condition")),
            };
            carried = outputs.by_ref().take(carried.len()).collect();
            site.collect(&mut columns, outputs)?;
        }
        let start = carried.len();
        if columns.first().is_some_and(Vec::is_empty) && site.node.output.len() > start {
            // What no iteration makes a part of has the type and the shape of the parts that the first one would make.
            let outputs = self.iteration(site, &body, 0, &carried)?;
            site.collect(&mut columns, outputs.into_iter().skip(1 + start))?;
            for (i, part) in columns.concat().into_iter().enumerate() {
                let Fact { dtype, shape } = self.graph.fact(part);
                let shape: Shape = std::iter::once(0).chain(shape.iter().copied()).collect();
                let name = site.scope.name(site.node.output.get(start + i).map_or("", String::as_str));
                let none = Constant::new(name, Tensor::new(*dtype, shape, Vec::new())?);
                carried.push(Named::Tensor(self.graph.constant(none)));
            }
            return Ok(carried);
        }
        for (i, column) in columns.into_iter().enumerate() {
            carried.push(self.column(site, start + i, column, 0, false)?);
        }
        Ok(carried)
    }

    /// What the body of a `Loop` makes of what is carried into this iteration.
    fn iteration(&mut self, site: &Site<'_, 'a>, body: &Body<'_, 'a>, i: i64, carried: &[Named]) -> Result<Vec<Named>> {
        let prefix = format!("{}/{i}/", site.name);
        let number = Constant::new(format!("{prefix}i"), Tensor::from_i64([], &[i])?);
        let condition = Constant::new(format!("{prefix}cond"), Tensor::from_f64(DType::Bool, [], &[1.0]));
        let mut given = [number, condition].map(|constant| Named::Tensor(self.graph.constant(constant))).to_vec();
        given.extend_from_slice(carried);
        self.inline(site, body, prefix, &given)
    }

    fn scan(&mut self, site: &Site<'_, 'a>) -> Result<Vec<Named>> {
        if site.scope.opset < 9 {
            return Err(site.fail(format!("expected opset 9 or newer, found {}", site.scope.opset)));
        }
        let body = self.body(site, site.body("body")?)?;
        let scanned = site.attributes.iter().find(|(k, _)| *k == "num_scan_inputs").map_or(0, |(_, a)| a.i);
        let states = usize::try_from(scanned).ok().filter(|&n| n > 0).and_then(|n| site.inputs.len().checked_sub(n));
        let states = states.ok_or_else(|| {
            site.fail(format!("attribute 'num_scan_inputs': expected 1 to {}, found {scanned}", site.inputs.len()))
        })?;
        let mut slices: Vec<Vec<ValueId>> = Vec::new();
        for at in states..site.inputs.len() {
            let value = site.tensor(at)?.ok_or_else(|| site.fail(format!("input {at} is missing")))?;
            let axis = site.listed("scan_input_axes", at - states);
            let name = shortened(format!("{}/{}", site.name, site.node.input[at]));
            let mut parts = self.apart(&name, value, axis).map_err(|what| site.fail(what))?;
            if site.listed("scan_input_directions", at - states) == 1 {
                parts.reverse();
            }
            if let Some(first) = slices.first().filter(|first| first.len() != parts.len()) {
                let what = format!("expected scan inputs of one length, found {} and {}", first.len(), parts.len());
                return Err(site.fail(what));
            }
            slices.push(parts);
        }
        let mut carried = site.inputs[..states].to_vec();
        let collected = body.proto.output.len().checked_sub(states);
        let collected = collected.ok_or_else(|| site.fail(format!("expected a body of {states} outputs or more")))?;
        let mut columns = vec![Vec::new(); collected];
        for i in 0..slices[0].len() {
            let given: Vec<_> = carried.drain(..).chain(slices.iter().map(|parts| Named::Tensor(parts[i]))).collect();
            let mut outputs = self.inline(site, &body, format!("{}/{i}/", site.name), &given)?.into_iter();
            carried = outputs.by_ref().take(states).collect();
            site.collect(&mut columns, outputs)?;
        }
        for (i, column) in columns.into_iter().enumerate() {
            let backwards = site.listed("scan_output_directions", i) == 1;
            carried.push(self.column(site, states + i, column, site.listed("scan_output_axes", i), backwards)?);
        }
        Ok(carried)
    }

    /// An output that is made of one tensor per iteration, along an axis of its own.
    fn column(
        &mut self,
        site: &Site<'_, 'a>,
        output: usize,
        mut values: Vec<ValueId>,
        axis: i64,
        backwards: bool,
    ) -> Result<Named> {
        let Some(name) = site.node.output.get(output).filter(|o| !o.is_empty()) else { return Ok(Named::Nothing) };
        if values.is_empty() {
            return Err(site.fail(format!("output '{name}' has no shape: no iteration makes a part of it")));
        }
        if backwards {
            values.reverse();
        }
        let name = site.scope.name(name);
        self.together(&name, values, axis).map(Named::Tensor).map_err(|what| site.fail(what))
    }

    fn body<'n>(&mut self, site: &'n Site<'n, 'a>, proto: &'a GraphProto) -> Result<Body<'n, 'a>> {
        let mut scope = Scope {
            values: HashMap::new(),
            attributes: HashMap::new(),
            outer: Some(site.scope),
            prefix: format!("{}/", site.name),
            opset: site.scope.opset,
            depth: site.scope.depth + 1,
        };
        let work = proto.initializer.iter().map(|tensor| 1 + copied(tensor) / BYTES).sum();
        self.spend(work).map_err(|what| site.fail(what))?;
        self.initializers(proto, &mut scope)?;
        Ok(Body { proto, scope })
    }

    /// What a graph makes of the values that its inputs are given.
    fn inline(
        &mut self,
        site: &Site<'_, 'a>,
        body: &Body<'_, 'a>,
        prefix: String,
        given: &[Named],
    ) -> Result<Vec<Named>> {
        let Body { proto, scope } = body;
        if proto.input.len() != given.len() {
            let (expected, found) = (given.len(), proto.input.len());
            return Err(site.fail(format!("graph '{}': expected {expected} inputs, found {found}", proto.name)));
        }
        self.spend(1 + given.len() + proto.output.len()).map_err(|what| site.fail(what))?;
        let mut inner = Scope {
            values: proto.input.iter().map(|i| i.name.as_str()).zip(given.iter().cloned()).collect(),
            attributes: HashMap::new(),
            outer: Some(scope),
            prefix,
            opset: scope.opset,
            depth: scope.depth,
        };
        self.nodes(&proto.node, &mut inner)?;
        let output = |o: &ValueInfoProto| {
            let value = inner.find(&o.name).filter(|value| !matches!(value, Named::Nothing));
            value
                .ok_or_else(|| site.fail(format!("graph '{}': output '{}' is produced by no node", proto.name, o.name)))
        };
        proto.output.iter().map(output).collect()
    }

    fn number(&self, site: &Site<'_, 'a>, input: &str, value: ValueId) -> Result<i64> {
        let numbers = self.numbers(input, value).map_err(|what| site.fail(what))?;
        numbers.first().copied().ok_or_else(|| site.fail(format!("input '{input}': expected one element, found none")))
    }

    /// Whether a condition holds, which must be known.
    fn holds(&self, site: &Site<'_, 'a>, input: &str, value: ValueId) -> Result<bool> {
        self.number(site, input, value).map(|n| n != 0)
    }
}
