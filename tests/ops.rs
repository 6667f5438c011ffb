//! The op table on every backend against the reference.

mod common;
mod samples;

use plimsoll::backend::Backend;
use plimsoll::dtype::DType;
use plimsoll::exec::Exec;
use plimsoll::graph::Graph;
use plimsoll::op::{Fact, ValueId};
use plimsoll::plan::Limits;
use plimsoll::{ops, pass, plan, reference};
use std::collections::BTreeSet;

/// Within this share of the output's peak.
const TOLERANCE: f64 = 1e-5;
/// The same where values are halves.
const HALF_TOLERANCE: f64 = 1e-2;

/// Rows whose exactness a backend's arithmetic bounds, and the share of the peak that it keeps to.
const LOOSER: &[(&str, &str, f64)] = &[];

fn graph(sample: &samples::Sample) -> Result<Graph, String> {
    let op = ops::find(sample.op).ok_or_else(|| format!("no row '{}'", sample.op))?;
    let mut graph = Graph::new(sample.op);
    let inputs: Vec<Option<ValueId>> = sample
        .inputs
        .iter()
        .enumerate()
        .map(|(i, input)| input.as_ref().map(|t| graph.input(format!("x{i}"), Fact::new(t.dtype, t.shape.clone()))))
        .collect();
    let node = graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]).map_err(|e| e.to_string())?;
    for port in 0..graph.node(node).outputs.len() as u32 {
        graph.output(format!("y{port}"), ValueId { node, port });
    }
    Ok(graph)
}

/// Runs a sample and holds it against the reference.
fn agrees(backend: Box<dyn Backend>, sample: &samples::Sample, tolerance: f64) -> Result<(), String> {
    let graph = graph(sample)?;
    let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
    let expected = reference::run(&graph, &inputs).map_err(|e| format!("reference: {e}"))?;
    let mut passed = graph.clone();
    pass::run(&mut passed, backend.target(), true).map_err(|e| e.to_string())?;
    let (plan, constants) =
        plan::compile(&passed, backend.target(), &Limits { memory: None }).map_err(|e| format!("plan: {e}"))?;
    let planned = plan.bytes();
    let mut exec = Exec::load(backend, plan, &constants, &|_| {}).map_err(|e| format!("load: {e}"))?;
    let found = exec.run(&inputs).map_err(|e| format!("run: {e}"))?;
    let allocated = exec.backend().usage().bytes;
    if planned != allocated {
        return Err(format!("planned {planned} bytes, allocated {allocated}"));
    }
    for (found, expected) in found.iter().zip(&expected) {
        common::agrees(found, expected, tolerance)?;
    }
    Ok(())
}

#[test]
fn every_row_agrees_with_the_reference_on_every_backend() {
    let samples = samples::samples();
    let mut failures = Vec::new();
    for (name, open) in common::backends() {
        let mut ran = 0;
        for (number, sample) in samples.iter().enumerate() {
            let looser = LOOSER.iter().find(|(b, o, _)| *b == name && *o == sample.op);
            ran += 1;
            if let Err(error) = agrees(open(), sample, looser.map_or(TOLERANCE, |l| l.2)) {
                failures.push(format!("{name}: sample {number}, {} {:?}: {error}", sample.op, sample.attrs));
            }
        }
        eprintln!("{name}: {ran} samples");
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The same samples with halves for their `f32` inputs, where the backend has halves.
#[test]
fn every_row_agrees_with_the_reference_in_halves() {
    let mut failures = Vec::new();
    for (name, open) in common::backends() {
        let mut ran = 0;
        for dtype in [DType::F16, DType::BF16] {
            if let Err(error) = open().target().storage(dtype) {
                assert!(error.to_string().contains(&format!("has no {dtype}")), "{error}");
                eprintln!("{name}: {error}");
                continue;
            }
            for (number, mut sample) in samples::samples().into_iter().enumerate() {
                let floats = sample.inputs.iter_mut().flatten().filter(|input| input.dtype == DType::F32);
                if floats.map(|input| input.dtype = dtype).count() == 0 || graph(&sample).is_err() {
                    continue;
                }
                ran += 1;
                if let Err(error) = agrees(open(), &sample, HALF_TOLERANCE) {
                    failures
                        .push(format!("{name}: sample {number}, {} {dtype} {:?}: {error}", sample.op, sample.attrs));
                }
            }
        }
        eprintln!("{name}: {ran} samples");
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_row_has_a_sample() {
    let sampled: BTreeSet<&str> = samples::samples().iter().map(|s| s.op).collect();
    let missing: Vec<_> = ops::all().map(|op| op.name).filter(|name| !sampled.contains(name)).collect();
    assert!(missing.is_empty(), "rows without a sample: {}", missing.join(", "));
}
