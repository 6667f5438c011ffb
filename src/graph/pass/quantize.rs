//! Weights of products in few bits, where a flag asks for it: symmetric, a scale per block of a column, rounded to the nearest number.
//!
//! ```text
//! scale   largest |w| of a block / largest number
//! number  round (w / scale)
//! ```
//! Both are derived constants: no weight is read before it is loaded.

use super::{Context, Recipe};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, OpDef, ValueId};
use crate::ops;
use crate::target::Target;
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
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
    let order = graph.order()?;
    if order.iter().any(|&id| weights(graph, id, quantize).is_some()) {
        return Ok(());
    }
    let are_few_bits = |&id: &NodeId| {
        let right = graph.operands(id).get(1).copied().flatten();
        let is_product = matches!(graph.node(id).op_name(), "MatMul" | "Gemm");
        is_product && right.and_then(|right| graph.as_constant(right)).is_some_and(|right| is_of_bytes(right))
    };
    let others = if order.iter().any(are_few_bits) { "; those of DequantizeLinear have few bits already" } else { "" };
    Err(Error::usage(format!(
        "{quantize} weights: no product has constant weights of {FEW} floats or more whose columns are whole blocks of {}{others}",
        quantize.block
    )))
}

/// The weights of a product that can be numbers of few bits, and their axis that is summed up.
fn weights(graph: &Graph, id: NodeId, quantize: Quantize) -> Option<(ValueId, usize)> {
    if !matches!(graph.node(id).op_name(), "MatMul" | "Gemm") {
        return None;
    }
    let turned = graph.with_call(id, |call| call.int("transB", 0)).and_then(Result::ok).is_some_and(|flag| flag != 0);
    let &[Some(left), Some(right), ..] = &graph.operands(id)[..] else { return None };
    let along = usize::from(turned);
    let suits = graph.fact(left).shape.len() >= 2 && extents(graph, right, along, quantize).is_some();
    suits.then_some((right, along))
}

/// The type of the numbers that `DequantizeLinear` makes a constant of, if it does, transposed or not.
pub fn dequantized_from(constant: &Constant) -> Option<DType> {
    match constant.derivation()? {
        (op, _, [Some(numbers), ..], _) if op.name == "DequantizeLinear" => Some(numbers.fact.dtype),
        (op, _, [Some(numbers)], _) if op.name == "Cast" && numbers.fact.dtype.is_narrow() => Some(numbers.fact.dtype),
        (op, _, [Some(source)], _) if op.name == "Transpose" => dequantized_from(source),
        _ => None,
    }
}

/// True if numbers of a byte or less make a constant.
fn is_of_bytes(constant: &Constant) -> bool {
    dequantized_from(constant).is_some_and(|dtype| dtype.held().is_byte())
}

/// The rows of a constant matrix of floats, and their length, if they can be numbers of few bits.
fn extents(graph: &Graph, weights: ValueId, along: usize, quantize: Quantize) -> Option<[usize; 2]> {
    let fact = graph.fact(weights);
    let &[rows, columns] = &fact.shape[..] else { return None };
    let (count, len) = if along == 0 { (columns, rows) } else { (rows, columns) };
    let is_float = matches!(fact.dtype, DType::F32 | DType::F16 | DType::BF16);
    let known = is_float && graph.as_constant(weights).is_some_and(|weights| !is_of_bytes(weights));
    (known && count * len >= FEW && len.is_multiple_of(quantize.block)).then_some([count, len])
}

/// A graph whose weights are numbers of few bits that `DequantizeLinear` makes floats of. A plan of it holds what a plan of the given one holds
/// if its recipe quantizes. The numbers are computed here.
///
/// # Errors
/// No weights can be such numbers, or their elements cannot be read.
pub fn quantized(mut graph: Graph, quantize: Quantize) -> Result<Graph> {
    check(&graph, quantize)?;
    let target = Target::cpu(1);
    let context = Context::new(&target, Recipe { quantize: Some(quantize), ..Recipe::default() });
    // Several products may read the same weights.
    let mut made = HashMap::new();
    for id in graph.order()? {
        let Some(of @ (floats, along)) = weights(&graph, id, quantize) else { continue };
        let mut operands = graph.operands(id);
        operands[1] = match made.get(&of) {
            Some(&value) => Some(value),
            None => {
                graph.insert_at(id);
                let value = written(&mut graph, &context, floats, along)?;
                made.extend(value.map(|value| (of, value)));
                value.or(operands[1])
            }
        };
        graph.read(id, &operands);
    }
    graph.sweep();
    graph.verify()?;
    Ok(graph)
}

/// A node that makes floats of a matrix's numbers.
fn written(graph: &mut Graph, context: &Context, floats: ValueId, along: usize) -> Result<Option<ValueId>> {
    let (name, shape) = (graph.value_name(floats).to_owned(), graph.fact(floats).shape.clone());
    // What the numbers are computed of is there for one matrix at a time.
    let mut own = Graph::new("");
    let Some(floats) = graph.as_constant(floats).map(|floats| own.constant(Arc::clone(floats))) else {
        return Ok(None);
    };
    let Some(Rounded { quantize: Quantize { bits, block }, numbers, mut scales, .. }) =
        rounded(&mut own, context, &name, floats, along)?
    else {
        return Ok(None);
    };
    if along == 0 {
        let attrs = Attrs::new().with("perm", &[1usize, 0][..]);
        scales = context.add(&mut own, &name, "Transpose", &[Some(scales)], attrs)?;
    }
    let Some(scales) = own.as_constant(scales) else { return Ok(None) };
    let scales = graph.constant(Constant::new(format!("{name}.scales"), scales.value()?.clone()));
    let (mut bytes, name_of_numbers) = (Vec::with_capacity(shape.numel() * bits / 8), format!("{name}.int{bits}"));
    numbers.pieces()?.each(|piece| {
        match bits {
            // Rows and pieces are of even lengths, so no number is alone in its byte.
            4 => bytes.extend(piece.bytes().chunks_exact(2).map(|pair| pair[0] & 0xf | pair[1] << 4)),
            _ => bytes.extend_from_slice(piece.bytes()),
        }
        Ok(())
    })?;
    let numbers = if bits == 4 {
        let bytes = Tensor::new(DType::U8, [bytes.len()], bytes)?;
        let bytes = graph.constant(Constant::new(name_of_numbers.clone(), bytes));
        let attrs = Attrs::new().with("bits", 4).with("signed", 1).with("shape", &shape[..]);
        let node = graph.add(row("plimsoll.Unpack"), &name_of_numbers, &[Some(bytes)], attrs, &[])?;
        graph.make_constant(node)?[0]
    } else {
        graph.constant(Constant::new(name_of_numbers, Tensor::new(DType::I8, shape, bytes)?))
    };
    let attrs = Attrs::new().with("axis", along as i64).with("block_size", block as i64);
    let node = graph.add(row("DequantizeLinear"), &name, &[Some(numbers), Some(scales)], attrs, &[])?;
    Ok(Some(node.output(0)))
}

fn row(name: &str) -> &'static OpDef {
    ops::find(name).expect("the table has the row")
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
