//! Numbers that are known while reading, and depend on counts: on how many elements nodes find, or on the rows of states.
//!
//! There are graphs of a model for some counts, of which one graph is made for all. What several of them have in common may differ for
//! other counts. So each number that depends on counts has a [`Form`], which holds for all of them.

use crate::constant::Constant;
use crate::dtype::DType;
use crate::op::Attr;
use crate::tensor::Tensor;
use std::collections::HashMap;
use std::sync::Arc;

/// The most counts of a model. Each one multiplies the number of graphs.
pub(super) const MOST_COUNTS: usize = 4;

/// The counts that a run may have.
pub(super) type Counted = [i64; MOST_COUNTS];

/// Doubles have all integers up to this one.
const EXACT: i64 = 1 << f64::MANTISSA_DIGITS;

/// How a number depends on counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// It does not.
    Fixed,
    /// A line goes through it.
    Line(Line),
    /// Otherwise, on the counts whose bits are set.
    Other(u8),
}

/// The integer `offset + slopes * counts`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    pub offset: i64,
    pub slopes: Counted,
}

impl Line {
    /// The count of this number.
    pub fn count(number: usize) -> Line {
        let mut line = Line::default();
        line.slopes[number] = 1;
        line
    }

    pub fn at(&self, counts: &Counted) -> Option<i64> {
        let terms = self.slopes.iter().zip(counts);
        terms.map(|(&slope, &count)| slope.checked_mul(count)).try_fold(self.offset, |sum, term| sum.checked_add(term?))
    }

    fn is_fixed(&self) -> bool {
        self.slopes.iter().all(|&slope| slope == 0)
    }

    fn on(&self) -> u8 {
        (0..MOST_COUNTS).filter(|&k| self.slopes[k] != 0).fold(0, |on, k| on | 1 << k)
    }

    /// `self + factor * other`.
    fn plus(&self, factor: i64, other: &Line) -> Option<Line> {
        let add = |a: i64, b: i64| a.checked_add(b.checked_mul(factor)?);
        let mut sum = Line { offset: add(self.offset, other.offset)?, ..*self };
        for (own, other) in sum.slopes.iter_mut().zip(other.slopes) {
            *own = add(*own, other)?;
        }
        Some(sum)
    }

    fn times(&self, factor: i64) -> Option<Line> {
        Line::default().plus(factor, self)
    }

    /// The line divided by a positive number and rounded down, if that is a line.
    fn over(&self, divisor: i64) -> Option<Line> {
        let divides = self.slopes.iter().all(|slope| slope % divisor == 0);
        let slopes = self.slopes.map(|slope| slope / divisor);
        divides.then(|| Line { offset: self.offset.div_euclid(divisor), slopes })
    }
}

impl Form {
    /// The integer of this form for some counts, where it is `own` for the counts that it was read for; `None` if no line says.
    pub fn at_counts(&self, own: i64, counts: &Counted) -> Option<i64> {
        match self {
            Form::Fixed => Some(own),
            Form::Line(line) => line.at(counts),
            Form::Other(_) => None,
        }
    }

    /// The form of a line; one that is level has no form of its own.
    pub fn of(line: Line) -> Form {
        if line.is_fixed() { Form::Fixed } else { Form::Line(line) }
    }

    /// The counts that it depends on.
    pub fn on(&self) -> u8 {
        match self {
            Form::Fixed => 0,
            Form::Line(line) => line.on(),
            Form::Other(on) => *on,
        }
    }
}

/// A number in one import, and its form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number {
    pub form: Form,
    pub value: f64,
}

impl Number {
    pub fn fixed(value: f64) -> Number {
        Number { form: Form::Fixed, value }
    }

    /// The line through an integer.
    pub fn line(&self) -> Option<Line> {
        match self.form {
            Form::Line(line) => Some(line),
            Form::Fixed if self.value.fract() == 0.0 && self.value.abs() < EXACT as f64 => {
                Some(Line { offset: self.value as i64, ..Line::default() })
            }
            _ => None,
        }
    }
}

/// The least and the most of each count.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges(pub Vec<(i64, i64)>);

impl Ranges {
    /// The least and the most that a number may be.
    fn bounds(&self, number: &Number) -> Option<(f64, f64)> {
        match number.form {
            Form::Fixed => (!number.value.is_nan()).then_some((number.value, number.value)),
            Form::Other(_) => None,
            Form::Line(line) => {
                let (mut low, mut high) = (line.offset, line.offset);
                for (&slope, (least, most)) in line.slopes.iter().zip(&self.0) {
                    let ends = [slope.checked_mul(*least)?, slope.checked_mul(*most)?];
                    low = low.checked_add(ends[0].min(ends[1]))?;
                    high = high.checked_add(ends[0].max(ends[1]))?;
                }
                (low > -EXACT && high < EXACT).then_some((low as f64, high as f64))
            }
        }
    }

    /// The least and the most of a difference.
    fn distance(&self, a: &Number, b: &Number) -> Option<(f64, f64)> {
        if let Some((a, b)) = a.line().zip(b.line()) {
            return self.bounds(&Number { form: Form::Line(a.plus(-1, &b)?), value: 0.0 });
        }
        let (a, b) = (self.bounds(a)?, self.bounds(b)?);
        Some((a.0 - b.1, a.1 - b.0))
    }

    /// Some counts: the ends of each range, what is beside them, and the middle.
    pub fn samples(&self) -> Vec<Counted> {
        let mut all = Vec::new();
        let ends = |of: fn(&(i64, i64)) -> i64| {
            let mut counts = Counted::default();
            counts.iter_mut().zip(&self.0).for_each(|(count, range)| *count = of(range));
            counts
        };
        let corners = [ends(|range| range.1), ends(|range| range.0), ends(|range| (range.0 + 1).min(range.1))];
        for (number, &(least, most)) in self.0.iter().enumerate() {
            let middle = least + (most - least) / 2;
            for count in [most, least, least + 1, least + 2, middle, middle + 1, most - 1] {
                for mut counts in corners {
                    counts[number] = count.clamp(least, most);
                    all.push(counts);
                }
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The form of a number that has these values for some counts; `on` are the counts that it may depend on.
    pub fn fit(&self, values: &[(Counted, i64)], on: u8) -> Form {
        let line = || {
            let (base, first) = values.first()?;
            let mut line = Line::default();
            for number in (0..MOST_COUNTS).filter(|number| on & 1 << number != 0) {
                if self.0.get(number).is_none_or(|(least, most)| least == most) {
                    continue;
                }
                let differs = |a: &Counted, b: &Counted| (0..MOST_COUNTS).all(|k| (a[k] != b[k]) == (k == number));
                let pair = values.iter().find_map(|a| Some((a, values.iter().find(|b| differs(&a.0, &b.0))?)));
                let ((from, a), (to, b)) = pair?;
                let (run, rise) = (to[number] - from[number], b.checked_sub(*a)?);
                line.slopes[number] = (rise % run == 0).then_some(rise / run)?;
            }
            line.offset = first.checked_sub(line.at(base)?)?;
            values.iter().all(|(counts, value)| line.at(counts) == Some(*value)).then_some(line)
        };
        line().map_or(Form::Other(on), Form::of)
    }

    /// The form of what an elementwise operator computes; `dtype` is the type of its result.
    pub fn apply(&self, op: &str, x: &[Number], dtype: DType) -> Form {
        let on = x.iter().fold(0, |on, number| on | number.form.on());
        if on == 0 {
            return Form::Fixed;
        }
        match self.line(op, x, dtype) {
            Some(Form::Line(line)) if !self.holds(dtype, line) => Form::Other(on),
            Some(Form::Line(line)) => Form::of(line),
            Some(Form::Fixed) => Form::Fixed,
            _ => Form::Other(on),
        }
    }

    /// True if a type has all numbers of a line.
    fn holds(&self, dtype: DType, line: Line) -> bool {
        let exact = match dtype {
            DType::F32 => 1 << f32::MANTISSA_DIGITS,
            DType::F16 => 1 << 11,
            DType::BF16 => 1 << 8,
            _ => EXACT,
        };
        let (low, high) = dtype.range();
        self.bounds(&Number { form: Form::Line(line), value: 0.0 })
            .is_some_and(|(least, most)| least >= low.max(-exact as f64) && most <= high.min(exact as f64))
    }

    /// The form if it is fixed or a line.
    fn line(&self, op: &str, x: &[Number], dtype: DType) -> Option<Form> {
        let of = |at: usize| x.get(at)?.line();
        let bounds = |at: usize| self.bounds(x.get(at)?);
        // What holds for all counts does not depend on them.
        let known = |always: bool, never: bool| (always || never).then_some(Form::Fixed);
        let compared = |holds: fn(f64) -> bool, fails: fn(f64) -> bool| {
            let (low, high) = self.distance(x.first()?, x.get(1)?)?;
            known(holds(low) && holds(high), fails(low) && fails(high))
        };
        match op {
            "Identity" | "Floor" | "Ceil" | "Round" => of(0).map(Form::Line),
            "Cast" if dtype == DType::Bool => {
                let (low, high) = bounds(0)?;
                known(low > 0.0 || high < 0.0, false)
            }
            "Cast" | "CastLike" => of(0).map(Form::Line),
            "Abs" | "Relu" => of(0).filter(|_| bounds(0).is_some_and(|(low, _)| low >= 0.0)).map(Form::Line),
            "Sign" => bounds(0).and_then(|(low, high)| known(low > 0.0, high < 0.0)),
            "Neg" => of(0)?.times(-1).map(Form::Line),
            "Add" => of(0)?.plus(1, &of(1)?).map(Form::Line),
            "Sub" => of(0)?.plus(-1, &of(1)?).map(Form::Line),
            "Mul" => {
                let (a, b) = (of(0)?, of(1)?);
                let (line, factor) = if b.is_fixed() { (a, b) } else { (b, a) };
                factor.is_fixed().then(|| line.times(factor.offset)).flatten().map(Form::Line)
            }
            "Div" | "Mod" => self.divided(op, x, dtype),
            "Min" | "Max" => {
                let mut best = *x.first()?;
                for other in &x[1..] {
                    let (low, high) = self.distance(&best, other)?;
                    let other_is_less = if low >= 0.0 { true } else { (high <= 0.0).then_some(false)? };
                    if other_is_less == (op == "Min") {
                        best = *other;
                    }
                }
                Some(best.form)
            }
            "Equal" => {
                let (low, high) = self.distance(x.first()?, x.get(1)?)?;
                known(low == 0.0 && high == 0.0, low > 0.0 || high < 0.0)
            }
            "Less" => compared(|d| d < 0.0, |d| d >= 0.0),
            "LessOrEqual" => compared(|d| d <= 0.0, |d| d > 0.0),
            "Greater" => compared(|d| d > 0.0, |d| d <= 0.0),
            "GreaterOrEqual" => compared(|d| d >= 0.0, |d| d < 0.0),
            "And" => known(x.iter().any(|n| n.form == Form::Fixed && n.value == 0.0), false),
            "Or" => known(x.iter().any(|n| n.form == Form::Fixed && n.value != 0.0), false),
            "Where" => match x.first()?.form {
                Form::Fixed => x.get(if x[0].value != 0.0 { 1 } else { 2 }).map(|chosen| chosen.form),
                _ => {
                    let (yes, no) = (of(1)?, of(2)?);
                    (yes == no).then_some(Form::Line(yes))
                }
            },
            _ => None,
        }
    }

    /// A quotient or a remainder, of a divisor above 0.
    fn divided(&self, op: &str, x: &[Number], dtype: DType) -> Option<Form> {
        let (line, divisor) = (x.first()?.line()?, x.get(1)?.line()?);
        let divisor = (divisor.is_fixed() && divisor.offset > 0).then_some(divisor.offset)?;
        let (low, high) = self.bounds(&x[0])?;
        if op == "Div" && dtype.is_float() {
            let whole = line.over(divisor)?;
            return (line.offset % divisor == 0).then_some(Form::Line(whole));
        }
        // Integers are rounded toward 0.
        if low < 0.0 {
            return None;
        }
        let rest = |n: f64| n as i64 / divisor;
        match op {
            "Div" if rest(low) == rest(high) => Some(Form::Fixed),
            "Div" => line.over(divisor).map(Form::Line),
            _ if rest(low) == rest(high) => {
                line.plus(-1, &Line { offset: rest(low) * divisor, ..Line::default() }).map(Form::Line)
            }
            _ => line.over(divisor).map(|_| Form::Fixed),
        }
    }

    /// What an operator makes of two numbers.
    pub fn combine(&self, op: &str, a: Number, b: Number, dtype: DType) -> Number {
        let value = match op {
            "Add" => a.value + b.value,
            "Sub" => a.value - b.value,
            "Mul" => a.value * b.value,
            "Min" => a.value.min(b.value),
            "Max" => a.value.max(b.value),
            "Div" => (a.value / b.value).floor(),
            _ => unreachable!("extents are not computed by '{op}'"),
        };
        Number { form: self.apply(op, &[a, b], dtype), value }
    }

    /// What an operator makes of two numbers that an extent is computed from.
    pub fn calculate(&self, op: &str, a: Number, b: Number) -> Number {
        self.combine(op, a, b, DType::I64)
    }

    /// The product of numbers.
    pub fn product(&self, numbers: &[Number]) -> Form {
        numbers.iter().fold(Number::fixed(1.0), |product, number| self.calculate("Mul", product, *number)).form
    }

    /// True if a number is negative; `None` if it is so for some counts alone.
    pub fn is_negative(&self, number: &Number) -> Option<bool> {
        let (low, high) = self.bounds(number)?;
        if low >= 0.0 { Some(false) } else { (high < 0.0).then_some(true) }
    }

    /// The most that a number may be.
    pub fn most(&self, number: &Number) -> Option<i64> {
        self.bounds(number).map(|(_, high)| high as i64)
    }
}

/// The forms of some elements.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Forms {
    /// All have one.
    All(Form),
    Each(Vec<Form>),
}

impl Forms {
    pub fn at(&self, element: usize) -> Form {
        match self {
            Forms::All(form) => *form,
            Forms::Each(forms) => forms[element],
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Form> {
        match self {
            Forms::All(form) => std::slice::from_ref(form).iter(),
            Forms::Each(forms) => forms.iter(),
        }
    }

    /// The counts that they depend on.
    pub fn on(&self) -> u8 {
        self.iter().fold(0, |on, form| on | form.on())
    }

    /// An attribute of these forms for other counts than it was read for; `None` if a number follows no line.
    pub fn at_counts(&self, attr: &Attr, counts: &Counted) -> Option<Attr> {
        let integer = |(k, value): (usize, &i64)| self.at(k).at_counts(*value, counts);
        let float = |(k, value): (usize, &f64)| match self.at(k) {
            Form::Fixed => Some(*value),
            form => form.at_counts(0, counts).map(|value| value as f64),
        };
        Some(match attr {
            Attr::Int(value) => Attr::Int(integer((0, value))?),
            Attr::Ints(values) => Attr::Ints(values.iter().enumerate().map(integer).collect::<Option<_>>()?),
            Attr::Float(value) => Attr::Float(float((0, value))?),
            Attr::Floats(values) => Attr::Floats(values.iter().enumerate().map(float).collect::<Option<_>>()?),
            Attr::Tensor(tensor) => {
                let values = tensor.to_f64().iter().enumerate().map(float).collect::<Option<Vec<_>>>()?;
                Attr::Tensor(Tensor::from_f64(tensor.dtype(), tensor.shape().clone(), &values))
            }
            _ => return None,
        })
    }

    /// The counts on which some depend otherwise than by a line.
    pub fn others(&self) -> u8 {
        self.iter().filter(|form| matches!(form, Form::Other(_))).fold(0, |on, form| on | form.on())
    }
}

/// The constants of an import that depend on counts, by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Varying(HashMap<usize, (Arc<Constant>, Forms)>);

impl Varying {
    pub fn note(&mut self, constant: &Arc<Constant>, forms: Forms) {
        self.0.insert(Arc::as_ptr(constant).addr(), (Arc::clone(constant), forms));
    }

    /// The forms of a constant's elements; `None` if none depends on counts.
    pub fn of(&self, constant: &Arc<Constant>) -> Option<&Forms> {
        self.0.get(&Arc::as_ptr(constant).addr()).map(|(_, forms)| forms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Attrs, Call, Fact};
    use crate::ops;

    /// What a row makes of integers.
    fn value(op: &str, x: &[f64]) -> f64 {
        let bools = |slot: usize| matches!((op, slot), ("And" | "Or", _) | ("Where", 0));
        let dtype = |slot: usize| if bools(slot) { DType::Bool } else { DType::I64 };
        let tensors: Vec<_> = x.iter().enumerate().map(|(k, &v)| Tensor::from_f64(dtype(k), [], &[v])).collect();
        let facts: Vec<_> = tensors.iter().map(|t| Fact::new(t.dtype(), [])).collect();
        let (facts, tensors): (Vec<_>, Vec<_>) = (facts.iter().map(Some).collect(), tensors.iter().map(Some).collect());
        let call = Call { op: ops::find(op).expect("a row"), attrs: &Attrs::new(), inputs: &facts };
        call.compute(&tensors).expect("a value")[0].to_f64()[0]
    }

    /// Each form is held against the row, for all counts.
    #[test]
    fn forms_hold_for_all_counts() {
        let ranges = Ranges(vec![(0, 4), (2, 5)]);
        let all: Vec<Counted> = (0..=4).flat_map(|a| (2..=5).map(move |b| [a, b, 0, 0])).collect();
        let numbers = (0..7 * 5 * 3).map(|k| Line { offset: k % 7 - 3, slopes: [k / 7 % 5 - 2, k / 35 - 1, 0, 0] });
        let lines: Vec<_> = numbers.collect();
        let at = |line: &Line, counts: &Counted| line.at(counts).expect("small numbers") as f64;
        let base = all[7];
        let number = |line: &Line| Number { form: Form::of(*line), value: at(line, &base) };
        let binary = [
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Mod",
            "Min",
            "Max",
            "Equal",
            "Less",
            "LessOrEqual",
            "Greater",
            "GreaterOrEqual",
        ];
        let mut kinds = [0; 2];
        for op in binary {
            for a in &lines {
                for b in lines.iter().step_by(if op == "Mul" { 1 } else { 3 }) {
                    let form = ranges.apply(op, &[number(a), number(b)], DType::I64);
                    let values: Vec<_> = all.iter().map(|counts| value(op, &[at(a, counts), at(b, counts)])).collect();
                    match form {
                        Form::Fixed => assert!(values.iter().all(|v| *v == values[7]), "{op} {a:?} {b:?}"),
                        Form::Line(line) => {
                            let expected = all.iter().map(|counts| at(&line, counts));
                            assert!(expected.eq(values), "{op} {a:?} {b:?}");
                        }
                        Form::Other(on) => assert_eq!(on, number(a).form.on() | number(b).form.on()),
                    }
                    kinds[0] += usize::from(form == Form::Fixed);
                    kinds[1] += usize::from(matches!(form, Form::Line(_)));
                }
            }
        }
        assert!(kinds.iter().all(|&count| count > 1000), "{kinds:?}");
        // A condition that is not known for all counts chooses between equal numbers alone.
        let unknown = Number { form: Form::Other(1), value: 1.0 };
        let [some, other] = [number(&lines[40]), number(&lines[41])];
        assert_eq!(ranges.apply("Where", &[unknown, some, some], DType::I64), some.form);
        assert_eq!(
            ranges.apply("Where", &[unknown, some, other], DType::I64),
            Form::Other(some.form.on() | other.form.on() | 1)
        );
        assert_eq!(ranges.apply("And", &[unknown, Number::fixed(0.0)], DType::Bool), Form::Fixed);
        assert_eq!(ranges.apply("Or", &[unknown, Number::fixed(0.0)], DType::Bool), Form::Other(1));
    }

    /// What a type does not hold is no line.
    #[test]
    fn lines_stay_in_their_type() {
        let ranges = Ranges(vec![(0, 300)]);
        let count = Number { form: Form::Line(Line::count(0)), value: 1.0 };
        assert_eq!(ranges.apply("Cast", &[count], DType::I16), count.form);
        assert_eq!(ranges.apply("Cast", &[count], DType::U8), Form::Other(1));
        assert_eq!(ranges.apply("Cast", &[count], DType::BF16), Form::Other(1));
        assert_eq!(ranges.apply("Cast", &[count], DType::Bool), Form::Other(1));
    }

    #[test]
    fn a_line_is_found_where_all_values_are_on_it() {
        let ranges = Ranges(vec![(0, 9), (1, 4)]);
        let fit = |of: fn(&Counted) -> i64| {
            ranges.fit(&ranges.samples().iter().map(|counts| (*counts, of(counts))).collect::<Vec<_>>(), 0b11)
        };
        assert_eq!(fit(|c| 3 * c[0] - c[1] + 2), Form::Line(Line { offset: 2, slopes: [3, -1, 0, 0] }));
        assert_eq!(fit(|_| 7), Form::Fixed);
        assert_eq!(fit(|c| c[0] * c[1]), Form::Other(0b11));
        assert_eq!(fit(|c| c[0].min(8)), Form::Other(0b11));
    }
}
