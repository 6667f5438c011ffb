//! The roofs of a device: how fast it copies, and how fast it multiplies. What a step reaches of them is how much is left to gain.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::plan::View;
use crate::random::splitmix;
use crate::session::{Options, Session};
use crate::target::Family;
use crate::tensor::Tensor;
use crate::trace::Trace;
use std::time::Duration;

/// The rates of a device, as they were measured.
#[derive(Clone, Debug)]
pub struct Roofs {
    /// Bytes read and written per second, of a large array that is copied.
    pub copied: f64,
    /// Multiply-adds per second, of a large matrix product in each type.
    pub multiplied: Vec<(DType, f64)>,
}

/// What a step reaches of the roof that is lower for it.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// The share; 0 to 1, or above if the step moves fewer bytes than its buffers have, as one does that gathers few rows.
    pub share: f64,
    /// True if the roof is that of products, else that of copies.
    pub multiplies: bool,
}

impl Roofs {
    /// Measures the device of these options, with memory of its own that is given back.
    ///
    /// # Errors
    /// When the device cannot be opened, or refuses.
    pub fn measure(options: &Options, plan: View) -> Result<Roofs> {
        let device = Options {
            backend: options.backend,
            device: options.device.clone(),
            libraries: options.libraries,
            allow_tf32: options.allow_tf32,
            threads: options.threads,
            ..Options::default()
        };
        // Beyond caches, and large enough to fill the device.
        let (elements, extent) = match plan.target.family {
            Family::Cpu => (1 << 24, 1024),
            Family::Wgpu => (1 << 24, 2048),
            Family::Cuda => (1 << 26, 8192),
        };
        let copied = {
            let trace = Trace::new("copy");
            trace.output("y", trace.input("x", DType::F32, [elements]) + 1.0);
            2.0 * 4.0 * elements as f64 / seconds(trace, &device, [[elements].as_slice()], DType::F32)?
        };
        let mut types: Vec<DType> = plan.kernels.iter().filter_map(multiplied).collect();
        types.sort_unstable_by_key(|dtype| dtype.name());
        types.dedup();
        let rate = |dtype: DType| {
            let trace = Trace::new("product");
            let [a, b] = ["a", "b"].map(|name| trace.input(name, dtype, [extent; 2]));
            trace.output("y", a.matmul(b));
            let shape = [extent; 2];
            Ok((dtype, (extent as f64).powi(3) / seconds(trace, &device, [&shape[..], &shape[..]], dtype)?))
        };
        Ok(Roofs { copied, multiplied: types.into_iter().map(rate).collect::<Result<_>>()? })
    }

    /// What a kernel reaches that takes so long, and reads and writes so many bytes.
    pub fn reached(&self, kernel: &Kernel, bytes: u64, time: Duration) -> Reached {
        let copied = bytes as f64 / self.copied;
        let rate = multiplied(kernel).and_then(|dtype| self.multiplied.iter().find(|(of, _)| *of == dtype));
        let products = rate.map_or(0.0, |(_, rate)| kernel.multiply_adds().unwrap_or(0) as f64 / rate);
        let share = copied.max(products) / time.as_secs_f64().max(f64::MIN_POSITIVE);
        Reached { share, multiplies: products > copied }
    }
}

/// The type in which a kernel multiplies, if products are its work and their rate is measured.
fn multiplied(kernel: &Kernel) -> Option<DType> {
    let dtype = kernel.reads.first()?.dtype;
    (kernel.multiply_adds().is_some() && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)).then_some(dtype)
}

/// The least time of a few runs.
fn seconds<const N: usize>(trace: Trace, options: &Options, shapes: [&[usize]; N], dtype: DType) -> Result<f64> {
    const RUNS: usize = 5;
    let session = Session::from_graph(trace.finish()?, options)?;
    let mut draw = splitmix(1);
    // Zeros take less power than data, and clocks rise.
    let mut values = |shape: &[usize]| -> Result<Tensor> {
        let few: Vec<f64> = (0..1 << 12).map(|_| (draw() >> 40) as f64 / f64::from(1 << 24) - 0.5).collect();
        let few = Tensor::from_f64(dtype, [few.len()], &few);
        let len = shape.iter().product::<usize>() * dtype.size();
        let bytes: Vec<u8> = few.bytes().iter().copied().cycle().take(len).collect();
        Tensor::new(dtype, shape.to_vec(), bytes)
    };
    let inputs = shapes.into_iter().map(&mut values).collect::<Result<Vec<_>>>()?;
    let times = session.with(|exec| {
        exec.write(&inputs)?;
        (0..=RUNS).map(|_| exec.time()).collect::<Result<Vec<_>>>()
    })?;
    // The first run warms the device up.
    Ok(times[1..].iter().min().expect("there are runs").as_secs_f64().max(f64::MIN_POSITIVE))
}
