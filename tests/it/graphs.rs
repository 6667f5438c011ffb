//! The graph files of which goldens are kept and all kernels are compiled.

use plimsoll::Graph;
use plimsoll::internals::onnx;
use std::path::Path;

/// Files in `graphs/` with what their dims are bound to.
pub const GRAPHS: &[(&str, &[(&str, usize)])] = &[
    ("attention.onnxtxt", &[("batch", 2), ("sequence", 16)]),
    ("digits.onnx", &[("batch", 8)]),
    ("mlp.onnxtxt", &[("batch", 8)]),
    ("residual.onnxtxt", &[("batch", 2), ("height", 8), ("width", 8)]),
];

/// One of them, imported.
pub fn import(file: &str, dims: &[(&str, usize)]) -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(file);
    let dims: Vec<_> = dims.iter().map(|&(name, extent)| (name.to_owned(), extent)).collect();
    onnx::import(&onnx::load(&path).expect("a graph"), &dims).expect("it is imported")
}
