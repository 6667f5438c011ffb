//! The orders that a plan was chosen from.

use super::{Table, grouped};
use crate::plan::Plan;

/// One line per order that was tried; a star at the one that the plan has.
pub fn orders(plan: &Plan) -> String {
    let mut table = Table::new("<>");
    table.row(["order", "arena's bound", "placed"]);
    let least = plan.summary.orders.iter().map(|order| order.peak).min();
    let chosen = plan.summary.orders.iter().position(|order| Some(order.peak) == least);
    for (at, order) in plan.summary.orders.iter().enumerate() {
        let name = format!("  {}", order.name);
        let star = if Some(at) == chosen { "*" } else { "" };
        table.row([name, grouped(order.bound), grouped(order.peak), star.into()]);
    }
    table.to_string()
}
