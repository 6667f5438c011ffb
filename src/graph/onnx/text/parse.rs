//! Parses text into a model.

use super::super::proto::*;
use super::scan::{Fault, Parse, Parser, clip};
use super::{ATTRIBUTE_TYPES, attribute_type_name, is_special_float, is_type_word};
use crate::error::{Error, Result, ensure};
use bytes::Bytes;
use std::path::Path;

/// Parses a model. `path` is for messages only.
///
/// Tensors keep their values in the typed fields of [`TensorProto`], as with `onnx.parser`.
///
/// # Errors
/// [`Error::Syntax`] with the position, what was expected there and what was found.
pub fn parse(text: &str, path: &Path) -> Result<ModelProto> {
    Parser::new(text).model().map_err(|Fault { at, what }| {
        let before = &text[..at];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.matches('\n').count() + 1;
        Error::Syntax { path: path.to_owned(), line, column: before[line_start..].chars().count() + 1, what }
    })
}

/// The value of an attribute, or one element of a list attribute.
enum Value {
    Float(f32),
    Int(i64),
    String(Bytes),
    Tensor(Box<TensorProto>),
    Graph(Box<GraphProto>),
    Type(Box<TypeProto>),
}

impl Value {
    fn kind(&self) -> AttributeType {
        match self {
            Value::Float(_) => AttributeType::Float,
            Value::Int(_) => AttributeType::Int,
            Value::String(_) => AttributeType::String,
            Value::Tensor(_) => AttributeType::Tensor,
            Value::Graph(_) => AttributeType::Graph,
            Value::Type(_) => AttributeType::TypeProto,
        }
    }
}

/// An initializer, by its elements.
enum Initializer {
    Dense(Box<TensorProto>),
    Zeros(Box<SparseTensorProto>),
}

impl Initializer {
    fn add_to(self, graph: &mut GraphProto) {
        match self {
            Initializer::Dense(tensor) => graph.initializer.push(*tensor),
            Initializer::Zeros(tensor) => graph.sparse_initializer.push(*tensor),
        }
    }
}

// Types, values and tensors.
impl Parser<'_> {
    fn next_is_type(&mut self) -> bool {
        match self.peek_word() {
            Some("undefined") => {
                let start = self.at;
                self.word();
                let name_or_shape_follows = matches!(self.peek(), Some(b'[' | b'"')) || self.peek_word().is_some();
                self.at = start;
                name_or_shape_follows
            }
            Some(word) => is_type_word(word),
            None => false,
        }
    }

    fn elem_type(&mut self) -> Parse<i32> {
        let Some(kind) = self.peek_word().and_then(DataType::from_name) else {
            return Err(self.expected("an element type"));
        };
        self.word();
        Ok(kind as i32)
    }

    fn tensor_type(&mut self) -> Parse<TensorType> {
        let elem_type = self.elem_type()?;
        if !self.eat(b'[') {
            return Ok(TensorType { elem_type, shape: Some(TensorShapeProto::default()) });
        }
        let dim = self.items(b']', "a dimension", |p| {
            let value = match p.peek() {
                _ if p.eat(b'?') => None,
                Some(b'-' | b'0'..=b'9') => Some(DimensionValue::DimValue(p.int("a size")?)),
                _ => Some(DimensionValue::DimParam(p.name("a dimension: a size, a name or '?'")?)),
            };
            Ok(Dimension { value, ..Default::default() })
        })?;
        Ok(TensorType { elem_type, shape: (!dim.is_empty()).then_some(TensorShapeProto { dim }) })
    }

    fn type_proto(&mut self) -> Parse<TypeProto> {
        let value = match self.peek_word() {
            Some(word @ ("seq" | "map" | "optional" | "sparse_tensor" | "opaque")) => {
                self.word();
                self.expect(b'(', "'(' and a type")?;
                let value = self.type_arguments(word)?;
                self.expect(b')', "')' after a type")?;
                value
            }
            _ => TypeValue::Tensor(self.tensor_type()?),
        };
        Ok(TypeProto { value: Some(value), ..Default::default() })
    }

    fn type_arguments(&mut self, word: &str) -> Parse<TypeValue> {
        Ok(match word {
            "seq" => TypeValue::Sequence(ElemType { elem_type: self.inner_type()? }),
            "optional" => TypeValue::Optional(ElemType { elem_type: self.inner_type()? }),
            "sparse_tensor" => TypeValue::SparseTensor(self.tensor_type()?),
            "map" => {
                let key_type = self.elem_type()?;
                self.expect(b',', "',' after the type of the keys")?;
                TypeValue::Map(MapType { key_type, value_type: self.inner_type()? })
            }
            _ if self.peek() == Some(b')') => TypeValue::Opaque(OpaqueType::default()),
            _ => {
                let first = self.dotted("a name")?.join(".");
                let opaque = if self.eat(b',') {
                    OpaqueType { domain: first, name: self.name("a name")? }
                } else {
                    OpaqueType { domain: String::new(), name: first }
                };
                TypeValue::Opaque(opaque)
            }
        })
    }

    fn inner_type(&mut self) -> Parse<Option<Box<TypeProto>>> {
        if self.peek() == Some(b')') {
            return Ok(None);
        }
        self.spend_twice::<TypeProto>()?;
        self.nested(|p| Ok(Some(Box::new(p.type_proto()?))))
    }

    fn value_info(&mut self) -> Parse<ValueInfoProto> {
        let r#type = if self.next_is_type() { Some(self.type_proto()?) } else { None };
        let expected = if r#type.is_some() { "the name of a value" } else { "a value: a type and a name" };
        Ok(ValueInfoProto { name: self.name(expected)?, r#type, ..Default::default() })
    }

    /// A value and, if `=` follows, its tensor.
    fn value_or_initializer(&mut self) -> Parse<(ValueInfoProto, Option<Initializer>)> {
        // It goes on to the list of inputs, or of types.
        self.spend_twice::<ValueInfoProto>()?;
        let start = self.start();
        let value = self.value_info()?;
        if !self.eat(b'=') {
            return Ok((value, None));
        }
        if let Some(TypeValue::SparseTensor(r#type)) = value.r#type.as_ref().and_then(|t| t.value.as_ref()) {
            let r#type = TypeProto { value: Some(TypeValue::Tensor(r#type.clone())), ..Default::default() };
            let tensor = TensorProto { name: value.name.clone(), ..self.tensor_type_of(start, Some(&r#type))? };
            self.expect(b'{', "'{}', as all elements of a sparse initializer are zero")?;
            self.expect(b'}', "'}', as all elements of a sparse initializer are zero")?;
            let TensorProto { dims, .. } = tensor;
            let values = Some(TensorProto { dims: vec![0], ..tensor });
            let sparse = SparseTensorProto { values, indices: None, dims };
            return Ok((value, Some(Initializer::Zeros(Box::new(sparse)))));
        }
        let tensor = self.tensor(start, value.r#type.as_ref(), value.name.clone())?;
        Ok((value, Some(Initializer::Dense(Box::new(tensor)))))
    }

    /// The rest of a tensor after its type, which starts at `start`, and its name.
    fn tensor(&mut self, start: usize, r#type: Option<&TypeProto>, name: String) -> Parse<TensorProto> {
        let mut tensor = TensorProto { name, ..self.tensor_type_of(start, r#type)? };
        if self.eat(b'[') {
            tensor.data_location = DataLocation::External as i32;
            tensor.external_data = self.string_pairs()?;
        } else {
            self.expect(b'{', "'{' and values, or '[' and where they are")?;
            self.values(&mut tensor)?;
        }
        Ok(tensor)
    }

    /// A tensor of a type, which starts at `start`, without its name and its values.
    fn tensor_type_of(&mut self, start: usize, r#type: Option<&TypeProto>) -> Parse<TensorProto> {
        let fault = |what: &str| Err(Fault { at: start, what: format!("expected {what}") });
        let Some(TypeValue::Tensor(TensorType { elem_type, shape })) = r#type.and_then(|t| t.value.as_ref()) else {
            return fault("an element type and a shape before the name of a tensor");
        };
        let Some(shape) = shape else {
            return fault("the shape of a tensor, found '[]', which is an unknown rank (a scalar has no brackets)");
        };
        let size = |d: &Dimension| match d.value {
            Some(DimensionValue::DimValue(size)) => Some(size).filter(|&size| size >= 0),
            _ => None,
        };
        self.spend_twice::<TensorProto>()?;
        let Some(dims) = shape.dim.iter().map(size).collect() else {
            return fault("a tensor whose dimensions are all numbers");
        };
        Ok(TensorProto { data_type: *elem_type, dims, ..Default::default() })
    }

    /// The values of a tensor, after `{`.
    fn values(&mut self, t: &mut TensorProto) -> Parse<()> {
        let kind = DataType::try_from(t.data_type).unwrap_or_default();
        let name = kind.name();
        let a_value = format!("a value of {name}");
        let found = match kind {
            DataType::Float | DataType::Complex64 => self.elements(&mut t.float_data, |p| p.real(&a_value))?,
            DataType::Double | DataType::Complex128 => self.elements(&mut t.double_data, |p| p.real(&a_value))?,
            DataType::Int64 => self.elements(&mut t.int64_data, |p| p.int(&a_value))?,
            DataType::Uint64 => self.elements(&mut t.uint64_data, |p| p.int(&a_value))?,
            DataType::Uint32 => self.elements(&mut t.uint64_data, |p| p.int::<u32>(&a_value).map(u64::from))?,
            DataType::String => self.elements(&mut t.string_data, |p| p.string("a string").map(Bytes::from))?,
            _ => self.small_values(&mut t.int32_data, kind, &a_value)?,
        };
        let each = match kind {
            DataType::Complex64 | DataType::Complex128 => 2,
            // Several elements may share a value.
            DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1 | DataType::Uint2 | DataType::Int2 => return Ok(()),
            DataType::Float6e2m3 | DataType::Float6e3m2 => return Ok(()),
            _ => 1,
        };
        let expected = if t.dims.contains(&0) {
            Some(0)
        } else {
            t.dims.iter().try_fold(each, |n: u64, &d| n.checked_mul(d.unsigned_abs()))
        };
        if expected != Some(found as u64) {
            let expected = expected.map_or("more than 2^64".into(), |n| n.to_string());
            let what = format!("expected {expected} value(s) for {name} {:?}, found {found}", t.dims);
            return Err(Fault { at: self.at - 1, what });
        }
        Ok(())
    }

    /// Values up to `}`. Returns their number.
    fn elements<T>(&mut self, into: &mut Vec<T>, element: impl FnMut(&mut Self) -> Parse<T>) -> Parse<usize> {
        *into = self.items(b'}', "a value", element)?;
        Ok(into.len())
    }

    /// Values that ONNX keeps as 32-bit integers, each in the range of its type.
    fn small_values(&mut self, into: &mut Vec<i32>, kind: DataType, a_value: &str) -> Parse<usize> {
        let (range, bits) = match kind {
            DataType::Int8 => (-128..=127, ""),
            DataType::Uint8 => (0..=255, ""),
            DataType::Int16 => (-32768..=32767, ""),
            DataType::Uint16 => (0..=65535, ""),
            DataType::Float16 | DataType::Bfloat16 => (0..=65535, "the bits of "),
            _ => (i32::MIN..=i32::MAX, ""),
        };
        let a_value = format!("{bits}{a_value}, an integer from {} to {}", range.start(), range.end());
        self.elements(into, |p| {
            let at = p.start();
            let value = p.int(&a_value)?;
            let fault = || Fault { at, what: format!("expected {a_value}, found '{value}'") };
            range.contains(&value).then_some(value).ok_or_else(fault)
        })
    }

    /// Pairs of strings, after `[`.
    fn string_pairs(&mut self) -> Parse<Vec<StringStringEntryProto>> {
        self.items(b']', "a key and its value", |p| {
            let key = p.string("a string as key")?;
            p.expect(b':', "':' after a key")?;
            Ok(StringStringEntryProto { key, value: p.string("a string as value")? })
        })
    }
}

// Attributes, nodes, graphs and models.
impl Parser<'_> {
    #[expect(clippy::vec_box, reason = "as `NodeProto` holds them: a list that grows moves pointers alone")]
    fn attributes(&mut self) -> Parse<Vec<Box<AttributeProto>>> {
        if !self.eat(b'<') {
            return Ok(Vec::new());
        }
        self.items(b'>', "an attribute", |p| {
            let name = p.name("the name of an attribute")?;
            p.attribute(name).map(Box::new)
        })
    }

    /// The rest of an attribute after its name.
    fn attribute(&mut self, name: String) -> Parse<AttributeProto> {
        let declared = if self.eat(b':') { self.attribute_type()? } else { AttributeType::Undefined };
        self.expect(b'=', "'=' and the value of an attribute")?;
        self.spend_twice::<AttributeProto>()?;
        let mut a = AttributeProto { name, r#type: declared as i32, ..Default::default() };
        let start = self.start();
        if self.eat(b'@') {
            a.ref_attr_name = self.name("the name of an attribute of the function")?;
        } else if self.eat(b'[') {
            let mut kind = ATTRIBUTE_TYPES.iter().find(|t| t.2 == declared).map_or(declared, |t| t.1);
            let values = self.items(b']', "an element", |p| {
                // It goes on to the list of its type, whose largest elements are strings.
                p.spend_twice::<Bytes>()?;
                let value = p.attribute_value(kind)?;
                kind = value.kind();
                Ok(value)
            })?;
            match ATTRIBUTE_TYPES.iter().find(|t| t.1 == kind) {
                Some(&(_, one, many)) if declared != one || !values.is_empty() => a.r#type = many as i32,
                _ => {
                    let what = "expected a type such as ': ints' before '=', as the list is empty".into();
                    return Err(Fault { at: start, what });
                }
            }
            for value in values {
                match value {
                    Value::Float(value) => a.floats.push(value),
                    Value::Int(value) => a.ints.push(value),
                    Value::String(value) => a.strings.push(value),
                    Value::Tensor(value) => a.tensors.push(*value),
                    Value::Graph(value) => a.graphs.push(*value),
                    Value::Type(value) => a.type_protos.push(*value),
                }
            }
        } else {
            let value = self.attribute_value(declared)?;
            a.set_type(value.kind());
            match value {
                Value::Float(value) => a.f = value,
                Value::Int(value) => a.i = value,
                Value::String(value) => a.s = value,
                Value::Tensor(value) => a.t = Some(value),
                Value::Graph(value) => a.g = Some(value),
                Value::Type(value) => a.tp = Some(value),
            }
        }
        Ok(a)
    }

    fn attribute_type(&mut self) -> Parse<AttributeType> {
        let word = self.peek_word().unwrap_or_default();
        let one = ATTRIBUTE_TYPES.iter().find(|t| t.0 == word).map(|t| t.1);
        let many = || ATTRIBUTE_TYPES.iter().find(|t| Some(t.0) == word.strip_suffix('s')).map(|t| t.2);
        let Some(kind) = one.or_else(many) else {
            let names = ATTRIBUTE_TYPES.map(|t| t.0).join(", ");
            return Err(self.expected(&format!("the type of an attribute ({names}, or one of them with an 's')")));
        };
        self.word();
        Ok(kind)
    }

    fn attribute_value(&mut self, expected: AttributeType) -> Parse<Value> {
        let at = self.start();
        let value = self.any_value(expected)?;
        if expected == AttributeType::Undefined || expected == value.kind() {
            return Ok(value);
        }
        let [expected, found] = [expected, value.kind()].map(attribute_type_name);
        Err(Fault { at, what: format!("expected a value of type {expected}, found one of type {found}") })
    }

    fn any_value(&mut self, expected: AttributeType) -> Parse<Value> {
        let start = self.start();
        let graph = expected == AttributeType::Graph;
        if !graph && self.next_is_type() {
            let r#type = self.type_proto()?;
            let tensor = expected == AttributeType::Tensor || matches!(self.peek(), Some(b'{' | b'=' | b'"'));
            if !tensor && self.peek_word().is_none() {
                self.spend_twice::<TypeProto>()?;
                return Ok(Value::Type(Box::new(r#type)));
            }
            let named = self.peek() == Some(b'"') || self.peek_word().is_some();
            let name = if named { self.name("a name")? } else { String::new() };
            self.eat(b'=');
            return self.tensor(start, Some(&r#type), name).map(Box::new).map(Value::Tensor);
        }
        if !graph && self.peek() == Some(b'"') {
            let string = self.string("a string")?;
            if self.peek() != Some(b'(') {
                return Ok(Value::String(string.into()));
            }
            self.at = start;
        }
        let named = self.peek() == Some(b'"') || self.peek_word().is_some_and(|word| !is_special_float(word));
        if graph || named {
            return self.graph().map(Box::new).map(Value::Graph);
        }
        let text = self.number("the value of an attribute")?;
        self.at = start;
        let is_int = text.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
        if is_int && expected != AttributeType::Float {
            self.int("a 64-bit integer").map(Value::Int)
        } else {
            self.real("a 32-bit float").map(Value::Float)
        }
    }

    fn node(&mut self) -> Parse<NodeProto> {
        let mut node = NodeProto::default();
        if self.eat(b'[') {
            if self.peek() != Some(b']') {
                node.name = self.name("the name of a node")?;
            }
            self.expect(b']', "']' after the name of a node")?;
        }
        node.output = self.names()?;
        self.expect(b'=', "'=' after the outputs of a node")?;
        let mut path = self.dotted("the name of an operator")?;
        node.op_type = path.pop().unwrap_or_default();
        node.domain = path.join(".");
        if self.eat(b':') {
            node.overload = self.name("the name of an overload")?;
        }
        node.attribute = self.attributes()?;
        self.expect(b'(', "'(' and the inputs of a node")?;
        node.input = self.names()?;
        self.expect(b')', "',' or ')' after an input")?;
        if node.attribute.is_empty() {
            node.attribute = self.attributes()?;
        }
        while self.eat(b'@') {
            self.spend_for(&node.device_configurations)?;
            node.device_configurations.push(self.placed()?);
        }
        Ok(node)
    }

    /// What a node is on several devices, after `@`.
    fn placed(&mut self) -> Parse<NodeDeviceConfigurationProto> {
        let configuration_id = self.string("the name of a configuration as a string")?;
        let pipeline_stage = if self.eat(b':') { Some(self.int("a stage")?) } else { None };
        self.expect(b'[', "'[' and the tensors that are split")?;
        let sharding_spec = self.items(b']', "a tensor", |p| {
            let tensor_name = p.name("the name of a tensor")?;
            p.expect(b'<', "'<' and the axes that are split")?;
            let sharded_dim = p.items(b'>', "an axis", |p| {
                let axis = p.int("an axis")?;
                p.expect(b':', "':' after an axis")?;
                p.expect(b'[', "'[' and a number of shards")?;
                let simple_sharding = p.items(b']', "a number of shards", Self::shards)?;
                Ok(ShardedDimProto { axis, simple_sharding })
            })?;
            let device = p.devices()?;
            let index_to_device_group_map = match p.eat(b'[') {
                false => Vec::new(),
                true => p.items(b']', "a group of devices", |p| {
                    let key = p.int("the number of a group")?;
                    p.expect(b':', "':' after the number of a group")?;
                    Ok(IntIntListEntryProto { key, value: p.devices()? })
                })?,
            };
            Ok(ShardingSpecProto { tensor_name, device, index_to_device_group_map, sharded_dim })
        })?;
        Ok(NodeDeviceConfigurationProto { configuration_id, sharding_spec, pipeline_stage })
    }

    fn devices(&mut self) -> Parse<Vec<i64>> {
        self.expect(b'(', "'(' and devices")?;
        self.items(b')', "a device", |p| p.int("a device"))
    }

    fn shards(&mut self) -> Parse<SimpleShardedDimProto> {
        let num_shards = self.int("a number of shards")?;
        if self.peek_word() != Some("of") {
            return Ok(SimpleShardedDimProto { dim: None, num_shards });
        }
        self.word();
        let dim = match self.peek() {
            Some(b'"') => DimensionValue::DimParam(self.string("a dim")?),
            _ => DimensionValue::DimValue(self.int("an extent, or the name of a dim as a string")?),
        };
        Ok(SimpleShardedDimProto { dim: Some(dim), num_shards })
    }

    /// The devices of a configuration, after its key.
    fn configuration(&mut self) -> Parse<Vec<DeviceConfigurationProto>> {
        self.expect(b'[', "'[' and configurations, such as \"cards\" : 4")?;
        self.items(b']', "a configuration", |p| {
            let name = p.string("the name of a configuration as a string")?;
            p.expect(b':', "':' after the name of a configuration")?;
            let num_devices = p.int("a number of devices")?;
            let device = match p.eat(b'(') {
                false => Vec::new(),
                true => p.items(b')', "a device", |p| p.string("the name of a device as a string"))?,
            };
            Ok(DeviceConfigurationProto { name, num_devices, device })
        })
    }

    fn nodes(&mut self) -> Parse<Vec<NodeProto>> {
        self.expect(b'{', "'{' before nodes")?;
        let mut nodes = Vec::new();
        while !self.eat(b'}') {
            ensure(self.peek().is_some(), || self.expected("a node or '}'"))?;
            self.spend_for(&nodes)?;
            nodes.push(self.node()?);
        }
        Ok(nodes)
    }

    fn arrow(&mut self) -> Parse<()> {
        let arrow = self.eat(b'=') && self.text[self.at..].starts_with('>');
        ensure(arrow, || self.expected("'=>' and outputs"))?;
        self.at += 1;
        Ok(())
    }

    fn signature(&mut self, what: &str) -> Parse<Vec<ValueInfoProto>> {
        self.expect(b'(', &format!("'(' and {what}"))?;
        self.items(b')', what, Self::value_info)
    }

    fn graph(&mut self) -> Parse<GraphProto> {
        self.spend_twice::<GraphProto>()?;
        self.nested(|p| {
            let mut graph = GraphProto { name: p.name("the name of a graph")?, ..Default::default() };
            if p.eat(b'(') {
                for (value, tensor) in p.items(b')', "an input", Self::value_or_initializer)? {
                    graph.input.push(value);
                    tensor.into_iter().for_each(|tensor| tensor.add_to(&mut graph));
                }
            }
            p.arrow()?;
            graph.output = p.signature("an output")?;
            if p.eat(b'<') {
                for (value, tensor) in p.items(b'>', "a value or an initializer", Self::value_or_initializer)? {
                    match tensor {
                        Some(tensor) => tensor.add_to(&mut graph),
                        None => graph.value_info.push(value),
                    }
                }
            }
            graph.node = p.nodes()?;
            Ok(graph)
        })
    }

    /// The entries of a header, if there is one. `entry` reads the value of a key, or returns false for an unknown key.
    fn header(&mut self, keys: &str, mut entry: impl FnMut(&mut Self, &str) -> Parse<bool>) -> Parse<()> {
        if self.eat(b'<') {
            self.items(b'>', "an entry", |p| {
                let at = p.start();
                let Some(key) = p.word() else { return Err(p.expected(keys)) };
                p.expect(b':', "':' after a key")?;
                if entry(p, key)? {
                    return Ok(());
                }
                Err(Fault { at, what: format!("expected {keys}, found '{}'", clip(key)) })
            })?;
        }
        Ok(())
    }

    fn opset_import(&mut self) -> Parse<Vec<OperatorSetIdProto>> {
        self.expect(b'[', "'[' and operator sets, such as \"\" : 17")?;
        self.items(b']', "an operator set", |p| {
            let domain = p.string("a domain as a string")?;
            p.expect(b':', "':' after a domain")?;
            Ok(OperatorSetIdProto { domain, version: p.int("a version")? })
        })
    }

    fn function(&mut self) -> Parse<FunctionProto> {
        self.spend_twice::<FunctionProto>()?;
        let mut f = FunctionProto::default();
        self.header("domain, overload, opset_import or doc_string", |p, key| {
            match key {
                "domain" => f.domain = p.string("a string")?,
                "overload" => f.overload = p.string("a string")?,
                "opset_import" => f.opset_import = p.opset_import()?,
                "doc_string" => f.doc_string = p.string("a string")?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        f.name = self.name("the name of a function")?;
        if self.eat(b'<') {
            self.items(b'>', "an attribute", |p| {
                let name = p.name("the name of an attribute")?;
                match p.peek() {
                    Some(b':' | b'=') => f.attribute_proto.push(p.attribute(name)?),
                    _ => f.attribute.push(name),
                }
                Ok(())
            })?;
        }
        let inputs = self.signature("an input")?;
        self.arrow()?;
        let outputs = self.signature("an output")?;
        for name in inputs.iter().chain(&outputs).map(|value| &value.name) {
            self.spend_twice::<(String, ValueInfoProto)>()?;
            self.spend(name.len() as u64)?;
        }
        f.input = inputs.iter().map(|value| value.name.clone()).collect();
        f.output = outputs.iter().map(|value| value.name.clone()).collect();
        f.value_info = inputs.into_iter().chain(outputs).filter(|value| value.r#type.is_some()).collect();
        if self.eat(b'<') {
            f.value_info.extend(self.items(b'>', "a value", Self::value_info)?);
        }
        f.node = self.nodes()?;
        Ok(f)
    }

    /// A graph of a training step, if its bindings come next.
    fn training(&mut self, infos: &mut Vec<TrainingInfoProto>) -> Parse<bool> {
        let start = self.at;
        let field = if self.eat(b'<') { self.peek_word() } else { None };
        let Some(field @ ("update_binding" | "initialization_binding")) = field else {
            self.at = start;
            return Ok(false);
        };
        let is_update = field == "update_binding";
        self.word();
        self.expect(b':', "':' after a key")?;
        self.expect(b'[', "'[' and pairs of strings")?;
        let pairs = self.string_pairs()?;
        self.expect(b'>', "'>' after the bindings of a training step")?;
        let graph = Some(self.graph()?);
        self.spend_twice::<TrainingInfoProto>()?;
        match infos.last_mut().filter(|info| !is_update && info.initialization.is_none()) {
            Some(info) => (info.initialization, info.initialization_binding) = (graph, pairs),
            None if is_update => {
                infos.push(TrainingInfoProto { algorithm: graph, update_binding: pairs, ..Default::default() });
            }
            None => {
                let (initialization, initialization_binding) = (graph, pairs);
                infos.push(TrainingInfoProto { initialization, initialization_binding, ..Default::default() });
            }
        }
        Ok(true)
    }

    fn model(&mut self) -> Parse<ModelProto> {
        let mut m = ModelProto::default();
        let keys = "ir_version, opset_import, producer_name, producer_version, domain, model_version, doc_string, \
            metadata_props or configuration";
        self.header(keys, |p, key| {
            match key {
                "ir_version" => m.ir_version = p.int("a version")?,
                "opset_import" => m.opset_import = p.opset_import()?,
                "producer_name" => m.producer_name = p.string("a string")?,
                "producer_version" => m.producer_version = p.string("a string")?,
                "domain" => m.domain = p.string("a string")?,
                "model_version" => m.model_version = p.int("a version")?,
                "doc_string" => m.doc_string = p.string("a string")?,
                "metadata_props" => {
                    p.expect(b'[', "'[' and pairs of strings")?;
                    m.metadata_props = p.string_pairs()?;
                }
                "configuration" => m.configuration = p.configuration()?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        m.graph = Some(self.graph()?);
        while self.peek().is_some() {
            if !self.training(&mut m.training_info)? {
                m.functions.push(self.function()?);
            }
        }
        Ok(m)
    }
}
