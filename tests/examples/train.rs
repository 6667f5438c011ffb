//! Trains a net that is written in Rust: `cargo run --example train`.
//!
//! It learns "either, but not both" of two inputs. The weights are states: each run updates them in their place. For a model from a file there
//! is the command `plimsoll train`.

use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};

/// Numbers from -1 to 1, always the same ones.
fn drawn(shape: [usize; 2], from: f64) -> Tensor {
    let numbers: Vec<f64> = (0..shape[0] * shape[1]).map(|at| (from + 3.0 * at as f64).sin()).collect();
    Tensor::from_f64(DType::F32, shape, &numbers)
}

fn main() -> plimsoll::Result<()> {
    let trace = Trace::new("either");
    let (x, wanted) = (trace.input("x", DType::F32, [4, 2]), trace.input("wanted", DType::F32, [4, 1]));
    let weights = [
        trace.state("inner", drawn([2, 8], 1.0)),
        trace.state("inner_bias", Tensor::from_f32([1, 8], &[0.0; 8])?),
        trace.state("outer", drawn([8, 1], 2.0)),
        trace.state("outer_bias", Tensor::from_f32([1, 1], &[0.0])?),
    ];
    let [inner, inner_bias, outer, outer_bias] = weights;
    let y = (x.matmul(inner) + inner_bias).tanh().matmul(outer) + outer_bias;
    let error = y - wanted;
    let loss = (error * error).reduce_mean(&[], false);
    for (weight, slope) in weights.into_iter().zip(trace.grad(loss, &weights)) {
        trace.update(weight, weight - slope * 0.1);
    }
    trace.output("loss", loss);
    trace.output("y", y);
    let session = Session::from_graph(trace.finish()?, &Options::default().on(Choice::Cpu))?;
    println!("a step takes {} bytes, known before the first", session.plan().bytes());

    let pairs = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]];
    let x = Tensor::from_f32([4, 2], pairs.as_flattened())?;
    let wanted = Tensor::from_f32([4, 1], &[0.0, 1.0, 1.0, 0.0])?;
    let mut last = Vec::new();
    for step in 0..=1000 {
        let outputs = session.run(&[("x", x.clone()), ("wanted", wanted.clone())])?;
        if step % 250 == 0 {
            println!("step {step:4}: loss {:.6}", outputs[0].1.to_f64()[0]);
        }
        last = outputs[1].1.to_f64();
    }
    for ([a, b], y) in pairs.iter().zip(&last) {
        println!("either {a} or {b}: {y:.3}");
    }
    assert!(last.iter().zip([0.0, 1.0, 1.0, 0.0]).all(|(y, wanted)| (y - wanted).abs() < 0.01));
    assert_eq!(session.usage().bytes, session.plan().bytes());
    Ok(())
}
