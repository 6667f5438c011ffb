//! Sequences of tensors, and optional values.
//!
//! A plan needs to know how many tensors a sequence has and which of them an operator takes. So both must follow from
//! shapes and constants. A sequence is then a list of the graph's values, and the graph itself has none. So it is with an optional value:
//! it is the value, or none.

use super::{Call, Importer, Relied, needed};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Result, ensure};
use crate::onnx::symbolic::Form;
use crate::op::{Attr, Attrs, ValueId};
use crate::tensor::Tensor;
use std::rc::Rc;

/// The value that a name stands for.
#[derive(Clone)]
pub(super) enum Named {
    /// An optional input that is left out.
    Nothing,
    Tensor(ValueId),
    Sequence(Rc<[ValueId]>),
}

impl Named {
    /// The tensor of an input with this name; `None` if the input is left out.
    pub(super) fn tensor(self, input: &str) -> Result<Option<ValueId>, String> {
        match self {
            Named::Nothing => Ok(None),
            Named::Tensor(value) => Ok(Some(value)),
            Named::Sequence(_) => Err(format!("expected a tensor, found the sequence '{input}'")),
        }
    }
}

/// The most tensors in a sequence.
const MAX_TENSORS: usize = 1 << 13;

/// Makes the output of an operator that takes or gives a sequence.
type Operator = fn(&mut Importer, &Operands) -> Result<Named, String>;

/// Operators that take or give sequences.
const OPERATORS: [(&str, Operator); 11] = [
    ("ConcatFromSequence", concat),
    ("Optional", |_, operands| Ok(operands.inputs.first().cloned().unwrap_or(Named::Nothing))),
    ("OptionalGetElement", get),
    ("OptionalHasElement", has),
    ("SequenceAt", at),
    ("SequenceConstruct", construct),
    ("SequenceEmpty", |_, _| Ok(Named::Sequence(Rc::new([])))),
    ("SequenceErase", erase),
    ("SequenceInsert", insert),
    ("SequenceLength", length),
    ("SplitToSequence", split),
];

/// True for operators that take or give sequences.
pub(super) fn is_operator(op: &str) -> bool {
    OPERATORS.iter().any(|(name, _)| *name == op)
}

/// The operands of one node.
struct Operands<'i> {
    inputs: &'i [Named],
    attrs: Attrs,
    /// Name of the output.
    name: String,
}

impl Operands<'_> {
    /// An integer attribute; `None` if it is left out.
    fn int(&self, key: &str) -> Result<Option<i64>, String> {
        match self.attrs.get(key) {
            None => Ok(None),
            Some(&Attr::Int(value)) => Ok(Some(value)),
            Some(_) => Err(format!("attribute '{key}': expected an integer")),
        }
    }

    fn sequence(&self, at: usize) -> Result<Vec<ValueId>, String> {
        match self.inputs.get(at) {
            Some(Named::Sequence(values)) => Ok(values.to_vec()),
            _ => Err(format!("input {at}: expected a sequence")),
        }
    }

    /// The tensor at an input; `None` if it is left out.
    fn tensor(&self, at: usize) -> Result<Option<ValueId>, String> {
        self.inputs.get(at).cloned().map_or(Ok(None), |input| input.tensor(&format!("input {at}")))
    }

    fn required(&self, at: usize) -> Result<ValueId, String> {
        self.tensor(at)?.ok_or_else(|| format!("input {at} is missing"))
    }
}

fn get(_: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let held = operands.inputs.first().filter(|held| !matches!(held, Named::Nothing));
    held.cloned().ok_or_else(|| "input 0: expected an element, found an optional value without one".to_owned())
}

fn has(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let has = operands.inputs.first().is_some_and(|held| !matches!(held, Named::Nothing));
    let has = Tensor::from_f64(DType::Bool, [], &[f64::from(u8::from(has))]);
    Ok(Named::Tensor(importer.graph.constant(Constant::new(operands.name.as_str(), has))))
}

fn construct(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let values = (0..operands.inputs.len()).map(|at| operands.required(at)).collect::<Result<Vec<_>, _>>()?;
    importer.same_types(&values)?;
    Ok(Named::Sequence(values.into()))
}

fn at(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let values = operands.sequence(0)?;
    Ok(Named::Tensor(values[importer.position(operands.required(1)?, values.len())?]))
}

fn erase(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let mut values = operands.sequence(0)?;
    let at = match operands.tensor(1)? {
        Some(position) => importer.position(position, values.len())?,
        None => values.len().checked_sub(1).ok_or("the sequence is empty")?,
    };
    values.remove(at);
    Ok(Named::Sequence(values.into()))
}

fn insert(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let (mut values, value) = (operands.sequence(0)?, operands.required(1)?);
    let at = match operands.tensor(2)? {
        // The position after the last tensor is legal, but only counted from the start.
        Some(position) => match importer.numbers("position", position)?[..] {
            [at] if at == values.len() as i64 => values.len(),
            _ => importer.position(position, values.len())?,
        },
        None => values.len(),
    };
    values.insert(at, value);
    ensure(values.len() <= MAX_TENSORS, || format!("expected a sequence of {MAX_TENSORS} tensors or fewer"))?;
    importer.same_types(&[values[0], *values.last().expect("one was inserted"), value])?;
    Ok(Named::Sequence(values.into()))
}

fn length(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let count = operands.sequence(0)?.len() as i64;
    let count = Tensor::from_i64([], &[count]).map_err(|e| e.to_string())?;
    Ok(Named::Tensor(importer.graph.constant(Constant::new(operands.name.as_str(), count))))
}

fn concat(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let values = operands.sequence(0)?;
    ensure(!values.is_empty(), || "the sequence is empty: expected tensors to put together".to_owned())?;
    let axis = operands.int("axis")?.ok_or("attribute 'axis' is missing")?;
    if operands.int("new_axis")?.unwrap_or(0) != 0 {
        return importer.stack(&operands.name, values, axis).map(Named::Tensor);
    }
    let attrs = Attrs::new().with("axis", axis);
    Ok(Named::Tensor(importer.values("Concat", &operands.name, &values, attrs)?[0]))
}

fn split(importer: &mut Importer, operands: &Operands) -> Result<Named, String> {
    let (name, data, axis) = (&operands.name, operands.required(0)?, operands.int("axis")?.unwrap_or(0));
    let values = match operands.tensor(1)? {
        Some(split) if !importer.graph.fact(split).shape.is_empty() => {
            let sizes = importer.numbers("split", split)?;
            importer.split(name, data, axis, sizes)?
        }
        split => {
            let size = split.map_or(Ok(1), |split| importer.numbers("split", split).map(|n| n[0]))?;
            match (operands.int("keepdims")?.unwrap_or(1), size) {
                // ONNX ignores `keepdims` if a size is given. But exporters write an unbind with a size of 1, and want
                // the axis removed.
                (0, 1) => importer.unstack(name, data, axis)?,
                _ => {
                    let sizes = importer.sizes(data, axis, size)?;
                    importer.split(name, data, axis, sizes)?
                }
            }
        }
    };
    Ok(Named::Sequence(values.into()))
}

impl<'a> Importer<'a> {
    /// The output of a node whose operator takes or gives a sequence.
    pub(super) fn sequence(&mut self, call: &Call<'_, 'a>) -> Result<Named> {
        let op = call.node.op_type.as_str();
        let Some((_, operator)) = OPERATORS.iter().find(|(name, _)| *name == op) else {
            panic!("invariant: '{op}' takes or gives a sequence")
        };
        let output = call.node.output.first().filter(|o| !o.is_empty());
        let name = output.map_or(call.name.to_owned(), |o| call.scope.name(o));
        let operands = Operands { inputs: &call.inputs, attrs: self.attributes(call)?, name };
        operator(self, &operands).map_err(|what| call.fail(what))
    }

    /// Splits a tensor at every index of an axis, and removes the axis.
    pub(super) fn unstack(&mut self, name: &str, value: ValueId, axis: i64) -> Result<Vec<ValueId>, String> {
        let sizes = self.sizes(value, axis, 1)?;
        let parts = self.split(name, value, axis, sizes)?;
        parts
            .into_iter()
            .enumerate()
            .map(|(i, part)| self.with_axis("Squeeze", &format!("{name}.{i}"), part, axis))
            .collect()
    }

    /// Joins tensors along a new axis.
    pub(super) fn stack(&mut self, name: &str, values: Vec<ValueId>, axis: i64) -> Result<ValueId, String> {
        let raised = values.into_iter().enumerate();
        let raised = raised.map(|(i, value)| self.with_axis("Unsqueeze", &format!("{name}.{i}"), value, axis));
        let raised = raised.collect::<Result<Vec<_>, _>>()?;
        Ok(self.values("Concat", name, &raised, Attrs::new().with("axis", axis))?[0])
    }

    /// Adds a node that inserts or removes one axis.
    fn with_axis(&mut self, op: &str, name: &str, value: ValueId, axis: i64) -> Result<ValueId, String> {
        Ok(self.values(op, name, &[value], Attrs::new().with("axes", vec![axis]))?[0])
    }

    /// The sizes of the parts if an axis is split every `size` indices. The last part may be smaller.
    fn sizes(&mut self, value: ValueId, axis: i64, size: i64) -> Result<Vec<i64>, String> {
        let extent = self.extent(value, axis)?;
        let size = usize::try_from(size).ok().filter(|&size| size > 0);
        let size = size.ok_or("input 'split': expected a positive number")?;
        match extent.div_ceil(size) {
            count if count > MAX_TENSORS => Err(format!("expected {MAX_TENSORS} tensors or fewer, found {count}")),
            _ => Ok((0..extent).step_by(size).map(|at| size.min(extent - at) as i64).collect()),
        }
    }

    fn split(&mut self, name: &str, value: ValueId, axis: i64, sizes: Vec<i64>) -> Result<Vec<ValueId>, String> {
        if sizes.is_empty() && self.extent(value, axis)? == 0 {
            return Ok(Vec::new());
        }
        self.values("Split", name, &[value], Attrs::new().with("axis", axis).with("split", sizes))
    }

    fn extent(&mut self, value: ValueId, axis: i64) -> Result<usize, String> {
        let shape = &self.graph.fact(value).shape;
        let at = usize::try_from(if axis < 0 { axis + shape.len() as i64 } else { axis }).ok();
        if let Some(form) = at.filter(|&at| at < shape.len()).map(|at| self.dependence.extent(value, at))
            && form != Form::Fixed
        {
            let decides = self.decides(form.on());
            return Err(format!(
                "it makes a tensor of each element along axis {axis}, and {decides} says how many there are"
            ));
        }
        let extent = at.and_then(|at| shape.get(at).copied());
        at.into_iter().for_each(|at| self.notes.rely(Relied::Extent(value, at)));
        extent.ok_or_else(|| format!("attribute 'axis': expected an axis of {shape}, found {axis}"))
    }

    fn same_types(&self, values: &[ValueId]) -> Result<(), String> {
        let mut types = values.iter().map(|&value| self.graph.fact(value).dtype);
        let Some(first) = types.next() else { return Ok(()) };
        match types.find(|&other| other != first) {
            Some(other) => Err(format!("expected tensors of one type, found {first} and {other}")),
            None => Ok(()),
        }
    }

    /// A constant position in a sequence of `len` tensors. A negative one counts from the end.
    fn position(&mut self, value: ValueId, len: usize) -> Result<usize, String> {
        let found = self.numbers("position", value)?;
        let at = match found[..] {
            [at] => usize::try_from(if at < 0 { at.saturating_add(len as i64) } else { at }).ok(),
            _ => None,
        };
        at.filter(|&at| at < len)
            .ok_or_else(|| format!("input 'position': expected a place in a sequence of {len}, found {found:?}"))
    }

    /// The integers in an input, which must be a constant.
    pub(super) fn numbers(&mut self, input: &str, value: ValueId) -> Result<Vec<i64>, String> {
        self.notes.rely(Relied::Elements(value));
        let known = self.graph.as_constant(value).filter(|_| self.dependence.elements(value).is_none());
        let Some(constant) = known else { return Err(self.not_constant(input, value)) };
        let tensor = constant.value().map_err(|e| needed(input, &e))?;
        tensor.to_i64().ok_or_else(|| format!("input '{input}': expected integers, found {}", constant.fact))
    }

    /// Adds a node with an operator of the op table and returns its outputs.
    fn values(&mut self, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> Result<Vec<ValueId>, String> {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.add(self.rows[op], name, &inputs, attrs, &[]).map_err(|e| e.to_string())
    }
}
