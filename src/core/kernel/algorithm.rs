//! Algorithms as plain data: a kernel says what is computed, its [`Schedule`] says how.
//!
//! These types stand in plan files. [`super::schedule`] chooses and judges them; texts, library calls and loops obey them.

use super::call::Call;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

/// The algorithm that computes a kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "a plan has few kernels, and they are moved once")]
pub enum Schedule {
    /// None is chosen yet: the kernel is still being made.
    #[default]
    Open,
    /// A library computes it in one call.
    Library(Call),
    /// A text of `shaders/` computes it.
    Text(Text),
    /// Host threads compute it.
    Cpu(Cpu),
}

/// A text and the numbers that are printed in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Text {
    /// The index space is empty: nothing is launched.
    Nothing,
    /// Elements one by one, or several neighbours at a time.
    Elements(Elements),
    /// Reductions of rows.
    Rows(Rows),
    /// A product of matrices, of which the right one may be of numbers of few bits.
    Matmul {
        /// The axis from which on batch axes lengthen the rows.
        row_axis: usize,
        /// True if the columns serve as rows, `(a b)' = b' a'`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        transposed: bool,
        /// Its tiling.
        tiling: Tiling,
    },
    /// A convolution as a product of matrices.
    Conv {
        /// The order of the weights' axes in which patches lie 16 bytes at a time, if the text reads them so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        patches: Option<[usize; 4]>,
        /// Its tiling.
        tiling: Tiling,
    },
    /// A convolution, or a transposed one, by strips of results.
    ConvDirect(ConvDirect),
    /// A transposed convolution as a product of matrices.
    ConvTranspose {
        /// True if results that the same taps reach are a product of their own, rather than rows of one product for all.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_phase: bool,
        /// Its tiling.
        tiling: Tiling,
    },
    /// The gradient of a convolution by its filters as a product.
    ConvFilters {
        /// Its tiling.
        tiling: Tiling,
    },
    /// The gradient of a convolution by its filters, by strips of positions.
    FiltersDirect(FiltersDirect),
    /// Attention.
    Attention(Cut),
}

/// Elements per invocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Elements {
    /// One.
    One {
        /// Invocations of a workgroup.
        threads: u32,
    },
    /// Several neighbours, in CUDA C++.
    Vector {
        /// Neighbours that are moved at once.
        width: usize,
        /// Vectors per invocation, a workgroup apart.
        rounds: usize,
        /// Invocations of a workgroup.
        threads: u32,
    },
}

/// How invocations share rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Invocations of a workgroup exchange their partial results in workgroup memory.
    Lanes {
        /// Invocations per row.
        lanes: usize,
        /// Rows of a workgroup.
        rows: usize,
        /// True if neighbouring invocations are along the row, rather than across rows.
        along_row: bool,
        /// True if they exchange them within subgroups first. A workgroup has one row then.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        subgroups: bool,
    },
    /// Warps read rows several elements at a time, in CUDA C++. A row lies in stretches of elements side by side.
    Warps {
        /// Invocations per row.
        threads: usize,
        /// Rows of a workgroup.
        rows: usize,
        /// Neighbours that are moved at once.
        width: usize,
        /// True if the row stays in registers from the first reduction on, rather than being read again.
        held: bool,
    },
    /// An invocation reduces several neighbouring rows, whose elements lie side by side, in CUDA C++.
    Vectors {
        /// Invocations that share the elements of these rows.
        lanes: usize,
        /// Invocations side by side.
        across: usize,
        /// Neighbouring rows.
        width: usize,
    },
}

/// The text of a product, and the numbers in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tiling {
    /// At most four rows. Invocations share the inner axis.
    Gemv {
        /// Invocations that share it.
        slices: usize,
    },
    /// The same in WGSL, with four elements of the right operand at a time.
    GemvVec4 {
        /// Invocations that share the inner axis.
        slices: usize,
        /// True if the four elements are neighbours along the inner axis.
        along_k: bool,
    },
    /// The same in CUDA C++, with 16 bytes of the right operand at a time. A workgroup of warps that share the inner axis, if the 16
    /// bytes lie along it.
    GemvVec16b {
        /// Invocations of a workgroup.
        threads: usize,
        /// Invocations side by side, each with neighbouring columns; 0 if the 16 bytes lie along the inner axis.
        across: usize,
        /// Slices of the inner axis whose loads stand side by side in the text.
        unroll: usize,
    },
    /// Tiles through workgroup memory, 4 by 4 sums per invocation.
    Tiles {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Tiles of 128 by 128, 8 by 8 sums per invocation, in vectors of four.
    Large,
    /// The same in WGSL, with four elements of an operand at a time.
    LargeVec4 {
        /// True for the left and for the right operand, in this order, if they are read in vectors of four.
        vectors: [bool; 2],
        /// Slices of the inner axis that pass through workgroup memory at a time.
        step: usize,
    },
    /// Square tiles; groups of invocations share the inner axis.
    SliceK {
        /// Rows and columns of a tile.
        tile: usize,
        /// Slices of the inner axis that each group takes at a time.
        depth: usize,
    },
    /// 8 by 8 sums per invocation, for CUDA.
    Regs {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Tiles of 32 columns, whose inner axis warps share; operands are copied ahead, 16 bytes at a time.
    SliceKWarp {
        /// Rows of a tile.
        rows: usize,
    },
    /// Tensor cores, on 16-bit floats.
    Mma {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Tensor cores, on 16-bit floats that are copied to workgroup memory ahead.
    MmaAsync {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// The tensor cores of compute capability 9.0, on 16-bit floats that are copied to workgroup memory ahead.
    Wgmma,
    /// Tiles of products of bytes through workgroup memory, 4 by 4 sums per invocation.
    Bytes {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Products of bytes on tensor cores.
    BytesMma {
        /// Rows and columns of a tile.
        tile: [usize; 2],
    },
    /// Columns of numbers of few bits, each by a team of invocations that share the inner axis.
    Bits {
        /// Rows of the result: each number is widened once for them.
        rows: usize,
        /// Invocations of a workgroup.
        threads: usize,
    },
    /// The same on tensor cores, for 16-bit floats.
    BitsMma {
        /// Rows of the result: each number is widened once for them.
        rows: usize,
        /// Columns of the result: data are read once for them.
        columns: usize,
        /// Warps of a workgroup, which share the inner axis.
        warps: usize,
    },
}

/// A convolution computed directly, by strips of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConvDirect {
    /// Neighbouring channels of an invocation: 1, 2 or 4.
    pub channels: usize,
    /// The spatial axis along which strips lie.
    pub axis: usize,
    /// Results of a strip.
    pub results: usize,
    /// Neighbouring invocations whose channels lie side by side.
    pub lanes: usize,
    /// Invocations of a workgroup.
    pub threads: u32,
}

/// The gradient of a convolution by its filters computed directly, by strips of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FiltersDirect {
    /// The spatial axis along which strips lie.
    pub axis: usize,
    /// Positions of a strip.
    pub places: usize,
    /// True if an invocation has the taps along the other axes, too, rather than those of one of their points.
    pub all_taps: bool,
    /// Neighbouring invocations whose channels lie side by side.
    pub lanes: usize,
    /// Invocations of a workgroup.
    pub threads: u32,
}

/// How an attention is cut into workgroups, and what these hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Scores pass through workgroup memory.
    Shared(Shared),
    /// Parts of the scores of a few rows pass through workgroup memory, too.
    Decode(Decode),
    /// Sums are held in registers, four neighbours as one vector.
    Vec4(Vec4),
    /// Scores and sums are held in registers.
    Regs(Regs),
    /// The same on tensor cores.
    Mma(Mma),
}

/// A workgroup whose scores pass through its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shared {
    /// Rows of the result.
    pub rows: usize,
    /// Keys at a time.
    pub columns: usize,
    /// Invocations that share a row.
    pub lanes: usize,
}

/// The cut of an attention of few rows for a workgroup of 256 invocations, in vectors of four: `attention_decode` in WGSL,
/// `attention_decode_vec16b` in CUDA C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Decode {
    /// Rows of the result.
    pub rows: usize,
    /// Keys at a time.
    pub columns: usize,
    /// Invocations that share a key.
    pub lanes: usize,
    /// Places for vectors of a row of values.
    pub across: usize,
    /// Workgroups that share the rows, each with keys of its own.
    pub cluster: usize,
    /// True for keys and for values, in this order, if they are read in vectors of four.
    pub vectors: [bool; 2],
}

/// The cut of an attention for a workgroup of 128 invocations, in vectors of four.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Vec4 {
    /// Rows of the result.
    pub rows: usize,
    /// Invocations that share a row; each has four keys of it at a time.
    pub lanes: usize,
    /// True if values have a place of their own in workgroup memory, rather than that of the keys.
    pub split: bool,
}

/// The cut of an attention for a workgroup whose invocations hold scores and sums in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Regs {
    /// Rows of the result.
    pub rows: usize,
    /// Keys at a time.
    pub columns: usize,
    /// Workgroups that share these rows, each with keys of its own.
    pub cluster: usize,
}

/// How an attention of 16-bit floats is shared among the warps of a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mma {
    /// Rows of the result.
    pub rows: usize,
    /// Rows of a warp, in multiples of 16.
    pub each: usize,
    /// Warps that share these rows, each with keys of its own.
    pub teams: usize,
    /// Keys of a team at a time.
    pub columns: usize,
    /// Stripes of keys and values in workgroup memory: the one in use, and those on their way.
    pub stages: usize,
    /// Workgroups that share the rows, each with keys of its own.
    pub cluster: usize,
}

/// The way of a kernel on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cpu {
    /// Loops over the index space, cut among threads as they come.
    Loops,
    /// A product of matrices, in blocks.
    Matmul {
        /// Threads that share it.
        threads: u32,
    },
    /// A convolution.
    Conv {
        /// The way of the convolution, which says which operand of a product the weights are.
        way: Way,
        /// Threads that share it.
        threads: u32,
    },
    /// A transposed convolution, or a pooling.
    Window {
        /// Threads that share it.
        threads: u32,
    },
    /// Attention, in strips of rows.
    Attention {
        /// Rows whose scores are held at a time.
        strip: usize,
        /// Threads that share it.
        threads: u32,
    },
    /// The order of groups, each by one thread.
    Sort {
        /// Threads that share them.
        threads: u32,
    },
}

/// How a convolution is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Plane by plane: each group has one input channel.
    Depthwise,
    /// As a product. The weights are its left operand.
    WeightsLeft,
    /// As a product. The weights are its right operand.
    WeightsRight,
    /// As one product over all images, whose operands are cut out of memory.
    WholeBatch,
}

impl Schedule {
    /// The numbers of the algorithm, each after its name. Of a library call, its operation, element type and epilogue.
    pub fn numbers(&self) -> String {
        match self {
            Schedule::Open => String::new(),
            Schedule::Library(call) => call.to_string(),
            Schedule::Text(text) => words(&json!(text), false).join(" "),
            Schedule::Cpu(cpu) => words(&json!(cpu), false).join(" "),
        }
    }
}

impl fmt::Display for Schedule {
    /// The names and numbers of the algorithm, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Open => f.write_str("open"),
            Schedule::Library(call) => f.write_str(call.library()),
            Schedule::Text(text) => f.write_str(&words(&json!(text), true).join(" ")),
            Schedule::Cpu(cpu) => f.write_str(&words(&json!(cpu), true).join(" ")),
        }
    }
}

/// The fields of a value that are no objects themselves, each after its name, and with `names` the names of the objects. A flag is named
/// only if it is set.
fn words(value: &Value, names: bool) -> Vec<String> {
    let Value::Object(fields) = value else {
        return value.as_str().filter(|_| names).map(str::to_owned).into_iter().collect();
    };
    let field = |(name, value): (&String, &Value)| match value {
        Value::Object(_) => [name.clone()].into_iter().filter(|_| names).chain(words(value, names)).collect(),
        Value::Bool(false) | Value::Null => Vec::new(),
        Value::Bool(true) => vec![name.clone()],
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(Value::to_string).collect();
            vec![format!("{name} {}", values.join(if value[0].is_boolean() { "," } else { "x" }))]
        }
        Value::String(text) => vec![text.clone()],
        Value::Number(number) => vec![format!("{name} {number}")],
    };
    fields.iter().flat_map(field).collect()
}
