//! Batch normalization in training: by the statistics of the batch. Running statistics are states.

use super::{Training, grow};
use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, Nodes, OpResult, ValueId, Var};
use crate::shape::Shape;
use std::collections::HashSet;

/// The attribute of a node that normalizes by the statistics of the batch.
const TRAINING: &str = "training_mode";
/// Statistics of fewer values than this say little of others.
const FEW: usize = 4;

/// What [`train`] made.
pub(super) struct Trained {
    /// The states of the running statistics, with their updates.
    pub running: Vec<(ValueId, ValueId)>,
    /// The nodes that normalize by the statistics of few values, and the number of these.
    pub few: Vec<(String, usize)>,
}

/// The nodes that normalize by running statistics.
fn nodes(graph: &Graph) -> Result<Vec<NodeId>> {
    let mut order = graph.order()?;
    order.retain(|&node| graph.node(node).op_name() == "BatchNormalization");
    Ok(order)
}

/// The constants of running statistics.
pub(super) fn statistics(graph: &Graph) -> Result<HashSet<ValueId>> {
    let operands = nodes(graph)?.into_iter().map(|node| graph.operands(node));
    Ok(operands.flat_map(|operands| operands.into_iter().skip(3).flatten()).map(|value| source(graph, value)).collect())
}

/// The value whose elements a view, or a cast, hands on.
fn source(graph: &Graph, mut value: ValueId) -> ValueId {
    while crate::onnx::HAND_ON.contains(&graph.node(value.node).op_name())
        && let Some(Some(from)) = graph.operands(value.node).first()
    {
        value = *from;
    }
    value
}

/// True if a node normalizes by its stored statistics, and leaves them alone: its scale and its bias are frozen, or one of the statistics.
fn is_frozen(graph: &Graph, node: NodeId, training: &Training) -> bool {
    let operands = graph.operands(node);
    let constant = |value: ValueId| graph.as_constant(source(graph, value));
    let name = |slot: usize| operands[slot].and_then(constant).map(|constant| &constant.name);
    [1, 2].into_iter().all(|slot| name(slot).is_some_and(|name| training.freezes(name)))
        || [3, 4].into_iter().any(|slot| name(slot).is_some_and(|name| training.names_frozen(name)))
}

/// Splits the nodes into norms by the batch and frozen norms.
fn parted(graph: &Graph, training: &Training) -> Result<(Vec<NodeId>, Vec<NodeId>)> {
    Ok(nodes(graph)?.into_iter().partition(|&node| !is_frozen(graph, node, training)))
}

/// Makes states of the running statistics that a training changes.
pub(super) fn share(graph: &mut Graph, training: &Training) -> Result<()> {
    for node in parted(graph, training)?.0 {
        for value in graph.operands(node)[3..5].iter().flatten() {
            if graph.as_constant(*value).is_some() {
                graph.keep(*value, None)?;
            }
        }
    }
    Ok(())
}

/// Normalizes by the stored statistics, whatever the file says.
pub(super) fn infer(graph: &mut Graph) -> Result<()> {
    let nodes = nodes(graph)?;
    store(graph, &nodes)
}

/// Makes nodes normalize by the stored statistics, and leave them alone.
fn store(graph: &mut Graph, nodes: &[NodeId]) -> Result<()> {
    for &id in nodes {
        let node = graph.node(id).clone();
        if node.attrs.get(TRAINING).is_none() {
            continue;
        }
        let (op, operands) = (node.op().expect("a normalization is an operator"), graph.operands(id));
        let attrs = node.attrs.clone().with(TRAINING, 0);
        graph.insert_at(id);
        let made = graph.add(op, &node.name, &operands, attrs, &[&node.outputs[0].name])?;
        graph.replace(id.output(0), made.output(0));
        for (port, statistic) in (1..node.outputs.len()).zip(&operands[3..]) {
            graph.replace(id.output(port), statistic.expect("a normalization has statistics"));
        }
    }
    Ok(())
}

/// Normalizes by the statistics of the batch, where a node is not frozen.
///
/// # Errors
/// When a channel of the batch has one value: its variance is 0, whatever it is.
pub(super) fn train(graph: &mut Graph, training: &Training) -> Result<Trained> {
    // The states of running statistics have no names to tell the frozen ones by.
    let (trained, frozen) = parted(graph, training)?;
    share(graph, training)?;
    store(graph, &frozen)?;
    ensure(training.norm_groups <= 1 || !trained.is_empty(), || {
        let what = "expected a BatchNormalization that is trained, found none";
        Error::usage(format!("norms of {} parts of a batch: {what}", training.norm_groups))
    })?;
    // Nodes that share their statistics update them one after another.
    let (mut running, mut few): (Vec<(ValueId, ValueId)>, _) = (Vec::new(), Vec::new());
    for id in trained {
        let node = graph.node(id).clone();
        let number = |name: &str, default: f64| graph.with_call(id, |call| call.float(name, default));
        let number = |name, default| number(name, default).expect("it is an operator").map_err(|what| node.error(what));
        let (epsilon, kept) = (number("epsilon", 1e-5)?, number("momentum", 0.9)?);
        let mut operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
        let fact = graph.fact(operands[0]);
        let groups = training.norm_groups;
        let rows = fact.shape[0];
        ensure(groups > 0 && rows.is_multiple_of(groups), || {
            node.error(format!("norms of {groups} parts of a batch: expected rows that they divide, found {fact}"))
        })?;
        let values = values_of_a_channel(&fact.shape) / groups;
        ensure(values > 1, || {
            node.error(format!(
                "expected more than one value per channel in each part of a batch, to have a variance, found {fact}; \
                 take more rows, fewer parts of an update, or freeze its weights: it then uses its stored statistics"
            ))
        })?;
        if values < FEW {
            few.push((node.name.clone(), values));
        }
        let states = [operands[3], operands[4]];
        let is_kept = states.map(|value| graph.states().iter().any(|state| state.value == value));
        ensure(is_kept[0] == is_kept[1], || {
            let views = "found one behind a view or a cast; freeze its weights, or export the model without that";
            node.error(format!("expected both running statistics to be initializers, to follow the batches, {views}"))
        })?;
        for operand in &mut operands[3..5] {
            *operand = running.iter().find(|(state, _)| state == operand).map_or(*operand, |(_, update)| *update);
        }
        let made = grow(graph, &node.name, |b| {
            let [x, scale, bias, mean, variance] = [0, 1, 2, 3, 4].map(|slot| b.value(operands[slot]));
            normalize(b, x, groups, [scale, bias], [mean, variance], [epsilon, kept])
        })?;
        graph.replace(id.output(0), made[0]);
        let is_state = |value: ValueId| graph.states().iter().any(|state| state.value == value);
        for (state, &update) in states.into_iter().zip(&made[1..]).filter(|(state, _)| is_state(*state)) {
            running.retain(|(other, _)| *other != state);
            running.push((state, update));
        }
    }
    Ok(Trained { running, few })
}

/// The number of values that a channel's mean and variance are of.
fn values_of_a_channel(shape: &Shape) -> usize {
    shape.numel() / shape.get(1).map_or(1, |&channels| channels.max(1))
}

/// The normalized batch, and the new running statistics. The running variance is that of a sample, as PyTorch has it. Channels of a group of
/// rows are channels of their own; running statistics follow the mean of all groups.
fn normalize<'g>(
    b: Nodes<'g>,
    x: Var<'g>,
    groups: usize,
    [scale, bias]: [Var<'g>; 2],
    [mean, variance]: [Var<'g>; 2],
    [epsilon, kept]: [f64; 2],
) -> OpResult<Vec<Var<'g>>> {
    let (attrs, shape) = (Attrs::new().with("epsilon", epsilon), x.shape()?);
    let count = (values_of_a_channel(&shape) / groups) as f64;
    let (rows, channels, rest) = (shape[0] / groups, shape[1], &shape[2..]);
    let turned: Vec<usize> = [1, 0].into_iter().chain(2..shape.len() + 1).collect();
    let of_groups = |x: Var<'g>| {
        let apart = x.shaped(&[&[groups, rows, channels], rest].concat()).transpose(&turned);
        apart.shaped(&[&[rows, groups * channels], rest].concat())
    };
    let back = |y: Var<'g>| {
        let apart = y.shaped(&[&[rows, groups, channels], rest].concat()).transpose(&turned);
        apart.shaped(&shape)
    };
    let each = |of: Var<'g>| of.expand(&[groups, channels]).shaped(&[groups * channels]);
    let joined = |of: Var<'g>| of.shaped(&[groups, channels]).reduce_sum(&[0], false) * (1.0 / groups as f64);
    let is_whole = groups == 1;
    let operands = if is_whole { [x, scale, bias] } else { [of_groups(x), each(scale), each(bias)] };
    let made = b.all_outputs("plimsoll.BatchNormalization", &operands, attrs);
    let [y, own_mean, own_variance] = made[..] else { unreachable!("it has three results") };
    let y = if is_whole { y } else { back(y) };
    let [own_mean, own_variance] = [own_mean, own_variance].map(|of| if is_whole { of } else { joined(of) });
    let unbiased = count / (count - 1.0);
    let new_mean = mean * kept + own_mean * (1.0 - kept);
    let new_variance = variance * kept + own_variance * ((1.0 - kept) * unbiased);
    Ok(vec![y, new_mean, new_variance])
}
