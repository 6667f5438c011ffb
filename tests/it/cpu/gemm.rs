//! The CPU's matrix products in every form of operand and destination, against plain loops.

use plimsoll::internals::backend::cpu::gemm::{
    Elements, Gemm, Grid, Matrix, Out, Produce, Tile, View, pack_a, pack_b, packed_a_bytes, packed_b_bytes,
    workspace_bytes,
};
use plimsoll::internals::backend::cpu::simd::Isa;
use std::ops::Range;

/// Small deterministic values with exact sums up to a few thousand terms, so that results can be compared bit for bit.
fn values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761).wrapping_add(12345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            ((state >> 24) as i32 - 128) as f32 / 16.0
        })
        .collect()
}

/// A matrix in a buffer of exactly the size it needs, with the strides of the kind asked for.
fn matrix(rows: usize, cols: usize, kind: usize, seed: u32) -> (Vec<f32>, isize, isize) {
    let (rs, cs) = match kind {
        0 => (cols, 1),
        1 => (1, rows),
        2 => (cols + 3, 1),
        _ => (2 * cols, 2),
    };
    let len = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * rs + (cols - 1) * cs + 1 };
    (values(len, seed), rs as isize, cs as isize)
}

struct FromView(View);
impl Produce for FromView {
    unsafe fn panel(&self, _: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        for (i, p) in k.enumerate() {
            for j in 0..step {
                // SAFETY: as below.
                let value = if j < lanes.len() {
                    unsafe { *self.0.ptr.offset(p as isize * self.0.rs + (lanes.start + j) as isize * self.0.cs) }
                } else {
                    0.0
                };
                // SAFETY: the test's view covers the whole operand, the panel every step.
                unsafe { *panel.add(i * step + j) = value }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    a: usize,
    b: usize,
    c: usize,
    accumulate: bool,
    parts: usize,
}

/// Runs one case and compares it with a plain triple loop.
fn check(isa: Isa, m: usize, n: usize, k: usize, case: Case) {
    let (a, a_rs, a_cs) = matrix(m, k, case.a % 4, 1);
    let (b, b_rs, b_cs) = matrix(k, n, case.b % 4, 2);
    let view_a = View { ptr: a.as_ptr(), rs: a_rs, cs: a_cs };
    let view_b = View { ptr: b.as_ptr(), rs: b_rs, cs: b_cs };
    let (mut packed_a, mut packed_b) =
        (vec![f32::NAN; packed_a_bytes(m, k) / 4], vec![f32::NAN; packed_b_bytes(k, n) / 4]);
    let produced = FromView(view_b);
    let produced_a = FromView(View { ptr: view_a.ptr, rs: a_cs, cs: a_rs });
    let (a_packed, b_packed) = ((4..8).contains(&case.a), (4..8).contains(&case.b));
    let a_operand = if a_packed {
        // SAFETY: the buffers have the sizes that the functions name.
        unsafe { pack_a(isa, view_a, 0..m, k, packed_a.as_mut_ptr()) };
        Matrix::Packed(packed_a.as_ptr())
    } else if case.a >= 8 {
        Matrix::Produced(&produced_a)
    } else {
        Matrix::Strided(view_a)
    };
    let b_operand = if b_packed {
        // SAFETY: as above.
        unsafe { pack_b(isa, view_b, k, 0..n, packed_b.as_mut_ptr()) };
        Matrix::Packed(packed_b.as_ptr())
    } else if case.b >= 8 {
        Matrix::Produced(&produced)
    } else {
        Matrix::Strided(view_b)
    };
    let (mut c, c_rs, c_cs) = matrix(m, n, case.c % 4, 3);
    let before = c.clone();
    let out = c.as_mut_ptr();
    let to_epilogue = case.c == 4;
    let gemm = Gemm {
        m,
        n,
        k,
        elements: Elements::Floats,
        a: a_operand,
        b: b_operand,
        c: if to_epilogue { Out::Epilogue } else { Out::Strided { ptr: out, rs: c_rs, cs: c_cs } },
        accumulate: case.accumulate && !to_epilogue,
    };
    let bytes = workspace_bytes(m, n, k, a_packed, b_packed, !to_epilogue && c_cs == 1);
    let grid = Grid::new(m, n, case.parts);
    let mut seen = 0;
    for index in 0..grid.len() {
        let mut workspace = vec![f32::NAN; bytes / 4];
        let (rows, cols) = grid.get(index);
        let mut epilogue = |tile: Tile| {
            for (i, r) in tile.rows.clone().enumerate() {
                for (j, s) in tile.cols.clone().enumerate() {
                    seen += 1;
                    // SAFETY: inside the tile, and inside C.
                    unsafe {
                        let value = tile.ptr.add(i * tile.stride + j);
                        *value = -*value;
                        if to_epilogue {
                            *out.offset(r as isize * c_rs + s as isize * c_cs) = *value;
                        }
                    }
                }
            }
        };
        // SAFETY: the operands are whole matrices, and C overlaps none of them.
        unsafe { gemm.run(isa, rows, cols, &mut workspace, &mut epilogue) }
    }
    assert_eq!(seen, m * n, "every element passes the epilogue once");
    let mut want = before.clone();
    for i in 0..m {
        for j in 0..n {
            let at = |rs: isize, cs: isize, r: usize, s: usize| (r as isize * rs + s as isize * cs) as usize;
            let to = at(c_rs, c_cs, i, j);
            let sum: f64 =
                (0..k).map(|p| f64::from(a[at(a_rs, a_cs, i, p)]) * f64::from(b[at(b_rs, b_cs, p, j)])).sum();
            want[to] = -(sum + if gemm.accumulate { f64::from(before[to]) } else { 0.0 }) as f32;
        }
    }
    assert_eq!(c, want, "{} m={m} n={n} k={k} {case:?}", isa.name());
}

#[test]
fn every_form_of_operand_and_destination() {
    for isa in Isa::available() {
        for a in 0..10 {
            for b in 0..12 {
                for c in 0..5 {
                    let case = Case { a, b, c, accumulate: (a + b) % 2 == 1, parts: 1 + (a + c) % 3 };
                    check(isa, 29, 51, 23, case);
                    check(isa, 3, 37, 14, case);
                }
            }
        }
    }
}

#[test]
fn every_edge_size() {
    for isa in Isa::available() {
        for m in [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25] {
            for n in [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48] {
                for k in [0, 1, 2, 5, 8] {
                    let case = Case { a: 4 * (m % 2), b: 4 * (n % 3), c: m % 5, accumulate: k % 2 == 0, parts: 2 };
                    check(isa, m, n, k, case);
                }
            }
        }
    }
}

#[test]
fn several_blocks_of_every_dimension() {
    for isa in Isa::available() {
        for (m, n, k) in [(400, 50, 300), (40, 1100, 520), (450, 400, 70), (2, 2100, 600), (1, 40, 1025)] {
            for (a, b, c) in [(0, 4, 0), (4, 8, 0), (1, 1, 1), (0, 0, 4)] {
                check(isa, m, n, k, Case { a, b, c, accumulate: c == 0, parts: 2 });
            }
        }
    }
}

/// With values that do round, any partition gives the same bits.
#[test]
fn ranges_do_not_change_bits() {
    for isa in Isa::available() {
        for (m, n, k) in [(60, 100, 700), (3, 100, 700), (1, 200, 333)] {
            let a: Vec<f32> = values(m * k, 1).iter().map(|x| x * 1.1).collect();
            let b: Vec<f32> = values(k * n, 2).iter().map(|x| x * 0.7).collect();
            let run = |parts: usize| {
                let mut c = vec![f32::NAN; m * n];
                let gemm = Gemm {
                    m,
                    n,
                    k,
                    elements: Elements::Floats,
                    a: Matrix::Strided(View { ptr: a.as_ptr(), rs: k as isize, cs: 1 }),
                    b: Matrix::Strided(View { ptr: b.as_ptr(), rs: n as isize, cs: 1 }),
                    c: Out::Strided { ptr: c.as_mut_ptr(), rs: n as isize, cs: 1 },
                    accumulate: false,
                };
                let mut workspace = vec![0.0; workspace_bytes(m, n, k, false, false, true) / 4];
                let grid = Grid::new(m, n, parts);
                for index in 0..grid.len() {
                    let (rows, cols) = grid.get(index);
                    // SAFETY: the operands are whole matrices, and C overlaps none of them.
                    unsafe { gemm.run(isa, rows, cols, &mut workspace, &mut |_| {}) }
                }
                c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let whole = run(1);
            assert!((2..9).all(|parts| run(parts) == whole), "{} {m} {n} {k}", isa.name());
        }
    }
}

#[test]
fn a_grid_covers_the_matrix_once() {
    for (m, n) in [(0, 5), (1, 1), (1, 1000), (128, 768), (49, 512), (512, 49), (1000, 3)] {
        for (parts, grid) in (0..9).flat_map(|parts| [Grid::new, Grid::of_rows].map(|grid| (parts, grid(m, n, parts))))
        {
            let mut hits = vec![0u8; m * n];
            for index in 0..grid.len() {
                let (rows, cols) = grid.get(index);
                assert!(!rows.is_empty() && !cols.is_empty());
                rows.for_each(|r| cols.clone().for_each(|c| hits[r * n + c] += 1));
            }
            assert!(hits.iter().all(|&hits| hits == 1), "{m} {n} {parts}");
            assert!(grid.len() <= parts.max(1));
        }
    }
}
