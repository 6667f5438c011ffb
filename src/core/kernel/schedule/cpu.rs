//! How the CPU computes a kernel.

use crate::dtype::DType;
use crate::error::ensure;
use crate::kernel::algorithm::{Cpu, Schedule, Way};
use crate::kernel::cpu::attention::{Attention, FEWEST_ROWS};
use crate::kernel::cpu::conv::LANES;
use crate::kernel::cpu::gemm::PANEL_ROWS;
use crate::kernel::cpu::{Product, TILE_BYTES, Windowed};
use crate::kernel::{Fold, Kernel, Template};
use crate::target::Target;

/// The time, in nanoseconds, below which one thread is faster than several.
const SHORT: f64 = 20e3;

/// Positions of an image up to which a product over the whole batch cuts its patches out of long rows.
const MOST_POSITIONS: usize = 128;

impl Cpu {
    fn threads_mut(&mut self) -> Option<&mut u32> {
        match self {
            Cpu::Loops => None,
            Cpu::Matmul { threads }
            | Cpu::Conv { threads, .. }
            | Cpu::Window { threads }
            | Cpu::Sort { threads }
            | Cpu::Attention { threads, .. } => Some(threads),
        }
    }

    /// Threads that share a kernel; 0 if it is cut as threads come.
    pub fn threads(mut self) -> u32 {
        self.threads_mut().map_or(0, |threads| *threads)
    }

    fn with_threads(mut self, count: u32) -> Cpu {
        self.threads_mut().into_iter().for_each(|threads| *threads = count);
        self
    }

    pub(super) fn check(&self, kernel: &Kernel, target: &Target) -> Result<(), String> {
        let threads = self.threads();
        if threads > target.threads || (threads == 0) != (*self == Cpu::Loops) {
            return Err(format!("expected 1 to {} threads, found {threads}", target.threads));
        }
        match (self, &kernel.template) {
            (Cpu::Loops, _) if way(kernel) == Cpu::Loops => Ok(()),
            (Cpu::Matmul { .. }, Template::MatMul | Template::MatMulBits { .. })
            | (Cpu::Sort { .. }, Template::Sort { .. }) => Ok(()),
            (Cpu::Window { .. }, Template::ConvTranspose { .. } | Template::Pool { .. }) => {
                Windowed::new(kernel).map(drop)
            }
            (Cpu::Conv { way, .. }, Template::Conv { groups, .. }) => {
                ensure(*way != Way::Depthwise || is_depthwise(kernel, *groups), || {
                    "a depthwise convolution has one input channel per group, and at most four outputs".to_owned()
                })?;
                let known = matches!(way, Way::Depthwise | Way::WeightsLeft);
                ensure(known || !kernel.reads[1].dtype.is_byte(), || {
                    "a convolution of bytes is depthwise, or has its weights on the left".to_owned()
                })?;
                ensure(*way != Way::WholeBatch || has_plain_taps(kernel), || {
                    "a whole batch reads data and weights in memory as they are, and the taps of a filter follow one another".to_owned()
                })?;
                Windowed::new(kernel).map(drop)
            }
            (Cpu::Conv { way, .. }, Template::ConvTranspose { groups, .. }) => {
                let is_known = match way {
                    Way::Depthwise => is_depthwise(kernel, *groups),
                    Way::WholeBatch => has_plain_taps(kernel),
                    Way::WeightsLeft | Way::WeightsRight => true,
                };
                ensure(is_known && turns(kernel), || {
                    "filters are flipped if they are computed and dense, and windows are one element apart".to_owned()
                })?;
                Windowed::new(kernel).map(drop)
            }
            (Cpu::Attention { strip, .. }, Template::Attention { fold, .. }) => {
                ensure(*fold == Fold::Softmax, || "it computes a softmax alone: scores have to be stored".to_owned())?;
                let floats = kernel.reads[..3].iter().all(|o| o.dtype == DType::F32 && !o.packed);
                ensure(floats, || "expected queries, keys and values of f32".to_owned())?;
                let most = Attention::new(kernel, *strip).m.next_multiple_of(PANEL_ROWS).max(PANEL_ROWS);
                ensure(strip.is_multiple_of(PANEL_ROWS) && (PANEL_ROWS..=most).contains(strip), || {
                    format!("expected strips of a multiple of {PANEL_ROWS} rows up to {most}, found {strip}")
                })
            }
            _ => Err(format!("the CPU has no such way for template '{}'", kernel.template.name())),
        }
    }
}

/// True if each group of a convolution has one input channel and few outputs.
fn is_depthwise(kernel: &Kernel, groups: usize) -> bool {
    let inputs = kernel.reads.first().and_then(|data| data.access.shape.get(1));
    inputs == Some(&groups) && kernel.shape.get(1).is_some_and(|o| o / groups.max(1) <= 4)
}

/// True if the weights of a convolution are not packed, and the taps of each filter lie one after another.
fn has_plain_taps(kernel: &Kernel) -> bool {
    let weights = &kernel.reads[1];
    !weights.packed && kernel.prologues.is_empty() && weights.access.has_dense_planes()
}

/// True if a transposed convolution may be computed as a convolution by its filters flipped.
fn turns(kernel: &Kernel) -> bool {
    let scheduled = |way| Kernel { schedule: Schedule::Cpu(Cpu::Conv { way, threads: 1 }), ..kernel.clone() };
    !kernel.reads[1].packed && Windowed::new(&scheduled(Way::WeightsLeft)).is_ok_and(|windowed| windowed.dense)
}

/// True if one product over all images is expected to be fastest: of computed weights at few positions, with windows of long rows, or with
/// images that do not fill a vector.
fn is_whole_batch(kernel: &Kernel, groups: usize, positions: usize) -> bool {
    let window = &kernel.reads[1].access.shape[2..];
    let (taps, several) = (window.iter().product::<usize>(), kernel.shape[0] > 1 || groups > 1);
    let is_long = window[2] >= 4 && taps >= LANES && positions <= MOST_POSITIONS;
    has_plain_taps(kernel) && (is_long || several && taps > 1 && positions < LANES)
}

/// The way of a convolution that is expected to be fastest.
fn conv(kernel: &Kernel, groups: usize) -> Way {
    if is_depthwise(kernel, groups) {
        return Way::Depthwise;
    }
    if kernel.reads[1].dtype.is_byte() {
        return Way::WeightsLeft;
    }
    let outputs = kernel.shape.get(1).map_or(0, |o| o / groups.max(1));
    let positions = kernel.shape.iter().skip(2).product();
    // The used share of the vectors, in percent.
    let fill = |len: usize| 100 * len / len.next_multiple_of(LANES).max(1);
    if is_whole_batch(kernel, groups, positions) {
        return Way::WholeBatch;
    }
    if positions <= 64 && fill(outputs) > fill(positions) + 10 { Way::WeightsRight } else { Way::WeightsLeft }
}

/// The strips of an attention whose scores, and what its products need, have room in a thread's tile memory.
fn strip(kernel: &Kernel) -> usize {
    let whole = Attention::new(kernel, PANEL_ROWS);
    let whole = Attention { strip: whole.m.next_multiple_of(PANEL_ROWS).max(PANEL_ROWS), ..whole };
    let room = |a: &Attention| a.slot_bytes() as u64 <= TILE_BYTES;
    if room(&whole) {
        return whole.strip;
    }
    // The scores of more rows would not fit, even alone.
    let most = TILE_BYTES as usize / (4 * PANEL_ROWS * whole.n.max(1)) + 1;
    let rows = (1..most.min(whole.strip / PANEL_ROWS)).rev().map(|panels| panels * PANEL_ROWS);
    let strips = rows.map(|strip| Attention { strip, ..whole });
    let fewest = FEWEST_ROWS.min(whole.strip);
    strips.take_while(|a| a.strip >= fewest).find(room).map_or(fewest, |a| a.strip)
}

/// The same way, by as many threads as are worth it.
fn shared(kernel: &Kernel, cpu: Cpu, target: &Target) -> Cpu {
    let one = cpu.with_threads(1);
    let alone = match one {
        Cpu::Loops => return one,
        Cpu::Sort { .. } => (kernel.template.def().invocations)(kernel) as f64,
        Cpu::Matmul { .. } => Product::new(kernel).nanoseconds(),
        Cpu::Attention { strip, .. } => Attention::new(kernel, strip).nanoseconds(),
        Cpu::Conv { .. } | Cpu::Window { .. } => {
            let scheduled = Kernel { schedule: Schedule::Cpu(one), ..kernel.clone() };
            Windowed::new(&scheduled).map_or(0.0, |w| w.nanoseconds())
        }
    };
    one.with_threads(if alone >= SHORT { target.threads.max(1) } else { 1 })
}

/// The way that is expected to be fastest, by one thread. A template without a way of its own is computed by loops.
fn way(kernel: &Kernel) -> Cpu {
    match &kernel.template {
        Template::MatMul | Template::MatMulBits { .. } => Cpu::Matmul { threads: 1 },
        Template::Conv { groups, .. } => Cpu::Conv { way: conv(kernel, *groups), threads: 1 },
        Template::ConvTranspose { groups, .. } if turns(kernel) => Cpu::Conv { way: conv(kernel, *groups), threads: 1 },
        Template::ConvTranspose { .. } | Template::Pool { .. } => Cpu::Window { threads: 1 },
        Template::Attention { .. } => Cpu::Attention { strip: strip(kernel), threads: 1 },
        Template::Sort { .. } => Cpu::Sort { threads: 1 },
        _ => Cpu::Loops,
    }
}

/// The way that is expected to be fastest.
pub(super) fn best(kernel: &Kernel, target: &Target) -> Cpu {
    shared(kernel, way(kernel), target)
}

/// Every way that may be worth a try.
pub(super) fn all(kernel: &Kernel, target: &Target) -> Vec<Cpu> {
    let best = best(kernel, target);
    let mut all = vec![best];
    match best {
        Cpu::Conv { threads, .. } => {
            let ways = [Way::Depthwise, Way::WeightsLeft, Way::WeightsRight, Way::WholeBatch];
            all.extend(ways.map(|way| Cpu::Conv { way, threads }));
            all.push(Cpu::Window { threads });
        }
        Cpu::Attention { strip, threads } => {
            let strips = [1, 2, 4, 8, 16, 32].map(|panels| panels * PANEL_ROWS);
            all.extend(strips.map(|strip| Cpu::Attention { strip, threads }));
            all.push(Cpu::Attention { strip: strip / 2 / PANEL_ROWS * PANEL_ROWS, threads });
        }
        Cpu::Loops | Cpu::Matmul { .. } | Cpu::Window { .. } | Cpu::Sort { .. } => {}
    }
    let both: Vec<Cpu> =
        all.iter().flat_map(|cpu| [1, target.threads].map(|threads| cpu.with_threads(threads))).collect();
    all.extend(both);
    all
}
