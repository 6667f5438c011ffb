//! Products by numbers of few bits.

use super::scalar::Type::{self, Bool, F32, I32};
use super::scalar::convert;
use super::vector::matrix;
use super::{Dialect, Module};
use crate::kernel::ZeroPoints;
use crate::kernel::algorithm::Tiling;
use crate::kernel::product::Product;
use crate::kernel::space::{Space, over};

impl Module<'_> {
    /// A product whose right operand's elements are widened as they are read.
    pub(super) fn product_of_bits(&mut self, product: &Product, tiling: Tiling) -> Result<(), String> {
        let (mut body, value) = self.element(0, &product.a.space)?;
        body.push(format!("return {value};"));
        self.function("a", &matrix(["m", "k"]), Some(self.value[0]), body);
        self.numbers();
        let (packing, zeros) = self.kernel.packing();
        let body = if packing.by_words {
            vec![
                "let block = k / (BLOCK * PER);".into(),
                "let word = words(n * WORDS + k / PER);".into(),
                "let number = f32((word >> u32(k % PER * BITS)) & MASK);".into(),
                "return (number - zero_point(n, block)) * scale(n, block);".into(),
            ]
        } else {
            let of = if zeros == ZeroPoints::Codes { "code(number)" } else { "(f32(number) - zero_point(n, block))" };
            let mut body = one_by_one("k * BITS", |at| format!("words(n * WORDS + {at})"));
            body.extend(["let block = k / BLOCK;".into(), format!("return {of} * scale(n, block);")]);
            body
        };
        self.function("b", &matrix(["k", "n"]), Some(F32), body);
        match tiling {
            Tiling::Mma { .. } => {
                self.wide_operand("a_wide", "A_WIDE", &product.a, ["m", "k"]);
                if product.b.is_vectorizable {
                    self.octets();
                    self.flags.push("B_WIDE");
                }
            }
            Tiling::BitsMma { .. } => {
                self.wide_operand("a_wide", "A_WIDE", &product.a, ["m", "k"]);
                let four = self.read_wide(1, 4, &self.words());
                let body = vec![format!("return {four};")];
                self.wide_function("words_wide", &[("n", I32), ("w", I32)], "wide<i32, 4>".into(), body);
                self.octets();
            }
            Tiling::Wgmma => {
                self.address_function("a_at", 0, &product.a.space, ["m", "k"]);
                self.octets();
            }
            _ => {}
        }
        self.product(product, tiling)
    }

    /// The functions that read the right operand: its words, and the scale and the zero point of a block of a column. Numbers with a sign
    /// have it flipped, and zero points are larger by as much.
    fn numbers(&mut self) {
        let (packing, zeros) = self.kernel.packing();
        let raised = packing.raised();
        let flips = packing.by_words && packing.flip != 0;
        let flipped = |word: &str| if flips { format!("{word} ^ FLIP") } else { word.to_owned() };
        self.ints(&[("WORDS", packing.words_per_row), ("BITS", packing.bits), ("MASK", (1 << packing.bits) - 1)]);
        if packing.by_words {
            self.ints(&[("BLOCK", packing.words_per_block), ("PER", packing.per_word)]);
            self.int("FLIP", packing.flip as i32 as isize);
        } else {
            self.ints(&[("BLOCK", packing.block), ("RAISED", raised as usize)]);
        }
        self.reader("words", 1, vec![over("at", &self.access(1).shape, 0..1)], &["at"], &flipped);
        let per_block = |module: &Self, slot: usize| {
            let shape = &module.access(slot).shape;
            vec![over("column", shape, 0..1), over("block", shape, 1..2)]
        };
        let space = per_block(self, 2);
        self.reader("scale", 2, space, &["column", "block"], &|scale| scale.to_owned());
        let arguments = [("column", I32), ("block", I32)];
        match zeros {
            ZeroPoints::Floats => {
                let space = per_block(self, 3);
                let raise = |zero: &str| format!("{zero} + {raised}.0f");
                self.reader("zero_point", 3, space, &["column", "block"], &raise);
            }
            ZeroPoints::Number(zero) => {
                self.constant("ZERO_POINT", zero + f64::from(raised), F32);
                self.reading("zero_point", &arguments, F32, vec!["return ZERO_POINT;".into()]);
            }
            ZeroPoints::Packed => {
                self.reader("zero_words", 3, vec![over("at", &self.access(3).shape, 0..1)], &["at"], &flipped);
                let body = if packing.by_words {
                    self.int("ZEROS", (8 * packing.zero_bytes / packing.bits) as isize);
                    vec![
                        "let place = column * ZEROS + block;".into(),
                        "let word = zero_words(place / PER);".into(),
                        "return f32((word >> u32(place % PER * BITS)) & MASK);".into(),
                    ]
                } else {
                    self.int("ZEROS", 8 * packing.zero_bytes as isize);
                    let mut body = one_by_one("column * ZEROS + block * BITS", |at| format!("zero_words({at})"));
                    body.push("return f32(number);".into());
                    body
                };
                self.reading("zero_point", &arguments, F32, body);
            }
            ZeroPoints::Codes => {
                let space = vec![over("number", &self.access(3).shape, 0..1)];
                self.reader("code", 3, space, &["number"], &|code| code.to_owned());
            }
        }
    }

    /// The address of word `w` of column `n`.
    fn words(&self) -> String {
        format!("{} + n * WORDS + w", self.access(1).offset)
    }

    /// The functions that read eight numbers of a column, as they are and as halves.
    fn octets(&mut self) {
        let (packing, zeros) = self.kernel.packing();
        let eight = self.read_wide(1, packing.bits / 4, &self.words());
        let element = self.storage[0].name();
        let order = match packing.bits {
            4 => {
                let of = |a: usize, b: usize, which: &str| format!("bytes_of(pairs[{a}], pairs[{b}], {which})");
                [of(0, 1, "0x5410"), of(2, 3, "0x5410"), of(0, 1, "0x7632"), of(2, 3, "0x7632")]
            }
            _ => [0, 1, 2, 3].map(|pair| format!("pairs[{pair}]")),
        };
        let wide = format!("wide<{element}, 8>");
        self.constants.push(("FLOATS".into(), Bool, (zeros == ZeroPoints::Floats).to_string()));
        let column = [("n", I32), ("w", I32)];
        let octet = format!("wide<i32, {}>", packing.bits / 4);
        self.wide_function("octet_at", &column, octet, vec![format!("return {eight};")]);
        self.declarations.extend([
            format!("const auto eight = [&](const i32* words, f32 zero, f32 scale) -> {wide} {{"),
            "    u32 pairs[4];".into(),
            format!("    octet<{element}, BITS, FLOATS>(pairs, words, FLIP, zero, scale);"),
            format!("    return bitcast<{wide}>(wide<u32, 4>{{{}}});", order.join(", ")),
            "};".into(),
        ]);
        let body = vec![
            "let block = k / (BLOCK * PER);".into(),
            "return eight(octet_at(n, k / PER).v, zero_point(n, block), scale(n, block));".into(),
        ];
        self.wide_function("b_wide", &matrix(["k", "n"]), wide, body);
    }

    /// A function that reads an operand at a point of a space, floats as `f32`, and changes what it read.
    fn reader(
        &mut self,
        name: &str,
        slot: usize,
        space: Space,
        arguments: &[&'static str],
        change: &dyn Fn(&str) -> String,
    ) {
        let (mut body, address) = self.address(slot, &space);
        let ty = self.value[slot];
        let to = if ty == I32 { I32 } else { F32 };
        body.push(format!("return {};", change(&convert(&self.load(slot, &address), ty, to))));
        let arguments: Vec<_> = arguments.iter().map(|&argument| (argument, I32)).collect();
        self.reading(name, &arguments, to, body);
    }

    /// A function that reads. In CUDA it stands before those that read several elements, which call it.
    fn reading(&mut self, name: &str, arguments: &[(&'static str, Type)], result: Type, body: Vec<String>) {
        match self.dialect {
            Dialect::Wgsl => self.function(name, arguments, Some(result), body),
            Dialect::Cuda => self.wide_function(name, arguments, result.name().into(), body),
        }
    }
}

/// Statements that read the number at a bit, which may begin in one word and end in the next.
fn one_by_one(bit: &str, word: impl Fn(&str) -> String) -> Vec<String> {
    vec![
        format!("let bit = {bit};"),
        format!("let first = u32({});", word("bit / 32")),
        format!("let last = u32({});", word("(bit + BITS - 1) / 32")),
        "let by = u32(bit % 32);".into(),
        // If these are one word, what the second part moves is above the number.
        "let number = (i32((first >> by) | ((last << 1u) << (31u - by))) & MASK) ^ RAISED;".into(),
    ]
}
