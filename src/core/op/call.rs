//! Reading a call: its facts, its attributes, and the facts of its outputs.

use super::attr::Attr;
use super::fact::{Fact, OpResult};
use super::{Args, Call, Lower};
use crate::dtype::DType;
use crate::expr::Expr;
use crate::shape::Shape;
use std::borrow::Cow;

impl<'a> Call<'a> {
    /// The fact of a required input. Arity is checked before a row is asked.
    pub fn fact(&self, input: usize) -> &'a Fact {
        self.inputs[input].expect("a required input is present: arity is checked first")
    }

    /// The shape of a required input.
    pub fn shape(&self, input: usize) -> &'a Shape {
        &self.fact(input).shape
    }

    /// The element type of a required input.
    pub fn dtype(&self, input: usize) -> DType {
        self.fact(input).dtype
    }

    /// True if an optional input is given.
    pub fn has(&self, input: usize) -> bool {
        self.inputs.get(input).is_some_and(Option::is_some)
    }

    /// An integer attribute, or `default`.
    pub fn int(&self, name: &str, default: i64) -> OpResult<i64> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Int(v)) => Ok(*v),
            Some(Attr::Ints(v)) if v.len() == 1 => Ok(v[0]),
            Some(Attr::Tensor(t)) => match t.to_i64().as_deref() {
                Some(&[v]) => Ok(v),
                _ => Err(format!(
                    "attribute '{name}': expected an int, found {}",
                    Fact::new(t.dtype(), t.shape().clone())
                )),
            },
            Some(other) => Err(format!("attribute '{name}': expected an int, found {}", other.kind())),
        }
    }

    /// A float attribute, or `default`.
    pub fn float(&self, name: &str, default: f64) -> OpResult<f64> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Float(v)) => Ok(*v),
            Some(Attr::Int(v)) => Ok(*v as f64),
            Some(Attr::Floats(v)) if v.len() == 1 => Ok(v[0]),
            Some(Attr::Ints(v)) if v.len() == 1 => Ok(v[0] as f64),
            Some(Attr::Tensor(t)) if t.shape().numel() == 1 => Ok(t.to_f64()[0]),
            Some(other) => Err(format!("attribute '{name}': expected a float, found {}", other.kind())),
        }
    }

    /// A string attribute, or `default`.
    pub fn str(&self, name: &str, default: &'a str) -> OpResult<&'a str> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Str(v)) => Ok(v),
            Some(other) => Err(format!("attribute '{name}': expected a string, found {}", other.kind())),
        }
    }

    /// The value of the word that a string attribute is. The first word is the default.
    pub fn choice<T: Copy>(&self, name: &str, words: &[(&'static str, T)]) -> OpResult<T> {
        let given = self.str(name, words[0].0)?;
        let found = words.iter().find(|(word, _)| *word == given).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let words: Vec<_> = words.iter().map(|(word, _)| *word).filter(|word| !word.is_empty()).collect();
            let (last, others) = words.split_last().expect("a choice has words");
            format!("attribute '{name}': expected {} or {last}, found '{given}'", others.join(", "))
        })
    }

    /// A list of integers, if the attribute is set. A single integer and an integer tensor count as lists, too.
    pub fn ints(&self, name: &str) -> OpResult<Option<Cow<'a, [i64]>>> {
        let list = match self.attrs.get(name) {
            None => return Ok(None),
            Some(Attr::Ints(v)) => Some(Cow::Borrowed(&v[..])),
            Some(Attr::Int(v)) => Some(Cow::Borrowed(std::slice::from_ref(v))),
            Some(Attr::Tensor(t)) => t.to_i64().map(Cow::Owned),
            Some(_) => None,
        };
        let found = self.attrs.get(name).map_or("none", Attr::kind);
        list.map(Some).ok_or_else(|| format!("attribute '{name}': expected ints, found {found}"))
    }

    /// A list of floats, if the attribute is set. A single float, integers and a tensor count as lists, too.
    pub fn floats(&self, name: &str) -> OpResult<Option<Vec<f64>>> {
        match self.attrs.get(name) {
            None => Ok(None),
            Some(Attr::Floats(v)) => Ok(Some(v.clone())),
            Some(Attr::Float(v)) => Ok(Some(vec![*v])),
            Some(Attr::Ints(v)) => Ok(Some(v.iter().map(|&v| v as f64).collect())),
            Some(Attr::Tensor(t)) => Ok(Some(t.to_f64())),
            Some(other) => Err(format!("attribute '{name}': expected floats, found {}", other.kind())),
        }
    }

    /// The axis of `shape` that an integer attribute names. Negative values count from the end.
    pub fn axis(&self, name: &str, default: i64, shape: &Shape) -> OpResult<usize> {
        let axis = self.int(name, default)?;
        shape.axis(axis).ok_or_else(|| format!("attribute '{name}': axis {axis} is outside {shape}"))
    }

    /// The axes of the first input that attribute `axes` lists, if it is set.
    pub fn listed_axes(&self) -> OpResult<Option<Vec<usize>>> {
        let shape = self.shape(0);
        let outside = |axis: i64| format!("attribute 'axes': axis {axis} is outside {shape}");
        let axis = |&axis: &i64| shape.axis(axis).ok_or_else(|| outside(axis));
        self.ints("axes")?.map(|axes| axes.iter().map(axis).collect()).transpose()
    }

    /// Facts of the outputs, as the row infers them.
    pub fn infer(&self) -> OpResult<Vec<Fact>> {
        for (slot, fact) in self.inputs.iter().enumerate() {
            let declared = self.op.inputs.iter().filter(|i| !i.shapes()).nth(slot).or(self.op.inputs.last());
            let name = declared.map_or("", |i| i.name);
            fact.map_or(Ok(()), Fact::countable).map_err(|what| format!("input '{name}': {what}"))?;
        }
        let facts = (self.op.infer)(self)?;
        facts.iter().try_for_each(Fact::countable).map_err(|what| format!("the output {what}"))?;
        if let Lower::Const = self.op.lower {
            facts
                .iter()
                .try_for_each(Fact::makeable)
                .map_err(|what| format!("{what}: let an input of the model hold it"))?;
        }
        Ok(facts)
    }

    /// The axes of a reduction, ascending: attribute `axes`. If that is absent or empty, all axes, or none with
    /// `noop_with_empty_axes`.
    pub fn reduced_axes(&self) -> OpResult<Vec<usize>> {
        let shape = self.shape(0);
        let mut axes = match self.listed_axes()? {
            Some(axes) if !axes.is_empty() => axes,
            _ if self.int("noop_with_empty_axes", 0)? != 0 => Vec::new(),
            _ => (0..shape.len()).collect(),
        };
        axes.sort_unstable();
        axes.dedup();
        Ok(axes)
    }

    /// The expression of an elementwise row over this call's inputs.
    pub(super) fn map(&self, map: fn(&Args, &Call) -> Expr) -> Expr {
        let args: Vec<_> = self.inputs.iter().enumerate().map(|(i, f)| f.map(|f| Expr::input(i, f.dtype))).collect();
        map(&Args(&args), self)
    }
}
