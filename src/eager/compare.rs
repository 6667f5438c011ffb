//! Both ways to run a graph, side by side.

use super::alloc::{Kind, smallest_device};
use super::{Eager, Log, Program};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::graph::Graph;
use crate::plan::{self, Class, Limits, Plan, Recipe};
use crate::tensor::Tensor;
use serde::Serialize;

/// What is compared, and how.
pub struct Setup<'a> {
    /// Opens the device; every column gets one of its own.
    pub open: &'a dyn Fn() -> Result<Box<dyn Backend>>,
    /// The most bytes a column may take.
    pub memory_limit: Option<u64>,
    /// Timed runs behind the first one; at least one is made.
    pub iters: usize,
    /// Whether plans are run on poisoned memory as well: see [`Exec::run_poisoned`].
    pub poison: bool,
    /// What is made of the graph. Both ways of fusion are compared, and only what is fused is in chunks.
    pub recipe: Recipe,
    /// Is told the name of each column as it begins.
    pub progress: &'a dyn Fn(&str),
    /// Is shown the memory of each column that ran, and the graph that was lowered for it. Without it, nothing is logged.
    pub observe: Option<&'a dyn Fn(&str, &Graph, Observed)>,
}

/// What is where in a column's memory, and when.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Observed<'a> {
    Eager(&'a Program, &'a Log),
    Planned(&'a Plan),
}

/// Eager and planned runs of a graph.
///
/// All bytes are of whole columns: constants, inputs, outputs, activations, workspaces and staging, in each of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The graph's name.
    pub model: String,
    /// The target's name.
    pub target: String,
    /// The most bytes that a column may take.
    pub memory_limit: Option<u64>,
    /// Runs of each column, the first one included.
    pub runs: usize,
    /// The column whose results the others are held against, if any ran.
    pub reference: Option<String>,
    /// The ways to run it: eager with each allocator, planned, planned with fusion.
    pub columns: Vec<Column>,
}

/// A way to run the graph.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// `eager direct`, ..., `planned`, `planned fused`.
    pub name: String,
    /// Whether kernels are those of the unfused graph, so that results must be equal bit for bit.
    pub exact: bool,
    /// Kernel launches per run.
    pub launches: usize,
    /// Bytes that data passes through on its way to the device and back: host-visible memory, counted in all the other figures.
    pub staging_bytes: u64,
    /// Bytes of the smallest device on which it runs. Eager: found by simulation of two runs on ideal devices of growing size,
    /// whose own allocator loses nothing. Planned: what the plan says.
    pub smallest_device_bytes: u64,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Figures of a column that ran, or why it did not.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Outcome {
    Ran(Measured),
    Refused { does_not_fit: String },
}

/// Figures of a column that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The most bytes live at once. Eager: blocks in use, with what the allocator rounds up. Planned: buffers, with what the plan
    /// rounds up to its alignment.
    pub peak_live_bytes: u64,
    /// The most bytes held of the device at once.
    pub peak_reserved_bytes: u64,
    /// Share of `peak_reserved_bytes` that is beyond `peak_live_bytes`.
    pub fragmentation: f64,
    /// Calls of the driver to take or give back memory, from the empty device to the end of the first run.
    pub driver_calls_first: u64,
    /// The same, in the last run alone.
    pub driver_calls_last: u64,
    /// Median over the runs behind the first, milliseconds: inputs written, all steps, outputs read.
    pub median_ms: f64,
    /// The results beside those of the reference; `None` for the reference itself.
    pub agreement: Option<Agreement>,
}

/// How results compare with the reference's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Whether every output has the reference's very bytes.
    pub equal: bool,
    /// The largest difference of two elements, over the largest magnitude in the reference's output; of all outputs the largest.
    pub difference: f64,
    /// The output that it was found in.
    pub output: String,
}

impl Comparison {
    /// Judges the results: those of unfused columns must be equal bit for bit, those of fused ones within `tolerance` of the output's
    /// peak.
    ///
    /// # Errors
    /// [`Error::Differ`] with the first column that breaks this.
    pub fn verdict(&self, tolerance: f64) -> Result<()> {
        for column in &self.columns {
            let Outcome::Ran(Measured { agreement: Some(found), .. }) = &column.outcome else { continue };
            let (bound, agrees) = match column.exact {
                true => ("bit for bit".to_owned(), found.equal),
                false => (format!("within {tolerance:e} of the peak"), found.difference <= tolerance),
            };
            if !agrees {
                let reference = self.reference.as_deref().unwrap_or_default();
                return Err(Error::differ(format!(
                    "output '{}' of '{}' and of '{reference}': expected equal {bound}, found {:.3e} of the peak apart",
                    found.output, column.name, found.difference
                )));
            }
        }
        Ok(())
    }
}

/// Runs a graph, before any pass, in every way; `inputs` are in the graph's order.
///
/// # Errors
/// When the graph cannot be lowered, an input does not fit, or the device fails. A column that does not fit is a result.
pub fn compare(graph: &Graph, inputs: &[Tensor], setup: &Setup) -> Result<Comparison> {
    let (target, pools) = (setup.open)().map(|device| (device.target().clone(), device.pools()))?;
    let unfused = Recipe { fuse: false, ..setup.recipe }.whole(graph.clone(), &target)?;
    let fused = Recipe { fuse: true, ..setup.recipe };
    let fused = fused.graph(graph.clone(), &target, &Limits { memory: setup.memory_limit })?;
    let program = Program::new(&unfused, &target)?;
    let names: Vec<&str> = program.outputs.iter().map(|p| p.name.as_str()).collect();

    let mut comparison = Comparison {
        model: graph.name.clone(),
        target: target.name.clone(),
        memory_limit: setup.memory_limit,
        runs: 1 + setup.iters.max(1),
        reference: None,
        columns: Vec::new(),
    };
    let mut reference: Option<Vec<Tensor>> = None;
    let mut add = |mut column: Column, outputs: Option<Vec<Tensor>>| {
        if let (Outcome::Ran(measured), Some(outputs)) = (&mut column.outcome, outputs) {
            match &reference {
                Some(reference) => measured.agreement = Some(agreement(&names, reference, &outputs)),
                None => {
                    comparison.reference = Some(column.name.clone());
                    reference = Some(outputs);
                }
            }
        }
        comparison.columns.push(column);
    };
    let trace = program.trace(2);
    for kind in Kind::ALL.into_iter().chain(pools.then_some(Kind::Async)) {
        let name = format!("eager {}", kind.name());
        (setup.progress)(&name);
        let load = if setup.observe.is_some() { Eager::load_logged } else { Eager::load };
        let ran = load(&program, (setup.open)()?, kind, setup.memory_limit).and_then(|mut eager| {
            let ran = measure(&mut eager, inputs, setup.iters)?;
            if let (Some(observe), Some(log)) = (setup.observe, eager.log()) {
                observe(&name, &unfused, Observed::Eager(&program, log));
            }
            Ok(ran)
        });
        let (outcome, outputs) = outcome(ran)?;
        let staging_bytes = program.staging_bytes();
        let smallest_device_bytes = smallest_device(kind, &trace)? + staging_bytes;
        let launches = program.launches();
        add(Column { name, exact: true, launches, staging_bytes, smallest_device_bytes, outcome }, outputs);
    }
    for (name, graph) in [("planned", &unfused), ("planned fused", &fused)] {
        (setup.progress)(name);
        let (plan, constants) = plan::compile(graph, &target, &Limits { memory: None })?;
        let (launches, needed, staging_bytes) = (plan.steps.len(), plan.bytes(), plan.class_bytes(Class::Staging));
        let ran = match setup.memory_limit {
            Some(limit) if needed > limit => {
                Err(Error::Fit { what: format!("the plan of '{}'", plan.name), needed, limit, file: None })
            }
            _ => Exec::load((setup.open)()?, plan, &constants, &|_| {}).and_then(|mut exec| {
                let measured = measure(&mut exec, inputs, setup.iters)?;
                if setup.poison {
                    exec.run_poisoned(inputs)?;
                }
                if let Some(observe) = setup.observe {
                    observe(name, graph, Observed::Planned(exec.plan()));
                }
                Ok(measured)
            }),
        };
        let (outcome, outputs) = outcome(ran)?;
        let exact = name == "planned";
        let name = name.to_owned();
        add(Column { name, exact, launches, staging_bytes, smallest_device_bytes: needed, outcome }, outputs);
    }
    Ok(comparison)
}

/// Not fitting is a result; any other failure is one.
fn outcome(ran: Result<(Measured, Vec<Tensor>)>) -> Result<(Outcome, Option<Vec<Tensor>>)> {
    match ran {
        Ok((measured, outputs)) => Ok((Outcome::Ran(measured), Some(outputs))),
        Err(error @ Error::Fit { .. }) => Ok((Outcome::Refused { does_not_fit: error.to_string() }, None)),
        Err(error) => Err(error),
    }
}

/// What runs a graph, and tells of its memory.
trait Runs {
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>>;
    /// Calls of the driver so far.
    fn driver_calls(&self) -> u64;
    /// The most bytes live, and the most reserved.
    fn peaks(&self) -> (u64, u64);
    /// The device, for its clock.
    fn device(&mut self) -> &mut dyn Backend;
}

impl Runs for Eager<'_> {
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Eager::run(self, inputs)
    }

    fn driver_calls(&self) -> u64 {
        self.stats().driver_calls + self.program.staging.len() as u64
    }

    fn peaks(&self) -> (u64, u64) {
        let (stats, staging) = (self.stats(), self.program.staging_bytes());
        (stats.peak_live + staging, stats.peak_reserved + staging)
    }

    fn device(&mut self) -> &mut dyn Backend {
        &mut *self.device.backend
    }
}

impl Runs for Exec {
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Exec::run(self, inputs)
    }

    /// Nothing is given back before the end.
    fn driver_calls(&self) -> u64 {
        self.backend().usage().allocations
    }

    fn peaks(&self) -> (u64, u64) {
        (peak_live(self.plan()), self.backend().usage().bytes)
    }

    fn device(&mut self) -> &mut dyn Backend {
        self.backend_mut()
    }
}

/// The arena's lower bound is what is live in it at the peak; the other segments are live throughout.
fn peak_live(plan: &Plan) -> u64 {
    plan.bytes() - plan.class_bytes(Class::Activation) + plan.summary.lower_bound
}

fn measure(way: &mut dyn Runs, inputs: &[Tensor], iters: usize) -> Result<(Measured, Vec<Tensor>)> {
    let mut outputs = way.run(inputs)?;
    let driver_calls_first = way.driver_calls();
    let mut times = Vec::new();
    let mut before = driver_calls_first;
    for _ in 0..iters.max(1) {
        before = way.driver_calls();
        let start = way.device().start()?;
        outputs = way.run(inputs)?;
        times.push(way.device().stop(start)?.as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    let median_ms = if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2.0 };
    let (peak_live_bytes, peak_reserved_bytes) = way.peaks();
    let unused = peak_reserved_bytes.saturating_sub(peak_live_bytes);
    let measured = Measured {
        peak_live_bytes,
        peak_reserved_bytes,
        fragmentation: unused as f64 / peak_reserved_bytes.max(1) as f64,
        driver_calls_first,
        driver_calls_last: way.driver_calls() - before,
        median_ms,
        agreement: None,
    };
    Ok((measured, outputs))
}

/// Compares outputs, element by element.
fn agreement(names: &[&str], reference: &[Tensor], outputs: &[Tensor]) -> Agreement {
    let mut worst = Agreement { equal: true, difference: 0.0, output: names.first().copied().unwrap_or("").into() };
    for ((name, a), b) in names.iter().zip(reference).zip(outputs) {
        let equal = a == b;
        let difference = if equal { 0.0 } else { difference(&a.to_f64(), &b.to_f64()) };
        if (worst.equal && !equal) || difference > worst.difference {
            worst.output = (*name).into();
            worst.difference = difference;
        }
        worst.equal &= equal;
    }
    worst
}

/// The largest difference over the largest magnitude of `a`. A NaN beside a number is infinitely far from it.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    let apart = |(&x, &y): (&f64, &f64)| match x - y {
        _ if x == y || (x.is_nan() && y.is_nan()) => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d => d.abs(),
    };
    let largest = a.iter().zip(b).map(apart).fold(0.0, f64::max);
    let peak = a.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f64::max);
    if largest == 0.0 { 0.0 } else { largest / peak }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_f32([values.len()], values).expect("as many values")
    }

    fn compared(a: &[f32], b: &[f32]) -> (bool, f64) {
        let found = agreement(&["y"], &[tensor(a)], &[tensor(b)]);
        (found.equal, found.difference)
    }

    #[test]
    fn differences_are_relative_to_the_peak() {
        assert_eq!(compared(&[1.0, -4.0], &[1.0, -4.0]), (true, 0.0));
        assert_eq!(compared(&[1.0, -4.0], &[2.0, -4.0]), (false, 0.25));
        assert_eq!(compared(&[0.0, 1.0], &[-0.0, 1.0]), (false, 0.0));
        assert_eq!(compared(&[f32::NAN, f32::INFINITY], &[f32::NAN, f32::INFINITY]), (true, 0.0));
        assert_eq!(compared(&[f32::NAN, 1.0], &[1.0, 1.0]), (false, f64::INFINITY));
        assert_eq!(compared(&[0.0], &[1e-9]), (false, f64::INFINITY));
    }

    #[test]
    fn the_verdict_names_the_column_and_the_output() {
        let measured = |agreement| Measured {
            peak_live_bytes: 1,
            peak_reserved_bytes: 1,
            fragmentation: 0.0,
            driver_calls_first: 1,
            driver_calls_last: 0,
            median_ms: 1.0,
            agreement,
        };
        let column = |name: &str, exact, agreement| Column {
            name: name.into(),
            exact,
            launches: 1,
            staging_bytes: 0,
            smallest_device_bytes: 1,
            outcome: Outcome::Ran(measured(agreement)),
        };
        let found = |equal, difference| Some(Agreement { equal, difference, output: "y".into() });
        let mut comparison = Comparison {
            model: "m".into(),
            target: "cpu".into(),
            memory_limit: None,
            runs: 2,
            reference: Some("a".into()),
            columns: vec![column("a", true, None), column("b", true, found(true, 0.0))],
        };
        comparison.columns.push(column("c", false, found(false, 1e-5)));
        assert!(comparison.verdict(1e-4).is_ok());
        let error = comparison.verdict(1e-6).expect_err("a fused column is too far off");
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains("output 'y' of 'c' and of 'a'"), "{error}");
        comparison.columns[1] = column("b", true, found(false, 0.0));
        assert!(comparison.verdict(1e-4).is_err());
    }
}
