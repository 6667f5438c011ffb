//! The allocators of frameworks, on simulated devices.

use plimsoll::internals::eager::alloc::*;

const MIB: u64 = 1 << 20;

/// An allocator and its simulated device.
struct Bench {
    allocator: Box<dyn Allocator>,
    driver: Simulated,
}

impl Bench {
    fn new(allocator: impl Allocator + 'static, limit: u64) -> Bench {
        Bench { allocator: Box::new(allocator), driver: Simulated::new(limit) }
    }

    fn alloc(&mut self, bytes: u64) -> Block {
        self.allocator.alloc(&mut self.driver, bytes).unwrap()
    }

    fn refused(&mut self, bytes: u64) -> String {
        self.allocator.alloc(&mut self.driver, bytes).unwrap_err().to_string()
    }

    fn free(&mut self, block: Block) {
        self.allocator.free(&mut self.driver, block);
    }

    fn reserved(&self) -> u64 {
        assert_eq!(self.allocator.stats().reserved, self.driver.used);
        self.driver.used
    }
}

const GIB: u64 = 1 << 30;

#[test]
fn direct_asks_the_driver_each_time() {
    let mut direct = Bench::new(Direct::default(), 1024);
    let (a, b) = (direct.alloc(1), direct.alloc(257));
    assert_eq!((a.bytes, b.bytes), (256, 512));
    let error = direct.refused(300);
    let what =
        "direct allocator: request of 300 bytes with 768 live and 768 reserved: needs 1,280 bytes, the limit is 1,024";
    assert!(error.contains(what), "{error}");
    direct.free(a);
    let stats = direct.allocator.stats();
    assert_eq!((stats.live, stats.peak_live, stats.reserved, stats.driver_calls), (512, 768, 512, 4));
}

#[test]
fn caching_rounds_and_picks_segments_by_size() {
    for (request, block, segment) in [
        (0, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (19 * MIB - 512, 19 * MIB - 512, 20 * MIB),
    ] {
        let mut caching = Bench::new(Caching::default(), GIB);
        assert_eq!((caching.alloc(request).bytes, caching.reserved()), (block, segment), "{request}");
    }
}

#[test]
fn caching_keeps_small_and_large_apart() {
    let mut caching = Bench::new(Caching::default(), GIB);
    let large = caching.alloc(2 * MIB);
    assert_eq!(caching.allocator.stats().largest_free, 18 * MIB);
    let small = caching.alloc(512);
    assert_eq!(caching.reserved(), 22 * MIB);
    caching.free(small);
    let another = caching.alloc(3 * MIB);
    assert_eq!((another.segment, another.offset), (large.segment, 2 * MIB));
}

#[test]
fn caching_takes_the_best_fit_and_merges() {
    let mut caching = Bench::new(Caching::default(), GIB);
    let blocks: Vec<Block> = [1024, 512, 512, 512, 512, 512].iter().map(|&bytes| caching.alloc(bytes)).collect();
    assert_eq!(blocks.iter().map(|block| block.offset).collect::<Vec<_>>(), [0, 1024, 1536, 2048, 2560, 3072]);
    for at in [0, 2, 4] {
        caching.free(blocks[at]);
    }
    // It is the best fit, not the larger hole below it, and the lower of two holes that fit equally.
    let again = caching.alloc(512);
    assert_eq!(again, blocks[2]);
    for block in [again, blocks[5], blocks[1], blocks[3]] {
        caching.free(block);
    }
    let stats = caching.allocator.stats();
    assert_eq!((stats.largest_free, stats.live, stats.peak_live, stats.driver_calls), (2 * MIB, 0, 3584, 1));
    caching.allocator.release(&mut caching.driver);
    assert_eq!(caching.reserved(), 0);
}

#[test]
fn caching_flushes_before_it_fails() {
    let mut caching = Bench::new(Caching::default(), 24 * MIB);
    let block = caching.alloc(20 * MIB);
    caching.free(block);
    caching.alloc(22 * MIB);
    assert_eq!((caching.reserved(), caching.allocator.stats().driver_calls), (22 * MIB, 4));
    caching.alloc(1);
    let error = caching.refused(2 * MIB);
    let what =
        "caching allocator: request of 2097152 bytes with 23069184 live and 25165824 reserved: needs 46,137,344 bytes";
    assert!(error.contains(what), "{error}");
}

#[test]
fn bfc_splits_at_twice_the_request_or_128_mib() {
    let mut bfc = Bench::new(Bfc::new(GIB, true, false), GIB);
    let half = bfc.alloc(MIB - 255);
    assert_eq!(half.bytes, MIB);
    bfc.free(half);
    let more = bfc.alloc(MIB + 1);
    assert_eq!((more.bytes, bfc.reserved()), (2 * MIB, 2 * MIB));

    for (request, block) in [(172 * MIB, 172 * MIB), (172 * MIB + 1, 300 * MIB)] {
        let mut bfc = Bench::new(Bfc::new(300 * MIB, false, false), 300 * MIB);
        assert_eq!((bfc.alloc(request).bytes, bfc.reserved()), (block, 300 * MIB));
    }
}

#[test]
fn bfc_takes_the_smallest_chunk_of_a_bin() {
    let mut bfc = Bench::new(Bfc::new(GIB, true, false), GIB);
    let blocks: Vec<Block> = [1000, 256, 500, 256, 512, 256].iter().map(|&bytes| bfc.alloc(bytes)).collect();
    for at in [0, 2, 4] {
        bfc.free(blocks[at]);
    }
    // 1024 bytes are free at 0, 512 at 1280 and at 2048.
    assert_eq!(bfc.alloc(300), Block { segment: 1, offset: 1280, bytes: 512 });
    bfc.free(blocks[1]);
    assert_eq!(bfc.alloc(1280), Block { segment: 1, offset: 0, bytes: 1280 });
}

#[test]
fn bfc_regions_double() {
    let mut bfc = Bench::new(Bfc::new(GIB, true, false), GIB);
    for (request, reserved) in [(2, 2), (2, 6), (10, 22), (10, 38), (20, 70), (1, 70)] {
        bfc.alloc(request * MIB);
        assert_eq!(bfc.reserved(), reserved * MIB, "{request}");
    }
    // The limit leaves 954 MiB, and caps the region of 1 GiB that the second request wants.
    assert!(bfc.refused(955 * MIB).contains("needs 1,074,790,400 bytes"));
    bfc.alloc(900 * MIB);
    assert_eq!(bfc.reserved(), GIB);
}

#[test]
fn bfc_backs_off_when_the_driver_refuses() {
    let mut bfc = Bench::new(Bfc::new(GIB, true, false), 3 * MIB);
    bfc.alloc(2 * MIB);
    // 4 MiB less a tenth, rounded up to 256, fourteen times.
    bfc.alloc(256);
    assert_eq!((bfc.reserved() - 2 * MIB, bfc.allocator.stats().driver_calls), (960_512, 1 + 15));
    assert!(bfc.refused(MIB).contains("bfc allocator: request of 1048576 bytes with"));
}

#[test]
fn bfc_collects_free_regions() {
    for collect in [false, true] {
        let mut bfc = Bench::new(Bfc::new(8 * MIB, true, collect), 8 * MIB);
        let block = bfc.alloc(2 * MIB);
        bfc.free(block);
        if collect {
            bfc.alloc(7 * MIB);
            assert_eq!(bfc.reserved(), 8 * MIB);
        } else {
            let error = bfc.refused(7 * MIB);
            assert!(error.contains("needs 9,437,184 bytes, the limit is 8,388,608 bytes"), "{error}");
        }
    }
}

#[test]
fn blocks_never_overlap_and_stats_add_up() {
    for kind in Kind::ALL {
        let mut state = 7u64;
        let mut random = |bound: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % bound
        };
        let mut driver = Simulated::new(200 * MIB);
        let mut allocator = kind.build(200 * MIB);
        let mut live: Vec<Block> = Vec::new();
        for _ in 0..3000 {
            if random(2) == 0 && !live.is_empty() {
                let block = live.swap_remove(random(live.len() as u64) as usize);
                allocator.free(&mut driver, block);
            } else {
                let most = 1 << (1 + random(24));
                let bytes = random(most);
                let Ok(block) = allocator.alloc(&mut driver, bytes) else { continue };
                assert!(block.bytes >= bytes && block.offset + block.bytes <= driver.segments[&block.segment]);
                let apart = |other: &Block| {
                    other.segment != block.segment
                        || other.offset + other.bytes <= block.offset
                        || block.offset + block.bytes <= other.offset
                };
                assert!(live.iter().all(apart), "{kind:?}");
                live.push(block);
            }
            let stats = allocator.stats();
            assert_eq!(stats.live, live.iter().map(|block| block.bytes).sum::<u64>());
            assert_eq!(stats.reserved, driver.used);
            assert!(stats.live <= stats.reserved && stats.peak_reserved <= 200 * MIB);
        }
        for block in live {
            allocator.free(&mut driver, block);
        }
        allocator.release(&mut driver);
        assert_eq!((driver.used, allocator.stats().live), (0, 0));
    }
}

fn alternating(sizes: &[u64]) -> Vec<Event> {
    let steps = |(id, &bytes)| [Event::Alloc { id, bytes }, Event::Free { id }];
    sizes.iter().enumerate().flat_map(steps).collect()
}

#[test]
fn smallest_devices_of_known_traces() {
    // Without a limit, the cache holds both blocks; on the smallest device the first is flushed.
    let trace = alternating(&[20 * MIB, 22 * MIB]);
    let stats = replay(&trace, &mut Caching::default(), &mut Simulated::new(GIB)).unwrap();
    assert_eq!((stats.peak_reserved, stats.peak_live), (42 * MIB, 22 * MIB));
    assert!((stats.fragmentation() - 20.0 / 42.0).abs() < 1e-12);
    for (sizes, direct, caching, bfc) in [
        (&[20 * MIB, 22 * MIB][..], 22 * MIB, 22 * MIB, 22 * MIB),
        (&[1], 256, 2 * MIB, 256),
        (&[0], 256, 2 * MIB, 256),
        (&[19 * MIB + 1], 19 * MIB + 256, 20 * MIB, 19 * MIB + 256),
    ] {
        let trace = alternating(sizes);
        assert_eq!(Kind::ALL.map(|kind| smallest_device(kind, &trace).unwrap()), [direct, caching, bfc], "{sizes:?}");
    }
    assert_eq!(smallest_device(Kind::Caching, &[]).unwrap(), 0);
    let most = [Event::Alloc { id: 0, bytes: u64::MAX }];
    assert!(Kind::ALL.iter().all(|&kind| smallest_device(kind, &most).is_err()));
}
