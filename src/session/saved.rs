//! Sessions of plans that were saved in files.

use super::{Choice, Device, Options, Session, check_limit, open};
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::graph::Graph;
use crate::onnx;
use crate::plan::{self, Dim, Limits, Origin, Plan, Planned, Recipe, check};
use crate::shape::Extent;
use crate::target::{Family, Libraries};
use std::path::{Path, PathBuf};

impl Options {
    /// The origin of a plan that these options make of a model's file, for [`Plan::origin`]. It reads the whole file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn origin(&self, model: impl AsRef<Path>) -> Result<Origin> {
        let dim =
            |(name, extent): &(String, Extent)| Dim { name: name.clone(), least: extent.least(), most: extent.most() };
        Ok(Origin {
            content: file::content(model.as_ref())?,
            dims: self.dims.iter().map(dim).collect(),
            state: self.state.clone(),
            given: self.given.clone(),
            training: self.training,
            outputs: self.outputs.clone(),
            recipe: self.recipe,
            memory_limit: self.memory_limit,
        })
    }
}

impl Session {
    /// Loads a plan from a file, with the weights of the model's file that it was made of: what was planned is what runs, and nothing is planned
    /// anew. The plan is checked first, as one that anybody may have written.
    ///
    /// Dims, states, outputs and the recipe are the plan's: `options` may leave them out. It gives the device, weights of another file, and
    /// [bound](Options::bind) elements. A plan of the CPU runs on as many threads as it was made for.
    ///
    /// ```
    /// use plimsoll::{Choice, Options, Plan, Session};
    /// let (model, options) = ("graphs/mlp.onnxtxt", Options::default().on(Choice::Cpu).set("batch", 2));
    /// let plan = Session::from_path(model, &options)?.plan().clone();
    /// let plan = Plan { origin: Some(options.origin(model)?), ..plan };
    /// let file = std::env::temp_dir().join(format!("plan-{}.json", std::process::id()));
    /// std::fs::write(&file, plan.to_json()).expect("it is written");
    ///
    /// let session = Session::from_plan(&file, model, &Options::default())?;
    /// assert_eq!(*session.plan(), plan);
    /// # std::fs::remove_file(file).expect("it was written");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the plan breaks a rule, names no [origin](Plan::origin), or is of several programs or a range; when the model's file has other
    /// content, or other options shape its graph; when the plan does not fit the device or a limit.
    pub fn from_plan(plan: impl AsRef<Path>, model: impl AsRef<Path>, options: &Options) -> Result<Session> {
        let saved = Saved::read(plan.as_ref(), model.as_ref())?;
        let options = saved.options(options)?;
        let (graph, dims) = options.shape(model.as_ref())?;
        let ranges = || Error::usage("expected one extent for each dim of its origin".into()).in_file(plan.as_ref());
        let dims = Options { dims, ..Options::default() }.fixed().ok_or_else(ranges)?;
        let graph = onnx::import(&graph, &dims).map_err(|e| e.in_file(model.as_ref()))?;
        saved.load(graph, open(&options)?, &options, &|_, _| {})
    }
}

/// A plan from a file, checked, of a model's file with the right content.
#[doc(hidden)]
#[derive(Debug)]
pub struct Saved {
    plan: Plan,
    origin: Origin,
    path: PathBuf,
}

impl Saved {
    /// Reads a plan of a model's file.
    ///
    /// # Errors
    /// As [`Session::from_plan`], but for the device.
    pub fn read(path: &Path, model: &Path) -> Result<Saved> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, "read the plan", e))?;
        let plan = Plan::from_json(&text, path)?;
        let refuse = |what: String| Error::usage(what).in_file(path);
        let count = plan.programs.len();
        ensure(count == 1, || refuse(format!("expected the plan of one model, found {count} programs")))?;
        if let Some(Dim { name, least, most }) = plan.programs[0].dims.first() {
            return Err(refuse(format!(
                "it is a plan of a range, {name}={least}..{most}: expected one extent for each dim"
            )));
        }
        let origin = plan.origin.clone();
        let origin =
            origin.ok_or_else(|| refuse("it does not say of which model it was made: plan that again".into()))?;
        if let Some(Dim { name, least, most }) = origin.dims.iter().find(|dim| dim.least > dim.most) {
            return Err(refuse(format!("its origin has no extent for dim '{name}': {least}..{most} is empty")));
        }
        let (expected, found) = (&origin.content, file::content(model)?);
        ensure(*expected == found, || {
            refuse(format!(
                "it was made of a model with the content {expected}; that of {} is {found}",
                model.display()
            ))
        })?;
        Ok(Saved { plan, origin, path: path.to_owned() })
    }

    /// These options, where they are silent, as those that made the plan.
    ///
    /// # Errors
    /// The option that says otherwise.
    pub fn options(&self, asked: &Options) -> Result<Options> {
        let Origin { dims, state, given, training, outputs, recipe, .. } = &self.origin;
        let target = &self.plan.target;
        for (name, extent) in &asked.dims {
            let planned = dims.iter().find(|dim| dim.name == *name).map(|dim| Extent::from(dim.least..=dim.most));
            if planned != Some(*extent) {
                let planned =
                    planned.map_or_else(|| "binds no such dim".to_owned(), |planned| format!("has {planned}"));
                return Err(Error::usage(format!("dim '{name}' is {extent}: the plan {planned}")).in_file(&self.path));
            }
        }
        let threads = [0, target.threads as usize].contains(&asked.threads) || target.family != Family::Cpu;
        let kept = [
            ("state", asked.state.is_empty() || asked.state == *state),
            ("given", asked.given.iter().all(|input| given.contains(input))),
            ("training", !asked.training || *training),
            ("outputs", asked.outputs.is_empty() || asked.outputs == *outputs),
            ("recipe", asked.recipe == Recipe::default() || asked.recipe == *recipe),
            ("threads", threads),
            ("libraries", asked.libraries || target.libraries == Libraries::default()),
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
        Ok(Options {
            backend,
            libraries: target.libraries != Libraries::default(),
            allow_tf32: target.allow_tf32,
            state: state.clone(),
            given: given.clone(),
            training: *training,
            outputs: outputs.clone(),
            dims: dims.iter().map(|dim| (dim.name.clone(), (dim.least..=dim.most).into())).collect(),
            threads: if target.family == Family::Cpu { target.threads as usize } else { asked.threads },
            recipe: *recipe,
            ..asked.clone()
        })
    }

    /// Loads the plan on an open device, with the data of the graph that it was made of.
    ///
    /// # Errors
    /// When it is no plan of this graph, or the device cannot run it.
    pub fn load(
        self,
        graph: Graph,
        device: Device,
        options: &Options,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Session> {
        let Saved { plan, origin, path } = self;
        let in_file = |e: Error| e.in_file(&path);
        let backend = &device.backend;
        check_limit(&**backend, options.memory_limit)?;
        Limits { memory: options.memory_limit }.check(&plan).map_err(in_file)?;
        if *backend.target() != plan.target {
            // A plan that is legal for its target may not be so on this device.
            let here = Plan { target: backend.target().clone(), ..plan.clone() };
            check::check(&here).map_err(in_file)?;
        }
        let limits = Limits { memory: origin.memory_limit };
        let prepared = origin.recipe.graph(graph, &plan.target, &limits).map_err(in_file)?;
        let graph = prepared.graph.clone();
        let constants = plan::data(prepared, plan.first()).map_err(in_file)?;
        Session::load(
            Planned { plan, data: vec![constants], ranges: vec![None], graphs: vec![graph] },
            device,
            progress,
        )
    }
}
