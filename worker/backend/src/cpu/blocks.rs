//! A file's quantized blocks, thirty-two elements at a time: each element's digit as an unsigned byte, or the name of
//! its number in a codebook, and the scales, as `quants` packs them. Exact: unpacking gives the file's numbers.

use super::grids::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
use super::quants::{COLUMNS_MAX, SIGN};
use half::{bf16, f16};
use types::{DigitBits, Dtype, GroupedDtype, ScaleType};

/// Thirty-two numbers of one row.
#[derive(Clone, Copy, Default)]
pub(crate) struct SubBlock {
    pub q: [u8; 32],
    /// The header that the sub-blocks of a block share.
    pub head: [[u8; 2]; COLUMNS_MAX],
    pub scales: [[u8; 2]; COLUMNS_MAX],
}

/// Sub-block `i`, of thirty-two elements, of a block.
pub(crate) fn sub_block(dtype: Dtype, block: &[u8], i: usize) -> SubBlock {
    match dtype {
        Dtype::Q4_0 => simple(nibbles(block, 2), &[two_bytes_at(block, 0)]),
        Dtype::Q4_1 => simple(nibbles(block, 4), &[two_bytes_at(block, 0), two_bytes_at(block, 2)]),
        Dtype::Q5_0 => simple(fives(block, 2), &[two_bytes_at(block, 0)]),
        Dtype::Q5_1 => simple(fives(block, 4), &[two_bytes_at(block, 0), two_bytes_at(block, 2)]),
        Dtype::Q8_0 => simple(fixed::<32>(block, 2).map(|q| q ^ SIGN), &[two_bytes_at(block, 0)]),
        Dtype::IQ4NL => simple(nibbles(block, 2), &[two_bytes_at(block, 0)]),
        Dtype::MXFP4 => simple(nibbles(block, 1), &[half_power(block[0])]),
        Dtype::Q2K => q2_k(block, i),
        Dtype::Q3K => q3_k(block, i),
        Dtype::Q4K => q4_k(block, i),
        Dtype::Q5K => q5_k(block, i),
        Dtype::Q6K => q6_k(block, i),
        Dtype::IQ4XS => iq4_xs(block, i),
        Dtype::IQ1S => iq1_s(block, i),
        Dtype::IQ1M => iq1_m(block, i),
        Dtype::IQ2XXS => iq2_xxs(block, i),
        Dtype::IQ2XS => iq2_xs(block, i),
        Dtype::IQ2S => iq2_s(block, i),
        Dtype::IQ3XXS => iq3_xxs(block, i),
        Dtype::IQ3S => iq3_s(block, i),
        Dtype::TQ1_0 => ternary(block, 52, std::array::from_fn(|j| ternary_digit(block, i * 32 + j))),
        Dtype::TQ2_0 => ternary(block, 64, bits(block, i / 4 * 32, i % 4 * 2, 3)),
        Dtype::Grouped(grouped) => simple(
            match grouped.digits {
                DigitBits::Four => nibbles(block, grouped.head_bytes() + 16 * i),
                DigitBits::Eight => fixed(block, grouped.head_bytes() + 32 * i),
            },
            &[],
        ),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E4M3 => {
            unreachable!("numbers, not digits")
        }
    }
}

#[inline(always)]
fn simple(q: [u8; 32], columns: &[[u8; 2]]) -> SubBlock {
    let mut scales = [[0; 2]; COLUMNS_MAX];
    scales[..columns.len()].copy_from_slice(columns);
    SubBlock { q, head: [[0; 2]; COLUMNS_MAX], scales }
}

#[inline(always)]
pub(super) fn fixed<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}

#[inline(always)]
pub(super) fn two_bytes_at(block: &[u8], at: usize) -> [u8; 2] {
    fixed(block, at)
}

/// An f16 with its sign flipped: minima in blocks of 256 are subtracted.
#[inline(always)]
fn negate_f16(half: [u8; 2]) -> [u8; 2] {
    [half[0], half[1] ^ SIGN]
}

/// Half of 2^(e - 127), as a bf16: exact, subnormal where e is below 2.
fn half_power(e: u8) -> [u8; 2] {
    let bits = if e < 2 { 0x20 << e } else { u16::from(e - 1) << 7 };
    bits.to_le_bytes()
}

#[inline(always)]
fn nibbles(block: &[u8], start: usize) -> [u8; 32] {
    let bytes: [u8; 16] = fixed(block, start);
    let mut q = [0; 32];
    for i in 0..16 {
        q[i] = bytes[i] & 15;
        q[i + 16] = bytes[i] >> 4;
    }
    q
}

/// 32 fifth bits, then nibbles.
#[inline(always)]
fn fives(block: &[u8], start: usize) -> [u8; 32] {
    let high = u32::from_le_bytes(fixed(block, start));
    let mut q = nibbles(block, start + 4);
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((high >> i & 1) << 4) as u8;
    }
    q
}

/// Bytes `start..start + 32`, shifted and masked.
#[inline(always)]
fn bits(block: &[u8], start: usize, shift: usize, mask: u8) -> [u8; 32] {
    fixed::<32>(block, start).map(|byte| byte >> shift & mask)
}

#[inline(always)]
fn join(low: [u8; 32], high: [u8; 32], shift: u8) -> [u8; 32] {
    let mut q = low;
    for (q, high) in q.iter_mut().zip(high) {
        *q |= high << shift;
    }
    q
}

/// 16 scales and minima · 64 bytes of two bits · d · m
fn q2_k(block: &[u8], i: usize) -> SubBlock {
    SubBlock {
        q: bits(block, 16 + i / 4 * 32, i % 4 * 2, 3),
        head: [two_bytes_at(block, 80), negate_f16(two_bytes_at(block, 82))],
        scales: [two_bytes_at(block, 2 * i), [0; 2]],
    }
}

/// 32 bytes of third bits · 64 bytes of two bits · 12 bytes of scales · d
fn q3_k(block: &[u8], i: usize) -> SubBlock {
    // Scales are six bits with 32 added: four of them in the first eight bytes, two in the last four.
    let scale = |i: usize| {
        let low = block[96 + i % 8] >> (i / 8 * 4) & 15;
        let high = block[104 + i % 4] >> (i / 4 * 2) & 3;
        (low | high << 4) + (SIGN - 32)
    };
    SubBlock {
        q: join(bits(block, 32 + i / 4 * 32, i % 4 * 2, 3), bits(block, 0, i, 1), 2),
        head: [two_bytes_at(block, 108), [0; 2]],
        scales: [[scale(2 * i), scale(2 * i + 1)], [0; 2]],
    }
}

/// d · m · 12 bytes of scales and minima · 128 bytes of nibbles
fn q4_k(block: &[u8], i: usize) -> SubBlock {
    SubBlock {
        q: bits(block, 16 + i / 2 * 32, i % 2 * 4, 15),
        head: [two_bytes_at(block, 0), negate_f16(two_bytes_at(block, 2))],
        scales: [six_bits(block, i), [0; 2]],
    }
}

/// d · m · 12 bytes of scales and minima · 32 bytes of fifth bits · 128 bytes of nibbles
fn q5_k(block: &[u8], i: usize) -> SubBlock {
    SubBlock {
        q: join(bits(block, 48 + i / 2 * 32, i % 2 * 4, 15), bits(block, 16, i, 1), 4),
        head: [two_bytes_at(block, 0), negate_f16(two_bytes_at(block, 2))],
        scales: [six_bits(block, i), [0; 2]],
    }
}

/// Returns the scale and minimum of a sub-block. The upper bits of the last four are stored above those of the first
/// four.
#[inline(always)]
fn six_bits(block: &[u8], i: usize) -> [u8; 2] {
    let byte = |i: usize| block[4 + i];
    if i < 4 {
        return [byte(i) & 63, byte(i + 4) & 63];
    }
    let low = byte(i + 4);
    [low & 15 | byte(i - 4) >> 6 << 4, low >> 4 | byte(i) >> 6 << 4]
}

/// 128 bytes of nibbles · 64 bytes of two bits · 16 × i8 scale · d
fn q6_k(block: &[u8], i: usize) -> SubBlock {
    let low = bits(block, i / 4 * 64 + i % 2 * 32, i % 4 / 2 * 4, 15);
    let high = bits(block, 128 + i / 4 * 32, i % 4 * 2, 3);
    SubBlock {
        q: join(low, high, 4),
        head: [two_bytes_at(block, 208), [0; 2]],
        scales: [[block[192 + 2 * i] ^ SIGN, block[193 + 2 * i] ^ SIGN], [0; 2]],
    }
}

/// d · two upper bits of 8 scales · four lower bits · 128 bytes of names
fn iq4_xs(block: &[u8], i: usize) -> SubBlock {
    let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
    let high = (u16::from_le_bytes(two_bytes_at(block, 2)) >> (2 * i) & 3) as u8;
    // Six bits with 32 added, the same for both halves.
    let scale = (low | high << 4) + (SIGN - 32);
    SubBlock { q: nibbles(block, 8 + 16 * i), head: [two_bytes_at(block, 0), [0; 2]], scales: [[scale; 2], [0; 2]] }
}

fn ternary(block: &[u8], d: usize, q: [u8; 32]) -> SubBlock {
    SubBlock { q, head: [two_bytes_at(block, d), [0; 2]], ..SubBlock::default() }
}

/// Returns digit `i` of 256. A byte has five digits, and each of the last four bytes has four. A byte is a fraction of
/// 256, and the requested digit is its first one in base three.
///
/// ```text
/// bytes 0..32     digits 0..160, number n of each after n × 32      32..48   160..240, after n × 16
/// bytes 48..52    digits 240..256, after n × 4
/// ```
fn ternary_digit(block: &[u8], i: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (byte, n) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
        _ => (48 + (i - 240) % 4, (i - 240) / 4),
    };
    let fraction = block[byte].wrapping_mul(POWERS[n]);
    ((u16::from(fraction) * 3) >> 8) as u8
}

/// Returns the bytes of a group's scale, and the number that its zero adds to digits whose middle was subtracted. That
/// number is exact in an f16, as every zero is a whole number of at most 256.
pub(crate) fn group_header(grouped: GroupedDtype, block: &[u8]) -> (&[u8], f16) {
    let (scale, rest) = block.split_at(grouped.scale.bytes());
    let middle = f32::from(grouped.digits.middle());
    let zero = if grouped.has_zeros { f16::from_le_bytes(two_bytes_at(rest, 0)).to_f32() } else { middle };
    (scale, f16::from_f32(middle - zero))
}

/// Returns the scale of a group, and the digit that represents zero.
pub(crate) fn group_scale(grouped: GroupedDtype, block: &[u8]) -> (f32, f32) {
    let (scale, shift) = group_header(grouped, block);
    let scale = match grouped.scale {
        ScaleType::F16 => f16::from_le_bytes(two_bytes_at(scale, 0)).to_f32(),
        ScaleType::BF16 => bf16::from_le_bytes(two_bytes_at(scale, 0)).to_f32(),
        ScaleType::F32 => f32::from_le_bytes(fixed(scale, 0)),
    };
    (scale, f32::from(grouped.digits.middle()) - shift.to_f32())
}
