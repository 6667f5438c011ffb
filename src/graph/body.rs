//! Bodies of loops as graphs, and back.

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Decomposer, Graph, Kind};
use crate::op::{Attrs, Body, BodyKind, Build, Fact, NodeId, Nodes, OpResult, ValueId, Var, build};
use crate::ops::{Loop, SCATTER};
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Adds the nodes of a body to a graph, of these inputs. Returns its outputs.
///
/// # Errors
/// When a row refuses a node.
pub fn inline(graph: &mut Graph, body: &Body, name: &str, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
    let mut values: Vec<Vec<ValueId>> = inputs.iter().map(|&value| vec![value]).collect();
    let mut nodes = Decomposer::new(graph, name.to_owned());
    for node in body.nodes() {
        let made = match &node.kind {
            BodyKind::Constant(constant) => {
                vec![nodes.graph.constant(Constant::new(format!("{name}/constant"), constant.clone()))]
            }
            BodyKind::Op(op, attrs) => {
                let of = |value: ValueId| values[value.node.index()][value.port as usize];
                let inputs: Vec<_> = node.inputs.iter().map(|value| value.map(of)).collect();
                nodes.node(op.name, &inputs, attrs.clone()).map_err(Error::graph)?
            }
        };
        values.push(made);
    }
    Ok(body.outputs().iter().map(|value| values[value.node.index()][value.port as usize]).collect())
}

/// The nodes of a graph that lead from some values to others, as a body. What they read beside the inputs is constant.
///
/// # Errors
/// When an output depends on an input or a state of the graph that is not among the inputs, or a constant cannot be fetched.
pub fn outline(graph: &Graph, inputs: &[ValueId], outputs: &[ValueId]) -> Result<Body> {
    let mut body = Body::new(inputs.iter().map(|&value| graph.fact(value).clone()).collect());
    let mut known: HashMap<ValueId, ValueId> =
        inputs.iter().enumerate().map(|(at, &value)| (value, body.input(at))).collect();
    let mut needed = HashSet::new();
    let mut open: Vec<ValueId> = outputs.to_vec();
    while let Some(value) = open.pop() {
        if !known.contains_key(&value) && needed.insert(value.node) {
            open.extend(graph.operands(value.node).into_iter().flatten());
        }
    }
    for id in graph.order()?.into_iter().filter(|id| needed.contains(id)) {
        let node = graph.node(id);
        let kind = match &node.kind {
            Kind::Op(op) => BodyKind::Op(op, node.attrs.clone()),
            Kind::Constant(constant) => BodyKind::Constant(constant.value()?.clone()),
            Kind::Input | Kind::State(_) => {
                return Err(node.error("the body of a loop depends on it, and it is no input of the loop"));
            }
        };
        let operands = graph.operands(id).into_iter().map(|value| value.map(|value| known[&value])).collect();
        let facts = node.outputs.iter().map(|output| output.fact.clone()).collect();
        let made = body.push(kind, operands, facts);
        known.extend((0..node.outputs.len()).map(|port| (id.output(port), made.output(port))));
    }
    body.set_outputs(outputs.iter().map(|value| known[value]).collect());
    Ok(body)
}

/// A step of a loop as a graph that runs from its states.
pub struct Stepped {
    /// The graph. It has no inputs and no outputs.
    pub graph: Graph,
    /// Per input of the loop, its state, or a constant: the values that are handed on have updates, all others stay.
    pub inputs: Vec<ValueId>,
    /// Per further output of the body, the state with one row for each step.
    pub rows: Vec<ValueId>,
    /// The state with the number of the step's row.
    pub row: ValueId,
}

/// One step of a loop. The state `row` names the row that the step reads of each scanned input and writes of each further output; the step then
/// moves it on. A loop of no steps is built with one row, so that its shapes exist. Inputs that stay, and are `known`, are constants of the step.
///
/// # Errors
/// When a row refuses a node.
pub fn stepped(of: &Loop, name: &str, known: &[Option<Arc<Constant>>]) -> Result<Stepped> {
    let of = &Loop { times: of.times.max(1), ..*of };
    let mut graph = Graph::new(name);
    let row = graph.state("row", Fact::new(DType::I64, []), None);
    let (mut inputs, mut given) = (Vec::new(), Vec::new());
    for (at, fact) in of.body.inputs().iter().enumerate() {
        if let Some(constant) = known[at].as_ref().filter(|_| at >= of.carried + of.scanned) {
            let value = graph.constant(Arc::clone(constant));
            inputs.push(value);
            given.push(value);
            continue;
        }
        let held = if of.is_scanned(at) { of.rows_of(fact) } else { fact.clone() };
        let state = graph.state(format!("{name}/input {at}"), held, None);
        inputs.push(state);
        let seen = if of.is_scanned(at) {
            nodes(&mut graph, name, |b| Ok(read(b.value(state), b.value(row))))?
        } else {
            state
        };
        given.push(seen);
    }
    let made = inline(&mut graph, of.body, name, &given)?;
    for (&state, &value) in inputs.iter().zip(&made[..of.carried]).filter(|(state, value)| state != value) {
        graph.update(state, value).map_err(Error::graph)?;
    }
    let mut rows = Vec::new();
    for (at, &value) in made.iter().enumerate().skip(of.carried) {
        let fact = of.rows_of(graph.fact(value));
        let state = graph.state(format!("{name}/output {at}"), fact, None);
        let written = nodes(&mut graph, name, |b| write(b.value(state), b.value(row), b.value(value)))?;
        graph.update(state, written).map_err(Error::graph)?;
        rows.push(state);
    }
    let next = nodes(&mut graph, name, |b| Ok(b.value(row) + if of.reverse { -1.0 } else { 1.0 }))?;
    graph.update(row, next).map_err(Error::graph)?;
    Ok(Stepped { graph, inputs, rows, row })
}

fn nodes(graph: &mut Graph, name: &str, make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Var<'g>>) -> Result<ValueId> {
    let made = build(&mut Decomposer::new(graph, name.to_owned()), |b| Ok(vec![make(b)?]));
    Ok(made.map_err(Error::graph)?[0])
}

/// Replaces a loop of at most one step by the nodes of its body.
///
/// # Errors
/// When a row refuses a node.
pub fn inline_single(graph: &mut Graph, id: NodeId) -> Result<()> {
    let node = graph.node(id).clone();
    let operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
    let shapes =
        graph.with_call(id, |call| Loop::of(call).map(|of| (of.body.clone(), of.times, of.carried, of.scanned)));
    let (body, times, carried, scanned) = shapes.expect("it is an operator").map_err(|what| node.error(what))?;
    graph.insert_at(id);
    let name = &node.name;
    if times == 0 {
        for (port, output) in node.outputs.iter().enumerate() {
            let value = match operands.get(port).filter(|_| port < carried) {
                Some(&value) => value,
                None => {
                    let none = Tensor::new(output.fact.dtype, output.fact.shape.clone(), Vec::new())?;
                    graph.constant(Constant::new(output.name.clone(), none))
                }
            };
            graph.replace(id.output(port), value);
        }
        return Ok(());
    }
    let mut given = operands;
    for value in &mut given[carried..][..scanned] {
        *value = nodes(graph, name, |b| Ok(b.value(*value).squeeze(&[0])))?;
    }
    for (port, value) in inline(graph, &body, name, &given)?.into_iter().enumerate() {
        let value = if port < carried { value } else { nodes(graph, name, |b| Ok(b.value(value).unsqueeze(&[0])))? };
        graph.replace(id.output(port), value);
    }
    Ok(())
}

/// A row of a value.
fn read<'g>(all: Var<'g>, row: Var<'g>) -> Var<'g> {
    all.op("Gather", &[row], Attrs::new().with("axis", 0))
}

/// The value with another row.
fn write<'g>(all: Var<'g>, row: Var<'g>, value: Var<'g>) -> OpResult<Var<'g>> {
    let at = row.shaped(&vec![1; all.shape()?.len()]);
    Ok(all.op(SCATTER, &[at, value.unsqueeze(&[0])], Attrs::new().with("axis", 0).with("unique_indices", 1)))
}
