//! Compares eager runs of a graph with planned runs.

use super::alloc::{Kind, smallest_device};
use super::{Eager, Log, Program};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::graph::Graph;
use crate::pass::Prepared;
use crate::plan::Planning;
use crate::plan::{self, Class, Limits, Recipe, View};
use crate::target::Target;
use crate::tensor::Tensor;
use serde::Serialize;

/// The settings of a comparison.
pub struct Setup<'a> {
    /// Opens the device. Every column opens it again.
    pub open: &'a dyn Fn() -> Result<Box<dyn Backend>>,
    /// The most bytes that a column may take.
    pub memory_limit: Option<u64>,
    /// Number of timed runs after the first one; 0 counts as 1.
    pub iters: usize,
    /// True to run plans on poisoned memory as well: see [`Exec::run_poisoned`].
    pub poison: bool,
    /// How the graph is prepared. `fuse` is ignored, because both settings are compared; chunks apply to the fused column only.
    pub recipe: Recipe,
    /// Called with the name of each column when it begins.
    pub progress: &'a dyn Fn(&str),
    /// Called with the name, graph and memory of each column that ran. Without it, nothing is logged.
    pub observe: Option<&'a dyn Fn(&str, &Graph, Observed)>,
}

/// The memory of a column over time.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Observed<'a> {
    Eager(&'a Program, &'a Log),
    Planned(View<'a>),
}

/// The figures of eager and planned runs of one graph.
///
/// All bytes count constants, inputs, outputs, activations, workspaces, staging and the backend's own, in every column.
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
    /// The column that the results of the others are compared with: the first that ran.
    pub reference: Option<String>,
    /// One column per way to run the graph: eager with each allocator, planned, planned with fusion.
    pub columns: Vec<Column>,
}

/// One way to run the graph.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// `eager direct`, ..., `planned`, `planned fused`.
    pub name: String,
    /// True if its kernels are those of the unfused graph. Its results must then be equal bit for bit.
    pub exact: bool,
    /// Kernel launches per run.
    pub launches: usize,
    /// Bytes of the staging segments, and of the backend's own. All other figures include them.
    pub staging_bytes: u64,
    /// Bytes of the smallest device that the column runs on. Planned: the bytes of the plan. Eager: found by simulating two
    /// runs on devices of growing size, whose own allocator wastes nothing.
    pub smallest_device_bytes: u64,
    /// The figures, or why there are none.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// The figures of a column that ran, or the reason why it does not fit.
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
    /// The most bytes live at once. Eager: the blocks in use, rounded up as the allocator does. Planned: the buffers, rounded
    /// up to the plan's alignment.
    pub peak_live_bytes: u64,
    /// The most bytes taken from the device at once.
    pub peak_reserved_bytes: u64,
    /// The share of `peak_reserved_bytes` that exceeds `peak_live_bytes`.
    pub fragmentation: f64,
    /// Calls of the driver that take or give back memory, from the empty device to the end of the first run.
    pub driver_calls_first: u64,
    /// The same calls in the last run alone.
    pub driver_calls_last: u64,
    /// Median time of the runs after the first, in milliseconds: writing inputs, all steps, reading outputs.
    pub median_ms: f64,
    /// How the results agree with those of the reference; `None` for the reference itself.
    pub agreement: Option<Agreement>,
}

/// How results agree with those of the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// True if every output is equal to the reference bit for bit, and, if the kernels are the same, every state after the last run.
    pub equal: bool,
    /// The largest difference of two elements, divided by the largest magnitude in the reference's output. The largest over
    /// all outputs.
    pub difference: f64,
    /// The output or state with this difference.
    pub output: String,
}

impl Comparison {
    /// Checks the results. Those of unfused columns must be equal bit for bit, those of fused columns within `tolerance` of the
    /// output's largest magnitude.
    ///
    /// # Errors
    /// [`Error::Differ`] with the first column whose results are not.
    pub fn verdict(&self, tolerance: f64) -> Result<()> {
        for column in &self.columns {
            let Outcome::Ran(Measured { agreement: Some(found), .. }) = &column.outcome else { continue };
            let (bound, agrees) = if column.exact {
                ("bit for bit".to_owned(), found.equal)
            } else {
                (format!("within {tolerance:e} of the peak"), found.difference <= tolerance)
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

/// Runs a graph in every way and compares the figures.
///
/// No pass has run on `graph` yet. `inputs` are in the graph's order.
///
/// # Errors
/// The graph cannot be lowered, an input has another type or shape, or the device fails. A column that does not fit is no error.
pub fn compare(graph: &Graph, inputs: &[Tensor], setup: &Setup) -> Result<Comparison> {
    let (target, pools) = (setup.open)().map(|device| (device.target().clone(), device.pools()))?;
    let unfused = Recipe { fuse: false, ..setup.recipe }.whole(graph.clone(), &target)?;
    let fused = Recipe { fuse: true, ..setup.recipe };
    let fused = fused.graph(graph.clone(), &target, &Limits { memory: setup.memory_limit })?;
    let program = Program::new(&unfused, &target)?;
    let mut columns = Columns {
        comparison: Comparison {
            model: graph.name.clone(),
            target: target.name.clone(),
            memory_limit: setup.memory_limit,
            runs: 1 + setup.iters.max(1),
            reference: None,
            columns: Vec::new(),
        },
        names: program.outputs.iter().chain(&program.states).map(|p| p.name.clone()).collect(),
        outputs: program.outputs.len(),
        reference: None,
    };
    for kind in Kind::ALL.into_iter().chain(pools.then_some(Kind::Async)) {
        columns.add(eager(setup, &program, &unfused.graph, kind, inputs)?);
    }
    for (name, graph) in [("planned", &unfused), ("planned fused", &fused)] {
        columns.add(planned(setup, name, graph, &target, inputs)?);
    }
    Ok(columns.comparison)
}

/// How far an output is off.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// Its name.
    pub name: String,
    /// The largest difference of two elements, divided by the largest magnitude in the output that is right.
    pub of_peak: f64,
}

/// Runs the plan of a graph with weights in few bits, and one of the graph with its floats, once each. Returns how far each output of the first
/// is off.
///
/// # Errors
/// As [`compare`]; [`Error::Fit`] if the graph with its floats takes more than the limit.
pub fn moved_by_quantizing(graph: &Graph, inputs: &[Tensor], setup: &Setup) -> Result<Vec<Moved>> {
    let run = |recipe: Recipe| {
        let device = (setup.open)()?;
        let limits = Limits { memory: setup.memory_limit };
        let (plan, constants) = recipe.compile(graph.clone(), device.target(), &limits)?;
        let names: Vec<_> = plan.programs[0].outputs.iter().map(|port| port.name.clone()).collect();
        let outputs = Exec::load(device, plan, &constants, &|_| {})?.run(inputs)?;
        Ok((names, outputs))
    };
    let (names, right) = run(Recipe { quantize: None, ..setup.recipe })?;
    let (_, rounded) = run(setup.recipe)?;
    let moved = |((name, a), b): ((String, &Tensor), &Tensor)| {
        let of_peak = if a == b { 0.0 } else { difference(&a.to_f64(), &b.to_f64()) };
        Moved { name, of_peak }
    };
    Ok(names.into_iter().zip(&right).zip(&rounded).map(moved).collect())
}

/// The comparison so far, with the outputs that the next columns are compared with.
struct Columns {
    comparison: Comparison,
    /// Names of the outputs, then of the states.
    names: Vec<String>,
    /// Number of outputs.
    outputs: usize,
    reference: Option<Vec<Tensor>>,
}

impl Columns {
    /// Adds a column and, if it ran, its outputs and states. States go on from run to run, and small differences grow in them: they are
    /// compared if the kernels are the same.
    fn add(&mut self, (mut column, outputs): (Column, Option<Vec<Tensor>>)) {
        if let (Outcome::Ran(measured), Some(outputs)) = (&mut column.outcome, outputs) {
            let compared = if column.exact { self.names.len() } else { self.outputs };
            match &self.reference {
                Some(reference) => {
                    measured.agreement = Some(agreement(&self.names[..compared], reference, &outputs));
                }
                None => {
                    self.comparison.reference = Some(column.name.clone());
                    self.reference = Some(outputs);
                }
            }
        }
        self.comparison.columns.push(column);
    }
}

/// The column of an allocator, and its outputs if it ran. `program` is `graph`, lowered.
fn eager(
    setup: &Setup,
    program: &Program,
    graph: &Graph,
    kind: Kind,
    inputs: &[Tensor],
) -> Result<(Column, Option<Vec<Tensor>>)> {
    let name = format!("eager {}", kind.name());
    (setup.progress)(&name);
    let log = setup.observe.map(|_| Log::default());
    let ran = Eager::load(program, (setup.open)()?, kind, setup.memory_limit, log).and_then(|mut eager| {
        let ran = measure(&mut eager, inputs, setup.iters)?;
        if let (Some(observe), Some(log)) = (setup.observe, eager.log()) {
            observe(&name, graph, Observed::Eager(program, log));
        }
        Ok(ran)
    });
    let (outcome, outputs) = outcome(ran)?;
    let staging_bytes = program.staging_bytes();
    let smallest_device_bytes = smallest_device(kind, &program.trace(2))? + staging_bytes;
    let launches = program.launches();
    Ok((Column { name, exact: true, launches, staging_bytes, smallest_device_bytes, outcome }, outputs))
}

/// The column of a plan, and its outputs if it ran.
fn planned(
    setup: &Setup,
    name: &str,
    graph: &Prepared,
    target: &Target,
    inputs: &[Tensor],
) -> Result<(Column, Option<Vec<Tensor>>)> {
    (setup.progress)(name);
    let (plan, constants) = plan::compile(graph, target, &Limits { memory: None })?;
    let (launches, needed, staging_bytes) = (
        plan.programs[0].steps.len(),
        plan.bytes(),
        [Class::Staging, Class::Backend, Class::Reserve].map(|class| plan.class_bytes(class)).iter().sum(),
    );
    let ran = match setup.memory_limit {
        Some(limit) if needed > limit => {
            Err(Error::Fit { what: format!("the plan of '{}'", plan.title()), needed, limit, file: None })
        }
        _ => Exec::load((setup.open)()?, plan, &constants, &|_| {}).and_then(|mut exec| {
            let measured = measure(&mut exec, inputs, setup.iters)?;
            if setup.poison {
                exec.run_poisoned(inputs)?;
            }
            if let Some(observe) = setup.observe {
                observe(name, &graph.graph, Observed::Planned(exec.plan()));
            }
            Ok(measured)
        }),
    };
    let (outcome, outputs) = outcome(ran)?;
    let (name, exact) = (name.to_owned(), name == "planned");
    Ok((Column { name, exact, launches, staging_bytes, smallest_device_bytes: needed, outcome }, outputs))
}

/// The outcome of a column. A column that does not fit has one, too; any other error is returned.
fn outcome(ran: Result<(Measured, Vec<Tensor>)>) -> Result<(Outcome, Option<Vec<Tensor>>)> {
    match ran {
        Ok((measured, outputs)) => Ok((Outcome::Ran(measured), Some(outputs))),
        Err(error @ Error::Fit { .. }) => Ok((Outcome::Refused { does_not_fit: error.to_string() }, None)),
        Err(error) => Err(error),
    }
}

/// A loaded graph that can be run and measured.
trait Runs {
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>>;
    /// The states, in the graph's order.
    fn states(&mut self) -> Result<Vec<Tensor>>;
    /// Calls of the driver so far that take or give back memory.
    fn driver_calls(&self) -> u64;
    /// The most bytes live at once, and the most reserved at once.
    fn peaks(&self) -> (u64, u64);
    /// The device, whose clock times the runs.
    fn device(&mut self) -> &mut dyn Backend;
}

impl Runs for Eager<'_> {
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Eager::run(self, inputs)
    }

    fn states(&mut self) -> Result<Vec<Tensor>> {
        Eager::states(self)
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

    fn states(&mut self) -> Result<Vec<Tensor>> {
        let names: Vec<String> = self.plan().state.iter().map(|state| state.port.name.clone()).collect();
        names.iter().map(|name| self.state(name)).collect()
    }

    // A plan gives nothing back before the end, so only allocations count.
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

/// The most bytes live at once: the arena's lower bound is its live bytes at the peak, and other segments are always live.
fn peak_live(plan: View) -> u64 {
    plan.bytes() - plan.class_bytes(Class::Activation) + plan.summary.lower_bound
}

/// Runs a way several times. Returns the figures, the outputs of the last run, and behind them the states after it.
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
    outputs.extend(way.states()?);
    Ok((measured, outputs))
}

/// Compares outputs element by element.
fn agreement(names: &[String], reference: &[Tensor], outputs: &[Tensor]) -> Agreement {
    let mut worst = Agreement { equal: true, difference: 0.0, output: names.first().cloned().unwrap_or_default() };
    for ((name, a), b) in names.iter().zip(reference).zip(outputs) {
        let equal = a == b;
        let difference = if equal { 0.0 } else { difference(&a.to_f64(), &b.to_f64()) };
        if (worst.equal && !equal) || difference > worst.difference {
            worst.output.clone_from(name);
            worst.difference = difference;
        }
        worst.equal &= equal;
    }
    worst
}

/// The largest difference divided by the largest magnitude of `a`. The difference of a NaN and a number is infinite.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    let distance = |(&x, &y): (&f64, &f64)| match x - y {
        _ if x == y || (x.is_nan() && y.is_nan()) => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d => d.abs(),
    };
    let largest = a.iter().zip(b).map(distance).fold(0.0, f64::max);
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
        let found = agreement(&["y".into()], &[tensor(a)], &[tensor(b)]);
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
