//! The blocks of a type to numbers. Exact: the numbers are those that the format defines. Knows no file.

use crate::encode::NAMED;
use half::{bf16, f16};
use types::Dtype;

/// Twice the values of MXFP4's four bits: a sign, two bits of exponent, one of fraction.
const MXFP4: [f32; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

/// Whether `decode_row` knows the type.
pub fn can_decode(dtype: Dtype) -> bool {
    let is_of_runs = matches!(
        dtype,
        Dtype::IQ1S | Dtype::IQ1M | Dtype::IQ2XXS | Dtype::IQ2XS | Dtype::IQ2S | Dtype::IQ3XXS | Dtype::IQ3S
    );
    !is_of_runs && !matches!(dtype, Dtype::F8E4M3 | Dtype::Grouped(_))
}

/// Decodes a row of whole blocks. The caller has checked the type.
pub fn decode_row(dtype: Dtype, bytes: &[u8], to: &mut [f32]) {
    assert!(can_decode(dtype) && dtype.bytes_of(to.len() as u64) == Some(bytes.len() as u64), "a row of a known type");
    for (block, to) in bytes.chunks_exact(dtype.block_bytes()).zip(to.chunks_exact_mut(dtype.block())) {
        decode_block(dtype, block, to);
    }
}

fn decode_block(dtype: Dtype, block: &[u8], to: &mut [f32]) {
    match dtype {
        Dtype::F32 => to[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        Dtype::F16 => to[0] = half(block, 0),
        Dtype::BF16 => to[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        Dtype::Q4_0 => place(to, nibbles(block, 2), |q| half(block, 0) * (q - 8.0)),
        Dtype::Q4_1 => place(to, nibbles(block, 4), |q| half(block, 0) * q + half(block, 2)),
        Dtype::Q5_0 => place(to, fives(block, 2), |q| half(block, 0) * (q - 16.0)),
        Dtype::Q5_1 => place(to, fives(block, 4), |q| half(block, 0) * q + half(block, 2)),
        Dtype::Q8_0 => place(to, bytes(block, 2), |q| half(block, 0) * f32::from(q as u8 as i8)),
        Dtype::IQ4NL => place(to, nibbles(block, 2), |q| half(block, 0) * NAMED[q as usize]),
        Dtype::MXFP4 => place(to, nibbles(block, 1), |q| half_power(block[0]) * MXFP4[q as usize]),
        _ => to.chunks_exact_mut(32).enumerate().for_each(|(i, to)| decode_part(dtype, block, i, to)),
    }
}

/// Part `i`, of thirty-two numbers, of a block of 256.
fn decode_part(dtype: Dtype, block: &[u8], i: usize, to: &mut [f32]) {
    let two_bits = |at: usize| bits(block, at + i / 4 * 32, i % 4 * 2, 3);
    match dtype {
        Dtype::Q2K => {
            let (d, m) = (half(block, 80), half(block, 82));
            let at = |j: usize| [d * f32::from(block[j] & 15), m * f32::from(block[j] >> 4)];
            place_halves(to, two_bits(16), [at(2 * i), at(2 * i + 1)], 0.0);
        }
        Dtype::Q3K => {
            let scale = |j: usize| {
                let low = block[96 + j % 8] >> (j / 8 * 4) & 15;
                let high = block[104 + j % 4] >> (j / 4 * 2) & 3;
                [half(block, 108) * (f32::from(low | high << 4) - 32.0), 0.0]
            };
            place_halves(to, join(two_bits(32), bits(block, 0, i, 1), 2), [scale(2 * i), scale(2 * i + 1)], 4.0);
        }
        Dtype::Q4K => place_halves(to, bits(block, 16 + i / 2 * 32, i % 2 * 4, 15), [six_bits(block, i); 2], 0.0),
        Dtype::Q5K => {
            let q = join(bits(block, 48 + i / 2 * 32, i % 2 * 4, 15), bits(block, 16, i, 1), 4);
            place_halves(to, q, [six_bits(block, i); 2], 0.0);
        }
        Dtype::Q6K => {
            let low = bits(block, i / 4 * 64 + i % 2 * 32, i % 4 / 2 * 4, 15);
            let scale = |j: usize| [half(block, 208) * f32::from(block[192 + j] as i8), 0.0];
            place_halves(to, join(low, two_bits(128), 4), [scale(2 * i), scale(2 * i + 1)], 32.0);
        }
        Dtype::IQ4XS => {
            let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
            let high = (u16::from_le_bytes([block[2], block[3]]) >> (2 * i) & 3) as u8;
            let scale = half(block, 0) * (f32::from(low | high << 4) - 32.0);
            place(to, nibbles(block, 8 + 16 * i), |q| scale * NAMED[q as usize]);
        }
        Dtype::TQ1_0 => {
            place(to, std::array::from_fn(|j| ternary_digit(block, i * 32 + j)), |q| half(block, 52) * (q - 1.0));
        }
        Dtype::TQ2_0 => place(to, two_bits(0), |q| half(block, 64) * (q - 1.0)),
        _ => unreachable!("`can_decode` has refused the type"),
    }
}

fn place(to: &mut [f32], digits: [u8; 32], number: impl Fn(f32) -> f32) {
    to.iter_mut().zip(digits).for_each(|(to, digit)| *to = number(f32::from(digit)));
}

/// Each half has a scale, and a minimum that is subtracted.
fn place_halves(to: &mut [f32], digits: [u8; 32], lines: [[f32; 2]; 2], middle: f32) {
    for (j, (to, digit)) in to.iter_mut().zip(digits).enumerate() {
        let [scale, minimum] = lines[j / 16];
        *to = scale * (f32::from(digit) - middle) - minimum;
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Half of 2^(e - 127): exact, subnormal where e is below 2.
fn half_power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x20_0000 << e } else { u32::from(e - 1) << 23 })
}

fn bytes(block: &[u8], at: usize) -> [u8; 32] {
    bits(block, at, 0, 255)
}

/// Bytes `at..at + 32`, shifted and masked.
fn bits(block: &[u8], at: usize, shift: usize, mask: u8) -> [u8; 32] {
    std::array::from_fn(|j| block[at + j] >> shift & mask)
}

fn join(low: [u8; 32], high: [u8; 32], shift: u8) -> [u8; 32] {
    std::array::from_fn(|j| low[j] | high[j] << shift)
}

/// Low nibbles are the first sixteen.
fn nibbles(block: &[u8], at: usize) -> [u8; 32] {
    std::array::from_fn(|j| block[at + j % 16] >> (j / 16 * 4) & 15)
}

/// 32 fifth bits, then nibbles.
fn fives(block: &[u8], at: usize) -> [u8; 32] {
    let low = nibbles(block, at + 4);
    std::array::from_fn(|j| low[j] | (block[at + j / 8] >> (j % 8) & 1) << 4)
}

/// Returns the scale and the minimum of part `i`.
fn six_bits(block: &[u8], i: usize) -> [f32; 2] {
    let byte = |j: usize| block[4 + j];
    let [scale, minimum] = if i < 4 {
        [byte(i) & 63, byte(i + 4) & 63]
    } else {
        let low = byte(i + 4);
        [low & 15 | byte(i - 4) >> 6 << 4, low >> 4 | byte(i) >> 6 << 4]
    };
    [half(block, 0) * f32::from(scale), half(block, 2) * f32::from(minimum)]
}

/// Returns digit `i` of 256. A byte is a fraction of 256, and has five digits in base three; each of the last four
/// bytes has four.
fn ternary_digit(block: &[u8], i: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (byte, n) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
        _ => (48 + (i - 240) % 4, (i - 240) / 4),
    };
    ((u16::from(block[byte].wrapping_mul(POWERS[n])) * 3) >> 8) as u8
}
