//! Products of up to four rows, which are bound by reading the right operand.

use super::locate::Space;
use super::scalar::Type::{F32, Vec4};
use super::wide::matrix;
use super::{Dialect, Module};
use crate::target::FEW_GROUPS;

/// The most rows that are thin.
pub(super) const THIN: usize = 4;
/// Invocations of a workgroup that reads four elements at a time.
const SIZE: usize = 256;

impl Module<'_> {
    /// Declares `b_wide` for a product's right operand, if that can be read so along this axis. `m` is how many rows the left one has.
    pub(super) fn reads_fours(&mut self, slot: usize, space: &Space, axis: usize, m: usize) -> bool {
        let room = self.target.max_workgroup as usize >= SIZE && self.target.max_shared as usize >= m * SIZE * 16;
        let wide = self.dialect == Dialect::Wgsl && room && self.fours("b_wide", slot, space, ["k", "n"], axis);
        if wide {
            self.flags.push("B_FOURS");
        }
        wide
    }

    /// The constants of a product whose right operand `b_wide` reads, along the inner axis (`b_k`) or across it.
    pub(super) fn quad(&mut self, [batch, m, k, n]: [usize; 4], b_k: bool) -> (&'static str, u32, u64) {
        let (slices, across, along) = if b_k {
            ((k / 4).clamp(1, 32).next_power_of_two(), 1, 4)
        } else {
            let tiles = |columns: usize| batch * n.div_ceil(4 * columns);
            let columns = [16, 8, 4].into_iter().find(|&columns| tiles(columns) >= FEW_GROUPS).unwrap_or(2);
            (SIZE / columns, 4, 1)
        };
        let columns = SIZE / slices;
        let (column_step, slice_step) = if b_k { (slices, 1) } else { (1, columns) };
        let tiles = n.div_ceil(across * columns);
        let constants = [
            ("TILES_N", tiles),
            ("COLUMNS", columns),
            ("SLICES", slices),
            ("COLUMN_STEP", column_step),
            ("SLICE_STEP", slice_step),
            ("ACROSS", across),
            ("ALONG", along),
            ("STEP", slices * along),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        let left = |at: &str| format!("a(batch, m, {at})");
        let (result, value) = match b_k {
            true => (Vec4, format!("vec4f({}, {}, {}, {})", left("k"), left("k + 1"), left("k + 2"), left("k + 3"))),
            false => (F32, left("k")),
        };
        self.function("left", &matrix(["m", "k"]), Some(result), vec![format!("return {value};")]);
        if !b_k {
            self.flags.push("B_ROWS");
        }
        self.lists.insert("row", vec![Vec::new(); m]);
        self.shared.push(("partial", Vec4, SIZE * m));
        ("matmul_quad", SIZE as u32, (batch * tiles) as u64)
    }

    /// The constants of a product whose right operand is read element by element, rows of it (`b_k`: columns) by neighbours.
    pub(super) fn thin(&mut self, [batch, m, k, n]: [usize; 4], b_k: bool) -> (&'static str, u32, u64) {
        let size: usize = 64;
        let slices = if b_k { 16 } else { (k / 16).clamp(1, 8).next_power_of_two() };
        let columns = size / slices;
        let (column_step, slice_step) = if b_k { (slices, 1) } else { (1, columns) };
        let tiles = n.div_ceil(columns);
        let constants = [
            ("TILES_N", tiles),
            ("COLUMNS", columns),
            ("SLICES", slices),
            ("COLUMN_STEP", column_step),
            ("SLICE_STEP", slice_step),
            ("ROW1", 1.min(m - 1)),
            ("ROW2", 2.min(m - 1)),
            ("ROW3", 3.min(m - 1)),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.shared.push(("partial", Vec4, size));
        ("matmul_thin", size as u32, (batch * tiles) as u64)
    }
}
