//! What a graph's file says about several devices, as it stands there: which mesh it is of is found when there is one.

use std::collections::HashSet;

/// The annotations of a file.
#[derive(Clone, Debug, Default)]
pub struct Annotations {
    /// The configurations, with the number of their devices.
    pub configurations: Vec<(String, i64)>,
    /// What is split, at each node that reads or makes it.
    pub splits: Vec<Annotated>,
    /// The stages that nodes are put in: a node, a configuration, and the number of the stage.
    pub stages: Vec<(String, String, i64)>,
    /// What nodes make.
    pub made: HashSet<String>,
    /// The first node of a function or of the body of another node that has annotations.
    pub inner: Option<String>,
}

/// How a tensor is split, at one node.
#[derive(Clone, Debug)]
pub struct Annotated {
    /// The node.
    pub node: String,
    /// The configuration.
    pub configuration: String,
    /// The tensor.
    pub tensor: String,
    /// Its axes, from the last on if they are below 0.
    pub axes: Vec<Axis>,
    /// The devices that have each shard; none if they are not told.
    pub devices: Vec<Vec<i64>>,
}

/// An axis of a tensor, and how it is split.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Its number.
    pub axis: i64,
    /// The shards, with the extent if it is told: several of them are of axes that were fused into this one.
    pub shards: Vec<(i64, Option<i64>)>,
}

impl Annotated {
    /// True if the tensor is not whole on all devices.
    pub fn is_split(&self) -> bool {
        !self.axes.iter().all(|of| matches!(of.shards[..], [(1, _)]))
    }
}
