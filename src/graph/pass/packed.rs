//! Products and lookups by constants of few bits read them as the file has them: nothing unpacks them in memory.
//!
//! ```text
//! MatMulNBits (x, words)                          =  MatMulBits (x, words)
//! MatMulNBits (x, words, g_idx)                   =  MatMulBits (Gather (x, order), words in that order)
//! MatMulBnb4 (x, codes)                           =  MatMulBits (x, codes in words)
//! MatMul (x, DequantizeLinear (q, scales))        =  MatMulBits (x, rows of q)       Gemm, too
//! Gather (DequantizeLinear (q, scales), indices)  =  GatherBits (rows of q, indices)
//! Conv (x, DequantizeLinear (q, scales))          =  Conv (x, GatherBits (rows of q, all))
//! ```
//! Filters are widened in the run, right before their convolution, so the arena holds one convolution's floats at a time.
//!
//! Rows of `q` are its columns where it is multiplied as it is. They are words at the file's own bytes if they lie there so; else the numbers
//! are moved while they are loaded, to as many bytes. `g_idx` names the block of each number. Where blocks are equally large, the order sorts
//! numbers by their blocks; where they are not, weights are unpacked.

use super::decompose::decompose;
use super::quantize::{self, Quantize, Rounded};
use super::{Context, fold_node};
use crate::constant::{Constant, Rows};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Node};
use crate::kernel::Packing;
use crate::narrow;
use crate::op::{Attrs, Call, Fact, NodeId, ValueId};
use crate::ops::{AT_RUN, Codes};
use crate::tensor::Tensor;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Reads constants of few bits as they are, where a row can.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    expand(graph, context)?;
    for id in graph.order()? {
        match graph.node(id).op_name() {
            "MatMulNBits" => few_bits(graph, context, id)?,
            "MatMulBnb4" => four_bits(graph, context, id)?,
            "MatMul" | "Gemm" => dequantized_product(graph, context, id)?,
            "Gather" => dequantized_rows(graph, context, id)?,
            "Conv" | "ConvTranspose" => dequantized_filters(graph, context, id)?,
            "GatherBlockQuantized" => quantized_rows(graph, context, id)?,
            _ => {}
        }
    }
    graph.sweep();
    Ok(())
}

/// Writes mixtures of experts as the products by numbers of few bits that they are, and computes what these need of constants.
fn expand(graph: &mut Graph, context: &Context) -> Result<()> {
    let before = graph.order()?;
    let mixtures: Vec<_> = before.iter().copied().filter(|&id| graph.node(id).op_name() == "QMoE").collect();
    if mixtures.is_empty() {
        return Ok(());
    }
    for id in mixtures {
        decompose(graph, id)?;
    }
    graph.sweep();
    let before: HashSet<_> = before.into_iter().collect();
    for id in graph.order()?.into_iter().filter(|id| !before.contains(id)) {
        fold_node(graph, id, &context.decisions)?;
    }
    graph.sweep();
    Ok(())
}

/// Rows of numbers of few bits, with the scales and zero points of their blocks.
pub(super) struct Table {
    pub(super) count: usize,
    pub(super) len: usize,
    pub(super) block: usize,
    pub(super) numbers: Numbers,
    /// True if the numbers lie column by column.
    pub(super) transposed: bool,
    /// `[count, blocks]`.
    pub(super) scales: ValueId,
    pub(super) zeros: Zeros,
    /// Numbers that a row of the file has.
    pub(super) stored: usize,
}

/// Numbers that the bytes of a constant hold.
#[derive(Clone)]
pub(super) struct Numbers {
    pub(super) bytes: Arc<Constant>,
    pub(super) bits: usize,
    /// Bits that each takes there.
    pub(super) held: usize,
    pub(super) signed: bool,
    /// True if the first number of a byte is in its highest bits.
    pub(super) high_first: bool,
    /// The place in the file's row of each number of a row, if they are moved.
    pub(super) order: Option<Arc<[u32]>>,
    /// The type of floats that these are the codes of.
    pub(super) codes: Option<DType>,
}

pub(super) enum Zeros {
    /// All are this number.
    Number(i64),
    /// Numbers of as many bits, the blocks' first. A row of the constant is so many pieces of some bits; or it has them column by column.
    Packed { bytes: Arc<Constant>, bits: usize, len: usize, transposed: bool },
    /// Floats, `[count, blocks]`.
    Floats(ValueId),
    /// None: the numbers are places in this list.
    Codes(ValueId),
}

impl Table {
    fn packing(&self) -> Option<Packing> {
        Packing::new(self.numbers.bits, self.numbers.signed, self.block, self.len).ok()
    }

    /// The attributes and the operands behind the first one of a row that reads the table; `None` if none can. Packed zero points fill whole
    /// words if they are to be read row by row.
    fn read(&self, graph: &mut Graph, context: &Context, by_rows: bool) -> Option<(Attrs, Vec<Option<ValueId>>)> {
        let packing = self.packing()?;
        let Numbers { bytes, bits, held, signed, high_first, order, .. } = &self.numbers;
        let dtype = graph.fact(self.scales).dtype;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) || context.target.storage(dtype).is_err() {
            return None;
        }
        let (row_bytes, len) = (4 * packing.words_per_row, self.stored);
        let in_order = !self.transposed && !high_first && order.is_none();
        let in_place = held == bits && in_order && len * bits == 8 * row_bytes;
        let words = bytes.reinterpreted(Fact::new(DType::I32, [bytes.fact.bytes() / 4])).filter(|_| in_place);
        let words = words.unwrap_or_else(|| {
            let rest = |order: &Arc<[u32]>| order.iter().copied().chain(order.len() as u32..len as u32).collect();
            bytes.rows(Rows {
                count: self.count,
                len,
                bits: *bits,
                held: *held,
                row_bytes,
                transposed: self.transposed,
                high_first: *high_first,
                order: order.as_ref().map(rest),
            })
        });
        let mut attrs = Attrs::new()
            .with("N", self.count as i64)
            .with("bits", *bits as i64)
            .with("block_size", self.block as i64)
            .with("signed", i64::from(*signed));
        let zeros = match self.zeros {
            Zeros::Number(zero) => {
                attrs.set("zero", zero);
                None
            }
            Zeros::Floats(zeros) => Some(zeros),
            Zeros::Codes(codes) => {
                attrs.set("codes", 1i64);
                Some(codes)
            }
            Zeros::Packed { ref bytes, bits, len, transposed } => {
                let row_bytes = if by_rows { packing.zero_bytes.next_multiple_of(4) } else { packing.zero_bytes };
                let (count, high_first) = (self.count, false);
                let rows = Rows { count, len, bits, held: bits, row_bytes, transposed, high_first, order: None };
                // Their own bytes, if these are whole words.
                let fact = Fact::new(DType::I32, [rows.bytes().div_ceil(4)]);
                let in_place = len * bits == 8 * row_bytes && !transposed;
                let words = bytes.reinterpreted(fact).filter(|_| in_place).unwrap_or_else(|| bytes.rows(rows));
                Some(graph.constant(words))
            }
        };
        let words = graph.constant(words);
        Some((attrs, [Some(words), Some(self.scales)].into_iter().chain(zeros.map(Some)).collect()))
    }
}

/// True if floats of this type are multiplied by numbers of few bits on the target.
fn suits(graph: &Graph, context: &Context, value: ValueId) -> bool {
    let dtype = graph.fact(value).dtype;
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && context.target.storage(dtype).is_ok()
}

/// The product of some rows and a table's, if a kernel can compute it.
fn product(graph: &mut Graph, context: &Context, name: &str, left: ValueId, table: &Table) -> Result<Option<ValueId>> {
    if graph.fact(left).shape.len() < 2 || !suits(graph, context, left) {
        return Ok(None);
    }
    let Some((attrs, operands)) = table.read(graph, context, false) else { return Ok(None) };
    let inputs = [&[Some(left)], &operands[..]].concat();
    context.add(graph, name, "plimsoll.MatMulBits", &inputs, attrs).map(Some)
}

/// The sum of a value and another one, if there is another.
fn plus(graph: &mut Graph, context: &Context, name: &str, value: ValueId, other: Option<ValueId>) -> Result<ValueId> {
    match other {
        Some(other) => context.add(graph, name, "Add", &[Some(value), Some(other)], Attrs::new()),
        None => Ok(value),
    }
}

/// A node that computes a new shape of a value.
fn shaped(graph: &mut Graph, context: &Context, name: &str, value: ValueId, shape: &[usize]) -> Result<ValueId> {
    context.add(graph, name, "Reshape", &[Some(value)], Attrs::new().with("shape", shape))
}

/// A number of a node's attributes; 0 for one that is none.
fn size(graph: &Graph, id: NodeId, name: &str, default: i64) -> usize {
    let size = graph.with_call(id, |call| call.int(name, default)).and_then(Result::ok);
    size.and_then(|size| usize::try_from(size).ok()).unwrap_or(0)
}

/// The order that sorts the numbers of a row by the blocks that have their scales.
enum Order {
    /// They are sorted.
    Kept,
    /// The place of each in the file's row.
    Sorted(Arc<[u32]>),
    /// The blocks are not equally large.
    None,
}

impl Order {
    /// The order of numbers of which each is listed with its block.
    fn of(groups: &[i64], block: usize) -> Order {
        let of_place = |place: usize| (place / block) as i64;
        if groups.iter().enumerate().all(|(place, &group)| group == of_place(place)) {
            return Order::Kept;
        }
        let mut order: Vec<_> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&place| groups[place as usize]);
        if order.iter().enumerate().any(|(place, &from)| groups[from as usize] != of_place(place)) {
            return Order::None;
        }
        Order::Sorted(order.into())
    }
}

fn few_bits(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let (name, operands) = (graph.node(id).name.clone(), graph.operands(id));
    let given = |input: usize| operands.get(input).copied().flatten();
    let [n, k, bits, block] = [("N", 0), ("K", 0), ("bits", 4), ("block_size", 0)].map(|(n, d)| size(graph, id, n, d));
    let (Some(mut left), Some(weights), Some(scales)) = (given(0), given(1), given(2)) else { return Ok(()) };
    let (zeros, groups, bias) = (given(3), given(4), given(5));
    let (Ok(packing), Some(bytes)) = (Packing::new(bits, false, block, k), graph.as_constant(weights).cloned()) else {
        return Ok(());
    };
    let packed = |graph: &Graph, zeros: ValueId| {
        let bytes = graph.as_constant(zeros)?.clone();
        Some(Zeros::Packed { bytes, bits: 8, len: packing.zero_bytes, transposed: false })
    };
    let is_packed = zeros.is_some_and(|zeros| graph.fact(zeros).dtype == DType::U8);
    if is_packed && zeros.and_then(|zeros| graph.as_constant(zeros)).is_none() {
        return Ok(());
    }
    if let Some(groups) = groups.and_then(|groups| graph.as_constant(groups)) {
        let (blocks, groups) = (k.div_ceil(block) as i64, groups.value()?.to_i64().unwrap_or_default());
        if let Some(group) = groups.iter().find(|group| !(0..blocks).contains(*group)) {
            let what = format!("input 'g_idx': expected blocks from 0 to {}, found {group}", blocks - 1);
            return Err(graph.node(id).error(what));
        }
    }
    let order = match groups {
        None => Order::Kept,
        Some(groups) => match graph.as_constant(groups).and_then(|groups| groups.value().ok()?.to_i64()) {
            Some(groups) => Order::of(&groups[..k], block),
            None => Order::None,
        },
    };
    graph.insert_at(id);
    let order = match order {
        Order::Kept => None,
        Order::Sorted(order) => Some(order),
        Order::None => {
            tracing::warn!(
                "node '{name}': its weights are unpacked: expected a constant 'g_idx' with equally large groups"
            );
            return Ok(());
        }
    };
    let of_blocks = [n, packing.blocks];
    let zeros = match zeros {
        None => Some(Zeros::Number(1 << (bits - 1))),
        Some(zeros) if is_packed => packed(graph, zeros),
        Some(zeros) => Some(Zeros::Floats(shaped(graph, context, &name, zeros, &of_blocks)?)),
    };
    let Some(zeros) = zeros else { return Ok(()) };
    let scales = shaped(graph, context, &name, scales, &of_blocks)?;
    if let Some(order) = &order {
        let order: Vec<_> = order.iter().map(|&place| i64::from(place)).collect();
        let order = graph.constant(Constant::new(name.clone(), Tensor::from_i64([k], &order)?));
        left = context.add(graph, &name, "Gather", &[Some(left), Some(order)], Attrs::new().with("axis", -1i64))?;
    }
    let numbers = Numbers { bytes, bits, held: bits, signed: false, high_first: false, order, codes: None };
    let stored = packing.blocks * block;
    let table = Table { count: n, len: k, block, numbers, transposed: false, scales, zeros, stored };
    if let Some(value) = product(graph, context, &name, left, &table)? {
        let value = plus(graph, context, &name, value, bias)?;
        graph.replace(id.output(0), value);
    }
    Ok(())
}

/// Scales are those of rows' own blocks. Where a block has parts of several rows, or a row's end cuts it, each part is a block.
fn four_bits(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let (name, operands) = (graph.node(id).name.clone(), graph.operands(id));
    let [Some(left), Some(codes), Some(scales)] = operands[..] else { return Ok(()) };
    let Some(Ok(Codes { n, k, block, list })) = graph.with_call(id, Codes::of) else { return Ok(()) };
    let Some(bytes) = graph.as_constant(codes).cloned() else { return Ok(()) };
    // The most numbers that rows and blocks are multiples of.
    let (mut common, mut rest) = (block, k % block);
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    if common < LEAST_BLOCK {
        tracing::warn!("node '{name}': its weights are unpacked: expected rows of whole blocks, found {k} and {block}");
        return Ok(());
    }
    graph.insert_at(id);
    let blocks = k / common;
    let scales = if common == block {
        shaped(graph, context, &name, scales, &[n, blocks])?
    } else {
        let of: Vec<_> = (0..n * blocks).map(|place| (place * common / block) as i64).collect();
        let of = graph.constant(Constant::new(name.clone(), Tensor::from_i64([n, blocks], &of)?));
        let flat = shaped(graph, context, &name, scales, &[(n * k).div_ceil(block)])?;
        context.add(graph, &name, "Gather", &[Some(flat), Some(of)], Attrs::new().with("axis", 0i64))?
    };
    let list = Tensor::from_f64(DType::F32, [list.len()], &list);
    let zeros = Zeros::Codes(graph.constant(Constant::new("codes", list)));
    let numbers = Numbers { bytes, bits: 4, held: 4, signed: false, high_first: true, order: None, codes: None };
    let table = Table { count: n, len: k, block: common, numbers, transposed: false, scales, zeros, stored: k };
    if let Some(value) = product(graph, context, &name, left, &table)? {
        graph.replace(id.output(0), value);
    }
    Ok(())
}

/// The fewest numbers of a part of a block. Smaller ones would have more bytes of scales than of numbers.
const LEAST_BLOCK: usize = 8;

/// A matrix that `DequantizeLinear` made of constants, perhaps transposed behind that.
struct Dequantized {
    numbers: Numbers,
    /// Extents of the numbers.
    shape: [usize; 2],
    scales: Arc<Constant>,
    zeros: Option<Arc<Constant>>,
    axis: usize,
    block: usize,
    transposed: bool,
}

impl Numbers {
    /// The numbers that there can be.
    fn range(&self) -> Range<i64> {
        let (least, count) = (if self.signed { -1 << (self.bits - 1) } else { 0 }, 1 << self.bits);
        least..least + count
    }

    fn of(constant: &Arc<Constant>) -> Option<Numbers> {
        if let Some((op, attrs, [Some(bytes)], _)) =
            constant.derivation().filter(|(op, ..)| op.name == "plimsoll.Unpack")
        {
            let call = Call { op, attrs, inputs: &[Some(&bytes.fact)] };
            let (bits, signed) = (call.int("bits", 4).ok()?, call.int("signed", 0).ok()?);
            let bits = usize::try_from(bits).ok()?;
            return Some(Numbers {
                bytes: bytes.clone(),
                bits,
                held: bits,
                signed: signed != 0,
                high_first: false,
                order: None,
                codes: Some(constant.fact.dtype).filter(|dtype| dtype.is_narrow_float()),
            });
        }
        let dtype = constant.fact.dtype;
        let codes = Some(dtype).filter(|dtype| dtype.is_narrow_float());
        (dtype.is_byte() || codes.is_some()).then(|| Numbers {
            bytes: constant.clone(),
            bits: 8,
            held: 8,
            signed: dtype == DType::I8,
            high_first: false,
            order: None,
            codes,
        })
    }
}

impl Dequantized {
    fn of(constant: &Arc<Constant>) -> Option<Dequantized> {
        let (op, attrs, inputs, _) = constant.derivation()?;
        match (op.name, inputs) {
            ("Transpose", [Some(source)]) if source.fact.shape.len() == 2 => {
                let of = Dequantized::of(source)?;
                let moved = constant.fact.shape.len() == 2 && {
                    let call = Call { op, attrs, inputs: &[Some(&source.fact)] };
                    call.ints("perm").ok()?.is_none_or(|perm| perm[..] == [1, 0])
                };
                Some(Dequantized { transposed: of.transposed ^ moved, ..of })
            }
            ("DequantizeLinear", [Some(numbers), Some(scales), zeros @ ..]) => {
                let &[rows, columns] = &numbers.fact.shape[..] else { return None };
                let call = Call { op, attrs, inputs: &[Some(&numbers.fact), Some(&scales.fact)] };
                Some(Dequantized {
                    numbers: Numbers::of(numbers)?,
                    shape: [rows, columns],
                    scales: scales.clone(),
                    zeros: zeros.first().cloned().flatten(),
                    axis: call.axis("axis", 1, &numbers.fact.shape).ok()?,
                    block: usize::try_from(call.int("block_size", 0).ok()?).ok()?,
                    transposed: false,
                })
            }
            ("Cast", [Some(numbers)]) if numbers.fact.dtype.is_narrow_float() => {
                let &[rows, columns] = &numbers.fact.shape[..] else { return None };
                Some(Dequantized {
                    numbers: Numbers::of(numbers)?,
                    shape: [rows, columns],
                    scales: Constant::number(constant.name.clone(), constant.fact.dtype, 1.0).into(),
                    zeros: None,
                    axis: 1,
                    block: 0,
                    transposed: false,
                })
            }
            _ => None,
        }
    }

    /// The matrix as rows along one of its axes, whose blocks have a scale each; `None` if neighbours of a row differ in their scales.
    fn table(self, graph: &mut Graph, context: &Context, name: &str, along: usize) -> Result<Option<Table>> {
        let Dequantized { numbers, shape, scales, zeros, axis, block, .. } = self;
        let (count, len) = (shape[1 - along], shape[along]);
        let whole = len.next_multiple_of(32 / numbers.bits);
        let single = scales.fact.shape.numel() == 1;
        let (block, blocks, turned) = match block {
            0 if single || axis != along => (whole, 1, false),
            1.. if axis == along => (block, len.div_ceil(block), along == 0),
            _ => return Ok(None),
        };
        if len == 0 || count == 0 || Packing::new(numbers.bits, numbers.signed, block, len).is_err() {
            return Ok(None);
        }
        let zeros = match (numbers.codes, zeros) {
            (Some(dtype), zeros) => {
                let zeros = zeros.map_or(Ok(Vec::new()), |zeros| zeros.value().map(Tensor::to_f64))?;
                if zeros.iter().any(|&zero| zero != 0.0) {
                    return Ok(None);
                }
                let list: Vec<f64> = (0..1 << numbers.bits).map(|code| narrow::decode(dtype, code as u8)).collect();
                let list = Tensor::from_f64(DType::F32, [list.len()], &list);
                Zeros::Codes(graph.constant(Constant::new("codes", list)))
            }
            (None, None) => Zeros::Number(0),
            (None, Some(zero)) if zero.fact.shape.numel() == 1 => match zero.value()?.to_i64().as_deref() {
                Some(&[zero]) if numbers.range().contains(&zero) => Zeros::Number(zero),
                _ => return Ok(None),
            },
            (None, Some(zeros)) => match Numbers::of(&zeros) {
                Some(of) if (of.bits, of.signed) == (numbers.bits, numbers.signed) => {
                    Zeros::Packed { bytes: of.bytes, bits: of.bits, len: blocks, transposed: turned }
                }
                _ => return Ok(None),
            },
        };
        let is_power = scales.fact.dtype.is_narrow();
        let mut scales = graph.constant(scales);
        if is_power {
            scales = context.add(graph, name, "Cast", &[Some(scales)], Attrs::new().with("to", DType::F32.onnx()))?;
        }
        if turned {
            let attrs = Attrs::new().with("perm", &[1usize, 0][..]);
            scales = context.add(graph, name, "Transpose", &[Some(scales)], attrs)?;
        }
        let each = if single { [1, 1] } else { [count, blocks] };
        scales = shaped(graph, context, name, scales, &each)?;
        if single {
            let attrs = Attrs::new().with("shape", &[count, blocks][..]);
            scales = context.add(graph, name, "Expand", &[Some(scales)], attrs)?;
        }
        Ok(Some(Table { count, len, block, numbers, transposed: along == 0, scales, zeros, stored: len }))
    }
}

/// Filters that `DequantizeLinear` made of constants, each with one scale, or all with one: as rows of their elements.
fn filters(constant: &Arc<Constant>) -> Option<Dequantized> {
    let (op, attrs, inputs, _) = constant.derivation()?;
    let shape = &constant.fact.shape;
    let rows = [*shape.first()?, shape.get(1..)?.iter().product()];
    let of = |numbers: &Arc<Constant>, scales: Arc<Constant>, zeros: Option<Arc<Constant>>, axis: usize| {
        let numbers = Numbers::of(numbers)?;
        Some(Dequantized { numbers, shape: rows, scales, zeros, axis, block: 0, transposed: false })
    };
    match (op.name, inputs) {
        ("DequantizeLinear", [Some(numbers), Some(scales), zeros @ ..]) => {
            let call = Call { op, attrs, inputs: &[Some(&numbers.fact), Some(&scales.fact)] };
            let (axis, block) = (call.axis("axis", 1, shape).ok()?, call.int("block_size", 0).ok()?);
            let each = scales.fact.shape.numel() == 1 || axis == 0;
            let zeros = zeros.first().cloned().flatten();
            (each && block == 0).then(|| of(numbers, scales.clone(), zeros, 0)).flatten()
        }
        ("Cast", [Some(numbers)]) if numbers.fact.dtype.is_narrow_float() => {
            of(numbers, Constant::number(constant.name.clone(), constant.fact.dtype, 1.0).into(), None, 0)
        }
        _ => None,
    }
}

/// Filters of fewer elements are floats: their kernels read them from caches.
const FEW_FILTERS: usize = 1 << 10;

fn dequantized_filters(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let operands = graph.operands(id);
    let (Some(data), Some(weights)) = (operands[0], operands[1]) else { return Ok(()) };
    let Some(found) = graph.as_constant(weights).and_then(filters) else { return Ok(()) };
    let Fact { shape, .. } = graph.fact(weights).clone();
    let of_bytes = graph.node(id).op_name() == "Conv"
        && context.target.convolves_bytes(shape[1])
        && multiplies_bytes(graph, data, &found.numbers);
    if of_bytes || shape.numel() < FEW_FILTERS || !suits(graph, context, weights) {
        return Ok(());
    }
    graph.insert_at(id);
    let name = graph.node(id).name.clone();
    let Some(table) = found.table(graph, context, &name, 1)? else { return Ok(()) };
    let Some((attrs, more)) = table.read(graph, context, true) else { return Ok(()) };
    let all: Vec<i64> = (0..table.count as i64).collect();
    let all = graph.constant(Constant::new(name.clone(), Tensor::from_i64([table.count], &all)?));
    let attrs = attrs.with("K", table.len as i64);
    // Without this, folding would make floats of the filters again.
    let all = context.add(graph, &name, AT_RUN, &[Some(all)], Attrs::new())?;
    let inputs = [&[Some(all)], &more[..]].concat();
    let rows = context.add(graph, &name, "plimsoll.GatherBits", &inputs, attrs)?;
    let filters = shaped(graph, context, &name, rows, &shape)?;
    let mut read = operands;
    read[1] = Some(filters);
    graph.read(id, &read);
    Ok(())
}

/// The dequantized matrix that a node's operand is.
fn dequantized(graph: &Graph, value: Option<ValueId>) -> Option<Dequantized> {
    Dequantized::of(graph.as_constant(value?)?)
}

/// True if the next pass multiplies these numbers as bytes: both operands are quantized, perhaps rounded to halves behind that, and the numbers are
/// whole bytes.
fn multiplies_bytes(graph: &Graph, other: ValueId, numbers: &Numbers) -> bool {
    let cast = (graph.node(other.node).op_name() == "Cast").then(|| graph.operands(other.node)[0]).flatten();
    let made = cast.unwrap_or(other);
    graph.node(made.node).op_name() == "DequantizeLinear" && numbers.bits == 8 && numbers.codes.is_none()
}

fn dequantized_product(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let (Node { name, .. }, operands) = (graph.node(id).clone(), graph.operands(id));
    let (Some(mut left), Some(right)) = (operands[0], operands[1]) else { return Ok(()) };
    let found = dequantized(graph, Some(right));
    if found.as_ref().is_some_and(|found| multiplies_bytes(graph, left, &found.numbers)) {
        return Ok(());
    }
    let of = |name: &str| graph.with_call(id, |call| call.float(name, 1.0)).and_then(Result::ok).unwrap_or(1.0);
    let (alpha, beta) = (of("alpha"), of("beta"));
    let flag = |name: &str| graph.with_call(id, |call| call.int(name, 0)).and_then(Result::ok).is_some_and(|n| n != 0);
    let [turn_a, turn_b] = ["transA", "transB"].map(flag);
    graph.insert_at(id);
    // The axis of the numbers that is summed up.
    let along = |transposed: bool| usize::from(transposed ^ turn_b);
    let table = match found {
        Some(found) => {
            let along = along(found.transposed);
            found.table(graph, context, &name, along)?
        }
        None => {
            let along = along(false);
            let table = |Rounded { count, len, quantize: Quantize { bits, block }, numbers, scales }| {
                let numbers = Numbers {
                    bytes: numbers,
                    bits,
                    held: 8,
                    signed: true,
                    high_first: false,
                    order: None,
                    codes: None,
                };
                Table {
                    count,
                    len,
                    block,
                    numbers,
                    transposed: along == 0,
                    scales,
                    zeros: Zeros::Number(0),
                    stored: len,
                }
            };
            quantize::rounded(graph, context, &name, right, along)?.map(table)
        }
    };
    let Some(table) = table else { return Ok(()) };
    if turn_a {
        let attrs = Attrs::new().with("perm", &[1usize, 0][..]);
        left = context.add(graph, &name, "Transpose", &[Some(left)], attrs)?;
    }
    let Some(mut value) = product(graph, context, &name, left, &table)? else { return Ok(()) };
    let dtype = graph.fact(value).dtype;
    let times = |graph: &mut Graph, value: ValueId, by: f64| {
        if by == 1.0 {
            return Ok(value);
        }
        let by = graph.constant(Constant::number(name.clone(), dtype, by));
        context.add(graph, &name, "Mul", &[Some(value), Some(by)], Attrs::new())
    };
    value = times(graph, value, alpha)?;
    if let Some(&Some(bias)) = operands.get(2) {
        let bias = times(graph, bias, beta)?;
        value = plus(graph, context, &name, value, Some(bias))?;
    }
    graph.replace(id.output(0), value);
    Ok(())
}

/// The rows of a table that indices choose, instead of a node.
fn choose(graph: &mut Graph, context: &Context, id: NodeId, indices: ValueId, table: &Table) -> Result<()> {
    let Some((attrs, operands)) = table.read(graph, context, true) else { return Ok(()) };
    let inputs = [&[Some(indices)], &operands[..]].concat();
    let attrs = attrs.with("K", table.len as i64);
    let name = graph.node(id).name.clone();
    let value = context.add(graph, &name, "plimsoll.GatherBits", &inputs, attrs)?;
    graph.replace(id.output(0), value);
    Ok(())
}

fn dequantized_rows(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let operands = graph.operands(id);
    let (Some(indices), Some(found)) = (operands[1], dequantized(graph, operands[0])) else { return Ok(()) };
    let by_rows = graph.with_call(id, |call| call.axis("axis", 0, call.shape(0))) == Some(Ok(0));
    if !by_rows || found.transposed {
        return Ok(());
    }
    graph.insert_at(id);
    let name = graph.node(id).name.clone();
    match found.table(graph, context, &name, 1)? {
        Some(table) => choose(graph, context, id, indices, &table),
        None => Ok(()),
    }
}

/// A `GatherBlockQuantized` of bytes that hold several numbers, or one.
fn quantized_rows(graph: &mut Graph, context: &Context, id: NodeId) -> Result<()> {
    let (name, operands) = (graph.node(id).name.clone(), graph.operands(id));
    let given = |input: usize| operands.get(input).copied().flatten();
    let (Some(data), Some(indices), Some(scales)) = (given(0), given(1), given(2)) else { return Ok(()) };
    let Some(bytes) = graph.as_constant(data).cloned() else { return Ok(()) };
    let fact = bytes.fact.clone();
    let (&[count, row], true) = (&fact.shape[..], fact.dtype == DType::U8) else { return Ok(()) };
    let [bits, block] = [("bits", 4), ("block_size", 128)].map(|(name, default)| size(graph, id, name, default));
    if !matches!(bits, 2 | 4 | 8) || count == 0 || row == 0 {
        return Ok(());
    }
    let len = row * 8 / bits;
    let block = if block < len { block } else { len.next_multiple_of(32 / bits) };
    let Ok(packing) = Packing::new(bits, false, block, len) else { return Ok(()) };
    let zeros = match given(3) {
        None => Zeros::Number(1 << (bits - 1)),
        Some(zeros) => match graph.as_constant(zeros).cloned() {
            Some(bytes) => Zeros::Packed { bytes, bits: 8, len: packing.zero_bytes, transposed: false },
            None => return Ok(()),
        },
    };
    graph.insert_at(id);
    let scales = shaped(graph, context, &name, scales, &[count, packing.blocks])?;
    let numbers = Numbers { bytes, bits, held: bits, signed: false, high_first: false, order: None, codes: None };
    choose(
        graph,
        context,
        id,
        indices,
        &Table { count, len, block, numbers, transposed: false, scales, zeros, stored: len },
    )
}
