//! Mixtures of experts: each row of data passes through those that a router chooses for it.
//!
//! Every expert is computed for every row, and what is not chosen is multiplied by zero. So the products are two large ones, and the second
//! one adds the experts up:
//!
//! ```text
//! inner   = activation (x W1')        [rows, experts, inter],  W1 of all experts as [experts inter, hidden]
//! y       = (inner mix) W2'           [rows, hidden],          W2 of all experts as [hidden, experts inter]
//! ```

use super::compose::composed;
use super::packed::unpacked;
use super::{ensure, expect_dtype, expect_shape, input_name};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Nodes, OpDef, OpResult, Var, inputs, names};

pub(super) static OPS: &[OpDef] = &[
    composed(
        "MoE",
        "Of experts, each an `activation_type` between two products, the `k` most probable of each row, by their probabilities. `swiglu_fusion` \
         says how gates lie beside what they gate",
        inputs![input router_probs fc1_experts_weights fc1_experts_bias? fc2_experts_weights fc2_experts_bias? fc3_experts_weights?
                fc3_experts_bias?],
        |b, call, x| mixture(b, call, x, &FLOATS),
    )
    .sample(|s| {
        s.floats(&[&[5, 6], &[5, 4], &[4, 16, 6], &[4, 16], &[4, 6, 8], &[4, 6]])
            .attr("k", 2)
            .attr("activation_type", "swiglu")
            .attr("swiglu_fusion", 1)
            .attr("normalize_routing_weights", 1)
    })
    .attrs(names![activation_alpha activation_beta activation_type k normalize_routing_weights swiglu_fusion swiglu_limit
        swiglu_limit_after_activation use_sparse_mixer]),
    composed(
        "QMoE",
        "MoE of weights of `expert_weight_bits` bits, as MatMulNBits has them, which stay packed if they are constant. The probabilities of the \
         chosen experts sum up to 1, unless `router_weights` has others",
        inputs![input router_probs fc1_experts_weights fc1_scales fc1_experts_bias? fc2_experts_weights fc2_scales fc2_experts_bias?
                fc3_experts_weights? fc3_scales? fc3_experts_bias? fc1_zero_points? fc2_zero_points? fc3_zero_points? router_weights?],
        |b, call, x| mixture(b, call, x, &PACKED),
    )
    .sample(|s| {
        s.floats(&[&[5, 16], &[5, 4]])
            .input(DType::U8, &[4, 32, 8], 0.0, 255.0)
            .input(DType::F32, &[4, 32], 0.01, 0.1)
            .floats(&[&[4, 32]])
            .input(DType::U8, &[4, 16, 8], 0.0, 255.0)
            .input(DType::F32, &[4, 16], 0.01, 0.1)
            .floats(&[&[4, 16]])
            .attr("k", 2)
            .attr("activation_type", "swiglu")
            .attr("swiglu_fusion", 1)
    })
    .attrs(names![accuracy_level activation_alpha activation_beta activation_type block_size expert_weight_bits fc1_expert_weight_bits
        fc2_expert_weight_bits fc3_expert_weight_bits k normalize_routing_weights quant_type swiglu_fusion swiglu_limit
        swiglu_limit_after_activation use_sparse_mixer weights_prepacked]),
];

/// Where the inputs of the products are.
struct Ports {
    /// Weights, scales, bias and zero points of each product.
    products: [[Option<usize>; 4]; 3],
    router_weights: Option<usize>,
}

const FLOATS: Ports = Ports {
    products: [[Some(2), None, Some(3), None], [Some(4), None, Some(5), None], [Some(6), None, Some(7), None]],
    router_weights: None,
};

const PACKED: Ports = Ports {
    products: [
        [Some(2), Some(3), Some(4), Some(11)],
        [Some(5), Some(6), Some(7), Some(12)],
        [Some(8), Some(9), Some(10), Some(13)],
    ],
    router_weights: Some(14),
};

/// A product by the weights of all experts.
struct Product {
    ports: [Option<usize>; 4],
    experts: usize,
    /// Rows of an expert's weights, and numbers of a row.
    n: usize,
    k: usize,
    /// Bits of a number, or 0 for floats.
    bits: usize,
    /// Numbers that share a scale.
    block: usize,
}

impl Product {
    fn of(
        call: &Call,
        ports: [Option<usize>; 4],
        number: usize,
        experts: usize,
        n: Option<usize>,
        k: usize,
    ) -> OpResult<Product> {
        let input = ports[0].expect("every product has weights");
        let is_packed = ports[1].is_some();
        let bits = call.int(&format!("fc{number}_expert_weight_bits"), call.int("expert_weight_bits", 4)?)?;
        ensure(!is_packed || (2..=8).contains(&bits), || {
            format!("attribute 'expert_weight_bits': expected 2 to 8, found {bits}")
        })?;
        let bits = if is_packed { bits as usize } else { 0 };
        let n = n.or(call.shape(input).get(1).copied()).unwrap_or(0);
        let block = call.int("block_size", 0)?;
        let block =
            usize::try_from(block).map_err(|_| format!("attribute 'block_size': expected 0 or more, found {block}"))?;
        let block = if block == 0 { k } else { block };
        let product = Product { ports, experts, n, k, bits, block };
        let expect = |input: Option<usize>, shape: &[usize]| match input.filter(|&input| call.has(input)) {
            Some(input) => expect_shape(call, input, call.shape(input)[..] == *shape, format_args!("{shape:?}")),
            None => Ok(()),
        };
        if is_packed {
            expect_dtype(call, input, "u8", |d| d == DType::U8)?;
            let scales = ports[1].filter(|&scales| call.has(scales));
            let scales = scales.ok_or_else(|| format!("input 'fc{number}_scales': expected scales, found none"))?;
            expect_dtype(call, scales, "a float type", DType::is_float)?;
            ensure(k.is_multiple_of(block) && (block * bits).is_multiple_of(8), || {
                format!(
                    "attribute 'block_size': expected whole blocks of bytes in {k} numbers of {bits} bits, found {block}"
                )
            })?;
            expect(Some(input), &[experts, n, k * bits / 8])?;
            let blocks = k / block;
            let by_rows = call.shape(scales).len() == 2 && blocks == 1;
            let shape = if by_rows { vec![experts, n] } else { vec![experts, n, blocks] };
            expect(Some(scales), &shape)?;
            if let Some(zeros) = ports[3].filter(|&zeros| call.has(zeros)) {
                expect_dtype(call, zeros, "u8", |d| d == DType::U8)?;
                let by_rows = call.shape(zeros).len() == 2 && blocks == 1;
                let bytes = |count: usize| (count * bits).div_ceil(8);
                let shape = if by_rows { vec![experts, bytes(n)] } else { vec![experts, n, bytes(blocks)] };
                expect(Some(zeros), &shape)?;
            }
        } else {
            expect(Some(input), &[experts, n, k])?;
        }
        expect(ports[2], &[experts, n])?;
        Ok(product)
    }

    /// The product of rows and all weights. A product of joined experts adds them up; that of others has columns for each.
    fn times<'g>(
        &self,
        b: Nodes<'g>,
        call: &Call,
        x: &Args<Var<'g>>,
        left: Var<'g>,
        joined: bool,
    ) -> OpResult<Var<'g>> {
        let &Product { ports, experts, n, k, bits, block } = self;
        let given = |port: usize| ports[port].and_then(|input| x.given(input));
        let weights = given(0).expect("every product has weights");
        let (columns, terms) = if joined { (n, experts * k) } else { (experts * n, k) };
        // Rows of a list per expert and row of its weights, as those of the product.
        let rows = |list: Var<'g>, each: usize| {
            let list = list.shaped(&[experts, n, each]);
            if joined {
                list.transpose(&[1, 0, 2]).shaped(&[n, experts * each])
            } else {
                list.shaped(&[experts * n, each])
            }
        };
        let Some(scales) = given(1) else {
            return Ok(left.matmul(rows(weights, k).transpose(&[1, 0])));
        };
        let (blocks, row) = (k / block, k * bits / 8);
        let words = rows(weights, row).shaped(&[columns, terms / block, block * bits / 8]);
        let zeros = match (given(3), ports[3]) {
            (Some(zeros), Some(input)) => {
                let by_rows = call.shape(input).len() == 2;
                // Bytes of a row of the product, if they hold nothing else.
                Some(if !by_rows && (!joined || (blocks * bits).is_multiple_of(8)) {
                    let bytes = (blocks * bits).div_ceil(8);
                    let zeros = rows(zeros, bytes);
                    zeros.shaped(&[zeros.shape()?.numel()])
                } else {
                    let all = unpacked(b, zeros, bits)?;
                    let last = all.shape()?.len() - 1;
                    let numbers = all.part(last, 0..if by_rows { n } else { blocks });
                    rows(numbers.cast(scales.fact()?.dtype), blocks)
                })
            }
            _ => None,
        };
        let attrs = Attrs::new().with("N", columns as i64).with("K", terms as i64).with("bits", bits as i64);
        let operands = [Some(left), Some(words), Some(rows(scales, blocks)), zeros];
        let operands = if zeros.is_some() { &operands[..] } else { &operands[..3] };
        Ok(b.op("MatMulNBits", operands, attrs.with("block_size", block as i64)))
    }
}

/// What each expert's result is multiplied by, `[rows, experts]`.
fn mix<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>, ports: &Ports, experts: usize) -> OpResult<Var<'g>> {
    let k = call.int("k", 1)?;
    ensure((1..=experts as i64).contains(&k), || format!("attribute 'k': expected 1 to {experts}, found {k}"))?;
    let router = x[1].cast(DType::F32);
    let [_, chosen] = b.outputs("TopK", &[router], Attrs::new().with("K", k));
    let is_chosen = chosen.unsqueeze(&[-1]).equal(b.numbers(DType::I64, [experts], 0.0));
    let is_chosen = is_chosen.cast(DType::F32).reduce_sum(&[1], false);
    let weights = ports.router_weights.and_then(|input| x.given(input));
    let mix = weights.map_or_else(|| router.softmax(-1), |weights| weights.cast(DType::F32)) * is_chosen;
    let is_normalized = call.int("normalize_routing_weights", 0)? != 0;
    let sums_to_one = is_normalized || ports.router_weights.is_some() && weights.is_none();
    Ok(if sums_to_one { mix / mix.reduce_sum(&[1], true) } else { mix })
}

/// The activation between the products, of `inter` elements. A gate may lie beside what it gates, or be the other value.
fn activated<'g>(b: Nodes<'g>, call: &Call, inner: Var<'g>, other: Option<Var<'g>>, inter: usize) -> OpResult<Var<'g>> {
    let shape = inner.shape()?;
    let gated = |y: Var<'g>| other.map_or(y, |other| y * other);
    let half = |first: usize| inner.part(2, first..first + inter);
    let swish = |alpha: f64| Attrs::new().with("alpha", alpha);
    Ok(match call.str("activation_type", "relu")? {
        "identity" => gated(inner),
        "relu" => gated(inner.op("Relu", &[], Attrs::new())),
        "gelu" => gated(inner.op("Gelu", &[], Attrs::new().with("approximate", "tanh"))),
        "silu" => gated(inner.op("Swish", &[], swish(1.0))),
        "swiglu" => {
            let (gate, value) = match (call.int("swiglu_fusion", 0)?, other) {
                (0, Some(other)) => (inner, other),
                (1, None) => {
                    let pairs = inner.shaped(&[shape[0], shape[1], inter, 2]);
                    let of = |which: usize| pairs.part(3, which..which + 1).shaped(&[shape[0], shape[1], inter]);
                    (of(0), of(1))
                }
                (2, None) => (half(0), half(inter)),
                (fusion, _) => {
                    return Err(format!(
                        "attribute 'swiglu_fusion': expected 0 beside fc3, or 1 or 2 without it, found {fusion}"
                    ));
                }
            };
            let limit = call.float("swiglu_limit", f64::INFINITY)?;
            let (gate, value) = if limit.is_finite() {
                (gate.op("Min", &[gate.like(limit)], Attrs::new()), value.clip(-limit, limit))
            } else {
                (gate, value)
            };
            let beta = call.float("activation_beta", 0.0)?;
            let value = if beta == 0.0 { value } else { value + beta };
            b.op("SwiGLU", &[gate, value], swish(call.float("activation_alpha", 1.0)?))
        }
        other => {
            return Err(format!(
                "attribute 'activation_type': expected relu, gelu, silu, swiglu or identity, found '{other}'"
            ));
        }
    })
}

fn mixture<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>, ports: &Ports) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "f32, f16 or bf16", |d| d.is_float() && d != DType::F64)?;
    for name in ["use_sparse_mixer", "swiglu_limit_after_activation"] {
        let found = call.int(name, 0)?;
        ensure(found == 0, || format!("attribute '{name}': expected 0, found {found}"))?;
    }
    let prepacked = call.int("weights_prepacked", 0)?;
    ensure(matches!(prepacked, -1 | 0), || {
        format!("attribute 'weights_prepacked': expected 0 or -1, found {prepacked}")
    })?;
    let quantized = call.str("quant_type", "int")?;
    ensure(quantized == "int", || format!("attribute 'quant_type': expected int, found '{quantized}'"))?;
    call.int("accuracy_level", 0)?;
    let &[.., hidden] = &call.shape(0)[..] else {
        return Err(format!("input '{}': expected rows, found {}", input_name(call, 0), call.shape(0)));
    };
    let rows = call.shape(0).numel() / hidden.max(1);
    let &[_, experts] = &call.shape(1)[..] else {
        return Err(format!("input '{}': expected [{rows}, experts], found {}", input_name(call, 1), call.shape(1)));
    };
    for input in [Some(1), ports.router_weights].into_iter().flatten().filter(|&input| call.has(input)) {
        expect_shape(call, input, call.shape(input)[..] == [rows, experts], format_args!("[{rows}, {experts}]"))?;
    }
    let [first, second, third] = ports.products;
    let fused = call.str("activation_type", "relu")? == "swiglu" && call.int("swiglu_fusion", 0)? != 0;
    let first = Product::of(call, first, 1, experts, None, hidden)?;
    let inter = if fused { first.n / 2 } else { first.n };
    ensure(inter > 0 && (!fused || first.n.is_multiple_of(2)), || {
        format!("input '{}': expected pairs of rows, found {}", input_name(call, 2), first.n)
    })?;
    let second = Product::of(call, second, 2, experts, Some(hidden), inter)?;
    let third =
        third[0].filter(|&input| call.has(input)).map(|_| Product::of(call, third, 3, experts, Some(inter), hidden));
    let left = x[0].shaped(&[rows, hidden]);
    let mix = mix(b, call, x, ports, experts)?.cast(dtype);
    let inside = |product: &Product| {
        let y = product.times(b, call, x, left, false)?.shaped(&[rows, experts, product.n]);
        Ok::<_, String>(product.ports[2].and_then(|bias| x.given(bias)).map_or(y, |bias| y + bias))
    };
    let other = third.transpose()?.map(|product| inside(&product)).transpose()?;
    let inner = activated(b, call, inside(&first)?, other, inter)? * mix.unsqueeze(&[-1]);
    let y = second.times(b, call, x, inner.shaped(&[rows, experts * inter]), true)?;
    let bias = second.ports[2].and_then(|bias| x.given(bias));
    let y = bias.map_or(y, |bias| y + mix.matmul(bias));
    Ok(vec![y.shaped(call.shape(0))])
}
