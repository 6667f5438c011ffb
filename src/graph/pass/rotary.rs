//! Finds values whose parts change places, as the halves do in rotary embeddings, and replaces them by views.
//!
//! ```text
//! Concat(-x[h..], x[..h])  =  x with the axis split, [2, h], backwards along the 2, times [-1, 1]
//! ```
//!
//! Parts would have to be stored, each by a kernel of its own; a view under signs is read by the kernel of what follows. The axis stays
//! split through the elementwise nodes behind it.

use super::Context;
use super::group::uses_index;
use crate::constant::Constant;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Lower, NodeId, ValueId};
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;

/// The most elementwise nodes in front of one with the axis split that are rebuilt with the axis split, too.
const DEPTH: usize = 8;

/// A concatenation of parts of one value that are as long as each other.
struct Rotary {
    source: ValueId,
    /// The axis along which parts follow each other, and how many there are.
    axis: usize,
    parts: usize,
    /// The shape of the whole, with the axis split where parts are longer than 1.
    shape: Shape,
    /// True if the last part of the value comes first.
    backwards: bool,
    /// Per part, 1 or -1.
    signs: Vec<f64>,
}

/// Replaces such concatenations.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    for id in graph.order()? {
        if let Some(rotary) = context.decisions.if_found("rotary", id, find(graph, id)) {
            replace(graph, id, &rotary, context)?;
        }
    }
    graph.sweep();
    Ok(())
}

fn find(graph: &Graph, id: NodeId) -> Option<Rotary> {
    let node = graph.node(id);
    node.op().filter(|op| op.name == "Concat")?;
    let whole = &node.outputs[0].fact;
    let values: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
    let axis = graph.with_call(id, |call| call.axis("axis", 0, &whole.shape))?.ok()?;
    let parts = values.len();
    if parts < 2 || !whole.dtype.is_float() || whole.shape.contains(&0) {
        return None;
    }
    let elements = whole.shape.numel();
    let seen: Vec<_> = values.iter().map(|&value| part_of(graph, value, elements)).collect::<Option<_>>()?;
    let (_, source, first) = &seen[0];
    let step = seen[1].2.offset - first.offset;
    let follows = |(p, (_, from, part)): (usize, &(f64, ValueId, Access))| {
        let offset = first.offset + p as isize * step;
        from == source && *part == Access { offset, ..first.clone() }
    };
    // Without signs nothing is computed: the parts would be copied together instead of apart.
    if !seen.iter().enumerate().all(follows) || seen.iter().all(|part| part.0 > 0.0) {
        return None;
    }
    let mut split = first.clone();
    match split.shape[axis] {
        1 => (split.shape[axis], split.strides[axis]) = (parts, step),
        _ => {
            split.shape.insert(axis, parts);
            split.strides.insert(axis, step);
        }
    }
    let forwards = Access::contiguous(graph.fact(*source).shape.clone()).reshape(&split.shape)?;
    let backwards = forwards.slice(axis, parts - 1, -1, parts);
    let reads = |other: &Access| {
        let same = |k: usize| other.shape[k] == 1 || other.strides[k] == split.strides[k];
        other.offset == split.offset && (0..other.shape.len()).all(same)
    };
    let swapped = reads(&backwards);
    (swapped || reads(&forwards)).then(|| Rotary {
        source: *source,
        axis,
        parts,
        backwards: swapped,
        signs: seen.iter().map(|part| part.0).collect(),
        shape: split.shape,
    })
}

/// The value of so many elements that a value is a view of, perhaps negated: its sign, that value, and where it lies in it.
fn part_of(graph: &Graph, value: ValueId, elements: usize) -> Option<(f64, ValueId, Access)> {
    let (mut sign, mut source, mut views) = (1.0, value, Vec::new());
    while graph.fact(source).shape.numel() != elements {
        let op = graph.node(source.node).op()?;
        match op.lower {
            Lower::View(_) => views.push(source.node),
            _ if op.name == "Neg" => sign = -sign,
            _ => return None,
        }
        source = graph.operands(source.node)[0]?;
    }
    let mut access = Access::contiguous(graph.fact(source).shape.clone());
    for &id in views.iter().rev() {
        access = graph.view_access(id, &access)?;
    }
    Some((sign, source, access))
}

fn replace(graph: &mut Graph, id: NodeId, rotary: &Rotary, context: &Context) -> Result<()> {
    let name = graph.node(id).name.clone();
    let axis = rotary.axis as i64;
    graph.insert_at(id);
    let mut value = context.add(graph, &name, "Reshape", &[Some(rotary.source)], reshape(&rotary.shape))?;
    if rotary.backwards {
        let attrs = Attrs::new().with("starts", vec![-1i64]).with("ends", vec![i64::MIN]);
        let attrs = attrs.with("axes", vec![axis]).with("steps", vec![-1i64]);
        value = context.add(graph, &name, "Slice", &[Some(value)], attrs)?;
    }
    let mut shape = vec![1; rotary.shape.len() - rotary.axis];
    shape[0] = rotary.parts;
    let signs = Tensor::from_f64(graph.fact(value).dtype, Shape::new(shape), &rotary.signs);
    let signs = graph.constant(Constant::new(format!("signs of {name}"), signs));
    graph.insert_at(id);
    value = context.add(graph, &name, "Mul", &[Some(value), Some(signs)], Attrs::new())?;
    let mut old = id.output(0);
    let Some(split) = split(graph, rotary, &mut old, context) else {
        graph.replace(old, value);
        return Ok(());
    };
    while let [user] = graph.users(old)[..] {
        let follows = !graph.is_output(old) && split.is_elementwise(graph, user);
        if !context.decisions.if_valid("split axis", user, follows) {
            break;
        }
        value = split.rebuild(graph, user, Some((old, value)), DEPTH)?;
        old = user.output(0);
    }
    graph.insert_at(old.node);
    value = context.add(graph, &name, "Reshape", &[Some(value)], reshape(&split.whole))?;
    graph.replace(old, value);
    Ok(())
}

/// How the axis is split in the concatenation, `old`, or in what joins the axes of neighbours that alternate.
fn split<'a>(graph: &Graph, rotary: &Rotary, old: &mut ValueId, context: &'a Context<'a>) -> Option<SplitAxis<'a>> {
    let mut whole = graph.fact(*old).shape.clone();
    if rotary.shape != whole {
        return Some(SplitAxis { axis: rotary.axis, parts: rotary.parts, whole, context });
    }
    let axis = rotary.axis.checked_sub(1)?;
    let [user] = graph.users(*old)[..] else { return None };
    let parts = whole[axis];
    whole[axis] *= whole.remove(rotary.axis);
    let joins = graph.node(user).op_name() == "Reshape" && graph.node(user).outputs[0].fact.shape == whole;
    if !context.decisions.if_valid("split axis", user, joins && !graph.is_output(*old)) {
        return None;
    }
    *old = user.output(0);
    Some(SplitAxis { axis, parts, whole, context })
}

fn reshape(shape: &Shape) -> Attrs {
    Attrs::new().with("shape", shape.as_slice())
}

/// An axis of a shape that is split into so many parts.
struct SplitAxis<'a> {
    axis: usize,
    parts: usize,
    whole: Shape,
    context: &'a Context<'a>,
}

impl SplitAxis<'_> {
    fn is_elementwise(&self, graph: &Graph, id: NodeId) -> bool {
        let node = graph.node(id);
        let map = match node.op().map(|op| &op.lower) {
            Some(Lower::Map(map)) => *map,
            _ => return false,
        };
        node.outputs[0].fact.shape == self.whole && !uses_index(graph, id, map)
    }

    /// An elementwise node with the axis split; one of its operands may have it so already.
    fn rebuild(
        &self,
        graph: &mut Graph,
        id: NodeId,
        known: Option<(ValueId, ValueId)>,
        depth: usize,
    ) -> Result<ValueId> {
        let mut operands = graph.operands(id);
        for operand in operands.iter_mut().flatten() {
            *operand = match known {
                Some((whole, split)) if whole == *operand => split,
                _ => self.operand(graph, *operand, id, depth)?,
            };
        }
        graph.insert_at(id);
        let node = graph.node(id).clone();
        self.context.add(graph, &node.name, node.op_name(), &operands, node.attrs)
    }

    /// An operand of an elementwise node, with the axis split.
    fn operand(&self, graph: &mut Graph, value: ValueId, user: NodeId, depth: usize) -> Result<ValueId> {
        let mut shape = graph.fact(value).shape.clone();
        // Extents are broadcast from the last axis on: there may be none of the axis.
        let at = (self.axis + shape.len()).checked_sub(self.whole.len());
        let Some(at) = at.filter(|_| shape.numel() != 1) else { return Ok(value) };
        let own = depth > 0 && graph.users(value) == [user] && !graph.is_output(value);
        if self.context.decisions.if_valid("split axis", value.node, own && self.is_elementwise(graph, value.node)) {
            return self.rebuild(graph, value.node, None, depth - 1);
        }
        let outer = if shape[at] == 1 { 1 } else { self.parts };
        shape[at] /= outer;
        shape.insert(at, outer);
        graph.insert_at(user);
        let name = graph.node(user).name.clone();
        self.context.add(graph, &name, "Reshape", &[Some(value)], reshape(&shape))
    }
}
