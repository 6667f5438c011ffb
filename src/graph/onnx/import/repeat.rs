//! Reads `Scan` and `Loop` as loops of the graph.
//!
//! One iteration is inlined, of values that stand for what each step finds. The nodes that depend on these become the body. All others are
//! computed once, before the loop:
//!
//! ```text
//! body    carried, x[t] --MatMul w--> next          loop, with w captured
//!         w --Transpose--'                          w --Transpose, once
//! ```
//! Where steps differ by more than their values, such as in shapes that grow, the iterations are inlined one by one instead.

use super::bodies::Body;
use super::control::{Holds, MAX_ITERATIONS, Trips};
use super::sequence::Named;
use super::*;
use crate::body::outline;
use crate::constant::Constant;
use crate::op::NodeId;
use crate::ops::{REPEAT, loop_attrs};

/// A `Loop` of at most this many steps is inlined, unless their number follows from an extent: its nodes join those around it, and the numbers of
/// its steps are constants.
const FEW: i64 = 4;
/// Constants of at most this many bytes are a body's own.
const SMALL: usize = 1 << 12;

/// A value that each step hands to the next.
struct Carried {
    first: ValueId,
    /// What stands for it in the body.
    given: ValueId,
    next: ValueId,
}

/// A body whose nodes were added.
struct Step {
    carried: Vec<Carried>,
    /// Values that are read row by row, and what stands for a row.
    scanned: Vec<(ValueId, ValueId)>,
    rows: Vec<ValueId>,
}

/// What a body reads and is made of.
struct Captured {
    /// Values from outside of it.
    values: Vec<ValueId>,
    /// Constants that become its own.
    own: Vec<ValueId>,
    nodes: HashSet<NodeId>,
}

/// The outcome of reading one iteration.
enum Once {
    Read(Step),
    /// Whether another iteration follows is decided by this one.
    Decides,
    Differs,
}

/// What an attempt changes of an importer.
struct Before {
    graph: Graph,
    dependence: Dependence,
    notes: Notes,
    counts: Counts,
    wanted: BTreeSet<String>,
    guarded: HashMap<(ValueId, ValueId), ValueId>,
    guard: Option<ValueId>,
    found: Vec<ValueId>,
}

impl<'a> Importer<'a> {
    /// The result of a function, or nothing if it fails or has none: the importer is then as it was, but for the work that was done, which
    /// stays spent. Copying the graph is work, too.
    fn attempt<T>(&mut self, make: impl FnOnce(&mut Self) -> Result<Option<T>>) -> Option<T> {
        self.spend(self.graph.len()).ok()?;
        let before = Before {
            graph: self.graph.clone(),
            dependence: self.dependence.clone(),
            notes: self.notes.clone(),
            counts: self.counts.clone(),
            wanted: self.wanted.clone(),
            guarded: self.guarded.clone(),
            guard: self.guard,
            found: self.found.clone(),
        };
        if let Ok(Some(made)) = make(self) {
            return Some(made);
        }
        let Before { graph, dependence, notes, counts, wanted, guarded, guard, found } = before;
        (self.graph, self.dependence, self.notes, self.counts) = (graph, dependence, notes, counts);
        (self.wanted, self.guarded, self.guard, self.found) = (wanted, guarded, guard, found);
        None
    }

    /// A `Scan` as a loop: its results, if its steps are alike. Inputs are walked along the first axis.
    pub(super) fn scan_as_loop(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        name: &str,
        (states, scanned, reverse): (&[ValueId], &[ValueId], bool),
    ) -> Option<Vec<ValueId>> {
        let times = self.graph.fact(*scanned.first()?).shape[0];
        let given = |importer: &Self, value: ValueId| importer.graph.fact(value).clone();
        self.attempt(|importer| {
            let start = importer.graph.bound();
            let mut carried = Vec::new();
            for &first in states {
                let fact = given(importer, first);
                carried.push(Carried { first, given: importer.stand_in(fact), next: first });
            }
            let mut rows = Vec::new();
            for &value in scanned {
                let fact = given(importer, value);
                let row = importer.stand_in(Fact::new(fact.dtype, &fact.shape[1..]));
                rows.push((value, row));
            }
            let inputs = carried.iter().map(|c| c.given).chain(rows.iter().map(|(_, row)| *row));
            let inputs: Vec<_> = inputs.map(Named::Tensor).collect();
            let made = importer.inline(call, body, format!("{name}/step/"), &inputs)?;
            let Some(made) = tensors(&made) else { return Ok(None) };
            carried.iter_mut().zip(&made).for_each(|(carried, &next)| carried.next = next);
            let step = Step { carried, scanned: rows, rows: made[states.len()..].to_vec() };
            importer.close(name, (times, reverse), step, start)
        })
    }

    /// A `Loop` as a loop of the graph: its carried values and the rows of its other outputs, if its steps are alike.
    pub(super) fn loop_as_loop(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        trips: &Trips,
        carried: &[Named],
    ) -> Option<Vec<ValueId>> {
        let many = trips.most > FEW || trips.follows;
        let times = usize::try_from(trips.most).ok().filter(|_| many && trips.most < i32::MAX.into())?;
        let first = tensors(carried)?;
        if matches!(trips.going, Holds::Known(false)) {
            return None;
        }
        for decides in [matches!(trips.going, Holds::Decided(_)), true] {
            let mut retries = false;
            let made = self.attempt(|importer| {
                let start = importer.graph.bound();
                match importer.once(call, body, (trips, decides), &first)? {
                    Once::Read(step) => importer.close(call.name, (times, false), step, start),
                    Once::Decides => {
                        retries = true;
                        Ok(None)
                    }
                    Once::Differs => Ok(None),
                }
            });
            if let Some(mut made) = made {
                // The number of the step, and whether it runs, are the loop's own.
                made.drain(..made.len() - first.len() - body.collected(1 + first.len()));
                return Some(made);
            }
            // A loop that the run ends runs all of its steps.
            if !retries || trips.most > MAX_ITERATIONS {
                return None;
            }
        }
        None
    }

    /// Reads one iteration of a `Loop`. With `decides`, whether it runs is handed on.
    fn once(
        &mut self,
        call: &Call<'_, 'a>,
        body: &Body<'_, 'a>,
        (trips, decides): (&Trips, bool),
        first: &[ValueId],
    ) -> Result<Once> {
        let constant = |importer: &mut Self, tensor: Tensor| {
            let name = format!("{}/first", call.name);
            importer.graph.constant(Constant::new(name, tensor))
        };
        let zero = constant(self, Tensor::from_i64([], &[0])?);
        let number = self.stand_in(Fact::new(DType::I64, []));
        let mut going = None;
        if decides {
            let begins = match trips.going {
                Holds::Decided(value) => value,
                Holds::Known(_) => constant(self, Tensor::from_f64(DType::Bool, [], &[1.0])),
            };
            going = Some((begins, self.stand_in(Fact::new(DType::Bool, []))));
        }
        let goes = going.map_or(Holds::Known(true), |(_, given)| Holds::Decided(given));
        let running = match trips.count {
            None => goes,
            Some(count) => {
                let counted = self.step(call, "step/counted", "Less", &[number, count], Attrs::new())?;
                self.both(call, "step/running", goes, Holds::Decided(counted))?
            }
        };
        let running = if let Holds::Decided(running) = running { Some(running) } else { None };
        let mut given = Vec::new();
        for &value in first {
            let fact = self.graph.fact(value).clone();
            given.push(self.stand_in(fact));
        }
        let named: Vec<_> = given.iter().copied().map(Named::Tensor).collect();
        let outputs = self.iteration(call, body, ("step", Named::Tensor(number)), (&named, running))?;
        let Some(outputs) = tensors(&outputs) else { return Ok(Once::Differs) };
        let (condition, outputs) = outputs.split_first().ok_or_else(|| call.fail("expected a condition"))?;
        let goes_on = match self.condition(call, *condition)? {
            Holds::Known(false) => return Ok(Once::Differs),
            Holds::Decided(_) if !decides => return Ok(Once::Decides),
            goes_on => goes_on,
        };
        let (new, rows) = outputs.split_at(first.len().min(outputs.len()));
        if running.is_some() && !rows.is_empty() {
            return Ok(Once::Differs);
        }
        let mut carried = Vec::new();
        let one = constant(self, Tensor::from_i64([], &[1])?);
        if !self.graph.users(number).is_empty() {
            let next = self.step(call, "step/next", "Add", &[number, one], Attrs::new())?;
            carried.push(Carried { first: zero, given: number, next });
        }
        if let Some((first, given)) = going {
            let next = match self.both(call, "step/going", Holds::Decided(given), goes_on)? {
                Holds::Decided(next) => next,
                Holds::Known(_) => given,
            };
            carried.push(Carried { first, given, next });
        }
        for (at, ((&first, &given), &new)) in first.iter().zip(&given).zip(new).enumerate() {
            let next = match running {
                None => new,
                Some(_) if self.graph.fact(new) != self.graph.fact(given) => return Ok(Once::Differs),
                Some(running) => self.either(&format!("{}/step/carried.{at}", call.name), [running, new, given])?,
            };
            carried.push(Carried { first, given, next });
        }
        Ok(Once::Read(Step { carried, scanned: Vec::new(), rows: rows.to_vec() }))
    }

    /// What stands for a value that each step finds: a node that nothing gives a value.
    fn stand_in(&mut self, fact: Fact) -> ValueId {
        let value = self.graph.input("step", fact);
        self.graph.withdraw_input(value);
        value
    }

    /// True if how many elements a run finds has a part in a value.
    fn follows_found(&self, values: &[ValueId]) -> bool {
        let found: HashSet<NodeId> = self.found.iter().map(|value| value.node).collect();
        let (mut seen, mut open) = (HashSet::new(), values.iter().map(|value| value.node).collect::<Vec<_>>());
        while let Some(node) = open.pop().filter(|_| !found.is_empty()) {
            if found.contains(&node) {
                return true;
            }
            if seen.insert(node) {
                open.extend(self.graph.operands(node).into_iter().flatten().map(|value| value.node));
            }
        }
        false
    }

    /// Adds the loop of a body whose nodes were added from `start` on. Nothing if its steps are not alike.
    fn close(
        &mut self,
        name: &str,
        (times, reverse): (usize, bool),
        Step { carried, scanned, rows }: Step,
        start: usize,
    ) -> Result<Option<Vec<ValueId>>> {
        let alike = |c: &Carried| self.graph.fact(c.given) == self.graph.fact(c.next);
        if !carried.iter().all(alike) {
            return Ok(None);
        }
        let given: Vec<ValueId> = carried.iter().map(|c| c.given).chain(scanned.iter().map(|(_, row)| *row)).collect();
        let outputs: Vec<ValueId> = carried.iter().map(|c| c.next).chain(rows).collect();
        let Captured { values: captured, own, nodes } = self.captured(&given, &outputs, start);
        own.into_iter().for_each(|value| self.notes.rely(Relied::Elements(value)));
        // A body's attributes stay what they are.
        let Some(shaping) = self.notes.shaping(&nodes) else { return Ok(None) };
        shaping.into_iter().for_each(|value| self.notes.rely(Relied::Elements(value)));
        if self.found.iter().any(|value| value.node.index() >= start) {
            return Ok(None);
        }
        let first = carried.iter().map(|c| c.first).chain(scanned.iter().map(|(value, _)| *value));
        let inputs: Vec<ValueId> = first.chain(captured.iter().copied()).collect();
        if self.follows_found(&inputs) {
            return Ok(None);
        }
        for (at, &value) in inputs.iter().enumerate() {
            if (carried.len()..given.len()).contains(&at) {
                // There may be any number of rows.
                self.notes.rely(Relied::Rank(value));
                (1..self.graph.fact(value).shape.len()).for_each(|axis| self.notes.rely(Relied::Extent(value, axis)));
            } else {
                self.notes.rely(Relied::Shape(value));
            }
            if self.dependence.is_uneven(value) || self.dependence.elements(value).is_some() {
                return Ok(None);
            }
        }
        let body = outline(&self.graph, &[&given[..], &captured].concat(), &outputs)?;
        let attrs = loop_attrs(body, times, (carried.len(), scanned.len()), reverse);
        let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
        self.add(self.rows[REPEAT], &shortened(name.to_owned()), &inputs, attrs, &[]).map(Some)
    }

    /// The values that the nodes behind `given` read, but are not behind it; and the constants among these that become the body's own.
    fn captured(&self, given: &[ValueId], outputs: &[ValueId], start: usize) -> Captured {
        let graph = &self.graph;
        let mut behind: HashSet<NodeId> = given.iter().map(|value| value.node).collect();
        let stands = behind.clone();
        for node in (start..graph.bound()).map(NodeId::new).filter(|node| graph.name_of(*node).is_some()) {
            if graph.operands(node).iter().flatten().any(|value| behind.contains(&value.node)) {
                behind.insert(node);
            }
        }
        let is_own = |value: ValueId| {
            let stays = !self.weights.contains(&value) && self.dependence.elements(value).is_none();
            let constant = graph.as_constant(value).filter(|_| stays);
            constant.is_some_and(|constant| constant.fact.bytes() <= SMALL && constant.is_at_hand())
        };
        let (mut captured, mut own, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        let mut open: Vec<ValueId> = outputs.iter().rev().copied().collect();
        while let Some(value) = open.pop() {
            if stands.contains(&value.node) || !seen.insert(value) {
                continue;
            }
            if behind.contains(&value.node) {
                open.extend(graph.operands(value.node).into_iter().flatten().rev());
            } else if is_own(value) {
                own.push(value);
            } else {
                captured.push(value);
            }
        }
        let nodes = seen.into_iter().map(|value: ValueId| value.node).filter(|node| behind.contains(node)).collect();
        Captured { values: captured, own, nodes }
    }
}

/// The tensors, if all are.
fn tensors(named: &[Named]) -> Option<Vec<ValueId>> {
    named.iter().map(|named| if let Named::Tensor(value) = named { Some(*value) } else { None }).collect()
}
