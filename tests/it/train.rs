//! Training steps that go wrong: what they leave, and what they say.

use crate::cli::fails;
use crate::common::Folder;
use plimsoll::internals::npy;
use plimsoll::internals::onnx;
use plimsoll::internals::session::{Choice, Options};
use plimsoll::internals::train::data::Rows;
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{Loss, Optimizer, Rate, Schedule, Training};
use plimsoll::{DType, Tensor};
use std::path::Path;

fn training(rate: f64, accumulate: usize) -> Training {
    Training {
        loss: Loss::Mse,
        smoothing: 0.0,
        optimizer: Optimizer::Sgd { momentum: 0.9, nesterov: false },
        rate: Rate { most: rate, schedule: Schedule::Constant, warmup: 0, steps: 8 },
        decay: 0.0,
        decay_dims: 0,
        clip: None,
        accumulate,
        ema: Some(0.5),
        freeze: Vec::new(),
        norm: false,
        seed: 0,
        precision: DType::F32,
    }
}

/// Eight rows for `graphs/linear.onnxtxt`.
fn data(folder: &Folder) -> Data {
    let x: Vec<f64> = (0..80).map(|i| f64::from(i * 37 % 19) / 4.0 - 2.0).collect();
    let y: Vec<f64> = x.chunks(10).map(|row| row[0] - row[3] + 0.5).collect();
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [8, 10], &x)))];
    Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::F32, [8, 1], &y)) }
}

fn states(trainer: &Trainer) -> Vec<Vec<u8>> {
    let names = ["w", "b", "optimizer/momentum/w", "ema/w", "step"];
    names.map(|name| trainer.session().state(name).expect("it is a state").bytes().to_vec()).into()
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
