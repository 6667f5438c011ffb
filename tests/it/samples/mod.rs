//! Sample calls of every row of the op table: what the tests that walk the table run on each backend.
//!
//! Every row has a sample of its own. The files here add edge cases by family: each exports `samples() -> Vec<Sample>`
//! and is listed in [`samples`].

use plimsoll::internals::ops;

pub use plimsoll::internals::op::{Data, Sample, SampleInput as Input};

mod elementwise;
mod found;
mod layout;
mod nn;
mod runtime;
mod signal;

/// Every sample: those of the rows, and the edge cases of every family.
pub fn samples() -> Vec<Sample> {
    let rows = ops::all().map(|op| op.example()).collect();
    let families = [
        elementwise::samples(),
        layout::samples(),
        nn::samples(),
        found::samples(),
        runtime::samples(),
        signal::samples(),
    ];
    [rows, families.concat()].concat()
}

/// A call with inputs of these shapes, random between -1 and 1.
fn call(op: &'static str, shapes: &[&[usize]]) -> Sample {
    Sample::new(op).floats(shapes)
}
