//! `compare`: eager beside planned.

use super::across::{self, Across, Ways};
use super::args::{self, Given, Inputs, Model, On};
use super::expect::Tolerances;
use super::method::Trained;
use super::programs::More;
use super::subject::Subject;
use super::{Failure, line, print};
use crate::advise::Case;
use crate::backend::Backend;
use crate::eager::compare::{Comparison, Moved, Observed, Setup, compare, moved_by_quantizing};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::pass::Quantize;
use crate::plan::{self, Graphs, Job, Limits, Recipe};
use crate::report::picture::{Scene, comparison_page};
use crate::report::{Table, grouped, human};
use crate::session::{self, Options};
use crate::target::Target;
use crate::tensor::Tensor;
use crate::{file, report};
use clap::Args;
use serde::Serialize;
use serde_json::json;
use std::cell::RefCell;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
compare = comparison|comparisons|across
across
  ..subject
  model text
  devices [text]
  outputs [compared]
  nodes int
  first first|null
first
  node text
  operator text
  value text
  difference text
comparison
  ..subject
  ..ways
  answer? answer
comparisons
  ..subject
  programs [ways]
  planned_together_bytes int
ways
  model text
  target text
  memory_limit int|null
  runs int
  reference text|null
  columns [way|refused]
  quantized? [moved]|unfit_floats
moved
  name text
  of_peak number|null
unfit_floats
  does_not_fit text
column
  name text
  exact bool
  launches int
  staging_bytes int
  smallest_device_bytes int
way
  ..column
  peak_live_bytes int
  peak_reserved_bytes int
  fragmentation number|null
  driver_calls_first int
  driver_calls_last int
  median_ms number
  agreement agreement|null
refused
  ..column
  does_not_fit text
agreement
  equal bool
  difference number|null
  output text
";

// Plans with and without fusion are compared.
#[derive(Args)]
#[command(mut_arg("no_fuse", |flag| flag.hide(true)))]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
pub(super) struct Compare {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    /// Number of timed runs of each way.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Run each plan again with unused memory overwritten, as `run --poison` does.
    #[arg(long)]
    poison: bool,
    /// Run the graph on two devices instead, and name the first node whose values differ, with exit code 3: cpu, cuda or wgpu, with a device
    /// as in cuda:1, or reference, which computes in f64 what the operators mean. Values differ as outputs do with `run --expect`.
    #[arg(long, value_name = "A,B", value_parser = across::ways, conflicts_with_all = ["backend", "device", "iters", "poison", "html", "train"])]
    across: Option<Ways>,
    #[command(flatten)]
    tolerances: Tolerances,
    /// Draw the memory of all ways side by side, as one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The ways to run a graph that `compare` tries on every device. A device with a pool of its own has one more.
const WAYS: u64 = 5;

/// Fusion reorders sums: results agree with unfused ones to this share of the output's peak.
const FUSED_TOLERANCE: f64 = 1e-4;

/// What outputs lose by weights in few bits.
#[derive(Serialize)]
#[serde(transparent)]
struct Quantized {
    #[serde(skip)]
    quantize: Quantize,
    lost: Lost,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Lost {
    Moved(Vec<Moved>),
    /// The graph with its floats is too large to run.
    Unknown {
        does_not_fit: String,
    },
}

impl Quantized {
    fn text(&self) -> String {
        let Quantized { quantize, lost } = self;
        match lost {
            Lost::Moved(moved) => {
                let mut table = Table::new("<>");
                table.row([format!("what {quantize} weights change"), "of the peak".to_owned()]);
                for Moved { name, of_peak } in moved {
                    table.row([format!("  {name}"), format!("{of_peak:.1e}")]);
                }
                format!("\n{table}")
            }
            Lost::Unknown { does_not_fit } => {
                format!("\nWhat {quantize} weights change is not known: without them, {does_not_fit}\n")
            }
        }
    }
}

impl Compare {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        self.model.refuse_folder()?;
        let read = self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs.inputs));
        args::outputs(self.html.as_deref().map(|path| ("--html", path)), read)?;
        if let Some(ways) = &self.across {
            return self.run_across(ways, json);
        }
        self.refuse_flags()?;
        let given = args::given("--input", &self.inputs.inputs)?;
        let more = self.more.or_training(self.trained.method.clone());
        if !more.is_one(&self.model) {
            return self.run_programs(&more, &given, json);
        }
        let (model, dims) = self.model.load(&given)?;
        let graph = self.model.import(&model, &dims, &given)?;
        let extents = dims.iter().map(|(name, extent)| (name.clone(), (*extent).into())).collect();
        let subject = Subject::new(vec![self.model.model.clone()], extents);
        let options = self.model.options(&self.on)?;
        let session::Device { backend: device, name } = session::open(&options)?;
        tracing::info!("backend: {name}");
        session::check_limit(&*device, options.memory_limit)?;
        // If not even the plan fits, there is nothing to compare.
        let planned = options.recipe.plan(graph.clone(), device.target(), &self.model.limits());
        let refuse = |e: Error| {
            let case = Case::of(&model, dims.clone(), device.target().clone(), options.recipe);
            args::refuse(&case, e.in_file(&self.model.model), json)
        };
        let plan = planned.map_err(refuse)?;
        let inputs = args::fill(&plan.programs[0], given, self.inputs.seed)?;
        let ways = WAYS + u64::from(device.pools());
        drop(device);
        let scenes = RefCell::new(Vec::new());
        let observe = |name: &str, graph: &Graph, observed: Observed| {
            let scene = match observed {
                Observed::Eager(program, log) => Scene::eager(name, program, log, Some(graph)),
                Observed::Planned(plan) => Ok(Scene::whole(name, plan, Some(graph))),
            };
            scenes.borrow_mut().push(scene);
        };
        let observe: Option<&dyn Fn(&str, &Graph, Observed)> = if self.html.is_some() { Some(&observe) } else { None };
        let in_file = |e: Error| e.in_file(&self.model.model);
        let result = self.compared(&graph, &inputs, &options, ways, observe).map_err(in_file)?;
        let quantized = self.quantized(&graph, &inputs, &options).map_err(in_file)?;
        if let Some(path) = &self.html {
            let page =
                comparison_page(&subject.heading(), &result, scenes.into_inner().into_iter().collect::<Result<_>>()?);
            file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))?;
        }
        let text = if json {
            let mut value = json!(result);
            subject.name_in(&mut value);
            if let Some(quantized) = &quantized {
                value["quantized"] = json!(quantized);
            }
            if let Some(answer) = self.model.answer(&plan) {
                value["answer"] = json!(answer);
            }
            line(&value)
        } else {
            let quantized = quantized.map_or(String::new(), |quantized| quantized.text());
            report::comparison(&subject.heading(), &result) + &quantized + &self.model.answer_text(&plan)
        };
        print(&text)?;
        result.verdict(FUSED_TOLERANCE)?;
        Ok(String::new())
    }

    /// Refuses flags that have no use without --across.
    fn refuse_flags(&self) -> Result<()> {
        if self.tolerances.is_given() {
            return Err(Error::usage("--rtol, --atol: `compare` has no use for them without --across".into()));
        }
        if self.model.no_fuse {
            return Err(Error::usage("--no-fuse: `compare` always runs with and without fusion".into()));
        }
        Ok(())
    }

    /// Computes the graph in two ways.
    fn run_across(&self, ways: &Ways, json: bool) -> Result<String, Failure> {
        if !self.more.is_one(&self.model) {
            return Err(Error::usage("--across: expected one model; compare each by itself".into()).into());
        }
        let given = args::given("--input", &self.inputs.inputs)?;
        let (model, dims) = self.model.load(&given)?;
        let graph = self.model.import(&model, &dims, &given)?;
        let in_file = |e: Error| e.in_file(&self.model.model);
        let extents = dims.into_iter().map(|(name, extent)| (name, extent.into())).collect();
        let subject = Subject::new(vec![self.model.model.clone()], extents);
        let options = Options { dims: Vec::new(), outputs: Vec::new(), ..self.model.options(&self.on)? };
        // A plan for any device says which elements inputs may have.
        let plan = Recipe::default().plan(graph.clone(), &Target::cpu(1), &Limits { memory: None }).map_err(in_file)?;
        let names = plan.programs[0].inputs.iter().map(|port| port.name.clone());
        let inputs = names.zip(args::fill(&plan.programs[0], given, self.inputs.seed)?).collect();
        let tolerance = self.tolerances.tolerance();
        let across = Across { graph: &graph, inputs, options, ways: ways.clone(), tolerance };
        across.run(&subject, json).map_err(|failure| Failure { error: in_file(failure.error), ..failure })
    }

    /// Runs a graph in every way, under a progress bar.
    fn compared(
        &self,
        graph: &Graph,
        inputs: &[Tensor],
        options: &Options,
        ways: u64,
        observe: Option<&dyn Fn(&str, &Graph, Observed)>,
    ) -> Result<Comparison> {
        let bar = args::progress("ways");
        bar.set_length(ways);
        let open = || session::open(options).map(|device| device.backend);
        let setup = Setup { progress: &|_| bar.inc(1), observe, ..self.setup(&open, options) };
        let result = compare(graph, inputs, &setup);
        bar.finish_and_clear();
        result
    }

    fn setup<'a>(&self, open: &'a dyn Fn() -> Result<Box<dyn Backend>>, options: &Options) -> Setup<'a> {
        Setup {
            open,
            memory_limit: self.model.memory_limit,
            iters: self.iters as usize,
            poison: self.poison,
            recipe: options.recipe,
            progress: &|_| {},
            observe: None,
        }
    }

    /// What a graph's outputs lose by weights in few bits, if a flag asks for these.
    fn quantized(&self, graph: &Graph, inputs: &[Tensor], options: &Options) -> Result<Option<Quantized>> {
        let Some(quantize) = options.recipe.quantize else { return Ok(None) };
        let open = || session::open(options).map(|device| device.backend);
        let lost = match moved_by_quantizing(graph, inputs, &self.setup(&open, options)) {
            Ok(moved) => Lost::Moved(moved),
            Err(error @ Error::Fit { .. }) => Lost::Unknown { does_not_fit: error.to_string() },
            Err(error) => return Err(error),
        };
        Ok(Some(Quantized { quantize, lost }))
    }

    /// Compares the ways to run each of several graphs, and says what they take if they are planned together.
    fn run_programs(&self, more: &More, given: &[Given], json: bool) -> Result<String, Failure> {
        if self.html.is_some() {
            return Err(Error::usage("--html: expected one model; compare each program by itself for it".into()).into());
        }
        let options = self.model.options(&self.on)?;
        let session::Device { backend: device, name } = session::open(&options)?;
        tracing::info!("backend: {name}");
        session::check_limit(&*device, options.memory_limit)?;
        let (target, ways) = (device.target().clone(), WAYS + u64::from(device.pools()));
        drop(device);
        let asked = more.asked(&self.model, given)?;
        let job = Job { recipe: options.recipe, ..Job::new(asked.programs.clone(), &target) };
        let planned = plan::plan(&job.clone().within(self.model.memory_limit));
        let together = planned.map_err(|error| asked.refuse(&self.model, &target, error, json))?.plan.bytes();
        let (mut results, mut quantized) = (Vec::new(), Vec::new());
        for (name, graphs) in asked.programs {
            let Graphs::One(graph) = graphs else {
                let what =
                    format!("program '{name}': expected one extent for each dim, as this command takes no range");
                return Err(Error::usage(what).into());
            };
            let plan = options.recipe.plan((*graph).clone(), &target, &Limits { memory: None })?;
            let own = given.iter().filter(|given| plan.programs[0].inputs.iter().any(|port| port.name == given.name));
            let inputs = args::fill(&plan.programs[0], own.cloned().collect(), self.inputs.seed)?;
            let result = self.compared(&graph, &inputs, &options, ways, None)?;
            quantized.push(self.quantized(&graph, &inputs, &options)?);
            results.push(Comparison { model: name, ..result });
        }
        let text = if json {
            let mut value = json!({"programs": results, "planned_together_bytes": together});
            for (program, quantized) in quantized.iter().enumerate() {
                if let Some(quantized) = quantized {
                    value["programs"][program]["quantized"] = json!(quantized);
                }
            }
            asked.subject.name_in(&mut value);
            line(&value)
        } else {
            let subject = asked.subject.heading();
            let head = |name: &str| format!("{subject}, {name}");
            let texts = quantized.iter().map(|quantized| quantized.as_ref().map_or(String::new(), Quantized::text));
            let all = results.iter().zip(texts);
            let all: Vec<_> =
                all.map(|(result, text)| report::comparison(&head(&result.model), result) + &text).collect();
            let bytes = format!("planned together: {} ({} bytes)\n", human(together), grouped(together));
            format!("{}\n{bytes}", all.join("\n"))
        };
        print(&text)?;
        results.iter().try_for_each(|result| result.verdict(FUSED_TOLERANCE))?;
        Ok(String::new())
    }
}
