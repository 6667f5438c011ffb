//! A plan's bytes by class, in a table.

use super::peak::{Peak, peak};
use crate::backend::Usage;
use crate::figures::{grouped, human};
use crate::table::{Table, percent};
use crate::{Class, Plan, View};
use std::fmt;

impl fmt::Display for Plan {
    /// The bytes by class, in a table; of several programs, what each of them has, and what they share.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.programs[..] {
            [_] => write!(f, "{}", memory(self.first(), None)),
            _ => write!(f, "{}\n{}", programs(self), shared(self, None)),
        }
    }
}

/// What takes a plan's bytes, in a line, and when most is live.
pub fn planned(plan: View) -> String {
    let part = |&(class, label): &(Class, &'static str)| (label, plan.class_bytes(class) * plan.plan.copies(class));
    let parts = CLASSES.iter().map(part).filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<_> = parts.map(|(label, bytes)| format!("{label} {}", human(bytes))).collect();
    let planned = plan.bytes();
    let mut text = format!("planned  {}  {} bytes: {}\n", human(planned), grouped(planned), parts.join(", "));
    if plan.plan.runs > 1 {
        let each = plan.plan.run_bytes();
        text += &format!(
            "each of the {} runs takes {}, beside the constants that they share\n",
            plan.plan.runs,
            human(each)
        );
    }
    match fullest(plan) {
        Some(step) => text + &step + "\n",
        None => text,
    }
}

/// The classes of a plan's bytes.
const CLASSES: [(Class, &str); 6] = [
    (Class::Constant, "constants"),
    (Class::State, "state"),
    (Class::Activation, "arena"),
    (Class::Staging, "staging"),
    (Class::Backend, "the backend's own"),
    (Class::Reserve, "NCCL's reserve"),
];

/// The plan's bytes by class, and how close the arena is to its lower bound. With `usage`, the bytes that the device reports.
pub fn memory(plan: View, usage: Option<Usage>) -> String {
    let mut table = Table::new("<>><");
    let mut line = |label: &str, bytes: u64, note: String| {
        table.row([label.to_owned(), human(bytes), format!("{} bytes", grouped(bytes)), note]);
    };
    let planned = plan.bytes();
    line("planned", planned, String::new());
    if let Some(Usage { bytes, .. }) = usage {
        let note = match bytes.cmp(&planned) {
            std::cmp::Ordering::Equal => "as planned".into(),
            std::cmp::Ordering::Less => format!("{} fewer than planned", grouped(planned - bytes)),
            std::cmp::Ordering::Greater => format!("{} more than planned", grouped(bytes - planned)),
        };
        line("allocated", bytes, note);
    }
    let offloaded = plan.plan.offloaded_bytes();
    if let Some(Usage { pinned, .. }) = usage.filter(|usage| usage.pinned != 0 || offloaded != 0) {
        let note =
            if pinned == offloaded { "as planned".to_owned() } else { format!("{} planned", grouped(offloaded)) };
        line("on the host", pinned, note);
    }
    for (class, label) in CLASSES {
        let bytes = plan.class_bytes(class) * plan.plan.copies(class);
        if bytes > 0 || class == Class::Activation {
            let of = match plan.target.threads {
                _ if class != Class::Backend => String::new(),
                1 => "  of 1 thread".into(),
                threads => format!("  of {threads} threads"),
            };
            let step = fullest(plan).filter(|_| class == Class::Activation);
            let of = step.map_or(of, |step| format!("  {step}"));
            line(&format!("  {label}"), bytes, format!("{:>7}{of}", percent(bytes, planned)));
        }
        let within = [(Class::Input, "    inputs in it"), (Class::Output, "    outputs in it")];
        for (class, label) in within.into_iter().filter(|_| class == Class::Activation) {
            match plan.buffer_bytes(class) {
                0 => {}
                bytes => line(label, bytes, String::new()),
            }
        }
    }
    if plan.plan.runs > 1 {
        let note = format!("{} at once, which share the constants", plan.plan.runs);
        line("each of the runs", plan.plan.run_bytes(), note);
    }
    let (arena, summary) = (plan.class_bytes(Class::Activation), &plan.summary);
    let over = arena.saturating_sub(summary.lower_bound);
    let gap = match over {
        0 => "reached".into(),
        _ => format!("the arena is {} over", percent(over, summary.lower_bound)),
    };
    line("arena's lower bound", summary.lower_bound, gap);
    let share = format!("the arena is {}", percent(arena, summary.unshared_bytes));
    line("arena without sharing", summary.unshared_bytes, share);
    if let Some(overhead) = usage.and_then(|usage| usage.overhead).filter(|bytes| *bytes > 0) {
        line("beside the plan", overhead, "the driver's".into());
    }
    let unknown = usage.is_some_and(|usage| usage.overhead.is_none());
    let unknown =
        if unknown { "beside the plan  not known: the driver does not count this process's memory\n" } else { "" };
    table.to_string() + unknown
}

/// When most of the arena is live.
fn fullest(plan: View) -> Option<String> {
    let Peak { step, name, steps, .. } = peak(plan, None);
    step.map(|step| format!("most is live in step {step} of {steps}: '{name}'"))
}

/// The bytes that a device holds beside the plan, part by part.
pub fn overhead(parts: &[(&'static str, u64)]) -> String {
    let mut table = Table::new("<>>");
    for &(what, taken) in parts {
        table.row([format!("  {what}"), human(taken), format!("{} bytes", grouped(taken))]);
    }
    table.to_string()
}

/// A table of programs.
pub fn programs(plan: &Plan) -> String {
    let mut table = Table::new("<>>>>>");
    table.row(["program", "steps", "arena's lower bound", "constants", "inputs", "outputs"]);
    for program in plan.views() {
        let bytes = |class| human(program.buffer_bytes(class));
        let (steps, least) = (program.steps.len().to_string(), human(program.summary.lower_bound));
        let [constants, inputs, outputs] = [Class::Constant, Class::Input, Class::Output].map(bytes);
        table.row([program.name.clone(), steps, least, constants, inputs, outputs]);
    }
    table.to_string()
}

/// A table of the bytes that programs share. `apart` is the sum of their bytes as plans of their own.
pub fn shared(plan: &Plan, apart: Option<u64>) -> String {
    let mut shared = Table::new("<>>");
    let mut line = |label: &str, bytes: u64| {
        shared.row([label.to_owned(), human(bytes), format!("{} bytes", grouped(bytes))]);
    };
    line("planned together", plan.bytes());
    for (class, label) in [
        (Class::Constant, "  constants"),
        (Class::State, "  state"),
        (Class::Activation, "  arena"),
        (Class::Staging, "  staging"),
        (Class::Backend, "  the backend's own"),
        (Class::Reserve, "  NCCL's reserve"),
    ] {
        match plan.class_bytes(class) * plan.copies(class) {
            0 => {}
            bytes => line(label, bytes),
        }
    }
    if plan.runs > 1 {
        line(&format!("each of {} runs", plan.runs), plan.run_bytes());
    }
    if let Some(apart) = apart {
        line("planned apart", apart);
    }
    shared.to_string()
}
