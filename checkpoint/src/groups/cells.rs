//! The tensors of a folder's header as numbers in rows, and how they are read.

use crate::error::Result;
use crate::file::SourceFile;
use half::{bf16, f16};
use safetensors::tensor::Dtype as Stored;
use std::ops::Range;
use types::Dtype;

/// A tensor of a header that is part of a matrix.
#[derive(Clone, Debug)]
pub(crate) struct TensorPart {
    pub dtype: Stored,
    pub dims: Vec<u64>,
    pub shard: usize,
    pub start: usize,
}

/// Finds a tensor by its name, and takes it.
pub(crate) type TensorTaker<'a> = &'a mut dyn FnMut(&str) -> Option<TensorPart>;

/// Reads the bytes of a tensor that has this many.
pub(crate) type TensorReader<'a> = &'a dyn Fn(&TensorPart, usize) -> Option<Vec<u8>>;

/// Numbers in a file, in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardMatrix {
    pub shard: usize,
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    /// Bytes per number.
    pub size: usize,
}

impl ShardMatrix {
    /// Some columns of some rows, one row after another.
    pub fn read(&self, files: &[SourceFile], rows: Range<usize>, cols: Range<usize>) -> Result<Vec<u8>> {
        let (stride, width) = (self.cols * self.size, cols.len() * self.size);
        let mut bytes = vec![0; rows.len() * width];
        if width == 0 {
            return Ok(bytes);
        }
        // Neighbouring rows are one run if every column is read.
        let run = if width == stride { bytes.len() } else { width };
        for (i, to) in bytes.chunks_exact_mut(run.max(1)).enumerate() {
            let at = self.start + (rows.start + i) * stride + cols.start * self.size;
            files[self.shard].read_at(at as u64, to)?;
        }
        Ok(bytes)
    }

    /// Reads a range of its numbers, counted through all rows.
    pub fn read_range(&self, files: &[SourceFile], cells: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; cells.len() * self.size];
        files[self.shard].read_at((self.start + cells.start * self.size) as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// The first and the last `n` bytes.
    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let n_bytes = self.rows * self.cols * self.size;
        let n = n.min(n_bytes);
        let mut ends = vec![0; 2 * n];
        let (first, last) = ends.split_at_mut(n);
        files[self.shard].read_at(self.start as u64, first)?;
        files[self.shard].read_at((self.start + n_bytes - n) as u64, last)?;
        Ok(ends)
    }
}

/// A tensor of two dimensions or fewer, none of them zero. One dimension is a column.
pub(super) fn cells(part: &TensorPart) -> Option<ShardMatrix> {
    let of = |dim: u64| usize::try_from(dim).ok().filter(|n| (1..1 << 40).contains(n));
    let (rows, cols) = match part.dims[..] {
        [] => (1, 1),
        [rows] => (of(rows)?, 1),
        [rows, cols] => (of(rows)?, of(cols)?),
        _ => return None,
    };
    let size = match part.dtype {
        Stored::I8 | Stored::U8 | Stored::F8_E4M3 => 1,
        Stored::F16 | Stored::BF16 => 2,
        Stored::I32 | Stored::F32 => 4,
        _ => return None,
    };
    rows.checked_mul(cols)?.checked_mul(64)?;
    Some(ShardMatrix { shard: part.shard, start: part.start, rows, cols, size })
}

pub(super) fn of_type(part: &TensorPart, dtype: Stored) -> Option<ShardMatrix> {
    cells(part).filter(|_| part.dtype == dtype)
}

/// Writes a number as F16 or BF16, rounded once, or as F32.
pub(super) fn write_number(dtype: Dtype, number: f32, to: &mut [u8]) {
    match dtype {
        Dtype::F16 => to.copy_from_slice(&f16::from_f32(number).to_le_bytes()),
        Dtype::BF16 => to.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
        _ => to.copy_from_slice(&number.to_le_bytes()),
    }
}
