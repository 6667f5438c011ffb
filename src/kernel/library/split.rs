//! Taking a call out of a kernel: what it computes, and a map for the rest.

use super::{absorb, is_small};
use crate::expr::{Body, Code, Instr};
use crate::kernel::{Kernel, Template};
use crate::target::Target;

/// A kernel as a library call, and the map that finishes the result in place, if anything is left to do. The map reads the result first,
/// then the given reads of the original kernel.
pub struct Split {
    /// What the call computes, and the call unless rendering is faster; its reads are the given ones of the original kernel.
    pub call: (Kernel, Vec<usize>),
    /// The map.
    pub rest: Option<(Kernel, Vec<usize>)>,
}

/// Takes a library call out of a kernel, or what would be one if rendering were not faster.
pub fn split(kernel: &Kernel, target: &Target) -> Option<Split> {
    let (_, end) = absorb(kernel, target)?;
    let core = kernel.template.core_reads();
    let (body, inputs) = part(&kernel.body, None, end);
    let operands: Vec<usize> = (0..core).chain(inputs.iter().map(|&i| core + i as usize - 1)).collect();
    let pick = |slots: &[usize]| slots.iter().map(|&s| kernel.reads[s].clone()).collect::<Vec<_>>();
    let mut first = Kernel { reads: pick(&operands), body, ..kernel.clone() };
    let (found, _) = absorb(&first, target)?;
    if !is_small(kernel, &found, target) {
        first.workspace = found.workspace();
        first.call = Some(found);
    }
    let (body, inputs) = part(&kernel.body, Some(end), kernel.body.results[0]);
    let rest = (end != kernel.body.results[0]).then(|| {
        let slots: Vec<usize> = inputs.iter().map(|&i| core + i as usize - 1).collect();
        let mut reads = kernel.writes.clone();
        reads.extend(pick(&slots));
        let (shape, writes) = (kernel.shape.clone(), kernel.writes.clone());
        (
            Kernel {
                template: Template::Map,
                shape,
                reads,
                writes,
                prologues: Vec::new(),
                body,
                workspace: 0,
                call: None,
            },
            slots,
        )
    });
    Some(Split { call: (first, operands), rest })
}

/// The instructions that `result` needs, with that of `start` for input 0; and which inputs the others are.
pub(super) fn part(body: &Body, start: Option<u32>, result: u32) -> (Body, Vec<u32>) {
    let mut live = vec![false; body.code.len()];
    live[result as usize] = true;
    for i in (0..=result as usize).rev() {
        if live[i] && start != Some(i as u32) {
            body.code[i].code.operands().for_each(|o| live[o as usize] = true);
        }
    }
    let mut number = vec![0; body.code.len()];
    let mut inputs = Vec::new();
    let mut code = Vec::new();
    for (i, instr) in body.code.iter().enumerate().filter(|(i, _)| live[*i]) {
        let at = |o: u32| number[o as usize];
        let new = match instr.code {
            _ if start == Some(i as u32) => Code::Input(0),
            Code::Input(0) if start.is_none() => Code::Input(0),
            Code::Input(j) => {
                inputs.push(j);
                Code::Input(inputs.len() as u32)
            }
            Code::Unary(op, a) => Code::Unary(op, at(a)),
            Code::Binary(op, a, b) => Code::Binary(op, at(a), at(b)),
            Code::Select(c, a, b) => Code::Select(at(c), at(a), at(b)),
            Code::Cast(a) => Code::Cast(at(a)),
            leaf @ (Code::Const(_) | Code::Index(_) | Code::Fold(_)) => leaf,
        };
        number[i] = code.len() as u32;
        code.push(Instr { code: new, dtype: instr.dtype });
    }
    (Body { code, results: vec![number[result as usize]] }, inputs)
}
