//! Products of quantized matrices become products of their bytes, where the target has these. The sums of products are exact, and weights
//! are held as bytes.
//!
//! ```text
//! MatMul (DequantizeLinear (a, s, y), DequantizeLinear (b, t, z))
//!     =   s t (ProductOfBytes (a, b)  -  y SumsOfBytes (b)  -  z SumsOfBytes (a)  +  k y z)
//! ```
//!
//! Sums of constant weights are constants, and all but the product is the code of its kernel. One operand is unsigned and the other one
//! signed: if both are alike, one is moved by 128, together with its zero point. Convolutions with windows of one element are such products.

use super::{Context, decompose};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::kernel::MOST_TERMS;
use crate::op::{Attrs, Call, NodeId, Nodes, OpResult, ValueId, Var, build};
use crate::ops::{OTHER_SIGN, PRODUCT_OF_BYTES, SUMS_OF_BYTES};
use crate::shape::Shape;

/// Writes products of quantized matrices as products of bytes.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !context.target.has_products_of_bytes() {
        return Ok(());
    }
    for id in graph.order()? {
        if matches!(graph.node(id).op_name(), "MatMul" | "Gemm" | "Conv") {
            unfold_operands(graph, id)?;
        }
        expand(graph, id)?;
    }
    let mut changed = false;
    for id in graph.order()? {
        let found = match graph.node(id).op_name() {
            "MatMul" => dequantized_product(graph, id),
            "MatMulInteger" => integer_product(graph, id),
            "Conv" => pointwise(graph, id),
            _ => None,
        };
        // More terms than these are summed in parts.
        let few = |product: &Product| product.terms() <= MOST_TERMS;
        if let Some(product) = found.filter(|product| context.decisions.if_valid("bytes", id, few(product))) {
            changed = true;
            product.replace(graph, id)?;
        }
    }
    if changed {
        graph.sweep();
    }
    Ok(())
}

/// Lets a node read the nodes that dequantize its operands, where these were folded to constants.
fn unfold_operands(graph: &mut Graph, id: NodeId) -> Result<()> {
    let mut operands = graph.operands(id);
    graph.insert_at(id);
    let mut changed = false;
    for operand in operands.iter_mut().take(2).flatten() {
        let Some(constant) = graph.as_constant(*operand).cloned() else { continue };
        if let Some(value) = unfold(graph, &constant)? {
            (*operand, changed) = (value, true);
        }
    }
    if changed {
        graph.read(id, &operands);
    }
    Ok(())
}

/// The nodes that make a constant of bytes, if it is dequantized, and perhaps transposed behind that.
fn unfold(graph: &mut Graph, constant: &Constant) -> Result<Option<ValueId>> {
    let Some((op, attrs, inputs, _)) = constant.derivation() else { return Ok(None) };
    let inputs: Vec<Option<ValueId>> = match (op.name, inputs) {
        ("Transpose", [Some(source)]) => match unfold(graph, source)? {
            Some(value) => vec![Some(value)],
            None => return Ok(None),
        },
        ("DequantizeLinear", inputs) => {
            inputs.iter().map(|input| input.clone().map(|input| graph.constant(input))).collect()
        }
        _ => return Ok(None),
    };
    let node = graph.add(op, &constant.name, &inputs, attrs.clone(), &[])?;
    Ok(Some(node.output(0)))
}

/// Writes a `Gemm` of quantized matrices as the nodes that it stands for.
fn expand(graph: &mut Graph, id: NodeId) -> Result<()> {
    let operands = graph.operands(id);
    let quantized = |v: &ValueId| Matrix::dequantized(graph, *v).is_some();
    if graph.node(id).op_name() == "Gemm" && operands[..2].iter().flatten().all(quantized) {
        decompose(graph, id)?;
    }
    Ok(())
}

/// A matrix of bytes, or a batch of them, with the numbers that the bytes stand for: `(byte - zero) scale`.
struct Matrix {
    data: ValueId,
    /// The order of the data's axes.
    perm: Option<Vec<usize>>,
    /// Steps along the data's last axes, of which the matrix has every so many elements.
    strides: Vec<i64>,
    shape: Shape,
    dtype: DType,
    scale: Option<ValueId>,
    zero: Option<ValueId>,
    /// The axis along which scale and zero point differ, if they do.
    axis: Option<usize>,
}

impl Matrix {
    /// A value that `DequantizeLinear` makes of bytes, perhaps transposed.
    fn dequantized(graph: &Graph, value: ValueId) -> Option<Matrix> {
        let operands = graph.operands(value.node);
        if let Some(perm) = graph.permutation(value.node) {
            let inner = Matrix::dequantized(graph, operands[0]?)?;
            if inner.perm.is_some() {
                return None;
            }
            let shape = perm.iter().map(|&k| inner.shape[k]).collect();
            let axis =
                inner.axis.map(|axis| perm.iter().position(|&k| k == axis).expect("a permutation has each axis"));
            return Some(Matrix { perm: Some(perm), shape, axis, ..inner });
        }
        let node = graph.node(value.node);
        let [Some(data), Some(scale), ref zero @ ..] = operands[..] else { return None };
        let (fact, scales) = (graph.fact(data), graph.fact(scale));
        let is_plain = node.op_name() == "DequantizeLinear" && fact.dtype.is_byte() && scales.dtype == DType::F32;
        let blocks = graph.with_call(value.node, |call| call.int("block_size", 0)).and_then(|n| n.ok());
        if !is_plain || blocks != Some(0) {
            return None;
        }
        let axis = match scales.shape.numel() {
            1 => None,
            _ => Some(graph.with_call(value.node, |call| call.axis("axis", 1, &fact.shape))?.ok()?),
        };
        let zero = zero.first().copied().flatten();
        Some(Matrix {
            data,
            perm: None,
            strides: Vec::new(),
            shape: fact.shape.clone(),
            dtype: fact.dtype,
            scale: Some(scale),
            zero,
            axis,
        })
    }

    /// An operand of `MatMulInteger`, whose zero points may differ along an axis.
    fn integer(graph: &Graph, data: ValueId, zero: Option<ValueId>, axis: usize) -> Option<Matrix> {
        let fact = graph.fact(data);
        let zeros = zero.map_or(1, |zero| graph.fact(zero).shape.numel());
        if zero.is_some_and(|zero| graph.fact(zero).shape.len() > 1) {
            return None;
        }
        let axis = (zeros != 1).then_some(axis);
        Some(Matrix {
            data,
            perm: None,
            strides: Vec::new(),
            shape: fact.shape.clone(),
            dtype: fact.dtype,
            scale: None,
            zero,
            axis,
        })
    }
}

/// A product of two matrices of bytes.
struct Product {
    /// The left and the right operand.
    operands: [Matrix; 2],
    /// The result's shape, and what is added along its axis 1.
    shape: Shape,
    bias: Option<ValueId>,
    /// The zero points, if they are constants.
    zeros: [Option<Vec<f64>>; 2],
    /// The operand that takes the other sign, if both have the same.
    flips: Option<usize>,
}

impl Product {
    /// `None` if scales or zero points differ along the axis that is summed over, or along a batch.
    fn new(graph: &Graph, operands: [Matrix; 2], shape: Shape, bias: Option<ValueId>) -> Option<Product> {
        let [a, b] = operands.each_ref().map(|m| m.shape.len());
        if a < 2 || b < 2 {
            return None;
        }
        let along =
            operands[0].axis.is_none_or(|axis| axis == a - 2) && operands[1].axis.is_none_or(|axis| axis == b - 1);
        let constant = |value: ValueId| graph.as_constant(value)?.value().ok().map(|tensor| tensor.to_f64());
        let zeros = operands.each_ref().map(|m| m.zero.map_or(Some(vec![0.0]), constant));
        let alike = operands[0].dtype == operands[1].dtype;
        // The other sign of a constant is a constant.
        let flips = alike.then(|| usize::from(graph.as_constant(operands[1].data).is_some()));
        along.then_some(Product { operands, shape, bias, zeros, flips })
    }

    /// Number of products in a sum.
    fn terms(&self) -> usize {
        *self.operands[0].shape.last().expect("a matrix has axes")
    }

    /// Replaces a node by the product.
    fn replace(&self, graph: &mut Graph, id: NodeId) -> Result<()> {
        let node = graph.node(id).clone();
        graph.insert_at(id);
        let made = build(&mut Decomposer::new(graph, node.name.clone()), |b| Ok(vec![self.nodes(b)?]));
        let values = made.map_err(|what| node.error(what))?;
        graph.replace(id.output(0), values[0]);
        Ok(())
    }

    fn nodes<'g>(&self, b: Nodes<'g>) -> OpResult<Var<'g>> {
        let data = [self.bytes(b, 0), self.bytes(b, 1)];
        let zeros = [self.zero(b, 0)?, self.zero(b, 1)?];
        let mut sum = data[0].op(PRODUCT_OF_BYTES, &[data[1]], Attrs::new());
        for (one, other, axis) in [(0, 1, -2), (1, 0, -1)] {
            if let Some(zero) = zeros[one] {
                sum = sum - data[other].op(SUMS_OF_BYTES, &[], Attrs::new().with("axis", axis)) * zero;
            }
        }
        if let [Some(left), Some(right)] = zeros {
            sum = sum + left * right * self.terms() as f64;
        }
        let scale = |o: usize| self.operands[o].scale.map(|scale| self.spread(b.value(scale), o)).transpose();
        if let (Some(left), Some(right)) = (scale(0)?, scale(1)?) {
            sum = sum.cast(DType::F32) * (left * right);
        }
        let sum = sum.shaped(&self.shape);
        let Some(bias) = self.bias.map(|bias| b.value(bias)) else { return Ok(sum) };
        let behind = vec![1; self.shape.len() - 2];
        Ok(sum + bias.shaped(&[&self.shape[1..2], &behind[..]].concat()))
    }

    /// The bytes of an operand, of the sign that they have in the product.
    fn bytes<'g>(&self, b: Nodes<'g>, operand: usize) -> Var<'g> {
        let Matrix { data, perm, strides, shape, .. } = &self.operands[operand];
        let mut data = b.value(*data);
        if self.flips == Some(operand) {
            data = data.op(OTHER_SIGN, &[], Attrs::new());
        }
        if strides.iter().any(|&stride| stride != 1) {
            let axes: Vec<i64> = (2..2 + strides.len() as i64).collect();
            let ends = Attrs::new().with("starts", vec![0; axes.len()]).with("ends", vec![i64::MAX; axes.len()]);
            data = data.op("Slice", &[], ends.with("axes", axes).with("steps", strides.clone()));
        }
        match perm {
            Some(perm) => data.transpose(perm),
            None => data.shaped(shape),
        }
    }

    /// The zero point of an operand in the product, if it is not known to be zero.
    fn zero<'g>(&self, b: Nodes<'g>, operand: usize) -> OpResult<Option<Var<'g>>> {
        let Matrix { zero, dtype, .. } = self.operands[operand];
        let by = match (self.flips == Some(operand), dtype) {
            (false, _) => 0.0,
            (true, DType::U8) => -128.0,
            (true, _) => 128.0,
        };
        let value = match (&self.zeros[operand], zero) {
            (Some(known), _) if known.iter().all(|zero| zero + by == 0.0) => return Ok(None),
            (Some(known), None) => b.scalar(known[0] + by, DType::I32),
            (Some(known), Some(_)) => b.constant(DType::I32, [known.len()], || known.iter().map(|z| z + by).collect()),
            (None, zero) => {
                let zero = b.value(zero.ok_or("a zero point that is no constant is a value")?).cast(DType::I32);
                if by == 0.0 { zero } else { zero + by }
            }
        };
        self.spread(value, operand).map(Some)
    }

    /// A scale or zero point in a shape that broadcasts to the product.
    fn spread<'g>(&self, value: Var<'g>, operand: usize) -> OpResult<Var<'g>> {
        let count = value.shape()?.numel();
        Ok(match (count, operand) {
            (1, _) => value.shaped(&[]),
            (_, 0) => value.shaped(&[count, 1]),
            _ => value.shaped(&[count]),
        })
    }
}

/// `MatMul` of two values that `DequantizeLinear` makes.
fn dequantized_product(graph: &Graph, id: NodeId) -> Option<Product> {
    let [a, b] = graph.operands(id)[..] else { return None };
    let operands = [Matrix::dequantized(graph, a?)?, Matrix::dequantized(graph, b?)?];
    Product::new(graph, operands, graph.fact(id.output(0)).shape.clone(), None)
}

fn integer_product(graph: &Graph, id: NodeId) -> Option<Product> {
    let [Some(a), Some(b), ref zeros @ ..] = graph.operands(id)[..] else { return None };
    let [a_axis, b_axis] = [(a, 2), (b, 1)].map(|(v, behind)| graph.fact(v).shape.len().checked_sub(behind));
    let zero = |i: usize| zeros.get(i).copied().flatten();
    let operands = [Matrix::integer(graph, a, zero(0), a_axis?)?, Matrix::integer(graph, b, zero(1), b_axis?)?];
    Product::new(graph, operands, graph.fact(id.output(0)).shape.clone(), None)
}

/// `Conv` of one group whose window has one element: a product of filters `[o, c]` and images `[n, c, positions]`.
fn pointwise(graph: &Graph, id: NodeId) -> Option<Product> {
    let [Some(x), Some(w), ref bias @ ..] = graph.operands(id)[..] else { return None };
    if !window_of_one(graph, id) {
        return None;
    }
    let (mut data, mut filters) = (Matrix::dequantized(graph, x)?, Matrix::dequantized(graph, w)?);
    if data.perm.is_some()
        || data.axis.is_some()
        || filters.perm.is_some()
        || filters.axis.is_some_and(|axis| axis != 0)
    {
        return None;
    }
    let strides =
        graph.with_call(id, |call| call.ints("strides").map(|strides| strides.unwrap_or_default().into_owned()));
    data.strides = strides?.ok()?;
    let shape = &graph.fact(id.output(0)).shape;
    data.shape = Shape::new([data.shape[0], data.shape[1], shape[2..].iter().product()]);
    filters.shape = Shape::new(&filters.shape[..2]);
    let bias = bias.first().copied().flatten();
    Product::new(graph, [filters, data], graph.fact(id.output(0)).shape.clone(), bias)
}

/// True if each result of a convolution of one group reads one position of all channels.
fn window_of_one(graph: &Graph, id: NodeId) -> bool {
    let operands = graph.operands(id);
    let [Some(x), Some(w), ..] = operands[..] else { return false };
    let (x, w) = (&graph.fact(x).shape, &graph.fact(w).shape);
    // A window of one element needs no padding, even where `auto_pad` asks for it.
    let unpadded =
        |call: &Call| call.ints("pads").is_ok_and(|pads| pads.is_none_or(|pads| pads.iter().all(|&pad| pad == 0)));
    let one = x.len() >= 3 && w.len() == x.len() && w[2..].iter().all(|&n| n == 1) && x[1] == w[1];
    one && graph.with_call(id, unpadded).unwrap_or(false)
}
