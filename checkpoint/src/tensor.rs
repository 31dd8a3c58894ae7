//! One tensor: its type and shape, and where in which file it is; its bytes are read on demand. Knows nothing of what a
//! model does with it.

use crate::error::{Fault, Result};
use crate::file::SourceFile;
use half::{bf16, f16};
use std::ops::Range;
use types::{Dtype, Scales};

/// Where the scales of a tensor are.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBytes<'a> {
    n_bytes: usize,
    place: Location<'a>,
}

#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    /// `[rows, cols]`, row-major; a vector is one row.
    pub shape: [usize; 2],
    /// Present only for F8_E4M3.
    pub scales: Option<Scales<ScaleBytes<'a>>>,
    pub(crate) place: Location<'a>,
}

/// A position in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location<'a> {
    file: &'a SourceFile,
    start: u64,
    /// Present if the file stores it transposed: the bytes from one of the file's rows to the next.
    turned: Option<u64>,
}

impl Location<'_> {
    fn ends(&self, n_bytes: usize, n: usize) -> Result<Vec<u8>> {
        let n = n.min(n_bytes);
        let mut ends = vec![0; 2 * n];
        let (first, last) = ends.split_at_mut(n);
        self.file.read_at(self.start, first)?;
        self.file.read_at(self.start + (n_bytes - n) as u64, last)?;
        Ok(ends)
    }
}

impl<'a> ScaleBytes<'a> {
    /// The scales of a whole tensor, from `start` on in the file.
    pub(crate) fn new(file: &'a SourceFile, start: usize, dtype: Dtype, shape: [usize; 2]) -> ScaleBytes<'a> {
        let place = Location { file, start: start as u64, turned: None };
        ScaleBytes { n_bytes: shape[0] * dtype.row_bytes(shape[1]), place }
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The first and the last `n` bytes.
    pub(crate) fn ends(&self, n: usize) -> Result<Vec<u8>> {
        self.place.ends(self.n_bytes, n)
    }

    /// Reads all scales.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.n_bytes];
        self.place.file.read_at(self.place.start, &mut bytes)?;
        Ok(bytes)
    }
}

impl<'a> Tensor<'a> {
    /// A tensor from `start` on in the file.
    pub(crate) fn new(file: &'a SourceFile, start: usize, dtype: Dtype, shape: [usize; 2]) -> Tensor<'a> {
        Tensor { dtype, shape, scales: None, place: Location { file, start: start as u64, turned: None } }
    }

    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    pub fn cols(&self) -> usize {
        self.shape[1]
    }

    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols())
    }

    pub fn n_bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// A range of rows after `before`; of a vector, of elements.
    pub(crate) fn part(&self, before: usize, shape: [usize; 2]) -> Option<Tensor<'a>> {
        let row_bytes = self.dtype.bytes_of(shape[1] as u64)?;
        // The bytes between our rows in the file, which stores them as columns if transposed.
        let step = if self.place.turned.is_some() { self.dtype.block_bytes() as u64 } else { row_bytes };
        let start = match shape[0] {
            1 => self.dtype.bytes_of(before as u64)?,
            _ => (before as u64).checked_mul(step)?,
        };
        let is_within = match shape[0] {
            1 => before.checked_add(shape[1])? <= self.rows() * self.cols(),
            rows => before.checked_add(rows)? <= self.rows(),
        };
        let scales = self.scales.map(|scales| scales.from(before, 0));
        let place = Location { start: self.place.start + start, ..self.place };
        is_within.then_some(Tensor { dtype: self.dtype, shape, scales, place })
    }

    /// The transposed tensor, of a type that has no blocks.
    pub(crate) fn turned(&self) -> Tensor<'a> {
        let [rows, cols] = self.shape;
        let turned = Some(self.row_bytes() as u64);
        Tensor { shape: [cols, rows], place: Location { turned, ..self.place }, ..*self }
    }

    /// The first and the last `n` bytes of a tensor as the file has it.
    pub(crate) fn ends(&self, n: usize) -> Result<Vec<u8>> {
        self.place.ends(self.n_bytes(), n)
    }

    /// Reads all rows.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.n_bytes()];
        self.read_rows(0..self.rows(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some rows, one after another. Needs no alignment.
    pub fn read_rows(&self, rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        assert!(rows.end <= self.rows() && to.len() == rows.len() * self.row_bytes(), "rows that it has, and room");
        match self.place.turned {
            None => self.place.file.read_at(self.place.start + (rows.start * self.row_bytes()) as u64, to),
            Some(stride) => self.read_turned(rows, stride, to),
        }
    }

    /// Each row of the file has one number for each of our rows.
    fn read_turned(&self, rows: Range<usize>, stride: u64, to: &mut [u8]) -> Result<()> {
        let (size, cols) = (self.dtype.block_bytes(), self.cols());
        let mut column = vec![0; rows.len() * size];
        for col in 0..cols {
            self.place
                .file
                .read_at(self.place.start + col as u64 * stride + (rows.start * size) as u64, &mut column)?;
            for (row, number) in column.chunks_exact(size).enumerate() {
                to[(row * cols + col) * size..][..size].copy_from_slice(number);
            }
        }
        Ok(())
    }

    /// All numbers as f32: for norms and other vectors, which are never quantized. Matrices are unpacked by devices.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        Ok(self.numbers(&self.read()?))
    }

    /// The same from bytes that were read already.
    pub fn numbers(&self, bytes: &[u8]) -> Vec<f32> {
        let (halves, floats) = (bytes.as_chunks::<2>().0.iter(), bytes.as_chunks::<4>().0.iter());
        match self.dtype {
            Dtype::F32 => floats.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Dtype::F16 => halves.map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
            Dtype::BF16 => halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
            _ => unreachable!("a file with a quantized vector is refused when it is opened"),
        }
    }
}

/// `[rows, cols]` from dimensions in order from the slowest; more than two are flattened into the rows.
pub(crate) fn rows_and_cols(dims: &[u64]) -> std::result::Result<[usize; 2], Fault> {
    let Some((cols, slower)) = dims.split_last() else {
        return Fault::malformed("a tensor without dimensions");
    };
    let too_large = || Fault::Malformed(format!("the dimensions {dims:?} are larger than any memory"));
    let rows = slower.iter().try_fold(1u64, |rows, dim| rows.checked_mul(*dim)).ok_or_else(too_large)?;
    rows.checked_mul(*cols).filter(|n| *n <= isize::MAX as u64 / 8).ok_or_else(too_large)?;
    Ok([rows as usize, *cols as usize])
}
