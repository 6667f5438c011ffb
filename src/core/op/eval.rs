//! The reference meaning of a call, in `f64`.

use super::fact::OpResult;
use super::{Args, Call, Eval};
use crate::dtype::DType;
use crate::expr;
use crate::shape::{Access, advance};

impl Call<'_> {
    /// Evaluates the row's `f64` meaning: row-major values of every output. Integer and `bool` results are whole.
    ///
    /// # Errors
    /// The reason why the row refuses the call.
    pub fn eval(&self, values: &[Option<&[f64]>]) -> OpResult<Vec<Vec<f64>>> {
        let facts = self.infer()?;
        let mut outputs = match self.op.eval {
            Eval::Tensor(f) | Eval::Move(f) => f(&Args(values), self)?,
            Eval::Known(f) => vec![f(self)?.to_f64()],
            Eval::Scalar(f) => {
                let shape = &facts[0].shape;
                let views: Vec<_> = self
                    .inputs
                    .iter()
                    .map(|fact| fact.map(|f| Access::contiguous(f.shape.clone()).broadcast(shape)))
                    .collect();
                let mut index = vec![0; shape.len()];
                let mut args = vec![f64::NAN; values.len()];
                let mut out = Vec::with_capacity(shape.numel());
                for _ in 0..shape.numel() {
                    for ((arg, value), view) in args.iter_mut().zip(values).zip(&views) {
                        if let (Some(value), Some(view)) = (value, view) {
                            *arg = value[view.at(&index) as usize];
                        }
                    }
                    out.push(f(&args, self));
                    advance(&mut index, shape);
                }
                vec![out]
            }
        };
        for (output, fact) in outputs.iter_mut().zip(&facts) {
            if !fact.dtype.is_real() {
                output.iter_mut().for_each(|v| *v = v.trunc());
            }
        }
        Ok(outputs)
    }

    /// As [`eval`](Self::eval), with values rounded as a node of a graph rounds them: to 16-bit floats, and to integers that wrap or saturate.
    ///
    /// # Errors
    /// As of [`eval`](Self::eval).
    pub fn eval_rounded(&self, values: &[Option<&[f64]>]) -> OpResult<Vec<Vec<f64>>> {
        let mut outputs = self.eval(values)?;
        let floats = self.inputs.iter().flatten().any(|fact| fact.dtype.is_float());
        for (output, fact) in outputs.iter_mut().zip(self.infer()?) {
            round(output, floats, fact.dtype);
        }
        Ok(outputs)
    }
}

/// Rounds values of a 16-bit float type, and wraps or saturates integers that arithmetic leaves. `from_floats` says which: floats saturate.
fn round(values: &mut [f64], from_floats: bool, dtype: DType) {
    if dtype.is_small_int() || dtype == DType::U64 {
        return values.iter_mut().for_each(|v| *v = expr::small(*v, from_floats, dtype));
    }
    let half: fn(f64) -> f64 = match dtype {
        DType::F16 => |v| half::f16::from_f64(v).to_f64(),
        DType::BF16 => |v| half::bf16::from_f64(v).to_f64(),
        _ => return,
    };
    values.iter_mut().for_each(|v| *v = half(*v));
}
