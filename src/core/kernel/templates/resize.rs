//! Interpolation.

use super::*;

/// How a resized element follows from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResizeMode {
    /// The nearest element, chosen by the rounding rule.
    Nearest(Nearest),
    /// Multilinear over the two neighbours along each resized axis; coordinates are clamped to the data.
    Linear,
    /// Cubic convolution with this coefficient over four neighbours along each resized axis, which are clamped to the data
    /// or, with `exclude_outside`, left out and the weights renormalised.
    Cubic {
        /// Coefficient `a`, usually -0.75.
        a: f64,
        /// Leave out what lies outside.
        exclude_outside: bool,
    },
}

/// The choice of the nearest neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

impl Nearest {
    /// The neighbour of a coordinate.
    pub fn choose(self, x: f64) -> f64 {
        match self {
            Nearest::Floor => x.floor(),
            Nearest::Ceil => x.ceil(),
            Nearest::RoundPreferFloor => (x - 0.5).ceil(),
            Nearest::RoundPreferCeil => (x + 0.5).floor(),
        }
    }
}

pub(super) static RESIZE: TemplateDef = TemplateDef {
    name: "resize",
    doc: "interpolation between neighbours",
    kind: Kind::Window,
    check: |kernel, _| {
        let Template::Resize { scales, offsets, .. } = &kernel.template else { mismatch(&kernel.template) };
        let rank = kernel.shape.len();
        kernel.reads_axes(0, rank)?;
        let all = scales.len() == rank && offsets.len() == rank;
        ensure(all, || {
            format!("expected a scale and an offset per axis, {rank}, found {} and {}", scales.len(), offsets.len())
        })?;
        let finite = scales.iter().chain(offsets).all(|v| v.is_finite());
        ensure(finite, || format!("expected finite numbers, found scales {scales:?} and offsets {offsets:?}"))?;
        let data = &kernel.reads[0].access.shape;
        ensure(kernel.is_empty() || !data.contains(&0), || format!("nothing of {data} to resize"))?;
        kernel.reads_images(false, false)
    },
    axis_of: |kernel, _, axis| if axis < 2 && stays(kernel, axis) { Along::Axis(axis) } else { Along::Tied },
    meaning: resize,
    samples: || {
        let cubic = ResizeMode::Cubic { a: -0.75, exclude_outside: true };
        let modes = [ResizeMode::Nearest(Nearest::RoundPreferFloor), ResizeMode::Linear, cubic];
        let resize = |mode| {
            let template = Template::Resize { scales: vec![1.0, 0.5, 1.5], offsets: vec![0.0, -0.25, 0.25], mode };
            sample(template, &[2, 6, 2], vec![floats(&[2, 3, 3])], Expr::input(0, DType::F32))
        };
        modes.map(resize).into()
    },
    ..PLAIN
};

fn resize(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Resize { scales, offsets, mode } = &kernel.template else { mismatch(&kernel.template) };
    let neighbours = |axis: usize| {
        // An axis that stays as it is has no neighbours, whatever the mode.
        if stays(kernel, axis) {
            return vec![(index[axis], 1.0)];
        }
        neighbours(index[axis] as f64 * scales[axis] + offsets[axis], elements.shape(0)[axis], *mode)
    };
    let taps: Vec<Vec<(usize, f64)>> = (0..index.len()).map(neighbours).collect();
    let counts: Vec<usize> = taps.iter().map(Vec::len).collect();
    let mut sum = 0.0;
    for choice in indices(&counts, Order::Forwards) {
        let chosen = || choice.iter().zip(&taps).map(|(&k, taps)| taps[k]);
        let at: Vec<usize> = chosen().map(|(i, _)| i).collect();
        sum += elements.at(0, &at) * chosen().map(|(_, weight)| weight).product::<f64>();
    }
    single(sum)
}

/// The neighbours of coordinate `x` on an axis of `n` elements, and their weights.
fn neighbours(x: f64, n: usize, mode: ResizeMode) -> Vec<(usize, f64)> {
    let last = n as f64 - 1.0;
    let clamp = |i: f64| i.clamp(0.0, last) as usize;
    match mode {
        ResizeMode::Nearest(rule) => vec![(clamp(rule.choose(x)), 1.0)],
        ResizeMode::Linear => {
            let x = x.clamp(0.0, last);
            let fraction = x - x.floor();
            vec![(clamp(x.floor()), 1.0 - fraction), (clamp(x.floor() + 1.0), fraction)]
        }
        ResizeMode::Cubic { a, exclude_outside } => {
            let weight = |distance: f64| {
                let d = distance.abs();
                if d <= 1.0 {
                    ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
                } else if d < 2.0 {
                    ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
                } else {
                    0.0
                }
            };
            let around = (-1..3).map(|k| x.floor() + f64::from(k));
            let mut taps: Vec<(f64, f64)> = around.map(|i| (i, weight(x - i))).collect();
            if exclude_outside {
                taps.retain(|(i, _)| (0.0..n as f64).contains(i));
                let total: f64 = taps.iter().map(|t| t.1).sum();
                taps.iter_mut().for_each(|t| t.1 /= total);
            }
            taps.into_iter().map(|(i, w)| (clamp(i), w)).collect()
        }
    }
}

/// True if a resize leaves an axis as it is.
fn stays(kernel: &Kernel, axis: usize) -> bool {
    let Template::Resize { scales, offsets, .. } = &kernel.template else { mismatch(&kernel.template) };
    scales[axis] == 1.0 && offsets[axis] == 0.0 && kernel.reads[0].access.shape[axis] == kernel.shape[axis]
}
