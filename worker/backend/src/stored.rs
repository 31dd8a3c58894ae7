//! A matrix as a file holds it, before a device packs it.

use crate::Error;
use std::ops::Range;

/// Element types that files hold and a device can pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    F32,
    F16,
    BF16,
    /// Blocks of 32: f16 scale, 32 × i8.
    Q8_0,
    /// Blocks of 32: f16 scale, f16 minimum, 16 bytes of nibbles (low nibbles are the first 16).
    Q4_1,
}

impl StoredType {
    /// Elements per block, bytes per block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            StoredType::F32 => (1, 4),
            StoredType::F16 | StoredType::BF16 => (1, 2),
            StoredType::Q8_0 => (32, 34),
            StoredType::Q4_1 => (32, 20),
        }
    }

    /// Saturates, so that a size from a hostile file is refused where its bytes are looked for.
    pub const fn row_bytes(self, k: usize) -> usize {
        let (elements, bytes) = self.block();
        (k / elements).saturating_mul(bytes)
    }
}

/// `[rows, k]`, row-major, borrowed from the mapped file. A slice of columns has a `row_stride` longer than its rows.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    pub dtype: StoredType,
    pub rows: usize,
    pub k: usize,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    pub bytes: &'a [u8],
}

impl<'a> Stored<'a> {
    /// A whole matrix: rows follow each other.
    pub fn whole(dtype: StoredType, rows: usize, k: usize, bytes: &'a [u8]) -> Stored<'a> {
        Stored { dtype, rows, k, row_stride: dtype.row_bytes(k), bytes }
    }

    /// Whether the bytes hold what the shape says. The last row of a slice of columns is shorter than its stride.
    pub fn check(&self) -> Result<(), Error> {
        let (elements, _) = self.dtype.block();
        if self.rows == 0 || self.k == 0 || !self.k.is_multiple_of(elements) {
            return Err(Error::Shape(format!("{} x {} cannot be stored as {:?}", self.rows, self.k, self.dtype)));
        }
        let needed = (self.rows - 1)
            .checked_mul(self.row_stride)
            .and_then(|bytes| bytes.checked_add(self.dtype.row_bytes(self.k)))
            .unwrap_or(usize::MAX);
        match needed <= self.bytes.len() {
            true => Ok(()),
            false => {
                Err(Error::Truncated { rows: self.rows, k: self.k, dtype: self.dtype, needed, have: self.bytes.len() })
            }
        }
    }

    /// Some of the columns. They begin and end on the blocks of the type.
    pub fn columns(&self, range: Range<usize>) -> Result<Stored<'a>, Error> {
        let (elements, _) = self.dtype.block();
        if range.end > self.k || !range.start.is_multiple_of(elements) || !range.end.is_multiple_of(elements) {
            return Err(Error::Shape(format!("columns {range:?} of {} in {:?}", self.k, self.dtype)));
        }
        let bytes = &self.bytes[self.dtype.row_bytes(range.start)..];
        Ok(Stored { k: range.len(), bytes, ..*self })
    }

    /// A run of the rows; it may be empty.
    pub fn rows(&self, range: Range<usize>) -> Result<Stored<'a>, Error> {
        if range.start > range.end || range.end > self.rows {
            return Err(Error::Shape(format!("rows {range:?} of {}", self.rows)));
        }
        // Past the bytes there is nothing; `check` says so if rows were wanted.
        let bytes = self.bytes.get(range.start.saturating_mul(self.row_stride)..).unwrap_or(&[]);
        Ok(Stored { rows: range.len(), bytes, ..*self })
    }

    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride..][..self.dtype.row_bytes(self.k)]
    }
}
