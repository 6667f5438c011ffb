//! Values of which each rank of a mesh has a part: where a part lies in the whole, and the whole of all parts.

use super::{Exec, Lasting};
use crate::backend::Slice;
use crate::backend::ranks::Ranks;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::plan::{Port, Shard};
use crate::shape::{Access, Shape, indices};
use crate::tensor::Tensor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How a value is split, and which ranks have parts of it.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    ranks: Arc<dyn Ranks>,
    /// The dims that are split, each with the number of an axis of the mesh.
    dims: Vec<(usize, usize)>,
    /// The stage whose ranks have it, if others do not.
    stage: Option<usize>,
}

/// A state, to ranks that do not have it.
#[derive(Serialize, Deserialize)]
struct Told {
    port: Port,
    stored: DType,
    shards: Vec<Shard>,
    stage: usize,
}

/// What all ranks tell each other, in the order of the ranks.
///
/// # Errors
/// When a rank is gone or late, or of another version, which tells something else.
pub(crate) fn tell_all<T: Serialize + DeserializeOwned>(ranks: &dyn Ranks, own: &T) -> Result<Vec<T>> {
    let unread = |e: serde_json::Error| Error::usage(format!("the ranks have not the same version: {e}"));
    let all = ranks.gather(&serde_json::to_vec(own).map_err(unread)?)?;
    all.iter().map(|told| serde_json::from_slice(told).map_err(unread)).collect()
}

impl Spread {
    /// How the value of this name is split, if it is.
    pub(crate) fn of(name: &str, shards: &[Shard], ranks: &Arc<dyn Ranks>) -> Option<Spread> {
        let own = shards.iter().filter(|shard| shard.name == name);
        let dims: Vec<_> = own.filter_map(|shard| Some((shard.dim, ranks.mesh().axis(&shard.axis).ok()?.0))).collect();
        (!dims.is_empty()).then(|| Spread { ranks: Arc::clone(ranks), dims, stage: None })
    }

    /// As [`of`](Self::of), of a state of a stage.
    fn at(name: &str, shards: &[Shard], ranks: &Arc<dyn Ranks>, stage: usize) -> Spread {
        let split = Spread::of(name, shards, ranks);
        let dims = split.map_or_else(Vec::new, |split| split.dims);
        Spread { ranks: Arc::clone(ranks), dims, stage: Some(stage) }
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

    /// True if this rank has no part.
    pub(super) fn is_elsewhere(&self) -> bool {
        self.stage.is_some_and(|stage| stage != self.mesh().stage(self.ranks.rank()))
    }

    /// The whole of the parts, which have this shape, that all ranks give; one that has none gives nothing.
    ///
    /// # Errors
    /// When a rank is gone or late.
    pub(crate) fn gathered(&self, dtype: DType, shape: &Shape, part: Option<&Tensor>) -> Result<Tensor> {
        let (whole, size) = (self.whole(shape), dtype.size());
        let mut bytes = vec![0; whole.numel() * size];
        // What lies behind the last dim that is split follows one another.
        let last = self.dims.iter().map(|&(dim, _)| dim).max().unwrap_or(0);
        let (outer, run) = (Shape::new(&shape[..last]), shape[last..].iter().product::<usize>() * size);
        for (rank, given) in self.ranks.gather(part.map_or(&[], |part| &part.bytes()[..]))?.iter().enumerate() {
            let access = self.part(&whole, rank);
            for (index, row) in indices(&outer).zip(given.chunks(run.max(1))) {
                let steps = index.iter().zip(&access.strides).map(|(&i, &stride)| i as isize * stride);
                let at = (access.offset + steps.sum::<isize>()) as usize * size;
                bytes[at..at + row.len()].copy_from_slice(row);
            }
        }
        Tensor::new(dtype, whole, bytes)
    }
}

impl Exec {
    /// Says whose rank this is: states are written to files, and given, as a whole. Ranks tell each other which states they have, if those are
    /// not the same.
    ///
    /// # Errors
    /// When a rank is gone or late.
    pub(crate) fn share(&mut self, ranks: &Arc<dyn Ranks>) -> Result<()> {
        self.is_first = ranks.rank() == 0;
        let plan = Arc::clone(&self.loaded[0].plan);
        let shards = |name: &str| {
            let mut all = plan.programs.iter().map(|program| &program.shards);
            all.find(|shards| shards.iter().any(|shard| shard.name == name)).map_or(&[][..], Vec::as_slice)
        };
        let several = ranks.mesh().stages() > 1;
        for state in self.states.iter_mut().filter(|state| !state.is_place()) {
            let (name, own) = (&state.port.name, shards(&state.port.name));
            state.spread = match several {
                true => Some(Spread::at(name, own, ranks, plan.stage)),
                false => Spread::of(name, own, ranks),
            };
        }
        if !several {
            return Ok(());
        }
        let own = self.states.iter().filter(|state| !state.is_place());
        let own: Vec<Told> = own
            .map(|state| {
                let of = |shard: &&Shard| shard.name == state.port.name;
                let shards = shards(&state.port.name).iter().filter(of).cloned().collect();
                Told { port: state.port.clone(), stored: state.stored, shards, stage: plan.stage }
            })
            .collect();
        for told in tell_all(&**ranks, &own)? {
            for Told { port, stored, shards, stage } in told {
                if stage != plan.stage && self.states.iter().any(|own| own.port.name == port.name) {
                    let what = format!("state '{}' is in stages {stage} and {}", port.name, plan.stage);
                    return Err(Error::plan(what));
                }
                if stage == plan.stage || self.elsewhere.iter().any(|known| known.port.name == port.name) {
                    continue;
                }
                let spread = Some(Spread::at(&port.name, &shards, ranks, stage));
                let Some(&segment) = self.segments.first() else { continue };
                let at = Slice { segment, offset: 0, bytes: 0 };
                let (initial, watched, most, ends) = (None, false, None, None);
                self.elsewhere.push(Lasting { port, at, stored, initial, watched, most, ends, spread });
            }
        }
        Ok(())
    }
}

/// All states of all ranks, without those that tell a rank its place. If ranks have not the same, they are in the order of their names, so that
/// all ranks gather them in one order.
pub(super) fn all<'a>(states: &'a mut [Lasting], elsewhere: &'a mut [Lasting]) -> Vec<&'a mut Lasting> {
    let own = states.iter_mut().filter(|state| !state.is_place());
    let mut all: Vec<&mut Lasting> = own.chain(elsewhere).collect();
    if all.iter().any(|state| state.spread.as_ref().is_some_and(|spread| spread.stage.is_some())) {
        all.sort_by(|a, b| a.port.name.cmp(&b.port.name));
    }
    all
}
