//! What the initializers of a file are to a training: its parameters, or floats that a program only keeps beside them.
//!
//! PyTorch's exporter says it in the metadata of its values. Other files say it by names and readers alone, which leaves a doubt.

use super::Model;
use super::proto::*;
use super::weights::{is_float, is_weight};
use std::collections::{HashMap, HashSet};

/// What an initializer of floats is to a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It is trained.
    Parameter,
    /// A running mean or variance of a BatchNormalization: a training updates it, but not by a gradient.
    Statistic,
    /// The exporter says that no optimizer changes it.
    Buffer,
    /// It is trained, but has no name of a weight and is read by nothing that has weights.
    Doubtful,
}

impl Role {
    /// The role in a word, as tables have it.
    pub fn word(self) -> &'static str {
        match self {
            Role::Parameter => "parameter",
            Role::Statistic => "statistic",
            Role::Buffer => "buffer",
            Role::Doubtful => "a buffer?",
        }
    }
}

/// An initializer of floats, with axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Its name.
    pub name: String,
    /// What it is to a training.
    pub role: Role,
    /// The name of the file's initializer that it is a copy of, if it is one.
    pub of: Option<String>,
}

/// The key of a value's metadata under which PyTorch's exporter says what it is.
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
/// The key of a node's metadata under which the exporter's optimizer names the rule that made it.
const RULE: &str = "pkg.onnxscript.rewriter.rule_name";
/// How its rules begin that fold a norm into the node before it.
const FOLDS_A_NORM: &str = "FuseBatchNorm";

/// The last words of the names of weights.
const OF_WEIGHTS: &[&str] = &[
    "weight",
    "weights",
    "bias",
    "biases",
    "gamma",
    "beta",
    "scale",
    "kernel",
    "alpha",
    "w",
    "b",
    "embedding",
    "embeddings",
    "embed",
    "token",
    "gain",
];
/// Words in the names of floats that programs keep.
const OF_BUFFERS: &[&str] = &[
    "mean",
    "std",
    "var",
    "mel",
    "filters",
    "filterbank",
    "fb",
    "window",
    "freq",
    "freqs",
    "basis",
    "mask",
    "anchors",
    "grid",
    "const",
    "constant",
    "buffer",
    "dct",
];

/// Operators that have weights, and the first operand that is one.
const READERS: &[(&str, usize)] = &[
    ("MatMul", 0),
    ("Gemm", 0),
    ("FusedMatMul", 0),
    ("FusedGemm", 0),
    ("MatMulNBits", 1),
    ("MatMulBnb4", 1),
    ("MoE", 2),
    ("QMoE", 2),
    ("DequantizeLinear", 0),
    ("GatherBlockQuantized", 0),
    ("Einsum", 0),
    ("Conv", 1),
    ("FusedConv", 1),
    ("ConvTranspose", 1),
    ("LSTM", 1),
    ("DynamicQuantizeLSTM", 1),
    ("GRU", 1),
    ("RNN", 1),
    ("PRelu", 1),
    ("Gather", 0),
    ("Attention", 1),
    ("BatchNormalization", 1),
    ("InstanceNormalization", 1),
    ("GroupNormalization", 1),
    ("LayerNormalization", 1),
    ("RMSNormalization", 1),
    ("SimplifiedLayerNormalization", 1),
    ("SkipLayerNormalization", 2),
    ("SkipSimplifiedLayerNormalization", 2),
];

/// Operators that hand the elements of a weight on.
pub const HAND_ON: &[&str] = &["Identity", "Transpose", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"];

/// The words of a name: parts of letters, in lower case.
fn words(name: &str) -> impl DoubleEndedIterator<Item = String> {
    name.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// The metadata of a value or a node under a key.
fn noted<'a>(metadata: &'a [StringStringEntryProto], key: &str) -> Option<&'a str> {
    metadata.iter().find(|entry| entry.key == key).map(|entry| &entry.value[..])
}

impl Model {
    /// The initializers of floats with axes, in the order of the file.
    pub fn weights(&self) -> Vec<Weight> {
        let Some(graph) = &self.proto.graph else { return Vec::new() };
        let values = graph.value_info.iter().chain(&graph.input);
        let kinds: HashMap<&str, &str> =
            values.filter_map(|value| Some((&value.name[..], noted(&value.metadata_props, KIND)?))).collect();
        let norms = graph.node.iter().filter(|node| node.op_type == "BatchNormalization");
        let statistics: HashSet<&str> = norms.flat_map(|node| node.input.iter().skip(3)).map(|s| &s[..]).collect();
        let read = read_as_weights(graph);
        let role = |name: &str| match kinds.get(name) {
            _ if statistics.contains(name) => Role::Statistic,
            Some(&"PARAMETER") => Role::Parameter,
            Some(_) => Role::Buffer,
            None if is_doubtful(name, read.contains(name)) => Role::Doubtful,
            None => Role::Parameter,
        };
        // A number without axes is mostly one that the program wrote out.
        let is_trained = |tensor: &&TensorProto| {
            let name = &tensor.name[..];
            is_weight(tensor) || is_float(tensor) && kinds.get(name) == Some(&"PARAMETER")
        };
        let weights = graph.initializer.iter().filter(is_trained);
        let of = |name: &str| self.copies.iter().find(|(copy, _)| copy == name).map(|(_, of)| of.clone());
        weights
            .map(|tensor| Weight { name: tensor.name.clone(), role: role(&tensor.name), of: of(&tensor.name) })
            .collect()
    }

    /// What tells that an exporter has folded the norms of a network into its convolutions, so that a training of the file would be one of
    /// another network; `None` if nothing does.
    pub fn folded_norms(&self) -> Option<String> {
        let nodes = &self.proto.graph.as_ref()?.node;
        let advice = "To train it, export it with its norms: torch.onnx.export(.., dynamo=True, optimize=False)";
        let is_folded =
            |node: &&NodeProto| noted(&node.metadata_props, RULE).is_some_and(|rule| rule.starts_with(FOLDS_A_NORM));
        let folded = nodes.iter().filter(is_folded).count();
        if folded > 0 {
            let norms = crate::figures::count(folded as u64, "norm");
            return Some(format!("The exporter has folded {norms} into the weights of other nodes. {advice}"));
        }
        let of = |node: &&NodeProto, op: &str| node.op_type == op;
        let is_biased = |node: &&NodeProto| of(node, "Conv") && node.input.get(2).is_some_and(|bias| !bias.is_empty());
        let (all, biased) = (nodes.iter().filter(|n| of(n, "Conv")), nodes.iter().filter(is_biased).count());
        let has_norms = nodes.iter().any(|node| node.op_type.ends_with("Normalization"));
        (!has_norms && biased > 0 && biased == all.count()).then(|| {
            let convolutions = crate::figures::count(biased as u64, "convolution");
            format!("{convolutions} with a bias and no norm: exported with the norms folded in? {advice}")
        })
    }
}

/// The names of values whose elements an operator reads as its weights, directly or by way of a view.
fn read_as_weights(graph: &GraphProto) -> HashSet<&str> {
    let mut read = HashSet::new();
    // A view stands before its readers.
    for node in graph.node.iter().rev() {
        let first = READERS.iter().find(|(op, _)| *op == node.op_type).map(|(_, first)| *first);
        let hands_on = HAND_ON.contains(&&node.op_type[..]) && node.output.iter().any(|o| read.contains(&o[..]));
        let inputs = node.input.iter().map(|name| &name[..]);
        match first {
            Some(first) => read.extend(inputs.skip(first)),
            None if hands_on => read.extend(inputs.take(1)),
            None => {}
        }
    }
    read
}

/// True if an initializer may be no weight, by its name and by its readers.
fn is_doubtful(name: &str, is_read: bool) -> bool {
    if words(name).next_back().is_some_and(|last| OF_WEIGHTS.contains(&&last[..])) {
        return false;
    }
    !is_read || words(name).any(|word| OF_BUFFERS.contains(&&word[..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::text;
    use std::path::Path;

    /// A model of `x`, with four columns, by weights of zeros.
    fn model(weights: &[(&str, &[usize])], nodes: &str) -> Model {
        let zeros = |shape: &[usize]| vec!["0"; shape.iter().product()].join(", ");
        let weights = weights.iter().map(|(name, shape)| format!("float{shape:?} {name} = {{{}}}", zeros(shape)));
        let weights = weights.collect::<Vec<_>>().join(", ");
        let head = "<ir_version: 10, opset_import: [\"\" : 20]> g (float[n, 4] x) => (y)";
        let source = format!("{head} <{weights}> {{ {nodes} }}");
        Model::new(text::parse(&source, Path::new("text")).expect("it parses"))
    }

    #[test]
    fn buffers_are_told_from_weights_by_names_and_readers() {
        let weights: [(&str, &[usize]); 7] = [
            ("mean", &[4]),
            ("pixel_std", &[4]),
            ("stem", &[4, 3]),
            ("mel_filters", &[3, 5]),
            ("offset", &[5]),
            ("gamma", &[5]),
            ("head_weight", &[2, 5]),
        ];
        let nodes = "a = Sub (x, mean)  b = Div (a, pixel_std)  c = MatMul (b, stem)  d = MatMul (c, mel_filters)
            e = Add (d, offset)  f = Mul (e, gamma)  t = Transpose (head_weight)  y = MatMul (f, t)";
        let model = model(&weights, nodes);
        let roles: Vec<_> = model.weights().into_iter().map(|weight| (weight.name, weight.role)).collect();
        let of = |role: Role| {
            roles.iter().filter(|(_, own)| *own == role).map(|(name, _)| &name[..]).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(Role::Doubtful), "mean pixel_std mel_filters offset");
        assert_eq!(of(Role::Parameter), "stem gamma head_weight");
    }

    #[test]
    fn the_exporter_knows_better() {
        let mut model = model(&[("weight", &[4]), ("mean", &[4])], "a = Sub (x, mean)  y = Mul (a, weight)");
        let graph = model.proto.graph.as_mut().expect("it has a graph");
        for (name, kind) in [("weight", "BUFFER"), ("mean", "PARAMETER")] {
            let metadata_props = vec![StringStringEntryProto { key: KIND.into(), value: kind.into() }];
            graph.value_info.push(ValueInfoProto { name: name.into(), metadata_props, ..Default::default() });
        }
        let roles: Vec<_> = model.weights().into_iter().map(|weight| weight.role).collect();
        assert_eq!(roles, [Role::Buffer, Role::Parameter]);
    }

    #[test]
    fn folded_norms_are_asked_about() {
        let model = |body: &str| {
            let source = format!(
                "<ir_version: 10, opset_import: [\"\" : 20]>
                g (float[1, 2, 8, 8] x) => (y) <float[2, 2, 1, 1] w, float[2] b> {{ {body} }}"
            );
            Model::new(text::parse(&source, Path::new("text")).expect("it parses"))
        };
        let mut biased = model("a = Conv (x, w, b)  y = Conv (a, w, b)");
        assert!(biased.folded_norms().is_some_and(|text| text.starts_with("2 convolutions with a bias and no norm")));
        assert_eq!(model("a = Conv (x, w)  y = Conv (a, w, b)").folded_norms(), None);
        assert_eq!(model("a = Conv (x, w, b)  y = InstanceNormalization (a, b, b)").folded_norms(), None);
        let node = &mut biased.proto.graph.as_mut().expect("it has a graph").node[0];
        let value = "FuseBatchNormIntoConv".to_owned();
        node.metadata_props.push(StringStringEntryProto { key: RULE.into(), value });
        assert!(biased.folded_norms().is_some_and(|text| text.starts_with("The exporter has folded 1 norm into")));
    }
}
