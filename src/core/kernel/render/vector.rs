//! Reads and writes of up to 16 bytes at a time.

use super::locate::locate;
use super::scalar::Type::{self, F32, I32, Vec4};
use super::{Dialect, Module};
use crate::kernel::product::is_vectorizable;
use crate::kernel::space::Space;
use std::collections::BTreeSet;

/// The parameters of a function of an element of a batch of matrices.
pub(super) fn matrix([first, second]: [&'static str; 2]) -> [(&'static str, Type); 3] {
    [("batch", I32), (first, I32), (second, I32)]
}

/// Steps of neighbouring invocations through tiles of both operands of a product, of `depth` slices of the inner axis and so many lines.
/// `along` tells if neighbours are along the inner axis.
pub(super) fn tile_steps(along: [bool; 2], depth: usize, lines: [usize; 2]) -> [(&'static str, usize); 4] {
    let [(am, ak), (bn, bk)] = [0, 1].map(|i| if along[i] { (depth, 1) } else { (1, lines[i]) });
    [("A_M_STEP", am), ("A_K_STEP", ak), ("B_N_STEP", bn), ("B_K_STEP", bk)]
}

impl Module<'_> {
    /// Declares a function that reads four elements of a matrix at once along an axis of it. `space` is the operand's. In WGSL the binding is
    /// one of vectors then.
    pub(super) fn fours(
        &mut self,
        name: &str,
        slot: usize,
        space: &Space,
        names: [&'static str; 2],
        axis: usize,
    ) -> bool {
        if self.storage[slot] != F32 || self.kernel.prologue(slot).is_some() || !self.is_vectorizable(slot, axis, 4) {
            return false;
        }
        if self.dialect == Dialect::Cuda {
            let (mut body, address) = self.address(slot, space);
            body.push(format!("return {};", self.read_wide(slot, 4, &address)));
            self.wide_function(name, &matrix(names), "wide<f32, 4>".into(), body);
            return true;
        }
        self.vectors(name, slot, space, names);
        true
    }

    /// Declares a function in WGSL that reads four elements of a matrix at once, which lie so. The binding is one of vectors then.
    pub(super) fn vectors(&mut self, name: &str, slot: usize, space: &Space, names: [&'static str; 2]) {
        let (mut body, address) = self.address(slot, space);
        let binding = self.bindings.of[slot].expect("operands of vectors have elements");
        self.bound[binding] = Vec4;
        body.push(format!("return b{binding}[({address}) >> 2u];"));
        self.function(name, &matrix(names), Some(Vec4), body);
    }

    /// True if an operand has elements that can be moved `width` at a time along an axis.
    pub(super) fn is_vectorizable(&self, slot: usize, axis: usize, width: usize) -> bool {
        is_vectorizable(self.operand(slot), axis, width)
    }

    /// Where an operand's element lies at a point of a space.
    pub(super) fn address(&self, slot: usize, space: &Space) -> (Vec<String>, String) {
        let mut located = locate(space, &[self.access(slot)], &BTreeSet::new());
        (located.statements, located.addresses.remove(0))
    }

    /// A function that gives the address of an element of a batch of matrices.
    pub(super) fn address_function(&mut self, name: &str, slot: usize, space: &Space, params: [&'static str; 2]) {
        let (mut body, address) = self.address(slot, space);
        let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
        body.push(format!("return b{b} + ({address});"));
        self.wide_function(name, &matrix(params), "const void*".into(), body);
    }

    /// An expression for `width` elements of an operand at an address.
    pub(super) fn read_wide(&self, slot: usize, width: usize, address: &str) -> String {
        let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
        format!("read<{}, {width}>(b{b} + ({address}))", self.storage[slot].name())
    }

    /// A function whose result is several elements.
    pub(super) fn wide_function(
        &mut self,
        name: &str,
        params: &[(&'static str, Type)],
        result: String,
        body: Vec<String>,
    ) {
        let params: Vec<String> = params.iter().map(|(name, ty)| format!("{} {name}", ty.name())).collect();
        let head = format!("const auto {name} = [&]({}) -> {result} {{", params.join(", "));
        self.declarations.push(head);
        self.declarations.extend(body.into_iter().map(|line| format!("    {}", line.replace("let ", "const auto "))));
        self.declarations.push("};".into());
    }
}
