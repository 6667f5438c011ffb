//! The passes of a recipe.
//!
//! A recipe has the choices for the graph. The [target](Target) has those for the device: libraries, TF32, streams, threads.

use crate::decisions::Decisions;
use crate::error::Result;
use crate::graph::Graph;
use crate::pass::{self, Context, Prepared, Recipe, half};
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
}
