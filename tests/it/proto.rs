//! The messages of ONNX's protobuf files: their tensors' elements, wherever these are stored.

use bytes::Bytes;
use plimsoll::internals::onnx::proto::*;
use plimsoll::{DType, Result};
use prost::Message;

fn tensor(data_type: DataType, dims: &[i64]) -> TensorProto {
    TensorProto { name: "w".into(), data_type: data_type as i32, dims: dims.into(), ..Default::default() }
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.expect_err("must be refused").to_string()
}

#[test]
fn raw_data_is_a_window_into_the_file() {
    let w = TensorProto::new("w", DType::F32, &[1024], vec![7; 4096].into()).unwrap();
    let graph = GraphProto { initializer: vec![w.clone()], ..Default::default() };
    let value = AttributeProto { name: "value".into(), t: Some(Box::new(w)), ..Default::default() };
    let node = NodeProto { attribute: vec![Box::new(value)], ..Default::default() };
    let model = ModelProto { graph: Some(GraphProto { node: vec![node], ..graph }), ..Default::default() };
    let file = Bytes::from(model.encode_to_vec());
    let read = ModelProto::decode(file.clone()).unwrap();
    assert_eq!(read, model);
    let graph = read.graph.unwrap();
    let constant = graph.node[0].attribute[0].t.as_ref().unwrap();
    for bytes in [graph.initializer[0].bytes().unwrap(), constant.bytes().unwrap()] {
        assert_eq!(bytes.len(), 4096);
        assert!(file.as_ptr_range().contains(&bytes.as_ptr()));
    }
}

/// Of numbers that a file packs, one of a byte takes eight of memory.
#[test]
fn packed_numbers_may_take_more_than_the_file() {
    let count = 9 << 20;
    let w = TensorProto { int64_data: vec![1; count], ..tensor(DataType::Int64, &[count as i64]) };
    let model = ModelProto {
        ir_version: 8,
        opset_import: vec![OperatorSetIdProto { version: 17, ..Default::default() }],
        graph: Some(GraphProto { name: "g".into(), initializer: vec![w], ..Default::default() }),
        ..Default::default()
    };
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("packed.onnx");
    std::fs::write(&path, model.encode_to_vec()).expect("it is written");
    let read = plimsoll::internals::onnx::load(&path);
    std::fs::remove_file(&path).expect("it is there");
    read.expect("it is a model");
}

#[test]
fn every_storage_form_gives_the_same_bytes() {
    type Case<'a> = (DType, &'a [i64], fn(&mut TensorProto), &'a [u8]);
    let cases: [Case; 13] = [
        (DType::F32, &[2], |t| t.float_data = vec![1.0, -2.0], &[0, 0, 128, 63, 0, 0, 0, 192]),
        (DType::F64, &[], |t| t.double_data = vec![1.0], &[0, 0, 0, 0, 0, 0, 240, 63]),
        (DType::I64, &[1], |t| t.int64_data = vec![-2], &[254, 255, 255, 255, 255, 255, 255, 255]),
        (DType::I32, &[1, 1], |t| t.int32_data = vec![258], &[2, 1, 0, 0]),
        (DType::F16, &[2], |t| t.int32_data = vec![0x3c00, 0xbc00], &[0, 0x3c, 0, 0xbc]),
        (DType::BF16, &[1], |t| t.int32_data = vec![0x3f80], &[0x80, 0x3f]),
        (DType::U8, &[2], |t| t.int32_data = vec![0, 255], &[0, 255]),
        (DType::I8, &[2], |t| t.int32_data = vec![-1, 127], &[255, 127]),
        (DType::I16, &[2], |t| t.int32_data = vec![-2, 258], &[254, 255, 2, 1]),
        (DType::U16, &[2], |t| t.int32_data = vec![65534, 258], &[254, 255, 2, 1]),
        (DType::U32, &[1], |t| t.uint64_data = vec![1 << 31 | 5], &[5, 0, 0, 128]),
        (DType::U64, &[1], |t| t.uint64_data = vec![1 << 63 | 5], &[5, 0, 0, 0, 0, 0, 0, 128]),
        (DType::Bool, &[3], |t| t.int32_data = vec![0, 1, 5], &[0, 1, 1]),
    ];
    for (dtype, dims, fill, expected) in cases {
        let mut typed = tensor(dtype.into(), dims);
        fill(&mut typed);
        assert_eq!(typed.bytes().unwrap(), expected, "{dtype}");
        let shape = typed.shape().unwrap();
        let raw = TensorProto::new("w", dtype, &shape, Bytes::copy_from_slice(expected)).unwrap();
        assert_eq!((raw.dtype().unwrap(), raw.shape().unwrap()), (dtype, shape));
        assert_eq!(raw.bytes().unwrap(), expected, "{dtype}");
    }
    let empty = tensor(DataType::Float, &[i64::MAX, 0, i64::MAX]);
    assert_eq!((empty.byte_len().unwrap(), empty.bytes().unwrap().len()), (0, 0));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let few = TensorProto { float_data: vec![1.0], ..tensor(DataType::Float, &[2, 3]) };
    assert_eq!(text(few.bytes()), "graph: tensor 'w' (float [2, 3]): expected 6 values of float_data, found 1");
    let raw = TensorProto { raw_data: vec![0; 7].into(), ..tensor(DataType::Float, &[2]) };
    assert!(text(raw.bytes()).ends_with("expected 8 bytes of raw_data, found 7"));
    let both = TensorProto { raw_data: vec![0; 4].into(), float_data: vec![0.0], ..tensor(DataType::Float, &[1]) };
    assert!(text(both.bytes()).ends_with("it has both raw_data and float_data"));
    let long = TensorProto { uint64_data: vec![1 << 32], ..tensor(DataType::Uint32, &[1]) };
    assert!(text(long.bytes()).ends_with("uint64_data[0] = 4294967296 does not fit its element type"));
    for (kind, value) in
        [(DataType::Int8, 128), (DataType::Uint8, -1), (DataType::Float16, 65536), (DataType::Int16, 32768)]
    {
        let wide = TensorProto { int32_data: vec![value], ..tensor(kind, &[1]) };
        assert!(text(wide.bytes()).ends_with(&format!("int32_data[0] = {value} does not fit its element type")));
    }
    assert!(
        text(tensor(DataType::Complex64, &[1]).bytes())
            .contains("element type complex64 is not supported (supported: float, ")
    );
    assert!(text(TensorProto { data_type: 99, ..Default::default() }.dtype()).contains("element type 99"));
    assert!(text(tensor(DataType::Float, &[-1]).bytes()).contains("negative dimension in [-1]"));
    assert!(text(tensor(DataType::Float, &[i64::MAX, 3]).bytes()).ends_with("its size overflows 64 bits"));
    assert!(text(tensor(DataType::Double, &[i64::MAX]).byte_len()).ends_with("its size overflows 64 bits"));
    assert!(text(TensorProto::new("w", DType::F32, &[2], Bytes::new())).ends_with("expected 8 bytes, found 0"));
}

#[test]
fn external_data_stays_in_the_folder() {
    let external = |entries: &[(&str, &str)]| TensorProto {
        data_location: DataLocation::External as i32,
        external_data: entries
            .iter()
            .map(|&(key, value)| StringStringEntryProto { key: key.into(), value: value.into() })
            .collect(),
        ..tensor(DataType::Float, &[2])
    };
    let whole = external(&[("location", "sub/w.bin"), ("offset", "4096"), ("length", "8"), ("checksum", "x")]);
    assert_eq!(whole.external().unwrap(), Some(External { location: "sub/w.bin", offset: 4096, length: 8 }));
    assert!(text(whole.bytes()).ends_with("its data is in 'sub/w.bin', which was not loaded"));
    let least = external(&[("location", "w.bin")]);
    assert_eq!(least.external().unwrap(), Some(External { location: "w.bin", offset: 0, length: 8 }));
    assert_eq!(tensor(DataType::Float, &[2]).external().unwrap(), None);
    for (entries, what) in [
        (&[][..], "no location"),
        (&[("location", "../w.bin")], "leaves the model's folder"),
        (&[("location", "/w.bin")], "leaves the model's folder"),
        (&[("location", "w"), ("offset", "-1")], "offset '-1' is not a number of bytes"),
        (&[("location", "w"), ("length", "4")], "expected 8 bytes of external data, found 4"),
    ] {
        let message = text(external(entries).external());
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn names_and_numbers_of_element_types_agree() {
    for number in 0..29 {
        let kind = DataType::try_from(number).unwrap();
        assert_eq!(DataType::from_name(kind.name()), Some(kind));
        assert_eq!(format!("{kind:?}").to_lowercase(), kind.name());
    }
    assert!(DataType::try_from(29).is_err());
    for dtype in DType::ALL {
        assert_eq!(DataType::from(dtype).dtype(), Some(dtype));
    }
}
