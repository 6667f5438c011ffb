//! Elements one by one, or several neighbours at a time.

use super::locate::locate;
use super::scalar::Type::I32;
use super::scalar::convert;
use super::{Input, Module, Scalars, block, kernels};
use crate::kernel::algorithm::{Elements, Text};
use crate::kernel::schedule::map::{Moves, is_indexed};
use crate::kernel::space::Along;
use crate::shape::Access;
use std::collections::BTreeSet;

kernels! {
    |module, text| module.map(text) => {
        map "map.wgsl": "scalar code at every element",
        map_vec "map_vec.cu": "scalar code at every element, several at a time",
    }
}

impl Module<'_> {
    fn map(&mut self, text: &Text) -> Result<(), String> {
        match *text {
            Text::Elements(Elements::Vector { width, rounds, .. }) => self.map_vector(width, rounds),
            _ => {
                self.store(&self.flat(), None, None, &[])?;
                self.per_element();
                Ok(())
            }
        }
    }

    /// The constant of a text of one invocation per element.
    pub(super) fn per_element(&mut self) {
        self.int("COUNT", (self.kernel.template.def().invocations)(self.kernel) as isize);
    }

    /// Several neighbours per invocation: those of a vector at once, vectors a workgroup apart.
    fn map_vector(&mut self, width: usize, rounds: usize) -> Result<(), String> {
        let kernel = self.kernel;
        let count = kernel.shape.numel();
        let Moves { used, ways } = Moves::new(kernel);
        let space = self.flat();
        let accesses: Vec<&Access> = used.iter().map(|&s| self.access(s)).collect();
        let located = locate(&space, &accesses, &BTreeSet::new());
        let mut lines = located.statements;
        for (&slot, address) in used.iter().zip(&located.addresses) {
            let value = match ways[&slot] {
                Along::Dense(_) => self.read_wide(slot, width, address),
                _ => self.load(slot, address),
            };
            lines.push(format!("const auto x{slot} = {value};"));
        }
        let input = |j: u32| {
            let slot = j as usize;
            match ways[&slot] {
                Along::Dense(_) => {
                    let element = format!("x{slot}.v[v]");
                    Input::Value(convert(&element, self.storage[slot], self.value[slot]), self.value[slot])
                }
                _ => Input::Value(format!("x{slot}"), self.value[slot]),
            }
        };
        let scalars = self.body(&kernel.body, &space, input, &[], &[])?;
        let writes: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
        let stores = locate(&space, &writes, &BTreeSet::new());
        let Scalars { statements, results, .. } = scalars;
        let mut wide = self.wide_loop(Scalars { statements, results, addresses: stores.addresses }, width, "i");
        // Coordinates of reads and of writes may have the same names: the stores stand in a block of their own.
        let store = wide.len() - kernel.writes.len();
        let tail_lines: Vec<String> = wide.drain(store..).collect();
        lines.extend(wide);
        lines.push("{".into());
        lines.extend(stores.statements.into_iter().chain(tail_lines).map(|s| format!("    {s}")));
        lines.push("}".into());
        self.function("store_wide", &[("i", I32)], None, lines);
        if !count.is_multiple_of(width) {
            self.flags.push("TAIL");
            self.store(&space, None, None, &[])?;
        }
        self.ints(&[("COUNT", count), ("WIDTH", width), ("TURNS", rounds)]);
        Ok(())
    }

    /// The body for `width` elements from variable `at` on: reads by way of `input`, results into `o0`, `o1` ... Within the loop, `at` is the
    /// element's own place.
    pub(super) fn wide_loop(&self, scalars: Scalars, width: usize, at: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for (w, _) in scalars.results.iter().enumerate() {
            let slot = self.kernel.reads.len() + w;
            lines.push(format!("wide<{}, {width}> o{w};", self.storage[slot].name()));
        }
        let mut each = Vec::new();
        if is_indexed(&self.kernel.body) {
            lines.push(format!("const i32 {at}_first = {at};"));
            each.push(format!("const i32 {at} = {at}_first + v;"));
        }
        lines.push("#pragma unroll".into());
        each.extend(scalars.statements);
        for (w, (value, ty)) in scalars.results.iter().enumerate() {
            let stored = convert(value, *ty, self.storage[self.kernel.reads.len() + w]);
            each.push(format!("o{w}.v[v] = {stored};"));
        }
        lines.extend(block(&format!("for (i32 v = 0; v < {width}; v++)"), each));
        for (w, address) in scalars.addresses.iter().enumerate() {
            let slot = self.kernel.reads.len() + w;
            let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
            lines.push(format!("write(b{b} + ({address}), o{w});"));
        }
        lines
    }
}
