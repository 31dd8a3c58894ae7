//! Types whose blocks have thirty-two numbers. Knows their layouts, and not how the best scale is searched.

use super::search::{DigitGrid, DigitLine, WholeDigits, digit_on, fit_line, fit_scale};
use super::{EncodeError, half_of, put_bits};
use half::f16;

const N: usize = 32;

/// The values of IQ4_NL's nibbles.
pub(crate) const NAMED: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// The numbers between two neighbours of `NAMED`: from there on the second one is nearer.
const BETWEEN: [f32; 15] = {
    let mut between = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        between[i] = (NAMED[i] + NAMED[i + 1]) / 2.0;
        i += 1;
    }
    between
};

/// The digits of IQ4_NL.
struct NamedDigits;

impl NamedDigits {
    fn index(number: f32) -> usize {
        BETWEEN.iter().filter(|between| number >= **between).count()
    }
}

impl DigitGrid for NamedDigits {
    fn ends(&self) -> [f32; 2] {
        [NAMED[0], NAMED[15]]
    }

    /// Adds up steps, which are exact, so that vectors need no table.
    #[inline(always)]
    fn nearest(&self, number: f32) -> f32 {
        let mut nearest = NAMED[0];
        for (between, pair) in BETWEEN.iter().zip(NAMED.windows(2)) {
            nearest += if number >= *between { pair[1] - pair[0] } else { 0.0 };
        }
        nearest
    }
}

/// The inverse of a scale, as the file holds it; zero for a scale of zero, so that all digits are zero too.
fn inverse(scale: f16) -> f32 {
    if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() }
}

/// d · 32 × i8
pub(super) fn q8_0(x: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let peak = x.iter().fold(0f32, |peak, x| peak.max(x.abs()));
    let d = half_of(peak / 127.0)?;
    let (grid, inverse) = (WholeDigits { least: -127.0, most: 127.0 }, inverse(d));
    to[..2].copy_from_slice(&d.to_le_bytes());
    to[2..].iter_mut().zip(x).for_each(|(to, x)| *to = grid.nearest(x * inverse) as i8 as u8);
    Ok(())
}

/// d · fifth bits, if there are five · nibbles. Number: d × (digit - middle).
pub(super) fn with_middle(bits: u32, x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let middle = (1 << (bits - 1)) as f32;
    let grid = WholeDigits { least: -middle, most: middle - 1.0 };
    let d = half_of(fit_scale(x, weights, &grid))?;
    let inverse = inverse(d);
    to[..2].copy_from_slice(&d.to_le_bytes());
    put_digits(bits, |i| (grid.nearest(x[i] * inverse) + middle) as u8, &mut to[2..]);
    Ok(())
}

/// d · m · fifth bits, if there are five · nibbles. Number: d × digit + m.
pub(super) fn with_minimum(bits: u32, x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let top = ((1 << bits) - 1) as f32;
    let line = fit_line(x, weights, top, f32::MAX);
    let (d, m) = (half_of(line.scale)?, half_of(line.minimum)?);
    let line = DigitLine { scale: d.to_f32(), minimum: m.to_f32() };
    to[..2].copy_from_slice(&d.to_le_bytes());
    to[2..4].copy_from_slice(&m.to_le_bytes());
    let grid = WholeDigits { least: 0.0, most: top };
    put_digits(bits, |i| digit_on(line, &grid, x[i]) as u8, &mut to[4..]);
    Ok(())
}

/// d · nibbles that name one of sixteen numbers
pub(super) fn iq4_nl(x: &[f32], weights: &[f32], to: &mut [u8]) -> Result<(), EncodeError> {
    let d = half_of(fit_scale(x, weights, &NamedDigits))?;
    let inverse = inverse(d);
    to[..2].copy_from_slice(&d.to_le_bytes());
    put_digits(4, |i| NamedDigits::index(x[i] * inverse) as u8, &mut to[2..]);
    Ok(())
}

/// Fifth bits, if there are five, then nibbles: the low ones are the first sixteen.
fn put_digits(bits: u32, digit: impl Fn(usize) -> u8, to: &mut [u8]) {
    let digits: [u8; N] = std::array::from_fn(digit);
    let mut nibbles = to;
    if bits == 5 {
        let high = digits.iter().enumerate().fold(0u32, |high, (i, digit)| high | u32::from(digit >> 4) << i);
        let (fifths, rest) = nibbles.split_at_mut(4);
        fifths.copy_from_slice(&high.to_le_bytes());
        nibbles = rest;
    }
    nibbles.fill(0);
    put_bits(nibbles, 0, digits[..N / 2].iter().map(|digit| digit & 15));
    put_bits(nibbles, 4, digits[N / 2..].iter().map(|digit| digit & 15));
}
