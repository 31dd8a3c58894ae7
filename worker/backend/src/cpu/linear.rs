//! Products with packed weights: a tile of sixteen rows of the weight meets a panel of rows of the input.
//!
//! Accumulation runs along K in one chain per element, whatever the panel's width: a row's bits do not know its
//! neighbours.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use super::isa::{Isa, Kernel, dispatch};
use super::lanes::{LANES, Lanes};
use super::memory::Shared;
use super::pack::{DEPTH_MAX, Leaf, Matrix, Part, tile_unit};
use super::panels::{BLOCK, BLOCK_WORDS, PANEL_ROWS, Panel, n_panels, panel};
use crate::StoredType;
use std::mem::MaybeUninit;
use std::ops::Range;

/// One product; `run` computes some of its tiles.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub matrix: &'a Matrix,
    /// Two fillings of the same rows: as f32, and quantized. Only those that a part needs are there.
    pub floats: *const u32,
    pub int8: *const u32,
    pub quantized: bool,
    pub n_rows: usize,
    /// [n_runs, n_rows, n_out]
    pub out: Shared<f32>,
}

// SAFETY: the panels are only read while the product is computed.
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    pub fn run(&self, isa: Isa, tiles: Range<usize>) {
        dispatch(isa, Tiles { product: self, tiles });
    }
}

/// Whether a weight of this type meets quantized activations, if the policy quantizes any.
pub(crate) fn is_quantized(dtype: StoredType) -> bool {
    matches!(dtype, StoredType::Q8_0 | StoredType::Q4_1)
}

struct Tiles<'a> {
    product: &'a Product<'a>,
    tiles: Range<usize>,
}

impl Kernel for Tiles<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for part in &self.product.matrix.parts {
            let start = self.tiles.start.max(part.first_tile);
            let end = self.tiles.end.min(part.first_tile + part.n_tiles());
            for tile in start..end {
                tile_by_type::<L>(self.product, part, tile - part.first_tile);
            }
        }
    }
}

#[inline(always)]
fn tile_by_type<L: Lanes>(product: &Product<'_>, part: &Part, tile: usize) {
    match (part.dtype, product.quantized) {
        (StoredType::Q8_0, true) => tile_by_panels::<L, Int8<Q8_0>>(product, part, tile),
        (StoredType::Q4_1, true) => tile_by_panels::<L, Int8<Q4_1>>(product, part, tile),
        (StoredType::Q8_0, false) => tile_by_panels::<L, Q8_0>(product, part, tile),
        (StoredType::Q4_1, false) => tile_by_panels::<L, Q4_1>(product, part, tile),
        (StoredType::F32, _) => tile_by_panels::<L, F32>(product, part, tile),
        (StoredType::F16, _) => tile_by_panels::<L, F16>(product, part, tile),
        (StoredType::BF16, _) => tile_by_panels::<L, BF16>(product, part, tile),
    }
}

#[inline(always)]
fn tile_by_panels<L: Lanes, W: Weights>(product: &Product<'_>, part: &Part, tile: usize) {
    for i in 0..n_panels(product.n_rows) {
        let panel = panel(product.n_rows, i);
        let cut = Cut { product, part, tile, panel };
        match panel.width {
            1 => cut.compute::<L, W, 1>(),
            4 => cut.compute::<L, W, 4>(),
            8 => cut.compute::<L, W, 8>(),
            _ => cut.compute::<L, W, PANEL_ROWS>(),
        }
    }
}

/// How one type of weight is walked along K.
trait Weights {
    /// Elements of K per step.
    const STEP: usize;
    const STEP_BYTES: usize;
    /// Words of a panel per row and step.
    const STEP_WORDS: usize;
    const QUANTIZED: bool;

    /// acc += the product over one step.
    ///
    /// # Safety
    /// `w` is at `STEP_BYTES` bytes of a tile, `a` at `STEP_WORDS * M` words of a panel of width M.
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]);
}

struct Cut<'a> {
    product: &'a Product<'a>,
    part: &'a Part,
    tile: usize,
    panel: Panel,
}

impl Cut<'_> {
    #[inline(always)]
    fn compute<L: Lanes, W: Weights, const M: usize>(&self) {
        let matrix = self.product.matrix;
        let words_per_row = matrix.k / W::STEP * W::STEP_WORDS;
        let panels = if W::QUANTIZED { self.product.int8 } else { self.product.floats };
        let start = self.part.start + self.tile * self.part.tile_bytes;
        debug_assert!(start + self.part.tile_bytes <= matrix.pages.bytes().len());
        // SAFETY: `pack` laid this tile out inside the pages; `panels::Fill` filled so many words of the panel.
        let (mut w, mut a) = unsafe {
            (matrix.pages.start().add(start).cast_const(), panels.add(self.panel.rows_start * words_per_row))
        };
        let mut pile = Pile::<L, M>::new();
        let (mut k, mut plane) = (0, 0);
        for &Leaf { k_end, n_merges, ends_run } in &matrix.leaves {
            let mut acc = [L::splat(0.0); M];
            while k < k_end {
                // SAFETY: k is below the matrix's, so a step of the tile and of the panel is left.
                unsafe {
                    W::step(w, a, &mut acc);
                    w = w.add(W::STEP_BYTES);
                    a = a.add(W::STEP_WORDS * M);
                }
                k += W::STEP;
            }
            pile.push(acc, n_merges);
            if ends_run {
                self.store(plane, &pile.pop());
                plane += 1;
            }
        }
    }

    #[inline(always)]
    fn store<L: Lanes, const M: usize>(&self, plane: usize, acc: &[L; M]) {
        let n_out = self.product.matrix.n_out;
        let n_columns = LANES.min(self.part.rows - self.tile * LANES);
        let column = self.part.first_out + self.tile * LANES;
        for (lane, acc) in acc.iter().enumerate().take(self.panel.n_rows) {
            let row = plane * self.product.n_rows + self.panel.rows_start + lane;
            // SAFETY: the op checked that out holds all planes; these columns are this tile's, and one thread has it.
            let to = unsafe { self.product.out.part(row * n_out + column, n_columns) };
            match to.first_chunk_mut::<LANES>() {
                Some(whole) => acc.store(whole),
                None => acc.store_first(to),
            }
        }
    }
}

/// The stack of partial sums.
struct Pile<L, const M: usize> {
    sums: [MaybeUninit<[L; M]>; DEPTH_MAX],
    n: usize,
}

impl<L: Lanes, const M: usize> Pile<L, M> {
    #[inline(always)]
    fn new() -> Pile<L, M> {
        Pile { sums: [const { MaybeUninit::uninit() }; DEPTH_MAX], n: 0 }
    }

    #[inline(always)]
    fn push(&mut self, sum: [L; M], n_merges: u32) {
        let mut sum = sum;
        for _ in 0..n_merges {
            let lower = self.pop();
            for m in 0..M {
                sum[m] = lower[m].add(sum[m]);
            }
        }
        self.sums[self.n].write(sum);
        self.n += 1;
    }

    #[inline(always)]
    fn pop(&mut self) -> [L; M] {
        assert!(self.n > 0, "a leaf merges what was pushed before it");
        self.n -= 1;
        // SAFETY: entries below n were written.
        unsafe { self.sums[self.n].assume_init() }
    }
}

/// 16 rows of `SIZE` bytes at `at`.
///
/// # Safety
/// So many bytes are there, and aligned for T.
#[inline(always)]
unsafe fn at<'a, T>(at: *const u8) -> &'a T {
    // SAFETY: the caller's promise.
    unsafe { &*at.cast::<T>() }
}

/// acc += w * x for one k.
///
/// # Safety
/// M words at `a`.
#[inline(always)]
unsafe fn add_products<L: Lanes, const M: usize>(w: L, a: *const u32, acc: &mut [L; M]) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let x = f32::from_bits(unsafe { *a.add(m) });
        acc[m] = w.fma(L::splat(x), acc[m]);
    }
}

/// How far ahead weights are asked for, in bytes: a few blocks, and past a page of 4 KB the hardware does not look.
const AHEAD: usize = 2304;

struct F32;
struct F16;
struct BF16;
struct Q8_0;
struct Q4_1;
struct Int8<W>(W);

impl Weights for F32 {
    const STEP: usize = 1;
    const STEP_BYTES: usize = tile_unit(StoredType::F32).1;
    const STEP_WORDS: usize = 1;
    const QUANTIZED: bool = false;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise; tiles of f32 begin on 64 bytes.
        unsafe { add_products(L::load(at(w)), a, acc) }
    }
}

impl Weights for F16 {
    const STEP: usize = 1;
    const STEP_BYTES: usize = tile_unit(StoredType::F16).1;
    const STEP_WORDS: usize = 1;
    const QUANTIZED: bool = false;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise; tiles begin on 32 bytes.
        unsafe { add_products(L::from_f16(at(w)), a, acc) }
    }
}

impl Weights for BF16 {
    const STEP: usize = 1;
    const STEP_BYTES: usize = tile_unit(StoredType::BF16).1;
    const STEP_WORDS: usize = 1;
    const QUANTIZED: bool = false;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise; tiles begin on 32 bytes.
        unsafe { add_products(L::from_bf16(at(w)), a, acc) }
    }
}

impl Weights for Q8_0 {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = tile_unit(StoredType::Q8_0).1;
    const STEP_WORDS: usize = BLOCK;
    const QUANTIZED: bool = false;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: 32 bytes of scales, then 8 groups of 64; 32 × M words.
        unsafe {
            let scale = L::from_f16(at(w));
            for group in 0..8 {
                let q = L::byte_floats(L::bytes(at(w.add(32 + 64 * group))));
                for j in 0..4 {
                    let weight = scale.mul(q[j].sub(L::splat(128.0)));
                    add_products(weight, a.add((4 * group + j) * M), acc);
                }
            }
        }
    }
}

impl Weights for Q4_1 {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = tile_unit(StoredType::Q4_1).1;
    const STEP_WORDS: usize = BLOCK;
    const QUANTIZED: bool = false;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: 32 bytes of scales, 32 of minima, then 4 groups of 64; 32 × M words.
        unsafe {
            let (scale, minimum) = (L::from_f16(at(w)), L::from_f16(at(w.add(32))));
            for group in 0..4 {
                let bytes = L::bytes(at(w.add(64 + 64 * group)));
                let (low, high) = (L::byte_floats(L::low_nibbles(bytes)), L::byte_floats(L::high_nibbles(bytes)));
                for j in 0..4 {
                    add_products(scale.fma(low[j], minimum), a.add((8 * group + j) * M), acc);
                }
                for j in 0..4 {
                    add_products(scale.fma(high[j], minimum), a.add((8 * group + 4 + j) * M), acc);
                }
            }
        }
    }
}

impl Weights for Int8<Q8_0> {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = tile_unit(StoredType::Q8_0).1;
    const STEP_WORDS: usize = BLOCK_WORDS;
    const QUANTIZED: bool = true;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: 32 bytes of scales, then 8 groups of 64; 11 × M words.
        unsafe {
            let mut dots = [L::int_splat(0); M];
            for m in 0..M {
                dots[m] = L::offset_start(*a.add(9 * M + m) as i32);
            }
            for group in 0..8 {
                L::prefetch(w.wrapping_add(AHEAD + 64 * group));
                let bytes = L::bytes(at(w.add(32 + 64 * group)));
                for m in 0..M {
                    dots[m] = L::dot_offset(dots[m], bytes, *a.add(group * M + m) as i32);
                }
            }
            let scale = L::from_f16(at(w));
            for m in 0..M {
                let both = scale.mul(L::splat(f32::from_bits(*a.add(8 * M + m))));
                acc[m] = L::int_to_float(dots[m]).fma(both, acc[m]);
            }
        }
    }
}

impl Weights for Int8<Q4_1> {
    const STEP: usize = BLOCK;
    const STEP_BYTES: usize = tile_unit(StoredType::Q4_1).1;
    const STEP_WORDS: usize = BLOCK_WORDS;
    const QUANTIZED: bool = true;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: 32 bytes of scales, 32 of minima, then 4 groups of 64; 11 × M words.
        unsafe {
            let mut dots = [L::int_splat(0); M];
            L::prefetch(w.wrapping_add(AHEAD));
            for group in 0..4 {
                L::prefetch(w.wrapping_add(AHEAD + 64 + 64 * group));
                let bytes = L::bytes(at(w.add(64 + 64 * group)));
                let (low, high) = (L::low_nibbles(bytes), L::high_nibbles(bytes));
                for m in 0..M {
                    dots[m] = L::dot_nibbles(dots[m], low, *a.add(2 * group * M + m) as i32);
                }
                for m in 0..M {
                    dots[m] = L::dot_nibbles(dots[m], high, *a.add((2 * group + 1) * M + m) as i32);
                }
            }
            let (scale, minimum) = (L::from_f16(at(w)), L::from_f16(at(w.add(32))));
            for m in 0..M {
                let both = scale.mul(L::splat(f32::from_bits(*a.add(8 * M + m))));
                acc[m] = L::int_to_float(dots[m]).fma(both, acc[m]);
                acc[m] = minimum.fma(L::splat(f32::from_bits(*a.add(10 * M + m))), acc[m]);
            }
        }
    }
}
