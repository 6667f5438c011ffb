//! Convolutions by cuDNN: everything is decided once, when a launch is recorded.

use super::api::{Dnn, Refusal};
use cudarc::cudnn::sys as dnn;
use cudarc::cudnn::sys::cudnnConvolutionFwdAlgo_t as Algo;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use plimsoll_core::dtype::DType;
use plimsoll_core::kernel::library::{Activation, Conv, Image};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// The library with a handle in the current context, whose work goes to one stream.
pub(super) struct CudnnHandle {
    pub(super) dnn: Arc<Dnn>,
    pub(super) handle: dnn::cudnnHandle_t,
}

/// cudnnConvolutionFwdAlgoPerf_t in integers: a newer library may know more codes than the bindings.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(dead_code, reason = "the library writes all of it")]
struct Choice {
    algo: u32,
    status: c_int,
    time: f32,
    memory: usize,
    determinism: u32,
    math: u32,
    reserved: [c_int; 3],
}

/// A convolution that is ready to be launched.
pub(super) struct Convolution {
    dnn: Arc<Dnn>,
    handle: dnn::cudnnHandle_t,
    x: dnn::cudnnTensorDescriptor_t,
    y: dnn::cudnnTensorDescriptor_t,
    bias: dnn::cudnnTensorDescriptor_t,
    w: dnn::cudnnFilterDescriptor_t,
    conv: dnn::cudnnConvolutionDescriptor_t,
    activation: dnn::cudnnActivationDescriptor_t,
    algo: u32,
    /// True if x is the result.
    backward: bool,
    /// x, w, y.
    pointers: [CUdeviceptr; 3],
    /// The operands of the fused call: the bias, and the residual if there is one.
    fused: Option<(CUdeviceptr, Option<CUdeviceptr>)>,
    workspace: (CUdeviceptr, usize),
}

pub(super) fn data_type(dtype: DType) -> Result<u32, String> {
    Ok(match dtype {
        DType::F32 => dnn::cudnnDataType_t::CUDNN_DATA_FLOAT as u32,
        DType::F16 => dnn::cudnnDataType_t::CUDNN_DATA_HALF as u32,
        DType::BF16 => dnn::cudnnDataType_t::CUDNN_DATA_BFLOAT16 as u32,
        other => return Err(format!("cuDNN is not asked for {other}")),
    })
}

fn ints(values: &[u64]) -> Result<Vec<c_int>, String> {
    values.iter().map(|&v| c_int::try_from(v).map_err(|_| format!("{v} is more than cuDNN counts"))).collect()
}

impl CudnnHandle {
    /// Makes a handle in the current context.
    pub(super) fn new(dnn: Arc<Dnn>, stream: CUstream) -> Result<CudnnHandle, Refusal> {
        let mut handle = null_mut();
        // SAFETY: the context is current; the handle is destroyed with the value.
        unsafe { dnn.cudnnCreate(&mut handle) }?;
        let cudnn = CudnnHandle { dnn, handle };
        // SAFETY: the stream lives longer than the handle.
        unsafe { cudnn.dnn.cudnnSetStream(handle, stream) }?;
        Ok(cudnn)
    }

    /// Fixes descriptors for a call on these addresses: one per slot, and the workspace's. Chooses the algorithm if none is given.
    pub(super) fn prepare(
        &self,
        call: &Conv,
        slots: &[CUdeviceptr],
        workspace: (CUdeviceptr, u64),
        algo: &mut Option<u32>,
    ) -> Result<Convolution, String> {
        let at = |image: &Image| slots[image.slot] + image.offset * image.dtype.size() as u64;
        let bias = call.bias.as_ref().map(|bias| slots[bias.slot] + bias.offset * call.y.dtype.size() as u64);
        let plain = call.residual.is_none() && call.activation == Activation::None;
        let fused = match bias {
            Some(bias) => Some((bias, call.residual.as_ref().map(at))),
            None if plain => None,
            None => return Err("cuDNN adds and activates only behind a bias".into()),
        };
        if call.residual.as_ref().is_some_and(|z| (&z.dims, &z.strides) != (&call.y.dims, &call.y.strides)) {
            return Err("cuDNN adds only what is laid out as the result".into());
        }
        let mut convolution = Convolution {
            dnn: Arc::clone(&self.dnn),
            handle: self.handle,
            x: null_mut(),
            y: null_mut(),
            bias: null_mut(),
            w: null_mut(),
            conv: null_mut(),
            activation: null_mut(),
            algo: 0,
            backward: call.backward,
            pointers: [at(&call.x), at(&call.w), at(&call.y)],
            fused,
            workspace: (workspace.0, workspace.1 as usize),
        };
        self.describe(&mut convolution, call)?;
        convolution.algo = match *algo {
            Some(algo) => algo,
            None => self.choose(&convolution, call)?,
        };
        *algo = Some(convolution.algo);
        Ok(convolution)
    }

    fn describe(&self, convolution: &mut Convolution, call: &Conv) -> Result<(), String> {
        let ty = data_type(call.x.dtype)?;
        let Image { dims, .. } = &call.y;
        let mut channels = vec![1; dims.len()];
        channels[1] = dims[1];
        let mut dense = vec![1; dims.len()];
        dense[0] = dims[1];
        let tensors = [
            (&mut convolution.x, ints(&call.x.dims)?, ints(&call.x.strides)?),
            (&mut convolution.y, ints(dims)?, ints(&call.y.strides)?),
            (&mut convolution.bias, ints(&channels)?, ints(&dense)?),
        ];
        let (pads, strides, dilations) = (ints(&call.pads)?, ints(&call.strides)?, ints(&call.dilations)?);
        let filter = ints(&call.w.dims)?;
        // Without leave to round, products of f32 are those of f32: the default would be TF32.
        let math = match (call.x.dtype, call.tf32) {
            (DType::F32, false) => dnn::cudnnMathType_t::CUDNN_FMA_MATH,
            (DType::F32, true) => dnn::cudnnMathType_t::CUDNN_DEFAULT_MATH,
            _ => dnn::cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
        };
        let format = if call.channels_last {
            dnn::cudnnTensorFormat_t::CUDNN_TENSOR_NHWC
        } else {
            dnn::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW
        };
        let mode = dnn::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION as u32;
        let f32 = dnn::cudnnDataType_t::CUDNN_DATA_FLOAT as u32;
        let activation = match call.activation {
            Activation::None => dnn::cudnnActivationMode_t::CUDNN_ACTIVATION_IDENTITY,
            Activation::Relu => dnn::cudnnActivationMode_t::CUDNN_ACTIVATION_RELU,
            Activation::GeluTanh => return Err("cuDNN has no GELU behind a convolution".into()),
        };
        let nan = dnn::cudnnNanPropagation_t::CUDNN_PROPAGATE_NAN as u32;
        let groups = ints(&[call.groups])?[0];
        // SAFETY: descriptors live as long as `convolution`; lists have the lengths that are told.
        unsafe {
            for (tensor, dims, strides) in tensors {
                self.dnn.cudnnCreateTensorDescriptor(tensor)?;
                let rank = dims.len() as c_int;
                self.dnn.cudnnSetTensorNdDescriptor(*tensor, ty, rank, dims.as_ptr(), strides.as_ptr())?;
            }
            self.dnn.cudnnCreateFilterDescriptor(&mut convolution.w)?;
            let rank = filter.len() as c_int;
            self.dnn.cudnnSetFilterNdDescriptor(convolution.w, ty, format as u32, rank, filter.as_ptr())?;
            self.dnn.cudnnCreateConvolutionDescriptor(&mut convolution.conv)?;
            let (conv, axes) = (convolution.conv, pads.len() as c_int);
            let (pads, strides, dilations) = (pads.as_ptr(), strides.as_ptr(), dilations.as_ptr());
            self.dnn.cudnnSetConvolutionNdDescriptor(conv, axes, pads, strides, dilations, mode, f32)?;
            self.dnn.cudnnSetConvolutionGroupCount(conv, groups)?;
            self.dnn.cudnnSetConvolutionMathType(conv, math as u32)?;
            self.dnn.cudnnCreateActivationDescriptor(&mut convolution.activation)?;
            self.dnn.cudnnSetActivationDescriptor(convolution.activation, activation as u32, nan, 0.0)?;
        }
        Ok(())
    }

    /// The call's algorithm, or the one that the library thinks fastest within the workspace.
    fn choose(&self, convolution: &Convolution, call: &Conv) -> Result<u32, String> {
        const ASKED: usize = 8;
        let Convolution { x, y, w, conv, backward, .. } = *convolution;
        let mut choices = [Choice::default(); 2 * ASKED];
        let mut found = 0;
        // SAFETY: there are as many choices as are asked for.
        unsafe {
            let (results, asked) = (choices.as_mut_ptr().cast(), ASKED as c_int);
            if backward {
                let dnn = &self.dnn;
                dnn.cudnnGetConvolutionBackwardDataAlgorithm_v7(
                    self.handle,
                    w,
                    y,
                    conv,
                    x,
                    asked,
                    &mut found,
                    results,
                )?;
            } else {
                self.dnn.cudnnGetConvolutionForwardAlgorithm_v7(
                    self.handle,
                    x,
                    w,
                    conv,
                    y,
                    asked,
                    &mut found,
                    results,
                )?;
            }
        }
        let rank = call.algorithm.map_or(0, |algorithm| algorithm.rank as usize);
        let most = call.algorithm.map_or(convolution.workspace.1, |algorithm| algorithm.workspace as usize);
        // With nothing to apply, the fused call knows one algorithm.
        let only = (convolution.fused.is_some() && call.activation == Activation::None)
            .then_some(Algo::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM as u32);
        let fits = |choice: &&Choice| {
            let mut bytes = 0;
            // SAFETY: it writes a number.
            let told = unsafe {
                if backward {
                    let dnn = &self.dnn;
                    dnn.cudnnGetConvolutionBackwardDataWorkspaceSize(
                        self.handle,
                        w,
                        y,
                        conv,
                        x,
                        choice.algo,
                        &mut bytes,
                    )
                } else {
                    self.dnn.cudnnGetConvolutionForwardWorkspaceSize(
                        self.handle,
                        x,
                        w,
                        conv,
                        y,
                        choice.algo,
                        &mut bytes,
                    )
                }
            };
            // One of the algorithms adds in the order in which its parts come.
            let steady = !backward || choice.determinism == 1;
            steady && choice.status == 0 && only.is_none_or(|only| only == choice.algo) && told.is_ok() && bytes <= most
        };
        let chosen = choices[..(found.max(0) as usize).min(ASKED)].iter().filter(fits).nth(rank);
        let missing = || format!("cuDNN has no algorithm of rank {rank} within {most} bytes of workspace");
        let chosen = chosen.ok_or_else(missing)?;
        Ok(chosen.algo)
    }
}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // SAFETY: convolutions that use the handle are gone: records are dropped first. Nobody could be told of a refusal.
        let _ = unsafe { self.dnn.cudnnDestroy(self.handle) };
    }
}

impl Convolution {
    /// Puts the convolution into the handle's stream.
    pub(super) fn launch(&self, stream: CUstream) -> Result<(), Refusal> {
        // SAFETY: the handle lives as long as the convolution, the stream as long as the backend.
        unsafe { self.dnn.cudnnSetStream(self.handle, stream) }?;
        let [x, w, y] = self.pointers.map(|p| p as usize as *mut c_void);
        let (workspace, bytes) = (self.workspace.0 as usize as *mut c_void, self.workspace.1);
        let one = std::ptr::from_ref(&1f32).cast::<c_void>();
        let zero = std::ptr::from_ref(&0f32).cast::<c_void>();
        // SAFETY: descriptors live as long as the convolution. The plan's checker holds the call against the kernel, whose operands lie
        // within the launch's slices; the algorithm needs no more workspace than there is.
        unsafe {
            match self.fused {
                None if self.backward => self.dnn.cudnnConvolutionBackwardData(
                    self.handle,
                    one,
                    self.w,
                    w,
                    self.y,
                    y,
                    self.conv,
                    self.algo,
                    workspace,
                    bytes,
                    zero,
                    self.x,
                    x,
                ),
                None => self.dnn.cudnnConvolutionForward(
                    self.handle,
                    one,
                    self.x,
                    x,
                    self.w,
                    w,
                    self.conv,
                    self.algo,
                    workspace,
                    bytes,
                    zero,
                    self.y,
                    y,
                ),
                Some((bias, residual)) => self.dnn.cudnnConvolutionBiasActivationForward(
                    self.handle,
                    one,
                    self.x,
                    x,
                    self.w,
                    w,
                    self.conv,
                    self.algo,
                    workspace,
                    bytes,
                    if residual.is_some() { one } else { zero },
                    self.y,
                    residual.map_or(y, |z| z as usize as *mut c_void),
                    self.bias,
                    bias as usize as *const c_void,
                    self.activation,
                    self.y,
                    y,
                ),
            }
        }
    }
}

impl Drop for Convolution {
    fn drop(&mut self) {
        // SAFETY: each descriptor is destroyed once. Nobody could be told of a refusal.
        unsafe {
            for tensor in [self.x, self.y, self.bias].into_iter().filter(|t| !t.is_null()) {
                let _ = self.dnn.cudnnDestroyTensorDescriptor(tensor);
            }
            if !self.w.is_null() {
                let _ = self.dnn.cudnnDestroyFilterDescriptor(self.w);
            }
            if !self.conv.is_null() {
                let _ = self.dnn.cudnnDestroyConvolutionDescriptor(self.conv);
            }
            if !self.activation.is_null() {
                let _ = self.dnn.cudnnDestroyActivationDescriptor(self.activation);
            }
        }
    }
}
