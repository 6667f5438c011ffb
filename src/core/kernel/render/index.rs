//! Elements that are chosen by indices, by padding, or by interpolation.

use super::locate::locate;
use super::scalar::Type::{F32, I32, I64};
use super::scalar::{convert, literal};
use super::{Module, kernels};
use crate::kernel::algorithm::Text;
use crate::kernel::meaning::mismatch;
use crate::kernel::schedule::map::{LISTED, NOTED, TEAM, looks};
use crate::kernel::space::{Space, over};
use crate::kernel::{Nearest, PadMode, ResizeMode, Template};
use std::collections::BTreeSet;

kernels! {
    |module, _| module.gather() => {
        gather "gather.wgsl": "elements chosen by index operands",
    }
    |module, _| module.scatter() => {
        scatter "scatter.wgsl": "updates stored where an index operand says",
    }
    |module, text| module.sum_by_index(text) => {
        sum_by_index "sum_by_index.wgsl": "updates added up by an index operand",
    }
    |module, _| module.pad() => {
        pad "pad.wgsl": "data surrounded by a constant, its edge, its mirror image or itself",
    }
    |module, _| module.resize() => {
        resize "resize.wgsl": "nearest, linear or cubic interpolation",
    }
}

/// The end of a function that gives an index from the start of its axis.
const FROM_START: &str = "return select(raw, raw + EXTENT, raw < 0);";

impl Module<'_> {
    /// Axes apart from those `still`: function `base(i)` for the address that the latter add up to, and per other axis
    /// `coordinate$(i)`, `EXTENT$` and `STRIDE$` of the data.
    fn walk(&mut self, still: impl Fn(usize) -> bool) -> Vec<usize> {
        let data = self.access(0);
        let moving: Vec<usize> = (0..data.shape.len()).filter(|&a| !still(a)).collect();
        let mut base = data.clone();
        moving.iter().for_each(|&a| base.strides[a] = 0);
        let space = self.flat();
        let located = locate(&space, &[&base], &BTreeSet::new());
        let mut body = located.statements;
        body.push(format!("return {};", located.addresses[0]));
        self.function("base", &[("i", I32)], Some(I32), body);
        for (k, &axis) in moving.iter().enumerate() {
            let located = locate(&space, &[], &BTreeSet::from([axis]));
            let mut body = located.statements;
            body.push(format!("return {};", located.coordinates[&axis]));
            self.function(&format!("coordinate{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), data.shape[axis] as isize);
            self.int(format!("STRIDE{k}"), data.strides[axis]);
        }
        self.lists.insert("axis", vec![Vec::new(); moving.len()]);
        moving
    }

    fn gather(&mut self) -> Result<(), String> {
        let Template::Gather { strides, extents } = &self.kernel.template else { mismatch(&self.kernel.template) };
        self.walk(|_| true);
        self.loader("data", 0);
        let space = self.flat();
        for (k, (&stride, &extent)) in strides.iter().zip(extents).enumerate() {
            let (mut body, at) = self.index(1 + k, &space);
            body.push(format!("return {at};"));
            self.function(&format!("index{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), extent as isize);
            self.int(format!("STRIDE{k}"), stride);
        }
        self.lists.insert("index", vec![Vec::new(); strides.len()]);
        self.store(&space, Some(self.value[0]), None, &[])?;
        self.per_element();
        Ok(())
    }

    /// An index that an operand holds at a point of a space, as `i32`.
    fn index(&self, slot: usize, space: &Space) -> (Vec<String>, String) {
        let (body, address) = self.address(slot, space);
        let (mut at, ty) = (self.load(slot, &address), self.value[slot]);
        if ty == I64 {
            // An index that is far outside stays outside.
            let [low, high] = I32.bounds().into();
            at = format!("clamp({at}, {}, {})", literal(low, I64), literal(high, I64));
        }
        (body, convert(&at, ty, I32))
    }

    fn sum_by_index(&mut self, text: &Text) -> Result<(), String> {
        let [updates, indices] = [0, 1].map(|slot| &self.access(slot).shape);
        let (mut body, at) = self.index(1, &vec![over("u", indices, 0..1)]);
        body.extend([format!("let raw = {at};"), FROM_START.into()]);
        self.function("chosen", &[("u", I32)], Some(I32), body);
        let space = vec![over("u", updates, 0..1), over("rest", updates, 1..updates.len())];
        let (mut body, address) = self.address(0, &space);
        body.push(format!("return {};", self.load(0, &address)));
        let ty = self.value[0];
        self.function("update", &[("u", I32), ("rest", I32)], Some(ty), body);
        let shape = &self.kernel.shape;
        self.ints(&[("EXTENT", shape[0]), ("INNER", shape[1..].iter().product()), ("UPDATES", indices[0])]);
        self.constant("ZERO", 0.0, ty);
        let threads = text.launch(self.kernel, self.target).threads as usize;
        let each = looks(self.kernel, threads);
        self.flags.extend(each.map(|_| "ONCE"));
        self.ints(&[("BITS", NOTED), ("TEAM", TEAM), ("EACH", each.unwrap_or(1)), ("LISTED", LISTED)]);
        self.shared.push(("notes", I32, threads));
        match each {
            Some(_) => self.shared.extend([("listed", I32, LISTED), ("places", I32, LISTED)]),
            None => self.shared.push(("teams", I32, threads.div_ceil(TEAM))),
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element();
        Ok(())
    }

    fn scatter(&mut self) -> Result<(), String> {
        let &Template::Scatter { axis, stride, extent, unique, join } = &self.kernel.template else {
            mismatch(&self.kernel.template)
        };
        let space = self.flat();
        let (mut body, at) = self.index(1, &space);
        body.extend([format!("let raw = {at};"), FROM_START.into()]);
        self.function("chosen", &[("i", I32)], Some(I32), body);
        let (mut body, address) = self.address(2, &space);
        body.push(format!("return {};", self.load(2, &address)));
        self.function("update", &[("i", I32)], Some(self.value[2]), body);
        self.int("EXTENT", extent as isize);
        if join.is_some() || !unique {
            let step = self.kernel.shape[axis + 1..].iter().product();
            self.ints(&[("UPDATES", self.kernel.shape[axis]), ("STEP", step)]);
        }
        if let Some(join) = join {
            self.flags.push("JOIN");
            let ty = self.value[0];
            self.combine("join", join, ty);
            let (mut body, base) = self.address(0, &space);
            body.push(format!("return {};", self.load(0, &format!("{base} + place * {stride}"))));
            self.function("stored", &[("i", I32), ("place", I32)], Some(ty), body);
        } else if !unique {
            self.flags.push("REPEATS");
            let located = locate(&space, &[], &BTreeSet::from([axis]));
            let mut body = located.statements;
            body.push(format!("return {};", located.coordinates[&axis]));
            self.function("coordinate", &[("i", I32)], Some(I32), body);
        }
        let result = self.kernel.reads.len();
        if let Some(binding) = self.bindings.of[result] {
            let (mut body, base) = self.address(result, &space);
            body.push(self.write(result, binding, &format!("{base} + place * {stride}"), "value", self.value[2]));
            self.function("store", &[("i", I32), ("place", I32), ("value", self.value[2])], None, body);
        }
        self.per_element();
        Ok(())
    }

    fn pad(&mut self) -> Result<(), String> {
        let &Template::Pad { ref before, mode } = &self.kernel.template else { mismatch(&self.kernel.template) };
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| before[a] == 0 && data.shape[a] == shape[a]);
        moving.iter().enumerate().for_each(|(k, &a)| self.int(format!("BEFORE{k}"), before[a]));
        self.loader("data", 0);
        let ty = self.value[0];
        let fill = if let PadMode::Constant(value) = mode { value } else { 0.0 };
        self.constant("FILL", fill, ty);
        let outside: &[&str] = match mode {
            PadMode::Constant(_) => &[],
            PadMode::Edge => &["return clamp(at, 0, n - 1);"],
            PadMode::Wrap => &["let r = at - (at / n) * n;", "return select(r, r + n, r < 0);"],
            PadMode::Reflect => &[
                "let period = max(2 * (n - 1), 1);",
                "let r = at - (at / period) * period;",
                "let p = select(r, r + period, r < 0);",
                "return min(p, 2 * (n - 1) - p);",
            ],
        };
        if outside.is_empty() {
            self.flags.push("CONSTANT");
        } else {
            let outside = outside.iter().map(|&line| line.to_owned()).collect();
            self.function("outside", &[("at", I32), ("n", I32)], Some(I32), outside);
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element();
        Ok(())
    }

    fn resize(&mut self) -> Result<(), String> {
        let &Template::Resize { ref scales, ref offsets, mode } = &self.kernel.template else {
            mismatch(&self.kernel.template)
        };
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| {
            let stays = |i: usize| match mode {
                ResizeMode::Nearest(rule) => rule.choose(i as f64 * scales[a] + offsets[a]) == i as f64,
                _ => scales[a] == 1.0 && offsets[a] == 0.0,
            };
            data.shape[a] == shape[a] && (0..shape[a]).all(stays)
        });
        for (k, &a) in moving.iter().enumerate() {
            let offset = match mode {
                ResizeMode::Nearest(rule) => nearest(rule, scales[a], offsets[a], shape[a]),
                _ => offsets[a],
            };
            self.constant(format!("SCALE{k}"), scales[a], F32);
            self.constant(format!("OFFSET{k}"), offset, F32);
        }
        self.loader("data", 0);
        let (width, first, inside, place, falloff): (usize, isize, bool, &str, Vec<String>) = match mode {
            ResizeMode::Nearest(_) => {
                self.flags.push("NEAREST");
                self.store(&self.flat(), Some(self.value[0]), None, &[])?;
                self.per_element();
                return Ok(());
            }
            ResizeMode::Linear => {
                (2, 0, false, "return clamp(x, 0.0f, f32(n - 1));", vec!["return max(1.0f - abs(d), 0.0f);".into()])
            }
            ResizeMode::Cubic { a, exclude_outside } => {
                let near = "((A + 2.0f) * e - (A + 3.0f)) * e * e + 1.0f";
                let far = "((A * e - 5.0f * A) * e + 8.0f * A) * e - 4.0f * A";
                self.constant("A", a, F32);
                let body =
                    vec!["let e = min(abs(d), 2.0f);".into(), format!("return select({far}, {near}, e <= 1.0f);")];
                (4, -1, exclude_outside, "return x;", body)
            }
        };
        self.int("WIDTH", width as isize);
        self.int("FIRST", first);
        self.int("TAPS", width.pow(moving.len() as u32) as isize);
        if inside {
            self.flags.push("INSIDE");
        }
        self.function("place", &[("x", F32), ("n", I32)], Some(F32), vec![place.into()]);
        self.function("falloff", &[("d", F32)], Some(F32), falloff);
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element();
        Ok(())
    }
}

/// The offset with which `floor(f32(index) * scale + offset)` in `f32` is the neighbour that the rule chooses in `f64`, for
/// every index, with room for rounding. Ties are moved by less than any other coordinate is away from one.
fn nearest(rule: Nearest, scale: f64, offset: f64, extent: usize) -> f64 {
    let shift = match rule {
        Nearest::Floor => 0.0,
        Nearest::Ceil => 1.0,
        Nearest::RoundPreferFloor | Nearest::RoundPreferCeil => 0.5,
    };
    let agrees = |moved: f64| {
        (0..extent).all(|i| {
            let wanted = rule.choose(i as f64 * scale + offset);
            let got = i as f64 * f64::from(scale as f32) + f64::from(moved as f32);
            let room = (i as f64 * scale).abs().max(1.0) * f64::from(f32::EPSILON) * 2.0;
            (got - room).floor() == wanted && (got + room).floor() == wanted
        })
    };
    let nudges = [0.0, 1e-4, -1e-4, 1e-3, -1e-3, 1e-2, -1e-2];
    let exact = offset + shift;
    nudges.iter().map(|nudge| exact + nudge).find(|&moved| agrees(moved)).unwrap_or(exact)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rendered formula, in the device's precision, against the rule.
    #[test]
    fn neighbours_are_exact_at_ties() {
        let rules = [Nearest::Floor, Nearest::Ceil, Nearest::RoundPreferFloor, Nearest::RoundPreferCeil];
        for rule in rules {
            for (from, to) in [(1, 3), (3, 1), (4, 8), (7, 5), (100, 300), (333, 1000), (1000, 333), (5, 5)] {
                let scale = f64::from(from) / f64::from(to);
                // Ties that f64 itself cannot tell are moved, as the operator's row does.
                let away = f64::from(from) * (-21f64).exp2();
                let away = if matches!(rule, Nearest::Floor | Nearest::RoundPreferCeil) { away } else { -away };
                let exact = to == 8 || to == 5 && from == 5;
                for offset in [0.0, 0.5 * scale - 0.5].map(|o| if exact { o } else { o + away }) {
                    let moved = nearest(rule, scale, offset, to as usize) as f32;
                    for i in 0..to {
                        let got = (i as f32 * scale as f32 + moved).floor();
                        let wanted = rule.choose(f64::from(i) * scale + offset);
                        assert_eq!(f64::from(got), wanted, "{rule:?} {from}/{to} + {offset} at {i}");
                    }
                }
            }
        }
    }
}
