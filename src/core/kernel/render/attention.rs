//! The holes of the attention templates.

use super::locate::locate;
use super::scalar::Type::{self, BF16, F16, F32, I32};
use super::scalar::convert;
use super::vector::{matrix, tile_steps};
use super::{Dialect, Input, Module, block, kernels};
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Instr};
use crate::kernel::algorithm::{Cut, Decode, Mma, Regs, Shared, Text, Vec4};
use crate::kernel::meaning::mismatch;
use crate::kernel::schedule::attention::{Extents, STEP, tile_width};
use crate::kernel::space::{BYTES, Var};
use crate::kernel::templates::{Band, band};
use crate::kernel::{Fold, Guard, Template};
use std::collections::{BTreeMap, BTreeSet};

kernels! {
    |module, text| module.attention(text) => {
        attention "attention.wgsl": "queries against keys and values: scores pass through workgroup memory",
        attention_vec4 "attention_vec4.wgsl": "the same with sums in registers, four neighbours at a time",
        attention_regs "attention_regs.cu": "the same with scores and sums in registers",
        attention_mma "attention_mma.cu": "the same of 16-bit floats on tensor cores",
        attention_decode "attention_decode.wgsl": "attention of at most eight rows: many invocations share keys and values",
        attention_decode_vec16b "attention_decode_vec16b.cu": "the same, 16 bytes at a time; of few heads the workgroups of a cluster share them, too",
    }
}

impl Module<'_> {
    fn attention(&mut self, text: &Text) -> Result<(), String> {
        let (Template::Attention { score, guarded, fold, .. }, Text::Attention(cut)) = (&self.kernel.template, text)
        else {
            mismatch(&self.kernel.template)
        };
        let shape = &self.kernel.shape;
        let extents = Extents::new(self.kernel);
        self.attention_operands(&extents, cut);
        self.constant("LOWEST", f32::MIN.into(), F32);
        let Extents { m, k, n, e, .. } = extents;
        self.ints(&[("M", m), ("N", n), ("K", k), ("COLUMNS_OUT", e)]);
        if let Some(guard) = *guarded {
            self.flags.push("GUARDED");
            // `weightless` takes a row's sum of powers. It is true if the row weighs nothing.
            if self.dialect == Dialect::Cuda {
                let whole = if guard == Guard::Unseen { "whole == 0.0f" } else { "!(whole > 0.0f)" };
                self.declarations.push(format!("const auto weightless = [](f32 whole) {{ return {whole}; }};"));
            }
        }
        if let Some(Band { from, to }) = band(self.kernel) {
            // The keys that queries from `m` on may see, and the end of those that queries before `m` may see.
            self.flags.push("BAND");
            let first = from.map_or("return 0;".into(), |from| format!("return clamp(m + ({from}), 0, N);"));
            let end = to.map_or("return N;".into(), |to| format!("return clamp(m + ({to}), 0, N);"));
            self.function("first_key", &[("m", I32)], Some(I32), vec![first]);
            self.function("end_key", &[("m", I32)], Some(I32), vec![end]);
        }
        match cut {
            Cut::Shared(_) => self.score_each(score, &extents, true)?,
            Cut::Decode(_) | Cut::Vec4(_) => self.score_each(score, &extents, false)?,
            Cut::Regs(regs) => self.score_pairs(score, &extents, [regs.rows, regs.columns], [1, 1])?,
            Cut::Mma(mma) => {
                // The powers of what is only scaled take one instruction to prepare.
                let powers = !matches!(fold, Fold::Plain { .. });
                let (identity, scale) = (Body::identity(DType::F32), scale(score).filter(|_| powers));
                let score = if scale.is_some() { identity } else { without_quotients(score) };
                if !powers {
                    // Scores that are weights are rounded to 16 bits behind it.
                    self.declarations.push("const auto exp = [](f32 v) { return decay(v); };".into());
                }
                self.constant("UNIT", scale.unwrap_or(1.0) * std::f64::consts::LOG2_E, F32);
                if scale.is_some() {
                    self.flags.push("LINEAR");
                }
                let tiles = mma.columns / 8;
                let pairs = [2 * mma.each * tiles, tiles];
                self.score_pairs(&score, &extents, [mma.rows, mma.teams * mma.columns], pairs)?;
            }
        }
        let outs: Vec<Var> = extents.space(shape, ["m", "n"]);
        self.store(&outs, Some(F32), Some("m < M && n < COLUMNS_OUT"), &[])?;
        match cut {
            Cut::Shared(shared) => self.attention_shared(&extents, shared),
            Cut::Decode(decode) => self.attention_decode(&extents, decode),
            Cut::Vec4(vec4) => self.attention_vec4(&extents, vec4),
            Cut::Regs(regs) => self.attention_regs(&extents, regs),
            Cut::Mma(mma) => self.attention_mma(&extents, mma),
        }
        Ok(())
    }

    /// The functions `a`, `b` and `c` of queries, keys and values, `g` and `d` of a second product's operands, and those of four neighbours where the cut reads vectors.
    fn attention_operands(&mut self, extents: &Extents, cut: &Cut) {
        let rank = self.kernel.shape.len();
        for (slot, name, names, inner, axis, flag) in [
            (0, "a", ["m", "k"], ("k", extents.k), rank - 1, "A_WIDE"),
            (1, "b", ["k", "n"], ("k", extents.k), rank - 2, "B_WIDE"),
            (2, "c", ["n", "e"], ("e", extents.e), rank - 1, "C_WIDE"),
            (3, "g", ["m", "k"], ("k", extents.f), rank - 1, "G_WIDE"),
            (4, "d", ["k", "n"], ("k", extents.f), rank - 2, "D_WIDE"),
        ] {
            if slot >= extents.fold.operands() {
                continue;
            }
            let space = extents.space(&self.access(slot).shape, names);
            let wide = match cut {
                Cut::Decode(decode) => slot > 0 && decode.vectors[slot - 1],
                Cut::Regs(_) => true,
                Cut::Shared(_) | Cut::Vec4(_) | Cut::Mma(_) => false,
            };
            if wide && self.fours(&format!("{name}_wide"), slot, &space, names, axis) {
                self.flags.push(flag);
                // Elements of a binding of vectors cannot be had one by one.
                if self.dialect == Dialect::Wgsl {
                    continue;
                }
            }
            // The last lanes may have no column, and the last vectors fewer than four.
            let (mut body, address) = self.address(slot, &space);
            let load = self.load(slot, &address);
            let ragged = match cut {
                Cut::Vec4(_) | Cut::Decode(_) => !inner.1.is_multiple_of(4),
                Cut::Shared(_) | Cut::Regs(_) | Cut::Mma(_) => name == "c",
            };
            if ragged {
                body.push("var value = 0.0f;".into());
                body.push(format!("if ({} < {}) {{ value = {load}; }}", inner.0, inner.1));
                body.push("return value;".into());
            } else {
                body.push(format!("return {load};"));
            }
            self.function(name, &matrix(names), Some(F32), body);
        }
    }

    /// A function `score(batch, m, n, value)`. If `outside`, it may be called outside of the scores, and returns the lowest value there.
    fn score_each(&mut self, score: &Body, extents: &Extents, outside: bool) -> Result<(), String> {
        let mut columns = self.kernel.shape.clone();
        columns[self.kernel.shape.len() - 1] = extents.n;
        let input = |j: u32| match j {
            0 => Input::Value("value".into(), F32),
            _ => Input::Slot(2 + j as usize),
        };
        let code = self.body(score, &extents.space(&columns, ["m", "n"]), input, &[], &[])?;
        let (value, from) = &code.results[0];
        let (mut body, value) = (code.statements, convert(value, *from, F32));
        if outside {
            body.push(format!("result = {value};"));
            body = block("if (m < M && n < N)", body);
            body.insert(0, "var result = LOWEST;".into());
            body.push("return result;".into());
        } else {
            body.push(format!("return {value};"));
        }
        let [b, first, second] = matrix(["m", "n"]);
        self.function("score", &[b, first, second, ("value", F32)], Some(F32), body);
        Ok(())
    }

    /// For queries and keys, true if neighbours are along the inner axis.
    fn along_inner(&self) -> [bool; 2] {
        let rank = self.kernel.shape.len();
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        [!dense(0, rank - 2) || dense(0, rank - 1), !dense(1, rank - 1)]
    }

    fn attention_shared(&mut self, extents: &Extents, &Shared { rows, columns: width, lanes }: &Shared) {
        let &Extents { m, e, .. } = extents;
        let groups = m.div_ceil(rows);
        self.ints(&[("ROWS", rows), ("COLUMNS", width), ("LANES", lanes), ("GROUPS", groups), ("STEP", STEP)]);
        self.ints(&tile_steps(self.along_inner(), STEP, [rows, width]));
        self.lists.insert("sum", vec![Vec::new(); e.div_ceil(lanes)]);
        self.lists.insert("product", vec![Vec::new(); width / lanes]);
        self.shared.push(("tile_a", F32, rows * STEP));
        self.shared.push(("tile_b", F32, width * STEP));
        self.shared.push(("scores", F32, rows * width));
        self.shared.push(("partial", F32, rows * lanes));
    }
}

/// The code with products by a reciprocal for quotients by numbers: tensor cores' sums are rounded more than that.
fn without_quotients(body: &Body) -> Body {
    let mut body = body.clone();
    let divides = |instr: &Instr, i: usize| matches!(instr.code, Code::Binary(Binary::Div, a, b) if b as usize == i && a != b && instr.dtype.is_float());
    for i in 0..body.code.len() {
        let Code::Const(number) = body.code[i].code else { continue };
        let mut readers = body.code.iter().filter(|instr| instr.code.operands().any(|o| o as usize == i)).peekable();
        let reciprocal = 1.0 / number;
        let holds = reciprocal.is_finite() && (reciprocal as f32).is_normal() && !body.results.contains(&(i as u32));
        if !holds || readers.peek().is_none() || !readers.all(|instr| divides(instr, i)) {
            continue;
        }
        body.code[i].code = Code::Const(reciprocal);
        for instr in &mut body.code {
            if let Code::Binary(Binary::Div, a, b) = instr.code
                && b as usize == i
            {
                instr.code = Code::Binary(Binary::Mul, a, b);
            }
        }
    }
    body
}

/// The factor of a score that is its product times a number and nothing more. `None` unless the lowest value times the factor has a power
/// of two.
fn scale(score: &Body) -> Option<f64> {
    let at = |mut i: u32| {
        // All floats are computed in one type.
        while let Code::Cast(from) = score.code[i as usize].code
            && [i, from].iter().all(|&value| score.code[value as usize].dtype.is_float())
        {
            i = from;
        }
        score.code[i as usize].code
    };
    let scaled = |value: u32, by: u32| match (at(value), at(by)) {
        (Code::Input(0), Code::Const(by)) => Some(by),
        _ => None,
    };
    let factor = match at(*score.results.first()?) {
        Code::Input(0) => 1.0,
        Code::Binary(Binary::Mul, a, b) => scaled(a, b).or_else(|| scaled(b, a))?,
        _ => return None,
    };
    (factor > 0.0 && factor <= 0.5).then_some(factor)
}

impl Module<'_> {
    fn attention_decode(&mut self, &Extents { m, k, n, e, .. }: &Extents, decode: &Decode) {
        let &Decode { rows, columns, lanes, across, cluster, .. } = decode;
        let rank = self.kernel.shape.len();
        let (depth, keys, groups) = (k.div_ceil(4), Decode::THREADS / lanes, m.div_ceil(rows));
        let along = self.access(1).strides[rank - 1] != 1;
        let (key_step, lane_step) = if along { (lanes, 1) } else { (1, keys) };
        self.ints(&[
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("LANES", lanes),
            ("KEYS", keys),
            ("KEY_STEP", key_step),
            ("LANE_STEP", lane_step),
            ("PITCH", decode.pitch()),
            ("PARTS", decode.parts()),
            ("ACROSS", across),
            ("CLUSTER", cluster),
            ("GROUPS", groups),
            ("DEPTH", depth),
            ("WIDTH", e.div_ceil(4)),
        ]);
        if !n.is_multiple_of(columns) {
            self.flags.push("RAGGED");
        }
        let cuda = self.dialect == Dialect::Cuda;
        if cuda {
            self.shared.push(("queries", F32, 4 * rows * depth));
            self.clustered(cluster);
        } else {
            self.shared.push(("queries", Type::Vec4, rows * depth));
            self.list_decode(rows, columns / keys);
        }
        self.shared.push(("tile", F32, decode.tile()));
        self.shared.push(("scores", F32, rows * columns));
        self.shared.push(("maxima", F32, rows * 16));
        self.shared.push(("totals", F32, Decode::THREADS));
        if cluster > 1 {
            self.shared.push(("found", F32, decode.found(e)));
        }
    }

    /// Lists the lines that WGSL repeats for each row, and for each of the keys at a time.
    fn list_decode(&mut self, rows: usize, passes: usize) {
        let product = |i: usize| {
            let (down, over) = (i / passes, i % passes);
            vec![("DOWN", down.to_string()), ("OVER", over.to_string()), ("FOUR", format!("four{over}"))]
        };
        let weight = |i: usize| {
            let numbered = |names: &[(&'static str, &str)], at: usize| -> Vec<_> {
                names.iter().map(|&(name, to)| (name, format!("{to}{at}"))).collect()
            };
            let of_row = numbered(&[("TOTAL", "total"), ("TOP", "top"), ("SUM", "sum"), ("DOWN", "")], i / 4);
            [of_row, numbered(&[("VALUE", "value"), ("AT", "t")], i % 4)].concat()
        };
        self.lists.insert("row", vec![Vec::new(); rows]);
        self.lists.insert("pass", vec![Vec::new(); passes]);
        self.lists.insert("product", (0..rows * passes).map(product).collect());
        self.lists.insert("four", vec![Vec::new(); 4]);
        self.lists.insert("weight", (0..rows * 4).map(weight).collect());
    }

    fn attention_vec4(&mut self, &Extents { m, k, n, e, .. }: &Extents, vec4: &Vec4) {
        let &Vec4 { rows, lanes, split } = vec4;
        let (depth, columns, groups) = (k.div_ceil(4), 4 * lanes, m.div_ceil(rows));
        let [keys, values, len] = vec4.places(k, e);
        self.ints(&[
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("LANES", lanes),
            ("SIDE", Vec4::THREADS / lanes),
            ("GROUPS", groups),
            ("DEPTH", depth),
            ("PITCH", Vec4::pitch(k)),
            ("WIDTH", e.div_ceil(4)),
            ("KEYS", keys),
            ("VALUES", values),
        ]);
        self.ints(&tile_steps(self.along_inner(), depth, [rows, columns]));
        if split {
            self.flags.push("APART");
        }
        if !n.is_multiple_of(columns) {
            self.flags.push("RAGGED");
        }
        let sum = |piece: usize, row: usize| {
            let of_row = [("FADE", "fade"), ("WEIGHT", "weight"), ("WHOLE", "whole"), ("TOP", "top"), ("DOWN", "")];
            let of_piece =
                [("FIRST", "first"), ("SECOND", "second"), ("THIRD", "third"), ("FOURTH", "fourth"), ("OVER", "")];
            let numbered =
                |names: [(&'static str, &str); 5], at: usize| names.map(|(name, to)| (name, format!("{to}{at}")));
            [numbered(of_row, row), numbered(of_piece, piece)].concat()
        };
        let (each, pieces) = (vec4.each(), vec4.pieces(e));
        let sums = (0..pieces).flat_map(|piece| (0..each).map(move |row| sum(piece, row))).collect();
        self.lists.insert("sum", sums);
        self.lists.insert("row", vec![Vec::new(); each]);
        self.lists.insert("piece", vec![Vec::new(); pieces]);
        self.lists.insert("four", vec![Vec::new(); 4]);
        self.shared.push(("tile", Type::Vec4, len));
        self.shared.push(("weights", Type::Vec4, rows * lanes));
        self.shared.push(("partial", F32, rows * lanes));
    }

    fn attention_regs(&mut self, extents: &Extents, regs: &Regs) {
        let &Extents { m, k, e, .. } = extents;
        let &Regs { rows, columns, cluster } = regs;
        let rank = self.kernel.shape.len();
        let (width, each) = tile_width(e);
        if each > 1 {
            self.store_pairs(extents);
        }
        let groups = m.div_ceil(rows);
        let along = [rank - 2, rank - 1];
        let along = [0, 1].map(|slot| self.access(slot).strides[along[slot]] != 1);
        self.ints(&[
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("WIDTH", width),
            ("EACH", each),
            ("CLUSTER", cluster),
            ("GROUPS", groups),
        ]);
        self.ints(&tile_steps(along, k, [rows, columns]));
        self.clustered(cluster);
        self.shared.push(("tile", F32, regs.len(k, e)));
    }

    fn clustered(&mut self, cluster: usize) {
        self.cluster = cluster as u32;
        if cluster > 1 {
            self.flags.push("CLUSTERED");
        }
    }

    fn attention_mma(&mut self, extents: &Extents, mma: &Mma) {
        let &Extents { m, .. } = extents;
        let &Mma { rows, each, teams, columns, stages, cluster } = mma;
        let (rank, element) = (self.kernel.shape.len(), self.storage[0]);
        self.declarations.push(format!("typedef {} element;", element.name()));
        let fold = extents.fold;
        for (slot, name, flag) in [(0, "a_wide", "A_WIDE"), (3, "g_wide", "G_WIDE")] {
            if (slot == 0 || fold.products() == 2) && self.is_vectorizable(slot, rank - 1, 2) {
                let (mut body, address) = self.address(slot, &extents.space(&self.access(slot).shape, ["m", "k"]));
                body.push(format!("return {};", self.read_wide(slot, 2, &address)));
                self.wide_function(name, &matrix(["m", "k"]), "wide<element, 2>".into(), body);
                self.flags.push(flag);
            }
        }
        let wide = BYTES / element.size();
        for (slot, name, flag, names, axis) in [
            (1, "b_at", "B_WIDE", ["k", "n"], rank - 2),
            (2, "c_at", "C_WIDE", ["n", "e"], rank - 1),
            (4, "d_at", "D_WIDE", ["k", "n"], rank - 2),
        ] {
            if slot < fold.operands() && self.is_vectorizable(slot, axis, wide) {
                self.address_function(name, slot, &extents.space(&self.access(slot).shape, names), names);
                self.flags.push(flag);
            }
        }
        self.store_pairs(extents);
        let groups = m.div_ceil(rows);
        let stripe = teams * columns;
        let [depth, width, second] = extents.padded();
        let steps = |slot: usize, depth: usize| {
            if self.access(slot).strides[rank - 1] == 1 { [1, stripe] } else { [depth, 1] }
        };
        let [b_n, b_k] = steps(1, depth);
        let [d_n, d_k] = if fold.products() == 2 { steps(4, second) } else { [1, 1] };
        let (valued, double) = (fold != Fold::LogSum, fold.products() == 2);
        let plain = matches!(fold, Fold::Plain { .. });
        let flags = [(valued, "VALUES"), (double, "SECOND"), (plain, "PLAIN"), (fold == Fold::Softmax, "SOFTMAX")];
        self.flags.extend(flags.into_iter().filter_map(|(holds, flag)| holds.then_some(flag)));
        self.ints(&[
            ("ROWS", rows),
            ("EACH", each),
            ("COLUMNS", columns),
            ("STAGES", stages),
            ("CLUSTER", cluster),
            ("TEAMS", teams),
            ("STRIPE", stripe),
            ("DEPTH", depth),
            ("WIDTH", width),
            ("GROUPS", groups),
            ("B_N_STEP", b_n),
            ("B_K_STEP", b_k),
            ("PART_C", if valued { stripe * (width + 8) } else { 0 }),
            ("PART_D", if double { stripe * (second + 8) } else { 0 }),
            ("K_D", extents.f),
            ("DEPTH_D", second),
            ("D_N_STEP", d_n),
            ("D_K_STEP", d_k),
        ]);
        self.constant("LN_2", std::f64::consts::LN_2, F32);
        if teams * cluster > 1 {
            self.flags.push("PARTS");
        }
        self.clustered(cluster);
        self.shared.push(("tile", element, mma.bytes(extents) / 2));
    }

    /// Functions for two scores side by side, of which an invocation has `pairs`, so many of them `along` the keys: `look(batch, m, n, pair)`
    /// reads what they are made of beside products, where it lies side by side, and `score(batch, m, n, pair, v, value)` makes the one at
    /// `n`, the second if `v` is 1. What is outside is for the template to mend where keys are `RAGGED`.
    fn score_pairs(
        &mut self,
        score: &Body,
        extents: &Extents,
        [rows, keys]: [usize; 2],
        [pairs, along]: [usize; 2],
    ) -> Result<(), String> {
        let rank = self.kernel.shape.len();
        let mut columns = self.kernel.shape.clone();
        columns[rank - 1] = extents.n;
        let space = extents.space(&columns, ["m", "n"]);
        let (fold, from) = (extents.fold, extents.fold.operands());
        let further = from..self.kernel.template.core_reads();
        let side: Vec<usize> = further.clone().filter(|&slot| self.is_vectorizable(slot, rank - 1, 2)).collect();
        let accesses: Vec<_> = side.iter().map(|&slot| self.access(slot)).collect();
        let located = locate(&space, &accesses, &BTreeSet::new());
        let guard = |body: Vec<String>| {
            let ragged = |extent: usize, step: usize, text| (!extent.is_multiple_of(step)).then_some(text);
            let inside = [ragged(extents.m, rows, "m < M"), ragged(extents.n, keys, "n < N")];
            let inside: Vec<_> = inside.into_iter().flatten().collect();
            if inside.is_empty() || body.is_empty() {
                return body;
            }
            block(&format!("if ({})", inside.join(" && ")), body)
        };
        let mut body = if side.is_empty() { Vec::new() } else { located.statements };
        let mut names: BTreeMap<usize, String> = BTreeMap::new();
        for (&slot, address) in side.iter().zip(&located.addresses) {
            let ty = self.storage[slot];
            // As many at a time as lie so, and as an invocation has along the keys.
            let mut width = (BYTES / ty.size()).min(2 * along);
            while width > 2 && !self.is_vectorizable(slot, rank - 1, width) {
                width /= 2;
            }
            self.declarations.push(format!("wide<{}, {width}> x{slot}[{}];", ty.name(), 2 * pairs / width));
            let read = self.read_wide(slot, width, address);
            body.push(format!("if (pair * 2 % {width} == 0) {{ x{slot}[pair * 2 / {width}] = {read}; }}"));
            let element = format!("x{slot}[(pair * 2 + v) / {width}].v[(pair * 2 + v) % {width}]");
            names.insert(slot, convert(&element, ty, self.value[slot]));
        }
        let [b, first, second] = matrix(["m", "n"]);
        self.function("look", &[b, first, second, ("pair", I32)], None, guard(body));
        let input = |j: u32| match (j as usize).checked_sub(fold.products()).map(|j| from + j) {
            None => Input::Value(["value", "other"][j as usize].into(), F32),
            Some(slot) => match names.get(&slot) {
                Some(name) => Input::Value(name.clone(), self.value[slot]),
                None => Input::Slot(slot),
            },
        };
        let code = self.body(score, &space, input, &[], &[])?;
        let (value, from) = &code.results[0];
        let mut body = code.statements;
        body.push(format!("result = {};", convert(value, *from, F32)));
        // Nothing outside may be read.
        let body = if further.len() > side.len() { guard(body) } else { body };
        let lines = ["var result = value;".to_owned()].into_iter();
        let lines = lines.chain(body).chain(["return result;".into()]).collect();
        let params = [b, first, second, ("pair", I32), ("v", I32), ("value", F32), ("other", F32)];
        self.function("score", &params[..5 + fold.products()], Some(F32), lines);
        if !extents.n.is_multiple_of(keys) {
            self.flags.push("RAGGED");
        }
        Ok(())
    }

    /// A function that stores two elements side by side, where the result is stored as it is, and so lies.
    fn store_pairs(&mut self, extents: &Extents) {
        let (slot, rank) = (self.kernel.reads.len(), self.kernel.shape.len());
        let Some(b) = self.bindings.of[slot] else { return };
        let ty = self.storage[slot];
        let same = self.bound[b] == ty && matches!(ty, F16 | BF16 | F32) && self.kernel.body.is_identity();
        if !same || self.kernel.writes.len() != 1 || !self.is_vectorizable(slot, rank - 1, 2) {
            return;
        }
        let (mut body, address) = self.address(slot, &extents.space(&self.kernel.shape, ["m", "n"]));
        let [low, high] = ["low", "high"].map(|value| convert(value, F32, ty));
        body.push(format!("write(b{b} + ({address}), wide<{}, 2>{{{low}, {high}}});", ty.name()));
        let body = block(&format!("if (m < M && n < {})", extents.e), body);
        let [batch, first, second] = matrix(["m", "n"]);
        self.function("store_wide", &[batch, first, second, ("low", F32), ("high", F32)], None, body);
        self.flags.push("STORE_WIDE");
    }
}
