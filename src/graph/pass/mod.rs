//! Passes: functions from graphs to graphs. [`Graph::verify`] checks the result of each. Behind the passes, fusion groups the nodes that
//! become one kernel. Lowering takes a [`Prepared`] graph.

use crate::decisions::Decisions;
use crate::error::{Error, Result};
use crate::graph::{Decomposer, Graph};
use crate::kernel::tuned::Tuned;
use crate::op::{Attrs, Build, NodeId, ValueId};
use crate::target::Target;
use offload::Offload;
use recompute::Recompute;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

mod align;

pub mod attention;
mod bind;
mod caches;
pub mod chunk;
mod cut;
mod decompose;
pub mod duplicate_into_readers;
mod elide_rounding;
mod filters;
mod fold;
mod fuse;
pub mod group;
pub mod half;
mod horizontal;
mod indexed;
mod indexes;
mod int8;
mod loops;
mod masks;
mod merge;
pub mod offload;
mod packed;
mod quantize;
mod recipe;
pub mod recompute;
mod rotary;
mod scale;
mod scores;
pub mod shard;
mod simplify;
mod sink_upcasts;
mod split_reduction;
mod transposed;
mod views;
mod windows;

pub use decompose::decompose;
pub use fold::{fold_node, folded_constants};
pub use group::{Group, GroupKind, Groups};
pub use indexes::{Indexes, Use};
pub use quantize::{Quantize, dequantized_from, quantized};
pub use views::even_gather;

/// The options of compilation that do not depend on the device: types, fusion, chunks. `Planning::plan` plans without a device.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
/// use plimsoll::{Graph, Limits, Planning, Recipe, Target};
/// let graph = Graph::from_path("graphs/mlp.onnxtxt", &[("batch", 64)])?;
/// let plan = Recipe::default().plan(graph, &Target::cuda(), &Limits { memory: Some(2 << 30) })?;
/// assert_eq!(plan.bytes(), plan.programs[0].summary.planned_bytes);
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// True to store `f32` values as `f16` inside; inputs and outputs stay `f32`.
    pub f16: bool,
    /// True to compile neighbouring operators to one kernel.
    pub fuse: bool,
    /// Number of chunks of the batch in which the largest activations are computed; 1 computes them whole.
    pub chunks: usize,
    /// The numbers of few bits that weights of products become, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize: Option<Quantize>,
    /// True to hold caches, states that rows are written to, in 8 bits with a scale for each row.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub int8_caches: bool,
    /// What comes first where memory and speed pull apart.
    #[serde(default, skip_serializing_if = "Prefer::is_balance")]
    pub prefer: Prefer,
    /// What lies in the memory of the host.
    #[serde(default, skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
}

/// What comes first where memory and speed pull apart: streams, copies, workspaces, recomputation and measured schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prefer {
    /// The smallest plan.
    Memory,
    /// Speed, as long as it takes little memory.
    #[default]
    Balance,
    /// Speed, as long as the plan fits its limit.
    Speed,
}

impl Prefer {
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_balance(&self) -> bool {
        *self == Prefer::Balance
    }
}

impl Default for Recipe {
    fn default() -> Recipe {
        Recipe {
            f16: false,
            fuse: true,
            chunks: 1,
            quantize: None,
            int8_caches: false,
            prefer: Prefer::Balance,
            offload: Offload::None,
        }
    }
}

/// The context of a pass: all that it reads beside the graph.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// The device that the graph is for.
    pub target: &'a Target,
    /// The options of compilation.
    pub recipe: Recipe,
    /// The decisions that follow from extents.
    pub decisions: Decisions,
}

impl<'a> Context<'a> {
    /// The context of a graph that is compiled alone, and decides for itself.
    pub fn new(target: &'a Target, recipe: Recipe) -> Context<'a> {
        Context { target, recipe, decisions: Decisions::default() }
    }

    /// Adds a node to a graph. A node that depends on constants alone becomes a constant at once.
    fn add(
        &self,
        graph: &mut Graph,
        name: &str,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: Attrs,
    ) -> Result<ValueId> {
        let mut build = Decomposer::new(graph, name.to_owned());
        let value = build.node(op, inputs, attrs).map_err(Error::graph)?.swap_remove(0);
        Ok(fold_node(graph, value.node, &self.decisions)?.map_or(value, |made| made[0]))
    }
}

/// A graph whose passes have run, as lowering takes it.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// The graph.
    pub graph: Graph,
    /// The nodes that become one kernel.
    pub groups: Groups,
    /// The inputs and states whose elements are indices, or lengths.
    pub indexes: HashMap<ValueId, Vec<Indexes>>,
    /// The decisions, which lowering continues to make or to follow.
    pub decisions: Decisions,
    /// What comes first where memory and speed pull apart.
    pub prefer: Prefer,
    /// What lies in the memory of the host.
    pub offload: Offload,
    /// True to run one step after another, unless speed comes first.
    pub sequential: bool,
    /// Measured schedules, which lowering takes where they are legal.
    pub tuned: Option<Arc<Tuned>>,
    /// The nodes that are computed again, each with its original.
    pub copies: HashMap<NodeId, NodeId>,
    /// Their work.
    pub recompute: Option<Recompute>,
}

impl Prepared {
    /// True if a node belongs to the backward computation, or to a kernel that does.
    pub fn is_backward(&self, node: NodeId) -> bool {
        self.graph.is_backward(self.groups.of(node).map_or(node, |group| group.sink))
    }
}

impl From<Graph> for Prepared {
    /// A graph in which each node is a kernel of its own.
    fn from(graph: Graph) -> Prepared {
        Prepared { graph, ..Prepared::default() }
    }
}

/// A pass.
pub type Pass = fn(&mut Graph, &Context) -> Result<()>;

/// When a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always.
    Always,
    /// Only if neighbouring nodes become one kernel. Without that, the pass makes the graph slower.
    Fused,
}

/// The pipeline, in order.
pub const PASSES: &[(&str, Pass, When)] = &[
    // What writes rows to caches is decomposed below.
    ("caches", caches::run, When::Always),
    // Weights that are folded to floats are bytes no more.
    ("packed", packed::run, When::Always),
    ("int8", int8::run, When::Always),
    ("fold", fold::run, When::Always),
    ("simplify", simplify::run, When::Always),
    ("filters", filters::run, When::Always),
    ("decompose", decompose::run, When::Always),
    ("windows", windows::run, When::Always),
    ("decompose", decompose::run, When::Always),
    ("indexed", indexed::run, When::Always),
    ("bind", bind::run, When::Always),
    ("fold", fold::run, When::Always),
    ("transposed", transposed::run, When::Always),
    ("rotary", rotary::run, When::Always),
    ("simplify", simplify::run, When::Always),
    ("loops", loops::run, When::Always),
    ("split_reduction", split_reduction::run, When::Always),
    // Without fusion a kernel of its own would scale the scores, which are more than the queries.
    ("scale", scale::run, When::Fused),
    ("views", views::run, When::Always),
    ("merge", merge::run, When::Always),
    // Without fusion each would be a kernel of its own, over the scores.
    ("masks", masks::run, When::Fused),
    ("horizontal", horizontal::run, When::Always),
    ("align", align::run, When::Always),
    ("elide_rounding", elide_rounding::run, When::Always),
    ("sink_upcasts", sink_upcasts::run, When::Fused),
    // Without fusion each copy would be stored.
    ("scores", scores::run, When::Fused),
    // Constants are as kernels read them.
    ("offload", offload::run, When::Always),
];

/// Runs the pipeline, then groups the nodes that become one kernel. Without fusion only the passes that [always](When::Always) run do, and
/// there are no groups.
///
/// # Errors
/// The first error of a pass, or of the verification after it.
pub fn run(mut graph: Graph, context: &Context) -> Result<Prepared> {
    graph.verify()?;
    let before = graph.constant_bytes();
    let mut indexes = None;
    if let Some(quantize) = context.recipe.quantize {
        quantize::check(&graph, quantize)?;
    }
    for (name, pass, _) in PASSES.iter().filter(|(.., when)| context.recipe.fuse || *when == When::Always) {
        let span = tracing::debug_span!("pass", name).entered();
        pass(&mut graph, context)?;
        graph.verify()?;
        // Behind the first pass that folds, what is added to indices is a constant. Later ones may add other inputs to the nodes that take
        // them, or turn these nodes into views.
        if indexes.is_none() && *name == "fold" {
            indexes = Some(indexes::find(&mut graph)?);
        }
        tracing::debug!(nodes = graph.len(), "done");
        drop(span);
    }
    let after = graph.constant_bytes();
    if after > before.saturating_add(before / 4).max(MENTIONED) {
        tracing::info!("constants of {before} bytes are unpacked to {after}");
    }
    Ok(Prepared { indexes: indexes.unwrap_or_default(), ..group(graph, context)? })
}

/// Groups the nodes of a graph whose passes have run, if the recipe fuses.
///
/// # Errors
/// When the graph has a cycle.
pub fn group(graph: Graph, context: &Context) -> Result<Prepared> {
    let groups = if context.recipe.fuse { fuse::run(&graph, context)? } else { Groups::default() };
    // A step of training has activations of a whole batch, which fill the device one kernel after another.
    let (Recipe { prefer, offload, .. }, sequential) = (context.recipe, graph.has_backward());
    Ok(Prepared { groups, prefer, offload, sequential, decisions: context.decisions.clone(), ..Prepared::from(graph) })
}

/// Groups the nodes of a graph anew, after nodes were added.
///
/// # Errors
/// When the graph has a cycle.
pub fn regroup(prepared: &mut Prepared, target: &Target, fuse: bool) -> Result<()> {
    if fuse {
        let context = Context { decisions: prepared.decisions.clone(), ..Context::new(target, Recipe::default()) };
        prepared.groups = fuse::run(&prepared.graph, &context)?;
    }
    Ok(())
}

/// Constants that grow to at most this many bytes are not logged.
const MENTIONED: u64 = 1 << 20;
