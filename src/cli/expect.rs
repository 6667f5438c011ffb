//! `--expect`: outputs beside what they are to be.

use super::args;
use crate::error::{Error, Result};
use crate::report::Table;
use crate::tensor::Tensor;
use clap::Args;
use serde_json::{Value, json};

/// The largest difference of floats that is within rounding: over the output's peak, or where that is zero.
const OF_PEAK: f64 = 1e-4;
const OF_ZEROS: f64 = 1e-5;

/// The tolerance of a comparison: how far an output may be from its expected elements.
#[derive(Clone, Copy)]
pub(super) enum Tolerance {
    /// The largest difference over the largest expected element. Integers must be equal.
    OfPeak,
    /// Each element within `atol + rtol * |expected|`.
    Each { rtol: f64, atol: f64 },
}

/// The flags of a tolerance.
#[derive(Args)]
pub(super) struct Tolerances {
    /// Compare element by element: each within ATOL + RTOL * |expected|. Default, with --atol: 1e-4.
    #[arg(long, value_parser = args::tolerance)]
    rtol: Option<f64>,
    /// The absolute part of that. Default, with --rtol: 1e-5.
    #[arg(long, value_parser = args::tolerance)]
    atol: Option<f64>,
}

impl Tolerances {
    /// One of the two makes it a tolerance of each element.
    pub(super) fn tolerance(&self) -> Tolerance {
        match (self.rtol, self.atol) {
            (None, None) => Tolerance::OfPeak,
            (rtol, atol) => Tolerance::Each { rtol: rtol.unwrap_or(1e-4), atol: atol.unwrap_or(1e-5) },
        }
    }

    /// True if a flag is given.
    pub(super) fn is_given(&self) -> bool {
        self.rtol.is_some() || self.atol.is_some()
    }
}

/// An output that is as it is to be.
pub(super) struct Same {
    name: String,
    difference: f64,
    peak: f64,
    at: Vec<usize>,
}

impl Same {
    /// Holds a tensor, which `what` names, against what is expected. Types of the same kind are compared as doubles.
    ///
    /// # Errors
    /// [`Error::Differ`], with the element that differs most.
    pub(super) fn new(what: &str, name: &str, found: &Tensor, expected: &Tensor, tolerance: Tolerance) -> Result<Same> {
        let differ = |how: String| Error::differ(format!("{what}: {how}"));
        let [of, as_expected] = [found, expected].map(Tensor::dtype);
        let alike =
            of == as_expected || of.is_real() && as_expected.is_real() || of.is_whole() && as_expected.is_whole();
        if !alike || found.shape() != expected.shape() {
            let (expected, found) = (expected.shape(), found.shape());
            return Err(differ(format!("expected {as_expected}{expected}, found {of}{found}")));
        }
        if of != as_expected {
            tracing::info!("{what}: expected {as_expected}, found {of}: compared as f64");
        }
        let (found_values, expected_values) = (found.to_f64(), expected.to_f64());
        if let Tolerance::Each { rtol, atol } = tolerance {
            let [found, expected] =
                [(&found_values, found), (&expected_values, expected)].map(|(values, tensor)| wide(values, tensor));
            found.compare(&expected, rtol, atol).map_err(differ)?;
        }
        let finite = expected_values.iter().map(|v| v.abs()).filter(|v| v.is_finite());
        let peak = finite.fold(0.0, f64::max);
        let allowed = match peak {
            _ if !of.is_real() => 0.0,
            0.0 => OF_ZEROS,
            _ => OF_PEAK * peak,
        };
        let mut worst = (0.0, 0);
        let mut beyond = 0;
        for (i, (found, expected)) in found_values.iter().zip(&expected_values).enumerate() {
            let same = found == expected || found.is_nan() && expected.is_nan();
            let difference = if same { 0.0 } else { (found - expected).abs() };
            // A NaN or an infinity on one side only is no difference that could be measured.
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            beyond += usize::from(difference > allowed);
            if difference > worst.0 {
                worst = (difference, i);
            }
        }
        let (difference, at) = worst;
        let index = found.shape().index_of(at);
        if matches!(tolerance, Tolerance::OfPeak) && beyond > 0 {
            let (wanted, found, all) = (expected_values[at], found_values[at], found_values.len());
            let share = if peak > 0.0 {
                format!(", which is {:.3e} of the peak {peak}", difference / peak)
            } else {
                String::new()
            };
            return Err(differ(format!(
                "{beyond} of {all} elements differ by more than {allowed:.3e}. The largest difference is {difference:.3e}{share}, at {index:?}: \
                 expected {wanted}, found {found}. --rtol and --atol set another tolerance"
            )));
        }
        Ok(Same { name: name.to_owned(), difference, peak, at: index })
    }

    /// The largest difference over the peak; `None` if all that is expected is zero.
    fn of_peak(&self) -> Option<f64> {
        (self.peak > 0.0).then(|| self.difference / self.peak)
    }

    pub(super) fn json(&self) -> Value {
        json!({"name": self.name, "difference": self.difference, "of_peak": self.of_peak(), "at": self.at})
    }
}

/// A tensor's elements as doubles.
fn wide(values: &[f64], tensor: &Tensor) -> Tensor {
    Tensor::from_f64(crate::dtype::DType::F64, tensor.shape().clone(), values)
}

/// Tensors that are as expected, as a table; empty if there are none.
pub(super) fn table(heading: &str, found: &[Same]) -> String {
    let mut table = Table::new("<>>");
    table.row([heading, "largest difference", "of the peak", "at"]);
    for same in found {
        let of_peak = same.of_peak().map(|share| format!("{share:.3e}")).unwrap_or_default();
        table.row([same.name.clone(), format!("{:.3e}", same.difference), of_peak, format!("{:?}", same.at)]);
    }
    if found.is_empty() { String::new() } else { format!("\n{table}") }
}
