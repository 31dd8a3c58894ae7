//! One tensor: its type and shape, and its place in a file; its bytes are read on demand. Knows nothing of its use in a
//! model.

use crate::error::{ParseError, Result};
use crate::file::SourceFile;
use crate::groups::MatrixReader;
use half::{bf16, f16};
use std::ops::Range;
use types::{Dtype, Scales};

/// Where the scales of a tensor are.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBytes<'a> {
    n_bytes: usize,
    place: TensorLocation<'a>,
}

#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    /// `[rows, cols]`, row-major; a vector is one row.
    pub shape: [usize; 2],
    /// Present only for F8_E4M3.
    pub scales: Option<Scales<ScaleBytes<'a>>>,
    pub(crate) place: TensorLocation<'a>,
}

/// A position in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorLocation<'a> {
    file: &'a SourceFile,
    start: u64,
    /// Present if the file stores it transposed: the bytes from one of the file's rows to the next.
    turned: Option<u64>,
    /// Present if its rows are interleaved with those of others.
    woven: Option<InterleavedRows>,
    apart: BlockTensors<'a>,
}

/// Whether a tensor's blocks are assembled from several tensors of the file, and from which.
#[derive(Clone, Copy, Debug)]
enum BlockTensors<'a> {
    No,
    /// The position of the exponents.
    Exponents(&'a SourceFile, u64),
    /// All parts are stored separately, in these files; the tensor begins with this row.
    All {
        of: MatrixReader<'a>,
        files: &'a [SourceFile],
        first: usize,
    },
}

/// Rows interleaved with those of other matrices: a run of `run` in every `period` rows, after `before` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InterleavedRows {
    pub run: usize,
    pub before: usize,
    pub period: usize,
}

impl InterleavedRows {
    /// The index of row `row` among all interleaved rows.
    fn index(self, row: usize) -> usize {
        row / self.run * self.period + self.before + row % self.run
    }
}

impl TensorLocation<'_> {
    fn edge_bytes(&self, n_bytes: usize, n: usize) -> Result<Vec<u8>> {
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
        let place = TensorLocation { file, start: start as u64, turned: None, woven: None, apart: BlockTensors::No };
        ScaleBytes { n_bytes: shape[0] * dtype.row_bytes(shape[1]), place }
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// The first and the last `n` bytes.
    pub(crate) fn edge_bytes(&self, n: usize) -> Result<Vec<u8>> {
        self.place.edge_bytes(self.n_bytes, n)
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
        let place = TensorLocation { file, start: start as u64, turned: None, woven: None, apart: BlockTensors::No };
        Tensor { dtype, shape, scales: None, place }
    }

    /// MXFP4 whose nibbles begin at `nibbles`, neighbours in one byte, and whose exponents are stored separately.
    pub(crate) fn with_split_exponents(
        nibbles: (&'a SourceFile, usize),
        exponents: (&'a SourceFile, usize),
        shape: [usize; 2],
    ) -> Tensor<'a> {
        let whole = Tensor::new(nibbles.0, nibbles.1, Dtype::MXFP4, shape);
        let apart = BlockTensors::Exponents(exponents.0, exponents.1 as u64);
        Tensor { place: TensorLocation { apart, ..whole.place }, ..whole }
    }

    /// A matrix that is assembled from tensors of these files.
    pub(crate) fn assembled(of: MatrixReader<'a>, files: &'a [SourceFile]) -> Tensor<'a> {
        let (shard, start) = of.file_and_start();
        let whole = Tensor::new(&files[shard], start, of.dtype(), of.shape());
        Tensor { place: TensorLocation { apart: BlockTensors::All { of, files, first: 0 }, ..whole.place }, ..whole }
    }

    /// Whether the file has its bytes unchanged, so that it may be read in other ways than by rows.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.place.apart, BlockTensors::No) && self.dtype.block() == 1
    }

    /// The same numbers as one row.
    pub(crate) fn flattened(self) -> Tensor<'a> {
        Tensor { shape: [1, self.shape[0] * self.shape[1]], ..self }
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

    /// Returns a range of rows after `before`; for a vector, of elements.
    pub(crate) fn part(&self, before: usize, shape: [usize; 2]) -> Option<Tensor<'a>> {
        let row_bytes = self.dtype.bytes_of(shape[1] as u64)?;
        // The bytes from one of our rows to the next in the file, which stores them as columns if transposed.
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
        let place = match self.place.apart {
            BlockTensors::No => TensorLocation { start: self.place.start + start, ..self.place },
            BlockTensors::Exponents(file, at) => {
                let n_blocks = start / Dtype::MXFP4.block_bytes() as u64;
                let start = self.place.start + n_blocks * NIBBLE_BYTES as u64;
                TensorLocation { start, apart: BlockTensors::Exponents(file, at + n_blocks), ..self.place }
            }
            // A matrix with only one row is no vector, so it has no parts by elements.
            BlockTensors::All { .. } if shape[1] != self.cols() => return None,
            BlockTensors::All { of, files, first } => {
                let first = if shape[0] == 1 { first } else { first + before };
                TensorLocation { apart: BlockTensors::All { of, files, first }, ..self.place }
            }
        };
        is_within.then_some(Tensor { dtype: self.dtype, shape, scales, place })
    }

    /// Returns the transposed tensor, for a type without blocks.
    pub(crate) fn transposed(&self) -> Tensor<'a> {
        let [rows, cols] = self.shape;
        let turned = Some(self.row_bytes() as u64);
        Tensor { shape: [cols, rows], place: TensorLocation { turned, ..self.place }, ..*self }
    }

    /// Returns the tensor of this shape whose rows are interleaved in this one; for a vector, its elements.
    pub(crate) fn interleaved(&self, woven: InterleavedRows, shape: [usize; 2]) -> Tensor<'a> {
        Tensor { shape, place: TensorLocation { woven: Some(woven), ..self.place }, ..*self }
    }

    /// Returns the first and the last `n` bytes of a tensor as the file has it.
    pub(crate) fn edge_bytes(&self, n: usize) -> Result<Vec<u8>> {
        let (file, start) = match self.place.apart {
            BlockTensors::No => return self.place.edge_bytes(self.n_bytes(), n),
            BlockTensors::Exponents(file, start) => (file, start),
            BlockTensors::All { of, files, .. } => return of.edge_bytes(files, n),
        };
        let n_blocks = self.n_bytes() / Dtype::MXFP4.block_bytes();
        let mut ends = self.place.edge_bytes(n_blocks * NIBBLE_BYTES, n)?;
        let exponents = TensorLocation { file, start, turned: None, woven: None, apart: BlockTensors::No };
        ends.extend(exponents.edge_bytes(n_blocks, n)?);
        Ok(ends)
    }

    /// Reads all rows.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.n_bytes()];
        self.read_rows(0..self.rows(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some rows, one after another. Needs no alignment.
    pub fn read_rows(&self, rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        assert!(
            rows.end <= self.rows() && to.len() == rows.len() * self.row_bytes(),
            "the rows exist, and the buffer has their size"
        );
        match (self.place.turned, self.place.woven) {
            (Some(stride), _) => self.read_transposed(rows, stride, to),
            (None, Some(woven)) => self.read_interleaved(woven, rows, to),
            (None, None) => self.read_run(rows, self.row_bytes(), to),
        }
    }

    /// Reads consecutive rows of this many bytes.
    fn read_run(&self, rows: Range<usize>, row_bytes: usize, to: &mut [u8]) -> Result<()> {
        match self.place.apart {
            BlockTensors::No => self.place.file.read_at(self.place.start + (rows.start * row_bytes) as u64, to),
            BlockTensors::Exponents(file, at) => self.read_split_blocks(rows.start * row_bytes, (file, at), to),
            BlockTensors::All { of, files, first } => of.read_rows(files, first + rows.start..first + rows.end, to),
        }
    }

    /// Reads blocks of MXFP4 from this byte on, each joined with its exponent.
    fn read_split_blocks(&self, from: usize, (file, at): (&SourceFile, u64), to: &mut [u8]) -> Result<()> {
        let block_bytes = Dtype::MXFP4.block_bytes();
        let (first, n) = ((from / block_bytes) as u64, to.len() / block_bytes);
        let (mut nibbles, mut exponents) = (vec![0; n * NIBBLE_BYTES], vec![0; n]);
        self.place.file.read_at(self.place.start + first * NIBBLE_BYTES as u64, &mut nibbles)?;
        file.read_at(at + first, &mut exponents)?;
        let blocks = to.chunks_exact_mut(block_bytes).zip(nibbles.as_chunks::<NIBBLE_BYTES>().0).zip(exponents);
        blocks.for_each(|((to, nibbles), exponent)| join_block(nibbles, exponent, to));
        Ok(())
    }

    fn read_interleaved(&self, woven: InterleavedRows, rows: Range<usize>, mut to: &mut [u8]) -> Result<()> {
        // A vector has one row, and its elements are interleaved.
        let (rows, row_bytes) = match self.shape {
            [1, n] => (0..n, self.dtype.block_bytes()),
            _ => (rows, self.row_bytes()),
        };
        let mut at = rows.start;
        while at < rows.end {
            let n = (woven.run - at % woven.run).min(rows.end - at);
            let (run, rest) = to.split_at_mut(n * row_bytes);
            let first = woven.index(at);
            self.read_run(first..first + n, row_bytes, run)?;
            (at, to) = (at + n, rest);
        }
        Ok(())
    }

    /// Each row of the file has one number for each of our rows.
    fn read_transposed(&self, rows: Range<usize>, stride: u64, to: &mut [u8]) -> Result<()> {
        let (size, cols) = (self.dtype.block_bytes(), self.cols());
        let index = |row: usize| self.place.woven.map_or(row, |woven| woven.index(row));
        let (Some(last), first) = (rows.clone().last(), index(rows.start)) else { return Ok(()) };
        let mut numbers = vec![0; (index(last) + 1 - first) * size];
        let places: Vec<usize> = rows.map(|row| (index(row) - first) * size).collect();
        for col in 0..cols {
            let start = self.place.start + col as u64 * stride + (first * size) as u64;
            self.place.file.read_at(start, &mut numbers)?;
            for (row, place) in places.iter().enumerate() {
                to[(row * cols + col) * size..][..size].copy_from_slice(&numbers[*place..][..size]);
            }
        }
        Ok(())
    }

    /// Whether the file has a row of this tensor as a column.
    pub(crate) fn is_turned(&self) -> bool {
        self.place.turned.is_some()
    }

    /// Returns all numbers as f32: for norms and other vectors, which are never quantized. Devices unpack matrices.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        Ok(self.decode_f32(&self.read()?))
    }

    /// Does the same from bytes that were already read.
    pub fn decode_f32(&self, bytes: &[u8]) -> Vec<f32> {
        let (halves, floats) = (bytes.as_chunks::<2>().0.iter(), bytes.as_chunks::<4>().0.iter());
        match self.dtype {
            Dtype::F32 => floats.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Dtype::F16 => halves.map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
            Dtype::BF16 => halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
            _ => unreachable!("a file with a quantized vector is refused when it is opened"),
        }
    }
}

/// The nibbles of a block of MXFP4.
const NIBBLE_BYTES: usize = 16;

/// Neighbours in one byte become numbers i and i + 16 in one, behind the exponent.
fn join_block(nibbles: &[u8; NIBBLE_BYTES], exponent: u8, to: &mut [u8]) {
    let of = |i: usize| nibbles[i / 2] >> (i % 2 * 4) & 0xf;
    to[0] = exponent;
    to[1..].iter_mut().enumerate().for_each(|(i, byte)| *byte = of(i) | of(i + NIBBLE_BYTES) << 4);
}

/// `[rows, cols]` from dimensions in order from the slowest; more than two are flattened into the rows.
pub(crate) fn rows_and_cols(dims: &[u64]) -> std::result::Result<[usize; 2], ParseError> {
    let Some((cols, slower)) = dims.split_last() else {
        return ParseError::malformed("a tensor without dimensions");
    };
    let too_large = || ParseError::Malformed(format!("the dimensions {dims:?} are too large"));
    let rows = slower.iter().try_fold(1u64, |rows, dim| rows.checked_mul(*dim)).ok_or_else(too_large)?;
    rows.checked_mul(*cols).filter(|n| *n <= isize::MAX as u64 / 8).ok_or_else(too_large)?;
    Ok([rows as usize, *cols as usize])
}
