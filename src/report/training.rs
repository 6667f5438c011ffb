//! Reports what the bytes of a training hold.

use super::{Table, grouped, human, percent};
use crate::train::classes::{Classes, States};

/// The bytes of a training by what they hold, with their labels: all of them first. Those of the arena are of its peak.
pub(super) fn rows(classes: &Classes, states: &States) -> Vec<(&'static str, u64)> {
    let Classes { constant, state, gradient, kept, activation, workspace, input, output, idle, staging, backend } =
        *classes;
    let arena = gradient + kept + activation + workspace + input + output + idle;
    let planned = constant + state + arena + staging + backend;
    let mut rows = vec![
        ("planned", planned),
        ("  weights", states.weight),
        ("  optimizer", states.optimizer),
        ("  running statistics", states.statistic),
        ("  moving averages", states.average),
        ("  sums of gradients", states.gradient),
        ("  between states", states.idle),
        ("  constants", constant),
        ("  arena", arena),
        ("    gradients", gradient),
        ("    kept for backward", kept),
        ("    other activations", activation),
        ("    workspace", workspace),
        ("    inputs", input),
        ("    outputs", output),
        ("    no data", idle),
        ("  staging", staging),
        ("  the backend's own", backend),
    ];
    rows.retain(|(_, bytes)| *bytes > 0);
    rows
}

/// The bytes of a training by what they hold.
pub fn training(classes: &Classes, states: &States) -> String {
    let rows = rows(classes, states);
    let planned = rows.first().map_or(0, |(_, bytes)| *bytes);
    let mut table = Table::new("<>>>");
    for (label, bytes) in rows {
        let size = format!("{} bytes", grouped(bytes));
        table.row([label.to_owned(), human(bytes), size, percent(bytes, planned)]);
    }
    table.to_string()
}
