//! The functions of NVIDIA's libraries that are used, each looked up once.
//!
//! Types and constants are cudarc's. Its functions are not used: they panic where a library or a symbol is missing, and return enums,
//! for which a code of a newer driver is undefined behaviour. Here a missing symbol is an error at load, and codes are integers.

use cudarc::cublaslt::sys as lt;
use cudarc::cudnn::sys as dnn;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmemoryPool, CUmodule,
    CUstream,
};
use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;
use plimsoll_core::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt::{self, Display};

/// A call that a library refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The function.
    pub(super) call: &'static str,
    /// The code that it returned.
    pub(super) code: c_int,
    /// The library's own words for the code.
    pub(super) meaning: String,
}

impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: error {} ({})", self.call, self.code, self.meaning)
    }
}

impl From<Refusal> for String {
    fn from(refusal: Refusal) -> String {
        refusal.to_string()
    }
}

/// An error of this backend.
pub(super) fn failed(what: impl Display) -> Error {
    Error::Backend { backend: "cuda", what: what.to_string(), file: None }
}

/// A table of functions. Those in the first part return a status, 0 for success.
macro_rules! table {
    ($(#[$doc:meta])* $table:ident {
        $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*
    } {
        $(fn $plain:ident($($parg:ident: $pty:ty),* $(,)?) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
            $($plain: unsafe extern "C" fn($($pty),*) -> $result,)*
        }

        #[allow(non_snake_case, clippy::too_many_arguments, reason = "names and parameters are the libraries' own")]
        impl $table {
            /// Looks every function up. The library must stay loaded as long as the table is used.
            pub(super) fn bind(library: &Library) -> Result<$table, String> {
                // SAFETY: the signatures are those of the libraries' headers.
                unsafe {
                    Ok($table {
                        $($name: symbol(library, stringify!($name))?,)*
                        $($plain: symbol(library, stringify!($plain))?,)*
                    })
                }
            }

            $(
                /// # Safety
                /// As the library's documentation of the function says.
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), Refusal> {
                    // SAFETY: guaranteed by the caller.
                    match unsafe { (self.$name)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(Refusal { call: stringify!($name), code, meaning: self.meaning(code) }),
                    }
                }
            )*
            $(
                /// # Safety
                /// As the library's documentation of the function says.
                pub(super) unsafe fn $plain(&self, $($parg: $pty),*) -> $result {
                    // SAFETY: guaranteed by the caller.
                    unsafe { (self.$plain)($($parg),*) }
                }
            )*
        }
    };
}

/// # Safety
/// `T` is the function's type.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, String> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| format!("it has no function {name}"))
}

/// A C string that lives as long as its library.
///
/// # Safety
/// `text` is null or such a string.
unsafe fn words(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown to the library".into();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The words of a library for a code. Its function has a string for every code.
macro_rules! meaning {
    ($($table:ident $words:ident),*) => {$(
        impl $table {
            pub(super) fn meaning(&self, code: c_int) -> String {
                // SAFETY: it returns a string for every code.
                unsafe { words(self.$words(code)) }
            }
        }
    )*};
}
meaning!(
    Nvrtc nvrtcGetErrorString,
    BlasLt cublasLtGetStatusString,
    Dnn cudnnGetErrorString,
    Nvml nvmlErrorString,
    Nccl ncclGetErrorString
);

table! {
    /// libcuda.
    Driver {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, index: c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: CUdevice);
        fn cuCtxPushCurrent_v2(context: CUcontext);
        fn cuCtxPopCurrent_v2(context: *mut CUcontext);
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuCtxSetCurrent(context: CUcontext);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
        fn cuMemFree_v2(pointer: CUdeviceptr);
        fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
        fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void);
        fn cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream);
        fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemFreeHost(pointer: *mut c_void);
        fn cuMemsetD8Async(at: CUdeviceptr, value: u8, count: usize, stream: CUstream);
        fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, at: CUdeviceptr);
        fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, at: CUdeviceptr);
        fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamSynchronize(stream: CUstream);
        fn cuStreamQuery(stream: CUstream);
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
        fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        fn cuStreamGetCaptureInfo_v2(
            stream: CUstream,
            status: *mut c_uint,
            id: *mut c_ulonglong,
            graph: *mut CUgraph,
            nodes: *mut *const CUgraphNode,
            count: *mut usize,
        );
        fn cuStreamUpdateCaptureDependencies(stream: CUstream, nodes: *mut CUgraphNode, count: usize, flags: c_uint);
        fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
        fn cuGraphUpload(exec: CUgraphExec, stream: CUstream);
        fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        fn cuGraphExecDestroy(exec: CUgraphExec);
        fn cuGraphDestroy(graph: CUgraph);
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        fn cuModuleUnload(module: CUmodule);
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int);
        fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared: c_uint,
            stream: CUstream,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint);
        fn cuEventSynchronize(event: CUevent);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    } {
        fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
        fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;
    }
}

impl Driver {
    fn meaning(&self, code: c_int) -> String {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both set the pointer to a string of the library, or to null when they do not know the code.
        unsafe {
            self.cuGetErrorName(code, &mut name);
            self.cuGetErrorString(code, &mut text);
            if name.is_null() { words(name) } else { format!("{}: {}", words(name), words(text)) }
        }
    }
}

table! {
    /// libnvrtc.
    Nvrtc {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
        fn nvrtcCreateProgram(
            program: *mut nvrtcProgram,
            text: *const c_char,
            name: *const c_char,
            headers: c_int,
            header_texts: *const *const c_char,
            header_names: *const *const c_char,
        );
        fn nvrtcCompileProgram(program: nvrtcProgram, count: c_int, options: *const *const c_char);
        fn nvrtcDestroyProgram(program: *mut nvrtcProgram);
        fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize);
        fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char);
        fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize);
        fn nvrtcGetCUBIN(program: nvrtcProgram, image: *mut c_char);
        fn nvrtcGetNumSupportedArchs(count: *mut c_int);
        fn nvrtcGetSupportedArchs(archs: *mut c_int);
    } {
        fn nvrtcGetErrorString(code: c_int) -> *const c_char;
    }
}

table! {
    /// libcublasLt.
    BlasLt {
        fn cublasLtCreate(handle: *mut lt::cublasLtHandle_t);
        fn cublasLtDestroy(handle: lt::cublasLtHandle_t);
        fn cublasLtMatrixLayoutCreate(layout: *mut lt::cublasLtMatrixLayout_t, ty: c_uint, rows: u64, cols: u64, ld: i64);
        fn cublasLtMatrixLayoutSetAttribute(layout: lt::cublasLtMatrixLayout_t, attribute: c_uint, value: *const c_void, bytes: usize);
        fn cublasLtMatrixLayoutDestroy(layout: lt::cublasLtMatrixLayout_t);
        fn cublasLtMatmulDescCreate(desc: *mut lt::cublasLtMatmulDesc_t, compute: c_uint, scale: c_uint);
        fn cublasLtMatmulDescSetAttribute(desc: lt::cublasLtMatmulDesc_t, attribute: c_uint, value: *const c_void, bytes: usize);
        fn cublasLtMatmulDescDestroy(desc: lt::cublasLtMatmulDesc_t);
        fn cublasLtMatmulPreferenceCreate(preference: *mut lt::cublasLtMatmulPreference_t);
        fn cublasLtMatmulPreferenceSetAttribute(preference: lt::cublasLtMatmulPreference_t, attribute: c_uint, value: *const c_void, bytes: usize);
        fn cublasLtMatmulPreferenceDestroy(preference: lt::cublasLtMatmulPreference_t);
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: lt::cublasLtHandle_t,
            desc: lt::cublasLtMatmulDesc_t,
            a: lt::cublasLtMatrixLayout_t,
            b: lt::cublasLtMatrixLayout_t,
            c: lt::cublasLtMatrixLayout_t,
            d: lt::cublasLtMatrixLayout_t,
            preference: lt::cublasLtMatmulPreference_t,
            asked: c_int,
            results: *mut c_void,
            found: *mut c_int,
        );
        fn cublasLtMatmul(
            handle: lt::cublasLtHandle_t,
            desc: lt::cublasLtMatmulDesc_t,
            alpha: *const c_void,
            a: *const c_void,
            a_layout: lt::cublasLtMatrixLayout_t,
            b: *const c_void,
            b_layout: lt::cublasLtMatrixLayout_t,
            beta: *const c_void,
            c: *const c_void,
            c_layout: lt::cublasLtMatrixLayout_t,
            d: *mut c_void,
            d_layout: lt::cublasLtMatrixLayout_t,
            algo: *const lt::cublasLtMatmulAlgo_t,
            workspace: *mut c_void,
            workspace_bytes: usize,
            stream: CUstream,
        );
    } {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusString(code: c_int) -> *const c_char;
    }
}

table! {
    /// libcudnn.
    Dnn {
        fn cudnnCreate(handle: *mut dnn::cudnnHandle_t);
        fn cudnnDestroy(handle: dnn::cudnnHandle_t);
        fn cudnnSetStream(handle: dnn::cudnnHandle_t, stream: CUstream);
        fn cudnnBackendCreateDescriptor(kind: c_uint, desc: *mut dnn::cudnnBackendDescriptor_t);
        fn cudnnBackendDestroyDescriptor(desc: dnn::cudnnBackendDescriptor_t);
        fn cudnnBackendSetAttribute(desc: dnn::cudnnBackendDescriptor_t, name: c_uint, ty: c_uint, count: i64, elements: *const c_void);
        fn cudnnBackendGetAttribute(
            desc: dnn::cudnnBackendDescriptor_t,
            name: c_uint,
            ty: c_uint,
            asked: i64,
            count: *mut i64,
            elements: *mut c_void,
        );
        fn cudnnBackendFinalize(desc: dnn::cudnnBackendDescriptor_t);
        fn cudnnBackendExecute(handle: dnn::cudnnHandle_t, plan: dnn::cudnnBackendDescriptor_t, pack: dnn::cudnnBackendDescriptor_t);
        fn cudnnCreateTensorDescriptor(desc: *mut dnn::cudnnTensorDescriptor_t);
        fn cudnnSetTensorNdDescriptor(desc: dnn::cudnnTensorDescriptor_t, ty: c_uint, rank: c_int, extents: *const c_int, strides: *const c_int);
        fn cudnnDestroyTensorDescriptor(desc: dnn::cudnnTensorDescriptor_t);
        fn cudnnCreateFilterDescriptor(desc: *mut dnn::cudnnFilterDescriptor_t);
        fn cudnnSetFilterNdDescriptor(desc: dnn::cudnnFilterDescriptor_t, ty: c_uint, format: c_uint, rank: c_int, extents: *const c_int);
        fn cudnnDestroyFilterDescriptor(desc: dnn::cudnnFilterDescriptor_t);
        fn cudnnCreateConvolutionDescriptor(desc: *mut dnn::cudnnConvolutionDescriptor_t);
        fn cudnnSetConvolutionNdDescriptor(
            desc: dnn::cudnnConvolutionDescriptor_t,
            axes: c_int,
            pads: *const c_int,
            strides: *const c_int,
            dilations: *const c_int,
            mode: c_uint,
            compute: c_uint,
        );
        fn cudnnSetConvolutionGroupCount(desc: dnn::cudnnConvolutionDescriptor_t, groups: c_int);
        fn cudnnSetConvolutionMathType(desc: dnn::cudnnConvolutionDescriptor_t, math: c_uint);
        fn cudnnDestroyConvolutionDescriptor(desc: dnn::cudnnConvolutionDescriptor_t);
        fn cudnnCreateActivationDescriptor(desc: *mut dnn::cudnnActivationDescriptor_t);
        fn cudnnSetActivationDescriptor(desc: dnn::cudnnActivationDescriptor_t, mode: c_uint, nan: c_uint, bound: f64);
        fn cudnnDestroyActivationDescriptor(desc: dnn::cudnnActivationDescriptor_t);
        fn cudnnGetConvolutionForwardAlgorithm_v7(
            handle: dnn::cudnnHandle_t,
            x: dnn::cudnnTensorDescriptor_t,
            w: dnn::cudnnFilterDescriptor_t,
            conv: dnn::cudnnConvolutionDescriptor_t,
            y: dnn::cudnnTensorDescriptor_t,
            asked: c_int,
            found: *mut c_int,
            results: *mut c_void,
        );
        fn cudnnGetConvolutionForwardWorkspaceSize(
            handle: dnn::cudnnHandle_t,
            x: dnn::cudnnTensorDescriptor_t,
            w: dnn::cudnnFilterDescriptor_t,
            conv: dnn::cudnnConvolutionDescriptor_t,
            y: dnn::cudnnTensorDescriptor_t,
            algo: c_uint,
            bytes: *mut usize,
        );
        fn cudnnConvolutionForward(
            handle: dnn::cudnnHandle_t,
            alpha: *const c_void,
            x_desc: dnn::cudnnTensorDescriptor_t,
            x: *const c_void,
            w_desc: dnn::cudnnFilterDescriptor_t,
            w: *const c_void,
            conv: dnn::cudnnConvolutionDescriptor_t,
            algo: c_uint,
            workspace: *mut c_void,
            workspace_bytes: usize,
            beta: *const c_void,
            y_desc: dnn::cudnnTensorDescriptor_t,
            y: *mut c_void,
        );
        fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
            handle: dnn::cudnnHandle_t,
            w: dnn::cudnnFilterDescriptor_t,
            y: dnn::cudnnTensorDescriptor_t,
            conv: dnn::cudnnConvolutionDescriptor_t,
            x: dnn::cudnnTensorDescriptor_t,
            asked: c_int,
            found: *mut c_int,
            results: *mut c_void,
        );
        fn cudnnGetConvolutionBackwardDataWorkspaceSize(
            handle: dnn::cudnnHandle_t,
            w: dnn::cudnnFilterDescriptor_t,
            y: dnn::cudnnTensorDescriptor_t,
            conv: dnn::cudnnConvolutionDescriptor_t,
            x: dnn::cudnnTensorDescriptor_t,
            algo: c_uint,
            bytes: *mut usize,
        );
        fn cudnnConvolutionBackwardData(
            handle: dnn::cudnnHandle_t,
            alpha: *const c_void,
            w_desc: dnn::cudnnFilterDescriptor_t,
            w: *const c_void,
            y_desc: dnn::cudnnTensorDescriptor_t,
            y: *const c_void,
            conv: dnn::cudnnConvolutionDescriptor_t,
            algo: c_uint,
            workspace: *mut c_void,
            workspace_bytes: usize,
            beta: *const c_void,
            x_desc: dnn::cudnnTensorDescriptor_t,
            x: *mut c_void,
        );
        fn cudnnConvolutionBiasActivationForward(
            handle: dnn::cudnnHandle_t,
            alpha1: *const c_void,
            x_desc: dnn::cudnnTensorDescriptor_t,
            x: *const c_void,
            w_desc: dnn::cudnnFilterDescriptor_t,
            w: *const c_void,
            conv: dnn::cudnnConvolutionDescriptor_t,
            algo: c_uint,
            workspace: *mut c_void,
            workspace_bytes: usize,
            alpha2: *const c_void,
            z_desc: dnn::cudnnTensorDescriptor_t,
            z: *const c_void,
            bias_desc: dnn::cudnnTensorDescriptor_t,
            bias: *const c_void,
            activation: dnn::cudnnActivationDescriptor_t,
            y_desc: dnn::cudnnTensorDescriptor_t,
            y: *mut c_void,
        );
    } {
        fn cudnnGetVersion() -> usize;
        fn cudnnGetCudartVersion() -> usize;
        fn cudnnGetErrorString(code: c_int) -> *const c_char;
    }
}

/// The most processes on a device that are looked through.
const MOST_PROCESSES: usize = 256;

/// A process on a device, as `nvmlProcessInfo_t` has it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(dead_code, reason = "the library writes all of it")]
pub(super) struct NvmlProcess {
    pub(super) pid: c_uint,
    /// `u64::MAX` if the driver does not count them.
    pub(super) bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

table! {
    /// libnvidia-ml, which counts a device's memory by processes.
    Nvml {
        fn nvmlInitWithFlags(flags: c_uint);
        fn nvmlShutdown();
        fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint);
        fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut *mut c_void);
        fn nvmlDeviceGetComputeRunningProcesses_v3(device: *mut c_void, count: *mut c_uint, list: *mut NvmlProcess);
    } {
        fn nvmlErrorString(code: c_int) -> *const c_char;
    }
}

impl Nvml {
    /// The driver's version.
    pub(super) fn driver(&self) -> Result<String, Refusal> {
        let mut version = [0u8; 80];
        // SAFETY: the text is cut to the buffer, with its zero; the library is shut down as often as it is initialised.
        unsafe {
            self.nvmlInitWithFlags(0)?;
            let told = self.nvmlSystemGetDriverVersion(version.as_mut_ptr().cast(), version.len() as c_uint);
            let shut = self.nvmlShutdown();
            told.and(shut)?;
        }
        Ok(CStr::from_bytes_until_nul(&version).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The processes that compute on the device at a PCI address.
    pub(super) fn processes(&self, pci: &CStr) -> Result<Vec<NvmlProcess>, Refusal> {
        let (mut device, mut count) = (std::ptr::null_mut(), MOST_PROCESSES as c_uint);
        let mut list = vec![NvmlProcess::default(); MOST_PROCESSES];
        // SAFETY: `device` is written before it is read, the list has room for `count`, and the library is shut down as often as it is initialised.
        unsafe {
            self.nvmlInitWithFlags(0)?;
            let told = self.nvmlDeviceGetHandleByPciBusId_v2(pci.as_ptr(), &mut device);
            let told =
                told.and_then(|()| self.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, list.as_mut_ptr()));
            let shut = self.nvmlShutdown();
            told.and(shut)?;
        }
        list.truncate(count as usize);
        Ok(list)
    }
}

/// ncclComm_t.
pub(super) type NcclComm = *mut c_void;

/// ncclUniqueId, by which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NcclId(pub(super) [u8; 128]);

/// ncclConfig_t of nccl.h 2.18, and the first field that came later, which takes the place of padding. Later versions of the library take it
/// as one of that version, by its first fields.
#[repr(C)]
pub(super) struct NcclConfig {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
    pub(super) traffic_class: c_int,
}

table! {
    /// libnccl, by nccl.h of 2.18 and later.
    Nccl {
        fn ncclGetVersion(version: *mut c_int);
        fn ncclGetUniqueId(id: *mut NcclId);
        fn ncclCommInitRankConfig(comm: *mut NcclComm, ranks: c_int, id: NcclId, rank: c_int, config: *mut NcclConfig);
        fn ncclCommSplit(comm: NcclComm, color: c_int, key: c_int, part: *mut NcclComm, config: *mut NcclConfig);
        fn ncclCommGetAsyncError(comm: NcclComm, state: *mut c_int);
        fn ncclCommAbort(comm: NcclComm);
        fn ncclCommDestroy(comm: NcclComm);
        fn ncclGroupStart();
        fn ncclGroupEnd();
        fn ncclAllReduce(
            read: *const c_void, write: *mut c_void, count: usize, ty: c_int, op: c_int, comm: NcclComm, stream: CUstream,
        );
        fn ncclReduceScatter(
            read: *const c_void, write: *mut c_void, got: usize, ty: c_int, op: c_int, comm: NcclComm, stream: CUstream,
        );
        fn ncclAllGather(
            read: *const c_void, write: *mut c_void, given: usize, ty: c_int, comm: NcclComm, stream: CUstream,
        );
        fn ncclSend(read: *const c_void, count: usize, ty: c_int, peer: c_int, comm: NcclComm, stream: CUstream);
        fn ncclRecv(write: *mut c_void, count: usize, ty: c_int, peer: c_int, comm: NcclComm, stream: CUstream);
    } {
        fn ncclGetErrorString(code: c_int) -> *const c_char;
        fn ncclGetLastError(comm: NcclComm) -> *const c_char;
    }
}

impl Nccl {
    /// The last error of this process, in the library's words.
    pub(super) fn last_error(&self) -> String {
        // SAFETY: the library ignores which communicator is meant, and returns a string.
        unsafe { words(self.ncclGetLastError(std::ptr::null_mut())) }
    }
}
