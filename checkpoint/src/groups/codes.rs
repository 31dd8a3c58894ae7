//! Matrices of four bits that name numbers of a table, as bitsandbytes stores them (NF4, FP4): read as the numbers, in
//! the type in which its own unpacking leaves them.
//!
//! ```text
//! .weight             bytes of two names, the first in the upper bits; rows follow each other
//! .absmax             what the numbers of a block are multiplied by: f32, or names of a second table
//! .quant_map          the table      .nested_*  the second table, and what its numbers are multiplied by
//! .quant_state.*      JSON: the shape, the type, the lengths of blocks
//! ```

use super::cells::{ShardMatrix, TensorPart, TensorReader, TensorTaker, of_type, write_number};
use crate::error::{ParseError, Result};
use crate::file::SourceFile;
use safetensors::tensor::Dtype as Stored;
use serde_json::Value;
use std::ops::Range;
use types::Dtype;

/// A description in JSON is at most so long; more of a tensor may not be here yet.
const STATE_BYTES_MAX: u64 = 4096;
const NAMES: usize = 16;
const NESTED_NAMES: usize = 256;

/// One matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CodebookMatrix {
    pub shape: [usize; 2],
    /// F32, F16 or BF16.
    pub dtype: Dtype,
    pub digits: ShardMatrix,
    /// Numbers that share a factor.
    size: usize,
    factors: ShardMatrix,
    table: ShardMatrix,
    nested: Option<NestedFactors>,
}

/// Factors that are names themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
struct NestedFactors {
    size: usize,
    factors: ShardMatrix,
    table: ShardMatrix,
    offset: f32,
}

/// The matrix whose digits are this tensor.
pub(crate) fn codebook_matrix(
    stem: &str,
    digits: &TensorPart,
    take: TensorTaker<'_>,
    read: TensorReader<'_>,
) -> std::result::Result<CodebookMatrix, ParseError> {
    let mut of = |suffix: &str| take(&format!("{stem}.weight.{suffix}"));
    let state = of("quant_state.bitsandbytes__nf4").or_else(|| of("quant_state.bitsandbytes__fp4"));
    let state = state.and_then(|part| match part.dims[..] {
        [n @ 1..=STATE_BYTES_MAX] if part.dtype == Stored::U8 => {
            serde_json::from_slice::<Value>(&read(&part, n as usize)?).ok()
        }
        _ => None,
    });
    let Some(state) = state else {
        return ParseError::malformed(format!("the 4-bit matrix {stem} has no quant_state that can be read"));
    };
    let parts = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"].map(&mut of);
    let whole = codebook_from_state(digits, &state, &parts);
    whole.ok_or_else(|| ParseError::Malformed(format!("the matrix {stem} contradicts its quant_state {state}")))
}

fn codebook_from_state(
    digits: &TensorPart,
    state: &Value,
    [factors, table, of_factors, table_of_factors]: &[Option<TensorPart>; 4],
) -> Option<CodebookMatrix> {
    let length = |value: &Value| value.as_u64().filter(|n| (1..1 << 40).contains(n)).map(|n| n as usize);
    let floats =
        |part: &Option<TensorPart>, n: usize| of_type(part.as_ref()?, Stored::F32).filter(|at| at.rows * at.cols == n);
    let shape = [length(&state["shape"][0])?, length(&state["shape"][1])?];
    let (n, size) = (shape[0].checked_mul(shape[1])?, length(&state["blocksize"])?);
    let is_flat = state["shape"].as_array()?.len() == 2 && shape[1].is_multiple_of(2);
    let digits = of_type(digits, Stored::U8).filter(|at| is_flat && at.rows * at.cols == n / 2)?;
    let dtype = match state["dtype"].as_str()? {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        _ => return None,
    };
    let is_known = |(key, value): (&String, &Value)| match key.as_str() {
        "quant_type" => *value == "nf4" || *value == "fp4",
        "nested_dtype" => *value == "float32",
        key => ["blocksize", "dtype", "shape", "nested_blocksize", "nested_offset"].contains(&key),
    };
    if !state.as_object()?.iter().all(is_known) || state["quant_type"].is_null() {
        return None;
    }
    let n_blocks = n.div_ceil(size);
    let (factors, nested) = match of_factors {
        None => (floats(factors, n_blocks)?, None),
        Some(_) => {
            let names = of_type(factors.as_ref()?, Stored::U8).filter(|at| at.rows * at.cols == n_blocks)?;
            let size = length(&state["nested_blocksize"])?;
            let offset = state["nested_offset"].as_f64()? as f32;
            let factors = floats(of_factors, n_blocks.div_ceil(size))?;
            (names, Some(NestedFactors { size, factors, table: floats(table_of_factors, NESTED_NAMES)?, offset }))
        }
    };
    Some(CodebookMatrix { shape, dtype, digits, size, factors, table: floats(table, NAMES)?, nested })
}

impl CodebookMatrix {
    /// The first and the last bytes of all that it is made of.
    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let nested = self.nested.iter().flat_map(|nested| [nested.factors, nested.table]);
        let all = [self.digits, self.factors, self.table].into_iter().chain(nested);
        Ok(all.map(|cells| cells.edge_bytes(files, n)).collect::<Result<Vec<_>>>()?.concat())
    }

    /// The numbers of some rows, one row after another.
    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        let all = rows.start * self.shape[1]..rows.end * self.shape[1];
        let names = self.digits.read_range(files, all.start / 2..all.end / 2)?;
        let table = floats_of(&self.table.read_range(files, 0..NAMES)?);
        let blocks = all.start / self.size..all.end.div_ceil(self.size);
        let factors = self.factors(files, &blocks)?;
        for (i, to) in to.chunks_exact_mut(self.dtype.block_bytes()).enumerate() {
            let name = names[i / 2] >> (4 - i % 2 * 4) & 15;
            let number = table[usize::from(name)] * factors[(all.start + i) / self.size - blocks.start];
            write_number(self.dtype, number, to);
        }
        Ok(())
    }

    fn factors(&self, files: &[SourceFile], blocks: &Range<usize>) -> Result<Vec<f32>> {
        let stored = self.factors.read_range(files, blocks.clone())?;
        let Some(nested) = self.nested else { return Ok(floats_of(&stored)) };
        let of_blocks = blocks.start / nested.size..blocks.end.div_ceil(nested.size);
        let factors = floats_of(&nested.factors.read_range(files, of_blocks.clone())?);
        let table = floats_of(&nested.table.read_range(files, 0..NESTED_NAMES)?);
        let factor = |(i, name): (usize, &u8)| {
            table[usize::from(*name)] * factors[(blocks.start + i) / nested.size - of_blocks.start] + nested.offset
        };
        Ok(stored.iter().enumerate().map(factor).collect())
    }
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
