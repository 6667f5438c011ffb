//! Several graphs in one command: programs, which share their memory.

use super::Failure;
use super::args::{self, Given, Measured, Model, On};
use super::method::Method;
use super::open::{self, Whole};
use super::subject::Subject;
use crate::advise::{Case, Make};
use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::onnx;
use crate::plan::{Graphs, Origin, Plan, Program};
use crate::session::{self, Options, Saved, Session, SessionProgram};
use crate::target::Target;
use crate::tensor::Tensor;
use crate::train::Programs as Training;
use clap::Args;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The dim that is the batch of a training.
const BATCH: &str = "batch";

/// The file of a program, and what shapes its graph.
pub(super) type Source = (PathBuf, Options);

/// Programs, and where each comes from if it is of a file.
#[derive(Default)]
pub(super) struct Several {
    pub(super) programs: Vec<(String, Graphs)>,
    sources: Vec<Source>,
    /// The dims that were taken as 1.
    pub(super) assumed: Vec<String>,
}

#[derive(Args, Clone)]
pub(super) struct More {
    /// Further graphs. With the first, they are programs that run one at a time: they share one arena, and each constant and each state is
    /// there once. A program has the name of its file, or NAME if it is given as NAME=FILE. --set NAME:DIM=N sets a dim of one program.
    #[arg(value_name = "MODEL")]
    more: Vec<PathBuf>,
    /// The training to plan in place of the model. Some commands have flags for it.
    #[arg(skip)]
    pub(super) method: Option<Method>,
    /// Batches and other extents to plan the training for, all together; none for that of the flags.
    #[arg(skip)]
    pub(super) at: Vec<Vec<(String, usize)>>,
}

/// Extents of dims, for a name: `batch=8 sequence=64`.
pub(super) fn label(binding: &[(String, usize)]) -> String {
    binding.iter().map(|(dim, extent)| format!("{dim}={extent}")).collect::<Vec<_>>().join(" ")
}

/// A program's name and its file.
fn named(text: &Path) -> Result<(String, PathBuf)> {
    let given = text.to_str().filter(|_| !text.exists()).and_then(|text| text.split_once('='));
    if let Some((name, path)) = given {
        if name.is_empty() || path.is_empty() {
            return Err(Error::usage(format!("'{}': expected FILE or NAME=FILE", text.display())));
        }
        return Ok((name.to_owned(), path.into()));
    }
    let name = text.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = name.ok_or_else(|| Error::usage(format!("{}: expected a file", text.display())))?;
    Ok((name, text.to_owned()))
}

impl More {
    /// Makes ready what runs, and gives its plan, of this program alone, and its inputs: the last of the named programs, behind one run of
    /// each that comes before it. By default it is the first program. Of a range, it is the binding that the given inputs select.
    pub(super) fn select(
        &self,
        session: &Session,
        names: &[String],
        given: Vec<Given>,
        seed: u64,
    ) -> Result<(Plan, Vec<Tensor>)> {
        let programs = names.iter().map(|name| session.program(name)).collect::<Result<Vec<_>>>()?;
        let first = session.programs().next().expect("a plan has a program");
        let (last, before) = programs.split_last().unwrap_or((&first, &[]));
        for program in before {
            let (binding, inputs) = self.ready(program, &given, seed)?;
            program.selected(&binding, |exec| exec.run(&inputs))??;
        }
        let (binding, inputs) = self.ready(last, &given, seed)?;
        Ok((last.selected(&binding, |exec| exec.plan().alone())?, inputs))
    }

    /// The binding that the given inputs select of a program, and all of its inputs. It is made ready to run.
    pub(super) fn ready(
        &self,
        program: &SessionProgram,
        given: &[Given],
        seed: u64,
    ) -> Result<(Vec<(String, usize)>, Vec<Tensor>)> {
        let plan = program.plan();
        let takes = |name: &str| plan.inputs.iter().any(|port| port.name == name);
        // What a graph alone has no input for is a state's, or shapes it.
        let several = plan.plan.programs.len() > 1;
        let own = if several { own(given, &plan.name, &takes).0 } else { given.to_vec() };
        let shapes: Vec<_> = own.iter().map(|g| (g.name.as_str(), g.tensor.shape())).collect();
        let binding = program.binding(&shapes)?;
        let alone = program.selected(&binding, |exec| exec.plan().alone())?;
        let inputs = args::fill(&alone.programs[0], alone.mesh.as_ref(), own, seed)?;
        Ok((binding, program.own(inputs)?))
    }

    /// The files of the further graphs, and those with their data.
    pub(super) fn read(&self) -> impl Iterator<Item = PathBuf> {
        let paths = self.more.iter().filter_map(|text| Some(named(text).ok()?.1));
        paths.flat_map(|path| args::model_files(&path))
    }

    /// True if there are no further graphs.
    fn is_alone(&self) -> bool {
        self.more.is_empty() && self.method.is_none()
    }

    /// True if the model is one graph alone.
    pub(super) fn is_one(&self, model: &Model) -> bool {
        self.is_alone() && !model.is_folder()
    }

    /// These graphs, or the training of the model by a method.
    pub(super) fn or_training(&self, method: Option<Method>) -> More {
        More { method, ..self.clone() }
    }

    /// The files of all graphs, for a message.
    pub(super) fn files(&self, first: &Model) -> String {
        let files = [&first.model].into_iter().chain(&self.more);
        files.map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
    }

    /// The files of all graphs, with the extents that flags give, and those that were taken as 1.
    pub(super) fn subject(&self, first: &Model, assumed: Vec<String>) -> Subject {
        let files = [&first.model].into_iter().chain(&self.more);
        let decoder = first.decoder().ok().flatten();
        let mut dims = decoder.and_then(|files| files.dims(&first.dims()).ok()).unwrap_or_else(|| first.dims());
        dims.extend(assumed.iter().map(|dim| (dim.clone(), 1.into())));
        Subject::new(files.cloned().collect(), dims).assuming(assumed)
    }

    /// The programs of the model's training.
    pub(super) fn training(&self, method: &Method, model: &Model) -> Result<Training> {
        match self.more.first() {
            Some(other) => Err(Error::usage(format!("--train: expected one model, found '{}', too", other.display()))),
            // No byte depends on the number of steps.
            None => method.programs(model, 1),
        }
    }

    /// The programs of the model's training for each batch that is wanted. They share the weights and the arena.
    fn trainings(&self, method: &Method, model: &Model, given: &[Given]) -> Result<Vec<(String, Graphs)>> {
        let mut all = Vec::new();
        for (turn, binding) in self.at.iter().enumerate() {
            if self.at[..turn].contains(binding) {
                continue;
            }
            let (batch, set): (Vec<_>, Vec<_>) = binding.iter().cloned().partition(|(dim, _)| dim == BATCH);
            let method = batch.first().map_or_else(|| method.clone(), |(_, batch)| method.on_batch(*batch as u64));
            let is_set = |(dim, _): &(String, usize)| set.iter().any(|(other, _)| other == dim);
            let mut dims = open::largest(&model.dims());
            dims.retain(|dim| !is_set(dim));
            dims.extend(set.iter().cloned());
            let programs = of_training(self.training(&method, &model.with_dims(&dims))?, &[])?;
            all.extend(programs.into_iter().map(|(name, graphs)| (format!("{} {name}", label(binding)), graphs)));
        }
        if all.is_empty() { of_training(self.training(method, model)?, given) } else { Ok(all) }
    }

    /// The programs of files, or of a folder with a decoder. A given input goes to each program that has it.
    pub(super) fn graphs(&self, first: &Model, given: &[Given]) -> Result<Several> {
        if let Some(files) = first.decoder()? {
            if let Some(other) = self.more.first() {
                return Err(Error::usage(format!(
                    "a folder with a decoder stands alone, found '{}', too",
                    other.display()
                )));
            }
            if let Some(given) = given.first() {
                let what = "the run of a decoder gives all inputs; --ids gives the tokens of a prompt";
                return Err(Error::usage(format!("{}: {what}", given.flag)));
            }
            let programs = files.programs(&first.dims(), first.weights.as_deref())?;
            return Ok(Several { programs, ..Several::default() });
        }
        let files = [&first.model].into_iter().chain(&self.more).map(|text| named(text));
        let files = files.collect::<Result<Vec<_>>>()?;
        let flags = first.dims().len()
            + first.ties().count()
            + first.state.len()
            + first.outputs.len()
            + usize::from(first.training);
        let mut used = vec![false; flags + given.len()];
        let (mut all, mut assumed) = (Several::default(), Vec::new());
        for (name, path) in &files {
            let made = program(first, given, name, path).map_err(|e| e.in_file(path))?;
            used.iter_mut().zip(made.used).for_each(|(used, uses)| *used |= uses);
            all.programs.push((name.clone(), made.graphs));
            all.sources.push((path.clone(), made.options));
            assumed.extend(made.assumed.into_iter().map(|dim| (name, dim)));
        }
        // A dim has its program's name in front where flags bind the same dim of another one.
        all.assumed = assumed
            .iter()
            .map(|(name, dim)| {
                let takes = |(_, options): &Source| options.dims.iter().any(|(other, _)| other == dim);
                let with = all.sources.iter().filter(|source| takes(source)).count();
                let alike = assumed.iter().filter(|(_, other)| other == dim).count();
                if with == alike { dim.clone() } else { format!("{name}:{dim}") }
            })
            .collect();
        all.assumed.sort();
        all.assumed.dedup();
        let Some(unused) = used.iter().position(|used| !used) else { return Ok(all) };
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        let flags =
            first.dims().into_iter().map(|(dim, extent)| format!("--set {dim}={extent}: no program has such a dim"));
        let ties = first.ties().map(|(dim, sum)| format!("--set {dim}={sum}: no program has such a dim"));
        let states =
            first.state.iter().map(|(i, o)| format!("--state {i}={o}: no program has such an input or output"));
        let outputs = first.outputs.iter().map(|name| format!("--output {name}: no program has such an output"));
        let inputs = given.iter().map(|g| format!("--input {}: no program has such an input or state", g.name));
        let training = first.training.then(|| "--training: no program has a training step".to_owned());
        let what = flags
            .chain(ties)
            .chain(states)
            .chain(outputs)
            .chain(training)
            .chain(inputs)
            .nth(unused)
            .expect("there is one per flag");
        Err(Error::usage(format!("{what}; the programs: {}", names.join(", "))))
    }

    /// Per program, its name, its dims without a number in the file, and its inputs as the file declares them.
    pub(super) fn open_dims(&self, first: &Model) -> Result<Vec<(String, Vec<String>, String)>> {
        if let Some(files) = first.decoder()? {
            return Ok(vec![files.open_dims()?]);
        }
        let files = [&first.model].into_iter().chain(&self.more).map(|text| named(text));
        let open = |(name, path): (String, PathBuf)| {
            let (model, _) = load(first, &path)?.0.with_shared_state(&first.state);
            let dims = model.open_dims().map_err(|e| e.in_file(&path))?;
            Ok((name, dims, model.declared_inputs()))
        };
        files.map(|file| file.and_then(open)).collect()
    }

    /// The flags with `--batch` as the `--set` that it stands for.
    fn with_batch(&self, first: &Model) -> Result<Model> {
        let Some(batch) = first.batch.filter(|_| !first.is_folder()) else { return Ok(first.clone()) };
        let files = [&first.model].into_iter().chain(&self.more).map(|text| named(text));
        let leading = |(name, path): (String, PathBuf)| {
            let dim = open::leading(&load(first, &path)?.0);
            Ok((name, dim.map_err(|what| Error::usage(format!("--batch {batch}: {what}")).in_file(&path))?))
        };
        let mut found = files.map(|file| file.and_then(leading)).collect::<Result<Vec<(String, String)>>>()?;
        if found.iter().all(|(_, dim)| *dim == found[0].1) {
            found.truncate(1);
        } else {
            found.iter_mut().for_each(|(name, dim)| *dim = format!("{name}:{dim}"));
        }
        let mut model = Model { batch: None, of_batch: Some(batch), ..first.clone() };
        for (_, dim) in found {
            if let Some((_, extent)) = first.dims().iter().find(|(other, _)| *other == dim) {
                let what = format!("--batch {batch}: --set {dim}={extent} binds the same dim: expected one of them");
                return Err(Error::usage(what));
            }
            model.set.push((dim, args::Bound::Extent((batch as usize).into())));
        }
        Ok(model)
    }

    /// What a command plans.
    pub(super) fn asked(&self, first: &Model, given: &[Given]) -> Result<Asked> {
        let first = &self.with_batch(first)?;
        let training = self.method.as_ref().map(|method| self.training(method, first)).transpose()?;
        if !self.is_one(first) {
            let Several { programs, sources, assumed } = match &self.method {
                Some(method) => {
                    let assumed = method.whole(first)?.assumed;
                    Several { programs: self.trainings(method, first, given)?, sources: Vec::new(), assumed }
                }
                None => self.graphs(first, given)?,
            };
            let (more, first, given) = (self.clone(), first.clone(), given.to_vec());
            let (subject, dims) = (self.subject(&first, assumed), open::largest(&first.dims()));
            let make = move |dims: &[(String, usize)]| Ok(more.graphs(&first.with_dims(dims), &given)?.programs);
            let cost = |(_, graphs): &(String, Graphs)| match graphs {
                Graphs::One(graph) => graph.len(),
                _ => usize::MAX,
            };
            let nodes = programs.iter().map(cost).fold(0, usize::saturating_add);
            return Ok(Asked {
                programs,
                sources,
                subject,
                is_one: false,
                training,
                make: Arc::new(make),
                nodes,
                dims,
            });
        }
        let whole = first.load_whole(given)?;
        let graphs = if args::has_range(&whole.dims) {
            Graphs::Range(session::source(whole.model.clone()), whole.dims.clone())
        } else {
            let graph = first.import(&whole, given)?;
            first.mention_states(&graph);
            graph.into()
        };
        let Whole { model, dims: extents, assumed } = whole;
        let subject = Subject::new(vec![first.model.clone()], extents.clone()).assuming(assumed);
        let dims = open::largest(&extents);
        let nodes = model.proto.graph.as_ref().map_or(0, |graph| graph.node.len());
        let of = model.clone();
        let make = move |dims: &[(String, usize)]| Ok(vec![(String::new(), onnx::import(&of, dims)?.into())]);
        let options = Options { given: model.given(), ..first.origin(&first.dims(), &extents)? };
        let (programs, sources) = (vec![(String::new(), graphs)], vec![(first.model.clone(), options)]);
        Ok(Asked { programs, sources, subject, is_one: true, training, make: Arc::new(make), nodes, dims })
    }

    /// Opens the device, plans the graph or the programs, and loads their weights under a progress bar.
    pub(super) fn session(
        &self,
        model: &Model,
        on: &On,
        measured: &Measured,
        given: &[Given],
        json: bool,
    ) -> Result<(Session, Subject), Failure> {
        if !model.of.is_empty() {
            let what = "--model: expected one plan; several graphs are planned together";
            ensure(self.is_one(model), || Error::usage(what.into()))?;
            return Ok(of_plan(model, on, given)?);
        }
        let options = Options { tuned: !measured.no_tuned, ..model.options(on)? };
        let asked = self.asked(model, given)?;
        let device = session::open(&options)?;
        tracing::info!("backend: {}", device.described());
        model.may_offload(&device)?;
        let job = options.job(asked.programs.clone(), &device);
        let target = job.target.clone();
        let session = args::loading(|report| Session::new(job, device, report));
        Ok((session.map_err(|error| asked.refuse(model, &target, error, json))?, asked.subject))
    }
}

/// Loads a saved plan, with the weights of the models that it was made of.
fn of_plan(flags: &Model, on: &On, given: &[Given]) -> Result<(Session, Subject)> {
    ensure(flags.batch.is_none(), || Error::usage("--batch: a saved plan has its own extents".into()))?;
    let saved = Saved::read(&flags.model, &flags.of)?;
    let options = saved.options(&flags.options(on)?)?;
    let several = options.len() > 1;
    let (mut graphs, mut dims, mut used) = (Vec::new(), Vec::new(), vec![false; given.len()]);
    for ((name, path), own) in saved.programs().zip(&options) {
        let is_given = |input: &&String| given.iter().any(|g| g.name == **input || g.name == format!("{name}:{input}"));
        if let Some(input) = own.given.iter().find(|input| !is_given(input)) {
            let what = format!("the plan is for runs that give input '{input}': expected --input {input}=VALUE");
            return Err(Error::usage(what).in_file(&flags.model));
        }
        let made = program(&flags.shaped(own), given, name, path).map_err(|e| e.in_file(path))?;
        let uses = &made.used[made.used.len() - given.len()..];
        used.iter_mut().zip(uses).for_each(|(used, uses)| *used |= uses);
        let label = |dim: String| if several { format!("{name}:{dim}") } else { dim };
        dims.extend(made.options.dims.into_iter().map(|(dim, extent)| (label(dim), extent)));
        graphs.push(made.graphs);
    }
    if let Some((Given { flag, .. }, _)) = given.iter().zip(&used).find(|(_, used)| !**used) {
        return Err(Error::usage(format!("{flag}: the plan has no such input or state")).in_file(&flags.model));
    }
    let device = session::open(&options[0])?;
    tracing::info!("backend: {}", device.described());
    let session = args::loading(|report| saved.load(graphs, device, &options[0], report));
    Ok((session?, Subject::new(flags.of.clone(), dims).by(&flags.model)))
}

/// What a command plans, and what it says of it.
pub(super) struct Asked {
    pub(super) programs: Vec<(String, Graphs)>,
    /// Where each program comes from; empty if they are of no file: of a training, or of a folder.
    sources: Vec<Source>,
    pub(super) subject: Subject,
    /// True of one model alone.
    is_one: bool,
    pub(super) training: Option<Training>,
    make: Make,
    nodes: usize,
    dims: Vec<(String, usize)>,
}

impl Asked {
    /// Where the plan of these programs comes from, if it can be loaded again.
    pub(super) fn origin(&self) -> Result<Option<Origin>> {
        let made = self.sources.iter().map(|(path, options)| options.origin(path)).collect::<Result<Vec<_>>>()?;
        Ok(made.into_iter().reduce(|all, next| Origin { models: [all.models, next.models].concat(), ..all }))
    }

    /// The programs at their largest extents, for advice.
    pub(super) fn case(&self, flags: &Model, target: &Target) -> Case {
        let (make, nodes, dims) = (Arc::clone(&self.make), self.nodes, self.dims.clone());
        // A mesh that is refused has been, before.
        let sharding = flags.several.sharding().unwrap_or_default();
        Case { make, nodes, dims, target: target.clone(), recipe: flags.recipe(), runs: flags.forks, sharding }
    }

    /// An error of these programs, with advice if they do not fit.
    pub(super) fn refuse(&self, flags: &Model, target: &Target, error: Error, json: bool) -> Failure {
        let error = self.in_file(flags, error);
        // A training has remedies of its own.
        if self.training.is_some() { error.into() } else { args::refuse(&self.case(flags, target), error, json) }
    }

    /// An error of one model names its file.
    pub(super) fn in_file(&self, flags: &Model, error: Error) -> Error {
        if self.is_one { error.in_file(&flags.model) } else { error }
    }
}

/// The graphs of a training, which has an input for all that is given.
pub(super) fn of_training(training: Training, given: &[Given]) -> Result<Vec<(String, Graphs)>> {
    let programs: Vec<(String, Graph)> = training.named().collect();
    let takes = |graph: &Graph, name: &str| graph.inputs().iter().any(|&input| graph.value_name(input) == name);
    if let Some(unknown) = given.iter().find(|given| !programs.iter().any(|(_, graph)| takes(graph, &given.name))) {
        return Err(Error::usage(format!("{}: the training has no such input", unknown.flag)));
    }
    for Given { name, tensor, flag } in given {
        let facts = programs.iter().flat_map(|(_, graph)| {
            graph.inputs().iter().filter(|&&input| graph.value_name(input) == name).map(|&input| graph.fact(input))
        });
        if let Some(fact) = facts.into_iter().find(|fact| fact.shape != *tensor.shape()) {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            return Err(Error::usage(format!("{flag}: input '{name}': expected {fact}, found {dtype}{shape}")));
        }
    }
    Ok(programs.into_iter().map(|(name, graph)| (name, graph.into())).collect())
}

/// The model of a program, with the weights of `--weights`, and with its training step if that is wanted and there is one. True comes second
/// if it has the step.
fn load(all: &Model, path: &Path) -> Result<(onnx::Model, bool)> {
    let model = onnx::load_weighed(path, all.weights.as_deref())?;
    if all.training && model.offers_training() { Ok((model.with_training()?, true)) } else { Ok((model, false)) }
}

/// A program of a file.
struct Made {
    graphs: Graphs,
    /// What shapes its graph, for its [origin](Asked::origin).
    options: Options,
    /// Per flag of `--set`, `--state`, `--output` and `--training`, and per given input, whether the program has use for it.
    used: Vec<bool>,
    /// The dims that were taken as 1.
    assumed: Vec<String>,
}

/// The program of a file.
fn program(all: &Model, given: &[Given], name: &str, path: &Path) -> Result<Made> {
    let (mut model, training) = load(all, path)?;
    let (mut tied, mut ties) = (Vec::new(), Vec::new());
    for (dim, sum) in all.ties() {
        let dim = dim.split_once(':').filter(|(program, _)| *program == name).map_or(dim, |(_, dim)| dim);
        tied.push(model.has_dim(dim));
        if model.has_dim(dim) {
            model = model.with_tie(dim, sum)?;
            ties.push((dim.to_owned(), sum.to_owned()));
        }
    }
    let (model, states) = model.with_shared_state(&all.state);
    model.open_dims()?;
    let (mut dims, mut used) = (Vec::new(), Vec::new());
    for (dim, extent) in &all.dims() {
        let own = dim.split_once(':').filter(|(program, _)| *program == name).map(|(_, dim)| dim);
        let dim = own.unwrap_or(dim);
        used.push(model.has_dim(dim));
        if own.is_some() {
            dims.retain(|(other, _)| other != dim);
        }
        let shadowed = own.is_none() && dims.iter().any(|(other, _)| other == dim);
        if used.last() == Some(&true) && !shadowed {
            dims.push((dim.to_owned(), *extent));
        }
    }
    used.extend(tied);
    let state = all.state.iter().zip(&states).filter(|(_, used)| **used).map(|(pair, _)| pair.clone()).collect();
    used.extend(states);
    let outputs = model.proto.graph.iter().flat_map(|g| &g.output).map(|o| o.name.as_str());
    let outputs: Vec<String> =
        outputs.filter(|name| all.outputs.iter().any(|o| o == name)).map(str::to_owned).collect();
    used.extend(all.outputs.iter().map(|name| outputs.contains(name)));
    let set = dims.clone();
    let (model, dims) = model.with_outputs(&outputs).grow(dims)?;
    used.extend(all.training.then_some(training));
    let (own, uses) = own(given, name, &|input| model.takes(input));
    used.extend(uses);
    let one = Model { model: path.to_owned(), ..all.clone() };
    let (model, dims) = one.bind(model, dims, &own)?;
    let whole = Whole::new(model, dims)?;
    let Whole { model, dims, assumed } = &whole;
    let options = Options { state, training, outputs, ties, given: model.given(), ..all.origin(&set, dims)? };
    let graphs = match args::has_range(dims) {
        true => Graphs::Range(session::source(model.clone()), dims.clone()),
        false => one.import(&whole, &own)?.into(),
    };
    Ok(Made { graphs, options, used, assumed: assumed.clone() })
}

/// The inputs that are given to a program: by its name and the input's, or else by that of the input alone. Per given input, true if the
/// program reads it.
fn own(given: &[Given], program: &str, takes: &dyn Fn(&str) -> bool) -> (Vec<Given>, Vec<bool>) {
    let alone = |g: &Given| {
        let (_, name) = g.name.split_once(':').filter(|(of, _)| *of == program)?;
        takes(name).then(|| Given { name: name.to_owned(), ..g.clone() })
    };
    let mut own: Vec<Given> = given.iter().filter_map(alone).collect();
    let uses = given.iter().map(|g| takes(&g.name) || alone(g).is_some()).collect();
    let shared = given.iter().filter(|g| takes(&g.name) && !own.iter().any(|other| other.name == g.name));
    let shared: Vec<Given> = shared.cloned().collect();
    own.extend(shared);
    (own, uses)
}

/// The inputs of each program: what is given to it, and random ones for the rest.
pub(super) fn inputs(plan: &Plan, given: &[Given], seed: u64) -> Result<Vec<Vec<Tensor>>> {
    let of = |program: &Program| {
        let takes = |name: &str| program.inputs.iter().any(|port| port.name == name);
        args::fill(program, plan.mesh.as_ref(), own(given, &program.name, &takes).0, seed)
    };
    plan.programs.iter().map(of).collect()
}
