//! A device of wgpu, and the search for it. No answer of a device makes this panic: every call that may fail is in an error scope.

use super::cache::Cache;
use plimsoll_core::error::{Error, Result};
use plimsoll_core::target::Target;
use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

#[cfg(target_os = "linux")]
use libloading::os::unix::{Library, RTLD_NOW};

/// An error of this backend.
pub(super) fn failed(what: impl Display) -> Error {
    Error::Backend { backend: "wgpu", what: what.to_string(), file: None }
}

/// Bytes of the blocks that wgpu's allocator cuts smaller buffers from; it allows no smaller blocks. A larger buffer is an allocation of its
/// own, of exactly its size.
const BLOCK: u64 = 4 << 20;

/// Features that the device's clock needs: timestamps, written to the slot that the host reads results from.
pub(super) const CLOCK_FEATURES: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS);

/// Features that are used where an adapter has them.
const OWN_FEATURES: wgpu::Features =
    CLOCK_FEATURES.union(wgpu::Features::SUBGROUP).union(wgpu::Features::PIPELINE_CACHE);

/// The least that kernels are planned for: storage buffers that one binds, invocations of a workgroup, and bytes that they share.
const LEAST_BUFFERS: u32 = 4;
const LEAST_INVOCATIONS: u32 = 64;
const LEAST_SHARED: u32 = 8 << 10;

/// A device that wgpu found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub api: String,
    /// Its kind: `discrete GPU`, `integrated GPU`, `virtual GPU`, `software` or `other`.
    pub kind: String,
    /// Name and version of its driver.
    pub driver: String,
    /// It runs on the CPU: its results are right, but it is slower than the `cpu` backend.
    pub software: bool,
    /// The limits and abilities that plans for it may use.
    pub target: Target,
}

impl Display for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {}, {})", self.name, self.api, self.kind, self.driver)
    }
}

/// A device, its queue, and its first error.
pub(super) struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    /// True if nobody else uses the device.
    pub own: bool,
    /// The device's first error that no scope caught, its loss among them.
    lost: Arc<Mutex<Option<String>>>,
    /// Bytes of the segments of all backends that share the device.
    pub held: Arc<AtomicU64>,
    /// Compiled pipelines on disk, unless the device is the host program's.
    pub cache: Option<Arc<Cache>>,
}

fn instance(backends: wgpu::Backends) -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        // Indirect dispatches are not used, and checking them would cap buffers at 4 GiB.
        flags: wgpu::InstanceFlags::empty(),
        // Drivers lend more memory than there is, so allocations beyond the budget that they report are refused.
        memory_budget_thresholds: wgpu::MemoryBudgetThresholds {
            for_resource_creation: Some(100),
            for_device_loss: None,
        },
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    })
}

fn target(name: &str, limits: &wgpu::Limits, features: wgpu::Features) -> Target {
    Target {
        name: format!("wgpu: {name}"),
        alignment: u64::from(limits.min_storage_buffer_offset_alignment).max(256),
        max_segment: limits.max_buffer_size & !3,
        max_binding: limits.max_storage_buffer_binding_size & !3,
        max_bindings: limits.max_storage_buffers_per_shader_stage.min(limits.max_bindings_per_bind_group),
        max_workgroup: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x),
        max_shared: limits.max_compute_workgroup_storage_size,
        max_groups: limits.max_compute_workgroups_per_dimension,
        subgroups: features.contains(wgpu::Features::SUBGROUP),
        ..Target::wgpu()
    }
}

/// An adapter of which a device has these limits and features.
pub(super) fn describe(info: &wgpu::AdapterInfo, limits: &wgpu::Limits, features: wgpu::Features) -> Adapter {
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    };
    Adapter {
        name: info.name.clone(),
        api: info.backend.to_string(),
        kind: kind.into(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        software: info.device_type == wgpu::DeviceType::Cpu,
        target: target(&info.name, limits, features),
    }
}

/// Flags of the loader: to take a library only if it is loaded, and to keep it loaded.
#[cfg(target_os = "linux")]
const NOT_TO_LOAD: std::ffi::c_int = 0x4;
#[cfg(target_os = "linux")]
const NEVER_TO_UNLOAD: std::ffi::c_int = 0x1000;

/// Keeps NVIDIA's Vulkan driver in the process once an instance has loaded it. It would be unloaded with its last instance. But threads that
/// have used it call into it when they end, and each time that it is loaded it takes static thread storage, of which there is little.
#[cfg(target_os = "linux")]
fn keep_driver() {
    for name in ["libGLX_nvidia.so.0", "libEGL_nvidia.so.0"] {
        // SAFETY: nothing is loaded that is not there already, so that no initialiser runs.
        let _ = unsafe { Library::open(Some(name), RTLD_NOW | NOT_TO_LOAD | NEVER_TO_UNLOAD) };
    }
}

/// Silences the library of Wayland, which Mesa asks for the screen's device, and which complains on stderr where there is no session of a
/// desktop. A program that has the library already keeps its messages.
#[cfg(target_os = "linux")]
fn silence_wayland() {
    use std::ffi::{c_char, c_void};
    const NAME: &str = "libwayland-client.so.0";
    type Handler = unsafe extern "C" fn(*const c_char, *mut c_void);
    unsafe extern "C" fn nothing(_: *const c_char, _: *mut c_void) {}
    // SAFETY: nothing is loaded that is not there already, so that no initialiser runs.
    if unsafe { Library::open(Some(NAME), RTLD_NOW | NOT_TO_LOAD) }.is_ok() {
        return;
    }
    // SAFETY: its initialisers only prepare its own tables.
    let Ok(library) = (unsafe { Library::open(Some(NAME), RTLD_NOW | NEVER_TO_UNLOAD) }) else { return };
    // SAFETY: the function takes a handler with a format and its arguments, a pointer or passed as one; `nothing` reads neither. Both stay in
    // the process.
    unsafe {
        if let Ok(set) = library.get::<unsafe extern "C" fn(Handler)>(b"wl_log_set_handler_client\0") {
            set(nothing);
        }
    }
}

/// Adapters of some interfaces.
fn reached(by: wgpu::Backends) -> Vec<wgpu::Adapter> {
    let instance = instance(by);
    #[cfg(target_os = "linux")]
    keep_driver();
    pollster::block_on(instance.enumerate_adapters(by))
}

/// Adapters in order of preference: discrete, integrated, virtual, other, software. GL is asked only where nothing else answers.
fn enumerate() -> Vec<wgpu::Adapter> {
    #[cfg(target_os = "linux")]
    silence_wayland();
    let mut adapters = reached(wgpu::Backends::PRIMARY);
    if adapters.is_empty() {
        adapters = reached(wgpu::Backends::SECONDARY);
    }
    adapters.sort_by_key(|a| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    adapters
}

/// The devices that are here, best first.
pub fn adapters() -> Vec<Adapter> {
    enumerate().iter().map(|a| describe(&a.get_info(), &a.limits(), a.features())).collect()
}

/// The device of this number in [`adapters`], or the first whose name contains this text, or the best.
fn find(wanted: Option<&str>) -> Result<wgpu::Adapter> {
    let mut adapters = enumerate();
    let Some(text) = wanted else {
        let first = (!adapters.is_empty()).then(|| adapters.swap_remove(0));
        return first.ok_or_else(|| failed("no adapter (Vulkan, Metal, DX12 or GL driver) was found"));
    };
    let lower = text.to_lowercase();
    let position = match text.parse::<usize>() {
        Ok(number) => (number < adapters.len()).then_some(number),
        Err(_) => adapters.iter().position(|a| a.get_info().name.to_lowercase().contains(&lower)),
    };
    let names = || {
        adapters
            .iter()
            .map(|a| describe(&a.get_info(), &a.limits(), a.features()).to_string())
            .collect::<Vec<_>>()
            .join("; ")
    };
    match position {
        Some(position) => Ok(adapters.swap_remove(position)),
        None if adapters.is_empty() => {
            Err(failed(format!("no adapter '{text}': no Vulkan, Metal, DX12 or GL driver was found")))
        }
        None => Err(failed(format!("no adapter '{text}' among: {}", names()))),
    }
}

/// What an adapter lacks for kernels: the first of it. Those of GL may have no more than GLES demands.
fn lacking(adapter: &wgpu::Adapter) -> Option<String> {
    let limits = adapter.limits();
    if !adapter.get_downlevel_capabilities().flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) {
        return Some("it has no compute shaders".into());
    }
    let needed = [
        ("storage buffers of a shader", limits.max_storage_buffers_per_shader_stage, LEAST_BUFFERS),
        ("bindings of a group", limits.max_bindings_per_bind_group, LEAST_BUFFERS),
        ("invocations of a workgroup", limits.max_compute_invocations_per_workgroup, LEAST_INVOCATIONS),
        ("bytes that a workgroup shares", limits.max_compute_workgroup_storage_size, LEAST_SHARED),
    ];
    let short = needed.into_iter().find(|(_, has, least)| has < least);
    short.map(|(what, has, least)| format!("{what}: expected at least {least}, it has {has}"))
}

/// An address that no other buffer of the process has while this one lives. Numbers of buffers repeat from one instance of wgpu to another.
pub fn address(buffer: &wgpu::Buffer) -> Result<u64> {
    fn of<A: wgpu::hal::Api>(buffer: &wgpu::Buffer) -> Option<u64> {
        // SAFETY: only the address of wgpu's own record of the buffer is looked at.
        unsafe { buffer.as_hal::<A>() }.map(|raw| std::ptr::from_ref(&*raw) as u64)
    }
    #[cfg(target_vendor = "apple")]
    let found = of::<wgpu::hal::api::Metal>(buffer);
    #[cfg(windows)]
    let found = of::<wgpu::hal::api::Vulkan>(buffer).or_else(|| of::<wgpu::hal::api::Dx12>(buffer));
    #[cfg(not(any(target_vendor = "apple", windows)))]
    let found = of::<wgpu::hal::api::Vulkan>(buffer);
    #[cfg(not(target_vendor = "apple"))]
    let found = found.or_else(|| of::<wgpu::hal::api::Gles>(buffer));
    found.ok_or_else(|| failed("the buffer is destroyed"))
}

impl Gpu {
    /// Opens the adapter that [`find`] finds.
    pub fn open(wanted: Option<&str>) -> Result<(Gpu, Adapter)> {
        let found = find(wanted)?;
        if let Some(what) = lacking(&found) {
            return Err(failed(format!("{}: {what}", describe(&found.get_info(), &found.limits(), found.features()))));
        }
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("plimsoll"),
            required_features: found.features() & OWN_FEATURES,
            required_limits: found.limits(),
            memory_hints: wgpu::MemoryHints::Manual { suballocated_device_memory_block_size: BLOCK..BLOCK },
            ..wgpu::DeviceDescriptor::default()
        };
        let (device, queue) = pollster::block_on(found.request_device(&descriptor))
            .map_err(|e| failed(format!("{}: {e}", found.get_info().name)))?;
        let mut gpu = Gpu { device, queue, own: true, lost: Arc::default(), held: Arc::default(), cache: None };
        let note = || {
            let lost = Arc::clone(&gpu.lost);
            move |what: String| _ = lost.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(what)
        };
        let (error, loss) = (note(), note());
        gpu.device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
            tracing::error!(target: "plimsoll::wgpu", "{e}");
            error(e.to_string());
        }));
        gpu.device.set_device_lost_callback(move |reason, what| {
            // A device that is dropped or destroyed was meant to go.
            if reason != wgpu::DeviceLostReason::Destroyed {
                tracing::error!(target: "plimsoll::wgpu", "the device was lost: {what}");
            }
            loss(format!("the device was lost: {what}"));
        });
        let (info, adapter) = (found.get_info(), describe(&found.get_info(), &found.limits(), found.features()));
        let cache = gpu.scoped("pipeline cache", || Cache::open(&gpu.device, &info, &adapter.to_string()));
        gpu.cache = cache
            .unwrap_or_else(|error| {
                tracing::warn!(target: "plimsoll::wgpu", "{error}");
                None
            })
            .map(Arc::new);
        Ok((gpu, adapter))
    }

    /// A device that the host program owns, which keeps its own error handlers.
    pub fn lent(device: wgpu::Device, queue: wgpu::Queue) -> Gpu {
        Gpu { device, queue, own: false, lost: Arc::default(), held: Arc::default(), cache: None }
    }

    /// The same device, for another backend. What its allocator has reserved is told by this one alone.
    pub fn share(&self) -> Gpu {
        let (lost, held, cache) = (Arc::clone(&self.lost), Arc::clone(&self.held), self.cache.clone());
        Gpu { device: self.device.clone(), queue: self.queue.clone(), own: false, lost, held, cache }
    }

    /// Fails once the device has been lost.
    pub fn alive(&self) -> Result<()> {
        match &*self.lost.lock().unwrap_or_else(|e| e.into_inner()) {
            None => Ok(()),
            Some(what) => Err(failed(what)),
        }
    }

    /// Runs device calls; the first error that they raise is the result.
    pub fn scoped<T>(&self, what: &str, calls: impl FnOnce() -> T) -> Result<T> {
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let value = calls();
        let (validation, internal, memory) = (validation.pop(), internal.pop(), memory.pop());
        let raised = pollster::block_on(async { validation.await.or(internal.await).or(memory.await) });
        raised.map_or(Ok(value), |error| Err(failed(format!("{what}: {error}"))))
    }

    /// Commands, ready to be submitted once.
    pub fn encode(&self, what: &str, commands: impl FnOnce(&mut wgpu::CommandEncoder)) -> Result<wgpu::CommandBuffer> {
        self.scoped(what, || {
            let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            commands(&mut encoder);
            encoder.finish()
        })
    }

    /// Waits for everything that was submitted.
    pub fn wait(&self) -> Result<()> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| failed(format!("waiting: {e}")))?;
        self.alive()
    }

    /// Bytes that wgpu's allocator has taken from the driver, where it tells.
    pub fn reserved(&self) -> Option<u64> {
        self.device.generate_allocator_report().map(|report| report.total_reserved_bytes)
    }
}
