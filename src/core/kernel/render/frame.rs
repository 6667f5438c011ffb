//! Dialects: what stands around a template's statements.

use super::scalar::Type;
use super::{Dialect, Module, PRELUDE, SUBGROUPS};
use std::fmt;

/// A module in the clothes of a dialect.
pub(super) struct Frame<'a> {
    pub(super) module: &'a Module<'a>,
    pub(super) dialect: Dialect,
    pub(super) name: &'static str,
    pub(super) body: Vec<String>,
    pub(super) size: u32,
    pub(super) x: u64,
    pub(super) groups: u64,
}

/// Functions that texts in WGSL may call.
const HELPERS: &str = include_str!("../../../../shaders/helpers.wgsl");
/// Bytes of workgroup memory that CUDA's kernels can declare. More is asked for when they are launched.
const DECLARED: usize = 48 << 10;

/// What an invocation knows of subgroups, and its name in a text: its own of the workgroup's, their number, their size, its place in its own.
const PLACES: [(&str, &str); 4] = [
    ("subgroup_id", "subgroup"),
    ("num_subgroups", "subgroups"),
    ("subgroup_size", "width"),
    ("subgroup_invocation_id", "place"),
];

impl Frame<'_> {
    /// Bytes of workgroup memory that a launch has to ask for: none where the kernel's text declares it.
    pub(super) fn pool(&self) -> u32 {
        let bytes = |(_, ty, len): &(_, Type, usize)| (len * ty.size()).next_multiple_of(16);
        let all: usize = self.module.shared.iter().map(bytes).sum();
        if self.dialect == Dialect::Cuda && all > DECLARED { all as u32 } else { 0 }
    }

    /// The name of the workgroup's number.
    fn launched(&self) -> &'static str {
        if self.module.preamble.is_empty() { "group" } else { "launched" }
    }

    /// True if the module's functions call the helper with this head.
    fn calls(&self, head: &str) -> bool {
        let name = head.trim_start_matches("fn ").split_inclusive('(').next().unwrap_or_default();
        let mut lines = self.module.functions.iter().flat_map(|f| &f.body);
        self.dialect == Dialect::Wgsl && lines.any(|line| line.contains(name))
    }

    /// Statements in the dialect: C++ spells inferred types otherwise.
    fn statements(&self, lines: &mut dyn Iterator<Item = &str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in lines {
            let line = match self.dialect {
                Dialect::Wgsl => line.to_owned(),
                Dialect::Cuda => {
                    let mut out = String::new();
                    for word in line.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_') {
                        out += match word {
                            "let " => "const auto ",
                            "var " => "auto ",
                            "round(" => "rint(",
                            other => other,
                        };
                    }
                    out
                }
            };
            writeln!(f, "    {line}")?;
        }
        Ok(())
    }

    fn function(
        &self,
        (name, params, result): (&str, &[(&str, Type)], Option<Type>),
        lines: &mut dyn Iterator<Item = &str>,
        f: &mut fmt::Formatter<'_>,
    ) -> fmt::Result {
        let list = |item: &dyn Fn(&(&str, Type)) -> String| params.iter().map(item).collect::<Vec<_>>().join(", ");
        let end = match self.dialect {
            Dialect::Wgsl => {
                let params = list(&|(name, ty)| format!("{name}: {}", ty.name()));
                let result = result.map_or(String::new(), |ty| format!(" -> {}", ty.name()));
                writeln!(f, "fn {name}({params}){result} {{")?;
                "}"
            }
            Dialect::Cuda => {
                let params = list(&|(name, ty)| format!("{} {name}", ty.name()));
                let result = result.map_or("void", Type::name);
                writeln!(f, "const auto {name} = [&]({params}) -> {result} {{")?;
                "};"
            }
        };
        self.statements(lines, f)?;
        writeln!(f, "{end}")
    }

    fn functions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<&str> = HELPERS.lines().filter(|line| !line.is_empty() && !line.starts_with("//")).collect();
        for helper in lines.split_inclusive(|line| *line == "}").filter(|helper| self.calls(helper[0])) {
            let [head, body @ .., end] = helper else { continue };
            writeln!(f, "{head}")?;
            self.statements(&mut body.iter().map(|line| line.trim()), f)?;
            writeln!(f, "{end}")?;
        }
        for function in &self.module.functions {
            let head = (function.name.as_str(), &function.params[..], function.result);
            self.function(head, &mut function.body.iter().map(String::as_str), f)?;
        }
        Ok(())
    }

    fn wgsl(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = self.module;
        for (b, (ty, read_only)) in module.bound.iter().zip(&module.bindings.read_only).enumerate() {
            let access = if *read_only { "read" } else { "read_write" };
            let ty = if module.is_atomic(b) { format!("atomic<{}>", ty.name()) } else { ty.name().to_owned() };
            writeln!(f, "@group(0) @binding({b}) var<storage, {access}> b{b}: array<{ty}>;")?;
        }
        writeln!(f, "const SIZE: i32 = {};", self.size)?;
        for (name, ty, value) in &module.constants {
            writeln!(f, "const {name}: {} = {value};", ty.name())?;
        }
        for (name, ty, len) in &module.shared {
            writeln!(f, "var<workgroup> {name}: array<{}, {len}>;", ty.name())?;
        }
        for (name, ty) in &module.private {
            writeln!(f, "var<private> {name}: {};", ty.name())?;
        }
        self.functions(f)?;
        writeln!(f, "@compute @workgroup_size({})", self.size)?;
        let (mut params, mut places) = (String::new(), String::new());
        if module.flags.contains(&SUBGROUPS) {
            for (builtin, name) in PLACES {
                params += &format!(", @builtin({builtin}) {builtin}: u32");
                places += &format!("    let {name} = i32({builtin});\n");
            }
        }
        let index = "@builtin(local_invocation_index) index: u32";
        writeln!(f, "fn main(@builtin(workgroup_id) id: vec3<u32>, {index}{params}) {{")?;
        f.write_str(&places)?;
        writeln!(f, "    let {} = i32(id.x + id.y * {}u);", self.launched(), self.x)?;
        writeln!(f, "    let thread = i32(index);")?;
        self.entry(f)
    }

    fn cuda(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = self.module;
        f.write_str(PRELUDE)?;
        for (name, ty, value) in &module.constants {
            writeln!(f, "constexpr {} {name} = {value};", ty.name())?;
        }
        writeln!(f, "constexpr i32 SIZE = {};", self.size)?;
        let params = module.bound.iter().zip(&module.bindings.read_only).enumerate().map(|(b, (ty, read_only))| {
            format!("{}{}* __restrict__ b{b}", if *read_only { "const " } else { "" }, ty.name())
        });
        let params = params.collect::<Vec<_>>().join(", ");
        let mut bounds = match module.at_once {
            1 => format!("__launch_bounds__({})", self.size),
            count => format!("__launch_bounds__({}, {count})", self.size),
        };
        if module.cluster > 1 {
            bounds += &format!(" __cluster_dims__({}, 1, 1)", module.cluster);
        }
        writeln!(f, "extern \"C\" __global__ void {bounds} kernel({params}) {{")?;
        if self.pool() > 0 {
            writeln!(f, "    POOL({});", self.pool())?;
        }
        let mut start = 0;
        for (name, ty, len) in &module.shared {
            let bytes = len * ty.size();
            let ty = ty.name();
            match self.pool() {
                0 => writeln!(f, "    __shared__ __align__(16) {ty} {name}[{len}];")?,
                _ => writeln!(f, "    {ty}* const {name} = reinterpret_cast<{ty}*>(pool + {start});")?,
            }
            start += bytes.next_multiple_of(16);
        }
        for (name, ty) in &module.private {
            writeln!(f, "    {} {name};", ty.name())?;
        }
        for declaration in &module.declarations {
            writeln!(f, "    {declaration}")?;
        }
        self.functions(f)?;
        writeln!(f, "    const i32 {} = blockIdx.x + blockIdx.y * {}u;", self.launched(), self.x)?;
        writeln!(f, "    const i32 thread = threadIdx.x;")?;
        self.entry(f)
    }

    fn entry(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.groups > self.x {
            writeln!(f, "    if ({} >= {}) {{ return; }}", self.launched(), self.groups)?;
        }
        self.statements(&mut self.module.preamble.iter().chain(&self.body).map(String::as_str), f)?;
        writeln!(f, "}}")
    }
}

impl fmt::Display for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "// {}", self.name)?;
        match self.dialect {
            Dialect::Wgsl => self.wgsl(f),
            Dialect::Cuda => self.cuda(f),
        }
    }
}
