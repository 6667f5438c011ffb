//! `inspect`: what is in a model's file, with nothing bound and nothing planned.

use super::{line, open};
use crate::decoder::Files;
use crate::error::Result;
use crate::figures::{count, grouped, listed};
use crate::onnx::{self, Configuration, Declared, Initializer, Inspected, Role};
use crate::report::{Table, human};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
inspect
  file text
  graph text
  producer text
  ir_version int
  opsets [[text|int]]
  inputs [declared]
  defaults [declared]
  outputs [declared]
  open_dims [text]
  loops [text]
  operators [operator]
  weights int
  weight_bytes int
  parameters int
  files [data_file]
  training bool
  initializers? [initializer]
  folded_norms? text
  configurations? [configuration]
declared
  name text
  dtype text
  shape text
operator
  name text
  nodes int
  lacks text|null
  counts bool
  first text
initializer
  name text
  dtype text
  shape [int]
  elements int
  bytes int
  role 'parameter'|'statistic'|'buffer'|'doubtful'|null
configuration
  name text
  devices int
  tensors int
  stages int
data_file
  path text
  bytes int
  is_there bool
";

/// Says what operators do that find as many as a run decides.
const COUNTS: &str =
    "if a run gives its input, the plan has room for the most, and NAME.count says how many were found";

#[derive(Args)]
pub(super) struct Inspect {
    /// The graph: an .onnx or .onnxtxt file, or the folder of a decoder, which has one.
    model: PathBuf,
    /// List the initializers: their names, shapes and bytes, and what each is to a training.
    #[arg(long)]
    weights: bool,
}

impl Inspect {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let is_folder = Files::are_in(&self.model);
        let file = if is_folder { Files::read(&self.model)?.path() } else { self.model.clone() };
        let found = onnx::load(&file)
            .map_err(|e| open::not_a_model(&file, e))?
            .inspect(self.weights)
            .map_err(|e| e.in_file(&file))?;
        if json {
            let mut value = json!(found);
            value["file"] = json!(file);
            return Ok(line(&value));
        }
        let Inspected { graph, producer, ir_version, opsets, inputs, outputs, .. } = &found;
        let opsets: Vec<_> = opsets.iter().map(|(domain, version)| format!("{domain} {version}")).collect();
        let producer = if producer.is_empty() { "unknown" } else { producer };
        let mut text = format!("{} ({graph})\n\n", file.display());
        text += &format!("producer  {producer}\nopset     {}\nIR        {ir_version}\n", opsets.join(", "));
        for (kind, values) in [("input", inputs), ("output", outputs)] {
            let mut table = Table::new("<<<");
            table.row([kind, "type", "shape"]);
            for value in values {
                table.row([value.name.clone(), value.dtype.clone(), value.shape.clone()]);
            }
            text += &format!("\n{table}");
        }
        if !found.defaults.is_empty() {
            let one = |input: &Declared| format!("{} {}{}", input.name, input.dtype, input.shape);
            text += &format!("\ndefaults   {}\n", listed(found.defaults.iter().map(one)));
            text += "           inputs that have a value in the file, which --input NAME=VALUE replaces\n";
        }
        if found.open_dims.is_empty() {
            text += "\nopen dims  none; --shape INPUT=NxN sets sizes that the file fixes, where its nodes allow it\n";
        } else {
            let flags: Vec<_> = found.open_dims.iter().map(|dim| format!("--set '{dim}'=N")).collect();
            text += &format!("\nopen dims  {}\n", flags.join(" "));
        }
        if !found.loops.is_empty() {
            let flags: Vec<_> = found.loops.iter().map(|dim| format!("--set '{dim}'=N")).collect();
            text += &format!("loops      {}, needed if a run decides how often the loop runs\n", flags.join(" "));
        }
        let mut table = Table::new("<><");
        table.row(["operator", "nodes", ""]);
        for operator in &found.operators {
            let counts = if operator.counts { COUNTS } else { "" };
            let note = operator.lacks.as_deref().unwrap_or(counts);
            table.row([&operator.name[..], &operator.nodes.to_string(), note]);
        }
        text += &format!("\n{table}");
        let lacking = found.operators.iter().filter(|operator| operator.lacks.is_some()).count();
        if lacking > 0 {
            text += &format!("\nnot supported: {lacking} of {}\n", count(found.operators.len() as u64, "operator"));
        }
        let (tensors, bytes) = (count(found.weights as u64, "tensor"), human(found.weight_bytes));
        let parameters = match found.parameters {
            0 => String::new(),
            number => format!(", {} parameters", grouped(number)),
        };
        text += &format!("\nweights   {tensors}, {bytes}{parameters}\n");
        if let Some(initializers) = &found.initializers {
            text += &format!("\n{}\n", weights(initializers));
        }
        for file in &found.files {
            let there = if file.is_there { "" } else { ", which is not there: the model can be planned, not run" };
            text += &format!("data in   {} ({}){there}\n", file.path.display(), human(file.bytes));
        }
        if found.training {
            text += "training  the file has a training step, which --training runs\n";
        }
        for Configuration { name, devices, tensors, stages } in &found.configurations {
            let tensors = count(*tensors as u64, "tensor");
            let stages = if *stages > 1 { format!(", {stages} stages") } else { String::new() };
            text += &format!("sharding  '{name}': {devices} devices, {tensors} split{stages}; --mesh reads it\n");
        }
        if let Some(folded) = &found.folded_norms {
            text += &format!("norms     {folded}\n");
        }
        Ok(text)
    }
}

/// A table of initializers.
fn weights(initializers: &[Initializer]) -> String {
    let mut table = Table::new("<<<>><");
    table.row(["initializer", "type", "shape", "elements", "bytes", ""]);
    for initializer in initializers {
        let Initializer { name, dtype, shape, elements, bytes, role } = initializer;
        let shape = format!("[{}]", shape.iter().map(i64::to_string).collect::<Vec<_>>().join(", "));
        let role = role.map_or("", Role::word);
        table.row([&name[..], dtype, &shape, &grouped(*elements), &human(*bytes), role]);
    }
    table.to_string()
}
