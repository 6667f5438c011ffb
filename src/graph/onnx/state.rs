//! States of models: inputs and outputs that belong together, such as a decoder's cache before and after a token.

use super::Model;
use super::proto::GraphProto;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::ValueId;
use crate::tensor::Tensor;
use std::collections::HashMap;

impl Model {
    /// This model with states. Each pair names an input, which reads the state, and an output, which updates it. One `*` in both stands for
    /// the same text.
    pub fn with_state(mut self, pairs: &[(String, String)]) -> Model {
        self.states.extend_from_slice(pairs);
        self.open_states();
        self
    }

    /// This model with these outputs alone, and the updates of its states; with all if the list is empty.
    pub fn with_outputs(mut self, names: &[String]) -> Model {
        self.outputs = (!names.is_empty()).then(|| names.to_vec());
        self
    }

    /// This model without outputs: it updates its states alone.
    pub fn without_outputs(mut self) -> Model {
        self.outputs = Some(Vec::new());
        self
    }

    /// This model with elements of inputs, by name. An input whose elements shape the computation (axes, a shape, sizes) becomes a constant of
    /// the elements that are given here, and is no input of the graph; the others stay inputs, and are read when the graph runs.
    pub fn with_values(mut self, elements: Vec<(String, Tensor)>) -> Model {
        self.values = elements;
        self
    }

    /// This model with elements that states begin with, by name. Of a cache that grows, they are its first rows; their number is then its
    /// length, unless the length is given, too.
    pub fn with_first(mut self, elements: Vec<(String, Tensor)>) -> Model {
        self.first = elements;
        self
    }

    /// Gives states the elements that they begin with.
    pub(super) fn begin(&self, graph: &mut Graph) -> Result<()> {
        let mut length: Option<(&str, usize)> = None;
        for (at, (name, _)) in self.first.iter().enumerate() {
            if self.first[..at].iter().any(|(other, _)| other == name) {
                return Err(Error::usage(format!("input '{name}' is given twice")));
            }
        }
        let is_free = |name: &str| self.is_state(name) && !self.first.iter().any(|(given, _)| given == name);
        let defaults = self.defaults.iter().filter(|tensor| is_free(&tensor.name));
        let defaults = defaults.map(|tensor| {
            let constant = self.constant(tensor, tensor.name.clone())?;
            Ok((tensor.name.clone(), constant.value()?.clone()))
        });
        let defaults = defaults.collect::<Result<Vec<_>>>()?;
        for (name, tensor) in self.first.iter().chain(&defaults) {
            let (tensor, rows) = self.filled_up(graph, name, tensor)?;
            let Some(rows) = rows else {
                graph.begin(name, tensor)?;
                continue;
            };
            if let Some((other, expected)) = length.filter(|(_, expected)| *expected != rows) {
                let what = format!("expected {expected} rows, as state '{other}' begins with, found {rows}");
                return Err(Error::usage(format!("state '{name}': {what}")));
            }
            length = Some((name, rows));
            graph.begin(name, tensor)?;
        }
        match (self.length(), length) {
            (Some(dim), Some((_, rows))) if !self.first.iter().any(|(name, _)| name == dim) => {
                graph.begin(dim, Tensor::from_f64(DType::I64, [], &[rows as f64]))
            }
            _ => Ok(()),
        }
    }

    /// The elements of a state; of a cache that grows, with zeros behind its rows, and the number of these.
    fn filled_up(&self, graph: &Graph, name: &str, tensor: &Tensor) -> Result<(Tensor, Option<usize>)> {
        let dims = self.dims_of(name, tensor.shape());
        let rows = dims.into_iter().find(|(dim, _)| self.length() == Some(dim)).map(|(_, rows)| rows);
        let state = graph.states().iter().map(|s| s.value).find(|&v| graph.value_name(v) == name);
        let (Some(rows), Some(state)) = (rows, state) else { return Ok((tensor.clone(), None)) };
        let (found, whole) = (tensor.shape(), &graph.fact(state).shape);
        let Some(axis) = (0..found.len()).find(|&axis| found[axis] != whole[axis]) else {
            return Ok((tensor.clone(), Some(rows)));
        };
        // Whatever else differs is found when the state gets the elements.
        let is_part = found[axis] < whole[axis] && found[axis + 1..] == whole[axis + 1..];
        if !is_part || tensor.dtype() != graph.fact(state).dtype {
            return Ok((tensor.clone(), Some(rows)));
        }
        let inner = whole[axis + 1..].iter().product::<usize>() * tensor.dtype().size();
        let (needed, mut bytes) = (graph.fact(state).bytes(), Vec::new());
        bytes.try_reserve_exact(needed).map_err(|_| Error::Memory {
            what: format!("state '{name}' as it begins"),
            needed: needed as u64,
            file: None,
        })?;
        let given = found[axis] * inner;
        for block in 0..whole[..axis].iter().product() {
            bytes.extend_from_slice(&tensor.bytes()[block * given..][..given]);
            bytes.resize((block + 1) * whole[axis] * inner, 0);
        }
        Ok((Tensor::new(tensor.dtype(), whole.clone(), bytes)?, Some(rows)))
    }

    /// The inputs that read states, in the file's order.
    pub fn state_inputs(&self) -> Vec<String> {
        let inputs = self.proto.graph.iter().flat_map(|graph| &graph.input).map(|input| input.name.clone());
        inputs.filter(|name| self.states.iter().any(|(input, output)| reads(input, output, name))).collect()
    }

    /// The inputs that have no initializer, in the file's order.
    pub fn input_names(&self) -> Vec<String> {
        self.open_inputs().map(|input| input.name.clone()).collect()
    }

    /// True if an input or a state has this name.
    pub fn takes(&self, name: &str) -> bool {
        let mut inputs = self.proto.graph.iter().flat_map(|g| &g.input);
        inputs.any(|input| input.name == name) || self.is_state(name)
    }

    /// Refuses an output that is asked for and that the graph does not have.
    pub(super) fn knows_outputs(&self, graph: &GraphProto) -> Result<()> {
        let known: Vec<&str> = graph.output.iter().map(|output| output.name.as_str()).collect();
        match self.outputs.iter().flatten().find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let known = known.join(", ");
                Err(Error::usage(format!("output '{name}': not an output of the graph; its outputs: {known}")))
            }
        }
    }

    /// True if an output is asked for, or updates a state.
    pub(super) fn wants(&self, output: &str) -> bool {
        let mut pairs = self.states.iter().chain(&self.shared);
        self.outputs.as_ref().is_none_or(|outputs| outputs.iter().any(|name| name == output))
            || pairs.any(|(input, update)| named(update, input, output).is_some())
    }

    /// This model as one of several programs, with the states that it shares. Of a pair, it may have the input alone, which reads the state,
    /// or the output alone, which updates it. The pairs that it has any half of come second.
    pub fn with_shared_state(mut self, pairs: &[(String, String)]) -> (Model, Vec<bool>) {
        let graph = self.proto.graph.iter();
        let inputs: Vec<String> = graph.clone().flat_map(|g| &g.input).map(|value| value.name.clone()).collect();
        let outputs: Vec<String> = graph.flat_map(|g| &g.output).map(|value| value.name.clone()).collect();
        let mut has = Vec::with_capacity(pairs.len());
        for (input, output) in pairs {
            let read = inputs.iter().filter_map(|name| Some((name.clone(), named(input, output, name)?)));
            let written = outputs.iter().filter_map(|name| Some((named(output, input, name)?, name.clone())));
            let mut found: Vec<_> = read.chain(written).collect();
            found.sort();
            found.dedup();
            has.push(!found.is_empty());
            for (input, output) in found {
                let whole = inputs.contains(&input) && outputs.contains(&output);
                if whole { &mut self.states } else { &mut self.shared }.push((input, output));
            }
        }
        self.open_states();
        (self, has)
    }

    /// Makes states of the inputs and outputs that are paired.
    pub(super) fn pair(&self, graph: &mut Graph) -> Result<()> {
        self.pairs(graph)?.iter().try_for_each(|(input, output)| graph.pair(input, output))?;
        self.share(graph)
    }

    /// Makes states of the inputs and outputs whose other half another program has.
    pub(super) fn share(&self, graph: &mut Graph) -> Result<()> {
        self.shared.iter().try_for_each(|(input, output)| graph.share(input, output))
    }

    /// True if an input of this name is to become a state, if it is the length of states that grow, or if a training step updates it.
    pub fn is_state(&self, name: &str) -> bool {
        if self.training.as_ref().is_some_and(|training| training.numbers.contains_key(name)) {
            return true;
        }
        let mut pairs = self.states.iter().chain(&self.shared);
        pairs.any(|(input, output)| input == name || filled(input, output, name).is_some())
            || self.length() == Some(name)
    }

    /// The inputs and outputs that are paired, with the texts that `*` stands for.
    pub(super) fn pairs(&self, graph: &Graph) -> Result<Vec<(String, String)>> {
        let mut pairs = Vec::new();
        for (input, output) in &self.states {
            let names = graph.inputs().iter().map(|&v| graph.value_name(v));
            let matches: Vec<_> =
                names.filter_map(|name| Some((name.to_owned(), filled(input, output, name)?))).collect();
            if input.contains('*') && matches.is_empty() {
                let known: Vec<_> = graph.inputs().iter().map(|&v| graph.value_name(v)).collect();
                let what =
                    format!("state '{input}={output}': no input is like '{input}'; the inputs: {}", known.join(", "));
                return Err(Error::usage(what));
            }
            let plain = || vec![(input.clone(), output.clone())];
            pairs.extend(if input.contains('*') { matches } else { plain() });
        }
        Ok(pairs)
    }
}

/// The other name of a pair of names or patterns, for a name that is the first.
fn named(first: &str, second: &str, name: &str) -> Option<String> {
    if first.contains('*') { filled(first, second, name) } else { (first == name).then(|| second.to_owned()) }
}

/// True if the input of a pair of names or patterns is, or is like, this name.
pub(super) fn reads(input: &str, output: &str, name: &str) -> bool {
    named(input, output, name).is_some()
}

/// The output's pattern, with the text that its `*` stands for in the input's; `None` if the name is not like the input's pattern.
fn filled(input: &str, output: &str, name: &str) -> Option<String> {
    let (before, behind) = input.split_once('*')?;
    let text = name.strip_prefix(before)?.strip_suffix(behind)?;
    Some(output.replacen('*', text, 1))
}

/// Words of exporters for a state before and after a run.
const WORDS: [(&str, &str); 6] = [
    ("", "next_"),
    ("past_key_values", "present"),
    ("past", "present"),
    ("old", "new"),
    ("prev", "next"),
    ("state", "stateN"),
];

/// The pairs of inputs and outputs that look like states: names that differ by such a word, types and shapes that are equal.
pub fn likely_states(graph: &Graph) -> Vec<(String, String)> {
    let outputs: HashMap<&str, ValueId> = graph.outputs().iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let pair = |&input: &ValueId| {
        let name = graph.value_name(input);
        let output = |(old, new): &(&str, &str)| name.contains(old).then(|| name.replacen(old, new, 1));
        let same = |output: &String| outputs.get(output.as_str()).is_some_and(|&o| graph.fact(o) == graph.fact(input));
        Some((name.to_owned(), WORDS.iter().filter_map(output).find(same)?))
    };
    graph.inputs().iter().filter_map(pair).collect()
}
