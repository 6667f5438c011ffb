//! How a product of matrices is tiled on GPUs.

use super::{Launch, all_hold};
use crate::dtype::DType;
use crate::kernel::algorithm::Tiling;
use crate::kernel::product::{Product, first_row_axis, is_vectorizable};
use crate::kernel::space::BYTES;
use crate::kernel::{Kernel, Template};
use crate::target::{FEW_GROUPS, Family, REGISTERS, Target};

/// Halves in 16 bytes.
pub const EIGHT: usize = 8;
/// The most rows of a product that is limited by reading the right operand. A `gemv` text reads it once.
pub(in crate::kernel) const FEW_ROWS: usize = 4;
/// Invocations of a workgroup of `gemv_vec4`.
pub(in crate::kernel) const VEC4_THREADS: usize = 256;
/// Invocations of a workgroup of `gemv`.
pub(in crate::kernel) const GEMV_THREADS: usize = 64;
/// Rows and columns of a tile of `matmul_large`.
pub(in crate::kernel) const LARGE: usize = 128;
/// Slices of the inner axis that pass through workgroup memory at a time.
pub(in crate::kernel) const STEP: usize = 16;
/// The same where `matmul_large` reads vectors.
const LARGE_STEPS: [usize; 2] = [STEP, 2 * STEP];
/// From this inner extent on, the invocations of a workgroup share the inner axis of a product of few tiles.
const DEEP: usize = 128;
/// So few tiles of 16-bit floats leave most multiprocessors idle. From this inner extent on, that costs more than tensor cores save.
const FEW_TILES: usize = 32;
const LONG: usize = 1 << 12;
/// Rows and columns of a tile whose inner axis warps share.
pub const SLICE_TILE: usize = 32;
/// Rows and columns of a tile that two groups of four warps multiply by the instructions of compute capability 9.0 (wgmma), as
/// `shaders/matmul_wgmma.cu` has them.
pub const WGMMA_TILE: [usize; 2] = [128, 256];
/// Bytes of workgroup memory in which four stages of such tiles lie, of 64 slices of the inner axis each.
pub const WGMMA_BYTES: usize = 4 * 64 * (WGMMA_TILE[0] + WGMMA_TILE[1]) * 2;

/// Invocations that compute sums by a column of numbers of few bits together.
pub(in crate::kernel) const BITS_TEAM: usize = 32;
/// Rows for which each number is widened once.
const BITS_ROWS: [usize; 4] = [1, 2, 4, 8];
/// The same on tensor cores.
const BITS_MMA_ROWS: [usize; 4] = [8, 16, 32, 64];

/// An array in workgroup memory: its name in the text, its number of elements, and their bytes.
pub(in crate::kernel) type Shared = (&'static str, usize, usize);

/// The part of a product that a workgroup computes, and its means.
pub(in crate::kernel) struct Workgroup {
    /// Rows and columns of the result.
    pub(in crate::kernel) tile: [usize; 2],
    /// Invocations.
    pub(in crate::kernel) threads: usize,
    /// Arrays that they share.
    pub(in crate::kernel) shared: Vec<Shared>,
}

impl Tiling {
    /// The text, a row of [`crate::kernel::render::KERNELS`].
    pub fn text(&self) -> &'static str {
        match self {
            Tiling::Gemv { .. } => "gemv",
            Tiling::GemvVec4 { .. } => "gemv_vec4",
            Tiling::GemvVec16b { .. } => "gemv_vec16b",
            Tiling::Tiles { .. } => "matmul",
            Tiling::Large | Tiling::LargeVec4 { .. } => "matmul_large",
            Tiling::SliceK { .. } => "matmul_slice_k",
            Tiling::Regs { .. } => "matmul_regs",
            Tiling::SliceKWarp { .. } => "matmul_slice_k_warp",
            Tiling::Mma { .. } => "matmul_mma",
            Tiling::MmaAsync { .. } => "matmul_mma_async",
            Tiling::Wgmma => "matmul_wgmma",
            Tiling::Bytes { .. } => "matmul_bytes",
            Tiling::BytesMma { .. } => "matmul_bytes_mma",
            Tiling::Bits { .. } => "matmul_bits",
            Tiling::BitsMma { .. } => "matmul_bits_mma",
        }
    }

    /// True for the left and for the right operand, in this order, if a large tile reads them in vectors.
    pub(in crate::kernel) fn vectors(&self) -> [bool; 2] {
        if let Tiling::LargeVec4 { vectors, .. } = *self { vectors } else { [false; 2] }
    }

    /// A workgroup of a product that the text computes.
    pub(in crate::kernel) fn workgroup(&self, p: &Product) -> Workgroup {
        let size = p.element.size();
        let group = |tile, threads, shared: &[Shared]| Workgroup { tile, threads, shared: shared.to_vec() };
        match *self {
            Tiling::Gemv { slices } => {
                group([p.m, GEMV_THREADS / slices], GEMV_THREADS, &[("partial", GEMV_THREADS, 16)])
            }
            Tiling::GemvVec4 { slices, along_k } => {
                let columns = if along_k { 1 } else { 4 } * (VEC4_THREADS / slices);
                group([p.m, columns], VEC4_THREADS, &[("partial", VEC4_THREADS * p.m, 16)])
            }
            Tiling::GemvVec16b { across: 0, threads, .. } => group([p.m, 4], threads, &[]),
            Tiling::GemvVec16b { across, threads, .. } => {
                let columns = across * (BYTES / size);
                group([p.m, columns], threads, &[("partial", threads / 32 * columns, 4)])
            }
            Tiling::Tiles { tile: [rows, columns] } => {
                let shared = [("tile_a", rows * STEP, 4), ("tile_b", columns * STEP, 4)];
                group([rows, columns], rows * columns / 16, &shared)
            }
            Tiling::Large => Tiling::LargeVec4 { vectors: [false; 2], step: STEP }.workgroup(p),
            Tiling::LargeVec4 { step, .. } => {
                group([LARGE; 2], 256, &["tile_a", "tile_b"].map(|tile| (tile, LARGE / 4 * step, 16)))
            }
            Tiling::SliceK { tile, depth } => {
                let slices = Tiling::groups_of(tile);
                let (step, pitch) = (slices * depth, tile / 4 + 1);
                group([tile; 2], 256, &[("tile", (2 * step * pitch).max(slices * tile * tile / 4), 16)])
            }
            Tiling::Regs { tile: [rows, columns] } => {
                let bytes = if p.element == DType::F64 { 8 } else { 4 };
                let stage = |lines: usize| 2 * REGS_STEP * (lines + 4);
                let shared = [("tile_a", stage(rows), bytes), ("tile_b", stage(columns), bytes)];
                group([rows, columns], rows * columns / 64, &shared)
            }
            Tiling::SliceKWarp { rows } => {
                let tile = 8 * (3 * 8 * (rows + SLICE_TILE)).max(rows * SLICE_TILE);
                group([rows, SLICE_TILE], 256, &[("tile", tile, 4)])
            }
            Tiling::Mma { tile: [rows, columns] } => {
                let half = |along_k: bool, lines: usize| 2 * if along_k { lines * 40 } else { 32 * (lines + 8) };
                let shared = [("tile_a", half(p.a.along_k, rows), size), ("tile_b", half(p.b.along_k, columns), size)];
                group([rows, columns], 256, &shared)
            }
            Tiling::MmaAsync { tile: [rows, columns] } => {
                let (stages, sums) = (3 * (rows + columns) * 32, 2 * (rows / 2) * (columns + 8));
                group([rows, columns], 128, &[("tile", stages.max(sums), size)])
            }
            Tiling::Bytes { tile: [rows, columns] } => {
                let shared = [("tile_a", rows * STEP, 4), ("tile_b", columns * STEP, 4)];
                group([rows, columns], rows * columns / 16, &shared)
            }
            Tiling::BytesMma { tile: [rows, columns] } => {
                let half = |lines: usize| 2 * lines * BYTES_PITCH;
                group([rows, columns], 256, &[("tile_a", half(rows), 4), ("tile_b", half(columns), 4)])
            }
            Tiling::Wgmma => group(WGMMA_TILE, 256, &[("tile", WGMMA_BYTES / size, size)]),
            Tiling::Bits { rows, threads } => group([rows, threads / BITS_TEAM], threads, &[("sums", threads, 4)]),
            Tiling::BitsMma { rows, columns, warps } => {
                group([rows, columns], 32 * warps, &[("sums", warps * rows * columns, 4)])
            }
        }
    }

    /// Workgroups that a multiprocessor shall hold at once: the compiler gives invocations no more registers than that allows.
    pub(in crate::kernel) fn at_once(&self, p: &Product) -> u32 {
        match self {
            // A value of `f64` takes two registers.
            Tiling::Regs { .. } if p.element != DType::F64 => {
                (REGISTERS / (REGS_EACH * self.workgroup(p).threads)).max(1) as u32
            }
            _ => 1,
        }
    }

    /// Groups of a workgroup's 256 invocations that share the inner axis of a square tile, with 4 by 4 sums each.
    pub(in crate::kernel) fn groups_of(tile: usize) -> usize {
        256 * 16 / (tile * tile)
    }

    /// The launch of a product that the text computes.
    pub(in crate::kernel) fn launch(&self, p: &Product) -> Launch {
        let Workgroup { tile: [rows, columns], threads, shared } = self.workgroup(p);
        let rows = if p.m <= FEW_ROWS && rows == p.m { 1 } else { p.m.div_ceil(rows.max(1)) };
        let groups = (p.batch as u64).saturating_mul((rows as u64).saturating_mul(p.n.div_ceil(columns.max(1)) as u64));
        let shared = shared.into_iter().map(|(_, len, size)| (len * size).next_multiple_of(16) as u64).sum();
        Launch { threads: threads as u32, groups, cluster: 1, shared }
    }

    /// True if the text computes the product on the target.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub(in crate::kernel) fn check(&self, p: &Product, target: &Target) -> Result<(), String> {
        let power = |n: usize, most: usize| n.is_power_of_two() && n <= most;
        let wgsl = (target.family != Family::Cuda, "it is written for WGSL");
        let cuda = (target.family == Family::Cuda, "it is written for CUDA");
        let half = (p.element.is_half() && p.is_uniform, "it multiplies 16-bit floats of one type");
        let few = (p.m <= FEW_ROWS, "it has at most 4 rows");
        let async_copy = p.copies_async && target.compute >= 80;
        let copies = (async_copy, "its operands are not copied 16 bytes at a time on this target");
        let tile = |known: bool| (known, "it has no such tile");
        let bits = (p.packing.is_some(), "its right operand is no numbers of few bits");
        let multiplies_bytes = matches!(self, Tiling::Bytes { .. } | Tiling::BytesMma { .. });
        let element = if multiplies_bytes { "it multiplies bytes" } else { "it multiplies no bytes" };
        all_hold(self.text(), &[(p.element.is_byte() == multiplies_bytes, element)])?;
        let rules = match *self {
            Tiling::Bytes { tile: found } => vec![tile(TILES.contains(&found))],
            Tiling::BytesMma { tile: found } => {
                vec![cuda, (target.compute >= 80, "it is for compute capability 8.0"), tile(BYTES_MMA.contains(&found))]
            }
            Tiling::Gemv { slices } => vec![few, (power(slices, 32), "expected a power of two up to 32 slices")],
            Tiling::GemvVec4 { slices, along_k } => vec![
                wgsl,
                few,
                (power(slices, 128), "expected a power of two up to 128 slices"),
                (p.b.axes[usize::from(!along_k)].is_some(), "its right operand has no such axis"),
            ],
            Tiling::GemvVec16b { threads, across, unroll } => {
                let known = match across {
                    0 => threads == 128,
                    2..=32 => power(threads, 512) && threads >= 64 && power(across, 32) && matches!(unroll, 4 | 8),
                    _ => false,
                };
                vec![
                    cuda,
                    few,
                    (p.b.is_vectorizable && p.packing.is_none(), "its right operand does not lie 16 bytes at a time"),
                    (p.b.along_k == (across == 0), "its 16 bytes lie along the other axis"),
                    (known, "expected 64 to 512 invocations, 2 to 32 side by side, 4 or 8 slices at a time"),
                ]
            }
            Tiling::Tiles { tile: found } => vec![tile(TILES.contains(&found))],
            Tiling::Large => Vec::new(),
            Tiling::LargeVec4 { vectors, step } => vec![
                wgsl,
                (vectors.contains(&true), "it reads an operand in vectors"),
                (LARGE_STEPS.contains(&step), "expected 16 or 32 slices at a time"),
            ],
            Tiling::SliceK { tile: found, depth } => vec![tile(SLICES_K.contains(&(found, depth)))],
            Tiling::Regs { tile: found } => vec![cuda, tile(REGS.iter().any(|(tile, _)| *tile == found))],
            Tiling::SliceKWarp { rows } => {
                let f32s = (p.element == DType::F32, "it multiplies f32");
                vec![cuda, copies, f32s, tile(matches!(rows, 16 | SLICE_TILE))]
            }
            Tiling::Mma { tile: found } => vec![cuda, half, tile(MMA.contains(&found) && found[0] == found[1])],
            Tiling::MmaAsync { tile: found } => vec![cuda, half, copies, tile(MMA.contains(&found))],
            Tiling::Wgmma => {
                let here = (target.compute == 90, "it is for compute capability 9.0");
                let whole = (!p.is_guarded, "it reads beyond its operands' axes");
                let widened = p.packing.is_some() && p.a.is_vectorizable && p.b.is_vectorizable;
                vec![
                    cuda,
                    half,
                    if widened { here } else { copies },
                    here,
                    whole,
                    (p.b.along_k, "its right operand does not lie along the inner axis"),
                ]
            }
            Tiling::BitsMma { rows, columns, warps } => vec![
                cuda,
                half,
                (target.compute >= 80, "it is for compute capability 8.0"),
                bits,
                (p.packing.is_some_and(|packing| packing.bits != 2), "its numbers have 2 bits"),
                (p.a.is_vectorizable && p.b.is_vectorizable, "its operands do not lie 16 bytes at a time"),
                (BITS_MMA_ROWS.contains(&rows), "expected 8, 16, 32 or 64 rows"),
                (matches!(warps, 2 | 4 | 8), "expected 2, 4 or 8 warps"),
                (matches!(columns, 16 | 32 | 64), "expected 16, 32 or 64 columns"),
            ],
            Tiling::Bits { rows, threads } => vec![
                bits,
                (p.packing.is_some_and(|packing| packing.by_words), "its numbers are read one by one"),
                (BITS_ROWS.contains(&rows), "expected 1, 2, 4 or 8 rows"),
                (threads >= BITS_TEAM && power(threads, 256), "expected workgroups of 32 to 256 invocations"),
            ],
        };
        all_hold(self.text(), &rules)
    }
}

/// True if a product of 16-bit floats of `m` by `k` and `k` by `n` is large enough for the tensor cores of a CUDA device.
pub fn suits_tensor_cores([m, k, n]: [usize; 3]) -> bool {
    m > 16 && n > 16 && k >= 16
}

/// True if sixteen rows or columns are worth tensor cores, too: those of a long inner axis, such as gradients of filters.
fn is_deep(p: &Product) -> bool {
    p.m.min(p.n) >= 16 && p.m.max(p.n) > 16 && p.k >= DEEP
}

/// Tiles of `matmul`.
const TILES: [[usize; 2]; 3] = [[16, 64], [32, 32], [64, 64]];
/// Slices of the inner axis that pass through workgroup memory at a time in `matmul_regs`.
pub(in crate::kernel) const REGS_STEP: usize = 8;
/// Tiles of `matmul_regs`, and the share of the largest one's rate that multiprocessors reach with each, in percent. Smaller tiles read more of
/// both operands per product.
const REGS: [([usize; 2], usize); 7] = [
    ([128, 128], 100),
    ([64, 128], 95),
    ([128, 64], 95),
    ([64, 64], 88),
    ([32, 128], 80),
    ([128, 32], 80),
    ([32, 64], 70),
];
/// Registers that an invocation of `matmul_regs` needs for its sums, its operands and their addresses. On an H100, a step of ResNet-50 in f32
/// took 53.3 ms without a bound, 51.0 with this one, and 55.3 with 128 registers, which are too few.
const REGS_EACH: usize = 168;
/// Tiles and depths of `matmul_slice_k`.
const SLICES_K: [(usize, usize); 2] = [(32, 8), (16, 4)];
const SLICE_K: Tiling = Tiling::SliceK { tile: SLICES_K[0].0, depth: SLICES_K[0].1 };
/// Tiles of the texts for tensor cores.
const MMA: [[usize; 2]; 3] = [[128, 128], [64, 128], [64, 64]];

/// The widest head whose products with others' are mostly results, and the fewest of them that occupy a device.
pub(super) const HEAD: usize = 64;
pub(super) const MANY_HEADS: usize = 64;

/// Tiles of `matmul_bytes_mma`.
const BYTES_MMA: [[usize; 2]; 2] = [[128, 128], [64, 64]];
/// Words from one line of a tile of `matmul_bytes_mma` to the next: 16, and four that spread lines over all banks.
pub(in crate::kernel) const BYTES_PITCH: usize = 20;

/// The axis of a matrix product from which on batch axes lengthen the rows, and true if it is transposed. The thinner side is the rows.
pub(super) fn rows(kernel: &Kernel, target: &Target) -> (usize, bool) {
    let shape = &kernel.shape;
    let batch = shape.len() - 2;
    let first = first_row_axis(kernel);
    // The right operand of a few rows comes from the caches of CUDA devices; more workgroups ask for it sooner.
    let few = shape[first..=batch].iter().product::<usize>() <= FEW_ROWS;
    let separate = target.family == Family::Cuda && kernel.reads[0].dtype.size() > 2 && few;
    let rows = if separate { batch } else { first };
    let m: usize = shape[rows..=batch].iter().product();
    let n = shape[batch + 1];
    (rows, n < m && n <= 16)
}

/// True if the target's workgroups may have `threads` invocations and share `bytes` bytes.
fn has_room(target: &Target, threads: usize, bytes: usize) -> bool {
    target.max_workgroup as usize >= threads && target.max_shared as usize >= bytes
}

/// The tiling that is expected to be fastest. `own` tells which operands' buffers no other argument of the launch reads or writes.
pub(super) fn best(kernel: &Kernel, p: &Product, target: &Target, own: &dyn Fn(usize) -> bool) -> Tiling {
    let cuda = target.family == Family::Cuda;
    if p.element.is_byte() {
        return of_bytes(p, target).remove(0);
    }
    if p.m <= FEW_ROWS {
        if cuda && p.b.is_vectorizable && !matches!(kernel.template, Template::Conv { .. }) {
            return gemv_vec16b(p);
        }
        return vec4(kernel, p, target, own).unwrap_or_else(|| gemv(p));
    }
    if let Some(tiling) = for_cuda(kernel, p, target).filter(|_| cuda && p.n > FEW_ROWS) {
        return tiling;
    }
    let tiles = |size: usize| p.batch * p.tiles(size, size);
    let busy = 4 * tiles(LARGE) >= 3 * FEW_GROUPS;
    if busy && has_room(target, 256, 2 * STEP * LARGE * 4) {
        // On an H200, vectors change a product's time by -10 to +17 %, as its shape has it: they are left to measurements.
        return Tiling::Large;
    }
    if p.k >= DEEP && has_room(target, 256, 16 << 10) {
        // Sixteen groups if larger tiles would leave much of a large device idle.
        let (tile, depth) = SLICES_K[usize::from(tiles(32) < FEW_GROUPS)];
        return Tiling::SliceK { tile, depth };
    }
    let tile = if p.m <= 16 {
        [16, 64]
    } else if tiles(64) >= 64 && target.max_workgroup >= 256 {
        [64, 64]
    } else {
        [32, 32]
    };
    Tiling::Tiles { tile }
}

/// The tiling of a product of more than a few rows and columns by a text for CUDA, if one is worth it.
fn for_cuda(kernel: &Kernel, p: &Product, target: &Target) -> Option<Tiling> {
    let tiles = |size: usize| p.batch * p.tiles(size, size);
    let (is_transposed, window) = match &kernel.template {
        Template::ConvTranspose { window, .. } => (true, Some(window)),
        Template::Conv { window, .. } | Template::ConvFilters { window, .. } => (false, Some(window)),
        _ => (false, None),
    };
    let has_taps = window.is_some_and(|window| window.kernel.iter().any(|&extent| extent > 1));
    let copies = p.copies_async && target.compute >= 80;
    match p.element {
        DType::F16 | DType::BF16 if p.is_uniform && (suits_tensor_cores([p.m, p.k, p.n]) || is_deep(p)) => {
            // Where the inner axis is short, writing the result is most of the work: small tiles write while others multiply.
            if copies && p.k <= HEAD && p.batch >= MANY_HEADS && p.m.min(p.n) > 64 {
                return Some(Tiling::MmaAsync { tile: [64, 64] });
            }
            if copies && p.b.along_k && !p.is_guarded && fill_wgmma([p.batch, p.m, p.n], target) {
                return Some(Tiling::Wgmma);
            }
            // Groups of a few channels would leave most of a tile empty, and their patches are read element by element.
            if !copies && has_taps && p.batch > 1 && p.m <= 32 && p.k >= DEEP {
                return Some(SLICE_K);
            }
            // Few tiles of a long inner axis, such as the gradient of filters: the invocations of a workgroup share the axis instead.
            if !copies && tiles(64) <= FEW_TILES && p.k >= LONG {
                return None;
            }
            let size = if tiles(128) >= 96 && (copies || p.m.min(p.n) > 64) { 128 } else { 64 };
            Some(if copies {
                // The larger tile reads columns that are not there.
                let size = if p.n <= 64 { 64 } else { size };
                Tiling::MmaAsync { tile: [if p.m <= 64 { 64 } else { size }, size] }
            } else {
                Tiling::Mma { tile: [size; 2] }
            })
        }
        DType::F64 if p.m > 16 && p.n > 16 => Some(regs(p, target)),
        DType::F32 if copies && p.is_uniform && few_tiles(tiles(SLICE_TILE) as u64, target) => {
            let full = p.m > 16 && tiles(SLICE_TILE) >= target.multiprocessors as usize;
            Some(Tiling::SliceKWarp { rows: if full { SLICE_TILE } else { SLICE_TILE / 2 } })
        }
        _ if tiles(LARGE) < 96 => None,
        // What lies under several taps is addressed element by element. Many small workgroups hide that better than few large ones: on an
        // H100, gradients of filters of 3 x 3 take half the time of `matmul_regs`, or less.
        DType::F32 if has_taps && p.k >= DEEP => Some(SLICE_K),
        DType::F32 if is_transposed => Some(Tiling::Large),
        _ => Some(regs(p, target)),
    }
}

/// The tile of `matmul_regs` that is expected to be fastest. The multiprocessor with the most tiles decides.
fn regs(p: &Product, target: &Target) -> Tiling {
    let time = |&([rows, columns], rate): &([usize; 2], usize)| {
        let tiles = p.batch.saturating_mul(p.tiles(rows, columns));
        let most = tiles.div_ceil((target.multiprocessors as usize).max(1));
        most.saturating_mul(rows * columns * 100 / rate)
    };
    let (tile, _) = REGS.into_iter().min_by_key(time).expect("there are tiles");
    Tiling::Regs { tile }
}

fn gemv(p: &Product) -> Tiling {
    Tiling::Gemv { slices: if p.b.along_k { 16 } else { (p.k / 16).clamp(1, 8).next_power_of_two() } }
}

/// Large tiles in WGSL whose operands are read in vectors of four, where they lie so.
fn large_vec4(kernel: &Kernel, p: &Product, target: &Target, own: &dyn Fn(usize) -> bool) -> Option<Tiling> {
    if target.family != Family::Wgpu || !matches!(kernel.template, Template::MatMul | Template::Conv { .. }) {
        return None;
    }
    let [a, b] = p.in_fours(kernel);
    let vectors = [a && own(p.a.slot), b && own(p.b.slot)];
    vectors.contains(&true).then_some(Tiling::LargeVec4 { vectors, step: STEP })
}

/// The tiling by vectors of four in WGSL. Its binding then holds vectors, and must not hold other data.
fn vec4(kernel: &Kernel, p: &Product, target: &Target, own: &dyn Fn(usize) -> bool) -> Option<Tiling> {
    let room = has_room(target, VEC4_THREADS, p.m * VEC4_THREADS * 16);
    let operand = kernel.operand(p.b.slot);
    let plain = operand.dtype == DType::F32 && kernel.prologue(p.b.slot).is_none() && own(p.b.slot);
    if target.family != Family::Wgpu || !room || !plain {
        return None;
    }
    // Tries the last axis first.
    let along = |k: usize| p.b.axes[k].is_some_and(|axis| is_vectorizable(operand, axis, 4)).then_some(k == 0);
    let order = if p.b.slot == 0 { [0, 1] } else { [1, 0] };
    let along_k = order.into_iter().find_map(along)?;
    let slices = if along_k {
        (p.k / 4).clamp(1, 32).next_power_of_two()
    } else {
        let tiles = |columns: usize| p.batch * p.n.div_ceil(4 * columns);
        let columns = [16, 8, 4].into_iter().find(|&columns| tiles(columns) >= FEW_GROUPS).unwrap_or(2);
        VEC4_THREADS / columns
    };
    Some(Tiling::GemvVec4 { slices, along_k })
}

fn gemv_vec16b(p: &Product) -> Tiling {
    if p.b.along_k {
        return Tiling::GemvVec16b { threads: 128, across: 0, unroll: 1 };
    }
    let width = BYTES / p.element.size();
    // Many bytes must be on their way at once: enough workgroups to occupy a large device, of as many warps as share the inner axis.
    let busy = |across: &usize| across * width <= p.n && p.batch * p.n.div_ceil(across * width) >= 2 * FEW_GROUPS;
    let across = [32, 16, 8, 4].into_iter().find(busy).unwrap_or(2);
    let threads = (across * p.k.next_power_of_two()).clamp(64, 512);
    Tiling::GemvVec16b { threads, across, unroll: if p.k < 16 * (threads / across) { 4 } else { 8 } }
}

/// Every tiling that may be worth a try.
pub(super) fn all(kernel: &Kernel, p: &Product, target: &Target, own: &dyn Fn(usize) -> bool) -> Vec<Tiling> {
    if p.element.is_byte() {
        return of_bytes(p, target);
    }
    let mut all = vec![best(kernel, p, target, own)];
    if p.m <= FEW_ROWS {
        all.extend(vec4(kernel, p, target, own));
        all.extend([gemv(p), gemv_vec16b(p)]);
    } else {
        if let Some(Tiling::LargeVec4 { vectors, .. }) = large_vec4(kernel, p, target, own) {
            all.extend(LARGE_STEPS.map(|step| Tiling::LargeVec4 { vectors, step }));
        }
        all.extend([Tiling::Wgmma, Tiling::Large]);
        all.extend(REGS.map(|(tile, _)| Tiling::Regs { tile }));
        all.extend(MMA.map(|tile| Tiling::MmaAsync { tile }));
        all.extend(MMA.map(|tile| Tiling::Mma { tile }));
        all.extend([SLICE_TILE, SLICE_TILE / 2].map(|rows| Tiling::SliceKWarp { rows }));
        all.extend(SLICES_K.map(|(tile, depth)| Tiling::SliceK { tile, depth }));
    }
    all.extend(TILES.map(|tile| Tiling::Tiles { tile }));
    all
}

/// Every tiling of a product of bytes that may be worth a try, best first.
fn of_bytes(p: &Product, target: &Target) -> Vec<Tiling> {
    let tiles = |size: usize| p.batch * p.tiles(size, size);
    let mut all: Vec<_> = TILES.map(|tile| Tiling::Bytes { tile }).into();
    // Few rows: 16 x 64. Few tiles, or small workgroups: 32 x 32. Else 64 x 64.
    if p.m > 16 && (tiles(64) < 64 || target.max_workgroup < 256) {
        all.swap(0, 1);
    } else if p.m > 16 {
        all.swap(0, 2);
    }
    if target.family == Family::Cuda && target.compute >= 80 && suits_tensor_cores([p.m, p.k, p.n]) {
        let large = usize::from(tiles(128) < target.multiprocessors as usize);
        let mut of_mma = BYTES_MMA;
        of_mma.swap(0, large);
        all.splice(0..0, of_mma.map(|tile| Tiling::BytesMma { tile }));
    }
    all
}

/// Every tiling of a product by numbers of few bits that may be worth a try, best first.
pub(super) fn of_bits(kernel: &Kernel, p: &Product, target: &Target, own: &dyn Fn(usize) -> bool) -> Vec<Tiling> {
    let most = *BITS_ROWS.last().expect("there are some");
    let rows = BITS_ROWS.into_iter().find(|&rows| rows >= p.m).unwrap_or(most);
    let threads = [64, 128, 256, 32];
    let mut all: Vec<_> = threads.map(|threads| Tiling::Bits { rows, threads }).into();
    let at = if p.m <= most { all.len() } else { 0 };
    all.splice(at..at, self::all(kernel, p, target, own));
    if p.element.is_half() && target.family == Family::Cuda {
        let most = *BITS_MMA_ROWS.last().expect("there are some");
        let rows = BITS_MMA_ROWS.into_iter().find(|&rows| rows >= p.m).unwrap_or(most);
        let best = bits_mma(p, rows, target);
        let cuts = [16, 32, 64].into_iter().flat_map(|columns| [8, 4, 2].map(|warps| (columns, warps)));
        let cuts = cuts.map(|(columns, warps)| Tiling::BitsMma { rows, columns, warps });
        all.splice(0..0, [best].into_iter().chain(cuts));
        if fill_wgmma([1, p.m, p.n], target) {
            all.insert(0, Tiling::Wgmma);
        }
    }
    all
}

/// The cut of a product of few rows by numbers of few bits on tensor cores that is expected to be fastest. More columns of a workgroup read the
/// data less often; they should not leave multiprocessors idle.
fn bits_mma(p: &Product, rows: usize, target: &Target) -> Tiling {
    let busy = |columns: usize| p.n.div_ceil(columns) * p.m.div_ceil(rows) >= target.multiprocessors as usize;
    let (columns, warps) = match rows {
        8 => (16, 8),
        16 => (if busy(32) { 32 } else { 16 }, 8),
        32 => (if busy(64) { 64 } else { 32 }, 8),
        _ => (if busy(64) { 64 } else { 32 }, 4),
    };
    Tiling::BitsMma { rows, columns, warps }
}

/// True if products of `batch`, `m` rows and `n` columns of 16-bit floats keep the target busy in tiles of [`Tiling::Wgmma`]. They take half
/// the time of earlier instructions, even if the last round is nearly empty.
pub fn fill_wgmma([batch, m, n]: [usize; 3], target: &Target) -> bool {
    let [rows, columns] = WGMMA_TILE;
    let tiles = batch.saturating_mul(m.div_ceil(rows)).saturating_mul(n.div_ceil(columns));
    let there = target.compute == 90 && has_room(target, 256, WGMMA_BYTES);
    there && m > rows / 2 && target.multiprocessors > 0 && tiles >= target.multiprocessors as usize
}

/// True if `tiles` tiles of [`SLICE_TILE`] leave multiprocessors idle while larger tiles are computed.
pub fn few_tiles(tiles: u64, target: &Target) -> bool {
    tiles <= 3 * u64::from(target.multiprocessors)
}
