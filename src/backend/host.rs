//! Memory of the host from which devices copy.

use plimsoll_core::error::{Error, Result};
use std::fmt::Debug;

/// Bytes of the host, and whoever gives them back.
pub trait HostMemory: AsRef<[u8]> + AsMut<[u8]> + Debug + Send + Sync {}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Debug + Send + Sync> HostMemory for T {}

/// Zero bytes of the host for what the error names.
///
/// # Errors
/// When the host has not so many.
pub fn host_memory(bytes: u64, what: &str) -> Result<Vec<u8>> {
    let refused = || Error::Memory { what: what.into(), needed: bytes, file: None };
    let len = usize::try_from(bytes).map_err(|_| refused())?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(len).map_err(|_| refused())?;
    memory.resize(len, 0);
    Ok(memory)
}
