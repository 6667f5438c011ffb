//! Texts of kernels: how simple their indices are, what they bind, and what is refused.

use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::render::{Bindings, Dialect, KERNELS, Source, render};
use plimsoll::internals::kernel::{Kernel, MOST_ELEMENTS, Operand, Template, schedule};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Family, Target};

/// A map over `shape` of reads with these strides.
fn map(shape: &[usize], strides: &[&[isize]], body: &[Expr]) -> Kernel {
    let shape = Shape::new(shape);
    let operand = |access| Operand { dtype: DType::F32, access, packed: false };
    Kernel {
        template: Template::Map,
        reads: strides
            .iter()
            .map(|s| operand(Access { shape: shape.clone(), strides: s.to_vec(), offset: 0 }))
            .collect(),
        writes: body.iter().map(|_| operand(Access::contiguous(shape.clone()))).collect(),
        shape,
        body: Body::new(body),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    }
}

/// The text of a kernel that has no schedule yet.
fn rendered(kernel: &Kernel, target: &Target, bindings: &Bindings) -> Result<Source, String> {
    let schedule = schedule::choose(kernel, target, &|_| true).map_err(|what| format!("kernel 'map': {what}"))?;
    let dialect = if target.family == Family::Cuda { Dialect::Cuda } else { Dialect::Wgsl };
    render(&Kernel { schedule, ..kernel.clone() }, target, bindings, dialect).map_err(|error| error.to_string())
}

fn text(kernel: &Kernel, bindings: &Bindings) -> String {
    rendered(kernel, &Target::wgpu(), bindings).expect("renders").text
}

#[test]
fn indices_are_as_simple_as_accesses_allow() {
    let x = |i| Expr::input(i, DType::F32);
    let dense = text(
        &map(&[2, 3, 4], &[&[12, 4, 1], &[0, 0, 0]], &[x(0) + x(1)]),
        &Bindings { of: vec![Some(0), Some(1), Some(2)], read_only: vec![true, true, false] },
    );
    assert!(dense.contains("b0[i]") && dense.contains("b1[0]") && dense.contains("b2[i] ="), "{dense}");
    assert!(!dense.contains('%') && !dense.contains("u32(i)"), "{dense}");
    // The two inner axes of the broadcast operand are walked as one.
    let kernel = map(&[2, 3, 4], &[&[0, 4, 1]], &[x(0)]);
    let rows = text(&kernel, &Bindings::distinct(&kernel));
    assert!(rows.contains("% 12u"), "{rows}");
}

#[test]
fn arguments_over_the_same_bytes_share_a_binding() {
    let kernel = map(&[8], &[&[1], &[1]], &[Expr::input(0, DType::F32) * Expr::input(1, DType::F32)]);
    let shared = Bindings { of: vec![Some(0), Some(1), Some(0)], read_only: vec![false, true] };
    let text = text(&kernel, &shared);
    assert!(text.contains("var<storage, read_write> b0") && text.contains("var<storage, read> b1"), "{text}");
    assert!(text.contains("b0[i] =") && !text.contains("b2"), "{text}");
}

#[test]
fn what_a_device_cannot_hold_is_refused() {
    let mut kernel = map(&[8], &[&[1]], &[Expr::input(0, DType::F32)]);
    kernel.reads[0].dtype = DType::F64;
    assert!(rendered(&kernel, &Target::wgpu(), &Bindings::distinct(&kernel)).is_err());
    let mut kernel = map(&[8], &[&[1]], &[Expr::input(0, DType::F32)]);
    kernel.reads[0].packed = true;
    assert!(rendered(&kernel, &Target::wgpu(), &Bindings::distinct(&kernel)).is_err());
    let not = map(&[8], &[&[1]], &[Expr::input(0, DType::F32).not()]);
    let error = rendered(&not, &Target::wgpu(), &Bindings::distinct(&not)).expect_err("no such operation");
    assert!(error.contains("map"), "{error}");
}

#[test]
fn indices_of_the_last_workgroup_are_no_less() {
    let of = |n: usize| {
        let mut kernel = map(&[n], &[&[1]], &[Expr::input(0, DType::U8)]);
        kernel.reads[0].dtype = DType::U8;
        kernel.writes[0].dtype = DType::U8;
        rendered(&kernel, &Target::cuda(), &Bindings::distinct(&kernel))
    };
    let source = of(MOST_ELEMENTS).expect("it is the most");
    let [x, y, _] = source.groups.map(u64::from);
    assert!(x * y * u64::from(source.size) <= 1 << 31, "{:?} groups of {}", source.groups, source.size);
    let error = of(MOST_ELEMENTS + 1).expect_err("one too many");
    assert!(error.contains("2147483648") || error.contains("more than 2147418111"), "{error}");
}

#[test]
fn every_template_has_a_row_and_every_row_a_doc() {
    for def in KERNELS.iter().copied().flatten() {
        assert!(!def.doc.is_empty() && def.text.starts_with("// "), "{}", def.name);
    }
    let cuda = rendered(
        &map(&[8], &[&[2]], &[Expr::input(0, DType::F32)]),
        &Target::cuda(),
        &Bindings { of: vec![Some(0), Some(0)], read_only: vec![false] },
    );
    let cuda = cuda.expect("renders").text;
    assert!(cuda.contains("const auto i = group * SIZE + thread;") && !cuda.contains("let "), "{cuda}");
}
