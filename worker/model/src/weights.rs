//! Finds a model's tensors by name, reads what this rank owns of them, and hands it to the device. Knows names and
//! shapes, not what they are for.
//!
//! What was read is kept until it is packed, and no longer: beside the packed weights there is one stack of matrices
//! at a time. The device's threads read as they pack.

use crate::{Error, Result};
use backend::{Memory, Stored};
use checkpoint::{Checkpoint, Tensor, Window};
use collective::CancelFlag;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use types::{Leaves, Part};

/// The rows that a rank owns of one matrix.
pub struct MatrixRows<'a> {
    pub name: &'a str,
    /// Of the whole matrix.
    pub n: usize,
    pub owned: Range<usize>,
}

impl<'a> MatrixRows<'a> {
    /// All of them.
    pub fn all(name: &'a str, n: usize) -> MatrixRows<'a> {
        MatrixRows { name, n, owned: 0..n }
    }
}

/// The tensors under a path of the checkpoint (`model.layers.3.` and what follows), for a rank and its device.
pub struct Weights<'a, M: Memory> {
    checkpoint: &'a Checkpoint,
    device: &'a M,
    part: &'a Part,
    /// What all packed matrices occupy.
    n_bytes: &'a Cell<usize>,
    cancel: &'a CancelFlag,
    path: String,
}

impl<'a, M: Memory> Weights<'a, M> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &'a M,
        part: &'a Part,
        n_bytes: &'a Cell<usize>,
        cancel: &'a CancelFlag,
    ) -> Weights<'a, M> {
        Weights { checkpoint, device, part, n_bytes, cancel, path: String::new() }
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

    /// `{name}.weight`, a vector of `len` in f32, each number plus `offset`.
    pub fn vector_plus(&self, name: &str, len: usize, offset: f32) -> Result<M::Vector> {
        let values = self.tensor(&format!("{name}.weight"), [1, len])?.to_f32()?;
        Ok(self.device.vector(&values.into_iter().map(|value| value + offset).collect::<Vec<_>>())?)
    }

    /// Some of the elements of `{name}.bias`; None where the checkpoint has no such tensor.
    pub fn bias(&self, name: &str, len: usize, owned: Range<usize>) -> Result<Option<Vec<f32>>> {
        let name = format!("{name}.bias");
        if !self.checkpoint.has(&format!("{}{name}", self.path)) {
            return Ok(None);
        }
        Ok(Some(self.tensor(&name, [1, len])?.to_f32()?[owned].to_vec()))
    }

    /// MatrixRows of `{name}.weight`, matrices of `k` columns that meet the same input, stacked.
    pub fn rows(&self, k: usize, parts: &[MatrixRows<'_>]) -> Result<M::Matrix> {
        let read = |part: &MatrixRows<'_>| {
            let tensor = self.tensor(&format!("{}.weight", part.name), [part.n, k])?;
            self.read(Window::of_rows(tensor, part.owned.clone()))
        };
        let read = parts.iter().map(read).collect::<Result<Vec<_>>>()?;
        let stored: Vec<_> = read.iter().map(Read::stored).collect();
        Ok(self.counted(self.device.matrix(&stored)?))
    }

    /// Columns of `{name}.weight`, a matrix of `[n_out, leaves.k()]`, that are the leaves `owned` of its sum.
    pub fn leaves(&self, name: &str, n_out: usize, leaves: &Leaves, owned: Range<u32>) -> Result<M::Matrix> {
        let tensor = self.tensor(&format!("{name}.weight"), [n_out, leaves.k() as usize])?;
        let elements = leaves.elements(&owned);
        let wanted = elements.start as usize..elements.end as usize;
        let read = self.read(Window::of_columns(tensor, wanted.clone()))?;
        let first = read.window.columns().start;
        let stored = match wanted.is_empty() {
            true => read.stored(),
            // Whole blocks were read.
            false => read.stored().columns(wanted.start - first..wanted.end - first)?,
        };
        Ok(self.counted(self.device.matrix_leaves(stored, leaves, owned)?))
    }

    /// On all threads of the device.
    fn read(&self, window: Window<'a>) -> Result<Read<'a>> {
        let mut bytes = vec![0; window.n_bytes()];
        let places: Vec<Mutex<&mut [u8]>> = window.blocks_of(&mut bytes).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        self.device.share(places.len(), &|blocks| {
            for block in blocks {
                let mut place = places[block].lock().unwrap_or_else(PoisonError::into_inner);
                if let Err(error) = window.fill(block, &mut place) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error.into());
        }
        drop(places);
        let scales = window.tensor().scales.map(|of| of.bytes.read()).transpose()?;
        Ok(Read { window, bytes, scales })
    }

    fn counted(&self, matrix: M::Matrix) -> M::Matrix {
        self.n_bytes.set(self.n_bytes.get() + self.device.matrix_bytes(&matrix));
        matrix
    }

    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<Tensor<'a>> {
        if self.cancel.is_cancelled() {
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

/// A part of a matrix in memory.
struct Read<'a> {
    window: Window<'a>,
    bytes: Vec<u8>,
    /// All that its tensor has.
    scales: Option<Vec<u8>>,
}

impl Read<'_> {
    fn stored(&self) -> Stored<'_> {
        let (tensor, rows, columns) = (self.window.tensor(), self.window.rows(), self.window.columns());
        let stored = Stored::whole(tensor.dtype, rows.len(), columns.len(), &self.bytes);
        let (Some(of), Some(bytes)) = (&tensor.scales, &self.scales) else { return stored };
        stored.scaled(of.with(&bytes[..]).from(rows.start, columns.start))
    }
}
