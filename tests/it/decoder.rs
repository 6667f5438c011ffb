//! Decoders in folders: two programs over the same caches and weights.

use crate::common::{self, Folder};
use plimsoll::internals::onnx;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::{Class, DType, Decoder, Extent, Recipe, Tensor};
use std::process::Command;

const FOLDER: &str = "graphs/decoder";

fn options(backend: Choice) -> Options {
    Options { threads: 2, ..Options::default() }.on(backend)
}

/// The tokens behind a prompt, each by a run of the whole text without caches.
fn anew(prompt: &[i64], count: usize) -> Vec<i64> {
    let mut text = prompt.to_vec();
    for _ in 0..count {
        let dims = [("batch", 1), ("past_sequence", 0), ("sequence", text.len())];
        let dims = dims.map(|(name, extent)| (name.to_owned(), Extent::from(extent))).to_vec();
        let mut options = options(Choice::Cpu);
        options.dims = dims;
        options.outputs = vec!["logits".to_owned()];
        let session = Session::from_path(format!("{FOLDER}/model.onnxtxt"), &options).expect("it loads");
        let inputs = session.plan().programs[0].inputs.iter().map(|port| {
            let values: Vec<f64> = match &port.name[..] {
                "input_ids" => text.iter().map(|&token| token as f64).collect(),
                _ => vec![1.0; port.shape.numel()],
            };
            (&port.name[..], Tensor::from_f64(port.dtype, port.shape.clone(), &values))
        });
        let inputs: Vec<_> = inputs.collect();
        let scores = session.run(&inputs).expect("it runs").remove(0).1.to_f64();
        let last = &scores[scores.len() - 32..];
        let best = (0..32).max_by(|&a, &b| last[a].total_cmp(&last[b]).then(b.cmp(&a)));
        text.push(best.expect("there are scores") as i64);
    }
    text.split_off(prompt.len())
}

#[test]
fn tokens_are_those_of_runs_without_caches() {
    let prompt = [1, 5, 9, 13, 2, 2, 7];
    let expected = anew(&prompt, 12);
    assert!(!expected.contains(&31), "the text ends");
    for (backend, _) in common::backends() {
        let choice = match backend {
            "cpu" => Choice::Cpu,
            "cuda" => Choice::Cuda,
            _ => Choice::Wgpu,
        };
        for prefill in [1, 2, 4, 20] {
            let decoder = Decoder::open(FOLDER, &options(choice).set("context", 24).set("prefill", prefill));
            let decoder = decoder.expect("it loads");
            let mut each = Vec::new();
            for _ in 0..2 {
                each.clear();
                let found = decoder.generate(&prompt, 12, &mut |token| each.push(token)).expect("it runs");
                assert_eq!((&found, &each), (&expected, &expected), "{backend}, {prefill} at a time");
            }
            let plan = decoder.session().plan();
            assert_eq!(decoder.session().usage().bytes, plan.bytes(), "{backend}");
        }
    }
}

#[test]
fn a_text_ends_where_the_context_is_full() {
    let decoder = Decoder::open(FOLDER, &options(Choice::Cpu).set("context", 10)).expect("it loads");
    let found = decoder.generate(&[1, 5, 9, 13], 100, &mut |_| {}).expect("it runs");
    assert_eq!(found.len(), 7, "a token is behind the last that the context has");
    let refused = |prompt: &[i64]| decoder.generate(prompt, 1, &mut |_| {}).expect_err("it is refused").to_string();
    assert_eq!(refused(&[]), "the prompt: expected at least one token");
    assert_eq!(refused(&[32]), "the prompt: expected tokens from 0 to 31, found 32");
    assert_eq!(refused(&[1; 11]), "the prompt: expected at most 10 tokens, as the context has room for, found 11");
    assert_eq!(decoder.generate(&[1; 10], 5, &mut |_| {}).expect("it runs").len(), 1);
}

#[test]
fn weights_are_there_once() {
    let of = |prefill: usize| Decoder::open(FOLDER, &options(Choice::Cpu).set("prefill", prefill)).expect("it loads");
    let constants = |decoder: &Decoder| decoder.session().plan().class_bytes(Class::Constant);
    let decode = of(1);
    let words = 8 * (16 + 8 + 8 + 16 + 16 + 16 + 32);
    assert!(constants(&decode) < words + 4 * 32 * 16 + 8000, "{} bytes", constants(&decode));
    assert!(constants(&of(30)) < constants(&decode) + 512);
}

#[test]
fn bad_folders_are_refused() {
    let folder = Folder::new("decoder");
    let refused = || Decoder::open(&folder.0, &options(Choice::Cpu)).expect_err("it is refused").to_string();
    assert!(refused().contains("genai_config.json"), "{}", refused());
    let config = std::fs::read_to_string(format!("{FOLDER}/genai_config.json")).expect("it is there");
    for (from, to, expected) in [
        ("\"vocab_size\": 32", "\"vocab_size\": \"many\"", "expected usize"),
        ("\"vocab_size\": 32", "\"vocab_size\": 32, \"vision\": {}", "found a part 'vision'"),
        ("model.onnxtxt", "other.onnx", "other.onnx, is not there"),
        ("\"present_value_names\"", "\"other_names\"", "expected outputs of present_value_names, too"),
        ("\"context_length\": 64", "\"context_length\": 1", "context_length of at least 3"),
    ] {
        folder.file("genai_config.json", config.replace(from, to));
        folder.file("model.onnxtxt", "");
        assert!(refused().contains(expected), "{}", refused());
    }
    let dims = [("context", 65), ("context", 2), ("prefill", 63), ("prefill", 0), ("nothing", 1), ("batch", 2)];
    for (dim, extent) in dims {
        let refused = Decoder::open(FOLDER, &options(Choice::Cpu).set(dim, extent)).expect_err("it is refused");
        assert!(refused.to_string().contains(dim), "{refused}");
    }
}

/// The length of a mask follows from what GroupQueryAttention reads, or from a sum that is given.
#[test]
fn ties_of_dims_are_found_or_given() {
    let file = format!("{FOLDER}/model.onnxtxt");
    let model = || onnx::load(file.as_ref()).expect("it is a model");
    let dims = |list: &[(&str, usize)]| -> Vec<(String, Extent)> {
        list.iter().map(|(name, extent)| ((*name).to_owned(), (*extent).into())).collect()
    };
    let own = [("batch", 1), ("past_sequence", 6), ("sequence", 2)];
    let mask = |model: onnx::Model, dims: Vec<(String, Extent)>| {
        let (model, dims) = model.grow(dims).expect("it grows");
        let dims: Vec<_> = dims.into_iter().map(|(name, extent)| (name, extent.most())).collect();
        let graph = onnx::import(&model, &dims).expect("it is imported");
        let mask = graph.inputs().iter().find(|&&value| graph.value_name(value) == "attention_mask");
        graph.fact(*mask.expect("it is an input")).shape[1]
    };
    assert_eq!(mask(model(), dims(&own)), 8);
    assert_eq!(mask(model(), dims(&[&own[..], &[("total_sequence", 7)]].concat())), 7);
    let tied = model().with_tie("total_sequence", "past_sequence+sequence").expect("it has the dim");
    assert_eq!(mask(tied, dims(&own)), 8);
    for (dim, sum) in [("nothing", "batch+1"), ("batch", "batch+1"), ("batch", "2-1")] {
        let refused = model().with_tie(dim, sum).expect_err("it is refused").to_string();
        assert!(refused.contains(dim), "{refused}");
    }
    let args = ["plan", &file, "--set", "batch=1", "--set", "past_sequence=6", "--set", "sequence=2"];
    let plan = |more: &[&str]| {
        let all = [&args[..], more, &["--json"]].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(&all).output().expect("the program starts");
        common::printed(&all, &String::from_utf8_lossy(&output.stdout))["programs"][0]["summary"].clone()
    };
    assert_eq!(plan(&[]), plan(&["--set", "total_sequence=past_sequence + sequence"]));
}

/// Rows of a cache in 8 bits are those of floats, rounded to a part of the largest number of their own row.
#[test]
fn caches_of_8_bits_have_a_scale_for_each_row() {
    let source = r#"<ir_version: 11, opset_import: ["" : 24]>
        g (float[1, 2, 3, 16] rows, int64[1] at, float[1, 2, 8, 16] past) => (float[1, 2, 8, 16] y, float[1, 2, 8, 16] present)
        { present = TensorScatter <axis = 2> (past, rows, at) y = Neg (present) }"#;
    let model = onnx::Model::new(onnx::text::parse(source, "text".as_ref()).expect("it parses"));
    let model = model.with_state(&[("past".to_owned(), "present".to_owned())]);
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let of = |int8_caches: bool, backend: Box<dyn plimsoll::internals::backend::Backend>| {
        let options = Options { recipe: Recipe { int8_caches, ..Recipe::default() }, ..options(Choice::Cpu) };
        common::load(graph.clone(), backend, "it", &options)
    };
    for (name, open) in common::backends() {
        let few = match (of(true, open()), name.starts_with("wgpu")) {
            (Err(error), true) => {
                assert!(error.to_string().contains("stores i8 as i32"), "{error}");
                continue;
            }
            (session, _) => session.expect("it loads"),
        };
        let floats = of(false, open()).expect("it loads");
        assert_eq!(few.usage().bytes, few.plan().bytes(), "{name}");
        let bytes = |session: &Session| session.plan().class_bytes(Class::State);
        assert!(bytes(&few) <= bytes(&floats) / 2, "{name}: {} and {}", bytes(&few), bytes(&floats));
        let mut state = 5;
        for at in [0.0, 3.0, 1.0] {
            let rows = common::random(&mut state, &[1, 2, 3, 16].into());
            let inputs = [("rows", rows), ("at", Tensor::from_f64(DType::I64, [1], &[at]))];
            let [found, expected] = [&few, &floats].map(|session| session.run(&inputs).expect("it runs")[0].1.to_f64());
            for (found, expected) in found.chunks(16).zip(expected.chunks(16)) {
                let most = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
                let differs = |(a, b): (&f64, &f64)| (a - b).abs() > most / 253.0;
                assert!(!found.iter().zip(expected).any(differs), "{name}: {found:?} {expected:?}");
            }
        }
    }
    let decoder = |int8_caches: bool| {
        let recipe = Recipe { int8_caches, ..Recipe::default() };
        Decoder::open(FOLDER, &Options { recipe, ..options(Choice::Cpu) }).expect("it loads")
    };
    let [few, floats] = [true, false].map(decoder);
    let state = |decoder: &Decoder| decoder.session().plan().class_bytes(Class::State);
    // Heads of 4 numbers have as many bytes of scales.
    assert!(state(&few) < state(&floats) * 6 / 10);
    let tokens = |decoder: &Decoder| decoder.generate(&[1, 5, 9, 13], 3, &mut |_| {}).expect("it runs");
    assert_eq!(tokens(&few), tokens(&floats));
}
