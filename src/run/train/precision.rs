//! Precision: which values of the forward computation are of 16 bits. Their gradients are of the same type, because a cast's is one back.
//!
//! Weights and all other states stay `f32`. Products and convolutions take 16 bits and sum in `f32`; a weight's copy of 16 bits is a value
//! of the step as any other. Exponentials, powers, sums and losses are computed in `f32`, and so are normalizations, whose results are
//! narrow again. Other operators take the type of their operands, the wider one of two; constants and weights follow.

use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Kind, Node};
use crate::op::{Attrs, Fact, NodeId, ValueId};
use crate::ops;
use std::collections::{HashMap, HashSet};

/// How an operator is computed.
#[derive(Clone, Copy, PartialEq)]
enum Policy {
    /// On narrow operands.
    Narrow,
    /// In `f32`.
    Wide,
    /// In `f32`, with a narrow result of narrow data.
    WideInside,
    /// In the type of its operands.
    Same,
}

fn policy(op: &str) -> Policy {
    match op {
        "MatMul"
        | "Gemm"
        | "Einsum"
        | "Conv"
        | "ConvTranspose"
        | "FusedMatMul"
        | "FusedGemm"
        | "FusedConv"
        | "NhwcConv"
        | "Attention"
        | "com.microsoft.Attention"
        | "MultiHeadAttention"
        | "LSTM"
        | "GRU"
        | "RNN" => Policy::Narrow,
        "BatchNormalization"
        | "InstanceNormalization"
        | "GroupNormalization"
        | "LayerNormalization"
        | "RMSNormalization"
        | "SimplifiedLayerNormalization"
        | "SkipLayerNormalization"
        | "SkipSimplifiedLayerNormalization"
        | "MeanVarianceNormalization"
        | "LRN"
        | "AveragePool"
        | "GlobalAveragePool"
        | "LpPool"
        | "GlobalLpPool" => Policy::WideInside,
        "Softmax"
        | "LogSoftmax"
        | "Softplus"
        | "Exp"
        | "Log"
        | "Pow"
        | "Reciprocal"
        | "Sqrt"
        | "Tan"
        | "Acos"
        | "Asin"
        | "Acosh"
        | "Cosh"
        | "Sinh"
        | "CumSum"
        | "LpNormalization"
        | "SoftmaxCrossEntropyLoss"
        | "NegativeLogLikelihoodLoss" => Policy::Wide,
        _ if op.starts_with("Reduce") => Policy::Wide,
        _ => Policy::Same,
    }
}

/// True if an operator is computed in `f32`, because its results leave the range of 16 bits or lose their meaning there.
pub(super) fn is_wide(op: &str) -> bool {
    policy(op) == Policy::Wide
}

/// Makes values of a model narrow. Returns the values that are computed in `f32` beside others, with their operators.
///
/// # Errors
/// When an operator takes its operands in neither type.
pub(super) fn narrow(graph: &mut Graph, to: DType) -> Result<Vec<(String, &'static str)>> {
    let mut autocast = Autocast { graph, to, fixed: HashSet::new(), casts: HashMap::new(), wide: Vec::new() };
    for id in autocast.graph.order()? {
        autocast.node(id)?;
    }
    let wide = autocast.wide;
    // The loss judges `f32`.
    graph.append();
    for (name, value) in graph.outputs().to_vec() {
        let wide = if graph.fact(value).dtype == to { cast(graph, value, DType::F32)? } else { value };
        graph.withdraw_output(&name);
        graph.output(name, wide);
    }
    graph.sweep();
    Ok(wide)
}

/// Adds a cast.
pub(super) fn cast(graph: &mut Graph, value: ValueId, to: DType) -> Result<ValueId> {
    let op = ops::find("Cast").expect("the table has Cast");
    let name = format!("{}/{to}", graph.value_name(value));
    let node = graph.add(op, &name, &[Some(value)], Attrs::new().with("to", to.onnx()), &[])?;
    Ok(node.output(0))
}

struct Autocast<'a> {
    graph: &'a mut Graph,
    to: DType,
    /// Values that follow from constants alone, weights among them.
    fixed: HashSet<ValueId>,
    casts: HashMap<ValueId, ValueId>,
    wide: Vec<(String, &'static str)>,
}

impl Autocast<'_> {
    fn is_float(&self, value: ValueId) -> bool {
        let dtype = self.graph.fact(value).dtype;
        dtype == DType::F32 || dtype == self.to
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let (node, operands) = (self.graph.node(id).clone(), self.graph.operands(id));
        let results = (0..node.outputs.len() as u32).map(|port| ValueId { node: id, port });
        let given = || operands.iter().flatten().copied();
        match node.kind {
            Kind::Input | Kind::State(_) => return Ok(()),
            _ if given().all(|value| self.fixed.contains(&value)) => {
                self.fixed.extend(results);
                return Ok(());
            }
            _ => {}
        }
        let data: Vec<DType> = given()
            .filter(|value| self.is_float(*value) && !self.fixed.contains(value))
            .map(|value| self.graph.fact(value).dtype)
            .collect();
        let is_narrow = !data.is_empty() && data.iter().all(|&dtype| dtype == self.to);
        let name = node.op_name();
        if name == "Cast" && is_narrow && node.outputs[0].fact.dtype == DType::F32 {
            self.graph.replace(id.output(0), operands[0].expect("a cast has data"));
            return Ok(());
        }
        let policy = policy(name);
        let wanted = match policy {
            Policy::Narrow => self.to,
            Policy::Same if is_narrow => self.to,
            _ => DType::F32,
        };
        // What takes no halves is computed in `f32`.
        let made = match self.again(id, &node, &operands, wanted) {
            Err(_) if wanted == self.to => self.again(id, &node, &operands, DType::F32)?,
            made => made?,
        };
        for port in 0..node.outputs.len() as u32 {
            let (old, mut new) = (ValueId { node: id, port }, ValueId { node: made, port });
            if policy == Policy::WideInside && is_narrow && self.graph.fact(new).dtype == DType::F32 {
                self.graph.insert_at(id);
                new = cast(self.graph, new, self.to)?;
            } else if self.graph.fact(new).dtype == DType::F32 && !data.is_empty() {
                self.wide.push((self.graph.value_name(new).to_owned(), name));
            }
            self.graph.replace(old, new);
        }
        Ok(())
    }

    /// The node with its float operands in one type; the node itself if they are.
    fn again(&mut self, id: NodeId, node: &Node, operands: &[Option<ValueId>], to: DType) -> Result<NodeId> {
        let mut read = Vec::with_capacity(operands.len());
        for &operand in operands {
            read.push(match operand {
                Some(value) if self.is_float(value) => Some(self.typed(id, value, to)?),
                other => other,
            });
        }
        let op = node.op().expect("constants and inputs are left out");
        let names: Vec<&str> = node.outputs.iter().map(|output| output.name.as_str()).collect();
        self.graph.insert_at(id);
        let made = self.graph.add(op, &node.name, &read, node.attrs.clone(), &names)?;
        let suits = |(old, port): (&Fact, u32)| {
            let value = ValueId { node: made, port };
            let new = self.graph.fact(value);
            new.shape == old.shape && (new.dtype == old.dtype || self.is_float(value))
        };
        if !node.outputs.iter().map(|output| &output.fact).zip(0..).all(suits) {
            return Err(node.error(format!("on {to} it makes another type or shape")));
        }
        Ok(made)
    }

    /// A float in a type. A weight that is read transposed is cast as it lies: products read transposed operands as fast.
    fn typed(&mut self, id: NodeId, value: ValueId, to: DType) -> Result<ValueId> {
        if self.graph.fact(value).dtype == to {
            return Ok(value);
        }
        if let Some(&made) = self.casts.get(&value) {
            return Ok(made);
        }
        let node = self.graph.node(value.node).clone();
        let made = match self.graph.operands(value.node)[..] {
            [Some(source)] if self.fixed.contains(&value) && node.op_name() == "Transpose" => {
                let source = self.typed(id, source, to)?;
                self.graph.insert_at(id);
                let op = node.op().expect("a transposition is an operator");
                let name = format!("{}/{to}", node.name);
                self.graph.add(op, &name, &[Some(source)], node.attrs, &[])?.output(0)
            }
            _ => {
                self.graph.insert_at(id);
                cast(self.graph, value, to)?
            }
        };
        self.casts.insert(value, made);
        Ok(made)
    }
}
