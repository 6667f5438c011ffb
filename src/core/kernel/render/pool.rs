//! Windows that slide over images.

use super::locate::sum;
use super::scalar::Type::{F32, I32};
use super::scalar::{convert, extreme};
use super::{Module, kernels};
use crate::kernel::algorithm::{Elements, Text};
use crate::kernel::meaning::mismatch;
use crate::kernel::{Pool, Template, Window};

kernels! {
    |module, _| module.pool() => {
        pool "pool.wgsl": "maximum or mean of a window",
    }
    |module, text| module.pool_grad(text) => {
        pool_grad "pool_grad.wgsl": "gradient of a maximum of windows",
        pool_grad_vec "pool_grad_vec.cu": "the same of several neighbouring channels",
    }
}

impl Module<'_> {
    /// Constants of a windowed template: output extents, data extents, strides of the data (and weights), the window; which of the
    /// spatial axes goes by the names of Z, Y and X.
    pub(super) fn windowed(&mut self, window: &Window, channels: Option<(usize, usize)>, axes: &[usize]) {
        if let Some((out, input)) = channels {
            self.int("GROUP_OUT", out as isize);
            self.int("GROUP_IN", input as isize);
        }
        let data = self.access(0);
        let shape = &self.kernel.shape;
        let order = [0, 1].into_iter().chain(axes.iter().map(|axis| axis + 2));
        for (k, axis) in order.zip(["N", "C", "Z", "Y", "X"]) {
            self.int(format!("OUT_{axis}"), shape[k] as isize);
            self.int(format!("IN_{axis}"), data.shape[k] as isize);
            self.int(format!("DATA_{axis}"), data.strides[k]);
            if self.kernel.template.core_reads() > 1 {
                self.int(format!("WEIGHT_{axis}"), self.access(1).strides[k]);
            }
            if let Some(k) = k.checked_sub(2) {
                self.int(format!("KERNEL_{axis}"), window.kernel[k] as isize);
                self.int(format!("STRIDE_{axis}"), window.strides[k] as isize);
                self.int(format!("DILATION_{axis}"), window.dilations[k] as isize);
                self.int(format!("PAD_{axis}"), window.pads[k] as isize);
            }
        }
        self.int("DATA_0", data.offset);
        if self.kernel.template.core_reads() > 1 {
            self.int("WEIGHT_0", self.access(1).offset);
        }
    }

    fn pool(&mut self) -> Result<(), String> {
        let &Template::Pool { ref window, pool } = &self.kernel.template else { mismatch(&self.kernel.template) };
        self.windowed(window, None, &[0, 1, 2]);
        self.loader("data", 0);
        let ty = if pool == Pool::Max { self.value[0] } else { F32 };
        let lowest = ty.bounds().0;
        self.start("START", if pool == Pool::Max { lowest } else { 0.0 }, ty);
        let combine = match pool {
            Pool::Max => format!("return {}(a, b);", extreme(true, ty)),
            _ => "return a + b;".into(),
        };
        self.function("combine", &[("a", ty), ("b", ty)], Some(ty), vec![combine]);
        let finish = if pool == Pool::Max { "return a;" } else { "return a / f32(max(count, 1));" };
        self.function("finish", &[("a", ty), ("count", I32)], Some(ty), vec![finish.into()]);
        for (a, axis) in ["Z", "Y", "X"].into_iter().enumerate() {
            let extent = self.access(0).shape[a + 2] as isize;
            let (low, high) = match pool {
                Pool::MeanPadded { pads_end } => (-(window.pads[a] as isize), extent + pads_end[a] as isize),
                _ => (0, extent),
            };
            self.int(format!("LOW_{axis}"), low);
            self.int(format!("HIGH_{axis}"), high);
        }
        self.walk_channels();
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element();
        Ok(())
    }

    /// Neighbouring invocations have neighbouring channels, if these lie side by side.
    fn walk_channels(&mut self) {
        let written = &self.kernel.writes[0].access;
        if written.has_channels_last() && !written.is_contiguous() {
            self.flags.push("CHANNELS_LAST");
        }
    }

    fn pool_grad(&mut self, text: &Text) -> Result<(), String> {
        let Template::PoolGrad { window } = &self.kernel.template else { mismatch(&self.kernel.template) };
        let data = self.access(0).clone();
        let places = self.access(1).shape.clone();
        self.int("DATA_0", data.offset);
        for (k, axis) in ["N", "C", "Z", "Y", "X"].into_iter().enumerate() {
            self.int(format!("IN_{axis}"), data.shape[k] as isize);
            self.int(format!("DATA_{axis}"), data.strides[k]);
            if let Some(a) = k.checked_sub(2) {
                self.int(format!("OUT_{axis}"), places[k] as isize);
                self.int(format!("KERNEL_{axis}"), window.kernel[a] as isize);
                self.int(format!("STRIDE_{axis}"), window.strides[a] as isize);
                self.int(format!("DILATION_{axis}"), window.dilations[a] as isize);
                self.int(format!("PAD_{axis}"), window.pads[a] as isize);
                // Elements of a window that are this far apart belong to the windows over one element.
                let step = if window.dilations[a] == 1 { window.strides[a] } else { 1 };
                self.int(format!("STEP_{axis}"), step as isize);
            }
        }
        self.loader("data", 0);
        for (name, slot) in [("maximum", 1), ("gradient", 2)] {
            let names = ["n", "c", "z", "y", "x"];
            let access = self.access(slot);
            let terms: Vec<_> = names.into_iter().zip(access.strides.iter().copied()).collect();
            let value = format!("return {};", self.load(slot, &sum(access.offset, &terms)));
            self.function(name, &names.map(|name| (name, I32)), Some(self.value[slot]), vec![value]);
        }
        if let &Text::Elements(Elements::Vector { width, .. }) = text {
            self.ints(&[("WIDTH", width)]);
            let ty = self.storage[0];
            let at = self.read_wide(0, width, "at");
            self.wide_function(
                "data_wide",
                &[("at", I32)],
                format!("wide<{}, {width}>", ty.name()),
                vec![format!("return {at};")],
            );
            let access = self.access(1);
            let names = ["n", "c", "z", "y", "x"];
            let terms: Vec<_> = names.into_iter().zip(access.strides.iter().copied()).collect();
            let most = format!("return {};", self.read_wide(1, width, &sum(access.offset, &terms)));
            let result = format!("wide<{}, {width}>", self.storage[1].name());
            self.wide_function("maximum_wide", &names.map(|name| (name, I32)), result, vec![most]);
            let value = convert("of.v[j]", ty, self.value[0]);
            self.declarations.push(format!("const auto element_of = [](const auto& of, i32 j) {{ return {value}; }};"));
        }
        self.walk_channels();
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element();
        Ok(())
    }
}
