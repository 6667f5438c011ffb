//! Two meanings of every row agree: its own values, and those of the rows and templates that it is lowered to.

use crate::samples;
use crate::samples::Sample;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::Body;
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::meaning::{evaluate, stores};
use plimsoll::internals::kernel::{Kernel, Operand};
use plimsoll::internals::op::{Attr, Attrs, Build, Call, Fact, Lower, NodeId, OpResult, TemplateCall, ValueId};
use plimsoll::internals::ops;
use plimsoll::internals::shape::{Access, Shape, advance};
use plimsoll::internals::tensor::Tensor;

/// Evaluates nodes as they are added: rows that decompose by their parts, templates by their definition, others by
/// their own meaning.
#[derive(Default)]
struct Machine {
    values: Vec<(Fact, Vec<f64>)>,
    templates: usize,
}

impl Machine {
    fn push(&mut self, fact: Fact, values: Vec<f64>) -> ValueId {
        assert_eq!(fact.shape.numel(), values.len());
        self.values.push((fact, values));
        NodeId::new(self.values.len() - 1).output(0)
    }

    /// Adds a node; `lowered` tells whether its row's own meaning is not to be used.
    fn add(&mut self, name: &str, inputs: &[Option<ValueId>], attrs: &Attrs, lowered: bool) -> OpResult<Vec<ValueId>> {
        let op = ops::find(name).ok_or_else(|| format!("no row '{name}'"))?;
        let shaping = |name: &str| op.inputs.iter().any(|i| i.shapes() && i.name == name);
        if let Some((attr, _)) = attrs.iter().find(|(attr, _)| !op.attrs.contains(attr) && !shaping(attr)) {
            return Err(format!("{name} has no attribute '{attr}'"));
        }
        let operands: Vec<_> = inputs.iter().map(|v| v.map(|v| self.values[v.node.index()].clone())).collect();
        let facts: Vec<_> = operands.iter().map(|v| v.as_ref().map(|v| &v.0)).collect();
        let data: Vec<_> = operands.iter().map(|v| v.as_ref().map(|v| &v.1[..])).collect();
        let call = Call { op, attrs, inputs: &facts };
        let outputs = call.infer()?;
        match op.lower {
            Lower::Decompose(decompose) if lowered => {
                let parts = call.decompose(decompose, self, inputs)?;
                let facts: Vec<_> = parts.iter().map(|v| self.values[v.node.index()].0.clone()).collect();
                assert_eq!(facts, outputs, "{name}: what it infers and what its parts infer");
                Ok(parts)
            }
            Lower::Template(template) if lowered => {
                let stored: Vec<_> = operands.iter().flatten().map(|(fact, values)| backwards(fact, values)).collect();
                let at: Vec<_> = stored.iter().map(|(access, _)| access.clone()).collect();
                let call = template(&call, &at)?;
                let buffers: Vec<_> = call.reads.iter().map(|&(input, _)| stored[input].1.clone()).collect();
                let values = written(&kernel(&call), &at[0], &buffers);
                self.templates += 1;
                Ok(vec![self.push(outputs[0].clone(), values)])
            }
            _ => Ok(outputs.into_iter().zip(call.eval(&data)?).map(|(fact, values)| self.push(fact, values)).collect()),
        }
    }
}

impl Build for Machine {
    fn fact(&self, value: ValueId) -> Fact {
        self.values[value.node.index()].0.clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        self.add(op, inputs, &attrs, true)
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        let values = Tensor::from_f64(fact.dtype, fact.shape.clone(), &elements()).to_f64();
        self.push(fact, values)
    }
}

/// The values as a buffer in which they lie in column-major order behind some others, so that nothing may assume an order.
fn backwards(fact: &Fact, values: &[f64]) -> (Access, Vec<f64>) {
    let axes: Vec<usize> = (0..fact.shape.len()).rev().collect();
    let reversed: Shape = fact.shape.iter().rev().copied().collect();
    let mut access = Access::contiguous(reversed).permute(&axes);
    access.offset = 3;
    let mut stored = vec![f64::NAN; 3 + values.len()];
    let mut index = vec![0; axes.len()];
    for &value in values {
        stored[access.at(&index) as usize] = value;
        advance(&mut index, &fact.shape);
    }
    (access, stored)
}

/// The kernel that writes a template's core values as they are.
fn kernel(call: &TemplateCall) -> Kernel {
    let operand = |access: Access| Operand { dtype: DType::F64, access, packed: false };
    Kernel {
        template: call.template.clone(),
        shape: call.shape.clone(),
        reads: call.reads.iter().map(|(_, access)| operand(access.clone())).collect(),
        writes: vec![operand(match call.template.def().in_place {
            true => call.reads[0].1.clone(),
            false => Access::contiguous(call.shape.clone()),
        })],
        prologues: Vec::new(),
        body: Body::identity(DType::F64),
        workspace: 0,
        schedule: Schedule::Open,
    }
}

/// The values of a kernel's result: those that it computes, or all of the data after its stores.
fn written(kernel: &Kernel, data: &Access, buffers: &[Vec<f64>]) -> Vec<f64> {
    if !kernel.is_in_place() {
        return evaluate(kernel, buffers).remove(0);
    }
    let mut result = buffers[0].clone();
    stores(kernel, buffers).remove(0).into_iter().for_each(|(element, value)| result[element as usize] = value);
    data.elements().map(|element| result[element as usize]).collect()
}

/// The facts and the values of a sample's outputs.
fn outputs(machine: &mut Machine, sample: &Sample, lowered: bool) -> OpResult<Vec<(Fact, Vec<f64>)>> {
    let inputs: Vec<_> = sample
        .tensors()
        .into_iter()
        .map(|t| t.map(|t| machine.push(Fact::new(t.dtype(), t.shape().clone()), t.to_f64())))
        .collect();
    let values = machine.add(sample.op, &inputs, &sample.attrs, lowered)?;
    Ok(values.iter().map(|v| machine.values[v.node.index()].clone()).collect())
}

#[test]
fn rows_mean_what_they_are_lowered_to() {
    let mut machine = Machine::default();
    let mut failures = Vec::new();
    for sample in samples::samples() {
        let op = ops::find(sample.op).unwrap_or_else(|| panic!("no row '{}'", sample.op));
        if !matches!(op.lower, Lower::Decompose(_) | Lower::Template(_)) {
            continue;
        }
        let mut agree = || -> OpResult<()> {
            let expected = outputs(&mut machine, &sample, false)?;
            let found = outputs(&mut machine, &sample, true)?;
            for ((fact, expected), (_, found)) in expected.iter().zip(&found) {
                let peak = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                // Constants such as epsilon are stored in single precision.
                let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * peak || a == b;
                if expected.len() != found.len() || !expected.iter().zip(found).all(close) {
                    return Err(format!("{fact}: expected {expected:.4?}, found {found:.4?}"));
                }
            }
            Ok(())
        };
        if let Err(error) = agree() {
            failures.push(format!("{} {:?}: {error}", sample.op, sample.attrs));
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    assert!(machine.templates > 100, "templates ran: {}", machine.templates);
}

/// Inputs 1, 2, 3 ... of one image with one channel.
fn ramp(op: &'static str, len: usize) -> Sample {
    let values: Vec<f64> = (1..=len).map(|v| v as f64).collect();
    Sample::new(op).given(DType::F32, &[1, 1, len], &values)
}

#[test]
fn values_are_those_of_onnxruntime() {
    let up = |len, kernel: &[f64]| ramp("ConvTranspose", len).given(DType::F32, &[1, 1, kernel.len()], kernel);
    let up = |kernel: &[f64]| up(3, kernel).ints("strides", &[2]);
    let mean = |len, kernel| ramp("AveragePool", len).ints("kernel_shape", &[kernel]);
    let padded = |len, kernel| mean(len, kernel).attr("count_include_pad", 1).attr("ceil_mode", 1);
    let max = |kernel, stride| ramp("MaxPool", 7).ints("kernel_shape", &[kernel]).ints("strides", &[stride]);
    let resize = |mode, scale: f64| ramp("Resize", 4).attr("mode", mode).attr("scales", vec![1.0, 1.0, scale]);
    let transform = "coordinate_transformation_mode";
    let cases: Vec<(Sample, &[f64])> = vec![
        (max(2, 2).attr("auto_pad", "SAME_UPPER"), &[2., 4., 6., 7.]),
        (max(2, 2).attr("auto_pad", "SAME_LOWER"), &[1., 3., 5., 7.]),
        (max(2, 3).attr("auto_pad", "VALID"), &[2., 5.]),
        (max(2, 2).attr("ceil_mode", 1), &[2., 4., 6., 7.]),
        (mean(6, 2).ints("strides", &[3]).ints("pads", &[1, 1]).attr("ceil_mode", 1), &[1., 3.5, 6.]),
        (padded(6, 3).ints("strides", &[2]).ints("pads", &[1, 1]), &[1., 3., 5., 3.]),
        (padded(6, 2).ints("strides", &[3]).ints("pads", &[1, 1]), &[0.5, 3.5, 3.]),
        (padded(6, 3).ints("strides", &[2]).ints("pads", &[0, 1]).ints("dilations", &[2]), &[3., 8. / 3.]),
        (mean(7, 4).ints("strides", &[2]).attr("auto_pad", "SAME_UPPER"), &[2., 3.5, 5.5, 6.5]),
        (
            mean(7, 4).ints("strides", &[2]).attr("auto_pad", "SAME_UPPER").attr("count_include_pad", 1),
            &[1.5, 3.5, 5.5, 3.25],
        ),
        (up(&[1., 10.]), &[1., 10., 2., 20., 3., 30.]),
        (up(&[1., 10.]).ints("output_padding", &[1]), &[1., 10., 2., 20., 3., 30., 0.]),
        (up(&[1., 10.]).ints("output_shape", &[5]), &[10., 2., 20., 3., 30.]),
        (up(&[1., 10.]).ints("output_shape", &[5]).attr("auto_pad", "SAME_UPPER"), &[1., 10., 2., 20., 3.]),
        (up(&[1., 10., 100.]).ints("output_shape", &[8]), &[1., 10., 102., 20., 203., 30., 300., 0.]),
        (up(&[1., 10., 100.]).attr("auto_pad", "SAME_UPPER"), &[1., 10., 102., 20., 203., 30.]),
        (up(&[1., 10., 100.]).attr("auto_pad", "SAME_LOWER"), &[10., 102., 20., 203., 30., 300.]),
        (
            up(&[1., 10., 100.]).ints("dilations", &[2]).ints("pads", &[1, 2]).ints("output_padding", &[1]),
            &[0., 12., 0., 123., 0., 230., 0.],
        ),
        (resize("nearest", 1.5), &[1., 1., 2., 3., 3., 4.]),
        (resize("nearest", 1.5).attr("nearest_mode", "round_prefer_ceil"), &[1., 2., 2., 3., 4., 4.]),
        (resize("nearest", 1.5).attr("nearest_mode", "floor"), &[1., 1., 2., 2., 3., 4.]),
        (resize("nearest", 1.5).attr("nearest_mode", "ceil"), &[1., 2., 3., 3., 4., 4.]),
        (
            resize("nearest", 2.).attr(transform, "asymmetric").attr("nearest_mode", "ceil"),
            &[1., 2., 2., 3., 3., 4., 4., 4.],
        ),
        (resize("linear", 2.), &[1., 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4.]),
        (resize("linear", 0.6), &[4. / 3., 3.]),
        (resize("linear", 0.25), &[2.5]),
        (resize("linear", 0.25).attr(transform, "pytorch_half_pixel"), &[1.]),
        (resize("linear", 1.5).attr(transform, "align_corners"), &[1., 1.6, 2.2, 2.8, 3.4, 4.]),
        (resize("linear", 1.6).attr(transform, "half_pixel_symmetric"), &[1., 1.5625, 2.1875, 2.8125, 3.4375, 4.]),
        (resize("cubic", 2.), &[0.8945, 1.1914, 1.668, 2.2969, 2.7031, 3.332, 3.8086, 4.1055]),
        (
            resize("cubic", 1.5).attr("cubic_coeff_a", -0.5).attr("exclude_outside", 1).attr(transform, "asymmetric"),
            &[1., 1.6071, 2.3333, 3., 3.7586, 4.1053],
        ),
    ];
    // Written down to four decimals.
    for (sample, expected) in cases {
        let found = outputs(&mut Machine::default(), &sample, false);
        let values = &found.as_ref().unwrap_or_else(|e| panic!("{sample:?}: {e}"))[0].1;
        let close = values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 6e-5);
        assert!(values.len() == expected.len() && close, "{sample:?}: expected {expected:?}, found {values:?}");
    }
}

#[test]
fn refusals_say_what_was_expected_and_what_was_found() {
    let call = |op, shapes: &[&[usize]]| {
        shapes.iter().fold(Sample::new(op), |sample, shape| sample.input(DType::F32, shape, 0.0, 1.0))
    };
    let pool = |shape: &[usize]| call("MaxPool", &[shape]);
    let conv = |x: &[usize], w: &[usize]| call("Conv", &[x, w]);
    let resize = || call("Resize", &[&[1, 1, 4]]);
    let cases = [
        (call("MatMul", &[&[2, 3], &[4, 5]]), "as many rows of B as columns of A, found [2,3] and [4,5]"),
        (call("MatMul", &[&[2, 2, 3], &[3, 3, 5]]), "leading axes that broadcast, found [2,2,3] and [3,3,5]"),
        (call("MatMul", &[&[], &[3]]), "a vector, a matrix or a batch of them, found []"),
        (call("MatMul", &[&[3]]).input(DType::F16, &[3], 0.0, 1.0), "input 'B': expected f32"),
        (Sample::new("MatMul").input(DType::U8, &[3], 0.0, 1.0).input(DType::U8, &[3], 0.0, 1.0), "found u8"),
        (call("Gemm", &[&[2, 3], &[4, 3]]), "found [2,3] and [4,3] with transA=0, transB=0"),
        (call("Gemm", &[&[2, 3], &[3, 4], &[3]]), "input 'C': expected a shape that broadcasts to [2,4], found [3]"),
        (conv(&[1, 3], &[1, 3]), "expected [n, c, spatial..] with 1 to 3 spatial axes, found [1,3]"),
        (conv(&[1, 3, 5], &[1, 2, 3]), "found X [1,3,5], W [1,2,3] and group 1"),
        (conv(&[1, 4, 5], &[3, 2, 3]).attr("group", 2), "found X [1,4,5], W [3,2,3] and group 2"),
        (conv(&[1, 3, 5], &[1, 3, 3]).attr("group", 0), "'group': expected 1 or more, found 0"),
        (
            conv(&[1, 3, 5], &[1, 3, 7]).ints("pads", &[1, 0]),
            "extent 5 + padding 1 + 0 to hold a window that reaches over 7",
        ),
        (conv(&[1, 3, 5], &[1, 3, 3]).ints("strides", &[0]), "'strides': expected values from 1"),
        (conv(&[1, 3, 5], &[1, 3, 3]).ints("pads", &[-1, 0]), "'pads': expected values from 0"),
        (conv(&[1, 3, 5], &[1, 3, 3]).ints("pads", &[1]), "'pads': expected 2 values, found [1]"),
        (conv(&[1, 3, 5], &[1, 3, 3]).ints("kernel_shape", &[2]), "expected [3] as the input W has, found [2]"),
        (conv(&[1, 3, 5], &[1, 3, 3]).attr("auto_pad", "SAME"), "SAME_UPPER or SAME_LOWER, found 'SAME'"),
        (call("Conv", &[&[1, 3, 5], &[2, 3, 3], &[3]]), "expected [2], one bias per output channel, found [3]"),
        (call("ConvTranspose", &[&[1, 2, 5], &[2, 1, 3]]).ints("pads", &[4, 3]), "pads that leave some of 7 elements"),
        (call("ConvTranspose", &[&[1, 2, 5], &[2, 1, 3]]).ints("output_shape", &[9]), "expected 1 to 7"),
        (pool(&[1, 1, 5]), "'kernel_shape': expected ints, found none"),
        (pool(&[1, 1, 5]).ints("kernel_shape", &[2]).ints("pads", &[3, 0]), "found only padding in window 0"),
        (pool(&[1, 1, 5]).ints("kernel_shape", &[2]).ints("pads", &[0, 2]), "found only padding in window 5"),
        (call("BatchNormalization", &[&[2, 3], &[3], &[3], &[3], &[2]]), "input 'input_var': expected [3], found [2]"),
        (
            call("BatchNormalization", &[&[0, 3], &[3], &[3], &[3], &[3]]).attr("training_mode", 1),
            "input 'X': expected [n, c, spatial..] with elements and a mean per channel, found f32[0,3]",
        ),
        (call("InstanceNormalization", &[&[2, 3, 4], &[2], &[3]]), "input 'scale': expected [3]"),
        (
            call("GroupNormalization", &[&[2, 3, 4], &[3], &[3]]).attr("num_groups", 2),
            "a divisor of the channels of [2,3,4], found 2",
        ),
        (call("LayerNormalization", &[&[2, 3], &[2]]), "broadcasts to [2,3], found [2]"),
        (call("LayerNormalization", &[&[2, 3], &[3]]).attr("axis", 2), "axis 2 is outside [2,3]"),
        (
            call("LayerNormalization", &[&[2, 3], &[3]]).attr("stash_type", 7),
            "'stash_type': expected a floating-point type",
        ),
        (call("Softmax", &[&[2, 3]]).attr("axis", -3), "axis -3 is outside [2,3]"),
        (resize(), "expected constant 'scales' or 'sizes', found neither"),
        (resize().attr("scales", vec![1.0, 1.0, 2.0]).ints("sizes", &[1, 1, 8]), "found both"),
        (resize().attr("scales", vec![2.0]), "'scales': expected 3 values, one per axis, found 1"),
        (resize().attr("scales", vec![1.0, 1.0, -2.0]), "expected positive factors"),
        (resize().attr("scales", vec![1.0, 1.0, 0.2]), "expected positive factors that leave elements"),
        (resize().ints("sizes", &[1, 1, 0]), "'sizes': expected 1 or more, found 0"),
        (resize().ints("sizes", &[8]).ints("axes", &[3]), "expected different axes of [1,1,4], found [3]"),
        (
            resize().ints("sizes", &[1, 1, 8]).attr("coordinate_transformation_mode", "tf_crop_and_resize"),
            "'roi': expected 3 starts, then as many ends, within -1024 to 1024, found []",
        ),
        (resize().ints("sizes", &[1, 1, 8]).attr("mode", "area"), "expected nearest, linear or cubic, found 'area'"),
        (
            resize().ints("sizes", &[1, 1, 8]).attr("coordinate_transformation_mode", "corners"),
            "align_corners, asymmetric or tf_crop_and_resize, found 'corners'",
        ),
    ];
    for (sample, expected) in cases {
        match outputs(&mut Machine::default(), &sample, false) {
            Ok(_) => panic!("{sample:?} is not refused"),
            Err(error) => assert!(error.contains(expected), "{sample:?}: expected '{expected}', found '{error}'"),
        }
    }
}

/// A node of an old opset, brought to the newest form.
fn upgraded(op: &str, opset: i64, inputs: usize, attrs: Attrs) -> (Vec<Option<u32>>, Attrs) {
    let mut slots: Vec<_> = (0..inputs).map(|node| Some(NodeId::new(node).output(0))).collect();
    let mut attrs = attrs;
    let op = ops::find(op).expect("the row exists");
    op.upgrade.expect("the row has older forms")(opset, &mut slots, &mut attrs);
    (slots.into_iter().map(|s| s.map(|v| v.node.into())).collect(), attrs)
}

#[test]
fn older_forms_become_the_newest() {
    let ints = |attrs: &Attrs| attrs.iter().map(|(k, v)| format!("{k}={v:?}")).collect::<Vec<_>>().join(" ");
    for op in ["Softmax", "LogSoftmax"] {
        assert_eq!(ints(&upgraded(op, 11, 1, Attrs::new()).1), "axis=Int(1) flatten=Int(1)");
        assert_eq!(ints(&upgraded(op, 7, 1, Attrs::new().with("axis", 2)).1), "axis=Int(2) flatten=Int(1)");
        assert_eq!(ints(&upgraded(op, 13, 1, Attrs::new()).1), "");
    }
    let (slots, attrs) = upgraded("Resize", 10, 2, Attrs::new().with("mode", "linear"));
    assert_eq!(slots, [Some(0), None, Some(1)]);
    let expected =
        "coordinate_transformation_mode=Str(\"asymmetric\") mode=Str(\"linear\") nearest_mode=Str(\"floor\")";
    assert_eq!(ints(&attrs), expected);
    let (slots, attrs) = upgraded("Resize", 13, 4, Attrs::new());
    assert_eq!((slots.len(), ints(&attrs).as_str()), (4, ""));
}

/// The sample with one extent, one axis or one attribute changed into something that its author did not think of.
fn mutants(sample: &Sample) -> Vec<Sample> {
    let mut mutants = Vec::new();
    let odd = [i64::MIN, -1, 0, 1, 7, i64::MAX];
    for (number, input) in sample.inputs.iter().enumerate().filter_map(|(i, input)| Some((i, input.as_ref()?))) {
        let mut with = |shape: Vec<usize>| {
            let mut mutant = sample.clone();
            let data = samples::Data::Uniform(0.0, 1.0);
            mutant.inputs[number] = Some(samples::Input { dtype: input.dtype, shape, data });
            mutants.push(mutant);
        };
        for axis in 0..input.shape.len() {
            let changed = |extent| {
                let mut shape = input.shape.clone();
                shape[axis] = extent;
                shape
            };
            with(changed(0));
            with(changed(input.shape[axis] + 1));
            with([&input.shape[..axis], &input.shape[axis + 1..]].concat());
        }
        with([&[1], &input.shape[..]].concat());
        with(input.shape.iter().map(|_| 0).collect());
    }
    for (name, value) in sample.attrs.iter() {
        let changed: Vec<Attr> = match value {
            Attr::Int(_) => odd.map(Attr::Int).to_vec(),
            Attr::Float(_) => [f64::NAN, f64::INFINITY, -1.0, 0.0].map(Attr::Float).to_vec(),
            Attr::Ints(values) => {
                let entry = |(k, v): (usize, &i64)| {
                    let mut values = values.clone();
                    values[k] = *v;
                    Attr::Ints(values)
                };
                (0..values.len())
                    .flat_map(|k| odd.iter().map(move |v| (k, v)))
                    .map(entry)
                    .chain([Attr::Ints(Vec::new())])
                    .collect()
            }
            Attr::Floats(values) => {
                let entry = |(k, v): (usize, f64)| {
                    let mut values = values.clone();
                    values[k] = v;
                    Attr::Floats(values)
                };
                let odd = [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e-9, 1e30];
                (0..values.len()).flat_map(|k| odd.map(|v| (k, v))).map(entry).chain([Attr::Floats(vec![])]).collect()
            }
            _ => Vec::new(),
        };
        let wrong = ["", "?"].map(|s| Attr::Str(s.into()));
        mutants.extend(changed.into_iter().chain(wrong).map(|value| sample.clone().attr(name, value)));
        let mut without = sample.clone();
        without.attrs.remove(name);
        mutants.push(without);
    }
    mutants
}

#[test]
fn what_is_accepted_can_be_evaluated_and_lowered() {
    let (mut accepted, mut refused, mut failures) = (0, 0, Vec::new());
    for mutant in samples::samples().iter().flat_map(mutants) {
        let outcome = std::panic::catch_unwind(|| {
            let op = ops::find(mutant.op).expect("a row");
            let facts: Vec<_> =
                mutant.inputs.iter().map(|i| i.as_ref().map(|i| Fact::new(i.dtype, i.shape.clone()))).collect();
            let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
            let Ok(inferred) = (Call { op, attrs: &mutant.attrs, inputs: &facts }).infer() else { return Ok(false) };
            // What ranks compute together has its own tests.
            let is_of_ranks = mutant.attrs.get("mesh_axis").is_some();
            let alone = !is_of_ranks || mutant.attrs.get("ranks") == Some(&Attr::Int(1));
            if !alone || inferred.iter().any(|fact| fact.shape.checked_len().is_none_or(|n| n > 2_000)) {
                return Ok(true);
            }
            for lowered in [false, true] {
                let found = outputs(&mut Machine::default(), &mutant, lowered)?;
                let found: Vec<_> = found.into_iter().map(|(fact, _)| fact).collect();
                if found != inferred {
                    return Err(format!("inferred {inferred:?}, found {found:?}"));
                }
            }
            Ok(true)
        });
        match outcome {
            Ok(Ok(true)) => accepted += 1,
            Ok(Ok(false)) => refused += 1,
            Ok(Err(error)) => failures.push(format!("{mutant:?}: {error}")),
            Err(_) => failures.push(format!("{mutant:?} panics")),
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    assert!(accepted > 1000 && refused > 1000, "{accepted} accepted, {refused} refused");
}
