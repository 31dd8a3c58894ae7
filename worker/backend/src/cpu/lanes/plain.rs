//! Lanes without intrinsics: the reference that the others are tested against.

use super::{E4M3, LANES, Lanes, Real};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

#[inline(always)]
fn map(a: Plain, f: impl Fn(f32) -> f32) -> Plain {
    Plain(std::array::from_fn(|i| f(a.0[i])))
}

#[inline(always)]
fn zip(a: Plain, b: Plain, f: impl Fn(f32, f32) -> f32) -> Plain {
    Plain(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

impl Real for Plain {
    #[inline(always)]
    fn splat(value: f32) -> Plain {
        Plain([value; LANES])
    }
    #[inline(always)]
    fn add(self, other: Plain) -> Plain {
        zip(self, other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Plain) -> Plain {
        zip(self, other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Plain) -> Plain {
        zip(self, other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Plain) -> Plain {
        zip(self, other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, factor: Plain, addend: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    fn max(self, other: Plain) -> Plain {
        zip(self, other, Real::max)
    }
    #[inline(always)]
    fn min(self, other: Plain) -> Plain {
        zip(self, other, Real::min)
    }
    #[inline(always)]
    fn round(self) -> Plain {
        map(self, Real::round)
    }
    #[inline(always)]
    fn pow2(self) -> Plain {
        map(self, Real::pow2)
    }
    #[inline(always)]
    fn exponent(self) -> Plain {
        map(self, Real::exponent)
    }
    #[inline(always)]
    fn mantissa(self) -> Plain {
        map(self, Real::mantissa)
    }
    #[inline(always)]
    fn if_less(self, limit: Plain, below: Plain, other: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i].if_less(limit.0[i], below.0[i], other.0[i])))
    }
    #[inline(always)]
    fn abs(self) -> Plain {
        map(self, f32::abs)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct PlainInt([i32; LANES]);

impl PlainInt {
    #[inline(always)]
    fn map(self, f: impl Fn(i32) -> i32) -> PlainInt {
        PlainInt(self.0.map(f))
    }
}

impl Lanes for Plain {
    type Int = PlainInt;

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Plain {
        Plain(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn from_f16(from: &[u16; LANES]) -> Plain {
        Plain(from.map(|bits| f16::from_bits(bits).to_f32_const()))
    }
    #[inline(always)]
    fn to_f16(self) -> [u16; LANES] {
        self.0.map(|value| f16::from_f32_const(value).to_bits())
    }
    #[inline(always)]
    fn from_bf16(from: &[u16; LANES]) -> Plain {
        Plain(from.map(|bits| bf16::from_bits(bits).to_f32_const()))
    }
    #[inline(always)]
    fn from_e4m3(from: &[u8; LANES]) -> Plain {
        let wide = |bits: u8| f32::from_bits(u32::from(bits & 0x80) << 24 | u32::from(bits & 0x7f) << 20);
        Plain(from.map(|bits| wide(bits) * E4M3))
    }
    #[inline(always)]
    fn keep_first(self, n: usize, fill: f32) -> Plain {
        Plain(std::array::from_fn(|i| if i < n { self.0[i] } else { fill }))
    }

    #[inline(always)]
    fn bytes(from: &[u8; 64]) -> PlainInt {
        PlainInt(std::array::from_fn(|i| {
            i32::from_le_bytes([from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]])
        }))
    }
    #[inline(always)]
    fn int_splat(value: i32) -> PlainInt {
        PlainInt([value; LANES])
    }
    #[inline(always)]
    fn int_add(a: PlainInt, b: PlainInt) -> PlainInt {
        PlainInt(std::array::from_fn(|i| a.0[i].wrapping_add(b.0[i])))
    }
    #[inline(always)]
    fn low_nibbles(bytes: PlainInt) -> PlainInt {
        bytes.map(|word| word & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn high_nibbles(bytes: PlainInt) -> PlainInt {
        bytes.map(|word| (word >> 4) & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn with_bits(low: PlainInt, from: PlainInt, shift: u32, mask: u8) -> PlainInt {
        let mask = i32::from_ne_bytes([mask; 4]);
        PlainInt(std::array::from_fn(|i| low.0[i] | ((from.0[i] >> shift) & mask) << 4))
    }
    #[inline(always)]
    fn dot_small(acc: PlainInt, w: PlainInt, a: i32) -> PlainInt {
        PlainInt(std::array::from_fn(|i| acc.0[i] + dot(w.0[i], a, 0)))
    }
    #[inline(always)]
    fn offset_start(_sum_a: i32) -> PlainInt {
        PlainInt([0; LANES])
    }
    #[inline(always)]
    fn dot_offset(acc: PlainInt, w: PlainInt, a: i32) -> PlainInt {
        PlainInt(std::array::from_fn(|i| acc.0[i] + dot(w.0[i], a, 128)))
    }
    #[inline(always)]
    fn byte_floats(bytes: PlainInt) -> [Plain; 4] {
        std::array::from_fn(|j| Plain(bytes.0.map(|word| f32::from(word.to_le_bytes()[j]))))
    }
    #[inline(always)]
    fn byte_pairs(from: &[u16; LANES]) -> (Plain, Plain) {
        (Plain(from.map(|word| f32::from(word as u8))), Plain(from.map(|word| f32::from((word >> 8) as u8))))
    }
    #[inline(always)]
    fn pair_floats(pairs: PlainInt) -> [Plain; 2] {
        let floats = |pairs: PlainInt| Plain(pairs.0.map(|bits| f32::from_bits(bits as u32)));
        [floats(pairs.map(|pair| pair << 16)), floats(pairs.map(|pair| pair & !0xffff))]
    }
    #[inline(always)]
    fn int_to_float(int: PlainInt) -> Plain {
        Plain(int.0.map(|value| value as f32))
    }
    #[inline(always)]
    fn to_bytes(self) -> [u8; LANES] {
        self.0.map(|x| x as i32 as u8)
    }
    #[inline(always)]
    fn prefetch(_address: *const u8) {}
}

#[inline(always)]
fn dot(w: i32, a: i32, offset: i32) -> i32 {
    let (w, a) = (w.to_le_bytes(), a.to_le_bytes());
    (0..4).map(|j| (i32::from(w[j]) - offset) * i32::from(a[j] as i8)).sum()
}
