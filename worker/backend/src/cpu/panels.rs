//! Activations packed for the kernels: panels of up to twelve rows, interleaved, so that a kernel reads one stream.
//!
//! ```text
//! f32    per k:       one float of each row; a zero more where K is odd
//! bf16   per two k:   two numbers of each row, as in `pairs`
//! int8   per 32 k:    8 × (4 bytes of each row), then of each row: scale · sum of q · scale × sum,
//!                     sums of the first and second 16 q · scale × these
//! tiles  per 32 k:   32 bytes of each row, then as int8; panels of sixteen rows
//! ```
//! A row's packed numbers depend on that row alone; which panel holds it only matters for speed.

use super::amx::TILE_ROWS;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::memory::SharedPtr;
use super::pairs::{PAIR, round_row};
use std::ops::Range;

/// Elements per quantized block of activations.
pub(crate) const BLOCK: usize = 32;
/// Words per row and block: 32 bytes, a scale, sums, their products.
pub(crate) const BLOCK_WORDS: usize = 15;
/// Rows of a full panel.
pub(crate) const PANEL_ROWS: usize = 12;

/// The form of activations when they are multiplied by weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Floats,
    Bf16,
    Int8,
    /// As AMX reads it.
    Int8Tiles,
}

impl Operand {
    pub const ALL: [Operand; 4] = [Operand::Floats, Operand::Bf16, Operand::Int8, Operand::Int8Tiles];

    /// Panel words of `k` elements of a row that are whole steps of a weight.
    #[inline(always)]
    pub const fn step_words<L: Lanes>(self, k: usize) -> usize {
        match self {
            Operand::Floats => k,
            Operand::Bf16 => k / PAIR * L::PAIR_WORDS,
            Operand::Int8 | Operand::Int8Tiles => k / BLOCK * BLOCK_WORDS,
        }
    }

    /// Rows of a full panel.
    const fn panel_rows(self) -> usize {
        match self {
            Operand::Int8Tiles => TILE_ROWS,
            _ => PANEL_ROWS,
        }
    }

    pub fn n_panels(self, n_rows: usize) -> usize {
        n_rows.div_ceil(self.panel_rows())
    }

    /// Panel `i` of those that `n_rows` rows make.
    pub fn panel(self, n_rows: usize, i: usize) -> Panel {
        let rows_max = self.panel_rows();
        let rows_start = i * rows_max;
        let n_rows = rows_max.min(n_rows - rows_start);
        let width = match n_rows {
            _ if self == Operand::Int8Tiles => rows_max,
            1 | 2 => n_rows,
            3 | 4 => 4,
            5..=8 => 8,
            _ => PANEL_ROWS,
        };
        Panel { rows_start, n_rows, width }
    }

    /// Panel words of a row of `k` elements.
    #[inline(always)]
    pub const fn row_words<L: Lanes>(self, k: usize) -> usize {
        self.step_words::<L>(k.next_multiple_of(PAIR))
    }
}

/// A run of rows: panels are full, except the last one, which is as wide as a kernel that holds the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panel {
    pub rows_start: usize,
    pub n_rows: usize,
    /// Rows that the kernel computes; those beyond the panel's own are discarded.
    pub width: usize,
}

/// Words that the panels of `n_rows` rows take.
pub(crate) fn n_words(n_rows: usize, k: usize) -> Option<usize> {
    // An int8 block has 15 words for 32 elements, less than half as many as f32: a panel of tiles may be padded to
    // twice its rows. A pair of bf16 has at most two.
    n_rows.checked_next_multiple_of(PANEL_ROWS)?.checked_mul(k.checked_next_multiple_of(BLOCK)?)
}

/// Fills panels from rows of f32.
pub(crate) struct Fill<'a> {
    pub x: &'a [f32],
    pub k: usize,
    pub n_rows: usize,
    pub panels: Range<usize>,
    pub to: SharedPtr<u32>,
    pub operand: Operand,
}

impl Kernel for Fill<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for i in self.panels.clone() {
            let panel = self.operand.panel(self.n_rows, i);
            let row_words = self.operand.row_words::<L>(self.k);
            // SAFETY: panels follow each other, all but the last full, and one thread fills each.
            let to = unsafe { self.to.part(panel.rows_start * row_words, panel.width * row_words) };
            if panel.n_rows < panel.width {
                to.fill(0);
            }
            for lane in 0..panel.n_rows {
                let row = &self.x[(panel.rows_start + lane) * self.k..][..self.k];
                match self.operand {
                    Operand::Floats => copy_row(row, panel.width, lane, to),
                    Operand::Bf16 => round_row::<L>(row, panel.width, lane, to),
                    Operand::Int8 => quantize_row::<L>(row, panel.width, lane, |word| word * panel.width + lane, to),
                    Operand::Int8Tiles => quantize_row::<L>(row, panel.width, lane, |word| lane * 8 + word, to),
                }
            }
        }
    }
}

#[inline(always)]
fn copy_row(row: &[f32], width: usize, lane: usize, to: &mut [u32]) {
    for (x, cells) in row.iter().zip(to.chunks_exact_mut(width)) {
        cells[lane] = x.to_bits();
    }
    // Weights stored in pairs read one more element.
    if !row.len().is_multiple_of(PAIR) {
        to[row.len() * width + lane] = 0;
    }
}

/// Quantizes each block by its own largest magnitude: q = round(x * 127 / amax), ties to even. `place` is where a word
/// of its bytes goes.
#[inline(always)]
fn quantize_row<L: Lanes>(row: &[f32], width: usize, lane: usize, place: impl Fn(usize) -> usize, to: &mut [u32]) {
    for (block, to) in row.as_chunks::<BLOCK>().0.iter().zip(to.chunks_exact_mut(BLOCK_WORDS * width)) {
        let (low, high) = block.split_at(LANES);
        let (low, high) = (L::load_first(low), L::load_first(high));
        let largest = low.abs().max(high.abs()).largest();
        let scale = largest / 127.0;
        let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
        let halves = [rounded(low, inverse).to_bytes(), rounded(high, inverse).to_bytes()];
        let [first, second] = halves.map(|half| half.iter().map(|&q| i32::from(q as i8)).sum::<i32>());
        for (word, four) in halves.as_flattened().as_chunks::<4>().0.iter().enumerate() {
            to[place(word)] = u32::from_le_bytes(*four);
        }
        to[8 * width + lane] = scale.to_bits();
        to[9 * width + lane] = (first + second) as u32;
        to[10 * width + lane] = (scale * (first + second) as f32).to_bits();
        to[11 * width + lane] = first as u32;
        to[12 * width + lane] = second as u32;
        to[13 * width + lane] = (scale * first as f32).to_bits();
        to[14 * width + lane] = (scale * second as f32).to_bits();
    }
}

#[inline(always)]
fn rounded<L: Lanes>(x: L, inverse: f32) -> L {
    L::splat(127.0).min(L::splat(-127.0).max(x.mul(L::splat(inverse)).round()))
}
