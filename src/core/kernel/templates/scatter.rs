//! Updates that go where indices say. The rest of the data stays, and is not touched.
//!
//! ```text
//! data   [a b c d e]     indices [3 1]     updates [x y]
//! result [a y c x e]     at the data's bytes: d and b are the only elements that change
//! ```
//!
//! Or updates that are added up by their indices, over zeros:
//!
//! ```text
//! indices [3 1 3]     updates [x y z]     result [0 y 0 x+z 0]
//! ```

use super::*;

pub(super) static SCATTER: TemplateDef = TemplateDef {
    name: "scatter",
    doc: "updates at the places that indices choose, over the data",
    core_reads: |_| 3,
    widens: |_, _, _| true,
    in_place: true,
    alone: true,
    invocations: |kernel| {
        let &Template::Scatter { axis, join, .. } = &kernel.template else { mismatch(&kernel.template) };
        kernel.shape.numel() / if join.is_some() { kernel.shape[axis].max(1) } else { 1 }
    },
    check: |kernel, _| {
        let &Template::Scatter { axis, extent, join, .. } = &kernel.template else { mismatch(&kernel.template) };
        let Kernel { shape, reads, writes, body, .. } = kernel;
        (0..3).try_for_each(|i| kernel.reads_extents(i, shape))?;
        ensure(axis < shape.len(), || format!("updates along axis {axis} of {shape}"))?;
        ensure(reads[1].dtype.is_int(), || {
            format!("operand 1 read: expected integer indices, found {}", reads[1].dtype)
        })?;
        ensure(extent > 0 || kernel.is_empty(), || "an index into an empty axis".to_owned())?;
        ensure(is_countable(&Shape::new([extent])), || format!("an indexed extent of {extent} is too large"))?;
        let [result] = &writes[..] else { return Err(format!("expected one result, found {}", writes.len())) };
        let [data, _, updates] = [0, 1, 2].map(|i| &reads[i]);
        let joins = join.is_none() || data.dtype.is_number();
        ensure(joins, || format!("operand 0 read: expected numbers, found {}", data.dtype))?;
        let same = result == data && updates.dtype == data.dtype;
        ensure(same, || "expected a result that lies as the data does, and updates of its type".to_owned())?;
        let still = shape[axis] < 2 || data.access.strides[axis] == 0;
        ensure(still, || format!("the data moves along axis {axis}, which counts updates"))?;
        ensure(kernel.stores_alone() && body.is_identity(), || "expected updates that are stored as they are".into())
    },
    axis_of: |kernel, _, k| {
        let &Template::Scatter { axis, unique, join, .. } = &kernel.template else { mismatch(&kernel.template) };
        // An update must know the later ones.
        if k == axis && (!unique || join.is_some()) { Along::Tied } else { Along::Axis(k) }
    },
    reach: |t, operand| {
        let &Template::Scatter { stride, extent, .. } = t else { mismatch(t) };
        if operand == 0 { vec![(extent, stride)] } else { Vec::new() }
    },
    meaning: scatter,
    samples: || {
        let index = |shape: &[usize], strides: &[isize]| Operand {
            access: Access { shape: Shape::new(shape), strides: strides.to_vec(), offset: 0 },
            dtype: DType::I64,
            packed: false,
        };
        let of = |template, shape: &[usize], base: Access, index: Operand| {
            let data = Operand { access: base, ..floats(shape) };
            let reads = vec![data.clone(), index, floats(shape)];
            let kernel = sample(template, shape, reads, Expr::input(0, DType::F32));
            Kernel { writes: vec![data], ..kernel }
        };
        // Rows of [7, 3], several of which may be the same. Then two rows from a start on in each of the caches of [2, 3, 5, 4].
        let rows = Template::Scatter { axis: 0, stride: 3, extent: 7, unique: false, join: None };
        let caches = Template::Scatter { axis: 2, stride: 4, extent: 5, unique: true, join: None };
        let joined = |join| Template::Scatter { axis: 0, stride: 3, extent: 7, unique: false, join: Some(join) };
        let base = |shape: &[usize], strides: &[isize]| Access {
            shape: Shape::new(shape),
            strides: strides.to_vec(),
            offset: 0,
        };
        let every = [Reduction::Sum, Reduction::Prod, Reduction::Max, Reduction::Min].into_iter();
        let joined = every.map(|join| of(joined(join), &[9, 3], base(&[9, 3], &[0, 1]), index(&[9, 3], &[1, 0])));
        let plain = [
            of(rows, &[9, 3], base(&[9, 3], &[0, 1]), index(&[9, 3], &[1, 0])),
            of(caches, &[2, 3, 2, 4], base(&[2, 3, 2, 4], &[60, 20, 0, 1]), index(&[2, 3, 2, 4], &[2, 0, 1, 0])),
        ];
        plain.into_iter().chain(joined).collect()
    },
    ..PLAIN
};

fn scatter(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let &Template::Scatter { axis, stride, extent, unique, join } = &kernel.template else {
        mismatch(&kernel.template)
    };
    let place = |i: f64| {
        let i = if i < 0.0 { i + extent as f64 } else { i };
        (0.0..extent as f64).contains(&i).then_some(i as isize)
    };
    let own = place(elements.at(1, index));
    let first = [&index[..axis], &[0], &index[axis + 1..]].concat();
    let all = if unique { Vec::new() } else { elements.along(1, &first, axis) };
    let last = all.iter().skip(index[axis] + 1).all(|&other| place(other) != own);
    let to = own.filter(|_| last).map(|i| kernel.reads[0].access.at(index) + i * stride);
    let update = match (to, join) {
        (Some(to), Some(join)) => {
            let updates = elements.along(2, &first, axis);
            // Indices that are unique have an update each.
            let same = |at: &usize| *at == index[axis] || all.get(*at).is_some_and(|&other| place(other) == own);
            let old = elements.element(0, to);
            (0..=index[axis]).filter(same).fold(old, |value, at| join.combine(value, updates[at]))
        }
        _ => elements.at(2, index),
    };
    Row { core: vec![update], to: to.map_or(To::Nowhere, To::Element), ..Row::default() }
}

pub(super) static SUM_BY_INDEX: TemplateDef = TemplateDef {
    name: "sum_by_index",
    doc: "sums of the updates that have the same index",
    core_reads: |_| 2,
    check: |kernel, _| {
        let Kernel { shape, reads, .. } = kernel;
        ensure(!shape.is_empty(), || "expected an axis that indices name, found a scalar".to_owned())?;
        kernel.reads_axes(1, 1)?;
        ensure(reads[1].dtype.is_int(), || {
            format!("operand 1 read: expected integer indices, found {}", reads[1].dtype)
        })?;
        kernel.reads_extents(0, &[&reads[1].access.shape[..], &shape[1..]].concat())?;
        kernel.reads_floats(1)
    },
    axis_of: |_, operand, axis| match (operand, axis) {
        (_, 0) => Along::Tied,
        (0, _) => Along::Axis(axis),
        _ => Along::Whole,
    },
    meaning: sum_by_index,
    samples: || {
        let index = |n: usize| Operand { dtype: DType::I64, ..floats(&[n]) };
        let of = |n: usize, shape: &[usize]| {
            let updates = floats(&[&[n], &shape[1..]].concat());
            sample(Template::SumByIndex, shape, vec![updates, index(n)], Expr::input(0, DType::F32))
        };
        vec![of(9, &[4, 3]), of(40, &[5, 2, 70]), of(3, &[6]), of(9, &[1100, 64])]
    },
    ..PLAIN
};

fn sum_by_index(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let extent = kernel.shape[0] as f64;
    let mut sum = 0.0;
    for update in 0..kernel.reads[1].access.shape[0] {
        let i = elements.at(1, &[update]);
        let i = if i < 0.0 { i + extent } else { i };
        if i == index[0] as f64 {
            sum += elements.at(0, &[&[update], &index[1..]].concat());
        }
    }
    single(sum)
}
