//! The cases in more forms: in halves, as larger products, with channels last, guarded.

use super::{Case, bytes_with_channels_last, cases, elements, folds, infinite, many_patches, unordered};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::schedule::conv::is_direct;
use plimsoll::internals::kernel::{Fold, Guard, Kernel, Operand, Template};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::tensor::Tensor;

/// The cases and their forms, in `f32`.
pub fn plain() -> Vec<Case> {
    let of_bytes = bytes_with_channels_last();
    [cases(), products(), many_patches(), unordered(), infinite(), channels_last(), guarded(), of_bytes].concat()
}

/// Those with halves for `f32`. Long sums of halves are right, too, but their smallest digits are not what an element's type keeps.
pub fn halves(plain: &[Case]) -> Vec<Case> {
    let exact = plain.iter().filter(|c| !c.name.contains("rem") && !c.name.contains("resize"));
    let in_type = |dtype| {
        exact.clone().map(move |c| halved(c, dtype)).chain(products().into_iter().map(move |c| summed(&c, dtype)))
    };
    in_type(DType::F16).chain(in_type(DType::BF16)).collect()
}

/// The case with halves where it has `f32`.
pub fn halved(case: &Case, dtype: DType) -> Case {
    let mut kernel = case.kernel.clone();
    for operand in kernel.reads.iter_mut().chain(&mut kernel.writes).filter(|o| o.dtype == DType::F32) {
        operand.dtype = dtype;
    }
    let round =
        |(values, operand): (&Vec<f64>, &Operand)| Tensor::from_f64(operand.dtype, [values.len()], values).to_f64();
    let inputs = case.inputs.iter().zip(&kernel.reads).map(round).collect();
    let fits = |&(w, r): &(usize, usize)| kernel.writes[w].dtype.size() == kernel.reads[r].dtype.size();
    let in_place = case.in_place.filter(fits);
    Case { name: format!("{} in {dtype}", case.name), kernel, inputs, in_place }
}

/// The case with halves as the operands of its core; what is added to it and stored is as it was.
fn summed(case: &Case, dtype: DType) -> Case {
    let core = case.kernel.template.core_reads();
    let mut summed = halved(case, dtype);
    summed.kernel.reads[core..].clone_from_slice(&case.kernel.reads[core..]);
    summed.kernel.writes.clone_from(&case.kernel.writes);
    summed.inputs[core..].clone_from_slice(&case.inputs[core..]);
    summed.name += ", summed";
    summed
}

/// [Scores that are no softmax](folds), of matrices of halves. What rows and keys add is as it was.
pub fn folded() -> Vec<Case> {
    let of = |case: &Case, dtype: DType| {
        let Template::Attention { fold, .. } = case.kernel.template else { unreachable!("{}", case.name) };
        let mut made = halved(case, dtype);
        let matrices = fold.operands();
        made.kernel.reads[matrices..].clone_from_slice(&case.kernel.reads[matrices..]);
        made.inputs[matrices..].clone_from_slice(&case.inputs[matrices..]);
        if fold == Fold::LogSum {
            made.kernel.writes.clone_from(&case.kernel.writes);
        }
        made
    };
    let plain = folds();
    [DType::F16, DType::BF16].into_iter().flat_map(|dtype| plain.iter().map(move |case| of(case, dtype))).collect()
}

/// Products that are large enough for every tile.
pub fn products() -> Vec<Case> {
    let dense = |shape: &[usize]| Access::contiguous(Shape::new(shape));
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        f64::from(((state >> 40) as f64 / (1u64 << 23) as f64 - 1.0) as f32)
    };
    let mut list = Vec::new();
    for (batch, [m, k, n], flips) in [
        (1, [70, 72, 88], [false, false]),
        (2, [70, 72, 88], [false, true]),
        (1, [50, 40, 33], [true, false]),
        (1, [33, 37, 41], [false, true]),
        (1, [1, 96, 136], [false, false]),
        (2, [3, 72, 41], [false, true]),
        (1, [70, 64, 2], [false, false]),
        (1, [72, 64, 3], [true, true]),
        (24, [130, 19, 136], [false, false]),
        (24, [130, 24, 131], [false, true]),
        (24, [129, 33, 136], [true, true]),
        (33, [130, 72, 258], [false, true]),
        (132, [65, 264, 17], [false, true]),
        (2, [132, 20, 136], [false, false]),
        (1, [132, 36, 140], [true, false]),
    ] {
        let matrix = |flip: bool, rows: usize, columns: usize| match flip {
            true => dense(&[batch, columns, rows]).permute(&[0, 2, 1]),
            false => dense(&[batch, rows, columns]),
        };
        let operand = |access| Operand { dtype: DType::F32, access, packed: false };
        let bias = dense(&[n]).broadcast(&Shape::new([batch, m, n]));
        let reads: Vec<_> = [matrix(flips[0], m, k), matrix(flips[1], k, n), bias].into_iter().map(operand).collect();
        let inputs = reads.iter().map(|r| (0..elements(&r.access)).map(|_| random()).collect()).collect();
        let x = |i| Expr::input(i, DType::F32);
        let kernel = Kernel {
            template: Template::MatMul,
            shape: Shape::new([batch, m, n]),
            reads,
            writes: vec![operand(dense(&[batch, m, n]))],
            prologues: Vec::new(),
            body: Body::new(&[x(0) * 0.5 + x(1)]),
            workspace: 0,
            schedule: Schedule::Open,
        };
        list.push(Case { name: format!("product {batch}x{m}x{k}x{n} {flips:?}"), kernel, inputs, in_place: None });
    }
    list
}

/// Convolutions and windows over images whose channels come last; where strips of results share what they read, the outputs of weights, too.
fn channels_last() -> Vec<Case> {
    let mut list = cases();
    let windowed = |t: &Template| {
        use Template::{Conv, ConvFilters, ConvTranspose, Pool};
        matches!(t, Conv { .. } | ConvTranspose { .. } | ConvFilters { .. } | Pool { .. })
    };
    list.retain(|c| windowed(&c.kernel.template));
    let direct = |case: &Case| match (&case.kernel.template, &case.kernel.reads[..]) {
        (Template::Conv { groups, .. }, [_, weights, ..]) => is_direct(&weights.access.shape, *groups),
        (Template::ConvTranspose { .. }, _) => true,
        _ => false,
    };
    let outputs = list.iter().filter(|case| direct(case)).cloned().map(|case| (case, true)).collect::<Vec<_>>();
    let mut list: Vec<_> = list.into_iter().map(|case| (case, false)).chain(outputs).collect();
    for (case, outputs_last) in &mut list {
        let Kernel { template, reads, writes, .. } = &mut case.kernel;
        let core = template.core_reads();
        // The weights of transposed convolutions stay as they are, or have their outputs last, too.
        let transposes = matches!(template, Template::ConvTranspose { .. });
        let stays = |i: usize| i == 1 && transposes && !*outputs_last;
        let turned = |i: usize, o: &Operand| (i < core || o.access.is_contiguous()) && !stays(i);
        let read = reads.iter_mut().enumerate().filter(|(i, o)| turned(*i, o)).map(|(_, o)| o);
        for operand in read.chain(writes.iter_mut().filter(|_| case.in_place.is_none())) {
            operand.access = Access::channels_last(operand.access.shape.clone());
        }
        if *outputs_last && !transposes {
            let lies = &mut reads[1].access;
            let outer: Shape = [1, 2, 3, 4, 0].map(|axis| lies.shape[axis]).into_iter().collect();
            *lies = Access::contiguous(outer).permute(&[4, 0, 1, 2, 3]);
        }
        case.name += if *outputs_last { ", outputs last" } else { "" };
        for (operand, values) in reads.iter().zip(&mut case.inputs) {
            values.resize(elements(&operand.access), 0.25);
        }
        case.name += ", channels last";
    }
    list.into_iter().map(|(case, _)| case).collect()
}

/// Guarded attention: rows of which nothing is seen, and perhaps those of which something is no number, weigh nothing. Of many rows and of
/// few, which are kernels of their own.
fn guarded() -> Vec<Case> {
    [Guard::Unseen, Guard::All].into_iter().flat_map(guarded_by).collect()
}

fn guarded_by(guard: Guard) -> [Case; 2] {
    let find = |name: &str| {
        let mut case = cases().into_iter().find(|c| c.name == name).expect("it is one of the cases");
        let Template::Attention { guarded, .. } = &mut case.kernel.template else { unreachable!("{name}") };
        *guarded = Some(guard);
        case.name += &format!(", guarded {guard:?}");
        case
    };
    let mut many = find("attention of odd extents");
    let keys = many.kernel.reads[1].access.shape[2];
    for row in [0, 5, 36] {
        many.inputs[3][row * keys..(row + 1) * keys].fill(f64::NEG_INFINITY);
    }
    many.inputs[3][keys] = f64::NAN;
    let mut few = find("attention of one row");
    let depth = few.kernel.reads[0].access.shape[2];
    few.inputs[0][depth] = f64::NAN;
    [many, few]
}
