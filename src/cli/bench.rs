//! `bench`: times a graph's runs.

use super::args::{self, Given, Inputs, Measured, Model, On, Planned};
use super::method::Trained;
use super::programs::{More, label};
use super::subject::Subject;
use super::{Failure, line};
use crate::backend::Usage;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::figures::count;
use crate::file;
use crate::plan::{self, Class, Plan, Port, View};
use crate::report::{self, Table, TimedStep};
use crate::roofline::Roofs;
use crate::session::{Session, SessionProgram};
use crate::tensor::Tensor;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
bench = times|at_once|updates|bindings
times
  ..subject
  ..spread
  ..bytes
  model text
  device text
  first_ms number
  runs_per_second number
  items_per_second number|null
  replay_median_ms number
  replay_min_ms number
  iters int
  arena_bytes int
  answer? answer
  steps? [timed_step]
timed_step
  step int
  node text
  algorithm text
  bytes int
  median_us number
  share number|null
  roof? number
  bound? text
at_once
  ..subject
  model text
  device text
  forks int
  one_per_second number
  all_per_second number
  planned_bytes int
  allocated_bytes int
  fork_bytes int
  allocations_in_runs int
  steps? [timed_step]
updates
  ..subject
  ..spread
  ..bytes
  model text
  device text
  steps_per_second number
  replay_median_ms number
  replay_min_ms number
  iters int
  steps? [timed_step]
bindings
  ..subject
  ..bytes
  model text
  device text
  bindings [at]
  iters int
  bytes_grown_in_runs int
at
  ..spread
  binding {int}
  steps? [timed_step]
spread
  median_ms number
  min_ms number
  max_ms number
  p90_ms number
  p99_ms number
bytes
  planned_bytes int
  allocated_bytes int
  allocations_in_load int
  allocations_in_runs int
";

/// What is timed.
const WAYS: &str = "whole runs write the inputs, run the steps and read the outputs; steps alone are without both\n";

#[derive(Args)]
#[command(mut_arg("warmup", |flag| flag.long("rate-warmup").hide(true)))]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
pub(super) struct Bench {
    #[command(flatten)]
    pub(super) model: Model,
    #[command(flatten)]
    planned: Planned,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// The program to time, of several graphs. Given several times: those before the last run once. Default: the first.
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    #[command(flatten)]
    measured: Measured,
    /// Number of untimed runs before the timed ones.
    #[arg(id = "untimed", long = "warmup", value_name = "N", default_value_t = 3)]
    warmup: u32,
    /// Number of timed runs. With --train, a run is an update of the weights: all of its parts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Time runs for this time (500ms, 10s, 2min), instead of a number of runs.
    #[arg(long, value_name = "TIME", value_parser = args::duration, conflicts_with = "iters")]
    duration: Option<Duration>,
    /// After the runs, time each step: a table of their algorithms, the bytes that they read and write, and their median times, within a run by the
    /// clock of a CUDA device, else one by one. With --train, the steps of all parts of an update; with --at, those of each extent; of runs at once, those of one run by itself.
    #[arg(long)]
    steps: bool,
    /// Tell for each of the --steps its share of the device's rate of copies, or of products, whichever bounds it: both rates are measured, with
    /// memory that is given back.
    #[arg(long, requires = "steps")]
    roofline: bool,
    /// Draw memory over steps with the time that each takes by itself, as one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Time N runs at once, in a thread each, beside one run at a time. They share the constants; each has --threads threads of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(plan::MOST_RUNS)))]
    forks: u32,
    /// Extents to run at, one after another, for a dim that --set gives a range. With --train, batches, or extents of another dim: the trainings are
    /// planned together, and share the weights.
    #[arg(long, value_name = "DIM=N,N,..", value_parser = args::extents)]
    at: Vec<(String, Vec<usize>)>,
}

impl Bench {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let read = self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs.inputs));
        args::outputs(self.html.as_deref().map(|path| ("--html", path)), read)?;
        self.html.as_deref().map_or(Ok(()), args::has_place)?;
        let given = args::given("--input", &self.inputs.inputs)?;
        let is_training = self.trained.method().is_some();
        if is_training && !self.planned.of.is_empty() {
            let what = "--model: a saved plan of a training does not say how it trains, so --train plans it anew";
            return Err(Error::usage(what.into()).into());
        }
        if self.forks > 1 && !self.at.is_empty() {
            return Err(Error::usage("--at: extents are timed one run at a time: expected no --forks".into()).into());
        }
        let model = self.trained.with_batch(&self.model);
        let model = Model { forks: self.forks, of: self.planned.of.clone(), ..model };
        let mut more = self.more.or_training(self.trained.method());
        if is_training {
            more.at = self.bindings("");
        }
        let (session, subject) = more.session(&model, &self.on, &self.measured, &given, json)?;
        if !self.at.is_empty() {
            return self.run_range(&session, &subject, &given, json);
        }
        if self.forks > 1 {
            return self.run_forks(session, &subject, &given, json);
        }
        if is_training {
            return self.run_training(&session, &subject, &given, json);
        }
        let (plan, inputs) = self.more.select(&session, &self.program, given, self.inputs.seed)?;
        let loaded = session.usage();
        let (first, whole) = self.timed(&session, &inputs)?;
        let time = |exec: &mut Exec| exec.write(&inputs).and_then(|()| exec.time());
        let alone = (0..whole.count).map(|_| session.with(time)).collect::<Result<_>>()?;
        let (usage, subject) = (session.usage(), subject.of(&plan.programs[0]));
        let steps = self.profiled(&session, plan.first(), &inputs)?;
        self.draw(&subject, steps.iter().map(|steps| (subject.title(), plan.first(), steps.clone())), &session)?;
        let steps = steps.filter(|_| self.steps);
        let ran = Ran { plan, subject, first, whole, alone: Times::new(alone), steps, loaded, usage };
        Ok(if json { self.record(&session, &ran) } else { self.text(&session, &ran) })
    }

    fn record(&self, session: &Session, ran: &Ran) -> String {
        let Ran { plan, subject, first, whole, alone, steps, loaded, usage } = ran;
        let per_second = 1e3 / whole.median;
        let mut value = json!({
            "model": plan.programs[0].graph_name(),
            "device": session.device(),
            "first_ms": first,
            "median_ms": whole.median,
            "min_ms": whole.min,
            "max_ms": whole.max,
            "p90_ms": whole.p90,
            "p99_ms": whole.p99,
            "runs_per_second": per_second,
            "items_per_second": items(&plan.programs[0]).map(|items| items as f64 * per_second),
            "replay_median_ms": alone.median,
            "replay_min_ms": alone.min,
            "iters": whole.count,
            "planned_bytes": plan.bytes(),
            "allocated_bytes": usage.bytes,
            "allocations_in_load": loaded.allocations,
            "allocations_in_runs": usage.allocations - loaded.allocations,
            "arena_bytes": plan.class_bytes(Class::Activation),
        });
        subject.name_in(&mut value);
        if let Some(answer) = self.model.answer(plan) {
            value["answer"] = json!(answer);
        }
        if let Some(steps) = steps {
            value["steps"] = json!(steps);
        }
        line(&value)
    }

    fn text(&self, session: &Session, ran: &Ran) -> String {
        let Ran { plan, subject, first, whole, alone, steps, loaded, usage } = ran;
        let per_second = 1e3 / whole.median;
        let mut table = Table::new("<>");
        table.row(Times::heading(&count(whole.count, "run")));
        table.row(["first run".to_owned(), format!("{first:.3} ms")]);
        table.row(whole.row("whole runs"));
        table.row(alone.row("steps alone"));
        let items = items(&plan.programs[0]).map_or(String::new(), |items| {
            let each = if items == 1 { "1 item".to_owned() } else { format!("{items} items") };
            format!(", {:.1} items; a run has {each}", items as f64 * per_second)
        });
        let rate = format!("in a second: {per_second:.1} runs{items}\n");
        let (before, after) = (loaded.allocations, usage.allocations - loaded.allocations);
        let runs = u64::from(self.warmup) + 2 * whole.count;
        let head = format!(
            "{} on {}\n\n{table}{WAYS}{rate}\nallocations: {before} when loading, {after} in {}\n\n",
            subject.heading(),
            session.device(),
            count(runs, "run")
        );
        let memory = report::memory(plan.first(), Some(*usage)) + &report::overhead(&session.overhead());
        let steps = steps.as_ref().map_or(String::new(), |steps| report::timed_steps(steps) + "\n");
        head + &steps + &memory + &self.model.answer_text(plan)
    }
}

/// The figures of one run at a time.
struct Ran {
    plan: Plan,
    subject: Subject,
    /// Milliseconds of the first run.
    first: f64,
    /// Runs with inputs and outputs, and the steps alone.
    whole: Times,
    alone: Times,
    steps: Option<Vec<TimedStep>>,
    /// The memory that was taken before the runs and after them.
    loaded: Usage,
    usage: Usage,
}

/// The number of items in a run, if a batch is known: the first extent that all inputs with axes share, or that one shares with all outputs.
fn items(plan: &plan::Program) -> Option<usize> {
    let firsts = |ports: &[Port]| ports.iter().filter_map(|port| port.shape.first().copied()).collect::<Vec<_>>();
    let (inputs, outputs) = (firsts(&plan.inputs), firsts(&plan.outputs));
    let shared = |extent: &usize, all: &[usize]| all.iter().all(|other| other == extent);
    let of_all = inputs.first().filter(|extent| shared(extent, &inputs));
    of_all.or_else(|| inputs.iter().find(|extent| !outputs.is_empty() && shared(extent, &outputs))).copied()
}

impl Bench {
    /// The steps with their times, if a flag asks for them.
    fn profiled(&self, session: &Session, plan: View, inputs: &[Tensor]) -> Result<Option<Vec<TimedStep>>> {
        if !self.steps && self.html.is_none() {
            return Ok(None);
        }
        let (times, notes) =
            session.with(|exec| Ok::<_, Error>((exec.profile(inputs, self.rounds())?, exec.notes())))?;
        Ok(Some(TimedStep::of(plan, &times, &notes, self.roofs(plan)?.as_ref())))
    }

    /// Draws what was timed, if a flag asks for it.
    fn draw<'a>(
        &self,
        subject: &Subject,
        timed: impl Iterator<Item = (String, View<'a>, Vec<TimedStep>)>,
        session: &Session,
    ) -> Result<()> {
        let Some(path) = &self.html else { return Ok(()) };
        let page = report::picture::timed_page(&subject.title(), &timed.collect::<Vec<_>>(), session.device());
        file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))
    }

    /// Runs as often as asked, or for as long. `run` gets true if the run counts.
    fn rounds_of(&self, what: &'static str, mut run: impl FnMut(bool) -> Result<()>) -> Result<u64> {
        let bar = args::progress(what);
        bar.set_length(u64::from(self.warmup) + u64::from(self.iters));
        for _ in 0..self.warmup {
            run(false)?;
            bar.inc(1);
        }
        let (begin, mut done) = (Instant::now(), 0);
        while match self.duration {
            Some(duration) => done == 0 || begin.elapsed() < duration,
            None => done < u64::from(self.iters),
        } {
            run(true)?;
            done += 1;
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(done)
    }

    /// The time of the first run in milliseconds, and those of the timed ones.
    fn timed(&self, session: &Session, inputs: &[Tensor]) -> Result<(f64, Times)> {
        let (mut times, mut first): (Vec<Duration>, _) = (Vec::new(), None);
        self.rounds_of("runs", |counts| {
            let start = Instant::now();
            session.with(|exec| exec.run(inputs))?;
            let time = start.elapsed();
            first.get_or_insert(time);
            times.extend(counts.then_some(time));
            Ok(())
        })?;
        Ok((first.unwrap_or_default().as_secs_f64() * 1e3, Times::new(times)))
    }

    /// Times runs at once beside one run at a time.
    fn run_forks(&self, session: Session, subject: &Subject, given: &[Given], json: bool) -> Result<String, Failure> {
        let forks = (1..self.forks).map(|_| session.fork()).collect::<Result<Vec<_>>>()?;
        let sessions: Vec<Session> = std::iter::once(session).chain(forks).collect();
        // Each has inputs of its own, as callers of their own would give it.
        let mut users = Vec::with_capacity(sessions.len());
        for session in &sessions {
            users.push(self.lane(session, given)?);
        }
        let warm = |lane: &Lane| (0..self.warmup).try_for_each(|_| lane.run());
        let runs = |lane: &Lane| -> Result<u64> {
            let (begin, mut done) = (Instant::now(), 0);
            while self.duration.map_or(done < u64::from(self.iters), |most| done == 0 || begin.elapsed() < most) {
                lane.run()?;
                done += 1;
            }
            Ok(done)
        };
        let at_once = |users: &[Lane]| -> Result<f64> {
            let start = Instant::now();
            let done = std::thread::scope(|scope| {
                let threads: Vec<_> = users.iter().map(|user| scope.spawn(|| runs(user))).collect();
                threads.into_iter().map(|thread| thread.join().expect("a run does not panic")).sum::<Result<u64>>()
            })?;
            Ok(done as f64 / start.elapsed().as_secs_f64())
        };
        users.iter().try_for_each(warm)?;
        let allocations =
            || sessions.iter().map(|one| one.with(|exec| exec.backend().usage().allocations)).sum::<u64>();
        let before = allocations();
        // By turns, so that both ways see the same machine.
        let (mut one, mut all) = (0.0, 0.0);
        for _ in 0..3 {
            one = f64::max(one, at_once(&users[..1])?);
            all = f64::max(all, at_once(&users)?);
        }
        let session = &sessions[0];
        let (usage, plan) = (session.usage(), session.plan());
        let timed = self.steps_of(&users[0])?;
        self.draw(subject, timed.iter().cloned(), session)?;
        let steps = self.steps.then(|| numbered(timed));
        if json {
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "forks": self.forks,
                "one_per_second": one,
                "all_per_second": all,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "fork_bytes": plan.run_bytes(),
                "allocations_in_runs": allocations() - before,
            });
            subject.name_in(&mut value);
            if let Some(steps) = steps {
                value["steps"] = json!(steps);
            }
            return Ok(line(&value));
        }
        let mut table = Table::new("<>>");
        let each = self.duration.map_or_else(|| count(self.iters.into(), "run"), |time| format!("{time:?}"));
        table.row([format!("{each} each"), "runs per second".into(), String::new()]);
        table.row(["one at a time".to_owned(), format!("{one:.1}"), String::new()]);
        table.row([format!("{} at once", self.forks), format!("{all:.1}"), format!("{:.2} x", all / one)]);
        let head = format!("{} on {}\n\n{table}\n", subject.heading(), session.device());
        let steps = steps.map_or(String::new(), |steps| report::timed_steps(&steps) + "\n");
        Ok(head + &steps + &report::memory(plan.first(), Some(usage)))
    }
}

/// What a run of the benchmark does on a session, one program after another: one program, or the parts of an update.
struct Lane<'a> {
    parts: Vec<Part<'a>>,
}

/// A binding of a program, its inputs and its plan.
struct Part<'a> {
    program: SessionProgram<'a>,
    binding: Vec<(String, usize)>,
    inputs: Vec<Tensor>,
    plan: Plan,
}

impl Part<'_> {
    fn run(&self) -> Result<()> {
        self.program.selected(&self.binding, |exec| exec.run(&self.inputs))??;
        Ok(())
    }

    /// Runs the steps alone, on the inputs that are written before.
    fn replay(&self) -> Result<Duration> {
        self.program.selected(&self.binding, |exec| exec.write(&self.inputs).and_then(|()| exec.time()))?
    }

    /// True if a given input is one of its own, of its shape.
    fn takes(&self, given: &Given) -> bool {
        takes(&self.plan.programs[0], given)
    }
}

fn takes(program: &plan::Program, given: &Given) -> bool {
    program.inputs.iter().any(|port| port.name == given.name && port.shape == *given.tensor.shape())
}

impl Lane<'_> {
    fn run(&self) -> Result<()> {
        self.parts.iter().try_for_each(Part::run)
    }

    /// How long the steps take alone.
    fn replay(&self) -> Result<Duration> {
        self.parts.iter().map(Part::replay).sum()
    }

    /// Puts the inputs where the device copies them from, as a training has its rows.
    fn within_reach(mut self) -> Result<Self> {
        for Part { program, binding, inputs, .. } in &mut self.parts {
            let reached =
                |exec: &mut Exec| inputs.iter().map(|input| exec.within_reach(input)).collect::<Result<Vec<_>>>();
            *inputs = program.selected(binding, reached)??;
        }
        Ok(self)
    }
}

/// The steps of programs that run one after another, numbered from the first to the last.
fn numbered(timed: Vec<(String, View, Vec<TimedStep>)>) -> Vec<TimedStep> {
    let mut all: Vec<TimedStep> = Vec::new();
    for (_, _, steps) in timed {
        let first = all.len();
        all.extend(steps.into_iter().map(|step| TimedStep { step: first + step.step, ..step }));
    }
    let sum: f64 = all.iter().map(|step| step.median_us).sum();
    all.iter_mut().for_each(|step| step.share = step.median_us / sum);
    all
}

impl Bench {
    /// Times the updates of a training.
    fn run_training(
        &self,
        session: &Session,
        subject: &Subject,
        given: &[Given],
        json: bool,
    ) -> Result<String, Failure> {
        let lane = self.lane(session, given)?.within_reach()?;
        let loaded = session.usage();
        let mut times = Vec::new();
        let done = self.rounds_of("updates", |counts| {
            let start = Instant::now();
            lane.run()?;
            times.extend(counts.then_some(start.elapsed()));
            Ok(())
        })?;
        let times = Times::new(times);
        let alone = Times::new((0..times.count).map(|_| lane.replay()).collect::<Result<_>>()?);
        let (usage, plan) = (session.usage(), session.plan());
        let timed = self.steps_of(&lane)?;
        self.draw(subject, timed.iter().cloned(), session)?;
        let steps = self.steps.then(|| numbered(timed));
        let (per_second, allocations) = (1e3 / times.median, usage.allocations - loaded.allocations);
        if json {
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "steps_per_second": per_second,
                "median_ms": times.median,
                "min_ms": times.min,
                "max_ms": times.max,
                "p90_ms": times.p90,
                "p99_ms": times.p99,
                "replay_median_ms": alone.median,
                "replay_min_ms": alone.min,
                "iters": done,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": allocations,
            });
            subject.name_in(&mut value);
            if let Some(steps) = steps {
                value["steps"] = json!(steps);
            }
            return Ok(line(&value));
        }
        let steps = steps.map_or(String::new(), |steps| report::timed_steps(&steps) + "\n");
        let mut table = Table::new("<>");
        let noun = if self.program.is_empty() { "update" } else { "run" };
        table.row(Times::heading(&count(done, noun)));
        table.row(times.row(&format!("{per_second:.1} per second")));
        table.row(alone.row("steps alone"));
        let head = format!(
            "{} on {}\n\n{table}{WAYS}\nallocations: {} when loading, {allocations} in {}\n\n",
            subject.heading(),
            session.device(),
            loaded.allocations,
            count(u64::from(self.warmup) + 2 * done, noun)
        );
        Ok(head + &steps + &report::memory(plan.first(), Some(usage)) + &report::overhead(&session.overhead()))
    }

    /// The steps of a lane's programs with their times, if a flag asks for them.
    fn steps_of<'a>(&self, lane: &'a Lane) -> Result<Vec<(String, View<'a>, Vec<TimedStep>)>> {
        if !self.steps && self.html.is_none() {
            return Ok(Vec::new());
        }
        let profiled = |Part { program, binding, inputs, plan }: &'a Part| {
            let profile = |exec: &mut Exec| Ok::<_, Error>((exec.profile(inputs, self.rounds())?, exec.notes()));
            let (times, notes) = program.selected(binding, profile)??;
            let name = if binding.is_empty() { plan.programs[0].name.clone() } else { label(binding) };
            Ok((name, plan.first(), TimedStep::of(plan.first(), &times, &notes, self.roofs(plan.first())?.as_ref())))
        };
        lane.parts.iter().map(profiled).collect()
    }

    /// The rates of the device, if they are asked for.
    fn roofs(&self, plan: View) -> Result<Option<Roofs>> {
        let measure = || Roofs::measure(&self.model.options(&self.on)?, plan);
        self.roofline.then(measure).transpose()
    }

    /// The number of times that each step is timed.
    fn rounds(&self) -> u32 {
        const MOST: u32 = 20;
        self.iters.min(MOST)
    }

    /// What a run does: the parts of an update of a training, or the last of the programs that are asked for, behind one run of the others.
    fn lane<'s>(&self, session: &'s Session, given: &[Given]) -> Result<Lane<'s>> {
        let names = match (&self.program[..], &self.trained.method()) {
            ([], None) => vec![session.plan().programs[0].name.clone()],
            _ => self.names(),
        };
        let ready = |name: &String| {
            let program = session.program(name)?;
            let (binding, inputs) = self.more.ready(&program, given, self.inputs.seed)?;
            let plan = program.selected(&binding, |exec| exec.plan().alone())?;
            Ok(Part { program, binding, inputs, plan })
        };
        let mut all = names.iter().map(ready).collect::<Result<Vec<_>>>()?;
        if self.trained.method().is_none() || !self.program.is_empty() {
            let last = all.pop().expect("there is one");
            Lane { parts: std::mem::take(&mut all) }.run()?;
            all.push(last);
        }
        Ok(Lane { parts: all })
    }

    /// The programs that are asked for, or else the parts of an update of a training.
    fn names(&self) -> Vec<String> {
        let parts = self.trained.method().map_or(0, |method| method.accumulate as usize);
        let part = |part| match part {
            _ if parts == 1 => "step",
            0 => "first",
            part if part + 1 == parts => "last",
            _ => "next",
        };
        if !self.program.is_empty() {
            return self.program.clone();
        }
        (0..parts).map(|at| part(at).to_owned()).collect()
    }

    /// The extents of --at, turn by turn. A dim may be said to be this program's.
    fn bindings(&self, program: &str) -> Vec<Vec<(String, usize)>> {
        let turns = self.at.iter().map(|(_, extents)| extents.len()).max().unwrap_or(0);
        let extent = |turn: usize, (dim, extents): &(String, Vec<usize>)| {
            let own = dim.split_once(':').filter(|(of, _)| *of == program).map_or(&dim[..], |(_, dim)| dim);
            (own.to_owned(), extents[turn % extents.len()])
        };
        (0..turns).map(|turn| self.at.iter().map(|dim| extent(turn, dim)).collect()).collect()
    }

    /// What is timed at each of the extents: a binding of a range, or the parts of an update of a training that was planned for them.
    fn turns<'s>(&self, session: &'s Session, given: &[Given]) -> Result<Vec<At<'s>>> {
        // What is given has one shape. Inputs of another shape are random ones.
        let part = |program: SessionProgram<'s>, binding: Vec<(String, usize)>| {
            let plan = program.selected(&binding, |exec| exec.plan().alone())?;
            let suits = given.iter().filter(|given| takes(&plan.programs[0], given)).cloned().collect();
            let inputs = args::fill(&plan.programs[0], plan.mesh.as_ref(), suits, self.inputs.seed)?;
            let inputs = program.own(inputs)?;
            Ok::<_, Error>(Part { program, binding, inputs, plan })
        };
        if self.trained.method().is_some() {
            let turn = |binding: Vec<(String, usize)>| {
                let named = |name: &String| session.program(&format!("{} {name}", label(&binding)));
                let parts = self.names().iter().map(|name| part(named(name)?, Vec::new())).collect::<Result<_>>()?;
                Ok(At { lane: Lane { parts }, binding, times: Vec::new() })
            };
            return self.bindings("").into_iter().map(turn).collect();
        }
        let program = match &self.program[..] {
            [] => session.programs().next().expect("a plan has a program"),
            [name] => session.program(name)?,
            _ => return Err(Error::usage("--program: expected one program with --at".into())),
        };
        let turn = |binding: Vec<(String, usize)>| {
            let lane = Lane { parts: vec![part(program, binding.clone())?] };
            Ok(At { lane, binding, times: Vec::new() })
        };
        self.bindings(&program.plan().program.name).into_iter().map(turn).collect()
    }
}

/// Extents, what is timed at them, and the times of its runs.
struct At<'a> {
    binding: Vec<(String, usize)>,
    lane: Lane<'a>,
    times: Vec<Duration>,
}

impl Bench {
    /// Times what runs at each of the extents, one after another.
    fn run_range(&self, session: &Session, subject: &Subject, given: &[Given], json: bool) -> Result<String, Failure> {
        let mut list = self.turns(session, given)?;
        let suits = |given: &Given| list.iter().flat_map(|at| &at.lane.parts).any(|part| part.takes(given));
        if let Some(Given { name, tensor, .. }) = given.iter().find(|given| !suits(given)) {
            let what = format!("--input {name}: no extent of --at has its shape, {}", tensor.shape());
            return Err(Error::usage(what).into());
        }
        let loaded = session.usage();
        let done = self.rounds_of("runs", |counts| {
            for At { lane, times, .. } in &mut list {
                let start = Instant::now();
                lane.run()?;
                times.extend(counts.then_some(start.elapsed()));
            }
            Ok(())
        })?;
        let (usage, plan) = (session.usage(), session.plan());
        let of = |bytes: u64, before: u64| i128::from(bytes) - i128::from(before);
        let allocations = usage.allocations - loaded.allocations;
        let grown = of(usage.bytes, loaded.bytes)
            + usage.overhead.zip(loaded.overhead).map_or(0, |(after, before)| of(after, before));
        let runs = (u64::from(self.warmup) + done) * list.len() as u64;
        let timed = list.iter().map(|at| self.steps_of(&at.lane)).collect::<Result<Vec<_>>>()?;
        self.draw(subject, timed.iter().flatten().cloned(), session)?;
        let list = list.iter().map(|at| (at.binding.clone(), Times::new(at.times.clone())));
        if json {
            let one = |(binding, times): (Vec<(String, usize)>, Times)| {
                let Times { median, min, max, p90, p99, .. } = times;
                let binding: serde_json::Map<_, _> = binding.into_iter().map(|(dim, n)| (dim, json!(n))).collect();
                json!({"binding": binding, "median_ms": median, "min_ms": min, "max_ms": max, "p90_ms": p90, "p99_ms": p99})
            };
            let mut bindings: Vec<_> = list.map(one).collect();
            for (binding, timed) in bindings.iter_mut().zip(timed).filter(|_| self.steps) {
                binding["steps"] = json!(numbered(timed));
            }
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "bindings": bindings,
                "iters": done,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": allocations,
                "bytes_grown_in_runs": grown as i64,
            });
            subject.name_in(&mut value);
            return Ok(line(&value));
        }
        let mut table = Table::new("<>");
        table.row(Times::heading(&format!("{} at", count(done, "run"))));
        for (binding, times) in list {
            table.row(times.row(&label(&binding)));
        }
        let before = loaded.allocations;
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {before} when loading, {allocations} in {}, which took {grown} bytes more\n\n",
            subject.heading(),
            session.device(),
            count(runs, "run")
        );
        let tables = timed.iter().flatten().filter(|_| self.steps);
        let steps: String =
            tables.map(|(name, _, steps)| format!("{name}\n{}\n", report::timed_steps(steps))).collect();
        Ok(head + &steps + &report::memory(plan.first(), Some(usage)) + &report::overhead(&session.overhead()))
    }
}

/// Times of some runs, in milliseconds.
struct Times {
    count: u64,
    median: f64,
    min: f64,
    max: f64,
    /// Nine of ten runs take at most this.
    p90: f64,
    /// 99 of 100 runs take at most this.
    p99: f64,
}

impl Times {
    /// The times of at least one run.
    fn new(mut runs: Vec<Duration>) -> Times {
        runs.sort_unstable();
        let last = runs.len() - 1;
        let within = |percent: usize| (runs.len() * percent).div_ceil(100).saturating_sub(1);
        let [median, min, max, p90, p99] =
            [runs.len() / 2, 0, last, within(90), within(99)].map(|i| runs[i].as_secs_f64() * 1e3);
        Times { count: runs.len() as u64, median, min, max, p90, p99 }
    }

    /// The heading of a table of rows.
    fn heading(label: &str) -> [String; 6] {
        [label, "median", "min", "90 %", "99 %", "max"].map(str::to_owned)
    }

    /// The row of a table.
    fn row(&self, label: &str) -> [String; 6] {
        let times = [self.median, self.min, self.p90, self.p99, self.max].map(|time| format!("{time:.3} ms"));
        let [median, min, p90, p99, max] = times;
        [label.to_owned(), median, min, p90, p99, max]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_runs_are_within_their_times() {
        let times = |count: u64| Times::new((1..=count).rev().map(Duration::from_millis).collect());
        let Times { count, median, min, max, p90, p99 } = times(200);
        assert_eq!((count, median, min, max, p90, p99), (200, 101.0, 1.0, 200.0, 180.0, 198.0));
        let Times { median, min, max, p90, p99, .. } = times(1);
        assert_eq!([median, min, max, p90, p99], [1.0; 5]);
    }
}
