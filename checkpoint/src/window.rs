//! The part of a matrix that one rank reads, in bands of rows that several threads may read and hash at once. Knows
//! nothing of ranks.
//!
//! ```text
//! of rows      [ r0 ............. r1 )  whole rows            bands follow each other in the file
//! of columns   all rows, [ c0 .. c1 )   whole stored blocks   rows are read whole, and other columns dropped
//! ```
//! Whole pieces of the weight are read, which may begin before the requested part and end after it.

use crate::error::Result;
use crate::pieces::WeightPieces;
use crate::tensor::Tensor;
use std::ops::Range;
use types::{PieceHash, PieceRun};

/// The approximate bytes of the file in one band of rows. A piece's hash depends on it.
const BAND_BYTES: usize = 128 << 10;
/// The same of a tensor that the file stores transposed. Such a band is read in as many parts as it has columns.
const TURNED_BAND_BYTES: usize = 4 << 20;

pub struct TensorWindow<'a> {
    tensor: Tensor<'a>,
    pieces: WeightPieces,
    /// The requested rows.
    requested: Range<usize>,
    /// The indices of the pieces' runs and strips that are read.
    runs: Range<usize>,
    strips: Range<usize>,
    bands: Vec<RowBand>,
}

/// Rows of one piece.
struct RowBand {
    run: usize,
    rows: Range<usize>,
}

/// The hashes of a band: one for each strip of the window.
pub type BandHashes = Vec<[u8; 32]>;

impl<'a> TensorWindow<'a> {
    /// The whole matrix.
    pub fn whole(tensor: Tensor<'a>, pieces: WeightPieces) -> TensorWindow<'a> {
        let rows = 0..tensor.rows();
        TensorWindow::of_rows(tensor, pieces, rows)
    }

    /// A range of rows; it may be empty.
    pub fn of_rows(tensor: Tensor<'a>, pieces: WeightPieces, rows: Range<usize>) -> TensorWindow<'a> {
        let (runs, strips) = (pieces.runs_with(&rows), 0..pieces.n_strips());
        TensorWindow::new(tensor, pieces, rows, [runs, strips])
    }

    /// All rows of a range of columns, widened to whole blocks of the tensor's type; it may be empty.
    pub fn of_columns(tensor: Tensor<'a>, pieces: WeightPieces, columns: Range<usize>) -> TensorWindow<'a> {
        let dtype = tensor.dtype;
        let bytes = dtype.row_bytes(columns.start / dtype.block() * dtype.block())..dtype.row_bytes(columns.end);
        let column_bytes = if columns.is_empty() { 0..0 } else { bytes };
        let (rows, strips) = (0..tensor.rows(), pieces.strips_with(&column_bytes));
        let runs = pieces.runs_with(&rows);
        TensorWindow::new(tensor, pieces, rows, [runs, strips])
    }

    /// Some of the pieces, in the order of their numbers.
    pub(crate) fn of_pieces(tensor: Tensor<'a>, pieces: WeightPieces, piece_numbers: Range<usize>) -> TensorWindow<'a> {
        let [runs, strips] = if pieces.n_strips() == 1 { [piece_numbers, 0..1] } else { [0..1, piece_numbers] };
        let rows = match runs.is_empty() {
            true => 0..0,
            false => pieces.run_rows(runs.start).start..pieces.run_rows(runs.end - 1).end,
        };
        TensorWindow::new(tensor, pieces, rows, [runs, strips])
    }

    fn new(
        tensor: Tensor<'a>,
        pieces: WeightPieces,
        requested: Range<usize>,
        [runs, strips]: [Range<usize>; 2],
    ) -> TensorWindow<'a> {
        let band_bytes = if tensor.is_turned() { TURNED_BAND_BYTES } else { BAND_BYTES };
        let band_rows = (band_bytes / tensor.row_bytes().max(1)).max(1);
        let of_run = |run: usize| {
            let Range { start, end } = pieces.run_rows(run);
            let starts = (start..end).step_by(band_rows);
            starts.map(move |start| RowBand { run, rows: start..(start + band_rows).min(end) })
        };
        let bands = if strips.is_empty() { Vec::new() } else { runs.clone().flat_map(of_run).collect() };
        TensorWindow { tensor, pieces, requested, runs, strips, bands }
    }

    pub fn tensor(&self) -> &Tensor<'a> {
        &self.tensor
    }

    /// Returns the requested rows.
    pub fn rows(&self) -> Range<usize> {
        self.requested.clone()
    }

    /// Returns the columns that are read; their bounds lie between blocks of the type.
    pub fn columns(&self) -> Range<usize> {
        let (block, block_bytes) = (self.tensor.dtype.block(), self.tensor.dtype.block_bytes());
        let bytes = self.bytes_of_row();
        bytes.start / block_bytes * block..bytes.end / block_bytes * block
    }

    fn bytes_of_row(&self) -> Range<usize> {
        match self.strips.is_empty() {
            true => 0..0,
            false => self.pieces.strip(self.strips.start).start..self.pieces.strip(self.strips.end - 1).end,
        }
    }

    /// The first row that is read.
    fn first_row(&self) -> usize {
        self.bands.first().map_or(self.requested.start, |band| band.rows.start)
    }

    pub fn n_bytes(&self) -> usize {
        self.bands.iter().map(|band| band.rows.len()).sum::<usize>() * self.bytes_of_row().len()
    }

    /// Returns the requested rows from everything that was read.
    pub fn requested_bytes<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        let row_bytes = self.bytes_of_row().len();
        &bytes[(self.requested.start - self.first_row()) * row_bytes..][..self.requested.len() * row_bytes]
    }

    /// Splits memory for the whole window into one part per band.
    pub fn split_bands<'b>(&self, mut to: &'b mut [u8]) -> Vec<&'b mut [u8]> {
        let row_bytes = self.bytes_of_row().len();
        let mut bands = Vec::with_capacity(self.bands.len());
        for band in &self.bands {
            let (mine, rest) = to.split_at_mut(band.rows.len() * row_bytes);
            bands.push(mine);
            to = rest;
        }
        bands
    }

    /// Reads and hashes a band.
    pub fn fill(&self, band: usize, to: &mut [u8]) -> Result<BandHashes> {
        let (rows, columns, row_bytes) = (self.bands[band].rows.clone(), self.bytes_of_row(), self.tensor.row_bytes());
        if columns.len() == row_bytes {
            self.tensor.read_rows(rows, to)?;
        } else {
            let mut whole = vec![0; rows.len() * row_bytes];
            self.tensor.read_rows(rows, &mut whole)?;
            for (row, to) in whole.chunks_exact(row_bytes).zip(to.chunks_exact_mut(columns.len())) {
                to.copy_from_slice(&row[columns.clone()]);
            }
        }
        Ok(self.hash_band(to))
    }

    /// The hashes of the whole window, with one band in memory at a time.
    pub(crate) fn read_and_hash(&self, weight: &str) -> Result<PieceRun> {
        let (row_bytes, mut bytes) = (self.bytes_of_row().len(), Vec::new());
        let hashes = self.bands.iter().enumerate().map(|(i, band)| {
            bytes.resize(band.rows.len() * row_bytes, 0);
            self.fill(i, &mut bytes)
        });
        let hashes = hashes.collect::<Result<Vec<_>>>()?;
        Ok(self.combine_hashes(weight, &hashes))
    }

    fn hash_band(&self, band: &[u8]) -> BandHashes {
        let columns = self.bytes_of_row();
        let mut gathered = Vec::new();
        let of_strip = |strip: usize| {
            let Range { start, end } = self.pieces.strip(strip);
            if end - start == columns.len() {
                return blake3::hash(band).into();
            }
            // Gathered into one run, because hashing many blocks at once is faster.
            gathered.clear();
            for row in band.chunks_exact(columns.len()) {
                gathered.extend_from_slice(&row[start - columns.start..end - columns.start]);
            }
            blake3::hash(&gathered).into()
        };
        self.strips.clone().map(of_strip).collect()
    }

    /// Combines the hashes of all bands, in order.
    pub fn combine_hashes(&self, weight: &str, bands: &[BandHashes]) -> PieceRun {
        let (mut rest, mut hashes) = (bands, Vec::new());
        for run in self.bands.chunk_by(|a, b| a.run == b.run) {
            let (mine, behind) = rest.split_at(run.len());
            let of_strip = |strip: usize| PieceHash::of_parts(mine.iter().map(|hashes| hashes[strip]));
            hashes.extend((0..self.strips.len()).map(of_strip));
            rest = behind;
        }
        let first = (self.runs.start * self.pieces.n_strips() + self.strips.start) as u32;
        PieceRun { weight: weight.to_owned(), n_pieces: self.pieces.n() as u32, first, hashes }
    }
}
