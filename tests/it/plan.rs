//! The plan's checker: good plans pass, corrupted ones are refused or harmless, and nothing panics.

mod device;
mod mutate;
mod run;

use crate::{common, samples};
use mutate::{Kind, Mutant, Random};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::error::Error;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::{
    Kernel, Operand, Pool, Prologue, Reduction, RowReduction, Template, Window, schedule,
};
use plimsoll::internals::op::{Attrs, Fact};
use plimsoll::internals::plan::check::{Span, check, dead};
use plimsoll::internals::plan::{
    Buffer, BufferIdx, Candidate, Class, ConstantPort, KernelIdx, Limits, Plan, Port, Program, Segment, SegmentIdx,
    StatePort, Step, Summary, VERSION, planned as plan_of,
};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Memory, Target};
use plimsoll::internals::{onnx, ops};
use plimsoll::{Recipe, Trace};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const F32: DType = DType::F32;

/// Puts a plan together by hand.
struct Maker(Plan);

impl Maker {
    fn new(name: &str) -> Maker {
        Maker(Plan {
            version: VERSION,
            target: Target::cpu(1),
            tuned: None,
            runs: 1,
            origin: None,
            mesh: None,
            stage: 0,
            choices: Vec::new(),
            segments: Vec::new(),
            programs: vec![Program {
                name: name.into(),
                graph: None,
                dims: Vec::new(),
                measured: 0,
                recompute: None,
                shards: Vec::new(),
                summary: Summary::default(),
                buffers: Vec::new(),
                constants: Vec::new(),
                state: Vec::new(),
                inputs: Vec::new(),
                outputs: Vec::new(),
                kernels: Vec::new(),
                steps: Vec::new(),
            }],
        })
    }

    /// The segment of a class. Inputs and outputs have their own, away from buffers that share bytes on purpose.
    fn segment(&self, class: Class) -> Option<SegmentIdx> {
        let alike = |class| if class == Class::Workspace { Class::Activation } else { class };
        self.0.programs[0].buffers.iter().find(|b| alike(b.class) == alike(class)).map(|b| b.segment)
    }

    /// A buffer in the segment of its class, at this offset.
    fn at(&mut self, offset: u64, name: &str, class: Class, dtype: DType, shape: &[usize]) -> BufferIdx {
        let own = self.segment(class);
        let plan = &mut self.0;
        let segment = own.unwrap_or_else(|| {
            plan.segments.push(Segment { class: class.segment(), memory: Memory::Device, bytes: 0 });
            SegmentIdx::new(plan.segments.len() - 1)
        });
        let shape = Shape::new(shape);
        let bytes = (shape.numel() * dtype.size()).max(4) as u64;
        plan.segments[segment].bytes = plan.segments[segment].bytes.max((offset + bytes).next_multiple_of(256));
        let port = |buffer| Port {
            packed: false,
            name: name.into(),
            dtype,
            shape: shape.clone(),
            buffer,
            indexes: Vec::new(),
            counted: Vec::new(),
            fewest: None,
        };
        let number = BufferIdx::new(plan.programs[0].buffers.len());
        match class {
            Class::Constant => {
                plan.programs[0].constants.push(ConstantPort {
                    name: name.into(),
                    dtype,
                    buffer: number,
                    packed: None,
                });
            }
            Class::State => {
                plan.programs[0].state.push(StatePort { port: port(number), update: None, given: false, count: None })
            }
            Class::Input => plan.programs[0].inputs.push(port(number)),
            Class::Output => plan.programs[0].outputs.push(port(number)),
            Class::Activation | Class::Workspace | Class::Staging | Class::Backend | Class::Reserve => {}
        }
        plan.programs[0].buffers.push(Buffer { name: name.into(), dtype, shape, segment, offset, bytes, class });
        number
    }

    /// A buffer after all others of its class.
    fn add(&mut self, name: &str, class: Class, dtype: DType, shape: &[usize]) -> BufferIdx {
        let end = self.segment(class).map_or(0, |s| self.0.segments[s].bytes);
        self.at(end, name, class, dtype, shape)
    }

    /// The update of a state.
    fn update(&mut self, name: &str, state: BufferIdx) -> BufferIdx {
        let update = Buffer { name: name.into(), ..self.0.programs[0].buffers[state].clone() };
        self.0.programs[0].buffers.push(update);
        let update = BufferIdx::new(self.0.programs[0].buffers.len() - 1);
        self.0.programs[0].state.iter_mut().filter(|s| s.port.buffer == state).for_each(|s| s.update = Some(update));
        update
    }

    /// The whole of a buffer.
    fn whole(&self, buffer: BufferIdx) -> (BufferIdx, Access) {
        (buffer, Access::contiguous(self.0.programs[0].buffers[buffer].shape.clone()))
    }

    /// A step with a kernel of its own.
    fn step(
        &mut self,
        template: Template,
        shape: &[usize],
        reads: &[(BufferIdx, Access)],
        writes: &[(BufferIdx, Access)],
        results: &[Expr],
    ) -> &mut Step {
        let plan = &mut self.0;
        let operands = |list: &[(BufferIdx, Access)]| -> Vec<Operand> {
            let operand = |(b, access): &(BufferIdx, Access)| Operand {
                dtype: plan.programs[0].buffers[*b].dtype,
                access: access.clone(),
                packed: false,
            };
            list.iter().map(operand).collect()
        };
        let buffers = |list: &[(BufferIdx, Access)]| list.iter().map(|r| r.0).collect();
        let kernel = Kernel {
            template,
            shape: Shape::new(shape),
            reads: operands(reads),
            writes: operands(writes),
            body: Body::new(results),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        let all: Vec<_> = reads.iter().chain(writes).map(|(b, _)| *b).collect();
        let own = |slot: usize| all.iter().filter(|b| **b == all[slot]).count() == 1;
        let schedule = schedule::choose(&kernel, &plan.target, &own).unwrap_or_default();
        plan.programs[0].kernels.push(Kernel { schedule, ..kernel });
        let (name, kernel) =
            (format!("step{}", plan.programs[0].steps.len()), KernelIdx::new(plan.programs[0].kernels.len() - 1));
        plan.programs[0].steps.push(Step {
            name,
            kernel,
            reads: buffers(reads),
            writes: buffers(writes),
            bind_ranges: Vec::new(),
            stream: 0,
            waits: Vec::new(),
        });
        plan.programs[0].steps.last_mut().expect("one was pushed")
    }

    fn done(mut self) -> Plan {
        let plan = &mut self.0;
        let staging = [(Memory::Upload, 512), (Memory::Download, 256)].map(|(m, n)| (m, plan.target.staged(n)));
        let staging = staging.into_iter().filter(|(_, bytes)| *bytes > 0);
        plan.segments.extend(staging.map(|(memory, bytes)| Segment { class: Class::Staging, memory, bytes }));
        mutate::repair(&mut self.0);
        self.0
    }
}

fn x(number: usize) -> Expr {
    Expr::input(number, F32)
}

/// A chain in place, and a buffer that reuses the bytes of a dead one.
fn chain() -> Plan {
    let mut m = Maker::new("chain");
    let shape = [4, 16];
    let [input, output] = [("x", Class::Input), ("y", Class::Output)].map(|(n, c)| m.add(n, c, F32, &shape));
    let a = m.at(0, "a", Class::Activation, F32, &shape);
    let b = m.at(0, "b", Class::Activation, F32, &shape);
    let c = m.at(256, "c", Class::Activation, F32, &shape);
    let d = m.at(0, "d", Class::Activation, F32, &[64, 1]);
    let full = |m: &Maker, b: BufferIdx| {
        (b, Access::contiguous(Shape::new(shape)).reshape(&m.0.programs[0].buffers[b].shape).unwrap())
    };
    let [xs, as_, bs, cs, ys] = [input, a, b, c, output].map(|b| full(&m, b));
    m.step(Template::Map, &shape, &[xs], std::slice::from_ref(&as_), &[x(0) * 2.0]);
    m.step(Template::Map, &shape, &[as_], std::slice::from_ref(&bs), &[x(0) + 1.0]);
    let turned = (b, bs.1.permute(&[1, 0]).reshape(&Shape::new([16, 4])).unwrap().permute(&[1, 0]));
    m.step(Template::Map, &shape, &[turned, bs], std::slice::from_ref(&cs), &[x(0) * x(1)]);
    let flat = |buffer| (buffer, Access::contiguous(Shape::new([64, 1])));
    m.step(Template::Map, &[64, 1], &[flat(c)], &[flat(d)], &[x(0) - 0.5]);
    let first = (d, Access::contiguous(Shape::new([1, 16])).broadcast(&Shape::new(shape)));
    m.step(Template::Map, &shape, &[cs, first], &[ys], &[x(0) + x(1)]);
    m.done()
}

/// A concatenation with parts written in place. One is computed from the other, and read before the whole is written.
fn concat() -> Plan {
    let mut m = Maker::new("concat");
    let input = m.add("x", Class::Input, F32, &[4, 6]);
    let c = m.at(256, "c", Class::Activation, F32, &[4, 10]);
    let early = m.at(0, "early", Class::Activation, F32, &[4]);
    let late = m.at(0, "late", Class::Activation, F32, &[10]);
    let [sums, y] = [("sums", 4), ("y", 10)].map(|(n, d)| m.add(n, Class::Output, F32, &[d]));
    let all = Access::contiguous(Shape::new([4, 10]));
    let (left, right) = (all.slice(1, 0, 1, 6), all.slice(1, 6, 1, 4));
    let xs = m.whole(input);
    m.step(Template::Map, &[4, 6], &[xs], &[(c, left.clone())], &[x(0) + 0.25]);
    let every_other = all.slice(1, 1, 1, 4);
    m.step(Template::Map, &[4, 4], &[(c, every_other)], &[(c, right.clone())], &[&x(0) * &x(0)]);
    let reductions = |body: Expr| vec![RowReduction { reduction: Reduction::Sum, body: Body::new(&[body]) }];
    let row = |inner, per_row| Template::Row { inner, reductions: reductions(x(0)), per_row };
    let e = m.whole(early);
    m.step(row(1, true), &[4, 6], &[(c, left)], std::slice::from_ref(&e), &[Expr::reduction(0, F32)]);
    let s = m.whole(sums);
    m.step(Template::Map, &[4], &[e], &[s], &[x(0) * 3.0]);
    let l = m.whole(late);
    let maximum = Template::Row {
        inner: 1,
        reductions: vec![RowReduction { reduction: Reduction::Max, body: Body::new(&[x(0)]) }],
        per_row: true,
    };
    m.step(maximum, &[10, 4], &[(c, all.permute(&[1, 0]))], std::slice::from_ref(&l), &[Expr::reduction(0, F32)]);
    let y = m.whole(y);
    m.step(Template::Map, &[10], &[l], &[y], &[x(0) - 2.0]);
    m.done()
}

/// A product with a workspace, a bias and a residual that it overwrites, then a softmax in place.
fn matmul() -> Plan {
    let mut m = Maker::new("matmul");
    // The CPU's kernels would need a larger workspace.
    m.0.target = Target::wgpu();
    let input = m.add("x", Class::Input, F32, &[4, 8]);
    let [w, bias] = [("w", &[8usize, 16][..]), ("bias", &[16][..])].map(|(n, s)| m.add(n, Class::Constant, F32, s));
    let r = m.at(0, "residual", Class::Activation, F32, &[4, 16]);
    let p = m.at(0, "product", Class::Activation, F32, &[4, 16]);
    let scratch = m.at(256, "scratch", Class::Workspace, DType::U8, &[256]);
    let soft = m.at(0, "soft", Class::Activation, F32, &[4, 16]);
    let y = m.add("y", Class::Output, F32, &[16, 4]);
    let [xs, ws, rs, ps, ss] = [input, w, r, p, soft].map(|b| m.whole(b));
    let shape = Shape::new([4, 16]);
    let half = Access { shape: shape.clone(), strides: vec![8, 0], offset: 3 };
    m.step(Template::Map, &shape, &[(input, half)], std::slice::from_ref(&rs), &[x(0) + 1.0]);
    let bias = (bias, m.whole(bias).1.broadcast(&shape));
    let sum = &(&x(0) + &x(1)) + &x(2);
    m.step(Template::MatMul, &shape, &[xs, ws, bias, rs], std::slice::from_ref(&ps), &[sum]).writes.push(scratch);
    m.0.programs[0].kernels.last_mut().expect("one was added").workspace = 256;
    let largest = RowReduction { reduction: Reduction::Max, body: Body::new(&[x(0)]) };
    let shifted = &x(0) - &Expr::reduction(0, F32);
    let total = RowReduction { reduction: Reduction::Sum, body: Body::new(&[shifted.exp()]) };
    let softmax = Template::Row { inner: 1, reductions: vec![largest, total], per_row: false };
    m.step(softmax, &shape, &[ps], std::slice::from_ref(&ss), &[&shifted.exp() / &Expr::reduction(1, F32)]);
    let turned = (soft, ss.1.permute(&[1, 0]));
    let y = m.whole(y);
    m.step(Template::Map, &[16, 4], std::slice::from_ref(&turned), &[y], &[x(0)]);
    // A product of square matrices: core operands may not be overwritten, even if the accesses are equal.
    let [gram, square] = [("gram", 512), ("square", 256)].map(|(n, at)| m.at(at, n, Class::Activation, F32, &[4, 4]));
    let [gs, qs] = [gram, square].map(|b| m.whole(b));
    m.step(Template::MatMul, &[4, 4], &[ss, turned], std::slice::from_ref(&gs), &[x(0)]);
    m.step(Template::MatMul, &[4, 4], &[gs.clone(), gs], std::slice::from_ref(&qs), &[x(0)]);
    let z = m.add("z", Class::Output, F32, &[4, 4]);
    let z = m.whole(z);
    m.step(Template::Map, &[4, 4], &[qs], &[z], &[x(0)]);
    m.done()
}

/// A product of two operands with prologues, one of which reads an operand that looks like the result. It may only overwrite its residual.
fn behind() -> Plan {
    let mut m = Maker::new("behind");
    m.0.target = Target::wgpu();
    let input = m.add("x", Class::Input, F32, &[4, 4]);
    let gate = m.at(0, "gate", Class::Activation, F32, &[4, 4]);
    let residual = m.at(256, "residual", Class::Activation, F32, &[4, 4]);
    let product = m.at(256, "product", Class::Activation, F32, &[4, 4]);
    let y = m.add("y", Class::Output, F32, &[4, 4]);
    let [xs, gs, rs, ps, ys] = [input, gate, residual, product, y].map(|b| m.whole(b));
    m.step(Template::Map, &[4, 4], std::slice::from_ref(&xs), std::slice::from_ref(&gs), &[x(0) * 2.0]);
    m.step(Template::Map, &[4, 4], std::slice::from_ref(&xs), std::slice::from_ref(&rs), &[x(0) - 1.0]);
    let shape = Shape::new([4, 4]);
    let first = (input, Access { shape: shape.clone(), strides: vec![0, 1], offset: 8 });
    let turned = (gate, gs.1.permute(&[1, 0]));
    let reads = [xs.clone(), turned, rs, gs.clone(), first];
    m.step(Template::MatMul, &shape, &reads, std::slice::from_ref(&ps), &[x(0) + x(1)]);
    let behind = |operand, body| Prologue { operand, reads: 1, body: Body::new(&[body]) };
    m.0.programs[0].kernels.last_mut().expect("one was added").prologues =
        vec![behind(0, (x(0) * x(1)).abs()), behind(1, x(0) + x(1))];
    m.step(Template::Map, &shape, &[ps, gs], &[ys], &[x(0) - x(1)]);
    m.done()
}

/// Gathered rows, integers and truth values, two results at once, and state that is updated in place.
fn gather() -> Plan {
    let mut m = Maker::new("gather");
    let table = m.add("table", Class::Constant, F32, &[5, 8]);
    let ids = m.add("ids", Class::Input, DType::I64, &[3]);
    let total = m.add("total", Class::State, F32, &[3, 8]);
    let sum = m.update("sum", total);
    let g = m.at(0, "rows", Class::Activation, F32, &[3, 8]);
    let mask = m.at(256, "mask", Class::Activation, DType::Bool, &[3, 8]);
    let size = m.at(512, "size", Class::Activation, F32, &[3, 8]);
    let odd = m.at(256, "odd", Class::Activation, DType::I64, &[3]);
    let y = m.add("y", Class::Output, F32, &[3, 8]);
    let counts = m.add("counts", Class::Output, DType::I64, &[3]);
    let shape = Shape::new([3, 8]);
    let [gs, ms, zs, old, ts, ys, is, os, cs] = [g, mask, size, total, sum, y, ids, odd, counts].map(|b| m.whole(b));
    let row = (table, Access { shape: shape.clone(), strides: vec![0, 1], offset: 0 });
    let per_row = (ids, m.whole(ids).1.reshape(&Shape::new([3, 1])).unwrap().broadcast(&shape));
    let template = Template::Gather { strides: vec![8], extents: vec![5] };
    m.step(template, &shape, &[row, per_row], std::slice::from_ref(&gs), &[x(0) * 0.5]);
    let results = [x(0).lt(&x(0).like(0.0)), x(0).abs()];
    m.step(Template::Map, &shape, std::slice::from_ref(&gs), &[ms.clone(), zs.clone()], &results);
    let chosen = Expr::input(0, DType::Bool).select(&x(1), &x(2));
    m.step(Template::Map, &shape, &[ms, gs, old], std::slice::from_ref(&ts), &[&chosen + &x(2)]);
    let i = Expr::input(0, DType::I64);
    m.step(Template::Map, &[3], std::slice::from_ref(&is), std::slice::from_ref(&os), &[&i * &Expr::index(0)]);
    let count = Expr::reduction(0, DType::I64) + Expr::input(1, DType::I64);
    let reductions = vec![RowReduction { reduction: Reduction::Sum, body: Body::new(&[x(0).cast(DType::I64)]) }];
    let still = (odd, os.1.reshape(&Shape::new([3, 1])).unwrap().broadcast(&shape));
    m.step(Template::Row { inner: 1, reductions, per_row: true }, &shape, &[zs.clone(), still], &[cs], &[count]);
    let scaled = m.at(0, "scaled", Class::Activation, F32, &shape);
    // It has as many elements as the operands that it selects from, but smaller ones, so it must not overwrite them.
    let sign = m.at(256, "sign", Class::Activation, DType::Bool, &shape);
    m.0.programs[0].buffers[sign].bytes = 96;
    let [ss, bs] = [scaled, sign].map(|b| m.whole(b));
    m.step(Template::Map, &shape, &[ts.clone(), zs], std::slice::from_ref(&ss), &[x(0) * x(1)]);
    m.step(Template::Map, &shape, &[ss], std::slice::from_ref(&bs), &[x(0).lt(&x(0).like(0.25))]);
    m.step(Template::Map, &shape, &[bs, ts], &[ys], &[Expr::input(0, DType::Bool).select(&x(1), &-x(1))]);
    // An output with a part that is updated in place, and with two parts updated at once.
    let ring = m.add("ring", Class::Output, F32, &[17]);
    let first = (table, Access { shape: Shape::new([17]), strides: vec![1], offset: 5 });
    let all = m.whole(ring);
    m.step(Template::Map, &[17], &[first], &[all], &[x(0) - 0.5]);
    let part = |start, len| (ring, Access { shape: Shape::new([len]), strides: vec![1], offset: start });
    m.step(Template::Map, &[16], &[part(0, 16)], &[part(0, 16)], &[x(0) + 1.0]);
    m.step(Template::Map, &[4], &[part(2, 4)], &[part(2, 4), part(8, 4)], &[x(0) * 0.5, x(0) - 1.0]);
    let some = (sum, Access { shape: Shape::new([4]), strides: vec![1], offset: 3 });
    m.step(Template::Map, &[4], &[some], &[part(2, 4), part(8, 4)], &[x(0) * 0.5, x(0) - 1.0]);
    m.done()
}

/// Windows and padding, with a tensor without elements in between.
fn windows() -> Plan {
    let mut m = Maker::new("windows");
    m.0.target = Target::wgpu();
    let window = |kernel, strides, pads| Window { kernel, strides, dilations: [1, 1, 1], pads };
    let input = m.add("x", Class::Input, F32, &[1, 2, 1, 4, 4]);
    let w = m.add("w", Class::Constant, F32, &[2, 1, 1, 3, 3]);
    let c = m.at(0, "conv", Class::Activation, F32, &[1, 2, 1, 4, 4]);
    let p = m.at(256, "pool", Class::Activation, F32, &[1, 2, 1, 2, 2]);
    let none = m.at(512, "none", Class::Activation, F32, &[0, 4]);
    let wide = m.at(0, "wide", Class::Activation, F32, &[8, 3]);
    let y = m.add("y", Class::Output, F32, &[8, 3]);
    let [xs, ws, cs, ps, ns, wides, ys] = [input, w, c, p, none, wide, y].map(|b| m.whole(b));
    let conv = Template::Conv { groups: 2, window: window([1, 3, 3], [1, 1, 1], [0, 1, 1]), padding: 0 };
    m.step(conv, &[1, 2, 1, 4, 4], &[xs.clone(), ws, xs], std::slice::from_ref(&cs), &[&x(0) + &x(1)]);
    let pool = Template::Pool { window: window([1, 2, 2], [1, 2, 2], [0, 0, 0]), pool: Pool::Max };
    m.step(pool, &[1, 2, 1, 2, 2], &[cs], std::slice::from_ref(&ps), &[x(0)]);
    let nothing = (p, Access { shape: Shape::new([0, 4]), strides: vec![4, 1], offset: 0 });
    m.step(Template::Map, &[0, 4], &[nothing], std::slice::from_ref(&ns), &[x(0)]);
    let pad =
        Template::Pad { before: vec![0, 1], mode: plimsoll::internals::kernel::PadMode::Constant(f64::NEG_INFINITY) };
    let flat = (p, Access { shape: Shape::new([8, 1]), strides: vec![1, 1], offset: 0 });
    m.step(pad, &[8, 3], &[flat], std::slice::from_ref(&wides), &[x(0)]);
    let sum = RowReduction { reduction: Reduction::Sum, body: Body::new(&[x(0)]) };
    let empty = (none, Access { shape: Shape::new([8, 3, 0]), strides: vec![0, 0, 1], offset: 0 });
    let still = (wide, Access { shape: Shape::new([8, 3, 0]), strides: vec![3, 1, 0], offset: 0 });
    let template = Template::Row { inner: 1, reductions: vec![sum], per_row: true };
    m.step(template, &[8, 3, 0], &[empty, still], &[ys], &[&Expr::reduction(0, F32) + &x(1)]);
    m.done()
}

/// Plans that the planner makes, from text.
fn planned() -> Vec<Plan> {
    const TEXTS: [&str; 4] = [
        r#"<ir_version: 8, opset_import: ["" : 17]>
        normed (float[2, 3, 4] x, float[4] s) => (float[2, 3, 4] y) <float[4, 4] w = {1,2,3,4, 0,1,0,1, 2,0,2,0, 1,1,1,1}> {
            a = Mul (x, s)
            b = Relu (a)
            c = MatMul (b, w)
            d = Softmax <axis = 2> (c)
            e = Sub (d, s)
            f = MatMul (e, w)
            y = Add (f, c)
        }"#,
        r#"<ir_version: 8, opset_import: ["" : 17]>
        dense (float[2, 3, 4] x) => (float[2, 9, 4] y, float[2, 4] m) <float[4, 4] w = {1,2,3,4, 0,1,0,1, 2,0,2,0, 1,1,1,1}> {
            a = Relu (x)
            b = MatMul (a, w)
            c = Concat <axis = 1> (a, b)
            d = Exp (c)
            e = MatMul (d, w)
            f = Softmax <axis = 2> (b)
            y = Concat <axis = 1> (f, e)
            m = ReduceMax <axes = [1], keepdims = 0> (e)
        }"#,
        r#"<ir_version: 8, opset_import: ["" : 17]>
        tangle (float[4, 6] x, int64[4] i) => (float[4, 6] y, float[6, 4] z) {
            t = Transpose <perm = [1, 0]> (x)
            a, b = Split <axis = 0> (t)
            c = Concat <axis = 0> (b, a)
            d = Sigmoid (c)
            p = MatMul (x, d)
            g = Gather <axis = 1> (p, i)
            h = MatMul (g, x)
            y = Add (h, x)
            z = Mul (d, t)
        }"#,
        r#"<ir_version: 8, opset_import: ["" : 17]>
        image (float[1, 2, 4, 4] x) => (float[1, 4] y, float[1, 2, 2, 2] z)
        <float[2, 2, 3, 3] w = {1,0,1,0,2,0,1,0,1, 2,1,0,1,2,1,0,1,2, 0,0,1,1,2,1,1,0,0, 1,1,1,0,1,0,2,2,2}> {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu (a)
            c = Concat <axis = 1> (b, x)
            y = ReduceMean <axes = [2, 3], keepdims = 0> (c)
            z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
        }"#,
    ];
    let mut plans = Vec::new();
    // With small bindings, if the graph can be cut to fit: steps then bind ranges of their buffers.
    let small = |most: u64| Target { alignment: 16, max_binding: most, ..Target::wgpu() };
    let small = [Some(small(64)), Some(small(96)), None, Some(small(160))];
    for (text, small) in TEXTS.into_iter().zip(small) {
        let model = onnx::Model::new(onnx::text::parse(text, Path::new("text")).expect("it parses"));
        for (target, fuse) in
            [(Target::cpu(1), true), (Target::wgpu(), false)].into_iter().chain(small.map(|t| (t, true)))
        {
            let graph = onnx::import(&model, &[]).expect("it is a graph");
            let graph = Recipe { fuse, ..Recipe::default() }.whole(graph, &target).expect("passes run");
            let mut plan = plan_of(&graph, &target, &Limits { memory: None }).expect("it can be planned");
            let cut = plan.programs[0].steps.iter().filter(|step| !step.bind_ranges.is_empty()).count();
            assert_eq!(cut > 1, target.alignment == 16, "{} cuts {cut} steps", plan.programs[0].name);
            plan.programs[0].name = format!("{} on {}, {}", plan.programs[0].name, target.name, target.max_binding);
            plans.push(plan);
        }
    }
    plans
}

/// Plans with states: one is updated in place, one behind its readers; two are exchanged, and one is needed after its update.
fn stateful() -> Vec<Plan> {
    let plans = [Target::cpu(1), Target { streams: 4, ..Target::wgpu() }].map(|target| {
        let g = Trace::new(&format!("stateful on {}, {} streams", target.name, target.streams));
        let x = g.input("x", F32, [4, 4]);
        let state = |name: &str, first: f64| g.state(name, plimsoll::Tensor::from_f64(F32, [4, 4], &[first; 16]));
        let (mean, product, one, other, late) =
            (state("mean", 0.5), state("product", 1.0), state("one", 1.0), state("other", 2.0), state("late", 3.0));
        g.update(mean, mean * 0.5 + x * 0.5);
        let next = x.matmul(one);
        g.update(product, next);
        g.output("y", product.matmul(x) - next);
        g.update(one, other);
        g.update(other, one);
        let (first, second) = (x + 1.0, x.matmul(late));
        g.update(late, first.matmul(first));
        g.output("z", first.matmul(first).matmul(late) + second);
        let graph = Recipe::default().whole(g.finish().expect("it is sound"), &target).expect("passes run");
        plan_of(&graph, &target, &Limits { memory: None }).expect("it can be planned")
    });
    plans.to_vec()
}

/// Plans with scatters: over a state, in one step and in two, over data that dies, and over a copy of data that is read later.
fn scattering() -> Vec<Plan> {
    let plans = [Target::cpu(1), Target { streams: 4, ..Target::wgpu() }].map(|target| {
        let g = Trace::new(&format!("scattering on {}, {} streams", target.name, target.streams));
        let (x, at) = (g.input("x", F32, [3, 4]), g.input("at", DType::I64, [3, 1]));
        let state = |name: &str| g.state(name, plimsoll::Tensor::from_f64(F32, [4, 4], &[0.5; 16]));
        let (once, twice) = (state("once"), state("twice"));
        let write = |data, rows| g.op("ScatterND", &[Some(data), Some(at), Some(rows)], Attrs::new());
        g.output("before", once.reduce_sum(&[0], false));
        let written = write(once, x);
        g.update(once, written);
        g.output("behind", written.reduce_sum(&[0], false));
        let first = write(twice, x * 2.0);
        g.output("between", first.reduce_sum(&[0], false));
        g.update(twice, write(first, x + 1.0));
        let (dies, lives) = (x.tanh(), x.abs());
        g.output("over", write(dies, x));
        g.output("late", write(lives, x) * lives);
        let graph = Recipe::default().whole(g.finish().expect("it is sound"), &target).expect("passes run");
        plan_of(&graph, &target, &Limits { memory: None }).expect("it can be planned")
    });
    plans.to_vec()
}

/// Good plans, small enough to be run many times.
fn seeds() -> Vec<Plan> {
    let mut seeds = vec![chain(), concat(), matmul(), behind(), gather(), windows()];
    seeds.extend(planned());
    seeds.extend(stateful());
    seeds.extend(scattering());
    seeds
}

#[test]
fn good_plans_pass() {
    for seed in seeds() {
        check(&seed).unwrap_or_else(|e| panic!("{}: {e}", seed.programs[0].name));
        let again = Plan::from_json(&seed.to_json(), Path::new("seed.json")).expect("it was written by itself");
        assert_eq!(again, seed);
        let ideal = run::ideal(&seed).expect("seeds are small").expect("every element is written before it is read");
        assert!(
            ideal.iter().flatten().any(|&bits| f64::from_bits(bits) != 0.0),
            "{} computes nothing",
            seed.programs[0].name
        );
        for backwards in [false, true] {
            assert_eq!(run::shared(&seed, 1, backwards), ideal, "{}", seed.programs[0].name);
        }
    }
    assert_eq!(chain().programs[0].summary.lower_bound, 768, "in place counts once");
}

#[test]
fn what_is_dead_follows_from_the_steps() {
    let plan = chain();
    let [x, y, arena] = [Class::Input, Class::Output, Class::Activation]
        .map(|class| plan.programs[0].buffers.iter().find(|b| b.class == class).expect("it has one").segment);
    let span = |segment, offset, bytes| Span { segment, offset, bytes };
    let mut all = vec![span(y, 0, 256), span(arena, 0, 512)];
    all.sort_by_key(|s| s.segment);
    // The input dies with its only reader. A result in place kills nothing. The square's operand dies, and at the end the last step's operands.
    let expected = [all, vec![span(x, 0, 256)], vec![], vec![span(arena, 0, 256)], vec![]];
    let ends = vec![span(arena, 256, 256), span(arena, 0, 256)];
    assert_eq!(dead(plan.first()), [&expected[..], &[ends]].concat());

    // The last buffer overwrites the one before it, which then has lost its bytes; and a buffer that nothing has written.
    let mut faulty = plan.clone();
    faulty.programs[0].buffers[5].offset = 256;
    assert_eq!(dead(faulty.first())[3], [span(arena, 0, 256)]);
    assert_eq!(dead(faulty.first())[4], [span(arena, 256, 256)]);
    let mut early = plan;
    early.programs[0].steps.swap(0, 1);
    assert!(dead(early.first())[0].contains(&span(arena, 0, 256)));
}

#[test]
fn what_the_planner_makes_passes() {
    let mut count = 0;
    for sample in samples::samples() {
        for (target, fuse) in [(Target::cpu(2), false), (Target::wgpu(), false), (Target::wgpu(), true)] {
            let mut graph = Graph::new(sample.op);
            let mut input = |(i, input): (usize, &Option<samples::Input>)| {
                let input = input.as_ref()?;
                Some(graph.input(format!("x{i}"), Fact::new(input.dtype, input.shape.clone())))
            };
            let inputs: Vec<_> = sample.inputs.iter().enumerate().map(&mut input).collect();
            let op = ops::find(sample.op).expect("samples name rows");
            let Ok(node) = graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]) else { continue };
            for port in 0..graph.node(node).outputs.len() {
                graph.output(format!("y{port}"), node.output(port));
            }
            let recipe = Recipe { fuse, ..Recipe::default() };
            let Ok(graph) = recipe.whole(graph, &target) else { continue };
            match plan_of(&graph, &target, &Limits { memory: None }) {
                Err(Error::Plan { what: e, .. }) => panic!("{} {:?} on {}: {e}", sample.op, sample.attrs, target.name),
                result => count += usize::from(result.is_ok()),
            }
        }
    }
    assert!(count > 500, "{count} plans");
}

/// The results of mutants.
#[derive(Debug, Default)]
struct Tally {
    refused: usize,
    equal: usize,
    changed: usize,
    unjudged: usize,
}

/// Each mutant is refused, or computes the same as with separate memory for each buffer; if only the layout changed, the same as the seed.
fn judge(seed: &Plan, results: &run::Results, mutant: &Mutant, tally: &mut Tally) {
    let Mutant { kind, what, plan } = mutant;
    let verdict = catch_unwind(AssertUnwindSafe(|| check(plan)));
    let verdict = verdict.unwrap_or_else(|_| panic!("{}: {what}: the checker panics", seed.programs[0].name));
    if let Err(error) = verdict {
        assert!(matches!(error, Error::Plan { .. }), "{error}");
        tally.refused += 1;
        return;
    }
    let Some(ideal) = run::ideal(plan) else {
        tally.unjudged += 1;
        return;
    };
    let ideal =
        ideal.unwrap_or_else(|b| panic!("{}: {what}: reads what nothing wrote in buffer {b}", seed.programs[0].name));
    for (nonsense, backwards) in [(1, false), (2, true)] {
        let found = run::shared(plan, nonsense, backwards);
        assert!(found == ideal, "{}: {what}: bytes are mixed up", seed.programs[0].name);
    }
    assert!(*kind == Kind::Meaning || ideal == *results, "{}: {what}: computes something else", seed.programs[0].name);
    if ideal == *results { tally.equal += 1 } else { tally.changed += 1 }
}

fn results(seed: &Plan) -> run::Results {
    run::ideal(seed).expect("seeds are small").expect("seeds are good")
}

#[test]
fn corrupted_plans_are_refused_or_right() {
    let mut all = Tally::default();
    for seed in seeds() {
        let results = results(&seed);
        let mut tally = Tally::default();
        mutate::mutants(&seed).iter().for_each(|mutant| judge(&seed, &results, mutant, &mut tally));
        eprintln!("{}: {tally:?}", seed.programs[0].name);
        assert!(tally.refused > 500 && tally.equal > 20 && tally.changed > 20, "{}: {tally:?}", seed.programs[0].name);
        all.unjudged += tally.unjudged;
    }
    assert!(all.unjudged < 100, "{all:?}");
}

#[test]
fn plans_corrupted_twice_are_refused_or_right() {
    let mut random = Random(7);
    let mut tally = Tally::default();
    for seed in seeds() {
        let results = results(&seed);
        // A mutant that was accepted is worth corrupting again; one that is refused anyway is not.
        let (good, bad): (Vec<_>, Vec<_>) = mutate::mutants(&seed).into_iter().partition(|m| check(&m.plan).is_ok());
        for round in 0..12 {
            let one = random.pick(if round % 4 < 3 { &good } else { &bad });
            let twice = mutate::compound(one, &mut random, 60);
            twice.iter().for_each(|mutant| judge(&seed, &results, mutant, &mut tally));
        }
    }
    eprintln!("{tally:?}");
    assert!(tally.refused > 5000 && tally.equal > 50 && tally.changed > 100, "{tally:?}");
}

/// What the checker lets through runs on the CPU as it should: nothing outside of its memory changes, nothing dead is read, and where only the
/// layout changed, the results are the seed's.
#[test]
fn accepted_mutants_stay_within_their_memory() {
    let mut early = chain();
    early.programs[0].steps.swap(0, 1);
    assert!(matches!(device::guarded(&early), Some(Err(_))), "what is read before it is written shows");
    let (mut accepted, mut ran, mut alike) = (0, 0, 0);
    for seed in seeds() {
        let Some(expected) = device::guarded(&seed) else { continue };
        let expected = expected.unwrap_or_else(|what| panic!("{}: {what}", seed.programs[0].name));
        for Mutant { kind, what, plan } in
            mutate::mutants(&seed).into_iter().filter(|mutant| check(&mutant.plan).is_ok())
        {
            accepted += 1;
            if run::ideal(&plan).is_none() {
                continue;
            }
            let Some(found) = device::guarded(&plan) else { continue };
            let found = found.unwrap_or_else(|error| panic!("{}: {what}: {error}", seed.programs[0].name));
            ran += 1;
            if kind == Kind::Layout {
                assert!(found == expected, "{}: {what}: computes something else", seed.programs[0].name);
                alike += 1;
            }
        }
    }
    eprintln!(
        "{accepted} mutants of the CPU's plans are accepted, {ran} ran, {alike} of them with another layout alone"
    );
    assert!(ran > 500 && alike > 100, "of {accepted} mutants, {ran} ran, {alike} with another layout alone");
}

/// Puts something else in place of one value of a JSON document.
fn edit(value: &mut serde_json::Value, random: &mut Random) {
    use serde_json::{Value, json};
    let size = |v: &Value| match v {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    let mut at = value;
    while size(at) > 0 && random.below(8) > 0 {
        let n = random.below(size(at));
        at = match at {
            Value::Array(list) => &mut list[n],
            Value::Object(map) => map.values_mut().nth(n).expect("it has that many"),
            _ => unreachable!("only lists and maps have a size"),
        };
    }
    let number = at.as_i64();
    let n = random.below(100);
    match (at, number) {
        (Value::Array(list), _) if !list.is_empty() && n < 90 => {
            let i = random.below(list.len());
            match n % 4 {
                0 => drop(list.remove(i)),
                1 => list.insert(i, list[i].clone()),
                2 => list.rotate_left(i),
                _ => list.truncate(i),
            }
        }
        (at, Some(number)) if n < 90 => {
            const VALUES: [i64; 12] = [0, 1, 2, 3, 5, 16, 255, 256, 1 << 32, 1 << 45, i64::MAX, i64::MIN];
            let near = [number.wrapping_sub(1), number.wrapping_add(1), number.wrapping_mul(2), number.wrapping_neg()];
            *at = if n < 50 { json!(*random.pick(&near)) } else { json!(*random.pick(&VALUES)) };
            if n == 89 {
                *at = json!(u64::MAX);
            }
        }
        (at, _) => {
            let values =
                [json!(null), json!("x"), json!(-1), json!(u64::MAX), json!(0.5), json!([]), json!({}), json!("map")];
            *at = random.pick(&values).clone();
        }
    }
}

#[test]
fn edited_files_never_panic() {
    let mut random = Random(3);
    let mut tally = Tally::default();
    for seed in seeds() {
        let document: serde_json::Value = serde_json::from_str(&seed.to_json()).expect("plans are JSON");
        let results = results(&seed);
        for _ in 0..1500 {
            let mut edited = document.clone();
            for _ in 0..1 + random.below(3) {
                edit(&mut edited, &mut random);
            }
            let text = edited.to_string();
            let parsed = catch_unwind(AssertUnwindSafe(|| Plan::from_json(&text, Path::new("edited.json"))));
            match parsed.unwrap_or_else(|_| panic!("{}: panics on {text}", seed.programs[0].name)) {
                Ok(plan) => judge(&seed, &results, &Mutant { kind: Kind::Meaning, what: text, plan }, &mut tally),
                Err(_) => tally.refused += 1,
            }
        }
    }
    eprintln!("{tally:?}");
    assert!(tally.refused > 5000 && tally.equal > 100, "{tally:?}");
}

#[test]
fn messages_name_what_is_wrong() {
    let refused = |change: fn(&mut Plan)| {
        let mut plan = concat();
        change(&mut plan);
        check(&plan).expect_err("it was corrupted").to_string()
    };
    assert_eq!(
        refused(|p| p.programs[0].steps.swap(0, 1)),
        "plan: step 0 'step1' (kernel 1, map): reads buffer 1 'c': bytes that were not written, or were overwritten by another buffer"
    );
    assert_eq!(
        refused(|p| p.programs[0].summary.lower_bound += 1),
        "plan: summary: lower_bound: expected 768, found 769"
    );
    assert_eq!(
        refused(|p| p.programs[0].buffers[1].offset = 200),
        "plan: buffer 1 'c': expected an offset that is a multiple of 256, found 200"
    );
    assert_eq!(
        refused(|p| p.programs[0].kernels[1].reads[0].access.offset = 3),
        "plan: step 1 'step1' (kernel 1, map): reads buffer 1 'c' while it writes buffer 1 'c' at the same bytes"
    );
    assert_eq!(
        refused(|p| p.programs[0].kernels[2].body.results[0] = 4),
        "plan: kernel 2 (row): a result of instruction 4"
    );
}

/// Not every JSON reader gets the last bit of a number right.
#[test]
fn numbers_come_back_exactly() {
    let mut plan = chain();
    plan.programs[0].kernels[0].body = Body::new(&[x(0) * x(0).like(-0.9368234872817993)]);
    let back = Plan::from_json(&plan.to_json(), Path::new("plan.json")).expect("its own JSON");
    assert!(back == plan, "{:?}", back.programs[0].kernels[0].body);
}

/// Rules whose violation the results of one run cannot show.
#[test]
fn rules_that_only_devices_would_notice() {
    let refused = |seed: &Plan, change: &dyn Fn(&mut Plan), why: &str| {
        let mut plan = seed.clone();
        change(&mut plan);
        mutate::repair(&mut plan);
        let error = check(&plan).expect_err(why).to_string();
        assert!(error.contains(why), "expected '{why}', found '{error}'");
    };
    let (concat, matmul, windows) = (concat(), matmul(), windows());
    let buffer = |p: &Plan, name: &str| {
        BufferIdx::all(&p.programs[0].buffers)
            .find(|&b| p.programs[0].buffers[b].name == name)
            .expect("a buffer of that name")
    };
    refused(&matmul, &|p| p.programs[0].steps[0].writes[0] = buffer(p, "x"), "a buffer of class input");
    refused(&matmul, &|p| p.programs[0].steps[1].writes[0] = buffer(p, "w"), "a buffer of class constant");
    let gather = gather();
    let own = |p: &mut Plan| {
        let (own, update) = (buffer(p, "total"), buffer(p, "sum"));
        p.programs[0]
            .steps
            .iter_mut()
            .flat_map(|step| &mut step.writes)
            .filter(|b| **b == update)
            .for_each(|b| *b = own);
    };
    refused(&gather, &own, "writes buffer 2 'total': a buffer of class state");
    refused(&gather, &|p| p.programs[0].state[0].update = None, "'sum': expected the bytes of a state that is updated");
    let scatter = scattering().swap_remove(0);
    let step = |p: &Plan, state: &str| {
        let data = buffer(p, state);
        let scatters = |s: &Step| p.programs[0].kernels[s.kernel].is_in_place() && s.reads[0] == data;
        p.programs[0].steps.iter().position(scatters).expect("it is scattered")
    };
    // The result somewhere else, and the data somewhere else.
    let apart = |p: &mut Plan| {
        let at = step(p, "once");
        p.programs[0].steps[at].reads[0] = buffer(p, "twice");
    };
    refused(&scatter, &apart, "expected the place of buffer");
    let over = scattered(&scatter);
    refused(&scatter, &|p| p.programs[0].buffers[over].offset += 1 << 12, "expected the place of buffer");
    // A reader of the old elements behind the scatter.
    let late = |p: &mut Plan| {
        let (at, old) = (step(p, "once"), buffer(p, "once"));
        let reader = p.programs[0].steps.iter().position(|s| s.reads == [old]).expect("an output shows it");
        p.programs[0].steps[reader..=at].rotate_left(1);
    };
    refused(&scatter, &late, "'once': bytes that were not written, or were overwritten by another buffer");
    // A scatter alone does not make all elements.
    let unread = |p: &mut Plan| {
        let first = p.programs[0]
            .steps
            .iter()
            .position(|s| s.writes.contains(&p.programs[0].steps[made_by(p, over)].reads[0]))
            .expect("it is made");
        p.programs[0].steps.remove(first);
    };
    refused(&scatter, &unread, "bytes that were not written");
    refused(&matmul, &|p| p.programs[0].steps[1].writes[1] = buffer(p, "residual"), "a buffer of class activation");
    refused(&matmul, &|p| p.programs[0].steps[1].writes[0] = buffer(p, "scratch"), "expected f32, found u8");
    let numbers = |p: &mut Plan| {
        let scratch = buffer(p, "scratch");
        (p.programs[0].buffers[scratch].dtype, p.programs[0].buffers[scratch].shape) = (F32, [4, 16].into());
        p.programs[0].steps[0].writes[0] = scratch;
    };
    refused(&matmul, &numbers, "a buffer of class workspace");
    refused(&matmul, &|p| p.programs[0].kernels[1].workspace = 257, "expected at least 257 bytes, found 256");
    refused(&matmul, &|p| p.programs[0].constants[1].buffer = p.programs[0].constants[0].buffer, "filled twice");
    refused(
        &matmul,
        &|p| p.programs[0].constants[0].packed = Some((KernelIdx::new(1), 1)),
        "operand 1 of kernel 1 is not packed",
    );
    refused(&matmul, &|p| p.programs[0].kernels[1].reads[3].packed = true, "it has no packed layout");
    refused(&matmul, &|p| p.programs[0].outputs[0].shape.push(2), "expected [16,4,2], found [16,4]");
    refused(&matmul, &|p| p.programs[0].outputs[0].dtype = DType::I32, "expected what stores i32, found f32");
    refused(&matmul, &|p| p.programs[0].outputs[1].name = "y".into(), "named twice");
    refused(&matmul, &|p| p.target.max_bindings = 4, "expected at most 4 bindings, found 5");
    refused(&matmul, &|p| p.target.max_binding = 256, "expected at most 256 bytes, found 512");
    refused(&matmul, &|p| p.target.max_segment = 256, "expected at most 256 bytes, found");
    refused(&matmul, &|p| p.programs[0].outputs.clear(), "it has no outputs");
    let constants = matmul.segments.iter().position(|s| s.class == Class::Constant).expect("it has constants");
    for segment in [0, constants] {
        refused(&matmul, &|p| p.segments[segment].bytes += 256, "where its last buffer ends, found");
    }
    let order = |bound: u64, peak: u64| vec![Candidate { name: "file".into(), bound, peak }];
    let arena = matmul.class_bytes(Class::Activation);
    let mut seed = matmul.clone();
    mutate::repair(&mut seed);
    seed.programs[0].summary.orders = order(arena + 1, arena);
    let error = check(&seed).expect_err("a bound above the peak").to_string();
    assert!(error.contains(&format!("'file' has a bound of {}, and a peak of {arena}", arena + 1)), "{error}");
    let staging = |memory| matmul.segments.iter().position(|s| s.memory == memory).expect("it stages");
    for (memory, moved) in [(Memory::Upload, 704), (Memory::Download, 320)] {
        let slot = staging(memory);
        let lacks = format!("{moved} bytes to stage: expected one segment in {memory:?} memory, found");
        refused(&matmul, &|p| _ = p.segments.remove(slot), &format!("{lacks} 0"));
        refused(&matmul, &|p| p.segments.push(p.segments[slot].clone()), &format!("{lacks} 2"));
        refused(&matmul, &|p| p.segments[slot].memory = Memory::Device, "of class staging: in Device");
        refused(&matmul, &|p| p.segments[slot].bytes = 0, "expected a multiple of 256 up to");
        refused(&matmul, &|p| p.segments[slot].bytes -= 4, "expected a multiple of 256 up to");
    }
    refused(&matmul, &|p| p.segments[0].memory = Memory::Upload, "in Upload memory");
    let residual = buffer(&matmul, "residual");
    refused(&matmul, &|p| p.programs[0].buffers[residual].class = Class::Staging, "a buffer of class staging");
    refused(&matmul, &|p| p.target.staging = 0, "of class staging: expected a multiple of 256 up to 0");
    refused(&matmul, &|p| p.target.staging = 100, "staging: expected a multiple of 256, found 100");
    refused(&concat, &|p| p.segments[0].memory = Memory::Download, "in Download memory");
    refused(&matmul, &|p| p.programs[0].kernels[1].shape.insert(0, 2), "expected");
    refused(&concat, &|p| p.programs[0].kernels[0].writes[0].access.strides[0] = 5, "elements share addresses");
    refused(&windows, &|p| p.programs[0].kernels[0].template = Template::Map, "expected extents");
    refused(&concat, &|p| p.programs[0].kernels[2].body = Body::new(&[x(0)]), "input 0 moves along the row");
    let conv = |change: fn(&mut usize, &mut Window)| {
        move |p: &mut Plan| match &mut p.programs[0].kernels[0].template {
            Template::Conv { groups, window, .. } => change(groups, window),
            other => panic!("not a convolution: {other:?}"),
        }
    };
    refused(&windows, &conv(|_, w| w.strides[2] = 0), "expected extents, strides and dilations above 0");
    refused(&windows, &conv(|_, w| w.pads[1] = 1 << 31), "the window reaches too far");
    refused(&windows, &conv(|_, w| w.kernel[1] = 2), "expected extents [2,1,1,2,3]");
    refused(&windows, &conv(|g, _| *g = 0), "expected groups that divide 2 channels, found 0");
    refused(
        &windows,
        &|p| p.programs[0].kernels[0].reads[0].access.strides.swap(3, 4),
        "each image must be contiguous",
    );
}

/// The step that scatters over an activation, by its result.
fn made_by(plan: &Plan, result: BufferIdx) -> usize {
    plan.programs[0].steps.iter().position(|s| s.writes.contains(&result)).expect("it is written")
}

/// The result of a scatter over an activation.
fn scattered(plan: &Plan) -> BufferIdx {
    let over = |s: &&Step| {
        plan.programs[0].kernels[s.kernel].is_in_place()
            && plan.programs[0].buffers[s.reads[0]].class == Class::Activation
    };
    plan.programs[0].steps.iter().find(over).expect("there is one").writes[0]
}

/// Each part of a concatenation is computed from all earlier parts, as in a DenseNet.
fn dense(parts: usize) -> Plan {
    let mut m = Maker::new("dense");
    let y = m.add("y", Class::Output, F32, &[2, parts, 4]);
    let all = m.whole(y).1;
    let reductions = vec![RowReduction { reduction: Reduction::Sum, body: Body::new(&[x(0)]) }];
    for i in 0..parts {
        let before = all.slice(1, 0, 1, i).permute(&[0, 2, 1]);
        let part = all.slice(1, i, 1, 1).reshape(&Shape::new([2, 4])).expect("a unit axis");
        let row = Template::Row { inner: 1, reductions: reductions.clone(), per_row: true };
        m.step(row, &[2, 4, i], &[(y, before)], &[(y, part)], &[Expr::reduction(0, F32) + 1.0]);
    }
    m.done()
}

/// Seconds that a thread needs to check a plan.
fn check_seconds(plan: &Plan) -> f64 {
    common::core_seconds(|| check(plan).expect("it is a good plan"))
}

/// The number of pairs of parts is quadratic. No pair is compared with every third part.
#[test]
fn work_grows_with_the_pairs_of_parts() {
    let mut plan = dense(200);
    let (few, many) = (check_seconds(&dense(50)), check_seconds(&plan));
    assert!(many < 40.0 * few, "{few} s for 50 parts, {many} s for 200");
    plan.programs[0].steps.swap(70, 71);
    assert!(check(&plan).expect_err("a part is read too early").to_string().contains("not written"));
}

/// A chain of steps in seven slots, each of which is reused again and again.
fn long(steps: usize) -> Plan {
    let mut m = Maker::new("long");
    let input = m.add("x", Class::Input, F32, &[64]);
    let mut last = m.whole(input);
    for i in 0..steps as u64 {
        let b = m.at(i % 7 * 256, &format!("b{i}"), Class::Activation, F32, &[64]);
        let next = m.whole(b);
        m.step(Template::Map, &[64], &[last], std::slice::from_ref(&next), &[x(0) + 1.0]);
        last = next;
    }
    let y = m.add("y", Class::Output, F32, &[64]);
    let y = m.whole(y);
    m.step(Template::Map, &[64], &[last], &[y], &[x(0)]);
    let mut plan = m.0;
    plan.programs[0].summary = Summary {
        planned_bytes: plan.bytes(),
        arena_bytes: 9 * 256,
        lower_bound: 512,
        input_bytes: 256,
        output_bytes: 256,
        unshared_bytes: (steps as u64 + 2) * 256,
        steps: steps + 1,
        ..Summary::default()
    };
    plan
}

/// Sixteen times the steps take about sixteen times the work: 256 times would be that of steps compared with one another.
#[test]
fn work_grows_with_the_steps_and_not_with_their_square() {
    let (few, many) = (check_seconds(&long(1000)), check_seconds(&long(16_000)));
    assert!(many < 64.0 * few, "{few} s for 1000 steps, {many} s for 16,000");
}
