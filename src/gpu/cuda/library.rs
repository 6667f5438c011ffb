//! The search for NVIDIA's libraries, with its results as plain data.
//!
//! Libraries are opened by absolute path wherever a folder is known, so that those of a toolkit or of a Python environment serve without
//! `LD_LIBRARY_PATH`. A library stays open until the process ends: drivers keep threads and exit handlers of their own.

use libloading::Library;
use serde::Serialize;
use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The result of the search for one library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Found {
    /// `driver`, `nvrtc`, `cublaslt`, `cudnn` or `nccl`.
    pub library: &'static str,
    /// Its version, if it told one.
    pub version: Option<String>,
    /// The file, if the system tells.
    pub path: Option<PathBuf>,
    /// Why it is not used.
    pub problem: Option<String>,
}

/// The folders that are searched, and whether the system's loader is asked before them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Ask the loader for the bare name first: `LD_LIBRARY_PATH`, `ld.so.cache`, the default folders.
    pub loader: bool,
    /// Folders, in order.
    pub folders: Vec<PathBuf>,
}

impl Search {
    /// The folders that this process's environment names: the loader's, `CUDA_HOME` and `CUDA_PATH`, the usual folders of drivers and toolkits,
    /// the `nvidia` wheels of Python environments (`VIRTUAL_ENV`, `CONDA_PREFIX`, the `python3` on `PATH`).
    pub fn here() -> Search {
        let mut folders = Vec::new();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
        let usual = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
        let versioned = children(Path::new("/usr/local"), |name| name.starts_with("cuda-"));
        for toolkit in toolkits.chain(usual).chain(versioned.into_iter().rev()) {
            folders.extend(["lib64", "lib", "targets/x86_64-linux/lib", "bin", "bin/x64"].map(|f| toolkit.join(f)));
        }
        let drivers = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/local/nvidia/lib64",
            "/usr/lib/wsl/lib",
            "/run/opengl-driver/lib",
        ];
        folders.extend(drivers.map(PathBuf::from));
        for prefix in prefixes() {
            folders.extend(wheels(&prefix));
        }
        let mut seen = BTreeSet::new();
        folders.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
        Search { loader: true, folders }
    }

    /// The files that `names` may be, best first.
    fn candidates<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = PathBuf> + 'a {
        names.iter().flat_map(move |name| {
            let bare = self.loader.then(|| PathBuf::from(name));
            bare.into_iter().chain(self.folders.iter().map(move |f| f.join(name)).filter(|path| path.is_file()))
        })
    }

    /// Opens the first library of these names that `bind` accepts. `bind` returns the functions that it took and the library's version, or the
    /// reason why the library cannot be used.
    pub(super) fn open<T>(
        &self,
        library: &'static str,
        names: &[&str],
        bind: impl Fn(&Library) -> Result<(T, String), String>,
    ) -> (Option<T>, Found) {
        let mut problem = None;
        for path in self.candidates(names) {
            let opened = match load(&path) {
                Ok(opened) => opened,
                // Names that the loader does not know are no news; a file that is there and does not open is.
                Err(error) => {
                    if path.is_absolute() {
                        problem.get_or_insert(format!("{}: {error}", path.display()));
                    }
                    continue;
                }
            };
            let bound = bind(&opened);
            // The functions that were taken must stay, and unloading a driver is not safe anyway.
            std::mem::forget(opened);
            let path = if path.is_absolute() { path } else { mapped(&path).unwrap_or(path) };
            match bound {
                Ok((table, version)) => {
                    return (Some(table), Found { library, version: Some(version), path: Some(path), problem: None });
                }
                Err(error) => {
                    problem.get_or_insert(format!("{}: {error}", path.display()));
                }
            }
        }
        let problem = problem.unwrap_or_else(|| format!("{} was not found", names.join(" or ")));
        (None, Found { library, problem: Some(problem), ..Found::default() })
    }
}

/// Keeps a library in the process, if it is there. Another library would load and unload it, but threads that have used it call into it when
/// they end.
pub(super) fn keep(path: &Path) {
    if let Ok(library) = load(path) {
        std::mem::forget(library);
    }
}

fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: the file carries the name of a library of NVIDIA's, whose initialisers are meant to run in any process.
    #[cfg(unix)]
    let opened = unsafe {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        // Global, so that libraries which ask for others by name (cuDNN for cuBLASLt and NVRTC) get these.
        Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL).map(Into::into)
    };
    // SAFETY: as above.
    #[cfg(not(unix))]
    let opened = unsafe { Library::new(path) };
    opened.map_err(|error| error.to_string())
}

/// The path of a library that the loader found by name, on systems that tell.
fn mapped(name: &Path) -> Option<PathBuf> {
    let name = name.file_name()?.to_str()?;
    let stem = name.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let same = |file: &OsStr| file.to_str().is_some_and(|file| file.starts_with(&format!("{stem}.so")));
    paths.into_iter().find(|path| path.file_name().is_some_and(same)).map(Path::to_owned)
}

/// Entries of a folder whose names pass, sorted.
fn children(folder: &Path, pass: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.filter(|e| e.file_name().to_str().is_some_and(&pass)).map(|e| e.path()).collect();
    paths.sort();
    paths
}

/// Prefixes of the Python environments that this process's environment names.
fn prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    for python in env::split_paths(&path).map(|folder| folder.join("python3")).filter(|p| p.is_file()) {
        // A virtual environment's interpreter is a link: both ends have packages.
        let ends = [Some(python.clone()), python.canonicalize().ok()];
        prefixes.extend(ends.iter().flatten().filter_map(|p| p.parent()?.parent().map(Path::to_owned)));
        // pyenv puts scripts on the path that choose among versions.
        if let Some(root) = python.parent().filter(|f| f.ends_with("shims")).and_then(Path::parent) {
            prefixes.extend(children(&root.join("versions"), |_| true));
        }
    }
    prefixes.extend(env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes
}

/// Folders of the `nvidia` wheels below a Python prefix.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let python = |name: &str| name.starts_with("python3");
    let mut versions: Vec<_> = ["lib", "lib64"].iter().flat_map(|lib| children(&prefix.join(lib), python)).collect();
    versions.reverse();
    versions.push(prefix.join("Lib"));
    let packages = versions.iter().flat_map(|v| ["site-packages", "dist-packages"].map(|p| v.join(p).join("nvidia")));
    let wheels = packages.flat_map(|nvidia| children(&nvidia, |_| true));
    wheels.flat_map(|wheel| [wheel.join("lib"), wheel.join("bin")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nowhere_is_said_in_words() {
        let (table, found) =
            Search::default().open("driver", &["libcuda.so.1", "libcuda.so"], |_| Ok(((), String::new())));
        assert!(table.is_none());
        assert_eq!(found.problem.as_deref(), Some("libcuda.so.1 or libcuda.so was not found"));
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = env::temp_dir().join(format!("plimsoll-library-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("libcuda.so.1"), "not a library").expect("a file");
        let search = Search { loader: false, folders: vec![folder.clone()] };
        let (table, found) = search.open("driver", &["libcuda.so.1"], |_| Ok(((), String::new())));
        std::fs::remove_dir_all(&folder).expect("it is removed");
        assert!(table.is_none());
        let problem = found.problem.expect("a reason");
        assert!(problem.starts_with(&folder.join("libcuda.so.1").display().to_string()), "{problem}");
    }

    #[test]
    fn wheels_are_found_below_a_prefix() {
        let prefix = env::temp_dir().join(format!("plimsoll-wheels-{}", std::process::id()));
        let lib = prefix.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).expect("folders");
        let found = wheels(&prefix);
        std::fs::remove_dir_all(&prefix).expect("they are removed");
        assert!(found.contains(&lib), "{found:?}");
    }
}
