//! Products of matrices as GPU texts see them: the facts about a kernel from which its schedule is chosen and its text is printed.
//!
//! ```text
//! result(batch, m, n) = sum over k of a(batch, m, k) * b(batch, k, n)
//! ```
//! Convolutions are such products, too: of weights and of unfolded data, or, where they slide without overlap, of patches of it.

use super::space::{BYTES, Piece, Space, Var, beyond, over};
use super::{Kernel, Operand, Window};
use crate::dtype::DType;
use crate::shape::Access;

/// A batch of matrix products.
pub(super) struct Product {
    /// Number of products.
    pub(super) batch: usize,
    /// Rows of `a` and of the result.
    pub(super) m: usize,
    /// Columns of `a`, rows of `b`.
    pub(super) k: usize,
    /// Columns of `b` and of the result.
    pub(super) n: usize,
    /// The left operand.
    pub(super) a: Side,
    /// The right operand.
    pub(super) b: Side,
    /// The result's axes by the variables `batch`, `m` and `n`.
    pub(super) result: Space,
    /// The type of the first operand's elements.
    pub(super) element: DType,
    /// True if both operands have that type.
    pub(super) is_uniform: bool,
    /// True if both operands can be copied to workgroup memory 16 bytes at a time, while others are computed with.
    pub(super) copies_async: bool,
    /// True if it also reads beyond its operands' axes, where they are zero.
    pub(super) is_guarded: bool,
}

/// An operand of a product.
pub(super) struct Side {
    /// Its slot among the kernel's operands.
    pub(super) slot: usize,
    /// Its axes by the product's variables; empty where its elements are not addressed by them.
    pub(super) space: Space,
    /// True if neighbours along `k` lie side by side, rather than those along the other axis.
    pub(super) along_k: bool,
    /// True if 16 bytes of it can be read at once.
    pub(super) is_vectorizable: bool,
    /// Its own axis that is `k`, and the one that is all of the other variable.
    pub(super) axes: [Option<usize>; 2],
}

/// True if an operand has elements, `width` of which can be moved at a time along an axis.
pub(super) fn is_vectorizable(operand: &Operand, axis: usize, width: usize) -> bool {
    !operand.access.shape.contains(&0) && operand.access.is_vectorizable(axis, width)
}

/// True if an operand's elements are computed with as `f32`.
fn is_f32_value(dtype: DType) -> bool {
    dtype == DType::F32 || dtype.is_half()
}

/// The first of the axes that form the rows of a matrix product. Batch axes along which the right operand stands still lengthen the rows.
pub(super) fn first_row_axis(kernel: &Kernel) -> usize {
    let batch = kernel.shape.len() - 2;
    let beside = kernel.prologue(1).map_or(0..0, |(_, own)| own);
    let still = |axis: usize| {
        let mut right = beside.clone().chain([1]).map(|slot| &kernel.operand(slot).access);
        right.all(|access| access.shape[axis] == 1 || access.strides[axis] == 0)
    };
    (0..batch).rev().take_while(|&axis| still(axis)).last().unwrap_or(batch)
}

impl Product {
    /// A matrix product whose rows are the axes from `rows` to the last but one. Transposed, its columns serve as rows: `(a b)' = b' a'`.
    pub(super) fn matmul(kernel: &Kernel, rows: usize, transposed: bool) -> Product {
        let (shape, reads) = (&kernel.shape, &kernel.reads);
        let rank = shape.len();
        let [height, width]: [usize; 2] = [shape[rows..rank - 1].iter().product(), shape[rank - 1]];
        let (m, n) = if transposed { (width, height) } else { (height, width) };
        let (down, over_) = if transposed { ("n", "m") } else { ("m", "n") };
        let axes = |slot: usize| -> Space {
            let extents = &reads[slot].access.shape;
            let [first, last] = if slot == 0 {
                [over(down, extents, rows..rank - 1), over("k", extents, [rank - 1])]
            } else {
                [over("k", extents, [rank - 2]), over(over_, extents, [rank - 1])]
            };
            vec![over("batch", extents, 0..rows), first, last]
        };
        let dense = |slot: usize, axis: usize| reads[slot].access.strides[axis] == 1;
        let element = reads[0].dtype;
        let is_uniform = reads[1].dtype == element;
        let can_be = |slot: usize, axis: usize| {
            let plain = is_uniform && is_f32_value(element) && kernel.prologue(slot).is_none();
            plain && is_vectorizable(&reads[slot], axis, BYTES / element.size())
        };
        // All rows are one axis if no batch axis lengthens them.
        let single = (rows == rank - 2).then_some(rank - 2);
        let left = |along_k: bool| Side {
            slot: 0,
            space: axes(0),
            along_k,
            is_vectorizable: can_be(0, if transposed && dense(0, rank - 2) { rank - 2 } else { rank - 1 }),
            axes: [Some(rank - 1), single],
        };
        let right = |along_k: bool| Side {
            slot: 1,
            space: axes(1),
            along_k,
            is_vectorizable: can_be(1, if transposed || !dense(1, rank - 1) { rank - 2 } else { rank - 1 }),
            axes: [Some(rank - 2), Some(rank - 1)],
        };
        let (a, b) = if transposed {
            (right(dense(1, rank - 2)), left(!dense(0, rank - 2)))
        } else {
            let along_k = !dense(0, rank - 2) || dense(0, rank - 1);
            (left(along_k), right(!dense(1, rank - 1) && dense(1, rank - 2)))
        };
        let mut result =
            vec![over("batch", shape, 0..rows), over(down, shape, rows..rank - 1), over(over_, shape, [rank - 1])];
        result.sort_by_key(|var| ["batch", "m", "n"].iter().position(|name| *name == var.name));
        let copies_async = a.is_vectorizable && b.is_vectorizable && !transposed;
        let batch = shape[..rows].iter().product();
        let k = reads[0].access.shape[rank - 1];
        Product { batch, m, k, n, a, b, result, element, is_uniform, copies_async, is_guarded: false }
    }

    /// A convolution, per group of channels: weights of `[outputs, inputs * window]` times data unfolded to `[inputs * window, images *
    /// positions]`. With `patches`, an order of the weights' axes but the first, both are addressed in that order.
    pub(super) fn conv(kernel: &Kernel, groups: usize, window: &Window, patches: Option<[usize; 4]>) -> Product {
        let (shape, reads) = (&kernel.shape, &kernel.reads);
        let (out, input) = (shape[1] / groups, reads[1].access.shape[1]);
        let order = patches.unwrap_or([1, 2, 3, 4]);
        let group = |extent, step| Piece::new(0, extent, step);
        let weights = vec![
            Var { name: "batch", pieces: vec![group(groups, out)] },
            Var { name: "m", pieces: vec![group(out, 1)] },
            over("k", &reads[1].access.shape, order),
        ];
        let under = |axis: usize| match axis {
            1 => Piece::new(1, input, 1),
            _ => Piece::new(axis, window.kernel[axis - 2], window.dilations[axis - 2]),
        };
        let position =
            |axis: usize| Piece::new(axis, shape[axis], if axis == 0 { 1 } else { window.strides[axis - 2] });
        let data = vec![
            Var { name: "batch", pieces: vec![Piece::new(1, groups, input)] },
            Var { name: "k", pieces: order.map(under).into() },
            Var { name: "n", pieces: [0, 2, 3, 4].map(position).into() },
        ];
        let channel = |extent, step| Piece::new(1, extent, step);
        let result = vec![
            Var { name: "batch", pieces: vec![channel(groups, out)] },
            Var { name: "m", pieces: vec![channel(out, 1)] },
            over("n", shape, [0, 2, 3, 4]),
        ];
        let dense = patches.is_some();
        let side = |slot, space, along_k| Side { slot, space, along_k, is_vectorizable: dense, axes: [None; 2] };
        Product {
            batch: groups,
            m: out,
            k: input * window.kernel.iter().product::<usize>(),
            n: shape[0] * shape[2] * shape[3] * shape[4],
            a: side(1, weights, true),
            b: side(0, data, dense),
            result,
            element: reads[0].dtype,
            is_uniform: reads[1].dtype == reads[0].dtype,
            copies_async: dense,
            is_guarded: !dense,
        }
    }

    /// A transposed convolution, per group: weights of `[outputs * phases, taps * inputs]` times data of `[taps * inputs, images *
    /// positions]`. Position `q` and phase `p` of an axis stand for `p + q * stride` of the padded result; taps `p + j * stride` from
    /// `q - j` reach it. Where neighbouring channels of both operands lie side by side, data are the left operand: then those of the result
    /// are stored together, too.
    pub(super) fn conv_transpose(kernel: &Kernel, groups: usize, window: &Window) -> Product {
        let (s, x) = (&kernel.shape, &kernel.reads[0].access.shape);
        let (out, input) = (s[1] / groups, x[1] / groups);
        let phases = window.strides;
        let taps: [usize; 3] = std::array::from_fn(|a| window.kernel[a].div_ceil(phases[a]));
        let cut: [usize; 3] = std::array::from_fn(|a| window.pads[a] % phases[a]);
        let covered = |a: usize| if s[a + 2] == 0 { 0 } else { (s[a + 2] + cut[a]).div_ceil(phases[a]) };
        let positions: [usize; 3] = std::array::from_fn(covered);
        let [data_last, weights_last] = [0, 1].map(|slot| has_channels_last(&kernel.reads[slot].access));
        let is_last = data_last && weights_last;
        let (down, over_) = if is_last { ("n", "m") } else { ("m", "n") };
        let var = |name, first: Option<Piece>, each: &dyn Fn(usize) -> Piece, last: Option<Piece>| {
            let pieces = first.into_iter().chain((0..3).map(each)).chain(last).collect();
            Var { name, pieces }
        };
        // The phases of outputs, or the outputs of phases.
        let outputs = |each: &dyn Fn(usize) -> Piece| {
            let channels = Some(Piece::new(1, out, 1));
            if is_last { var(down, None, each, channels) } else { var(down, channels, each, None) }
        };
        let group = |axis, step| Var { name: "batch", pieces: vec![Piece::new(axis, groups, step)] };
        let weights = vec![
            group(0, input),
            outputs(&|a| Piece::new(a + 2, phases[a], 1)),
            var("k", None, &|a| Piece::new(a + 2, taps[a], phases[a]), Some(Piece::new(0, input, 1))),
        ];
        let back = |a: usize| Piece { step: -(window.dilations[a] as isize), ..Piece::new(a + 2, taps[a], 1) };
        let from =
            |a: usize| Piece { start: (window.pads[a] / phases[a]) as isize, ..Piece::new(a + 2, positions[a], 1) };
        let data = vec![
            group(1, input),
            var("k", None, &back, Some(Piece::new(1, input, 1))),
            var(over_, Some(Piece::new(0, x[0], 1)), &from, None),
        ];
        let to = |a: usize| Piece { start: -(cut[a] as isize), ..Piece::new(a + 2, positions[a], phases[a]) };
        let mut result = vec![
            group(1, out),
            outputs(&|a| Piece::new(a + 2, phases[a], 1)),
            var(over_, Some(Piece::new(0, s[0], 1)), &to, None),
        ];
        let product = |first: usize, each: [usize; 3]| each.iter().product::<usize>() * first;
        let (rows, columns) = (product(out, phases), product(s[0], positions));
        let weights = side(kernel, 1, weights, (false, down));
        let data = side(kernel, 0, data, (kernel.reads[0].access.strides[1] == 1, over_));
        let (a, b, m, n) = if is_last { (data, weights, columns, rows) } else { (weights, data, rows, columns) };
        if is_last {
            result.swap(1, 2);
        }
        Product {
            batch: groups,
            m,
            k: product(input, taps),
            n,
            copies_async: a.is_vectorizable && b.is_vectorizable,
            a,
            b,
            result,
            element: kernel.reads[0].dtype,
            is_uniform: kernel.reads[1].dtype == kernel.reads[0].dtype,
            is_guarded: true,
        }
    }

    /// The gradient of a convolution by its filters, per part of the positions and group: gradients by the result of `[outputs, positions]`
    /// times data of `[positions, taps * inputs]`. Columns stand in the order in which neighbours of the data lie side by side.
    pub(super) fn conv_filters(kernel: &Kernel, groups: usize, rows: usize, window: &Window) -> Product {
        let [x, dy] = [0, 1].map(|slot| &kernel.reads[slot].access);
        let (shape, positions) = (&kernel.shape, &dy.shape);
        let (out, input) = (shape[1] / groups, shape[2]);
        let (images, lines) = (positions[0] * rows / shape[0], positions[3] / rows);
        // Positions stand `steps` elements apart.
        let batch = |steps: [usize; 3], per_group: usize| Var {
            name: "batch",
            pieces: vec![
                Piece::new(0, shape[0] / rows, images),
                Piece::new(3, rows, lines * steps[1]),
                Piece::new(1, groups, per_group),
            ],
        };
        let along = |steps: [usize; 3]| Var {
            name: "k",
            pieces: vec![
                Piece::new(0, images, 1),
                Piece::new(2, positions[2], steps[0]),
                Piece::new(3, lines, steps[1]),
                Piece::new(4, positions[4], steps[2]),
            ],
        };
        let columns = |axis: usize, tap: &dyn Fn(usize) -> Piece| {
            let (channels, taps) = (vec![Piece::new(axis, input, 1)], (0..3).map(tap).collect());
            let pieces = if has_channels_last(x) { [taps, channels] } else { [channels, taps] };
            Var { name: "n", pieces: pieces.concat() }
        };
        let under = |a: usize| Piece {
            start: -(window.pads[a] as isize),
            ..Piece::new(a + 2, window.kernel[a], window.dilations[a])
        };
        let rows_of = |axis: usize| Var { name: "m", pieces: vec![Piece::new(axis, out, 1)] };
        let data = vec![batch(window.strides, input), along(window.strides), columns(1, &under)];
        let gradient = vec![batch([1; 3], out), rows_of(1), along([1; 3])];
        let parts = vec![Piece::new(0, shape[0], 1), Piece::new(1, groups, out)];
        let result = vec![
            Var { name: "batch", pieces: parts },
            rows_of(1),
            columns(2, &|a| Piece::new(a + 3, window.kernel[a], 1)),
        ];
        let [along_a, along_b] = [dy, x].map(|access| !has_channels_last(access));
        let (a, b) = (side(kernel, 1, gradient, (along_a, "m")), side(kernel, 0, data, (along_b, "n")));
        Product {
            batch: shape[0] * groups,
            m: out,
            k: images * positions[2] * lines * positions[4],
            n: input * window.kernel.iter().product::<usize>(),
            copies_async: a.is_vectorizable && b.is_vectorizable,
            a,
            b,
            result,
            element: kernel.reads[0].dtype,
            is_uniform: kernel.reads[1].dtype == kernel.reads[0].dtype,
            is_guarded: true,
        }
    }

    /// The number of tiles of `rows` by `columns` in the results.
    pub(super) fn tiles(&self, rows: usize, columns: usize) -> usize {
        self.m.div_ceil(rows).saturating_mul(self.n.div_ceil(columns))
    }
}

/// True if the channels of a position, of which there are several, lie one after another.
fn has_channels_last(access: &Access) -> bool {
    access.strides[1] == 1 && access.shape[1] > 1
}

/// An operand of a product at places of its axes, beyond which it is zero. `along_k` tells if neighbours along the inner axis lie side by
/// side, rather than those along the variable `across`.
fn side(kernel: &Kernel, slot: usize, space: Space, (along_k, across): (bool, &str)) -> Side {
    let is_vectorizable = is_part_vectorizable(kernel, slot, &space, if along_k { "k" } else { across });
    Side { slot, is_vectorizable, space, along_k, axes: [None; 2] }
}

/// True if neighbouring 16-bit floats of an operand, as many as 16 bytes hold, lie side by side along a variable, all of them within the
/// operand's extents or none.
fn is_part_vectorizable(kernel: &Kernel, slot: usize, space: &Space, along: &str) -> bool {
    let operand = &kernel.reads[slot];
    let (access, element) = (&operand.access, operand.dtype);
    let is_half = element.is_half() && kernel.reads[..2].iter().all(|o| o.dtype == element);
    if !is_half || kernel.prologue(slot).is_some() || access.shape.contains(&0) {
        return false;
    }
    let outside = beyond(space, &access.shape);
    let origin = |piece: &Piece| piece.start * access.strides[piece.axis];
    let start = access.offset + space.iter().flat_map(|var| &var.pieces).map(origin).sum::<isize>();
    let width = BYTES / element.size();
    let mut run = 1;
    let mut aligned = start.unsigned_abs().is_multiple_of(width);
    for var in space {
        let mut dense = var.name == along;
        for piece in var.pieces.iter().rev().filter(|p| p.extent != 1) {
            let step = access.strides[piece.axis] * piece.step;
            dense &= step == run as isize && !outside.contains_key(&piece.axis);
            if dense {
                run *= piece.extent;
            } else {
                aligned &= step.unsigned_abs().is_multiple_of(width);
            }
        }
    }
    aligned && run.is_multiple_of(width)
}
