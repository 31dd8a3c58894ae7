//! One tensor as it lies in the file. Knows nothing of what a model does with it.

use crate::error::Fault;
use half::{bf16, f16};

/// How the numbers of a tensor are stored: the types that can be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    /// 32 numbers as an f16 scale and 32 signed bytes.
    Q8_0,
    /// 32 numbers as an f16 scale, an f16 minimum and 16 bytes; byte `i` holds number `i` in its low half and
    /// number `i + 16` in its high half.
    Q4_1,
}

impl Dtype {
    /// Numbers per block.
    pub fn block(self) -> usize {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => 1,
            Dtype::Q8_0 | Dtype::Q4_1 => 32,
        }
    }

    pub fn block_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::Q8_0 => 34,
            Dtype::Q4_1 => 20,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
            Dtype::Q8_0 => "Q8_0",
            Dtype::Q4_1 => "Q4_1",
        }
    }

    /// Bytes of so many numbers, if they are whole blocks and the count is not absurd.
    pub fn bytes_of(self, n: u64) -> Option<u64> {
        let block = self.block() as u64;
        if n.is_multiple_of(block) { (n / block).checked_mul(self.block_bytes() as u64) } else { None }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    /// `[rows, cols]`, row after row; a vector is one row.
    pub shape: [usize; 2],
    /// Exactly the tensor's bytes. Not aligned for anything but a byte.
    pub bytes: &'a [u8],
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
        Some(Tensor { dtype: self.dtype, shape, bytes: self.bytes.get(start..end)? })
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

    /// All numbers as f32: for norms, small tensors and tests. Weights of a size are read by the block.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut numbers = Vec::with_capacity(self.rows() * self.cols());
        for block in self.bytes.chunks_exact(self.dtype.block_bytes()) {
            push_block(self.dtype, block, &mut numbers);
        }
        numbers
    }
}

fn push_block(dtype: Dtype, block: &[u8], out: &mut Vec<f32>) {
    let half_at = |i: usize| f16::from_le_bytes([block[i], block[i + 1]]).to_f32();
    match dtype {
        Dtype::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
        Dtype::F16 => out.push(half_at(0)),
        Dtype::BF16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
        Dtype::Q8_0 => {
            let scale = half_at(0);
            out.extend(block[2..].iter().map(|byte| scale * f32::from(byte.cast_signed())));
        }
        Dtype::Q4_1 => {
            let (scale, minimum) = (half_at(0), half_at(2));
            let number = |nibble: u8| scale * f32::from(nibble) + minimum;
            out.extend(block[4..].iter().map(|byte| number(byte & 15)));
            out.extend(block[4..].iter().map(|byte| number(byte >> 4)));
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
