//! Reads and writes ONNX files. No other module knows protobuf.
//!
//! [`load`] reads a `.onnx` or `.onnxtxt` file into a [`Model`]. [`import`] turns a model into a [`Graph`]. Operators
//! have ONNX's names and meanings throughout the crate, so it is a loop over nodes. An operator is defined by its row of the
//! [op table](crate::ops), and nowhere here.

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::graph::Graph;
use crate::op::{Attrs, Fact};
use crate::ops;
use crate::tensor::Tensor;
use bytes::Bytes;
use prost::Message;
use proto::{GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

mod annotations;
mod defaults;
mod dims;
mod dynamic_cache;
mod export;
mod import;
mod inspect;
pub mod proto;
mod roles;
mod state;
mod symbolic;
pub mod text;
mod training;
mod weigh;
mod weights;
mod write;

use import::Open;

pub use annotations::{Configuration, annotate, shard};
pub use export::{export, export_step};
pub use inspect::{Declared, Initializer, Inspected};
pub use roles::HAND_ON;
pub use roles::{Role, Weight};
pub use state::likely_states;
pub use write::{data_file, encode, write};

/// A decoded ONNX file and its path.
#[derive(Clone, Debug)]
pub struct Model {
    /// The decoded messages. Weights stay in the mapped file.
    pub proto: ModelProto,
    /// The file that errors name. External data lies in its folder.
    path: Option<PathBuf>,
    /// Inputs and outputs that become states, or patterns of them.
    states: Vec<(String, String)>,
    /// States of which the model has the input alone, or the output alone. Another program has the other.
    shared: Vec<(String, String)>,
    /// The dim along which states grow from run to run.
    growth: Option<dynamic_cache::Growth>,
    /// The outputs to compute; `None` for all.
    outputs: Option<Vec<String>>,
    /// The elements that states begin with, by name.
    first: Vec<(String, Tensor)>,
    /// Defaults of inputs that are inputs of the graph all the same. States begin with them.
    defaults: Vec<TensorProto>,
    /// Elements of inputs, which those that shape the computation are bound to.
    values: Vec<(String, Tensor)>,
    /// The training step, if the model has taken it.
    training: Option<training::Training>,
    /// Initializers that were one in the file: their names, and that of the one.
    copies: Vec<(String, String)>,
    /// True if the initializers are to be trained: nodes that read nothing else are not folded.
    trains: bool,
}

/// Reads a model: text from `.onnxtxt`, protobuf from `.onnx`. Any other name is judged by its content.
///
/// Weights are mapped, not read. The file must not change while the model, or a tensor of it, is in use.
///
/// Files with external data may be missing, because planning needs no weights. Reading the elements of such a tensor then
/// fails with the name of the missing file.
///
/// # Errors
/// The file is missing, is not a model, or would take more than 64 MiB and four times its size while it is read, packed numbers
/// aside; or a file with external data
/// is too short or outside the model's folder.
pub fn load(path: &Path) -> Result<Model> {
    let model = Model { path: Some(path.to_owned()), ..Model::new(read(map(path)?, path)?) };
    model.check().map_err(|e| e.in_file(path))?;
    Ok(model)
}

/// Reads a model from memory as [`load`] does from a file. Its external data lies in the current folder.
///
/// # Errors
/// As [`load`]. They name `(memory)` in place of a file.
pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Model> {
    let path = Path::new("(memory)");
    let bytes = bytes.into();
    ensure(!bytes.is_empty(), || Error::File {
        path: path.to_owned(),
        what: "there are no bytes".into(),
        source: None,
    })?;
    let model = Model::new(read(bytes, path)?);
    model.check().map_err(|e| e.in_file(path))?;
    Ok(model)
}

/// Reads a model from memory as [`load`] does from a file of this name, which need not be there.
///
/// # Errors
/// As [`load`].
pub fn from_bytes_of(path: &Path, bytes: Bytes) -> Result<Model> {
    ensure(!bytes.is_empty(), || Error::File {
        path: path.to_owned(),
        what: "the file is empty".into(),
        source: None,
    })?;
    let model = Model { path: Some(path.to_owned()), ..Model::new(read(bytes, path)?) };
    model.check().map_err(|e| e.in_file(path))?;
    Ok(model)
}

/// The messages of a model, of a file of this name.
fn read(bytes: Bytes, path: &Path) -> Result<ModelProto> {
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    if let Some(what) = other_format(extension, &bytes) {
        return Err(Error::File { path: path.to_owned(), what, source: None });
    }
    let is_text = match extension {
        "onnx" => false,
        "onnxtxt" => true,
        // Protobuf holds control characters, its tags and lengths; text holds none.
        _ => !bytes.iter().take(1024).any(|b| b.is_ascii_control() && !b.is_ascii_whitespace()),
    };
    let fail = |expected: &str, cause: Box<dyn std::error::Error + Send + Sync>| Error::File {
        path: path.to_owned(),
        what: format!("{expected}: {cause}"),
        source: Some(io::Error::new(ErrorKind::InvalidData, cause)),
    };
    if is_text {
        let text = std::str::from_utf8(&bytes).map_err(|e| fail("expected text", e.into()))?;
        text::parse(text, path)
    } else {
        if !weigh::fits::<ModelProto>(&bytes, weigh::most(bytes.len())) {
            return Err(Error::File { path: path.to_owned(), what: weigh::refusal(bytes.len()), source: None });
        }
        ModelProto::decode(bytes).map_err(|e| fail("not an ONNX model, or only a part of one", e.into()))
    }
}

/// What a file is that is no model of ONNX, by its name or its first bytes, and how to come by one.
fn other_format(extension: &str, bytes: &[u8]) -> Option<String> {
    const WEIGHTS: &str = "it has weights alone, and no graph: write one from PyTorch by torch.onnx.export(model, (example,), \"model.onnx\", dynamo=True)";
    let start = &bytes[..bytes.len().min(256)];
    let has = |words: &[u8]| start.windows(words.len()).any(|part| part == words);
    let text = start.trim_ascii_start().to_ascii_lowercase();
    let what = if ["pt", "pth", "safetensors"].contains(&extension) {
        WEIGHTS
    } else if start.starts_with(b"PK\x03\x04") {
        // PyTorch's files are archives, too, whatever their names are.
        let archive = "it is a zip archive: expected the model that is in it";
        return Some(if has(b"data.pkl") {
            WEIGHTS.to_owned()
        } else {
            format!("{archive}; or, if PyTorch wrote it, {WEIGHTS}")
        });
    } else if start.get(4..8) == Some(b"TFL3") {
        "it is a model of TensorFlow Lite: write one of ONNX from it, as tf2onnx does"
    } else if start.starts_with(b"GGUF") {
        "it is a GGUF file: it has weights for llama.cpp, and no graph; export the model that it was made of, as Hugging Face's optimum does"
    } else if text.starts_with(b"<!doctype html") || text.starts_with(b"<html") {
        "it is a web page: expected the model itself; download it by the page's link to the raw file"
    } else if start.starts_with(b"version https://git-lfs") {
        "it is a pointer of Git LFS, which stands for the model: `git lfs pull` brings the file"
    } else {
        return None;
    };
    Some(what.to_owned())
}

/// Reads a model as [`load`] does, with the elements that a safetensors file has for its initializers, if one is given.
///
/// # Errors
/// As [`load`] and [`Model::with_elements_of`].
pub fn load_weighed(path: &Path, weights: Option<&Path>) -> Result<Model> {
    let model = load(path)?;
    match weights {
        Some(weights) => model.with_elements_of(weights),
        None => Ok(model),
    }
}

/// Imports a model as a graph and binds its dims.
///
/// A named dim is bound by its name, an unnamed dim of an input as `input.axis`. A dim that an input writes as a sum or
/// product of other dims (`past + 1`) may be left out.
///
/// # Errors
/// The first node that breaks a rule of ONNX or of the op table; all operators without a row, in one message;
/// dims that are not bound, or that the graph does not have.
pub fn import(model: &Model, dims: &[(String, usize)]) -> Result<Graph> {
    made(model, dims, &Mutex::default()).map_err(|e| model.name_file(e))
}

/// The graph for these extents, by what was `opened` for others, if that was.
fn made(model: &Model, dims: &[(String, usize)], opened: &Mutex<Option<Arc<Open>>>) -> Result<Graph> {
    let mut graph = match &model.growth {
        Some(growth) => dynamic_cache::import(model, growth, dims)?,
        None => {
            let mut graph = dynamic_cache::data_dependent::import(model, dims, opened)?;
            model.pair(&mut graph)?;
            graph
        }
    };
    graph.keep_outputs(model.outputs.as_deref().unwrap_or_default())?;
    model.begin(&mut graph)?;
    graph.annotations = annotations::read(&model.proto).map(Arc::new);
    Ok(graph)
}

/// A model whose dims stay open. It is imported for the first extents that are asked for; the graphs for others follow from that import, where
/// they can. A model with caches that grow, or with nodes that find as many elements as a run decides, is imported anew for each set of
/// extents.
#[derive(Debug)]
pub struct Symbolic {
    model: Model,
    opened: Mutex<Option<Arc<Open>>>,
}

impl Symbolic {
    /// Imports nothing yet.
    pub fn new(model: Model) -> Symbolic {
        Symbolic { model, opened: Mutex::default() }
    }

    /// The graph for these extents.
    ///
    /// # Errors
    /// As [`import()`].
    pub fn at(&self, dims: &[(String, usize)]) -> Result<Graph> {
        made(&self.model, dims, &self.opened).map_err(|e| self.model.name_file(e))
    }
}

impl Graph {
    /// Reads a graph file (`.onnx` or `.onnxtxt`) and binds its named dims. Weights are mapped, not read: the file must stay as it is for as
    /// long as the graph is in use.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// let graph = plimsoll::Graph::from_path("graphs/mlp.onnxtxt", &[("batch", 8)])?;
    /// assert_eq!(graph.fact(graph.inputs()[0]).to_string(), "f32[8,784]");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the file is not a graph. [`Error::Unbound`] when a dim has no extent.
    pub fn from_path(path: impl AsRef<Path>, dims: &[(&str, usize)]) -> Result<Graph> {
        let model = load(path.as_ref())?;
        Graph::from_model(&model, dims)
    }

    /// Reads a graph file as [`from_path`](Self::from_path) does, with its training step: initializers that the step updates are states.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// let graph = plimsoll::Graph::training_from_path("graphs/sgd.onnxtxt", &[("batch", 8)])?;
    /// assert_eq!(graph.states().len(), 3);
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_path`](Self::from_path), and when the file does not have one training step (`training_info`).
    pub fn training_from_path(path: impl AsRef<Path>, dims: &[(&str, usize)]) -> Result<Graph> {
        let model = load(path.as_ref())?.with_training()?;
        Graph::from_model(&model, dims)
    }

    fn from_model(model: &Model, dims: &[(&str, usize)]) -> Result<Graph> {
        let dims: Vec<_> = dims.iter().map(|(name, extent)| ((*name).to_owned(), *extent)).collect();
        import(model, &dims)
    }
}

fn map(path: &Path) -> Result<Bytes> {
    let bytes = file::map_whole(path).map_err(|e| Error::file(path, "read it", e))?;
    if bytes.is_empty() {
        return Err(Error::File { path: path.to_owned(), what: "the file is empty".into(), source: None });
    }
    Ok(bytes)
}

impl Model {
    /// Makes a model from messages in memory. Its external data lies in the current folder.
    pub fn new(proto: ModelProto) -> Model {
        Model {
            proto,
            path: None,
            states: Vec::new(),
            shared: Vec::new(),
            growth: None,
            outputs: None,
            first: Vec::new(),
            defaults: Vec::new(),
            values: Vec::new(),
            training: None,
            copies: Vec::new(),
            trains: false,
        }
    }

    fn graph(&self) -> Result<&GraphProto> {
        self.proto.graph.as_ref().ok_or_else(|| Error::graph("not an ONNX model: it has no graph".into()))
    }

    /// Adds the model's file, if it has one, to an error.
    fn name_file(&self, error: Error) -> Error {
        match &self.path {
            Some(path) => error.in_file(path),
            None => error,
        }
    }

    fn beside(&self, location: &str) -> PathBuf {
        self.path.as_deref().and_then(Path::parent).unwrap_or(Path::new("")).join(location)
    }

    /// Refuses a file with data that a link leads to, unless it is in the folder of the model or of what the model is a link to.
    fn holds(&self, path: &Path) -> io::Result<()> {
        let Some(model) = &self.path else { return Ok(()) };
        let data = path.canonicalize()?;
        let folders = [self.beside(".").canonicalize()?, model.canonicalize()?.with_file_name("")];
        if folders.iter().any(|folder| data.starts_with(folder)) {
            return Ok(());
        }
        Err(io::Error::other(format!("the link leads to {}, outside the model's folder", data.display())))
    }

    /// Refuses a model without a graph, or with external data that a file is too short for. Missing files are no error.
    fn check(&self) -> Result<()> {
        let mut lengths: HashMap<PathBuf, Option<u64>> = HashMap::new();
        let mut check = |tensor: &TensorProto| {
            let Some(external) = tensor.external()? else { return Ok(()) };
            let path = self.beside(external.location);
            // A page has no file system: it reads what it needs, when it does.
            if file::given().is_some() {
                return Ok(());
            }
            let length = match lengths.get(&path) {
                Some(length) => *length,
                None => {
                    let length = match std::fs::metadata(&path) {
                        Err(e) if e.kind() == ErrorKind::NotFound => None,
                        metadata => {
                            let doing = format!("read the data of tensor '{}'", tensor.name);
                            let metadata = metadata.map_err(|e| Error::file(&path, &doing, e))?;
                            self.holds(&path).map_err(|e| Error::file(&path, &doing, e))?;
                            Some(metadata.len())
                        }
                    };
                    lengths.insert(path.clone(), length);
                    length
                }
            };
            let Some(length) = length else { return Ok(()) };
            if external.offset.checked_add(external.length).is_none_or(|end| end > length) {
                let (name, from) = (&tensor.name, external.offset);
                let what = format!(
                    "tensor '{name}' needs {} bytes from byte {from} on, but the file has {length}",
                    external.length
                );
                return Err(Error::File { path, what, source: None });
            }
            Ok(())
        };
        in_graph(self.graph()?, &mut check)?;
        let steps = self.proto.training_info.iter().flat_map(|info| info.initialization.iter().chain(&info.algorithm));
        steps.into_iter().try_for_each(|graph| in_graph(graph, &mut check))?;
        self.proto.functions.iter().try_for_each(|f| in_nodes(&f.node, &mut check))
    }

    /// The constant with a sparse tensor's elements, which are not read here. `None` if all are zero.
    fn sparse(&self, tensor: &SparseTensorProto, name: &str) -> Result<Option<Constant>> {
        let Some((values, places)) = tensor.listed()? else { return Ok(None) };
        let shape = tensor.shape()?;
        check_places(tensor, places, &shape)?;
        let places = self.constant(places, format!("{name}/places"))?;
        Ok(Some(scattered(name, shape, self.constant(values, format!("{name}/values"))?, places)?))
    }

    /// The constant with a tensor's elements. They are not read here.
    fn constant(&self, tensor: &TensorProto, name: String) -> Result<Constant> {
        let fact = Fact::new(tensor.dtype()?, tensor.shape()?);
        fact.countable().map_err(|what| Error::graph(format!("tensor '{}': {what}", tensor.name)))?;
        match tensor.external()? {
            Some(external) => Ok(Constant::in_file(name, fact, self.beside(external.location), external.offset)),
            None => Ok(Constant::new(name, Tensor::new(fact.dtype, fact.shape, tensor.bytes()?)?)),
        }
    }
}

/// Refuses places outside a sparse tensor, if the file itself lists them.
fn check_places(tensor: &SparseTensorProto, places: &TensorProto, shape: &[usize]) -> Result<()> {
    if places.external()?.is_some() {
        return Ok(());
    }
    let bytes = places.bytes()?;
    let whole = [shape.iter().fold(1, |all: usize, &extent| all.saturating_mul(extent))];
    let extents = if places.dims.len() == 1 { &whole[..] } else { shape };
    let numbers = bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    let mut outside = numbers.zip(extents.iter().cycle()).filter(|&(at, &extent)| at < 0 || at as u64 >= extent as u64);
    outside.next().map_or(Ok(()), |(at, extent)| {
        let name = tensor.name();
        Err(Error::graph(format!("sparse initializer '{name}': expected places from 0 to below {extent}, found {at}")))
    })
}

/// The constant with these elements at their places, and zeros elsewhere. None of them is read here.
fn scattered(name: &str, shape: Vec<usize>, values: Constant, places: Constant) -> Result<Constant> {
    let dtype = values.fact.dtype;
    let fact = Fact::new(dtype, shape);
    fact.countable().map_err(|what| Error::graph(format!("initializer '{name}': {what}")))?;
    // Places of one number each are those of the elements one behind another.
    let is_flat = places.fact.shape.len() == 1;
    let target = if is_flat { Fact::new(dtype, [fact.shape.numel()]) } else { fact.clone() };
    let of = |op: &str, attrs: Attrs, inputs: Vec<Constant>, fact: &Fact| {
        let row = ops::find(op).expect("the table has the row");
        let inputs = inputs.into_iter().map(|constant| Some(Arc::new(constant))).collect();
        Constant::derived(name.into(), row, attrs, inputs, 0, fact.clone())
    };
    let shaped = |constant: Constant, fact: &Fact| {
        of("Reshape", Attrs::new().with("shape", &fact.shape[..]), vec![constant], fact)
    };
    let zero = Constant::new(format!("{name}/zero"), Tensor::from_f64(dtype, [], &[0.0]));
    let zeros = of("Expand", Attrs::new().with("shape", &target.shape[..]), vec![zero], &target)?;
    let tuples = Fact::new(DType::I64, [values.fact.shape[0], 1]);
    let places = if is_flat { shaped(places, &tuples)? } else { places };
    let made = of("ScatterND", Attrs::new(), vec![zeros, places, values], &target)?;
    if is_flat { shaped(made, &fact) } else { Ok(made) }
}

type Visit<'v> = &'v mut dyn FnMut(&TensorProto) -> Result<()>;

/// Visits every tensor of a graph and of the graphs in its nodes.
fn in_graph(graph: &GraphProto, visit: Visit) -> Result<()> {
    graph.initializer.iter().try_for_each(&mut *visit)?;
    let sparse = graph.sparse_initializer.iter();
    sparse.flat_map(|tensor| tensor.values.iter().chain(&tensor.indices)).try_for_each(&mut *visit)?;
    in_nodes(&graph.node, visit)
}

/// Visits every tensor in the attributes of nodes.
fn in_nodes(nodes: &[NodeProto], visit: Visit) -> Result<()> {
    for attribute in nodes.iter().flat_map(|n| &n.attribute) {
        attribute.t.iter().map(Box::as_ref).chain(&attribute.tensors).try_for_each(&mut *visit)?;
        let sparse = attribute.sparse_tensor.iter().map(Box::as_ref).chain(&attribute.sparse_tensors);
        sparse.flat_map(|tensor| tensor.values.iter().chain(&tensor.indices)).try_for_each(&mut *visit)?;
        let graphs = attribute.g.iter().map(Box::as_ref).chain(&attribute.graphs);
        for graph in graphs {
            in_graph(graph, visit)?;
        }
    }
    Ok(())
}
