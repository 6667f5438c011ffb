//! The allocators of eager frameworks, by their published rules.
//!
//! An allocator owns no memory. It asks a [`Driver`] for segments and hands out [`Block`]s of them, so the same rules run on a
//! device and in simulation. The blocks of a segment tile it. Freeing a block joins it with its free neighbours.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::{Error, Result};

const MIB: u64 = 1 << 20;

/// A source of segments.
pub trait Driver {
    /// Allocates a segment; `None` if there is no room for it. Ids stand for addresses, so every id is larger than the last.
    fn malloc(&mut self, bytes: u64) -> Option<u64>;
    /// Frees a segment.
    fn free(&mut self, segment: u64);
    /// The most bytes that it hands out at once, as far as it knows.
    fn limit(&self) -> u64;
}

/// A driver without a device, which only counts bytes up to its limit.
#[derive(Debug, Default)]
pub struct Simulated {
    /// Bytes of all segments.
    pub used: u64,
    /// Bytes by segment.
    pub segments: BTreeMap<u64, u64>,
    limit: u64,
    next: u64,
}

impl Simulated {
    /// A device of `limit` bytes.
    pub fn new(limit: u64) -> Simulated {
        Simulated { limit, ..Simulated::default() }
    }
}

impl Driver for Simulated {
    fn malloc(&mut self, bytes: u64) -> Option<u64> {
        self.used = self.used.checked_add(bytes).filter(|&used| used <= self.limit)?;
        self.next += 1;
        self.segments.insert(self.next, bytes);
        Some(self.next)
    }

    fn free(&mut self, segment: u64) {
        self.used -= self.segments.remove(&segment).expect("a segment is freed once");
    }

    fn limit(&self) -> u64 {
        self.limit
    }
}

/// A part of a segment that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// The driver's id of the segment.
    pub segment: u64,
    /// First byte in the segment.
    pub offset: u64,
    /// Number of bytes, at least as many as were requested.
    pub bytes: u64,
}

/// The statistics of an allocator so far, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sum of the blocks in use, rounding included.
    pub live: u64,
    /// The most that `live` has been.
    pub peak_live: u64,
    /// Sum of the segments held.
    pub reserved: u64,
    /// The most that `reserved` has been.
    pub peak_reserved: u64,
    /// Calls of the driver, including those that it refused.
    pub driver_calls: u64,
    /// The largest block that can be allocated without a call of the driver.
    pub largest_free: u64,
}

impl Stats {
    /// The share of the peak of reserved bytes that exceeds the peak of live bytes; 0 is perfect.
    pub fn fragmentation(&self) -> f64 {
        if self.peak_reserved == 0 { 0.0 } else { 1.0 - self.peak_live as f64 / self.peak_reserved as f64 }
    }

    fn malloc(&mut self, driver: &mut dyn Driver, bytes: u64) -> Option<u64> {
        self.driver_calls += 1;
        let segment = driver.malloc(bytes)?;
        self.reserved += bytes;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
        Some(segment)
    }

    fn free(&mut self, driver: &mut dyn Driver, segment: u64, bytes: u64) {
        self.driver_calls += 1;
        driver.free(segment);
        self.reserved -= bytes;
    }

    /// Counts a block as live.
    fn add_live(&mut self, block: Block) -> Block {
        self.live += block.bytes;
        self.peak_live = self.peak_live.max(self.live);
        block
    }

    /// The error for a request that needs one more segment of `more` bytes.
    fn exhausted(&self, name: &str, request: u64, more: u64, limit: u64) -> Error {
        let (live, reserved) = (self.live, self.reserved);
        Error::Fit {
            what: format!("{name} allocator: request of {request} bytes with {live} live and {reserved} reserved"),
            needed: reserved.saturating_add(more),
            limit,
            file: None,
        }
    }
}

/// A rule for cutting blocks out of segments.
pub trait Allocator {
    /// Allocates a block of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Fit`] with the request, the live and reserved bytes, and the limit, if the driver refuses and nothing is free.
    fn alloc(&mut self, driver: &mut dyn Driver, bytes: u64) -> Result<Block>;

    /// Frees a block that [`alloc`](Allocator::alloc) returned. Panics if it is not in use.
    fn free(&mut self, driver: &mut dyn Driver, block: Block);

    /// Gives every segment without a live block back to the driver.
    fn release(&mut self, driver: &mut dyn Driver);

    /// The statistics so far.
    fn stats(&self) -> Stats;
}

/// The kinds of allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One segment per block: [`Direct`].
    Direct,
    /// PyTorch's rules: [`Caching`].
    Caching,
    /// TensorFlow's rules, growing and collecting: [`Bfc`].
    Bfc,
    /// One request per block to the device's own pool, if it has one (`cuMemAllocAsync`). In simulation it is [`Direct`], because
    /// only the driver knows what its pool keeps.
    Async,
}

impl Kind {
    /// The kinds that every device has, in the order of tables.
    pub const ALL: [Kind; 3] = [Kind::Direct, Kind::Caching, Kind::Bfc];

    /// The name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Direct => "direct",
            Kind::Caching => "caching",
            Kind::Bfc => "bfc",
            Kind::Async => "async",
        }
    }

    /// A new allocator for a device of `limit` bytes.
    pub fn build(self, limit: u64) -> Box<dyn Allocator> {
        match self {
            Kind::Direct | Kind::Async => Box::new(Direct { name: self.name(), ..Direct::default() }),
            Kind::Caching => Box::new(Caching::default()),
            Kind::Bfc => Box::new(Bfc::new(limit, true, true)),
        }
    }
}

/// The driver's own allocator: one segment per block, rounded up to 256 bytes, as drivers align.
#[derive(Debug)]
pub struct Direct {
    name: &'static str,
    stats: Stats,
}

impl Default for Direct {
    fn default() -> Direct {
        Direct { name: Kind::Direct.name(), stats: Stats::default() }
    }
}

impl Allocator for Direct {
    fn alloc(&mut self, driver: &mut dyn Driver, bytes: u64) -> Result<Block> {
        let rounded = round(bytes, 256);
        match self.stats.malloc(driver, rounded) {
            Some(segment) => Ok(self.stats.add_live(Block { segment, offset: 0, bytes: rounded })),
            None => Err(self.stats.exhausted(self.name, bytes, rounded, driver.limit())),
        }
    }

    fn free(&mut self, driver: &mut dyn Driver, block: Block) {
        self.stats.live -= block.bytes;
        self.stats.free(driver, block.segment, block.bytes);
    }

    fn release(&mut self, _: &mut dyn Driver) {}

    fn stats(&self) -> Stats {
        self.stats
    }
}

/// PyTorch's CUDACachingAllocator with its default settings and one stream.
///
/// It finds the best fit in two pools, one for small blocks and one for large. Segments go back to the driver only when the
/// driver refuses another.
#[derive(Debug, Default)]
pub struct Caching {
    small: Pool,
    large: Pool,
    stats: Stats,
}

impl Caching {
    /// The bytes of the segment that is allocated for a block of `bytes` bytes.
    fn segment_bytes(bytes: u64) -> u64 {
        if bytes <= MIB {
            2 * MIB
        } else if bytes < 10 * MIB {
            20 * MIB
        } else {
            round(bytes, 2 * MIB)
        }
    }
}

impl Allocator for Caching {
    fn alloc(&mut self, driver: &mut dyn Driver, bytes: u64) -> Result<Block> {
        let rounded = round(bytes, 512);
        let small = rounded <= MIB;
        let split = |chunk: u64| if small { chunk - rounded >= 512 } else { chunk - rounded > MIB };
        let pool = if small { &mut self.small } else { &mut self.large };
        if let Some(block) = pool.take(rounded, split) {
            return Ok(self.stats.add_live(block));
        }
        let more = Caching::segment_bytes(rounded);
        let mut segment = self.stats.malloc(driver, more);
        if segment.is_none() {
            self.release(driver);
            segment = self.stats.malloc(driver, more);
        }
        let Some(segment) = segment else {
            return Err(self.stats.exhausted("caching", bytes, more, driver.limit()));
        };
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.add(segment, more);
        let block = pool.take(rounded, split).expect("a new segment has room for the request");
        Ok(self.stats.add_live(block))
    }

    fn free(&mut self, _: &mut dyn Driver, block: Block) {
        self.stats.live -= block.bytes;
        let small = self.small.segments.contains_key(&block.segment);
        if small { &mut self.small } else { &mut self.large }.give(block);
    }

    fn release(&mut self, driver: &mut dyn Driver) {
        self.small.release(driver, &mut self.stats);
        self.large.release(driver, &mut self.stats);
    }

    fn stats(&self) -> Stats {
        Stats { largest_free: self.small.largest_free().max(self.large.largest_free()), ..self.stats }
    }
}

/// TensorFlow's BFC allocator ("best fit with coalescing").
///
/// TensorFlow keeps free chunks in 21 bins: bin `b` holds those of at least `256 << b` bytes, by size and address. It searches
/// bins upwards, so together they are one ordered set, which `Pool` keeps.
#[derive(Debug)]
pub struct Bfc {
    pool: Pool,
    stats: Stats,
    limit: u64,
    /// Bytes of the next region.
    region: u64,
    collect: bool,
}

impl Bfc {
    /// An allocator of up to `limit` bytes.
    ///
    /// With `growth`, its regions double from 2 MiB on; without, one region has the whole limit. With `collect`, regions without
    /// a live block go back to the driver before a request fails.
    pub fn new(limit: u64, growth: bool, collect: bool) -> Bfc {
        let region = if growth { limit.min(2 * MIB) } else { limit };
        Bfc { pool: Pool::default(), stats: Stats::default(), limit, region: round(region, 256), collect }
    }

    fn take(&mut self, bytes: u64) -> Option<Block> {
        let block = self.pool.take(bytes, |chunk| chunk / 2 >= bytes || chunk - bytes >= 128 * MIB)?;
        Some(self.stats.add_live(block))
    }

    /// Adds a region with room for `bytes` bytes. The error is the size of the region that was refused.
    fn extend(&mut self, driver: &mut dyn Driver, bytes: u64) -> Result<(), u64> {
        let available = (self.limit - self.stats.reserved) / 256 * 256;
        if bytes > available {
            return Err(bytes);
        }
        let grown = bytes > self.region;
        while bytes > self.region {
            self.region = self.region.saturating_mul(2);
        }
        let mut ask = self.region.min(available);
        let segment = loop {
            if let Some(segment) = self.stats.malloc(driver, ask) {
                break segment;
            }
            let less = round(ask - ask.div_ceil(10), 256);
            if less < bytes || less == ask {
                return Err(ask);
            }
            ask = less;
        };
        if !grown {
            self.region = self.region.saturating_mul(2);
        }
        self.pool.add(segment, ask);
        Ok(())
    }
}

impl Allocator for Bfc {
    fn alloc(&mut self, driver: &mut dyn Driver, bytes: u64) -> Result<Block> {
        let rounded = round(bytes, 256);
        if let Some(block) = self.take(rounded) {
            return Ok(block);
        }
        let mut extended = self.extend(driver, rounded);
        if extended.is_err() && self.collect {
            let idle: u64 = self.pool.idle().iter().map(|(_, bytes)| bytes).sum();
            if idle > 0 && rounded <= self.limit - self.stats.reserved + idle {
                self.release(driver);
                extended = self.extend(driver, rounded);
            }
        }
        match extended {
            Ok(()) => Ok(self.take(rounded).expect("a new region has room for the request")),
            Err(more) => Err(self.stats.exhausted("bfc", bytes, more, self.limit.min(driver.limit()))),
        }
    }

    fn free(&mut self, _: &mut dyn Driver, block: Block) {
        self.stats.live -= block.bytes;
        self.pool.give(block);
    }

    fn release(&mut self, driver: &mut dyn Driver) {
        self.pool.release(driver, &mut self.stats);
    }

    fn stats(&self) -> Stats {
        Stats { largest_free: self.pool.largest_free(), ..self.stats }
    }
}

/// Rounds up to a multiple of `step`, at least one `step`. Saturates at the largest multiple, which no driver has.
fn round(bytes: u64, step: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(step).unwrap_or(u64::MAX / step * step)
}

/// Segments that are cut into chunks, free or in use. No two free chunks touch.
#[derive(Debug, Default)]
struct Pool {
    /// Bytes by segment.
    segments: BTreeMap<u64, u64>,
    /// Bytes and use (true if in use) of each chunk, by segment and offset.
    chunks: BTreeMap<(u64, u64), (u64, bool)>,
    /// Bytes, segment and offset of each free chunk. The best fit for a size is the first chunk at or after it.
    free: BTreeSet<(u64, u64, u64)>,
}

impl Pool {
    fn add(&mut self, segment: u64, bytes: u64) {
        self.segments.insert(segment, bytes);
        self.insert_free(segment, 0, bytes);
    }

    /// Gives the segments without a chunk in use back to the driver.
    fn release(&mut self, driver: &mut dyn Driver, stats: &mut Stats) {
        for (segment, bytes) in self.idle() {
            self.segments.remove(&segment);
            self.remove_free(segment, 0, bytes);
            stats.free(driver, segment, bytes);
        }
    }

    /// The segments without a chunk in use, and their bytes.
    fn idle(&self) -> Vec<(u64, u64)> {
        let whole = |(&segment, &bytes): (&u64, &u64)| {
            (self.chunks[&(segment, 0)] == (bytes, false)).then_some((segment, bytes))
        };
        self.segments.iter().filter_map(whole).collect()
    }

    /// Takes the smallest free chunk of at least `bytes` bytes; the lowest address on ties. If `split` is true for the chunk's
    /// size, the rest of the chunk stays free.
    fn take(&mut self, bytes: u64, split: impl Fn(u64) -> bool) -> Option<Block> {
        let &(chunk, segment, offset) = self.free.range((bytes, 0, 0)..).next()?;
        self.remove_free(segment, offset, chunk);
        let bytes = if split(chunk) { bytes } else { chunk };
        if bytes < chunk {
            self.insert_free(segment, offset + bytes, chunk - bytes);
        }
        self.chunks.insert((segment, offset), (bytes, true));
        Some(Block { segment, offset, bytes })
    }

    /// Frees a block and joins it with the free chunks on both sides.
    fn give(&mut self, block: Block) {
        let Block { segment, mut offset, mut bytes } = block;
        let chunk = self.chunks.remove(&(segment, offset));
        assert_eq!(chunk, Some((bytes, true)), "a block is freed once, as it was allocated: {block:?}");
        if let Some(&(after, false)) = self.chunks.get(&(segment, offset + bytes)) {
            self.remove_free(segment, offset + bytes, after);
            bytes += after;
        }
        if let Some((&(_, start), &(before, false))) = self.chunks.range((segment, 0)..(segment, offset)).next_back() {
            self.remove_free(segment, start, before);
            (offset, bytes) = (start, bytes + before);
        }
        self.insert_free(segment, offset, bytes);
    }

    fn insert_free(&mut self, segment: u64, offset: u64, bytes: u64) {
        self.chunks.insert((segment, offset), (bytes, false));
        self.free.insert((bytes, segment, offset));
    }

    fn remove_free(&mut self, segment: u64, offset: u64, bytes: u64) {
        self.chunks.remove(&(segment, offset));
        self.free.remove(&(bytes, segment, offset));
    }

    fn largest_free(&self) -> u64 {
        self.free.last().map_or(0, |&(bytes, _, _)| bytes)
    }
}

/// One request to an allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Allocates a tensor.
    Alloc {
        /// The tensor's number until it is freed.
        id: usize,
        /// The tensor's bytes.
        bytes: u64,
    },
    /// Frees a tensor.
    Free {
        /// The number from its `Alloc`.
        id: usize,
    },
}

/// Runs a trace of requests through an allocator. Panics if the trace frees a tensor that is not live.
///
/// # Errors
/// [`Error::Fit`] at the first request that fails.
pub fn replay(trace: &[Event], allocator: &mut dyn Allocator, driver: &mut dyn Driver) -> Result<Stats> {
    let mut blocks = HashMap::new();
    for event in trace {
        match *event {
            Event::Alloc { id, bytes } => {
                let before = blocks.insert(id, allocator.alloc(driver, bytes)?);
                assert!(before.is_none(), "tensor {id} is live already");
            }
            Event::Free { id } => allocator.free(driver, blocks.remove(&id).expect("a live tensor is freed")),
        }
    }
    Ok(allocator.stats())
}

/// The bytes of the smallest device that a trace runs on, in multiples of 256.
///
/// A larger device can fail where a smaller one does not: it refuses later, so the allocator flushes its cache later and cuts
/// other chunks. So there is no single threshold to bisect for. The search starts at the peak of live bytes and grows in steps
/// of 1/256 to the first device that fits, and bisects the last step only. It misses smaller devices only if they fit within
/// one step. Larger devices may fail, so the result favours the allocator.
///
/// # Errors
/// [`Error::Usage`] if no device of 64-bit size is large enough.
pub fn smallest_device(kind: Kind, trace: &[Event]) -> Result<u64> {
    let too_large = || Error::usage(format!("{} allocator: the trace needs more than 64 bits of memory", kind.name()));
    let fits = |limit: u64| replay(trace, kind.build(limit).as_mut(), &mut Simulated::new(limit)).is_ok();
    let mut limit = peak_live(trace).and_then(|peak| peak.checked_next_multiple_of(256)).ok_or_else(too_large)?;
    let mut failed = limit;
    while !fits(limit) {
        failed = limit;
        limit = limit.checked_add(round(limit / 256, 256)).ok_or_else(too_large)?;
    }
    while limit - failed > 256 {
        let middle = failed + round((limit - failed) / 2, 256);
        if fits(middle) { limit = middle } else { failed = middle }
    }
    Ok(limit)
}

/// The most bytes live at once, which every device needs. `None` on overflow.
fn peak_live(trace: &[Event]) -> Option<u64> {
    let (mut sizes, mut live, mut peak) = (HashMap::new(), 0u64, 0);
    for event in trace {
        match *event {
            Event::Alloc { id, bytes } => {
                sizes.insert(id, bytes);
                live = live.checked_add(bytes)?;
                peak = peak.max(live);
            }
            Event::Free { id } => live -= sizes.remove(&id).expect("a live tensor is freed"),
        }
    }
    Some(peak)
}
