//! A program of a user's own: a package outside of this one, built in the profile that cargo has by default, where nothing is optimized.

use std::path::Path;
use std::process::Command;

/// Its manifest and its source. A net of convolutions, of poolings and of their derivatives runs on two threads.
const MANIFEST: &str = r#"[package]
name = "outside"
version = "0.1.0"
edition = "2024"
[workspace]
[dependencies]
plimsoll = { path = PATH, default-features = false }
"#;
const MAIN: &str = r#"use plimsoll::{Choice, DType, Graph, Options, Result, Session, Shape, Tensor, Trace, Var};

fn tensor(shape: [usize; 4], of: usize, scale: f32) -> Tensor {
    let shape = Shape::new(&shape);
    let elements: Vec<f32> = (0..shape.numel()).map(|i| ((i * 7919) % of) as f32 * scale - 0.06).collect();
    Tensor::from_f32(shape, &elements).expect("as many elements as the shape has")
}

fn net(batch: usize, side: usize, trains: bool) -> Result<Graph> {
    let g = Trace::new("net");
    let weights = std::cell::RefCell::new(Vec::new());
    let w = |shape| -> Var<'_> {
        let tensor = tensor(shape, 13, 0.01);
        if !trains {
            return g.constant("w", tensor);
        }
        let mut weights = weights.borrow_mut();
        let weight = g.state(&format!("w{}", weights.len()), tensor);
        weights.push(weight);
        weight
    };
    let x = g.input("x", DType::F32, [batch, 3, side, side]);
    let mut y = x.conv2d(w([64, 3, 7, 7]), None, 2, 3, 1).relu().max_pool2d(3, 2, 1);
    let mut from = 64;
    for (to, stride) in [(32, 1), (64, 2)] {
        let deep = y.conv2d(w([to, from, 1, 1]), None, 1, 0, 1).relu();
        let deep = deep.conv2d(w([to, 1, 3, 3]), None, stride, 1, to as i64).sigmoid();
        let deep = deep.conv2d(w([to, to, 3, 3]), None, 1, 1, 1).gelu();
        y = deep + y.conv2d(w([to, from, 1, 1]), None, stride, 0, 1);
        from = to;
    }
    let y = y.average_pool2d(2, 2, 0).reduce_mean(&[2, 3], false).softmax(-1);
    if trains {
        let loss = (y * y).reduce_sum(&[], false);
        let weights = weights.borrow();
        for (weight, slope) in weights.iter().zip(g.grad(loss, &weights)) {
            g.update(*weight, *weight - slope * 0.1);
        }
    }
    g.output("y", y);
    g.finish()
}

fn main() -> Result<()> {
    let mut options = Options::default().on(Choice::Cpu);
    options.threads = 2;
    for (batch, side, trains) in [(1, 224, false), (2, 224, false), (2, 64, true)] {
        let session = Session::from_graph(net(batch, side, trains)?, &options)?;
        let x = tensor([batch, 3, side, side], 17, 0.1);
        // Either thread takes what comes, so that one run may leave the large frames to the one that calls.
        (0..2).try_for_each(|_| session.run(&[("x", x.clone())]).map(drop))?;
        let sum: f64 = session.run(&[("x", x)])?[0].1.to_f64().iter().sum();
        assert!((sum - batch as f64).abs() < 1e-3, "the shares of {batch} rows sum to {sum}");
    }
    println!("done");
    Ok(())
}
"#;

/// Frames are largest where nothing is optimized and a debugger finds each variable: the stacks of the threads must hold there, too.
#[test]
fn a_package_of_its_own_runs_without_optimization() {
    // The folder stays, so that only the first build of it is whole.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    std::fs::create_dir_all(folder.join("src")).expect("a folder for the package");
    let manifest = MANIFEST.replace("PATH", &format!("{:?}", own.display().to_string()));
    std::fs::write(folder.join("Cargo.toml"), manifest).expect("the manifest is written");
    std::fs::write(folder.join("src/main.rs"), MAIN).expect("the source is written");
    std::fs::copy(own.join("Cargo.lock"), folder.join("Cargo.lock")).expect("the versions are copied");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["run", "--offline", "--quiet", "--target-dir"]).arg(folder.join("target"));
    let output = command.current_dir(&folder).output().expect("cargo starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"done\n", "{}: {said}", output.status);
}
