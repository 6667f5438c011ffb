//! Finds the element types that each operator takes on each target. It plans each row's sample with each type for each target,
//! and compiles or renders the plan's kernels.

use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::dtype::DType;
use crate::graph::Graph;
use crate::kernel::Kernel;
use crate::kernel::render::{Bindings, Dialect, render};
use crate::op::{Fact, OpDef, SampleInput, ValueId};
use crate::ops;
use crate::plan::Planning;
use crate::plan::{Limits, Recipe};
use crate::target::{Family, Target};

/// The element types of a row.
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

/// A graph of one node: the row's sample on elements of this type, if the row takes them.
fn call(op: &'static OpDef, dtype: DType) -> Option<Graph> {
    let sample = op.example().retyped(dtype);
    let mut graph = Graph::new(op.name);
    let mut input = |(i, input): (usize, &Option<SampleInput>)| {
        let input = input.as_ref()?;
        Some(graph.input(format!("x{i}"), Fact::new(input.dtype, input.shape.clone())))
    };
    let inputs: Vec<_> = sample.inputs.iter().enumerate().map(&mut input).collect();
    let node = graph.add(op, op.name, &inputs, sample.attrs, &[]).ok()?;
    graph.output("y", ValueId { node, port: 0 });
    Some(graph)
}

/// True if the graph can be planned for the target and every kernel of the plan compiles or renders.
fn runs(graph: &Graph, target: &Target, cpu: &mut Cpu) -> bool {
    let planned = Recipe::default().plan(graph.clone(), target, &Limits { memory: None });
    let mut compiles = |kernel: &Kernel| match target.family {
        Family::Cpu => cpu.compile(kernel).is_ok(),
        _ if kernel.schedule.call().is_some() => true,
        Family::Wgpu => render(kernel, target, &Bindings::distinct(kernel), Dialect::Wgsl).is_ok(),
        Family::Cuda => render(kernel, target, &Bindings::distinct(kernel), Dialect::Cuda).is_ok(),
    };
    planned.is_ok_and(|plan| plan.programs[0].kernels.iter().flat_map(Kernel::launched).all(&mut compiles))
}
