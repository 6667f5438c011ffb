//! Graphs in, graphs out. Each pass is one function; [`Graph::verify`] judges its result.

use crate::error::Result;
use crate::graph::Graph;
use crate::target::Target;

pub mod attention;
mod bind;
pub mod chunk;
mod decompose;
mod fold;
mod fuse;
pub mod half;
mod horizontal;
mod indexes;
mod merge;
mod round;
mod simplify;
mod turn;

pub use fold::fold_node;

/// A pass.
pub type Pass = fn(&mut Graph, &Target) -> Result<()>;

/// The pipeline, in order.
pub const PASSES: &[(&str, Pass)] = &[
    ("indexes", indexes::run),
    ("fold", fold::run),
    ("simplify", simplify::run),
    ("decompose", decompose::run),
    ("bind", bind::run),
    ("fold", fold::run),
    ("turn", turn::run),
    ("simplify", simplify::run),
    ("merge", merge::run),
    ("horizontal", horizontal::run),
    ("round", round::run),
];

/// Runs the pipeline, and fuses unless told otherwise.
///
/// # Errors
/// What a pass or the verification after it finds.
pub fn run(graph: &mut Graph, target: &Target, fuse: bool) -> Result<()> {
    graph.verify()?;
    let fusion: &[(&str, Pass)] = if fuse { &[("fuse", fuse::run)] } else { &[] };
    for (name, pass) in PASSES.iter().chain(fusion) {
        let span = tracing::debug_span!("pass", name).entered();
        pass(graph, target)?;
        graph.verify()?;
        tracing::debug!(nodes = graph.len(), "done");
        drop(span);
    }
    Ok(())
}
