//! Reports the steps of a plan: their kernels and times.

use super::{Table, grouped};
use crate::plan::tell::timeline::Timeline;
use crate::plan::{BufferIdx, Class, KernelIdx, StepIdx, View};
use crate::roofline::Roofs;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// A run in Chrome's trace format, which Perfetto reads: one span per step, one after the other, with a curve of the live bytes.
///
/// `times` and `notes` have one entry per step.
pub fn trace(plan: View, device: &str, times: &[Duration], notes: &[String]) -> Value {
    let name = |what: &str, name: &str| json!({"ph": "M", "pid": 0, "tid": 0, "name": what, "args": {"name": name}});
    let mut events = vec![name("process_name", &plan.name), name("thread_name", device)];
    let mut now = 0.0;
    let microseconds = |time: Duration| time.as_secs_f64() * 1e6;
    let (timeline, resident) = (Timeline::of(plan), plan.bytes() - plan.class_bytes(Class::Activation));
    for (at, (time, note)) in StepIdx::all(&plan.steps).zip(times.iter().zip(notes)) {
        let (step, live) = (&plan.steps[at], resident + timeline.live(at));
        let bytes = |list: &[BufferIdx]| list.iter().map(|&b| plan.buffers[b].bytes).sum::<u64>();
        events.push(json!({"ph": "C", "pid": 0, "name": "live bytes", "ts": now, "args": {"bytes": live}}));
        events.push(json!({
            "ph": "X", "pid": 0, "tid": 0, "name": step.name, "cat": plan.kernels[step.kernel].template.name(),
            "ts": now, "dur": microseconds(*time),
            "args": {"kernel": note, "reads": bytes(&step.reads), "writes": bytes(&step.writes)},
        }));
        now += microseconds(*time);
    }
    events.push(json!({"ph": "C", "pid": 0, "name": "live bytes", "ts": now, "args": {"bytes": resident}}));
    json!({"displayTimeUnit": "ns", "traceEvents": events})
}

/// A step and the time that it takes by itself.
#[derive(Clone, Debug, Serialize)]
pub struct TimedStep {
    /// Its number.
    pub step: usize,
    /// The node whose result it computes.
    pub node: String,
    /// The algorithm of its kernel.
    pub algorithm: String,
    /// The bytes of the buffers that it reads and writes.
    pub bytes: u64,
    /// Its time in microseconds.
    pub median_us: f64,
    /// The share of the time of all steps; 0 to 1.
    pub share: f64,
    /// The share of the roof that is lower for it: of the rate of copies, or of products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roof: Option<f64>,
    /// The roof: copies or products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<&'static str>,
}

impl TimedStep {
    /// The steps of a plan. `times` and `notes` have one entry per step.
    pub fn of(plan: View, times: &[Duration], notes: &[String], roofs: Option<&Roofs>) -> Vec<TimedStep> {
        let all: Duration = times.iter().sum();
        let steps = plan.steps.iter().zip(times.iter().zip(notes)).enumerate();
        let timed = steps.map(|(number, (step, (time, note)))| {
            let bytes = step.reads.iter().chain(&step.writes).map(|&b| plan.buffers[b].bytes).sum();
            let reached = roofs.map(|roofs| roofs.reached(&plan.kernels[step.kernel], bytes, *time));
            TimedStep {
                step: number,
                node: step.name.clone(),
                algorithm: note.clone(),
                bytes,
                median_us: time.as_secs_f64() * 1e6,
                share: time.as_secs_f64() / all.as_secs_f64(),
                roof: reached.map(|reached| reached.share),
                bound: reached.map(|reached| if reached.multiplies { "products" } else { "copies" }),
            }
        });
        timed.collect()
    }
}

/// Steps with their times, the slowest first.
pub fn timed_steps(steps: &[TimedStep]) -> String {
    let mut sorted: Vec<&TimedStep> = steps.iter().collect();
    sorted.sort_by(|a, b| b.median_us.total_cmp(&a.median_us));
    let with_roofs = steps.iter().any(|step| step.roof.is_some());
    let mut table = Table::new(if with_roofs { "><<>>>>" } else { "><<>>>" });
    let heading = ["step", "node", "algorithm", "bytes", "median", "share", "of the roof"];
    table.row(heading.into_iter().take(if with_roofs { 7 } else { 6 }));
    for TimedStep { step, node, algorithm, bytes, median_us, share, roof, bound } in sorted {
        let (bytes, time, share) = (grouped(*bytes), format!("{median_us:.1} us"), format!("{:.1} %", 100.0 * share));
        let roof = roof.zip(*bound).map(|(share, of)| format!("{:.0} % of {of}", 100.0 * share));
        table.row([step.to_string(), node.clone(), algorithm.clone(), bytes, time, share].into_iter().chain(roof));
    }
    let all: f64 = steps.iter().map(|step| step.median_us).sum();
    format!("{table}all steps, one after another: {:.3} ms\n", all / 1e3)
}

/// The kernel of each step and its algorithm. `notes` has one entry per step.
pub fn placement(plan: View, notes: &[String]) -> String {
    let mut table = Table::new("><");
    table.row(["step", "node", "kernel", "shape", "algorithm"]);
    for (number, (step, note)) in plan.steps.iter().zip(notes).enumerate() {
        let kernel = &plan.kernels[step.kernel];
        let (template, shape) = (kernel.template.name().to_owned(), kernel.shape.to_string());
        table.row([number.to_string(), step.name.clone(), template, shape, note.clone()]);
    }
    table.to_string()
}

/// The algorithms that compute a plan's steps, in order of their first use, each with the number of its steps and kernels.
pub fn algorithms(plan: View) -> String {
    let mut found: Vec<([String; 3], usize, BTreeSet<KernelIdx>)> = Vec::new();
    for step in &plan.steps {
        let kernel = &plan.kernels[step.kernel];
        let name = kernel.schedule.name(kernel, plan.target);
        let row = [kernel.template.name().into(), name.into(), kernel.schedule.numbers()];
        let at = found.iter().position(|(other, ..)| *other == row).unwrap_or_else(|| {
            found.push((row, 0, BTreeSet::new()));
            found.len() - 1
        });
        found[at].1 += 1;
        found[at].2.insert(step.kernel);
    }
    let mut table = Table::new(">><");
    table.row(["steps", "kernels", "template", "algorithm"]);
    for ([template, name, numbers], steps, kernels) in found {
        table.row([steps.to_string(), kernels.len().to_string(), template, name, numbers]);
    }
    table.to_string()
}
