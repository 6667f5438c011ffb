//! The ranks of a mesh on CUDA: over a stub of NCCL, and on real cards.

use super::{BARE, Folder, Settings, paper_of};
use crate::graphs;
use crate::ranks::{each, rule, same_on, trained};
use plimsoll::internals::backend::cuda::library::Search;
use plimsoll::internals::backend::cuda::{open, report};
use plimsoll::internals::backend::ranks::{Ranks, Threads};
use plimsoll::internals::backend::{Backend, KernelId, Launch, SegmentId, Slice};
use plimsoll::internals::expr::Body;
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::{Collective, Exchange, Kernel, Operand, Reduction, Template};
use plimsoll::internals::mesh::Mesh;
use plimsoll::internals::reserve;
use plimsoll::internals::session::Device;
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Memory, RESERVE};
use plimsoll::internals::tensor::widen;
use plimsoll::{Choice, DType, Options, Session, Tensor};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Elements that each rank gives, or each part of them.
const ELEMENTS: usize = 5;

/// A search that finds stubs of the driver and of NCCL, and no other NCCL.
fn stub(folder: &Folder, defines: &[&str]) -> Option<Search> {
    let log = format!("-DLOG=\"{}\"", folder.0.join("log").display());
    let text = concat!(include_str!("driver.c"), include_str!("nccl.c"));
    let defines: Vec<_> = defines.iter().copied().chain(["-DDEVICES=8", &log]).collect();
    let mut search = paper_of(folder, text, &defines, &["libnccl.so.2"])?;
    search.folders.retain(|other| *other == folder.0 || !other.join("libnccl.so.2").exists());
    Some(search)
}

/// What the stub has told of communicators that went.
fn log(folder: &Folder) -> Vec<String> {
    let text = std::fs::read_to_string(folder.0.join("log")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn collective(exchange: Exchange, (axis, ranks): (&str, usize), dtype: DType) -> Kernel {
    let parts = matches!(exchange, Exchange::ReduceScatter(_) | Exchange::AllToAll);
    let given = if parts { Shape::new([ranks, ELEMENTS]) } else { Shape::new([ELEMENTS]) };
    let got = exchange.shape(&given, ranks).expect("it has a part for each rank");
    let operand = |shape: Shape| Operand { dtype, access: Access::contiguous(shape), packed: false };
    Kernel {
        template: Template::Collective(Collective { exchange, axis: axis.into(), ranks }),
        reads: vec![operand(given)],
        writes: vec![operand(got.clone())],
        shape: got,
        prologues: Vec::new(),
        body: Body::identity(dtype),
        workspace: 0,
        schedule: Schedule::Open,
    }
}

/// A device with a segment, and what moves data.
struct Rank {
    backend: Box<dyn Backend>,
    segment: SegmentId,
}

impl Rank {
    fn open(search: &Search, ranks: &Arc<dyn Ranks>) -> Rank {
        let settings = Settings { device: ranks.rank(), ..BARE };
        let (mut backend, _) = open(search, &settings).expect("the device opens");
        backend.join(Arc::clone(ranks)).expect("the ranks are there");
        let segment = backend.alloc(1 << 16, Memory::Device).expect("it has room");
        for memory in [Memory::Upload, Memory::Download] {
            backend.alloc(4096, memory).expect("it has room");
        }
        Rank { backend, segment }
    }

    fn slice(&self, number: u64, bytes: usize) -> Slice {
        Slice { segment: self.segment, offset: 1024 * number, bytes: bytes as u64 }
    }

    /// Launches that read the first slice, and write those behind it.
    fn launches(&self, id: KernelId, kernel: &Kernel, count: u64) -> Vec<Launch> {
        let bytes = |operand: &Operand| operand.access.shape.numel() * operand.dtype.size();
        let (read, write) = (bytes(&kernel.reads[0]), bytes(&kernel.writes[0]));
        (1..=count).map(|to| Launch::new(id, vec![self.slice(0, read), self.slice(to, write)])).collect()
    }

    /// What each of so many launches of a collective writes, as one record.
    fn exchange(&mut self, kernel: &Kernel, given: &[f64], count: u64) -> Vec<Vec<f64>> {
        let dtype = kernel.reads[0].dtype;
        let tensor = Tensor::from_f64(dtype, kernel.reads[0].access.shape.clone(), given);
        let id = self.backend.compile(kernel).expect("it is an axis of the mesh");
        let launches = self.launches(id, kernel, count);
        self.backend.write(launches[0].args[0], tensor.bytes()).expect("it is written");
        let record = self.backend.record(&launches).expect("it is recorded");
        self.backend.replay(record).expect("it runs");
        self.backend.wait().expect("all are there");
        let mut read = |launch: &Launch| {
            let mut bytes = vec![0; launch.args[1].bytes as usize];
            self.backend.read(launch.args[1], &mut bytes).expect("it is read");
            widened(dtype, &bytes)
        };
        launches.iter().map(&mut read).collect()
    }
}

/// The numbers that elements are.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let mut numbers = vec![0.0; bytes.len() / dtype.size()];
    widen(dtype, bytes, &mut numbers);
    numbers
}

/// What a rank gives.
fn given(rank: usize, elements: usize) -> Vec<f64> {
    (0..elements).map(|i| ((rank * 31 + i * 7) % 19) as f64 - 9.0).collect()
}

/// Every kind, alone and in a graph, along each axis.
#[test]
fn collectives_are_calls_of_nccl() {
    let folder = Folder::new("nccl");
    let Some(search) = stub(&folder, &[]) else { return };
    let (sum, most) = (Reduction::Sum, Reduction::Max);
    let joined = [Exchange::AllReduce(sum), Exchange::AllReduce(most), Exchange::ReduceScatter(sum)];
    let cases = joined.iter().flat_map(|&by| [DType::F32, DType::F64, DType::I32, DType::I64].map(|dtype| (by, dtype)));
    let moved = [Exchange::AllGather, Exchange::AllToAll];
    let cases: Vec<_> = cases
        .chain(moved.iter().flat_map(|&by| [DType::F16, DType::I16, DType::I64].map(|dtype| (by, dtype))))
        .collect();
    for text in ["tensor=2", "data=2,tensor=3", "data=2,tensor=1"] {
        let mesh = Mesh::parse(text).expect("it is a mesh");
        each(&mesh, |ranks| {
            let mut rank = Rank::open(&search, &ranks);
            for (at, axis) in mesh.axes().iter().enumerate() {
                let group = mesh.group(ranks.rank(), at);
                for &(exchange, dtype) in &cases {
                    let kernel = collective(exchange, (&axis.name, axis.ranks), dtype);
                    let all: Vec<_> =
                        group.iter().map(|&rank| given(rank, kernel.reads[0].access.shape.numel())).collect();
                    let expected = exchange.of_all(&all.iter().map(|given| &given[..]).collect::<Vec<_>>());
                    let place = mesh.place(ranks.rank(), at);
                    for count in [1, 3] {
                        let found = rank.exchange(&kernel, &all[place], count);
                        assert_eq!(
                            found,
                            vec![expected[place].clone(); count as usize],
                            "{exchange} of {dtype} on {text}"
                        );
                    }
                }
            }
            let parts = rank.backend.overhead();
            let nccl = parts.iter().find(|part| part.0 == "NCCL").expect("it is a part");
            assert!(nccl.1 >= 8 << 20, "{nccl:?}");
            // Within its reserve, it is counted there alone.
            let before = rank.backend.usage().bytes;
            let reserve = rank.backend.alloc(RESERVE, Memory::Reserve).expect("NCCL took less");
            assert_eq!(rank.backend.usage().bytes, before + RESERVE);
            assert!(rank.backend.overhead().iter().all(|part| part.0 != "NCCL"));
            rank.backend.free(reserve);
            assert!(rank.backend.overhead().contains(nccl), "it is held still");
            let found = reserve::measure(&*rank.backend, &*ranks, false).expect("all are there");
            assert!(found.bytes >= nccl.1 && found.ranks == mesh.extents(), "{found:?}");
            let error = rank.backend.fork(&[]).map(drop).expect_err("one run");
            assert!(error.to_string().contains("a rank of a mesh has one run at a time"), "{error}");
        });
    }
    // Those of all ranks, and those of the axes of the second mesh.
    assert_eq!(log(&folder), vec!["destroyed"; 2 + 3 * 6 + 2], "records go before communicators");
}

/// What NCCL takes beyond its reserve is refused as a plan is loaded, with both numbers.
#[test]
fn nccl_takes_no_more_than_its_reserve() {
    let folder = Folder::new("reserve");
    let Some(search) = stub(&folder, &["-DTAKES=(64<<20)"]) else { return };
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    for (reserve, fits) in [(32 << 20, false), (200 << 20, true)] {
        let mesh = Mesh::parse("data=2").expect("it is a mesh");
        each(&mesh, |ranks| {
            let settings = Settings { device: ranks.rank(), ..BARE };
            let (mut backend, name) = open(&search, &settings).expect("the device opens");
            backend.join(Arc::clone(&ranks)).expect("the ranks are there");
            let device = Device { ranks: Some(Arc::clone(&ranks)), reserve, ..Device::new(backend, name) };
            let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..Options::default() };
            let job = options.job([("", mlp.clone())], &device);
            assert_eq!(job.target.reserve, reserve);
            match Session::new(job, device, &|_, _| {}) {
                Ok(session) => {
                    assert!(fits && session.usage().bytes == session.plan().bytes());
                    assert!(session.plan().bytes() > reserve);
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(!fits && error.contains("the plan leaves it 33,554,432"), "{error}");
                    assert!(error.contains("`plimsoll devices`, for ranks 2, measures it"), "{error}");
                }
            }
        });
    }
}

/// A rank that is gone is an error on the others, at once or after their patience, and nobody hangs.
#[test]
fn a_rank_that_is_gone_is_an_error_on_the_others() {
    let folder = Folder::new("gone");
    let Some(search) = stub(&folder, &["-DLATE=200"]) else { return };
    let mesh = Mesh::parse("tensor=2").expect("it is a mesh");
    let patience = Duration::from_secs(2);
    let kernel = collective(Exchange::AllReduce(Reduction::Sum), ("tensor", 2), DType::F32);
    let start = Instant::now();
    thread::scope(|scope| {
        for ranks in Threads::patient(&mesh, patience) {
            let (search, kernel) = (&search, &kernel);
            scope.spawn(move || {
                let mut rank = Rank::open(search, &ranks);
                let id = rank.backend.compile(kernel).expect("it is an axis of the mesh");
                let record = rank.backend.record(&rank.launches(id, kernel, 2)).expect("all are there");
                if ranks.rank() == 1 {
                    return;
                }
                let over = rank.backend.replay(record).and_then(|()| rank.backend.wait());
                let error = over.expect_err("rank 1 is gone").to_string();
                assert!(error.contains("rank 0 of mesh 'tensor=2'"), "{error}");
                assert!(error.contains("not over after 2 s, a rank is gone or late"), "{error}");
                let at = rank.slice(0, 4);
                let later = [rank.backend.replay(record), rank.backend.wait(), rank.backend.read(at, &mut [0; 4])];
                assert!(later.iter().all(|later| later.is_err()), "nothing goes on");
            });
        }
    });
    assert!(start.elapsed() < 4 * patience, "it took {:?}", start.elapsed());
    let mut told = log(&folder);
    told.sort_unstable();
    assert_eq!(told, ["a graph lives", "aborted", "destroyed"]);
}

#[test]
fn what_cannot_be_joined_is_named() {
    let folder = Folder::new("old-nccl");
    let Some(search) = stub(&folder, &["-DNCCL_VERSION=21704"]) else { return };
    let mesh = Mesh::parse("data=2").expect("it is a mesh");
    for error in each(&mesh, |ranks| {
        let (mut backend, _) = open(&search, &BARE).expect("the device opens");
        backend.join(ranks).expect_err("NCCL is too old").to_string()
    }) {
        assert!(error.contains("libnccl.so.2: it is version 2.17.4, at least 2.18 is needed"), "{error}");
    }
    let (mut backend, _) = open(&search, &BARE).expect("the device opens");
    let kernel = collective(Exchange::AllGather, ("data", 2), DType::F32);
    let error = backend.compile(&kernel).expect_err("it runs alone").to_string();
    assert!(error.contains("expected a rank of a mesh, found a device that runs alone"), "{error}");
    // A group of one rank has what it gives, whoever has joined.
    for (exchange, dtype) in [(Exchange::AllToAll, DType::F32), (Exchange::AllReduce(Reduction::Sum), DType::F32)] {
        backend.compile(&collective(exchange, ("data", 1), dtype)).expect("it needs nobody");
    }
    let error = backend.compile(&collective(Exchange::AllReduce(Reduction::Sum), ("data", 1), DType::I16));
    let error = error.expect_err("NCCL has no such type").to_string();
    assert!(error.contains("NCCL does not join elements of i16"), "{error}");
}

/// The options of a rank, on the card of its number.
fn card(rank: usize) -> Options {
    Options { device: Some(rank.to_string()), ..Options::default() }.on(Choice::Cuda)
}

/// The meshes that there are cards for.
fn meshes<'a>(of: &[&'a str]) -> Vec<&'a str> {
    let cards = report(&Search::here()).devices.len();
    let fits = |text: &&&str| Mesh::parse(text).is_ok_and(|mesh| mesh.ranks() <= cards);
    let (there, missing): (Vec<&str>, Vec<&str>) = of.iter().partition(|text| fits(text));
    missing.iter().for_each(|text| eprintln!("SKIPPED on {text}: there are {cards} CUDA devices"));
    there
}

#[test]
fn cards_compute_what_one_does() {
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let by = [rule("w1", 1, "tensor"), rule("b1", 0, "tensor"), rule("w2", 0, "tensor")];
    for on in meshes(&["tensor=2", "tensor=4", "data=2,tensor=2"]) {
        same_on(&mlp, on, &by, 1e-5, &card);
    }
    for on in meshes(&["data=2", "data=4"]) {
        for (file, dims) in graphs::GRAPHS {
            let dims: Vec<_> =
                dims.iter().map(|&(name, extent)| (name, if name == "batch" { 8 } else { extent })).collect();
            same_on(&graphs::import(file, &dims), on, &[], 1e-4, &card);
        }
    }
}

#[test]
fn a_training_on_cards_is_that_of_one() {
    for on in meshes(&["data=2", "data=4"]) {
        let folder = crate::common::Folder::new(&format!("trained-on-cards-{on}"));
        for accumulate in [1, 2] {
            let (losses, states, _) = trained(&folder, &card(0), accumulate, 30);
            let mesh = Mesh::parse(on).expect("it is a mesh");
            let found = each(&mesh, |ranks| {
                let folder = crate::common::Folder::new(&format!("trained-on-card-{on}-{}", ranks.rank()));
                let own = card(ranks.rank());
                let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..own };
                trained(&folder, &options, accumulate, 30)
            });
            for (own, kept, _) in &found {
                let off = losses.iter().zip(own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-4, "{on} in {accumulate} parts: losses off by {off}: {losses:?} {own:?}");
                for (state, own) in states.iter().zip(kept) {
                    let (a, b) = (state.to_f64(), own.to_f64());
                    let off = a.iter().zip(&b).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
                    assert!(off < 1e-3, "{on} in {accumulate} parts: a state is off by {off}");
                }
            }
        }
    }
}
