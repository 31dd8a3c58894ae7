//! Sixteen lanes in two registers.
//!
//! SAFETY, for every block of this file: the instructions are there, because `isa::dispatch` names this type only when
//! `Isa::is_supported` found them; loads and stores are unaligned and inside the arrays that they are given.
#![allow(clippy::undocumented_unsafe_blocks, reason = "the comment above covers all blocks")]

use super::{E4M3, LANES, Lanes, Real};
use std::arch::x86_64::*;

/// Lanes 0 to 7, and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

#[derive(Clone, Copy)]
pub(crate) struct Avx2Int(__m256i, __m256i);

/// Widens each word's lowest eight bits.
#[inline(always)]
unsafe fn e4m3(words: __m256i) -> __m256 {
    unsafe {
        let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(words, _mm256_set1_epi32(0x80)));
        let size = _mm256_slli_epi32::<20>(_mm256_and_si256(words, _mm256_set1_epi32(0x7f)));
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(sign, size)), _mm256_set1_ps(E4M3))
    }
}

impl Real for Avx2 {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        let half = unsafe { _mm256_set1_ps(value) };
        Avx2(half, half)
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        unsafe { Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0), _mm256_fmadd_ps(self.1, factor.1, addend.1)) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        unsafe { Avx2(_mm256_min_ps(self.0, other.0), _mm256_min_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        unsafe { Avx2(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1)) }
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(self.0), bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(self.1), bias));
            Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    fn exponent(self) -> Self {
        unsafe {
            let mask = _mm256_set1_epi32(0xff);
            let low = _mm256_and_si256(_mm256_srli_epi32::<23>(_mm256_castps_si256(self.0)), mask);
            let high = _mm256_and_si256(_mm256_srli_epi32::<23>(_mm256_castps_si256(self.1)), mask);
            Avx2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    fn mantissa(self) -> Self {
        unsafe {
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x007f_ffff));
            let half = _mm256_castsi256_ps(_mm256_set1_epi32(0x3f00_0000));
            let low = _mm256_or_ps(_mm256_and_ps(self.0, mask), half);
            Avx2(low, _mm256_or_ps(_mm256_and_ps(self.1, mask), half))
        }
    }
    #[inline(always)]
    fn if_less(self, limit: Self, below: Self, other: Self) -> Self {
        unsafe {
            let (low, high) =
                (_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, limit.0), _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, limit.1));
            Avx2(_mm256_blendv_ps(other.0, below.0, low), _mm256_blendv_ps(other.1, below.1, high))
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Avx2(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
        }
    }
}

impl Lanes for Avx2 {
    type Int = Avx2Int;

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        unsafe { Avx2(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn from_f16(from: &[u16; LANES]) -> Self {
        unsafe {
            let from: *const __m128i = from.as_ptr().cast();
            Avx2(_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))))
        }
    }
    #[inline(always)]
    fn to_f16(self) -> [u16; LANES] {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        let mut halves = [0; LANES];
        unsafe {
            let to: *mut __m128i = halves.as_mut_ptr().cast();
            _mm_storeu_si128(to, _mm256_cvtps_ph::<NEAREST>(self.0));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<NEAREST>(self.1));
        }
        halves
    }
    #[inline(always)]
    fn from_bf16(from: &[u16; LANES]) -> Self {
        unsafe {
            let from: *const __m128i = from.as_ptr().cast();
            let low = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)));
            let high = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1))));
            Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    fn from_e4m3(from: &[u8; LANES]) -> Self {
        unsafe {
            let from = _mm_loadu_si128(from.as_ptr().cast());
            let (low, high) = (_mm256_cvtepu8_epi32(from), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(from)));
            Avx2(e4m3(low), e4m3(high))
        }
    }
    #[inline(always)]
    fn keep_first(self, n: usize, fill: f32) -> Self {
        unsafe {
            let n = _mm256_set1_epi32(n.min(LANES) as i32);
            let low = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let high = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
            let fill = _mm256_set1_ps(fill);
            Avx2(
                _mm256_blendv_ps(fill, self.0, _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(fill, self.1, _mm256_castsi256_ps(high)),
            )
        }
    }

    #[inline(always)]
    fn bytes(from: &[u8; 64]) -> Avx2Int {
        unsafe {
            let from: *const __m256i = from.as_ptr().cast();
            Avx2Int(_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)))
        }
    }
    #[inline(always)]
    fn bytes_minus(bytes: Avx2Int, offset: u8, to: &mut [u8; 64]) {
        unsafe {
            let (to, offset) = (to.as_mut_ptr().cast::<__m256i>(), _mm256_set1_epi8(offset as i8));
            _mm256_storeu_si256(to, _mm256_sub_epi8(bytes.0, offset));
            _mm256_storeu_si256(to.add(1), _mm256_sub_epi8(bytes.1, offset));
        }
    }
    #[inline(always)]
    fn int_splat(value: i32) -> Avx2Int {
        let half = unsafe { _mm256_set1_epi32(value) };
        Avx2Int(half, half)
    }
    #[inline(always)]
    fn int_add(a: Avx2Int, b: Avx2Int) -> Avx2Int {
        unsafe { Avx2Int(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    fn low_nibbles(bytes: Avx2Int) -> Avx2Int {
        unsafe {
            let mask = _mm256_set1_epi8(15);
            Avx2Int(_mm256_and_si256(bytes.0, mask), _mm256_and_si256(bytes.1, mask))
        }
    }
    #[inline(always)]
    fn high_nibbles(bytes: Avx2Int) -> Avx2Int {
        unsafe { Self::low_nibbles(Avx2Int(_mm256_srli_epi16::<4>(bytes.0), _mm256_srli_epi16::<4>(bytes.1))) }
    }
    #[inline(always)]
    fn bits(from: Avx2Int, shift: u32, mask: u8) -> Avx2Int {
        unsafe {
            let (shift, mask) = (_mm_cvtsi32_si128(shift as i32), _mm256_set1_epi8(mask as i8));
            let (low, high) = (_mm256_srl_epi32(from.0, shift), _mm256_srl_epi32(from.1, shift));
            Avx2Int(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask))
        }
    }
    #[inline(always)]
    fn join(low: Avx2Int, high: Avx2Int, shift: u32) -> Avx2Int {
        unsafe {
            let shift = _mm_cvtsi32_si128(shift as i32);
            let (first, second) = (_mm256_sll_epi32(high.0, shift), _mm256_sll_epi32(high.1, shift));
            Avx2Int(_mm256_or_si256(low.0, first), _mm256_or_si256(low.1, second))
        }
    }
    #[inline(always)]
    fn look_up(digits: &[u8; 16], names: Avx2Int) -> Avx2Int {
        unsafe {
            let digits = _mm256_broadcastsi128_si256(_mm_loadu_si128(digits.as_ptr().cast()));
            Avx2Int(_mm256_shuffle_epi8(digits, names.0), _mm256_shuffle_epi8(digits, names.1))
        }
    }
    #[inline(always)]
    fn dot_small(acc: Avx2Int, w: Avx2Int, a: i32) -> Avx2Int {
        // 2 * 127 * 127 fits 16 bits: nothing saturates.
        unsafe {
            let (a, ones) = (_mm256_set1_epi32(a), _mm256_set1_epi16(1));
            let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w.0, a), ones);
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w.1, a), ones);
            Self::int_add(acc, Avx2Int(low, high))
        }
    }
    #[inline(always)]
    fn small_start(_acc: Avx2Int) -> Avx2Int {
        Self::int_splat(0)
    }
    #[inline(always)]
    fn add_small(sum: Avx2Int, w: Avx2Int, a: i32) -> Avx2Int {
        // Two products of a digit and at most 127, as often as `words_per_sum` of the digits allows.
        unsafe {
            let a = _mm256_set1_epi32(a);
            let (low, high) = (_mm256_maddubs_epi16(w.0, a), _mm256_maddubs_epi16(w.1, a));
            Avx2Int(_mm256_add_epi16(sum.0, low), _mm256_add_epi16(sum.1, high))
        }
    }
    #[inline(always)]
    fn small_end(acc: Avx2Int, sum: Avx2Int) -> Avx2Int {
        unsafe {
            let ones = _mm256_set1_epi16(1);
            Self::int_add(acc, Avx2Int(_mm256_madd_epi16(sum.0, ones), _mm256_madd_epi16(sum.1, ones)))
        }
    }
    #[inline(always)]
    fn offset_start(_sum_a: i32) -> Avx2Int {
        Self::int_splat(0)
    }
    #[inline(always)]
    fn dot_offset(acc: Avx2Int, w: Avx2Int, a: i32) -> Avx2Int {
        // The sign of w - 128 moves to a, which is never -128: 2 * 128 * 127 fits 16 bits, and nothing saturates.
        unsafe {
            let (a, ones, offset) = (_mm256_set1_epi32(a), _mm256_set1_epi16(1), _mm256_set1_epi8(-128));
            let (w_low, w_high) = (_mm256_xor_si256(w.0, offset), _mm256_xor_si256(w.1, offset));
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(w_low), _mm256_sign_epi8(a, w_low));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(w_high), _mm256_sign_epi8(a, w_high));
            Self::int_add(acc, Avx2Int(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones)))
        }
    }
    #[inline(always)]
    fn byte_floats(bytes: Avx2Int) -> [Self; 4] {
        unsafe {
            let mask = _mm256_set1_epi32(0xff);
            let float = |low, high| {
                let (low, high) = (_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
                Avx2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
            };
            [
                float(bytes.0, bytes.1),
                float(_mm256_srli_epi32::<8>(bytes.0), _mm256_srli_epi32::<8>(bytes.1)),
                float(_mm256_srli_epi32::<16>(bytes.0), _mm256_srli_epi32::<16>(bytes.1)),
                float(_mm256_srli_epi32::<24>(bytes.0), _mm256_srli_epi32::<24>(bytes.1)),
            ]
        }
    }
    #[inline(always)]
    fn byte_pairs(from: &[u16; LANES]) -> (Self, Self) {
        unsafe {
            let from: *const __m128i = from.as_ptr().cast();
            let first = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
            let second = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1)));
            let mask = _mm256_set1_epi32(0xff);
            let low = Avx2Int(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
            let high = Avx2Int(_mm256_srli_epi32::<8>(first), _mm256_srli_epi32::<8>(second));
            (Self::int_to_float(low), Self::int_to_float(high))
        }
    }
    #[inline(always)]
    fn pair_floats(pairs: Avx2Int) -> [Self; 2] {
        unsafe {
            let mask = _mm256_set1_epi32(!0xffff);
            let (low, high) = (_mm256_slli_epi32::<16>(pairs.0), _mm256_slli_epi32::<16>(pairs.1));
            let even = Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
            let (low, high) = (_mm256_and_si256(pairs.0, mask), _mm256_and_si256(pairs.1, mask));
            [even, Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))]
        }
    }
    #[inline(always)]
    fn int_to_float(int: Avx2Int) -> Self {
        unsafe { Avx2(_mm256_cvtepi32_ps(int.0), _mm256_cvtepi32_ps(int.1)) }
    }
    #[inline(always)]
    fn to_bytes(self) -> [u8; LANES] {
        let mut to = [0; LANES];
        unsafe {
            // What is no number is a word whose lowest byte is zero, so words are cut and not clamped.
            let mask = _mm256_set1_epi32(0xff);
            let low = _mm256_and_si256(_mm256_cvtps_epi32(self.0), mask);
            let high = _mm256_and_si256(_mm256_cvtps_epi32(self.1), mask);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
        to
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let all = self.max(Self::splat(f32::NEG_INFINITY));
            let eight = _mm256_max_ps(all.0, all.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn prefetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
