//! What is made of a graph on its way to a plan. Every command, the [advisor](crate::advise), and the library go this way.
//!
//! ```text
//! Graph --f16 if asked for--> --passes, fuse unless told otherwise--> whole --chunks if asked for--> --lower, order, place--> Plan
//! ```
//!
//! A recipe says what is asked of the graph. What is asked of the device is the [target](Target)'s: its libraries, TF32, lanes, threads.

use super::chunks;
use crate::error::Result;
use crate::graph::Graph;
use crate::pass::{self, half};
use crate::plan::{self, Compiled, Limits, Plan};
use crate::target::Target;

/// How a graph is compiled, whatever the device: types, fusion, chunks. [`Recipe::plan`] plans it without a device.
///
/// ```
/// use plimsoll::{Graph, Limits, Recipe, Target};
/// let graph = Graph::from_path("graphs/mlp.onnxtxt", &[("batch", 64)])?;
/// let plan = Recipe::default().plan(graph, &Target::cuda(), &Limits { memory: Some(2 << 30) })?;
/// assert_eq!(plan.bytes(), plan.summary.planned_bytes);
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// True to store `f32` values as `f16` inside; inputs and outputs stay `f32`.
    pub f16: bool,
    /// True to compile neighbouring operators to one kernel.
    pub fuse: bool,
    /// Number of chunks of the batch in which the largest activations are computed; 1 computes them whole.
    pub chunks: usize,
}

impl Default for Recipe {
    fn default() -> Recipe {
        Recipe { f16: false, fuse: true, chunks: 1 }
    }
}

impl Recipe {
    /// The graph after the passes, none of it in chunks.
    ///
    /// # Errors
    /// What a pass finds; that the target stores no `f16`, where it is asked for.
    pub fn whole(&self, mut graph: Graph, target: &Target) -> Result<Graph> {
        if self.f16 {
            graph.verify()?;
            half::run(&mut graph, target)?;
        }
        pass::run(&mut graph, target, self.fuse)?;
        Ok(graph)
    }

    /// The graph as it is lowered.
    ///
    /// # Errors
    /// As [`whole`](Self::whole), and as [`chunks::run`].
    pub fn graph(&self, graph: Graph, target: &Target, limits: &Limits) -> Result<Graph> {
        let mut graph = self.whole(graph, target)?;
        chunks::run(&mut graph, target, limits, self.chunks)?;
        Ok(graph)
    }

    /// The graph's plan.
    ///
    /// # Errors
    /// As [`graph`](Self::graph), and as [`plan`](crate::plan::plan).
    pub fn plan(&self, graph: Graph, target: &Target, limits: &Limits) -> Result<Plan> {
        plan::plan(&self.graph(graph, target, limits)?, target, limits)
    }

    /// The graph's plan, with the data of its constants.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn compile(&self, graph: Graph, target: &Target, limits: &Limits) -> Result<Compiled> {
        plan::compile(&self.graph(graph, target, limits)?, target, limits)
    }
}
