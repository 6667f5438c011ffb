//! What files say about several devices (ONNX IR 11): inputs, initializers and states that are split, as [rules](Rule) of a mesh, and back.
//!
//! ```text
//! <configuration: ["cards" : 4]>           devices are the ranks of the mesh data=2,tensor=2, in its order
//! y = MatMul (x, w) @ "cards" [w <1: [2]> (-1, -2) [-1: (0, 2), -2: (1, 3)]]
//!                                          w=1:tensor: half of its columns on ranks 0 and 2, the other half on 1 and 3
//! ```
//! Annotations stand at nodes, and are hints: the file means the same without them. Here what a node reads decides; what nodes make follows.

use super::proto::*;
use crate::annotations::{Annotated, Annotations, Axis};
use crate::constant::Constant;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::graph::{Graph, Kind};
use crate::mesh::{Mesh, STAGE};
use crate::op::{Fact, ValueId};
use crate::pass::shard::{self, Rule, Shard, Sharding};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The first version of the format with annotations.
const IR_VERSION: i64 = 11;

/// A configuration of devices that nodes are annotated for.
#[derive(Clone, Debug, Serialize)]
pub struct Configuration {
    /// Its name.
    pub name: String,
    /// The number of its devices.
    pub devices: i64,
    /// The number of tensors that are split.
    pub tensors: usize,
    /// The number of stages that nodes name.
    pub stages: usize,
}

/// Makes a graph that of one rank, as [`shard::run`] does. What the graph's file says holds where nothing is decided by hand.
///
/// # Errors
/// As [`shard::run`], and when the annotations of the file are not of this mesh, or of no mesh.
pub fn shard(graph: &mut Graph, sharding: &Sharding) -> Result<Vec<Shard>> {
    let found = match graph.annotations.clone() {
        Some(annotations) if sharding.mesh.ranks() > 1 => rules(&annotations, graph, sharding)?,
        _ => Vec::new(),
    };
    let by = sharding.by.iter().cloned().chain(found).collect();
    shard::run(graph, &Sharding { by, ..sharding.clone() })
}

/// The graphs of a model whose nodes have annotations.
fn graphs(model: &ModelProto) -> impl Iterator<Item = &GraphProto> {
    model.graph.iter().chain(model.training_info.iter().filter_map(|info| info.algorithm.as_ref()))
}

/// What errors call a node.
fn label(node: &NodeProto) -> String {
    let name = if node.name.is_empty() { node.output.first().map_or("", |output| &output[..]) } else { &node.name };
    format!("{} '{name}'", node.op_type)
}

/// The first of these nodes, or of those in their bodies, that has annotations.
fn first<'a>(nodes: impl IntoIterator<Item = &'a NodeProto>) -> Option<String> {
    nodes.into_iter().find_map(
        |node| {
            if node.device_configurations.is_empty() { within(node) } else { Some(label(node)) }
        },
    )
}

fn within(node: &NodeProto) -> Option<String> {
    let graphs = node.attribute.iter().flat_map(|of| of.g.iter().map(Box::as_ref).chain(&of.graphs));
    graphs.into_iter().find_map(|graph| first(&graph.node))
}

/// The annotations of a model, if it has some.
pub(super) fn read(model: &ModelProto) -> Option<Annotations> {
    let all = || graphs(model).flat_map(|graph| &graph.node);
    let inner = all().find_map(within).or_else(|| first(model.functions.iter().flat_map(|of| &of.node)));
    let mut found = Annotations { inner, ..Annotations::default() };
    found.configurations = model.configuration.iter().map(|of| (of.name.clone(), of.num_devices.into())).collect();
    for (node, placed) in all().flat_map(|node| node.device_configurations.iter().map(move |placed| (node, placed))) {
        let (node, configuration) = (label(node), placed.configuration_id.clone());
        found.splits.extend(placed.sharding_spec.iter().map(|spec| annotated(&node, &configuration, spec)));
        found.stages.extend(placed.pipeline_stage.map(|stage| (node, configuration, stage.into())));
    }
    if found.splits.is_empty() && found.stages.is_empty() && found.inner.is_none() && found.configurations.is_empty() {
        return None;
    }
    found.made = all().flat_map(|node| &node.output).cloned().collect();
    Some(found)
}

fn annotated(node: &str, configuration: &str, spec: &ShardingSpecProto) -> Annotated {
    let extent = |of: &SimpleShardedDimProto| match of.dim {
        Some(DimensionValue::DimValue(extent)) => Some(extent),
        _ => None,
    };
    let axis = |of: &ShardedDimProto| Axis {
        axis: of.axis,
        shards: of.simple_sharding.iter().map(|one| (one.num_shards, extent(one))).collect(),
    };
    let group = |&device: &i64| {
        let group = spec.index_to_device_group_map.iter().find(|group| group.key == device);
        let mut devices = group.map_or(vec![device], |group| group.value.clone());
        devices.sort_unstable();
        devices
    };
    Annotated {
        node: node.into(),
        configuration: configuration.into(),
        tensor: spec.tensor_name.clone(),
        axes: spec.sharded_dim.iter().map(axis).collect(),
        devices: spec.device.iter().map(group).collect(),
    }
}

/// The configurations of a model, and what is split for each.
pub(super) fn configurations(model: &ModelProto) -> Vec<Configuration> {
    let Some(found) = read(model) else { return Vec::new() };
    let one = |(name, devices): &(String, i64)| {
        let splits = found.splits.iter().filter(|split| split.configuration == *name && split.is_split());
        let stages = found.stages.iter().filter(|(_, of, _)| of == name);
        Configuration {
            name: name.clone(),
            devices: *devices,
            tensors: splits.map(|split| &split.tensor).collect::<BTreeSet<_>>().len(),
            stages: stages.map(|(.., stage)| stage).collect::<BTreeSet<_>>().len(),
        }
    };
    found.configurations.iter().map(one).collect()
}

/// What a graph's file decides that nobody decides by hand.
fn rules(found: &Annotations, graph: &Graph, sharding: &Sharding) -> Result<Vec<Rule>> {
    let (mesh, by) = (&sharding.mesh, &sharding.by);
    let by_hand = |name: &str| by.iter().any(|rule| file::glob(&rule.pattern, name));
    if let Some(node) = &found.inner {
        return Err(Error::usage(format!(
            "node {node}: it has annotations for several devices, which are read at nodes of the graph alone, not in functions and bodies; remove \
             them, and say what is split by hand"
        )));
    }
    let splits: Vec<_> = found.splits.iter().filter(|split| split.is_split() && !by_hand(&split.tensor)).collect();
    if splits.is_empty() && found.stages.is_empty() {
        return Ok(Vec::new());
    }
    let (configuration, devices) = configuration(found, mesh)?;
    let of_splits = splits.iter().map(|split| (&split.node, &split.configuration));
    let mut of_nodes = of_splits.chain(found.stages.iter().map(|(node, of, _)| (node, of)));
    let is_unknown = |id: &str| found.configurations.iter().all(|(name, _)| name != id);
    if let Some((node, other)) = of_nodes.find(|(_, of)| is_unknown(of)) {
        let known = names(found);
        return Err(Error::usage(format!("node {node}: expected a configuration of {known}, found '{other}'")));
    }
    if let Some((node, _, stage)) = found.stages.iter().find(|(_, of, _)| of == configuration) {
        return Err(Error::usage(format!(
            "node {node}: the file puts it in pipeline stage {stage}, but on mesh '{mesh}' stages are found, not given: an axis '{STAGE}' cuts the \
             graph between weights; remove pipeline_stage from the file's nodes"
        )));
    }
    let leaves = leaves(graph)?;
    let mut rules: BTreeMap<&str, (&str, Vec<(usize, &str)>)> = BTreeMap::new();
    let mut follow = BTreeSet::new();
    for &split in splits.iter().filter(|split| split.configuration == configuration) {
        let name = &split.tensor[..];
        let along = along(split, devices, mesh)?;
        let Some(&value) = leaves.get(name) else {
            is_dead(split, graph, &leaves)?;
            follow.extend(found.made.contains(name).then_some(name));
            continue;
        };
        let dims = dims(split, graph.fact(value), &along)?;
        let (node, before) = rules.entry(name).or_insert((&split.node, dims.clone()));
        ensure(*before == dims, || {
            let text = |dims: &[(usize, &str)]| {
                dims.iter().map(|(dim, axis)| format!("{dim}:{axis}")).collect::<Vec<_>>().join(" and ")
            };
            let (before, dims) = (text(before), text(&dims));
            fault(split, format!("it is split by {dims}, and by {before} at node {node}; decide by hand"))
        })?;
    }
    if !follow.is_empty() {
        let count = follow.len();
        tracing::info!("the file annotates {count} values that nodes make, too: how those are split follows here");
    }
    let rule = |name: &str, (dim, axis): (usize, &str)| Rule { pattern: name.into(), dim, axis: axis.into() };
    Ok(rules.iter().flat_map(|(name, (_, dims))| dims.iter().map(|&dim| rule(name, dim))).collect())
}

/// The configuration that a mesh is of, and the number of its devices.
fn configuration<'a>(found: &'a Annotations, mesh: &Mesh) -> Result<(&'a str, usize)> {
    let ranks = mesh.ranks();
    let all = found.configurations.iter().map(|(name, devices)| (&name[..], usize::try_from(*devices).unwrap_or(0)));
    let all: Vec<_> = all.collect();
    let same: Vec<_> = all.iter().filter(|(_, devices)| *devices == ranks).collect();
    match (&same[..], &all[..]) {
        (&[&one], _) => Ok(one),
        // More ranks repeat what the devices of the only one do.
        ([], &[one]) if one.1 > 0 && ranks.is_multiple_of(one.1) => Ok(one),
        ([], _) => Err(Error::usage(format!(
            "mesh '{mesh}' has {ranks} ranks, but the file is annotated for {}; give a mesh of as many ranks, or decide by hand what is split",
            names(found)
        ))),
        _ => Err(Error::usage(format!(
            "mesh '{mesh}' has {ranks} ranks, for which the file has several configurations: {}; keep one of them",
            names(found)
        ))),
    }
}

fn names(found: &Annotations) -> String {
    let names = found.configurations.iter().map(|(name, devices)| format!("'{name}' of {devices} devices"));
    let names: Vec<_> = names.collect();
    if names.is_empty() { "no configuration".into() } else { names.join(", ") }
}

/// The inputs, constants and states of a graph, by name.
fn leaves(graph: &Graph) -> Result<HashMap<&str, ValueId>> {
    let ids = graph.order()?.into_iter().filter(|&id| graph.node(id).op().is_none());
    Ok(ids.map(|id| (graph.value_name(id.output(0)), id.output(0))).collect())
}

fn fault(split: &Annotated, what: String) -> Error {
    Error::usage(format!("node {}, tensor '{}': {what}", split.node, split.tensor))
}

/// An axis of a tensor that is split, its number of shards, the extent that the file tells, and the axis of the mesh.
type Along<'m> = (i64, usize, Option<i64>, &'m str);

/// The axes of a tensor that are split along axes of a mesh, whose first ranks are the devices.
fn along<'m>(split: &Annotated, devices: usize, mesh: &'m Mesh) -> Result<Vec<Along<'m>>> {
    let fail = |what: String| Err(fault(split, what));
    if split.tensor.contains('*') {
        return fail("a name with '*' cannot be split".into());
    }
    let mut dims: Vec<(i64, usize, Option<i64>)> = Vec::new();
    for Axis { axis, shards } in &split.axes {
        let &[(count, extent)] = &shards[..] else {
            let what = format!("axis {axis}: expected one number of shards, found {}, as of fused axes", shards.len());
            return fail(format!("{what}; annotate the tensor before it is reshaped"));
        };
        let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else {
            return fail(format!("axis {axis}: expected a number of shards above 0, found {count}"));
        };
        dims.extend((count > 1).then_some((*axis, count, extent)));
    }
    let counts: Vec<usize> = dims.iter().map(|&(_, count, _)| count).collect();
    let shards = counts.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    let mut ways = Vec::new();
    assign(mesh, &counts, &mut Vec::new(), &mut ways);
    let Some(first) = ways.first() else {
        return fail(format!(
            "the file splits it into {shards} shards, but mesh '{mesh}' has no axes of as many ranks; give it such, or decide by hand"
        ));
    };
    let fits = |way: &&Vec<usize>| split.devices.is_empty() || split.devices == placed(mesh, way, devices);
    match &ways.iter().filter(fits).collect::<Vec<_>>()[..] {
        [way] => {
            let axes = way.iter().map(|&axis| &mesh.axes()[axis].name[..]);
            Ok(dims.iter().zip(axes).map(|(&(axis, count, extent), name)| (axis, count, extent, name)).collect())
        }
        [] => {
            let (expected, found) = (listed(&placed(mesh, first, devices)), listed(&split.devices));
            fail(format!(
                "the file has its shards on devices {found}, but ranks of mesh '{mesh}' have them as {expected}; give axes in the order of the \
                 devices, or decide by hand"
            ))
        }
        several => {
            let names: BTreeSet<_> = several.iter().map(|way| &mesh.axes()[way[0]].name[..]).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            fail(format!(
                "the file splits it into {shards} shards and names no devices, but several axes of mesh '{mesh}' have as many ranks: {names}; \
                 decide by hand"
            ))
        }
    }
}

/// The dims of a value of this type that are split, with the axes of the mesh.
fn dims<'m>(split: &Annotated, fact: &Fact, along: &[Along<'m>]) -> Result<Vec<(usize, &'m str)>> {
    let rank = fact.shape.len() as i64;
    let mut found: Vec<(usize, &str)> = Vec::new();
    for &(axis, shards, told, name) in along {
        let dim = if axis < 0 { axis + rank } else { axis };
        ensure((0..rank).contains(&dim), || {
            fault(split, format!("the file splits axis {axis}, but it is {}, which has {rank} axes", fact.shape))
        })?;
        let (dim, extent) = (dim as usize, fact.shape[dim as usize]);
        ensure(told.is_none_or(|told| told == extent as i64), || {
            let told = told.unwrap_or_default();
            fault(split, format!("axis {axis}: the file splits an extent of {told}, but it is {extent}"))
        })?;
        ensure(found.iter().all(|(other, _)| *other != dim), || {
            fault(split, format!("the file splits axis {axis} twice; expected one number of shards"))
        })?;
        ensure(extent > 0 && extent.is_multiple_of(shards), || {
            let what = format!("the file splits axis {axis} into {shards} shards, which do not divide its {extent}");
            fault(split, format!("{what}; shards of several sizes have no plan: split another axis by hand"))
        })?;
        found.push((dim, name));
    }
    Ok(found)
}

/// Refuses a tensor that is not there any more because others were made of it.
fn is_dead(split: &Annotated, graph: &Graph, leaves: &HashMap<&str, ValueId>) -> Result<()> {
    fn reads(constant: &Constant, name: &str) -> bool {
        let inputs = constant.derivation().map_or(&[][..], |(_, _, inputs, _)| inputs);
        inputs.iter().flatten().any(|input| input.name == name || reads(input, name))
    }
    let made = leaves.iter().find(|&(_, &value)| match &graph.node(value.node).kind {
        Kind::Constant(constant) | Kind::State(Some(constant)) => reads(constant, &split.tensor),
        _ => false,
    });
    let Some((made, _)) = made else { return Ok(()) };
    let what = format!("it becomes constant '{made}' before anything is split");
    Err(fault(split, format!("{what}; split that by hand")))
}

/// Finds all ways to split so many axes into so many shards each, along different axes of a mesh.
fn assign(mesh: &Mesh, sizes: &[usize], way: &mut Vec<usize>, ways: &mut Vec<Vec<usize>>) {
    let Some(&size) = sizes.get(way.len()) else { return ways.push(way.clone()) };
    for (axis, _) in mesh.axes().iter().enumerate().filter(|(_, of)| of.ranks == size && of.name != STAGE) {
        if !way.contains(&axis) {
            way.push(axis);
            assign(mesh, sizes, way, ways);
            way.pop();
        }
    }
}

/// The first ranks of a mesh that have each shard of what is split along these of its axes, in row-major order.
fn placed(mesh: &Mesh, way: &[usize], ranks: usize) -> Vec<Vec<i64>> {
    let count = way.iter().map(|&axis| mesh.axes()[axis].ranks).product();
    let mut groups = vec![Vec::new(); count];
    for rank in 0..ranks {
        let shard = way.iter().fold(0, |shard, &axis| shard * mesh.axes()[axis].ranks + mesh.place(rank, axis));
        groups[shard].push(rank as i64);
    }
    groups
}

fn listed(groups: &[Vec<i64>]) -> String {
    let group = |group: &Vec<i64>| match group[..] {
        [one] => one.to_string(),
        _ => format!("({})", group.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    };
    format!("[{}]", groups.iter().map(group).collect::<Vec<_>>().join(", "))
}

/// Annotates the nodes of a model with what is split on a mesh. Annotations for as many devices are replaced.
///
/// # Errors
/// When a value is split that no node of the graph reads, or in a way that annotations have no form for.
pub fn annotate(model: &mut ModelProto, shards: &[Shard], mesh: &Mesh) -> Result<()> {
    let fail = |what: String| Err(Error::usage(format!("mesh '{mesh}': {what}")));
    if mesh.stages() > 1 {
        return fail(format!(
            "the stages of an axis '{STAGE}' are found, and not written to a file; leave the axis out"
        ));
    }
    let name = mesh.to_string();
    let (num_devices, ranks) = (mesh.ranks() as i32, mesh.ranks());
    let is_replaced = |of: &DeviceConfigurationProto| of.num_devices == num_devices || of.name == name;
    let replaced: HashSet<String> =
        model.configuration.iter().filter(|of| is_replaced(of)).map(|of| of.name.clone()).collect();
    model.configuration.retain(|of| !is_replaced(of));
    model.configuration.push(DeviceConfigurationProto { name: name.clone(), num_devices, device: Vec::new() });
    model.ir_version = model.ir_version.max(IR_VERSION);
    let mut specs: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
    for shard in shards {
        let axis = mesh.axis(&shard.axis)?.0;
        let dims = specs.entry(&shard.name).or_default();
        if dims.iter().any(|&(dim, _)| dim == shard.dim) {
            let what = "is split along two axes, for which annotations have no form";
            return fail(format!("dim {} of '{}' {what}; split another by hand", shard.dim, shard.name));
        }
        dims.push((shard.dim, axis));
    }
    let spec = |name: &str, dims: &[(usize, usize)]| {
        let mut dims = dims.to_vec();
        dims.sort_unstable();
        let mut spec = ShardingSpecProto { tensor_name: name.into(), ..Default::default() };
        for (at, group) in
            placed(mesh, &dims.iter().map(|&(_, axis)| axis).collect::<Vec<_>>(), ranks).into_iter().enumerate()
        {
            if let [device] = group[..] {
                spec.device.push(device);
                continue;
            }
            let key = -1 - at as i64;
            spec.device.push(key);
            spec.index_to_device_group_map.push(IntIntListEntryProto { key, value: group });
        }
        let sharded = |&(dim, axis): &(usize, usize)| {
            let one = SimpleShardedDimProto { dim: None, num_shards: mesh.axes()[axis].ranks as i64 };
            ShardedDimProto { axis: dim as i64, simple_sharding: vec![one] }
        };
        spec.sharded_dim = dims.iter().map(sharded).collect();
        spec
    };
    let mut written: BTreeSet<&str> = BTreeSet::new();
    let steps = model.training_info.iter_mut().filter_map(|info| info.algorithm.as_mut());
    for node in model.graph.iter_mut().chain(steps).flat_map(|graph| &mut graph.node) {
        node.device_configurations.retain(|placed| !replaced.contains(&placed.configuration_id));
        let read: BTreeSet<&str> = node.input.iter().map(String::as_str).collect();
        let of_node: Vec<_> = specs.iter().filter(|(name, _)| read.contains(**name)).collect();
        if of_node.is_empty() {
            continue;
        }
        written.extend(of_node.iter().map(|(name, _)| **name));
        let sharding_spec = of_node.into_iter().map(|(name, dims)| spec(name, dims)).collect();
        let configuration_id = name.clone();
        node.device_configurations.push(NodeDeviceConfigurationProto {
            configuration_id,
            sharding_spec,
            pipeline_stage: None,
        });
    }
    match specs.keys().find(|name| !written.contains(*name)) {
        Some(name) => fail(format!(
            "'{name}' is split, but no node of the file's graph reads it by this name, and annotations stand at nodes; say what is split by hand"
        )),
        None => Ok(()),
    }
}
