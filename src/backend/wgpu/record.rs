//! Launches made ready: shaders compiled, operands bound.

use super::{Wgpu, failed};
use crate::backend::{KernelId, Launch, SegmentId, Slice, reaches};
use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::render::{self, Bindings, Dialect};
use std::collections::{HashMap, HashSet};

/// What pipelines with the same binding modes share.
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

/// A template's name, a kernel's text, and which of its bindings are for reading only.
type Entry = (&'static str, render::Source, Vec<bool>);

impl Wgpu {
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
        let layout = self.gpu.scoped("layout", || {
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries };
            let group = self.gpu.device.create_bind_group_layout(&descriptor);
            let pipeline = self.gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
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
                self.gpu.device.create_shader_module(source)
            } else {
                // SAFETY: the text was rendered from a kernel whose accesses `reaches` has found to lie within their
                // bindings; templates compare every other index with constant extents before they use it, and their
                // loops end at constants.
                unsafe { self.gpu.device.create_shader_module_trusted(source, wgpu::ShaderRuntimeChecks::unchecked()) }
            };
            self.gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
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
        self.gpu.scoped(name, create)
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

    /// The steps of launches that have work to do, in order.
    pub(super) fn steps(&mut self, launches: &[Launch]) -> Result<Vec<Step>> {
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
        self.gpu.scoped("record", || {
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
                let group = self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: None,
                    layout: &self.layouts[modes].group,
                    entries: &entries.collect::<Vec<_>>(),
                });
                Step { pipeline: self.pipelines[&source.text].clone(), group, groups: source.groups }
            };
            bound.into_iter().map(step).collect()
        })
    }
}
