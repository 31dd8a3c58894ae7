//! Tensors as a header lists them, and where their bytes lie in the file. Knows the types' names and sizes, and not
//! what a tensor is for.

use crate::error::ParseError;
use crate::gguf::cursor::GgufCursor;
use crate::gguf::values::{Value, wrong_kind};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use types::Dtype;

const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;
const DIMS_MAX: u32 = 4;

/// Every type that a GGUF can name.
pub(crate) const TYPES: [(u32, &str); 33] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub dtype: Dtype,
    /// From the slowest dimension to the fastest: the reverse of the file's order.
    pub dims: Vec<u64>,
    /// The index of the split model's part that has the bytes.
    pub file: usize,
    pub bytes: Range<usize>,
}

/// A tensor's header, before its bytes are located.
pub(super) struct TensorHeader {
    dtype: Dtype,
    dims: Vec<u64>,
    n_bytes: u64,
    offset: u64,
}

pub(super) fn read_tensor_headers(
    cursor: &mut GgufCursor<'_>,
    n: u64,
) -> Result<Vec<(String, TensorHeader)>, ParseError> {
    let mut names = HashSet::new();
    let mut headers = Vec::new();
    for i in 0..n {
        let name = cursor.name(&format!("the name of tensor {i} of {n}"))?;
        let header = read_tensor_header(cursor, &name)?;
        if !names.insert(name.clone()) {
            return ParseError::malformed(format!("the tensor {name} occurs twice"));
        }
        headers.push((name, header));
    }
    Ok(headers)
}

fn read_tensor_header(cursor: &mut GgufCursor<'_>, name: &str) -> Result<TensorHeader, ParseError> {
    let n_dims = cursor.u32(name)?;
    if n_dims == 0 || n_dims > DIMS_MAX {
        return ParseError::malformed(format!("the tensor {name} has {n_dims} dimensions"));
    }
    let mut dims = (0..n_dims).map(|_| cursor.u64(name)).collect::<Result<Vec<u64>, ParseError>>()?;
    dims.reverse();
    let kind = cursor.u32(name)?;
    let offset = cursor.u64(name)?;
    let Some((_, type_name)) = TYPES.iter().find(|row| row.0 == kind) else {
        return ParseError::unsupported(format!("the tensor {name} has the unknown type {kind}, which"));
    };
    let Some(dtype) = supported_dtype(type_name) else {
        return ParseError::unsupported(format!("the tensor {name} has type {type_name}, which"));
    };
    if dims.contains(&0) {
        return ParseError::malformed(format!("the tensor {name} has a dimension of zero"));
    }
    // Each row must be a whole number of blocks, not just the tensor.
    let cols = dims.last().copied().unwrap_or(1);
    let rows = dims.iter().rev().skip(1).try_fold(1u64, |rows, dim| rows.checked_mul(*dim));
    let n_bytes = rows.zip(dtype.bytes_of(cols)).and_then(|(rows, row)| rows.checked_mul(row));
    let Some(n_bytes) = n_bytes else {
        return ParseError::malformed(format!("the tensor {name} cannot have the dimensions {dims:?} as {type_name}"));
    };
    if rows == Some(1) && dtype.block() > 1 {
        return ParseError::unsupported(format!("the tensor {name}, a vector of type {type_name},"));
    }
    Ok(TensorHeader { dtype, dims, n_bytes, offset })
}

impl TensorHeader {
    pub fn locate(self, name: &str, data: u64, alignment: u64, file: u64) -> Result<TensorEntry, ParseError> {
        if !self.offset.is_multiple_of(alignment) {
            let offset = self.offset;
            return ParseError::malformed(format!(
                "the tensor {name} starts at {offset}, which is not aligned to {alignment} bytes"
            ));
        }
        let start = data.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(self.n_bytes)).filter(|end| *end <= file);
        let (Some(start), Some(end)) = (start, end) else {
            let (n, at) = (self.n_bytes, self.offset);
            return ParseError::malformed(format!(
                "the tensor {name} has {n} bytes at {at} of its data, past the end of the file of {file} bytes: \
                 is it cut off?"
            ));
        };
        Ok(TensorEntry { dtype: self.dtype, dims: self.dims, file: 0, bytes: start as usize..end as usize })
    }
}

pub(crate) fn supported_dtype(type_name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name() == type_name)
}

/// The number by which a GGUF names a type; None for types that it does not have.
pub fn type_number(dtype: Dtype) -> Option<u32> {
    TYPES.iter().find(|(_, name)| *name == dtype.name()).map(|(number, _)| *number)
}

pub(super) fn alignment(values: &BTreeMap<String, Value>) -> Result<u64, ParseError> {
    match values.get(ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() && *alignment <= ALIGNMENT_MAX => {
            Ok(*alignment)
        }
        Some(Value::Unsigned(alignment)) => {
            ParseError::malformed(format!("{ALIGNMENT_KEY} is {alignment}, not a small power of two"))
        }
        Some(_) => wrong_kind(ALIGNMENT_KEY, "a number that is not negative"),
    }
}

/// The position at which the tensors' bytes begin.
pub(super) fn place_data(cursor: &GgufCursor<'_>, alignment: u64, empty: bool) -> Result<u64, ParseError> {
    let data = (cursor.at as u64).next_multiple_of(alignment);
    if data > cursor.n_bytes && !empty {
        return ParseError::malformed("the file ends before the bytes of its tensors: is it cut off?");
    }
    Ok(data)
}
