//! Schedules: which algorithm computes a kernel, as plain data.
//!
//! ```text
//! candidates   the legal schedules of a kernel on a target, best first: the only policy
//! check        legality: the rules that a schedule must keep to; the plan's checker asks it
//! ```
//! A kernel says what is computed, its schedule says how. Texts, library calls and the CPU's loops follow the schedule; none of them
//! chooses.

use super::algorithm::{Cpu, Cut, Elements, Rows, Schedule, Text, Tiling};
use super::call::Call;
use super::library;
use super::product::Product;
use super::{Kernel, Template, check_prologues, fits_i32, unfolds};
use crate::error::ensure;
use crate::target::{Family, Target};
use std::iter::once_with;

pub mod attention;
pub mod conv;
mod cpu;
pub mod map;
pub mod matmul;
pub mod prologue;
pub mod row;
mod split;
pub mod variants;

pub use split::{Split, split};

/// A launch of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Invocations of a workgroup.
    pub threads: u32,
    /// Workgroups; zero if there is nothing to compute.
    pub groups: u64,
    /// Neighbouring workgroups that share their memory.
    pub cluster: u32,
    /// Bytes of workgroup memory.
    pub shared: u64,
}

/// The needs of a schedule's launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of scratch memory.
    pub workspace: u64,
    /// Operands whose bytes no other argument of the launch may read or write: their binding holds vectors.
    pub own: Vec<usize>,
}

impl Schedule {
    /// The library call, if it is one.
    pub fn call(&self) -> Option<&Call> {
        if let Schedule::Library(call) = self { Some(call) } else { None }
    }

    /// The algorithm's name: a library, a row of [`super::render::KERNELS`], or a way of the CPU.
    pub fn name(&self, kernel: &Kernel, target: &Target) -> &'static str {
        match self {
            Schedule::Library(call) => call.library(),
            Schedule::Text(text) => text.name(&kernel.template, target.family),
            Schedule::Cpu(cpu) => cpu.name(),
            Schedule::Open if kernel.repeat().is_some() => "launches",
            Schedule::Open if kernel.collective().is_some() => "collective",
            Schedule::Open => "open",
        }
    }

    /// The algorithm's name and its numbers, in one line.
    pub fn words(&self, kernel: &Kernel, target: &Target) -> String {
        if let Some(repeat) = kernel.repeat() {
            return format!("{} launches, {} times", repeat.each.len(), repeat.times);
        }
        if let Some(collective) = kernel.collective() {
            return collective.to_string();
        }
        format!("{} {}", self.name(kernel, target), self.numbers()).trim_end().to_owned()
    }
}

impl Cpu {
    fn name(&self) -> &'static str {
        match self {
            Cpu::Loops => "loops",
            Cpu::Matmul { .. } => "matmul",
            Cpu::Conv { .. } => "conv",
            Cpu::Window { .. } => "window",
            Cpu::Attention { .. } => "attention",
            Cpu::Sort { .. } => "sort",
        }
    }
}

impl Text {
    /// The row of [`super::render::KERNELS`].
    pub fn name(&self, template: &Template, family: Family) -> &'static str {
        match self {
            Text::Elements(Elements::Vector { .. }) if matches!(template, Template::PoolGrad { .. }) => "pool_grad_vec",
            Text::Elements(Elements::Vector { .. }) => "map_vec",
            Text::Rows(Rows::Warps { .. }) => "row_warp",
            Text::Rows(Rows::Vectors { .. }) => "row_vec",
            Text::ConvDirect(_) => "conv_direct",
            Text::FiltersDirect(_) => "filters_direct",
            Text::Nothing | Text::Elements(_) | Text::Rows(_) => template.name(),
            Text::Matmul { tiling, .. }
            | Text::Conv { tiling, .. }
            | Text::ConvTranspose { tiling, .. }
            | Text::ConvFilters { tiling } => tiling.text(),
            Text::Attention(cut) => cut.text(family),
        }
    }

    /// The product that it tiles, if it tiles one. The kernel is one that the text computes.
    pub(super) fn product(&self, kernel: &Kernel) -> Option<(Product, Tiling)> {
        match (self, &kernel.template) {
            (&Text::Matmul { row_axis, transposed, tiling }, Template::MatMul) => {
                Some((Product::matmul(kernel, row_axis, transposed), tiling))
            }
            (&Text::Matmul { tiling, .. }, Template::MatMulBits { .. }) => Some((Product::of_bits(kernel), tiling)),
            (&Text::Conv { patches, tiling }, Template::Conv { groups, window, .. }) => {
                Some((Product::conv(kernel, *groups, window, patches), tiling))
            }
            (&Text::ConvTranspose { by_phase, tiling }, Template::ConvTranspose { groups, window }) => {
                Some((Product::conv_transpose(kernel, *groups, window, by_phase), tiling))
            }
            (&Text::ConvFilters { tiling }, Template::ConvFilters { groups, rows, window }) => {
                Some((Product::conv_filters(kernel, *groups, *rows, window), tiling))
            }
            _ => None,
        }
    }

    /// How the text is launched for a kernel that it computes.
    pub(super) fn launch(&self, kernel: &Kernel, target: &Target) -> Launch {
        match self {
            Text::Nothing => Launch { threads: 64, groups: 0, cluster: 1, shared: 0 },
            Text::Elements(elements) => elements.launch(kernel),
            Text::Rows(rows) => rows.launch(kernel, target),
            Text::ConvDirect(direct) => direct.launch(kernel),
            Text::FiltersDirect(direct) => direct.launch(kernel),
            Text::Attention(cut) => cut.launch(kernel),
            Text::Matmul { .. } | Text::Conv { .. } | Text::ConvTranspose { .. } | Text::ConvFilters { .. } => {
                let (product, tiling) = self.product(kernel).expect("the text computes the kernel");
                tiling.launch(&product)
            }
        }
    }

    fn check(&self, kernel: &Kernel, target: &Target) -> Result<(), String> {
        let empty = kernel.shape.contains(&0);
        match (self, &kernel.template) {
            (Text::Rows(rows), Template::Row { .. }) => rows.check(kernel, target)?,
            (_, Template::Row { .. }) => return Err("rows need a text of rows".into()),
            (Text::Nothing, _) => {
                return if empty { Ok(()) } else { Err(format!("there is something to compute: {}", kernel.shape)) };
            }
            (_, _) if empty => return Err("an empty index space needs no text".into()),
            (&Text::Matmul { row_axis, tiling, .. }, Template::MatMul) => {
                let first = super::product::first_row_axis(kernel);
                if !(first..=kernel.shape.len() - 2).contains(&row_axis) {
                    return Err(format!("expected rows from axis {first} on, found {row_axis}"));
                }
                self.check_tiling(kernel, tiling, target)?;
            }
            (&Text::Matmul { row_axis: 0, transposed: false, tiling }, Template::MatMulBits { .. }) => {
                self.check_tiling(kernel, tiling, target)?;
            }
            (&Text::Conv { patches, tiling }, Template::Conv { groups, window, .. }) => {
                if patches.is_some() && patches != conv::by_patches(kernel, *groups, window, target) {
                    return Err("its patches do not lie 16 bytes at a time".into());
                }
                self.check_tiling(kernel, tiling, target)?;
            }
            (
                Text::ConvDirect(direct),
                Template::Conv { groups, window, .. } | Template::ConvTranspose { groups, window },
            ) => {
                direct.check(kernel, *groups, window, target)?;
            }
            (Text::FiltersDirect(direct), Template::ConvFilters { window, .. }) => {
                direct.check(kernel, window, target)?;
            }
            (&Text::ConvTranspose { by_phase, tiling }, Template::ConvTranspose { window, .. }) => {
                ensure(conv::counts_phases(window), || "its window has too many phases".to_owned())?;
                ensure(!by_phase || conv::has_phases(window), || "it has one phase".to_owned())?;
                self.check_tiling(kernel, tiling, target)?;
            }
            (&Text::ConvFilters { tiling }, Template::ConvFilters { .. }) => {
                self.check_tiling(kernel, tiling, target)?;
            }
            (Text::Attention(cut), Template::Attention { .. }) => cut.check(kernel, target)?,
            (Text::Elements(elements), Template::Map | Template::PoolGrad { .. }) => elements.check(kernel, target)?,
            // Any other template has a text of one invocation per element.
            (Text::Elements(elements @ Elements::One { .. }), template) if !has_texts(template) => {
                elements.check(kernel, target)?;
            }
            _ => return Err(format!("the text does not compute template '{}'", kernel.template.name())),
        }
        let product = self.product(kernel).is_some();
        if let Some(prologue) = kernel.prologues.first().filter(|_| !product) {
            return Err(format!("it has no place for a prologue of operand {}", prologue.operand));
        }
        self.launch(kernel, target).check(target)
    }

    fn check_tiling(&self, kernel: &Kernel, tiling: Tiling, target: &Target) -> Result<(), String> {
        let (product, _) = self.product(kernel).ok_or("it is no product")?;
        tiling.check(&product, target)?;
        let slot = product.b.slot;
        if let Tiling::GemvVec4 { along_k, .. } = tiling {
            let axis = product.b.axes[usize::from(!along_k)].ok_or("its right operand has no such axis")?;
            let plain = kernel.reads[slot].dtype == crate::dtype::DType::F32 && kernel.prologue(slot).is_none();
            if !plain || !super::product::is_vectorizable(&kernel.reads[slot], axis, 4) {
                return Err("its right operand does not lie four elements at a time".into());
            }
        }
        if let Tiling::LargeVec4 { vectors, .. } = tiling {
            let reads = matches!(self, Text::Matmul { .. } | Text::Conv { patches: None, .. });
            ensure(reads && product.packing.is_none(), || "its operands are not read in vectors".to_owned())?;
            let lie = product.in_fours(kernel);
            let refused = vectors.iter().zip(lie).any(|(&wants, lies)| wants && !lies);
            ensure(!refused, || "an operand does not lie four elements at a time".to_owned())?;
        }
        Ok(())
    }

    /// Operands whose binding is one of vectors.
    fn own(&self, kernel: &Kernel, target: &Target) -> Vec<usize> {
        if target.family != Family::Wgpu {
            return Vec::new();
        }
        match self {
            Text::Attention(Cut::Decode(decode)) => (1..3).filter(|slot| decode.vectors[slot - 1]).collect(),
            Text::Matmul { tiling: Tiling::GemvVec4 { .. }, .. } => {
                self.product(kernel).map(|(product, _)| product.b.slot).into_iter().collect()
            }
            Text::Matmul { tiling: Tiling::LargeVec4 { vectors, .. }, .. }
            | Text::Conv { tiling: Tiling::LargeVec4 { vectors, .. }, .. } => {
                let sides = self.product(kernel).map(|(product, _)| [product.a.slot, product.b.slot]);
                sides.into_iter().flatten().zip(vectors).filter(|(_, wide)| **wide).map(|(slot, _)| slot).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Judges rules of a text, each by its words.
///
/// # Errors
/// The first that does not hold.
fn all_hold(text: &str, rules: &[(bool, &str)]) -> Result<(), String> {
    let broken = rules.iter().find(|(holds, _)| !holds);
    broken.map_or(Ok(()), |(_, what)| Err(format!("{text}: {what}")))
}

impl Launch {
    fn check(&self, target: &Target) -> Result<(), String> {
        let &Launch { threads, groups, shared, .. } = self;
        if threads == 0 || threads > target.max_workgroup {
            return Err(format!("expected workgroups of 1 to {} invocations, found {threads}", target.max_workgroup));
        }
        if shared > u64::from(target.max_shared) {
            return Err(format!("expected at most {} bytes of workgroup memory, found {shared}", target.max_shared));
        }
        // A grid of one dimension stops at the target's limit, and goes on in a second one.
        let rows = groups.div_ceil(u64::from(target.max_groups));
        if rows > u64::from(target.max_groups) || groups > i32::MAX as u64 {
            return Err(format!("{groups} workgroups are more than '{}' runs at once", target.name));
        }
        Ok(())
    }
}

/// Judges the schedule of a kernel, whose operands fit its template.
///
/// # Errors
/// The first rule that it breaks.
pub fn check(kernel: &Kernel, target: &Target) -> Result<Needs, String> {
    let (schedule, family) = (&kernel.schedule, target.family);
    validate(kernel, target)?;
    if let Some(repeat) = kernel.repeat() {
        repeat.kernels.iter().try_for_each(|inner| check(inner, target).map(drop))?;
        return Ok(Needs { workspace: kernel.workspace, own: Vec::new() });
    }
    if kernel.is_the_backends() {
        ensure(*schedule == Schedule::Open, || format!("schedule {schedule}: a collective has none"))?;
        return Ok(Needs { workspace: 0, own: Vec::new() });
    }
    let judge = || match (schedule, family) {
        (Schedule::Open, _) => Err("no algorithm is chosen".to_owned()),
        (Schedule::Cpu(cpu), Family::Cpu) => {
            cpu.check(kernel, target)?;
            Ok(Needs { workspace: workspace(kernel), own: Vec::new() })
        }
        (Schedule::Library(call), Family::Cuda) => match library::call(kernel, target) {
            Some(found) if found == call.clone().by(None) => {
                call.algorithm().map_or(Ok(()), |algorithm| split::check_algorithm(&found, algorithm))?;
                Ok(Needs { workspace: workspace(kernel), own: Vec::new() })
            }
            Some(_) => Err(format!("the call of {} is another one than the kernel's", call.library())),
            None => Err(format!("target '{}' has no call of {} for it", target.name, call.library())),
        },
        (Schedule::Text(text), Family::Wgpu | Family::Cuda) => {
            // Texts count elements in 32 bits.
            fits_i32(kernel)?;
            text.check(kernel, target)?;
            Ok(Needs { workspace: 0, own: text.own(kernel, target) })
        }
        _ => Err(format!("target '{}' does not run it", target.name)),
    };
    judge().map_err(|what| format!("schedule {schedule}: {what}"))
}

/// Judges a kernel apart from its schedule.
fn validate(kernel: &Kernel, target: &Target) -> Result<(), String> {
    check_prologues(kernel)?;
    kernel.validate(target.family)
}

/// Bytes of workspace that a kernel's schedule needs. Library calls can make use of more.
pub fn workspace(kernel: &Kernel) -> u64 {
    if kernel.is_the_backends() {
        return kernel.workspace;
    }
    match &kernel.schedule {
        Schedule::Library(call) => call.least_workspace(),
        Schedule::Cpu(_) => super::cpu::workspace(kernel),
        Schedule::Open | Schedule::Text(_) => 0,
    }
}

/// Checks that schedules can be made for a kernel: it is well-formed, and a text can count its elements or a library computes it.
fn is_choosable(kernel: &Kernel, target: &Target) -> Result<(), String> {
    validate(kernel, target)?;
    if target.family != Family::Cpu && library::call(kernel, target).is_none() {
        fits_i32(kernel)?;
    }
    Ok(())
}

/// Chooses the schedule of a kernel: the first of its [`candidates`]. `own` tells which operands' bytes no other argument of the launch
/// reads or writes.
///
/// # Errors
/// When the target has no algorithm for it.
pub fn choose(kernel: &Kernel, target: &Target, own: &dyn Fn(usize) -> bool) -> Result<Schedule, String> {
    is_choosable(kernel, target)?;
    let best = all(kernel, target, own).next().ok_or("it has no algorithm")?;
    let best = Kernel { schedule: best, ..kernel.clone() };
    let first = check(&best, target).map(|_| best.schedule);
    first.or_else(|why| candidates(kernel, target, own).into_iter().next().ok_or(why))
}

/// A kernel that is launched by itself, with the schedule that [`choose`] gives it and the workspace that this needs.
///
/// # Errors
/// When the target has no algorithm for it.
pub fn scheduled(kernel: &Kernel, target: &Target) -> Result<Kernel, String> {
    let mut kernel = kernel.clone();
    kernel.schedule = choose(&kernel, target, &|_| true)?;
    kernel.workspace = workspace(&kernel);
    Ok(kernel)
}

/// The schedules of a kernel that are legal on a target, best first.
pub fn candidates(kernel: &Kernel, target: &Target, own: &dyn Fn(usize) -> bool) -> Vec<Schedule> {
    if is_choosable(kernel, target).is_err() {
        return Vec::new();
    }
    let mut legal: Vec<Schedule> = Vec::new();
    for schedule in all(kernel, target, own) {
        let scheduled = Kernel { schedule, ..kernel.clone() };
        let needs = check(&scheduled, target);
        if needs.is_ok_and(|needs| needs.own.iter().all(|&slot| own(slot))) && !legal.contains(&scheduled.schedule) {
            legal.push(scheduled.schedule);
        }
    }
    legal
}

/// A list whose later parts are made when they are asked for.
type Lazy<'a, T> = Box<dyn Iterator<Item = T> + 'a>;

/// Every schedule that may be worth a try. The one that is expected to be fastest is the first. Some may be illegal on a target that lacks
/// what other devices have.
fn all<'a>(kernel: &'a Kernel, target: &'a Target, own: &'a dyn Fn(usize) -> bool) -> Lazy<'a, Schedule> {
    if target.family == Family::Cpu {
        return Box::new(cpu::all(kernel, target).into_iter().map(Schedule::Cpu));
    }
    let mut texts = texts(kernel, target, own).map(Schedule::Text);
    let call = library::call(kernel, target);
    let prefers_text = call.as_ref().is_none_or(|call| split::prefers_text(kernel, call, target));
    let first = if prefers_text { texts.next() } else { None };
    Box::new(first.into_iter().chain(call.map(Schedule::Library)).chain(texts))
}

/// True if a template has texts that do more per invocation than one element, and none that does just that.
fn has_texts(template: &Template) -> bool {
    use Template::{Attention, Conv, ConvFilters, MatMul, MatMulBits};
    matches!(template, MatMul | MatMulBits { .. } | Conv { .. } | ConvFilters { .. } | Attention { .. })
}

/// Every text that may be worth a try, the best first.
fn texts<'a>(kernel: &'a Kernel, target: &'a Target, own: &'a dyn Fn(usize) -> bool) -> Lazy<'a, Text> {
    if kernel.shape.contains(&0) && !matches!(kernel.template, Template::Row { .. }) {
        return Box::new([Text::Nothing].into_iter());
    }
    let ones = || map::ones(kernel, target).into_iter().map(Text::Elements);
    match &kernel.template {
        Template::Map => Box::new(map::all(kernel, target).into_iter().map(Text::Elements)),
        Template::Row { .. } => Box::new(row::all(kernel, target).into_iter().map(Text::Rows)),
        Template::Attention { .. } => Box::new(attention::all(kernel, target, own).into_iter().map(Text::Attention)),
        Template::MatMul => {
            let (first, chosen) = matmul::rows(kernel, target);
            let ways = [(first, chosen), (first, !chosen), (kernel.shape.len() - 2, chosen)];
            Box::new(ways.into_iter().flat_map(move |(row_axis, transposed)| {
                let product = Product::matmul(kernel, row_axis, transposed);
                let tilings = matmul::all(kernel, &product, target, own).into_iter();
                tilings.map(move |tiling| Text::Matmul { row_axis, transposed, tiling })
            }))
        }
        Template::MatMulBits { .. } => {
            let tilings = matmul::of_bits(kernel, &Product::of_bits(kernel), target, own);
            Box::new(tilings.into_iter().map(|tiling| Text::Matmul { row_axis: 0, transposed: false, tiling }))
        }
        Template::Conv { groups, window, .. } => {
            let weights = &kernel.reads[1].access.shape;
            let is_product = unfolds(kernel.shape[1] / (*groups).max(1), weights[1..].iter().product());
            let direct = move || conv::all_direct(kernel, *groups, window, target).into_iter().map(Text::ConvDirect);
            let best = if is_product || kernel.reads[0].dtype.is_byte() { None } else { direct().next() };
            let found = conv::by_patches(kernel, *groups, window, target);
            let products = [found, None].into_iter().flat_map(move |patches| {
                let product = Product::conv(kernel, *groups, window, patches);
                let tilings = matmul::all(kernel, &product, target, own).into_iter();
                tilings.map(move |tiling| Text::Conv { patches, tiling })
            });
            Box::new(best.into_iter().chain(products).chain(once_with(direct).flatten()))
        }
        Template::ConvTranspose { groups, window } => {
            let [out, input] = [kernel.shape[1], kernel.reads[0].access.shape[1]].map(|n| n / (*groups).max(1));
            let direct = move || conv::all_direct(kernel, *groups, window, target).into_iter().map(Text::ConvDirect);
            let best = if conv::unfolds_transposed(out, input, window) { None } else { direct().next() };
            let products = conv::counts_phases(window).then(|| conv::transposed(kernel, *groups, window, target));
            let products = products.into_iter().flatten().flat_map(move |(by_phase, product)| {
                let tilings = matmul::all(kernel, &product, target, own).into_iter();
                tilings.map(move |tiling| Text::ConvTranspose { by_phase, tiling })
            });
            Box::new(best.into_iter().chain(products).chain(ones()))
        }
        Template::ConvFilters { groups, rows, window } => {
            let is_product = unfolds(kernel.shape[1] / (*groups).max(1), kernel.shape[2..].iter().product());
            let direct = move || conv::filters(kernel, *rows, window, target).into_iter().map(Text::FiltersDirect);
            let best = if is_product { None } else { direct().next() };
            let tilings = once_with(move || {
                let product = Product::conv_filters(kernel, *groups, *rows, window);
                matmul::all(kernel, &product, target, own).into_iter().map(|tiling| Text::ConvFilters { tiling })
            });
            Box::new(best.into_iter().chain(tilings.flatten()).chain(once_with(direct).flatten()))
        }
        Template::PoolGrad { .. } => {
            let vectors = map::of_channels(kernel, target).into_iter().map(Text::Elements);
            Box::new(vectors.chain(once_with(ones).flatten()))
        }
        _ => Box::new(ones()),
    }
}
