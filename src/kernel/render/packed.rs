//! Products by numbers of few bits.

use super::Module;
use super::scalar::Type::{F16, F32, I32};
use super::scalar::convert;
use super::vector::matrix;
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
        let body = vec![
            "let block = k / (BLOCK * PER);".into(),
            "let word = words(n * WORDS + k / PER);".into(),
            "let number = f32((word >> u32(k % PER * BITS)) & MASK);".into(),
            "return (number - zero_point(n, block)) * scale(n, block);".into(),
        ];
        self.function("b", &matrix(["k", "n"]), Some(F32), body);
        if matches!(tiling, Tiling::Mma { .. } | Tiling::BitsMma { .. }) {
            self.wide_operand("a_wide", "A_WIDE", &product.a, ["m", "k"]);
        }
        if let Tiling::BitsMma { .. } = tiling {
            self.words_at_a_time();
        }
        self.product(product, tiling)
    }

    /// The functions that read the right operand: its words, and the scale and the zero point of a block of a column. Numbers with a sign
    /// have it flipped, and zero points are larger by as much.
    fn numbers(&mut self) {
        let (packing, zeros) = self.kernel.packing();
        let flipped = |word: &str| if packing.flip == 0 { word.to_owned() } else { format!("{word} ^ FLIP") };
        self.ints(&[
            ("WORDS", packing.blocks * packing.words_per_block),
            ("BLOCK", packing.words_per_block),
            ("PER", packing.per_word),
            ("BITS", packing.bits),
            ("MASK", (1 << packing.bits) - 1),
        ]);
        self.int("FLIP", packing.flip as i32 as isize);
        let raised = packing.raised();
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
                self.function("zero_point", &arguments, Some(F32), vec!["return ZERO_POINT;".into()]);
            }
            ZeroPoints::Packed => {
                self.reader("zero_words", 3, vec![over("at", &self.access(3).shape, 0..1)], &["at"], &flipped);
                self.int("ZEROS", packing.zeros_per_row() as isize);
                let body = vec![
                    "let place = column * ZEROS + block;".into(),
                    "let word = zero_words(place / PER);".into(),
                    "return f32((word >> u32(place % PER * BITS)) & MASK);".into(),
                ];
                self.function("zero_point", &arguments, Some(F32), body);
            }
        }
    }

    /// The function that reads 16 bytes of a column, and what the text asks about the numbers in them.
    fn words_at_a_time(&mut self) {
        let (packing, zeros) = self.kernel.packing();
        let body =
            vec![format!("return {};", self.read_wide(1, 4, &format!("{} + n * WORDS + w", self.access(1).offset)))];
        self.wide_function("words_wide", &[("n", I32), ("w", I32)], "wide<i32, 4>".into(), body);
        let (is_f16, of_bytes) = (self.storage[0] == F16, packing.bits == 8);
        self.flags.extend(is_f16.then_some("F16"));
        self.flags.extend(of_bytes.then_some("BYTES"));
        // Numbers of 8 bits are widened in another way to floats that have no room for them.
        self.flags.extend((is_f16 || !of_bytes).then_some("RAISED"));
        self.flags.extend((zeros == ZeroPoints::Floats).then_some("FLOATS"));
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
        self.function(name, &arguments, Some(to), body);
    }
}
