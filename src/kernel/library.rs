//! Kernels as calls of cuBLASLt and cuDNN, in plain data.
//!
//! Whether a kernel is one is decided with the plan, from the kernel and the target alone: [`split`] takes what a library computes in one
//! call out of a kernel and leaves the rest as a map over the result, in place. A backend obeys [`Kernel::call`] and decides
//! nothing; [`call`] is also what the plan's checker holds it against.
//!
//! ```text
//! body of the kernel    core -> * alpha -> + bias -> + residual -> activation -> anything else
//!                       `------------------ the call -----------------------'   `-- a map --'
//! ```

use super::layout::prologue;
use super::{Kernel, Operand, Template, Window};
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Instr};
use crate::shape::Access;
use crate::target::{Family, Target};
use serde::{Deserialize, Serialize};

/// A library call that computes a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// cuBLASLt.
    MatMul(MatMul),
    /// cuDNN, forward.
    Conv(Conv),
}

/// A batch of column-major products: `D = activation(alpha * A B + C + bias)`, accumulated in `f32` (`f64` where operands are).
///
/// A row-major result is the column-major one of the transposed problem, so `a` is the kernel's second operand then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatMul {
    /// Rows of A and D.
    pub m: u64,
    /// Columns of B and D.
    pub n: u64,
    /// Columns of A, rows of B.
    pub k: u64,
    /// Number of products.
    pub batch: u64,
    /// The left operand, `[m, k]`.
    pub a: Matrix,
    /// The right operand, `[k, n]`.
    pub b: Matrix,
    /// What is added, `[m, n]`: laid out as `d`, and it may be the very same bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c: Option<Matrix>,
    /// The result, `[m, n]`; its `slot` is that of the kernel's write.
    pub d: Matrix,
    /// Factor of the product.
    pub alpha: f64,
    /// `m` elements of D's type, one per row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// What is applied last.
    pub activation: Activation,
    /// Whether `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

/// A column-major matrix among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// Whether what lies there is the transpose of the operand.
    pub transposed: bool,
    /// Elements from one column of what lies there to the next.
    pub leading: u64,
    /// Elements from one matrix of the batch to the next; 0 where all are the same.
    pub stride: u64,
}

impl Matrix {
    /// The largest power of two, at most 256, that every matrix's address is a multiple of when the buffer's is one of 256.
    pub fn alignment(&self) -> u32 {
        let steps = (self.offset | self.stride).wrapping_mul(self.dtype.size() as u64);
        1 << steps.trailing_zeros().min(8)
    }
}

/// Elements one after another among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vector {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// First element.
    pub offset: u64,
}

/// What a call applies to its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(x, 0)`.
    Relu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// A convolution: `y = activation(conv(x, w) + residual + bias)`, accumulated in `f32`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv {
    /// Channel groups.
    pub groups: u64,
    /// Steps between windows, per spatial axis (two of them, or three).
    pub strides: Vec<u64>,
    /// Steps between elements of a window.
    pub dilations: Vec<u64>,
    /// Padding at both ends of each axis.
    pub pads: Vec<u64>,
    /// `[n, c, spatial..]`.
    pub x: Image,
    /// `[o, c / groups, spatial..]`.
    pub w: Image,
    /// `[n, o, spatial..]`.
    pub y: Image,
    /// One element of the result's type per output channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// What is added; apart from the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual: Option<Image>,
    /// [`Activation::None`] or [`Activation::Relu`].
    pub activation: Activation,
    /// Whether the channels of a position lie one after another, in images and in weights; else each tensor is row-major.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
    /// Whether `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

/// A tensor among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// Extents.
    pub dims: Vec<u64>,
    /// Elements from index to index, per axis.
    pub strides: Vec<u64>,
}

impl Image {
    fn elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

const MIB: u64 = 1 << 20;

impl Call {
    /// Bytes of workspace that the call can make use of: a rule, so that planning needs no library. An algorithm that wants more than it
    /// is given is not chosen.
    ///
    /// For products NVIDIA recommends 32 MiB from Hopper on; what splits the inner axis needs is a multiple of the result.
    pub fn workspace(&self) -> u64 {
        match self {
            Call::MatMul(p) => {
                (64 * p.batch.saturating_mul(p.m).saturating_mul(p.n)).clamp(MIB, 32 * MIB).next_multiple_of(256)
            }
            Call::Conv(c) => {
                let bytes = [&c.x, &c.w, &c.y].map(|t| t.elements().saturating_mul(t.dtype.size() as u64));
                bytes.into_iter().fold(0, u64::saturating_add).clamp(MIB, 64 * MIB).next_multiple_of(256)
            }
        }
    }

    /// Bytes of workspace that the call is given even where the arena becomes larger by them.
    ///
    /// Products of few tiles share the inner axis among all multiprocessors, each of which leaves a tile of `f32` there. Convolutions of
    /// `f32` have algorithms that need next to none, and so have those of halves whose channels come last and are a multiple of 8; others
    /// turn images in the workspace.
    pub fn least_workspace(&self) -> u64 {
        match self {
            Call::MatMul(_) => self.workspace().min(8 * MIB),
            Call::Conv(c) if c.x.dtype.size() == 2 && !(c.channels_last && c.w.dims[1].is_multiple_of(8)) => {
                self.workspace()
            }
            Call::Conv(_) => MIB,
        }
    }

    /// The read whose bytes the result may take: the call reads each element before it writes it.
    pub fn in_place(&self) -> Option<usize> {
        match self {
            Call::MatMul(p) => p.c.as_ref().map(|c| c.slot),
            Call::Conv(_) => None,
        }
    }
}

/// The library call that computes all of a kernel, if there is one on this target.
pub fn call(kernel: &Kernel, target: &Target) -> Option<Call> {
    let (parts, end) = absorb(kernel, target)?;
    (end == kernel.body.results[0] && !is_small(kernel, target)).then_some(parts)
}

/// A kernel as a library call, and the map that finishes the result in place, if anything is left to do. The map reads the result first,
/// then the given reads of the original kernel.
pub struct Split {
    /// What the call computes, and the call unless rendering is faster; its reads are the given ones of the original kernel.
    pub call: (Kernel, Vec<usize>),
    /// The map.
    pub rest: Option<(Kernel, Vec<usize>)>,
}

/// Takes a library call out of a kernel, or what would be one if rendering were not faster.
pub fn split(kernel: &Kernel, target: &Target) -> Option<Split> {
    let (_, end) = absorb(kernel, target)?;
    let core = kernel.template.core_reads();
    let (body, inputs) = part(&kernel.body, None, end);
    let operands: Vec<usize> = (0..core).chain(inputs.iter().map(|&i| core + i as usize - 1)).collect();
    let pick = |slots: &[usize]| slots.iter().map(|&s| kernel.reads[s].clone()).collect::<Vec<_>>();
    let mut first = Kernel { reads: pick(&operands), body, ..kernel.clone() };
    let (found, _) = absorb(&first, target)?;
    if !is_small(kernel, target) {
        first.workspace = found.workspace();
        first.call = Some(found);
    }
    let (body, inputs) = part(&kernel.body, Some(end), kernel.body.results[0]);
    let rest = (end != kernel.body.results[0]).then(|| {
        let slots: Vec<usize> = inputs.iter().map(|&i| core + i as usize - 1).collect();
        let mut reads = kernel.writes.clone();
        reads.extend(pick(&slots));
        let (shape, writes) = (kernel.shape.clone(), kernel.writes.clone());
        (
            Kernel {
                template: Template::Map,
                shape,
                reads,
                writes,
                prologues: Vec::new(),
                body,
                workspace: 0,
                call: None,
            },
            slots,
        )
    });
    Some(Split { call: (first, operands), rest })
}

/// The instructions that `result` needs, with that of `start` for input 0; and which inputs the others are.
fn part(body: &Body, start: Option<u32>, result: u32) -> (Body, Vec<u32>) {
    let mut live = vec![false; body.code.len()];
    live[result as usize] = true;
    for i in (0..=result as usize).rev() {
        if live[i] && start != Some(i as u32) {
            operands(body.code[i].code).for_each(|o| live[o as usize] = true);
        }
    }
    let mut number = vec![0; body.code.len()];
    let mut inputs = Vec::new();
    let mut code = Vec::new();
    for (i, instr) in body.code.iter().enumerate().filter(|(i, _)| live[*i]) {
        let at = |o: u32| number[o as usize];
        let new = match instr.code {
            _ if start == Some(i as u32) => Code::Input(0),
            Code::Input(0) if start.is_none() => Code::Input(0),
            Code::Input(j) => {
                inputs.push(j);
                Code::Input(inputs.len() as u32)
            }
            Code::Unary(op, a) => Code::Unary(op, at(a)),
            Code::Binary(op, a, b) => Code::Binary(op, at(a), at(b)),
            Code::Select(c, a, b) => Code::Select(at(c), at(a), at(b)),
            Code::Cast(a) => Code::Cast(at(a)),
            leaf @ (Code::Const(_) | Code::Index(_) | Code::Fold(_)) => leaf,
        };
        number[i] = code.len() as u32;
        code.push(Instr { code: new, dtype: instr.dtype });
    }
    (Body { code, results: vec![number[result as usize]] }, inputs)
}

fn operands(code: Code) -> impl Iterator<Item = u32> {
    let list = match code {
        Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Fold(_) => [None; 3],
        Code::Unary(_, a) | Code::Cast(a) => [Some(a), None, None],
        Code::Binary(_, a, b) => [Some(a), Some(b), None],
        Code::Select(c, a, b) => [Some(c), Some(a), Some(b)],
    };
    list.into_iter().flatten()
}

/// The call that computes a kernel's core and as much of its body as it can, and the instruction whose value that is.
fn absorb(kernel: &Kernel, target: &Target) -> Option<(Call, u32)> {
    let there = target.family == Family::Cuda && !kernel.shape.contains(&0);
    if !there || !kernel.prologues.is_empty() || kernel.writes.len() != 1 || kernel.body.results.len() != 1 {
        return None;
    }
    match &kernel.template {
        Template::MatMul if target.libraries.cublaslt => matmul(kernel, target),
        Template::Conv { groups, window } if target.libraries.cudnn => conv(kernel, *groups, window, target),
        _ => None,
    }
}

/// What of a body an epilogue computes.
struct Epilogue {
    alpha: f64,
    /// Slots of what is added.
    bias: Option<usize>,
    residual: Option<usize>,
    activation: Activation,
    /// The instruction whose value this is.
    end: u32,
}

/// What an epilogue can do, apart from adding.
struct Abilities<'a> {
    scale: bool,
    gelu: bool,
    /// Whether a read can be the bias.
    bias: &'a dyn Fn(&Operand) -> bool,
}

impl Epilogue {
    /// Follows the core value through the body for as long as it goes to one place. `None` when it is not of the type that is written.
    fn new(kernel: &Kernel, can: &Abilities) -> Option<Epilogue> {
        let Body { code, results } = &kernel.body;
        let (core, write) = (kernel.template.core_reads(), &kernel.writes[0]);
        let start = code.iter().position(|i| i.code == Code::Input(0))? as u32;
        let mut found = Epilogue { alpha: 1.0, bias: None, residual: None, activation: Activation::None, end: start };
        let live = &live(&kernel.body);
        let users = |value: u32| {
            let uses = move |i: &usize| live[*i] && operands(code[*i].code).any(|o| o == value);
            (0..code.len()).filter(uses).collect::<Vec<_>>()
        };
        while let ([user], false) = (&users(found.end)[..], results[0] == found.end) {
            let added = found.bias.is_some() || found.residual.is_some();
            let read = |o: u32| match code[o as usize].code {
                Code::Input(j) if j > 0 => Some(core + j as usize - 1),
                _ => None,
            };
            let constant = |o: u32| match code[o as usize].code {
                Code::Const(v) => Some(v),
                _ => None,
            };
            let other = |a: u32, b: u32| if a == found.end { b } else { a };
            match code[*user].code {
                Code::Binary(Binary::Mul, a, b) if can.scale && !added => match constant(other(a, b)) {
                    Some(factor) => found.alpha *= factor,
                    None => break,
                },
                Code::Binary(Binary::Div, a, b) if can.scale && !added && a == found.end => match constant(b) {
                    Some(divisor) if divisor != 0.0 => found.alpha /= divisor,
                    _ => break,
                },
                Code::Binary(Binary::Add, a, b) if a != b => {
                    let Some(slot) = read(other(a, b)) else { break };
                    let operand = &kernel.reads[slot];
                    if operand.dtype != write.dtype {
                        break;
                    } else if found.residual.is_none() && operand.access == write.access {
                        found.residual = Some(slot);
                    } else if found.bias.is_none() && (can.bias)(operand) {
                        found.bias = Some(slot);
                    } else {
                        break;
                    }
                }
                // A product of halves may be stored as the f32 in which it was summed.
                Code::Cast(_) if can.scale && !added && code[*user].dtype == DType::F32 => {}
                _ => break,
            }
            found.end = *user as u32;
        }
        if let Some((activation, end)) = activation(&kernel.body, found.end, can.gelu) {
            found.activation = activation;
            found.end = end;
        }
        (code[found.end as usize].dtype == write.dtype).then_some(found)
    }
}

fn live(body: &Body) -> Vec<bool> {
    let mut live = vec![false; body.code.len()];
    body.results.iter().for_each(|&r| live[r as usize] = true);
    for i in (0..body.code.len()).rev() {
        if live[i] {
            operands(body.code[i].code).for_each(|o| live[o as usize] = true);
        }
    }
    live
}

/// Arguments at which activations are told apart; none of them lies where two spellings of one function could differ by rounding.
const PROBES: [f64; 16] = [-1e30, -1e4, -9.0, -5.5, -3.25, -2.0, -1.1, -0.7, -0.3, 0.0, 0.2, 0.9, 1.6, 2.8, 7.5, 1e4];

/// The first instruction through which all goes that becomes of `value`, and which is an activation of it. However it is spelled, it is
/// known by its values.
fn activation(body: &Body, value: u32, gelu: bool) -> Option<(Activation, u32)> {
    let live = live(body);
    let count = body.code.len();
    (value + 1..count as u32).filter(|&v| live[v as usize]).find_map(|end| {
        let mut inside = vec![false; count];
        inside[end as usize] = true;
        for i in (0..=end as usize).rev() {
            if inside[i] && i as u32 != value {
                operands(body.code[i].code).for_each(|o| inside[o as usize] = true);
            }
        }
        let alone = |i: usize| match body.code[i].code {
            Code::Const(_) => true,
            _ if i as u32 == end => true,
            _ => {
                let uses = |u: usize| operands(body.code[u].code).any(|o| o as usize == i);
                let escapes = (0..count).any(|u| live[u] && !inside[u] && uses(u));
                !escapes && !body.results.contains(&(i as u32))
            }
        };
        if !inside[value as usize] || !(0..count).filter(|&i| inside[i]).all(alone) {
            return None;
        }
        let (function, inputs) = part(body, Some(value), end);
        let placed = function.code.iter().any(|i| matches!(i.code, Code::Index(_) | Code::Fold(_)));
        if placed || !inputs.is_empty() {
            return None;
        }
        let is = |f: fn(f64) -> f64| {
            PROBES.iter().all(|&x| {
                let (found, expected) = (function.eval(&[x], &[], &[])[0], f(x));
                (found - expected).abs() <= 1e-6 * x.abs().max(1.0)
            })
        };
        match () {
            () if is(|x| x.max(0.0)) => Some((Activation::Relu, end)),
            () if gelu && is(gelu_tanh) => Some((Activation::GeluTanh, end)),
            () => None,
        }
    })
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// One batch of an operand: first element, step between rows, between columns, between matrices.
struct Steps {
    row: isize,
    column: isize,
    batch: isize,
}

fn matmul(kernel: &Kernel, target: &Target) -> Option<(Call, u32)> {
    let (shape, write) = (&kernel.shape, &kernel.writes[0]);
    let [left, right, ..] = &kernel.reads[..] else { return None };
    let rank = shape.len();
    let axes = rank.checked_sub(2)?;
    let (rows, columns) = (shape[axes], shape[axes + 1]);
    let k = *left.access.shape.last()?;
    let dtype = left.dtype;
    let wide = dtype == write.dtype || write.dtype == DType::F32 && matches!(dtype, DType::F16 | DType::BF16);
    if !dtype.is_float() || right.dtype != dtype || !wide || left.packed || right.packed || k == 0 {
        return None;
    }
    // D is column-major where its rows lie one after another, and the transpose of a column-major matrix otherwise.
    let flip = write.access.strides[axes + 1] == 1 || columns == 1;
    let bias = |o: &Operand| {
        let along = if flip { axes + 1 } else { axes };
        let moves = |(axis, (&step, &extent)): (usize, (&isize, &usize))| match axis == along {
            true => step == 1 || extent == 1,
            false => step == 0 || extent == 1,
        };
        o.access.strides.iter().zip(shape.iter()).enumerate().all(moves)
    };
    // The library's GELU is as exact as half precision asks for.
    let gelu = write.dtype.size() == 2;
    let epilogue = Epilogue::new(kernel, &Abilities { scale: true, gelu, bias: &bias })?;
    let addend = epilogue.residual.map(|slot| &kernel.reads[slot]);

    // From the inside outwards, batch axes lengthen the rows where the right operand stands still, or form the batch.
    let accesses: Vec<&Access> =
        [&left.access, &right.access, &write.access].into_iter().chain(addend.map(|o| &o.access)).collect();
    let stride = |a: &Access, axis: usize| if a.shape[axis] == 1 { 0 } else { a.strides[axis] };
    let mut m = rows;
    let mut row_axis = axes;
    let mut batch: Option<(usize, usize)> = None;
    for axis in (0..axes).rev().filter(|&axis| shape[axis] != 1) {
        let joins = |skip_right: bool, inner: usize, extent: usize| {
            let mut list = accesses.iter().enumerate().filter(|(i, _)| !(skip_right && *i == 1));
            list.all(|(_, a)| stride(a, axis) == stride(a, inner) * extent as isize)
        };
        if batch.is_none() && stride(&right.access, axis) == 0 && (m == 1 || joins(true, row_axis, m)) {
            if m == 1 {
                row_axis = axis;
            }
            m *= shape[axis];
            continue;
        }
        batch = match batch {
            None => Some((axis, shape[axis])),
            Some((inner, extent)) if joins(false, inner, extent) => Some((inner, extent * shape[axis])),
            Some(_) => return None,
        };
    }
    let (batch_axis, count) = batch.map_or((None, 1), |(axis, count)| (Some(axis), count));
    let steps = |a: &Access, r: usize, c: usize| Steps {
        row: stride(a, r),
        column: stride(a, c),
        batch: batch_axis.map_or(0, |axis| stride(a, axis)),
    };
    let matrix = |slot: usize, operand: &Operand, row: usize, [height, width]: [usize; 2]| {
        let Steps { row, column, batch } = steps(&operand.access, row, axes + 1);
        let (row, column, height, width) =
            if flip { (column, row, width, height) } else { (row, column, height, width) };
        let fits = |along: isize, across: isize, [long, wide]: [usize; 2]| {
            let dense = long == 1 || along == 1;
            let leading = if wide == 1 { long as isize } else { across };
            (dense && leading >= long as isize).then_some(leading as u64)
        };
        let plain = fits(row, column, [height, width]).map(|leading| (false, leading));
        let (transposed, leading) =
            plain.or_else(|| fits(column, row, [width, height]).map(|leading| (true, leading)))?;
        let (offset, stride) = (operand.access.offset.try_into().ok()?, batch.try_into().ok()?);
        Some(Matrix { slot, dtype: operand.dtype, offset, transposed, leading, stride })
    };
    let left = matrix(0, left, row_axis, [m, k])?;
    let right = matrix(1, right, axes, [k, columns])?;
    let d = matrix(kernel.reads.len(), write, row_axis, [m, columns])?;
    let c = match (epilogue.residual, addend) {
        (Some(slot), Some(operand)) => Some(matrix(slot, operand, row_axis, [m, columns])?),
        _ => None,
    };
    // The library writes D as it lies, and indices of one matrix are 32-bit in some of its kernels.
    let small = |n: usize| i32::try_from(n).is_ok();
    let biased = flip || m == rows || epilogue.bias.is_none();
    if d.transposed || !biased || ![m, columns, k, count].into_iter().all(small) {
        return None;
    }
    let vector = |slot: usize| -> Option<Vector> {
        Some(Vector { slot, offset: kernel.reads[slot].access.offset.try_into().ok()? })
    };
    let bias = match epilogue.bias {
        Some(slot) => Some(vector(slot)?),
        None => None,
    };
    let (m, n) = if flip { (columns, m) } else { (m, columns) };
    let (a, b) = if flip { (right, left) } else { (left, right) };
    let call = MatMul {
        m: m as u64,
        n: n as u64,
        k: k as u64,
        batch: count as u64,
        a,
        b,
        c,
        d,
        alpha: epilogue.alpha,
        bias,
        activation: epilogue.activation,
        tf32: target.allow_tf32 && dtype == DType::F32,
    };
    Some((Call::MatMul(call), epilogue.end))
}

/// Products of at most so many rows or columns are rendered.
const THIN: usize = 4;

/// Whether a product or a convolution is rendered even where a library computes it.
fn is_small(kernel: &Kernel, target: &Target) -> bool {
    match (&kernel.template, &kernel.shape[..], &kernel.reads[..]) {
        // A few rows or columns are bound by reading the other operand, which a rendered kernel does once and with the whole body.
        (Template::MatMul, &[.., rows, columns], _) => rows.min(columns) <= THIN,
        // Few tiles leave most multiprocessors idle: a rendered product shares the inner axis among them, too.
        (&Template::Conv { groups, .. }, [images, channels, rest @ ..], [x, w, ..]) => {
            let (outputs, depth) = (channels / groups.max(1), w.access.shape.iter().skip(1).product());
            let positions = rest.iter().fold(*images, |n, &d| n.saturating_mul(d));
            let tiles = groups.saturating_mul(outputs.div_ceil(TILE)).saturating_mul(positions.div_ceil(TILE));
            let few = prologue::unfolds(outputs, depth) && tiles < target.multiprocessors as usize;
            few && !on_tensor_cores(x.dtype, target)
        }
        _ => false,
    }
}

/// Whether libraries compute products of this type on tensor cores.
pub fn on_tensor_cores(dtype: DType, target: &Target) -> bool {
    matches!(dtype, DType::F16 | DType::BF16) || target.allow_tf32 && dtype == DType::F32
}

/// Rows and columns of a tile of an f32 convolution.
const TILE: usize = 64;

fn conv(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let (shape, write) = (&kernel.shape, &kernel.writes[0]);
    let [x, w, ..] = &kernel.reads[..] else { return None };
    let dtype = x.dtype;
    let half = matches!(dtype, DType::F16 | DType::BF16);
    if !(half || dtype == DType::F32) || [w.dtype, write.dtype] != [dtype; 2] || w.packed {
        return None;
    }
    let tensor_cores = on_tensor_cores(dtype, target);
    let channels_last = tensor_cores && [x, w, write].iter().all(|o| o.access.has_channels_last());
    if !channels_last && !w.access.is_contiguous() {
        return None;
    }
    // Padding is the same at both ends, as far as the extents of the result can tell.
    for a in 0..3 {
        let reach = (window.kernel[a].checked_sub(1)?).checked_mul(window.dilations[a])?.checked_add(1)?;
        let padded = x.access.shape[2 + a].checked_add(window.pads[a].checked_mul(2)?)?;
        if padded.checked_sub(reach)? / window.strides[a].max(1) + 1 != shape[2 + a] {
            return None;
        }
    }
    let bias = |o: &Operand| {
        let moves = |(axis, (&step, &extent)): (usize, (&isize, &usize))| match axis {
            1 => step == 1 || extent == 1,
            _ => step == 0 || extent == 1,
        };
        o.access.strides.iter().zip(shape.iter()).enumerate().all(moves)
    };
    let epilogue = Epilogue::new(kernel, &Abilities { scale: false, gelu: false, bias: &bias })?;
    let flat = shape[2] == 1 && window.kernel[0] == 1 && x.access.shape[2] == 1 && window.pads[0] == 0;
    let first = usize::from(flat);
    let image = |slot: usize, operand: &Operand| -> Option<Image> {
        let Access { shape, strides, offset } = &operand.access;
        let kept = |k: &usize| *k < 2 || *k >= 2 + first;
        // An axis of extent 1 has the step that it would have in a dense tensor.
        let mut dense = 1;
        let mut steps = vec![0; shape.len()];
        let order = if channels_last { crate::shape::channels_last(shape.len()) } else { (0..shape.len()).collect() };
        for k in order.into_iter().rev() {
            steps[k] = if shape[k] == 1 { dense } else { u64::try_from(strides[k]).ok()? };
            dense = steps[k].checked_mul(shape[k] as u64)?;
        }
        let axes: Vec<usize> = (0..shape.len()).filter(kept).collect();
        let small = axes.iter().all(|&k| i32::try_from(shape[k]).is_ok() && i32::try_from(steps[k]).is_ok());
        small.then_some(Image {
            slot,
            dtype: operand.dtype,
            offset: (*offset).try_into().ok()?,
            dims: axes.iter().map(|&k| shape[k] as u64).collect(),
            strides: axes.iter().map(|&k| steps[k]).collect(),
        })
    };
    let spatial = |values: &[usize; 3]| values[first..].iter().map(|&v| v as u64).collect::<Vec<_>>();
    let residual = match epilogue.residual {
        Some(slot) => Some(image(slot, &kernel.reads[slot])?),
        None => None,
    };
    let bias = match epilogue.bias {
        Some(slot) => Some(Vector { slot, offset: kernel.reads[slot].access.offset.try_into().ok()? }),
        None => None,
    };
    let call = Conv {
        groups: groups as u64,
        strides: spatial(&window.strides),
        dilations: spatial(&window.dilations),
        pads: spatial(&window.pads),
        x: image(0, x)?,
        w: image(1, w)?,
        y: image(kernel.reads.len(), write)?,
        bias,
        residual,
        activation: epilogue.activation,
        channels_last,
        tf32: target.allow_tf32 && dtype == DType::F32,
    };
    Some((Call::Conv(call), epilogue.end))
}
