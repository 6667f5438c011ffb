//! A graph that grows, and its first error.

use super::attr::Attrs;
use super::fact::{Fact, OpResult, ValueId};
use std::cell::RefCell;

/// A graph to which nodes can be added.
pub trait Build {
    /// The fact of a value.
    fn fact(&self, value: ValueId) -> Fact;
    /// Adds a node and returns its outputs; optional inputs that are omitted are `None`.
    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>>;
    /// Adds a constant. Its elements are computed only if the caller wants values.
    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId;
}

impl<B: Build + ?Sized> Build for &mut B {
    fn fact(&self, value: ValueId) -> Fact {
        (**self).fact(value)
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        (**self).node(op, inputs, attrs)
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        (**self).insert(fact, elements)
    }
}

/// A graph that grows with each operation on its values. It keeps the first error, and builds nothing that depends
/// on what failed.
pub struct Scope<B: ?Sized> {
    error: RefCell<Option<String>>,
    build: RefCell<B>,
}

/// The graph in which values are built.
pub type Nodes<'g> = &'g Scope<dyn Build + 'g>;

impl<B> Scope<B> {
    /// A scope without an error.
    pub fn new(build: B) -> Scope<B> {
        Scope { error: RefCell::default(), build: RefCell::new(build) }
    }

    /// The graph, or the first error.
    pub fn finish(self) -> (B, Option<String>) {
        (self.build.into_inner(), self.error.into_inner())
    }
}

impl<B: ?Sized> Scope<B> {
    /// Calls a function of the graph. If it fails, there is no result, and the error is kept.
    pub fn attempt<T>(&self, f: impl FnOnce(&mut B) -> OpResult<T>) -> Option<T> {
        let result = f(&mut self.build.borrow_mut());
        result.map_err(|what| _ = self.error.borrow_mut().get_or_insert(what)).ok()
    }

    pub(super) fn fact(&self, value: ValueId) -> Fact
    where
        B: Build,
    {
        self.build.borrow().fact(value)
    }
}
