//! The CPU's convolutions of every way, against plain loops.

use plimsoll::internals::backend::cpu::conv::{Compute, Conv, ConvTranspose, Image, Share, Tensors};
use plimsoll::internals::backend::cpu::gemm::Tile;
use plimsoll::internals::backend::cpu::simd::Isa;
use plimsoll::internals::backend::cpu::window::Window;
use plimsoll::internals::kernel::algorithm::Way;
use plimsoll::internals::kernel::cpu::Plain;

fn values(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 61) as f32 / 4.0 - 7.0).collect()
}

/// Calls `f(channel taps, input index, output index)` for every product that makes up one plane.
fn for_each(w: &Window, mut f: impl FnMut(usize, usize, usize)) {
    for position in 0..w.output_len() {
        for tap in 0..w.taps() {
            let split = |i: usize, of: [usize; 3]| [i / of[2] / of[1], i / of[2] % of[1], i % of[2]];
            let (at, taps) = (split(position, w.output), split(tap, w.kernel));
            let mut index = Some(0);
            for d in 0..3 {
                let i = (at[d] * w.strides[d] + taps[d] * w.dilations[d]).checked_sub(w.pads[d]);
                index = index.zip(i.filter(|&i| i < w.input[d])).map(|(index, i)| index * w.input[d] + i);
            }
            if let Some(index) = index {
                f(tap, index, position);
            }
        }
    }
}

fn window(input: [usize; 3], kernel: [usize; 3], stride: usize, dilation: usize, pad: usize) -> Option<Window> {
    let pads: [usize; 3] = std::array::from_fn(|d| pad.min((kernel[d] - 1) * dilation));
    let mut output = [0; 3];
    for d in 0..3 {
        output[d] = (input[d] + 2 * pads[d]).checked_sub((kernel[d] - 1) * dilation + 1)? / stride + 1;
    }
    Some(Window { input, output, kernel, strides: [stride; 3], dilations: [dilation; 3], pads, pads_end: pads })
}

fn check(conv: &Conv, parts: usize, direct: bool) {
    let w = &conv.window;
    let (inputs, outputs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
    let x = values(conv.batch * conv.in_channels * w.input_len(), 1);
    let weights = values(conv.out_channels * inputs * w.taps(), 2);
    let mut want = vec![0f64; conv.batch * conv.out_channels * w.output_len()];
    for image in 0..conv.batch {
        for o in 0..conv.out_channels {
            for i in 0..inputs {
                let from = (image * conv.in_channels + o / outputs * inputs + i) * w.input_len();
                let to = (image * conv.out_channels + o) * w.output_len();
                for_each(w, |tap, index, position| {
                    let weight = weights[(o * inputs + i) * w.taps() + tap];
                    want[to + position] += f64::from(x[from + index]) * f64::from(weight);
                });
            }
        }
    }
    let want: Vec<f32> = want.into_iter().map(|x| 2.0 * x as f32).collect();
    let mut packed = vec![f32::NAN; conv.packed_weight_bytes() / 4];
    conv.pack(Plain::whole(bytemuck::cast_slice(&weights)), 0, bytemuck::cast_slice_mut(&mut packed));
    let read = if conv.way == Way::WholeBatch { &weights } else { &packed };
    let weight_steps = [inputs * w.taps(), w.taps()].map(|step| step as isize);
    // The weights of the convolution whose gradient this one is: channels exchanged within their groups, taps in reverse.
    let mut flipped = vec![0f32; weights.len()];
    for (at, &weight) in weights.iter().enumerate() {
        let (o, i, tap) = (at / w.taps() / inputs, at / w.taps() % inputs, at % w.taps());
        let (group, o) = (o / outputs, o % outputs);
        flipped[(((group * inputs + i) * outputs) + o) * w.taps() + w.taps() - 1 - tap] = weight;
    }
    let turned_steps = [w.taps(), outputs * w.taps()].map(|step| step as isize);
    let mut kinds = vec![(read, weight_steps, false)];
    kinds.extend((conv.way == Way::WholeBatch).then_some((&flipped, turned_steps, true)));
    for (isa, (read, weight_steps, flipped)) in
        Isa::available().flat_map(|isa| kinds.iter().map(move |&kind| (isa, kind)))
    {
        let mut y = vec![f32::NAN; want.len()];
        let image = Image {
            ptr: y.as_mut_ptr(),
            batch_stride: conv.out_channels * w.output_len(),
            channel_stride: w.output_len(),
        };
        let from =
            Image { ptr: x.as_ptr(), batch_stride: conv.in_channels * w.input_len(), channel_stride: w.input_len() };
        for task in 0..conv.tasks(parts) {
            let mut space = vec![f32::NAN; conv.workspace_bytes(direct) / 4];
            let mut double = |b: usize, tile: Tile| {
                for (i, c) in tile.rows.clone().enumerate() {
                    for (j, p) in tile.cols.clone().enumerate() {
                        // SAFETY: inside the tile, and inside y.
                        unsafe {
                            let value = 2.0 * *tile.ptr.add(i * tile.stride + j);
                            *image.ptr.add(b * image.batch_stride + c * image.channel_stride + p) = value;
                        }
                    }
                }
            };
            let y = direct.then_some(image);
            let tensors = Tensors { x: from, weights: read.as_ptr(), weight_steps, flipped, y, prologue: None };
            // SAFETY: as above.
            unsafe { conv.run(Share { isa, parts, task }, &tensors, &mut space, &mut double) }
        }
        assert_eq!(y, want, "{} {:?} {conv:?}", isa.name(), conv.way);
    }
}

#[test]
fn convolutions_of_every_kind() {
    let mut ways = Vec::new();
    for input in [[1, 1, 1], [1, 1, 29], [1, 7, 7], [1, 13, 18], [3, 4, 5]] {
        for kernel in [[1, 1, 1], [1, 3, 3], [1, 1, 5], [2, 2, 3], [1, 1, 40]] {
            for (stride, dilation, pad) in [(1, 1, 0), (1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 2), (1, 3, 40)] {
                for (in_channels, out_channels, groups) in
                    [(3, 16, 1), (6, 6, 6), (3, 6, 3), (4, 34, 2), (1, 9, 1), (10, 20, 1)]
                {
                    let Some(window) = window(input, kernel, stride, dilation, pad) else { continue };
                    let is_depthwise = in_channels == groups && out_channels / groups <= 4;
                    let products = [Way::WeightsLeft, Way::WeightsRight, Way::WholeBatch];
                    for way in products.into_iter().chain(is_depthwise.then_some(Way::Depthwise)) {
                        let conv = Conv {
                            batch: 2,
                            in_channels,
                            out_channels,
                            groups,
                            window,
                            way,
                            bytes: None,
                            halves: None,
                        };
                        ways.push(way);
                        check(&conv, 1 + in_channels % 3, stride % 2 == 0);
                        check(&conv, 16, stride % 2 == 1);
                    }
                }
            }
        }
    }
    for way in [Way::Depthwise, Way::WeightsLeft, Way::WeightsRight, Way::WholeBatch] {
        assert!(ways.iter().filter(|&&w| w == way).count() > 50, "{way:?}");
    }
}

/// Enough images that a vector holds one position of several.
#[test]
fn many_images() {
    for (input, kernel) in
        [([1, 1, 17], [1, 1, 17]), ([1, 4, 5], [1, 4, 5]), ([1, 9, 70], [1, 9, 70]), ([1, 6, 7], [1, 3, 2])]
    {
        for (stride, dilation, pad) in [(1, 1, 0), (1, 1, 1), (2, 1, 2), (1, 2, 3), (3, 2, 1)] {
            for (batch, in_channels, out_channels, groups) in [(16, 20, 5, 1), (30, 3, 30, 3), (47, 24, 14, 1)] {
                let kernel = kernel.map(|len| (len - 1) / dilation + 1);
                let window = window(input, kernel, stride, dilation, pad).expect("the window fits");
                let conv = Conv {
                    batch,
                    in_channels,
                    out_channels,
                    groups,
                    window,
                    way: Way::WholeBatch,
                    bytes: None,
                    halves: None,
                };
                check(&conv, 2, true);
                check(&conv, 5, false);
            }
        }
    }
}

#[test]
fn windows_as_large_as_images() {
    for (input, pad) in [([1, 1, 17], 0), ([1, 4, 5], 0), ([1, 4, 16], 1), ([2, 3, 4], 0), ([1, 9, 70], 2)] {
        for (dilation, groups, outputs) in [(1, 1, 1), (1, 3, 1), (1, 1, 13), (1, 2, 30), (2, 3, 2)] {
            let kernel = input.map(|len| (len - 1) / dilation + 1);
            let window = window(input, kernel, 1, dilation, pad).expect("the window fits");
            let (in_channels, out_channels) = (2 * groups, outputs * groups);
            let conv = Conv {
                batch: 3,
                in_channels,
                out_channels,
                groups,
                window,
                way: Way::WholeBatch,
                bytes: None,
                halves: None,
            };
            check(&conv, 2, true);
            check(&conv, 5, false);
        }
    }
}

/// The gradients of depthwise filters: the channels of a group are images, and lie side by side in the vectors. Large images are cut, and more
/// positions than a panel has are taken in parts.
#[test]
fn single_filters_of_many_channels() {
    for (input, kernel) in
        [([1, 2, 2], [1, 2, 2]), ([1, 5, 4], [1, 4, 4]), ([1, 33, 32], [1, 16, 16]), ([1, 9, 70], [1, 9, 60])]
    {
        for (stride, dilation, pad) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3)] {
            for (groups, channels) in [(3, 16), (2, 9), (1, 37)] {
                let Some(window) = window(input, kernel, stride, dilation, pad) else { continue };
                let in_channels = groups * channels;
                let conv = Conv {
                    batch: 1,
                    in_channels,
                    out_channels: groups,
                    groups,
                    window,
                    way: Way::WholeBatch,
                    bytes: None,
                    halves: None,
                };
                check(&conv, 1, true);
                check(&conv, 2, false);
            }
        }
    }
}

#[test]
fn deep_convolutions() {
    for (size, in_channels, out_channels, kernel) in
        [(7, 130, 64, 3), (20, 70, 30, 3), (16, 300, 20, 1), (2, 600, 40, 1)]
    {
        let window = window([1, size, size], [1, kernel, kernel], 1, 1, kernel / 2).expect("the kernel fits");
        for way in [Way::WeightsLeft, Way::WeightsRight, Way::WholeBatch] {
            let conv = Conv { batch: 1, in_channels, out_channels, groups: 1, window, way, bytes: None, halves: None };
            check(&conv, 2, true);
            check(&conv, 3, false);
        }
    }
}

#[test]
fn transposed_convolutions_of_every_kind() {
    for output in [[1, 1, 9], [1, 8, 8], [1, 15, 40], [4, 5, 6]] {
        for kernel in [[1, 1, 1], [1, 2, 2], [1, 3, 4], [2, 3, 3]] {
            for (stride, dilation, pad) in [(1, 1, 0), (2, 1, 0), (2, 1, 1), (1, 2, 1), (3, 1, 2)] {
                for (in_channels, out_channels, groups) in [(3, 5, 1), (4, 4, 4), (6, 4, 2), (8, 70, 1)] {
                    let Some(window) = window(output, kernel, stride, dilation, pad) else { continue };
                    let conv = ConvTranspose { batch: 2, in_channels, out_channels, groups, window };
                    let (inputs, outputs) = (in_channels / groups, out_channels / groups);
                    let (n, size) = (window.output_len(), window.input_len());
                    let x = values(2 * in_channels * n, 1);
                    let weights = values(in_channels * outputs * window.taps(), 2);
                    let mut want = vec![0f64; 2 * out_channels * size];
                    for image in 0..2 {
                        for i in 0..in_channels {
                            for o in 0..outputs {
                                let from = (image * in_channels + i) * n;
                                let to = (image * out_channels + i / inputs * outputs + o) * size;
                                for_each(&window, |tap, index, position| {
                                    let weight = weights[(i * outputs + o) * window.taps() + tap];
                                    want[to + index] += f64::from(x[from + position]) * f64::from(weight);
                                });
                            }
                        }
                    }
                    let want: Vec<f32> = want.into_iter().map(|x| -x as f32).collect();
                    let mut packed = vec![f32::NAN; conv.packed_weight_bytes() / 4];
                    conv.pack(Plain::whole(bytemuck::cast_slice(&weights)), 0, bytemuck::cast_slice_mut(&mut packed));
                    for isa in Isa::available() {
                        let mut y = vec![f32::NAN; want.len()];
                        let from = Image { ptr: x.as_ptr(), batch_stride: in_channels * n, channel_stride: n };
                        let to = Image { ptr: y.as_mut_ptr(), batch_stride: out_channels * size, channel_stride: size };
                        for task in 0..conv.tasks(1) {
                            let mut space = vec![f32::NAN; conv.workspace_bytes() / 4];
                            let mut negate = |_: usize, tile: Tile| {
                                for j in 0..tile.cols.len() {
                                    // SAFETY: inside the tile, which is one row.
                                    unsafe { *tile.ptr.add(j) = -*tile.ptr.add(j) }
                                }
                            };
                            let share = Share { isa, parts: 1, task };
                            let tensors = Tensors {
                                x: from,
                                weights: packed.as_ptr(),
                                weight_steps: [0; 2],
                                flipped: false,
                                y: Some(to),
                                prologue: None,
                            };
                            // SAFETY: as above.
                            unsafe { conv.run(share, &tensors, &mut space, &mut negate) }
                        }
                        assert_eq!(y, want, "{} {conv:?}", isa.name());
                    }
                }
            }
        }
    }
}
