//! NVIDIA GPUs, through the driver.
//!
//! ```text
//! alloc    one cuMemAlloc per segment
//! record   texts --NVRTC, all new ones at once--> machine code (kept on disk) --> launches with raw addresses, captured into one graph
//! replay   one cuGraphLaunch
//! join     communicators of NCCL, one per axis of a mesh
//! ```
//!
//! - Nothing is linked: [`library`] finds the driver and NVIDIA's libraries when a device is opened, and reports them.
//! - Work goes to one stream of the device's primary context, which libraries share. Any thread may call a method: each makes the context
//!   current first.
//! - Host data passes through the plan's pinned [staging](Memory) segments, and through nothing else: one half is filled while the other is
//!   copied.
//! - The plan's streams are forked from and joined with the first one while launches are captured.
//! - [`Usage::overhead`] is the memory that the driver takes beside the segments, by its count of this process's memory before and after. It is
//!   not known where NVML is absent or counts by pids of another namespace.

use api::{BlasLt, Dnn, Driver, Nvml, Nvrtc, Refusal, failed};
use blas::Blas;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUmemPool_attribute, CUmemorytype, CUmodule,
    CUpointer_attribute, CUresult, CUstream, CUstream_flags,
};
use dnn::CudnnHandle;
use find::{
    Opened, architectures, devices, dotted, find_cublaslt, find_cudnn, find_driver, find_nvml, find_nvrtc, handle,
    include, missing,
};
use library::{Found, Search};
use nccl::{Group, Noted};
use plimsoll_backend::lent::{Lent, is_lent};
use plimsoll_backend::ranks::Ranks;
use plimsoll_backend::records::Records;
use plimsoll_backend::segments::{Segment, Segments};
use plimsoll_backend::work::Loops;
use plimsoll_backend::{
    Backend, DeviceMemory, HostMemory, KernelId, Launch, Outside, RecordId, SegmentId, Slice, Usage, host_memory,
};
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::Kernel;
use plimsoll_core::kernel::render::{self, Bindings, Dialect};
use plimsoll_core::target::{Libraries, Memory, Target};
use program::Compiler;
use record::{Chosen, Record};
use staging::{Known, Locked, Slot, is_locked};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use taken::{Process, Taken};

mod api;
mod blas;
mod dnn;
mod dnn_attention;
mod find;
pub mod library;
mod nccl;
mod program;
mod record;
mod staging;
mod taken;

pub use find::{Device, Report, report};

/// The use of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Its number.
    pub device: usize,
    /// Use cuBLASLt and cuDNN where they are found.
    pub libraries: bool,
    /// Allow `f32` operands of products to be rounded to TF32.
    pub allow_tf32: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { device: 0, libraries: true, allow_tf32: false }
    }
}

/// Opens a device. Returns its name, too.
///
/// # Errors
/// When the driver, the device or NVRTC is missing or unusable, in words.
pub fn open(search: &Search, settings: &Settings) -> Result<(Box<dyn Backend>, String)> {
    let cuda = Cuda::new(search, settings)?;
    let name = format!("cuda, {}", cuda.describe());
    Ok((Box::new(cuda), name))
}

/// Machine code of kernel texts for an architecture (`sm_90a`), compiled as [`Backend::record`] would, with no device and no cache.
///
/// # Errors
/// When NVRTC is missing, or refuses a text: with its log.
pub fn machine_code(search: &Search, arch: &str, texts: &[&str]) -> Result<Vec<u8>> {
    let (nvrtc, found) = find_nvrtc(search, c_int::MAX);
    let path = found.path.clone();
    let (nvrtc, version) = nvrtc.ok_or_else(|| missing(found))?;
    let compiler = Compiler { nvrtc, version, include: include(path), arch: arch.into(), cache: None };
    compiler.build(&program::join(texts).0)
}

/// Whose memory a segment lies in.
#[derive(Clone, Copy, PartialEq)]
enum Origin {
    Driver,
    /// The driver's pool.
    Pool,
    /// The host program's.
    Lent,
}

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: memory of the host that all contexts know, and kernels reach.
const PORTABLE: std::ffi::c_uint = 3;

/// The memory of a segment.
#[derive(Clone, Copy)]
struct Made {
    /// Of memory where kernels work; 0 where that is none.
    pointer: CUdeviceptr,
    origin: Origin,
}

/// An opened device, and what was found to use it.
struct Parts {
    driver: Arc<Driver>,
    compiler: Arc<Compiler>,
    lt: Option<Arc<BlasLt>>,
    dnn: Option<Arc<Dnn>>,
    device: CUdevice,
    /// Retained once.
    context: CUcontext,
    info: Device,
    driver_version: c_int,
    versions: Vec<String>,
    /// What tells the processes on the device.
    census: Arc<Census>,
    /// That of the device which is forked, if one is; otherwise what opening it took.
    taken: Arc<Mutex<Taken>>,
    is_fork: bool,
    search: Search,
}

/// A CUDA device as a backend.
pub struct Cuda {
    driver: Arc<Driver>,
    compiler: Arc<Compiler>,
    lt: Option<Arc<BlasLt>>,
    dnn: Option<Arc<Dnn>>,
    /// Handles of the libraries, made when a kernel first needs them.
    blas: Option<Blas>,
    cudnn: Option<CudnnHandle>,
    chosen: HashMap<KernelId, Chosen>,
    /// Kernels that are library calls, by their content.
    calls: HashMap<String, KernelId>,
    device: CUdevice,
    context: CUcontext,
    stream: CUstream,
    /// The streams beside it.
    others: Vec<CUstream>,
    /// Recorded by [`Backend::start`] and [`Backend::stop`].
    timers: Vec<CUevent>,
    /// What a caller's work had reached when its memory was used.
    reached: CUevent,
    info: Device,
    driver_version: c_int,
    /// The driver's and the libraries' names and versions.
    versions: Vec<String>,
    census: Arc<Census>,
    taken: Arc<Mutex<Taken>>,
    /// True if it was forked from a device, which tells what was taken for both.
    is_fork: bool,
    segments: Segments<Made>,
    /// Memory of the host program, in which segments lie.
    lent: Option<Lent>,
    /// The driver's pool keeps freed memory.
    keeps: bool,
    /// Where pinned memory lies that is no segment.
    locked: Known,
    upload: Option<Slot>,
    download: Option<Slot>,
    kernels: Vec<Kernel>,
    loops: Loops,
    /// The kernels that are collectives.
    exchanges: HashMap<KernelId, Noted>,
    records: Records<Record>,
    /// The ranks that this device has joined.
    group: Option<Rc<Group>>,
    /// Where NCCL is looked for then.
    search: Search,
    functions: HashMap<String, CUfunction>,
    modules: Vec<CUmodule>,
}

// SAFETY: handles of the driver belong to no thread once the context is made current, which every method does first; pinned memory is
// used under `&mut self` alone; the group of ranks and the plans of attention are shared by nothing but steps of records, which go where the
// device goes.
unsafe impl Send for Cuda {}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    /// When the driver, the device or NVRTC is missing or unusable, in words.
    pub fn new(search: &Search, settings: &Settings) -> Result<Cuda> {
        let (opened, found) = find_driver(search);
        let Opened { driver, version } = opened.ok_or_else(|| missing(found))?;
        let driver = Arc::new(driver);
        let mut info = usable(&driver, settings.device)?;
        let handle = handle(&driver, settings.device as c_int).map_err(failed)?;
        let mut versions = Vec::new();
        // Loading libraries and making the context each take a while: side by side.
        let ((nvrtc, found), lt, dnn, context) = std::thread::scope(|scope| {
            let nvrtc = scope.spawn(|| find_nvrtc(search, version));
            let lt = settings.libraries.then(|| scope.spawn(|| find_cublaslt(search, version)));
            let dnn = settings.libraries.then(|| scope.spawn(|| find_cudnn(search, version)));
            let nvml = find_nvml(search);
            versions
                .extend(nvml.as_ref().and_then(|nvml| nvml.driver().ok()).map(|version| format!("driver {version}")));
            let context = retain(&driver, handle, nvml);
            let panicked = "looking for a library does not panic";
            let mut note = |found: &Found| {
                versions.extend(found.version.iter().map(|version| format!("{} {version}", found.library)));
            };
            let (nvrtc, found) = nvrtc.join().expect(panicked);
            note(&found);
            let (lt, _) = lt.map(|thread| thread.join().expect(panicked)).inspect(|(_, found)| note(found)).unzip();
            let (dnn, _) = dnn.map(|thread| thread.join().expect(panicked)).inspect(|(_, found)| note(found)).unzip();
            ((nvrtc, found), lt.flatten().map(Arc::new), dnn.flatten().map(Arc::new), context)
        });
        let (context, census, taken) = context.map_err(failed)?;
        let compiler = compiler(nvrtc, found, &info).inspect_err(|_| {
            // SAFETY: the context was retained above, and nothing uses it.
            let _ = unsafe { driver.cuDevicePrimaryCtxRelease_v2(handle) };
        })?;
        // Its own search for a kernel calls cuBLASLt.
        let attention = lt.is_some() && dnn.as_ref().is_some_and(|dnn| dnn_attention::serves(dnn));
        info.target.libraries = Libraries { cublaslt: lt.is_some(), cudnn: dnn.is_some(), attention };
        info.target.allow_tf32 = settings.allow_tf32;
        let (compiler, device) = (Arc::new(compiler), handle);
        Cuda::of(Parts {
            driver,
            compiler,
            lt,
            dnn,
            device,
            context,
            info,
            driver_version: version,
            versions,
            census: Arc::new(census),
            taken: Arc::new(Mutex::new(taken)),
            is_fork: false,
            search: search.clone(),
        })
    }

    /// A backend without segments, which releases the context when it goes.
    fn of(parts: Parts) -> Result<Cuda> {
        let Parts {
            driver,
            compiler,
            lt,
            dnn,
            device,
            context,
            info,
            driver_version,
            versions,
            census,
            taken,
            is_fork,
            search,
        } = parts;
        let mut cuda = Cuda {
            driver,
            compiler,
            lt,
            dnn,
            device,
            context,
            info,
            driver_version,
            versions,
            blas: None,
            cudnn: None,
            chosen: HashMap::new(),
            calls: HashMap::new(),
            stream: std::ptr::null_mut(),
            others: Vec::new(),
            timers: Vec::new(),
            reached: std::ptr::null_mut(),
            census,
            taken,
            is_fork,
            segments: Segments::default(),
            lent: None,
            keeps: false,
            locked: Known::default(),
            upload: None,
            download: None,
            kernels: Vec::new(),
            loops: Loops::default(),
            exchanges: HashMap::new(),
            records: Records::default(),
            group: None,
            search,
            functions: HashMap::new(),
            modules: Vec::new(),
        };
        cuda.prepare().map_err(failed)?;
        Ok(cuda)
    }

    /// Puts segments into memory of the host program from now on: `bytes` bytes of this device at an address. They are not freed here.
    ///
    /// # Errors
    /// When the address is not aligned, the memory is not this device's or ends before, or a part of it is lent already.
    ///
    /// # Safety
    /// Nobody else uses the memory, and nobody frees it, until this backend is dropped.
    pub unsafe fn lend(&mut self, pointer: u64, bytes: u64) -> Result<()> {
        self.enter().map_err(failed)?;
        self.owns(pointer, bytes)?;
        self.lent = Some(Lent::new("cuda", pointer, bytes, self.info.target.alignment).map_err(failed)?);
        Ok(())
    }

    /// Checks that memory is this device's, and that it does not go on beyond its allocation.
    fn owns(&self, pointer: CUdeviceptr, bytes: u64) -> Result<()> {
        let named = || format!("memory of {bytes} bytes at {pointer:#x}");
        let ordinal = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32;
        let kind = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32;
        let (mut device, mut memory, mut base, mut size) = (-1 as c_int, 0u32, 0, 0);
        // SAFETY: the driver writes an int, an unsigned int, an address and a length.
        let asked = unsafe {
            let driver = &self.driver;
            let asked = driver.cuPointerGetAttribute(std::ptr::from_mut(&mut memory).cast(), kind, pointer);
            let asked = asked
                .and_then(|()| driver.cuPointerGetAttribute(std::ptr::from_mut(&mut device).cast(), ordinal, pointer));
            asked.and_then(|()| driver.cuMemGetAddressRange_v2(&mut base, &mut size, pointer))
        };
        asked.map_err(|refusal| failed(format!("{}: the driver does not know it: {refusal}", named())))?;
        ensure(memory == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32, || {
            failed(format!("{}: expected memory of a device", named()))
        })?;
        ensure(device == self.device, || {
            failed(format!("{}: expected memory of device {}, found device {device}", named(), self.device))
        })?;
        let end = pointer.checked_add(bytes);
        ensure(end.is_some_and(|end| end <= base + size as u64), || {
            failed(format!("{}: its allocation has {size} bytes at {base:#x}", named()))
        })
    }

    fn describe(&self) -> String {
        let Device { index, name, .. } = &self.info;
        format!("device {index}, {name} (driver for CUDA {}, {})", dotted(self.driver_version), self.compiler.arch)
    }

    /// Makes the stream and events.
    fn prepare(&mut self) -> Result<(), Refusal> {
        self.enter()?;
        let driver = &self.driver;
        // SAFETY: the context is current; the stream and events are destroyed when the backend is dropped.
        unsafe {
            driver.cuStreamCreate(&mut self.stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)?;
            for _ in 0..2 {
                let mut timer = std::ptr::null_mut();
                driver.cuEventCreate(&mut timer, 0)?;
                self.timers.push(timer);
            }
            driver.cuEventCreate(&mut self.reached, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)?;
        }
        Ok(())
    }

    /// Lets the stream wait for what the caller has given the default stream, in which its memory may still be written or read.
    fn follow_caller(&self) -> Result<(), Refusal> {
        // SAFETY: the event and the stream live as long as the backend; null is the default stream.
        unsafe {
            self.driver.cuEventRecord(self.reached, std::ptr::null_mut())?;
            self.driver.cuStreamWaitEvent(self.stream, self.reached, 0)
        }
    }

    fn enter(&self) -> Result<(), Refusal> {
        // SAFETY: the context is retained as long as the backend lives.
        unsafe { self.driver.cuCtxSetCurrent(self.context) }
    }

    /// Waits for the stream. While exchanges with other ranks may be under way, not for ever.
    fn sync(&self) -> Result<(), Refusal> {
        if let Some(group) = self.group.as_ref().filter(|group| group.is_busy()) {
            return group.wait(self.stream);
        }
        // SAFETY: the stream lives as long as the backend.
        unsafe { self.driver.cuStreamSynchronize(self.stream) }
    }

    /// Waits for exchanges, before the driver is told to wait.
    fn settle(&self) -> Result<(), Refusal> {
        let Some(group) = &self.group else { return Ok(()) };
        group.is_whole()?;
        if group.is_busy() { group.wait(self.stream) } else { Ok(()) }
    }

    fn free_bytes(&self) -> Result<DeviceMemory, Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two numbers.
        unsafe { self.driver.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(DeviceMemory { free: free as u64, total: total as u64 })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the bytes that this process holds. Those taken since the last time are of this part, if one is named.
    fn measure(&self, part: Option<fn(&mut Taken) -> &mut i64>) {
        let mut taken = self.taken();
        if taken.is_known() {
            taken.measure(self.census.list().as_deref(), std::process::id(), part);
        }
    }

    /// The address of a slice; an error if it is not within its segment.
    fn resolve(&self, at: Slice) -> Result<CUdeviceptr> {
        Ok(self.segments.find(at).map_err(failed)?.pointer + at.offset)
    }

    /// The error for an allocation that the driver refused.
    fn refused(&self, refusal: Refusal, bytes: u64) -> Error {
        match self.free_bytes() {
            Ok(room) if refusal.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int => Error::Fit {
                what: format!(
                    "an allocation on {} with {} bytes taken before",
                    self.info.name,
                    self.segments.usage().bytes
                ),
                needed: bytes,
                limit: room.free,
                file: None,
            },
            _ => failed(refusal),
        }
    }

    /// Tells the driver's pool to keep freed memory: by default it returns all at each wait.
    fn keep_pool(&mut self) -> Result<(), Refusal> {
        if std::mem::replace(&mut self.keeps, true) {
            return Ok(());
        }
        let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32;
        // SAFETY: the attribute is a u64.
        unsafe {
            self.driver.cuDeviceGetDefaultMemPool(&mut pool, self.device)?;
            self.driver.cuMemPoolSetAttribute(pool, threshold, std::ptr::from_mut(&mut all).cast())
        }
    }

    /// Allocates memory where kernels work, filled with zeros.
    fn take(&self, bytes: u64) -> Result<CUdeviceptr> {
        let size = usize::try_from(bytes).map_err(failed)?;
        let (driver, mut pointer) = (&self.driver, 0);
        if bytes == 0 {
            return Ok(0);
        }
        if let Some(lent) = &self.lent {
            let taken =
                self.segments.all().filter(|segment| segment.made.origin == Origin::Lent && segment.made.pointer != 0);
            let taken = taken.map(|segment| (segment.made.pointer, segment.bytes));
            pointer = lent.place(taken, bytes, self.info.target.alignment).map_err(|limit| {
                let what = format!("a segment of {bytes} bytes in the memory that the host lends");
                Error::Fit { what, needed: bytes, limit, file: None }
            })?;
        } else {
            // SAFETY: the memory is given back when the segment is freed, and filled before anybody reads it.
            let made = unsafe { driver.cuMemAlloc_v2(&mut pointer, size) };
            made.map_err(|refusal| self.refused(refusal, bytes))?;
        }
        // SAFETY: the range has just been allocated.
        let filled = unsafe { driver.cuMemsetD8Async(pointer, 0, size, self.stream) };
        match filled.and_then(|()| self.sync()) {
            Ok(()) => Ok(pointer),
            Err(refusal) => {
                if self.lent.is_none() {
                    // SAFETY: nothing uses it.
                    let _ = unsafe { driver.cuMemFree_v2(pointer) };
                }
                Err(failed(refusal))
            }
        }
    }
}

/// The device of a number, if it can be used.
fn usable(driver: &Driver, index: usize) -> Result<Device> {
    let mut devices = devices(driver).map_err(|what| failed(format!("driver: {what}")))?;
    if index >= devices.len() {
        let there = match devices.len() {
            1 => "device 0 is the only one".to_owned(),
            count => format!("there are devices 0 to {}", count - 1),
        };
        return Err(failed(format!("no device {index}: {there}")));
    }
    let info = devices.swap_remove(index);
    match &info.problem {
        Some(problem) => Err(failed(format!("device {index}, {}: {problem}", info.name))),
        None => Ok(info),
    }
}

/// NVRTC, if it compiles for a device.
fn compiler(nvrtc: Option<(Nvrtc, String)>, found: Found, device: &Device) -> Result<Compiler> {
    let path = found.path.clone();
    let (nvrtc, version) = nvrtc.ok_or_else(|| missing(found))?;
    let arch = device.target.compute;
    if !architectures(&nvrtc).map_err(failed)?.contains(&(arch as c_int)) {
        return Err(failed(format!("nvrtc: version {version} does not compile for sm_{arch}, {}", device.name)));
    }
    let (arch, cache) = (program::architecture(arch), plimsoll_core::file::cache_folder());
    Ok(Compiler { nvrtc, version, include: include(path), arch, cache })
}

/// The processes on a device, if NVML is there to tell.
struct Census {
    nvml: Option<Nvml>,
    /// The device's address.
    pci: CString,
}

impl Census {
    fn new(nvml: Option<Nvml>, pci: CString) -> Census {
        // While it is initialised, to initialise it again takes no time.
        // SAFETY: it is shut down when this is dropped.
        let nvml = nvml.filter(|nvml| unsafe { nvml.nvmlInitWithFlags(0) }.is_ok());
        Census { nvml, pci }
    }

    fn list(&self) -> Option<Vec<Process>> {
        let list = self.nvml.as_ref()?.processes(&self.pci).ok()?;
        let counted = |bytes| (bytes != u64::MAX).then_some(bytes);
        Some(list.iter().map(|process| Process { pid: process.pid, bytes: counted(process.bytes) }).collect())
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        if let Some(nvml) = &self.nvml {
            // SAFETY: it was initialised for this; nobody learns of a failure now.
            let _ = unsafe { nvml.nvmlShutdown() };
        }
    }
}

/// Makes the device's primary context. Returns what the process held before and after, too.
fn retain(driver: &Driver, device: CUdevice, nvml: Option<Nvml>) -> Result<(CUcontext, Census, Taken), Refusal> {
    let mut pci = [0u8; 32];
    // SAFETY: the text is cut to the buffer, with its zero.
    unsafe { driver.cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as c_int, device) }?;
    let census = Census::new(nvml, CStr::from_bytes_until_nul(&pci).unwrap_or_default().to_owned());
    let before = census.list();
    let mut context = std::ptr::null_mut();
    // SAFETY: the device is there; the caller releases the context.
    unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
    let taken = Taken::open(before.as_deref(), census.list().as_deref(), std::process::id());
    Ok((context, census, taken))
}

impl Backend for Cuda {
    fn target(&self) -> &Target {
        &self.info.target
    }

    fn identity(&self) -> String {
        let version = format!("CUDA {}", dotted(self.driver_version));
        let parts = [self.info.name.clone(), version].into_iter().chain(self.versions.iter().cloned());
        parts.collect::<Vec<_>>().join(", ")
    }

    fn usage(&self) -> Usage {
        let parts = if self.is_fork {
            Some(0)
        } else {
            self.taken().parts().map(|parts| parts.iter().map(|part| part.1).sum())
        };
        Usage { overhead: parts, ..self.segments.usage_of_device() }
    }

    fn overhead(&self) -> Vec<(&'static str, u64)> {
        if self.is_fork { Vec::new() } else { self.known_parts() }
    }

    /// In lent memory, the room on the card says nothing.
    fn room(&self) -> Option<DeviceMemory> {
        if self.lent.is_some() {
            return None;
        }
        self.enter().and_then(|()| self.free_bytes()).ok()
    }

    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId> {
        self.enter().map_err(failed)?;
        let id = self.segments.next().map_err(failed)?;
        let mut pointer = 0;
        match memory {
            Memory::Device => pointer = self.take(bytes)?,
            Memory::Upload | Memory::Download => {
                let slot = if memory == Memory::Upload { &mut self.upload } else { &mut self.download };
                ensure(bytes != 0 && slot.is_none(), || {
                    failed(format!("cannot allocate {bytes} bytes of {memory:?} memory: one segment, not empty"))
                })?;
                *slot = Some(Slot::new(Arc::clone(&self.driver), bytes as usize).map_err(failed)?);
            }
            Memory::Reserve => self.reserve(bytes)?,
            Memory::Pinned => {
                let mut memory = std::ptr::null_mut();
                let size = usize::try_from(bytes).map_err(failed)?;
                // SAFETY: the memory is given back when the segment is freed. Addresses of the host are the device's, too.
                let taken = unsafe { self.driver.cuMemHostAlloc(&mut memory, size.max(1), PORTABLE) };
                taken.map_err(|refusal| self.refused(refusal, bytes))?;
                pointer = memory as CUdeviceptr;
            }
            Memory::Scratch | Memory::Own | Memory::Prefetch => {
                return Err(failed(format!("{memory:?} memory is the CPU's")));
            }
        }
        let origin = if self.lent.is_some() { Origin::Lent } else { Origin::Driver };
        if memory.is_device() && origin == Origin::Driver {
            self.taken().segments += bytes as i64;
        }
        self.segments.insert(bytes, memory, Made { pointer, origin });
        Ok(id)
    }

    fn pools(&self) -> bool {
        true
    }

    fn alloc_pooled(&mut self, bytes: u64) -> Result<SegmentId> {
        self.enter().map_err(failed)?;
        self.keep_pool().map_err(failed)?;
        let id = self.segments.next().map_err(failed)?;
        let mut pointer = 0;
        let size = usize::try_from(bytes).map_err(failed)?;
        if bytes > 0 {
            // SAFETY: the memory is given back when the segment is freed; all its uses are in the same stream.
            let made = unsafe { self.driver.cuMemAllocAsync(&mut pointer, size, self.stream) };
            made.map_err(|refusal| self.refused(refusal, bytes))?;
        }
        self.taken().segments += bytes as i64;
        self.segments.insert(bytes, Memory::Device, Made { pointer, origin: Origin::Pool });
        Ok(id)
    }

    /// Kernels that this device has loaded stay loaded, and serve the other one, too.
    fn fork(&mut self, shared: &[SegmentId]) -> Result<Box<dyn Backend>> {
        ensure(self.lent.is_none(), || failed("memory that the host program lends serves one run at a time"))?;
        self.is_alone()?;
        // Streams do not wait for each other, so that what was written must be there.
        self.wait()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is there; the new backend releases the context when it is dropped.
        unsafe { self.driver.cuDevicePrimaryCtxRetain(&mut context, self.device) }.map_err(failed)?;
        let mut fork = Cuda::of(Parts {
            driver: Arc::clone(&self.driver),
            compiler: Arc::clone(&self.compiler),
            lt: self.lt.clone(),
            dnn: self.dnn.clone(),
            device: self.device,
            context,
            info: self.info.clone(),
            driver_version: self.driver_version,
            versions: self.versions.clone(),
            census: Arc::clone(&self.census),
            taken: Arc::clone(&self.taken),
            is_fork: true,
            search: self.search.clone(),
        })?;
        fork.segments = self.segments.lend(shared);
        fork.functions.clone_from(&self.functions);
        Ok(Box::new(fork))
    }

    fn join(&mut self, ranks: Arc<dyn Ranks>) -> Result<()> {
        self.join_ranks(&*ranks)
    }

    fn free(&mut self, segment: SegmentId) {
        let Some(Segment { bytes, memory, borrowed, made }) = self.segments.remove(segment) else { return };
        let Made { pointer, origin } = made;
        if memory.is_device() && !borrowed && origin != Origin::Lent {
            self.taken().segments -= bytes as i64;
        }
        // A device that fails now has failed before, and its answer cannot be reported.
        let _ = self.enter();
        if origin == Origin::Pool && pointer != 0 {
            self.records.free(segment);
            // SAFETY: the driver takes it back behind the work that uses it, which is in the same stream.
            let _ = unsafe { self.driver.cuMemFreeAsync(pointer, self.stream) };
            return;
        }
        let _ = self.sync();
        self.records.free(segment);
        if self.is_stuck() {
            return;
        }
        match memory {
            Memory::Device if pointer == 0 || borrowed || origin == Origin::Lent => {}
            // SAFETY: records that use it are gone, and work has been waited for.
            Memory::Device => drop(unsafe { self.driver.cuMemFree_v2(pointer) }),
            Memory::Pinned if borrowed => {}
            // SAFETY: as above.
            Memory::Pinned => drop(unsafe { self.driver.cuMemFreeHost(pointer as *mut std::ffi::c_void) }),
            Memory::Upload => self.upload = None,
            Memory::Download => self.download = None,
            Memory::Reserve => self.taken().reserved = false,
            Memory::Scratch | Memory::Own | Memory::Prefetch => unreachable!("no segment has it"),
        }
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        self.enter().map_err(failed)?;
        let to = self.resolve(at)?;
        ensure(data.len() as u64 == at.bytes, || failed(format!("{} bytes do not fill {}", data.len(), at.bytes)))?;
        self.settle().map_err(failed)?;
        let slot = self.upload.as_mut().ok_or_else(|| failed("there is no segment to upload from"))?;
        // To wait for a short copy takes longer than to copy it first.
        const SHORT: usize = 64 << 10;
        if data.len() > SHORT && is_locked(&self.locked, data) {
            return slot.upload_locked(to, data, self.stream).map_err(failed);
        }
        slot.upload(to, data, self.stream).map_err(failed)
    }

    fn host_memory(&mut self, bytes: u64, what: &str) -> Result<Box<dyn HostMemory>> {
        self.enter().map_err(failed)?;
        let locked = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0);
        let locked = locked.map(|bytes| Locked::new(&self.driver, self.device, bytes, &self.locked));
        match locked {
            Some(Ok(locked)) => Ok(Box::new(locked)),
            // Systems bound what may be pinned: what is not is copied through the plan's segment.
            Some(Err(_)) | None => Ok(Box::new(host_memory(bytes, what)?)),
        }
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        self.read_all(&mut [(at, data)])
    }

    fn read_all(&mut self, pieces: &mut [(Slice, &mut [u8])]) -> Result<()> {
        self.enter().map_err(failed)?;
        let mut from = Vec::with_capacity(pieces.len());
        for (at, data) in pieces.iter() {
            from.push(self.resolve(*at)?);
            ensure(data.len() as u64 == at.bytes, || failed(format!("{} bytes do not take {}", data.len(), at.bytes)))?;
        }
        self.settle().map_err(failed)?;
        let slot = self.download.as_mut().ok_or_else(|| failed("there is no segment to download to"))?;
        let mut data: Vec<&mut [u8]> = pieces.iter_mut().map(|(_, data)| &mut **data).collect();
        slot.download(&mut data, &from, self.stream).map_err(failed)
    }

    fn reaches(&self, place: &Outside, _: bool) -> Result<()> {
        let (pointer, bytes) = place.cuda().ok_or_else(|| place.refused(self.target()))?;
        self.enter().map_err(failed)?;
        self.owns(pointer, bytes)?;
        let end = pointer + bytes;
        let over =
            |s: &&Segment<Made>| s.memory.is_device() && pointer < s.made.pointer + s.bytes && s.made.pointer < end;
        let taken = self.segments.all().find(over).is_some() || is_lent("cuda", pointer, end);
        ensure(!taken, || failed(format!("{bytes} bytes at {pointer:#x}: segments of a plan lie there")))
    }

    fn copy_in(&mut self, at: Slice, from: &Outside) -> Result<()> {
        self.reaches(from, false)?;
        let (pointer, bytes) = from.cuda().ok_or_else(|| from.refused(self.target()))?;
        let (to, size) = (self.resolve(at)?, usize::try_from(bytes.min(at.bytes)).map_err(failed)?);
        self.follow_caller().map_err(failed)?;
        // SAFETY: both ranges lie in memory of this device.
        unsafe { self.driver.cuMemcpyDtoDAsync_v2(to, pointer, size, self.stream) }.map_err(failed)
    }

    fn copy_out(&mut self, at: Slice, to: &Outside) -> Result<()> {
        self.reaches(to, true)?;
        let (pointer, bytes) = to.cuda().ok_or_else(|| to.refused(self.target()))?;
        let (from, size) = (self.resolve(at)?, usize::try_from(bytes.min(at.bytes)).map_err(failed)?);
        self.follow_caller().map_err(failed)?;
        // SAFETY: as above.
        let copied = unsafe { self.driver.cuMemcpyDtoDAsync_v2(pointer, from, size, self.stream) };
        copied.and_then(|()| self.sync()).map_err(failed)
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        if let Some(repeat) = kernel.repeat() {
            let kernels = repeat.kernels.iter().map(|inner| self.compile(inner)).collect::<Result<_>>()?;
            let id = KernelId(self.kernels.len() as u32);
            self.kernels.push(kernel.clone());
            self.loops.insert(id, repeat, kernels);
            return Ok(id);
        }
        if let Some(collective) = kernel.collective() {
            return self.compile_collective(kernel, collective);
        }
        // The text depends on which arguments share bytes, which is known when a launch is recorded. Errors are reported here.
        let id = KernelId(self.kernels.len() as u32);
        if let Some(call) = kernel.schedule.call() {
            // A plan's calls are asked for before it is loaded, and once more when it is.
            let key = kernel.key();
            if let Some(&id) = self.calls.get(&key) {
                return Ok(id);
            }
            self.enter().map_err(failed)?;
            self.kernels.push(kernel.clone());
            // An address that is aligned, and never read.
            let nowhere = vec![1 << 20; kernel.reads.len() + kernel.writes.len()];
            if let Err(refusal) = self.prepare_call(id, call, &nowhere, (1 << 20, kernel.workspace)) {
                self.kernels.pop();
                self.chosen.remove(&id);
                return Err(refusal);
            }
            self.calls.insert(key, id);
            return Ok(id);
        }
        render::render(kernel, &self.info.target, &Bindings::distinct(kernel), Dialect::Cuda)?;
        self.kernels.push(kernel.clone());
        Ok(id)
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        self.enter().map_err(failed)?;
        let record = self.make_record(launches)?;
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        self.records.insert(record, segments).ok_or_else(|| failed("too many records"))
    }

    fn notes(&self, record: RecordId) -> Vec<String> {
        self.records.get(record).map(|r| r.notes.clone()).unwrap_or_default()
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        self.enter().map_err(failed)?;
        self.run(record)
    }

    fn wait(&mut self) -> Result<()> {
        self.enter().and_then(|()| self.settle()).and_then(|()| self.sync()).map_err(failed)
    }

    fn time_launches(&mut self, record: RecordId) -> Result<Option<Vec<Duration>>> {
        self.enter().map_err(failed)?;
        self.time_each(record)
    }

    fn start(&mut self) -> Result<Instant> {
        self.enter().map_err(failed)?;
        // SAFETY: the event lives as long as the backend.
        unsafe { self.driver.cuEventRecord(self.timers[0], self.stream) }.map_err(failed)?;
        Ok(Instant::now())
    }

    fn stop(&mut self, _: Instant) -> Result<Duration> {
        self.enter().map_err(failed)?;
        let (driver, [start, end]) = (&self.driver, [self.timers[0], self.timers[1]]);
        let mut milliseconds = 0.0;
        // SAFETY: the events live as long as the backend; both have been recorded, and the second is waited for.
        unsafe {
            driver
                .cuEventRecord(end, self.stream)
                .and_then(|()| self.settle())
                .and_then(|()| driver.cuEventSynchronize(end))
                .and_then(|()| driver.cuEventElapsedTime(&mut milliseconds, start, end))
                .map_err(failed)?;
        }
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // A refusal cannot be reported here, and does not stop the next step.
        let _ = self.enter().and_then(|()| self.sync());
        self.records = Records::default();
        // An exchange that does not end keeps the memory that it uses: to free any would be to wait for it.
        if self.is_stuck() {
            std::mem::forget((self.blas.take(), self.cudnn.take(), self.upload.take(), self.download.take()));
            return;
        }
        self.group = None;
        self.chosen.clear();
        (self.blas, self.cudnn) = (None, None);
        (self.upload, self.download) = (None, None);
        let driver = &self.driver;
        // SAFETY: work has been waited for, and every handle is given back once, those that others use last.
        unsafe {
            for stream in &self.others {
                let _ = driver.cuStreamDestroy_v2(*stream);
            }
            for module in &self.modules {
                let _ = driver.cuModuleUnload(*module);
            }
            let own = self.segments.all().filter(|segment| !segment.borrowed);
            let own = own.map(|segment| segment.made).filter(|made| made.pointer != 0 && made.origin != Origin::Lent);
            for segment in own {
                let _ = if segment.origin == Origin::Pool {
                    driver.cuMemFreeAsync(segment.pointer, self.stream)
                } else {
                    driver.cuMemFree_v2(segment.pointer)
                };
            }
            let _ = driver.cuStreamSynchronize(self.stream);
            for timer in &self.timers {
                let _ = driver.cuEventDestroy_v2(*timer);
            }
            if !self.reached.is_null() {
                let _ = driver.cuEventDestroy_v2(self.reached);
            }
            if !self.stream.is_null() {
                let _ = driver.cuStreamDestroy_v2(self.stream);
            }
            let _ = driver.cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
