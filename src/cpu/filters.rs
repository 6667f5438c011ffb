//! Gradients of convolutions by their filters, as a template of their own: element by element. Plans for the CPU have them as convolutions,
//! which are faster; other backends are held against this.

use super::block::Repr;
use super::map::{Core, CoreSpec};
use super::nest::Motion;
use super::operands::stored;
use super::task::Args;
use plimsoll_core::error::ensure;
use plimsoll_core::kernel::{Kernel, Template, Window};
use plimsoll_core::shape::Access;

/// Prepares the gradient of a convolution by its filters.
pub fn core(kernel: &Kernel) -> Result<CoreSpec<'_>, String> {
    let Template::ConvFilters { groups, rows, window } = &kernel.template else {
        return Err(format!("gradients of filters of template '{}'", kernel.template.name()));
    };
    for operand in &kernel.reads[..2] {
        ensure(stored(operand)? == Repr::F32, || format!("gradients of filters of {}", operand.dtype))?;
    }
    let rank = kernel.shape.len();
    let mut number = Motion::still(rank);
    for axis in 0..rank {
        number.steps[axis] = kernel.shape[axis + 1..].iter().product::<usize>() as isize;
    }
    let [data, gradient] = [0, 1].map(|i| kernel.reads[i].access.clone());
    let shape: [usize; 6] = kernel.shape[..].try_into().map_err(|_| format!("an index space of {}", kernel.shape))?;
    let images = gradient.shape[0] * rows / shape[0];
    let lines = gradient.shape[3] / rows;
    Ok(CoreSpec {
        repr: Repr::F32,
        motions: vec![number],
        cost: (images * gradient.shape[2] * lines * gradient.shape[4]) as f64,
        tables: 0,
        build: Box::new(move |steps, _| {
            let step = steps[0];
            Box::new(Filters {
                groups: *groups,
                rows: *rows,
                window: window.clone(),
                images,
                lines,
                shape,
                data,
                gradient,
                step,
            })
        }),
    })
}

struct Filters {
    groups: usize,
    rows: usize,
    window: Window,
    /// Images and rows of a part.
    images: usize,
    lines: usize,
    shape: [usize; 6],
    data: Access,
    gradient: Access,
    /// From an element's number to the next one's, along the innermost axis.
    step: isize,
}

impl Filters {
    /// The element of this number.
    ///
    /// # Safety
    /// `args` must be the kernel's.
    unsafe fn element(&self, args: &Args, number: usize) -> f32 {
        let (mut index, mut rest) = ([0; 6], number);
        for axis in (0..6).rev() {
            (index[axis], rest) = (rest % self.shape[axis], rest / self.shape[axis]);
        }
        let [part, o, c, tap @ ..] = index;
        let channel = o / (self.shape[1] / self.groups) * self.shape[2] + c;
        let (first, top) = (part / self.rows * self.images, part % self.rows * self.lines);
        let load = |arg: usize, access: &Access, index: [usize; 5]| {
            let at = access.at(&index) * size_of::<f32>() as isize;
            // SAFETY: the index is inside the operand, which was checked to span its memory.
            unsafe { args.at(arg, at).cast::<f32>().read() }
        };
        let mut sum = 0.0;
        for n in first..first + self.images {
            for depth in 0..self.gradient.shape[2] {
                for line in top..top + self.lines {
                    for column in 0..self.gradient.shape[4] {
                        let place = [depth, line, column];
                        let Some([z, y, x]) = self.under(place, tap) else { continue };
                        let gradient = load(1, &self.gradient, [n, o, depth, line, column]);
                        sum += gradient * load(0, &self.data, [n, channel, z, y, x]);
                    }
                }
            }
        }
        sum
    }

    /// The element of the data under a tap of the window at a place; `None` in the padding.
    fn under(&self, place: [usize; 3], tap: [usize; 3]) -> Option<[usize; 3]> {
        let Window { strides, dilations, pads, .. } = &self.window;
        let mut at = [0; 3];
        for a in 0..3 {
            let behind = place[a] * strides[a] + tap[a] * dilations[a];
            at[a] = behind.checked_sub(pads[a]).filter(|&i| i < self.data.shape[a + 2])?;
        }
        Some(at)
    }
}

impl Core for Filters {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        for i in 0..n {
            let number = at[0] + (start + i) as isize * self.step;
            // SAFETY: `args` are the kernel's; `to` has room for `n` elements.
            unsafe { to.cast::<f32>().add(i).write(self.element(args, number as usize)) };
        }
        to
    }
}
