//! Products with packed weights: a tile of sixteen weight rows times a panel of input rows.
//!
//! Each element accumulates along K in one chain, whatever the panel's width: a row's bits do not depend on its
//! neighbours.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use super::formats::{FormatVisitor, packing, visit};
use super::isa::{Isa, Kernel, dispatch, dispatch_pairs};
use super::lanes::{LANES, Lanes, add_products};
use super::memory::{HostMemory, SharedPtr};
use super::pack::{DEPTH_MAX, LeafEnd, Matrix, MatrixPart};
use super::panels::{BLOCK, Fill, Operand, PANEL_ROWS, Panel, n_panels, panel};
use super::quants::{
    COLUMN_BYTES, DigitPacking, Packing, Quant, ScaleLayout, SharedScales, StepScale, Width, ref_at, unpack,
};
use super::{Buffer, Cpu, panels};
use crate::Linear;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use types::{Activations, Dtype};

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
        self.team.run(panels::n_panels(n_rows), &|panels| {
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
        let activations = self.config.activations;
        for (of, panels) in Operand::ALL.into_iter().zip(&scratch.panels) {
            if w.parts.iter().any(|part| operand(part.dtype, activations) == of) {
                self.fill(x, w.k, n_rows, panels, of);
            }
        }
        let panels = scratch.panels.each_ref().map(|panels| panels.start().cast::<u32>().cast_const());
        let product = ProductJob { matrix: w, panels, activations, n_rows, out };
        self.team.run(w.n_tiles(), &|tiles| product.run(self.config.isa, tiles));
    }
}

/// What activations are where they meet a weight of this type.
fn operand(dtype: Dtype, activations: Activations) -> Operand {
    match packing(dtype).width {
        _ if activations == Activations::F32 => Operand::Floats,
        Width::Element | Width::E4M3 => Operand::Floats,
        Width::Pair => Operand::Bf16,
        Width::Four | Width::Five | Width::Six | Width::Eight => Operand::Int8,
    }
}

/// One product; `run` computes some of its tiles.
#[derive(Clone, Copy)]
pub(crate) struct ProductJob<'a> {
    pub matrix: &'a Matrix,
    /// The same rows as each operand. Only those that a part meets are filled.
    pub panels: [*const u32; 3],
    pub activations: Activations,
    pub n_rows: usize,
    /// [n_runs, n_rows, n_out]
    pub out: SharedPtr<f32>,
}

// SAFETY: the panels are only read while the product is computed.
unsafe impl Sync for ProductJob<'_> {}

impl ProductJob<'_> {
    pub fn run(&self, isa: Isa, tiles: Range<usize>) {
        for part in &self.matrix.parts {
            let start = tiles.start.max(part.first_tile);
            let end = tiles.end.min(part.first_tile + part.n_tiles());
            if start < end {
                let tiles = start - part.first_tile..end - part.first_tile;
                visit(part.dtype, PartTiles { product: self, isa, part, tiles });
            }
        }
    }
}

/// The product with some tiles of one part, in its format.
struct PartTiles<'a> {
    product: &'a ProductJob<'a>,
    isa: Isa,
    part: &'a MatrixPart,
    tiles: Range<usize>,
}

impl<'a> PartTiles<'a> {
    fn operand(&self) -> Operand {
        operand(self.part.dtype, self.product.activations)
    }

    fn run_as<W: WeightKernel>(self) {
        dispatch(self.isa, self.tiles_as::<W>());
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
            Operand::Bf16 => dispatch_pairs(self.isa, self.tiles_as::<Bf16Pairs>()),
            _ => self.run_as::<FloatActivations<Bf16Pairs>>(),
        }
    }

    fn e4m3(self) {
        self.run_as::<F8Weights>();
    }

    fn quantized<Q: Quant>(self) {
        match self.operand() {
            Operand::Int8 => self.run_as::<Int8Activations<Q>>(),
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
    for i in 0..n_panels(product.n_rows) {
        let panel = panel(product.n_rows, i);
        let cut = TileProduct { product, part, tile, panel };
        match panel.width {
            1 => cut.compute::<L, W, 1>(),
            4 => cut.compute::<L, W, 4>(),
            8 => cut.compute::<L, W, 8>(),
            _ => cut.compute::<L, W, PANEL_ROWS>(),
        }
    }
}

/// How the kernels read one type of weight along K.
trait WeightKernel {
    const PACKING: Packing;
    /// What they meet.
    const OPERAND: Operand;

    /// acc += the product over one step.
    ///
    /// # Safety
    /// `w` is at a step of a tile, `a` at its words of a panel of width M.
    unsafe fn step<L: Lanes, const M: usize>(head: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]);
}

struct TileProduct<'a> {
    product: &'a ProductJob<'a>,
    part: &'a MatrixPart,
    tile: usize,
    panel: Panel,
}

impl TileProduct<'_> {
    #[inline(always)]
    fn compute<L: Lanes, W: WeightKernel, const M: usize>(&self) {
        let matrix = self.product.matrix;
        let (row_words, step_words) =
            (W::OPERAND.row_words::<L>(matrix.k), W::OPERAND.step_words::<L>(W::PACKING.unit));
        let panels = self.product.panels[W::OPERAND as usize];
        let start = self.part.start + self.tile * self.part.tile_bytes;
        debug_assert!(start + self.part.tile_bytes <= matrix.pages.bytes().len());
        // SAFETY: `pack` laid this tile out inside the pages; `panels::Fill` filled so many words of the panel.
        let (mut w, mut a) =
            unsafe { (matrix.pages.start().add(start).cast_const(), panels.add(self.panel.rows_start * row_words)) };
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
                    W::step(&head, w, a, &mut acc);
                    w = w.add(W::PACKING.step_bytes);
                    a = a.add(step_words * M);
                }
                k += W::PACKING.unit;
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

/// Prefetch distance for weights, in bytes: a few blocks. The hardware prefetcher does not cross a page of 4 KB.
const AHEAD: usize = 2304;

struct F32Weights;
struct F16Weights;
struct F8Weights;
/// Pairs of bf16 times pairs of bf16.
struct Bf16Pairs;
/// A quantized weight, or pairs of bf16, times f32 activations.
struct FloatActivations<Q>(PhantomData<Q>);
/// A quantized weight times int8 activations.
struct Int8Activations<Q>(PhantomData<Q>);

impl WeightKernel for F32Weights {
    const PACKING: Packing = Packing::F32;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(_: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise; tiles of f32 begin on 64 bytes.
        unsafe { add_products(L::load(ref_at(w)), a, acc) }
    }
}

impl WeightKernel for F16Weights {
    const PACKING: Packing = Packing::F16;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(_: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise; tiles begin on 32 bytes.
        unsafe { add_products(L::from_f16(ref_at(w)), a, acc) }
    }
}

impl WeightKernel for Bf16Pairs {
    const PACKING: Packing = Packing::BF16;
    const OPERAND: Operand = Operand::Bf16;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(_: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: sixteen pairs, and one of each row.
        unsafe { L::add_pairs(L::bytes(ref_at(w)), a, acc) }
    }
}

impl WeightKernel for FloatActivations<Bf16Pairs> {
    const PACKING: Packing = Packing::BF16;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(_: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: sixteen pairs, and 2 × M words.
        unsafe {
            let [even, odd] = L::pair_floats(L::bytes(ref_at(w)));
            add_products(even, a, acc);
            add_products(odd, a.add(M), acc);
        }
    }
}

impl WeightKernel for F8Weights {
    const PACKING: Packing = Packing::E4M3;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(_: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: a step, which begins on 64 bytes, and 32 × M words.
        unsafe {
            let (scale, numbers) = (L::load(ref_at(w)), w.add(Self::PACKING.scale_columns * COLUMN_BYTES));
            for k in 0..BLOCK {
                let number = L::from_e4m3(ref_at(numbers.add(LANES * k)));
                add_products(number.mul(scale), a.add(k * M), acc);
            }
        }
    }
}

impl<Q: Quant> WeightKernel for FloatActivations<Q> {
    const PACKING: Packing = Q::PACKING;
    const OPERAND: Operand = Operand::Floats;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(head: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        let mut numbers = [[0.0; LANES]; BLOCK];
        // SAFETY: the caller's promise: a step, and 32 × M words.
        unsafe {
            unpack::<L, Q>(head, w, &mut numbers);
            for k in 0..BLOCK {
                add_products(L::load(&numbers[k]), a.add(k * M), acc);
            }
        }
    }
}

impl<Q: Quant> WeightKernel for Int8Activations<Q> {
    const PACKING: Packing = Q::PACKING;
    const OPERAND: Operand = Operand::Int8;

    #[inline(always)]
    unsafe fn step<L: Lanes, const M: usize>(head: &SharedScales<L>, w: *const u8, a: *const u32, acc: &mut [L; M]) {
        // SAFETY: the caller's promise: a step, and 12 × M words.
        unsafe {
            let digits = w.add(Q::PACKING.scale_columns * COLUMN_BYTES);
            if Q::Scales::TWO {
                let first = dots::<L, Q, M>(0..2, digits, a, a.add(11 * M));
                let second = dots::<L, Q, M>(2..4, digits, a, a.add(12 * M));
                let scales = Q::Scales::read(head, w);
                add_scaled::<L, Q, M>(scales[0], &first, a, a.add(13 * M), acc);
                add_scaled::<L, Q, M>(scales[1], &second, a, a.add(14 * M), acc);
            } else {
                let whole = dots::<L, Q, M>(0..4, digits, a, a.add(9 * M));
                let scales = Q::Scales::read(head, w);
                add_scaled::<L, Q, M>(scales[0], &whole, a, a.add(10 * M), acc);
            }
        }
    }
}

/// The integer products over some pairs of groups; `sums` has the sums of their activations.
///
/// # Safety
/// The digits of a step are at `digits`; the pairs are below 4; M × 8 words at `a` and M at `sums`.
#[inline(always)]
unsafe fn dots<L: Lanes, Q: Quant, const M: usize>(
    pairs: Range<usize>,
    digits: *const u8,
    a: *const u32,
    sums: *const u32,
) -> [L::Int; M] {
    let is_wide = Q::Digits::WIDTH as usize == Width::Eight as usize;
    let n_lines = Q::PACKING.step_bytes.div_ceil(64);
    let mut dots = [L::int_splat(0); M];
    // SAFETY: the caller's promise.
    unsafe {
        for m in 0..M {
            let sum = *sums.add(m) as i32;
            dots[m] = if is_wide { L::offset_start(sum) } else { L::int_splat(-i32::from(Q::OFFSET) * sum) };
        }
        for i in pairs {
            for line in n_lines * i / 4..n_lines * (i + 1) / 4 {
                L::prefetch(digits.wrapping_add(AHEAD + 64 * line));
            }
            let pair = Q::Digits::pair::<L>(digits, i);
            for j in 0..2 {
                for m in 0..M {
                    let four = *a.add((2 * i + j) * M + m) as i32;
                    dots[m] = match is_wide {
                        true => L::dot_offset(dots[m], pair[j], four),
                        false => L::dot_small(dots[m], pair[j], four),
                    };
                }
            }
        }
    }
    dots
}

/// acc += dots × scales, and what the minimum adds: `scaled_sums` are of the activations, times their scale.
///
/// # Safety
/// 15 × M words at `a`, M at `scaled_sums`.
#[inline(always)]
unsafe fn add_scaled<L: Lanes, Q: Quant, const M: usize>(
    of: StepScale<L>,
    dots: &[L::Int; M],
    a: *const u32,
    scaled_sums: *const u32,
    acc: &mut [L; M],
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let (scale, sum) = unsafe { (f32::from_bits(*a.add(8 * M + m)), f32::from_bits(*scaled_sums.add(m))) };
        acc[m] = L::int_to_float(dots[m]).fma(of.scale.mul(L::splat(scale)), acc[m]);
        if Q::Scales::HAS_MINIMUM {
            acc[m] = of.minimum.fma(L::splat(sum), acc[m]);
        }
    }
}
