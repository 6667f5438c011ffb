//! Batch normalization in training: by the statistics of the batch. Running statistics are states.

use super::grow;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, Nodes, OpResult, ValueId, Var};

/// The nodes that normalize by running statistics.
fn nodes(graph: &Graph) -> Result<Vec<NodeId>> {
    let mut order = graph.order()?;
    order.retain(|&node| graph.node(node).op_name() == "BatchNormalization");
    Ok(order)
}

/// Makes states of the running statistics.
pub(super) fn share(graph: &mut Graph) -> Result<()> {
    for node in nodes(graph)? {
        for value in graph.operands(node)[3..5].iter().flatten() {
            if graph.as_constant(*value).is_some() {
                graph.keep(*value, None)?;
            }
        }
    }
    Ok(())
}

/// Normalizes by the statistics of the batch. Returns the states of the running statistics with their updates.
pub(super) fn train(graph: &mut Graph) -> Result<Vec<(ValueId, ValueId)>> {
    share(graph)?;
    // Nodes that share their statistics update them one after another.
    let mut running: Vec<(ValueId, ValueId)> = Vec::new();
    for id in nodes(graph)? {
        let node = graph.node(id).clone();
        let number = |name: &str, default: f64| graph.with_call(id, |call| call.float(name, default));
        let number = |name, default| number(name, default).expect("it is an operator").map_err(|what| node.error(what));
        let (epsilon, kept) = (number("epsilon", 1e-5)?, number("momentum", 0.9)?);
        let mut operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
        let states = [operands[3], operands[4]];
        for operand in &mut operands[3..5] {
            *operand = running.iter().find(|(state, _)| state == operand).map_or(*operand, |(_, update)| *update);
        }
        let made = grow(graph, &node.name, |b| {
            let [x, scale, bias, mean, variance] = [0, 1, 2, 3, 4].map(|slot| b.value(operands[slot]));
            normalize(b, x, [scale, bias], [mean, variance], epsilon, kept)
        })?;
        graph.replace(id.output(0), made[0]);
        let is_state = |value: ValueId| graph.states().iter().any(|state| state.value == value);
        for (state, &update) in states.into_iter().zip(&made[1..]).filter(|(state, _)| is_state(*state)) {
            running.retain(|(other, _)| *other != state);
            running.push((state, update));
        }
    }
    Ok(running)
}

/// The normalized batch, and the new running statistics. The running variance is that of a sample, as PyTorch has it.
fn normalize<'g>(
    b: Nodes<'g>,
    x: Var<'g>,
    [scale, bias]: [Var<'g>; 2],
    [mean, variance]: [Var<'g>; 2],
    epsilon: f64,
    kept: f64,
) -> OpResult<Vec<Var<'g>>> {
    let shape = x.shape()?;
    let count = shape.numel() as f64 / shape[1].max(1) as f64;
    let attrs = Attrs::new().with("epsilon", epsilon);
    let made = b.all_outputs("plimsoll.BatchNormalization", &[x, scale, bias], attrs);
    let [y, own_mean, own_variance] = made[..] else { unreachable!("it has three results") };
    let unbiased = if count > 1.0 { count / (count - 1.0) } else { 1.0 };
    let new_mean = mean * kept + own_mean * (1.0 - kept);
    let new_variance = variance * kept + own_variance * ((1.0 - kept) * unbiased);
    Ok(vec![y, new_mean, new_variance])
}
