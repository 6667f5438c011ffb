//! Kernels as attention of cuDNN.

use super::{Attention, Call, Image};
use crate::expr::Body;
use crate::kernel::templates::scaled;
use crate::kernel::{Guard, Kernel, Operand, fits_i32};
use crate::target::Target;

/// Columns of queries, and of values, that the library was seen to compute fast.
const WIDEST: u64 = 128;
/// Elements of 16 bits that the library moves at once.
const AT_ONCE: u64 = 8;

/// The attention of a kernel, if its scores are products times one number, of all keys or of those up to a query's own place. The library was tried
/// on compute capability 9.0 alone, with elements that 32 bits count.
pub(super) fn call(kernel: &Kernel, score: &Body, guarded: Option<Guard>, target: &Target) -> Option<Call> {
    let [q, k, v] = &kernel.reads[..] else { return None };
    let o = &kernel.writes[0];
    let operands = [q, k, v, o];
    // The library has no guard, and finite numbers may have infinite products.
    let plain = guarded.is_none() && operands.iter().all(|o| o.dtype == q.dtype && !o.packed);
    if !plain || !q.dtype.is_half() || target.compute != 90 || fits_i32(kernel).is_err() {
        return None;
    }
    let (scale, band) = scaled(score, kernel.shape.len())?;
    let causal = match (band.from, band.to) {
        (None, None) => false,
        (None, Some(0)) => true,
        _ => return None,
    };
    let (q, k, v) = (image(0, q, false)?, image(1, k, true)?, image(2, v, false)?);
    let o = image(kernel.reads.len(), o, false)?;
    let fits = [q.dims[3], o.dims[3]].iter().all(|&n| n.is_multiple_of(AT_ONCE) && (1..=WIDEST).contains(&n));
    let shared = k.dims[1] == v.dims[1] && q.dims[1].is_multiple_of(k.dims[1]);
    let alike = q.dims[..3] == o.dims[..3] && [&k, &v].iter().all(|matrix| matrix.dims[0] == q.dims[0]);
    let empty = q.dims[2] == 0 || k.dims[2] == 0;
    (fits && shared && alike && !empty).then_some(Call::Attention(Attention { q, k, v, o, scale, causal }))
}

/// An operand as matrices `[batch, heads, rows, columns]`: its last two axes, exchanged for keys, and up to three before. Heads that stand still
/// are one. `None` if the library does not take its steps.
fn image(slot: usize, operand: &Operand, exchanged: bool) -> Option<Image> {
    let access = &operand.access;
    let axes: Vec<(u64, u64)> = access
        .shape
        .iter()
        .zip(&access.strides)
        .map(|(&n, &step)| Some((n as u64, step.try_into().ok()?)))
        .collect::<Option<_>>()?;
    let [before @ .., row, column] = &axes[..] else { return None };
    let (rows, columns) = if exchanged { (*column, *row) } else { (*row, *column) };
    let (batch, heads) = match *before {
        [heads] => ((1, 0), heads),
        [batch, heads] => (batch, heads),
        // Heads of keys, and those of queries that share one.
        [batch, (n, step), (_, 0)] => (batch, (n, step)),
        [batch, (1, _), heads] => (batch, heads),
        [batch, (n, outer), (inner, step)] if inner.checked_mul(step) == Some(outer) => {
            (batch, (n.checked_mul(inner)?, step))
        }
        _ => return None,
    };
    let heads = if heads.1 == 0 { (1, 0) } else { heads };
    // An axis of extent 1 gets the step that it would have in a dense tensor.
    let mut dense = 1;
    let mut found = [columns, rows, heads, batch];
    for (n, step) in &mut found {
        if *n == 1 {
            *step = dense;
        }
        dense = dense.max(step.checked_mul(*n)?);
    }
    let whole = |n: u64| n.is_multiple_of(AT_ONCE);
    let offset: u64 = access.offset.try_into().ok()?;
    let fits =
        found[0].1 == 1 && whole(offset) && found[1..].iter().all(|&(n, step)| step > 0 && (n == 1 || whole(step)));
    fits.then(|| Image {
        slot,
        dtype: operand.dtype,
        offset,
        dims: found.iter().rev().map(|axis| axis.0).collect(),
        strides: found.iter().rev().map(|axis| axis.1).collect(),
    })
}
