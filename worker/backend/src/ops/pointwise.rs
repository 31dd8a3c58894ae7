//! Operations on each row alone.

use super::{AttentionHeads, ElementOp, Gate, HeadNorms, Memory};
use crate::Pass;
use std::ops::Range;

pub trait Pointwise: Memory {
    /// out[i] = row `tokens[i] - first` of the table, in f32. A token outside the table belongs to another rank, and
    /// its row of `out` is left unchanged. table: [rows of the vocabulary, hidden]
    fn embed(&self, table: &Self::Matrix, first: u32, tokens: &[u32], out: &mut Self::Buffer);
    /// `embed` for the tokens of the current pass.
    fn embed_pass(&self, table: &Self::Matrix, first: u32, pass: &Pass<'_>, out: &mut Self::Buffer) {
        self.embed(table, first, pass.rows.tokens, out);
    }
    /// out = x / rms(x) * weight. x, out: [n_rows, hidden]
    fn rms_norm(&self, x: &Self::Buffer, weight: &Self::Vector, eps: f32, n_rows: usize, out: &mut Self::Buffer);
    /// residual += x, then out = norm(residual). All: [n_rows, hidden]
    fn add_rms_norm(
        &self,
        x: &Self::Buffer,
        residual: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        n_rows: usize,
        out: &mut Self::Buffer,
    );
    /// residual += x, with the same sum as in `add_rms_norm`. Both: [n_rows, cols]
    fn add(&self, x: &Self::Buffer, residual: &mut Self::Buffer, n_rows: usize);
    /// Each row of x += bias. x: [n_rows, cols], bias: [cols]
    fn add_bias(&self, x: &mut Self::Buffer, bias: &Self::Vector, n_rows: usize);
    /// Each element of x = op(x). x: [n_rows, cols]
    fn map(&self, x: &mut Self::Buffer, op: ElementOp, n_rows: usize);
    /// out = gate(gate, up). gate_up: [n_rows, 2 * inner] (gate, then up), out: [n_rows, inner]
    fn apply_gate(&self, gate_up: &Self::Buffer, gate: Gate, n_rows: usize, out: &mut Self::Buffer);
    /// out[i] = x[rows[i]]: the rows whose logits are requested.
    fn gather(&self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer);
    /// Norms each head of Q, of K, and of V if it has a weight. qkv: [n_rows, qkv_cols]
    fn norm_heads(
        &self,
        qkv: &mut Self::Buffer,
        heads: &AttentionHeads,
        norms: &HeadNorms<'_, Self::Vector>,
        n_rows: usize,
    );
    /// out = (x - mean) / deviation * weight + bias. x, out: [n_rows, hidden]
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        bias: &Self::Vector,
        eps: f32,
        n_rows: usize,
        out: &mut Self::Buffer,
    );
    /// Each row's queries *= the factor of its position. qkv: [n_rows, qkv_cols], factors: [context]
    fn scale_queries(&self, qkv: &mut Self::Buffer, heads: &AttentionHeads, factors: &Self::Vector, pass: &Pass<'_>);
    /// Copies columns of some rows, to a row and a column on.
    fn copy_columns(
        &self,
        from: &Self::Buffer,
        rows: Range<usize>,
        columns: Range<usize>,
        to: &mut Self::Buffer,
        to_row: usize,
        to_col: usize,
    );
    /// Columns of x become x / rms(whole row) * weight, where the whole row is spread over ranks and was gathered.
    /// x: [n_rows, any], whole: [n_rows, n], weight: as long as `columns`
    fn norm_columns(
        &self,
        x: &mut Self::Buffer,
        columns: Range<usize>,
        whole: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        n_rows: usize,
    );
    /// x *= sigmoid(gate). If x has several times as many columns as the gate, each gate number covers that many
    /// columns. gate: [n_rows, n], x: [n_rows, a multiple of n]
    fn sigmoid_mul(&self, gate: &Self::Buffer, n_rows: usize, x: &mut Self::Buffer);
}
