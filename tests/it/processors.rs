//! The op table on two processors: `PLIMSOLL_ROWS=FILE` writes what the rows compute on this one, or, where the file is there, holds it against
//! what another one has written.

use crate::{common, ops, samples};
use plimsoll::Tensor;
use plimsoll::internals::backend::cpu::Cpu;
use std::fs;
use std::path::Path;

/// Largest difference, as a share of an output's peak.
const TOLERANCE: f64 = 1e-6;

#[test]
fn rows_agree_with_those_of_another_processor() {
    let Some(file) = std::env::var_os("PLIMSOLL_ROWS") else {
        return eprintln!("SKIPPED: PLIMSOLL_ROWS names no file of another processor");
    };
    let found = samples::samples().into_iter().map(|sample| {
        let tensors = ops::found(Box::new(Cpu::new(2)), &sample).unwrap_or_else(|e| panic!("{}: {e}", sample.op));
        (format!("{} {:?}", sample.op, sample.attrs), tensors)
    });
    let found: Vec<(String, Vec<Tensor>)> = found.collect();
    let outputs = || found.iter().flat_map(|(name, tensors)| tensors.iter().map(move |tensor| (name, tensor)));
    if !Path::new(&file).exists() {
        let bytes: Vec<u8> = outputs().flat_map(|(_, tensor)| tensor.bytes().to_vec()).collect();
        fs::write(file, bytes).expect("the file is written");
        return;
    }
    let bytes = fs::read(file).expect("the file is read");
    let (mut rest, mut same, mut failures) = (&bytes[..], 0, Vec::new());
    for (name, tensor) in outputs() {
        let (these, others) = rest.split_at_checked(tensor.bytes().len()).expect("the file is of the same rows");
        rest = others;
        same += usize::from(these == &tensor.bytes()[..]);
        let expected = Tensor::new(tensor.dtype(), tensor.shape().clone(), these.to_vec()).expect("as many bytes");
        if let Err(error) = common::agrees(tensor, &expected, TOLERANCE) {
            failures.push(format!("{name}: {error}"));
        }
    }
    assert!(rest.is_empty(), "the file is of the same rows");
    eprintln!("{same} of {} outputs have the same bits", outputs().count());
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}
