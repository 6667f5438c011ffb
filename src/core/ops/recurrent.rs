//! Recurrent rows: a cell walks along the sequence with its state.
//!
//! One product computes the input's share of all cells. A loop walks along the sequence, and adds the product with the state:
//!
//! ```text
//! X [s, b, i] --x W'--> [s, b, gates h] --row t--+--> gates --> state t, which is row t of Y [s, b, h]
//!                             state t-1 --x R'---'
//! ```

use super::compose::composed;
use super::repeat::{Inputs, repeat};
use super::{ensure, expect_dtype, expect_shape, find, output, same_float};
use crate::dtype::DType;
use crate::op::{
    Args, Attr, Attrs, Call, Eval, Fact, Infer, Input, Lower, Nodes, OpDef, OpResult, Rule, Tensors, Var, inputs, names,
};
use crate::shape::{Access, Shape};
use std::ops::Range;

const ATTRS: &[&str] = names![
    activation_alpha activation_beta activations clip direction hidden_size input_forget layout linear_before_reset
];
const RNN: &[Input] = inputs![X W R B? sequence_lens? initial_h?];
/// Indices of inputs: the lengths, the first of the initial states, and the peepholes.
const LENGTHS: usize = 4;
const INITIAL: usize = 5;
const PEEPHOLES: usize = 7;
const LSTM: &[Input] = inputs![X W R B? sequence_lens? initial_h? initial_c? P?];

pub(super) static OPS: &[OpDef] = &[
    row(
        "RNN",
        "h = tanh(x W' + h R' + B), or relu of that, along a sequence: every h, and the last",
        RNN,
        |call| infer(call, &SIMPLE),
        |x, call| eval(x, call, &SIMPLE),
        |b, call, x| nodes(b, call, x, &SIMPLE),
    )
    .sample(|s| s.floats(&[&[4, 2, 3], &[1, 5, 3], &[1, 5, 5]])),
    row(
        "GRU",
        "Gated recurrent units along a sequence: every hidden state, and the last",
        RNN,
        |call| infer(call, &GATED),
        |x, call| eval(x, call, &GATED),
        |b, call, x| nodes(b, call, x, &GATED),
    )
    .sample(|s| s.floats(&[&[4, 2, 3], &[1, 15, 3], &[1, 15, 5]])),
    row(
        "LSTM",
        "Long short-term memory along a sequence: every hidden state, the last, and the last cell",
        LSTM,
        |call| infer(call, &LONG),
        |x, call| eval(x, call, &LONG),
        |b, call, x| nodes(b, call, x, &LONG),
    )
    .sample(|s| s.floats(&[&[4, 2, 3], &[1, 20, 3], &[1, 20, 5]])),
];

/// Rows of ONNX Runtime's domain.
pub(super) static OF_RUNTIME: &[OpDef] = &[composed(
    "DynamicQuantizeLSTM",
    "LSTM of weights of 8 bits, [directions, input, gates hidden], which have a scale and a zero point per direction, or per direction and row of \
     the gates. Its other numbers are not rounded",
    inputs![
        X W R B? sequence_lens? initial_h? initial_c? P? W_scale W_zero_point R_scale R_zero_point
    ],
    quantized,
)
.sample(|s| {
    let s = s.floats(&[&[3, 2, 4]]).input(DType::I8, &[1, 4, 20], -128.0, 127.0).input(DType::I8, &[1, 5, 20], -128.0, 127.0);
    let s = s.floats(&[&[1, 40]]).omitted().omitted().omitted().omitted();
    let s = s.given(DType::F32, &[1], &[0.0078125]).given(DType::I8, &[1], &[3.0]);
    s.input(DType::F32, &[1, 20], 0.001, 0.01).input(DType::I8, &[1, 20], -9.0, 9.0).element(DType::F32)
})
.attrs(names![activation_alpha activation_beta activations clip direction hidden_size input_forget])];

/// The first inputs of a scale and a zero point, by the input of the weights less 1.
const SCALES: [usize; 2] = [PEEPHOLES + 1, PEEPHOLES + 3];

fn quantized<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "f32", |d| d == DType::F32)?;
    let mut facts = Vec::new();
    for (input, first) in [1, 2].into_iter().zip(SCALES) {
        expect_dtype(call, input, "u8 or i8", DType::is_byte)?;
        let &[directions, elements, rows] = &call.shape(input)[..] else {
            let (name, found) = (call.op.inputs[input].name, call.shape(input));
            return Err(format!("input '{name}': expected [directions, elements, gates], found {found}"));
        };
        for at in [first, first + 1] {
            let fits = matches!(call.shape(at)[..], [n] if n == directions)
                || matches!(call.shape(at)[..], [n, r] if (n, r) == (directions, rows));
            expect_shape(call, at, fits, format_args!("[{directions}] or [{directions}, {rows}]"))?;
        }
        facts.push(Fact::new(dtype, [directions, rows, elements]));
    }
    let row = find("LSTM").ok_or("there is no LSTM")?;
    let mut inputs = call.inputs[..call.inputs.len().min(PEEPHOLES + 1)].to_vec();
    inputs[1..3].iter_mut().zip(&facts).for_each(|(input, fact)| *input = Some(fact));
    let call = Call { op: row, attrs: call.attrs, inputs: &inputs };
    infer(&call, &LONG)?;
    let weights = |input: usize, d: usize| {
        let first = SCALES[input - 1];
        let [bytes, scale, zero] = [input, first, first + 1].map(|at| element(x[at], d));
        // One zero point may serve all rows that have scales of their own.
        let zero = zero.expand(&scale.shape()?);
        Ok((bytes.op("DequantizeLinear", &[scale, zero], Attrs::new().with("axis", 1)), false))
    };
    let inputs: Vec<_> = (0..inputs.len()).map(|at| x.given(at)).collect();
    walked(b, &call, &Args(&inputs), &LONG, &weights)
}

const fn row(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    infer: Infer,
    eval: Tensors,
    nodes: Rule,
) -> OpDef {
    let (eval, lower) = (Eval::Tensor(eval), Lower::Decompose(nodes));
    OpDef::new(name, doc, inputs, infer, eval, lower).attrs(ATTRS)
}

/// A kind of recurrent cell.
struct Cell {
    /// Rows of W and R per hidden element.
    gates: usize,
    /// Tensors of a state: the hidden state, and for LSTM the cell state.
    states: usize,
    /// The functions of a direction, unless the call names others.
    activations: &'static [&'static str],
    /// Computes the next state of one row in `f64` from the gates' share of the input with its bias, the old state,
    /// the product of a state with R, and the peepholes.
    step: fn(&Call, &[Function], &[f64], &State, &dyn Fn(&[f64]) -> Vec<f64>, Option<&[f64]>) -> OpResult<State>,
    /// Builds the nodes of the next state.
    nodes: for<'g> fn(&Call, &[Function], Var<'g>, &[Var<'g>], &Recurrence<'g>) -> OpResult<Vec<Var<'g>>>,
}

/// The hidden state of a row, and its cell state.
type State = [Vec<f64>; 2];

static SIMPLE: Cell = Cell {
    gates: 1,
    states: 1,
    activations: &["tanh"],
    step: |_, f, x, [h, _], recur, _| {
        Ok([x.iter().zip(recur(h)).map(|(x, r)| f[0].value(x + r)).collect(), Vec::new()])
    },
    nodes: |_, f, x, state, recurrence| Ok(vec![f[0].node(x + recurrence.product(state[0], 0..1))]),
};

/// Gates z, r and h.
static GATED: Cell = Cell {
    gates: 3,
    states: 1,
    activations: &["sigmoid", "tanh"],
    step: |call, f, x, [h, _], recur, _| {
        let (n, linear) = (h.len(), call.int("linear_before_reset", 0)? != 0);
        let old = recur(h);
        let z: Vec<_> = (0..n).map(|j| f[0].value(x[j] + old[j])).collect();
        let r: Vec<_> = (n..2 * n).map(|j| f[0].value(x[j] + old[j])).collect();
        let reset: Vec<_> = r.iter().zip(h).map(|(r, h)| r * h).collect();
        let reset = recur(&reset);
        let hidden = |j: usize| {
            let k = 2 * n + j;
            f[1].value(x[k] + if linear { r[j] * old[k] } else { reset[k] })
        };
        Ok([(0..n).map(|j| (1.0 - z[j]) * hidden(j) + z[j] * h[j]).collect(), Vec::new()])
    },
    nodes: |call, f, x, state, recurrence| {
        let (h, linear) = (state[0], call.int("linear_before_reset", 0)? != 0);
        let old = recurrence.product(h, 0..if linear { 3 } else { 2 });
        let gate = |k: usize| f[0].node(recurrence.gate(x, k) + recurrence.gate(old, k));
        let (z, r) = (gate(0), gate(1));
        let reset = if linear { r * recurrence.gate(old, 2) } else { recurrence.product(r * h, 2..3) };
        let hidden = f[1].node(recurrence.gate(x, 2) + reset);
        // (1 - z) hidden + z h
        Ok(vec![hidden + z * (h - hidden)])
    },
};

/// Gates i, o, f and c. Where the gates i and f are one, f is 1 - i.
static LONG: Cell = Cell {
    gates: 4,
    states: 2,
    activations: &["sigmoid", "tanh", "tanh"],
    step: |call, functions, x, [h, c], recur, peepholes| {
        let (n, old, coupled) = (h.len(), recur(h), call.int("input_forget", 0)? != 0);
        let sum = |k: usize, j: usize| x[k * n + j] + old[k * n + j];
        let gate =
            |k: usize, j: usize, c: f64| functions[0].value(sum(k, j) + peepholes.map_or(0.0, |p| p[k * n + j] * c));
        let cell = |j: usize| {
            let i = gate(0, j, c[j]);
            let f = if coupled { 1.0 - i } else { gate(2, j, c[j]) };
            f * c[j] + i * functions[1].value(sum(3, j))
        };
        let c: Vec<_> = (0..n).map(cell).collect();
        Ok([(0..n).map(|j| gate(1, j, c[j]) * functions[2].value(c[j])).collect(), c])
    },
    nodes: |call, functions, x, state, recurrence| {
        let sum = x + recurrence.product(state[0], 0..4);
        let gate = |k: usize, c| {
            let gate = recurrence.gate(sum, k);
            let hidden = recurrence.hidden;
            let seen = recurrence.peepholes.map(|all| all.part(0, k * hidden..(k + 1) * hidden));
            functions[0].node(seen.map_or(gate, |seen| gate + seen * c))
        };
        let i = gate(0, state[1]);
        let f = if call.int("input_forget", 0)? != 0 { 1.0 - i } else { gate(2, state[1]) };
        let g = functions[1].node(recurrence.gate(sum, 3));
        let c = f * state[1] + i * g;
        Ok(vec![gate(1, c) * functions[2].node(c), c])
    },
};

#[cfg(test)]
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// A function of a gate.
struct Function {
    kind: &'static Kind,
    /// `alpha` and `beta`.
    parameters: [f64; 2],
    /// What its argument is held within, on both sides of 0.
    clip: Option<f64>,
}

/// A function that `activations` can name.
struct Kind {
    /// In lower case: names are compared so.
    name: &'static str,
    /// The row that computes it, with its parameters as attributes. Without one it is made of others.
    row: &'static str,
    /// What `alpha` and `beta` are unless they are given; `None` if the function has no such parameter.
    parameters: [Option<f64>; 2],
    value: fn(f64, [f64; 2]) -> f64,
}

static KINDS: [Kind; 11] = [
    Kind { name: "affine", row: "", parameters: [Some(1.0), Some(0.0)], value: |x, [a, b]| a * x + b },
    Kind {
        name: "elu",
        row: "Elu",
        parameters: [Some(1.0), None],
        value: |x, [a, _]| if x < 0.0 { a * x.exp_m1() } else { x },
    },
    Kind {
        name: "hardsigmoid",
        row: "HardSigmoid",
        parameters: [Some(0.2), Some(0.5)],
        value: |x, [a, b]| (a * x + b).clamp(0.0, 1.0),
    },
    Kind {
        name: "leakyrelu",
        row: "LeakyRelu",
        parameters: [Some(0.01), None],
        value: |x, [a, _]| if x < 0.0 { a * x } else { x },
    },
    Kind { name: "relu", row: "Relu", parameters: [None; 2], value: |x, _| x.max(0.0) },
    Kind { name: "scaledtanh", row: "", parameters: [Some(1.0), Some(1.0)], value: |x, [a, b]| a * (b * x).tanh() },
    Kind { name: "sigmoid", row: "Sigmoid", parameters: [None; 2], value: |x, _| 1.0 / (1.0 + (-x).exp()) },
    Kind {
        name: "softplus",
        row: "Softplus",
        parameters: [None; 2],
        value: |x, _| x.max(0.0) + (-x.abs()).exp().ln_1p(),
    },
    Kind { name: "softsign", row: "Softsign", parameters: [None; 2], value: |x, _| x / (1.0 + x.abs()) },
    Kind { name: "tanh", row: "Tanh", parameters: [None; 2], value: |x, _| x.tanh() },
    Kind {
        name: "thresholdedrelu",
        row: "ThresholdedRelu",
        parameters: [Some(1.0), None],
        value: |x, [a, _]| if x > a { x } else { 0.0 },
    },
];

impl Function {
    /// The functions of all directions, one after another. Those that have a parameter take the next of what is given.
    fn all(call: &Call, cell: &Cell, directions: usize) -> OpResult<Vec<Function>> {
        let names: Vec<String> = match call.attrs.get("activations") {
            None => Vec::new(),
            Some(Attr::Strs(names)) => names.iter().map(|name| name.to_lowercase()).collect(),
            Some(other) => return Err(format!("attribute 'activations': expected strings, found {}", other.kind())),
        };
        let names = match names.len() {
            0 => cell.activations.repeat(directions),
            _ => names.iter().map(String::as_str).collect(),
        };
        let count = cell.activations.len() * directions;
        ensure(names.len() == count, || {
            format!("attribute 'activations': expected {count} for {directions} directions, found {}", names.len())
        })?;
        let clip = call.float("clip", 0.0)?;
        ensure(clip >= 0.0, || format!("attribute 'clip': expected a positive number, or 0 for none, found {clip}"))?;
        let clip = Some(clip).filter(|&clip| clip > 0.0);
        let [alpha, beta] = ["activation_alpha", "activation_beta"].map(|name| call.floats(name));
        let mut given = [alpha?.unwrap_or_default().into_iter(), beta?.unwrap_or_default().into_iter()];
        let function = |name: &str| {
            let kind = KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
                let known = KINDS.each_ref().map(|kind| kind.name).join(", ");
                format!("attribute 'activations': expected some of {known}, found {name}")
            })?;
            let mut parameters = [0.0; 2];
            for ((parameter, usual), given) in parameters.iter_mut().zip(kind.parameters).zip(&mut given) {
                if let Some(usual) = usual {
                    *parameter = given.next().unwrap_or(usual);
                }
            }
            Ok(Function { kind, parameters, clip })
        };
        names.into_iter().map(function).collect()
    }

    fn value(&self, x: f64) -> f64 {
        (self.kind.value)(self.clip.map_or(x, |clip| x.clamp(-clip, clip)), self.parameters)
    }

    fn node<'g>(&self, x: Var<'g>) -> Var<'g> {
        let x = self.clip.map_or(x, |clip| x.clip(-clip, clip));
        let ([a, b], Kind { name, row, parameters, .. }) = (self.parameters, self.kind);
        match *name {
            "affine" => x * a + b,
            "scaledtanh" => (x * b).tanh() * a,
            _ => {
                let known = ["alpha", "beta"].into_iter().zip(parameters).zip(self.parameters);
                let known = known.filter_map(|((name, usual), value)| usual.map(|_| (name, value)));
                x.op(row, &[], known.fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value)))
            }
        }
    }
}

/// The extents of a recurrent row.
struct Extents {
    steps: usize,
    batch: usize,
    input: usize,
    hidden: usize,
    /// Per direction, true if it walks from the end.
    reversed: &'static [bool],
}

impl Extents {
    fn of(call: &Call, cell: &Cell) -> OpResult<Extents> {
        let directions: [(_, &[bool]); 3] =
            [("forward", &[false]), ("reverse", &[true]), ("bidirectional", &[false, true])];
        let reversed = call.choice("direction", &directions)?;
        let [steps, batch, input] = call.shape(0)[..] else {
            return Err(format!("input 'X': expected [sequence, batch, input], found {}", call.shape(0)));
        };
        let &[_, _, hidden] = &call.shape(2)[..] else {
            return Err(format!("input 'R': expected [directions, gates, hidden], found {}", call.shape(2)));
        };
        let extents = Extents { steps, batch, input, hidden, reversed };
        extents.check(call, cell)?;
        Ok(extents)
    }

    fn check(&self, call: &Call, cell: &Cell) -> OpResult<()> {
        let (directions, rows) = (self.reversed.len(), cell.gates.saturating_mul(self.hidden));
        let state = [directions, self.batch, self.hidden];
        let expected: [(usize, &[usize]); 6] = [
            (1, &[directions, rows, self.input]),
            (2, &[directions, rows, self.hidden]),
            (3, &[directions, rows.saturating_mul(2)]),
            (INITIAL, &state),
            (INITIAL + 1, &state),
            (PEEPHOLES, &[directions, self.hidden.saturating_mul(3)]),
        ];
        for (input, expected) in expected {
            let fits = !call.has(input) || call.shape(input)[..] == *expected;
            expect_shape(call, input, fits, format_args!("{expected:?}"))?;
        }
        let given = call.int("hidden_size", self.hidden as i64)?;
        if given != self.hidden as i64 {
            return Err(format!("attribute 'hidden_size': expected {} as R has it, found {given}", self.hidden));
        }
        ensure(self.hidden > 0, || format!("input 'R': expected a state with elements, found {}", call.shape(2)))?;
        Ok(())
    }
}

/// A call whose batch comes first, as one whose sequence does: the facts of its inputs, and its attributes.
struct SequenceFirst {
    inputs: Vec<Option<Fact>>,
    attrs: Attrs,
}

/// The order of the axes `[sequence, directions, batch, hidden]` where the batch comes first.
const BATCH_FIRST: [usize; 4] = [2, 0, 1, 3];

impl SequenceFirst {
    /// None if the sequence comes first already.
    fn of(call: &Call) -> OpResult<Option<SequenceFirst>> {
        match call.int("layout", 0)? {
            0 => return Ok(None),
            1 => {}
            found => return Err(format!("attribute 'layout': expected 0 or 1, found {found}")),
        }
        let mut inputs: Vec<Option<Fact>> = call.inputs.iter().map(|fact| fact.cloned()).collect();
        for at in [0, INITIAL, INITIAL + 1] {
            let Some(fact) = inputs.get_mut(at).and_then(Option::as_mut) else { continue };
            let shape = &mut fact.shape;
            ensure(shape.len() == 3, || format!("expected a batch of 3 axes, found {shape}"))?;
            shape.swap(0, 1);
        }
        let mut attrs = call.attrs.clone();
        attrs.remove("layout");
        Ok(Some(SequenceFirst { inputs, attrs }))
    }

    fn call<T>(&self, op: &'static OpDef, ask: impl FnOnce(&Call) -> OpResult<T>) -> OpResult<T> {
        let inputs: Vec<_> = self.inputs.iter().map(Option::as_ref).collect();
        ask(&Call { op, attrs: &self.attrs, inputs: &inputs })
    }

    /// The order in which an output of `rank` axes has those of one whose sequence comes first.
    fn order(rank: usize) -> &'static [usize] {
        if rank == 4 { &BATCH_FIRST } else { &[1, 0, 2] }
    }
}

/// The elements of a tensor whose axes are permuted, row-major.
fn permuted(values: &[f64], shape: &Shape, order: &[usize]) -> Vec<f64> {
    let access = Access::contiguous(shape.clone()).permute(order);
    access.elements().map(|at| values[at as usize]).collect()
}

fn infer(call: &Call, cell: &Cell) -> OpResult<Vec<Fact>> {
    if let Some(turned) = SequenceFirst::of(call)? {
        let mut facts = turned.call(call.op, |call| infer(call, cell))?;
        for fact in &mut facts {
            fact.shape = SequenceFirst::order(fact.shape.len()).iter().map(|&axis| fact.shape[axis]).collect();
        }
        return Ok(facts);
    }
    let mut floats = call.inputs.to_vec();
    floats.iter_mut().skip(LENGTHS).take(1).for_each(|lengths| *lengths = None);
    let dtype = same_float(&Call { inputs: &floats, ..*call })?;
    let Extents { steps, batch, hidden, reversed, .. } = Extents::of(call, cell)?;
    call.int("input_forget", 0)?;
    call.int("linear_before_reset", 0)?;
    if call.has(LENGTHS) && (!call.dtype(LENGTHS).is_int() || call.shape(LENGTHS)[..] != [batch]) {
        return Err(format!("input 'sequence_lens': expected integers [{batch}], found {}", call.fact(LENGTHS)));
    }
    Function::all(call, cell, reversed.len())?;
    let mut facts = output(dtype, [steps, reversed.len(), batch, hidden])?;
    facts.resize(1 + cell.states, Fact::new(dtype, [reversed.len(), batch, hidden]));
    Ok(facts)
}

fn eval(x: &Args<&[f64]>, call: &Call, cell: &Cell) -> OpResult<Vec<Vec<f64>>> {
    if let Some(turned) = SequenceFirst::of(call)? {
        let turn = |at: usize| Some(permuted(x.given(at)?, call.shape(at), &[1, 0, 2]));
        let own = [0, INITIAL, INITIAL + 1].map(turn);
        let mut inputs: Vec<_> = (0..call.inputs.len()).map(|at| x.given(at)).collect();
        for (at, values) in [0, INITIAL, INITIAL + 1].into_iter().zip(&own) {
            if let (Some(input), Some(values)) = (inputs.get_mut(at), values) {
                *input = Some(values);
            }
        }
        return turned.call(call.op, |call| {
            let outputs = eval(&Args(&inputs), call, cell)?.into_iter().zip(infer(call, cell)?);
            Ok(outputs.map(|(y, fact)| permuted(&y, &fact.shape, SequenceFirst::order(fact.shape.len()))).collect())
        });
    }
    let Extents { steps, batch, input, hidden, reversed } = Extents::of(call, cell)?;
    let rows = cell.gates * hidden;
    let functions = Function::all(call, cell, reversed.len())?;
    let part = |i: usize, at: usize, len: usize| x.given(i).map(|v| &v[at * len..][..len]);
    let times = |matrix: &[f64], vector: &[f64], bias: Option<&[f64]>| -> Vec<f64> {
        let row = |k: usize| matrix[k * vector.len()..][..vector.len()].iter().zip(vector).map(|(a, b)| a * b);
        (0..rows).map(|k| row(k).sum::<f64>() + bias.map_or(0.0, |bias| bias[k])).collect()
    };
    let mut y = vec![0.0; steps * reversed.len() * batch * hidden];
    let mut last = vec![Vec::new(); cell.states];
    for (d, &reversed_here) in reversed.iter().enumerate() {
        let w = part(1, d, rows * input).ok_or("input 'W' has no value")?;
        let r = part(2, d, rows * hidden).ok_or("input 'R' has no value")?;
        let (own, recurrent) = part(3, d, 2 * rows).map(|bias| bias.split_at(rows)).unzip();
        for row in 0..batch {
            let start = |i: usize| part(i, d * batch + row, hidden).map_or(vec![0.0; hidden], <[f64]>::to_vec);
            let mut state = [start(INITIAL), start(INITIAL + 1)];
            let length = x.given(LENGTHS).map_or(steps as f64, |lengths| lengths[row]);
            for t in 0..steps {
                let t = if reversed_here { steps - 1 - t } else { t };
                if t as f64 >= length {
                    continue;
                }
                let x = part(0, t * batch + row, input).ok_or("input 'X' has no value")?;
                state = (cell.step)(
                    call,
                    &functions[d * cell.activations.len()..],
                    &times(w, x, own),
                    &state,
                    &|h| times(r, h, recurrent),
                    part(PEEPHOLES, d, 3 * hidden),
                )?;
                y[((t * reversed.len() + d) * batch + row) * hidden..][..hidden].copy_from_slice(&state[0]);
            }
            last.iter_mut().zip(state).for_each(|(last, state)| last.extend(state));
        }
    }
    Ok([vec![y], last].concat())
}

/// The values that all cells of one direction share. Products of 16-bit floats are computed in that type; gates and states are
/// `f32` then.
struct Recurrence<'g> {
    /// `[hidden, gates hidden]`.
    weights: Var<'g>,
    /// `[gates hidden]`, of the states' type.
    bias: Option<Var<'g>>,
    /// `[3 hidden]`, of the states' type: the weights of the cell state for the gates i, o and f.
    peepholes: Option<Var<'g>>,
    hidden: usize,
    /// The weights' type.
    stored: DType,
    /// The states' type.
    wide: DType,
}

impl<'g> Recurrence<'g> {
    /// The share of a state `[batch, hidden]` in these gates.
    fn product(&self, state: Var<'g>, gates: Range<usize>) -> Var<'g> {
        let gates = gates.start * self.hidden..gates.end * self.hidden;
        let weights = self.weights.part(1, gates.clone());
        let product = state.cast(self.stored).matmul(weights).cast(self.wide);
        self.bias.map_or(product, |bias| product + bias.part(0, gates))
    }

    /// One gate of `[batch, gates hidden]`.
    fn gate(&self, gates: Var<'g>, gate: usize) -> Var<'g> {
        gates.part(1, gate * self.hidden..(gate + 1) * self.hidden)
    }
}

/// The element `at` of axis 0, without that axis.
fn element(value: Var, at: usize) -> Var {
    value.part(0, at..at + 1).squeeze(&[0])
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>, cell: &Cell) -> OpResult<Vec<Var<'g>>> {
    if let Some(turned) = SequenceFirst::of(call)? {
        let turn = |at: usize| {
            let turns = [0, INITIAL, INITIAL + 1].contains(&at);
            x.given(at).map(|value| if turns { value.transpose(&[1, 0, 2]) } else { value })
        };
        let inputs: Vec<_> = (0..call.inputs.len()).map(turn).collect();
        let outputs = turned.call(call.op, |call| nodes(b, call, &Args(&inputs), cell))?;
        let order = |y: Var<'g>| Ok(y.transpose(SequenceFirst::order(y.shape()?.len())));
        return outputs.into_iter().map(order).collect();
    }
    // Weights stand [gates hidden, input]; products want them turned.
    let weights = |input: usize, d: usize| Ok((element(x[input], d), true));
    walked(b, call, x, cell, &weights)
}

/// The weights of an input, W or R, and a direction: `[gates hidden, elements]`, which a product wants turned, or `[elements, gates hidden]`.
type Weights<'w, 'g> = &'w dyn Fn(usize, usize) -> OpResult<(Var<'g>, bool)>;

/// The outputs of a call whose sequence comes first.
fn walked<'g>(
    b: Nodes<'g>,
    call: &Call,
    x: &Args<Var<'g>>,
    cell: &Cell,
    weights: Weights<'_, 'g>,
) -> OpResult<Vec<Var<'g>>> {
    let extents = Extents::of(call, cell)?;
    let (mut all, mut last) = (Vec::new(), vec![Vec::new(); cell.states]);
    for d in 0..extents.reversed.len() {
        let (states, end) = direction(b, call, x, cell, &extents, (d, weights))?;
        all.push(states.unsqueeze(&[1]));
        last.iter_mut().zip(end).for_each(|(last, state)| last.push(state.unsqueeze(&[0])));
    }
    let mut outputs = vec![b.concat(&all, 1)];
    outputs.extend(last.iter().map(|states| b.concat(states, 0)));
    Ok(outputs)
}

/// The hidden states of one direction, in order of the sequence, and the last state.
fn direction<'g>(
    b: Nodes<'g>,
    call: &Call,
    x: &Args<Var<'g>>,
    cell: &Cell,
    extents: &Extents,
    (d, weights): (usize, Weights<'_, 'g>),
) -> OpResult<(Var<'g>, Vec<Var<'g>>)> {
    let &Extents { steps, batch, hidden, reversed, .. } = extents;
    let (rows, stored) = (cell.gates * hidden, call.dtype(0));
    let wide = stored.unhalved();
    let functions = Function::all(call, cell, reversed.len())?;
    let functions = &functions[d * cell.activations.len()..];
    let start = |i: usize| match x.given(INITIAL + i) {
        Some(initial) => element(initial, d).cast(wide),
        None => b.constant(wide, [1, 1], || vec![0.0]).expand(&[batch, hidden]),
    };
    let turned = |(weights, turned): (Var<'g>, bool)| if turned { weights.transpose(&[1, 0]) } else { weights };
    let mut inputs = x[0].matmul(turned(weights(1, d)?)).cast(wide);
    let (weights, turned) = weights(2, d)?;
    let mut captured = vec![weights];
    let bias = x.given(3).map(|both| element(both, d).cast(wide));
    if let Some(both) = bias {
        inputs = inputs + both.part(0, 0..rows);
        captured.push(both.part(0, rows..2 * rows));
    }
    let peepholes = x.given(PEEPHOLES).map(|all| element(all, d).cast(wide));
    captured.extend(peepholes);
    let lengths = x.given(LENGTHS).map(|lengths| lengths.cast(DType::I32).unsqueeze(&[1]));
    captured.extend(lengths);
    let numbers = lengths.map(|_| b.numbers(DType::I32, [steps], 0.0));
    let scanned = [inputs].into_iter().chain(numbers).collect();
    let carried: Vec<_> = (0..cell.states).map(start).collect();
    let (biased, peeps, bounded) = (bias.is_some(), peepholes.is_some(), lengths.is_some());
    let made = repeat(b, (steps, reversed[d]), Inputs { carried, scanned, captured }, &|b, given| {
        let (state, mut rest) = given.split_at(cell.states);
        let mut next = |is_given: bool| {
            let (first, others) = rest.split_first().filter(|_| is_given)?;
            rest = others;
            Some(*first)
        };
        let (Some(x), number, Some(weights)) = (next(true), next(bounded), next(true)) else {
            return Err("a cell reads its input and its weights".into());
        };
        let weights = if turned { weights.transpose(&[1, 0]) } else { weights };
        let recurrence = Recurrence { weights, bias: next(biased), peepholes: next(peeps), hidden, stored, wide };
        let mut made = (cell.nodes)(call, functions, x, state, &recurrence)?;
        let mut shown = made[0];
        if let (Some(number), Some(lengths)) = (number, next(bounded)) {
            // A row that has ended keeps its state, and its outputs are zero.
            let is_running = number.less(lengths);
            shown = is_running.select(made[0], b.scalar(0.0, wide));
            made.iter_mut().zip(state).for_each(|(next, &old)| *next = is_running.select(*next, old));
        }
        made.push(shown.cast(stored));
        Ok(made)
    })?;
    let (end, states) = made.split_at(cell.states.min(made.len()));
    let states = *states.first().ok_or("a loop that was refused")?;
    Ok((states, end.iter().map(|state| state.cast(stored)).collect()))
}

#[cfg(test)]
mod tests {
    use super::sigmoid;
    use crate::dtype::DType::*;
    use crate::op::{Attr, Attrs};
    use crate::ops::tests::{Input, outputs, refused};

    fn attrs(direction: &str) -> Attrs {
        Attrs::new().with("direction", direction)
    }

    /// One row of two elements, and weights of 1 and 0.5.
    fn run(op: &str, gates: usize, attrs: Attrs) -> Vec<(String, Vec<f64>)> {
        let directions =
            if matches!(attrs.get("direction"), Some(Attr::Str(d)) if d == "bidirectional") { 2 } else { 1 };
        let (w, r) = (vec![1.0; gates * directions], vec![0.5; gates * directions]);
        let shape = [directions, gates, 1];
        let inputs: [Input; 3] = [(F32, &[2, 1, 1], &[1.0, 2.0]), (F32, &shape, &w), (F32, &shape, &r)];
        outputs(op, &inputs, &attrs)
    }

    #[test]
    fn cells_follow_the_specification() {
        let first = 1f64.tanh();
        let found = run("RNN", 1, attrs("forward"));
        assert_eq!(found[0], ("f32[2,1,1,1]".into(), vec![first, (2.0 + 0.5 * first).tanh()]));
        assert_eq!(found[1], ("f32[1,1,1]".into(), vec![(2.0 + 0.5 * first).tanh()]));
        let relu = Attr::Strs(vec!["Relu".into()]);
        assert_eq!(run("RNN", 1, Attrs::new().with("activations", relu))[0].1, [1.0, 2.5]);

        let first = (1.0 - sigmoid(1.0)) * 1f64.tanh();
        let (z, r) = (sigmoid(2.0 + 0.5 * first), sigmoid(2.0 + 0.5 * first));
        let second = (1.0 - z) * (2.0 + 0.5 * (r * first)).tanh() + z * first;
        assert_eq!(run("GRU", 3, attrs("forward"))[0].1, [first, second]);

        let (c, gate) = (sigmoid(1.0) * 1f64.tanh(), |h: f64| 2.0 + 0.5 * h);
        let h = sigmoid(1.0) * c.tanh();
        let next = sigmoid(gate(h)) * c + sigmoid(gate(h)) * gate(h).tanh();
        let found = run("LSTM", 4, attrs("forward"));
        assert_eq!(found[0].1, [h, sigmoid(gate(h)) * next.tanh()]);
        assert_eq!(found[2], ("f32[1,1,1]".into(), vec![next]));
    }

    #[test]
    fn functions_take_their_parameters_in_turn() {
        let names = |names: &[&str]| Attr::Strs(names.iter().map(|&name| name.into()).collect());
        let mut attrs = attrs("bidirectional").with("activations", names(&["Affine", "ScaledTanh"]));
        attrs.set("activation_alpha", Attr::Floats(vec![2.0, 3.0]));
        attrs.set("activation_beta", Attr::Floats(vec![0.5, 0.25]));
        let found = run("RNN", 1, attrs.clone());
        let scaled = |x: f64| 3.0 * (0.25 * x).tanh();
        let two = scaled(2.0);
        assert_eq!(found[0].1, [2.5, scaled(1.0 + 0.5 * two), 2.0 * (2.0 + 0.5 * 2.5) + 0.5, two]);
        // What they take is held within the bounds first.
        let found = run("RNN", 1, attrs.with("clip", 0.75));
        assert_eq!(found[0].1, [2.0, scaled(0.75), 2.0, scaled(0.75)]);
        let one = sigmoid(1.0);
        let found = run("LSTM", 4, Attrs::new().with("input_forget", 1));
        assert_eq!(found[0].1[0], one * (one * 1f64.tanh()).tanh());
    }

    #[test]
    fn of_no_steps_the_state_stays() {
        let inputs: [Input; 6] = [
            (F32, &[0, 1, 1], &[]),
            (F32, &[1, 1, 1], &[1.0]),
            (F32, &[1, 1, 1], &[1.0]),
            (F32, &[1, 2], &[0.0; 2]),
            (I32, &[1], &[0.0]),
            (F32, &[1, 1, 1], &[7.0]),
        ];
        let found = outputs("RNN", &inputs, &Attrs::new());
        assert_eq!(found, [("f32[0,1,1,1]".into(), vec![]), ("f32[1,1,1]".into(), vec![7.0])]);
    }

    #[test]
    fn a_sequence_is_walked_both_ways() {
        let (one, two) = (1f64.tanh(), 2f64.tanh());
        let back = (1.0 + 0.5 * two).tanh();
        let found = run("RNN", 1, attrs("reverse"));
        assert_eq!((&found[0].1[..], &found[1].1[..]), (&[back, two][..], &[back][..]));
        let found = run("RNN", 1, attrs("bidirectional"));
        let ahead = (2.0 + 0.5 * one).tanh();
        assert_eq!(found[0], ("f32[2,2,1,1]".into(), vec![one, back, ahead, two]));
        assert_eq!(found[1], ("f32[2,1,1]".into(), vec![ahead, back]));
    }

    #[test]
    fn a_row_ends_where_its_length_says() {
        let (w, ends) = ([1.0, 1.0], [1.0, 0.0]);
        let inputs: [Input; 5] = [
            (F32, &[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]),
            (F32, &[2, 1, 1], &w),
            (F32, &[2, 1, 1], &w),
            (F32, &[2, 2], &[0.0; 4]),
            (I32, &[2], &ends),
        ];
        let found = outputs("RNN", &inputs, &attrs("bidirectional"));
        let one = 1f64.tanh();
        assert_eq!(found[0].1, [one, 0.0, one, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(found[1].1, [one, 0.0, one, 0.0]);
    }

    #[test]
    fn what_cells_do_not_know_is_refused() {
        let refused = |op: &str, gates: usize, attrs: Attrs| {
            refused(op, &[(F32, &[2, 3, 4]), (F32, &[1, gates, 4]), (F32, &[1, gates, 5])], &attrs)
        };
        let found = refused("LSTM", 16, Attrs::new());
        assert_eq!(found, "input 'W': expected [1, 20, 4], found [1,16,4]");
        let swish = Attr::Strs(vec!["Swish".into()]);
        let found = refused("RNN", 5, Attrs::new().with("activations", swish));
        assert_eq!(
            found,
            "attribute 'activations': expected some of affine, elu, hardsigmoid, leakyrelu, relu, scaledtanh, sigmoid, softplus, softsign, \
             tanh, thresholdedrelu, found swish"
        );
        let two = Attr::Strs(vec!["Tanh".into(), "Relu".into()]);
        let found = refused("RNN", 5, Attrs::new().with("activations", two));
        assert_eq!(found, "attribute 'activations': expected 1 for 1 directions, found 2");
        let found = refused("RNN", 5, Attrs::new().with("clip", -1.0));
        assert!(found.starts_with("attribute 'clip': expected a positive number"), "{found}");
        assert!(refused("RNN", 5, Attrs::new().with("layout", 2)).starts_with("attribute 'layout'"));
        assert!(refused("RNN", 5, attrs("up")).ends_with("found 'up'"));
        assert!(refused("RNN", 5, Attrs::new().with("hidden_size", 6)).starts_with("attribute 'hidden_size'"));
    }
}
