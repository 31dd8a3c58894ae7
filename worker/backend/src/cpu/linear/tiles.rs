//! Int8 products on AMX: a tile of sixteen weight rows times sixteen input rows, a step of K at a time.
//!
//! A stretch of the weights is unpacked once for a group of panels. The sums of a step are whole numbers; what is done
//! with them is what `Int8Activations` does, so an element has the same bits.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use super::weights::add_scaled;
use super::{PartialSums, ProductJob, TileProduct};
use crate::cpu::amx::{TILE_ROWS, TileShape, TileSums};
use crate::cpu::digits::DigitPacking;
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::Lanes;
use crate::cpu::pack::MatrixPart;
use crate::cpu::panels::{BLOCK, BLOCK_WORDS, Operand};
use crate::cpu::quants::{COLUMN_BYTES, Packing, Quant, ScaleLayout, SharedScales, StepScale};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// From so many rows on, tiles are faster than vectors.
const ROWS_MIN: usize = 48;
/// Rows of a panel.
const M: usize = TILE_ROWS;
/// Steps that are unpacked at a time: they stay in the L1 cache.
const STRETCH: usize = 32;
/// Products that are begun before the sums of an earlier one are read.
const AHEAD: usize = 4;
/// Panels that share an unpacked stretch.
const GROUP: usize = 8;

/// Whether there are tile products for weights of this packing. The scales of half steps would take twice as many, and
/// digits of fewer bits unpack faster than tiles are stored.
pub(super) const fn can_multiply(packing: &Packing) -> bool {
    packing.has_wide_digits() && !packing.has_halves
}

pub(super) fn are_faster(packing: &Packing, n_rows: usize) -> bool {
    can_multiply(packing) && n_rows >= ROWS_MIN
}

/// Some weight tiles of one part, times all rows.
pub(super) struct Int8Tiles<'a, Q> {
    pub product: &'a ProductJob<'a>,
    pub part: &'a MatrixPart,
    pub tiles: Range<usize>,
    pub weights: PhantomData<Q>,
}

impl<Q: Quant> Kernel for Int8Tiles<'_, Q> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let shape = TileShape::new(M, BLOCK);
        let n_panels = Operand::Int8Tiles.n_panels(self.product.n_rows);
        for tile in self.tiles.clone() {
            for first in (0..n_panels).step_by(GROUP) {
                let panels = first..n_panels.min(first + GROUP);
                self.by_stretches::<L>(&shape, tile, panels);
            }
        }
    }
}

impl<Q: Quant> Int8Tiles<'_, Q> {
    /// One weight tile times a group of panels.
    #[inline(always)]
    fn by_stretches<L: Lanes>(&self, shape: &TileShape, tile: usize, panels: Range<usize>) {
        let matrix = self.product.matrix;
        let mut sums: [PanelSums<L>; GROUP] = std::array::from_fn(|_| PanelSums::new());
        let mut weights = [const { MaybeUninit::<UnpackedStep<L>>::uninit() }; STRETCH];
        let mut unpacked = Unpacking::<L, Q>::new(self, tile);
        let (mut k, mut plane) = (0, 0);
        for leaf in &matrix.leaves {
            while k < leaf.k_end {
                let n = STRETCH.min((leaf.k_end - k) / BLOCK);
                for (i, step) in weights[..n].iter_mut().enumerate() {
                    // SAFETY: so many steps of the tile are left.
                    unsafe { unpacked.read(k + i * BLOCK, step) };
                }
                for (sums, i) in sums.iter_mut().zip(panels.clone()) {
                    // SAFETY: the steps were just unpacked, and the panel was filled.
                    unsafe { self.add_stretch(shape, &weights[..n], i, k / BLOCK, &mut sums.acc) };
                }
                k += n * BLOCK;
            }
            for (sums, i) in sums.iter_mut().zip(panels.clone()) {
                sums.pile.push(sums.acc, leaf.n_merges);
                sums.acc = [L::splat(0.0); M];
                if leaf.ends_run {
                    let panel = Operand::Int8Tiles.panel(self.product.n_rows, i);
                    let cut = TileProduct { product: self.product, part: self.part, tile, panel };
                    cut.store(plane, 0, &sums.pile.pop());
                }
            }
            plane += usize::from(leaf.ends_run);
        }
    }

    /// acc += the product over some steps, for a panel's rows.
    ///
    /// # Safety
    /// The weights are initialized; the panel has so many steps from `step` on.
    #[inline(always)]
    unsafe fn add_stretch<L: Lanes>(
        &self,
        shape: &TileShape,
        weights: &[MaybeUninit<UnpackedStep<L>>],
        panel: usize,
        step: usize,
        acc: &mut [L; M],
    ) {
        let words = M * Operand::Int8Tiles.step_words::<L>(self.product.matrix.k);
        let panels = self.product.panels[Operand::Int8Tiles as usize];
        let n = weights.len();
        let mut sums = [const { MaybeUninit::<TileSums>::uninit() }; 2 * AHEAD];
        let mut kept = *acc;
        // SAFETY: the caller's promise; each sum is read after its product has written it.
        unsafe {
            let a = panels.add(panel * words + step * M * BLOCK_WORDS);
            let stretch = PanelStretch { shape, weights, a };
            for first in (0..n + AHEAD).step_by(AHEAD) {
                stretch.go_on::<Q, 0>(first, n, &mut sums, &mut kept);
                stretch.go_on::<Q, 1>(first, n, &mut sums, &mut kept);
                stretch.go_on::<Q, 2>(first, n, &mut sums, &mut kept);
                stretch.go_on::<Q, 3>(first, n, &mut sums, &mut kept);
            }
        }
        *acc = kept;
    }
}

/// Some steps of a weight tile and of a panel.
struct PanelStretch<'a, L> {
    shape: &'a TileShape,
    /// Initialized.
    weights: &'a [MaybeUninit<UnpackedStep<L>>],
    /// The panel's words of these steps.
    a: *const u32,
}

impl<L: Lanes> PanelStretch<'_, L> {
    /// Begins the product of step `first + I`, and adds to acc the sums of the one that was begun `AHEAD` before it.
    ///
    /// # Safety
    /// There are n steps, and they are begun in order.
    #[inline(always)]
    unsafe fn go_on<Q: Quant, const I: usize>(
        &self,
        first: usize,
        n: usize,
        sums: &mut [MaybeUninit<TileSums>; 2 * AHEAD],
        acc: &mut [L; M],
    ) {
        let i = first + I;
        // SAFETY: the caller's promise; a product writes the sums of M rows before they are read.
        unsafe {
            if i < n {
                self.begin::<I>(i, &mut *sums[i % (2 * AHEAD)].as_mut_ptr());
            }
            if i >= AHEAD && i - AHEAD < n {
                let i = i - AHEAD;
                self.add_scaled::<Q>(i, sums[i % (2 * AHEAD)].assume_init_ref(), acc);
            }
        }
    }

    /// # Safety
    /// There is a step i.
    #[inline(always)]
    unsafe fn begin<const I: usize>(&self, i: usize, sums: &mut TileSums) {
        // SAFETY: the caller's promise.
        unsafe {
            let left = self.a.add(i * M * BLOCK_WORDS).cast();
            let step = self.weights.get_unchecked(i).assume_init_ref();
            self.shape.product::<I>(left, BLOCK, step.digits.as_ptr().cast(), sums);
        }
    }

    /// acc += sums × scales, and what the minimum adds.
    ///
    /// # Safety
    /// These are the sums of step i.
    #[inline(always)]
    unsafe fn add_scaled<Q: Quant>(&self, i: usize, sums: &TileSums, acc: &mut [L; M]) {
        // SAFETY: the caller's promise.
        unsafe {
            let a = self.a.add(i * M * BLOCK_WORDS);
            let of = self.weights.get_unchecked(i).assume_init_ref().scale;
            let mut dots = [L::int_splat(0); M];
            for m in 0..M {
                dots[m] = L::bytes(&sums.0[m]);
            }
            add_scaled::<L, Q, M>(of, &dots, (a, M), a.add(10 * M), acc);
        }
    }
}

/// A step of a weight tile as AMX multiplies it: signed digits, in groups of four.
#[repr(C, align(64))]
struct UnpackedStep<L> {
    digits: [[u8; 64]; 8],
    scale: StepScale<L>,
}

/// Where the unpacking of a weight tile stands.
struct Unpacking<'a, L, Q> {
    part: &'a MatrixPart,
    head: SharedScales<L>,
    w: *const u8,
    weights: PhantomData<Q>,
}

impl<'a, L: Lanes, Q: Quant> Unpacking<'a, L, Q> {
    #[inline(always)]
    fn new(of: &Int8Tiles<'a, Q>, tile: usize) -> Unpacking<'a, L, Q> {
        let start = of.part.start + tile * of.part.tile_bytes;
        debug_assert!(start + of.part.tile_bytes <= of.product.matrix.pages.bytes().len());
        let w = of.product.matrix.pages.start().wrapping_add(start).cast_const();
        Unpacking { part: of.part, head: SharedScales::none(), w, weights: PhantomData }
    }

    /// Unpacks the next step, which is at `k`.
    ///
    /// # Safety
    /// The tile has a step there.
    #[inline(always)]
    unsafe fn read(&mut self, k: usize, to: &mut MaybeUninit<UnpackedStep<L>>) {
        let form = self.part.header_form();
        // SAFETY: the caller's promise; every field is written.
        unsafe {
            if Q::PACKING.head.bytes() > 0 && form.is_before(self.part.first, k) {
                self.head = SharedScales::read(form, self.w);
                self.w = self.w.add(form.bytes());
            }
            let to = &mut *to.as_mut_ptr();
            let digits = self.w.add(Q::PACKING.scale_columns * COLUMN_BYTES);
            for i in 0..4 {
                for (j, digits) in Q::Digits::pair::<L>(digits, i).into_iter().enumerate() {
                    L::bytes_minus(digits, Q::OFFSET, &mut to.digits[2 * i + j]);
                }
            }
            to.scale = Q::Scales::read(&self.head, self.w)[0];
            self.w = self.w.add(Q::PACKING.step_bytes);
        }
    }
}

/// The sums of a panel with one weight tile: of the leaf that is being added, and of those before it.
struct PanelSums<L> {
    acc: [L; M],
    pile: PartialSums<L, M>,
}

impl<L: Lanes> PanelSums<L> {
    #[inline(always)]
    fn new() -> PanelSums<L> {
        PanelSums { acc: [L::splat(0.0); M], pile: PartialSums::new() }
    }
}
