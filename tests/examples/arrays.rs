//! Gives arrays of the crate `ndarray` to a session, and takes arrays out of it: `cargo run --example arrays`.

use ndarray::{Array2, ArrayD, ArrayView2, array};
use plimsoll::{Choice, Options, Session, Tensor};

/// The array as a tensor, whatever the order of its elements in memory.
fn tensor(array: ArrayView2<f32>) -> plimsoll::Result<Tensor> {
    let rows: Vec<f32> = array.iter().copied().collect();
    Tensor::from_f32(array.shape(), &rows)
}

/// A tensor of `f32` as an array.
fn array_of(tensor: &Tensor) -> ArrayD<f32> {
    let elements = tensor.bytes().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    ArrayD::from_shape_vec(tensor.shape().to_vec(), elements.collect()).expect("a tensor has all of its elements")
}

fn main() -> plimsoll::Result<()> {
    let session = Session::from_path("graphs/product.onnxtxt", &Options::default().on(Choice::Cpu).set("n", 3))?;
    let a: Array2<f32> = array![[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]];
    let b = a.t();
    let outputs = session.run(&[("a", tensor(a.view())?), ("b", tensor(b)?)])?;
    let y = array_of(&outputs[0].1);
    println!("{a}\n\ntimes its transpose is\n\n{y}");
    assert_eq!(y, a.dot(&b).into_dyn());
    Ok(())
}
