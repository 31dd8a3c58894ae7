//! A matrix as a file holds it, before a device packs it.

use crate::Error;
use half::{bf16, f16};
use std::ops::Range;
use types::{Dtype, Scales};

/// Numbers that `StoredMatrix::scale` covers at a time.
const GROUP: usize = Dtype::F8E4M3.unit();

fn scale_at(scales: &Scales<&[u8]>, row: usize, column: usize) -> f32 {
    let index = scales.index(row, column).unwrap_or(usize::MAX);
    let two = || [scales.bytes[2 * index], scales.bytes[2 * index + 1]];
    match scales.dtype {
        Dtype::F16 => f16::from_le_bytes(two()).to_f32(),
        Dtype::BF16 => bf16::from_le_bytes(two()).to_f32(),
        _ => scales.bytes.as_chunks().0.get(index).map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes)),
    }
}

/// `[rows, k]`, row-major, borrowed from its reader. A slice of columns has a `row_stride` longer than its rows.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix<'a> {
    pub dtype: Dtype,
    pub rows: usize,
    pub k: usize,
    /// Elements before the first column in a row's first block: whole units.
    pub first: usize,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    pub bytes: &'a [u8],
    /// Scales of F8E4M3; without them its numbers are unscaled.
    pub scales: Option<Scales<&'a [u8]>>,
}

impl<'a> StoredMatrix<'a> {
    /// A whole matrix: rows follow each other.
    pub fn whole(dtype: Dtype, rows: usize, k: usize, bytes: &'a [u8]) -> StoredMatrix<'a> {
        StoredMatrix { dtype, rows, k, first: 0, row_stride: dtype.row_bytes(k), bytes, scales: None }
    }

    pub fn scaled(self, scales: Scales<&'a [u8]>) -> StoredMatrix<'a> {
        StoredMatrix { scales: Some(scales), ..self }
    }

    /// Checks that the bytes fit the shape. The last row of a slice of columns is shorter than its stride.
    pub fn check(&self) -> Result<(), Error> {
        let (unit, block) = (self.dtype.unit(), self.dtype.block());
        let cut = self.k.is_multiple_of(unit) && self.first.is_multiple_of(unit) && self.first < block;
        if self.rows == 0 || self.k == 0 || !cut {
            return Err(Error::Shape(format!("{} x {} cannot be stored as {:?}", self.rows, self.k, self.dtype)));
        }
        let are_enough =
            |scales: Scales<&[u8]>| scales.bytes_for(self.rows, self.k).is_some_and(|n| n <= scales.bytes.len());
        if self.scales.is_some_and(|scales| !are_enough(scales)) {
            return Err(Error::Shape(format!("{} x {} with {:?}", self.rows, self.k, self.scales.map(|of| of.block))));
        }
        let needed = (self.rows - 1)
            .checked_mul(self.row_stride)
            .and_then(|bytes| bytes.checked_add(self.row_bytes()))
            .unwrap_or(usize::MAX);
        match needed <= self.bytes.len() {
            true => Ok(()),
            false => {
                Err(Error::Truncated { rows: self.rows, k: self.k, dtype: self.dtype, needed, have: self.bytes.len() })
            }
        }
    }

    /// A range of columns. It begins and ends on the type's units, perhaps within a block.
    pub fn columns(&self, range: Range<usize>) -> Result<StoredMatrix<'a>, Error> {
        let unit = self.dtype.unit();
        let cut = range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
        if range.start > range.end || range.end > self.k || !cut {
            return Err(Error::Shape(format!("columns {range:?} of {} in {:?}", self.k, self.dtype)));
        }
        let (block, block_bytes) = (self.dtype.block(), self.dtype.block_bytes());
        let start = self.first + range.start;
        let bytes = self.bytes.get((start / block).saturating_mul(block_bytes)..).unwrap_or(&[]);
        let scales = self.scales.map(|scales| scales.from(0, range.start));
        Ok(StoredMatrix { k: range.len(), first: start % block, bytes, scales, ..*self })
    }

    /// A range of rows; it may be empty.
    pub fn rows(&self, range: Range<usize>) -> Result<StoredMatrix<'a>, Error> {
        if range.start > range.end || range.end > self.rows {
            return Err(Error::Shape(format!("rows {range:?} of {}", self.rows)));
        }
        // Beyond the bytes this is empty; `check` reports it if rows were requested.
        let bytes = self.bytes.get(range.start.saturating_mul(self.row_stride)..).unwrap_or(&[]);
        let scales = self.scales.map(|scales| scales.from(range.start, 0));
        Ok(StoredMatrix { rows: range.len(), bytes, scales, ..*self })
    }

    /// The blocks that hold a row. The `first` elements of the first block, and those after the last column, are not
    /// part of it.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride..][..self.row_bytes()]
    }

    /// The scale of thirty-two numbers of a row. It is NaN if one of them is NaN, so that kernels need not look for NaN
    /// themselves.
    pub(crate) fn scale(&self, row: usize, group: usize) -> f32 {
        const NONE: u8 = 0x7f;
        let numbers = &self.row(row)[group * GROUP..][..GROUP];
        match self.scales {
            _ if numbers.iter().any(|bits| bits & NONE == NONE) => f32::NAN,
            Some(scales) => scale_at(&scales, row, group * GROUP),
            None => 1.0,
        }
    }

    /// Whether each row has a single scale.
    pub(crate) fn is_scaled_by_row(&self) -> bool {
        self.scales.is_none_or(|scales| {
            self.k == 0 || (0..self.k).step_by(GROUP).all(|column| scales.index(0, column) == scales.index(0, 0))
        })
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.k.saturating_add(self.first))
    }
}
