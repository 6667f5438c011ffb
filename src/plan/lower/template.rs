//! Groups become kernels: a core with what is computed of its value, an attention, rows that are reduced, or elementwise code.

use super::Lowering;
use super::buffer_view::{Place, Read};
use super::channels::is_dense_image;
use super::fuse_prologue::Hosted;
use super::launch::Outline;
use super::view::take_apart;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::kernel::layout::prologue::by_strips;
use crate::kernel::{Prologue, RowFold, Template};
use crate::op::{Args, Call, Fact, Lower, TemplateCall, ValueId};
use crate::pass::attention;
use crate::shape::{Access, Shape};
use crate::target::Family;
use std::collections::HashMap;

/// What a group's expressions are made of so far.
#[derive(Default)]
pub(super) struct Code {
    pub(super) values: HashMap<ValueId, Expr>,
    pub(super) reads: Vec<Read>,
    pub(super) folds: Vec<RowFold>,
    /// The number of the first operand: a core value comes before it.
    pub(super) first: usize,
}

/// The index space of a row kernel.
struct Row {
    /// The shape that is reduced.
    full: Shape,
    /// The same with reduced axes of extent 1.
    kept: Shape,
    /// Outer axes, then reduced ones.
    axes: Vec<usize>,
    /// How many are reduced.
    inner: usize,
}

impl Lowering<'_> {
    /// Makes one kernel of a group.
    pub(super) fn group(&mut self, nodes: &[u32]) -> Result<()> {
        let lower = |n: u32| &self.graph.node(n).op().expect("only operators are grouped").lower;
        let mut templates = nodes.iter().copied().filter(|&n| matches!(lower(n), Lower::Template(_)));
        let reduction = nodes.iter().copied().find(|&n| matches!(lower(n), Lower::Reduce(_)));
        let sink = *nodes.last().expect("a group has nodes");
        match (templates.next(), templates.next()) {
            (Some(_), Some(_)) => self.attention(nodes, sink),
            (Some(anchor), None) => self.anchored(nodes, anchor, sink),
            (None, _) => match reduction {
                Some(reduction) => self.rows(nodes, reduction, sink),
                None => self.map(nodes, sink),
            },
        }
    }

    /// Makes one kernel of a core and what is computed of its value.
    fn anchored(&mut self, nodes: &[u32], anchor: u32, sink: u32) -> Result<()> {
        let mut code = Code::default();
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
        let apart = self.apart(&operands)?;
        let (core, mut reads, own) = self.core(anchor, apart.as_ref())?;
        let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
        code.values.insert(ValueId { node: anchor, port: 0 }, Expr::input(0, dtype));
        code.first = 1;
        let result = self.compute(nodes, &mut code, &|access, _| access.broadcast(&shape).reshape(&core.shape))?;
        reads.append(&mut code.reads);
        let mut prologues = Vec::new();
        for (prologue, mut operands) in own {
            reads.append(&mut operands);
            prologues.push(prologue);
        }
        let to = self.destination(value)?;
        let access = to.access.reshape(&core.shape);
        let to = Place { buffer: to.buffer, access: access.ok_or_else(|| self.unreachable(sink))? };
        let outline = Outline { prologues, ..Outline::new(core.template, core.shape, Body::new(&[result])) };
        self.step(self.graph.node(sink).name.clone(), outline, reads, vec![to])
    }

    /// Makes one kernel of reductions of the same rows, and of what is computed of their elements and results.
    fn rows(&mut self, nodes: &[u32], reduction: u32, sink: u32) -> Result<()> {
        let mut code = Code::default();
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let row = self.row(reduction);
        let result = self.compute(nodes, &mut code, &|access, rank| {
            let kept = if rank == row.full.len() { access.shape.clone() } else { row.kept.clone() };
            Some(access.reshape(&kept)?.broadcast(&row.full).permute(&row.axes))
        })?;
        let per_row = shape.numel() == row.kept.numel() && (shape != row.full || row.full == row.kept);
        let space: Shape = row.axes.iter().map(|&a| row.full[a]).collect();
        let to = self.destination(value)?;
        let outer = row.axes.len() - row.inner;
        let access = if per_row {
            to.access.reshape(&row.kept).map(|a| a.permute(&row.axes)).map(|mut a| {
                a.shape.truncate(outer);
                a.strides.truncate(outer);
                a
            })
        } else {
            Some(to.access.permute(&row.axes))
        };
        let to = Place { buffer: to.buffer, access: access.ok_or_else(|| self.unreachable(sink))? };
        let template = Template::Row { inner: row.inner, folds: code.folds, per_row };
        let outline = Outline::new(template, space, Body::new(&[result]));
        self.step(self.graph.node(sink).name.clone(), outline, code.reads, vec![to])
    }

    /// Makes one kernel of elementwise code.
    fn map(&mut self, nodes: &[u32], sink: u32) -> Result<()> {
        let mut code = Code::default();
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(&shape)))?;
        let to = self.destination(value)?;
        let outline = Outline::new(Template::Map, shape, Body::new(&[result]));
        self.step(self.graph.node(sink).name.clone(), outline, code.reads, vec![to])
    }

    /// Makes one kernel of an attention.
    fn attention(&mut self, nodes: &[u32], sink: u32) -> Result<()> {
        let graph = self.graph;
        let found = attention::ending_in(graph, sink);
        let found = found.ok_or_else(|| graph.node(sink).error("a group of two products is an attention"))?;
        let value = ValueId { node: sink, port: 0 };
        let values = graph.operands(sink)[1].expect("a product has two operands");
        let mut operands: Vec<_> = graph.operands(found.products).into_iter().flatten().collect();
        operands.push(values);
        let apart = self.apart(&operands)?;
        let (products, mut reads, _) = self.core(found.products, apart.as_ref())?;
        let (whole, space) = (graph.node(found.products).outputs[0].fact.shape.clone(), products.shape);
        let batch = &whole[..whole.len() - 2];
        let mut shape = space.clone();
        shape.truncate(space.len() - 2);
        let apart = shape.clone();
        let result = &graph.fact(value).shape;
        shape.extend_from_slice(&result[result.len() - 2..]);
        let place = self.place(values)?;
        let access = take_apart(&place.access, batch, &apart).ok_or_else(|| self.unreachable(sink))?;
        reads.push((place.buffer, self.operand(place.buffer, access)));

        let products = ValueId { node: found.products, port: 0 };
        let dtype = graph.fact(products).dtype;
        let mut code = Code { first: 1, ..Code::default() };
        code.values.insert(products, Expr::input(0, dtype));
        let scoring = |&n: &u32| n != sink && matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Map(_)));
        let last = nodes.iter().position(|&n| n == found.scores.node).expect("the scores are of the group");
        let maps: Vec<u32> = nodes[..=last].iter().copied().filter(scoring).collect();
        let score = match maps.is_empty() {
            true => Expr::input(0, dtype),
            false => self.compute(&maps, &mut code, &|access, _| access.broadcast(&whole).reshape(&space))?,
        };
        let further = code.reads.len();
        reads.append(&mut code.reads);
        let template = Template::Attention { score: Body::new(&[score]), further, guarded: found.guarded };
        let to = self.destination(value)?;
        let access = to.access.reshape(&shape).ok_or_else(|| self.unreachable(sink))?;
        let to = Place { buffer: to.buffer, access };
        let outline = Outline::new(template, shape, Body::identity(graph.fact(value).dtype));
        self.step(graph.node(sink).name.clone(), outline, reads, vec![to])
    }

    /// The index space of a reduction.
    fn row(&self, reduction: u32) -> Row {
        let node = self.graph.node(reduction);
        let input = self.graph.operands(reduction)[0].expect("a reduction reads one value");
        let full = self.graph.fact(input).shape.clone();
        let facts = [Some(self.graph.fact(input))];
        let call = Call { op: node.op().expect("a reduction"), attrs: &node.attrs, inputs: &facts };
        let inner = call.reduced_axes().expect("the axes were inferred");
        let kept = (0..full.len()).map(|k| if inner.contains(&k) { 1 } else { full[k] }).collect();
        let mut axes: Vec<usize> = (0..full.len()).filter(|k| !inner.contains(k)).collect();
        axes.extend(&inner);
        Row { full, kept, axes, inner: inner.len() }
    }

    /// The template of a node whose operands are read as given; of a product, with its batch axes `apart`.
    pub(super) fn build(&self, anchor: u32, accesses: &[Access], apart: Option<&Shape>) -> Result<TemplateCall> {
        let (graph, node) = (self.graph, self.graph.node(anchor));
        let op = node.op().expect("a template is an operator");
        let Lower::Template(template) = op.lower else { unreachable!("the caller chose a template") };
        let operands: Vec<_> = graph.operands(anchor).into_iter().flatten().collect();
        let mut facts: Vec<Fact> = operands.iter().map(|&v| graph.fact(v).clone()).collect();
        let mut accesses = accesses.to_vec();
        if let Some(apart) = apart {
            let batch = &node.outputs[0].fact.shape;
            let batch = &batch[..batch.len() - 2];
            for (access, fact) in accesses.iter_mut().zip(&mut facts) {
                *access = take_apart(access, batch, apart).ok_or_else(|| self.unreachable(anchor))?;
                fact.shape = access.shape.clone();
            }
        }
        let facts: Vec<_> = facts.iter().map(Some).collect();
        template(&Call { op, attrs: &node.attrs, inputs: &facts }, &accesses).map_err(|what| node.error(what))
    }

    /// The template of a node, with its operands' buffers, and with the prologues that it hosts and theirs. The batch axes of a product may
    /// be `apart`.
    pub(super) fn core(
        &mut self,
        anchor: u32,
        apart: Option<&Shape>,
    ) -> Result<(TemplateCall, Vec<Read>, Vec<(Prologue, Vec<Read>)>)> {
        let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
        let mut places = Vec::with_capacity(operands.len());
        for &value in &operands {
            places.push(match self.hosted.get(&value) {
                Some(hosted) => hosted.reads[0].clone(),
                None => self.place(value)?,
            });
        }
        let accesses = |places: &[Place]| places.iter().map(|p| p.access.clone()).collect::<Vec<_>>();
        let mut core = self.build(anchor, &accesses(&places), apart)?;
        let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
        let last = self.wants_channels_last(&core.template, dtype);
        if last {
            let strips =
                matches!(core.template, Template::Conv { groups, .. } if by_strips(&core.reads[1].1.shape, groups));
            for (i, &value) in operands.iter().enumerate() {
                let vectors = i == core.reads[1].0 && strips;
                places[i] = if vectors { self.with_outputs_last(value)? } else { self.with_channels_last(value)? };
            }
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let strided = matches!(core.template, Template::ConvTranspose { .. } | Template::Pool { .. });
        let either = self.target.family == Family::Cuda && strided;
        let lies = either && core.reads[0].1.has_channels_last();
        let lies = last || self.graph.choices().holds("lies", anchor, lies);
        let windowed = matches!(
            core.template,
            Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } | Template::Resize { .. }
        );
        if windowed && !lies && !self.graph.choices().holds("dense", anchor, is_dense_image(&core.reads[0].1)) {
            let input = core.reads[0].0;
            places[input] = self.contiguous(operands[input], &places[input])?;
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let reads: Vec<_> = core
            .reads
            .iter()
            .map(|(i, access)| (places[*i].buffer, self.operand(places[*i].buffer, access.clone())))
            .collect();
        let mut prologues = Vec::new();
        for (operand, &(input, _)) in core.reads.iter().enumerate() {
            let Some(Hosted { reads, body }) = self.hosted.get(&operands[input]) else { continue };
            let mut own = Vec::with_capacity(reads.len() - 1);
            for place in &reads[1..] {
                let mut accesses = accesses(&places);
                accesses[input] = place.access.clone();
                let access = self.build(anchor, &accesses, apart)?.reads.swap_remove(operand).1;
                own.push((place.buffer, self.operand(place.buffer, access)));
            }
            prologues.push((Prologue { operand, reads: own.len(), body: body.clone() }, own));
        }
        Ok((core, reads, prologues))
    }

    /// The expression of a group's last node. `access` turns a value's access into the kernel's index space, given the
    /// rank of the value that the elementwise node reading it produces.
    pub(super) fn compute(
        &mut self,
        nodes: &[u32],
        code: &mut Code,
        access: &dyn Fn(&Access, usize) -> Option<Access>,
    ) -> Result<Expr> {
        let graph = self.graph;
        for &id in nodes {
            let node = graph.node(id);
            let op = node.op().expect("only operators are grouped");
            if matches!(op.lower, Lower::Template(_)) {
                continue;
            }
            let operands = graph.operands(id);
            // Elementwise operands are broadcast to the node's own shape before the kernel's space is considered.
            let shape = match op.lower {
                Lower::Reduce(_) => graph.fact(operands[0].expect("a reduction reads one value")).shape.clone(),
                _ => node.outputs[0].fact.shape.clone(),
            };
            let mut args = Vec::with_capacity(operands.len());
            for &value in &operands {
                let Some(value) = value else {
                    args.push(None);
                    continue;
                };
                if let Some(expr) = code.values.get(&value) {
                    args.push(Some(expr.clone()));
                    continue;
                }
                if let Some(literal) = self.literal(value)? {
                    args.push(Some(literal));
                    continue;
                }
                let place = self.place(value)?;
                let seen = access(&place.access.broadcast(&shape), shape.len());
                let seen = seen.ok_or_else(|| node.error("an operand cannot be read in the kernel's index space"))?;
                let read = (place.buffer, self.operand(place.buffer, seen));
                let number = code.reads.iter().position(|r| *r == read).unwrap_or_else(|| {
                    code.reads.push(read);
                    code.reads.len() - 1
                });
                args.push(Some(Expr::input(code.first + number, graph.fact(value).dtype)));
            }
            let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            let result = match op.lower {
                Lower::Map(map) => map(&Args(&args), &call),
                Lower::Reduce(fold) => {
                    let input = args[0].take().expect("a reduction reads one value");
                    // Small integers wrap around once all are folded.
                    let dtype = input.dtype();
                    let wide = if dtype.is_small_int() { DType::I32 } else { dtype };
                    code.folds.push(RowFold { fold, body: Body::new(&[input.cast(wide)]) });
                    Expr::fold(code.folds.len() - 1, wide).cast(dtype)
                }
                _ => return Err(node.error("cannot be part of a kernel")),
            };
            code.values.insert(ValueId { node: id, port: 0 }, result);
        }
        let sink = ValueId { node: *nodes.last().expect("a group has nodes"), port: 0 };
        Ok(code.values[&sink].clone())
    }
}
