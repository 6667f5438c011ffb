//! The modules that an exporter has named in a file.

use crate::onnx::proto::ModelProto;
use crate::report::picture::Modules;

/// Where PyTorch's newer exporter writes the modules around a node: `['', 'layer1', 'layer1.0', 'conv2d_1']`, the model first, the node last.
const SCOPES: &str = "pkg.torch.onnx.name_scopes";

/// The path of the module that computes each node and value, such as `layer1.0`, of a file that says so.
pub(super) fn modules(model: &ModelProto) -> Modules {
    let mut paths = Modules::new();
    for node in model.graph.iter().flat_map(|graph| &graph.node) {
        let scopes = node.metadata_props.iter().find(|entry| entry.key == SCOPES);
        if let Some(path) = scopes.and_then(|entry| innermost(&entry.value)) {
            let names = node.output.iter().chain([&node.name]).filter(|name| !name.is_empty());
            paths.extend(names.map(|name| (name.clone(), path.to_owned())));
        }
    }
    paths
}

/// The last module of a list in Python's notation; `None` for the model itself.
fn innermost(scopes: &str) -> Option<&str> {
    let list = scopes.strip_prefix('[')?.strip_suffix(']')?;
    let module = list.rsplit(',').nth(1)?.trim().trim_matches(['\'', '"']);
    (!module.is_empty()).then_some(module)
}

#[cfg(test)]
mod tests {
    use super::innermost;

    #[test]
    fn the_module_is_the_last_before_the_node() {
        assert_eq!(innermost("['', 'blocks.2', 'blocks.2.mlp', 'linear_8']"), Some("blocks.2.mlp"));
        for none in ["['', 'linear']", "['linear']", "[]", "", "linear", "['', 'a'"] {
            assert_eq!(innermost(none), None, "{none}");
        }
    }
}
