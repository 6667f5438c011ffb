//! Library calls: each computes the same as its kernel, and takes over no more of it than the library can.

use crate::kernels::{cases, elements, indices};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::call::{Activation, Attention, Call, Conv, Image, MatMul, Matrix, Vector};
use plimsoll::internals::kernel::meaning::evaluate;
use plimsoll::internals::kernel::{Fold, Guard, Kernel, Operand, Template, Window, schedule};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::Target;

/// The buffers of a launch: reads, then writes.
type Buffers = Vec<Vec<f64>>;

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
    }
}

fn vector(v: &Option<Vector>, i: u64, buffers: &Buffers) -> f64 {
    v.as_ref().map_or(0.0, |v| buffers[v.slot][(v.offset + i) as usize])
}

fn product(p: &MatMul, buffers: &mut Buffers) {
    let at = |x: &Matrix, batch: u64, row: u64, column: u64| {
        let (row, column) = if x.transposed { (column, row) } else { (row, column) };
        (x.offset + batch * x.stride + row + column * x.leading) as usize
    };
    for batch in 0..p.batch {
        for i in 0..p.m {
            for j in 0..p.n {
                let product = |l| buffers[p.a.slot][at(&p.a, batch, i, l)] * buffers[p.b.slot][at(&p.b, batch, l, j)];
                let c = p.c.as_ref().map_or(0.0, |c| buffers[c.slot][at(c, batch, i, j)]);
                let sum = p.alpha * (0..p.k).map(product).sum::<f64>() + c + vector(&p.bias, i, buffers);
                buffers[p.d.slot][at(&p.d, batch, i, j)] = activate(p.activation, sum);
            }
        }
    }
}

fn convolution(c: &Conv, buffers: &mut Buffers) {
    let shape = |x: &Image| x.dims.iter().map(|&d| d as usize).collect::<Vec<_>>();
    let at = |x: &Image, index: &[usize]| {
        (x.offset + index.iter().zip(&x.strides).map(|(&i, &s)| i as u64 * s).sum::<u64>()) as usize
    };
    let (outputs, inputs) = (c.y.dims[1] / c.groups, c.w.dims[1]);
    for index in indices(&shape(&c.y)) {
        let group = index[1] as u64 / outputs;
        let mut sum = 0.0;
        for tap in indices(&shape(&c.w)[1..]) {
            let mut from = vec![index[0], (group * inputs) as usize + tap[0]];
            for a in 0..c.pads.len() {
                let place = index[2 + a] as u64 * c.strides[a] + tap[1 + a] as u64 * c.dilations[a];
                from.extend(place.checked_sub(c.pads[a]).map(|p| p as usize));
            }
            if from.len() == index.len() && from.iter().zip(shape(&c.x)).all(|(&i, d)| i < d) {
                let weight = [&index[1..2], &tap[..]].concat();
                sum += buffers[c.x.slot][at(&c.x, &from)] * buffers[c.w.slot][at(&c.w, &weight)];
            }
        }
        sum += c.residual.as_ref().map_or(0.0, |r| buffers[r.slot][at(r, &index)]);
        sum += vector(&c.bias, index[1] as u64, buffers);
        buffers[c.y.slot][at(&c.y, &index)] = activate(c.activation, sum);
    }
}

fn attention(a: &Attention, buffers: &mut Buffers) {
    let at = |x: &Image, index: [u64; 4]| {
        (x.offset + index.iter().zip(&x.strides).map(|(i, s)| i * s).sum::<u64>()) as usize
    };
    let [batch, heads, rows, columns] = a.q.dims[..] else { panic!("{:?}", a.q) };
    let (keys, shared) = (a.k.dims[2], heads / a.k.dims[1]);
    for (b, h, m) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |m| (b, h, m)))) {
        let own = h / shared;
        let seen = if a.causal { keys.min(m + 1) } else { keys };
        let score = |n: u64| {
            let factor =
                |c: u64| buffers[a.q.slot][at(&a.q, [b, h, m, c])] * buffers[a.k.slot][at(&a.k, [b, own, n, c])];
            f64::from(a.scale) * (0..columns).map(factor).sum::<f64>()
        };
        let powers: Vec<f64> = (0..seen).map(|n| score(n).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for e in 0..a.o.dims[3] {
            let value = |n: u64| powers[n as usize] * buffers[a.v.slot][at(&a.v, [b, own, n, e])];
            buffers[a.o.slot][at(&a.o, [b, h, m, e])] = (0..seen).map(value).sum::<f64>() / sum;
        }
    }
}

/// The library call by which a kernel is computed, unless a text is faster.
fn called(kernel: &Kernel, target: &Target) -> Option<Call> {
    schedule::choose(kernel, target, &|_| true).expect("there is an algorithm").call().cloned()
}

/// The values of a kernel's write at every index, after its call and the map behind it.
fn split(kernel: &Kernel, target: &Target, reads: &[Vec<f64>]) -> Option<(Vec<f64>, Call, bool)> {
    let split = schedule::split(kernel, target)?;
    let (first, slots) = &split.call;
    // Small ones are rendered.
    let call = first.schedule.call().cloned()?;
    assert_eq!(called(first, target).as_ref(), Some(&call), "a call is the same wherever it is derived");
    assert_eq!(first.workspace, call.workspace());
    let mut buffers: Buffers = slots.iter().map(|&s| reads[s].clone()).collect();
    let write = &first.writes[0].access;
    buffers.push(vec![f64::NAN; elements(write)]);
    match &call {
        Call::MatMul(p) => product(p, &mut buffers),
        Call::Conv(c) => convolution(c, &mut buffers),
        Call::Attention(a) => attention(a, &mut buffers),
    }
    let result = buffers.pop().expect("the result");
    let values = match &split.rest {
        None => indices(&write.shape).iter().map(|i| result[write.at(i) as usize]).collect(),
        Some((map, slots)) => {
            let buffers: Buffers = [result].into_iter().chain(slots.iter().map(|&s| reads[s].clone())).collect();
            evaluate(map, &buffers).swap_remove(0)
        }
    };
    Some((values, call, split.rest.is_some()))
}

fn x(i: usize) -> Expr {
    Expr::input(i, DType::F32)
}

/// Bodies over the core value, a vector, a tensor of the result's shape and a second one, and whether a map stays behind.
fn bodies() -> Vec<(&'static str, Expr, bool)> {
    let relu = |e: Expr| e.max(&e.like(0.0));
    let sum = x(0) + x(1);
    vec![
        ("identity", x(0), false),
        ("bias", sum.clone(), false),
        ("bias, relu", relu(sum.clone()), false),
        ("residual", x(2) + x(0), false),
        ("bias, residual, relu", relu(x(0) + x(1) + x(2)), false),
        ("two tensors", x(0) + x(2) + x(3), true),
        ("bias, relu, gate", relu(sum.clone()) * x(2), true),
        ("gate twice", (x(0) * x(2)) * x(0), true),
        ("erf", &sum * (&sum * std::f64::consts::FRAC_1_SQRT_2).erf(), true),
        ("index", x(0) + Expr::index(1).cast(DType::F32), true),
    ]
}

/// Every product and convolution of the cases, with every body.
#[test]
fn calls_compute_what_the_kernel_does() {
    // One multiprocessor is busy with few tiles, which others render.
    let target = Target { multiprocessors: 1, ..Target::cuda() };
    let mut counts = [0; 3];
    for case in cases() {
        let bias_axis = match case.kernel.template {
            Template::MatMul => case.kernel.shape.len() - 1,
            Template::Conv { .. } => 1,
            _ => continue,
        };
        let shape = &case.kernel.shape;
        let dense = Access::contiguous(shape.clone());
        let mut bias = dense.clone();
        bias.strides = (0..shape.len()).map(|k| isize::from(k == bias_axis && shape[k] > 1)).collect();
        let mut whole = dense.clone();
        whole.strides.iter_mut().zip(shape.iter()).filter(|(_, d)| **d == 1).for_each(|(s, _)| *s = 0);
        let operand = |access: &Access| Operand { dtype: DType::F32, access: access.clone(), packed: false };
        let values = |access: &Access, seed: usize| -> Vec<f64> {
            (0..elements(access)).map(|i| ((i * 7 + seed * 3) % 11) as f64 * 0.25 - 1.0).collect()
        };
        let further = [&bias, &whole, &whole];
        for (name, body, rest) in bodies() {
            let mut kernel = case.kernel.clone();
            kernel.reads.truncate(2);
            kernel.reads.extend(further.map(operand));
            kernel.writes = vec![operand(&whole)];
            kernel.body = Body::new(&[body]);
            let mut reads = case.inputs[..2].to_vec();
            reads.extend(further.iter().enumerate().map(|(i, a)| values(a, i)));
            let Some((found, call, mapped)) = split(&kernel, &target, &reads) else {
                counts[0] += 1;
                continue;
            };
            counts[if matches!(call, Call::MatMul(_)) { 1 } else { 2 }] += 1;
            let name = format!("{}, {name}", case.name);
            let is_product = matches!(call, Call::MatMul(_));
            // cuDNN adds a tensor only beside a bias.
            let rest = rest || !is_product && name.ends_with(", residual");
            let alike = is_product || name.contains("residual");
            assert!(mapped == rest || !alike || bias.strides == whole.strides, "{name}: {call:?}");
            let expected = evaluate(&kernel, &reads).swap_remove(0);
            let peak = expected.iter().fold(1e-30f64, |p, v| p.max(v.abs()));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!((found - expected).abs() <= 1e-9 * peak, "{name}: {i}: expected {expected}, found {found}");
            }
        }
    }
    assert!(counts[1..].iter().all(|&count| count > 60), "{counts:?}");
}

fn product_of(dtype: DType, body: Expr) -> Kernel {
    let operand = |shape: &[usize]| Operand { dtype, access: Access::contiguous(Shape::new(shape)), packed: false };
    Kernel {
        template: Template::MatMul,
        shape: Shape::new([8, 16]),
        reads: vec![operand(&[8, 32]), operand(&[32, 16]), operand(&[8, 16])],
        writes: vec![operand(&[8, 16])],
        body: Body::new(&[body]),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    }
}

fn gelu(x: &Expr, tanh: bool) -> Expr {
    match tanh {
        true => x * 0.5 * (((x + x * x * x * 0.044715) * 0.7978845608028654).tanh() + 1.0),
        false => x * 0.5 * ((x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0),
    }
}

#[test]
fn an_activation_is_known_by_its_values() {
    let target = Target::cuda();
    let activation = |kernel: &Kernel| match called(kernel, &target) {
        Some(Call::MatMul(p)) => Some(p.activation),
        _ => None,
    };
    let half = |tanh| gelu(&Expr::input(0, DType::F16), tanh);
    assert_eq!(activation(&product_of(DType::F16, half(true))), Some(Activation::GeluTanh));
    assert_eq!(activation(&product_of(DType::F16, half(false))), None, "the exact GELU is another function");
    // As exporters write it, with factors that are as exact as the file's type.
    for (dtype, outer, cube) in [(DType::BF16, 0.796875, 0.044677734375), (DType::F16, 0.7978515625, 0.044708251953125)]
    {
        let x = &Expr::input(0, dtype);
        let cubed = ((x.pow(&x.like(3.0)) * cube + x) * outer).tanh();
        let factored = (x * outer * (x * x * cube + 1.0)).tanh();
        for tanh in [cubed, factored] {
            assert_eq!(activation(&product_of(dtype, (tanh + 1.0) * x * 0.5)), Some(Activation::GeluTanh), "{dtype}");
        }
        assert_eq!(activation(&product_of(dtype, gelu(x, false))), None, "{dtype}");
        let other = ((x * x * x * 0.05 + x) * outer).tanh();
        assert_eq!(activation(&product_of(dtype, (other + 1.0) * x * 0.5)), None, "{dtype}: other factors");
    }
    let narrow = ((x(0) * x(0) * x(0) * 0.044677734375 + x(0)) * 0.796875).tanh();
    let narrow = product_of(DType::F32, (narrow + 1.0) * x(0) * 0.5);
    assert_eq!(activation(&narrow), None, "f32 has its factors in f32");
    assert_eq!(activation(&product_of(DType::F32, gelu(&x(0), true))), None, "the library's is too inexact for f32");
    let zero = x(0).like(0.0);
    assert_eq!(activation(&product_of(DType::F32, zero.lt(&x(0)).select(&x(0), &zero))), Some(Activation::Relu));
    assert_eq!(activation(&product_of(DType::F32, x(0).max(&x(0).like(1e-3)))), None);
    // A function that differs by a factor or a slight slope is another function.
    let above = |c: f64| x(0).like(c).lt(&x(0));
    for body in [
        above(0.1).select(&x(0), &zero),
        x(0).min(&x(0).like(2e4)).max(&zero),
        zero.lt(&x(0)).select(&x(0), &(x(0) * 5e-7)),
    ] {
        assert_eq!(activation(&product_of(DType::F32, body.clone())), None, "{body:?}");
    }
}

#[test]
fn only_what_is_added_may_be_overwritten() {
    let target = Target::cuda();
    let in_place = |body| called(&product_of(DType::F32, body), &target).expect("a call").in_place();
    assert_eq!(in_place(x(0) + x(1)), Some(2));
    assert_eq!(in_place(x(0)), None);
    // The residual is read by the call alone.
    let kernel = product_of(DType::F32, (x(0) + x(1)) * x(1));
    let split = schedule::split(&kernel, &target).expect("a call");
    let (map, slots) = split.rest.expect("a map");
    assert_eq!((slots, map.reads.len()), (vec![2], 2));
}

/// A product of matrices of these extents.
fn product_sized(dtype: DType, [m, k, n]: [usize; 3]) -> Kernel {
    let operand = |shape: [usize; 2]| Operand { dtype, access: Access::contiguous(Shape::new(shape)), packed: false };
    let reads = vec![operand([m, k]), operand([k, n])];
    let body = Body::new(&[Expr::input(0, dtype)]);
    Kernel { shape: Shape::new([m, n]), reads, writes: vec![operand([m, n])], body, ..product_of(dtype, x(0)) }
}

#[test]
fn few_tiles_of_f32_are_rendered() {
    let target = Target::cuda();
    let rendered = |target: &Target, dtype, extents| called(&product_sized(dtype, extents), target).is_none();
    assert!(rendered(&target, DType::F32, [128, 768, 3072]));
    assert!(!rendered(&target, DType::F32, [4096, 768, 768]), "there are tiles for every multiprocessor");
    assert!(!rendered(&target, DType::F32, [128, 767, 768]), "rows start at odd addresses");
    assert!(!rendered(&target, DType::BF16, [128, 768, 768]), "tensor cores");
    assert!(!rendered(&Target { allow_tf32: true, ..target.clone() }, DType::F32, [128, 768, 768]), "tensor cores");
    assert!(!rendered(&Target { compute: 75, ..target }, DType::F32, [128, 768, 768]), "nothing is sent ahead there");
}

#[test]
fn many_small_products_whose_rows_start_anywhere_are_rendered() {
    let target = Target::cuda();
    let rendered = |target: &Target, dtype, batch: usize, [m, k, n]: [usize; 3]| {
        let mut kernel = product_sized(dtype, [m, k, n]);
        let of = |extents: [usize; 2]| Access::contiguous(Shape::new([batch, extents[0], extents[1]]));
        kernel.shape = Shape::new([batch, m, n]);
        [kernel.reads[0].access, kernel.reads[1].access] = [of([m, k]), of([k, n])];
        kernel.writes[0].access = of([m, n]);
        called(&kernel, target).is_none()
    };
    assert!(rendered(&target, DType::F32, 384, [197, 197, 64]) && rendered(&target, DType::F32, 384, [197, 64, 197]));
    assert!(!rendered(&target, DType::F32, 384, [196, 196, 64]), "rows lie 16 bytes at a time");
    assert!(!rendered(&target, DType::F32, 384, [197, 768, 768]), "no axis is short");
    assert!(!rendered(&target, DType::F32, 32, [197, 197, 64]), "few products");
    assert!(!rendered(&target, DType::F64, 384, [197, 197, 64]), "the figures are those of f32");
    assert!(!rendered(&Target { allow_tf32: true, ..target.clone() }, DType::F32, 384, [197, 197, 64]), "tensor cores");
}

#[test]
fn products_of_halves_whose_rows_start_anywhere_are_rendered() {
    let rendered = |target: &Target, [m, k, n]: [usize; 3], turned: [bool; 2]| {
        let mut kernel = product_sized(DType::BF16, [m, k, n]);
        let dense = |rows: usize, columns: usize| Access::contiguous(Shape::new([rows, columns])).permute(&[1, 0]);
        if turned[0] {
            kernel.reads[1].access = dense(n, k);
        }
        if turned[1] {
            kernel.writes[0].access = dense(n, m);
        }
        called(&kernel, target).is_none()
    };
    let (target, along_k) = (Target::cuda(), [true, false]);
    assert!(rendered(&target, [64, 768, 257], along_k), "at odd elements");
    assert!(rendered(&target, [2048, 768, 30522], along_k), "at even ones, by warpgroups");
    assert!(!rendered(&target, [2048, 768, 30528], along_k), "at multiples of 16 bytes");
    assert!(!rendered(&target, [512, 768, 3074], along_k), "too few tiles");
    assert!(!rendered(&target, [71680, 768, 30522], along_k), "more elements than 32 bits count");
    assert!(!rendered(&target, [2048, 768, 30522], [false; 2]), "columns that do not lie 16 bytes at a time");
    assert!(!rendered(&target, [2056, 768, 30522], [true; 2]), "a result by columns");
    assert!(!rendered(&target, [2048, 8, 30521], along_k), "an inner axis too short for tensor cores");
    let [unknown, older] = [Target { multiprocessors: 0, ..target.clone() }, Target { compute: 80, ..target.clone() }];
    assert!(!rendered(&unknown, [2048, 768, 30522], along_k), "a device of unknown size");
    assert!(!rendered(&older, [2048, 768, 30522], along_k), "no warpgroups");
    // 256 tiles of a batch, of which a rendered product makes 130: rows of 65 of its matrices.
    let mut kernel = product_sized(DType::BF16, [65, 768, 258]);
    let right = Access::contiguous(Shape::new([258, 768])).permute(&[1, 0]);
    kernel.shape = Shape::new([128, 65, 258]);
    kernel.reads[0].access = Access::contiguous(Shape::new([65, 128, 768])).permute(&[1, 0, 2]);
    kernel.reads[1].access = right.broadcast(&Shape::new([128, 768, 258]));
    kernel.writes[0].access = Access::contiguous(kernel.shape.clone());
    assert!(called(&kernel, &target).is_some(), "too few tiles as they are rendered");
}

#[test]
fn patches_of_images_are_rendered() {
    let image = |shape: [usize; 5], last: bool| {
        let access = Access::contiguous(Shape::new(shape));
        let [n, c, d, h, w] = shape;
        let turned = || Access::contiguous(Shape::new([n, d, h, w, c])).permute(&[0, 4, 1, 2, 3]);
        Operand { dtype: DType::F16, access: if last { turned() } else { access }, packed: false }
    };
    let called_for = |outputs: usize, channels: usize, size: usize, stride: usize, last: bool| {
        let positions = (224 - size) / stride + 1;
        let shape = [8, outputs, 1, positions, positions];
        let steps = |n: usize| [1, n, n];
        let (strides, dilations, pads) = (steps(stride), [1; 3], [0; 3]);
        let kernel = Kernel {
            template: Template::Conv {
                groups: 1,
                window: Window { kernel: steps(size), strides, dilations, pads },
                padding: 0,
            },
            reads: vec![image([8, channels, 1, 224, 224], last), image([outputs, channels, 1, size, size], last)],
            writes: vec![image(shape, last)],
            shape: Shape::new(shape),
            body: Body::new(&[Expr::input(0, DType::F16)]),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        called(&kernel, &Target::cuda()).is_some()
    };
    let called = |channels, size, stride, last| called_for(768, channels, size, stride, last);
    assert!([true, false].iter().all(|&last| !called(3, 16, 16, last)), "windows of 16 halves");
    assert!(called_for(16, 3, 16, 16, false), "too few outputs for tensor cores");
    assert!([true, false].iter().all(|&last| called(3, 7, 2, last)), "windows that lie anywhere");
    assert!(called(64, 16, 16, true), "what cuDNN has on tensor cores");
}

#[test]
fn convolutions_of_few_channels_per_group_are_rendered() {
    let has_call = |name: &str, dtype: DType| {
        let mut kernel = cases().into_iter().find(|c| c.name == name).expect("it is one of the cases").kernel;
        kernel.reads.truncate(2);
        kernel.body = Body::new(&[Expr::input(0, dtype)]);
        kernel.reads.iter_mut().chain(&mut kernel.writes).for_each(|operand| operand.dtype = dtype);
        called(&kernel, &Target::cuda()).is_some()
    };
    for name in ["conv strips 7x7", "conv strips of four each", "conv strips of small groups", "conv strips 3-D"] {
        assert!([DType::F32, DType::F16, DType::BF16].iter().all(|&dtype| !has_call(name, dtype)), "{name}");
    }
    assert!(has_call("conv 1x1", DType::BF16));
    assert!(!has_call("conv grouped", DType::BF16), "tiles of tensor cores are zeros around a few channels");
}

/// The gradient of a convolution by its data, whose strides are more than one, is cuDNN's where channels lie as tensor cores take them.
#[test]
fn gradients_by_data_are_calls() {
    let strides = [([2, 2], [9, 8], [5, 4]), ([1, 2], [6, 10], [6, 5])];
    for ([down, right], [height, width], [rows, columns]) in strides {
        let kernel = |outputs: usize, dtype: DType, last: bool| {
            let image = |shape: [usize; 5]| {
                let shape = Shape::new(shape);
                let access = if last { Access::channels_last(shape) } else { Access::contiguous(shape) };
                Operand { dtype, access, packed: false }
            };
            let window = Window { kernel: [1, 3, 3], strides: [1, down, right], dilations: [1; 3], pads: [0, 1, 1] };
            Kernel {
                template: Template::ConvTranspose { groups: 1, window },
                reads: vec![image([2, outputs, 1, rows, columns]), image([outputs, 16, 1, 3, 3])],
                writes: vec![image([2, 16, 1, height, width])],
                shape: Shape::new([2, 16, 1, height, width]),
                body: Body::new(&[Expr::input(0, dtype)]),
                prologues: Vec::new(),
                workspace: 0,
                schedule: Schedule::Open,
            }
        };
        let own = kernel(8, DType::BF16, true);
        let Some(Call::Conv(call)) = called(&own, &Target::cuda()) else { panic!("{down} by {right}: no call") };
        assert!(call.backward && call.x.slot == own.reads.len());
        for other in [kernel(8, DType::BF16, false), kernel(8, DType::F32, true), kernel(5, DType::BF16, true)] {
            assert_eq!(called(&other, &Target::cuda()), None, "{:?}", other.reads);
        }
        let values = |operand: &Operand, seed: usize| -> Vec<f64> {
            (0..elements(&operand.access)).map(|i| ((i * 7 + seed * 3) % 11) as f64 * 0.25 - 1.0).collect()
        };
        let reads: Vec<_> = own.reads.iter().enumerate().map(|(seed, operand)| values(operand, seed)).collect();
        let mut found = vec![0.0; elements(&own.writes[0].access)];
        let size = |x: &Image| x.dims.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let at = |x: &Image, index: &[usize]| {
            (x.offset + index.iter().zip(&x.strides).map(|(&i, &s)| i as u64 * s).sum::<u64>()) as usize
        };
        for index in indices(&size(&call.y)) {
            for tap in indices(&size(&call.w)[1..]) {
                let mut to = vec![index[0], tap[0]];
                for a in 0..call.pads.len() {
                    let place = index[2 + a] as u64 * call.strides[a] + tap[1 + a] as u64 * call.dilations[a];
                    to.extend(place.checked_sub(call.pads[a]).map(|p| p as usize));
                }
                if to.len() == index.len() && to.iter().zip(size(&call.x)).all(|(&i, d)| i < d) {
                    let weight = [&index[1..2], &tap[..]].concat();
                    let [y, w] = [&call.y, &call.w].map(|operand| &reads[operand.slot]);
                    found[at(&call.x, &to)] += y[at(&call.y, &index)] * w[at(&call.w, &weight)];
                }
            }
        }
        let expected = evaluate(&own, &reads).swap_remove(0);
        let access = &own.writes[0].access;
        for (index, expected) in indices(&access.shape).iter().zip(expected) {
            let found = found[access.at(index) as usize];
            assert!((found - expected).abs() < 1e-9, "{down} by {right}, {index:?}: {found}, expected {expected}");
        }
    }
}

/// An attention of so many queries and keys: `heads` of keys, each of so many of queries. Operands lie token by token.
pub(crate) fn attention_of([heads, shared, m, n]: [usize; 4], [d, e]: [usize; 2], score: Expr, dtype: DType) -> Kernel {
    let (batch, all) = (2, heads * shared);
    let token = |shape: [usize; 5], heads: usize, turned: bool| {
        let columns = if turned { shape[3] } else { shape[4] };
        let (rows, row) = (if turned { shape[4] } else { shape[3] }, (heads * columns) as isize);
        let [by_head, by_shared] =
            if heads == all { [(shared * columns) as isize, columns as isize] } else { [columns as isize, 0] };
        let last = if turned { [1, row] } else { [row, 1] };
        let access = Access {
            shape: Shape::new(shape),
            strides: vec![rows as isize * row, by_head, by_shared, last[0], last[1]],
            offset: 0,
        };
        Operand { dtype, access, packed: false }
    };
    Kernel {
        template: Template::Attention { score: Body::new(&[score]), further: 0, guarded: None, fold: Fold::Softmax },
        reads: vec![
            token([batch, heads, shared, m, d], all, false),
            token([batch, heads, shared, d, n], heads, true),
            token([batch, heads, shared, n, e], heads, false),
        ],
        writes: vec![token([batch, heads, shared, m, e], all, false)],
        shape: Shape::new([batch, heads, shared, m, e]),
        body: Body::new(&[Expr::input(0, dtype)]),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    }
}

#[test]
fn attention_is_a_call() {
    let half = DType::BF16;
    let core = Expr::input(0, half);
    let (query, key, low) = (Expr::index(3), Expr::index(4), Expr::lit(f64::NEG_INFINITY, half));
    let sees = key.le(&query);
    let of = |score: Expr| attention_of([3, 2, 200, 196], [16, 24], score, half);
    let scores = [
        ("plain", core.clone(), 1.0, false),
        ("scaled", &core * 0.25, 0.25, false),
        ("divided, in f32", (core.cast(DType::F32) / 8.0).cast(half), 0.125, false),
        ("causal", sees.select(&(&core * 0.25), &low), 0.25, true),
        ("causal by a sum", &core * 0.25 + sees.select(&Expr::lit(0.0, half), &low), 0.25, true),
    ];
    for (name, score, scale, causal) in scores {
        let kernel = of(score);
        let Some(Call::Attention(call)) = called(&kernel, &Target::cuda()) else { panic!("{name}: no call") };
        assert!(
            (f64::from(call.scale), call.causal) == (scale, causal) && call.q.dims[1] == 6 && call.k.dims[1] == 3,
            "{name}"
        );
        let values = |operand: &Operand, seed: usize| -> Vec<f64> {
            (0..elements(&operand.access)).map(|i| ((i * 7 + seed * 3) % 11) as f64 * 0.125 - 0.5).collect()
        };
        let reads: Vec<_> = kernel.reads.iter().enumerate().map(|(seed, operand)| values(operand, seed)).collect();
        let (found, ..) = split(&kernel, &Target::cuda(), &reads).expect("it is a call");
        for (found, expected) in found.iter().zip(&evaluate(&kernel, &reads)[0]) {
            assert!((found - expected).abs() < 1e-9, "{name}: {found}, expected {expected}");
        }
    }
    // Heads alone, and heads of a batch.
    for axes in [1, 2] {
        let mut kernel = attention_of([1, 1, 192, 192], [16, 16], core.clone(), half);
        let cut = |access: &mut Access| {
            access.shape = Shape::new(&access.shape[3 - axes..]);
            access.strides.drain(..3 - axes);
        };
        kernel.reads.iter_mut().chain(&mut kernel.writes).for_each(|operand| cut(&mut operand.access));
        kernel.shape = kernel.writes[0].access.shape.clone();
        assert!(matches!(called(&kernel, &Target::cuda()), Some(Call::Attention(_))), "{axes} axes");
    }
    let refused = |name: &str, kernel: Kernel| assert_eq!(called(&kernel, &Target::cuda()), None, "{name}");
    let changed = |change: &dyn Fn(&mut Kernel)| {
        let mut kernel = of(core.clone());
        change(&mut kernel);
        kernel
    };
    refused("capped", of(core.tanh()));
    refused("negative", of(&core * -0.5));
    refused("masked before it is scaled", of(sees.select(&core, &low) * 0.5));
    refused("a window", of((&query - 3.0).le(&key).and(&sees).select(&core, &low)));
    refused("hidden by a finite number", of(sees.select(&core, &Expr::lit(-1e9, half))));
    refused("another condition", of(key.eq(&query).select(&core, &low)));
    refused("f32", attention_of([3, 2, 200, 196], [16, 24], x(0), DType::F32));
    refused("columns", attention_of([3, 2, 200, 196], [12, 24], core.clone(), half));
    refused("wide columns", attention_of([3, 2, 200, 196], [136, 24], core.clone(), half));
    refused("few queries", attention_of([3, 2, 128, 196], [16, 24], core.clone(), half));
    refused("few keys", attention_of([3, 2, 200, 128], [16, 24], core.clone(), half));
    refused("an offset", changed(&|kernel| kernel.reads[0].access.offset = 4));
    refused("rows that start anywhere", changed(&|kernel| kernel.reads[2].access.strides[3] += 1));
    refused("values read by columns", changed(&|kernel| kernel.reads[2].access.strides.swap(3, 4)));
    refused("a batch that stands still", changed(&|kernel| kernel.reads[1].access.strides[0] = 0));
    refused("a factor beyond f32", of(&core.cast(DType::F32) * 1e30 * 1e30));
    refused("a factor in parts beyond f32", of(&core.cast(DType::F32) * 1e38 * 1e-38 * 1e38));
    let later = Target { compute: 100, ..Target::cuda() };
    assert_eq!(called(&of(core.clone()), &later), None, "another architecture");
    for guard in [Guard::Unseen, Guard::All] {
        let guarded = |kernel: &mut Kernel| {
            let Template::Attention { guarded, .. } = &mut kernel.template else { unreachable!("it is one") };
            *guarded = Some(guard);
        };
        refused(&format!("guarded: {guard:?}"), changed(&guarded));
    }
}

#[test]
fn a_target_without_the_library_renders() {
    let target = Target { libraries: Default::default(), ..Target::cuda() };
    assert!(schedule::split(&product_of(DType::F32, x(0)), &target).is_none());
    assert!(schedule::split(&product_of(DType::F32, x(0)), &Target::cpu(2)).is_none());
}
