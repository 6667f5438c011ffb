//! Caches that grow: an input such as `past [batch, heads, past_length, width]` whose output has a few rows more. They become states whose
//! capacity is planned once, and whose length is a state, too.
//!
//! ```text
//! past [b, h, P, d] --.                                   cache [b, h, C, d] --.
//!   new [b, h, T, d] --Concat--> present [b, h, P+T, d]     new [b, h, T, d] --TensorScatter at L--> cache (updated)
//! ```
//!
//! The ports are read first, to count the rows that a run adds. Then the model is imported for the largest length P = C - T, which fills the
//! capacity. The graphs of other lengths [follow](super::import::Open::at) from that one. Where they have the same nodes, what differs depends
//! on the length: an extent, an attribute or a constant. In the graph of the largest length, each extent stays. Elements behind the length are never read: what reduces over them gets a mask. Attributes and constants that differ are
//! computed from the length.
//!
//! What is equal in all of these graphs may differ for other lengths. So the importer knows how each constant depends on the length: not at
//! all, by a line, or otherwise. What depends on it otherwise is computed in the run, by the operators that it was folded from.

use super::Model;
use super::import::{Counts, Imported, Lengths, Open, import_ports};
use super::symbolic::Counted;
use crate::error::{Error, Result};
use crate::graph::{Count, Graph};
use crate::shape::Extent;
use rules::Rules;
use samples::Samples;
use std::collections::BTreeSet;

pub(super) mod data_dependent;
mod rules;
mod samples;

/// A dim along which states grow.
#[derive(Clone, Debug)]
pub(super) struct Growth {
    /// The dim: the rows of the states before a run.
    dim: String,
    /// The rows before the first run, and the most after any.
    least: usize,
    most: usize,
    /// Dims of other inputs that are the rows after a run.
    after: Vec<String>,
}

/// The names of an input and an output that become a state.
type Pair = (String, String);

/// A pair that grows.
struct Grown {
    input: String,
    output: String,
    axis: usize,
}

impl Model {
    /// This model with states that grow along a dim, and the other dims.
    ///
    /// It is the dim with a range that inputs have of which all become states. Its largest extent is their capacity; they begin with its
    /// smallest extent. A dim of other inputs that has a range with the same end is the length after a run.
    ///
    /// # Errors
    /// When states would grow along two dims.
    pub fn grow(mut self, dims: Vec<(String, Extent)>) -> Result<(Model, Vec<(String, Extent)>)> {
        for (dim, text) in self.forced_ties(&dims) {
            tracing::info!("dim '{dim}' is {text}, as GroupQueryAttention has it");
            self = self.with_tie(&dim, &text)?;
        }
        let states_only = |dim: &str| {
            let mut inputs = self.inputs_along(dim).peekable();
            inputs.peek().is_some() && inputs.all(|input| self.is_state(input))
        };
        let grows: Vec<_> = dims.iter().filter(|(dim, e)| e.fixed().is_none() && states_only(dim)).cloned().collect();
        let (dim, extent) = match &grows[..] {
            [] => return Ok((self, dims)),
            [one] => one.clone(),
            [(one, _), (other, _), ..] => {
                let what = format!("states grow along dim '{one}' and along dim '{other}': expected one range");
                return Err(self.name_file(Error::usage(what)));
            }
        };
        let is_after = |name: &str, e: Extent| {
            e.fixed().is_none() && e.most() == extent.most() && !self.inputs_along(name).any(|i| self.is_state(i))
        };
        let (after, others): (Vec<_>, Vec<_>) =
            dims.into_iter().filter(|(name, _)| *name != dim).partition(|(name, e)| is_after(name, *e));
        let after = after.into_iter().map(|(name, _)| name).collect();
        self.growth = Some(Growth { dim, least: extent.least(), most: extent.most(), after });
        Ok((self, others))
    }
}

impl Model {
    /// The name of the state that is the length of those that grow, if any do.
    pub(super) fn length(&self) -> Option<&str> {
        self.growth.as_ref().map(|growth| growth.dim.as_str())
    }

    /// True if a dim is the rows of states that grow, before or after a run.
    pub fn grows_along(&self, dim: &str) -> bool {
        self.growth.as_ref().is_some_and(|growth| growth.dim == dim || growth.after.iter().any(|after| after == dim))
    }
}

impl Growth {
    /// All dims, where the states have so many rows before a run that adds `by`.
    fn bind(&self, dims: &[(String, usize)], rows: usize, by: usize) -> Vec<(String, usize)> {
        let after = self.after.iter().map(|name| (name.clone(), rows + by));
        dims.iter().cloned().chain([(self.dim.clone(), rows)]).chain(after).collect()
    }

    /// The pairs of a graph that grow, the others, and the number of rows that a run adds to each that grows.
    fn pairs(&self, model: &Model, graph: &Graph) -> Result<(Vec<Grown>, Vec<Pair>, usize)> {
        let (mut grown, mut others, mut by) = (Vec::new(), Vec::new(), None);
        for (input, output) in model.pairs(graph)? {
            let old = graph.inputs().iter().find(|&&v| graph.value_name(v) == input).map(|&v| graph.fact(v));
            let new = graph.outputs().iter().find(|(name, _)| *name == output).map(|(_, v)| graph.fact(*v));
            // Missing pairs are reported when states are made.
            let Some((old, new)) = old.zip(new).filter(|(old, new)| old != new) else {
                others.push((input, output));
                continue;
            };
            let differ: Vec<_> =
                (0..old.shape.len()).filter(|&k| old.shape[k] != *new.shape.get(k).unwrap_or(&0)).collect();
            let same = old.dtype == new.dtype && old.shape.len() == new.shape.len();
            let (&[axis], true) = (&differ[..], same) else {
                let what = format!("input '{input}' is {old}, but output '{output}' is {new}");
                return Err(Error::usage(format!(
                    "state '{input}={output}': {what}: expected more rows along one axis"
                )));
            };
            let rows = new.shape[axis].checked_sub(old.shape[axis]).filter(|rows| by.is_none_or(|by| by == *rows));
            let Some(rows) = rows else {
                let what =
                    format!("axis {axis} has {} elements before and {} after a run", old.shape[axis], new.shape[axis]);
                let dim = &self.dim;
                return Err(Error::usage(format!(
                    "state '{input}={output}': {what}: expected as many rows more as of the other states along '{dim}'"
                )));
            };
            by = Some(rows);
            grown.push(Grown { input, output, axis });
        }
        by.map(|by| (grown, others, by)).ok_or_else(|| {
            let dim = &self.dim;
            Error::usage(format!("dim '{dim}' has a range, but no state grows along it: give it one extent"))
        })
    }
}

impl Growth {
    /// The pairs, as [`pairs`](Self::pairs) finds them. Where dims of other inputs depend on the rows that a run adds, these are 1, or as many
    /// as the extent of a dim.
    fn probe(&self, model: &Model, dims: &[(String, usize)]) -> Result<(Vec<Grown>, Vec<Pair>, usize)> {
        let mut refused = None;
        for by in BTreeSet::from_iter(dims.iter().map(|(_, extent)| *extent).chain([1])) {
            let dims = self.bind(dims, self.most.saturating_sub(by), by);
            match quietly(|| import_ports(model, &dims)).and_then(|graph| self.pairs(model, &graph)) {
                Ok(found) if self.after.is_empty() || found.2 == by => return Ok(found),
                Ok(_) => {}
                Err(error @ Error::Usage { .. }) => return Err(error),
                Err(error) if self.after.is_empty() => return Err(error),
                Err(error) => _ = refused.get_or_insert(error),
            }
        }
        let after = self.after.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
        let dim = &self.dim;
        let unknown = || {
            Error::usage(format!(
                "dim '{dim}': no extent of a dim is the number of rows that a run adds, as {after} need"
            ))
        };
        Err(refused.unwrap_or_else(unknown))
    }
}

/// Imports without warnings: the import for the largest length gives them.
fn quietly<T>(import: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), import)
}

/// Imports a model whose states grow.
pub(super) fn import(model: &Model, growth: &Growth, dims: &[(String, usize)]) -> Result<Graph> {
    let Growth { dim, least, most, .. } = growth;
    let (grown, others, by) = growth.probe(model, dims)?;
    if by >= *most || least + by > *most {
        return Err(Error::usage(format!(
            "dim '{dim}', {least}..{most}: a run adds {by} rows to {least}: expected a capacity of more"
        )));
    }
    let all = [most - by, 0, 1, 2, (most - by) / 2].into_iter().filter(|&rows| rows <= most - by);
    let samples = all.map(|rows| (rows, growth.bind(dims, rows, by))).collect();
    let lengths = Lengths { dim: dim.clone(), most: most - by, samples };
    let mut counts = Counts { all_known: true, lengths: Some(lengths), ..Counts::default() };
    let (open, _) = Open::new(model, &growth.bind(dims, most - by, by), &mut counts)?;
    let Imported { graph: largest, varying } = open.first();
    let (mut graphs, mut lengths) = (vec![largest], vec![most - by]);
    let between = [most - by - 1, (most - by) / 2, 1];
    for rows in BTreeSet::from(between).into_iter().rev().filter(|&rows| rows < most - by) {
        let dims = growth.bind(dims, rows, by);
        let mut at = Counted::default();
        at[0] = rows as i64;
        graphs.push(quietly(|| open.at(model, &dims, &mut counts, &at))?.graph);
        lengths.push(rows);
    }
    let mut samples = Samples {
        graphs,
        lengths,
        dim: dim.clone(),
        why: format!("its states grow along dim '{dim}'"),
        counts: false,
        number: 0,
        varying,
    };
    samples.unfold(rules::has_rule)?;
    let count = Count { by: by as u64, most: *most as u64 };
    let mut graph = Rules::growing(&samples, *least, count)?.apply(&grown)?;
    graph.sweep();
    graph.verify()?;
    others.iter().try_for_each(|(input, output)| graph.pair(input, output))?;
    model.share(&mut graph)?;
    Ok(graph)
}
