//! plimsoll for C and C++: plans the memory of an ONNX model, and runs the model in exactly the bytes that were planned.
//!
//! What can fail returns a code, PLIMSOLL_OK or one of those below, and takes a `plimsoll_error **`, which may be NULL. It is set to NULL where
//! all is well, and otherwise to an error for plimsoll_error_free; what it held before is overwritten. A result is then NULL, too.
//!
//! Options are JSON, with the names of the command's flags: {"device": "cpu", "batch": 8, "memory_limit": "64MiB"}. NULL and "" are no options.
//! Texts are UTF-8 and end in a zero byte. A `const char *` that is returned belongs to the handle that it came from, and is there until that is
//! closed. A `char *` is the caller's, for plimsoll_text_free. All sizes are in bytes.
//!
//! Any thread may use any handle, and several at once may use the same one: sessions and trainers do one thing at a time. A handle is closed
//! once, when no thread uses it; NULL is closed without a word. Handles do not need each other: a model may be closed before its sessions.
//! A pointer that is NULL where it must not be is an error. One that points to fewer bytes than were said is the caller's fault.
//!
//! This file is written by a test from the Rust source: BLESS=1 cargo test --test it ffi::

#![allow(non_camel_case_types)]

mod given;
mod run;

use crate::error::{Error, Result, ensure};
use crate::fit::Cluster;
use crate::model::{Model, Source};
use crate::place::{self, Effort};
use crate::plan::{self, Plan};
use crate::session::Options;
use crate::settings;
use crate::target::Target;
use crate::train::Training;
use given::{List, Text, doors, handle, text};
use run::{plimsoll_named, tensors};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::ffi::{CString, c_char, c_int};
use std::path::Path;

// ---- The library

/// The version of this interface. It changes when a program that was compiled with another one might not work.
pub const PLIMSOLL_ABI_VERSION: u32 = 1;

/// All is well.
pub const PLIMSOLL_OK: c_int = 0;
/// A file cannot be read or written, or has other content than expected.
pub const PLIMSOLL_FILE: c_int = 1;
/// A text does not follow its syntax. Fields: line, column.
pub const PLIMSOLL_SYNTAX: c_int = 2;
/// A node of a graph breaks a rule of its operator. Fields: node, op.
pub const PLIMSOLL_NODE: c_int = 3;
/// A graph as a whole is malformed.
pub const PLIMSOLL_GRAPH: c_int = 4;
/// Named dims of a graph have no extent. Field: dims.
pub const PLIMSOLL_UNBOUND: c_int = 5;
/// An input or an option does not suit the graph or the device, or an argument is none.
pub const PLIMSOLL_USAGE: c_int = 6;
/// More bytes are needed than the limit allows or the device has. Fields: needed, limit.
pub const PLIMSOLL_FIT: c_int = 7;
/// The host does not have enough memory. Field: needed.
pub const PLIMSOLL_MEMORY: c_int = 8;
/// A plan breaks a rule that every plan must keep.
pub const PLIMSOLL_PLAN: c_int = 9;
/// Two results that should agree differ.
pub const PLIMSOLL_DIFFER: c_int = 10;
/// A device is absent, is lost, or refused a request. Field: backend.
pub const PLIMSOLL_BACKEND: c_int = 11;
/// plimsoll has a bug: the text says where.
pub const PLIMSOLL_BUG: c_int = 12;

/// The codes of the kinds of errors.
const KINDS: [(&str, c_int); 11] = [
    ("file", PLIMSOLL_FILE),
    ("syntax", PLIMSOLL_SYNTAX),
    ("node", PLIMSOLL_NODE),
    ("graph", PLIMSOLL_GRAPH),
    ("unbound", PLIMSOLL_UNBOUND),
    ("usage", PLIMSOLL_USAGE),
    ("fit", PLIMSOLL_FIT),
    ("memory", PLIMSOLL_MEMORY),
    ("plan", PLIMSOLL_PLAN),
    ("differ", PLIMSOLL_DIFFER),
    ("backend", PLIMSOLL_BACKEND),
];

/// The version of the library, such as 0.1.0. It lasts as long as the program.
#[unsafe(no_mangle)]
pub extern "C" fn plimsoll_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The version of the interface that the library has.
#[unsafe(no_mangle)]
pub extern "C" fn plimsoll_abi_version() -> u32 {
    PLIMSOLL_ABI_VERSION
}

doors! {
    /// Refuses a program that was compiled for another version of the interface: plimsoll_init(PLIMSOLL_ABI_VERSION, &error). Nothing else needs it.
    fn plimsoll_init(abi_version: u32) {
        ensure(abi_version == PLIMSOLL_ABI_VERSION, || {
            let (given, own) = (abi_version, PLIMSOLL_ABI_VERSION);
            Error::usage(format!(
                "the program was compiled for version {given} of plimsoll's interface, and this library has {own}"
            ))
        })
    }
}

/// Frees a text that is the caller's.
#[unsafe(no_mangle)]
pub extern "C" fn plimsoll_text_free(text: *mut c_char) {
    given::free_text(text);
}

// ---- Errors

/// What went wrong.
pub struct plimsoll_error {
    code: c_int,
    exit_code: c_int,
    text: CString,
    fields: CString,
}

impl plimsoll_error {
    fn new(error: &Error) -> plimsoll_error {
        let (kind, mut fields) = error.fields();
        fields["path"] = json!(error.path());
        let code = KINDS.iter().find(|(known, _)| *known == kind).map_or(PLIMSOLL_BUG, |(_, code)| *code);
        let exit_code = error.exit_code().into();
        plimsoll_error { code, exit_code, text: text(error.to_string()), fields: text(fields.to_string()) }
    }

    fn bug(what: String) -> plimsoll_error {
        plimsoll_error { code: PLIMSOLL_BUG, exit_code: 101, text: text(what), fields: text("{}".to_owned()) }
    }
}

doors! {
    /// The code that the function returned; PLIMSOLL_OK of NULL.
    fn plimsoll_error_code(error: &plimsoll_error) -> c_int { error.code }

    /// The exit code of a program that ends with it, as the command's: 1 bad input or usage, 2 does not fit, 3 results differ, 4 no such device.
    fn plimsoll_error_exit_code(error: &plimsoll_error) -> c_int { error.exit_code }

    /// What went wrong, where, and what was expected: the words of the command.
    fn plimsoll_error_text(error: &plimsoll_error) -> *const c_char { error.text.as_ptr() }

    /// Its facts as an object of JSON: those that the code names, and path, the file that it is about, or null.
    fn plimsoll_error_fields(error: &plimsoll_error) -> *const c_char { error.fields.as_ptr() }

    /// Frees an error.
    fn plimsoll_error_free(error: Box<plimsoll_error>);
}

// ---- Models

/// A model's file as options shape it, before it runs.
pub struct plimsoll_model {
    model: Model,
    name: CString,
}

impl plimsoll_model {
    fn new(model: Model) -> plimsoll_model {
        plimsoll_model { name: text(model.name().to_owned()), model }
    }
}

fn options(json: &Text) -> Result<Options> {
    settings::options(json.or_empty("the options")?)
}

/// The target of this name; by default the CPU.
fn target(name: &Text) -> Result<Target> {
    Target::named(name.or("the target", "cpu")?)
}

/// The method of a training of so many steps.
fn method(json: &Text, steps: u64) -> Result<Training> {
    settings::training(json.text("the method")?, steps)
}

doors! {
    /// Reads a model's file, .onnx or .onnxtxt. Weights stay in the file until a session is opened.
    fn plimsoll_model_open(path: Text, options: Text) -> model: plimsoll_model {
        let options = self::options(&options)?;
        Ok(plimsoll_model::new(Model::from_path(path.text("the path")?, &options)?))
    }

    /// Reads the bytes of a model's file, which are copied. Data that it refers to lie in the current folder.
    fn plimsoll_model_open_bytes(data: List<u8>, bytes: usize, options: Text) -> model: plimsoll_model {
        let options = self::options(&options)?;
        Ok(plimsoll_model::new(Model::from_bytes(data.of(bytes, "the data")?.to_vec(), &options)?))
    }

    /// Closes a model.
    fn plimsoll_model_close(model: Box<plimsoll_model>);

    /// The graph's name.
    fn plimsoll_model_name(model: &plimsoll_model) -> *const c_char { model.name.as_ptr() }

    /// The named dims, with the extents that they are planned for, and those that no option binds, which are 1:
    /// {"dims": {"batch": "8"}, "assumed": []}.
    fn plimsoll_model_dims(model: &plimsoll_model) -> json: String {
        let model = &model.model;
        let dims: Map<String, Value> =
            model.dims().iter().map(|(name, extent)| (name.clone(), extent.to_string().into())).collect();
        Ok(json!({"dims": dims, "assumed": model.assumed()}).to_string())
    }

    /// Plans the model for a target, with no device and no weights: cpu, cuda, wgpu, wgpu-desktop, or a file as `plimsoll devices` writes it. If
    /// the target is NULL, it opens the device of the options and plans as plimsoll_session_open does. PLIMSOLL_FIT when it does not fit the
    /// options' limit.
    fn plimsoll_model_plan(model: &plimsoll_model, target: Text) -> plan: plimsoll_plan {
        let model = &model.model;
        let plan = match target.optional("the target")? {
            Some(target) => model.plan(&Target::named(target)?)?,
            None => model.plan_here()?,
        };
        Ok(plimsoll_plan { plan, source: model.source() })
    }

    /// What is live at the peak of a plan for a target (NULL: cpu), and what would make it smaller by how much, as JSON.
    fn plimsoll_model_advise(model: &plimsoll_model, target: Text) -> json: String {
        Ok(json!(model.model.advise(&self::target(&target)?)?).to_string())
    }

    /// The largest extent of a dim with which the plan for a target (NULL: cpu) fits the options' memory_limit, as JSON: dim, fits, next, plans.
    /// If the dim is NULL, it is the one that no option binds, or the one that leads the inputs.
    fn plimsoll_model_max_batch(model: &plimsoll_model, target: Text, dim: Text) -> json: String {
        let found = model.model.max_batch(&self::target(&target)?, dim.optional("the dim")?)?;
        Ok(json!(found).to_string())
    }

    /// The fewest cards of the options' memory_limit on which it fits, from `least` to `most` of them, and the best meshes, as JSON. The links
    /// between cards are {"gb_per_second": 50, "latency_us": 20}; NULL: those of NVLink.
    fn plimsoll_model_fit(
        model: &plimsoll_model,
        target: Text,
        least: usize,
        most: usize,
        links: Text,
    ) -> json: String {
        let links = links.optional("the links")?.map_or(Ok(Cluster::default()), Cluster::parse)?;
        let found = model.model.fit(&Target::named(target.or("the target", "cuda")?)?, least..=most, links)?;
        Ok(json!(found).to_string())
    }

    /// Runs the model as others do, buffer by buffer with and without a pool, and as it is planned, on the options' device. Inputs that are not
    /// given are random. So many runs are timed. The bytes, times and differences of each way are JSON.
    fn plimsoll_model_compare(
        model: &plimsoll_model,
        inputs: List<plimsoll_named>,
        count: usize,
        runs: usize,
    ) -> json: String {
        Ok(json!(model.model.compare(&tensors(inputs.of(count, "the inputs")?)?, runs)?).to_string())
    }

    /// Plans the training of a model on batches of so many rows, by a method: see plimsoll_trainer_open.
    fn plimsoll_model_plan_training(
        model: &plimsoll_model,
        target: Text,
        batch: usize,
        method: Text,
    ) -> plan: plimsoll_plan {
        let method = self::method(&method, 1)?;
        Ok(plimsoll_plan::new(model.model.plan_training(&self::target(&target)?, batch, &method)?))
    }

    /// What would make a training smaller, as plimsoll_model_advise tells of a run.
    fn plimsoll_model_advise_training(
        model: &plimsoll_model,
        target: Text,
        batch: usize,
        method: Text,
    ) -> json: String {
        let advice = model.model.advise_training(&self::target(&target)?, batch, &self::method(&method, 1)?)?;
        Ok(json!(advice).to_string())
    }

    /// The largest batch with which a training fits the options' memory_limit, as JSON: dim, fits, next, plans.
    fn plimsoll_model_max_batch_of_training(model: &plimsoll_model, target: Text, method: Text) -> json: String {
        let found = model.model.max_batch_of_training(&self::target(&target)?, &self::method(&method, 1)?)?;
        Ok(json!(found).to_string())
    }
}

// ---- Plans

/// A plan: what lies where, and when.
pub struct plimsoll_plan {
    plan: Plan,
    source: Option<Source>,
}

impl plimsoll_plan {
    /// A plan whose file names no model.
    fn new(plan: Plan) -> plimsoll_plan {
        plimsoll_plan { plan, source: None }
    }

    /// The plan as its file has it.
    fn named(&self) -> Result<Cow<'_, Plan>> {
        Source::name(self.source.as_ref(), &self.plan)
    }
}

doors! {
    /// Reads a plan's file, and checks it.
    fn plimsoll_plan_load(path: Text) -> plan: plimsoll_plan {
        Ok(plimsoll_plan::new(Plan::load(Path::new(path.text("the path")?))?))
    }

    /// Reads a plan's text, and checks it.
    fn plimsoll_plan_parse(json: Text) -> plan: plimsoll_plan {
        Ok(plimsoll_plan::new(Plan::from_json(json.text("the plan")?, Path::new("(memory)"))?))
    }

    /// Writes a plan's file. A reader sees the old one or the complete new one.
    fn plimsoll_plan_save(plan: &plimsoll_plan, path: Text) {
        plan.named()?.save(Path::new(path.text("the path")?))
    }

    /// Closes a plan.
    fn plimsoll_plan_close(plan: Box<plimsoll_plan>);

    /// The bytes that it takes, all runs at once together; 0 of NULL.
    fn plimsoll_plan_bytes(plan: &plimsoll_plan) -> u64 { plan.plan.bytes() }

    /// The bytes that plimsoll_session_open_in needs of memory that begins anywhere; 0 of NULL. Tables and stacks, which the processor's kernels
    /// and the system take, are counted by plimsoll_plan_bytes and lie elsewhere.
    fn plimsoll_plan_lent_bytes(plan: &plimsoll_plan) -> u64 { plan.plan.lent_bytes() }

    /// Its bytes by class and at the peak, as JSON: bytes, lent_bytes, run_bytes, runs, classes, peak.
    fn plimsoll_plan_memory(plan: &plimsoll_plan) -> json: String {
        let plan = &plan.plan;
        let record = json!({
            "bytes": plan.bytes(),
            "lent_bytes": plan.lent_bytes(),
            "run_bytes": plan.run_bytes(),
            "runs": plan.runs,
            "classes": plan.classes(),
            "peak": plan::tell::peak::peak(plan.first(), None),
        });
        Ok(record.to_string())
    }

    /// The plan as its file has it.
    fn plimsoll_plan_json(plan: &plimsoll_plan) -> json: String {
        Ok(plan.named()?.to_json())
    }

    /// The plan in words, as the command prints it.
    fn plimsoll_plan_table(plan: &plimsoll_plan) -> table: String {
        Ok(plan.plan.to_string())
    }

    /// Checks that a plan breaks no rule, from the plan alone: PLIMSOLL_PLAN names the rule.
    fn plimsoll_plan_check(plan: &plimsoll_plan) {
        plan::check::check(&plan.plan)
    }

    /// What grew, what moved, and where the peak is now, of the first program of each plan, as JSON.
    fn plimsoll_plan_diff(before: Option<&plimsoll_plan>, after: Option<&plimsoll_plan>) -> json: String {
        let (before, after) = (handle(before, "a plan")?, handle(after, "a plan")?);
        Ok(json!(plan::tell::diff::diff(before.plan.first(), after.plan.first())).to_string())
    }

    /// Places buffers whose live ranges are given, as CSV with the columns id, lower, upper, size and perhaps alignment. Offsets are multiples of
    /// `align`, a power of two. It ends after so many steps of one or two nanoseconds; 0: 2 000 000 000. The result is JSON: peak, lower_bound,
    /// optimal, and csv, the table with a column of offsets.
    fn plimsoll_place(csv: Text, align: u64, steps: u64) -> json: String {
        let path = Path::new("(memory)");
        let table = place::Table::parse(path, csv.text("the buffers")?, align)?;
        let steps = if steps == 0 { 2_000_000_000 } else { steps };
        let solution = place::place(&table.problem, Effort::Steps(steps));
        let bound = plan::check::placement(&table.problem, &solution).map_err(|e| e.in_file(path))?;
        let optimal = solution.peak == bound || solution.is_optimal();
        let csv = table.to_csv(&solution);
        Ok(json!({"peak": solution.peak, "lower_bound": bound, "optimal": optimal, "csv": csv}).to_string())
    }
}
