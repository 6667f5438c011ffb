//! Nodes that find as many as the run decides, such as NonZero.
//!
//! Such a node becomes a row that has room for the most there can be, and says how many were found. A Slice leaves as many as this import is
//! for:
//!
//! ```text
//! x --plimsoll.NonZero--> places [rank, most] --Slice--> places [rank, count]
//!                '------> how many were found: an output of the graph
//! ```
//! [`dynamic_cache::data_dependent`](crate::onnx::dynamic_cache::data_dependent) makes one graph of those for several counts.

use super::*;
use crate::figures::listed;
use crate::onnx::symbolic::Counted;
use crate::onnx::symbolic::{Line, MOST_COUNTS, Number};
use crate::ops::Finder;
use crate::shape::Shape;

/// How many elements the nodes find that find as many as the run decides.
#[derive(Clone, Debug, Default)]
pub(in crate::onnx) struct Counts {
    /// In the order of the nodes.
    pub known: Vec<Known>,
    /// True if what they find must be known while reading.
    pub all_known: bool,
    /// The rows of states, if they grow.
    pub lengths: Option<Lengths>,
}

/// The rows of states that grow.
#[derive(Clone, Debug)]
pub(in crate::onnx) struct Lengths {
    /// The dim.
    pub dim: String,
    /// The most rows before a run.
    pub most: usize,
    /// Some numbers of rows, each with all dims.
    pub samples: Vec<(usize, Vec<(String, usize)>)>,
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
    /// The fewest for which the graph can be read.
    pub least: usize,
    /// The shapes of its inputs where all nodes before it find the most.
    shapes: Vec<Shape>,
}

impl<'a> Importer<'a> {
    /// True if the run decides how many elements a node finds; false if constants do.
    pub(super) fn is_found(&mut self, finder: &Finder, op: &OpDef, inputs: &[Option<ValueId>]) -> Result<bool> {
        if self.counts.all_known {
            return Ok(false);
        }
        for ((own, found), input) in op.inputs.iter().zip(self.rows[finder.row].inputs).zip(inputs) {
            let Some(value) = input.filter(|_| own.shapes() && !found.shapes()) else { continue };
            let value = self.folded(value)?;
            if self.graph.as_constant(value).is_none() || self.dependence.elements(value).is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds the row in the place of a node, and the slices of its outputs.
    pub(super) fn find(
        &mut self,
        finder: &Finder,
        call: &Call<'_, 'a>,
        inputs: Vec<Option<ValueId>>,
        mut attrs: Attrs,
    ) -> Result<Vec<ValueId>> {
        let (number, row) = (self.found.len(), self.rows[finder.row]);
        self.may_count(call, number)?;
        let (mut data, shaping) = self.take_shaping(row, call, inputs, &mut attrs)?;
        let shapes = self.make_room(finder, call, &mut data, number)?;
        let made = self.add_shaped(row, call.name, &data, (attrs.clone(), &shaping), &[])?;
        let (&count, made) = made.split_last().expect("the row says how many it finds");
        let facts: Vec<_> = data.iter().map(|value| value.map(|value| self.graph.fact(value))).collect();
        let axes = (finder.axes)(&crate::op::Call { op: row, attrs: &attrs, inputs: &facts });
        let axes = axes.map_err(|what| call.fail(what))?;
        if self.counts.known.len() == number {
            let along = axes.iter().zip(made).find_map(|(axis, value)| Some(self.graph.fact(*value).shape[(*axis)?]));
            let most = along.expect("one of its outputs is as long as what it finds");
            let first = call.node.output.iter().find(|output| !output.is_empty());
            let name = self.count_of(&first.map_or(call.name.to_owned(), |output| call.scope.name(output)))?;
            let node = call.name.to_owned();
            self.counts.known.push(Known { name, node, most, count: most, least: 0, shapes });
        }
        self.found.push(count);
        self.dependence.ranges.0.push((0, self.counts.known[number].most as i64));
        self.cut(call, number, &axes, made)
    }

    /// Gives the inputs of a row, whose extents depend on what nodes before it found, as many elements as there can be. Returns their shapes
    /// before.
    fn make_room(
        &mut self,
        finder: &Finder,
        call: &Call<'_, 'a>,
        data: &mut [Option<ValueId>],
        number: usize,
    ) -> Result<Vec<Shape>> {
        let shapes: Vec<_> = data.iter().flatten().map(|&value| self.graph.fact(value).shape.clone()).collect();
        if data.iter().flatten().any(|&value| self.dependence.is_uneven(value)) {
            let whole = self.counts.known.get(number).map_or_else(|| shapes.clone(), |known| known.shapes.clone());
            for (slot, whole) in whole.iter().enumerate() {
                let flat = whole.len() > 1 && call.attribute("axis").is_none();
                let filler = (finder.filler)(slot, flat).map_err(|what| call.fail(what))?;
                let value = data[slot].expect("these rows need their inputs");
                data[slot] = Some(self.with_room(call, value, whole, filler)?);
            }
        }
        Ok(shapes)
    }

    /// The outputs of a row, without what stands behind the elements that it found.
    fn cut(
        &mut self,
        call: &Call<'_, 'a>,
        number: usize,
        axes: &[Option<usize>],
        made: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let found = self.counts.known[number].count;
        let ends = Shaping::from(vec![("ends", Forms::All(Form::Line(Line::count(number))))]);
        let mut cut = Vec::with_capacity(made.len());
        for (k, (axis, &value)) in axes.iter().zip(made).enumerate() {
            let Some(axis) = *axis else {
                cut.push(value);
                continue;
            };
            let name = call.node.output.get(k).map_or(String::new(), |output| call.scope.name(output));
            let (slice, node) = (self.rows["Slice"], format!("{}/{axis}", call.name));
            let part = (Attrs::span(axis, 0..found), &ends);
            cut.push(self.add_shaped(slice, &node, &[Some(value)], part, &[&name])?[0]);
        }
        Ok(cut)
    }

    /// Refuses a node that is one too many.
    fn may_count(&self, call: &Call, number: usize) -> Result<()> {
        ensure(number < MOST_COUNTS, || {
            let before = self.counts.known.iter().map(|known| format!("'{}'", known.node));
            let before: Vec<_> = before.take(MOST_COUNTS).collect();
            let what = format!("expected at most {MOST_COUNTS} nodes that find as many as a run decides");
            call.fail(format!("{what}, found more: before it stand {}", listed(before.iter())))
        })
    }

    /// The extents of inputs that grow with the rows of states, by name.
    pub(super) fn grown_inputs(&mut self, inputs: &[&'a ValueInfoProto]) -> Result<HashMap<&'a str, Vec<Form>>> {
        let mut found = HashMap::new();
        let Some(Lengths { most, samples, .. }) = self.counts.lengths.clone() else { return Ok(found) };
        self.dependence.ranges = Ranges(vec![(0, most as i64)]);
        let mut rows: HashMap<&str, Vec<(Counted, Shape)>> = HashMap::new();
        for (length, dims) in &samples {
            let mut counts = Counted::default();
            counts[0] = *length as i64;
            for (name, fact) in bind(inputs, self.model.loops(), dims)? {
                rows.entry(name).or_default().push((counts, fact.shape));
            }
        }
        for (name, shapes) in rows {
            let extent = |axis: usize| shapes.iter().map(|(counts, shape)| (*counts, shape[axis] as i64)).collect();
            let form = |axis| {
                let extents: Vec<_> = extent(axis);
                self.dependence.ranges.fit(&extents, 1)
            };
            found.insert(name, (0..shapes[0].1.len()).map(form).collect());
        }
        Ok(found)
    }

    /// What decides the counts whose bits are set.
    pub(super) fn decides(&self, on: u8) -> String {
        if let Some(lengths) = &self.counts.lengths {
            return format!("the number of rows along dim '{}'", lengths.dim);
        }
        let known = self.counts.known.iter().enumerate().filter(|(number, _)| on & 1 << number != 0);
        let nodes: Vec<_> = known.map(|(_, known)| format!("'{}'", known.node)).collect();
        format!("how many elements node {} finds", nodes.join(" and "))
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

    /// A value with fillers behind its elements, up to a shape.
    fn with_room(&mut self, call: &Call<'_, 'a>, value: ValueId, whole: &Shape, filler: f64) -> Result<ValueId> {
        let own = self.graph.fact(value).shape.clone();
        let fits = own.len() == whole.len() && own.iter().zip(whole.iter()).all(|(own, whole)| own <= whole);
        ensure(fits, || {
            call.fail(format!("its input is {whole} where all before it is found, and {own} where less is"))
        })?;
        let behind = own.iter().zip(whole.iter()).map(|(own, whole)| (whole - own) as i64);
        let pads: Vec<i64> = vec![0; own.len()].into_iter().chain(behind).collect();
        let forms = |axis: usize| {
            let own = Number { form: self.dependence.extent(value, axis), value: own[axis] as f64 };
            self.dependence.ranges.calculate("Sub", Number::fixed(whole[axis] as f64), own).form
        };
        let forms = std::iter::repeat_n(Form::Fixed, own.len()).chain((0..own.len()).map(forms)).collect();
        let attrs = Attrs::new().with("pads", pads).with("constant_value", filler);
        let (name, shaped) =
            (shortened(format!("{}/room", call.name)), Shaping::from(vec![("pads", Forms::Each(forms))]));
        Ok(self.add_shaped(self.rows["Pad"], &name, &[Some(value)], (attrs, &shaped), &[])?[0])
    }
}
