//! The memory that a driver takes beside the segments of plans: measured once per device, and kept on disk, for estimates with no device.
//!
//! ```text
//! device --small graphs, each on the device opened anew--> bytes of the context, of each library, per kernel, per step --> file
//! file + plans --> an estimate, which is no part of the planned bytes
//! ```
//!
//! A file that is cut off or of another version is left out, with a line in the log. So is a file that cannot be written.

use crate::backend::Backend;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::exec::Exec;
use crate::file;
use crate::graph::Graph;
use crate::kernel::Kernel;
use crate::plan::Plan;
use crate::session::{Device, Options, Session};
use crate::target::{Family, Target};
use crate::trace::Trace;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// The version of the file's format.
const VERSION: u32 = 1;
/// The most bytes of a file that is read.
const MOST_BYTES: u64 = 64 << 10;
/// The folder in the cache.
const FOLDER: &str = "beside";
/// Kernels of the graph that shows what a kernel and a step take, and steps of each. A driver takes memory in pieces of 2 MiB, so that a few
/// would not show it.
const KERNELS: usize = 48;
const STEPS: usize = 8;

/// The libraries, by the names of their calls.
const CUBLASLT: &str = "cuBLASLt";
const CUDNN: &str = "cuDNN";

/// Why a device is not measured. What is free on the card says nothing: other processes change it, too.
const UNCOUNTED: &str = "the driver does not count this process's memory, as in a container with pids of its own";

/// Opens a device.
pub type Open<'a> = &'a dyn Fn() -> Result<Box<dyn Backend>>;

/// The figures that were measured on a device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverMemory {
    version: u32,
    /// The version of the crate, whose kernels were loaded.
    plimsoll: String,
    /// The device, its driver and its libraries, with their versions.
    pub device: String,
    /// The name of the device's target.
    pub target: String,
    /// The family of the device's target.
    pub family: Family,
    /// However small the plan is: CUDA's context, or blocks that wgpu's allocator reserves.
    pub context: u64,
    /// cuBLASLt, for plans that call it.
    pub cublaslt: u64,
    /// cuDNN, for plans that call it.
    pub cudnn: u64,
    /// Machine code of a kernel.
    pub kernel: u64,
    /// A step in the driver's copy of a plan.
    pub step: u64,
}

/// The bytes that a device's driver will take beside plans, as far as they were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// All parts.
    pub bytes: u64,
    /// However small the plans are.
    pub context: u64,
    /// Libraries that the plans call.
    pub libraries: u64,
    /// Machine code of kernels.
    pub modules: u64,
    /// The driver's copies of the plans.
    pub graphs: u64,
    /// The device that was measured, its driver and its libraries.
    pub device: String,
}

impl DriverMemory {
    /// The estimate for a plan.
    pub fn estimate(&self, plan: &Plan) -> Estimate {
        let library = |name: &str, bytes: u64| if calls(plan, name) { bytes } else { 0 };
        let kernels = plan.programs.iter().flat_map(|program| &program.kernels).flat_map(Kernel::launched);
        let texts: HashSet<_> = kernels.filter(|kernel| kernel.schedule.call().is_none()).map(Kernel::key).collect();
        let steps =
            plan.programs.iter().flat_map(|program| program.steps.iter().map(|step| &program.kernels[step.kernel]));
        let steps = steps.map(Kernel::recorded).sum::<u64>() * u64::from(plan.runs);
        let parts = [
            self.context,
            library(CUBLASLT, self.cublaslt).saturating_add(library(CUDNN, self.cudnn)),
            self.kernel.saturating_mul(texts.len() as u64),
            self.step.saturating_mul(steps),
        ];
        let [context, libraries, modules, graphs] = parts;
        let bytes = parts.into_iter().fold(0, u64::saturating_add);
        Estimate { bytes, context, libraries, modules, graphs, device: self.device.clone() }
    }
}

/// The most anonymous memory that a process on the CPU takes beside plans of so many bytes: for the program, its graph and its plan, and for
/// pieces of constants on their way from a mapped file to their place. It is a bound that tests hold runs to, no measurement. Inputs that a
/// caller holds come on top of it.
pub fn process(planned: u64) -> u64 {
    (8 << 20) + planned / 50
}

/// True if a plan calls a library.
fn calls(plan: &Plan, library: &str) -> bool {
    let mut kernels = plan.programs.iter().flat_map(|program| &program.kernels).flat_map(Kernel::launched);
    kernels.any(|kernel| kernel.schedule.call().is_some_and(|call| call.library() == library))
}

/// The last figures of a device that a target describes: of any device of its family, if the target is a preset.
pub fn find(target: &Target) -> Option<DriverMemory> {
    let folder = file::cache_folder()?.join(FOLDER);
    let suits = |found: &DriverMemory| {
        found.family == target.family && (found.target == target.name || Target::preset(&target.name).is_some())
    };
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| {
        let entry = entry.ok().filter(|entry| entry.path().extension().is_some_and(|end| end == "json"))?;
        let time = entry.metadata().and_then(|data| data.modified()).ok();
        Some((time, entry.path()))
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files.iter().rev().filter_map(|(_, path)| read(path)).find(suits)
}

/// The figures of a device. Measures them if that was not done before, and keeps them.
///
/// # Errors
/// When the device cannot be opened, or refuses a small graph.
pub fn known(open: Open) -> Result<DriverMemory> {
    let device = open()?.identity();
    let path = file::cached(FOLDER, &device);
    if let Some(known) = path.as_deref().and_then(read).filter(|known| known.device == device) {
        return Ok(known);
    }
    let found = measure(open)?;
    let text = serde_json::to_string_pretty(&found).expect("numbers and text are JSON");
    file::keep(path, "what was measured beside plans is", &text);
    Ok(found)
}

/// A file that can be used.
fn read(path: &Path) -> Option<DriverMemory> {
    file::if_there(try_read(path), "what was measured beside plans is")
}

fn try_read(path: &Path) -> Result<DriverMemory> {
    let text = file::kept(path, "read what was measured", MOST_BYTES)?;
    let found: DriverMemory = serde_json::from_str(&text).map_err(|e| Error::json(path, &e))?;
    let (own, DriverMemory { version, plimsoll, .. }) = (env!("CARGO_PKG_VERSION"), &found);
    ensure(*version == VERSION && plimsoll == own, || {
        let what =
            format!("expected version {VERSION} by plimsoll {own}, found version {version} by plimsoll {plimsoll}");
        Error::usage(what).in_file(path)
    })?;
    Ok(found)
}

/// Measures a device with small graphs.
///
/// # Errors
/// As [`known`].
pub fn measure(open: Open) -> Result<DriverMemory> {
    let device = open()?;
    let (identity, target) = (device.identity(), device.target().clone());
    drop(device);
    let texts = Probe::run(open, texts()?)?;
    let step = texts.part("graphs") / texts.plan.programs[0].steps.len() as u64;
    let library = |name: &str, graph: Graph| {
        let probe = Probe::run(open, graph)?;
        // A library loads its code when it is first called, as a graph is recorded.
        let taken = probe.part("libraries") + probe.part("graphs");
        let steps = step * probe.plan.programs[0].steps.len() as u64;
        Ok::<_, Error>(if calls(&probe.plan, name) { taken.saturating_sub(steps) } else { 0 })
    };
    Ok(DriverMemory {
        version: VERSION,
        plimsoll: env!("CARGO_PKG_VERSION").into(),
        device: identity,
        target: target.name,
        family: target.family,
        context: if target.family == Family::Cuda { texts.part("context") } else { texts.overhead },
        cublaslt: if target.libraries.cublaslt { library(CUBLASLT, products()?)? } else { 0 },
        cudnn: if target.libraries.cudnn { library(CUDNN, convolutions()?)? } else { 0 },
        kernel: texts.part("modules") / texts.plan.programs[0].kernels.len() as u64,
        step,
    })
}

/// A small graph that ran on a device, and what was then taken beside its plan.
struct Probe {
    plan: Plan,
    overhead: u64,
    parts: Vec<(&'static str, u64)>,
}

impl Probe {
    fn run(open: Open, graph: Graph) -> Result<Probe> {
        let options = Options { tuned: false, ..Options::default() };
        let device = Device::new(open()?, "");
        let session = Session::new(options.job([("", graph)], &device), device, &|_, _| {})?;
        session.with(Exec::time)?;
        let overhead = session.usage().overhead;
        let overhead =
            overhead.ok_or_else(|| Error::Backend { backend: "cuda", what: UNCOUNTED.into(), file: None })?;
        Ok(Probe { plan: session.plan().clone(), overhead, parts: session.overhead() })
    }

    fn part(&self, name: &str) -> u64 {
        self.parts.iter().find(|(part, _)| *part == name).map_or(0, |(_, bytes)| *bytes)
    }
}

/// Rows of several lengths, with a kernel for each.
fn texts() -> Result<Graph> {
    let g = Trace::new("texts");
    for input in 0..STEPS {
        let x = g.input(&format!("x{input}"), DType::F32, [8, 16 * KERNELS]);
        (1..=KERNELS).for_each(|n| g.output(&format!("y{input}.{n}"), x.part(1, 0..16 * n).softmax(-1)));
    }
    g.finish()
}

/// Products that a library computes.
fn products() -> Result<Graph> {
    let g = Trace::new("products");
    let [w, v] = ["w", "v"].map(|name| g.input(name, DType::F32, [1024, 1024]));
    g.output("y", g.input("x", DType::F32, [4096, 1024]).matmul(w).matmul(v));
    g.finish()
}

/// Convolutions that a library computes.
fn convolutions() -> Result<Graph> {
    let g = Trace::new("convolutions");
    let [w, v] = ["w", "v"].map(|name| g.input(name, DType::F32, [128, 128, 3, 3]));
    g.output("y", g.input("x", DType::F32, [16, 128, 32, 32]).conv2d(w, None, 1, 1, 1).conv2d(v, None, 1, 1, 1));
    g.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Planning;
    use crate::plan::{Limits, Recipe};

    /// The graphs have the kernels that they are made for.
    #[test]
    fn probes_have_what_they_measure() {
        let target = Target::cuda();
        let planned = |graph: Result<Graph>| {
            let graph = graph.expect("the graph is sound");
            Recipe::default().plan(graph, &target, &Limits { memory: None }).expect("it is planned")
        };
        let plan = planned(texts());
        assert_eq!((plan.programs[0].kernels.len(), plan.programs[0].steps.len()), (KERNELS, KERNELS * STEPS));
        assert!(!calls(&plan, CUBLASLT) && !calls(&plan, CUDNN));
        for (graph, library) in [(products(), CUBLASLT), (convolutions(), CUDNN)] {
            let plan = planned(graph);
            assert!(plan.programs[0].steps.len() > 1 && calls(&plan, library), "{:?}", plan.first().algorithms());
        }
    }
}
