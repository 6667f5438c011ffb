//! A run allocates nothing: counted, over every kernel case at once, with one thread and with two.

mod kernels;

use plimsoll::backend::cpu::Cpu;
use plimsoll::backend::{Backend, Launch, SegmentId, Slice};
use plimsoll::dtype::DType;
use plimsoll::expr::{Body, Expr};
use plimsoll::kernel::{Kernel, Operand, Template, layout};
use plimsoll::shape::{Access, Shape};
use plimsoll::target::Target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Kernels that are large enough to be shared among threads.
fn large() -> Vec<Kernel> {
    let operand =
        |shape: &[usize]| Operand { dtype: DType::F32, access: Access::contiguous(Shape::new(shape)), packed: false };
    let x = Expr::input(0, DType::F32);
    let kernel = |template, shape: &[usize], reads: &[&[usize]], body: &Expr| Kernel {
        template,
        shape: Shape::new(shape),
        reads: reads.iter().map(|s| operand(s)).collect(),
        writes: vec![operand(shape)],
        body: Body::new(std::slice::from_ref(body)),
        workspace: 0,
        call: None,
    };
    vec![
        kernel(Template::Map, &[200_000], &[&[200_000]], &x.exp()),
        kernel(Template::MatMul, &[160, 200], &[&[160, 100], &[100, 200]], &x.max(&x.like(0.0))),
    ]
}

#[test]
fn replay_allocates_nothing() {
    for threads in [1, 2] {
        let mut cpu = Cpu::new(threads);
        let mut launches = Vec::new();
        let mut bytes = 0u64;
        let mut kernels: Vec<Kernel> = kernels::cases().into_iter().map(|case| case.kernel).collect();
        kernels.retain(|k| k.shape.numel() < 3000 && k.body.code.len() < 100);
        kernels.extend(large());
        for mut kernel in kernels {
            kernel.workspace = layout::workspace(&kernel, &Target::cpu(threads as u32));
            let mut sizes: Vec<u64> = Vec::new();
            for operand in kernel.reads.iter().chain(&kernel.writes) {
                sizes.push((kernels::elements(&operand.access) * operand.dtype.size()) as u64);
            }
            if let Template::Gather { strides, extents } = &kernel.template {
                let further = strides.iter().zip(extents).map(|(s, e)| s.unsigned_abs() * e).sum::<usize>();
                sizes[0] += (further * kernel.reads[0].dtype.size()) as u64;
            }
            sizes.extend((kernel.workspace > 0).then_some(kernel.workspace));
            let mut args = Vec::new();
            for size in sizes {
                args.push(Slice { segment: SegmentId(0), offset: bytes, bytes: size });
                bytes = (bytes + size).next_multiple_of(256);
            }
            launches.push(Launch { kernel: cpu.compile(&kernel).expect("compiles"), args });
        }
        let segment = cpu.alloc(bytes).expect("memory");
        launches.iter_mut().flat_map(|l| &mut l.args).for_each(|a| a.segment = segment);
        let record = cpu.record(&launches).expect("is recorded");
        cpu.replay(record).expect("runs");
        let usage = cpu.usage();
        let before = CALLS.load(Ordering::Relaxed);
        for _ in 0..1000 {
            cpu.replay(record).expect("runs");
        }
        assert_eq!(CALLS.load(Ordering::Relaxed) - before, 0, "calls of the allocator, {threads} threads");
        assert_eq!((cpu.usage(), usage.bytes), (usage, bytes));
    }
}
