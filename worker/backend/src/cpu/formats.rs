//! The weight formats: which kernels multiply and unpack the numbers of a `Dtype`. No other file of the CPU lists them,
//! except `blocks`, which reads the blocks of files.

use super::codebooks::{Iq1Numbers, Iq2Numbers, Iq3SNumbers, Iq3XxsNumbers, Iq4Numbers, Mxfp4Numbers};
use super::digits::{DigitPacking, EightBitDigits, FiveBitDigits, FourBitDigits, SixBitDigits};
use super::digits::{ThreeBitDigits, TwoBitDigits};
use super::quants::{Bf16Scale, F16Scale, F16ScaleAndMinimum, HeaderScaleOnly, HeaderTimesPair};
use super::quants::{CodebookQuant, HeaderTimesTwo, HeaderTimesTwoPairs, Packing, Quant, Quantized, SIGN};
use types::{DigitBits, Dtype, GroupedDtype};

/// Work that differs by weight format.
pub(crate) trait FormatVisitor {
    type Output;

    fn f32(self) -> Self::Output;
    fn f16(self) -> Self::Output;
    /// Pairs of bf16.
    fn bf16(self) -> Self::Output;
    /// E4M3 numbers, with an f32 scale for every thirty-two of a row.
    fn e4m3(self) -> Self::Output;
    fn quantized<Q: Quant>(self) -> Self::Output;
}

/// Does the work of `visitor` for the format of `dtype`.
#[inline(always)]
pub(crate) fn visit<V: FormatVisitor>(dtype: Dtype, visitor: V) -> V::Output {
    const FOUR: u8 = DigitBits::Four.middle();
    const EIGHT: u8 = DigitBits::Eight.middle();
    match dtype {
        Dtype::F32 => visitor.f32(),
        Dtype::F16 => visitor.f16(),
        Dtype::BF16 => visitor.bf16(),
        Dtype::F8E4M3 => visitor.e4m3(),
        Dtype::Q4_0 => visitor.quantized::<Quantized<FourBitDigits, F16Scale, 8>>(),
        Dtype::Q4_1 => visitor.quantized::<Quantized<FourBitDigits, F16ScaleAndMinimum, 0>>(),
        Dtype::Q5_0 => visitor.quantized::<Quantized<FiveBitDigits, F16Scale, 16>>(),
        Dtype::Q5_1 => visitor.quantized::<Quantized<FiveBitDigits, F16ScaleAndMinimum, 0>>(),
        Dtype::Q8_0 => visitor.quantized::<Quantized<EightBitDigits, F16Scale, SIGN>>(),
        // An f16 does not hold every power of two.
        Dtype::MXFP4 => visitor.quantized::<CodebookQuant<Mxfp4Numbers, Bf16Scale>>(),
        Dtype::Q2K => visitor.quantized::<Quantized<TwoBitDigits, HeaderTimesTwoPairs, 0>>(),
        Dtype::Q3K => visitor.quantized::<Quantized<ThreeBitDigits, HeaderTimesTwo<0>, 4>>(),
        Dtype::Q4K => visitor.quantized::<Quantized<FourBitDigits, HeaderTimesPair, 0>>(),
        Dtype::Q5K => visitor.quantized::<Quantized<FiveBitDigits, HeaderTimesPair, 0>>(),
        Dtype::Q6K => visitor.quantized::<Quantized<SixBitDigits, HeaderTimesTwo<0>, 32>>(),
        Dtype::IQ4NL => visitor.quantized::<CodebookQuant<Iq4Numbers, F16Scale>>(),
        Dtype::IQ4XS => visitor.quantized::<CodebookQuant<Iq4Numbers, HeaderTimesTwo<0>>>(),
        Dtype::IQ1S | Dtype::IQ1M => visitor.quantized::<CodebookQuant<Iq1Numbers, HeaderTimesTwo<3>>>(),
        Dtype::IQ2XXS | Dtype::IQ2XS | Dtype::IQ2S => {
            visitor.quantized::<CodebookQuant<Iq2Numbers, HeaderTimesTwo<3>>>()
        }
        Dtype::IQ3XXS => visitor.quantized::<CodebookQuant<Iq3XxsNumbers, HeaderTimesTwo<2>>>(),
        Dtype::IQ3S => visitor.quantized::<CodebookQuant<Iq3SNumbers, HeaderTimesTwo<0>>>(),
        Dtype::TQ1_0 | Dtype::TQ2_0 => visitor.quantized::<Quantized<TwoBitDigits, HeaderScaleOnly, 1>>(),
        Dtype::Grouped(GroupedDtype { digits: DigitBits::Four, .. }) => {
            visitor.quantized::<Quantized<FourBitDigits, HeaderScaleOnly, FOUR>>()
        }
        Dtype::Grouped(GroupedDtype { digits: DigitBits::Eight, .. }) => {
            visitor.quantized::<Quantized<EightBitDigits, HeaderScaleOnly, EIGHT>>()
        }
    }
}

/// The layout of tiles of this type.
pub(crate) fn packing(dtype: Dtype) -> Packing {
    let packing = visit(dtype, PackingOfFormat);
    if let Dtype::Grouped(grouped) = dtype { packing.in_groups(grouped) } else { packing }
}

struct PackingOfFormat;

impl FormatVisitor for PackingOfFormat {
    type Output = Packing;

    fn f32(self) -> Packing {
        Packing::F32
    }

    fn f16(self) -> Packing {
        Packing::F16
    }

    fn bf16(self) -> Packing {
        Packing::BF16
    }

    fn e4m3(self) -> Packing {
        Packing::E4M3
    }

    fn quantized<Q: Quant>(self) -> Packing {
        Q::PACKING
    }
}

/// The meaning of packed digits: the number is a scale times the digit minus an offset.
pub(crate) struct DigitMeaning {
    /// The digits that packed ones name, if they do.
    pub codebook: Option<&'static [u8; 16]>,
    pub offset: f32,
}

/// Returns the meaning of a type's digits; none for numbers that are no digits.
pub(crate) fn digit_meaning(dtype: Dtype) -> Option<DigitMeaning> {
    visit(dtype, MeaningOfDigits)
}

struct MeaningOfDigits;

impl FormatVisitor for MeaningOfDigits {
    type Output = Option<DigitMeaning>;

    fn f32(self) -> Option<DigitMeaning> {
        None
    }

    fn f16(self) -> Option<DigitMeaning> {
        None
    }

    fn bf16(self) -> Option<DigitMeaning> {
        None
    }

    fn e4m3(self) -> Option<DigitMeaning> {
        None
    }

    fn quantized<Q: Quant>(self) -> Option<DigitMeaning> {
        Some(DigitMeaning { codebook: Q::Digits::CODEBOOK, offset: Q::OFFSET.into() })
    }
}
