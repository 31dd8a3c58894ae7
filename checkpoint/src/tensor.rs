//! One tensor as it lies in the file. Knows nothing of what a model does with it.

use crate::error::Fault;
use half::{bf16, f16};

/// How the numbers of a tensor are stored: the types that can be served. What stands in their blocks is the matter of
/// who packs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    MXFP4,
    /// Numbers of eight bits whose scales stand beside the matrix.
    F8E4M3,
}

impl Dtype {
    pub const ALL: [Dtype; 16] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::BF16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Q2K,
        Dtype::Q3K,
        Dtype::Q4K,
        Dtype::Q5K,
        Dtype::Q6K,
        Dtype::IQ4NL,
        Dtype::MXFP4,
        Dtype::F8E4M3,
    ];

    /// As a GGUF calls it (or safetensors), numbers per block, bytes per block.
    const fn row(self) -> (&'static str, usize, usize) {
        match self {
            Dtype::F32 => ("F32", 1, 4),
            Dtype::F16 => ("F16", 1, 2),
            Dtype::BF16 => ("BF16", 1, 2),
            Dtype::Q4_0 => ("Q4_0", 32, 18),
            Dtype::Q4_1 => ("Q4_1", 32, 20),
            Dtype::Q5_0 => ("Q5_0", 32, 22),
            Dtype::Q5_1 => ("Q5_1", 32, 24),
            Dtype::Q8_0 => ("Q8_0", 32, 34),
            Dtype::Q2K => ("Q2_K", 256, 84),
            Dtype::Q3K => ("Q3_K", 256, 110),
            Dtype::Q4K => ("Q4_K", 256, 144),
            Dtype::Q5K => ("Q5_K", 256, 176),
            Dtype::Q6K => ("Q6_K", 256, 210),
            Dtype::IQ4NL => ("IQ4_NL", 32, 18),
            Dtype::MXFP4 => ("MXFP4", 32, 17),
            // A device cuts it there.
            Dtype::F8E4M3 => ("F8_E4M3", 32, 32),
        }
    }

    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Numbers per block.
    pub const fn block(self) -> usize {
        self.row().1
    }

    pub const fn block_bytes(self) -> usize {
        self.row().2
    }

    /// Bytes of so many numbers, if they are whole blocks and the count is not absurd.
    pub fn bytes_of(self, n: u64) -> Option<u64> {
        let block = self.block() as u64;
        if n.is_multiple_of(block) { (n / block).checked_mul(self.block_bytes() as u64) } else { None }
    }
}

/// What a matrix's numbers are multiplied by: one scale for some rows and columns together.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// F32, F16 or BF16.
    pub dtype: Dtype,
    pub bytes: &'a [u8],
    /// Rows and columns that share one.
    pub block: [usize; 2],
    /// Scales in a row of them.
    pub per_row: usize,
    /// Where the matrix begins, of all rows that the scales are of.
    pub first_row: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    /// `[rows, cols]`, row after row; a vector is one row.
    pub shape: [usize; 2],
    /// Exactly the tensor's bytes. Not aligned for anything but a byte.
    pub bytes: &'a [u8],
    /// Of F8_E4M3.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Tensor<'a> {
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    pub fn cols(&self) -> usize {
        self.shape[1]
    }

    pub fn row_bytes(&self) -> usize {
        self.cols() / self.dtype.block() * self.dtype.block_bytes()
    }

    pub fn row(&self, row: usize) -> &'a [u8] {
        let len = self.row_bytes();
        &self.bytes[row * len..(row + 1) * len]
    }

    /// So many rows from `before` on; of a vector, so many elements.
    pub(crate) fn part(&self, before: usize, shape: [usize; 2]) -> Option<Tensor<'a>> {
        let row_bytes = self.dtype.bytes_of(shape[1] as u64)? as usize;
        let start = match shape[0] {
            1 => self.dtype.bytes_of(before as u64)? as usize,
            _ => before.checked_mul(row_bytes)?,
        };
        let end = start.checked_add(shape[0].checked_mul(row_bytes)?)?;
        let scales = self.scales.map(|scales| Scales { first_row: scales.first_row + before, ..scales });
        Some(Tensor { dtype: self.dtype, shape, bytes: self.bytes.get(start..end)?, scales })
    }

    /// The bytes with rows and columns exchanged, of a type that has no blocks.
    pub(crate) fn turned(&self) -> Vec<u8> {
        let size = self.dtype.block_bytes();
        let mut turned = Vec::with_capacity(self.bytes.len());
        for col in 0..self.cols() {
            for row in 0..self.rows() {
                turned.extend(&self.bytes[(row * self.cols() + col) * size..][..size]);
            }
        }
        turned
    }

    /// All numbers as f32: for norms and other vectors, which are never quantized. Matrices are the device's to read.
    pub fn to_f32(&self) -> Vec<f32> {
        let (halves, floats) = (self.bytes.as_chunks::<2>().0.iter(), self.bytes.as_chunks::<4>().0.iter());
        match self.dtype {
            Dtype::F32 => floats.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Dtype::F16 => halves.map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
            Dtype::BF16 => halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
            _ => unreachable!("a file with a quantized vector is refused when it is opened"),
        }
    }
}

/// `[rows, cols]` of dimensions in order from the slowest; more than two are flattened into the rows.
pub(crate) fn rows_and_cols(dims: &[u64]) -> Result<[usize; 2], Fault> {
    let Some((cols, slower)) = dims.split_last() else {
        return Fault::malformed("a tensor without dimensions");
    };
    let too_large = || Fault::Malformed(format!("the dimensions {dims:?} are larger than any memory"));
    let rows = slower.iter().try_fold(1u64, |rows, dim| rows.checked_mul(*dim)).ok_or_else(too_large)?;
    rows.checked_mul(*cols).filter(|n| *n <= isize::MAX as u64 / 8).ok_or_else(too_large)?;
    Ok([rows as usize, *cols as usize])
}
