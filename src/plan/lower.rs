//! Groups become kernels, values become buffers and accesses.
//!
//! A view is a value whose access differs from its source's and whose buffer is the same. A concatenation is a buffer
//! whose parts are written in place by whoever produces them, where that is possible. What cannot be expressed so is
//! copied by a kernel of its own.
//!
//! A value lies row-major, but for those around convolutions that cuDNN computes on tensor cores: these want the channels of a
//! position one after another.
//!
//! An elementwise group whose value only a core reads makes no kernel where the core's can apply it to each element on its way
//! in: it is the prologue of that operand.

use super::{Class, Window};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::expr::{self, Body, Expr};
use crate::graph::{Constant, Graph, Kind};
use crate::kernel::layout::{self, prologue, same_elements};
use crate::kernel::library::{self, Split};
use crate::kernel::{Kernel, Operand, Prologue, RowFold, Template};
use crate::op::{Args, Call, Core, Fact, Lower, ValueId, reduced_axes};
use crate::pass::attention;
use crate::shape::{Access, Shape};
use crate::target::{Family, Target};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

mod split;

/// A buffer that has no offset yet.
#[derive(Clone, Debug)]
pub struct DraftBuffer {
    /// The tensor's name.
    pub name: String,
    /// The type in which elements are stored.
    pub dtype: DType,
    /// The tensor's extents.
    pub shape: Shape,
    /// Length in bytes, a multiple of 4.
    pub bytes: u64,
    /// What it is for.
    pub class: Class,
}

/// A launch whose place in the order is not decided.
#[derive(Clone, Debug)]
pub struct DraftStep {
    /// The node whose result it computes.
    pub name: String,
    /// Index of the kernel.
    pub kernel: usize,
    /// One buffer per operand read.
    pub reads: Vec<usize>,
    /// One buffer per operand written, then the workspace.
    pub writes: Vec<usize>,
    /// What it binds of them, operand by operand; none where it binds all.
    pub windows: Vec<Window>,
    /// Buffers read that the first write may take the bytes of: each element is read before it is written.
    pub reusable: Vec<usize>,
}

/// A constant and its buffer.
#[derive(Clone, Debug)]
pub struct DraftConstant {
    /// The constant.
    pub constant: Arc<Constant>,
    /// Index of the buffer.
    pub buffer: usize,
    /// The kernel and its operand whose packed layout the bytes take.
    pub packed: Option<(usize, usize)>,
}

/// Kernels and buffers of a graph, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Buffers.
    pub buffers: Vec<DraftBuffer>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Launches.
    pub steps: Vec<DraftStep>,
    /// Constants.
    pub constants: Vec<DraftConstant>,
    /// Inputs of the graph: value and buffer.
    pub inputs: Vec<(ValueId, usize)>,
    /// Outputs of the graph: name, value and buffer.
    pub outputs: Vec<(String, ValueId, usize)>,
    /// Whether there are concatenations, on which [`Options::join`] has a bearing.
    pub concatenates: bool,
    /// Whether the graph [spares memory](Graph::spares_memory).
    pub sparing: bool,
}

impl Draft {
    /// Per buffer, whether a step or the caller uses it.
    pub fn used(&self) -> Vec<bool> {
        let mut used = vec![false; self.buffers.len()];
        let steps = self.steps.iter().flat_map(|step| step.reads.iter().chain(&step.writes)).copied();
        let ports = self.inputs.iter().map(|p| p.1).chain(self.outputs.iter().map(|p| p.2));
        steps.chain(ports).for_each(|b| used[b] = true);
        used
    }

    /// The buffer in which a step works, if it needs one.
    pub fn workspace(&self, step: usize) -> Option<usize> {
        let DraftStep { kernel, writes, .. } = &self.steps[step];
        writes.get(self.kernels[*kernel].writes.len()).copied()
    }
}

/// Choices of lowering that change memory, not results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Write the parts of a concatenation in place.
    pub join: bool,
}

/// Where a value lies.
#[derive(Clone, Debug)]
struct Place {
    buffer: usize,
    access: Access,
}

/// An elementwise group that a core applies to the elements of an operand.
#[derive(Clone, Debug)]
struct Hosted {
    /// Where the elements lie, then the operands of the group beside them.
    reads: Vec<Place>,
    /// From the elements of `reads` to what the core consumes.
    body: Body,
}

/// What leaving an elementwise group to a core takes.
struct Hosting {
    /// Views that the core looks through.
    views: Vec<u32>,
    /// What the core reads.
    value: ValueId,
    hosted: Hosted,
    /// Whether it costs less than a kernel of its own.
    pays: bool,
}

/// An operand of a prologue beside the core's is this many times smaller than the core's, unless it is kept anyway: a prologue keeps
/// its operands alive until the core has run.
const SMALLER: u64 = 8;

struct Lowering<'a> {
    graph: &'a Graph,
    target: &'a Target,
    draft: Draft,
    places: HashMap<ValueId, Place>,
    /// Where a value must be written, decided before its kernel is made.
    destinations: HashMap<ValueId, Place>,
    /// Values whose channels come last, and whether their kernels can write them in no other way.
    channels_last: HashMap<ValueId, bool>,
    /// Copies of values in the layout that a core wants.
    copies: HashMap<ValueId, Place>,
    /// Per value that a core reads: the group that stands in for it.
    hosted: HashMap<ValueId, Hosted>,
    /// Views that a core looks through.
    passed: HashSet<u32>,
    constants: HashMap<(*const Constant, Option<String>), usize>,
    /// Constants that are read as views of another one, which is there anyway.
    shared: HashMap<*const Constant, (Arc<Constant>, Access)>,
    kernels: HashMap<String, usize>,
}

/// Lowers a graph whose passes have run.
///
/// # Errors
/// When the target has no type for a value, or a node has no kernel.
pub fn lower(graph: &Graph, target: &Target, options: Options) -> Result<Draft> {
    let mut lowering = Lowering {
        graph,
        target,
        draft: Draft { sparing: graph.spares_memory(), ..Draft::default() },
        places: HashMap::new(),
        destinations: HashMap::new(),
        channels_last: HashMap::new(),
        copies: HashMap::new(),
        hosted: HashMap::new(),
        passed: HashSet::new(),
        constants: HashMap::new(),
        shared: HashMap::new(),
        kernels: HashMap::new(),
    };
    lowering.run(options)?;
    Ok(lowering.draft)
}

impl Lowering<'_> {
    fn run(&mut self, options: Options) -> Result<()> {
        let order = self.graph.order()?;
        for &value in self.graph.inputs() {
            let buffer = self.buffer(value, Class::Input)?;
            self.draft.inputs.push((value, buffer));
            let access = Access::contiguous(self.graph.fact(value).shape.clone());
            self.places.insert(value, Place { buffer, access });
        }
        self.share_constants(&order);
        let mut members: HashMap<u32, Vec<u32>> = HashMap::new();
        for &node in &order {
            if let Some(group) = self.graph.node(node).group {
                members.entry(group).or_default().push(node);
            }
        }
        self.choose_layouts(&order, &members)?;
        self.choose_outputs()?;
        self.choose_destinations(&order, options)?;
        self.choose_turns(&order, &members)?;
        for &id in &order {
            let node = self.graph.node(id);
            let Kind::Op(op) = node.kind else { continue };
            let alone = [id];
            let group = match node.group {
                Some(group) => members[&group].as_slice(),
                None => &alone,
            };
            if group.last() != Some(&id) {
                continue;
            }
            match op.lower {
                Lower::View(_) if self.passed.contains(&id) => {}
                Lower::View(_) => self.view(id)?,
                Lower::Concat => self.concat(id)?,
                Lower::Map(_) if node.group.is_some() && self.host(group, &members)? => {}
                Lower::Map(_) | Lower::Reduce(_) | Lower::Template(_) => self.group(group)?,
                Lower::Decompose(_) | Lower::Fold => {
                    return Err(node.error("its inputs must be constants: it has no kernel"));
                }
            }
        }
        for index in 0..self.draft.outputs.len() {
            let (_, value, buffer) = self.draft.outputs[index];
            let place = self.place(value)?;
            if place.buffer != buffer {
                let access = Access::contiguous(place.access.shape.clone());
                self.copy(value, &place, Place { buffer, access })?;
            }
        }
        Ok(())
    }

    fn buffer(&mut self, value: ValueId, class: Class) -> Result<usize> {
        let (fact, name) = (self.graph.fact(value), self.graph.value_name(value));
        let dtype = self.storage(fact.dtype, name)?;
        Ok(self.add_buffer(name.to_owned(), dtype, fact.shape.clone(), class))
    }

    fn storage(&self, dtype: DType, name: &str) -> Result<DType> {
        self.target.storage(dtype).map_err(|e| Error::Usage(format!("value '{name}': {e}")))
    }

    fn add_buffer(&mut self, name: String, dtype: DType, shape: Shape, class: Class) -> usize {
        let bytes = (shape.numel() * dtype.size()).next_multiple_of(4).max(4) as u64;
        self.draft.buffers.push(DraftBuffer { name, dtype, shape, bytes, class });
        self.draft.buffers.len() - 1
    }

    /// Finds constants of which several forms are read, as the table of embeddings whose transpose makes the logits: where that takes no
    /// more than the forms apart, they are held once, and products read the other forms through their strides. So are transposed ones that
    /// no binding holds: by its columns a product can be cut.
    fn share_constants(&mut self, order: &[u32]) {
        let graph = self.graph;
        let mut forms: HashMap<*const Constant, Vec<(&Arc<Constant>, (Arc<Constant>, Access))>> = HashMap::new();
        for &node in order {
            let value = ValueId { node, port: 0 };
            let Some(constant) = graph.as_constant(value) else { continue };
            let (root, access) = viewed(constant);
            if access.is_contiguous() || products_alone(graph, value) {
                forms.entry(Arc::as_ptr(&root)).or_default().push((constant, (root, access)));
            }
        }
        let bytes = |constant: &Constant| constant.fact.shape.numel() * constant.fact.dtype.size();
        // Whether a binding holds what is read of the whole, or its columns can be taken apart.
        let windowed = |root: &Constant, access: &Access| {
            let most = self.target.max_binding.saturating_sub(self.target.alignment);
            let elements = access.span().map_or(0, |(low, high)| high.abs_diff(low) as u64 + 1);
            let columns = access.strides.len() >= 2 && access.strides[access.strides.len() - 2] == 1;
            columns || elements.saturating_mul(root.fact.dtype.size() as u64) <= most
        };
        let pays = |forms: &Vec<(&Arc<Constant>, (Arc<Constant>, Access))>| {
            let whole = bytes(&forms[0].1.0);
            let one = forms.len() == 1 && (forms[0].1.1.is_contiguous() || whole as u64 <= self.target.max_binding);
            let binds = whole as u64 <= self.target.max_binding || forms.iter().all(|(_, (root, a))| windowed(root, a));
            let less = whole <= forms.iter().map(|form| bytes(form.0)).sum();
            !one && binds && less && whole as u64 <= self.target.max_segment
        };
        let shared = forms.into_values().filter(pays).flatten();
        self.shared = shared.map(|(form, whole)| (Arc::as_ptr(form), whole)).collect();
    }

    /// Whether this is a convolution that wants its operands' channels last.
    fn wants_channels_last(&self, template: &Template, dtype: DType) -> bool {
        let served = self.target.family == Family::Cuda && self.target.libraries.cudnn;
        served && library::on_tensor_cores(dtype, self.target) && matches!(template, Template::Conv { .. })
    }

    /// Decides which values have their channels last: those of convolutions that want it, and what is made of them or for them
    /// alone by kernels that can write either way.
    fn choose_layouts(&mut self, order: &[u32], members: &HashMap<u32, Vec<u32>>) -> Result<()> {
        if self.target.family != Family::Cuda || !self.target.libraries.cudnn {
            return Ok(());
        }
        let graph = self.graph;
        let template = |id: u32| {
            let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
            let dense: Vec<_> = operands.iter().map(|&v| Access::contiguous(graph.fact(v).shape.clone())).collect();
            self.build(id, &dense, None).map(|core| core.template)
        };
        let mut chosen: HashMap<ValueId, bool> = HashMap::new();
        for &id in order {
            let Kind::Op(op) = graph.node(id).kind else { continue };
            let alone = [id];
            let group = graph.node(id).group.map_or(&alone[..], |group| members[&group].as_slice());
            let value = ValueId { node: id, port: 0 };
            let Fact { dtype, shape } = graph.fact(value);
            if group.last() != Some(&id) || !library::on_tensor_cores(*dtype, self.target) || shape.len() < 3 {
                continue;
            }
            let lower = |n: u32| graph.node(n).op().map(|op| &op.lower);
            let anchor = group.iter().copied().find(|&n| matches!(lower(n), Some(Lower::Template(_))));
            let from = |nodes: &[u32]| {
                let mut operands = nodes.iter().flat_map(|&n| graph.operands(n)).flatten();
                operands.any(|v| chosen.contains_key(&v) && graph.fact(v).shape.len() == shape.len())
            };
            let convolved = |user: &u32| match lower(*user) {
                Some(Lower::Template(_)) if graph.operands(*user).first() == Some(&Some(value)) => {
                    template(*user).is_ok_and(|t| self.wants_channels_last(&t, *dtype))
                }
                _ => false,
            };
            let users = graph.users(value);
            let fixed = match (op.lower, anchor) {
                (_, Some(anchor)) => match template(anchor)? {
                    ref t if self.wants_channels_last(t, *dtype) => Some(true),
                    Template::Pool { .. } if from(&[anchor]) => Some(false),
                    _ => None,
                },
                (Lower::Map(_), None) => {
                    let meant = !users.is_empty() && users.iter().all(convolved);
                    (meant || from(group)).then_some(false)
                }
                (Lower::Concat, None) => from(&[id]).then_some(false),
                _ => None,
            };
            if let Some(fixed) = fixed {
                chosen.insert(value, fixed);
            }
        }
        self.channels_last = chosen;
        Ok(())
    }

    /// How a value lies in a buffer of its own.
    fn layout(&self, value: ValueId) -> Access {
        let shape = self.graph.fact(value).shape.clone();
        match self.channels_last.contains_key(&value) {
            true => Access::channels_last(shape),
            false => Access::contiguous(shape),
        }
    }

    /// Gives every output a buffer; the first output of a value that a kernel produces is written there directly.
    fn choose_outputs(&mut self) -> Result<()> {
        for (name, value) in self.graph.outputs() {
            let buffer = self.buffer(*value, Class::Output)?;
            self.draft.buffers[buffer].name = name.clone();
            self.draft.outputs.push((name.clone(), *value, buffer));
            let access = Access::contiguous(self.graph.fact(*value).shape.clone());
            self.aim(*value, Place { buffer, access });
        }
        Ok(())
    }

    /// Decides where a value is written, through views that keep all elements, unless that is decided already or
    /// nothing writes the value.
    fn aim(&mut self, mut value: ValueId, mut place: Place) {
        loop {
            let node = self.graph.node(value.node);
            let Some(op) = node.op() else { return };
            if self.destinations.contains_key(&value) || self.channels_last.get(&value) == Some(&true) {
                return;
            }
            let Lower::View(_) = op.lower else {
                self.destinations.insert(value, place);
                return;
            };
            // Only views that keep the elements' order are undone: the source is written under its own shape.
            let source = self.graph.operands(value.node)[0].expect("a view has a source");
            let contiguous = Access::contiguous(self.graph.fact(source).shape.clone());
            let seen = self.view_access(value.node, &contiguous);
            let kept = Access::contiguous(node.outputs[0].fact.shape.clone());
            let keeps = seen.is_some_and(|seen| seen.shape == kept.shape && same_elements(&seen, &kept));
            let access = place.access.reshape(&contiguous.shape).filter(|_| keeps);
            let aims = self.graph.choices().holds("aim", value.node, access.is_some());
            let Some(access) = access.filter(|_| aims) else { return };
            place = Place { buffer: place.buffer, access };
            value = source;
        }
    }

    /// Lets the producers of a concatenation's parts write into it.
    fn choose_destinations(&mut self, order: &[u32], options: Options) -> Result<()> {
        for &id in order.iter().rev() {
            let node = self.graph.node(id);
            if !matches!(node.op().map(|op| &op.lower), Some(Lower::Concat)) {
                continue;
            }
            self.draft.concatenates = true;
            let value = ValueId { node: id, port: 0 };
            if !self.destinations.contains_key(&value) {
                let buffer = self.buffer(value, Class::Activation)?;
                self.destinations.insert(value, Place { buffer, access: self.layout(value) });
            }
            if options.join {
                let whole = self.destinations[&value].clone();
                for (part, access) in self.parts(id, &whole.access) {
                    self.aim(part, Place { buffer: whole.buffer, access });
                }
            }
        }
        Ok(())
    }

    /// Lets attentions write their heads side by side where these are joined: what a view cannot see of a transposed value would be copied.
    fn choose_turns(&mut self, order: &[u32], members: &HashMap<u32, Vec<u32>>) -> Result<()> {
        let graph = self.graph;
        for &id in order {
            let lower = |n: u32| graph.node(n).op().map(|op| &op.lower);
            let (Some(Lower::View(_)), Some(&Some(turned))) = (lower(id), graph.operands(id).first()) else { continue };
            let Some(perm) = self.permutation(turned.node) else { continue };
            let value = graph.operands(turned.node)[0].expect("a view has a source");
            let group = graph.node(value.node).group.map_or(&[][..], |group| &members[&group]);
            let templates = group.iter().filter(|&&n| matches!(lower(n), Some(Lower::Template(_)))).count();
            if templates < 2 || graph.users(value) != [turned.node] || self.destinations.contains_key(&value) {
                continue;
            }
            let seen = self.view_access(turned.node, &Access::contiguous(graph.fact(value).shape.clone()));
            let copies = seen.is_some_and(|seen| self.view_access(id, &seen).is_none());
            if !graph.is_output(value) && graph.choices().pays("turn", id, copies) {
                let mut back = vec![0; perm.len()];
                perm.iter().enumerate().for_each(|(to, &from)| back[from] = to);
                let access = Access::contiguous(graph.fact(turned).shape.clone()).permute(&back);
                let buffer = self.buffer(value, Class::Activation)?;
                self.destinations.insert(value, Place { buffer, access });
            }
        }
        Ok(())
    }

    /// Which axis of its source each axis of a transposed value is, if it is one.
    fn permutation(&self, id: u32) -> Option<Vec<usize>> {
        let node = self.graph.node(id);
        let rank = node.outputs.first()?.fact.shape.len();
        let op = node.op().filter(|op| op.name == "Transpose")?;
        let perm = Call { op, attrs: &node.attrs, inputs: &[] }.ints("perm").ok()?;
        let perm = perm.map_or_else(|| (0..rank).rev().collect(), |p| p.iter().map(|&axis| axis as usize).collect());
        Some(perm)
    }

    /// The parts of a concatenation and where each lies in the whole.
    fn parts(&self, id: u32, whole: &Access) -> Vec<(ValueId, Access)> {
        let operands = self.graph.operands(id);
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.fact(v))).collect();
        let node = self.graph.node(id);
        let call = Call { op: node.op().expect("a concatenation"), attrs: &node.attrs, inputs: &facts };
        let axis = call.axis("axis", 0, &whole.shape).expect("the axis was inferred");
        let mut start = 0;
        let part = |value: ValueId| {
            let len = self.graph.fact(value).shape[axis];
            start += len;
            (value, whole.slice(axis, start - len, 1, len))
        };
        operands.into_iter().flatten().map(part).collect()
    }

    fn view_access(&self, id: u32, source: &Access) -> Option<Access> {
        let node = self.graph.node(id);
        let op = node.op()?;
        let Lower::View(view) = op.lower else { return None };
        let operands = self.graph.operands(id);
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.fact(v))).collect();
        view(&Call { op, attrs: &node.attrs, inputs: &facts }, source)
    }

    fn view(&mut self, id: u32) -> Result<()> {
        let source = self.graph.operands(id)[0].expect("a view has a source");
        let mut place = self.place(source)?;
        let finer = self.finer(id, &place.access);
        let seen = finer.or_else(|| self.view_access(id, &place.access));
        let sees = self.graph.choices().holds("view", id, seen.is_some());
        let access = match seen.filter(|_| sees) {
            Some(access) => access,
            None => {
                place = self.contiguous(source, &place)?;
                let whole = self.view_access(id, &place.access);
                whole.ok_or_else(|| self.graph.node(id).error("not a view of contiguous data"))?
            }
        };
        self.places.insert(ValueId { node: id, port: 0 }, Place { buffer: place.buffer, access });
        Ok(())
    }

    /// The access of a view that strides cannot express because it joins repeated batch axes, as keys have that several heads share: with
    /// those axes apart, where only matrix products read it, which can have theirs apart, too.
    fn finer(&self, id: u32, source: &Access) -> Option<Access> {
        let graph = self.graph;
        let shape = &graph.node(id).outputs[0].fact.shape;
        let rank = shape.len();
        let before = &graph.fact(graph.operands(id)[0]?).shape;
        if source.shape != *before {
            // It is apart already: only the matrix may be turned.
            let mut axes: Vec<usize> = (0..source.shape.len()).collect();
            let last = axes.len() - 2;
            axes.swap(last, last + 1);
            return Some(source.permute(&axes));
        }
        let batch = |shape: &Shape| shape.len().checked_sub(2).map(|axes| shape[..axes].to_vec());
        let (apart, joined) = (batch(&source.shape)?, batch(shape)?);
        let matrices = rank >= 3 && source.shape[apart.len()..] == shape[joined.len()..] && !shape.contains(&0);
        if !matrices || self.view_access(id, source).is_some() || !is_split(&joined, &apart) {
            return None;
        }
        let mut values = vec![ValueId { node: id, port: 0 }];
        while let Some(value) = values.pop() {
            if graph.is_output(value) || self.destinations.contains_key(&value) {
                return None;
            }
            for user in graph.users(value) {
                let name = graph.node(user).op()?.name;
                let result = &graph.node(user).outputs[0].fact.shape;
                let turned = || {
                    let plain = self.view_access(user, &Access::contiguous(shape.clone()));
                    let axes: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
                    plain == Some(Access::contiguous(shape.clone()).permute(&axes))
                };
                match name {
                    "MatMul" if result.len() == rank && result[..rank - 2] == joined => {}
                    "Transpose" if value.node == id && turned() => values.push(ValueId { node: user, port: 0 }),
                    _ => return None,
                }
            }
        }
        Some(source.clone())
    }

    /// The batch axes that products of these values have apart, if one of them is read so. What has others apart is copied.
    fn apart(&mut self, values: &[ValueId]) -> Result<Option<Shape>> {
        let mut found: Option<Shape> = None;
        for &value in values {
            if self.hosted.contains_key(&value) {
                continue;
            }
            let (place, shape) = (self.place(value)?, self.graph.fact(value).shape.clone());
            if place.access.shape == shape {
                continue;
            }
            let batch: Shape = place.access.shape[..place.access.shape.len() - 2].into();
            if found.as_ref().is_some_and(|first| *first != batch) {
                let copy = self.contiguous(value, &place)?;
                self.places.insert(value, Place { access: Access::contiguous(shape), ..copy });
            } else {
                found = Some(batch);
            }
        }
        Ok(found)
    }

    /// A row-major copy of a value in a buffer of its own.
    fn contiguous(&mut self, value: ValueId, place: &Place) -> Result<Place> {
        let access = Access::contiguous(place.access.shape.clone());
        self.copied(value, place, access)
    }

    /// A copy of a value in a buffer of its own.
    fn copied(&mut self, value: ValueId, place: &Place, access: Access) -> Result<Place> {
        let buffer = self.buffer(value, Class::Activation)?;
        let copy = Place { buffer, access };
        self.copy(value, place, copy.clone())?;
        Ok(copy)
    }

    /// A value with its channels last: as it is, as a constant that is stored so, or as a copy.
    fn with_channels_last(&mut self, value: ValueId) -> Result<Place> {
        let shape = self.graph.fact(value).shape.clone();
        if let Some(constant) = self.graph.as_constant(value).cloned() {
            let key = (Arc::as_ptr(&constant), Some("channels last".to_owned()));
            let access = Access::channels_last(shape.clone());
            if let Some(&buffer) = self.constants.get(&key) {
                return Ok(Place { buffer, access });
            }
            let constant = Arc::new(constant.permuted(&crate::shape::channels_last(shape.len()))?);
            let buffer = self.buffer(value, Class::Constant)?;
            self.constants.insert(key, buffer);
            self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
            return Ok(Place { buffer, access });
        }
        let place = self.place(value)?;
        if self.graph.choices().holds("last", value.node, place.access.has_channels_last()) {
            return Ok(place);
        }
        if let Some(copy) = self.copies.get(&value) {
            return Ok(copy.clone());
        }
        let copy = self.copied(value, &place, Access::channels_last(shape))?;
        self.copies.insert(value, copy.clone());
        Ok(copy)
    }

    fn copy(&mut self, value: ValueId, from: &Place, to: Place) -> Result<()> {
        let dtype = self.graph.fact(value).dtype;
        let name = format!("copy of {}", self.graph.value_name(value));
        let shape = from.access.shape.clone();
        let read = (from.buffer, self.operand(from.buffer, from.access.clone()));
        self.step(name, Outline::new(Template::Map, shape, Body::identity(dtype)), vec![read], vec![to])
    }

    fn concat(&mut self, id: u32) -> Result<()> {
        let value = ValueId { node: id, port: 0 };
        let whole = self.destinations[&value].clone();
        for (part, access) in self.parts(id, &whole.access) {
            let place = self.place(part)?;
            let in_place = place.buffer == whole.buffer && same_elements(&place.access, &access);
            if !self.graph.choices().holds("join", part.node, in_place) {
                self.copy(part, &place, Place { buffer: whole.buffer, access })?;
            }
        }
        self.places.insert(value, whole);
        Ok(())
    }

    /// Where a value lies; constants get their buffer when they are first read.
    fn place(&mut self, value: ValueId) -> Result<Place> {
        if let Some(place) = self.places.get(&value) {
            return Ok(place.clone());
        }
        let Some(constant) = self.graph.as_constant(value) else {
            return Err(Error::Graph(format!("value '{}' is read before it is made", self.graph.value_name(value))));
        };
        let (constant, access) = match self.shared.get(&Arc::as_ptr(constant)) {
            Some(shared) => shared.clone(),
            None => (constant.clone(), Access::contiguous(constant.fact.shape.clone())),
        };
        let key = (Arc::as_ptr(&constant), None);
        if let Some(&buffer) = self.constants.get(&key) {
            return Ok(Place { buffer, access });
        }
        let (name, dtype) = (constant.name.clone(), self.storage(constant.fact.dtype, &constant.name)?);
        let buffer = self.add_buffer(name, dtype, constant.fact.shape.clone(), Class::Constant);
        self.constants.insert(key, buffer);
        self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
        Ok(Place { buffer, access })
    }

    /// A buffer under an access. Along an axis of extent 1 no step is ever taken: its stride is 0, so that equal accesses are equal
    /// values.
    fn operand(&self, buffer: usize, mut access: Access) -> Operand {
        for (stride, _) in access.strides.iter_mut().zip(access.shape.iter()).filter(|(_, extent)| **extent == 1) {
            *stride = 0;
        }
        Operand { dtype: self.draft.buffers[buffer].dtype, access, packed: false }
    }

    /// Leaves an elementwise group to the core that alone reads its value, perhaps through views, where the core's kernel can take it
    /// and gains by it.
    fn host(&mut self, nodes: &[u32], members: &HashMap<u32, Vec<u32>>) -> Result<bool> {
        let graph = self.graph;
        if !nodes.iter().all(|&n| matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Map(_)))) {
            return Ok(false);
        }
        let sink = *nodes.last().expect("a group has nodes");
        let hosting = self.hosting(ValueId { node: sink, port: 0 }, nodes, members)?;
        let own = hosting.as_ref().filter(|h| h.pays).map(|_| 0);
        let hosts = graph.choices().take("host", sink, own, |_| hosting.is_some()).is_some();
        if let Some(Hosting { views, value, hosted, .. }) = hosting.filter(|_| hosts) {
            self.passed.extend(views);
            self.hosted.insert(value, hosted);
        }
        Ok(hosts)
    }

    /// How the core that alone reads the value of an elementwise group could apply the group, if it could.
    fn hosting(&mut self, sink: ValueId, nodes: &[u32], members: &HashMap<u32, Vec<u32>>) -> Result<Option<Hosting>> {
        let graph = self.graph;
        let shape = &graph.fact(sink).shape;
        let (mut value, mut views) = (sink, Vec::new());
        let anchor = loop {
            let [user] = graph.users(value)[..] else { return Ok(None) };
            if graph.is_output(value) || self.destinations.contains_key(&value) {
                return Ok(None);
            }
            match graph.node(user).op().map(|op| &op.lower) {
                Some(Lower::Template(_)) => break user,
                Some(Lower::View(_)) => {
                    views.push(user);
                    value = ValueId { node: user, port: 0 };
                    if graph.fact(value).shape.numel() != shape.numel() {
                        return Ok(None);
                    }
                }
                _ => return Ok(None),
            }
        };
        let group = graph.node(anchor).group.map_or(&[][..], |group| &members[&group]);
        let templates =
            group.iter().filter(|&&n| matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Template(_))));
        if templates.count() > 1 {
            // An attention has no place for it.
            return Ok(None);
        }
        let operands: Vec<_> = graph.operands(anchor).into_iter().flatten().collect();
        let Some(input) = operands.iter().position(|&v| v == value) else { return Ok(None) };
        let dense = |v: &ValueId| Access::contiguous(graph.fact(*v).shape.clone());
        let mut accesses: Vec<_> = operands.iter().map(dense).collect();
        let core = self.build(anchor, &accesses, None)?;
        let operand = core.reads.iter().position(|(i, _)| *i == input);
        let Some(operand) =
            operand.filter(|&o| matches!((&core.template, o), (Template::MatMul, _) | (Template::Conv { .. }, 0)))
        else {
            return Ok(None);
        };

        let mut code = Code::default();
        let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(shape)))?;
        let (dtype, bytes) =
            (self.storage(result.dtype(), graph.value_name(value))?, graph.fact(value).shape.numel() as u64);
        let bytes = bytes * dtype.size() as u64;
        let buffer = |b: usize| &self.draft.buffers[b];
        // One operand is what the group computes in place of; the others must not be kept for long in its stead.
        let elements = |(b, o): &(usize, Operand)| {
            let moves = o.access.strides.iter().zip(o.access.shape.iter()).all(|(&s, &d)| s != 0 || d == 1);
            moves
                && o.dtype == dtype
                && buffer(*b).class != Class::Constant
                && buffer(*b).bytes <= bytes.next_multiple_of(4)
        };
        let Some(first) = code.reads.iter().position(elements) else { return Ok(None) };
        let from = code.reads[first].0;
        let kept = |b: usize| b == from || buffer(b).class != Class::Activation || buffer(b).bytes * SMALLER <= bytes;
        let small = code.reads.iter().all(|(b, _)| kept(*b));
        let mut body = Body::new(&[result]);
        for instr in &mut body.code {
            if let expr::Code::Input(j) = &mut instr.code {
                *j = if *j as usize == first { 0 } else { *j + u32::from((*j as usize) < first) };
            }
        }
        let first = code.reads.remove(first);
        code.reads.insert(0, first);
        let mut reads = Vec::with_capacity(code.reads.len());
        for (buffer, operand) in code.reads {
            let seen = views.iter().try_fold(operand.access, |access, &view| self.view_access(view, &access));
            let Some(access) = seen else { return Ok(None) };
            reads.push(Place { buffer, access });
        }

        // The core's kernel with nothing but the prologue, to ask whether it has a place for it.
        let mut kernel = Kernel {
            template: core.template,
            shape: core.shape.clone(),
            reads: Vec::new(),
            writes: vec![Operand { dtype, access: Access::contiguous(core.shape), packed: false }],
            prologues: vec![Prologue { operand, reads: reads.len() - 1, body: body.clone() }],
            body: Body::identity(DType::F32),
            workspace: 0,
            call: None,
        };
        for (o, (i, access)) in core.reads.into_iter().enumerate() {
            let constant =
                o != operand && self.target.family == Family::Cpu && graph.as_constant(operands[i]).is_some();
            let dtype = self.storage(graph.fact(operands[i]).dtype, graph.value_name(operands[i]))?;
            kernel.reads.push(Operand { dtype, access, packed: constant });
        }
        for (k, place) in reads.iter().enumerate() {
            accesses[input] = place.access.clone();
            let access = self.build(anchor, &accesses, None)?.reads.swap_remove(operand).1;
            let read = self.operand(place.buffer, access);
            match k {
                0 => kernel.reads[operand] = read,
                _ => kernel.reads.push(read),
            }
        }
        let outside = |group: &[u32]| {
            let operands = group.iter().flat_map(|&n| graph.operands(n)).flatten();
            operands.filter(|v| !group.contains(&v.node)).collect::<HashSet<_>>().len()
        };
        let hosted = operands.iter().filter_map(|v| self.hosted.get(v)).map(|h| h.reads.len() - 1);
        let bindings = outside(group) + hosted.sum::<usize>() + reads.len() - 1 + 2;
        let fits = bindings <= self.target.max_bindings as usize
            && prologue::hosts(&kernel, operand, self.target)
            && (kernel.template == Template::MatMul || is_dense_image(&kernel.reads[operand].access));
        let pays = small && prologue::pays(&kernel, operand, self.target);
        Ok(fits.then_some(Hosting { views, value, hosted: Hosted { reads, body }, pays }))
    }

    /// The literal that a value is, if it is a constant of one element that code can hold exactly.
    fn literal(&self, value: ValueId) -> Result<Option<Expr>> {
        match self.graph.as_constant(value) {
            Some(c) if c.fact.shape.numel() == 1 => {
                const EXACT: u64 = 1 << f64::MANTISSA_DIGITS;
                let tensor = c.value()?;
                let exact = tensor.to_i64().is_none_or(|v| v.iter().all(|v| v.unsigned_abs() <= EXACT));
                Ok(tensor.to_f64().first().filter(|_| exact).map(|&v| Expr::lit(v, c.fact.dtype)))
            }
            _ => Ok(None),
        }
    }

    /// Makes one kernel of a group.
    fn group(&mut self, nodes: &[u32]) -> Result<()> {
        let sink = *nodes.last().expect("a group has nodes");
        let lower = |n: u32| &self.graph.node(n).op().expect("only operators are grouped").lower;
        if nodes.iter().filter(|&&n| matches!(lower(n), Lower::Template(_))).count() > 1 {
            return self.attention(nodes, sink);
        }
        let anchor = nodes.iter().copied().find(|&n| matches!(lower(n), Lower::Template(_)));
        let reduction = nodes.iter().copied().find(|&n| matches!(lower(n), Lower::Reduce(_)));
        let mut code = Code::default();
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let name = self.graph.node(sink).name.clone();
        if let Some(anchor) = anchor {
            let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
            let apart = self.apart(&operands)?;
            let (core, mut reads, own) = self.core(anchor, apart.as_ref())?;
            let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
            code.values.insert(ValueId { node: anchor, port: 0 }, Expr::input(0, dtype));
            code.first = 1;
            let result = self.compute(nodes, &mut code, &|access, _| access.broadcast(&shape).reshape(&core.shape))?;
            reads.append(&mut code.reads);
            let mut prologues = Vec::new();
            for (prologue, mut operands) in own {
                reads.append(&mut operands);
                prologues.push(prologue);
            }
            let to = self.destination(value)?;
            let access = to.access.reshape(&core.shape);
            let to = Place { buffer: to.buffer, access: access.ok_or_else(|| self.unreachable(sink))? };
            let outline = Outline { prologues, ..Outline::new(core.template, core.shape, Body::new(&[result])) };
            self.step(name, outline, reads, vec![to])
        } else if let Some(reduction) = reduction {
            let row = self.row(reduction);
            let result = self.compute(nodes, &mut code, &|access, rank| {
                let kept = if rank == row.full.len() { access.shape.clone() } else { row.kept.clone() };
                Some(access.reshape(&kept)?.broadcast(&row.full).permute(&row.axes))
            })?;
            let per_row = shape.numel() == row.kept.numel() && (shape != row.full || row.full == row.kept);
            let space: Shape = row.axes.iter().map(|&a| row.full[a]).collect();
            let to = self.destination(value)?;
            let outer = row.axes.len() - row.inner;
            let access = if per_row {
                to.access.reshape(&row.kept).map(|a| a.permute(&row.axes)).map(|mut a| {
                    a.shape.truncate(outer);
                    a.strides.truncate(outer);
                    a
                })
            } else {
                Some(to.access.permute(&row.axes))
            };
            let to = Place { buffer: to.buffer, access: access.ok_or_else(|| self.unreachable(sink))? };
            let template = Template::Row { inner: row.inner, folds: code.folds, per_row };
            self.step(name, Outline::new(template, space, Body::new(&[result])), code.reads, vec![to])
        } else {
            let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(&shape)))?;
            let to = self.destination(value)?;
            self.step(name, Outline::new(Template::Map, shape, Body::new(&[result])), code.reads, vec![to])
        }
    }

    /// Makes one kernel of an attention.
    fn attention(&mut self, nodes: &[u32], sink: u32) -> Result<()> {
        let graph = self.graph;
        let found = attention::ending_in(graph, sink);
        let found = found.ok_or_else(|| graph.node(sink).error("a group of two products is an attention"))?;
        let value = ValueId { node: sink, port: 0 };
        let values = graph.operands(sink)[1].expect("a product has two operands");
        let mut operands: Vec<_> = graph.operands(found.products).into_iter().flatten().collect();
        operands.push(values);
        let apart = self.apart(&operands)?;
        let (products, mut reads, _) = self.core(found.products, apart.as_ref())?;
        let (whole, space) = (graph.node(found.products).outputs[0].fact.shape.clone(), products.shape);
        let batch = &whole[..whole.len() - 2];
        let mut shape = space.clone();
        shape.truncate(space.len() - 2);
        let apart = shape.clone();
        let result = &graph.fact(value).shape;
        shape.extend_from_slice(&result[result.len() - 2..]);
        let place = self.place(values)?;
        let access = split(&place.access, batch, &apart).ok_or_else(|| self.unreachable(sink))?;
        reads.push((place.buffer, self.operand(place.buffer, access)));

        let products = ValueId { node: found.products, port: 0 };
        let dtype = graph.fact(products).dtype;
        let mut code = Code { first: 1, ..Code::default() };
        code.values.insert(products, Expr::input(0, dtype));
        let scoring = |&n: &u32| n != sink && matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Map(_)));
        let last = nodes.iter().position(|&n| n == found.scores.node).expect("the scores are of the group");
        let maps: Vec<u32> = nodes[..=last].iter().copied().filter(scoring).collect();
        let score = match maps.is_empty() {
            true => Expr::input(0, dtype),
            false => self.compute(&maps, &mut code, &|access, _| access.broadcast(&whole).reshape(&space))?,
        };
        let further = code.reads.len();
        reads.append(&mut code.reads);
        let template = Template::Attention { score: Body::new(&[score]), further, guarded: found.guarded };
        let to = self.destination(value)?;
        let access = to.access.reshape(&shape).ok_or_else(|| self.unreachable(sink))?;
        let to = Place { buffer: to.buffer, access };
        let outline = Outline::new(template, shape, Body::identity(graph.fact(value).dtype));
        self.step(graph.node(sink).name.clone(), outline, reads, vec![to])
    }

    fn unreachable(&self, node: u32) -> Error {
        self.graph.node(node).error("its result cannot be written where it is needed")
    }

    /// Where a value is to be written: as decided, or in a buffer of its own.
    fn destination(&mut self, value: ValueId) -> Result<Place> {
        let place = match self.destinations.get(&value) {
            Some(place) => place.clone(),
            None => {
                let buffer = self.buffer(value, Class::Activation)?;
                Place { buffer, access: self.layout(value) }
            }
        };
        self.places.insert(value, place.clone());
        Ok(place)
    }

    fn row(&self, reduction: u32) -> Row {
        let node = self.graph.node(reduction);
        let input = self.graph.operands(reduction)[0].expect("a reduction reads one value");
        let full = self.graph.fact(input).shape.clone();
        let facts = [Some(self.graph.fact(input))];
        let call = Call { op: node.op().expect("a reduction"), attrs: &node.attrs, inputs: &facts };
        let inner = reduced_axes(&call).expect("the axes were inferred");
        let kept = (0..full.len()).map(|k| if inner.contains(&k) { 1 } else { full[k] }).collect();
        let mut axes: Vec<usize> = (0..full.len()).filter(|k| !inner.contains(k)).collect();
        axes.extend(&inner);
        Row { full, kept, axes, inner: inner.len() }
    }

    /// The template of a node whose operands are read as given; of a product, with its batch axes `apart`.
    fn build(&self, anchor: u32, accesses: &[Access], apart: Option<&Shape>) -> Result<Core> {
        let (graph, node) = (self.graph, self.graph.node(anchor));
        let op = node.op().expect("a template is an operator");
        let Lower::Template(template) = op.lower else { unreachable!("the caller chose a template") };
        let operands: Vec<_> = graph.operands(anchor).into_iter().flatten().collect();
        let mut facts: Vec<Fact> = operands.iter().map(|&v| graph.fact(v).clone()).collect();
        let mut accesses = accesses.to_vec();
        if let Some(apart) = apart {
            let batch = &node.outputs[0].fact.shape;
            let batch = &batch[..batch.len() - 2];
            for (access, fact) in accesses.iter_mut().zip(&mut facts) {
                *access = split(access, batch, apart).ok_or_else(|| self.unreachable(anchor))?;
                fact.shape = access.shape.clone();
            }
        }
        let facts: Vec<_> = facts.iter().map(Some).collect();
        template(&Call { op, attrs: &node.attrs, inputs: &facts }, &accesses).map_err(|what| node.error(what))
    }

    /// The template of a node, with its operands' buffers, and with the prologues that it hosts and theirs. The batch axes of a product may
    /// be `apart`.
    fn core(&mut self, anchor: u32, apart: Option<&Shape>) -> Result<(Core, Vec<Read>, Vec<(Prologue, Vec<Read>)>)> {
        let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
        let mut places = Vec::with_capacity(operands.len());
        for &value in &operands {
            places.push(match self.hosted.get(&value) {
                Some(hosted) => hosted.reads[0].clone(),
                None => self.place(value)?,
            });
        }
        let accesses = |places: &[Place]| places.iter().map(|p| p.access.clone()).collect::<Vec<_>>();
        let mut core = self.build(anchor, &accesses(&places), apart)?;
        let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
        let last = self.wants_channels_last(&core.template, dtype);
        if last {
            for (place, &value) in places.iter_mut().zip(&operands) {
                *place = self.with_channels_last(value)?;
            }
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let either = self.target.family == Family::Cuda && matches!(core.template, Template::Pool { .. });
        let lies = either && core.reads[0].1.has_channels_last();
        let lies = last || self.graph.choices().holds("lies", anchor, lies);
        let windowed = matches!(
            core.template,
            Template::Conv { .. }
                | Template::ConvTranspose { .. }
                | Template::Pool { .. }
                | Template::Resize { .. }
                | Template::Pad { .. }
        );
        if windowed && !lies && !self.graph.choices().holds("dense", anchor, is_dense_image(&core.reads[0].1)) {
            let input = core.reads[0].0;
            places[input] = self.contiguous(operands[input], &places[input])?;
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let reads: Vec<_> = core
            .reads
            .iter()
            .map(|(i, access)| (places[*i].buffer, self.operand(places[*i].buffer, access.clone())))
            .collect();
        let mut prologues = Vec::new();
        for (operand, &(input, _)) in core.reads.iter().enumerate() {
            let Some(Hosted { reads, body }) = self.hosted.get(&operands[input]) else { continue };
            let mut own = Vec::with_capacity(reads.len() - 1);
            for place in &reads[1..] {
                let mut accesses = accesses(&places);
                accesses[input] = place.access.clone();
                let access = self.build(anchor, &accesses, apart)?.reads.swap_remove(operand).1;
                own.push((place.buffer, self.operand(place.buffer, access)));
            }
            prologues.push((Prologue { operand, reads: own.len(), body: body.clone() }, own));
        }
        Ok((core, reads, prologues))
    }

    /// The expression of a group's last node. `access` turns a value's access into the kernel's index space, given the
    /// rank of the value that the elementwise node reading it produces.
    fn compute(
        &mut self,
        nodes: &[u32],
        code: &mut Code,
        access: &dyn Fn(&Access, usize) -> Option<Access>,
    ) -> Result<Expr> {
        let graph = self.graph;
        for &id in nodes {
            let node = graph.node(id);
            let op = node.op().expect("only operators are grouped");
            if matches!(op.lower, Lower::Template(_)) {
                continue;
            }
            let operands = graph.operands(id);
            // Elementwise operands are broadcast to the node's own shape before the kernel's space is considered.
            let shape = match op.lower {
                Lower::Reduce(_) => graph.fact(operands[0].expect("a reduction reads one value")).shape.clone(),
                _ => node.outputs[0].fact.shape.clone(),
            };
            let mut args = Vec::with_capacity(operands.len());
            for &value in &operands {
                let Some(value) = value else {
                    args.push(None);
                    continue;
                };
                if let Some(expr) = code.values.get(&value) {
                    args.push(Some(expr.clone()));
                    continue;
                }
                if let Some(literal) = self.literal(value)? {
                    args.push(Some(literal));
                    continue;
                }
                let place = self.place(value)?;
                let seen = access(&place.access.broadcast(&shape), shape.len());
                let seen = seen.ok_or_else(|| node.error("an operand cannot be read in the kernel's index space"))?;
                let read = (place.buffer, self.operand(place.buffer, seen));
                let number = code.reads.iter().position(|r| *r == read).unwrap_or_else(|| {
                    code.reads.push(read);
                    code.reads.len() - 1
                });
                args.push(Some(Expr::input(code.first + number, graph.fact(value).dtype)));
            }
            let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            let result = match op.lower {
                Lower::Map(map) => map(&Args(&args), &call),
                Lower::Reduce(fold) => {
                    let input = args[0].take().expect("a reduction reads one value");
                    let dtype = input.dtype();
                    code.folds.push(RowFold { fold, body: Body::new(&[input]) });
                    Expr::fold(code.folds.len() - 1, dtype)
                }
                _ => return Err(node.error("cannot be part of a kernel")),
            };
            code.values.insert(ValueId { node: id, port: 0 }, result);
        }
        let sink = ValueId { node: *nodes.last().expect("a group has nodes"), port: 0 };
        Ok(code.values[&sink].clone())
    }

    /// Adds a launch, its workspace, and what of it can be done in place.
    fn step(
        &mut self,
        name: String,
        Outline { template, shape, prologues, body }: Outline,
        reads: Vec<Read>,
        writes: Vec<Place>,
    ) -> Result<()> {
        let (mut buffers, operands): (Vec<_>, Vec<_>) = reads.into_iter().unzip();
        let mut kernel = Kernel {
            template,
            shape,
            reads: operands,
            writes: writes.iter().map(|p| self.operand(p.buffer, p.access.clone())).collect(),
            prologues,
            body,
            workspace: 0,
            call: None,
        };
        let slots = buffers.iter().copied().chain(writes.iter().map(|p| p.buffer));
        let slots: Vec<_> = slots.map(|b| (b, self.draft.buffers[b].bytes)).collect();
        let own = match slots.iter().any(|(_, bytes)| *bytes > self.target.max_binding) {
            true => {
                let parts = split::cut(&kernel, &slots, self.target);
                Some(parts.map_err(|slot| self.too_large(&name, &kernel, slots[slot].0, "cannot be split"))?)
            }
            false => None,
        };
        // Of a range's bindings all have as many parts as the largest.
        let count = own.as_ref().map(|parts| parts.len() as u32);
        let most = self.graph.choices().take("parts", self.draft.steps.len() as u32, count, |most| count <= Some(most));
        if let Some(most) = most {
            let parts = own.map_or_else(|| split::cut(&kernel, &slots, self.target), Ok);
            let parts = parts.expect("it is within bindings, or was cut");
            let parts = split::pad(&kernel, parts, most as usize, &slots);
            for split::Part { kernel, windows } in parts {
                self.launch(name.clone(), kernel, buffers.clone(), &writes, windows)?;
            }
            return Ok(());
        }
        if own.is_some() {
            let slot = slots.iter().max_by_key(|(_, bytes)| *bytes).expect("a kernel writes");
            return Err(self.too_large(&name, &kernel, slot.0, "is not split as at the largest binding of its range"));
        }
        if self.target.family == Family::Cpu {
            self.pack(&mut kernel, &mut buffers);
        }
        self.walk_as_written(&mut kernel);
        let split = library::split(&kernel, self.target);
        let form = |s: &Split| u32::from(s.rest.is_some());
        let own = split.as_ref().filter(|s| s.call.0.call.is_some()).map(form);
        let fits = |f| split.as_ref().is_some_and(|s| form(s) == f);
        let taken = self.graph.choices().take("call", self.draft.steps.len() as u32, own, fits);
        let Some(Split { call: (call, slots), rest }) = split.filter(|_| taken.is_some()) else {
            return self.launch(name, kernel, buffers, &writes, Vec::new());
        };
        let pick = |slots: &[usize]| slots.iter().map(|&s| buffers[s]).collect::<Vec<_>>();
        self.launch(name.clone(), call, pick(&slots), &writes, Vec::new())?;
        if let Some((mut map, slots)) = rest {
            self.walk_as_written(&mut map);
            let reads = [writes[0].buffer].into_iter().chain(pick(&slots)).collect();
            self.launch(name, map, reads, &writes, Vec::new())?;
        }
        Ok(())
    }

    /// On GPUs, neighbours in the index space are computed side by side: they should lie so, too.
    fn walk_as_written(&self, kernel: &mut Kernel) {
        let Kernel { template: Template::Map, shape, reads, writes, body, .. } = kernel else { return };
        let indexed = body.code.iter().any(|i| matches!(i.code, expr::Code::Index(_)));
        if self.target.family != Family::Cuda || indexed || writes.len() != 1 {
            return;
        }
        let strides = &writes[0].access.strides;
        let mut axes: Vec<usize> = (0..shape.len()).filter(|&k| shape[k] != 1).collect();
        axes.sort_by_key(|&k| std::cmp::Reverse(strides[k].unsigned_abs()));
        // Axes of extent 1 stay where they are.
        let mut sorted = axes.into_iter();
        let order: Vec<usize> = (0..shape.len())
            .map(|k| if shape[k] == 1 { k } else { sorted.next().expect("as many as moved") })
            .collect();
        *shape = order.iter().map(|&k| shape[k]).collect();
        for operand in reads.iter_mut().chain(writes) {
            operand.access = operand.access.permute(&order);
        }
    }

    fn too_large(&self, name: &str, kernel: &Kernel, buffer: usize, why: &str) -> Error {
        let (b, target) = (&self.draft.buffers[buffer], self.target);
        let (value, kernel, most) =
            (format!("'{}' ({}{})", b.name, b.dtype, b.shape), kernel.template.name(), target.max_binding);
        Error::Usage(format!(
            "node '{name}': tensor {value} takes {} bytes; target '{}' binds at most {most}, and kernel '{kernel}' {why}",
            b.bytes, target.name
        ))
    }

    fn launch(
        &mut self,
        name: String,
        mut kernel: Kernel,
        buffers: Vec<usize>,
        writes: &[Place],
        windows: Vec<Window>,
    ) -> Result<()> {
        kernel.workspace = match &kernel.call {
            Some(call) => call.workspace(),
            None => layout::workspace(&kernel, self.target),
        };
        let mut written: Vec<usize> = writes.iter().map(|p| p.buffer).collect();
        let first = &kernel.writes[0];
        let further = kernel.further();
        let per_row = matches!(kernel.template, Template::Row { per_row: true, .. });
        let same = |b: usize| {
            let mut operands = kernel.reads.iter().enumerate().filter(|(i, _)| buffers[*i] == b);
            let in_place = |i: usize| kernel.call.as_ref().is_none_or(|call| call.in_place() == Some(i));
            operands.all(|(i, o)| {
                further.contains(&i) && in_place(i) && o.access == first.access && o.dtype.size() == first.dtype.size()
            })
        };
        let bytes = |b: usize| self.draft.buffers[b].bytes;
        let mut reusable: Vec<usize> = buffers.clone();
        reusable.sort_unstable();
        reusable.dedup();
        // Of several parts, one overwrites what another is yet to read.
        let whole = |b: usize| {
            let slots = buffers.iter().chain(&written).zip(&windows).filter(|(slot, _)| **slot == b);
            slots.into_iter().all(|(_, w)| (w.offset, w.bytes) == (0, bytes(b)))
        };
        let whole = |b: usize| whole(b) && whole(written[0]);
        reusable.retain(|&b| whole(b) && !per_row && bytes(b) == bytes(written[0]) && same(b));
        if kernel.workspace > self.target.max_binding {
            let (found, most) = (kernel.workspace, self.target.max_binding);
            let what = format!(
                "node '{name}': a workspace of {found} bytes; target '{}' binds at most {most}",
                self.target.name
            );
            return Err(Error::Usage(what));
        }
        if kernel.workspace > 0 {
            let shape = Shape::new([kernel.workspace as usize]);
            written.push(self.add_buffer(format!("workspace of {name}"), DType::U8, shape, Class::Workspace));
        }
        let text = serde_json::to_string(&kernel).expect("a kernel has only finite numbers and text keys");
        let kernels = &mut self.draft.kernels;
        let number = *self.kernels.entry(text).or_insert_with(|| {
            kernels.push(kernel);
            kernels.len() - 1
        });
        for constant in &mut self.draft.constants {
            if let Some((kernel @ usize::MAX, _)) = &mut constant.packed {
                *kernel = number;
            }
        }
        self.draft.steps.push(DraftStep { name, kernel: number, reads: buffers, writes: written, windows, reusable });
        Ok(())
    }

    /// Constants that the CPU's kernels want in their own layout get a buffer in that layout.
    fn pack(&mut self, kernel: &mut Kernel, buffers: &mut [usize]) {
        for (operand, slot) in buffers.iter_mut().enumerate().take(kernel.template.core_reads()) {
            let source = *slot;
            if self.draft.buffers[source].class != Class::Constant || kernel.prologue(operand).is_some() {
                continue;
            }
            let Some(bytes) = layout::packed_bytes(kernel, operand) else { continue };
            if bytes.next_multiple_of(4) > self.target.max_binding {
                continue;
            }
            let Some(at) = self.draft.constants.iter().position(|c| c.buffer == source) else { continue };
            let constant = self.draft.constants[at].constant.clone();
            let read = &mut kernel.reads[operand];
            // A window's weights are packed for the image they slide over, a product's matrices once each.
            let (access, space) = match kernel.template {
                Template::MatMul => (layout::unrepeated(&read.access), None),
                _ => (read.access.clone(), kernel.shape.get(1..)),
            };
            let layout = format!("{operand} {access:?} {:?} {space:?}", kernel.template);
            let key = (Arc::as_ptr(&constant), Some(layout));
            read.packed = true;
            *slot = match self.constants.get(&key) {
                Some(&buffer) => buffer,
                None => {
                    let DraftBuffer { name, dtype, shape, .. } = self.draft.buffers[source].clone();
                    let buffer = self.add_buffer(name, dtype, shape, Class::Constant);
                    self.draft.buffers[buffer].bytes = bytes.next_multiple_of(4);
                    let packed = Some((usize::MAX, operand));
                    self.draft.constants.push(DraftConstant { constant, buffer, packed });
                    self.constants.insert(key, buffer);
                    buffer
                }
            };
        }
    }
}

/// An operand and its buffer.
type Read = (usize, Operand);

/// A kernel without its operands.
struct Outline {
    template: Template,
    shape: Shape,
    prologues: Vec<Prologue>,
    body: Body,
}

impl Outline {
    fn new(template: Template, shape: Shape, body: Body) -> Outline {
        Outline { template, shape, prologues: Vec::new(), body }
    }
}

fn products_alone(graph: &Graph, value: ValueId) -> bool {
    graph.users(value).iter().all(|&user| graph.node(user).op().is_some_and(|op| op.name == "MatMul"))
}

/// The constant that a constant is a view of, and how it lies there; itself, if it is none.
fn viewed(constant: &Arc<Constant>) -> (Arc<Constant>, Access) {
    let through = || {
        let (op, attrs, source) = constant.view()?;
        let Lower::View(view) = op.lower else { return None };
        let (root, access) = viewed(source);
        let access = view(&Call { op, attrs, inputs: &[Some(&source.fact)] }, &access)?;
        Some((root, access))
    };
    through().unwrap_or_else(|| (constant.clone(), Access::contiguous(constant.fact.shape.clone())))
}

/// Whether `apart` is `joined` with axes taken apart.
fn is_split(joined: &[usize], apart: &[usize]) -> bool {
    let mut parts = apart.iter();
    let whole = |&extent: &usize| {
        let mut product = 1;
        while product < extent {
            match parts.next() {
                Some(part) => product *= part,
                None => return false,
            }
        }
        product == extent
    };
    joined.iter().all(whole) && parts.all(|&part| part == 1)
}

/// An operand of a product over these batch axes with the axes `apart`: split, unless it has them so.
fn split(access: &Access, batch: &[usize], apart: &Shape) -> Option<Access> {
    let matrix = &access.shape[access.shape.len() - 2..];
    let of = |batch: &[usize]| batch.iter().chain(matrix).copied().collect::<Shape>();
    if access.shape == of(apart) {
        return Some(access.clone());
    }
    let whole = of(batch);
    (access.shape.len() <= whole.len()).then(|| access.broadcast(&whole))?.reshape(&of(apart))
}

/// Whether each image of `[n, ..]` lies without gaps, in the order of their numbers.
fn is_dense_image(access: &Access) -> bool {
    if access.strides.first().is_some_and(|&s| s < 0) {
        return false;
    }
    let mut image = access.clone();
    if image.shape.len() > 1 {
        image.shape.remove(0);
        image.strides.remove(0);
    }
    image.is_contiguous()
}

/// What a group's expressions are made of so far.
#[derive(Default)]
struct Code {
    values: HashMap<ValueId, Expr>,
    reads: Vec<Read>,
    folds: Vec<RowFold>,
    /// The number of the first operand: a core value comes before it.
    first: usize,
}

/// The index space of a row kernel.
struct Row {
    /// The shape that is reduced.
    full: Shape,
    /// The same with reduced axes of extent 1.
    kept: Shape,
    /// Outer axes, then reduced ones.
    axes: Vec<usize>,
    /// How many are reduced.
    inner: usize,
}
