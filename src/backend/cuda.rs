//! NVIDIA GPUs, through the driver.
//!
//! ```text
//! alloc    one cuMemAlloc per segment
//! record   texts --NVRTC, all new ones at once--> machine code (kept on disk) --> launches with raw addresses, captured into one graph
//! replay   one cuGraphLaunch
//! ```
//!
//! - Nothing is linked: [`library`] finds the driver and NVIDIA's libraries when a device is opened, and says what it found.
//! - Work goes to one stream of the device's primary context, which libraries share. Methods may be called from any thread: each makes
//!   the context current first.
//! - Host data passes through the plan's [staging](Memory) segments, which are pinned, and nothing else: one half is filled while the other
//!   is on its way.
//! - Lanes are streams that are forked from and joined with the first one while launches are captured.
//! - What the driver takes beside the segments is measured by the memory that it reports free before and after: [`Usage::overhead`].

use super::records::Records;
use super::{Backend, KernelId, Launch, RecordId, Room, SegmentId, Slice, Usage, reaches};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::kernel::library::Call;
use crate::kernel::render::{self, Bindings, Dialect};
use crate::target::{Libraries, Memory, Target};
use api::{BlasLt, Dnn, Driver, Nvml, Nvrtc, Refusal};
use blas::{Algorithm, Blas, Product};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUdeviceptr, CUevent, CUfunction, CUgraphExec,
    CUmemPool_attribute, CUmodule, CUresult, CUstream, CUstream_flags, CUstreamCaptureMode,
};
use dnn::{Convolution, Deep};
use library::{Found, Search};
use program::Compiler;
use serde::Serialize;
use staging::Slot;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod api;
mod blas;
mod dnn;
pub mod library;
mod program;
mod staging;

/// The oldest driver interface that serves, as `cuDriverGetVersion` counts.
const MIN_DRIVER: c_int = 12_000;

fn failed(what: impl Display) -> Error {
    Error::Backend { backend: "cuda", what: what.to_string() }
}

/// A CUDA device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Its number.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// What plans for it may assume.
    pub target: Target,
    /// Bytes of its memory.
    pub memory: u64,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// What there is of CUDA on this machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The driver and the libraries, in the order in which they are needed.
    pub libraries: Vec<Found>,
    /// The devices.
    pub devices: Vec<Device>,
}

/// The driver, initialised.
struct Opened {
    driver: Driver,
    /// `cuDriverGetVersion`.
    version: c_int,
}

fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(unix)]
mod names {
    pub(super) const DRIVER: &[&str] = &["libcuda.so.1", "libcuda.so"];
    pub(super) const NVRTC: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    pub(super) const CUBLASLT: &[&str] = &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
    pub(super) const CUDNN: &[&str] = &["libcudnn.so.9", "libcudnn.so"];
    pub(super) const NVML: &[&str] = &["libnvidia-ml.so.1"];
}
#[cfg(not(unix))]
mod names {
    pub(super) const DRIVER: &[&str] = &["nvcuda.dll"];
    pub(super) const NVRTC: &[&str] = &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
    pub(super) const CUBLASLT: &[&str] = &["cublasLt64_13.dll", "cublasLt64_12.dll"];
    pub(super) const CUDNN: &[&str] = &["cudnn64_9.dll"];
    pub(super) const NVML: &[&str] = &["nvml.dll"];
}

fn find_driver(search: &Search) -> (Option<Opened>, Found) {
    search.open("driver", names::DRIVER, |library| {
        let driver = Driver::bind(library)?;
        let mut version = 0;
        // SAFETY: both may be called at any time.
        unsafe {
            driver.cuDriverGetVersion(&mut version).map_err(|e| e.to_string())?;
            if version < MIN_DRIVER {
                let (found, least) = (dotted(version), dotted(MIN_DRIVER));
                return Err(format!("it is too old: for CUDA {found}, at least {least} is needed"));
            }
            driver.cuInit(0).map_err(|e| e.to_string())?;
        }
        Ok((Opened { driver, version }, format!("CUDA {}", dotted(version))))
    })
}

/// Whether a library made for this major version of CUDA runs on the driver.
fn suits(major: usize, driver: c_int) -> Result<(), String> {
    let newest = driver as usize / 1000;
    match major {
        12.. if major <= newest => Ok(()),
        12.. => Err(format!("it is for CUDA {major}, the driver for CUDA {newest} at most")),
        _ => Err(format!("it is for CUDA {major}, at least 12 is needed")),
    }
}

fn find_nvrtc(search: &Search, driver: c_int) -> (Option<(Nvrtc, String)>, Found) {
    let found = search.open("nvrtc", names::NVRTC, |library| {
        let nvrtc = Nvrtc::bind(library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers.
        unsafe { nvrtc.nvrtcVersion(&mut major, &mut minor) }.map_err(|e| e.to_string())?;
        suits(major as usize, driver)?;
        let version = format!("{major}.{minor}");
        Ok(((nvrtc, version.clone()), version))
    });
    if let (Some((_, version)), Found { path: Some(path), .. }) = &found {
        library::keep(&path.with_file_name(format!("libnvrtc-builtins.so.{version}")));
    }
    found
}

fn find_cublaslt(search: &Search, driver: c_int) -> (Option<BlasLt>, Found) {
    search.open("cublaslt", names::CUBLASLT, |library| {
        let blas = BlasLt::bind(library)?;
        // SAFETY: it takes nothing.
        let version = unsafe { blas.cublasLtGetVersion() };
        suits(version / 10_000, driver)?;
        Ok((blas, format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
    })
}

fn find_cudnn(search: &Search, driver: c_int) -> (Option<Dnn>, Found) {
    search.open("cudnn", names::CUDNN, |library| {
        let dnn = Dnn::bind(library)?;
        // SAFETY: both take nothing.
        let (version, cuda) = unsafe { (dnn.cudnnGetVersion(), dnn.cudnnGetCudartVersion()) };
        if version / 10_000 != 9 {
            return Err(format!("it is version {version}, 9.x is needed"));
        }
        suits(cuda / 1000, driver)?;
        Ok((dnn, format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
    })
}

fn find_nvml(search: &Search) -> Option<Nvml> {
    search.open("nvml", names::NVML, |library| Ok((Nvml::bind(library)?, String::new()))).0
}

/// Looks for the driver, its devices, and the libraries, in this order. What needs something that is missing is not looked for.
pub fn report(search: &Search) -> Report {
    let (driver, found) = find_driver(search);
    let mut report = Report { libraries: vec![found], devices: Vec::new() };
    let Some(opened) = driver else { return report };
    match devices(&opened.driver) {
        Ok(devices) => report.devices = devices,
        Err(error) => report.libraries[0].problem = Some(error),
    }
    report.libraries.push(find_nvrtc(search, opened.version).1);
    report.libraries.push(find_cublaslt(search, opened.version).1);
    report.libraries.push(find_cudnn(search, opened.version).1);
    report
}

fn devices(driver: &Driver) -> Result<Vec<Device>, String> {
    let mut count = 0;
    // SAFETY: it writes a number.
    unsafe { driver.cuDeviceGetCount(&mut count) }.map_err(|e| e.to_string())?;
    if count == 0 {
        return Err("it has no device".into());
    }
    (0..count).map(|index| describe(driver, index).map_err(|e| e.to_string())).collect()
}

fn handle(driver: &Driver, index: c_int) -> Result<CUdevice, Refusal> {
    let mut device = 0;
    // SAFETY: it writes a handle, or refuses.
    unsafe { driver.cuDeviceGet(&mut device, index) }?;
    Ok(device)
}

fn describe(driver: &Driver, index: c_int) -> Result<Device, Refusal> {
    let device = handle(driver, index)?;
    let mut name = [0u8; 256];
    let mut memory = 0;
    // SAFETY: the name is cut to the buffer, with its zero.
    unsafe {
        driver.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device)?;
        driver.cuDeviceTotalMem_v2(&mut memory, device)?;
    }
    let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| "?".into(), |n| n.to_string_lossy().into_owned());
    let ask = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: it writes a number.
        unsafe { driver.cuDeviceGetAttribute(&mut value, attribute as u32, device) }?;
        Ok(value.max(0) as u32)
    };
    let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let memory = memory as u64;
    let target = Target {
        name: format!("cuda: {name}"),
        max_segment: memory & !255,
        max_binding: memory & !255,
        max_workgroup: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        max_shared: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)?,
        compute: 10 * major + minor,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        ..Target::cuda()
    };
    let problem = (major < 7).then(|| format!("compute capability {major}.{minor}: at least 7.0 is needed"));
    Ok(Device { index: index as usize, name, target, memory, problem })
}

/// How a device is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Its number.
    pub device: usize,
    /// Whether cuBLASLt and cuDNN are used where they are found.
    pub libraries: bool,
    /// Whether `f32` operands of products may be rounded to TF32.
    pub allow_tf32: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { device: 0, libraries: true, allow_tf32: false }
    }
}

/// Opens a device, and says which it is.
///
/// # Errors
/// When the driver, the device or NVRTC is missing or unusable, in words.
pub fn open(search: &Search, settings: &Settings) -> Result<(Box<dyn Backend>, String)> {
    let cuda = Cuda::new(search, settings)?;
    let name = format!("cuda, {}", cuda.describe());
    Ok((Box::new(cuda), name))
}

/// Machine code of kernel texts for an architecture (`sm_90`), compiled as [`Backend::record`] would, with no device and no cache.
///
/// # Errors
/// When NVRTC is missing, or refuses a text: with what it says.
pub fn machine_code(search: &Search, arch: &str, texts: &[&str]) -> Result<Vec<u8>> {
    let (nvrtc, found) = find_nvrtc(search, c_int::MAX);
    let path = found.path.clone();
    let (nvrtc, version) = nvrtc.ok_or_else(|| missing(found))?;
    let compiler = Compiler { nvrtc, version, include: include(path), arch: arch.into(), cache: None };
    compiler.build(&program::join(texts).0)
}

/// Why a library that is needed does not serve.
fn missing(found: Found) -> Error {
    let problem = found.problem.unwrap_or_else(|| "it is not usable".into());
    failed(format!("{}: {problem}", found.library))
}

/// The folder of CUDA's headers that belongs to a library.
fn include(library: Option<PathBuf>) -> Option<PathBuf> {
    let folder = library?.parent()?.parent()?.join("include");
    folder.is_dir().then_some(folder)
}

struct Segment {
    /// Of memory where kernels work; 0 where that is none.
    pointer: CUdeviceptr,
    bytes: u64,
    memory: Memory,
    /// From the driver's pool.
    pooled: bool,
}

/// A launch that is ready.
enum Step {
    /// Function, grid, block, addresses.
    Kernel {
        function: CUfunction,
        groups: [u32; 3],
        size: u32,
        pointers: Vec<CUdeviceptr>,
    },
    Product(Product),
    Convolution(Convolution),
    /// A kernel without elements.
    Nothing,
}

/// Where a launch runs: [`Launch::lane`] and, as numbers of steps, [`Launch::waits`].
struct Lane {
    lane: u32,
    waits: Vec<usize>,
}

/// An algorithm that was chosen for a kernel's call.
#[derive(Clone, Copy, Default)]
struct Chosen {
    product: Option<Algorithm>,
    convolution: Option<u32>,
}

/// What a launch becomes, before its kernel's text is compiled.
enum Bound {
    Call(Step),
    /// Number of the text, addresses.
    Text(usize, Vec<CUdeviceptr>),
}

/// A graph that can be launched.
struct Graph {
    driver: Arc<Driver>,
    exec: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: records are dropped when the stream has been waited for: the graph does not run.
        let _ = unsafe { self.driver.cuGraphExecDestroy(self.exec) };
    }
}

struct Record {
    steps: Vec<Step>,
    /// Per launch, what it became.
    notes: Vec<String>,
    /// The steps as one graph. A single step is launched as it is.
    graph: Option<Graph>,
    /// Whether it has run: drivers take memory at the first time.
    ran: Cell<bool>,
}

/// Bytes that the driver has been seen to take, by what for.
#[derive(Clone, Copy, Default)]
struct Taken {
    context: i64,
    libraries: i64,
    modules: i64,
    graphs: i64,
    /// All since the context was made.
    since: i64,
}

/// A CUDA device as a backend.
pub struct Cuda {
    driver: Arc<Driver>,
    compiler: Compiler,
    lt: Option<Arc<BlasLt>>,
    dnn: Option<Arc<Dnn>>,
    /// Handles of the libraries, made when a kernel first needs them.
    blas: Option<Blas>,
    deep: Option<Deep>,
    chosen: HashMap<KernelId, Chosen>,
    device: CUdevice,
    context: CUcontext,
    stream: CUstream,
    /// The other lanes' streams.
    lanes: Vec<CUstream>,
    /// Recorded by [`Backend::start`] and [`Backend::stop`].
    timers: Vec<CUevent>,
    info: Device,
    driver_version: c_int,
    usage: Usage,
    taken: Taken,
    /// Memory that was free when the device was opened.
    free_at_open: u64,
    segments: BTreeMap<u32, Segment>,
    next: u32,
    /// The driver's pool keeps what comes back to it.
    keeps: bool,
    upload: Option<Slot>,
    download: Option<Slot>,
    kernels: Vec<Kernel>,
    records: Records<Record>,
    functions: HashMap<String, CUfunction>,
    modules: Vec<CUmodule>,
}

// SAFETY: handles of the driver belong to no thread once the context is made current, which every method does first; pinned memory is
// used under `&mut self` alone.
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
        let mut devices = devices(&driver).map_err(|what| failed(format!("driver: {what}")))?;
        let index = settings.device;
        if index >= devices.len() {
            let there = match devices.len() {
                1 => "device 0 is the only one".to_owned(),
                count => format!("there are devices 0 to {}", count - 1),
            };
            return Err(failed(format!("no device {index}: {there}")));
        }
        let mut info = devices.swap_remove(index);
        if let Some(problem) = &info.problem {
            return Err(failed(format!("device {index}, {}: {problem}", info.name)));
        }
        let handle = handle(&driver, index as c_int).map_err(failed)?;
        // Loading libraries and making the context each take a while: side by side.
        let ((nvrtc, found), lt, dnn, context) = std::thread::scope(|scope| {
            let nvrtc = scope.spawn(|| find_nvrtc(search, version));
            let lt = settings.libraries.then(|| scope.spawn(|| find_cublaslt(search, version).0));
            let dnn = settings.libraries.then(|| scope.spawn(|| find_cudnn(search, version).0));
            let context = retain(&driver, handle, find_nvml(search).as_ref());
            let panicked = "looking for a library does not panic";
            let lt = lt.and_then(|thread| thread.join().expect(panicked));
            let dnn = dnn.and_then(|thread| thread.join().expect(panicked));
            (nvrtc.join().expect(panicked), lt.map(Arc::new), dnn.map(Arc::new), context)
        });
        let (context, taken) = context.map_err(failed)?;
        let release = |error: Error| {
            // SAFETY: the context was retained above, and nothing uses it.
            let _ = unsafe { driver.cuDevicePrimaryCtxRelease_v2(handle) };
            error
        };
        let path = found.path.clone();
        let (nvrtc, nvrtc_version) = nvrtc.ok_or_else(|| release(missing(found)))?;
        let arch = info.target.compute;
        let known = architectures(&nvrtc).map_err(|e| release(failed(e)))?;
        if !known.contains(&(arch as c_int)) {
            return Err(release(failed(format!(
                "nvrtc: version {nvrtc_version} does not compile for sm_{arch}, {}",
                info.name
            ))));
        }
        let (arch, cache) = (format!("sm_{arch}"), program::cache_folder());
        let compiler = Compiler { nvrtc, version: nvrtc_version, include: include(path), arch, cache };
        info.target.libraries = Libraries { cublaslt: lt.is_some(), cudnn: dnn.is_some() };
        info.target.allow_tf32 = settings.allow_tf32;
        let mut cuda = Cuda {
            driver,
            compiler,
            lt,
            dnn,
            blas: None,
            deep: None,
            chosen: HashMap::new(),
            device: handle,
            context,
            stream: std::ptr::null_mut(),
            lanes: Vec::new(),
            timers: Vec::new(),
            info,
            driver_version: version,
            usage: Usage::default(),
            taken,
            free_at_open: 0,
            segments: BTreeMap::new(),
            next: 0,
            keeps: false,
            upload: None,
            download: None,
            kernels: Vec::new(),
            records: Records::default(),
            functions: HashMap::new(),
            modules: Vec::new(),
        };
        cuda.prepare().map_err(failed)?;
        Ok(cuda)
    }

    fn describe(&self) -> String {
        let Device { index, name, .. } = &self.info;
        format!("device {index}, {name} (driver for CUDA {}, {})", dotted(self.driver_version), self.compiler.arch)
    }

    /// Makes the stream and events.
    fn prepare(&mut self) -> Result<(), Refusal> {
        self.enter()?;
        self.free_at_open = self.free_bytes()?.free;
        let driver = &self.driver;
        // SAFETY: the context is current; what is made is given back when the backend is dropped.
        unsafe {
            driver.cuStreamCreate(&mut self.stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)?;
            for _ in 0..2 {
                let mut timer = std::ptr::null_mut();
                driver.cuEventCreate(&mut timer, 0)?;
                self.timers.push(timer);
            }
        }
        Ok(())
    }

    fn enter(&self) -> Result<(), Refusal> {
        // SAFETY: the context is retained as long as the backend lives.
        unsafe { self.driver.cuCtxSetCurrent(self.context) }
    }

    fn sync(&self) -> Result<(), Refusal> {
        // SAFETY: the stream lives as long as the backend.
        unsafe { self.driver.cuStreamSynchronize(self.stream) }
    }

    fn free_bytes(&self) -> Result<Room, Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two numbers.
        unsafe { self.driver.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(Room { free: free as u64, total: total as u64 })
    }

    /// Notes what is gone since the device was opened, and how much of it since `before`.
    fn measure(&mut self, before: u64) -> Result<i64, Refusal> {
        let free = self.free_bytes()?.free;
        self.taken.since = self.free_at_open as i64 - free as i64;
        Ok(before as i64 - free as i64)
    }

    /// The address of a slice that lies within its segment.
    fn resolve(&self, at: Slice) -> Result<CUdeviceptr> {
        let segment = self.segments.get(&at.segment.0).filter(|s| s.memory.is_device());
        let segment = segment.ok_or_else(|| failed(format!("there is no segment {}", at.segment.0)))?;
        if at.offset.checked_add(at.bytes).is_none_or(|end| end > segment.bytes) {
            let Slice { offset, bytes, .. } = at;
            return Err(failed(format!("{bytes} bytes at {offset} do not lie in {} bytes", segment.bytes)));
        }
        Ok(segment.pointer + at.offset)
    }

    /// The error for an allocation that the driver refused.
    fn refused(&self, refusal: Refusal, bytes: u64) -> Error {
        match self.free_bytes() {
            Ok(room) if refusal.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int => Error::Fit {
                what: format!("an allocation on {} with {} bytes taken before", self.info.name, self.usage.bytes),
                needed: bytes,
                limit: room.free,
            },
            _ => failed(refusal),
        }
    }

    /// Tells the driver's pool to keep what comes back to it: by default it returns all at each wait.
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

    /// Memory where kernels work, filled with zeros.
    fn take(&self, bytes: u64) -> Result<CUdeviceptr> {
        let size = usize::try_from(bytes).map_err(failed)?;
        let (driver, mut pointer) = (&self.driver, 0);
        if bytes == 0 {
            return Ok(0);
        }
        // SAFETY: the memory is given back when the segment is freed, and filled before anybody reads it.
        let made = unsafe { driver.cuMemAlloc_v2(&mut pointer, size) };
        made.map_err(|refusal| self.refused(refusal, bytes))?;
        // SAFETY: the range has just been allocated.
        let filled = unsafe { driver.cuMemsetD8Async(pointer, 0, size, self.stream) };
        match filled.and_then(|()| self.sync()) {
            Ok(()) => Ok(pointer),
            Err(refusal) => {
                // SAFETY: nothing uses it.
                let _ = unsafe { driver.cuMemFree_v2(pointer) };
                Err(failed(refusal))
            }
        }
    }

    /// Which of a launch's arguments are one pointer, and the pointers. What the launch does not write is for reading only.
    fn bind(&self, kernel: &Kernel, launch: &Launch) -> Result<(Bindings, Vec<CUdeviceptr>)> {
        let slots = kernel.reads.len() + kernel.writes.len();
        if launch.args.len() < slots {
            return Err(failed(format!("a launch has {} arguments, its kernel {slots}", launch.args.len())));
        }
        let mut bindings = Bindings { of: Vec::new(), read_only: Vec::new() };
        let mut pointers = Vec::new();
        for (slot, at) in launch.args[..slots].iter().enumerate() {
            let Some(high) = reaches(kernel, slot) else {
                bindings.of.push(None);
                continue;
            };
            let pointer = self.resolve(*at)?;
            let operand = kernel.operand(slot);
            let size = operand.dtype.size() as u64;
            if high.is_none_or(|high| high >= at.bytes / size) || !pointer.is_multiple_of(self.info.target.alignment) {
                let name = kernel.template.name();
                return Err(failed(format!("kernel '{name}': operand {slot} does not fit {} bytes", at.bytes)));
            }
            let same = pointers.iter().position(|p| *p == pointer);
            let binding = same.unwrap_or(pointers.len());
            if same.is_none() {
                pointers.push(pointer);
                bindings.read_only.push(true);
            }
            bindings.read_only[binding] &= slot < kernel.reads.len();
            bindings.of.push(Some(binding));
        }
        Ok((bindings, pointers))
    }

    /// Compiles texts that are new, as one program, and loads them.
    fn build(&mut self, texts: &[&str]) -> Result<()> {
        let mut seen = HashSet::new();
        let fresh: Vec<&str> =
            texts.iter().copied().filter(|text| !self.functions.contains_key(*text) && seen.insert(*text)).collect();
        if fresh.is_empty() {
            return Ok(());
        }
        let before = self.free_bytes().map_err(failed)?.free;
        let (program, names) = program::join(&fresh);
        let image = self.compiler.build(&program)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is machine code of this device's architecture, which the driver checks; it copies it.
        unsafe { self.driver.cuModuleLoadData(&mut module, image.as_ptr().cast()) }.map_err(failed)?;
        self.modules.push(module);
        for (text, name) in fresh.into_iter().zip(names) {
            let mut function = std::ptr::null_mut();
            let name = CString::new(name).expect("names of templates have no zero byte");
            // SAFETY: the module is loaded until the backend is dropped.
            unsafe { self.driver.cuModuleGetFunction(&mut function, module, name.as_ptr()) }.map_err(failed)?;
            self.functions.insert(text.to_owned(), function);
        }
        self.taken.modules += self.measure(before).map_err(failed)?;
        Ok(())
    }

    fn launch(&self, step: &Step, stream: CUstream) -> Result<(), Refusal> {
        let (function, [x, y, z], size, pointers) = match step {
            Step::Kernel { function, groups, size, pointers } => (*function, *groups, *size, pointers),
            Step::Product(product) => return product.launch(stream),
            Step::Convolution(convolution) => return convolution.launch(stream),
            Step::Nothing => return Ok(()),
        };
        let mut params: Vec<*mut c_void> = pointers.iter().map(|p| std::ptr::from_ref(p).cast_mut().cast()).collect();
        // SAFETY: the function takes as many pointers as the launch binds; each reaches no further than its slice, which `bind` has found
        // within its segment; segments outlive the records that use them.
        unsafe {
            self.driver.cuLaunchKernel(
                function,
                x,
                y,
                z,
                size,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    /// Launches steps into the first stream, and into the others what is in other lanes.
    fn launch_all(&self, steps: &[Step], lanes: &[Lane], events: &mut Vec<CUevent>) -> Result<(), Refusal> {
        let driver = &self.driver;
        let stream = |lane: u32| if lane == 0 { self.stream } else { self.lanes[lane as usize - 1] };
        let mut mark = |lane: u32| -> Result<CUevent, Refusal> {
            let mut event = std::ptr::null_mut();
            // SAFETY: the caller destroys the event; the stream lives as long as the backend.
            unsafe {
                driver.cuEventCreate(&mut event, 2)?; // without times
                events.push(event);
                driver.cuEventRecord(event, stream(lane))?;
            }
            Ok(event)
        };
        // SAFETY: stream and event live.
        let wait = |lane: u32, event: CUevent| unsafe { driver.cuStreamWaitEvent(stream(lane), event, 0) };
        let most = lanes.iter().map(|l| l.lane).max().unwrap_or(0);
        if most > 0 {
            let start = mark(0)?;
            (1..=most).try_for_each(|lane| wait(lane, start))?;
        }
        let waited: HashSet<usize> = lanes.iter().flat_map(|l| l.waits.iter().copied()).collect();
        let mut over: HashMap<usize, CUevent> = HashMap::new();
        for (number, (step, Lane { lane, waits })) in steps.iter().zip(lanes).enumerate() {
            waits.iter().try_for_each(|other| wait(*lane, over[other]))?;
            self.launch(step, stream(*lane))?;
            if waited.contains(&number) {
                over.insert(number, mark(*lane)?);
            }
        }
        for lane in 1..=most {
            let end = mark(lane)?;
            wait(0, end)?;
        }
        Ok(())
    }

    /// The steps as a graph, in their lanes.
    fn capture(&mut self, steps: &[Step], lanes: &[Lane]) -> Result<CUgraphExec, Refusal> {
        while self.lanes.len() < lanes.iter().map(|l| l.lane as usize).max().unwrap_or(0) {
            let mut stream = std::ptr::null_mut();
            // SAFETY: the context is current; the stream is given back when the backend is dropped.
            unsafe { self.driver.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }?;
            self.lanes.push(stream);
        }
        let driver = &self.driver;
        // Libraries may load code or take memory at a first call, which a capture does not allow. What the calls compute here is
        // computed again before anybody reads it.
        let calls = || steps.iter().filter(|step| !matches!(step, Step::Kernel { .. }));
        calls().try_for_each(|step| self.launch(step, self.stream))?;
        self.sync()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        let mut graph = std::ptr::null_mut();
        let mut exec = std::ptr::null_mut();
        let mut events = Vec::new();
        // SAFETY: the streams are ours and nothing else is captured on them; a capture that has begun is ended on every path, and the
        // graph and the events are not needed once it is instantiated.
        unsafe {
            driver.cuStreamBeginCapture_v2(self.stream, mode)?;
            let launched = self.launch_all(steps, lanes, &mut events);
            let ended = driver.cuStreamEndCapture(self.stream, &mut graph);
            let made = launched.and(ended).and_then(|()| driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            for event in events {
                driver.cuEventDestroy_v2(event)?;
            }
            if !graph.is_null() {
                driver.cuGraphDestroy(graph)?;
            }
            made?;
            driver.cuGraphUpload(exec, self.stream)?;
        }
        self.sync()?;
        Ok(exec)
    }

    /// A launch of a kernel's library call, or why it has to be rendered after all.
    fn call(&mut self, id: KernelId, launch: &Launch) -> Result<Result<Step, String>> {
        let kernel = &self.kernels[id.0 as usize];
        let call = kernel.call.clone().expect("it is asked for calls alone");
        let slots = kernel.reads.len() + kernel.writes.len();
        let workspace = match launch.args.get(slots) {
            Some(at) => (self.resolve(*at)?, at.bytes),
            None => (0, 0),
        };
        let pointers = launch.args[..slots].iter().map(|at| self.resolve(*at)).collect::<Result<Vec<_>>>()?;
        let mut chosen = self.chosen.get(&id).copied().unwrap_or_default();
        let before = self.free_bytes().map_err(failed)?.free;
        let mut made = false;
        let step = match &call {
            Call::MatMul(product) => {
                let Some(lt) = &self.lt else { return Ok(Err("cuBLASLt is not here".into())) };
                let blas = match &self.blas {
                    Some(blas) => blas,
                    None => match Blas::new(Arc::clone(lt)) {
                        Ok(blas) => {
                            made = true;
                            self.blas.insert(blas)
                        }
                        Err(refusal) => {
                            tracing::warn!("cuBLASLt is not used: {refusal}");
                            self.lt = None;
                            return Ok(Err(refusal.to_string()));
                        }
                    },
                };
                blas.prepare(product, &pointers, workspace, &mut chosen.product).map(Step::Product)
            }
            Call::Conv(convolution) => {
                let Some(dnn) = &self.dnn else { return Ok(Err("cuDNN is not here".into())) };
                let deep = match &self.deep {
                    Some(deep) => deep,
                    None => match Deep::new(Arc::clone(dnn), self.stream) {
                        Ok(deep) => {
                            made = true;
                            self.deep.insert(deep)
                        }
                        Err(refusal) => {
                            tracing::warn!("cuDNN is not used: {refusal}");
                            self.dnn = None;
                            return Ok(Err(refusal.to_string()));
                        }
                    },
                };
                deep.prepare(convolution, &pointers, workspace, &mut chosen.convolution).map(Step::Convolution)
            }
        };
        self.chosen.insert(id, chosen);
        if made {
            self.taken.libraries += self.measure(before).map_err(failed)?;
        }
        Ok(step)
    }

    fn run(&mut self, record: RecordId) -> Result<()> {
        let record = self.records.get(record);
        let record = record.ok_or_else(|| failed("replay of a record whose memory is gone"))?;
        match &record.graph {
            // SAFETY: the graph's addresses lie in segments that stand as long as the record.
            Some(graph) => unsafe { self.driver.cuGraphLaunch(graph.exec, self.stream) }.map_err(failed)?,
            None => record.steps.iter().try_for_each(|step| self.launch(step, self.stream)).map_err(failed)?,
        }
        if record.graph.is_some() && !record.ran.replace(true) {
            self.sync().map_err(failed)?;
            let before = (self.free_at_open as i64 - self.taken.since) as u64;
            self.taken.graphs += self.measure(before).map_err(failed)?;
        }
        Ok(())
    }
}

/// Makes the device's primary context, and tells what that took of its memory where NVML can say it.
fn retain(driver: &Driver, device: CUdevice, nvml: Option<&Nvml>) -> Result<(CUcontext, Taken), Refusal> {
    let mut pci = [0u8; 32];
    // SAFETY: the text is cut to the buffer, with its zero.
    unsafe { driver.cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as c_int, device) }?;
    let pci = CStr::from_bytes_until_nul(&pci).unwrap_or_default();
    let free = || nvml.and_then(|nvml| nvml.free(pci).ok());
    let before = free();
    let mut context = std::ptr::null_mut();
    // SAFETY: the device is there; the caller releases the context.
    unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
    let taken = before.zip(free()).map_or(0, |(before, after)| before as i64 - after as i64);
    Ok((context, Taken { context: taken, ..Taken::default() }))
}

/// Compute capabilities that NVRTC compiles for, ten times the version.
fn architectures(nvrtc: &Nvrtc) -> Result<Vec<c_int>, Refusal> {
    let mut count = 0;
    // SAFETY: the list has as many elements as the library has said.
    unsafe {
        nvrtc.nvrtcGetNumSupportedArchs(&mut count)?;
        let mut list = vec![0; count.max(0) as usize];
        nvrtc.nvrtcGetSupportedArchs(list.as_mut_ptr())?;
        Ok(list)
    }
}

impl Backend for Cuda {
    fn target(&self) -> &Target {
        &self.info.target
    }

    fn usage(&self) -> Usage {
        let overhead = self.overhead().iter().map(|(_, bytes)| bytes).sum::<i64>();
        Usage { overhead: overhead.max(0) as u64, ..self.usage }
    }

    fn overhead(&self) -> Vec<(&'static str, i64)> {
        let Taken { context, libraries, modules, graphs, since } = self.taken;
        let held: u64 = self.segments.values().filter(|s| s.memory.is_device()).map(|s| s.bytes).sum();
        let rounding = since - libraries - modules - graphs - held as i64;
        let parts = [("context", context), ("libraries", libraries), ("modules", modules), ("graphs", graphs)];
        // Before the first record, nothing has been measured.
        let measured = if since == 0 { 0 } else { rounding };
        parts.into_iter().chain([("allocations rounded up", measured)]).collect()
    }

    fn room(&self) -> Option<Room> {
        self.enter().and_then(|()| self.free_bytes()).ok()
    }

    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId> {
        self.enter().map_err(failed)?;
        let id = self.next;
        let next = id.checked_add(1).ok_or_else(|| failed("too many segments"))?;
        let mut segment = Segment { pointer: 0, bytes, memory, pooled: false };
        match memory {
            Memory::Device => segment.pointer = self.take(bytes)?,
            Memory::Upload | Memory::Download => {
                let slot = if memory == Memory::Upload { &mut self.upload } else { &mut self.download };
                if bytes == 0 || slot.is_some() {
                    return Err(failed(format!(
                        "cannot allocate {bytes} bytes of {memory:?} memory: one segment, not empty"
                    )));
                }
                *slot = Some(Slot::new(Arc::clone(&self.driver), bytes as usize).map_err(failed)?);
            }
        }
        self.next = next;
        self.usage.bytes += bytes;
        self.usage.allocations += 1;
        self.segments.insert(id, segment);
        Ok(SegmentId(id))
    }

    fn pools(&self) -> bool {
        true
    }

    fn alloc_pooled(&mut self, bytes: u64) -> Result<SegmentId> {
        self.enter().map_err(failed)?;
        self.keep_pool().map_err(failed)?;
        let id = self.next;
        let next = id.checked_add(1).ok_or_else(|| failed("too many segments"))?;
        let mut pointer = 0;
        let size = usize::try_from(bytes).map_err(failed)?;
        if bytes > 0 {
            // SAFETY: the memory is given back when the segment is freed; all its uses are in the same stream.
            let made = unsafe { self.driver.cuMemAllocAsync(&mut pointer, size, self.stream) };
            made.map_err(|refusal| self.refused(refusal, bytes))?;
        }
        self.next = next;
        self.usage.bytes += bytes;
        self.usage.allocations += 1;
        self.segments.insert(id, Segment { pointer, bytes, memory: Memory::Device, pooled: true });
        Ok(SegmentId(id))
    }

    fn free(&mut self, segment: SegmentId) {
        let Some(Segment { pointer, bytes, memory, pooled }) = self.segments.remove(&segment.0) else { return };
        self.usage.bytes -= bytes;
        // A device that fails now has failed before, and what it says could reach nobody.
        let _ = self.enter();
        if pooled && pointer != 0 {
            self.records.free(segment);
            // SAFETY: the driver takes it back behind the work that uses it, which is in the same stream.
            let _ = unsafe { self.driver.cuMemFreeAsync(pointer, self.stream) };
            return;
        }
        let _ = self.sync();
        self.records.free(segment);
        match memory {
            Memory::Device if pointer == 0 => {}
            // SAFETY: records that use it are gone, and work has been waited for.
            Memory::Device => drop(unsafe { self.driver.cuMemFree_v2(pointer) }),
            Memory::Upload => self.upload = None,
            Memory::Download => self.download = None,
        }
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        self.enter().map_err(failed)?;
        let to = self.resolve(at)?;
        if data.len() as u64 != at.bytes {
            return Err(failed(format!("{} bytes do not fill {}", data.len(), at.bytes)));
        }
        let slot = self.upload.as_mut().ok_or_else(|| failed("there is no segment to upload from"))?;
        slot.upload(to, data, self.stream).map_err(failed)
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        self.enter().map_err(failed)?;
        let from = self.resolve(at)?;
        if data.len() as u64 != at.bytes {
            return Err(failed(format!("{} bytes do not take {}", data.len(), at.bytes)));
        }
        let slot = self.download.as_mut().ok_or_else(|| failed("there is no segment to download to"))?;
        slot.download(data, from, self.stream).map_err(failed)
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        // The text depends on which arguments share bytes: it is rendered when that is known, but errors belong here.
        if kernel.call.is_none() {
            render::render(kernel, &self.info.target, &Bindings::distinct(kernel), Dialect::Cuda)?;
        }
        self.kernels.push(kernel.clone());
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        self.enter().map_err(failed)?;
        let mut sources: Vec<render::Source> = Vec::new();
        let mut numbers: HashMap<(KernelId, Bindings), usize> = HashMap::new();
        let mut bound: Vec<Bound> = Vec::with_capacity(launches.len());
        let mut notes = Vec::with_capacity(launches.len());
        for launch in launches {
            let kernel = self.kernels.get(launch.kernel.0 as usize);
            let kernel = kernel.ok_or_else(|| failed(format!("there is no kernel {}", launch.kernel.0)))?;
            let (bindings, pointers) = self.bind(kernel, launch)?;
            let mut why = String::new();
            if let Some(call) = &kernel.call {
                let library = match call {
                    Call::MatMul(_) => "cuBLASLt",
                    Call::Conv(_) => "cuDNN",
                };
                match self.call(launch.kernel, launch)? {
                    Ok(step) => {
                        notes.push(library.to_owned());
                        bound.push(Bound::Call(step));
                        continue;
                    }
                    Err(reason) => {
                        tracing::debug!("rendered, not {library}: {reason}");
                        why = format!(", not {library}: {reason}");
                    }
                }
            }
            let kernel = &self.kernels[launch.kernel.0 as usize];
            let number = match numbers.get(&(launch.kernel, bindings.clone())) {
                Some(&number) => number,
                None => {
                    sources.push(render::render(kernel, &self.info.target, &bindings, Dialect::Cuda)?);
                    numbers.insert((launch.kernel, bindings), sources.len() - 1);
                    sources.len() - 1
                }
            };
            let render::Source { text, size, groups } = &sources[number];
            if *groups == [0; 3] {
                notes.push("nothing to compute".into());
                bound.push(Bound::Call(Step::Nothing));
                continue;
            }
            let template = text.lines().next().and_then(|line| line.strip_prefix("// ")).unwrap_or("kernel");
            notes.push(format!("{template}, {groups:?} blocks of {size} threads{why}"));
            bound.push(Bound::Text(number, pointers));
        }
        let texts: Vec<&str> = sources.iter().filter(|s| s.groups != [0; 3]).map(|s| s.text.as_str()).collect();
        self.build(&texts)?;
        let step = |bound: Bound| match bound {
            Bound::Call(step) => step,
            Bound::Text(number, pointers) => {
                let render::Source { text, size, groups } = &sources[number];
                Step::Kernel { function: self.functions[text], groups: *groups, size: *size, pointers }
            }
        };
        let steps: Vec<Step> = bound.into_iter().map(step).collect();
        let mut graph = None;
        if steps.len() > 1 {
            let before = self.free_bytes().map_err(failed)?.free;
            let lane = |launch: &Launch| Lane { lane: launch.lane, waits: launch.waits.clone() };
            let exec = self.capture(&steps, &launches.iter().map(lane).collect::<Vec<_>>()).map_err(failed)?;
            graph = Some(Graph { driver: Arc::clone(&self.driver), exec });
            self.taken.graphs += self.measure(before).map_err(failed)?;
        }
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        let record = Record { steps, notes, graph, ran: Cell::new(false) };
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
        self.enter().and_then(|()| self.sync()).map_err(failed)
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
                .and_then(|()| driver.cuEventSynchronize(end))
                .and_then(|()| driver.cuEventElapsedTime(&mut milliseconds, start, end))
                .map_err(failed)?;
        }
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Nobody could be told of a refusal here; each is followed by the next step all the same.
        let _ = self.enter().and_then(|()| self.sync());
        self.records = Records::default();
        (self.blas, self.deep) = (None, None);
        (self.upload, self.download) = (None, None);
        let driver = &self.driver;
        // SAFETY: work has been waited for, and every handle is given back once, those that others use last.
        unsafe {
            for lane in &self.lanes {
                let _ = driver.cuStreamDestroy_v2(*lane);
            }
            for module in &self.modules {
                let _ = driver.cuModuleUnload(*module);
            }
            for segment in self.segments.values().filter(|s| s.pointer != 0) {
                let _ = match segment.pooled {
                    true => driver.cuMemFreeAsync(segment.pointer, self.stream),
                    false => driver.cuMemFree_v2(segment.pointer),
                };
            }
            let _ = driver.cuStreamSynchronize(self.stream);
            for timer in &self.timers {
                let _ = driver.cuEventDestroy_v2(*timer);
            }
            if !self.stream.is_null() {
                let _ = driver.cuStreamDestroy_v2(self.stream);
            }
            let _ = driver.cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}
