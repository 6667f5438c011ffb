//! `schema`: JSON schemas of what `--json` prints.
//!
//! Each command's file says what its own prints, in a `SCHEMA`:
//!
//! ```text
//! run                       a record, with a key per line. No others are allowed
//!   ..subject               and with the keys of another record
//!   seconds number          a key and its type
//!   states? [tensor]        one that may be missing: a list of records
//!   binding? {int|text}     an object of any keys, each with a whole number or a text
//! bench = times|forks       one of two records
//! ```

use super::line;
use crate::cli::{
    bench, compare, devices, diff, emit, fit, help, inspect, max_batch, ops, place, plan, run, train, tune, web,
};
use crate::error::{Error, Result};
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Records that several commands print, and those of errors.
const SHARED: &str = "
error = failed|unfit|above_peak|unfit_training
failed
  error text
  exit_code int
unfit
  ..failed
  ..advice
above_peak
  ..failed
  limit_bytes int
  needed_bytes int
  deficit_bytes int
  program? text
  peak peak
  advice? advice
unfit_training
  ..failed
  limit_bytes int
  needed_bytes int
  deficit_bytes int
  bound bound
  whole_bytes int
  recompute recompute
  remedies [remedy]
subject
  file? text
  files? [text]
  plan? text
  binding? {int|text}
  assumed? [text]
answer
  limit_bytes int
  needed_bytes int
  deficit_bytes int
  constant_bytes int
  verdict 'fits'|'fits_reordered'|'fits_smaller'|'cannot'|'not_found'
  file_order_bytes int|null
  bound bound|null
  smaller [largest]
  rigid [rigid]
rigid
  dim text
  error text
advice
  limit_bytes? int
  needed_bytes? int
  deficit_bytes? int
  constant_bytes? int
  verdict? 'fits'|'fits_reordered'|'fits_smaller'|'cannot'|'not_found'
  file_order_bytes? int|null
  bound? bound|null
  smaller? [largest]
  rigid? [rigid]
  peak peak
  remedies [remedy]
largest
  dim text
  fits size|null
  next size|null
  plans int
size = extent_bytes|extent_error
extent_bytes
  extent int
  planned_bytes int
  deficit_bytes? int
extent_error
  extent int
  error text
remedy = remedy_bytes|remedy_error
remedy_bytes
  name text
  change text
  planned_bytes int
remedy_error
  name text
  change text
  error text
bound
  bytes int
  held_bytes int
  arena_bytes int
  step text|null
peak
  step int|null
  name text
  operator text
  steps int
  bytes int
  live [holder]
  others rest
  idle_bytes int
  held [rest]
holder
  name text
  operator text
  kernel text
  class class
  bytes int
rest
  class class
  count int
  bytes int
  largest text|null
class = 'constant'|'state'|'input'|'output'|'activation'|'workspace'|'staging'|'backend'|'reserve'
recompute
  extra_flop int
  extra_bytes int
  flop int
classes
  constant int
  state int
  gradient int
  kept int
  activation int
  workspace int
  input int
  output int
  idle int
  staging int
  backend int
  reserve int
states
  weight int
  optimizer int
  gradient int
  average int
  statistic int
  idle int
placed
  node text
  kernel text
beside
  bytes int
  context int
  libraries int
  modules int
  graphs int
  device text
target
  name text
  family 'cpu'|'wgpu'|'cuda'
  alignment int
  max_segment int
  max_binding int
  max_bindings int
  max_workgroup int
  max_shared int
  max_groups int
  streams? int
  threads int
  staging int
  reserve? int
  libraries? libraries
  allow_tf32? bool
  compute? int
  multiprocessors? int
  subgroups? bool
libraries
  cublaslt bool
  cudnn bool
  attention? bool
";

/// The texts of all commands. A command's own record has its name.
const TEXTS: &[&str] = &[
    SHARED,
    SCHEMA,
    bench::SCHEMA,
    compare::SCHEMA,
    devices::SCHEMA,
    diff::SCHEMA,
    emit::SCHEMA,
    help::SCHEMA,
    inspect::SCHEMA,
    fit::SCHEMA,
    max_batch::SCHEMA,
    ops::SCHEMA,
    place::SCHEMA,
    plan::SCHEMA,
    run::SCHEMA,
    train::SCHEMA,
    tune::SCHEMA,
    web::SCHEMA,
];

const SCHEMA: &str = "
schema = object
";

#[derive(Args)]
pub(super) struct Schema {
    /// A command, or `error`. Default: all.
    command: Option<String>,
}

impl Schema {
    pub(super) fn run(&self, commands: &[String], json: bool) -> Result<String> {
        let records = records();
        let roots: Vec<&str> = match self.command.as_deref() {
            None => commands.iter().map(String::as_str).chain(["error"]).collect(),
            Some("error") => vec!["error"],
            Some(name) if commands.iter().any(|known| known == name) => vec![name, "error"],
            Some(name) => {
                let known = commands.join(", ");
                return Err(Error::usage(format!("schema {name}: no such command; the commands: {known}, error")));
            }
        };
        let mut defined = Map::new();
        roots.iter().for_each(|root| define(root, &records, &mut defined));
        let any: Vec<Value> = roots.iter().map(|root| reference(root)).collect();
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": self.command.as_ref().map_or("plimsoll --json".into(), |name| format!("plimsoll {name} --json")),
            "anyOf": any,
            "$defs": defined,
        });
        Ok(if json { line(&schema) } else { format!("{schema:#}\n") })
    }
}

/// The meaning of a name.
enum Record {
    /// An object's keys with their types, and the records whose keys it has, too.
    Keys { keys: Vec<(&'static str, &'static str)>, of: Vec<&'static str> },
    /// A type.
    Is(&'static str),
}

type Records = BTreeMap<&'static str, Record>;

/// The records of all texts.
///
/// # Panics
/// When a text does not follow the form above.
fn records() -> Records {
    let mut records = Records::new();
    let mut last = "";
    for text in TEXTS.iter().flat_map(|text| text.lines()).filter(|text| !text.is_empty()) {
        if let Some(key) = text.strip_prefix("  ") {
            let Some(Record::Keys { keys, of }) = records.get_mut(last) else { panic!("{last} has no keys: {key}") };
            match key.strip_prefix("..") {
                Some(record) => of.push(record),
                None => keys.push(key.split_once(' ').unwrap_or_else(|| panic!("{last}: {key} has no type"))),
            }
            continue;
        }
        let (name, record) = match text.split_once(" = ") {
            Some((name, of)) => (name, Record::Is(of)),
            None => (text, Record::Keys { keys: Vec::new(), of: Vec::new() }),
        };
        assert!(records.insert(name, record).is_none(), "{name} is defined twice");
        last = name;
    }
    records
}

/// Adds the schema of a name, and of all that it refers to.
fn define(name: &str, records: &Records, defined: &mut Map<String, Value>) {
    if defined.contains_key(name) {
        return;
    }
    let record = records.get(name).unwrap_or_else(|| panic!("{name} is not defined"));
    let mut used = Vec::new();
    let schema = match record {
        Record::Is(of) => schema(of, &mut used),
        Record::Keys { .. } => {
            let (mut properties, mut required) = (Map::new(), Vec::new());
            for (key, of) in keys(name, records) {
                let own = key.strip_suffix('?');
                required.extend(own.is_none().then_some(key));
                properties.insert(own.unwrap_or(key).to_owned(), schema(of, &mut used));
            }
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    };
    defined.insert(name.to_owned(), schema);
    used.into_iter().for_each(|name| define(name, records, defined));
}

/// The keys of a record, with those of the records that it names.
fn keys(name: &str, records: &Records) -> Vec<(&'static str, &'static str)> {
    let Some(Record::Keys { keys: own, of }) = records.get(name) else { panic!("{name} has no keys") };
    of.iter().flat_map(|of| keys(of, records)).chain(own.iter().copied()).collect()
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/$defs/{name}")})
}

/// The schema of a type. Notes the names in it.
fn schema(of: &'static str, used: &mut Vec<&'static str>) -> Value {
    let parts = alternatives(of);
    if parts.len() > 1 {
        let words: Option<Vec<_>> = parts.iter().map(|part| quoted(part)).collect();
        let any = |used: &mut Vec<_>| parts.iter().map(|part| schema(part, used)).collect::<Vec<_>>();
        return words.map_or_else(|| json!({"anyOf": any(used)}), |words| json!({"enum": words}));
    }
    let inside = |open, close| of.strip_prefix(open).and_then(|of: &'static str| of.strip_suffix(close));
    if let Some(item) = inside('[', ']') {
        return json!({"type": "array", "items": schema(item, used)});
    }
    if let Some(value) = inside('{', '}') {
        return json!({"type": "object", "additionalProperties": schema(value, used)});
    }
    if let Some(word) = quoted(of) {
        return json!({"const": word});
    }
    let plain = match of {
        "text" => "string",
        "int" => "integer",
        "bool" => "boolean",
        "number" | "null" | "object" => of,
        name => {
            used.push(name);
            return reference(name);
        }
    };
    json!({"type": plain})
}

fn quoted(of: &str) -> Option<&str> {
    of.strip_prefix('\'')?.strip_suffix('\'')
}

/// The parts of a type between `|` that stand in no brackets.
fn alternatives(of: &'static str) -> Vec<&'static str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, c) in of.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            '|' if depth == 0 => {
                parts.push(&of[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&of[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    /// Each command has a record of its name, all names that types use are defined, and all that is defined is used.
    #[test]
    fn every_command_has_a_schema() {
        let (records, mut defined) = (records(), Map::new());
        let all = command();
        let roots = all.get_subcommands().map(clap::Command::get_name).chain(["error"]);
        roots.for_each(|root| define(root, &records, &mut defined));
        for (name, record) in &records {
            let is_part = records.values().any(|r| matches!(r, Record::Keys { of, .. } if of.contains(name)));
            assert!(defined.contains_key(*name) || is_part, "nothing uses {name}");
            if let Record::Keys { .. } = record {
                let mut keys: Vec<_> = keys(name, &records).iter().map(|(key, _)| key.trim_end_matches('?')).collect();
                keys.sort_unstable();
                assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{name} has a key twice: {keys:?}");
            }
        }
    }

    #[test]
    fn types_become_schemas() {
        let mut used = Vec::new();
        let found = schema("[a|{int}]|null", &mut used);
        let list = json!({"type": "array", "items": {"anyOf": [
            {"$ref": "#/$defs/a"}, {"type": "object", "additionalProperties": {"type": "integer"}}]}});
        assert_eq!(found, json!({"anyOf": [list, {"type": "null"}]}));
        assert_eq!((schema("'x'|'y'", &mut used), used), (json!({"enum": ["x", "y"]}), vec!["a"]));
    }
}
