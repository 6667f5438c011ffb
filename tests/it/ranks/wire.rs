//! Ranks that a launcher without MPI has started: what they compute, and what they say when one is missing.

use super::{decoder, mesh};
use crate::common::Folder;
use plimsoll::internals::backend::launched::Address;
use plimsoll::internals::backend::ranks::{Exchanged, Ranks};
use plimsoll::internals::backend::wire::Wire;
use plimsoll::internals::kernel::{Collective, Exchange, Reduction};
use plimsoll::internals::npy;
use plimsoll::{DType, Error};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A port that nobody listens at.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there is a port");
    listener.local_addr().expect("it has an address").port()
}

fn address() -> Address {
    Address { host: "127.0.0.1".into(), port: free_port(), is_here: true }
}

/// The outcomes of ranks, each a thread that joins the others by connections.
fn joined<T: Send>(
    on: &str,
    patience: Duration,
    there: &[usize],
    of_rank: impl Fn(Result<Arc<dyn Ranks>, Error>) -> T + Sync,
) -> Vec<T> {
    let (mesh, address) = (mesh(on), address());
    thread::scope(|scope| {
        let (mesh, address, of_rank) = (&mesh, &address, &of_rank);
        let join = |&rank| scope.spawn(move || of_rank(Wire::patient(mesh, rank, mesh.ranks(), address, patience)));
        let threads: Vec<_> = there.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
    })
}

/// What a rank gets of each kind of exchange, along each axis.
fn exchanged(ranks: &dyn Ranks) -> Vec<Vec<u8>> {
    let sum = Reduction::Sum;
    let kinds = [
        (Exchange::AllReduce(sum), DType::F32),
        (Exchange::AllReduce(Reduction::Max), DType::I32),
        (Exchange::AllGather, DType::F16),
        (Exchange::ReduceScatter(sum), DType::F64),
        (Exchange::AllToAll, DType::I64),
    ];
    let mut all = Vec::new();
    for axis in ranks.mesh().axes() {
        for (exchange, dtype) in kinds {
            let collective = Collective { exchange, axis: axis.name.clone(), ranks: axis.ranks };
            let what = Exchanged { collective, dtype, given: 3 * axis.ranks };
            let values: Vec<f64> = (0..what.given).map(|i| ((ranks.rank() * 31 + i * 7) % 19) as f64 - 9.0).collect();
            let given = plimsoll::Tensor::from_f64(dtype, [what.given], &values);
            let mut got = vec![0; what.got() * dtype.size()];
            // SAFETY: there are as many elements as the exchange reads and writes.
            unsafe { ranks.exchange(&what, given.bytes().as_ptr(), got.as_mut_ptr()) }.expect("all are there");
            all.push(got);
        }
    }
    all
}

#[test]
fn connections_exchange_what_threads_do() {
    for on in ["tensor=2", "data=2,tensor=2", "data=1"] {
        let there: Vec<usize> = (0..mesh(on).ranks()).collect();
        let found = joined(on, Duration::from_secs(10), &there, |ranks| {
            let ranks = ranks.expect("all are there");
            let told = ranks.gather(format!("rank {}", ranks.rank()).as_bytes()).expect("all are there");
            (exchanged(&*ranks), told)
        });
        let expected = super::each(&mesh(on), |ranks| exchanged(&*ranks));
        let words: Vec<_> = there.iter().map(|rank| format!("rank {rank}").into_bytes()).collect();
        for ((found, told), expected) in found.iter().zip(&expected) {
            assert!(found == expected && *told == words, "{on}");
        }
    }
}

#[test]
fn a_rank_that_is_missing_is_named_by_the_others() {
    let patience = Duration::from_millis(600);
    let start = Instant::now();
    // One never comes, and the first says so to who is there.
    for (there, expected) in [(&[0, 1][..], "no sign of rank 2 for 0.6 s"), (&[1, 2], "no sign of rank 0 for 0.6 s")] {
        for error in joined("data=3", patience, there, |ranks| ranks.expect_err("one is missing").to_string()) {
            assert!(error.contains(expected), "{error}");
        }
    }
    // One leaves, and one comes too late.
    let gone = joined("data=3", patience, &[0, 1, 2], |ranks| {
        let ranks = ranks.expect("all are there");
        (ranks.rank() != 2).then(|| ranks.gather(b"a").expect_err("one is gone").to_string())
    });
    for error in gone.into_iter().flatten() {
        assert!(error.contains("rank 2 is gone"), "{error}");
    }
    let late = joined("data=3", patience, &[0, 1, 2], |ranks| {
        let ranks = ranks.expect("all are there");
        if ranks.rank() == 1 {
            thread::sleep(3 * patience);
        }
        [ranks.gather(b"a"), ranks.gather(b"b")].map(|told| told.expect_err("one is late").to_string())
    });
    for error in late.iter().flatten() {
        assert!(error.contains("no sign of rank 1 for 0.6 s"), "{error}");
    }
    assert!(start.elapsed() < 20 * patience, "{:?}", start.elapsed());
}

#[test]
fn strangers_and_others_are_no_ranks() {
    let patience = Duration::from_secs(5);
    let (on, address) = (mesh("data=2"), address());
    thread::scope(|scope| {
        let first = scope.spawn(|| Wire::patient(&on, 0, 2, &address, patience).map(|ranks| ranks.rank()));
        let mut stranger = loop {
            match TcpStream::connect((&address.host[..], address.port)) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is sent");
        let second = Wire::patient(&on, 1, 2, &address, patience).expect("a stranger is left alone");
        assert_eq!((first.join().expect("it does not panic").expect("all are there"), second.rank()), (0, 1));
    });
    let told = thread::scope(|scope| {
        let (of_two, of_three) = (mesh("data=2"), mesh("data=3"));
        let address = self::address();
        let other = address.clone();
        let second = scope.spawn(move || Wire::patient(&of_three, 1, 3, &other, patience).map(drop));
        let first = Wire::patient(&of_two, 0, 2, &address, patience).map(drop);
        [first, second.join().expect("it does not panic")].map(|told| told.expect_err("they differ").to_string())
    });
    for error in told {
        assert!(error.contains("rank 0 is one of 2 ranks, another process is rank 1 of 3"), "{error}");
    }
}

/// Runs the program as the ranks of a launcher that sets torchrun's variables. Returns what each printed, and said.
fn torchrun(ranks: usize, arguments: &[&str]) -> Vec<(bool, String, String)> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_WORLD_SIZE", ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("PLIMSOLL_PORT", port.to_string()),
        ] {
            command.env(name, value);
        }
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let started: Vec<_> = (0..ranks).map(start).collect();
    let ended = started.into_iter().map(|process| process.wait_with_output().expect("it ends"));
    ended.map(|Output { status, stdout, stderr }| (status.success(), text(&stdout), text(&stderr))).collect()
}

/// What the first of all ranks printed, when all have done well.
fn told(ranks: usize, arguments: &[&str]) -> serde_json::Value {
    let all = torchrun(ranks, arguments);
    assert!(all.iter().all(|(ran, ..)| *ran), "{arguments:?}: {all:?}");
    assert!(all[1..].iter().all(|(_, printed, _)| printed.is_empty()), "one rank prints: {all:?}");
    serde_json::from_str(&all[0].1).expect("it prints a record")
}

#[test]
fn ranks_need_no_mpi() {
    let folder = Folder::new("torchrun");
    let model = folder.path("decoder.onnxtxt");
    decoder(&folder, 4);
    let run = |ranks: usize, more: &[&str], to: &str| {
        let to = folder.path(to);
        let all = ["run", &model, "--backend", "cpu", "--batch", "4", "--output-dir", &to, "--json"];
        let record = told(ranks, &[&all[..], more].concat());
        assert_eq!(record["memory"]["planned_bytes"], record["memory"]["allocated_bytes"], "{more:?}");
        npy::read(Path::new(&format!("{to}/logits.npy"))).expect("the first rank writes it").to_f64()
    };
    let expected = run(1, &[], "alone");
    let peak = expected.iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
    for (ranks, on) in [(2, "data=2"), (2, "tensor=2"), (4, "data=2,tensor=2")] {
        let found = run(ranks, &["--mesh", on], on);
        let off = expected.iter().zip(&found).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
        assert!(found.len() == expected.len() && off <= 1e-5 * peak, "{on}: off by {off} of {peak}");
    }
    let train = |ranks: usize, mesh: &[&str]| {
        let data = ["--data", "graphs/digits-train-images.npy", "--labels", "graphs/digits-train-labels.npy"];
        let method = ["--loss", "cross_entropy", "--batch", "32", "--lr", "0.001", "--steps", "10"];
        let start = ["train", "graphs/digits.onnx", "--backend", "cpu", "--json"];
        told(ranks, &[&start[..], &data, &method, mesh].concat())["loss"].as_f64().expect("it has a loss")
    };
    let alone = train(1, &[]);
    for on in ["data=2", "data=4"] {
        let loss = train(on[5..].parse().expect("a number"), &["--mesh", on]);
        assert!((loss - alone).abs() < 1e-5 * alone.abs(), "{on}: {loss} of {alone}");
    }
    // What is wrong is told once, with both sides.
    for (more, what) in [
        (&["--mesh", "data=4"][..], "--mesh data=4: expected 4 processes, found 2"),
        (&[], "a launcher started 2 processes: expected --mesh"),
    ] {
        let all = torchrun(2, &[&["run", &model, "--backend", "cpu", "--batch", "4"], more].concat());
        let errors = all.iter().map(|(_, _, errors)| &errors[..]).collect::<Vec<_>>().concat();
        assert!(all.iter().all(|(ran, ..)| !ran) && errors.contains(what), "{errors}");
        assert_eq!(errors.matches("error: ").count(), 1, "{errors}");
    }
}
