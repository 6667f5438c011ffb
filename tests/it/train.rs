//! Training steps on every backend, and those that go wrong: what they leave, and what they say.

use crate::cli::fails;
use crate::common::{self, Folder};
use plimsoll::internals::npy;
use plimsoll::internals::onnx::{self, Model};
use plimsoll::internals::reference;
use plimsoll::internals::session::{Choice, Options};
use plimsoll::internals::train::data::Rows;
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{self, Loss, Optimizer, Rate, Training};
use plimsoll::{DType, Graph, Tensor};
use std::path::Path;

fn training(rate: f64, accumulate: usize) -> Training {
    Training {
        accumulate,
        ema: Some(0.5),
        ..Training::new(Loss::Mse, Optimizer::Sgd { momentum: 0.9, nesterov: false }, Rate::constant(rate))
    }
}

/// Eight rows for `graphs/linear.onnxtxt`.
fn data(folder: &Folder) -> Data {
    some_data(folder, 8, |label| label)
}

/// The first of these rows, with other labels.
fn some_data(folder: &Folder, rows: usize, label: impl Fn(f64) -> f64) -> Data {
    let x: Vec<f64> = (0..80).map(|i| f64::from(i * 37 % 19) / 4.0 - 2.0).collect();
    let y: Vec<f64> = x.chunks(10).map(|row| label(row[0] - row[3] + 0.5)).collect();
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [rows, 10], &x[..10 * rows])))];
    Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::F32, [rows, 1], &y[..rows])) }
}

fn states(trainer: &Trainer) -> Vec<Vec<u8>> {
    let names = ["w", "b", "optimizer/momentum/w", "ema/w", "step"];
    names.map(|name| trainer.session().state(name).expect("it is a state").bytes().to_vec()).into()
}

/// The mean over all rows is the same whatever the batch is, also if a batch has more rows than there are.
#[test]
fn a_validation_counts_each_row_once() {
    let folder = Folder::new("validated");
    let score = |model: &str, loss, [data, valid]: [&Data; 2], backend, batch, accumulate| {
        let training = Training { loss, ..training(0.1, accumulate) };
        let model = onnx::load(Path::new(model)).expect("it is a model");
        match Trainer::new(model, data, batch, training, &Options::default().on(backend)) {
            Ok(mut trainer) => {
                trainer.admits(valid).expect("they suit the model");
                let score = trainer.evaluate(valid).expect("it runs");
                assert_eq!(trainer.session().usage().bytes, trainer.session().plan().bytes());
                Some(score)
            }
            Err(error) if backend == Choice::Cpu => panic!("{error}"),
            Err(_) => None,
        }
    };
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
    let (eight, three) = (some_data(&folder, 8, |y| (y / 8.0 + 0.5).clamp(0.0, 1.0)), Folder::new("validated-few"));
    let three = some_data(&three, 3, |y| (y / 8.0 + 0.5).clamp(0.0, 1.0));
    let open = |name: &str| Rows::open(Path::new(name)).expect("it is an array of rows");
    let digits = Data {
        inputs: vec![("image".to_owned(), open("graphs/digits-images.npy"))],
        labels: open("graphs/digits-labels.npy"),
    };
    // Labels above the one that marks copies count.
    let large = some_data(&Folder::new("validated-large"), 3, |_| 2e38);
    let found = score("graphs/linear.onnxtxt", Loss::L1, [&eight, &large], Choice::Cpu, 2, 1).expect("it runs").loss;
    assert!(found > 1e38, "{found}");
    for backend in [Choice::Cpu, Choice::Wgpu] {
        for loss in [Loss::Mse, Loss::L1, Loss::Huber, Loss::BceLogits] {
            for valid in [&eight, &three] {
                let found = |batch, accumulate| {
                    score("graphs/linear.onnxtxt", loss, [&eight, valid], backend, batch, accumulate)
                };
                let Some(alone) = found(1, 1) else { continue };
                for (batch, accumulate) in [(3, 1), (5, 1), (8, 1), (8, 4), (6, 2)] {
                    let of = found(batch, accumulate).expect("the device is there");
                    assert!(near(of.loss, alone.loss), "{backend:?}, {loss:?}, {batch}: {of:?}, alone {alone:?}");
                    assert_eq!(of.accuracy, None);
                }
            }
        }
        let found = |batch| score("graphs/digits.onnx", Loss::CrossEntropy, [&digits, &digits], backend, batch, 1);
        let Some(alone) = found(1) else { continue };
        for batch in [7, digits.labels.count() - 1, digits.labels.count()] {
            let of = found(batch).expect("the device is there");
            assert!(near(of.loss, alone.loss) && of.accuracy == alone.accuracy, "{batch}: {of:?}, alone {alone:?}");
        }
    }
}

#[test]
fn a_step_whose_loss_is_not_finite_changes_no_state() {
    let folder = Folder::new("infinite");
    let data = data(&folder);
    for backend in [Choice::Cpu, Choice::Wgpu] {
        for accumulate in [1, 2] {
            let model = onnx::load(Path::new("graphs/linear.onnxtxt")).expect("it is a model");
            let options = Options::default().on(backend);
            let Ok(mut trainer) = Trainer::new(model, &data, 4, training(1e25, accumulate), &options) else {
                assert_ne!(backend, Choice::Cpu, "the CPU is always there");
                continue;
            };
            let first = trainer.step(&data, 0, None).expect("it runs");
            assert!(first.loss.is_finite() && !trainer.refuses(&first), "{first:?}");
            let before = states(&trainer);
            let shown = trainer.step(&data, 1, None).expect("it runs");
            assert!(trainer.refuses(&shown), "{shown:?}");
            assert!(states(&trainer) == before, "{backend:?}: a state has changed");
            let found = trainer.not_finite(&data, 1, None).expect("it runs").expect("the loss is one");
            assert!(found.value.is_infinite() && found.count[0] > 0 && found.count[0] <= found.count[1], "{found}");
            assert!(states(&trainer) == before, "{backend:?}: a state has changed");
        }
    }
}

#[test]
fn the_command_names_the_step_and_the_first_value_that_is_not_finite() {
    let folder = Folder::new("diverged");
    drop(data(&folder));
    let (x, y) = (folder.path("x.npy"), folder.path("y.npy"));
    let files: &[&str] = &["train", "graphs/linear.onnxtxt", "--data", &x, "--labels", &y, "--loss", "mse"];
    let method: &[&str] = &["--optimizer", "sgd", "--lr", "1e25", "--batch", "4", "--steps", "6", "--backend", "cpu"];
    let words =
        ["step 1: the loss is inf", "the first value that is not finite is inf in the result of", "elements", "--lr"];
    fails(1, &[files, method], &words);
}

/// Rows of a table, some of them several times, whose gradients meet those of a product.
const WORDS: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    words (int64[batch, 5] x) => (float[batch, 3] y)
    <float[7, 4] table = {F28}, float[20, 3] last = {F60}>
    {
        rows = Gather (table, x)
        flat = Flatten (rows)
        y = MatMul (flat, last)
    }"#;

/// Convolutions of every kind: with a stride, of planes, of one tap, with a window as large as the image.
const IMAGES: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    images (float[batch, 2, 9, 9] x) => (float[batch, 3] y)
    <float[4, 2, 3, 3] first = {F72}, float[4, 1, 3, 3] planes = {F36}, float[6, 4, 1, 1] mixed = {F24}, float[6] bias = {F6},
     float[8, 3, 3, 3] groups = {F216}, float[3, 8, 2, 2] last = {F96}>
    {
        a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, first)
        b = Tanh (a)
        c = Conv <pads = [1, 1, 1, 1], group = 4> (b, planes)
        d = Conv (c, mixed, bias)
        e = Tanh (d)
        f = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (e)
        g = Conv <pads = [1, 1, 1, 1], strides = [2, 2], group = 2> (f, groups)
        h = Tanh (g)
        i = Conv (h, last)
        y = Flatten (i)
    }"#;

/// The step of a file's training. `F12` stands for 12 numbers.
fn program(text: &str) -> Graph {
    let mut text = text.to_owned();
    for count in [216, 96, 72, 60, 36, 28, 24, 6] {
        let number = |at: usize| format!("{}", ((at * 7919 + count * 31) % 97) as f64 / 60.0 - 0.8);
        let list: Vec<String> = (0..count).map(number).collect();
        text = text.replace(&format!("F{count}}}"), &format!("{}}}", list.join(", ")));
    }
    let model = Model::new(onnx::text::parse(&text, "net.onnxtxt".as_ref()).expect("the text is sound")).with_weights();
    let weights = model.weights();
    let graph = onnx::import(&model, &[("batch".into(), 6)]).expect("it is a graph");
    let programs = train::programs(&graph, &weights, &training(0.05, 1)).expect("it can be trained");
    programs.parts.into_iter().next().expect("there is a step").1
}

#[test]
fn steps_follow_the_reference_on_every_backend() {
    for text in [WORDS, IMAGES] {
        let graph = program(text);
        let words = [3.0, 0.0, 6.0, 3.0, -1.0, 2.0, 2.0, 2.0, 5.0, 0.0];
        let mut seed = 9;
        let inputs: Vec<(String, Tensor)> = graph
            .inputs()
            .iter()
            .map(|&input| {
                let fact = graph.fact(input);
                let given: Vec<f64> = words.iter().copied().cycle().take(fact.shape.numel()).collect();
                let tensor = match fact.dtype {
                    DType::I64 => Tensor::from_f64(DType::I64, fact.shape.clone(), &given),
                    _ => common::random(&mut seed, &fact.shape),
                };
                (graph.value_name(input).to_owned(), tensor)
            })
            .collect();
        let given: Vec<(&str, Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        let ordered: Vec<Tensor> = inputs.iter().map(|(_, tensor)| tensor.clone()).collect();
        let mut states = reference::initial(&graph).expect("the elements are there");
        let step = |_| reference::step(&graph, &ordered, &mut states).expect("the reference runs")[0].to_f64()[0];
        let expected: Vec<f64> = (0..8).map(step).collect();
        assert!(expected[7] < 0.8 * expected[0], "{expected:?}");
        for (name, open) in common::backends() {
            let session = common::load(graph.clone(), open(), name, &Options::default());
            let session = session.expect("it loads");
            assert_eq!(session.usage().bytes, session.plan().bytes());
            for (step, expected) in expected.iter().enumerate() {
                let run = if step == 3 { session.run_poisoned(&given) } else { session.run(&given) };
                let found = run.expect("it runs")[0].1.to_f64()[0];
                assert!((found - expected).abs() < 1e-4 * expected, "{name}, {step}: {found}, not {expected}");
            }
        }
    }
}
