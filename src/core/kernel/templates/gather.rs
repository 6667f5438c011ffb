//! Elements that indices choose.

use super::*;

pub(super) static GATHER: TemplateDef = TemplateDef {
    name: "gather",
    doc: "elements that indices choose",
    widens: |_, _, _| true,
    core_reads: |t| {
        let Template::Gather { strides, .. } = t else { mismatch(t) };
        1 + strides.len()
    },
    check: |kernel, _| {
        let Template::Gather { strides, extents } = &kernel.template else { mismatch(&kernel.template) };
        ensure(strides.len() == extents.len(), || {
            format!("expected an extent per indexed axis, {}, found {}", strides.len(), extents.len())
        })?;
        let whole = kernel.is_empty() || extents.iter().all(|&d| d > 0);
        ensure(whole, || format!("an index into an empty axis, of extents {extents:?}"))?;
        let countable = Shape::new(extents.clone());
        ensure(is_countable(&countable), || format!("indexed extents {countable} are too large"))?;
        for (i, operand) in kernel.reads.iter().enumerate().take(1 + strides.len()) {
            kernel.reads_extents(i, &kernel.shape)?;
            let index = i == 0 || operand.dtype.is_int();
            ensure(index, || format!("operand {i} read: expected integer indices, found {}", operand.dtype))?;
        }
        Ok(())
    },
    axis_of: |_, _, axis| Along::Axis(axis),
    reach: |t, operand| {
        let Template::Gather { strides, extents } = t else { mismatch(t) };
        if operand == 0 { extents.iter().copied().zip(strides.iter().copied()).collect() } else { Vec::new() }
    },
    meaning: gather,
    samples: || {
        // Rows and columns of [3, 4, 2], from their ends where the strides are negative.
        let base = Access { shape: [5, 2].into(), strides: vec![0, 1], offset: 16 };
        let data = Operand { dtype: DType::F32, access: base, packed: false };
        let index = Operand { access: Access::contiguous([5, 2].into()), dtype: DType::I64, packed: false };
        let template = Template::Gather { strides: vec![-8, 2], extents: vec![3, 4] };
        vec![sample(template, &[5, 2], vec![data, index.clone(), index], Expr::input(0, DType::F32))]
    },
    ..PLAIN
};

fn gather(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Gather { strides, extents } = &kernel.template else { mismatch(&kernel.template) };
    let mut element = kernel.reads[0].access.at(index);
    for (j, (&stride, &extent)) in strides.iter().zip(extents).enumerate() {
        let i = elements.at(1 + j, index);
        let i = if i < 0.0 { i + extent as f64 } else { i };
        element += i.clamp(0.0, extent as f64 - 1.0) as isize * stride;
    }
    single(elements.element(0, element))
}
