//! Sessions of plans that were saved in files.

use super::{Choice, Device, Options, Session, check_limit, open, source};
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::onnx;
use crate::plan::{self, Dim, Graphs, Job, Limits, Model, Origin, Plan, Planned, Planner, Recipe, check};
use crate::shape::Extent;
use crate::target::{Family, Libraries, Target};
use std::path::{Path, PathBuf};

impl Options {
    /// The origin of a plan that these options make of a model's file, for [`Plan::origin`]. It reads the whole file. That of several programs has
    /// the models of all.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn origin(&self, model: impl AsRef<Path>) -> Result<Origin> {
        let dim =
            |(name, extent): &(String, Extent)| Dim { name: name.clone(), least: extent.least(), most: extent.most() };
        let model = Model {
            content: file::content(model.as_ref())?,
            dims: self.dims.iter().map(dim).collect(),
            ties: self.ties.clone(),
            state: self.state.clone(),
            given: self.given.clone(),
            training: self.training,
            outputs: self.outputs.clone(),
        };
        Ok(Origin { models: vec![model], recipe: self.recipe, memory_limit: self.memory_limit })
    }
}

impl Session {
    /// Loads a plan from a file, with the weights of the models' files that it was made of: what was planned is what runs, and nothing is planned
    /// anew. The plan is checked first, as one that anybody may have written. Of several programs, `models` has the file of each, in their order,
    /// or the one file of all.
    ///
    /// Dims, states, outputs and the recipe are the plan's: `options` may leave them out. It gives the device, weights of another file, and
    /// [bound](Options::bind) elements. A plan of the CPU runs on as many threads as it was made for.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// use plimsoll::{Choice, Options, Plan, Session};
    /// let (model, options) = ("graphs/mlp.onnxtxt", Options::default().on(Choice::Cpu).set("batch", 2));
    /// let plan = Session::from_path(model, &options)?.plan().clone();
    /// let plan = Plan { origin: Some(options.origin(model)?), ..plan };
    /// let file = std::env::temp_dir().join(format!("plan-{}.json", std::process::id()));
    /// plan.save(&file)?;
    ///
    /// let session = Session::from_plan(&file, &[model], &Options::default())?;
    /// assert_eq!(*session.plan(), plan);
    /// # std::fs::remove_file(file).expect("it was written");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the plan breaks a rule, names no [origin](Plan::origin), or is of a range; when a model's file has other
    /// content, or other options shape its graph; when the plan does not fit the device or a limit.
    pub fn from_plan(plan: impl AsRef<Path>, models: &[impl AsRef<Path>], options: &Options) -> Result<Session> {
        let saved = Saved::read(plan.as_ref(), models)?;
        let options = saved.options(options)?;
        let mut graphs = Vec::with_capacity(options.len());
        for (options, (_, path)) in options.iter().zip(saved.programs()) {
            let (model, dims) =
                options.shape(onnx::load_weighed(path, options.weights.as_deref())?, saved.plan.programs.len() > 1)?;
            let fixed = Options { dims: dims.clone(), ..Options::default() }.fixed();
            graphs.push(match fixed {
                Some(dims) => onnx::import(&model, &dims).map_err(|e| e.in_file(path))?.into(),
                None => Graphs::Range(source(model), dims),
            });
        }
        saved.load(graphs, open(&options[0])?, &options[0], &|_, _| {})
    }
}

/// A plan from a file, checked, of models' files with the right content.
#[doc(hidden)]
#[derive(Debug)]
pub struct Saved {
    plan: Plan,
    origin: Origin,
    path: PathBuf,
    /// The model's file of each program.
    files: Vec<PathBuf>,
}

impl Saved {
    /// Reads a plan of models' files.
    ///
    /// # Errors
    /// As [`Session::from_plan`], but for the device.
    pub fn read(path: &Path, models: &[impl AsRef<Path>]) -> Result<Saved> {
        let plan = Plan::load(path)?;
        let refuse = |what: String| Error::usage(what).in_file(path);
        if let Some(Dim { name, least, most }) = plan.programs.iter().find_map(|program| program.dims.first()) {
            return Err(refuse(format!(
                "it is a plan of a range, {name}={least}..{most}, which no run takes from a file: give each dim one extent, and plan it again"
            )));
        }
        let origin = plan.origin.clone();
        let origin = origin.ok_or_else(|| {
            let kinds = "a training, of a folder of decoders or of a graph without a file";
            refuse(format!("it does not say of which model it was made, as a plan of {kinds}: run the model itself"))
        })?;
        let (count, known) = (plan.programs.len(), origin.models.len());
        ensure(count == known, || refuse(format!("its origin has {known} models: expected one for each of {count}")))?;
        let mut dims = origin.models.iter().flat_map(|model| &model.dims);
        if let Some(Dim { name, least, most }) = dims.find(|dim| dim.least > dim.most) {
            return Err(refuse(format!("its origin has no extent for dim '{name}': {least}..{most} is empty")));
        }
        let files: Vec<PathBuf> = match models {
            [model] => vec![model.as_ref().to_owned(); count],
            models => models.iter().map(|model| model.as_ref().to_owned()).collect(),
        };
        ensure(files.len() == count, || {
            let names: Vec<_> = plan.programs.iter().map(|program| &program.name[..]).collect();
            let (names, found) = (names.join(", "), files.len());
            refuse(format!("expected the model of each program, in the order {names}, or one of all, found {found}"))
        })?;
        for ((model, file), program) in origin.models.iter().zip(&files).zip(&plan.programs) {
            let (expected, found) = (&model.content, file::content(file)?);
            ensure(*expected == found, || {
                let what = if count > 1 { format!("program '{}'", program.name) } else { "it".to_owned() };
                let file = file.display();
                refuse(format!("{what} was made of a model with the content {expected}; that of {file} is {found}"))
            })?;
        }
        Ok(Saved { plan, origin, path: path.to_owned(), files })
    }

    /// The programs: their names, and the models' files.
    pub fn programs(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.plan.programs.iter().zip(&self.files).map(|(program, file)| (&program.name[..], file.as_path()))
    }

    /// The options of each program: those asked for, completed by those that made the plan.
    ///
    /// # Errors
    /// The option that says otherwise.
    pub fn options(&self, asked: &Options) -> Result<Vec<Options>> {
        let Origin { models, recipe, .. } = &self.origin;
        let target = &self.plan.target;
        for (name, extent) in &asked.dims {
            let planned = |(model, program): (&Model, &plan::Program)| {
                let own = name.split_once(':').filter(|(of, _)| *of == program.name).map_or(&name[..], |(_, own)| own);
                model.dims.iter().find(|dim| dim.name == own).map(|dim| Extent::from(dim.least..=dim.most))
            };
            let planned: Vec<Extent> = models.iter().zip(&self.plan.programs).filter_map(planned).collect();
            if planned.is_empty() || planned.iter().any(|planned| planned != extent) {
                let other = planned.iter().find(|planned| *planned != extent);
                let planned = other.map_or_else(|| "binds no such dim".to_owned(), |planned| format!("has {planned}"));
                return Err(Error::usage(format!("dim '{name}' is {extent}: the plan {planned}")).in_file(&self.path));
            }
        }
        let threads = [0, target.threads as usize].contains(&asked.threads) || target.family != Family::Cpu;
        let is_state = |pair| models.iter().any(|model| model.state.contains(pair));
        let is_asked = |model: &Model| model.state.iter().all(|pair| asked.state.contains(pair));
        let is_output = |name| models.iter().any(|model| model.outputs.contains(name));
        let is_wanted = |model: &Model| model.outputs.iter().all(|name| asked.outputs.contains(name));
        let is_default = asked.recipe == Recipe::default();
        // By the names of the command's flags, which are those of all languages.
        let kept = [
            ("state", asked.state.is_empty() || asked.state.iter().all(is_state) && models.iter().all(is_asked)),
            ("given", asked.given.iter().all(|input| models.iter().any(|model| model.given.contains(input)))),
            ("training", !asked.training || models.iter().any(|model| model.training)),
            ("output", asked.outputs.is_empty() || asked.outputs.iter().all(is_output) && models.iter().all(is_wanted)),
            ("ties", asked.ties.iter().all(|tie| models.iter().any(|model| model.ties.contains(tie)))),
            ("f16", is_default || asked.recipe.f16 == recipe.f16),
            ("no_fuse", is_default || asked.recipe.fuse == recipe.fuse),
            ("chunks", is_default || asked.recipe.chunks == recipe.chunks),
            ("quantize", is_default || asked.recipe.quantize == recipe.quantize),
            ("cache", is_default || asked.recipe.int8_caches == recipe.int8_caches),
            ("prefer", is_default || asked.recipe.prefer == recipe.prefer),
            ("offload", is_default || asked.recipe.offload == recipe.offload),
            ("threads", threads),
            ("no_libraries", asked.libraries || target.libraries == Libraries::default()),
            ("allow_tf32", !asked.allow_tf32 || target.allow_tf32),
        ];
        if let Some((option, _)) = kept.into_iter().find(|(_, kept)| !kept) {
            let what = format!("option {option}: the plan was made with another; plan the model again with it");
            return Err(Error::usage(what).in_file(&self.path));
        }
        let backend = match target.family {
            Family::Cpu => Choice::Cpu,
            Family::Cuda => Choice::Cuda,
            Family::Wgpu => Choice::Wgpu,
        };
        if ![Choice::Auto, backend].contains(&asked.backend) {
            let what = format!("the plan is for {}, not for {:?}", target.family.name(), asked.backend);
            return Err(Error::usage(what.to_lowercase()).in_file(&self.path));
        }
        let own = |Model { dims, ties, state, given, training, outputs, .. }: &Model| Options {
            backend,
            libraries: target.libraries != Libraries::default(),
            allow_tf32: target.allow_tf32,
            ties: ties.clone(),
            state: state.clone(),
            given: given.clone(),
            training: *training,
            outputs: outputs.clone(),
            dims: dims.iter().map(|dim| (dim.name.clone(), (dim.least..=dim.most).into())).collect(),
            threads: if target.family == Family::Cpu { target.threads as usize } else { asked.threads },
            recipe: *recipe,
            ..asked.clone()
        };
        Ok(models.iter().map(own).collect())
    }

    /// Loads the plan on an open device, with the data of the graphs that it was made of, one for each program.
    ///
    /// # Errors
    /// When it is no plan of these graphs, or the device cannot run it.
    pub fn load(
        self,
        graphs: Vec<Graphs>,
        device: Device,
        options: &Options,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Session> {
        let Saved { plan, origin, path, .. } = self;
        let in_file = |e: Error| e.in_file(&path);
        if graphs.iter().any(|graphs| matches!(graphs, Graphs::Range(..))) {
            return Err(in_file(Error::usage("expected one extent for each dim of its origin".into())));
        }
        let backend = &device.backend;
        check_limit(&**backend, options.memory_limit)?;
        Limits { memory: options.memory_limit }.check(&plan).map_err(in_file)?;
        let here = Target { reserve: plan.target.reserve, ..backend.target().clone() };
        if here != plan.target {
            // A plan that is legal for its target may not be so on this device.
            let here = Plan { target: here, ..plan.clone() };
            check::check(&here).map_err(in_file)?;
        }
        let names = plan.programs.iter().map(|program| program.name.clone());
        let job = Job { recipe: origin.recipe, ..Job::new(names.zip(graphs), &plan.target) };
        let prepared = Planner::new(&job).and_then(|mut planner| planner.graphs(origin.memory_limit));
        let prepared = prepared.map_err(in_file)?;
        let graphs = prepared.iter().map(|prepared| prepared.graph.clone()).collect();
        let data = prepared.into_iter().zip(plan.views()).map(|(graph, view)| plan::data(graph, view));
        let data = data.collect::<Result<Vec<_>>>().map_err(in_file)?;
        let ranges = plan.programs.iter().map(|_| None).collect();
        Session::load(Planned { plan, data, ranges, graphs }, device, progress)
    }
}
