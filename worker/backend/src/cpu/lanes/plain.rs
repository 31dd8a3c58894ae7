//! Lanes without intrinsics: the reference that the others are tested against.

use super::{E4M3, LANES, Lanes, Real};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct PlainFloat([f32; LANES]);

#[inline(always)]
fn map(a: PlainFloat, f: impl Fn(f32) -> f32) -> PlainFloat {
    PlainFloat(std::array::from_fn(|i| f(a.0[i])))
}

#[inline(always)]
fn zip(a: PlainFloat, b: PlainFloat, f: impl Fn(f32, f32) -> f32) -> PlainFloat {
    PlainFloat(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

impl Real for PlainFloat {
    #[inline(always)]
    fn splat(value: f32) -> PlainFloat {
        PlainFloat([value; LANES])
    }
    #[inline(always)]
    fn add(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, factor: PlainFloat, addend: PlainFloat) -> PlainFloat {
        PlainFloat(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    fn max(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, Real::max)
    }
    #[inline(always)]
    fn min(self, other: PlainFloat) -> PlainFloat {
        zip(self, other, Real::min)
    }
    #[inline(always)]
    fn round(self) -> PlainFloat {
        map(self, Real::round)
    }
    #[inline(always)]
    fn pow2(self) -> PlainFloat {
        map(self, Real::pow2)
    }
    #[inline(always)]
    fn exponent(self) -> PlainFloat {
        map(self, Real::exponent)
    }
    #[inline(always)]
    fn mantissa(self) -> PlainFloat {
        map(self, Real::mantissa)
    }
    #[inline(always)]
    fn if_less(self, limit: PlainFloat, below: PlainFloat, other: PlainFloat) -> PlainFloat {
        PlainFloat(std::array::from_fn(|i| self.0[i].if_less(limit.0[i], below.0[i], other.0[i])))
    }
    #[inline(always)]
    fn abs(self) -> PlainFloat {
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

impl Lanes for PlainFloat {
    type Int = PlainInt;
    const SUMS: usize = 2;

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> PlainFloat {
        PlainFloat(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn from_f16(from: &[u16; LANES]) -> PlainFloat {
        PlainFloat(from.map(|bits| f16::from_bits(bits).to_f32_const()))
    }
    #[inline(always)]
    fn to_f16(self) -> [u16; LANES] {
        self.0.map(|value| f16::from_f32_const(value).to_bits())
    }
    #[inline(always)]
    fn from_bf16(from: &[u16; LANES]) -> PlainFloat {
        PlainFloat(from.map(|bits| bf16::from_bits(bits).to_f32_const()))
    }
    #[inline(always)]
    fn from_e4m3(from: &[u8; LANES]) -> PlainFloat {
        let wide = |bits: u8| f32::from_bits(u32::from(bits & 0x80) << 24 | u32::from(bits & 0x7f) << 20);
        PlainFloat(from.map(|bits| wide(bits) * E4M3))
    }
    #[inline(always)]
    fn keep_first(self, n: usize, fill: f32) -> PlainFloat {
        PlainFloat(std::array::from_fn(|i| if i < n { self.0[i] } else { fill }))
    }

    #[inline(always)]
    fn bytes(from: &[u8; 64]) -> PlainInt {
        PlainInt(std::array::from_fn(|i| {
            i32::from_le_bytes([from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]])
        }))
    }
    #[inline(always)]
    fn bytes_minus(bytes: PlainInt, offset: u8, to: &mut [u8; 64]) {
        for (word, to) in bytes.0.iter().zip(to.as_chunks_mut().0) {
            *to = word.to_le_bytes().map(|byte| byte.wrapping_sub(offset));
        }
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
    fn bits(from: PlainInt, shift: u32, mask: u8) -> PlainInt {
        let mask = i32::from_ne_bytes([mask; 4]);
        from.map(|word| word >> shift & mask)
    }
    #[inline(always)]
    fn join(low: PlainInt, high: PlainInt, shift: u32) -> PlainInt {
        PlainInt(std::array::from_fn(|i| low.0[i] | high.0[i] << shift))
    }
    #[inline(always)]
    fn look_up(digits: &[u8; 16], names: PlainInt) -> PlainInt {
        names.map(|word| i32::from_le_bytes(word.to_le_bytes().map(|name| digits[usize::from(name & 15)])))
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
    fn byte_floats(bytes: PlainInt) -> [PlainFloat; 4] {
        std::array::from_fn(|j| PlainFloat(bytes.0.map(|word| f32::from(word.to_le_bytes()[j]))))
    }
    #[inline(always)]
    fn byte_pairs(from: &[u16; LANES]) -> (PlainFloat, PlainFloat) {
        (PlainFloat(from.map(|word| f32::from(word as u8))), PlainFloat(from.map(|word| f32::from((word >> 8) as u8))))
    }
    #[inline(always)]
    fn pair_floats(pairs: PlainInt) -> [PlainFloat; 2] {
        let floats = |pairs: PlainInt| PlainFloat(pairs.0.map(|bits| f32::from_bits(bits as u32)));
        [floats(pairs.map(|pair| pair << 16)), floats(pairs.map(|pair| pair & !0xffff))]
    }
    #[inline(always)]
    fn int_to_float(int: PlainInt) -> PlainFloat {
        PlainFloat(int.0.map(|value| value as f32))
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
