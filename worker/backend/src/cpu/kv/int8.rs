//! Pages of K and V in eight bits: a row of a head is digits and a scale, and a pure function of the row.
//!
//! ```text
//! page of a head   half of K, half of V
//! half             scales [16 positions] in f32, then digits
//! digits of K      [dim / 4, 16 positions, 4]                  the lanes of a dot product are positions
//! digits of V      [dim / 16, 16 positions / 4, 16, 4]         of a weighted sum they are columns
//! ```
//! `dim` is the head's, as whole lanes. A digit is stored 128 higher: products take unsigned bytes on one side.
//!
//! K is turned before it is rounded, and so are the queries that meet it: in some columns every key is large, and their
//! size alone would decide how coarse the others become.

use super::{HEAD_DIM_MAX, Kv, POSITIONS};
use crate::cpu::lanes::{LANES, Lanes};

const FOUR: usize = 4;
const ZERO: u8 = 128;
const DIGIT_MAX: f32 = 127.0;
/// Rows whose numbers are all smaller are zeros, so that no factor is infinite.
pub(crate) const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Added to a whole number of some bits, it leaves that number in the lowest bits.
pub(crate) const WHOLE: f32 = (3u32 << 22) as f32;

/// K or V of a block's positions.
pub(crate) struct HalfPage<'a> {
    pub scales: &'a [f32; LANES],
    pub digits: &'a [[u8; 64]],
}

impl Kv {
    /// The half that begins at this byte.
    #[inline(always)]
    pub(crate) fn half_in_int8(&self, start: usize) -> HalfPage<'_> {
        let bytes = &self.pages.bytes()[start..start + self.half_page];
        let (scales, digits) = bytes.split_at(LANES * 4);
        let scales: &[f32] = bytemuck::cast_slice(scales);
        HalfPage { scales: scales.first_chunk().expect("as many as positions"), digits: digits.as_chunks().0 }
    }
}

/// The byte of a number of K.
#[inline(always)]
fn k_place(slot: usize, i: usize) -> usize {
    (i / FOUR * POSITIONS + slot) * FOUR + i % FOUR
}

/// The byte of a number of V.
#[inline(always)]
fn v_place(slot: usize, i: usize) -> usize {
    ((i / LANES * (POSITIONS / FOUR) + slot / FOUR) * LANES + i % LANES) * FOUR + slot % FOUR
}

/// How many numbers of a head are turned together: the largest power of two that divides it.
#[inline(always)]
pub(crate) fn hadamard_width(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// Turns each run of `hadamard_width` numbers of a head by a Hadamard matrix. Two rows that were both turned have
/// `hadamard_width` times the product of the rows as they were.
#[inline(always)]
pub(crate) fn hadamard_transform(head: &mut [f32]) {
    let n = hadamard_width(head.len());
    let mut half = 1;
    while half < n {
        for pair in head.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

/// Stores a row of K, turned, in a half page.
///
/// # Safety
/// That of `store`.
#[inline(always)]
pub(super) unsafe fn store_k<L: Lanes>(half: *mut u8, slot: usize, row: &[f32]) {
    let mut turned = [0.0; HEAD_DIM_MAX];
    let turned = &mut turned[..row.len()];
    turned.copy_from_slice(row);
    hadamard_transform(turned);
    // SAFETY: the caller promises it.
    unsafe { store::<L>(half, k_place, slot, turned) }
}

/// Stores a row of V in a half page.
///
/// # Safety
/// That of `store`.
#[inline(always)]
pub(super) unsafe fn store_v<L: Lanes>(half: *mut u8, slot: usize, row: &[f32]) {
    // SAFETY: the caller promises it.
    unsafe { store::<L>(half, v_place, slot, row) }
}

/// Stores a row in a half page.
///
/// # Safety
/// No other thread touches this position of the half page that begins at `half`.
#[inline(always)]
unsafe fn store<L: Lanes>(half: *mut u8, place: impl Fn(usize, usize) -> usize, slot: usize, row: &[f32]) {
    let mut digits = [ZERO; HEAD_DIM_MAX];
    let scale = round::<L>(row, &mut digits);
    // SAFETY: inside the half page, whose rows are whole lanes; scales are aligned, as pages are whole lines.
    unsafe {
        *half.cast::<f32>().add(slot) = scale;
        let to = half.add(LANES * 4);
        for (i, digit) in digits[..row.len().next_multiple_of(LANES)].iter().enumerate() {
            *to.add(place(slot, i)) = *digit;
        }
    }
}

/// The digits of a row, round(x * 127 / largest) with ties to even, and their scale. What is not finite has no digits,
/// and makes all of its row none.
#[inline(always)]
fn round<L: Lanes>(row: &[f32], digits: &mut [u8; HEAD_DIM_MAX]) -> f32 {
    let mut largest = L::splat(0.0);
    for x in row.chunks(LANES) {
        largest = L::load_first(x).abs().max(largest);
    }
    let largest = largest.largest();
    if !row.iter().all(|x| x.is_finite()) {
        return f32::NAN;
    }
    if largest < LEAST {
        return 0.0;
    }
    let inverse = L::splat(DIGIT_MAX / largest);
    for (x, digits) in row.chunks(LANES).zip(digits.as_chunks_mut::<LANES>().0) {
        let mut whole = [0.0; LANES];
        L::load_first(x).mul(inverse).round().add(L::splat(WHOLE)).store(&mut whole);
        *digits = whole.map(|x| (x.to_bits() as u8).wrapping_add(ZERO));
    }
    largest / DIGIT_MAX
}
