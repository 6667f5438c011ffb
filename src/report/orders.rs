//! Reports the orders of steps that a plan was chosen from.

use super::{Table, count, grouped};
use crate::plan::{Candidate, View};

/// The file's order first, then the orders that take fewer bytes, the best first, then all others in one line.
///
/// Orders with the same figures share a line. A star marks the order of the plan.
pub fn orders(plan: View) -> String {
    let mut table = Table::new("<>");
    table.row(["order", "arena's lower bound", "arena"]);
    let found = &plan.summary.orders;
    let Some(file) = found.first() else { return table.to_string() };
    let figures = |order: &Candidate| (order.peak, order.bound);
    let (same, others): (Vec<_>, Vec<_>) = found.iter().partition(|order| figures(order) == figures(file));
    let (mut less, rest): (Vec<_>, Vec<_>) = others.into_iter().partition(|order| order.peak < file.peak);
    less.sort_by_key(|order| figures(order));
    let chosen = found.iter().min_by_key(|order| order.peak);
    for equals in std::iter::once(&same[..]).chain(less.chunk_by(|a, b| figures(a) == figures(b))) {
        let first = equals[0];
        let name = match equals.len() - 1 {
            0 => format!("  {}", first.name),
            more => format!("  {} and {}", first.name, count(more as u64, "other")),
        };
        let star = if chosen.is_some_and(|chosen| std::ptr::eq(chosen, first)) { "*" } else { "" };
        table.row([name, grouped(first.bound), grouped(first.peak), star.into()]);
    }
    if let Some(peak) = rest.iter().map(|order| order.peak).min() {
        let bound = rest.iter().map(|order| order.bound).min().unwrap_or(peak);
        let at_least = if rest.len() == 1 { "" } else { ", at least" };
        let name = format!("  {}{at_least}", count(rest.len() as u64, "other"));
        table.row([name, grouped(bound), grouped(peak), String::new()]);
    }
    table.to_string()
}
