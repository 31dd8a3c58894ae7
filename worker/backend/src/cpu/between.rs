//! Operations of some families between the products: other norms, other activations, scales and caps. Row by row.

use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
use super::math::{gelu, gelu_erf, sigmoid, soft_cap};
use super::memory::SharedPtr;
use super::vector::Vector;
use crate::{AttentionHeads, ElementOp, HeadNorms};
use std::ops::Range;

/// Norms each head of Q, of K, and of V if it has a weight, in place. qkv: [n_rows, qkv_cols]
pub(crate) struct NormEachHead<'a> {
    pub qkv: SharedPtr<f32>,
    pub heads: &'a AttentionHeads,
    pub norms: &'a HeadNorms<'a, Vector>,
    pub rows: Range<usize>,
}

impl Kernel for NormEachHead<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (head_dim, n) = (self.heads.head_dim, self.heads.qkv_cols());
        let HeadNorms { q, k, v, eps } = *self.norms;
        let (n_q, n_kv) = (self.heads.n_heads * head_dim, self.heads.n_stored() * head_dim);
        for row in self.rows.clone() {
            // SAFETY: the op checked the shape; one thread has each row.
            let row = unsafe { self.qkv.part(row * n, n) };
            norm_each::<L>(&mut row[..n_q], q, eps);
            norm_each::<L>(&mut row[n_q..n_q + n_kv], k, eps);
            if let Some(v) = v {
                norm_each::<L>(&mut row[n_q + n_kv..], v, eps);
            }
        }
    }
}

/// Norms runs as long as the weight.
#[inline(always)]
fn norm_each<L: Lanes>(x: &mut [f32], weight: &[f32], eps: f32) {
    for head in x.chunks_exact_mut(weight.len()) {
        norm_in_place::<L>(head, weight, eps);
    }
}

#[inline(always)]
fn norm_in_place<L: Lanes>(x: &mut [f32], weight: &[f32], eps: f32) {
    let mut copy = [0.0; super::kv::HEAD_DIM_MAX];
    let copy = &mut copy[..x.len()];
    copy.copy_from_slice(x);
    norm::<L>(copy, weight, eps, x);
}

/// out = (x - mean) / deviation * weight + bias
pub(crate) struct LayerNorm<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub bias: &'a [f32],
    pub eps: f32,
    pub out: SharedPtr<f32>,
    pub rows: Range<usize>,
}

impl Kernel for LayerNorm<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = self.weight.len();
        for row in self.rows.clone() {
            let x = &self.x[row * n..][..n];
            // SAFETY: the op checked the shapes; one thread has each row.
            let out = unsafe { self.out.part(row * n, n) };
            let mean = sum::<L>(x) / n as f32;
            out.iter_mut().zip(x).for_each(|(out, x)| *out = x - mean);
            let scale = 1.0 / (sum_of_squares::<L>(out) / n as f32 + self.eps).sqrt();
            for ((out, weight), bias) in out.iter_mut().zip(self.weight).zip(self.bias) {
                *out = (*out * scale).mul_add(*weight, *bias);
            }
        }
    }
}

/// The sum of a row, in sixteen lanes and one tree.
#[inline(always)]
fn sum<L: Lanes>(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sum = L::splat(0.0);
    for chunk in chunks {
        sum = sum.add(L::load(chunk));
    }
    sum.add(L::load_first(tail)).sum()
}

/// Each row of x += bias.
pub(crate) struct AddBias<'a> {
    pub x: SharedPtr<f32>,
    pub bias: &'a [f32],
    pub rows: Range<usize>,
}

impl Kernel for AddBias<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = self.bias.len();
        for row in self.rows.clone() {
            // SAFETY: the op checked the shapes; one thread has each row.
            let x = unsafe { self.x.part(row * n, n) };
            x.iter_mut().zip(self.bias).for_each(|(x, bias)| *x += bias);
        }
    }
}

/// out = (x * scale) * weight
#[inline(always)]
pub(crate) fn norm<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum_of_squares::<L>(x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = (x * scale) * weight;
    }
}

/// The sum of squares, in sixteen lanes and one tree.
#[inline(always)]
pub(crate) fn sum_of_squares<L: Lanes>(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut squares = L::splat(0.0);
    for chunk in chunks {
        let x = L::load(chunk);
        squares = x.fma(x, squares);
    }
    let tail = L::load_first(tail);
    tail.fma(tail, squares).sum()
}

/// x *= sigmoid(gate), each number of the gate for `cols / n` columns.
pub(crate) struct SigmoidMul<'a> {
    pub gate: &'a [f32],
    pub n: usize,
    pub x: SharedPtr<f32>,
    pub cols: usize,
    pub rows: Range<usize>,
}

impl Kernel for SigmoidMul<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in self.rows.clone() {
            let gate = &self.gate[row * self.n..][..self.n];
            // SAFETY: the op checked the shapes; one thread has each row.
            let x = unsafe { self.x.part(row * self.cols, self.cols) };
            if self.n < self.cols {
                for (gate, x) in gate.iter().zip(x.chunks_exact_mut(self.cols / self.n)) {
                    let factor = sigmoid(*gate);
                    x.iter_mut().for_each(|x| *x *= factor);
                }
                continue;
            }
            for (gate, x) in gate.chunks(LANES).zip(x.chunks_mut(LANES)) {
                L::load_first(x).mul(sigmoid(L::load_first(gate))).store_first(x);
            }
        }
    }
}

/// In place. x: [n_rows, cols]
pub(crate) struct Elementwise {
    pub x: SharedPtr<f32>,
    pub cols: usize,
    pub op: ElementOp,
    pub rows: Range<usize>,
}

impl Kernel for Elementwise {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        // SAFETY: the op checked the shape; one thread has each row.
        let x = unsafe { self.x.part(self.rows.start * self.cols, self.rows.len() * self.cols) };
        for x in x.chunks_mut(LANES) {
            let lanes = L::load_first(x);
            match self.op {
                ElementOp::Gelu => gelu(lanes).store_first(x),
                ElementOp::GeluErf => gelu_erf(lanes).store_first(x),
                ElementOp::ReluSquared => {
                    let positive = L::splat(0.0).max(lanes);
                    positive.mul(positive).store_first(x);
                }
                ElementOp::Scale(factor) => lanes.mul(L::splat(factor)).store_first(x),
                ElementOp::SoftCap(cap) => soft_cap(lanes, L::splat(cap)).store_first(x),
            }
        }
    }
}

/// Queries times the factor of their position. qkv: [n_rows, n_cols], of which the first `n` are queries.
pub(crate) struct ScaleQueriesByPosition<'a> {
    pub qkv: SharedPtr<f32>,
    pub n_cols: usize,
    pub n: usize,
    pub factors: &'a [f32],
    pub positions: &'a [u32],
    pub rows: Range<usize>,
}

impl Kernel for ScaleQueriesByPosition<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in self.rows.clone() {
            let factor = self.factors[self.positions[row] as usize];
            // SAFETY: the op checked the shape; one thread has each row.
            let queries = unsafe { self.qkv.part(row * self.n_cols, self.n) };
            queries.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Columns of x become x * scale * weight, where the scale is that of the whole row.
pub(crate) struct NormColumns<'a> {
    pub x: SharedPtr<f32>,
    pub n_cols: usize,
    pub first: usize,
    /// [n_rows, n]
    pub whole: &'a [f32],
    pub n: usize,
    pub weight: &'a [f32],
    pub eps: f32,
    pub rows: Range<usize>,
}

impl Kernel for NormColumns<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in self.rows.clone() {
            let whole = &self.whole[row * self.n..][..self.n];
            let scale = 1.0 / (sum_of_squares::<L>(whole) / self.n as f32 + self.eps).sqrt();
            // SAFETY: the op checked the shapes; one thread has each row.
            let x = unsafe { self.x.part(row * self.n_cols + self.first, self.weight.len()) };
            x.iter_mut().zip(self.weight).for_each(|(x, weight)| *x = (*x * scale) * weight);
        }
    }
}
