//! Any GPU that Vulkan, Metal or DX12 reaches, through wgpu.
//!
//! - A segment is one buffer of exactly the bytes asked for. An operand is a range of one, bound once per step; a segment
//!   that no step of a record writes is bound for reading only, any other for both: usage is tracked per buffer.
//! - A record is a list of pipelines and bind groups. A replay encodes them into one compute pass, which is all that has
//!   to be done again: command buffers serve once.
//! - Reads pass through one staging buffer of [`STAGING`] bytes that is made with the device. It is not part of
//!   [`Usage`]: what a driver keeps for itself is not either.
//!
//! Nothing here panics on what a device answers: every call that may fail stands in an error scope.

use super::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage, reaches};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::kernel::render::{self, Bindings, Dialect};
use crate::target::{Family, Target};
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::sync::{Arc, Mutex};

/// Bytes of the buffer through which results reach the host.
pub const STAGING: u64 = 4 << 20;

/// Bytes of a write that are in flight at once.
const WRITE: usize = 32 << 20;

/// A device that wgpu found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// `vulkan`, `metal` or `dx12`.
    pub api: String,
    /// What kind of device it is.
    pub kind: String,
    /// Name and version of its driver.
    pub driver: String,
    /// It is the CPU in disguise: right, but slower than the `cpu` backend.
    pub software: bool,
    /// What plans for it may assume.
    pub target: Target,
}

impl Display for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {}, {})", self.name, self.api, self.kind, self.driver)
    }
}

/// A wgpu device as a backend.
pub struct Wgpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    adapter: Adapter,
    target: Target,
    checked: bool,
    /// The device's first error that no scope caught, its loss among them.
    lost: Arc<Mutex<Option<String>>>,
    staging: wgpu::Buffer,
    usage: Usage,
    segments: Vec<Option<wgpu::Buffer>>,
    kernels: Vec<Kernel>,
    records: Vec<Vec<Step>>,
    layouts: HashMap<Vec<bool>, Layout>,
    pipelines: HashMap<String, wgpu::ComputePipeline>,
}

/// What pipelines with the same binding modes share.
struct Layout {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

/// One dispatch, ready to be encoded.
struct Step {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    groups: [u32; 3],
}

/// A template's name, a kernel's text, and which of its bindings are for reading only.
type Entry = (&'static str, render::Source, Vec<bool>);

fn failed(what: impl Display) -> Error {
    Error::Backend { backend: "wgpu", what: what.to_string() }
}

fn instance() -> wgpu::Instance {
    // Indirect dispatches are not used, and checking them would cap buffers at 4 GiB.
    wgpu::Instance::new(wgpu::InstanceDescriptor {
        flags: wgpu::InstanceFlags::empty(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    })
}

fn target(name: &str, limits: &wgpu::Limits) -> Target {
    Target {
        name: format!("wgpu: {name}"),
        family: Family::Wgpu,
        alignment: u64::from(limits.min_storage_buffer_offset_alignment).max(256),
        max_segment: limits.max_buffer_size & !3,
        max_binding: limits.max_storage_buffer_binding_size & !3,
        max_bindings: limits.max_storage_buffers_per_shader_stage.min(limits.max_bindings_per_bind_group),
        max_workgroup: limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x),
        max_shared: limits.max_compute_workgroup_storage_size,
        max_groups: limits.max_compute_workgroups_per_dimension,
        threads: 1,
        ..Target::wgpu()
    }
}

fn describe(info: &wgpu::AdapterInfo, limits: &wgpu::Limits) -> Adapter {
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
        target: target(&info.name, limits),
    }
}

/// Adapters in order of preference: discrete, integrated, virtual, other, software.
fn enumerate() -> Vec<wgpu::Adapter> {
    let mut adapters = pollster::block_on(instance().enumerate_adapters(wgpu::Backends::PRIMARY));
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
    enumerate().iter().map(|a| describe(&a.get_info(), &a.limits())).collect()
}

/// Opens a device as [`Wgpu::new`] does, and says which it is. Software devices count only if `software` allows it.
///
/// # Errors
/// When there is none.
pub fn open(adapter: Option<&str>, software: bool) -> Result<(Box<dyn Backend>, String)> {
    let wgpu = Wgpu::new(adapter)?;
    if wgpu.adapter.software && !software {
        return Err(failed(format!("{} is no GPU", wgpu.adapter)));
    }
    let name = format!("wgpu, {}", wgpu.adapter);
    Ok((Box::new(wgpu), name))
}

impl Wgpu {
    /// Opens the device of this number in [`adapters`], or the first whose name contains this text, or the best.
    ///
    /// # Errors
    /// When there is no such device, or it refuses.
    pub fn new(adapter: Option<&str>) -> Result<Wgpu> {
        Wgpu::with_checks(adapter, false)
    }

    /// As [`new`](Self::new); with `checked`, kernels check every index at run time, which kernels that a plan's checker
    /// has passed do not need.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_checks(adapter: Option<&str>, checked: bool) -> Result<Wgpu> {
        let adapters = enumerate();
        let names =
            || adapters.iter().map(|a| describe(&a.get_info(), &a.limits()).to_string()).collect::<Vec<_>>().join("; ");
        let found = match adapter {
            None => adapters.first(),
            Some(text) => match text.parse::<usize>() {
                Ok(number) => adapters.get(number),
                Err(_) => {
                    let wanted = text.to_lowercase();
                    adapters.iter().find(|a| a.get_info().name.to_lowercase().contains(&wanted))
                }
            },
        };
        let found = found.ok_or_else(|| match adapter {
            Some(text) if !adapters.is_empty() => failed(format!("no adapter '{text}' among: {}", names())),
            _ => failed("no adapter (Vulkan, Metal or DX12 driver) was found"),
        })?;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("plimsoll"),
            required_limits: found.limits(),
            ..wgpu::DeviceDescriptor::default()
        };
        let (device, queue) = pollster::block_on(found.request_device(&descriptor))
            .map_err(|e| failed(format!("{}: {e}", found.get_info().name)))?;
        let lost = Arc::new(Mutex::new(None));
        let note = |lost: &Arc<Mutex<Option<String>>>| {
            let lost = Arc::clone(lost);
            move |what: String| {
                tracing::error!(target: "plimsoll::wgpu", "{what}");
                lost.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(what);
            }
        };
        let (error, loss) = (note(&lost), note(&lost));
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| error(e.to_string())));
        device.set_device_lost_callback(move |reason, what| {
            // Dropping a device is no loss.
            if reason != wgpu::DeviceLostReason::Destroyed {
                loss(format!("the device was lost: {what}"));
            }
        });
        Wgpu::assemble(device, queue, describe(&found.get_info(), &found.limits()), checked, lost)
    }

    /// A backend over a device that the host program owns, which keeps its own error handlers.
    ///
    /// # Errors
    /// When the device refuses a staging buffer.
    pub fn from_device(device: wgpu::Device, queue: wgpu::Queue) -> Result<Wgpu> {
        let adapter = describe(&device.adapter_info(), &device.limits());
        Wgpu::assemble(device, queue, adapter, false, Arc::default())
    }

    fn assemble(
        device: wgpu::Device,
        queue: wgpu::Queue,
        adapter: Adapter,
        checked: bool,
        lost: Arc<Mutex<Option<String>>>,
    ) -> Result<Wgpu> {
        let staging = scoped(&device, "staging", || {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("staging"),
                size: STAGING,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })?;
        Ok(Wgpu {
            device,
            queue,
            target: adapter.target.clone(),
            adapter,
            checked,
            lost,
            staging,
            usage: Usage::default(),
            segments: Vec::new(),
            kernels: Vec::new(),
            records: Vec::new(),
            layouts: HashMap::new(),
            pipelines: HashMap::new(),
        })
    }

    /// What the device is.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// Fails once the device has been lost.
    fn alive(&self) -> Result<()> {
        match &*self.lost.lock().unwrap_or_else(|e| e.into_inner()) {
            None => Ok(()),
            Some(what) => Err(failed(what)),
        }
    }

    /// The buffer of a slice that lies within its segment.
    fn buffer(&self, at: Slice) -> Result<&wgpu::Buffer> {
        let buffer = self.segments.get(at.segment.0 as usize).and_then(Option::as_ref);
        let buffer = buffer.ok_or_else(|| failed(format!("there is no segment {}", at.segment.0)))?;
        let end = at.offset.checked_add(at.bytes).filter(|end| *end <= buffer.size());
        if end.is_none() || !at.offset.is_multiple_of(4) || !at.bytes.is_multiple_of(4) {
            let Slice { offset, bytes, .. } = at;
            return Err(failed(format!("{bytes} bytes at {offset} do not lie in {} bytes in words", buffer.size())));
        }
        Ok(buffer)
    }

    fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.queue.submit([encoder.finish()]);
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    fn wait(&self) -> Result<()> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| failed(format!("waiting: {e}")))?;
        self.alive()
    }

    fn layout(&mut self, modes: &[bool]) -> Result<()> {
        if self.layouts.contains_key(modes) {
            return Ok(());
        }
        let entries: Vec<wgpu::BindGroupLayoutEntry> = modes
            .iter()
            .enumerate()
            .map(|(binding, &read_only)| wgpu::BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = scoped(&self.device, "layout", || {
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries };
            let group = self.device.create_bind_group_layout(&descriptor);
            let pipeline = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&group)],
                immediate_size: 0,
            });
            Layout { group, pipeline }
        })?;
        self.layouts.insert(modes.to_vec(), layout);
        Ok(())
    }

    fn pipeline(&self, name: &str, text: &str, layout: &wgpu::PipelineLayout) -> Result<wgpu::ComputePipeline> {
        let source = wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(text.into()) };
        let create = || {
            let module = if self.checked {
                self.device.create_shader_module(source)
            } else {
                // SAFETY: the text was rendered from a kernel whose accesses `reaches` has found to lie within their
                // bindings; templates compare every other index with constant extents before they use it, and their
                // loops end at constants.
                unsafe { self.device.create_shader_module_trusted(source, wgpu::ShaderRuntimeChecks::unchecked()) }
            };
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: Some(layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: None,
            })
        };
        scoped(&self.device, name, create)
    }

    /// Which of a launch's arguments share a binding, and the slice of each binding.
    fn bind(&self, kernel: &Kernel, launch: &Launch, written: &HashSet<SegmentId>) -> Result<(Bindings, Vec<Slice>)> {
        let slots = kernel.reads.len() + kernel.writes.len();
        if launch.args.len() < slots {
            return Err(failed(format!("a launch has {} arguments, its kernel {slots}", launch.args.len())));
        }
        let mut bindings = Bindings { of: Vec::new(), read_only: Vec::new() };
        let mut slices: Vec<Slice> = Vec::new();
        for (slot, at) in launch.args[..slots].iter().enumerate() {
            let Some(high) = reaches(kernel, slot) else {
                bindings.of.push(None);
                continue;
            };
            self.buffer(*at)?;
            if high.is_none_or(|high| high >= at.bytes / 4) || at.bytes > self.target.max_binding {
                let name = kernel.template.name();
                return Err(failed(format!("kernel '{name}': operand {slot} does not fit {} bytes", at.bytes)));
            }
            let same = slices.iter().position(|s| (s.segment, s.offset) == (at.segment, at.offset));
            let binding = same.unwrap_or(slices.len());
            match same {
                Some(b) => slices[b].bytes = slices[b].bytes.max(at.bytes),
                None => {
                    slices.push(*at);
                    bindings.read_only.push(!written.contains(&at.segment));
                }
            }
            bindings.of.push(Some(binding));
        }
        if slices.len() > self.target.max_bindings as usize {
            let (name, most) = (kernel.template.name(), self.target.max_bindings);
            return Err(failed(format!("kernel '{name}' binds {} buffers, the device allows {most}", slices.len())));
        }
        Ok((bindings, slices))
    }
}

/// Runs device calls; the first error that they raise is the result.
fn scoped<T>(device: &wgpu::Device, what: &str, calls: impl FnOnce() -> T) -> Result<T> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let value = calls();
    let (validation, internal, memory) = (validation.pop(), internal.pop(), memory.pop());
    let raised = pollster::block_on(async { validation.await.or(internal.await).or(memory.await) });
    raised.map_or(Ok(value), |error| Err(failed(format!("{what}: {error}"))))
}

impl Backend for Wgpu {
    fn target(&self) -> &Target {
        &self.target
    }

    fn usage(&self) -> Usage {
        Usage { overhead: STAGING, ..self.usage }
    }

    fn alloc(&mut self, bytes: u64) -> Result<SegmentId> {
        self.alive()?;
        if !bytes.is_multiple_of(4) || bytes > self.target.max_segment {
            let most = self.target.max_segment;
            return Err(failed(format!("cannot allocate {bytes} bytes: at most {most}, in words")));
        }
        let buffer = scoped(&self.device, "allocation", || {
            let usages = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
            let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("segment"),
                size: bytes,
                usage: usages,
                mapped_at_creation: false,
            });
            // wgpu would fill it with zeros at its first use: that is paid for here, not in the first run.
            let mut encoder = self.encoder();
            encoder.clear_buffer(&buffer, 0, None);
            self.submit(encoder);
            buffer
        })?;
        self.usage.bytes += bytes;
        self.usage.allocations += 1;
        self.segments.push(Some(buffer));
        Ok(SegmentId(self.segments.len() as u32 - 1))
    }

    fn free(&mut self, segment: SegmentId) {
        if let Some(buffer) = self.segments.get_mut(segment.0 as usize).and_then(Option::take) {
            self.usage.bytes -= buffer.size();
            buffer.destroy();
        }
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        self.alive()?;
        let buffer = self.buffer(at)?;
        if data.len() as u64 != at.bytes {
            return Err(failed(format!("{} bytes do not fill {}", data.len(), at.bytes)));
        }
        let mut offset = at.offset;
        for chunk in data.chunks(WRITE) {
            scoped(&self.device, "write", || self.queue.write_buffer(buffer, offset, chunk))?;
            offset += chunk.len() as u64;
            // Large writes wait for each other, lest all of them lie in the queue's memory at once.
            if data.len() > WRITE {
                self.queue.submit([]);
                self.wait()?;
            }
        }
        Ok(())
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        self.alive()?;
        let buffer = self.buffer(at)?;
        if data.len() as u64 != at.bytes {
            return Err(failed(format!("{} bytes do not take {}", data.len(), at.bytes)));
        }
        let mut offset = at.offset;
        for chunk in data.chunks_mut(STAGING as usize) {
            let bytes = chunk.len() as u64;
            scoped(&self.device, "read", || {
                let mut encoder = self.encoder();
                encoder.copy_buffer_to_buffer(buffer, offset, &self.staging, 0, bytes);
                self.submit(encoder);
                // Whether it worked shows when the range is asked for.
                self.staging.map_async(wgpu::MapMode::Read, ..bytes, |_| {});
            })?;
            self.wait()?;
            let view = self.staging.get_mapped_range(..bytes).map_err(|e| failed(format!("read: {e}")))?;
            chunk.copy_from_slice(&view);
            drop(view);
            self.staging.unmap();
            offset += bytes;
        }
        Ok(())
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        // The text depends on which arguments share bytes: it is rendered when that is known, but errors belong here.
        render::render(kernel, &self.target, &Bindings::distinct(kernel), Dialect::Wgsl)?;
        self.kernels.push(kernel.clone());
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        self.alive()?;
        let kernel = |launch: &Launch| {
            let kernel = self.kernels.get(launch.kernel.0 as usize);
            kernel.ok_or_else(|| failed(format!("there is no kernel {}", launch.kernel.0)))
        };
        let mut written = HashSet::new();
        for launch in launches {
            let kernel = kernel(launch)?;
            let writes = launch.args.iter().skip(kernel.reads.len()).take(kernel.writes.len());
            written.extend(writes.map(|at| at.segment));
        }
        // Per launch that has work: its source, by number, and the slices of its bindings.
        let mut sources: Vec<Entry> = Vec::new();
        let mut numbers: HashMap<(KernelId, Bindings), usize> = HashMap::new();
        let mut bound = Vec::with_capacity(launches.len());
        for launch in launches {
            let kernel = kernel(launch)?;
            let (bindings, slices) = self.bind(kernel, launch, &written)?;
            let number = match numbers.get(&(launch.kernel, bindings.clone())) {
                Some(&number) => number,
                None => {
                    let source = render::render(kernel, &self.target, &bindings, Dialect::Wgsl)?;
                    sources.push((kernel.template.name(), source, bindings.read_only.clone()));
                    numbers.insert((launch.kernel, bindings), sources.len() - 1);
                    sources.len() - 1
                }
            };
            if sources[number].1.groups != [0; 3] {
                bound.push((number, slices));
            }
        }
        for (_, _, modes) in &sources {
            self.layout(modes)?;
        }
        // Every text that is new, once; drivers compile them side by side.
        let mut seen = HashSet::new();
        let fresh: Vec<&Entry> = sources
            .iter()
            .filter(|(_, source, _)| source.groups != [0; 3] && !self.pipelines.contains_key(&source.text))
            .filter(|(_, source, _)| seen.insert(&source.text))
            .collect();
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(fresh.len().max(1));
        let compile = |share: &[&Entry]| -> Result<Vec<_>> {
            let pipeline = |(name, source, modes): &Entry| {
                let pipeline = self.pipeline(name, &source.text, &self.layouts[modes].pipeline)?;
                Ok((source.text.clone(), pipeline))
            };
            share.iter().map(|entry| pipeline(entry)).collect()
        };
        let compiled: Vec<(String, wgpu::ComputePipeline)> = std::thread::scope(|scope| {
            let shares = fresh.chunks(fresh.len().div_ceil(workers).max(1));
            let threads: Vec<_> = shares.map(|share| scope.spawn(|| compile(share))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Vec<_>>>| {
                thread.join().unwrap_or_else(|_| Err(failed("a thread that compiled shaders panicked")))
            };
            threads
                .into_iter()
                .map(join)
                .collect::<Result<Vec<_>>>()
                .map(|shares| shares.into_iter().flatten().collect())
        })?;
        self.pipelines.extend(compiled);
        let steps = scoped(&self.device, "record", || {
            let step = |(number, slices): (usize, Vec<Slice>)| {
                let (_, source, modes) = &sources[number];
                let entries = slices.iter().enumerate().map(|(binding, at)| wgpu::BindGroupEntry {
                    binding: binding as u32,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: self.buffer(*at).expect("`bind` has found the slice in its segment"),
                        offset: at.offset,
                        size: wgpu::BufferSize::new(at.bytes),
                    }),
                });
                let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: None,
                    layout: &self.layouts[modes].group,
                    entries: &entries.collect::<Vec<_>>(),
                });
                Step { pipeline: self.pipelines[&source.text].clone(), group, groups: source.groups }
            };
            bound.into_iter().map(step).collect::<Vec<_>>()
        })?;
        self.records.push(steps);
        Ok(RecordId(self.records.len() as u32 - 1))
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        self.alive()?;
        let steps = self.records.get(record.0 as usize);
        let steps = steps.ok_or_else(|| failed(format!("there is no record {}", record.0)))?;
        scoped(&self.device, "replay", || {
            let mut encoder = self.encoder();
            // One pass for all: reads after writes are ordered within it, and passes cost more than dispatches.
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for step in steps {
                let [x, y, z] = step.groups;
                pass.set_pipeline(&step.pipeline);
                pass.set_bind_group(0, &step.group, &[]);
                pass.dispatch_workgroups(x, y, z);
            }
            drop(pass);
            self.submit(encoder);
        })
    }

    fn wait(&mut self) -> Result<()> {
        Wgpu::wait(self)
    }
}
