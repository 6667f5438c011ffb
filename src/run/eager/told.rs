//! A comparison of eager and planned runs.

use super::compare::{Agreement, Column, Comparison, Measured, Outcome};
use crate::figures::{bytes, count, grouped, human};
use crate::table::Table;
use std::fmt;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", comparison(&self.model, self))
    }
}

/// The comparison as a table: one row per figure, one column per way to run. `subject` is what was run.
pub fn comparison(subject: &str, comparison: &Comparison) -> String {
    let Comparison { model: _, target, memory_limit, runs, reference, columns } = comparison;
    let limit = memory_limit.map_or(String::new(), |limit| format!(", at most {}", bytes(limit)));
    let mut out = format!("{subject} on {target}, {} each{limit}\n\n", count(*runs as u64, "run"));

    let mut table = Table::new("<>");
    let mut row = |label: &str, cell: &dyn Fn(&Column) -> String| {
        table.row(std::iter::once(label.to_owned()).chain(columns.iter().map(cell)));
    };
    let ran = |column: &Column, cell: &dyn Fn(&Measured) -> String| match &column.outcome {
        Outcome::Ran(measured) => cell(measured),
        Outcome::Refused { .. } => "-".into(),
    };
    row("", &|c| c.name.clone());
    row("kernel launches", &|c| c.launches.to_string());
    for (label, figure) in
        [("peak live", (|m| m.peak_live_bytes) as fn(&Measured) -> u64), ("peak reserved", |m| m.peak_reserved_bytes)]
    {
        row(label, &|c| ran(c, &|m| human(figure(m))));
        row("  bytes", &|c| ran(c, &|m| grouped(figure(m))));
    }
    row("smallest device that fits", &|c| human(c.smallest_device_bytes));
    row("  bytes", &|c| grouped(c.smallest_device_bytes));
    if columns.iter().any(|c| c.staging_bytes > 0) {
        row("staging, backend in all", &|c| human(c.staging_bytes));
        row("  bytes", &|c| grouped(c.staging_bytes));
    }
    row("fragmentation", &|c| ran(c, &|m| format!("{:.1} %", 100.0 * m.fragmentation)));
    row("driver calls, load and run 1", &|c| ran(c, &|m| m.driver_calls_first.to_string()));
    row(&format!("driver calls, run {runs}"), &|c| ran(c, &|m| m.driver_calls_last.to_string()));
    row("median run", &|c| ran(c, &|m| format!("{:.3} ms", m.median_ms)));
    row("results", &|c| match &c.outcome {
        Outcome::Refused { .. } => "does not fit".into(),
        Outcome::Ran(Measured { agreement: None, .. }) => "reference".into(),
        Outcome::Ran(Measured { agreement: Some(Agreement { equal: true, .. }), .. }) => "equal".into(),
        Outcome::Ran(Measured { agreement: Some(found), .. }) => format!("{:.1e} off", found.difference),
    });
    out += &table.to_string();

    out += "\nBytes: constants, inputs, outputs, activations, workspaces, staging and the backend's own, in every column.\n";
    out += "Smallest device: eager by simulation, on a device that wastes nothing itself; planned by the plan.\n";
    out += "Eager allocates node by node: direct from the device, from bins (bfc, as TensorFlow does), or from cached blocks (caching, as PyTorch does).\n";
    if reference.is_some() {
        out += "Equal: bit for bit like the reference. Off: the largest difference over the peak of the reference's output.\n";
    }
    for column in columns {
        if let Outcome::Refused { does_not_fit } = &column.outcome {
            out += &format!("{}: {does_not_fit}\n", column.name);
        }
    }
    out
}
