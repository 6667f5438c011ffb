//! Sums up to each element, and the order of elements.

use super::scalar::Type::{Bool, F32, F64, I32};
use super::{Module, kernels};
use crate::kernel::Template;
use crate::kernel::meaning::mismatch;
use crate::kernel::space::{Space, over};

kernels! {
    |module, _| module.scan() => {
        scan "scan.wgsl": "sums of the elements up to each, row by row",
    }
    |module, _| module.sort() => {
        sort "sort.wgsl": "the order of groups, whose runs are in order, by binary searches",
    }
}

impl Module<'_> {
    fn scan(&mut self) -> Result<(), String> {
        let &Template::Scan { axis, exclusive, reverse } = &self.kernel.template else {
            mismatch(&self.kernel.template)
        };
        let shape = &self.kernel.shape;
        let space: Space = vec![
            over("outer", shape, 0..axis),
            over("at", shape, axis..axis + 1),
            over("inner", shape, axis + 1..shape.len()),
        ];
        let ty = self.value[0];
        let (mut body, address) = self.address(0, &space);
        body.push(format!("return {};", self.load(0, &address)));
        self.function("element", &[("outer", I32), ("at", I32), ("inner", I32)], Some(ty), body);
        self.ints(&[("LENGTH", shape[axis]), ("INNER", shape[axis + 1..].iter().product())]);
        self.constant("ZERO", 0.0, ty);
        self.flags.extend([(exclusive, "EXCLUSIVE"), (reverse, "REVERSE")].iter().filter(|flag| flag.0).map(|f| f.1));
        self.store(&space, Some(ty), None, &[])?;
        self.per_element();
        Ok(())
    }

    fn sort(&mut self) -> Result<(), String> {
        let &Template::Sort { largest, given, runs } = &self.kernel.template else { mismatch(&self.kernel.template) };
        let shape = &self.kernel.shape;
        let (outer, kept) = (shape.len() - 2, shape[shape.len() - 1]);
        let keys = &self.access(0).shape;
        let (n, groups) = (keys[outer], shape[outer]);
        // An index that is not inside stands for nothing.
        let (named, from) = if given {
            let named = &self.access(1).shape;
            let (mut body, address) = self.address(1, &vec![over("i", named, 0..named.len())]);
            body.push(format!("let index = {};", self.load(1, &address)));
            body.push("return select(N, index, index >= 0 && index < N);".into());
            (body, named[outer + 2])
        } else {
            (vec![format!("return min(i % {}, N);", groups * runs)], 1)
        };
        self.function("named", &[("i", I32)], Some(I32), named);
        let (mut body, address) =
            self.address(0, &vec![over("row", keys, 0..outer), over("at", keys, outer..outer + 1)]);
        body.push(format!("return {};", self.load(0, &address)));
        let ty = self.value[0];
        self.function("key", &[("row", I32), ("at", I32)], Some(ty), body);
        let sign = if largest { ">" } else { "<" };
        let mut body = vec![
            "if (a >= N || b >= N) {".to_owned(),
            "    return a < N;".into(),
            "}".into(),
            format!("let row = merged / {};", groups.max(1)),
            "let x = key(row, a);".into(),
            "let y = key(row, b);".into(),
        ];
        // What is not a number stands above all numbers. Devices may not tell it apart by comparing.
        let undefined = |v: &str| match ty {
            F64 => format!("({v} != {v})"),
            _ => format!("((bitcast<u32>({v}) & 0x7fffffffu) > 0x7f800000u)"),
        };
        if matches!(ty, F32 | F64) {
            let (above, below) = if largest { ("x", "y") } else { ("y", "x") };
            body.push(format!("if ({} || {}) {{", undefined("x"), undefined("y")));
            body.push(format!("    return {} && !{};", undefined(above), undefined(below)));
            body.push("}".into());
        }
        body.push(format!("return x {sign} y;"));
        self.function("precedes", &[("merged", I32), ("a", I32), ("b", I32)], Some(Bool), body);
        self.ints(&[("N", n), ("FROM", from), ("RUNS", runs), ("KEPT", kept)]);
        let space = vec![over("merged", shape, 0..outer + 1), over("place", shape, outer + 1..outer + 2)];
        self.store(&space, Some(I32), None, &[])?;
        self.per_element();
        Ok(())
    }
}
