//! The door of Python: the module `plimsoll._plimsoll`, over which `plimsoll/__init__.py` has what users see.
//!
//! Options come as JSON, which [`settings`] reads, and answers leave as JSON: so the names are those of the command, whatever the language.
//! Work runs without the interpreter's lock. What fails is an exception of `plimsoll.errors`, by the kind of the [`Error`].

mod array;
mod session;
mod train;

use crate::error::{Error, Result, bug};
use crate::model::{Model, Source};
use crate::onnx::proto::ModelProto;
use crate::plan::tell::diff::diff;
use crate::plan::{self, Plan, Planned, View};
use crate::report::{self, picture};
use crate::settings;
use crate::target::Target;
use crate::tensor::Tensor;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyModule};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long Python is not asked whether Ctrl-C was pressed.
const PATIENCE: Duration = Duration::from_millis(50);

/// The exception for an error, which has its fields.
fn raised(py: Python, error: &Error) -> PyErr {
    let (kind, mut fields) = error.fields();
    fields["path"] = json!(error.path());
    fields["exit_code"] = json!(error.exit_code());
    let made = || -> PyResult<PyErr> {
        let make = PyModule::import(py, "plimsoll.errors")?.getattr("_made")?;
        Ok(PyErr::from_value(make.call1((kind, error.to_string(), fields.to_string()))?))
    };
    made().unwrap_or_else(|other| other)
}

/// The result of work, whose panic is an error as any other: `except Exception` catches it.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> std::result::Result<Result<T>, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| bug(&*panic))
}

fn given<T>(py: Python, result: std::result::Result<Result<T>, String>) -> PyResult<T> {
    result.map_err(PyRuntimeError::new_err)?.map_err(|error| raised(py, &error))
}

/// Does something short, without the interpreter's lock.
fn quick<T: Send>(py: Python, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let result = py.detach(|| caught(work));
    given(py, result)
}

/// Does something long on a thread of its own, so that Ctrl-C ends the wait for it. The thread ends by itself.
fn long<T: Send + 'static>(py: Python, work: impl FnOnce() -> Result<T> + Send + 'static) -> PyResult<T> {
    stoppable(py, |_| work())
}

/// As [`long`], of work that looks whether it is still waited for.
fn stoppable<T: Send + 'static>(
    py: Python,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = sync_channel(1);
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let thread = std::thread::Builder::new().name("plimsoll".into()).stack_size(8 << 20).spawn(move || {
        // Nobody waits for it if the wait was ended.
        let _ = sender.send(caught(|| work(&seen)));
    });
    thread.map_err(|e| PyRuntimeError::new_err(format!("no thread: {e}")))?;
    let receiver = Mutex::new(receiver);
    loop {
        let waited = py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(PATIENCE));
        match waited {
            Ok(result) => return given(py, result),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("the work was lost")),
        }
    }
}

/// A model's file, or a model in memory.
#[pyclass(name = "Model", module = "plimsoll._plimsoll", frozen)]
struct PyModel {
    model: Arc<Model>,
}

#[pymethods]
impl PyModel {
    #[new]
    fn new(py: Python, source: &Bound<PyAny>, options: String) -> PyResult<PyModel> {
        if let Ok(bytes) = source.cast::<PyBytes>() {
            let bytes = bytes.as_bytes().to_vec();
            let model = long(py, move || Model::from_bytes(bytes, &settings::options(&options)?))?;
            return Ok(PyModel { model: Arc::new(model) });
        }
        let path: PathBuf = source.extract()?;
        let model = long(py, move || Model::from_path(&path, &settings::options(&options)?))?;
        Ok(PyModel { model: Arc::new(model) })
    }

    #[getter]
    fn assumed(&self) -> Vec<String> {
        self.model.assumed().to_vec()
    }

    /// Plans it, or its training: the rows of a batch, and the method as JSON.
    fn plan(&self, py: Python, target: String, training: Option<(usize, String)>) -> PyResult<PyPlan> {
        let model = Arc::clone(&self.model);
        long(py, move || {
            let target = Target::named(&target)?;
            let Some((batch, method)) = training else {
                return Ok(PyPlan::of(&model, model.planned(&target)?, model.source(), model.assumed().to_vec()));
            };
            let planned = model.planned_training(&target, batch, &settings::training(&method, 1)?)?;
            Ok(PyPlan::of(&model, planned, None, model.assumed_in_training()?))
        })
    }

    fn advise(&self, py: Python, target: String, training: Option<(usize, String)>) -> PyResult<(String, String)> {
        let model = Arc::clone(&self.model);
        long(py, move || {
            let target = Target::named(&target)?;
            let advice = match training {
                None => model.advise(&target)?,
                Some((batch, method)) => model.advise_training(&target, batch, &settings::training(&method, 1)?)?,
            };
            Ok((json!(advice).to_string(), advice.to_string()))
        })
    }

    /// The largest extent of a dim, or the largest batch of a training. If none fits, `_at` of the exception is the dim and its smallest extent.
    fn max_batch(&self, py: Python, target: String, dim: Option<String>, method: Option<String>) -> PyResult<String> {
        let model = Arc::clone(&self.model);
        let found = long(py, move || {
            let target = Target::named(&target)?;
            match method {
                None => model.max_batch(&target, dim.as_deref()),
                Some(method) => model.max_batch_of_training(&target, &settings::training(&method, 1)?),
            }
        })?;
        let limit = self.model.options().memory_limit.expect("without a limit nothing is found");
        found.told(limit, self.model.path()).map(|told| told.to_string()).map_err(|error| {
            let (error, at) = (raised(py, &error), found.next.as_ref().map(|size| (&found.dim, size.extent)));
            error.value(py).setattr("_at", at).map_or_else(|other| other, |()| error)
        })
    }

    fn fit(&self, py: Python, target: String, least: usize, most: usize, cluster: Option<String>) -> PyResult<String> {
        let model = Arc::clone(&self.model);
        long(py, move || {
            let cluster = cluster.map(|text| crate::fit::Cluster::parse(&text)).transpose()?.unwrap_or_default();
            Ok(json!(model.fit(&Target::named(&target)?, least..=most, cluster)?).to_string())
        })
    }

    fn compare(&self, py: Python, inputs: &Bound<PyDict>, runs: usize) -> PyResult<(String, String)> {
        let (model, inputs) = (Arc::clone(&self.model), array::tensors(inputs)?);
        long(py, move || {
            let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
            let compared = model.compare(&inputs, runs)?;
            Ok((json!(compared).to_string(), compared.to_string()))
        })
    }

    fn session(&self, py: Python) -> PyResult<session::PySession> {
        let model = Arc::clone(&self.model);
        Ok(session::PySession::new(long(py, move || model.session())?))
    }

    fn trainer(
        &self,
        py: Python,
        inputs: &Bound<PyAny>,
        labels: &Bound<PyAny>,
        batch: usize,
        method: String,
        epochs: u64,
        steps: Option<u64>,
    ) -> PyResult<train::PyTrainer> {
        let data = train::data(inputs, labels)?;
        let model = Arc::clone(&self.model);
        long(py, move || {
            let steps = steps.unwrap_or_else(|| epochs.saturating_mul(data.steps_per_epoch(batch)));
            // The schedule of the learning rate has its length from the number of steps.
            let training = settings::training(&method, steps.max(1))?;
            Ok(train::PyTrainer::new(model.trainer(&data, batch, training)?, data, steps))
        })
    }
}

/// A plan.
#[pyclass(name = "Plan", module = "plimsoll._plimsoll", frozen)]
struct PyPlan {
    plan: Plan,
    /// What a file of it names.
    source: Option<Source>,
    /// Dims that no option gave.
    #[pyo3(get)]
    assumed: Vec<String>,
    /// The graphs that pictures are drawn with.
    drawn: Option<Drawn>,
}

struct Drawn {
    planned: Arc<Planned>,
    subject: String,
    limit: Option<u64>,
}

impl PyPlan {
    fn of(model: &Model, planned: Planned, source: Option<Source>, assumed: Vec<String>) -> PyPlan {
        let dims: Vec<_> = model.dims().iter().map(|(name, extent)| format!("{name}={extent}")).collect();
        let dims = if dims.is_empty() { String::new() } else { format!(" ({})", dims.join(" ")) };
        let subject = model.path().map_or_else(|| model.name().to_owned(), |path| path.display().to_string()) + &dims;
        let limit = model.options().memory_limit;
        let plan = planned.plan.clone();
        PyPlan { plan, source, assumed, drawn: Some(Drawn { planned: Arc::new(planned), subject, limit }) }
    }

    /// The plan as its file has it.
    fn named(&self) -> Result<Cow<'_, Plan>> {
        Source::name(self.source.as_ref(), &self.plan)
    }

    fn first(&self) -> View<'_> {
        self.plan.first()
    }

    fn about<'a>(&'a self, subject: &'a str) -> picture::About<'a> {
        let drawn = self.drawn.as_ref();
        let graphs = drawn.map_or(&[][..], |drawn| &drawn.planned.graphs[..]);
        picture::About { subject, graphs, limit: drawn.and_then(|drawn| drawn.limit), trained: None, modules: None }
    }

    fn subject(&self) -> &str {
        self.drawn.as_ref().map_or("a plan", |drawn| &drawn.subject)
    }
}

#[pymethods]
impl PyPlan {
    /// Reads a plan's file.
    #[staticmethod]
    fn load(py: Python, path: PathBuf) -> PyResult<PyPlan> {
        quick(py, || Ok(PyPlan { plan: Plan::load(&path)?, source: None, assumed: Vec::new(), drawn: None }))
    }

    #[getter]
    fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// The bytes by class.
    fn classes(&self) -> String {
        Value::Object(self.plan.classes()).to_string()
    }

    fn peak(&self) -> String {
        let graph = self.drawn.as_ref().and_then(|drawn| drawn.planned.graphs.first());
        json!(plan::tell::peak::peak(self.first(), graph)).to_string()
    }

    fn table(&self) -> String {
        self.plan.to_string()
    }

    fn json(&self, py: Python) -> PyResult<String> {
        quick(py, || Ok(self.named()?.to_json()))
    }

    fn html(&self, py: Python) -> String {
        py.detach(|| picture::plan_page(&self.plan, &self.about(self.subject())))
    }

    fn svg(&self, py: Python) -> String {
        py.detach(|| report::svg(&self.plan, &self.about(self.subject())))
    }

    fn save(&self, py: Python, path: PathBuf) -> PyResult<()> {
        quick(py, || self.named()?.save(&path))
    }

    fn check(&self, py: Python) -> PyResult<()> {
        quick(py, || plan::check::check(&self.plan))
    }

    fn diff(&self, py: Python, other: &PyPlan) -> PyResult<(String, String)> {
        quick(py, || {
            let found = diff(self.first(), other.first());
            Ok((json!(found).to_string(), report::diff(&found)))
        })
    }

    /// The names, types and shapes of the inputs, and of the outputs.
    fn ports(&self) -> [Vec<array::Named>; 2] {
        let program = &self.plan.programs[0];
        [array::ports(&program.inputs), array::ports(&program.outputs)]
    }
}

/// The named shapes of a model's inputs and outputs as the file declares them: an extent, or the name of a dim.
#[pyfunction]
fn declared(py: Python, source: &Bound<PyAny>) -> PyResult<Declared> {
    let proto = |model: ModelProto| {
        let graph = model.graph.unwrap_or_default();
        let given: Vec<_> = graph.initializer.iter().map(|tensor| tensor.name.clone()).collect();
        let inputs = graph.input.iter().filter(|input| !given.contains(&input.name)).map(array::declared).collect();
        (inputs, graph.output.iter().map(array::declared).collect())
    };
    if let Ok(bytes) = source.cast::<PyBytes>() {
        let bytes = bytes.as_bytes().to_vec();
        return quick(py, || Ok(proto(crate::onnx::from_bytes(bytes)?.proto)));
    }
    let path: PathBuf = source.extract()?;
    quick(py, || Ok(proto(crate::onnx::load(&path)?.proto)))
}

/// Inputs and outputs, each with a type and extents or names.
type Declared = (Vec<array::Named>, Vec<array::Named>);

/// The command, with these arguments. Returns its exit code.
#[pyfunction]
fn command(py: Python, arguments: Vec<String>) -> PyResult<u8> {
    py.detach(|| caught(|| Ok(crate::cli::run_with(arguments.into_iter().map(Into::into).collect()))))
        .map_err(PyRuntimeError::new_err)?
        .map_err(|e| raised(py, &e))
}

/// Places buffers, each of so many bytes and live from a step on until another: the offsets, and the bytes of the arena.
#[pyfunction]
fn place(py: Python, buffers: Vec<(u64, u64, u64)>) -> PyResult<(Vec<u64>, u64)> {
    use crate::place::{Effort, Item, Problem, place};
    let items = buffers.into_iter().map(|(size, lower, upper)| Item { lower, upper, size, align: 1 }).collect();
    quick(py, || {
        let found = place(&Problem::new(items, 1)?, Effort::PLAN);
        Ok((found.offsets, found.peak))
    })
}

/// The devices of this machine, the best first.
#[pyfunction]
fn devices(py: Python) -> Vec<String> {
    let usable = |backend| {
        let options = crate::session::Options::default().on(backend);
        Some(crate::session::open(&options).ok()?.described())
    };
    let all = [crate::session::Choice::Cuda, crate::session::Choice::Wgpu, crate::session::Choice::Cpu];
    py.detach(|| all.into_iter().filter_map(usable).collect())
}

#[pymodule]
fn _plimsoll(module: &Bound<PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<PyModel>()?;
    module.add_class::<PyPlan>()?;
    module.add_class::<session::PySession>()?;
    module.add_class::<train::PyTrainer>()?;
    module.add_class::<array::PyTensor>()?;
    module.add_function(wrap_pyfunction!(declared, module)?)?;
    module.add_function(wrap_pyfunction!(devices, module)?)?;
    module.add_function(wrap_pyfunction!(place, module)?)?;
    module.add_function(wrap_pyfunction!(command, module)?)
}
