//! Finds a model's tensors by name and hands them to the device, checked. Knows names and shapes, not what they are
//! for.

use crate::{Error, Result};
use backend::{Device, Stored, StoredType};
use checkpoint::{Checkpoint, Dtype, Tensor};

/// The tensors under a path of the checkpoint: `model.layers.3.` and what follows.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    path: String,
}

impl<'a> Weights<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Weights<'a> {
        Weights { checkpoint, path: String::new() }
    }

    pub fn under(&self, part: impl std::fmt::Display) -> Weights<'a> {
        Weights { checkpoint: self.checkpoint, path: format!("{}{part}.", self.path) }
    }

    /// `{name}.weight`, a matrix of `[rows, cols]`, as it is stored.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'a>> {
        let tensor = self.tensor(name, [rows, cols])?;
        Ok(Stored::whole(stored_type(tensor.dtype), rows, cols, tensor.bytes))
    }

    /// `{name}.weight`, a vector of `len` in f32.
    pub fn vector<D: Device>(&self, name: &str, len: usize, device: &D) -> Result<D::Vector> {
        Ok(device.vector(&self.tensor(name, [1, len])?.to_f32())?)
    }

    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<Tensor<'a>> {
        let path = format!("{}{name}.weight", self.path);
        let tensor = self.checkpoint.tensor(&path)?;
        if tensor.shape != expected {
            return Err(Error::Shape { tensor: path, shape: tensor.shape, expected });
        }
        Ok(tensor)
    }
}

fn stored_type(dtype: Dtype) -> StoredType {
    match dtype {
        Dtype::F32 => StoredType::F32,
        Dtype::F16 => StoredType::F16,
        Dtype::BF16 => StoredType::BF16,
        Dtype::Q4_0 => StoredType::Q4_0,
        Dtype::Q4_1 => StoredType::Q4_1,
        Dtype::Q5_0 => StoredType::Q5_0,
        Dtype::Q5_1 => StoredType::Q5_1,
        Dtype::Q8_0 => StoredType::Q8_0,
        Dtype::Q2K => StoredType::Q2K,
        Dtype::Q3K => StoredType::Q3K,
        Dtype::Q4K => StoredType::Q4K,
        Dtype::Q5K => StoredType::Q5K,
        Dtype::Q6K => StoredType::Q6K,
        Dtype::IQ4NL => StoredType::IQ4NL,
        Dtype::MXFP4 => StoredType::MXFP4,
    }
}
