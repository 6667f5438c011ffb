//! Matrix products by cuBLASLt: everything is decided once, when a launch is recorded.

use super::api::{BlasLt, Refusal};
use cudarc::cublaslt::sys as lt;
use cudarc::cublaslt::sys::cublasComputeType_t as Compute;
use cudarc::cublaslt::sys::cublasLtEpilogue_t as Epilogue;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as Desc;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use cudarc::cublaslt::sys::cublasLtMatrixLayoutAttribute_t as Layout;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use plimsoll_core::dtype::DType;
use plimsoll_core::kernel::library::{Activation, MatMul, Matrix};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// The library's name for a way to compute a product.
pub(super) type Algorithm = lt::cublasLtMatmulAlgo_t;

/// The library with a handle in the current context.
pub(super) struct Blas {
    lt: Arc<BlasLt>,
    handle: lt::cublasLtHandle_t,
}

/// cublasLtMatmulHeuristicResult_t, whose state may be a code that the bindings do not know.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(dead_code, reason = "the library writes all of it")]
struct Choice {
    algo: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// A product that is ready to be launched.
pub(super) struct Product {
    lt: Arc<BlasLt>,
    handle: lt::cublasLtHandle_t,
    desc: lt::cublasLtMatmulDesc_t,
    layouts: [lt::cublasLtMatrixLayout_t; 4],
    algo: Algorithm,
    /// A, B, C, D.
    pointers: [CUdeviceptr; 4],
    workspace: (CUdeviceptr, usize),
    /// Factors of the product and of C, in the type that the library computes with.
    factors: Factors,
}

enum Factors {
    F32([f32; 2]),
    F64([f64; 2]),
}

fn data_type(dtype: DType) -> Result<u32, String> {
    Ok(match dtype {
        DType::F32 => lt::cudaDataType_t::CUDA_R_32F as u32,
        DType::F64 => lt::cudaDataType_t::CUDA_R_64F as u32,
        DType::F16 => lt::cudaDataType_t::CUDA_R_16F as u32,
        DType::BF16 => lt::cudaDataType_t::CUDA_R_16BF as u32,
        other => return Err(format!("no products of {other}")),
    })
}

impl Blas {
    /// Makes a handle in the current context.
    pub(super) fn new(lt: Arc<BlasLt>) -> Result<Blas, Refusal> {
        let mut handle = null_mut();
        // SAFETY: the context is current; the handle is destroyed with the value.
        unsafe { lt.cublasLtCreate(&mut handle) }?;
        Ok(Blas { lt, handle })
    }

    /// Fixes descriptors for a call on these addresses: one per slot, and the workspace's. Chooses the algorithm if none is given.
    pub(super) fn prepare(
        &self,
        call: &MatMul,
        slots: &[CUdeviceptr],
        workspace: (CUdeviceptr, u64),
        algo: &mut Option<Algorithm>,
    ) -> Result<Product, String> {
        let wide = call.a.dtype == DType::F64;
        let (compute, scale) = match (wide, call.tf32) {
            (true, _) => (Compute::CUBLAS_COMPUTE_64F, DType::F64),
            (false, true) => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DType::F32),
            (false, false) => (Compute::CUBLAS_COMPUTE_32F, DType::F32),
        };
        let factors = [call.alpha, f64::from(u8::from(call.c.is_some()))];
        let at = |matrix: &Matrix| slots[matrix.slot] + matrix.offset * matrix.dtype.size() as u64;
        let c = call.c.as_ref().unwrap_or(&call.d);
        let mut product = Product {
            lt: Arc::clone(&self.lt),
            handle: self.handle,
            desc: null_mut(),
            layouts: [null_mut(); 4],
            algo: Algorithm { data: [0; 8] },
            pointers: [at(&call.a), at(&call.b), at(c), at(&call.d)],
            workspace: (workspace.0, workspace.1 as usize),
            factors: if wide { Factors::F64(factors) } else { Factors::F32(factors.map(|f| f as f32)) },
        };
        let matrices = [
            (&call.a, [call.m, call.k]),
            (&call.b, [call.k, call.n]),
            (c, [call.m, call.n]),
            (&call.d, [call.m, call.n]),
        ];
        // SAFETY: descriptors live as long as `product`; attributes are given with their sizes.
        unsafe {
            self.lt.cublasLtMatmulDescCreate(&mut product.desc, compute as u32, data_type(scale)?)?;
            for (layout, (matrix, [rows, columns])) in product.layouts.iter_mut().zip(matrices) {
                let (rows, columns) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
                let (ty, leading) = (data_type(matrix.dtype)?, matrix.leading as i64);
                self.lt.cublasLtMatrixLayoutCreate(layout, ty, rows, columns, leading)?;
                self.set_layout(*layout, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(call.batch as i32))?;
                let between = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                self.set_layout(*layout, between, &(matrix.stride as i64))?;
            }
        }
        self.describe(&product, call, slots)?;
        product.algo = match *algo {
            Some(algo) => algo,
            None => self.choose(&product, call, &matrices.map(|(m, _)| m.alignment()))?,
        };
        *algo = Some(product.algo);
        Ok(product)
    }

    /// Transposes and epilogue.
    fn describe(&self, product: &Product, call: &MatMul, slots: &[CUdeviceptr]) -> Result<(), Refusal> {
        let transposed = |matrix: &Matrix| i32::from(matrix.transposed);
        self.set(product, Desc::CUBLASLT_MATMUL_DESC_TRANSA, &transposed(&call.a))?;
        self.set(product, Desc::CUBLASLT_MATMUL_DESC_TRANSB, &transposed(&call.b))?;
        let epilogue = match (call.activation, call.bias.is_some()) {
            (Activation::None, false) => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            (Activation::None, true) => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            (Activation::Relu, false) => Epilogue::CUBLASLT_EPILOGUE_RELU,
            (Activation::Relu, true) => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
            (Activation::GeluTanh, false) => Epilogue::CUBLASLT_EPILOGUE_GELU,
            (Activation::GeluTanh, true) => Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS,
        };
        self.set(product, Desc::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if let Some(bias) = &call.bias {
            let at = slots[bias.slot] + bias.offset * call.d.dtype.size() as u64;
            self.set(product, Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at)?;
        }
        Ok(())
    }

    fn set<T>(&self, product: &Product, attribute: Desc, value: &T) -> Result<(), Refusal> {
        let value_at = std::ptr::from_ref(value).cast();
        // SAFETY: the library copies the value.
        unsafe { self.lt.cublasLtMatmulDescSetAttribute(product.desc, attribute as u32, value_at, size_of::<T>()) }
    }

    fn set_layout<T>(&self, layout: lt::cublasLtMatrixLayout_t, attribute: Layout, value: &T) -> Result<(), Refusal> {
        let value_at = std::ptr::from_ref(value).cast();
        // SAFETY: the library copies the value.
        unsafe { self.lt.cublasLtMatrixLayoutSetAttribute(layout, attribute as u32, value_at, size_of::<T>()) }
    }

    /// The call's algorithm, or the one that the library thinks fastest within the workspace.
    fn choose(&self, product: &Product, call: &MatMul, alignments: &[u32; 4]) -> Result<Algorithm, String> {
        const ASKED: usize = 8;
        let rank = call.algorithm.map_or(0, |algorithm| algorithm.rank as usize);
        let workspace = call.algorithm.map_or(product.workspace.1, |algorithm| algorithm.workspace as usize);
        let mut preference = null_mut();
        let algo = Algorithm { data: [0; 8] };
        let none = Choice { algo, workspace: 0, state: -1, waves: 0.0, reserved: [0; 4] };
        let mut choices = [none; ASKED];
        let mut found = 0;
        // SAFETY: the preference is destroyed on every path; there are as many choices as are asked for.
        unsafe {
            self.lt.cublasLtMatmulPreferenceCreate(&mut preference)?;
            let set = |attribute: Preference, value: *const c_void, bytes: usize| {
                self.lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute as u32, value, bytes)
            };
            let attributes = [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ];
            let mut result = set(
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&workspace).cast(),
                size_of::<usize>(),
            );
            for (attribute, alignment) in attributes.into_iter().zip(alignments) {
                result = result.and_then(|()| set(attribute, std::ptr::from_ref(alignment).cast(), size_of::<u32>()));
            }
            let [a, b, c, d] = product.layouts;
            let result = result.and_then(|()| {
                self.lt.cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    product.desc,
                    a,
                    b,
                    c,
                    d,
                    preference,
                    ASKED as c_int,
                    choices.as_mut_ptr().cast(),
                    &mut found,
                )
            });
            let destroyed = self.lt.cublasLtMatmulPreferenceDestroy(preference);
            result.and(destroyed)?;
        }
        let choices = &choices[..(found.max(0) as usize).min(ASKED)];
        let fits = |choice: &&Choice| choice.state == 0 && choice.workspace <= workspace;
        let chosen = choices.iter().filter(fits).nth(rank).map(|choice| choice.algo);
        chosen.ok_or_else(|| format!("cuBLASLt has no algorithm of rank {rank} within {workspace} bytes of workspace"))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: products that use the handle are gone: records are dropped first. Nobody could be told of a refusal.
        let _ = unsafe { self.lt.cublasLtDestroy(self.handle) };
    }
}

impl Product {
    /// Puts the product into a stream.
    pub(super) fn launch(&self, stream: CUstream) -> Result<(), Refusal> {
        let factors: [*const c_void; 2] = match &self.factors {
            Factors::F32([alpha, beta]) => [std::ptr::from_ref(alpha).cast(), std::ptr::from_ref(beta).cast()],
            Factors::F64([alpha, beta]) => [std::ptr::from_ref(alpha).cast(), std::ptr::from_ref(beta).cast()],
        };
        let [a, b, c, d] = self.pointers.map(|p| p as usize as *mut c_void);
        let [a_layout, b_layout, c_layout, d_layout] = self.layouts;
        // SAFETY: descriptors live as long as the product. The plan's checker holds the call against the kernel, whose operands lie within
        // the launch's slices; the algorithm needs no more workspace than there is.
        unsafe {
            self.lt.cublasLtMatmul(
                self.handle,
                self.desc,
                factors[0],
                a,
                a_layout,
                b,
                b_layout,
                factors[1],
                c,
                c_layout,
                d,
                d_layout,
                &self.algo,
                self.workspace.0 as usize as *mut c_void,
                self.workspace.1,
                stream,
            )
        }
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: each descriptor is destroyed once. Nobody could be told of a refusal.
        unsafe {
            for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
                let _ = self.lt.cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.desc.is_null() {
                let _ = self.lt.cublasLtMatmulDescDestroy(self.desc);
            }
        }
    }
}
