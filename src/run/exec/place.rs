//! Runs whose inputs come from, and whose outputs go to, memory of the caller.

use super::{Exec, count, fits, indexes_fit, port_place, read_ports};
use crate::backend::{Kind, Outside, Place, Slice, host_memory};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::Port;
use crate::tensor::Tensor;

/// Per port, the number of its place in a list of places.
fn find(ports: &[Port], places: &[(&str, Place)], what: &str, order: &mut Vec<usize>) -> Result<()> {
    order.clear();
    for (at, (name, _)) in places.iter().enumerate() {
        if !ports.iter().any(|port| port.name == *name) {
            let known: Vec<_> = ports.iter().map(|port| &port.name[..]).collect();
            let known = known.join(", ");
            return Err(Error::usage(format!("{what} '{name}': not an {what} of the graph; its {what}s: {known}")));
        }
        if places[..at].iter().any(|(other, _)| other == name) {
            return Err(Error::usage(format!("{what} '{name}' is given twice")));
        }
    }
    let place = |port: &Port| {
        let found = places.iter().position(|(name, _)| *name == port.name);
        found.ok_or_else(|| Error::usage(format!("{what} '{}' has no place", port.name)))
    };
    ports.iter().try_for_each(|port| {
        order.push(place(port)?);
        Ok(())
    })
}

impl Exec {
    /// Runs once, with inputs and outputs in memory of the caller: a place for each. Nothing is allocated for elements that the device
    /// stores in their own type.
    ///
    /// # Errors
    /// When a place is missing, unknown, given twice, not of the port's length, or not where the device can reach it; when two places
    /// overlap; when indices come from a device, where nobody can check them. Then nothing runs.
    pub fn run_in_place(&mut self, inputs: &[(&str, Place)], outputs: &mut [(&str, Place)]) -> Result<()> {
        // The lists of the last run have room for this one's.
        let mut order = std::mem::take(&mut self.order);
        let result = self.run_in_order(inputs, outputs, &mut order);
        self.order = order;
        result
    }

    fn run_in_order(
        &mut self,
        inputs: &[(&str, Place)],
        outputs: &mut [(&str, Place)],
        order: &mut [Vec<usize>; 2],
    ) -> Result<()> {
        find(&self.plan().inputs, inputs, "input", &mut order[0])?;
        find(&self.plan().outputs, outputs, "output", &mut order[1])?;
        self.check_places(inputs, outputs, order)?;
        self.check_states()?;
        self.take_in(inputs, &order[0])?;
        self.replay()?;
        self.give_out(outputs, &order[1])
    }

    /// Copies inputs from memory of the caller, which is free again then, for the next [replay](Self::replay).
    ///
    /// # Errors
    /// As [`run_in_place`](Self::run_in_place).
    pub fn write_in_place(&mut self, inputs: &[(&str, Place)]) -> Result<()> {
        let mut order = [Vec::new(), Vec::new()];
        find(&self.plan().inputs, inputs, "input", &mut order[0])?;
        self.check_places(inputs, &[], &order)?;
        self.take_in(inputs, &order[0])
    }

    /// Has inputs filled in where the plan has them, by a function of an input's name and the bytes of its place, for the next
    /// [replay](Self::replay). Where the host cannot write there, and for elements that are checked or stored in another type, they pass
    /// through memory of the host.
    ///
    /// # Errors
    /// When the function fails, an index is out of range, or the device fails. Then the inputs have to be written anew.
    pub fn fill_in_place(&mut self, fill: &mut dyn FnMut(&str, &mut [u8]) -> Result<()>) -> Result<()> {
        self.ready = false;
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        for port in &plan.inputs {
            let (stored, to) = port_place(plan, segments, port);
            let to = Slice { bytes: stored.packed_bytes(port.shape.numel()) as u64, ..to };
            // A bool is 0 or 1 on a device, whatever the caller's byte.
            if port.is_stored_as(stored)
                && stored != DType::Bool
                && port.indexes.is_empty()
                && let Some(place) = backend.host_bytes(to)?
            {
                fill(&port.name, place)?;
                continue;
            }
            let mut bytes =
                host_memory((port.shape.numel() * port.dtype.size()) as u64, &format!("'{}' on the host", port.name))?;
            fill(&port.name, &mut bytes)?;
            let tensor = Tensor::new(port.dtype, port.shape.clone(), bytes)?;
            fits(port, &tensor)?;
            backend.write(to, &tensor.store(stored, &port.name)?)?;
        }
        self.ready = true;
        Ok(())
    }

    /// Waits for the device, and copies outputs to memory of the caller.
    ///
    /// # Errors
    /// As [`run_in_place`](Self::run_in_place).
    pub fn read_in_place(&mut self, outputs: &mut [(&str, Place)]) -> Result<()> {
        let mut order = [Vec::new(), Vec::new()];
        find(&self.plan().outputs, outputs, "output", &mut order[1])?;
        self.check_places(&[], outputs, &order)?;
        self.give_out(outputs, &order[1])
    }

    fn take_in(&mut self, inputs: &[(&str, Place)], order: &[usize]) -> Result<()> {
        let mut converted = self.converted(inputs, order)?.into_iter().peekable();
        // Until all inputs are there, none of them is good for a run.
        self.ready = false;
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        for (number, (port, &at)) in plan.inputs.iter().zip(order).enumerate() {
            let (stored, to) = port_place(plan, segments, port);
            let to = Slice { bytes: stored.packed_bytes(port.shape.numel()) as u64, ..to };
            let converted = converted.next_if(|(of, _)| *of == number).map(|(_, bytes)| bytes);
            match (&inputs[at].1.0, converted) {
                (_, Some(bytes)) => backend.write(to, &bytes)?,
                (Kind::Device(from), None) => backend.copy_in(to, from)?,
                (Kind::Read(bytes), None) => backend.write(to, bytes)?,
                (Kind::Write(_), None) => unreachable!("places were checked"),
            }
        }
        self.ready = true;
        Ok(())
    }

    fn give_out(&mut self, outputs: &mut [(&str, Place)], order: &[usize]) -> Result<()> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        backend.wait()?;
        for port in plan.outputs.iter().filter(|port| port.fewest.is_some()) {
            let (stored, at) = port_place(plan, segments, port);
            count::suffices(port, &read_ports(&mut **backend, &[(port, stored, at)])?[0])?;
        }
        for (port, &at) in plan.outputs.iter().zip(order) {
            let (stored, from) = port_place(plan, segments, port);
            let from = Slice { bytes: stored.packed_bytes(port.shape.numel()) as u64, ..from };
            match &mut outputs[at].1.0 {
                Kind::Device(to) => backend.copy_out(from, to)?,
                Kind::Write(bytes) if port.is_stored_as(stored) => backend.read(from, bytes)?,
                Kind::Write(bytes) => {
                    let mut found = host_memory(from.bytes, "an output on the host")?;
                    backend.read(from, &mut found)?;
                    bytes.copy_from_slice(Tensor::load(stored, found, port.dtype, port.shape.clone())?.bytes());
                }
                Kind::Read(_) => unreachable!("places were checked"),
            }
        }
        Ok(())
    }

    /// The inputs that the device stores in other bytes than the caller's: their numbers, in order, and those bytes.
    fn converted(&self, inputs: &[(&str, Place)], order: &[usize]) -> Result<Vec<(usize, Vec<u8>)>> {
        let plan = self.plan();
        let convert = |(number, (port, &at)): (usize, (&Port, &usize))| {
            let stored = port_place(&plan, &self.segments, port).0;
            match &inputs[at].1.0 {
                // A bool is 0 or 1 on a device, whatever the caller's byte.
                Kind::Read(bytes) if !port.is_stored_as(stored) || stored == DType::Bool => {
                    let tensor = Tensor::new(port.dtype, port.shape.clone(), bytes.to_vec());
                    let bytes = tensor.and_then(|tensor| Ok(tensor.store(stored, &port.name)?.into_owned()));
                    Some(bytes.map(|bytes| (number, bytes)))
                }
                _ => None,
            }
        };
        plan.inputs.iter().zip(order).enumerate().filter_map(convert).collect()
    }

    /// Checks lengths, kinds and overlaps, and the elements that are indices. Places are in the order of the ports.
    fn check_places(&self, inputs: &[(&str, Place)], outputs: &[(&str, Place)], order: &[Vec<usize>; 2]) -> Result<()> {
        for (at, (name, given)) in outputs.iter().enumerate() {
            let others = inputs.iter().chain(&outputs[..at]);
            let over = |other: &Outside| given.device().is_some_and(|given| given.overlaps(other));
            if let Some((other, _)) = others.into_iter().find(|(_, place)| place.device().is_some_and(over)) {
                return Err(Error::usage(format!("output '{name}': its place overlaps that of '{other}'")));
            }
        }
        let plan = self.plan();
        let ports = plan.inputs.iter().zip(&order[0]).map(|(port, &at)| ("input", port, &inputs[at].1));
        let ports = ports.chain(plan.outputs.iter().zip(&order[1]).map(|(port, &at)| ("output", port, &outputs[at].1)));
        for (what, port, given) in ports {
            let Port { name, dtype, shape, .. } = port;
            let (expected, found) = ((shape.numel() * dtype.size()) as u64, given.length());
            let fail = |why: String| Err(Error::usage(format!("{what} '{name}', {dtype}{shape}: {why}")));
            if expected != found {
                return fail(format!("expected a place of {expected} bytes, found {found}"));
            }
            let stored = port_place(&plan, &self.segments, port).0;
            match (&given.0, what) {
                (Kind::Read(_), "output") => return fail("expected a place that can be written".into()),
                (Kind::Write(_), "input") => return fail("expected a place to read, found one to write".into()),
                (Kind::Device(_), _) if !port.is_stored_as(stored) => {
                    return fail(format!("the device stores it as {stored}: expected a place of the host"));
                }
                (Kind::Device(outside), _) if port.indexes.is_empty() => {
                    let reached = self.backend.reaches(outside, what == "output");
                    reached.or_else(|error| fail(error.to_string()))?;
                }
                (Kind::Device(_), _) if !port.indexes.is_empty() => {
                    return fail(
                        "it holds indices, which are checked on the host: expected a place of the host".into(),
                    );
                }
                (Kind::Read(bytes), _) if !port.indexes.is_empty() => {
                    indexes_fit(port, bytes)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
