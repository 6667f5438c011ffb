//! Runs a graph node by node in `f64`: the reference that every backend is compared with.

use crate::error::{Error, Result, ensure};
use crate::graph::{Graph, Kind, State};
use crate::kernel::Collective;
use crate::mesh::Mesh;
use crate::op::{Call, Fact, NodeId, ValueId};
use crate::ops;
use crate::tensor::Tensor;
use std::collections::HashMap;

/// Computes the graph's outputs, in order. Inputs are in the order of [`Graph::inputs`]. States have the elements they begin with.
///
/// Integers and 16-bit floats are rounded at every node, outputs to their types.
///
/// # Errors
/// An input has another type or shape than the graph needs, or an operator refuses its values.
pub fn run(graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    step(graph, inputs, &mut initial(graph)?)
}

/// The elements that the graph's states begin with, in the order of [`Graph::states`].
///
/// # Errors
/// An initial value cannot be fetched.
pub fn initial(graph: &Graph) -> Result<Vec<Tensor>> {
    let zeros = |fact: &Fact| Tensor::from_f64(fact.dtype, fact.shape.clone(), &vec![0.0; fact.shape.numel()]);
    let initial = |state: &State| match &graph.node(state.value.node).kind {
        Kind::State(Some(constant)) => constant.fetch(),
        _ => Ok(zeros(graph.fact(state.value))),
    };
    graph.states().iter().map(initial).collect()
}

/// As [`run`], from the given elements of the states, which it replaces by their updates.
///
/// # Errors
/// As [`run`].
pub fn step(graph: &Graph, inputs: &[Tensor], states: &mut [Tensor]) -> Result<Vec<Tensor>> {
    let values = values(graph, given(graph, inputs, states)?)?;
    Ok(results(graph, &values, states))
}

/// As [`step`], of the graphs of all ranks of a mesh, in order, which exchange data. Each has inputs and states of its own.
///
/// # Errors
/// As [`run`], and when the graphs are not alike.
pub fn ranks(
    mesh: &Mesh,
    graphs: &[Graph],
    inputs: &[Vec<Tensor>],
    states: &mut [Vec<Tensor>],
) -> Result<Vec<Vec<Tensor>>> {
    let each = graphs.iter().zip(inputs).zip(&*states);
    let mut values = each.map(|((graph, inputs), states)| given(graph, inputs, states)).collect::<Result<Vec<_>>>()?;
    let order = graphs[0].order()?;
    for graph in graphs {
        let alike =
            graph.order()? == order && order.iter().all(|&id| graph.node(id).op_name() == graphs[0].node(id).op_name());
        ensure(alike, || Error::graph("the graphs of the ranks are not alike".into()))?;
    }
    for &id in &order {
        let collective =
            graphs[0].with_call(id, |call| ops::is_collective(call.op).then(|| ops::collective(call))).flatten();
        let collective = collective.transpose().map_err(|what| graphs[0].node(id).error(what))?;
        let Some(Collective { exchange, axis, .. }) = collective.filter(|of| of.ranks > 1) else {
            graphs.iter().zip(&mut values).try_for_each(|(graph, values)| node(graph, id, values))?;
            continue;
        };
        let (axis, _) = mesh.axis(&axis)?;
        let from = |rank: usize| graphs[rank].operands(id)[0].expect("a collective has an operand");
        let got: Vec<Vec<f64>> = (0..graphs.len())
            .map(|rank| {
                let group = mesh.group(rank, axis);
                let given: Vec<&[f64]> = group.iter().map(|&other| &values[other][&from(other)][..]).collect();
                exchange.of_all(&given).swap_remove(mesh.place(rank, axis))
            })
            .collect();
        values.iter_mut().zip(got).for_each(|(values, got)| _ = values.insert(id.output(0), got));
    }
    let each = graphs.iter().zip(&values).zip(states);
    Ok(each.map(|((graph, values), states)| results(graph, values, states)).collect())
}

/// The elements of inputs and states.
fn given(graph: &Graph, inputs: &[Tensor], states: &[Tensor]) -> Result<HashMap<ValueId, Vec<f64>>> {
    if inputs.len() != graph.inputs().len() {
        return Err(Error::usage(format!("expected {} inputs, found {}", graph.inputs().len(), inputs.len())));
    }
    let mut given: HashMap<ValueId, Vec<f64>> = HashMap::new();
    for (&value, tensor) in graph.inputs().iter().zip(inputs) {
        let fact = graph.fact(value);
        if tensor.dtype() != fact.dtype || *tensor.shape() != fact.shape {
            let (name, found) = (graph.value_name(value), (tensor.dtype(), tensor.shape()));
            return Err(Error::usage(format!("input '{name}': expected {fact}, found {}{}", found.0, found.1)));
        }
        given.insert(value, tensor.to_f64());
    }
    for (state, tensor) in graph.states().iter().zip(states) {
        given.insert(state.value, tensor.to_f64());
    }
    Ok(given)
}

/// The outputs. States get their updates.
fn results(graph: &Graph, values: &HashMap<ValueId, Vec<f64>>, states: &mut [Tensor]) -> Vec<Tensor> {
    let tensor = |value: &ValueId| {
        let fact = graph.fact(*value);
        Tensor::from_f64(fact.dtype, fact.shape.clone(), &values[value])
    };
    for (state, held) in graph.states().iter().zip(states) {
        if let Some(update) = &state.update {
            *held = tensor(update);
        }
    }
    graph.outputs().iter().map(|(_, value)| tensor(value)).collect()
}

/// All values of a graph, from the elements of its inputs and states. Nothing is rounded to `f32`.
///
/// # Errors
/// A constant cannot be fetched, or an operator refuses its values.
pub fn values(graph: &Graph, mut values: HashMap<ValueId, Vec<f64>>) -> Result<HashMap<ValueId, Vec<f64>>> {
    graph.order()?.into_iter().try_for_each(|id| node(graph, id, &mut values))?;
    Ok(values)
}

/// Adds the values of a node to those before it.
fn node(graph: &Graph, id: NodeId, values: &mut HashMap<ValueId, Vec<f64>>) -> Result<()> {
    let node = graph.node(id);
    match &node.kind {
        Kind::Input | Kind::State(_) => {}
        Kind::Constant(constant) => {
            values.insert(id.output(0), constant.value()?.to_f64());
        }
        Kind::Op(op) => {
            let operands = graph.operands(id);
            let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
            let data: Vec<_> = operands.iter().map(|v| v.map(|v| values[&v].as_slice())).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            let outputs = call.eval_rounded(&data).map_err(|what| node.error(what))?;
            for (port, output) in outputs.into_iter().enumerate() {
                values.insert(id.output(port), output);
            }
        }
    }
    Ok(())
}
