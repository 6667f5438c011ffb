//! The compute graph: a DAG of operators over values. petgraph holds it, and only this file names petgraph.

use crate::annotations::Annotations;
use crate::constant::{Constant, Decomposed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::op::{Arity, Attrs, Build, Call, Fact, Lower, NodeId, OpDef, OpResult, ValueId};
use crate::ops;
use crate::shape::Access;
use crate::tensor::Tensor;
use petgraph::Direction;
use petgraph::stable_graph::{NodeIndex, StableDiGraph};
use petgraph::visit::{EdgeRef, IntoEdgeReferences};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::sync::{Arc, OnceLock};

/// The most nodes that a graph may grow to when operators are decomposed or a file's functions are expanded.
pub const MAX_NODES: usize = 1 << 18;

/// What stands before the names of the nodes that compute a node's gradient.
pub const GRADIENT: &str = "gradient of ";

/// The ending of names of nodes that compute forward values again, for the backward computation.
pub const AGAIN: &str = " again";

/// The kinds of nodes.
#[derive(Clone, Debug)]
pub enum Kind {
    /// A tensor that the caller provides in each run.
    Input,
    /// A tensor known before the run.
    Constant(Arc<Constant>),
    /// A tensor that lasts from one run to the next: its elements before the first run, or zeros.
    State(Option<Arc<Constant>>),
    /// An operator of the table.
    Op(&'static OpDef),
}

/// A value's name and fact.
#[derive(Clone, Debug)]
pub struct Output {
    /// The name that the graph file gives it, or one made from the node's name.
    pub name: String,
    /// Type and shape.
    pub fact: Fact,
}

/// A node of the graph; its inputs are the graph's edges.
#[derive(Clone, Debug)]
pub struct Node {
    /// Name, for people.
    pub name: String,
    /// Input, constant, state or operator.
    pub kind: Kind,
    /// Its attributes.
    pub attrs: Attrs,
    /// Its values, in order of their ports.
    pub outputs: Vec<Output>,
    slots: u32,
    position: u32,
}

impl Node {
    /// The operator's row; `None` for an input, a constant or a state.
    pub fn op(&self) -> Option<&'static OpDef> {
        match self.kind {
            Kind::Op(op) => Some(op),
            _ => None,
        }
    }

    /// The operator's name, or "input", "constant" or "state".
    pub fn op_name(&self) -> &'static str {
        match self.kind {
            Kind::Input => "input",
            Kind::Constant(_) => "constant",
            Kind::State(_) => "state",
            Kind::Op(op) => op.name,
        }
    }

    /// An error at this node.
    pub fn error(&self, what: impl Into<String>) -> Error {
        Error::Node { node: self.name.clone(), op: self.op_name().into(), what: what.into(), file: None }
    }
}

/// An edge: output `port` of the source feeds input `slot` of the target. An edge whose value was [replaced](Graph::replace) has no slot,
/// and feeds nothing until it is [swept](Graph::sweep). Where thousands of nodes read one value, it is cheaper to remove the edges
/// together.
#[derive(Clone, Copy, Debug)]
struct Use {
    port: u32,
    slot: Option<u32>,
}

/// A compute graph.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Name, for people.
    pub name: String,
    dag: StableDiGraph<Node, Use>,
    inputs: Vec<ValueId>,
    outputs: Vec<(String, ValueId)>,
    /// By output: the axes along which a run fills its first elements.
    counted: BTreeMap<String, Vec<Counted>>,
    /// By output that counts what a node finds: the fewest that the graph is for, if it is not for none.
    fewest: BTreeMap<String, Fewest>,
    states: Vec<State>,
    cursor: u32,
    /// The last place that a node was appended at.
    end: u32,
    /// The place from which on nodes belong to the backward computation.
    backward: Option<u32>,
    /// True if whoever runs the graph makes the inputs of the next run ready while one runs.
    pub prefetches: bool,
    /// What the graph's file says about several devices, if it says something.
    pub annotations: Option<Arc<Annotations>>,
    /// True if numbers behind that of the last node are free: new nodes would take these.
    has_free_end: bool,
    known: Known,
}

/// Properties of a graph. They are computed on request, and hold until the graph changes.
#[derive(Clone, Debug, Default)]
struct Known {
    order: OnceLock<Vec<NodeId>>,
    verified: OnceLock<()>,
    swept: bool,
    results: OnceLock<HashSet<ValueId>>,
}

/// An axis of an output that has room for more elements than a run finds. The first ones are what it found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// The axis.
    pub axis: usize,
    /// The output, one integer, that says how many were found.
    pub by: String,
    /// Elements of the axis beside those.
    #[serde(default)]
    pub more: i64,
}

/// The fewest elements that a node must find. What follows it has no meaning for fewer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fewest {
    /// The node.
    pub node: String,
    /// The fewest elements.
    pub number: u64,
}

/// A value that lasts from one run to the next. All readers of a run see the elements from before the run.
#[derive(Clone, Debug)]
pub struct State {
    /// The value at the start of a run.
    pub value: ValueId,
    /// The value that it has after the run; `None` if it stays the same.
    pub update: Option<ValueId>,
    /// The bound of a state that counts.
    pub count: Option<Count>,
    /// The name that the update had as an output of the file.
    output: Option<String>,
}

/// The bound of a state that counts, such as the number of rows in a cache. Whoever runs the graph refuses a run that would pass it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// The number that each run adds.
    pub by: u64,
    /// The most that the state may hold.
    pub most: u64,
}

fn index(node: NodeId) -> NodeIndex {
    NodeIndex::new(node.index())
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Graph {
        Graph { name: name.into(), ..Graph::default() }
    }

    fn insert(
        &mut self,
        name: String,
        kind: Kind,
        attrs: Attrs,
        outputs: Vec<Output>,
        inputs: &[Option<ValueId>],
    ) -> NodeId {
        self.known = Known::default();
        let (slots, position) = (inputs.len() as u32, self.cursor);
        let node = self.dag.add_node(Node { name, kind, attrs, outputs, slots, position });
        for (slot, input) in inputs.iter().enumerate() {
            if let Some(value) = input {
                self.dag.add_edge(index(value.node), node, Use { port: value.port, slot: Some(slot as u32) });
            }
        }
        NodeId::new(node.index())
    }

    /// Adds an input of the graph.
    pub fn input(&mut self, name: impl Into<String>, fact: Fact) -> ValueId {
        let name = name.into();
        let node = self.insert(name.clone(), Kind::Input, Attrs::new(), vec![Output { name, fact }], &[]);
        let value = node.output(0);
        self.inputs.push(value);
        value
    }

    /// Adds a constant.
    pub fn constant(&mut self, constant: impl Into<Arc<Constant>>) -> ValueId {
        let constant = constant.into();
        let output = Output { name: constant.name.clone(), fact: constant.fact.clone() };
        let node = self.insert(constant.name.clone(), Kind::Constant(constant), Attrs::new(), vec![output], &[]);
        node.output(0)
    }

    /// Adds a state. It begins with the elements of `initial`, or with zeros.
    ///
    /// # Panics
    /// When the elements given are of another type or shape.
    pub fn state(&mut self, name: impl Into<String>, fact: Fact, initial: Option<Arc<Constant>>) -> ValueId {
        let name = name.into();
        let fits = initial.as_ref().is_none_or(|initial| initial.fact == fact);
        assert!(fits, "state '{name}' begins with elements of its type and shape, {fact}");
        let node = self.insert(name.clone(), Kind::State(initial), Attrs::new(), vec![Output { name, fact }], &[]);
        let value = node.output(0);
        self.states.push(State { value, update: None, count: None, output: None });
        value
    }

    /// Gives a state the elements of a value after each run.
    ///
    /// # Errors
    /// When `state` is no state, has an update already, or has another type or shape than `value`.
    pub fn update(&mut self, state: ValueId, value: ValueId) -> OpResult<()> {
        let (fact, found) = (self.fact(state), self.fact(value));
        let (name, new) = (self.value_name(state), self.value_name(value));
        let fail = |what: String| Err(format!("state '{name}': {what}"));
        if fact != found {
            return fail(format!("expected an update of {fact}, found '{new}' of {found}"));
        }
        match self.states.iter().position(|s| s.value == state) {
            None => fail("not a state of the graph".into()),
            Some(at) => {
                if let Some(first) = self.states[at].update {
                    return fail(format!("updated twice, by '{}' and by '{new}'", self.value_name(first)));
                }
                self.known = Known::default();
                self.states[at].update = Some(value);
                Ok(())
            }
        }
    }

    /// Gives a state the elements that it begins with.
    ///
    /// # Errors
    /// When there is no state of this name, or it has another type or shape.
    pub(crate) fn begin(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        let Some(state) = self.states.iter().map(|s| s.value).find(|&v| self.value_name(v) == name) else {
            let known: Vec<_> = self.states.iter().map(|s| self.value_name(s.value)).collect();
            return Err(Error::usage(format!("state '{name}': no such state; the states: {}", known.join(", "))));
        };
        let (expected, found) = (self.fact(state), Fact::new(tensor.dtype(), tensor.shape().clone()));
        if *expected != found {
            return Err(Error::usage(format!("state '{name}': expected to begin with {expected}, found {found}")));
        }
        self.known = Known::default();
        self.dag[index(state.node)].kind = Kind::State(Some(Arc::new(Constant::new(name, tensor))));
        Ok(())
    }

    /// Gives a constant other elements, in its place.
    pub fn fill(&mut self, value: ValueId, constant: impl Into<Arc<Constant>>) {
        self.known = Known::default();
        let (constant, node) = (constant.into(), &mut self.dag[index(value.node)]);
        node.outputs[0].fact = constant.fact.clone();
        node.kind = Kind::Constant(constant);
    }

    /// Makes a state of a constant, which is what it begins with. It has the name of the constant, or this one.
    ///
    /// # Errors
    /// When the value is no constant.
    pub fn keep(&mut self, value: ValueId, name: Option<String>) -> Result<()> {
        let Some(mut constant) = self.as_constant(value).cloned() else {
            return Err(self.node(value.node).error("only a constant becomes a state"));
        };
        if let Some(name) = name {
            constant = Arc::new(constant.named(name)?);
        }
        self.known = Known::default();
        let node = &mut self.dag[index(value.node)];
        node.outputs[0].name.clone_from(&constant.name);
        node.name.clone_from(&constant.name);
        node.kind = Kind::State(Some(constant));
        self.states.push(State { value, update: None, count: None, output: None });
        Ok(())
    }

    /// Sorts the states by numbers of their names.
    pub(crate) fn sort_states(&mut self, number: impl Fn(&str) -> Option<usize>) {
        let mut states = std::mem::take(&mut self.states);
        states.sort_by_key(|state| number(self.value_name(state.value)));
        self.states = states;
        self.known = Known::default();
    }

    /// Bounds a state that counts, or frees it.
    ///
    /// # Panics
    /// When `state` is no state.
    pub fn bound_count(&mut self, state: ValueId, count: Option<Count>) {
        let found = self.states.iter_mut().find(|s| s.value == state);
        found.expect("only a state counts from run to run").count = count;
    }

    /// Takes an input that no node reads from the graph.
    pub(crate) fn withdraw_input(&mut self, input: ValueId) {
        self.known = Known::default();
        self.inputs.retain(|&other| other != input);
    }

    /// Takes a state from the graph. What reads it is given another value by the caller.
    pub(crate) fn withdraw_state(&mut self, state: ValueId) {
        self.known = Known::default();
        self.states.retain(|other| other.value != state);
    }

    /// Takes an output from the graph, and returns its value. `None` if there is none of this name.
    pub fn withdraw_output(&mut self, name: &str) -> Option<ValueId> {
        self.known = Known::default();
        let at = self.outputs.iter().position(|(output, _)| output == name)?;
        Some(self.outputs.remove(at).1)
    }

    /// Makes a state of an input and an output: the input reads it, and the output is its update. Neither is a port of the graph any
    /// more.
    ///
    /// # Errors
    /// When one is missing or belongs to another pair, or they have other types or shapes.
    pub fn pair(&mut self, input: &str, output: &str) -> Result<()> {
        let names = |found: Vec<&str>| found.join(", ");
        let earlier = |s: &&State| self.value_name(s.value) == input || s.output.as_deref() == Some(output);
        if let Some(State { value, output: Some(by), .. }) = self.states.iter().find(earlier) {
            let what = format!("'{}={by}' is a state already", self.value_name(*value));
            return Err(Error::usage(format!("state '{input}={output}': {what}")));
        }
        let Some(at) = self.inputs.iter().position(|&v| self.value_name(v) == input) else {
            let known = names(self.inputs.iter().map(|&v| self.value_name(v)).collect());
            return Err(Error::usage(format!("state '{input}={output}': no input '{input}'; the inputs: {known}")));
        };
        let Some(end) = self.outputs.iter().position(|(name, _)| name == output) else {
            let known = names(self.outputs.iter().map(|(name, _)| name.as_str()).collect());
            return Err(Error::usage(format!("state '{input}={output}': no output '{output}'; the outputs: {known}")));
        };
        let (state, update) = (self.inputs[at], self.outputs[end].1);
        let (fact, found) = (self.fact(state), self.fact(update));
        if fact != found {
            return Err(Error::usage(format!(
                "state '{input}={output}': input '{input}' is {fact}, but output '{output}' is {found}"
            )));
        }
        self.known = Known::default();
        self.inputs.remove(at);
        self.outputs.remove(end);
        self.dag[index(state.node)].kind = Kind::State(None);
        let output = Some(output.to_owned());
        self.states.push(State { value: state, update: Some(update), count: None, output });
        Ok(())
    }

    /// Makes a state of an input without an update, or of an output that updates what this graph does not read. The state has the input's
    /// name, as in the other programs that share it.
    ///
    /// # Errors
    /// When another pair has the input or the output.
    pub(crate) fn share(&mut self, input: &str, output: &str) -> Result<()> {
        self.known = Known::default();
        let taken = |state: &&State| self.value_name(state.value) == input || state.output.as_deref() == Some(output);
        if let Some(state) = self.states.iter().find(taken) {
            let (name, by) = (self.value_name(state.value), state.output.as_deref());
            let by = by.map_or(String::new(), |by| format!(", which output '{by}' updates"));
            return Err(Error::usage(format!("state '{input}={output}': there is a state '{name}' already{by}")));
        }
        if let Some(at) = self.inputs.iter().position(|&v| self.value_name(v) == input) {
            let value = self.inputs.remove(at);
            self.dag[index(value.node)].kind = Kind::State(None);
            self.states.push(State { value, update: None, count: None, output: None });
        } else if let Some(at) = self.outputs.iter().position(|(name, _)| name == output) {
            let update = self.outputs.remove(at).1;
            let value = self.state(input, self.fact(update).clone(), None);
            let state = self.states.last_mut().expect("it was declared above");
            assert_eq!(state.value, value, "a new state is the last");
            (state.update, state.output) = (Some(update), Some(output.to_owned()));
        }
        Ok(())
    }

    /// Declares a value as an output of the graph.
    pub fn output(&mut self, name: impl Into<String>, value: ValueId) {
        self.known = Known::default();
        self.outputs.push((name.into(), value));
    }

    /// Says that a run fills an output's first elements along an axis.
    pub(crate) fn count_output(&mut self, name: &str, counted: Counted) {
        self.counted.entry(name.to_owned()).or_default().push(counted);
    }

    /// The axes of an output along which a run fills the first elements.
    pub fn counted(&self, name: &str) -> &[Counted] {
        self.counted.get(name).map_or(&[], Vec::as_slice)
    }

    /// Says that the graph is not for fewer elements than these, of which an output says how many a run finds.
    pub(crate) fn need(&mut self, name: &str, fewest: Fewest) {
        self.fewest.insert(name.to_owned(), fewest);
    }

    /// The fewest elements that the graph is for, of which an output says how many a run finds. `None` if it is for any number.
    pub fn fewest(&self, name: &str) -> Option<&Fewest> {
        self.fewest.get(name)
    }

    /// Leaves out all outputs but these, the counts that belong to them, and what nothing else needs. The inputs stay. An empty list leaves out nothing.
    ///
    /// # Errors
    /// When the graph has no output of a name.
    pub fn keep_outputs(&mut self, names: &[String]) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let known = |name: &str| self.outputs.iter().any(|(output, _)| output == name);
        if let Some(name) = names.iter().find(|name| !known(name)) {
            let updates = |state: &&State| state.output.as_ref() == Some(name);
            let state = self.states.iter().find(updates).map(|state| self.value_name(state.value));
            let what = match state {
                Some(state) => format!("it updates state '{state}', which is read by that name"),
                None => {
                    let known: Vec<_> = self.outputs.iter().map(|(name, _)| &name[..]).collect();
                    format!("not an output of the graph; its outputs: {}", known.join(", "))
                }
            };
            return Err(Error::usage(format!("output '{name}': {what}")));
        }
        self.known = Known::default();
        let counts: HashSet<&String> = names.iter().flat_map(|name| self.counted(name)).map(|c| &c.by).collect();
        let kept: HashSet<String> = names.iter().chain(counts).chain(self.fewest.keys()).cloned().collect();
        self.outputs.retain(|(output, _)| kept.contains(output));
        self.sweep();
        Ok(())
    }

    /// Adds a node. `inputs` holds only the data inputs; shaping inputs are attributes.
    ///
    /// # Errors
    /// When the operator does not allow the number of inputs, the attributes, the types or the shapes.
    pub fn add(
        &mut self,
        op: &'static OpDef,
        name: &str,
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        outputs: &[&str],
    ) -> Result<NodeId> {
        let facts = self.infer(op, inputs, &attrs).map_err(|what| Error::Node {
            node: name.into(),
            op: op.name.into(),
            what,
            file: None,
        })?;
        if outputs.len() > facts.len() {
            let what = format!("expected at most {} outputs, found {}", facts.len(), outputs.len());
            return Err(Error::Node { node: name.into(), op: op.name.into(), what, file: None });
        }
        let outputs = facts.into_iter().enumerate().map(|(port, fact)| {
            let given = outputs.get(port).filter(|n| !n.is_empty()).map(|n| n.to_string());
            let made = || if port == 0 { name.to_owned() } else { format!("{name}.{port}") };
            Output { name: given.unwrap_or_else(made), fact }
        });
        let outputs = outputs.collect();
        Ok(self.insert(name.to_owned(), Kind::Op(op), attrs, outputs, inputs))
    }

    fn infer(&self, op: &'static OpDef, inputs: &[Option<ValueId>], attrs: &Attrs) -> OpResult<Vec<Fact>> {
        let (min, max) = op.arity();
        if inputs.len() < min || inputs.len() > max {
            let expected = match max {
                usize::MAX => format!("at least {min}"),
                max if max == min => min.to_string(),
                max => format!("{min} to {max}"),
            };
            return Err(format!("expected {expected} inputs, found {}", inputs.len()));
        }
        for slot in (0..inputs.len()).filter(|&slot| inputs[slot].is_none()) {
            let mut data = op.inputs.iter().filter(|i| !i.shapes());
            let declared = data.clone().nth(slot).or(data.next_back()).expect("its arity allows the input");
            if declared.arity != Arity::Optional {
                return Err(format!("input '{}' is required but left empty", declared.name));
            }
        }
        let shaping = |name: &str| op.inputs.iter().any(|i| i.shapes() && i.name == name);
        if let Some((name, _)) = attrs.iter().find(|(name, _)| !op.attrs.contains(name) && !shaping(name)) {
            let shaping = op.inputs.iter().filter(|i| i.shapes()).map(|i| i.name);
            let known: Vec<_> = op.attrs.iter().copied().chain(shaping).collect();
            let known = if known.is_empty() { "it takes none".into() } else { format!("known: {}", known.join(", ")) };
            return Err(format!("unknown attribute '{name}'; {known}"));
        }
        let facts: Vec<_> = inputs.iter().map(|v| v.map(|v| self.fact(v))).collect();
        Call { op, attrs, inputs: &facts }.infer()
    }

    /// The graph's inputs in order of declaration.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// The names and values of the graph's outputs.
    pub fn outputs(&self) -> &[(String, ValueId)] {
        &self.outputs
    }

    /// The graph's states in order of declaration.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// The values that must be there at the end of a run: those of the outputs, then the updates of states.
    pub fn results(&self) -> impl Iterator<Item = ValueId> {
        self.outputs.iter().map(|(_, value)| *value).chain(self.states.iter().filter_map(|s| s.update))
    }

    /// A node.
    pub fn node(&self, node: NodeId) -> &Node {
        &self.dag[index(node)]
    }

    /// The name of the node with this number; `None` if there is none.
    pub fn name_of(&self, node: NodeId) -> Option<&str> {
        self.dag.node_weight(index(node)).map(|n| n.name.as_str())
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.dag.node_count()
    }

    /// True if the graph has no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the largest node number.
    pub fn bound(&self) -> usize {
        use petgraph::visit::NodeIndexable;
        self.dag.node_bound()
    }

    /// A value's fact.
    pub fn fact(&self, value: ValueId) -> &Fact {
        &self.node(value.node).outputs[value.port as usize].fact
    }

    /// A value's name.
    pub fn value_name(&self, value: ValueId) -> &str {
        &self.node(value.node).outputs[value.port as usize].name
    }

    /// The constant behind a value; `None` if the value is not one.
    pub fn as_constant(&self, value: ValueId) -> Option<&Arc<Constant>> {
        match &self.node(value.node).kind {
            Kind::Constant(constant) => Some(constant),
            _ => None,
        }
    }

    /// The values a node reads, by slot.
    pub fn operands(&self, node: NodeId) -> Vec<Option<ValueId>> {
        let mut operands = vec![None; self.node(node).slots as usize];
        for (source, _, port, slot) in self.uses(index(node), Direction::Incoming) {
            operands[slot as usize] = Some(ValueId { node: NodeId::new(source.index()), port });
        }
        operands
    }

    /// The result of a function of an operator's call; `None` if the node is no operator.
    pub fn with_call<T>(&self, node: NodeId, of: impl FnOnce(&Call) -> T) -> Option<T> {
        let (operands, Node { attrs, .. }) = (self.operands(node), self.node(node));
        let facts: Vec<_> = operands.into_iter().map(|v| v.map(|v| self.fact(v))).collect();
        Some(of(&Call { op: self.node(node).op()?, attrs, inputs: &facts }))
    }

    /// The access of a view whose source has this one. `None` if strides cannot express it, or if the node is no view.
    pub fn view_access(&self, node: NodeId, source: &Access) -> Option<Access> {
        let Lower::View(view) = self.node(node).op()?.lower else { return None };
        self.with_call(node, |call| view(call, source))?
    }

    /// Source, target, port and slot of each edge. Outgoing edges are the uses of a node's values; incoming edges are its own reads.
    fn uses(&self, node: NodeIndex, direction: Direction) -> impl Iterator<Item = (NodeIndex, NodeIndex, u32, u32)> {
        let edges = self.dag.edges_directed(node, direction);
        edges.filter_map(|edge| Some((edge.source(), edge.target(), edge.weight().port, edge.weight().slot?)))
    }

    /// The nodes that read a value, once per use. Graph outputs are not among them.
    pub fn users(&self, value: ValueId) -> Vec<NodeId> {
        let uses = self.uses(index(value.node), Direction::Outgoing);
        let mut users: Vec<_> =
            uses.filter(|(_, _, port, _)| *port == value.port).map(|(_, user, ..)| NodeId::new(user.index())).collect();
        users.sort_unstable();
        users
    }

    /// True if a value is an output of the graph, or the update of a state.
    pub fn is_output(&self, value: ValueId) -> bool {
        self.known.results.get_or_init(|| self.results().collect()).contains(&value)
    }

    /// True if the one reader of a constant could read a new constant instead, and no more would be held. Nothing else may read it. All
    /// forms of the same data that are read must together have no more elements than the data.
    pub fn is_alone(&self, value: ValueId) -> bool {
        let Some(constant) = self.as_constant(value).filter(|_| self.users(value).len() == 1) else { return false };
        let root = constant.root();
        let read = |node: &NodeIndex| self.uses(*node, Direction::Outgoing).next().is_some();
        let forms = self.dag.node_indices().filter_map(|node| match &self.dag[node].kind {
            Kind::Constant(form) if Arc::ptr_eq(form.root(), root) && read(&node) => Some(form.fact.shape.numel()),
            _ => None,
        });
        !self.is_output(value) && forms.sum::<usize>() <= root.fact.shape.numel()
    }

    /// For each axis of a Transpose's value, the axis of its source. `None` if the node is no Transpose.
    pub fn permutation(&self, node: NodeId) -> Option<Vec<usize>> {
        let node = self.node(node);
        let op = node.op().filter(|op| op.name == "Transpose")?;
        let perm = Call { op, attrs: &node.attrs, inputs: &[] }.ints("perm").ok()?;
        let reversed = || (0..node.outputs[0].fact.shape.len()).rev().collect();
        Some(perm.map_or_else(reversed, |p| p.iter().map(|&axis| axis as usize).collect()))
    }

    /// Makes every reader of `old` read `new` instead, outputs of the graph and updates of states included.
    pub fn replace(&mut self, old: ValueId, new: ValueId) {
        self.known = Known::default();
        let edges = self.dag.edges_directed(index(old.node), Direction::Outgoing);
        let edges: Vec<_> = edges.filter(|e| e.weight().port == old.port).map(|e| (e.id(), e.target())).collect();
        for (edge, target) in edges {
            if let Some(slot) = self.dag[edge].slot.take() {
                self.dag.add_edge(index(new.node), target, Use { port: new.port, slot: Some(slot) });
            }
        }
        let outputs = self.outputs.iter_mut().map(|(_, value)| value);
        for value in outputs.chain(self.states.iter_mut().filter_map(|s| s.update.as_mut())) {
            if *value == old {
                *value = new;
            }
        }
    }

    /// Removes every node that no output and no state depends on; inputs and states stay.
    pub fn sweep(&mut self) {
        if self.known.swept {
            return;
        }
        let bound = self.bound();
        let mut live = vec![false; bound];
        let mut stack: Vec<NodeIndex> = self.results().map(|v| index(v.node)).collect();
        while let Some(node) = stack.pop() {
            if !std::mem::replace(&mut live[node.index()], true) {
                stack.extend(self.uses(node, Direction::Incoming).map(|(source, ..)| source));
            }
        }
        let states = self.states.iter().map(|state| &state.value);
        self.inputs.iter().chain(states).for_each(|v| live[v.node.index()] = true);
        let is_used = |edge: &Use| edge.slot.is_some();
        if !self.has_free_end
            && live.iter().filter(|live| **live).count() == self.len()
            && self.dag.edge_weights().all(is_used)
        {
            self.known.swept = true;
            return;
        }
        let dag = std::mem::take(&mut self.dag);
        let kept = |node: NodeIndex, weight| live[node.index()].then_some(weight);
        self.dag = dag.filter_map_owned(kept, |_, edge: Use| is_used(&edge).then_some(edge));
        // Free numbers behind the last node are forgotten by the next sweep, and new nodes take the numbers that are left.
        self.has_free_end = self.bound() != bound;
        self.known = Known { swept: !self.has_free_end, ..Known::default() };
    }

    /// All nodes, each behind the nodes that it reads; otherwise in the order of the file.
    ///
    /// # Errors
    /// When the graph has a cycle.
    pub fn order(&self) -> Result<Vec<NodeId>> {
        if let Some(order) = self.known.order.get() {
            return Ok(order.clone());
        }
        let mut missing = vec![0_u32; self.bound()];
        let edges = self.dag.edge_references().filter(|edge| edge.weight().slot.is_some());
        edges.for_each(|edge| missing[edge.target().index()] += 1);
        let roots = self.dag.node_indices().filter(|node| missing[node.index()] == 0);
        let mut ready: BinaryHeap<_> = roots.map(|node| Reverse((self.dag[node].position, node))).collect();
        let mut order = Vec::with_capacity(self.len());
        while let Some(Reverse((_, node))) = ready.pop() {
            order.push(NodeId::new(node.index()));
            for (_, target, ..) in self.uses(node, Direction::Outgoing) {
                let reads = &mut missing[target.index()];
                *reads -= 1;
                if *reads == 0 {
                    ready.push(Reverse((self.dag[target].position, target)));
                }
            }
        }
        if order.len() != self.len() {
            let stuck = self.dag.node_indices().find(|n| missing[n.index()] > 0).map(|n| self.dag[n].name.clone());
            return Err(Error::graph(format!("node '{}' depends on itself", stuck.unwrap_or_default())));
        }
        Ok(self.known.order.get_or_init(|| order).clone())
    }

    /// Places nodes added from now on where `node` stands in the order of the file.
    pub fn insert_at(&mut self, node: NodeId) {
        self.cursor = self.node(node).position;
    }

    /// Places nodes added from now on behind all others in the order of the file.
    pub fn append(&mut self) {
        self.end += 1;
        self.cursor = self.end;
    }

    /// Begins the backward computation, unless it has begun: what is appended from now on.
    pub(crate) fn begin_backward(&mut self) {
        self.append();
        self.backward.get_or_insert(self.cursor);
    }

    /// Places a node behind the nodes that it reads, constants left out but for the seed of the gradients, if none of these belongs to the
    /// backward computation.
    pub(crate) fn hoist(&mut self, node: NodeId, seed: ValueId) {
        let operands = self.operands(node).into_iter().flatten().map(|value| value.node);
        let counts = |n: &NodeId| *n == seed.node || !matches!(self.node(*n).kind, Kind::Constant(_));
        let operands: Vec<NodeId> = operands.filter(counts).collect();
        let last = operands.iter().map(|&operand| self.node(operand).position).max();
        if let Some(last) = last.filter(|_| !operands.iter().any(|&operand| self.is_backward(operand))) {
            self.known = Known::default();
            // A constant behind it would hold it back.
            let constants = self.operands(node).into_iter().flatten().map(|value| value.node);
            let constants: Vec<NodeId> = constants.filter(|operand| !operands.contains(operand)).collect();
            for node in constants.into_iter().chain([node]) {
                self.dag[index(node)].position = last;
            }
        }
    }

    /// Places nodes added from now on at the beginning of the backward computation.
    pub fn insert_backward(&mut self) {
        self.cursor = self.backward.unwrap_or(self.cursor);
    }

    /// True if the graph has a backward computation.
    pub fn has_backward(&self) -> bool {
        self.backward.is_some()
    }

    /// True if a node belongs to the backward computation, or comes after it.
    pub fn is_backward(&self, node: NodeId) -> bool {
        self.backward.is_some_and(|first| self.node(node).position >= first)
    }

    /// True if a node is a view, which moves no byte.
    pub fn is_view(&self, node: NodeId) -> bool {
        self.node(node).op().is_some_and(|op| matches!(op.lower, Lower::View(_)))
    }

    /// Replaces a node whose inputs are all constants by constants, which are computed when first asked for. Returns the values that stand
    /// for its outputs. An input or a constant stays as it is, and the list is empty.
    ///
    /// # Errors
    /// When an input's elements are needed and cannot be fetched.
    pub fn make_constant(&mut self, node: NodeId) -> Result<Vec<ValueId>> {
        let constants = self.derived(node)?;
        Ok(self.put(node, constants))
    }

    /// Puts constants in the place of a node, one for each of its outputs.
    pub(crate) fn put(&mut self, node: NodeId, constants: Vec<Constant>) -> Vec<ValueId> {
        self.insert_at(node);
        let values: Vec<_> = constants.into_iter().map(|constant| self.constant(constant)).collect();
        values.iter().enumerate().for_each(|(port, &value)| self.replace(node.output(port), value));
        values
    }

    /// What a node makes of constants, if all of its inputs are; nothing if it is no operator.
    ///
    /// # Errors
    /// When an input's elements are needed and cannot be fetched.
    pub(crate) fn derived(&self, node: NodeId) -> Result<Vec<Constant>> {
        let operands = self.operands(node);
        let inputs: Vec<_> = operands.iter().map(|v| v.and_then(|v| self.as_constant(v).cloned())).collect();
        let Node { attrs, outputs, .. } = self.node(node);
        let Some(op) = self.node(node).op() else { return Ok(Vec::new()) };
        let of = |(port, Output { name, fact }): (usize, &Output)| match op.lower {
            Lower::Map(_) if fact.dtype.is_half() && !op.name.ends_with("Cast") => {
                Constant::of_numbers(name.clone(), op, attrs, &inputs, fact.clone())
            }
            _ => Constant::derived(name.clone(), op, attrs.clone(), inputs.clone(), port, fact.clone()),
        };
        outputs.iter().enumerate().map(of).collect()
    }

    /// Gives an input another fact. What reads it keeps its own until its [attributes are set](Self::set_attrs).
    pub(crate) fn set_input(&mut self, input: ValueId, fact: Fact) {
        self.known = Known::default();
        self.dag[index(input.node)].outputs[input.port as usize].fact = fact;
    }

    /// Gives a state another fact, and the elements that it begins with.
    pub(crate) fn set_state(&mut self, state: ValueId, fact: Fact, initial: Option<Arc<Constant>>) {
        self.known = Known::default();
        let node = &mut self.dag[index(state.node)];
        node.outputs[state.port as usize].fact = fact;
        node.kind = Kind::State(initial);
    }

    /// Gives an output of the graph another value.
    pub(crate) fn set_output(&mut self, output: usize, value: ValueId) {
        self.known = Known::default();
        self.outputs[output].1 = value;
    }

    /// Gives a state another update.
    pub(crate) fn set_update(&mut self, state: ValueId, value: ValueId) {
        self.known = Known::default();
        let found = self.states.iter_mut().find(|other| other.value == state);
        found.expect("it is a state").update = Some(value);
    }

    /// Gives an operator these attributes, and its values the facts that follow from them and from what it reads now.
    ///
    /// # Errors
    /// When the operator does not allow the attributes, the types or the shapes, or has another number of values.
    pub(crate) fn set_attrs(&mut self, id: NodeId, attrs: Attrs) -> Result<()> {
        let node = self.node(id);
        let op = node.op().ok_or_else(|| node.error("only an operator has attributes"))?;
        let facts = self.infer(op, &self.operands(id), &attrs).map_err(|what| node.error(what))?;
        if facts.len() != node.outputs.len() {
            return Err(node.error(format!("expected {} values, found {}", node.outputs.len(), facts.len())));
        }
        self.known = Known::default();
        let node = &mut self.dag[index(id)];
        node.attrs = attrs;
        node.outputs.iter_mut().zip(facts).for_each(|(output, fact)| output.fact = fact);
        Ok(())
    }

    /// Adds a node like another, which reads other values and stands where `at` stands. Its name ends with [`AGAIN`].
    pub fn copy(&mut self, node: NodeId, operands: &[Option<ValueId>], at: NodeId) -> NodeId {
        let Node { name, kind, attrs, outputs, .. } = self.node(node).clone();
        self.insert_at(at);
        let again = |name: String| if name.ends_with(AGAIN) { name } else { name + AGAIN };
        let outputs = outputs.into_iter().map(|o| Output { name: again(o.name), fact: o.fact }).collect();
        self.insert(again(name), kind, attrs, outputs, operands)
    }

    /// Makes a node read other values.
    pub fn read(&mut self, node: NodeId, operands: &[Option<ValueId>]) {
        self.known = Known::default();
        let edges: Vec<_> = self.dag.edges_directed(index(node), Direction::Incoming).map(|edge| edge.id()).collect();
        edges.into_iter().for_each(|edge| self.dag[edge].slot = None);
        self.dag[index(node)].slots = operands.len() as u32;
        for (slot, value) in operands.iter().enumerate() {
            if let Some(value) = value {
                self.dag.add_edge(index(value.node), index(node), Use { port: value.port, slot: Some(slot as u32) });
            }
        }
    }

    /// Checks every invariant of the graph. It is acyclic, each slot is fed once and by an existing port, and every node's facts are those
    /// that its row infers.
    ///
    /// # Errors
    /// The first invariant that does not hold, with the node.
    pub fn verify(&self) -> Result<()> {
        if self.known.verified.get().is_some() {
            return Ok(());
        }
        let mut operands = Vec::new();
        for id in self.order()? {
            let node = self.node(id);
            operands.clear();
            operands.resize(node.slots as usize, None);
            for (source, _, port, slot) in self.uses(index(id), Direction::Incoming) {
                if port as usize >= self.dag[source].outputs.len() {
                    return Err(node.error(format!("input {slot} reads a port that does not exist")));
                }
                match operands.get_mut(slot as usize) {
                    Some(free @ None) => *free = Some(ValueId { node: NodeId::new(source.index()), port }),
                    _ => return Err(node.error(format!("input {slot} is fed twice or does not exist"))),
                }
            }
            node.outputs.iter().try_for_each(|o| o.fact.countable()).map_err(|what| node.error(what))?;
            if let Kind::Op(op) = node.kind {
                let facts = self.infer(op, &operands, &node.attrs).map_err(|what| node.error(what))?;
                if !facts.iter().eq(node.outputs.iter().map(|o| &o.fact)) {
                    return Err(node.error("its facts are not what its inputs imply"));
                }
            }
        }
        for (name, value) in &self.outputs {
            let node = self.dag.node_weight(index(value.node));
            if node.is_none_or(|n| value.port as usize >= n.outputs.len()) {
                return Err(Error::graph(format!("output '{name}' reads a value that does not exist")));
            }
        }
        for State { value, update, .. } in &self.states {
            let fact = |v: &ValueId| Some(&self.dag.node_weight(index(v.node))?.outputs.get(v.port as usize)?.fact);
            if fact(value).is_none() || update.as_ref().is_some_and(|update| fact(update) != fact(value)) {
                let name = self.dag.node_weight(index(value.node)).map_or("", |n| &n.name);
                return Err(Error::graph(format!(
                    "state '{name}': its update does not exist, or is of another type or shape"
                )));
            }
        }
        self.known.verified.get_or_init(|| ());
        Ok(())
    }
}

/// The nodes on the sink's side of a minimum cut of a network, as few as there can be. An edge has a start, an end and a capacity.
pub fn min_cut(nodes: usize, edges: &[(u32, u32, u64)], source: u32, sink: u32) -> Vec<bool> {
    let mut network = petgraph::Graph::<(), u64>::with_capacity(nodes, edges.len());
    (0..nodes).for_each(|_| _ = network.add_node(()));
    let index = |node: u32| NodeIndex::new(node as usize);
    for &(from, to, capacity) in edges {
        network.add_edge(index(from), index(to), capacity);
    }
    let (_, flows) = petgraph::algo::dinics(&network, index(source), index(sink));
    // Nodes that reach the sink over edges with capacity left are on its side.
    let mut reaches = vec![false; nodes];
    let mut stack = vec![index(sink)];
    while let Some(node) = stack.pop() {
        if std::mem::replace(&mut reaches[node.index()], true) {
            continue;
        }
        let free = network.edges_directed(node, Direction::Incoming);
        stack.extend(free.filter(|e| flows[e.id().index()] < *e.weight()).map(|e| e.source()));
        let used = network.edges_directed(node, Direction::Outgoing);
        stack.extend(used.filter(|e| flows[e.id().index()] > 0).map(|e| e.target()));
    }
    reaches
}

/// Builds the nodes into which one node decomposes, under its name.
pub struct Decomposer<'a> {
    /// The graph that grows.
    pub graph: &'a mut Graph,
    /// The operators that were added, in order.
    pub made: Vec<NodeId>,
    name: String,
    of: Option<Arc<Decomposed>>,
    constants: usize,
}

impl<'a> Decomposer<'a> {
    /// Builds nodes under this name.
    pub fn new(graph: &'a mut Graph, name: String) -> Decomposer<'a> {
        Decomposer { graph, made: Vec::new(), name, of: None, constants: 0 }
    }

    /// Builds only the nodes that the row's rule makes of a call. Large constants are made from the call when they are asked for.
    pub fn of(self, call: &Call) -> Decomposer<'a> {
        Decomposer { of: Some(Decomposed::new(call)), ..self }
    }
}

impl Decomposer<'_> {
    /// [Hoists](Graph::hoist) the nodes that were added.
    pub(crate) fn hoist(self, seed: ValueId) {
        self.made.iter().for_each(|&node| self.graph.hoist(node, seed));
    }
}

impl Build for Decomposer<'_> {
    fn fact(&self, value: ValueId) -> Fact {
        self.graph.fact(value).clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        let row = ops::find(op).ok_or_else(|| format!("no row '{op}'"))?;
        if self.graph.len() >= MAX_NODES {
            return Err(format!("expected to take a graph to {MAX_NODES} nodes at most, found more"));
        }
        let name = format!("{}/{op}", self.name);
        let node = self.graph.add(row, &name, inputs, attrs, &[]).map_err(|e| e.to_string())?;
        self.made.push(node);
        Ok((0..self.graph.node(node).outputs.len() as u32).map(|port| ValueId { node, port }).collect())
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        let (name, number) = (format!("{}/constant", self.name), self.constants);
        self.constants += 1;
        if fact.shape.is_empty() && fact.dtype.is_half() {
            let value = elements().first().copied().unwrap_or(f64::NAN);
            return self.graph.constant(Constant::number(name, fact.dtype, value));
        }
        self.graph.constant(match &self.of {
            Some(of) => Constant::decomposed(name, fact, of, number, elements),
            None => Constant::new(name, Tensor::from_f64(fact.dtype, fact.shape, &elements())),
        })
    }
}

impl Graph {
    /// The bytes of all constants, as the host holds them.
    pub fn constant_bytes(&self) -> u64 {
        let constants = self.dag.node_weights().filter_map(|n| match &n.kind {
            Kind::Constant(c) => Some(&c.fact),
            _ => None,
        });
        constants.map(|f| (f.shape.numel() * f.dtype.size()) as u64).sum()
    }

    /// The element types of the graph's values.
    pub fn dtypes(&self) -> HashSet<DType> {
        self.dag.node_weights().flat_map(|n| n.outputs.iter().map(|o| o.fact.dtype)).collect()
    }
}
