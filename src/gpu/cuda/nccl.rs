//! The ranks of a mesh, through NCCL.
//!
//! ```text
//! join    rank 0 makes an id --to all ranks--> a communicator of all --split--> one per mesh axis --> an exchange of each kind
//! alloc   the memory that NCCL took is held against the segment that the plan has for it
//! record  a launch of a collective is a call of NCCL in the stream of the launch, which a capture keeps as it keeps kernels
//! wait    asks the stream, and NCCL for errors; when a rank is gone or late, everything is aborted, and all later calls fail
//! ```
//!
//! - NCCL is looked for when a device joins ranks, so that others need none. It takes its memory then: all is connected, and each kind of
//!   exchange is made once. Multicast over NVLink stays off.
//! - Its calls do not block: after each, NCCL is asked until it has done it, up to a deadline.
//! - `ncclCommDestroy` waits for ever while a CUDA graph lives that has captured calls of the communicator. So steps share [`Group`], which
//!   goes after the last of them.
//! - Elements that are moved are bytes. Those that are joined are of the types that NCCL knows; of floats with NaN, its extremes may be numbers.

use super::Cuda;
use super::api::{Driver, Nccl, NcclComm, NcclConfig, NcclId, Refusal, failed};
use super::find::{dotted_nccl, find_nccl, missing};
use super::taken::NCCL;
use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUresult, CUstream};
use plimsoll_backend::ranks::{Exchanged, Ranks, pause};
use plimsoll_backend::{KernelId, Launch, Slice};
use plimsoll_core::dtype::DType;
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::figures::grouped;
use plimsoll_core::kernel::{Collective, Exchange, Kernel, Reduction};
use plimsoll_core::mesh::Mesh;
use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// `ncclInProgress`: a call that goes on.
const IN_PROGRESS: c_int = 7;
/// `NCCL_API_MAGIC`, `NCCL_CONFIG_UNDEF_INT` and the version of [`NcclConfig`].
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
const CONFIG: u32 = 21_800;
/// The most blocks of a collective: each has buffers of its own.
const MOST_BLOCKS: c_int = 4;
/// What NCCL reads from the environment when it starts, and whether a user may decide otherwise.
const ENVIRONMENT: [(&str, &str, bool); 4] = [
    // Multicast can put the cards of a shared host out of service.
    ("NCCL_NVLS_ENABLE", "0", false),
    // Bytes of a buffer.
    ("NCCL_BUFFSIZE", "1048576", true),
    // Those of another protocol, a quarter of NCCL's own choice: eight steps of whole lines of 128 bytes.
    ("NCCL_LL128_BUFFSIZE", "1228800", true),
    // Connect when the ranks join, and not at a first exchange.
    ("NCCL_RUNTIME_CONNECT", "0", true),
];
/// How long work may go on that has been aborted.
const PARTING: Duration = Duration::from_secs(5);

/// The communicators of a rank.
pub(super) struct Group {
    nccl: Arc<Nccl>,
    driver: Arc<Driver>,
    context: CUcontext,
    mesh: Mesh,
    rank: usize,
    patience: Duration,
    /// All that were made, that of all ranks first.
    made: RefCell<Vec<NcclComm>>,
    /// Per axis of the mesh, that of this rank's group; null for a group of one.
    axes: Vec<NcclComm>,
    /// Exchanges may be under way.
    busy: Cell<bool>,
    /// Why nothing is exchanged any more.
    lost: OnceCell<Refusal>,
    /// Threads that abort communicators.
    aborts: RefCell<Vec<JoinHandle<()>>>,
}

/// An exchange that a kernel stands for, and the bytes before the elements in its arguments.
#[derive(Clone)]
pub(super) struct Noted {
    what: Exchanged,
    before: [usize; 2],
}

/// An exchange that is ready to be launched.
pub(super) struct Call {
    group: Rc<Group>,
    what: Exchanged,
    read: CUdeviceptr,
    write: CUdeviceptr,
}

/// A launch of a collective.
pub(super) enum Meeting {
    Call(Call),
    /// A group of one rank has what it gives: from, to, and bytes.
    Copy(CUdeviceptr, CUdeviceptr, usize),
}

/// The number of a type in nccl.h, if elements of it can be joined.
fn kind(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 => BYTE,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// `ncclUint8`.
const BYTE: c_int = 1;

/// The number of a way to join elements in nccl.h.
fn operation(by: Reduction) -> c_int {
    match by {
        Reduction::Sum => 0,
        Reduction::Prod => 1,
        Reduction::Max => 2,
        Reduction::Min => 3,
    }
}

/// Prepares the environment, once, before NCCL reads it.
fn prepare_environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, value, decided) in ENVIRONMENT {
            if !decided || std::env::var_os(name).is_none() {
                // SAFETY: Rust's own readers wait for it; NCCL's start after it, and no library that is used here reads the environment
                // once it is loaded and the device is open.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

/// How communicators are made: their calls do not block, and those that are split share memory.
fn config() -> NcclConfig {
    NcclConfig {
        size: size_of::<NcclConfig>(),
        magic: MAGIC,
        version: CONFIG,
        blocking: 0,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: MOST_BLOCKS,
        net_name: std::ptr::null(),
        split_share: 1,
        traffic_class: UNDEFINED,
    }
}

/// What rank 0 tells the others: its library's version, and an id. The others tell the version.
fn tell(nccl: &Nccl, version: c_int, rank: usize) -> Result<Vec<u8>, Refusal> {
    let mut told = version.to_le_bytes().to_vec();
    if rank == 0 {
        let mut id = NcclId([0; 128]);
        // SAFETY: it writes an id.
        unsafe { nccl.ncclGetUniqueId(&mut id) }?;
        told.extend(id.0);
    }
    Ok(told)
}

/// The id that rank 0 has told, when all ranks have one version of NCCL.
fn told(all: &[Vec<u8>]) -> Result<NcclId, String> {
    let version = |told: &[u8]| told.first_chunk().map(|code| c_int::from_le_bytes(*code));
    for (rank, told) in all.iter().enumerate() {
        match told.split_first() {
            Some((1, told)) if version(told) == version(&all[0][1..]) => {}
            Some((1, told)) => {
                let [first, own] = [&all[0][1..], told].map(|told| version(told).map(dotted_nccl).unwrap_or_default());
                return Err(format!("the ranks have not one version of NCCL: rank 0 has {first}, rank {rank} {own}"));
            }
            Some((_, why)) => return Err(format!("rank {rank}: {}", String::from_utf8_lossy(why))),
            None => return Err(format!("rank {rank} said nothing")),
        }
    }
    all[0].get(5..).and_then(|id| id.first_chunk()).map(|id| NcclId(*id)).ok_or("rank 0 told no id".into())
}

impl Group {
    /// The communicators of this rank: of all ranks, and of its group along each axis.
    fn join(cuda: &Cuda, ranks: &dyn Ranks) -> Result<Group> {
        prepare_environment();
        let (found, report) = find_nccl(&cuda.search);
        let path = report.path.clone();
        let own = found.ok_or_else(|| missing(report)).and_then(|(nccl, version)| {
            let told = tell(&nccl, version, ranks.rank()).map_err(failed)?;
            Ok((nccl, version, told))
        });
        // A rank that cannot join says so, and the others need not wait for it.
        let message = match &own {
            Ok((_, _, told)) => [&[1], &told[..]].concat(),
            Err(why) => [&[0], why.to_string().as_bytes()].concat(),
        };
        let all = ranks.gather(&message);
        let (nccl, version, _) = own?;
        let id = told(&all?).map_err(failed)?;
        let path = path.unwrap_or_default();
        tracing::info!("rank {}: NCCL {}, {}", ranks.rank(), dotted_nccl(version), path.display());
        let mut group = Group {
            nccl: Arc::new(nccl),
            driver: Arc::clone(&cuda.driver),
            context: cuda.context,
            mesh: ranks.mesh().clone(),
            rank: ranks.rank(),
            patience: ranks.patience(),
            made: RefCell::default(),
            axes: Vec::new(),
            busy: Cell::new(false),
            lost: OnceCell::new(),
            aborts: RefCell::default(),
        };
        group.connect(id).map_err(|refusal| failed(group.lose(refusal)))?;
        Ok(group)
    }

    fn connect(&mut self, id: NcclId) -> Result<(), Refusal> {
        let (ranks, rank) = (self.mesh.ranks() as c_int, self.rank as c_int);
        // SAFETY: the context is current; the place and the configuration outlive the call.
        let world =
            self.make(None, |nccl, to, config| unsafe { nccl.ncclCommInitRankConfig(to, ranks, id, rank, config) })?;
        for axis in 0..self.mesh.axes().len() {
            let group = self.mesh.group(self.rank, axis);
            let (color, key) = (group[0] as c_int, self.mesh.place(self.rank, axis) as c_int);
            let comm = match group.len() {
                1 => null_mut(),
                all if all == self.mesh.ranks() => world,
                // SAFETY: as above; all ranks split the same communicator, for the same axes.
                _ => self.make(Some(world), |nccl, to, config| unsafe {
                    nccl.ncclCommSplit(world, color, key, to, config)
                })?,
            };
            self.axes.push(comm);
        }
        Ok(())
    }

    /// Makes a communicator, of another one if that is given, and waits for it.
    fn make(
        &self,
        of: Option<NcclComm>,
        call: impl FnOnce(&Nccl, *mut NcclComm, *mut NcclConfig) -> Result<(), Refusal>,
    ) -> Result<NcclComm, Refusal> {
        // NCCL may write there when this rank has given up: then nobody gets it back.
        let place = Box::into_raw(Box::new(AtomicPtr::<c_void>::new(null_mut())));
        let mut config = config();
        // SAFETY: it has just been made, and is never freed before NCCL has written to it.
        let made = || unsafe { (*place).load(Ordering::Acquire) };
        let started = self.begun(call(&self.nccl, place.cast(), &mut config));
        let ready = started.and_then(|()| {
            of.map_or(Ok(()), |of| self.settle(of, "ncclCommSplit"))?;
            self.until("ncclCommInitRankConfig", || Ok(!made().is_null()))?;
            self.settle(made(), "ncclCommInitRankConfig")
        });
        if !made().is_null() {
            self.made.borrow_mut().push(made());
        }
        ready?;
        let comm = made();
        // SAFETY: it was boxed above, and NCCL has done with it.
        drop(unsafe { Box::from_raw(place) });
        Ok(comm)
    }

    /// A call that has begun has not failed. One that has is told in the library's own words, too.
    fn begun(&self, call: Result<(), Refusal>) -> Result<(), Refusal> {
        match call {
            Err(refusal) if refusal.code != IN_PROGRESS => Err(self.explained(refusal.call, refusal.code)),
            _ => Ok(()),
        }
    }

    fn explained(&self, call: &'static str, code: c_int) -> Refusal {
        let meaning = format!("{}: {}", self.nccl.meaning(code), self.nccl.last_error().trim());
        Refusal { call, code, meaning }
    }

    /// Asks until something is so, up to the deadline.
    fn until(&self, call: &'static str, is: impl Fn() -> Result<bool, Refusal>) -> Result<(), Refusal> {
        let start = Instant::now();
        while !is()? {
            let waited = start.elapsed();
            if waited > self.patience {
                let limit = self.patience.as_secs_f64();
                let meaning = format!("it is not over after {limit} s, a rank is gone or late");
                return Err(Refusal { call, code: IN_PROGRESS, meaning });
            }
            pause(waited);
        }
        Ok(())
    }

    /// Waits until NCCL has done what a communicator was last asked for.
    fn settle(&self, comm: NcclComm, call: &'static str) -> Result<(), Refusal> {
        self.until(call, || self.is_settled(comm, call))
    }

    /// True if NCCL has done what a communicator was last asked for; an error if that has failed.
    fn is_settled(&self, comm: NcclComm, call: &'static str) -> Result<bool, Refusal> {
        let mut state = 0;
        // SAFETY: the communicator was made, and not aborted; it writes a number.
        unsafe { self.nccl.ncclCommGetAsyncError(comm, &mut state) }?;
        match state {
            0 => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(self.explained(call, code)),
        }
    }

    /// Gives all up, if that was not done before. Returns the reason.
    fn lose(&self, refusal: Refusal) -> Refusal {
        let meaning = format!("rank {} of mesh '{}': {}", self.rank, self.mesh, refusal.meaning);
        if self.lost.set(Refusal { meaning, ..refusal }).is_ok() {
            // An abort waits for graphs that have captured calls: each waits for itself.
            let aborts = self.made.take().into_iter().map(|comm| self.parting(vec![comm], Nccl::ncclCommAbort));
            self.aborts.borrow_mut().extend(aborts.collect::<Vec<_>>());
        }
        self.lost.get().expect("it has been set").clone()
    }

    /// Gives communicators up, in a thread of its own.
    fn parting(&self, comms: Vec<NcclComm>, call: unsafe fn(&Nccl, NcclComm) -> Result<(), Refusal>) -> JoinHandle<()> {
        let (nccl, driver) = (Arc::clone(&self.nccl), Arc::clone(&self.driver));
        let [context, comms] = [vec![self.context as usize], comms.iter().map(|comm| *comm as usize).collect()];
        thread::spawn(move || {
            // SAFETY: NCCL keeps the device's primary context; nobody uses the communicators any more. An error is nobody's.
            unsafe {
                let _ = driver.cuCtxSetCurrent(context[0] as CUcontext);
                for comm in comms {
                    let _ = call(&nccl, comm as NcclComm);
                }
            }
        })
    }

    /// An error when a rank was lost before.
    pub(super) fn is_whole(&self) -> Result<(), Refusal> {
        self.lost.get().map_or(Ok(()), |refusal| Err(refusal.clone()))
    }

    /// Notes that exchanges are under way.
    pub(super) fn begin(&self) {
        self.busy.set(true);
    }

    /// True if exchanges may be under way.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.get()
    }

    /// True if an exchange was given up, and has not ended.
    fn is_stuck(&self) -> bool {
        self.lost.get().is_some() && self.busy.get()
    }

    /// Waits until the work in a stream is over, up to the deadline.
    pub(super) fn wait(&self, stream: CUstream) -> Result<(), Refusal> {
        if self.lost.get().is_none() {
            let over = self.until("NCCL", || {
                let over = self.is_over(stream)?;
                // All are asked: a communicator whose rank has gone tells it before the deadline.
                let mut settled = true;
                for &comm in self.made.borrow().iter().filter(|_| !over) {
                    settled &= self.is_settled(comm, "NCCL")?;
                }
                Ok(over && settled)
            });
            match over {
                Ok(()) => {
                    self.busy.set(false);
                    return Ok(());
                }
                Err(refusal) => drop(self.lose(refusal)),
            }
        }
        // Once its exchanges are aborted, the stream ends.
        let start = Instant::now();
        while self.busy.get() && start.elapsed() < PARTING {
            self.busy.set(!matches!(self.is_over(stream), Ok(true)));
            pause(start.elapsed());
        }
        self.is_whole()
    }

    fn is_over(&self, stream: CUstream) -> Result<bool, Refusal> {
        // SAFETY: the stream lives as long as the backend.
        match unsafe { self.driver.cuStreamQuery(stream) } {
            Ok(()) => Ok(true),
            Err(refusal) if refusal.code == CUresult::CUDA_ERROR_NOT_READY as c_int => Ok(false),
            Err(refusal) => Err(refusal),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let comms = self.made.take();
        let mut parting = self.aborts.take();
        if !comms.is_empty() {
            // Those that were split before the one that they are a part of.
            parting.push(self.parting(comms.into_iter().rev().collect(), Nccl::ncclCommDestroy));
        }
        // A rank that is gone must not keep this one.
        let start = Instant::now();
        while parting.iter().any(|thread| !thread.is_finished()) && start.elapsed() < PARTING {
            pause(start.elapsed());
        }
    }
}

impl Call {
    fn launch(&self, stream: CUstream) -> Result<(), Refusal> {
        let Call { group, what: Exchanged { collective, dtype, given }, read, write } = self;
        group.is_whole()?;
        group.begin();
        let (axis, _) = group.mesh.axis(&collective.axis).expect("the call was made for an axis");
        let (comm, nccl) = (group.axes[axis], &group.nccl);
        let (from, to) = (*read as *const c_void, *write as *mut c_void);
        let (ranks, ty) = (collective.ranks, kind(*dtype).unwrap_or(BYTE));
        let bytes = given * dtype.size();
        // SAFETY: the launch was bound to memory with as many elements, which stands as long as the record.
        let (name, call) = unsafe {
            match collective.exchange {
                Exchange::AllReduce(by) => {
                    ("ncclAllReduce", nccl.ncclAllReduce(from, to, *given, ty, operation(by), comm, stream))
                }
                Exchange::ReduceScatter(by) => (
                    "ncclReduceScatter",
                    nccl.ncclReduceScatter(from, to, given / ranks, ty, operation(by), comm, stream),
                ),
                Exchange::AllGather => ("ncclAllGather", nccl.ncclAllGather(from, to, bytes, BYTE, comm, stream)),
                Exchange::AllToAll => ("ncclSend", self.send_all(comm, bytes / ranks, stream)),
                Exchange::Send { to: peer } => {
                    // The mark: it orders steps, and nobody computes with it.
                    self.group.driver.cuMemsetD8Async(*write, 0, size_of::<i32>(), stream)?;
                    ("ncclSend", nccl.ncclSend(from, bytes, BYTE, peer as c_int, comm, stream))
                }
                Exchange::Recv { from: peer } => {
                    ("ncclRecv", nccl.ncclRecv(to, bytes, BYTE, peer as c_int, comm, stream))
                }
            }
        };
        group.begun(call).and_then(|()| group.settle(comm, name)).map_err(|refusal| group.lose(refusal))
    }

    /// Sends a part of these bytes to each rank, and receives one from each, as one call.
    ///
    /// # Safety
    /// There are as many bytes for each rank in both places.
    unsafe fn send_all(&self, comm: NcclComm, bytes: usize, stream: CUstream) -> Result<(), Refusal> {
        let nccl = &self.group.nccl;
        // SAFETY: guaranteed by the caller; a group that was started is ended.
        unsafe {
            nccl.ncclGroupStart()?;
            let all = (0..self.what.collective.ranks).try_for_each(|peer| {
                let at = (peer * bytes) as u64;
                let (from, to) = ((self.read + at) as *const c_void, (self.write + at) as *mut c_void);
                self.group.begun(nccl.ncclSend(from, bytes, BYTE, peer as c_int, comm, stream))?;
                self.group.begun(nccl.ncclRecv(to, bytes, BYTE, peer as c_int, comm, stream))
            });
            let ended = self.group.begun(nccl.ncclGroupEnd());
            all.and(ended)
        }
    }
}

impl Meeting {
    pub(super) fn launch(&self, driver: &Driver, stream: CUstream) -> Result<(), Refusal> {
        match self {
            Meeting::Call(call) => call.launch(stream),
            // SAFETY: the launch was bound to memory of so many bytes, which stands as long as the record.
            Meeting::Copy(from, to, bytes) => unsafe { driver.cuMemcpyDtoDAsync_v2(*to, *from, *bytes, stream) },
        }
    }
}

impl Cuda {
    /// Joins the ranks of a mesh, and has NCCL take its memory.
    pub(super) fn join_ranks(&mut self, ranks: &dyn Ranks) -> Result<()> {
        ensure(!self.is_fork && self.group.is_none(), || failed("a device joins ranks once, and a fork none"))?;
        if ranks.mesh().ranks() == 1 {
            return Ok(());
        }
        self.enter().map_err(failed)?;
        self.measure(None);
        let before = self.free_bytes().map_err(failed)?.free;
        let group = Rc::new(Group::join(self, ranks)?);
        self.group = Some(Rc::clone(&group));
        self.rehearse(&group)?;
        self.measure(Some(|taken| &mut taken.nccl));
        let after = self.free_bytes().map_err(failed)?.free;
        let mut taken = self.taken();
        if !taken.is_known() {
            taken.nccl = before.saturating_sub(after) as i64;
        }
        Ok(())
    }

    /// Leaves so many bytes to NCCL, which has taken its memory already.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let Some(group) = &self.group else {
            return Err(failed("NCCL's reserve: expected a rank of a mesh, found a device that runs alone"));
        };
        let mut taken = self.taken();
        let took = taken.nccl.max(0) as u64;
        tracing::info!(
            "rank {}: NCCL took {} of the {} bytes that it is left",
            group.rank,
            grouped(took),
            grouped(bytes)
        );
        ensure(took <= bytes, || {
            let (took, bytes, axes) = (grouped(took), grouped(bytes), group.mesh.extents());
            let what = format!("NCCL took {took} bytes of the card, the plan leaves it {bytes}");
            failed(format!("{what}; `plimsoll devices`, for ranks {axes}, measures it for later plans"))
        })?;
        taken.reserved = true;
        Ok(())
    }

    /// Makes an exchange of each kind along each axis, with elements that nobody needs.
    fn rehearse(&self, group: &Rc<Group>) -> Result<()> {
        let most = group.mesh.axes().iter().map(|axis| axis.ranks).max().unwrap_or(1);
        let bytes = (most * DType::F32.size()).next_multiple_of(self.info.target.alignment as usize);
        let mut memory = 0;
        // SAFETY: the context is current; the memory is freed below.
        unsafe { self.driver.cuMemAlloc_v2(&mut memory, 2 * bytes) }.map_err(failed)?;
        let (read, write) = (memory, memory + bytes as u64);
        let mut calls = group.mesh.axes().iter().filter(|axis| axis.ranks > 1).flat_map(|axis| {
            let sum = Reduction::Sum;
            let kinds =
                [Exchange::AllReduce(sum), Exchange::AllGather, Exchange::ReduceScatter(sum), Exchange::AllToAll];
            kinds.map(|exchange| {
                let collective = Collective { exchange, axis: axis.name.clone(), ranks: axis.ranks };
                let given = if exchange == Exchange::AllGather { 1 } else { axis.ranks };
                let what = Exchanged { collective, dtype: DType::F32, given };
                Call { group: Rc::clone(group), what, read, write }
            })
        });
        // SAFETY: the memory has just been allocated.
        let filled = unsafe { self.driver.cuMemsetD8Async(memory, 0, 2 * bytes, self.stream) };
        let made = filled.and_then(|()| calls.try_for_each(|call| call.launch(self.stream)));
        let over = self.sync();
        if !group.is_stuck() {
            // SAFETY: nothing uses it any more.
            unsafe { self.driver.cuMemFree_v2(memory) }.map_err(failed)?;
        }
        made.and(over).map_err(failed)
    }

    /// Notes the exchange that a kernel stands for.
    pub(super) fn compile_collective(&mut self, kernel: &Kernel, collective: &Collective) -> Result<KernelId> {
        let refuse = |what: &str| failed(format!("{collective}: {what}"));
        if collective.ranks > 1 {
            let group =
                self.group.as_ref().ok_or_else(|| refuse("expected a rank of a mesh, found a device that runs alone"));
            let (_, axis) = group?.mesh.axis(&collective.axis)?;
            ensure(axis.ranks == collective.ranks, || refuse(&format!("the axis has {} ranks", axis.ranks)))?;
        }
        let (what, before) = Exchanged::of(kernel).expect("the kernel is a collective");
        let joins = matches!(collective.exchange, Exchange::AllReduce(_) | Exchange::ReduceScatter(_));
        ensure(!joins || kind(what.dtype).is_some(), || {
            refuse(&format!("NCCL does not join elements of {}", what.dtype))
        })?;
        let id = KernelId(self.kernels.len() as u32);
        self.kernels.push(kernel.clone());
        self.exchanges.insert(id, Noted { what, before });
        Ok(id)
    }

    /// The step of a collective on the places of its arguments.
    pub(super) fn meeting(&self, noted: &Noted, launch: &Launch) -> Result<Meeting> {
        let Noted { what, before } = noted;
        let place = |slot: usize, before: usize, elements: usize| -> Result<CUdeviceptr> {
            let (at, bytes) = (launch.args[slot], (elements * what.dtype.size()) as u64);
            let before = before as u64;
            let start = Slice { offset: at.offset + before, bytes, ..at };
            ensure(before + bytes <= at.bytes, || {
                failed(format!("{}: {bytes} bytes do not fit {}", what.collective, at.bytes))
            })?;
            self.resolve(start)
        };
        let written = launch.args.len() - 1;
        let (read, write) = (place(0, before[0], what.gave())?, place(written, before[1], what.got())?);
        match &self.group {
            Some(group) if what.collective.ranks > 1 => {
                let in_place = matches!(what.collective.exchange, Exchange::AllReduce(_));
                ensure(read != write || in_place, || {
                    failed(format!("{}: expected a result apart from what is given", what.collective))
                })?;
                Ok(Meeting::Call(Call { group: Rc::clone(group), what: what.clone(), read, write }))
            }
            _ => Ok(Meeting::Copy(read, write, what.gave().min(what.got()) * what.dtype.size())),
        }
    }

    /// The parts of what was taken that are known: without a count of the process's memory, what NCCL took of the free memory.
    pub(super) fn known_parts(&self) -> Vec<(&'static str, u64)> {
        let taken = self.taken();
        let nccl = || (taken.nccl > 0 && !taken.reserved).then_some((NCCL, taken.nccl as u64));
        taken.parts().unwrap_or_else(|| nccl().into_iter().collect())
    }

    /// True if work does not end any more: whatever waits for the device would wait for ever.
    pub(super) fn is_stuck(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.is_stuck())
    }

    /// An error for a second run on a device that has joined ranks.
    pub(super) fn is_alone(&self) -> Result<()> {
        ensure(self.group.is_none(), || {
            Error::usage(format!("'{}': a rank of a mesh has one run at a time", self.info.target.name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What ranks of these versions tell.
    fn tellings(versions: &[c_int]) -> Vec<Vec<u8>> {
        let told = |(rank, version): (usize, &c_int)| {
            let id = if rank == 0 { vec![9; 128] } else { Vec::new() };
            [&[1], &version.to_le_bytes()[..], &id].concat()
        };
        versions.iter().enumerate().map(told).collect()
    }

    #[test]
    fn ranks_learn_the_id_of_rank_0() {
        let id = told(&tellings(&[22_809, 22_809, 22_809])).expect("they agree");
        assert_eq!(id.0, [9; 128]);
    }

    #[test]
    fn ranks_that_cannot_join_are_named() {
        let error = told(&tellings(&[22_809, 21_805])).map(|_| ()).expect_err("the versions differ");
        assert_eq!(error, "the ranks have not one version of NCCL: rank 0 has 2.28.9, rank 1 2.18.5");
        let mut all = tellings(&[22_809, 22_809]);
        for rank in [1, 0] {
            all[rank] = [&[0], &b"nccl: libnccl.so.2 was not found"[..]].concat();
            let error = told(&all).map(|_| ()).expect_err("a rank has none");
            assert_eq!(error, format!("rank {rank}: nccl: libnccl.so.2 was not found"));
        }
        all[0] = Vec::new();
        assert_eq!(told(&all).map(|_| ()).expect_err("nothing"), "rank 0 said nothing");
    }

    #[test]
    fn types_that_nccl_joins_have_its_numbers() {
        let known: Vec<_> = DType::ALL.into_iter().filter_map(|dtype| Some((dtype, kind(dtype)?))).collect();
        let mut numbers: Vec<_> = known.iter().map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
        assert!(known.iter().all(|(dtype, _)| dtype.is_number()));
    }

    /// By nccl.h of 2.18: the last field stands in the padding.
    #[test]
    fn the_configuration_is_laid_out_as_in_c() {
        assert_eq!(size_of::<NcclConfig>(), 48);
        assert_eq!(std::mem::offset_of!(NcclConfig, net_name), 32);
        assert_eq!(std::mem::offset_of!(NcclConfig, split_share), 40);
    }
}
