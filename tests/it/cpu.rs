//! The CPU backend by itself: every kernel case on every instruction set, with one thread and with two, packed and not; and the launches
//! that it refuses.

mod conv;
mod gemm;
mod math;
mod window;

use crate::kernels;
use crate::kernels::Case;
use plimsoll::internals::backend::cpu::simd::Isa;
use plimsoll::internals::backend::cpu::{Cpu, Line, Region};
use plimsoll::internals::backend::{Backend, Launch, SegmentId, Slice};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::error::Error;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::{self, Schedule};
use plimsoll::internals::kernel::cpu::same_elements;
use plimsoll::internals::kernel::meaning::{evaluate, stores};
use plimsoll::internals::kernel::{Kernel, Operand, Template, cpu as packing, schedule};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Memory, Target};
use plimsoll::internals::tensor::Tensor;

/// Runs a case; the values of every write over its index space.
fn run(cpu: &mut Cpu, case: &Case, packed: bool) -> Result<Vec<Vec<f64>>, String> {
    let mut kernel = schedule::scheduled(&case.kernel, cpu.target())?;
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    for (r, values) in case.inputs.iter().enumerate() {
        let dtype = kernel.reads[r].dtype;
        let mut bytes = Tensor::from_f64(dtype, vec![values.len()], values).bytes().to_vec();
        let size = packing::packed_bytes(&kernel, r).filter(|_| packed && kernel.prologue(r).is_none());
        if let Some(size) = size {
            let plain = std::mem::replace(&mut bytes, vec![0; size as usize]);
            packing::pack(&kernel, r, packing::Plain::whole(&plain), &mut bytes);
            kernel.reads[r].packed = true;
        }
        buffers.push(bytes);
    }
    kernel.workspace = schedule::workspace(&kernel);
    let mut args = Vec::new();
    let mut end = 0u64;
    let mut place = |bytes: u64| {
        let at = Slice { segment: SegmentId(0), offset: end, bytes };
        end = (end + bytes).next_multiple_of(256);
        at
    };
    for buffer in &buffers {
        args.push(place(buffer.len() as u64));
    }
    for (w, write) in kernel.writes.iter().enumerate() {
        let bytes = (kernels::elements(&write.access) * write.dtype.size()) as u64;
        match case.in_place {
            Some((by, read)) if by == w => args.push(args[read]),
            _ => args.push(place(bytes)),
        }
    }
    if kernel.workspace > 0 {
        args.push(place(kernel.workspace));
    }
    let segment = cpu.alloc(end, Memory::Device).map_err(|e| e.to_string())?;
    args.iter_mut().for_each(|a| a.segment = segment);
    for (slice, data) in args.iter().zip(&buffers) {
        cpu.write(*slice, data).map_err(|e| e.to_string())?;
    }
    let id = cpu.compile(&kernel).map_err(|e| e.to_string())?;
    let record = cpu.record(&[Launch::new(id, args.clone())]).map_err(|e| e.to_string())?;
    cpu.replay(record).map_err(|e| e.to_string())?;
    let (mut out, mut stored) = (Vec::new(), stores(&case.kernel, &case.inputs));
    for (write, slice) in kernel.writes.iter().zip(&args[kernel.reads.len()..]) {
        let mut bytes = vec![0; slice.bytes as usize];
        cpu.read(*slice, &mut bytes).map_err(|e| e.to_string())?;
        let tensor = Tensor::new(write.dtype, vec![bytes.len() / write.dtype.size()], bytes).expect("whole elements");
        let values = tensor.to_f64();
        out.push(stored.remove(0).into_iter().map(|(element, _)| values[element as usize]).collect());
    }
    cpu.free(segment);
    Ok(out)
}

/// The first element of a case's results that is wrong.
fn compare(case: &Case, expected: &[Vec<f64>], found: &[Vec<f64>]) -> Option<String> {
    for (w, (expected, found)) in expected.iter().zip(found).enumerate() {
        let peak = expected.iter().fold(1e-3f64, |p, v| p.max(v.abs()));
        let tolerance = if case.kernel.writes[w].dtype == DType::F32 { 1e-5 * peak } else { 0.0 };
        let differ = |e: f64, f: f64| (e - f).abs() > tolerance || f.is_nan();
        if let Some(i) = expected.iter().zip(found).position(|(&e, &f)| differ(e, f)) {
            return Some(format!("{} write {w}, element {i}: {} instead of {}", case.name, found[i], expected[i]));
        }
    }
    None
}

/// The case. Where the result of a product or of a convolution may take the bytes of a read, it stands twice: with these bytes and with its own.
fn ways(case: Case) -> Vec<Case> {
    let Kernel { template, reads, writes, .. } = &case.kernel;
    let [write] = &writes[..] else { return vec![case] };
    if !matches!(template, Template::MatMul | Template::Conv { .. } | Template::ConvTranspose { .. }) {
        return vec![case];
    }
    let alike = |&read: &usize| same_elements(&reads[read].access, &write.access) && reads[read].dtype == write.dtype;
    let Some(read) = case.kernel.further().find(alike) else { return vec![case] };
    let way = |in_place: Option<(usize, usize)>| Case {
        name: format!("{}{}", case.name, if in_place.is_some() { " in place" } else { " apart" }),
        kernel: case.kernel.clone(),
        inputs: case.inputs.clone(),
        in_place,
    };
    vec![way(None), way(Some((0, read)))]
}

/// One thread and two give the same bits; packed operands and every instruction set give the same values.
#[test]
fn every_case_agrees_with_the_reference() {
    let mut wrong = Vec::new();
    let target = Target::cpu(2);
    for case in kernels::cases().into_iter().filter(|case| case.is_supported(&target)).flat_map(ways) {
        let expected = evaluate(&case.kernel, &case.inputs);
        for isa in Isa::available() {
            for packed in [false, true] {
                let results = [1, 2].map(|threads| {
                    let mut cpu = Cpu::new(threads);
                    cpu.set_isa(isa);
                    run(&mut cpu, &case, packed)
                });
                match results {
                    [Ok(one), Ok(two)] => {
                        let how = format!("{}, packed {packed}", isa.name());
                        wrong.extend(compare(&case, &expected, &one).map(|what| format!("{what} ({how})")));
                        if one != two {
                            wrong.push(format!("{}: other bits with two threads ({how})", case.name));
                        }
                    }
                    [Err(what), _] | [_, Err(what)] => wrong.push(format!("{}: {what}", case.name)),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
}

fn relu(n: usize) -> Kernel {
    let x = Expr::input(0, DType::F32);
    let operand = Operand { dtype: DType::F32, access: Access::contiguous(Shape::new([n])), packed: false };
    Kernel {
        template: Template::Map,
        shape: Shape::new([n]),
        reads: vec![operand.clone()],
        writes: vec![operand],
        body: Body::new(&[x.max(&x.like(0.0))]),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Cpu(algorithm::Cpu::Loops),
    }
}

/// Whatever is asked of it through the trait, no kernel touches memory that is not its own.
#[test]
fn unsound_launches_are_refused() {
    let mut cpu = Cpu::new(1);
    let segment = cpu.alloc(1024, Memory::Device).expect("memory");
    let kernel = cpu.compile(&relu(64)).expect("compiles");
    let at = |offset, bytes| Slice { segment, offset, bytes };
    let mut record = |args: Vec<Slice>| cpu.record(&[Launch::new(kernel, args)]);
    let good = record(vec![at(0, 256), at(256, 256)]).expect("apart");
    record(vec![at(0, 256), at(0, 256)]).expect("in place");
    for (why, args) in [
        ("too few arguments", vec![at(0, 256)]),
        ("too short", vec![at(0, 252), at(256, 256)]),
        ("outside", vec![at(0, 256), at(1024 - 64, 256)]),
        ("unaligned", vec![at(0, 256), at(260, 256)]),
        ("overlapping in part", vec![at(0, 256), at(64, 256)]),
        ("another's segment", vec![at(0, 256), Slice { segment: SegmentId(9), offset: 0, bytes: 256 }]),
    ] {
        assert!(record(args).is_err(), "{why}");
    }
    cpu.replay(good).expect("runs");
    cpu.free(segment);
    assert!(cpu.replay(good).is_err(), "its memory is gone");

    let mut behind = relu(64);
    behind.reads[0].access.offset = -1;
    let mut still = relu(64);
    still.writes[0].access.strides = vec![0];
    let mut untyped = relu(64);
    untyped.body.code[0].dtype = DType::I64;
    let mut endless = relu(64);
    endless.body.results = vec![9];
    for (why, kernel) in [
        ("before the buffer", behind),
        ("all to one element", still),
        ("operands of two types", untyped),
        ("no such result", endless),
    ] {
        assert!(cpu.compile(&kernel).is_err(), "{why}");
    }
}

#[test]
fn segments_may_lie_in_the_hosts_memory() {
    let mut cpu = Cpu::with_arena(2, Region::new(vec![Line::ZERO; 8]));
    let segment = cpu.alloc(2048, Memory::Device).expect("all of it");
    assert!(matches!(cpu.alloc(1, Memory::Device), Err(Error::Fit { needed: 1, limit: 0, .. })));
    let kernel = cpu.compile(&relu(200)).expect("compiles");
    let slice = Slice { segment, offset: 1024, bytes: 800 };
    let data: Vec<u8> = (0..200).flat_map(|i| (i as f32 - 100.0).to_le_bytes()).collect();
    cpu.write(slice, &data).expect("inside");
    let record = cpu.record(&[Launch::new(kernel, vec![slice, slice])]).expect("in place");
    cpu.replay(record).expect("runs");
    let mut out = vec![0; 800];
    cpu.read(slice, &mut out).expect("inside");
    let values: Vec<f32> = out.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    assert!(values.iter().enumerate().all(|(i, &v)| v == (i as f32 - 100.0).max(0.0)));
}
