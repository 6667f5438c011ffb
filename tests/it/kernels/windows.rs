//! Transposed convolutions and gradients by filters whose windows are drawn: of one to three axes, with groups, strides, dilations, padding
//! beyond the window, and results that no tap reaches.

use super::{Case, Cases, Random, dense, f32s, spread, window, x};
use plimsoll::internals::kernel::{Template, Window};

/// So many of each.
pub fn drawn(seed: u64, count: usize) -> Vec<Case> {
    let mut draw = Random(seed);
    let mut c = Cases { random: Random(seed + 1), cases: Vec::new() };
    for number in 0..count {
        transposed(&mut c, &mut draw, number);
        filters(&mut c, &mut draw, number);
    }
    c.cases
}

impl Random {
    /// A number of a range.
    fn of(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() * (high - low + 1) as f64) as usize
    }

    fn one_of<const N: usize>(&mut self, all: [usize; N]) -> usize {
        all[self.of(0, N - 1)]
    }
}

/// A window over the last axes, and the extents of what it slides over and of its places.
fn slide(draw: &mut Random) -> (Window, [usize; 3], [usize; 3]) {
    let unused = 3 - draw.one_of([1, 2, 2, 2, 3]);
    let (mut win, mut image, mut places) = (window([1; 3], [1; 3], [1; 3], [0; 3]), [1; 3], [1; 3]);
    for a in unused..3 {
        let (kernel, stride) = (draw.of(1, 5), draw.one_of([1, 2, 2, 3, 4]));
        let dilation = draw.one_of([1, 1, 2, 3, 4]);
        let most = draw.one_of([0, 2, kernel + 1]);
        let (pad, count) = (draw.of(0, most), draw.of(1, if unused == 0 { 4 } else { 7 }));
        let reach = (count - 1) * stride + (kernel - 1) * dilation + 1;
        // Behind the last place lie padding or elements that no window has.
        let more = draw.of(0, stride + 1);
        image[a] = (reach + more).saturating_sub(pad + draw.of(0, 2)).max(1);
        (win.kernel[a], win.strides[a], win.dilations[a], win.pads[a]) = (kernel, stride, dilation, pad);
        places[a] = count;
    }
    (win, image, places)
}

fn transposed(c: &mut Cases, draw: &mut Random, number: usize) {
    let (win, image, places) = slide(draw);
    let groups = draw.one_of([1, 1, 2, 3]);
    let [input, out] = [0; 2].map(|_| draw.one_of([1, 3, 8, 9, 16, 24]));
    let images = draw.of(1, 3);
    let [of_data, of_result] = [[images, groups * input], [images, groups * out]];
    let [data, s] = [[&of_data[..], &places], [&of_result[..], &image]].map(|parts| parts.concat());
    let weights = [&[groups * input, out][..], &win.kernel].concat();
    let reads = vec![f32s(dense(&data)), f32s(dense(&weights)), f32s(spread(&[s[1], 1, 1, 1], &s))];
    let name = format!("conv_transpose drawn {number}: {data:?} to {s:?} in {groups} groups, {win:?}");
    c.add(&name, Template::ConvTranspose { groups, window: win }, &s, reads, &[x(0) + x(1)]);
}

fn filters(c: &mut Cases, draw: &mut Random, number: usize) {
    let (win, image, places) = slide(draw);
    let groups = draw.one_of([1, 1, 2, 3]);
    let [input, out] = [0; 2].map(|_| draw.one_of([1, 3, 8, 9, 16, 24]));
    let parts = draw.of(1, 3);
    let images = parts * draw.of(1, 2);
    let rows = if places[1].is_multiple_of(2) { draw.of(1, 2) } else { 1 };
    let [of_data, of_result] = [[images, groups * input], [images, groups * out]];
    let [data, gradient] = [[&of_data[..], &image], [&of_result[..], &places]].map(|parts| parts.concat());
    let s = [&[parts * rows, groups * out, input][..], &win.kernel].concat();
    let reads = vec![f32s(dense(&data)), f32s(dense(&gradient)), f32s(spread(&[1, s[1], 1, 1, 1, 1], &s))];
    let name = format!("conv_filters drawn {number}: {data:?} by {gradient:?} in {groups} groups, {win:?}");
    c.add(&name, Template::ConvFilters { groups, rows, window: win }, &s, reads, &[x(0) + x(1)]);
}
