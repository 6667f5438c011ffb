//! One reader, named by `READER`, under libFuzzer: `bash tests/fuzz.sh` runs them all. A panic is a finding, and so is memory beyond the bound.

#![no_main]

mod readers;

use libfuzzer_sys::fuzz_target;
use readers::{READERS, Reader, seeds};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

/// The most bytes that a reader may take at once: this many, and [`TIMES`] the size of its file.
const MOST: usize = 64 << 20;
const TIMES: usize = 4;

struct Counting;

/// Bytes allocated and not given back, and the most that these were.
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

impl Counting {
    fn count(change: isize) {
        PEAK.fetch_max(LIVE.fetch_add(change, Relaxed) + change, Relaxed);
    }
}

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counting::count(layout.size() as isize);
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counting::count(layout.size() as isize);
        // SAFETY: the caller's word.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counting::count(size as isize - layout.size() as isize);
        // SAFETY: the caller's word.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        Counting::count(-(layout.size() as isize));
        // SAFETY: the caller's word.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// The reader, and the file that it reads.
static SUBJECT: LazyLock<(&Reader, PathBuf)> = LazyLock::new(|| {
    let name = std::env::var("READER").expect("READER names a reader");
    let reader = READERS.iter().find(|reader| reader.name == name).expect("there is a reader of this name");
    let folder = PathBuf::from(std::env::var_os("FOLDER").expect("FOLDER names a folder for the file"));
    if let Some(to) = std::env::var_os("SEEDS") {
        for (number, seed) in seeds(reader, &folder).iter().enumerate() {
            std::fs::write(PathBuf::from(&to).join(format!("seed-{number}")), seed).expect("a seed is written");
        }
    }
    (reader, folder.join(reader.file))
});

fuzz_target!(init: { LazyLock::force(&SUBJECT); }, |bytes: &[u8]| {
    let (reader, path) = &*SUBJECT;
    std::fs::write(path, bytes).expect("the file is written");
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    (reader.read)(path);
    let taken = (PEAK.load(Relaxed) - before) as usize;
    assert!(taken <= MOST + TIMES * bytes.len(), "{taken} bytes for a file of {}", bytes.len());
});
