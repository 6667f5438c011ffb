//! The messages of `onnx.proto` (ONNX 1.23, IR version 14) as structs, and the rules of the format that need no graph.
//!
//! Field numbers and names are ONNX's. An absent scalar and its default are the same, as in ONNX's proto3 variant. Reading
//! skips `Segment`. Decoding from [`Bytes`] copies no `raw_data`: the field
//! refers to the bytes of the file.
#![allow(missing_docs, reason = "fields have the name and the meaning they have in onnx.proto")]

use super::weigh::{Field, Meter, Weigh, Wire, fields, tags};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::narrow;
use bytes::Bytes;

/// Declares messages. Before a field stand its kind and its number.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $(($($kind:tt)*) $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub struct $name { $(#[prost($($kind)*)] pub $field: $type,)* }

        impl Weigh for $name {
            fn weigh(body: &[u8], meter: &mut Meter) {
                $(let mut $field = 0;)*
                fields(body, meter, |number, value, meter| {
                    $(if number < 32 && const { tags(stringify!($($kind)*)) } & 1 << number != 0 {
                        <$type as Field>::add(number, value, &mut $field, meter);
                    })*
                });
            }
        }

        impl Field for $name {
            fn add(_: u32, value: Wire, _: &mut u64, meter: &mut Meter) {
                if let Wire::Bytes(body) = value {
                    $name::weigh(body, meter);
                }
            }
        }
    )*};
}

messages! {
    /// A whole file.
    ModelProto {
        (int64, tag = "1") ir_version: i64,
        (string, tag = "2") producer_name: String,
        (string, tag = "3") producer_version: String,
        (string, tag = "4") domain: String,
        (int64, tag = "5") model_version: i64,
        (string, tag = "6") doc_string: String,
        (message, optional, tag = "7") graph: Option<GraphProto>,
        (message, repeated, tag = "8") opset_import: Vec<OperatorSetIdProto>,
        (message, repeated, tag = "14") metadata_props: Vec<StringStringEntryProto>,
        (message, repeated, tag = "20") training_info: Vec<TrainingInfoProto>,
        (message, repeated, tag = "25") functions: Vec<FunctionProto>,
        (message, repeated, tag = "26") configuration: Vec<DeviceConfigurationProto>,
    }

    /// Devices that the nodes of a model may be annotated for.
    DeviceConfigurationProto {
        (string, tag = "1") name: String,
        (int32, tag = "2") num_devices: i32,
        (string, repeated, tag = "3") device: Vec<String>,
    }

    /// A training step: a graph that goes on where the model's graph ends, and the initializers that its outputs update; and a graph
    /// without inputs, whose outputs initializers begin with.
    TrainingInfoProto {
        (message, optional, tag = "1") initialization: Option<GraphProto>,
        (message, optional, tag = "2") algorithm: Option<GraphProto>,
        (message, repeated, tag = "3") initialization_binding: Vec<StringStringEntryProto>,
        (message, repeated, tag = "4") update_binding: Vec<StringStringEntryProto>,
    }

    /// A set of operators (`""` is ONNX's own) and its version.
    OperatorSetIdProto {
        (string, tag = "1") domain: String,
        (int64, tag = "2") version: i64,
    }

    /// A key and its value.
    StringStringEntryProto {
        (string, tag = "1") key: String,
        (string, tag = "2") value: String,
    }

    /// Nodes in topological order, with their inputs, outputs and constants.
    GraphProto {
        (message, repeated, tag = "1") node: Vec<NodeProto>,
        (string, tag = "2") name: String,
        (message, repeated, tag = "5") initializer: Vec<TensorProto>,
        (string, tag = "10") doc_string: String,
        (message, repeated, tag = "11") input: Vec<ValueInfoProto>,
        (message, repeated, tag = "12") output: Vec<ValueInfoProto>,
        (message, repeated, tag = "13") value_info: Vec<ValueInfoProto>,
        (message, repeated, tag = "14") quantization_annotation: Vec<TensorAnnotation>,
        (message, repeated, tag = "15") sparse_initializer: Vec<SparseTensorProto>,
        (message, repeated, tag = "16") metadata_props: Vec<StringStringEntryProto>,
    }

    /// The names of the tensors that hold the quantization parameters of a tensor.
    TensorAnnotation {
        (string, tag = "1") tensor_name: String,
        (message, repeated, tag = "2") quant_parameter_tensor_names: Vec<StringStringEntryProto>,
    }

    /// One application of an operator. An empty name means that the input or output is left out.
    NodeProto {
        (string, repeated, tag = "1") input: Vec<String>,
        (string, repeated, tag = "2") output: Vec<String>,
        (string, tag = "3") name: String,
        (string, tag = "4") op_type: String,
        (message, repeated, tag = "5") attribute: Vec<Box<AttributeProto>>,
        (string, tag = "6") doc_string: String,
        (string, tag = "7") domain: String,
        (string, tag = "8") overload: String,
        (message, repeated, tag = "9") metadata_props: Vec<StringStringEntryProto>,
        (message, repeated, tag = "10") device_configurations: Vec<NodeDeviceConfigurationProto>,
    }

    /// What a node is on the devices of a configuration.
    NodeDeviceConfigurationProto {
        (string, tag = "1") configuration_id: String,
        (message, repeated, tag = "2") sharding_spec: Vec<ShardingSpecProto>,
        (int32, optional, tag = "3") pipeline_stage: Option<i32>,
    }

    /// How an input or an output of a node is split. Its shards, in row-major order, are on these devices, or groups of devices.
    ShardingSpecProto {
        (string, tag = "1") tensor_name: String,
        (int64, repeated, packed = "false", tag = "2") device: Vec<i64>,
        (message, repeated, tag = "3") index_to_device_group_map: Vec<IntIntListEntryProto>,
        (message, repeated, tag = "4") sharded_dim: Vec<ShardedDimProto>,
    }

    /// A number that stands for a group of devices, and the devices.
    IntIntListEntryProto {
        (int64, tag = "1") key: i64,
        (int64, repeated, packed = "false", tag = "2") value: Vec<i64>,
    }

    /// An axis of a tensor that is split. Several numbers of shards are of several axes that were fused into this one.
    ShardedDimProto {
        (int64, required, tag = "1") axis: i64,
        (message, repeated, tag = "2") simple_sharding: Vec<SimpleShardedDimProto>,
    }

    /// The extent of an axis, if it is told, and the number of its shards.
    SimpleShardedDimProto {
        (oneof = "DimensionValue", tags = "1, 2") dim: Option<DimensionValue>,
        (int64, tag = "3") num_shards: i64,
    }

    /// A named value. `type` says which field holds it. If `ref_attr_name` is set, the value is that attribute of the function's
    /// caller instead.
    AttributeProto {
        (string, tag = "1") name: String,
        (float, tag = "2") f: f32,
        (int64, tag = "3") i: i64,
        (bytes = "bytes", tag = "4") s: Bytes,
        (message, optional, boxed, tag = "5") t: Option<Box<TensorProto>>,
        (message, optional, boxed, tag = "6") g: Option<Box<GraphProto>>,
        (float, repeated, packed = "false", tag = "7") floats: Vec<f32>,
        (int64, repeated, packed = "false", tag = "8") ints: Vec<i64>,
        (bytes = "bytes", repeated, tag = "9") strings: Vec<Bytes>,
        (message, repeated, tag = "10") tensors: Vec<TensorProto>,
        (message, repeated, tag = "11") graphs: Vec<GraphProto>,
        (string, tag = "13") doc_string: String,
        (message, optional, boxed, tag = "14") tp: Option<Box<TypeProto>>,
        (message, repeated, tag = "15") type_protos: Vec<TypeProto>,
        (enumeration = "AttributeType", tag = "20") r#type: i32,
        (string, tag = "21") ref_attr_name: String,
        (message, optional, boxed, tag = "22") sparse_tensor: Option<Box<SparseTensorProto>>,
        (message, repeated, tag = "23") sparse_tensors: Vec<SparseTensorProto>,
    }

    /// A value's name and type.
    ValueInfoProto {
        (string, tag = "1") name: String,
        (message, optional, tag = "2") r#type: Option<TypeProto>,
        (string, tag = "3") doc_string: String,
        (message, repeated, tag = "4") metadata_props: Vec<StringStringEntryProto>,
    }

    /// The type of a value.
    TypeProto {
        (oneof = "TypeValue", tags = "1, 4, 5, 7, 8, 9") value: Option<TypeValue>,
        (string, tag = "6") denotation: String,
    }

    /// `TypeProto.Tensor` and `TypeProto.SparseTensor`. Without a shape the rank is unknown; an empty shape is a scalar's.
    TensorType {
        (enumeration = "DataType", tag = "1") elem_type: i32,
        (message, optional, tag = "2") shape: Option<TensorShapeProto>,
    }

    /// `TypeProto.Sequence` and `TypeProto.Optional`.
    ElemType {
        (message, optional, boxed, tag = "1") elem_type: Option<Box<TypeProto>>,
    }

    /// `TypeProto.Map`.
    MapType {
        (enumeration = "DataType", tag = "1") key_type: i32,
        (message, optional, boxed, tag = "2") value_type: Option<Box<TypeProto>>,
    }

    /// `TypeProto.Opaque`.
    OpaqueType {
        (string, tag = "1") domain: String,
        (string, tag = "2") name: String,
    }

    /// A shape whose dimensions may be named or unknown.
    TensorShapeProto {
        (message, repeated, tag = "1") dim: Vec<Dimension>,
    }

    /// One dimension; no value means unknown.
    Dimension {
        (oneof = "DimensionValue", tags = "1, 2") value: Option<DimensionValue>,
        (string, tag = "3") denotation: String,
    }

    /// A constant. Its elements are in `raw_data` (little-endian), in the field for its `data_type`, or in another file.
    TensorProto {
        (int64, repeated, packed = "false", tag = "1") dims: Vec<i64>,
        (enumeration = "DataType", tag = "2") data_type: i32,
        (float, repeated, tag = "4") float_data: Vec<f32>,
        (int32, repeated, tag = "5") int32_data: Vec<i32>,
        (bytes = "bytes", repeated, tag = "6") string_data: Vec<Bytes>,
        (int64, repeated, tag = "7") int64_data: Vec<i64>,
        (string, tag = "8") name: String,
        (bytes = "bytes", tag = "9") raw_data: Bytes,
        (double, repeated, tag = "10") double_data: Vec<f64>,
        (uint64, repeated, tag = "11") uint64_data: Vec<u64>,
        (string, tag = "12") doc_string: String,
        (message, repeated, tag = "13") external_data: Vec<StringStringEntryProto>,
        (enumeration = "DataLocation", tag = "14") data_location: i32,
        (message, repeated, tag = "16") metadata_props: Vec<StringStringEntryProto>,
    }

    /// The non-zero `values` of a tensor, at `indices`.
    SparseTensorProto {
        (message, optional, tag = "1") values: Option<TensorProto>,
        (message, optional, tag = "2") indices: Option<TensorProto>,
        (int64, repeated, packed = "false", tag = "3") dims: Vec<i64>,
    }

    /// An operator defined by other operators.
    FunctionProto {
        (string, tag = "1") name: String,
        (string, repeated, tag = "4") input: Vec<String>,
        (string, repeated, tag = "5") output: Vec<String>,
        (string, repeated, tag = "6") attribute: Vec<String>,
        (message, repeated, tag = "7") node: Vec<NodeProto>,
        (string, tag = "8") doc_string: String,
        (message, repeated, tag = "9") opset_import: Vec<OperatorSetIdProto>,
        (string, tag = "10") domain: String,
        (message, repeated, tag = "11") attribute_proto: Vec<AttributeProto>,
        (message, repeated, tag = "12") value_info: Vec<ValueInfoProto>,
        (string, tag = "13") overload: String,
        (message, repeated, tag = "14") metadata_props: Vec<StringStringEntryProto>,
    }
}

/// The type of an attribute's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum AttributeType {
    Undefined = 0,
    Float = 1,
    Int = 2,
    String = 3,
    Tensor = 4,
    Graph = 5,
    Floats = 6,
    Ints = 7,
    Strings = 8,
    Tensors = 9,
    Graphs = 10,
    SparseTensor = 11,
    SparseTensors = 12,
    TypeProto = 13,
    TypeProtos = 14,
}

/// The kinds of type.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum TypeValue {
    #[prost(message, tag = "1")]
    Tensor(TensorType),
    #[prost(message, tag = "4")]
    Sequence(ElemType),
    #[prost(message, tag = "5")]
    Map(MapType),
    #[prost(message, tag = "7")]
    Opaque(OpaqueType),
    #[prost(message, tag = "8")]
    SparseTensor(TensorType),
    #[prost(message, tag = "9")]
    Optional(ElemType),
}

impl Field for TypeValue {
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter) {
        match number {
            1 | 8 => TensorType::add(number, value, before, meter),
            4 | 9 => ElemType::add(number, value, before, meter),
            5 => MapType::add(number, value, before, meter),
            _ => OpaqueType::add(number, value, before, meter),
        }
    }
}

impl Field for DimensionValue {
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter) {
        String::add(number, value, before, meter);
    }
}

/// A dimension's size or name.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum DimensionValue {
    #[prost(int64, tag = "1")]
    DimValue(i64),
    #[prost(string, tag = "2")]
    DimParam(String),
}

/// The place of a tensor's elements: in this file or in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataLocation {
    Default = 0,
    External = 1,
}

/// `TensorProto.DataType`: ONNX's element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataType {
    Undefined = 0,
    Float = 1,
    Uint8 = 2,
    Int8 = 3,
    Uint16 = 4,
    Int16 = 5,
    Int32 = 6,
    Int64 = 7,
    String = 8,
    Bool = 9,
    Float16 = 10,
    Double = 11,
    Uint32 = 12,
    Uint64 = 13,
    Complex64 = 14,
    Complex128 = 15,
    Bfloat16 = 16,
    Float8e4m3fn = 17,
    Float8e4m3fnuz = 18,
    Float8e5m2 = 19,
    Float8e5m2fnuz = 20,
    Uint4 = 21,
    Int4 = 22,
    Float4e2m1 = 23,
    Float8e8m0 = 24,
    Uint2 = 25,
    Int2 = 26,
    Float6e2m3 = 27,
    Float6e3m2 = 28,
}

impl DataType {
    /// ONNX's names, in the order of the numbers.
    const NAMES: &'static str = "undefined float uint8 int8 uint16 int16 int32 int64 string bool float16 double uint32 \
        uint64 complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 int4 \
        float4e2m1 float8e8m0 uint2 int2 float6e2m3 float6e3m2";

    /// The name in ONNX's text syntax.
    pub fn name(self) -> &'static str {
        Self::NAMES.split(' ').nth(self as usize).expect("every number has a name")
    }

    /// The type with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<DataType> {
        let number = Self::NAMES.split(' ').position(|n| n == name)?;
        DataType::try_from(number as i32).ok()
    }

    /// Bits per element and signedness, if several elements share a byte.
    pub fn packed(self) -> Option<(usize, bool)> {
        match self {
            DataType::Uint4 | DataType::Float4e2m1 => Some((4, false)),
            DataType::Int4 => Some((4, true)),
            DataType::Uint2 => Some((2, false)),
            DataType::Int2 => Some((2, true)),
            _ => None,
        }
    }

    /// The element type of this crate, if it has one for this type.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|&d| DataType::from(d) == self)
    }
}

impl From<DType> for DataType {
    fn from(dtype: DType) -> DataType {
        match dtype {
            DType::F32 => DataType::Float,
            DType::F16 => DataType::Float16,
            DType::BF16 => DataType::Bfloat16,
            DType::F64 => DataType::Double,
            DType::I64 => DataType::Int64,
            DType::I32 => DataType::Int32,
            DType::I16 => DataType::Int16,
            DType::I8 => DataType::Int8,
            DType::U64 => DataType::Uint64,
            DType::U32 => DataType::Uint32,
            DType::U16 => DataType::Uint16,
            DType::U8 => DataType::Uint8,
            DType::Bool => DataType::Bool,
            DType::I4 => DataType::Int4,
            DType::U4 => DataType::Uint4,
            DType::I2 => DataType::Int2,
            DType::U2 => DataType::Uint2,
            DType::F8E4M3FN => DataType::Float8e4m3fn,
            DType::F8E4M3FNUZ => DataType::Float8e4m3fnuz,
            DType::F8E5M2 => DataType::Float8e5m2,
            DType::F8E5M2FNUZ => DataType::Float8e5m2fnuz,
            DType::F8E8M0 => DataType::Float8e8m0,
            DType::F4E2M1 => DataType::Float4e2m1,
        }
    }
}

/// The element type with ONNX's number `elem_type`, or a message that says why there is none.
pub fn dtype(elem_type: i32) -> Result<DType, String> {
    let known = DataType::try_from(elem_type).map_err(|_| format!("element type {elem_type} is not one of ONNX's"))?;
    known.dtype().ok_or_else(|| {
        let ours = DType::ALL.map(|d| DataType::from(d).name()).join(", ");
        format!("element type {} is not supported (supported: {ours})", known.name())
    })
}

/// The place of an external tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct External<'a> {
    /// File, relative to the model's folder; neither absolute nor through `..`.
    pub location: &'a str,
    /// First byte.
    pub offset: u64,
    /// Number of bytes. If the file does not say, as many as the tensor's type and shape need.
    pub length: u64,
}

impl SparseTensorProto {
    /// Makes the tensor `name` of zeros.
    pub fn zeros(name: &str, dtype: DType, dims: &[usize]) -> SparseTensorProto {
        let values = TensorProto {
            name: name.into(),
            dims: vec![0],
            data_type: DataType::from(dtype) as i32,
            ..Default::default()
        };
        let dims = dims.iter().map(|&d| d as i64).collect();
        SparseTensorProto { values: Some(values), indices: None, dims }
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        self.values.as_ref().map_or("", |values| &values.name)
    }

    /// The element type.
    ///
    /// # Errors
    /// It has no values, or this crate has no such element type.
    pub fn dtype(&self) -> Result<DType> {
        let values = self.values.as_ref();
        values.ok_or_else(|| Error::graph("a sparse initializer has no values".into()))?.dtype()
    }

    /// The elements that are listed, and their places. `None` if all are zero.
    ///
    /// # Errors
    /// Places are missing, or are not `[n]` or `[n, axes]` for `n` elements.
    pub fn listed(&self) -> Result<Option<(&TensorProto, &TensorProto)>> {
        let Some(values) = self.values.as_ref().filter(|values| !values.dims.contains(&0)) else { return Ok(None) };
        let error = |what: String| Error::graph(format!("sparse initializer '{}': {what}", values.name));
        let places =
            self.indices.as_ref().ok_or_else(|| error("expected the places of its elements, found none".into()))?;
        let (&[count], axes) = (&values.dims[..], self.dims.len() as i64) else {
            return Err(error(format!("expected a list of elements, found dims {:?}", values.dims)));
        };
        let fits = places.dims == [count] || places.dims == [count, axes];
        ensure(fits && places.dtype()? == DType::I64, || {
            let found = DataType::try_from(places.data_type).map_or("another type", DataType::name);
            error(format!("expected places int64 [{count}] or [{count}, {axes}], found {found} {:?}", places.dims))
        })?;
        Ok(Some((values, places)))
    }

    /// The sizes of the dimensions.
    ///
    /// # Errors
    /// One of them is negative.
    pub fn shape(&self) -> Result<Vec<usize>> {
        TensorProto { name: self.name().into(), dims: self.dims.clone(), ..Default::default() }.shape()
    }
}

impl TensorProto {
    /// True if it has one element, which is zero.
    pub fn is_zero(&self) -> bool {
        let one = self.len().is_ok_and(|len| len == 1) && self.external_data.is_empty();
        one && self.bytes().is_ok_and(|bytes| bytes.iter().all(|&byte| byte == 0))
    }

    /// Makes the tensor `name` from its elements, row-major and little-endian.
    ///
    /// # Errors
    /// The number of bytes is not what the type and the shape need.
    pub fn new(name: &str, dtype: DType, dims: &[usize], bytes: Bytes) -> Result<TensorProto> {
        let signed = |&d: &usize| {
            i64::try_from(d)
                .map_err(|_| Error::graph(format!("tensor '{name}': dimension {d} is larger than 2^63 - 1")))
        };
        let dims = dims.iter().map(signed).collect::<Result<_>>()?;
        let data_type = DataType::from(dtype) as i32;
        let bytes = if dtype.bits() < 8 { narrow::pack(dtype, &bytes).into() } else { bytes };
        let tensor = TensorProto { name: name.into(), dims, data_type, raw_data: bytes, ..Default::default() };
        tensor.expect_len("bytes", tensor.byte_len()?, tensor.raw_data.len())?;
        Ok(tensor)
    }

    /// The element type.
    ///
    /// # Errors
    /// This crate has no such element type.
    pub fn dtype(&self) -> Result<DType> {
        dtype(self.data_type).map_err(|what| self.error(what))
    }

    /// The sizes of the dimensions.
    ///
    /// # Errors
    /// One of them is negative.
    pub fn shape(&self) -> Result<Vec<usize>> {
        let size =
            |&d: &i64| usize::try_from(d).map_err(|_| self.error(format!("negative dimension in {:?}", self.dims)));
        self.dims.iter().map(size).collect()
    }

    /// Bits per element and signedness, if several elements share a byte.
    pub fn packed(&self) -> Option<(usize, bool)> {
        DataType::try_from(self.data_type).ok()?.packed()
    }

    /// The same data as a tensor of bytes, for elements that share bytes. The first element has a byte's lowest bits.
    ///
    /// # Errors
    /// The number of bytes overflows, or the element type is not one of this crate.
    pub fn shared(&self) -> Result<TensorProto> {
        let bytes = i64::try_from(self.byte_len()?).map_err(|_| self.too_large())?;
        Ok(TensorProto { dims: vec![bytes], data_type: DataType::Uint8 as i32, ..self.clone() })
    }

    /// The number of bytes that the type and the shape need.
    pub fn byte_len(&self) -> Result<u64> {
        if let Some((bits, _)) = self.packed() {
            return Ok(self.len()?.div_ceil(8 / bits as u64));
        }
        self.len()?.checked_mul(self.dtype()?.size() as u64).ok_or_else(|| self.too_large())
    }

    /// The place of the elements, if they are in another file.
    ///
    /// # Errors
    /// The location is outside the model's folder, an offset or length is no number, or the length is not what the type and
    /// the shape need.
    pub fn external(&self) -> Result<Option<External<'_>>> {
        if self.data_location != DataLocation::External as i32 {
            return Ok(None);
        }
        let get = |key| self.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str());
        let number = |key| match get(key) {
            None => Ok(None),
            Some(text) => text
                .parse()
                .map(Some)
                .map_err(|_| self.error(format!("external data: {key} '{text}' is not a number of bytes"))),
        };
        let location =
            get("location").filter(|l| !l.is_empty()).ok_or_else(|| self.error("external data: no location".into()))?;
        let inside = std::path::Path::new(location)
            .components()
            .all(|c| matches!(c, std::path::Component::Normal(_) | std::path::Component::CurDir));
        ensure(inside, || self.error(format!("external data: location '{location}' leaves the model's folder")))?;
        let needed = self.byte_len()?;
        let length = number("length")?.unwrap_or(needed);
        self.expect_len("bytes of external data", needed, length)?;
        Ok(Some(External { location, offset: number("offset")?.unwrap_or(0), length }))
    }

    /// The elements, row-major and little-endian. A `bool` is true if its byte is not 0. Raw data is shared, not copied, but for elements that
    /// share bytes: each gets one of its own.
    ///
    /// # Errors
    /// The elements are in another file (see [`external`](Self::external)), their number is not what the shape needs, or
    /// one does not fit the element type; or this crate has no such element type.
    pub fn bytes(&self) -> Result<Bytes> {
        let dtype = self.dtype()?;
        if dtype.bits() < 8 {
            return Ok(narrow::unpack(dtype, &self.shared()?.bytes()?, self.len()? as usize).into());
        }
        if let Some(external) = self.external()? {
            return Err(self.error(format!("its data is in '{}', which was not loaded", external.location)));
        }
        let (field, found) = match dtype {
            DType::F32 => ("float_data", self.float_data.len()),
            DType::F64 => ("double_data", self.double_data.len()),
            DType::I64 => ("int64_data", self.int64_data.len()),
            DType::U64 | DType::U32 => ("uint64_data", self.uint64_data.len()),
            _ => ("int32_data", self.int32_data.len()),
        };
        if !self.raw_data.is_empty() {
            ensure(found == 0, || self.error(format!("it has both raw_data and {field}")))?;
            self.expect_len("bytes of raw_data", self.byte_len()?, self.raw_data.len())?;
            return Ok(self.raw_data.clone());
        }
        self.expect_len(&format!("values of {field}"), self.len()?, found)?;
        Ok(match dtype {
            DType::F32 => self.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::F64 => self.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::I64 => self.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::I32 => self.int32_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::Bool => self.int32_data.iter().map(|&v| u8::from(v != 0)).collect(),
            DType::U64 => self.uint64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::U32 => self.short()?.into_iter().flat_map(u32::to_le_bytes).collect(),
            DType::U8 | DType::F8E4M3FN | DType::F8E4M3FNUZ | DType::F8E5M2 | DType::F8E5M2FNUZ | DType::F8E8M0 => {
                self.narrow(|v| u8::try_from(v).ok())?.into()
            }
            DType::I4 | DType::U4 | DType::I2 | DType::U2 | DType::F4E2M1 => unreachable!("they share bytes"),
            DType::I16 => self.narrow(|v| i16::try_from(v).ok())?.into_iter().flat_map(i16::to_le_bytes).collect(),
            DType::I8 => self.narrow(|v| i8::try_from(v).map(|v| v as u8).ok())?.into(),
            // ONNX stores the 16 bits of a float in the lower half of an i32.
            DType::F16 | DType::BF16 | DType::U16 => {
                self.narrow(|v| u16::try_from(v).ok())?.into_iter().flat_map(u16::to_le_bytes).collect()
            }
        })
    }

    fn short(&self) -> Result<Vec<u32>> {
        let fits = |(i, &v): (usize, &u64)| {
            u32::try_from(v).map_err(|_| self.error(format!("uint64_data[{i}] = {v} does not fit its element type")))
        };
        self.uint64_data.iter().enumerate().map(fits).collect()
    }

    fn narrow<T>(&self, fit: impl Fn(i32) -> Option<T>) -> Result<Vec<T>> {
        let fits = |(i, &v): (usize, &i32)| {
            fit(v).ok_or_else(|| self.error(format!("int32_data[{i}] = {v} does not fit its element type")))
        };
        self.int32_data.iter().enumerate().map(fits).collect()
    }

    /// Number of elements.
    fn len(&self) -> Result<u64> {
        let dims = self.shape()?;
        // The product of the other dimensions may overflow, so look for a zero first.
        if dims.contains(&0) {
            return Ok(0);
        }
        dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64)).ok_or_else(|| self.too_large())
    }

    fn expect_len(&self, what: &str, expected: u64, found: impl TryInto<u64>) -> Result<()> {
        let found = found.try_into().unwrap_or(u64::MAX);
        if found == expected { Ok(()) } else { Err(self.error(format!("expected {expected} {what}, found {found}"))) }
    }

    fn too_large(&self) -> Error {
        self.error("its size overflows 64 bits".into())
    }

    fn error(&self, what: String) -> Error {
        let kind = DataType::try_from(self.data_type).map_or("?", DataType::name);
        Error::graph(format!("tensor '{}' ({kind} {:?}): {what}", self.name, self.dims))
    }
}
