//! Advice as text: the answer for a limit, the tensors that are live at the peak, and the remedies.

use super::{Advice, Answer, Largest, Refusal, Remedy, Rigid, Size, Taken, Verdict};
use crate::figures::{bytes, count, grouped, human};
use crate::plan::tell::peak::{Peak, Rest};
use crate::table::Table;
use std::fmt;

impl fmt::Display for Advice {
    /// The answer, the tensors that are live at the peak, and the remedies.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", advice(self))
    }
}

/// The answer, the peak, and the remedies.
pub fn advice(advice: &Advice) -> String {
    let answer = advice.answer.as_ref().map_or(String::new(), |a| {
        let helps = advice.remedies.iter().any(|remedy| remedy.bytes.within(a.limit_bytes).is_some());
        explained(a, helps) + "\n"
    });
    let limit = advice.answer.as_ref().map(|answer| answer.limit_bytes);
    let reordered = advice.file_order_bytes;
    answer + &peak(&advice.peak) + "\n" + &remedies(&advice.remedies, advice.peak.bytes, limit, reordered)
}

/// Why a training does not fit, and the remedies.
pub fn refusal(refusal: &Refusal) -> String {
    let Refusal { limit_bytes, needed_bytes, bound, whole_bytes, recompute, .. } = refusal;
    let step = bound.step.as_ref().map_or(String::new(), |step| format!(", when '{step}' runs"));
    let judged = if bound.bytes > *limit_bytes { "no plan fits" } else { "there is no proof that no plan fits" };
    format!(
        "{judged}: whatever is computed again, these kernels take at least {}{step}\n\
         the smallest plan that was found takes {}, with {:.1} % more operations; without a limit it is {}\n\n{}",
        bytes(bound.bytes),
        bytes(*needed_bytes),
        100.0 * recompute.share(),
        bytes(*whole_bytes),
        remedies(&refusal.remedies, *whole_bytes, Some(*limit_bytes), None)
    )
}

/// The answer for a limit.
pub fn answer(answer: &Answer) -> String {
    explained(answer, false)
}

/// The answer for a limit. If `helps`, it refers to the remedies below it.
fn explained(answer: &Answer, helps: bool) -> String {
    let limit = answer.limit_bytes;
    let spare = || format!("{} to spare", bytes(limit.saturating_sub(answer.needed_bytes)));
    let mut text = match answer.verdict {
        Verdict::Fits => return format!("fits: {}\n", spare()),
        Verdict::FitsReordered => {
            let over = answer.file_order_bytes.map_or(0, |file| file.saturating_sub(limit));
            return format!("fits after reordering: {}; in the file's order at least {} over\n", spare(), bytes(over));
        }
        Verdict::FitsSmaller => "fits at a smaller binding\n".to_owned(),
        Verdict::Cannot | Verdict::NotFound if helps => "does not fit; what would help is below\n".to_owned(),
        Verdict::Cannot => "does not fit, and no smaller binding does\n".to_owned(),
        Verdict::NotFound => "no plan was found that fits\n".to_owned(),
    };
    if answer.constant_bytes > limit {
        text =
            format!("the weights alone are above the limit: constants take {}\n{text}", bytes(answer.constant_bytes));
    }
    for Largest { dim, fits, next, .. } in &answer.smaller {
        if let Some(Size { extent, bytes: Taken::Bytes(taken) }) = fits {
            let next = next.as_ref().map_or(String::new(), |next| match &next.bytes {
                Taken::Bytes(taken) => format!("; {} takes {}", next.extent, bytes(*taken)),
                Taken::Fails(error) => format!("; {}: {error}", next.extent),
            });
            text += &format!("  --set {dim}={extent} takes {}{next}\n", bytes(*taken));
        } else if let Some(Size { extent, bytes: taken }) = next {
            text += &match taken {
                Taken::Bytes(least) => format!("  not even at {dim}={extent}: {}\n", bytes(*least)),
                Taken::Fails(error) => format!("  not even at {dim}={extent}: {error}\n"),
            };
        }
    }
    for Rigid { dim, error } in &answer.rigid {
        text += &format!("  no smaller {dim} was found that can be planned: {error}\n");
    }
    let Some(bound) = &answer.bound else { return text };
    let step = bound.step.as_ref().map_or(String::new(), |step| format!(", when '{step}' runs"));
    let judged = if bound.bytes > limit { "no plan of these kernels fits" } else { "a plan of these kernels may fit" };
    let least = format!("takes at least {}{step}", bytes(bound.bytes));
    text += &format!("{judged}: every order and placement of them {least}\n");
    text
}

/// The tensors that are live at the peak, in a table that adds up to the plan.
pub fn peak(peak: &Peak) -> String {
    let mut text = match peak.step {
        Some(step) => {
            let Peak { name, operator, .. } = peak;
            format!("live at the peak, step {step}: '{name}' ({operator})\n")
        }
        None => "no steps\n".to_owned(),
    };
    let mut table = Table::new("<<<>>");
    let size = |bytes: u64| [human(bytes), format!("{} bytes", grouped(bytes))];
    let mut row = |name: String, operator: &str, kernel: &str, bytes: u64| {
        let [readable, exact] = size(bytes);
        table.row([format!("  {name}"), operator.to_owned(), kernel.to_owned(), readable, exact]);
    };
    for holder in &peak.live {
        row(holder.name.clone(), &holder.operator, &holder.kernel, holder.bytes);
    }
    if peak.others.count > 0 {
        row(format!("{} smaller", peak.others.count), "", "", peak.others.bytes);
    }
    if peak.idle_bytes > 0 {
        row("between them".into(), "", "", peak.idle_bytes);
    }
    for Rest { class, count, bytes, largest } in &peak.held {
        let name = class.name();
        let label = match (largest, count) {
            (Some(only), 1) => format!("{name} {only}"),
            (Some(largest), _) => format!("all {count} {name}s (largest: {largest})"),
            (None, _) => name.to_owned(),
        };
        row(label, "", "", *bytes);
    }
    row("all".into(), "", "", peak.bytes);
    text += &table.to_string();
    text
}

/// The remedies: a table of those that save bytes, and a line for each of the others.
fn remedies(remedies: &[Remedy], needed: u64, limit: Option<u64>, file_order: Option<u64>) -> String {
    let mut table = Table::new("<<>><");
    let mut vain = Vec::new();
    let mut helpful = Vec::new();
    for remedy in remedies {
        match &remedy.bytes {
            // Saving less than a thousandth is no help.
            Taken::Bytes(bytes) if *bytes < needed - needed / 1000 => helpful.push((*bytes, remedy)),
            Taken::Bytes(bytes) => {
                vain.push(format!("{} ({}) takes {}", remedy.name, remedy.change, human(*bytes)));
            }
            Taken::Fails(error) => vain.push(format!("{}: {error}", remedy.name)),
        }
    }
    helpful.sort_by_key(|(bytes, _)| *bytes);
    for (bytes, remedy) in helpful {
        let less = format!("{} less", human(needed - bytes));
        let fits = match limit {
            Some(limit) if bytes <= limit => "fits",
            Some(_) => "does not fit",
            None => "",
        };
        let cells = [format!("  {}", remedy.name), remedy.change.clone(), human(bytes)];
        table.row(cells.into_iter().chain([less, fits.to_owned()]));
    }
    if let Some(file) = file_order.filter(|&file| file > needed) {
        let less = format!("{} less", human(file - needed));
        let cells = ["  reordering".to_owned(), "done".into(), human(needed), less];
        table.row(cells.into_iter().chain(["at least, than the file's order".to_owned()]));
    }
    let table = table.to_string();
    let mut text = if table.is_empty() { String::new() } else { format!("what would help\n{table}") };
    // A remedy that is tried in several sizes may fail with the same message each time.
    vain.dedup();
    for line in vain {
        text += &format!("no help: {line}\n");
    }
    text
}

/// The largest binding that fits, and the next larger one, if one was asked for.
pub fn largest(found: &Largest, limit: u64) -> String {
    let mut table = Table::new(">>><");
    table.row([found.dim.as_str(), "planned"]);
    for (size, largest) in found.fits.iter().map(|size| (size, true)).chain(found.next.iter().map(|size| (size, false)))
    {
        let cells = match &size.bytes {
            Taken::Bytes(bytes) => {
                let over = bytes.checked_sub(limit).filter(|over| *over > 0);
                let note = over.map_or("fits".to_owned(), |over| format!("{} over", human(over)));
                let note = match (largest, &found.next) {
                    (true, Some(_)) => "the largest that fits".to_owned(),
                    (true, None) => "fits; no more is asked for".to_owned(),
                    (false, _) => note,
                };
                [human(*bytes), format!("{} bytes", grouped(*bytes)), note]
            }
            Taken::Fails(error) => ["-".into(), String::new(), error.clone()],
        };
        table.row(std::iter::once(size.extent.to_string()).chain(cells));
    }
    format!("{table}\n{}, at most {}\n", count(found.plans as u64, "plan"), bytes(limit))
}
