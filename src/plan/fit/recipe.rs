//! The way of a graph to its plan. Every command, the advisor (`advise.rs`) and the library go this way.
//!
//! ```text
//! Graph --f16 if asked for--> --passes, fuse unless told otherwise--> whole --chunks if asked for--> --lower, order, place--> Plan
//! ```
//!
//! A graph with a backward computation [computes values again](recompute), under a limit [more of them](limit), between passes and chunks.
//!
//! A recipe has the choices for the graph. The [target](Target) has those for the device: libraries, TF32, streams, threads.

use super::{chunks, limit, recompute};
use crate::decisions::Decisions;
use crate::error::Result;
use crate::graph::Graph;
use crate::pass::{self, Context, Prepared, Recipe, half};
use crate::plan::{self, Compiled, Limits, Plan};
use crate::target::Target;

impl Recipe {
    /// The graph after the passes, not in chunks. It makes its own decisions.
    ///
    /// # Errors
    /// The error of a pass.
    pub fn whole(self, graph: Graph, target: &Target) -> Result<Prepared> {
        self.following(graph, target, Decisions::default())
    }

    /// As [`whole`](Self::whole), with these decisions.
    ///
    /// # Errors
    /// As [`whole`](Self::whole).
    pub fn following(self, mut graph: Graph, target: &Target, decisions: Decisions) -> Result<Prepared> {
        if self.f16 {
            graph.verify()?;
            half::run(&mut graph)?;
        }
        pass::run(graph, &Context { decisions, ..Context::new(target, self) })
    }

    /// The graph that is lowered: after the passes, with values computed again for a backward computation, in chunks if they are asked for.
    ///
    /// # Errors
    /// As [`whole`](Self::whole), and as [`chunks::run`].
    pub fn graph(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Prepared> {
        let mut graph = self.whole(graph, target)?;
        recompute::free(&mut graph, target, self.fuse)?;
        limit::run(&mut graph, target, limits)?;
        chunks::run(&mut graph, target, limits, self.chunks)?;
        Ok(graph)
    }

    /// As [`graph`](Self::graph), for a program that shares memory with others. What is computed again under a limit is a matter of
    /// [all](crate::plan::Fitting).
    ///
    /// # Errors
    /// As [`graph`](Self::graph).
    pub fn program(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Prepared> {
        let mut graph = self.whole(graph, target)?;
        recompute::free(&mut graph, target, self.fuse)?;
        chunks::run(&mut graph, target, limits, self.chunks)?;
        Ok(graph)
    }

    /// The graph's plan.
    ///
    /// # Errors
    /// As [`graph`](Self::graph), and as [`plan`](crate::plan::plan).
    pub fn plan(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Plan> {
        plan::plan(&self.graph(graph, target, limits)?, target, limits)
    }

    /// The graph's plan, with the data of its constants.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn compile(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Compiled> {
        plan::compile(&self.graph(graph, target, limits)?, target, limits)
    }
}
