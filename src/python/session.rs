//! Sessions of Python.

use super::array::{self, Array, Named, PyTensor};
use super::{caught, given, long, quick, raised, stoppable};
use crate::backend::apart;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::plan::Port;
use crate::session::Session;
use crate::shape::Shape;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A loaded plan, which runs.
#[pyclass(name = "Session", module = "plimsoll._plimsoll", frozen)]
pub(super) struct PySession {
    session: Arc<Session>,
}

impl PySession {
    pub(super) fn new(session: Session) -> PySession {
        PySession { session: Arc::new(session) }
    }
}

/// Where the elements of a run come from and go to. The arrays are kept by the caller until the run is over.
struct Moved<'a> {
    inputs: Vec<(&'a str, &'a Array)>,
    outputs: Vec<(&'a str, &'a mut Array)>,
}

/// The binding that arrays select, and the shapes of the outputs then.
fn selected(session: &Session, inputs: &[(String, Array)]) -> Result<(Vec<(String, usize)>, Vec<Port>)> {
    let shapes: Vec<(&str, &Shape)> = inputs.iter().map(|(name, array)| (name.as_str(), &array.shape)).collect();
    let binding = session.binding(&shapes)?;
    if session.plan().programs[0].dims.is_empty() {
        return Ok((binding, Vec::new()));
    }
    let outputs = session.selected(&binding, |exec| exec.plan().outputs.clone())?;
    Ok((binding, outputs))
}

/// The arrays of a run's outputs, in their order: those that are given, and new ones.
fn outputs<'py>(py: Python<'py>, ports: &[Port], out: Option<&Bound<'py, PyDict>>) -> PyResult<Bound<'py, PyDict>> {
    let results = PyDict::new(py);
    for port in ports {
        let given = out.map(|out| out.get_item(&port.name)).transpose()?.flatten();
        results.set_item(&port.name, given.map_or_else(|| array::empty(py, port), Ok)?)?;
    }
    for name in out.iter().flat_map(|out| out.keys()) {
        if !results.contains(&name)? {
            let known: Vec<_> = ports.iter().map(|port| &port.name[..]).collect();
            let what = format!("output '{name}': not an output of the graph; its outputs: {}", known.join(", "));
            return Err(raised(py, &Error::usage(what)));
        }
    }
    Ok(results)
}

fn run(exec: &mut Exec, moved: &mut Moved) -> Result<()> {
    let program = exec.plan();
    for (name, array) in &moved.inputs {
        if let Some(port) = program.inputs.iter().find(|port| port.name == *name) {
            array.suits("input", port)?;
        }
    }
    for (name, array) in &moved.outputs {
        if let Some(port) = program.outputs.iter().find(|port| port.name == *name) {
            array.suits("output", port)?;
        }
    }
    let inputs: Vec<_> = moved.inputs.iter().map(|(name, array)| (*name, array.place())).collect();
    let mut outputs = Vec::with_capacity(moved.outputs.len());
    for (name, array) in &mut moved.outputs {
        outputs.push((*name, array.place_mut(name)?));
    }
    exec.run_in_place(&inputs, &mut outputs)
}

#[pymethods]
impl PySession {
    #[getter]
    fn device(&self) -> &str {
        self.session.device()
    }

    /// The bytes that were planned.
    #[getter]
    fn bytes(&self) -> u64 {
        self.session.plan().bytes()
    }

    /// The bytes that the device has given. It waits for a run.
    #[getter]
    fn allocated(&self, py: Python) -> PyResult<u64> {
        quick(py, || Ok(self.session.usage().bytes))
    }

    fn ports(&self) -> [Vec<Named>; 2] {
        [array::ports(self.session.inputs()), array::ports(self.session.outputs())]
    }

    /// Runs once. `out` has arrays for outputs; the others are made. Returns all outputs by name.
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: &Bound<'py, PyDict>,
        out: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut given_inputs = Vec::with_capacity(inputs.len());
        for item in inputs.items() {
            let (name, array): (String, Bound<PyAny>) = item.extract()?;
            let array = Array::of(&name, &array)?;
            given_inputs.push((name, array));
        }
        let session = &*self.session;
        let is_range = !session.plan().programs[0].dims.is_empty();
        let (binding, chosen) = match is_range {
            true => quick(py, || selected(session, &given_inputs))?,
            false => (Vec::new(), Vec::new()),
        };
        let ports = if is_range { &chosen } else { session.outputs() };
        let results = outputs(py, ports, out)?;
        let mut made = Vec::with_capacity(ports.len());
        for (port, (_, array)) in ports.iter().zip(&results) {
            made.push((&port.name[..], Array::of(&port.name, &array)?));
        }
        let lies_in = given_inputs.iter().map(|(name, array)| array.lies(name));
        let lies_out = made.iter().map(|(name, array)| array.lies(name));
        apart(lies_in, lies_out).map_err(|error| raised(py, &error))?;
        let result = py.detach(|| {
            caught(|| {
                let mut moved = Moved {
                    inputs: given_inputs.iter().map(|(name, array)| (name.as_str(), array)).collect(),
                    outputs: made.iter_mut().map(|(name, array)| (*name, array)).collect(),
                };
                session.selected(&binding, |exec| run(exec, &mut moved))?
            })
        });
        given(py, result)?;
        py.check_signals()?;
        Ok(results)
    }

    /// Another run on the same constants, at the same time if another thread does it.
    fn fork(&self, py: Python) -> PyResult<PySession> {
        Ok(PySession::new(quick(py, || self.session.fork())?))
    }

    fn state_names(&self, py: Python) -> PyResult<Vec<String>> {
        quick(py, || Ok(self.session.state_names()))
    }

    fn state(&self, py: Python, name: &str) -> PyResult<PyTensor> {
        Ok(PyTensor::new(quick(py, || self.session.state(name))?))
    }

    fn set_state(&self, py: Python, name: &str, array: &Bound<PyAny>) -> PyResult<()> {
        let array = Array::of(name, array)?;
        quick(py, || self.session.set_state(name, &array.tensor()?))
    }

    fn reset_state(&self, py: Python) -> PyResult<()> {
        quick(py, || self.session.reset_state())
    }

    fn save_states(&self, py: Python, path: PathBuf) -> PyResult<()> {
        let session = Arc::clone(&self.session);
        long(py, move || session.save_states(&path))
    }

    fn load_states(&self, py: Python, path: PathBuf) -> PyResult<()> {
        let session = Arc::clone(&self.session);
        long(py, move || session.load_states(&path))
    }

    /// Milliseconds of so many runs on random inputs, after one that is not timed.
    fn bench(&self, py: Python, runs: usize, seed: u64) -> PyResult<Vec<f64>> {
        let session = Arc::clone(&self.session);
        stoppable(py, move |stop| {
            // Nobody waits for what was stopped.
            session.bench(seed)?.take_while(|_| !stop.load(Ordering::Relaxed)).take(runs).collect()
        })
    }
}
