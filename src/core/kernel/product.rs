//! Products of matrices as GPU texts see them: the facts about a kernel from which its schedule is chosen and its text is printed.
//!
//! ```text
//! result(batch, m, n) = sum over k of a(batch, m, k) * b(batch, k, n)
//! ```
//! Convolutions are such products, too: of weights and of unfolded data, or, where they slide without overlap, of patches of it.

use super::space::{BYTES, Piece, Space, Var, beyond, over};
use super::{Kernel, Operand, Packing, Window};
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
    /// The layout of the right operand's numbers, if they are of few bits.
    pub(super) packing: Option<Packing>,
    /// The phases that are part of the batch, each with an inner extent of its own; `k` is the largest.
    pub(super) phases: Option<Phases>,
}

/// The phases of a transposed convolution: results that the same taps reach. Along an axis, results of one phase lie a stride apart.
///
/// ```text
/// result    u dilation + e + q stride - pad     (u, e) is the phase, q the position
/// tap       u + j cycle                         cycle = stride / apart, apart = gcd (stride, dilation)
/// data      q - j back                          back = dilation / apart
/// ```
/// Phases with `e > 0` have no tap.
pub(super) struct Phases {
    /// Values of `u` per axis.
    pub(super) cycle: [usize; 3],
    /// Values of `e` per axis.
    pub(super) apart: [usize; 3],
    /// Steps between taps per axis; 1 where there is one tap.
    dilations: [usize; 3],
    /// Extents of the window.
    pub(super) kernel: [usize; 3],
    /// Input channels of a group.
    pub(super) channels: usize,
}

impl Phases {
    pub(super) fn new(channels: usize, window: &Window) -> Phases {
        let Window { kernel, strides, .. } = *window;
        let dilations = std::array::from_fn(|a| if kernel[a] > 1 { window.dilations[a] } else { 1 });
        let apart: [usize; 3] = std::array::from_fn(|a| gcd(strides[a], dilations[a]));
        let cycle = std::array::from_fn(|a| strides[a] / apart[a]);
        Phases { cycle, apart, dilations, kernel, channels }
    }

    /// The number of phases.
    pub(super) fn count(&self) -> usize {
        self.cycle.iter().chain(&self.apart).fold(1, |count, &n| count.saturating_mul(n))
    }

    /// How far the phases of an axis lie apart.
    pub(super) fn reach(&self, axis: usize) -> usize {
        (self.cycle[axis] - 1).saturating_mul(self.dilations[axis]).saturating_add(self.apart[axis] - 1)
    }

    /// The most taps that a phase has, per axis.
    pub(super) fn taps(&self) -> [usize; 3] {
        std::array::from_fn(|a| self.kernel[a].div_ceil(self.cycle[a]))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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
        Product {
            batch,
            m,
            k,
            n,
            a,
            b,
            result,
            element,
            is_uniform,
            copies_async,
            is_guarded: false,
            packing: None,
            phases: None,
        }
    }

    /// A product by numbers of few bits. Its right operand has no batch, so that all axes but the last are rows.
    pub(super) fn of_bits(kernel: &Kernel) -> Product {
        let (shape, left) = (&kernel.shape, &kernel.reads[0]);
        let rank = shape.len();
        let extents = &left.access.shape;
        let none = || Var { name: "batch", pieces: Vec::new() };
        let (wide, packing) = (BYTES / left.dtype.size(), kernel.packing().0);
        // 16 bytes of a column are of one block, and eight numbers are whole words.
        let b_wide = packing.by_words
            && packing.bits != 2
            && packing.words_per_block.is_multiple_of(4)
            && kernel.reads[1].access.offset % 4 == 0;
        let a = Side {
            slot: 0,
            space: vec![none(), over("m", extents, 0..rank - 1), over("k", extents, [rank - 1])],
            along_k: true,
            is_vectorizable: is_f32_value(left.dtype) && is_vectorizable(left, rank - 1, wide),
            axes: [Some(rank - 1), None],
        };
        Product {
            batch: 1,
            m: shape[..rank - 1].iter().product(),
            k: extents[rank - 1],
            n: shape[rank - 1],
            a,
            b: Side { slot: 1, space: Vec::new(), along_k: true, is_vectorizable: b_wide, axes: [None; 2] },
            result: vec![none(), over("m", shape, 0..rank - 1), over("n", shape, [rank - 1])],
            element: left.dtype,
            // The numbers become floats of the left operand's type.
            is_uniform: true,
            copies_async: false,
            is_guarded: false,
            packing: Some(packing),
            phases: None,
        }
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
            packing: None,
            phases: None,
        }
    }

    /// A transposed convolution, per group: weights of `[outputs * phases, taps * inputs]` times data of `[taps * inputs, images *
    /// positions]`. If it is cut by phase, each of the [`Phases`] is a product of its own, whose inner axis has the taps of this phase alone.
    /// Where neighbouring channels of both operands lie side by side, data are the left operand: then those of the result are stored
    /// together, too.
    ///
    /// Sums run over taps, and for each tap over channels. Where there is one phase and the taps of a filter lie side by side, they run
    /// over channels, and for each channel over taps.
    pub(super) fn conv_transpose(kernel: &Kernel, groups: usize, window: &Window, by_phase: bool) -> Product {
        let (s, x) = (&kernel.shape, &kernel.reads[0].access.shape);
        let (out, input) = (s[1] / groups, x[1] / groups);
        let phases = Phases::new(input, window);
        let taps = phases.taps();
        let Window { strides, pads, .. } = window;
        let signed = |n: usize| n as isize;
        // The first position of an axis, and the number of them.
        let covered = |a: usize| {
            let first = -(signed(phases.reach(a)) - signed(pads[a])).div_euclid(signed(strides[a]));
            let end = signed((s[a + 2] + pads[a]).div_ceil(strides[a]));
            (first, if s[a + 2] == 0 { 0 } else { (end - first) as usize })
        };
        let positions: [(isize, usize); 3] = std::array::from_fn(covered);
        let [data_last, weights_last] = [0, 1].map(|slot| has_channels_last(&kernel.reads[slot].access));
        let is_last = data_last && weights_last;
        let (down, over_) = if is_last { ("n", "m") } else { ("m", "n") };
        let taps_last = phases.count() == 1 && !data_last && !weights_last;
        // The two pieces of an axis whose coordinates are the phase; `e` leads beyond the window.
        let of_result =
            |a: usize| [Piece::new(a + 2, phases.cycle[a], phases.dilations[a]), Piece::new(a + 2, phases.apart[a], 1)];
        let of_weights =
            |a: usize| [Piece::new(a + 2, phases.cycle[a], 1), Piece::new(a + 2, phases.apart[a], window.kernel[a])];
        let of_data = |a: usize| [phases.cycle[a], phases.apart[a]].map(|extent| Piece::new(a + 2, extent, 0));
        type Each<'a> = &'a dyn Fn(usize) -> [Piece; 2];
        let batch = |axis: usize, step: usize, each: Each| {
            let mut pieces = vec![Piece::new(axis, groups, step)];
            pieces.extend((0..3).filter(|_| by_phase).flat_map(each));
            Var { name: "batch", pieces }
        };
        // The phases of outputs, or the outputs of phases.
        let outputs = |each: Each| {
            let mut pieces: Vec<Piece> = (0..3).filter(|_| !by_phase).flat_map(each).collect();
            pieces.insert(if is_last { pieces.len() } else { 0 }, Piece::new(1, out, 1));
            Var { name: down, pieces }
        };
        let inner = |axis: usize, each: &dyn Fn(usize) -> Piece| {
            let mut pieces: Vec<Piece> = (0..3).map(each).collect();
            pieces.insert(if taps_last { 0 } else { 3 }, Piece::new(axis, input, 1));
            Var { name: "k", pieces }
        };
        let along = |each: &dyn Fn(usize) -> Piece| Var {
            name: over_,
            pieces: [Piece::new(0, s[0], 1)].into_iter().chain((0..3).map(each)).collect(),
        };
        let weights = vec![
            batch(0, input, &of_weights),
            outputs(&of_weights),
            inner(0, &|a| Piece::new(a + 2, taps[a], phases.cycle[a])),
        ];
        let back =
            |a: usize| Piece { step: -signed(phases.dilations[a] / phases.apart[a]), ..Piece::new(a + 2, taps[a], 1) };
        let from = |a: usize| Piece { start: positions[a].0, ..Piece::new(a + 2, positions[a].1, 1) };
        let data = vec![batch(1, input, &of_data), inner(1, &back), along(&from)];
        let to = |a: usize| Piece {
            start: positions[a].0 * signed(strides[a]) - signed(pads[a]),
            ..Piece::new(a + 2, positions[a].1, strides[a])
        };
        let mut result = vec![batch(1, out, &of_result), outputs(&of_result), along(&to)];
        let (rows, count) = if by_phase { (out, phases.count()) } else { (out * phases.count(), 1) };
        let columns = positions.iter().fold(s[0], |columns, (_, extent)| columns * extent);
        let weights = side(kernel, 1, weights, (taps_last, down));
        let data = side(kernel, 0, data, (kernel.reads[0].access.strides[1] == 1, over_));
        let (a, b, m, n) = if is_last { (data, weights, columns, rows) } else { (weights, data, rows, columns) };
        if is_last {
            result.swap(1, 2);
        }
        Product {
            batch: groups * count,
            m,
            k: taps.iter().product::<usize>() * input,
            n,
            copies_async: a.is_vectorizable && b.is_vectorizable,
            a,
            b,
            result,
            element: kernel.reads[0].dtype,
            is_uniform: kernel.reads[1].dtype == kernel.reads[0].dtype,
            is_guarded: true,
            packing: None,
            phases: by_phase.then_some(phases),
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
            packing: None,
            phases: None,
        }
    }

    /// True for the left and for the right operand, in this order, if it has floats that lie four at a time along one of its variables, nowhere
    /// beyond its axes.
    pub(super) fn in_fours(&self, kernel: &Kernel) -> [bool; 2] {
        [(&self.a, "m"), (&self.b, "n")].map(|(side, across)| {
            let operand = &kernel.reads[side.slot];
            let is_whole = operand.dtype == DType::F32 && beyond(&side.space, &operand.access.shape).is_empty();
            is_whole && lies_together(kernel, side.slot, &side.space, if side.along_k { "k" } else { across }, 4)
        })
    }

    /// The number of tiles of `rows` by `columns` in the results.
    pub(super) fn tiles(&self, rows: usize, columns: usize) -> usize {
        self.m.div_ceil(rows).saturating_mul(self.n.div_ceil(columns))
    }

    /// Multiplications, with those that tiles of `rows` by `columns` do beyond the results.
    pub(super) fn work(&self, [rows, columns]: [usize; 2]) -> u128 {
        let sums = [self.batch, self.tiles(rows, columns), rows, columns].iter().map(|&n| n as u128).product::<u128>();
        match &self.phases {
            // Each tap is one phase's.
            Some(phases) => {
                let depth = phases.kernel.iter().map(|&n| n as u128).product::<u128>() * phases.channels as u128;
                sums / (phases.count() as u128).max(1) * depth
            }
            None => sums * self.k as u128,
        }
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
    let element = kernel.reads[slot].dtype;
    let is_half = element.is_half() && kernel.reads[..2].iter().all(|o| o.dtype == element);
    is_half && lies_together(kernel, slot, space, along, BYTES / element.size())
}

/// True if so many neighbours of an operand that nothing is computed from first lie side by side along a variable, all of them within the
/// operand's extents or none.
fn lies_together(kernel: &Kernel, slot: usize, space: &Space, along: &str, width: usize) -> bool {
    let access = &kernel.reads[slot].access;
    if kernel.prologue(slot).is_some() || access.shape.contains(&0) {
        return false;
    }
    let outside = beyond(space, &access.shape);
    let origin = |piece: &Piece| piece.start * access.strides[piece.axis];
    let start = access.offset + space.iter().flat_map(|var| &var.pieces).map(origin).sum::<isize>();
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
