//! Convolutions: as products of matrices, by strips of results, and transposed.

use super::locate::{locate, split, sum, within};
use super::scalar::Type::{self, Bool, F32, I32, Vec2, Vec4};
use super::scalar::convert;
use super::vector::matrix;
use super::{Dialect, Input, Module, Scalars, block, kernels};
use crate::kernel::algorithm::{ConvDirect, FiltersDirect, Text, Tiling};
use crate::kernel::meaning::mismatch;
use crate::kernel::product::{Phases, Product, Side};
use crate::kernel::schedule::map::inputs;
use crate::kernel::space::{BYTES, Space, beyond, over};
use crate::kernel::{Template, Window};
use crate::shape::Access;
use std::collections::{BTreeMap, BTreeSet};

kernels! {
    |module, text| module.conv_direct(text) => {
        conv_direct "conv_direct.wgsl": "convolution, or its transpose, with few channels per group, directly, by strips of results",
    }
    |module, text| module.filters_direct(text) => {
        filters_direct "filters_direct.wgsl": "gradient of filters with few channels per group, directly, by strips of positions",
    }
    |module, _| module.conv_transpose_each() => {
        conv_transpose "conv_transpose.wgsl": "transposed convolution with few channels per group, gathering",
    }
}

/// An element of a convolution's data.
pub(super) struct ConvData {
    /// Statements.
    pub(super) statements: Vec<String>,
    /// Conditions on what is behind them, which all hold if the element is inside the data.
    pub(super) inside: Vec<String>,
    /// Its address.
    pub(super) address: String,
    /// Statements and its value, if a prologue computes it.
    pub(super) computed: Option<(Vec<String>, String)>,
}

impl Module<'_> {
    /// A convolution as the product of weights `[o, c * kernel]` and unfolded data `[c * kernel, n * positions]`, per group.
    pub(super) fn conv(
        &mut self,
        groups: usize,
        window: &Window,
        product: &Product,
        tiling: Tiling,
    ) -> Result<(), String> {
        let [weights_lie, data_lie] = tiling.vectors();
        if !weights_lie {
            let unfolded = Product::conv(self.kernel, groups, window, None);
            let (mut body, address) = self.address(1, &unfolded.a.space);
            body.push(format!("return {};", self.load(1, &address)));
            self.function("a", &[("batch", I32), ("m", I32), ("k", I32)], Some(F32), body);
        }
        if data_lie {
            return self.product(product, tiling);
        }
        let ConvData { statements: mut body, inside, address, computed } =
            self.conv_data(groups, window, [1, 2, 3, 4])?;
        let (mut before, load) = computed.unwrap_or_else(|| (Vec::new(), self.load(0, &address)));
        if inside.is_empty() {
            body.extend(before);
            body.push(format!("return {load};"));
        } else {
            body.push("var value = 0.0f;".into());
            if before.is_empty() {
                body.push(format!("if ({}) {{ value = {load}; }}", inside.join(" && ")));
            } else {
                before.push(format!("value = {load};"));
                body.extend(block(&format!("if ({})", inside.join(" && ")), before));
            }
            body.push("return value;".into());
        }
        self.function("b", &[("batch", I32), ("k", I32), ("n", I32)], Some(F32), body);
        self.product(product, tiling)
    }

    /// The element of a convolution's data under weight `k` of a filter, whose axes have an order, for result `n`.
    pub(super) fn conv_data(&self, groups: usize, window: &Window, order: [usize; 4]) -> Result<ConvData, String> {
        let s = &self.kernel.shape;
        let input = self.access(1).shape[1];
        let mut body = Vec::new();
        let taps = order.map(|axis| if axis == 1 { input } else { window.kernel[axis - 2] });
        let parts = split("k", &taps, &[true; 4], &mut body);
        // The channel, then the tap along each spatial axis.
        let c: Vec<&String> = (1..5).map(|axis| &parts[order.iter().position(|&a| a == axis).expect("all")]).collect();
        let p = split("n", &[s[0], s[2], s[3], s[4]], &[true; 4], &mut body);
        let mut inside = Vec::new();
        let data = self.access(0);
        for a in 0..3 {
            let (stride, dilation, pad) =
                (window.strides[a] as isize, window.dilations[a] as isize, window.pads[a] as isize);
            let terms = [(p[a + 1].as_str(), stride), (c[a + 1].as_str(), dilation)];
            body.push(format!("let p{a} = {};", sum(-pad, &terms)));
            if pad > 0 {
                inside.push(format!("p{a} >= 0"));
            }
            let reach = (s[a + 2] as isize - 1) * stride + (window.kernel[a] as isize - 1) * dilation - pad;
            if reach >= data.shape[a + 2] as isize {
                inside.push(format!("p{a} < {}", data.shape[a + 2]));
            }
        }
        let strides = &data.strides;
        let terms = [
            (p[0].as_str(), strides[0]),
            ("batch", strides[1] * input as isize * isize::from(groups > 1)),
            (c[0].as_str(), strides[1]),
            ("p0", strides[2] * isize::from(data.shape[2] > 1)),
            ("p1", strides[3] * isize::from(data.shape[3] > 1)),
            ("p2", strides[4] * isize::from(data.shape[4] > 1)),
        ];
        let address = sum(data.offset, &terms);
        let mut computed = None;
        if self.kernel.prologue(0).is_some() {
            // The same point of the data in terms of its axes.
            let channel = [("batch", input as isize * isize::from(groups > 1)), (c[0].as_str(), 1)];
            let mut before = vec![format!("let image = {};", p[0]), format!("let channel = {};", sum(0, &channel))];
            let names = ["image", "channel", "p0", "p1", "p2"];
            let space = names.into_iter().zip(0..).map(|(name, axis)| over(name, &data.shape, [axis])).collect();
            let (statements, value) = self.element(0, &space)?;
            before.extend(statements);
            computed = Some((before, value));
        }
        Ok(ConvData { statements: body, inside, address, computed })
    }

    /// A product of operands that are zero beyond their axes: a transposed convolution, as weights `[o * phases, taps * c]` times data
    /// `[taps * c, n * positions]` per group, or the gradient by filters.
    pub(super) fn product_of_parts(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        let copies = matches!(tiling, Tiling::MmaAsync { .. });
        let phases = product.phases.as_ref();
        let (slice, slices) = match phases {
            Some(phases) => ("s", slice_of_phase(phases, product.batch)),
            None => ("k", Vec::new()),
        };
        self.part_operand("a", &product.a, ["m", slice], &slices, copies)?;
        self.part_operand("b", &product.b, [slice, "n"], &slices, copies)?;
        if let Some(phases) = phases {
            let tiles = tiling.launch(product).groups / product.batch as u64;
            let count = phases.count();
            self.ints(&[("TILES", tiles as usize), ("PHASES", count)]);
            // Neighbouring workgroups have the phases of the same places, whose results lie side by side.
            let tile = "launched / PHASES";
            self.preamble.push("let phase = launched % PHASES;".into());
            self.preamble.push(format!("let group = ({tile} / TILES * PHASES + phase) * TILES + {tile} % TILES;"));
            self.preamble.extend(depth_of_phase(phases));
        }
        self.product(product, tiling)
    }

    /// A transposed convolution, one invocation per element of the result.
    fn conv_transpose_each(&mut self) -> Result<(), String> {
        let Template::ConvTranspose { groups, window } = &self.kernel.template else { mismatch(&self.kernel.template) };
        let channels = [self.kernel.shape[1], self.access(0).shape[1]].map(|n| n / groups);
        self.windowed(window, Some(channels.into()), &[0, 1, 2]);
        self.loader("data", 0);
        self.loader("weight", 1);
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element();
        Ok(())
    }

    /// A function of a product's operand at a point of its space, zero where that goes beyond the operand's axes; and one of as many
    /// as 16 bytes hold, if they lie so. Where these are copied, it gives their address, or none beyond the axes. Statements stand before.
    fn part_operand(
        &mut self,
        name: &'static str,
        side: &Side,
        names: [&'static str; 2],
        before: &[String],
        copies: bool,
    ) -> Result<(), String> {
        let (slot, space) = (side.slot, &side.space);
        let access = self.access(slot);
        let outside = beyond(space, &access.shape);
        // By coordinates that are compared the element is addressed, too.
        let mut rest = access.clone();
        outside.keys().for_each(|&axis| rest.strides[axis] = 0);
        let plain = self.kernel.prologue(slot).is_none();
        // A prologue addresses its elements itself.
        let accesses: &[&Access] = if plain { &[&rest] } else { &[] };
        let located = locate(space, accesses, &outside.keys().copied().collect());
        let mut body = [before, &located.statements].concat();
        let inside = within(&outside, &located.coordinates, &access.shape, &mut body);
        let mut terms: Vec<_> = located.addresses.into_iter().map(|address| (address, 1)).collect();
        terms.extend(outside.keys().map(|&axis| (format!("p{axis}"), access.strides[axis])));
        let address = sum(0, &terms.iter().map(|(term, stride)| (term.as_str(), *stride)).collect::<Vec<_>>());
        let guarded = |none: &str, mut before: Vec<String>, value: String| {
            let mut lines = body.clone();
            if inside.is_empty() {
                lines.extend(before);
                lines.push(format!("return {value};"));
                return lines;
            }
            before.push(format!("value = {value};"));
            lines.push(none.to_owned());
            lines.extend(block(&format!("if ({inside})"), before));
            lines.push("return value;".into());
            lines
        };
        let (before, value) = if plain { (Vec::new(), self.load(slot, &address)) } else { self.element(slot, space)? };
        let each = guarded("var value = 0.0f;", before, value);
        // Neighbours that lie side by side, all of them within or none.
        let element = self.storage[slot];
        if self.dialect == Dialect::Cuda && side.is_vectorizable && copies {
            let b = self.bindings.of[slot].expect("operands of wide kernels have elements");
            let at = guarded("const void* value = nullptr;", Vec::new(), format!("b{b} + ({address})"));
            self.wide_function(if name == "a" { "a_at" } else { "b_at" }, &matrix(names), "const void*".into(), at);
            return Ok(());
        }
        if self.dialect == Dialect::Cuda && side.is_vectorizable {
            let width = BYTES / element.size();
            let result = format!("wide<{}, {width}>", element.name());
            let wide = guarded(&format!("{result} value = {{}};"), Vec::new(), self.read_wide(slot, width, &address));
            let (name, flag) = if name == "a" { ("a_wide", "A_WIDE") } else { ("b_wide", "B_WIDE") };
            self.wide_function(name, &matrix(names), result, wide);
            self.flags.push(flag);
        }
        self.function(name, &matrix(names), Some(F32), each);
        Ok(())
    }

    /// A convolution by strips of results along an axis, which share what they read.
    fn conv_direct(&mut self, text: &Text) -> Result<(), String> {
        let (
            Template::Conv { groups, window, .. } | Template::ConvTranspose { groups, window },
            Text::ConvDirect(direct),
        ) = (&self.kernel.template, text)
        else {
            mismatch(&self.kernel.template)
        };
        let is_transposed = matches!(self.kernel.template, Template::ConvTranspose { .. });
        let shape = &self.kernel.shape;
        let &ConvDirect { channels: width, axis: along, results: strip, lanes, .. } = direct;
        let [out, input] = [shape[1], self.access(0).shape[1]].map(|n| n / groups);
        let mut order = vec![0, 1, 2];
        order.retain(|&axis| axis != along);
        order.insert(1, along);
        let extent = shape[along + 2];
        let blocks = shape[1] / width;
        let strips = extent.div_ceil(strip);
        // From the innermost: channels or some of them, x, strips, z, images; the rest of the channels outside of an image's positions.
        let count = shape[0] * blocks * shape[order[0] + 2] * shape[order[2] + 2] * strips;
        let x_step = lanes;
        let strip_step = x_step * shape[order[2] + 2];
        let z_step = strip_step * strips;
        let block_step = z_step * shape[order[0] + 2];
        self.ints(&[
            ("COUNT", count),
            ("WIDTH", width),
            ("LANES", lanes),
            ("BLOCKS", blocks / lanes),
            ("STRIP", strip),
            ("STRIPS", strips),
            ("X_STEP", x_step),
            ("STRIP_STEP", strip_step),
            ("Z_STEP", z_step),
            ("BLOCK_STEP", block_step),
            ("N_STEP", block_step * (blocks / lanes)),
        ]);
        self.windowed(window, Some((out, input)), &order);
        self.strip_rows(&Strip { window, along, places: strip, last: (strips - 1) * strip, is_transposed });
        // Neighbouring outputs have filters that lie apart along this axis.
        let filters = usize::from(is_transposed && out > 1);
        if is_transposed {
            self.flags.push("TRANSPOSED");
        }

        let vector = match width {
            4 => Vec4,
            2 => Vec2,
            _ => self.value[0],
        };
        self.read_rows(vector, [out, input], filters);
        let space: Space = vec![
            over("n", shape, [0]),
            over("o", shape, [1]),
            over("z", shape, [order[0] + 2]),
            over("y", shape, [along + 2]),
            over("x", shape, [order[2] + 2]),
        ];
        let mut body = match (self.dialect, width) {
            (Dialect::Cuda, 2..) => self.store_wide(&space, width)?,
            _ => {
                self.store(&space, Some(self.value[0]), None, &[])?;
                let of = |part: &str, k: usize| {
                    format!("store(n, o{}, z, y, x, sum{part});", if k > 0 { format!(" + {k}") } else { String::new() })
                };
                match width {
                    1 => vec![of("", 0)],
                    _ => [".x", ".y", ".z", ".w"].iter().take(width).zip(0..).map(|(part, k)| of(part, k)).collect(),
                }
            }
        };
        if !extent.is_multiple_of(strip) {
            body.insert(0, "if (y < OUT_Y) {".into());
            body.push("}".into());
        }
        let params = ["n", "o", "z", "y", "x"].map(|name| (name, I32));
        self.function("finish", &[&params[..], &[("sum", vector)]].concat(), None, body);
        Ok(())
    }

    /// The rows of data that the windows of a strip lie in, and what each contributes.
    fn strip_rows(&mut self, strip: &Strip) {
        let rows = strip.rows();
        let rows_list = strip.bounds(self.access(0).shape[strip.along + 2]);
        let product = |(down, sum, tap)| {
            vec![("SUM", format!("sum{sum}")), ("ROW", format!("row{}", rows[&down])), ("TAP", format!("tap{tap}"))]
        };
        let terms_list = strip.terms().into_iter().map(product).collect();
        self.lists.insert("row", rows_list);
        self.lists.insert("term", terms_list);
        self.lists.insert("tap", vec![Vec::new(); strip.window.kernel[strip.along]]);
        self.lists.insert("sum", vec![Vec::new(); strip.places]);
    }

    /// Sums of filters' gradients, by strips of positions.
    fn filters_direct(&mut self, text: &Text) -> Result<(), String> {
        let (Template::ConvFilters { groups, rows, window }, Text::FiltersDirect(direct)) =
            (&self.kernel.template, text)
        else {
            mismatch(&self.kernel.template)
        };
        let (kernel, ty) = (self.kernel, self.value[0]);
        let &FiltersDirect { axis: along, places, all_taps, lanes, threads } = direct;
        let shape = &kernel.shape;
        let mut order = vec![0, 1, 2];
        order.retain(|&axis| axis != along);
        order.insert(1, along);
        let ([columns, blocks], (part, images)) = (direct.shares(kernel), FiltersDirect::part(kernel, *rows));
        let strips = part[along].div_ceil(places);
        let turns = threads as usize / lanes;
        self.ints(&[
            ("LANES", lanes),
            ("TURNS", turns),
            ("PAIRS", shape[1] * shape[2]),
            ("BLOCKS", blocks),
            ("SHARES", columns),
            ("GROUP_OUT", shape[1] / groups),
            ("GROUP_IN", shape[2]),
            ("ROWS", *rows),
            ("IMAGES", images),
            ("STRIP", places),
            ("STRIPS", strips),
            ("STEPS", images * strips * part[order[0]] * part[order[2]]),
        ]);
        let (data, gradient) = (self.access(0).clone(), self.access(1).clone());
        for (&axis, name) in order.iter().zip(["Z", "Y", "X"]) {
            // Parts are stretches of the middle axis.
            self.int(format!("LINES_{name}"), if axis == 1 { part[1] as isize } else { 0 });
            self.int(format!("PART_{name}"), part[axis] as isize);
            self.int(format!("IN_{name}"), data.shape[axis + 2] as isize);
            self.int(format!("KERNEL_{name}"), window.kernel[axis] as isize);
            self.int(format!("STRIDE_{name}"), window.strides[axis] as isize);
            self.int(format!("DILATION_{name}"), window.dilations[axis] as isize);
            self.int(format!("PAD_{name}"), window.pads[axis] as isize);
        }
        for (name, access) in [("DATA", data), ("GRADIENT", gradient)] {
            self.int(format!("{name}_0"), access.offset);
            for (axis, of) in [0, 1].into_iter().chain(order.iter().map(|axis| axis + 2)).zip(["N", "C", "Z", "Y", "X"])
            {
                self.int(format!("{name}_{of}"), access.strides[axis]);
            }
        }
        for (name, slot) in [("data", 0), ("gradient", 1)] {
            let lines = vec![
                format!("if (inside) {{ return {}; }}", convert(&self.load(slot, "at"), self.value[slot], ty)),
                format!("return {};", convert("0.0f", F32, ty)),
            ];
            self.function(name, &[("at", I32), ("inside", Bool)], Some(ty), lines);
        }

        // Points of the other axes whose taps an invocation has.
        let [deep, wide] = [order[0], order[2]].map(|axis| window.kernel[axis]);
        let points: Vec<[String; 2]> = match all_taps {
            true => (0..deep).flat_map(|z| (0..wide).map(move |x| [z.to_string(), x.to_string()])).collect(),
            false => vec![["share / KERNEL_X".into(), "share % KERNEL_X".into()]],
        };
        let extent = self.access(1).shape[along + 2];
        let last = extent - part[along] + (strips - 1) * places;
        let strip = Strip { window, along, places, last, is_transposed: false };
        let rows = strip.rows();
        let bounds = strip.bounds(self.access(0).shape[along + 2]);
        let sums = points.iter().zip(0..).flat_map(|([z, x], point)| {
            let zero = convert("0.0f", F32, ty);
            (0..window.kernel[along]).map(move |tap| {
                vec![
                    ("SUM", format!("sum{tap}_{point}")),
                    ("ZERO", zero.clone()),
                    ("AT_Z", z.clone()),
                    ("AT_Y", tap.to_string()),
                    ("AT_X", x.clone()),
                ]
            })
        });
        let sums = sums.collect();
        let term = |(down, place, tap)| {
            vec![
                ("OF", format!("sum{tap}_COLUMN")),
                ("ELEMENT", format!("row{}", rows[&down])),
                ("BY", format!("by{place}")),
            ]
        };
        let terms = strip.terms().into_iter().map(term).collect();
        let column = |([z, x], point): (&[String; 2], usize)| {
            vec![("TAP_Z", z.clone()), ("TAP_X", x.clone()), ("COLUMN", point.to_string())]
        };
        let columns = points.iter().zip(0..).map(column).collect();
        self.lists.extend([("sum", sums), ("row", bounds), ("term", terms), ("column", columns)]);
        self.lists.insert("place", vec![Vec::new(); places]);
        self.shared.push(("shared_sums", ty, threads as usize));
        let space: Space = vec![
            over("part", shape, [0]),
            over("o", shape, [1]),
            over("c", shape, [2]),
            over("z", shape, [order[0] + 3]),
            over("y", shape, [along + 3]),
            over("x", shape, [order[2] + 3]),
        ];
        self.store(&space, Some(ty), None, &[])
    }

    /// `data(at, inside)`, of each channel or of all of them, `weight(at)` of each, and the sums' `ZERO`.
    fn read_rows(&mut self, vector: Type, [out, input]: [usize; 2], filters: usize) {
        let width = vector.size() / self.value[0].size();
        let name = vector.name();
        let parts = |values: Vec<String>| match width {
            1 => values.concat(),
            _ => format!("{name}({})", values.join(", ")),
        };
        let zero = if width == 1 { convert("0.0f", F32, vector) } else { format!("{name}(0.0f)") };
        let scalar = self.value[0];
        let (data, result) = if width > 1 && out == 1 && input == 1 {
            let (none, read, value) = self.vector(0, width, "at");
            (
                vec![format!("var x = {none};"), format!("if (inside) {{ x = {read}; }}"), format!("return {value};")],
                vector,
            )
        } else {
            let lines = vec![
                format!("if (inside) {{ return {}; }}", self.load(0, "at")),
                format!("return {};", convert("0.0f", F32, scalar)),
            ];
            (lines, scalar)
        };
        let weight = if self.dialect == Dialect::Cuda && width > 1 && self.is_vectorizable(1, filters, width) {
            let (_, read, value) = self.vector(1, width, "at");
            vec![format!("let x = {read};"), format!("return {value};")]
        } else {
            let apart = ["WEIGHT_N", "WEIGHT_C"][filters];
            let at = |k: usize| if k > 0 { format!("at + {k} * {apart}") } else { "at".into() };
            let load = |k: usize| convert(&self.load(1, &at(k)), self.value[1], scalar);
            vec![format!("return {};", parts((0..width).map(load).collect()))]
        };
        self.function("data", &[("at", I32), ("inside", Bool)], Some(result), data);
        self.function("weight", &[("at", I32)], Some(vector), weight);
        for sum in self.lists.get_mut("sum").into_iter().flatten() {
            sum.push(("ZERO", zero.clone()));
        }
    }

    /// Neighbouring elements in CUDA: zeros, those at an address, and either of these, called `x`, as a vector. Halves are moved by twos: the
    /// compiler would take them apart one by one.
    fn vector(&self, slot: usize, width: usize, at: &str) -> (String, String, String) {
        let (ty, b) = (self.storage[slot], self.bindings.of[slot].expect("operands of wide kernels have elements"));
        let (name, count) = if ty.size() == 2 { ("u32", width / 2) } else { (ty.name(), width) };
        let part =
            |k: usize| if ty.size() == 2 { format!("unpack<{}>(x.v[{k}])", ty.name()) } else { format!("x.v[{k}]") };
        let value = format!("vec{width}f({})", (0..count).map(part).collect::<Vec<_>>().join(", "));
        (format!("wide<{name}, {count}>{{}}"), format!("read<{name}, {count}>(b{b} + ({at}))"), value)
    }

    /// The kernel's body and its stores, for neighbouring channels from `o` on.
    fn store_wide(&self, space: &Space, width: usize) -> Result<Vec<String>, String> {
        let kernel = self.kernel;
        let reads = kernel.reads.len();
        let core = kernel.template.core_reads();
        let used = inputs(&kernel.body).into_iter().filter_map(|j| Some(core + j.checked_sub(1)?));
        let slots: Vec<usize> = used.chain(reads..reads + kernel.writes.len()).collect();
        let accesses: Vec<&Access> = slots.iter().map(|&slot| self.access(slot)).collect();
        let located = locate(space, &accesses, &BTreeSet::new());
        let mut lines = located.statements;
        // One by one where they do not lie side by side.
        let element = |slot: usize, address: &str| match self.access(slot).strides[1] {
            0 => address.to_owned(),
            step => format!("{address} + v * {step}"),
        };
        // Two 16-bit floats are rounded at once where there is an instruction for it.
        let pairs = |ty: Type| ty.size() == 2 && self.target.compute >= 80;
        let mut values = BTreeMap::new();
        let mut after = Vec::new();
        for (&slot, address) in slots.iter().zip(&located.addresses) {
            let ty = self.storage[slot];
            match (slot < reads, self.is_vectorizable(slot, 1, width)) {
                (true, true) => {
                    lines.push(format!("let x{slot} = {};", self.read_wide(slot, width, address)));
                    values.insert(slot, convert(&format!("x{slot}.v[v]"), ty, self.value[slot]));
                }
                (true, false) => {
                    values.insert(slot, self.load(slot, &element(slot, address)));
                }
                (false, true) => {
                    let b = self.bindings.of[slot].expect("what lies has elements");
                    let w = slot - reads;
                    let held = if pairs(ty) { F32 } else { ty };
                    lines.push(format!("wide<{}, {width}> o{w};", held.name()));
                    let pair = |k: usize| format!("pair<{}>(o{w}.v[{k}], o{w}.v[{}])", ty.name(), k + 1);
                    let value = if pairs(ty) {
                        let all: Vec<_> = (0..width).step_by(2).map(pair).collect();
                        format!("wide<u32, {}>{{{{{}}}}}", width / 2, all.join(", "))
                    } else {
                        format!("o{w}")
                    };
                    after.push(format!("write(b{b} + ({address}), {value});"));
                }
                (false, false) => {}
            }
        }
        // The channel that a value is of.
        let mut own: Space = Vec::new();
        own.extend(space.iter().map(|var| {
            over(if var.name == "o" { "c" } else { var.name }, &kernel.shape, var.pieces.iter().map(|p| p.axis))
        }));
        let input = |j: u32| match j {
            0 => Input::Value(format!("bitcast<wide<f32, {width}>>(sum).v[v]"), F32),
            j => {
                let slot = core + j as usize - 1;
                Input::Value(values[&slot].clone(), self.value[slot])
            }
        };
        let Scalars { statements, results, .. } = self.body(&kernel.body, &own, input, &[], &[])?;
        let mut each = vec!["let c = o + v;".to_owned()];
        each.extend(statements);
        for (w, (value, ty)) in results.iter().enumerate() {
            let slot = reads + w;
            let Some(b) = self.bindings.of[slot] else { continue };
            if self.is_vectorizable(slot, 1, width) {
                let held = if pairs(self.storage[slot]) { F32 } else { self.storage[slot] };
                each.push(format!("o{w}.v[v] = {};", convert(value, *ty, held)));
            } else {
                let at = slots.iter().position(|&s| s == slot).expect("it is among them");
                let address = element(slot, &located.addresses[at]);
                each.push(self.write(slot, b, &address, value, *ty));
            }
        }
        lines.push("#pragma unroll".into());
        lines.extend(block(&format!("for (i32 v = 0; v < {width}; v++)"), each));
        lines.extend(after);
        Ok(lines)
    }
}

/// Neighbouring places along an axis, whose windows lie in the same rows.
struct Strip<'a> {
    window: &'a Window,
    along: usize,
    places: usize,
    /// The first place of the last strip.
    last: usize,
    is_transposed: bool,
}

impl Strip<'_> {
    /// How far down a row of data lies from that of the strip's first place, the place, and the tap that meets the row there.
    fn terms(&self) -> Vec<(isize, usize, usize)> {
        let [stride, dilation, pad] = self.numbers();
        let pairs = (0..self.places).flat_map(|place| (0..self.window.kernel[self.along]).map(move |tap| (place, tap)));
        let term = |(place, tap): (usize, usize)| match self.is_transposed {
            false => Some((place as isize * stride + tap as isize * dilation, place, tap)),
            true => {
                let down = place as isize + pad - tap as isize * dilation;
                (down.rem_euclid(stride) == 0).then_some((down.div_euclid(stride), place, tap))
            }
        };
        let mut terms: Vec<_> = pairs.filter_map(term).collect();
        terms.sort_unstable();
        terms
    }

    fn numbers(&self) -> [isize; 3] {
        let Window { strides, dilations, pads, .. } = self.window;
        [strides, dilations, pads].map(|of| of[self.along] as isize)
    }

    /// The number of each row, by how far down it lies.
    fn rows(&self) -> BTreeMap<isize, usize> {
        self.terms().iter().map(|(down, ..)| *down).collect::<BTreeSet<_>>().into_iter().zip(0..).collect()
    }

    /// How far down each row lies, and when it is within an extent of the data.
    fn bounds(&self, extent: usize) -> Vec<Vec<(&'static str, String)>> {
        let [stride, _, pad] = self.numbers();
        let last = self.last as isize;
        let [first, last] = if self.is_transposed { [0, last / stride] } else { [-pad, last * stride - pad] };
        let bound = |down: isize| {
            let low = (first + down < 0).then(|| format!("v + {down} >= 0"));
            let high = (last + down >= extent as isize).then(|| format!("v + {down} < IN_Y"));
            let inside = [low, high].into_iter().flatten().collect::<Vec<_>>().join(" && ");
            vec![("DOWN", down.to_string()), ("INSIDE", if inside.is_empty() { "true".into() } else { inside })]
        };
        self.rows().into_keys().map(bound).collect()
    }
}

/// The coordinates `(u, e)` of `phase` per axis, as statements and expressions. What no number of taps depends on is left out.
fn phase_of(phases: &Phases, batch: usize, statements: &mut Vec<String>) -> [[String; 2]; 3] {
    let each: Vec<usize> = (0..3).flat_map(|a| [phases.cycle[a], phases.apart[a]]).collect();
    let groups = batch / phases.count();
    let varies = (0..3).flat_map(|a| [!phases.kernel[a].is_multiple_of(phases.cycle[a]), true]);
    let wanted: Vec<bool> = [false].into_iter().chain(varies).collect();
    let names = split("phase", &[&[groups], &each[..]].concat(), &wanted, statements);
    std::array::from_fn(|a| [names[2 * a + 1].clone(), names[2 * a + 2].clone()])
}

/// `few` for most phases of an axis, `more` for the first ones, which have one tap more if the cycle does not divide the window.
fn by_taps(phases: &Phases, axis: usize, first: &str, few: &str, more: &str) -> String {
    match phases.kernel[axis] % phases.cycle[axis] {
        0 => more.to_owned(),
        longer => format!("select({few}, {more}, {first} < {longer})"),
    }
}

/// The inner extent `K` of `phase`.
fn depth_of_phase(phases: &Phases) -> Vec<String> {
    let (mut lines, most) = (Vec::new(), phases.taps());
    let names = phase_of(phases, phases.count(), &mut lines);
    let taps = (0..3).map(|a| {
        let [first, beside] = &names[a];
        let taps = by_taps(phases, a, first, &(most[a] - 1).to_string(), &most[a].to_string());
        if phases.apart[a] > 1 { format!("select(0, {taps}, {beside} == 0)") } else { taps }
    });
    let factors: Vec<String> = [phases.channels.to_string()].into_iter().chain(taps).filter(|n| n != "1").collect();
    lines.push(format!("let K = {};", if factors.is_empty() { "1".into() } else { factors.join(" * ") }));
    lines
}

/// The slice `k` of the largest phase that stands for slice `s` of the inner axis of the phase in `batch`.
fn slice_of_phase(phases: &Phases, batch: usize) -> Vec<String> {
    let (channels, most) = (phases.channels, phases.taps());
    let mut lines = vec!["let phase = batch;".to_owned()];
    let names = phase_of(phases, batch, &mut lines);
    lines.push(format!("let c = u32(s) % {channels}u;"));
    let (mut tap, mut inner, mut terms) = (format!("u32(s) / {channels}u"), channels, Vec::new());
    let several: Vec<usize> = (0..3).filter(|&a| most[a] > 1).collect();
    for &a in several.iter().skip(1).rev() {
        lines.push(format!("let tap{a} = {tap};"));
        let digit = |op: char| {
            let of = |count: usize| format!("tap{a} {op} {count}u");
            by_taps(phases, a, &names[a][0], &of(most[a] - 1), &of(most[a]))
        };
        terms.push(format!("({}) * {inner}u", digit('%')));
        tap = digit('/');
        inner *= most[a];
    }
    terms.extend(several.first().map(|_| format!("({tap}) * {inner}u")));
    let sum = ["c".to_owned()].into_iter().chain(terms).collect::<Vec<_>>().join(" + ");
    lines.push(format!("let k = i32({sum});"));
    lines
}
