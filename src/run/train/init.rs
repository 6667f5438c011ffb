//! Weights that are drawn before a training, by the rules of PyTorch's layers.
//!
//! | read by | its elements |
//! |---|---|
//! | MatMul, Gemm, Conv, ConvTranspose, and their biases | even in ±1 / sqrt(inputs of an output) |
//! | LSTM, GRU, RNN | even in ±1 / sqrt(hidden size) |
//! | Gather | normal, of mean 0 and variance 1 |
//! | a norm | scale 1, bias 0; running mean 0 and variance 1 |
//! | PRelu | 0.25 |
//!
//! Elements depend on the seed, the weight's name and their place, so they have the same bits on every machine.

use super::{Training, is_numbered};
use crate::constant::{Constant, FILL};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::file;
use crate::graph::Graph;
use crate::onnx::{Role, Weight};
use crate::op::{Attrs, Fact, NodeId, ValueId};
use crate::ops;
use crate::random::{NUMBERS, key, threefry, uniform};
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::collections::HashSet;
use std::f64::consts::TAU;
use std::sync::Arc;

/// The stream of these numbers: Dropouts have the first ones.
const STREAM: u32 = u32::MAX;

/// How the elements of a weight are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// All are this number.
    Equal(f64),
    /// Spread evenly between this number and its negative.
    Even(f64),
    /// Normal, of mean 0 and variance 1.
    Normal,
}

/// A weight, and how it is drawn.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The name of the weight.
    pub name: String,
    /// Its type, `f32`, and its shape.
    pub fact: Fact,
    /// Of several rules, of a weight that several nodes read, the first one.
    pub rule: Rule,
}

impl Drawn {
    /// The elements.
    ///
    /// # Errors
    /// When the host does not have the memory.
    pub fn tensor(&self, seed: u64) -> Result<Tensor> {
        let count = self.fact.shape.numel();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(count * 4).map_err(|_| Error::Memory {
            what: format!("the weight '{}'", self.name),
            needed: count as u64 * 4,
            file: None,
        })?;
        let own = file::fnv(self.name.as_bytes());
        let key = threefry(key(seed, STREAM), [own as u32, (own >> 32) as u32]);
        for element in 0..count as u64 {
            let (low, high) = (element as u32, (element >> 32) as u32);
            let number = match self.rule {
                Rule::Equal(number) => number,
                Rule::Even(bound) => bound * (2.0 * uniform(key, high, low) - 1.0),
                Rule::Normal => {
                    // Box and Muller's transform. The first number is no 0.
                    let [first, second] = threefry(key, [low, high]).map(|word| f64::from(word >> 8) / NUMBERS);
                    (-2.0 * libm::log(1.0 - first)).sqrt() * libm::cos(TAU * second)
                }
            };
            bytes.extend((number as f32).to_le_bytes());
        }
        Tensor::new(DType::F32, self.fact.shape.clone(), bytes)
    }
}

/// The weights of a graph: the drawn, and the rest.
#[derive(Clone, Debug, Default)]
pub struct Init {
    /// The weights that are drawn.
    pub drawn: Vec<Drawn>,
    /// Weights that no rule knows, and an operator that reads them: they begin with the elements of the file.
    pub unknown: Vec<(String, &'static str)>,
}

/// Finds the rule of each weight that a training may change. `weights` names the constants that are weights.
///
/// # Errors
/// When the graph has a cycle.
pub fn rules(graph: &Graph, weights: &[Weight], training: &Training) -> Result<Init> {
    let mut init = Init::default();
    for (value, name) in candidates(graph, weights, &training.of(weights))? {
        let fact = graph.fact(value).clone();
        match rule(graph, value) {
            Ok(rule) => init.drawn.push(Drawn { name, fact, rule }),
            Err(reader) => init.unknown.push((name, reader)),
        }
    }
    Ok(init)
}

/// Weights that are not frozen, in the order of the graph.
fn candidates(graph: &Graph, weights: &[Weight], training: &Training) -> Result<Vec<(ValueId, String)>> {
    let is_drawn = |weight: &&Weight| weight.role != Role::Buffer || training.names_trained(&weight.name);
    let weights: HashSet<&str> = weights.iter().filter(is_drawn).map(|weight| &weight.name[..]).collect();
    let values = graph.order()?.into_iter().map(|node| node.output(0));
    let suits = |constant: &Arc<Constant>| {
        let (name, fact) = (&constant.name[..], &constant.fact);
        let is_number = fact.shape.numel() == 1 && is_numbered(name);
        weights.contains(name) && fact.dtype == DType::F32 && !training.freezes(name) && !is_number
    };
    let constants = values.filter_map(|value| Some((value, graph.as_constant(value)?)));
    Ok(constants
        .filter(|(_, constant)| suits(constant))
        .map(|(value, constant)| (value, constant.name.clone()))
        .collect())
}

/// Lets drawn weights begin with zeros, so that their elements need not be in the file. They are set once the graph is loaded.
///
/// # Errors
/// When the graph has a cycle.
pub fn forget(graph: &mut Graph, init: &Init) -> Result<()> {
    let drawn: HashSet<&str> = init.drawn.iter().map(|drawn| &drawn.name[..]).collect();
    for node in graph.order()? {
        let value = node.output(0);
        let Some(constant) = graph.as_constant(value).filter(|constant| drawn.contains(&constant.name[..])) else {
            continue;
        };
        let zeros = zeros(&constant.name, &constant.fact)?;
        graph.fill(value, zeros);
    }
    Ok(())
}

/// Zeros that take no memory before they are needed.
fn zeros(name: &str, fact: &Fact) -> Result<Constant> {
    let fill = ops::find(FILL).expect("the table has the row");
    let extents: Vec<i64> = fact.shape.iter().map(|&extent| extent as i64).collect();
    Constant::derived(name.to_owned(), fill, Attrs::new().with("input", extents), Vec::new(), 0, fact.clone())
}

/// Operators that hand the elements of a weight on.
fn hands_on(op: &str) -> bool {
    matches!(op, "Transpose" | "Identity" | "Cast" | "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten")
}

/// The first rule of a weight's readers, or else one of them.
fn rule(graph: &Graph, weight: ValueId) -> Result<Rule, &'static str> {
    let mut reader = "no operator";
    let mut values = vec![weight];
    while let Some(value) = values.pop() {
        for user in graph.users(value) {
            let op = graph.node(user).op_name();
            let operands = graph.operands(user);
            if hands_on(op) && operands[0] == Some(value) {
                values.push(user.output(0));
                continue;
            }
            reader = op;
            let slots = operands.iter().enumerate().filter(|(_, operand)| **operand == Some(value));
            if let Some(rule) = slots.filter_map(|(slot, _)| by_slot(graph, user, slot)).next() {
                return Ok(rule);
            }
        }
    }
    Err(reader)
}

/// The rule of an operator's operand.
fn by_slot(graph: &Graph, node: NodeId, slot: usize) -> Option<Rule> {
    let operands = graph.operands(node);
    let shape = |slot: usize| operands.get(slot).copied().flatten().map(|value| &graph.fact(value).shape);
    let even = |count: usize| Rule::Even(1.0 / (count.max(1) as f64).sqrt());
    Some(match (graph.node(node).op_name(), slot) {
        ("MatMul" | "Gemm" | "Conv" | "ConvTranspose", _) => even(inputs_of_output(graph, node, slot)?),
        // A bias that is added.
        ("Add", _) => even(layer(graph, operands[1 - slot]?)?),
        ("LSTM" | "GRU" | "RNN", 1..=3) => even(*shape(2)?.last()?),
        ("Gather", 0) => Rule::Normal,
        ("BatchNormalization", 1 | 4) => Rule::Equal(1.0),
        ("BatchNormalization", 2 | 3) => Rule::Equal(0.0),
        ("LayerNormalization" | "InstanceNormalization" | "GroupNormalization" | "RMSNormalization", 1) => {
            Rule::Equal(1.0)
        }
        ("LayerNormalization" | "InstanceNormalization" | "GroupNormalization", 2) => Rule::Equal(0.0),
        ("PRelu", 1) => Rule::Equal(0.25),
        _ => return None,
    })
}

/// The inputs of one output of the layer behind a value, if a weight of it is a constant.
fn layer(graph: &Graph, value: ValueId) -> Option<usize> {
    let mut value = value;
    while hands_on(graph.node(value.node).op_name()) {
        value = graph.operands(value.node)[0]?;
    }
    if !matches!(graph.node(value.node).op_name(), "MatMul" | "Gemm" | "Conv" | "ConvTranspose") {
        return None;
    }
    let operands = graph.operands(value.node);
    let is_weight = |slot: usize| {
        let mut value = operands.get(slot).copied().flatten()?;
        while hands_on(graph.node(value.node).op_name()) {
            value = graph.operands(value.node)[0]?;
        }
        graph.as_constant(value).map(|_| slot)
    };
    let slot = is_weight(1).or_else(|| is_weight(0))?;
    inputs_of_output(graph, value.node, slot)
}

/// The inputs of one output of a layer, by the weight in this slot, or for the bias.
fn inputs_of_output(graph: &Graph, node: NodeId, slot: usize) -> Option<usize> {
    let operands = graph.operands(node);
    let shape = |slot: usize| -> Option<&Shape> { Some(&graph.fact(operands.get(slot).copied().flatten()?).shape) };
    match (graph.node(node).op_name(), slot) {
        ("MatMul", 1) => {
            let shape = shape(1)?;
            Some(shape[shape.len().saturating_sub(2)])
        }
        ("MatMul", 0) => shape(0)?.last().copied(),
        ("Gemm", slot) => {
            let turned = |name| graph.with_call(node, |call| call.int(name, 0)).and_then(|found| found.ok()) == Some(1);
            match slot {
                0 => Some(shape(0)?[usize::from(!turned("transA"))]),
                _ => Some(shape(1)?[usize::from(turned("transB"))]),
            }
        }
        // As PyTorch counts, also where a convolution is transposed.
        ("Conv" | "ConvTranspose", 1 | 2) => Some(shape(1)?[1..].iter().product()),
        _ => None,
    }
}
