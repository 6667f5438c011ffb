//! Attention.

use super::*;
use crate::expr::{Binary, Code, Unary};

/// Rows without a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guard {
    /// Rows whose scores are all minus infinity, so that nothing is seen. WGSL, which need not know NaN, takes all rows.
    Unseen,
    /// All such rows: those that see nothing, and those with a NaN.
    All,
}

/// What becomes of a row of scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fold {
    /// `[.., m, e]`: the sum of values, weighted by the row's softmax.
    #[default]
    Softmax,
    /// `[.., m, 1]`: the logarithm of the sum of the scores' exponentials. There are no values: further operands are reads from 2 on. On
    /// tensor cores alone.
    LogSum,
    /// `[.., m, e]`: the sum of values, weighted by the scores themselves. On tensor cores alone.
    Plain {
        /// True if input 1 of a score is the product of reads\[3\] `[batch.., m, f]` and reads\[4\] `[batch.., f, n]`. Further operands
        /// are inputs from 2 on, and reads from 5 on.
        second: bool,
    },
}

impl Fold {
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub(super) fn is_softmax(&self) -> bool {
        *self == Fold::Softmax
    }

    /// Products of a score.
    pub fn products(self) -> usize {
        if self == (Fold::Plain { second: true }) { 2 } else { 1 }
    }

    /// The first further operand of a score: queries, keys and values come before.
    pub fn operands(self) -> usize {
        match self {
            Fold::LogSum => 2,
            _ => 1 + 2 * self.products(),
        }
    }
}

fn fold_of(t: &Template) -> Fold {
    let Template::Attention { fold, .. } = t else { mismatch(t) };
    *fold
}

pub(super) static ATTENTION: TemplateDef = TemplateDef {
    name: "attention",
    doc: "softmax of the scores of queries and keys, times values; scores are never stored",
    kind: Kind::Product,
    widens: |kernel, operand, _| operand >= fold_of(&kernel.template).operands(),
    core_reads: |t| {
        let Template::Attention { further, fold, .. } = t else { mismatch(t) };
        fold.operands().saturating_add(*further)
    },
    rows: |_| Rows { axes: 1, written_once: false },
    bodies: |t| {
        let Template::Attention { score, .. } = t else { mismatch(t) };
        vec![score]
    },
    check: |kernel, _| {
        let shape = &kernel.shape;
        let (batch, m, e) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        kernel.reads_axes(1, shape.len())?;
        let last = |operand: usize| kernel.reads[operand].access.shape[batch.len() + 1];
        let (d, n) = (last(0), last(1));
        ensure(m.max(n).max(d).max(e) <= MOST_EXTENT, || {
            format!("an attention of {m} by {d} by {n} by {e} is too large")
        })?;
        kernel.reads_extents(0, &[batch, &[m, d]].concat())?;
        kernel.reads_extents(1, &[batch, &[d, n]].concat())?;
        let Template::Attention { fold, guarded, .. } = kernel.template else { mismatch(&kernel.template) };
        ensure(guarded.is_none() || fold == Fold::Softmax, || "a guard of rows that are no softmax".to_owned())?;
        match fold {
            Fold::LogSum => ensure(e == 1, || format!("expected one number for a row, found {e}"))?,
            Fold::Softmax | Fold::Plain { .. } => kernel.reads_extents(2, &[batch, &[n, e]].concat())?,
        }
        if fold.products() == 2 {
            kernel.reads_axes(3, shape.len())?;
            let f = last(3);
            ensure(f <= MOST_EXTENT, || format!("an attention of {f} columns is too large"))?;
            kernel.reads_extents(3, &[batch, &[m, f]].concat())?;
            kernel.reads_extents(4, &[batch, &[f, n]].concat())?;
        }
        let scores = [batch, &[m, n]].concat();
        (fold.operands()..kernel.template.core_reads()).try_for_each(|i| kernel.reads_extents(i, &scores))?;
        kernel.reads_floats(fold.operands())
    },
    axis_of: |kernel, operand, axis| {
        let (fold, rows) = (fold_of(&kernel.template), kernel.shape.len() - 2);
        let shared = matches!(operand, 1 | 2 | 4) && operand < fold.operands() && axis == rows;
        if shared { Along::Whole } else { Along::Axis(axis) }
    },
    meaning: attention,
    samples: || {
        let x = |n| Expr::input(n, DType::F32);
        let reads = || vec![floats(&[2, 3, 4]), floats(&[2, 4, 5]), floats(&[2, 5, 6])];
        let plain =
            Template::Attention { score: Body::new(&[x(0) * 0.5]), further: 0, guarded: None, fold: Fold::Softmax };
        let masked = Template::Attention {
            score: Body::new(&[x(0) + x(1)]),
            further: 1,
            guarded: Some(Guard::All),
            fold: Fold::Softmax,
        };
        let mut with_mask = reads();
        with_mask.push(floats(&[2, 3, 5]));
        vec![sample(plain, &[2, 3, 6], reads(), x(0)), sample(masked, &[2, 3, 6], with_mask, x(0))]
    },
    ..PLAIN
};

fn attention(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let Template::Attention { score, further, guarded, fold } = &kernel.template else { mismatch(&kernel.template) };
    let [batch @ .., _] = row else { panic!("an attention has at least two axes") };
    let pairs = &[[0, 1], [3, 4]][..fold.products()];
    let queries: Vec<_> = pairs.iter().map(|&[a, _]| elements.along(a, &[row, &[0]].concat(), row.len())).collect();
    let mut scores = Vec::new();
    for n in 0..elements.shape(1)[row.len()] {
        let index = [row, &[n]].concat();
        let key = [batch, &[0, n]].concat();
        let products = pairs.iter().zip(&queries);
        let mut inputs: Vec<f64> =
            products.map(|(&[_, b], query)| dot(query, &elements.along(b, &key, batch.len()))).collect();
        inputs.extend((fold.operands()..fold.operands() + further).map(|r| elements.at(r, &index)));
        scores.push(score.eval(&inputs, &index, &[])[0]);
    }
    if let Fold::Plain { .. } = fold {
        let value = |e: usize| dot(&scores, &elements.along(2, &[batch, &[0, e]].concat(), batch.len()));
        return Row { core: (0..kernel.shape[row.len()]).map(value).collect(), ..Row::default() };
    }
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = powers.iter().sum();
    if *fold == Fold::LogSum {
        return Row { core: vec![if top == f64::NEG_INFINITY { top } else { top + total.ln() }], ..Row::default() };
    }
    let weightless = match guarded {
        Some(Guard::Unseen) => scores.iter().all(|&s| s == f64::NEG_INFINITY),
        Some(Guard::All) => total.is_nan(),
        None => false,
    };
    let mut value = |e: usize| {
        let values = elements.along(2, &[batch, &[0, e]].concat(), batch.len());
        if weightless { 0.0 } else { dot(&powers, &values) / total }
    };
    let core = (0..kernel.shape[row.len()]).map(&mut value).collect();
    Row { core, ..Row::default() }
}

/// The keys that a query may see: those from `from` to `to` behind its own place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Band {
    /// The first, if there is one.
    pub from: Option<isize>,
    /// The last.
    pub to: Option<isize>,
}

impl Band {
    /// The keys, of `n`, that any of these queries may see.
    pub fn keys(self, queries: std::ops::Range<usize>, n: usize) -> std::ops::Range<usize> {
        let held = |at: isize| at.clamp(0, n as isize) as usize;
        let first = self.from.map_or(0, |from| held(queries.start as isize + from));
        let end = self.to.map_or(n, |to| held((queries.end as isize).saturating_add(to)));
        first.min(end)..end
    }
}

/// The band outside which the scores of an attention weigh nothing, as its code says; `None` if it says nothing, or if a query may see no key.
pub fn band(kernel: &Kernel) -> Option<Band> {
    let Template::Attention { score, fold, .. } = &kernel.template else { return None };
    let rank = kernel.shape.len();
    let (m, n) = (kernel.shape[rank - 2], kernel.reads[1].access.shape[rank - 1]);
    let mut found = Conditions::new(score, rank);
    let result = *score.results.first()?;
    let plain = matches!(fold, Fold::Plain { .. });
    let lowest = if plain { found.vanishes(result) } else { found.hidden(result) }?;
    let Band { from, to } = found.band;
    if from.is_none() && to.is_none() {
        return None;
    }
    // A row without keys has the mean of all values where what is hidden is a number. Of plain scores, rows may be those of keys.
    let sees = |query: usize| !found.band.keys(query..query + 1, n).is_empty();
    let turned = Band { from: to.map(|to| -to), to: from.map(|from| -from) };
    let is_seen = |key: usize| !turned.keys(key..key + 1, m).is_empty();
    let exact = lowest == f64::NEG_INFINITY || !found.others;
    let all = m > 0 && sees(0) && sees(m - 1) && (!plain || n > 0 && is_seen(0) && is_seen(n - 1));
    (exact && all).then_some(found.band)
}

/// The factor of scores that are products times one positive number, and the band that hides the others, if that is all that they are. Scores are
/// held in `f32`, in whatever 16-bit type the code has them, as registers of rendered kernels hold them.
pub fn scaled(score: &Body, rank: usize) -> Option<(f32, Band)> {
    let mut found = Conditions::new(score, rank);
    let scale = found.score(*score.results.first()?)?;
    (!found.others && scale > 0.0).then_some((scale, found.band))
}

struct Conditions<'a> {
    body: &'a Body,
    /// Of queries, and of keys.
    axes: [u32; 2],
    band: Band,
    /// True if there are conditions that are no bands.
    others: bool,
}

/// What is hidden by at most this number weighs nothing.
const LOWEST: f64 = -1e37;

impl<'a> Conditions<'a> {
    fn new(body: &'a Body, rank: usize) -> Conditions<'a> {
        Conditions { body, axes: [rank as u32 - 2, rank as u32 - 1], band: Band::default(), others: false }
    }

    fn code(&self, i: u32) -> Code {
        self.body.code[i as usize].code
    }

    /// The value of what a score's conditions hide, if it has any, and it weighs nothing.
    fn hidden(&mut self, i: u32) -> Option<f64> {
        match self.code(i) {
            Code::Cast(from) => self.hidden(from),
            Code::Select(condition, shown, hidden) => {
                let Code::Const(lowest) = self.code(hidden) else { return None };
                if lowest > LOWEST {
                    return None;
                }
                self.condition(condition);
                // What is shown may have conditions, too.
                self.hidden(shown);
                Some(lowest)
            }
            // A sum of a score and what is hidden.
            Code::Binary(Binary::Add, a, b) => {
                let is_plain = |i: u32| match self.code(i) {
                    Code::Select(_, shown, _) => matches!(self.code(shown), Code::Const(_)),
                    _ => false,
                };
                let mask = [a, b].into_iter().find(|&i| is_plain(i))?;
                self.hidden(mask)
            }
            _ => None,
        }
    }

    fn constant(&self, i: u32) -> Option<f64> {
        if let Code::Const(number) = self.code(i) { Some(number) } else { None }
    }

    /// The factor of the product, if a score is nothing else but conditions. Those stand behind the factor.
    fn score(&mut self, i: u32) -> Option<f32> {
        match self.code(i) {
            Code::Select(condition, shown, hidden) if self.constant(hidden).is_some_and(|low| low <= LOWEST) => {
                self.condition(condition);
                self.score(shown)
            }
            // A sum of a score and what is hidden.
            Code::Binary(Binary::Add, a, b) => {
                let hides = |i: u32| match self.code(i) {
                    Code::Select(condition, shown, hidden) => {
                        let low = self.constant(hidden).is_some_and(|low| low <= LOWEST);
                        (low && self.constant(shown) == Some(0.0)).then_some(condition)
                    }
                    _ => None,
                };
                let (condition, score) = hides(a).map(|c| (c, b)).or_else(|| hides(b).map(|c| (c, a)))?;
                self.condition(condition);
                self.score(score)
            }
            Code::Cast(from) if self.body.code[i as usize].dtype.is_float() => self.score(from),
            _ => self.factor(i),
        }
    }

    /// The number that the product is times, in `f32`. Neither it nor any part of it may be beyond the normal numbers: the product times one
    /// part might not be.
    fn factor(&self, i: u32) -> Option<f32> {
        let normal = |number: f32| number.is_normal().then_some(number);
        let constant = |i: u32| self.constant(i).and_then(|number| normal(number as f32));
        match self.code(i) {
            Code::Input(0) => Some(1.0),
            Code::Cast(from) if self.body.code[i as usize].dtype.is_float() => self.factor(from),
            Code::Binary(Binary::Mul, a, b) => match (constant(a), constant(b)) {
                (Some(by), None) => normal(by * self.factor(b)?),
                (None, Some(by)) => normal(by * self.factor(a)?),
                _ => None,
            },
            Code::Binary(Binary::Div, a, b) => normal(self.factor(a)? / constant(b)?),
            _ => None,
        }
    }

    /// What the conditions hide outside which a score is zero, if there are any.
    fn vanishes(&mut self, i: u32) -> Option<f64> {
        match self.code(i) {
            Code::Cast(from) | Code::Unary(Unary::Neg, from) | Code::Binary(Binary::Div, from, _) => {
                self.vanishes(from)
            }
            Code::Binary(Binary::Mul, a, b) => {
                let found = [self.vanishes(a), self.vanishes(b)];
                found.into_iter().flatten().reduce(f64::max)
            }
            // The exponential of what is hidden, less a number of its row.
            Code::Unary(Unary::Exp, from) => match self.code(from) {
                Code::Binary(Binary::Sub, score, _) => self.hidden(score),
                _ => self.hidden(from),
            },
            Code::Select(condition, shown, hidden) if matches!(self.code(hidden), Code::Const(zero) if zero == 0.0) => {
                self.condition(condition);
                self.vanishes(shown).or(Some(f64::NEG_INFINITY))
            }
            _ => None,
        }
    }

    fn condition(&mut self, i: u32) {
        match self.code(i) {
            Code::Binary(Binary::And, a, b) => {
                self.condition(a);
                self.condition(b);
            }
            Code::Binary(comparison @ (Binary::Lt | Binary::Le), a, b) => {
                let strict = isize::from(comparison == Binary::Lt);
                let (Some(a), Some(b)) = (self.linear(a), self.linear(b)) else {
                    self.others = true;
                    return;
                };
                // a is below b: of the query, of the key, and a number.
                let [query, key, by] = [0, 1, 2].map(|k| b[k] - a[k]);
                let Band { from, to } = &mut self.band;
                match (query, key) {
                    (1, -1) => *to = Some(to.map_or(by - strict, |to| to.min(by - strict))),
                    (-1, 1) => *from = Some(from.map_or(strict - by, |from| from.max(strict - by))),
                    _ => self.others = true,
                }
            }
            _ => self.others = true,
        }
    }

    /// Times of the query's place, times of the key's, and a number.
    fn linear(&self, i: u32) -> Option<[isize; 3]> {
        match self.code(i) {
            Code::Index(axis) if axis == self.axes[0] => Some([1, 0, 0]),
            Code::Index(axis) if axis == self.axes[1] => Some([0, 1, 0]),
            Code::Const(number) if number.fract() == 0.0 && number.abs() < 1e9 => Some([0, 0, number as isize]),
            // A narrower type would hold other numbers.
            Code::Cast(from) if self.body.code[from as usize].dtype.is_int() => {
                let wide =
                    matches!(self.body.code[i as usize].dtype, DType::I32 | DType::I64 | DType::F32 | DType::F64);
                self.linear(from).filter(|_| wide)
            }
            Code::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
                let (a, b) = (self.linear(a)?, self.linear(b)?);
                Some([0, 1, 2].map(|k| if op == Binary::Add { a[k] + b[k] } else { a[k] - b[k] }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(score: Expr, m: usize, n: usize) -> Option<Band> {
        folded(score, Fold::Softmax, m, n)
    }

    fn folded(score: Expr, fold: Fold, m: usize, n: usize) -> Option<Band> {
        let template = Template::Attention { score: Body::new(&[score]), further: 0, guarded: None, fold };
        let reads = vec![floats(&[2, m, 4]), floats(&[2, 4, n]), floats(&[2, n, 6])];
        band(&sample(template, &[2, m, 6], reads, Expr::input(0, DType::F32)))
    }

    #[test]
    fn bands_are_found_in_the_code_of_scores() {
        let (x, query, key) = (Expr::input(0, DType::F32), Expr::index(1), Expr::index(2));
        let low = Expr::lit(f64::NEG_INFINITY, DType::F32);
        let hides = |condition: &Expr| condition.select(&x, &low);
        let causal = key.le(&query);
        assert_eq!(of(hides(&causal), 5, 5), Some(Band { from: None, to: Some(0) }));
        assert_eq!(of(hides(&causal), 3, 9), Some(Band { from: None, to: Some(0) }));
        let window = (&query - 2.0).le(&key);
        let both = Some(Band { from: Some(-2), to: Some(0) });
        assert_eq!(of(hides(&causal.and(&window)), 5, 5), both);
        assert_eq!(of(window.select(&hides(&causal), &low), 5, 5), both);
        let added = &x + &causal.select(&Expr::lit(0.0, DType::F32), &Expr::lit(-3e38, DType::F32));
        assert_eq!(of(added, 5, 5), Some(Band { from: None, to: Some(0) }));
        assert_eq!(of(&x * 2.0, 5, 5), None);
        // The powers of what is hidden are zeros, and so is their product with anything. Rows may be those of keys.
        let plain = |score: Expr, m, n| folded(score, Fold::Plain { second: false }, m, n);
        let power = (hides(&causal) - 1.5).exp();
        assert_eq!(plain(&power * &(&x + 1.0), 5, 5), Some(Band { from: None, to: Some(0) }));
        let zero = Expr::lit(0.0, DType::F32);
        assert_eq!(plain(query.le(&key).select(&x, &zero), 5, 5), Some(Band { from: Some(0), to: None }));
        assert_eq!(plain(&power + &x, 5, 5), None);
        // The last key would be seen by nobody.
        assert_eq!(plain(power, 5, 9), None);
        // The last query would see nothing.
        assert_eq!(of(hides(&query.le(&key)), 9, 5), None);
        assert_eq!(Band { from: Some(-2), to: Some(0) }.keys(4..6, 9), 2..6);
    }
}
