//! What a device holds beside a plan.

use super::human;
use crate::driver_memory::Estimate;

/// The estimate of the memory that a driver takes beside plans.
pub fn beside(estimate: &Estimate) -> String {
    let Estimate { bytes, context, libraries, modules, graphs, device } = estimate;
    let parts = [("context", context), ("libraries", libraries), ("modules", modules), ("graphs", graphs)];
    let parts =
        parts.into_iter().filter(|(_, bytes)| **bytes > 0).map(|(part, bytes)| format!("{part} {}", human(*bytes)));
    let parts: Vec<_> = parts.collect();
    format!("beside the plan  about {}: {} (measured on {device})\n", human(*bytes), parts.join(", "))
}
