//! Launches as graphs, one unless there are loops: kernels compiled together, library calls prepared, the plan's streams captured as CUDA's.

use super::api::{Driver, Refusal};
use super::blas::{Algorithm, Blas, Product};
use super::dnn::{Convolution, CudnnHandle};
use super::dnn_attention::{Attended, Plan};
use super::nccl::Meeting;
use super::{Cuda, failed};
use crate::bound::{Texts, bind};
use cudarc::driver::sys::{
    CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraphExec, CUgraphNode, CUstream, CUstream_flags,
    CUstreamCaptureMode,
};
use plimsoll_backend::conflicts::Conflicts;
use plimsoll_backend::work::Work;
use plimsoll_backend::{KernelId, Launch, RecordId, Slice};
use plimsoll_core::error::{Error, Result};
use plimsoll_core::kernel::UNROLLED;
use plimsoll_core::kernel::call::Call;
use plimsoll_core::kernel::render::Source;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, c_void};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A launch that is ready.
pub(super) enum Step {
    /// Function, grid, block, bytes of workgroup memory that its text does not declare, addresses.
    Kernel {
        function: CUfunction,
        groups: [u32; 3],
        size: u32,
        shared: u32,
        pointers: Vec<CUdeviceptr>,
    },
    Product(Product),
    Convolution(Convolution),
    Attention(Attended),
    Meeting(Meeting),
    /// A kernel without elements.
    Nothing,
}

/// A launch on its way into a record.
struct Piece<S> {
    /// The number of the launch that it is, or belongs to.
    number: usize,
    stream: u32,
    /// Launches of other streams that must be over before it starts.
    waits: Vec<usize>,
    /// The bytes that it touches, each for reading only or not.
    touches: Vec<(Slice, bool)>,
    step: S,
}

/// The order of steps.
enum Order {
    /// Per step, the steps before it that it waits for.
    Apart(Vec<Vec<usize>>),
    /// In streams.
    Streams(Vec<Turn>),
}

/// Where a step runs: its stream and, as numbers of steps, what it waits for in others.
struct Turn {
    stream: u32,
    waits: Vec<usize>,
}

/// Of more launches it takes too long to find out which are apart.
const MOST_APART: usize = 8192;

/// An algorithm that was chosen for a kernel's call.
#[derive(Clone, Default)]
pub(super) struct Chosen {
    product: Option<Algorithm>,
    convolution: Option<u32>,
    attention: Option<Rc<Plan>>,
}

/// The form of a launch before its kernel's text is compiled.
enum Bound {
    Ready(Step),
    /// The number of the text, and the addresses of the arguments.
    Text(usize, Vec<CUdeviceptr>),
}

/// A graph that can be launched.
struct Graph {
    driver: Arc<Driver>,
    exec: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handle is given back once. Of a graph that still runs, the driver keeps what it needs until it is over.
        let _ = unsafe { self.driver.cuGraphExecDestroy(self.exec) };
    }
}

/// Events at which the device notes its time.
struct Marks {
    driver: Arc<Driver>,
    events: Vec<CUevent>,
}

impl Marks {
    /// Has an event noted, each time that what is captured runs.
    fn record(&self, event: CUevent, stream: CUstream) -> Result<(), Refusal> {
        /// `CU_EVENT_RECORD_EXTERNAL`: who waits for it is outside the capture.
        const EXTERNAL: u32 = 1;
        // SAFETY: event and stream live.
        unsafe { self.driver.cuEventRecordWithFlags(event, stream, EXTERNAL) }
    }

    /// The times from each event to the next.
    fn times(&self) -> Result<Vec<Duration>, Refusal> {
        let between = self.events.windows(2).map(|pair| {
            let mut milliseconds = 0.0;
            // SAFETY: both events were noted, and waited for.
            unsafe { self.driver.cuEventElapsedTime(&mut milliseconds, pair[0], pair[1]) }?;
            Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
        });
        between.collect()
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        for event in &self.events {
            // SAFETY: each is given back once. Nobody could be told of a refusal.
            let _ = unsafe { self.driver.cuEventDestroy_v2(*event) };
        }
    }
}

/// A part of a record.
enum Part {
    /// Steps with the numbers of the launches that they belong to, as one graph. A single text is launched as it is.
    Steps { numbers: Vec<usize>, steps: Vec<Step>, graph: Option<Graph> },
    /// The parts of a loop.
    Repeat(u64, Vec<Part>),
}

pub(super) struct Record {
    parts: Vec<Part>,
    /// Per launch, its blocks and threads; empty for a library call.
    pub(super) notes: Vec<String>,
    /// True if it exchanges data with other ranks.
    meets: bool,
    /// True if it has run. Drivers take memory at the first run.
    ran: Cell<bool>,
}

impl Part {
    fn has_graph(&self) -> bool {
        match self {
            Part::Steps { graph, .. } => graph.is_some(),
            Part::Repeat(_, of) => of.iter().any(Part::has_graph),
        }
    }

    /// True if it exchanges data with other ranks.
    fn meets(&self) -> bool {
        match self {
            Part::Steps { steps, .. } => steps.iter().any(|step| matches!(step, Step::Meeting(_))),
            Part::Repeat(_, of) => of.iter().any(Part::meets),
        }
    }
}

/// Loops of few launches as rounds of several steps, so that a graph holds more than one step, and then the steps that are left.
fn unrolled(work: Vec<Work<Launch>>) -> Vec<Work<Launch>> {
    let unroll = |part: Work<Launch>| match part {
        Work::Repeat { times, of } if of.iter().all(|part| matches!(part, Work::Launch(_))) => {
            let round = (UNROLLED / of.len().max(1) as u64).clamp(1, times.max(1));
            let copies = |count: u64| (0..count).flat_map(|_| of.iter().cloned()).collect::<Vec<_>>();
            let mut parts = if times == round { copies(round) } else { Vec::new() };
            if times > round {
                parts.push(Work::Repeat { times: times / round, of: copies(round) });
                parts.extend(copies(times % round));
            }
            parts
        }
        Work::Repeat { times, of } => vec![Work::Repeat { times, of: unrolled(of) }],
        launch => vec![launch],
    };
    work.into_iter().flat_map(unroll).collect()
}

/// A library's handle, made when it is first needed. A library that refuses is not asked again.
fn opened<'a, L, H>(
    handle: &'a mut Option<H>,
    library: &mut Option<Arc<L>>,
    name: &str,
    make: impl FnOnce(Arc<L>) -> Result<H, Refusal>,
) -> Result<&'a H, String> {
    let Some(found) = library else { return Err(format!("{name} is not here")) };
    if handle.is_none() {
        match make(Arc::clone(found)) {
            Ok(made) => *handle = Some(made),
            Err(refusal) => {
                tracing::warn!("{name} is not used: {refusal}");
                *library = None;
                return Err(refusal.to_string());
            }
        }
    }
    Ok(handle.as_ref().expect("it has just been made"))
}

impl Cuda {
    /// Compiles what launches need, and makes graphs of them: one, unless there are loops.
    pub(super) fn make_record(&mut self, launches: &[Launch]) -> Result<Record> {
        let mut texts = Texts::default();
        let mut bound: Vec<Work<Piece<Bound>>> = Vec::with_capacity(launches.len());
        let mut notes = Vec::with_capacity(launches.len());
        for (number, work) in self.loops.expand(launches).into_iter().enumerate() {
            let mut last = String::new();
            let mut choose = |launch: Launch| {
                let (step, note) = self.choose(&launch, &mut texts)?;
                last = note;
                let reads = self.kernels[launch.kernel.0 as usize].reads.len();
                let touches = launch.args.iter().enumerate().map(|(slot, at)| (*at, slot < reads)).collect();
                Ok::<_, Error>(Piece { number, stream: launch.stream, waits: launch.waits, touches, step })
            };
            let is_loop = work.iter().any(|part| matches!(part, Work::Repeat { .. }));
            for part in unrolled(work) {
                bound.push(part.try_map(&mut choose)?);
            }
            notes.push(if is_loop { String::new() } else { last });
        }
        let sources: Vec<&Source> = texts.all.iter().filter(|text| text.has_work()).map(|text| &text.source).collect();
        self.build(&sources.iter().map(|source| source.text.as_str()).collect::<Vec<_>>())?;
        for Source { text, shared, .. } in sources.into_iter().filter(|source| source.shared > 0) {
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as i32;
            // SAFETY: the function's module is loaded until the backend is dropped.
            unsafe { self.driver.cuFuncSetAttribute(self.functions[text], most, *shared as i32) }.map_err(failed)?;
        }
        let step = |bound: Bound| match bound {
            Bound::Ready(step) => step,
            Bound::Text(number, pointers) => {
                let &Source { ref text, size, groups, shared, .. } = &texts.all[number].source;
                Step::Kernel { function: self.functions[text], groups, size, shared, pointers }
            }
        };
        let mut made = |Piece { number, stream, waits, touches, step: bound }: Piece<Bound>| {
            Ok::<_, Error>(Piece { number, stream, waits, touches, step: step(bound) })
        };
        let work = bound.into_iter().map(|part| part.try_map(&mut made)).collect::<Result<Vec<_>>>()?;
        self.measure(None);
        let parts = self.parts(work).map_err(failed)?;
        self.measure(Some(|taken| &mut taken.graphs));
        // Calls are prepared before a plan's segments are allocated: the bytes since then count, too.
        self.measure(None);
        let meets = parts.iter().any(Part::meets);
        Ok(Record { parts, notes, meets, ran: Cell::new(false) })
    }

    /// The parts of a record: neighbouring launches are one graph.
    fn parts(&mut self, work: Vec<Work<Piece<Step>>>) -> Result<Vec<Part>, Refusal> {
        let (mut parts, mut run) = (Vec::new(), Vec::new());
        for part in work {
            match part {
                Work::Launch(piece) => run.push(piece),
                Work::Repeat { times, of } => {
                    parts.extend(self.steps(std::mem::take(&mut run))?);
                    parts.push(Part::Repeat(times, self.parts(of)?));
                }
            }
        }
        parts.extend(self.steps(run)?);
        Ok(parts)
    }

    /// Launches as one part, if there are any. What they wait for is among them, or over before the part begins.
    fn steps(&mut self, run: Vec<Piece<Step>>) -> Result<Option<Part>, Refusal> {
        let last = |number: usize, before: usize| run[..before].iter().rposition(|piece| piece.number == number);
        // One stream is as many as there are launches that touch nothing of each other's. Several are the plan's own, and ranks meet in one order.
        let is_free = |piece: &Piece<Step>| piece.stream == 0 && !matches!(piece.step, Step::Meeting(_));
        let order = if run.len() <= MOST_APART && run.iter().all(is_free) {
            let mut conflicts = Conflicts::default();
            Order::Apart(run.iter().map(|piece| conflicts.next(piece.touches.iter().copied())).collect())
        } else {
            let turn = |(at, piece): (usize, &Piece<Step>)| {
                let waits = piece.waits.iter().filter_map(|&number| last(number, at)).collect();
                Turn { stream: piece.stream, waits }
            };
            Order::Streams(run.iter().enumerate().map(turn).collect())
        };
        let (numbers, steps): (Vec<usize>, Vec<Step>) = run.into_iter().map(|piece| (piece.number, piece.step)).unzip();
        // A graph spares the host what a library does before it launches.
        let is_called =
            steps.iter().any(|step| matches!(step, Step::Product(_) | Step::Convolution(_) | Step::Attention(_)));
        let graph = if steps.len() > 1 || is_called { Some(self.capture(&steps, &order)?) } else { None };
        Ok((!steps.is_empty()).then_some(Part::Steps { numbers, steps, graph }))
    }

    fn run_parts(&self, parts: &[Part]) -> Result<(), Refusal> {
        parts.iter().try_for_each(|part| match part {
            // SAFETY: the graph's addresses lie in segments that stand as long as the record.
            Part::Steps { graph: Some(graph), .. } => unsafe { self.driver.cuGraphLaunch(graph.exec, self.stream) },
            Part::Steps { steps, graph: None, .. } => steps.iter().try_for_each(|step| self.launch(step, self.stream)),
            Part::Repeat(times, of) => (0..*times).try_for_each(|_| self.run_parts(of)),
        })
    }

    /// The step of a launch, a library call or a text, and a note on it.
    fn choose(&mut self, launch: &Launch, texts: &mut Texts) -> Result<(Bound, String)> {
        let id = launch.kernel;
        let kernel = self.kernels.get(id.0 as usize).ok_or_else(|| failed(format!("there is no kernel {}", id.0)))?;
        // Memory that the launch does not write is read-only.
        let reads = kernel.reads.len();
        let (bindings, places) =
            bind(kernel, launch, failed, |at, high, size| self.place(at, high, size), |slot, _| slot < reads)?;
        if let Some(call) = kernel.schedule.call().cloned() {
            let step = self.call(id, &call, launch)?;
            return Ok((Bound::Ready(step), String::new()));
        }
        if let Some(noted) = self.exchanges.get(&id) {
            let is_empty = bindings.of.iter().all(Option::is_none);
            let step = if is_empty { Step::Nothing } else { Step::Meeting(self.meeting(noted, launch)?) };
            return Ok((Bound::Ready(step), String::new()));
        }
        let kernel = &self.kernels[id.0 as usize];
        let number = texts.number(id, kernel, bindings, &self.info.target)?;
        let text = &texts.all[number];
        let Source { size, groups, .. } = &text.source;
        if !text.has_work() {
            return Ok((Bound::Ready(Step::Nothing), "nothing to compute".into()));
        }
        let pointers = places.into_iter().map(|(pointer, _)| pointer).collect();
        Ok((Bound::Text(number, pointers), format!("{groups:?} blocks of {size} threads")))
    }

    /// The address of a slice, if it is aligned and reaches an element's number.
    fn place(&self, at: Slice, high: u64, size: u64) -> Result<Option<CUdeviceptr>> {
        let pointer = self.resolve(at)?;
        let fits = high < at.bytes / size && pointer.is_multiple_of(self.info.target.alignment);
        Ok(fits.then_some(pointer))
    }

    /// Compiles texts that are new, as programs side by side, and loads them.
    fn build(&mut self, texts: &[&str]) -> Result<()> {
        let mut seen = HashSet::new();
        let fresh: Vec<&str> =
            texts.iter().copied().filter(|text| !self.functions.contains_key(*text) && seen.insert(*text)).collect();
        if fresh.is_empty() {
            return Ok(());
        }
        self.measure(None);
        for (share, names, image) in self.compiler.build_all(&fresh)? {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is machine code of this device's architecture, which the driver checks; it copies it.
            unsafe { self.driver.cuModuleLoadData(&mut module, image.as_ptr().cast()) }.map_err(failed)?;
            self.modules.push(module);
            for (text, name) in share.into_iter().zip(names) {
                let mut function = std::ptr::null_mut();
                let name = CString::new(name).expect("names of templates have no zero byte");
                // SAFETY: the module is loaded until the backend is dropped.
                unsafe { self.driver.cuModuleGetFunction(&mut function, module, name.as_ptr()) }.map_err(failed)?;
                self.functions.insert(text.to_owned(), function);
            }
        }
        self.measure(Some(|taken| &mut taken.modules));
        Ok(())
    }

    fn launch(&self, step: &Step, stream: CUstream) -> Result<(), Refusal> {
        let (function, [x, y, z], size, shared, pointers) = match step {
            Step::Kernel { function, groups, size, shared, pointers } => (*function, *groups, *size, *shared, pointers),
            Step::Product(product) => return product.launch(stream),
            Step::Convolution(convolution) => return convolution.launch(stream),
            Step::Attention(attention) => return attention.launch(stream),
            Step::Meeting(meeting) => return meeting.launch(&self.driver, stream),
            Step::Nothing => return Ok(()),
        };
        let mut params: Vec<*mut c_void> = pointers.iter().map(|p| std::ptr::from_ref(p).cast_mut().cast()).collect();
        // SAFETY: the function takes as many pointers as the launch binds; each reaches no further than its slice, which `bind` has found
        // within its segment; segments outlive the records that use them.
        unsafe {
            self.driver.cuLaunchKernel(
                function,
                x,
                y,
                z,
                size,
                1,
                1,
                shared,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    /// Launches each step into its stream. The first stream is the one of all other work.
    fn launch_streams(&self, steps: &[Step], orders: &[Turn], events: &mut Vec<CUevent>) -> Result<(), Refusal> {
        let driver = &self.driver;
        let handle = |stream: u32| if stream == 0 { self.stream } else { self.others[stream as usize - 1] };
        let mut mark = |stream: u32| -> Result<CUevent, Refusal> {
            let mut event = std::ptr::null_mut();
            // SAFETY: the caller destroys the event; the stream lives as long as the backend.
            unsafe {
                driver.cuEventCreate(&mut event, 2)?; // without times
                events.push(event);
                driver.cuEventRecord(event, handle(stream))?;
            }
            Ok(event)
        };
        // SAFETY: stream and event live.
        let wait = |stream: u32, event: CUevent| unsafe { driver.cuStreamWaitEvent(handle(stream), event, 0) };
        let most = orders.iter().map(|o| o.stream).max().unwrap_or(0);
        if most > 0 {
            let start = mark(0)?;
            (1..=most).try_for_each(|stream| wait(stream, start))?;
        }
        let waited: HashSet<usize> = orders.iter().flat_map(|o| o.waits.iter().copied()).collect();
        let mut over: HashMap<usize, CUevent> = HashMap::new();
        for (number, (step, Turn { stream, waits })) in steps.iter().zip(orders).enumerate() {
            waits.iter().try_for_each(|other| wait(*stream, over[other]))?;
            self.launch(step, handle(*stream))?;
            if waited.contains(&number) {
                over.insert(number, mark(*stream)?);
            }
        }
        for stream in 1..=most {
            let end = mark(stream)?;
            wait(0, end)?;
        }
        Ok(())
    }

    /// Launches each step behind those that it waits for, while a graph is captured.
    fn launch_apart(&self, steps: &[Step], waits: &[Vec<usize>]) -> Result<(), Refusal> {
        /// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`
        const SET: u32 = 1;
        // Per step, the nodes at whose end it is over.
        let mut ends: Vec<Vec<CUgraphNode>> = Vec::with_capacity(steps.len());
        let behind = |nodes: &mut Vec<CUgraphNode>| {
            // A step of no work stands for those before it, which others may name, too.
            nodes.sort_unstable();
            nodes.dedup();
            // SAFETY: the nodes are those of the graph that is captured, which reads as many.
            unsafe { self.driver.cuStreamUpdateCaptureDependencies(self.stream, nodes.as_mut_ptr(), nodes.len(), SET) }
        };
        let mut open = vec![true; steps.len()];
        for (step, waits) in steps.iter().zip(waits) {
            let mut nodes: Vec<CUgraphNode> = waits.iter().flat_map(|&other| ends[other].iter().copied()).collect();
            behind(&mut nodes)?;
            self.launch(step, self.stream)?;
            let (mut status, mut list, mut count) = (0, std::ptr::null(), 0);
            // SAFETY: the driver sets each; the list holds until the next call, and is copied.
            let own = unsafe {
                let unasked = (std::ptr::null_mut(), std::ptr::null_mut());
                self.driver.cuStreamGetCaptureInfo_v2(
                    self.stream,
                    &mut status,
                    unasked.0,
                    unasked.1,
                    &mut list,
                    &mut count,
                )?;
                if count == 0 { Vec::new() } else { std::slice::from_raw_parts(list, count).to_vec() }
            };
            waits.iter().for_each(|&other| open[other] = false);
            ends.push(own);
        }
        // The graph is over when all are.
        let last = ends.iter().zip(open).filter(|(_, open)| *open).flat_map(|(nodes, _)| nodes.iter().copied());
        behind(&mut last.collect())
    }

    /// The steps as a graph, in their order.
    fn capture(&mut self, steps: &[Step], order: &Order) -> Result<Graph, Refusal> {
        let streams = match order {
            Order::Apart(_) => 0,
            Order::Streams(turns) => turns.iter().map(|turn| turn.stream as usize).max().unwrap_or(0),
        };
        while self.others.len() < streams {
            let mut stream = std::ptr::null_mut();
            // SAFETY: the context is current; the stream is given back when the backend is dropped.
            unsafe { self.driver.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }?;
            self.others.push(stream);
        }
        let driver = &self.driver;
        // Libraries may load code or take memory at a first call, which a capture does not allow. The results of these calls are
        // computed again before anybody reads them.
        let calls = || steps.iter().filter(|step| !matches!(step, Step::Kernel { .. }));
        calls().try_for_each(|step| self.launch(step, self.stream))?;
        self.sync()?;
        let mut events = Vec::new();
        let made = self.captured(|| match order {
            Order::Apart(waits) => self.launch_apart(steps, waits),
            Order::Streams(turns) => self.launch_streams(steps, turns, &mut events),
        });
        // SAFETY: the events are ours, and order nothing but the capture.
        let destroyed = events.into_iter().map(|event| unsafe { driver.cuEventDestroy_v2(event) });
        let destroyed = destroyed.fold(Ok(()), Result::and);
        let made = made.and_then(|made| destroyed.map(|()| made))?;
        // SAFETY: it has just been made.
        unsafe { driver.cuGraphUpload(made.exec, self.stream) }?;
        self.sync()?;
        Ok(made)
    }

    /// What is launched into the first stream, and into streams that it waits for, as a graph.
    fn captured(&self, launch: impl FnOnce() -> Result<(), Refusal>) -> Result<Graph, Refusal> {
        let driver = &self.driver;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the streams are ours and nothing else is captured on them; a capture that has begun is ended on every path, and the
        // graph is not needed once it is instantiated.
        unsafe {
            driver.cuStreamBeginCapture_v2(self.stream, mode)?;
            let launched = launch();
            let ended = driver.cuStreamEndCapture(self.stream, &mut graph);
            let made = launched.and(ended).and_then(|()| driver.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            // Whatever fails, the rest is given back.
            let given_back = if graph.is_null() { Ok(()) } else { driver.cuGraphDestroy(graph) };
            let made = made.map(|()| Graph { driver: Arc::clone(driver), exec });
            made.and_then(|made| given_back.map(|()| made))
        }
    }

    /// How long each launch of a record takes, one after another in one graph, by the device's clock. `None` of a record with loops, which is
    /// several graphs, or with exchanges, which wait for others.
    pub(super) fn time_each(&self, record: RecordId) -> Result<Option<Vec<Duration>>> {
        let Some(Record { parts, notes, meets: false, .. }) = self.records.get(record) else { return Ok(None) };
        let [Part::Steps { numbers, steps, .. }] = &parts[..] else { return Ok(None) };
        // Marks with nothing between them tell what a mark takes by itself.
        const EMPTY: usize = 8;
        let mut times = vec![Duration::ZERO; notes.len()];
        let marks = self.marks(EMPTY + steps.len() + 1).map_err(failed)?;
        let graph = self.captured(|| {
            marks.events[..EMPTY].iter().try_for_each(|event| marks.record(*event, self.stream))?;
            marks.record(marks.events[EMPTY], self.stream)?;
            steps.iter().zip(&marks.events[EMPTY + 1..]).try_for_each(|(step, event)| {
                self.launch(step, self.stream).and_then(|()| marks.record(*event, self.stream))
            })
        });
        let graph = graph.map_err(failed)?;
        // SAFETY: its addresses lie in segments that stand as long as the record.
        unsafe { self.driver.cuGraphLaunch(graph.exec, self.stream) }.and_then(|()| self.sync()).map_err(failed)?;
        let between = marks.times().map_err(failed)?;
        let empty = between[..EMPTY].iter().min().copied().unwrap_or_default();
        for (number, time) in numbers.iter().zip(&between[EMPTY..]) {
            times[*number] += time.saturating_sub(empty);
        }
        Ok(Some(times))
    }

    /// Events that note the device's time.
    fn marks(&self, count: usize) -> Result<Marks, Refusal> {
        let mut marks = Marks { driver: Arc::clone(&self.driver), events: Vec::with_capacity(count) };
        for _ in 0..count {
            let mut event = std::ptr::null_mut();
            // SAFETY: the context is current; the event is destroyed with the others.
            unsafe { self.driver.cuEventCreate(&mut event, 0) }?;
            marks.events.push(event);
        }
        Ok(marks)
    }

    /// A launch of a kernel's library call. If the library has no algorithm for it, that is an error, because the plan fixed the schedule.
    fn call(&mut self, id: KernelId, call: &Call, launch: &Launch) -> Result<Step> {
        let kernel = &self.kernels[id.0 as usize];
        let slots = kernel.reads.len() + kernel.writes.len();
        let workspace = match launch.args.get(slots) {
            Some(at) => (self.resolve(*at)?, at.bytes),
            None => (0, 0),
        };
        let pointers = launch.args[..slots].iter().map(|at| self.resolve(*at)).collect::<Result<Vec<_>>>()?;
        self.prepare_call(id, call, &pointers, workspace)
    }

    /// The step of a call on these addresses. A kernel's first call chooses the algorithm, which depends on no address.
    pub(super) fn prepare_call(
        &mut self,
        id: KernelId,
        call: &Call,
        pointers: &[CUdeviceptr],
        workspace: (CUdeviceptr, u64),
    ) -> Result<Step> {
        let mut chosen = self.chosen.get(&id).cloned().unwrap_or_default();
        let fresh = matches!(call, Call::Attention(_)) && chosen.attention.is_none();
        let handles = (self.blas.is_some(), self.cudnn.is_some());
        self.measure(None);
        let step = match call {
            Call::MatMul(product) => opened(&mut self.blas, &mut self.lt, call.library(), Blas::new)
                .and_then(|blas| blas.prepare(product, pointers, workspace, &mut chosen.product).map(Step::Product)),
            Call::Conv(convolution) => {
                let stream = self.stream;
                opened(&mut self.cudnn, &mut self.dnn, call.library(), |dnn| CudnnHandle::new(dnn, stream)).and_then(
                    |handle| {
                        handle.prepare(convolution, pointers, workspace, &mut chosen.convolution).map(Step::Convolution)
                    },
                )
            }
            Call::Attention(attention) => {
                let stream = self.stream;
                opened(&mut self.cudnn, &mut self.dnn, call.library(), |dnn| CudnnHandle::new(dnn, stream)).and_then(
                    |handle| handle.attend(attention, pointers, workspace, &mut chosen.attention).map(Step::Attention),
                )
            }
        };
        self.chosen.insert(id, chosen);
        // A library opens when it is first called, and compiles an attention when that is.
        if fresh || handles != (self.blas.is_some(), self.cudnn.is_some()) {
            self.measure(Some(|taken| &mut taken.libraries));
        }
        step.map_err(|why| {
            let name = self.kernels[id.0 as usize].template.name();
            let library = call.library();
            failed(format!("kernel '{name}' is planned as a call of {library}: {why}; a device opened without libraries has no such calls"))
        })
    }

    /// Launches the steps of a record.
    pub(super) fn run(&mut self, record: RecordId) -> Result<()> {
        let record = self.records.get(record);
        let record = record.ok_or_else(|| failed("replay of a record whose memory is gone"))?;
        if let Some(group) = self.group.as_ref().filter(|_| record.meets) {
            group.is_whole().map_err(failed)?;
            group.begin();
        }
        self.run_parts(&record.parts).map_err(failed)?;
        if record.parts.iter().any(Part::has_graph) && !record.ran.replace(true) {
            self.sync().map_err(failed)?;
            self.measure(Some(|taken| &mut taken.graphs));
        }
        Ok(())
    }
}
