//! Ranks that are processes without MPI, over TCP: those of `torchrun`, and of `srun` where it starts no MPI.
//!
//! ```text
//! rank 0 listens --others connect, and tell their ranks--> a star
//! gather, exchange: each rank sends a frame to rank 0, and gets those of its group back
//! ```
//!
//! It is for what ranks agree on, a few bytes each time. On CUDA, NCCL exchanges the data. On CPUs they pass through rank 0, and take memory of
//! their own there: right, and slow; MPI is for those, and for stages. Sums are computed in `f64`, in the order of the ranks.

use crate::launched::Address;
use crate::ranks::{Exchanged, PATIENCE, Ranks, pause};
use plimsoll_core::dtype::DType;
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::{Exchange, Reduction};
use plimsoll_core::mesh::Mesh;
use plimsoll_core::tensor::{narrow, widen};
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a rank says first, before its number and the number of ranks. Who says something else is no rank.
const HELLO: &[u8; 8] = b"plimsoll";
/// The longest that a connection may take to say it.
const GREETING: Duration = Duration::from_secs(2);
/// How much longer than rank 0 the others wait, which then hear from it who is missing.
const MARGIN: Duration = Duration::from_secs(1);
/// The length that stands before a reason why no more is sent.
const BROKEN: u64 = u64::MAX;
/// The most bytes of such a reason.
const MOST_WORDS: u64 = 64 << 10;

/// The ranks of a mesh, each a process.
#[derive(Debug)]
pub struct Wire {
    mesh: Mesh,
    rank: usize,
    patience: Duration,
    links: Mutex<Links>,
}

/// The connections of a rank: on rank 0, those of the others in their order; on another, that of rank 0.
#[derive(Debug, Default)]
struct Links {
    streams: Vec<TcpStream>,
    /// Why nothing is sent any more.
    broken: Option<String>,
}

impl Wire {
    /// Joins the processes that a launcher has started, one per rank of the mesh.
    ///
    /// # Errors
    /// When the ranks are not those of the mesh, their meshes differ, or one is gone or late.
    pub fn join(mesh: &Mesh, rank: usize, size: usize, address: &Address) -> Result<Arc<dyn Ranks>> {
        Wire::patient(mesh, rank, size, address, PATIENCE)
    }

    /// As [`join`](Self::join): each waits so long for the others.
    ///
    /// # Errors
    /// As there.
    pub fn patient(
        mesh: &Mesh,
        rank: usize,
        size: usize,
        address: &Address,
        patience: Duration,
    ) -> Result<Arc<dyn Ranks>> {
        let mut wire = Wire { mesh: mesh.clone(), rank, patience, links: Mutex::default() };
        ensure(mesh.ranks() == size, || {
            let ranks = mesh.ranks();
            wire.failed(format!("mesh '{mesh}' has {ranks} ranks, the launcher started {size}"))
        })?;
        let links = if rank == 0 { wire.listen(address) } else { wire.connect(address) };
        let links = links.map_err(|why| wire.failed(why))?;
        wire.links = Mutex::new(links);
        let own = mesh.to_string();
        let all = wire.gather(own.as_bytes())?;
        let names: Vec<_> = all.iter().map(|mesh| format!("'{}'", String::from_utf8_lossy(mesh))).collect();
        ensure(all.windows(2).all(|two| two[0] == two[1]), || {
            wire.failed(format!("the ranks have different meshes: {}", names.join(", ")))
        })?;
        Ok(Arc::new(wire))
    }

    fn failed(&self, what: impl Display) -> Error {
        Error::Backend { backend: "ranks", what: format!("rank {}: {what}", self.rank), file: None }
    }

    /// Waits on rank 0 until all others are there.
    fn listen(&self, address: &Address) -> Result<Links, String> {
        let size = self.mesh.ranks();
        let mut there: Vec<Option<TcpStream>> = (1..size).map(|_| None).collect();
        if there.is_empty() {
            return Ok(Links::default());
        }
        let host = if address.is_here { &address.host[..] } else { "0.0.0.0" };
        let refused = |error: io::Error| format!("{address}: {error}; PLIMSOLL_PORT names another port, on all ranks");
        let listener = TcpListener::bind((host, address.port)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let start = Instant::now();
        while there.iter().any(Option::is_none) {
            let found = match listener.accept() {
                Ok((stream, _)) => self.greeted(stream)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                Err(error) => return Err(refused(error)),
            };
            if let Some((rank, stream)) = found {
                let place = &mut there[rank - 1];
                ensure(place.is_none(), || format!("two processes say that they are rank {rank}"))?;
                *place = Some(stream);
                continue;
            }
            if start.elapsed() > self.patience {
                let missing = there.iter().zip(1..).filter(|(stream, _)| stream.is_none());
                let missing: Vec<_> = missing.map(|(_, rank)| rank.to_string()).collect();
                let why = self.no_sign(&missing.join(", "));
                there.iter_mut().flatten().for_each(|stream| tell(stream, &why));
                return Err(why);
            }
            pause(start.elapsed());
        }
        Ok(Links { streams: there.into_iter().flatten().collect(), broken: None })
    }

    /// The rank that a connection is from; none if it is from nobody who belongs here.
    fn greeted(&self, mut stream: TcpStream) -> Result<Option<(usize, TcpStream)>, String> {
        let mut hello = [0; 16];
        let heard = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(GREETING.min(self.patience))))
            .and_then(|()| stream.read_exact(&mut hello));
        if heard.is_err() || hello[..8] != *HELLO {
            return Ok(None);
        }
        let number = |at: usize| hello[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
        let (rank, size, own) = (number(8), number(12), self.mesh.ranks());
        ensure(size == own && (1..own).contains(&rank), || {
            let why = format!("rank 0 is one of {own} ranks, another process is rank {rank} of {size}");
            tell(&mut stream, &why);
            why
        })?;
        self.ready(&stream, self.patience).map_err(|error| error.to_string())?;
        Ok(Some((rank, stream)))
    }

    /// Connects another rank with rank 0.
    fn connect(&self, address: &Address) -> Result<Links, String> {
        let start = Instant::now();
        loop {
            let tried = self.try_connect(address, self.patience.saturating_sub(start.elapsed()));
            match tried {
                Ok(stream) => return Ok(Links { streams: vec![stream], broken: None }),
                Err(error) if start.elapsed() > self.patience => {
                    return Err(format!("{} at {address}: {error}", self.no_sign("0")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn try_connect(&self, address: &Address, left: Duration) -> io::Result<TcpStream> {
        let places: Vec<SocketAddr> = (&address.host[..], address.port).to_socket_addrs()?.collect();
        let mut error = io::Error::new(ErrorKind::NotFound, "its name has no address");
        for place in places {
            match TcpStream::connect_timeout(&place, left.max(GREETING)) {
                // Without a listener, a connection may be with itself.
                Ok(stream) if stream.local_addr()? == place => error = ErrorKind::ConnectionRefused.into(),
                Ok(mut stream) => {
                    // Rank 0 may wait for others, after this one has come.
                    self.ready(&stream, self.patience + MARGIN)?;
                    let numbers = [self.rank, self.mesh.ranks()].map(|number| (number as u32).to_le_bytes());
                    stream.write_all(&[&HELLO[..], &numbers[0], &numbers[1]].concat())?;
                    return Ok(stream);
                }
                Err(other) => error = other,
            }
        }
        Err(error)
    }

    fn ready(&self, stream: &TcpStream, patience: Duration) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(patience))?;
        stream.set_read_timeout(Some(patience))
    }

    fn no_sign(&self, ranks: &str) -> String {
        format!("no sign of rank {ranks} for {} s", self.patience.as_secs_f64())
    }

    /// Why a rank was not heard, or did not hear.
    fn why(&self, rank: usize, error: &io::Error) -> String {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.no_sign(&rank.to_string()),
            _ => format!("rank {rank} is gone: {error}"),
        }
    }

    /// Gives a frame, and gets those of a group, which rank 0 knows of each rank.
    fn meet(&self, own: Vec<u8>, group: &dyn Fn(usize) -> Vec<usize>) -> Result<Vec<Vec<u8>>> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if links.broken.is_none() {
            let met = if self.rank == 0 {
                self.hand_out(&mut links.streams, own, group)
            } else {
                self.hand_in(&mut links.streams[0], &own, group(self.rank).len())
            };
            match met {
                Ok(frames) => return Ok(frames),
                Err(why) => {
                    if self.rank == 0 {
                        links.streams.iter_mut().for_each(|stream| tell(stream, &why));
                    }
                    // Whoever waits for this rank hears at once that it is gone.
                    links.streams.clear();
                    links.broken = Some(why);
                }
            }
        }
        Err(self.failed(links.broken.as_deref().unwrap_or_default()))
    }

    fn hand_out(
        &self,
        streams: &mut [TcpStream],
        own: Vec<u8>,
        group: &dyn Fn(usize) -> Vec<usize>,
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut frames = vec![own];
        for (stream, rank) in streams.iter_mut().zip(1..) {
            frames.push(receive(stream).map_err(|error| self.why(rank, &error))??);
        }
        for (stream, rank) in streams.iter_mut().zip(1..) {
            group(rank)
                .into_iter()
                .try_for_each(|of| send(stream, &frames[of]))
                .map_err(|error| self.why(rank, &error))?;
        }
        Ok(group(0).into_iter().map(|of| std::mem::take(&mut frames[of])).collect())
    }

    fn hand_in(&self, stream: &mut TcpStream, own: &[u8], frames: usize) -> Result<Vec<Vec<u8>>, String> {
        // A rank 0 that has gone may have said why before.
        let sent = send(stream, own);
        let got = (0..frames).map(|_| receive(stream).map_err(|error| self.why(0, &error))?).collect();
        match (got, sent) {
            (Err(why), _) => Err(why),
            (Ok(_), Err(error)) => Err(self.why(0, &error)),
            (Ok(got), Ok(())) => Ok(got),
        }
    }
}

/// Sends a frame: its length, and its bytes.
fn send(stream: &mut TcpStream, frame: &[u8]) -> io::Result<()> {
    stream.write_all(&(frame.len() as u64).to_le_bytes())?;
    stream.write_all(frame)
}

/// Says why no more is sent. Whoever does not hear it finds that the connection is closed.
fn tell(stream: &mut TcpStream, why: &str) {
    let [broken, length] = [BROKEN, why.len() as u64].map(u64::to_le_bytes);
    let _ = stream.write_all(&[&broken[..], &length, why.as_bytes()].concat());
}

/// The next frame, or the reason why there is none.
fn receive(stream: &mut TcpStream) -> io::Result<Result<Vec<u8>, String>> {
    let length = number(stream)?;
    if length == BROKEN {
        let words = number(stream)?.min(MOST_WORDS);
        return Ok(Err(String::from_utf8_lossy(&bytes(stream, words)?).into_owned()));
    }
    bytes(stream, length).map(Ok)
}

fn number(stream: &mut TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// So many bytes. Memory grows as they come.
fn bytes(stream: &mut TcpStream, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    ensure(bytes.len() as u64 == length, || io::Error::from(ErrorKind::UnexpectedEof))?;
    Ok(bytes)
}

/// Joins elements of all, in the order of the ranks.
fn join(dtype: DType, by: Reduction, all: &[&[u8]], out: &mut [u8]) {
    let count = out.len() / dtype.size();
    let (mut sums, mut more) = (vec![0.0; count], vec![0.0; count]);
    for (rank, bytes) in all.iter().enumerate() {
        widen(dtype, bytes, if rank == 0 { &mut sums } else { &mut more });
        if rank > 0 {
            sums.iter_mut().zip(&more).for_each(|(sum, more)| *sum = by.combine(*sum, *more));
        }
    }
    narrow(dtype, &sums, out);
}

impl Ranks for Wire {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn rank(&self) -> usize {
        self.rank
    }

    unsafe fn exchange(&self, what: &Exchanged, read: *const u8, write: *mut u8) -> Result<()> {
        let Exchanged { collective, dtype, given } = what;
        let at = what.axis(&self.mesh)?;
        ensure(collective.exchange.other().is_none(), || {
            self.failed(format!("'{collective}': stages on CPUs pass data on over MPI; start them with mpirun"))
        })?;
        let (place, size) = (self.mesh.place(self.rank, at), dtype.size());
        let words = what.to_string();
        // SAFETY: the caller lends as many elements to be read.
        let own = unsafe { std::slice::from_raw_parts(read, given * size) };
        let frame = [&(words.len() as u64).to_le_bytes()[..], words.as_bytes(), own].concat();
        let frames = self.meet(frame, &|rank| self.mesh.group(rank, at))?;
        let mut all: Vec<&[u8]> = Vec::with_capacity(frames.len());
        for (frame, rank) in frames.iter().zip(self.mesh.group(self.rank, at)) {
            let parts = frame
                .split_first_chunk()
                .and_then(|(length, rest)| rest.split_at_checked(u64::from_le_bytes(*length).try_into().ok()?));
            let (other, elements) = parts.unwrap_or_default();
            ensure(other == words.as_bytes() && elements.len() == own.len(), || {
                let other = String::from_utf8_lossy(other);
                self.failed(format!("exchanges {words}, rank {rank} {other}"))
            })?;
            all.push(elements);
        }
        // SAFETY: the caller lends room for what this rank gets. What it gives was sent, and is read no more.
        let out = unsafe { std::slice::from_raw_parts_mut(write, what.got() * size) };
        let part = given / collective.ranks * size;
        let parts = || -> Vec<&[u8]> { all.iter().map(|bytes| &bytes[place * part..][..part]).collect() };
        match collective.exchange {
            Exchange::AllReduce(by) => join(*dtype, by, &all, out),
            Exchange::ReduceScatter(by) => join(*dtype, by, &parts(), out),
            Exchange::AllGather => out.copy_from_slice(&all.concat()),
            Exchange::AllToAll => out.copy_from_slice(&parts().concat()),
            Exchange::Send { .. } | Exchange::Recv { .. } => unreachable!("it was refused"),
        }
        Ok(())
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.meet(bytes.to_vec(), &|_| (0..self.mesh.ranks()).collect())
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}
