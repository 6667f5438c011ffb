//! Holds caches in 8 bits: a state that new rows are written to becomes integers, and a scale for each row.
//!
//! ```text
//! cache [b, h, C, d]                        numbers i8 [b, h, C, d], scales [b, h, C, 1]
//! TensorScatter (cache, rows)           =   TensorScatter (numbers, round (rows / scale)), TensorScatter (scales, scale)
//! what reads the cache                      reads numbers * scales
//! ```
//!
//! A row is rounded once, when it is written. The scale is the largest size of its numbers, divided by 127.

use super::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::{Decomposer, Graph, Kind};
use crate::op::{Attrs, Fact, Nodes, OpResult, ValueId, Var, build};

/// The largest number of a row.
const MOST: f64 = 127.0;

/// Makes integers of all caches, if the recipe asks for it.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !context.recipe.int8_caches {
        return Ok(());
    }
    let caches: Vec<_> =
        graph.states().iter().map(|state| state.value).filter(|&value| is_cache(graph, value)).collect();
    ensure(!caches.is_empty(), || {
        let what = "expected a state of floats to which each run writes rows (TensorScatter), and which begins empty";
        Error::usage(format!("caches of int8: no state is a cache: {what}"))
    })?;
    caches.into_iter().try_for_each(|cache| narrow(graph, cache))?;
    graph.sweep();
    Ok(())
}

/// True if a state is a cache: it begins empty, and its update writes rows of floats, not along their own axis.
fn is_cache(graph: &Graph, value: ValueId) -> bool {
    let fact = graph.fact(value);
    let state = graph.states().iter().find(|state| state.value == value);
    let update = state.filter(|state| state.count.is_none()).and_then(|state| state.update);
    let begins_empty = matches!(graph.node(value.node).kind, Kind::State(None));
    let is_float = matches!(fact.dtype, DType::F32 | DType::F16 | DType::BF16);
    begins_empty
        && is_float
        && update.is_some_and(|update| {
            let writes =
                graph.node(update.node).op_name() == "TensorScatter" && graph.operands(update.node)[0] == Some(value);
            let axis = graph.with_call(update.node, |call| call.axis("axis", -2, &fact.shape));
            writes && matches!(axis, Some(Ok(axis)) if axis + 1 < fact.shape.len())
        })
}

fn narrow(graph: &mut Graph, cache: ValueId) -> Result<()> {
    let Fact { dtype, shape } = graph.fact(cache).clone();
    let name = graph.value_name(cache).to_owned();
    let update = graph.states().iter().find(|state| state.value == cache).and_then(|state| state.update);
    let update = update.expect("a cache has an update");
    let (operands, node) = (graph.operands(update.node), graph.node(update.node).clone());
    let mut scales = shape.clone();
    *scales.last_mut().expect("it has axes") = 1;
    graph.insert_at(cache.node);
    let held = [(name.clone(), Fact::new(DType::I8, shape)), (format!("{name}.scale"), Fact::new(DType::F32, scales))];
    let [numbers, scales] = held.map(|(name, fact)| graph.state(name, fact, None));
    graph.insert_at(update.node);
    let (rows, at) = (operands[1].expect("a write has rows"), operands.get(2).copied().flatten());
    let write = Write { cache: [numbers, scales], rows, at, attrs: &node.attrs, dtype };
    let made = build(Decomposer::new(graph, node.name.clone()), |b| write.nodes(b));
    let made = made.map_err(|what| node.error(what))?;
    let &[before, after, numbers_after, scales_after] = &made[..] else { unreachable!("four values were made") };
    graph.withdraw_state(cache);
    graph.replace(update, after);
    graph.replace(cache, before);
    for (state, update) in [(numbers, numbers_after), (scales, scales_after)] {
        graph.update(state, update).map_err(Error::graph)?;
    }
    Ok(())
}

/// What writes rows of floats to a cache of numbers and scales.
struct Write<'a> {
    cache: [ValueId; 2],
    rows: ValueId,
    at: Option<ValueId>,
    attrs: &'a Attrs,
    /// The type of the floats.
    dtype: DType,
}

impl Write<'_> {
    /// The cache as floats, before and behind the write, and its numbers and scales behind it.
    fn nodes<'g>(&self, b: Nodes<'g>) -> OpResult<Vec<Var<'g>>> {
        let [numbers, scales] = self.cache.map(|value| b.value(value));
        let rows = b.value(self.rows).cast(DType::F32);
        let size = rows.op("Abs", &[], Attrs::new()).reduce_max(&[-1], true);
        let scale = size.greater(0.0).select(size / MOST, 1.0);
        let rounded = (rows / scale).round().clip(-MOST, MOST).cast(DType::I8);
        let write = |to: Var<'g>, rows: Var<'g>| {
            let at = self.at.map(|at| b.value(at));
            to.op("TensorScatter", &[&[rows][..], at.as_slice()].concat(), self.attrs.clone())
        };
        let after = [write(numbers, rounded), write(scales, scale)];
        let floats = |[numbers, scales]: [Var<'g>; 2]| (numbers.cast(DType::F32) * scales).cast(self.dtype);
        Ok(vec![floats([numbers, scales]), floats(after), after[0], after[1]])
    }
}
