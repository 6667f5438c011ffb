//! Elementwise nodes in front of a matrix product or a convolution: when they become part of its kernel, and that results agree.

use crate::common;
use crate::common::{graph, planned, runs_as_the_reference};
use plimsoll::internals::kernel::Template;
use plimsoll::internals::plan::{self, Limits};
use plimsoll::{Plan, Recipe, Target};

/// A graph, and how many steps and prologues its plan has on the CPU and on wgpu.
struct Case {
    text: &'static str,
    cpu: (usize, usize),
    wgpu: (usize, usize),
}

const CASES: &[Case] = &[
    // The left operand: batch normalisation and what follows it.
    Case {
        text: "left (float[2, 3, 40] x, float[40] s, float[40] b, float[40, 30] w) => (float[2, 3, 30] y) {
            a = Mul (x, s)  c = Add (a, b)  d = Relu (c)  e = MatMul (d, w)  y = Relu (e)
        }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    // The right operand, with enough rows that the CPU packs it.
    Case {
        text: "right (float[50, 20] x, float[20, 33] w, float[20, 1] s) => (float[50, 33] y) {
            a = Mul (w, s)  y = MatMul (x, a)
        }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    // With few rows the CPU reads it in place.
    Case {
        text: "few (float[5, 20] x, float[20, 33] w) => (float[5, 33] y) { a = Neg (w)  y = MatMul (x, a) }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    // Both operands, behind views, in batches that broadcast.
    Case {
        text: "both (float[2, 30, 3, 16] q, float[2, 30, 3, 16] k, float[3, 1, 16] s) => (float[2, 3, 30, 30] y) {
            a = Transpose <perm = [0, 2, 1, 3]> (q)  b = Mul (a, s)
            c = Abs (k)  d = Transpose <perm = [0, 2, 3, 1]> (c)
            y = MatMul (b, d)
        }",
        cpu: (1, 2),
        wgpu: (1, 2),
    },
    Case {
        text: "broadcast (float[7, 6] x, float[2, 6, 40] w, float[6] s) => (float[2, 7, 40] y) {
            a = Sub (x, s)  y = MatMul (a, w)
        }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    Case {
        text: "vectors (float[64] x, float[64, 9] w, float[64] s) => (float[9] y) { a = Add (x, s)  y = MatMul (a, w) }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    Case {
        text: "turned (float[20, 7] x, float[30, 20] w) => (float[7, 30] y) {
            a = Relu (x)  y = Gemm <transA = 1, transB = 1, alpha = 0.5> (a, w)
        }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    // Convolutions. The CPU unfolds all but those of single positions, so that an element would pass its prologue once per tap.
    Case {
        text: "pointwise (float[2, 24, 6, 7] x, float[2, 24, 1, 1] s, float[30, 24, 1, 1] w, float[30] b) => (float[2, 30, 6, 7] y) {
            a = Mul (x, s)  y = Conv (a, w, b)
        }",
        cpu: (1, 1),
        wgpu: (1, 1),
    },
    Case {
        text: "padded (float[1, 6, 9, 8] x, float[6, 1, 1] s, float[16, 6, 3, 3] w) => (float[1, 16, 9, 8] y) {
            a = Add (x, s)  b = Relu (a)  y = Conv <pads = [1, 1, 1, 1]> (b, w)
        }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    Case {
        text: "grouped (float[2, 8, 11, 9] x, float[2, 8, 1, 1] s, float[16, 4, 3, 2] w) => (float[2, 16, 5, 3] y) {
            a = Sub (s, x)  y = Conv <group = 2, strides = [2, 3], dilations = [1, 2], pads = [1, 0, 0, 1]> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    Case {
        text: "line (float[2, 5, 21] x, float[5, 1] s, float[9, 5, 4] w) => (float[2, 9, 20] y) {
            a = Add (x, s)  y = Conv <pads = [1, 1]> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    Case {
        text: "space (float[1, 3, 4, 5, 6] x, float[8, 3, 2, 3, 3] w) => (float[1, 8, 3, 5, 6] y) {
            o = Constant <value = float[1] {1}> ()
            a = Add (x, o)  y = Conv <pads = [0, 1, 1, 0, 1, 1]> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    Case {
        text: "depthwise (float[1, 8, 9, 9] x, float[8, 1, 1] s, float[8, 1, 3, 3] w) => (float[1, 8, 7, 7] y) {
            a = Add (x, s)  y = Conv <group = 8> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    Case {
        text: "turned_back (float[1, 8, 5, 6] x, float[8, 1, 1] s, float[8, 3, 4, 4] w) => (float[1, 3, 10, 12] y) {
            a = Add (x, s)  y = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (1, 1),
    },
    Case {
        text: "few (float[1, 3, 5, 6] x, float[3, 1, 1] s, float[3, 3, 2, 2] w) => (float[1, 3, 10, 12] y) {
            a = Add (x, s)  y = ConvTranspose <strides = [2, 2]> (a, w)
        }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    // This must stay a kernel of its own: it is an output, it is read twice, it depends on the index, it is costly, it would keep
    // two tensors for one.
    Case {
        text: "indexed (float[40, 40] x, float[40, 9] w) => (float[40, 9] y) { a = Trilu (x)  y = MatMul (a, w) }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    Case {
        text: "seen (float[40, 20] x, float[20, 9] w) => (float[40, 20] a, float[40, 9] y) {
            a = Relu (x)  y = MatMul (a, w)
        }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    Case {
        text: "twice (float[30, 30] x) => (float[30, 30] y) { a = Relu (x)  y = MatMul (a, a) }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    Case {
        text: "costly (float[40, 20] x, float[20, 9] w) => (float[40, 9] y) { a = Exp (x)  y = MatMul (a, w) }",
        cpu: (2, 0),
        wgpu: (2, 0),
    },
    Case {
        text: "kept (float[40, 20] x, float[20, 20] w) => (float[40] u, float[40] v, float[40, 20] y) {
            a = MatMul (x, w)  u = ReduceMax <axes = [1], keepdims = 0> (a)
            b = MatMul (a, w)  v = ReduceMax <axes = [1], keepdims = 0> (b)
            c = Mul (a, b)  y = MatMul (c, w)
        }",
        cpu: (6, 0),
        wgpu: (6, 0),
    },
];

fn counts(plan: &Plan) -> (usize, usize) {
    (plan.programs[0].steps.len(), plan.programs[0].kernels.iter().map(|k| k.prologues.len()).sum())
}

#[test]
fn groups_before_a_core_are_its_prologue() {
    for Case { text, cpu, wgpu } in CASES {
        let graph = graph(text);
        for (target, expected) in [(Target::cpu(2), cpu), (Target::wgpu(), wgpu)] {
            let plan = planned(&graph, &target);
            let kernels: Vec<_> =
                plan.programs[0].kernels.iter().map(|k| (k.template.name(), k.prologues.len())).collect();
            assert_eq!(counts(&plan), *expected, "{} on {}: {kernels:?}", graph.name, target.name);
        }
    }
}

#[test]
fn nothing_is_fused_without_fusion() {
    for Case { text, .. } in CASES {
        let (graph, target) = (graph(text), Target::cpu(2));
        let graph = Recipe { fuse: false, ..Recipe::default() }.whole(graph, &target).expect("the passes run");
        let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("it is planned");
        assert_eq!(counts(&plan).1, 0, "{}", graph.graph.name);
    }
}

#[test]
fn what_a_device_cannot_bind_stays_outside() {
    let graph = graph(CASES[0].text);
    let mut target = Target::wgpu();
    target.max_bindings = 5;
    let plan = planned(&graph, &target);
    assert!(plan.programs[0].kernels.iter().all(|k| k.reads.len() + k.writes.len() <= 5), "{:?}", counts(&plan));
    assert_eq!(counts(&plan).1, 0);
}

/// A residual block stores only the values that the residual reads.
#[test]
fn what_a_prologue_computes_takes_no_memory() {
    let graph = graph(
        "block (float[64, 64] x, float[64, 64] w) => (float[64, 64] y) {
            a = MatMul (x, w)  b = Neg (a)  c = MatMul (b, w)  y = Add (c, a)
        }",
    );
    // Besides both inputs, there is one more buffer: the last reader of `w` writes `y` elsewhere.
    assert_eq!(planned(&graph, &Target::wgpu()).programs[0].summary.arena_bytes, 3 * 64 * 64 * 4);
}

#[test]
fn results_are_those_of_the_reference() {
    let mut state = 1;
    for opener in common::backends() {
        let prologues = |case: &Case| counts(&runs_as_the_reference(&graph(case.text), &opener, &mut state)).1;
        let fused: usize = CASES.iter().map(prologues).sum();
        let name = opener.0;
        assert!(fused >= 8, "{name}: {fused} prologues");
    }
}

/// A prologue that reads behind its buffer, or another shape, is refused by the judge and by the device.
#[test]
fn what_reaches_too_far_is_refused() {
    let plan = planned(&graph(CASES[0].text), &Target::cpu(2));
    let at = plan.programs[0].kernels.iter().position(|k| k.template == Template::MatMul).expect("a product");
    let first = plan.programs[0].kernels[at].further().end;
    let refuse = |what: &str, change: &dyn Fn(&mut plimsoll::internals::kernel::Kernel)| {
        let mut plan = plan.clone();
        change(&mut plan.programs[0].kernels[at]);
        let error = plan::check::check(&plan).expect_err(what).to_string();
        assert!(error.contains("operand") || error.contains("expected elements"), "{what}: {error}");
    };
    plan::check::check(&plan).expect("it is sound as it is");
    refuse("it starts behind the first element", &|k| k.reads[first].access.offset += 1);
    refuse("it steps too far", &|k| *k.reads[first].access.strides.last_mut().expect("axes") = 2);
    refuse("it has other extents", &|k| k.reads[first].access.shape[0] += 1);
    refuse("it has an operand more", &|k| k.prologues[0].reads += 1);
    refuse("it is that of no operand", &|k| k.prologues[0].operand = 7);
    refuse("it computes another type", &|k| k.prologues[0].body.results.clear());
    refuse("it is in a template without a place for it", &|k| {
        k.template = Template::Pad { before: vec![0; k.shape.len()], mode: plimsoll::internals::kernel::PadMode::Edge };
    });
}
