//! On GPUs, the gradient of a convolution by its filters is a kernel of its own. It has few results, each a sum over all positions of all
//! images, so parts of the positions are added up by themselves, and then the parts.
//!
//! ```text
//! ConvFilters (x, dy)   =   ReduceSum (ConvFilterSums <parts = [4, 2]> (x, dy))
//! ```
//!
//! Where a group has many channels it is a product of matrices, elsewhere a sum by strips of positions. On the CPU it is a convolution with a
//! window as large as an image, into which it decomposes.

use super::Context;
use crate::error::Result;
use crate::graph::Graph;
use crate::kernel::{adds_directly, unfolds};
use crate::op::{Attrs, NodeId};
use crate::ops::SUMS_OF_PARTS;
use crate::target::{FEW_GROUPS, Family};

/// Rows and columns of the tiles by which the workgroups of a product are counted.
const TILE: usize = 64;
/// Pairs of channels of a workgroup that adds up strips.
const PAIRS: usize = 32;
/// Tiles that keep a multiprocessor busy.
const BUSY: usize = 4;
/// The fewest positions of a part: of a product, and of strips.
const SHORT: [usize; 2] = [256, 64];
/// The most parts of the images, and of the rows.
const MOST: usize = 1 << 12;

/// Splits the sums of these gradients.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if context.target.family == Family::Cpu {
        return Ok(());
    }
    let busy = BUSY * (context.target.multiprocessors as usize).max(FEW_GROUPS);
    for id in graph.order()? {
        if graph.node(id).op_name() != "plimsoll.ConvFilters" {
            continue;
        }
        let Some(found) = Gradient::new(graph, id) else { continue };
        let own = found.parts(busy).map(|[images, rows]| (images * MOST + rows) as u32);
        let parts = |chosen: u32| [chosen as usize / MOST, chosen as usize % MOST];
        let valid = |chosen: u32| {
            let [images, rows] = parts(chosen);
            found.images.is_multiple_of(images) && found.rows.is_multiple_of(rows)
        };
        let Some(parts) = context.decisions.choose("filters", id, own, valid).map(parts) else { continue };
        let (node, operands) = (graph.node(id).clone(), graph.operands(id));
        let dtype = node.outputs[0].fact.dtype;
        graph.insert_at(id);
        let attrs = node.attrs.with("parts", &parts[..]);
        let mut sums = context.add(graph, &node.name, SUMS_OF_PARTS, &operands, attrs)?;
        if parts != [1, 1] {
            let attrs = Attrs::new().with("axes", &[0usize][..]).with("keepdims", 0);
            sums = context.add(graph, &node.name, "ReduceSum", &[Some(sums)], attrs)?;
        }
        if graph.fact(sums).dtype != dtype {
            let attrs = Attrs::new().with("to", dtype.onnx());
            sums = context.add(graph, &node.name, "Cast", &[Some(sums)], attrs)?;
        }
        graph.replace(id.output(0), sums);
    }
    graph.sweep();
    Ok(())
}

/// What the parts of a gradient follow from.
struct Gradient {
    /// Tiles of the result.
    tiles: usize,
    images: usize,
    rows: usize,
    /// Positions of all images, and the fewest of a part.
    positions: [usize; 2],
    /// Bytes of the operands, and of the sums of one part.
    bytes: [usize; 2],
}

impl Gradient {
    /// `None` if nothing is added up, or for windows that strips do not take.
    fn new(graph: &Graph, id: NodeId) -> Option<Gradient> {
        let node = graph.node(id);
        let [x, dy] = graph.operands(id)[..] else { return None };
        let [x, dy] = [graph.fact(x?), graph.fact(dy?)];
        let filters = &node.outputs[0].fact.shape;
        let [outputs, inputs, ref taps @ ..] = filters[..] else { return None };
        let groups = x.shape[1].checked_div(inputs)?;
        let columns = inputs * taps.iter().product::<usize>();
        let outputs = outputs.checked_div(groups)?;
        let (images, positions) = (dy.shape[0], dy.shape.numel() / dy.shape[1].max(1));
        let rows = if taps.len() > 1 { dy.shape[taps.len()] } else { 1 };
        let bytes = [x, dy].map(|fact| fact.shape.numel() * fact.dtype.size()).iter().sum();
        let is_product = unfolds(outputs, columns);
        let tiles = match is_product {
            true => groups * outputs.div_ceil(TILE) * columns.div_ceil(TILE),
            false => (filters[0] * inputs).div_ceil(PAIRS),
        };
        let is_computed = positions > 0 && (is_product || adds_directly(taps));
        is_computed.then_some(Gradient {
            tiles,
            images,
            rows,
            positions: [positions, SHORT[usize::from(!is_product)]],
            bytes: [bytes, filters.numel() * dy.dtype.size().max(size_of::<f32>())],
        })
    }

    /// The parts of the images and of the rows: as few as occupy the device with `busy` tiles, or as many as are long enough. Their sums take
    /// no more bytes than the operands, which stand beside them.
    fn parts(&self, busy: usize) -> Option<[usize; 2]> {
        let divisors = |count: usize| (1..=count.min(MOST - 1)).filter(move |&part| count.is_multiple_of(part));
        let images = divisors(self.images).map(|images| [images, 1]);
        let rows = divisors(self.rows).skip(1).map(|rows| [self.images, rows]).filter(|_| self.images < MOST);
        let [positions, short] = self.positions;
        let fits = |[images, rows]: &[usize; 2]| {
            let count = images * rows;
            count == 1 || positions / count >= short && count.saturating_mul(self.bytes[1]) <= self.bytes[0]
        };
        let all: Vec<_> = images.chain(rows).filter(fits).collect();
        all.iter().copied().find(|[images, rows]| images * rows * self.tiles >= busy).or(all.last().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_occupy_the_device_and_are_no_larger_than_the_operands() {
        let gradient = |tiles, images, rows, image: usize, bytes| Gradient {
            tiles,
            images,
            rows,
            positions: [images * image, SHORT[0]],
            bytes,
        };
        // Filters 512 x 512 x 3 x 3 have tiles enough; 64 x 64 x 3 x 3 need parts of the rows, too.
        assert_eq!(gradient(576, 32, 7, 49, [3 << 20, 9 << 20]).parts(528), Some([1, 1]));
        assert_eq!(gradient(9, 32, 56, 56 * 56, [26 << 20, 147_456]).parts(528), Some([32, 2]));
        assert_eq!(gradient(36, 32, 28, 28 * 28, [13 << 20, 589_824]).parts(528), Some([16, 1]));
        // One image of few rows.
        assert_eq!(gradient(1, 1, 30, 900, [1 << 20, 1 << 10]).parts(528), Some([1, 3]));
        assert_eq!(gradient(1, 8, 30, 900, [1 << 10, 1 << 9]).parts(528), Some([2, 1]));
    }
}
