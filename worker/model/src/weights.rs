//! Finds a model's tensors by name and hands them to the device, checked. Knows names and shapes, not what they are for.

use crate::{Error, Result};
use backend::{Device, Stored, StoredType};
use checkpoint::{Checkpoint, Dtype, Tensor};
use half::{bf16, f16};

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
        let (path, tensor) = self.tensor(name, [rows, cols])?;
        let dtype = stored_type(&path, tensor.dtype)?;
        Ok(Stored::whole(dtype, rows, cols, tensor.bytes))
    }

    /// `{name}.weight`, a vector of `len` in f32.
    pub fn vector<D: Device>(&self, name: &str, len: usize, device: &D) -> Result<D::Vector> {
        let (path, tensor) = self.tensor(name, [1, len])?;
        Ok(device.vector(&floats(&path, &tensor)?)?)
    }

    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<(String, Tensor<'a>)> {
        let path = format!("{}{name}.weight", self.path);
        if !self.checkpoint.has(&path) {
            return Err(Error::Missing { tensor: path, expected });
        }
        let tensor = self.checkpoint.tensor(&path)?;
        if tensor.shape != expected {
            return Err(Error::Shape { tensor: path, shape: tensor.shape, expected });
        }
        Ok((path, tensor))
    }
}

fn stored_type(path: &str, dtype: Dtype) -> Result<StoredType> {
    match dtype {
        Dtype::F32 => Ok(StoredType::F32),
        Dtype::F16 => Ok(StoredType::F16),
        Dtype::BF16 => Ok(StoredType::BF16),
        Dtype::Q8_0 => Ok(StoredType::Q8_0),
        Dtype::Q4_1 => Ok(StoredType::Q4_1),
        #[allow(unreachable_patterns, reason = "a file may hold types that no kernel packs yet")]
        other => Err(Error::Dtype { tensor: path.into(), dtype: format!("{other:?}") }),
    }
}

fn floats(path: &str, tensor: &Tensor<'_>) -> Result<Vec<f32>> {
    let halves = || tensor.bytes.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    match tensor.dtype {
        Dtype::F32 => {
            let words = tensor.bytes.chunks_exact(4);
            Ok(words.map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect())
        }
        Dtype::F16 => Ok(halves().map(|bits| f16::from_bits(bits).to_f32()).collect()),
        Dtype::BF16 => Ok(halves().map(|bits| bf16::from_bits(bits).to_f32()).collect()),
        other => Err(Error::Dtype { tensor: path.into(), dtype: format!("{other:?}") }),
    }
}
