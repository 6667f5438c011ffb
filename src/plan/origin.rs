//! Where a plan comes from.

use super::{Dim, Recipe};
use serde::{Deserialize, Serialize};

/// The files that a plan was made of, and how. With these files, the data of the plan's constants is found again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The file of each program.
    pub models: Vec<Model>,
    /// How the graphs were compiled.
    pub recipe: Recipe,
    /// The most bytes that the plan was to take. What is computed in chunks, or again, depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
}

/// The model's file that a program was made of, and what shaped its graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The hash of the file. Of external data it covers names, places and sizes, not elements: planning needs none of them, and its result is the
    /// same on every machine. These elements may differ when the plan runs.
    pub content: String,
    /// The extents that its named dims were given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dims: Vec<Dim>,
    /// Dims that follow from others, and the sums that they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ties: Vec<(String, String)>,
    /// Inputs and outputs that became states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state: Vec<(String, String)>,
    /// Inputs with a default that runs give all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<String>,
    /// True for the training step of the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub training: bool,
    /// The outputs that are computed; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<String>,
}
