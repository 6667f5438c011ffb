//! Rewrites of the bodies of a row kernel: values that several passes over a row would compute are computed once.

use super::block::Repr;
use plimsoll_core::dtype::DType;
use plimsoll_core::expr::{Body, Code, Instr};
use std::collections::HashMap;

/// Takes values that depend on reductions and literals alone, and cost something, out of a body: they are the same for all elements of a
/// row. The body reads them as `Reduction`s numbered from `first` on instead. Returns the code that computes them.
pub fn hoist(body: &mut Body, first: u32) -> Body {
    let order = live(body);
    let mut fixed = vec![false; body.code.len()];
    let mut used = vec![false; body.code.len()];
    for &i in &order {
        let operands: Vec<u32> = body.code[i as usize].code.operands().collect();
        let leaf = matches!(body.code[i as usize].code, Code::Const(_) | Code::Reduction(_));
        fixed[i as usize] = leaf || (!operands.is_empty() && operands.iter().all(|&a| fixed[a as usize]));
        if !fixed[i as usize] {
            operands.iter().for_each(|&a| used[a as usize] = true);
        }
    }
    body.results.iter().for_each(|&r| used[r as usize] = true);
    let mut prelude = Body { code: body.code.clone(), results: Vec::new() };
    for &i in &order {
        let instr = &mut body.code[i as usize];
        let leaf = matches!(instr.code, Code::Const(_) | Code::Reduction(_));
        if fixed[i as usize] && used[i as usize] && !leaf {
            instr.code = Code::Reduction(first + prelude.results.len() as u32);
            prelude.results.push(i);
        }
    }
    prelude
}

/// A value of the bodies: instructions that compute the same are one.
struct Value {
    /// The price of computing it.
    price: f64,
    /// It differs within a row.
    varies: bool,
    /// The body and the instruction that compute it first.
    first: (usize, u32),
}

/// Finds the values of the bodies, and per body that of each instruction.
fn number(bodies: &[Body], price: impl Fn(Code) -> f64) -> (Vec<Value>, Vec<Vec<usize>>) {
    let mut numbers: HashMap<(String, DType), usize> = HashMap::new();
    let mut values: Vec<Value> = Vec::new();
    let mut of_body = |(p, body): (usize, &Body)| {
        let mut of = vec![usize::MAX; body.code.len()];
        for i in live(body) {
            let Instr { code, dtype } = body.code[i as usize];
            let operands: Vec<usize> = code.operands().map(|a| of[a as usize]).collect();
            let key = format!("{:?}", code.map(|a| of[a as usize] as u32));
            let new = values.len();
            let number = *numbers.entry((key, dtype)).or_insert(new);
            if number == new {
                let varies =
                    matches!(code, Code::Input(_) | Code::Index(_)) || operands.iter().any(|&o| values[o].varies);
                let price = price(code) + operands.iter().map(|&o| values[o].price).sum::<f64>();
                values.push(Value { price, varies, first: (p, i) });
            }
            of[i as usize] = number;
        }
        of
    };
    let numbers = bodies.iter().enumerate().map(&mut of_body).collect();
    (values, numbers)
}

/// Finds values that a later phase would compute again although it is cheaper to keep them. The earlier phase gets them as further results,
/// the later one reads them as inputs numbered from `first_input`. Returns the phase and type of each, at most `room` bytes per element in
/// total.
pub fn keep_values(
    bodies: &mut [Body],
    first_input: u32,
    price: impl Fn(Code) -> f64,
    room: usize,
) -> Vec<(usize, DType)> {
    const WORTH: f64 = 2.0;
    let (values, numbers) = number(bodies, price);
    let mut shared: Vec<(usize, DType)> = Vec::new();
    let mut inputs: HashMap<usize, u32> = HashMap::new();
    let mut used = 0;
    for p in 1..bodies.len() {
        let mut stack: Vec<u32> = bodies[p].results.clone();
        let mut seen = vec![false; bodies[p].code.len()];
        while let Some(i) = stack.pop() {
            if std::mem::replace(&mut seen[i as usize], true) {
                continue;
            }
            let number = numbers[p][i as usize];
            let Value { price, varies, first: (first, at) } = values[number];
            let dtype = bodies[p].code[i as usize].dtype;
            let size = Repr::computed(dtype).map_or(8, Repr::size);
            let fits = inputs.contains_key(&number) || used + size <= room;
            if first < p && varies && price >= WORTH && fits {
                let input = *inputs.entry(number).or_insert_with(|| {
                    shared.push((first, dtype));
                    bodies[first].results.push(at);
                    used += size;
                    first_input + shared.len() as u32 - 1
                });
                bodies[p].code[i as usize].code = Code::Input(input);
                continue;
            }
            stack.extend(bodies[p].code[i as usize].code.operands());
        }
    }
    shared
}

/// The instructions that results depend on, in order. Malformed operands are left for [`Program::new`] to refuse.
fn live(body: &Body) -> Vec<u32> {
    let live = body.live();
    (0..body.code.len() as u32).filter(|&i| live[i as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::expr::Expr;

    /// The bodies of a softmax: the largest, the sum of exponentials, their quotient.
    fn softmax() -> Vec<Body> {
        let x = Expr::input(0, DType::F32);
        let reduction = |k| Expr::reduction(k, DType::F32);
        let e = (&x - &reduction(0)).exp();
        [x.clone(), e.clone(), e / reduction(1)].iter().map(|e| Body::new(std::slice::from_ref(e))).collect()
    }

    fn price(code: Code) -> f64 {
        if matches!(code, Code::Unary(..)) { 6.0 } else { 0.1 }
    }

    #[test]
    fn exponentials_are_kept_when_there_is_room() {
        let mut bodies = softmax();
        assert_eq!(keep_values(&mut bodies, 1, price, 4), [(1, DType::F32)]);
        assert_eq!(bodies[1].results.len(), 2);
        assert_eq!(bodies[2].eval(&[3.0, 8.0], &[], &[0.0, 2.0]), [4.0], "input 1 is what phase 1 kept");
        let mut bodies = softmax();
        assert_eq!(keep_values(&mut bodies, 1, price, 3), []);
        assert_eq!(bodies, softmax());
    }

    #[test]
    fn what_folds_alone_decide_leaves_the_loop() {
        let x = Expr::input(0, DType::F32);
        let mean = Expr::reduction(0, DType::F32) * 0.25;
        let mut body = Body::new(&[(x - &mean) * (mean.exp() + 1.0)]);
        let prelude = hoist(&mut body, 1);
        // Dead code stays, so there is an input; it has no influence.
        let values = prelude.eval(&[f64::NAN], &[], &[8.0]);
        assert_eq!(values.len(), 2, "the mean, and the factor");
        let reductions = [&[8.0], &values[..]].concat();
        assert_eq!(body.eval(&[5.0], &[], &reductions), [3.0 * (2f64.exp() + 1.0)]);
        assert_eq!(live(&body).iter().filter(|&&i| matches!(body.code[i as usize].code, Code::Unary(..))).count(), 0);
    }
}
