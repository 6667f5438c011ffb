//! Windows that slide over images.

use super::*;

/// Elements of a window up to which a convolution of bytes has a kernel.
pub const MOST_TAPS: usize = 64;

/// Elements of a window along an axis up to which strips lie along it.
pub const MOST_HELD: usize = 64;

/// True if GPUs compute a convolution as a product of matrices. It has `outputs` output channels per group, and `depth` weights per
/// output channel.
pub fn unfolds(outputs: usize, depth: usize) -> bool {
    outputs >= 8 && depth >= 8
}

/// True if strips of positions add up the gradients of filters with such a window. An invocation has the taps along an axis.
pub fn adds_directly(taps: &[usize]) -> bool {
    taps.len() < 3 || taps.iter().any(|&n| n <= MOST_HELD)
}

/// A window that slides over up to three spatial axes (unused leading ones have extent 1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Extents.
    pub kernel: [usize; 3],
    /// Steps between windows.
    pub strides: [usize; 3],
    /// Steps between elements of a window.
    pub dilations: [usize; 3],
    /// Elements of padding before each axis. The padding behind follows from the output's extents.
    pub pads: [usize; 3],
}

/// How a pooling window's elements combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// The largest element inside the data.
    Max,
    /// The mean of the elements inside the data.
    Mean,
    /// The sum of the elements inside the data over the number of window elements inside the data and its padding,
    /// whose trailing extents are given.
    MeanPadded {
        /// Elements of padding behind each axis.
        pads_end: [usize; 3],
    },
}

pub(super) static CONV: TemplateDef = TemplateDef {
    name: "conv",
    doc: "convolution",
    kind: Kind::Convolution,
    core_reads: |_| 2,
    // A depthwise one reads its filters tap by tap.
    widens: |kernel, operand, is_constant| {
        let Template::Conv { groups, .. } = &kernel.template else { mismatch(&kernel.template) };
        operand == 1 && is_constant && kernel.reads[0].access.shape.get(1) != Some(groups)
    },
    check: |kernel, family| {
        let Template::Conv { groups, window, padding } = &kernel.template else { mismatch(&kernel.template) };
        let (c, o) = channels(kernel, *groups)?;
        kernel.reads_extents(1, &[&[o, c / groups], &window.kernel[..]].concat())?;
        window.validate(&kernel.shape, &kernel.reads[0].access.shape)?;
        kernel.reads_images(family == Family::Cuda, family == Family::Cpu)?;
        match [kernel.reads[0].dtype, kernel.reads[1].dtype] {
            [data @ DType::U8, DType::I8] | [data @ DType::I8, DType::U8] => bytes(kernel, data, *padding),
            _ => {
                ensure(*padding == 0, || format!("expected zeros around floats, found {padding}"))?;
                kernel.reads_floats(2)
            }
        }
    },
    axis_of: |kernel, operand, axis| axis_of(kernel, 0, operand, axis),
    meaning: conv,
    samples: || {
        convolutions([2, 4, 1, 5, 6], [2, 6, 1, 3, 2], [6, 4], |groups, window| Template::Conv {
            groups,
            window,
            padding: 0,
        })
    },
    ..PLAIN
};

/// The rules of a convolution of bytes.
fn bytes(kernel: &Kernel, data: DType, padding: i32) -> Verdict {
    let window = &kernel.reads[1].access.shape;
    let (taps, terms) = (window[2..].iter().product::<usize>(), window[1..].iter().product::<usize>());
    ensure(taps <= MOST_TAPS, || format!("expected windows of up to {MOST_TAPS} bytes, found {taps}"))?;
    ensure(terms <= MOST_TERMS, || format!("expected sums of up to {MOST_TERMS} products of bytes, found {terms}"))?;
    let (low, high) = data.range();
    ensure((low..=high).contains(&f64::from(padding)), || format!("expected {data} around the data, found {padding}"))
}

fn conv(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Conv { groups, window, padding } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, o, ref spatial @ ..] = index else { panic!("a convolution has five axes") };
    let first = o / (kernel.shape[1] / groups) * elements.shape(1)[1];
    let mut sum = 0.0;
    for t in indices(&window.kernel, Order::Forwards) {
        let weights = elements.along(1, &[o, 0, t[0], t[1], t[2]], 1);
        let Some([z, y, x]) = source(window, spatial, &t, &elements.shape(0)[2..]) else {
            sum += f64::from(*padding) * weights.iter().sum::<f64>();
            continue;
        };
        let data = (first..first + weights.len()).map(|c| elements.at(0, &[n, c, z, y, x]));
        sum += dot(&weights, &data.collect::<Vec<f64>>());
    }
    single(sum)
}

pub(super) static CONV_TRANSPOSE: TemplateDef = TemplateDef {
    name: "conv_transpose",
    doc: "transposed convolution, the gradient of a convolution by its input",
    kind: Kind::Convolution,
    core_reads: |_| 2,
    check: |kernel, family| {
        let Template::ConvTranspose { groups, window } = &kernel.template else { mismatch(&kernel.template) };
        let (c, o) = channels(kernel, *groups)?;
        kernel.reads_extents(1, &[&[c, o / groups], &window.kernel[..]].concat())?;
        // The window slides over the result.
        window.validate(&kernel.reads[0].access.shape, &kernel.shape)?;
        kernel.reads_images(family == Family::Cuda, family == Family::Cpu)?;
        kernel.reads_floats(2)
    },
    axis_of: |kernel, operand, axis| axis_of(kernel, 1, operand, axis),
    meaning: conv_transpose,
    samples: || {
        let of = |groups, window| Template::ConvTranspose { groups, window };
        convolutions([2, 4, 1, 3, 2], [2, 6, 1, 5, 6], [4, 6], of)
    },
    ..PLAIN
};

fn conv_transpose(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::ConvTranspose { groups, window } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, o, ref spatial @ ..] = index else { panic!("a convolution has five axes") };
    let (channels, per_group) = (elements.shape(0)[1] / groups, kernel.shape[1] / groups);
    let (group, o) = (o / per_group, o % per_group);
    let mut sum = 0.0;
    for t in indices(&window.kernel, Order::Forwards) {
        let Some([z, y, x]) = place(window, spatial, &t, &elements.shape(0)[2..]) else { continue };
        for c in group * channels..(group + 1) * channels {
            sum += elements.at(0, &[n, c, z, y, x]) * elements.at(1, &[c, o, t[0], t[1], t[2]]);
        }
    }
    single(sum)
}

pub(super) static CONV_FILTERS: TemplateDef = TemplateDef {
    name: "conv_filters",
    doc: "gradient of a convolution by its filters, in sums over parts of the positions",
    kind: Kind::Convolution,
    core_reads: |_| 2,
    check: |kernel, _| {
        let Template::ConvFilters { groups, rows, window } = &kernel.template else { mismatch(&kernel.template) };
        let shape = &kernel.shape;
        ensure(shape.len() == 6, || format!("expected 6 axes, found {shape}"))?;
        kernel.reads_axes(0, 5)?;
        kernel.reads_axes(1, 5)?;
        let [data, gradient] = [0, 1].map(|i| &kernel.reads[i].access.shape);
        let parts = [shape[0].checked_div(*rows).unwrap_or(0), *rows];
        let fits = parts[0] > 0 && parts[0] * parts[1] == shape[0] && gradient[3].is_multiple_of(*rows);
        ensure(fits && gradient[0].is_multiple_of(parts[0]), || {
            format!("expected parts of equal images and rows of {gradient}, found {} of {rows} stretches", shape[0])
        })?;
        let all = shape[2].checked_mul(*groups).filter(|_| *groups > 0 && shape[1].is_multiple_of(*groups));
        ensure(all == Some(data[1]), || format!("expected groups of {shape} over {data}, found {groups}"))?;
        kernel.reads_extents(0, &[&[gradient[0]], &data[1..]].concat())?;
        kernel.reads_extents(1, &[&[gradient[0], shape[1]], &gradient[2..]].concat())?;
        ensure(shape[3..] == window.kernel, || format!("expected a window as in {shape}, found {window:?}"))?;
        window.validate(gradient, data)?;
        kernel.reads_floats(2)
    },
    axis_of: |kernel, operand, axis| {
        let &Template::ConvFilters { groups, .. } = &kernel.template else { mismatch(&kernel.template) };
        match (operand, axis) {
            (0, 1) | (1, 2) if groups == 1 => Along::Whole,
            (0, 2) | (1, 1) if groups == 1 => Along::Axis(1),
            _ => Along::Tied,
        }
    },
    meaning: conv_filters,
    samples: || {
        let window = Window { kernel: [1, 2, 3], strides: [1, 2, 1], dilations: [1, 1, 2], pads: [0, 1, 0] };
        let of = |groups, rows, parts| {
            let reads = vec![floats(&[2, 4, 1, 7, 6]), floats(&[2, 6, 1, 4, 2])];
            let template = Template::ConvFilters { groups, rows, window: window.clone() };
            sample(template, &[parts, 6, 4 / groups, 1, 2, 3], reads, Expr::input(0, DType::F32))
        };
        vec![of(1, 1, 1), of(1, 2, 4), of(2, 1, 2)]
    },
    ..PLAIN
};

fn conv_filters(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::ConvFilters { rows, window, .. } = &kernel.template else { mismatch(&kernel.template) };
    let &[part, o, c, ref tap @ ..] = index else { panic!("gradients of filters have six axes") };
    let gradient = elements.shape(1).to_vec();
    let (images, lines) = (gradient[0] / (kernel.shape[0] / rows), gradient[3] / rows);
    let channel = o / (kernel.shape[1] / (elements.shape(0)[1] / kernel.shape[2])) * kernel.shape[2] + c;
    let mut sum = 0.0;
    for place in indices(&[images, gradient[2], lines, gradient[4]], Order::Forwards) {
        let n = part / rows * images + place[0];
        let at = [place[1], part % rows * lines + place[2], place[3]];
        let Some([z, y, x]) = source(window, &at, tap, &elements.shape(0)[2..]) else { continue };
        sum += elements.at(0, &[n, channel, z, y, x]) * elements.at(1, &[n, o, at[0], at[1], at[2]]);
    }
    single(sum)
}

pub(super) static POOL: TemplateDef = TemplateDef {
    name: "pool",
    doc: "maximum or mean of a window",
    kind: Kind::Window,
    check: |kernel, family| {
        let Template::Pool { window, pool } = &kernel.template else { mismatch(&kernel.template) };
        let shape = &kernel.shape;
        ensure(shape.len() == 5, || format!("expected 5 axes, found {shape}"))?;
        kernel.reads_axes(0, 5)?;
        let data = &kernel.reads[0].access.shape;
        kernel.reads_extents(0, &[&shape[..2], &data[2..]].concat())?;
        window.validate(shape, data)?;
        if let Pool::MeanPadded { pads_end } = pool {
            let small = pads_end.iter().all(|&p| p <= MOST_EXTENT);
            ensure(small, || format!("padding of {pads_end:?} is too large"))?;
        }
        kernel.reads_images(family == Family::Cuda, family == Family::Cpu)?;
        if *pool == Pool::Max { Ok(()) } else { kernel.reads_floats(1) }
    },
    axis_of: |_, _, axis| if axis < 2 { Along::Axis(axis) } else { Along::Tied },
    meaning: pool,
    samples: || {
        let window = Window { kernel: [1, 2, 2], strides: [1, 2, 1], dilations: [1; 3], pads: [0, 1, 1] };
        let pools = [Pool::Max, Pool::Mean, Pool::MeanPadded { pads_end: [0, 1, 0] }];
        let pool = |pool| {
            let template = Template::Pool { window: window.clone(), pool };
            sample(template, &[1, 2, 1, 3, 4], vec![floats(&[1, 2, 1, 4, 4])], Expr::input(0, DType::F32))
        };
        pools.map(pool).into()
    },
    ..PLAIN
};

fn pool(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Pool { window, pool } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, c, ref spatial @ ..] = index else { panic!("pooling has five axes") };
    let data = [elements.shape(0)[2], elements.shape(0)[3], elements.shape(0)[4]];
    let taps = indices(&window.kernel, Order::Forwards);
    let inside: Vec<[usize; 3]> = taps.iter().filter_map(|t| source(window, spatial, t, &data)).collect();
    let values: Vec<f64> = inside.iter().map(|&[z, y, x]| elements.at(0, &[n, c, z, y, x])).collect();
    let mean = |count: usize| values.iter().sum::<f64>() / count.max(1) as f64;
    single(match pool {
        Pool::Max => values.iter().copied().fold(f64::NEG_INFINITY, maximum),
        Pool::Mean => mean(values.len()),
        Pool::MeanPadded { pads_end } => {
            // The window's elements inside the data with its padding.
            let padded = [0, 1, 2].map(|k| window.pads[k] + data[k] + pads_end[k]);
            let bare = Window { pads: [0; 3], ..window.clone() };
            mean(taps.iter().filter(|t| source(&bare, spatial, t, &padded).is_some()).count())
        }
    })
}

pub(super) static POOL_GRAD: TemplateDef = TemplateDef {
    name: "pool_grad",
    doc: "gradient of a maximum of windows by its input",
    kind: Kind::Window,
    core_reads: |_| 3,
    check: |kernel, _| {
        let Template::PoolGrad { window } = &kernel.template else { mismatch(&kernel.template) };
        let shape = &kernel.shape;
        ensure(shape.len() == 5, || format!("expected 5 axes, found {shape}"))?;
        kernel.reads_extents(0, shape)?;
        kernel.reads_axes(1, 5)?;
        let places = &kernel.reads[1].access.shape;
        kernel.reads_extents(1, &[&shape[..2], &places[2..]].concat())?;
        kernel.reads_extents(2, places)?;
        window.validate(places, shape)?;
        kernel.reads_floats(3)
    },
    axis_of: |_, _, axis| if axis < 2 { Along::Axis(axis) } else { Along::Tied },
    meaning: pool_grad,
    samples: || {
        let grad = |kernel, strides, dilations, pads, places: [usize; 3]| {
            let window = Window { kernel, strides, dilations, pads };
            let reads = vec![floats(&[2, 2, 1, 5, 4]), floats(&[&[2, 2], &places[..]].concat())];
            let reads = [reads.clone(), vec![reads[1].clone()]].concat();
            sample(Template::PoolGrad { window }, &[2, 2, 1, 5, 4], reads, Expr::input(0, DType::F32))
        };
        vec![
            grad([1, 3, 2], [1, 2, 1], [1; 3], [0, 1, 1], [1, 3, 5]),
            grad([1, 2, 2], [1, 1, 2], [1, 2, 1], [0; 3], [1, 3, 2]),
        ]
    },
    ..PLAIN
};

fn pool_grad(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::PoolGrad { window } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, c, ref spatial @ ..] = index else { panic!("pooling has five axes") };
    let (own, mut sum) = (elements.at(0, index), 0.0);
    let taps = indices(&window.kernel, Order::Forwards);
    for (number, t) in taps.iter().enumerate() {
        let Some(place) = place(window, spatial, t, &elements.shape(1)[2..]) else { continue };
        let [z, y, x] = place;
        let most = elements.at(1, &[n, c, z, y, x]);
        let earlier = taps[..number].iter().filter_map(|t| source(window, &place, t, &kernel.shape[2..]));
        let earlier: Vec<f64> = earlier.map(|[z, y, x]| elements.at(0, &[n, c, z, y, x])).collect();
        if own == most && !earlier.contains(&most) {
            sum += elements.at(2, &[n, c, z, y, x]);
        }
    }
    single(sum)
}

/// Where element `tap` of the window at `place` is on data of these spatial extents; `None` is outside.
fn source(window: &Window, place: &[usize], tap: &[usize], data: &[usize]) -> Option<[usize; 3]> {
    let mut at = [0; 3];
    for k in 0..3 {
        let behind = place[k] * window.strides[k] + tap[k] * window.dilations[k];
        at[k] = behind.checked_sub(window.pads[k]).filter(|&i| i < data[k])?;
    }
    Some(at)
}

/// The place of the window whose element `tap` is at `at`, among `places`.
fn place(window: &Window, at: &[usize], tap: &[usize], places: &[usize]) -> Option<[usize; 3]> {
    let mut place = [0; 3];
    for k in 0..3 {
        let start = (at[k] + window.pads[k]).checked_sub(tap[k] * window.dilations[k])?;
        let steps = start / window.strides[k];
        place[k] = (start.is_multiple_of(window.strides[k]) && steps < places[k]).then_some(steps)?;
    }
    Some(place)
}

/// The channels read and written by a convolution whose data has five axes.
fn channels(kernel: &Kernel, groups: usize) -> Verdict<(usize, usize)> {
    let shape = &kernel.shape;
    ensure(shape.len() == 5, || format!("expected 5 axes, found {shape}"))?;
    kernel.reads_axes(0, 5)?;
    kernel.reads_axes(1, 5)?;
    let data = &kernel.reads[0].access.shape;
    for channels in [data[1], shape[1]] {
        let fits = groups > 0 && channels.is_multiple_of(groups);
        ensure(fits, || format!("expected groups that divide {channels} channels, found {groups}"))?;
    }
    kernel.reads_extents(0, &[&[shape[0]], &data[1..]].concat())?;
    Ok((data[1], shape[1]))
}

/// How an operand of a convolution lies along an axis of its result; axis `outputs` of the weights is that of the result's channels.
fn axis_of(kernel: &Kernel, outputs: usize, operand: usize, axis: usize) -> Along {
    let (Template::Conv { groups, .. } | Template::ConvTranspose { groups, .. }) = kernel.template else {
        mismatch(&kernel.template)
    };
    match (operand, axis) {
        (0, 0) => Along::Axis(0),
        (1, 0) => Along::Whole,
        (0, 1) if groups == 1 => Along::Whole,
        (1, 1) if groups == 1 => Along::Axis(outputs),
        _ => Along::Tied,
    }
}

/// Samples of one group and of two, whose data, result and weights of one group have these extents, without the window's.
fn convolutions(
    data: [usize; 5],
    result: [usize; 5],
    [outer, inner]: [usize; 2],
    of: fn(usize, Window) -> Template,
) -> Vec<Kernel> {
    let window = Window { kernel: [1, 2, 3], strides: [1, 2, 1], dilations: [1, 1, 2], pads: [0, 1, 0] };
    let conv = |groups| {
        let reads = vec![floats(&data), floats(&[outer, inner / groups, 1, 2, 3])];
        sample(of(groups, window.clone()), &result, reads, Expr::input(0, DType::F32))
    };
    [1, 2].map(conv).into()
}
