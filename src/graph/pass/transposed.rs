//! On NVIDIA GPUs with cuDNN, a transposed convolution of 16-bit floats that takes no strides is a convolution, with the filters turned
//! around and inputs and outputs swapped. So is the gradient of most convolutions by their input. On tensor cores, cuDNN is faster at it
//! than kernels that gather; in `f32` it is not.
//!
//! ```text
//! ConvTranspose (x, w)   =   Conv <pads = dilation (kernel - 1) - pads> (x, Transpose (w) [.., ::-1, ::-1])
//! ```

use super::Context;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attr, Attrs, NodeId};

/// Turns such convolutions.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !context.target.prefers_channels_last() {
        return Ok(());
    }
    for id in graph.order()? {
        if graph.node(id).op_name() != "plimsoll.ConvTranspose" {
            continue;
        }
        let pads = pads(graph, id);
        if !context.decisions.if_valid("transposed", id, pads.is_some()) {
            continue;
        }
        let (node, operands) = (graph.node(id).clone(), graph.operands(id));
        let taps = graph.fact(operands[1].expect("it has filters")).shape[2..].to_vec();
        graph.insert_at(id);
        let mut perm: Vec<usize> = (0..taps.len() + 2).collect();
        perm.swap(0, 1);
        let attrs = Attrs::new().with("perm", &perm[..]);
        let mut filters = context.add(graph, &node.name, "Transpose", &operands[1..], attrs)?;
        let turned: Vec<usize> = (0..taps.len()).filter(|&k| taps[k] > 1).collect();
        if !turned.is_empty() {
            let all = |value: i64| vec![value; turned.len()];
            let axes: Vec<usize> = turned.iter().map(|k| k + 2).collect();
            let attrs = Attrs::new().with("axes", &axes[..]).with("steps", all(-1));
            let attrs = attrs.with("starts", all(-1)).with("ends", all(i64::MIN));
            filters = context.add(graph, &node.name, "Slice", &[Some(filters)], attrs)?;
        }
        let mut attrs = node.attrs.with("pads", pads.expect("it is valid"));
        attrs.remove("output_padding");
        let value = context.add(graph, &node.name, "plimsoll.Conv", &[operands[0], Some(filters)], attrs)?;
        graph.replace(id.output(0), value);
    }
    graph.sweep();
    Ok(())
}

/// The pads of the convolution that a transposed one is; `None` if it is none.
fn pads(graph: &Graph, id: NodeId) -> Option<Vec<i64>> {
    let node = graph.node(id);
    let list = |name: &str| match node.attrs.get(name) {
        Some(Attr::Ints(list)) => list.clone(),
        _ => Vec::new(),
    };
    let is_all = |name: &str, value: i64| list(name).iter().all(|&own| own == value);
    let half = node.outputs[0].fact.dtype.is_half();
    let single = half && matches!(node.attrs.get("group"), None | Some(Attr::Int(1)));
    if !single || !is_all("strides", 1) || !is_all("output_padding", 0) {
        return None;
    }
    let taps = &graph.fact(graph.operands(id)[1]?).shape[2..];
    let (pads, dilations) = (list("pads"), list("dilations"));
    let reach = |k: usize| dilations.get(k).copied().unwrap_or(1) * (taps[k] as i64 - 1);
    let turned = pads.iter().enumerate().map(|(i, &pad)| reach(i % taps.len()) - pad);
    let turned: Vec<i64> = turned.collect();
    (turned.len() == 2 * taps.len() && turned.iter().all(|&pad| pad >= 0)).then_some(turned)
}
