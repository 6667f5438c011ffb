//! What C gives, and what it gets: pointers that are checked, results, and the guard that catches panics.
//!
//! The types are pointers to C. They are made at the door alone, where a caller keeps the header's word: what is not NULL points to what the
//! header says for as long as the call lasts. So the functions behind them need no `unsafe`: all of the door's is here.

use super::{PLIMSOLL_OK, plimsoll_error};
use crate::backend::Place;
use crate::error::{Error, Result, bug};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Where a result goes.
pub(super) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Where an error goes, if the caller wants it.
pub(super) type Fail<'a> = Out<'a, *mut plimsoll_error>;

/// A text of the caller, or NULL.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// The text, if it is not NULL.
    pub fn optional(&self, what: &str) -> Result<Option<&str>> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: the header's word: it ends in a zero byte, and lasts as long as the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|e| Error::usage(format!("{what}: expected UTF-8: {e}")))?;
        Ok(Some(text))
    }

    /// The text.
    pub fn text(&self, what: &str) -> Result<&str> {
        self.optional(what)?.ok_or_else(|| Error::usage(format!("{what}: expected a text, found NULL")))
    }

    /// The text, or another one.
    pub fn or<'a>(&'a self, what: &str, other: &'a str) -> Result<&'a str> {
        Ok(self.optional(what)?.unwrap_or(other))
    }

    /// The text, or an empty one.
    pub fn or_empty(&self, what: &str) -> Result<&str> {
        self.or(what, "")
    }
}

/// The first of some values of the caller, or NULL.
#[repr(transparent)]
pub struct List<T>(*const T);

impl<T> List<T> {
    /// So many values.
    pub fn of(&self, count: usize, what: &str) -> Result<&[T]> {
        if count == 0 {
            return Ok(&[]);
        }
        slice(self.0, count, what)
    }
}

/// The first of some places of the caller for values, or NULL.
#[repr(transparent)]
pub struct Places<T>(*mut T);

impl<T> Places<T> {
    /// So many places.
    pub fn of<'a>(self, count: usize, what: &str) -> Result<&'a mut [MaybeUninit<T>]> {
        if count == 0 {
            return Ok(&mut []);
        }
        slice(self.0.cast::<MaybeUninit<T>>().cast_const(), count, what)?;
        // SAFETY: as of `slice`, and the header's word is that they may be written.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), count) })
    }
}

/// So many values behind a pointer of the caller, or why there are none.
fn slice<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    let bytes = count.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    let fault = match () {
        () if pointer.is_null() => format!("found NULL for {count}"),
        () if !pointer.is_aligned() => format!("found an address that is no multiple of {}", align_of::<T>()),
        () if bytes.is_none() => format!("found {count}, more than any memory has"),
        // SAFETY: it is not NULL and aligned, and the header's word is that so many values lie there.
        () => return Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    };
    Err(Error::usage(format!("{what}: expected the address of the first: {fault}")))
}

/// Memory of the caller that an input is read from.
pub(super) fn bytes<'a>(pointer: *const u8, bytes: usize, what: &str) -> Result<&'a [u8]> {
    if bytes == 0 { Ok(&[]) } else { slice(pointer, bytes, what) }
}

/// Memory of the caller that is written. Nobody else uses it for as long as the result lives.
pub(super) fn bytes_mut<'a>(pointer: *mut u8, bytes: usize, what: &str) -> Result<&'a mut [u8]> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    slice(pointer.cast_const(), bytes, what)?;
    // SAFETY: as of `slice`, and the header's word is that it may be written.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, bytes) })
}

/// Memory of a CUDA device.
pub(super) fn cuda<'a>(pointer: *const c_void, bytes: usize) -> Place<'a> {
    // SAFETY: the header's word: nobody frees or writes it while the run uses it.
    unsafe { Place::cuda(pointer.addr() as u64, bytes as u64) }
}

/// Frees a text that was given away.
pub(super) fn free_text(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: all such texts are of `CString::into_raw`, and are freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// What an address of a list leads to.
pub(super) fn listed<'a, T>(handle: *const T) -> Option<&'a T> {
    // SAFETY: the header's word: it is NULL or a handle that is open.
    unsafe { handle.as_ref() }
}

/// A handle.
pub(super) fn handle<'a, T>(handle: Option<&'a T>, what: &str) -> Result<&'a T> {
    handle.ok_or_else(|| Error::usage(format!("expected {what}, found NULL")))
}

/// A text for C, which ends at a zero byte: those within become spaces.
pub(super) fn text(text: String) -> CString {
    CString::new(text.replace('\0', " ")).expect("it has no zero byte")
}

/// Where a text goes.
pub(super) type OutText<'a> = Out<'a, *mut c_char>;

/// What is told of a handle that is NULL: 0, or NULL.
pub(super) trait OfNull {
    const OF_NULL: Self;
}

impl OfNull for c_int {
    const OF_NULL: c_int = 0;
}

impl OfNull for u64 {
    const OF_NULL: u64 = 0;
}

impl OfNull for usize {
    const OF_NULL: usize = 0;
}

impl<T> OfNull for *const T {
    const OF_NULL: *const T = ptr::null();
}

/// The functions of C, one after another. They are written without what all have: the handle that must not be NULL, the place of the result,
/// that of the error, which is the last, and the code that is returned.
///
/// ```text
/// fn plimsoll_model_open(path: Text) -> model: plimsoll_model { .. }             a handle goes to the place `model`: `Result<plimsoll_model>`
/// fn plimsoll_plan_json(plan: &plimsoll_plan) -> json: String { .. }             a text goes to the place `json`: `Result<String>`
/// fn plimsoll_tensor_port(..) -> port: plimsoll_port or NO_PORT { .. }           a value, or NO_PORT where it fails: `Result<plimsoll_port>`
/// fn plimsoll_plan_check(plan: &plimsoll_plan) { .. }                            nothing but the code: `Result<()>`
/// fn plimsoll_plan_bytes(plan: &plimsoll_plan) -> u64 { .. }                     what cannot fail: 0 or NULL of NULL
/// fn plimsoll_plan_close(plan: Box<plimsoll_plan>);                              closes
/// ```
///
/// `tests/it/ffi.rs` reads them, too, and writes the header.
macro_rules! doors {
    () => {};
    ($(#[$doc:meta])* fn $name:ident($own:ident: Box<$of:ty>); $($rest:tt)*) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($own: Option<Box<$of>>) {
            $crate::ffi::given::close($own);
        }
        doors! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident($own:ident: &$of:ty) -> $result:ty $work:block $($rest:tt)*) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($own: Option<&$of>) -> $result {
            $own.map_or($crate::ffi::given::OfNull::OF_NULL, |$own| $work)
        }
        doors! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident $given:tt $work:block $($rest:tt)*) => {
        doors! { @ [$(#[$doc])*] $name $given [] done() $work }
        doors! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident $given:tt -> $out:ident: String $work:block $($rest:tt)*) => {
        doors! { @ [$(#[$doc])*] $name $given [$out: $crate::ffi::given::OutText,] told($out,) $work }
        doors! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident $given:tt -> $out:ident: $of:ident $work:block $($rest:tt)*) => {
        doors! { @ [$(#[$doc])*] $name $given [$out: $crate::ffi::given::Out<*mut $of>,] made($out,) $work }
        doors! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident $given:tt -> $out:ident: $of:ident or $none:ident $work:block $($rest:tt)*) => {
        doors! { @ [$(#[$doc])*] $name $given [$out: $crate::ffi::given::Out<$of>,] give($out, $none,) $work }
        doors! { $($rest)* }
    };
    (@ [$($doc:tt)*] $name:ident($own:ident: &$of:ty $(, $more:ident: $type:ty)* $(,)?) $out:tt $($work:tt)*) => {
        doors! {
            @@ [$($doc)*] $name [$own: Option<&$of>, $($more: $type,)*] $out
            { let $own = $crate::ffi::given::handle($own, concat!("a ", stringify!($own)))?; } $($work)*
        }
    };
    (@ [$($doc:tt)*] $name:ident($($more:ident: $type:ty),* $(,)?) $out:tt $($work:tt)*) => {
        doors! { @@ [$($doc)*] $name [$($more: $type,)*] $out {} $($work)* }
    };
    (@@ [$($doc:tt)*] $name:ident [$($given:tt)*] [$($out:tt)*] {$($own:tt)*} $way:ident($($with:tt)*) $work:block) => {
        $($doc)*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($given)* $($out)* error: $crate::ffi::given::Fail) -> std::ffi::c_int {
            $crate::ffi::given::$way($($with)* error, || { $($own)* $work })
        }
    };
}
pub(super) use doors;

/// Does the work of a function. All of them go through here: a panic is an error, as any other.
pub(super) fn done(mut error: Fail, work: impl FnOnce() -> Result<()>) -> c_int {
    if let Some(error) = &mut error {
        error.write(ptr::null_mut());
    }
    let found = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return PLIMSOLL_OK,
        Ok(Err(error)) => plimsoll_error::new(&error),
        Err(panic) => plimsoll_error::bug(bug(&*panic)),
    };
    let code = found.code;
    if let Some(error) = error {
        error.write(Box::into_raw(Box::new(found)));
    }
    code
}

/// Gives a value to the caller, or another one if there is none.
pub(super) fn give<T>(out: Out<T>, none: T, error: Fail, make: impl FnOnce() -> Result<T>) -> c_int {
    done(error, || {
        let out = out.ok_or_else(|| Error::usage("expected a place for the result, found NULL".to_owned()))?;
        out.write(none);
        out.write(make()?);
        Ok(())
    })
}

/// Gives a handle to the caller.
pub(super) fn made<T>(out: Out<*mut T>, error: Fail, make: impl FnOnce() -> Result<T>) -> c_int {
    give(out, ptr::null_mut(), error, || Ok(Box::into_raw(Box::new(make()?))))
}

/// Gives a text to the caller.
pub(super) fn told(out: OutText, error: Fail, make: impl FnOnce() -> Result<String>) -> c_int {
    give(out, ptr::null_mut(), error, || Ok(text(make()?).into_raw()))
}

/// Closes a handle.
pub(super) fn close<T>(handle: Option<Box<T>>) {
    // What fails while something is freed has nobody to tell.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
}
