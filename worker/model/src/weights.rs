//! Finds a model's tensors by name, cuts what this rank owns of them, and hands it to the device. Knows names and
//! shapes, not what they are for.

use crate::{Error, Result};
use backend::{Memory, Stored, StoredType};
use checkpoint::{Checkpoint, Dtype, Tensor};
use collective::Ended;
use std::cell::Cell;
use std::ops::Range;
use types::{Leaves, Part};

/// The tensors under a path of the checkpoint (`model.layers.3.` and what follows), for a rank and its device.
pub struct Weights<'a, M: Memory> {
    checkpoint: &'a Checkpoint,
    device: &'a M,
    part: &'a Part,
    /// What all packed matrices occupy.
    n_bytes: &'a Cell<usize>,
    ended: &'a Ended,
    path: String,
}

impl<'a, M: Memory> Weights<'a, M> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &'a M,
        part: &'a Part,
        n_bytes: &'a Cell<usize>,
        ended: &'a Ended,
    ) -> Weights<'a, M> {
        Weights { checkpoint, device, part, n_bytes, ended, path: String::new() }
    }

    pub fn under(&self, part: impl std::fmt::Display) -> Weights<'a, M> {
        Weights { path: format!("{}{part}.", self.path), ..*self }
    }

    pub fn device(&self) -> &'a M {
        self.device
    }

    /// What this rank holds of the model.
    pub fn part(&self) -> &'a Part {
        self.part
    }

    /// Makes each of this rank's layers from its tensors and its number in the model.
    pub fn layers<T>(&self, load: impl Fn(&Weights<'a, M>, usize) -> Result<T>) -> Result<Vec<T>> {
        let all = self.under("model.layers");
        self.part.layers.clone().map(|layer| load(&all.under(layer), layer as usize)).collect()
    }

    /// `{name}.weight`, a matrix of `[rows, cols]`, as it is stored.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'a>> {
        let tensor = self.tensor(&format!("{name}.weight"), [rows, cols])?;
        let stored = Stored::whole(stored_type(tensor.dtype), rows, cols, tensor.bytes);
        Ok(match tensor.scales {
            Some(of) => stored.scaled(scales(&of)),
            None => stored,
        })
    }

    /// `{name}.weight`, a vector of `len` in f32, each number plus `offset`.
    pub fn vector_plus(&self, name: &str, len: usize, offset: f32) -> Result<M::Vector> {
        let values = self.tensor(&format!("{name}.weight"), [1, len])?.to_f32();
        Ok(self.device.vector(&values.into_iter().map(|value| value + offset).collect::<Vec<_>>())?)
    }

    /// Some of the elements of `{name}.bias`; None where the checkpoint has no such tensor.
    pub fn bias(&self, name: &str, len: usize, owned: Range<usize>) -> Result<Option<Vec<f32>>> {
        let name = format!("{name}.bias");
        if !self.checkpoint.has(&format!("{}{name}", self.path)) {
            return Ok(None);
        }
        Ok(Some(self.tensor(&name, [1, len])?.to_f32()[owned].to_vec()))
    }

    /// Matrices that meet the same input, stacked.
    pub fn pack(&self, parts: &[Stored<'_>]) -> Result<M::Matrix> {
        Ok(self.counted(self.device.matrix(parts)?))
    }

    /// Columns of a matrix that are the leaves `owned` of its sum.
    pub fn pack_leaves(&self, columns: Stored<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<M::Matrix> {
        Ok(self.counted(self.device.matrix_leaves(columns, leaves, owned)?))
    }

    fn counted(&self, matrix: M::Matrix) -> M::Matrix {
        self.n_bytes.set(self.n_bytes.get() + self.device.matrix_bytes(&matrix));
        matrix
    }

    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<Tensor<'a>> {
        if self.ended.is_said() {
            return Err(Error::BrokenOff);
        }
        let path = format!("{}{name}", self.path);
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
        Dtype::F8E4M3 => StoredType::F8E4M3,
    }
}

fn scales<'a>(of: &checkpoint::Scales<'a>) -> backend::Scales<'a> {
    let checkpoint::Scales { dtype, bytes, block, per_row, first_row } = *of;
    backend::Scales { dtype: stored_type(dtype), bytes, block, per_row, first: [first_row, 0] }
}
