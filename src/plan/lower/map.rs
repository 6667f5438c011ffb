//! Kernels of elementwise groups.

use super::Lowering;
use super::code::Code;
use super::outline::Outline;
use crate::error::Result;
use crate::expr::Body;
use crate::kernel::Template;
use crate::pass::Group;

impl Lowering<'_> {
    /// Makes one kernel of elementwise code.
    pub(super) fn map(&mut self, Group { nodes, sink, .. }: &Group) -> Result<()> {
        let mut code = Code { counts: true, ..Code::default() };
        let value = (*sink).output(0);
        let shape = self.graph.fact(value).shape.clone();
        let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(&shape)))?;
        self.write(*sink, Outline::new(Template::Map, shape, Body::new(&[result])), code.reads, |access| {
            Some(access.clone())
        })
    }
}
