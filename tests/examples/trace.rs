//! Writes a net in Rust, plans it for a GPU that is not here, and runs it on the CPU: `cargo run --example trace`.
//!
//! The net computes "either, but not both" of two inputs, with weights that are set by hand.

use plimsoll::{Choice, DType, Graph, Limits, Options, Planning, Recipe, Session, Target, Tensor, Trace};

fn either() -> plimsoll::Result<Graph> {
    let trace = Trace::new("either");
    let x = trace.input("x", DType::F32, [4, 2]);
    let inner = trace.constant("inner", Tensor::from_f32([2, 2], &[1.0, 1.0, 1.0, 1.0])?);
    let bias = trace.constant("bias", Tensor::from_f32([2], &[0.0, -1.0])?);
    let outer = trace.constant("outer", Tensor::from_f32([2, 1], &[1.0, -2.0])?);
    trace.output("y", (x.matmul(inner) + bias).relu().matmul(outer));
    trace.finish()
}

fn main() -> plimsoll::Result<()> {
    let target = Target::preset("cuda").expect("a target that is known by name");
    let plan = Recipe::default().plan(either()?, &target, &Limits { memory: None })?;
    println!("on {}: {} bytes, {} steps\n", target.name, plan.bytes(), plan.programs[0].steps.len());

    let session = Session::from_graph(either()?, &Options::default().on(Choice::Cpu))?;
    println!("on {}: {} bytes", session.device(), session.plan().bytes());
    let x = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]];
    let outputs = session.run(&[("x", Tensor::from_f32([4, 2], x.as_flattened())?)])?;
    let y = outputs[0].1.to_f64();
    for ([a, b], y) in x.iter().zip(&y) {
        println!("either {a} or {b}: {y}");
    }
    assert_eq!(y, [0.0, 1.0, 1.0, 0.0]);
    Ok(())
}
