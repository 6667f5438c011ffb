//! Kernels for testing a backend by itself, and what their operands hold. They are held against the
//! [reference](plimsoll::internals::kernel::meaning), which shares nothing with any backend but the definition of [`Kernel`].

pub mod variants;
pub mod windows;

use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::meaning::{evaluate, stores};
use plimsoll::internals::kernel::schedule::prologue;
use plimsoll::internals::kernel::templates::TEMPLATES;
use plimsoll::internals::kernel::{
    Fold, Guard, Kernel, Nearest, Operand, Packing, PadMode, Pool, Prologue, Reduction, ResizeMode, RowReduction,
    Template, Window, ZeroPoints,
};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::Target;
use plimsoll::internals::tensor::Tensor;

/// A kernel and what its operands hold.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub kernel: Kernel,
    /// The whole buffer of every operand read.
    pub inputs: Vec<Vec<f64>>,
    /// A write and the read whose bytes it goes to.
    pub in_place: Option<(usize, usize)>,
}

impl Case {
    /// True if the target's form of the kernel takes its prologues.
    pub fn is_supported(&self, target: &Target) -> bool {
        self.kernel.prologues.iter().all(|p| prologue::is_possible(&self.kernel, p.operand, target))
    }

    /// Holds what a write left in its buffer against the interpreter. The kernel is the case's, with operands in types that were stored:
    /// sums of `f32` are held to 1e-5 of the largest value, those with halves anywhere to 1e-2.
    pub fn judge(&self, kernel: &Kernel, write: usize, found: Vec<u8>) -> Result<(), String> {
        let operand = &kernel.writes[write];
        let len = found.len() / operand.dtype.size();
        let found = Tensor::new(operand.dtype, [len], found).expect("whole elements").to_f64();
        let stores = stores(&self.kernel, &self.inputs).swap_remove(write);
        let (places, exact): (Vec<isize>, Vec<f64>) = stores.into_iter().unzip();
        let half = kernel.reads.iter().chain(&kernel.writes).any(|o| matches!(o.dtype, DType::F16 | DType::BF16));
        // A value beyond the range of f16 becomes infinite.
        let expected = if half { Tensor::from_f64(operand.dtype, [exact.len()], &exact).to_f64() } else { exact };
        let peak = expected.iter().filter(|v| v.is_finite()).fold(1e-30f64, |p, v| p.max(v.abs()));
        let room = match operand.dtype.is_float() {
            true if half => 1e-2 * peak,
            true => 1e-5 * peak,
            false => 0.0,
        };
        let mut touched = vec![false; len];
        for (address, want) in places.into_iter().zip(expected) {
            let address = address as usize;
            assert!(!std::mem::replace(&mut touched[address], true), "element {address} is written twice");
            let got = found[address];
            let none = got.is_nan() && want.is_nan();
            if got != want && !none && ((got - want).is_nan() || (got - want).abs() > room) {
                return Err(format!("write {write}, element {address}: expected {want}, found {got} (peak {peak})"));
            }
        }
        let before = |address: usize| match self.in_place {
            Some((w, _)) if w == write && kernel.is_in_place() => self.inputs[0][address],
            Some((w, _)) if w == write => found[address],
            _ => UNTOUCHED,
        };
        let stray = (0..len).find(|&address| !touched[address] && found[address] != before(address));
        stray.map_or(Ok(()), |address| Err(format!("write {write} touched element {address}, which is not its own")))
    }
}

/// The content of a buffer before a kernel writes to it.
const UNTOUCHED: f64 = 77.0;

/// The bytes of an operand's buffer before a kernel writes to it.
pub fn untouched(operand: &Operand) -> Vec<u8> {
    encode(operand, &vec![UNTOUCHED; elements(&operand.access)])
}

/// The bytes of an operand's buffer.
pub fn encode(operand: &Operand, values: &[f64]) -> Vec<u8> {
    Tensor::from_f64(operand.dtype, [values.len()], values).bytes().to_vec()
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut out = vec![vec![]];
    for &d in shape {
        out = out.into_iter().flat_map(|i| (0..d).map(move |k| [&i[..], &[k]].concat())).collect();
    }
    out
}

/// A convolution of patches that fills a large device with tiles, and one whose data and weights lie four at a time.
pub fn many_patches() -> Vec<Case> {
    let mut c = Cases { random: Random(5), cases: Vec::new() };
    let (groups, s, window) = (66, [1, 66 * 65, 1, 1, 257], window([1, 1, 16], [1, 1, 16], [1; 3], [0; 3]));
    let reads = [&[1, groups, 1, 1, 257 * 16][..], &[s[1], 1, 1, 1, 16], &s].map(|shape| f32s(dense(shape)));
    c.add(
        "conv patches of many groups",
        Template::Conv { groups, window, padding: 0 },
        &s,
        reads.into(),
        &[x(0) + x(1)],
    );
    let s = [2, 72, 1, 6, 22];
    let template = Template::Conv { groups: 2, window: window_of_one(), padding: 0 };
    let reads = [&[2, 40, 1, 6, 22][..], &[72, 20, 1, 1, 1]].map(|shape| f32s(dense(shape)));
    c.add("conv by fours", template, &s, reads.into(), &[x(0)]);
    c.cases
}

fn window_of_one() -> Window {
    window([1; 3], [1; 3], [1; 3], [0; 3])
}

/// Kernels whose operands hold what is not a number, which their results must be then.
pub fn unordered() -> Vec<Case> {
    let mut c = Cases { random: Random(3), cases: Vec::new() };
    let body =
        [x(0).max(&x(1)), x(1).min(&x(0)), x(0).max(&x(0).like(0.0)), x(0).max(&x(0).like(-1.0)).min(&x(0).like(1.0))];
    c.add("map unordered", Template::Map, &[7, 9], vec![f32s(dense(&[7, 9])), f32s(dense(&[7, 9]))], &body);
    for (name, reduction) in [("largest", Reduction::Max), ("smallest", Reduction::Min)] {
        let reductions = vec![RowReduction { reduction, body: Body::new(&[x(0)]) }];
        let template = Template::Row { inner: 1, reductions, per_row: true };
        c.add(
            &format!("row unordered, {name}"),
            template,
            &[6, 300],
            vec![f32s(dense(&[6, 300]))],
            &[Expr::reduction(0, DType::F32)],
        );
    }
    let win = window([1, 3, 3], [1, 2, 2], [1; 3], [0, 1, 1]);
    let template = Template::Pool { window: win, pool: Pool::Max };
    c.add("pool unordered", template, &[1, 2, 1, 4, 4], vec![f32s(dense(&[1, 2, 1, 8, 8]))], &[x(0)]);
    for values in c.cases.iter_mut().flat_map(|case| &mut case.inputs) {
        values.iter_mut().skip(5).step_by(41).for_each(|v| *v = f64::NAN);
    }
    c.cases
}

/// Kernels whose operands hold infinities, and nothing else here and there.
pub fn infinite() -> Vec<Case> {
    let mut c = Cases { random: Random(5), cases: Vec::new() };
    for (name, reduction, end) in
        [("largest", Reduction::Max, f64::NEG_INFINITY), ("smallest", Reduction::Min, f64::INFINITY)]
    {
        for n in [5, 300] {
            let reductions = vec![RowReduction { reduction, body: Body::new(&[x(0)]) }];
            let template = Template::Row { inner: 1, reductions, per_row: true };
            let reads = vec![f32s(dense(&[6, n]))];
            let case = c.add(
                &format!("row infinite, {name} of {n}"),
                template,
                &[6, n],
                reads,
                &[Expr::reduction(0, DType::F32)],
            );
            case.inputs[0][..2 * n].fill(end);
            case.inputs[0][2 * n..3 * n].fill(-end);
        }
    }
    let win = window([1, 3, 3], [1, 2, 2], [1; 3], [0, 1, 1]);
    let template = Template::Pool { window: win, pool: Pool::Max };
    let case = c.add("pool infinite", template, &[1, 2, 1, 4, 4], vec![f32s(dense(&[1, 2, 1, 8, 8]))], &[x(0)]);
    case.inputs[0][..40].fill(f64::NEG_INFINITY);
    // Memory in place of absent keys must not be read, not even with a weight of zero.
    for rows in [1, 2, 40] {
        let template =
            Template::Attention { score: Body::new(&[x(0) * 0.1]), further: 0, guarded: None, fold: Fold::Softmax };
        let reads = [[rows, 32], [32, 37], [37, 12]].map(|[a, b]| f32s(dense(&[2, a, b]))).to_vec();
        let case = c.add(&format!("attention infinite, {rows} rows"), template, &[2, rows, 12], reads, &[x(0)]);
        case.inputs[2][36 * 12] = f64::INFINITY;
    }
    c.cases
}

/// A small deterministic generator (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }

    /// Values of a type that every device holds exactly.
    fn values(&mut self, dtype: DType, n: usize) -> Vec<f64> {
        let value = |u: f64| match dtype {
            DType::Bool => (u * 2.0).floor(),
            d if d.is_int() => (u * 19.0).floor() - 9.0,
            _ => f64::from((u * 4.0 - 2.0) as f32),
        };
        (0..n).map(|_| value(self.next())).collect()
    }
}

/// Elements that a buffer needs for an access.
pub fn elements(access: &Access) -> usize {
    access.span().map_or(0, |(low, high)| {
        assert!(low >= 0, "{access:?} starts before its buffer");
        high as usize + 1
    })
}

fn dense(shape: &[usize]) -> Access {
    Access::contiguous(Shape::new(shape))
}

fn spread(from: &[usize], to: &[usize]) -> Access {
    dense(from).broadcast(&Shape::new(to))
}

fn f32s(access: Access) -> Operand {
    typed(DType::F32, access)
}

fn typed(dtype: DType, access: Access) -> Operand {
    Operand { dtype, access, packed: false }
}

fn x(number: usize) -> Expr {
    Expr::input(number, DType::F32)
}

struct Cases {
    random: Random,
    cases: Vec<Case>,
}

impl Cases {
    /// Adds a kernel whose writes are dense, one per result of its body.
    fn add(
        &mut self,
        name: &str,
        template: Template,
        shape: &[usize],
        reads: Vec<Operand>,
        body: &[Expr],
    ) -> &mut Case {
        let rows = template.rows();
        let written = if rows.written_once { &shape[..shape.len() - rows.axes] } else { shape };
        let writes = body.iter().map(|e| typed(e.dtype(), dense(written))).collect();
        self.add_writing(name, template, shape, reads, writes, body)
    }

    /// Adds a kernel with prologues: the operand, the prologue's own operands, its code.
    fn add_behind(
        &mut self,
        name: &str,
        template: Template,
        shape: &[usize],
        mut reads: Vec<Operand>,
        prologues: Vec<(usize, Vec<Operand>, Expr)>,
        body: &[Expr],
    ) -> &mut Case {
        let mut list = Vec::new();
        for (operand, mut own, body) in prologues {
            list.push(Prologue { operand, reads: own.len(), body: Body::new(&[body]) });
            reads.append(&mut own);
        }
        let case = self.add(name, template, shape, reads, body);
        case.kernel.prologues = list;
        case
    }

    fn add_writing(
        &mut self,
        name: &str,
        template: Template,
        shape: &[usize],
        reads: Vec<Operand>,
        writes: Vec<Operand>,
        body: &[Expr],
    ) -> &mut Case {
        let inputs = reads.iter().map(|r| self.random.values(r.dtype, elements(&r.access))).collect();
        let kernel = Kernel {
            template,
            shape: Shape::new(shape),
            reads,
            writes,
            body: Body::new(body),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        self.cases.push(Case { name: name.into(), kernel, inputs, in_place: None });
        self.cases.last_mut().expect("just pushed")
    }
}

/// Kernels that visit every template, its parameters' corners, and every instruction.
pub fn cases() -> Vec<Case> {
    let mut c = Cases { random: Random(1), cases: Vec::new() };
    map(&mut c);
    instructions(&mut c);
    row(&mut c);
    matmul(&mut c);
    matmul_behind(&mut c);
    attention(&mut c);
    conv(&mut c);
    conv_behind(&mut c);
    pool(&mut c);
    pool_gradients(&mut c);
    gather(&mut c);
    scatter(&mut c);
    pad(&mut c);
    resize(&mut c);
    few_bits(&mut c);
    samples(&mut c);
    shifts(&mut c);
    c.cases.extend(windows::drawn(7, 6));
    c.cases.extend(of_bytes());
    c.cases
}

/// The samples of the template table.
fn samples(c: &mut Cases) {
    for row in TEMPLATES {
        for (i, kernel) in (row.samples)().into_iter().enumerate() {
            let sizes = (0..kernel.reads.len()).map(|slot| elements(&kernel.reach(slot)));
            let inputs = kernel.reads.iter().zip(sizes).map(|(r, size)| c.random.values(r.dtype, size)).collect();
            let in_place = kernel.is_in_place().then_some((0, 0));
            c.cases.push(Case { name: format!("sample {i} of {}", row.name), kernel, inputs, in_place });
        }
    }
}

/// Products by numbers of few bits that are large enough for every tile, of which neither rows nor columns nor the inner axis are whole tiles.
fn few_bits(c: &mut Cases) {
    let of = [
        (4, false, 32, ZeroPoints::Number(8.0), 1),
        (4, true, 32, ZeroPoints::Packed, 5),
        (4, false, 64, ZeroPoints::Floats, 12),
        (8, true, 16, ZeroPoints::Number(0.0), 9),
        (8, false, 32, ZeroPoints::Packed, 70),
        (4, true, 32, ZeroPoints::Number(-1.0), 33),
        (2, true, 16, ZeroPoints::Number(0.0), 20),
        (2, false, 64, ZeroPoints::Packed, 40),
        (3, false, 16, ZeroPoints::Packed, 33),
        (5, true, 32, ZeroPoints::Number(0.0), 1),
        (7, false, 16, ZeroPoints::Floats, 70),
        (4, false, 4, ZeroPoints::Packed, 12),
        (4, false, 32, ZeroPoints::Codes, 40),
    ];
    for (bits, signed, block, zeros, m) in of {
        let (k, n) = (200, 21);
        let packing = Packing::new(bits, signed, block, k).expect("blocks of whole words");
        let words = |count| typed(DType::I32, dense(&[count]));
        let mut reads = vec![f32s(dense(&[m, k])), words(n * packing.words_per_row), f32s(dense(&[n, packing.blocks]))];
        match zeros {
            ZeroPoints::Number(_) => {}
            ZeroPoints::Packed => reads.push(words((n * packing.zero_bytes).div_ceil(4))),
            ZeroPoints::Floats => reads.push(f32s(dense(&[n, packing.blocks]))),
            ZeroPoints::Codes => reads.push(f32s(dense(&[1 << bits]))),
        }
        let template = Template::MatMulBits { bits, signed, block, zeros };
        let case = c.add(&format!("few bits {bits} {m}"), template, &[m, n], reads, &[x(0) * 0.5]);
        // All bits of words.
        for (values, read) in
            case.inputs.iter_mut().zip(&case.kernel.reads).filter(|(_, read)| read.dtype == DType::I32)
        {
            let word = |i: usize| f64::from((i as u32 + 1).wrapping_mul(2_654_435_761) as i32);
            *values = (0..elements(&read.access)).map(word).collect();
        }
    }
}

/// Bits of both signs, moved to both sides.
fn shifts(c: &mut Cases) {
    let bits = Expr::index(0).cast(DType::I32) * 65_599.0;
    let by = |count: f64| bits.like(count);
    let turned = bits.shl(&by(13.0)).or(&bits.shr(&by(19.0))).xor(&(-&bits).shr(&by(3.0)));
    c.add("map shifts", Template::Map, &[2100], vec![f32s(dense(&[2100]))], &[turned + x(0).cast(DType::I32)]);
}

fn map(c: &mut Cases) {
    use DType::{F32, I64};
    let s = [2, 3, 4];
    c.add("map scalar", Template::Map, &[], vec![f32s(dense(&[]))], &[x(0) + 1.0]);
    let reads = || vec![f32s(dense(&s)), f32s(spread(&[4], &s)), f32s(spread(&[2, 1, 1], &s)), f32s(spread(&[], &s))];
    c.add("map broadcast", Template::Map, &s, reads(), &[x(0) * x(1) + x(2) * x(3)]);
    c.add("map large", Template::Map, &[70_001], vec![f32s(dense(&[70_001]))], &[x(0) * x(0)]);
    let transposed = dense(&[4, 3, 2]).permute(&[2, 1, 0]);
    let reversed = dense(&s).slice(2, 3, -1, 4).slice(0, 1, -1, 2);
    let mut shifted = dense(&s);
    shifted.offset = 5;
    let reads = vec![f32s(transposed), f32s(reversed), f32s(shifted)];
    c.add("map views", Template::Map, &s, reads, &[x(0) + x(1) * 2.0 + x(2) * 4.0]);
    let mut wide = dense(&[2, 7, 4]);
    wide.shape[1] = 3;
    wide.offset = 8;
    let writes = vec![f32s(wide), f32s(dense(&[4, 3, 2]).permute(&[2, 1, 0]))];
    c.add_writing("map writes", Template::Map, &s, vec![f32s(dense(&s))], writes, &[x(0) * 3.0, -x(0)]);
    let add = c.add("map in place", Template::Map, &[5, 7], vec![f32s(dense(&[5, 7])); 2], &[x(0) + x(1)]);
    add.in_place = Some((0, 1));
    let cast =
        c.add("map cast in place", Template::Map, &[40], vec![f32s(dense(&[40]))], &[(x(0) * 9.0).cast(DType::I32)]);
    cast.in_place = Some((0, 0));
    c.add("map same", Template::Map, &[33], vec![f32s(dense(&[33])); 2], &[x(0) - x(1) * 0.5]);
    let index = Expr::index(0).cast(F32) * 100.0 + Expr::index(2).cast(F32);
    c.add("map index", Template::Map, &[3, 4, 5], vec![], &[index, Expr::index(1)]);
    let triangle =
        Expr::index(0).lt(&Expr::index(1)).select(&x(0), &x(0).like(f64::NEG_INFINITY).max(&x(0).like(-7.0)));
    c.add("map trilu", Template::Map, &[6, 6], vec![f32s(dense(&[6, 6]))], &[triangle]);
    c.add("map empty", Template::Map, &[3, 0], vec![f32s(dense(&[3, 0]))], &[x(0) + 1.0]);
    let i = Expr::input(0, I64);
    c.add("map ints", Template::Map, &[3, 5], vec![typed(I64, spread(&[5], &[3, 5]))], &[&i * &i - i.like(3.0)]);
    let rank7 = [2, 1, 3, 2, 2, 3, 2];
    let odd = dense(&[3, 2, 2, 2, 3, 2, 1]).permute(&[1, 6, 0, 3, 2, 4, 5]);
    c.add("map rank 7", Template::Map, &rank7, vec![f32s(dense(&rank7)), f32s(odd)], &[x(0) + x(1)]);
    // Every link of the chain has a share of the result that is far above the room of a case, and no link rounds: the sums are multiples of
    // 2^-6 below 2^6. With links that round, the error grows with their number, and the result may cancel: no share of it would be a bound.
    let mut long = x(0);
    for k in 0..1500 {
        long = &long * -1.0 + &x(1) * f64::from(k * k / 11 % 7 + 1);
    }
    let case = c.add("map long body", Template::Map, &[9], vec![f32s(dense(&[9])); 2], &[long]);
    case.inputs.iter_mut().flatten().for_each(|value| *value = (*value * 64.0).round() / 64.0);
}

fn instructions(c: &mut Cases) {
    use DType::{Bool, F32, I32};
    let n = 97;
    let one = || vec![f32s(dense(&[n]))];
    let two = || vec![f32s(dense(&[n])), f32s(dense(&[n]))];
    let (a, b) = (x(0), x(1));
    let wide = &a * 3.0;
    c.add("unary 1", Template::Map, &[n], one(), &[-&a, a.abs(), a.sign(), a.exp(), a.abs().log()]);
    c.add(
        "unary 2",
        Template::Map,
        &[n],
        one(),
        &[a.abs().sqrt(), (a.abs() + 0.1).recip(), (&a * 9.0).sin(), (&a * 9.0).cos()],
    );
    c.add("unary 3", Template::Map, &[n], one(), &[(&a * 20.0).tanh(), a.tanh(), a.erf(), wide.erf()]);
    let halves = (&a * 4.0).round() * 0.5;
    c.add("unary 4", Template::Map, &[n], one(), &[wide.floor(), wide.ceil(), wide.round(), halves.round()]);
    let divided = &a / (b.abs() + 0.5);
    c.add("binary 1", Template::Map, &[n], two(), &[&a + &b, &a - &b, &a * &b, divided, a.max(&b), a.min(&b)]);
    let powers = [a.abs().pow(&b), wide.pow(&a.like(3.0)), wide.pow(&a.like(2.0)), b.sign().pow(&a.like(0.0))];
    c.add("binary pow", Template::Map, &[n], two(), &powers);
    c.add(
        "binary rem",
        Template::Map,
        &[n],
        two(),
        &[(&wide * 5.0).rem(&(b.abs() + 0.5)), wide.rem(&(-(b.abs() + 0.5)))],
    );
    let (p, q) = (a.lt(&b), a.abs().le(&b.abs()));
    let logic = [p.and(&q), p.or(&q), p.xor(&q), p.not(), p.eq(&q), p.select(&a, &b)];
    c.add("logic", Template::Map, &[n], two(), &logic);
    let (i, j, k) = (Expr::input(0, I32), Expr::input(1, I32), Expr::input(2, Bool));
    let reads = || vec![typed(I32, dense(&[n])), typed(I32, dense(&[n])), typed(Bool, dense(&[n]))];
    let results = [&i / &j, i.rem(&j), i.pow(&j.abs().min(&j.like(4.0))), i.max(&j), -&i, i.abs().min(&j)];
    c.add("ints 1", Template::Map, &[n], reads(), &results);
    let results = [i.sign(), i.eq(&j), i.lt(&j).and(&k), k.select(&i, &j), k.not()];
    c.add("ints 2", Template::Map, &[n], reads(), &results);
    let results = [i.cast(F32) * 0.5, k.cast(F32), i.cast(Bool), k.cast(I32), (i.cast(F32) * 0.7).cast(I32)];
    c.add("casts", Template::Map, &[n], reads(), &results);
    small_ints(c);
    let angles = [1e3, 2e4, 131_071.0, 8e5, 1e6, 5e7, 1e9, 4e15, 7e22, 3e38].map(|v: f64| f64::from(v as f32));
    let case = c.add("far angles", Template::Map, &[20], vec![f32s(dense(&[20]))], &[a.sin(), a.cos()]);
    case.inputs[0] = angles.iter().flat_map(|v| [*v, -v]).collect();
    // Near and far in each other's exponents; each a case of its own, as remainders are judged by the largest.
    for divisor in [1e-30, 1e-3, 0.375, 7.0, 16_777_213.0, 1.1e38].map(|v: f64| f64::from(v as f32)) {
        let reads = vec![f32s(dense(&[20])), f32s(spread(&[1], &[20]))];
        let case = c.add(&format!("far remainders of {divisor}"), Template::Map, &[20], reads, &[a.rem(&b)]);
        case.inputs = vec![angles.iter().flat_map(|v| [*v, -v]).collect(), vec![divisor]];
    }
    let lit = |v: f64| Expr::lit(v, F32);
    let big = lit(3e38) + lit(2e38) * 0.5;
    let results =
        [(lit(0.1) + lit(0.2)) * &a, big.min(&lit(1.0)), lit(-0.5), lit(f64::INFINITY).min(&lit(2.5)), lit(1e-6) * 1e6];
    c.add("literals", Template::Map, &[n], one(), &results);
}

/// Integers of one byte wrap around, whether or not they are stored before they are used.
fn small_ints(c: &mut Cases) {
    use DType::{F32, I8, I32, U8};
    let n = 97;
    let bytes = |from: f64, step: usize| (0..n).map(|i| from + (i * step % 256) as f64).collect::<Vec<_>>();
    for (dtype, least) in [(U8, 0.0), (I8, -128.0)] {
        let [i, j] = [0, 1].map(|k| Expr::input(k, dtype));
        let sum = &i + &j;
        let power = i.pow(&j.like(3.0));
        let results = [
            sum.clone(),
            sum.cast(F32),
            (&i - &j) / &i.like(3.0),
            sum.lt(&i),
            (&i * &j).cast(I32),
            (-&i).max(&j),
            i.abs().cast(F32),
            power.cast(I32),
        ];
        let reads = vec![typed(dtype, dense(&[n])); 2];
        let case = c.add(&format!("{dtype} arithmetic"), Template::Map, &[n], reads, &results);
        case.inputs = vec![bytes(least, 37), bytes(least, 101)];
        let other = if dtype == U8 { I8 } else { U8 };
        let reads = vec![typed(I32, dense(&[n])), f32s(dense(&[n])), typed(dtype, dense(&[n]))];
        let casts = [
            Expr::input(0, I32).cast(dtype).cast(F32),
            x(1).cast(dtype).cast(F32),
            Expr::input(2, dtype).cast(other).cast(I32),
        ];
        let case = c.add(&format!("casts to {dtype}"), Template::Map, &[n], reads, &casts);
        case.inputs = vec![bytes(-300.0, 91), bytes(-150.0, 53).iter().map(|v| v * 2.5).collect(), bytes(least, 37)];
        let reductions =
            vec![RowReduction { reduction: Reduction::Sum, body: Body::new(&[(&i + &i.like(1.0)).cast(I32)]) }];
        let template = Template::Row { inner: 1, reductions, per_row: true };
        let total = Expr::reduction(0, I32).cast(dtype);
        let case = c.add(
            &format!("{dtype} sums"),
            template,
            &[3, 40],
            vec![typed(dtype, dense(&[3, 40]))],
            &[total.cast(F32), total],
        );
        case.inputs = vec![bytes(least, 37).into_iter().chain(bytes(least, 59)).take(120).collect()];
    }
}

fn row(c: &mut Cases) {
    use DType::{F32, I32};
    let template = |inner, reductions: &[(Reduction, Expr)], per_row| Template::Row {
        inner,
        reductions: reductions
            .iter()
            .map(|(reduction, e)| RowReduction { reduction: *reduction, body: Body::new(std::slice::from_ref(e)) })
            .collect(),
        per_row,
    };
    let f = |k| Expr::reduction(k, F32);
    for (rows, n) in [(7, 1000), (300, 5), (3, 1), (1, 4099), (2, 70)] {
        let name = format!("softmax {rows}x{n}");
        let reductions = [(Reduction::Max, x(0)), (Reduction::Sum, (x(0) - f(0)).exp())];
        let body = (x(0) - f(0)).exp() / f(1);
        let case = c.add(&name, template(1, &reductions, false), &[rows, n], vec![f32s(dense(&[rows, n]))], &[body]);
        case.in_place = (n > 5).then_some((0, 0));
    }
    let s = [2, 5, 24];
    let mean = f(0) * (1.0 / 24.0);
    let reductions = [(Reduction::Sum, x(0)), (Reduction::Sum, (x(0) - &mean) * (x(0) - &mean))];
    let body = (x(0) - &mean) / (f(1) * (1.0 / 24.0) + 1e-5).sqrt() * x(1) + x(2);
    let reads = vec![f32s(dense(&s)), f32s(spread(&[24], &s)), f32s(spread(&[24], &s))];
    c.add("layer norm", template(1, &reductions, false), &s, reads, std::slice::from_ref(&body));
    let reads = vec![f32s(dense(&[2, 24, 5]).permute(&[0, 2, 1])), f32s(spread(&[24], &s)), f32s(spread(&[24], &s))];
    c.add("layer norm, strided", template(1, &reductions, false), &s, reads, &[body]);
    let s = [3, 4, 6, 7];
    c.add(
        "sum of 2 axes",
        template(2, &[(Reduction::Sum, x(0) * x(0))], true),
        &s,
        vec![f32s(dense(&s))],
        &[f(0).sqrt()],
    );
    let column = |rows: usize, n: usize| dense(&[n, rows]).permute(&[1, 0]);
    for (rows, n) in [(2000, 30), (40, 500)] {
        let name = format!("column maximum {rows}x{n}");
        c.add(&name, template(1, &[(Reduction::Max, x(0))], true), &[rows, n], vec![f32s(column(rows, n))], &[f(0)]);
    }
    // The gradient of a scale behind a normalization: what is added up has a mean per token, which all columns share.
    for (rows, n) in [(48, 300), (6, 1100)] {
        let reads = vec![f32s(column(rows, n)), f32s(column(rows, n)), f32s(spread(&[n], &[rows, n]))];
        let reductions = [(Reduction::Sum, x(0) * (x(1) - x(2))), (Reduction::Sum, x(0))];
        c.add(&format!("column sums {rows}x{n}"), template(1, &reductions, true), &[rows, n], reads, &[f(0) - f(1)]);
    }
    let reductions = [(Reduction::Min, x(0)), (Reduction::Prod, x(0) * 0.9)];
    c.add("minimum and product", template(1, &reductions, true), &[4, 37], vec![f32s(dense(&[4, 37]))], &[f(0), f(1)]);
    let i = Expr::input(0, I32);
    let reductions = [(Reduction::Max, i.clone()), (Reduction::Sum, i), (Reduction::Min, Expr::index(1).cast(I32))];
    let results = [Expr::reduction(0, I32), Expr::reduction(1, I32).cast(F32) * 0.5, Expr::reduction(2, I32)];
    c.add("integer reductions", template(1, &reductions, true), &[6, 50], vec![typed(I32, dense(&[6, 50]))], &results);
    // Rows of several axes, whichever of them has no elements, along memory and across it.
    for (s, turned) in [([5, 2, 0], false), ([5, 0, 2], false), ([40, 0, 3], true), ([40, 3, 0], true)] {
        let access = if turned { dense(&[s[1], s[2], s[0]]).permute(&[2, 0, 1]) } else { dense(&s) };
        let reads = || vec![f32s(access.clone())];
        let reductions = [(Reduction::Sum, x(0)), (Reduction::Prod, x(0) + f(0))];
        c.add(&format!("reductions of nothing {s:?}"), template(2, &reductions, true), &s, reads(), &[f(0) + f(1)]);
        c.add(&format!("rows of nothing {s:?}"), template(2, &reductions, false), &s, reads(), &[x(0) / f(0)]);
    }
    c.add(
        "sum of nothing",
        template(1, &[(Reduction::Sum, x(0))], true),
        &[5, 0],
        vec![f32s(dense(&[5, 0]))],
        &[f(0) + 1.0],
    );
    let long = template(1, &[(Reduction::Sum, x(0) + 1.0)], true);
    c.add("long sum", long, &[1, 100_000], vec![f32s(dense(&[1, 100_000]))], &[f(0)]);
    let all = template(3, &[(Reduction::Sum, x(0))], true);
    c.add("sum of all", all, &[3, 4, 5], vec![f32s(dense(&[3, 4, 5]))], &[f(0)]);
    let two = [(x(0) / f(0)), f(0)];
    c.add(
        "two results per element",
        template(1, &[(Reduction::Sum, x(0).abs())], false),
        &[9, 11],
        vec![f32s(dense(&[9, 11]))],
        &two,
    );
    let widened = vec![f32s(dense(&[9, 11])), f32s(spread(&[9, 1], &[9, 11]))];
    let body = f(0) * x(1) + Expr::index(0).cast(F32);
    c.add(
        "reduction, operand and index per row",
        template(1, &[(Reduction::Sum, x(0) * x(1))], true),
        &[9, 11],
        widened,
        &[body],
    );
    stretches(c);
}

/// Rows that lie in stretches side by side: the images of a channel. Some lie apart or start anywhere.
fn stretches(c: &mut Cases) {
    let f = |k| Expr::reduction(k, DType::F32);
    let sum = |body: Expr| RowReduction { reduction: Reduction::Sum, body: Body::new(&[body]) };
    for (name, [images, channels, image], gap, offset) in [
        ("even", [3, 5, 48], 0, 0),
        ("of fours", [3, 5, 36], 0, 0),
        ("of twos", [4, 3, 70], 0, 0),
        ("odd", [2, 6, 49], 0, 0),
        ("apart", [3, 2, 64], 4, 0),
        ("apart by an odd number", [3, 2, 64], 1, 0),
        ("not aligned", [2, 3, 40], 0, 2),
        ("short", [40, 2, 7], 0, 0),
        ("long", [3, 2, 3100], 0, 0),
    ] {
        let s = [channels, images, image];
        let lies = |gap: usize, offset: isize| {
            let all = dense(&[images, channels, image + gap]);
            Access { shape: Shape::new(s), strides: all.permute(&[1, 0, 2]).strides, offset }
        };
        let per_channel = || f32s(spread(&[channels, 1, 1], &s));
        let reductions = vec![sum(x(1)), sum(x(1) * (x(2) - x(0)))];
        let template = Template::Row { inner: 2, reductions, per_row: true };
        let reads = vec![per_channel(), f32s(lies(gap, offset)), f32s(lies(0, 0))];
        c.add(&format!("stretches {name}, sums"), template, &s, reads, &[f(1) * x(0) + f(0)]);
        let mean = f(0) * (1.0 / (images * image) as f64);
        let reductions = vec![sum(x(0)), sum((x(0) - &mean) * (x(0) - &mean))];
        let template = Template::Row { inner: 2, reductions, per_row: false };
        let body = (x(0) - mean) / (f(1) + 1e-5).sqrt() * x(1) + x(2);
        let reads = vec![f32s(lies(0, 0)), per_channel(), f32s(lies(gap, offset))];
        let writes = vec![f32s(lies(0, 0))];
        let case = c.add_writing(&format!("stretches {name}"), template, &s, reads, writes, &[body]);
        case.in_place = (offset == 0).then_some((0, 0));
    }
}

fn matmul(c: &mut Cases) {
    let mm = Template::MatMul;
    for (m, k, n) in
        [(3, 4, 5), (65, 67, 33), (130, 40, 129), (1, 300, 70), (4, 33, 200), (70, 65, 1), (5, 0, 6), (1, 1, 1)]
            .into_iter()
            .chain([(70, 200, 33), (5, 131, 4097)])
    {
        let reads = || vec![f32s(dense(&[m, k])), f32s(dense(&[k, n]))];
        c.add(&format!("matmul {m}x{k}x{n}"), mm.clone(), &[m, n], reads(), &[x(0)]);
    }
    let reads = vec![f32s(dense(&[24, 130, 19])), f32s(dense(&[131, 24, 19]).permute(&[1, 2, 0]))];
    c.add("matmul of many tiles", mm.clone(), &[24, 130, 131], reads, &[x(0)]);
    for (m, k, n) in [(66, 35, 40), (1, 300, 70), (50, 70, 2), (34, 140, 50), (5, 128, 4097)] {
        let reads = vec![f32s(dense(&[k, m]).permute(&[1, 0])), f32s(dense(&[n, k]).permute(&[1, 0]))];
        c.add(&format!("matmul transposed {m}x{k}x{n}"), mm.clone(), &[m, n], reads, &[x(0)]);
    }
    let s = [2, 3, 20, 24];
    let b = Access { shape: Shape::new([2, 3, 17, 24]), ..dense(&[3, 17, 24]).broadcast(&Shape::new([2, 3, 17, 24])) };
    let reads = vec![f32s(dense(&[2, 3, 20, 17])), f32s(b), f32s(spread(&[24], &s)), f32s(dense(&s))];
    let body = (x(0) + x(1)).max(&x(0).like(0.0)) + x(2);
    c.add("matmul batch, epilogue", mm.clone(), &s, reads.clone(), std::slice::from_ref(&body)).in_place = Some((0, 3));
    let heads = vec![f32s(dense(&[2, 20, 3, 24]).permute(&[0, 2, 1, 3]))];
    c.add_writing("matmul to heads", mm.clone(), &s, reads, heads, &[body]);
    // One row per matrix of a batch: over one right operand, over one each, and the other way round; few columns.
    let step = |a: &[usize], b: &[usize], s: &[usize]| vec![f32s(dense(a)), f32s(dense(b).broadcast(&Shape::new(s)))];
    for (name, rows) in [("three", [3, 1]), ("fourteen", [7, 2])] {
        let [batch, m] = rows;
        let mut reads = step(&[batch, m, 132], &[132, 36], &[batch, 132, 36]);
        reads.push(f32s(spread(&[m, 1], &[batch, m, 36])));
        c.add(&format!("matmul {name} rows of a batch"), mm.clone(), &[batch, m, 36], reads, &[x(0) * x(1)]);
    }
    let reads = step(&[3, 2, 40, 132], &[132, 2], &[3, 2, 132, 2]);
    c.add("matmul few columns of a batch", mm.clone(), &[3, 2, 40, 2], reads, &[x(0)]);
    let keys = dense(&[2, 3, 52, 16]);
    let queries = || f32s(dense(&[2, 1, 3, 16]).permute(&[0, 2, 1, 3]));
    let reads = vec![queries(), f32s(keys.permute(&[0, 1, 3, 2]))];
    c.add("matmul one query", mm.clone(), &[2, 3, 1, 52], reads, &[x(0) * 0.25]);
    let reads = vec![f32s(dense(&[2, 3, 1, 52])), f32s(keys)];
    c.add("matmul one row of weights", mm.clone(), &[2, 3, 1, 16], reads, &[x(0)]);
    let heads = dense(&[2, 9, 3, 16]).permute(&[0, 2, 1, 3]);
    let reads = vec![f32s(heads.clone()), f32s(heads.permute(&[0, 1, 3, 2]))];
    let scores = x(0) * 0.25 + Expr::index(3).le(&Expr::index(2)).select(&x(0).like(0.0), &x(0).like(-1e4));
    c.add("matmul of heads, masked", mm, &[2, 3, 9, 9], reads, &[scores]);
}

/// Products of bytes: of both signs on either side, of every stride, in every way to store them.
fn of_bytes() -> Vec<Case> {
    let mut c = Cases { random: Random(9), cases: Vec::new() };
    let (mm, sum) = (Template::MatMul, || Expr::input(0, DType::I32));
    convolutions_of_bytes(&mut c);
    for (left, right) in [(DType::U8, DType::I8), (DType::I8, DType::U8)] {
        let mut add = |name: &str, shape: &[usize], a: Access, b: Access, more: Vec<Operand>, body: Expr| {
            let reads = [vec![typed(left, a), typed(right, b)], more].concat();
            large(c.add(&format!("bytes {name} of {left} by {right}"), mm.clone(), shape, reads, &[body]));
        };
        for (m, k, n) in [
            (3, 4, 5),
            (65, 67, 33),
            (130, 1030, 129),
            (1, 300, 70),
            (4, 33, 200),
            (70, 65, 1),
            (5, 0, 6),
            (2, 131, 4097),
        ] {
            let name = format!("{m}x{k}x{n}");
            add(&name, &[m, n], dense(&[m, k]), dense(&[k, n]), vec![], sum());
            let turned = |rows, columns| dense(&[columns, rows]).permute(&[1, 0]);
            add(&format!("transposed {name}"), &[m, n], turned(m, k), turned(k, n), vec![], sum());
        }
        let (s, columns) = ([2, 3, 20, 24], f32s(spread(&[24], &[2, 3, 20, 24])));
        let body = sum().cast(DType::F32) * x(1);
        add("batch, to floats", &s, dense(&[2, 3, 20, 17]), spread(&[3, 17, 24], &[2, 3, 17, 24]), vec![columns], body);
        let body = (sum() + Expr::input(1, DType::I32)).max(&sum().like(0.0)).min(&sum().like(255.0)).cast(DType::U8);
        let points = typed(DType::I32, spread(&[24, 1], &[24, 50]));
        add("to bytes", &[24, 50], dense(&[24, 19]), dense(&[19, 50]), vec![points], body);
    }
    c.cases
}

/// Gives the bytes of a case's core operands all values. The first ones are as large as they can be: sums of two products of theirs leave 16
/// bits.
fn large(case: &mut Case) {
    for (read, values) in case.kernel.reads.iter().zip(&mut case.inputs).take(2) {
        let (low, high) = read.dtype.range();
        let number = |i: usize| if i < 600 { [high, low, high][i % 3] } else { low + ((i * 89 + i / 7) % 256) as f64 };
        *values = (0..values.len()).map(number).map(|n| n.clamp(low, high)).collect();
    }
}

/// A window over images: its name, the data's extents, the result's channels and spatial extents, groups, and the window.
type Row = (&'static str, [usize; 5], [usize; 4], usize, Window);

/// Convolutions of bytes: as products and of each channel by itself, of every stride, with and without something around the data.
fn convolutions_of_bytes(c: &mut Cases) {
    let (one, three) = ([1; 3], window([1, 3, 3], [1; 3], [1; 3], [0, 1, 1]));
    let rows: [Row; 18] = [
        ("many outputs", [1, 9, 1, 7, 8], [300, 1, 7, 8], 1, three.clone()),
        ("of three channels", [2, 3, 1, 17, 9], [7, 1, 9, 5], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("of six channels", [1, 6, 1, 9, 40], [150, 1, 7, 13], 1, window([1, 3, 3], [1, 1, 3], one, [0, 0, 1])),
        ("same", [2, 5, 1, 7, 9], [6, 1, 7, 9], 1, three.clone()),
        ("long", [1, 64, 1, 12, 19], [33, 1, 12, 19], 1, three.clone()),
        ("deep", [1, 300, 1, 5, 6], [13, 1, 5, 6], 1, three.clone()),
        ("7x7, strided", [1, 3, 1, 33, 31], [16, 1, 17, 16], 1, window([1, 7, 7], [1, 2, 2], one, [0, 3, 3])),
        ("far apart", [1, 3, 1, 17, 40], [5, 1, 5, 13], 1, window([1, 3, 3], [1, 4, 3], one, [0, 1, 1])),
        ("dilated", [1, 4, 1, 9, 11], [3, 1, 7, 5], 1, window([1, 3, 2], one, [1, 2, 7], [0, 1, 1])),
        ("1x1", [2, 19, 1, 7, 7], [14, 1, 7, 7], 1, window(one, one, one, [0; 3])),
        ("1x1, strided", [1, 24, 1, 9, 35], [12, 1, 5, 18], 1, window(one, [1, 2, 2], one, [0; 3])),
        ("grouped", [2, 8, 1, 6, 6], [6, 1, 6, 6], 2, three.clone()),
        ("few outputs", [1, 9, 1, 8, 21], [2, 1, 8, 21], 1, three.clone()),
        ("depthwise", [2, 7, 1, 13, 18], [7, 1, 13, 18], 7, three.clone()),
        ("depthwise, strided", [1, 4, 1, 15, 12], [8, 1, 8, 6], 4, window([1, 5, 5], [1, 2, 2], one, [0, 2, 2])),
        ("depthwise, small", [2, 35, 1, 5, 4], [35, 1, 5, 4], 35, three.clone()),
        ("3-D", [1, 2, 4, 5, 6], [4, 4, 4, 6], 1, window([2, 3, 3], one, one, [1, 1, 1])),
        ("1-D", [1, 3, 1, 1, 40], [5, 1, 1, 21], 1, window([1, 1, 4], [1, 1, 2], one, [0, 0, 2])),
    ];
    let sum = || Expr::input(0, DType::I32);
    for (data, weights) in [(DType::U8, DType::I8), (DType::I8, DType::U8)] {
        for (name, x_shape, [o, d, h, w], groups, window) in rows.clone() {
            let s = [x_shape[0], o, d, h, w];
            let [kd, kh, kw] = window.kernel;
            let filters = dense(&[o, x_shape[1] / groups, kd, kh, kw]);
            let padding = if data == DType::U8 { 131 } else { -77 };
            let template = Template::Conv { groups, window, padding };
            let reads = vec![typed(data, dense(&x_shape)), typed(weights, filters)];
            let name = format!("conv of {data} {name}");
            large(c.add(&name, template.clone(), &s, reads.clone(), &[sum()]));
            // Of scaled sums, to bytes.
            let own = vec![typed(DType::I32, spread(&[o, 1, 1, 1], &s)), f32s(spread(&[o, 1, 1, 1], &s))];
            let scaled = ((sum() - Expr::input(1, DType::I32)).cast(DType::F32) * 0.0078125 + x(2)).round();
            let body = scaled.max(&x(0).like(0.0)).min(&x(0).like(255.0)).cast(DType::U8);
            large(c.add(&format!("{name} to bytes"), template, &s, [reads, own].concat(), &[body]));
        }
    }
}

/// Convolutions of bytes with their channels last, of which 16, 4 or fewer lie side by side.
pub fn bytes_with_channels_last() -> Vec<Case> {
    let mut c = Cases { random: Random(11), cases: Vec::new() };
    let last = |shape: &[usize; 5]| dense(&[0, 2, 3, 4, 1].map(|axis| shape[axis])).permute(&[0, 4, 1, 2, 3]);
    for (data, weights) in [(DType::U8, DType::I8), (DType::I8, DType::U8)] {
        for (channels, o, groups) in [(32, 70, 1), (16, 33, 1), (12, 20, 1), (3, 18, 1), (32, 48, 2)] {
            let (x_shape, s) = ([2, channels, 1, 7, 9], [2, o, 1, 7, 9]);
            let filters = [o, channels / groups, 1, 3, 3];
            let reads = vec![typed(data, last(&x_shape)), typed(weights, last(&filters))];
            let padding = if data == DType::U8 { 131 } else { -77 };
            let window = window([1, 3, 3], [1; 3], [1; 3], [0, 1, 1]);
            let name = format!("conv of {data} with {channels} channels last, {groups} groups");
            let to = vec![typed(DType::I32, last(&s))];
            let template = Template::Conv { groups, window, padding };
            large(c.add_writing(&name, template, &s, reads, to, &[Expr::input(0, DType::I32)]));
        }
    }
    c.cases
}

/// Products whose operands pass prologues on their way.
fn matmul_behind(c: &mut Cases) {
    let mm = Template::MatMul;
    let affine = || (x(0) * x(1) + x(2)).max(&x(0).like(0.0));
    for (m, k, n) in [(3, 4, 5), (65, 67, 33), (130, 300, 129), (1, 300, 70), (4, 33, 200), (70, 65, 1), (5, 0, 6)] {
        let (a, b) = ([m, k], [k, n]);
        let reads = || vec![f32s(dense(&a)), f32s(dense(&b)), f32s(spread(&[n], &[m, n]))];
        let left = || (0, vec![f32s(spread(&[k], &a)), f32s(spread(&[m, 1], &a))], affine());
        let right = || (1, vec![f32s(dense(&b)), f32s(spread(&[1], &b))], affine());
        let body = [x(0) - x(1)];
        c.add_behind(&format!("matmul {m}x{k}x{n}, prologue left"), mm.clone(), &[m, n], reads(), vec![left()], &body);
        c.add_behind(
            &format!("matmul {m}x{k}x{n}, prologue right"),
            mm.clone(),
            &[m, n],
            reads(),
            vec![right()],
            &body,
        );
        let both = vec![left(), right()];
        c.add_behind(&format!("matmul {m}x{k}x{n}, prologues"), mm.clone(), &[m, n], reads(), both, &body);
    }
    let turned = |rows: usize, cols: usize| f32s(dense(&[cols, rows]).permute(&[1, 0]));
    for (m, k, n) in [(66, 35, 40), (50, 70, 2)] {
        let left = (0, vec![turned(m, k)], x(1) - x(0));
        let right = (1, vec![f32s(dense(&[k, n]))], x(0) * x(1));
        let reads = vec![turned(m, k), turned(k, n)];
        c.add_behind(
            &format!("matmul transposed {m}x{k}x{n}, prologues"),
            mm.clone(),
            &[m, n],
            reads,
            vec![left, right],
            &[x(0)],
        );
    }
    // Batches: rows that join, an own operand that keeps them apart, a right operand that is broadcast.
    let (s, a) = ([2, 3, 20, 24], [2, 3, 20, 17]);
    let b = Access { shape: Shape::new([2, 3, 17, 24]), ..dense(&[17, 24]).broadcast(&Shape::new([2, 3, 17, 24])) };
    for (name, own) in [("rows", &[17usize][..]), ("a batch", &[3, 1, 1]), ("all", &a)] {
        let left = (0, vec![f32s(spread(own, &a))], x(0) * x(1));
        let reads = vec![f32s(dense(&a)), f32s(b.clone())];
        c.add_behind(&format!("matmul batch, prologue of {name}"), mm.clone(), &s, reads, vec![left], &[x(0) + 0.5]);
    }
    let right = (1, vec![f32s(spread(&[2, 1, 1, 24], &[2, 3, 17, 24]))], x(0) + x(1));
    c.add_behind("matmul batch, prologue apart", mm.clone(), &s, vec![f32s(dense(&a)), f32s(b)], vec![right], &[x(0)]);
    let heads = dense(&[2, 90, 3, 16]).permute(&[0, 2, 1, 3]);
    let reads = vec![f32s(heads.clone()), f32s(heads.permute(&[0, 1, 3, 2]))];
    let scale = (0, vec![], x(0) * 0.25);
    let rotated = (1, vec![f32s(spread(&[16, 1], &[2, 3, 16, 90]))], x(0) * x(1));
    c.add_behind("matmul of heads, prologues", mm, &[2, 3, 90, 90], reads, vec![scale, rotated], &[x(0)]);
}

/// Convolutions behind a prologue for which zero is not a fixed point: padding is zero all the same.
fn conv_behind(c: &mut Cases) {
    let one = [1; 3];
    let rows: [Row; 9] = [
        ("1-D", [2, 9, 1, 1, 20], [12, 1, 1, 20], 1, window([1, 1, 3], one, one, [0, 0, 1])),
        ("2-D", [2, 3, 1, 9, 8], [16, 1, 9, 8], 1, window([1, 3, 3], one, one, [0, 1, 1])),
        ("strided", [1, 20, 1, 11, 13], [70, 1, 6, 7], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("dilated", [1, 2, 1, 12, 12], [20, 1, 7, 9], 1, window([1, 3, 2], one, [1, 3, 3], [0, 1, 0])),
        ("grouped", [2, 8, 1, 6, 5], [24, 1, 6, 5], 2, window([1, 3, 3], one, one, [0, 1, 1])),
        ("1x1", [2, 40, 1, 7, 7], [33, 1, 7, 7], 1, window(one, one, one, [0; 3])),
        ("1x1 wide", [2, 300, 1, 14, 14], [140, 1, 14, 14], 1, window(one, one, one, [0; 3])),
        ("1x1 grouped", [2, 24, 1, 6, 6], [32, 1, 6, 6], 2, window(one, one, one, [0; 3])),
        ("3-D", [1, 2, 5, 6, 7], [8, 4, 3, 8], 1, window([2, 3, 3], [1, 2, 1], one, [0, 1, 2])),
    ];
    for (name, x_shape, [o, d, h, w], groups, win) in rows {
        let s = [x_shape[0], o, d, h, w];
        let [kd, kh, kw] = win.kernel;
        let weights = dense(&[o, x_shape[1] / groups, kd, kh, kw]);
        let per_channel = || f32s(spread(&[x_shape[1], 1, 1, 1], &x_shape));
        let own = vec![per_channel(), per_channel()];
        let batch_norm = (x(0) * x(1) + x(2) + 1.0).max(&x(0).like(0.0));
        let reads = vec![f32s(dense(&x_shape)), f32s(weights.clone()), f32s(spread(&[o, 1, 1, 1], &s))];
        let template = Template::Conv { groups, window: win, padding: 0 };
        let name = format!("conv {name}, prologue");
        c.add_behind(&name, template.clone(), &s, reads.clone(), vec![(0, own, batch_norm)], &[x(0) + x(1)]);
        let own = vec![f32s(spread(&[x_shape[0], x_shape[1], 1, 1, 1], &x_shape)), f32s(dense(&x_shape))];
        let gated = x(0) * x(1) + x(2) + 1.0;
        c.add_behind(&format!("{name} of images"), template, &s, reads, vec![(0, own, gated)], &[x(0) + x(1)]);
    }
}

fn window(kernel: [usize; 3], strides: [usize; 3], dilations: [usize; 3], pads: [usize; 3]) -> Window {
    Window { kernel, strides, dilations, pads }
}

/// Gradients of maxima, row-major and with channels last, of data of few values: a window has its maximum in several places.
fn pool_gradients(c: &mut Cases) {
    let shapes = [([2, 16, 1, 9, 7], [3, 2, 1]), ([1, 6, 1, 8, 8], [2, 2, 0]), ([2, 5, 1, 7, 6], [3, 1, 1])];
    for (shape, [taps, stride, pad]) in shapes {
        let window = window([1, taps, taps], [1, stride, stride], [1; 3], [0, pad, pad]);
        let out = |extent: usize| (extent + 2 * pad - taps) / stride + 1;
        let places = [shape[0], shape[1], 1, out(shape[3]), out(shape[4])];
        for last in [false, true] {
            let lies = |of: &[usize]| if last { Access::channels_last(Shape::new(of)) } else { dense(of) };
            let reads = vec![f32s(lies(&shape)), f32s(lies(&places)), f32s(lies(&places)), f32s(lies(&shape))];
            let template = Template::PoolGrad { window: window.clone() };
            let name = format!(
                "maxima of {taps} by {taps}, {} channels{}",
                shape[1],
                if last { ", channels last" } else { "" }
            );
            let writes = vec![f32s(lies(&shape))];
            let case = c.add_writing(&name, template, &shape, reads, writes, &[x(0) + x(1)]);
            for value in &mut case.inputs[0] {
                *value = (*value * 2.0).round();
            }
            let (data, maxima) = (case.kernel.reads[0].access.clone(), case.kernel.reads[1].access.clone());
            for index in indices(&places) {
                let mut most = f64::NEG_INFINITY;
                for (s, t) in (0..taps).flat_map(|s| (0..taps).map(move |t| (s, t))) {
                    let (y, x) = ((index[3] * stride + s).checked_sub(pad), (index[4] * stride + t).checked_sub(pad));
                    if let (Some(y), Some(x)) = (y.filter(|y| *y < shape[3]), x.filter(|x| *x < shape[4])) {
                        most = most.max(case.inputs[0][data.at(&[index[0], index[1], 0, y, x]) as usize]);
                    }
                }
                case.inputs[1][maxima.at(&index) as usize] = most;
            }
        }
    }
}

/// Rows of scores that are no softmax: the logarithm of the sum of powers, and values under scores of one product or two, with operands for each
/// row, for each key and for each score. Only tensor cores compute them.
pub fn folds() -> Vec<Case> {
    let mut c = Cases { random: Random(11), cases: Vec::new() };
    let read = |batch: &[usize], matrix: [usize; 2]| f32s(dense(&[batch, &matrix].concat()));
    let (query, key) = (Expr::index(2), Expr::index(3));
    let low = x(0).like(f64::NEG_INFINITY);
    let causal = |condition: &Expr, score: Expr| condition.select(&score, &low);
    let mut add = |name: &str, fold: Fold, score: Expr, [h, m, d, n, e, f]: [usize; 6], further: Vec<Operand>| {
        let batch = [2, h];
        let mut reads = vec![read(&batch, [m, d]), read(&batch, [d, n])];
        if fold != Fold::LogSum {
            reads.push(read(&batch, [n, e]));
        }
        if fold.products() == 2 {
            reads.extend([read(&batch, [m, f]), f32s(dense(&[2, h, n, f]).permute(&[0, 1, 3, 2]))]);
        }
        let template = Template::Attention { score: Body::new(&[score]), further: further.len(), guarded: None, fold };
        reads.extend(further);
        c.add(name, template, &[2, h, m, e], reads, &[x(0)]);
    };
    let of_rows = |h, m, n| f32s(spread(&[2, h, m, 1], &[2, h, m, n]));
    let of_keys = |h, m, n| f32s(spread(&[2, h, 1, n], &[2, h, m, n]));
    let (one, two) = (Fold::Plain { second: false }, Fold::Plain { second: true });
    add("scores, sums of powers", Fold::LogSum, x(0) * 0.25, [3, 70, 16, 90, 1, 0], vec![]);
    add(
        "scores, sums of causal powers",
        Fold::LogSum,
        causal(&key.le(&query), x(0) * 0.25),
        [2, 37, 24, 37, 1, 0],
        vec![],
    );
    add("scores, sums of masked powers", Fold::LogSum, x(0) + x(1), [2, 20, 8, 33, 1, 0], vec![of_keys(2, 20, 33)]);
    let power = |score: Expr, of: usize| (score - x(of)).exp();
    add("scores, one product", one, x(0) * 0.5, [2, 70, 16, 90, 24, 0], vec![]);
    add("scores, powers", one, power(x(0) * 0.25, 1), [3, 66, 16, 66, 16, 0], vec![of_rows(3, 66, 66)]);
    let seen = causal(&query.le(&key), x(0) * 0.25);
    add("scores, causal powers of keys", one, power(seen, 1), [3, 66, 16, 66, 16, 0], vec![of_keys(3, 66, 66)]);
    let gradient = |score: Expr| power(score, 2) * (x(1) - x(3)) * 0.125;
    let rows = vec![of_rows(2, 70, 50), of_rows(2, 70, 50)];
    add("scores, two products", two, gradient(x(0) * 0.25), [2, 70, 16, 50, 24, 40], rows);
    let rows = || vec![of_rows(2, 130, 130), of_rows(2, 130, 130)];
    let seen = causal(&key.le(&query), x(0) * 0.05);
    add("scores, two causal products", two, gradient(seen), [2, 130, 64, 130, 64, 64], rows());
    let keys = vec![of_keys(2, 131, 131), of_keys(2, 131, 131)];
    let seen = causal(&query.le(&key), x(0) * 0.05);
    add("scores, two products by keys", two, gradient(seen), [2, 131, 128, 131, 128, 128], keys);
    c.cases
}

fn attention(c: &mut Cases) {
    let a = |score: Expr, further: usize| Template::Attention {
        score: Body::new(&[score]),
        further,
        guarded: None,
        fold: Fold::Softmax,
    };
    let read = |batch: &[usize], matrix: [usize; 2]| f32s(dense(&[batch, &matrix].concat()));
    let three = |b: &[usize], [m, d, n, e]: [usize; 4]| vec![read(b, [m, d]), read(b, [d, n]), read(b, [n, e])];
    c.add("attention plain", a(x(0), 0), &[5, 4], three(&[], [5, 3, 7, 4]), &[x(0)]);
    c.add("attention scaled", a(x(0) * 0.25, 0), &[2, 3, 20, 16], three(&[2, 3], [20, 16, 20, 16]), &[x(0)]);
    c.add("attention of one", a(x(0) * 0.5, 0), &[4, 1, 24], three(&[4], [1, 24, 1, 24]), &[x(0)]);
    c.add("attention of one row", a(x(0) * 0.1, 0), &[3, 1, 70], three(&[3], [1, 70, 300, 70]), &[x(0)]);
    c.add("attention of one column", a(x(0), 0), &[2, 40, 1], three(&[2], [40, 1, 33, 1]), &[x(0)]);
    // Keys, queries and values as split heads have them, and a mask for all of them.
    let heads = |matrix: [usize; 2]| dense(&[2, matrix[0], 3, matrix[1]]).permute(&[0, 2, 1, 3]);
    let keys = heads([50, 16]).permute(&[0, 1, 3, 2]);
    let mask = spread(&[50, 50], &[2, 3, 50, 50]);
    let reads = vec![f32s(heads([50, 16])), f32s(keys), f32s(heads([50, 16])), f32s(mask)];
    c.add("attention of split heads", a(x(0) * 0.25 + x(1), 1), &[2, 3, 50, 16], reads, &[x(0) * 2.0]);
    // Where the mask is false nothing is seen, wherever the first that is seen comes.
    let seen = |n: usize| typed(DType::Bool, spread(&[2, 1, n], &[2, 30, n]));
    let chosen = Expr::input(1, DType::Bool).select(&(x(0) * 0.3), &x(0).like(f64::from(f32::MIN)));
    let mut reads = three(&[2], [30, 8, 90, 8]);
    reads.push(seen(90));
    c.add("attention masked", a(chosen, 1), &[2, 30, 8], reads, &[x(0)]);
    // More than a strip, more than a block of keys; a body with operands.
    let mut reads = three(&[], [150, 40, 700, 72]);
    reads.extend([f32s(spread(&[72], &[150, 72])), f32s(dense(&[150, 72]))]);
    c.add("attention in strips", a(x(0) * 0.15, 0), &[150, 72], reads, &[x(0) * x(1) + x(2)]);
    // Neither extents nor a row of the mask are a multiple of anything.
    let mut reads = three(&[2], [37, 24, 45, 40]);
    reads.push(f32s(dense(&[2, 37, 45])));
    c.add("attention of odd extents", a(x(0) * 0.2 + x(1), 1), &[2, 37, 40], reads, &[x(0)]);
    // Three heads of queries to a head of keys and values, and none sees what is ahead.
    let shared = |matrix: [usize; 2]| {
        dense(&[2, 2, 1, matrix[0], matrix[1]]).broadcast(&Shape::new([2, 2, 3, matrix[0], matrix[1]]))
    };
    let seen = typed(DType::Bool, spread(&[33, 64], &[2, 2, 3, 33, 64]));
    let reads = vec![
        f32s(dense(&[2, 2, 3, 33, 32])),
        f32s(shared([64, 32]).permute(&[0, 1, 2, 4, 3])),
        f32s(shared([64, 16])),
        seen,
    ];
    let chosen = Expr::input(1, DType::Bool).select(&(x(0) * 0.1), &x(0).like(-1e9));
    let case = c.add("attention of grouped queries", a(chosen, 1), &[2, 2, 3, 33, 16], reads, &[x(0)]);
    case.inputs[3].iter_mut().enumerate().for_each(|(i, v)| *v = f64::from(i % 64 <= i / 64 + 20));
    // Guarded rows that see nothing weigh nothing, also where the kernel's own text says so.
    let chosen = Expr::input(1, DType::Bool).select(&(x(0) * 0.3), &x(0).like(f64::NEG_INFINITY));
    let guarded = Template::Attention {
        score: Body::new(&[chosen]),
        further: 1,
        guarded: Some(Guard::Unseen),
        fold: Fold::Softmax,
    };
    let mut reads = three(&[2], [21, 24, 45, 40]);
    reads.push(typed(DType::Bool, dense(&[2, 21, 45])));
    let case = c.add("attention of rows that see nothing", guarded, &[2, 21, 40], reads, &[x(0)]);
    [0, 5, 20, 33].iter().for_each(|row| case.inputs[3][row * 45..][..45].fill(0.0));
    // A row each of seven heads to a head of many keys, which several workgroups and their warps share.
    let shared =
        |matrix: [usize; 2]| dense(&[2, 1, matrix[0], matrix[1]]).broadcast(&Shape::new([2, 7, matrix[0], matrix[1]]));
    let mut keys = dense(&[2, 1, 600, 24]).permute(&[0, 1, 3, 2]);
    (keys.shape[1], keys.strides[1]) = (7, 0);
    let reads = vec![
        f32s(dense(&[2, 7, 1, 24])),
        f32s(keys),
        f32s(shared([600, 40])),
        f32s(spread(&[2, 1, 1, 600], &[2, 7, 1, 600])),
    ];
    c.add("attention of a step", a(x(0) * 0.2 + x(1), 1), &[2, 7, 1, 40], reads, &[x(0)]);
    // Two rows to a head of keys, neither of whose extents is a multiple of anything; and four of them, whose keys lie the other way.
    let shared =
        |matrix: [usize; 2]| dense(&[3, 1, matrix[0], matrix[1]]).broadcast(&Shape::new([3, 2, matrix[0], matrix[1]]));
    let reads = vec![
        f32s(dense(&[3, 2, 1, 20])),
        f32s(shared([270, 20]).permute(&[0, 1, 3, 2])),
        f32s(shared([270, 36])),
        f32s(spread(&[3, 1, 1, 270], &[3, 2, 1, 270])),
    ];
    c.add("attention of two queries to a head", a(x(0) * 0.2 + x(1), 1), &[3, 2, 1, 36], reads, &[x(0)]);
    let many = three(&[130], [4, 10, 37, 6]);
    c.add("attention of many short steps", a(x(0) * 0.25, 0), &[130, 4, 6], many, &[x(0)]);
    let many = three(&[270], [40, 16, 24, 8]);
    c.add("attention of many heads", a(x(0) * 0.25, 0), &[270, 40, 8], many, &[x(0)]);
    // As many, of which every row sees keys of its own.
    let mut reads = three(&[140], [37, 18, 70, 30]);
    reads.push(typed(DType::Bool, spread(&[37, 70], &[140, 37, 70])));
    let chosen = Expr::input(1, DType::Bool).select(&(x(0) * 0.2), &x(0).like(f64::from(f32::MIN)));
    c.add("attention of many masked heads", a(chosen, 1), &[140, 37, 30], reads, &[x(0)]);
    c.add("attention of long vectors", a(x(0) * 0.05, 0), &[20, 256], three(&[], [20, 200, 40, 256]), &[x(0)]);
    c.add("attention of wide heads", a(x(0) * 0.1, 0), &[2, 70, 96], three(&[2], [70, 90, 40, 96]), &[x(0)]);
    c.add("attention of wider heads", a(x(0) * 0.1, 0), &[2, 66, 136], three(&[2], [66, 136, 24, 136]), &[x(0)]);
    c.add("attention of wide values", a(x(0) * 0.3, 0), &[2, 70, 300], three(&[2], [70, 9, 40, 300]), &[x(0)]);
}

fn conv(c: &mut Cases) {
    let one = [1; 3];
    // name, input, output channels and extents, groups, window
    let three = window([1, 3, 3], one, one, [0, 1, 1]);
    let rows: [Row; 32] = [
        ("1-D", [2, 3, 1, 1, 20], [5, 1, 1, 18], 1, window([1, 1, 3], one, one, [0; 3])),
        ("2-D", [2, 3, 1, 9, 8], [4, 1, 9, 8], 1, window([1, 3, 3], one, one, [0, 1, 1])),
        ("strided", [1, 20, 1, 11, 13], [70, 1, 6, 7], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("dilated", [1, 2, 1, 12, 12], [20, 1, 7, 9], 1, window([1, 3, 2], one, [1, 3, 3], [0, 1, 0])),
        ("grouped", [2, 8, 1, 6, 5], [24, 1, 6, 5], 2, window([1, 3, 3], one, one, [0, 1, 1])),
        ("depthwise", [2, 6, 1, 9, 9], [12, 1, 5, 5], 6, window([1, 5, 5], [1, 2, 2], one, [0, 2, 2])),
        ("depthwise, small", [2, 37, 1, 4, 3], [37, 1, 4, 3], 37, three.clone()),
        ("1x1", [2, 40, 1, 7, 7], [33, 1, 7, 7], 1, window(one, one, one, [0; 3])),
        ("1x1 strided", [1, 16, 1, 8, 8], [16, 1, 4, 4], 1, window(one, [1, 2, 2], one, [0; 3])),
        ("3-D", [1, 2, 5, 6, 7], [3, 4, 3, 8], 1, window([2, 3, 3], [1, 2, 1], one, [0, 1, 2])),
        ("1-D, many", [2, 8, 1, 1, 20], [9, 1, 1, 18], 1, window([1, 1, 3], one, one, [0; 3])),
        ("3-D, many", [1, 8, 3, 6, 5], [9, 4, 3, 5], 1, window([2, 3, 3], [1, 2, 1], one, [1, 1, 1])),
        ("of few outputs", [2, 9, 1, 7, 8], [4, 1, 7, 8], 1, window([1, 3, 3], one, one, [0, 1, 1])),
        ("of many taps", [3, 5, 1, 16, 18], [20, 1, 3, 3], 1, window([1, 16, 18], one, one, [0, 1, 1])),
        ("of many taps, many", [2, 3, 1, 16, 18], [32, 1, 3, 3], 1, window([1, 16, 18], one, one, [0, 1, 1])),
        ("of many taps apart", [2, 6, 1, 17, 18], [32, 1, 3, 3], 2, window([1, 8, 9], one, [1, 2, 2], [0, 1, 1])),
        ("patches", [2, 3, 1, 35, 40], [70, 1, 4, 5], 1, window([1, 8, 8], [1, 8, 8], one, [0; 3])),
        ("patches that overlap", [3, 2, 1, 7, 96], [140, 1, 3, 6], 2, window([1, 3, 16], [1, 2, 16], one, [0; 3])),
        ("strips", [2, 8, 1, 20, 18], [8, 1, 20, 18], 8, three.clone()),
        ("strips of many", [1, 4, 1, 96, 90], [4, 1, 96, 90], 4, three.clone()),
        ("strips 7x7", [1, 12, 1, 17, 11], [12, 1, 17, 11], 12, window([1, 7, 7], one, one, [0, 3, 3])),
        ("strips by fours", [1, 96, 1, 13, 6], [96, 1, 13, 6], 96, three.clone()),
        (
            "strips by twos, strided",
            [2, 10, 1, 15, 13],
            [10, 1, 8, 7],
            10,
            window([1, 3, 3], [1, 2, 2], one, [0, 1, 1]),
        ),
        ("strips, dilated", [1, 6, 1, 14, 9], [6, 1, 14, 9], 6, window([1, 3, 3], one, [1, 2, 3], [0, 2, 3])),
        ("strips apart", [1, 4, 1, 23, 9], [4, 1, 6, 3], 4, window([1, 2, 2], [1, 4, 3], one, [0; 3])),
        ("strips of odd channels", [1, 5, 1, 37, 8], [5, 1, 37, 6], 5, window([1, 3, 3], one, one, [0, 1, 0])),
        ("strips of four each", [1, 3, 1, 19, 10], [12, 1, 19, 10], 3, three.clone()),
        ("strips of small groups", [2, 12, 1, 18, 8], [12, 1, 18, 8], 3, three.clone()),
        ("strips of few channels", [1, 3, 1, 9, 40], [16, 1, 9, 40], 1, window(one, one, one, [0; 3])),
        ("strips 1-D", [2, 8, 1, 1, 70], [8, 1, 1, 67], 8, window([1, 1, 9], one, one, [0, 0, 3])),
        ("strips 3-D", [1, 4, 6, 17, 5], [4, 6, 17, 5], 4, window([3; 3], one, one, one)),
        ("strips through images", [1, 4, 18, 4, 5], [4, 17, 4, 5], 4, window([4, 1, 1], one, one, [1, 0, 0])),
    ];
    for (name, x_shape, [o, d, h, w], groups, win) in rows {
        let s = [x_shape[0], o, d, h, w];
        let [kd, kh, kw] = win.kernel;
        let weights = dense(&[o, x_shape[1] / groups, kd, kh, kw]);
        let reads = vec![f32s(dense(&x_shape)), f32s(weights), f32s(spread(&[o, 1, 1, 1], &s)), f32s(dense(&s))];
        let body = (x(0) + x(1)).max(&x(0).like(0.0)) + x(2);
        c.add(&format!("conv {name}"), Template::Conv { groups, window: win, padding: 0 }, &s, reads, &[body]);
    }
    let rows: [Row; 9] = [
        ("3x3 of each channel", [2, 12, 1, 7, 6], [12, 1, 7, 6], 12, window([1, 3, 3], one, one, [0, 1, 1])),
        ("3x3 of each, 2 apart", [2, 12, 1, 5, 4], [12, 1, 9, 8], 12, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("7x7 of each channel", [1, 6, 1, 9, 19], [6, 1, 9, 19], 6, window([1, 7, 7], one, one, [0, 3, 3])),
        ("20 apart", [1, 2, 1, 2, 3], [2, 1, 25, 46], 2, window([1, 5, 5], [1, 20, 20], one, [0; 3])),
        ("2-D", [2, 3, 1, 5, 4], [4, 1, 7, 6], 1, window([1, 3, 3], one, one, [0; 3])),
        ("strided", [1, 4, 1, 5, 5], [3, 1, 10, 10], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("grouped", [2, 4, 1, 4, 4], [6, 1, 8, 8], 2, window([1, 2, 2], [1, 2, 2], one, [0; 3])),
        ("dilated", [1, 2, 1, 4, 5], [2, 1, 11, 9], 1, window([1, 3, 2], [1, 2, 1], [1, 2, 3], [0, 0, 0])),
        ("3-D", [1, 2, 3, 2, 3], [2, 5, 4, 4], 1, window([3, 2, 2], [1, 2, 1], one, [0; 3])),
    ];
    for (name, x_shape, [o, d, h, w], groups, win) in rows {
        let s = [x_shape[0], o, d, h, w];
        let [kd, kh, kw] = win.kernel;
        let weights = dense(&[x_shape[1], o / groups, kd, kh, kw]);
        let reads = vec![f32s(dense(&x_shape)), f32s(weights), f32s(spread(&[o, 1, 1, 1], &s))];
        let name = format!("conv_transpose {name}");
        c.add(&name, Template::ConvTranspose { groups, window: win }, &s, reads, &[x(0) + x(1)]);
    }
    // Enough channels for a product of matrices.
    let twos = || window([1, 2, 2], [1, 2, 2], one, [0; 3]);
    let rows: [Row; 19] = [
        ("1x1, 2 apart", [2, 24, 1, 5, 4], [9, 1, 10, 7], 1, window(one, [1, 2, 2], one, [0; 3])),
        ("2x1, 3 apart", [1, 9, 1, 4, 5], [5, 1, 12, 13], 1, window([1, 2, 1], [1, 3, 3], one, [0; 3])),
        ("2x2, 2 apart", [2, 40, 1, 8, 8], [24, 1, 16, 16], 1, twos()),
        ("2x2, 2 apart, odd", [3, 19, 1, 5, 7], [7, 1, 10, 14], 1, twos()),
        ("4x4, 2 apart", [2, 8, 1, 5, 6], [8, 1, 10, 12], 1, window([1, 4, 4], [1, 2, 2], one, [0, 1, 1])),
        ("3x3, 2 apart", [2, 16, 1, 5, 4], [6, 1, 10, 8], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("3x3", [1, 16, 1, 6, 7], [20, 1, 6, 7], 1, window([1, 3, 3], one, one, [0, 1, 1])),
        ("3x2, 3 and 2 apart", [2, 9, 1, 4, 5], [5, 1, 11, 9], 1, window([1, 3, 2], [1, 3, 2], one, [0, 1, 0])),
        ("2x2 in groups", [2, 16, 1, 4, 5], [24, 1, 8, 10], 2, twos()),
        ("4x4 in groups", [1, 16, 1, 3, 4], [12, 1, 6, 8], 2, window([1, 4, 4], [1, 2, 2], one, [0, 1, 1])),
        ("3x3 of dilated", [1, 10, 1, 6, 5], [12, 1, 8, 7], 1, window([1, 3, 3], one, [1, 2, 2], [0, 1, 1])),
        ("5x5 behind much padding", [1, 8, 1, 4, 4], [8, 1, 5, 5], 1, window([1, 5, 5], [1, 2, 2], one, [0, 3, 3])),
        ("lines", [2, 12, 1, 1, 9], [9, 1, 1, 18], 1, window([1, 1, 4], [1, 1, 2], one, [0, 0, 1])),
        ("spaces", [1, 8, 3, 2, 4], [5, 6, 4, 8], 1, window([2, 2, 2], [2, 2, 2], one, [0; 3])),
        (
            "5x4 of dilated, 2 and 3 apart",
            [1, 9, 1, 4, 5],
            [8, 1, 19, 18],
            1,
            window([1, 5, 4], [1, 2, 3], [1, 3, 2], [0, 1, 0]),
        ),
        (
            "3x3 of dilated, 2 and 4 apart",
            [2, 8, 1, 3, 3],
            [8, 1, 8, 14],
            1,
            window([1, 3, 3], [1, 2, 4], [1, 2, 6], [0, 1, 3]),
        ),
        ("3x3 in groups, 2 apart", [1, 18, 1, 4, 5], [12, 1, 8, 10], 2, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("3x3, 2 apart, many", [3, 40, 1, 7, 6], [70, 1, 13, 12], 1, window([1, 3, 3], [1, 2, 2], one, [0, 1, 1])),
        ("spaces of five", [1, 8, 3, 2, 3], [8, 7, 6, 7], 1, window([5, 3, 5], [2, 2, 3], one, [1, 0, 2])),
    ];
    for (name, x_shape, [o, d, h, w], groups, win) in rows {
        let s = [x_shape[0], o, d, h, w];
        let [kd, kh, kw] = win.kernel;
        let weights = dense(&[x_shape[1], o / groups, kd, kh, kw]);
        let reads = vec![f32s(dense(&x_shape)), f32s(weights), f32s(spread(&[o, 1, 1, 1], &s)), f32s(dense(&s))];
        let name = format!("conv_transpose {name}");
        let template = Template::ConvTranspose { groups, window: win };
        let body = (x(0) + x(1)).max(&x(0).like(0.0)) + x(2);
        c.add(&name, template.clone(), &s, reads[..3].to_vec(), &[x(0) + x(1)]);
        c.add(&format!("{name}, rectified"), template.clone(), &s, reads.clone(), &[body]);
        let own = vec![f32s(spread(&[x_shape[1], 1, 1, 1], &x_shape)), f32s(dense(&x_shape))];
        let behind = x(0) * x(1) + x(2) + 1.0;
        c.add_behind(
            &format!("{name}, prologue"),
            template,
            &s,
            reads[..3].to_vec(),
            vec![(0, own, behind)],
            &[x(0) + x(1)],
        );
    }
    // Gradients by filters: extents of the data and of the result, those of the filters, parts of images and rows.
    let strided = window([1, 3, 3], [1, 2, 2], one, [0, 1, 1]);
    let fives = window([1, 5, 5], one, one, [0, 2, 2]);
    let rows: [(&str, [usize; 5], [usize; 5], usize, Window, [usize; 2]); 13] = [
        ("3x3", [2, 16, 1, 6, 7], [2, 20, 1, 6, 7], 1, three.clone(), [1, 1]),
        ("3x3 in parts", [4, 16, 1, 6, 7], [4, 24, 1, 6, 7], 1, three.clone(), [4, 3]),
        ("1x1", [3, 40, 1, 5, 8], [3, 72, 1, 5, 8], 1, window(one, one, one, [0; 3]), [3, 1]),
        ("1x1, 2 apart", [2, 24, 1, 9, 8], [2, 16, 1, 5, 4], 1, window(one, [1, 2, 2], one, [0; 3]), [2, 1]),
        ("3x3, 2 apart", [2, 8, 1, 8, 9], [2, 136, 1, 4, 5], 1, strided.clone(), [1, 2]),
        ("7x7 of three", [2, 3, 1, 12, 11], [2, 16, 1, 6, 6], 1, window([1, 7, 7], [1, 2, 2], one, [0, 3, 3]), [2, 2]),
        ("in groups", [2, 16, 1, 5, 6], [2, 48, 1, 5, 6], 2, three.clone(), [2, 1]),
        ("dilated", [1, 8, 1, 9, 10], [1, 8, 1, 5, 6], 1, window([1, 3, 3], one, [1, 2, 2], [0; 3]), [1, 5]),
        ("3-D", [1, 8, 3, 4, 5], [1, 16, 3, 4, 5], 1, window([3; 3], one, one, one), [1, 2]),
        ("5x5 of each channel", [4, 70, 1, 9, 8], [4, 70, 1, 9, 8], 70, fives, [2, 3]),
        ("3x3 of each channel, 2 apart", [2, 40, 1, 8, 9], [2, 40, 1, 4, 5], 40, strided.clone(), [2, 1]),
        ("9x9 of each channel", [1, 5, 1, 17, 4], [1, 5, 1, 9, 4], 5, window([1, 9, 9], one, one, [0, 0, 4]), [1, 1]),
        ("3x3, two of each", [2, 12, 1, 6, 7], [2, 12, 1, 6, 7], 6, three.clone(), [2, 2]),
    ];
    for (name, x_shape, y_shape, groups, win, [images, rows]) in rows {
        let [kd, kh, kw] = win.kernel;
        let s = [images * rows, y_shape[1], x_shape[1] / groups, kd, kh, kw];
        let reads = vec![f32s(dense(&x_shape)), f32s(dense(&y_shape)), f32s(spread(&[1, s[1], 1, 1, 1, 1], &s))];
        let template = Template::ConvFilters { groups, rows, window: win };
        c.add(&format!("conv_filters {name}"), template, &s, reads, &[x(0) + x(1)]);
    }
    // Images side by side in a larger buffer: batch and channel strides are not dense, each image is.
    let mut apart = dense(&[2, 5, 1, 6, 6]);
    (apart.shape[1], apart.offset) = (3, 36);
    let s = [2, 4, 1, 6, 6];
    let mut placed = dense(&[2, 10, 1, 6, 6]);
    (placed.shape[1], placed.offset) = (4, 72);
    let template = Template::Conv { groups: 1, window: window([1, 3, 3], one, one, [0, 1, 1]), padding: 0 };
    let reads = vec![f32s(apart), f32s(dense(&[4, 3, 1, 3, 3]))];
    c.add_writing("conv between slices", template, &s, reads, vec![f32s(placed)], &[x(0)]);
}

fn pool(c: &mut Cases) {
    let one = [1; 3];
    let overlapping = window([1, 3, 3], [1, 2, 2], one, [0, 1, 1]);
    let ceil = Pool::MeanPadded { pads_end: [0, 1, 1] };
    let rows = [
        ("maximum", Pool::Max, overlapping.clone(), [2, 3, 1, 9, 8], [1, 5, 4]),
        ("mean", Pool::Mean, overlapping.clone(), [2, 3, 1, 9, 8], [1, 5, 4]),
        ("mean padded", ceil, overlapping.clone(), [2, 3, 1, 8, 8], [1, 5, 5]),
        ("maximum, small", Pool::Max, overlapping.clone(), [2, 21, 1, 6, 5], [1, 3, 3]),
        ("dilated", Pool::Max, window([1, 2, 2], one, [1, 2, 3], [0; 3]), [1, 2, 1, 7, 7], [1, 5, 4]),
        ("3-D", Pool::Mean, window([2, 2, 2], [2, 1, 2], one, [1, 0, 0]), [1, 2, 4, 5, 6], [2, 4, 3]),
        ("outside", Pool::Max, window([1, 1, 2], [1, 1, 3], one, [0, 0, 2]), [1, 1, 1, 1, 5], [1, 1, 3]),
    ];
    for (name, pool, win, shape, [d, h, w]) in rows {
        let s = [shape[0], shape[1], d, h, w];
        let reads = vec![f32s(dense(&shape)), f32s(spread(&[shape[1], 1, 1, 1], &s))];
        // Nothing but padding is less than any number, which not all devices have.
        let body = x(0).max(&x(0).like(-9.0)) * 0.5 + x(1);
        c.add(&format!("pool {name}"), Template::Pool { window: win, pool }, &s, reads, &[body]);
    }
}

fn gather(c: &mut Cases) {
    use DType::{I32, I64};
    let rows = Access { shape: Shape::new([7, 16]), strides: vec![0, 1], offset: 0 };
    let template = Template::Gather { strides: vec![16], extents: vec![10] };
    let reads = vec![f32s(rows.clone()), typed(I64, spread(&[7, 1], &[7, 16])), f32s(spread(&[16], &[7, 16]))];
    let case = c.add("gather rows", template.clone(), &[7, 16], reads, &[x(0) * 2.0 + x(1)]);
    case.inputs[0] = (0..160).map(f64::from).collect();
    case.inputs[1] = vec![0.0, 9.0, -1.0, 3.0, -10.0, 12.0, -30.0];
    let reads = vec![typed(I64, rows), typed(I32, spread(&[7, 1], &[7, 16]))];
    let case = c.add("gather integers", template, &[7, 16], reads, &[Expr::input(0, I64)]);
    case.inputs[0] = (0..160).map(f64::from).collect();
    let template = Template::Gather { strides: vec![1], extents: vec![10] };
    let data = Access { shape: Shape::new([4]), strides: vec![0], offset: 0 };
    let case = c.add("gather far outside", template, &[4], vec![f32s(data), typed(I64, dense(&[4]))], &[x(0)]);
    let far = f64::from(u32::MAX);
    case.inputs = vec![(0..10).map(f64::from).collect(), vec![far + 4.0, -far - 6.0, far * far, -far * far]];
    let data = Access { shape: Shape::new([4, 5]), strides: vec![1, 0], offset: 2 };
    let template = Template::Gather { strides: vec![24, -6], extents: vec![3, 2] };
    let index = typed(I64, dense(&[4, 5]));
    let data = Access { offset: 8, ..data };
    let case = c.add("gather by two", template, &[4, 5], vec![f32s(data), index.clone(), index], &[x(0)]);
    case.inputs[0] = (0..60).map(|v| f64::from(v) * 0.25).collect();
}

fn scatter(c: &mut Cases) {
    use DType::{I32, I64};
    let mut add = |name: &str, template, [base, index]: [Operand; 2], shape: &[usize], indices: &[f64]| {
        let updates = typed(base.dtype, dense(shape));
        let Template::Scatter { stride, extent, .. } = template else { unreachable!("it is a scatter") };
        let mut whole = base.access.clone();
        whole.shape.push(extent);
        whole.strides.push(stride);
        let data = c.random.values(base.dtype, elements(&whole));
        let (reads, body) = (vec![base.clone(), index, updates], Expr::input(0, base.dtype));
        let case = c.add_writing(name, template, shape, reads, vec![base], &[body]);
        case.in_place = Some((0, 0));
        (case.inputs[0], case.inputs[1]) = (data, indices.to_vec());
    };
    let rows = |n| Access { shape: Shape::new([n, 16]), strides: vec![0, 1], offset: 0 };
    let of = |axis, stride, extent, unique| Template::Scatter { axis, stride, extent, unique, join: None };
    let index = |dtype, n| typed(dtype, spread(&[n, 1], &[n, 16]));
    let places = [0.0, 9.0, -1.0, 3.0, -10.0, 12.0, 3.0, -11.0, 9.0];
    add("scatter rows", of(0, 16, 10, false), [f32s(rows(9)), index(I64, 9)], &[9, 16], &places);
    add(
        "scatter different rows",
        of(0, 16, 10, true),
        [f32s(rows(4)), index(I32, 4)],
        &[4, 16],
        &[7.0, -4.0, 10.0, 0.0],
    );
    add("scatter integers", of(0, 16, 10, false), [typed(I64, rows(9)), index(I32, 9)], &[9, 16], &places);
    let far = f64::from(u32::MAX);
    let base = Access { shape: Shape::new([5]), strides: vec![0], offset: 2 };
    let places = [far + 4.0, -far - 6.0, far * far, -far * far, 9.0];
    add(
        "scatter far outside",
        of(0, -1, 3, false),
        [f32s(Access { offset: 4, ..base.clone() }), typed(I64, dense(&[5]))],
        &[5],
        &places,
    );
    add(
        "scatter one by one",
        of(0, 3, 300, false),
        [f32s(base.clone()), typed(I64, dense(&[5]))],
        &[5],
        &[7.0, 299.0, 7.0, 0.0, -1.0],
    );
    // As ScatterElements has it: an index for each element, in a buffer that is turned.
    let turned = Access { shape: Shape::new([3, 5, 4]), strides: vec![1, 0, 30], offset: 0 };
    let indices: Vec<f64> = (0..60).map(|i| f64::from(i * 7 % 13) - 6.0).collect();
    add("scatter elements", of(1, 3, 10, false), [f32s(turned), typed(I64, dense(&[3, 5, 4]))], &[3, 5, 4], &indices);
    let caches = Access { shape: Shape::new([2, 8, 1, 64]), strides: vec![8 * 640, 640, 0, 1], offset: 0 };
    let start = typed(I64, spread(&[2, 1, 1, 1], &[2, 8, 1, 64]));
    add("scatter a token", of(2, 64, 10, true), [f32s(caches), start], &[2, 8, 1, 64], &[4.0, 9.0]);
    let none = Access { shape: Shape::new([0, 4]), strides: vec![0, 1], offset: 0 };
    add("scatter nothing", of(0, 4, 3, false), [f32s(none), typed(I64, dense(&[0, 4]))], &[0, 4], &[]);
}

fn pad(c: &mut Cases) {
    for (name, mode) in [
        ("constant", PadMode::Constant(0.5)),
        ("edge", PadMode::Edge),
        ("reflect", PadMode::Reflect),
        ("wrap", PadMode::Wrap),
    ] {
        let template = Template::Pad { before: vec![0, 2, -1, 3], mode };
        let s = [2, 7, 3, 9];
        let reads = vec![f32s(dense(&[2, 3, 5, 4])), f32s(spread(&[9], &s))];
        let reversed = vec![f32s(dense(&[4, 5, 3, 2]).permute(&[3, 2, 1, 0])), reads[1].clone()];
        c.add(&format!("pad {name}"), template.clone(), &s, reads, &[x(0) * x(1)]);
        c.add(&format!("pad {name}, turned"), template, &s, reversed, &[x(0) * x(1)]);
    }
    let template = Template::Pad { before: vec![1, 1], mode: PadMode::Constant(3.0) };
    c.add("pad nothing", template, &[2, 3], vec![f32s(dense(&[0, 1]))], &[x(0)]);
    let template = Template::Pad { before: vec![1], mode: PadMode::Constant(-3.0) };
    c.add("pad integers", template, &[12], vec![typed(DType::I64, dense(&[9]))], &[Expr::input(0, DType::I64)]);
}

fn resize(c: &mut Cases) {
    let cubic = |exclude_outside| ResizeMode::Cubic { a: -0.75, exclude_outside };
    let (up, down, full) = ([4, 8, 15], [4, 2, 3], [4, 5, 7]);
    for (name, mode, s) in [
        ("floor", ResizeMode::Nearest(Nearest::Floor), up),
        ("ceil", ResizeMode::Nearest(Nearest::Ceil), up),
        ("prefer floor", ResizeMode::Nearest(Nearest::RoundPreferFloor), up),
        ("prefer ceil", ResizeMode::Nearest(Nearest::RoundPreferCeil), down),
        ("linear up", ResizeMode::Linear, up),
        ("linear down", ResizeMode::Linear, down),
        ("cubic", cubic(false), up),
        ("cubic inside", cubic(true), full),
    ] {
        let shape = [4, 4, 5];
        // Centres of pixels are aligned.
        let scales: Vec<f64> = (0..3).map(|a| shape[a] as f64 / s[a] as f64).collect();
        let offsets = scales.iter().map(|scale| 0.5 * scale - 0.5).collect();
        let template = Template::Resize { scales, offsets, mode };
        let reads = vec![f32s(dense(&shape)), f32s(spread(&[], &s))];
        c.add(&format!("resize {name}"), template, &s, reads, &[x(0) + x(1)]);
    }
    // Thirds: every coordinate is a tie or an integer but for rounding.
    let thirds =
        Template::Resize { scales: vec![1.0 / 3.0], offsets: vec![0.0], mode: ResizeMode::Nearest(Nearest::Floor) };
    c.add("resize by thirds", thirds, &[300], vec![typed(DType::I32, dense(&[100]))], &[Expr::input(0, DType::I32)]);
}

#[test]
fn the_reference_knows_known_values() {
    let kernel = |template, shape: &[usize], reads: Vec<Operand>| Kernel {
        template,
        shape: Shape::new(shape),
        writes: vec![f32s(dense(shape))],
        reads,
        body: Body::identity(DType::F32),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    };
    let matmul = kernel(Template::MatMul, &[2, 1], vec![f32s(dense(&[2, 2])), f32s(dense(&[2, 1]))]);
    assert_eq!(evaluate(&matmul, &[vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 1.0]]), [[12.0, 34.0]]);
    let win = window([1, 1, 3], [1; 3], [1; 3], [0, 0, 1]);
    let conv = Template::Conv { groups: 1, window: win.clone(), padding: 0 };
    let conv = kernel(conv, &[1, 1, 1, 1, 3], vec![f32s(dense(&[1, 1, 1, 1, 3])), f32s(dense(&[1, 1, 1, 1, 3]))]);
    assert_eq!(evaluate(&conv, &[vec![1.0, 2.0, 4.0], vec![100.0, 10.0, 1.0]]), [[12.0, 124.0, 240.0]]);
    let transposed = Kernel { template: Template::ConvTranspose { groups: 1, window: win }, ..conv };
    assert_eq!(evaluate(&transposed, &[vec![1.0, 2.0, 4.0], vec![100.0, 10.0, 1.0]]), [[210.0, 421.0, 42.0]]);
    let pad = Template::Pad { before: vec![2], mode: PadMode::Reflect };
    let pad = kernel(pad, &[7], vec![f32s(dense(&[3]))]);
    assert_eq!(evaluate(&pad, &[vec![1.0, 2.0, 3.0]]), [[3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0]]);
}
