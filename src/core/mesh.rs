//! Meshes: the ranks of a computation on several devices, in named axes.
//!
//! ```text
//! data=2,tensor=3      tensor 0  1  2
//!            data 0           0  1  2
//!                 1           3  4  5
//! ```
//! Ranks that differ in one axis alone are a group: they exchange data along it. The ranks of the last axis are neighbours.

use crate::error::{Error, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The axis of a mesh along which a graph is cut: each of its ranks computes one of the stages, one after another.
pub const STAGE: &str = "stage";

/// The most ranks of a mesh.
pub const MOST_RANKS: usize = 1 << 14;

/// Ranks in named axes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// The axes, the slowest first.
    axes: Vec<MeshAxis>,
}

/// An axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MeshAxis {
    /// Its name.
    pub name: String,
    /// The number of ranks along it: at least 1.
    pub ranks: usize,
}

impl Mesh {
    /// A mesh of these axes, the slowest first.
    ///
    /// # Errors
    /// When there is no axis, a name is empty or given twice, an axis has no rank, or there are too many ranks.
    pub fn new<N: Into<String>>(axes: impl IntoIterator<Item = (N, usize)>) -> Result<Mesh> {
        let axes: Vec<_> = axes.into_iter().map(|(name, ranks)| MeshAxis { name: name.into(), ranks }).collect();
        let fail = |what: String| Error::usage(format!("mesh: {what}"));
        ensure(!axes.is_empty(), || fail("expected an axis, such as data=2, found none".into()))?;
        for (at, MeshAxis { name, ranks }) in axes.iter().enumerate() {
            ensure(!name.is_empty(), || fail(format!("axis {at}: expected a name, found none")))?;
            ensure(axes[..at].iter().all(|other| other.name != *name), || {
                fail(format!("expected each axis once, found two axes '{name}'"))
            })?;
            ensure(*ranks > 0, || fail(format!("axis '{name}': expected at least one rank, found 0")))?;
        }
        let ranks = axes.iter().try_fold(1usize, |all, axis| all.checked_mul(axis.ranks));
        ensure(ranks.is_some_and(|ranks| ranks <= MOST_RANKS), || {
            fail(format!("expected at most {MOST_RANKS} ranks, found more"))
        })?;
        Ok(Mesh { axes })
    }

    /// A mesh from a text such as `data=2,tensor=4`.
    ///
    /// # Errors
    /// When the text is none, and as [`Mesh::new`].
    pub fn parse(text: &str) -> Result<Mesh> {
        let axis = |part: &str| {
            let (name, ranks) = part.split_once('=')?;
            Some((name.trim().to_owned(), ranks.trim().parse().ok()?))
        };
        let axes: Option<Vec<(String, usize)>> = text.split(',').map(axis).collect();
        let axes = axes.ok_or_else(|| {
            Error::usage(format!("mesh: expected axes with their ranks, such as data=2,tensor=4, found '{text}'"))
        })?;
        Mesh::new(axes)
    }

    /// The axes, the slowest first.
    pub fn axes(&self) -> &[MeshAxis] {
        &self.axes
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|axis| axis.ranks).product()
    }

    /// The ranks along each axis that has several: `2,4`; `1` if none has.
    pub fn extents(&self) -> String {
        let axes = self.axes.iter().filter(|axis| axis.ranks > 1).map(|axis| axis.ranks.to_string());
        let axes: Vec<_> = axes.collect();
        if axes.is_empty() { "1".into() } else { axes.join(",") }
    }

    /// The axis of this name, and its place among the axes.
    ///
    /// # Errors
    /// When there is none.
    pub fn axis(&self, name: &str) -> Result<(usize, &MeshAxis)> {
        self.axes.iter().enumerate().find(|(_, axis)| axis.name == name).ok_or_else(|| {
            let known: Vec<_> = self.axes.iter().map(|axis| &axis.name[..]).collect();
            Error::usage(format!("mesh '{self}': no axis '{name}'; its axes: {}", known.join(", ")))
        })
    }

    /// The distance of neighbours along an axis.
    fn stride(&self, axis: usize) -> usize {
        self.axes[axis + 1..].iter().map(|axis| axis.ranks).product()
    }

    /// The place of a rank along an axis.
    pub fn place(&self, rank: usize, axis: usize) -> usize {
        rank / self.stride(axis) % self.axes[axis].ranks
    }

    /// The stage that a rank computes.
    pub fn stage(&self, rank: usize) -> usize {
        self.axis(STAGE).map_or(0, |(axis, _)| self.place(rank, axis))
    }

    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.axis(STAGE).map_or(1, |(_, axis)| axis.ranks)
    }

    /// The ranks that compute a stage. They have one plan.
    pub fn ranks_of(&self, stage: usize) -> Vec<usize> {
        (0..self.ranks()).filter(|&rank| self.stage(rank) == stage).collect()
    }

    /// The group of a rank along an axis: the ranks that differ from it in this axis alone, and itself.
    pub fn group(&self, rank: usize, axis: usize) -> Vec<usize> {
        let stride = self.stride(axis);
        let first = rank - self.place(rank, axis) * stride;
        (0..self.axes[axis].ranks).map(|place| first + place * stride).collect()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<_> = self.axes.iter().map(|axis| format!("{}={}", axis.name, axis.ranks)).collect();
        f.write_str(&axes.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_the_last_axis_are_neighbours() {
        let mesh = Mesh::parse("data=2, tensor=3").expect("it is a mesh");
        assert_eq!(mesh.to_string(), "data=2,tensor=3");
        assert_eq!(mesh.ranks(), 6);
        assert_eq!((mesh.place(4, 0), mesh.place(4, 1)), (1, 1));
        assert_eq!((mesh.group(4, 0), mesh.group(4, 1)), (vec![1, 4], vec![3, 4, 5]));
    }

    #[test]
    fn a_mesh_says_what_it_is_not() {
        for (text, what) in [
            ("", "expected axes with their ranks, such as data=2,tensor=4, found ''"),
            ("data", "found 'data'"),
            ("data=0", "axis 'data': expected at least one rank, found 0"),
            ("data=2,data=2", "found two axes 'data'"),
            ("=2", "axis 0: expected a name"),
            ("data=16385", "expected at most 16384 ranks"),
        ] {
            let error = Mesh::parse(text).expect_err("it is none").to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
