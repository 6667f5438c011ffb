//! The text syntax of ONNX: printing undoes parsing, and faults are told with their place.

use plimsoll::internals::onnx::proto::*;
use plimsoll::internals::onnx::text::{parse, print};
use plimsoll::{DType, Error, Result};
use prost::Message;
use std::path::Path;

/// The deepest nesting of graphs and types.
const MAX_DEPTH: usize = 32;

/// A model with every form of the syntax, as `print` writes it.
const ALL: &str = r#"<
   ir_version: 10,
   opset_import: ["" : 17, "my.domain" : 1],
   producer_name: "a \"quoted\" \\ name",
   producer_version: "1",
   domain: "d",
   model_version: 2,
   doc_string: "two
lines",
   metadata_props: ["key": "value", "": ""]
>
main (float[N, 4] x, bool c, float16[] any, seq(float[?]) s, untyped, "float") => (float[N, "a b", ?] y,
   undefined u) <
   float[2, 3] w = {1, -0, 0.1, inf, -inf, 1e-45},
   float[17, 2] rows = {
      0, 1,
      2, 3,
      4, 5,
      6, 7,
      8, 9,
      10, 11,
      12, 13,
      14, 15,
      16, 17,
      18, 19,
      20, 21,
      22, 23,
      24, 25,
      26, 27,
      28, 29,
      30, 31,
      32, 33},
   double "not an identifier" = {1.7976931348623157e308},
   float16[2] h = {15360, 65535},
   bool[2] b = {1, 0},
   int8[2] i8 = {-128, 127},
   uint64 u64 = {18446744073709551615},
   int64[0, 9] none = {},
   complex64[1] z = {1, 2},
   int4[3] nibbles = {33, 3},
   string[2] strings = {"a\\b", "é\""},
   float[1000000000, 1000000000] elsewhere = ["location": "w.bin", "offset": "4096"],
   map(string, optional(int64)) m,
   sparse_tensor(float[9]) sp,
   opaque(a.b, c) o,
   opaque() oo
> {
   [first] h, "" = MatMul(x, w)
   = my.domain.Sink:over(h)
   y = "pkg.2.1".Kinds <f = 1.0, g = -inf, i = -3, s = "<&>", fs = [1.0, 2.5e-8], is = [1, 2], ss = ["a", ""],
      t = float {1}, named = int64[1] n = {2}, away = float = ["location": "w"], tp = seq(float[]),
      none: ints = [], ts: tensors = [float {1}, int64 {2}], tps: type_protos = [float[1], bool]> (h, "", last)
   z = If(c) <
      then_branch = left () => (float z) <
         float one = {1}
      > {
         z = Identity(one)
      },
      else_branch: graph = "right-hand side" () => (float z) {
         z = Neg(x)
      },
      more: graphs = [g () => () {
         }, h () => () {
         }]
   >
}
<
   domain: "my.domain",
   overload: "over",
   opset_import: ["" : 17],
   doc_string: "a function"
>
Sink <alpha, beta = 2.5> (x, "seq") => (y) <
   float[N] x
> {
   y = LeakyRelu <alpha: float = @alpha, free = @beta> (x)
}
"#;

fn read(text: &str) -> Result<ModelProto> {
    parse(text, Path::new("m.onnxtxt"))
}

/// A graph with one node.
fn node(text: &str) -> NodeProto {
    read(&format!("g () => () {{ {text} }}")).unwrap().graph.unwrap().node.remove(0)
}

#[test]
fn printing_undoes_parsing() {
    let model = read(ALL).unwrap();
    assert_eq!(print(&model), ALL);
    assert_eq!(ModelProto::decode(model.encode_to_vec().as_slice()).unwrap(), model);
}

#[test]
fn tensors_keep_every_bit() {
    // Steps over all of 2^32 and 2^64, so that every exponent is met.
    let bits32 = (0..20_000u32).map(|i| i.wrapping_mul(0x9e37_79b9));
    let bits64 = (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let f32s: Vec<u8> = bits32.filter(|b| !f32::from_bits(*b).is_nan()).flat_map(u32::to_le_bytes).collect();
    let f64s: Vec<u8> = bits64.clone().filter(|b| !f64::from_bits(*b).is_nan()).flat_map(u64::to_le_bytes).collect();
    let any: Vec<u8> = bits64.take(512).flat_map(u64::to_le_bytes).collect();
    for dtype in DType::ALL {
        let bytes: Vec<u8> = match dtype {
            DType::F32 => f32s.clone(),
            DType::F64 => f64s.clone(),
            DType::Bool => any.iter().map(|b| b & 1).collect(),
            // The lowest bits, with their sign.
            DType::I4 => any.iter().map(|b| ((b << 4) as i8 >> 4) as u8).collect(),
            DType::I2 => any.iter().map(|b| ((b << 6) as i8 >> 6) as u8).collect(),
            dtype if dtype.bits() < 8 => any.iter().map(|b| b & ((1 << dtype.bits()) - 1)).collect(),
            _ => any.clone(),
        };
        let dims = [bytes.len() / dtype.size()];
        let tensor = TensorProto::new("t", dtype, &dims, bytes.clone().into()).unwrap();
        let graph = GraphProto { name: "g".into(), initializer: vec![tensor], ..Default::default() };
        let text = print(&ModelProto { graph: Some(graph), ..Default::default() });
        let back = read(&text).unwrap();
        assert!(back.graph.as_ref().unwrap().initializer[0].bytes().unwrap() == bytes, "{dtype}");
        assert!(print(&back) == text, "{dtype}");
    }
    let nan = read("g () => () <float[2] t = {nan, -NaN}> {}").unwrap();
    assert!(nan.graph.as_ref().unwrap().initializer[0].float_data.iter().all(|v| v.is_nan()));
    assert!(print(&nan).contains("float[2] t = {nan, nan}"));
}

#[test]
fn reads_all_that_people_write() {
    let names = |text: &str| node(&format!("= Op({text})")).input;
    assert_eq!(names(""), [""; 0]);
    assert_eq!(names("\"\""), [""]);
    assert_eq!(names(","), [""]);
    assert_eq!(names("x,"), ["x"]);
    assert_eq!(names(",x, # a comment ) \n ,\"y z\""), ["", "x", "", "y z"]);

    let op = node("[\"a b\"] a, b = com . example.Op : v1 (x) <i = 1>");
    assert_eq!((op.name.as_str(), op.domain.as_str(), op.op_type.as_str()), ("a b", "com.example", "Op"));
    assert_eq!((op.overload.as_str(), op.output.len(), op.attribute.len()), ("v1", 2, 1));
    assert_eq!(node("y = pkg.torch.2.1.0.f(x)").domain, "pkg.torch.2.1.0");

    use AttributeType::*;
    for (text, kind) in [
        ("1", Int),
        ("-1", Int),
        ("1.", Float),
        ("1E5", Float),
        ("-Infinity", Float),
        ("NaN", Float),
        ("\"1\"", String),
        ("float {1}", Tensor),
        ("float[1] {1}", Tensor),
        ("float[1] name {1}", Tensor),
        ("float[1] = {1}", Tensor),
        ("float", TypeProto),
        ("nano () => () {}", Graph),
        ("\"q\" () => () {}", Graph),
        ("[1, 2]", Ints),
        ("[1.5, 2]", Floats),
        ("[\"a\"]", Strings),
        ("@outer", Undefined),
    ] {
        assert_eq!(node(&format!("y = Op <a = {text}> ()")).attribute[0].r#type(), kind, "{text}");
    }
    assert_eq!(node("y = Op <a: float = -0> ()").attribute[0].f.to_bits(), (-0.0f32).to_bits());
    assert_eq!(node("y = Op <a: floats = [1, 2]> ()").attribute[0].floats, [1.0, 2.0]);
    assert_eq!(&node("y = Op <a = \"\\n\\\"\\\\\"> ()").attribute[0].s[..], b"n\"\\");

    let old = read("g (float[2] x = {1, 2}, float y) => (float z) <float w = {3}, float v> { z = Add(x, y) }").unwrap();
    let graph = old.graph.unwrap();
    assert_eq!((graph.input.len(), graph.initializer.len(), graph.value_info.len()), (2, 2, 1));
    let f = read("g () => () {} f (float[N] x, y) => (seq(float) z) <bool b> {}").unwrap().functions.remove(0);
    assert_eq!((f.input.len(), f.output.len(), f.value_info.len()), (2, 1, 3));
}

#[test]
fn says_where_and_what() {
    // Position, part of the message, and the text, in which \n is a new line.
    let wrong = r#"
1:1 | expected the name of a graph, found the end of the text |
3:3 | metadata_props or configuration, found 'opset' | <\n  ir_version: 8,\n  opset: 1>
1:14 | expected a version, found a string | <ir_version: "8">
1:14 | expected a version, found '9223372036854775808' | <ir_version: 9223372036854775808>
1:12 | expected ',' or ']' after a dimension, found 'x' | g (float[N x) => () {}
1:12 | expected the name of a value, found ')' | g (float[N]) => () {}
1:8 | expected '=>' and outputs, found '(' | g () = () {}
2:3 | expected '=' after the outputs of a node, found 'é' | g () => () {\n  é = Op(x)\n}
1:25 | expected ',' or ')' after an input, found 'y' | g () => () { "é" = Op(x y) }
1:26 | expected the value of an attribute, found '>' | g () => () { y = Op <a = > (x) }
1:26 | expected a type such as ': ints' before '=' | g () => () { y = Op <a = []> (x) }
1:25 | expected the type of an attribute (float, int, | g () => () { y = Op <a: integer = 1> (x) }
1:31 | expected a value of type int, found one of type float | g () => () { y = Op <a: int = 1.5> (x) }
1:30 | expected a value of type int, found one of type float | g () => () { y = Op <a = [1, 1.5]> (x) }
1:26 | expected a 32-bit float, found '1e99' | g () => () { y = Op <a = 1e99> (x) }
1:26 | expected '"' at the end of this string | g () => () { y = Op <a = "b> (x) }
1:23 | expected a node or '}', found the end of the text | g () => () { y = Op(x)
1:13 | found '[]', which is an unknown rank | g () => () <float[] t = {1}> {}
1:13 | expected a tensor whose dimensions are all numbers | g () => () <float[N] t = {1}> {}
1:13 | expected an element type and a shape | g () => () <seq(float) t = {1}> {}
1:26 | expected '{' and values, or '[' and where they are, found '1' | g () => () <float[2] t = 1> {}
1:37 | expected 4 value(s) for float [2, 2], found 3 | g () => () <float[2, 2] t = {1, 2, 3}> {}
1:48 | expected more than 2^64 value(s) | g () => () <float[9999999999, 9999999999] t = {}> {}
1:23 | an integer from -128 to 127, found '128' | g () => () <int8 t = {128}> {}
1:26 | expected the bits of a value of float16, an integer from 0 to 65535 | g () => () <float16 t = {1.5}> {}
1:23 | expected a value of bool, an integer from | g () => () <bool t = {true}> {}
1:15 | expected the name of a function, found '}' | g () => () {} }
"#;
    for line in wrong.trim().lines() {
        let mut parts = line.splitn(3, " |");
        let mut part = || parts.next().expect("three parts").trim().replace("\\n", "\n");
        let (place, what, text) = (part(), part(), part());
        let message = read(&text).expect_err(&text).to_string();
        assert!(message.starts_with(&format!("m.onnxtxt:{place}: ")) && message.contains(&what), "{text}\n{message}");
    }
}

#[test]
fn damaged_text_is_an_error_and_no_panic() {
    // The text is complete after the graph, after the function, and after the new lines that follow them.
    let (graph_end, function_end) = (ALL.rfind("\n<").expect("a function"), ALL.len() - 1);
    for end in (0..ALL.len()).filter(|&end| ALL.is_char_boundary(end)) {
        let whole = [graph_end, graph_end + 1, function_end].contains(&end);
        assert_eq!(read(&ALL[..end]).is_ok(), whole, "{}", &ALL[..end]);
    }
    let mut random = 1u32;
    let mut next = |below: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) as usize % below
    };
    let alphabet: Vec<char> = "<>(){}[],.:=@#\"\\?-+_ \n0189eEinfatxé\u{0}".chars().collect();
    let mut refused = 0;
    for _ in 0..4000 {
        let mut chars: Vec<char> = ALL.chars().collect();
        for _ in 0..1 + next(3) {
            let at = next(chars.len());
            match next(3) {
                0 => chars[at] = alphabet[next(alphabet.len())],
                1 => chars.insert(at, alphabet[next(alphabet.len())]),
                _ => drop(chars.drain(at..(at + 1 + next(30)).min(chars.len()))),
            }
        }
        let text: String = chars.into_iter().collect();
        match read(&text) {
            Ok(model) => drop(print(&model)),
            Err(Error::Syntax { line, column, .. }) => {
                let found = text.split('\n').nth(line - 1).expect("the line exists");
                assert!(column <= found.chars().count() + 1);
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!((1000..4000).contains(&refused), "{refused}");
}

#[test]
fn nesting_is_bounded() {
    let types = |n: usize| format!("g ({}float{} x) => () {{}}", "seq(".repeat(n), ")".repeat(n));
    let graphs = |n: usize| {
        let (open, close) = ("g () => () { y = Op <a = ", "> () }");
        format!("{}g () => () {{}}{}", open.repeat(n), close.repeat(n))
    };
    for text in [types(MAX_DEPTH - 1), graphs(MAX_DEPTH - 1)] {
        let model = read(&text).unwrap();
        assert_eq!(read(&print(&model)).unwrap(), model);
        assert_eq!(ModelProto::decode(model.encode_to_vec().as_slice()).unwrap(), model);
    }
    for text in [types(MAX_DEPTH), graphs(MAX_DEPTH), types(100_000), graphs(100_000)] {
        assert!(read(&text).unwrap_err().to_string().contains("expected at most 32 levels of graphs and types"));
    }
}
