//! States in files: saved and loaded by name, as safetensors.

use crate::common::{self, Folder};
use plimsoll::internals::npy;
use plimsoll::internals::safetensors::SafeTensors;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::{DType, Graph, Recipe, Shape, Target, Tensor, Trace};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

fn options() -> Options {
    Options { threads: 2, ..Options::default() }.on(Choice::Cpu)
}

fn counted(dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let values: Vec<f64> =
        (0..shape.numel()).map(|n| if dtype == DType::Bool { n % 2 } else { n % 100 } as f64).collect();
    Tensor::from_f64(dtype, shape, &values)
}

/// A state of every type, in shapes whose bytes are no whole number of words; one that is updated, one that is moved in several pieces, one
/// without elements.
fn every_type(name: &str, target: &Target) -> Graph {
    use DType::{BF16, Bool, F16, F32, I8, I32, I64, U8};
    let is_held = |dtype: &DType| target.storage(*dtype).is_ok();
    let g = Trace::new(name);
    let (x, sum) = (g.input("x", F32, [3]), g.state("sum", counted(F32, [3])));
    g.update(sum, sum + x);
    for dtype in [F32, F16, BF16, I64, I32, U8, I8, Bool].into_iter().filter(is_held) {
        g.state(dtype.name(), counted(dtype, [3, 7]));
    }
    g.state("scalar", counted(F32, Shape::default()));
    g.state("empty", counted(F32, [0, 4]));
    g.state("large", counted(F32, [3, 300_001]));
    g.state("large \"i64\"", counted(I64, [400_003]));
    if is_held(&F16) {
        g.state("large f16", counted(F16, [3, 300_001]));
    }
    g.finish().expect("the graph is sound")
}

fn open(graph: Graph, (_, open): &common::Opener, recipe: Recipe) -> Session {
    let options = Options { recipe, ..options() };
    common::load(graph, open(), "a device", &options).expect("it loads")
}

fn states(session: &Session) -> BTreeMap<String, Tensor> {
    let names = session.plan().programs[0].state.iter().map(|state| state.port.name.clone());
    names.map(|name| (name.clone(), session.state(&name).expect("it is a state"))).collect()
}

fn one(x: f64) -> [(&'static str, Tensor); 1] {
    [("x", Tensor::from_f64(DType::F32, [3], &[x; 3]))]
}

#[test]
fn states_come_back_on_every_backend() {
    let folder = Folder::new("saved");
    let path = folder.path("states.safetensors");
    for opener in common::backends() {
        let target = opener.1().target().clone();
        let made = open(every_type("every", &target), &opener, Recipe::default());
        for _ in 0..3 {
            made.run(&one(0.5)).expect("it runs");
        }
        made.save_states(&path).expect("it is written");
        let before = states(&made);
        assert_eq!(before["sum"].to_f64(), [1.5, 2.5, 3.5]);
        made.run(&one(2.0)).expect("it runs");
        if before.contains_key("bool") {
            made.set_state("bool", &Tensor::from_f64(DType::Bool, [3, 7], &[1.0; 21])).expect("it fits");
        }
        made.load_states(&path).expect("it is the session's own file");
        assert_eq!(states(&made), before, "{}", opener.0);
        // Another graph with these states, and another form inside.
        let other = open(every_type("other", &target), &opener, Recipe { fuse: false, ..Recipe::default() });
        other.load_states(&path).expect("it has the same states");
        assert_eq!(states(&other), before, "{}", opener.0);
        other.run(&one(1.0)).expect("it runs");
        assert_eq!(other.state("sum").expect("it is a state").to_f64(), [2.5, 3.5, 4.5]);
        let left: Vec<_> = fs::read_dir(&folder.0).expect("it is there").collect();
        assert_eq!(left.len(), 1, "nothing is left beside the file");
    }
}

/// The elements are those of any reader: the format's own order, aligned, with the names of the graph and of the project.
#[test]
fn a_file_is_plain_safetensors() {
    let folder = Folder::new("plain");
    let path = folder.path("states.safetensors");
    let g = Trace::new("plain \"graph\"");
    g.state("b", Tensor::from_f64(DType::U8, [3], &[1.0, 2.0, 3.0]));
    g.state("a", Tensor::from_f64(DType::F16, [1, 2], &[1.0, -2.0]));
    g.state("c", Tensor::from_i64(Shape::default(), &[-5]).expect("one number"));
    g.output("y", g.input("x", DType::F32, [1]).relu());
    let graph = g.finish().expect("the graph is sound");
    let session = Session::from_graph(graph, &options()).expect("it loads");
    session.save_states(&path).expect("it is written");
    let bytes = fs::read(&path).expect("it is there");
    let header = r#"{"__metadata__":{"graph":"plain \"graph\"","producer":"plimsoll"},"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a":{"dtype":"F16","shape":[1,2],"data_offsets":[8,12]},"b":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}}"#;
    let length = header.len().next_multiple_of(8);
    assert_eq!(bytes[..8], (length as u64).to_le_bytes());
    assert_eq!(std::str::from_utf8(&bytes[8..8 + length]).expect("it is text").trim_end(), header);
    assert_eq!(bytes[8 + length..], [0xfb, 255, 255, 255, 255, 255, 255, 255, 0, 0x3c, 0, 0xc0, 1, 2, 3]);

    // Another writer has another order, and no metadata.
    fs::write(&path, file(r#"{"b":{"shape":[3],"data_offsets":[0,3],"dtype":"U8"}, "a":{"dtype":"F16","shape":[1,2],"data_offsets":[3,7]},"c":{"dtype":"I64","shape":[],"data_offsets":[7,15]}}  "#, 15)).expect("it is written");
    session.load_states(&path).expect("it has the states");
    assert_eq!(session.state("b").expect("it is a state").to_f64(), [0.0, 1.0, 2.0]);
    assert_eq!(session.state("c").expect("it is a state").to_i64().expect("a number"), [0x0e0d_0c0b_0a09_0807]);
}

/// A file with this header, and as many bytes behind it.
fn file(header: &str, bytes: u8) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &(0..bytes).collect::<Vec<_>>()].concat()
}

/// A session with two states, which have been changed.
fn small() -> Session {
    let g = Trace::new("small");
    let (x, sum) = (g.input("x", DType::F32, [3]), g.state("sum", counted(DType::F32, [3])));
    g.update(sum, sum + x);
    g.state("fixed", counted(DType::U8, [2]));
    let session = Session::from_graph(g.finish().expect("the graph is sound"), &options()).expect("it loads");
    session.run(&one(0.5)).expect("it runs");
    session
}

/// What is wrong with a file, for a session that keeps its states.
fn refused(session: &Session, folder: &Folder, content: &[u8]) -> String {
    let path = folder.path("refused.safetensors");
    fs::write(&path, content).expect("it is written");
    let before = states(session);
    let error = session.load_states(&path).expect_err("the file is refused").to_string();
    assert_eq!(states(session), before, "a refused file leaves states as before");
    let own = format!("{path}: ");
    error.strip_prefix(&own).unwrap_or_else(|| panic!("expected '{own}' before: {error}")).to_owned()
}

#[test]
fn files_of_other_graphs_are_refused_with_both_sides() {
    let (session, folder) = (small(), Folder::new("others"));
    let refused = |header: &str, bytes| refused(&session, &folder, &file(header, bytes));
    const FIXED: &str = r#""fixed":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
    const SUM: &str = r#""sum":{"dtype":"F32","shape":[3],"data_offsets":[2,14]}"#;
    let is = |found: String, expected: &str| assert_eq!(found, expected);
    is(
        refused(&format!(r#"{{"__metadata__":{{"graph":"large"}},{FIXED}}}"#), 2),
        "expected the states of 'small', which has states of 'large': state 'sum' is not in the file; it has: fixed",
    );
    is(
        refused(&format!(r#"{{{FIXED},{SUM},"more":{{"dtype":"I8","shape":[],"data_offsets":[14,15]}}}}"#), 15),
        "expected the states of 'small': found 'more', which is none of its states: sum, fixed",
    );
    is(
        refused(&format!("{{{FIXED},{}}}", SUM.replace("[3]", "[3,1]")), 14),
        "expected the states of 'small': state 'sum': expected f32[3], found f32[3,1]",
    );
    is(
        refused(&format!("{{{FIXED},{}}}", SUM.replace("F32", "I32")), 14),
        "expected the states of 'small': state 'sum': expected f32[3], found i32[3]",
    );
    is(
        refused(&format!("{{{FIXED},{}}}", SUM.replace("F32", "U32")), 14),
        "expected the states of 'small': state 'sum': expected f32[3], found u32[3]",
    );
}

/// Each fault by its name.
#[test]
fn hostile_files_are_refused() {
    let (session, folder) = (small(), Folder::new("hostile"));
    let refused = |content: &[u8]| {
        let found = refused(&session, &folder, content);
        let found = found.strip_prefix("not a safetensors file, or only a part of one: ").unwrap_or(&found);
        found.split(" at line 1 ").next().expect("a text has a first part").to_owned()
    };
    let is = |content: &[u8], expected: &str| assert_eq!(refused(content), expected);
    let header = |header: &str, expected: &str| is(&file(header, 14), expected);
    is(&[], "expected the header's length in 8 bytes, found 0 bytes in all");
    is(&[1; 7], "expected the header's length in 8 bytes, found 7 bytes in all");
    is(&[3, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], "expected a header of 3 bytes, found 2 behind its length");
    is(&[0xff; 16], "expected a header of at most 100000000 bytes, found one of 18446744073709551615");
    is(&[0; 8], "the header: expected '{' as its first byte");
    header(" {}", "the header: expected '{' as its first byte");
    header("{} {}", "the header: trailing characters");
    header("{\"a\":1}", "the header: invalid type: integer `1`, expected a tensor's dtype, shape and data_offsets");
    header(
        &format!("{{\"a\":{}", "[".repeat(100_000)),
        "the header: invalid type: sequence, expected a tensor's dtype, shape and data_offsets",
    );
    let entry =
        |dtype: &str, shape: &str, at: &str| format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{at}}}"#);
    let one = |dtype: &str, shape: &str, at: &str| format!("{{\"a\":{}}}", entry(dtype, shape, at));
    let two = |first: &str, a: &str, second: &str, b: &str| format!("{{\"{first}\":{a},\"{second}\":{b}}}");
    header(&one("F128", "[14]", "[0,14]"), "the header: 'F128' is none of the format's element types");
    header(&one("I8", "[-14]", "[0,14]"), "the header: invalid value: integer `-14`, expected usize");
    header(
        &one("I8", &format!("[{}14]", "1,".repeat(64)), "[0,14]"),
        "the header: invalid length 65, expected at most 64 extents",
    );
    header(&one("I8", "[14]", "[14,0]"), "tensor 'a' at bytes 14..0 leaves a gap before it: expected it at byte 0");
    header(&one("I8", "[14]", "[0,15]"), "tensor 'a' (I8[14]): expected 14 bytes, found bytes 0..15");
    header(&one("I8", "[15]", "[0,15]"), "expected 15 bytes behind the header, found 14");
    header(&one("I8", "[13]", "[0,13]"), "expected 13 bytes behind the header, found 14");
    header(&one("F4", "[1]", "[0,1]"), "tensor 'a' (F4[1]): expected 1 bytes, found bytes 0..1");
    header(
        &one("F32", "[4294967296,4294967296]", "[0,14]"),
        "tensor 'a' (F32[4294967296,4294967296]): expected too many bytes, found bytes 0..14",
    );
    header(
        &one("I8", "[18446744073709551615]", "[0,18446744073709551615]"),
        "tensor 'a' (I8[18446744073709551615]): expected too many bytes, found bytes 0..18446744073709551615",
    );
    header(
        &one("I8", "[14]", "[0,14],\"x\":1"),
        "the header: unknown field `x`, expected one of `dtype`, `shape`, `data_offsets`",
    );
    header(&one("I8", &"[".repeat(100_000), "[0,14]"), "the header: invalid type: sequence, expected usize");
    header(
        r#"{"a":["I8",[14],[0,14]]}"#,
        "the header: invalid type: sequence, expected a tensor's dtype, shape and data_offsets",
    );
    let (low, high) = (entry("I8", "[7]", "[0,7]"), entry("I8", "[7]", "[7,14]"));
    header(&two("a", &low, "a", &high), "the header: two tensors are called 'a'");
    header(
        &two("a", &low, "b", &entry("I8", "[8]", "[6,14]")),
        "tensor 'b' at bytes 6..14 overlaps another tensor: expected it at byte 7",
    );
    header(
        &two("a", &low, "b", &entry("I8", "[6]", "[8,14]")),
        "tensor 'b' at bytes 8..14 leaves a gap before it: expected it at byte 7",
    );
    header(&two("__metadata__", "{}", "__metadata__", "{}"), "the header: two entries '__metadata__'");
    let long = format!("{{\"{}\":{low}}}", "a".repeat(5000));
    header(&long, "the header: expected names of at most 4096 bytes, found one of 5000");
    let many: Vec<_> = (0..5000).map(|n| format!("\"{n}\":\"\"")).collect();
    let many = format!("{{\"__metadata__\":{{{}}}}}", many.join(","));
    header(&many, "the header: invalid length 4097, expected at most 4096 texts by name");
    header(&two("__metadata__", "{\"graph\":{}}", "a", &low), "the header: invalid type: map, expected a string");

    // A tensor of a type that is only known by its name is no state, and no tensor here.
    let path = folder.path("known.safetensors");
    fs::write(&path, file(&two("a", &entry("C64", "[1]", "[0,8]"), "b", &entry("I8", "[7]", "[8,15]")), 15))
        .expect("it is written");
    let known = SafeTensors::open(path.as_ref()).expect("the file is sound");
    assert_eq!(known.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(known.tensor("b").expect("its type is supported").to_f64()[0], 8.0);
    let error = known.tensor("a").unwrap_err().to_string();
    assert!(
        error.ends_with(
            "tensor 'a': element type C64 is not supported (supported: F32, F16, BF16, F64, I64, I32, U8, I8, BOOL, U16, I16, U32, U64, F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, F4)"
        ),
        "{error}"
    );
    let error = session.load_states(&folder.0).unwrap_err().to_string();
    assert!(error.ends_with(": not a file"), "{error}");
    let error = session.load_states(folder.path("missing")).unwrap_err().to_string();
    assert!(error.contains("missing: cannot read the tensors: "), "{error}");
}

/// No part of a file, and no file with a byte more or another byte in its header, passes for it.
#[test]
fn mutants_of_a_file_are_refused() {
    let (session, folder) = (small(), Folder::new("mutants"));
    let path = folder.path("states.safetensors");
    session.save_states(&path).expect("it is written");
    let whole = fs::read(&path).expect("it is there");
    (0..whole.len()).for_each(|length| _ = refused(&session, &folder, &whole[..length]));
    refused(&session, &folder, &[&whole[..], &[0]].concat());
    // The names of the graph and of the project may be any, and so may spaces.
    let described = 8 + whole[8..].iter().position(|&byte| byte == b'}').expect("the metadata ends");
    let end = whole.len() - 14;
    let last = whole[..end].iter().rposition(|&byte| byte == b'}').expect("the header ends");
    for at in (0..8).chain(described + 1..=last) {
        for change in [1, 2, 4, 8, 16, 64, 128] {
            let mut mutant = whole.clone();
            mutant[at] ^= change;
            refused(&session, &folder, &mutant);
        }
    }
    session.load_states(&path).expect("it is as it was");
}

#[test]
fn what_cannot_be_saved_is_said() {
    let folder = Folder::new("unsaved");
    let g = Trace::new("stateless");
    g.output("y", g.input("x", DType::F32, [3]).relu());
    let session = Session::from_graph(g.finish().expect("the graph is sound"), &options()).expect("it loads");
    let path = folder.path("states.safetensors");
    assert_eq!(session.save_states(&path).unwrap_err().to_string(), "'stateless' has no states to save");
    let g = Trace::new("named");
    let own = g.state("__metadata__", counted(DType::F32, [3]));
    g.update(own, own + 1.0);
    let session = Session::from_graph(g.finish().expect("a state is enough"), &options()).expect("it loads");
    let error = session.save_states(&path).unwrap_err().to_string();
    assert_eq!(
        error,
        "'__metadata__' cannot be a tensor's name in a safetensors file: expected at most 4096 bytes, and not '__metadata__'"
    );
    let error = small().save_states(folder.path("missing/states")).unwrap_err().to_string();
    assert!(error.contains("missing/states: cannot write the states: "), "{error}");
    assert_eq!(fs::read_dir(&folder.0).expect("it is there").count(), 0, "nothing is written");
}

/// An element that the device's type cannot hold is found before any state changes.
#[test]
fn elements_beyond_the_device_are_refused() {
    let folder = Folder::new("beyond");
    for opener in common::backends() {
        if opener.1().target().storage(DType::I64).ok() != Some(DType::I32) {
            continue;
        }
        let g = Trace::new("beyond");
        g.state("a", counted(DType::F32, [2]));
        g.state("b", counted(DType::I64, [400_000]));
        g.output("y", g.input("x", DType::F32, [1]).relu());
        let session = open(g.finish().expect("the graph is sound"), &opener, Recipe::default());
        let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[400000],"data_offsets":[8,3200008]}}"#;
        let mut content = file(header, 0);
        content.extend(vec![0; 3_200_007]);
        content.push(1);
        let found = refused(&session, &folder, &content);
        assert_eq!(found, "tensor 'b': 72057594037927936 does not fit into i32, which this device computes in");
    }
}

const DECODER: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
sums (float[1, t, 2] x, float[1, past, 2] old) => (float[1, all, 2] new, float[1, 2] sum)
<int64[1] axis = {1}>
{
    new = Concat <axis = 1> (old, x)
    sum = ReduceSum <keepdims = 0> (new, axis)
}"#;

/// A cache that grows goes on where it was: its rows and their number are in the file. A number beyond the capacity is refused.
#[test]
fn caches_that_grow_go_on() {
    let folder = Folder::new("grown");
    let (model, path) = (folder.file("sums.onnxtxt", DECODER), folder.path("cache.safetensors"));
    let new = || {
        let state = vec![("old".to_owned(), "new".to_owned())];
        Session::from_path(&model, &Options { state, ..options() }.set("t", 1).set("past", 0..=5)).expect("it loads")
    };
    let token = |session: &Session, x: f64| {
        let x = Tensor::from_f64(DType::F32, [1, 1, 2], &[x; 2]);
        session.run(&[("x", x)]).map(|outputs| outputs[0].1.to_f64()[0])
    };
    let first = new();
    (1..=3).for_each(|x| _ = token(&first, f64::from(x)).expect("there is room"));
    first.save_states(&path).expect("it is written");
    let second = new();
    second.load_states(&path).expect("it has the cache");
    for session in [&first, &second] {
        assert_eq!([4.0, 5.0].map(|x| token(session, x).expect("there is room")), [10.0, 15.0]);
        let error = token(session, 6.0).unwrap_err().to_string();
        assert!(error.starts_with("state 'past' is 5, and a run adds 1: expected at most 5 after it"), "{error}");
    }
    let saved = fs::read(&path).expect("it is there");
    let at = saved.windows(8).rposition(|word| word == 3i64.to_le_bytes()).expect("the length is 3");
    for length in [6i64, -1, i64::MAX] {
        let mut content = saved.clone();
        content[at..at + 8].copy_from_slice(&length.to_le_bytes());
        assert_eq!(refused(&second, &folder, &content), format!("state 'past': expected 0 to 5, found {length}"));
    }
    second.load_states(&path).expect("it is as it was");
    assert_eq!(token(&second, 1.0).expect("there is room"), 7.0);
}

/// States of programs are shared by name: a file has each once, and one program goes on where another was saved.
#[test]
fn programs_share_a_file() {
    let folder = Folder::new("programs");
    let path = folder.path("states.safetensors");
    let graph = |factor: f64, more: bool| {
        let g = Trace::new("sum");
        let (x, sum) = (g.input("x", DType::F32, [3]), g.state("sum", counted(DType::F32, [3])));
        g.update(sum, sum + x * factor);
        if more {
            g.state("own", counted(DType::I32, [2]));
        }
        g.finish().expect("the graph is sound")
    };
    for (name, open) in common::backends() {
        let new =
            |graphs: Vec<(String, Graph)>| common::load_programs(graphs, open(), name, &options()).expect("it loads");
        let both = || new(vec![("add".to_owned(), graph(1.0, false)), ("take".to_owned(), graph(-1.0, true))]);
        let session = both();
        session.program("add").expect("it is one").run(&one(5.0)).expect("it runs");
        session.save_states(&path).expect("it is written");
        assert_eq!(SafeTensors::open(path.as_ref()).expect("it is sound").metadata("graph"), Some("add, take"));
        let other = both();
        other.load_states(&path).expect("it has the states");
        other.program("take").expect("it is one").run_poisoned(&one(1.0)).expect("it runs");
        assert_eq!(other.state("sum").expect("it is a state").to_f64(), [4.0, 5.0, 6.0], "{name}");
        let error = new(vec![("add".to_owned(), graph(1.0, false))]).load_states(&path).unwrap_err().to_string();
        let words = "expected the states of 'add', which has states of 'add, take': found 'own', which is none of its";
        assert!(error.contains(words), "{error}");
    }
}

/// The command's JSON, or its message if it fails.
fn run(arguments: &[&str]) -> Result<Value, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["--json", arguments[0]])
        .args(&arguments[1..])
        .args(["--backend", "cpu", "--threads", "2"])
        .output()
        .expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    match output.status.code() {
        Some(0) => Ok(common::printed(arguments, &text(output.stdout))),
        _ => Err(text(output.stderr)),
    }
}

fn largest(found: &Value, kind: &str, name: &str) -> f64 {
    let all = found[kind].as_array().unwrap_or_else(|| panic!("no {kind}: {found}"));
    let one = all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no '{name}': {found}"));
    one["max"].as_f64().unwrap_or_else(|| panic!("no elements: {one}"))
}

/// `--input` gives the first elements of a state; of a cache that grows, its first rows.
#[test]
fn states_begin_with_what_is_given() {
    let folder = Folder::new("begin");
    let model = folder.file("sums.onnxtxt", DECODER);
    let cache = folder.path("cache.npy");
    npy::write(cache.as_ref(), &Tensor::from_f32([1, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).expect("six numbers"))
        .expect("it is written");
    let base = [&model, "--state", "old=new", "--set", "past=0..5", "--input", "x=1x1x2xf32=1"];
    let with = |command: &str, more: &[&str]| run(&[&[command], &base[..], more].concat());
    let given = format!("old={cache}");
    let found = with("run", &["--input", &given, "--iters", "2"]).expect("there is room");
    assert_eq!([largest(&found, "outputs", "sum"), largest(&found, "states", "past")], [14.0, 5.0]);
    let found = with("run", &["--input", "old=1x0x2xf32=1"]).expect("there is room");
    assert_eq!([largest(&found, "outputs", "sum"), largest(&found, "states", "past")], [1.0, 1.0]);
    // The length may be given as well, and rows behind it are none.
    let found =
        with("run", &["--input", "old=1x5x2xf32=7", "--input", "past=i64=1", "--poison"]).expect("there is room");
    assert_eq!([largest(&found, "outputs", "sum"), largest(&found, "states", "past")], [8.0, 2.0]);
    for (more, words) in [
        (&["--input", "old=1x6x2xf32=1"][..], "state 'old': expected to begin with f32[1,5,2], found f32[1,6,2]"),
        (&["--input", "old=1x3x3xf32=1"], "state 'old': expected to begin with f32[1,5,2], found f32[1,3,3]"),
        (&["--input", "old=1x3x2xf16=1"], "state 'old': expected to begin with f32[1,5,2], found f16[1,3,2]"),
        (&["--input", "old=1x5x2xf32=1"], "state 'past' is 5, and a run adds 1: expected at most 5 after it"),
        (&["--input", "past=i64=6"], "state 'past': expected 0 to 5, found 6"),
        (&["--input", "past=1xi64=3"], "state 'past': expected to begin with i64[], found i64[1]"),
        (&["--input", "old=3xf32=1"], "input 'old': expected f32[1,past,2], found f32[3]"),
        (&["--input", "older=3xf32=1"], "--input older: not an input of the graph; its inputs: x, old"),
        (&["--input", &given, "--load-states", "x"], "--input old: --load-states gives the elements of all states"),
    ] {
        let error = with("run", more).expect_err("it is refused");
        assert!(error.contains(words), "{error}");
    }
}

const COUNTER: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
counter (float[n] x, float[n] total) => (float[n] next) { next = Add (total, x) }"#;

#[test]
fn given_states_are_those_of_every_command() {
    let folder = Folder::new("counter");
    let model = folder.file("counter.onnxtxt", COUNTER);
    let base = [&model, "--state", "total=next", "--input", "x=3xf32=1", "--input", "total=3xf32=5"];
    let found = run(&[&["run"], &base[..], &["--iters", "4"]].concat()).expect("it runs");
    assert_eq!(largest(&found, "states", "total"), 9.0);
    // The dims that the inputs do not give are those of the state.
    let only = [&model, "--state", "total=next", "--input", "total=3xf32=5"];
    assert_eq!(run(&[&["run"], &only[..]].concat()).expect("it runs")["states"][0]["shape"], serde_json::json!([3]));
    for command in ["bench", "compare", "tune"] {
        run(&[&[command], &base[..]].concat()).unwrap_or_else(|e| panic!("{command}: {e}"));
    }
    let error = run(&[&["run"], &base[..], &["--input", "total=3xf32=1"]].concat()).expect_err("it is given twice");
    assert!(error.contains("input 'total' is given twice"), "{error}");
}

/// A fork has states of its own: it goes on where another run was saved, and leaves that one as it is.
#[test]
fn a_fork_goes_on_elsewhere() {
    let folder = Folder::new("saved-forks");
    let path = folder.path("states.safetensors");
    for opener in common::backends() {
        let options = Options { forks: 2, ..options() };
        let graph = every_type("forked", opener.1().target());
        let session = common::load(graph, opener.1(), "a device", &options);
        let session = session.expect("it loads");
        let sum = |session: &Session| session.state("sum").expect("it is a state").to_f64();
        session.run(&one(0.5)).expect("it runs");
        session.save_states(&path).expect("it is written");
        session.run(&one(10.0)).expect("it runs");
        let fork = session.fork().expect("it was planned");
        assert_eq!(sum(&fork), [0.0, 1.0, 2.0], "{}", opener.0);
        fork.load_states(&path).expect("it has the same states");
        fork.run(&one(1.0)).expect("it runs");
        assert_eq!((sum(&fork), sum(&session)), (vec![1.5, 2.5, 3.5], vec![10.5, 11.5, 12.5]), "{}", opener.0);
        fork.save_states(&path).expect("it is written");
        session.load_states(&path).expect("it has the same states");
        assert_eq!(states(&session), states(&fork), "{}", opener.0);
    }
}

const LINEAR: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
linear (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 0, 0, 1}, float[2] b = {0, 0}> {
    product = MatMul (x, w)
    y = Add (product, b)
}"#;

/// Writes a file of equal elements.
fn write_weights(path: &str, tensors: &[(&str, DType, Shape)]) {
    let of: Vec<_> = tensors.iter().map(|(name, dtype, shape)| (*name, *dtype, shape)).collect();
    plimsoll::internals::safetensors::write(
        std::path::Path::new(path),
        "write the weights",
        &BTreeMap::new(),
        &of,
        |number, put| {
            let (_, dtype, shape) = &tensors[number];
            put(Tensor::from_f64(*dtype, shape.clone(), &vec![2.0; shape.numel()]).bytes())
        },
    )
    .expect("it is written");
}

#[test]
fn weights_of_a_file_take_the_places_of_the_initializers() {
    let folder = Folder::new("weights");
    let model = folder.file("linear.onnxtxt", LINEAR);
    let path = folder.path("linear.safetensors");
    write_weights(&path, &[("w", DType::F32, [2, 2].into()), ("other", DType::F32, [3].into())]);
    let options = Options { weights: Some((&path).into()), ..options() }.set("n", 1);
    let session = Session::from_path(&model, &options).expect("it loads");
    let x = Tensor::from_f64(DType::F32, [1, 2], &[1.0, 3.0]);
    assert_eq!(session.run(&[("x", x)]).expect("it runs")[0].1.to_f64(), [8.0, 8.0]);
    let weighed = ["--weights", &path, "--input", "x=1x2xf32=1"];
    let found = run(&[&["run", &model[..]], &weighed[..]].concat()).expect("it runs");
    assert_eq!(largest(&found, "outputs", "y"), 4.0);
    // Programs, and the file with its new weights.
    let found = run(&[&["run", &format!("a={model}"), &format!("b={model}")], &weighed[..]].concat()).expect("it runs");
    assert_eq!(largest(&found, "outputs", "y"), 4.0);
    let emit =
        Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(["emit", &model, "onnxtxt", "--weights", &path]).output();
    let text = String::from_utf8(emit.expect("the program starts").stdout).expect("the output is text");
    assert!(text.contains("w = {2, 2, 2, 2}"), "{text}");
    for (tensors, words) in [
        (
            ("w", DType::F32, Shape::from([4])),
            "tensor 'w': expected f32[2,2], as the model's initializer, found f32[4]",
        ),
        (("w", DType::F16, [2, 2].into()), "tensor 'w': expected f32[2,2], as the model's initializer, found f16[2,2]"),
        (
            ("v", DType::F32, [2, 2].into()),
            "none of its tensors has the name of an initializer: expected some of b, w, found v",
        ),
    ] {
        write_weights(&path, &[tensors]);
        let error = Session::from_path(&model, &options).expect_err("it does not fit").to_string();
        assert!(error.contains(words), "{error}");
    }
}
