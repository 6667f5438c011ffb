//! `plan` and `check`: plan a graph's memory, and check a plan, with no device.

use super::args::{self, Backend, Model, On};
use super::method::{self, Method, Trained};
use super::programs::{self, More};
use super::subject::Subject;
use super::{Failure, line};
use crate::advise::{Advice, Trained as Case, advise};
use crate::beside;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::figures::count;
use crate::graph::Graph;
use crate::kernel::tuned::Tuned;
use crate::pass::recompute::Recompute;
use crate::plan::range::{ShapeRange, Tried};
use crate::plan::tell::peak::peak;
use crate::plan::{self, Graphs, Job, Planned, Planner};
use crate::session::Options;
use crate::shape::Extent;
use crate::target::{Family, Target};
use crate::train::Programs;
use crate::train::classes::{Classes, States, host_bytes};
use crate::train::curve::{Point, curve, recompute};
use crate::tune::cache;
use crate::{file, report, session};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
plan = planned|programs|training
planned
  ..plan_file
  file text
  binding? {int|text}
  range? [tried]
  beside? beside
  answer? answer
  advice? advice
  placement? [placed]
tried
  binding {int}
  live_bytes int
programs
  ..subject
  version int
  programs [plan_file]
  beside? beside
training
  ..programs
  ..training_bytes
  recompute recompute
  curve? [point]
  trained [text]
  fixed [[text]]
  outline [text]
  precision text
  f32? training_bytes
  wide? [[text]]
training_bytes
  planned_bytes int
  host_bytes int
  classes classes
  states states
point
  planned_bytes int
  arena_bytes int
  ..recompute
plan_file
  version int
  name text
  program? text
  target target
  dims? [dim]
  tuned? measured
  forks? int
  recompute? recompute
  origin? origin
  summary summary
  segments [segment]
  buffers [buffer]
  constants [constant]
  state [state]
  inputs [port]
  outputs [port]
  kernels [object]
  steps [step]
dim
  name text
  least int
  most int
measured
  device text
  steps int
origin
  content text
  dims? [dim]
  state? [[text]]
  given? [text]
  training? bool
  outputs? [text]
  recipe recipe
  memory_limit? int
recipe
  f16 bool
  fuse bool
  chunks int
  quantize? quantize
quantize
  bits int
  block int
summary
  planned_bytes int
  arena_bytes int
  lower_bound int
  constant_bytes int
  state_bytes int
  input_bytes int
  output_bytes int
  staging_bytes int
  backend_bytes? int
  unshared_bytes int
  steps int
  orders? [order]
order
  name text
  bound int
  peak int
segment
  class class
  memory? 'device'|'upload'|'download'|'scratch'|'own'|'ahead'
  bytes int
buffer
  name text
  dtype text
  shape [int]
  segment int
  offset int
  bytes int
  class class
constant
  name text
  dtype text
  buffer int
  packed? [int]
port
  name text
  dtype text
  shape [int]
  buffer int
  indexes? [indexes]
  counted? [counted]
  fewest? fewest
counted
  axis int
  by text
  more int
fewest
  node text
  number int
indexes
  least int
  most int
  sum int
  used 'looks_up'|'writes'|'sees'
  node text
  extent int
state
  ..port
  update? int
  given? bool
  count? count
count
  by int
  most int
step
  name text
  kernel int
  reads [int]
  writes [int]
  bind_ranges? [bind_range]
  stream? int
  waits? [int]
bind_range
  offset int
  bytes int
check = sound|all_sound
sound
  plan text
  steps int
  ok bool
all_sound
  programs [sound]
  ok bool
";

#[derive(Args)]
#[command(after_help = args::targets())]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
pub(super) struct Plan {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// Give an input: its shape sets dims, and if it shapes the computation (axes, sizes ...), the plan is for its elements. NAME=FILE.npy,
    /// NAME=FILE.npz:MEMBER, or NAME=2xi64=1 for equal elements. FILE.npz alone gives an input for each of its members, by name.
    #[arg(long = "input", visible_alias = "inputs", value_name = "NAME=VALUE")]
    inputs: Vec<String>,
    /// The target to plan for: one of those below.
    #[arg(long, default_value = "cpu")]
    target: String,
    /// Write the plan as JSON, for `check` and for `run --model`.
    #[arg(short = 'o', long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Plan N runs at once, which share the constants: each has an arena, states and staging of its own. In Rust, `Session::fork` gives them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    forks: u32,
    /// List the tensors that are live at the peak, and the bytes that each remedy would save: half the extent, f16, smaller workspaces, chunks.
    #[arg(long)]
    advise: bool,
    /// For tests: fail with exit code 2 if the plan takes more than this, and list the tensors that are live at its peak. Unlike a limit,
    /// this does not change the plan, and --save is written.
    #[arg(long, value_name = "SIZE", value_parser = args::limit, allow_hyphen_values = true)]
    assert_peak: Option<u64>,
    /// List the kernel of each step, and the algorithm that computes it.
    #[arg(long)]
    placement: bool,
    /// Draw memory over steps, as one HTML file that needs no network. A plan that exceeds the limit is drawn, too.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Use measured schedules, from the file that `tune` names. Without one, the plan is the same on every machine.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
    /// With --train, plan under ever smaller limits, too: the bytes of each plan, and what it computes again for them.
    #[arg(long, requires = "train")]
    curve: bool,
    /// Draw the plan as a static picture.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Plan {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let files = [("--save", &self.save), ("--html", &self.html), ("--svg", &self.svg)];
        let read =
            self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs)).chain(self.tuned.clone());
        args::outputs(files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))), read)?;
        if self.advise && self.forks > 1 {
            return Err(Error::usage("--advise: expected one run; plan it without --forks for it".into()).into());
        }
        let target = self.model.target(&self.target)?;
        let more = self.more.or_training(self.trained.method.as_ref().map(|method| method.on(&target)));
        if !more.is_one(&self.model) {
            if let Some(text) = self.inputs.first() {
                return Err(
                    Error::usage(format!("--input {text}: of several programs, `plan` has no use for it")).into()
                );
            }
            return self.run_programs(&more, &target, json);
        }
        let in_file = |e: Error| e.in_file(&self.model.model);
        let given = args::given("--input", &self.inputs)?;
        let (model, extents) = self.model.load_range(&given)?;
        let dims = args::largest(&extents);
        let subject = Subject::new(vec![self.model.model.clone()], extents.clone());
        let case = self.model.case(&model, dims, target);
        let limit = self.model.memory_limit;
        let schedules = self.tuned.as_deref().map(tuned).transpose()?;
        let graphs = Graphs::Range(session::source(model.clone()), extents.clone());
        let job = Job { recipe: case.recipe, runs: self.forks, schedules, ..Job::of(graphs, &case.target) };
        // Advice is about one run.
        let explained = |e: Error| if self.forks > 1 { e.into() } else { args::refuse(&case, e, json) };
        let refuse = |e| explained(in_file(e));
        let mut planner = Planner::new(&job).map_err(in_file)?;
        let planned = planner.within(limit);
        if let (Err(Error::Fit { .. }), true) = (&planned, self.html.is_some() || self.svg.is_some()) {
            // The picture helps most if the plan does not fit.
            let whole = planner.within(None).map_err(in_file)?;
            self.draw(&subject, whole[0].plan(), &whole[0].graph)?;
        }
        let Planned { compiled: (mut plan, _), range, graph } = planned.map_err(refuse)?.swap_remove(0);
        self.model.mention_states(&graph);
        if self.save.is_some() || json {
            plan.origin = Some(self.origin(&extents, model.given())?);
        }
        if let Some(path) = &self.save {
            file::write_whole(path, "write the plan", |out| out.write_all(plan.to_json().as_bytes()))?;
        }
        self.draw(&subject, &plan, &graph)?;
        let advice = if self.advise { Some(advise(&case, limit).map_err(in_file)?) } else { None };
        if let Some(limit) = self.assert_peak.filter(|&limit| plan.bytes() > limit) {
            return Err(self.above_peak(&plan, &graph, limit, advice.as_ref(), json));
        }
        if json {
            Ok(self.json(&subject, plan, range, advice))
        } else {
            Ok(self.text(&subject, &plan, range.as_ref(), advice.as_ref()))
        }
    }

    /// The origin of the plan of one graph. Dims that inputs set are not bound anew by others.
    fn origin(&self, extents: &[(String, Extent)], given: Vec<String>) -> Result<plan::Origin> {
        let options = self.model.options(&On { backend: Backend::Auto, device: None })?;
        let is_given = |(name, _): &&(String, Extent)| options.dims.iter().any(|(given, _)| given == name);
        let set = extents.iter().filter(|dim| !is_given(dim)).cloned();
        let dims = options.dims.iter().cloned().chain(set).collect();
        Options { dims, given, ..options }.origin(&self.model.model)
    }

    /// The refusal of a plan that takes more than `--assert-peak` allows.
    fn above_peak(&self, plan: &plan::Plan, graph: &Graph, limit: u64, advice: Option<&Advice>, json: bool) -> Failure {
        let what = format!("--assert-peak: the plan of '{}'", plan.name);
        let needed = plan.bytes();
        let error = Error::Fit { what, needed, limit, file: None }.in_file(&self.model.model);
        let peak = peak(plan, Some(graph));
        let mut record =
            json!({"limit_bytes": limit, "needed_bytes": needed, "deficit_bytes": needed - limit, "peak": peak});
        let mut text = report::peak(&peak);
        if let Some(advice) = advice {
            // The advice lists the live tensors, too.
            text = report::advice(advice);
            record["advice"] = json!(advice);
        }
        Failure::explained(error, json, record, text)
    }

    /// The plan's file, with further fields for what else was asked. It can still be read as a plan, because readers ignore them.
    fn json(&self, subject: &Subject, plan: plan::Plan, range: Option<ShapeRange>, advice: Option<Advice>) -> String {
        let answer = self.model.answer(&plan);
        let beside = beside::find(&plan.target).map(|found| found.estimate(&[&plan]));
        let mut value = json!(plan);
        subject.name_in(&mut value);
        if let Some(range) = range {
            let names = || range.dims().iter().map(|dim| dim.name.as_str());
            let binding = |tried: &Tried| -> Value { names().zip(tried.binding.iter().copied()).collect() };
            let tried = range.tried().iter();
            value["range"] = tried.map(|t| json!({"binding": binding(t), "live_bytes": t.live})).collect();
        }
        if let Some(beside) = beside {
            value["beside"] = json!(beside);
        }
        if let Some(answer) = answer {
            value["answer"] = json!(answer);
        }
        if let Some(advice) = advice {
            value["advice"] = json!(advice);
        }
        if self.placement {
            value["placement"] = super::run::placement(&plan, &plan.algorithms());
        }
        line(&value)
    }

    fn text(
        &self,
        subject: &Subject,
        plan: &plan::Plan,
        range: Option<&ShapeRange>,
        advice: Option<&Advice>,
    ) -> String {
        let memory = report::memory(plan, None) + &beside_text(&plan.target, &[plan]);
        let orders = report::orders(plan);
        let algorithms =
            if self.placement { report::placement(plan, &plan.algorithms()) } else { report::algorithms(plan) };
        let range = range.map_or(String::new(), |range| format!("\n{}", report::range(range)));
        let steps = count(plan.steps.len() as u64, "step");
        let heading = format!("{} for {}, {steps}", subject.heading(), plan.target.name);
        let mut text = format!("{heading}\n\n{memory}{range}\n{orders}\n{algorithms}");
        if let Some(plan::Measured { device, steps: measured }) = &plan.tuned {
            text += &format!("\nmeasured on {device}: the algorithms of {measured} of {steps}\n");
        }
        match advice {
            Some(advice) => text += &format!("\n{}", report::advice(advice)),
            None => text += &self.model.answer_text(plan),
        }
        text
    }

    /// Plans several graphs together.
    fn run_programs(&self, more: &More, target: &Target, json: bool) -> Result<String, Failure> {
        if more.method.is_some() && self.forks > 1 {
            return Err(Error::usage("--forks: --train has no use for it".into()).into());
        }
        let flags = [("--advise", self.advise), ("--svg", self.svg.is_some()), ("--tuned", self.tuned.is_some())];
        if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
            return Err(Error::usage(format!("{flag}: expected one model; plan each program by itself for it")).into());
        }
        let training = more.method.as_ref().map(|method| more.training(method, &self.model)).transpose()?;
        let graphs = match &training {
            Some(training) => programs::of_training(training.clone(), &[])?,
            None => more.graphs(&self.model, &[])?,
        };
        let job = Job { recipe: self.model.recipe(), runs: self.forks, ..Job::new(graphs, target) };
        let mut planner = Planner::new(&job)?;
        let apart = |planned: Vec<Planned>| -> (Vec<plan::Plan>, Vec<Graph>) {
            planned.into_iter().map(|program| (program.compiled.0, program.graph)).unzip()
        };
        let planned = planner.within(self.model.memory_limit);
        if let (Err(Error::Fit { .. }), true) = (&planned, self.html.is_some()) {
            let (plans, graphs) = apart(planner.within(None)?);
            self.draw_programs(more, &plans, &graphs)?;
        }
        let (plans, graphs) = match (planned, &more.method) {
            (Err(error @ Error::Fit { .. }), Some(method)) => {
                let file = self.model.file()?;
                let case = || {
                    Some(Case {
                        model: &file,
                        dims: Options { dims: self.model.dims(), ..Options::default() }.fixed()?,
                        batch: method.batch as usize,
                        training: method.training(1).ok()?,
                        target: target.clone(),
                        recipe: self.model.recipe(),
                    })
                };
                return Err(method::refuse(error.in_file(&self.model.model), json, case));
            }
            (planned, _) => apart(planned?),
        };
        self.draw_programs(more, &plans, &graphs)?;
        if let Some(path) = &self.save {
            let text = plan::Plan::all_to_json(&plans);
            file::write_whole(path, "write the plan", |out| out.write_all(text.as_bytes()))?;
        }
        if let Some(limit) = self.assert_peak.filter(|&limit| plans[0].bytes() > limit) {
            let what = "--assert-peak: the plan of all programs".to_owned();
            let needed = plans[0].bytes();
            let largest = plans.iter().zip(&graphs).max_by_key(|(plan, _)| plan.summary.lower_bound);
            let (plan, graph) = largest.expect("there are several");
            let (name, peak) = (plan.title(), peak(plan, Some(graph)));
            let record = json!({"limit_bytes": limit, "needed_bytes": needed, "deficit_bytes": needed - limit,
                "program": name, "peak": peak});
            let text = format!("program '{name}' needs the most arena\n{}", report::peak(&peak));
            return Err(Failure::explained(Error::Fit { what, needed, limit, file: None }, json, record, text));
        }
        let all: Vec<&plan::Plan> = plans.iter().collect();
        let training = training.map(|programs| self.training(programs, more, &mut planner, &all)).transpose()?;
        if json {
            return Ok(programs_json(&more.subject(&self.model), &plans, training.as_ref(), target));
        }
        let bytes = match &training {
            Some(training) => training.text(),
            None => programs::shared(&all, self.apart(&job)?),
        };
        // What a trainer's process takes beside its plans depends on its data.
        let silent = training.is_some() && target.family == Family::Cpu;
        let bytes = if silent { bytes } else { bytes + &beside_text(target, &all) };
        let (subject, programs) = (more.subject(&self.model).heading(), count(plans.len() as u64, "program"));
        let mut text = format!("{subject} for {}, {programs}\n\n{}\n{bytes}", target.name, programs::table(&all));
        for plan in plans.iter().filter(|_| self.placement) {
            text += &format!("\n{}\n{}", plan.title(), report::placement(plan, &plan.algorithms()));
        }
        Ok(text + &self.model.answer_text(&plans[0]))
    }

    /// The report of a training beside its plans.
    fn training(
        &self,
        programs: Programs,
        more: &More,
        planner: &mut Planner,
        plans: &[&plan::Plan],
    ) -> Result<Training> {
        let parts = more.method.as_ref().map_or(1, |method| method.accumulate as usize);
        let target = &plans[0].target;
        let points = self.curve.then(|| {
            curve(parts, |limits| {
                let planned = planner.within(limits.memory)?;
                Ok(planned.into_iter().map(|program| program.compiled.0).collect())
            })
        });
        let method = more.method.as_ref();
        let asked = self.trained.method.as_ref().map(|method| method.precision.dtype());
        let unstored = asked.filter(|&asked| target.storage(asked).is_ok_and(|stored| stored != asked));
        Ok(Training {
            wide_target: unstored.map(|asked| (target.name.clone(), asked)),
            bytes: Bytes::of(plans, &programs.outline.trained),
            precision: method.map_or(DType::F32, |method| method.precision.dtype()).name(),
            f32: method.map(|method| self.in_f32(method, target)).transpose()?.flatten(),
            wide: programs.wide,
            recompute: recompute(plans, parts),
            curve: points.transpose()?,
            outline: report::outline(&programs.outline),
            trained: programs.outline.trained,
            fixed: programs.outline.fixed,
        })
    }

    /// The bytes of a training in `f32`, if it is of another precision.
    fn in_f32(&self, method: &Method, target: &Target) -> Result<Option<Bytes>> {
        let Some(wide) = method.in_f32() else { return Ok(None) };
        let programs = wide.programs(&self.model, 1)?;
        let trained = programs.outline.trained.clone();
        let job = Job { recipe: self.model.recipe(), ..Job::new(programs.named(), target) };
        let planned = plan::plan(&job)?;
        let plans: Vec<&plan::Plan> = planned.iter().map(|program| program.plan()).collect();
        Ok(Some(Bytes::of(&plans, &trained)))
    }

    /// The sum of the bytes of programs as plans of their own.
    fn apart(&self, job: &Job) -> Result<u64> {
        let alone = |program: &(String, Graphs)| {
            let alone = plan::plan(&Job { programs: vec![program.clone()], ..job.clone() })?;
            Ok(alone[0].plan().bytes())
        };
        job.programs.iter().map(alone).sum()
    }

    fn draw_programs(&self, more: &More, plans: &[plan::Plan], graphs: &[Graph]) -> Result<()> {
        let Some(path) = &self.html else { return Ok(()) };
        let scenes: Vec<_> = plans.iter().zip(graphs).collect();
        let page =
            report::picture::programs_page(&more.subject(&self.model).heading(), &scenes, self.model.memory_limit);
        file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))
    }

    fn draw(&self, subject: &Subject, plan: &plan::Plan, graph: &Graph) -> Result<()> {
        let (limit, subject) = (self.model.memory_limit, subject.heading());
        if let Some(path) = &self.html {
            let page = report::picture::page(&subject, plan, Some(graph), limit);
            file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))?;
        }
        if let Some(path) = &self.svg {
            let picture = report::svg(&subject, plan, Some(graph), limit);
            file::write_whole(path, "write the picture", |out| out.write_all(picture.as_bytes()))?;
        }
        Ok(())
    }
}

/// The memory that a driver will take beside plans, or how to know it. On the CPU, what the process takes for itself.
fn beside_text(target: &Target, plans: &[&plan::Plan]) -> String {
    match beside::find(target) {
        _ if target.family == Family::Cpu => {
            let bytes = report::human(beside::process(plans[0].bytes()));
            format!("beside the plan  at most {bytes} of the process itself\n")
        }
        Some(found) => report::beside(&found.estimate(plans)),
        None if target.family == Family::Cuda => {
            "beside the plan  not measured: `plimsoll devices` does it on a machine that has the device\n".into()
        }
        None => String::new(),
    }
}

/// Programs as JSON, with what is said of them. It can still be read as a plan, because readers ignore the added fields.
fn programs_json(subject: &Subject, plans: &[plan::Plan], training: Option<&Training>, target: &Target) -> String {
    let beside = beside::find(target).map(|found| found.estimate(&plans.iter().collect::<Vec<_>>()));
    let mut value = training.map_or_else(|| json!({}), |training| json!(training));
    value["version"] = plan::VERSION.into();
    value["programs"] = json!(plans);
    subject.name_in(&mut value);
    if let Some(beside) = beside {
        value["beside"] = json!(beside);
    }
    line(&value)
}

/// The bytes of a training.
#[derive(Serialize)]
struct Bytes {
    planned_bytes: u64,
    /// Bytes of the host beside them.
    host_bytes: u64,
    classes: Classes,
    states: States,
}

impl Bytes {
    fn of(plans: &[&plan::Plan], trained: &[String]) -> Bytes {
        let host_bytes = host_bytes(plans);
        Bytes {
            planned_bytes: plans[0].bytes(),
            host_bytes,
            classes: Classes::of(plans),
            states: States::of(plans, trained),
        }
    }
}

/// The report of a training beside its plans.
#[derive(Serialize)]
struct Training {
    #[serde(flatten)]
    bytes: Bytes,
    recompute: Recompute,
    #[serde(skip_serializing_if = "Option::is_none")]
    curve: Option<Vec<Point>>,
    trained: Vec<String>,
    /// Weights that stay as they are, and the reason.
    fixed: Vec<(String, &'static str)>,
    /// What is said of them, and of how the model is read: a line each.
    outline: Vec<String>,
    /// The precision that was asked for. On the CPU it is the type of what is kept.
    precision: &'static str,
    /// A target that computes the precision that was asked for in `f32`, and that precision.
    #[serde(skip)]
    wide_target: Option<(String, DType)>,
    /// The bytes in `f32`, of another precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    f32: Option<Bytes>,
    /// Values that stay `f32` in another precision, with their operators.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    wide: Vec<(String, &'static str)>,
}

impl Training {
    fn text(&self) -> String {
        let mut text = report::training(&self.bytes.classes, &self.bytes.states);
        if self.bytes.host_bytes > 0 {
            text += &format!("beside the plan  {} of the host: the next rows\n", report::human(self.bytes.host_bytes));
        }
        text += &report::recompute(&self.recompute);
        if let Some(points) = &self.curve {
            text += &format!("\n{}", report::curve(points));
        }
        text += &format!("\n{}\n", self.outline.join("\n"));
        if let Some((target, asked)) = &self.wide_target {
            text += &format!("\ntarget '{target}' computes in f32, and keeps {asked} for the backward pass\n");
        }
        let Some(before) = &self.f32 else { return text };
        let both = [before, &self.bytes].map(|bytes| (&bytes.classes, &bytes.states));
        text += &format!("\n{}", report::precisions(self.precision, both));
        if self.wide_target.is_none() {
            text += &format!("\nf32 beside the states: {}\n", count(self.wide.len() as u64, "value"));
        }
        for (name, op) in &self.wide {
            text += &format!("  '{name}' ({op})\n");
        }
        text
    }
}

/// Measured schedules from a file.
fn tuned(path: &Path) -> Result<Arc<Tuned>> {
    Ok(Arc::new(cache::read(path)?.0))
}

#[derive(Args)]
pub(super) struct Check {
    /// A plan, as `plan -o` writes it.
    plan: PathBuf,
}

impl Check {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let plans = read_all(&self.plan)?;
        let record = |plan: &plan::Plan| json!({"plan": plan.title(), "steps": plan.steps.len(), "ok": true});
        if json {
            let all = || json!({"programs": plans.iter().map(record).collect::<Vec<_>>(), "ok": true});
            return Ok(line(&if let [plan] = &plans[..] { record(plan) } else { all() }));
        }
        let sound = |plan: &plan::Plan| {
            let [steps, buffers] = [(plan.steps.len(), "step"), (plan.buffers.len(), "buffer")]
                .map(|(number, noun)| count(number as u64, noun));
            format!("{}, {}: sound: {steps}, {buffers}\n", self.plan.display(), plan.title())
        };
        let together = if plans.len() > 1 { "together: sound\n" } else { "" };
        Ok(plans.iter().map(sound).collect::<String>() + together)
    }
}

/// A plan, or the plans of programs, from a file, checked.
pub(super) fn read_all(path: &Path) -> Result<Vec<plan::Plan>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, "read the plan", e))?;
    plan::Plan::all_from_json(&text, path)
}
