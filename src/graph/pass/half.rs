//! Stores `f32` values as `f16`.

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::{Graph, Kind, Node};
use crate::op::{Attr, Attrs, Fact, NodeId, ValueId};
use crate::ops;
use std::collections::HashMap;

/// Stores all `f32` values and weights as `f16`. Inputs, outputs and states of the graph keep their types and are cast. This is no part
/// of the pipeline, because it changes results.
///
/// # Errors
/// When no value is `f32`, or an operator takes neither `f16` nor `f32` where it took `f32`.
pub fn run(graph: &mut Graph) -> Result<()> {
    ensure(graph.dtypes().contains(&DType::F32), || Error::usage("no value is f32".into()))?;
    let mut half =
        Halving { from: graph, to: Graph::new(graph.name.clone()), values: HashMap::new(), given: HashMap::new() };
    half.to.prefetches = graph.prefetches;
    for &input in graph.inputs() {
        let made = half.to.input(graph.value_name(input), graph.fact(input).clone());
        half.narrow(input, made)?;
    }
    for state in graph.states() {
        let Kind::State(initial) = &graph.node(state.value.node).kind else { unreachable!("it is listed as a state") };
        let (name, fact) = (graph.value_name(state.value), graph.fact(state.value).clone());
        let made = half.to.state(name, fact, initial.clone());
        half.narrow(state.value, made)?;
    }
    for id in graph.order()? {
        half.to.append();
        half.node(id, graph.node(id))?;
    }
    for (name, value) in graph.outputs() {
        let wide = half.wide(*value)?;
        half.to.output(name.clone(), wide);
    }
    for (old, new) in graph.states().iter().zip(half.to.states().to_vec()) {
        if let Some(update) = old.update {
            let wide = half.wide(update)?;
            half.to.update(new.value, wide).map_err(Error::graph)?;
        }
        half.to.bound_count(new.value, old.count);
    }
    *graph = half.to;
    Ok(())
}

struct Halving<'a> {
    from: &'a Graph,
    to: Graph,
    values: HashMap<ValueId, ValueId>,
    /// What other ranks have given, as they gave it.
    given: HashMap<ValueId, ValueId>,
}

impl Halving<'_> {
    fn cast(&mut self, value: ValueId, to: DType) -> Result<ValueId> {
        let name = format!("{}/{to}", self.to.value_name(value));
        if let Some(constant) = self.to.as_constant(value).filter(|c| c.fact.shape.numel() == 1 && to.is_half()) {
            let narrowed = Constant::narrowed(name, constant, to);
            return Ok(self.to.constant(narrowed));
        }
        let op = ops::find("Cast").expect("the table has Cast");
        let node = self.to.add(op, &name, &[Some(value)], Attrs::new().with("to", to.onnx()), &[])?;
        if self.to.as_constant(value).is_some() {
            return Ok(self.to.make_constant(node)?[0]);
        }
        Ok(node.output(0))
    }

    /// A value in the type that it has outside.
    fn wide(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(&given) = self.given.get(&value) {
            return Ok(given);
        }
        let made = self.values[&value];
        if self.from.fact(value).dtype == DType::F32 { self.cast(made, DType::F32) } else { Ok(made) }
    }

    /// Makes `made` stand for `value`, as `f16` if it is `f32`.
    fn narrow(&mut self, value: ValueId, made: ValueId) -> Result<()> {
        let made = if self.to.fact(made).dtype == DType::F32 { self.cast(made, DType::F16)? } else { made };
        let Fact { dtype, shape } = self.from.fact(value);
        let dtype = if *dtype == DType::F32 { DType::F16 } else { *dtype };
        if *self.to.fact(made) != Fact::new(dtype, shape.clone()) {
            let what = format!("with f16 it makes {}", self.to.fact(made));
            return Err(self.from.node(value.node).error(what));
        }
        self.values.insert(value, made);
        Ok(())
    }

    fn node(&mut self, id: NodeId, node: &Node) -> Result<()> {
        let made = match &node.kind {
            Kind::Input | Kind::State(_) => return Ok(()),
            Kind::Constant(constant) => self.to.constant(constant.clone()).node,
            Kind::Op(op) => {
                let operands: Vec<_> = self.from.operands(id).iter().map(|v| v.map(|v| self.values[&v])).collect();
                let mut attrs = node.attrs.clone();
                let wide = |attr: &Attr| matches!(attr, Attr::Int(to) if *to == DType::F32.onnx());
                if op.name == "Cast" && attrs.get("to").is_some_and(wide) {
                    attrs.set("to", DType::F16.onnx());
                }
                let names: Vec<&str> = node.outputs.iter().map(|o| o.name.as_str()).collect();
                // What passes between stages may be an output.
                let operands = match ops::is_passed(op) {
                    true => self
                        .from
                        .operands(id)
                        .iter()
                        .map(|v| v.map(|v| self.wide(v)).transpose())
                        .collect::<Result<_>>()?,
                    false => operands,
                };
                match self.to.add(op, &node.name, &operands, attrs.clone(), &names) {
                    Ok(made) => made,
                    // What takes no halves is computed in `f32`.
                    Err(error) => {
                        let operands = self.from.operands(id);
                        let wide = operands.iter().map(|v| v.map(|v| self.wide(v)).transpose());
                        let wide = wide.collect::<Result<Vec<_>>>()?;
                        self.to.add(op, &node.name, &wide, attrs, &names).map_err(|_| error)?
                    }
                }
            }
        };
        if node.op_name() == ops::RECV {
            self.given.insert(id.output(0), ValueId { node: made, port: 0 });
        }
        (0..node.outputs.len() as u32)
            .try_for_each(|port| self.narrow(ValueId { node: id, port }, ValueId { node: made, port }))
    }
}
