//! Two meanings of every elementwise row and every view agree: its values, and the code or the access that it is lowered to.

use crate::samples::{Sample, samples};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::op::{Args, Attrs, Call, Eval, Fact, Lower};
use plimsoll::internals::ops;
use plimsoll::internals::shape::{Access, Shape, advance};

fn agree(found: f64, expected: f64) -> bool {
    found == expected
        || found.is_nan() && expected.is_nan()
        || (found - expected).abs() <= 1e-12 * expected.abs().max(1.0)
}

/// Calls `test` with each sample's call and values.
fn each_call(mut test: impl FnMut(&Sample, &Call, &[Option<&[f64]>])) {
    for sample in samples() {
        let op = ops::find(sample.op).unwrap_or_else(|| panic!("no row '{}'", sample.op));
        let tensors = sample.tensors();
        let facts: Vec<_> =
            tensors.iter().map(|t| t.as_ref().map(|t| Fact::new(t.dtype(), t.shape().clone()))).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let values: Vec<_> = tensors.iter().map(|t| t.as_ref().map(|t| t.to_f64())).collect();
        let values: Vec<_> = values.iter().map(Option::as_deref).collect();
        test(&sample, &Call { op, attrs: &sample.attrs, inputs: &facts }, &values);
    }
}

fn body(call: &Call, lower: fn(&Args, &Call) -> Expr) -> Body {
    let inputs = call.inputs.iter().enumerate();
    let inputs: Vec<_> = inputs.map(|(i, fact)| fact.map(|f| Expr::input(i, f.dtype))).collect();
    let expr = lower(&Args(&inputs), call);
    let fact = &call.infer().expect("facts")[0];
    assert_eq!(expr.dtype(), fact.dtype, "{}: the type of its expression", call.op.name);
    Body::new(&[expr])
}

#[test]
fn elementwise_code_means_what_the_row_says() {
    each_call(|sample, call, values| {
        let Lower::Map(lower) = call.op.lower else { return };
        let (body, shape) = (body(call, lower), call.infer().expect("facts").remove(0).shape);
        let expected = call.eval(values).expect("values").remove(0);
        let views = call.inputs.iter().map(|f| f.map(|f| Access::contiguous(f.shape.clone()).broadcast(&shape)));
        let views: Vec<_> = views.collect();
        let mut index = vec![0; shape.len()];
        for expected in expected {
            let input = |(value, view): (&Option<&[f64]>, &Option<Access>)| match (value, view) {
                (Some(value), Some(view)) => value[view.at(&index) as usize],
                _ => f64::NAN,
            };
            let x: Vec<_> = values.iter().zip(&views).map(input).collect();
            let found = body.eval(&x, &index, &[])[0];
            assert!(agree(found, expected), "{sample:?} at {x:?}: {found}, expected {expected}");
            advance(&mut index, &shape);
        }
    });
}

/// All rows, all combinations of types that a row accepts, all combinations of values from a grid.
#[test]
fn elementwise_code_means_what_the_row_says_on_a_grid() {
    const FLOATS: &[f64] = &[-800.0, -20.5, -3.5, -1.0, -0.25, 0.0, 0.3, 0.5, 1.0, 2.5, 7.0, 30.0, 800.0];
    const WHOLE: &[f64] = &[-9.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0];
    const TYPES: [DType; 4] = [DType::F32, DType::I64, DType::I32, DType::Bool];
    let to = |d: DType| Attrs::new().with("to", d.onnx());
    let attrs = [
        Attrs::new(),
        Attrs::new().with("alpha", 0.75),
        Attrs::new().with("gamma", 0.5).with("alpha", 2.0),
        Attrs::new().with("alpha", 0.5).with("beta", 0.1),
        Attrs::new().with("fmod", 1),
        Attrs::new().with("approximate", "tanh"),
        Attrs::new().with("min", -1.0),
        to(DType::F32),
        to(DType::I64),
        to(DType::Bool),
    ];
    for op in ops::all() {
        let (Lower::Map(lower), Eval::Scalar(eval)) = (op.lower, op.eval) else { continue };
        let (min, max) = op.arity();
        let mut checked = 0;
        for count in min..=max.min(3) {
            for kinds in product(&TYPES, count) {
                let facts: Vec<_> = kinds.iter().map(|&d| Fact::new(d, Shape::default())).collect();
                let facts: Vec<_> = facts.iter().map(Some).collect();
                for attrs in attrs.iter().filter(|a| a.iter().all(|(name, _)| op.attrs.contains(&name))) {
                    let call = Call { op, attrs, inputs: &facts };
                    let Ok(inferred) = call.infer() else { continue };
                    let body = body(&call, lower);
                    let grid = |d: &DType| match d {
                        DType::Bool => &[0.0, 1.0],
                        d if d.is_float() => FLOATS,
                        _ => WHOLE,
                    };
                    let choices: Vec<&[f64]> = kinds.iter().map(grid).collect();
                    for x in combinations(&choices) {
                        let whole = |v: f64| if inferred[0].dtype.is_float() { v } else { v.trunc() };
                        let (found, expected) = (body.eval(&x, &[], &[])[0], whole(eval(&x, &call)));
                        assert!(
                            agree(found, expected),
                            "{} {kinds:?} {attrs:?} at {x:?}: {found}, expected {expected}",
                            op.name
                        );
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 0, "{} accepted no types", op.name);
    }
}

fn product<T: Copy>(choices: &[T], count: usize) -> Vec<Vec<T>> {
    combinations(&vec![choices; count])
}

fn combinations<T: Copy>(choices: &[&[T]]) -> Vec<Vec<T>> {
    choices.iter().fold(vec![Vec::new()], |all, choice| {
        all.iter().flat_map(|c| choice.iter().map(|&v| [&c[..], &[v]].concat())).collect()
    })
}

/// A view finds the elements of any source, or reports that it needs a copy. Of contiguous data it never needs one.
#[test]
fn views_find_the_elements_that_the_row_says() {
    each_call(|sample, call, _| {
        let Lower::View(view) = call.op.lower else { return };
        let (from, to) = (call.shape(0).clone(), call.infer().expect("facts").remove(0).shape);
        let count: Vec<f64> = (0..from.numel()).map(|i| i as f64).collect();
        let expected = call.eval(&[Some(&count)]).expect("values").remove(0);
        let mut reversed = Access::contiguous(from.iter().rev().copied().collect());
        reversed = reversed.permute(&(0..from.len()).rev().collect::<Vec<_>>());
        let mut sparse = Access::contiguous(from.iter().map(|&d| d * 2).collect());
        sparse = (0..from.len()).fold(sparse, |a, k| a.slice(k, from[k].min(1), 2, from[k]));
        for source in [Access::contiguous(from.clone()), reversed, sparse] {
            // The offset of each element of the source, in row-major order.
            let elements = addresses(&source);
            match view(call, &source) {
                Some(access) => {
                    assert_eq!(access.shape, to, "{sample:?}");
                    let expected: Vec<_> = expected.iter().map(|&v| elements[v as usize]).collect();
                    assert_eq!(addresses(&access), expected, "{sample:?} of {source:?}");
                }
                None => assert!(!source.is_contiguous(), "{sample:?} of contiguous data"),
            }
        }
    });
}

fn addresses(access: &Access) -> Vec<isize> {
    let mut index = vec![0; access.shape.len()];
    let next = |_| {
        let at = access.at(&index);
        advance(&mut index, &access.shape);
        at
    };
    (0..access.shape.numel()).map(next).collect()
}

/// Every attribute and every optional input is in a sample. A row's samples also run the rows that it decomposes into.
#[test]
fn samples_cover_every_attribute_and_input() {
    let samples = samples();
    let mut missing = Vec::new();
    for op in ops::all() {
        let part_of = |whole: &str| op.name.strip_prefix("plimsoll.").is_some_and(|part| part.starts_with(whole));
        let of_op = || samples.iter().filter(|s| s.op == op.name || part_of(s.op));
        let attrs = op.inputs.iter().filter(|i| i.shapes()).map(|i| i.name).chain(op.attrs.iter().copied());
        missing
            .extend(attrs.filter(|a| !of_op().any(|s| s.attrs.get(a).is_some())).map(|a| format!("{}.{a}", op.name)));
        let data = op.inputs.iter().filter(|i| !i.shapes()).enumerate();
        let absent = data.filter(|(i, _)| !of_op().any(|s| s.inputs.get(*i).is_some_and(Option::is_some)));
        missing.extend(absent.map(|(_, input)| format!("{}({})", op.name, input.name)));
    }
    assert!(missing.is_empty(), "without a sample: {}", missing.join(", "));
}
