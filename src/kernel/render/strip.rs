//! Convolutions of few outputs per group, directly: strips of results that share what they read.
//!
//! With windows of `k` by `k` and strips of `s` results, an invocation reads `(s + k - 1) k` elements and `k k` weights for `s k k` products,
//! where its windows overlap: of 7 by 7 and 14 results, a fifth of an element and a fourteenth of a weight per product.

use super::locate::{Space, locate, over};
use super::scalar::Type::{self, Bool, F32, F64, I32, Vec2, Vec4};
use super::scalar::convert;
use super::templates::Launch;
use super::wide::inputs;
use super::{Dialect, Input, Module, Scalars};
use crate::kernel::Window;
use crate::shape::Access;
use crate::target::FEW_GROUPS;
use std::collections::{BTreeMap, BTreeSet};

/// Sums of an invocation, at most.
const SUMS: usize = 32;
/// Results of a strip, at most.
const STRIP: usize = 16;
/// Products of a strip that stand side by side in the text, at most, and rows of the longest window that strips lie along.
const TERMS: usize = 256;
const ROWS: usize = 64;

/// Results of each strip of an axis: as many as leave enough strips, which are of the same length as far as possible.
fn length(extent: usize, mut most: usize, enough: impl Fn(usize) -> bool) -> usize {
    loop {
        let strips = extent.div_ceil(most);
        if most <= 2 || enough(strips) {
            return extent.div_ceil(strips);
        }
        most /= 2;
    }
}

impl Module<'_> {
    pub(super) fn strips(&mut self, [out, input]: [usize; 2], window: &Window) -> Launch {
        let shape = &self.kernel.shape;
        if shape.contains(&0) {
            return Ok(("conv", 64, 0));
        }
        let data = self.access(0);
        let last = data.strides[1] == 1 && data.shape[1] > 1;
        let width = self.channels_at_once([out, input], last);
        // Neighbours are along the innermost axis, strips along one where neighbours' reads stay side by side.
        let reuse = |&axis: &usize| if shape[axis + 2] > 1 { window.kernel[axis] } else { 0 };
        let axes = if last { &[0, 2, 1][..] } else { &[0, 1] };
        let short = axes.iter().copied().filter(|&axis| window.kernel[axis] <= ROWS).max_by_key(reuse);
        let along = short.or(axes.iter().copied().min_by_key(|&axis| window.kernel[axis])).expect("there are axes");
        let mut order = vec![0, 1, 2];
        order.retain(|&axis| axis != along);
        order.insert(1, along);
        let (kernel, extent) = (window.kernel[along], shape[along + 2]);
        let blocks = shape[1] / width;
        let others = shape[0] * blocks * shape[order[0] + 2] * shape[order[2] + 2];
        let busy = match self.target.multiprocessors as usize {
            0 => 64 * FEW_GROUPS,
            n => 256 * n,
        };
        let most = STRIP.min(SUMS / width).min(TERMS / kernel.max(1)).max(1);
        let strip = length(extent, most, |strips| others * strips >= busy);
        let strips = extent.div_ceil(strip);

        // From the innermost: channels or some of them, x, strips, z, images; the rest of the channels outside of an image's positions.
        let lanes = if !last { 1 } else { (8..=32).rev().find(|&n| blocks.is_multiple_of(n)).unwrap_or(blocks) };
        let count = others * strips;
        let x_step = lanes;
        let strip_step = x_step * shape[order[2] + 2];
        let z_step = strip_step * strips;
        let block_step = z_step * shape[order[0] + 2];
        let constants = [
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
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.windowed(window, Some((out, input)), &order);
        self.rows(window, along, strip, strips);

        let vector = match width {
            4 => Vec4,
            2 => Vec2,
            _ => self.value[0],
        };
        self.read_rows(vector, [out, input]);
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
        let size = if count < 1 << 14 { 64 } else { 128 }.min(self.target.max_workgroup);
        Ok(("conv", size, count.div_ceil(size as usize) as u64))
    }

    /// How many channels an invocation takes: neighbours of which each has data of its own, or that share it.
    fn channels_at_once(&self, [out, input]: [usize; 2], last: bool) -> usize {
        let own = out == 1 && input == 1;
        let fits = |&width: &usize| match own {
            true => last && self.dialect == Dialect::Cuda && self.lies(0, 1, width),
            false => out.is_multiple_of(width),
        };
        // Two of `f64` at a time would gain nothing.
        [4, 2].into_iter().filter(|_| self.value[0] != F64).find(fits).unwrap_or(1)
    }

    /// The rows of data that the windows of a strip lie in, and what each contributes.
    fn rows(&mut self, window: &Window, along: usize, strip: usize, strips: usize) {
        let (stride, dilation, pad) = (window.strides[along], window.dilations[along], window.pads[along]);
        let taps = window.kernel[along];
        let terms = || (0..strip).flat_map(|sum| (0..taps).map(move |tap| (sum * stride + tap * dilation, sum, tap)));
        let rows: BTreeMap<usize, usize> =
            terms().map(|(down, ..)| down).collect::<BTreeSet<_>>().into_iter().zip(0..).collect();
        let (extent, first) = (self.access(0).shape[along + 2], (strips - 1) * strip * stride);
        let row = |&down: &usize| {
            let low = (down < pad).then(|| format!("v + {down} >= 0"));
            let high = (first + down >= extent + pad).then(|| format!("v + {down} < IN_Y"));
            let inside = [low, high].into_iter().flatten().collect::<Vec<_>>().join(" && ");
            let inside = if inside.is_empty() { "true".into() } else { inside };
            vec![("DOWN", down.to_string()), ("INSIDE", inside)]
        };
        let rows_list = rows.keys().map(row).collect();
        let mut products: Vec<_> = terms().collect();
        products.sort_unstable();
        let product = |(down, sum, tap)| {
            vec![("SUM", format!("sum{sum}")), ("ROW", format!("row{}", rows[&down])), ("TAP", format!("tap{tap}"))]
        };
        let terms_list = products.into_iter().map(product).collect();
        self.lists.insert("row", rows_list);
        self.lists.insert("term", terms_list);
        self.lists.insert("tap", vec![Vec::new(); taps]);
        self.lists.insert("sum", vec![Vec::new(); strip]);
    }

    /// `data(at, inside)`, of each channel or of all of them, `weight(at)` of each, and the sums' `ZERO`.
    fn read_rows(&mut self, vector: Type, [out, input]: [usize; 2]) {
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
        let weight = if self.dialect == Dialect::Cuda && width > 1 && self.lies(1, 0, width) {
            let (_, read, value) = self.vector(1, width, "at");
            vec![format!("let x = {read};"), format!("return {value};")]
        } else {
            let at = |k: usize| if k > 0 { format!("at + {k} * WEIGHT_N") } else { "at".into() };
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
            |k: usize| if ty.size() == 2 { format!("apart<{}>(x.v[{k}])", ty.name()) } else { format!("x.v[{k}]") };
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
        // Two halves are rounded at once where there is an instruction for it.
        let pairs = |ty: Type| ty.size() == 2 && self.target.compute >= 80;
        let mut values = BTreeMap::new();
        let (mut each, mut after) = (Vec::new(), Vec::new());
        for (&slot, address) in slots.iter().zip(&located.addresses) {
            let ty = self.storage[slot];
            match (slot < reads, self.lies(slot, 1, width)) {
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
                    let value = match pairs(ty) {
                        true => format!(
                            "wide<u32, {}>{{{{{}}}}}",
                            width / 2,
                            (0..width).step_by(2).map(pair).collect::<Vec<_>>().join(", ")
                        ),
                        false => format!("o{w}"),
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
        each.push("let c = o + v;".to_owned());
        each.extend(statements);
        for (w, (value, ty)) in results.iter().enumerate() {
            let slot = reads + w;
            let lies = self.lies(slot, 1, width);
            let held = if lies && pairs(self.storage[slot]) { F32 } else { self.storage[slot] };
            let stored = convert(value, *ty, held);
            let Some(b) = self.bindings.of[slot] else { continue };
            if lies {
                each.push(format!("o{w}.v[v] = {stored};"));
            } else {
                let bound = self.bound[b];
                let stored =
                    if bound == self.storage[slot] { stored } else { format!("bitcast<{}>({stored})", bound.name()) };
                let at = slots.iter().position(|&s| s == slot).expect("it is among them");
                each.push(format!("b{b}[{}] = {stored};", element(slot, &located.addresses[at])));
            }
        }
        lines.push("#pragma unroll".into());
        lines.push(format!("for (i32 v = 0; v < {width}; v++) {{"));
        lines.extend(each.into_iter().map(|line| format!("    {line}")));
        lines.push("}".into());
        lines.extend(after);
        Ok(lines)
    }
}
