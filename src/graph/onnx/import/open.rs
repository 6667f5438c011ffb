//! A model that is imported once, with extents and counts that stay open, and the graphs for others of them.
//!
//! ```text
//! model --import, for the first extents--> nodes, and notes of what depends on an extent
//!                                            '--other extents--> the same nodes: facts are inferred again,
//!                                                                attributes and constants computed again
//! ```
//!
//! Where the importer decides by an extent or by an element, such as on a branch of an If or on the iterations of a Scan, it notes what it
//! relied on. For extents that make it another, the model is imported again.

use super::*;
use crate::decisions::Record;
use crate::onnx::symbolic::Counted;
use crate::op::NodeId;
use crate::pass::folded_constants;
use std::sync::Arc;

/// Attributes that come from inputs of a node.
#[derive(Clone, Debug, Default)]
pub(super) struct Shaping {
    /// The attributes that depend on counts, each with its form.
    pub forms: Shaped,
    /// The attributes that are read from inputs, each with its input.
    pub values: Vec<(&'static str, ValueId)>,
}

impl From<Shaped> for Shaping {
    fn from(forms: Shaped) -> Shaping {
        Shaping { forms, values: Vec::new() }
    }
}

/// What an import noted.
#[derive(Clone, Debug, Default)]
pub(super) struct Notes {
    /// Values that may depend on what is open.
    open: HashSet<ValueId>,
    /// What makes these, in order.
    steps: Vec<Step>,
    relied: Vec<Relied>,
    /// Nodes outside of branches: constant indices that they read must lie within their data.
    unconditional: Vec<NodeId>,
    /// True if the order of the steps is not that of the computation.
    is_mixed: bool,
}

#[derive(Clone, Debug)]
enum Step {
    /// An operator: its facts are inferred, with these attributes.
    Node(NodeId, Shaping),
    /// Constants that a node was folded into.
    Folded(NodeId, Vec<ValueId>),
}

/// A fact that the importer relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relied {
    /// The elements of a constant.
    Elements(ValueId),
    Shape(ValueId),
    Extent(ValueId, usize),
    Rank(ValueId),
}

impl Notes {
    /// Notes an input whose extents are open.
    pub fn open(&mut self, value: ValueId) {
        self.open.insert(value);
    }

    /// Notes a node that was added. It may matter under a condition alone.
    pub fn added(&mut self, node: NodeId, inputs: &[Option<ValueId>], shaping: &Shaping, matters: bool) {
        let is_open = |value: &ValueId| self.open.contains(value);
        let values: Vec<_> = shaping.values.iter().filter(|(_, value)| is_open(value)).copied().collect();
        let forms: Shaped = shaping.forms.iter().filter(|(_, forms)| forms.on() != 0).cloned().collect();
        if values.is_empty() && forms.is_empty() && !inputs.iter().flatten().any(is_open) {
            return;
        }
        self.steps.push(Step::Node(node, Shaping { forms, values }));
        if matters {
            self.unconditional.push(node);
        }
        self.open.insert(node.output(0));
    }

    /// Notes what a node became: its own values, or the constants that it was folded into.
    pub fn became(&mut self, node: NodeId, values: &[ValueId], is_folded: bool) {
        if !self.open.contains(&node.output(0)) {
            return;
        }
        self.open.extend(values);
        if is_folded {
            self.steps.push(Step::Folded(node, values.to_vec()));
        }
    }

    /// The constants that attributes of these nodes are read from, if they may change; `None` if attributes depend on counts.
    pub fn shaping(&self, nodes: &HashSet<NodeId>) -> Option<Vec<ValueId>> {
        let of = |step: &Step| match step {
            Step::Node(node, shaping) if nodes.contains(node) => Some(shaping.clone()),
            _ => None,
        };
        let mut values = Vec::new();
        for shaping in self.steps.iter().filter_map(of) {
            if !shaping.forms.is_empty() {
                return None;
            }
            values.extend(shaping.values.iter().map(|(_, value)| *value));
        }
        Some(values)
    }

    /// True if a value may depend on what is open.
    pub fn is_open(&self, value: ValueId) -> bool {
        self.open.contains(&value)
    }

    /// Notes constants that a node became after others have read it.
    pub fn late(&mut self, node: NodeId) {
        self.is_mixed |= self.open.contains(&node.output(0));
    }

    /// Notes a decision.
    pub fn rely(&mut self, on: Relied) {
        let (Relied::Elements(value) | Relied::Shape(value) | Relied::Extent(value, _) | Relied::Rank(value)) = on;
        if self.open.contains(&value) && !self.relied.contains(&on) {
            self.relied.push(on);
        }
    }
}

/// A model that was imported.
#[derive(Debug)]
pub(in crate::onnx) struct Open {
    /// The graph for the first extents, with the nodes that were folded.
    whole: Graph,
    varying: Varying,
    notes: Notes,
    /// The dims that were open.
    dims: Vec<(String, usize)>,
    /// Inputs whose elements are given and shape the computation.
    bound: BTreeSet<String>,
    record: Arc<Record>,
}

impl Open {
    /// Imports a model for these extents; its states stay inputs and outputs. A node that finds as many elements as a run decides finds the
    /// number in `counts`; one that is missing there is added, and finds the most. Returns the graph for these extents, too.
    ///
    /// # Errors
    /// The first node that breaks a rule of ONNX or of the op table.
    pub fn new(model: &Model, dims: &[(String, usize)], counts: &mut Counts) -> Result<(Open, Graph)> {
        let decisions = Decisions::record(&BTreeSet::new());
        let importer = read(model, dims, &decisions, counts)?;
        let record = Arc::new(decisions.finish().expect("nothing is followed"));
        let Importer { graph: whole, notes, dependence, bound, .. } = importer;
        let mut graph = whole.clone();
        graph.sweep();
        let varying = dependence.finish(&graph)?;
        Ok((Open { whole, varying, notes, dims: dims.to_vec(), bound, record }, graph))
    }

    /// True if these dims were open.
    pub fn is_of(&self, dims: &[(String, usize)]) -> bool {
        dims.iter().map(|(name, _)| name).eq(self.dims.iter().map(|(name, _)| name))
    }

    /// The graph for the first extents.
    pub fn first(&self) -> Imported {
        let mut graph = self.whole.clone();
        graph.sweep();
        Imported { graph, varying: self.varying.clone() }
    }

    /// The graph for other extents, of the same dims, and other counts. All these graphs have the same nodes, unless the importer decided
    /// otherwise for these.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn at(&self, model: &Model, dims: &[(String, usize)], counts: &mut Counts, at: &Counted) -> Result<Imported> {
        // An import tells what is wrong.
        if let Some(derived) = self.derived(model, dims, at).ok().flatten() {
            return Ok(derived);
        }
        // What was folded for the first extents is folded for these, too, where their nodes are alike.
        let followed = Decisions::follow(&self.record);
        let importer = read(model, dims, &followed, &mut counts.clone()).ok().filter(|_| followed.finish().is_ok());
        let mut importer = match importer {
            Some(importer) => importer,
            None => read(model, dims, &Decisions::default(), counts)?,
        };
        counts.clone_from(&importer.counts);
        importer.graph.sweep();
        let varying = importer.dependence.finish(&importer.graph)?;
        Ok(Imported { graph: importer.graph, varying })
    }

    /// The graph for other extents; `None` if it has other nodes.
    fn derived(&self, model: &Model, dims: &[(String, usize)], at: &Counted) -> Result<Option<Imported>> {
        let Notes { steps, relied, unconditional, is_mixed, .. } = &self.notes;
        let proto = model.graph()?;
        let loops = model.loops();
        let bounds_loops = |(now, first): (&(String, usize), &(String, usize))| now != first && loops.contains(&now.0);
        if *is_mixed || dims.iter().zip(&self.dims).any(bounds_loops) {
            return Ok(None);
        }
        let mut graph = self.whole.clone();
        let inputs: Vec<_> = graph.inputs().to_vec();
        let declared: Vec<_> = model.open_inputs().collect();
        for (name, fact) in bind(&declared, loops, dims)? {
            match inputs.iter().find(|&&value| graph.value_name(value) == name) {
                Some(&input) => graph.set_input(input, fact),
                None if self.bound.contains(name) && model.gives(name, &fact.shape) => {}
                None => return Ok(None),
            }
        }
        let mut varying = self.varying.clone();
        for step in steps {
            match step {
                Step::Node(node, shaping) => {
                    let Some(attrs) = shaping.attrs(&graph, *node, at)? else { return Ok(None) };
                    graph.set_attrs(*node, attrs)?;
                }
                Step::Folded(node, values) => {
                    for (value, constant) in values.iter().zip(folded_constants(&graph, *node)?) {
                        let constant = Arc::new(constant);
                        let old = graph.as_constant(*value).and_then(|old| varying.of(old)).cloned();
                        old.into_iter().for_each(|forms| varying.note(&constant, forms));
                        graph.fill(*value, constant);
                    }
                }
            }
        }
        for on in relied {
            if !on.holds(&self.whole, &graph)? {
                return Ok(None);
            }
        }
        for &node in unconditional {
            let own = graph.node(node);
            let op = own.op().expect("an operator was added");
            look_up(&graph, op, &graph.operands(node), &own.attrs).map_err(|what| own.error(what))?;
        }
        graph.sweep();
        for output in proto.output.iter().filter(|output| model.wants(&output.name)) {
            if let Some((_, value)) = graph.outputs().iter().find(|(name, _)| *name == output.name) {
                check_output(output, graph.fact(*value), dims)?;
            }
        }
        Ok(Some(Imported { graph, varying }))
    }
}

impl Shaping {
    /// The attributes of a node; `None` if how they depend on counts is not known.
    fn attrs(&self, graph: &Graph, node: NodeId, at: &Counted) -> Result<Option<Attrs>> {
        let mut attrs = graph.node(node).attrs.clone();
        for (name, value) in &self.values {
            let Some(constant) = graph.as_constant(*value) else { return Ok(None) };
            attrs.set(name, Attr::shaping(constant.value()?));
        }
        for (name, forms) in self.forms.iter().filter(|(name, _)| self.values.iter().all(|(other, _)| other != name)) {
            match attrs.get(name).and_then(|attr| forms.at_counts(attr, at)) {
                Some(attr) => attrs.set(name, attr),
                None => return Ok(None),
            }
        }
        Ok(Some(attrs))
    }
}

impl Relied {
    /// True if what was relied on is the same in another graph.
    fn holds(&self, first: &Graph, other: &Graph) -> Result<bool> {
        Ok(match *self {
            Relied::Shape(value) => first.fact(value) == other.fact(value),
            Relied::Rank(value) => first.fact(value).shape.len() == other.fact(value).shape.len(),
            Relied::Extent(value, axis) => {
                let extent = |graph: &Graph| graph.fact(value).shape.get(axis).copied();
                extent(first) == extent(other)
            }
            Relied::Elements(value) => match (first.as_constant(value), other.as_constant(value)) {
                (Some(a), Some(b)) => a.fact == b.fact && a.value()?.bytes() == b.value()?.bytes(),
                _ => false,
            },
        })
    }
}
