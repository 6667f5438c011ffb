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

/// Of which graphs a pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Of all.
    Always,
    /// Of those in which neighbouring nodes become one kernel: what it makes is worse where they stay apart.
    Fused,
}

/// The pipeline, in order.
pub const PASSES: &[(&str, Pass, When)] = &[
    ("indexes", indexes::run, When::Always),
    ("fold", fold::run, When::Always),
    ("simplify", simplify::run, When::Always),
    ("decompose", decompose::run, When::Always),
    ("bind", bind::run, When::Always),
    ("fold", fold::run, When::Always),
    ("turn", turn::run, When::Always),
    ("simplify", simplify::run, When::Always),
    // Nodes that stay apart would scale the scores, which are more than the queries.
    ("scale", scale::run, When::Fused),
    ("views", views::run, When::Always),
    ("merge", merge::run, When::Always),
    ("horizontal", horizontal::run, When::Always),
    ("round", round::run, When::Always),
    ("fuse", fuse::run, When::Fused),
];

/// Runs the pipeline; without fusion, what is [always](When::Always) of it.
///
/// # Errors
/// What a pass or the verification after it finds.
pub fn run(graph: &mut Graph, target: &Target, fuse: bool) -> Result<()> {
    graph.verify()?;
    let before = constant_bytes(graph)?;
    for (name, pass, _) in PASSES.iter().filter(|(.., when)| fuse || *when == When::Always) {
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
