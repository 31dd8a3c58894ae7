//! NVFP4: matrices of numbers of four bits (E2M1), a scale of eight bits (E4M3) for each 16 of a row, and one factor
//! for the whole matrix. Read as bf16, in which the unpackers of compressed-tensors and modelopt leave the numbers.
//!
//! ```text
//!                       compressed-tensors      modelopt
//! numbers, two a byte   .weight_packed          .weight             the first in the lower bits
//! scales                .weight_scale           .weight_scale
//! factor                .weight_global_scale    .weight_scale_2     f32
//! a number              e2m1 × (e4m3 ÷ factor)  e2m1 × (e4m3 × factor)
//! ```
//! The scale is rounded to f32, then the product to f32, then that to bf16. The rounding of activations is ignored.

use super::cells::{ShardMatrix, TensorPart, TensorReader, TensorTaker, of_type};
use crate::error::{ParseError, Result};
use crate::file::SourceFile;
use half::bf16;
use safetensors::tensor::Dtype as Stored;
use std::ops::Range;
use types::Dtype;

/// Numbers that share a scale.
const GROUP: usize = 16;
/// The numbers of four bits: a sign, two bits of exponent, one of fraction. Zeros have no sign.
const E2M1: [f32; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., 0., -0.5, -1., -1.5, -2., -3., -4., -6.];

/// What a matrix's factor does to its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleFactor {
    /// compressed-tensors
    Divides,
    /// modelopt
    Multiplies,
}

impl ScaleFactor {
    /// What follows a matrix's name in the name of its digits.
    pub const fn digits(self) -> &'static [&'static str] {
        match self {
            ScaleFactor::Divides => &[".weight_packed"],
            ScaleFactor::Multiplies => &[".weight"],
        }
    }

    const fn factor(self) -> &'static str {
        match self {
            ScaleFactor::Divides => ".weight_global_scale",
            ScaleFactor::Multiplies => ".weight_scale_2",
        }
    }
}

/// One matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fp4Matrix {
    pub shape: [usize; 2],
    pub digits: ShardMatrix,
    scales: ShardMatrix,
    kind: ScaleFactor,
    factor: f32,
}

/// The matrix whose digits are this tensor.
pub(crate) fn fp4_matrix(
    kind: ScaleFactor,
    stem: &str,
    digits: &TensorPart,
    take: TensorTaker<'_>,
    read: TensorReader<'_>,
) -> std::result::Result<Fp4Matrix, ParseError> {
    let mut of = |suffix: &str| {
        let name = format!("{stem}{suffix}");
        take(&name).ok_or_else(|| ParseError::Malformed(format!("the matrix {stem} has no {name}")))
    };
    let (scales, factor) = (of(".weight_scale")?, of(kind.factor())?);
    let Some((digit_cells, scale_cells)) = cells_of(digits, &scales, &factor) else {
        let all = [digits, &scales, &factor].map(|part| format!("{:?} {:?}", part.dtype, part.dims));
        return ParseError::malformed(format!("the matrix {stem} cannot be made of {}", all.join(", ")));
    };
    let factor = read(&factor, 4).and_then(|bytes| Some(f32::from_le_bytes(*bytes.first_chunk()?)));
    let Some(factor) = factor.filter(|factor| factor.is_finite() && *factor > 0.) else {
        let (name, found) = (kind.factor(), factor.unwrap_or(f32::NAN));
        return ParseError::malformed(format!("the factor {stem}{name} is {found}, which is not a positive number"));
    };
    let shape = [digit_cells.rows, digit_cells.cols * 2];
    Ok(Fp4Matrix { shape, digits: digit_cells, scales: scale_cells, kind, factor })
}

/// Returns where digits and scales are, if the shapes of the three tensors agree.
fn cells_of(digits: &TensorPart, scales: &TensorPart, factor: &TensorPart) -> Option<(ShardMatrix, ShardMatrix)> {
    let digit_cells = of_type(digits, Stored::U8).filter(|_| digits.dims.len() == 2)?;
    let scale_cells = of_type(scales, Stored::F8_E4M3)?;
    of_type(factor, Stored::F32).filter(|cells| cells.rows * cells.cols == 1)?;
    let is_whole = digit_cells.cols.is_multiple_of(GROUP / 2);
    let fits = [digit_cells.rows, digit_cells.cols / (GROUP / 2)] == [scale_cells.rows, scale_cells.cols];
    (is_whole && fits).then_some((digit_cells, scale_cells))
}

impl Fp4Matrix {
    pub const DTYPE: Dtype = Dtype::BF16;

    /// The first and the last bytes of all that it is made of.
    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let digits = self.digits.edge_bytes(files, n)?;
        Ok([digits, self.scales.edge_bytes(files, n)?, self.factor.to_le_bytes().to_vec()].concat())
    }

    /// The numbers of some rows, one row after another.
    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        let digits = self.digits.read(files, rows.clone(), 0..self.digits.cols)?;
        let scales = self.scales.read(files, rows, 0..self.scales.cols)?;
        let of_byte: [f32; 256] = std::array::from_fn(|byte| self.scale(byte as u8));
        let groups = digits.as_chunks::<{ GROUP / 2 }>().0.iter().zip(scales);
        for (to, (digits, scale)) in to.as_chunks_mut::<{ 2 * GROUP }>().0.iter_mut().zip(groups) {
            let scale = of_byte[usize::from(scale)];
            for (to, pair) in to.as_chunks_mut::<4>().0.iter_mut().zip(digits) {
                let number = |name: u8| bf16::from_f32(E2M1[usize::from(name)] * scale).to_le_bytes();
                let (first, second) = (number(pair & 0xf), number(pair >> 4));
                *to = [first[0], first[1], second[0], second[1]];
            }
        }
        Ok(())
    }

    /// The number by which digits with this scale are multiplied.
    fn scale(&self, stored: u8) -> f32 {
        match self.kind {
            ScaleFactor::Divides => e4m3(stored) / self.factor,
            ScaleFactor::Multiplies => e4m3(stored) * self.factor,
        }
    }
}

/// A number of eight bits: a sign, four bits of exponent, three of fraction, without infinities.
fn e4m3(bits: u8) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (0, _) => fraction * 2f32.powi(-9),
        (15, 7) => f32::NAN,
        _ => (8. + fraction) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_have_the_formats_limits() {
        let known = [(0, 0.), (1, 1. / 512.), (7, 7. / 512.), (8, 1. / 64.), (0x38, 1.), (0x3f, 1.875), (0x7e, 448.)];
        for (bits, number) in known {
            assert_eq!((e4m3(bits), e4m3(bits | 0x80)), (number, -number), "{bits:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && (1..0x7e).all(|bits| e4m3(bits) < e4m3(bits + 1)));
    }
}
