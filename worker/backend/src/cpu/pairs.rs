//! Pairs of bf16 along K: how weights of bf16 are packed, and what activations are rounded to where they meet them.
//!
//! ```text
//! tile    per two k:   16 × (even, odd)                  an odd K is padded with zero
//! panel   per two k:   the even f32 of each row · the odd ones, or (even, odd) of each row: `Lanes::PAIR_WORDS`
//! ```
//! `vdpbf16ps` adds the odd product first, then the even one, rounding each sum once; it takes subnormal numbers for
//! zero and makes zero of subnormal sums. Plain FMA does the same where nothing is subnormal, and nothing is: numbers
//! below 2^-55 are set to zero, so a number is a multiple of 2^-62, and a product or a sum one of 2^-124.

use super::lanes::{LANES, Lanes};
use half::bf16;

/// Elements of a pair.
pub(crate) const PAIR: usize = 2;
const PAIR_BYTES: usize = 2 * PAIR;
/// 2^-55: the least magnitude that is kept.
const LEAST: f32 = f32::from_bits((127 - 55) << 23);

/// The nearest bf16, ties to even.
#[inline(always)]
fn rounded(x: f32) -> bf16 {
    if x.abs() < LEAST { bf16::ZERO } else { bf16::from_f32_const(x) }
}

/// Packs a row's bytes, as a file has them, into its lane of a zeroed tile.
pub(crate) fn pack_row(row: &[u8], lane: usize, tile: &mut [u8]) {
    for (pair, to) in row.chunks(PAIR_BYTES).zip(tile.chunks_exact_mut(PAIR_BYTES * LANES)) {
        let to = to[PAIR_BYTES * lane..].as_chunks_mut().0;
        for (number, to) in pair.as_chunks().0.iter().zip(to) {
            *to = rounded(bf16::from_le_bytes(*number).to_f32_const()).to_le_bytes();
        }
    }
}

/// The numbers of a lane of a tile.
#[inline(always)]
pub(crate) fn unpack_row(tile: &[u8], lane: usize, out: &mut [f32]) {
    for (pairs, out) in tile.chunks_exact(PAIR_BYTES * LANES).zip(out.chunks_mut(PAIR)) {
        let pair = pairs[PAIR_BYTES * lane..].as_chunks().0;
        out.iter_mut().zip(pair).for_each(|(out, number)| *out = bf16::from_le_bytes(*number).to_f32_const());
    }
}

/// Rounds a row of activations into its lane of a panel.
#[inline(always)]
pub(crate) fn round_row<L: Lanes>(row: &[f32], width: usize, lane: usize, panel: &mut [u32]) {
    for (pair, to) in row.chunks(PAIR).zip(panel.chunks_exact_mut(L::PAIR_WORDS * width)) {
        let even = u32::from(rounded(pair[0]).to_bits());
        let odd = if pair.len() == PAIR { u32::from(rounded(pair[1]).to_bits()) } else { 0 };
        if L::PAIR_WORDS == 1 {
            to[lane] = odd << 16 | even;
        } else {
            (to[lane], to[width + lane]) = (even << 16, odd << 16);
        }
    }
}
