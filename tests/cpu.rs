//! The CPU backend by itself: every kernel case against the interpreter, with one and with two threads.

mod kernels;

use kernels::{Case, interpret};
use plimsoll::backend::cpu::Cpu;
use plimsoll::backend::{Backend, Launch, SegmentId, Slice};
use plimsoll::dtype::DType;
use plimsoll::kernel::layout;
use plimsoll::target::Target;
use plimsoll::tensor::Tensor;

/// Runs a case; the values of every write over its index space.
fn run(cpu: &mut Cpu, case: &Case, packed: bool) -> Result<Vec<Vec<f64>>, String> {
    let mut kernel = case.kernel.clone();
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    for (r, values) in case.inputs.iter().enumerate() {
        let dtype = kernel.reads[r].dtype;
        let mut bytes = Tensor::from_f64(dtype, vec![values.len()], values).bytes().to_vec();
        if packed && layout::packed_bytes(&kernel, r).is_some() {
            bytes = layout::pack(&kernel, r, &bytes);
            kernel.reads[r].packed = true;
        }
        buffers.push(bytes);
    }
    kernel.workspace = layout::workspace(&kernel, &Target::cpu(cpu.target().threads));
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
    let segment = cpu.alloc(end).map_err(|e| e.to_string())?;
    args.iter_mut().for_each(|a| a.segment = segment);
    for (slice, data) in args.iter().zip(&buffers) {
        cpu.write(*slice, data).map_err(|e| e.to_string())?;
    }
    let id = cpu.compile(&kernel).map_err(|e| e.to_string())?;
    let record = cpu.record(&[Launch { kernel: id, args: args.clone() }]).map_err(|e| e.to_string())?;
    cpu.replay(record).map_err(|e| e.to_string())?;
    let mut out = Vec::new();
    for (write, slice) in kernel.writes.iter().zip(&args[kernel.reads.len()..]) {
        let mut bytes = vec![0; slice.bytes as usize];
        cpu.read(*slice, &mut bytes).map_err(|e| e.to_string())?;
        let tensor = Tensor::new(write.dtype, vec![bytes.len() / write.dtype.size()], bytes).expect("whole elements");
        let values = tensor.to_f64();
        out.push(kernels::indices(&write.access.shape).iter().map(|i| values[write.access.at(i) as usize]).collect());
    }
    cpu.free(segment);
    Ok(out)
}

#[test]
fn every_case_agrees_with_the_interpreter() {
    let mut wrong = Vec::new();
    for case in kernels::cases() {
        let expected = interpret(&case.kernel, &case.inputs);
        let mut first: Option<Vec<Vec<f64>>> = None;
        for (threads, packed) in [(1, false), (2, false), (1, true), (2, true)] {
            let mut cpu = Cpu::new(threads);
            let found = match run(&mut cpu, &case, packed) {
                Ok(found) => found,
                Err(error) => {
                    wrong.push(format!("{}: {error}", case.name));
                    break;
                }
            };
            for (w, (e, f)) in expected.iter().zip(&found).enumerate() {
                let peak = e.iter().fold(1e-3f64, |p, v| p.max(v.abs()));
                let tolerance = if case.kernel.writes[w].dtype == DType::F32 { 1e-5 * peak } else { 0.0 };
                let bad = e.iter().zip(f).position(|(e, f)| {
                    (e - f).abs() > tolerance && (*e > -1e38 || *f > -1e38) || f.is_nan() != e.is_nan()
                });
                if let Some(i) = bad {
                    wrong.push(format!(
                        "{} ({threads} threads, packed {packed}) write {w}, {i}: {} != {}",
                        case.name, f[i], e[i]
                    ));
                }
            }
            match &first {
                Some(first) if threads > 1 && *first != found => {
                    wrong.push(format!("{}: other bits on {threads} threads", case.name))
                }
                _ => first = Some(found),
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
}
