//! Measured schedules on disk: one file per device and driver.
//!
//! A file that is missing, cut off, changed, of another version or of another device is left out, with a line in the log. So is a file that cannot
//! be written. Nothing in it is trusted: lowering takes a schedule only if it is legal.

use super::Entry;
use crate::error::{Error, Result};
use crate::file;
use crate::kernel::tuned::Tuned;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The version of the file's format, and of the algorithms that schedules name.
pub const VERSION: u32 = 2;
/// The most bytes of a file that is read.
const MOST_BYTES: u64 = 256 << 20;

/// The content of a file.
#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    /// The version of the crate, whose texts were timed.
    plimsoll: String,
    device: String,
    kernels: Vec<Entry>,
}

/// The file of a device in the user's cache folder. `None` if there is no such folder.
pub fn path(device: &str) -> Option<PathBuf> {
    file::cached("tuned", device)
}

/// The table that a file holds.
///
/// # Errors
/// The file is missing, larger than a table can be, or not of this version.
pub fn read(path: &Path) -> Result<(Tuned, Vec<Entry>)> {
    let text = &file::kept(path, "read the tuning file", MOST_BYTES)?;
    let syntax = |e| Error::json(path, &e);
    let head: serde_json::Value = serde_json::from_str(text).map_err(syntax)?;
    let (version, made) = (&head["version"], &head["plimsoll"]);
    let own = env!("CARGO_PKG_VERSION");
    if *version != VERSION || *made != own {
        let what = format!("expected version {VERSION} by plimsoll {own}, found version {version} by plimsoll {made}");
        return Err(Error::usage(what).in_file(path));
    }
    let content: Content = serde_json::from_str(text).map_err(syntax)?;
    let mut tuned = Tuned::new(content.device);
    for Entry { kernel, schedule, .. } in &content.kernels {
        tuned.insert(kernel, schedule.clone());
    }
    Ok((tuned, content.kernels))
}

/// The measured schedules of a device, if its file can be used.
pub fn load(device: &str) -> Option<(Tuned, Vec<Entry>)> {
    let path = path(device)?;
    let (tuned, entries) = file::if_there(read(&path), "measured schedules are")?;
    if tuned.device != device {
        let (path, found) = (path.display(), &tuned.device);
        tracing::warn!("{path}: measured on another device, and not used: expected {device}, found {found}");
        return None;
    }
    Some((tuned, entries))
}

/// Writes the measured schedules of a device. Returns the file, or `None` if it could not be written, with a line in the log.
pub fn save(device: &str, kernels: Vec<Entry>) -> Option<PathBuf> {
    let content =
        Content { version: VERSION, plimsoll: env!("CARGO_PKG_VERSION").into(), device: device.into(), kernels };
    let text = serde_json::to_string(&content).expect("measured schedules have only finite numbers and text keys");
    file::keep(path(device), "measured schedules are", &text)
}
