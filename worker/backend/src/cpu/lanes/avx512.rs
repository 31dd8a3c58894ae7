//! Sixteen lanes in one register, with or without the instruction for pairs of bf16.
//!
//! SAFETY, for every block of this file: the instructions are there, because `isa::dispatch` names this type only when
//! `Isa::is_supported` found them; loads and stores are unaligned and inside the arrays that they are given.
#![allow(clippy::undocumented_unsafe_blocks, reason = "the comment above covers all blocks")]

use super::{E4M3, LANES, Lanes, Real, add_in_turn};
use std::arch::x86_64::*;
use std::mem::transmute;

#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(__m512);

impl<const BF16: bool> Real for Avx512<BF16> {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Avx512(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Avx512(unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn times_pow2(self, n: Self) -> Self {
        Avx512(unsafe { _mm512_scalef_ps(self.0, n.0) })
    }
    #[inline(always)]
    fn exponent(self) -> Self {
        unsafe {
            let bits = _mm512_srli_epi32::<23>(_mm512_castps_si512(self.0));
            Avx512(_mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xff))))
        }
    }
    #[inline(always)]
    fn mantissa(self) -> Self {
        unsafe {
            let bits = _mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(0x007f_ffff));
            Avx512(_mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_set1_epi32(0x3f00_0000))))
        }
    }
    #[inline(always)]
    fn if_less(self, limit: Self, below: Self, other: Self) -> Self {
        unsafe {
            let is_less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0);
            Avx512(_mm512_mask_blend_ps(is_less, other.0, below.0))
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Avx512(unsafe { _mm512_abs_ps(self.0) })
    }
}

impl<const BF16: bool> Lanes for Avx512<BF16> {
    type Int = __m512i;
    const PAIR_WORDS: usize = if BF16 { 1 } else { 2 };
    const SUMS: usize = 16;

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Avx512(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn from_f16(from: &[u16; LANES]) -> Self {
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) })
    }
    #[inline(always)]
    fn to_f16(self) -> [u16; LANES] {
        let mut to = [0; LANES];
        unsafe {
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
        to
    }
    #[inline(always)]
    fn from_bf16(from: &[u16; LANES]) -> Self {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    fn from_e4m3(from: &[u8; LANES]) -> Self {
        unsafe {
            let words = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(words, _mm512_set1_epi32(0x80)));
            let size = _mm512_slli_epi32::<20>(_mm512_and_si512(words, _mm512_set1_epi32(0x7f)));
            Avx512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(sign, size)), _mm512_set1_ps(E4M3)))
        }
    }
    #[inline(always)]
    fn keep_first(self, n: usize, fill: f32) -> Self {
        let mask = ((1u32 << n.min(LANES)) - 1) as u16;
        Avx512(unsafe { _mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), self.0) })
    }

    #[inline(always)]
    fn bytes(from: &[u8; 64]) -> __m512i {
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn bytes_minus(bytes: __m512i, offset: u8, to: &mut [u8; 64]) {
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_sub_epi8(bytes, _mm512_set1_epi8(offset as i8))) }
    }
    #[inline(always)]
    fn int_splat(value: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    fn int_add(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn low_nibbles(bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn high_nibbles(bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn bits(from: __m512i, shift: u32, mask: u8) -> __m512i {
        unsafe {
            let bits = _mm512_srl_epi32(from, _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(bits, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn join(low: __m512i, high: __m512i, shift: u32) -> __m512i {
        unsafe { _mm512_or_si512(low, _mm512_sll_epi32(high, _mm_cvtsi32_si128(shift as i32))) }
    }
    #[inline(always)]
    fn look_up(digits: &[u8; 16], names: __m512i) -> __m512i {
        unsafe {
            let digits = _mm512_broadcast_i32x4(_mm_loadu_si128(digits.as_ptr().cast()));
            _mm512_shuffle_epi8(digits, names)
        }
    }
    #[inline(always)]
    fn dot_small(acc: __m512i, w: __m512i, a: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)) }
    }
    #[inline(always)]
    fn offset_start(sum_a: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(sum_a.wrapping_mul(-128)) }
    }
    #[inline(always)]
    fn dot_offset(acc: __m512i, w: __m512i, a: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)) }
    }
    #[inline(always)]
    fn byte_floats(bytes: __m512i) -> [Self; 4] {
        unsafe {
            let low = _mm512_set1_epi32(0xff);
            [
                Avx512(_mm512_cvtepi32_ps(_mm512_and_si512(bytes, low))),
                Avx512(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<8>(bytes), low))),
                Avx512(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<16>(bytes), low))),
                Avx512(_mm512_cvtepi32_ps(_mm512_srli_epi32::<24>(bytes))),
            ]
        }
    }
    #[inline(always)]
    fn byte_pairs(from: &[u16; LANES]) -> (Self, Self) {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            let (low, high) = (_mm512_and_si512(words, _mm512_set1_epi32(0xff)), _mm512_srli_epi32::<8>(words));
            (Avx512(_mm512_cvtepi32_ps(low)), Avx512(_mm512_cvtepi32_ps(high)))
        }
    }
    #[inline(always)]
    fn pair_floats(pairs: __m512i) -> [Self; 2] {
        unsafe {
            let (even, odd) = (_mm512_slli_epi32::<16>(pairs), _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff)));
            [Avx512(_mm512_castsi512_ps(even)), Avx512(_mm512_castsi512_ps(odd))]
        }
    }
    #[inline(always)]
    unsafe fn add_pairs<const M: usize>(w: __m512i, x: *const u32, width: usize, acc: &mut [Self; M]) {
        unsafe {
            if !BF16 {
                return add_in_turn(w, x, width, acc);
            }
            let w: __m512bh = transmute(w);
            for (m, acc) in acc.iter_mut().enumerate() {
                let x: __m512bh = transmute(_mm512_set1_epi32(*x.add(m) as i32));
                acc.0 = _mm512_dpbf16_ps(acc.0, w, x);
            }
        }
    }
    #[inline(always)]
    fn int_to_float(int: __m512i) -> Self {
        Avx512(unsafe { _mm512_cvtepi32_ps(int) })
    }
    #[inline(always)]
    fn to_bytes(self) -> [u8; LANES] {
        let mut to = [0; LANES];
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
        to
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.max(Self::splat(f32::NEG_INFINITY)).0) }
    }
    #[inline(always)]
    fn prefetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
