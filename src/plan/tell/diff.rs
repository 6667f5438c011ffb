//! Compares two plans buffer by buffer.

use super::peak::{Peak, peak};
use crate::{Buffer, BufferIdx, Class, Knob, SegmentIdx, View};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// The kind of difference of a buffer between two plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Only the second plan has it.
    New,
    /// Only the first plan has it.
    Gone,
    /// It takes more bytes.
    Grown,
    /// It takes fewer bytes.
    Shrunk,
    /// It takes the same number of bytes at another address.
    Moved,
}

/// A buffer that differs between two plans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// Its name. If several buffers share a name and a class, the first is compared with the first, the second with the second.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// The kind of difference.
    pub fate: Fate,
    /// Bytes in each plan; 0 if the plan does not have it.
    pub bytes: [u64; 2],
    /// Segment and offset in each plan that has it.
    pub at: [Option<(SegmentIdx, u64)>; 2],
}

/// The bytes of one class in two plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Total {
    /// The class of the segments.
    pub class: Class,
    /// Bytes of these segments in each plan, of all runs at once.
    pub bytes: [u64; 2],
}

/// The differences between two plans.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// Names of the plans.
    pub plans: [String; 2],
    /// Names of their targets.
    pub targets: [String; 2],
    /// Bytes of each plan.
    pub planned_bytes: [u64; 2],
    /// Bytes by class, for the classes that either plan has.
    pub classes: Vec<Total>,
    /// The buffers that differ, the largest change first.
    pub buffers: Vec<Changed>,
    /// Number of buffers that are the same.
    pub unchanged: usize,
    /// The choices of each plan that the other does not have, or not at the same bytes.
    pub choices: [Vec<Knob>; 2],
    /// The step with the most live bytes in each plan, and the buffers that are live there.
    pub peaks: [Peak; 2],
}

/// Compares two plans buffer by buffer.
pub fn diff(a: View, b: View) -> Diff {
    let plans = [a, b];
    let total = |class| Total { class, bytes: plans.map(|p| p.class_bytes(class) * p.plan.copies(class)) };
    let classes = Class::ALL.into_iter().map(total).filter(|t| t.bytes != [0, 0]).collect();
    let [before, after] = plans.map(keyed);
    let numbers: HashMap<_, _> = after.iter().copied().collect();
    let old: HashMap<_, _> = before.iter().copied().collect();
    let place = |b: &Buffer| (b.segment, b.offset);
    let mut unchanged = 0;
    let mut buffers = Vec::new();
    for (key, was) in &before {
        let now = numbers.get(key);
        let fate = match now {
            None => Fate::Gone,
            Some(now) if now.bytes > was.bytes => Fate::Grown,
            Some(now) if now.bytes < was.bytes => Fate::Shrunk,
            Some(now) if place(now) != place(was) => Fate::Moved,
            Some(_) => {
                unchanged += 1;
                continue;
            }
        };
        let (bytes, at) = ([was.bytes, now.map_or(0, |b| b.bytes)], [Some(place(was)), now.map(|b| place(b))]);
        buffers.push(Changed { name: was.name.clone(), class: was.class, fate, bytes, at });
    }
    for (_, now) in after.iter().filter(|(key, _)| !old.contains_key(key)) {
        let (bytes, at) = ([0, now.bytes], [None, Some(place(now))]);
        buffers.push(Changed { name: now.name.clone(), class: now.class, fate: Fate::New, bytes, at });
    }
    // The sort is stable, so equal changes stay in the order of the plans.
    buffers.sort_by_key(|c| Reverse((c.bytes[0].abs_diff(c.bytes[1]), c.bytes[1])));
    Diff {
        plans: plans.map(|p| p.name.clone()),
        targets: plans.map(|p| p.target.name.clone()),
        planned_bytes: plans.map(|p| p.bytes()),
        classes,
        buffers,
        unchanged,
        choices: [others(a, b), others(b, a)],
        peaks: plans.map(|p| peak(p, None)),
    }
}

/// The choices of a program, and of its plan, that are not another's.
fn others(own: View, other: View) -> Vec<Knob> {
    let known: Vec<&Knob> = other.choices().collect();
    own.choices().filter(|knob| !known.contains(knob)).cloned().collect()
}

/// Name, class, and the number among the buffers that share both.
type Key<'a> = (&'a str, Class, usize);

fn keyed(plan: View<'_>) -> Vec<(Key<'_>, &Buffer)> {
    let plan = plan.program;
    let mut seen: HashMap<(&str, Class), usize> = HashMap::new();
    let keys = plan.buffers.iter().map(|b| (b.name.as_str(), b.class));
    let mut count = |key| {
        let count = seen.entry(key).or_default();
        *count += 1;
        (key.0, key.1, *count)
    };
    // An update has the bytes of its state.
    let updates: HashSet<BufferIdx> = plan.state.iter().filter_map(|state| state.update).collect();
    let all = keys.map(&mut count).zip(BufferIdx::enumerate(&plan.buffers));
    all.filter(|(_, (b, _))| !updates.contains(b)).map(|(key, (_, buffer))| (key, buffer)).collect()
}
