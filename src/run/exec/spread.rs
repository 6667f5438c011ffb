//! Values of which each rank of a mesh has a part: where a part lies in the whole, and the whole of all parts.

use crate::backend::ranks::Ranks;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::plan::Shard;
use crate::shape::{Access, Shape, indices};
use crate::tensor::Tensor;
use std::sync::Arc;

/// How a value is split.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    ranks: Arc<dyn Ranks>,
    /// The dims that are split, each with the number of an axis of the mesh.
    dims: Vec<(usize, usize)>,
}

impl Spread {
    /// How the value of this name is split, if it is.
    pub(crate) fn of(name: &str, shards: &[Shard], ranks: &Arc<dyn Ranks>) -> Option<Spread> {
        let own = shards.iter().filter(|shard| shard.name == name);
        let dims: Vec<_> = own.filter_map(|shard| Some((shard.dim, ranks.mesh().axis(&shard.axis).ok()?.0))).collect();
        (!dims.is_empty()).then(|| Spread { ranks: Arc::clone(ranks), dims })
    }

    fn mesh(&self) -> &Mesh {
        self.ranks.mesh()
    }

    /// The shape of the whole.
    pub(crate) fn whole(&self, part: &Shape) -> Shape {
        let mut whole = part.clone();
        self.dims.iter().for_each(|&(dim, axis)| whole[dim] *= self.mesh().axes()[axis].ranks);
        whole
    }

    /// Where a rank's part lies in the whole.
    fn part(&self, whole: &Shape, rank: usize) -> Access {
        let mut access = Access::contiguous(whole.clone());
        for &(dim, axis) in &self.dims {
            let each = access.shape[dim] / self.mesh().axes()[axis].ranks;
            access = access.slice(dim, self.mesh().place(rank, axis) * each, 1, each);
        }
        access
    }

    /// This rank's part of a tensor that has the shape of the whole.
    pub(crate) fn own(&self, whole: &Tensor) -> Tensor {
        whole.gather(&self.part(whole.shape(), self.ranks.rank()))
    }

    /// The whole of the parts that all ranks give.
    ///
    /// # Errors
    /// When a rank is gone or late.
    pub(crate) fn gathered(&self, part: &Tensor) -> Result<Tensor> {
        let (whole, size) = (self.whole(part.shape()), part.dtype().size());
        let mut bytes = vec![0; whole.numel() * size];
        // What lies behind the last dim that is split follows one another.
        let last = self.dims.iter().map(|&(dim, _)| dim).max().unwrap_or(0);
        let (outer, run) = (Shape::new(&part.shape()[..last]), part.shape()[last..].iter().product::<usize>() * size);
        for (rank, given) in self.ranks.gather(part.bytes())?.iter().enumerate() {
            let access = self.part(&whole, rank);
            for (index, row) in indices(&outer).zip(given.chunks(run.max(1))) {
                let steps = index.iter().zip(&access.strides).map(|(&i, &stride)| i as isize * stride);
                let at = (access.offset + steps.sum::<isize>()) as usize * size;
                bytes[at..at + row.len()].copy_from_slice(row);
            }
        }
        Tensor::new(part.dtype(), whole, bytes)
    }
}
