//! NVRTC compiles every CUDA kernel of the op table, of the kernel cases and of the golden graphs, in every type. It needs no GPU.
//!
//! Without the library the test says that it was skipped, unless `PLIMSOLL_REQUIRE_NVRTC` is set: then it fails.

use crate::kernels::variants;
use crate::{common, graphs, samples};
use plimsoll::Limits;
use plimsoll::Recipe;
use plimsoll::internals::backend::cuda::library::Search;
use plimsoll::internals::backend::cuda::machine_code;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::graph::Graph;
use plimsoll::internals::kernel::Kernel;
use plimsoll::internals::kernel::render::{Bindings, Dialect, render};
use plimsoll::internals::kernel::schedule;
use plimsoll::internals::op::Fact;
use plimsoll::internals::pass::chunk;
use plimsoll::internals::target::{Libraries, Target};
use plimsoll::internals::{ops, plan};
use std::collections::BTreeMap;
use std::slice;

/// Kernels per program: many enough that a program's fixed cost does not count, few enough that threads share the work.
const BATCH: usize = 60;

/// A device without libraries: everything is rendered.
fn target() -> Target {
    Target { libraries: Libraries::default(), ..Target::cuda() }
}

/// Adds the texts of kernels to the earlier ones.
fn collect(name: &str, kernels: &[Kernel], target: &Target, into: &mut BTreeMap<String, String>) {
    let launched = kernels.iter().flat_map(Kernel::launched);
    for kernel in launched.filter(|k| k.schedule.call().is_none() && !k.reads.iter().any(|r| r.packed)) {
        let source = render(kernel, target, &Bindings::distinct(kernel), Dialect::Cuda);
        let source = source.unwrap_or_else(|e| panic!("{name}: {e}"));
        if !source.text.is_empty() {
            into.entry(source.text).or_insert_with(|| name.to_owned());
        }
    }
}

fn planned(name: &str, graph: Graph, chunks: usize, into: &mut BTreeMap<String, String>) {
    let planned = Recipe::default().whole(graph, &target()).and_then(|mut graph| {
        chunk::run(&mut graph, chunks, 0)?;
        plan::planned(&graph, &target(), &Limits { memory: None })
    });
    collect(name, &planned.unwrap_or_else(|e| panic!("{name}: {e}")).programs[0].kernels, &target(), into);
}

/// Every text, with the name of what it is for.
fn texts() -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    for (number, sample) in samples::samples().iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let name = format!("sample {number}, {} in {dtype}", sample.op);
            let mut graph = Graph::new(sample.op);
            let mut input = |i: usize, input: &samples::Input| {
                let dtype = if input.dtype == DType::F32 { dtype } else { input.dtype };
                graph.input(format!("x{i}"), Fact::new(dtype, input.shape.clone()))
            };
            let inputs: Vec<_> =
                sample.inputs.iter().enumerate().map(|(i, x)| x.as_ref().map(|x| input(i, x))).collect();
            let op = ops::find(sample.op).expect("a row");
            let node = match graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]) {
                Ok(node) => node,
                // Attributes may fix the types of other inputs.
                Err(error) if dtype != DType::F32 => {
                    eprintln!("{name}: {error}");
                    continue;
                }
                Err(error) => panic!("{name}: {error}"),
            };
            for port in 0..graph.node(node).outputs.len() {
                graph.output(format!("y{port}"), node.output(port));
            }
            planned(&name, graph, 1, &mut texts);
        }
    }
    let plain = variants::plain();
    // With one multiprocessor, even small cases fill it.
    let targets = [target(), Target { multiprocessors: 1, ..target() }];
    for case in [variants::halves(&plain), variants::folded(), plain].concat() {
        let supported = targets.iter().filter(|target| case.is_supported(target));
        supported.for_each(|target| {
            let kernel = schedule::scheduled(&case.kernel, target).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            collect(&case.name, slice::from_ref(&kernel), target, &mut texts);
        });
    }
    for (file, dims) in graphs::GRAPHS {
        (1..=2).for_each(|chunks| planned(file, graphs::import(file, dims), chunks, &mut texts));
    }
    for precision in [DType::F16, DType::BF16] {
        planned(&format!("a step in {precision}"), crate::precision::step(precision), 1, &mut texts);
    }
    texts
}

/// The library that the program itself finds, and the oldest that it takes, where `PLIMSOLL_OLDEST_NVRTC` names its folder.
fn searches() -> Vec<Search> {
    let oldest = std::env::var_os("PLIMSOLL_OLDEST_NVRTC");
    let oldest = oldest.map(|folder| Search { loader: false, folders: vec![folder.into()] });
    [Search::here()].into_iter().chain(oldest).collect()
}

/// The texts that a library does not compile, each with its error.
fn failures(search: &Search, all: &[(&str, &str)]) -> Vec<String> {
    let failure = |batch: &[(&str, &str)]| {
        let compile = |batch: &[(&str, &str)]| {
            machine_code(search, "sm_90a", &batch.iter().map(|(text, _)| *text).collect::<Vec<_>>()).err()
        };
        compile(batch)?;
        let alone = batch.iter().find_map(|one| Some(format!("{}: {}", one.1, compile(slice::from_ref(one))?)));
        Some(alone.unwrap_or_else(|| "kernels that compile apart do not compile together".into()))
    };
    let batches: Vec<_> = all.chunks(BATCH).collect();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|worker| {
                let (batches, failure) = (&batches, &failure);
                scope.spawn(move || batches.iter().skip(worker).step_by(2).filter_map(|b| failure(b)).collect())
            })
            .collect();
        workers.into_iter().flat_map(|w| -> Vec<String> { w.join().expect("it compiles to the end") }).collect()
    })
}

#[test]
fn every_kernel_compiles() {
    let searches = searches();
    if let Err(error) = searches.iter().try_for_each(|search| machine_code(search, "sm_90a", &[]).map(drop)) {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_NVRTC").is_none(), "NVRTC is required: {error}");
        eprintln!("SKIPPED: {error}; tests/test.sh installs it");
        return;
    }
    let texts = texts();
    let all: Vec<(&str, &str)> = texts.iter().map(|(text, name)| (text.as_str(), name.as_str())).collect();
    let all = common::part_of(all, "kernels compiled by NVRTC", |(text, _)| text);
    for search in searches {
        let failures = failures(&search, &all);
        eprintln!("{} kernels in programs of {BATCH}", all.len());
        assert!(failures.is_empty(), "{} programs fail\n{}", failures.len(), failures.join("\n\n"));
    }
}
