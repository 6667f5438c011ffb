//! Sequences of tensors. How many tensors one has and which of them is taken follows from shapes and constants, or else no plan could
//! be made: so a sequence is a list of the graph's values, and nothing of it is in the graph.

use super::{Importer, needed};
use crate::constant::Constant;
use crate::op::{Attr, Attrs, ValueId};
use crate::tensor::Tensor;
use std::rc::Rc;

/// What a name stands for.
#[derive(Clone)]
pub(super) enum Named {
    /// An optional input that is left out.
    Nothing,
    Tensor(ValueId),
    Sequence(Rc<[ValueId]>),
}

impl Named {
    /// The value that an input called so has, if it has one.
    pub(super) fn tensor(self, input: &str) -> Result<Option<ValueId>, String> {
        match self {
            Named::Nothing => Ok(None),
            Named::Tensor(value) => Ok(Some(value)),
            Named::Sequence(_) => Err(format!("expected a tensor, found the sequence '{input}'")),
        }
    }
}

/// A sequence holds no more tensors.
const MAX_TENSORS: usize = 1 << 13;

/// Operators that take or give sequences.
pub(super) const OPERATORS: [&str; 8] = [
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SplitToSequence",
];

impl Importer<'_> {
    /// The output of a node with one of [`OPERATORS`]; `name` is that of its values.
    pub(super) fn sequence(&mut self, op: &str, name: &str, inputs: &[Named], attrs: &Attrs) -> Result<Named, String> {
        let int = |key: &str| match attrs.get(key) {
            None => Ok(None),
            Some(&Attr::Int(value)) => Ok(Some(value)),
            Some(_) => Err(format!("attribute '{key}': expected an integer")),
        };
        let sequence = |at: usize| match inputs.get(at) {
            Some(Named::Sequence(values)) => Ok(values.to_vec()),
            _ => Err(format!("input {at}: expected a sequence")),
        };
        let tensor = |at: usize| inputs.get(at).cloned().map_or(Ok(None), |input| input.tensor(&format!("input {at}")));
        let required = |at: usize| tensor(at)?.ok_or_else(|| format!("input {at} is missing"));
        match op {
            "SequenceEmpty" => Ok(Named::Sequence(Rc::new([]))),
            "SequenceConstruct" => {
                let values = (0..inputs.len()).map(required).collect::<Result<Vec<_>, _>>()?;
                self.same_types(&values)?;
                Ok(Named::Sequence(values.into()))
            }
            "SequenceAt" => {
                let values = sequence(0)?;
                Ok(Named::Tensor(values[self.position(required(1)?, values.len())?]))
            }
            "SequenceErase" => {
                let mut values = sequence(0)?;
                let at = match tensor(1)? {
                    Some(position) => self.position(position, values.len())?,
                    None => values.len().checked_sub(1).ok_or("the sequence is empty")?,
                };
                values.remove(at);
                Ok(Named::Sequence(values.into()))
            }
            "SequenceInsert" => {
                let (mut values, value) = (sequence(0)?, required(1)?);
                let at = match tensor(2)? {
                    // Behind the last is a place, too, but not from the end.
                    Some(position) => match self.numbers("position", position)?[..] {
                        [at] if at == values.len() as i64 => values.len(),
                        _ => self.position(position, values.len())?,
                    },
                    None => values.len(),
                };
                values.insert(at, value);
                if values.len() > MAX_TENSORS {
                    return Err(format!("expected a sequence of {MAX_TENSORS} tensors or fewer"));
                }
                self.same_types(&[values[0], *values.last().expect("one was inserted"), value])?;
                Ok(Named::Sequence(values.into()))
            }
            "SequenceLength" => {
                let count = sequence(0)?.len() as i64;
                let count = Tensor::from_i64([], &[count]).map_err(|e| e.to_string())?;
                Ok(Named::Tensor(self.graph.constant(Constant::new(name, count))))
            }
            "ConcatFromSequence" => {
                let values = sequence(0)?;
                if values.is_empty() {
                    return Err("the sequence is empty: expected tensors to put together".into());
                }
                let axis = int("axis")?.ok_or("attribute 'axis' is missing")?;
                if int("new_axis")?.unwrap_or(0) != 0 {
                    return self.together(name, values, axis).map(Named::Tensor);
                }
                Ok(Named::Tensor(self.values("Concat", name, &values, Attrs::new().with("axis", axis))?[0]))
            }
            _ => {
                let (data, axis) = (required(0)?, int("axis")?.unwrap_or(0));
                let values = match tensor(1)? {
                    Some(split) if !self.graph.fact(split).shape.is_empty() => {
                        self.split(name, data, axis, self.numbers("split", split)?)?
                    }
                    split => {
                        let size = split.map_or(Ok(1), |split| self.numbers("split", split).map(|n| n[0]))?;
                        match (int("keepdims")?.unwrap_or(1), size) {
                            // Exporters write an unbind with its size of 1, and mean what is said of no size.
                            (0, 1) => self.apart(name, data, axis)?,
                            _ => self.split(name, data, axis, self.sizes(data, axis, size)?)?,
                        }
                    }
                };
                Ok(Named::Sequence(values.into()))
            }
        }
    }

    /// The parts of a tensor at each place along an axis, without the axis.
    pub(super) fn apart(&mut self, name: &str, value: ValueId, axis: i64) -> Result<Vec<ValueId>, String> {
        let sizes = self.sizes(value, axis, 1)?;
        let parts = self.split(name, value, axis, sizes)?;
        parts
            .into_iter()
            .enumerate()
            .map(|(i, part)| self.turn("Squeeze", &format!("{name}.{i}"), part, axis))
            .collect()
    }

    /// Tensors along an axis of their own.
    pub(super) fn together(&mut self, name: &str, values: Vec<ValueId>, axis: i64) -> Result<ValueId, String> {
        let raised = values.into_iter().enumerate();
        let raised = raised.map(|(i, value)| self.turn("Unsqueeze", &format!("{name}.{i}"), value, axis));
        let raised = raised.collect::<Result<Vec<_>, _>>()?;
        Ok(self.values("Concat", name, &raised, Attrs::new().with("axis", axis))?[0])
    }

    fn turn(&mut self, op: &str, name: &str, value: ValueId, axis: i64) -> Result<ValueId, String> {
        Ok(self.values(op, name, &[value], Attrs::new().with("axes", vec![axis]))?[0])
    }

    /// Those of the parts of an axis, of which the last may be smaller.
    fn sizes(&self, value: ValueId, axis: i64, size: i64) -> Result<Vec<i64>, String> {
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

    fn extent(&self, value: ValueId, axis: i64) -> Result<usize, String> {
        let shape = &self.graph.fact(value).shape;
        let at = usize::try_from(if axis < 0 { axis + shape.len() as i64 } else { axis }).ok();
        let extent = at.and_then(|at| shape.get(at).copied());
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

    /// The place in a sequence of `len` tensors that a constant says, from the end where it is negative.
    fn position(&self, value: ValueId, len: usize) -> Result<usize, String> {
        let found = self.numbers("position", value)?;
        let at = match found[..] {
            [at] => usize::try_from(if at < 0 { at.saturating_add(len as i64) } else { at }).ok(),
            _ => None,
        };
        at.filter(|&at| at < len)
            .ok_or_else(|| format!("input 'position': expected a place in a sequence of {len}, found {found:?}"))
    }

    /// What an input says that must be known before the run.
    pub(super) fn numbers(&self, input: &str, value: ValueId) -> Result<Vec<i64>, String> {
        let constant = self.graph.as_constant(value).ok_or_else(|| self.not_constant(input, value))?;
        let tensor = constant.value().map_err(|e| needed(input, &e))?;
        tensor.to_i64().ok_or_else(|| format!("input '{input}': expected integers, found {}", constant.fact))
    }

    /// The outputs of a row's node.
    fn values(&mut self, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> Result<Vec<ValueId>, String> {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.add(self.rows[op], name, &inputs, attrs, &[]).map_err(|e| e.to_string())
    }
}
