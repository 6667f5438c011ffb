//! Reductions of rows.

use super::locate::locate;
use super::scalar::Type::{self, F32, F64, I32, I64, U64};
use super::scalar::{convert, extreme};
use super::{Input, Module, SUBGROUPS, Scalars, kernels};
use crate::kernel::algorithm::{Rows, Text};
use crate::kernel::meaning::mismatch;
use crate::kernel::schedule::row::{Beside, Extents, Moving};
use crate::kernel::space::{Space, over};
use crate::kernel::{Reduction, RowReduction, Template};
use crate::shape::Access;
use std::collections::{BTreeMap, BTreeSet};

kernels! {
    |module, text| module.row(text) => {
        row "row.wgsl": "reductions over trailing axes, then scalar code per row or element",
        row_warp "row_warp.cu": "the same over rows that lie in stretches side by side: warps hold them in registers",
        row_vec "row_vec.cu": "the same over rows that lie side by side, several per invocation",
    }
}

impl Module<'_> {
    fn row(&mut self, text: &Text) -> Result<(), String> {
        let Template::Row { reductions, .. } = &self.kernel.template else { mismatch(&self.kernel.template) };
        let Text::Rows(rows) = text else { mismatch(&self.kernel.template) };
        let extents = Extents::new(self.kernel);
        match *rows {
            Rows::Lanes { lanes, rows, along_row, subgroups } => {
                self.flags.extend(subgroups.then_some(SUBGROUPS));
                self.row_lanes(reductions, extents, [lanes, rows], along_row)
            }
            Rows::Warps { threads, rows, width, held } => {
                self.row_warps(reductions, extents, [threads, rows, width], held)
            }
            Rows::Vectors { lanes, across, width } => self.row_vectors(reductions, extents, [lanes, across, width]),
        }
    }

    fn row_lanes(
        &mut self,
        reductions: &[RowReduction],
        Extents { outer, rows, length, per_row }: Extents,
        [lanes, per_group]: [usize; 2],
        along_row: bool,
    ) -> Result<(), String> {
        let shape = &self.kernel.shape;
        let space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let types = self.reductions(reductions, &space, &[("row", I32), ("j", I32)], |_, j| Input::Slot(j as usize))?;
        if per_row {
            let space = vec![over("row", shape, 0..outer)];
            self.store(&space, None, None, &types)?;
            self.flags.push("PER_ROW");
        } else {
            self.store(&space, None, None, &types)?;
        }
        let (lane_step, row_step) = if along_row { (1, lanes) } else { (per_group, 1) };
        self.ints(&[
            ("COUNT", rows),
            ("LENGTH", length),
            ("LANES", lanes),
            ("ROWS", per_group),
            ("LANE_STEP", lane_step),
            ("ROW_STEP", row_step),
            ("BLOCK", lanes * 64),
        ]);
        if lanes > 1 {
            self.flags.push("LANES");
            self.share(&types, lanes * per_group);
        }
        Ok(())
    }

    /// Neighbouring rows, several per invocation. Some elements of each are on their way at a time.
    fn row_vectors(
        &mut self,
        reductions: &[RowReduction],
        Extents { outer, rows, length, .. }: Extents,
        [lanes, across, width]: [usize; 3],
    ) -> Result<(), String> {
        let shape = &self.kernel.shape;
        let Beside { held, shared, .. } = Beside::new(self.kernel).ok_or("its rows do not lie side by side")?;
        let space: Space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (k, &slot) in held.iter().chain(&shared).enumerate() {
            let width = if k < held.len() { width } else { 1 };
            let result = format!("wide<{}, {width}>", self.storage[slot].name());
            self.declarations.push(format!("{result} x{k}[{AHEAD}];"));
            names.insert(slot, format!("x{k}[c].v[{}]", if width > 1 { "v" } else { "0" }));
            let (mut body, address) = self.address(slot, &space);
            body.push(format!("return {};", self.read_wide(slot, width, &address)));
            self.wide_function(&format!("load_x{k}"), &[("row", I32), ("j", I32)], result, body);
        }
        let input = |module: &Module, j: u32| {
            let slot = j as usize;
            match names.get(&slot) {
                Some(name) => Input::Value(convert(name, module.storage[slot], module.value[slot]), module.value[slot]),
                None => Input::Slot(slot),
            }
        };
        let types = self.reductions(reductions, &space, &[("row", I32), ("j", I32), ("c", I32), ("v", I32)], input)?;
        self.store(&vec![over("row", shape, 0..outer)], None, None, &types)?;
        self.ints(&[
            ("COUNT", rows),
            ("LENGTH", length),
            ("LANES", lanes),
            ("ACROSS", across),
            ("WIDTH", width),
            ("AHEAD", AHEAD),
            ("BLOCK", 64 * lanes),
        ]);
        if lanes > 1 {
            self.flags.push("LANES");
            self.share(&types, lanes * across * width);
        }
        self.lists.insert("held", vec![Vec::new(); held.len() + shared.len()]);
        Ok(())
    }

    /// Rows that warps hold in registers. Of the reads, what reductions use is held; what only the body uses comes when it runs.
    fn row_warps(
        &mut self,
        reductions: &[RowReduction],
        Extents { outer, rows, length, per_row }: Extents,
        [team, per_group, width]: [usize; 3],
        keeps: bool,
    ) -> Result<(), String> {
        let kernel = self.kernel;
        let shape = &kernel.shape;
        let Moving { held, late, .. } = Moving::new(kernel).ok_or("its rows do not lie in stretches")?;
        let chunks = length.div_ceil(team * width);
        let space: Space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (letter, list, length) in [("x", &held, if keeps { chunks } else { AHEAD }), ("y", &late, 1)] {
            for (k, &slot) in list.iter().enumerate() {
                self.declarations.push(format!("wide<{}, {width}> {letter}{k}[{length}];", self.storage[slot].name()));
                let at = if letter == "x" { "c" } else { "0" };
                names.insert(slot, format!("{letter}{k}[{at}].v[v]"));
                let (mut body, address) = self.address(slot, &space);
                body.push(format!("return {};", self.read_wide(slot, width, &address)));
                let result = format!("wide<{}, {width}>", self.storage[slot].name());
                self.wide_function(&format!("load_{letter}{k}"), &[("row", I32), ("j", I32)], result, body);
            }
        }
        let input = |module: &Module, j: u32| {
            let slot = j as usize;
            match names.get(&slot) {
                Some(name) => Input::Value(convert(name, module.storage[slot], module.value[slot]), module.value[slot]),
                None => Input::Slot(slot),
            }
        };
        let parameters = [("row", I32), ("j", I32), ("c", I32), ("v", I32)];
        let types = self.reductions(reductions, &space, &parameters, input)?;
        if per_row {
            self.store(&vec![over("row", shape, 0..outer)], None, None, &types)?;
            self.flags.push("PER_ROW");
        } else {
            let code = self.body(&kernel.body, &space, |j| input(self, j), &[], &types)?;
            let accesses: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
            let stores = locate(&space, &accesses, &BTreeSet::new());
            let Scalars { statements, results, .. } = code;
            let mut lines = self.wide_loop(Scalars { statements, results, addresses: stores.addresses }, width, "j");
            let last = lines.len() - kernel.writes.len();
            lines.splice(last..last, stores.statements);
            self.function("finish", &parameters[..3], None, lines);
        }
        self.ints(&[
            ("COUNT", rows),
            ("LENGTH", length),
            ("TEAM", team),
            ("ROWS", per_group),
            ("WIDTH", width),
            ("CHUNKS", chunks),
        ]);
        if keeps {
            self.flags.push("KEEPS");
        } else {
            self.int("AHEAD", AHEAD as isize);
            let loads = (0..held.len()).map(|k| format!("x{k}[c] = load_x{k}(row, j);")).collect();
            self.function("again", &parameters[..3], None, loads);
        }
        self.share(&types, team * per_group / 32);
        self.lists.insert("held", vec![Vec::new(); held.len()]);
        self.lists.insert("late", vec![Vec::new(); late.len()]);
        Ok(())
    }

    /// Per reduction `k` of a row kernel `element{k}`, its value at a point of the space, `combine{k}`, `START{k}` and, for its result,
    /// `reduced{k}`. The list `reduction` has the arrays in which invocations exchange values. Returns the types of the reductions.
    fn reductions(
        &mut self,
        reductions: &[RowReduction],
        space: &Space,
        parameters: &[(&'static str, Type)],
        input: impl Fn(&Self, u32) -> Input,
    ) -> Result<Vec<Type>, String> {
        let mut types = Vec::with_capacity(reductions.len());
        for (k, RowReduction { reduction, body }) in reductions.iter().enumerate() {
            let result = body.code[body.results[0] as usize].dtype;
            let ty = match Type::register(result, self.target.family) {
                Type::Bool => I32,
                ty => ty,
            };
            let code = self.body(body, space, |j| input(self, j), &[], &types)?;
            let mut lines = code.statements;
            let (value, from) = &code.results[0];
            lines.push(format!("return {};", convert(value, *from, ty)));
            self.private.push((format!("reduced{k}"), ty));
            self.function(&format!("element{k}"), parameters, Some(ty), lines);
            let (low, high) = ty.bounds();
            let start = match reduction {
                Reduction::Sum => 0.0,
                Reduction::Prod => 1.0,
                Reduction::Max => low,
                Reduction::Min => high,
            };
            self.combine(&format!("combine{k}"), *reduction, ty);
            self.start(format!("START{k}"), start, ty);
            types.push(ty);
        }
        self.lists.insert(
            "reduction",
            types.iter().map(|ty| vec![("SHARED", shared(*ty).to_owned()), ("VALUE", ty.name().to_owned())]).collect(),
        );
        Ok(types)
    }

    /// The function `name(a, b)`, which makes two values one.
    pub(super) fn combine(&mut self, name: &str, reduction: Reduction, ty: Type) {
        let value = match reduction {
            Reduction::Sum => "a + b".into(),
            Reduction::Prod => "a * b".into(),
            Reduction::Max => format!("{}(a, b)", extreme(true, ty)),
            Reduction::Min => format!("{}(a, b)", extreme(false, ty)),
        };
        self.function(name, &[("a", ty), ("b", ty)], Some(ty), vec![format!("return {value};")]);
    }

    /// Arrays of so many elements for reductions of these types.
    fn share(&mut self, types: &[Type], len: usize) {
        for ty in [F32, I32, F64, I64, U64].into_iter().filter(|ty| types.contains(ty)) {
            self.shared.push((shared(ty), ty, len));
        }
    }
}

/// Elements of a row whose loads stand side by side in `row_vec`, and chunks in `row_warp`.
const AHEAD: usize = 4;

/// The array in which lanes exchange values of a type.
fn shared(ty: Type) -> &'static str {
    match ty {
        F32 => "shared_f32",
        F64 => "shared_f64",
        I64 => "shared_i64",
        U64 => "shared_u64",
        _ => "shared_i32",
    }
}
