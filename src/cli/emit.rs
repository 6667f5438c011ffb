//! `emit`: prints a graph in another form.

use super::args::{self, Model};
use super::line;
use super::method::Trained;
use super::open::{self, Whole};
use super::programs::{More, of_training};
use super::ranks::Meshed;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::graph::Graph;
use crate::kernel::render::{Bindings, Dialect, PRELUDE, render};
use crate::onnx::proto::ModelProto;
use crate::onnx::{self, text};
use crate::pass::quantized;
use crate::plan::{self, Dim, Graphs, Job, KernelIdx, Planner};
use crate::report;
use crate::target::{Family, Target};
use clap::{Args, ValueEnum};
use serde_json::json;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
emit = emitted|written
emitted
  model text
  form text
  text text
written
  model text
  form text
  bytes int
";

#[derive(Args)]
#[command(after_help = args::targets())]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
#[command(mut_arg("batch", |flag| flag.requires("train").help("Batch size: rows per update, with --train")))]
#[command(allow_missing_positional = true)]
pub(super) struct Emit {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// The program to print, of several. Default: all. Of a training: step or evaluate, or with --accumulate, first, next, last or evaluate;
    /// by default, step.
    #[arg(long, value_name = "NAME")]
    program: Option<String>,
    /// The number of updates over which the learning rate falls.
    #[arg(long, value_name = "N", requires = "train", default_value_t = 1)]
    steps: u64,
    /// The form to print. onnxtxt, onnx: the file as text or as protobuf; dot: the graph after the passes; wgsl, cuda: the kernels. Of dims that
    /// have ranges, it is for the largest extents.
    ///
    /// With --state, --training or --train, onnxtxt and onnx are the graph with its states: initializers that a training_info updates. Run
    /// it with --training. With --quantize, they are the graph with its weights in few bits, behind each a DequantizeLinear. With --mesh, their nodes
    /// are annotated with what is split, which --mesh reads instead of --shard.
    #[arg(value_enum)]
    form: Form,
    /// Write to a file instead. onnx needs one.
    #[arg(short = 'o', long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// The target to plan for: one of those below. Kernels need a target that runs them. Default: wgpu, or cuda for CUDA kernels.
    #[arg(long)]
    target: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Form {
    Onnxtxt,
    Onnx,
    Dot,
    Wgsl,
    Cuda,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Form::Onnxtxt => "onnxtxt",
            Form::Onnx => "onnx",
            Form::Dot => "dot",
            Form::Wgsl => "wgsl",
            Form::Cuda => "cuda",
        }
    }
}

impl Emit {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        self.refuse_flags()?;
        let data = self.save.as_deref().filter(|_| matches!(self.form, Form::Onnx)).map(onnx::data_file);
        let files = self.save.as_deref().map(|path| ("--save", path));
        let files = files.into_iter().chain(data.as_deref().map(|path| ("the data of --save", path)));
        args::outputs(files, self.model.read().chain(self.more.read()))?;
        let content = match self.form {
            Form::Onnxtxt => text::print(&self.proto()?).into_bytes(),
            Form::Onnx => Vec::new(),
            Form::Dot => self.dot(&self.target(None)?)?.into_bytes(),
            Form::Wgsl => self.kernels(&self.target(Some(Family::Wgpu))?, Dialect::Wgsl)?.into_bytes(),
            Form::Cuda => self.kernels(&self.target(Some(Family::Cuda))?, Dialect::Cuda)?.into_bytes(),
        };
        let (model, form) = (self.more.files(&self.model), self.form.name());
        if let Some(path) = &self.save {
            match self.form {
                Form::Onnx => onnx::write(self.proto()?, path, None)?,
                _ => file::write_whole(path, "write the graph", |out| out.write_all(&content))?,
            }
            let bytes = path.metadata().map_err(|e| Error::file(path, "read its size", e))?.len();
            let value = json!({"model": model, "form": form, "bytes": bytes});
            return Ok(if json { line(&value) } else { String::new() });
        }
        let text = String::from_utf8(content).map_err(|_| Error::usage("onnx: expected --save FILE".into()))?;
        Ok(if json { line(&json!({"model": model, "form": form, "text": text})) } else { text })
    }
}

impl Emit {
    /// Refuses flags that the form has no use for.
    fn refuse_flags(&self) -> Result<()> {
        if let (Form::Onnx, None) = (self.form, &self.save) {
            return Err(Error::usage("onnx: expected --save FILE, as it is no text".into()));
        }
        let target = self.target.as_ref().map(|_| "--target");
        // States and weights of few bits make another graph of the file, which its dims and outputs are part of.
        let others = Model {
            quantize: None,
            set: Vec::new(),
            shapes: Vec::new(),
            outputs: Vec::new(),
            state: Vec::new(),
            training: false,
            ..self.model.clone()
        };
        // What is split on a mesh depends on the extents of dims.
        let annotated = |model: &Model| match model.several.mesh {
            Some(_) => Model { several: Meshed::default(), set: Vec::new(), shapes: Vec::new(), ..model.clone() },
            None => model.clone(),
        };
        let model = &annotated(if self.is_another() { &others } else { &self.model });
        match (self.form, target.or(model.flag())) {
            (Form::Onnxtxt | Form::Onnx, Some(flag)) => {
                let form = self.form.name();
                let what =
                    format!("{flag}: {form} is the file as it is; `emit MODEL dot` shows the graph after the passes");
                Err(Error::usage(what))
            }
            (Form::Dot, _) if self.model.memory_limit.is_some() => {
                Err(Error::usage("--memory-limit: a graph has no size before it is planned; see `plan`".into()))
            }
            _ => Ok(()),
        }
    }

    /// True if flags make another graph of the file.
    fn is_another(&self) -> bool {
        let has_states = self.model.training || !self.model.state.is_empty() || self.trained.method().is_some();
        has_states || self.model.quantize.is_some()
    }

    /// The programs to print: all of them, or the one that is asked for. Of a training it is one.
    fn programs(&self) -> Result<Vec<(String, Graphs)>> {
        ensure(self.trained.method().is_none() || self.more.is_one(&self.model), || {
            Error::usage(format!("--train: expected one model, found {}", self.more.files(&self.model)))
        })?;
        let mut programs = match &self.trained.method() {
            Some(method) => {
                open::mention(&method.whole(&self.model)?.assumed);
                of_training(method.programs(&self.model, self.steps)?, &[])?
            }
            None => {
                let asked = self.more.asked(&self.model, &[])?;
                open::mention(asked.subject.assumed());
                asked.programs
            }
        };
        let Some(asked) = self.program.as_deref().or(self.trained.method().map(|_| "step")) else {
            return Ok(programs);
        };
        let names: Vec<_> = programs.iter().map(|(name, _)| name.clone()).collect();
        programs.retain(|(name, _)| name == asked);
        if programs.is_empty() {
            let named = names.iter().any(|name| !name.is_empty());
            let expected =
                if named { format!("one of {}", names.join(", ")) } else { "none: there is one program".into() };
            return Err(Error::usage(format!("--program {asked}: expected {expected}")));
        }
        Ok(programs)
    }

    /// An error of one model names its file.
    fn in_file(&self, error: Error) -> Error {
        if self.more.is_one(&self.model) { error.in_file(&self.model.model) } else { error }
    }

    /// The file as it is, whole if it is written to another one; or its graph with states or with weights of few bits, if they are asked for.
    fn proto(&self) -> Result<ModelProto> {
        ensure(self.more.is_one(&self.model), || {
            let (form, found) = (self.form.name(), self.more.files(&self.model));
            Error::usage(format!("{form}: a file has one graph: expected one model, found {found}"))
        })?;
        let in_file = |e: Error| e.in_file(&self.model.model);
        if !self.is_another() {
            let model = self.model.file()?;
            let proto = if self.save.is_some() { model.whole(model.proto.clone())? } else { model.proto };
            return match &self.model.several.mesh {
                Some(_) => self.annotated(proto, self.programs()?[0].1.largest()?).map_err(in_file),
                None => Ok(proto),
            };
        }
        if self.trained.method().is_some() {
            let graph = self.programs()?[0].1.largest()?;
            return onnx::export(&graph).and_then(|proto| self.annotated(proto, graph)).map_err(in_file);
        }
        let (model, dims) = self.model.load(&[])?;
        let dims = dims.into_iter().map(|(name, extent)| (name, extent.into())).collect();
        let whole = Whole::new(model, dims).map_err(in_file)?;
        let mut graph = self.model.import(&whole, &[])?;
        open::mention(&whole.assumed);
        if let Some(quantize) = self.model.quantize {
            graph = quantized(graph, quantize).map_err(in_file)?;
        }
        let proto = onnx::export_step(&graph, whole.model.step_outputs());
        proto.and_then(|proto| self.annotated(proto, graph)).map_err(in_file)
    }

    /// A file whose nodes say what is split of its graph, if there is a mesh.
    fn annotated(&self, mut proto: ModelProto, mut graph: Graph) -> Result<ModelProto> {
        let Some(sharding) = self.model.several.sharding()? else { return Ok(proto) };
        if let Some(level) = self.model.several.states {
            let what = "a file has no form for states that ranks share out; leave it out, and give it with the file";
            return Err(Error::usage(format!("--shard-states {level}: {what}")));
        }
        let shards = onnx::shard(&mut graph, &sharding)?;
        onnx::annotate(&mut proto, &shards, &sharding.mesh)?;
        Ok(proto)
    }

    /// The target that is asked for, of this family if kernels are wanted.
    fn target(&self, family: Option<Family>) -> Result<Target> {
        let Some(name) = &self.target else {
            return self.model.target(if family == Some(Family::Cuda) { "cuda" } else { "wgpu" });
        };
        let target = self.model.target(name)?;
        match family {
            Some(family) if family != target.family => {
                let (expected, found) = (family.name(), target.family.name());
                Err(Error::usage(format!("--target {name}: expected a target of family {expected}, found {found}")))
            }
            _ => Ok(target),
        }
    }

    /// What is printed, as a job.
    fn job(&self, target: &Target) -> Result<Job> {
        Ok(self.model.job(self.programs()?, target)?.within(self.model.memory_limit))
    }

    /// The graphs after the passes.
    fn dot(&self, target: &Target) -> Result<String> {
        let job = self.job(target)?;
        let made = Planner::new(&job).and_then(|mut planner| planner.graphs(job.limit));
        made.map_err(|e| self.in_file(e))?.iter().map(report::dot).collect()
    }

    /// The text of a plan's kernels. A library call is printed as its arguments.
    fn kernels(&self, target: &Target, dialect: Dialect) -> Result<String> {
        let plan = plan::plan(&self.job(target)?).map_err(|e| self.in_file(e))?.plan;
        let mut text = if dialect == Dialect::Cuda { format!("{PRELUDE}\n") } else { String::new() };
        for program in &plan.programs {
            // Names come from the file: none of them may end the comment.
            let plain = |text: String| text.replace(char::is_control, " ");
            if plan.programs.len() > 1 {
                text += &format!("// program {}\n\n", plain(program.name.clone()));
            }
            if !program.dims.is_empty() {
                let range = |Dim { name, least, most }: &Dim| plain(format!("{name}={least}..{most}"));
                let ranges: Vec<_> = program.dims.iter().map(range).collect();
                text += &format!("// the kernels of the largest extents of {}\n\n", ranges.join(" "));
            }
            for (number, kernel) in KernelIdx::enumerate(&program.kernels) {
                let steps = program.steps.iter();
                let users: Vec<_> = steps.filter(|s| s.kernel == number).map(|s| s.name.as_str()).collect();
                let users = plain(users.join(", "));
                text += &format!("// kernel {number}, {}: {users}\n", kernel.template.name());
                if let Some(of) = kernel.repeat() {
                    text += &format!(
                        "// {} launches once, then {} launches, {} times:\n\n",
                        of.first.len(),
                        of.each.len(),
                        of.times
                    );
                }
                for kernel in kernel.launched() {
                    if let Some(collective) = kernel.collective() {
                        text += &format!("// {collective}\n\n");
                        continue;
                    }
                    if let Some(call) = kernel.schedule.call() {
                        let call = serde_json::to_string(call).expect("a call has only finite numbers and text keys");
                        text += &format!("// {call}\n\n");
                        continue;
                    }
                    let source = render(kernel, target, &Bindings::distinct(kernel), dialect)?;
                    let own = source.text.replacen(PRELUDE, "", 1);
                    text += &format!("// {} invocations, {:?} workgroups\n{own}\n", source.size, source.groups);
                }
            }
        }
        Ok(text)
    }
}
