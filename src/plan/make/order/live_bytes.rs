//! How many bytes are live while steps run one after another: what [`live`](crate::make::liveness) will find, without its ranges.

use crate::lower::Draft;
use crate::{BufferIdx, Class, StepIdx};

/// The buffers of the arena that each step touches.
pub(super) struct Uses {
    /// Per buffer, its bytes in the arena, rounded up to the alignment; 0 outside the arena.
    pub bytes: Vec<u64>,
    /// Per step, the buffers of the arena that it reads or writes, each once.
    pub touched: Vec<Vec<BufferIdx>>,
    /// Per buffer of the arena, the steps that touch it.
    pub touching: Vec<Vec<StepIdx>>,
    /// Per buffer, true if it is live before the first step.
    pub before: Vec<bool>,
    /// Per buffer, true if it is live after the last step.
    pub behind: Vec<bool>,
    /// Per step, its first result and the operands that the result may overwrite in place.
    pub heirs: Vec<Option<(BufferIdx, Vec<BufferIdx>)>>,
}

impl Uses {
    /// The uses in a draft, or `None` if the sum of all bytes exceeds an `i64`.
    pub fn new(draft: &Draft, align: u64) -> Option<Uses> {
        let arena = |b: BufferIdx| draft.buffers[b].class.in_arena();
        let rounded = |b| if arena(b) { draft.buffers[b].bytes.checked_next_multiple_of(align) } else { Some(0) };
        let bytes = BufferIdx::all(&draft.buffers).map(rounded).collect::<Option<Vec<u64>>>()?;
        let sum = bytes.iter().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes))?;
        i64::try_from(sum).ok()?;
        let of_arena = |buffers: &mut dyn Iterator<Item = BufferIdx>| {
            let mut found: Vec<_> = buffers.filter(|&b| arena(b)).collect();
            found.sort_unstable();
            found.dedup();
            found
        };
        let mut touching = vec![Vec::new(); bytes.len()];
        let (mut touched, mut heirs): (Vec<Vec<BufferIdx>>, _) = (Vec::new(), Vec::new());
        for (s, step) in StepIdx::enumerate(&draft.steps) {
            touched.push(of_arena(&mut step.reads.iter().chain(&step.writes).copied()));
            touched[s].iter().for_each(|&b| touching[b].push(s));
            let from = of_arena(&mut step.reusable.iter().copied());
            let to = step.writes.first().filter(|&&b| arena(b) && !from.is_empty());
            heirs.push(to.map(|&b| (b, from)));
        }
        let of_class = |class: Class| draft.buffers.iter().map(|b| b.class == class).collect();
        Some(Uses { bytes, touched, touching, before: of_class(Class::Input), behind: of_class(Class::Output), heirs })
    }

    /// The most bytes that are live at once in an order.
    pub fn peak(&self, order: &[StepIdx]) -> u64 {
        self.levels(order).iter().map(|level| level.during).max().unwrap_or(0)
    }

    /// The live bytes before and during each step of an order.
    pub fn levels(&self, order: &[StepIdx]) -> Vec<Level> {
        let mut live = LiveBytes::new(self, false);
        let mut levels: Vec<Level> = order.iter().map(|&s| live.run(s)).collect();
        if let Some(first) = levels.first_mut() {
            // An input that no step reads is live during the first step only.
            let unread = |&b: &BufferIdx| self.before[b] && self.touching[b].is_empty();
            first.during += BufferIdx::all(&self.bytes).filter(unread).map(|b| self.bytes[b]).sum::<u64>();
        }
        levels
    }
}

/// The live bytes before and during a step.
#[derive(Clone, Copy)]
pub(super) struct Level {
    pub before: u64,
    pub during: u64,
}

/// The live bytes at a point in an order.
///
/// A buffer is live from the first to the last step that touches it; inputs from the start, outputs to the end. The same rule
/// holds backward, with inputs and outputs exchanged.
pub(super) struct LiveBytes<'a> {
    uses: &'a Uses,
    /// Per buffer, the number of steps that touch it and have not run.
    pub left: Vec<u32>,
    /// Per buffer, true if it is live from the start.
    before: &'a [bool],
    /// Per buffer, true if it is live to the end.
    behind: &'a [bool],
    bytes: u64,
}

impl<'a> LiveBytes<'a> {
    pub fn new(uses: &'a Uses, backward: bool) -> LiveBytes<'a> {
        let (before, behind) = if backward { (&uses.behind, &uses.before) } else { (&uses.before, &uses.behind) };
        let touched = |&b: &BufferIdx| before[b] && !uses.touching[b].is_empty();
        LiveBytes {
            uses,
            left: uses.touching.iter().map(|steps| steps.len() as u32).collect(),
            before,
            behind,
            bytes: BufferIdx::all(&uses.bytes).filter(touched).map(|b| uses.bytes[b]).sum(),
        }
    }

    /// True if the next step that touches the buffer makes it live.
    pub fn is_new(&self, b: BufferIdx) -> bool {
        !self.before[b] && self.left[b] as usize == self.uses.touching[b].len()
    }

    /// True if the buffer is no longer live after the next step that touches it.
    fn dies(&self, b: BufferIdx) -> bool {
        self.left[b] == 1 && !self.behind[b]
    }

    /// The live bytes after a step minus those before it.
    pub fn growth(&self, step: StepIdx) -> i64 {
        let change = |&b: &BufferIdx| {
            let bytes = self.uses.bytes[b] as i64;
            i64::from(self.is_new(b)) * bytes - i64::from(self.dies(b)) * bytes
        };
        self.uses.touched[step].iter().map(change).sum()
    }

    /// Runs a step.
    pub fn run(&mut self, step: StepIdx) -> Level {
        let Uses { bytes, touched, heirs, .. } = self.uses;
        let made: u64 = touched[step].iter().filter(|&&b| self.is_new(b)).map(|&b| bytes[b]).sum();
        let freed: u64 = touched[step].iter().filter(|&&b| self.dies(b)).map(|&b| bytes[b]).sum();
        let inherits =
            |(to, from): &(BufferIdx, Vec<BufferIdx>)| self.is_new(*to) && from.iter().any(|&b| self.dies(b));
        let inherited = heirs[step].as_ref().filter(|heir| inherits(heir)).map_or(0, |heir| bytes[heir.0]);
        let level = Level { before: self.bytes, during: self.bytes + made - inherited };
        self.bytes = self.bytes + made - freed;
        touched[step].iter().for_each(|&b| self.left[b] -= 1);
        level
    }
}
