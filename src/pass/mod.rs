//! Graphs in, graphs out. Each pass is one function; [`Graph::verify`] judges its result.

use crate::error::Result;
use crate::graph::{Graph, Kind};
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
mod scale;
mod simplify;
mod turn;
mod views;

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
    ("scale", scale::run),
    ("views", views::run),
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
    let before = constant_bytes(graph)?;
    let fusion: &[(&str, Pass)] = if fuse { &[("fuse", fuse::run)] } else { &[] };
    // Nodes that stay apart would scale the scores, which are more than the queries.
    let passes = PASSES.iter().filter(|(name, _)| fuse || *name != "scale");
    for (name, pass) in passes.chain(fusion) {
        let span = tracing::debug_span!("pass", name).entered();
        pass(graph, target)?;
        graph.verify()?;
        tracing::debug!(nodes = graph.len(), "done");
        drop(span);
    }
    let after = constant_bytes(graph)?;
    if after > before.saturating_add(before / 4).max(MENTIONED) {
        tracing::info!("constants of {before} bytes are unpacked to {after}");
    }
    Ok(())
}

/// Constants that grow to fewer bytes are not worth a word.
const MENTIONED: usize = 1 << 20;

/// What a graph's constants take.
fn constant_bytes(graph: &Graph) -> Result<usize> {
    let bytes = |node| match &graph.node(node).kind {
        Kind::Constant(constant) => constant.fact.shape.numel() * constant.fact.dtype.size(),
        _ => 0,
    };
    Ok(graph.order()?.into_iter().map(bytes).sum())
}
