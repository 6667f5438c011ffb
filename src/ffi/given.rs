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
pub(super) fn told(out: Out<*mut c_char>, error: Fail, make: impl FnOnce() -> Result<String>) -> c_int {
    give(out, ptr::null_mut(), error, || Ok(text(make()?).into_raw()))
}

/// Closes a handle.
pub(super) fn close<T>(handle: Option<Box<T>>) {
    // What fails while something is freed has nobody to tell.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
}
