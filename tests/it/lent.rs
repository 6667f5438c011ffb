//! Memory that the host program lends: for segments, for inputs and for outputs.

use crate::common;
use plimsoll::internals::backend::Backend;
use plimsoll::internals::backend::cpu::{Cpu, Line, Region};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::{DType, Error, Graph, Place, Tensor, Trace};
use std::ptr::NonNull;

fn options() -> Options {
    Options { threads: 1, ..Options::default() }.on(Choice::Cpu)
}

/// softmax(x w) and x + 1, with a weight that is a constant.
fn net() -> Graph {
    let g = Trace::new("net");
    let x = g.input("x", DType::F32, [4, 24]);
    let w = g.constant("w", common::random(&mut 7, &[24, 12].into()));
    g.output("y", x.matmul(w).softmax(-1));
    g.output("more", x + 1.0);
    g.finish().expect("the graph is sound")
}

fn x(seed: u64) -> Tensor {
    common::random(&mut (seed + 1), &[4, 24].into())
}

fn load(backend: Box<dyn Backend>) -> plimsoll::Result<Session> {
    common::load(net(), backend, "lent", &options())
}

/// A pattern that no segment leaves behind.
const GUARD: u8 = 0xa5;

#[test]
fn segments_lie_in_lent_memory_and_nowhere_else() {
    let own = load(Box::new(Cpu::new(1))).expect("it loads");
    let expected = own.run(&[("x", x(1))]).expect("it runs");
    let bytes = own.plan().segments.iter().map(|s| s.bytes.next_multiple_of(256)).sum::<u64>();
    let mut lines = vec![Line([GUARD; 256]); bytes as usize / 256 + 2];
    let start = NonNull::from(&mut lines[1]).cast::<u8>();
    // SAFETY: the lines are used by nobody else while the session lives.
    let region = |at: usize, bytes| unsafe { Region::from_raw(start.add(at), bytes) };
    let session = load(Box::new(Cpu::with_arena(1, region(0, bytes).expect("it is aligned")))).expect("it fits");
    let twice = region(256, 256).err().expect("it is lent").to_string();
    assert!(twice.contains("are lent already"), "{twice}");
    assert_eq!(session.run(&[("x", x(1))]).expect("it runs"), expected);
    assert_eq!(session.usage().bytes, session.plan().bytes());
    drop(session);
    let skewed = region(8, 256).err().expect("it is not aligned").to_string();
    assert!(skewed.contains("multiple of 256"), "{skewed}");
    let small = load(Box::new(Cpu::with_arena(1, region(0, 512).expect("it is free again")))).expect_err("it is small");
    assert!(matches!(small, Error::Fit { .. }) && small.to_string().contains("in the memory that the host lends"));
    for guard in [&lines[0], &lines[lines.len() - 1]] {
        assert_eq!(guard.0, [GUARD; 256]);
    }
}

/// A session of the library's door lies in memory of the caller, too, wherever that begins.
#[test]
fn a_session_lies_in_memory_of_the_caller() {
    let expected = load(Box::new(Cpu::new(1))).expect("it loads").run(&[("x", x(1))]).expect("it runs");
    let memory = Box::into_raw(vec![GUARD; 1 << 20].into_boxed_slice());
    // SAFETY: nobody else uses the memory while the session lives.
    let lent: &'static mut [u8] = unsafe { &mut (&mut *memory)[1..] };
    let session = Session::from_graph_in(net(), &options(), lent).expect("it fits");
    assert_eq!(session.run(&[("x", x(1))]).expect("it runs"), expected);
    assert_eq!(session.usage().bytes, session.plan().bytes());
    drop(session);
    // SAFETY: the session is gone.
    let left = unsafe { Box::from_raw(memory) };
    // Weights and inputs are there, and nothing before the first multiple of 256.
    let weights = 24 * 12 * 4;
    assert!(left.iter().filter(|&&byte| byte != GUARD).count() > weights && left[0] == GUARD);

    let refused = |bytes: usize, options: &Options| {
        Session::from_graph_in(net(), options, vec![0; bytes].leak()).expect_err("it is refused")
    };
    for bytes in [0, 1 << 10] {
        let small = refused(bytes, &options());
        let named = small.to_string().contains("in the memory that the host lends");
        assert!(matches!(small, Error::Fit { .. }) && named, "{small}");
    }
    let other = refused(1 << 20, &options().on(Choice::Wgpu)).to_string();
    assert!(other.contains("expected the backend cpu, found wgpu"), "{other}");
}

#[test]
fn runs_read_and_write_the_callers_bytes() {
    for (name, open) in common::backends() {
        let session = load(open()).expect("it loads");
        for seed in 0..3 {
            let given = x(seed);
            let expected = session.run(&[("x", given.clone())]).expect("it runs");
            let mut memory = vec![GUARD; 64 + 4 * 12 * 4 + 64 + 4 * 24 * 4 + 64];
            let (_, rest) = memory.split_at_mut(64);
            let (y, rest) = rest.split_at_mut(4 * 12 * 4);
            let more = &mut rest[64..64 + 4 * 24 * 4];
            let mut outputs = [("more", Place::bytes_mut(more)), ("y", Place::bytes_mut(y))];
            session.run_in_place(&[("x", Place::bytes(given.bytes()))], &mut outputs).expect("it runs");
            let (before, rest) = memory.split_at(64);
            let (y, rest) = rest.split_at(4 * 12 * 4);
            let (between, rest) = rest.split_at(64);
            let (more, behind) = rest.split_at(4 * 24 * 4);
            assert_eq!((y, more), (&expected[0].1.bytes()[..], &expected[1].1.bytes()[..]), "{name}");
            assert!([before, between, behind].concat().iter().all(|&byte| byte == GUARD), "{name}");
        }
    }
}

#[test]
fn wrong_places_are_refused_by_name() {
    let session = load(Box::new(Cpu::new(1))).expect("it loads");
    let given = x(1);
    let refused = |inputs: &[(&str, Place)], outputs: &mut [(&str, Place)]| {
        session.run_in_place(inputs, outputs).expect_err("a place is wrong").to_string()
    };
    let (mut y, mut more) = (vec![0; 192], vec![0; 384]);
    let bytes = given.bytes();
    let error = refused(
        &[("x", Place::bytes(&bytes[4..]))],
        &mut [("y", Place::bytes_mut(&mut y)), ("more", Place::bytes_mut(&mut more))],
    );
    assert_eq!(error, "input 'x', f32[4,24]: expected a place of 384 bytes, found 380");
    let error =
        refused(&[("x", Place::bytes(bytes))], &mut [("y", Place::bytes_mut(&mut y)), ("more", Place::bytes(bytes))]);
    assert_eq!(error, "output 'more', f32[4,24]: expected a place that can be written");
    let error = refused(&[("x", Place::bytes(bytes))], &mut [("y", Place::bytes_mut(&mut y))]);
    assert_eq!(error, "output 'more' has no place");
    let error = refused(&[("z", Place::bytes(bytes))], &mut []);
    assert_eq!(error, "input 'z': not an input of the graph; its inputs: x");
    // SAFETY: it is refused before anybody reads it.
    let elsewhere = unsafe { Place::cuda(4096, 384) };
    let error =
        refused(&[("x", elsewhere)], &mut [("y", Place::bytes_mut(&mut y)), ("more", Place::bytes_mut(&mut more))]);
    assert!(error.contains("CUDA memory is no memory of 'cpu"), "{error}");
    // SAFETY: as above.
    let [one, other] = [4096, 4200].map(|pointer| unsafe { Place::cuda(pointer, 192) });
    let g = Trace::new("two");
    let x = g.input("x", DType::F32, [48]);
    g.output("y", x * 2.0);
    g.output("z", x * 3.0);
    let two = Session::from_graph(g.finish().expect("the graph is sound"), &options()).expect("it loads");
    let error = two.run_in_place(&[("x", Place::bytes(&bytes[..192]))], &mut [("y", one), ("z", other)]);
    assert_eq!(error.expect_err("they overlap").to_string(), "output 'z': its place overlaps that of 'y'");
    let range = Session::from_path("graphs/product.onnxtxt", &options().set("n", 1..=4)).expect("it loads");
    assert!(range.run_in_place(&[], &mut []).expect_err("it has a range").to_string().contains("a place has no shape"));
}

/// Types that a device stores in another form, and indices, which are checked.
#[test]
fn elements_are_converted_and_checked() {
    for (name, open) in common::backends() {
        let g = Trace::new("rows");
        let at = g.input("at", DType::I64, [2]);
        let table = g.constant("table", Tensor::from_f64(DType::F32, [3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
        g.output("rows", table.gather(at, 0));
        g.output("same", at * 2.0);
        let flag = g.input("flag", DType::Bool, [4]);
        g.output("count", flag.cast(DType::F32) * 1.0);
        let graph = g.finish().expect("the graph is sound");
        let session = common::load(graph, open(), name, &options()).expect("it loads");
        let run = |at: [i64; 2]| {
            let bytes: Vec<u8> = at.iter().flat_map(|index| index.to_le_bytes()).collect();
            let (mut rows, mut same) = ([0u8; 16], [0u8; 16]);
            let mut count = [0u8; 16];
            let mut outputs = [
                ("rows", Place::bytes_mut(&mut rows)),
                ("same", Place::bytes_mut(&mut same)),
                ("count", Place::bytes_mut(&mut count)),
            ];
            session
                .run_in_place(&[("at", Place::bytes(&bytes)), ("flag", Place::bytes(&[0, 1, 7, 255]))], &mut outputs)?;
            let count = Tensor::new(DType::F32, [4], count.to_vec()).expect("it is one");
            assert_eq!(count.to_f64(), [0.0, 1.0, 1.0, 1.0], "{name}");
            Ok::<_, Error>((rows, same))
        };
        let (rows, same) = run([2, 0]).expect("it runs");
        assert_eq!(
            Tensor::new(DType::F32, [4], rows.to_vec()).expect("it is one").to_f64(),
            [4.0, 5.0, 0.0, 1.0],
            "{name}"
        );
        assert_eq!(Tensor::new(DType::I64, [2], same.to_vec()).expect("it is one").to_f64(), [4.0, 0.0], "{name}");
        assert!(run([3, 0]).expect_err("there is no row 3").to_string().contains("expected indices"), "{name}");
    }
}

#[cfg(feature = "wgpu")]
mod buffers {
    use super::*;
    use ::wgpu::{Buffer, BufferDescriptor, BufferUsages, Device, Instance, Queue};
    use plimsoll::internals::backend::wgpu::Wgpu;
    use std::sync::OnceLock;

    const ALL: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

    /// A device of the one instance. wgpu takes a buffer of another instance for one of its own with the same number.
    fn device() -> Option<(Device, Queue)> {
        static ONE: OnceLock<Instance> = OnceLock::new();
        let instance = ONE.get_or_init(|| Instance::new(::wgpu::InstanceDescriptor::new_without_display_handle()));
        let adapter = pollster::block_on(instance.request_adapter(&Default::default())).ok()?;
        let descriptor = ::wgpu::DeviceDescriptor { required_limits: adapter.limits(), ..Default::default() };
        pollster::block_on(adapter.request_device(&descriptor)).ok()
    }

    fn buffer(device: &Device, size: u64, usage: BufferUsages) -> Buffer {
        device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    }

    fn read(device: &Device, queue: &Queue, from: &Buffer) -> Vec<u8> {
        let staged = buffer(device, from.size(), BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        let mut encoder = device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(from, 0, &staged, 0, from.size());
        queue.submit([encoder.finish()]);
        staged.map_async(::wgpu::MapMode::Read, .., |_| {});
        device.poll(::wgpu::PollType::wait_indefinitely()).expect("the device is alive");
        staged.get_mapped_range(..).expect("it is mapped").to_vec()
    }

    #[test]
    fn segments_lie_in_lent_buffers() {
        let Some((device, queue)) = device() else { return };
        let open = |buffers: Vec<Buffer>| Wgpu::with_buffers(device.clone(), queue.clone(), buffers);
        let own = load(Box::new(Wgpu::from_device(device.clone(), queue.clone()))).expect("it loads");
        let expected = own.run(&[("x", x(1))]).expect("it runs");
        let sizes: Vec<u64> = own.plan().segments.iter().filter(|s| s.memory.is_device()).map(|s| s.bytes).collect();
        // Each is larger than its segment, with guards behind.
        let buffers: Vec<Buffer> = sizes.iter().map(|bytes| buffer(&device, bytes + 64, ALL)).collect();
        for (buffer, bytes) in buffers.iter().zip(&sizes) {
            queue.write_buffer(buffer, *bytes, &[GUARD; 64]);
        }
        let session = load(Box::new(open(buffers.clone()).expect("they are sound"))).expect("they are large enough");
        assert_eq!(session.run(&[("x", x(1))]).expect("it runs"), expected);
        assert_eq!(session.usage().bytes, session.plan().bytes());
        let twice = open(buffers.clone()).err().expect("they are lent").to_string();
        assert!(twice.contains("lent buffer 0: it is lent already"), "{twice}");
        let mut more = [0u8; 384];
        let mut outputs = [("y", Place::wgpu(&buffers[0], 0, 192)), ("more", Place::bytes_mut(&mut more))];
        let inside = session.run_in_place(&[("x", Place::bytes(x(1).bytes()))], &mut outputs);
        assert!(
            inside.expect_err("a segment lies there").to_string().contains("a segment of a plan lies in this buffer")
        );
        drop(session);
        for (buffer, bytes) in buffers.iter().zip(&sizes) {
            assert_eq!(read(&device, &queue, buffer)[*bytes as usize..], [GUARD; 64], "it was not destroyed");
        }
        drop(open(buffers).expect("they are free again"));
        let refused = |buffers: Vec<Buffer>| {
            open(buffers).and_then(|wgpu| load(Box::new(wgpu)).map(drop)).expect_err("it is wrong")
        };
        let few = refused(vec![buffer(&device, sizes[0], ALL)]).to_string();
        assert!(sizes.len() == 1 || few.contains("lent buffers have one"), "{few}");
        let small = refused(vec![buffer(&device, sizes[0] - 4, ALL)]);
        assert!(matches!(small, Error::Fit { .. }) && small.to_string().contains("in lent buffer 0"), "{small}");
        let bare = refused(vec![buffer(&device, sizes[0], BufferUsages::STORAGE)]).to_string();
        assert!(bare.contains("lent buffer 0") && bare.contains("COPY_DST"), "{bare}");
        let (other, _queue) = self::device().expect("there was one");
        let foreign = refused(sizes.iter().map(|bytes| buffer(&other, *bytes, ALL)).collect()).to_string();
        assert!(foreign.contains("lent buffer 0") && foreign.contains("another device"), "{foreign}");
    }

    #[test]
    fn inputs_and_outputs_lie_in_buffers() {
        let Some((device, queue)) = device() else { return };
        let session = load(Box::new(Wgpu::from_device(device.clone(), queue.clone()))).expect("it loads");
        let given = x(3);
        let expected = session.run(&[("x", given.clone())]).expect("it runs");
        let (from, to) = (buffer(&device, 400, ALL), buffer(&device, 256, ALL));
        queue.write_buffer(&from, 16, given.bytes());
        queue.write_buffer(&to, 0, &[GUARD; 256]);
        let mut more = [0u8; 384];
        let mut outputs = [("y", Place::wgpu(&to, 32, 192)), ("more", Place::bytes_mut(&mut more))];
        session.run_in_place(&[("x", Place::wgpu(&from, 16, 384))], &mut outputs).expect("it runs");
        assert_eq!(more[..], *expected[1].1.bytes());
        let found = read(&device, &queue, &to);
        assert_eq!(found[32..224], *expected[0].1.bytes());
        assert!(found[..32].iter().chain(&found[224..]).all(|&byte| byte == GUARD));
        let refused = |input: Place, output: Place| {
            let mut more = [0u8; 384];
            let mut outputs = [("y", output), ("more", Place::bytes_mut(&mut more))];
            session.run_in_place(&[("x", input)], &mut outputs).expect_err("a place is wrong").to_string()
        };
        let (other, _queue) = self::device().expect("there was one");
        for (input, output, words) in [
            (Place::wgpu(&from, 20, 384), Place::wgpu(&to, 0, 192), "end beyond it"),
            (Place::wgpu(&from, 6, 384), Place::wgpu(&to, 0, 192), "expected multiples of 4"),
            (
                Place::wgpu(&from, 0, 384),
                Place::wgpu(&buffer(&device, 192, BufferUsages::STORAGE), 0, 192),
                "lacks the usage",
            ),
            (Place::wgpu(&from, 0, 384), Place::wgpu(&from, 380, 192), "overlaps that of 'x'"),
            (Place::wgpu(&buffer(&other, 384, ALL), 0, 384), Place::wgpu(&to, 0, 192), "another device"),
            (Place::wgpu(&from, 0, 384), Place::wgpu(&buffer(&other, 192, ALL), 0, 192), "another device"),
        ] {
            let error = refused(input, output);
            assert!(error.contains(words), "{error}");
        }
        session.run(&[("x", given)]).expect("a run that was refused leaves the session as it was");
    }
}

/// On a machine without a usable CUDA device there is nothing to lend.
#[cfg(feature = "cuda")]
mod pointers {
    use super::*;
    use cudarc::driver::sys;
    use plimsoll::internals::backend::cuda::library::Search;
    use plimsoll::internals::backend::cuda::{Cuda, Settings};

    fn cuda() -> Option<Cuda> {
        Cuda::new(&Search::here(), &Settings { device: 0, libraries: true, allow_tf32: false }).ok()
    }

    /// Device memory full of guards. The backend has made the context current.
    fn memory(bytes: usize) -> u64 {
        let mut pointer = 0;
        // SAFETY: the driver is there, and writes one address.
        unsafe {
            assert_eq!(sys::cuMemAlloc_v2(&mut pointer, bytes), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuMemsetD8_v2(pointer, GUARD, bytes), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSynchronize(), sys::CUresult::CUDA_SUCCESS);
        }
        pointer
    }

    fn read(pointer: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0u8; bytes];
        // SAFETY: the memory has as many bytes.
        let read = unsafe { sys::cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), pointer, bytes) };
        assert_eq!(read, sys::CUresult::CUDA_SUCCESS);
        found
    }

    #[test]
    fn segments_inputs_and_outputs_lie_at_pointers() {
        let Some(own) = cuda() else { return };
        let own = load(Box::new(own)).expect("it loads");
        let expected = own.run(&[("x", x(1))]).expect("it runs");
        let device = own.plan().segments.iter().filter(|s| s.memory.is_device());
        let bytes = device.map(|s| s.bytes.next_multiple_of(256)).sum::<u64>();
        let start = memory(bytes as usize + 512);
        let lend = |at: u64, bytes: u64| {
            let mut cuda = cuda().expect("there is one");
            // SAFETY: nobody else uses the memory while the backend lives.
            unsafe { cuda.lend(at, bytes) }.map(|()| cuda)
        };
        let session = load(Box::new(lend(start + 256, bytes).expect("it is sound"))).expect("it fits");
        let twice = lend(start + 512, 256).err().expect("it is lent").to_string();
        assert!(twice.contains("are lent already"), "{twice}");
        assert_eq!(session.usage().bytes, session.plan().bytes());
        assert_eq!(session.run(&[("x", x(1))]).expect("it runs"), expected);
        // A place for the input and one for an output, with guards around them.
        let places = memory(1024);
        let given = x(1);
        // SAFETY: the memory is there, and has as many bytes.
        let written = unsafe { sys::cuMemcpyHtoD_v2(places + 64, given.bytes().as_ptr().cast(), 384) };
        assert_eq!(written, sys::CUresult::CUDA_SUCCESS);
        let mut more = [0u8; 384];
        // SAFETY: nobody else uses the memory.
        let [from, to] = [(64, 384), (640, 192)].map(|(at, bytes)| unsafe { Place::cuda(places + at, bytes) });
        let mut outputs = [("y", to), ("more", Place::bytes_mut(&mut more))];
        session.run_in_place(&[("x", from)], &mut outputs).expect("it runs");
        assert_eq!(more[..], *expected[1].1.bytes());
        let found = read(places, 1024);
        assert_eq!(found[640..832], *expected[0].1.bytes());
        assert!(found[..64].iter().chain(&found[448..640]).chain(&found[832..]).all(|&byte| byte == GUARD));
        // SAFETY: it is refused.
        let beyond = unsafe { Place::cuda(places + 900, 384) };
        let mut outputs = [("y", Place::bytes(&[])), ("more", Place::bytes_mut(&mut more))];
        let error = session.run_in_place(&[("x", beyond)], &mut outputs).expect_err("it ends beyond").to_string();
        assert!(error.contains("input 'x'") && error.contains("its allocation has"), "{error}");
        drop(session);
        let found = read(start, bytes as usize + 512);
        assert!(found[..256].iter().chain(&found[bytes as usize + 256..]).all(|&byte| byte == GUARD));
        for (at, bytes, words) in
            [(start + 8, 256, "multiple of 256"), (start, bytes + (1 << 30), "its allocation has"), (4096, 256, "")]
        {
            let error = lend(at, bytes).err().expect("it is refused").to_string();
            assert!(error.contains(words), "{error}");
        }
        let small = load(Box::new(lend(start, 512).expect("it is free again"))).expect_err("it is small");
        assert!(matches!(small, Error::Fit { .. }), "{small}");
    }
}
