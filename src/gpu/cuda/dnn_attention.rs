//! Attention by cuDNN: the graph of the operations that it is made of, for which the library has one kernel.
//!
//! ```text
//! q k^T -> * scale -> (key <= query ? . : -inf) -> - max -> exp -> / sum -> v
//! ```
//!
//! The library compiles the kernel as the first launch is recorded. Values between operations exist nowhere: they are virtual.

use super::api::{Dnn, Refusal};
use super::dnn::{CudnnHandle, data_type};
use cudarc::cudnn::sys as dnn;
use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Name;
use cudarc::cudnn::sys::cudnnBackendAttributeType_t as Type;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as Kind;
use cudarc::cudnn::sys::cudnnPointwiseMode_t as Mode;
use cudarc::cudnn::sys::cudnnReduceTensorOp_t as Join;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use plimsoll_core::kernel::library::{Attention, Image};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;

/// The oldest version whose attention was seen to serve.
const LEAST: usize = 91_400;

/// True if a library has attention as it is asked for here.
pub(super) fn serves(dnn: &Dnn) -> bool {
    // SAFETY: it takes nothing.
    unsafe { dnn.cudnnGetVersion() >= LEAST }
}

/// A descriptor of the library's backend interface.
struct Descriptor {
    dnn: Arc<Dnn>,
    raw: dnn::cudnnBackendDescriptor_t,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once. Nobody could be told of a refusal.
        let _ = unsafe { self.dnn.cudnnBackendDestroyDescriptor(self.raw) };
    }
}

impl Descriptor {
    fn new(dnn: &Arc<Dnn>, kind: Kind) -> Result<Descriptor, Refusal> {
        let mut raw = null_mut();
        // SAFETY: it writes a descriptor, which is destroyed with the value.
        unsafe { dnn.cudnnBackendCreateDescriptor(kind as u32, &mut raw) }?;
        Ok(Descriptor { dnn: Arc::clone(dnn), raw })
    }

    /// Sets an attribute to some elements of the type that it has.
    fn set<T: Copy>(&self, name: Name, ty: Type, elements: &[T]) -> Result<(), Refusal> {
        let (count, from) = (elements.len() as i64, elements.as_ptr().cast());
        // SAFETY: there are so many elements, which the library copies.
        unsafe { self.dnn.cudnnBackendSetAttribute(self.raw, name as u32, ty as u32, count, from) }
    }

    fn set_data(&self, name: Name, data: u32) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_DATA_TYPE, &[data])
    }

    fn set_raw(&self, name: Name, raw: dnn::cudnnBackendDescriptor_t) -> Result<(), Refusal> {
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &[raw])
    }

    /// Reads up to as many elements of an attribute as there is room for. Returns how many there are.
    fn get<T>(&self, name: Name, ty: Type, to: &mut [T]) -> Result<usize, Refusal> {
        let (asked, elements) = (to.len() as i64, if to.is_empty() { null_mut() } else { to.as_mut_ptr().cast() });
        let mut count = 0;
        // SAFETY: there is room for so many elements.
        unsafe { self.dnn.cudnnBackendGetAttribute(self.raw, name as u32, ty as u32, asked, &mut count, elements) }?;
        Ok(count.max(0) as usize)
    }

    fn finish(&self) -> Result<(), Refusal> {
        // SAFETY: the descriptor is there.
        unsafe { self.dnn.cudnnBackendFinalize(self.raw) }
    }
}

/// Extents and steps of a matrix for each batch and head.
#[derive(Clone, Copy)]
struct Shape {
    dims: [i64; 4],
    steps: [i64; 4],
}

impl Shape {
    fn of(image: &Image) -> Result<Shape, String> {
        let four = |list: &[u64]| -> Result<[i64; 4], String> {
            let [a, b, c, d] = list else { return Err(format!("expected four extents, found {}", list.len())) };
            let number = |&n: &u64| i64::try_from(n).map_err(|_| format!("{n} is more than cuDNN counts"));
            Ok([number(a)?, number(b)?, number(c)?, number(d)?])
        };
        Ok(Shape { dims: four(&image.dims)?, steps: four(&image.strides)? })
    }

    fn dense(dims: [i64; 4]) -> Shape {
        let [_, heads, rows, columns] = dims;
        Shape { dims, steps: [heads * rows * columns, rows * columns, columns, 1] }
    }

    fn transposed(self) -> Shape {
        let exchange = |[batch, heads, rows, columns]: [i64; 4]| [batch, heads, columns, rows];
        Shape { dims: exchange(self.dims), steps: exchange(self.steps) }
    }
}

/// A tensor of the graph.
type Tensor = dnn::cudnnBackendDescriptor_t;

/// Where a tensor is.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Memory,
    Nowhere,
    /// One number of the host's.
    Host,
}

/// Names of the tensors that a launch has addresses of. Other names begin with [`VALUES`].
const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const O: i64 = 4;
const SCALE: i64 = 5;
const LOW: i64 = 6;
const VALUES: i64 = 100;

/// A graph as it grows.
struct Graph<'a> {
    dnn: &'a Arc<Dnn>,
    /// Everything that was made for it.
    made: Vec<Descriptor>,
    operations: Vec<dnn::cudnnBackendDescriptor_t>,
}

const F32: u32 = dnn::cudnnDataType_t::CUDNN_DATA_FLOAT as u32;
const I32: u32 = dnn::cudnnDataType_t::CUDNN_DATA_INT32 as u32;
const BOOL: u32 = dnn::cudnnDataType_t::CUDNN_DATA_BOOLEAN as u32;

impl Graph<'_> {
    fn make(&mut self, kind: Kind, fill: impl FnOnce(&Descriptor) -> Result<(), Refusal>) -> Result<Tensor, Refusal> {
        let made = Descriptor::new(self.dnn, kind)?;
        fill(&made)?;
        made.finish()?;
        let raw = made.raw;
        self.made.push(made);
        Ok(raw)
    }

    /// Makes an operation, which comes behind those that are there.
    fn operate(&mut self, kind: Kind, fill: impl FnOnce(&Descriptor) -> Result<(), Refusal>) -> Result<(), Refusal> {
        let operation = self.make(kind, fill)?;
        self.operations.push(operation);
        Ok(())
    }

    fn tensor(&mut self, name: i64, data: u32, shape: Shape, place: Place) -> Result<Tensor, Refusal> {
        self.make(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR, |tensor| {
            tensor.set_data(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, data)?;
            tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, Type::CUDNN_TYPE_INT64, &shape.dims)?;
            tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, Type::CUDNN_TYPE_INT64, &shape.steps)?;
            tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, Type::CUDNN_TYPE_INT64, &[name])?;
            tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Type::CUDNN_TYPE_INT64, &[16i64])?;
            let is = |name| tensor.set(name, Type::CUDNN_TYPE_BOOLEAN, &[true]);
            match place {
                Place::Memory => Ok(()),
                Place::Nowhere => is(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL),
                Place::Host => is(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE),
            }
        })
    }

    /// A value between two operations.
    fn value(&mut self, data: u32, shape: Shape) -> Result<Tensor, Refusal> {
        let name = VALUES + self.made.len() as i64;
        self.tensor(name, data, shape, Place::Nowhere)
    }

    fn number(&mut self, name: i64) -> Result<Tensor, Refusal> {
        self.tensor(name, F32, Shape { dims: [1; 4], steps: [1; 4] }, Place::Host)
    }

    fn product(&mut self, [a, b, to]: [Tensor; 3]) -> Result<(), Refusal> {
        let kind = self.make(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR, |product| {
            product.set_data(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, F32)
        })?;
        self.operate(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, |product| {
            product.set_raw(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)?;
            product.set_raw(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)?;
            product.set_raw(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, to)?;
            product.set_raw(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, kind)
        })
    }

    fn join(&mut self, join: Join, from: Tensor, to: Tensor) -> Result<(), Refusal> {
        let kind = self.make(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR, |reduction| {
            reduction.set_data(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, F32)?;
            let ty = Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
            reduction.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, ty, &[join as u32])
        })?;
        self.operate(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, |reduction| {
            reduction.set_raw(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind)?;
            reduction.set_raw(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, from)?;
            reduction.set_raw(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, to)
        })
    }

    /// An operation on elements: on one or two operands, or on a condition behind both. `axis` is that of an index.
    fn elements(
        &mut self,
        mode: Mode,
        operands: [Option<Tensor>; 3],
        to: Tensor,
        axis: Option<i64>,
    ) -> Result<(), Refusal> {
        let [x, b, condition] = operands;
        let precision = if mode == Mode::CUDNN_POINTWISE_CMP_GE { BOOL } else { F32 };
        let kind = self.make(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR, |operation| {
            let ty = Type::CUDNN_TYPE_POINTWISE_MODE;
            operation.set(Name::CUDNN_ATTR_POINTWISE_MODE, ty, &[mode as u32])?;
            operation.set_data(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, precision)?;
            axis.map_or(Ok(()), |axis| operation.set(Name::CUDNN_ATTR_POINTWISE_AXIS, Type::CUDNN_TYPE_INT64, &[axis]))
        })?;
        self.operate(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, |operation| {
            operation.set_raw(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind)?;
            let names = [
                Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
            ];
            for (name, tensor) in names.into_iter().zip([x, b, condition]) {
                if let Some(tensor) = tensor {
                    operation.set_raw(name, tensor)?;
                }
            }
            operation.set_raw(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, to)?;
            for factor in [Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2] {
                operation.set(factor, Type::CUDNN_TYPE_FLOAT, &[1f32])?;
            }
            Ok(())
        })
    }

    /// A new value of some operands.
    fn of(&mut self, mode: Mode, operands: &[Tensor], data: u32, shape: Shape) -> Result<Tensor, Refusal> {
        let to = self.value(data, shape)?;
        let at = |i: usize| operands.get(i).copied();
        self.elements(mode, [at(0), at(1), at(2)], to, None)?;
        Ok(to)
    }

    /// All operations. The logarithm of sums has no reader, but the library knows no attention without it.
    fn attention(&mut self, call: &Attention) -> Result<(), String> {
        let data = data_type(call.q.dtype)?;
        let [q, k, v, o] = [Shape::of(&call.q)?, Shape::of(&call.k)?, Shape::of(&call.v)?, Shape::of(&call.o)?];
        let [batch, heads, rows, _] = q.dims;
        let scores = Shape::dense([batch, heads, rows, k.dims[2]]);
        let one = Shape::dense([batch, heads, rows, 1]);
        let queries = self.tensor(Q, data, q, Place::Memory)?;
        let keys = self.tensor(K, data, k.transposed(), Place::Memory)?;
        let values = self.tensor(V, data, v, Place::Memory)?;
        let result = self.tensor(O, data, o, Place::Memory)?;
        let product = self.value(F32, scores)?;
        self.product([queries, keys, product])?;
        let scale = self.number(SCALE)?;
        let mut score = self.of(Mode::CUDNN_POINTWISE_MUL, &[product, scale], F32, scores)?;
        if call.causal {
            let [query, key] = [self.value(I32, scores)?, self.value(I32, scores)?];
            for (index, axis) in [(query, 2), (key, 3)] {
                self.elements(Mode::CUDNN_POINTWISE_GEN_INDEX, [Some(score), None, None], index, Some(axis))?;
            }
            let seen = self.of(Mode::CUDNN_POINTWISE_CMP_GE, &[query, key], BOOL, scores)?;
            let low = self.number(LOW)?;
            score = self.of(Mode::CUDNN_POINTWISE_BINARY_SELECT, &[score, low, seen], F32, scores)?;
        }
        let top = self.value(F32, one)?;
        self.join(Join::CUDNN_REDUCE_TENSOR_MAX, score, top)?;
        let less = self.of(Mode::CUDNN_POINTWISE_SUB, &[score, top], F32, scores)?;
        let power = self.of(Mode::CUDNN_POINTWISE_EXP, &[less], F32, scores)?;
        let sum = self.value(F32, one)?;
        self.join(Join::CUDNN_REDUCE_TENSOR_ADD, power, sum)?;
        let log = self.of(Mode::CUDNN_POINTWISE_LOG, &[sum], F32, one)?;
        self.of(Mode::CUDNN_POINTWISE_ADD, &[top, log], F32, one)?;
        let weights = self.of(Mode::CUDNN_POINTWISE_DIV, &[power, sum], data, scores)?;
        Ok(self.product([weights, values, result])?)
    }
}

/// An attention that the library has compiled.
pub(super) struct Plan {
    dnn: Arc<Dnn>,
    handle: dnn::cudnnHandle_t,
    plan: Descriptor,
    /// Bytes of workspace.
    bytes: u64,
    /// What the plan was made of.
    _made: Vec<Descriptor>,
}

impl Plan {
    /// The first of the library's plans that needs no more than `most` bytes of workspace.
    fn new(cudnn: &CudnnHandle, call: &Attention, most: u64) -> Result<Plan, String> {
        let (dnn, handle) = (&cudnn.dnn, cudnn.handle);
        let mut graph = Graph { dnn, made: Vec::new(), operations: Vec::new() };
        graph.attention(call)?;
        let operations = std::mem::take(&mut graph.operations);
        let whole = graph.make(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, |graph| {
            let ty = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
            graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, ty, &operations)?;
            graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])
        })?;
        let heuristics = Descriptor::new(dnn, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristics.set_raw(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, whole)?;
        let mode = dnn::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A as u32;
        heuristics.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, &[mode])?;
        heuristics.finish()?;
        let (results, ty) = (Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR);
        let count = heuristics.get::<Tensor>(results, ty, &mut [])?;
        let new = |_| Descriptor::new(dnn, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        let found = (0..count).map(new).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<_> = found.iter().map(|found| found.raw).collect();
        let count = heuristics.get(results, ty, &mut raw)?.min(count);
        let mut made = graph.made;
        let mut refused = "it knows no kernel for it".to_owned();
        for &configuration in &raw[..count] {
            match Plan::of(dnn, handle, configuration) {
                Ok((plan, bytes)) if bytes <= most => {
                    made.push(heuristics);
                    made.extend(found);
                    return Ok(Plan { dnn: Arc::clone(dnn), handle, plan, bytes, _made: made });
                }
                Ok((_, bytes)) => refused = format!("it wants {bytes} bytes of workspace, there are {most}"),
                Err(refusal) => refused = refusal.to_string(),
            }
        }
        Err(format!("cuDNN does not compute this attention: {refused}"))
    }

    /// A plan of a configuration, and its bytes of workspace.
    fn of(dnn: &Arc<Dnn>, handle: dnn::cudnnHandle_t, configuration: Tensor) -> Result<(Descriptor, u64), Refusal> {
        let plan = Descriptor::new(dnn, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set_raw(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Type::CUDNN_TYPE_HANDLE, &[handle])?;
        plan.finish()?;
        let mut bytes = [0i64];
        plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, Type::CUDNN_TYPE_INT64, &mut bytes)?;
        Ok((plan, bytes[0].max(0) as u64))
    }
}

/// An attention that is ready to be launched.
pub(super) struct Attended {
    plan: Rc<Plan>,
    pack: Descriptor,
    /// The numbers that the pack has the addresses of.
    _numbers: Rc<[f32; 2]>,
}

impl CudnnHandle {
    /// Fixes a call on these addresses: one per slot, and the workspace's. Plans it if no `plan` is given.
    pub(super) fn attend(
        &self,
        call: &Attention,
        slots: &[CUdeviceptr],
        workspace: (CUdeviceptr, u64),
        plan: &mut Option<Rc<Plan>>,
    ) -> Result<Attended, String> {
        let made = match plan {
            Some(plan) => Rc::clone(plan),
            None => Rc::new(Plan::new(self, call, workspace.1)?),
        };
        *plan = Some(Rc::clone(&made));
        if made.bytes > workspace.1 {
            return Err(format!("it wants {} bytes of workspace, there are {}", made.bytes, workspace.1));
        }
        let numbers = Rc::new([call.scale, f32::NEG_INFINITY]);
        let at = |image: &Image| (slots[image.slot] + image.offset * image.dtype.size() as u64) as usize as *mut c_void;
        let number = |i: usize| std::ptr::from_ref(&numbers[i]).cast_mut().cast::<c_void>();
        let operands = [(Q, at(&call.q)), (K, at(&call.k)), (V, at(&call.v)), (O, at(&call.o)), (SCALE, number(0))];
        let low = call.causal.then(|| (LOW, number(1)));
        let (names, addresses): (Vec<i64>, Vec<*mut c_void>) = operands.into_iter().chain(low).unzip();
        let pack = Descriptor::new(&self.dnn, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Type::CUDNN_TYPE_INT64, &names)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Type::CUDNN_TYPE_VOID_PTR, &addresses)?;
        let space = [workspace.0 as usize as *mut c_void];
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Type::CUDNN_TYPE_VOID_PTR, &space)?;
        pack.finish()?;
        Ok(Attended { plan: made, pack, _numbers: numbers })
    }
}

impl Attended {
    /// Puts the attention into a stream.
    pub(super) fn launch(&self, stream: CUstream) -> Result<(), Refusal> {
        let Plan { dnn, handle, plan, .. } = &*self.plan;
        // SAFETY: the handle lives as long as the plan, the stream as long as the backend. The plan's checker holds the call against the
        // kernel, whose operands lie within the launch's slices; the workspace is as large as the library's plan wants it.
        unsafe {
            dnn.cudnnSetStream(*handle, stream)?;
            dnn.cudnnBackendExecute(*handle, plan.raw, self.pack.raw)
        }
    }
}
