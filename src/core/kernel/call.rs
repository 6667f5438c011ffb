//! Calls of cuBLASLt and cuDNN, in plain data.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A library call that computes a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// cuBLASLt.
    MatMul(MatMul),
    /// cuDNN.
    Conv(Conv),
    /// cuDNN.
    Attention(Attention),
}

/// One of a library's algorithms for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibraryAlgorithm {
    /// Its place in the library's list. The list begins with the algorithm that the library expects to be fastest.
    pub rank: u32,
    /// Bytes of workspace within which all algorithms of the list run.
    pub workspace: u64,
}

/// A batch of column-major products: `D = activation(alpha * A B + C + bias)`, accumulated in `f32` (`f64` where operands are).
///
/// A row-major result is the column-major one of the transposed problem, so `a` is the kernel's second operand then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatMul {
    /// Rows of A and D.
    pub m: u64,
    /// Columns of B and D.
    pub n: u64,
    /// Columns of A, rows of B.
    pub k: u64,
    /// Number of products.
    pub batch: u64,
    /// The left operand, `[m, k]`.
    pub a: Matrix,
    /// The right operand, `[k, n]`.
    pub b: Matrix,
    /// The matrix that is added, `[m, n]`. Its layout is that of `d`, and it may be the very same bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c: Option<Matrix>,
    /// The result, `[m, n]`; its `slot` is that of the kernel's write.
    pub d: Matrix,
    /// Factor of the product.
    pub alpha: f64,
    /// `m` elements of D's type, one per row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// The function that is applied last.
    pub activation: Activation,
    /// True if `f32` operands may be rounded to TF32.
    pub tf32: bool,
    /// The algorithm. `None` for the first of the library's list within the workspace that the kernel has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<LibraryAlgorithm>,
}

impl MatMul {
    /// Bytes of the partial sums of sixteen shares of the inner axis.
    fn partial_sums(&self) -> u64 {
        let elements = self.batch.saturating_mul(self.m).saturating_mul(self.n);
        elements.saturating_mul(64).checked_next_multiple_of(256).unwrap_or(u64::MAX)
    }

    /// The number of square tiles of `size` rows and columns in the results.
    pub(crate) fn tiles(&self, size: u64) -> u64 {
        self.batch.saturating_mul(self.m.div_ceil(size)).saturating_mul(self.n.div_ceil(size))
    }
}

/// A column-major matrix among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Index of the argument among those of the launch.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// True if the stored matrix is the transpose of the operand.
    pub transposed: bool,
    /// Elements from one column of the stored matrix to the next.
    pub leading: u64,
    /// Elements from one matrix of the batch to the next; 0 if all are the same.
    pub stride: u64,
}

impl Matrix {
    /// The alignment of every matrix's address if the buffer's address is a multiple of 256: a power of two, at most 256.
    pub fn alignment(&self) -> u32 {
        let steps = (self.offset | self.stride).wrapping_mul(self.dtype.size() as u64);
        1 << steps.trailing_zeros().min(8)
    }
}

/// Elements one after another among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vector {
    /// Index of the argument among those of the launch.
    pub slot: usize,
    /// First element.
    pub offset: u64,
}

/// The function that a call applies to its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(x, 0)`.
    Relu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// A convolution: `y = activation(conv(x, w) + residual + bias)`, accumulated in `f32`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv {
    /// True for the gradient by the data: `x` is written, of the gradient `y`. Nothing is added to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub backward: bool,
    /// Channel groups.
    pub groups: u64,
    /// Steps between windows, per spatial axis (two of them, or three).
    pub strides: Vec<u64>,
    /// Steps between elements of a window.
    pub dilations: Vec<u64>,
    /// Padding at both ends of each axis.
    pub pads: Vec<u64>,
    /// `[n, c, spatial..]`.
    pub x: Image,
    /// `[o, c / groups, spatial..]`.
    pub w: Image,
    /// `[n, o, spatial..]`.
    pub y: Image,
    /// One element of the result's type per output channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// The tensor that is added. It shares no bytes with the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual: Option<Image>,
    /// [`Activation::None`] or [`Activation::Relu`].
    pub activation: Activation,
    /// True if the channels of a position lie one after another, in images and in weights. Else each tensor is row-major.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
    /// True if `f32` operands may be rounded to TF32.
    pub tf32: bool,
    /// The algorithm. `None` for the first of the library's list within the workspace that the kernel has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<LibraryAlgorithm>,
}

impl Conv {
    /// True if tensor cores take the operands in their layout.
    pub(crate) fn suits_tensor_cores(&self) -> bool {
        let channels = if self.backward { self.w.dims[0] | self.w.dims[1] } else { self.w.dims[1] };
        self.channels_last && channels.is_multiple_of(8)
    }
}

/// An attention: `o = softmax(scale * q k^T) v`, summed in `f32`. Each operand is `[batch, heads, rows, columns]`; heads of keys and values may be
/// fewer, each of as many neighbouring ones of queries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Queries.
    pub q: Image,
    /// Keys.
    pub k: Image,
    /// Values.
    pub v: Image,
    /// The result.
    pub o: Image,
    /// Factor of the scores.
    pub scale: f32,
    /// True if a query sees the keys up to its own place alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub causal: bool,
}

/// A tensor among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Index of the argument among those of the launch.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// Extents.
    pub dims: Vec<u64>,
    /// Elements from index to index, per axis.
    pub strides: Vec<u64>,
}

impl Image {
    fn elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

const MIB: u64 = 1 << 20;
/// Bytes within which cuDNN has a fast algorithm for gradients of 16-bit floats by the data.
const BACKWARD: u64 = 8 * MIB;

/// Bytes of workspace for cuDNN's attention. Version 9.19 asks for 256 at any length, and 9.14 for no more than this. A plan of the library that
/// asks for more is not taken.
const ATTENTION: u64 = 4 << 10;

/// About four times the multiprocessors of a large device. With fewer tiles, the last turn leaves many of them idle. BERT-base's products
/// of 192 tiles take 2 % longer on an H200 without a workspace.
const MANY_TILES: u64 = 512;

impl Call {
    /// The name of the library.
    pub fn library(&self) -> &'static str {
        match self {
            Call::MatMul(_) => "cuBLASLt",
            Call::Conv(_) | Call::Attention(_) => "cuDNN",
        }
    }

    /// The algorithm, if the call names one.
    pub fn algorithm(&self) -> Option<LibraryAlgorithm> {
        match self {
            Call::MatMul(p) => p.algorithm,
            Call::Conv(c) => c.algorithm,
            Call::Attention(_) => None,
        }
    }

    /// True if the library has algorithms for it, from which one can be named.
    pub fn has_algorithms(&self) -> bool {
        !matches!(self, Call::Attention(_))
    }

    /// The same call by another algorithm.
    pub fn by(mut self, algorithm: Option<LibraryAlgorithm>) -> Call {
        match &mut self {
            Call::MatMul(p) => p.algorithm = algorithm,
            Call::Conv(c) => c.algorithm = algorithm,
            Call::Attention(_) => {}
        }
        self
    }

    /// The most bytes of workspace that the call can use. This is a rule, so planning needs no library. An algorithm that wants more than
    /// it is given is not chosen.
    ///
    /// For products NVIDIA recommends 32 MiB from Hopper on. Splitting the inner axis needs a multiple of the result.
    pub fn workspace(&self) -> u64 {
        if let Some(algorithm) = self.algorithm() {
            return algorithm.workspace;
        }
        match self {
            Call::MatMul(p) => p.partial_sums().clamp(MIB, 32 * MIB),
            Call::Conv(c) => {
                let bytes = [&c.x, &c.w, &c.y].map(|t| t.elements().saturating_mul(t.dtype.size() as u64));
                bytes.into_iter().fold(0, u64::saturating_add).clamp(MIB, 64 * MIB).next_multiple_of(256)
            }
            Call::Attention(_) => ATTENTION,
        }
    }

    /// Bytes of workspace without which the call does not run, or would be very slow.
    pub fn least_workspace(&self) -> u64 {
        match self {
            Call::MatMul(_) if self.algorithm().is_none() => 64 << 10,
            _ => self.wanted_workspace(),
        }
    }

    /// Bytes of workspace with which the call is about as fast as with all that it can use.
    ///
    /// Products of few tiles share the inner axis among all multiprocessors, each of which leaves a tile of `f32` there. Products of many
    /// tiles keep all multiprocessors busy without that. Convolutions of `f32` have algorithms that need almost no workspace. So have those
    /// of 16-bit floats whose channels come last and are a multiple of 8. Other convolutions of 16-bit floats transpose images in the workspace.
    pub fn wanted_workspace(&self) -> u64 {
        if let Some(algorithm) = self.algorithm() {
            return algorithm.workspace;
        }
        match self {
            Call::MatMul(p) if p.tiles(128) >= MANY_TILES => 64 << 10,
            Call::MatMul(p) => p.partial_sums().clamp(64 << 10, 8 * MIB),
            Call::Conv(c) if c.backward => self.workspace().min(BACKWARD),
            Call::Conv(c) if c.x.dtype.size() == 2 && !c.suits_tensor_cores() => self.workspace(),
            Call::Conv(_) => MIB,
            Call::Attention(_) => ATTENTION,
        }
    }

    /// The read whose bytes the result may take. The call reads each of its elements before it writes it.
    pub fn in_place(&self) -> Option<usize> {
        match self {
            Call::MatMul(p) => p.c.as_ref().map(|c| c.slot),
            Call::Conv(_) | Call::Attention(_) => None,
        }
    }
}

impl fmt::Display for Call {
    /// The operation, the type of its operands, the parts of its epilogue and the algorithm, but no sizes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, dtype, tf32, adds, bias, activation) = match self {
            Call::MatMul(p) => ("matmul", p.a.dtype, p.tf32, p.c.is_some(), p.bias.is_some(), p.activation),
            Call::Conv(c) if c.backward => ("conv by data", c.x.dtype, c.tf32, false, false, c.activation),
            Call::Attention(a) => {
                let causal = if a.causal { " causal" } else { "" };
                return write!(f, "attention {}{causal}", a.q.dtype);
            }
            Call::Conv(c) => ("conv", c.x.dtype, c.tf32, c.residual.is_some(), c.bias.is_some(), c.activation),
        };
        write!(f, "{name} {dtype}")?;
        let (relu, gelu) = (activation == Activation::Relu, activation == Activation::GeluTanh);
        let parts = [("tf32", tf32), ("add", adds), ("bias", bias), ("relu", relu), ("gelu_tanh", gelu)];
        parts.into_iter().filter(|(_, is)| *is).try_for_each(|(part, _)| write!(f, " {part}"))?;
        self.algorithm().map_or(Ok(()), |algorithm| write!(f, " rank {}", algorithm.rank))
    }
}
