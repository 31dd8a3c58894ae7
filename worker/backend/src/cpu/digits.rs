//! The digits of a packed step: thirty-two elements of sixteen rows, in as few bits as their type has, and how lanes
//! read them.

use super::codebooks::Codebook;
use super::lanes::{LANES, Lanes};
use super::panels::BLOCK;
use super::quants::ref_at;
use std::marker::PhantomData;

/// The storage of a step's digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Plain numbers, no digits.
    Element,
    /// Pairs of bf16.
    Pair,
    Two,
    Three,
    Four,
    Five,
    Six,
    Eight,
    /// E4M3 numbers, with an f32 scale for every thirty-two of a row.
    E4M3,
}

impl Width {
    /// Bytes that a step's digits take for sixteen rows.
    pub const fn bytes(self) -> usize {
        BLOCK * LANES / 8
            * match self {
                Width::Element | Width::Pair => 0,
                Width::Two => 2,
                Width::Three => 3,
                Width::Four => 4,
                Width::Five => 5,
                Width::Six => 6,
                Width::Eight | Width::E4M3 => 8,
            }
    }

    /// The planes in which packed digits lie, one after another.
    const fn planes(self) -> &'static [BitPlane] {
        const fn plane(shift: u32, bits: u32) -> BitPlane {
            BitPlane { shift, bits }
        }
        match self {
            Width::Element | Width::Pair | Width::E4M3 => &[],
            Width::Two => const { &[plane(0, 2)] },
            Width::Three => const { &[plane(0, 2), plane(2, 1)] },
            Width::Four => const { &[plane(0, 4)] },
            Width::Five => const { &[plane(0, 4), plane(4, 1)] },
            Width::Six => const { &[plane(0, 4), plane(4, 2)] },
            Width::Eight => const { &[plane(0, 8)] },
        }
    }
}

/// Some neighbouring bits of all digits of a step.
struct BitPlane {
    /// The position of the lowest of them in a digit.
    shift: u32,
    bits: u32,
}

pub(crate) trait DigitPacking {
    const WIDTH: Width;
    /// The largest digit.
    const MAX: u8;
    /// The digits that packed ones name.
    const CODEBOOK: Option<&'static [u8; 16]> = None;

    /// Elements 8i to 8i + 4, and from there to 8i + 8, as unsigned bytes.
    ///
    /// # Safety
    /// The digits of a step are at `w`, and i is below 4.
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2];
}

/// Two times 64 bytes with the bits of four groups.
pub(crate) struct TwoBitDigits;
/// Two bits, then 64 bytes of third bits: bit g of a byte belongs to group g.
pub(crate) struct ThreeBitDigits;
pub(crate) struct FourBitDigits;
/// Nibbles, then 64 bytes of fifth bits: bit g of a byte belongs to group g.
pub(crate) struct FiveBitDigits;
/// Nibbles, then two times 64 bytes with the upper bits of four groups.
pub(crate) struct SixBitDigits;
pub(crate) struct EightBitDigits;
/// Nibbles that name the numbers of a codebook.
pub(crate) struct CodebookDigits<C>(PhantomData<C>);

impl DigitPacking for TwoBitDigits {
    const WIDTH: Width = Width::Two;
    const MAX: u8 = 3;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise.
        let bits = L::bytes(unsafe { ref_at(w.add(i / 2 * 64)) });
        let shift = i as u32 % 2 * 4;
        [L::bits(bits, shift, 3), L::bits(bits, shift + 2, 3)]
    }
}

impl DigitPacking for ThreeBitDigits {
    const WIDTH: Width = Width::Three;
    const MAX: u8 = 7;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise: two times 64 bytes of two bits, and 64 of one.
        let (low, bits) = unsafe { (TwoBitDigits::pair::<L>(w, i), L::bytes(ref_at(w.add(128)))) };
        let shift = 2 * i as u32;
        [L::join(low[0], L::bits(bits, shift, 1), 2), L::join(low[1], L::bits(bits, shift + 1, 1), 2)]
    }
}

impl DigitPacking for FourBitDigits {
    const WIDTH: Width = Width::Four;
    const MAX: u8 = 15;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise.
        let bytes = L::bytes(unsafe { ref_at(w.add(64 * i)) });
        [L::low_nibbles(bytes), L::high_nibbles(bytes)]
    }
}

impl DigitPacking for FiveBitDigits {
    const WIDTH: Width = Width::Five;
    const MAX: u8 = 31;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise: 256 bytes of nibbles, and 64 of bits.
        let (low, bits) = unsafe { (FourBitDigits::pair::<L>(w, i), L::bytes(ref_at(w.add(256)))) };
        let shift = 2 * i as u32;
        [L::join(low[0], L::bits(bits, shift, 1), 4), L::join(low[1], L::bits(bits, shift + 1, 1), 4)]
    }
}

impl DigitPacking for SixBitDigits {
    const WIDTH: Width = Width::Six;
    const MAX: u8 = 63;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise: 256 bytes of nibbles, and two times 64 of bits.
        let (low, bits) = unsafe { (FourBitDigits::pair::<L>(w, i), L::bytes(ref_at(w.add(256 + i / 2 * 64)))) };
        let shift = i as u32 % 2 * 4;
        [L::join(low[0], L::bits(bits, shift, 3), 4), L::join(low[1], L::bits(bits, shift + 2, 3), 4)]
    }
}

impl DigitPacking for EightBitDigits {
    const WIDTH: Width = Width::Eight;
    const MAX: u8 = u8::MAX;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise.
        unsafe { [L::bytes(ref_at(w.add(128 * i))), L::bytes(ref_at(w.add(128 * i + 64)))] }
    }
}

impl<C: Codebook> DigitPacking for CodebookDigits<C> {
    const WIDTH: Width = Width::Four;
    const MAX: u8 = C::LARGEST;
    const CODEBOOK: Option<&'static [u8; 16]> = Some(&C::DIGITS);

    #[inline(always)]
    unsafe fn pair<L: Lanes>(w: *const u8, i: usize) -> [L::Int; 2] {
        // SAFETY: the caller's promise.
        let names = unsafe { FourBitDigits::pair::<L>(w, i) };
        [L::look_up(&C::DIGITS, names[0]), L::look_up(&C::DIGITS, names[1])]
    }
}

/// Packs one row's digits, or their names, into zeroed memory.
pub(crate) fn pack_digits(width: Width, q: &[u8; BLOCK], lane: usize, to: &mut [u8]) {
    let groups = q.as_chunks::<4>().0;
    let mut rows = to.as_chunks_mut::<{ 4 * LANES }>().0.iter_mut();
    for BitPlane { shift, bits } in width.planes() {
        let mask = u32::from_ne_bytes([(1u16 << bits).wrapping_sub(1) as u8; 4]);
        // The bits of as many groups as a byte holds stand in one row.
        for groups in groups.chunks(8 / *bits as usize) {
            let word = (0..)
                .zip(groups)
                .fold(0, |word, (i, group)| word | (u32::from_le_bytes(*group) >> shift & mask) << (i * bits));
            if let Some(row) = rows.next() {
                row[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}
