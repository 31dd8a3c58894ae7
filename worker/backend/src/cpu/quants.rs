//! The packed layout of quantized weights: a step of thirty-two elements of sixteen rows, and how lanes read it. Every
//! type is digits of some width times scales of some kind.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use super::codebooks::Codebook;
use super::digits::{CodebookDigits, DigitPacking, Width};
use super::lanes::{LANES, Lanes};
use super::pairs::PAIR;
use super::panels::BLOCK;
use std::marker::PhantomData;
use types::{GroupedDtype, ScaleType};

/// Added to signed bytes, which are stored unsigned.
pub(crate) const SIGN: u8 = 0x80;
/// The widest head or set of scales that `blocks` hands over, in columns: two bytes for each row.
pub(crate) const COLUMNS_MAX: usize = 2;
pub(crate) const COLUMN_BYTES: usize = 2 * LANES;

/// The layout of a tile of sixteen rows: `[head] [scales, digits] [scales, digits] .. [head] ..`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Elements per step: one, a pair, or a block of activations.
    pub unit: usize,
    pub step_bytes: usize,
    pub head: ScaleHeaderForm,
    pub scale_columns: usize,
    pub width: Width,
    /// The largest digit.
    pub digit_max: u8,
    /// Whether the two halves of a step have scales of their own.
    pub has_halves: bool,
}

/// The header before the steps of a block: a scale, and perhaps a second number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaleHeaderForm {
    /// Elements that share a head; none where there is no head.
    every: usize,
    scale: ScaleType,
    /// An f16: a minimum, or for groups the middle of the digits minus the zero.
    has_second: bool,
}

impl ScaleHeaderForm {
    const NONE: ScaleHeaderForm = ScaleHeaderForm { every: 0, scale: ScaleType::F16, has_second: false };

    /// Of blocks of 256, with f16 in one or two columns.
    const fn of_256(columns: usize) -> ScaleHeaderForm {
        ScaleHeaderForm { every: if columns == 0 { 0 } else { 256 }, scale: ScaleType::F16, has_second: columns > 1 }
    }

    const fn of_groups(grouped: GroupedDtype) -> ScaleHeaderForm {
        ScaleHeaderForm { every: grouped.size.n(), scale: grouped.scale, has_second: grouped.has_zeros }
    }

    pub const fn bytes(self) -> usize {
        if self.every == 0 { 0 } else { LANES * (self.scale.bytes() + if self.has_second { 2 } else { 0 }) }
    }

    /// Elements up to the next head, or as many as are packed at once.
    pub const fn every(self) -> usize {
        if self.every == 0 { 256 } else { self.every }
    }

    /// Whether a head stands before the step at `k`.
    #[inline(always)]
    pub const fn is_before(self, first: usize, k: usize) -> bool {
        self.every > 0 && (k == 0 || (first + k) & (self.every - 1) == 0)
    }

    const fn n(self, first: usize, k: usize) -> Option<usize> {
        match first.checked_add(k) {
            None => None,
            Some(end) if self.every > 0 && k > 0 => Some(end.div_ceil(self.every)),
            Some(_) => Some(0),
        }
    }
}

impl Packing {
    pub const F32: Packing = Packing::elements(Width::Element, 1, 4);
    pub const F16: Packing = Packing::elements(Width::Element, 1, 2);
    pub const BF16: Packing = Packing::elements(Width::Pair, PAIR, 2);
    /// An f32 scale is as wide as two columns.
    pub const E4M3: Packing = Packing::steps([0, 2], Width::E4M3, 0, false);

    const fn elements(width: Width, unit: usize, size: usize) -> Packing {
        Packing {
            unit,
            step_bytes: unit * size * LANES,
            head: ScaleHeaderForm::NONE,
            scale_columns: 0,
            width,
            digit_max: 0,
            has_halves: false,
        }
    }

    const fn steps(
        [head_columns, scale_columns]: [usize; 2],
        width: Width,
        digit_max: u8,
        has_halves: bool,
    ) -> Packing {
        let step_bytes = scale_columns * COLUMN_BYTES + width.bytes();
        Packing {
            unit: BLOCK,
            step_bytes,
            head: ScaleHeaderForm::of_256(head_columns),
            scale_columns,
            width,
            digit_max,
            has_halves,
        }
    }

    /// The same steps under the heads of groups.
    pub const fn in_groups(self, grouped: GroupedDtype) -> Packing {
        Packing { head: ScaleHeaderForm::of_groups(grouped), ..self }
    }

    /// Whether products of digits and activations fit no sum of 16 bits.
    pub const fn has_wide_digits(&self) -> bool {
        self.digit_max > i8::MAX as u8
    }

    /// Bytes of a tile with `k` elements per row, the first of which is element `first` of its block.
    pub fn tile_bytes(self, first: usize, k: usize) -> Option<usize> {
        let heads = self.head.n(first, k)?.checked_mul(self.head.bytes())?;
        k.div_ceil(self.unit).checked_mul(self.step_bytes)?.checked_add(heads)
    }
}

/// A quantized format: `scale × (digit - OFFSET)`, or that plus a minimum.
pub(crate) trait Quant {
    type Digits: DigitPacking;
    type Scales: ScaleLayout;
    /// The offset that made digits unsigned, or their middle; none where a block has its own minimum.
    const OFFSET: u8;
    /// Groups have heads of their own: `Packing::in_groups`.
    const PACKING: Packing = {
        let columns = [Self::Scales::HEAD_COLUMNS, Self::Scales::COLUMNS];
        Packing::steps(columns, Self::Digits::WIDTH, Self::Digits::MAX, Self::Scales::TWO)
    };
}

/// The format of these digits, scales and offset.
pub(crate) struct Quantized<Digits, Scales, const OFFSET: u8>(PhantomData<(Digits, Scales)>);

impl<D: DigitPacking, S: ScaleLayout, const OFFSET: u8> Quant for Quantized<D, S, OFFSET> {
    type Digits = D;
    type Scales = S;
    const OFFSET: u8 = OFFSET;
}

/// The format of nibbles that name the numbers of a codebook.
pub(crate) struct CodebookQuant<Numbers, Scales>(PhantomData<(Numbers, Scales)>);

impl<C: Codebook, S: ScaleLayout> Quant for CodebookQuant<C, S> {
    type Digits = CodebookDigits<C>;
    type Scales = S;
    const OFFSET: u8 = C::OFFSET;
}

/// The values that the steps up to the next head share: a scale, and perhaps a minimum or a term for digits.
#[derive(Clone, Copy)]
pub(crate) struct SharedScales<L> {
    scale: L,
    second: L,
}

impl<L: Lanes> SharedScales<L> {
    #[inline(always)]
    pub fn none() -> SharedScales<L> {
        SharedScales { scale: L::splat(0.0), second: L::splat(0.0) }
    }

    /// # Safety
    /// A head of this form is at `w`.
    #[inline(always)]
    pub unsafe fn read(form: ScaleHeaderForm, w: *const u8) -> SharedScales<L> {
        // SAFETY: the caller's promise; scales have the width of their type, and the second one follows them.
        unsafe {
            let scale = match form.scale {
                ScaleType::F16 => column::<L>(w, 0),
                ScaleType::BF16 => L::from_bf16(ref_at(w)),
                ScaleType::F32 => L::load(ref_at(w)),
            };
            let second = if form.has_second { column::<L>(w, form.scale.bytes() / 2) } else { L::splat(0.0) };
            SharedScales { scale, second }
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct StepScale<L> {
    pub scale: L,
    /// Unused where the type has no minimum.
    pub minimum: L,
}

pub(crate) trait ScaleLayout {
    /// Columns of the head of a block of 256.
    const HEAD_COLUMNS: usize;
    /// Columns of a step's scales.
    const COLUMNS: usize;
    const HAS_MINIMUM: bool;
    /// Whether the two halves of a step have scales of their own.
    const TWO: bool;

    /// Reads the scales of a step's two halves.
    ///
    /// # Safety
    /// The scales of a step are at `w`.
    unsafe fn read<L: Lanes>(head: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2];

    /// Returns a number from its digit, from which the offset is already subtracted. Rounds at most once.
    #[inline(always)]
    fn dequantize<L: Lanes>(_: &SharedScales<L>, of: StepScale<L>, digit: L) -> L {
        if Self::HAS_MINIMUM { of.scale.fma(digit, of.minimum) } else { of.scale.mul(digit) }
    }
}

/// Reads a `T` at `at`.
///
/// # Safety
/// The bytes of a `T` are there, and aligned for it.
#[inline(always)]
pub(crate) unsafe fn ref_at<'a, T>(at: *const u8) -> &'a T {
    // SAFETY: the caller's promise.
    unsafe { &*at.cast::<T>() }
}

/// Reads column `i`, of f16.
///
/// # Safety
/// The columns up to `i` are at `w`.
#[inline(always)]
unsafe fn column<L: Lanes>(w: *const u8, i: usize) -> L {
    // SAFETY: the caller's promise; columns begin on 32 bytes.
    unsafe { L::from_f16(ref_at(w.add(COLUMN_BYTES * i))) }
}

#[inline(always)]
fn scale_both_halves<L: Lanes>(scale: L, minimum: L) -> [StepScale<L>; 2] {
    [StepScale { scale, minimum }; 2]
}

/// One f16 scale.
pub(crate) struct F16Scale;
/// An f16 scale and an f16 minimum.
pub(crate) struct F16ScaleAndMinimum;
/// A bf16 scale, because an f16 does not hold every power of two.
pub(crate) struct Bf16Scale;
/// A six-bit scale and a six-bit minimum, times those of the head.
pub(crate) struct HeaderTimesPair;
/// A four-bit scale and a four-bit minimum for each half, times those of the head.
pub(crate) struct HeaderTimesTwoPairs;
/// A signed scale for each half, times that of the head, divided by 2^SHIFT.
pub(crate) struct HeaderTimesTwo<const SHIFT: u32>;
/// The scale of the head, and the term that it adds to digits.
pub(crate) struct HeaderScaleOnly;

impl ScaleLayout for F16Scale {
    const HEAD_COLUMNS: usize = 0;
    const COLUMNS: usize = 1;
    const HAS_MINIMUM: bool = false;
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn read<L: Lanes>(_: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        unsafe { scale_both_halves(column(w, 0), L::splat(0.0)) }
    }
}

impl ScaleLayout for F16ScaleAndMinimum {
    const HEAD_COLUMNS: usize = 0;
    const COLUMNS: usize = 2;
    const HAS_MINIMUM: bool = true;
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn read<L: Lanes>(_: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        unsafe { scale_both_halves(column(w, 0), column(w, 1)) }
    }
}

impl ScaleLayout for Bf16Scale {
    const HEAD_COLUMNS: usize = 0;
    const COLUMNS: usize = 1;
    const HAS_MINIMUM: bool = false;
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn read<L: Lanes>(_: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        unsafe { scale_both_halves(L::from_bf16(ref_at(w)), L::splat(0.0)) }
    }
}

impl ScaleLayout for HeaderTimesPair {
    const HEAD_COLUMNS: usize = 2;
    const COLUMNS: usize = 1;
    const HAS_MINIMUM: bool = true;
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn read<L: Lanes>(head: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        let (scale, minimum) = unsafe { L::byte_pairs(ref_at(w)) };
        scale_both_halves(head.scale.mul(scale), head.second.mul(minimum))
    }
}

impl ScaleLayout for HeaderTimesTwoPairs {
    const HEAD_COLUMNS: usize = 2;
    const COLUMNS: usize = 1;
    const HAS_MINIMUM: bool = true;
    const TWO: bool = true;

    #[inline(always)]
    unsafe fn read<L: Lanes>(head: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        let (first, second) = unsafe { L::byte_pairs(ref_at(w)) };
        [of_nibbles(head, first), of_nibbles(head, second)]
    }
}

/// Returns the scale of the lower nibble and the minimum of the upper one.
#[inline(always)]
fn of_nibbles<L: Lanes>(head: &SharedScales<L>, byte: L) -> StepScale<L> {
    // A byte less 7.5 is within half of sixteen times its upper nibble, which rounding finds exactly.
    let upper = byte.sub(L::splat(7.5)).mul(L::splat(1.0 / 16.0)).round();
    let lower = upper.fma(L::splat(-16.0), byte);
    StepScale { scale: head.scale.mul(lower), minimum: head.second.mul(upper) }
}

impl<const SHIFT: u32> ScaleLayout for HeaderTimesTwo<SHIFT> {
    const HEAD_COLUMNS: usize = 1;
    const COLUMNS: usize = 1;
    const HAS_MINIMUM: bool = false;
    const TWO: bool = true;

    #[inline(always)]
    unsafe fn read<L: Lanes>(head: &SharedScales<L>, w: *const u8) -> [StepScale<L>; 2] {
        // SAFETY: the caller's promise.
        let (first, second) = unsafe { L::byte_pairs(ref_at(w)) };
        let (sign, unit) = (L::splat(f32::from(SIGN)), head.scale.mul(L::splat(1.0 / (1u32 << SHIFT) as f32)));
        let of = [unit.mul(first.sub(sign)), unit.mul(second.sub(sign))];
        [StepScale { scale: of[0], minimum: of[0] }, StepScale { scale: of[1], minimum: of[1] }]
    }
}

impl ScaleLayout for HeaderScaleOnly {
    const HEAD_COLUMNS: usize = 1;
    const COLUMNS: usize = 0;
    const HAS_MINIMUM: bool = true;
    const TWO: bool = false;

    #[inline(always)]
    unsafe fn read<L: Lanes>(head: &SharedScales<L>, _: *const u8) -> [StepScale<L>; 2] {
        scale_both_halves(head.scale, head.scale.mul(head.second))
    }

    #[inline(always)]
    fn dequantize<L: Lanes>(head: &SharedScales<L>, of: StepScale<L>, digit: L) -> L {
        of.scale.mul(digit.add(head.second))
    }
}

/// Unpacks the elements of a step. They equal the file's bit for bit: no product of a digit and a scale is rounded,
/// only the sum with a minimum.
///
/// # Safety
/// A step of the type is at `w`.
#[inline(always)]
pub(crate) unsafe fn unpack<L: Lanes, Q: Quant>(head: &SharedScales<L>, w: *const u8, to: &mut [[f32; LANES]; BLOCK]) {
    // SAFETY: the caller's promise.
    let scales = unsafe { Q::Scales::read(head, w) };
    for i in 0..4 {
        // SAFETY: the caller's promise.
        let pair = unsafe { Q::Digits::pair::<L>(w.add(Q::PACKING.scale_columns * COLUMN_BYTES), i) };
        for (group, digits) in pair.into_iter().enumerate() {
            let digits = L::byte_floats(digits);
            for j in 0..4 {
                let digit = if Q::OFFSET == 0 { digits[j] } else { digits[j].sub(L::splat(f32::from(Q::OFFSET))) };
                Q::Scales::dequantize(head, scales[i / 2], digit).store(&mut to[8 * i + 4 * group + j]);
            }
        }
    }
}
