//! Products by numbers of few bits.

use super::scalar::Type::{F32, I32};
use super::scalar::convert;
use super::{Module, kernels};
use crate::kernel::ZeroPoints;
use crate::kernel::algorithm::Text;
use crate::kernel::schedule::map::BITS_TEAM;
use crate::kernel::space::over;

kernels! {
    |module, text| module.matmul_bits(text) => {
        matmul_bits "matmul_bits.wgsl": "product by numbers of few bits: a team of invocations per element",
    }
}

impl Module<'_> {
    fn matmul_bits(&mut self, text: &Text) -> Result<(), String> {
        let (packing, zeros) = self.kernel.packing();
        let left = self.access(0).shape.clone();
        let rank = left.len();
        let space = vec![over("row", &left, 0..rank - 1), over("k", &left, rank - 1..rank)];
        self.reader("left", 0, space, &["row", "k"]);
        self.reader("words", 1, vec![over("at", &self.access(1).shape, 0..1)], &["at"]);
        let per_block = |module: &Self, slot: usize| {
            let shape = &module.access(slot).shape;
            vec![over("column", shape, 0..1), over("block", shape, 1..2)]
        };
        let space = per_block(self, 2);
        self.reader("scale", 2, space, &["column", "block"]);
        let arguments = [("column", I32), ("block", I32)];
        match zeros {
            ZeroPoints::Floats => {
                let space = per_block(self, 3);
                self.reader("zero_point", 3, space, &["column", "block"]);
            }
            ZeroPoints::Number(zero) => {
                self.constant("ZERO_POINT", zero, F32);
                self.function("zero_point", &arguments, Some(F32), vec!["return ZERO_POINT;".into()]);
            }
            ZeroPoints::Packed => {
                self.reader("zero_words", 3, vec![over("at", &self.access(3).shape, 0..1)], &["at"]);
                self.int("ZEROS", packing.zeros_per_row() as isize);
                let body = vec![
                    "let place = column * ZEROS + block;".into(),
                    "let word = zero_words(place / PER);".into(),
                    "return f32((word >> u32(place % PER * BITS)) & MASK);".into(),
                ];
                self.function("zero_point", &arguments, Some(F32), body);
            }
        }
        let columns = self.kernel.shape.last().copied().unwrap_or(1);
        self.ints(&[
            ("COLUMNS", columns),
            ("TERMS", left[rank - 1]),
            ("WORDS", packing.blocks * packing.words_per_block),
            ("BLOCK", packing.words_per_block),
            ("TEAM", BITS_TEAM),
            ("PER", packing.per_word),
            ("BITS", packing.bits),
            ("MASK", (1 << packing.bits) - 1),
        ]);
        let threads = text.launch(self.kernel, self.target).threads as usize;
        self.shared.push(("sums", F32, threads));
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element();
        Ok(())
    }

    /// A function that reads an operand at a point of a space: floats as `f32`.
    fn reader(&mut self, name: &str, slot: usize, space: super::Space, arguments: &[&'static str]) {
        let (mut body, address) = self.address(slot, &space);
        let ty = self.value[slot];
        let to = if ty == I32 { I32 } else { F32 };
        body.push(format!("return {};", convert(&self.load(slot, &address), ty, to)));
        let arguments: Vec<_> = arguments.iter().map(|&argument| (argument, I32)).collect();
        self.function(name, &arguments, Some(to), body);
    }
}
