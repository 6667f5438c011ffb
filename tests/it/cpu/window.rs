//! The CPU's windows of every geometry, against plain loops.

use plimsoll::internals::backend::cpu::simd::Isa;
use plimsoll::internals::backend::cpu::window::{Planes, Slide, Window, slide};

fn reference(w: &Window, what: Slide, weights: &[f32], x: &[f32]) -> Vec<f32> {
    let mut y = Vec::new();
    let mut each = |at: [usize; 3]| {
        let (mut sum, mut max, mut count) = (0.0, f64::NEG_INFINITY, 0.0);
        for (tap, &weight) in weights.iter().enumerate().take(w.taps()) {
            let taps = [tap / w.kernel[2] / w.kernel[1], tap / w.kernel[2] % w.kernel[1], tap % w.kernel[2]];
            let mut index = Some(0);
            let mut padded = true;
            for d in 0..3 {
                let i = (at[d] * w.strides[d] + taps[d] * w.dilations[d]) as isize - w.pads[d] as isize;
                padded &= i < (w.input[d] + w.pads_end[d]) as isize;
                let inside = i >= 0 && i < w.input[d] as isize;
                index = index.filter(|_| inside).map(|index| index * w.input[d] + i as usize);
            }
            let weight = if matches!(what, Slide::Weighted(_)) { f64::from(weight) } else { 1.0 };
            if let Some(index) = index {
                sum += f64::from(x[index]) * weight;
                max = max.max(f64::from(x[index]));
            }
            count += match what {
                Slide::Average { count_pads: true } => f64::from(u8::from(padded)),
                _ => f64::from(u8::from(index.is_some())),
            };
        }
        y.push(match what {
            Slide::Weighted(_) => sum as f32,
            Slide::Max => max as f32,
            Slide::Average { .. } => (sum / count) as f32,
        });
    };
    for d in 0..w.output[0] {
        for h in 0..w.output[1] {
            (0..w.output[2]).for_each(|w| each([d, h, w]));
        }
    }
    y
}

/// Planes of results, computed in some pieces of rows.
fn slid(
    isa: Isa,
    window: &Window,
    what: Slide,
    (count, x, x_step): (usize, &[f32], usize),
    pieces: usize,
) -> Vec<Vec<f32>> {
    let mut y = vec![Vec::new(); count];
    let step = window.rows().div_ceil(pieces);
    for start in (0..window.rows()).step_by(step) {
        let rows = start..window.rows().min(start + step);
        let y_step = rows.len() * window.output[2];
        let mut part = vec![f32::NAN; count * y_step];
        let mut space = vec![f32::NAN; window.workspace_bytes() / 4];
        let planes = Planes { count, x: x.as_ptr(), x_step, y: part.as_mut_ptr(), y_step, rows };
        // SAFETY: the buffers have exactly the sizes that the geometry names.
        unsafe { slide(isa, window, what, planes, &mut space) }
        y.iter_mut().zip(part.chunks(y_step.max(1))).for_each(|(y, part)| y.extend(part));
    }
    y
}

#[test]
fn windows_of_every_geometry() {
    let mut windows = Vec::new();
    for (depth, height, width) in [(1, 1, 1), (1, 1, 37), (1, 7, 7), (1, 9, 14), (4, 5, 6), (1, 20, 70)] {
        for kernel in [[1, 1, 1], [1, 3, 3], [1, 5, 5], [1, 1, 7], [2, 3, 2], [3, 1, 1], [1, 7, 7]] {
            for (stride, dilation, pad, more) in
                [(1, 1, 0, 0), (1, 1, 1, 0), (2, 1, 1, 0), (2, 1, 0, 1), (3, 2, 2, 0), (1, 2, 2, 1), (4, 1, 3, 0)]
            {
                let input: [usize; 3] = [depth, height, width];
                let pads: [usize; 3] = std::array::from_fn(|d| if kernel[d] > 1 { pad } else { 0 });
                let fits = |d: usize| {
                    let span = (input[d] + 2 * pads[d]).checked_sub((kernel[d] - 1) * dilation + 1)?;
                    Some(span / stride + 1)
                };
                let (Some(d), Some(h), Some(w)) = (fits(0), fits(1), fits(2)) else { continue };
                // `more`: an output rounded up, whose last window is partly outside.
                let w = if more == 1 && (w * stride) < input[2] + pads[2] { w + 1 } else { w };
                let (strides, dilations) = ([stride; 3], [dilation; 3]);
                windows.push(Window { input, output: [d, h, w], kernel, strides, dilations, pads, pads_end: pads });
            }
        }
    }
    let mut together = 0;
    for window in &windows {
        let values = |len: usize, m: usize| (0..len).map(|i| ((i * 37 + 11) % m) as f32 - 9.0).collect::<Vec<_>>();
        let (len, taps) = (window.input_len(), window.taps());
        together = together.max(window.together());
        for count in [1, 5, 16].into_iter().filter(|&count| count <= window.together()) {
            // Planes have a gap between them.
            let x_step = len + 3;
            let x = values(count * x_step, 23);
            let weights = values(count * taps, 17);
            for what in [
                Slide::Weighted(weights.as_ptr()),
                Slide::Max,
                Slide::Average { count_pads: false },
                Slide::Average { count_pads: true },
            ] {
                let plane = |k: usize| reference(window, what, &weights[k * taps..], &x[k * x_step..][..len]);
                let want: Vec<_> = (0..count).map(plane).collect();
                for isa in Isa::available() {
                    for pieces in [1, 3] {
                        let y = slid(isa, window, what, (count, &x, x_step), pieces);
                        let same = |a: f32, b: f32| a == b || a.is_nan() && b.is_nan();
                        let equal = y
                            .iter()
                            .zip(&want)
                            .all(|(y, want)| y.len() == want.len() && y.iter().zip(want).all(|(&a, &b)| same(a, b)));
                        assert!(equal, "{} {window:?} {what:?} {count}\n{y:?}\n{want:?}", isa.name());
                    }
                }
            }
        }
    }
    assert_eq!(together, 16);
    assert!(windows.len() > 100);
}
