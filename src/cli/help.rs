//! The groups of flags in `--help`, and its examples. Also manual pages and completions, which are made of the same.

use super::line;
use crate::error::{Error, Result};
use clap::{Arg, Args, Command, builder::StyledStr};
use clap_complete::Shell;
use serde_json::json;

/// Groups of flags, by the names of their fields. All others are under "Options".
const GROUPS: &[(&str, &[&str])] = &[
    ("The model", &["of", "weights", "set", "batch", "context", "shapes", "state", "training", "outputs"]),
    ("Inputs", &["inputs", "seed"]),
    (
        "Memory",
        &[
            "memory_limit",
            "offload",
            "prefer",
            "chunks",
            "f16",
            "quantize",
            "cache",
            "no_fuse",
            "forks",
            "assert_bytes",
            "advise",
        ],
    ),
    ("The device", &["backend", "device", "target", "threads", "no_libraries", "allow_tf32", "no_tuned", "tuned"]),
    ("Several devices", &["mesh", "shards", "states", "ranks"]),
    (
        TRAINED,
        &[
            "train",
            "curve",
            "loss",
            "label_smoothing",
            "optimizer",
            "momentum",
            "nesterov",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "decay_dims",
            "lr",
            "schedule",
            "warmup",
            "accumulate",
            "clip_norm",
            "ema",
            "sync_norm",
            "precision",
            "freeze",
            "train_only",
            "class_axis",
            "init",
        ],
    ),
    ("Results", &["save", "placement", "html", "svg", "wasm"]),
    ("Output", &["format", "json", "quiet", "verbose"]),
];

/// The group of the flags of a training.
const TRAINED: &str = "How it is trained";

/// The flags of the first day, which `-h` lists, of each command that has many. With --train, it lists those of a training, too.
const FIRST: &[(&str, &[&str])] = &[
    ("run", &["set", "batch", "inputs", "memory_limit", "backend", "iters", "expect", "output_dir"]),
    ("plan", &["set", "batch", "memory_limit", "advise", "target", "backend", "train", "save", "html"]),
    ("fit", &["set", "batch", "cards", "memory_limit", "target", "train"]),
    ("max-batch", &["set", "dim", "memory_limit", "target", "train"]),
    ("compare", &["set", "batch", "inputs", "memory_limit", "backend", "iters", "across", "train", "html"]),
    ("bench", &["set", "batch", "memory_limit", "backend", "iters", "duration", "steps", "train"]),
    ("tune", &["set", "batch", "memory_limit", "backend", "seconds", "save"]),
    (
        "train",
        &[
            "data",
            "labels",
            "valid",
            "valid_labels",
            "loss",
            "lr",
            "optimizer",
            "batch",
            "epochs",
            "steps",
            "memory_limit",
            "output",
            "checkpoint",
            "resume",
            "html",
        ],
    ),
    ("emit", &["set", "save", "target", "train"]),
];

/// Three examples or more of each command that takes a file.
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "inspect",
        &["plimsoll inspect model.onnx", "plimsoll inspect model.onnx --json", "plimsoll inspect graphs/mlp.onnxtxt"],
    ),
    (
        "run",
        &[
            "plimsoll run model.onnx --set batch=8",
            "plimsoll run model.onnx --inputs x.npz --expect y.npz --backend cpu",
            "plimsoll run model.onnx --input image=photo.npy --memory-limit 512MiB --output-dir results",
            "plimsoll run plan.json --model model.onnx",
        ],
    ),
    (
        "plan",
        &[
            "plimsoll plan model.onnx --set batch=8 --target cuda",
            "plimsoll plan model.onnx --set batch=1..64 --memory-limit 2GiB --html plan.html",
            "plimsoll plan --train model.onnx --loss cross_entropy --batch 256",
        ],
    ),
    (
        "place",
        &[
            "plimsoll place buffers.csv",
            "plimsoll place buffers.csv --capacity 256KiB -o placed.csv",
            "plimsoll place buffers.csv --deadline 10s",
        ],
    ),
    ("check", &["plimsoll check plan.json", "plimsoll check plan.json --json", "plimsoll check plan.json --quiet"]),
    (
        "diff",
        &[
            "plimsoll diff before.json after.json",
            "plimsoll diff before.json after.json --json",
            "plimsoll diff before.json after.json --format github",
        ],
    ),
    (
        "fit",
        &[
            "plimsoll fit model.onnx --memory-limit 80GiB --cards 1..16",
            "plimsoll fit --train model.onnx --loss cross_entropy --batch 64 --memory-limit 80GiB",
        ],
    ),
    (
        "max-batch",
        &[
            "plimsoll max-batch model.onnx --memory-limit 8GiB",
            "plimsoll max-batch model.onnx --dim batch --set sequence=128 --memory-limit 8GiB --target cuda",
            "plimsoll max-batch --train model.onnx --loss cross_entropy --memory-limit 8GiB",
        ],
    ),
    (
        "compare",
        &[
            "plimsoll compare model.onnx --set batch=8",
            "plimsoll compare model.onnx --set batch=8 --memory-limit 1GiB --html ways.html",
            "plimsoll compare --train model.onnx --loss mse --batch 32",
            "plimsoll compare model.onnx --set batch=8 --across cpu,wgpu",
        ],
    ),
    (
        "bench",
        &[
            "plimsoll bench model.onnx --set batch=8 --duration 10s",
            "plimsoll bench model.onnx --set batch=1..64 --at batch=1,64",
            "plimsoll bench model.onnx --set batch=8 --threads 1 --forks 2 --backend cpu",
        ],
    ),
    (
        "tune",
        &[
            "plimsoll tune model.onnx --set batch=8",
            "plimsoll tune model.onnx --set batch=8 --seconds 600 --more-memory",
            "plimsoll tune prefill.onnx decode.onnx --set batch=8 --again -o tuned.json",
        ],
    ),
    (
        "train",
        &[
            "plimsoll train model.onnx --data x.npy --labels y.npy --loss mse --lr 0.001 --batch 64 --steps 100",
            "plimsoll train model.onnx --data x.npy --labels y.npy --loss cross_entropy --lr 0.001 --batch 64 --epochs 10 \
             --valid valid-x.npy --valid-labels valid-y.npy --output trained.onnx",
            "plimsoll train model.onnx --data x.npz:x --labels x.npz:y --loss mse --lr 0.001 --batch 64 --epochs 10 \
             --checkpoint kept --resume",
        ],
    ),
    (
        "emit",
        &[
            "plimsoll emit model.onnx onnxtxt",
            "plimsoll emit prefill.onnx decode.onnx cuda --set batch=8",
            "plimsoll emit --train model.onnx onnx --loss mse --batch 8 -o step.onnx",
        ],
    ),
    (
        "devices",
        &[
            "plimsoll devices",
            "plimsoll devices cuda:0",
            "plimsoll devices --json",
            "mpirun -n 2 plimsoll devices --ranks 2",
        ],
    ),
    ("web", &["plimsoll web", "plimsoll web -o page.html --wasm target/plimsoll.wasm"]),
];

/// The command line with its flags in groups and its commands with examples. `-h` lists the flags of the first day; if it `trains`, those of a
/// training, too.
pub(super) fn dressed(command: Command, trains: bool) -> Command {
    command.mut_args(grouped).mut_subcommands(|command| {
        let name = command.get_name().to_owned();
        let Some((_, examples)) = EXAMPLES.iter().find(|(of, _)| *of == name) else { return command };
        let examples = format!("Examples:\n  {}", examples.join("\n  "));
        let has_targets = command.get_after_help().is_some_and(|more| more.to_string().starts_with("Targets:"));
        let all = match command.get_after_help() {
            Some(more) => format!("{examples}\n\n{more}"),
            None => examples.clone(),
        };
        let command = command.mut_args(grouped);
        let Some((_, first)) = FIRST.iter().find(|(of, _)| *of == name) else {
            return command.after_help(StyledStr::from(all));
        };
        let has_training = !trains && command.get_arguments().any(|arg| arg.get_id() == "train");
        let training =
            if has_training { format!(", `plimsoll {name} --train -h` those of a training") } else { String::new() };
        let targets = if has_targets { " and targets" } else { "" };
        let short = format!("{examples}\n\n`plimsoll {name} --help` has all flags{targets}{training}.");
        let command = command.mut_args(|arg| {
            let is_first = arg.is_positional() || first.contains(&arg.get_id().as_str());
            let is_training = trains && arg.get_help_heading() == Some(TRAINED);
            arg.hide_short_help(!is_first && !is_training)
        });
        command.after_help(StyledStr::from(short)).after_long_help(StyledStr::from(all))
    })
}

/// A flag in its group. Operands stay among the arguments.
fn grouped(arg: Arg) -> Arg {
    let group = GROUPS.iter().find(|(_, ids)| ids.contains(&arg.get_id().as_str()));
    match group {
        Some((heading, _)) if !arg.is_positional() => arg.help_heading(*heading),
        _ => arg,
    }
}

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
completions = printed
man = printed
printed
  form text
  text text
";

#[derive(Args)]
pub(super) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, mut command: Command, json: bool) -> Result<String> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, "plimsoll", &mut text);
        Ok(printed(&self.shell.to_string(), text, json))
    }
}

#[derive(Args)]
pub(super) struct Man {
    /// A command. Default: the page of the program.
    command: Option<String>,
}

impl Man {
    pub(super) fn run(&self, mut command: Command, json: bool) -> Result<String> {
        command.build();
        let page = match &self.command {
            None => command,
            Some(name) => {
                let known: Vec<_> = command.get_subcommands().map(|known| known.get_name().to_owned()).collect();
                let unknown =
                    || Error::usage(format!("man {name}: no such command; the commands: {}", known.join(", ")));
                command.find_subcommand(name).cloned().ok_or_else(unknown)?
            }
        };
        let mut text = Vec::new();
        clap_mangen::Man::new(page).render(&mut text).expect("memory takes all that is written");
        // Examples and tables keep their lines.
        let text = String::from_utf8_lossy(&text).replacen(".SH EXTRA\n", ".SH EXAMPLES\n.nf\n", 1);
        let text = text.replacen("\n.SH VERSION", "\n.fi\n.SH VERSION", 1);
        Ok(printed("man", text.into_bytes(), json))
    }
}

fn printed(form: &str, text: Vec<u8>, json: bool) -> String {
    let text = String::from_utf8_lossy(&text);
    if json { line(&json!({"form": form, "text": text})) } else { text.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    /// Each command that takes a file has examples, and each example is a command of this program.
    #[test]
    fn examples_are_commands() {
        let with: Vec<_> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        for known in command().get_subcommands().map(Command::get_name) {
            let needs_none = ["ops", "completions", "man", "schema"].contains(&known);
            assert!(with.contains(&known) != needs_none, "{known}");
        }
        for (name, examples) in EXAMPLES {
            for example in *examples {
                // A launcher may stand before it.
                let words: Vec<_> = example.split_whitespace().skip_while(|word| *word != "plimsoll").collect();
                assert_eq!(&words[..2], ["plimsoll", name]);
                command().try_get_matches_from(words).unwrap_or_else(|error| panic!("{example}: {error}"));
            }
        }
    }

    /// Each name among the flags of the first day is that of a flag of its command.
    #[test]
    fn first_flags_are_flags() {
        for (name, first) in FIRST {
            let all = command();
            let of = all.get_subcommands().find(|of| of.get_name() == *name).expect("a command");
            for id in *first {
                assert!(of.get_arguments().any(|arg| arg.get_id() == *id), "{name} {id}");
            }
        }
    }

    /// Each name in a group is that of a flag.
    #[test]
    fn groups_have_flags() {
        let all = command();
        let ids: Vec<_> =
            all.get_subcommands().chain([&all]).flat_map(Command::get_arguments).map(Arg::get_id).collect();
        for id in GROUPS.iter().flat_map(|(_, ids)| *ids) {
            assert!(ids.iter().any(|known| known.as_str() == *id), "{id}");
        }
    }
}
