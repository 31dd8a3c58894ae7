//! Products with packed weights: a tile of sixteen weight rows times a panel of input rows.
//!
//! Each element accumulates along K in one chain, whatever the panel's width: a row's bits do not depend on its
//! neighbours.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

mod tiles;
mod weights;

use super::digits::Width;
use super::formats::{FormatVisitor, packing, visit};
use super::isa::{Isa, Kernel, dispatch, dispatch_pairs, dispatch_tiles};
use super::lanes::{LANES, Lanes};
use super::memory::{HostMemory, SharedPtr};
use super::pack::{DEPTH_MAX, LeafEnd, Matrix, MatrixPart};
use super::panels::{Fill, Operand, PANEL_ROWS, Panel};
use super::quants::{Quant, SharedScales};
use super::{Buffer, Cpu, CpuConfig, panels};
use crate::Linear;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use tiles::Int8Tiles;
use types::{Activations, Dtype};
use weights::{Bf16Pairs, F8Weights, F16Weights, F32Weights, FloatActivations, Int8Activations, WeightKernel};

impl Linear for Cpu {
    fn linear(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        assert_eq!(w.n_runs, 1, "`linear` requires a matrix whose leaves end in one run");
        self.multiply(x, w, n_rows, out);
    }

    fn linear_runs(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        self.multiply(x, w, n_rows, out);
    }
}

impl Cpu {
    /// Fills the scratch panels with the rows of x as an operand.
    fn fill(&self, x: &[f32], k: usize, n_rows: usize, to: &HostMemory, operand: Operand) {
        let (to, isa) = (SharedPtr::new(to.start().cast::<u32>()), self.config.isa);
        self.team.run(operand.n_panels(n_rows), &|panels| {
            let fill = Fill { x, k, n_rows, panels, to, operand };
            if operand == Operand::Bf16 { dispatch_pairs(isa, fill) } else { dispatch(isa, fill) }
        });
    }

    pub(super) fn multiply(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        let x = x.rows(n_rows, w.k);
        let out = out.shared(w.n_runs * n_rows, w.n_out);
        if w.n_out == 0 || w.n_runs == 0 {
            return;
        }
        let scratch = self.scratch();
        assert!(
            panels::n_words(n_rows, w.k).is_some_and(|n| n <= scratch.n_words),
            "the scratch is smaller than x's panels"
        );
        let panels = scratch.panels.each_ref().map(|panels| panels.start().cast::<u32>().cast_const());
        let CpuConfig { isa, activations, .. } = self.config;
        let product = ProductJob { matrix: w, panels, isa, activations, n_rows, out };
        for (of, panels) in Operand::ALL.into_iter().zip(&scratch.panels) {
            if w.parts.iter().any(|part| product.operand(part.dtype) == of) {
                self.fill(x, w.k, n_rows, panels, of);
            }
        }
        self.team.run(w.n_tiles(), &|tiles| product.run(tiles));
    }
}

/// One product; `run` computes some of its tiles.
#[derive(Clone, Copy)]
pub(crate) struct ProductJob<'a> {
    pub matrix: &'a Matrix,
    /// The same rows as each operand. Only those that a part meets are filled.
    pub panels: [*const u32; 4],
    pub isa: Isa,
    pub activations: Activations,
    pub n_rows: usize,
    /// [n_runs, n_rows, n_out]
    pub out: SharedPtr<f32>,
}

// SAFETY: the panels are only read while the product is computed.
unsafe impl Sync for ProductJob<'_> {}

impl ProductJob<'_> {
    /// What activations are where they meet a weight of this type.
    fn operand(&self, dtype: Dtype) -> Operand {
        let packing = packing(dtype);
        match packing.width {
            _ if self.activations == Activations::F32 => Operand::Floats,
            Width::Element | Width::E4M3 => Operand::Floats,
            Width::Pair => Operand::Bf16,
            _ if self.isa == Isa::Amx && tiles::are_faster(&packing, self.n_rows) => Operand::Int8Tiles,
            _ => Operand::Int8,
        }
    }

    pub fn run(&self, tiles: Range<usize>) {
        for part in &self.matrix.parts {
            let start = tiles.start.max(part.first_tile);
            let end = tiles.end.min(part.first_tile + part.n_tiles());
            if start < end {
                let tiles = start - part.first_tile..end - part.first_tile;
                visit(part.dtype, PartTiles { product: self, part, tiles });
            }
        }
    }
}

/// The product with some tiles of one part, in its format.
struct PartTiles<'a> {
    product: &'a ProductJob<'a>,
    part: &'a MatrixPart,
    tiles: Range<usize>,
}

impl<'a> PartTiles<'a> {
    fn operand(&self) -> Operand {
        self.product.operand(self.part.dtype)
    }

    fn run_as<W: WeightKernel>(self) {
        dispatch(self.product.isa, self.tiles_as::<W>());
    }

    fn tiles_as<W>(self) -> ProductTiles<'a, W> {
        ProductTiles { product: self.product, part: self.part, tiles: self.tiles, weights: PhantomData }
    }
}

impl FormatVisitor for PartTiles<'_> {
    type Output = ();

    fn f32(self) {
        self.run_as::<F32Weights>();
    }

    fn f16(self) {
        self.run_as::<F16Weights>();
    }

    fn bf16(self) {
        match self.operand() {
            Operand::Bf16 => dispatch_pairs(self.product.isa, self.tiles_as::<Bf16Pairs>()),
            _ => self.run_as::<FloatActivations<Bf16Pairs>>(),
        }
    }

    fn e4m3(self) {
        self.run_as::<F8Weights>();
    }

    fn quantized<Q: Quant>(self) {
        match self.operand() {
            Operand::Int8 => self.run_as::<Int8Activations<Q>>(),
            Operand::Int8Tiles if const { tiles::can_multiply(&Q::PACKING) } => {
                let PartTiles { product, part, tiles } = self;
                dispatch_tiles(Int8Tiles::<Q> { product, part, tiles, weights: PhantomData });
            }
            _ => self.run_as::<FloatActivations<Q>>(),
        }
    }
}

/// Some tiles of one part. Generic, so that each weight type gets a function of its own.
struct ProductTiles<'a, W> {
    product: &'a ProductJob<'a>,
    part: &'a MatrixPart,
    tiles: Range<usize>,
    weights: PhantomData<W>,
}

impl<W: WeightKernel> Kernel for ProductTiles<'_, W> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for tile in self.tiles.clone() {
            tile_by_panels::<L, W>(self.product, self.part, tile);
        }
    }
}

#[inline(always)]
fn tile_by_panels<L: Lanes, W: WeightKernel>(product: &ProductJob<'_>, part: &MatrixPart, tile: usize) {
    for i in 0..W::OPERAND.n_panels(product.n_rows) {
        let panel = W::OPERAND.panel(product.n_rows, i);
        let cut = TileProduct { product, part, tile, panel };
        match panel.width {
            1 => cut.compute::<L, W, 1>(0, 1),
            width if L::SUMS < 4 => cut.compute_two_at_a_time::<L, W>(width),
            2 => cut.compute::<L, W, 2>(0, 2),
            4 => cut.compute_in_parts::<L, W, 4>(),
            8 => cut.compute_in_parts::<L, W, 8>(),
            _ => cut.compute_in_parts::<L, W, PANEL_ROWS>(),
        }
    }
}

/// How many rows of a wide panel leave their sums in registers.
const fn rows_at_once<L: Lanes, W: WeightKernel>(width: usize) -> usize {
    if L::SUMS < 16 { W::ROWS_MAX } else { width }
}

struct TileProduct<'a> {
    product: &'a ProductJob<'a>,
    part: &'a MatrixPart,
    tile: usize,
    panel: Panel,
}

impl TileProduct<'_> {
    /// All rows of a wide panel, as many at a time as leave their sums in registers. The tile's weights are read again
    /// for each part, from a near cache.
    #[inline(always)]
    fn compute_in_parts<L: Lanes, W: WeightKernel, const WIDTH: usize>(&self) {
        let n_rows = self.panel.n_rows;
        match const { rows_at_once::<L, W>(WIDTH) } {
            6 if WIDTH == PANEL_ROWS => {
                for first in (0..n_rows).step_by(6) {
                    self.compute::<L, W, 6>(first, WIDTH);
                }
            }
            4 | 6 => {
                for first in (0..n_rows).step_by(4) {
                    self.compute::<L, W, 4>(first, WIDTH);
                }
            }
            _ => self.compute::<L, W, WIDTH>(0, WIDTH),
        }
    }

    /// `compute_in_parts` for instructions with few registers. The width is not constant: this code is compiled once.
    #[inline(always)]
    fn compute_two_at_a_time<L: Lanes, W: WeightKernel>(&self, width: usize) {
        for first in (0..self.panel.n_rows).step_by(2) {
            self.compute::<L, W, 2>(first, width);
        }
    }

    /// M rows from `first` on, of a panel of `width` rows.
    #[inline(always)]
    fn compute<L: Lanes, W: WeightKernel, const M: usize>(&self, first: usize, width: usize) {
        let matrix = self.product.matrix;
        let (row_words, step_words) =
            (W::OPERAND.row_words::<L>(matrix.k), W::OPERAND.step_words::<L>(W::PACKING.unit));
        let panels = self.product.panels[W::OPERAND as usize];
        let start = self.part.start + self.tile * self.part.tile_bytes;
        debug_assert!(start + self.part.tile_bytes <= matrix.pages.bytes().len());
        // SAFETY: `pack` laid this tile out inside the pages; `panels::Fill` filled so many words of the panel.
        let (mut w, mut a) = unsafe {
            (matrix.pages.start().add(start).cast_const(), panels.add(self.panel.rows_start * row_words + first))
        };
        let mut pile = PartialSums::<L, M>::new();
        let (mut head, head_form) = (SharedScales::none(), self.part.header_form());
        let (mut k, mut plane) = (0, 0);
        for &LeafEnd { k_end, n_merges, ends_run } in &matrix.leaves {
            let mut acc = [L::splat(0.0); M];
            // Leaves end between pairs; a K that is odd does not, and its last pair has a zero.
            while k < k_end {
                // SAFETY: k is below the matrix's, so a step of the tile and of the panel is left.
                unsafe {
                    if W::PACKING.head.bytes() > 0 && head_form.is_before(self.part.first, k) {
                        head = SharedScales::read(head_form, w);
                        w = w.add(head_form.bytes());
                    }
                    W::step::<L, M>(&head, w, a, width, &mut acc);
                    w = w.add(W::PACKING.step_bytes);
                    a = a.add(step_words * width);
                }
                k += W::PACKING.unit;
            }
            pile.push(acc, n_merges);
            if ends_run {
                self.store(plane, first, &pile.pop());
                plane += 1;
            }
        }
    }

    #[inline(always)]
    fn store<L: Lanes, const M: usize>(&self, plane: usize, first: usize, acc: &[L; M]) {
        let n_out = self.product.matrix.n_out;
        let n_columns = LANES.min(self.part.rows - self.tile * LANES);
        let column = self.part.first_out + self.tile * LANES;
        for (lane, acc) in acc.iter().enumerate().take(self.panel.n_rows - first) {
            let row = plane * self.product.n_rows + self.panel.rows_start + first + lane;
            // SAFETY: the op checked that out holds all planes; these columns are this tile's, and one thread has it.
            let to = unsafe { self.product.out.part(row * n_out + column, n_columns) };
            match to.first_chunk_mut::<LANES>() {
                Some(whole) => acc.store(whole),
                None => acc.store_first(to),
            }
        }
    }
}

/// The stack of partial sums, one per unmerged run of leaves.
struct PartialSums<L, const M: usize> {
    sums: [MaybeUninit<[L; M]>; DEPTH_MAX],
    n: usize,
}

impl<L: Lanes, const M: usize> PartialSums<L, M> {
    #[inline(always)]
    fn new() -> PartialSums<L, M> {
        PartialSums { sums: [const { MaybeUninit::uninit() }; DEPTH_MAX], n: 0 }
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
