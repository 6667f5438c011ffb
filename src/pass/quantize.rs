//! Weights of products in few bits, where a flag asks for it: symmetric, a scale per block of a column, rounded to the nearest number.
//!
//! ```text
//! scale   largest |w| of a block / largest number
//! number  round (w / scale)
//! ```
//! Both are derived constants: no weight is read before it is loaded.

use super::Context;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, ValueId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The numbers that weights of products become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Quantize {
    /// Bits of a number: 4 or 8.
    pub bits: usize,
    /// Numbers that share a scale.
    pub block: usize,
}

/// Numbers that share a scale where no other block is asked for.
const BLOCK: usize = 32;

/// A matrix of fewer elements stays as it is.
const FEW: usize = 1 << 12;

impl FromStr for Quantize {
    type Err = String;

    fn from_str(text: &str) -> Result<Quantize, String> {
        let wrong = || {
            format!(
                "expected int8 or int4, with a block of 16 to 1024 numbers, a power of two, if another than {BLOCK} is wanted: \
                 int4:64; found '{text}'"
            )
        };
        let (kind, block) = text.split_once(':').map_or((text, None), |(kind, block)| (kind, Some(block)));
        let block = block.map_or(Ok(BLOCK), |block| block.parse().map_err(|_| wrong()))?;
        match (kind, block) {
            ("int8", 16..=1024) if block.is_power_of_two() => Ok(Quantize { bits: 8, block }),
            ("int4", 16..=1024) if block.is_power_of_two() => Ok(Quantize { bits: 4, block }),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Quantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            BLOCK => write!(f, "int{}", self.bits),
            block => write!(f, "int{}:{block}", self.bits),
        }
    }
}

/// Refuses a graph of which no weights would become numbers of few bits.
///
/// # Errors
/// The reason.
pub(super) fn check(graph: &Graph, quantize: Quantize) -> Result<()> {
    let suits = |id: NodeId| {
        let is_product = matches!(graph.node(id).op_name(), "MatMul" | "Gemm");
        let turned =
            graph.with_call(id, |call| call.int("transB", 0)).and_then(Result::ok).is_some_and(|flag| flag != 0);
        let operands = graph.operands(id);
        let operand = |slot: usize| operands.get(slot).copied().flatten();
        let rows = operand(0).is_some_and(|left| graph.fact(left).shape.len() >= 2);
        let holds = |weights: ValueId| extents(graph, weights, usize::from(turned), quantize).is_some();
        is_product && rows && operand(1).is_some_and(holds)
    };
    if graph.order()?.into_iter().any(suits) {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{quantize} weights: no product has constant weights of {FEW} floats or more whose columns are whole blocks of {}",
        quantize.block
    )))
}

/// The rows of a constant matrix of floats, and their length, if they can be numbers of few bits.
fn extents(graph: &Graph, weights: ValueId, along: usize, quantize: Quantize) -> Option<[usize; 2]> {
    let fact = graph.fact(weights);
    let &[rows, columns] = &fact.shape[..] else { return None };
    let (count, len) = if along == 0 { (columns, rows) } else { (rows, columns) };
    let known = matches!(fact.dtype, DType::F32 | DType::F16 | DType::BF16) && graph.as_constant(weights).is_some();
    (known && count * len >= FEW && len.is_multiple_of(quantize.block)).then_some([count, len])
}

/// A matrix as rows of rounded numbers.
pub(super) struct Rounded {
    pub(super) count: usize,
    pub(super) len: usize,
    pub(super) quantize: Quantize,
    /// The numbers, in `i8`, where the matrix has its elements.
    pub(super) numbers: Arc<Constant>,
    /// `[count, blocks]`.
    pub(super) scales: ValueId,
}

/// A constant matrix as rows of numbers along one of its axes. `None` if it is no such matrix, has few elements, or its rows are no whole blocks.
pub(super) fn rounded(
    graph: &mut Graph,
    context: &Context,
    name: &str,
    weights: ValueId,
    along: usize,
) -> Result<Option<Rounded>> {
    let Some(quantize) = context.recipe.quantize else { return Ok(None) };
    let Some([count, len]) = extents(graph, weights, along, quantize) else { return Ok(None) };
    let (fact, Quantize { bits, block }) = (graph.fact(weights).clone(), quantize);
    let (rows, columns) = (fact.shape[0], fact.shape[1]);
    let most = f64::from((1u32 << (bits - 1)) - 1);
    let [lowest, highest, tiny] = [-most, most, f64::from(f32::MIN_POSITIVE)]
        .map(|value| graph.constant(Constant::number(format!("{name}/{value}"), DType::F32, value)));
    let mut add = |op: &str, inputs: &[ValueId], attrs: Attrs| {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        context.add(graph, name, op, &inputs, attrs)
    };
    let blocks = len / block;
    let [split, each] = if along == 0 {
        [[blocks, block, columns], [blocks, 1, columns]]
    } else {
        [[rows, blocks, block], [rows, blocks, 1]]
    };
    let split = add("Reshape", &[weights], Attrs::new().with("shape", &split[..]))?;
    let axes = Attrs::new().with("axes", vec![1 + along as i64]).with("keepdims", 1);
    // Both are of the weights themselves: their sizes would be a copy of them.
    let (largest, least) = (add("ReduceMax", &[split], axes.clone())?, add("ReduceMin", &[split], axes)?);
    let least = add("Neg", &[least], Attrs::new())?;
    let largest = add("Max", &[largest, least], Attrs::new())?;
    let wide = add("Cast", &[largest], Attrs::new().with("to", DType::F32.onnx()))?;
    // A block of zeros has zeros of any scale.
    let wide = add("Max", &[wide, tiny], Attrs::new())?;
    let scale = add("Div", &[wide, highest], Attrs::new())?;
    // Numbers are those of the scale that is stored.
    let stored = add("Cast", &[scale], Attrs::new().with("to", fact.dtype.onnx()))?;
    let scale = add("Cast", &[stored], Attrs::new().with("to", DType::F32.onnx()))?;
    let split = add("Cast", &[split], Attrs::new().with("to", DType::F32.onnx()))?;
    let numbers = add("Div", &[split, scale], Attrs::new())?;
    let numbers = add("Round", &[numbers], Attrs::new())?;
    // A tiny scale may be stored as a smaller one.
    let numbers = add("Max", &[numbers, lowest], Attrs::new())?;
    let numbers = add("Min", &[numbers, highest], Attrs::new())?;
    let numbers = add("Cast", &[numbers], Attrs::new().with("to", DType::I8.onnx()))?;
    let mut scales = add("Reshape", &[stored], Attrs::new().with("shape", &[each[0], each[1].max(each[2])][..]))?;
    if along == 0 {
        scales = add("Transpose", &[scales], Attrs::new().with("perm", &[1usize, 0][..]))?;
    }
    let Some(numbers) = graph.as_constant(numbers).cloned() else { return Ok(None) };
    Ok(Some(Rounded { count, len, quantize, numbers, scales }))
}
