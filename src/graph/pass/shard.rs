//! Makes the graph of one rank of a mesh from the graph of the whole computation.
//!
//! ```text
//! x [8, 64] split by rows ---.                        x [4, 64]
//! w [64, 32] whole ----------'-- MatMul               w [64, 32]   MatMul [4, 32]: rows of the product
//! dw = x' dy: sums over rows                          a partial sum, AllReduce where it is read as a whole
//! ```
//!
//! The axes of the mesh are taken one after another: to the second, what the first made is an ordinary graph. Along one axis a value is whole on
//! every rank, split along one of its dims, or a sum whose terms the ranks have. What a person or a rule decides is the inputs, constants and
//! states; the rest follows: an operator is computed in parts where its row's [`part`](crate::op::OpDef::part) or
//! [`summed`](crate::op::OpDef::summed) lets it be, in the way that moves the fewest bytes between ranks. A row that knows neither is written as
//! the nodes that it decomposes into. What cannot be split is gathered, and computed by every rank.
//!
//! Ranks of a stage have the same graph: what differs is data, the parts of constants and states, and a state that holds the rank's place. The
//! axis `stage` comes last: it splits no value, and leaves each rank the nodes of its stage.

use super::{cut, decompose};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::graph::{Decomposer, Graph, Kind};
use crate::kernel::Reduction;
use crate::mesh::{Mesh, STAGE};
use crate::op::{Attr, Attrs, Call, Fact, Lower, NodeId, OpDef, OpResult, Part, ValueId, Var, build};
use crate::ops;
use crate::shape::Shape;
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The axis of a mesh that splits the rows of inputs.
pub const DATA: &str = "data";

/// The axis of a mesh that splits weights.
pub const TENSOR: &str = "tensor";

/// Weights of fewer elements are not worth an exchange.
const WORTH: usize = 256;

mod slices;
mod stages;
mod stored;

/// What stands before the names of states that are a rank's own, and in no file: its place along an axis, and the mark of what it has passed on.
pub const PLACE: &str = "mesh/";

/// What stands before the names of states that add up what runs give, until one reads the sum: each rank has its own terms.
pub const TERMS: &str = "accumulated/";

/// What stands before the names of states that an optimizer keeps beside weights, and of their moving averages.
pub const BESIDE: [&str; 2] = ["optimizer/", "ema/"];

/// True for a state that a training keeps beside a weight.
pub fn is_beside(name: &str) -> bool {
    name.starts_with(TERMS) || BESIDE.iter().any(|before| name.starts_with(before))
}

/// What is asked of a sharded graph: the mesh, one of its ranks, and what is split along which axis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharding {
    /// The ranks.
    pub mesh: Mesh,
    /// The rank whose graph is made.
    pub rank: usize,
    /// What is decided by hand. The first pattern that fits a name holds.
    pub by: Vec<Rule>,
    /// The states of a training that the ranks of an axis `data` share out.
    pub kept: Kept,
}

impl Sharding {
    /// The ranks that have one plan, of each stage.
    pub fn classes(&self) -> impl Iterator<Item = (Sharding, Vec<usize>)> {
        (0..self.mesh.stages()).map(|stage| {
            let ranks = self.mesh.ranks_of(stage);
            (Sharding { rank: ranks[0], ..self.clone() }, ranks)
        })
    }
}

/// Which states of a training each rank of an axis `data` keeps a part of, instead of all (ZeRO, FSDP). What is read as a whole is gathered for
/// its readers, and dead afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// Every rank has all states.
    #[default]
    Whole,
    /// What an optimizer keeps beside weights, and their averages.
    Optimizer,
    /// The sums of gradients, too.
    Gradients,
    /// All states, the weights among them.
    Weights,
}

impl Kept {
    /// The levels, by the numbers that ZeRO gives them.
    pub const LEVELS: [Kept; 4] = [Kept::Whole, Kept::Optimizer, Kept::Gradients, Kept::Weights];

    /// The dim along which ranks share out a state, if they do.
    fn dim(self, name: &str, fact: &Fact, ranks: usize) -> Option<usize> {
        let level = match name {
            _ if name.starts_with(TERMS) => Kept::Gradients,
            _ if is_beside(name) => Kept::Optimizer,
            _ => Kept::Weights,
        };
        let is_shared = self >= level && fact.dtype.is_float() && fact.shape.numel() >= WORTH;
        fact.shape.iter().position(|&extent| is_shared && extent.is_multiple_of(ranks))
    }
}

/// A decision: the values whose names fit are split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A name of an input, a constant or a state, with `*` for any text.
    pub pattern: String,
    /// The dim along which they are split.
    pub dim: usize,
    /// The axis of the mesh.
    pub axis: String,
}

impl Rule {
    /// Reads a pattern of names, a dim, an axis: `layers.*.up=1:tensor`.
    ///
    /// # Errors
    /// Expected and found.
    pub fn parse(text: &str) -> std::result::Result<Rule, String> {
        let parts = || {
            let (pattern, by) = text.rsplit_once('=')?;
            let (dim, axis) = by.split_once(':')?;
            Some(Rule { pattern: pattern.to_owned(), dim: dim.parse().ok()?, axis: axis.to_owned() })
        };
        parts().ok_or_else(|| format!("expected NAME=DIM:AXIS, such as 'layers.*.up=1:tensor', found '{text}'"))
    }
}

/// A value of the graph of which each rank has a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The name of an input, a constant or a state.
    pub name: String,
    /// The dim along which it is split.
    pub dim: usize,
    /// The axis of the mesh.
    pub axis: String,
}

/// Where the elements of a value are, along one axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Spread {
    /// Every rank has all elements.
    Whole,
    /// Each rank has a part along this dim.
    Split(usize),
    /// Each rank has terms, whose joint is the value.
    Terms(Reduction),
}

use Spread::{Split, Terms, Whole};

/// How a node is computed by ranks: what it reads, and what it gives.
#[derive(Clone, Debug)]
struct Way {
    needs: Vec<Spread>,
    gives: Spread,
    part: Option<Part>,
}

impl Way {
    /// Every rank computes the whole.
    fn whole(operands: usize) -> Way {
        Way { needs: vec![Whole; operands], gives: Whole, part: None }
    }
}

/// Makes a graph that of one rank. Returns what is split.
///
/// # Errors
/// When a decision names nothing, a dim that is not there or that the axis does not divide, or nothing is split along an axis.
pub fn run(graph: &mut Graph, sharding: &Sharding) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    let split = sharding.by.first().map(|rule| &rule.pattern[..]);
    let split = split.or((sharding.kept != Kept::Whole).then_some("the states"));
    if cut::run(graph, &sharding.mesh, split)? {
        return Ok(shards);
    }
    for Rule { pattern, dim, axis } in &sharding.by {
        sharding.mesh.axis(axis)?;
        ensure(axis != STAGE, || {
            let what = "along this axis the graph is cut between weights, and no value is split";
            Error::usage(format!("shard '{pattern}={dim}:{axis}': {what}"))
        })?;
    }
    let shares = sharding.mesh.axis(DATA).is_ok_and(|(_, axis)| axis.ranks > 1);
    ensure(shares || sharding.kept == Kept::Whole, || {
        let what = "states are shared out by the ranks of an axis 'data'";
        Error::usage(format!("mesh '{}': {what}: expected at least two of them, found none", sharding.mesh))
    })?;
    // Along an axis of one rank all is whole.
    let is_alone = |rule: &Rule| sharding.mesh.axis(&rule.axis).is_ok_and(|(_, axis)| axis.ranks == 1);
    let mut used: Vec<bool> = sharding.by.iter().map(is_alone).collect();
    let mut axes: Vec<_> = sharding.mesh.axes().iter().enumerate().filter(|(_, axis)| axis.ranks > 1).collect();
    // Weights are split while operators are as in the file.
    axes.sort_by_key(|(_, axis)| (axis.name == STAGE, axis.name != TENSOR));
    for (at, axis) in axes {
        let place = sharding.mesh.place(sharding.rank, at);
        let along = Along { name: &axis.name, ranks: axis.ranks, place };
        if axis.name == STAGE {
            stages::run(graph, &along)?;
            graph.sweep();
            graph.verify()?;
            continue;
        }
        let decided = decide(graph, &along, &sharding.by, &mut used)?;
        unknown(sharding, &used, Some(&axis.name))?;
        // Without a decision, weights of products are split as it suits what follows from that.
        let finds = axis.name == TENSOR && decided.is_empty();
        if finds {
            slices::run(graph)?;
        }
        let mut spreads: HashMap<ValueId, Spread> =
            decided.into_iter().map(|(value, dim)| (value, Split(dim))).collect();
        let mut stored = HashMap::new();
        for value in graph.states().iter().map(|state| state.value).filter(|_| axis.name == DATA) {
            let name = graph.value_name(value);
            if spreads.contains_key(&value) {
                continue;
            }
            if let Some(dim) = sharding.kept.dim(name, graph.fact(value), axis.ranks) {
                stored.insert(value, dim);
                spreads.insert(value, Split(dim));
            } else if name.starts_with(TERMS) {
                spreads.insert(value, Terms(Reduction::Sum));
            }
        }
        let scattered = stored::scattered(graph, &stored);
        let mut walk = Walk {
            stored,
            scattered,
            graph,
            along: &along,
            spreads,
            ways: HashMap::new(),
            decomposed: false,
            finds,
            whole: HashSet::new(),
        };
        walk.all()?;
        let Walk { spreads, ways, .. } = walk;
        let found = Rewrite::new(graph, &along, spreads, ways)?.all()?;
        ensure(!found.is_empty(), || {
            let (name, ranks) = (&axis.name, axis.ranks);
            Error::usage(match &name[..] {
                TENSOR => format!(
                    "mesh axis '{name}': expected a product by a weight of {WORTH} elements or more that {ranks} ranks divide, found none; \
                     say what is split, by a name, a dim and this axis"
                ),
                _ => format!(
                    "mesh axis '{name}': expected '{DATA}', '{TENSOR}' or '{STAGE}', whose ranks find what to split, or what is split along it, \
                     by a name, a dim and this axis"
                ),
            })
        })?;
        graph.sweep();
        graph.verify()?;
        shards.extend(found);
    }
    unknown(sharding, &used, None)?;
    Ok(shards)
}

/// Refuses a decision, of this axis or of any, that names nothing.
fn unknown(sharding: &Sharding, used: &[bool], axis: Option<&str>) -> Result<()> {
    let of = |rule: &Rule| axis.is_none_or(|axis| rule.axis == axis);
    let Some((rule, _)) = sharding.by.iter().zip(used).find(|(rule, used)| !**used && of(rule)) else { return Ok(()) };
    let Rule { pattern, dim, axis } = rule;
    let what = "no input, constant or state has this name, or it is split already";
    Err(Error::usage(format!("shard '{pattern}={dim}:{axis}': {what}")))
}

/// One axis of the mesh, as one rank sees it.
struct Along<'a> {
    name: &'a str,
    ranks: usize,
    place: usize,
}

/// The values that are split along an axis, each with its dim: those that rules name, and, along an axis `data`, all inputs that have as many
/// rows as the first.
fn decide(graph: &Graph, along: &Along, by: &[Rule], used: &mut [bool]) -> Result<Vec<(ValueId, usize)>> {
    let Along { name: axis, ranks, .. } = along;
    let mut decided: Vec<(ValueId, usize)> = Vec::new();
    for id in graph.order()? {
        if graph.node(id).op().is_some() {
            continue;
        }
        let value = id.output(0);
        let name = graph.value_name(value);
        let Some(at) = by.iter().position(|rule| rule.axis == **axis && file::glob(&rule.pattern, name)) else {
            continue;
        };
        let (dim, shape) = (by[at].dim, &graph.fact(value).shape);
        used[at] = true;
        let fail =
            |what: String| Err(Error::usage(format!("shard '{}={dim}:{axis}': '{name}' {what}", by[at].pattern)));
        match shape.get(dim) {
            // A pattern is for those that have the dim.
            None if by[at].pattern.contains('*') => continue,
            None => return fail(format!("is {shape}, which has no dim {dim}")),
            Some(extent) if *extent == 0 || !extent.is_multiple_of(*ranks) => {
                return fail(format!("is {shape}: {ranks} ranks do not divide {extent}"));
            }
            Some(_) => decided.push((value, dim)),
        }
    }
    if *axis == DATA && !by.iter().any(|rule| rule.axis == **axis) {
        let first = graph.inputs().first().and_then(|&input| graph.fact(input).shape.first().copied());
        let Some(rows) = first else { return Ok(decided) };
        for &input in graph.inputs().iter().filter(|&&input| graph.fact(input).shape.first() == Some(&rows)) {
            ensure(rows > 0 && rows.is_multiple_of(*ranks), || {
                let name = graph.value_name(input);
                Error::usage(format!(
                    "mesh axis 'data': input '{name}' has {rows} rows, which {ranks} ranks do not divide"
                ))
            })?;
            decided.push((input, 0));
        }
    }
    Ok(decided)
}

/// Finds how each node is computed. Facts are those of the whole computation.
struct Walk<'a> {
    graph: &'a mut Graph,
    along: &'a Along<'a>,
    spreads: HashMap<ValueId, Spread>,
    ways: HashMap<NodeId, Way>,
    decomposed: bool,
    /// True if weights are split by what their products need.
    finds: bool,
    /// States and constants that a node before has read as a whole, and results that are gathered at once.
    whole: HashSet<ValueId>,
    /// Values that are split as the states are that they come from or go to, each with its dim.
    stored: HashMap<ValueId, usize>,
    /// Values of which, if they are sums whose terms ranks have, readers want parts.
    scattered: HashMap<ValueId, usize>,
}

impl Walk<'_> {
    fn all(&mut self) -> Result<()> {
        for id in self.graph.order()? {
            self.visit(id)?;
        }
        // A state that nobody reads follows what it becomes.
        for state in self.graph.states().to_vec() {
            if let (true, Some(Split(dim))) = (self.finds, state.update.map(|update| self.spread(update))) {
                self.adopt(state.value, Split(dim));
            }
        }
        if self.decomposed {
            self.graph.sweep();
        }
        Ok(())
    }

    fn spread(&self, value: ValueId) -> Spread {
        if self.whole.contains(&value) { Whole } else { self.spreads.get(&value).copied().unwrap_or(Whole) }
    }

    /// True if a value is a weight, or is kept beside one.
    fn is_kept(&self, value: ValueId) -> bool {
        matches!(self.graph.node(value.node).kind, Kind::State(_) | Kind::Constant(_))
    }

    /// Gives a state that is not yet read the spread that its first reader needs.
    fn adopt(&mut self, value: ValueId, needs: Spread) {
        let is_state = matches!(self.graph.node(value.node).kind, Kind::State(_));
        let is_free = self.finds && is_state && !self.spreads.contains_key(&value) && !self.whole.contains(&value);
        if let (true, Split(dim)) = (is_free, needs)
            && self.graph.fact(value).shape.get(dim).is_some_and(|extent| extent.is_multiple_of(self.along.ranks))
        {
            self.spreads.insert(value, needs);
            // What is kept beside a weight lies as it does.
            let (name, shape) = (self.graph.value_name(value), &self.graph.fact(value).shape);
            let is_its = |other: &ValueId| {
                let before = self.graph.value_name(*other).strip_suffix(name);
                before.is_some_and(|before| before.ends_with('/') && is_beside(before))
                    && self.graph.fact(*other).shape == *shape
                    && !self.whole.contains(other)
            };
            let beside: Vec<ValueId> = self.graph.states().iter().map(|state| state.value).filter(is_its).collect();
            beside.into_iter().for_each(|other| _ = self.spreads.entry(other).or_insert(needs));
        }
    }

    /// The way of a product, or a lookup, of whole data and a weight: in columns of the weight.
    fn columns(&self, id: NodeId, op: &OpDef) -> Option<Way> {
        let operands = self.graph.operands(id);
        let [Some(a), Some(b), ..] = operands[..] else { return None };
        let (weight, data, at) = match op.name {
            "MatMul" | "plimsoll.Conv" => (b, a, 1),
            "Gather" => (a, b, 0),
            _ => return None,
        };
        let shape = &self.graph.fact(weight).shape;
        let is_weight = self.finds && self.is_kept(weight) && !self.is_kept(data) && !self.whole.contains(&weight);
        if !is_weight || shape.len() < 2 || shape.numel() < WORTH {
            return None;
        }
        let ranks = self.along.ranks;
        let (dim, gives) = match op.name {
            "MatMul" => (shape.len() - 1, self.graph.fact(id.output(0)).shape.len() - 1),
            "Gather" => {
                let axis = self.graph.with_call(id, |call| call.axis("axis", 0, call.shape(0)))?.ok()?;
                let last = (shape.len() - 1, self.graph.fact(id.output(0)).shape.len() - 1);
                Some(last).filter(|_| axis + 1 < shape.len())?
            }
            _ => {
                let groups = self.graph.with_call(id, |call| call.int("group", 1))?.ok()?;
                Some((0, 1)).filter(|_| groups == 1)?
            }
        };
        if self.graph.fact(data).shape.len() < 2 && op.name == "MatMul" || !shape[dim].is_multiple_of(ranks) {
            return None;
        }
        let mut needs = vec![Whole; operands.len()];
        needs[at] = Split(dim);
        Some(Way { needs, gives: Split(gives), part: Part::of(vec![None; operands.len()]) })
    }

    fn visit(&mut self, id: NodeId) -> Result<()> {
        let Some(op) = self.graph.node(id).op() else { return Ok(()) };
        let operands = self.graph.operands(id);
        let mut spreads: Vec<Spread> = operands.iter().map(|v| v.map_or(Whole, |v| self.spread(v))).collect();
        if let Some(way) = self.adds(id, op, &spreads) {
            self.take(id, way);
            return Ok(());
        }
        if let Some(way) = self.as_stored(id, op, &operands, &mut spreads) {
            if let Split(dim) = way.gives {
                self.stored.insert(id.output(0), dim);
            }
            self.take(id, way);
            return Ok(());
        }
        if spreads.iter().all(|spread| *spread == Whole) {
            return self.visit_whole(id, op, &operands);
        }
        let is_split = |spread: &Spread| matches!(spread, Split(_));
        let joint = self.joint(id, op, &spreads);
        let best = || self.graph.with_call(id, |call| self.best(call, &operands, &spreads)).flatten();
        let way = joint.or_else(best);
        let keeps = |way: &Way| way.needs.iter().zip(&spreads).all(|(need, has)| !is_split(has) || need == has);
        match way {
            Some(way) if keeps(&way) || !matches!(op.lower, Lower::Decompose(_)) => self.take(id, way),
            // Its pieces may keep more of what is split.
            _ if matches!(op.lower, Lower::Decompose(_)) => return self.visit_pieces(id),
            _ => self.take(id, Way::whole(operands.len())),
        }
        Ok(())
    }

    /// Goes on with the nodes that a node's row names, in its place.
    fn visit_pieces(&mut self, id: NodeId) -> Result<()> {
        self.decomposed = true;
        decompose(self.graph, id)?.into_iter().try_for_each(|piece| self.visit(piece))
    }

    /// A node of whole operands is computed by every rank, unless it has a weight that is worth to be split.
    fn visit_whole(&mut self, id: NodeId, op: &OpDef, operands: &[Option<ValueId>]) -> Result<()> {
        let worth = |value: &ValueId| self.is_kept(*value) && self.graph.fact(*value).shape.numel() >= WORTH;
        let has_weight = self.finds && operands.iter().flatten().any(worth);
        match op.lower {
            Lower::Decompose(_) if has_weight => self.visit_pieces(id),
            _ => {
                match self.columns(id, op) {
                    Some(way) => {
                        self.take(id, way);
                        // Rows of a table go on as a whole: what follows is seldom a product.
                        if op.name == "Gather" {
                            self.whole.insert(id.output(0));
                        }
                    }
                    None => {
                        let free = operands.iter().flatten().filter(|value| !self.stored.contains_key(value));
                        self.whole.extend(free);
                    }
                }
                Ok(())
            }
        }
    }

    fn take(&mut self, id: NodeId, way: Way) {
        for (value, need) in self.graph.operands(id).into_iter().zip(&way.needs) {
            let Some(value) = value else { continue };
            self.adopt(value, *need);
            if *need == Whole && self.is_kept(value) && !self.stored.contains_key(&value) {
                self.whole.insert(value);
            }
        }
        for port in 0..self.graph.node(id).outputs.len() {
            self.spreads.insert(id.output(port), way.gives);
        }
        self.ways.insert(id, way);
    }

    /// The way of what adds or moves terms: they stay terms.
    fn adds(&self, id: NodeId, op: &OpDef, spreads: &[Spread]) -> Option<Way> {
        let adds =
            matches!(op.name, "Add" | "Sub" | "Sum") && spreads.iter().all(|spread| *spread == Terms(Reduction::Sum));
        let moves = matches!((spreads, op.lower), ([Terms(_)], Lower::View(_)));
        let alone = self.graph.node(id).outputs.len() == 1;
        (alone && (adds || moves)).then(|| Way { needs: spreads.to_vec(), gives: spreads[0], part: None })
    }

    /// The way of what multiplies terms: they stay terms.
    fn joint(&self, id: NodeId, op: &OpDef, spreads: &[Spread]) -> Option<Way> {
        let scales = self.graph.node(id).outputs.len() == 1 && self.scales(id, op, spreads);
        scales.then(|| Way { needs: spreads.to_vec(), gives: Terms(Reduction::Sum), part: None })
    }

    /// True if a node multiplies terms of a sum, and makes no more of them.
    fn scales(&self, id: NodeId, op: &OpDef, spreads: &[Spread]) -> bool {
        let at = match (op.name, spreads) {
            ("Mul" | "Div", [Terms(Reduction::Sum), Whole]) => 0,
            ("Mul", [Whole, Terms(Reduction::Sum)]) => 1,
            _ => return false,
        };
        let terms = self.graph.operands(id)[at].expect("a factor is there");
        let fact = self.graph.fact(id.output(0));
        fact.dtype.is_float() && fact.shape == self.graph.fact(terms).shape
    }

    /// The way that keeps the most bytes where they are split, and then moves the fewest. `None` if only the whole can be computed, of what
    /// is split.
    fn best(&self, call: &Call, operands: &[Option<ValueId>], spreads: &[Spread]) -> Option<Way> {
        let ranks = self.along.ranks;
        if !spreads.iter().any(|spread| matches!(spread, Split(_))) {
            return Some(Way::whole(operands.len()));
        }
        let facts = call.infer().ok()?;
        let [fact] = &facts[..] else { return None };
        let needs = |axes: &[Option<usize>]| axes.iter().map(|axis| axis.map_or(Whole, Split)).collect::<Vec<_>>();
        let mut ways: Vec<Way> = Vec::new();
        for axis in 0..fact.shape.len() {
            if let Some(part) = call.part(axis, ranks) {
                ways.push(Way { needs: needs(&part.inputs), gives: Split(axis), part: Some(part) });
            }
        }
        if call.op.name == ops::DROPOUT {
            // A part draws the numbers of its places in the whole.
            let divides = |&axis: &usize| fact.shape[axis] > 0 && fact.shape[axis].is_multiple_of(ranks);
            for axis in (0..fact.shape.len()).filter(divides) {
                let mut needs = vec![Whole; operands.len()];
                needs[0] = Split(axis);
                ways.push(Way { needs, gives: Split(axis), part: None });
            }
        }
        for (axes, by) in call.summed(ranks) {
            if matches!(by, Reduction::Sum | Reduction::Max | Reduction::Min) {
                ways.push(Way { needs: needs(&axes), gives: Terms(by), part: None });
            }
        }
        let bytes = |value: Option<ValueId>| value.map_or(0, |value| self.graph.fact(value).bytes()) as i64;
        let judge = |way: &Way| {
            let each = || way.needs.iter().zip(spreads).zip(operands);
            let kept = each().filter(|((need, has), _)| matches!(has, Split(_)) && need == has);
            let kept: i64 = kept.map(|(_, &value)| bytes(value)).sum();
            let moved: i64 = each().map(|((need, has), &value)| moved(*has, *need, bytes(value), ranks as i64)).sum();
            (kept, -moved)
        };
        let best = ways.into_iter().enumerate().max_by_key(|(at, way)| (judge(way), std::cmp::Reverse(*at)))?.1;
        (judge(&best).0 > 0).then_some(best)
    }
}

/// Bytes that each rank sends to make of one spread another.
fn moved(has: Spread, needs: Spread, bytes: i64, ranks: i64) -> i64 {
    let others = bytes * (ranks - 1) / ranks;
    match (has, needs) {
        (Terms(_), Whole) => 2 * others,
        (Terms(_), Split(_)) | (Split(_), Whole) => others,
        (Split(a), Split(b)) if a != b => others / ranks,
        _ => 0,
    }
}

/// Makes the graph of one rank, node by node: facts become those of the parts.
struct Rewrite<'a> {
    graph: &'a mut Graph,
    along: &'a Along<'a>,
    spreads: HashMap<ValueId, Spread>,
    ways: HashMap<NodeId, Way>,
    /// The facts of the whole computation.
    facts: HashMap<ValueId, Fact>,
    /// What was made of values for those who need them otherwise: in the backward computation anew.
    made: HashMap<(ValueId, Spread, bool), ValueId>,
    /// The state that holds the rank's place.
    place: Option<ValueId>,
    /// What is split.
    shards: Vec<Shard>,
}

impl<'a> Rewrite<'a> {
    fn new(
        graph: &'a mut Graph,
        along: &'a Along<'a>,
        spreads: HashMap<ValueId, Spread>,
        ways: HashMap<NodeId, Way>,
    ) -> Result<Rewrite<'a>> {
        let mut facts = HashMap::new();
        for id in graph.order()? {
            for port in 0..graph.node(id).outputs.len() {
                facts.insert(id.output(port), graph.fact(id.output(port)).clone());
            }
        }
        Ok(Rewrite { graph, along, spreads, ways, facts, made: HashMap::new(), place: None, shards: Vec::new() })
    }

    fn spread(&self, value: ValueId) -> Spread {
        self.spreads.get(&value).copied().unwrap_or(Whole)
    }

    /// The fact of a rank's part.
    fn part_of(&self, value: ValueId, dim: usize) -> Fact {
        let mut fact = self.facts[&value].clone();
        fact.shape[dim] /= self.along.ranks;
        fact
    }

    fn all(mut self) -> Result<Vec<Shard>> {
        let order = self.graph.order()?;
        for &id in &order {
            if let (None, Split(dim)) = (self.graph.node(id).op(), self.spread(id.output(0))) {
                self.note(self.graph.value_name(id.output(0)).to_owned(), dim);
            }
            match (&self.graph.node(id).kind, self.spread(id.output(0))) {
                (Kind::Input, Split(dim)) => {
                    let fact = self.part_of(id.output(0), dim);
                    self.graph.set_input(id.output(0), fact);
                }
                (Kind::State(initial), Split(dim)) => {
                    let initial = initial.clone().map(|initial| self.slice(&initial, dim)).transpose()?;
                    let fact = self.part_of(id.output(0), dim);
                    self.graph.set_state(id.output(0), fact, initial);
                }
                (Kind::Constant(constant), Split(dim)) => {
                    let part = self.slice(&constant.clone(), dim)?;
                    self.graph.fill(id.output(0), part);
                }
                (Kind::Op(_), _) => self.node(id)?,
                _ => {}
            }
        }
        for (at, value) in self.graph.outputs().iter().map(|(_, value)| *value).enumerate().collect::<Vec<_>>() {
            let whole = self.convert(value, Whole, None)?;
            self.graph.set_output(at, whole);
        }
        for state in self.graph.states().to_vec() {
            let Some(update) = state.update else { continue };
            let (needs, at) =
                (self.spread(state.value), Some(update.node).filter(|&node| self.graph.is_backward(node)));
            let value = self.convert(update, needs, at)?;
            self.graph.set_update(state.value, value);
        }
        Ok(self.shards)
    }

    /// Notes that a value is split.
    fn note(&mut self, name: String, dim: usize) {
        let shard = Shard { name, dim, axis: self.along.name.to_owned() };
        if !self.shards.contains(&shard) {
            self.shards.push(shard);
        }
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let operands = self.graph.operands(id);
        let way = self.ways.remove(&id);
        let Way { needs, gives, part } = way.unwrap_or_else(|| Way::whole(operands.len()));
        let mut read = operands.clone();
        for (operand, need) in read.iter_mut().zip(&needs) {
            if let Some(value) = *operand {
                *operand = Some(self.convert(value, *need, Some(id))?);
            }
        }
        if read == operands && gives == Whole && needs.iter().all(|need| *need == Whole) {
            return Ok(());
        }
        let dropped = self.dropped(id, gives, &mut read)?;
        self.graph.read(id, &read);
        let attrs = &self.graph.node(id).attrs;
        let attrs = match (dropped, &part, gives) {
            (Some(dropped), ..) => dropped,
            (_, Some(part), Split(dim)) => part.attrs(attrs, &self.part_of(id.output(0), dim).shape),
            _ => attrs.clone(),
        };
        self.graph.set_attrs(id, attrs)?;
        let found = self.graph.fact(id.output(0));
        let expected = match gives {
            Split(dim) => self.part_of(id.output(0), dim),
            _ => self.facts[&id.output(0)].clone(),
        };
        assert_eq!(*found, expected, "a part of '{}' has its share of the extents", self.graph.node(id).name);
        Ok(())
    }

    /// The attributes of a part of a Dropout, which also reads the place of its first element in the whole.
    fn dropped(&mut self, id: NodeId, gives: Spread, read: &mut Vec<Option<ValueId>>) -> Result<Option<Attrs>> {
        let (Split(dim), ops::DROPOUT) = (gives, self.graph.node(id).op_name()) else { return Ok(None) };
        let attrs = self.graph.node(id).attrs.clone();
        let of = match attrs.get("of") {
            Some(Attr::Ints(of)) => of.clone(),
            _ => self.facts[&id.output(0)].shape.iter().map(|&extent| extent as i64).collect(),
        };
        let each = self.part_of(id.output(0), dim).shape[dim] as i64 * of[dim + 1..].iter().product::<i64>();
        let (place, earlier, name) = (self.place(), read.get(2).copied().flatten(), self.graph.node(id).name.clone());
        self.graph.insert_at(id);
        let made = build(&mut Decomposer::new(self.graph, name), |b| {
            let first = b.value(place) * each as f64;
            Ok(vec![earlier.map_or(first, |earlier| first + b.value(earlier))])
        });
        read.resize(3, None);
        read[2] = Some(made.map_err(|what| self.graph.node(id).error(what))?[0]);
        Ok(Some(attrs.with("of", of)))
    }

    /// A rank's part of a constant.
    fn slice(&self, constant: &Arc<Constant>, dim: usize) -> Result<Arc<Constant>> {
        let mut fact = constant.fact.clone();
        let each = fact.shape[dim] / self.along.ranks;
        fact.shape[dim] = each;
        let op = ops::find("Slice").expect("the table has the row");
        let attrs = Attrs::span(dim, self.along.place * each..(self.along.place + 1) * each);
        let part = Constant::derived(constant.name.clone(), op, attrs, vec![Some(Arc::clone(constant))], 0, fact)?;
        Ok(Arc::new(part.apart()))
    }

    /// The rank's place, an `i32`.
    fn place(&mut self) -> ValueId {
        let (name, place) = (format!("{PLACE}{}", self.along.name), self.along.place as f64);
        let graph = &mut *self.graph;
        *self.place.get_or_insert_with(|| {
            let initial = Constant::new(name.clone(), Tensor::from_f64(DType::I32, Shape::default(), &[place]));
            graph.state(name, Fact::new(DType::I32, []), Some(Arc::new(initial)))
        })
    }

    /// A value as a reader needs it.
    fn convert(&mut self, value: ValueId, needs: Spread, reader: Option<NodeId>) -> Result<ValueId> {
        let has = self.spread(value);
        if has == needs {
            return Ok(value);
        }
        let again = reader.is_some_and(|reader| self.graph.is_backward(reader));
        if let Some(&made) = self.made.get(&(value, needs, again)) {
            return Ok(made);
        }
        if let (Split(_), Terms(_)) = (has, needs) {
            // One rank gives the whole, and the others nothing.
            let whole = self.convert(value, Whole, reader)?;
            return self.convert(whole, needs, reader);
        }
        let made = match (self.graph.as_constant(value).cloned(), has, needs) {
            (Some(constant), Whole, Split(dim)) => {
                self.graph.insert_at(value.node);
                if constant.fact.shape.numel() >= WORTH {
                    self.note(constant.name.clone(), dim);
                }
                let part = self.slice(&constant, dim)?;
                self.graph.constant(part)
            }
            _ => {
                let place = (has == Whole).then(|| self.place());
                // Terms are joined as they appear; what is gathered is gathered where it is read.
                let joins = matches!(has, Terms(_));
                self.graph.insert_at(reader.filter(|_| !joins).unwrap_or(value.node));
                self.exchange(value, has, needs, place)?
            }
        };
        self.made.insert((value, needs, again), made);
        Ok(made)
    }

    /// Adds the nodes that make of one spread another.
    fn exchange(&mut self, value: ValueId, has: Spread, needs: Spread, place: Option<ValueId>) -> Result<ValueId> {
        let Along { name, ranks, .. } = *self.along;
        let whole =
            self.facts.get(&value).map_or_else(|| self.graph.fact(value).shape.clone(), |fact| fact.shape.clone());
        let node = format!("{}/{name}", self.graph.value_name(value));
        let attrs = Attrs::new().with("mesh_axis", name).with("ranks", ranks as i64);
        let joined = |by: Reduction| {
            attrs.clone().with(
                "reduction",
                match by {
                    Reduction::Max => "max",
                    Reduction::Min => "min",
                    _ => "sum",
                },
            )
        };
        let made = build(&mut Decomposer::new(self.graph, node.clone()), |b| {
            let x = b.value(value);
            Ok(vec![match (has, needs) {
                (Terms(by), Whole) => x.op(ops::ALL_REDUCE, &[], joined(by)),
                (Terms(by), Split(dim)) => parts_first(x, dim, ranks)?.op(ops::REDUCE_SCATTER, &[], joined(by)),
                (Split(dim), Whole) => parts_back(x.op(ops::ALL_GATHER, &[], attrs.clone()), dim)?,
                (Split(from), Split(to)) => {
                    parts_back(parts_first(x, to, ranks)?.op(ops::ALL_TO_ALL, &[], attrs.clone()), from)?
                }
                (Whole, Split(dim)) => {
                    let each = whole[dim] / ranks;
                    let first = b.value(place.expect("it was made for this")) * each as f64;
                    let at = b.numbers(DType::I32, [each], 0.0) + first;
                    x.op("Gather", &[at], Attrs::new().with("axis", dim as i64))
                }
                (Whole, Terms(_)) => {
                    let first = b.value(place.expect("it was made for this")).equal(0.0);
                    first.select(x, 0.0)
                }
                _ => return Err(format!("{has:?} does not become {needs:?}")),
            }])
        });
        Ok(made.map_err(|what| Error::graph(format!("'{node}': {what}")))?[0])
    }
}

/// A value with its parts along a dim in a new first axis.
fn parts_first<'g>(x: Var<'g>, dim: usize, ranks: usize) -> OpResult<Var<'g>> {
    let shape = x.shape()?;
    let mut split: Vec<usize> = shape.to_vec();
    split.splice(dim..=dim, [ranks, shape[dim] / ranks]);
    let order: Vec<usize> = std::iter::once(dim).chain((0..split.len()).filter(|&axis| axis != dim)).collect();
    let split = if split == shape[..] { x } else { x.shaped(&split) };
    Ok(if dim == 0 { split } else { split.transpose(&order) })
}

/// The parts in the first axis one after another along a dim.
fn parts_back<'g>(x: Var<'g>, dim: usize) -> OpResult<Var<'g>> {
    let shape = x.shape()?;
    let mut order: Vec<usize> = (1..shape.len()).collect();
    order.insert(dim, 0);
    let moved = if dim == 0 { x } else { x.transpose(&order) };
    let mut joined: Vec<usize> = shape[1..].to_vec();
    joined[dim] *= shape[0];
    Ok(moved.shaped(&joined))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Sample;
    use crate::reference;
    use crate::shape::Access;

    /// The graph of a call, its inputs, and these.
    fn graph_of(sample: &Sample) -> Option<(Graph, Vec<Tensor>)> {
        let mut graph = Graph::new(sample.op);
        let tensors = sample.tensors();
        let mut inputs = Vec::new();
        for (slot, tensor) in tensors.iter().enumerate() {
            let fact = tensor.as_ref().map(|tensor| Fact::new(tensor.dtype(), tensor.shape().clone()));
            inputs.push(fact.map(|fact| graph.input(format!("x{slot}"), fact)));
        }
        let op = ops::find(sample.op).expect("it has a row");
        let node = graph.add(op, "call", &inputs, sample.attrs.clone(), &[]).ok()?;
        for port in 0..graph.node(node).outputs.len() {
            graph.output(format!("y{port}"), node.output(port));
        }
        Some((graph, tensors.into_iter().flatten().collect()))
    }

    /// Holds what ranks compute together against the whole.
    fn compare(graph: &Graph, inputs: &[Tensor], mesh: &Mesh, by: &[Rule]) -> Result<()> {
        // Rows and what they decompose into may differ by a literal's rounding.
        let mut pieces = graph.clone();
        while let Some(id) = pieces
            .order()?
            .into_iter()
            .find(|&id| matches!(pieces.node(id).op().map(|op| op.lower), Some(Lower::Decompose(_))))
        {
            decompose(&mut pieces, id)?;
            pieces.sweep();
        }
        let (expected, decomposed) = (reference::run(graph, inputs)?, reference::run(&pieces, inputs)?);
        let (mut graphs, mut given, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..mesh.ranks() {
            let mut own = graph.clone();
            let sharding = Sharding { mesh: mesh.clone(), rank, by: by.to_vec(), kept: Kept::Whole };
            let shards = run(&mut own, &sharding)?;
            let cut = |(&value, tensor): (&ValueId, &Tensor)| {
                let name = graph.value_name(value);
                shards.iter().filter(|shard| shard.name == name).fold(tensor.clone(), |tensor, shard| {
                    let (axis, of) = mesh.axis(&shard.axis).expect("it is an axis");
                    let each = tensor.shape()[shard.dim] / of.ranks;
                    let all = Access::contiguous(tensor.shape().clone());
                    tensor.gather(&all.slice(shard.dim, mesh.place(rank, axis) * each, 1, each))
                })
            };
            given.push(graph.inputs().iter().zip(inputs).map(cut).collect::<Vec<_>>());
            states.push(reference::initial(&own)?);
            graphs.push(own);
        }
        let found = reference::ranks(mesh, &graphs, &given, &mut states)?;
        for (rank, found) in found.iter().enumerate() {
            for ((expected, pieces), found) in expected.iter().zip(&decomposed).zip(found) {
                assert_eq!(expected.shape(), found.shape(), "{} on rank {rank}", graph.name);
                let most = if expected.dtype() == DType::F64 { 1e-12 } else { 1e-5 };
                let off = |a: f64, b: f64| {
                    if a == b || a.is_nan() && b.is_nan() { 0.0 } else { (a - b).abs() / a.abs().max(1.0) }
                };
                let [a, p, b] = [expected, pieces, found].map(Tensor::to_f64);
                let worst = |a: &[f64]| a.iter().zip(&b).map(|(&a, &b)| off(a, b)).fold(0.0, f64::max);
                let (far, by) = (worst(&a).min(worst(&p)), &by[0]);
                assert!(
                    far <= most,
                    "{} with {} split along {} on rank {rank}: off by {far}",
                    graph.name,
                    by.pattern,
                    by.dim
                );
            }
        }
        Ok(())
    }

    #[test]
    fn every_row_is_the_same_on_ranks() {
        let mut walks = 0;
        for op in ops::all() {
            let example = op.example();
            let wide = example.clone().retyped(DType::F64);
            for sample in [&wide, &example] {
                let Some((graph, inputs)) = graph_of(sample) else { continue };
                if reference::run(&graph, &inputs).is_err() {
                    continue;
                }
                for ranks in [2, 4] {
                    let mesh = Mesh::new([("m", ranks)]).expect("it is a mesh");
                    for &input in graph.inputs() {
                        let shape = &graph.fact(input).shape;
                        for dim in (0..shape.len()).filter(|&dim| shape[dim] > 0 && shape[dim].is_multiple_of(ranks)) {
                            let rule = Rule { pattern: graph.value_name(input).to_owned(), dim, axis: "m".into() };
                            let found = compare(&graph, &inputs, &mesh, &[rule]);
                            // Of a file that was cut already nothing else is split.
                            if ops::OF_CUT_FILES.contains(&op.name) {
                                assert!(found.is_err(), "{} was split again", op.name);
                                continue;
                            }
                            found.unwrap_or_else(|e| panic!("{}: {e}", op.name));
                            walks += 1;
                        }
                    }
                }
                break;
            }
        }
        assert!(walks > 600, "{walks} walks");
    }
}
