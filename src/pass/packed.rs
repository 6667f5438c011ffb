//! Products by weights of few bits read them as the file has them: nothing unpacks them in memory.

use super::Context;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::kernel::Packing;
use crate::op::{Attrs, Fact, NodeId, ValueId};
use crate::target::Family;
use std::sync::Arc;

/// The product that reads words of packed numbers.
const PRODUCT: &str = "plimsoll.MatMulBits";

/// The most rows of a left operand for which the right one's numbers are widened on their way into the sums: each row widens them again.
const CPU_ROWS: usize = 1;
const GPU_ROWS: usize = 2;

/// Makes products of packed words of those of few rows whose weights are constants. Others unpack their weights, as the row says.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    // A program of more rows unpacks the weights: they would be there twice.
    if context.shares_constants {
        return Ok(());
    }
    for id in graph.order()? {
        if graph.node(id).op_name() == "MatMulNBits" {
            few_bits(graph, context, id)?;
        }
    }
    graph.sweep();
    Ok(())
}

fn few_bits(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let (node, operands) = (graph.node(id).clone(), graph.operands(id));
    let given = |input: usize| operands.get(input).copied().flatten();
    let size = |name: &str, default: i64| {
        let size = graph.with_call(id, |call| call.int(name, default)).and_then(Result::ok);
        size.and_then(|size| usize::try_from(size).ok()).unwrap_or(0)
    };
    let [n, k, bits, block] =
        [("N", 0), ("K", 0), ("bits", 4), ("block_size", 0)].map(|(name, default)| size(name, default));
    let (Some(left), Some(weights), Some(scales)) = (given(0), given(1), given(2)) else { return Ok(()) };
    let (zeros, groups, bias) = (given(3), given(4), given(5));
    let Ok(packing) = Packing::new(bits, block, k) else { return Ok(()) };
    let suits = |value: ValueId| {
        let dtype = graph.fact(value).dtype;
        matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && context.target.storage(dtype).is_ok()
    };
    if groups.is_some() || graph.fact(left).shape.len() < 2 || !suits(left) || !suits(scales) {
        return Ok(());
    }
    // Another reader would have the weights in another form: they would be there twice.
    let few = !graph.is_output(weights) && graph.users(weights).iter().all(|&user| has_few_rows(graph, context, user));
    if !context.decisions.if_cheaper("few bits", id, few) {
        return Ok(());
    }
    let Some(words) = as_words(graph, weights) else { return Ok(()) };
    let zeros = match zeros {
        Some(zeros) if graph.fact(zeros).dtype == DType::U8 => match as_words(graph, zeros) {
            Some(words) => Some(Zeros::Words(words)),
            None => return Ok(()),
        },
        Some(zeros) => Some(Zeros::Floats(zeros)),
        None => None,
    };
    graph.insert_at(id);
    let words = graph.constant(words);
    let flat = |value: ValueId, graph: &mut Graph| {
        let attrs = Attrs::new().with("shape", &[n, packing.blocks][..]);
        context.add(graph, &node.name, "Reshape", &[Some(value)], attrs)
    };
    let scales = flat(scales, graph)?;
    let zeros = match zeros {
        Some(Zeros::Words(words)) => Some(graph.constant(words)),
        Some(Zeros::Floats(floats)) => Some(flat(floats, graph)?),
        None => None,
    };
    let attrs = Attrs::new().with("N", n as i64).with("bits", bits as i64).with("block_size", block as i64);
    let mut inputs = vec![Some(left), Some(words), Some(scales)];
    inputs.extend(zeros.map(Some));
    let mut value = context.add(graph, &node.name, PRODUCT, &inputs, attrs)?;
    if let Some(bias) = bias {
        value = context.add(graph, &node.name, "Add", &[Some(value), Some(bias)], Attrs::new())?;
    }
    graph.replace(id.output(0), value);
    Ok(())
}

/// True if a node is a product of so few rows that one of unpacked weights is not faster.
fn has_few_rows(graph: &Graph, context: &Context, id: NodeId) -> bool {
    let most = if context.target.family == Family::Cpu { CPU_ROWS } else { GPU_ROWS };
    let operands = graph.operands(id);
    let Some(&Some(left)) = operands.first() else { return false };
    let rows = graph.fact(left).shape.split_last().map_or(0, |(_, rows)| rows.iter().product());
    graph.node(id).op_name() == "MatMulNBits" && operands.get(4).copied().flatten().is_none() && rows <= most
}

enum Zeros {
    Words(Constant),
    Floats(ValueId),
}

/// The bytes of a constant as words of 32 bits, if they are whole ones.
fn as_words(graph: &Graph, value: ValueId) -> Option<Constant> {
    let constant: &Arc<Constant> = graph.as_constant(value)?;
    let bytes = constant.fact.bytes();
    constant.reinterpreted(Fact::new(DType::I32, [bytes / 4])).filter(|_| bytes.is_multiple_of(4))
}
