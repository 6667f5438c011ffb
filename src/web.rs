//! The door of a page: the library as WebAssembly. `web/page.js` calls it with a request of JSON and bytes, and gets such an answer. Files are
//! read through the page, and so are devices of WebGPU.

use crate::answers::Advice;
use crate::backend::web::{Page, Reads, Web};
use crate::backend::{Backend, Slice, cpu::Cpu};
use crate::error::{Error, Result};
use crate::exec::{self, Exec};
use crate::file;
use crate::model::{Model, fill};
use crate::plan::{Planned, Port};
use crate::report::picture::{About, plan_page};
use crate::target::{Memory, Target};
use crate::tensor::Tensor;
use crate::{npy, report, settings};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What the page does for the library. Places in memory are addresses and lengths; offsets of files and buffers are whole numbers.
mod page {
    #[link(wasm_import_module = "page")]
    unsafe extern "C" {
        pub fn read(name: *const u8, length: usize, offset: f64, into: *mut u8, bytes: usize) -> i32;
        pub fn failed(text: *const u8, length: usize);
        pub fn alloc(segment: u32, bytes: f64, kind: u32);
        pub fn free(segment: u32);
        pub fn write(segment: u32, offset: f64, data: *const u8, bytes: usize);
        pub fn record(number: u32, text: *const u8, length: usize);
        pub fn replay(number: u32);
    }
}

/// The page's buffers and pipelines.
struct Gpu;

impl Page for Gpu {
    fn alloc(&mut self, segment: u32, bytes: u64, memory: Memory) {
        let kind = match memory {
            Memory::Upload => 1,
            Memory::Download => 2,
            _ => 0,
        };
        // SAFETY: it takes numbers.
        unsafe { page::alloc(segment, bytes as f64, kind) }
    }

    fn free(&mut self, segment: u32) {
        // SAFETY: it takes a number.
        unsafe { page::free(segment) }
    }

    fn write(&mut self, segment: u32, offset: u64, data: &[u8]) {
        // SAFETY: the page copies the bytes before it returns.
        unsafe { page::write(segment, offset as f64, data.as_ptr(), data.len()) }
    }

    fn record(&mut self, number: u32, record: &str) {
        // SAFETY: the page copies the text before it returns.
        unsafe { page::record(number, record.as_ptr(), record.len()) }
    }

    fn replay(&mut self, number: u32) {
        // SAFETY: it takes a number.
        unsafe { page::replay(number) }
    }
}

/// Reads bytes of a file of the page.
fn read(path: &Path, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let name = path.to_string_lossy();
    // SAFETY: the page writes to these bytes alone.
    let code = unsafe { page::read(name.as_ptr(), name.len(), offset as f64, into.as_mut_ptr(), into.len()) };
    match code {
        0 => Ok(()),
        1 => Err(io::ErrorKind::NotFound.into()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A request. Bytes beside it are the model's, an array's, or those that were read of a device.
#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Request {
    /// Takes a model, whose long data stay in its file.
    Open { name: String },
    /// Plans it.
    Plan { target: String, options: Value },
    /// What would make it smaller.
    Advise { target: String, options: Value },
    /// The plan as a page to look at.
    Picture { target: String, options: Value },
    /// Plans it for a device and loads it there: the CPU, or WebGPU with these limits.
    Load { options: Value, limits: Option<Limits> },
    /// Takes an input as an array file.
    Give { name: String },
    /// Runs it.
    Run { seed: u64 },
    /// Takes what was read of a device.
    Fetched,
}

/// The limits of an adapter, by WebGPU's names.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Limits {
    name: String,
    min_storage_buffer_offset_alignment: u64,
    max_buffer_size: u64,
    max_storage_buffer_binding_size: u64,
    max_storage_buffers_per_shader_stage: u32,
    max_compute_invocations_per_workgroup: u32,
    max_compute_workgroup_size_x: u32,
    max_compute_workgroup_storage_size: u32,
    max_compute_workgroups_per_dimension: u32,
}

impl Limits {
    fn target(&self) -> Target {
        Target {
            name: format!("WebGPU: {}", self.name),
            alignment: self.min_storage_buffer_offset_alignment.max(256),
            max_segment: self.max_buffer_size & !3,
            max_binding: self.max_storage_buffer_binding_size & !3,
            max_bindings: self.max_storage_buffers_per_shader_stage,
            max_workgroup: self.max_compute_invocations_per_workgroup.min(self.max_compute_workgroup_size_x),
            max_shared: self.max_compute_workgroup_storage_size,
            max_groups: self.max_compute_workgroups_per_dimension,
            ..Target::wgpu()
        }
    }
}

/// A model on a device.
struct Loaded {
    exec: Exec,
    /// Of WebGPU, where reads meet the page.
    reads: Option<Arc<Mutex<Reads>>>,
}

#[derive(Default)]
struct State {
    name: PathBuf,
    bytes: Bytes,
    loaded: Option<Loaded>,
    given: Vec<(String, Tensor)>,
    answer: (String, Vec<u8>),
    places: [usize; 4],
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn port(port: &Port) -> Value {
    json!({"name": port.name, "dtype": port.dtype.to_string(), "shape": port.shape[..]})
}

impl State {
    fn model(&self, options: &Value) -> Result<Model> {
        Model::from_bytes_of(&self.name, self.bytes.clone(), &settings::options(&options.to_string())?)
    }

    fn planned(&self, target: &str, options: &Value) -> Result<(Model, Target, Planned)> {
        let (model, target) = (self.model(options)?, Target::named(target)?);
        let planned = model.planned(&target)?;
        Ok((model, target, planned))
    }

    fn serve(&mut self, request: Request, data: Vec<u8>) -> Result<(Value, Vec<u8>)> {
        match request {
            Request::Open { name } => {
                (self.loaded, self.given) = (None, Vec::new());
                (self.name, self.bytes) = (name.into(), data.into());
                file::give(file::Given { own: self.name.clone(), read });
                let model = self.model(&json!({}))?;
                let dims: Vec<_> = model.dims().iter().map(|(name, _)| name).collect();
                Ok((json!({"dims": dims}), Vec::new()))
            }
            Request::Plan { target, options } => self.plan(&target, &options).map(|told| (told, Vec::new())),
            Request::Advise { target, options } => {
                let (model, target) = (self.model(&options)?, Target::named(&target)?);
                let advice: Advice = model.advise(&target)?;
                Ok((json!({"text": report::plain(&advice.to_string())}), Vec::new()))
            }
            Request::Picture { target, options } => {
                let (model, _, planned) = self.planned(&target, &options)?;
                let subject = self.name.display().to_string();
                let limit = model.options().memory_limit;
                let about = About { subject: &subject, graphs: &planned.graphs, limit, ..About::default() };
                Ok((json!({"html": plan_page(&planned.plan, &about)}), Vec::new()))
            }
            Request::Load { options, limits } => self.load(&options, limits.as_ref()).map(|told| (told, Vec::new())),
            Request::Give { name } => {
                let failed = |e| Error::usage(format!("input '{name}': {e}"));
                let (dtype, shape, elements) = npy::parts(&Bytes::from(data)).map_err(failed)?;
                self.given.retain(|(other, _)| *other != name);
                self.given.push((name, Tensor::new(dtype, shape, elements)?));
                Ok((json!({}), Vec::new()))
            }
            Request::Run { seed } => self.run(seed),
            Request::Fetched => {
                if let Some(reads) = self.loaded.as_ref().and_then(|loaded| loaded.reads.as_ref()) {
                    reads.lock().unwrap_or_else(PoisonError::into_inner).arrived = Some(data);
                }
                self.outputs()
            }
        }
    }

    fn plan(&self, target: &str, options: &Value) -> Result<Value> {
        let (model, _, Planned { plan, graphs, .. }) = self.planned(target, options)?;
        let (subject, limit) = (self.name.display().to_string(), model.options().memory_limit);
        let about = About { subject: &subject, graphs: &graphs, limit, ..About::default() };
        Ok(json!({
            "bytes": plan.bytes(),
            "limit": limit,
            "table": report::plain(&plan.to_string()),
            "inputs": plan.programs[0].inputs.iter().map(port).collect::<Vec<_>>(),
            "svg": report::svg(&plan, &about),
        }))
    }

    fn load(&mut self, options: &Value, limits: Option<&Limits>) -> Result<Value> {
        // The memory of what ran before is free for this.
        self.loaded = None;
        let model = self.model(options)?;
        let (backend, reads): (Box<dyn Backend>, _) = match limits {
            None => (Box::new(Cpu::new(1)), None),
            Some(limits) => {
                let (web, reads) = Web::new(Gpu, limits.target());
                (Box::new(web), Some(reads))
            }
        };
        let planned = model.planned(backend.target())?;
        let told = json!({"bytes": planned.plan.bytes()});
        let exec = Exec::load(backend, planned.plan, &planned.data, &|_| {})?;
        self.loaded = Some(Loaded { exec, reads });
        Ok(told)
    }

    fn loaded(&mut self) -> Result<&mut Loaded> {
        self.loaded.as_mut().ok_or_else(|| Error::usage("no model is loaded".to_owned()))
    }

    fn run(&mut self, seed: u64) -> Result<(Value, Vec<u8>)> {
        let given = self.given.clone();
        let loaded = self.loaded()?;
        let inputs = fill::fill(loaded.exec.plan().program, None, given, seed)?;
        loaded.exec.write(&inputs)?;
        loaded.exec.replay()?;
        self.outputs()
    }

    /// The outputs, or the slices that the page has to fetch for them.
    fn outputs(&mut self) -> Result<(Value, Vec<u8>)> {
        let Loaded { exec, reads } = self.loaded()?;
        let found = match (exec.read(), reads) {
            (Err(_), Some(reads)) if !reads.lock().unwrap_or_else(PoisonError::into_inner).wanted.is_empty() => {
                let reads = reads.lock().unwrap_or_else(PoisonError::into_inner);
                let place = |at: &Slice| json!([at.segment.0, at.offset, at.bytes]);
                let wanted: Vec<_> = reads.wanted.iter().map(place).collect();
                return Ok((json!({"wanted": wanted}), Vec::new()));
            }
            (found, _) => found?,
        };
        let program = exec.plan().program;
        let outputs = exec::found(program.outputs.iter().map(Port::room), found);
        let (mut told, mut arrays) = (Vec::new(), Vec::new());
        for (port, tensor) in program.outputs.iter().zip(outputs) {
            let start = arrays.len();
            npy::write_to(&mut arrays, &tensor).map_err(|e| Error::usage(e.to_string()))?;
            let is_float = tensor.dtype().is_float();
            let first: Vec<_> = tensor.to_f64().into_iter().take(8).map(|x| shown(x, is_float)).collect();
            let (dtype, shape) = (tensor.dtype().to_string(), &tensor.shape()[..]);
            let bytes = arrays.len() - start;
            told.push(json!({"name": port.name, "dtype": dtype, "shape": shape, "first": first, "bytes": bytes}));
        }
        Ok((json!({"outputs": told}), arrays))
    }
}

/// A number as a table has it: whole, or in six digits.
fn shown(x: f64, is_float: bool) -> String {
    match x.abs() {
        _ if !is_float || x == 0.0 || !x.is_finite() => x.to_string(),
        size if (1e-4..1e6).contains(&size) => format!("{x:.6}"),
        _ => format!("{x:.5e}"),
    }
}

/// Room for bytes of a call, which takes them.
#[unsafe(no_mangle)]
extern "C" fn plimsoll_web_alloc(bytes: usize) -> *mut u8 {
    Box::leak(vec![0; bytes].into_boxed_slice()).as_mut_ptr()
}

/// Takes a request and the bytes beside it, both from [`plimsoll_web_alloc`]. Returns four words: address and length of the answer's text and of
/// its bytes. They stay until the next call.
///
/// # Safety
/// Both addresses are those of so many bytes that no other call took.
#[unsafe(no_mangle)]
unsafe extern "C" fn plimsoll_web_call(text: *mut u8, length: usize, data: *mut u8, bytes: usize) -> *const usize {
    // SAFETY: the caller says so.
    let (text, data) = unsafe { (Vec::from_raw_parts(text, length, length), Vec::from_raw_parts(data, bytes, bytes)) };
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        // SAFETY: the page copies the text before it returns.
        unsafe { page::failed(text.as_ptr(), text.len()) }
    }));
    STATE.with_borrow_mut(|state| {
        state.answer = Default::default();
        let request = serde_json::from_slice(&text).map_err(|e| Error::usage(format!("a request of the page: {e}")));
        state.answer = match request.and_then(|request| state.serve(request, data)) {
            Ok((told, data)) => (told.to_string(), data),
            Err(error) => {
                let fits = !matches!(error, Error::Fit { .. });
                (json!({"error": report::plain(&error.to_string()), "fits": fits}).to_string(), Vec::new())
            }
        };
        let (text, data) = &state.answer;
        state.places = [text.as_ptr().addr(), text.len(), data.as_ptr().addr(), data.len()];
        state.places.as_ptr()
    })
}
