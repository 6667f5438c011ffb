//! Products of quantized matrices become products of their bytes. The sums of products are exact, and weights
//! are held as bytes.
//!
//! ```text
//! MatMul (DequantizeLinear (a, s, y), DequantizeLinear (b, t, z))
//!     =   s t (ProductOfBytes (a, b)  -  y SumsOfBytes (b)  -  z SumsOfBytes (a)  +  k y z)
//! ```
//!
//! Sums of constant weights are constants, and all but the product is the code of its kernel. One operand is unsigned and the other one
//! signed: if both are alike, one is moved by 128, together with its zero point.
//!
//! Convolutions become convolutions of bytes in the same way. Their data are padded with their zero point. What lies under each window is added
//! up by a convolution with filters of ones, if the filters have a zero point:
//!
//! ```text
//! Conv (DequantizeLinear (x, s, y), DequantizeLinear (w, t, z))
//!     =   s t (ConvOfBytes (x padded with y, w)  -  y SumsOfBytes (w)  -  z (ConvOfBytes (x padded with y, 1)  -  k y))
//! ```

use super::{Context, decompose};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::kernel::{MOST_TAPS, MOST_TERMS};
use crate::op::{Args, Attrs, Call, Lower, NodeId, Nodes, OpResult, ValueId, Var, build};
use crate::ops::{CONV_OF_BYTES, OTHER_SIGN, PRODUCT_OF_BYTES, SUMS_OF_BYTES, requantized};
use crate::shape::Shape;
use std::ops::RangeInclusive;

/// The most products of two bytes, each less its zero point, whose sum is exact in `i32`.
const MOST_SHIFTED: usize = i32::MAX as usize / (255 * 255);

/// Rows that have a product of integers among others.
const COMPOSED: [&str; 4] = ["DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "com.microsoft.QLinearConv"];

/// Writes products of quantized matrices as products of bytes.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    for id in graph.order()? {
        if let Some(bytes) = moved_bytes(graph, id)? {
            graph.replace(id.output(0), bytes);
        }
    }
    let mut rows = graph.order()?;
    while !rows.is_empty() {
        let mut expanded = false;
        for id in rows {
            if matches!(graph.node(id).op_name(), "MatMul" | "Gemm" | "Conv") {
                unfold_operands(graph, id)?;
            }
            expanded |= expand(graph, id)?;
        }
        rows = if expanded { graph.order()? } else { Vec::new() };
    }
    let mut changed = false;
    for id in graph.order()? {
        let found = match graph.node(id).op_name() {
            "MatMul" => dequantized_product(graph, id).map(Found::Product),
            "MatMulInteger" => integer_product(graph, id, [0, 1], [2, 3]).map(Found::Product),
            "QLinearMatMul" => integer_product(graph, id, [0, 3], [2, 5]).map(Found::Product),
            "Conv" => dequantized_convolution(graph, id).map(Found::Convolution),
            "ConvInteger" => integer_convolution(graph, id, [0, 1], [2, 3], None).map(Found::Convolution),
            "QLinearConv" => integer_convolution(graph, id, [0, 3], [2, 5], Some(8)).map(Found::Convolution),
            _ => None,
        };
        // Longer sums may not fit i32: they stay sums of floats.
        let wraps = graph.node(id).op_name() == "MatMulInteger";
        let few = |found: &Found| match found {
            Found::Product(product) => product.terms() <= if wraps { MOST_TERMS } else { MOST_SHIFTED },
            Found::Convolution(found) => context.target.convolves_bytes(found.filters.shape[1]),
        };
        if let Some(found) = found.filter(|found| context.decisions.if_valid("bytes", id, few(found))) {
            changed = true;
            found.replace(graph, id)?;
        }
    }
    if changed {
        graph.sweep();
    }
    Ok(())
}

/// True for the types of scales: floats whose products with sums of bytes are computed in `f32`.
fn is_scale(dtype: DType) -> bool {
    dtype == DType::F32 || dtype.is_half()
}

/// Scales that take all bytes to floats and back.
const USUAL_SCALES: RangeInclusive<f64> = 1e-30..=1e30;

/// The bytes that a node quantizes, where they were dequantized by its own scale and zero point and have only been moved since: they are the same
/// bytes, moved.
fn moved_bytes(graph: &mut Graph, id: NodeId) -> Result<Option<ValueId>> {
    if graph.node(id).op_name() != "QuantizeLinear" || graph.is_output(id.output(0)) {
        return Ok(None);
    }
    let own = graph.operands(id);
    let (mut views, mut from) = (Vec::new(), own[0]);
    while let Some(value) = from.filter(|v| matches!(graph.node(v.node).op().map(|op| op.lower), Some(Lower::View(_))))
    {
        views.push(value.node);
        from = graph.operands(value.node)[0];
    }
    let Some(before) = from.filter(|v| graph.node(v.node).op_name() == "DequantizeLinear") else { return Ok(None) };
    let before = graph.operands(before.node);
    let Some(mut bytes) = before[0] else { return Ok(None) };
    let dtype = graph.fact(bytes).dtype;
    let parameters = |operands: &[Option<ValueId>]| {
        let scale = operands[1].filter(|&scale| is_scale(graph.fact(scale).dtype))?;
        let (scale, zero) = (known(graph, Some(scale))?, known(graph, operands.get(2).copied().flatten())?);
        (scale.len() == 1 && zero.len() == 1 && USUAL_SCALES.contains(&scale[0])).then_some((scale, zero))
    };
    let same = parameters(&own).is_some_and(|own| parameters(&before) == Some(own));
    if !same || !dtype.is_byte() || dtype != graph.fact(id.output(0)).dtype {
        return Ok(None);
    }
    graph.insert_at(id);
    for view in views.into_iter().rev() {
        let node = graph.node(view).clone();
        let mut operands = graph.operands(view);
        operands[0] = Some(bytes);
        let op = node.op().expect("a view is an operator");
        bytes = graph.add(op, &node.name, &operands, node.attrs.clone(), &[])?.output(0);
    }
    Ok(Some(bytes))
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
        ("Transpose" | "Cast", [Some(source)]) => match unfold(graph, source)? {
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

/// Writes a `Gemm` of quantized matrices, or a row that has a `MatMulInteger` among others, as the nodes that it stands for. Returns true if it
/// has.
fn expand(graph: &mut Graph, id: NodeId) -> Result<bool> {
    let operands = graph.operands(id);
    let quantized = |v: &ValueId| Matrix::dequantized(graph, *v).is_some();
    let stands = match graph.node(id).op_name() {
        "Gemm" => operands[..2].iter().flatten().all(quantized),
        name => COMPOSED.contains(&name),
    };
    // A node that nothing reads has been replaced.
    let is_read = (0..graph.node(id).outputs.len()).any(|port| {
        let value = id.output(port);
        graph.is_output(value) || !graph.users(value).is_empty()
    });
    if stands && is_read {
        decompose(graph, id)?;
    }
    Ok(stands && is_read)
}

/// A matrix of bytes, or a batch of them, with the numbers that the bytes stand for: `(byte - zero) scale`.
struct Matrix {
    data: ValueId,
    /// The order of the data's axes, if it is not their own.
    perm: Option<Vec<usize>>,
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
        // What is rounded to halves on its way to the product need not be.
        if node.op_name() == "Cast" && is_scale(graph.fact(value).dtype) {
            return Matrix::dequantized(graph, operands[0]?);
        }
        let [Some(data), Some(scale), ref zero @ ..] = operands[..] else { return None };
        let (fact, scales) = (graph.fact(data), graph.fact(scale));
        let is_plain = node.op_name() == "DequantizeLinear" && fact.dtype.is_byte() && is_scale(scales.dtype);
        let blocks = graph.with_call(value.node, |call| call.int("block_size", 0)).and_then(|n| n.ok());
        if !is_plain || blocks != Some(0) {
            return None;
        }
        let axis = match scales.shape.numel() {
            1 => None,
            _ => Some(graph.with_call(value.node, |call| call.axis("axis", 1, &fact.shape))?.ok()?),
        };
        let zero = zero.first().copied().flatten();
        Some(Matrix { scale: Some(scale), ..Matrix::plain(graph, data, zero, axis) })
    }

    /// An operand of a row of integers, whose zero points may differ along an axis.
    fn integer(graph: &Graph, data: ValueId, zero: Option<ValueId>, axis: usize) -> Option<Matrix> {
        let zeros = zero.map_or(1, |zero| graph.fact(zero).shape.numel());
        if zero.is_some_and(|zero| graph.fact(zero).shape.len() > 1) {
            return None;
        }
        Some(Matrix::plain(graph, data, zero, (zeros != 1).then_some(axis)))
    }

    /// Bytes as they are in memory.
    fn plain(graph: &Graph, data: ValueId, zero: Option<ValueId>, axis: Option<usize>) -> Matrix {
        let fact = graph.fact(data);
        Matrix { data, perm: None, shape: fact.shape.clone(), dtype: fact.dtype, scale: None, zero, axis }
    }
}

/// A computation of bytes.
enum Found {
    Product(Product),
    Convolution(Convolution),
}

impl Found {
    /// Replaces a node by it.
    fn replace(&self, graph: &mut Graph, id: NodeId) -> Result<()> {
        let node = graph.node(id).clone();
        graph.insert_at(id);
        let operands = graph.operands(id);
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v).clone())).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let made = build(&mut Decomposer::new(graph, node.name.clone()), |b| {
            let value = match self {
                Found::Product(product) => product.nodes(b)?,
                Found::Convolution(convolution) => convolution.nodes(b)?,
            };
            let op = node.op().ok_or("a product is an operator")?;
            if !op.name.starts_with("QLinear") {
                // Scales of halves make halves, which are rounded once.
                return Ok(vec![value.cast(node.outputs[0].fact.dtype)]);
            }
            let operands: Vec<_> = operands.iter().map(|v| v.map(|v| b.value(v))).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            Ok(vec![requantized(&call, &Args(&operands), value)?])
        });
        let values = made.map_err(|what| node.error(what))?;
        graph.replace(id.output(0), values[0]);
        Ok(())
    }
}

/// A product of two matrices of bytes.
struct Product {
    /// The left and the right operand.
    operands: [Matrix; 2],
    /// The result's shape.
    shape: Shape,
    /// The zero points, if they are constants.
    zeros: [Option<Vec<f64>>; 2],
    /// The operand that takes the other sign, if both have the same.
    flips: Option<usize>,
}

impl Product {
    /// `None` if scales or zero points differ along the axis that is summed over, or along a batch.
    fn new(graph: &Graph, operands: [Matrix; 2], shape: Shape) -> Option<Product> {
        let [a, b] = operands.each_ref().map(|m| m.shape.len());
        if a < 2 || b < 2 {
            return None;
        }
        let along =
            operands[0].axis.is_none_or(|axis| axis == a - 2) && operands[1].axis.is_none_or(|axis| axis == b - 1);
        let zeros = operands.each_ref().map(|m| known(graph, m.zero));
        let alike = operands[0].dtype == operands[1].dtype;
        // The other sign of a constant is a constant.
        let flips = alike.then(|| usize::from(graph.as_constant(operands[1].data).is_some()));
        along.then_some(Product { operands, shape, zeros, flips })
    }

    /// Number of products in a sum.
    fn terms(&self) -> usize {
        *self.operands[0].shape.last().expect("a matrix has axes")
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
        let spread = |scale, o| self.spread(b.value(scale).cast(DType::F32), o);
        let scale = |o: usize| self.operands[o].scale.map(|scale| spread(scale, o)).transpose();
        if let (Some(left), Some(right)) = (scale(0)?, scale(1)?) {
            sum = sum.cast(DType::F32) * (left * right);
        }
        Ok(sum.shaped(&self.shape))
    }

    /// The bytes of an operand, of the sign that they have in the product.
    fn bytes<'g>(&self, b: Nodes<'g>, operand: usize) -> Var<'g> {
        let Matrix { data, perm, shape, .. } = &self.operands[operand];
        let mut data = b.value(*data);
        if self.flips == Some(operand) {
            data = data.op(OTHER_SIGN, &[], Attrs::new());
        }
        match perm {
            Some(perm) => data.transpose(perm),
            None => data.shaped(shape),
        }
    }

    /// The zero point of an operand in the product, if it is not known to be zero.
    fn zero<'g>(&self, b: Nodes<'g>, operand: usize) -> OpResult<Option<Var<'g>>> {
        let Matrix { zero, dtype, .. } = self.operands[operand];
        let by = if self.flips == Some(operand) { flip_of(dtype) } else { 0.0 };
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
    Product::new(graph, operands, graph.fact(id.output(0)).shape.clone())
}

/// A product of two operands of a row of integers, with their zero points.
fn integer_product(graph: &Graph, id: NodeId, operands: [usize; 2], zeros: [usize; 2]) -> Option<Product> {
    let all = graph.operands(id);
    let given = |i: usize| all.get(i).copied().flatten();
    let [a, b] = operands.map(given);
    let [a_axis, b_axis] = [(a?, 2), (b?, 1)].map(|(v, behind)| graph.fact(v).shape.len().checked_sub(behind));
    let operands =
        [Matrix::integer(graph, a?, given(zeros[0]), a_axis?)?, Matrix::integer(graph, b?, given(zeros[1]), b_axis?)?];
    Product::new(graph, operands, graph.fact(id.output(0)).shape.clone())
}

/// A convolution of bytes. All but its data are constants.
struct Convolution {
    data: Matrix,
    filters: Matrix,
    /// It is added to the scaled sums, or to the sums of a row of integers.
    bias: Option<ValueId>,
    /// The attributes of the node that it replaces.
    attrs: Attrs,
    /// The zero point of the data as they are in the convolution, around which they are padded.
    zero: f64,
    /// The zero points of the filters as they are there, if any is not zero.
    points: Option<Vec<f64>>,
    /// The operands that take the other sign: data become unsigned, and filters signed, so that their usual zero point is zero.
    flips: [bool; 2],
}

impl Convolution {
    /// `None` if filters of several groups have zero points.
    fn new(graph: &Graph, id: NodeId, data: Matrix, filters: Matrix, bias: Option<ValueId>) -> Option<Convolution> {
        graph.as_constant(filters.data)?;
        let is_plain = data.perm.is_none() && filters.perm.is_none() && data.axis.is_none();
        let fits = (3..=5).contains(&data.shape.len())
            && filters.shape.len() == data.shape.len()
            && filters.shape[2..].iter().product::<usize>() <= MOST_TAPS
            && filters.shape[1..].iter().product::<usize>() <= MOST_TERMS;
        let along = filters.axis.is_none_or(|axis| axis == 0);
        let flips = [data.dtype == DType::I8, filters.dtype == DType::U8];
        let by_data = if flips[0] { flip_of(DType::I8) } else { 0.0 };
        let by_filters = if flips[1] { flip_of(DType::U8) } else { 0.0 };
        let [zero] = known(graph, data.zero)?[..] else { return None };
        let points: Vec<f64> = known(graph, filters.zero)?.iter().map(|zero| zero + by_filters).collect();
        let points = points.iter().any(|&point| point != 0.0).then_some(points);
        let groups = graph.with_call(id, |call| call.int("group", 1))?.ok()?;
        let attrs = graph.node(id).attrs.clone();
        let few = points.is_none() || groups == 1 && filters.shape[1..].iter().product::<usize>() <= MOST_SHIFTED;
        let valid = is_plain && fits && along && few;
        valid.then_some(Convolution { data, filters, bias, attrs, zero: zero + by_data, points, flips })
    }

    fn nodes<'g>(&self, b: Nodes<'g>) -> OpResult<Var<'g>> {
        let [x, w] = [(0, &self.data), (1, &self.filters)].map(|(operand, matrix)| {
            let data = b.value(matrix.data);
            if self.flips[operand] { data.op(OTHER_SIGN, &[], Attrs::new()) } else { data }
        });
        let attrs = self.attrs.clone().with("padding", self.zero as i64);
        let mut sum = x.op(CONV_OF_BYTES, &[w], attrs.clone());
        let outputs = self.filters.shape[0];
        let behind = vec![1; self.filters.shape.len() - 2];
        let per_channel = |value: Var<'g>| value.shaped(&[&[outputs], &behind[..]].concat());
        let terms: usize = self.filters.shape[1..].iter().product();
        if let Some(points) = &self.points {
            // What lies under each window, added up.
            let ones = [&[1], &self.filters.shape[1..]].concat();
            let ones = b.constant(DType::I8, ones, || vec![1.0; terms]);
            let under = x.op(CONV_OF_BYTES, &[ones], attrs) - terms as f64 * self.zero;
            let points = b.constant(DType::I32, [points.len()], || points.clone());
            sum = sum - under * if points.shape()?.numel() == 1 { points.shaped(&[]) } else { per_channel(points) };
        }
        let bias = self.bias.map(|bias| per_channel(b.value(bias)));
        let (Some(left), Some(right)) = (self.data.scale, self.filters.scale) else {
            return Ok(match (self.shift(w, per_channel), bias) {
                (Some(shift), Some(bias)) => sum - (shift - bias),
                (Some(shift), None) => sum - shift,
                (None, Some(bias)) => sum + bias,
                (None, None) => sum,
            });
        };
        let sum = self.shift(w, per_channel).map_or(sum, |shift| sum - shift);
        let [left, right] = [left, right].map(|scale| b.value(scale).cast(DType::F32));
        let left = left.shaped(&[]);
        let right = if right.shape()?.numel() == 1 { right.shaped(&[]) } else { per_channel(right) };
        let sum = sum.cast(DType::F32) * (left * right);
        Ok(bias.map_or(sum, |bias| sum + bias.cast(DType::F32)))
    }

    /// What the zero point of the data adds to the sums of each channel, if it is not zero.
    fn shift<'g>(&self, filters: Var<'g>, per_channel: impl Fn(Var<'g>) -> Var<'g>) -> Option<Var<'g>> {
        let shape = &self.filters.shape;
        let rows = filters.shaped(&[shape[0], shape[1..].iter().product()]);
        let sums = || per_channel(rows.op(SUMS_OF_BYTES, &[], Attrs::new().with("axis", 1)));
        (self.zero != 0.0).then(|| sums() * self.zero)
    }
}

/// `Conv` of two values that `DequantizeLinear` makes.
fn dequantized_convolution(graph: &Graph, id: NodeId) -> Option<Convolution> {
    let [Some(x), Some(w), ref bias @ ..] = graph.operands(id)[..] else { return None };
    let (data, filters) = (Matrix::dequantized(graph, x)?, Matrix::dequantized(graph, w)?);
    Convolution::new(graph, id, data, filters, bias.first().copied().flatten())
}

/// A convolution of two operands of a row of integers, with their zero points and the bias.
fn integer_convolution(
    graph: &Graph,
    id: NodeId,
    operands: [usize; 2],
    zeros: [usize; 2],
    bias: Option<usize>,
) -> Option<Convolution> {
    let all = graph.operands(id);
    let given = |i: usize| all.get(i).copied().flatten();
    let data = Matrix::integer(graph, given(operands[0])?, given(zeros[0]), 1)?;
    let filters = Matrix::integer(graph, given(operands[1])?, given(zeros[1]), 0)?;
    Convolution::new(graph, id, data, filters, bias.and_then(given))
}

/// The zero points of an operand, if they are constants.
fn known(graph: &Graph, zero: Option<ValueId>) -> Option<Vec<f64>> {
    let Some(zero) = zero else { return Some(vec![0.0]) };
    Some(graph.as_constant(zero)?.value().ok()?.to_f64())
}

/// What a zero point gains when bytes of this type take the other sign.
fn flip_of(dtype: DType) -> f64 {
    if dtype == DType::U8 { -128.0 } else { 128.0 }
}
