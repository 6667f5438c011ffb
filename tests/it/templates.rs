//! The template table: each row's columns agree with each other and with the row's meaning, on the row's samples.

use crate::kernels::elements;
use plimsoll::internals::kernel::meaning::{self, Memory, Order, evaluate, stores};
use plimsoll::internals::kernel::templates::{Along, TEMPLATES};
use plimsoll::internals::kernel::{Kernel, Operand, Pool, Template, Window, ZeroPoints};
use plimsoll::internals::shape::{Access, advance};
use plimsoll::internals::target::Family;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Every row's samples, with names.
fn samples() -> Vec<(String, Kernel)> {
    let of = |row: &&'static plimsoll::internals::kernel::templates::TemplateDef| {
        let name = row.name;
        (row.samples)().into_iter().enumerate().map(move |(i, kernel)| (format!("{name} {i}"), kernel))
    };
    TEMPLATES.iter().flat_map(of).collect()
}

/// Buffers for the operands read: small numbers of which no two neighbours are the same, indices from below 0 to beyond the end.
fn buffers(kernel: &Kernel) -> Vec<Vec<f64>> {
    let fill = |(slot, operand): (usize, &Operand)| {
        let value = |n: usize| {
            let n = (n * 7 + slot * 3) % 11;
            if operand.dtype.is_float() { 0.25 * n as f64 - 1.0 } else { n as f64 - 5.0 }
        };
        (0..elements(&kernel.reach(slot))).map(value).collect()
    };
    kernel.reads.iter().enumerate().map(fill).collect()
}

#[test]
fn every_template_has_one_row() {
    let names: HashSet<_> = TEMPLATES.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), TEMPLATES.len(), "names are unique");
    let mut found = BTreeSet::new();
    for row in TEMPLATES {
        assert!(row.doc.len() > 8 && !row.doc.contains('\n'), "{}: one line that says what it computes", row.name);
        let samples = (row.samples)();
        assert!(!samples.is_empty(), "{}: a row has samples", row.name);
        for kernel in samples {
            assert!(std::ptr::eq(kernel.template.def(), *row), "{}: a sample of {:?}", row.name, kernel.template);
            found.insert(match serde_json::to_value(&kernel.template).expect("a template is data") {
                serde_json::Value::String(tag) => tag,
                tagged => tagged.as_object().and_then(|map| map.keys().next()).expect("a variant has a tag").clone(),
            });
        }
    }
    // The variants, as the reader of plans lists them.
    let error = serde_json::from_str::<Template>("\"none of them\"").expect_err("no such template").to_string();
    // A loop launches kernels of other templates, a collective is the ranks' together: neither has a sample of its own.
    let variants = error.split('`').skip(3).step_by(2).filter(|name| !["repeat", "collective"].contains(name));
    let variants: BTreeSet<String> = variants.map(str::to_owned).collect();
    assert_eq!(found, variants);
}

#[test]
fn samples_are_well_formed() {
    for (name, kernel) in samples() {
        for family in [Family::Cpu, Family::Cuda, Family::Wgpu] {
            kernel.validate(family).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        assert!(evaluate(&kernel, &buffers(&kernel)).concat().iter().all(|v| v.is_finite()), "{name}");
    }
}

/// A kernel with something changed, and what that is.
fn mutant(kernel: &Kernel, what: impl Into<String>, change: impl FnOnce(&mut Kernel)) -> (String, Kernel) {
    let mut mutant = kernel.clone();
    change(&mut mutant);
    (what.into(), mutant)
}

/// True if a core operand may have any extent along an axis of its own.
fn is_free(template: &Template, operand: usize, axis: usize, rank: usize) -> bool {
    match template {
        Template::Pad { .. } | Template::Resize { .. } => true,
        // A row is filled up to whole blocks.
        Template::MatMulBits { .. } => operand == 0 && axis > 0,
        Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } => operand == 0 && axis >= 2,
        // Windows may lie in the padding. Only parts of the rows tie these.
        Template::ConvFilters { rows, .. } => axis >= 2 && (operand == 0 || axis != 3 || *rows == 1),
        Template::PoolGrad { .. }
        | Template::SumByIndex
        | Template::Map
        | Template::Row { .. }
        | Template::MatMul
        | Template::Attention { .. }
        | Template::Gather { .. }
        | Template::Scatter { .. }
        | Template::Scan { .. }
        | Template::Repeat(_)
        | Template::Collective(_) => false,
        // A last group may have fewer.
        Template::Sort { .. } => operand == 0 && axis + 1 == rank,
    }
}

fn broken_windows(window: &Window) -> Vec<Window> {
    let broken = |change: fn(&mut Window)| {
        let mut window = window.clone();
        change(&mut window);
        window
    };
    vec![
        broken(|w| w.kernel[2] = 0),
        broken(|w| w.strides[1] = 0),
        broken(|w| w.dilations[0] = 0),
        broken(|w| w.pads[1] = usize::MAX),
        broken(|w| w.strides[2] = 1 << 40),
    ]
}

/// Templates whose parameters fit no operands.
fn broken_templates(template: &Template) -> Vec<Template> {
    match template {
        Template::Map | Template::MatMul | Template::SumByIndex | Template::Repeat(_) | Template::Collective(_) => {
            Vec::new()
        }
        &Template::MatMulBits { bits, signed, block, zeros } => {
            let of = |bits, block| Template::MatMulBits { bits, signed, block, zeros };
            let all = [
                of(9, block),
                of(1, block),
                of(16, block),
                of(0, block),
                of(bits, 0),
                of(bits, 7),
                of(bits, usize::MAX),
            ];
            // Other extents, and other operands.
            let zeros = match zeros {
                ZeroPoints::Floats => ZeroPoints::Packed,
                ZeroPoints::Packed | ZeroPoints::Codes => ZeroPoints::Floats,
                ZeroPoints::Number(_) => return all.into(),
            };
            [&all[..], &[of(bits / 2, block), Template::MatMulBits { bits, signed, block, zeros }]].concat()
        }
        Template::Row { reductions, per_row, .. } => [9, usize::MAX]
            .map(|inner| Template::Row { inner, reductions: reductions.clone(), per_row: *per_row })
            .into(),
        Template::Attention { score, guarded, fold, .. } => [5, usize::MAX]
            .map(|further| Template::Attention { score: score.clone(), further, guarded: *guarded, fold: *fold })
            .into(),
        Template::Conv { groups, window, padding } => {
            let padding = *padding;
            let windows =
                broken_windows(window).into_iter().map(|window| Template::Conv { groups: *groups, window, padding });
            let groups = [0, 3, 5, usize::MAX].map(|groups| Template::Conv { groups, window: window.clone(), padding });
            windows.chain(groups).collect()
        }
        Template::PoolGrad { window } => {
            broken_windows(window).into_iter().map(|window| Template::PoolGrad { window }).collect()
        }
        Template::ConvTranspose { groups, window } => {
            let of = |groups, window: &Window| Template::ConvTranspose { groups, window: window.clone() };
            let windows = broken_windows(window);
            windows.iter().map(|w| of(*groups, w)).chain([0, 3, 5, usize::MAX].map(|n| of(n, window))).collect()
        }
        Template::ConvFilters { groups, rows, window } => {
            let of = |groups, rows, window: &Window| Template::ConvFilters { groups, rows, window: window.clone() };
            let windows = broken_windows(window);
            let groups_of = [0, 3, 5, usize::MAX].map(|n| of(n, *rows, window));
            let rows_of = [0, 3, usize::MAX].map(|n| of(*groups, n, window));
            windows.iter().map(|w| of(*groups, *rows, w)).chain(groups_of).chain(rows_of).collect()
        }
        Template::Pool { window, pool } => {
            let huge = Pool::MeanPadded { pads_end: [0, usize::MAX, 0] };
            let mut broken = vec![Template::Pool { window: window.clone(), pool: huge }];
            broken.extend(broken_windows(window).into_iter().map(|window| Template::Pool { window, pool: *pool }));
            broken
        }
        Template::Gather { strides, extents } => {
            let of = |strides: &[isize], extents: &[usize]| Template::Gather {
                strides: strides.to_vec(),
                extents: extents.to_vec(),
            };
            let rest = &extents[1..];
            vec![
                of(strides, rest),
                of(&[&strides[..], &[1]].concat(), &[&extents[..], &[1]].concat()),
                of(strides, &[&[0], rest].concat()),
                of(strides, &[&[usize::MAX], rest].concat()),
            ]
        }
        &Template::Scatter { axis, stride, extent, unique, join } => {
            let of = |axis, extent| Template::Scatter { axis, stride, extent, unique, join };
            vec![of(axis + 1, extent), of(9, extent), of(usize::MAX, extent), of(axis, 0), of(axis, usize::MAX)]
        }
        &Template::Scan { axis, exclusive, reverse } => {
            let of = |axis| Template::Scan { axis, exclusive, reverse };
            vec![of(axis + 9), of(usize::MAX)]
        }
        &Template::Sort { largest, runs, .. } => {
            let of = |given, runs| Template::Sort { largest, given, runs };
            vec![of(false, 0), of(false, 1), of(false, usize::MAX), of(true, runs)]
        }
        Template::Pad { before, mode } => {
            let of = |before: &[isize]| Template::Pad { before: before.to_vec(), mode: *mode };
            vec![of(&before[1..]), of(&[&[isize::MIN], &before[1..]].concat())]
        }
        Template::Resize { scales, offsets, mode } => {
            let of = |scales: &[f64], offsets: &[f64]| Template::Resize {
                scales: scales.to_vec(),
                offsets: offsets.to_vec(),
                mode: *mode,
            };
            vec![
                of(&scales[1..], offsets),
                of(scales, &offsets[1..]),
                of(&[&[f64::NAN], &scales[1..]].concat(), offsets),
                of(scales, &[&[f64::INFINITY], &offsets[1..]].concat()),
            ]
        }
    }
}

/// Kernels that no template allows.
fn mutants(kernel: &Kernel) -> Vec<(String, Kernel)> {
    let mut all = vec![
        mutant(kernel, "nothing written", |k| k.writes.clear()),
        mutant(kernel, "a packed result", |k| k.writes[0].packed = true),
        mutant(kernel, "a result with an axis more", |k| k.writes[0].access = k.writes[0].access.clone().unsqueezed()),
        mutant(kernel, "more indices than can be counted", |k| k.shape[0] = usize::MAX),
        mutant(kernel, "an operand with a stride less", |k| {
            k.reads[0].access.strides.pop();
        }),
    ];
    for axis in 0..kernel.written().len() {
        all.push(mutant(kernel, format!("a result with more along {axis}"), |k| k.writes[0].access.shape[axis] += 1));
    }
    let core = kernel.template.core_reads();
    for operand in 0..core {
        all.push(mutant(kernel, format!("operand {operand} gone"), |k| drop(k.reads.remove(operand))));
        let more = |k: &mut Kernel| k.reads[operand].access = k.reads[operand].access.clone().unsqueezed();
        all.push(mutant(kernel, format!("operand {operand} with an axis more"), more));
        for axis in 0..kernel.reads[operand].access.shape.len() {
            if !is_free(&kernel.template, operand, axis, kernel.reads[operand].access.shape.len()) {
                let more = |k: &mut Kernel| k.reads[operand].access.shape[axis] += 1;
                all.push(mutant(kernel, format!("operand {operand} with more along {axis}"), more));
            }
        }
    }
    for operand in kernel.further() {
        let more = |k: &mut Kernel| k.reads[operand].access.shape[0] += 1;
        all.push(mutant(kernel, format!("operand {operand} with more along 0"), more));
    }
    for template in broken_templates(&kernel.template) {
        all.push(mutant(kernel, format!("{template:?}"), |k| k.template = template));
    }
    all
}

trait Unsqueezed {
    fn unsqueezed(self) -> Self;
}

impl Unsqueezed for Access {
    /// The same elements with an axis of extent 1 in front.
    fn unsqueezed(mut self) -> Access {
        self.shape.insert(0, 1);
        self.strides.insert(0, 0);
        self
    }
}

#[test]
fn malformed_kernels_are_refused() {
    let mut refused = 0;
    for (name, kernel) in samples() {
        for (what, mutant) in mutants(&kernel) {
            for family in [Family::Cpu, Family::Cuda, Family::Wgpu] {
                assert!(mutant.validate(family).is_err(), "{name}: {what}");
            }
            refused += 1;
        }
    }
    assert!(refused > 250, "{refused}");
}

/// Records the elements that a kernel touches.
struct Touched<'a> {
    reads: &'a [Vec<f64>],
    loaded: Vec<HashSet<isize>>,
    stored: Vec<HashSet<isize>>,
}

impl Memory for Touched<'_> {
    fn load(&mut self, read: usize, element: isize) -> f64 {
        self.loaded[read].insert(element);
        self.reads[read][element as usize]
    }
    fn store(&mut self, write: usize, element: isize, _: f64) {
        self.stored[write].insert(element);
    }
}

/// All elements of an access.
fn elements_of(access: &Access) -> HashSet<isize> {
    let mut index = vec![0; access.shape.len()];
    let step = |_| {
        let element = access.at(&index);
        advance(&mut index, &access.shape);
        element
    };
    (0..access.shape.numel()).map(step).collect()
}

#[test]
fn kernels_touch_what_they_reach() {
    for (name, kernel) in samples() {
        let reads = buffers(&kernel);
        for order in [Order::Forwards, Order::Backwards] {
            let mut memory = Touched {
                reads: &reads,
                loaded: vec![HashSet::new(); reads.len()],
                stored: vec![HashSet::new(); kernel.writes.len()],
            };
            meaning::run(&kernel, order, &mut memory);
            let touched = memory.loaded.iter().chain(&memory.stored).enumerate();
            for (slot, touched) in touched {
                let reach = elements_of(&kernel.reach(slot));
                assert!(touched.is_subset(&reach), "{name}: argument {slot} touches {touched:?}, reaches {reach:?}");
                let chosen = kernel.is_in_place();
                let all = slot >= reads.len() && !chosen || kernel.further().contains(&slot);
                assert!(!all || *touched == reach, "{name}: argument {slot} touches {touched:?}, of {reach:?}");
            }
        }
    }
}

/// Indices `start..start + 1` along an axis, if the parts of the kernel there are kernels of their own.
fn part(kernel: &Kernel, axis: usize, start: usize) -> Option<Kernel> {
    let mut part = kernel.clone();
    part.shape[axis] = 1;
    for slot in 0..kernel.reads.len() + kernel.writes.len() {
        let access = match kernel.axis_of(slot, axis) {
            Along::Axis(own) => kernel.operand(slot).access.slice(own, start, 1, 1),
            Along::Whole => continue,
            Along::Tied => return None,
        };
        match slot.checked_sub(kernel.reads.len()) {
            None => part.reads[slot].access = access,
            Some(write) => part.writes[write].access = access,
        }
    }
    Some(part)
}

#[test]
fn parts_of_a_kernel_compute_what_the_whole_does() {
    let mut cut = BTreeSet::new();
    for (name, kernel) in samples() {
        let reads = buffers(&kernel);
        let whole = stores(&kernel, &reads);
        let mut parts: BTreeMap<(usize, usize), BTreeSet<isize>> = BTreeMap::new();
        for axis in 0..kernel.shape.len() {
            for start in 0..kernel.shape[axis] {
                let Some(part) = part(&kernel, axis, start) else { continue };
                part.validate(Family::Wgpu).unwrap_or_else(|e| panic!("{name} cut along {axis}: {e}"));
                for (write, found) in stores(&part, &reads).into_iter().enumerate() {
                    let strange = found.iter().find(|stored| !whole[write].contains(stored));
                    assert_eq!(strange, None, "{name} at {start} along {axis}");
                    parts.entry((axis, write)).or_default().extend(found.into_iter().map(|(element, _)| element));
                }
                cut.insert(kernel.template.name());
            }
        }
        for ((axis, write), parts) in parts {
            assert!(whole[write].iter().all(|(element, _)| parts.contains(element)), "{name} cut along {axis}");
        }
    }
    let rows: BTreeSet<_> = TEMPLATES.iter().map(|row| row.name).collect();
    assert_eq!(cut, rows, "every template has an axis along which it can be cut");
}
