//! Reports what the bytes of a training hold.

use super::{Table, grouped, human, percent};
use crate::figures::count;
use crate::pass::recompute::Recompute;
use crate::train::classes::{Classes, States};
use crate::train::curve::Point;
use crate::train::{FROZEN, Outline, quoted, reasons};

/// The bytes of a training by what they hold, with their labels: all of them first. Those of the arena are of its peak.
pub(super) fn rows(classes: &Classes, states: &States) -> Vec<(&'static str, u64)> {
    let mut rows = figures(classes, states).to_vec();
    rows.retain(|(_, bytes)| *bytes > 0);
    rows
}

/// All figures, with their labels.
fn figures(classes: &Classes, states: &States) -> [(&'static str, u64); 19] {
    let Classes {
        constant,
        state,
        gradient,
        kept,
        activation,
        workspace,
        input,
        output,
        idle,
        staging,
        backend,
        reserve,
    } = *classes;
    let arena = gradient + kept + activation + workspace + input + output + idle;
    let planned = constant + state + arena + staging + backend + reserve;
    [
        ("planned", planned),
        ("  weights", states.weight),
        ("  optimizer", states.optimizer),
        ("  running statistics", states.statistic),
        ("  moving averages", states.average),
        ("  sums of gradients", states.gradient),
        ("  gaps between states", states.idle),
        ("  constants", constant),
        ("  arena", arena),
        ("    gradients", gradient),
        ("    kept for backward", kept),
        ("    other activations", activation),
        ("    workspace", workspace),
        ("    inputs", input),
        ("    outputs", output),
        ("    gaps in it", idle),
        ("  staging", staging),
        ("  the backend's own", backend),
        ("  NCCL's reserve", reserve),
    ]
}

/// The bytes of a training in `f32` and with values of 16 bits, where they differ.
pub fn precisions(name: &str, [wide, narrow]: [(&Classes, &States); 2]) -> String {
    let [before, after] = [wide, narrow].map(|(classes, states)| figures(classes, states));
    let mut table = Table::new("<>>");
    table.row(["", "f32", name].map(String::from));
    for ((label, before), (_, after)) in before.into_iter().zip(after).filter(|(before, after)| before != after) {
        table.row([label.to_owned(), human(before), human(after)]);
    }
    table.to_string()
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

/// Says that an update in one part takes fewer bytes.
pub fn undivided(bytes: u64, whole: u64) -> String {
    format!("accumulation takes {} more: {} without it", human(bytes - whole), human(whole))
}

/// What is trained and what is not, and how the model is read: a line each.
pub fn outline(outline: &Outline) -> Vec<String> {
    let Outline { trained, fixed, frozen_bytes, doubtful, output, doubled, class_axis, few, folded_norms } = outline;
    let weights = |number: usize| count(number as u64, "weight");
    let mut lines =
        vec![format!("trained: {}: {}", weights(trained.len()), quoted(trained.iter().map(String::as_str)))];
    for (why, names) in reasons(fixed) {
        lines.push(match why {
            FROZEN => format!("frozen: {}, {}", weights(names.len()), human(*frozen_bytes)),
            why => format!("not trained: {}: {why}", quoted(names.into_iter())),
        });
    }
    if !doubtful.is_empty() {
        let names = quoted(doubtful.iter().map(String::as_str));
        lines.push(format!("trained, but perhaps no weights: {names}; --freeze NAME leaves one as it is"));
    }
    if let Some((node, operator)) = doubled {
        // The softmax of a logarithm of a softmax is that softmax.
        let twice = match *operator {
            "LogSoftmax" => "it is computed twice, which changes no loss",
            _ => "it is taken twice, which gives another loss",
        };
        lines.push(format!(
            "warning: the first output is made by node '{node}' ({operator}), but the loss takes logits, the values before it: {twice}; export the model without it"
        ));
    }
    if let Some(axis) = class_axis.filter(|_| output.shape.len() > 2) {
        lines.push(format!("classes: axis {axis} of the first output, {output}; --class-axis sets another"));
    }
    if let Some((node, values)) = few.first() {
        let others = if few.len() > 1 { format!(", and of {} more", few.len() - 1) } else { String::new() };
        lines.push(format!(
            "warning: the statistics of norm '{node}'{others} are of {values} values per channel: take more rows in each part of a batch"
        ));
    }
    lines.extend(folded_norms.clone());
    lines
}

/// The values that an update computes again.
pub fn recompute(recompute: &Recompute) -> String {
    if recompute.extra_flop == 0 {
        return "\nnothing is computed again\n".to_owned();
    }
    let (share, bytes) = (100.0 * recompute.share(), human(recompute.extra_bytes));
    format!("\ncomputed again for the backward computation: {share:.1} % more operations, {bytes} read and written\n")
}

/// The bytes of plans under ever smaller limits, and what an update computes again in each.
pub fn curve(points: &[Point]) -> String {
    let mut table = Table::new(">>>>>");
    table.row(["planned", "", "of it arena", "more operations", "read and written for them"].map(String::from));
    for Point { planned_bytes, arena_bytes, recompute } in points {
        table.row([
            human(*planned_bytes),
            format!("{} bytes", grouped(*planned_bytes)),
            human(*arena_bytes),
            format!("{:.1} %", 100.0 * recompute.share()),
            human(recompute.extra_bytes),
        ]);
    }
    table.to_string()
}
