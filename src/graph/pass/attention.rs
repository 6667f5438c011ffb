//! Finds attention, however it is spelled: softmax of scores, which come from a first product, times values in a second product.
//!
//! ```text
//! query   key
//!    \    /
//!    MatMul     elementwise        ReduceMax  Sub  Exp  ReduceSum  Div
//!   (products) ------------> scores ------------------------------------> weights   value
//!               scale, mask ..                                                  \    /
//!                                                                               MatMul
//! ```
//!
//! The softmax of 16-bit floats may be computed in f32, between two Casts. Exporters of masked attention put `Where(IsNaN(weights), 0, weights)`
//! before the second product, for rows that see nothing. Our own decomposition has `Where(Equal(ReduceMax, -inf), 0, weights)`.

use super::Context;
use super::group::{Attention, MAX_GROUP_NODES, max_reads, uses_index};
use crate::decisions::Decisions;
use crate::dtype::DType;
use crate::graph::Graph;
use crate::kernel::{Fold, Guard};
use crate::op::{Call, Fact, Lower, NodeId, ValueId};
use crate::ops::{BAND, SCORES};
use crate::target::Target;
use std::collections::HashSet;

/// An attention and its nodes.
#[derive(Debug)]
pub(super) struct Found {
    pub attention: Attention,
    /// All nodes from the first product to the second one, unordered.
    pub nodes: HashSet<NodeId>,
}

/// An attention with the parts of its softmax.
#[derive(Debug)]
pub(super) struct Spelled {
    pub found: Found,
    /// The result of the softmax, before it is rounded and guarded.
    pub weights: ValueId,
    /// The exponentials, their sum, the scores less the largest, and the largest.
    pub softmax: [NodeId; 4],
    /// True for rows that a guard hides.
    pub guard: Option<ValueId>,
}

/// The attention that ends in a node, if it becomes one kernel, even with `more` nodes.
pub(super) fn as_kernel(graph: &Graph, sink: NodeId, context: &Context, more: usize) -> Option<Found> {
    let Spelled { found, .. } = ending_in(graph, sink, &context.decisions, false)?;
    if !context.decisions.if_cheaper("attend", sink, found.is_cheaper(graph, sink, context.target)) {
        return None;
    }
    let small = found.nodes.len() + more <= MAX_GROUP_NODES;
    (small && 3 + found.further(graph).len() <= max_reads(context.target)).then_some(found)
}

/// The attention that ends in a node and is trained: the backward computation reads values that it would have to store.
pub(super) fn trained(graph: &Graph, sink: NodeId, context: &Context) -> Option<Spelled> {
    let spelled = ending_in(graph, sink, &context.decisions, true)?;
    let found = &spelled.found;
    let small = found.nodes.len() <= MAX_GROUP_NODES && 3 + found.further(graph).len() <= max_reads(context.target);
    (small && found.is_cheaper(graph, sink, context.target)).then_some(spelled)
}

/// True if kernels of a target compute scores again: those of these products, for results of so many columns.
pub(super) fn computes_again(graph: &Graph, products: &[NodeId], results: &[usize], target: &Target) -> bool {
    let left = |product: &NodeId| graph.operands(*product)[0].expect("a product has two operands");
    let inner = products.iter().map(|product| graph.fact(left(product)).shape.last().copied().unwrap_or(1));
    let columns: Vec<usize> = inner.chain(results.iter().copied()).collect();
    let dtype = graph.fact(products[0].output(0)).dtype;
    let mut operands = products.iter().flat_map(|&product| graph.operands(product)).flatten();
    operands.all(|value| graph.fact(value).dtype == dtype) && target.computes_scores_again(dtype, &columns)
}

/// True if a node belongs to the backward computation, or is elementwise or a view and read by that alone.
fn is_later(graph: &Graph, node: NodeId, left: usize) -> bool {
    let moves = || matches!(graph.node(node).op().map(|op| op.lower), Some(Lower::Map(_) | Lower::View(_)));
    let read = || graph.users(node.output(0)).iter().all(|&user| is_later(graph, user, left - 1));
    graph.is_backward(node) || left > 0 && moves() && !graph.is_output(node.output(0)) && read()
}

/// How far a value is followed to the backward computation.
const FARTHEST: usize = 6;

/// The group of a product whose left operand is made of [`SCORES`]; or, from such a node, that of the logarithm of its rows' sums. The pass
/// [`scores`](super::scores) writes these nodes.
pub(super) fn of_scores(graph: &Graph, node: NodeId, target: &Target) -> Option<Found> {
    let (sink, scores, inner) = match graph.node(node).op_name() {
        "MatMul" => (node, graph.operands(node)[0]?, Vec::new()),
        SCORES => log_sum(graph, node)?,
        _ => return None,
    };
    let space = graph.fact(scores).shape.clone();
    let mut nodes: HashSet<NodeId> = inner.iter().copied().chain([sink]).collect();
    let (mut products, mut rest) = (Vec::new(), vec![scores]);
    while let Some(value) = rest.pop() {
        let own = nodes.contains(&value.node) || graph.fact(value).shape != space || graph.is_output(value);
        if own || !graph.users(value).iter().all(|user| nodes.contains(user)) {
            continue;
        }
        let Some(op) = graph.node(value.node).op() else { continue };
        match op.lower {
            _ if op.name == SCORES => products.push(value.node),
            Lower::Map(map) if op.name == BAND || !uses_index(graph, value.node, map) => {
                rest.extend(graph.operands(value.node).into_iter().flatten());
            }
            _ => continue,
        }
        nodes.insert(value.node);
    }
    let fold = match (&products[..], inner.is_empty()) {
        ([_], false) => Fold::LogSum,
        ([_], true) => Fold::Plain { second: false },
        ([_, _], true) => Fold::Plain { second: true },
        _ => return None,
    };
    let (first, second) = (products[0], products.get(1).copied());
    let attention = Attention { products: first, scores, second, guarded: None, fold };
    let found = Found { attention, nodes };
    let results: Vec<usize> = match fold {
        Fold::LogSum => Vec::new(),
        _ => graph.fact(sink.output(0)).shape.last().copied().into_iter().collect(),
    };
    let values = graph.operands(sink)[1].filter(|_| fold != Fold::LogSum);
    let dtype = graph.fact(first.output(0)).dtype;
    let fits = values.is_none_or(|values| graph.fact(values).dtype == dtype)
        && found.nodes.len() <= MAX_GROUP_NODES
        && fold.operands() + found.further(graph).len() <= max_reads(target)
        && computes_again(graph, &products, &results, target);
    fits.then_some(found)
}

/// The sum of exponentials, as a logarithm, of the scores that begin with a product: its last node, the scores, and the nodes between.
fn log_sum(graph: &Graph, product: NodeId) -> Option<(NodeId, ValueId, Vec<NodeId>)> {
    let space = &graph.fact(product.output(0)).shape;
    let mut rest = vec![product.output(0)];
    let (scores, max) = (0..MAX_GROUP_NODES).find_map(|at| {
        let &value = rest.get(at)?;
        let users = graph.users(value);
        if let Some(&max) = users.iter().find(|&&user| graph.node(user).op_name() == "ReduceMax") {
            return Some((value, max));
        }
        let is_map = |&user: &NodeId| {
            let elementwise = matches!(graph.node(user).op().map(|op| op.lower), Some(Lower::Map(_)));
            elementwise && graph.fact(user.output(0)).shape == *space && !rest.contains(&user.output(0))
        };
        let maps: Vec<NodeId> = users.into_iter().filter(is_map).collect();
        rest.extend(maps.into_iter().map(|map| map.output(0)));
        None
    })?;
    let sink = *graph.users(max.output(0)).iter().find(|&&user| graph.node(user).op_name() == "Add")?;
    let &[_, log] = &named(graph, sink.output(0), "Add")?[..] else { return None };
    let sum = named(graph, log, "Log")?[0];
    let exp = named(graph, sum, "ReduceSum")?[0];
    let below = named(graph, exp, "Exp")?[0];
    let own = named(graph, below, "Sub")? == [scores, max.output(0)];
    let mut inner = vec![max, below.node, exp.node, sum.node, log.node];
    own.then_some(())?;
    // Where a row may see nothing, its largest score stands for the logarithm of zero.
    let guarded = match graph.users(sink.output(0))[..] {
        [guard] => named(graph, guard.output(0), "Where").filter(|of| of[1..] == [max.output(0), sink.output(0)]),
        _ => None,
    };
    let Some(&[hidden, ..]) = guarded.as_deref() else { return Some((sink, scores, inner)) };
    let guard = graph.users(sink.output(0))[0];
    let &[top, low] = &named(graph, hidden, "Equal")?[..] else { return None };
    (top == max.output(0) && all(graph, low, f64::NEG_INFINITY)).then_some(())?;
    inner.extend([hidden.node, sink]);
    Some((guard, scores, inner))
}

/// The operands of the node that makes a value, if the node has this operator.
fn named(graph: &Graph, value: ValueId, name: &str) -> Option<Vec<ValueId>> {
    let node = graph.node(value.node);
    (node.op()?.name == name).then(|| graph.operands(value.node).into_iter().flatten().collect())
}

/// The nodes between a softmax and the product of its weights with values.
struct Behind {
    /// The softmax's own result.
    weights: ValueId,
    nodes: Vec<NodeId>,
    guarded: Option<Guard>,
    /// The maximum of the scores, if a guard compares it.
    compared: Option<ValueId>,
    /// What the guard says.
    guard: Option<ValueId>,
}

/// Goes from the left operand of the product that ends in `sink` to the softmax, past a Cast and a guard.
fn behind(graph: &Graph, sink: NodeId, mut weights: ValueId, decisions: &Decisions) -> Option<Behind> {
    let (mut nodes, mut guarded, mut compared, mut guard) = (Vec::new(), None, None, None);
    unrounded(graph, &mut weights, &mut nodes)?;
    if let Some(&[without, zero, plain]) = named(graph, weights, "Where").as_deref() {
        if !all(graph, zero, 0.0) {
            return None;
        }
        if let Some(&[max, low]) = named(graph, without, "Equal").as_deref() {
            compared = all(graph, low, f64::NEG_INFINITY).then_some(Some(max))?;
            guarded = Some(Guard::Unseen);
        } else {
            (named(graph, without, "IsNaN")?[0] == plain).then_some(())?;
            guarded = Some(Guard::All);
        }
        // A larger zero repeats the rows.
        if !decisions.if_valid("guard", sink, graph.fact(weights).shape == graph.fact(plain).shape) {
            return None;
        }
        guard = Some(without);
        nodes.extend([weights.node, without.node]);
        weights = plain;
        unrounded(graph, &mut weights, &mut nodes)?;
    }
    Some(Behind { weights, nodes, guarded, compared, guard })
}

/// Goes past a Cast that rounds: the softmax of 16-bit floats may be computed in `f32`, as it is here. `None` for another Cast.
fn unrounded(graph: &Graph, weights: &mut ValueId, nodes: &mut Vec<NodeId>) -> Option<()> {
    if let Some(&[wide]) = named(graph, *weights, "Cast").as_deref() {
        if graph.fact(wide).dtype != DType::F32 || !graph.fact(*weights).dtype.is_half() {
            return None;
        }
        nodes.push(weights.node);
        *weights = wide;
    }
    Some(())
}

/// The scores whose softmax over the last axis is `weights`, their maximum, and the softmax's nodes.
fn softmax(graph: &Graph, weights: ValueId) -> Option<(ValueId, ValueId, Vec<NodeId>)> {
    let &[exp, sum] = &named(graph, weights, "Div")?[..] else { return None };
    let &[shifted] = &named(graph, exp, "Exp")?[..] else { return None };
    let &[scores, max] = &named(graph, shifted, "Sub")?[..] else { return None };
    folds_columns(graph, sum)?;
    (named(graph, sum, "ReduceSum")?[0] == exp).then_some(())?;
    let mut nodes = [weights, exp, sum, shifted, max].map(|value| value.node).to_vec();
    let compared = largest_of(graph, max)?;
    if compared == scores {
        return Some((scores, max, nodes));
    }
    // Each reader of halves may widen them itself.
    let source = widened(graph, scores).filter(|&source| widened(graph, compared) == Some(source))?;
    nodes.extend([scores.node, compared.node]);
    Some((source, max, nodes))
}

/// Passes if a value is a reduction over the last axis, which it keeps.
fn folds_columns(graph: &Graph, value: ValueId) -> Option<()> {
    let (node, operand) = (graph.node(value.node), graph.operands(value.node)[0]?);
    let (facts, rank) = ([Some(graph.fact(operand))], graph.fact(operand).shape.len());
    let axes = Call { op: node.op()?, attrs: &node.attrs, inputs: &facts }.reduced_axes().ok()?;
    (axes == [rank.checked_sub(1)?] && graph.fact(value).shape.len() == rank).then_some(())
}

/// The value whose rows' largest elements this one is.
fn largest_of(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let of = *named(graph, value, "ReduceMax")?.first()?;
    folds_columns(graph, value).map(|()| of)
}

/// The 16-bit floats that a value is in `f32`.
fn widened(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let source = *named(graph, value, "Cast")?.first()?;
    (graph.fact(value).dtype == DType::F32 && graph.fact(source).dtype.is_half()).then_some(source)
}

/// The attention that ends in a matrix product, if nothing else reads its intermediate values, or, where it is trained, nothing else that is
/// forward.
fn ending_in(graph: &Graph, sink: NodeId, decisions: &Decisions, is_trained: bool) -> Option<Spelled> {
    let &[weights, values] = &named(graph, sink.output(0), "MatMul")?[..] else { return None };
    let Behind { weights, nodes, guarded, compared, guard } = behind(graph, sink, weights, decisions)?;
    let space = &graph.fact(weights).shape;
    let result = &graph.node(sink).outputs[0].fact.shape;
    let rank = space.len();
    let matrices = rank >= 2 && result.len() == rank && graph.fact(values).shape.len() >= 2;
    let fits = matrices && result[..rank - 2] == space[..rank - 2] && !space.contains(&0);
    if !decisions.if_valid("attention", sink, fits) {
        return None;
    }
    let (scores, max, inner) = softmax(graph, weights)?;
    let mut nodes: HashSet<NodeId> = nodes.into_iter().chain(inner.iter().copied()).chain([sink]).collect();
    if let Some(compared) = compared.filter(|&compared| compared != max) {
        // The softmax of 16-bit floats widens its scores; the guard may compare the largest of the scores as they were, or of a
        // copy.
        let own = largest_of(graph, compared).filter(|_| !is_trained)?;
        nodes.insert(compared.node);
        if own != scores {
            widened(graph, own).filter(|&source| source == scores)?;
            nodes.insert(own.node);
        }
    }

    // Up from the scores: elementwise nodes of their shape that nothing else reads, and one product.
    let inside = |value: ValueId, nodes: &HashSet<NodeId>| {
        let takes = |u: &NodeId| nodes.contains(u) || is_trained && is_later(graph, *u, FARTHEST);
        !graph.is_output(value) && graph.users(value).iter().all(takes)
    };
    let mut products = None;
    let mut rest = vec![scores];
    while let Some(value) = rest.pop() {
        if nodes.contains(&value.node) || !inside(value, &nodes) {
            continue;
        }
        if !decisions.if_valid("scores", value.node, graph.fact(value).shape == *space) {
            continue;
        }
        let Some(op) = graph.node(value.node).op() else { continue };
        let operands = graph.operands(value.node);
        match op.lower {
            Lower::Template(_) if op.name == "MatMul" && products.is_none() => {
                if operands.iter().flatten().any(|&v| graph.fact(v).shape.len() < 2) {
                    return None;
                }
                products = Some(value.node);
            }
            Lower::Map(map) if op.name == BAND || !uses_index(graph, value.node, map) => {
                rest.extend(operands.into_iter().flatten());
            }
            _ => continue,
        }
        nodes.insert(value.node);
    }
    let stored = |value: ValueId| nodes.contains(&value.node);
    if stored(values) || graph.operands(products?).into_iter().flatten().any(stored) {
        // The scores, or a part of them, are an operand of a product: they would have to be stored.
        return None;
    }
    let members = nodes.iter().filter(|&&n| n != sink).map(|&node| node.output(0));
    let closed = members.into_iter().all(|value| inside(value, &nodes));
    let (scored, multiplied) = (graph.fact(scores).dtype, graph.node(products?).outputs[0].fact.dtype);
    let same_type = scored == multiplied || multiplied.is_half() && scored == DType::F32;
    let attention = Attention { products: products?, scores, second: None, guarded, fold: Fold::Softmax };
    let softmax = [inner[1], inner[2], inner[3], inner[4]];
    (closed && same_type).then_some(Spelled { found: Found { attention, nodes }, weights, softmax, guard })
}

/// True if a value is a constant whose elements all equal this number.
fn all(graph: &Graph, value: ValueId, number: f64) -> bool {
    let constant = graph.as_constant(value).and_then(|c| c.value().ok());
    constant.is_some_and(|tensor| tensor.to_f64().iter().all(|&v| v == number))
}

/// Looks for a view that holds elements several times, as the keys of grouped queries. `None` if there is none; true if one node alone
/// reads the value and each view on the way.
fn repeated(graph: &Graph, mut value: ValueId) -> Option<bool> {
    let mut alone = true;
    while graph.is_view(value.node) {
        let source = graph.operands(value.node)[0]?;
        alone &= !graph.is_output(value) && graph.users(value).len() == 1;
        if graph.fact(source).shape.numel() < graph.fact(value).shape.numel() {
            return Some(alone);
        }
        value = source;
    }
    None
}

impl Found {
    /// True if one kernel is cheaper. Repeated keys and values that are copied would all be held at once, and a few rows of scores are
    /// smaller than one copy. If nothing else reads the copies, none are made: kernels of GPUs read each key once for all its queries.
    fn is_cheaper(&self, graph: &Graph, sink: NodeId, target: &Target) -> bool {
        let Fact { shape: result, dtype } = &graph.node(sink).outputs[0].fact;
        if !target.has_attention_for(*dtype) {
            return false;
        }
        let seconds = [self.attention.products, sink].map(|product| graph.operands(product)[1]);
        let copied = |v: ValueId| repeated(graph, v).is_some_and(|alone| !alone || !target.shares_repeated_keys());
        !seconds.into_iter().flatten().any(copied) || result[result.len() - 2] >= result[result.len() - 1]
    }

    /// The values that the scores read beside the product, each once. Numbers are not among them: they are part of the code.
    fn further(&self, graph: &Graph) -> HashSet<ValueId> {
        // The operand of a band is a space, which nothing reads.
        let maps = self.nodes.iter().filter(|&&n| {
            n != self.attention.products
                && Some(n) != self.attention.second
                && graph.node(n).op_name() != BAND
                && matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Map(_)))
        });
        let operands = maps.flat_map(|&n| graph.operands(n)).flatten();
        let number =
            |v: ValueId| graph.as_constant(v).is_some_and(|c| c.fact.shape.numel() == 1 && c.fact.dtype.is_float());
        operands.filter(|&v| !self.nodes.contains(&v.node) && !number(v)).collect()
    }
}
