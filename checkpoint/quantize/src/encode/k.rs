//! Types whose blocks have 256 numbers: sub-blocks have small whole scales, and the block has one number of 16 bits by
//! which all scales are multiplied, and perhaps another for minima.
//!
//! Scales are searched for each sub-block, and then rounded to multiples of the block's number. Of each scale its
//! neighbours are tried too. At last the block's numbers are solved for, with all digits and scales as they are.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of lanes")]

use super::search::{DigitGrid, DigitLine, WholeDigits, digit_on, fit_line, fit_scale};
use super::{EncodeError, half_of, put_bits};
use half::f16;

const N: usize = 256;
/// The most sub-blocks of a block.
const SUBS_MAX: usize = 16;

/// How a type divides its block: sub-blocks of `len` numbers.
#[derive(Clone, Copy)]
struct SubBlockForm {
    len: usize,
    /// The first and the last digit. The first is zero if there are minima.
    digits: [f32; 2],
    /// The first and the last scale, in whole multiples of the block's number.
    scales: [f32; 2],
}

/// The content of a block before it is packed.
#[derive(Clone)]
struct FittedBlock {
    d: f16,
    /// Stored minima are subtracted.
    m: f16,
    scales: [f32; SUBS_MAX],
    minima: [f32; SUBS_MAX],
    digits: [f32; N],
    error: f64,
}

/// A block's numbers, each with the weight of its error.
struct WeightedBlock<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    form: SubBlockForm,
}

impl WeightedBlock<'_> {
    fn subs(&self) -> impl Iterator<Item = (&[f32], &[f32])> {
        self.x.chunks_exact(self.form.len).zip(self.weights.chunks_exact(self.form.len))
    }

    fn has_minima(&self) -> bool {
        self.form.digits[0] == 0.0
    }

    fn digit(&self, line: DigitLine, x: f32) -> f32 {
        let [least, most] = self.form.digits;
        digit_on(line, &WholeDigits { least, most }, x)
    }

    /// The weighted error of a sub-block whose digits are rounded on this line.
    fn error(&self, x: &[f32], weights: &[f32], line: DigitLine) -> f32 {
        let mut errors = [0f32; 8];
        for (x, w) in x.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
            for i in 0..8 {
                let distance = line.scale * self.digit(line, x[i]) + line.minimum - x[i];
                errors[i] += w[i] * distance * distance;
            }
        }
        errors.iter().sum()
    }

    /// Fits the block.
    fn fit(&self) -> Result<FittedBlock, EncodeError> {
        let (mut scales, mut minima, mut sums) = ([0f32; SUBS_MAX], [0f32; SUBS_MAX], [0f32; SUBS_MAX]);
        let [least, most] = self.form.digits;
        let has_minima = self.has_minima();
        for (j, (x, weights)) in self.subs().enumerate() {
            sums[j] = weights.iter().sum();
            if has_minima {
                let line = fit_line(x, weights, most, 0.0);
                (scales[j], minima[j]) = (line.scale, -line.minimum);
            } else {
                scales[j] = fit_scale(x, weights, &WholeDigits { least, most });
            }
        }
        let grid = self.scale_grid();
        let d = half_of(fit_scale(&scales, &sums, &grid))?;
        let m = half_of(fit_scale(&minima, &sums, &grid))?;
        let first = self.choose([d, m], &scales, &minima);
        let Some([d, m]) = self.refit(&first) else { return Ok(first) };
        let second = self.choose([d, m], &scales, &minima);
        Ok(if second.error < first.error { second } else { first })
    }

    fn scale_grid(&self) -> WholeDigits {
        let [least, most] = self.form.scales;
        WholeDigits { least, most }
    }

    /// Chooses scales and minima near these, in multiples of the block's numbers, and then digits.
    fn choose(&self, [d, m]: [f16; 2], scales: &[f32; SUBS_MAX], minima: &[f32; SUBS_MAX]) -> FittedBlock {
        let mut fitted =
            FittedBlock { d, m, scales: [0.0; SUBS_MAX], minima: [0.0; SUBS_MAX], digits: [0.0; N], error: 0.0 };
        let (d, m, grid) = (d.to_f32(), m.to_f32(), self.scale_grid());
        let near = |number: f32, unit: f32| {
            let middle = if unit == 0.0 { 0.0 } else { grid.nearest(number / unit) };
            let reach = if unit == 0.0 { 0 } else { 1 };
            (-reach..=reach).map(move |step| middle + step as f32)
        };
        let is_valid = |multiple: &f32| (grid.least..=grid.most).contains(multiple);
        for (j, (x, weights)) in self.subs().enumerate() {
            let mut best = f32::INFINITY;
            for minimum in near(minima[j], m).filter(is_valid) {
                for scale in near(scales[j], d).filter(is_valid) {
                    let error = self.error(x, weights, DigitLine { scale: d * scale, minimum: -m * minimum });
                    if error < best {
                        (best, fitted.scales[j], fitted.minima[j]) = (error, scale, minimum);
                    }
                }
            }
            fitted.error += f64::from(best);
            let line = DigitLine { scale: d * fitted.scales[j], minimum: -m * fitted.minima[j] };
            let digits = fitted.digits[j * self.form.len..].iter_mut();
            digits.zip(x).for_each(|(digit, x)| *digit = self.digit(line, *x));
        }
        fitted
    }

    /// Solves for the block's numbers with all digits, scales and minima as they are.
    fn refit(&self, fitted: &FittedBlock) -> Option<[f16; 2]> {
        // x = d × a - m × b
        let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0f64, 0f64, 0f64, 0f64, 0f64);
        for (j, (x, weights)) in self.subs().enumerate() {
            let b = f64::from(fitted.minima[j]);
            for (i, (x, w)) in x.iter().zip(weights).enumerate() {
                let a = f64::from(fitted.scales[j] * fitted.digits[j * self.form.len + i]);
                let (x, w) = (f64::from(*x), f64::from(*w));
                (aa, ab, bb) = (aa + w * a * a, ab + w * a * b, bb + w * b * b);
                (xa, xb) = (xa + w * x * a, xb + w * x * b);
            }
        }
        if bb == 0.0 {
            return (aa > 0.0).then(|| [f16::from_f64(xa / aa), fitted.m]).filter(|[d, _]| d.is_finite());
        }
        let determinant = aa * bb - ab * ab;
        let (d, m) = ((xa * bb - xb * ab) / determinant, (xa * ab - xb * aa) / determinant);
        let is_valid = |number: f64| number.is_finite() && (0.0..=65_504.0).contains(&number);
        (determinant > 0.0 && is_valid(d) && is_valid(m)).then(|| [f16::from_f64(d), f16::from_f64(m)])
    }
}

impl FittedBlock {
    /// Digits `32 × i` and the next 31, as unsigned numbers.
    fn digits(&self, i: usize, middle: f32) -> [u8; 32] {
        std::array::from_fn(|l| (self.digits[32 * i + l] + middle) as u8)
    }
}

fn fit(x: &[f32], weights: &[f32], form: SubBlockForm) -> Result<FittedBlock, EncodeError> {
    WeightedBlock { x, weights, form }.fit()
}

/// 16 × (4 bits of scale, 4 of minimum) · 64 bytes of two bits · d · m
pub(super) fn q2_k(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let fitted = fit(x, weights, SubBlockForm { len: 16, digits: [0.0, 3.0], scales: [0.0, 15.0] })?;
    to.fill(0);
    for (j, (scale, minimum)) in fitted.scales.iter().zip(fitted.minima).enumerate() {
        to[j] = *scale as u8 | (minimum as u8) << 4;
    }
    for i in 0..8 {
        put_bits(&mut to[16 + i / 4 * 32..], i % 4 * 2, fitted.digits(i, 0.0));
    }
    to[80..82].copy_from_slice(&fitted.d.to_le_bytes());
    to[82..84].copy_from_slice(&fitted.m.to_le_bytes());
    Ok(())
}

/// 32 bytes of third bits · 64 bytes of two bits · 12 bytes of scales · d
pub(super) fn q3_k(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let fitted = fit(x, weights, SubBlockForm { len: 16, digits: [-4.0, 3.0], scales: [-32.0, 31.0] })?;
    to.fill(0);
    for i in 0..8 {
        let digits = fitted.digits(i, 4.0);
        put_bits(to, i, digits.map(|digit| digit >> 2));
        put_bits(&mut to[32 + i / 4 * 32..], i % 4 * 2, digits.map(|digit| digit & 3));
    }
    for (j, scale) in fitted.scales.iter().enumerate() {
        let scale = (scale + 32.0) as u8;
        to[96 + j % 8] |= (scale & 15) << (j / 8 * 4);
        to[104 + j % 4] |= scale >> 4 << (j / 4 * 2);
    }
    to[108..110].copy_from_slice(&fitted.d.to_le_bytes());
    Ok(())
}

/// d · m · 12 bytes of scales and minima · 128 bytes of nibbles
pub(super) fn q4_k(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let fitted = fit(x, weights, SubBlockForm { len: 32, digits: [0.0, 15.0], scales: [0.0, 63.0] })?;
    to.fill(0);
    put_six_bits(&fitted, to);
    for i in 0..8 {
        put_bits(&mut to[16 + i / 2 * 32..], i % 2 * 4, fitted.digits(i, 0.0));
    }
    Ok(())
}

/// d · m · 12 bytes of scales and minima · 32 bytes of fifth bits · 128 bytes of nibbles
pub(super) fn q5_k(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let fitted = fit(x, weights, SubBlockForm { len: 32, digits: [0.0, 31.0], scales: [0.0, 63.0] })?;
    to.fill(0);
    put_six_bits(&fitted, to);
    for i in 0..8 {
        let digits = fitted.digits(i, 0.0);
        put_bits(&mut to[16..], i, digits.map(|digit| digit >> 4));
        put_bits(&mut to[48 + i / 2 * 32..], i % 2 * 4, digits.map(|digit| digit & 15));
    }
    Ok(())
}

/// d, m, and scales and minima of six bits. The upper bits of the last four are stored above those of the first four.
fn put_six_bits(fitted: &FittedBlock, to: &mut [u8]) {
    to[..2].copy_from_slice(&fitted.d.to_le_bytes());
    to[2..4].copy_from_slice(&fitted.m.to_le_bytes());
    for j in 0..4 {
        let pair = |j: usize| (fitted.scales[j] as u8, fitted.minima[j] as u8);
        let ((scale, minimum), (later_scale, later_minimum)) = (pair(j), pair(j + 4));
        to[4 + j] = scale | later_scale >> 4 << 6;
        to[8 + j] = minimum | later_minimum >> 4 << 6;
        to[12 + j] = later_scale & 15 | (later_minimum & 15) << 4;
    }
}

/// 128 bytes of nibbles · 64 bytes of two bits · 16 × i8 scale · d
pub(super) fn q6_k(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let fitted = fit(x, weights, SubBlockForm { len: 16, digits: [-32.0, 31.0], scales: [-128.0, 127.0] })?;
    to.fill(0);
    for i in 0..8 {
        let digits = fitted.digits(i, 32.0);
        put_bits(&mut to[i / 4 * 64 + i % 2 * 32..], i % 4 / 2 * 4, digits.map(|digit| digit & 15));
        put_bits(&mut to[128 + i / 4 * 32..], i % 4 * 2, digits.map(|digit| digit >> 4));
    }
    to[192..208].iter_mut().zip(fitted.scales).for_each(|(to, scale)| *to = scale as i8 as u8);
    to[208..210].copy_from_slice(&fitted.d.to_le_bytes());
    Ok(())
}
