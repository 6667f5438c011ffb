//! Rows that are made ready ahead of their step: while one micro-batch is computed, a thread fills the slot with the next one.
//!
//! ```text
//! this thread   wait | slot -> inputs | ... steps ... | wait | slot -> inputs | ...
//! its thread    fill |                  fill the next |        fill the next  |
//! ```
//!
//! One slot is enough: a run copies its inputs to their places in the arena before the first step, and then the slot is free. Slot and thread
//! are there from the beginning. What is filled, and every error, depends on what is asked for alone, never on time.

use super::data::{Order, Rows};
use super::loss::{IGNORED, PADDING};
use crate::backend::HostMemory;
use crate::dtype::DType;
use crate::error::Result;
use crate::op::Fact;
use crate::target::PREFETCH_STACK;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The rows of a micro-batch: those at consecutive places of an order. If they are fewer than it takes, copies of the last one follow, whose labels
/// do not count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    /// The order of the rows.
    pub order: Order,
    /// The first place.
    pub first: usize,
    /// The number of places.
    pub count: usize,
}

impl Batch {
    /// Writes the rows to memory that has room for a micro-batch of this fact.
    ///
    /// # Errors
    /// As [`Rows::fill`].
    pub fn fill(&self, rows: &Rows, are_labels: bool, fact: &Fact, out: &mut [u8]) -> Result<()> {
        let Batch { order, first, count } = *self;
        let (whole, last) = (fact.shape.first().map_or(count, |&whole| whole), (first + count).saturating_sub(1));
        rows.fill((first..first + whole).map(|place| order.row(place.min(last))), fact, out)?;
        if are_labels {
            let padding = &mut out[fact.bytes() / whole * count..];
            let (integer, float) = ((IGNORED as i64).to_le_bytes(), (PADDING as f32).to_le_bytes());
            let label = if fact.dtype == DType::I64 { &integer[..] } else { &float[..] };
            padding.chunks_exact_mut(label.len()).for_each(|to| to.copy_from_slice(label));
        }
        Ok(())
    }
}

/// Memory for the rows of one micro-batch, and what is in it.
#[derive(Debug)]
struct Slot {
    columns: Vec<Column>,
    bytes: Box<dyn HostMemory>,
    batch: Option<Batch>,
    /// The result of filling it.
    filled: Result<()>,
}

/// A part of a slot.
#[derive(Debug)]
struct Column {
    /// The rows that it is filled with.
    rows: Option<Rows>,
    /// The rows of a micro-batch, as the model takes them.
    fact: Fact,
    range: Range<usize>,
}

impl Slot {
    /// True if it was asked for these rows.
    fn is_for<'a>(&self, rows: impl Iterator<Item = &'a Rows>, batch: Batch) -> bool {
        let same = |(column, rows): (&Column, &Rows)| column.rows.as_ref().is_some_and(|own| own.is_same(rows));
        self.batch == Some(batch) && self.columns.iter().zip(rows).all(same)
    }

    /// Notes what is to be filled in.
    fn ask<'a>(&mut self, rows: impl Iterator<Item = &'a Rows>, batch: Batch) {
        self.columns.iter_mut().zip(rows).for_each(|(column, rows)| column.rows = Some(rows.clone()));
        self.batch = Some(batch);
    }

    fn fill(&mut self) {
        let Slot { columns, bytes, batch, filled } = self;
        let Some(batch) = *batch else { return };
        let (bytes, last) = ((**bytes).as_mut(), columns.len() - 1);
        let fill = |(number, Column { rows, fact, range }): (usize, &Column)| match rows {
            Some(rows) => batch.fill(rows, number == last, fact, &mut bytes[range.clone()]),
            None => Ok(()),
        };
        *filled = columns.iter().enumerate().try_for_each(fill);
    }
}

/// A slot, and the thread that fills it.
#[derive(Debug)]
pub struct Prefetch {
    /// The slot, while the thread does not have it.
    slot: Option<Slot>,
    /// To the thread, and back. Each holds one slot, so sending waits for nobody and allocates nothing.
    ask: Option<SyncSender<Slot>>,
    back: Receiver<Slot>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// A slot for micro-batches of these facts, the labels last, in this memory, which has a byte for each of theirs. It has no thread if the system refuses one:
    /// then nothing is filled ahead.
    ///
    /// # Panics
    /// When the memory is too small.
    pub fn new(facts: &[Fact], bytes: Box<dyn HostMemory>) -> Prefetch {
        let mut end = 0;
        let columns = facts.iter().map(|fact| {
            let start = end;
            end += fact.shape.numel() * fact.dtype.size();
            Column { rows: None, fact: fact.clone(), range: start..end }
        });
        let columns: Vec<Column> = columns.collect();
        let room = (*bytes).as_ref().len();
        assert!(end <= room, "the slot of {room} bytes holds {end} of a micro-batch");
        let (ask, asked) = sync_channel::<Slot>(1);
        let (give, back) = sync_channel(1);
        let work = move || {
            for mut slot in asked {
                slot.fill();
                if give.send(slot).is_err() {
                    break;
                }
            }
        };
        let thread = Builder::new().name("rows ahead".to_owned()).stack_size(PREFETCH_STACK as usize).spawn(work);
        let (ask, thread) = thread.ok().map(|thread| (ask, thread)).unzip();
        Prefetch { slot: Some(Slot { columns, bytes, batch: None, filled: Ok(()) }), ask, back, thread }
    }

    /// Has the slot filled with other rows, by its thread. What is in it now is gone.
    pub fn ask<'a>(&mut self, rows: impl Iterator<Item = &'a Rows>, batch: Batch) {
        self.fetch();
        let Some(ask) = &self.ask else { return };
        let Some(mut slot) = self.slot.take() else { return };
        slot.ask(rows, batch);
        // If the thread is gone, the slot comes back unfilled, and the one who wants it learns why.
        let _ = ask.send(slot);
    }

    /// Waits until the slot has these rows. If it was not asked for them, this thread fills it. Returns how long it took.
    ///
    /// # Errors
    /// When a row is not finite.
    pub fn wait<'a>(&mut self, rows: impl Iterator<Item = &'a Rows> + Clone, batch: Batch) -> Result<Duration> {
        let start = Instant::now();
        self.fetch();
        let slot = self.slot.as_mut().expect("it was fetched");
        if !slot.is_for(rows.clone(), batch) {
            slot.ask(rows, batch);
            slot.fill();
        }
        if slot.filled.is_err() {
            slot.batch = None;
            return std::mem::replace(&mut slot.filled, Ok(())).map(|()| Duration::ZERO);
        }
        Ok(start.elapsed())
    }

    /// The rows of each column, once they were [waited](Self::wait) for.
    ///
    /// # Panics
    /// When the slot was given away since.
    pub fn columns(&self) -> impl Iterator<Item = (&Fact, &[u8])> {
        let slot = self.slot.as_ref().expect("it was waited for");
        let bytes = (*slot.bytes).as_ref();
        slot.columns.iter().map(|column| (&column.fact, &bytes[column.range.clone()]))
    }

    /// Takes the slot back from the thread.
    fn fetch(&mut self) {
        if self.slot.is_none() {
            match self.back.recv() {
                Ok(slot) => self.slot = Some(slot),
                // It ends early only if it panics.
                Err(_) => {
                    let ended = self.thread.take().map_or(Ok(()), JoinHandle::join);
                    resume_unwind(ended.expect_err("the thread waits for slots until it panics"))
                }
            }
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.ask = None;
        if let Some(thread) = self.thread.take() {
            // A panic of it is not passed on while this may be panicking, too.
            let _ = thread.join();
        }
    }
}
