//! `compare`: eager beside planned.

use super::across::{self, Across, Ways};
use super::args::{self, Given, Inputs, Model, On};
use super::expect::Tolerances;
use super::method::Trained;
use super::programs::More;
use super::{Failure, line, print};
use crate::backend::Backend;
use crate::eager::compare::{Comparison, Moved, Observed, Setup, compare, moved_by_quantizing};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::pass::Quantize;
use crate::plan::{self, Graphs, Job};
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
compare = comparison|comparisons|across|all_across
all_across
  programs [across]
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
  answer? answer
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
        self.model.several.refuse("compare")?;
        let read = self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs.inputs));
        args::outputs(self.html.as_deref().map(|path| ("--html", path)), read)?;
        self.html.as_deref().map_or(Ok(()), args::has_place)?;
        if let Some(ways) = &self.across {
            return self.run_across(ways, json);
        }
        self.refuse_flags()?;
        let given = args::given("--input", &self.inputs.inputs)?;
        let more = self.more.or_training(self.trained.method());
        let asked = more.asked(&self.trained.with_batch(&self.model), &given)?;
        let in_file = |e: Error| asked.in_file(&self.model, e);
        let options = self.model.options(&self.on)?;
        let opened = session::open(&options)?;
        self.model.may_offload(&opened)?;
        tracing::info!("backend: {}", opened.described());
        let device = opened.backend;
        session::check_limit(&*device, options.memory_limit)?;
        let (target, ways) = (device.target().clone(), WAYS + u64::from(device.pools()));
        drop(device);
        // If not even the plan fits, there is nothing to compare.
        let recipe = options.recipe;
        let job = Job { recipe, ..Job::new(asked.programs.clone(), &target).within(self.model.memory_limit) };
        let planned = plan::plan(&job).map_err(|error| asked.refuse(&self.model, &target, error, json))?.plan;
        let several = planned.programs.len() > 1;
        let (mut all, mut drawn) = (Vec::new(), Vec::new());
        // Names of one file may be others in another.
        let modules = if self.html.is_some() && !several { self.model.modules() } else { None };
        for ((_, graphs), program) in asked.programs.iter().zip(&planned.programs) {
            let (graph, inputs) = self.largest(graphs, program, several, &given).map_err(in_file)?;
            let scenes = RefCell::new(Vec::new());
            let observe = |name: &str, graph: &Graph, observed: Observed| {
                let scene = match observed {
                    Observed::Eager(program, log) => Scene::eager(name, program, log, Some(graph)),
                    Observed::Planned(plan) => Ok(Scene::whole(name, plan, Some(graph))),
                };
                let named = |mut scene: Scene| {
                    modules.iter().for_each(|modules| scene.name_modules(modules));
                    scene
                };
                scenes.borrow_mut().push(scene.map(named));
            };
            let observe: Option<&dyn Fn(&str, &Graph, Observed)> =
                if self.html.is_some() { Some(&observe) } else { None };
            let result = self.compared(&graph, &inputs, &options, ways, observe).map_err(in_file)?;
            let model = if several { program.name.clone() } else { result.model.clone() };
            let quantized = self.quantized(&graph, &inputs, &options).map_err(in_file)?;
            drawn.push(scenes.into_inner().into_iter().collect::<Result<Vec<_>>>()?);
            all.push((Comparison { model, ..result }, quantized));
        }
        let heading = asked.subject.heading();
        if let Some(path) = &self.html {
            let page =
                comparison_page(&asked.subject.title(), all.iter().map(|(result, _)| result).zip(drawn).collect());
            file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))?;
        }
        let text = if json {
            let record = |(result, quantized): &(Comparison, Option<Quantized>)| {
                let mut value = json!(result);
                if let Some(quantized) = quantized {
                    value["quantized"] = json!(quantized);
                }
                value
            };
            let mut records: Vec<_> = all.iter().map(record).collect();
            let mut value = if several {
                json!({"programs": records, "planned_together_bytes": planned.bytes()})
            } else {
                records.swap_remove(0)
            };
            asked.subject.name_in(&mut value);
            if let Some(answer) = self.model.answer(&planned) {
                value["answer"] = json!(answer);
            }
            line(&value)
        } else {
            let told = |(result, quantized): &(Comparison, Option<Quantized>)| {
                let head = if several { format!("{heading}, {}", result.model) } else { heading.clone() };
                report::comparison(&head, result) + &quantized.as_ref().map_or(String::new(), Quantized::text)
            };
            let told = all.iter().map(told).collect::<Vec<_>>().join("\n");
            let bytes = planned.bytes();
            let together = match several {
                true => format!("\nplanned together: {} ({} bytes)\n", human(bytes), grouped(bytes)),
                false => String::new(),
            };
            told + &together + &self.model.answer_text(&planned)
        };
        print(&text)?;
        all.iter().try_for_each(|(result, _)| result.verdict(FUSED_TOLERANCE))?;
        Ok(String::new())
    }

    /// The graph of a program, of the largest binding of a range, and its inputs.
    fn largest(
        &self,
        graphs: &Graphs,
        program: &plan::Program,
        several: bool,
        given: &[Given],
    ) -> Result<(Graph, Vec<Tensor>)> {
        let takes = |given: &&Given| !several || program.inputs.iter().any(|port| port.name == given.name);
        let own = given.iter().filter(takes).cloned().collect();
        Ok((graphs.largest()?, args::fill(program, None, own, self.inputs.seed)?))
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

    /// Computes the graphs in two ways.
    fn run_across(&self, ways: &Ways, json: bool) -> Result<String, Failure> {
        let given = args::given("--input", &self.inputs.inputs)?;
        let asked = self.more.asked(&self.trained.with_batch(&self.model), &given)?;
        let in_file = |e: Error| asked.in_file(&self.model, e);
        let options = Options { dims: Vec::new(), outputs: Vec::new(), ..self.model.options(&self.on)? };
        // A plan for any device says which elements inputs may have.
        let planned = plan::plan(&Job::new(asked.programs.clone(), &Target::cpu(1))).map_err(in_file)?.plan;
        let several = planned.programs.len() > 1;
        let mut told = Vec::new();
        for ((_, graphs), program) in asked.programs.iter().zip(&planned.programs) {
            let (graph, inputs) = self.largest(graphs, program, several, &given).map_err(in_file)?;
            let inputs = program.inputs.iter().map(|port| port.name.clone()).zip(inputs).collect();
            let (options, ways, tolerance) = (options.clone(), ways.clone(), self.tolerances.tolerance());
            let across = Across { graph: &graph, inputs, options, ways, tolerance };
            let of = |failure: Failure| Failure { error: in_file(failure.error), ..failure };
            told.push(across.run(&asked.subject, json).map_err(of)?);
        }
        match &told[..] {
            [one] => Ok(one.clone()),
            all if json => Ok(format!(
                "{{\"programs\":[{}]}}\n",
                all.iter().map(|text| text.trim_end()).collect::<Vec<_>>().join(",")
            )),
            all => Ok(all.join("\n")),
        }
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
}
