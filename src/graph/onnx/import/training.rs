//! The training step of a model: initializers that it updates become states.

use super::sequence::Named;
use super::{Importer, MAX_SHAPING, Scope};
use crate::constant::Constant;
use crate::error::{Error, Result};
use crate::onnx::training::{Training, Zeros};
use crate::op::{Attrs, Fact, ValueId};
use crate::tensor::Tensor;
use std::collections::HashMap;
use std::sync::Arc;

/// The values that the initialization gives to initializers, by name.
pub(super) type Initial<'a> = HashMap<&'a str, First>;

/// Elements that an initializer begins with.
pub(super) enum First {
    Constant(Arc<Constant>),
    Zeros(Fact),
}

impl First {
    fn fact(&self) -> &Fact {
        match self {
            First::Constant(constant) => &constant.fact,
            First::Zeros(fact) => fact,
        }
    }
}

impl<'a> Importer<'a> {
    /// Computes what the training step's initialization gives to initializers.
    pub(super) fn initial(&mut self, training: &'a Training, opset: i64) -> Result<Initial<'a>> {
        let Training { initialization, bindings, zeros, .. } = training;
        let mut initial = Initial::new();
        if bindings.is_empty() && zeros.is_empty() {
            return Ok(initial);
        }
        let mut scope = Scope::new("initialization/".to_owned(), opset, 0);
        self.initializers(initialization, &Initial::new(), &mut scope)?;
        self.nodes(&initialization.node, &mut scope)?;
        let constant = |importer: &Importer, value: &str| match scope.find(value) {
            Some(Named::Tensor(found)) => importer.graph.as_constant(found).cloned(),
            _ => None,
        };
        let fail = |state: &str, value: &str| {
            let expected = "expected a value that follows from constants and is not much larger than they are";
            Error::graph(format!("initialization_binding '{state}={value}': {expected}"))
        };
        for (state, value) in bindings {
            let found = constant(self, value).ok_or_else(|| fail(state, value))?;
            initial.insert(state, First::Constant(found));
        }
        for Zeros { name, dtype, shape } in zeros {
            let extents = constant(self, shape).filter(|c| c.fact.shape.numel() <= MAX_SHAPING);
            let extents = extents.ok_or_else(|| fail(name, shape))?.value()?.to_i64().unwrap_or_default();
            let extents: Result<Vec<usize>, _> = extents.into_iter().map(usize::try_from).collect();
            let extents = extents.map_err(|_| fail(name, shape))?;
            initial.insert(name, First::Zeros(Fact::new(*dtype, extents)));
        }
        Ok(initial)
    }

    /// Adds an initializer, with its own elements (`None` is zeros) or with what the initialization gives to it. It is a state if the
    /// training step updates it.
    pub(super) fn trained(
        &mut self,
        name: &'a str,
        fact: Fact,
        own: Option<Constant>,
        initial: &Initial<'a>,
    ) -> Result<ValueId> {
        fact.countable().map_err(|what| Error::graph(format!("initializer '{name}': {what}")))?;
        let first = match initial.get(name) {
            Some(first) if *first.fact() != fact => {
                let what = format!("initializer '{name}' is {fact}, but is to begin with {}", first.fact());
                return Err(Error::graph(format!("initialization_binding: {what}")));
            }
            Some(First::Constant(constant)) => Some(constant.named(name.into())?.into()),
            Some(First::Zeros(_)) => None,
            None => own.map(Arc::new),
        };
        let updated = self.model.training.as_ref().is_some_and(|training| training.numbers.contains_key(name));
        match first {
            first if updated => Ok(self.graph.state(name, fact, first)),
            Some(constant) => Ok(self.graph.constant(constant)),
            None => self.zeros(name, fact),
        }
    }

    /// Adds zeros that take no memory: a view of one.
    pub(super) fn zeros(&mut self, name: &str, fact: Fact) -> Result<ValueId> {
        fact.countable().map_err(|what| Error::graph(format!("initializer '{name}': {what}")))?;
        let zero = Constant::new(format!("{name}/zero"), Tensor::from_f64(fact.dtype, [], &[0.0]));
        let zero = self.graph.constant(zero);
        let attrs = Attrs::new().with("shape", &fact.shape[..]);
        Ok(self.add(self.rows["Expand"], name, &[Some(zero)], attrs, &[name])?[0])
    }

    /// Gives states the values that update them.
    pub(super) fn update(&mut self, training: &Training, scope: &Scope<'_, 'a>) -> Result<()> {
        for (state, value) in training.updates.iter().filter(|(state, value)| state != value) {
            let fail = |what: String| Error::graph(format!("update_binding '{state}={value}': {what}"));
            let find = |name: &str| match scope.find(name) {
                Some(Named::Tensor(value)) => Ok(value),
                _ => Err(fail(format!("'{name}' is no tensor that a node produces"))),
            };
            let (old, new) = (find(state)?, find(value)?);
            self.graph.update(old, new).map_err(fail)?;
        }
        self.graph.sort_states(|name| training.numbers.get(name).copied());
        Ok(())
    }
}
