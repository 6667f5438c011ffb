//! The holes of the attention template.

use super::locate::{Space, Var, locate, over};
use super::scalar::Type::{F32, I32};
use super::scalar::convert;
use super::templates::Launch;
use super::{Input, Module};
use crate::expr::Body;
use std::collections::BTreeSet;

/// Sums that an invocation holds at most.
const SUMS: usize = 16;
/// Slices of the inner axis that pass through workgroup memory at a time.
const STEP: usize = 16;

impl Module<'_> {
    /// Rows of the result in a workgroup of `size`: many, so that keys and values are read seldom, but not so many that a row's
    /// sums do not fit in registers, or that few workgroups are left.
    fn attention_rows(&self, size: usize, [batch, m, e]: [usize; 3]) -> usize {
        let fits = |rows: usize| e.div_ceil(size / rows) <= SUMS;
        let busy = |rows: usize| batch * m.div_ceil(rows) >= 128;
        let most = m.next_power_of_two().min(32);
        let all = || (0..=5).rev().map(|i| 1usize << i).filter(|&rows| rows <= most && fits(rows));
        all().find(|&rows| busy(rows)).or_else(|| all().find(|&rows| rows <= 8)).unwrap_or(1)
    }

    pub(super) fn attention(&mut self, score: &Body, guarded: bool) -> Launch {
        let shape = &self.kernel.shape;
        let rank = shape.len();
        let (m, e) = (shape[rank - 2], shape[rank - 1]);
        let (k, n) = (self.access(0).shape[rank - 1], self.access(1).shape[rank - 1]);
        let batch: usize = shape[..rank - 2].iter().product();
        if !self.value[..3].iter().all(|ty| *ty == F32) {
            return Err("attention is of floats".into());
        }
        let space = |extents: &[usize], names: [&'static str; 2]| -> Space {
            let matrix = [over(names[0], extents, [rank - 2]), over(names[1], extents, [rank - 1])];
            [over("batch", extents, 0..rank - 2)].into_iter().chain(matrix).collect()
        };
        let params = |names: [&'static str; 2]| [("batch", I32), (names[0], I32), (names[1], I32)];
        for (slot, name, names) in [(0, "a", ["m", "k"]), (1, "b", ["k", "n"]), (2, "c", ["n", "e"])] {
            let access = self.access(slot);
            let located = locate(&space(&access.shape, names), &[access], &BTreeSet::new());
            let mut body = located.statements;
            let load = self.load(slot, &located.addresses[0]);
            if name == "c" {
                // The last lanes may have no column.
                body.push("var value = 0.0f;".into());
                body.push(format!("if (e < {e}) {{ value = {load}; }}"));
                body.push("return value;".into());
            } else {
                body.push(format!("return {load};"));
            }
            self.function(name, &params(names), Some(F32), body);
        }
        let mut columns = shape.clone();
        columns[rank - 1] = n;
        let input = |j: u32| match j {
            0 => Input::Value("value".into(), F32),
            _ => Input::Slot(2 + j as usize),
        };
        let code = self.body(score, &space(&columns, ["m", "n"]), input, &[], &[])?;
        let (value, from) = &code.results[0];
        let mut body = vec!["var result = LOWEST;".to_owned(), "if (m < M && n < N) {".to_owned()];
        body.extend(code.statements.iter().map(|line| format!("    {line}")));
        body.push(format!("    result = {};", convert(value, *from, F32)));
        body.extend(["}".to_owned(), "return result;".to_owned()]);
        self.constant("LOWEST", f32::MIN.into(), F32);
        let [b, first, second] = params(["m", "n"]);
        self.function("score", &[b, first, second, ("value", F32)], Some(F32), body);
        let outs: Vec<Var> = space(shape, ["m", "n"]);
        self.store(&outs, Some(F32), Some("m < M && n < COLUMNS_OUT"), &[])?;

        if guarded {
            self.flags.push("GUARDED");
        }
        let most = 1usize << self.target.max_workgroup.min(256).ilog2();
        let rows = self.attention_rows(most, [batch, m, e]);
        let width = (1024 / rows).clamp(32, 128);
        let size = most.min(rows * width);
        let lanes = size / rows;
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let (along_a, along_b) = (!dense(0, rank - 2) || dense(0, rank - 1), !dense(1, rank - 1));
        let (am, ak) = if along_a { (STEP, 1) } else { (1, rows) };
        let (bn, bk) = if along_b { (STEP, 1) } else { (1, width) };
        let groups = m.div_ceil(rows);
        let constants = [
            ("M", m),
            ("N", n),
            ("K", k),
            ("COLUMNS_OUT", e),
            ("ROWS", rows),
            ("COLUMNS", width),
            ("LANES", lanes),
            ("GROUPS", groups),
            ("STEP", STEP),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.lists.insert("sum", vec![Vec::new(); e.div_ceil(lanes)]);
        self.lists.insert("product", vec![Vec::new(); rows * width / size]);
        self.shared.push(("tile_a", F32, rows * STEP));
        self.shared.push(("tile_b", F32, width * STEP));
        self.shared.push(("scores", F32, rows * width));
        self.shared.push(("partial", F32, size));
        Ok(("attention", size as u32, (batch * groups) as u64))
    }
}
