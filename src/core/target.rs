//! Targets describe devices as plain data, so that a plan can be made without the device.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The kind of kernels that a target runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Host threads.
    Cpu,
    /// WGSL compute shaders.
    Wgpu,
    /// CUDA C++ kernels.
    Cuda,
}

impl Family {
    /// The name used in targets.
    pub fn name(self) -> &'static str {
        match self {
            Family::Cpu => "cpu",
            Family::Wgpu => "wgpu",
            Family::Cuda => "cuda",
        }
    }
}

/// The kind of memory that a segment is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// Memory that kernels read and write.
    #[default]
    Device,
    /// Host-visible memory that the host writes and the device copies from.
    Upload,
    /// Host-visible memory that the device copies to and the host reads.
    Download,
    /// Memory of the host in which its threads compute.
    Scratch,
    /// Memory of the host that a backend takes when it is opened and when it compiles: stacks of threads, tables of kernels.
    Own,
    /// Memory of the host in which the inputs of the next run are made ready while one runs, and the stack of the thread that does it.
    Prefetch,
    /// Memory of the device that NCCL takes when ranks join.
    Reserve,
    /// Memory of the host that the device reads and writes, which no limit of the device holds.
    Pinned,
}

impl Memory {
    /// True for memory that kernels read and write.
    pub fn is_device(&self) -> bool {
        *self == Memory::Device
    }

    /// True for memory that counts as a device's: what is pinned on the host is beside it, unless the host is the device.
    pub fn counts(&self, family: Family) -> bool {
        *self != Memory::Pinned || family == Family::Cpu
    }

    /// True for memory that kernels reach.
    pub fn is_reached(&self) -> bool {
        matches!(self, Memory::Device | Memory::Pinned)
    }
}

/// Bytes of staging memory, each way, on devices with memory of their own. More hardly speeds up copies.
pub const STAGING: u64 = 4 << 20;

/// Bytes of a CUDA device that a plan for several ranks leaves to NCCL, unless they were measured. Two H200 with NVLink took 522 MiB each (NCCL
/// 2.28, four channels, one axis).
pub const RESERVE: u64 = 768 << 20;

/// Bytes of the stack of a thread that the CPU backend starts: what its kernels touch.
pub const STACK: u64 = 256 << 10;

/// Bytes of addresses that such a thread reserves for its stack. A compiler that does not optimize gives each temporary of inlined code a
/// place of its own. Kernels for wide vectors then touch up to 268 KiB, more than [`STACK`]; the figure is the compiler's. Plans are the
/// same whatever the profile, so they count what optimized kernels may touch. The rest is addresses: a page that is not touched takes no
/// memory. They are fewer than those of a huge page, 2 MiB, which a system may take whole for one touch.
pub const STACK_ADDRESSES: u64 = 1 << 20;

/// Bytes of the stack of the thread that makes the inputs of the next run ready. It copies and converts, and does nothing else.
pub const PREFETCH_STACK: u64 = 64 << 10;

/// The limits and abilities of a device: all that planning knows of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The name in messages.
    pub name: String,
    /// The kind of kernels that it runs.
    pub family: Family,
    /// Every buffer starts at a multiple of this many bytes.
    pub alignment: u64,
    /// The largest segment, in bytes. It does not hold for [`Memory::Scratch`], [`Memory::Own`], [`Memory::Prefetch`] and
    /// [`Memory::Reserve`], which no buffer lies in.
    pub max_segment: u64,
    /// The largest range that one binding can cover, in bytes.
    pub max_binding: u64,
    /// The most buffers that one dispatch can bind.
    pub max_bindings: u32,
    /// The largest workgroup, in invocations.
    pub max_workgroup: u32,
    /// Bytes of shared memory per workgroup; on the CPU, bytes per thread for tiles.
    pub max_shared: u32,
    /// The most workgroups along one dimension of a dispatch.
    pub max_groups: u32,
    /// The most sequences of steps that can run at the same time.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub streams: u32,
    /// Threads for which per-thread workspaces are planned (1 on a GPU).
    pub threads: u32,
    /// The most bytes of host-visible memory for copies to the device, and as many for copies back. 0 if the host can read and
    /// write the device's memory itself.
    #[serde(default)]
    pub staging: u64,
    /// Bytes of the device that NCCL may take. They are 0 where a plan is for one rank.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reserve: u64,
    /// Libraries that may compute kernels.
    #[serde(default, skip_serializing_if = "is_default")]
    pub libraries: Libraries,
    /// True if matrix products and convolutions may round `f32` operands to TF32.
    #[serde(default, skip_serializing_if = "is_default")]
    pub allow_tf32: bool,
    /// CUDA compute capability, ten times the major plus the minor number; 0 elsewhere.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compute: u32,
    /// CUDA multiprocessors; 0 elsewhere.
    #[serde(default, skip_serializing_if = "is_default")]
    pub multiprocessors: u32,
    /// True if shaders of wgpu may exchange values within subgroups.
    #[serde(default, skip_serializing_if = "is_default")]
    pub subgroups: bool,
}

/// The widest operand of a kernel that computes scores again: registers hold those of two products.
pub const WIDEST_SCORES: usize = 128;

/// The number of workgroups that fill a GPU, for GPUs that do not report their number of multiprocessors.
pub const FEW_GROUPS: usize = 128;

/// Registers of a CUDA device's multiprocessor.
pub const REGISTERS: usize = 1 << 16;

/// The tiles of matrix products that a device computes at a time.
#[derive(Clone, Copy, Debug)]
pub struct Wave {
    /// Rows and columns of a tile.
    pub tile: usize,
    /// Number of tiles.
    pub tiles: usize,
    /// True if products of 16-bit floats are limited by time, false if those of `f32` are.
    pub half: bool,
}

/// Libraries that a CUDA device can call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Libraries {
    /// Matrix products.
    pub cublaslt: bool,
    /// Convolutions.
    pub cudnn: bool,
    /// Attention, by a cuDNN that is recent enough.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attention: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn one() -> u32 {
    1
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

/// A target with a name.
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// A description in one line.
    pub doc: &'static str,
    /// Makes the target.
    pub target: fn() -> Target,
}

/// Targets for devices that this machine does not have.
pub const PRESETS: &[Preset] = &[
    Preset { name: "cpu", doc: "a CPU with two threads", target: || Target::cpu(2) },
    Preset { name: "cuda", doc: "an H200 with cuBLASLt and cuDNN", target: Target::cuda },
    Preset { name: "wgpu", doc: "the limits that every WebGPU device has", target: Target::wgpu },
    Preset { name: "wgpu-desktop", doc: "a desktop graphics card of today", target: Target::wgpu_desktop },
];

/// The list of a machine's devices.
#[derive(Debug, Serialize, Deserialize)]
pub struct Devices {
    /// The devices, including the CPU.
    pub devices: Vec<Device>,
}

/// A device in a list.
#[derive(Debug, Serialize, Deserialize)]
pub struct Device {
    /// `cpu`, `cuda:0`, `wgpu:0`.
    pub name: String,
    /// [`AVAILABLE`](Device::AVAILABLE), or why it cannot be used.
    pub status: String,
    /// Its limits and abilities.
    pub target: Target,
}

impl Device {
    /// The status of a device that can be used.
    pub const AVAILABLE: &str = "available";
}

impl Devices {
    /// The device with this name. Without a name, the only available device that is no CPU; if there is none, the CPU.
    fn choose(mut self, name: Option<&str>) -> Result<Device, String> {
        let names = |list: &[Device]| list.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
        if let Some(name) = name {
            let among = names(&self.devices);
            let at = self.devices.iter().position(|d| d.name == name);
            return at.map(|at| self.devices.swap_remove(at)).ok_or(format!("no device '{name}' among: {among}"));
        }
        self.devices.retain(|d| d.status == Device::AVAILABLE);
        if self.devices.iter().any(|d| d.target.family != Family::Cpu) {
            self.devices.retain(|d| d.target.family != Family::Cpu);
        }
        match self.devices.len() {
            0 => Err("no device in this list is available; name one: FILE#NAME".into()),
            1 => Ok(self.devices.swap_remove(0)),
            _ => Err(format!("several devices are available; name one of {}: FILE#NAME", names(&self.devices))),
        }
    }
}

impl Target {
    /// The CPU, with workspaces for `threads` threads.
    pub fn cpu(threads: u32) -> Target {
        Target {
            name: "cpu".into(),
            family: Family::Cpu,
            alignment: 256,
            max_segment: 1 << 46,
            max_binding: 1 << 46,
            max_bindings: u32::MAX,
            max_workgroup: 1,
            max_shared: 256 << 10,
            max_groups: u32::MAX,
            streams: 1,
            threads,
            staging: 0,
            reserve: 0,
            libraries: Libraries::default(),
            allow_tf32: false,
            compute: 0,
            multiprocessors: 0,
            subgroups: false,
        }
    }

    /// A desktop graphics card: the limits that recent drivers of Vulkan, Metal and DX12 all have.
    pub fn wgpu_desktop() -> Target {
        Target {
            name: "wgpu-desktop".into(),
            max_segment: (2 << 30) - 4,
            max_binding: (2 << 30) - 4,
            max_bindings: 16,
            max_workgroup: 1024,
            max_shared: 32 << 10,
            ..Target::wgpu()
        }
    }

    /// The limits that every WebGPU implementation has (`wgpu::Limits::default()`).
    pub fn wgpu() -> Target {
        Target {
            name: "wgpu".into(),
            family: Family::Wgpu,
            alignment: 256,
            max_segment: 256 << 20,
            max_binding: 128 << 20,
            max_bindings: 8,
            max_workgroup: 256,
            max_shared: 16 << 10,
            max_groups: 65535,
            streams: 1,
            threads: 1,
            staging: STAGING,
            reserve: 0,
            libraries: Libraries::default(),
            allow_tf32: false,
            compute: 0,
            multiprocessors: 0,
            subgroups: false,
        }
    }

    /// An H200 with both libraries.
    pub fn cuda() -> Target {
        Target {
            name: "cuda".into(),
            family: Family::Cuda,
            alignment: 256,
            max_segment: 141 << 30,
            max_binding: 141 << 30,
            // 500 pointers fit into the 4 KiB of a kernel's parameters.
            max_bindings: 500,
            max_workgroup: 1024,
            max_shared: 227 << 10,
            max_groups: i32::MAX as u32,
            streams: 4,
            threads: 1,
            staging: STAGING,
            reserve: 0,
            libraries: Libraries { cublaslt: true, cudnn: true, attention: true },
            allow_tf32: false,
            compute: 90,
            multiprocessors: 132,
            subgroups: false,
        }
    }

    /// The preset with this name, from [`PRESETS`].
    pub fn preset(name: &str) -> Option<Target> {
        PRESETS.iter().find(|preset| preset.name == name).map(|preset| (preset.target)())
    }

    /// Finds the target that a text names: a preset, or a JSON file as `plimsoll devices` writes it.
    ///
    /// `FILE#NAME` is one device of a file that lists several. Without a name, it is the only available device that is no CPU;
    /// if there is none, the CPU.
    ///
    /// # Errors
    /// There is no such preset or file; the file has no such device, or several without a name; or [`check`](Target::check) fails.
    pub fn named(text: &str) -> Result<Target> {
        if let Some(target) = Target::preset(text) {
            return Ok(target);
        }
        let (file, device) = match text.rsplit_once('#').filter(|_| !Path::new(text).exists()) {
            Some((file, device)) => (file, Some(device)),
            None => (text, None),
        };
        let read = std::fs::read_to_string(file).map_err(|e| {
            let presets: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            Error::usage(format!(
                "target '{text}': expected one of {} or a file that can be read: {e}",
                presets.join(", ")
            ))
        })?;
        let path = Path::new(file);
        let json: serde_json::Value = serde_json::from_str(&read).map_err(|e| Error::json(path, &e))?;
        if device.is_none() && json.get("devices").is_none() {
            return Target::from_json(&read, path);
        }
        let list: Devices = serde_json::from_value(json).map_err(|e| {
            Error::usage(format!("expected a target, or a list of devices with a target each: {e}")).in_file(path)
        })?;
        let Device { target, .. } = list.choose(device).map_err(|what| Error::usage(what).in_file(path))?;
        target.checked(path)
    }

    /// The type in which this device computes values of `dtype`, and stores all that it does not [hold](Self::holds) in another one.
    ///
    /// WebGPU has no integers of more than 32 bits: wider ones and `u32` are `i32` there, with a range check where data enters. Types of 8 and 16
    /// bits keep their size: a word holds several. The CPU computes `f16` and `bf16` in `f32`.
    ///
    /// # Errors
    /// The device has no type that can store the values.
    pub fn storage(&self, dtype: DType) -> Result<DType> {
        match (self.family, dtype.held()) {
            (Family::Cpu, DType::F16 | DType::BF16) => Ok(DType::F32),
            (Family::Wgpu, DType::F64) => {
                Err(Error::usage(format!("target '{}' has no type for {dtype} values", self.name)))
            }
            (Family::Wgpu, DType::I64 | DType::U64 | DType::U32) => Ok(DType::I32),
            (_, held) => Ok(held),
        }
    }

    /// The type in which constants, states and what a training keeps lie in memory: halves stay in 16 bits. Kernels widen them as they read them.
    ///
    /// # Errors
    /// As [`storage`](Self::storage).
    pub fn holds(&self, dtype: DType) -> Result<DType> {
        if dtype.is_half() { Ok(dtype) } else { self.storage(dtype) }
    }

    /// True if each kernel launch costs time, and a small kernel leaves much of the device idle.
    pub fn launches_cost(&self) -> bool {
        self.family != Family::Cpu
    }

    /// The tiles of matrix products that the device computes at a time, if it works on many tiles at once.
    pub fn wave(&self) -> Option<Wave> {
        match self.family {
            Family::Cuda => Some(Wave { tile: 128, tiles: self.multiprocessors as usize, half: true }),
            // The device does not report its multiprocessors.
            Family::Wgpu => Some(Wave { tile: 32, tiles: FEW_GROUPS, half: false }),
            Family::Cpu => None,
        }
    }

    /// True if one kernel can compute an attention of this type: its sums are in `f32`.
    pub fn has_attention_for(&self, dtype: DType) -> bool {
        dtype != DType::F64
    }

    /// True if kernels compute the scores of an attention, of this type and with operands of so many columns, again wherever the backward
    /// computation reads them.
    pub fn computes_scores_again(&self, dtype: DType, columns: &[usize]) -> bool {
        let fits = columns.iter().all(|columns| (8..=WIDEST_SCORES).contains(columns) && columns.is_multiple_of(8));
        self.family == Family::Cuda && self.compute >= 80 && dtype.is_half() && fits
    }

    /// True if a kernel computes matrix products of this type.
    pub fn has_product_for(&self, dtype: DType) -> bool {
        dtype.is_float() && (self.family != Family::Cpu || dtype != DType::F64)
    }

    /// True if a convolution of bytes with so many input channels per group is faster than one of floats. GPUs multiply four neighbours at once:
    /// with one or two channels, most of them would be zeros.
    pub fn convolves_bytes(&self, channels: usize) -> bool {
        self.family == Family::Cpu || channels >= 3
    }

    /// True if the kernel of a product or a convolution also computes what its body reads beside the sum.
    pub fn takes_in_operands(&self) -> bool {
        self.family == Family::Cpu
    }

    /// True if an attention's kernel reads a key once for all the queries that share it, so that repeated keys need no copies.
    pub fn shares_repeated_keys(&self) -> bool {
        self.family != Family::Cpu
    }

    /// True if kernels read constants in a packed layout of their own.
    pub fn packs_constants(&self) -> bool {
        self.family == Family::Cpu
    }

    /// True if convolutions on tensor cores come from a library that wants the channels of a position one after another.
    pub fn prefers_channels_last(&self) -> bool {
        self.family == Family::Cuda && self.libraries.cudnn
    }

    /// True if poolings and transposed convolutions read images with their channels last as they are.
    pub fn reads_channels_last(&self) -> bool {
        self.family == Family::Cuda
    }

    /// True if elementwise kernels are faster when neighbours in the index space are neighbours in memory.
    pub fn prefers_written_order(&self) -> bool {
        self.family == Family::Cuda
    }

    /// This device as that of one of so many ranks: if there are several, a CUDA device leaves memory to NCCL, [`RESERVE`] unless it says how much.
    pub fn among(&self, ranks: usize) -> Target {
        let reserve = match self.family {
            Family::Cuda if ranks > 1 && self.reserve == 0 => RESERVE,
            Family::Cuda if ranks > 1 => self.reserve,
            _ => 0,
        };
        Target { reserve, ..self.clone() }
    }

    /// Bytes of the stacks of the threads that the backend starts beside the caller's own.
    pub fn stack_bytes(&self) -> u64 {
        if self.family == Family::Cpu { u64::from(self.threads.max(1) - 1) * STACK } else { 0 }
    }

    /// Bytes of the staging segment for copies of `bytes` bytes. More than [`staging`](Self::staging) are copied in parts.
    pub fn staged(&self, bytes: u64) -> u64 {
        let most = self.staging.min(self.max_segment / self.alignment * self.alignment);
        bytes.checked_next_multiple_of(self.alignment).map_or(most, |bytes| bytes.min(most))
    }

    /// Reads a target from JSON, as another machine wrote it.
    ///
    /// # Errors
    /// The text is no target, or [`check`](Target::check) fails.
    pub fn from_json(text: &str, path: &Path) -> Result<Target> {
        let target: Target = serde_json::from_str(text).map_err(|e| Error::json(path, &e))?;
        target.checked(path)
    }

    fn checked(self, path: &Path) -> Result<Target> {
        self.check().map_err(|what| Error::usage(format!("target '{}': {what}", self.name)).in_file(path))?;
        Ok(self)
    }

    /// Checks that every field is in its range, so that plans can be made for this target.
    ///
    /// # Errors
    /// The first field that is not, with its range.
    pub fn check(&self) -> Result<(), String> {
        if !self.alignment.is_power_of_two() || self.alignment < 4 || self.alignment > 1 << 16 {
            return Err(format!("alignment: expected a power of two from 4 to 65536, found {}", self.alignment));
        }
        for (name, value, min) in [
            ("max_segment", self.max_segment, self.alignment),
            ("max_binding", self.max_binding, self.alignment),
            ("max_bindings", self.max_bindings.into(), 4),
            ("max_workgroup", self.max_workgroup.into(), 1),
            ("max_groups", self.max_groups.into(), 1),
            ("streams", self.streams.into(), 1),
            ("threads", self.threads.into(), 1),
        ] {
            ensure(value >= min, || format!("{name}: expected at least {min}, found {value}"))?;
        }
        for (name, value) in [("threads", self.threads), ("streams", self.streams)] {
            ensure(value <= 4096, || format!("{name}: expected at most 4096, found {value}"))?;
        }
        if self.reserve > 0 && self.family != Family::Cuda {
            return Err(format!("reserve: expected 0, as NCCL is CUDA's, found {}", self.reserve));
        }
        if self.subgroups && self.family != Family::Wgpu {
            return Err("subgroups: expected false, as they are wgpu's".into());
        }
        let Libraries { cublaslt, cudnn, attention } = self.libraries;
        ensure(!attention || cublaslt && cudnn, || {
            "libraries.attention: expected false, as it is cuDNN's, which calls cuBLASLt".to_owned()
        })?;
        if !self.staging.is_multiple_of(self.alignment) {
            return Err(format!("staging: expected a multiple of {}, found {}", self.alignment, self.staging));
        }
        Ok(())
    }
}
