//! Reports the bytes that each binding of a range uses of the shared plan.

use super::{Table, grouped, human, percent};
use crate::plan::Class;
use crate::plan::range::ShapeRange;

/// Up to this many bindings, all are shown.
const FEW: usize = 8;

/// One line per binding: its peak, and the share of the arena. Of many bindings, only those whose extents are powers of two or
/// ends of their ranges.
pub fn range(range: &ShapeRange) -> String {
    let (dims, tried) = (range.dims(), range.tried());
    let round = |binding: &[usize]| {
        let ends = |(d, &e): (&crate::plan::Dim, &usize)| e == d.least || e == d.most || e.is_power_of_two();
        dims.iter().zip(binding).all(ends)
    };
    let mut table = Table::new(">");
    let names = dims.iter().map(|d| d.name.clone());
    table.row(names.chain(["live at the peak", "", "of the arena"].map(String::from)));
    let arena = range.plan().class_bytes(Class::Activation);
    for binding in tried.iter().filter(|t| tried.len() <= FEW || round(&t.binding)) {
        let extents = binding.binding.iter().map(usize::to_string);
        let bytes = format!("{} bytes", grouped(binding.live));
        let figures = [human(binding.live), bytes, percent(binding.live, arena)];
        table.row(extents.chain(figures));
    }
    table.to_string()
}
