//! Arrays of Python: NumPy's by the buffer protocol, all others by DLPack. Neither copies an element.

use super::raised;
use crate::backend::{Lies, Place};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::onnx::proto::{DimensionValue, TypeValue, ValueInfoProto};
use crate::plan::Port;
use crate::shape::Shape;
use crate::tensor::Tensor;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyString};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// A name, a type as NumPy calls it, and the dims: `None` is one of no name.
pub(super) type Named = (String, String, Vec<Option<Dim>>);

/// A dim as Python has it: an `int` or a `str`.
#[derive(IntoPyObject)]
pub(super) enum Dim {
    Extent(usize),
    Name(String),
}

/// The types that NumPy and its kin have: the name that they have there, DLPack's code of their kind, and their bits.
const TYPES: &[(DType, &str, u8, u8)] = &[
    (DType::F32, "float32", FLOAT, 32),
    (DType::F64, "float64", FLOAT, 64),
    (DType::F16, "float16", FLOAT, 16),
    (DType::BF16, "bfloat16", BFLOAT, 16),
    (DType::I8, "int8", INT, 8),
    (DType::I16, "int16", INT, 16),
    (DType::I32, "int32", INT, 32),
    (DType::I64, "int64", INT, 64),
    (DType::U8, "uint8", UINT, 8),
    (DType::U16, "uint16", UINT, 16),
    (DType::U32, "uint32", UINT, 32),
    (DType::U64, "uint64", UINT, 64),
    (DType::Bool, "bool", BOOL, 8),
];

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;

/// The type of a kind with so many bits.
fn of_kind(kind: u8, bits: usize) -> Option<DType> {
    TYPES.iter().find(|(.., code, of)| *code == kind && usize::from(*of) == bits).map(|(dtype, ..)| *dtype)
}

/// The name, the kind and the bits of a type, if NumPy and its kin have it.
fn known(dtype: DType) -> Option<(&'static str, u8, u8)> {
    TYPES.iter().find(|(known, ..)| *known == dtype).map(|&(_, name, kind, bits)| (name, kind, bits))
}

/// A type as NumPy calls it; by the project's own name if NumPy has none.
pub(super) fn name_of(dtype: DType) -> String {
    known(dtype).map_or_else(|| dtype.to_string(), |(name, ..)| name.to_owned())
}

/// The names, types and extents of a program's inputs or outputs.
pub(super) fn ports(ports: &[Port]) -> Vec<Named> {
    let shape = |shape: &Shape| shape.iter().map(|extent| Some(Dim::Extent(*extent))).collect();
    ports.iter().map(|port| (port.name.clone(), name_of(port.dtype), shape(&port.shape))).collect()
}

/// An input or an output as a file declares it.
pub(super) fn declared(value: &ValueInfoProto) -> Named {
    let Some(TypeValue::Tensor(tensor)) = value.r#type.as_ref().and_then(|kind| kind.value.as_ref()) else {
        return (value.name.clone(), "unknown".into(), Vec::new());
    };
    let dtype = crate::onnx::proto::dtype(tensor.elem_type).map_or_else(|_| "unknown".to_owned(), name_of);
    let dims = tensor.shape.iter().flat_map(|shape| &shape.dim).map(|dim| match &dim.value {
        // Some exporters write an unknown size as -1 or "?".
        Some(DimensionValue::DimValue(extent)) => usize::try_from(*extent).ok().map(Dim::Extent),
        Some(DimensionValue::DimParam(name)) if ["", "?"].contains(&name.trim()) => None,
        Some(DimensionValue::DimParam(name)) => Some(Dim::Name(name.trim().to_owned())),
        None => None,
    });
    (value.name.clone(), dtype, dims.collect())
}

// ---- DLPack, its unversioned form, which all know

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    number: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    rank: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    offset: u64,
}

#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

const DLTENSOR: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

/// A tensor that another program has lent: its deleter runs when this goes.
struct Lent {
    tensor: NonNull<DlManaged>,
    /// The form of DLPack that all know says nothing of it: what is known never to change is told by its kind.
    readonly: bool,
}

// SAFETY: a lent tensor may be given back by any thread; elements are read only while the lender keeps them.
unsafe impl Send for Lent {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken from its capsule, so this is its only owner.
        unsafe {
            if let Some(deleter) = self.tensor.as_ref().deleter {
                deleter(self.tensor.as_ptr());
            }
        }
    }
}

/// What keeps the elements.
enum Owner {
    Buffer(PyUntypedBuffer),
    Lent(Lent),
}

/// Elements of an array, in row-major order, and what keeps them.
pub(super) struct Array {
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    address: u64,
    bytes: usize,
    on_cuda: bool,
    owner: Owner,
}

/// The strides of elements that lie one after another.
fn is_dense(shape: &[i64], strides: &[i64]) -> bool {
    let mut next = 1;
    shape.iter().zip(strides).rev().all(|(&extent, &stride)| {
        let fits = extent <= 1 || stride == next;
        next *= extent.max(1);
        fits
    })
}

/// More bytes than an array may have.
const MOST: usize = isize::MAX as usize;

/// True for an array of NumPy with elements of a type that other packages bring.
fn is_bfloat16(object: &Bound<PyAny>) -> bool {
    let name = object.getattr("dtype").and_then(|dtype| dtype.getattr("name"));
    name.is_ok_and(|name| name.eq("bfloat16").unwrap_or(false))
}

/// What is said of an array whose elements do not lie one after another.
const SCATTERED: &str =
    "its elements do not lie one after another: expected a contiguous array, as numpy.ascontiguousarray makes";

impl Array {
    /// The elements of a NumPy array, or of what has a buffer or DLPack.
    pub(super) fn of(name: &str, object: &Bound<PyAny>) -> PyResult<Array> {
        let py = object.py();
        let fail = |what: &str| raised(py, &Error::usage(format!("array '{name}': {what}")));
        let buffer = match PyUntypedBuffer::get(object) {
            Ok(buffer) => buffer,
            // NumPy's own types have none of that name; its bits are those of whole numbers.
            Err(_) if object.get_type().module().is_ok_and(|of| of == "numpy") && is_bfloat16(object) => {
                let bits = Array::of(name, &object.call_method1("view", ("uint16",))?)?;
                return Ok(Array { dtype: DType::BF16, ..bits });
            }
            // A scalar of NumPy has no shape in its buffer, and its array has. An array without one is of a type that no input has.
            Err(_)
                if object.get_type().name()? != "ndarray"
                    && object.hasattr("__array__")?
                    && object.getattr("ndim").is_ok_and(|n| n.eq(0).unwrap_or(false)) =>
            {
                return Array::of(name, &object.py().import("numpy")?.call_method1("array", (object,))?);
            }
            Err(_) if object.hasattr("__dlpack__")? && object.hasattr("__dlpack_device__")? => {
                let lent = Array::lent(name, object);
                return lent.map_err(|error| match error.is_instance_of::<PyBufferError>(py) {
                    true => fail(&format!("it cannot be lent: {}", error.value(py))),
                    false => error,
                });
            }
            Err(error) if error.is_instance_of::<PyBufferError>(py) => {
                return Err(fail(&format!("its elements cannot be read: {}", error.value(py))));
            }
            Err(_) => {
                let kind = object.get_type().name()?.to_string();
                return Err(fail(&format!(
                    "expected an array, as of NumPy, or an object with __dlpack__, found {kind}"
                )));
            }
        };
        let size = buffer.item_size();
        let other_order = if cfg!(target_endian = "little") { [b'>', b'!'] } else { [b'<', b'<'] };
        if size > 1 && buffer.format().to_bytes().first().is_some_and(|first| other_order.contains(first)) {
            return Err(fail("the bytes of its elements are in the other order: x.astype(x.dtype.newbyteorder('='))"));
        }
        let dtype = match ElementType::from_format(buffer.format()) {
            ElementType::Float { bytes } if bytes == size => of_kind(FLOAT, 8 * size),
            ElementType::SignedInteger { bytes } if bytes == size => of_kind(INT, 8 * size),
            ElementType::UnsignedInteger { bytes } if bytes == size => of_kind(UINT, 8 * size),
            ElementType::Bool => of_kind(BOOL, 8 * size),
            _ => None,
        };
        let none = || fail(&format!("its type has the format {:?}, which no input has", buffer.format()));
        let dtype = dtype.ok_or_else(none)?;
        if !buffer.is_c_contiguous() {
            return Err(fail(SCATTERED));
        }
        let shape: Shape = buffer.shape().iter().copied().collect();
        let (address, bytes) = (buffer.buf_ptr() as u64, buffer.len_bytes());
        Ok(Array { dtype, shape, address, bytes, on_cuda: false, owner: Owner::Buffer(buffer) })
    }

    fn lent(name: &str, object: &Bound<PyAny>) -> PyResult<Array> {
        let py = object.py();
        let fail = |what: String| raised(py, &Error::usage(format!("array '{name}': {what}")));
        let of = object.get_type().module().map(|module| module.to_string()).unwrap_or_default();
        let readonly = of.starts_with("jax") || object.cast::<PyTensor>().is_ok();
        let (kind, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        // A run waits for the default stream, 1, and the lender lets that wait for its own.
        let capsule = match kind {
            CUDA => {
                let stream = PyDict::new(object.py());
                stream.set_item("stream", 1)?;
                object.call_method("__dlpack__", (), Some(&stream))?
            }
            _ => object.call_method0("__dlpack__")?,
        };
        let capsule = capsule.cast_into::<PyCapsule>().map_err(|_| fail("its __dlpack__ gave no capsule".into()))?;
        let pointer = capsule.pointer_checked(Some(DLTENSOR));
        let pointer = pointer.map_err(|_| fail("its capsule was taken already, or is of another version".into()))?;
        let pointer = pointer.cast::<DlManaged>();
        // SAFETY: a capsule of this name holds such a tensor, which is taken from it by the new name.
        let (lent, tensor) = unsafe {
            pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr());
            (Lent { tensor: pointer, readonly }, &pointer.as_ref().tensor)
        };
        let on_cuda = match tensor.device.kind {
            CPU | CUDA_HOST => false,
            CUDA => true,
            other => return Err(fail(format!("it is on a device of DLPack's kind {other}: expected the CPU or CUDA"))),
        };
        let rank = tensor.rank.max(0) as usize;
        // SAFETY: DLPack's shape and strides have an entry for each axis; none has null for the strides of dense elements.
        let (shape, is_dense) = unsafe {
            let entries = |at: *mut i64| if rank == 0 { &[][..] } else { std::slice::from_raw_parts(at, rank) };
            let shape = entries(tensor.shape);
            (shape.to_vec(), tensor.strides.is_null() || is_dense(shape, entries(tensor.strides)))
        };
        if !is_dense {
            return Err(fail(SCATTERED.to_owned()));
        }
        let DlType { code, bits, lanes } = tensor.dtype;
        let dtype = of_kind(code, bits.into()).filter(|_| lanes == 1);
        let dtype = dtype.ok_or_else(|| fail(format!("no input has its type, DLPack's code {code} of {bits} bits")))?;
        let shape: Shape = shape.into_iter().map(|extent| extent.max(0) as usize).collect();
        let bytes = shape.checked_len().and_then(|count| count.checked_mul(dtype.size())).filter(|bytes| *bytes < MOST);
        let bytes = bytes.ok_or_else(|| fail("it has more elements than any memory".to_owned()))?;
        if bytes > 0 && tensor.data.is_null() {
            return Err(fail("it has elements, and no address".to_owned()));
        }
        let address = tensor.data as u64 + tensor.offset;
        Ok(Array { dtype, shape, address, bytes, on_cuda, owner: Owner::Lent(lent) })
    }

    /// Refuses an array of another type or shape than a port of the program.
    pub(super) fn suits(&self, what: &str, port: &Port) -> Result<()> {
        // NumPy has no bfloat16: its bits are whole numbers there.
        let is_of_type = self.dtype == port.dtype || (self.dtype, port.dtype) == (DType::U16, DType::BF16);
        if is_of_type && self.shape == port.shape {
            return Ok(());
        }
        let (expected, found) = (name_of(port.dtype), name_of(self.dtype));
        let remedy = if self.shape == port.shape { "; convert it, as with NumPy's astype" } else { "" };
        Err(Error::usage(format!(
            "{what} '{}': expected {expected}{}, found {found}{}{remedy}",
            port.name, port.shape, self.shape
        )))
    }

    fn slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the owner keeps so many bytes there; the lock of the interpreter or the caller's word keeps others from writing them.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }

    /// Its place, for an input.
    pub(super) fn place(&self) -> Place<'_> {
        if self.on_cuda {
            // SAFETY: the owner keeps the memory until the run is over.
            return unsafe { Place::cuda(self.address, self.bytes as u64) };
        }
        Place::bytes(self.slice())
    }

    fn is_readonly(&self) -> bool {
        match &self.owner {
            Owner::Buffer(buffer) => buffer.readonly(),
            Owner::Lent(lent) => lent.readonly,
        }
    }

    /// Where it lies, under a name.
    pub(super) fn lies<'a>(&self, name: &'a str) -> Lies<'a> {
        Lies { name, on_device: self.on_cuda, address: self.address, bytes: self.bytes as u64 }
    }

    /// Its place, for an output.
    pub(super) fn place_mut(&mut self, name: &str) -> Result<Place<'_>> {
        if self.is_readonly() {
            let what = "its array cannot be written: expected one that can, as numpy.empty makes";
            return Err(Error::usage(format!("output '{name}': {what}")));
        }
        if self.on_cuda {
            // SAFETY: the owner keeps the memory until the run is over.
            return Ok(unsafe { Place::cuda(self.address, self.bytes as u64) });
        }
        if self.bytes == 0 {
            return Ok(Place::bytes_mut(&mut []));
        }
        // SAFETY: as of `slice`; the array was made, or given, to be written.
        Ok(Place::bytes_mut(unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) }))
    }

    /// A tensor with a copy of the elements.
    pub(super) fn tensor(&self) -> Result<Tensor> {
        if self.on_cuda {
            return Err(Error::usage(
                "an array on a device is no value of a state, nor data: expected one of the host".into(),
            ));
        }
        Tensor::new(self.dtype, self.shape.clone(), self.slice().to_vec())
    }
}

/// Copies of named arrays.
pub(super) fn tensors(arrays: &Bound<PyDict>) -> PyResult<Vec<(String, Tensor)>> {
    let copied = |item: Bound<PyAny>| {
        let (name, array): (Bound<PyAny>, Bound<PyAny>) = item.extract()?;
        let name: String = name.extract()?;
        let tensor = Array::of(&name, &array)?.tensor();
        Ok((name, tensor.map_err(|error| super::raised(array.py(), &error))?))
    };
    // A list of its own: what an array is asked may change the dict.
    arrays.items().iter().map(copied).collect()
}

/// `numpy.empty`, which makes outputs.
static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A new array of NumPy for an output.
pub(super) fn empty<'py>(py: Python<'py>, port: &Port) -> PyResult<Bound<'py, PyAny>> {
    // NumPy has no type of its own for some that are stored in 16 bits.
    let stored = if port.dtype == DType::BF16 { DType::U16 } else { port.dtype };
    let (name, ..) = known(stored).ok_or_else(|| {
        let (name, dtype) = (&port.name, port.dtype);
        let what = format!("output '{name}': NumPy has no {dtype}: expected an array for it");
        raised(py, &Error::usage(what))
    })?;
    let make = EMPTY.get_or_try_init(py, || Ok::<_, PyErr>(py.import("numpy")?.getattr("empty")?.unbind()))?;
    make.bind(py).call1((port.shape.to_vec(), PyString::intern(py, name)))
}

/// A tensor of the host, which numpy.asarray, torch.from_dlpack and their kin take without a copy. It is read-only.
#[pyclass(name = "Tensor", module = "plimsoll._plimsoll", frozen)]
pub(super) struct PyTensor {
    tensor: Tensor,
}

impl PyTensor {
    pub(super) fn new(tensor: Tensor) -> PyTensor {
        PyTensor { tensor }
    }
}

/// What a lent tensor of ours keeps.
struct Keeper {
    shape: Vec<i64>,
    _tensor: Tensor,
}

/// Frees what [`PyTensor::__dlpack__`] has lent.
unsafe extern "C" fn give_back(managed: *mut DlManaged) {
    // SAFETY: both were boxed where the tensor was lent, and the borrower calls this once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Keeper>()));
    }
}

/// Gives a tensor back that nobody took from its capsule.
unsafe extern "C" fn dropped(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: a capsule that nobody took has its first name.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, DLTENSOR.as_ptr()) != 0 {
            let managed = pyo3::ffi::PyCapsule_GetPointer(capsule, DLTENSOR.as_ptr()).cast::<DlManaged>();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}

#[pymethods]
impl PyTensor {
    #[getter]
    fn dtype(&self) -> String {
        name_of(self.tensor.dtype())
    }

    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.tensor.shape().to_vec()
    }

    /// The elements as bytes, in row-major order.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.tensor.bytes())
    }

    #[expect(clippy::unused_self, reason = "the protocol has it")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, 0)
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, PyTensor>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.py().import("numpy")?.call_method1("from_dlpack", (slf,))?;
        match (dtype, copy) {
            (Some(dtype), _) => array.call_method1("astype", (dtype,)),
            (None, Some(true)) => array.call_method0("copy"),
            _ => Ok(array),
        }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // It is of the host, which has no streams, and in the form that all versions know.
        let _ = (stream, max_version);
        if dl_device.is_some_and(|device| device != (CPU, 0)) {
            return Err(PyBufferError::new_err("the tensor is on the host: expected dl_device=(1, 0)"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "the tensor is lent as it is: expected copy=None; numpy.array copies it",
            ));
        }
        let dtype = self.tensor.dtype();
        let of = known(dtype).map(|(_, code, bits)| DlType { code, bits, lanes: 1 });
        let of = of.ok_or_else(|| PyBufferError::new_err(format!("DLPack has no {dtype}")))?;
        let shape: Vec<i64> = self.tensor.shape().iter().map(|&extent| extent as i64).collect();
        let keeper = Box::into_raw(Box::new(Keeper { shape, _tensor: self.tensor.clone() }));
        // SAFETY: the keeper was just made, and lives until the tensor is given back.
        let shape = unsafe { (*keeper).shape.as_mut_ptr() };
        let tensor = DlTensor {
            data: self.tensor.bytes().as_ptr() as *mut c_void,
            device: DlDevice { kind: CPU, number: 0 },
            rank: self.tensor.shape().len() as i32,
            dtype: of,
            shape,
            strides: std::ptr::null_mut(),
            offset: 0,
        };
        let managed = Box::into_raw(Box::new(DlManaged { tensor, context: keeper.cast(), deleter: Some(give_back) }));
        // SAFETY: the capsule owns the tensor until somebody takes it.
        unsafe {
            let capsule = pyo3::ffi::PyCapsule_New(managed.cast(), DLTENSOR.as_ptr(), Some(dropped));
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }
}
