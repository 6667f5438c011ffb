//! The CPU's windows of every geometry, against plain loops.

use plimsoll::internals::backend::cpu::simd::Isa;
use plimsoll::internals::backend::cpu::window::{Plane, Slide, Window, slide};

fn reference(w: &Window, what: Slide, weights: &[f32], x: &[f32]) -> Vec<f32> {
    let mut y = Vec::new();
    let mut each = |at: [usize; 3]| {
        let (mut sum, mut max, mut count) = (0.0, f64::NEG_INFINITY, 0.0);
        for (tap, &weight) in weights.iter().enumerate() {
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
    for window in &windows {
        let values = |len: usize, m: usize| (0..len).map(|i| ((i * 37 + 11) % m) as f32 - 9.0).collect::<Vec<_>>();
        let x = values(window.input_len(), 23);
        let weights = values(window.taps(), 17);
        for what in [
            Slide::Weighted(weights.as_ptr()),
            Slide::Max,
            Slide::Average { count_pads: false },
            Slide::Average { count_pads: true },
        ] {
            let want = reference(window, what, &weights, &x);
            for isa in Isa::available() {
                for pieces in [1, 3] {
                    let mut y = Vec::new();
                    let step = window.rows().div_ceil(pieces);
                    for start in (0..window.rows()).step_by(step) {
                        let rows = start..window.rows().min(start + step);
                        let mut part = vec![f32::NAN; rows.len() * window.output[2]];
                        let mut space = vec![f32::NAN; window.workspace_bytes() / 4];
                        let plane = Plane { x: x.as_ptr(), y: part.as_mut_ptr(), rows };
                        // SAFETY: the buffers have exactly the sizes that the geometry names.
                        unsafe { slide(isa, window, what, plane, &mut space) }
                        y.extend(part);
                    }
                    let same = y.iter().zip(&want).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
                    assert!(same && y.len() == want.len(), "{} {window:?} {what:?}\n{y:?}\n{want:?}", isa.name());
                }
            }
        }
    }
    assert!(windows.len() > 100);
}
