//! What attention does with K and V of eight bits: both products are of whole numbers, and so exact in any order.
//!
//! K and V have the only eight bits. A query, and the weights of a tile (each times its position's scale of V), are
//! split into two digits, 128 × high + low, by the largest among them: 14 bits and a sign, beside which the rounding of
//! K and V is a hundred times coarser. Sums of digits stay below 2^24.

use super::{
    AttentionJob, HEAD_DIM_MAX, POSITIONS, QUERIES_MAX, Query, TILE, TILE_BLOCKS, TileScratch, WeightedValues,
    n_unseen_blocks,
};
use crate::cpu::kv::int8::{LEAST, WHOLE, hadamard_transform, hadamard_width};
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::math::soft_cap;
use types::BlockId;

const FOUR: usize = 4;
/// The largest number of two digits that both fit a signed byte.
const SPLIT_MAX: f32 = 127.0 * BASE;
const BASE: f32 = 128.0;
const N_WORDS: usize = HEAD_DIM_MAX / FOUR;
/// Of a block's positions.
const WORDS: usize = POSITIONS / FOUR;
const _: () = assert!(HEAD_DIM_MAX >= TILE, "a query and a tile's weights have buffers of equal size");

/// The digits of queries, and of a tile's weights.
pub(super) struct TileDigits {
    queries: [SplitNumbers; QUERIES_MAX],
    weights: [SplitNumbers; QUERIES_MAX],
}

impl TileDigits {
    pub const EMPTY: TileDigits =
        TileDigits { queries: [SplitNumbers::EMPTY; QUERIES_MAX], weights: [SplitNumbers::EMPTY; QUERIES_MAX] };
}

/// Numbers of two digits: (128 × high + low) × scale.
#[derive(Clone, Copy)]
struct SplitNumbers {
    /// The high digits of four numbers, and their low ones.
    words: [[i32; 2]; N_WORDS],
    /// Of all digits of a kind.
    sums: [i32; 2],
    scale: f32,
}

impl SplitNumbers {
    const EMPTY: SplitNumbers = SplitNumbers { words: [[0; 2]; N_WORDS], sums: [0; 2], scale: 0.0 };

    /// Splits whole lanes of numbers. If one of them is not finite, their scale is not.
    #[inline(always)]
    fn split<L: Lanes>(&mut self, numbers: &[[f32; LANES]]) {
        let (mut largest, mut sum) = (L::splat(0.0), L::splat(0.0));
        for x in numbers {
            let x = L::load(x).abs();
            (largest, sum) = (x.max(largest), sum.add(x));
        }
        let (largest, is_finite) = (largest.largest(), sum.sum().is_finite());
        let is_any = is_finite && largest >= LEAST;
        let inverse = L::splat(if is_any { SPLIT_MAX / largest } else { 0.0 });
        self.scale = match (is_any, is_finite) {
            (true, _) => largest / SPLIT_MAX,
            (false, true) => 0.0,
            (false, false) => f32::NAN,
        };
        let mut sums = [L::splat(0.0); 2];
        for (x, words) in numbers.iter().zip(self.words.as_chunks_mut::<FOUR>().0) {
            let x = if is_any { L::load(x).mul(inverse).round() } else { L::splat(0.0) };
            let high = x.mul(L::splat(1.0 / BASE)).round();
            let low = high.fma(L::splat(-BASE), x);
            sums = [sums[0].add(high), sums[1].add(low)];
            let (high, low) = (in_words(high), in_words(low));
            *words = std::array::from_fn(|i| [high[i], low[i]]);
        }
        self.sums = [sums[0].sum() as i32, sums[1].sum() as i32];
    }
}

/// Whole numbers that fit signed bytes, four to a word.
#[inline(always)]
fn in_words<L: Lanes>(x: L) -> [i32; FOUR] {
    let mut whole = [0.0; LANES];
    x.add(L::splat(WHOLE)).store(&mut whole);
    let bytes = whole.map(|x| x.to_bits() as u8);
    let words = bytes.as_chunks::<FOUR>().0;
    std::array::from_fn(|i| i32::from_le_bytes(words[i]))
}

impl AttentionJob<'_> {
    /// Turns and splits what will meet K.
    #[inline(always)]
    pub(super) fn split_queries<L: Lanes>(&self, queries: &[Query], scratch: &mut TileScratch) {
        let dim = self.call.heads.head_dim;
        for (query, split) in queries.iter().zip(&mut scratch.digits.queries) {
            let mut numbers = [0.0; HEAD_DIM_MAX];
            let start = query.row * self.call.heads.qkv_cols() + query.head * dim;
            numbers[..dim].copy_from_slice(&self.qkv[start..][..dim]);
            hadamard_transform(&mut numbers[..dim]);
            split.split::<L>(&numbers.as_chunks().0[..dim.div_ceil(LANES)]);
        }
    }

    /// scores = q · k * scale: [n_queries, positions of the tile]
    #[inline(always)]
    pub(super) fn score_int8<L: Lanes>(
        &self,
        queries: &[Query],
        blocks: &[BlockId],
        kv_head: usize,
        tile: usize,
        scratch: &mut TileScratch,
    ) {
        let TileScratch { digits, scores, .. } = scratch;
        // A power of two divides it without rounding.
        let scale = self.call.heads.scale / hadamard_width(self.call.heads.head_dim) as f32;
        for (i, block) in blocks.iter().enumerate().skip(n_unseen_blocks(queries, tile)) {
            let k = self.kv.half_in_int8(self.kv.page_start(self.call.layer, block.0, kv_head));
            let scales = L::load(k.scales);
            let splits = digits.queries[..queries.len()].chunks(GROUP).zip(scores.chunks_mut(GROUP));
            for (splits, scores) in splits {
                let dots = dots::<L>(k.digits, splits);
                for n in 0..splits.len() {
                    let factor = L::splat(splits[n].scale * scale);
                    let score = dots[n].mul(scales.mul(factor));
                    let scores = &mut scores[n].as_chunks_mut::<LANES>().0[i];
                    match self.call.heads.cap {
                        None => score.store(scores),
                        Some(cap) => soft_cap(score, L::splat(cap)).store(scores),
                    }
                }
            }
        }
    }

    /// tile = p · V over the positions that a query sees: [n_queries, head_dim]
    #[inline(always)]
    pub(super) fn add_values_int8<L: Lanes>(
        &self,
        queries: &[Query],
        blocks: &[BlockId],
        (kv_head, tile): (usize, usize),
        scratch: &mut TileScratch,
        to: &mut WeightedValues,
    ) {
        let skipped = n_unseen_blocks(queries, tile);
        let mut starts = [0; TILE_BLOCKS];
        for (start, block) in starts.iter_mut().zip(blocks).skip(skipped) {
            *start = self.kv.page_start(self.call.layer, block.0, kv_head) + self.kv.k_to_v_distance();
        }
        let pages = skipped..blocks.len();
        let TileScratch { digits, scores, .. } = scratch;
        for ((query, scores), split) in queries.iter().zip(scores).zip(&mut digits.weights) {
            self.split_weights::<L>(query.seen_in(tile), &starts, scores, split);
        }
        let n_columns = self.call.heads.head_dim.div_ceil(LANES);
        for column in 0..n_columns {
            let splits = digits.weights[..queries.len()].chunks(GROUP).zip(to.values.chunks_mut(GROUP));
            for (splits, values) in splits {
                let sums = self.columns::<L>(column, &starts[pages.clone()], pages.start, splits);
                for n in 0..splits.len() {
                    let sum = sums[n].mul(L::splat(splits[n].scale));
                    sum.store(&mut values[n].as_chunks_mut::<LANES>().0[column]);
                }
            }
        }
    }

    /// Splits the weights of the positions `seen`, each times its scale of V. All others are zero.
    #[inline(always)]
    fn split_weights<L: Lanes>(
        &self,
        seen: std::ops::Range<usize>,
        starts: &[usize; TILE_BLOCKS],
        scores: &[f32; TILE],
        split: &mut SplitNumbers,
    ) {
        let mut weights = [[0.0; LANES]; TILE_BLOCKS];
        let blocks = seen.start / POSITIONS..seen.end.div_ceil(POSITIONS);
        for i in blocks.clone() {
            let mut scales = *self.kv.half_in_int8(starts[i]).scales;
            let (start, end) = (seen.start.saturating_sub(i * POSITIONS), seen.end - i * POSITIONS);
            if start > 0 || end < POSITIONS {
                scales[..start].fill(0.0);
                scales[end.min(POSITIONS)..].fill(0.0);
            }
            let scores = &scores.as_chunks::<LANES>().0[i];
            L::load(scores).mul(L::load(&scales)).store(&mut weights[i]);
        }
        split.split::<L>(&weights);
    }

    /// Sums of sixteen columns of V, for as many queries as there are splits.
    #[inline(always)]
    fn columns<L: Lanes>(&self, column: usize, starts: &[usize], first: usize, splits: &[SplitNumbers]) -> [L; GROUP] {
        match splits {
            [a, b, c, d] => self.sums::<L, 4>(column, starts, first, [a, b, c, d]),
            [a, b, c] => self.sums::<L, 3>(column, starts, first, [a, b, c]),
            [a, b] => self.sums::<L, 2>(column, starts, first, [a, b]),
            [a] => self.sums::<L, 1>(column, starts, first, [a]),
            _ => unreachable!("a group has one to four"),
        }
    }

    #[inline(always)]
    fn sums<L: Lanes, const N: usize>(
        &self,
        column: usize,
        starts: &[usize],
        first: usize,
        splits: [&SplitNumbers; N],
    ) -> [L; GROUP] {
        let mut sums = Sums::<L, N>::new(splits);
        for (i, start) in starts.iter().enumerate() {
            let v = &self.kv.half_in_int8(*start).digits.as_chunks::<WORDS>().0[column];
            let words = splits.map(|split| &split.words.as_chunks::<WORDS>().0[first + i]);
            for (j, v) in v.iter().enumerate() {
                sums.add(L::bytes(v), words.map(|words| words[j]));
            }
        }
        sums.finish()
    }
}

/// Queries that share each byte of K and V that is loaded.
const GROUP: usize = 4;

/// q · k of sixteen positions, for as many queries as there are splits.
#[inline(always)]
fn dots<L: Lanes>(k: &[[u8; 64]], splits: &[SplitNumbers]) -> [L; GROUP] {
    match splits {
        [a, b, c, d] => dots_of::<L, 4>(k, [a, b, c, d]),
        [a, b, c] => dots_of::<L, 3>(k, [a, b, c]),
        [a, b] => dots_of::<L, 2>(k, [a, b]),
        [a] => dots_of::<L, 1>(k, [a]),
        _ => unreachable!("a group has one to four"),
    }
}

#[inline(always)]
fn dots_of<L: Lanes, const N: usize>(k: &[[u8; 64]], splits: [&SplitNumbers; N]) -> [L; GROUP] {
    let mut sums = Sums::<L, N>::new(splits);
    for (i, k) in k[..k.len().min(N_WORDS)].iter().enumerate() {
        sums.add(L::bytes(k), splits.map(|split| split.words[i]));
    }
    sums.finish()
}

/// Sums of products of high digits, and of low ones.
struct Sums<L: Lanes, const N: usize> {
    high: [L::Int; N],
    low: [L::Int; N],
}

impl<L: Lanes, const N: usize> Sums<L, N> {
    #[inline(always)]
    fn new(splits: [&SplitNumbers; N]) -> Sums<L, N> {
        let digits = |which: usize| splits.map(|split| L::offset_start(split.sums[which]));
        Sums { high: digits(0), low: digits(1) }
    }

    #[inline(always)]
    fn add(&mut self, bytes: L::Int, words: [[i32; 2]; N]) {
        for (n, [high, low]) in words.into_iter().enumerate() {
            self.high[n] = L::dot_offset(self.high[n], bytes, high);
            self.low[n] = L::dot_offset(self.low[n], bytes, low);
        }
    }

    #[inline(always)]
    fn finish(self) -> [L; GROUP] {
        let mut all = [L::splat(0.0); GROUP];
        for (sum, (high, low)) in all.iter_mut().zip(self.high.into_iter().zip(self.low)) {
            *sum = L::int_to_float(high).fma(L::splat(BASE), L::int_to_float(low));
        }
        all
    }
}
