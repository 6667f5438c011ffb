//! Reductions of the same rows become one kernel on GPUs, and compute what the graph says.

use crate::common;
use plimsoll::internals::kernel::Template;
use plimsoll::internals::kernel::meaning::stores;
use plimsoll::internals::plan::Plan;
use plimsoll::internals::reference;
use plimsoll::internals::target::Target;

/// What the steps of a plan compute one after another, by the meaning of their kernels. The graph has no constants that are stored.
fn run(plan: &Plan, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    assert!(plan.programs[0].constants.is_empty(), "constants are literals");
    let mut memory: Vec<Vec<f64>> = plan.programs[0].buffers.iter().map(|b| vec![f64::NAN; b.shape.numel()]).collect();
    for (port, values) in plan.programs[0].inputs.iter().zip(inputs) {
        memory[port.buffer.index()].clone_from(values);
    }
    for step in &plan.programs[0].steps {
        let read: Vec<_> = step.reads.iter().map(|b| memory[b.index()].clone()).collect();
        for (stores, buffer) in stores(&plan.programs[0].kernels[step.kernel], &read).into_iter().zip(&step.writes) {
            stores.into_iter().for_each(|(at, value)| memory[buffer.index()][at as usize] = value);
        }
    }
    plan.programs[0].outputs.iter().map(|port| memory[port.buffer.index()].clone()).collect()
}

/// The results of each row kernel.
fn results(plan: &Plan) -> Vec<usize> {
    let rows = plan.programs[0].steps.iter().map(|step| &plan.programs[0].kernels[step.kernel]);
    rows.filter(|kernel| matches!(kernel.template, Template::Row { .. })).map(|kernel| kernel.writes.len()).collect()
}

/// The row kernels on a target, whose results are those of the reference.
fn row_kernels(text: &str, target: &Target) -> Vec<usize> {
    let graph = common::graph(text);
    let mut state = 3;
    let inputs: Vec<_> = graph.inputs().iter().map(|&v| common::random(&mut state, &graph.fact(v).shape)).collect();
    let expected = reference::run(&graph, &inputs).expect("the reference runs");
    let plan = common::planned(&graph, target);
    let found = run(&plan, &inputs.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
    for (found, expected) in found.iter().zip(&expected) {
        let expected = expected.to_f64();
        let peak = expected.iter().fold(0.0f64, |peak, v| peak.max(v.abs()));
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-5 * peak), "{found:?}, not {expected:?}");
    }
    results(&plan)
}

/// A graph of two images' gradients and a body.
fn over(body: &str, outputs: &str) -> String {
    format!(
        "g (float[6, 5, 40] x, float[6, 5, 40] dy, float[1, 5, 1] mean) => ({outputs})
        <int64[2] axes = {{0, 2}}, int64[1] one = {{1}}> {{ {body} }}"
    )
}

#[test]
fn one_kernel_reads_what_two_sums_read() {
    let plain = over(
        "a = ReduceSum (dy, axes)
         centered = Sub (x, mean)
         product = Mul (dy, centered)
         b = ReduceSum (product, axes)",
        "float[1, 5, 1] a, float[1, 5, 1] b",
    );
    let turned = over(
        "product = Mul (dy, x)
         b = ReduceMax <axes = [0, 2]> (product)
         a = ReduceSum (dy, axes)
         root = Abs (a)",
        "float[1, 5, 1] b, float[1, 5, 1] root",
    );
    for target in [Target::cuda(), Target::wgpu()] {
        assert_eq!(row_kernels(&plain, &target), [2], "{}", target.name);
        assert_eq!(row_kernels(&turned, &target), [2], "{}", target.name);
    }
    assert_eq!(row_kernels(&plain, &Target::cpu(1)), [1, 1]);
}

/// What depends on the first sum comes behind both, and a third one joins.
#[test]
fn what_waits_comes_behind() {
    let text = over(
        "a = ReduceSum (dy, axes)
         total = ReduceSum (a, one)
         product = Mul (dy, x)
         b = ReduceSum (product, axes)
         difference = Sub (dy, x)
         c = ReduceMin <axes = [0, 2]> (difference)",
        "float[1, 5, 1] a, float[1, 1, 1] total, float[1, 5, 1] b, float[1, 5, 1] c",
    );
    assert_eq!(row_kernels(&text, &Target::cuda()), [3, 1]);
}

/// A kernel has eight reductions at most.
#[test]
fn many_sums_are_some_kernels() {
    let sums =
        |i: usize| format!("p{i} = Mul (x, x)  q{i} = Add (p{i}, c{i})  a{i} = ReduceMax <axes = [0, 2]> (q{i})\n");
    let text = format!(
        "g (float[6, 5, 40] x) => ({}) <{}> {{ {} }}",
        (0..20).map(|i| format!("float[1, 5, 1] a{i}")).collect::<Vec<_>>().join(", "),
        (0..20).map(|i| format!("float c{i} = {{{i}}}")).collect::<Vec<_>>().join(", "),
        (0..20).map(sums).collect::<String>()
    );
    let mut found = row_kernels(&text, &Target::cuda());
    found.sort_unstable();
    assert_eq!(found, [4, 8, 8]);
}

#[test]
fn other_rows_and_sums_that_follow_are_kernels_of_their_own() {
    let follows = over(
        "a = ReduceSum (dy, axes)
         other = Sub (dy, a)
         product = Mul (other, x)
         b = ReduceSum (product, axes)",
        "float[1, 5, 1] a, float[1, 5, 1] b",
    );
    let across = over(
        "a = ReduceSum (dy, one)
         product = Mul (dy, x)
         b = ReduceSum (product, axes)",
        "float[6, 1, 40] a, float[1, 5, 1] b",
    );
    let apart = over(
        "a = ReduceSum (dy, axes)
         b = ReduceSum (x, axes)",
        "float[1, 5, 1] a, float[1, 5, 1] b",
    );
    for text in [follows, across, apart] {
        assert!(row_kernels(&text, &Target::cuda()).iter().all(|&results| results == 1), "{text}");
    }
}
