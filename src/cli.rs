//! The command line: one file per command. stdout is the result, stderr the log.

use crate::backend::launched::launched;
use crate::error::{Error, Result};
use crate::report;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

mod across;
mod args;
mod bench;
mod compare;
mod devices;
mod diff;
mod emit;
mod expect;
mod fit;
mod github;
mod help;
mod inspect;
mod max_batch;
mod method;
mod modules;
mod open;
mod ops;
mod place;
mod plan;
mod programs;
mod ranks;
mod run;
mod schema;
mod stop;
mod subject;
mod support;
mod text;
mod train;
mod tune;
mod web;

const AFTER_HELP: &str = "A first look:
  plimsoll inspect MODEL                                 what is in it: inputs, open dims, operators, weights
  plimsoll plan MODEL                                    how much memory it takes, without a device
  plimsoll plan MODEL --batch 8 --memory-limit 2GiB      whether it fits, and what would help
  plimsoll run MODEL --batch 8                           run it on random inputs
  plimsoll bench MODEL --batch 8                         time its runs
  plimsoll tune MODEL --set batch=8                      find its fastest algorithms on this device

Exit codes: 0 ok, 1 bad input or usage, 2 does not fit the limit, 3 results differ, 4 backend unavailable,
130 a training that Ctrl-C stopped.
The log goes to stderr; -v shows passes and placements (not of `plan`), -q errors alone.";

/// Flags that every command has come after its own.
const LAST: usize = 100;

/// Plans the memory of a neural network before it runs, and runs it in exactly the bytes that were planned.
///
/// MODEL is an ONNX file: .onnx (protobuf) or .onnxtxt (ONNX text syntax).
#[derive(Parser)]
#[command(name = "plimsoll", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Format of the result.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, display_order = LAST)]
    format: Format,
    /// The same as --format json.
    #[arg(long, global = true, display_order = LAST)]
    json: bool,
    /// Log errors alone.
    #[arg(short, long, global = true, display_order = LAST, conflicts_with = "verbose")]
    quiet: bool,
    /// Of `plan`: list what a plan was made of, with its choices. Of other commands: log passes and placements. RUST_LOG selects more finely.
    #[arg(short, long, global = true, display_order = LAST)]
    verbose: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    Text,
    Json,
    /// Text, and annotations of GitHub's workflows for errors and for `diff`.
    Github,
}

#[derive(Subcommand)]
enum Command {
    /// Show what is in a model's file: inputs, outputs, open dims, operators and weights, with nothing bound.
    Inspect(inspect::Inspect),
    /// Run a graph, once or several times in a row, and show its outputs, its states and its memory.
    Run(run::Run),
    /// Plan a graph's memory, with no device and no weights.
    Plan(plan::Plan),
    /// Place buffers with given live ranges: reads and writes minimalloc's CSV.
    Place(place::Place),
    /// Check that a plan file breaks no rule, from the plan alone.
    Check(plan::Check),
    /// Compare two plans: what grew, what moved, where the peak is now.
    Diff(diff::Diff),
    /// Find the largest extent of a dim that fits a limit, by planning alone.
    MaxBatch(max_batch::MaxBatch),
    /// Find the fewest cards on which a model fits, and the best ways to split it over more, by planning alone.
    Fit(fit::Fit),
    /// Run a graph with one allocation per tensor and as planned: compares memory, time and results.
    Compare(compare::Compare),
    /// Time a graph's runs.
    Bench(bench::Bench),
    /// Time the algorithms of a graph's kernels on a device, and keep the fastest for `run` and `bench`.
    Tune(tune::Tune),
    /// Train the weights of a model on rows of data.
    Train(Box<train::Train>),
    /// Print a graph as ONNX, as text or in Graphviz's language, or its kernels as WGSL or CUDA C++.
    Emit(emit::Emit),
    /// List the devices of this machine, the CUDA libraries that were found, and what drivers take beside plans.
    Devices(devices::Devices),
    /// Write a page that plans and runs models in a browser, as one file without network.
    Web(web::Web),
    /// List the operators, and the element types that each device takes.
    Ops,
    /// Print the completions of a shell, for its folder of completions.
    Completions(help::Completions),
    /// Print a manual page: of the program, or of a command.
    Man(help::Man),
    /// Print a JSON schema of what --json prints: of a command and of its errors, or of all.
    Schema(schema::Schema),
}

/// The command line, with its help.
fn command() -> clap::Command {
    let trains = std::env::args_os().any(|argument| argument == "--train");
    help::dressed(Cli::command(), trains)
}

/// True if arguments that were not understood ask for JSON.
fn asks_for_json(arguments: impl Iterator<Item = String>) -> bool {
    let arguments: Vec<String> = arguments.take_while(|argument| argument != "--").collect();
    let is_json = |pair: &[String]| pair[0] == "--format" && pair[1] == "json";
    let flag = |argument: &String| ["--json", "--format=json"].contains(&&argument[..]);
    arguments.iter().any(flag) || arguments.windows(2).any(is_json)
}

/// The names of the commands.
fn commands() -> Vec<String> {
    command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
}

/// The arguments of this process. An error leaves out a tip of the parser's that is wrong for flags, and says which flags are a training's.
fn parsed(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let matches = command().try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    matches.map_err(|mut error| {
        let lacks = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
        if error.kind() == ErrorKind::MissingRequiredArgument && lacks.contains("--train") {
            let tip = "these flags are of a training, which --train asks for";
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        // The parser's line has neither of two flags that exclude each other.
        let excluded = [ContextKind::InvalidArg, ContextKind::PriorArg];
        let names_across =
            |kind: &ContextKind| error.get(*kind).is_some_and(|flag| flag.to_string().contains("--across"));
        if error.kind() == ErrorKind::ArgumentConflict && excluded.iter().any(names_across) {
            let usage = "Usage: plimsoll compare --across <A,B> [OPTIONS] <MODEL>";
            error.insert(ContextKind::Usage, ContextValue::StyledStr(usage.into()));
        }
        if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
            tips.retain(|tip| !tip.to_string().contains("as a value"));
            if !tips.is_empty() {
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
            }
        }
        error
    })
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    ExitCode::from(run_with(std::env::args_os().collect()))
}

/// Runs the command with these arguments, of which the first is its name. Returns the exit code.
pub fn run_with(arguments: Vec<OsString>) -> u8 {
    let mut cli = match parsed(&arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is no error.
            let _ = error.print();
            if error.use_stderr()
                && asks_for_json(arguments.iter().map(|argument| argument.to_string_lossy().into_owned()))
            {
                let text = error.render().to_string();
                let text = text.trim_end().strip_prefix("error: ").unwrap_or(&text);
                _ = print(&line(&json!({"error": text, "exit_code": 1})));
            }
            return u8::from(error.use_stderr());
        }
    };
    let asked = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty()).and_then(|text| text.parse().ok());
    // -v of `plan` lists more in its report, which passes and placements in the log would hide.
    let is_plan = matches!(cli.command, Command::Plan(_));
    // Ranks leave their launcher in order: what has joined is dropped before this ends.
    let several = match &mut cli.command {
        Command::Run(c) => Some(&mut c.model.several),
        Command::Bench(c) => Some(&mut c.model.several),
        Command::Train(c) => Some(&mut c.several),
        Command::Devices(c) => c.several(),
        _ => None,
    };
    // The first rank tells what all do.
    let is_meshed = several.as_ref().is_some_and(|several| several.mesh.is_some());
    let is_other = is_meshed && launched().ok().flatten().is_some_and(|launched| launched.rank > 0);
    let level = match (cli.quiet || is_other, cli.verbose) {
        (true, _) => Level::ERROR,
        (_, true) if !is_plan => Level::DEBUG,
        _ => Level::INFO,
    };
    let levels = Targets::new().with_default(Level::ERROR).with_target("plimsoll", level);
    // A program of another language may have run it before: the first log stays.
    let _ = tracing_subscriber::fmt()
        .with_max_level(Level::TRACE)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .finish()
        .with(asked.unwrap_or(levels))
        .try_init();
    let json = cli.json || cli.format == Format::Json;
    let github = !json && cli.format == Format::Github;
    let mut code = 0;
    let joined = several.map_or(Ok(true), |several| several.join().map(|()| several.is_first()));
    let is_first = match joined {
        Ok(is_first) => is_first,
        Err(error) => {
            // A rank that misses the first cannot leave it to that one.
            let misses = matches!(&error, Error::Backend { backend: "ranks", .. });
            if misses || launched().ok().flatten().is_none_or(|launched| launched.rank == 0) {
                tell(&error);
            }
            return error.exit_code();
        }
    };
    let result = match &cli.command {
        Command::Inspect(c) => c.run(json).map_err(Failure::from),
        Command::Run(c) => c.run(json),
        Command::Plan(c) => c.run(json, cli.verbose),
        Command::Place(c) => c.run(json),
        Command::Check(c) => c.run(json).map_err(Failure::from),
        Command::Diff(c) => c.run(json, github).map_err(Failure::from),
        Command::MaxBatch(c) => c.run(json),
        Command::Fit(c) => c.run(json),
        Command::Compare(c) => c.run(json),
        Command::Bench(c) => c.run(json),
        Command::Tune(c) => c.run(json),
        Command::Train(c) => c.run(json).map(|(text, stopped)| {
            code = stopped;
            text
        }),
        Command::Emit(c) => c.run(json).map_err(Failure::from),
        Command::Devices(c) => c.run(json).map_err(Failure::from),
        Command::Web(c) => c.run(json).map_err(Failure::from),
        Command::Ops => ops::run(json).map_err(Failure::from),
        Command::Completions(c) => c.run(command(), json).map_err(Failure::from),
        Command::Man(c) => c.run(command(), json).map_err(Failure::from),
        Command::Schema(c) => c.run(&commands(), json).map_err(Failure::from),
    };
    let told = |text: String| if is_first { print(&text).map_err(Failure::from) } else { Ok(()) };
    match result.and_then(told) {
        Ok(()) => code,
        // All ranks find the same, and the first tells it.
        Err(Failure { error: error @ (Error::Usage { .. } | Error::Fit { .. }), .. }) if !is_first => error.exit_code(),
        Err(Failure { error, detail }) => {
            // If stdout does not take it, the error is still told.
            match detail.as_deref() {
                Some(Detail::Record(record)) => _ = print(&line(record)),
                detail if github => {
                    let text = if let Some(Detail::Text(text)) = detail { text } else { "" };
                    _ = print(&github::of_error(&error, &explain(&error), text));
                }
                _ if json => _ = print(&line(&json!({"error": explain(&error), "exit_code": error.exit_code()}))),
                _ => {}
            }
            tell(&error);
            if let Some(Detail::Text(text)) = detail.as_deref() {
                let _ = write!(std::io::stderr(), "\n{}", report::plain(text));
            }
            error.exit_code()
        }
    }
}

/// An error and its explanation. A plan that does not fit is an answer, too, with a record.
struct Failure {
    error: Error,
    detail: Option<Box<Detail>>,
}

enum Detail {
    /// For stdout.
    Record(Value),
    /// For stderr, after the error.
    Text(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error, detail: None }
    }
}

impl Failure {
    /// An error with the record of an answer.
    fn with(error: Error, record: Value) -> Failure {
        Failure { error, detail: Some(Box::new(Detail::Record(record))) }
    }

    /// An error with its explanation, in the form that is asked for.
    fn explained(error: Error, json: bool, mut record: Value, text: String) -> Failure {
        record["error"] = explain(&error).into();
        record["exit_code"] = error.exit_code().into();
        let detail = if json { Detail::Record(record) } else { Detail::Text(text) };
        Failure { error, detail: Some(Box::new(detail)) }
    }
}

/// Writes an error. The exit code tells of it, too, if stderr is closed.
fn tell(error: &Error) {
    let _ = writeln!(std::io::stderr(), "error: {}", report::plain(&explain(error)));
}

/// An error's text, with the flags that would mend it.
fn explain(error: &Error) -> String {
    let Error::Unbound { dims, .. } = error else { return error.to_string() };
    format!("{error}; give {}", open::flags(dims))
}

/// Writes the result. A reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(report::plain(text).as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::usage(format!("cannot write to stdout: {e}")))
        }
        _ => Ok(()),
    }
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}
