//! Products of bytes: words of four along the inner axis.

use super::scalar::Type::{Bool, I32, U32};
use super::vector::matrix;
use super::{Dialect, Module};
use crate::dtype::DType;
use crate::kernel::Window;
use crate::kernel::algorithm::Tiling;
use crate::kernel::product::{Product, Side, is_vectorizable};
use crate::kernel::space::BYTES;

/// Bytes of a word.
const WORD: usize = 4;

/// The elements of an operand of bytes.
struct ByteOperand<'a> {
    /// The name of the operand's functions, and the parameters of the one that gives an element.
    name: &'static str,
    params: [&'static str; 2],
    slot: usize,
    /// Statements, and the address of element `k`.
    address: (Vec<String>, String),
    /// A condition on what is behind the statements, without which elements are outside, and what is there then.
    inside: Option<String>,
    outside: i32,
    /// Neighbours along the inner axis that one load reads: 16, 4 or 1. They are all inside or all outside.
    together: usize,
    /// The element, where a prologue computes it.
    computed: Option<(&'a [String], &'a str)>,
}

impl Module<'_> {
    /// A product of matrices of bytes.
    pub(super) fn matmul_of_bytes(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        for (side, name, params) in [(&product.a, "a", ["m", "k"]), (&product.b, "b", ["k", "n"])] {
            let plain = self.kernel.prologue(side.slot).is_none();
            let fits = |&width: &usize| plain && product.k.is_multiple_of(width) && self.lies_together(side, width);
            let together = [BYTES, WORD].into_iter().find(fits).unwrap_or(1);
            let code = self.element(side.slot, &side.space)?;
            let address = self.address(side.slot, &side.space);
            let computed = (!plain).then_some((&code.0[..], &code.1[..]));
            let slot = side.slot;
            self.operand_words(ByteOperand {
                name,
                params,
                slot,
                address,
                inside: None,
                outside: 0,
                together,
                computed,
            });
        }
        self.product_of_words(product, tiling)
    }

    fn lies_together(&self, side: &Side, width: usize) -> bool {
        side.axes[0].is_some_and(|axis| is_vectorizable(self.operand(side.slot), axis, width))
    }

    /// A convolution of bytes. Where both operands have their channels last, neighbours along the inner axis are channels.
    pub(super) fn conv_of_bytes(
        &mut self,
        groups: usize,
        window: &Window,
        product: &Product,
        tiling: Tiling,
        padding: i32,
    ) -> Result<(), String> {
        let input = self.access(1).shape[1];
        let last = [0, 1].iter().all(|&slot| self.access(slot).strides[1] == 1);
        let order = if last { [2, 3, 4, 1] } else { [1, 2, 3, 4] };
        let unfolded = Product::conv(self.kernel, groups, window, Some(order));
        let plain = self.kernel.prologues.is_empty();
        let fits = |&width: &usize| {
            let dense = |slot: usize| is_vectorizable(self.operand(slot), 1, width);
            last && plain && input.is_multiple_of(width) && dense(0) && dense(1)
        };
        let together = [BYTES, WORD].into_iter().find(fits).unwrap_or(1);
        let (space, slot) = (&unfolded.a.space, 1);
        let (address, params) = (self.address(slot, space), ["m", "k"]);
        self.operand_words(ByteOperand {
            name: "a",
            params,
            slot,
            address,
            inside: None,
            outside: 0,
            together,
            computed: None,
        });
        let data = self.conv_data(groups, window, order)?;
        let inside = (!data.inside.is_empty()).then(|| data.inside.join(" && "));
        let computed = data.computed.as_ref().map(|(lines, value)| (&lines[..], &value[..]));
        let address = (data.statements, data.address);
        let (params, slot) = (["k", "n"], 0);
        self.operand_words(ByteOperand {
            name: "b",
            params,
            slot,
            address,
            inside,
            outside: padding,
            together,
            computed,
        });
        self.product_of_words(product, tiling)
    }

    /// The functions that give words of an operand: `NAME_word`, and `NAME_wide` of four words in CUDA C++.
    fn operand_words(&mut self, operand: ByteOperand) {
        let ByteOperand { name, params, slot, address: (statements, address), inside, outside, together, computed } =
            operand;
        let names = params.map(|param| if param == "k" { "w" } else { param });
        let Some(b) = self.bindings.of[slot] else {
            // An empty operand has no binding.
            return self.function(&format!("{name}_word"), &matrix(names), Some(U32), vec!["return 0u;".into()]);
        };
        let flipped = self.dialect == Dialect::Wgsl && self.operand(slot).dtype == DType::U8;
        let all = |byte: i32| u32::from_le_bytes([byte as u8; WORD]);
        let flip = if flipped { format!(" ^ {:#x}u", all(0x80)) } else { String::new() };
        let mut body = Vec::new();
        if together >= WORD {
            body.push(format!("let k = w * {WORD};"));
            let word = match self.dialect {
                Dialect::Wgsl => format!("b{b}[({address}) >> 2u]{flip}"),
                Dialect::Cuda => format!("read<u32, 1>(b{b} + ({address})).v[0]"),
            };
            body.extend(statements.iter().cloned());
            if let Some(inside) = &inside {
                body.push(format!("if (!({inside})) {{ return {:#x}u{flip}; }}", all(outside)));
            }
            body.push(format!("return {word};"));
        } else {
            let (before, value) = match computed {
                Some((before, value)) => (before.to_vec(), value.to_owned()),
                None => (Vec::new(), self.load(slot, &address)),
            };
            let mut one = statements.clone();
            if let Some(inside) = &inside {
                one.push(format!("if (!({inside})) {{ return {outside}; }}"));
            }
            one.extend(before);
            one.push(format!("return {};", super::convert(&value, self.value[slot], I32)));
            self.function(&format!("{name}_byte"), &matrix(params), Some(I32), one);
            let [first, second] = params;
            body.push("var word = 0u;".into());
            body.push(format!("for (var v = 0; v < {WORD}; v++) {{"));
            body.push("    let k = w * 4 + v;".into());
            let byte = format!("(u32({name}_byte(batch, {first}, {second})) & 255u) << u32(v * 8)");
            body.push(format!("    if (k < K) {{ word = word | ({byte}); }}"));
            body.push("}".into());
            body.push(format!("return word{flip};"));
        }
        self.function(&format!("{name}_word"), &matrix(names), Some(U32), body);
        if self.dialect == Dialect::Cuda && together >= BYTES {
            let mut body = vec![format!("let k = w * {WORD};")];
            body.extend(statements);
            if let Some(inside) = &inside {
                let word = format!("{:#x}u", all(outside));
                body.push(format!("if (!({inside})) {{ return wide<u32, 4>{{{word}, {word}, {word}, {word}}}; }}"));
            }
            body.push(format!("return read<u32, 4>(b{b} + ({address}));"));
            self.wide_function(&format!("{name}_wide"), &matrix(names), "wide<u32, 4>".into(), body);
            self.flags.push(if name == "a" { "A_WIDE" } else { "B_WIDE" });
        }
    }

    /// The product of operands whose words are there.
    fn product_of_words(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        let left_unsigned = self.operand(product.a.slot).dtype == DType::U8;
        self.int("WORDS", product.k.div_ceil(WORD) as isize);
        self.constants.push(("LEFT_UNSIGNED".into(), Bool, left_unsigned.to_string()));
        let body = match (self.dialect, left_unsigned) {
            (Dialect::Wgsl, _) => "return sum + dot4I8Packed(x, y);",
            (Dialect::Cuda, true) => "return dot_of_bytes(x, y, sum);",
            (Dialect::Cuda, false) => "return dot_of_bytes(y, x, sum);",
        };
        if let Tiling::Bytes { .. } = tiling {
            let params = [("x", U32), ("y", U32), ("sum", I32)];
            self.function("dot_bytes", &params, Some(I32), vec![body.into()]);
            let sum = |i: usize| {
                let (row, column) = (i / 4, i % 4);
                let raised = if left_unsigned { column } else { row };
                vec![
                    ("LEFT", format!("a{row}")),
                    ("RIGHT", format!("b{column}")),
                    ("DOWN", row.to_string()),
                    ("OVER", column.to_string()),
                    ("RAISED", format!("raised{raised}")),
                ]
            };
            self.lists.insert("sum", (0..16).map(sum).collect());
            let signed = if left_unsigned { "b" } else { "a" };
            self.lists.insert("line", (0..4).map(|i| vec![("SIGNED", format!("{signed}{i}"))]).collect());
            self.flags.extend((self.dialect == Dialect::Wgsl).then_some("FLIPPED"));
        }
        self.product(product, tiling)
    }
}
