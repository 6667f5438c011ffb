//! What is known of a device: schedules that were measured on it, by the kernel that they compute, and library calls that it refuses.

use crate::kernel::Kernel;
use crate::kernel::algorithm::Schedule;
use crate::kernel::call::Call;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Measured schedules of a device. Lowering asks for each kernel that has a choice, before a library call is taken out of it. The table
/// notes the kernels that it was asked for.
///
/// A kernel is asked for with an open schedule and no workspace. Its constant operands that may be packed are marked as packed.
/// A library call as the answer means the call that [`split`](super::schedule::split()) takes out of the kernel.
#[derive(Debug, Default)]
pub struct Tuned {
    /// The device and its driver.
    pub device: String,
    known: HashMap<String, Schedule>,
    /// Library calls that the device refuses: a text computes their kernels.
    refused: Vec<Call>,
    asked: Mutex<Asked>,
}

/// Kernels in the order in which they were asked for, and how often each was.
#[derive(Debug, Default)]
struct Asked {
    order: Vec<(Kernel, usize)>,
    numbers: HashMap<String, usize>,
}

impl Tuned {
    /// A table of a device that knows nothing yet.
    pub fn new(device: impl Into<String>) -> Tuned {
        Tuned { device: device.into(), ..Tuned::default() }
    }

    /// True if it knows no kernel.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// This table, for a device that refuses these library calls.
    pub fn without(mut self, refused: Vec<Call>) -> Tuned {
        self.refused = refused;
        self
    }

    /// The library calls that the device refuses.
    pub fn refused(&self) -> &[Call] {
        &self.refused
    }

    /// Notes the schedule of a kernel.
    pub fn insert(&mut self, kernel: &Kernel, schedule: Schedule) {
        self.known.insert(kernel.key(), schedule);
    }

    /// The measured schedule of a kernel, if there is one. It was legal where it was measured.
    pub fn find(&self, kernel: &Kernel) -> Option<&Schedule> {
        let key = kernel.key();
        let found = self.known.get(&key);
        let mut asked = self.asked();
        match asked.numbers.get(&key) {
            Some(&number) => asked.order[number].1 += 1,
            None => {
                let number = asked.order.len();
                asked.order.push((kernel.clone(), 1));
                asked.numbers.insert(key, number);
            }
        }
        found
    }

    /// The kernels that were asked for, each with how often it was.
    pub fn kernels(&self) -> Vec<(Kernel, usize)> {
        self.asked().order.clone()
    }

    /// A table with those entries for which `keep` returns true.
    pub fn filter(&self, keep: impl Fn(&Kernel, &Schedule) -> bool) -> Tuned {
        let mut kept = Tuned::new(self.device.clone()).without(self.refused.clone());
        for (kernel, _) in &self.asked().order {
            if let Some(schedule) = self.known.get(&kernel.key()).filter(|schedule| keep(kernel, schedule)) {
                kept.insert(kernel, schedule.clone());
            }
        }
        kept
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        // A panic leaves the list whole: each kernel is added at once.
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
