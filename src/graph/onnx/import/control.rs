//! Inlines `If`, and `Loop` where its steps differ, which conditions control. Other loops are loops of the graph: see `repeat`.
//!
//! A condition that is known while reading leaves the nodes of the branch that is taken, or of the iterations that run. One that the run
//! decides leaves the nodes of both branches, or of all iterations up to a bound. A Where chooses among their results:
//!
//! ```text
//! If    then --.                Loop   carried --body 0--> new --Where--> carried --body 1--> new --Where--> carried
//!       else --Where--> y                 '----------------------'           '----------------------'
//! ```
//! What is not taken has results that nobody reads, so nothing about it may stop a run. Its [inputs](Importer::guarded) are
//! zeros in place of integers, as indices outside of what they look up would be refused before the run.

use super::bodies::{Along, Body};
use super::sequence::Named;
use super::*;
use crate::constant::Constant;
use crate::onnx::dims::trips_of;
use crate::shape::Shape;

/// The most iterations of a loop.
pub(super) const MAX_ITERATIONS: i64 = crate::ops::MOST_ITERATIONS as i64;
/// The most nodes that a bound is followed through.
const MAX_FOLLOWED: usize = 1 << 6;

/// A condition, as far as it is known while reading.
#[derive(Clone, Copy)]
pub(super) enum Holds {
    Known(bool),
    /// The run decides: a scalar.
    Decided(ValueId),
}

/// How often a loop runs.
pub(super) struct Trips {
    /// The most iterations.
    pub(super) most: i64,
    /// The number that the run decides, if it does.
    pub(super) count: Option<ValueId>,
    pub(super) going: Holds,
    /// True if the number follows from an extent.
    pub(super) follows: bool,
}

impl<'a> Importer<'a> {
    pub(super) fn inline_if(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let (1, Some(condition)) = (call.inputs.len(), call.tensor(0)?) else {
            return Err(call.fail(format!("expected 1 input, found {}", call.inputs.len())));
        };
        let taken = match self.condition(call, condition)? {
            Holds::Decided(taken) => return self.both_branches(call, condition, taken),
            Holds::Known(taken) => taken,
        };
        let body = self.body(call, call.body(if taken { "then_branch" } else { "else_branch" })?)?;
        self.inline(call, &body, format!("{}/", call.name), &[])
    }

    /// Inlines both branches of an `If`, and chooses each output.
    fn both_branches(&mut self, call: &Call<'_, 'a>, condition: ValueId, taken: ValueId) -> Result<Vec<Named>> {
        let refused = self.step(call, "else", "Not", &[taken], Attrs::new())?;
        let mut branches = Vec::with_capacity(2);
        for (key, name, guard) in [("then_branch", "then", taken), ("else_branch", "else", refused)] {
            let body = self.body(call, call.body(key)?)?;
            let outer = self.guard_by(call, &format!("{name}/guard"), guard)?;
            let made = self.inline(call, &body, format!("{}/{name}/", call.name), &[]);
            self.guard = outer;
            // If the condition were known, this branch might not matter.
            branches.push(made.map_err(|error| self.excused(error, condition))?);
        }
        let [yes, no] = [branches.swap_remove(0), branches.swap_remove(0)];
        ensure(yes.len() == no.len(), || {
            call.fail(format!("expected branches with as many outputs, found {} and {}", yes.len(), no.len()))
        })?;
        let mut chosen = Vec::with_capacity(yes.len());
        for (i, (yes, no)) in yes.into_iter().zip(no).enumerate() {
            let output = call.node.output.get(i).map_or("", String::as_str);
            let name = if output.is_empty() { format!("{}/{i}", call.name) } else { call.scope.name(output) };
            let made = self.choose(&name, taken, [yes, no]);
            chosen.push(made?.map_err(|[yes, no]| {
                let known = self.not_constant("cond", condition);
                call.fail(format!("output '{output}' is {yes} in one branch and {no} in the other: {known}"))
            })?);
        }
        Ok(chosen)
    }

    /// An error of a branch that is computed because the run decides. If what decides is given, the model is read again with it.
    fn excused(&mut self, error: Error, condition: ValueId) -> Error {
        let known = self.not_constant("cond", condition);
        match error {
            Error::Node { node, op, what, file } => {
                Error::Node { node, op, what: format!("{what}; it is in a branch that is read because {known}"), file }
            }
            other => other,
        }
    }

    /// One of two values, of which each is there in one case alone. If their types or shapes differ, these are what is returned.
    fn choose(&mut self, name: &str, condition: ValueId, pair: [Named; 2]) -> Result<Result<Named, [String; 2]>> {
        let [yes, no] = match pair {
            [Named::Tensor(yes), Named::Tensor(no)] if yes == no => return Ok(Ok(Named::Tensor(yes))),
            [Named::Tensor(yes), Named::Tensor(no)] => [yes, no],
            [Named::Sequence(yes), Named::Sequence(no)] if yes.len() == no.len() => {
                let mut parts = Vec::with_capacity(yes.len());
                for (i, (&yes, &no)) in yes.iter().zip(no.iter()).enumerate() {
                    let part = [Named::Tensor(yes), Named::Tensor(no)];
                    match self.choose(&format!("{name}.{i}"), condition, part)? {
                        Ok(Named::Tensor(value)) => parts.push(value),
                        other => return Ok(other),
                    }
                }
                return Ok(Ok(Named::Sequence(parts.into())));
            }
            pair => return Ok(Err(pair.map(|named| self.described(&named)))),
        };
        [yes, no].into_iter().for_each(|value| self.notes.rely(Relied::Shape(value)));
        if self.graph.fact(yes) != self.graph.fact(no) {
            return Ok(Err([yes, no].map(|value| self.graph.fact(value).to_string())));
        }
        self.either(name, [condition, yes, no]).map(|value| Ok(Named::Tensor(value)))
    }

    fn described(&self, named: &Named) -> String {
        match named {
            Named::Nothing => "nothing".into(),
            Named::Tensor(value) => self.graph.fact(*value).to_string(),
            Named::Sequence(values) => format!("a sequence of {}", values.len()),
        }
    }

    /// A Where: its condition is a scalar.
    pub(super) fn either(&mut self, name: &str, operands: [ValueId; 3]) -> Result<ValueId> {
        let name = shortened(name.to_owned());
        Ok(self.add(self.rows["Where"], &name, &operands.map(Some), Attrs::new(), &[&name])?[0])
    }

    /// Sets the condition under which the nodes that follow matter, within the one around it, and returns that one.
    fn guard_by(&mut self, call: &Call, name: &str, condition: ValueId) -> Result<Option<ValueId>> {
        let inner = match self.guard {
            Some(outer) => self.step(call, name, "And", &[outer, condition], Attrs::new())?,
            None => condition,
        };
        Ok(self.guard.replace(inner))
    }

    /// A value as nodes read it that matter under the guard alone: integers are zeros otherwise. So are floats of a model that is trained,
    /// because the derivative by a branch that is not taken may be infinite, and 0 times that is not 0.
    pub(super) fn guarded(&mut self, named: Named) -> Result<Named> {
        let (Some(guard), Named::Tensor(value)) = (self.guard, &named) else { return Ok(named) };
        let dtype = self.graph.fact(*value).dtype;
        let is_known = self.graph.as_constant(*value).is_some() && !self.weights.contains(value);
        if is_known || (dtype.is_float() && !self.model.trains) {
            return Ok(named);
        }
        if let Some(known) = self.guarded.get(&(*value, guard)) {
            return Ok(Named::Tensor(*known));
        }
        let name = format!("{}/guarded", self.graph.value_name(*value));
        let zero = Constant::new(format!("{name}/0"), Tensor::from_f64(dtype, [], &[0.0]));
        let zero = self.graph.constant(zero);
        let made = self.either(&name, [guard, *value, zero])?;
        self.guarded.insert((*value, guard), made);
        Ok(Named::Tensor(made))
    }

    pub(super) fn inline_loop(&mut self, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let body = self.body(call, call.body("body")?)?;
        let mut trips = self.trips(call)?;
        let mut carried = call.inputs.get(2..).unwrap_or(&[]).to_vec();
        let mut columns = body.columns(call, 1 + carried.len())?;
        if trips.bound_holds(carried.len(), call)
            && let Some(made) = self.loop_as_loop(call, &body, &trips, &carried)
        {
            return Ok(made.into_iter().map(Named::Tensor).collect());
        }
        for i in 0..trips.most {
            let running = match trips.running(self, call, i)? {
                Holds::Known(false) => break,
                Holds::Known(true) => None,
                Holds::Decided(running) => Some(running),
            };
            if running.is_some() {
                self.is_bounded(call, &trips, carried.len())?;
            }
            ensure(i != MAX_ITERATIONS, || {
                let what = match trips.most {
                    i64::MAX => "expected an 'M' or a 'cond' that ends it",
                    _ => "expected iterations of the same types and shapes, which are one loop however many they are",
                };
                call.fail(format!("it runs more than {MAX_ITERATIONS} times: {what}"))
            })?;
            let number = self.number(call, i)?;
            let mut outputs = self.iteration(call, &body, (&i.to_string(), number), (&carried, running))?.into_iter();
            let Some(Named::Tensor(condition)) = outputs.next() else {
                return Err(call.fail("expected a body whose first output is a condition"));
            };
            let goes_on = self.condition(call, condition)?;
            trips.going = self.both(call, &format!("{i}/going"), trips.going, goes_on)?;
            let new: Vec<_> = outputs.by_ref().take(carried.len()).collect();
            carried = match running {
                Some(running) => self.kept(call, i, running, [new, carried])?,
                None => new,
            };
            call.collect(&mut columns, outputs)?;
        }
        let start = carried.len();
        if columns.first().is_some_and(Vec::is_empty) && call.node.output.len() > start {
            let empty = self.empty_columns(call, &body, columns, &carried)?;
            carried.extend(empty);
            return Ok(carried);
        }
        for (i, column) in columns.into_iter().enumerate() {
            carried.push(self.stack_column(call, start + i, column, Along { axis: 0, backwards: false })?);
        }
        Ok(carried)
    }

    /// How often a loop runs: at most `M` times, and no more than the dim says that bounds it.
    fn trips(&mut self, call: &Call<'_, 'a>) -> Result<Trips> {
        let going = match call.tensor(1)? {
            Some(condition) => self.condition(call, condition)?,
            None => Holds::Known(true),
        };
        let set = trips_of(call.node).and_then(|dim| self.trips.get(&dim).copied()).unwrap_or(i64::MAX);
        let Some(count) = call.tensor(0)? else { return Ok(Trips { most: set, count: None, going, follows: false }) };
        let count = self.folded(count)?;
        if self.graph.as_constant(count).is_some() && self.dependence.elements(count).is_none() {
            let numbers = self.numbers("M", count).map_err(|what| call.fail(what))?;
            let &number = numbers.first().ok_or_else(|| call.fail("input 'M': expected one element, found none"))?;
            let follows = self.notes.is_open(count);
            return Ok(Trips { most: number.min(set), count: None, going, follows });
        }
        let most = self.most(count, &mut MAX_FOLLOWED.clone()).unwrap_or(i64::MAX).min(set);
        Ok(Trips { most, count: Some(self.scalar(call, "M", count, DType::I64)?), going, follows: false })
    }

    /// Refuses a loop of which the run decides how often it runs, if it has no bound, or stacks as many parts.
    fn is_bounded(&mut self, call: &Call<'_, 'a>, trips: &Trips, carried: usize) -> Result<()> {
        let (input, decides) = match (trips.count, trips.going) {
            (Some(count), _) => ("M", count),
            (None, Holds::Decided(going)) => ("cond", going),
            (None, Holds::Known(_)) => return Ok(()),
        };
        let stacked = call.node.output.iter().skip(carried).find(|name| !name.is_empty());
        if let Some(stacked) = stacked {
            let known = self.not_constant(input, decides);
            return Err(call.fail(format!("output '{stacked}' has as many parts as there are iterations: {known}")));
        }
        if trips.most <= MAX_ITERATIONS {
            return Ok(());
        }
        let known = self.not_constant(input, decides);
        let bound = trips_of(call.node).map_or(String::new(), |dim| {
            format!("set the dim '{dim}' to the most iterations, up to {MAX_ITERATIONS}, or: ")
        });
        Err(call.fail(format!("its iterations have no bound: {bound}{known}")))
    }

    /// The carried values after an iteration: the new ones if it was to run.
    fn kept(
        &mut self,
        call: &Call<'_, 'a>,
        i: i64,
        running: ValueId,
        [new, old]: [Vec<Named>; 2],
    ) -> Result<Vec<Named>> {
        let mut kept = Vec::with_capacity(new.len());
        for (at, (new, old)) in new.into_iter().zip(old).enumerate() {
            // A body without nodes lets the graph grow, too.
            self.has_room().map_err(|what| call.fail(what))?;
            let made = self.choose(&format!("{}/{i}/carried.{at}", call.name), running, [new, old])?;
            kept.push(made.map_err(|[new, old]| {
                let name = call.node.input.get(2 + at).map_or("", String::as_str);
                call.fail(format!(
                    "'{name}' is {old} before iteration {i} and {new} after it: as the run decides how often it runs, expected one type and shape"
                ))
            })?);
        }
        Ok(kept)
    }

    /// The collected outputs of a `Loop` that runs no iteration.
    ///
    /// They hold no parts, but have the type and the shape of the parts that a first iteration would make.
    fn empty_columns(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        mut columns: Vec<Vec<ValueId>>,
        carried: &[Named],
    ) -> Result<Vec<Named>> {
        let number = self.number(call, 0)?;
        let outputs = self.iteration(call, body, ("0", number), (carried, None))?;
        call.collect(&mut columns, outputs.into_iter().skip(1 + carried.len()))?;
        let mut empty = Vec::with_capacity(columns.len());
        for (i, part) in columns.concat().into_iter().enumerate() {
            self.notes.rely(Relied::Shape(part));
            let Fact { dtype, shape } = self.graph.fact(part);
            let shape: Shape = std::iter::once(0).chain(shape.iter().copied()).collect();
            let name = call.scope.name(call.node.output.get(carried.len() + i).map_or("", String::as_str));
            let none = Constant::new(name, Tensor::new(*dtype, shape, Vec::new())?);
            empty.push(Named::Tensor(self.graph.constant(none)));
        }
        Ok(empty)
    }

    /// The number of an iteration.
    fn number(&mut self, call: &Call, i: i64) -> Result<Named> {
        let number = Constant::new(format!("{}/{i}/i", call.name), Tensor::from_i64([], &[i])?);
        Ok(Named::Tensor(self.graph.constant(number)))
    }

    /// Inlines one iteration of a `Loop` and returns the outputs of its body. It may matter under a condition alone.
    pub(super) fn iteration(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        (name, number): (&str, Named),
        (carried, running): (&[Named], Option<ValueId>),
    ) -> Result<Vec<Named>> {
        let prefix = format!("{}/{name}/", call.name);
        let condition = Constant::new(format!("{prefix}cond"), Tensor::from_f64(DType::Bool, [], &[1.0]));
        let mut given = vec![number, Named::Tensor(self.graph.constant(condition))];
        let Some(running) = running else {
            given.extend_from_slice(carried);
            return self.inline(call, body, prefix, &given);
        };
        let outer = self.guard_by(call, &format!("{name}/guard"), running)?;
        for value in carried {
            given.push(self.guarded(value.clone())?);
        }
        let made = self.inline(call, body, prefix, &given);
        self.guard = outer;
        made
    }

    /// A condition as far as it is known.
    pub(super) fn condition(&mut self, call: &Call<'_, 'a>, value: ValueId) -> Result<Holds> {
        let value = self.folded(value)?;
        if self.graph.as_constant(value).is_none() || self.dependence.elements(value).is_some() {
            return self.scalar(call, "cond", value, DType::Bool).map(Holds::Decided);
        }
        let numbers = self.numbers("cond", value).map_err(|what| call.fail(what))?;
        let first = numbers.first().ok_or_else(|| call.fail("input 'cond': expected one element, found none"))?;
        Ok(Holds::Known(*first != 0))
    }

    /// A condition that holds if two do.
    pub(super) fn both(&mut self, call: &Call, name: &str, left: Holds, right: Holds) -> Result<Holds> {
        Ok(match (left, right) {
            (Holds::Known(false), _) | (_, Holds::Known(false)) => Holds::Known(false),
            (Holds::Known(true), other) | (other, Holds::Known(true)) => other,
            (Holds::Decided(left), Holds::Decided(right)) => {
                Holds::Decided(self.step(call, name, "And", &[left, right], Attrs::new())?)
            }
        })
    }

    /// A value of one element, which the run computes, without axes.
    fn scalar(&mut self, call: &Call<'_, 'a>, input: &str, value: ValueId, dtype: DType) -> Result<ValueId> {
        self.notes.rely(Relied::Shape(value));
        let fact = self.graph.fact(value);
        ensure(fact.dtype == dtype && fact.shape.numel() == 1, || {
            call.fail(format!("input '{input}': expected one element of {dtype}, found {fact}"))
        })?;
        if fact.shape.is_empty() {
            return Ok(value);
        }
        let attrs = Attrs::new().with("shape", Vec::<i64>::new());
        self.step(call, input, "Reshape", &[value], attrs)
    }

    /// The most that an element of an integer may be, where the nodes that make it say so.
    fn most(&mut self, value: ValueId, left: &mut usize) -> Option<i64> {
        *left = left.checked_sub(1)?;
        self.notes.rely(Relied::Elements(value));
        if let Some(constant) = self.graph.as_constant(value) {
            if self.dependence.elements(value).is_some() {
                return self.dependence.most(constant, left);
            }
            return constant.value().ok()?.to_i64()?.into_iter().max();
        }
        let (op, is_view) = (self.graph.node(value.node).op_name(), self.graph.is_view(value.node));
        let operands: Vec<_> = self.graph.operands(value.node).into_iter().flatten().collect();
        if matches!(op, "ArgMax" | "ArgMin") {
            operands.iter().for_each(|&operand| self.notes.rely(Relied::Shape(operand)));
        }
        let longest = operands.first().and_then(|&data| self.graph.fact(data).shape.iter().copied().max());
        let mut of = |at: usize| self.most(*operands.get(at)?, left);
        let own = match op {
            "Min" => (0..operands.len()).filter_map(of).min(),
            "Max" => (0..operands.len()).map(of).collect::<Option<Vec<_>>>()?.into_iter().max(),
            "Where" => of(1).zip(of(2)).map(|(a, b)| a.max(b)),
            "Add" => of(0).zip(of(1)).and_then(|(a, b)| a.checked_add(b)),
            "Clip" => of(0).into_iter().chain(of(2)).min(),
            "Cast" | "ReduceMax" | "ReduceMin" | "Gather" => of(0),
            "ArgMax" | "ArgMin" => longest.and_then(|extent| i64::try_from(extent).ok()).map(|extent| extent - 1),
            _ if is_view => of(0),
            _ => None,
        };
        let range = match self.graph.fact(value).dtype {
            DType::Bool => Some(1),
            DType::I8 => Some(i8::MAX.into()),
            DType::U8 => Some(u8::MAX.into()),
            _ => None,
        };
        own.into_iter().chain(range).min()
    }
}

impl Trips {
    /// True if the run does not decide how often the loop runs, or there is a bound of that, and nothing is stacked.
    fn bound_holds(&self, carried: usize, call: &Call) -> bool {
        let is_known = self.count.is_none() && matches!(self.going, Holds::Known(_));
        let stacks = call.node.output.iter().skip(carried).any(|name| !name.is_empty());
        is_known || self.most <= MAX_ITERATIONS && !stacks
    }

    /// True for iterations that run.
    fn running(&self, importer: &mut Importer, call: &Call, i: i64) -> Result<Holds> {
        let Some(count) = self.count else { return Ok(self.going) };
        let name = format!("{}/{i}/number", call.name);
        let number = Constant::new(name, Tensor::from_i64([], &[i])?);
        let number = importer.graph.constant(number);
        let counted = importer.step(call, &format!("{i}/counted"), "Less", &[number, count], Attrs::new())?;
        importer.both(call, &format!("{i}/running"), self.going, Holds::Decided(counted))
    }
}

#[cfg(test)]
mod tests {
    use crate::autodiff::gradients;
    use crate::dtype::DType;
    use crate::onnx::{Model, import, text};
    use crate::reference;
    use crate::tensor::Tensor;
    use std::path::Path;

    /// The derivative of the root by its argument is infinite at 0.
    #[test]
    fn no_derivative_comes_through_a_branch_that_is_not_taken() {
        let source =
            "<ir_version: 9, opset_import: [\"\" : 20]> g (bool c, float[2] x) => (float loss) <float[2] w = {0, 0}> {
            u = Mul (x, w)
            y = If (c) <
                then_branch = t () => (float[2] a) { r = Sqrt (u) a = Mul (r, w) },
                else_branch = e () => (float[2] b) { b = Add (u, w) }
            >
            loss = ReduceSum <keepdims = 0> (y)
        }";
        let proto = text::parse(source, Path::new("test")).expect("the test's text is well-formed");
        let mut graph = import(&Model::new(proto).with_weights(), &[]).expect("a graph");
        let (loss, x) = (graph.outputs()[0].1, graph.inputs()[1]);
        let all: Vec<_> = graph.order().expect("no cycles").into_iter().map(|node| node.output(0)).collect();
        let w = all.into_iter().find(|&value| graph.value_name(value) == "w").expect("a weight");
        let found = gradients(&mut graph, loss, &[x, w]).expect("derivatives");
        for (name, value) in ["dx", "dw"].into_iter().zip(found) {
            graph.output(name, value.expect("the loss depends on it"));
        }
        let inputs = [Tensor::from_f64(DType::Bool, [], &[0.0]), Tensor::from_f64(DType::F32, [2], &[3.0, -5.0])];
        let outputs = reference::run(&graph, &inputs).expect("it runs");
        let outputs: Vec<_> = outputs.iter().map(Tensor::to_f64).collect();
        // Of the sum of x w + w.
        assert_eq!(outputs, [vec![0.0], vec![0.0, 0.0], vec![4.0, -4.0]]);
    }
}
