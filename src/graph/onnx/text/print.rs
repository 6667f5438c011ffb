//! Prints a model as text.

use super::super::proto::*;
use super::{ATTRIBUTE_TYPES, attribute_type_name, is_special_float, is_type_word, is_word_byte};
use std::fmt::{self, Write};

/// Spaces per level of indentation.
const INDENT: usize = 3;

/// Columns after which a list is wrapped.
const WIDTH: usize = 110;

/// Prints a model. `parse` reads the text back as the same model. So does `onnx.parser`, unless the model
/// needs one of [our extensions](super).
///
/// Raw data comes back as the same values in typed fields. The syntax has no place for some fields, so they are lost:
/// documentation and metadata of graphs, nodes and values, metadata of functions, denotations, quantization annotations,
/// elements of sparse initializers and the payload of a NaN. A sparse attribute is written as `...`, which neither parser accepts.
/// Bytes of a string that are not UTF-8 become U+FFFD.
pub fn print(model: &ModelProto) -> String {
    let mut printer = Printer { out: String::new(), indent: 0, line: 0 };
    printer.model(model);
    printer.out
}

struct Printer {
    out: String,
    /// Spaces at the start of a line.
    indent: usize,
    /// Start of the current line. A list compares it to see whether printing an item began a new line.
    line: usize,
}

fn is_identifier(name: &str) -> bool {
    name.bytes().all(is_word_byte) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// True for a name that no parser can take for the start of a type or a number.
fn is_plain(name: &str) -> bool {
    is_identifier(name) && !is_type_word(name) && !is_special_float(name)
}

/// The elements of a tensor, from its raw data or from its typed field.
fn elements<'a, const N: usize, R: 'a, T: Copy + From<R> + 'a>(
    raw: &'a [u8],
    read: fn([u8; N]) -> R,
    typed: &'a [T],
) -> impl Iterator<Item = T> + 'a {
    let (chunks, _) = raw.as_chunks();
    chunks.iter().map(move |&chunk| read(chunk).into()).chain(typed.iter().copied())
}

impl Printer {
    fn put(&mut self, text: &str) {
        self.out.push_str(text);
    }

    fn newline(&mut self) {
        self.out.push('\n');
        self.line = self.out.len();
        self.out.extend(std::iter::repeat_n(' ', self.indent));
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            if matches!(c, '"' | '\\') {
                self.out.push('\\');
            }
            self.out.push(c);
        }
        self.out.push('"');
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.string(&String::from_utf8_lossy(bytes));
    }

    fn name(&mut self, name: &str) {
        if is_plain(name) { self.put(name) } else { self.string(name) }
    }

    /// A name in a place where no type or value can be. `onnx.parser` accepts no quotes there.
    fn word(&mut self, name: &str) {
        if is_identifier(name) { self.put(name) } else { self.string(name) }
    }

    /// Words with dots between them.
    fn dotted(&mut self, name: &str) {
        if name.split('.').all(is_identifier) { self.put(name) } else { self.string(name) }
    }

    fn display(&mut self, value: impl fmt::Display) {
        // Writing to a string cannot fail.
        let _ = write!(self.out, "{value}");
    }

    /// The shortest text that reads as the same number, always with a '.', an 'e' or letters.
    fn real(&mut self, value: impl fmt::Debug) {
        let start = self.out.len();
        let _ = write!(self.out, "{value:?}");
        if self.out.ends_with("NaN") {
            self.out.truncate(start);
            self.put("nan");
        }
    }

    /// The shortest text for a number whose type is known, without a trailing `.0`.
    fn short_real(&mut self, value: impl fmt::Debug) {
        self.real(value);
        if self.out.ends_with(".0") {
            self.out.truncate(self.out.len() - 2);
        }
    }

    /// Items with commas between them, wrapped at [`WIDTH`].
    fn list<T>(&mut self, items: impl IntoIterator<Item = T>, item: impl FnMut(&mut Self, T)) {
        self.rows(usize::MAX, items, item);
    }

    /// Items with commas between them, and a new line before every `row` items.
    fn rows<T>(&mut self, row: usize, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Self, T)) {
        self.indent += INDENT;
        for (i, value) in items.into_iter().enumerate() {
            self.put(if i == 0 { "" } else { "," });
            let gap = self.out.len();
            if row != usize::MAX && i % row == 0 {
                self.newline();
                item(self, value);
                continue;
            }
            self.put(if i == 0 { "" } else { " " });
            let (text, line) = (self.out.len(), self.line);
            item(self, value);
            // The line is too long and the item did not break it: move the item to a new line.
            if i > 0 && self.line == line && self.out.len() - line > WIDTH {
                let moved = self.out.split_off(text);
                self.out.truncate(gap);
                self.newline();
                self.put(&moved);
            }
        }
        self.indent -= INDENT;
    }

    fn elem_type(&mut self, elem_type: i32) {
        self.put(DataType::try_from(elem_type).unwrap_or_default().name());
    }

    fn tensor_type(&mut self, t: &TensorType) {
        self.elem_type(t.elem_type);
        let Some(shape) = &t.shape else { return self.put("[]") };
        for (i, dim) in shape.dim.iter().enumerate() {
            self.put(if i == 0 { "[" } else { ", " });
            match &dim.value {
                Some(DimensionValue::DimValue(size)) => self.display(size),
                Some(DimensionValue::DimParam(name)) => self.word(name),
                None => self.put("?"),
            }
        }
        self.put(if shape.dim.is_empty() { "" } else { "]" });
    }

    fn type_proto(&mut self, t: &TypeProto) {
        let (kind, inner) = match &t.value {
            None => return,
            Some(TypeValue::Tensor(tensor)) => return self.tensor_type(tensor),
            Some(TypeValue::SparseTensor(tensor)) => {
                self.put("sparse_tensor(");
                self.tensor_type(tensor);
                return self.put(")");
            }
            Some(TypeValue::Opaque(opaque)) => {
                self.put("opaque(");
                if !opaque.domain.is_empty() {
                    self.dotted(&opaque.domain);
                    self.put(", ");
                    self.word(&opaque.name);
                } else if !opaque.name.is_empty() {
                    self.dotted(&opaque.name);
                }
                return self.put(")");
            }
            Some(TypeValue::Sequence(sequence)) => ("seq(", &sequence.elem_type),
            Some(TypeValue::Optional(optional)) => ("optional(", &optional.elem_type),
            Some(TypeValue::Map(map)) => {
                self.put("map(");
                self.elem_type(map.key_type);
                (", ", &map.value_type)
            }
        };
        self.put(kind);
        if let Some(inner) = inner {
            self.type_proto(inner);
        }
        self.put(")");
    }

    fn value_info(&mut self, value: &ValueInfoProto) {
        if let Some(r#type) = value.r#type.as_ref().filter(|t| t.value.is_some()) {
            self.type_proto(r#type);
            self.put(" ");
        }
        self.name(&value.name);
    }

    fn string_pair(&mut self, pair: &StringStringEntryProto) {
        self.string(&pair.key);
        self.put(": ");
        self.string(&pair.value);
    }

    fn extents(&mut self, dims: &[i64]) {
        for (i, dim) in dims.iter().enumerate() {
            self.put(if i == 0 { "[" } else { ", " });
            self.display(dim);
        }
        self.put(if dims.is_empty() { "" } else { "]" });
    }

    /// A sparse initializer, as one of zeros.
    fn sparse(&mut self, t: &SparseTensorProto) {
        self.put("sparse_tensor(");
        self.elem_type(t.values.as_ref().map_or(0, |values| values.data_type));
        self.extents(&t.dims);
        self.put(") ");
        self.name(t.name());
        self.put(" = {}");
    }

    fn tensor(&mut self, t: &TensorProto, initializer: bool) {
        self.elem_type(t.data_type);
        self.extents(&t.dims);
        let external = t.data_location == DataLocation::External as i32;
        if initializer || !t.name.is_empty() {
            self.put(" ");
            self.name(&t.name);
        }
        // Without a name or '=' the brackets would be a shape.
        self.put(if initializer || external || !t.name.is_empty() { " = " } else { " " });
        if external {
            self.put("[");
            self.list(&t.external_data, Self::string_pair);
            return self.put("]");
        }
        self.put("{");
        self.values(t);
        self.put("}");
    }

    fn values(&mut self, t: &TensorProto) {
        let raw: &[u8] = &t.raw_data;
        // A matrix of more than 16 elements gets one line per row.
        let row = match t.dims[..] {
            [.., rows, columns] if rows > 1 && columns > 1 && rows.saturating_mul(columns) > 16 => columns as usize,
            _ => usize::MAX,
        };
        match DataType::try_from(t.data_type).unwrap_or_default() {
            DataType::Float | DataType::Complex64 => {
                self.rows(row, elements(raw, f32::from_le_bytes, &t.float_data), Self::short_real)
            }
            DataType::Double | DataType::Complex128 => {
                self.rows(row, elements(raw, f64::from_le_bytes, &t.double_data), Self::short_real)
            }
            DataType::String => self.list(&t.string_data, |p, s| p.bytes(s)),
            DataType::Int64 => self.rows(row, elements(raw, i64::from_le_bytes, &t.int64_data), Self::display),
            DataType::Uint64 => self.rows(row, elements(raw, u64::from_le_bytes, &t.uint64_data), Self::display),
            DataType::Uint32 => self.rows(row, elements(raw, u32::from_le_bytes, &t.uint64_data), Self::display),
            DataType::Int32 => self.rows(row, elements(raw, i32::from_le_bytes, &t.int32_data), Self::display),
            DataType::Int16 => self.rows(row, elements(raw, i16::from_le_bytes, &t.int32_data), Self::display),
            DataType::Uint16 | DataType::Float16 | DataType::Bfloat16 => {
                self.rows(row, elements(raw, u16::from_le_bytes, &t.int32_data), Self::display)
            }
            DataType::Int8 => self.rows(row, elements(raw, i8::from_le_bytes, &t.int32_data), Self::display),
            _ => self.rows(row, elements(raw, u8::from_le_bytes, &t.int32_data), Self::display),
        }
    }

    /// An attribute, with its type only if the value does not show it.
    fn attribute(&mut self, a: &AttributeProto) {
        let (kind, reference) = (a.r#type(), !a.ref_attr_name.is_empty());
        let told = match kind {
            AttributeType::Undefined => true,
            _ if reference => false,
            AttributeType::Float | AttributeType::Int | AttributeType::String => true,
            AttributeType::Tensor | AttributeType::TypeProto => true,
            AttributeType::Floats => !a.floats.is_empty(),
            AttributeType::Ints => !a.ints.is_empty(),
            AttributeType::Strings => !a.strings.is_empty(),
            AttributeType::Graph => a.g.as_ref().is_some_and(|graph| is_plain(&graph.name)),
            _ => false,
        };
        self.word(&a.name);
        if !told {
            self.put(": ");
            self.put(&attribute_type_name(kind));
        }
        self.put(" = ");
        if reference {
            self.put("@");
            return self.word(&a.ref_attr_name);
        }
        let list = ATTRIBUTE_TYPES.iter().any(|t| t.2 == kind);
        self.put(if list { "[" } else { "" });
        match kind {
            AttributeType::Float => self.real(a.f),
            AttributeType::Int => self.display(a.i),
            AttributeType::String => self.bytes(&a.s),
            AttributeType::Tensor => a.t.iter().for_each(|tensor| self.tensor(tensor, false)),
            AttributeType::Graph => a.g.iter().for_each(|graph| self.graph(graph)),
            AttributeType::TypeProto => a.tp.iter().for_each(|t| self.type_proto(t)),
            AttributeType::Floats => self.list(&a.floats, Self::real),
            AttributeType::Ints => self.list(&a.ints, Self::display),
            AttributeType::Strings => self.list(&a.strings, |p, string| p.bytes(string)),
            AttributeType::Tensors => self.list(&a.tensors, |p, tensor| p.tensor(tensor, false)),
            AttributeType::Graphs => self.list(&a.graphs, Self::graph),
            AttributeType::TypeProtos => self.list(&a.type_protos, Self::type_proto),
            // Neither parser accepts this as a value, so the loss is noticed.
            AttributeType::Undefined | AttributeType::SparseTensor | AttributeType::SparseTensors => self.put("..."),
        }
        self.put(if list { "]" } else { "" });
    }

    fn node(&mut self, node: &NodeProto) {
        if !node.name.is_empty() {
            self.put("[");
            self.name(&node.name);
            self.put("] ");
        }
        self.list(&node.output, |p, name| p.name(name));
        self.put(if node.output.is_empty() { "= " } else { " = " });
        if !node.domain.is_empty() {
            self.dotted(&node.domain);
            self.put(".");
        }
        self.word(&node.op_type);
        if !node.overload.is_empty() {
            self.put(":");
            self.word(&node.overload);
        }
        // Graphs are easier to read after the inputs, each on lines of its own.
        let graphs = node.attribute.iter().any(|a| a.g.is_some() || !a.graphs.is_empty());
        if !graphs && !node.attribute.is_empty() {
            self.put(" <");
            self.list(node.attribute.iter().map(Box::as_ref), Self::attribute);
            self.put("> ");
        }
        self.put("(");
        self.list(&node.input, |p, name| p.name(name));
        self.put(")");
        if graphs {
            self.put(" ");
            self.block("<", ">", node.attribute.iter().map(Box::as_ref), Self::attribute);
        }
        node.device_configurations.iter().for_each(|placed| self.placed(placed));
    }

    /// What a node is on several devices.
    fn placed(&mut self, placed: &NodeDeviceConfigurationProto) {
        self.put(" @ ");
        self.string(&placed.configuration_id);
        if let Some(stage) = placed.pipeline_stage {
            self.put(" : ");
            self.display(stage);
        }
        self.put(" [");
        self.list(&placed.sharding_spec, |p, spec| {
            p.name(&spec.tensor_name);
            p.put(" <");
            p.list(&spec.sharded_dim, |p, dim| {
                p.display(dim.axis);
                p.put(": [");
                p.list(&dim.simple_sharding, Self::shards);
                p.put("]");
            });
            p.put("> ");
            p.devices(&spec.device);
            if !spec.index_to_device_group_map.is_empty() {
                p.put(" [");
                p.list(&spec.index_to_device_group_map, |p, group| {
                    p.display(group.key);
                    p.put(": ");
                    p.devices(&group.value);
                });
                p.put("]");
            }
        });
        self.put("]");
    }

    fn devices(&mut self, devices: &[i64]) {
        self.put("(");
        self.list(devices, Self::display);
        self.put(")");
    }

    fn shards(&mut self, shards: &SimpleShardedDimProto) {
        self.display(shards.num_shards);
        match &shards.dim {
            Some(DimensionValue::DimValue(extent)) => self.display(format_args!(" of {extent}")),
            Some(DimensionValue::DimParam(name)) => {
                self.put(" of ");
                self.string(name);
            }
            None => {}
        }
    }

    /// Items with commas between them, each on a line of its own.
    fn block<T>(
        &mut self,
        open: &str,
        close: &str,
        items: impl IntoIterator<Item = T>,
        mut item: impl FnMut(&mut Self, T),
    ) {
        self.put(open);
        self.indent += INDENT;
        for (i, value) in items.into_iter().enumerate() {
            self.put(if i == 0 { "" } else { "," });
            self.newline();
            item(self, value);
        }
        self.indent -= INDENT;
        self.newline();
        self.put(close);
    }

    fn nodes(&mut self, nodes: &[NodeProto]) {
        self.put(" {");
        self.indent += INDENT;
        for node in nodes {
            self.newline();
            self.node(node);
        }
        self.indent -= INDENT;
        self.newline();
        self.put("}");
    }

    fn graph(&mut self, graph: &GraphProto) {
        self.name(&graph.name);
        self.put(" (");
        self.list(&graph.input, Self::value_info);
        self.put(") => (");
        self.list(&graph.output, Self::value_info);
        self.put(")");
        enum Item<'a> {
            Tensor(&'a TensorProto),
            Sparse(&'a SparseTensorProto),
            Value(&'a ValueInfoProto),
        }
        let tensors = graph.initializer.iter().map(Item::Tensor);
        let sparse = graph.sparse_initializer.iter().map(Item::Sparse);
        let mut items = tensors.chain(sparse).chain(graph.value_info.iter().map(Item::Value)).peekable();
        if items.peek().is_some() {
            self.put(" ");
            self.block("<", ">", items, |p, item| match item {
                Item::Tensor(tensor) => p.tensor(tensor, true),
                Item::Sparse(sparse) => p.sparse(sparse),
                Item::Value(value) => p.value_info(value),
            });
        }
        self.nodes(&graph.node);
    }

    /// A key of a header.
    fn key(&mut self, key: &str) {
        self.put(if self.out.ends_with('<') { "" } else { "," });
        self.newline();
        self.put(key);
        self.put(": ");
    }

    fn strings(&mut self, entries: &[(&str, &str)]) {
        for (key, text) in entries.iter().filter(|(_, text)| !text.is_empty()) {
            self.key(key);
            self.string(text);
        }
    }

    fn opset_import(&mut self, sets: &[OperatorSetIdProto]) {
        self.key("opset_import");
        self.put("[");
        self.list(sets, |p, set| {
            p.string(&set.domain);
            p.put(" : ");
            p.display(set.version);
        });
        self.put("]");
    }

    fn function(&mut self, f: &FunctionProto) {
        self.put("<");
        self.indent = INDENT;
        self.strings(&[("domain", &f.domain), ("overload", &f.overload)]);
        self.opset_import(&f.opset_import);
        self.strings(&[("doc_string", &f.doc_string)]);
        self.indent = 0;
        self.newline();
        self.put(">\n");
        self.name(&f.name);
        if !f.attribute.is_empty() || !f.attribute_proto.is_empty() {
            let plain = f.attribute.iter().map(|name| (Some(name), None));
            let valued = f.attribute_proto.iter().map(|attribute| (None, Some(attribute)));
            self.put(" <");
            self.list(plain.chain(valued), |p, (name, attribute)| {
                name.into_iter().for_each(|name| p.name(name));
                attribute.into_iter().for_each(|attribute| p.attribute(attribute));
            });
            self.put(">");
        }
        self.put(" (");
        self.list(&f.input, |p, name| p.name(name));
        self.put(") => (");
        self.list(&f.output, |p, name| p.name(name));
        self.put(")");
        if !f.value_info.is_empty() {
            self.put(" ");
            self.block("<", ">", &f.value_info, Self::value_info);
        }
        self.nodes(&f.node);
        self.put("\n");
    }

    fn training(&mut self, info: &TrainingInfoProto) {
        let TrainingInfoProto { initialization, algorithm, initialization_binding, update_binding } = info;
        let mut part = |key: &str, pairs: &[StringStringEntryProto], graph: &Option<GraphProto>| {
            self.put("<");
            self.put(key);
            self.put(": [");
            self.list(pairs, Self::string_pair);
            self.put("]>\n");
            self.graph(graph.as_ref().unwrap_or(&GraphProto::default()));
            self.put("\n");
        };
        part("update_binding", update_binding, algorithm);
        if initialization.is_some() || !initialization_binding.is_empty() {
            part("initialization_binding", initialization_binding, initialization);
        }
    }

    fn model(&mut self, m: &ModelProto) {
        self.put("<");
        self.indent = INDENT;
        self.key("ir_version");
        self.display(m.ir_version);
        self.opset_import(&m.opset_import);
        self.strings(&[("producer_name", &m.producer_name), ("producer_version", &m.producer_version)]);
        self.strings(&[("domain", &m.domain)]);
        if m.model_version != 0 {
            self.key("model_version");
            self.display(m.model_version);
        }
        self.strings(&[("doc_string", &m.doc_string)]);
        if !m.metadata_props.is_empty() {
            self.key("metadata_props");
            self.put("[");
            self.list(&m.metadata_props, Self::string_pair);
            self.put("]");
        }
        if !m.configuration.is_empty() {
            self.key("configuration");
            self.put("[");
            self.list(&m.configuration, |p, of| {
                p.string(&of.name);
                p.put(" : ");
                p.display(of.num_devices);
                if !of.device.is_empty() {
                    p.put(" (");
                    p.list(&of.device, |p, name| p.string(name));
                    p.put(")");
                }
            });
            self.put("]");
        }
        self.indent = 0;
        self.newline();
        self.put(">\n");
        m.graph.iter().for_each(|graph| self.graph(graph));
        self.put("\n");
        m.training_info.iter().for_each(|info| self.training(info));
        m.functions.iter().for_each(|function| self.function(function));
    }
}
