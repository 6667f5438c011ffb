//! Makes a scene of an eager run from its log. The addresses of segments are invented here.

use super::{Area, Item, Kind, Mark, Peak, Rect, Scene, Space, Work};
use crate::eager::alloc::Block;
use crate::eager::{Act, Log, Program};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::place::{self, Effort, Problem};
use crate::plan::lower::{Draft, DraftBuffer, DraftStep};
use crate::plan::tell::peak::operators;
use crate::plan::{BufferIdx, Class, SegmentIdx, StepIdx};
use std::cmp::Reverse;
use std::collections::BTreeMap;

impl Scene {
    /// The scene of an eager run. The addresses of segments are not known, so they are drawn as low as they fit.
    ///
    /// # Errors
    /// The sum of the sizes overflows.
    pub fn eager(name: &str, program: &Program, log: &Log, graph: Option<&Graph>) -> Result<Scene> {
        let draft = program.draft();
        let operators = operators(graph);
        let mark = |s: &DraftStep| Mark::new(&s.name, &draft.kernels[s.kernel], &operators, &s.reads, &s.writes);
        let steps: Vec<Mark> = draft.steps.iter().map(mark).collect();
        let mut history = History::new(log, program.staging_bytes(), 2 * steps.len().max(1));
        let height = history.stack()?;
        let mut buffers = items(draft, &steps);
        for Held { buffer, block, .. } in &history.blocks {
            (buffers[*buffer].segment, buffers[*buffer].offset) =
                (SegmentIdx::new(block.segment as usize), block.offset);
        }
        let (rects, live) = (history.rects(), history.live());
        let peak = StepIdx::all(&steps).max_by_key(|&s| (live[s], Reverse(s))).map(|step| {
            let holds = |r: &&Rect| r.time.0 < 2 * step.index() + 2 && 2 * step.index() < r.time.1;
            let mut holders: Vec<_> = rects.iter().filter(holds).map(|r| r.buffer).collect();
            holders.sort_by_key(|&b| (Reverse(buffers[b].bytes), b));
            Peak { step, bytes: live[step], buffers: holders }
        });
        let reserved = history.reserved();
        let areas = history.segments.into_values().collect();
        let space = Space { title: "device".into(), class: None, bytes: height, areas, rects };
        Ok(Scene {
            name: name.to_owned(),
            target: String::new(),
            planned: 0,
            arena: 0,
            bound: 0,
            limit: None,
            live,
            reserved,
            times: Vec::new(),
            steps,
            buffers,
            spaces: vec![space],
            peak,
            figures: Vec::new(),
        })
    }
}

/// The buffers of a program, without addresses.
fn items(draft: &Draft, steps: &[Mark]) -> Vec<Item> {
    let item = |b: &DraftBuffer| Item {
        name: b.name.clone(),
        module: None,
        ty: format!("{}{}", b.dtype, b.shape),
        bytes: b.bytes,
        class: b.class,
        kind: Kind::resident(b.class).unwrap_or(Kind::Computed(Work::Elementwise)),
        segment: SegmentIdx::default(),
        offset: 0,
        uses: None,
        takes_from: None,
    };
    let mut items: Vec<Item> = draft.buffers.iter().map(item).collect();
    for (s, step) in StepIdx::enumerate(&draft.steps) {
        for &b in step.reads.iter().chain(&step.writes) {
            items[b].uses.get_or_insert((s, s)).1 = s;
        }
        let made = step.writes.iter().filter(|&&b| draft.buffers[b].class == Class::Activation);
        made.for_each(|&b| items[b].kind = steps[s].kind);
    }
    items
}

/// A block that held a buffer for a range of half steps.
struct Held {
    buffer: BufferIdx,
    block: Block,
    time: (usize, usize),
}

/// The allocations of a run over time, in half steps.
struct History {
    /// The end of the last step.
    end: usize,
    /// Bytes of the staging segments, which are there throughout.
    staging: u64,
    /// Segments by their number. Number 0 is staging.
    segments: BTreeMap<u64, Area>,
    blocks: Vec<Held>,
}

impl History {
    /// The history in a log. Each segment is at address 0.
    fn new(log: &Log, staging: u64, end: usize) -> History {
        let mut segments: BTreeMap<u64, Area> = BTreeMap::new();
        let mut blocks: Vec<Held> = Vec::new();
        let mut open: BTreeMap<BufferIdx, usize> = BTreeMap::new();
        for &(now, act) in &log.acts {
            match act {
                Act::Reserve(segment, bytes) => {
                    segments.insert(segment, Area { time: (now, end), bytes: (0, bytes) });
                }
                Act::Release(segment) => {
                    segments.entry(segment).and_modify(|area| area.time.1 = now);
                }
                Act::Take(buffer, block) => {
                    open.insert(buffer, blocks.len());
                    blocks.push(Held { buffer, block, time: (now, end) });
                }
                Act::Give(buffer) => {
                    if let Some(at) = open.remove(&buffer) {
                        blocks[at].time.1 = now;
                    }
                }
            }
        }
        segments.retain(|_, area| area.time.0 < area.time.1);
        if staging > 0 {
            segments.insert(0, Area { time: (0, end), bytes: (0, staging) });
        }
        blocks.retain(|held| held.time.0 < held.time.1 && segments.contains_key(&held.block.segment));
        History { end, staging, segments, blocks }
    }

    /// Gives the segments addresses, and returns the height of all.
    ///
    /// Segments that are there throughout come lowest. The others are placed above them as low as they fit.
    fn stack(&mut self) -> Result<u64> {
        let always = (0, self.end);
        let mut height = 0u64;
        for area in self.segments.values_mut().filter(|area| area.time == always) {
            let top = height.checked_add(area.bytes.1);
            let top = top.ok_or_else(|| Error::usage("the sum of the segments' sizes overflows 64 bits".into()))?;
            area.bytes = (height, top);
            height = top;
        }
        let items = self.segments.values().filter(|area| area.time != always).map(|area| place::Item {
            lower: area.time.0 as u64,
            upper: area.time.1 as u64,
            size: area.bytes.1,
            align: 1,
        });
        let drawn = place::place(&Problem::new(items.collect(), 1)?, Effort::PLAN);
        let others = self.segments.values_mut().filter(|area| area.time != always);
        for (area, offset) in others.zip(&drawn.offsets) {
            area.bytes = (height + offset, height + offset + area.bytes.1);
        }
        Ok(height + drawn.peak)
    }

    /// The blocks at the addresses of their segments.
    fn rects(&self) -> Vec<Rect> {
        let rect = |&Held { buffer, block, time }: &Held| {
            let from = self.segments[&block.segment].bytes.0 + block.offset;
            Rect { buffer, time, held: time, bytes: (from, from + block.bytes) }
        };
        self.blocks.iter().map(rect).collect()
    }

    /// Per step, the bytes in use.
    fn live(&self) -> Vec<u64> {
        let staging = ((0, self.end), self.staging);
        self.per_step(self.blocks.iter().map(|held| (held.time, held.block.bytes)).chain([staging]))
    }

    /// Per step, the bytes of segments.
    fn reserved(&self) -> Vec<u64> {
        self.per_step(self.segments.values().map(|area| (area.time, area.bytes.1 - area.bytes.0)))
    }

    /// Per step, the sum of the bytes that are held then: the larger of its two halves.
    fn per_step(&self, held: impl Iterator<Item = ((usize, usize), u64)>) -> Vec<u64> {
        let mut changes = vec![0i128; self.end + 1];
        for ((from, to), bytes) in held {
            changes[from] += i128::from(bytes);
            changes[to] -= i128::from(bytes);
        }
        let sums = changes.iter().scan(0i128, |sum, change| {
            *sum += change;
            Some(u64::try_from(*sum).expect("what goes has come"))
        });
        let sums: Vec<u64> = sums.collect();
        sums.chunks_exact(2).map(|halves| halves[0].max(halves[1])).collect()
    }
}
