//! A matrix as a file holds it, before a device packs it.

use crate::Error;
use std::ops::Range;

/// Element types that files hold and a device can pack. Within a block, `d` is a scale and `m` a minimum, both f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    F32,
    F16,
    BF16,
    /// Blocks of 32: d, 16 bytes of nibbles (low nibbles are the first 16). Number: d × (nibble - 8).
    Q4_0,
    /// Blocks of 32: d, m, nibbles as above. Number: d × nibble + m.
    Q4_1,
    /// Blocks of 32: d, 32 fifth bits, nibbles. Number: d × (q - 16).
    Q5_0,
    /// Blocks of 32: d, m, 32 fifth bits, nibbles. Number: d × q + m.
    Q5_1,
    /// Blocks of 32: d, 32 × i8.
    Q8_0,
    /// Blocks of 256: 16 × (4 bits of scale, 4 of minimum), 2 bits each, d, m.
    Q2K,
    /// Blocks of 256: third bits, 2 bits each, 16 scales of 6 bits, d.
    Q3K,
    /// Blocks of 256: d, m, 8 × (6 bits of scale, 6 of minimum), nibbles.
    Q4K,
    /// Blocks of 256: as Q4K, with fifth bits.
    Q5K,
    /// Blocks of 256: low nibbles, upper 2 bits each, 16 × i8 scale, d.
    Q6K,
    /// Blocks of 32: d, nibbles that name one of sixteen numbers.
    IQ4NL,
    /// Blocks of 32: an exponent, nibbles that are numbers of four bits.
    MXFP4,
}

/// Numbers that a cut of columns may not part: each has a scale of its own within its block.
const SUB_BLOCK: usize = 32;

impl StoredType {
    /// Elements per block, bytes per block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            StoredType::F32 => (1, 4),
            StoredType::F16 | StoredType::BF16 => (1, 2),
            StoredType::Q4_0 | StoredType::IQ4NL => (32, 18),
            StoredType::Q4_1 => (32, 20),
            StoredType::Q5_0 => (32, 22),
            StoredType::Q5_1 => (32, 24),
            StoredType::Q8_0 => (32, 34),
            StoredType::MXFP4 => (32, 17),
            StoredType::Q2K => (256, 84),
            StoredType::Q3K => (256, 110),
            StoredType::Q4K => (256, 144),
            StoredType::Q5K => (256, 176),
            StoredType::Q6K => (256, 210),
        }
    }

    /// Columns are cut at multiples of this, which may be less than a block.
    pub const fn unit(self) -> usize {
        let (elements, _) = self.block();
        if elements < SUB_BLOCK { elements } else { SUB_BLOCK }
    }

    /// The blocks that hold `k` elements. Saturates, so that a size from a hostile file is refused where its bytes are
    /// looked for.
    pub const fn row_bytes(self, k: usize) -> usize {
        let (elements, bytes) = self.block();
        k.div_ceil(elements).saturating_mul(bytes)
    }
}

/// `[rows, k]`, row-major, borrowed from the mapped file. A slice of columns has a `row_stride` longer than its rows.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    pub dtype: StoredType,
    pub rows: usize,
    pub k: usize,
    /// How many elements of a row's first block stand before its first column: whole units.
    pub first: usize,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    pub bytes: &'a [u8],
}

impl<'a> Stored<'a> {
    /// A whole matrix: rows follow each other.
    pub fn whole(dtype: StoredType, rows: usize, k: usize, bytes: &'a [u8]) -> Stored<'a> {
        Stored { dtype, rows, k, first: 0, row_stride: dtype.row_bytes(k), bytes }
    }

    /// Whether the bytes hold what the shape says. The last row of a slice of columns is shorter than its stride.
    pub fn check(&self) -> Result<(), Error> {
        let (unit, (block, _)) = (self.dtype.unit(), self.dtype.block());
        let cut = self.k.is_multiple_of(unit) && self.first.is_multiple_of(unit) && self.first < block;
        if self.rows == 0 || self.k == 0 || !cut {
            return Err(Error::Shape(format!("{} x {} cannot be stored as {:?}", self.rows, self.k, self.dtype)));
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

    /// Some of the columns. They begin and end on the units of the type, perhaps within a block.
    pub fn columns(&self, range: Range<usize>) -> Result<Stored<'a>, Error> {
        let unit = self.dtype.unit();
        let cut = range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
        if range.start > range.end || range.end > self.k || !cut {
            return Err(Error::Shape(format!("columns {range:?} of {} in {:?}", self.k, self.dtype)));
        }
        let (block, block_bytes) = self.dtype.block();
        let start = self.first + range.start;
        let bytes = self.bytes.get((start / block).saturating_mul(block_bytes)..).unwrap_or(&[]);
        Ok(Stored { k: range.len(), first: start % block, bytes, ..*self })
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

    /// The blocks that hold a row: the first `first` elements of the first, and what follows the last column, are not
    /// of it.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride..][..self.row_bytes()]
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.k.saturating_add(self.first))
    }
}
