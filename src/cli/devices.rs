//! `devices`: lists the devices of this machine.

use super::line;
use super::ranks::Meshed;
use crate::driver_memory::{self, DriverMemory};
use crate::error::{Error, Result, ensure};
use crate::mesh::Mesh;
use crate::report::{Table, human};
use crate::reserve;
use crate::session::{self, Choice, Options};
use crate::target::{self, Target};
use clap::Args;
use serde_json::{Value, json};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
devices = list|target|reserve
list
  devices [device]
  libraries [library]
device
  backend text
  name text
  device text
  status text
  target target
  beside measured_beside|null
library
  library text
  version text|null
  path text|null
  problem text|null
reserve
  version int
  device text
  ranks text
  bytes int
measured_beside
  version int
  plimsoll text
  device text
  target text
  family 'cpu'|'wgpu'|'cuda'
  context int
  cublaslt int
  cudnn int
  kernel int
  step int
";

#[derive(Args)]
pub(super) struct Devices {
    /// Print the target of this device (cpu, cuda:0, wgpu:0) as JSON, for `plan --target FILE` on another machine. Without a device, --json
    /// prints all of them.
    device: Option<String>,
    /// Measure what NCCL takes of each card, for later plans of so many ranks on cards like these: of one axis, or along each of several, such as
    /// 2,4. Each rank is a process that a launcher starts: mpirun -n 8 plimsoll devices --ranks 8
    #[arg(long, value_name = "N", value_parser = ranks, conflicts_with = "device")]
    ranks: Option<Mesh>,
    /// The ranks that a launcher started; no flag of its own.
    #[arg(skip)]
    several: Meshed,
}

/// Ranks along the axes of a mesh.
fn ranks(text: &str) -> Result<Mesh, String> {
    let axis = |(at, ranks): (usize, &str)| Some((format!("axis{at}"), ranks.parse().ok()?));
    let axes: Option<Vec<_>> = text.split(',').enumerate().map(axis).collect();
    let axes = axes.ok_or_else(|| format!("expected numbers of ranks, such as 2 or 2,4, found '{text}'"))?;
    let mesh = Mesh::new(axes).map_err(|error| error.to_string())?;
    ensure(mesh.ranks() > 1, || "expected several ranks, found 1".into()).map(|()| mesh)
}

impl Devices {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        if let Some(mesh) = &self.ranks {
            return self.reserve(mesh, json);
        }
        let (cuda, libraries, found) = cuda();
        let mut rows = vec![cpu()];
        rows.extend(cuda);
        rows.extend(wgpu());
        if let Some(wanted) = &self.device {
            let names = rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ");
            let row = rows.iter().find(|row| row.name == *wanted);
            let row = row.ok_or_else(|| Error::usage(format!("no device '{wanted}' among: {names}")))?;
            return Ok(serde_json::to_string_pretty(&row.target).expect("a target is plain data") + "\n");
        }
        let beside: Vec<_> = rows.iter().map(Row::beside).collect();
        if json {
            let row = |(Row { name, device, status, target }, beside): (&Row, &Option<DriverMemory>)| {
                let backend = name.split(':').next();
                json!({"backend": backend, "name": name, "device": device, "status": status, "target": target, "beside": beside})
            };
            let rows: Vec<_> = rows.iter().zip(&beside).map(row).collect();
            return Ok(line(&json!({"devices": rows, "libraries": found})));
        }
        let mut measured = Table::new("<>");
        measured.row(["beside plans", "context", "cuBLASLt", "cuDNN", "each kernel", "each step"]);
        for (row, DriverMemory { context, cublaslt, cudnn, kernel, step, .. }) in
            rows.iter().zip(&beside).filter_map(|(row, found)| Some((row, found.as_ref()?)))
        {
            let bytes = [context, cublaslt, cudnn, kernel, step].map(|bytes| human(*bytes));
            measured.row([row.name.clone()].into_iter().chain(bytes));
        }
        let mut table = Table::new("<");
        table.row(["name", "device", "status"]);
        rows.into_iter().for_each(|row| table.row([row.name, row.device, row.status]));
        let mut text = table.to_string();
        if !libraries.to_string().is_empty() {
            text += &format!("\n{libraries}");
        }
        if beside.iter().any(Option::is_some) {
            text += &format!("\n{measured}");
        }
        Ok(text)
    }
}

impl Devices {
    /// The ranks to join, if NCCL is to be measured.
    pub(super) fn several(&mut self) -> Option<&mut Meshed> {
        self.several.mesh.clone_from(&self.ranks);
        self.ranks.as_ref().map(|_| &mut self.several)
    }

    /// Measures what NCCL takes of each card. The first rank tells it.
    fn reserve(&self, mesh: &Mesh, json: bool) -> Result<String> {
        let (several, count, extents) = (&self.several, mesh.ranks(), mesh.extents());
        let ranks = several.ranks.clone().ok_or_else(|| {
            let what = format!("--ranks {extents}: expected {count} processes, found one that runs alone");
            Error::usage(format!("{what}; start them: mpirun -n {count} plimsoll devices --ranks {extents}"))
        })?;
        let device = several.device(None, true);
        let keeps = device.as_deref().is_none_or(|number| number == "0");
        let options = Options { device, mesh: Some(mesh.clone()), ranks: Some(ranks.clone()), ..Options::default() };
        let found = reserve::measure(&*session::open(&options.on(Choice::Cuda))?.backend, &*ranks, keeps)?;
        Ok(match json {
            _ if !several.is_first() => String::new(),
            true => line(&json!(found)),
            false => {
                format!("NCCL takes {} of each card of {extents} ranks; their plans reserve it\n", human(found.bytes))
            }
        })
    }
}

/// A device of this machine.
struct Row {
    /// `cpu`, `cuda:0`, `wgpu:0`.
    name: String,
    device: String,
    status: String,
    target: Target,
}

impl Row {
    /// The memory that the device's driver takes beside plans, if it is a GPU that can be used. If it refuses, the log says why.
    fn beside(&self) -> Option<DriverMemory> {
        let (backend, number) = self.name.split_once(':').filter(|_| self.status == target::Device::AVAILABLE)?;
        let backend = if backend == "cuda" { Choice::Cuda } else { Choice::Wgpu };
        let options = Options { device: Some(number.into()), ..Options::default() }.on(backend);
        let found = driver_memory::known(&|| Ok(session::open(&options)?.backend));
        found.inspect_err(|error| tracing::warn!("{}: what is beside plans is not measured: {error}", self.name)).ok()
    }
}

fn cpu() -> Row {
    let threads = Options::default().thread_count();
    Row {
        name: "cpu".into(),
        device: format!("{threads} threads"),
        status: target::Device::AVAILABLE.into(),
        target: Target::cpu(threads as u32),
    }
}

/// NVIDIA's GPUs and CUDA's libraries that were found, as a table and as JSON.
#[cfg(feature = "cuda")]
fn cuda() -> (Vec<Row>, Table, Value) {
    use crate::backend::cuda::{Device, library::Found, library::Search, report};

    let report = report(&Search::here());
    let mut libraries = Table::new("<");
    libraries.row(["library", "version", "path", "status"]);
    for Found { library, version, path, problem } in &report.libraries {
        let path = path.as_ref().map_or("-".into(), |path| path.display().to_string());
        let status = problem.clone().unwrap_or_else(|| "available".into());
        libraries.row([(*library).to_owned(), version.clone().unwrap_or_else(|| "-".into()), path, status]);
    }
    let found = json!(report.libraries);
    let row = |Device { index, name, target, memory, problem }| Row {
        name: format!("cuda:{index}"),
        device: format!("{name}, sm_{}, {}", target.compute, human(memory)),
        status: problem.unwrap_or_else(|| target::Device::AVAILABLE.into()),
        target,
    };
    (report.devices.into_iter().map(row).collect(), libraries, found)
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> (Vec<Row>, Table, Value) {
    (Vec::new(), Table::new("<"), json!([]))
}

/// The adapters of Vulkan, Metal and DX12.
#[cfg(feature = "wgpu")]
fn wgpu() -> Vec<Row> {
    let row = |(index, adapter): (usize, crate::backend::wgpu::Adapter)| Row {
        name: format!("wgpu:{index}"),
        device: adapter.to_string(),
        status: if adapter.software { "software: used when asked for" } else { target::Device::AVAILABLE }.to_owned(),
        target: adapter.target,
    };
    crate::backend::wgpu::adapters().into_iter().enumerate().map(row).collect()
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Vec<Row> {
    Vec::new()
}
