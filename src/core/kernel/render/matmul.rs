//! Products of matrices.

use super::scalar::Type::{F32, F64, I32, U32, Vec4};
use super::vector::{matrix, tile_steps};
use super::{Dialect, Module, kernels};
use crate::dtype::DType;
use crate::kernel::Template;
use crate::kernel::algorithm::{Text, Tiling};
use crate::kernel::product::{Product, Side};
use crate::kernel::schedule::matmul::{BITS_TEAM, BYTES_PITCH, FEW_ROWS, LARGE, REGS_STEP, STEP, VEC4_THREADS};
use crate::kernel::space::BYTES;

kernels! {
    |module, text| module.tiled(text) => {
        matmul "matmul.wgsl": "batched matrix product, and convolution as one: tiled through workgroup memory",
        matmul_large "matmul_large.wgsl": "the same with 8 by 8 sums per invocation, for large products",
        matmul_slice_k "matmul_slice_k.wgsl": "the same with the inner axis shared too, for products of few tiles",
        matmul_regs "matmul_regs.cu": "the same with 8 by 8 sums per invocation, for large products",
        matmul_slice_k_warp "matmul_slice_k_warp.cu": "products of few tiles whose operands lie 16 bytes at a time: warps share the inner axis",
        matmul_mma "matmul_mma.cu": "products of 16-bit floats on tensor cores",
        matmul_mma_async "matmul_mma_async.cu": "the same of operands that lie 16 bytes at a time, sent to workgroup memory ahead",
        matmul_bytes "matmul_bytes.wgsl": "product of bytes, and convolution as one: four along the inner axis at a time",
        matmul_bytes_mma "matmul_bytes_mma.cu": "the same on tensor cores",
        matmul_bits "matmul_bits.wgsl": "product of few rows by numbers of few bits: a team of invocations per column",
        matmul_bits_mma "matmul_bits_mma.cu": "product of 16-bit floats by numbers of few bits on tensor cores: up to 64 rows at a time",
        matmul_wgmma "matmul_wgmma.cu": "the same by compute capability 9.0, which multiplies what lies in workgroup memory",
        gemv "gemv.wgsl": "matrix product of at most four rows or columns: reads the other operand once",
        gemv_vec4 "gemv_vec4.wgsl": "the same, four elements at a time",
        gemv_vec16b "gemv_vec16b.cu": "the same, 16 bytes at a time",
    }
}

impl Module<'_> {
    /// A product of matrices, or a convolution that is one.
    fn tiled(&mut self, text: &Text) -> Result<(), String> {
        let (product, tiling) = text.product(self.kernel).expect("the text tiles a product");
        match &self.kernel.template {
            Template::Conv { groups, window, padding } if product.element.is_byte() => {
                self.conv_of_bytes(*groups, window, &product, tiling, *padding)
            }
            Template::MatMul if product.element.is_byte() => self.matmul_of_bytes(&product, tiling),
            Template::Conv { groups, window, .. } => self.conv(*groups, window, &product, tiling),
            Template::ConvTranspose { .. } | Template::ConvFilters { .. } => self.product_of_parts(&product, tiling),
            Template::MatMulBits { .. } => self.product_of_bits(&product, tiling),
            _ => self.matmul(&product, tiling),
        }
    }

    fn matmul(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        let vec4 = if let Tiling::GemvVec4 { along_k, .. } = tiling { Some(along_k) } else { None };
        if let Some(along_k) = vec4 {
            let b = &product.b;
            let axis = b.axes[usize::from(!along_k)].ok_or("its right operand has no such axis")?;
            self.fours("b_wide", b.slot, &b.space, ["k", "n"], axis);
        }
        let [a_lies, b_lies] = tiling.vectors();
        // `a` is called with (batch, m, k), `b` with (batch, k, n).
        for (side, name, params) in in_slot_order(product) {
            if name == "a" && a_lies || name == "b" && (b_lies || vec4.is_some()) {
                continue;
            }
            let (mut body, value) = self.element(side.slot, &side.space)?;
            body.push(format!("return {value};"));
            self.function(name, &matrix(params), Some(self.value[side.slot]), body);
        }
        if self.dialect == Dialect::Cuda {
            let (few, half) = (product.m <= FEW_ROWS, product.element.is_half());
            if half && !few {
                self.wide_operand("a_wide", "A_WIDE", &product.a, ["m", "k"]);
            }
            if half || few {
                self.wide_operand("b_wide", "B_WIDE", &product.b, ["k", "n"]);
            }
        }
        self.product(product, tiling)
    }

    /// A function that reads 16 bytes of a product's operand at once, where they lie so.
    pub(super) fn wide_operand(
        &mut self,
        name: &'static str,
        flag: &'static str,
        side: &Side,
        params: [&'static str; 2],
    ) {
        if !side.is_vectorizable {
            return;
        }
        let width = BYTES / self.storage[side.slot].size();
        let (mut body, address) = self.address(side.slot, &side.space);
        body.push(format!("return {};", self.read_wide(side.slot, width, &address)));
        let result = format!("wide<{}, {width}>", self.storage[side.slot].name());
        self.wide_function(name, &matrix(params), result, body);
        self.flags.push(flag);
    }

    /// A product whose elements the functions `a(batch, m, k)` and `b(batch, k, n)` give.
    pub(super) fn product(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        let &Product { m, k, n, ref a, ref b, .. } = product;
        let is_f64 = matches!(tiling, Tiling::Regs { .. }) && product.element == DType::F64;
        let core = match product.element {
            element if element.is_byte() => I32,
            _ if is_f64 => F64,
            _ => F32,
        };
        self.store(&product.result, Some(core), Some("m < M && n < N"), &[])?;
        self.ints(&[("M", m), ("K", k), ("N", n)]);
        let (rows_a, rows_b) = ((!a.along_k).then_some("A_ROWS"), (!b.along_k).then_some("B_ROWS"));
        match tiling {
            Tiling::Gemv { .. } | Tiling::Tiles { .. } | Tiling::SliceK { .. } => {}
            Tiling::Bytes { .. } => {}
            Tiling::BytesMma { .. } => self.int("PITCH", BYTES_PITCH as isize),
            Tiling::BitsMma { .. } => self.declarations.push(format!("typedef {} element;", self.storage[0].name())),
            Tiling::Bits { rows, .. } => _ = self.lists.insert("row", vec![Vec::new(); rows]),
            Tiling::GemvVec4 { along_k, .. } => self.gemv_vec4(m, along_k),
            Tiling::GemvVec16b { across, .. } => self.flags.extend((across > 0).then_some("B_ROWS")),
            Tiling::Large => self.large([a, b], STEP, [false; 2]),
            Tiling::LargeVec4 { vectors, step } => self.large([a, b], step, vectors),
            Tiling::Regs { .. } => {
                self.declarations.push(format!("typedef {} value;", self.value[0].name()));
                self.at_once = tiling.at_once(product);
            }
            Tiling::SliceKWarp { .. } => {
                self.async_operands(product);
                self.flags.extend(rows_b);
            }
            Tiling::Mma { .. } | Tiling::MmaAsync { .. } | Tiling::Wgmma => {
                if product.is_guarded {
                    self.flags.push("GUARDED");
                } else if product.packing.is_some() {
                    self.flags.push("B_WIDENED");
                } else if !matches!(tiling, Tiling::Mma { .. }) {
                    self.async_operands(product);
                }
                self.declarations.push(format!("typedef {} element;", self.storage[0].name()));
                if tiling != Tiling::Wgmma {
                    self.flags.extend([rows_b, rows_a].into_iter().flatten());
                }
            }
        }
        self.ints(&constants(product, tiling));
        let element = self.storage[0];
        for (name, len, bytes) in tiling.workgroup(product).shared {
            let ty = match bytes {
                16 => Vec4,
                8 => F64,
                2 => element,
                _ if product.element.is_byte() => U32,
                _ => F32,
            };
            self.shared.push((name, ty, len));
        }
        Ok(())
    }

    /// A product in tiles of 128 by 128, with `step` slices at a time. Operands that lie in vectors are read so: of four lines each, or of four
    /// slices each, which are turned block by block.
    fn large(&mut self, [a, b]: [&Side; 2], step: usize, [a_lies, b_lies]: [bool; 2]) {
        self.lists.insert("sum", (0..16).map(large_sum).collect());
        self.lists.insert("part", vec![Vec::new(); LARGE / 4 * step / 256]);
        let mut blocks = Vec::new();
        let mut block = |texts: [&str; 5]| {
            let names = ["READ", "START", "END", "HERE", "ARRAY"];
            blocks.push(names.into_iter().zip(texts.map(str::to_owned)).collect());
        };
        match (a_lies, a.along_k) {
            (true, true) => {
                self.vectors("a_block", a.slot, &a.space, ["m", "k"]);
                self.flags.push("A_BLOCKS");
                block(["a_block", "m0", "M", "thread < BLOCKS", "tile_a"]);
            }
            (true, false) => {
                self.vectors("a_fours", a.slot, &a.space, ["m", "k"]);
                self.flags.push("A_FOURS");
            }
            _ => {}
        }
        match (b_lies, b.along_k) {
            (true, true) => {
                self.vectors("b_block", b.slot, &b.space, ["n", "k"]);
                self.flags.push("B_BLOCKS");
                block(["b_block", "n0", "N", "thread >= SIZE - BLOCKS", "tile_b"]);
            }
            (true, false) => {
                self.vectors("b_fours", b.slot, &b.space, ["k", "n"]);
                self.flags.push("B_FOURS");
            }
            _ => {}
        }
        if !blocks.is_empty() {
            self.flags.push("BLOCKS");
            self.ints(&[("BLOCKS", LARGE / 4 * step / 4)]);
        }
        self.lists.insert("block", blocks);
    }

    /// Functions that give the addresses of 16 bytes of both operands.
    fn async_operands(&mut self, product: &Product) {
        self.address_function("a_at", product.a.slot, &product.a.space, ["m", "k"]);
        self.address_function("b_at", product.b.slot, &product.b.space, ["k", "n"]);
    }

    /// A product of few rows whose right operand `b_wide` reads four at a time, along the inner axis or across it.
    fn gemv_vec4(&mut self, m: usize, along_k: bool) {
        let left = |at: &str| format!("a(batch, m, {at})");
        let (result, value) = if along_k {
            (Vec4, format!("vec4f({}, {}, {}, {})", left("k"), left("k + 1"), left("k + 2"), left("k + 3")))
        } else {
            (F32, left("k"))
        };
        self.function("left", &matrix(["m", "k"]), Some(result), vec![format!("return {value};")]);
        self.flags.extend((!along_k).then_some("B_ROWS"));
        self.lists.insert("row", vec![Vec::new(); m]);
    }
}

/// The numbers of a tiling in its text.
fn constants(product: &Product, tiling: Tiling) -> Vec<(&'static str, usize)> {
    let &Product { m, n, ref a, ref b, .. } = product;
    let [tile_m, tile_n] = tiling.workgroup(product).tile;
    let tiles = [("TILES_M", m.div_ceil(tile_m)), ("TILES_N", n.div_ceil(tile_n))];
    let steps = |slices: usize, lines: [usize; 2]| tile_steps([a.along_k, b.along_k], slices, lines);
    match tiling {
        Tiling::Gemv { slices } => {
            let (column_step, slice_step) = if b.along_k { (slices, 1) } else { (1, tile_n) };
            vec![
                tiles[1],
                ("COLUMNS", tile_n),
                ("SLICES", slices),
                ("COLUMN_STEP", column_step),
                ("SLICE_STEP", slice_step),
                ("ROW1", 1.min(m - 1)),
                ("ROW2", 2.min(m - 1)),
                ("ROW3", 3.min(m - 1)),
            ]
        }
        Tiling::GemvVec4 { slices, along_k } => {
            let columns = VEC4_THREADS / slices;
            let (across, along) = if along_k { (1, 4) } else { (4, 1) };
            let (column_step, slice_step) = if along_k { (slices, 1) } else { (1, columns) };
            vec![
                tiles[1],
                ("COLUMNS", columns),
                ("SLICES", slices),
                ("COLUMN_STEP", column_step),
                ("SLICE_STEP", slice_step),
                ("ACROSS", across),
                ("ALONG", along),
                ("STEP", slices * along),
            ]
        }
        Tiling::GemvVec16b { threads, across, unroll } => {
            let width = ("WIDTH", BYTES / product.element.size());
            match across {
                0 => vec![width, tiles[1]],
                _ => vec![width, ("LANES", across), ("SLICES", threads / across), ("UNROLL", unroll), tiles[1]],
            }
        }
        Tiling::Tiles { .. } | Tiling::Bytes { .. } => {
            let tile = [("TILE_M", tile_m), ("TILE_N", tile_n)];
            [&tile[..], &tiles, &[("STEP", STEP)], &steps(STEP, [tile_m, tile_n])].concat()
        }
        Tiling::Large => [&tiles[..], &[("STEP", STEP)], &steps(STEP, [LARGE / 4; 2])].concat(),
        Tiling::LargeVec4 { step, .. } => [&tiles[..], &[("STEP", step)], &steps(step, [LARGE / 4; 2])].concat(),
        Tiling::SliceK { tile, depth } => {
            let slices = Tiling::groups_of(tile);
            let (step, pitch) = (slices * depth, tile / 4 + 1);
            let slices =
                [("SLICES", slices), ("DEPTH", depth), ("STEP", step), ("PITCH", pitch), ("RIGHT", step * pitch)];
            [&[("TILE", tile)][..], &tiles, &slices, &steps(step, [tile / 4; 2])].concat()
        }
        Tiling::Regs { .. } => {
            let tile = [("TILE_M", tile_m), ("TILE_N", tile_n)];
            [tiles.as_slice(), &tile, &[("STEP", REGS_STEP)], &steps(REGS_STEP, [tile_m, tile_n])].concat()
        }
        Tiling::SliceKWarp { rows } => [tiles.as_slice(), &[("TILE_M", rows)]].concat(),
        Tiling::Mma { .. } | Tiling::MmaAsync { .. } | Tiling::Wgmma | Tiling::BytesMma { .. } => {
            [tiles.as_slice(), &[("TILE_M", tile_m), ("TILE_N", tile_n)]].concat()
        }
        Tiling::BitsMma { rows, columns, .. } => {
            vec![tiles[1], ("ROWS", rows), ("COLUMNS", columns), ("UNROLL", 512 / (rows * columns).clamp(128, 512))]
        }
        Tiling::Bits { rows, .. } => vec![tiles[1], ("COLUMNS", tile_n), ("ROWS", rows), ("TEAM", BITS_TEAM)],
    }
}

/// One of the sums of an invocation of `matmul_large`: which row and column of the tile it is of.
fn large_sum(sum: usize) -> Vec<(&'static str, String)> {
    let (row, right) = (sum / 2, sum % 2);
    let (left, lane) = (row / 4, row % 4);
    let left_value = format!("a{left}.{}", ["x", "y", "z", "w"][lane]);
    let down = 64 * left + lane;
    vec![
        ("LEFT", left_value),
        ("RIGHT", format!("b{right}")),
        ("DOWN", down.to_string()),
        ("OVER", (64 * right).to_string()),
    ]
}

/// The operands of a product, the one in the lower slot first, by the names and parameters of their functions.
fn in_slot_order(product: &Product) -> [(&Side, &'static str, [&'static str; 2]); 2] {
    let (a, b) = ((&product.a, "a", ["m", "k"]), (&product.b, "b", ["k", "n"]));
    if product.a.slot < product.b.slot { [a, b] } else { [b, a] }
}
