//! Programs: graphs, or ranges of bindings of graphs, that share their memory, and run one at a time.
//!
//! ```text
//! encode --lower, order, place--> arena of 3 MB -.     the arena is the larger one; constants with the same content
//! decode --lower, order, place--> arena of 5 MB -'---> lie in one place, and so do states of one name
//! ```

use super::fit::bound::{self, Bound};
use super::fit::limit::{Program, Search};
use super::lower::{Draft, DraftState};
use super::make::arrange::{Arrangement, arrange, draft};
use super::make::assemble::assemble;
use super::make::offsets::stack;
use super::range::{Arranged, Bindings, ShapeRange};
use super::{BufferIdx, Compiled, Limits, Segment, Spot, check};
use crate::error::{Error, Result};
use crate::kernel::tuned::Tuned;
use crate::pass::Prepared;
use crate::target::Target;
use std::collections::HashMap;
use std::sync::Arc;

/// The graphs of a program.
#[derive(Clone)]
pub enum Part {
    /// One graph.
    Graph(Box<Prepared>),
    /// A graph per binding of a range.
    Range(Bindings),
}

impl Part {
    /// The graph as it is lowered; of a range, that of the largest binding.
    ///
    /// # Errors
    /// When the graph of the binding cannot be made.
    pub fn graph(&self, target: &Target) -> Result<Prepared> {
        match self {
            Part::Graph(graph) => Ok((**graph).clone()),
            Part::Range(bindings) => bindings.graph(target),
        }
    }

    /// This part with measured schedules.
    pub fn tuned(self, tuned: &Arc<Tuned>) -> Part {
        match self {
            Part::Graph(graph) => Part::Graph(Box::new(Prepared { tuned: Some(Arc::clone(tuned)), ..*graph })),
            Part::Range(bindings) => Part::Range(Bindings { tuned: Some(Arc::clone(tuned)), ..bindings }),
        }
    }
}

/// Programs that are planned together, under one limit or several.
pub struct Fitting<'a> {
    parts: Vec<(String, Part)>,
    target: &'a Target,
    search: Option<Search<'a>>,
}

impl<'a> Fitting<'a> {
    /// Programs, each with its name.
    pub fn new(parts: Vec<(String, Part)>, target: &'a Target) -> Fitting<'a> {
        Fitting { parts, target, search: None }
    }

    /// The least that the programs take together, whatever is computed again.
    ///
    /// # Errors
    /// As [`bound::together`].
    pub fn bound(&self) -> Result<Bound> {
        let graphs = self.parts.iter().map(|(_, part)| part.graph(self.target)).collect::<Result<Vec<_>>>()?;
        bound::together(&graphs, self.target)
    }

    /// The programs as they are planned under a limit: their backward computations compute values [again](super::fit::limit), as far as it
    /// takes for all programs together to fit.
    ///
    /// # Errors
    /// When a program cannot be planned at all.
    pub fn parts(&mut self, limits: &Limits) -> Result<Vec<(String, Part)>> {
        let mut parts = self.parts.clone();
        let has_backward = |part: &Part| matches!(part, Part::Graph(graph) if graph.graph.has_backward());
        let Some(limit) = limits.memory.filter(|_| parts.iter().any(|(_, part)| has_backward(part))) else {
            return Ok(parts);
        };
        let search = match &mut self.search {
            Some(search) => search,
            None => {
                let program = |(_, part): &(String, Part)| {
                    Ok(match part {
                        Part::Graph(graph) => Program::Graph(graph.clone()),
                        Part::Range(bindings) => {
                            let arranged = Arranged::new(bindings.clone(), self.target, &Limits { memory: Some(0) })?;
                            Program::Fixed(Box::new(arranged.arrangement))
                        }
                    })
                };
                let programs = parts.iter().map(program).collect::<Result<Vec<_>>>()?;
                self.search.insert(Search::new(programs, self.target)?)
            }
        };
        let mut graphs = search.within(limit)?.into_iter();
        for (_, part) in &mut parts {
            if let Part::Graph(graph) = part {
                **graph = graphs.next().expect("there is one for each");
            }
        }
        Ok(parts)
    }
}

/// A planned program.
#[derive(Debug)]
pub struct Planned {
    /// The plan, of the largest binding, and its constants.
    pub compiled: Compiled,
    /// The range, which plans the other bindings.
    pub range: Option<ShapeRange>,
}

impl Planned {
    /// The plan.
    pub fn plan(&self) -> &super::Plan {
        &self.compiled.0
    }
}

/// Plans programs, which share one set of segments, each with its name. Every plan can be checked by itself, and all together.
///
/// # Errors
/// As [`compile`](super::compile) and [`ShapeRange::new`], for any of them. [`Error::Fit`] when all together exceed the limit. [`Error::Usage`] when two
/// programs have one name, or states of one name that differ.
pub fn compile_programs(programs: &[(String, Part)], target: &Target, limits: &Limits) -> Result<Vec<Planned>> {
    for (at, (name, _)) in programs.iter().enumerate() {
        if programs[..at].iter().any(|(other, _)| other == name) {
            return Err(Error::usage(format!("two programs have the name '{name}': expected a name for each")));
        }
    }
    let compiled = compile_within(programs, target, limits)?;
    let Some(limit) = limits.memory.filter(|&limit| bytes(&compiled) > limit) else { return Ok(compiled) };
    // Each program may take more than its least, for speed.
    let compiled = compile_within(programs, target, &Limits { memory: Some(0) })?;
    let needed = bytes(&compiled);
    if needed > limit {
        let names: Vec<_> = programs.iter().map(|(name, _)| format!("'{name}'")).collect();
        let what = format!("the plan of the programs {}", names.join(", "));
        return Err(Error::Fit { what, needed, limit, file: None });
    }
    Ok(compiled)
}

/// The bytes of all programs: their segments are the same.
fn bytes(planned: &[Planned]) -> u64 {
    planned.first().map_or(0, |planned| planned.plan().bytes())
}

/// A part whose steps are ordered and whose buffers have places.
enum Ready<'a> {
    Graph(&'a Prepared, Box<Arrangement>),
    Range(Box<Arranged>),
}

impl<'a> Ready<'a> {
    fn new(part: &'a Part, target: &Target, limits: &Limits) -> Result<Ready<'a>> {
        Ok(match part {
            Part::Graph(graph) => {
                Ready::Graph(graph, Box::new(arrange(target, limits, |options| draft(graph, target, options))?))
            }
            Part::Range(bindings) => Ready::Range(Box::new(Arranged::new(bindings.clone(), target, limits)?)),
        })
    }

    fn arrangement(&self) -> &Arrangement {
        match self {
            Ready::Graph(_, arrangement) => arrangement,
            Ready::Range(range) => &range.arrangement,
        }
    }

    /// The plan with these segments and places.
    fn finish(
        mut self,
        name: &str,
        target: &Target,
        segments: &[Segment],
        places: Vec<Option<Spot>>,
    ) -> Result<Planned> {
        let arrangement = match &mut self {
            Ready::Graph(_, arrangement) => arrangement,
            Ready::Range(range) => &mut range.arrangement,
        };
        (arrangement.segments, arrangement.places) = (segments.to_vec(), places);
        match self {
            Ready::Graph(graph, found) => {
                let same: Vec<_> = BufferIdx::all(&found.draft.buffers).map(Some).collect();
                let (mut plan, constants) = assemble(graph, target, &found, &found.draft, &same)?;
                plan.program = Some(name.to_owned());
                check::check(&plan)?;
                Ok(Planned { compiled: (plan, constants), range: None })
            }
            Ready::Range(range) => {
                let range = range.finish(Some(name.to_owned()))?;
                Ok(Planned { compiled: range.largest().clone(), range: Some(range) })
            }
        }
    }
}

/// Plans with each program arranged as if it had the memory of `own` for itself.
fn compile_within(programs: &[(String, Part)], target: &Target, own: &Limits) -> Result<Vec<Planned>> {
    let ready = programs.iter().map(|(_, part)| Ready::new(part, target, own)).collect::<Result<Vec<_>>>()?;
    let named: Vec<_> = programs.iter().map(|(name, _)| &name[..]).zip(&ready).collect();
    agree(&named)?;
    let drafts: Vec<_> = ready.iter().map(|part| (&part.arrangement().draft, &part.arrangement().layout)).collect();
    let (segments, places) = stack(target, &drafts);
    let parts = programs.iter().zip(ready).zip(places);
    let planned = parts.map(|(((name, _), part), places)| part.finish(name, target, &segments, places));
    let planned = planned.collect::<Result<Vec<_>>>()?;
    check::programs(planned.iter().map(Planned::plan))?;
    Ok(planned)
}

/// Refuses states of one name that differ.
fn agree(programs: &[(&str, &Ready)]) -> Result<()> {
    let mut known: HashMap<&str, (&str, &Draft, &DraftState)> = HashMap::new();
    for (program, part) in programs {
        let draft = &part.arrangement().draft;
        for state in &draft.states {
            let buffer = &draft.buffers[state.buffer];
            let (other, of, first) = known.entry(&buffer.name).or_insert((program, draft, state));
            let before = &of.buffers[first.buffer];
            let (a, b) = (format!("{}{}", before.dtype, before.shape), format!("{}{}", buffer.dtype, buffer.shape));
            let name = &buffer.name;
            if a != b {
                return Err(Error::usage(format!(
                    "state '{name}' is {a} in program '{other}', and {b} in '{program}'"
                )));
            }
            let same = match (&first.initial, &state.initial) {
                (Some(a), Some(b)) => a.same(b),
                (a, b) => a.is_none() && b.is_none(),
            };
            if !same {
                return Err(Error::usage(format!(
                    "state '{name}' begins with other elements in program '{other}' than in '{program}'"
                )));
            }
        }
    }
    Ok(())
}
