//! The search for CUDA on a machine: the driver, its devices, and NVIDIA's libraries.

use super::api::{BlasLt, Dnn, Driver, Nccl, Nvml, Nvrtc, Refusal, failed};
use super::library::{self, Found, Search};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute};
use plimsoll_core::error::{Error, ensure};
use plimsoll_core::target::Target;
use serde::Serialize;
use std::ffi::{CStr, c_int};
use std::path::PathBuf;

/// The oldest driver interface that serves, as `cuDriverGetVersion` counts.
const MIN_DRIVER: c_int = 12_000;

/// A CUDA device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Its number.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The limits and abilities that plans for it may use.
    pub target: Target,
    /// Bytes of its memory.
    pub memory: u64,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// The CUDA driver, libraries and devices of this machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The driver and the libraries, in the order in which they are needed.
    pub libraries: Vec<Found>,
    /// The devices.
    pub devices: Vec<Device>,
}

/// The driver, initialised.
pub(super) struct Opened {
    pub driver: Driver,
    /// `cuDriverGetVersion`.
    pub version: c_int,
}

pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(unix)]
mod names {
    pub(super) const DRIVER: &[&str] = &["libcuda.so.1", "libcuda.so"];
    pub(super) const NVRTC: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    pub(super) const CUBLASLT: &[&str] = &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
    pub(super) const CUDNN: &[&str] = &["libcudnn.so.9", "libcudnn.so"];
    pub(super) const NVML: &[&str] = &["libnvidia-ml.so.1"];
    pub(super) const NCCL: &[&str] = &["libnccl.so.2", "libnccl.so"];
}
#[cfg(not(unix))]
mod names {
    pub(super) const DRIVER: &[&str] = &["nvcuda.dll"];
    pub(super) const NVRTC: &[&str] = &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
    pub(super) const CUBLASLT: &[&str] = &["cublasLt64_13.dll", "cublasLt64_12.dll"];
    pub(super) const CUDNN: &[&str] = &["cudnn64_9.dll"];
    pub(super) const NVML: &[&str] = &["nvml.dll"];
    pub(super) const NCCL: &[&str] = &["nccl.dll"];
}

pub(super) fn find_driver(search: &Search) -> (Option<Opened>, Found) {
    search.open("driver", names::DRIVER, |library| {
        let driver = Driver::bind(library)?;
        let mut version = 0;
        // SAFETY: both may be called at any time.
        unsafe {
            driver.cuDriverGetVersion(&mut version)?;
            if version < MIN_DRIVER {
                let (found, least) = (dotted(version), dotted(MIN_DRIVER));
                return Err(format!("it is too old: for CUDA {found}, at least {least} is needed"));
            }
            driver.cuInit(0)?;
        }
        Ok((Opened { driver, version }, format!("CUDA {}", dotted(version))))
    })
}

/// Checks that a library made for this major version of CUDA runs on the driver.
fn suits(major: usize, driver: c_int) -> Result<(), String> {
    let newest = driver as usize / 1000;
    match major {
        12.. if major <= newest => Ok(()),
        12.. => Err(format!("it is for CUDA {major}, the driver for CUDA {newest} at most")),
        _ => Err(format!("it is for CUDA {major}, at least 12 is needed")),
    }
}

pub(super) fn find_nvrtc(search: &Search, driver: c_int) -> (Option<(Nvrtc, String)>, Found) {
    let found = search.open("nvrtc", names::NVRTC, |library| {
        let nvrtc = Nvrtc::bind(library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers.
        unsafe { nvrtc.nvrtcVersion(&mut major, &mut minor) }?;
        suits(major as usize, driver)?;
        let version = format!("{major}.{minor}");
        Ok(((nvrtc, version.clone()), version))
    });
    if let (Some((_, version)), Found { path: Some(path), .. }) = &found {
        library::keep(&path.with_file_name(format!("libnvrtc-builtins.so.{version}")));
    }
    found
}

pub(super) fn find_cublaslt(search: &Search, driver: c_int) -> (Option<BlasLt>, Found) {
    search.open("cublaslt", names::CUBLASLT, |library| {
        let blas = BlasLt::bind(library)?;
        // SAFETY: it takes nothing.
        let version = unsafe { blas.cublasLtGetVersion() };
        suits(version / 10_000, driver)?;
        Ok((blas, format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
    })
}

pub(super) fn find_cudnn(search: &Search, driver: c_int) -> (Option<Dnn>, Found) {
    search.open("cudnn", names::CUDNN, |library| {
        let dnn = Dnn::bind(library)?;
        // SAFETY: both take nothing.
        let (version, cuda) = unsafe { (dnn.cudnnGetVersion(), dnn.cudnnGetCudartVersion()) };
        ensure(version / 10_000 == 9, || format!("it is version {version}, 9.x is needed"))?;
        suits(cuda / 1000, driver)?;
        Ok((dnn, format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)))
    })
}

pub(super) fn find_nvml(search: &Search) -> Option<Nvml> {
    search.open("nvml", names::NVML, |library| Ok((Nvml::bind(library)?, String::new()))).0
}

/// The version of NCCL, as it counts.
pub(super) fn dotted_nccl(code: c_int) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

/// The oldest NCCL that serves: communicators that are split share memory from it on.
const MIN_NCCL: c_int = 21_800;

/// NCCL, and its version as `ncclGetVersion` counts.
pub(super) fn find_nccl(search: &Search) -> (Option<(Nccl, c_int)>, Found) {
    search.open("nccl", names::NCCL, |library| {
        let nccl = Nccl::bind(library)?;
        let mut code = 0;
        // SAFETY: it writes a number, and may be called at any time.
        unsafe { nccl.ncclGetVersion(&mut code) }?;
        let version = dotted_nccl(code);
        ensure(code >= MIN_NCCL, || format!("it is version {version}, at least 2.18 is needed"))?;
        Ok(((nccl, code), version))
    })
}

/// Looks for the driver, its devices, and the libraries, in this order. Libraries are not looked for without a driver.
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

pub(super) fn devices(driver: &Driver) -> Result<Vec<Device>, String> {
    let mut count = 0;
    // SAFETY: it writes a number.
    unsafe { driver.cuDeviceGetCount(&mut count) }?;
    ensure(count != 0, || "it has no device".to_owned())?;
    (0..count).map(|index| Ok(describe(driver, index)?)).collect()
}

pub(super) fn handle(driver: &Driver, index: c_int) -> Result<CUdevice, Refusal> {
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
        max_shared: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        compute: 10 * major + minor,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        ..Target::cuda()
    };
    let problem = (major < 7).then(|| format!("compute capability {major}.{minor}: at least 7.0 is needed"));
    Ok(Device { index: index as usize, name, target, memory, problem })
}

/// Why a library that is needed does not serve.
pub(super) fn missing(found: Found) -> Error {
    let problem = found.problem.unwrap_or_else(|| "it is not usable".into());
    failed(format!("{}: {problem}", found.library))
}

/// The folder of CUDA's headers that belongs to a library.
pub(super) fn include(library: Option<PathBuf>) -> Option<PathBuf> {
    let folder = library?.parent()?.parent()?.join("include");
    folder.is_dir().then_some(folder)
}

/// Compute capabilities that NVRTC compiles for, ten times the version.
pub(super) fn architectures(nvrtc: &Nvrtc) -> Result<Vec<c_int>, Refusal> {
    let mut count = 0;
    // SAFETY: the list has as many elements as the library has said.
    unsafe {
        nvrtc.nvrtcGetNumSupportedArchs(&mut count)?;
        let mut list = vec![0; count.max(0) as usize];
        nvrtc.nvrtcGetSupportedArchs(list.as_mut_ptr())?;
        Ok(list)
    }
}
