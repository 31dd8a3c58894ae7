//! A matrix as a file holds it, before a device packs it.

use crate::Error;
use half::{bf16, f16};
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
    /// Blocks of 32: numbers of eight bits, which are a sign, four bits of exponent and three of fraction, without
    /// infinities. What they are multiplied by stands elsewhere: `Scales`.
    F8E4M3,
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
            StoredType::F8E4M3 => (32, 32),
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

/// What the numbers of a matrix are multiplied by, where that does not stand in their blocks: one scale for some rows
/// and columns together.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// F32, F16 or BF16.
    pub dtype: StoredType,
    pub bytes: &'a [u8],
    /// Rows and columns that share one; the columns are whole units.
    pub block: [usize; 2],
    /// Scales in a row of them.
    pub per_row: usize,
    /// The row and the column, among those that the scales are of, where the matrix begins.
    pub first: [usize; 2],
}

impl Scales<'_> {
    fn index(&self, row: usize, column: usize) -> Option<usize> {
        let of = |at: usize, axis: usize| self.first[axis].checked_add(at)?.checked_div(self.block[axis]);
        of(row, 0)?.checked_mul(self.per_row)?.checked_add(of(column, 1)?)
    }

    /// Whether there is one for each number of a matrix of this shape.
    fn are_enough(&self, rows: usize, k: usize) -> bool {
        let unit = StoredType::F8E4M3.unit();
        let size = self.dtype.block().1;
        let are_whole = self.block[1].is_multiple_of(unit) && self.first[1].is_multiple_of(unit);
        let end = self.index(rows - 1, k - 1).and_then(|last| last.checked_add(1)?.checked_mul(size));
        are_whole && end.is_some_and(|end| end <= self.bytes.len())
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        let index = self.index(row, column).unwrap_or(usize::MAX);
        let two = || [self.bytes[2 * index], self.bytes[2 * index + 1]];
        match self.dtype {
            StoredType::F16 => f16::from_le_bytes(two()).to_f32(),
            StoredType::BF16 => bf16::from_le_bytes(two()).to_f32(),
            _ => self.bytes.as_chunks().0.get(index).map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes)),
        }
    }
}

/// `[rows, k]`, row-major, borrowed from who has read it. A slice of columns has a `row_stride` longer than its rows.
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
    /// Of F8E4M3; without, its numbers stand for themselves.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Stored<'a> {
    /// A whole matrix: rows follow each other.
    pub fn whole(dtype: StoredType, rows: usize, k: usize, bytes: &'a [u8]) -> Stored<'a> {
        Stored { dtype, rows, k, first: 0, row_stride: dtype.row_bytes(k), bytes, scales: None }
    }

    pub fn scaled(self, scales: Scales<'a>) -> Stored<'a> {
        Stored { scales: Some(scales), ..self }
    }

    /// Whether the bytes hold what the shape says. The last row of a slice of columns is shorter than its stride.
    pub fn check(&self) -> Result<(), Error> {
        let (unit, (block, _)) = (self.dtype.unit(), self.dtype.block());
        let cut = self.k.is_multiple_of(unit) && self.first.is_multiple_of(unit) && self.first < block;
        if self.rows == 0 || self.k == 0 || !cut {
            return Err(Error::Shape(format!("{} x {} cannot be stored as {:?}", self.rows, self.k, self.dtype)));
        }
        if self.scales.is_some_and(|scales| !scales.are_enough(self.rows, self.k)) {
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
        let mut scales = self.scales;
        if let Some(scales) = &mut scales {
            scales.first[1] = scales.first[1].saturating_add(range.start);
        }
        Ok(Stored { k: range.len(), first: start % block, bytes, scales, ..*self })
    }

    /// A run of the rows; it may be empty.
    pub fn rows(&self, range: Range<usize>) -> Result<Stored<'a>, Error> {
        if range.start > range.end || range.end > self.rows {
            return Err(Error::Shape(format!("rows {range:?} of {}", self.rows)));
        }
        // Past the bytes there is nothing; `check` says so if rows were wanted.
        let bytes = self.bytes.get(range.start.saturating_mul(self.row_stride)..).unwrap_or(&[]);
        let mut scales = self.scales;
        if let Some(scales) = &mut scales {
            scales.first[0] = scales.first[0].saturating_add(range.start);
        }
        Ok(Stored { rows: range.len(), bytes, scales, ..*self })
    }

    /// The blocks that hold a row: the first `first` elements of the first, and what follows the last column, are not
    /// of it.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_stride..][..self.row_bytes()]
    }

    /// What thirty-two numbers of a row are multiplied by. Where one of them is no number that is none either: then
    /// kernels need not look for what stands for none.
    pub(crate) fn scale(&self, row: usize, group: usize) -> f32 {
        const NONE: u8 = 0x7f;
        let numbers = &self.row(row)[group * SUB_BLOCK..][..SUB_BLOCK];
        match self.scales {
            _ if numbers.iter().any(|bits| bits & NONE == NONE) => f32::NAN,
            Some(scales) => scales.at(row, group * SUB_BLOCK),
            None => 1.0,
        }
    }

    /// Whether all numbers of a row have one scale.
    pub(crate) fn is_scaled_by_row(&self) -> bool {
        self.scales.is_none_or(|scales| {
            self.k == 0 || (0..self.k).step_by(SUB_BLOCK).all(|column| scales.index(0, column) == scales.index(0, 0))
        })
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.k.saturating_add(self.first))
    }
}
