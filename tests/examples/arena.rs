//! Runs a model in memory that the program has already: `cargo run --example arena`.

use plimsoll::{Choice, Error, Graph, Limits, Options, Place, Planning, Recipe, Session, Target};

fn main() -> plimsoll::Result<()> {
    let options = Options { threads: 2, ..Options::default() }.on(Choice::Cpu);
    let graph = Graph::from_path("graphs/digits.onnx", &[("batch", 4)])?;

    // What the model will take, before any memory is there. Segments lie at multiples of 256 bytes.
    let plan = Recipe::default().plan(graph.clone(), &Target::cpu(2), &Limits { memory: None })?;
    let bytes = plan.bytes() as usize + 256 * (plan.segments.len() + 1);
    println!("planned: {} bytes; the program has {bytes}", plan.bytes());

    // A program has its own: a static, a part of a pool. Here it is a vector that is never freed.
    let memory = |bytes: usize| -> &'static mut [u8] { vec![0; bytes].leak() };
    let session = Session::from_graph_in(graph.clone(), &options, memory(bytes))?;
    println!("taken:   {} bytes, in that memory but for the stacks of threads", session.usage().bytes);
    assert_eq!(session.usage().bytes, plan.bytes());

    // Inputs and outputs stay where the program has them, too: nothing is allocated in a run.
    let image = [0u8; 4 * 4 * 64];
    let mut scores = [0u8; 4 * 4 * 10];
    session.run_in_place(&[("image", Place::bytes(&image))], &mut [("logits", Place::bytes_mut(&mut scores))])?;
    let first: Vec<f32> = scores[..40].chunks_exact(4).map(|s| f32::from_le_bytes([s[0], s[1], s[2], s[3]])).collect();
    println!("scores of an empty picture: {first:.2?}");
    assert!(first.iter().all(|score| score.is_finite()) && first.iter().any(|&score| score != 0.0));

    let refused = Session::from_graph_in(graph, &options, memory(64 << 10)).expect_err("that is too little");
    println!("in 64 KiB: {refused}");
    assert!(matches!(refused, Error::Fit { .. }));
    Ok(())
}
