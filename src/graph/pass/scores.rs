//! Scores of an attention that is trained are computed again by each product of the backward computation that reads them, and are stored nowhere.
//! The forward computation keeps one number for each row, the logarithm `l` of the sum of its exponentials, beside its result `y`.
//!
//! ```text
//! s = f (q kᵀ)     p = exp (s - l)     y = p v           dp = dy vᵀ     d = sum (dy y)     ds = p (dp - d)
//!
//! dq = f' (ds) k       dk = f' (ds)ᵀ q       dv = pᵀ dy              one kernel each: q kᵀ and dy vᵀ are computed in it
//! ```
//!
//! A row's sum of `p dp`, which the gradient of a softmax takes, is that of `dy y`: both are sums over `p dy vᵀ`. So no row has to be known as a
//! whole before its scores are used.

use super::attention::{self, Spelled};
use super::{Context, group};
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Attr, Attrs, Lower, NodeId, ValueId, build};
use crate::ops::{BAND, SCORES};
use crate::shape::{Access, Shape};
use std::collections::{BTreeSet, HashMap, HashSet};

/// A kernel's reads beside those of its scores: five matrices, and two numbers for each row.
const MATRICES: usize = 7;
/// Nodes of a kernel beside the scores' own and those of their gradient.
const FURTHER_NODES: usize = 8;
/// A larger number, added to scores or in their place, may hide a row. Beside a smaller one, `f32` holds a logarithm to a hundredth.
const LOWEST: f64 = 1e5;

/// Rewrites the products that read scores.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !graph.has_backward() {
        return Ok(());
    }
    let mut changed = false;
    for sink in graph.order()? {
        let Some(attended) = attention::trained(graph, sink, context) else { continue };
        let backward = Backward::of(graph, sink, attended);
        let suits = backward.as_ref().is_some_and(|backward| backward.suits(graph, context));
        if !context.decisions.if_valid("scores again", sink, suits) {
            continue;
        }
        if let Some(backward) = backward {
            backward.rewrite(graph, context)?;
            changed = true;
        }
    }
    if changed {
        graph.sweep();
    }
    Ok(())
}

/// A product that reads a matrix of scores, or what is made of them.
struct Reader {
    product: NodeId,
    matrix: ValueId,
    /// True if it reads the matrix transposed.
    turned: bool,
    /// True if the matrix is its right operand.
    right: bool,
}

/// What the backward computation does with an attention's scores.
struct Backward {
    sink: NodeId,
    attended: Spelled,
    /// Elementwise nodes over the scores.
    maps: HashSet<NodeId>,
    /// The product of the result's gradient and the values.
    second: Option<NodeId>,
    /// The sums of rows that the softmax's gradient takes.
    sums: Vec<NodeId>,
    readers: Vec<Reader>,
}

impl Backward {
    /// Everything between the scores and the products that read them; `None` if anything else does.
    fn of(graph: &Graph, sink: NodeId, attended: Spelled) -> Option<Backward> {
        let mut all =
            Backward { sink, attended, maps: HashSet::new(), second: None, sums: Vec::new(), readers: Vec::new() };
        // In order: a plan is the same each time.
        let own: BTreeSet<NodeId> = all.attended.found.nodes.iter().copied().collect();
        let mut rest: Vec<(ValueId, NodeId)> = Vec::new();
        let read_by = |graph: &Graph, value: ValueId| graph.users(value).into_iter().map(move |user| (value, user));
        own.iter().filter(|&&node| node != sink).for_each(|&node| rest.extend(read_by(graph, node.output(0))));
        rest.retain(|(_, user)| !own.contains(user));
        while let Some((value, user)) = rest.pop() {
            if all.maps.contains(&user) {
                continue;
            }
            let op = graph.node(user).op()?;
            match op.lower {
                _ if op.name == "MatMul" => all.read(graph, user, value, false)?,
                Lower::View(_) => {
                    let is_alone = is_transposed(graph, user) && !graph.is_output(user.output(0));
                    is_alone.then_some(())?;
                    for product in graph.users(user.output(0)) {
                        (graph.node(product).op_name() == "MatMul").then_some(())?;
                        // The matrix may be both operands' source.
                        all.read_as(graph, product, value, user.output(0), true)?;
                    }
                }
                Lower::Map(map) => {
                    let is_indexed = op.name != BAND && group::uses_index(graph, user, map);
                    let fits = graph.fact(user.output(0)).shape == *all.space(graph);
                    (fits && !is_indexed && !graph.is_output(user.output(0))).then_some(())?;
                    all.maps.insert(user);
                    rest.extend(read_by(graph, user.output(0)));
                    // What else it reads may be made of the second product alone.
                    for operand in graph.operands(user).into_iter().flatten() {
                        all.reach(graph, operand, &mut rest)?;
                    }
                }
                Lower::Reduce(_) => all.sum(graph, user)?,
                _ => return None,
            }
        }
        all.is_closed(graph).then_some(all)
    }

    fn space<'g>(&self, graph: &'g Graph) -> &'g Shape {
        &graph.fact(self.attended.weights).shape
    }

    fn read(&mut self, graph: &Graph, product: NodeId, matrix: ValueId, turned: bool) -> Option<()> {
        self.read_as(graph, product, matrix, matrix, turned)
    }

    fn read_as(
        &mut self,
        graph: &Graph,
        product: NodeId,
        matrix: ValueId,
        operand: ValueId,
        turned: bool,
    ) -> Option<()> {
        let &[Some(a), Some(b)] = &graph.operands(product)[..] else { return None };
        let both = a == operand && b == operand;
        let rank = self.space(graph).len();
        let matrices = [a, b].iter().all(|&v| graph.fact(v).shape.len() == rank);
        (!both && matrices && graph.is_backward(product)).then_some(())?;
        if let Some(known) = self.readers.iter().find(|reader| reader.product == product) {
            return (known.matrix == matrix && known.turned == turned).then_some(());
        }
        self.readers.push(Reader { product, matrix, turned, right: b == operand });
        Some(())
    }

    /// Follows an operand of a map up to the second product, if it is made of that.
    fn reach(&mut self, graph: &Graph, value: ValueId, rest: &mut Vec<(ValueId, NodeId)>) -> Option<()> {
        let node = value.node;
        let known = self.maps.contains(&node) || self.attended.found.nodes.contains(&node) || self.second == Some(node);
        if known || graph.fact(value).shape != *self.space(graph) || !graph.is_backward(node) {
            return Some(());
        }
        let Some(op) = graph.node(node).op() else { return Some(()) };
        match op.lower {
            _ if op.name == "MatMul" && self.second.is_none() => self.second = Some(node),
            Lower::Map(map) if op.name == BAND || !group::uses_index(graph, node, map) => {
                self.maps.insert(node);
                rest.extend(graph.users(value).into_iter().map(|user| (value, user)));
                for operand in graph.operands(node).into_iter().flatten() {
                    self.reach(graph, operand, rest)?;
                }
            }
            // Anything else is a matrix that is stored.
            _ => {}
        }
        Some(())
    }

    /// Takes a row's sum of weights times their gradients.
    fn sum(&mut self, graph: &Graph, node: NodeId) -> Option<()> {
        let rank = self.space(graph).len();
        let axes = graph.with_call(node, |call| call.reduced_axes())?.ok()?;
        let kept = graph.fact(node.output(0)).shape.len() == rank;
        (graph.node(node).op_name() == "ReduceSum" && axes == [rank - 1] && kept).then_some(())?;
        let product = graph.operands(node)[0]?;
        (graph.node(product.node).op_name() == "Mul").then_some(())?;
        let &[Some(a), Some(b)] = &graph.operands(product.node)[..] else { return None };
        let weight = |value: ValueId| uncast(graph, value) == self.attended.weights;
        let gradient = if weight(a) { b } else { weight(b).then_some(a)? };
        let mut gradient = uncast(graph, gradient);
        if let (Some(guard), "Where") = (self.attended.guard, graph.node(gradient.node).op_name()) {
            // Rows without weights have neither a result nor a sum.
            let &[Some(without), Some(_), Some(other)] = &graph.operands(gradient.node)[..] else { return None };
            (without == guard).then_some(())?;
            gradient = uncast(graph, other);
        }
        let second = gradient.node;
        self.is_second(graph, second).then_some(())?;
        self.second.get_or_insert(second);
        if !self.sums.contains(&node) {
            self.sums.push(node);
        }
        (self.second == Some(second)).then_some(())
    }

    /// True if a node multiplies the gradient of the result by the transposed values.
    fn is_second(&self, graph: &Graph, node: NodeId) -> bool {
        let turned = || {
            (graph.node(node).op_name() == "MatMul").then_some(())?;
            let &[Some(gradient), Some(turned)] = &graph.operands(node)[..] else { return None };
            let values = graph.operands(self.sink)[1]?;
            let ((a, own), (b, other)) = (viewed(graph, values)?, viewed(graph, turned)?);
            let rank = own.shape.len();
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.swap(rank - 2, rank - 1);
            let shape = graph.fact(gradient).shape == graph.fact(self.sink.output(0)).shape;
            Some(shape && a == b && own.permute(&perm) == other)
        };
        turned() == Some(true)
    }

    /// True if nothing but the readers, and the sums, gets at what would not be stored any more.
    fn is_closed(&self, graph: &Graph) -> bool {
        let transposed = |node: NodeId| is_transposed(graph, node);
        let known = |user: &NodeId| {
            self.maps.contains(user)
                || self.sums.contains(user)
                || self.readers.iter().any(|reader| reader.product == *user)
                || transposed(*user)
        };
        let values = self.maps.iter().chain(&self.second).map(|node| node.output(0));
        let summed = self.sums.iter().flat_map(|sum| graph.users(sum.output(0))).all(|user| self.maps.contains(&user));
        let closed = values.into_iter().all(|value| !graph.is_output(value) && graph.users(value).iter().all(known));
        // Of the softmax's own values, only its result is computed again.
        let inner = |value: &ValueId| self.attended.softmax.contains(&value.node);
        let operands = self.maps.iter().flat_map(|&map| graph.operands(map)).flatten();
        let taken = operands.chain(self.readers.iter().map(|reader| reader.matrix)).any(|value| inner(&value));
        !self.readers.is_empty() && closed && summed && !taken
    }

    /// True if kernels of the target compute all the products with their scores.
    fn suits(&self, graph: &Graph, context: &Context) -> bool {
        let products: Vec<NodeId> = [self.attended.found.attention.products].into_iter().chain(self.second).collect();
        let dtype = graph.fact(products[0].output(0)).dtype;
        let columns = |reader: &Reader| {
            let result = &graph.fact(reader.product.output(0)).shape;
            result[result.len() - if reader.right { 2 } else { 1 }]
        };
        let results: Vec<usize> = self.readers.iter().map(columns).collect();
        let others = self.readers.iter().filter_map(|r| graph.operands(r.product)[usize::from(!r.right)]);
        let same = others.into_iter().all(|other| graph.fact(other).dtype == dtype);
        // A kernel has the code of the scores and that of their gradient, at most.
        let (chain, maps) = (self.chain(graph), self.maps.iter().copied());
        let nodes: BTreeSet<NodeId> = chain.iter().copied().chain(maps).collect();
        let read = nodes.iter().flat_map(|&node| graph.operands(node)).flatten();
        let read: BTreeSet<ValueId> = read.filter(|value| !nodes.contains(&value.node)).collect();
        let most = MATRICES + read.len() <= group::max_reads(context.target);
        let small = nodes.len() + FURTHER_NODES <= group::MAX_GROUP_NODES;
        let hidden = chain.iter().any(|&node| self.may_hide(graph, node));
        let again = attention::computes_again(graph, &products, &results, context.target);
        same && small && most && !hidden && again
    }

    /// The elementwise nodes between the first product and the scores.
    fn chain(&self, graph: &Graph) -> BTreeSet<NodeId> {
        let (mut found, mut rest) = (BTreeSet::new(), vec![self.attended.found.attention.scores.node]);
        while let Some(node) = rest.pop() {
            let own = self.attended.found.nodes.contains(&node) && node != self.attended.found.attention.products;
            if own && found.insert(node) {
                rest.extend(graph.operands(node).into_iter().flatten().map(|value| value.node));
            }
        }
        found
    }

    /// True if a node of the scores may hide all keys of a row by a number that is not minus infinity. The softmax of such a row has weights, but
    /// one number of `f32` does not hold a logarithm beside a score as low as that.
    fn may_hide(&self, graph: &Graph, node: NodeId) -> bool {
        let given =
            |value: &&ValueId| !self.attended.found.nodes.contains(&value.node) && graph.fact(**value).dtype.is_float();
        let operands: Vec<ValueId> = graph.operands(node).into_iter().flatten().collect();
        match (graph.node(node).op_name(), &operands[..]) {
            (BAND, _) => false,
            ("Where", &[condition, yes, no]) => [(yes, false), (no, true)].into_iter().any(|(value, shown)| {
                given(&&value) && rows_of(graph, value, is_low, true) && !shows_all_rows(graph, condition, shown)
            }),
            // What is added may be a mask; what multiplies is a scale.
            ("Add" | "Sub" | "Max" | "Min", all) => {
                all.iter().filter(given).any(|&value| rows_of(graph, value, is_low, true))
            }
            (_, all) => all.iter().filter(given).any(|&value| rows_of(graph, value, is_low, false)),
        }
    }

    fn rewrite(self, graph: &mut Graph, context: &Context) -> Result<()> {
        graph.insert_at(self.sink);
        let name = graph.node(self.sink).name.clone();
        let mut own = Again { backward: &self, graph, context, name: &name, log_sum: None, sums: HashMap::new() };
        let log_sum = own.log_sum()?;
        let mut sums = HashMap::new();
        if let Some(second) = self.second {
            own.graph.insert_at(second);
            for &sum in &self.sums {
                sums.insert(sum.output(0), own.row_sum(sum)?);
            }
        }
        for reader in &self.readers {
            let name = graph.node(reader.product).name.clone();
            graph.insert_at(reader.product);
            let mut again =
                Again { backward: &self, graph, context, name: &name, log_sum: Some(log_sum), sums: sums.clone() };
            let other = again.graph.operands(reader.product)[usize::from(!reader.right)].expect("it has two operands");
            let matrix = again.matrix(reader.matrix, reader.turned != reader.right, &mut HashMap::new())?;
            let result = if reader.right {
                // The transposed product of transposed operands.
                let other = again.turned(other)?;
                let result = again.add("MatMul", &[Some(matrix), Some(other)], Attrs::new())?;
                again.turned(result)?
            } else {
                again.add("MatMul", &[Some(matrix), Some(other)], Attrs::new())?
            };
            graph.replace(reader.product.output(0), result);
        }
        Ok(())
    }
}

/// A copy of what scores are made of.
struct Again<'a> {
    backward: &'a Backward,
    graph: &'a mut Graph,
    context: &'a Context<'a>,
    name: &'a str,
    /// The logarithm of a row's sum of exponentials.
    log_sum: Option<ValueId>,
    /// What stands for the sums of rows.
    sums: HashMap<ValueId, ValueId>,
}

impl Again<'_> {
    fn add(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> Result<ValueId> {
        self.context.add(self.graph, self.name, op, inputs, attrs)
    }

    fn cast(&mut self, value: ValueId, like: ValueId) -> Result<ValueId> {
        let dtype = self.graph.fact(like).dtype;
        if self.graph.fact(value).dtype == dtype {
            return Ok(value);
        }
        self.add("Cast", &[Some(value)], Attrs::new().with("to", dtype.onnx()))
    }

    /// A value with its last two axes, among as many as the scores have, in the other order.
    fn turned(&mut self, value: ValueId) -> Result<ValueId> {
        let (rank, shape) = (self.backward.space(self.graph).len(), self.graph.fact(value).shape.clone());
        if shape.numel() == 1 {
            return Ok(value);
        }
        let made = build(Decomposer::new(self.graph, self.name.to_owned()), |b| {
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.swap(rank - 2, rank - 1);
            let whole = [&vec![1; rank - shape.len()], &shape[..]].concat();
            let value = b.value(value);
            let value = if whole.len() == shape.len() { value } else { value.shaped(&whole) };
            Ok(vec![value.transpose(&perm)])
        });
        Ok(made.map_err(|what| self.graph.node(value.node).error(what))?[0])
    }

    /// The logarithm of each row's sum of exponentials.
    fn log_sum(&mut self) -> Result<ValueId> {
        let backward = self.backward;
        let [exp, sum, shifted, max] = backward.attended.softmax;
        let attrs = |graph: &Graph, node: NodeId| graph.node(node).attrs.clone();
        let scores = self.matrix(backward.attended.found.attention.scores, false, &mut HashMap::new())?;
        let scores = self.cast(scores, shifted.output(0))?;
        let (of_max, of_sum) = (attrs(self.graph, max), attrs(self.graph, sum));
        let top = self.add("ReduceMax", &[Some(scores)], of_max)?;
        let below = self.add("Sub", &[Some(scores), Some(top)], Attrs::new())?;
        let powers = self.add(self.graph.node(exp).op_name(), &[Some(below)], Attrs::new())?;
        let whole = self.add("ReduceSum", &[Some(powers)], of_sum)?;
        let log = self.add("Log", &[Some(whole)], Attrs::new())?;
        let log_sum = self.add("Add", &[Some(top), Some(log)], Attrs::new())?;
        let Some(guard) = backward.attended.guard.filter(|guard| self.graph.node(guard.node).op_name() == "Equal")
        else {
            return Ok(log_sum);
        };
        let low = self.graph.operands(guard.node)[1];
        let hidden = self.add("Equal", &[Some(top), low], Attrs::new())?;
        self.add("Where", &[Some(hidden), Some(top), Some(log_sum)], Attrs::new())
    }

    /// The sum of a row's results times their gradients.
    fn row_sum(&mut self, sum: NodeId) -> Result<ValueId> {
        let second = self.backward.second.expect("there is a sum of its products");
        let gradient = self.graph.operands(second)[0].expect("it has two operands");
        let (result, like, attrs) = (self.backward.sink.output(0), sum.output(0), self.graph.node(sum).attrs.clone());
        let (gradient, result) = (self.cast(gradient, like)?, self.cast(result, like)?);
        let both = self.add("Mul", &[Some(gradient), Some(result)], Attrs::new())?;
        self.add("ReduceSum", &[Some(both)], attrs)
    }

    fn turned_if(&mut self, turned: bool, value: ValueId) -> Result<ValueId> {
        if turned { self.turned(value) } else { Ok(value) }
    }

    /// A matrix of scores, or what it is made of, computed again.
    fn matrix(&mut self, value: ValueId, turned: bool, made: &mut HashMap<ValueId, ValueId>) -> Result<ValueId> {
        if let Some(&value) = made.get(&value) {
            return Ok(value);
        }
        let backward = self.backward;
        let (attended, node) = (&backward.attended, value.node);
        let found = &attended.found;
        let again = if node == found.attention.products || Some(node) == backward.second {
            let operands = self.graph.operands(node);
            let (a, b) = (operands[0].expect("a left operand"), operands[1].expect("a right operand"));
            let operands = if turned { [self.turned(b)?, self.turned(a)?] } else { [a, b] };
            self.add(SCORES, &operands.map(Some), Attrs::new())?
        } else if value == attended.weights {
            let log_sum = self.log_sum.expect("it is there before weights are computed again");
            let scores = self.matrix(found.attention.scores, turned, made)?;
            let (scores, rows) = (self.cast(scores, log_sum)?, self.turned_if(turned, log_sum)?);
            let below = self.add("Sub", &[Some(scores), Some(rows)], Attrs::new())?;
            let powers = self.add("Exp", &[Some(below)], Attrs::new())?;
            self.cast(powers, value)?
        } else if Some(value) == attended.guard && self.graph.node(node).op_name() == "Equal" {
            // The logarithm is minus infinity for a row whose largest score is: it sees nothing.
            let low = self.graph.operands(node)[1];
            let log_sum = self.log_sum.expect("it is there before guards are computed again");
            let rows = self.turned_if(turned, log_sum)?;
            self.add("Equal", &[Some(rows), low], Attrs::new())?
        } else if let Some(&sum) = self.sums.get(&value) {
            self.turned_if(turned, sum)?
        } else if backward.maps.contains(&node) || found.nodes.contains(&node) {
            let (name, mut attrs) = (self.graph.node(node).op_name(), self.graph.node(node).attrs.clone());
            if turned && name == BAND {
                attrs = across(&attrs);
            }
            let mut operands = self.graph.operands(node);
            for operand in operands.iter_mut().flatten() {
                *operand = self.matrix(*operand, turned, made)?;
            }
            self.add(name, &operands, attrs)?
        } else {
            self.turned_if(turned, value)?
        };
        made.insert(value, again);
        Ok(again)
    }
}

/// The most elements of a constant that is looked at.
const MOST_LOOKED_AT: usize = 1 << 24;

/// True for a number that is so large that nothing shows beside it. Minus infinity is no such number.
fn is_low(number: f64) -> bool {
    number != f64::NEG_INFINITY && number.abs() > LOWEST
}

/// True if all elements of a row of a constant, along its last axis, are of a kind; `unknown` if the value is none that is at hand.
fn rows_of(graph: &Graph, value: ValueId, kind: impl Fn(f64) -> bool, unknown: bool) -> bool {
    let at_hand = graph.as_constant(value).filter(|c| c.is_at_hand() && c.fact.shape.numel() <= MOST_LOOKED_AT);
    let Some(tensor) = at_hand.and_then(|constant| constant.value().ok()) else { return unknown };
    let row = graph.fact(value).shape.last().copied().unwrap_or(1).max(1);
    tensor.to_f64().chunks(row).any(|row| row.iter().all(|&number| kind(number)))
}

/// True if each row has an element where a condition is `shown`: of a constant that is at hand, or of a band.
fn shows_all_rows(graph: &Graph, condition: ValueId, shown: bool) -> bool {
    let node = graph.node(condition.node);
    let shape = &graph.fact(condition).shape;
    if node.op_name() != BAND || shape.len() < 2 {
        return !rows_of(graph, condition, |seen| (seen != 0.0) != shown, true);
    }
    let [rows, columns] = [shape[shape.len() - 2] as i64, shape[shape.len() - 1] as i64];
    let end = |name: &str, other: i64| match node.attrs.get(name) {
        Some(&Attr::Int(end)) => end,
        _ => other,
    };
    let (from, to) = (end("from", -rows), end("to", columns));
    let sees = |row: i64| (row + from).max(0) <= (row + to).min(columns - 1);
    shown && from <= to && sees(0) && sees(rows - 1)
}

/// A band with rows for columns.
fn across(attrs: &Attrs) -> Attrs {
    let end = |name: &str| match attrs.get(name) {
        Some(&Attr::Int(end)) => Some(-end),
        _ => None,
    };
    let ends = [("from", end("to")), ("to", end("from"))];
    ends.into_iter()
        .filter_map(|(name, end)| Some((name, end?)))
        .fold(Attrs::new(), |attrs, (name, end)| attrs.with(name, end))
}

/// The value before it was cast from one type of floats to another.
fn uncast(graph: &Graph, mut value: ValueId) -> ValueId {
    while let ("Cast", Some(&Some(from))) = (graph.node(value.node).op_name(), graph.operands(value.node).first()) {
        if !graph.fact(from).dtype.is_float() {
            break;
        }
        value = from;
    }
    value
}

/// True if a node changes the order of the last two axes, and of no others.
fn is_transposed(graph: &Graph, node: NodeId) -> bool {
    graph.permutation(node).is_some_and(|perm| {
        let rank = perm.len();
        rank >= 2 && perm[..rank - 2].iter().copied().eq(0..rank - 2) && perm[rank - 2..] == [rank - 1, rank - 2]
    })
}

/// The value that a view, perhaps of views, is of, and how it is read.
fn viewed(graph: &Graph, mut value: ValueId) -> Option<(ValueId, Access)> {
    let mut views = Vec::new();
    while graph.is_view(value.node) {
        views.push(value.node);
        value = graph.operands(value.node)[0]?;
    }
    let mut access = Access::contiguous(graph.fact(value).shape.clone());
    for view in views.into_iter().rev() {
        access = graph.view_access(view, &access)?;
    }
    Some((value, access))
}
