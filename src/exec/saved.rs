//! States in files: all states of the plans that are loaded, by name.

use super::{Exec, Lasting};
use crate::backend::{Backend, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
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
/// The most names in a message.
const MAX_NAMES: usize = 8;
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
        let Exec { backend, states, .. } = self;
        if states.is_empty() {
            return Err(Error::usage(format!("'{title}' has no states to save")));
        }
        let mut metadata = BTreeMap::from([(GRAPH, title), ("producer", env!("CARGO_PKG_NAME").to_owned())]);
        metadata.extend(further.iter().cloned());
        let ports = states.iter().map(|state| &state.port);
        let tensors: Vec<_> = ports.map(|Port { name, dtype, shape, .. }| (&name[..], *dtype, shape)).collect();
        safetensors::write(path, "write the states", &metadata, &tensors, |number, put| {
            let state = &states[number];
            pieces(&state.port.shape, state.stored).try_for_each(|elements| {
                let piece = state.read(&mut **backend, elements)?;
                put(piece.bytes())
            })
        })
    }

    /// Gives all states the elements that a file has under their names. Inputs that were written stay as they are.
    ///
    /// # Errors
    /// When the file does not have exactly the states of the plans, each of its type and shape, or an element is more than its state may
    /// hold: all states are then as before. When the device fails.
    pub fn load_states(&mut self, path: &Path) -> Result<()> {
        let title = self.titles();
        let Exec { backend, states, .. } = self;
        let file = SafeTensors::open(path)?;
        let found = of_file(&file, states, &title).map_err(|e| e.in_file(path))?;
        for (state, tensor) in states.iter_mut().zip(&found) {
            state.give(&mut **backend, tensor)?;
        }
        Ok(())
    }

    /// A number that tells all states apart from others, and from these with other bits. It does not depend on their order.
    ///
    /// # Errors
    /// When the device fails.
    pub fn checksum(&mut self) -> Result<u64> {
        let Exec { backend, states, .. } = self;
        let mut sum = 0u64;
        for state in states {
            let mut hash = Fast::default();
            hash.write(state.port.name.as_bytes());
            for elements in pieces(&state.port.shape, state.stored) {
                hash.write(state.read(&mut **backend, elements)?.bytes());
            }
            sum = sum.wrapping_add(hash.finish());
        }
        Ok(sum)
    }

    /// The names of the graph or of the programs.
    fn titles(&self) -> String {
        let mut titles: Vec<&str> = Vec::new();
        for loaded in &self.loaded {
            if !titles.contains(&loaded.plan.title()) {
                titles.push(loaded.plan.title());
            }
        }
        titles.join(", ")
    }
}

/// The tensors of a file that become states, in the order of these, if all of them can.
fn of_file(file: &SafeTensors, states: &[Lasting], title: &str) -> Result<Vec<Tensor>> {
    let origin = file.metadata(GRAPH).map_or(String::new(), |graph| format!(", which has states of '{graph}'"));
    let fail = |what: String| Err(Error::usage(format!("expected the states of '{title}'{origin}: {what}")));
    let own = || listed(states.iter().map(|state| state.port.name.as_str()));
    if let Some(surplus) = file.names().find(|name| states.iter().all(|state| state.port.name != *name)) {
        return fail(format!("found '{surplus}', which is none of its states: {}", own()));
    }
    let mut found = Vec::with_capacity(states.len());
    for state in states {
        let Port { name, dtype, shape, .. } = &state.port;
        match file.describe(name) {
            None => return fail(format!("state '{name}' is not in the file; it has: {}", listed(file.names()))),
            Some(other) if other != format!("{dtype}{shape}") => {
                return fail(format!("state '{name}': expected {dtype}{shape}, found {other}"));
            }
            Some(_) => {}
        }
        let tensor = file.tensor(name)?;
        state.admits(&tensor)?;
        found.push(tensor);
    }
    Ok(found)
}

/// The first names, and how many more there are.
fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(MAX_NAMES);
    let text = names.take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{text} and {more} more") } else { text }
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
        self.each(tensor, |elements, piece| {
            backend.write(self.bytes_of(elements), &piece.store(self.stored, &self.port.name)?)
        })?;
        self.count = self.counted(tensor)?;
        Ok(())
    }

    /// Elements of the state, in its own type, as a tensor of one axis.
    fn read(&self, backend: &mut dyn Backend, elements: Range<usize>) -> Result<Tensor> {
        let shape = Shape::new([elements.len()]);
        let mut bytes = vec![0; elements.len() * self.stored.size()];
        backend.read(self.bytes_of(elements), &mut bytes)?;
        Tensor::load(self.stored, bytes, self.port.dtype, shape)
    }

    fn each(&self, tensor: &Tensor, mut f: impl FnMut(Range<usize>, &Tensor) -> Result<()>) -> Result<()> {
        let all = Access::contiguous(tensor.shape().clone());
        pieces(tensor.shape(), self.stored)
            .try_for_each(|elements| f(elements.clone(), &tensor.gather_range(&all, elements)))
    }

    /// The place of elements on the device.
    fn bytes_of(&self, elements: Range<usize>) -> Slice {
        let size = self.stored.size() as u64;
        let (offset, bytes) = (self.at.offset + elements.start as u64 * size, elements.len() as u64 * size);
        Slice { offset, bytes, ..self.at }
    }
}
