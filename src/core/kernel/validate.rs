//! Well-formed kernels: the operands have the number, extents and types that the template describes.
//!
//! The plan's checker and the CPU backend both ask [`Kernel::validate`]. It judges a kernel alone, and does not tell which elements of a
//! buffer the kernel reaches.

use super::{Kernel, Operand, Window};
use crate::error::ensure;
use crate::shape::{Access, Shape};
use crate::target::Family;

/// Index spaces and windows beyond these sizes are refused, so that nothing computed from them overflows.
const MOST_INDICES: u128 = 1 << 44;
pub(super) const MOST_EXTENT: usize = i32::MAX as usize;
const MOST_WINDOW: u128 = 1 << 36;

/// `Err`: expected and found.
pub type Verdict<T = ()> = Result<T, String>;

/// True if extents are few enough to count with, empty axes aside.
pub fn is_countable(shape: &Shape) -> bool {
    shape.iter().try_fold(1u128, |n, &d| n.checked_mul(d.max(1) as u128)).is_some_and(|n| n <= MOST_INDICES)
}

impl Kernel {
    /// Checks that the operands are those of the template, and that nothing computed from their extents overflows.
    ///
    /// # Errors
    /// The expected and the found operands or extents.
    pub fn validate(&self, family: Family) -> Verdict {
        let Kernel { template, shape, reads, writes, .. } = self;
        let core = template.core_reads();
        ensure(is_countable(shape), || format!("an index space of {shape} is too large"))?;
        ensure(reads.len() >= core, || format!("expected at least {core} operands to read, found {}", reads.len()))?;
        ensure(!writes.is_empty(), || "it writes nothing".to_owned())?;
        let rows = template.rows();
        ensure(rows.axes <= shape.len(), || format!("rows of {} axes in {shape}", rows.axes))?;
        for (i, operand) in reads.iter().enumerate() {
            operand_alone(operand).map_err(|e| format!("operand {i} read: {e}"))?;
        }
        self.further().try_for_each(|i| self.reads_extents(i, shape))?;
        if self.repeat().is_some() {
            // Its results have extents of their own.
            writes.iter().try_for_each(operand_alone)?;
            return (template.def().check)(self, family);
        }
        let written = self.written();
        for (i, operand) in writes.iter().enumerate() {
            let name = |e| format!("operand {i} written: {e}");
            operand_alone(operand).and_then(|()| extents(operand, written)).map_err(name)?;
            ensure(!operand.packed, || name("a packed result".into()))?;
        }
        (template.def().check)(self, family)
    }

    /// The extents of what is written: those of the index space, without the axes of a row that is written once.
    pub fn written(&self) -> &[usize] {
        let rows = self.template.rows();
        let rank = self.shape.len();
        if rows.written_once { &self.shape[..rank.saturating_sub(rows.axes)] } else { &self.shape }
    }

    /// True if there is no index to compute.
    pub(super) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Operand `i` read has these extents.
    pub(super) fn reads_extents(&self, i: usize, expected: &[usize]) -> Verdict {
        extents(&self.reads[i], expected).map_err(|e| format!("operand {i} read: {e}"))
    }

    /// Operand `i` read has so many axes.
    pub(super) fn reads_axes(&self, i: usize, expected: usize) -> Verdict {
        let found = &self.reads[i].access.shape;
        ensure(found.len() == expected, || format!("operand {i} read: expected {expected} axes, found {found}"))
    }

    /// The first `n` operands read are floating-point numbers.
    pub(super) fn reads_floats(&self, n: usize) -> Verdict {
        let odd = self.reads[..n].iter().find(|o| !o.dtype.is_float());
        odd.map_or(Ok(()), |o| Err(format!("expected operands of a floating-point type, found {}", o.dtype)))
    }

    /// Each image of operand 0 is contiguous, or, where that is allowed, has its channels last, or gaps between its planes.
    pub(super) fn reads_images(&self, channels_last: bool, gaps: bool) -> Verdict {
        let data = &self.reads[0].access;
        let mut image = data.clone();
        if image.shape.len() > 1 {
            image.shape.remove(0);
            image.strides.remove(0);
        }
        let laid_out = image.is_contiguous() || channels_last && data.has_channels_last();
        ensure(laid_out || gaps && data.has_dense_planes(), || "operand 0 read: each image must be contiguous".into())
    }
}

fn operand_alone(operand: &Operand) -> Verdict {
    let Access { shape, strides, .. } = &operand.access;
    ensure(shape.len() == strides.len(), || {
        format!("expected a stride per axis of {shape}, found {} strides", strides.len())
    })?;
    ensure(is_countable(shape), || format!("an index space of {shape} is too large"))
}

fn extents(operand: &Operand, expected: &[usize]) -> Verdict {
    let shape = &operand.access.shape;
    ensure(shape[..] == *expected, || format!("expected extents {}, found {shape}", Shape::new(expected)))
}

impl Window {
    /// The window at each of `places` on `data`, both `[n, c, spatial..]`, is one that can be counted with.
    pub(super) fn validate(&self, places: &[usize], data: &[usize]) -> Verdict {
        let Window { kernel, strides, dilations, pads } = self;
        let some = kernel.iter().chain(strides).chain(dilations).all(|&n| n > 0);
        ensure(some, || format!("expected extents, strides and dilations above 0, found {self:?}"))?;
        let mut all = 1u128;
        for k in 0..3 {
            let reach = |extent: usize, step: usize| (extent as u128).saturating_sub(1).saturating_mul(step as u128);
            let sizes = [places[2 + k], data[2 + k], kernel[k], strides[k], dilations[k], pads[k]];
            let reaches = [reach(places[2 + k], strides[k]), reach(kernel[k], dilations[k])];
            let sum = sizes.into_iter().map(|n| n as u128).chain(reaches).fold(0, u128::saturating_add);
            all = all.saturating_mul(sum);
            ensure(sum <= MOST_EXTENT as u128 && all <= MOST_WINDOW, || {
                format!("spatial axis {k}: the window reaches too far: {self:?}")
            })?;
        }
        Ok(())
    }
}
