//! The device's own clock. It is read where a record begins and ends, so the host's work before and after is not counted.

use super::gpu::{CLOCK_FEATURES, Gpu};
use std::time::Duration;

/// Two marks on the device. They have no memory of their own.
pub(super) struct Clock {
    marks: wgpu::QuerySet,
}

impl Clock {
    /// Bytes of both marks.
    pub const BYTES: u64 = 16;

    /// The clock of a device, if it has one.
    pub fn new(gpu: &Gpu) -> Option<Clock> {
        if !gpu.device.features().contains(CLOCK_FEATURES) {
            return None;
        }
        let marks = wgpu::QuerySetDescriptor { label: None, ty: wgpu::QueryType::Timestamp, count: 2 };
        let made = gpu.scoped("clock", || Clock { marks: gpu.device.create_query_set(&marks) });
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

    /// Copies the marks to the start of a slot.
    pub fn resolve(&self, encoder: &mut wgpu::CommandEncoder, slot: &wgpu::Buffer) {
        encoder.resolve_query_set(&self.marks, 0..2, slot, 0);
    }

    /// The time from one mark to the other; `None` if the clock was reset in between or the device tells no period.
    pub fn between(gpu: &Gpu, [begin, end]: [u64; 2]) -> Option<Duration> {
        let period = f64::from(gpu.queue.get_timestamp_period());
        Duration::try_from_secs_f64(end.checked_sub(begin)? as f64 * period / 1e9).ok()
    }
}
