//! Generates tokens with a decoder whose cache stays on the device: `cargo run --example decode`.
//!
//! The file lets its cache grow by Concat. Here the cache is a state: room for 64 rows is planned once, and each run writes one of them. The
//! weights are drawn, so the tokens mean nothing.

use plimsoll::{Choice, Options, Session, Tensor};

/// Numbers around zero, always the same ones.
fn drawn(count: usize) -> Vec<f64> {
    (0..count).map(|at| ((at * 7919 + 13) % 1009) as f64 / 1009.0 - 0.5).map(|number| 0.4 * number).collect()
}

fn load() -> plimsoll::Result<Session> {
    let pairs = [("token", "next_token"), ("past_*", "present_*")];
    let state = pairs.map(|(input, output)| (input.to_owned(), output.to_owned())).to_vec();
    let options = Options { state, ..Options::default() }.on(Choice::Cpu).set("batch", 1).set("past", 0..=64);
    Session::from_path("graphs/append.onnxtxt", &options)
}

/// Runs a session so many times, and gives the token of each.
fn generate(session: &Session, count: usize) -> plimsoll::Result<Vec<i64>> {
    let ports = session.inputs();
    let weights: Vec<_> = ports
        .iter()
        .map(|port| (&*port.name, Tensor::from_f64(port.dtype, port.shape.clone(), &drawn(port.shape.numel()))))
        .collect();
    (0..count)
        .map(|_| {
            session.run(&weights)?;
            Ok(session.state("token")?.to_i64().expect("a token is an integer")[0])
        })
        .collect()
}

fn main() -> plimsoll::Result<()> {
    let session = load()?;
    let first = generate(&session, 1)?;
    let bytes = session.usage().bytes;
    let more = generate(&session, 39)?;
    println!("40 tokens: {first:?} and then {more:?}");
    println!("{bytes} bytes at the first, {} at the last", session.usage().bytes);
    assert_eq!((bytes, session.usage().bytes), (session.plan().bytes(), session.plan().bytes()));

    // Another session goes on where the states were saved.
    let path = std::env::temp_dir().join(format!("decode-{}.safetensors", std::process::id()));
    session.save_states(&path)?;
    let other = load()?;
    other.load_states(&path)?;
    std::fs::remove_file(&path).expect("the file was written");
    let [here, there] = [generate(&session, 10)?, generate(&other, 10)?];
    println!("10 more, here and in another session: {here:?} {there:?}");
    assert_eq!(here, there);

    // A run beyond the room is refused, and changes nothing.
    generate(&session, 14)?;
    let refused = generate(&session, 1).expect_err("the cache is full");
    println!("token 65: {refused}");
    Ok(())
}
