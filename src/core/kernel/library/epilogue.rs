//! The part of a kernel's body that a library computes behind the core value.

use super::Activation;
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Instr};
use crate::kernel::{Kernel, Operand};
use crate::tensor::Tensor;

/// The part of a body that an epilogue computes.
pub(super) struct Epilogue {
    pub alpha: f64,
    /// The slot of the added vector; that of the added tensor is `residual`.
    pub bias: Option<usize>,
    pub residual: Option<usize>,
    pub activation: Activation,
    /// The instruction whose value the epilogue computes.
    pub end: u32,
}

/// The abilities of an epilogue, apart from adding.
pub(super) struct Abilities<'a> {
    pub scale: bool,
    pub gelu: bool,
    /// Returns true if a read can be the bias.
    pub bias: &'a dyn Fn(&Operand) -> bool,
}

/// The instruction of a body that is the core value, if it is of the type that is written.
pub(super) fn core_alone(kernel: &Kernel) -> Option<u32> {
    Epilogue::none(kernel).map(|epilogue| epilogue.end)
}

impl Epilogue {
    /// Takes nothing of the body along: the core value alone. `None` when it is not of the type that is written.
    pub fn none(kernel: &Kernel) -> Option<Epilogue> {
        let code = &kernel.body.code;
        let end = code.iter().position(|i| i.code == Code::Input(0))? as u32;
        let epilogue = Epilogue { alpha: 1.0, bias: None, residual: None, activation: Activation::None, end };
        (code[end as usize].dtype == kernel.writes[0].dtype).then_some(epilogue)
    }

    /// Follows the core value through the body while it has one reader that the library can compute. `None` if the value at the end does
    /// not have the written type.
    pub fn new(kernel: &Kernel, can: &Abilities) -> Option<Epilogue> {
        let Body { code, results } = &kernel.body;
        let (core, write) = (kernel.template.core_reads(), &kernel.writes[0]);
        let start = code.iter().position(|i| i.code == Code::Input(0))? as u32;
        let mut found = Epilogue { alpha: 1.0, bias: None, residual: None, activation: Activation::None, end: start };
        let live = &kernel.body.live();
        let users = |value: u32| {
            let uses = move |i: &usize| live[*i] && code[*i].code.operands().any(|o| o == value);
            (0..code.len()).filter(uses).collect::<Vec<_>>()
        };
        while let ([user], false) = (&users(found.end)[..], results[0] == found.end) {
            let added = found.bias.is_some() || found.residual.is_some();
            let read = |o: u32| match code[o as usize].code {
                Code::Input(j) if j > 0 => Some(core + j as usize - 1),
                _ => None,
            };
            let constant = |o: u32| match code[o as usize].code {
                Code::Const(v) if v.is_finite() => Some(v),
                _ => None,
            };
            let other = |a: u32, b: u32| if a == found.end { b } else { a };
            match code[*user].code {
                Code::Binary(Binary::Mul, a, b) if can.scale && !added => match constant(other(a, b)) {
                    Some(factor) => found.alpha *= factor,
                    None => break,
                },
                Code::Binary(Binary::Div, a, b) if can.scale && !added && a == found.end => match constant(b) {
                    Some(divisor) if divisor != 0.0 => found.alpha /= divisor,
                    _ => break,
                },
                Code::Binary(Binary::Add, a, b) if a != b => {
                    let Some(slot) = read(other(a, b)) else { break };
                    let operand = &kernel.reads[slot];
                    if operand.dtype != write.dtype {
                        break;
                    } else if found.residual.is_none() && operand.access == write.access {
                        found.residual = Some(slot);
                    } else if found.bias.is_none() && (can.bias)(operand) {
                        found.bias = Some(slot);
                    } else {
                        break;
                    }
                }
                // A product of 16-bit floats may be stored as the f32 in which it was summed.
                Code::Cast(_) if can.scale && !added && code[*user].dtype == DType::F32 => {}
                _ => break,
            }
            found.end = *user as u32;
        }
        if let Some((activation, end)) = activation(&kernel.body, found.end, can.gelu) {
            found.activation = activation;
            found.end = end;
        }
        (code[found.end as usize].dtype == write.dtype).then_some(found)
    }
}

/// Arguments at which activations are compared, beside those around a function's own constants. At none of them could two spellings of one
/// function differ by rounding.
const PROBES: [f64; 16] = [-1e30, -1e4, -9.0, -5.5, -3.25, -2.0, -1.1, -0.7, -0.3, 0.0, 0.2, 0.9, 1.6, 2.8, 7.5, 1e4];

/// The first instruction whose value is an activation of `value`, and through which every use of `value` goes. An activation is recognised
/// by its values, however it is spelled.
fn activation(body: &Body, value: u32, gelu: bool) -> Option<(Activation, u32)> {
    let live = body.live();
    let count = body.code.len();
    (value + 1..count as u32).filter(|&v| live[v as usize]).find_map(|end| {
        let mut inside = vec![false; count];
        inside[end as usize] = true;
        for i in (0..=end as usize).rev() {
            if inside[i] && i as u32 != value {
                body.code[i].code.operands().for_each(|o| inside[o as usize] = true);
            }
        }
        let alone = |i: usize| match body.code[i].code {
            Code::Const(_) => true,
            _ if i as u32 == end => true,
            _ => {
                let uses = |u: usize| body.code[u].code.operands().any(|o| o as usize == i);
                let escapes = (0..count).any(|u| live[u] && !inside[u] && uses(u));
                !escapes && !body.results.contains(&(i as u32))
            }
        };
        if !inside[value as usize] || !(0..count).filter(|&i| inside[i]).all(alone) {
            return None;
        }
        let (function, inputs) = part(body, Some(value), end);
        let placed = function.code.iter().any(|i| matches!(i.code, Code::Index(_) | Code::Reduction(_)));
        if placed || !inputs.is_empty() {
            return None;
        }
        let steps = function.code.iter().filter_map(|i| if let Code::Const(c) = i.code { Some(c) } else { None });
        let around = steps.flat_map(|c| [c, -c, c * 0.999, c * 1.001, c - 1e-3, c + 1e-3]).filter(|c| c.is_finite());
        let probes: Vec<f64> = PROBES.into_iter().chain(around).collect();
        let is = |f: &dyn Fn(f64) -> f64, tolerance: f64| {
            probes.iter().all(|&x| {
                let (found, expected) = (function.eval(&[x], &[], &[])[0], f(x));
                (found - expected).abs() <= tolerance * x.abs().max(1.0)
            })
        };
        let dtype = body.code[value as usize].dtype;
        // A file of 16-bit floats has such constants, too.
        let rounded = |v: f64| Tensor::from_f64(dtype, [1], &[v]).to_f64()[0];
        let gelu_tanh =
            || is(&|x| gelu_tanh(x, GELU_TANH), 1e-6) || is(&|x| gelu_tanh(x, GELU_TANH.map(rounded)), 1e-6);
        if is(&|x| x.max(0.0), 0.0) {
            Some((Activation::Relu, end))
        } else {
            (gelu && gelu_tanh()).then_some((Activation::GeluTanh, end))
        }
    })
}

/// The factors of GELU's tanh approximation: the square root of 2 / pi, and the factor of the cube.
const GELU_TANH: [f64; 2] = [0.797_884_560_802_865_4, 0.044_715];

fn gelu_tanh(x: f64, [outer, cube]: [f64; 2]) -> f64 {
    0.5 * x * (1.0 + (outer * (x + cube * x * x * x)).tanh())
}

/// The instructions that `result` needs, with that of `start` as input 0. The list holds the numbers of the other inputs.
pub fn part(body: &Body, start: Option<u32>, result: u32) -> (Body, Vec<u32>) {
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
        let new = match instr.code {
            _ if start == Some(i as u32) => Code::Input(0),
            Code::Input(0) if start.is_none() => Code::Input(0),
            Code::Input(j) => {
                inputs.push(j);
                Code::Input(inputs.len() as u32)
            }
            code => code.map(|o| number[o as usize]),
        };
        number[i] = code.len() as u32;
        code.push(Instr { code: new, dtype: instr.dtype });
    }
    (Body { code, results: vec![number[result as usize]] }, inputs)
}
