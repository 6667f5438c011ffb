//! A GPU that a page reaches through WebGPU. The page holds the buffers and runs what is recorded; this has the plan's side of it.
//!
//! A record is a text of JSON: `texts`, each with its WGSL and its modes (true for a binding that is read only), and `steps`, each with the
//! number of its text, its workgroups and its bindings `[segment, offset, bytes]`, or with `times` and the steps `of` a loop.
//!
//! A page never waits. So what is read comes in two steps: the first [`read`](Backend::read) fails and notes the slices that it wants; when
//! the page has fetched these, the next one takes them.

use crate::bound::{Bound, Buffers, Text, buffer};
use plimsoll_backend::records::Records;
use plimsoll_backend::segments::Segments;
use plimsoll_backend::work::{Loops, Work, launches as each_launch};
use plimsoll_backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::Kernel;
use plimsoll_core::kernel::render::{self, Bindings, Dialect};
use plimsoll_core::target::{Memory, Target};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};

/// The page's side: its calls do what they say in their order, and tell nothing.
pub trait Page: Send {
    /// Makes a buffer of zeros.
    fn alloc(&mut self, segment: u32, bytes: u64, memory: Memory);
    /// Destroys a buffer.
    fn free(&mut self, segment: u32);
    /// Writes to a buffer whole words: what is behind the data, up to a word, is the slice's own.
    fn write(&mut self, segment: u32, offset: u64, data: &[u8]);
    /// Keeps a record under a number.
    fn record(&mut self, number: u32, record: &str);
    /// Runs a record.
    fn replay(&mut self, number: u32);
}

/// What is read, in two steps.
#[derive(Default)]
pub struct Reads {
    /// The slices that were asked for last.
    pub wanted: Vec<Slice>,
    /// Their bytes, one after another, once the page has fetched them.
    pub arrived: Option<Vec<u8>>,
}

/// A device of WebGPU as a backend.
pub struct Web<P> {
    page: P,
    target: Target,
    segments: Segments<()>,
    kernels: Vec<Kernel>,
    loops: Loops,
    records: Records<()>,
    reads: Arc<Mutex<Reads>>,
}

fn failed(what: String) -> Error {
    Error::Backend { backend: "WebGPU", what, file: None }
}

impl<P: Page> Web<P> {
    /// A device with these limits. The second value is where reads meet the page.
    pub fn new(page: P, target: Target) -> (Web<P>, Arc<Mutex<Reads>>) {
        let reads = Arc::<Mutex<Reads>>::default();
        let (segments, kernels) = (Segments::default(), Vec::new());
        let (loops, records) = (Loops::default(), Records::default());
        (Web { page, target, segments, kernels, loops, records, reads: Arc::clone(&reads) }, reads)
    }

    fn buffers(&self) -> Buffers<'_, ()> {
        Buffers { target: &self.target, kernels: &self.kernels, segments: &self.segments, failed }
    }
}

/// The steps of a record's parts.
fn steps(parts: &[Work<Option<Value>>]) -> Vec<Value> {
    let step = |part: &Work<Option<Value>>| match part {
        Work::Launch(step) => step.clone(),
        Work::Repeat { times, of } => Some(json!({"times": times, "of": steps(of)})),
    };
    parts.iter().filter_map(step).collect()
}

impl<P: Page> Backend for Web<P> {
    fn target(&self) -> &Target {
        &self.target
    }

    fn identity(&self) -> String {
        self.target.name.clone()
    }

    fn usage(&self) -> Usage {
        Usage { overhead: None, ..self.segments.usage() }
    }

    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId> {
        let known = memory.is_device() || matches!(memory, Memory::Upload | Memory::Download);
        ensure(known && bytes.is_multiple_of(4) && bytes <= self.target.max_segment, || {
            failed(format!("cannot allocate {bytes} bytes of {memory:?} memory"))
        })?;
        let id = self.segments.next().map_err(failed)?;
        self.page.alloc(id.0, bytes, memory);
        self.segments.insert(bytes, memory, ());
        Ok(id)
    }

    fn free(&mut self, segment: SegmentId) {
        if self.segments.remove(segment).is_some() {
            self.records.free(segment);
            self.page.free(segment.0);
        }
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        buffer(&self.segments, at, failed)?;
        ensure(data.len() as u64 == at.bytes, || failed(format!("{} bytes do not fill {}", data.len(), at.bytes)))?;
        self.page.write(at.segment.0, at.offset, data);
        Ok(())
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        self.read_all(&mut [(at, data)])
    }

    fn read_all(&mut self, pieces: &mut [(Slice, &mut [u8])]) -> Result<()> {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let slices: Vec<Slice> = pieces.iter().map(|(at, _)| *at).collect();
        let arrived = reads.arrived.take().filter(|_| reads.wanted == slices);
        let bytes: usize = pieces.iter().map(|(_, data)| data.len()).sum();
        let Some(arrived) = arrived.filter(|all| all.len() == bytes) else {
            reads.wanted = slices;
            return Err(failed("the page has not fetched what is read".to_owned()));
        };
        reads.wanted.clear();
        let mut rest = &arrived[..];
        for (_, data) in pieces {
            let (own, others) = rest.split_at(data.len());
            data.copy_from_slice(own);
            rest = others;
        }
        Ok(())
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        if let Some(repeat) = kernel.repeat() {
            let kernels = repeat.kernels.iter().map(|inner| self.compile(inner)).collect::<Result<_>>()?;
            self.kernels.push(kernel.clone());
            let id = KernelId(self.kernels.len() as u32 - 1);
            self.loops.insert(id, repeat, kernels);
            return Ok(id);
        }
        if let Some(collective) = kernel.collective() {
            return Err(failed(format!("it runs alone: {collective}")));
        }
        render::render(kernel, &self.target, &Bindings::distinct(kernel), Dialect::Wgsl)?;
        self.kernels.push(kernel.clone());
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        let work: Vec<Work<Launch>> = self.loops.expand(launches).into_iter().flatten().collect();
        let each: Vec<Launch> = each_launch(&work).into_iter().cloned().collect();
        let Bound { texts, launches: bound } = self.buffers().bind_all(&each)?;
        let mut bound = bound.into_iter();
        let mut next = |_| {
            let launch = bound.next().ok_or_else(|| failed("a launch was not recorded".to_owned()))?;
            Ok::<_, Error>(launch.map(|(text, slices)| {
                let binding = |at: &Slice| json!([at.segment.0, at.offset, at.bytes.next_multiple_of(4)]);
                let bind: Vec<_> = slices.iter().map(binding).collect();
                json!({"text": text, "groups": texts.all[text].source.groups, "bind": bind})
            }))
        };
        let parts = work.into_iter().map(|part| part.try_map(&mut next)).collect::<Result<Vec<_>>>()?;
        let text = |text: &Text| json!({"name": text.name, "wgsl": text.source.text, "modes": text.modes});
        let record = json!({"texts": texts.all.iter().map(text).collect::<Vec<_>>(), "steps": steps(&parts)});
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        let id = self.records.insert((), segments).ok_or_else(|| failed("too many records".to_owned()))?;
        self.page.record(id.0, &record.to_string());
        Ok(id)
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        ensure(self.records.get(record).is_some(), || failed(format!("there is no record {}", record.0)))?;
        self.page.replay(record.0);
        Ok(())
    }
}
