//! Ranks that are processes, over any MPI library with the standard ABI of MPI 5.0. It is looked for at run time, none is needed to build.
//!
//! A thread of its own initialises MPI and leaves it, so that nobody waits without end for ranks that never come. Collectives are started,
//! then asked whether they are over, up to a deadline. Sums of halves, which MPI has no type for, and the extremes of floats, where NaN
//! must win on all ranks, are computed here. Halves are rounded after each rank, integers that overflow wrap. Ranks that give other numbers
//! of elements than the others are not found in all cases: a plan that all ranks share keeps from it.

use crate::ranks::{Exchanged, PATIENCE, Ranks, pause};
use joins::{JOINS, kind, operation};
use library::{Handle, Table, abi, find};
use plimsoll_core::dtype::DType;
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::{Exchange, Reduction};
use plimsoll_core::mesh::Mesh;
use std::ffi::{c_int, c_void};
use std::fmt::Display;
use std::path::Path;
use std::ptr::{self, null_mut};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

mod joins;
mod library;

/// A rank that ends waits so many times its patience for the others: they may have files to write, and launchers end them when it goes
/// without having left MPI.
const PARTING: u32 = 10;

/// An error of this backend.
fn failed(what: impl Display) -> Error {
    Error::Backend { backend: "mpi", what: what.to_string(), file: None }
}

/// The ranks of a mesh, each a process that a launcher of MPI has started.
///
/// It is to be dropped before the process ends: launchers end all ranks when one goes without leaving MPI. After an error no more calls of
/// MPI are made, and MPI is not left in order. A rank that was late may still write where this one wanted its elements: the process should
/// end.
#[derive(Debug)]
pub struct Mpi {
    world: World,
    /// Tells the thread that has initialised MPI to leave it.
    leave: Sender<()>,
    /// Is hung up by that thread when it ends.
    told: Mutex<Receiver<Result<World>>>,
}

/// All ranks, to one of them.
#[derive(Debug)]
struct World {
    table: Table,
    mesh: Mesh,
    rank: usize,
    /// The number of processes.
    size: usize,
    /// The communicator of this rank's group along each axis.
    groups: Vec<Handle>,
    /// The operations that [`JOINS`] are to MPI.
    joins: Vec<(DType, Reduction, Handle)>,
    patience: Duration,
    /// Why no more calls are made. Calls are made under this lock, one at a time.
    broken: Mutex<Option<String>>,
}

impl Mpi {
    /// Joins the processes that a launcher has started, one per rank of the mesh. A process can do so once.
    ///
    /// # Errors
    /// When there is no library, the processes are not as many as the ranks, their meshes differ, one is gone or late, or MPI was
    /// initialised before.
    pub fn join(mesh: &Mesh) -> Result<Arc<dyn Ranks>> {
        Mpi::patient(mesh, PATIENCE)
    }

    /// As [`join`](Self::join): each waits so long for the others.
    ///
    /// # Errors
    /// As there.
    pub fn patient(mesh: &Mesh, patience: Duration) -> Result<Arc<dyn Ranks>> {
        let (table, library) = find()?;
        let (tell, told) = mpsc::channel();
        let (leave, left) = mpsc::channel();
        let mesh = mesh.clone();
        let main = thread::Builder::new().name("mpi".into()).spawn(move || {
            let world = World::of(table, mesh, patience, &library);
            if tell.send(world).is_ok() && left.recv().is_ok() {
                // SAFETY: this thread has initialised MPI, and no call follows. An error is nobody's any more.
                let _ = unsafe { table.MPI_Finalize() };
            }
        });
        main.map_err(|error| failed(format!("a thread for MPI: {error}")))?;
        // The ranks start, and then agree on the mesh.
        let world = told.recv_timeout(patience.saturating_mul(2)).map_err(|_| {
            failed(format!("the ranks did not start MPI in {} s: one is gone or late", 2.0 * patience.as_secs_f64()))
        })??;
        Ok(Arc::new(Mpi { world, leave, told: Mutex::new(told) }))
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.world.is_whole() && !thread::panicking() && self.leave.send(()).is_ok() {
            let told = self.told.get_mut().unwrap_or_else(PoisonError::into_inner);
            // It waits until the thread hangs up.
            let _ = told.recv_timeout(self.world.patience.saturating_mul(PARTING));
        }
    }
}

impl World {
    /// Initialises MPI, and makes the groups of the mesh. If the ranks cannot agree, they leave MPI.
    fn of(table: Table, mesh: Mesh, patience: Duration, library: &Path) -> Result<World> {
        let mut world = World::of_all(table, mesh, patience).map_err(failed)?;
        let made = world.agree(library).and_then(|()| world.divide().map_err(failed));
        if made.is_err() && world.is_whole() {
            // SAFETY: this thread has initialised MPI, and no call follows. What went wrong before counts.
            let _ = unsafe { table.MPI_Finalize() };
        }
        made.map(|()| world)
    }

    /// All processes, without groups.
    fn of_all(table: Table, mesh: Mesh, patience: Duration) -> Result<World, String> {
        let (mut before, mut provided, mut rank, mut size) = (0, 0, 0, 0);
        // SAFETY: this one may be called at any time.
        unsafe { table.MPI_Initialized(&mut before) }?;
        ensure(before == 0, || "MPI is initialised already: a process can join ranks once".to_owned())?;
        // SAFETY: nobody has initialised MPI; programs need not pass their arguments; each call writes the numbers that it is given.
        unsafe {
            table.MPI_Init_thread(null_mut(), null_mut(), abi::THREAD_SERIALIZED, &mut provided)?;
            table.MPI_Comm_set_errhandler(abi::COMM_WORLD, abi::ERRORS_RETURN)?;
            table.MPI_Comm_rank(abi::COMM_WORLD, &mut rank)?;
            table.MPI_Comm_size(abi::COMM_WORLD, &mut size)?;
        }
        let threads = "the MPI library lets one thread call it, calls of any thread are needed";
        ensure(provided >= abi::THREAD_SERIALIZED, || threads.to_owned())?;
        let (rank, size) = (rank.max(0) as usize, size.max(0) as usize);
        Ok(World { table, mesh, rank, size, groups: Vec::new(), joins: Vec::new(), patience, broken: Mutex::new(None) })
    }

    /// Checks that all ranks have the same mesh, and that each of its ranks is a process. All come to the same result.
    fn agree(&self, library: &Path) -> Result<()> {
        let own = self.mesh.to_string();
        let all = self.gather(own.as_bytes())?;
        let names: Vec<_> = all.iter().map(|mesh| format!("'{}'", String::from_utf8_lossy(mesh))).collect();
        ensure(all.windows(2).all(|two| two[0] == two[1]), || {
            self.failed(format!("the ranks have different meshes: {}", names.join(", ")))
        })?;
        let (ranks, size, by) = (self.mesh.ranks(), self.size, library.display());
        ensure(ranks == size, || {
            self.failed(format!("mesh '{own}' has {ranks} ranks, the launcher started {size}, as {by} counts them"))
        })
    }

    /// Makes the groups along each axis, and what joins elements.
    fn divide(&mut self) -> Result<(), String> {
        for axis in 0..self.mesh.axes().len() {
            let (first, place) = (self.mesh.group(self.rank, axis)[0], self.mesh.place(self.rank, axis));
            let mut group = 0;
            // SAFETY: it writes a handle. All ranks, of which there are less than `MOST_RANKS`, call it for each axis.
            unsafe { self.table.MPI_Comm_split(abi::COMM_WORLD, first as c_int, place as c_int, &mut group) }?;
            self.groups.push(group);
        }
        for (dtype, by, join) in JOINS {
            let mut op = 0;
            // SAFETY: it writes a handle. The function is of the demanded type, lives forever, and takes its operands in any order.
            unsafe { self.table.MPI_Op_create_c(join, 1, &mut op) }?;
            self.joins.push((dtype, by, op));
        }
        Ok(())
    }

    /// An error of this rank.
    fn failed(&self, what: impl Display) -> Error {
        failed(format!("rank {}: {what}", self.rank))
    }

    /// True if calls may be made.
    fn is_whole(&self) -> bool {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Makes a call, unless one has failed before.
    fn call(&self, call: impl FnOnce(&Table) -> Result<(), String>) -> Result<()> {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        if broken.is_none() {
            *broken = call(&self.table).err();
        }
        broken.as_ref().map_or(Ok(()), |why| Err(self.failed(why)))
    }

    /// Starts a collective, and waits for it.
    fn wait(&self, what: &dyn Display, start: impl FnOnce(&Table, &mut Handle) -> Result<(), String>) -> Result<()> {
        let (mut request, mut done) = (abi::REQUEST_NULL, 0);
        let named = |error| format!("'{what}': {error}");
        self.call(|table| start(table, &mut request).map_err(named))?;
        let begun = Instant::now();
        loop {
            let waited = begun.elapsed();
            // SAFETY: the request is one that was started and is not over.
            self.call(|table| unsafe { table.MPI_Test(&mut request, &mut done, null_mut()) }.map_err(named))?;
            if done != 0 {
                return Ok(());
            }
            if waited > self.patience {
                let why = format!("'{what}' did not end in {} s: a rank is gone or late", self.patience.as_secs_f64());
                return self.call(|_| Err(why));
            }
            pause(waited);
        }
    }

    /// How elements are joined: the type that MPI knows them by, and its operation.
    fn joined(&self, dtype: DType, by: Reduction) -> Result<(Handle, Handle)> {
        let kind = kind(dtype).ok_or_else(|| self.failed(format!("elements of {dtype} are not joined")))?;
        let own = self.joins.iter().find(|(of, how, _)| (*of, *how) == (dtype, by));
        Ok((kind, own.map_or_else(|| operation(dtype, by), |(_, _, op)| *op)))
    }

    /// Exchanges elements with this rank's group.
    ///
    /// # Safety
    /// As [`Ranks::exchange`].
    unsafe fn exchange(&self, what: &Exchanged, read: *const u8, write: *mut u8) -> Result<()> {
        let Exchanged { collective, dtype, given } = what;
        let at = what.axis(&self.mesh)?;
        let aligned = [read as usize, write as usize].iter().all(|at| at.is_multiple_of(dtype.size()));
        ensure(aligned, || {
            self.failed(format!("'{collective}': expected elements of {dtype} at multiples of their size"))
        })?;
        // Elements that are moved are bytes.
        let (count, (kind, op)) = match collective.exchange {
            Exchange::AllReduce(by) | Exchange::ReduceScatter(by) => (*given, self.joined(*dtype, by)?),
            _ => (given * dtype.size(), (abi::BYTE, abi::OP_NULL)),
        };
        let (count, part) = (count as i64, (count / collective.ranks) as i64);
        let read: *const c_void = if ptr::eq(read, write) { abi::IN_PLACE } else { read.cast() };
        let (write, comm) = (write.cast(), self.groups[at]);
        // SAFETY: the caller lends both places until all is over, and the counts are those of the elements there.
        self.wait(collective, |table, request| unsafe {
            match collective.exchange {
                Exchange::AllReduce(_) => table.MPI_Iallreduce_c(read, write, count, kind, op, comm, request),
                Exchange::ReduceScatter(_) => {
                    table.MPI_Ireduce_scatter_block_c(read, write, part, kind, op, comm, request)
                }
                Exchange::AllGather => table.MPI_Iallgather_c(read, count, kind, write, count, kind, comm, request),
                Exchange::AllToAll => table.MPI_Ialltoall_c(read, part, kind, write, part, kind, comm, request),
                Exchange::Send { to } => table.MPI_Isend_c(read, count, kind, to as c_int, 0, comm, request),
                Exchange::Recv { from } => table.MPI_Irecv_c(write, count, kind, from as c_int, 0, comm, request),
            }
        })
    }

    /// The bytes that all ranks give.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (kind, comm) = (abi::BYTE, abi::COMM_WORLD);
        let mut counts = vec![0i64; self.size];
        counts[self.rank] = bytes.len() as i64;
        let write: *mut c_void = counts.as_mut_ptr().cast();
        // SAFETY: there is a number per rank, and this rank's lies in its place.
        let told = self.wait(&"gather of all ranks", |table, request| unsafe {
            table.MPI_Iallgather_c(abi::IN_PLACE, 1, abi::INT64, write, 1, abi::INT64, comm, request)
        });
        // A rank that is late may still write there.
        let counts = kept(told, counts)?;
        let mut places = vec![0isize; self.size];
        (1..self.size).for_each(|rank| places[rank] = places[rank - 1] + counts[rank - 1] as isize);
        let mut all = vec![0u8; counts.iter().sum::<i64>() as usize];
        all[places[self.rank] as usize..][..bytes.len()].copy_from_slice(bytes);
        let (write, counted, lie) = (all.as_mut_ptr().cast(), counts.as_ptr(), places.as_ptr());
        // SAFETY: there is room for the bytes of all ranks, and this rank's lie in their place.
        let told = self.wait(&"gather of all ranks", |table, request| unsafe {
            table.MPI_Iallgatherv_c(abi::IN_PLACE, 0, kind, write, counted, lie, kind, comm, request)
        });
        let (all, counts, places) = kept(told, (all, counts, places))?;
        let part = |(place, count): (&isize, &i64)| all[*place as usize..][..*count as usize].to_vec();
        Ok(places.iter().zip(&counts).map(part).collect())
    }
}

/// Memory that MPI has used. After an error it still may: then nobody gets it back.
fn kept<T>(told: Result<()>, memory: T) -> Result<T> {
    match told {
        Ok(()) => Ok(memory),
        Err(error) => {
            std::mem::forget(memory);
            Err(error)
        }
    }
}

impl Ranks for Mpi {
    fn mesh(&self) -> &Mesh {
        &self.world.mesh
    }

    fn rank(&self) -> usize {
        self.world.rank
    }

    unsafe fn exchange(&self, what: &Exchanged, read: *const u8, write: *mut u8) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.world.exchange(what, read, write) }
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.world.gather(bytes)
    }

    fn patience(&self) -> Duration {
        self.world.patience
    }
}
