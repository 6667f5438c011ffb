//! Trainings of Python.

use super::array::{self, Array};
use super::{caught, given, long, raised};
use crate::error::Result;
use crate::train::data::Rows;
use crate::train::run::{Data, Trainer};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Rows of an array, which is copied, or of a file or a folder, which stays mapped.
fn rows(name: &str, source: &Bound<PyAny>) -> PyResult<Rows> {
    let read = || -> PyResult<Result<Rows>> {
        if let Ok(path) = source.extract::<PathBuf>() {
            return Ok(Rows::open(&path));
        }
        let array = Array::of(name, source)?;
        Ok(array.tensor().and_then(|tensor| Rows::of(&tensor)))
    };
    read()?.map_err(|error| raised(source.py(), &error))
}

/// The data of a training: arrays or files by the inputs' names, and labels.
pub(super) fn data(inputs: &Bound<PyAny>, labels: &Bound<PyAny>) -> PyResult<Data> {
    let mut named = Vec::new();
    for item in inputs.cast::<PyDict>()?.items() {
        let (name, source): (String, Bound<PyAny>) = item.extract()?;
        let rows = rows(&name, &source)?;
        named.push((name, rows));
    }
    Ok(Data { inputs: named, labels: rows("labels", labels)? })
}

/// A model in training.
#[pyclass(name = "Trainer", module = "plimsoll._plimsoll", frozen)]
pub(super) struct PyTrainer {
    trainer: Arc<Mutex<Trainer>>,
    data: Arc<Data>,
    /// The steps of the training.
    #[pyo3(get)]
    steps: u64,
}

impl PyTrainer {
    pub(super) fn new(trainer: Trainer, data: Data, steps: u64) -> PyTrainer {
        PyTrainer { trainer: Arc::new(Mutex::new(trainer)), data: Arc::new(data), steps }
    }

    fn with<T: Send>(&self, py: Python, work: impl FnOnce(&mut Trainer, &Data) -> Result<T> + Send) -> PyResult<T> {
        let result =
            py.detach(|| caught(|| work(&mut self.trainer.lock().unwrap_or_else(PoisonError::into_inner), &self.data)));
        given(py, result)
    }
}

#[pymethods]
impl PyTrainer {
    /// The bytes that were planned, and those that the device has given.
    #[getter]
    fn bytes(&self, py: Python) -> PyResult<(u64, u64)> {
        self.with(py, |trainer, _| Ok((trainer.session().plan().bytes(), trainer.session().usage().bytes)))
    }

    #[getter]
    fn device(&self, py: Python) -> PyResult<String> {
        self.with(py, |trainer, _| Ok(trainer.session().device().to_owned()))
    }

    #[getter]
    fn trained(&self, py: Python) -> PyResult<Vec<String>> {
        self.with(py, |trainer, _| Ok(trainer.trained().to_vec()))
    }

    /// A step: the mean loss before the update, the learning rate, and the norm of the gradients.
    fn step(&self, py: Python, number: u64, seed: Option<u64>) -> PyResult<(f32, f32, f32)> {
        let shown = self.with(py, |trainer, data| trainer.step(data, number, seed))?;
        py.check_signals()?;
        Ok((shown.loss, shown.rate, shown.norm))
    }

    /// The mean loss over data, and the share of right answers.
    fn evaluate(&self, py: Python, inputs: &Bound<PyAny>, labels: &Bound<PyAny>) -> PyResult<(f64, Option<f64>)> {
        let own = data(inputs, labels)?;
        let score = self.with(py, |trainer, _| {
            trainer.admits(&own)?;
            trainer.evaluate(&own)
        })?;
        Ok((score.loss, score.accuracy))
    }

    /// Writes the trained model as an .onnx file.
    fn save(&self, py: Python, path: PathBuf) -> PyResult<()> {
        let trainer = Arc::clone(&self.trainer);
        long(py, move || trainer.lock().unwrap_or_else(PoisonError::into_inner).save(&path))
    }

    fn weight(&self, py: Python, name: &str) -> PyResult<array::PyTensor> {
        Ok(array::PyTensor::new(self.with(py, |trainer, _| trainer.session().state(name))?))
    }
}
