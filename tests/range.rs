//! One plan for a range of shapes: every binding runs in the same bytes, and as it does when it is planned alone.

use plimsoll::onnx;
use plimsoll::plan::check::check;
use plimsoll::plan::range::Family;
use plimsoll::session::{self, Choice, Options};
use plimsoll::{Limits, Session, Target, Tensor};
use std::path::Path;

fn family(path: &str, options: &Options) -> Family {
    let model = onnx::load(Path::new(path)).expect("a model");
    let limits = Limits { memory: None };
    Family::new(session::source(model), &options.dims, &Target::cpu(2), true, &limits).expect("plans")
}

#[test]
fn digits() {
    let path = "graphs/digits.onnx";
    let options = Options::default().on(Choice::Cpu).set("batch", 1..=64);
    let family = family(path, &options);
    for tried in family.tried() {
        eprintln!("{tried:?}");
        let (plan, _) = family.at(&tried.binding).expect("a plan");
        check(&plan).expect("sound");
    }
    let session = Session::from_path(path, &options).expect("loads");
    for batch in [32, 16, 64, 1, 32] {
        let alone = Session::from_path(path, &Options::default().on(Choice::Cpu).set("batch", batch)).expect("loads");
        let port = &alone.plan().inputs[0];
        let values: Vec<f64> = (0..port.shape.numel()).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
        let x = Tensor::from_f64(port.dtype, port.shape.clone(), &values);
        let a = session.run(&[(&port.name, x.clone())]).expect("runs");
        let b = alone.run(&[(&port.name, x.clone())]).expect("runs");
        assert_eq!(a[0].1.shape(), b[0].1.shape());
        assert_eq!(a[0].1.bytes(), b[0].1.bytes(), "batch {batch}");
    }
}
