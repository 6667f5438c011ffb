//! The memory that NCCL takes of a card when ranks join: measured under a launcher, kept on disk for later plans, and reserved by them.
//!
//! A file that is cut off or of another version is left out, with a line in the log. So is a file that cannot be written.

use crate::backend::Backend;
use crate::backend::ranks::Ranks;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::mesh::Mesh;
use crate::target::{Family, RESERVE};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The version of the file's format.
const VERSION: u32 = 1;
/// The most bytes of a file that is read.
const MOST_BYTES: u64 = 64 << 10;
/// The folder in the cache.
const FOLDER: &str = "reserve";
/// The part of what a device holds beside segments.
const NCCL: &str = "NCCL";

/// What NCCL took, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserve {
    version: u32,
    /// The device, its driver and its libraries, with their versions.
    pub device: String,
    /// The ranks along each axis.
    pub ranks: String,
    /// The most that it took on any rank.
    pub bytes: u64,
}

/// The name of a device's file for meshes of these axes.
fn name(device: &str, mesh: &Mesh) -> String {
    format!("{} ranks {device}", mesh.extents())
}

/// The bytes that NCCL was measured to take on a rank of a mesh. With ranks, the most of all, where one that does not know has [`RESERVE`]: all
/// reserve the same. Without, 0 if they are not known.
///
/// # Errors
/// When a rank is gone or late.
pub fn known(device: &dyn Backend, mesh: &Mesh, ranks: Option<&dyn Ranks>) -> Result<u64> {
    if device.target().family != Family::Cuda || mesh.ranks() == 1 {
        return Ok(0);
    }
    let own = find(&device.identity(), mesh).map(|found| found.bytes);
    match ranks {
        Some(ranks) => most(own.unwrap_or(RESERVE), ranks),
        None => Ok(own.unwrap_or(0)),
    }
}

/// The largest number that a rank has.
fn most(own: u64, ranks: &dyn Ranks) -> Result<u64> {
    let all = ranks.gather(&own.to_le_bytes())?;
    let number = |told: &Vec<u8>| told.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    Ok(all.iter().map(number).max().unwrap_or(0))
}

/// What NCCL took of a device that has joined these ranks, and of the others. It is kept if this rank `keeps` it for its machine.
///
/// # Errors
/// When a rank is gone or late, or NCCL took nothing.
pub fn measure(device: &dyn Backend, ranks: &dyn Ranks, keeps: bool) -> Result<Reserve> {
    let (device, mesh, parts) = (device.identity(), ranks.mesh(), device.overhead());
    let own = parts.iter().find(|(part, _)| *part == NCCL).map_or(0, |(_, bytes)| *bytes);
    let found = Reserve { version: VERSION, device, ranks: mesh.extents(), bytes: most(own, ranks)? };
    ensure(found.bytes > 0, || Error::Backend { backend: "cuda", what: "NCCL took no memory".into(), file: None })?;
    if keeps {
        let text = serde_json::to_string_pretty(&found).expect("numbers and text are JSON");
        file::keep(file::cached(FOLDER, &name(&found.device, mesh)), "what NCCL took is", &text);
    }
    Ok(found)
}

/// What was measured on a device.
fn find(device: &str, mesh: &Mesh) -> Option<Reserve> {
    let path = file::cached(FOLDER, &name(device, mesh))?;
    let found = file::if_there(read(&path), "what NCCL was measured to take is");
    found.filter(|found| found.device == device && found.ranks == mesh.extents())
}

fn read(path: &Path) -> Result<Reserve> {
    let text = file::kept(path, "read what was measured", MOST_BYTES)?;
    let found: Reserve = serde_json::from_str(&text).map_err(|e| Error::json(path, &e))?;
    ensure(found.version == VERSION, || {
        Error::usage(format!("expected version {VERSION}, found {}", found.version)).in_file(path)
    })?;
    Ok(found)
}
