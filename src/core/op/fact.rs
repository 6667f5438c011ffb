//! Facts: the element type and the shape of a value, known before anything runs.

use crate::dtype::DType;
use crate::error::ensure;
use crate::shape::Shape;

/// The error is the reason why a row refuses a node: expected and found. The graph adds the node's name and operator.
pub type OpResult<T> = Result<T, String>;

/// Type and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// Element type.
    pub dtype: DType,
    /// Extents; named dims are bound.
    pub shape: Shape,
}

/// Upper bound of a value's bytes, extents of 0 left out. Below it no product of extents overflows.
const MAX_BYTES: usize = if usize::BITS < 64 { (1 << 31) - 1 } else { 1 << 46 };
/// Upper bound of the bytes of a constant that shapes and attributes alone determine. The host computes and holds it.
pub const MAX_MADE: usize = 1 << 30;

impl Fact {
    /// As many elements of the type that halves are computed in.
    pub fn unhalved(&self) -> Fact {
        Fact::new(self.dtype.unhalved(), self.shape.clone())
    }

    /// A value of this type and shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Fact {
        Fact { dtype, shape: shape.into() }
    }

    /// Bytes of the elements. The fact must be [countable](Self::countable).
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }

    /// Refuses a value that no memory holds. Every extent is checked here before it enters a graph.
    ///
    /// # Errors
    /// The fact, and the bound that it exceeds.
    pub fn countable(&self) -> OpResult<()> {
        let mut extents = self.shape.iter().filter(|&&extent| extent > 0);
        match extents.try_fold(self.dtype.size(), |n, &extent| n.checked_mul(extent).filter(|&n| n <= MAX_BYTES)) {
            Some(_) => Ok(()),
            None if self.shape.contains(&0) => Err(format!("{self} has extents larger than any memory")),
            None => Err(format!("{self} is larger than any memory")),
        }
    }

    /// Refuses a constant that is too large for the host to compute from shapes and attributes.
    ///
    /// # Errors
    /// Expected and found.
    pub fn makeable(&self) -> OpResult<()> {
        ensure(self.countable().is_ok() && self.bytes() <= MAX_MADE, || {
            format!("expected a constant of at most {MAX_MADE} bytes, found {self}")
        })
    }
}

impl std::fmt::Display for Fact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// A node of a graph, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

impl NodeId {
    /// The node of this number, which is below 2^32.
    #[allow(clippy::missing_panics_doc)]
    pub fn new(number: usize) -> NodeId {
        NodeId(u32::try_from(number).expect("a graph has fewer than 2^32 nodes"))
    }

    /// Its number.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// Its output of this number.
    pub fn output(self, port: usize) -> ValueId {
        ValueId { node: self, port: port as u32 }
    }
}

impl std::fmt::Display for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u32> for NodeId {
    fn from(number: u32) -> NodeId {
        NodeId(number)
    }
}

impl From<NodeId> for u32 {
    fn from(node: NodeId) -> u32 {
        node.0
    }
}

/// A value of a graph: output `port` of node `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId {
    /// The node that computes it.
    pub node: NodeId,
    /// The index of the output among the node's outputs.
    pub port: u32,
}
