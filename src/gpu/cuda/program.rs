//! Kernel texts to machine code: a few NVRTC programs for all that are new, compiled side by side and kept on disk by content.

use super::api::{Nvrtc, Refusal, failed};
use crate::kept;
use cudarc::nvrtc::sys::nvrtcProgram;
use plimsoll_core::error::Result;
use plimsoll_core::file::fnv;
use plimsoll_core::kernel::render::PRELUDE;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;
use std::{fs, io, thread};

/// First bytes of a file of the cache, its format's version among them.
const MAGIC: &[u8] = b"plimsoll cubin 1\n";

/// NVRTC and the architecture that it compiles for.
pub(super) struct Compiler {
    pub(super) nvrtc: Nvrtc,
    /// Its version.
    pub(super) version: String,
    /// The folder of CUDA's headers, if it is known.
    pub(super) include: Option<PathBuf>,
    /// The architecture, as [`architecture`] names it.
    pub(super) arch: String,
    /// The folder where machine code is kept; `None` to keep none.
    pub(super) cache: Option<PathBuf>,
}

/// NVRTC's name for the architecture of a compute capability. That of 9.0 has products of tiles under `sm_90a` alone.
pub(super) fn architecture(compute: u32) -> String {
    format!("sm_{compute}{}", if compute == 90 { "a" } else { "" })
}

/// Several kernel texts as one program: each in a namespace of its own, its kernel under the name that comes back.
pub(super) fn join(texts: &[&str]) -> (String, Vec<String>) {
    let mut program = PRELUDE.to_owned();
    let mut names = Vec::with_capacity(texts.len());
    for (number, text) in texts.iter().enumerate() {
        let template = text.lines().next().and_then(|line| line.strip_prefix("// ")).unwrap_or("kernel");
        let name = format!("{template}_{number}");
        let text = text.replacen(PRELUDE, "", 1).replacen(" kernel(", &format!(" {name}("), 1);
        program += &format!("namespace n{number} {{\n{text}}}\n");
        names.push(name);
    }
    (program, names)
}

/// Texts of a program. Each program compiles what all texts share once more, and is a module on the device.
const TEXTS: usize = 16;
/// Bytes of the stack of a thread that compiles.
const STACK: usize = 64 << 20;

/// Texts of a program, the names of their kernels in it, and its machine code.
pub(super) type Built<'a> = (Vec<&'a str>, Vec<String>, Vec<u8>);

impl Compiler {
    /// The machine code of texts that differ, as programs that are the same on every machine.
    pub(super) fn build_all<'a>(&self, texts: &[&'a str]) -> Result<Vec<Built<'a>>> {
        let programs = texts.len().div_ceil(TEXTS);
        let next = AtomicUsize::new(0);
        let build = || {
            let numbers = std::iter::from_fn(|| Some(next.fetch_add(1, Relaxed)).filter(|number| *number < programs));
            let built = numbers.map(|number| {
                // Neighbours are alike, and take alike long: each program has some of all kinds.
                let share: Vec<&str> = texts.iter().copied().skip(number).step_by(programs).collect();
                let (program, names) = join(&share);
                Ok((share, names, self.build(&program)?))
            });
            built.collect::<Result<Vec<_>>>()
        };
        let workers = thread::available_parallelism().map_or(1, usize::from).min(programs);
        if workers < 2 {
            return build();
        }
        let built = thread::scope(|scope| {
            let spawn = |_| thread::Builder::new().stack_size(STACK).spawn_scoped(scope, build);
            let threads = (0..workers).map(spawn).collect::<io::Result<Vec<_>>>();
            let threads = threads.map_err(|e| failed(format!("no thread to compile kernels: {e}")))?;
            let panicked = |_| Err(failed("a thread that compiled kernels panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect::<Result<Vec<_>>>()
        })?;
        Ok(built.into_iter().flatten().collect())
    }

    /// The machine code of a program, from the cache if it is there.
    pub(super) fn build(&self, program: &str) -> Result<Vec<u8>> {
        // Before 13.1, NVRTC took generic lambdas for functions of the host.
        let device = "--device-as-default-execution-space".into();
        let options = [format!("--gpu-architecture={}", self.arch), "--std=c++17".into(), device];
        let key = format!("nvrtc {}\n{}\n{program}", self.version, options.join(" "));
        let path = self.cache.as_ref().map(|folder| folder.join(format!("{:032x}.cubin", fnv(key.as_bytes()))));
        if let Some(image) = path.as_deref().and_then(|path| load(path, &key)) {
            tracing::debug!(bytes = image.len(), "kernels from the cache");
            return Ok(image);
        }
        let start = Instant::now();
        let image = self.compile(program, &options)?;
        tracing::debug!(bytes = image.len(), ms = start.elapsed().as_millis() as u64, "kernels compiled");
        if let Some(Err(error)) = path.as_deref().map(|path| kept::store(path, &kept::entry(MAGIC, &key, &image))) {
            let path = path.expect("it was stored there");
            tracing::warn!("{}: compiled kernels are not kept: {error}", path.display());
        }
        Ok(image)
    }

    fn compile(&self, program: &str, options: &[String]) -> Result<Vec<u8>> {
        let text = CString::new(program).map_err(|_| failed("a kernel's text has a zero byte"))?;
        let include = self.include.iter().map(|folder| format!("--include-path={}", folder.display()));
        let options = options.iter().cloned().chain(include).map(CString::new).collect::<Result<Vec<_>, _>>();
        let options = options.map_err(|_| failed("the path of CUDA's headers has a zero byte"))?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let nvrtc = &self.nvrtc;
        let mut handle: nvrtcProgram = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: strings and pointers live until the program is destroyed, which happens on every path.
        unsafe {
            nvrtc
                .nvrtcCreateProgram(&mut handle, text.as_ptr(), c"plimsoll.cu".as_ptr(), 0, none, none)
                .map_err(failed)?;
            let compiled = nvrtc.nvrtcCompileProgram(handle, pointers.len() as i32, pointers.as_ptr());
            let image = match compiled {
                Ok(()) => {
                    fetch(|n| nvrtc.nvrtcGetCUBINSize(handle, n), |p| nvrtc.nvrtcGetCUBIN(handle, p)).map_err(failed)
                }
                Err(refusal) => {
                    let log =
                        fetch(|n| nvrtc.nvrtcGetProgramLogSize(handle, n), |p| nvrtc.nvrtcGetProgramLog(handle, p));
                    let log = log.unwrap_or_default();
                    let log = String::from_utf8_lossy(&log);
                    let log = log.trim_end_matches(['\0', '\n']);
                    Err(failed(format!("kernels for {}: {refusal}\n{log}", self.arch)))
                }
            };
            // The program is no longer needed, so a refusal to free it does not matter.
            let _ = nvrtc.nvrtcDestroyProgram(&mut handle);
            image
        }
    }
}

/// The bytes that a pair of functions, one for the length, one for the content, gives out.
fn fetch(
    len: impl FnOnce(*mut usize) -> Result<(), Refusal>,
    fill: impl FnOnce(*mut c_char) -> Result<(), Refusal>,
) -> Result<Vec<u8>, Refusal> {
    let mut bytes = 0;
    len(&mut bytes)?;
    let mut content = vec![0u8; bytes];
    fill(content.as_mut_ptr().cast())?;
    Ok(content)
}

fn load(path: &Path, key: &str) -> Option<Vec<u8>> {
    let entry = fs::read(path).ok()?;
    let image = kept::content(MAGIC, &entry, key).map(<[u8]>::to_vec);
    if image.is_none() {
        tracing::warn!("{}: not what was kept there; the kernels are compiled again", path.display());
    }
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_one_program_do_not_meet() {
        let text = |body: &str| format!("// map\n{PRELUDE}{body}extern \"C\" __global__ void kernel() {{}}\n");
        let (a, b) = (text("constexpr i32 SIZE = 1;\n"), text("constexpr i32 SIZE = 2;\n"));
        let (program, names) = join(&[&a, &b]);
        assert_eq!(names, ["map_0", "map_1"]);
        assert_eq!(program.matches(PRELUDE).count(), 1);
        assert!(program.contains("void map_0()") && program.contains("void map_1()") && !program.contains(" kernel("));
    }
}
