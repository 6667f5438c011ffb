//! The device's own clock, read where the passes of a record begin and end. What the host does in between is not counted.

use super::gpu::Gpu;
use crate::error::Result;
use std::time::Duration;

/// Two marks on the device, and how to read them.
pub(super) struct Clock {
    marks: wgpu::QuerySet,
    /// The marks in ticks, as the host reads them.
    pub ticks: wgpu::Buffer,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Idle,
    /// The next pass is the first.
    Armed,
    Running,
}

/// What a pass marks: its end, and its beginning if it is the first.
pub(super) struct Marks {
    set: wgpu::QuerySet,
    begin: Option<u32>,
}

impl Marks {
    /// For the pass's descriptor.
    pub fn writes(&self) -> wgpu::ComputePassTimestampWrites<'_> {
        wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: self.begin,
            end_of_pass_write_index: Some(1),
        }
    }
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
            state: State::Idle,
        });
        made.inspect_err(|e| tracing::debug!(target: "plimsoll::wgpu", "times are the host's: {e}")).ok()
    }

    /// Begins with the next pass.
    pub fn arm(&mut self) {
        self.state = State::Armed;
    }

    /// What the next pass marks.
    pub fn mark(&mut self) -> Option<Marks> {
        let begin = match self.state {
            State::Idle => return None,
            State::Armed => Some(0),
            State::Running => None,
        };
        self.state = State::Running;
        Some(Marks { set: self.marks.clone(), begin })
    }

    /// Ends, unless no pass was marked; what brings the marks to where they are read.
    pub fn stop(&mut self, gpu: &Gpu) -> Result<Option<wgpu::CommandBuffer>> {
        if std::mem::replace(&mut self.state, State::Idle) != State::Running {
            return Ok(None);
        }
        gpu.encode("clock", |encoder| encoder.resolve_query_set(&self.marks, 0..2, &self.ticks, 0)).map(Some)
    }

    /// The time between two marks.
    pub fn between(gpu: &Gpu, ticks: [u64; 2]) -> Duration {
        let nanoseconds = ticks[1].saturating_sub(ticks[0]) as f64 * f64::from(gpu.queue.get_timestamp_period());
        Duration::from_secs_f64(nanoseconds / 1e9)
    }
}
