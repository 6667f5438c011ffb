//! Compiled pipelines, kept in a file for each device and driver, where the driver gives them out (Vulkan).

use crate::kept;
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::file;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// First bytes of a file, its format's version among them.
const MAGIC: &[u8] = b"plimsoll pipelines 1\n";
/// The most bytes of a file. Drivers only add to what they have: a file beyond that begins anew.
const MOST_BYTES: u64 = 64 << 20;

/// What the driver has compiled for a device, now and before.
pub(super) struct Cache {
    pipelines: wgpu::PipelineCache,
    path: PathBuf,
    /// Adapter and driver.
    key: String,
    /// Pipelines that were made since the file was written.
    fresh: AtomicUsize,
    /// Bytes of the driver's data in the file.
    kept: AtomicUsize,
}

impl Cache {
    /// The cache of a device, with what its file holds. `None` where the device has no such cache, or the user no folder for it.
    pub fn open(device: &wgpu::Device, info: &wgpu::AdapterInfo, identity: &str) -> Option<Cache> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let key = format!("{identity}, {}", wgpu::util::pipeline_cache_key(info)?);
        let path = file::cached("pipelines", &key)?.with_extension("bin");
        let data = file::if_there(load(&path, &key), "compiled pipelines are");
        let kept = data.as_ref().map_or(0, Vec::len);
        if kept > 0 {
            tracing::debug!(bytes = kept, "pipelines from the cache");
        }
        let label = Some("plimsoll");
        // SAFETY: the data are what `get_data` gave for a device of the same adapter and driver: they come from a file of a folder that only
        // its user can write, with the key of both, and the hash of what was written.
        let pipelines = unsafe {
            device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
                label,
                data: data.as_deref(),
                fallback: true,
            })
        };
        Some(Cache { pipelines, path, key, fresh: AtomicUsize::new(0), kept: AtomicUsize::new(kept) })
    }

    /// What pipelines are made with.
    pub fn pipelines(&self) -> &wgpu::PipelineCache {
        &self.pipelines
    }

    /// Notes that so many pipelines were made. Several at once are those of a model, and kept at once; single ones, such as those of a
    /// measurement, are kept when the device goes.
    pub fn made(&self, count: usize) {
        self.fresh.fetch_add(count, Relaxed);
        if count > 1 {
            self.keep();
        }
    }

    /// Writes the file, if the driver has more than is in it.
    fn keep(&self) {
        if self.fresh.swap(0, Relaxed) == 0 {
            return;
        }
        let Some(data) = self.pipelines.get_data().filter(|data| data.len() != self.kept.load(Relaxed)) else { return };
        let entry = kept::entry(MAGIC, &self.key, &data);
        if entry.len() as u64 > MOST_BYTES {
            tracing::debug!(bytes = entry.len(), "pipelines are more than a file holds: it begins anew");
            let _ = std::fs::remove_file(&self.path);
            return self.kept.store(0, Relaxed);
        }
        match kept::store(&self.path, &entry) {
            Ok(()) => {
                tracing::debug!(bytes = data.len(), "pipelines kept");
                self.kept.store(data.len(), Relaxed);
            }
            Err(error) => tracing::warn!("{}: compiled pipelines are not kept: {error}", self.path.display()),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.keep();
    }
}

/// The driver's data in a file.
fn load(path: &Path, key: &str) -> Result<Vec<u8>> {
    let failed = |e| Error::file(path, "read compiled pipelines", e);
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    let refused = |what: String| Error::usage(what).in_file(path);
    ensure(bytes <= MOST_BYTES, || refused(format!("expected at most {MOST_BYTES} bytes, found {bytes}")))?;
    let entry = std::fs::read(path).map_err(failed)?;
    let data = kept::content(MAGIC, &entry, key).map(<[u8]>::to_vec);
    data.ok_or_else(|| refused("expected the pipelines of this device; the file was changed or cut off".into()))
}
