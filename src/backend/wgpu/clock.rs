//! The device's own clock, read where a record begins and ends: what the host does before and after is not counted.

use super::gpu::Gpu;
use std::time::Duration;

/// Two marks on the device, and where the host reads them.
pub(super) struct Clock {
    marks: wgpu::QuerySet,
    /// The marks, in ticks.
    pub ticks: wgpu::Buffer,
}

impl Clock {
    /// The clock of a device, if it has one. Its buffer is cut from wgpu's own block.
    pub fn new(gpu: &Gpu) -> Option<Clock> {
        if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let made = gpu.scoped("clock", || Clock {
            marks: gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            ticks: gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("clock"),
                size: 16,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            }),
        });
        made.inspect_err(|e| tracing::debug!(target: "plimsoll::wgpu", "times are the host's: {e}")).ok()
    }

    /// Marks where a pass begins and ends.
    pub fn marks(&self) -> wgpu::ComputePassTimestampWrites<'_> {
        wgpu::ComputePassTimestampWrites {
            query_set: &self.marks,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        }
    }

    /// Brings the marks to where they are read.
    pub fn settle(&self, encoder: &mut wgpu::CommandEncoder) {
        encoder.resolve_query_set(&self.marks, 0..2, &self.ticks, 0);
    }

    /// The time from one mark to the other; `None` where the clock began anew in between, or knows no period.
    pub fn between(gpu: &Gpu, [begin, end]: [u64; 2]) -> Option<Duration> {
        let period = f64::from(gpu.queue.get_timestamp_period());
        Duration::try_from_secs_f64(end.checked_sub(begin)? as f64 * period / 1e9).ok()
    }
}
