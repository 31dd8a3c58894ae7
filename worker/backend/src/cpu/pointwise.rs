//! Operations on each row alone, between the products.

use super::between::{AddBias, norm};
use super::formats::{FormatVisitor, packing, visit};
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::math::{clamped_silu, gelu, gelu_erf, silu};
use super::memory::SharedPtr;
use super::pack::{Matrix, MatrixPart};
use super::panels::BLOCK;
use super::quants::{COLUMN_BYTES, Packing, Quant, SharedScales, ref_at, unpack};
use super::{Buffer, Cpu, Vector, between, kv, pairs};
use crate::{AttentionHeads, Clamp, ElementOp, Gate, HeadNorms, Pass, Pointwise};
use half::f16;
use std::marker::PhantomData;
use std::ops::Range;

impl Pointwise for Cpu {
    fn embed(&self, table: &Matrix, first: u32, tokens: &[u32], out: &mut Buffer) {
        let out = out.shared(tokens.len(), table.k);
        self.run_on_team(tokens.len(), |rows| Embed { table, first, tokens, out, rows });
    }

    fn rms_norm(&self, x: &Buffer, weight: &Vector, eps: f32, n_rows: usize, out: &mut Buffer) {
        let x = x.rows(n_rows, weight.len());
        let out = out.shared(n_rows, weight.len());
        self.run_on_team(n_rows, |rows| RmsNorm { x, residual: None, weight, eps, out, rows });
    }

    fn add_rms_norm(
        &self,
        x: &Buffer,
        residual: &mut Buffer,
        weight: &Vector,
        eps: f32,
        n_rows: usize,
        out: &mut Buffer,
    ) {
        let x = x.rows(n_rows, weight.len());
        let residual = Some(residual.shared(n_rows, weight.len()));
        let out = out.shared(n_rows, weight.len());
        self.run_on_team(n_rows, |rows| RmsNorm { x, residual, weight, eps, out, rows });
    }

    fn add(&self, x: &Buffer, residual: &mut Buffer, n_rows: usize) {
        let cols = residual.cols();
        let x = x.rows(n_rows, cols);
        let residual = residual.shared(n_rows, cols);
        self.run_on_team(n_rows, |rows| Add { x, residual, cols, rows });
    }

    fn add_bias(&self, x: &mut Buffer, bias: &Vector, n_rows: usize) {
        let x = x.shared(n_rows, bias.len());
        self.run_on_team(n_rows, |rows| AddBias { x, bias, rows });
    }

    fn map(&self, x: &mut Buffer, op: ElementOp, n_rows: usize) {
        let cols = x.cols();
        let x = x.shared(n_rows, cols);
        self.run_on_team(n_rows, |rows| between::Elementwise { x, cols, op, rows });
    }

    fn apply_gate(&self, gate_up: &Buffer, gate: Gate, n_rows: usize, out: &mut Buffer) {
        let inner = out.cols();
        let gate_up = gate_up.rows(n_rows, 2 * inner);
        let out = out.shared(n_rows, inner);
        self.run_on_team(n_rows, |rows| GatedRows { gate, gate_up, inner, out, rows });
    }

    fn gather(&self, x: &Buffer, rows: &[u32], out: &mut Buffer) {
        let cols = x.cols();
        let out = out.rows_mut(rows.len(), cols);
        for (&row, to) in rows.iter().zip(out.chunks_exact_mut(cols)) {
            to.copy_from_slice(x.row(row as usize));
        }
    }

    fn norm_heads(&self, qkv: &mut Buffer, heads: &AttentionHeads, norms: &HeadNorms<'_, Vector>, n_rows: usize) {
        let mut weights = [norms.q, norms.k].into_iter().chain(norms.v);
        assert!(weights.all(|weight| weight.len() == heads.head_dim), "weights are as long as a head");
        assert!(heads.head_dim <= kv::HEAD_DIM_MAX, "a head of {}", heads.head_dim);
        let qkv = qkv.shared(n_rows, heads.qkv_cols());
        self.run_on_team(n_rows, |rows| between::NormEachHead { qkv, heads, norms, rows });
    }

    fn layer_norm(&self, x: &Buffer, weight: &Vector, bias: &Vector, eps: f32, n_rows: usize, out: &mut Buffer) {
        let x = x.rows(n_rows, weight.len());
        let out = out.shared(n_rows, bias.len());
        self.run_on_team(n_rows, |rows| between::LayerNorm { x, weight, bias, eps, out, rows });
    }

    fn scale_queries(&self, qkv: &mut Buffer, heads: &AttentionHeads, factors: &Vector, pass: &Pass<'_>) {
        let (n_rows, n_cols, n) = (pass.n_rows(), heads.qkv_cols(), heads.n_heads * heads.head_dim);
        let (qkv, positions) = (qkv.shared(n_rows, n_cols), pass.rows.positions);
        self.run_on_team(n_rows, |rows| between::ScaleQueriesByPosition { qkv, n_cols, n, factors, positions, rows });
    }

    fn copy_columns(
        &self,
        from: &Buffer,
        rows: Range<usize>,
        columns: Range<usize>,
        to: &mut Buffer,
        to_row: usize,
        to_col: usize,
    ) {
        let (n, ld) = (columns.len(), to.cols());
        assert!(to_col + n <= ld, "{n} columns from {to_col} on of {ld}");
        let to = to.rows_mut(to_row + rows.len(), ld);
        for (row, from_row) in (to_row..).zip(rows) {
            to[row * ld + to_col..][..n].copy_from_slice(&from.row(from_row)[columns.clone()]);
        }
    }

    fn norm_columns(
        &self,
        x: &mut Buffer,
        columns: Range<usize>,
        whole: &Buffer,
        weight: &Vector,
        eps: f32,
        n_rows: usize,
    ) {
        let (n_cols, n, first) = (x.cols(), whole.cols(), columns.start);
        assert!(columns.len() == weight.len() && columns.end <= n_cols, "a weight for each column");
        let (whole, x) = (whole.rows(n_rows, n), x.shared(n_rows, n_cols));
        self.run_on_team(n_rows, |rows| between::NormColumns { x, n_cols, first, whole, n, weight, eps, rows });
    }

    fn sigmoid_mul(&self, gate: &Buffer, n_rows: usize, x: &mut Buffer) {
        let (n, cols) = (gate.cols(), x.cols());
        if cols == 0 {
            return;
        }
        assert!(n > 0 && cols.is_multiple_of(n), "a gate of {n} for rows of {cols}");
        let (gate, x) = (gate.rows(n_rows, n), x.shared(n_rows, cols));
        self.run_on_team(n_rows, |rows| between::SigmoidMul { gate, n, x, cols, rows });
    }
}

/// out = norm(x) * weight, where x may first be added to the residual stream.
pub(crate) struct RmsNorm<'a> {
    pub x: &'a [f32],
    pub residual: Option<SharedPtr<f32>>,
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: SharedPtr<f32>,
    pub rows: Range<usize>,
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = self.weight.len();
        for row in self.rows.clone() {
            let x = &self.x[row * n..][..n];
            // SAFETY: the op checked the shapes; one thread has each row.
            let out = unsafe { self.out.part(row * n, n) };
            match self.residual {
                None => norm::<L>(x, self.weight, self.eps, out),
                Some(residual) => {
                    // SAFETY: as above.
                    let residual = unsafe { residual.part(row * n, n) };
                    residual.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                    norm::<L>(residual, self.weight, self.eps, out);
                }
            }
        }
    }
}

impl Gate {
    #[inline(always)]
    fn apply<L: Lanes>(self, gate: L, up: L) -> L {
        match self {
            Gate::Silu => silu(gate).mul(up),
            Gate::Gelu => gelu(gate).mul(up),
            Gate::GeluErf => gelu_erf(gate).mul(up),
            Gate::Clamped(Clamp { alpha, limit }) => clamped_silu(gate, up, L::splat(alpha), L::splat(limit)),
        }
    }
}

/// out = gate(gate, up). gate_up: [n_rows, 2 * inner]
pub(crate) struct GatedRows<'a> {
    pub gate: Gate,
    pub gate_up: &'a [f32],
    pub inner: usize,
    pub out: SharedPtr<f32>,
    pub rows: Range<usize>,
}

impl Kernel for GatedRows<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in self.rows.clone() {
            let (gate, up) = self.gate_up[row * 2 * self.inner..][..2 * self.inner].split_at(self.inner);
            // SAFETY: the op checked the shapes; one thread has each row.
            let out = unsafe { self.out.part(row * self.inner, self.inner) };
            for ((gate, up), out) in gate.chunks(LANES).zip(up.chunks(LANES)).zip(out.chunks_mut(LANES)) {
                match (gate.first_chunk(), up.first_chunk(), out.first_chunk_mut()) {
                    (Some(gate), Some(up), Some(out)) => self.gate.apply(L::load(gate), L::load(up)).store(out),
                    _ => self.gate.apply(L::load_first(gate), L::load_first(up)).store_first(out),
                }
            }
        }
    }
}

/// residual += x
pub(crate) struct Add<'a> {
    pub x: &'a [f32],
    pub residual: SharedPtr<f32>,
    pub cols: usize,
    pub rows: Range<usize>,
}

impl Kernel for Add<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (start, n) = (self.rows.start * self.cols, self.rows.len() * self.cols);
        // SAFETY: the op checked the shapes; one thread has each row.
        let residual = unsafe { self.residual.part(start, n) };
        residual.iter_mut().zip(&self.x[start..start + n]).for_each(|(sum, x)| *sum += x);
    }
}

/// out[i] = row `tokens[i] - first` of a packed table, as f32, where the table has it.
pub(crate) struct Embed<'a> {
    pub table: &'a Matrix,
    pub first: u32,
    pub tokens: &'a [u32],
    pub out: SharedPtr<f32>,
    pub rows: Range<usize>,
}

impl Kernel for Embed<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = self.table.k;
        for row in self.rows.clone() {
            let Some(at) = self.tokens[row].checked_sub(self.first).map(|at| at as usize) else { continue };
            if at < self.table.n_out {
                // SAFETY: the op checked the shapes; one thread has each row.
                let out = unsafe { self.out.part(row * n, n) };
                unpack_row::<L>(self.table, at, out);
            }
        }
    }
}

#[inline(always)]
fn unpack_row<L: Lanes>(table: &Matrix, row: usize, out: &mut [f32]) {
    let is_within = |part: &&MatrixPart| (part.first_out..part.first_out + part.rows).contains(&row);
    let part = table.parts.iter().find(is_within).expect("a row of the table is in one of its parts");
    let (tile, lane) = ((row - part.first_out) / LANES, (row - part.first_out) % LANES);
    let tile = &table.pages.bytes()[part.start + tile * part.tile_bytes..][..part.tile_bytes];
    visit(part.dtype, UnpackRow { part, tile, lane, out, lanes: PhantomData::<L> });
}

/// Unpacks one row of a tile, in the format of its part.
struct UnpackRow<'a, L> {
    part: &'a MatrixPart,
    tile: &'a [u8],
    lane: usize,
    out: &'a mut [f32],
    lanes: PhantomData<L>,
}

impl<L: Lanes> FormatVisitor for UnpackRow<'_, L> {
    type Output = ();

    #[inline(always)]
    fn f32(self) {
        unpack_elements(self.tile, self.lane, f32::from_le_bytes, self.out);
    }

    #[inline(always)]
    fn f16(self) {
        unpack_elements(self.tile, self.lane, |bytes| f16::from_le_bytes(bytes).to_f32(), self.out);
    }

    #[inline(always)]
    fn bf16(self) {
        pairs::unpack_row(self.tile, self.lane, self.out);
    }

    #[inline(always)]
    fn e4m3(self) {
        unpack_e4m3::<L>(self.tile, self.lane, self.out);
    }

    #[inline(always)]
    fn quantized<Q: Quant>(self) {
        unpack_steps::<L, Q>(self.part, self.tile, self.lane, self.out);
    }
}

#[inline(always)]
fn unpack_elements<const SIZE: usize>(tile: &[u8], lane: usize, of: impl Fn([u8; SIZE]) -> f32, out: &mut [f32]) {
    for (from, to) in tile.chunks_exact(SIZE * LANES).zip(out) {
        *to = of(element(from, lane));
    }
}

#[inline(always)]
fn unpack_e4m3<L: Lanes>(tile: &[u8], lane: usize, out: &mut [f32]) {
    let packing = Packing::E4M3;
    let mut row = [0.0; LANES];
    for (step, to) in tile.chunks_exact(packing.step_bytes).zip(out.chunks_exact_mut(BLOCK)) {
        let (scales, numbers) = step.split_at(packing.scale_columns * COLUMN_BYTES);
        // SAFETY: an f32 for each lane; tiles, and all in them, begin on 32 bytes.
        let scale = L::load(unsafe { ref_at(scales.as_ptr()) });
        for (numbers, to) in numbers.as_chunks::<LANES>().0.iter().zip(to) {
            L::from_e4m3(numbers).mul(scale).store(&mut row);
            *to = row[lane];
        }
    }
}

/// Unpacks all sixteen rows and keeps one: a lookup costs little beside the layers that follow.
#[inline(always)]
fn unpack_steps<L: Lanes, Q: Quant>(part: &MatrixPart, tile: &[u8], lane: usize, out: &mut [f32]) {
    let packing = packing(part.dtype);
    let mut rest = tile;
    let mut head = SharedScales::<L>::none();
    let mut numbers = [[0.0; LANES]; BLOCK];
    for (i, to) in out.chunks_exact_mut(BLOCK).enumerate() {
        if packing.head.is_before(part.first, i * BLOCK) {
            let (from, after) = rest.split_at(packing.head.bytes());
            // SAFETY: a head; tiles, and all in them, begin on 32 bytes.
            head = unsafe { SharedScales::read(packing.head, from.as_ptr()) };
            rest = after;
        }
        let (step, after) = rest.split_at(packing.step_bytes);
        // SAFETY: a step of this type, as `pack` laid it out.
        unsafe { unpack::<L, Q>(&head, step.as_ptr(), &mut numbers) };
        to.iter_mut().zip(&numbers).for_each(|(to, numbers)| *to = numbers[lane]);
        rest = after;
    }
}

/// One lane's bytes in a row of elements.
#[inline(always)]
fn element<const SIZE: usize>(from: &[u8], lane: usize) -> [u8; SIZE] {
    from.as_chunks::<SIZE>().0[lane]
}
