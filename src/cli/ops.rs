//! `ops`: lists the op table.

use super::line;
use super::support::{self, Support};
use crate::dtype::DType;
use crate::error::Result;
use crate::report::Table;
use serde_json::{Map, Value, json};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
ops = [row]
row
  name text
  doc text
  kernel text
  types {{text}}
";

/// Types of which elements have at most 8 bits, and are not computed with.
const NARROW: usize = 10;

pub(super) fn run(json: bool) -> Result<String> {
    let targets = support::targets();
    let table = support::table();
    if json {
        let types = |types: &[(DType, DType)]| -> Value {
            types
                .iter()
                .map(|(dtype, stored)| (dtype.name().to_owned(), json!(stored.name())))
                .collect::<Map<_, _>>()
                .into()
        };
        let rows = table.iter().map(|Support { op, types: all }| {
            let all = targets.iter().zip(all).map(|(target, all)| (target.name.clone(), types(all)));
            let all: Map<_, _> = all.collect();
            json!({"name": op.name, "doc": op.doc, "kernel": op.lower.name(), "types": all})
        });
        return Ok(line(&json!(rows.collect::<Vec<_>>())));
    }
    let names = |types: &[(DType, DType)]| match types {
        [] => "-".to_owned(),
        types => {
            let (narrow, others): (Vec<_>, Vec<_>) = types.iter().partition(|(d, _)| d.is_narrow());
            let mark = |(d, stored): &(DType, DType)| format!("{d}{}", if d == stored { "" } else { "*" });
            let narrow = match narrow.len() {
                NARROW => vec!["narrow*".to_owned()],
                _ => narrow.into_iter().map(mark).collect(),
            };
            others.into_iter().map(mark).chain(narrow).collect::<Vec<_>>().join(" ")
        }
    };
    let mut text = Table::new("<");
    let heads = ["operator", "kernel"].map(str::to_owned).into_iter().chain(targets.iter().map(|t| t.name.clone()));
    text.row(heads.chain(["meaning".to_owned()]));
    for Support { op, types } in &table {
        let cells = [op.name, op.lower.name()].map(str::to_owned).into_iter().chain(types.iter().map(|t| names(t)));
        text.row(cells.chain([op.doc.to_owned()]));
    }
    let mut text = text.to_string() + "\n";
    for target in &targets {
        let stored = |dtype: &DType| target.storage(*dtype).ok().filter(|stored| stored != dtype);
        let moved: Vec<_> = DType::ALL
            .iter()
            .filter(|d| !d.is_narrow())
            .filter_map(|d| Some(format!("{d} as {}", stored(d)?)))
            .collect();
        let lacking: Vec<_> =
            DType::ALL.iter().filter(|d| target.storage(**d).is_err()).map(DType::to_string).collect();
        let mut parts = Vec::new();
        if !moved.is_empty() {
            parts.push(format!("computes {} (*)", moved.join(", ")));
        }
        if !lacking.is_empty() {
            parts.push(format!("has no {}", lacking.join(", ")));
        }
        let parts = if parts.is_empty() { "every type as it is".to_owned() } else { parts.join("; ") };
        text += &format!("{}: {parts}\n", target.name);
    }
    let narrow: Vec<_> = DType::ALL.iter().filter(|d| d.is_narrow()).map(DType::to_string).collect();
    text +=
        &format!("narrow: {}, each held in a byte that no kernel computes with before a cast (*)\n", narrow.join(", "));
    Ok(text)
}
