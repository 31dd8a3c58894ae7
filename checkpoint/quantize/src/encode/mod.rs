//! Numbers of a row to the blocks of a type. Knows no file and no tensor's purpose.

use half::{bf16, f16};
use types::Dtype;

mod k;
mod search;
mod simple;

pub(crate) use simple::NAMED;

/// Larger numbers have no block in any type; squares of smaller ones are far from an f32's limit.
const NUMBER_MAX: f32 = 1e9;

/// Why a row has no blocks of a type.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError {
    #[error("the number {value} at column {column} is not finite")]
    NotFinite { column: usize, value: f32 },
    /// The scale of a block is an f16.
    #[error("a number near column {column} is too large for {}", dtype.name())]
    TooLarge { column: usize, dtype: Dtype },
    #[error("numbers cannot be written as {}", dtype.name())]
    NoEncoder { dtype: Dtype },
}

/// Encodes a row, which fills whole blocks. `importance` is the weight of each column's error; without it all columns
/// have the same.
pub fn encode_row(dtype: Dtype, row: &[f32], importance: Option<&[f32]>, to: &mut [u8]) -> Result<(), EncodeError> {
    assert!(
        dtype.bytes_of(row.len() as u64) == Some(to.len() as u64)
            && importance.is_none_or(|all| all.len() == row.len()),
        "a row fills whole blocks, and its columns have one importance each"
    );
    if let Some((column, value)) = row.iter().enumerate().find(|(_, x)| !x.is_finite()) {
        return Err(EncodeError::NotFinite { column, value: *value });
    }
    let block = dtype.block();
    if block == 1 {
        return encode_numbers(dtype, row, to);
    }
    if let Some(column) = row.iter().position(|x| x.abs() > NUMBER_MAX) {
        return Err(EncodeError::TooLarge { column, dtype });
    }
    for (i, (x, to)) in row.chunks_exact(block).zip(to.chunks_exact_mut(dtype.block_bytes())).enumerate() {
        let importance = importance.map(|all| &all[i * block..][..block]);
        encode_block(dtype, x, importance, to).map_err(|error| match error {
            EncodeError::TooLarge { .. } => EncodeError::TooLarge { column: i * block, dtype },
            other => other,
        })?;
    }
    Ok(())
}

/// Types without blocks.
fn encode_numbers(dtype: Dtype, row: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    for (column, (x, to)) in row.iter().zip(to.chunks_exact_mut(dtype.block_bytes())).enumerate() {
        let is_finite = match dtype {
            Dtype::F32 => {
                to.copy_from_slice(&x.to_le_bytes());
                true
            }
            Dtype::F16 => {
                to.copy_from_slice(&f16::from_f32(*x).to_le_bytes());
                f16::from_f32(*x).is_finite()
            }
            Dtype::BF16 => {
                to.copy_from_slice(&bf16::from_f32(*x).to_le_bytes());
                bf16::from_f32(*x).is_finite()
            }
            _ => return Err(EncodeError::NoEncoder { dtype }),
        };
        if !is_finite {
            return Err(EncodeError::TooLarge { column, dtype });
        }
    }
    Ok(())
}

fn encode_block(dtype: Dtype, x: &[f32], importance: Option<&[f32]>, to: &mut [u8]) -> Result<(), EncodeError> {
    let mut all = [0f32; 256];
    let weights = &mut all[..x.len()];
    weigh(x, importance, weights);
    match dtype {
        Dtype::Q8_0 => simple::q8_0(x, to),
        Dtype::Q4_0 => simple::with_middle(4, x, weights, to),
        Dtype::Q5_0 => simple::with_middle(5, x, weights, to),
        Dtype::Q4_1 => simple::with_minimum(4, x, weights, to),
        Dtype::Q5_1 => simple::with_minimum(5, x, weights, to),
        Dtype::IQ4NL => simple::iq4_nl(x, weights, to),
        Dtype::Q2K => k::q2_k(x, weights, to),
        Dtype::Q3K => k::q3_k(x, weights, to),
        Dtype::Q4K => k::q4_k(x, weights, to),
        Dtype::Q5K => k::q5_k(x, weights, to),
        Dtype::Q6K => k::q6_k(x, weights, to),
        _ => Err(EncodeError::NoEncoder { dtype }),
    }
}

/// The weight of each number's error: large numbers contribute most to a product, and small ones still count.
fn weigh(x: &[f32], importance: Option<&[f32]>, weights: &mut [f32]) {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let importance = importance.filter(|all| all.iter().any(|one| *one > 0.0));
    for (i, (x, weight)) in x.iter().zip(weights).enumerate() {
        *weight = importance.map_or(1.0, |all| all[i].max(0.0)) * (mean + x * x).sqrt();
    }
}

/// An f16, if the number is not too large for one.
fn half_of(number: f32) -> Result<f16, EncodeError> {
    let half = f16::from_f32(number);
    // The caller replaces column and type.
    if half.is_finite() { Ok(half) } else { Err(EncodeError::TooLarge { column: 0, dtype: Dtype::F16 }) }
}

/// Adds digits to zeroed bits, from this bit of each byte on.
fn put_bits(to: &mut [u8], shift: usize, digits: impl IntoIterator<Item = u8>) {
    to.iter_mut().zip(digits).for_each(|(to, digit)| *to |= digit << shift);
}
