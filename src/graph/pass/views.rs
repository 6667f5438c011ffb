//! Rearranges views so that the nodes behind them read values where they lie.
//!
//! - A Gather of indices that are known and evenly apart is a Slice.
//! - A chain of views that splits, permutes and joins axes becomes one Reshape, one Transpose and one Reshape. Axes that are joined and
//!   split again on the way are not joined.
//! - A product computes rows in the order of its left operand, or in the order in which its result is read, and in no order between:
//!
//! ```text
//! MatMul (Transpose (x), w) + b   =   Transpose (MatMul (x, w) + b)        rows of x lie where they are wanted
//! Transpose (MatMul (y, w) + b)   =   MatMul (Transpose (y), w) + b        y is transposed, anyway
//! ```
//!
//! - In trainings on GPUs, a product whose columns are read as rows is that of its operands transposed, such as the gradient of keys:
//!
//! ```text
//! Transpose (MatMul (Transpose (q), d))   =   MatMul (Transpose (d), q)
//! ```

use super::Context;
use super::simplify::{addend, only};
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attr, Attrs, Call, Lower, NodeId, ValueId};
use crate::ops::Span;
use crate::shape::{Access, Shape};
use crate::target::Family;

/// The most indices of a Gather that are looked at.
const MAX_INDICES: usize = 1 << 16;
/// The longest chain of views that is replaced as one.
const MAX_VIEWS: usize = 64;
/// Elements of 16 bits that are read at once.
const VECTOR: usize = 8;
/// The most axes of a Transpose that is made.
const MAX_AXES: usize = 8;

/// Rearranges views.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    for step in [pick, swap, straighten, sink, lift] {
        for id in graph.order()? {
            step(graph, id, context)?;
        }
        graph.sweep();
    }
    Ok(())
}

fn shaped(shape: &Shape) -> Attrs {
    Attrs::new().with("shape", shape.as_slice()).with("allowzero", 1)
}

/// Makes a Slice of a Gather.
fn pick(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("pick", id, picked(graph, id)?);
    let Some((data, attrs)) = found else { return Ok(()) };
    let (name, shape) = (graph.node(id).name.clone(), graph.node(id).outputs[0].fact.shape.clone());
    graph.insert_at(id);
    let mut value = context.add(graph, &name, "Slice", &[Some(data)], attrs)?;
    if graph.fact(value).shape != shape {
        value = context.add(graph, &name, "Reshape", &[Some(value)], shaped(&shape))?;
    }
    graph.replace(id.output(0), value);
    Ok(())
}

/// Swaps the operands of a product whose columns are read as rows.
fn swap(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("swap", id, swapped(graph, id, context));
    let Some((product, perm)) = found else { return Ok(()) };
    let (name, operands) = (graph.node(product).name.clone(), graph.operands(product));
    graph.insert_at(product);
    let mut turned = Vec::with_capacity(2);
    for operand in operands.iter().rev() {
        let rank = operand.map_or(0, |value| graph.fact(value).shape.len());
        let mut own: Vec<usize> = (0..rank).collect();
        own.swap(rank - 2, rank - 1);
        turned.push(Some(context.add(graph, &name, "Transpose", &[*operand], transpose(&own))?));
    }
    let value = context.add(graph, &name, "MatMul", &turned, Attrs::new())?;
    graph.insert_at(id);
    let name = graph.node(id).name.clone();
    let value = context.add(graph, &name, "Transpose", &[Some(value)], transpose(&perm))?;
    graph.replace(id.output(0), value);
    Ok(())
}

/// The product that a Transpose alone reads by its columns, and the order of the axes of the product of its operands swapped.
fn swapped(graph: &Graph, id: NodeId, context: &Context) -> Option<(NodeId, Vec<usize>)> {
    let (node, operands) = (graph.node(id), graph.operands(id));
    let (Some(Attr::Ints(perm)), &[Some(value)]) = (node.attrs.get("perm"), &operands[..]) else { return None };
    let product = value.node;
    let rank = perm.len();
    let is_read_by_columns = rank >= 2 && perm[rank - 1] == rank as i64 - 2;
    let factors = graph.operands(product);
    let matrices = factors.iter().all(|factor| factor.is_some_and(|factor| graph.fact(factor).shape.len() == rank));
    // Rows that no vector fits are made longer, which another pass does.
    let even = graph.fact(value).shape.iter().rev().take(2).all(|extent| extent.is_multiple_of(VECTOR));
    let fits = context.target.family != Family::Cpu
        && graph.has_backward()
        && even
        && node.op_name() == "Transpose"
        && graph.node(product).op_name() == "MatMul"
        && graph.users(value).len() == 1
        && !graph.is_output(value);
    let turn = |&axis: &i64| match rank - 1 - axis as usize {
        0 => rank - 2,
        1 => rank - 1,
        _ => axis as usize,
    };
    (fits && is_read_by_columns && matrices).then(|| (product, perm.iter().map(turn).collect()))
}

/// The data of a Gather, and the Slice that its indices are.
fn picked(graph: &Graph, id: NodeId) -> Result<Option<(ValueId, Attrs)>> {
    let Some((data, axis, Span { start, step, len })) = even_gather(graph, id)? else { return Ok(None) };
    let start = start as i64;
    let end = start + (len as i64 - 1) * step + step.signum();
    let attrs = Attrs::new().with("axes", vec![axis as i64]).with("steps", vec![step]);
    let attrs = attrs.with("starts", vec![start]).with("ends", vec![if end < 0 { i64::MIN } else { end }]);
    Ok(Some((data, attrs)))
}

/// The data of a Gather of indices that are known and evenly apart, and the elements that it takes along an axis.
pub fn even_gather(graph: &Graph, id: NodeId) -> Result<Option<(ValueId, usize, Span)>> {
    let node = graph.node(id);
    let (Some(op), &[Some(data), Some(indices)]) = (node.op(), &graph.operands(id)[..]) else { return Ok(None) };
    let Some(constant) = graph.as_constant(indices).filter(|_| op.name == "Gather") else { return Ok(None) };
    let shape = &graph.fact(data).shape;
    let len = constant.fact.shape.numel();
    if !(1..=MAX_INDICES).contains(&len) || shape.contains(&0) {
        return Ok(None);
    }
    let axis = Call { op, attrs: &node.attrs, inputs: &[] }.axis("axis", 0, shape).map_err(|what| node.error(what))?;
    let extent = shape[axis] as i64;
    let Some(indices) = constant.value()?.to_i64() else { return Ok(None) };
    let at = |&i: &i64| if (-extent..0).contains(&i) { i + extent } else { i };
    let indices: Vec<i64> = indices.iter().map(at).collect();
    let step = if len > 1 { indices[1].saturating_sub(indices[0]) } else { 1 };
    let even = |pair: &[i64]| pair[1].checked_sub(pair[0]) == Some(step);
    // Elsewhere kernels take the nearest element.
    if step == 0 || !indices.windows(2).all(even) || !indices.iter().all(|i| (0..extent).contains(i)) {
        return Ok(None);
    }
    Ok(Some((data, axis, Span { start: indices[0] as usize, step, len })))
}

/// True if a node is a view that has each element of its source once.
fn rearranges(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op_name(), "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Transpose")
}

fn transpose(perm: &[usize]) -> Attrs {
    Attrs::new().with("perm", perm.iter().map(|&axis| axis as i64).collect::<Vec<_>>())
}

/// Axes of a value, in the parts that views of it move as wholes.
struct Parts {
    extents: Vec<usize>,
    /// The parts in the order in which they lie.
    source: Vec<usize>,
    /// The parts of each axis of the view.
    axes: Vec<Vec<usize>>,
}

impl Parts {
    fn of(shape: &Shape) -> Parts {
        let all = 0..shape.len();
        Parts { extents: shape.to_vec(), source: all.clone().collect(), axes: all.map(|part| vec![part]).collect() }
    }

    fn reshape(&mut self, shape: &Shape) -> Option<()> {
        let mut rest: Vec<usize> = self.axes.concat();
        rest.reverse();
        let mut axes: Vec<Vec<usize>> = Vec::with_capacity(shape.len());
        for &extent in shape.iter() {
            let (mut axis, mut missing) = (Vec::new(), extent);
            if extent == 1 && rest.last().is_some_and(|&part| self.extents[part] == 1) {
                axis.extend(rest.pop());
            }
            while missing > 1 {
                let part = rest.pop()?;
                let found = self.extents[part];
                if found > missing && found.is_multiple_of(missing) {
                    let inner = self.extents.len();
                    self.extents[part] = missing;
                    self.extents.push(found / missing);
                    let at = self.source.iter().position(|&p| p == part)?;
                    self.source.insert(at + 1, inner);
                    rest.push(inner);
                } else if !missing.is_multiple_of(found) {
                    return None;
                }
                axis.push(part);
                missing /= self.extents[part];
            }
            axes.push(axis);
        }
        // Only those of one element can be left.
        rest.reverse();
        match axes.last_mut() {
            Some(last) => last.extend(rest),
            None if rest.is_empty() => {}
            None => return None,
        }
        self.axes = axes;
        Some(())
    }

    /// The shape with all parts apart that do not stay together, and their order in the view.
    fn transposed(&self) -> (Shape, Vec<usize>) {
        // Of each run of parts that lie side by side in one axis: where it lies and its extent.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for axis in &self.axes {
            let mut next = None;
            for &part in axis {
                let at = self.source.iter().position(|&p| p == part).expect("every part lies somewhere");
                match runs.last_mut() {
                    Some(run) if next == Some(at) => run.1 *= self.extents[part],
                    _ => runs.push((at, self.extents[part])),
                }
                next = Some(at + 1);
            }
        }
        let mut lying = runs.clone();
        lying.sort_unstable();
        let place = |run: &(usize, usize)| lying.iter().position(|other| other.0 == run.0).expect("it is among them");
        (lying.iter().map(|run| run.1).collect(), runs.iter().map(place).collect())
    }
}

/// A value as a Reshape, a Transpose and a Reshape of another value. Steps that are not needed are left out.
struct Straight {
    source: ValueId,
    split: Shape,
    perm: Vec<usize>,
    /// For each of the three, true if it is needed.
    steps: [bool; 3],
}

impl Straight {
    /// A number for the structure, whatever the extents.
    fn code(&self) -> u32 {
        let places = self.perm.iter().fold(1, |code, &place| code << 3 | place as u32);
        self.steps.iter().fold(places, |code, &step| code << 1 | u32::from(step))
    }
}

/// Makes one Reshape, one Transpose and one Reshape at most of a chain of more.
fn straighten(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    straight(graph, id, context).map(|_| ())
}

/// As [`straighten`]; returns the value that then stands for the node's.
fn straight(graph: &mut Graph, id: NodeId, context: &Context) -> Result<ValueId> {
    let old = id.output(0);
    let found = shorter(graph, id);
    let own = found.as_ref().map(Straight::code);
    if context.decisions.choose("straighten", id, own, |code| own == Some(code)).is_none() {
        return Ok(old);
    }
    let Some(Straight { source, split, perm, steps }) = found else { return Ok(old) };
    let node = graph.node(id).clone();
    graph.insert_at(id);
    let mut value = source;
    let all = [
        ("Reshape", shaped(&split)),
        ("Transpose", transpose(&perm)),
        ("Reshape", shaped(&node.outputs[0].fact.shape)),
    ];
    for (op, attrs) in all.into_iter().zip(steps).filter_map(|(step, taken)| taken.then_some(step)) {
        value = context.add(graph, &node.name, op, &[Some(value)], attrs)?;
    }
    graph.replace(old, value);
    Ok(value)
}

/// A chain of views that ends in a node with fewer of them.
fn shorter(graph: &Graph, id: NodeId) -> Option<Straight> {
    let (mut source, mut chain) = (id.output(0), Vec::new());
    while rearranges(graph, source.node) && chain.len() < MAX_VIEWS {
        chain.push(source.node);
        source = graph.operands(source.node)[0]?;
    }
    let whole = &graph.node(id).outputs[0].fact.shape;
    if chain.len() < 2 || whole.contains(&0) {
        return None;
    }
    let mut parts = Parts::of(&graph.fact(source).shape);
    for &view in chain.iter().rev() {
        match graph.permutation(view) {
            Some(perm) => parts.axes = perm.into_iter().map(|axis| parts.axes[axis].clone()).collect(),
            None => parts.reshape(&graph.node(view).outputs[0].fact.shape)?,
        }
    }
    let (split, perm) = parts.transposed();
    let from = &graph.fact(source).shape;
    let steps = if perm.is_sorted() {
        [false, false, from != whole]
    } else {
        let transposed: Shape = perm.iter().map(|&run| split[run]).collect();
        [*from != split, true, transposed != *whole]
    };
    let fewer = steps.iter().filter(|&&step| step).count() < chain.len() && perm.len() <= MAX_AXES;
    fewer.then_some(Straight { source, split, perm, steps })
}

/// Rows of a value times weights, and what is added to each.
struct Rows {
    left: ValueId,
    weights: ValueId,
    bias: Option<ValueId>,
}

impl Rows {
    /// The product that computes a value, with a constant added if nothing else reads the product.
    fn of(graph: &Graph, value: ValueId) -> Option<Rows> {
        let (mut product, mut bias) = (value, None);
        if let Some((inner, constant)) = addend(graph, value.node) {
            let row = graph.fact(constant).shape.iter().rev().skip(1).all(|&d| d == 1);
            if !row || graph.fact(inner) != graph.fact(value) || !only(graph, inner, &["MatMul"]) {
                return None;
            }
            (product, bias) = (inner, Some(constant));
        }
        if graph.node(product.node).op_name() != "MatMul" {
            return None;
        }
        let &[Some(left), Some(weights)] = &graph.operands(product.node)[..] else { return None };
        let matrix = graph.fact(weights).shape.len() == 2 && graph.fact(left).shape.len() > 2;
        matrix.then_some(Rows { left, weights, bias })
    }

    /// The same of other rows.
    fn with(&self, graph: &mut Graph, id: NodeId, left: ValueId, context: &Context) -> Result<ValueId> {
        let name = graph.node(id).name.clone();
        let product = context.add(graph, &name, "MatMul", &[Some(left), Some(self.weights)], Attrs::new())?;
        match self.bias {
            Some(bias) => context.add(graph, &name, "Add", &[Some(product), Some(bias)], Attrs::new()),
            None => Ok(product),
        }
    }
}

/// True if a permutation keeps rows whole and changes their order.
fn turns_rows(perm: &[usize]) -> bool {
    perm.last().is_some_and(|&axis| axis + 1 == perm.len()) && !perm.is_sorted()
}

/// Moves a Transpose of rows from a product's left operand to its result, if only products read the result, through views that can see it
/// so.
fn sink(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("sink", id, sinkable(graph, id));
    let Some((rows, x, perm)) = found else { return Ok(()) };
    let name = graph.node(id).name.clone();
    graph.insert_at(id);
    let result = rows.with(graph, id, x, context)?;
    let result = context.add(graph, &name, "Transpose", &[Some(result)], transpose(&perm))?;
    graph.replace(id.output(0), result);
    Ok(())
}

fn sinkable(graph: &Graph, id: NodeId) -> Option<(Rows, ValueId, Vec<usize>)> {
    let value = id.output(0);
    let rows = Rows::of(graph, value)?;
    let perm = graph.permutation(rows.left.node).filter(|perm| turns_rows(perm))?;
    let x = graph.operands(rows.left.node)[0]?;
    let is_kept = !rearranges(graph, x.node) && graph.as_constant(x).is_none();
    let mut back = vec![0; perm.len()];
    perm.iter().enumerate().for_each(|(to, &from)| back[from] = to);
    let transposed = Access::contiguous(back.iter().map(|&k| graph.fact(value).shape[k]).collect()).permute(&perm);
    (is_kept && seen(graph, value, &transposed)).then_some((rows, x, perm))
}

/// True if, starting from this access, only views and products read the value, and products alone read the views.
fn seen(graph: &Graph, value: ValueId, access: &Access) -> bool {
    let mut work = vec![(value, access.clone())];
    while let Some((value, access)) = work.pop() {
        let readers = graph.users(value);
        if graph.is_output(value) || readers.is_empty() {
            return false;
        }
        for user in readers {
            let Some(op) = graph.node(user).op() else { return false };
            match op.lower {
                Lower::View(_) => match graph.view_access(user, &access) {
                    Some(access) => work.push((user.output(0), access)),
                    None => return false,
                },
                _ if op.name == "MatMul" && !rearranged(graph, value).0 => {}
                _ => return false,
            }
        }
    }
    true
}

/// Two answers: true if a value is no view of another one, and true if one of its views is a Transpose.
fn rearranged(graph: &Graph, mut value: ValueId) -> (bool, bool) {
    let (mut itself, mut transposed) = (true, false);
    while let (true, Some(&Some(source))) = (rearranges(graph, value.node), graph.operands(value.node).first()) {
        transposed |= graph.node(value.node).op_name() == "Transpose";
        (itself, value) = (false, source);
    }
    (itself, transposed)
}

/// Moves a Transpose of rows from a product's result to its left operand, if that is a transposed value anyway.
fn lift(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("lift", id, liftable(graph, id));
    let Some((rows, perm)) = found else { return Ok(()) };
    let name = graph.node(id).name.clone();
    graph.insert_at(id);
    let left = context.add(graph, &name, "Transpose", &[Some(rows.left)], transpose(&perm))?;
    let left = straight(graph, left.node, context)?;
    graph.insert_at(id);
    let result = rows.with(graph, id, left, context)?;
    graph.replace(id.output(0), result);
    Ok(())
}

fn liftable(graph: &Graph, id: NodeId) -> Option<(Rows, Vec<usize>)> {
    let perm = graph.permutation(id).filter(|perm| turns_rows(perm))?;
    let product = graph.operands(id)[0].filter(|&value| only(graph, value, &["Add", "MatMul"]))?;
    let rows = Rows::of(graph, product)?;
    rearranged(graph, rows.left).1.then_some((rows, perm))
}
