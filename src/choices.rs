//! What passes and lowering choose by the extents of a graph, written down, so that the same graph bound to other extents gets the
//! same structure.
//!
//! A graph that is alone chooses for itself. Of a range's graphs the largest one chooses and the others follow: a choice of cost is
//! followed blindly, one that is only right for some extents is followed where it is right, and forbidden for all where it is not.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One choice: who asked, about which node, and what was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    site: &'static str,
    node: u32,
    taken: Option<u32>,
}

/// Why choices cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divergence {
    /// The choice of this number is not right for these extents.
    Wrong(usize),
    /// Another question was asked than before, about this node, if there is one: the graphs differ by more than choices.
    Elsewhere(Option<u32>),
}

/// The choices made for a graph, in the order of the questions.
#[derive(Clone, Debug, Default)]
pub struct Record(Vec<Choice>);

#[derive(Debug, Default)]
struct State {
    made: Vec<Choice>,
    /// What is followed; `None` when choices are only written down.
    followed: Option<Arc<Record>>,
    forbidden: BTreeSet<usize>,
    divergence: Option<Divergence>,
}

/// What a graph's choices follow. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Choices(Option<Arc<Mutex<State>>>);

impl Choices {
    /// Writes choices down; those with these numbers are not taken.
    pub fn record(forbidden: &BTreeSet<usize>) -> Choices {
        Choices::with(State { forbidden: forbidden.clone(), ..State::default() })
    }

    /// Follows choices made before.
    pub fn follow(record: &Arc<Record>) -> Choices {
        Choices::with(State { followed: Some(record.clone()), ..State::default() })
    }

    fn with(state: State) -> Choices {
        Choices(Some(Arc::new(Mutex::new(state))))
    }

    /// What was chosen since these choices were made.
    ///
    /// # Errors
    /// Where they could not be followed.
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
        // A list of choices is whole after each of them.
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A choice between several ways to do something and leaving it, which is always right: `own` is what these extents ask for, `right`
    /// tells whether a way is right for them.
    pub fn take(
        &self,
        site: &'static str,
        node: u32,
        own: Option<u32>,
        right: impl FnOnce(u32) -> bool,
    ) -> Option<u32> {
        let Some(mut state) = self.state() else { return own };
        let at = state.made.len();
        let taken = match &state.followed {
            _ if state.divergence.is_some() => return own,
            None => own.filter(|_| !state.forbidden.contains(&at)),
            Some(followed) => match followed.0.get(at) {
                Some(choice) if (choice.site, choice.node) == (site, node) => {
                    let taken = choice.taken;
                    if !taken.is_none_or(right) {
                        state.divergence = Some(Divergence::Wrong(at));
                        return own;
                    }
                    taken
                }
                _ => {
                    state.divergence = Some(Divergence::Elsewhere(Some(node)));
                    return own;
                }
            },
        };
        state.made.push(Choice { site, node, taken });
        taken
    }

    /// Whether to do what is right only where `holds`.
    pub fn holds(&self, site: &'static str, node: u32, holds: bool) -> bool {
        self.take(site, node, holds.then_some(0), |_| holds).is_some()
    }

    /// Whether to do what is always right, and here `pays`.
    pub fn pays(&self, site: &'static str, node: u32, pays: bool) -> bool {
        self.take(site, node, pays.then_some(0), |_| true).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_cost_are_followed_and_wrong_ones_are_found() {
        let first = Choices::record(&BTreeSet::new());
        assert!(first.pays("fold", 1, true) && first.holds("twin", 2, true) && !first.holds("view", 3, false));
        let record = Arc::new(first.finish().expect("nothing to follow"));

        let same = Choices::follow(&record);
        assert!(same.pays("fold", 1, false), "cost is followed blindly");
        assert!(same.holds("twin", 2, true));
        assert!(!same.holds("view", 3, true), "what was left is left, even where it would be right");
        same.finish().expect("followed");

        let wrong = Choices::follow(&record);
        wrong.pays("fold", 1, true);
        wrong.holds("twin", 2, false);
        assert_eq!(wrong.finish().err(), Some(Divergence::Wrong(1)));

        let other = Choices::follow(&record);
        other.pays("fold", 7, true);
        assert_eq!(other.finish().err(), Some(Divergence::Elsewhere(Some(7))));

        let again = Choices::record(&BTreeSet::from([1]));
        again.pays("fold", 1, true);
        assert!(!again.holds("twin", 2, true), "forbidden");

        assert!(Choices::default().holds("twin", 2, true), "alone, each graph chooses for itself");
    }
}
