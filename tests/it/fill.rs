//! Kernels of much data fill the device: gradients of the layers that trainings have, planned for an H200.

use crate::common::planned;
use plimsoll::internals::kernel::Kernel;
use plimsoll::internals::kernel::render::{Bindings, Dialect, render};
use plimsoll::{Attrs, DType, Target, Tensor, Trace, Var};

/// The fewest bytes that are much: 4 us of an H200's memory.
const MUCH: usize = 16 << 20;

/// Bytes that the kernel's operands have, each element once.
fn bytes(kernel: &Kernel) -> usize {
    let operands = kernel.reads.iter().chain(&kernel.writes);
    let elements = |shape: &[usize], strides: &[isize]| -> usize {
        shape.iter().zip(strides).filter(|(_, stride)| **stride != 0).map(|(extent, _)| extent).product()
    };
    operands.map(|o| elements(&o.access.shape, &o.access.strides) * o.dtype.size()).sum()
}

/// Plans the gradients of a layer's output, times weights that are inputs, by its first `by` inputs.
fn check<const N: usize>(
    name: &str,
    dtype: DType,
    shapes: [&[usize]; N],
    by: usize,
    layer: impl for<'g> Fn(&'g Trace, [Var<'g>; N]) -> Var<'g>,
) {
    let g = Trace::new(name);
    let mut number = 0;
    let inputs = shapes.map(|shape| {
        number += 1;
        g.input(&format!("x{number}"), dtype, shape)
    });
    let y = layer(&g, inputs);
    let weights = g.input("weights", dtype, y.fact().expect("it is sound").shape);
    let loss = (y * weights).cast(DType::F32).reduce_sum(&[], false);
    g.output("loss", loss);
    for (number, gradient) in g.grad(loss, &inputs[..by]).into_iter().enumerate() {
        g.output(&format!("d{number}"), gradient);
    }
    let target = Target::cuda();
    let plan = planned(&g.finish().expect("it is sound"), &target);
    let program = &plan.programs[0];
    for step in &program.steps {
        let kernel = &program.kernels[step.kernel.index()];
        if kernel.schedule.call().is_some() || bytes(kernel) < MUCH {
            continue;
        }
        let source = render(kernel, &target, &Bindings::distinct(kernel), Dialect::Cuda).expect("it renders");
        let groups: u64 = source.groups.iter().map(|&n| u64::from(n)).product();
        let words = kernel.schedule.words(kernel, &target);
        // Tokens that are one axis are added up in one stage.
        let floor = if name == "rows of tokens" { 48 } else { u64::from(target.multiprocessors) };
        assert!(
            groups * 2 >= floor,
            "{name}, step {}: {groups} workgroups of {} threads for {} bytes: {words}",
            step.name,
            source.size,
            bytes(kernel)
        );
    }
}

#[test]
fn kernels_of_much_data_fill_the_device() {
    for dtype in [DType::BF16, DType::F32] {
        for (name, x, w, groups, stride) in [
            ("3x3 of each channel", [32, 96, 112, 112], [96, 1, 3, 3], 96, 1),
            ("3x3 of each channel, 2 apart", [32, 96, 112, 112], [96, 1, 3, 3], 96, 2),
            ("3x3 of many channels", [32, 960, 14, 14], [960, 1, 3, 3], 960, 1),
            ("7x7 of each channel", [32, 96, 56, 56], [96, 1, 7, 7], 96, 1),
            ("5x5 of each channel", [32, 672, 14, 14], [672, 1, 5, 5], 672, 1),
            ("groups of four", [32, 128, 56, 56], [128, 4, 3, 3], 32, 1),
            ("3x3", [32, 64, 56, 56], [64, 64, 3, 3], 1, 1),
            ("1x1", [32, 32, 112, 112], [16, 32, 1, 1], 1, 1),
        ] {
            let pad = (w[2] / 2) as i64;
            check(name, dtype, [&x, &w], 2, |_, [x, w]| {
                let attrs = Attrs::new().with("group", groups as i64).with("strides", vec![stride, stride]);
                x.op("Conv", &[w], attrs.with("pads", vec![pad; 4]))
            });
        }
        check("layer normalization", dtype, [&[32, 784, 384], &[384], &[384]], 3, |_, [x, scale, bias]| {
            x.op("LayerNormalization", &[scale, bias], Attrs::new())
        });
        check("rows of tokens", dtype, [&[25_088, 384], &[384], &[384]], 3, |_, [x, scale, bias]| {
            x.op("LayerNormalization", &[scale, bias], Attrs::new())
        });
        check("softmax", dtype, [&[32, 12, 256, 256]], 1, |_, [x]| x.op("Softmax", &[], Attrs::new()));
        check("a bias", dtype, [&[8192, 3072], &[3072]], 2, |_, [x, bias]| x + bias);
        for (name, rows, inner, count) in [("positions", 32, 128, 65_536), ("words", 32_000, 768, 8192)] {
            check(name, dtype, [&[rows, inner]], 1, |g, [table]| {
                let indices: Vec<f64> = (0..count).map(|i| (i * 7919 % rows) as f64).collect();
                let indices = g.constant("indices", Tensor::from_f64(DType::I64, [count], &indices));
                table.op("Gather", &[indices], Attrs::new())
            });
        }
    }
}
