//! NumPy's array files.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::file;
use crate::shape::Shape;
use crate::tensor::Tensor;
use half::{bf16, f16};
use npyz::{NpyFile, Order, WriterBuilder};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

/// Reads an `.npy` file, in C or Fortran order.
///
/// # Errors
/// When the file cannot be read, is cut short, or holds elements that no [`DType`] is for.
pub fn read(path: &Path) -> Result<Tensor> {
    let fail = |e| Error::file(path, "read the array", e);
    let file = File::open(path).map_err(|e| Error::file(path, "open", e))?;
    let length = file.metadata().map_err(fail)?.len();
    let mut file = BufReader::new(file);
    let npy = NpyFile::new(&mut file).map_err(fail)?;
    let kind = npy.dtype().descr();
    let kind = kind.trim_matches('\'');
    let bad = |what: String| Error::File { path: path.to_owned(), what };
    let dtype = match kind {
        "<f4" => DType::F32,
        "<f2" => DType::F16,
        "<f8" => DType::F64,
        "<i8" => DType::I64,
        "<i4" => DType::I32,
        "|u1" => DType::U8,
        "|i1" => DType::I8,
        "|b1" => DType::Bool,
        other => return Err(bad(format!("elements of type {other} are not supported; convert them to f4, i8, ..."))),
    };
    let fortran = npy.order() == Order::Fortran;
    let shape = npy.shape().iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>();
    let mut shape = Shape::new(shape.map_err(|_| bad("its shape does not fit into memory".into()))?);
    let bytes = shape.checked_len().and_then(|n| n.checked_mul(dtype.size()));
    if bytes.is_none_or(|n| n as u64 > length) {
        return Err(bad(format!("the header says {dtype}{shape}, but the file has only {length} bytes")));
    }
    fn typed<T: npyz::Deserialize, R: std::io::Read>(
        npy: NpyFile<R>,
        le: impl Fn(T, &mut Vec<u8>),
    ) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for value in npy.data::<T>().map_err(std::io::Error::other)? {
            le(value?, &mut bytes);
        }
        Ok(bytes)
    }
    let bytes = match dtype {
        DType::F32 => typed(npy, |v: f32, b| b.extend(v.to_le_bytes())),
        DType::F16 => typed(npy, |v: f16, b| b.extend(v.to_le_bytes())),
        DType::F64 => typed(npy, |v: f64, b| b.extend(v.to_le_bytes())),
        DType::I64 => typed(npy, |v: i64, b| b.extend(v.to_le_bytes())),
        DType::I32 => typed(npy, |v: i32, b| b.extend(v.to_le_bytes())),
        DType::U8 => typed(npy, |v: u8, b| b.push(v)),
        DType::I8 => typed(npy, |v: i8, b| b.extend(v.to_le_bytes())),
        DType::Bool | DType::BF16 => typed(npy, |v: bool, b| b.push(u8::from(v))),
    }
    .map_err(fail)?;
    if file.read(&mut [0]).map_err(fail)? > 0 {
        return Err(bad(format!("the header says {dtype}{shape}, but there is more behind it: expected one array")));
    }
    if !fortran {
        return Tensor::new(dtype, shape, bytes);
    }
    shape.reverse();
    Ok(Tensor::new(dtype, shape, bytes)?.transposed())
}

/// Writes an `.npy` file; it appears under its name only when it is whole. `bf16` is written as `f4`.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, tensor: &Tensor) -> Result<()> {
    file::write_whole(path, "write the array", |file| match tensor.dtype() {
        DType::F32 => put::<f32>(file, tensor),
        DType::F16 => put::<f16>(file, tensor),
        DType::F64 => put::<f64>(file, tensor),
        DType::I64 => put::<i64>(file, tensor),
        DType::I32 => put::<i32>(file, tensor),
        DType::U8 => put::<u8>(file, tensor),
        DType::I8 => put::<i8>(file, tensor),
        DType::Bool => put_with(file, tensor, |v: u8| v != 0),
        DType::BF16 => put_with(file, tensor, |v: bf16| v.to_f32()),
    })
}

fn put<T: npyz::AutoSerialize + bytemuck::AnyBitPattern>(file: impl Write, tensor: &Tensor) -> std::io::Result<()> {
    put_with(file, tensor, |v: T| v)
}

fn put_with<T: bytemuck::AnyBitPattern, U: npyz::AutoSerialize>(
    file: impl Write,
    tensor: &Tensor,
    convert: impl Fn(T) -> U,
) -> std::io::Result<()> {
    let shape: Vec<u64> = tensor.shape().iter().map(|&d| d as u64).collect();
    let mut writer = npyz::WriteOptions::<U>::new().default_dtype().shape(&shape).writer(file).begin_nd()?;
    for chunk in tensor.bytes().chunks_exact(size_of::<T>()) {
        writer.push(&convert(bytemuck::pod_read_unaligned(chunk)))?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_a_file() {
        let folder = std::env::temp_dir().join(format!("plimsoll-npy-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        for dtype in DType::ALL {
            let path = folder.join(format!("{dtype}.npy"));
            let tensor = Tensor::from_f64(dtype, [2, 3], &[0.0, 1.0, 2.0, -3.0, 4.0, 5.0]);
            write(&path, &tensor).expect("writes");
            let back = read(&path).expect("reads");
            assert_eq!((back.shape(), back.to_f64()), (tensor.shape(), tensor.to_f64()));
            let whole = std::fs::read(&path).expect("is there");
            for cut in [0, 5, 20, whole.len() - 1] {
                std::fs::write(&path, &whole[..cut]).expect("writes");
                assert!(read(&path).is_err(), "{dtype} cut at {cut}");
            }
            std::fs::write(&path, [&whole[..], &[0]].concat()).expect("writes");
            assert!(read(&path).is_err(), "{dtype} with a byte behind it");
        }
        let scalar = folder.join("scalar.npy");
        write(&scalar, &Tensor::from_f64(DType::F32, Shape::default(), &[2.5])).expect("writes");
        assert_eq!(read(&scalar).expect("reads").to_f64(), [2.5]);
        std::fs::remove_dir_all(&folder).expect("is there");
    }

    #[test]
    fn fortran_order_is_understood() {
        let path = std::env::temp_dir().join(format!("plimsoll-fortran-{}.npy", std::process::id()));
        let file = File::create(&path).expect("a temporary file");
        let options = npyz::WriteOptions::<f32>::new().default_dtype().shape(&[2, 3]).order(Order::Fortran);
        let mut writer = options.writer(file).begin_nd().expect("begins");
        [1f32, 4.0, 2.0, 5.0, 3.0, 6.0].iter().for_each(|v| writer.push(v).expect("pushes"));
        writer.finish().expect("finishes");
        assert_eq!(read(&path).expect("reads").to_f64(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        std::fs::remove_file(&path).expect("is there");
    }
}
