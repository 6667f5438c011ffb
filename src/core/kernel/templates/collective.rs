//! Collectives: a kernel that exchanges data with the other ranks of a group. No text and no code computes it: a backend hands it to the
//! library that its ranks have joined.
//!
//! ```text
//! ranks 2         rank 0    rank 1        rank 0    rank 1
//! all reduce      [a b]     [c d]     ->  [a+c b+d] [a+c b+d]
//! all gather      [a]       [b]       ->  [a b]     [a b]
//! reduce scatter  [a b]     [c d]     ->  [a+c]     [b+d]
//! all to all      [a b]     [c d]     ->  [a c]     [b d]
//! send, receive   [a b]     [mark]    ->  [mark]    [a b]
//! ```

use super::*;
use std::fmt;

/// What the ranks of a group do together. The first axis of what is gathered, scattered or exchanged has one part per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// Each gets all elements, joined.
    AllReduce(Reduction),
    /// Each gets the elements of all.
    AllGather,
    /// Each gets a part of all elements, joined.
    ReduceScatter(Reduction),
    /// Each gets a part of each.
    AllToAll,
    /// One sends all elements to another. It gets none: it writes a mark, which the next that passes reads, so that their order stays.
    Send {
        /// The place of the other.
        to: usize,
    },
    /// One gets all elements from another. It gives none: it reads the mark, or the elements, of the one before.
    Recv {
        /// The place of the other.
        from: usize,
    },
}

/// An exchange, and those who take part.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Collective {
    /// What they do.
    pub exchange: Exchange,
    /// The mesh axis along which they are a group.
    pub axis: String,
    /// The number of ranks.
    pub ranks: usize,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |reduction: &Reduction| match reduction {
            Reduction::Sum => "sum",
            Reduction::Max => "maximum",
            Reduction::Min => "minimum",
            Reduction::Prod => "product",
        };
        match self {
            Exchange::AllReduce(by) => write!(f, "all reduce by {}", join(by)),
            Exchange::AllGather => f.write_str("all gather"),
            Exchange::ReduceScatter(by) => write!(f, "reduce scatter by {}", join(by)),
            Exchange::AllToAll => f.write_str("all to all"),
            Exchange::Send { to } => write!(f, "send to {to}"),
            Exchange::Recv { from } => write!(f, "receive from {from}"),
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} ranks along '{}'", self.exchange, self.ranks, self.axis)
    }
}

impl Exchange {
    /// The shape that each rank of `ranks` gets when it gives data of this one.
    ///
    /// # Errors
    /// When the first axis does not have a part for each rank.
    pub fn shape(self, given: &Shape, ranks: usize) -> Verdict<Shape> {
        let parts = || {
            ensure(given.first() == Some(&ranks), || {
                format!("expected {ranks} parts along the first axis, found {given}")
            })
        };
        Ok(match self {
            Exchange::AllReduce(_) => given.clone(),
            Exchange::AllGather => std::iter::once(ranks).chain(given.iter().copied()).collect(),
            Exchange::ReduceScatter(_) => {
                parts()?;
                given[1..].iter().copied().collect()
            }
            Exchange::AllToAll => {
                parts()?;
                given.clone()
            }
            Exchange::Send { .. } | Exchange::Recv { .. } => return Err("it is one rank's from another".into()),
        })
    }

    /// What a rank does that meets one which does this, and which is at `place` to it.
    pub fn met(self, place: usize) -> Exchange {
        match self {
            Exchange::Send { .. } => Exchange::Recv { from: place },
            Exchange::Recv { .. } => Exchange::Send { to: place },
            all => all,
        }
    }

    /// The place of the other rank, if two exchange.
    pub fn other(self) -> Option<usize> {
        match self {
            Exchange::Send { to: other } | Exchange::Recv { from: other } => Some(other),
            _ => None,
        }
    }

    /// What each rank gets when the ranks give these elements: the meaning of those in which all take part.
    ///
    /// # Panics
    /// For what one passes to another.
    pub fn of_all(self, given: &[&[f64]]) -> Vec<Vec<f64>> {
        let ranks = given.len();
        let joined = |by: Reduction| -> Vec<f64> {
            let (first, others) = given.split_first().expect("a group has a rank");
            others
                .iter()
                .fold(first.to_vec(), |sums, more| sums.iter().zip(*more).map(|(&a, &b)| by.combine(a, b)).collect())
        };
        let part = |all: &[f64], rank: usize| {
            let each = all.len() / ranks;
            all[rank * each..(rank + 1) * each].to_vec()
        };
        match self {
            Exchange::AllReduce(by) => vec![joined(by); ranks],
            Exchange::AllGather => vec![given.concat(); ranks],
            Exchange::ReduceScatter(by) => {
                let all = joined(by);
                (0..ranks).map(|rank| part(&all, rank)).collect()
            }
            Exchange::AllToAll => {
                (0..ranks).map(|rank| given.iter().flat_map(|all| part(all, rank)).collect()).collect()
            }
            Exchange::Send { .. } | Exchange::Recv { .. } => unreachable!("two ranks exchange it, not all"),
        }
    }

    /// Bytes that each rank sends, when it gives so many, by the algorithms that take the least: rings.
    pub fn sent(self, given: u64, ranks: usize) -> u64 {
        let (ranks, others) = (ranks as u64, ranks as u64 - 1);
        match self {
            Exchange::AllReduce(_) => 2 * (given * others).div_ceil(ranks),
            Exchange::AllGather => given * others,
            Exchange::ReduceScatter(_) | Exchange::AllToAll => (given * others).div_ceil(ranks),
            Exchange::Send { .. } => given,
            Exchange::Recv { .. } => 0,
        }
    }
}

impl Kernel {
    /// The collective, if it is one.
    pub fn collective(&self) -> Option<&Collective> {
        if let Template::Collective(collective) = &self.template { Some(collective) } else { None }
    }

    /// The operand whose elements a collective moves: what is given, or what is got if nothing is given.
    pub fn moved(&self) -> Option<&Operand> {
        Some(match self.collective()?.exchange {
            Exchange::Recv { .. } => &self.writes[0],
            _ => &self.reads[0],
        })
    }

    /// True if no algorithm is chosen for it: a loop launches kernels of its own, a collective is the library's of its ranks.
    pub fn is_the_backends(&self) -> bool {
        matches!(self.template, Template::Repeat(_) | Template::Collective(_))
    }
}

pub(super) static COLLECTIVE: TemplateDef = TemplateDef {
    name: "collective",
    doc: "an exchange of data between the ranks of a mesh axis",
    kind: Kind::Movement,
    core_reads: |t| match t {
        Template::Collective(Collective { exchange: Exchange::Send { .. }, .. }) => 2,
        _ => 1,
    },
    alone: true,
    check: |kernel, _| {
        let Some(Collective { exchange, ranks, .. }) = kernel.collective() else { mismatch(&kernel.template) };
        ensure(*ranks > 0, || "a group of no ranks".to_owned())?;
        let other = exchange.other();
        ensure(other.is_none_or(|other| other < *ranks), || format!("expected one of {ranks} ranks, found {other:?}"))?;
        let expected = if let Exchange::Send { .. } = exchange { 2 } else { 1 };
        ensure(kernel.reads.len() == expected, || {
            format!("expected {expected} operands, found {}", kernel.reads.len())
        })?;
        let read = &kernel.reads[0];
        let shape = match exchange {
            Exchange::Send { .. } => Shape::new([1]),
            Exchange::Recv { .. } => kernel.shape.clone(),
            all => all.shape(&read.access.shape, *ranks)?,
        };
        ensure(shape == kernel.shape, || format!("expected a result {shape}, found {}", kernel.shape))?;
        ensure(kernel.stores_alone() && kernel.body.is_identity(), || {
            "expected one result, stored as it is".to_owned()
        })?;
        let lies = read.access.is_contiguous() && kernel.writes[0].access.is_contiguous();
        ensure(lies, || "expected data in row-major order".to_owned())?;
        let alike = other.is_some() || read.dtype == kernel.writes[0].dtype;
        ensure(alike, || "expected data of one type".to_owned())?;
        let sums = matches!(exchange, Exchange::AllReduce(_) | Exchange::ReduceScatter(_));
        ensure(!sums || read.dtype.is_number(), || format!("expected numbers, found {}", read.dtype))
    },
    meaning: |kernel, index, elements| {
        // Of a group of one rank; others are the ranks' together.
        let Some(Collective { exchange, .. }) = kernel.collective() else { mismatch(&kernel.template) };
        if exchange.other().is_some() {
            // Alone it has nobody to get something from.
            return Row { core: vec![0.0], ..Row::default() };
        }
        let place = match exchange {
            Exchange::AllGather => index[1..].to_vec(),
            Exchange::ReduceScatter(_) => [&[0], index].concat(),
            Exchange::AllReduce(_) | Exchange::AllToAll => index.to_vec(),
            Exchange::Send { .. } | Exchange::Recv { .. } => unreachable!("it has another"),
        };
        Row { core: vec![elements.at(0, &place)], ..Row::default() }
    },
    ..PLAIN
};
