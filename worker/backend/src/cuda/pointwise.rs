//! Operations on each row alone.

use super::buffer::{Buffer, Vector, padded};
use super::device::Cuda;
use super::driver::LaunchShape;
use super::kernels::{HeadShape, arguments, by_row, by_row_part, norm_bytes_max};
use super::lock::lock;
use super::recurrence::NO_RECURRENCE;
use super::table::Kernel;
use super::weights::Matrix;
use crate::{AttentionHeads, Clamp, ElementOp, Error, Gate, HeadNorms, Pass, Pointwise};
use std::ops::Range;

/// As in the header.
const X_BF16: u32 = 1;
const OUT_BF16: u32 = 2;

fn form_flag(x: &Buffer) -> u32 {
    if x.is_bf16() { X_BF16 } else { 0 }
}

impl Cuda {
    /// A row in shared memory, if it fits.
    fn by_row_in_shared(&self, n_rows: usize, cols: usize) -> Option<LaunchShape> {
        let shared_bytes = u32::try_from(cols * 4).ok().filter(|n| *n <= norm_bytes_max(&self.card));
        let fits = shared_bytes.ok_or_else(|| Error::Shape(format!("a norm over {cols} columns on this device")));
        self.keep_error(fits).map(|shared_bytes| LaunchShape { shared_bytes, ..by_row(n_rows) })
    }

    /// The f32 of x that a kernel changes in place.
    fn in_place(&self, x: &Buffer, n_rows: usize) -> Option<(u64, u32)> {
        x.check(n_rows, x.cols);
        self.to_f32(x, n_rows);
        (n_rows > 0 && x.cols > 0).then(|| (x.address(), x.cols as u32))
    }
}

impl Cuda {
    /// Tokens that are on the device: where, and how many.
    fn embed_from(&self, table: &Matrix, first: u32, (tokens, n_tokens): (u64, usize), out: &Buffer) {
        out.check(n_tokens, table.k);
        self.to_f32(out, n_tokens);
        let [part] = &table.parts[..] else { return };
        if n_tokens == 0 {
            return;
        }
        let (digits, scales) = (part.digits.address(0), part.scales.address(0));
        let (n_table, k, to) = (part.rows as u32, table.k as u32, out.address());
        let args = arguments![digits, scales, tokens, first, n_table, k, to];
        // SAFETY: the packer laid the table out for its kind; a token without a row in it is passed over.
        unsafe { self.launch(Kernel::embed(part.kind), by_row_part(n_tokens, table.k), args) };
    }
}

impl Pointwise for Cuda {
    fn embed(&self, table: &Matrix, first: u32, tokens: &[u32], out: &mut Buffer) {
        let at = self.upload(tokens);
        self.embed_from(table, first, (at, tokens.len()), out);
    }

    fn embed_pass(&self, table: &Matrix, first: u32, pass: &Pass<'_>, out: &mut Buffer) {
        let uploaded = {
            let uploads = lock(&self.uploads);
            (uploads.batch.n_rows == pass.n_rows()).then_some(uploads.batch.tokens)
        };
        match uploaded {
            Some(at) => self.embed_from(table, first, (at, pass.n_rows()), out),
            None => self.embed(table, first, pass.rows.tokens, out),
        }
    }

    fn rms_norm(&self, x: &Buffer, weight: &Vector, eps: f32, n_rows: usize, out: &mut Buffer) {
        x.check(n_rows, weight.len);
        out.check(n_rows, weight.len);
        let Some(shape) = self.by_row_in_shared(n_rows, x.cols).filter(|_| n_rows > 0) else { return };
        let forms = form_flag(x) | OUT_BF16;
        out.set_bf16(true);
        let (x, weight, cols, to) = (x.address(), weight.address(), out.cols as u32, out.address());
        // SAFETY: both have so many rows as wide as the weight.
        unsafe { self.launch(Kernel::RmsNorm, shape, arguments![x, weight, eps, cols, to, forms]) };
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
        [x, &*residual, &*out].iter().for_each(|rows| rows.check(n_rows, weight.len));
        let Some(shape) = self.by_row_in_shared(n_rows, x.cols).filter(|_| n_rows > 0) else { return };
        self.to_f32(residual, n_rows);
        let forms = form_flag(x) | OUT_BF16;
        out.set_bf16(true);
        let (x, residual, weight, cols, to) =
            (x.address(), residual.address(), weight.address(), out.cols as u32, out.address());
        let args = arguments![x, residual, weight, eps, cols, to, forms];
        // SAFETY: all have so many rows as wide as the weight.
        unsafe { self.launch(Kernel::AddRmsNorm, shape, args) };
    }

    fn add(&self, x: &Buffer, residual: &mut Buffer, n_rows: usize) {
        x.check(n_rows, residual.cols);
        let Some((residual, cols)) = self.in_place(residual, n_rows) else { return };
        let (x, forms) = (x.address(), form_flag(x));
        // SAFETY: both have so many rows.
        unsafe { self.launch(Kernel::AddRows, by_row(n_rows), arguments![x, residual, cols, forms]) };
    }

    fn add_bias(&self, x: &mut Buffer, bias: &Vector, n_rows: usize) {
        x.check(n_rows, bias.len);
        let Some((x, cols)) = self.in_place(x, n_rows) else { return };
        let bias = bias.address();
        // SAFETY: x has so many rows as wide as the bias.
        unsafe { self.launch(Kernel::AddBias, by_row(n_rows), arguments![x, bias, cols]) };
    }

    fn map(&self, x: &mut Buffer, op: ElementOp, n_rows: usize) {
        let (kernel, parameter) = match op {
            ElementOp::Gelu => (Kernel::GeluRows, None),
            ElementOp::GeluErf => (Kernel::GeluErfRows, None),
            ElementOp::Scale(factor) => (Kernel::ScaleRows, Some(factor)),
            ElementOp::SoftCap(cap) => (Kernel::SoftCapRows, Some(cap)),
            ElementOp::ReluSquared => {
                unreachable!("{NO_RECURRENCE}: `check_recurrence` rejects the models that have this activation")
            }
        };
        let Some((x, cols)) = self.in_place(x, n_rows) else { return };
        let shape = by_row_part(n_rows, cols as usize);
        match parameter {
            // SAFETY: x has so many rows.
            None => unsafe { self.launch(kernel, shape, arguments![x, cols]) },
            // SAFETY: as above.
            Some(parameter) => unsafe { self.launch(kernel, shape, arguments![x, cols, parameter]) },
        }
    }

    fn apply_gate(&self, gate_up: &Buffer, gate: Gate, n_rows: usize, out: &mut Buffer) {
        let inner = out.cols;
        gate_up.check(n_rows, 2 * inner);
        out.check(n_rows, inner);
        if n_rows == 0 || inner == 0 {
            return;
        }
        self.to_f32(gate_up, n_rows);
        out.set_bf16(true);
        let (from, cols, to, shape) = (gate_up.address(), inner as u32, out.address(), by_row_part(n_rows, inner));
        let launch = |kernel, args: &[_]| {
            // SAFETY: both have so many rows.
            unsafe { self.launch(kernel, shape, args) };
        };
        match gate {
            Gate::Silu => launch(Kernel::SiluMul, arguments![from, cols, to, OUT_BF16]),
            Gate::Gelu => launch(Kernel::GeluMul, arguments![from, cols, to, OUT_BF16]),
            Gate::GeluErf => unreachable!("only encoders have it, which `check_attention` refuses"),
            Gate::Clamped(Clamp { alpha, limit }) => {
                launch(Kernel::ClampedSiluMul, arguments![from, cols, alpha, limit, to, OUT_BF16]);
            }
        }
    }

    fn gather(&self, x: &Buffer, rows: &[u32], out: &mut Buffer) {
        out.check(rows.len(), x.cols);
        assert!(rows.iter().all(|row| (*row as usize) < x.rows_max), "rows of a buffer of {}", x.rows_max);
        out.set_bf16(x.is_bf16());
        if rows.is_empty() || x.cols == 0 {
            return;
        }
        let n_words = if x.is_bf16() { padded(x.cols) / 2 } else { x.cols } as u32;
        let (x, rows_at, to) = (x.address(), self.upload(rows), out.address());
        // SAFETY: every row is in x, and out has room for so many.
        unsafe { self.launch(Kernel::GatherRows, by_row(rows.len()), arguments![x, rows_at, n_words, to]) };
    }

    fn norm_heads(&self, qkv: &mut Buffer, heads: &AttentionHeads, norms: &HeadNorms<'_, Vector>, n_rows: usize) {
        let HeadNorms { q, k, v, eps } = *norms;
        assert!(v.is_none(), "`check_attention` refuses norms of values");
        assert!([q, k].iter().all(|weight| weight.len == heads.head_dim), "weights are as long as a head");
        qkv.check(n_rows, heads.qkv_cols());
        let Some((qkv, _)) = self.in_place(qkv, n_rows) else { return };
        let n_normed = (heads.n_heads + heads.n_kv_heads) as u32;
        let shape = LaunchShape { grid: [n_rows as u32, n_normed, 1], block: [32, 1, 1], shared_bytes: 0 };
        let (q, k, heads) = (q.address(), k.address(), HeadShape::of(heads));
        // SAFETY: qkv has so many rows of these heads; `Kv::new` has refused heads that are too wide.
        unsafe { self.launch(Kernel::NormHeads, shape, arguments![qkv, q, k, eps, heads]) };
    }

    fn layer_norm(&self, x: &Buffer, weight: &Vector, bias: &Vector, eps: f32, n_rows: usize, out: &mut Buffer) {
        x.check(n_rows, weight.len);
        out.check(n_rows, bias.len);
        let Some(shape) = self.by_row_in_shared(n_rows, x.cols).filter(|_| n_rows > 0) else { return };
        let forms = form_flag(x) | OUT_BF16;
        out.set_bf16(true);
        let (x, weight, bias, cols, to) =
            (x.address(), weight.address(), bias.address(), out.cols as u32, out.address());
        // SAFETY: both have so many rows as wide as the weight and the bias.
        unsafe { self.launch(Kernel::LayerNorm, shape, arguments![x, weight, bias, eps, cols, to, forms]) };
    }

    fn scale_queries(&self, qkv: &mut Buffer, heads: &AttentionHeads, factors: &Vector, pass: &Pass<'_>) {
        let n_rows = pass.n_rows();
        qkv.check(n_rows, heads.qkv_cols());
        assert!(pass.rows.positions.iter().all(|at| (*at as usize) < factors.len), "positions that have a factor");
        let Some((x, ld)) = self.in_place(qkv, n_rows) else { return };
        let positions = lock(&self.uploads).batch.positions;
        let (n, factors) = ((heads.n_heads * heads.head_dim) as u32, factors.address());
        // SAFETY: qkv has the pass's rows, and every position has a factor.
        unsafe { self.launch(Kernel::ScaleQueries, by_row(n_rows), arguments![x, ld, n, factors, positions]) };
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
        from.check(rows.end, from.cols);
        to.check(to_row + rows.len(), to.cols);
        assert!(columns.end <= from.cols && to_col + columns.len() <= to.cols, "columns of both");
        if rows.is_empty() || columns.is_empty() {
            return;
        }
        self.to_f32(from, rows.end);
        to.set_bf16(false);
        let at = |of: &Buffer, row: usize, col: usize| of.address() + ((row * of.cols + col) * 4) as u64;
        let (from_at, to_at) = (at(from, rows.start, columns.start), at(to, to_row, to_col));
        let (ld_from, ld_to, n) = (from.cols as u32, to.cols as u32, columns.len() as u32);
        let args = arguments![from_at, ld_from, to_at, ld_to, n];
        // SAFETY: both have these rows and columns.
        unsafe { self.launch(Kernel::CopyColumns, by_row(rows.len()), args) };
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
        whole.check(n_rows, whole.cols);
        assert!(columns.len() == weight.len && columns.end <= x.cols, "a weight for each column");
        let Some((at, ld)) = self.in_place(x, n_rows).filter(|_| !columns.is_empty()) else { return };
        self.to_f32(whole, n_rows);
        let (at, cols) = (at + columns.start as u64 * 4, columns.len() as u32);
        let (whole, n, weight) = (whole.address(), whole.cols as u32, weight.address());
        let args = arguments![at, ld, cols, whole, n, weight, eps];
        // SAFETY: both have so many rows, and x these columns.
        unsafe { self.launch(Kernel::NormColumns, by_row(n_rows), args) };
    }

    fn sigmoid_mul(&self, _gate: &Buffer, _n_rows: usize, _x: &mut Buffer) {
        unreachable!("only models with recurrent layers have such gates: {NO_RECURRENCE}");
    }
}
