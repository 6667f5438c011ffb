//! States in files: all states of the plans that are loaded, by name.

use super::spread::all;
use super::{Exec, Lasting, lasting, port_place};
use crate::backend::{Backend, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::figures::listed;
use crate::hash::Fast;
use crate::plan::Port;
use crate::safetensors::{self, SafeTensors};
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::ops::Range;
use std::path::Path;

/// The most bytes that are on the way between a state and a file.
const CHUNK: usize = 1 << 20;
/// The key of the graph's name in a file.
const GRAPH: &str = "graph";

impl Exec {
    /// Writes all states to a safetensors file, by name and in their own types, with further entries that describe the file. A reader never
    /// sees a part of the file.
    ///
    /// # Errors
    /// When no plan has a state, the file cannot be written, or the device fails.
    pub fn save_states(&mut self, path: &Path, further: &[(&str, String)]) -> Result<()> {
        let title = self.titles();
        let Exec { backend, states, elsewhere, is_first, .. } = self;
        let states = all(states, elsewhere);
        if states.is_empty() {
            return Err(Error::usage(format!("'{title}' has no states to save")));
        }
        let mut metadata = BTreeMap::from([(GRAPH, title), ("producer", "plimsoll".to_owned())]);
        metadata.extend(further.iter().cloned());
        let shapes: Vec<Shape> = states.iter().map(|state| state.whole()).collect();
        let ports = states.iter().map(|state| &state.port).zip(&shapes);
        let tensors: Vec<_> = ports.map(|(Port { name, dtype, .. }, shape)| (&name[..], *dtype, shape)).collect();
        tensors.iter().try_for_each(|(name, dtype, shape)| safetensors::check(name, *dtype, shape))?;
        if !*is_first {
            // It gives its parts to the rank that writes them, when that asks for them.
            let mut order = safetensors::order(&tensors).into_iter();
            return order.try_for_each(|number| states[number].each_piece(&mut **backend, &mut |_| Ok(())));
        }
        safetensors::write(path, "write the states", &metadata, &tensors, |number, put| {
            states[number].each_piece(&mut **backend, &mut |piece| put(&piece.in_file()))
        })
    }

    /// Gives all states the elements that a file has under their names. Inputs that were written stay as they are.
    ///
    /// # Errors
    /// When the file does not have exactly the states of the plans, each of its type and shape, or an element is more than its state may
    /// hold: all states are then as before. When the device fails.
    pub fn load_states(&mut self, path: &Path) -> Result<()> {
        let title = self.titles();
        let Exec { backend, states, elsewhere, .. } = self;
        let file = SafeTensors::open(path)?;
        let mut states = all(states, elsewhere);
        let found = of_file(&file, &states, &title).map_err(|e| e.in_file(path))?;
        for (state, tensor) in states.iter_mut().zip(&found) {
            state.give(&mut **backend, tensor)?;
        }
        Ok(())
    }

    /// Calls `take` with a state's elements, some at a time, in order, as tensors of one axis.
    ///
    /// # Errors
    /// When no plan has such a state, or the device fails.
    pub fn each_of_state(&mut self, name: &str, take: &mut dyn FnMut(&Tensor)) -> Result<()> {
        let state = lasting(&mut self.states, &mut self.elsewhere, name)?;
        let Lasting { port, at, stored, .. } = &*state;
        match state.is_elsewhere() {
            true => Ok(()),
            false => each_piece(&mut *self.backend, port, *at, *stored, take),
        }
    }

    /// Waits for the device, and calls `take` with the number of each output and its elements, as tensors of one axis: all at once where
    /// outputs have few bytes, and otherwise some at a time, in order.
    ///
    /// # Errors
    /// When the device fails.
    pub fn each_of_outputs(&mut self, take: &mut dyn FnMut(usize, &Tensor)) -> Result<()> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        let bytes = |port: &Port| port.shape.numel().saturating_mul(port.dtype.size());
        if plan.outputs.iter().map(bytes).fold(0, usize::saturating_add) <= CHUNK {
            self.read()?.iter().enumerate().for_each(|(number, tensor)| take(number, tensor));
            return Ok(());
        }
        for (number, port) in plan.outputs.iter().enumerate() {
            let (stored, at) = port_place(plan, segments, port);
            each_piece(&mut **backend, port, at, stored, &mut |piece| take(number, piece))?;
        }
        Ok(())
    }

    /// A number that tells all states apart from others, and from these with other bits. It does not depend on their order.
    ///
    /// # Errors
    /// When the device fails.
    pub fn checksum(&mut self) -> Result<u64> {
        let Exec { backend, states, elsewhere, .. } = self;
        let mut sum = 0u64;
        for state in all(states, elsewhere) {
            let mut hash = Fast::default();
            hash.write(state.port.name.as_bytes());
            state.each_piece(&mut **backend, &mut |piece| {
                hash.write(piece.bytes());
                Ok(())
            })?;
            sum = sum.wrapping_add(hash.finish());
        }
        Ok(sum)
    }

    /// The names of all states, those that ranks of other stages have among them.
    pub(crate) fn state_names(&mut self) -> Vec<String> {
        all(&mut self.states, &mut self.elsewhere).iter().map(|state| state.port.name.clone()).collect()
    }

    /// The names of the graph or of the programs.
    fn titles(&self) -> String {
        let mut titles: Vec<&str> = Vec::new();
        for loaded in &self.loaded {
            if !titles.contains(&&loaded.program().name[..]) {
                titles.push(&loaded.program().name[..]);
            }
        }
        titles.join(", ")
    }
}

/// The tensors of a file that become states, in the order of these, if all of them can.
fn of_file(file: &SafeTensors, states: &[&mut Lasting], title: &str) -> Result<Vec<Tensor>> {
    let origin = file.metadata(GRAPH).map_or(String::new(), |graph| format!(", which has states of '{graph}'"));
    let fail = |what: String| Err(Error::usage(format!("expected the states of '{title}'{origin}: {what}")));
    let own = || listed(states.iter().map(|state| state.port.name.as_str()));
    if let Some(surplus) = file.names().find(|name| states.iter().all(|state| state.port.name != *name)) {
        return fail(format!("found '{surplus}', which is none of its states: {}", own()));
    }
    let mut found = Vec::with_capacity(states.len());
    for state in states {
        let (Port { name, dtype, .. }, shape) = (&state.port, state.whole());
        match file.describe(name) {
            None => return fail(format!("state '{name}' is not in the file; it has: {}", listed(file.names()))),
            Some(other) if other != format!("{dtype}{shape}") => {
                return fail(format!("state '{name}': expected {dtype}{shape}, found {other}"));
            }
            Some(_) => {}
        }
        let tensor = file.tensor(name)?;
        let tensor = match &state.spread {
            Some(spread) => spread.own(&tensor),
            None => tensor,
        };
        state.admits(&tensor)?;
        found.push(tensor);
    }
    Ok(found)
}

/// Ranges of elements that a tensor is moved in.
fn pieces(shape: &Shape, stored: DType) -> impl Iterator<Item = Range<usize>> + use<> {
    let (count, most) = (shape.numel(), CHUNK / stored.size());
    (0..count).step_by(most).map(move |start| start..count.min(start + most))
}

impl Lasting {
    /// Refuses a tensor that the state cannot hold, whose type and shape are right.
    pub(super) fn admits(&self, tensor: &Tensor) -> Result<()> {
        self.counted(tensor)?;
        if self.stored == tensor.dtype() {
            return Ok(());
        }
        self.each(tensor, |_, piece| piece.store(self.stored, &self.port.name).map(drop))
    }

    /// Gives the state the elements of a tensor that it [admits](Self::admits).
    pub(super) fn give(&mut self, backend: &mut dyn Backend, tensor: &Tensor) -> Result<()> {
        if self.is_elsewhere() {
            return Ok(());
        }
        self.each(tensor, |elements, piece| {
            backend.write(self.bytes_of(elements), &piece.store(self.stored, &self.port.name)?)
        })?;
        self.ends = self.counted(tensor)?;
        Ok(())
    }

    /// Calls `take` with the elements of the whole, some at a time, in order.
    fn each_piece(&self, backend: &mut dyn Backend, take: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()> {
        let Some(spread) = &self.spread else {
            let mut each = pieces(&self.port.shape, self.stored);
            return each.try_for_each(|elements| take(&self.read(backend, elements)?));
        };
        let mut part = None;
        if !self.is_elsewhere() {
            let mut bytes = vec![0; self.stored.packed_bytes(self.port.shape.numel())];
            backend.read(self.at, &mut bytes)?;
            part = Some(Tensor::load(self.stored, bytes, self.port.dtype, self.port.shape.clone())?);
        }
        let whole = spread.gathered(self.port.dtype, &self.port.shape, part.as_ref())?;
        let all = Access::contiguous(whole.shape().clone());
        pieces(whole.shape(), self.stored).try_for_each(|elements| take(&whole.gather_range(&all, elements)))
    }

    /// Elements of the state, in its own type, as a tensor of one axis.
    fn read(&self, backend: &mut dyn Backend, elements: Range<usize>) -> Result<Tensor> {
        read_piece(backend, &self.port, self.at, self.stored, elements)
    }

    fn each(&self, tensor: &Tensor, mut f: impl FnMut(Range<usize>, &Tensor) -> Result<()>) -> Result<()> {
        let all = Access::contiguous(tensor.shape().clone());
        pieces(tensor.shape(), self.stored)
            .try_for_each(|elements| f(elements.clone(), &tensor.gather_range(&all, elements)))
    }

    /// The place of elements on the device.
    fn bytes_of(&self, elements: Range<usize>) -> Slice {
        bytes_of(self.at, self.stored, elements)
    }
}

/// The place of elements of what lies at `at`.
fn bytes_of(at: Slice, stored: DType, elements: Range<usize>) -> Slice {
    let bytes = |count: usize| stored.packed_bytes(count) as u64;
    Slice { offset: at.offset + bytes(elements.start), bytes: bytes(elements.len()), ..at }
}

/// Elements of what lies at `at`, in the type of its port, as a tensor of one axis.
fn read_piece(
    backend: &mut dyn Backend,
    port: &Port,
    at: Slice,
    stored: DType,
    elements: Range<usize>,
) -> Result<Tensor> {
    let shape = Shape::new([elements.len()]);
    let mut bytes = vec![0; stored.packed_bytes(elements.len())];
    backend.read(bytes_of(at, stored, elements), &mut bytes)?;
    Tensor::load(stored, bytes, port.dtype, shape)
}

/// Calls `take` with all elements of what lies at `at`, some at a time, in order.
fn each_piece(
    backend: &mut dyn Backend,
    port: &Port,
    at: Slice,
    stored: DType,
    take: &mut dyn FnMut(&Tensor),
) -> Result<()> {
    pieces(&port.shape, stored).try_for_each(|elements| {
        take(&read_piece(backend, port, at, stored, elements)?);
        Ok(())
    })
}
