//! Reports the choices of a plan between memory and speed.

use super::{Table, grouped};
use crate::plan::Knob;

/// A line per choice: what was chosen, the bytes that it cost or saved, and why.
pub fn choices(knobs: &[Knob]) -> String {
    if knobs.is_empty() {
        return "no choice between memory and speed was made\n".into();
    }
    let mut table = Table::new("<><");
    table.row(["choice", "bytes", ""]);
    for Knob { program, what, bytes, because } in knobs {
        let sign = if *bytes < 0 { "-" } else { "+" };
        let of = program.as_ref().map_or(String::new(), |program| format!("{program}: "));
        let size = format!("{sign}{}", grouped(bytes.unsigned_abs()));
        table.row([format!("  {of}{what}"), size, because.words().to_owned()]);
    }
    table.to_string()
}
