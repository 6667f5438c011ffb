//! Tensors, sessions and trainers of C.

use super::given::{self, List, Places, Text, doors, handle, text};
use super::{plimsoll_model, plimsoll_plan};
use crate::backend::{Lies, Place, apart};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::npy;
use crate::plan::Port;
use crate::session::Session;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::train::data::Rows;
use crate::train::run::{Data, Trainer};
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

// ---- Tensors

/// An array of elements, row-major, in the machine's order of bytes.
pub struct plimsoll_tensor {
    tensor: Tensor,
    port: Named,
}

/// A tensor with the name of an input or an output.
#[repr(C)]
pub struct plimsoll_named {
    /// The name.
    pub name: Text,
    /// The tensor.
    pub tensor: *const plimsoll_tensor,
}

/// The name, the type and the extents of an input, an output, a state or a tensor.
#[repr(C)]
pub struct plimsoll_port {
    /// The name; of a tensor, an empty one.
    pub name: *const c_char,
    /// The type of the elements: f32, f16, bf16, f64, i64, i32, i16, i8, u64, u32, u16, u8, bool, or one of less than 8 bits.
    pub dtype: *const c_char,
    /// The extents of the axes. Of a dim that has a range, the largest.
    pub shape: *const u64,
    /// The number of axes.
    pub rank: usize,
    /// The bytes of all elements.
    pub bytes: u64,
}

/// What a port points to.
struct Named {
    name: CString,
    dtype: CString,
    shape: Vec<u64>,
    bytes: u64,
}

impl Named {
    fn new(name: &str, dtype: DType, shape: &Shape) -> Named {
        let bytes = (shape.numel() * dtype.size()) as u64;
        let shape = shape.iter().map(|&extent| extent as u64).collect();
        Named { name: text(name.to_owned()), dtype: text(dtype.name().to_owned()), shape, bytes }
    }

    fn all<'a>(ports: impl IntoIterator<Item = &'a Port>) -> Vec<Named> {
        ports.into_iter().map(|port| Named::new(&port.name, port.dtype, &port.shape)).collect()
    }

    fn port(&self) -> plimsoll_port {
        plimsoll_port {
            name: self.name.as_ptr(),
            dtype: self.dtype.as_ptr(),
            shape: self.shape.as_ptr(),
            rank: self.shape.len(),
            bytes: self.bytes,
        }
    }
}

/// A port that is none.
const NO_PORT: plimsoll_port =
    plimsoll_port { name: ptr::null(), dtype: ptr::null(), shape: ptr::null(), rank: 0, bytes: 0 };

impl plimsoll_tensor {
    fn new(tensor: Tensor) -> plimsoll_tensor {
        plimsoll_tensor { port: Named::new("", tensor.dtype(), tensor.shape()), tensor }
    }
}

/// The tensors of a list, with their names.
pub(super) fn tensors(list: &[plimsoll_named]) -> Result<Vec<(&str, Tensor)>> {
    fn one(named: &plimsoll_named) -> Result<(&str, Tensor)> {
        let name = named.name.text("the name of a tensor")?;
        let tensor = given::listed(named.tensor)
            .ok_or_else(|| Error::usage(format!("'{name}': expected a tensor, found NULL")))?;
        Ok((name, tensor.tensor.clone()))
    }
    list.iter().map(one).collect()
}

doors! {
    /// Makes a tensor of so many bytes, which are copied: elements of a type, in an order of axes with these extents.
    fn plimsoll_tensor_open(
        dtype: Text,
        shape: List<u64>,
        rank: usize,
        data: *const c_void,
        bytes: usize,
    ) -> tensor: plimsoll_tensor {
        let name = dtype.text("the type")?;
        let dtype = DType::from_name(name).ok_or_else(|| {
            let known: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
            Error::usage(format!("the type: expected one of {}, found '{name}'", known.join(", ")))
        })?;
        let shape = shape.of(rank, "the shape")?;
        let extent = |extent: &u64| {
            usize::try_from(*extent).map_err(|_| Error::usage(format!("the shape: {extent} is larger than any memory")))
        };
        let shape: Shape = shape.iter().map(extent).collect::<Result<Vec<_>>>()?.into();
        let data = given::bytes(data.cast(), bytes, "the data")?;
        Ok(plimsoll_tensor::new(Tensor::new(dtype, shape, data.to_vec())?))
    }

    /// Reads an array of NumPy, .npy. It stays mapped, not read, until its elements are used.
    fn plimsoll_tensor_load(path: Text) -> tensor: plimsoll_tensor {
        let (dtype, shape, bytes) = npy::map(Path::new(path.text("the path")?))?;
        Ok(plimsoll_tensor::new(Tensor::new(dtype, shape, bytes)?))
    }

    /// The type and the extents of a tensor. They belong to it.
    fn plimsoll_tensor_port(tensor: &plimsoll_tensor) -> port: plimsoll_port or NO_PORT {
        Ok(tensor.port.port())
    }

    /// The elements of a tensor, which belong to it. They may lie at any address.
    fn plimsoll_tensor_data(tensor: &plimsoll_tensor) -> *const c_void { tensor.tensor.bytes().as_ptr().cast() }

    /// Closes a tensor.
    fn plimsoll_tensor_close(tensor: Box<plimsoll_tensor>);
}

// ---- Sessions

/// Memory of the host.
pub const PLIMSOLL_HOST: c_int = 0;
/// Memory of the CUDA device that runs. A run waits for what the default stream holds when it begins.
pub const PLIMSOLL_CUDA: c_int = 1;

/// Memory of the caller that holds an input: its elements, row-major, in the type of the port.
#[repr(C)]
pub struct plimsoll_input {
    /// The name of the input. NULL: its number in the list is that of the session.
    pub name: Text,
    /// The first byte.
    pub data: *const c_void,
    /// The number of bytes, that of the port.
    pub bytes: usize,
    /// Where it is: PLIMSOLL_HOST or PLIMSOLL_CUDA.
    pub place: c_int,
}

/// Memory of the caller that takes an output. It overlaps none of the others of the run.
#[repr(C)]
pub struct plimsoll_output {
    /// The name of the output. NULL: its number in the list is that of the session.
    pub name: Text,
    /// The first byte.
    pub data: *mut c_void,
    /// The number of bytes, that of the port.
    pub bytes: usize,
    /// Where it is: PLIMSOLL_HOST or PLIMSOLL_CUDA.
    pub place: c_int,
}

/// The memory that a session has taken from its device, for all runs at once.
#[repr(C)]
pub struct plimsoll_usage {
    /// Bytes of its segments: those that were planned.
    pub bytes: u64,
    /// Bytes of the host's memory that the device reads.
    pub pinned: u64,
    /// The number of allocations so far: runs make none.
    pub allocations: u64,
    /// Bytes that the driver has taken beside; UINT64_MAX where nothing counts them.
    pub overhead: u64,
}

/// The memory of no session.
const NO_USAGE: plimsoll_usage = plimsoll_usage { bytes: 0, pinned: 0, allocations: 0, overhead: u64::MAX };

/// A plan that is loaded, and runs.
pub struct plimsoll_session {
    session: Session,
    device: CString,
    inputs: Vec<Named>,
    outputs: Vec<Named>,
    states: Vec<Named>,
    /// The lists of the last run, whose room the next one takes.
    lists: Mutex<Lists<'static>>,
}

/// The places of a run by their names. Between runs the lists are empty.
#[derive(Default)]
struct Lists<'a> {
    inputs: Vec<(&'a str, Place<'a>)>,
    outputs: Vec<(&'a str, Place<'a>)>,
}

impl Lists<'_> {
    /// Empty lists in the same room.
    fn emptied<'b>(self) -> Lists<'b> {
        // Collecting what was a vector into one of the same elements takes its room.
        fn empty<'b>(mut list: Vec<(&str, Place)>) -> Vec<(&'b str, Place<'b>)> {
            list.clear();
            list.into_iter().map(|_| unreachable!("the list is empty")).collect()
        }
        Lists { inputs: empty(self.inputs), outputs: empty(self.outputs) }
    }
}

/// The name of an array of a run: its own, or that of the port with its number.
fn name_of<'a>(name: &'a Text, number: usize, ports: &'a [Port], what: &str) -> Result<&'a str> {
    match name.optional("the name of an array")? {
        Some(name) => Ok(name),
        None => ports.get(number).map(|port| &port.name[..]).ok_or_else(|| {
            Error::usage(format!("{what} {number} has no name: expected at most {} {what}s", ports.len()))
        }),
    }
}

/// Refuses a place that is none.
fn no_place(what: &str, name: &str, place: c_int) -> Error {
    Error::usage(format!("{what} '{name}': expected PLIMSOLL_HOST or PLIMSOLL_CUDA, found the place {place}"))
}

fn lies(name: &str, place: c_int, address: usize, bytes: usize) -> Lies<'_> {
    Lies { name, on_device: place == PLIMSOLL_CUDA, address: address as u64, bytes: bytes as u64 }
}

impl plimsoll_session {
    fn new(session: Session) -> plimsoll_session {
        let mut states: Vec<&Port> = Vec::new();
        for state in session.plan().programs.iter().flat_map(|program| &program.state) {
            if !states.iter().any(|known| known.name == state.port.name) {
                states.push(&state.port);
            }
        }
        plimsoll_session {
            device: text(session.device().to_owned()),
            inputs: Named::all(session.inputs()),
            outputs: Named::all(session.outputs()),
            states: Named::all(states),
            lists: Mutex::new(Lists {
                inputs: Vec::with_capacity(session.inputs().len()),
                outputs: Vec::with_capacity(session.outputs().len()),
            }),
            session,
        }
    }

    fn run(&self, inputs: &[plimsoll_input], outputs: &[plimsoll_output]) -> Result<()> {
        let mut kept = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lists = std::mem::take(&mut *kept).emptied();
        let result = self.run_in(inputs, outputs, &mut lists);
        *kept = lists.emptied();
        result
    }

    fn run_in<'a>(
        &'a self,
        inputs: &'a [plimsoll_input],
        outputs: &'a [plimsoll_output],
        lists: &mut Lists<'a>,
    ) -> Result<()> {
        for (number, input) in inputs.iter().enumerate() {
            let name = name_of(&input.name, number, self.session.inputs(), "input")?;
            let place = match input.place {
                PLIMSOLL_HOST => Place::bytes(given::bytes(input.data.cast(), input.bytes, name)?),
                PLIMSOLL_CUDA => given::cuda(input.data, input.bytes),
                other => return Err(no_place("input", name, other)),
            };
            lists.inputs.push((name, place));
        }
        for (number, output) in outputs.iter().enumerate() {
            let name = name_of(&output.name, number, self.session.outputs(), "output")?;
            // It is not written before all are known to be apart.
            lists.outputs.push((name, Place::bytes(&[])));
            if ![PLIMSOLL_HOST, PLIMSOLL_CUDA].contains(&output.place) {
                return Err(no_place("output", name, output.place));
            }
        }
        let of_inputs = inputs.iter().zip(&lists.inputs);
        let of_outputs = outputs.iter().zip(&lists.outputs);
        apart(
            of_inputs.map(|(own, (name, _))| lies(name, own.place, own.data.addr(), own.bytes)),
            of_outputs.map(|(own, (name, _))| lies(name, own.place, own.data.addr(), own.bytes)),
        )?;
        for (output, (name, place)) in outputs.iter().zip(&mut lists.outputs) {
            *place = match output.place {
                PLIMSOLL_HOST => Place::bytes_mut(given::bytes_mut(output.data.cast(), output.bytes, name)?),
                _ => given::cuda(output.data, output.bytes),
            };
        }
        self.session.run_in_place(&lists.inputs, &mut lists.outputs)
    }
}

/// A port of a list, by its number.
fn port(ports: &[Named], number: usize, what: &str) -> Result<plimsoll_port> {
    let none = || Error::usage(format!("{what} {number}: expected a number below {}", ports.len()));
    Ok(ports.get(number).ok_or_else(none)?.port())
}

doors! {
    /// Plans a model for the device of its options, and loads it there.
    fn plimsoll_session_open(model: &plimsoll_model) -> session: plimsoll_session {
        Ok(plimsoll_session::new(model.model.session()?))
    }

    /// As plimsoll_session_open, on the CPU, in memory of the caller, who frees it after the session is closed and uses it for nothing else
    /// before. It may begin anywhere, and hold anything. plimsoll_plan_lent_bytes of plimsoll_model_plan with a NULL target is what it needs:
    /// PLIMSOLL_FIT if it has less.
    fn plimsoll_session_open_in(
        model: &plimsoll_model,
        memory: *mut c_void,
        bytes: usize,
    ) -> session: plimsoll_session {
        // The session has the memory until it is closed: that is the header's word.
        let memory = given::bytes_mut(memory.cast(), bytes, "the memory")?;
        Ok(plimsoll_session::new(model.model.session_in(memory)?))
    }

    /// Loads a plan from its file, with the weights of the model's file that it was made of: what was planned is what runs.
    fn plimsoll_session_open_plan(plan: Text, model: Text, options: Text) -> session: plimsoll_session {
        let options = super::options(&options)?;
        let (plan, model) = (plan.text("the plan's path")?, model.text("the model's path")?);
        Ok(plimsoll_session::new(Session::from_plan(plan, &[model], &options)?))
    }

    /// A session that runs at the same time as this one, on the same constants, with states of its own. The option forks says how many there may
    /// be. The memory of a fork is there until it and all others are closed.
    fn plimsoll_session_fork(session: &plimsoll_session) -> fork: plimsoll_session {
        Ok(plimsoll_session::new(session.session.fork()?))
    }

    /// Closes a session.
    fn plimsoll_session_close(session: Box<plimsoll_session>);

    /// The device in one line, and why it was chosen.
    fn plimsoll_session_device(session: &plimsoll_session) -> *const c_char { session.device.as_ptr() }

    /// The plan that it runs.
    fn plimsoll_session_plan(session: &plimsoll_session) -> plan: plimsoll_plan {
        Ok(plimsoll_plan::new(session.session.plan().clone()))
    }

    /// The memory that it has taken.
    fn plimsoll_session_usage(session: &plimsoll_session) -> usage: plimsoll_usage or NO_USAGE {
        let usage = session.session.usage();
        let overhead = usage.overhead.unwrap_or(u64::MAX);
        Ok(plimsoll_usage { bytes: usage.bytes, pinned: usage.pinned, allocations: usage.allocations, overhead })
    }

    /// The number of its inputs; 0 of NULL.
    fn plimsoll_session_inputs(session: &plimsoll_session) -> usize { session.inputs.len() }

    /// The number of its outputs; 0 of NULL.
    fn plimsoll_session_outputs(session: &plimsoll_session) -> usize { session.outputs.len() }

    /// The number of its states; 0 of NULL.
    fn plimsoll_session_states(session: &plimsoll_session) -> usize { session.states.len() }

    /// An input by its number, from 0 on. What it points to belongs to the session.
    fn plimsoll_session_input(session: &plimsoll_session, number: usize) -> port: plimsoll_port or NO_PORT {
        self::port(&session.inputs, number, "input")
    }

    /// An output by its number, from 0 on. What it points to belongs to the session.
    fn plimsoll_session_output(session: &plimsoll_session, number: usize) -> port: plimsoll_port or NO_PORT {
        self::port(&session.outputs, number, "output")
    }

    /// A state by its number, from 0 on. What it points to belongs to the session.
    fn plimsoll_session_state(session: &plimsoll_session, number: usize) -> port: plimsoll_port or NO_PORT {
        self::port(&session.states, number, "state")
    }

    /// Runs once, from memory of the caller and to it: an array for each input and for each output. It returns when the outputs are there. On the
    /// CPU it allocates nothing but for elements that the device stores in another type. PLIMSOLL_USAGE when an array is missing, unknown, given
    /// twice, of another length than its port, or overlaps another, or when a dim has a range: then nothing runs.
    fn plimsoll_session_run(
        session: &plimsoll_session,
        inputs: List<plimsoll_input>,
        input_count: usize,
        outputs: List<plimsoll_output>,
        output_count: usize,
    ) {
        let (inputs, outputs) = (inputs.of(input_count, "the inputs")?, outputs.of(output_count, "the outputs")?);
        session.run(inputs, outputs)
    }

    /// Runs once on tensors, whose shapes select the extents of dims that have a range. `outputs` has a place for each output, in the session's
    /// order; each gets a tensor for plimsoll_tensor_close, with as many elements as were found.
    fn plimsoll_session_run_tensors(
        session: &plimsoll_session,
        inputs: List<plimsoll_named>,
        input_count: usize,
        outputs: Places<*mut plimsoll_tensor>,
        output_count: usize,
    ) {
        let expected = session.outputs.len();
        ensure(output_count == expected, || {
            Error::usage(format!("expected places for {expected} outputs, found {output_count}"))
        })?;
        let outputs = outputs.of(expected, "the outputs")?;
        outputs.fill(MaybeUninit::new(ptr::null_mut()));
        let found = session.session.run(&tensors(inputs.of(input_count, "the inputs")?)?)?;
        for (output, (_, tensor)) in outputs.iter_mut().zip(found) {
            output.write(Box::into_raw(Box::new(plimsoll_tensor::new(tensor))));
        }
        Ok(())
    }

    /// Times so many runs on random inputs, after one that is not timed. `milliseconds` has a place for each.
    fn plimsoll_session_bench(session: &plimsoll_session, runs: usize, milliseconds: Places<f64>) {
        let milliseconds = milliseconds.of(runs, "the times")?;
        for (place, time) in milliseconds.iter_mut().zip(session.session.bench(0)?) {
            place.write(time?);
        }
        Ok(())
    }

    /// The elements of a state, after the last run.
    fn plimsoll_session_get_state(session: &plimsoll_session, name: Text) -> tensor: plimsoll_tensor {
        Ok(plimsoll_tensor::new(session.session.state(name.text("the state's name")?)?))
    }

    /// Gives a state elements, for the next run. If they do not suit it, it is as before.
    fn plimsoll_session_set_state(session: &plimsoll_session, name: Text, tensor: Option<&plimsoll_tensor>) {
        let tensor = &handle(tensor, "a tensor")?.tensor;
        session.session.set_state(name.text("the state's name")?, tensor)
    }

    /// Gives all states the elements that they began with.
    fn plimsoll_session_reset_states(session: &plimsoll_session) {
        session.session.reset_state()
    }

    /// Writes all states to a safetensors file. A reader sees the old one or the complete new one.
    fn plimsoll_session_save_states(session: &plimsoll_session, path: Text) {
        session.session.save_states(path.text("the path")?)
    }

    /// Gives all states the elements that a safetensors file has. If they do not suit, all are as before.
    fn plimsoll_session_load_states(session: &plimsoll_session, path: Text) {
        session.session.load_states(path.text("the path")?)
    }
}

// ---- Training

/// A model in training.
pub struct plimsoll_trainer {
    trainer: Mutex<Trainer>,
    data: Data,
    shuffle: Option<u64>,
}

impl plimsoll_trainer {
    fn trainer(&self) -> MutexGuard<'_, Trainer> {
        self.trainer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The figures of a step.
#[repr(C)]
pub struct plimsoll_step {
    /// The mean loss over the batch, before the update.
    pub loss: f32,
    /// The learning rate.
    pub rate: f32,
    /// The norm of all gradients together.
    pub norm: f32,
}

/// The figures of no step.
const NO_STEP: plimsoll_step = plimsoll_step { loss: f32::NAN, rate: f32::NAN, norm: f32::NAN };

/// The figures of an evaluation.
#[repr(C)]
pub struct plimsoll_score {
    /// The mean loss.
    pub loss: f64,
    /// The share of right answers, of classes; below 0 where there are no classes.
    pub accuracy: f64,
}

/// The figures of no evaluation.
const NO_SCORE: plimsoll_score = plimsoll_score { loss: f64::NAN, accuracy: -1.0 };

/// The rows of inputs, and their labels.
fn data(inputs: &[plimsoll_named], labels: Option<&plimsoll_tensor>) -> Result<Data> {
    let rows = |(name, tensor): (&str, Tensor)| Ok((name.to_owned(), Rows::of(&tensor)?));
    let inputs = tensors(inputs)?.into_iter().map(rows).collect::<Result<_>>()?;
    Ok(Data { inputs, labels: Rows::of(&handle(labels, "labels")?.tensor)? })
}

doors! {
    /// Plans the training of a model, and loads it on the device of its options. The first axis of each input and of the labels is that of the
    /// rows, of which an update takes `batch`. The method is JSON, with the names of the command's flags:
    /// {"loss": "cross_entropy", "optimizer": "adam", "lr": 0.001, "clip_norm": 1}. The learning rate follows its schedule over so many steps. Rows
    /// are taken in an order by the seed `shuffle`, or in their own where that is NULL. The tensors may be closed when it returns.
    fn plimsoll_trainer_open(
        model: &plimsoll_model,
        inputs: List<plimsoll_named>,
        count: usize,
        labels: Option<&plimsoll_tensor>,
        batch: usize,
        method: Text,
        steps: u64,
        shuffle: Option<&u64>,
    ) -> trainer: plimsoll_trainer {
        let data = data(inputs.of(count, "the inputs")?, labels)?;
        let trainer = Mutex::new(model.model.trainer(&data, batch, super::method(&method, steps)?)?);
        Ok(plimsoll_trainer { trainer, data, shuffle: shuffle.copied() })
    }

    /// Closes a trainer.
    fn plimsoll_trainer_close(trainer: Box<plimsoll_trainer>);

    /// The plan of a training.
    fn plimsoll_trainer_plan(trainer: &plimsoll_trainer) -> plan: plimsoll_plan {
        Ok(plimsoll_plan::new(trainer.trainer().session().plan().clone()))
    }

    /// The number of steps in which all rows are taken once; 0 of NULL.
    fn plimsoll_trainer_steps_per_epoch(trainer: &plimsoll_trainer) -> u64 {
        trainer.trainer().steps_per_epoch(&trainer.data)
    }

    /// Runs the step with this number, from 0 on. If its loss is not finite, no weight changes.
    fn plimsoll_trainer_step(trainer: &plimsoll_trainer, number: u64) -> step: plimsoll_step or NO_STEP {
        let shown = trainer.trainer().step(&trainer.data, number, trainer.shuffle)?;
        Ok(plimsoll_step { loss: shown.loss, rate: shown.rate, norm: shown.norm })
    }

    /// The loss and the accuracy over all rows of other data; of the training's own, if `labels` is NULL and there are no inputs.
    fn plimsoll_trainer_evaluate(
        trainer: &plimsoll_trainer,
        inputs: List<plimsoll_named>,
        count: usize,
        labels: Option<&plimsoll_tensor>,
    ) -> score: plimsoll_score or NO_SCORE {
        let is_own = count == 0 && labels.is_none();
        let other = if is_own { None } else { Some(data(inputs.of(count, "the inputs")?, labels)?) };
        let data = other.as_ref().unwrap_or(&trainer.data);
        let mut trainer = trainer.trainer();
        trainer.admits(data)?;
        let score = trainer.evaluate(data)?;
        Ok(plimsoll_score { loss: score.loss, accuracy: score.accuracy.unwrap_or(-1.0) })
    }

    /// Writes the trained model as an .onnx file.
    fn plimsoll_trainer_save(trainer: &plimsoll_trainer, path: Text) {
        let path = Path::new(path.text("the path")?);
        trainer.trainer().save(path)
    }
}
