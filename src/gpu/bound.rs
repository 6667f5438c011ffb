//! Launches bound to the texts of their kernels: arguments over the same bytes share a binding, and each text is rendered once.

#[cfg(any(feature = "wgpu", feature = "web"))]
use plimsoll_backend::SegmentId;
#[cfg(any(feature = "wgpu", feature = "web"))]
use plimsoll_backend::segments::Segments;
use plimsoll_backend::{KernelId, Launch, Slice};
use plimsoll_core::error::{Error, Result};
use plimsoll_core::kernel::Kernel;
use plimsoll_core::kernel::render::{self, Bindings, Dialect, Source};
use plimsoll_core::target::{Family, Target};
use std::collections::HashMap;
#[cfg(any(feature = "wgpu", feature = "web"))]
use std::collections::HashSet;

/// The text of a kernel for some bindings.
pub(super) struct Text {
    /// The template's name.
    pub name: &'static str,
    pub source: Source,
    /// The bindings that are for reading only.
    pub modes: Vec<bool>,
}

impl Text {
    pub fn has_work(&self) -> bool {
        self.source.groups != [0; 3]
    }
}

/// Texts, each rendered once.
#[derive(Default)]
pub(super) struct Texts {
    pub all: Vec<Text>,
    numbers: HashMap<(KernelId, Bindings), usize>,
}

impl Texts {
    /// The number of a kernel's text for these bindings.
    pub fn number(&mut self, id: KernelId, kernel: &Kernel, bindings: Bindings, target: &Target) -> Result<usize> {
        let key = (id, bindings);
        if let Some(&number) = self.numbers.get(&key) {
            return Ok(number);
        }
        let dialect = if target.family == Family::Cuda { Dialect::Cuda } else { Dialect::Wgsl };
        let source = render::render(kernel, target, &key.1, dialect)?;
        self.all.push(Text { name: kernel.template.name(), source, modes: key.1.read_only.clone() });
        self.numbers.insert(key, self.all.len() - 1);
        Ok(self.all.len() - 1)
    }
}

/// Finds the arguments of a launch that share a binding, and the place and the slice of each binding. `place` finds the place of a slice,
/// or `None` if the slice does not suit the device or does not reach the highest element that the kernel touches, whose number is given with
/// an element's bytes. `read_only` tells if a binding may be one for reading only, as far as an operand and its slice say.
pub(super) fn bind<P: PartialEq>(
    kernel: &Kernel,
    launch: &Launch,
    failed: fn(String) -> Error,
    place: impl Fn(Slice, u64, u64) -> Result<Option<P>>,
    read_only: impl Fn(usize, Slice) -> bool,
) -> Result<(Bindings, Vec<(P, Slice)>)> {
    let slots = kernel.reads.len() + kernel.writes.len();
    if launch.args.len() < slots {
        return Err(failed(format!("a launch has {} arguments, its kernel {slots}", launch.args.len())));
    }
    let mut bindings = Bindings { of: Vec::new(), read_only: Vec::new() };
    let mut places: Vec<(P, Slice)> = Vec::new();
    for (slot, &at) in launch.args[..slots].iter().enumerate() {
        let Some(high) = reaches(kernel, slot) else {
            bindings.of.push(None);
            continue;
        };
        let found = place(at, high.unwrap_or(u64::MAX), kernel.operand(slot).dtype.size() as u64)?;
        let found = found.ok_or_else(|| {
            let name = kernel.template.name();
            failed(format!("kernel '{name}': operand {slot} does not fit {} bytes", at.bytes))
        })?;
        let same = places.iter().position(|(place, _)| *place == found);
        let binding = same.unwrap_or(places.len());
        if same.is_none() {
            places.push((found, at));
            bindings.read_only.push(true);
        }
        places[binding].1.bytes = places[binding].1.bytes.max(at.bytes);
        bindings.read_only[binding] &= read_only(slot, at);
        bindings.of.push(Some(binding));
    }
    Ok((bindings, places))
}

/// The highest element of its slice that a kernel touches through an operand. `None` if it touches nothing; `Some(None)` if an element is
/// before the slice or beyond counting.
fn reaches(kernel: &Kernel, slot: usize) -> Option<Option<u64>> {
    if kernel.reach(slot).shape.contains(&0) {
        return None;
    }
    let span = kernel.reach(slot).span().filter(|&(low, _)| low >= 0);
    Some(span.and_then(|(_, high)| u64::try_from(high).ok()))
}

/// Launches with their texts.
#[cfg(any(feature = "wgpu", feature = "web"))]
#[derive(Default)]
pub(super) struct Bound {
    pub texts: Texts,
    /// Per launch: the number of its text, and the slices of its bindings; `None` if it has nothing to do.
    pub launches: Vec<Option<(usize, Vec<Slice>)>>,
}

/// A device that binds ranges of buffers, one buffer for each segment.
#[cfg(any(feature = "wgpu", feature = "web"))]
pub(super) struct Buffers<'a, M> {
    pub target: &'a Target,
    pub kernels: &'a [Kernel],
    pub segments: &'a Segments<M>,
    /// Makes its errors.
    pub failed: fn(String) -> Error,
}

/// The buffer that holds a slice, which begins with a word. All words of it are the slice's own.
#[cfg(any(feature = "wgpu", feature = "web"))]
pub(super) fn buffer<M>(segments: &Segments<M>, at: Slice, failed: fn(String) -> Error) -> Result<&M> {
    if !at.offset.is_multiple_of(4) {
        return Err(failed(format!("{} bytes at {} begin within a word", at.bytes, at.offset)));
    }
    segments.find(Slice { bytes: at.bytes.next_multiple_of(4), ..at }).map_err(failed)
}

#[cfg(any(feature = "wgpu", feature = "web"))]
impl<M> Buffers<'_, M> {
    /// Finds the arguments of a launch that share a binding, and the slice of each binding.
    fn bind(&self, kernel: &Kernel, launch: &Launch, written: &HashSet<SegmentId>) -> Result<(Bindings, Vec<Slice>)> {
        let place = |at: Slice, high: u64, size: u64| {
            buffer(self.segments, at, self.failed)?;
            let fits = high < at.bytes / size && at.bytes <= self.target.max_binding;
            Ok(fits.then_some((at.segment, at.offset)))
        };
        let read_only = |_, at: Slice| !written.contains(&at.segment);
        let (bindings, places) = bind(kernel, launch, self.failed, place, read_only)?;
        if places.len() > self.target.max_bindings as usize {
            let (name, most) = (kernel.template.name(), self.target.max_bindings);
            let what = format!("kernel '{name}' binds {} buffers, the device allows {most}", places.len());
            return Err((self.failed)(what));
        }
        Ok((bindings, places.into_iter().map(|(_, at)| at).collect()))
    }

    fn kernel(&self, launch: &Launch) -> Result<&Kernel> {
        let kernel = self.kernels.get(launch.kernel.0 as usize);
        kernel.ok_or_else(|| (self.failed)(format!("there is no kernel {}", launch.kernel.0)))
    }

    /// Renders the texts of launches.
    pub fn bind_all(&self, launches: &[Launch]) -> Result<Bound> {
        let mut written = HashSet::new();
        for launch in launches {
            let kernel = self.kernel(launch)?;
            let writes = launch.args.iter().skip(kernel.reads.len()).take(kernel.writes.len());
            written.extend(writes.map(|at| at.segment));
        }
        let mut bound = Bound::default();
        for launch in launches {
            let kernel = self.kernel(launch)?;
            let (bindings, slices) = self.bind(kernel, launch, &written)?;
            let number = bound.texts.number(launch.kernel, kernel, bindings, self.target)?;
            bound.launches.push(bound.texts.all[number].has_work().then_some((number, slices)));
        }
        Ok(bound)
    }
}
