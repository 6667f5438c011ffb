//! Decisions that passes and lowering make by the extents of a graph. They are recorded, so that the same graph bound to other extents gets
//! the same structure.
//!
//! A graph that is alone decides for itself. In a range the largest graph decides, and the others follow. A decision about cost is always
//! followed. A decision that is valid for some extents alone is followed where it is valid. Where it is not, it is forbidden for all of the
//! range.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One decision: the question, the node that it is about, and the chosen way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decision {
    site: &'static str,
    node: u32,
    chosen: Option<u32>,
}

/// Why decisions cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divergence {
    /// The decision of this number is not valid for these extents.
    Invalid(usize),
    /// Another question was asked than before, about this node, if there is one. The graphs differ by more than decisions.
    Elsewhere(Option<u32>),
}

/// The decisions made for a graph, in the order of the questions.
#[derive(Clone, Debug, Default)]
pub struct Record(Vec<Decision>);

#[derive(Debug, Default)]
struct State {
    made: Vec<Decision>,
    /// The record to follow; `None` if decisions are only recorded.
    followed: Option<Arc<Record>>,
    forbidden: BTreeSet<usize>,
    divergence: Option<Divergence>,
}

/// The decisions of a graph while they are made. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Decisions(Option<Arc<Mutex<State>>>);

impl Decisions {
    /// Records decisions. A decision whose number is in `forbidden` chooses nothing.
    pub fn record(forbidden: &BTreeSet<usize>) -> Decisions {
        Decisions::with(State { forbidden: forbidden.clone(), ..State::default() })
    }

    /// Continues behind a record: records more, where those in `forbidden` choose nothing, or follows a longer record.
    ///
    /// # Panics
    /// When these graphs have no decisions to share.
    pub fn resume(&self, begun: &Record, followed: Option<&Arc<Record>>, forbidden: &BTreeSet<usize>) {
        let mut state = self.state().expect("decisions that were recorded or followed");
        let (made, followed) = (begun.0.clone(), followed.cloned());
        *state = State { made, followed, forbidden: forbidden.clone(), divergence: None };
    }

    /// Follows the decisions of a record.
    pub fn follow(record: &Arc<Record>) -> Decisions {
        Decisions::with(State { followed: Some(record.clone()), ..State::default() })
    }

    fn with(state: State) -> Decisions {
        Decisions(Some(Arc::new(Mutex::new(state))))
    }

    /// Ends the record and returns it.
    ///
    /// # Errors
    /// When the decisions could not be followed.
    pub fn finish(&self) -> Result<Record, Divergence> {
        let Some(mut state) = self.state() else { return Ok(Record::default()) };
        let made = std::mem::take(&mut state.made);
        match (state.divergence, &state.followed) {
            (Some(divergence), _) => Err(divergence),
            (None, Some(followed)) if followed.0.len() != made.len() => Err(Divergence::Elsewhere(None)),
            _ => Ok(Record(made)),
        }
    }

    fn state(&self) -> Option<MutexGuard<'_, State>> {
        // A panic leaves the list whole: each decision is added at once.
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Chooses one of several ways, or none, which is always valid. `own` is the way that suits these extents. `valid` returns true if a
    /// way that suits other extents is valid for these.
    pub fn choose(
        &self,
        site: &'static str,
        node: impl Into<u32>,
        own: Option<u32>,
        valid: impl FnOnce(u32) -> bool,
    ) -> Option<u32> {
        let Some(mut state) = self.state() else { return own };
        let node = node.into();
        let at = state.made.len();
        let chosen = match &state.followed {
            _ if state.divergence.is_some() => return own,
            None => own.filter(|_| !state.forbidden.contains(&at)),
            Some(followed) => match followed.0.get(at) {
                Some(decision) if (decision.site, decision.node) == (site, node) => {
                    let chosen = decision.chosen;
                    if !chosen.is_none_or(valid) {
                        state.divergence = Some(Divergence::Invalid(at));
                        return own;
                    }
                    chosen
                }
                _ => {
                    state.divergence = Some(Divergence::Elsewhere(Some(node)));
                    return own;
                }
            },
        };
        state.made.push(Decision { site, node, chosen });
        chosen
    }

    /// Decides on a step that is allowed only if `valid`. Returns true to take it.
    pub fn if_valid(&self, site: &'static str, node: impl Into<u32>, valid: bool) -> bool {
        self.choose(site, node, valid.then_some(0), |_| valid).is_some()
    }

    /// Decides on a step that is valid only if it was found. Returns it to be taken.
    pub fn if_found<T>(&self, site: &'static str, node: impl Into<u32>, found: Option<T>) -> Option<T> {
        if self.if_valid(site, node, found.is_some()) { found } else { None }
    }

    /// Decides on a step that is always valid, and `cheaper` or not for these extents. Returns true to take it.
    pub fn if_cheaper(&self, site: &'static str, node: impl Into<u32>, cheaper: bool) -> bool {
        self.choose(site, node, cheaper.then_some(0), |_| true).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_of_cost_are_followed_and_invalid_ones_are_found() {
        let first = Decisions::record(&BTreeSet::new());
        assert!(
            first.if_cheaper("fold", 1u32, true)
                && first.if_valid("twin", 2u32, true)
                && !first.if_valid("view", 3u32, false)
        );
        let record = Arc::new(first.finish().expect("nothing to follow"));

        let same = Decisions::follow(&record);
        assert!(same.if_cheaper("fold", 1u32, false), "cost is followed blindly");
        assert!(same.if_valid("twin", 2u32, true));
        assert!(!same.if_valid("view", 3u32, true), "what was left is left, even where it would be valid");
        same.finish().expect("followed");

        let wrong = Decisions::follow(&record);
        wrong.if_cheaper("fold", 1u32, true);
        wrong.if_valid("twin", 2u32, false);
        assert_eq!(wrong.finish().err(), Some(Divergence::Invalid(1)));

        let other = Decisions::follow(&record);
        other.if_cheaper("fold", 7u32, true);
        assert_eq!(other.finish().err(), Some(Divergence::Elsewhere(Some(7))));

        let again = Decisions::record(&BTreeSet::from([1]));
        again.if_cheaper("fold", 1u32, true);
        assert!(!again.if_valid("twin", 2u32, true), "forbidden");

        let rest = Decisions::record(&BTreeSet::new());
        rest.resume(&record, None, &BTreeSet::from([3]));
        assert!(!rest.if_valid("join", 4u32, true) && rest.if_cheaper("join", 5u32, true), "the first is number 3");
        let longer = Arc::new(rest.finish().expect("nothing to follow"));
        rest.resume(&record, Some(&longer), &BTreeSet::new());
        assert!(!rest.if_valid("join", 4u32, true) && rest.if_cheaper("join", 5u32, false), "followed");
        rest.finish().expect("followed");

        assert!(Decisions::default().if_valid("twin", 2u32, true), "alone, each graph decides for itself");
    }
}
