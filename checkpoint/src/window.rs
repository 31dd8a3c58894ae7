//! What one rank reads of a matrix, in blocks of rows that several threads may fill at once. Knows nothing of ranks.
//!
//! ```text
//! of rows      [ r0 ............. r1 )  whole rows            blocks follow each other in the file
//! of columns   all rows, [ c0 .. c1 )   whole stored blocks   rows are read whole, and what is not wanted left out
//! ```

use crate::error::Result;
use crate::tensor::Tensor;
use std::ops::Range;

/// Rows that are read at once have about so many bytes in the file.
const BLOCK_BYTES: usize = 128 << 10;

pub struct Window<'a> {
    tensor: Tensor<'a>,
    rows: Range<usize>,
    /// Of each row, in bytes.
    columns: Range<usize>,
    block_rows: usize,
}

impl<'a> Window<'a> {
    /// A run of rows; it may be empty.
    pub fn of_rows(tensor: Tensor<'a>, rows: Range<usize>) -> Window<'a> {
        let columns = 0..tensor.row_bytes();
        Window::new(tensor, rows, columns)
    }

    /// All rows of a run of columns, widened to whole blocks of the tensor's type; it may be empty.
    pub fn of_columns(tensor: Tensor<'a>, columns: Range<usize>) -> Window<'a> {
        let dtype = tensor.dtype;
        let columns = dtype.row_bytes(columns.start / dtype.block() * dtype.block())..dtype.row_bytes(columns.end);
        Window::new(tensor, 0..tensor.rows(), columns)
    }

    fn new(tensor: Tensor<'a>, rows: Range<usize>, columns: Range<usize>) -> Window<'a> {
        let columns = if columns.start < columns.end { columns } else { 0..0 };
        let block_rows = (BLOCK_BYTES / tensor.row_bytes().max(1)).max(1);
        Window { tensor, rows, columns, block_rows }
    }

    pub fn tensor(&self) -> &Tensor<'a> {
        &self.tensor
    }

    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The columns that are read, which begin and end between blocks of the type.
    pub fn columns(&self) -> Range<usize> {
        let (block, block_bytes) = (self.tensor.dtype.block(), self.tensor.dtype.block_bytes());
        self.columns.start / block_bytes * block..self.columns.end / block_bytes * block
    }

    pub fn n_bytes(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Memory for all of it, cut into one piece for each block.
    pub fn blocks_of<'b>(&self, to: &'b mut [u8]) -> impl Iterator<Item = &'b mut [u8]> + use<'b> {
        to.chunks_mut((self.block_rows * self.columns.len()).max(1))
    }

    /// Reads a block.
    pub fn fill(&self, block: usize, to: &mut [u8]) -> Result<()> {
        let start = self.rows.start + block * self.block_rows;
        let rows = start..(start + self.block_rows).min(self.rows.end);
        if self.columns.len() == self.tensor.row_bytes() {
            return self.tensor.read_rows(rows, to);
        }
        let row_bytes = self.tensor.row_bytes();
        let mut whole = vec![0; rows.len() * row_bytes];
        self.tensor.read_rows(rows, &mut whole)?;
        for (row, to) in whole.chunks_exact(row_bytes).zip(to.chunks_exact_mut(self.columns.len())) {
            to.copy_from_slice(&row[self.columns.clone()]);
        }
        Ok(())
    }
}
