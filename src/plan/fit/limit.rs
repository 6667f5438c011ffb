//! Selects, for programs with backward computations, what is computed again under a limit.
//!
//! The choices and their plans do not depend on the limit. They stand in a list: each one does more again than the one before it, and is
//! expected to take less memory. A limit is looked up by halving. Where the search goes next depends only on what fitted so far:
//!
//! ```text
//! limit   [0]  ->  [4]  ->  [2]  ->  [3]           each is planned when it is asked for, and only once
//!  L1     no       fits     no       fits: 3
//!  L2     no       fits     fits              ..   with more memory, the paths part where one more fits:
//!                                                  there the larger limit goes to the side with less work
//! ```
//!
//! So the answers are monotone, even where the bytes of the list are not: more memory never means more work, nor a refusal. What fits no
//! choice is refused with the fewest bytes on the way that goes by none that fits. A limit of so many bytes goes the same way, up to there.
//!
//! Between the choice that was found and the one before it, which does not fit, there is a second list: the values that the first one may
//! keep, too, added one after another. A limit is looked up there in the same way. If no choice of the first list fits, the bytes of its
//! smallest one are looked up there in place of the limit.

use super::recompute::{Choice, choices};
use crate::error::Result;
use crate::make::arrange::Arrangement;
use crate::make::offsets::stack;
use crate::pass::Prepared;
use crate::target::Target;
use std::collections::HashMap;
use std::rc::Rc;

/// The most choices between two of the first list.
const BETWEEN: usize = 15;

/// A program that shares memory with others.
pub enum Program {
    /// One in which values can be computed again.
    Graph(Box<Prepared>),
    /// One that stays as it is.
    Fixed(Box<Arrangement>),
}

/// A choice for each program.
type Joint = Vec<Rc<Choice>>;

/// The lists of choices, as far as limits have asked for them.
pub struct Search<'a> {
    target: &'a Target,
    /// Per program, what is fixed; else there is a choice for it.
    fixed: Vec<Option<Box<Arrangement>>>,
    /// All programs as they are.
    first: Joint,
    list: Option<Vec<Joint>>,
    /// By the number of a choice in the list: the choices between it and the one before it.
    between: HashMap<usize, Vec<Joint>>,
}

/// The selection for a limit.
enum Found {
    /// The choice of this number. The one before it does not fit.
    Fits(usize),
    /// The smallest of the choices that would be accepted under their own bytes.
    Least(usize),
}

impl<'a> Search<'a> {
    /// A search among the choices of programs.
    ///
    /// # Errors
    /// When a graph cannot be lowered.
    pub fn new(programs: Vec<Program>, target: &'a Target) -> Result<Search<'a>> {
        let (mut fixed, mut first) = (Vec::new(), Vec::new());
        for program in programs {
            fixed.push(match program {
                Program::Graph(graph) => {
                    first.push(Rc::new(Choice::of(*graph, target)?));
                    None
                }
                Program::Fixed(arrangement) => Some(arrangement),
            });
        }
        Ok(Search { target, fixed, first, list: None, between: HashMap::new() })
    }

    /// The graphs that fit the limit with the least recomputation; fixed programs are left out. If none fits, the smallest. With them, the
    /// bytes that they take more than without any recomputation, below 0 as they take fewer.
    ///
    /// # Errors
    /// When a graph cannot be planned at all.
    pub fn within(&mut self, limit: u64) -> Result<(Vec<Prepared>, i64)> {
        let joint = self.select(limit)?;
        let saved = self.bytes(&joint)? as i64 - self.bytes(&self.first)? as i64;
        tracing::debug!(
            limit,
            bytes = self.bytes(&joint)?,
            work = joint.iter().map(|c| c.work()).sum::<u64>(),
            "computed again"
        );
        Ok((joint.iter().map(|choice| choice.graph.clone()).collect(), saved))
    }

    fn select(&mut self, limit: u64) -> Result<Joint> {
        if self.bytes(&self.first)? <= limit {
            return Ok(self.first.clone());
        }
        if self.list.is_none() {
            self.list = Some(self.listed()?);
        }
        let list = self.list.take().expect("it was made");
        let selected = self.select_in(&list, limit);
        self.list = Some(list);
        selected
    }

    fn select_in(&mut self, list: &[Joint], limit: u64) -> Result<Joint> {
        let (at, limit) = match self.look_up(list, limit)? {
            Found::Fits(at) => (at, limit),
            Found::Least(0) => return Ok(list[0].clone()),
            Found::Least(at) => (at, self.bytes(&list[at])?),
        };
        let between = match self.between.remove(&at) {
            Some(known) => known,
            None => self.between(&list[at - 1], &list[at])?,
        };
        let found = self.look_up(&between, limit)?;
        let selected = match found {
            Found::Fits(at) | Found::Least(at) => between[at].clone(),
        };
        self.between.insert(at, between);
        Ok(selected)
    }

    /// Looks a limit up in a list whose first choice is known not to fit.
    fn look_up(&self, list: &[Joint], limit: u64) -> Result<Found> {
        let (mut below, mut fits) = (0, list.len());
        let mut least = (self.bytes(&list[0])?, 0);
        while fits - below > 1 {
            let middle = below.midpoint(fits);
            let bytes = self.bytes(&list[middle])?;
            tracing::debug!(middle, of = list.len(), bytes, limit, "planned");
            if bytes <= limit {
                fits = middle;
            } else {
                below = middle;
                least = least.min((bytes, middle));
            }
        }
        Ok(if fits < list.len() { Found::Fits(fits) } else { Found::Least(least.1) })
    }

    /// The bytes of the smallest plans of a choice for each program.
    fn bytes(&self, joint: &[Rc<Choice>]) -> Result<u64> {
        let mut choices = joint.iter();
        let mut all = Vec::with_capacity(self.fixed.len());
        for fixed in &self.fixed {
            let arrangement = match fixed {
                Some(arrangement) => arrangement,
                None => choices.next().expect("there is a choice for it").arrangement(self.target)?,
            };
            all.push((&arrangement.draft, &arrangement.layout));
        }
        Ok(stack(self.target, &all).0.iter().map(|segment| segment.bytes).sum())
    }

    /// The first list: for ever fewer live bytes, the first choice of each program that has no more.
    fn listed(&self) -> Result<Vec<Joint>> {
        let own = self.first.iter().map(|first| choices(Rc::clone(first), self.target)).collect::<Result<Vec<_>>>()?;
        let mut peaks: Vec<u64> =
            own.iter().flat_map(|choices| choices[1..].iter().map(|choice| choice.peak)).collect();
        peaks.sort_unstable_by(|a, b| b.cmp(a));
        peaks.dedup();
        let mut list = vec![self.first.clone()];
        for peak in peaks {
            let first = |choices: &Vec<Rc<Choice>>| {
                Rc::clone(choices.iter().find(|choice| choice.peak <= peak).unwrap_or(&choices[choices.len() - 1]))
            };
            let joint: Joint = own.iter().map(first).collect();
            if !same(&joint, &list[list.len() - 1]) {
                list.push(joint);
            }
        }
        Ok(list)
    }

    /// The choices from one of the list, `before`, to the next one, with both: that one, and it with ever more values kept in reverse order.
    fn between(&self, before: &Joint, after: &Joint) -> Result<Vec<Joint>> {
        let mut more = Vec::new();
        for (number, (before, after)) in before.iter().zip(after).enumerate() {
            let graph = &self.first[number].graph;
            let is_other = !Rc::ptr_eq(before, after);
            more.push(if is_other { after.keepable(graph, self.target, before.peak)? } else { Vec::new() });
        }
        let count = more.iter().map(Vec::len).max().unwrap_or(0).min(BETWEEN);
        let mut found = vec![after.clone()];
        for part in 1..=count {
            let last = &found[found.len() - 1];
            let mut joint = Vec::new();
            for (number, more) in more.iter().enumerate() {
                let kept = more.len() * part / count;
                joint.push(match kept {
                    0 => Rc::clone(&after[number]),
                    _ => Rc::new(after[number].with(&self.first[number].graph, self.target, &more[..kept])?),
                });
            }
            let is_between = |((choice, last), before): ((&Rc<Choice>, &Rc<Choice>), &Rc<Choice>)| {
                before.work() <= choice.work() && choice.work() <= last.work()
            };
            if joint.iter().zip(last).zip(before).all(is_between) {
                found.push(joint);
            }
        }
        found.push(before.clone());
        found.reverse();
        Ok(found)
    }
}

fn same(a: &Joint, b: &Joint) -> bool {
    a.iter().zip(b).all(|(a, b)| Rc::ptr_eq(a, b))
}
