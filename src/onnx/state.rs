//! States of models: inputs and outputs that belong together, such as a decoder's cache before and after a token.

use super::Model;
use crate::error::{Error, Result};
use crate::graph::Graph;

impl Model {
    /// This model with states. Each pair names an input, which reads the state, and an output, which updates it. One `*` in both stands for
    /// the same text.
    pub fn with_state(mut self, pairs: &[(String, String)]) -> Model {
        self.states.extend_from_slice(pairs);
        self
    }

    /// Makes states of the inputs and outputs that are paired.
    pub(super) fn pair(&self, graph: &mut Graph) -> Result<()> {
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
            for (input, output) in if input.contains('*') { matches } else { plain() } {
                graph.pair(&input, &output)?;
            }
        }
        Ok(())
    }
}

/// The output's pattern, with the text that its `*` stands for in the input's; `None` if the name is not like the input's pattern.
fn filled(input: &str, output: &str, name: &str) -> Option<String> {
    let (before, behind) = input.split_once('*')?;
    let text = name.strip_prefix(before)?.strip_suffix(behind)?;
    Some(output.replacen('*', text, 1))
}

/// Words of exporters for a state before and after a run.
const WORDS: [(&str, &str); 9] = [
    ("", "next_"),
    ("past_key_values", "present"),
    ("past", "present"),
    ("in", "out"),
    ("input", "output"),
    ("old", "new"),
    ("prev", "next"),
    ("state", "stateN"),
    ("0", "n"),
];

/// The pairs of inputs and outputs that look like states: names that differ by such a word, types and shapes that are equal.
pub fn likely_states(graph: &Graph) -> Vec<(String, String)> {
    let pair = |input: &str, output: &str| {
        let as_output = |(old, new): &(&str, &str)| input.replacen(old, new, 1) == output && input.contains(old);
        WORDS.iter().any(as_output)
    };
    let mut found = Vec::new();
    for &value in graph.inputs() {
        let name = graph.value_name(value);
        let output = graph.outputs().iter().find(|(o, v)| graph.fact(*v) == graph.fact(value) && pair(name, o));
        found.extend(output.map(|(output, _)| (name.to_owned(), output.clone())));
    }
    found
}
