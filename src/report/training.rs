//! Reports what the bytes of a training hold.

use super::{Table, grouped, human, percent};
use crate::train::classes::{Classes, States};

/// The bytes of a training by what they hold. Those of the arena are of its peak.
pub fn training(classes: &Classes, states: &States) -> String {
    let Classes { constant, state, gradient, kept, activation, workspace, input, output, idle, staging, backend } =
        *classes;
    let arena = gradient + kept + activation + workspace + input + output + idle;
    let planned = constant + state + arena + staging + backend;
    let rows = [
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
    let mut table = Table::new("<>>>");
    for (label, bytes) in rows.into_iter().filter(|(_, bytes)| *bytes > 0) {
        let size = format!("{} bytes", grouped(bytes));
        table.row([label.to_owned(), human(bytes), size, percent(bytes, planned)]);
    }
    table.to_string()
}
