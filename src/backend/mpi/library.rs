//! The MPI library: the search for it, its functions that are used, each looked up once, and the numbers of its ABI.

use super::failed;
#[cfg(any(unix, windows))]
use libloading::Library;
use plimsoll_core::error::Result;
use std::env;
use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// A library of a system that loads none, such as WebAssembly's.
#[cfg(not(any(unix, windows)))]
enum Library {}

#[cfg(not(any(unix, windows)))]
impl Library {
    /// # Safety
    /// None.
    unsafe fn new(_: &Path) -> Result<Library, &'static str> {
        Err("this system loads no libraries")
    }

    /// # Safety
    /// None.
    unsafe fn get<T>(&self, _: &[u8]) -> Result<&T, ()> {
        match *self {}
    }
}

/// Names of the library: its number comes first, since wheels have a text of the linker under the name without it.
const NAMES: [&str; 3] = ["libmpi_abi.so.1", "libmpi_abi.so", "libmpi_abi.dylib"];
/// The variable that names the library instead.
const VARIABLE: &str = "PLIMSOLL_MPI";

/// The numbers of the ABI: chapter 20 of MPI 5.0, as `mpi_abi.h` of MPICH 5.0.2 has them.
pub(super) mod abi {
    use std::ffi::c_void;
    use std::ptr;

    /// A handle: a pointer of C that only the library follows.
    pub(crate) type Handle = usize;
    pub(crate) const OP_NULL: Handle = 0x20;
    pub(crate) const SUM: Handle = 0x21;
    pub(crate) const MIN: Handle = 0x22;
    pub(crate) const MAX: Handle = 0x23;
    pub(crate) const PROD: Handle = 0x24;
    pub(crate) const COMM_WORLD: Handle = 0x101;
    pub(crate) const ERRORS_RETURN: Handle = 0x143;
    pub(crate) const REQUEST_NULL: Handle = 0x180;
    pub(crate) const FLOAT: Handle = 0x210;
    pub(crate) const DOUBLE: Handle = 0x214;
    pub(crate) const INT8: Handle = 0x240;
    pub(crate) const UINT8: Handle = 0x241;
    pub(crate) const BYTE: Handle = 0x247;
    pub(crate) const INT16: Handle = 0x248;
    pub(crate) const UINT16: Handle = 0x249;
    pub(crate) const INT32: Handle = 0x250;
    pub(crate) const UINT32: Handle = 0x251;
    pub(crate) const INT64: Handle = 0x258;
    pub(crate) const UINT64: Handle = 0x259;
    /// In the place of a pointer to what is read: it lies where the result goes.
    pub(crate) const IN_PLACE: *const c_void = ptr::without_provenance(1);
    /// Threads may call one at a time.
    pub(crate) const THREAD_SERIALIZED: i32 = 2048;
    /// The longest text of an error.
    pub(crate) const MAX_ERROR_STRING: usize = 512;
}
pub(super) use abi::Handle;

/// Joins elements of a rank with those of another, in the second place.
pub(super) type Join = unsafe extern "C" fn(*const c_void, *mut c_void, *const i64, *const Handle);

/// A table of functions that return 0 for success.
macro_rules! table {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        /// The functions of the library that are used.
        #[derive(Clone, Copy, Debug)]
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
            /// Writes the library's own words for a code.
            MPI_Error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
        }

        #[allow(non_snake_case, clippy::too_many_arguments, reason = "names and parameters are the standard's")]
        impl Table {
            /// Looks every function up. The library must stay loaded as long as the table is used.
            fn bind(library: &Library) -> Result<Table, String> {
                // SAFETY: the signatures are those of the standard.
                unsafe {
                    Ok(Table {
                        $($name: symbol(library, stringify!($name))?,)*
                        MPI_Error_string: symbol(library, "MPI_Error_string")?,
                    })
                }
            }

            $(
                /// # Safety
                /// As the standard says of the function.
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), String> {
                    // SAFETY: guaranteed by the caller.
                    match unsafe { (self.$name)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(format!("{}: error {code} ({})", stringify!($name), self.meaning(code))),
                    }
                }
            )*
        }
    };
}

table! {
    fn MPI_Initialized(flag: *mut c_int);
    fn MPI_Init_thread(count: *mut c_int, args: *mut *mut *mut c_char, required: c_int, provided: *mut c_int);
    fn MPI_Finalize();
    fn MPI_Comm_set_errhandler(comm: Handle, handler: Handle);
    fn MPI_Comm_rank(comm: Handle, rank: *mut c_int);
    fn MPI_Comm_size(comm: Handle, size: *mut c_int);
    fn MPI_Comm_split(comm: Handle, color: c_int, key: c_int, made: *mut Handle);
    fn MPI_Op_create_c(join: Join, commutes: c_int, made: *mut Handle);
    fn MPI_Test(request: *mut Handle, done: *mut c_int, status: *mut c_void);
    fn MPI_Iallreduce_c(
        read: *const c_void, write: *mut c_void, count: i64, kind: Handle, op: Handle, comm: Handle, request: *mut Handle,
    );
    fn MPI_Ireduce_scatter_block_c(
        read: *const c_void, write: *mut c_void, count: i64, kind: Handle, op: Handle, comm: Handle, request: *mut Handle,
    );
    fn MPI_Iallgather_c(
        read: *const c_void, given: i64, kind: Handle, write: *mut c_void, got: i64, of: Handle, comm: Handle, request: *mut Handle,
    );
    fn MPI_Ialltoall_c(
        read: *const c_void, given: i64, kind: Handle, write: *mut c_void, got: i64, of: Handle, comm: Handle, request: *mut Handle,
    );
    fn MPI_Isend_c(read: *const c_void, given: i64, kind: Handle, to: c_int, tag: c_int, comm: Handle, request: *mut Handle);
    fn MPI_Irecv_c(write: *mut c_void, got: i64, kind: Handle, from: c_int, tag: c_int, comm: Handle, request: *mut Handle);
    fn MPI_Iallgatherv_c(
        read: *const c_void, given: i64, kind: Handle,
        write: *mut c_void, counts: *const i64, places: *const isize, of: Handle, comm: Handle, request: *mut Handle,
    );
}

/// # Safety
/// `T` is the function's type.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, String> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| format!("it has no function {name}"))
}

impl Table {
    /// The library's own words for a code.
    fn meaning(&self, code: c_int) -> String {
        let (mut text, mut length) = ([0u8; abi::MAX_ERROR_STRING], 0);
        // SAFETY: the library cuts its words to the room that the ABI demands.
        let told = unsafe { (self.MPI_Error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        match text.get(..length.max(0) as usize) {
            Some(text) if told == 0 => String::from_utf8_lossy(text).into_owned(),
            _ => "unknown to the library".into(),
        }
    }
}

/// Finds the library: the one that [`VARIABLE`] names, one that the system's loader knows, or one beside the first `mpirun` on `PATH`.
pub(super) fn find() -> Result<(Table, PathBuf)> {
    if let Some(path) = env::var_os(VARIABLE).map(PathBuf::from) {
        let table = load(&path).and_then(Table::bind);
        return match table {
            Ok(table) => Ok((table, path)),
            Err(error) => Err(failed(format!("{VARIABLE}={}: {error}", path.display()))),
        };
    }
    let mut problem = String::new();
    for path in NAMES.iter().map(PathBuf::from).chain(beside_mpirun()) {
        let table = match load(&path) {
            Ok(library) => Table::bind(library),
            // Names that the loader does not know are no news; a file that is there and does not open is.
            Err(_) if !path.is_file() => continue,
            Err(error) => Err(error),
        };
        match table {
            Ok(table) => return Ok((table, path)),
            Err(error) => problem = format!(" ({}: {error})", path.display()),
        }
    }
    Err(failed(format!(
        "no MPI library with the standard ABI, such as {}, was found by the loader or beside mpirun{problem}: `pip install mpich` brings \
         one, {VARIABLE} may name it",
        NAMES[0]
    )))
}

/// Files that may be the library of the `mpirun` that is first on `PATH`.
fn beside_mpirun() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mpirun = env::split_paths(&path).map(|folder| folder.join("mpirun")).find(|path| path.is_file());
    // It may be a link: both ends have libraries.
    let ends = mpirun.map(|path| [Some(path.clone()), path.canonicalize().ok()]).into_iter().flatten().flatten();
    let prefixes = ends.filter_map(|end| end.parent()?.parent().map(Path::to_owned));
    let paths = prefixes.flat_map(|prefix| NAMES.map(|name| prefix.join("lib").join(name)));
    paths.filter(|path| path.is_file()).collect()
}

/// Opens the library for as long as the process lives: it has threads and exit handlers of its own.
fn load(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: the file carries the name of an MPI library, or the user names it as one: its initialisers may run in any process.
    let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
    Ok(Box::leak(Box::new(library)))
}
