//! Files that others have cut for the ranks of a mesh: their collectives run along its only axis, and nothing else is split.

use crate::error::{Result, ensure};
use crate::graph::Graph;
use crate::mesh::Mesh;
use crate::ops::OF_CUT_FILES;

/// Says along which axis the collectives of a file run. `split` is a pattern of what else is to be split. Returns true if it has some.
///
/// # Errors
/// When the mesh has not the ranks that the file was cut for, or something else is to be split.
pub fn run(graph: &mut Graph, mesh: &Mesh, split: Option<&str>) -> Result<bool> {
    let mut found = false;
    for id in graph.order()? {
        let node = graph.node(id);
        if !node.op().is_some_and(|op| OF_CUT_FILES.contains(&op.name)) {
            continue;
        }
        let axes: Vec<_> = mesh.axes().iter().filter(|axis| axis.ranks > 1).collect();
        let size =
            graph.with_call(id, |call| call.int("group_size", 0)).transpose().map_err(|what| node.error(what))?;
        let size = size.unwrap_or(0);
        let wanted = if size > 0 { size.to_string() } else { "several".into() };
        let fail = |what: String| node.error(format!("the file was cut for {wanted} ranks: {what}"));
        let [axis] = axes[..] else {
            return Err(fail(format!("expected a mesh of one axis with as many, found '{mesh}'")));
        };
        // AllReduce does not say for how many.
        ensure(size == 0 && node.op_name() == OF_CUT_FILES[0] || size == axis.ranks as i64, || {
            fail(format!("expected a mesh of one axis with as many, found '{mesh}'"))
        })?;
        if let Some(pattern) = split {
            return Err(fail(format!("expected nothing to split, found '{pattern}'")));
        }
        let attrs = node.attrs.clone().with("mesh_axis", &axis.name[..]).with("ranks", axis.ranks as i64);
        graph.set_attrs(id, attrs)?;
        found = true;
    }
    Ok(found)
}
