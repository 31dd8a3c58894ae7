//! The blocks of IQ1, IQ2 and IQ3: an index names eight or four numbers of a grid at once, and their signs follow.
//! Returns the names of the numbers in their codebook, as `blocks` does.

use super::blocks::{SubBlock, fixed, two_bytes_at};
use super::codebooks::NEGATIVE;
use super::quants::SIGN;

/// The numbers of all grids, two in a byte, the first in the lower half. `make_quants.py` in `tests/reference` writes
/// the file. Each number is an index among the sizes of its codebook.
const NUMBERS: &[u8] = include_bytes!("grids.bin");

/// Runs of `N` numbers, the first of which starts at this byte.
struct NumberGrid<const N: usize>(usize);

const IQ2_XXS: NumberGrid<8> = NumberGrid(0);
const IQ2_XS: NumberGrid<8> = IQ2_XXS.after(256);
const IQ2_S: NumberGrid<8> = IQ2_XS.after(512);
const IQ1: NumberGrid<8> = IQ2_S.after(1024);
const IQ3_XXS: NumberGrid<4> = NumberGrid(IQ1.after(2048).0);
const IQ3_S: NumberGrid<4> = IQ3_XXS.after(256);
const _: () = assert!(IQ3_S.after(512).0 == NUMBERS.len());

impl<const N: usize> NumberGrid<N> {
    /// Returns the grid behind this one, which has `n` runs.
    const fn after(&self, n: usize) -> NumberGrid<N> {
        NumberGrid(self.0 + n * N / 2)
    }

    fn run(&self, index: usize) -> [u8; N] {
        let from = &NUMBERS[self.0 + index * N / 2..][..N / 2];
        std::array::from_fn(|i| from[i / 2] >> (i % 2 * 4) & 15)
    }

    /// Returns a run whose number i is negative where bit i of `signs` is set.
    fn signed_run(&self, index: usize, signs: u8) -> [u8; N] {
        let mut run = self.run(index);
        (0..).zip(&mut run).filter(|(i, _)| signs >> i & 1 == 1).for_each(|(_, name)| *name |= NEGATIVE);
        run
    }
}

/// Returns eight signs, an even number of which are negative, from the first seven.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 0x7f) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(fixed(block, at))
}

fn half_word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(two_bytes_at(block, at))
}

/// Joins runs of names under scales of 2n + 1, for each half its n.
fn of_runs<const N: usize>(head: [u8; 2], n: [u8; 2], run: impl Fn(usize) -> [u8; N]) -> SubBlock {
    let mut q = [0; 32];
    q.chunks_exact_mut(N).enumerate().for_each(|(j, to)| to.copy_from_slice(&run(j)));
    let scales = n.map(|n| SIGN + 2 * n + 1);
    SubBlock { q, head: [head, [0; 2]], scales: [scales, [0; 2]] }
}

/// d · for each 32: four indices · 4 × 7 signs and a scale
pub(super) fn iq2_xxs(block: &[u8], i: usize) -> SubBlock {
    let (indices, signs) = (2 + 8 * i, word(block, 6 + 8 * i));
    let run = |j: usize| IQ2_XXS.signed_run(block[indices + j].into(), even_signs(signs >> (7 * j)));
    of_runs(two_bytes_at(block, 0), [(signs >> 28) as u8; 2], run)
}

/// d · 32 × (9 bits of index, 7 signs) · 16 scales of four bits
pub(super) fn iq2_xs(block: &[u8], i: usize) -> SubBlock {
    let run = |j: usize| {
        let bits = half_word(block, 2 + 8 * i + 2 * j);
        IQ2_XS.signed_run(usize::from(bits & 511), even_signs(u32::from(bits >> 9)))
    };
    of_runs(two_bytes_at(block, 0), [block[66 + i] & 15, block[66 + i] >> 4], run)
}

/// d · 32 × 8 bits of index · 32 × 8 signs · two upper bits of the indices · 16 scales of four bits
pub(super) fn iq2_s(block: &[u8], i: usize) -> SubBlock {
    let run = |j: usize| {
        let upper = usize::from(block[66 + i] >> (2 * j) & 3);
        IQ2_S.signed_run(usize::from(block[2 + 4 * i + j]) | upper << 8, block[34 + 4 * i + j])
    };
    of_runs(two_bytes_at(block, 0), [block[74 + i] & 15, block[74 + i] >> 4], run)
}

/// d · 64 indices · for each 32: 4 × 7 signs and a scale
pub(super) fn iq3_xxs(block: &[u8], i: usize) -> SubBlock {
    let signs = word(block, 66 + 4 * i);
    let run = |j: usize| {
        let eight = even_signs(signs >> (j / 2 * 7));
        IQ3_XXS.signed_run(block[2 + 8 * i + j].into(), eight >> (j % 2 * 4))
    };
    of_runs(two_bytes_at(block, 0), [(signs >> 28) as u8; 2], run)
}

/// d · 64 × 8 bits of index · their upper bits · 32 × 8 signs · 8 scales of four bits
pub(super) fn iq3_s(block: &[u8], i: usize) -> SubBlock {
    let run = |j: usize| {
        let upper = usize::from(block[66 + i] >> j & 1);
        let signs = block[74 + 4 * i + j / 2] >> (j % 2 * 4);
        IQ3_S.signed_run(usize::from(block[2 + 8 * i + j]) | upper << 8, signs)
    };
    of_runs(two_bytes_at(block, 0), [block[106 + i / 2] >> (i % 2 * 4) & 15; 2], run)
}

/// d · 32 × 8 bits of index · for each 32: 4 × 3 upper bits, a scale of three bits, the sign of the eighths
pub(super) fn iq1_s(block: &[u8], i: usize) -> SubBlock {
    let bits = half_word(block, 34 + 2 * i);
    let eighths = if bits >> 15 == 1 { u8::MAX } else { 0 };
    let run = |j: usize| {
        let upper = usize::from(bits >> (3 * j) & 7);
        IQ1.signed_run(usize::from(block[2 + 4 * i + j]) | upper << 8, eighths)
    };
    of_runs(two_bytes_at(block, 0), [(bits >> 12 & 7) as u8; 2], run)
}

/// 32 × 8 bits of index · 32 × (3 upper bits, the sign of the eighths) · 4 × (4 scales of three bits, a fourth of d)
pub(super) fn iq1_m(block: &[u8], i: usize) -> SubBlock {
    let quarter = |j: usize| half_word(block, 48 + 2 * j);
    let d = (0..4).fold(0, |d, j| d | quarter(j) >> 12 << (4 * j));
    let scale = |j: usize| (quarter(j / 4) >> (j % 4 * 3) & 7) as u8;
    let run = |j: usize| {
        let bits = block[32 + 2 * i + j / 2] >> (j % 2 * 4) & 15;
        let eighths = if bits >> 3 == 1 { u8::MAX } else { 0 };
        IQ1.signed_run(usize::from(block[4 * i + j]) | usize::from(bits & 7) << 8, eighths)
    };
    of_runs(d.to_le_bytes(), [scale(2 * i), scale(2 * i + 1)], run)
}
