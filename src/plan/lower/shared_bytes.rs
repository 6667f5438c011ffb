//! Inputs, outputs and states of less than 8 bits an element share bytes, as in files: kernels take them apart before others read them, and put
//! them together behind what computes them.
//!
//! ```text
//! input of i4, 2 in a byte  --> apart --> i8 --> readers
//! writer --> i8 --> together --> output of i4, 2 in a byte
//! ```

use super::Lowering;
use super::buffer_view::BufferView;
use super::outline::Outline;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::{Binary, Body, Expr};
use crate::kernel::{Operand, PadMode, Template};
use crate::op::ValueId;
use crate::shape::{Access, Shape};
use crate::{BufferIdx, Class};

impl Lowering<'_> {
    /// The buffer of a port whose elements share bytes; `None` if they do not.
    pub(super) fn shared_bytes(&mut self, value: ValueId, class: Class) -> Option<BufferIdx> {
        let (fact, name) = (self.graph.fact(value), self.graph.value_name(value).to_owned());
        if !fact.dtype.is_packed() {
            return None;
        }
        let shape = Shape::new([fact.dtype.packed_bytes(fact.shape.numel())]);
        let buffer = self.add_buffer(name, DType::U8, shape, class);
        self.draft.packed.insert(buffer);
        Some(buffer)
    }

    /// The elements of a port that share bytes, each in a byte of its own.
    pub(super) fn apart(&mut self, value: ValueId, buffer: BufferIdx) -> Result<BufferView> {
        let fact = self.graph.fact(value).clone();
        let (bits, held) = (fact.dtype.bits(), fact.dtype.held());
        let [bytes, per] = [fact.dtype.packed_bytes(fact.shape.numel()), 8 / bits];
        let name = self.graph.value_name(value).to_owned();
        // The last byte may have more than the elements.
        let to = self.add_buffer(name.clone(), held, Shape::new([bytes * per]), Class::Activation);
        let shape = Shape::new([bytes, per]);
        let from = Access { shape: shape.clone(), strides: [1, 0].into_iter().collect(), offset: 0 };
        let place = Expr::index(1).cast(DType::I32);
        let above =
            Expr::input(0, DType::U8).cast(DType::I32).binary(Binary::Shr, &(place.clone() * place.like(bits as f64)));
        let low = above.binary(Binary::And, &above.like(f64::from((1 << bits) - 1)));
        let sign = low.like(f64::from(1 << (bits - 1)));
        let number = if held == DType::I8 { low.binary(Binary::Xor, &sign) - sign } else { low };
        let outline = Outline::new(Template::Map, shape.clone(), Body::new(&[number.cast(held)]));
        let read = (buffer, Operand { dtype: DType::U8, access: from, packed: false });
        let view = BufferView { buffer: to, access: Access::contiguous(shape) };
        self.step(format!("{name} apart"), outline, vec![read], view)?;
        Ok(BufferView { buffer: to, access: Access::contiguous(fact.shape) })
    }

    /// Writes elements to a port's buffer, where they share bytes.
    pub(super) fn together(&mut self, value: ValueId, place: &BufferView, to: BufferIdx) -> Result<()> {
        let fact = self.graph.fact(value).clone();
        let (bits, held, count) = (fact.dtype.bits(), fact.dtype.held(), fact.shape.numel());
        let [bytes, per] = [fact.dtype.packed_bytes(count), 8 / bits];
        let name = self.graph.value_name(value).to_owned();
        let mut place = if place.access.is_contiguous() { place.clone() } else { self.contiguous(value, place)? };
        if !count.is_multiple_of(per) {
            let whole = Shape::new([bytes * per]);
            let padded = self.add_buffer(name.clone(), held, whole.clone(), Class::Activation);
            let template = Template::Pad { before: vec![0], mode: PadMode::Constant(0.0) };
            let all =
                Access { shape: Shape::new([count]), strides: [1].into_iter().collect(), offset: place.access.offset };
            let read = (place.buffer, self.operand(place.buffer, all));
            let view = BufferView { buffer: padded, access: Access::contiguous(whole.clone()) };
            self.step(
                format!("{name} padded"),
                Outline::new(template, whole, Body::identity(held)),
                vec![read],
                view.clone(),
            )?;
            place = view;
        }
        let shape = Shape::new([bytes]);
        let (mut reads, mut byte) = (Vec::with_capacity(per), None::<Expr>);
        for at in 0..per {
            let access = Access {
                shape: shape.clone(),
                strides: [per as isize].into_iter().collect(),
                offset: place.access.offset + at as isize,
            };
            reads.push((place.buffer, self.operand(place.buffer, access)));
            let number = Expr::input(at, held).cast(DType::I32);
            let low = number.binary(Binary::And, &number.like(f64::from((1 << bits) - 1)));
            let moved = low.binary(Binary::Shl, &low.like((at * bits) as f64));
            byte = Some(byte.map_or(moved.clone(), |byte| byte.binary(Binary::Or, &moved)));
        }
        let byte = byte.expect("a byte has an element").cast(DType::U8);
        let view = BufferView { buffer: to, access: Access::contiguous(shape.clone()) };
        self.step(format!("{name} together"), Outline::new(Template::Map, shape, Body::new(&[byte])), reads, view)
    }
}
