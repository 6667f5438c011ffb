//! `plan` and `check`: plan a graph's memory, and check a plan, with no device.

use super::args::{self, Backend, Model, On, Pace};
use super::method::{self, Method, Trained};
use super::open;
use super::programs::{Asked, More};
use super::{Failure, line};
use crate::advise::{Advice, Trained as Case, advise, advise_training, fullest};
use crate::driver_memory;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::figures::count;
use crate::kernel::tuned::Tuned;
use crate::pass::recompute::Recompute;
use crate::plan::range::Tried;
use crate::plan::tell::{self, peak::peak, ranks::StagePart};
use crate::plan::{self, Graphs, Job, Planned, Planner};
use crate::report::picture::{self, About};
use crate::session;
use crate::target::{Family, Target};
use crate::train::Programs;
use crate::train::classes::{Classes, States, host_bytes};
use crate::train::curve::{Point, curve, recompute};
use crate::tune::cache;
use crate::{file, report};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
plan = planned|training
planned
  ..told
  planned_bytes int
told
  ..subject
  ..plan_file
  beside? beside
  answer? answer
  ranks? ranks
  stages? [stage]
  offloaded? offloaded
  advice? advice
tried
  binding {int}
  live_bytes int
training
  ..told
  ..training_bytes
  recompute recompute
  undivided_bytes? int
  curve? [point]
  trained [text]
  fixed [[text]]
  outline [text]
  precision text
  f32? training_bytes
  wide? [[text]]
axes
  axes [axis]
axis
  name text
  ranks int
offloaded
  bytes int
  programs [fetched]
  gb_per_second number
fetched
  program text
  fetched_bytes int
  written_bytes int
  ms number
stage
  stage int
  ranks int
  bytes int
  sent_bytes int
ranks
  ranks int
  all_bytes int
  shards [shard]
  split_bytes int
  repeated_bytes int
  traffic [traffic]
shard
  name text
  dim int
  axis text
traffic
  program text
  axis text
  ranks int
  collectives int
  sent_bytes int
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
  target target
  tuned? text
  runs? int
  origin? origin
  mesh? axes
  segments [segment]
  programs [program]
  choices? [choice]
choice
  program? text
  what text
  bytes int
  because 'limit'|'memory'|'speed'|'asked'
program
  name text
  graph? text
  dims? [dim]
  measured? int
  recompute? recompute
  shards? [shard]
  summary summary
  range? [tried]
  placement? [placed]
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
origin
  models [model]
  recipe recipe
  memory_limit? int
model
  content text
  dims? [dim]
  ties? [[text]]
  state? [[text]]
  given? [text]
  training? bool
  outputs? [text]
recipe
  f16 bool
  fuse bool
  chunks int
  quantize? quantize
  int8_caches? bool
  prefer? 'memory'|'speed'
  offload? 'states'|'weights'|'all'
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
  reserve_bytes? int
  unshared_bytes int
  steps int
  orders? [order]
order
  name text
  bound int
  peak int
segment
  class class
  memory? 'device'|'upload'|'download'|'scratch'|'own'|'prefetch'|'reserve'|'pinned'
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
check
  programs [sound]
  ok bool
sound
  program text
  steps int
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
    /// Plan for the device that `run` takes with this backend, as it is found on this machine, in place of a named target.
    #[arg(long, value_enum, conflicts_with = "target")]
    backend: Option<Backend>,
    /// Write the plan as JSON, for `check`, `diff` and `run --model`. `run` takes plans of files with one extent for each dim: none of a range, of
    /// a training or of a folder of decoders.
    #[arg(short = 'o', long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Plan N runs at once, which share the constants: each has an arena, states and staging of its own. In Rust, `Session::fork` gives them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(plan::MOST_RUNS)))]
    forks: u32,
    /// List the tensors that are live at the peak, and the bytes that each remedy would save: half the extent, f16, smaller workspaces, chunks,
    /// several cards; of a training, recomputation, a smaller optimizer, frozen weights, more parts of an update, a smaller batch, values of 16
    /// bits, several cards.
    #[arg(long)]
    advise: bool,
    /// For tests: fail with exit code 2 if the whole plan takes more than this, and list the tensors that are live at its peak. Unlike a
    /// limit, this does not change the plan, and --save is written.
    #[arg(long, alias = "assert-peak", value_name = "SIZE", value_parser = args::limit, allow_hyphen_values = true)]
    assert_bytes: Option<u64>,
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
    pub(super) fn run(&self, json: bool, verbose: bool) -> Result<String, Failure> {
        let files = [("--save", &self.save), ("--html", &self.html), ("--svg", &self.svg)];
        let read =
            self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs)).chain(self.tuned.clone());
        args::outputs(files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))), read)?;
        let target = self.target()?;
        let more = self.more.or_training(self.trained.method().map(|method| method.on(&target)));
        let flags = Model { forks: self.forks, ..self.trained.with_batch(&self.model) };
        let asked = more.asked(&flags, &args::given("--input", &self.inputs)?)?;
        let schedules = self.tuned.as_deref().map(tuned).transpose()?;
        let runs = self.forks;
        let job = Job { runs, schedules, ..flags.job(asked.programs.clone(), &target)? };
        let in_file = |e: Error| asked.in_file(&flags, e);
        let mut planner = Planner::new(&job).map_err(in_file)?;
        let (planned, stages) = match job.sharding.as_ref().is_some_and(|of| of.mesh.stages() > 1) {
            true => self.staged(&job.clone().within(flags.memory_limit)),
            false => (planner.within(flags.memory_limit), Vec::new()),
        };
        if let (Err(Error::Fit { .. }), true) = (&planned, self.html.is_some() || self.svg.is_some()) {
            // The picture helps most if the plan does not fit.
            self.draw(&asked, &planner.within(None).map_err(in_file)?)?;
        }
        let mut planned = planned.map_err(|error| match &more.method {
            Some(method) => {
                method::refuse(error.in_file(&flags.model), json, || self.trained_case(method, &target).ok())
            }
            None => asked.refuse(&flags, &target, error, json),
        })?;
        if self.save.is_some() || json {
            planned.plan.origin = asked.origin()?;
        }
        if let Some(path) = &self.save {
            if !stages.is_empty() {
                let what =
                    "--save: the stages of a mesh have plans of their own: expected a mesh without an axis 'stage'";
                return Err(Error::usage(what.to_owned()).into());
            }
            planned.plan.save(path)?;
        }
        self.draw(&asked, &planned)?;
        let advice = self.advise.then(|| self.advice(&asked, &more, &flags, &target)).transpose()?;
        if let Some(limit) = self.assert_bytes.filter(|&limit| planned.plan.bytes() > limit) {
            return Err(self.above_asserted(&planned, in_file, limit, advice.as_ref(), json));
        }
        let training = asked.training.clone();
        let training = training.map(|programs| self.training(programs, &more, &mut planner, &planned.plan));
        let told = Told { asked: &asked, job: &job, planned, stages, training: training.transpose()?, advice };
        if json { Ok(self.json(told)) } else { Ok(self.text(&told, verbose)?) }
    }

    /// The largest plan of a stage, and what all stages take.
    fn staged(&self, job: &Job) -> (Result<Planned>, Vec<StagePart>) {
        match plan::of_all_ranks(job) {
            Ok(all) => {
                let stages = tell::ranks::stages(all.iter().map(|(planned, ranks)| (&planned.plan, ranks.len())));
                let largest = all.into_iter().map(|(planned, _)| planned).max_by_key(|planned| planned.plan.bytes());
                (largest.ok_or_else(|| Error::plan("a mesh has a stage".to_owned())), stages)
            }
            Err(error) => (Err(error), Vec::new()),
        }
    }

    /// The named target, or that of a device of this machine.
    fn target(&self) -> Result<Target> {
        let Some(backend) = self.backend else { return self.model.target(&self.target) };
        let device = session::open(&self.model.options(&On { backend, device: None })?)?;
        tracing::info!("backend: {}", device.described());
        Ok(device.target(self.model.several.mesh.as_ref()))
    }

    /// What would make the programs smaller.
    fn advice(&self, asked: &Asked, more: &More, flags: &Model, target: &Target) -> Result<Advice> {
        let advice = match &more.method {
            Some(method) => advise_training(&self.trained_case(method, target)?, flags.memory_limit),
            None => advise(&asked.case(flags, target), flags.memory_limit),
        };
        advice.map_err(|e| asked.in_file(flags, e))
    }

    /// The training as a case, for its remedies.
    fn trained_case(&self, method: &Method, target: &Target) -> Result<Case> {
        let whole = method.whole(&self.model)?;
        Ok(Case {
            dims: open::largest(&whole.dims),
            model: whole.model,
            batch: method.batch as usize,
            training: method.training(1)?,
            target: target.clone(),
            recipe: self.model.recipe(),
            runs: self.forks,
            sharding: self.model.several.sharding()?,
        })
    }

    /// The refusal of a plan that takes more than `--assert-bytes` allows.
    fn above_asserted(
        &self,
        planned: &Planned,
        in_file: impl Fn(Error) -> Error,
        limit: u64,
        advice: Option<&Advice>,
        json: bool,
    ) -> Failure {
        let needed = planned.plan.bytes();
        let what = format!("--assert-bytes: the plan of '{}'", planned.plan.title());
        let error = in_file(Error::Fit { what, needed, limit, file: None });
        let (program, graph) = fullest(planned);
        let peak = peak(program, Some(graph));
        let mut record =
            json!({"limit_bytes": limit, "needed_bytes": needed, "deficit_bytes": needed - limit, "peak": peak});
        let mut text = report::peak(&peak);
        if planned.plan.programs.len() > 1 {
            record["program"] = json!(program.name);
            text = format!("program '{}' needs the most arena\n{text}", program.name);
        }
        if let Some(advice) = advice {
            // The advice lists the live tensors, too.
            text = report::advice(advice);
            record["advice"] = json!(advice);
        }
        Failure::explained(error, json, record, text)
    }

    /// The plan's file, with further fields for what else was asked. It can still be read as a plan, because readers ignore them.
    fn json(&self, told: Told) -> String {
        let Told { asked, planned: Planned { plan, ranges, .. }, stages, training, advice, .. } = told;
        let mut value = training.map_or_else(|| json!({}), |training| json!(training));
        let own = json!(plan);
        let fields = own.as_object().into_iter().flatten();
        fields.for_each(|(field, own)| value[field] = own.clone());
        value["planned_bytes"] = json!(plan.bytes());
        asked.subject.name_in(&mut value);
        for ((number, view), range) in plan.views().enumerate().zip(&ranges) {
            if let Some(range) = range {
                let names = || range.dims().iter().map(|dim| dim.name.as_str());
                let binding = |tried: &Tried| -> Value { names().zip(tried.binding.iter().copied()).collect() };
                let tried = range.tried().iter();
                value["programs"][number]["range"] =
                    tried.map(|t| json!({"binding": binding(t), "live_bytes": t.live})).collect();
            }
            if self.placement {
                value["programs"][number]["placement"] = super::run::placement(view, &view.algorithms());
            }
        }
        if let Some(found) = driver_memory::find(&plan.target) {
            value["beside"] = json!(found.estimate(&plan));
        }
        if let Some(part) = tell::ranks::part(&plan) {
            value["ranks"] = json!(part);
        }
        if !stages.is_empty() {
            value["stages"] = json!(stages);
        }
        if let Some(offloaded) = tell::offload::offloaded(&plan) {
            value["offloaded"] = json!(offloaded);
        }
        if let Some(answer) = self.model.answer(&plan) {
            value["answer"] = json!(answer);
        }
        if let Some(advice) = advice {
            value["advice"] = json!(advice);
        }
        line(&value)
    }

    fn text(&self, told: &Told, verbose: bool) -> Result<String> {
        let Told { asked, job, planned: Planned { plan, ranges, .. }, stages, training, advice } = told;
        let several = plan.programs.len() > 1;
        let all = if several {
            count(plan.programs.len() as u64, "program")
        } else {
            count(plan.programs[0].steps.len() as u64, "step")
        };
        let how = self.trained.method().map(|method| format!(" ({})", method.told(method.batch)));
        let how = how.unwrap_or_default();
        let mut text = format!("{}{how} for {}, {all}\n\n", asked.subject.heading(), plan.target.name);
        if several {
            text += &format!("{}\n", report::programs(plan));
        }
        text += &match training {
            Some(training) if plan.runs > 1 => {
                let all = report::grouped(plan.bytes());
                format!("{} runs at once take {all} bytes; of one of them:\n\n{}", plan.runs, training.text())
            }
            Some(training) => training.text(),
            None if several => report::shared(plan, Some(apart(job)?)),
            None if verbose => report::memory(plan.first(), None),
            None => report::planned(plan.first()),
        };
        // What a trainer's process takes beside its plan depends on its data.
        if training.is_none() || plan.target.family != Family::Cpu {
            text += &beside_text(plan);
        }
        if let (Some(mesh), Some(part)) = (&plan.mesh, tell::ranks::part(plan)) {
            text += &report::ranks(mesh, &part, plan.target.family);
        }
        if let Some(offloaded) = tell::offload::offloaded(plan) {
            text += &report::offloaded(&offloaded);
        }
        if !stages.is_empty() {
            text += &report::stages(stages);
        }
        if !several && !verbose {
            text += "-v adds inputs and outputs, the arena's lower bound, the orders that were tried, kernels and choices\n";
        }
        for (program, range) in plan.views().zip(ranges) {
            let range = range.as_ref().map(|range| format!("\n{}", report::range(range)));
            let named = if several && (range.is_some() || self.placement) {
                format!("\n{}\n", program.name)
            } else {
                String::new()
            };
            text += &format!("{named}{}", range.unwrap_or_default());
            if !several && verbose {
                text += &format!("\n{}", report::orders(program));
            }
            if self.placement {
                text += &format!("\n{}", report::placement(program, &program.algorithms()));
            } else if !several && verbose {
                text += &format!("\n{}", report::algorithms(program));
            }
        }
        if verbose {
            text += &format!("\n{}", report::choices(&plan.choices));
        }
        if let Some(device) = &plan.tuned {
            let [measured, steps] = [|p: &plan::Program| p.measured, |p: &plan::Program| p.steps.len()]
                .map(|number| plan.programs.iter().map(number).sum::<usize>() as u64);
            text += &format!("\nmeasured on {device}: the algorithms of {measured} of {}\n", count(steps, "step"));
        }
        match advice {
            Some(advice) => text += &format!("\n{}", report::advice(advice)),
            None => text += &self.model.answer_text(plan),
        }
        Ok(text)
    }

    /// The report of a training beside its plans.
    fn training(&self, programs: Programs, more: &More, planner: &mut Planner, plan: &plan::Plan) -> Result<Training> {
        let parts = more.method.as_ref().map_or(1, |method| method.accumulate as usize);
        let target = &plan.target;
        let mut pace = Pace::new();
        let mut seen = |point: &Point| pace.say(|| still(point));
        let points = self.curve.then(|| curve(parts, planner, &mut seen));
        let method = more.method.as_ref();
        let asked = self.trained.method().map(|method| method.precision.dtype());
        let unstored = asked.filter(|&asked| target.storage(asked).is_ok_and(|stored| stored != asked));
        let case = method.map(|method| self.trained_case(method, target)).transpose()?;
        let undivided = case.map(|case| case.undivided(plan.bytes(), self.model.memory_limit)).transpose()?.flatten();
        Ok(Training {
            undivided_bytes: undivided,
            wide_target: unstored.map(|asked| (target.name.clone(), asked)),
            bytes: Bytes::of(plan, &programs.outline.trained),
            precision: method.map_or(DType::F32, |method| method.precision.dtype()).name(),
            f32: method.map(|method| self.in_f32(method, target)).transpose()?.flatten(),
            wide: programs.wide,
            recompute: recompute(plan, parts),
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
        let job = self.model.job(programs.named(), target)?;
        Ok(Some(Bytes::of(&plan::plan(&job)?.plan, &trained)))
    }

    fn draw(&self, asked: &Asked, Planned { plan, graphs, .. }: &Planned) -> Result<()> {
        if self.html.is_none() && self.svg.is_none() {
            return Ok(());
        }
        // Names of one file may be others in another.
        let is_one = graphs.len() == 1 || asked.training.is_some();
        let modules = if is_one { self.model.modules() } else { None };
        let how = self.trained.method().map(|method| format!(" ({})", method.told(method.batch)));
        let about = About {
            subject: &(asked.subject.title() + &how.unwrap_or_default()),
            graphs,
            limit: self.model.memory_limit,
            trained: asked.training.as_ref().map(|programs| &programs.outline.trained[..]),
            modules: modules.as_ref(),
        };
        if let Some(path) = &self.html {
            let page = picture::plan_page(plan, &about);
            file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))?;
        }
        if let Some(path) = &self.svg {
            let picture = report::svg(plan, &about);
            file::write_whole(path, "write the picture", |out| out.write_all(picture.as_bytes()))?;
        }
        Ok(())
    }
}

/// How far a curve is.
fn still(point: &Point) -> String {
    let (bytes, share) = (report::human(point.planned_bytes), 100.0 * point.recompute.share());
    format!("still planning under smaller limits: {bytes}, {share:.1} % more operations")
}

/// What the command tells.
struct Told<'a> {
    asked: &'a Asked,
    job: &'a Job,
    planned: Planned,
    /// The plans of all stages of a mesh; `planned` is the largest.
    stages: Vec<StagePart>,
    training: Option<Training>,
    advice: Option<Advice>,
}

/// The sum of the bytes of programs as plans of their own.
fn apart(job: &Job) -> Result<u64> {
    let alone = |program: &(String, Graphs)| {
        let job = Job { programs: vec![program.clone()], limit: None, ..job.clone() };
        Ok(plan::plan(&job)?.plan.bytes())
    };
    job.programs.iter().map(alone).sum()
}

/// The memory that a driver will take beside a plan, or how to know it. On the CPU, what the process takes for itself.
fn beside_text(plan: &plan::Plan) -> String {
    match driver_memory::find(&plan.target) {
        _ if plan.target.family == Family::Cpu => {
            let bytes = report::human(driver_memory::process(plan.bytes()));
            format!("beside the plan  at most {bytes} of the process itself\n")
        }
        Some(found) => report::beside(&found.estimate(plan)),
        None if plan.target.family == Family::Cuda => {
            "beside the plan  not measured: `plimsoll devices` does it on a machine that has the device\n".into()
        }
        None => String::new(),
    }
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
    fn of(plan: &plan::Plan, trained: &[String]) -> Bytes {
        let host_bytes = host_bytes(plan);
        Bytes { planned_bytes: plan.bytes(), host_bytes, classes: Classes::of(plan), states: States::of(plan, trained) }
    }
}

/// The report of a training beside its plans.
#[derive(Serialize)]
struct Training {
    #[serde(flatten)]
    bytes: Bytes,
    recompute: Recompute,
    /// The bytes of an update in one part, if they are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    undivided_bytes: Option<u64>,
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
        if let Some(whole) = self.undivided_bytes {
            text += &format!("{}\n", report::undivided(self.bytes.planned_bytes, whole));
        }
        text += &report::recompute(&self.recompute);
        if let Some(points) = &self.curve {
            text += &format!("\n{}", report::curve(points));
        }
        text += &format!("\n{}\n", self.outline.join("\n"));
        if let Some((target, asked)) = &self.wide_target {
            text += &format!("\n{}\n", method::wide(&format!("target '{target}'"), *asked));
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
        let plan = plan::Plan::load(&self.plan)?;
        let record = |program: &plan::Program| json!({"program": program.name, "steps": program.steps.len()});
        if json {
            let programs: Vec<_> = plan.programs.iter().map(record).collect();
            return Ok(line(&json!({"programs": programs, "ok": true})));
        }
        let sound = |program: &plan::Program| {
            let [steps, buffers] = [(program.steps.len(), "step"), (program.buffers.len(), "buffer")]
                .map(|(number, noun)| count(number as u64, noun));
            format!("{}, {}: sound: {steps}, {buffers}\n", self.plan.display(), program.name)
        };
        let together = if plan.programs.len() > 1 { "together: sound\n" } else { "" };
        Ok(plan.programs.iter().map(sound).collect::<String>() + together)
    }
}
