//! Memory of the host program that is no segment: where inputs come from, and where outputs go to.

use plimsoll_core::error::{Error, Result};
use plimsoll_core::target::Target;

/// Memory of the caller that holds an input or takes an output: the elements in row-major order, in the type that the plan names.
///
/// Bytes on a device are copied there. The caller's own work on such memory has to be over when the run begins; the run's is over when it
/// returns.
#[derive(Debug)]
pub struct Place<'a>(#[doc(hidden)] pub Kind<'a>);

/// Where a place is.
#[derive(Debug)]
pub enum Kind<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
    Device(Outside),
}

impl<'a> Place<'a> {
    /// Bytes of the host, for an input.
    pub fn bytes(bytes: &'a [u8]) -> Place<'a> {
        Place(Kind::Read(bytes))
    }

    /// Bytes of the host, for an output.
    pub fn bytes_mut(bytes: &'a mut [u8]) -> Place<'a> {
        Place(Kind::Write(bytes))
    }

    /// Memory of the CUDA device that runs, by its address and its length in bytes. A run waits for what the default stream holds when it
    /// begins, and for no other stream that was made not to wait for it.
    ///
    /// # Safety
    /// Nobody frees the memory, or writes it, while a run uses it.
    pub unsafe fn cuda(pointer: u64, bytes: u64) -> Place<'a> {
        Place(Kind::Device(Outside::Cuda { pointer, bytes }))
    }

    /// A part of a buffer of the wgpu device that runs: `bytes` bytes from `offset` on, both multiples of 4.
    #[cfg(feature = "wgpu")]
    pub fn wgpu(buffer: &::wgpu::Buffer, offset: u64, bytes: u64) -> Place<'a> {
        Place(Kind::Device(Outside::Wgpu { buffer: buffer.clone(), offset, bytes }))
    }

    #[doc(hidden)]
    pub fn length(&self) -> u64 {
        match &self.0 {
            Kind::Read(bytes) => bytes.len() as u64,
            Kind::Write(bytes) => bytes.len() as u64,
            Kind::Device(outside) => outside.bytes(),
        }
    }

    #[doc(hidden)]
    pub fn device(&self) -> Option<&Outside> {
        if let Kind::Device(outside) = &self.0 { Some(outside) } else { None }
    }
}

/// Memory of the host program on a device.
#[derive(Clone, Debug)]
pub enum Outside {
    /// Memory of a CUDA device, by its address.
    Cuda {
        /// The address.
        pointer: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// A part of a wgpu buffer.
    #[cfg(feature = "wgpu")]
    Wgpu {
        /// The buffer.
        buffer: ::wgpu::Buffer,
        /// Bytes from its start.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

impl Outside {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Outside::Cuda { bytes, .. } => *bytes,
            #[cfg(feature = "wgpu")]
            Outside::Wgpu { bytes, .. } => *bytes,
        }
    }

    /// The address and the length of CUDA's memory.
    pub fn cuda(&self) -> Option<(u64, u64)> {
        match self {
            Outside::Cuda { pointer, bytes } => Some((*pointer, *bytes)),
            #[cfg(feature = "wgpu")]
            Outside::Wgpu { .. } => None,
        }
    }

    /// True if both have a byte in common.
    pub fn overlaps(&self, other: &Outside) -> bool {
        let meet = |a: u64, b: u64| {
            a < b.saturating_add(other.bytes()) && b < a.saturating_add(self.bytes()) && self.bytes() > 0
        };
        match (self, other) {
            (Outside::Cuda { pointer: a, .. }, Outside::Cuda { pointer: b, .. }) => meet(*a, *b),
            #[cfg(feature = "wgpu")]
            (Outside::Wgpu { buffer: a, offset, .. }, Outside::Wgpu { buffer: b, offset: from, .. }) => {
                a == b && meet(*offset, *from)
            }
            #[cfg(feature = "wgpu")]
            _ => false,
        }
    }

    pub fn refused(&self, target: &Target) -> Error {
        let whose = match self {
            Outside::Cuda { .. } => "CUDA memory",
            #[cfg(feature = "wgpu")]
            Outside::Wgpu { .. } => "a wgpu buffer",
        };
        Error::usage(format!("{whose} is no memory of '{}'", target.name))
    }
}

/// Where an array of a run lies, before anybody reads or writes it.
#[derive(Clone, Copy, Debug)]
pub struct Lies<'a> {
    /// The name of the input or the output.
    pub name: &'a str,
    /// True for memory of a device, whose addresses are its own.
    pub on_device: bool,
    /// The address of its first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Lies<'_> {
    fn overlaps(&self, other: &Lies) -> bool {
        let ends = |of: &Lies| of.address.saturating_add(of.bytes);
        let is_there = self.bytes > 0 && other.bytes > 0;
        is_there && self.on_device == other.on_device && self.address < ends(other) && other.address < ends(self)
    }
}

/// Refuses outputs that overlap an input or each other: what is written may be seen by nobody else.
///
/// # Errors
/// The names of both.
pub fn apart<'a, O>(inputs: impl Iterator<Item = Lies<'a>> + Clone, outputs: O) -> Result<()>
where
    O: Iterator<Item = Lies<'a>> + Clone,
{
    for (at, output) in outputs.clone().enumerate() {
        let mut others = inputs.clone().chain(outputs.clone().take(at));
        if let Some(other) = others.find(|other| output.overlaps(other)) {
            let what = format!("output '{}': its place overlaps that of '{}'", output.name, other.name);
            return Err(Error::usage(what));
        }
    }
    Ok(())
}
