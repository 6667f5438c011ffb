//! Writes models as files that are whole: what they refer to lies beside them.

use super::proto::*;
use super::{Model, text};
use crate::error::{Error, Result, ensure};
use crate::file;
use bytes::Bytes;
use prost::Message;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The longest message of protobuf.
const MAX_BYTES: usize = i32::MAX as usize;
/// Tensors of more bytes lie in the data file, where there is one.
const APART: usize = 1 << 10;
/// Tensors in a data file begin at multiples of this, so that they can be mapped as what they are.
const ALIGNMENT: u64 = 4096;

/// A model as protobuf.
///
/// # Errors
/// The model is larger than protobuf can be.
pub fn encode(model: &ModelProto) -> Result<Vec<u8>> {
    let bytes = model.encoded_len();
    if bytes > MAX_BYTES {
        return Err(Error::usage(format!("the model takes {bytes} bytes, and an .onnx file has at most {MAX_BYTES}")));
    }
    Ok(model.encode_to_vec())
}

/// The data file of a model that takes more than protobuf can: its own name, with `.data` behind it.
pub fn data_file(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".data");
    path.with_file_name(name)
}

/// Writes a model that refers to no other file, as text to `.onnxtxt`. If it takes more than `most` bytes, at most those of protobuf, its tensors lie in a
/// [data file](data_file) beside it.
///
/// # Errors
/// A file cannot be written, or the model is too large without its tensors.
pub fn write(mut model: ModelProto, path: &Path, most: Option<usize>) -> Result<()> {
    if path.extension().is_some_and(|end| end == "onnxtxt") {
        return file::write_whole(path, "write the model", |out| out.write_all(text::print(&model).as_bytes()));
    }
    if model.encoded_len() > most.unwrap_or(MAX_BYTES).min(MAX_BYTES) {
        ensure(!path.exists() || path.is_file(), || Error::File {
            path: path.to_owned(),
            what: "expected a file, as the model takes one of data beside it".into(),
            source: None,
        })?;
        let data = data_file(path);
        let location = data.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts = part(&mut model, &location);
        file::write_whole(&data, "write the model's data", |out| {
            let mut at = 0;
            for (offset, bytes) in &parts {
                // Fewer than the alignment.
                out.write_all(&vec![0; (offset - at) as usize])?;
                out.write_all(bytes)?;
                at = offset + bytes.len() as u64;
            }
            Ok(())
        })?;
    }
    let bytes = encode(&model).map_err(|e| e.in_file(path))?;
    file::write_whole(path, "write the model", |out| out.write_all(&bytes))
}

/// Takes the bytes of large tensors from a model, which then refers to a data file. Returns them with their places there, in order.
fn part(model: &mut ModelProto, location: &str) -> Vec<(u64, Bytes)> {
    let (mut parts, mut end) = (Vec::new(), 0u64);
    let taken = each_tensor(model, &mut |tensor| {
        if tensor.raw_data.len() > APART {
            let bytes = std::mem::take(&mut tensor.raw_data);
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + bytes.len() as u64;
            let entries = [
                ("location", location.to_owned()),
                ("offset", offset.to_string()),
                ("length", bytes.len().to_string()),
            ];
            let entry = |(key, value): (&str, String)| StringStringEntryProto { key: key.to_owned(), value };
            tensor.external_data = entries.map(entry).into();
            tensor.data_location = DataLocation::External as i32;
            parts.push((offset, bytes));
        }
        Ok(())
    });
    taken.expect("taking bytes does not fail");
    parts
}

impl Model {
    /// The files that the model is read from: its own, and those with external data.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = self.path.iter().cloned().collect();
        let mut whole = self.proto.clone();
        whole.graph.iter_mut().for_each(|graph| graph.initializer.extend(self.defaults.iter().cloned()));
        let found = each_tensor(&mut whole, &mut |tensor| {
            if let Some(external) = tensor.external()? {
                files.push(self.beside(external.location));
            }
            Ok(())
        });
        // What is malformed is found where it is read.
        drop(found);
        files.sort();
        files.dedup();
        files
    }

    /// A variant of this model's file with the elements of external data in the place of what refers to them. They stay in the mapped files.
    ///
    /// # Errors
    /// A file with external data is missing, or cannot be read.
    pub fn whole(&self, mut model: ModelProto) -> Result<ModelProto> {
        let mut mapped: HashMap<PathBuf, Bytes> = HashMap::new();
        each_tensor(&mut model, &mut |tensor| {
            let Some(external) = tensor.external()? else { return Ok(()) };
            let (path, from, length) = (self.beside(external.location), external.offset, external.length);
            let fail = |e| Error::file(&path, &format!("read the data of tensor '{}'", tensor.name), e);
            let bytes = match mapped.get(&path) {
                Some(bytes) => bytes.clone(),
                None => {
                    let bytes = file::map_whole(&path).map_err(fail)?;
                    mapped.entry(path.clone()).or_insert(bytes).clone()
                }
            };
            let end = from.checked_add(length).filter(|&end| end <= bytes.len() as u64);
            let end = end.ok_or_else(|| fail(std::io::ErrorKind::UnexpectedEof.into()))?;
            tensor.raw_data = bytes.slice(from as usize..end as usize);
            tensor.external_data.clear();
            tensor.data_location = DataLocation::Default as i32;
            Ok(())
        })?;
        Ok(model)
    }
}

type Visit<'v> = &'v mut dyn FnMut(&mut TensorProto) -> Result<()>;

/// Visits every tensor of a model: of its graphs, of its training steps, and of its functions.
fn each_tensor(model: &mut ModelProto, visit: Visit) -> Result<()> {
    let steps =
        model.training_info.iter_mut().flat_map(|info| info.initialization.iter_mut().chain(&mut info.algorithm));
    for graph in model.graph.iter_mut().chain(steps) {
        in_graph(graph, visit)?;
    }
    model.functions.iter_mut().try_for_each(|function| in_nodes(&mut function.node, visit))
}

fn in_graph(graph: &mut GraphProto, visit: Visit) -> Result<()> {
    graph.initializer.iter_mut().try_for_each(&mut *visit)?;
    let sparse = graph.sparse_initializer.iter_mut();
    sparse.flat_map(|tensor| tensor.values.iter_mut().chain(&mut tensor.indices)).try_for_each(&mut *visit)?;
    in_nodes(&mut graph.node, visit)
}

fn in_nodes(nodes: &mut [NodeProto], visit: Visit) -> Result<()> {
    for attribute in nodes.iter_mut().flat_map(|node| &mut node.attribute) {
        attribute.t.iter_mut().map(Box::as_mut).chain(&mut attribute.tensors).try_for_each(&mut *visit)?;
        let sparse = attribute.sparse_tensor.iter_mut().map(Box::as_mut).chain(&mut attribute.sparse_tensors);
        sparse.flat_map(|tensor| tensor.values.iter_mut().chain(&mut tensor.indices)).try_for_each(&mut *visit)?;
        for graph in attribute.g.iter_mut().map(Box::as_mut).chain(&mut attribute.graphs) {
            in_graph(graph, visit)?;
        }
    }
    Ok(())
}
