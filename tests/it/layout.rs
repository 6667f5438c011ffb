//! Plans for tensor cores choose where the channels of images lie, and compute the same.

use crate::kernels::{elements, indices};
use plimsoll::internals::kernel::library::Call;
use plimsoll::internals::kernel::meaning::evaluate;
use plimsoll::internals::kernel::{Kernel, Template};
use plimsoll::internals::plan::{Limits, Plan};
use plimsoll::internals::target::Libraries;
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Graph, Recipe, Target, Tensor};
use std::path::Path;

/// A constant whose elements all differ.
fn weights(name: &str, dims: &[usize], scale: f64) -> String {
    let (count, dims) =
        (dims.iter().product::<usize>(), dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", "));
    let rank = dims.split(", ").count();
    format!(
        "{name}_0 = Constant <value_int = 0> ()  {name}_1 = Constant <value_int = 1> ()
        {name}_n = Constant <value_int = {count}> ()  {name}_r = Range ({name}_0, {name}_n, {name}_1)
        {name}_f = Cast <to = 1> ({name}_r)  {name}_s = Sin ({name}_f)  {name}_k = Constant <value_float = {scale:?}> ()
        {name}_m = Mul ({name}_s, {name}_k)  {name}_d = Constant <value = int64[{rank}] {{{dims}}}> ()
        {name}_v = Reshape ({name}_m, {name}_d)  {name} = Cast <to = 16> ({name}_v)\n"
    )
}

/// A stem, a residual block with normalisation, a grouped convolution, a depthwise one, a pool, a concatenation, and values that are outputs.
fn network() -> Graph {
    let constants = [
        weights("w1", &[16, 3, 3, 3], 0.3),
        weights("b1", &[16], 0.1),
        weights("scale", &[16], 1.5),
        weights("shift", &[16], 0.2),
        weights("mean", &[16], 0.1),
        weights("w2", &[16, 16, 3, 3], 0.1),
        weights("w3", &[16, 8, 1, 1], 0.2),
        weights("w4", &[32, 5], 0.3),
        weights("w5", &[16, 1, 3, 3], 0.3),
    ];
    let text = format!(
        "<ir_version: 8, opset_import: [\"\" : 17]>
        net (float[2, 3, 11, 11] image, bfloat16[16, 16, 3, 3] given) => (bfloat16[2, 5] y, bfloat16[2, 16, 6, 6] seen) {{
        {}
        x = Cast <to = 16> (image)
        a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1, b1)
        var = Abs (scale)
        n = BatchNormalization (a, scale, shift, mean, var)
        r = Relu (n)
        c = Conv <pads = [1, 1, 1, 1]> (r, w2)
        s = Add (c, r)
        seen = Relu (s)
        g = Conv <group = 2> (seen, w3)
        q = Sigmoid (g)
        d = Conv <group = 16, pads = [1, 1, 1, 1]> (q, w5)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        o = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (seen, given)
        t = Concat <axis = 1> (p, o)
        m = GlobalAveragePool (t)
        f = Flatten (m)
        y = MatMul (f, w4)
        }}",
        constants.concat()
    );
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, &[]).expect("it is a graph")
}

fn planned(graph: &Graph, target: &Target) -> (Plan, Vec<Vec<f64>>) {
    let graph = graph.clone();
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    let (plan, constants) = plan::compile(&graph, target, &Limits { memory: None }).expect("it is planned and checked");
    (plan, constants[0].iter().map(|c| c.value().expect("it is known").to_f64()).collect())
}

/// Runs a plan's kernels in the interpreter, each buffer with memory of its own.
fn run(plan: &Plan, constants: &[Vec<f64>], inputs: &[Tensor]) -> Vec<Vec<f64>> {
    let mut buffers: Vec<Vec<f64>> = vec![Vec::new(); plan.programs[0].buffers.len()];
    plan.programs[0].constants.iter().zip(constants).for_each(|(port, values)| buffers[port.buffer] = values.clone());
    plan.programs[0].inputs.iter().zip(inputs).for_each(|(port, tensor)| buffers[port.buffer] = tensor.to_f64());
    for step in &plan.programs[0].steps {
        let kernel: &Kernel = &plan.programs[0].kernels[step.kernel];
        let reads: Vec<_> = step.reads.iter().map(|&b| buffers[b].clone()).collect();
        for ((operand, &buffer), values) in kernel.writes.iter().zip(&step.writes).zip(evaluate(kernel, &reads)) {
            let buffer = &mut buffers[buffer];
            buffer.resize(buffer.len().max(elements(&operand.access)), f64::NAN);
            for (index, value) in indices(&operand.access.shape).iter().zip(values) {
                buffer[operand.access.at(index) as usize] = value;
            }
        }
    }
    plan.programs[0].outputs.iter().map(|port| buffers[port.buffer].clone()).collect()
}

fn inputs() -> Vec<Tensor> {
    let wave = |count: usize, step: f64| (0..count).map(|i| (i as f64 * step).sin()).collect::<Vec<_>>();
    vec![
        Tensor::from_f64(DType::F32, [2, 3, 11, 11], &wave(2 * 3 * 11 * 11, 0.37)),
        Tensor::from_f64(DType::BF16, [16, 16, 3, 3], &wave(16 * 16 * 9, 0.11)),
    ]
}

#[test]
fn channels_come_last_where_tensor_cores_convolve() {
    let graph = network();
    let (plan, constants) = planned(&graph, &Target::cuda());
    let convolutions: Vec<_> =
        plan.programs[0].kernels.iter().filter(|k| matches!(k.template, Template::Conv { .. })).collect();
    let (depthwise, convolutions): (Vec<_>, Vec<_>) =
        convolutions.into_iter().partition(|k| matches!(k.template, Template::Conv { groups: 16, .. }));
    // Rendered: eight bytes of neighbouring channels at a time, of the weights, too.
    let [depthwise] = depthwise[..] else { panic!("{depthwise:?}") };
    let [image, weights, ..] = &depthwise.reads[..] else { panic!("{depthwise:?}") };
    assert!(
        depthwise.schedule.call().is_none()
            && [image, &depthwise.writes[0]].iter().all(|o| o.access.has_channels_last())
    );
    assert!(weights.access.is_vectorizable(0, 4), "{weights:?}");
    assert_eq!(convolutions.len(), 4);
    for kernel in &convolutions {
        let Some(Call::Conv(call)) = kernel.schedule.call() else { panic!("not cuDNN's: {kernel:?}") };
        assert!(call.channels_last, "{call:?}");
        assert!([&kernel.reads[0], &kernel.reads[1], &kernel.writes[0]].iter().all(|o| o.access.has_channels_last()));
    }
    // Normalisation went into the weights, the residual and the activation into the call.
    let with = |f: fn(&Call) -> bool| convolutions.iter().filter(|k| k.schedule.call().is_some_and(f)).count();
    assert_eq!(with(|c| matches!(c, Call::Conv(c) if c.bias.is_some())), 1);
    for kernel in plan.programs[0].kernels.iter().filter(|k| k.template == Template::Map) {
        let axes = kernel.shape.iter().zip(&kernel.writes[0].access.strides).filter(|(extent, _)| **extent > 1);
        let strides: Vec<_> = axes.map(|(_, stride)| *stride).collect();
        assert!(strides.is_sorted_by(|a, b| a > b), "neighbours do not lie side by side: {strides:?}");
    }
    let found = run(&plan, &constants, &inputs());
    let expected = reference::run(&graph, &inputs()).expect("the reference runs");
    for (found, expected) in found.iter().zip(&expected) {
        let expected = expected.to_f64();
        let peak = expected.iter().fold(0f64, |p, v| p.max(v.abs()));
        assert_eq!(found.len(), expected.len());
        let off = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0.0, f64::max);
        assert!(off <= 2e-2 * peak, "{off} of {peak}");
    }
}

#[test]
fn images_are_row_major_without_tensor_cores() {
    let graph = network();
    let plain = Target { libraries: Libraries::default(), ..Target::cuda() };
    let (plan, _) = planned(&graph, &plain);
    let images =
        plan.programs[0].kernels.iter().filter(|k| matches!(k.template, Template::Conv { .. } | Template::Pool { .. }));
    assert!(images.clone().count() > 3);
    assert!(images.flat_map(|k| k.reads[..1].iter().chain(&k.writes)).all(|o| !o.access.has_channels_last()));
}
