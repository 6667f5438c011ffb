//! Classifies a picture of a handwritten digit with a model from a file: `cargo run --example classify`.

use plimsoll::{Choice, Options, Session, Tensor};

/// Ink of eight by eight pixels, from none to the most in the order of [`INK`].
const PICTURE: [&str; 8] =
    ["  i@@@@X", "  +cii#x", "     cX.", "   :+@: ", "  i@@@= ", "  ;x@;. ", "  .8o   ", "  :@,   "];
const INK: &str = " .,:;i+=xcoXO8%#@";

fn main() -> plimsoll::Result<()> {
    let options = Options::default().on(Choice::Cpu).set("batch", 1);
    let session = Session::from_path("graphs/digits.onnx", &options)?;
    println!("{}: {} bytes, known before the run\n", session.device(), session.plan().bytes());

    let ink = |pixel| INK.find(pixel).expect("a letter of the list") as f32 / 16.0;
    let pixels: Vec<f32> = PICTURE.iter().flat_map(|row| row.chars()).map(ink).collect();
    let outputs = session.run(&[("image", Tensor::from_f32([1, 1, 8, 8], &pixels)?)])?;

    let scores = outputs[0].1.to_f64();
    let sum: f64 = scores.iter().map(|score| score.exp()).sum();
    for (digit, score) in scores.iter().enumerate() {
        let share = score.exp() / sum;
        let row = PICTURE.get(digit).unwrap_or(&"        ");
        println!("{row}   {digit} {:5.1} % {}", 100.0 * share, "=".repeat((40.0 * share) as usize));
    }
    let best = (0..10).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).expect("there are ten digits");
    println!("\nIt is a {best}.");
    assert_eq!(best, 7);
    assert_eq!(session.usage().bytes, session.plan().bytes());
    Ok(())
}
