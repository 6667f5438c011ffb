//! The ranks of a mesh, to one of them: what a backend hands its collectives to. Here are ranks that are threads of one process.

use plimsoll_core::dtype::DType;
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::{Collective, Exchange, Kernel, Reduction};
use plimsoll_core::mesh::Mesh;
use plimsoll_core::tensor::{narrow, widen};
use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a rank waits for the others, unless it is told otherwise.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The ranks of a mesh, to one of them.
pub trait Ranks: Send + Sync + Debug {
    /// The mesh.
    fn mesh(&self) -> &Mesh;
    /// The number of this rank.
    fn rank(&self) -> usize;
    /// Exchanges elements in memory of the host with the group of a collective, and waits for it.
    ///
    /// # Errors
    /// When a rank of the group is gone or late, or exchanges something else.
    ///
    /// # Safety
    /// `read` points to as many elements as this rank gives, `write` to as many as it gets. They are equal or disjoint, and nobody else uses
    /// them.
    unsafe fn exchange(&self, what: &Exchanged, read: *const u8, write: *mut u8) -> Result<()>;
    /// The bytes that all ranks give, in order. It is for what ranks agree on, and takes its own memory.
    ///
    /// # Errors
    /// When a rank is gone or late.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// How long a rank waits for the others.
    fn patience(&self) -> Duration;
}

/// A collective, and the elements that each rank gives, or gets if one gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// The collective.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// Their number.
    pub given: usize,
}

impl Exchanged {
    /// What a kernel exchanges if it is a collective, and the bytes before the elements in what it reads and writes.
    pub fn of(kernel: &Kernel) -> Option<(Exchanged, [usize; 2])> {
        let collective = kernel.collective()?.clone();
        let (read, write) = (&kernel.reads[0], &kernel.writes[0]);
        let before = [read, write].map(|operand| operand.access.offset as usize * operand.dtype.size());
        let moved = kernel.moved()?;
        Some((Exchanged { collective, dtype: moved.dtype, given: moved.access.shape.numel() }, before))
    }

    /// What a rank exchanges that meets this one, which is at `place` to it.
    pub fn met(&self, place: usize) -> Exchanged {
        let exchange = self.collective.exchange.met(place);
        Exchanged { collective: Collective { exchange, ..self.collective.clone() }, ..self.clone() }
    }

    /// The number of the axis of a mesh along which it is exchanged.
    ///
    /// # Errors
    /// When the mesh has no such axis, or as many ranks as it is not of.
    pub fn axis(&self, mesh: &Mesh) -> Result<usize> {
        let (at, axis) = mesh.axis(&self.collective.axis)?;
        ensure(self.collective.ranks == axis.ranks, || {
            Error::usage(format!("'{}': expected as many ranks as in mesh '{mesh}'", self.collective))
        })?;
        Ok(at)
    }

    /// The number of elements that this rank gives.
    pub fn gave(&self) -> usize {
        if let Exchange::Recv { .. } = self.collective.exchange { 0 } else { self.given }
    }

    /// The number of elements that each rank gets.
    pub fn got(&self) -> usize {
        let ranks = self.collective.ranks;
        match self.collective.exchange {
            Exchange::AllReduce(_) | Exchange::AllToAll | Exchange::Recv { .. } => self.given,
            Exchange::Send { .. } => 0,
            Exchange::AllGather => self.given * ranks,
            Exchange::ReduceScatter(_) => self.given / ranks,
        }
    }
}

impl fmt::Display for Exchanged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {} for '{}'", self.given, self.dtype, self.collective)
    }
}

/// Waits a little before the next question whether others are ready: at first not at all, later it sleeps.
pub fn pause(waited: Duration) {
    const SPIN: Duration = Duration::from_micros(50);
    const YIELD: Duration = Duration::from_millis(5);
    const SLEEP: Duration = Duration::from_millis(1);
    match waited {
        _ if waited < SPIN => std::hint::spin_loop(),
        _ if waited < YIELD => std::thread::yield_now(),
        _ => std::thread::sleep((waited / 100).min(SLEEP)),
    }
}

/// Ranks that are threads of this process.
#[derive(Debug)]
pub struct Threads {
    mesh: Mesh,
    rank: usize,
    boards: Arc<Boards>,
    patience: Duration,
}

/// A meeting place per axis and group, and one for all ranks.
#[derive(Debug)]
struct Boards {
    groups: Vec<Vec<Board>>,
    /// Those of two ranks, where one sends to the other: made when they first meet.
    pairs: Mutex<HashMap<[usize; 2], Arc<Board>>>,
    all: Board,
}

/// A place where the ranks of a group meet: each says what it brings, and goes on when all are there.
#[derive(Debug, Default)]
struct Board {
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Meeting {
    /// How often all have met.
    met: u64,
    /// What those who are here bring, by their places.
    here: Vec<Option<Brought>>,
    /// What was brought to the last meeting.
    last: Arc<Vec<Brought>>,
    /// Why nobody meets here any more.
    broken: Option<String>,
}

#[derive(Clone, Debug)]
enum Brought {
    /// Where a rank's elements are, and where it wants them.
    Elements {
        what: Exchanged,
        read: usize,
        write: usize,
    },
    Bytes(Vec<u8>),
    Nothing,
}

impl Threads {
    /// The ranks of a mesh, for a thread each.
    pub fn of(mesh: &Mesh) -> Vec<Arc<dyn Ranks>> {
        Threads::patient(mesh, PATIENCE)
    }

    /// As [`of`](Self::of): each waits so long for the others.
    pub fn patient(mesh: &Mesh, patience: Duration) -> Vec<Arc<dyn Ranks>> {
        let groups = mesh.axes().iter().map(|_| (0..mesh.ranks()).map(|_| Board::default()).collect()).collect();
        let boards = Arc::new(Boards { groups, pairs: Mutex::default(), all: Board::default() });
        let rank = |rank| -> Arc<dyn Ranks> {
            Arc::new(Threads { mesh: mesh.clone(), rank, boards: Arc::clone(&boards), patience })
        };
        (0..mesh.ranks()).map(rank).collect()
    }

    /// The error of ranks that exchange what is not the same.
    fn differs(&self, what: &Exchanged, rank: usize, other: &Brought) -> Error {
        let other = if let Brought::Elements { what, .. } = other { what.to_string() } else { "something else".into() };
        let what = format!("rank {} exchanges {what}, rank {rank} {other}", self.rank);
        Error::Backend { backend: "ranks", what, file: None }
    }

    /// Gives elements to another rank, or gets them from it.
    fn pass(&self, what: &Exchanged, other: usize, place: usize, brought: Brought) -> Result<()> {
        let pair = [self.rank.min(other), self.rank.max(other)];
        let board = {
            let mut pairs = self.boards.pairs.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(pairs.entry(pair).or_default())
        };
        let (own, theirs) = if self.rank < other { (0, 1) } else { (1, 0) };
        let both = self.meet(&board, own, &pair, brought)?;
        match (&both[own], &both[theirs]) {
            (Brought::Elements { write, .. }, Brought::Elements { what: there, read, .. })
                if *there == what.met(place) =>
            {
                if let Exchange::Recv { .. } = what.collective.exchange {
                    let (from, bytes) = (*read as *const u8, what.given * what.dtype.size());
                    // SAFETY: the elements of both callers, who wait until all is over.
                    unsafe { std::ptr::copy(from, *write as *mut u8, bytes) }
                }
            }
            (_, there) => return Err(self.differs(what, other, there)),
        }
        // The sender's elements stay until they are read.
        self.meet(&board, own, &pair, Brought::Nothing).map(drop)
    }

    /// Brings something to a board, and returns what all have brought.
    fn meet(&self, board: &Board, place: usize, ranks: &[usize], brought: Brought) -> Result<Arc<Vec<Brought>>> {
        let fail =
            |what: &str| Error::Backend { backend: "ranks", what: format!("rank {}: {what}", self.rank), file: None };
        let mut meeting = board.meeting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = &meeting.broken {
            return Err(fail(why));
        }
        meeting.here.resize(ranks.len(), None);
        meeting.here[place] = Some(brought);
        let met = meeting.met;
        if meeting.here.iter().all(Option::is_some) {
            meeting.last = Arc::new(meeting.here.iter_mut().filter_map(Option::take).collect());
            meeting.met += 1;
            board.changed.notify_all();
            return Ok(Arc::clone(&meeting.last));
        }
        let end = Instant::now() + self.patience;
        while meeting.met == met && meeting.broken.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = ranks.iter().zip(&meeting.here).filter(|(_, here)| here.is_none());
                let missing: Vec<_> = missing.map(|(rank, _)| rank.to_string()).collect();
                meeting.broken =
                    Some(format!("no sign of rank {} for {} s", missing.join(", "), self.patience.as_secs_f64()));
                board.changed.notify_all();
                break;
            }
            meeting = board.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match &meeting.broken {
            Some(why) => Err(fail(why)),
            None => Ok(Arc::clone(&meeting.last)),
        }
    }
}

impl Ranks for Threads {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn rank(&self) -> usize {
        self.rank
    }

    unsafe fn exchange(&self, what: &Exchanged, read: *const u8, write: *mut u8) -> Result<()> {
        let Exchanged { collective: Collective { exchange, ranks, .. }, dtype, given } = what;
        let at = what.axis(&self.mesh)?;
        let (group, place) = (self.mesh.group(self.rank, at), self.mesh.place(self.rank, at));
        let brought = Brought::Elements { what: what.clone(), read: read as usize, write: write as usize };
        if let Some(other) = exchange.other() {
            return self.pass(what, group[other], place, brought);
        }
        let board = &self.boards.groups[at][group[0]];
        let all = self.meet(board, place, &group, brought)?;
        let mut places = Vec::with_capacity(group.len());
        for (brought, rank) in all.iter().zip(&group) {
            match brought {
                Brought::Elements { what: other, read, write } if other == what => {
                    places.push((*read as *const u8, *write as *mut u8))
                }
                other => return Err(self.differs(what, *rank, other)),
            }
        }
        let size = dtype.size();
        let copy = |from: *const u8, to: *mut u8, elements: usize| {
            // SAFETY: the caller's elements; ranks write apart, and read what nobody writes before the next meeting. Equal places stay.
            unsafe { std::ptr::copy(from, to, elements * size) }
        };
        let part = |rank: usize, of: usize| (rank * given / of, (rank + 1) * given / of);
        // Each rank joins one part of the elements of all, in the order of the ranks.
        let join = |by: Reduction, (start, end): (usize, usize), to: *mut u8| {
            const BLOCK: usize = 256;
            let (mut sums, mut more) = ([0.0; BLOCK], [0.0; BLOCK]);
            for first in (start..end).step_by(BLOCK) {
                let count = BLOCK.min(end - first);
                for (rank, (from, _)) in places.iter().enumerate() {
                    // SAFETY: as above.
                    let bytes = unsafe { std::slice::from_raw_parts(from.add(first * size), count * size) };
                    let values = if rank == 0 { &mut sums } else { &mut more };
                    widen(*dtype, bytes, &mut values[..count]);
                    if rank > 0 {
                        sums.iter_mut().zip(&more).for_each(|(sum, more)| *sum = by.combine(*sum, *more));
                    }
                }
                // SAFETY: as above; a part that is joined in place is this rank's alone.
                let out = unsafe { std::slice::from_raw_parts_mut(to.add((first - start) * size), count * size) };
                narrow(*dtype, &sums[..count], out);
            }
        };
        let offset = |pointer: *mut u8, elements: usize| pointer.wrapping_add(elements * size);
        match exchange {
            Exchange::AllReduce(by) => {
                let own = part(place, *ranks);
                join(*by, own, offset(write, own.0));
                self.meet(board, place, &group, Brought::Nothing)?;
                for (rank, (_, from)) in places.iter().enumerate().filter(|(rank, _)| *rank != place) {
                    let (start, end) = part(rank, *ranks);
                    copy(offset(*from, start), offset(write, start), end - start);
                }
            }
            Exchange::AllGather => {
                places
                    .iter()
                    .enumerate()
                    .for_each(|(rank, (from, _))| copy(*from, offset(write, rank * given), *given));
            }
            Exchange::ReduceScatter(by) => join(*by, part(place, *ranks), write),
            Exchange::AllToAll => {
                let (start, end) = part(place, *ranks);
                for (rank, (from, _)) in places.iter().enumerate() {
                    copy(offset(from.cast_mut(), start), offset(write, part(rank, *ranks).0), end - start);
                }
            }
            Exchange::Send { .. } | Exchange::Recv { .. } => unreachable!("two ranks exchange it"),
        }
        // Nobody goes on before all have read.
        self.meet(board, place, &group, Brought::Nothing).map(drop)
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ranks: Vec<usize> = (0..self.mesh.ranks()).collect();
        let all = self.meet(&self.boards.all, self.rank, &ranks, Brought::Bytes(bytes.to_vec()))?;
        let bytes = |brought: &Brought| if let Brought::Bytes(bytes) = brought { bytes.clone() } else { Vec::new() };
        Ok(all.iter().map(bytes).collect())
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}
