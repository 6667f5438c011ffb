//! How extents and constants depend on counts, node by node.
//!
//! ```text
//! places [rank, count] --Shape--> [rank, count] --Gather--> count --Equal 3--> otherwise: the run decides
//!                                                              '---Greater -1--> true for all counts
//! ```

use super::*;
use crate::onnx::symbolic::{Counted, Form, Forms, Number, Ranges, Varying};
use crate::op::{Call as OpCall, Eval, Lower, NodeId, OpResult};
use crate::shape::{Access, Shape};
use std::sync::Arc;

/// The most elements of a constant whose forms are told apart.
const MOST_ELEMENTS: usize = 1 << 16;

/// A value that depends on counts.
#[derive(Clone, Debug)]
pub(super) struct Varies {
    extents: Vec<Form>,
    /// The elements, if they are known.
    elements: Option<Forms>,
}

/// The forms of the numbers in attributes, by name.
pub(super) type Shaped = Vec<(&'static str, Forms)>;

/// What depends on counts.
#[derive(Clone, Default)]
pub(super) struct Dependence {
    pub ranges: Ranges,
    values: HashMap<ValueId, Varies>,
    constants: Varying,
}

/// An operand of a node.
struct Operand<'a> {
    fact: &'a Fact,
    extents: Vec<Form>,
    elements: Forms,
    constant: Option<&'a Arc<Constant>>,
}

impl Operand<'_> {
    fn on(&self) -> u8 {
        self.extents.iter().fold(self.elements.on(), |on, form| on | form.on())
    }

    /// True if its extents are the same for all counts.
    fn is_even(&self) -> bool {
        self.extents.iter().all(|form| *form == Form::Fixed)
    }

    /// The extents other than one.
    fn outline(&self) -> Vec<(Form, usize)> {
        outline(&self.extents, &self.fact.shape)
    }
}

fn outline(forms: &[Form], shape: &Shape) -> Vec<(Form, usize)> {
    let extents = forms.iter().copied().zip(shape.iter().copied());
    extents.filter(|extent| *extent != (Form::Fixed, 1)).collect()
}

/// A node, with the forms of what it reads.
struct Reading<'a> {
    ranges: &'a Ranges,
    call: OpCall<'a>,
    operands: Vec<Option<Operand<'a>>>,
    shaped: &'a Shaped,
    on: u8,
}

impl Dependence {
    /// Notes the extents of a value that is no constant.
    pub fn note(&mut self, value: ValueId, extents: Vec<Form>) {
        if extents.iter().any(|form| *form != Form::Fixed) {
            self.values.insert(value, Varies { extents, elements: None });
        }
    }

    /// The forms of a constant's elements; `None` if none depends on counts.
    pub fn elements(&self, value: ValueId) -> Option<&Forms> {
        self.values.get(&value)?.elements.as_ref().filter(|forms| forms.on() != 0)
    }

    /// True if an extent of a value depends on counts.
    pub fn is_uneven(&self, value: ValueId) -> bool {
        self.extents(value).is_some_and(|extents| extents.iter().any(|form| *form != Form::Fixed))
    }

    /// The form of an extent.
    pub fn extent(&self, value: ValueId, axis: usize) -> Form {
        self.values.get(&value).map_or(Form::Fixed, |varies| varies.extents[axis])
    }

    /// The forms of the extents of a value that depends on counts.
    pub fn extents(&self, value: ValueId) -> Option<&[Form]> {
        self.values.get(&value).map(|varies| &varies.extents[..])
    }

    /// The most that an element of a constant may be, if what it is folded from says so.
    pub fn most(&self, constant: &Arc<Constant>, left: &mut usize) -> Option<i64> {
        *left = left.checked_sub(1)?;
        let (forms, fact) = (self.constants.of(constant), &constant.fact);
        if fact.shape.numel() <= MOST_ELEMENTS && forms.is_none_or(|forms| forms.others() == 0) {
            let values = constant.value().ok()?.to_f64();
            let form = |k| forms.map_or(Form::Fixed, |forms| forms.at(k));
            let most = values.into_iter().enumerate().map(|(k, value)| Number { form: form(k), value });
            return most.map(|number| self.ranges.most(&number)).collect::<Option<Vec<_>>>()?.into_iter().max();
        }
        let (op, _, inputs, _) = constant.derivation()?;
        let mut of = |input: &Option<Arc<Constant>>| self.most(input.as_ref()?, left);
        match op.name {
            "Min" => inputs.iter().filter_map(of).min(),
            "Max" => inputs.iter().map(of).collect::<Option<Vec<_>>>()?.into_iter().max(),
            "Where" => inputs[1..].iter().map(of).collect::<Option<Vec<_>>>()?.into_iter().max(),
            "Cast" | "Gather" => of(&inputs[0]),
            _ if matches!(op.lower, Lower::View(_)) => of(&inputs[0]),
            _ => None,
        }
    }

    fn operand<'g>(&self, graph: &'g Graph, value: ValueId) -> Operand<'g> {
        let (fact, constant) = (graph.fact(value), graph.as_constant(value));
        let varies = self.values.get(&value);
        Operand {
            fact,
            extents: varies.map_or_else(|| vec![Form::Fixed; fact.shape.len()], |varies| varies.extents.clone()),
            elements: varies.and_then(|varies| varies.elements.clone()).unwrap_or(Forms::All(Form::Fixed)),
            constant,
        }
    }

    /// How the values of a node depend on counts; none if they do not.
    ///
    /// # Errors
    /// When elements are needed and cannot be fetched; when the place where a Slice begins follows no line.
    pub fn read(&self, graph: &Graph, node: NodeId, shaped: &Shaped) -> Result<Vec<Varies>> {
        let inputs = graph.operands(node);
        let is_fixed = shaped.iter().all(|(_, forms)| forms.on() == 0);
        if is_fixed && inputs.iter().flatten().all(|value| !self.values.contains_key(value)) {
            return Ok(Vec::new());
        }
        let operands: Vec<_> = inputs.iter().map(|value| value.map(|value| self.operand(graph, value))).collect();
        let on = operands.iter().flatten().fold(0, |on, operand| on | operand.on());
        let on = shaped.iter().fold(on, |on, (_, forms)| on | forms.on());
        let facts: Vec<_> = operands.iter().map(|operand| operand.as_ref().map(|operand| operand.fact)).collect();
        let own = graph.node(node);
        let op = own.op().expect("an operator was added");
        let call = OpCall { op, attrs: &own.attrs, inputs: &facts };
        let reading = Reading { ranges: &self.ranges, call, operands, shaped, on };
        let extents = reading.extents().map_err(|what| own.error(what))?;
        let known = matches!(op.lower, Lower::Const) || reading.operands.iter().flatten().all(|o| o.constant.is_some());
        let mut all = Vec::with_capacity(own.outputs.len());
        for (port, (output, extents)) in own.outputs.iter().zip(extents).enumerate() {
            let elements = if known { Some(reading.elements(port, &output.fact, &extents)?) } else { None };
            all.push(Varies { extents, elements });
        }
        Ok(all)
    }

    /// Notes the values that stand for a node's.
    pub fn keep(&mut self, graph: &Graph, values: &[ValueId], varies: Vec<Varies>) {
        for (&value, mut varies) in values.iter().zip(varies) {
            match (graph.as_constant(value), &varies.elements) {
                (Some(constant), Some(forms)) if forms.on() != 0 => self.constants.note(constant, forms.clone()),
                _ => varies.elements = None,
            }
            if varies.elements.is_some() || varies.extents.iter().any(|form| *form != Form::Fixed) {
                self.values.insert(value, varies);
            }
        }
    }

    /// The constants that depend on counts. The graph is swept.
    ///
    /// # Errors
    /// When an extent of a value follows no line.
    pub fn finish(self, graph: &Graph) -> Result<Varying> {
        for id in graph.order()? {
            for (port, output) in graph.node(id).outputs.iter().enumerate() {
                let value = ValueId { node: id, port: port as u32 };
                let extents = self.extents(value).unwrap_or_default();
                if let Some(axis) = extents.iter().position(|form| matches!(form, Form::Other(_))) {
                    let what = "expected an extent that grows by the same number of elements each time";
                    return Err(graph.node(id).error(format!(
                        "axis {axis} of its value, {}, depends on what the run decides: {what}",
                        output.fact
                    )));
                }
            }
        }
        Ok(self.constants)
    }
}

impl Operand<'_> {
    /// The elements of a constant with their forms; `None` if it is no constant, or has many.
    fn numbers(&self) -> Result<Option<Vec<Number>>> {
        let Some(constant) = self.constant.filter(|constant| constant.fact.shape.numel() <= MOST_ELEMENTS) else {
            return Ok(None);
        };
        let values = constant.value()?.to_f64();
        Ok(Some(values.into_iter().enumerate().map(|(k, value)| Number { form: self.elements.at(k), value }).collect()))
    }
}

impl Reading<'_> {
    /// The forms of the numbers in an attribute.
    fn forms(&self, name: &str) -> Forms {
        let found = self.shaped.iter().find(|(shaped, _)| *shaped == name);
        found.map_or(Forms::All(Form::Fixed), |(_, forms)| forms.clone())
    }

    /// The numbers in an attribute.
    fn numbers(&self, name: &str) -> OpResult<Option<Vec<Number>>> {
        let forms = self.forms(name);
        let number = |(k, value)| Number { form: forms.at(k), value };
        let values = match self.call.attrs.get(name) {
            Some(Attr::Int(value)) => Some(vec![*value as f64]),
            _ => self.call.floats(name)?,
        };
        Ok(values.map(|values| values.into_iter().enumerate().map(number).collect()))
    }

    /// The forms of the extents of each value.
    fn extents(&self) -> OpResult<Vec<Vec<Form>>> {
        match self.call.op.name {
            "Slice" => self.sliced().map(|extents| vec![extents]),
            "Range" => self.counted().map(|extent| vec![vec![extent]]),
            _ => self.fitted(),
        }
    }

    /// The extents, as they are inferred for some counts.
    fn fitted(&self) -> OpResult<Vec<Vec<Form>>> {
        let own = self.call.infer()?;
        let mut found: Vec<Vec<Vec<(Counted, i64)>>> =
            own.iter().map(|fact| vec![Vec::new(); fact.shape.len()]).collect();
        for counts in self.ranges.samples() {
            // Other counts may not suit the node: an import for these says so.
            let Some(facts) = self.facts_at(&counts) else { continue };
            if facts.len() != own.len() || facts.iter().zip(&own).any(|(a, b)| a.shape.len() != b.shape.len()) {
                let others = |fact: &Fact| vec![Form::Other(self.on); fact.shape.len()];
                return Ok(own.iter().map(others).collect());
            }
            for (found, fact) in found.iter_mut().zip(&facts) {
                for (found, &extent) in found.iter_mut().zip(fact.shape.iter()) {
                    found.push((counts, extent as i64));
                }
            }
        }
        let fit = |axes: Vec<Vec<_>>| axes.into_iter().map(|values| self.ranges.fit(&values, self.on)).collect();
        Ok(found.into_iter().map(fit).collect())
    }

    /// The facts of the node's values for these counts.
    fn facts_at(&self, counts: &Counted) -> Option<Vec<Fact>> {
        let mut inputs = Vec::with_capacity(self.operands.len());
        for operand in &self.operands {
            let Some(Operand { fact, extents, .. }) = operand else {
                inputs.push(None);
                continue;
            };
            let extent = |(form, &own): (&Form, &usize)| usize::try_from(form.at_counts(own as i64, counts)?).ok();
            let shape = extents.iter().zip(fact.shape.iter()).map(extent).collect::<Option<Shape>>()?;
            inputs.push(Some(Fact::new(fact.dtype, shape)));
        }
        let mut attrs = self.call.attrs.clone();
        for (name, forms) in self.shaped {
            let attr = forms.at_counts(attrs.get(name)?, counts)?;
            attrs.set(name, attr);
        }
        let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
        OpCall { op: self.call.op, attrs: &attrs, inputs: &inputs }.infer().ok()
    }

    /// The extents of a Slice, as [`ops::spans`] has them.
    fn sliced(&self) -> OpResult<Vec<Form>> {
        let data = self.operands[0].as_ref().ok_or("it slices nothing")?;
        let shape = &data.fact.shape;
        let mut extents = data.extents.clone();
        let lists = ["starts", "ends", "axes", "steps"].map(|name| self.numbers(name));
        let [Some(starts), Some(ends), axes, steps] =
            [lists[0].clone()?, lists[1].clone()?, lists[2].clone()?, lists[3].clone()?]
        else {
            return Ok(extents);
        };
        let unknown = Number { form: Form::Other(self.on), value: 0.0 };
        for (k, (start, end)) in starts.iter().zip(&ends).enumerate() {
            let listed = |list: &Option<Vec<Number>>, default: f64| {
                let number = list.as_ref().map_or(Some(Number::fixed(default)), |list| list.get(k).copied());
                number.filter(|number| number.form == Form::Fixed).map(|number| number.value)
            };
            let what = "its axes and steps depend on what the run decides: expected numbers that are known";
            let (axis, step) = listed(&axes, k as f64).zip(listed(&steps, 1.0)).ok_or(what)?;
            let axis = shape.axis(axis as i64).ok_or("an axis is outside")?;
            let extent = Number { form: data.extents[axis], value: shape[axis] as f64 };
            let calc = |op, a, b| self.ranges.calculate(op, a, b);
            let from_end = |at: Number| match self.ranges.is_negative(&at) {
                Some(false) => at,
                Some(true) => calc("Add", at, extent),
                None => unknown,
            };
            let last = calc("Sub", extent, Number::fixed(1.0));
            let between = |at, low: f64, high| calc("Max", calc("Min", at, high), Number::fixed(low));
            let (first, distance) = if step > 0.0 {
                let [start, end] = [start, end].map(|at| between(from_end(*at), 0.0, extent));
                (start, calc("Sub", end, start))
            } else {
                let start = from_end(*start);
                let is_last = start.line().is_some() && start.line() == last.line();
                // A Slice of nothing begins at 0, which is not the last element.
                let is_empty = self.ranges.is_negative(&last) != Some(false);
                let start = match (is_last, is_empty) {
                    (true, _) => start,
                    (false, true) => unknown,
                    (false, false) => between(start, 0.0, last),
                };
                (start, calc("Sub", start, between(from_end(*end), -1.0, last)))
            };
            if let (Form::Other(_), true) = (first.form, self.on != 0) {
                return Err(format!(
                    "where it begins along axis {axis} depends on what the run decides: expected a place that moves by the same number of elements each time"
                ));
            }
            let distance = calc("Max", distance, Number::fixed(0.0));
            let rounded = calc("Add", distance, Number::fixed(step.abs() - 1.0));
            extents[axis] = calc("Div", rounded, Number::fixed(step.abs())).form;
        }
        Ok(extents)
    }

    /// The extent of a Range.
    fn counted(&self) -> OpResult<Form> {
        let list = |name| self.numbers(name).map(|numbers| numbers.and_then(|numbers| numbers.first().copied()));
        let (Some(start), Some(limit), Some(delta)) = (list("start")?, list("limit")?, list("delta")?) else {
            return Ok(Form::Other(self.on));
        };
        if delta.form != Form::Fixed || delta.value.fract() != 0.0 || delta.value == 0.0 {
            return Ok(Form::Other(self.on));
        }
        let calc = |op, a, b| self.ranges.calculate(op, a, b);
        let (from, to) = if delta.value > 0.0 { (start, limit) } else { (limit, start) };
        let (distance, step) = (calc("Max", calc("Sub", to, from), Number::fixed(0.0)), delta.value.abs());
        Ok(calc("Div", calc("Add", distance, Number::fixed(step - 1.0)), Number::fixed(step)).form)
    }

    /// The forms of the elements of a value that is known.
    fn elements(&self, port: usize, fact: &Fact, extents: &[Form]) -> Result<Forms> {
        let others = || Ok(Forms::All(Form::Other(self.on)));
        let op = self.call.op;
        match op.name {
            "Shape" => return Ok(Forms::Each(self.shape_forms())),
            "Size" => {
                let Some(Some(data)) = self.operands.first() else { return others() };
                let extents = data.extents.iter().zip(data.fact.shape.iter());
                let extents: Vec<_> = extents.map(|(&form, &extent)| Number { form, value: extent as f64 }).collect();
                return Ok(Forms::All(self.ranges.product(&extents)));
            }
            "Range" => return Ok(self.range_forms(fact).unwrap_or(Forms::All(Form::Other(self.on)))),
            "ConstantOfShape" | "EyeLike" => return Ok(Forms::All(Form::Fixed)),
            _ => {}
        }
        let fixed = self.operands.iter().flatten().all(|operand| operand.elements.on() == 0);
        let many = fact.shape.numel() > MOST_ELEMENTS
            || self.operands.iter().flatten().any(|operand| operand.fact.shape.numel() > MOST_ELEMENTS);
        let unshaped = self.shaped.is_empty();
        if matches!(op.lower, Lower::Map(_)) && unshaped {
            return match fixed {
                true => Ok(Forms::All(Form::Fixed)),
                false if many => others(),
                false => self.mapped(fact),
            };
        }
        if matches!(op.eval, Eval::Move(_)) {
            return match self.keeps_places(fact, extents) {
                false => others(),
                true if fixed => Ok(Forms::All(Form::Fixed)),
                true if many => others(),
                true => self.moved(port),
            };
        }
        if matches!(op.name, "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin") && unshaped && !many {
            return Ok(self.reduced(fact)?.unwrap_or(Forms::All(Form::Other(self.on))));
        }
        others()
    }

    /// The forms of what Shape gives: those of the extents that it takes.
    fn shape_forms(&self) -> Vec<Form> {
        let Some(Some(data)) = self.operands.first() else { return Vec::new() };
        // Each extent is its number, so the result says which are taken.
        let numbered = Fact::new(data.fact.dtype, (0..data.fact.shape.len()).map(|axis| axis + 1).collect::<Shape>());
        let taken = OpCall { inputs: &[Some(&numbered)], ..self.call }.compute(&[None]);
        let taken = taken.ok().and_then(|taken| taken[0].to_i64()).unwrap_or_default();
        taken.into_iter().map(|number| data.extents[number as usize - 1]).collect()
    }

    fn range_forms(&self, fact: &Fact) -> Option<Forms> {
        let number = |name| self.numbers(name).ok()??.first().copied();
        let (start, delta) = (number("start")?, number("delta")?);
        if (start.form, delta.form) == (Form::Fixed, Form::Fixed) {
            return Some(Forms::All(Form::Fixed));
        }
        if fact.shape.numel() > MOST_ELEMENTS || delta.form != Form::Fixed {
            return None;
        }
        let step = |k: usize| Number::fixed(k as f64 * delta.value);
        let form = |k| self.ranges.apply("Add", &[start, step(k)], fact.dtype);
        Some(Forms::Each((0..fact.shape.numel()).map(form).collect()))
    }

    /// The forms of what an elementwise operator computes.
    fn mapped(&self, fact: &Fact) -> Result<Forms> {
        let mut columns = Vec::with_capacity(self.operands.len());
        for operand in self.operands.iter().flatten() {
            let Some(numbers) = operand.numbers()? else { return Ok(Forms::All(Form::Other(self.on))) };
            let access = Access::contiguous(operand.fact.shape.clone()).broadcast(&fact.shape);
            columns.push((numbers, access.elements().collect::<Vec<_>>()));
        }
        let form = |k: usize| {
            let x: Vec<_> = columns.iter().map(|(numbers, places)| numbers[places[k] as usize]).collect();
            self.ranges.apply(self.call.op.name, &x, fact.dtype)
        };
        Ok(Forms::Each((0..fact.shape.numel()).map(form).collect()))
    }

    /// True if an operator that moves elements takes the one at each place from the same place for all counts.
    fn keeps_places(&self, fact: &Fact, extents: &[Form]) -> bool {
        let even = self.operands.iter().flatten().all(Operand::is_even);
        let data = self.operands[0].as_ref();
        let grown = |operand: &Operand| outline(extents, &fact.shape) == operand.outline();
        let fixed_indices = || {
            let numbers = self.operands.get(1).and_then(Option::as_ref).map(Operand::numbers);
            let Some(Ok(Some(numbers))) = numbers else { return false };
            numbers.iter().all(|number| number.form == Form::Fixed && (even || number.value >= 0.0))
        };
        match self.call.op.name {
            "Identity" | "Transpose" => true,
            "Unsqueeze" | "Squeeze" | "Flatten" | "Reshape" => {
                even && self.shaped.is_empty() || data.is_some_and(grown)
            }
            "Expand" => true,
            "Gather" | "GatherElements" => fixed_indices(),
            "GatherND" => fixed_indices() && data.is_some_and(Operand::is_even),
            "Concat" | "Split" | "Tile" | "Slice" => even && self.shaped.is_empty(),
            _ => false,
        }
    }

    /// The forms of what an operator moves that takes each element from a place.
    fn moved(&self, port: usize) -> Result<Forms> {
        let others = || Ok(Forms::All(Form::Other(self.on)));
        let joins = self.call.op.inputs.last().is_some_and(|input| input.arity == Arity::Variadic);
        let (mut forms, mut tensors, mut facts) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, operand) in self.operands.iter().enumerate() {
            let Some(operand) = operand else { return others() };
            if slot > 0 && !joins {
                tensors.push(operand.constant.expect("it is known").value()?.clone());
                facts.push(operand.fact.clone());
                continue;
            }
            // Each element is its number, so the result says which are taken.
            let count = operand.fact.shape.numel();
            let numbers: Vec<i64> = (0..count).map(|k| (forms.len() + k) as i64).collect();
            forms.extend((0..count).map(|k| operand.elements.at(k)));
            tensors.push(Tensor::from_i64(operand.fact.shape.clone(), &numbers)?);
            facts.push(Fact::new(DType::I64, operand.fact.shape.clone()));
        }
        let (facts, tensors): (Vec<_>, Vec<_>) = (facts.iter().map(Some).collect(), tensors.iter().map(Some).collect());
        let Ok(taken) = (OpCall { inputs: &facts, ..self.call }).compute(&tensors) else { return others() };
        let Some(taken) = taken.get(port).and_then(Tensor::to_i64) else { return others() };
        Ok(Forms::Each(taken.into_iter().map(|number| forms[number as usize]).collect()))
    }

    /// The forms of what an operator reduces; `None` if the number of elements depends on counts.
    fn reduced(&self, fact: &Fact) -> Result<Option<Forms>> {
        let Some(Some(data)) = self.operands.first() else { return Ok(None) };
        let (Ok(axes), Some(numbers)) = (self.call.reduced_axes(), data.numbers()?) else { return Ok(None) };
        if !data.is_even() {
            return Ok(None);
        }
        let op = match self.call.op.name {
            "ReduceProd" => "Mul",
            "ReduceSum" => "Add",
            "ReduceMax" => "Max",
            _ => "Min",
        };
        let shape = &data.fact.shape;
        let kept: Shape = (0..shape.len()).map(|k| if axes.contains(&k) { 1 } else { shape[k] }).collect();
        let places = Access::contiguous(kept).broadcast(shape);
        let mut found: Vec<Option<Number>> = vec![None; fact.shape.numel()];
        for (number, place) in numbers.into_iter().zip(places.elements()) {
            let own = &mut found[place as usize];
            *own = Some(own.map_or(number, |own| self.ranges.combine(op, own, number, fact.dtype)));
        }
        Ok(found
            .into_iter()
            .map(|number| number.map(|number| number.form))
            .collect::<Option<Vec<_>>>()
            .map(Forms::Each))
    }
}
