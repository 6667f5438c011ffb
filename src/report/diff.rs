//! Reports the difference between two plans.

use super::{Table, choices, count, grouped, human};
use crate::plan::SegmentIdx;
use crate::plan::tell::diff::{Changed, Diff, Fate};
use crate::plan::tell::peak::Peak;

/// The most buffers under one heading that are listed one by one.
const LISTED: usize = 12;

/// The totals, the buffers that grew, shrank or moved, and the peaks.
pub fn diff(diff: &Diff) -> String {
    let [a, b] = [0, 1].map(|k| format!("{} for {}", diff.plans[k], diff.targets[k]));
    let mut text = if a == b { format!("{a}\n\n") } else { format!("{a} -> {b}\n\n") };
    let mut table = Table::new("<>>>");
    table.row(["bytes", "before", "after", "change"]);
    let mut row = |label: &str, [before, after]: [u64; 2]| {
        table.row([label.to_owned(), grouped(before), grouped(after), change(before, after)]);
    };
    row("planned", diff.planned_bytes);
    for total in &diff.classes {
        row(&format!("  {}", total.class.name()), total.bytes);
    }
    text += &table.to_string();

    for (heading, fates) in [
        ("took more", &[Fate::New, Fate::Grown][..]),
        ("took less", &[Fate::Gone, Fate::Shrunk]),
        ("moved", &[Fate::Moved]),
    ] {
        let all: Vec<&Changed> = diff.buffers.iter().filter(|c| fates.contains(&c.fate)).collect();
        if all.is_empty() {
            continue;
        }
        text += &format!("\n{heading}: {}\n", all.len());
        let mut table = Table::new("<<<>>>");
        for changed in all.iter().take(LISTED) {
            let [before, after] = changed.bytes;
            let fate = match changed.fate {
                Fate::New => "new",
                Fate::Gone => "gone",
                _ => "",
            };
            let mut cells = vec![format!("  {}", changed.name), changed.class.name().to_owned(), fate.to_owned()];
            if changed.fate == Fate::Moved {
                let at =
                    |at: Option<(SegmentIdx, u64)>| at.map_or("-".into(), |(segment, at)| format!("{segment}:{at}"));
                cells.extend([human(after), format!("{} -> {}", at(changed.at[0]), at(changed.at[1]))]);
            } else {
                cells.extend([grouped(before), grouped(after), change(before, after)]);
            }
            table.row(cells);
        }
        text += &table.to_string();
        if let Some(rest) = all.get(LISTED..).filter(|rest| !rest.is_empty()) {
            let sum = |k: usize| rest.iter().map(|c| c.bytes[k]).sum::<u64>();
            text += &format!("  and {} others: {} -> {}\n", rest.len(), human(sum(0)), human(sum(1)));
        }
    }
    text += &format!("\nthe same: {}\n", count(diff.unchanged as u64, "buffer"));
    for (heading, knobs) in
        ["chosen only in the first plan", "chosen only in the second plan"].into_iter().zip(&diff.choices)
    {
        if !knobs.is_empty() {
            text += &format!("\n{heading}\n{}", choices(knobs));
        }
    }

    let at = |peak: &Peak| match peak.step {
        Some(step) => format!("step {step}, '{}' ({})", peak.name, peak.operator),
        None => "no step".to_owned(),
    };
    let [before, after] = diff.peaks.each_ref().map(at);
    text + &if before == after {
        format!("the peak is still {after}\n")
    } else {
        format!("the peak was {before}; it is {after}\n")
    }
}

/// The change in bytes with its sign and its share.
fn change(before: u64, after: u64) -> String {
    let sign = if after < before { "-" } else { "+" };
    match (before, after.abs_diff(before)) {
        (_, 0) => "0".into(),
        (0, by) => format!("{sign}{}", grouped(by)),
        (before, by) => format!("{sign}{} ({sign}{:.1} %)", grouped(by), 100.0 * by as f64 / before as f64),
    }
}
