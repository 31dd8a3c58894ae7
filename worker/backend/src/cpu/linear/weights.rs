//! How the kernels read each type of weight along K, and multiply it by the rows of a panel.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use crate::cpu::digits::DigitPacking;
use crate::cpu::lanes::{LANES, Lanes, add_products};
use crate::cpu::panels::{BLOCK, Operand, PANEL_ROWS};
use crate::cpu::quants::{COLUMN_BYTES, Packing, Quant, ScaleLayout, SharedScales, StepScale, ref_at, unpack};
use std::marker::PhantomData;
use std::ops::Range;

/// How the kernels read one type of weight along K.
pub(super) trait WeightKernel {
    const PACKING: Packing;
    /// What they meet.
    const OPERAND: Operand;
    /// How many rows are computed at a time where registers hold few sums.
    const ROWS_MAX: usize = 6;

    /// acc += the product over one step.
    ///
    /// # Safety
    /// `w` is at a step of a tile, `a` at its words of the first of M rows in a panel of `width` rows.
    unsafe fn step<L: Lanes, const M: usize>(
        head: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    );
}

/// Prefetch distance for weights, in bytes: a few blocks. The hardware prefetcher does not cross a page of 4 KB.
const AHEAD: usize = 2304;

pub(super) struct F32Weights;
pub(super) struct F16Weights;
pub(super) struct F8Weights;
/// Pairs of bf16 times pairs of bf16.
pub(super) struct Bf16Pairs;
/// A quantized weight, or pairs of bf16, times f32 activations.
pub(super) struct FloatActivations<Q>(PhantomData<Q>);
/// A quantized weight times int8 activations.
pub(super) struct Int8Activations<Q>(PhantomData<Q>);

impl WeightKernel for F32Weights {
    const PACKING: Packing = Packing::F32;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        _: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        _: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise; tiles of f32 begin on 64 bytes.
        unsafe { add_products(L::load(ref_at(w)), a, acc) }
    }
}

impl WeightKernel for F16Weights {
    const PACKING: Packing = Packing::F16;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        _: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        _: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise; tiles begin on 32 bytes.
        unsafe { add_products(L::from_f16(ref_at(w)), a, acc) }
    }
}

impl WeightKernel for Bf16Pairs {
    const PACKING: Packing = Packing::BF16;
    const OPERAND: Operand = Operand::Bf16;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        _: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise: sixteen pairs, and one of each row.
        unsafe { L::add_pairs(L::bytes(ref_at(w)), a, width, acc) }
    }
}

impl WeightKernel for FloatActivations<Bf16Pairs> {
    const PACKING: Packing = Packing::BF16;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        _: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise: sixteen pairs, and two words of M rows.
        unsafe {
            let [even, odd] = L::pair_floats(L::bytes(ref_at(w)));
            add_products(even, a, acc);
            add_products(odd, a.add(width), acc);
        }
    }
}

impl WeightKernel for F8Weights {
    const PACKING: Packing = Packing::E4M3;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        _: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise: a step, which begins on 64 bytes, and 32 words of M rows.
        unsafe {
            let (scale, numbers) = (L::load(ref_at(w)), w.add(Self::PACKING.scale_columns * COLUMN_BYTES));
            for k in 0..BLOCK {
                let number = L::from_e4m3(ref_at(numbers.add(LANES * k)));
                add_products(number.mul(scale), a.add(k * width), acc);
            }
        }
    }
}

impl<Q: Quant> WeightKernel for FloatActivations<Q> {
    const PACKING: Packing = Q::PACKING;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        head: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    ) {
        let mut numbers = [[0.0; LANES]; BLOCK];
        // SAFETY: the caller's promise: a step, and 32 words of M rows.
        unsafe {
            unpack::<L, Q>(head, w, &mut numbers);
            for k in 0..BLOCK {
                add_products(L::load(&numbers[k]), a.add(k * width), acc);
            }
        }
    }
}

impl<Q: Quant> WeightKernel for Int8Activations<Q> {
    const PACKING: Packing = Q::PACKING;
    const OPERAND: Operand = Operand::Int8;
    // Digits of eight bits take longer to unpack than their sums to reload.
    const ROWS_MAX: usize = if Q::PACKING.has_wide_digits() { PANEL_ROWS } else { 4 };

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(
        head: &SharedScales<L>,
        w: *const u8,
        a: *const u32,
        width: usize,
        acc: &mut [L; M],
    ) {
        // SAFETY: the caller's promise: a step, and 15 words of M rows.
        unsafe {
            let digits = w.add(Q::PACKING.scale_columns * COLUMN_BYTES);
            if Q::Scales::TWO {
                let first = dots::<L, Q, M>(0..2, digits, a, a.add(11 * width), width);
                let second = dots::<L, Q, M>(2..4, digits, a, a.add(12 * width), width);
                let scales = Q::Scales::read(head, w);
                add_scaled::<L, Q, M>(scales[0], &first, (a, width), a.add(13 * width), acc);
                add_scaled::<L, Q, M>(scales[1], &second, (a, width), a.add(14 * width), acc);
            } else {
                let whole = dots::<L, Q, M>(0..4, digits, a, a.add(9 * width), width);
                let scales = Q::Scales::read(head, w);
                add_scaled::<L, Q, M>(scales[0], &whole, (a, width), a.add(10 * width), acc);
            }
        }
    }
}

/// The integer products over some pairs of groups; `sums` has the sums of their activations.
///
/// # Safety
/// The digits of a step are at `digits`; the pairs are below 4; 8 words of M rows of a panel at `a` and M at `sums`.
#[inline(always)]
unsafe fn dots<L: Lanes, Q: Quant, const M: usize>(
    pairs: Range<usize>,
    digits: *const u8,
    a: *const u32,
    sums: *const u32,
    width: usize,
) -> [L::Int; M] {
    let is_wide = Q::PACKING.has_wide_digits();
    let n_lines = Q::PACKING.step_bytes.div_ceil(64);
    let sum_words = words_per_sum(Q::Digits::MAX).min(2 * pairs.len());
    let mut dots = [L::int_splat(0); M];
    // SAFETY: the caller's promise.
    unsafe {
        for m in 0..M {
            let sum = *sums.add(m) as i32;
            dots[m] = if is_wide { L::offset_start(sum) } else { L::int_splat(-i32::from(Q::OFFSET) * sum) };
        }
        let mut small = dots.map(L::small_start);
        let first = pairs.start;
        for i in pairs {
            for line in n_lines * i / 4..n_lines * (i + 1) / 4 {
                L::prefetch(digits.wrapping_add(AHEAD + 64 * line));
            }
            let pair = Q::Digits::pair::<L>(digits, i);
            for j in 0..2 {
                for m in 0..M {
                    let four = *a.add((2 * i + j) * width + m) as i32;
                    match is_wide {
                        true => dots[m] = L::dot_offset(dots[m], pair[j], four),
                        false => small[m] = L::add_small(small[m], pair[j], four),
                    }
                }
                let n_words = 2 * (i - first) + j + 1;
                if !is_wide && n_words.is_multiple_of(sum_words) {
                    for m in 0..M {
                        dots[m] = L::small_end(dots[m], small[m]);
                        small[m] = L::small_start(dots[m]);
                    }
                }
            }
        }
    }
    dots
}

/// How many words of each row an unfinished sum may take: each adds two products of a digit and at most 127 to a sum
/// of 16 bits. A power of two.
const fn words_per_sum(digit_max: u8) -> usize {
    let product = 2 * digit_max as u32 * i8::MAX as u32;
    let n = i16::MAX as u32 / product;
    if n == 0 { 1 } else { 1 << n.ilog2() }
}

/// acc += dots × scales, and what the minimum adds: `scaled_sums` are of the activations, times their scale.
///
/// # Safety
/// 15 words of M rows of a panel at `a`, M at `scaled_sums`.
#[inline(always)]
pub(super) unsafe fn add_scaled<L: Lanes, Q: Quant, const M: usize>(
    of: StepScale<L>,
    dots: &[L::Int; M],
    (a, width): (*const u32, usize),
    scaled_sums: *const u32,
    acc: &mut [L; M],
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let (scale, sum) = unsafe { (f32::from_bits(*a.add(8 * width + m)), f32::from_bits(*scaled_sums.add(m))) };
        acc[m] = L::int_to_float(dots[m]).fma(of.scale.mul(L::splat(scale)), acc[m]);
        if Q::Scales::HAS_MINIMUM {
            acc[m] = of.minimum.fma(L::splat(sum), acc[m]);
        }
    }
}
