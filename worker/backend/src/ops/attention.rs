//! Attention: storing K and V in their pages, and attending to them.

use super::Memory;
use crate::{Pass, Result};
use std::ops::Range;

/// The shape of one layer's attention on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionHeads {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    /// Query heads per KV head in the whole model.
    pub per_kv: usize,
    /// The first query head's place within its KV head's group: 0 unless a rank boundary cuts the group.
    pub first: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Number of positions that a row sees, its own the last; None: all up to its own. Without a mask it sees as many
    /// behind its own as before it.
    pub window: Option<usize>,
    /// A row sees no position behind its own.
    pub is_causal: bool,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// K and V are those of another layer: a row has only Q, and stores nothing.
    pub is_reader: bool,
}

impl AttentionHeads {
    /// All heads of a layer, on one rank.
    pub fn whole(n_heads: usize, n_kv_heads: usize, head_dim: usize, scale: f32) -> AttentionHeads {
        let per_kv = n_heads / n_kv_heads;
        AttentionHeads {
            n_heads,
            n_kv_heads,
            per_kv,
            first: 0,
            head_dim,
            scale,
            window: None,
            is_causal: true,
            cap: None,
            is_reader: false,
        }
    }

    /// The rank's KV head that its query head `head` reads.
    pub fn kv_head_of(&self, head: usize) -> usize {
        (self.first + head) / self.per_kv
    }

    /// The positions that the row at `position` sees of a sequence of which `n` are stored.
    pub fn positions_seen(&self, position: usize, n: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        match self.is_causal {
            true => first..position + 1,
            false => first..self.window.map_or(n, |window| position.saturating_add(window).min(n)),
        }
    }

    /// The KV heads of a row.
    pub fn n_stored(&self) -> usize {
        if self.is_reader { 0 } else { self.n_kv_heads }
    }

    /// The columns of a fused QKV row: all heads of Q, then K, then V.
    pub fn qkv_cols(&self) -> usize {
        (self.n_heads + 2 * self.n_stored()) * self.head_dim
    }
}

/// The arguments of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    pub pass: &'a Pass<'a>,
    pub heads: &'a AttentionHeads,
    /// The cache group whose tables are used.
    pub group: usize,
    pub layer: usize,
}

/// What is added to the scores of attention, besides the products of Q and K.
pub struct ScoreTerms<'a, V> {
    /// A score of its own for each query head, with no value: one more entry of the first tile that a row sees.
    /// [n_heads]
    pub sinks: Option<&'a V>,
    /// For each query head, by the distance from the query to the key: those of `-reach..=reach`, into which longer
    /// distances are clamped. [n_heads, 2 * reach + 1]
    pub distances: Option<&'a V>,
}

impl<V> ScoreTerms<'_, V> {
    pub const NONE: Self = ScoreTerms { sinks: None, distances: None };
}

/// The weights of norms over each head, `[head_dim]` each. Q and K have one wherever there are any.
pub struct HeadNorms<'a, V> {
    pub q: &'a V,
    pub k: &'a V,
    pub v: Option<&'a V>,
    pub eps: f32,
}

pub trait Attention: Memory {
    /// Whether the device computes layers of these heads, and norms of their values.
    fn check_attention(&self, _heads: &AttentionHeads, _norms_values: bool) -> Result<()> {
        Ok(())
    }
    /// Turns Q and K of `qkv` by their positions, if the layer has a rope, then writes K and V to their blocks in the
    /// KV dtype, if they are the layer's own.
    /// qkv: [n_rows, qkv_cols]
    fn rope_store(
        &self,
        qkv: &mut Self::Buffer,
        rope: Option<&Self::Rope>,
        call: &AttentionCall<'_>,
        kv: &mut Self::Kv,
    );
    /// Attention of each row over the positions of its sequence that it sees (`AttentionHeads::positions_seen`), K and
    /// V read from their blocks. Query head h reads KV head `call.heads.kv_head_of(h)`.
    /// qkv: [n_rows, qkv_cols], whose Q is read, and may be written over; out: [n_rows, n_heads * head_dim]
    fn attend(
        &self,
        qkv: &mut Self::Buffer,
        kv: &Self::Kv,
        call: &AttentionCall<'_>,
        terms: &ScoreTerms<'_, Self::Vector>,
        out: &mut Self::Buffer,
    );
}
