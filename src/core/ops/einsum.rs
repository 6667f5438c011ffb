//! The row that sums products over letters.
//!
//! ```text
//! bsd,hde->bhse    left only: b s   right only: h e   in both, not in the result: d
//!
//! A [b, s, d] --> [b s, d] --.
//!                             x --> [b s, h e] --> [b, s, h, e] --> [b, h, s, e]
//! B [h, d, e] --> [d, h e] --'
//! ```
//!
//! Terms are joined from the left, two at a time, by one matrix product each. Letters that both terms and a later
//! reader have are the batch of the product. A letter that only one term has and nobody reads is summed first.

use super::{ensure, indices, output, position, same_factor};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;

pub(super) static OPS: &[OpDef] = &[OpDef::new(
    "Einsum",
    "Products of the inputs' elements whose letters agree, summed over the letters that the output \
         does not have",
    inputs![Inputs*],
    |call| {
        let dtype = same_factor(call)?;
        let equation = Equation::of(call)?;
        output(dtype, equation.shape(&equation.output))
    },
    Eval::Tensor(eval),
    Lower::Decompose(nodes),
)
.sample(|s| s.floats(&[&[2, 3], &[3, 4]]).attr("equation", "ij,jk->ik"))
.attrs(names![equation])];

/// An axis: a letter, or one of those that `...` stands for, counted from the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Letter {
    Dots(usize),
    Of(char),
}

/// An equation with its letters resolved against the inputs.
struct Equation {
    terms: Vec<Vec<Letter>>,
    output: Vec<Letter>,
    /// Letters with their extents, ascending.
    extents: Vec<(Letter, usize)>,
}

/// The letters of a term, `None` for its dots.
fn letters(term: &str) -> OpResult<Vec<Option<char>>> {
    let mut found = Vec::new();
    let mut rest = term;
    while let Some(first) = rest.chars().next() {
        match first {
            'a'..='z' | 'A'..='Z' => found.push(Some(first)),
            '.' if rest.starts_with("...") && !found.contains(&None) => {
                found.push(None);
                rest = &rest[2..];
            }
            _ => return Err(format!("attribute 'equation': expected letters and one '...' in a term, found '{term}'")),
        }
        rest = &rest[first.len_utf8()..];
    }
    Ok(found)
}

impl Equation {
    fn of(call: &Call) -> OpResult<Equation> {
        let text: String = call.str("equation", "")?.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(letters(right)?)),
            None => (text.as_str(), None),
        };
        let terms = left.split(',').map(letters).collect::<OpResult<Vec<_>>>()?;
        if terms.len() != call.inputs.len() {
            let (expected, found) = (terms.len(), call.inputs.len());
            return Err(format!("expected {expected} inputs for the equation '{text}', found {found}"));
        }
        let mut equation = Equation { terms: Vec::new(), output: Vec::new(), extents: Vec::new() };
        for (i, term) in terms.iter().enumerate() {
            equation.term(&text, i, term, call.shape(i))?;
        }
        equation.extents.sort_unstable();
        let dots = equation.extents.iter().filter(|(letter, _)| matches!(letter, Letter::Dots(_))).count();
        let dots = || (0..dots).rev().map(Letter::Dots);
        equation.output = match right {
            Some(right) => right.iter().flat_map(|c| c.map_or(dots().collect(), |c| vec![Letter::Of(c)])).collect(),
            // Without an arrow, the result has the axes of `...`, then the letters that occur once, in alphabetical order.
            None => {
                let all: Vec<_> = terms.iter().flatten().flatten().collect();
                let once = equation.extents.iter().filter_map(|&(letter, _)| match letter {
                    Letter::Of(c) => (all.iter().filter(|&&&other| other == c).count() == 1).then_some(letter),
                    Letter::Dots(_) => None,
                });
                dots().chain(once).collect()
            }
        };
        for (i, letter) in equation.output.iter().enumerate() {
            ensure(equation.extent(*letter).is_some() && !equation.output[..i].contains(letter), || {
                format!("attribute 'equation': expected each letter of the output once and in an input, found '{text}'")
            })?;
        }
        Ok(equation)
    }

    /// Adds a term with its input's shape.
    fn term(&mut self, text: &str, input: usize, term: &[Option<char>], shape: &Shape) -> OpResult<()> {
        let named = term.iter().flatten().count();
        let dots = shape.len().checked_sub(named).filter(|&n| n == 0 || term.contains(&None)).ok_or_else(|| {
            format!("input 'Inputs[{input}]': expected as many axes as '{text}' gives it, found {shape}")
        })?;
        let axes: Vec<_> = term
            .iter()
            .flat_map(|c| c.map_or((0..dots).rev().map(Letter::Dots).collect(), |c| vec![Letter::Of(c)]))
            .collect();
        for (i, (&letter, &extent)) in axes.iter().zip(shape.iter()).enumerate() {
            let first = axes[..i].iter().position(|&other| other == letter);
            ensure(first.is_none_or(|first| shape[first] == extent), || {
                format!("input 'Inputs[{input}]': expected a square along a letter twice in '{text}', found {shape}")
            })?;
            match self.extents.iter_mut().find(|(other, _)| *other == letter) {
                None => self.extents.push((letter, extent)),
                Some((_, other)) if *other == extent || extent == 1 => {}
                Some((_, other)) if *other == 1 => *other = extent,
                Some((_, other)) => {
                    return Err(format!(
                        "input 'Inputs[{input}]': expected {other} elements along axis {i} by '{text}', found {shape}"
                    ));
                }
            }
        }
        self.terms.push(axes);
        Ok(())
    }

    fn extent(&self, letter: Letter) -> Option<usize> {
        self.extents.iter().find(|(other, _)| *other == letter).map(|(_, extent)| *extent)
    }

    fn shape(&self, letters: &[Letter]) -> Shape {
        letters.iter().map(|&l| self.extent(l).expect("every letter of the equation has an extent")).collect()
    }
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let equation = Equation::of(call)?;
    let summed = equation.extents.iter().map(|(letter, _)| *letter).filter(|l| !equation.output.contains(l));
    let all: Vec<_> = equation.output.iter().copied().chain(summed).collect();
    let result = equation.shape(&equation.output);
    let mut y = vec![0.0; result.numel()];
    for index in indices(&equation.shape(&all)) {
        let mut product = 1.0;
        for (i, term) in equation.terms.iter().enumerate() {
            let along = |(letter, &extent): (&Letter, &usize)| {
                let k = all.iter().position(|other| other == letter).expect("all letters are there");
                if extent == 1 { 0 } else { index[k] }
            };
            let at: Vec<_> = term.iter().zip(call.shape(i).iter()).map(along).collect();
            product *= x[i][position(&at, call.shape(i))];
        }
        y[position(&index[..result.len()], &result)] += product;
    }
    Ok(vec![y])
}

/// A value and the letters of its axes.
struct Term<'g> {
    value: Var<'g>,
    letters: Vec<Letter>,
}

impl<'g> Term<'g> {
    fn has(&self, letter: &Letter) -> bool {
        self.letters.contains(letter)
    }

    /// Of axes with the same letter, keeps one: the elements whose indices along them are equal.
    fn diagonal(mut self, b: Nodes<'g>) -> OpResult<Term<'g>> {
        let twice = |term: &Term| {
            let letters = &term.letters;
            (0..letters.len()).find_map(|k| Some((letters[..k].iter().position(|l| *l == letters[k])?, k)))
        };
        while let Some((first, second)) = twice(&self) {
            let extent = self.value.shape()?[first];
            let along = |axis: usize| -> Shape {
                (0..self.letters.len()).map(|k| if k == axis { extent } else { 1 }).collect()
            };
            let [rows, columns] = [first, second].map(|axis| b.numbers(DType::I64, along(axis), 0.0));
            let equal = rows.equal(columns).select(self.value, 0.0);
            self.value = equal.reduce_sum(&[second as i64], false);
            self.letters.remove(second);
        }
        Ok(self)
    }

    /// Sums the axes for which `drop` holds.
    fn sum(mut self, drop: impl Fn(usize, Letter) -> bool) -> Term<'g> {
        let axes: Vec<_> = (0..self.letters.len()).filter(|&k| drop(k, self.letters[k])).collect();
        if !axes.is_empty() {
            let attrs = Attrs::new().with("axes", &axes[..]).with("keepdims", 0);
            self.value = self.value.op("ReduceSum", &[], attrs);
            self.letters = (0..self.letters.len()).filter(|k| !axes.contains(k)).map(|k| self.letters[k]).collect();
        }
        self
    }

    /// Transposes the axes to this order.
    fn transposed(&self, letters: &[Letter]) -> Var<'g> {
        if self.letters == letters {
            return self.value;
        }
        let at = |letter| self.letters.iter().position(|other| other == letter).expect("a permutation");
        self.value.transpose(&letters.iter().map(at).collect::<Vec<_>>())
    }

    /// Reshapes to the matrices of a product: the axes of `batch`, with extent 1 if absent, then one axis for each of
    /// `groups`.
    fn matrices(&self, equation: &Equation, batch: &[Letter], groups: [&[Letter]; 2]) -> Var<'g> {
        let own: Vec<_> = batch.iter().copied().filter(|l| self.has(l)).collect();
        let value = self.transposed(&[&own[..], groups[0], groups[1]].concat());
        let along = |l: &Letter| if self.has(l) { equation.shape(&[*l])[0] } else { 1 };
        let shape: Vec<_> = batch.iter().map(along).chain(groups.map(|group| equation.shape(group).numel())).collect();
        value.shaped(&shape)
    }
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let equation = Equation::of(call)?;
    let mut joined: Option<Term> = None;
    for (i, letters) in equation.terms.iter().enumerate() {
        let later = &equation.terms[i + 1..];
        let asked = |l: Letter| equation.output.contains(&l) || later.iter().any(|term| term.contains(&l));
        // An axis with one element broadcasts, so another term gives the extent.
        let term = Term { value: x[i], letters: letters.clone() }.diagonal(b)?;
        let shape = term.value.shape()?;
        let before = joined.as_ref();
        let term = term.sum(|k, l| {
            let repeats = shape[k] == 1 && equation.extent(l) != Some(1);
            repeats || !asked(l) && !before.is_some_and(|before| before.has(&l))
        });
        joined = Some(match joined {
            None => term,
            Some(left) => join(&equation, left, term, &asked),
        });
    }
    let joined = joined.ok_or("expected at least one input, found none")?;
    let joined = joined.sum(|_, l| !equation.output.contains(&l));
    Ok(vec![joined.transposed(&equation.output)])
}

/// The product of two terms, summed over the letters that both have and nobody else reads.
fn join<'g>(equation: &Equation, left: Term<'g>, right: Term<'g>, asked: &dyn Fn(Letter) -> bool) -> Term<'g> {
    let left = left.sum(|_, l| !asked(l) && !right.has(&l));
    let of = |term: &Term, keep: &dyn Fn(&Letter) -> bool| -> Vec<Letter> {
        term.letters.iter().copied().filter(|l| keep(l)).collect()
    };
    let batch = of(&left, &|l| right.has(l) && asked(*l));
    let summed = of(&left, &|l| right.has(l) && !asked(*l));
    let (rows, columns) = (of(&left, &|l| !right.has(l)), of(&right, &|l| !left.has(l)));
    let letters = [&batch[..], &rows, &columns].concat();
    let a = left.matrices(equation, &batch, [&rows, &summed]);
    let c = right.matrices(equation, &batch, [&summed, &columns]);
    // If nothing is summed, the product is elementwise.
    let value = if summed.is_empty() { a * c } else { a.matmul(c) };
    Term { value: value.shaped(&equation.shape(&letters)), letters }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    fn equation(text: &str) -> Attrs {
        Attrs::new().with("equation", text)
    }

    #[test]
    fn equations_follow_the_specification() {
        let a = (F32, &[2, 3][..], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]);
        let b = (F32, &[3, 2][..], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0][..]);
        let of = |text: &str| eval("Einsum", &[a], &equation(text));
        assert_eq!(of("ij->ji"), ("f32[3,2]".into(), vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        assert_eq!(of("ba"), of("ij -> ji"), "without an arrow, in the alphabet's order");
        assert_eq!(of("ij->"), ("f32[]".into(), vec![21.0]));
        assert_eq!(of("...j->..."), ("f32[2]".into(), vec![6.0, 15.0]));
        let both = |text: &str| eval("Einsum", &[a, b], &equation(text));
        assert_eq!(both("ij,jk->ik"), ("f32[2,2]".into(), vec![4.0, 5.0, 10.0, 11.0]));
        assert_eq!(both("ij,jk"), both("ij,jk->ik"));
        assert_eq!(both("...j,jk->...k"), both("ij,jk->ik"));
        assert_eq!(both("ij,ji->"), ("f32[]".into(), vec![1.0 + 3.0 + 5.0 + 6.0]));
        let whole = (I64, &[2][..], &[3.0, -4.0][..]);
        assert_eq!(eval("Einsum", &[whole, whole], &equation("i,i->")), ("i64[]".into(), vec![25.0]));
        let wide = eval("Einsum", &[a, (F32, &[1, 3], &[1.0, 0.0, 2.0])], &equation("...,...->..."));
        assert_eq!(wide.1, [1.0, 0.0, 6.0, 4.0, 0.0, 12.0], "one element goes with all");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |text: &str, shapes: &[&[usize]]| {
            let inputs: Vec<_> = shapes.iter().map(|shape| (F32, *shape)).collect();
            refused("Einsum", &inputs, &equation(text))
        };
        assert_eq!(refused("ij,jk->ik", &[&[2, 3]]), "expected 2 inputs for the equation 'ij,jk->ik', found 1");
        assert_eq!(
            refused("ij->i", &[&[2, 3, 4]]),
            "input 'Inputs[0]': expected as many axes as 'ij->i' gives it, found [2,3,4]"
        );
        assert_eq!(
            refused("ij,jk->ik", &[&[2, 3], &[4, 2]]),
            "input 'Inputs[1]': expected 3 elements along axis 0 by 'ij,jk->ik', found [4,2]"
        );
        assert_eq!(
            refused("ii->i", &[&[2, 3]]),
            "input 'Inputs[0]': expected a square along a letter twice in 'ii->i', found [2,3]"
        );
        for text in ["ij->k", "ij->ii", "i1->i", "..j->j"] {
            assert!(refused(text, &[&[2, 2]]).starts_with("attribute 'equation': "), "{text}");
        }
    }
}
