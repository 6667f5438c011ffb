//! Which operators take which element types, and where: found out, not written down. A small call of each row is planned for
//! each target, and its kernels are compiled or rendered.

use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::dtype::DType;
use crate::graph::Graph;
use crate::kernel::Kernel;
use crate::kernel::render::{Bindings, Dialect, render};
use crate::op::{Arity, Attr, Attrs, Fact, Input, OpDef, ValueId};
use crate::ops;
use crate::plan::{Limits, Recipe};
use crate::target::{Family, Target};
use crate::tensor::Tensor;

/// Shapes of a call's inputs; the last one goes on, as does the last of their types below.
const SHAPES: [&[&[usize]]; 28] = [
    &[&[4, 4, 4]],
    &[&[4, 4, 4], &[4]],
    &[&[4, 4]],
    &[&[4, 4, 4, 4]],
    &[&[4, 4], &[4, 1]],
    &[&[4], &[2]],
    &[&[4, 1]],
    &[&[4, 4, 4], &[4, 4, 3]],
    &[&[4, 4, 4], &[1, 4, 4]],
    &[&[4, 4, 4], &[1, 12, 4]],
    &[&[4, 4, 4], &[1, 16, 4]],
    &[&[4, 4, 4, 4], &[4, 4, 4, 2]],
    &[&[4, 4, 4, 4], &[4, 4, 2]],
    &[&[4, 4, 4], &[]],
    &[&[4, 4, 4], &[], &[], &[4, 4, 4], &[]],
    &[&[4, 4], &[4, 4], &[4]],
    &[&[4, 4], &[4, 4], &[4, 4], &[4]],
    &[&[4, 2], &[2, 1, 1], &[2, 1]],
    &[&[], &[], &[4, 4, 4], &[]],
    &[&[4, 4, 4], &[4], &[4], &[4, 4, 4]],
    &[&[4, 4, 4], &[4, 4], &[4, 2]],
    &[&[4, 4, 4], &[4, 12]],
    &[&[4, 4, 4], &[4, 12], &[12], &[]],
    &[&[4, 4, 16], &[4]],
    &[&[4, 4, 2, 3, 4]],
    &[&[4, 4, 4], &[4, 1, 2]],
    &[&[4, 2, 3]],
    &[&[2, 1, 1], &[2, 1]],
];

/// What a row does on a target.
pub struct Support {
    /// The row.
    pub op: &'static OpDef,
    /// Per target of [`targets`], the types it takes, each with the type that the device stores it in.
    pub types: Vec<Vec<(DType, DType)>>,
}

/// One target per family of kernels.
pub fn targets() -> Vec<Target> {
    ["cpu", "wgpu", "cuda"].into_iter().filter_map(Target::preset).collect()
}

/// Every row, in the table's order.
pub fn table() -> Vec<Support> {
    let targets = targets();
    let mut cpu = Cpu::new(1);
    let mut support = |op: &'static OpDef| {
        let mut types = vec![Vec::new(); targets.len()];
        for dtype in DType::ALL {
            let Some(graph) = call(op, dtype) else { continue };
            for (target, types) in targets.iter().zip(&mut types) {
                if let Ok(stored) = target.storage(dtype)
                    && runs(&graph, target, &mut cpu)
                {
                    types.push((dtype, stored));
                }
            }
        }
        Support { op, types }
    };
    ops::all().map(&mut support).collect()
}

/// A graph of one node in which the row takes elements of this type, if it does.
fn call(op: &'static OpDef, dtype: DType) -> Option<Graph> {
    let given = given(op);
    let types = mixtures(dtype);
    let types = if op.arity().0 < 2 { &types[..1] } else { &types[..] };
    for shapes in SHAPES {
        for attrs in attributes(op, dtype, shapes[0]) {
            for (types, given) in types.iter().flat_map(|types| given.iter().map(move |given| (&types[..], given))) {
                let mut graph = Graph::new(op.name);
                let mut numbers = 0..;
                let mut input = |given: &bool| {
                    let i: usize = given.then(|| numbers.next()).flatten()?;
                    let fact = Fact::new(types[i.min(types.len() - 1)], shapes[i.min(shapes.len() - 1)]);
                    Some(graph.input(format!("x{i}"), fact))
                };
                let inputs: Vec<_> = given.iter().map(&mut input).collect();
                if let Ok(node) = graph.add(op, op.name, &inputs, attrs.clone(), &[]) {
                    graph.output("y", ValueId { node, port: 0 });
                    return Some(graph);
                }
            }
        }
    }
    None
}

/// Which inputs a call has: all that it needs at least, or without those of them that may be left out; repeated ones may come in threes.
fn given(op: &OpDef) -> Vec<Vec<bool>> {
    let data: Vec<_> = op.inputs.iter().filter(|i| !i.shapes()).map(|i| i.arity).collect();
    let least = op.arity().0;
    let mut given = vec![vec![true; least], data[..least].iter().map(|&arity| arity != Arity::Optional).collect()];
    given.extend((data.last() == Some(&Arity::Variadic)).then(|| vec![true; least + 2]));
    given.dedup();
    given
}

/// Types of a call's inputs. What counts is the type of the elements that are worked on, not that of indices or conditions beside them.
fn mixtures(d: DType) -> [Vec<DType>; 14] {
    let (f, i) = (DType::F32, DType::I64);
    [
        vec![d],
        vec![d, i, i],
        vec![d, i, d],
        vec![DType::Bool, d],
        vec![i, d],
        vec![d, f],
        vec![d, f, d, f, d],
        vec![d, f, d, d, f, d, f, d],
        vec![d, d, f],
        vec![d, DType::U8, d],
        vec![DType::U8, i, d],
        vec![DType::U8, d],
        vec![f, d, d, f, d],
        vec![DType::Bool, d, f, d, d, f, d, f, d],
    ]
}

/// None, and then such as rows insist on: those that suit windows, and those that suit every axis.
fn attributes(op: &OpDef, dtype: DType, shape: &[usize]) -> [Attrs; 3] {
    let rank = shape.len();
    let number = |v: f64| Attr::shaping(&Tensor::from_f64(dtype, vec![], &[v]));
    let one = Tensor::from_f64(dtype, [1], &[1.0]);
    let some: [(&str, Attr); 37] = [
        ("K", 2.into()),
        ("N", 2.into()),
        ("X", number(1.0)),
        ("axis", 0.into()),
        ("block_size", 2.into()),
        ("block_shape", vec![1; 2].into()),
        ("blocksize", 2.into()),
        ("condition", vec![1].into()),
        ("delta", number(1.0)),
        ("depth", 2.into()),
        ("dft_length", 4.into()),
        ("ends", vec![1].into()),
        ("equation", "...->".into()),
        ("frame_step", 1.into()),
        ("groups", 2.into()),
        ("image_shape", vec![2; 2].into()),
        ("input", vec![2].into()),
        ("kernel_shape", vec![2; rank.saturating_sub(2)].into()),
        ("kv_num_heads", 1.into()),
        ("limit", number(1.0)),
        ("lower_edge_hertz", 0.0.into()),
        ("num_groups", 2.into()),
        ("num_heads", 2.into()),
        ("num_mel_bins", 1.into()),
        ("num_outputs", 2.into()),
        ("repeats", vec![1; rank].into()),
        ("sample_rate", 8.into()),
        ("scales", vec![2.0; rank].into()),
        ("shape", shape.into()),
        ("size", 2.into()),
        ("start", number(0.0)),
        ("starts", vec![0].into()),
        ("storage_order", 0.into()),
        ("to", DType::F32.onnx().into()),
        ("total_sequence_length", 4.into()),
        ("upper_edge_hertz", 4.0.into()),
        ("value", one.into()),
    ];
    let twice: Vec<i64> = shape.iter().map(|&d| 2 * d as i64).collect();
    let whole: [(&str, Attr); 4] = [
        ("axes", vec![0].into()),
        ("pads", vec![1; 2 * rank].into()),
        ("shape", twice.into()),
        ("size", vec![4, 1, 2, 2].into()),
    ];
    let shaping = |input: &Input, name: &str| input.shapes() && input.name == name;
    let known = |name: &str| op.attrs.contains(&name) || op.inputs.iter().any(|input| shaping(input, name));
    let given = |list: &[(&str, Attr)]| {
        let known = list.iter().filter(|(name, _)| known(name));
        known.fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value.clone()))
    };
    [Attrs::new(), given(&some), given(&[&some[..], &whole[..]].concat())]
}

fn runs(graph: &Graph, target: &Target, cpu: &mut Cpu) -> bool {
    let planned = Recipe::default().plan(graph.clone(), target, &Limits { memory: None });
    let mut compiles = |kernel: &Kernel| match target.family {
        Family::Cpu => cpu.compile(kernel).is_ok(),
        _ if kernel.schedule.call().is_some() => true,
        Family::Wgpu => render(kernel, target, &Bindings::distinct(kernel), Dialect::Wgsl).is_ok(),
        Family::Cuda => render(kernel, target, &Bindings::distinct(kernel), Dialect::Cuda).is_ok(),
    };
    planned.is_ok_and(|plan| plan.kernels.iter().all(&mut compiles))
}
