//! The errors between a file and a device.

use types::Dtype;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {n} bytes do not fit in memory")]
    OutOfMemory { what: &'static str, n: usize },
    #[error("a matrix of {rows} x {k} in {dtype:?} needs {needed} bytes, the file has {have}")]
    Truncated { rows: usize, k: usize, dtype: Dtype, needed: usize, have: usize },
    #[error("{0}")]
    Unsupported(#[from] types::Unsupported),
    #[error("shape: {0}")]
    Shape(String),
    #[error("no CUDA: {0}")]
    NoCuda(String),
    #[error("the CUDA driver could not {what}: {why}")]
    Driver { what: &'static str, why: String },
    #[error("cuBLASLt: {0}")]
    Library(String),
    #[error("the kernels cannot be compiled: {0}")]
    Compiler(String),
}
