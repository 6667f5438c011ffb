//! The op table: one row per operator, by family.

use crate::dtype::DType;
use crate::error::ensure;
use crate::op::{Arity, Call, Eval, Fact, Infer, Input, Lower, Nodes, OpDef, OpResult, Tensors, Var};
use crate::shape::{Shape, indices};
use std::borrow::Cow;
use std::fmt;

/// What a row takes at most: its operators, what is counted, and how many there may be.
pub struct Limit {
    /// The operators.
    pub operators: &'static str,
    /// What is counted.
    pub what: &'static str,
    /// The most.
    pub most: usize,
}

/// The limits of rows, as the page of operators lists them.
pub static LIMITS: &[Limit] = &[
    Limit {
        operators: "Loop Scan",
        what: "iterations that differ in their shapes, or whose number a run decides",
        most: MOST_ITERATIONS,
    },
    Limit { operators: "Unique", what: "elements of a slice, where a run gives them", most: counted::MOST_COLUMNS },
    Limit {
        operators: "RoiAlign",
        what: "points of an element along an axis, as `sampling_ratio` says or the image's extent over the result's",
        most: grid::regions::MOST_POINTS,
    },
    Limit {
        operators: "Conv ConvTranspose MaxPool AveragePool, of doubles on the CPU",
        what: "elements of a window; of a pool, along an axis",
        most: window::taps::MOST_TAPS,
    },
    Limit {
        operators: "all, on GPUs",
        what: "elements of a tensor that no library computes",
        most: crate::kernel::MOST_ELEMENTS,
    },
];

/// The most iterations of a loop in a file.
pub const MOST_ITERATIONS: usize = 1 << 13;

pub use attention::keys_seen;
pub use collective::{
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MARK, RECV, REDUCE_SCATTER, SEND, collective, is_collective, is_passed,
};
pub use compose::constant as made_constant;
pub use counted::{Finder, finder};
pub use cut::OF_CUT_FILES;
pub use index::{BAND, from_start, tuples};
pub use integer::{OTHER_SIGN, PRODUCT_OF_BYTES, SUMS_OF_BYTES, requantized};
pub use layout::{AT_RUN, FETCH, Span, spans, spread};
pub use linear::SCORES;
pub use norm::softmax_axes;
pub use ort_attention::{COS as COSINES, PAST as KEYS, key_room};
pub use packed::Codes;
pub use random::{DROPOUT, dropout, dropped, ratio};
pub use reduce::SCAN;
pub use repeat::{Loop, REPEAT, attrs as loop_attrs};
pub use scatter::{SCATTER, SUM_BY_INDEX};
pub use sort::SORT;
pub use window::bytes::CONV_OF_BYTES;
pub use window::filters::SUMS_OF_PARTS;
pub use window::taps::by_taps;

mod attention;
mod collective;
mod compose;
mod counted;
mod cut;
mod einsum;
mod elementwise;
mod experts;
mod found;
mod fused;
mod grid;
mod index;
mod integer;
mod layout;
mod linear;
mod linear_attention;
mod loss;
mod norm;
mod ort_attention;
mod packed;
mod quantize;
mod random;
mod recurrent;
mod reduce;
mod repeat;
mod resize;
mod runtime;
mod scatter;
mod select;
mod signal;
mod sort;
mod terms;
mod updates;
mod window;

/// Every row, by family; names are unique.
pub static OPS: [&[OpDef]; 40] = [
    elementwise::OPS,
    reduce::OPS,
    layout::OPS,
    index::OPS,
    scatter::OPS,
    select::OPS,
    found::OPS,
    sort::OPS,
    linear::OPS,
    linear_attention::OPS,
    einsum::OPS,
    window::OPS,
    window::bytes::OPS,
    window::filters::OPS,
    window::sums::OPS,
    window::unpool::OPS,
    norm::OPS,
    loss::OPS,
    recurrent::OPS,
    repeat::OPS,
    collective::OPS,
    cut::OPS,
    resize::OPS,
    grid::OPS,
    grid::deform::OPS,
    grid::regions::OPS,
    quantize::OPS,
    integer::OPS,
    attention::OPS,
    runtime::OPS,
    recurrent::OF_RUNTIME,
    random::OPS,
    fused::OPS,
    packed::OPS,
    experts::OPS,
    ort_attention::OPS,
    signal::OPS,
    terms::OPS,
    updates::OPS,
    counted::OPS,
];

/// Every row, in order of the families.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    OPS.iter().flat_map(|family| family.iter())
}

/// True if a row is of an operator of ONNX Runtime's domain.
pub fn is_of_runtime(op: &OpDef) -> bool {
    let families = [runtime::OPS, recurrent::OF_RUNTIME, fused::OPS, packed::OPS, experts::OPS, ort_attention::OPS];
    let is_own = op.name.starts_with("plimsoll.");
    let in_family = families.iter().flat_map(|family| family.iter()).any(|other| other.name == op.name);
    in_family && !is_own || ["BiasGelu", "FastGelu", "QuickGelu"].contains(&op.name)
}

/// The row of the operator called `name`.
pub fn find(name: &str) -> Option<&'static OpDef> {
    all().find(|op| op.name == name)
}

/// The reason why an ONNX operator has no row, and the remedy. Its shapes or effects are unknown before the run.
pub fn unplannable(name: &str) -> Option<&'static str> {
    Some(match name {
        "StringSplit" => "how much it finds depends on data; let the model end before it",
        "Bernoulli" | "Multinomial" | "RandomNormal" | "RandomNormalLike" | "RandomUniform" | "RandomUniformLike" => {
            "it draws other numbers at every run; make them an input of the model"
        }
        "com.microsoft.RemovePadding" => {
            "how many tokens it leaves depends on data; export the model with padding, whose attention takes a mask instead"
        }
        "MaxRoiPool" => "where it reads depends on data; export the model with RoiAlign instead",
        "RegexFullMatch" | "StringConcat" | "StringNormalizer" | "ImageDecoder" => {
            "it works on strings or files; let the model begin after it"
        }
        "SequenceMap" => {
            "what it works on has no place that is known before the run; export the model with tensors alone"
        }
        _ => return None,
    })
}

/// The shape that the given inputs broadcast to.
fn broadcast(call: &Call) -> OpResult<Shape> {
    let shapes = || call.inputs.iter().flatten().map(|f| &f.shape);
    Shape::broadcast(shapes()).ok_or_else(|| {
        let shapes: Vec<_> = shapes().map(Shape::to_string).collect();
        format!("expected shapes that broadcast, found {}", shapes.join(" and "))
    })
}

/// The one element type of all given inputs.
fn same_dtype(call: &Call) -> OpResult<DType> {
    let mut given = call.inputs.iter().enumerate().filter_map(|(i, f)| Some((i, f.as_ref()?.dtype)));
    let (first, dtype) = given.next().expect("a row with operands has at least one: arity is checked first");
    match given.find(|&(_, d)| d != dtype) {
        Some((i, other)) => {
            let (first, name) = (input_name(call, first), input_name(call, i));
            Err(format!("input '{name}': expected {dtype} as input '{first}', found {other}"))
        }
        None => Ok(dtype),
    }
}

/// Refuses an optional input that does not broadcast to a shape.
fn broadcasts_to(call: &Call, input: usize, shape: &Shape) -> OpResult<()> {
    let fits = !call.has(input) || Shape::broadcast([shape, call.shape(input)]).as_ref() == Some(shape);
    expect_shape(call, input, fits, format_args!("a shape that broadcasts to {shape}"))
}

/// Refuses an input by its shape unless `fits`.
fn expect_shape(call: &Call, input: usize, fits: bool, expected: fmt::Arguments) -> OpResult<()> {
    ensure(fits, || format!("input '{}': expected {expected}, found {}", input_name(call, input), call.shape(input)))
}

/// Refuses an input that is given in another type than `of`, which has type `dtype`.
fn expect_type_of(call: &Call, input: usize, dtype: DType, of: &str) -> OpResult<()> {
    ensure(!call.has(input) || call.dtype(input) == dtype, || {
        format!("input '{}': expected {dtype} as {of}, found {}", input_name(call, input), call.dtype(input))
    })
}

/// The name of a data input. A variadic one is numbered.
fn input_name(call: &Call, input: usize) -> String {
    let data: Vec<_> = call.op.inputs.iter().filter(|i| !i.shapes()).collect();
    match data.last() {
        Some(last) if input + 1 >= data.len() && last.arity == Arity::Variadic => {
            format!("{}[{}]", last.name, input + 1 - data.len())
        }
        _ => data[input].name.to_owned(),
    }
}

/// Refuses an input whose type is not allowed.
fn expect_dtype(call: &Call, input: usize, expected: &str, allowed: fn(DType) -> bool) -> OpResult<DType> {
    let dtype = call.dtype(input);
    ensure(allowed(dtype), || format!("input '{}': expected {expected}, found {dtype}", input_name(call, input)))?;
    Ok(dtype)
}

/// The one floating-point type of all given inputs.
fn same_float(call: &Call) -> OpResult<DType> {
    let dtype = same_dtype(call)?;
    expect_dtype(call, 0, "a floating-point type", DType::is_float).map(|_| dtype)
}

/// The one type of all given inputs, of which products and their sums are taken.
fn same_factor(call: &Call) -> OpResult<DType> {
    let dtype = same_dtype(call)?;
    expect_dtype(call, 0, "a floating-point type, or integers of 32 or 64 bits", is_factor).map(|_| dtype)
}

/// True for the types that ONNX's products and their sums have.
fn is_factor(dtype: DType) -> bool {
    dtype.is_float() || dtype.is_int() && dtype.size() >= 4
}

/// A row with a meaning over whole tensors.
const fn row(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    infer: Infer,
    eval: Tensors,
    lower: Lower,
) -> OpDef {
    OpDef::new(name, doc, inputs, infer, Eval::Tensor(eval), lower)
}

/// A row that moves elements of its first input, or of all if it is variadic.
const fn moving(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    infer: Infer,
    eval: Tensors,
    lower: Lower,
) -> OpDef {
    OpDef::new(name, doc, inputs, infer, Eval::Move(eval), lower)
}

/// One output of this type and shape.
fn output(dtype: DType, shape: impl Into<Shape>) -> OpResult<Vec<Fact>> {
    Ok(vec![Fact::new(dtype, shape)])
}

/// A constant list of integers that the row cannot do without.
fn required_ints<'a>(call: &Call<'a>, name: &str) -> OpResult<Cow<'a, [i64]>> {
    call.ints(name)?.ok_or_else(|| format!("'{name}' is required and must be a constant"))
}

/// The gradient of a linear map along an axis: `weights(i)` lists the elements that output element `i` reads, with their weights.
fn transposed_map<'g>(
    b: Nodes<'g>,
    dy: Var<'g>,
    axis: usize,
    [out, extent]: [usize; 2],
    weights: impl Fn(usize) -> Vec<(usize, f64)>,
) -> OpResult<Var<'g>> {
    let fact = dy.fact()?;
    let (outer, inner): (usize, usize) = (fact.shape[..axis].iter().product(), fact.shape[axis + 1..].iter().product());
    let matrix = b.constant(fact.dtype, [extent, out], || {
        let mut matrix = vec![0.0; extent * out];
        for i in 0..out {
            weights(i).into_iter().for_each(|(j, weight)| matrix[j * out + i] += weight);
        }
        matrix
    });
    let mut shape = fact.shape;
    shape[axis] = extent;
    Ok(matrix.matmul(dy.shaped(&[outer, out, inner])).shaped(&shape))
}

/// The shape of a vector of `extent` elements that broadcasts along the first of `rank` axes.
fn along(extent: usize, rank: usize) -> Vec<usize> {
    let mut shape = vec![1; rank];
    shape[0] = extent;
    shape
}

/// The positions of the elements that differ only along `axes`, group by group, in row-major order.
fn groups(shape: &Shape, axes: &[usize]) -> Vec<Vec<usize>> {
    let kept: Shape = shape.iter().enumerate().map(|(k, &d)| if axes.contains(&k) { 1 } else { d }).collect();
    let mut groups = vec![Vec::new(); kept.numel()];
    for (at, mut index) in indices(shape).enumerate() {
        axes.iter().for_each(|&axis| index[axis] = 0);
        groups[position(&index, &kept)].push(at);
    }
    groups
}

/// The row-major position of an index.
fn position(index: &[usize], shape: &Shape) -> usize {
    index.iter().zip(shape.iter()).fold(0, |at, (&i, &d)| at * d + i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Attrs;
    use crate::tensor::Tensor;
    use std::collections::HashSet;

    /// An input by type, shape and values.
    pub type Input<'a> = (DType, &'a [usize], &'a [f64]);

    /// The inferred fact, as text, and the computed values of each output of a row.
    pub fn outputs(op: &str, inputs: &[Input], attrs: &Attrs) -> Vec<(String, Vec<f64>)> {
        let facts: Vec<_> = inputs.iter().map(|(dtype, shape, _)| Fact::new(*dtype, *shape)).collect();
        let facts: Vec<_> = facts.iter().map(Some).collect();
        let values: Vec<_> = inputs.iter().map(|(_, _, values)| Some(*values)).collect();
        let call = Call { op: find(op).expect("a row"), attrs, inputs: &facts };
        let inferred = call.infer().expect("facts");
        inferred.iter().map(Fact::to_string).zip(call.eval(&values).expect("values")).collect()
    }

    /// The first of [`outputs`].
    pub fn eval(op: &str, inputs: &[Input], attrs: &Attrs) -> (String, Vec<f64>) {
        outputs(op, inputs, attrs).swap_remove(0)
    }

    /// The reason why a row refuses a call.
    pub fn refused(op: &str, inputs: &[(DType, &[usize])], attrs: &Attrs) -> String {
        let facts: Vec<_> = inputs.iter().map(|(dtype, shape)| Fact::new(*dtype, *shape)).collect();
        let facts: Vec<_> = facts.iter().map(Some).collect();
        Call { op: find(op).expect("a row"), attrs, inputs: &facts }.infer().expect_err("refused")
    }

    #[test]
    fn rows_are_named_once_and_documented() {
        let mut names = HashSet::new();
        for op in all() {
            assert!(names.insert(op.name), "{} stands twice", op.name);
            assert!(!op.doc.is_empty(), "{} is not documented", op.name);
            let inputs: HashSet<_> = op.inputs.iter().map(|i| i.name).collect();
            assert_eq!(inputs.len(), op.inputs.len(), "{} has an input twice", op.name);
        }
    }

    #[test]
    fn every_row_has_a_sample_that_it_computes() {
        for op in all() {
            let sample = op.example();
            let tensors = sample.tensors();
            let fact = |tensor: &Option<Tensor>| tensor.as_ref().map(|t| Fact::new(t.dtype(), t.shape().clone()));
            let facts: Vec<_> = tensors.iter().map(fact).collect();
            let (facts, inputs): (Vec<_>, Vec<_>) =
                (facts.iter().map(Option::as_ref).collect(), tensors.iter().map(Option::as_ref).collect());
            let (least, most) = op.arity();
            assert!((least..=most).contains(&facts.len()), "{} has a sample with {} inputs", op.name, facts.len());
            let call = Call { op, attrs: &sample.attrs, inputs: &facts };
            if let Lower::Template(of) = op.lower {
                let views: Vec<_> =
                    facts.iter().flatten().map(|f| crate::shape::Access::contiguous(f.shape.clone())).collect();
                let made = of(&call, &views).unwrap_or_else(|e| panic!("{} has no template: {e}", op.name));
                let row = made.template.def();
                // A row may want a kernel for itself where its template does not: a fetch that were fused would not be early.
                let same = op.in_place == row.in_place && op.alone >= row.alone;
                assert!(same, "{} and its template, {}", op.name, row.name);
            }
            let outputs = call.compute(&inputs);
            let outputs = outputs.unwrap_or_else(|e| panic!("{} refuses its sample: {e}", op.name));
            assert!(outputs.iter().any(|t| t.shape().numel() > 0), "the sample of {} computes nothing", op.name);
        }
    }

    #[test]
    fn indices_are_row_major() {
        let shape = Shape::new([2, 3]);
        let found: Vec<_> = indices(&shape).map(|i| position(&i, &shape)).collect();
        assert_eq!(found, (0..6).collect::<Vec<_>>());
        assert_eq!((indices(&Shape::default()).count(), indices(&Shape::new([2, 0])).count()), (1, 0));
    }
}
