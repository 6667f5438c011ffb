//! Launches made ready: shaders compiled, operands bound.

use super::gpu::{Gpu, failed};
use crate::bound::{self, Bound, Buffers, Text};
use plimsoll_backend::segments::Segments;
use plimsoll_backend::{Launch, Slice};
use plimsoll_core::error::Result;
use plimsoll_core::kernel::Kernel;
use plimsoll_core::target::Target;
use std::collections::{HashMap, HashSet};

/// Bytes of the stack of a thread that compiles texts. Mesa's GL compiles some of them by thousands of calls, one within another, for which the
/// usual 2 MiB do not suffice.
const COMPILES: usize = 64 << 20;

/// The layouts that pipelines with the same binding modes share.
#[derive(Clone)]
pub(super) struct Layout {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

/// One dispatch, ready to be encoded.
pub(super) struct Step {
    pub pipeline: wgpu::ComputePipeline,
    pub group: wgpu::BindGroup,
    pub groups: [u32; 3],
}

/// A device that launches are recorded for, with its kernels and segments.
pub(super) struct Device<'a> {
    pub gpu: &'a Gpu,
    pub target: &'a Target,
    pub kernels: &'a [Kernel],
    pub segments: &'a Segments<wgpu::Buffer>,
}

/// The buffer that holds a slice, which begins with a word. All words of it are the slice's own.
pub(super) fn buffer(segments: &Segments<wgpu::Buffer>, at: Slice) -> Result<&wgpu::Buffer> {
    bound::buffer(segments, at, failed)
}

impl Device<'_> {
    fn buffers(&self) -> Buffers<'_, wgpu::Buffer> {
        Buffers { target: self.target, kernels: self.kernels, segments: self.segments, failed }
    }
}

/// Compiled texts, which may be those of another backend of the device. They are kept after the records that use them, for the next records.
#[derive(Clone)]
pub(super) struct Pipelines {
    /// Kernels check every index at run time.
    checked: bool,
    layouts: HashMap<Vec<bool>, Layout>,
    /// By their text.
    pipelines: HashMap<String, wgpu::ComputePipeline>,
}

impl Pipelines {
    pub fn new(checked: bool) -> Pipelines {
        Pipelines { checked, layouts: HashMap::new(), pipelines: HashMap::new() }
    }

    /// True if kernels check every index at run time.
    pub fn checked(&self) -> bool {
        self.checked
    }

    fn layout(&mut self, gpu: &Gpu, modes: &[bool]) -> Result<()> {
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
        let layout = gpu.scoped("layout", || {
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries };
            let group = gpu.device.create_bind_group_layout(&descriptor);
            let pipeline = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&group)],
                immediate_size: 0,
            });
            Layout { group, pipeline }
        })?;
        self.layouts.insert(modes.to_vec(), layout);
        Ok(())
    }

    fn pipeline(
        &self,
        gpu: &Gpu,
        name: &str,
        text: &str,
        layout: &wgpu::PipelineLayout,
    ) -> Result<wgpu::ComputePipeline> {
        let source = wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(text.into()) };
        let create = || {
            let module = if self.checked {
                gpu.device.create_shader_module(source)
            } else {
                // SAFETY: the text was rendered from a kernel whose accesses `reaches` has found to lie within their
                // bindings; templates compare every other index with constant extents before they use it, and their
                // loops end at constants.
                unsafe { gpu.device.create_shader_module_trusted(source, wgpu::ShaderRuntimeChecks::unchecked()) }
            };
            gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: Some(layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: gpu.cache.as_ref().map(|cache| cache.pipelines()),
            })
        };
        gpu.scoped(name, create)
    }

    /// Compiles every text that is new, once; drivers compile them side by side.
    fn compile_texts(&mut self, gpu: &Gpu, texts: &[Text]) -> Result<()> {
        for text in texts {
            self.layout(gpu, &text.modes)?;
        }
        let mut seen = HashSet::new();
        let is_new = |text: &&Text| text.has_work() && !self.pipelines.contains_key(&text.source.text);
        let fresh: Vec<&Text> = texts.iter().filter(is_new).filter(|text| seen.insert(&text.source.text)).collect();
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(fresh.len().max(1));
        let compile = &|share: &[&Text]| -> Result<Vec<(String, wgpu::ComputePipeline)>> {
            let pipeline = |Text { name, source, modes }: &Text| {
                Ok((source.text.clone(), self.pipeline(gpu, name, &source.text, &self.layouts[modes].pipeline)?))
            };
            share.iter().map(|text| pipeline(text)).collect()
        };
        let compiled = std::thread::scope(|scope| {
            let shares = fresh.chunks(fresh.len().div_ceil(workers).max(1));
            let spawn =
                |share| std::thread::Builder::new().stack_size(COMPILES).spawn_scoped(scope, move || compile(share));
            let threads = shares.map(spawn).collect::<std::io::Result<Vec<_>>>();
            let threads = threads.map_err(|e| failed(format!("no thread to compile shaders: {e}")))?;
            let panicked = |_| Err(failed("a thread that compiled shaders panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect::<Result<Vec<_>>>()
        })?;
        if let Some(cache) = &gpu.cache {
            cache.made(fresh.len());
        }
        self.pipelines.extend(compiled.into_iter().flatten());
        Ok(())
    }

    /// The steps of launches, in order; `None` for one that has nothing to do.
    pub fn steps(&mut self, device: &Device, launches: &[Launch]) -> Result<Vec<Option<Step>>> {
        let Bound { texts, launches } = device.buffers().bind_all(launches)?;
        let Device { gpu, segments, .. } = device;
        self.compile_texts(gpu, &texts.all)?;
        gpu.scoped("record", || {
            let step = |(number, slices): (usize, Vec<Slice>)| {
                let Text { source, modes, .. } = &texts.all[number];
                let entries = slices.iter().enumerate().map(|(binding, at)| wgpu::BindGroupEntry {
                    binding: binding as u32,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: buffer(segments, *at).expect("`bind` has found the slice in its segment"),
                        offset: at.offset,
                        size: wgpu::BufferSize::new(at.bytes.next_multiple_of(4)),
                    }),
                });
                let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: None,
                    layout: &self.layouts[modes].group,
                    entries: &entries.collect::<Vec<_>>(),
                });
                Step { pipeline: self.pipelines[&source.text].clone(), group, groups: source.groups }
            };
            launches.into_iter().map(|launch| launch.map(step)).collect()
        })
    }
}
