//! Models whose nodes find as many elements as a run decides.
//!
//! There is a graph for several counts of each such node, as for several lengths of caches. In the graph of the most that can be
//! found, each extent stays, and the same rules hold: elements behind the count mean nothing, so what reduces over them gets a mask. Outputs
//! whose extents differ say which other output counts them.

use super::rules::{self, Rules};
use super::samples::Samples;
use super::{Model, quietly};
use crate::error::{Error, Result};
use crate::figures::count;
use crate::graph::{Fewest, Graph};
use crate::onnx::import::{Counts, Imported, Open, import_ports};
use crate::onnx::symbolic::Counted;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Imports a model; if it was imported before, for other extents of the same dims, by what was `opened` then.
pub(in crate::onnx) fn import(
    model: &Model,
    dims: &[(String, usize)],
    opened: &Mutex<Option<Arc<Open>>>,
) -> Result<Graph> {
    // Nothing is half-written to it.
    let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
    let mut counts = Counts::default();
    if let Some(open) = opened.as_ref().filter(|open| open.is_of(dims)).cloned() {
        drop(opened);
        let found = open.at(model, dims, &mut counts, &Counted::default());
        return match found {
            Ok(found) if counts.known.is_empty() => Ok(found.graph),
            // These extents take a branch with nodes that find as many as a run decides, or lack what is given.
            _ => import(model, dims, &Mutex::default()),
        };
    }
    let made = match Open::new(model, dims, &mut counts) {
        Ok((open, graph)) if counts.known.is_empty() => {
            *opened = Some(Arc::new(open));
            return Ok(graph);
        }
        Ok((open, _)) => all_counts(model, dims, &open, counts),
        Err(error) => Err(error),
    };
    made.or_else(|error| {
        // What is given may be known before the run. Otherwise the first error says what the model lacks.
        let bound = if model.values.is_empty() { None } else { import_ports(model, dims).ok() };
        bound.ok_or(error)
    })
}

/// One graph for all that the nodes may find.
fn all_counts(model: &Model, dims: &[(String, usize)], open: &Open, mut counts: Counts) -> Result<Graph> {
    let number = counts.known.len();
    let Imported { mut graph, .. } = Family { model, dims, open }.of(&mut counts, number)?;
    for known in counts.known.iter().filter(|known| known.least > 0) {
        let what = "the plan is for 1 or more elements that it finds, as the graph cannot be read for none: a run that finds none is refused";
        tracing::warn!(node = known.node, "{what}");
        graph.need(&known.name, Fewest { node: known.node.clone(), number: known.least as u64 });
    }
    graph.verify()?;
    Ok(graph)
}

/// An error of an import for a count other than the most.
fn where_found(error: Error, node: &str, length: usize) -> Error {
    match error {
        Error::Node { node: at, op, what, file } => {
            let found = count(length as u64, "element");
            Error::Node { node: at, op, what: format!("{what} (where node '{node}' finds {found})"), file }
        }
        other => other,
    }
}

/// A model, imported for several counts.
struct Family<'a> {
    model: &'a Model,
    dims: &'a [(String, usize)],
    open: &'a Open,
}

impl Family<'_> {
    /// The graph for all that the first `open` nodes may find, where the others find as many as `counts` say.
    fn of(&self, counts: &mut Counts, open: usize) -> Result<Imported> {
        let Some(last) = open.checked_sub(1) else {
            let mut at = Counted::default();
            at.iter_mut().zip(&counts.known).for_each(|(at, known)| *at = known.count as i64);
            if counts.known.iter().all(|known| known.count == known.most) {
                return Ok(self.open.first());
            }
            return quietly(|| self.open.at(self.model, self.dims, counts, &at));
        };
        let (dim, most) = (counts.known[last].name.clone(), counts.known[last].most);
        let (mut graphs, mut lengths, mut varying) = (Vec::new(), Vec::new(), None);
        // More counts pass fewer decisions that another count would make otherwise; but the number of graphs is a product over such nodes.
        let lengths_of = [most, 0, 1, most.div_ceil(2), most.saturating_sub(1), 2];
        let some = match counts.known.len() {
            1 => 6,
            2 => 4,
            _ => 3,
        };
        let tried: BTreeSet<usize> = lengths_of[..some].iter().copied().filter(|&length| length <= most).collect();
        for length in tried.into_iter().rev() {
            counts.known[last].count = length;
            match self.of(counts, last) {
                Ok(imported) => {
                    graphs.push(imported.graph);
                    // The graph of the most is the one that is rewritten.
                    varying.get_or_insert(imported.varying);
                    lengths.push(length);
                }
                // What follows may need some elements.
                Err(_) if length == 0 && graphs.len() > 1 => counts.known[last].least = 1,
                Err(error) if length == most => return Err(error),
                Err(error) => return Err(where_found(error, &counts.known[last].node, length)),
            }
        }
        counts.known[last].count = most;
        let why = format!("a run decides how many elements node '{}' finds", counts.known[last].node);
        let varying = varying.unwrap_or_default();
        let mut samples = Samples { graphs, lengths, dim, why, counts: true, number: last, varying };
        samples.unfold(rules::has_rule)?;
        let mut graph = Rules::counting(&samples).apply(&[])?;
        graph.sweep();
        Ok(Imported { graph, varying: samples.varying })
    }
}
