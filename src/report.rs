//! What people look at: text that is aligned, plain, and the same in a pipe.

use crate::backend::Usage;
use crate::eager::compare::{Agreement, Column, Comparison, Measured, Outcome};
use crate::error::Result;
use crate::graph::Graph;
use crate::plan::{Class, Plan};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Rows of cells in columns.
#[derive(Clone, Debug)]
pub struct Table {
    align: &'static str,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows. `align` has `<` for a column of words, `>` for one of numbers; its last character holds for
    /// all columns behind it.
    pub fn new(align: &'static str) -> Table {
        Table { align, rows: Vec::new() }
    }

    /// Adds a row. Rows may differ in length.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl std::fmt::Display for Table {
    /// One line per row, two spaces between columns, none at the end.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cells = |k: usize| self.rows.iter().filter_map(move |row| row.get(k));
        let widths: Vec<usize> = (0..columns).map(|k| cells(k).map(|c| c.chars().count()).max().unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (k, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = if k == 0 { "" } else { "  " };
                let right = self.align.chars().nth(k).or(self.align.chars().last()) == Some('>');
                line += &if right { format!("{gap}{cell:>width$}") } else { format!("{gap}{cell:width$}") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A number of bytes in the largest unit that it fills: `1.50 MiB`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    match power.checked_sub(1) {
        None => format!("{bytes} B"),
        Some(unit) => format!("{:.2} {}", bytes as f64 / (1u64 << (10 * power)) as f64, UNITS[unit]),
    }
}

/// A whole number with its digits in groups of three: `1,572,864`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (k, digit) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of bytes, readable and exact: `1.50 MiB (1,572,864 bytes)`.
pub fn bytes(bytes: u64) -> String {
    format!("{} ({} bytes)", human(bytes), grouped(bytes))
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// The plan's memory block: what will be taken from the device, for what, and how close the arena is to its bound. With what a
/// device says it has given, if the plan was loaded on one.
pub fn memory(plan: &Plan, usage: Option<Usage>) -> String {
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
    for (class, label) in [
        (Class::Constant, "  constants"),
        (Class::State, "  state"),
        (Class::Input, "  inputs"),
        (Class::Output, "  outputs"),
        (Class::Activation, "  arena"),
        (Class::Staging, "  staging"),
    ] {
        let bytes = plan.class_bytes(class);
        if bytes > 0 || class == Class::Activation {
            line(label, bytes, format!("{:>7}", percent(bytes, planned)));
        }
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
    if let Some(Usage { overhead, .. }) = usage {
        line("beside the plan", overhead, "the backend's own".into());
    }
    table.to_string()
}

/// What a device holds beside the plan, part by part.
pub fn overhead(parts: &[(&'static str, i64)]) -> String {
    let mut table = Table::new("<>>");
    for &(what, taken) in parts {
        let sign = if taken < 0 { "-" } else { "" };
        let size = taken.unsigned_abs();
        table.row([format!("  {what}"), format!("{sign}{}", human(size)), format!("{sign}{} bytes", grouped(size))]);
    }
    table.to_string()
}

/// Bytes of the plan that hold something needed while each step runs: all but the arena always do.
pub fn live(plan: &Plan) -> Vec<u64> {
    let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (s, step) in plan.steps.iter().enumerate() {
        for &b in step.reads.iter().chain(&step.writes) {
            uses[b] = Some(uses[b].map_or((s, s), |(first, _)| (first, s)));
        }
    }
    let arena = |b: &usize| plan.segments[plan.buffers[*b].segment].class == Class::Activation;
    let resident = plan.bytes() - plan.class_bytes(Class::Activation);
    let buffers: Vec<usize> = (0..plan.buffers.len()).filter(arena).collect();
    let at = |step: usize| {
        let live = |b: &usize| uses[*b].is_some_and(|(first, last)| first <= step && step <= last);
        let range = |b: usize| {
            let buffer = &plan.buffers[b];
            (buffer.segment, buffer.offset, buffer.offset + buffer.bytes)
        };
        // Buffers may share bytes, which count once.
        let mut ranges: Vec<_> = buffers.iter().copied().filter(live).map(range).collect();
        ranges.sort_unstable();
        let mut end = (0, 0);
        ranges.iter().fold(resident, |sum, &(segment, from, to)| {
            let from = if end.0 == segment { from.max(end.1) } else { from };
            end = (segment, if end.0 == segment { to.max(end.1) } else { to });
            sum + to.saturating_sub(from)
        })
    };
    (0..plan.steps.len()).map(at).collect()
}

/// A run in Chrome's trace format, which Perfetto reads: one span per step, end to end, over the bytes that are live. `times` and
/// `notes` have an entry per step.
pub fn trace(plan: &Plan, device: &str, times: &[Duration], notes: &[String]) -> Value {
    let name = |what: &str, name: &str| json!({"ph": "M", "pid": 0, "tid": 0, "name": what, "args": {"name": name}});
    let mut events = vec![name("process_name", &plan.name), name("thread_name", device)];
    let mut now = 0.0;
    let microseconds = |time: Duration| time.as_secs_f64() * 1e6;
    for (((step, time), note), live) in plan.steps.iter().zip(times).zip(notes).zip(live(plan)) {
        let bytes = |list: &[usize]| list.iter().map(|&b| plan.buffers[b].bytes).sum::<u64>();
        events.push(json!({"ph": "C", "pid": 0, "name": "live bytes", "ts": now, "args": {"bytes": live}}));
        events.push(json!({
            "ph": "X", "pid": 0, "tid": 0, "name": step.name, "cat": plan.kernels[step.kernel].template.name(),
            "ts": now, "dur": microseconds(*time),
            "args": {"kernel": note, "reads": bytes(&step.reads), "writes": bytes(&step.writes)},
        }));
        now += microseconds(*time);
    }
    let resident = plan.bytes() - plan.class_bytes(Class::Activation);
    events.push(json!({"ph": "C", "pid": 0, "name": "live bytes", "ts": now, "args": {"bytes": resident}}));
    json!({"displayTimeUnit": "ns", "traceEvents": events})
}

/// Which kernel each step got on a device, and why where there was a choice.
pub fn placement(plan: &Plan, device: &str, notes: &[String]) -> String {
    let mut table = Table::new("><");
    table.row(["step", "node", "kernel", "shape", "as"]);
    for (number, (step, note)) in plan.steps.iter().zip(notes).enumerate() {
        let kernel = &plan.kernels[step.kernel];
        let (template, shape) = (kernel.template.name().to_owned(), kernel.shape.to_string());
        table.row([number.to_string(), step.name.clone(), template, shape, note.clone()]);
    }
    format!("all steps on {device}\n\n{table}")
}

/// The graph in Graphviz's language; nodes that are one kernel stand in one box.
///
/// # Errors
/// When the graph has a cycle.
pub fn dot(graph: &Graph) -> Result<String> {
    let quote = |text: &str| format!("{text:?}");
    let mut groups: BTreeMap<Option<u32>, Vec<String>> = BTreeMap::new();
    let mut edges = String::new();
    for id in graph.order()? {
        let node = graph.node(id);
        let facts: Vec<_> = node.outputs.iter().map(|o| o.fact.to_string()).collect();
        let label = quote(&format!("{}\n{}\n{}", node.op_name(), node.name, facts.join(" ")));
        groups.entry(node.group).or_default().push(format!("  n{id} [shape=box label={label}];\n"));
        for value in graph.operands(id).into_iter().flatten() {
            edges += &format!("  n{} -> n{id};\n", value.node);
        }
    }
    let mut text = format!("digraph {} {{\n", quote(&graph.name));
    for (group, nodes) in groups {
        match group {
            Some(group) => text += &format!("  subgraph cluster_{group} {{\n{}  }}\n", nodes.concat()),
            None => text += &nodes.concat(),
        }
    }
    for (name, value) in graph.outputs() {
        edges += &format!("  n{} -> {};\n", value.node, quote(name));
    }
    Ok(text + &edges + "}\n")
}

/// The comparison as a table: a row per figure, a column per way to run.
pub fn comparison(comparison: &Comparison) -> String {
    let Comparison { model, target, memory_limit, runs, reference, columns } = comparison;
    let limit = memory_limit.map_or(String::new(), |limit| format!(", at most {}", bytes(limit)));
    let mut out = format!("{model} on {target}, {runs} runs each{limit}\n\n");

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
        row("staging in all of these", &|c| human(c.staging_bytes));
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

    out += "\nBytes: constants, inputs, outputs, activations, workspaces and staging, in every column.\n";
    out += "Smallest device: eager in simulation, on a device that loses nothing itself; planned by its plan.\n";
    if reference.is_some() {
        out += "Equal: bit for bit as the reference. Off: the largest difference over the peak of the reference's output.\n";
    }
    for column in columns {
        if let Outcome::Refused { does_not_fit } = &column.outcome {
            out += &format!("{}: {does_not_fit}\n", column.name);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Segment, Summary};
    use crate::target::{Memory, Target};

    #[test]
    fn bytes_are_readable_and_exact() {
        assert_eq!(bytes(0), "0 B (0 bytes)");
        assert_eq!(bytes(1023), "1023 B (1,023 bytes)");
        assert_eq!(bytes(1_572_864), "1.50 MiB (1,572,864 bytes)");
        assert_eq!(bytes(u64::MAX), "16.00 EiB (18,446,744,073,709,551,615 bytes)");
        assert_eq!(["12", "123", "1,234", "12,345,678"], [12, 123, 1234, 12345678].map(grouped));
    }

    #[test]
    fn cells_line_up() {
        let mut table = Table::new("<>");
        table.row(["", "a", "größer"]);
        table.row(["name", "1000", "2"]);
        table.row(["x"]);
        assert_eq!(table.to_string(), "         a  größer\nname  1000       2\nx\n");
        let mut table = Table::new("><");
        table.row(["1", "word", "word"]);
        table.row(["10", "x", ""]);
        assert_eq!(table.to_string(), " 1  word  word\n10  x\n");
    }

    #[test]
    fn the_memory_block_adds_up() {
        let segment = |class, bytes| Segment { class, memory: Memory::Device, bytes };
        let mut plan = Plan {
            version: crate::plan::VERSION,
            name: "m".into(),
            target: Target::cpu(1),
            summary: Summary { lower_bound: 1000, unshared_bytes: 4096, ..Summary::default() },
            segments: vec![
                segment(Class::Activation, 1024),
                segment(Class::Constant, 2048),
                segment(Class::Input, 512),
                segment(Class::Output, 512),
            ],
            buffers: Vec::new(),
            constants: Vec::new(),
            state: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            kernels: Vec::new(),
            steps: Vec::new(),
        };
        let block = memory(&plan, Some(Usage { bytes: 4000, allocations: 4, overhead: 100 }));
        let expected = "\
planned                4.00 KiB  4,096 bytes
allocated              3.91 KiB  4,000 bytes  96 fewer than planned
  constants            2.00 KiB  2,048 bytes                 50.0 %
  inputs                  512 B    512 bytes                 12.5 %
  outputs                 512 B    512 bytes                 12.5 %
  arena                1.00 KiB  1,024 bytes                 25.0 %
arena's lower bound      1000 B  1,000 bytes  the arena is 2.4 % over
arena without sharing  4.00 KiB  4,096 bytes  the arena is 25.0 %
beside the plan           100 B    100 bytes  the backend's own
";
        let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(squeeze(&block), squeeze(expected), "{block}");
        plan.summary.lower_bound = 1024;
        let block = memory(&plan, Some(Usage { bytes: 4096, allocations: 4, overhead: 0 }));
        assert!(block.contains("as planned") && block.contains("reached"), "{block}");
        assert!(!memory(&plan, None).contains("allocated"));
    }

    #[test]
    fn a_column_that_does_not_fit_says_why() {
        let measured = Measured {
            peak_live_bytes: 1000,
            peak_reserved_bytes: 2048,
            fragmentation: 0.5,
            driver_calls_first: 3,
            driver_calls_last: 0,
            median_ms: 0.25,
            agreement: None,
        };
        let refused = Outcome::Refused { does_not_fit: "too large".into() };
        let column = |name: &str, outcome| Column {
            name: name.into(),
            exact: true,
            launches: 7,
            staging_bytes: 0,
            smallest_device_bytes: 1 << 21,
            outcome,
        };
        let text = comparison(&Comparison {
            model: "m".into(),
            target: "cpu".into(),
            memory_limit: Some(4096),
            runs: 21,
            reference: Some("planned".into()),
            columns: vec![column("eager bfc", refused), column("planned", Outcome::Ran(measured))],
        });
        let expected = "\
m on cpu, 21 runs each, at most 4.00 KiB (4,096 bytes)

                                 eager bfc    planned
kernel launches                          7          7
peak live                                -     1000 B
  bytes                                  -      1,000
peak reserved                            -   2.00 KiB
  bytes                                  -      2,048
smallest device that fits         2.00 MiB   2.00 MiB
  bytes                          2,097,152  2,097,152
fragmentation                            -     50.0 %
driver calls, load and run 1             -          3
driver calls, run 21                     -          0
median run                               -   0.250 ms
results                       does not fit  reference
";
        assert_eq!(&text[..expected.len()], expected);
        assert!(text.ends_with("eager bfc: too large\n"), "{text}");
    }
}
