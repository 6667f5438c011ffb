//! `emit`: prints a graph in another form.

use super::args::{self, Model};
use super::line;
use crate::error::{Error, Result};
use crate::kernel::render::{Bindings, Dialect, PRELUDE, render};
use crate::onnx::{self, text};
use crate::plan::KernelIdx;
use crate::report;
use crate::target::{Family, Target};
use clap::{Args, ValueEnum};
use serde_json::json;

#[derive(Args)]
#[command(after_help = args::targets())]
pub(super) struct Emit {
    #[command(flatten)]
    model: Model,
    /// The form to print. onnxtxt: the file as text; dot: the graph after the passes; wgsl, cuda: the kernels.
    #[arg(value_enum)]
    form: Form,
    /// The target to plan for: one of those below. Kernels need a target that runs them. Default: wgpu, or cuda for CUDA kernels.
    #[arg(long)]
    target: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Form {
    Onnxtxt,
    Dot,
    Wgsl,
    Cuda,
}

impl Emit {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        self.refuse_flags()?;
        let (form, text) = match self.form {
            Form::Onnxtxt => ("onnxtxt", text::print(&onnx::load(&self.model.model)?.proto)),
            Form::Dot => ("dot", self.dot(&self.target(None)?)?),
            Form::Wgsl => ("wgsl", self.kernels(&self.target(Some(Family::Wgpu))?, Dialect::Wgsl)?),
            Form::Cuda => ("cuda", self.kernels(&self.target(Some(Family::Cuda))?, Dialect::Cuda)?),
        };
        if json {
            return Ok(line(&json!({"model": self.model.model.display().to_string(), "form": form, "text": text})));
        }
        Ok(text)
    }
}

impl Emit {
    /// Refuses flags that the form has no use for.
    fn refuse_flags(&self) -> Result<()> {
        let target = self.target.as_ref().map(|_| "--target");
        match (self.form, target.or(self.model.flag())) {
            (Form::Onnxtxt, Some(flag)) => {
                let what =
                    format!("{flag}: onnxtxt is the file as it is; `emit MODEL dot` shows the graph after the passes");
                Err(Error::usage(what))
            }
            (Form::Dot, _) if self.model.memory_limit.is_some() => {
                Err(Error::usage("--memory-limit: a graph has no size before it is planned; see `plan`".into()))
            }
            _ => Ok(()),
        }
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

    /// The graph after the passes.
    fn dot(&self, target: &Target) -> Result<String> {
        let graph = self.model.graph(&[])?;
        let made = self.model.recipe().graph(graph, target, &self.model.limits());
        report::dot(&made.map_err(|e| e.in_file(&self.model.model))?)
    }

    /// The text of a plan's kernels. A library call is printed as its arguments.
    fn kernels(&self, target: &Target, dialect: Dialect) -> Result<String> {
        let graph = self.model.graph(&[])?;
        let plan = self.model.recipe().plan(graph, target, &self.model.limits());
        let plan = plan.map_err(|e| e.in_file(&self.model.model))?;
        let mut text = if dialect == Dialect::Cuda { format!("{PRELUDE}\n") } else { String::new() };
        for (number, kernel) in KernelIdx::enumerate(&plan.kernels) {
            let users: Vec<_> = plan.steps.iter().filter(|s| s.kernel == number).map(|s| s.name.as_str()).collect();
            // Names come from the file: none of them may end the comment.
            let users = users.join(", ").replace(char::is_control, " ");
            text += &format!("// kernel {number}, {}: {users}\n", kernel.template.name());
            if let Some(call) = kernel.schedule.call() {
                let call = serde_json::to_string(call).expect("a call has only finite numbers and text keys");
                text += &format!("// {call}\n\n");
                continue;
            }
            let source = render(kernel, target, &Bindings::distinct(kernel), dialect)?;
            let own = source.text.replacen(PRELUDE, "", 1);
            text += &format!("// {} invocations, {:?} workgroups\n{own}\n", source.size, source.groups);
        }
        Ok(text)
    }
}
