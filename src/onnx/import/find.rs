//! Nodes that find as many as the run decides, such as NonZero.
//!
//! Such a node becomes a row that has room for the most there can be, and says how many were found. A Slice leaves as many as this import is
//! for:
//!
//! ```text
//! x --plimsoll.NonZero--> places [rank, most] --Slice--> places [rank, count]
//!                '------> how many were found: an output of the graph
//! ```
//! [`grow::counted`](crate::onnx::grow::counted) imports a model for several counts, and makes one graph of them.

use super::*;
use crate::ops::{counted_axes, finder};
use crate::shape::Shape;

/// How many elements the nodes find that find as many as the run decides.
#[derive(Clone, Debug, Default)]
pub(in crate::onnx) struct Counts {
    /// In the order of the nodes.
    pub known: Vec<Known>,
    /// True if what they find must be known while reading.
    pub all_known: bool,
}

/// How many elements a node finds.
#[derive(Clone, Debug)]
pub(in crate::onnx) struct Known {
    /// The output of the graph that says so after a run.
    pub name: String,
    /// The node.
    pub node: String,
    /// The most that it can find.
    pub most: usize,
    /// As many as it finds in this import.
    pub count: usize,
    /// The shapes of its inputs where all nodes before it find the most.
    shapes: Vec<Shape>,
}

impl<'a> Importer<'a> {
    /// The row for a node whose operator finds as many as the run decides; none if constants decide.
    pub(super) fn finder(&mut self, op: &OpDef, inputs: &[Option<ValueId>]) -> Result<Option<&'static OpDef>> {
        let Some(row) = finder(op.name).filter(|_| !self.counts.all_known) else { return Ok(None) };
        let row = self.rows[row];
        for ((own, found), input) in op.inputs.iter().zip(row.inputs).zip(inputs) {
            let Some(value) = input.filter(|_| own.shapes() && !found.shapes()) else { continue };
            let value = self.folded(value)?;
            if self.graph.as_constant(value).is_none() {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// Adds the row in the place of a node, and the slices of its outputs.
    pub(super) fn find(
        &mut self,
        row: &'static OpDef,
        call: &Call<'_, 'a>,
        inputs: Vec<Option<ValueId>>,
        mut attrs: Attrs,
    ) -> Result<Vec<ValueId>> {
        let mut data = self.take_shaping(row, call, inputs, &mut attrs)?;
        let number = self.found.len();
        let shapes: Vec<_> = data.iter().flatten().map(|&value| self.graph.fact(value).shape.clone()).collect();
        if self.found.iter().any(|count| data.iter().flatten().any(|&value| self.depends(value, *count))) {
            let whole = self.counts.known.get(number).map_or_else(|| shapes.clone(), |known| known.shapes.clone());
            for (slot, whole) in whole.iter().enumerate() {
                let filler = self.filler(row, call, (slot, whole))?;
                let value = data[slot].expect("these rows need their inputs");
                data[slot] = Some(self.with_room(call, value, whole, filler)?);
            }
        }
        let made = self.add(row, call.name, &data, attrs, &[])?;
        let (&count, made) = made.split_last().expect("the row says how many it finds");
        let axes = self.graph.with_call(count.node, counted_axes).expect("it is an operator");
        let axes = axes.map_err(|what| call.fail(what))?;
        let along = axes.iter().zip(made).find_map(|(axis, value)| Some(self.graph.fact(*value).shape[(*axis)?]));
        let most = along.expect("one of its outputs is as long as what it finds");
        let outputs: Vec<_> = call.node.output.iter().map(|o| call.scope.name(o)).collect();
        if self.counts.known.len() == number {
            let first =
                call.node.output.iter().find(|o| !o.is_empty()).map_or(call.name.to_owned(), |o| call.scope.name(o));
            let known = Known { name: self.count_of(&first)?, node: call.name.to_owned(), most, count: most, shapes };
            self.counts.known.push(known);
        }
        self.found.push(count);
        let found = self.counts.known[number].count;
        let mut cut = Vec::with_capacity(made.len());
        for ((axis, &value), name) in
            axes.into_iter().zip(made).zip(outputs.iter().map(String::as_str).chain(std::iter::repeat("")))
        {
            let Some(axis) = axis else {
                cut.push(value);
                continue;
            };
            let part = Attrs::span(axis, 0..found);
            cut.push(self.add(self.rows["Slice"], &format!("{}/{axis}", call.name), &[Some(value)], part, &[name])?[0]);
        }
        Ok(cut)
    }

    /// A name for how many were found, which no other output has.
    fn count_of(&self, output: &str) -> Result<String> {
        let outputs = &self.model.graph()?.output;
        let mut name = shortened(format!("{output}.count"));
        while outputs.iter().any(|o| o.name == name) || self.counts.known.iter().any(|known| known.name == name) {
            name.push('_');
        }
        Ok(name)
    }

    /// True if a value is computed from what a node found.
    fn depends(&self, value: ValueId, count: ValueId) -> bool {
        let (mut seen, mut work) = (HashSet::new(), vec![value.node]);
        while let Some(node) = work.pop() {
            if node == count.node {
                return true;
            }
            if seen.insert(node) {
                work.extend(self.graph.operands(node).into_iter().flatten().map(|operand| operand.node));
            }
        }
        false
    }

    /// The element of which a row finds none, to stand behind those that were found before.
    fn filler(&self, row: &OpDef, call: &Call<'_, 'a>, (slot, whole): (usize, &Shape)) -> Result<f64> {
        let flat = whole.len() > 1 && call.attribute("axis").is_none();
        match row.name {
            "plimsoll.NonMaxSuppression" if slot == 1 => Ok(f64::NEG_INFINITY),
            "plimsoll.Unique" => {
                Err(call.fail("it looks among elements that a node before it found: expected elements that are given"))
            }
            "plimsoll.Compress" if slot == 0 && flat => {
                Err(call.fail("it keeps elements of all axes of what a node before it found: expected an axis"))
            }
            _ => Ok(0.0),
        }
    }

    /// A value with fillers behind its elements, up to a shape.
    fn with_room(&mut self, call: &Call<'_, 'a>, value: ValueId, whole: &Shape, filler: f64) -> Result<ValueId> {
        let own = self.graph.fact(value).shape.clone();
        let fits = own.len() == whole.len() && own.iter().zip(whole.iter()).all(|(own, whole)| own <= whole);
        ensure(fits, || {
            call.fail(format!("its input is {whole} where all before it is found, and {own} where less is"))
        })?;
        let behind = own.iter().zip(whole.iter()).map(|(own, whole)| (whole - own) as i64);
        let pads: Vec<i64> = vec![0; own.len()].into_iter().chain(behind).collect();
        let attrs = Attrs::new().with("pads", pads).with("constant_value", filler);
        self.step(call, "room", "Pad", &[value], attrs)
    }
}
