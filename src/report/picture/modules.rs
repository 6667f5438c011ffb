//! Names steps and buffers by the modules of the program that a file was exported from.

use super::{Item, Scene};
use crate::graph::{AGAIN, GRADIENT};
use std::borrow::Cow;
use std::collections::HashMap;

/// The path of the module that computes a node or a value, by its name.
pub type Modules = HashMap<String, String>;

impl Scene {
    /// Gives steps and buffers the modules that compute them.
    pub fn name_modules(&mut self, modules: &Modules) {
        for step in &mut self.steps {
            step.module = module(modules, &step.name);
        }
        for item in &mut self.buffers {
            item.module = module(modules, &item.name);
        }
    }
}

impl Item {
    /// The name in pictures: the module's path leads, if there is one.
    pub(in crate::report) fn shown(&self) -> Cow<'_, str> {
        match &self.module {
            Some(module) => format!("{module}: {}", self.name).into(),
            None => self.name.as_str().into(),
        }
    }
}

/// The module of a name. Names of gradients, of copies and of parts of a node are made from that of the node.
fn module(modules: &Modules, name: &str) -> Option<String> {
    let name = name.strip_prefix("copy of ").unwrap_or(name);
    let name = name.strip_prefix(GRADIENT).unwrap_or(name);
    let name = name.strip_suffix(AGAIN).unwrap_or(name);
    let mut node = name;
    loop {
        match modules.get(node) {
            Some(module) => return Some(module.clone()),
            None => node = node.rsplit_once('/')?.0,
        }
    }
}
