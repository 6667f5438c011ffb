//! Inputs with a default: from IR version 4 on, an initializer of an input's name is the value that it has unless another is given.
//!
//! Exporters list all weights as inputs. So a default is a constant of the plan, and an input of the graph only where that is asked for.

use super::Model;
use super::proto::ValueInfoProto;
use super::state::reads;
use crate::error::{Error, Result, ensure};
use std::collections::BTreeSet;

/// The first version of the format in which an initializer of an input's name is a default. Before, it was the input's only value.
const WITH_DEFAULTS: i64 = 4;

impl Model {
    /// The inputs that have a default.
    pub(super) fn inputs_with_default(&self) -> impl Iterator<Item = &ValueInfoProto> {
        let graph = self.proto.graph.as_ref().filter(|_| self.proto.ir_version >= WITH_DEFAULTS);
        let initializers: BTreeSet<&str> = graph.iter().flat_map(|g| &g.initializer).map(|t| t.name.as_str()).collect();
        graph.into_iter().flat_map(|g| &g.input).filter(move |i| initializers.contains(i.name.as_str()))
    }

    /// This model with these inputs as inputs, where they have a default: each run gives them. Those that are states begin with it.
    ///
    /// # Errors
    /// When the format has no defaults, so that an initializer is the only value of its input.
    pub fn with_given<'a>(mut self, names: impl IntoIterator<Item = &'a str>) -> Result<Model> {
        for name in names {
            let Some(graph) = &self.proto.graph else { break };
            let is_listed = graph.input.iter().any(|input| input.name == name);
            let is_known = graph.initializer.iter().any(|tensor| tensor.name == name);
            ensure(is_listed || self.is_state(name), || {
                self.name_file(Error::usage(format!("the model has no input '{name}'")))
            })?;
            if !is_known || self.is_state(name) {
                continue;
            }
            ensure(self.proto.ir_version >= WITH_DEFAULTS, || {
                let found = self.proto.ir_version;
                self.name_file(Error::usage(format!(
                    "input '{name}' is an initializer: expected IR version {WITH_DEFAULTS} or newer, in which that is a default, found {found}"
                )))
            })?;
            self.open(|input| input == name);
        }
        Ok(self)
    }

    /// The inputs that have a default, and that runs give all the same.
    pub fn given(&self) -> Vec<String> {
        let names = self.defaults.iter().map(|tensor| tensor.name.clone());
        names.filter(|name| !self.is_state(name)).collect()
    }

    /// Makes inputs of those with a default that are states, or parts of them.
    pub(super) fn open_states(&mut self) {
        let pairs: Vec<_> = self.states.iter().chain(&self.shared).cloned().collect();
        self.open(|name| pairs.iter().any(|(input, output)| reads(input, output, name)));
    }

    /// Keeps the defaults of inputs apart, so that they are inputs of the graph.
    fn open(&mut self, is_opened: impl Fn(&str) -> bool) {
        let opened: BTreeSet<String> =
            self.inputs_with_default().map(|input| input.name.clone()).filter(|name| is_opened(name)).collect();
        if let Some(graph) = self.proto.graph.as_mut().filter(|_| !opened.is_empty()) {
            let (apart, kept) =
                std::mem::take(&mut graph.initializer).into_iter().partition(|t| opened.contains(&t.name));
            graph.initializer = kept;
            let apart: Vec<_> = apart;
            self.defaults.extend(apart);
        }
    }
}
