//! Attention over paged K and V, tile by tile from position 0.
//!
//! Each tile's maximum, sum and weighted V come from its own scores; tiles merge in ascending order into chunks, and
//! chunks in ascending order into the row. So a row's bits depend on its query and the positions up to its own, not on
//! how the rows were cut into steps, and a chunk is a unit of work that can be done apart.

mod by_tiles;
mod int8;
mod items;
mod pages;
mod products;

use super::isa::{Isa, Kernel, dispatch};
use super::kv::{HEAD_DIM_MAX, Kv, KvPlane, Rope, RopeStore, VALUES_MAX};
use super::lanes::{LANES, Lanes, Real};
use super::math::exp;
use super::memory::SharedPtr;
use super::{Buffer, Cpu, CpuConfig, Vector};
use crate::{Attention, AttentionCall, ScoreTerms};
use items::{AttentionItem, Query, n_unseen_blocks, seen_by_any, tiles_seen};
use products::pages_per_load;
use std::cell::RefCell;
use std::ops::Range;
use types::{BLOCK_TOKENS, BlockId, KvDtype};

impl Attention for Cpu {
    fn rope_store(&self, qkv: &mut Buffer, rope: Option<&Rope>, call: &AttentionCall<'_>, kv: &mut Kv) {
        let AttentionCall { pass, heads, layer, .. } = *call;
        if heads.n_heads == 0 {
            return;
        }
        kv.check(heads, layer);
        assert!(pass.is_tiled(), "each row belongs to one slice");
        let n_rows = pass.n_rows();
        let qkv = qkv.shared(n_rows, heads.qkv_cols());
        let kv = &*kv;
        self.run_on_team(n_rows, |rows| RopeStore { qkv, rope, call, kv, rows });
    }

    fn attend(
        &self,
        qkv: &mut Buffer,
        kv: &Kv,
        call: &AttentionCall<'_>,
        terms: &ScoreTerms<'_, Vector>,
        out: &mut Buffer,
    ) {
        let AttentionCall { pass, heads, layer, .. } = *call;
        if heads.n_heads == 0 {
            return;
        }
        kv.check(heads, layer);
        assert!(pass.is_tiled(), "each row belongs to one slice");
        let (sinks, distances) = (terms.sinks.map(|sinks| &**sinks), terms.distances.map(|of| &**of));
        assert!(sinks.is_none_or(|sinks| sinks.len() == heads.n_heads), "a sink for each query head");
        let is_odd =
            |of: &[f32]| of.len().is_multiple_of(heads.n_heads) && !(of.len() / heads.n_heads).is_multiple_of(2);
        assert!(distances.is_none_or(is_odd), "a number for each distance, for each query head");
        let n_rows = pass.n_rows();
        let qkv = qkv.rows(n_rows, heads.qkv_cols());
        let out = out.shared(n_rows, heads.n_heads * heads.head_dim);
        let attend = AttentionJob { qkv, kv, call, sinks, distances, out };
        let CpuConfig { isa, threads, .. } = self.config;
        let n_items = attend.items().count();
        let are_few = threads > 1 && n_items < threads * ITEMS_PER_THREAD;
        match if are_few { attend.n_tiles() } else { 0 } {
            n_tiles if n_tiles > n_items => attend.run_by_tiles(isa, &self.team, n_tiles),
            _ => self.team.run(n_items, &|items| attend.run(isa, items)),
        }
    }
}

const POSITIONS: usize = BLOCK_TOKENS as usize;
pub(super) const TILE: usize = 256;
const TILE_BLOCKS: usize = TILE / POSITIONS;
pub(super) const CHUNK: usize = 4096;
const CHUNK_TILES: usize = CHUNK / TILE;
/// Query heads that share each widened page: heads of one KV head, of consecutive rows.
const QUERIES_MAX: usize = 32;
/// With fewer items for each thread, threads share the tiles of an item.
const ITEMS_PER_THREAD: usize = 4;
const _: () = assert!(QUERIES_MAX.is_multiple_of(LANES), "registers hold a number of each query");

/// Attention of the rows of a pass.
pub(crate) struct AttentionJob<'a> {
    pub qkv: &'a [f32],
    pub kv: &'a Kv,
    pub call: &'a AttentionCall<'a>,
    /// [n_heads]
    pub sinks: Option<&'a [f32]>,
    /// [n_heads, 2 * reach + 1]
    pub distances: Option<&'a [f32]>,
    /// [n_rows, n_heads * head_dim]
    pub out: SharedPtr<f32>,
}

/// The largest score of some positions, the sum of their weights relative to it, and V weighted by these, per query.
/// Aligned, because a load of sixteen lanes across two cache lines takes twice as long.
#[repr(align(64))]
struct WeightedValues {
    largest: [f32; QUERIES_MAX],
    sum: [f32; QUERIES_MAX],
    values: [[f32; VALUES_MAX]; QUERIES_MAX],
}

impl WeightedValues {
    const EMPTY: WeightedValues = WeightedValues {
        largest: [0.0; QUERIES_MAX],
        sum: [0.0; QUERIES_MAX],
        values: [[0.0; VALUES_MAX]; QUERIES_MAX],
    };
}

/// Room for the computation of one tile.
#[repr(align(64))]
struct TileScratch {
    /// The queries, as `products` reads them.
    queries: [f32; QUERIES_MAX * HEAD_DIM_MAX],
    scores: [[f32; TILE]; QUERIES_MAX],
    /// Two pages, widened.
    pages: [[f32; POSITIONS * HEAD_DIM_MAX]; 2],
    digits: int8::TileDigits,
}

/// What is kept of the positions so far.
struct RowSums {
    chunk: WeightedValues,
    row: WeightedValues,
}

struct AttentionState {
    scratch: TileScratch,
    tile: WeightedValues,
    sums: RowSums,
}

impl AttentionState {
    const EMPTY: AttentionState = AttentionState {
        scratch: TileScratch {
            queries: [0.0; QUERIES_MAX * HEAD_DIM_MAX],
            scores: [[0.0; TILE]; QUERIES_MAX],
            pages: [[0.0; POSITIONS * HEAD_DIM_MAX]; 2],
            digits: int8::TileDigits::EMPTY,
        },
        tile: WeightedValues::EMPTY,
        sums: RowSums { chunk: WeightedValues::EMPTY, row: WeightedValues::EMPTY },
    };
}

thread_local! {
    /// Kept, because clearing 400 KB would cost as much as a short sequence.
    static STATE: RefCell<AttentionState> = const { RefCell::new(AttentionState::EMPTY) };
}

impl AttentionJob<'_> {
    /// Computes some items; `items` is a part of those of `items`.
    pub fn run(&self, isa: Isa, items: Range<usize>) {
        STATE.with_borrow_mut(|state| {
            dispatch(isa, TileWalk { attend: self, items, tiles: 0..usize::MAX, state, results: &mut [] })
        });
    }
}

/// Walks the tiles of some items, and merges each into its row; or some tiles of all items, and keeps their results.
struct TileWalk<'a> {
    attend: &'a AttentionJob<'a>,
    items: Range<usize>,
    /// Among the tiles of these items.
    tiles: Range<usize>,
    state: &'a mut AttentionState,
    /// One for each tile, or none where tiles are merged.
    results: &'a mut [WeightedValues],
}

impl Kernel for TileWalk<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let TileWalk { attend, items, tiles, state, results } = self;
        let AttentionState { scratch, tile: of_tile, sums } = state;
        let is_merged = results.is_empty();
        let mut results = results.iter_mut();
        for part in attend.parts(items, tiles) {
            let queries = part.queries();
            attend.prepare::<L>(queries, scratch);
            for tile in part.tiles.clone() {
                let to = results.next().unwrap_or(&mut *of_tile);
                attend.weigh_tile::<L>(queries, &part.item, tile, scratch, to);
                if is_merged {
                    attend.merge_tile::<L>(queries, tile, to, sums);
                }
            }
        }
    }
}

impl AttentionJob<'_> {
    /// Lays the queries out as the products with K read them.
    #[inline(always)]
    fn prepare<L: Lanes>(&self, queries: &[Query], scratch: &mut TileScratch) {
        if self.kv.spec.dtype == KvDtype::Int8 {
            self.split_queries::<L>(queries, scratch);
        } else {
            self.lay_out::<L>(queries, &mut scratch.queries);
        }
    }

    /// The weighted values of one tile.
    #[inline(always)]
    fn weigh_tile<L: Lanes>(
        &self,
        queries: &[Query],
        item: &AttentionItem<'_>,
        tile: usize,
        scratch: &mut TileScratch,
        to: &mut WeightedValues,
    ) {
        let seen = seen_by_any(queries);
        let blocks = &item.blocks[tile * TILE_BLOCKS..seen.end.div_ceil(POSITIONS).min((tile + 1) * TILE_BLOCKS)];
        if self.kv.spec.dtype == KvDtype::Int8 {
            self.score_int8::<L>(queries, blocks, item.kv_head, tile, scratch);
            self.weigh::<L>(queries, tile, &mut scratch.scores, to);
            self.add_values_int8::<L>(queries, blocks, (item.kv_head, tile), scratch, to);
        } else {
            self.score::<L>(queries, blocks, item.kv_head, tile, scratch);
            self.weigh::<L>(queries, tile, &mut scratch.scores, to);
            self.accumulate_values::<L>(queries, blocks, (item.kv_head, tile), scratch, to);
        }
    }

    /// Merges the next tile into its chunk, and the chunk into the row where it is complete. Writes out the row after
    /// its last tile.
    #[inline(always)]
    fn merge_tile<L: Lanes>(&self, queries: &[Query], tile: usize, of: &WeightedValues, sums: &mut RowSums) {
        let n_lanes = self.call.heads.head_dim.next_multiple_of(LANES);
        let (chunk_start, end) = (tile / CHUNK_TILES * CHUNK, (tile + 1) * TILE);
        merge::<L>(queries, tile * TILE..end, of, chunk_start, &mut sums.chunk, n_lanes);
        let is_last = tile + 1 == tiles_seen(queries).end;
        if end.is_multiple_of(CHUNK) || is_last {
            merge::<L>(queries, chunk_start..end, &sums.chunk, 0, &mut sums.row, n_lanes);
        }
        if is_last {
            for (i, query) in queries.iter().enumerate() {
                self.finish::<L>(query, &sums.row.values[i], sums.row.sum[i]);
            }
        }
    }

    /// scores = q · k * scale: [n_queries, positions of the tile]
    #[inline(always)]
    fn score<L: Lanes>(
        &self,
        queries: &[Query],
        blocks: &[BlockId],
        kv_head: usize,
        tile: usize,
        scratch: &mut TileScratch,
    ) {
        let n = queries.len();
        let TileScratch { queries: q, scores, pages: [first, second], .. } = scratch;
        let (q, scores) = (&q[..n * self.call.heads.head_dim], &mut scores[..n]);
        let mut i = n_unseen_blocks(queries, tile);
        while i < blocks.len() {
            let page = |i: usize| self.kv.page_start(self.call.layer, blocks[i].0, kv_head);
            let has_two = pages_per_load::<L>() == 2 && i + 1 < blocks.len();
            let k = self.widened_plane::<L>(page(i), n, first);
            let next = if has_two { Some(self.widened_plane::<L>(page(i + 1), n, second)) } else { None };
            match (k, next) {
                (KvPlane::F32(k), Some(KvPlane::F32(next))) => self.score_pages::<L, f32, 2>(q, [k, next], i, scores),
                (KvPlane::F16(k), Some(KvPlane::F16(next))) => self.score_pages::<L, u16, 2>(q, [k, next], i, scores),
                (KvPlane::F32(k), _) => self.score_pages::<L, f32, 1>(q, [k], i, scores),
                (KvPlane::F16(k), _) => self.score_pages::<L, u16, 1>(q, [k], i, scores),
            }
            i += if has_two { 2 } else { 1 };
        }
    }

    /// Scores become e^(score - largest of the tile), 0 where a query does not see.
    #[inline(always)]
    fn weigh<L: Lanes>(
        &self,
        queries: &[Query],
        tile: usize,
        scores: &mut [[f32; TILE]; QUERIES_MAX],
        to: &mut WeightedValues,
    ) {
        for (i, query) in queries.iter().enumerate() {
            let Range { start, end: n } = query.seen_in(tile);
            self.add_distances(query, tile, start..n, &mut scores[i]);
            scores[i][..start].fill(f32::NEG_INFINITY);
            let (scores, _) = scores[i].as_chunks_mut::<LANES>();
            let scores = &mut scores[..n.div_ceil(LANES)];
            let mut largest = L::splat(f32::NEG_INFINITY);
            for (j, scores) in scores.iter_mut().enumerate().skip(start / LANES) {
                let seen = L::load(scores).keep_first(n - j * LANES, f32::NEG_INFINITY);
                seen.store(scores);
                largest = seen.max(largest);
            }
            let sink = self.sinks.filter(|_| query.begins_in(tile)).map(|sinks| sinks[query.head]);
            let largest = Real::max(sink.unwrap_or(f32::NEG_INFINITY), largest.largest());
            let mut sum = L::splat(0.0);
            for scores in scores.iter_mut().skip(start / LANES) {
                let p = exp(L::load(scores).sub(L::splat(largest)));
                p.store(scores);
                sum = sum.add(p);
            }
            let sum = sink.map_or(sum.sum(), |sink| sum.sum() + exp(sink - largest));
            (to.largest[i], to.sum[i]) = (largest, sum);
        }
    }

    /// Adds what a query's scores have by the distances of their keys. `seen` counts from the tile's first position.
    #[inline(always)]
    fn add_distances(&self, query: &Query, tile: usize, seen: Range<usize>, scores: &mut [f32; TILE]) {
        let Some(all) = self.distances else { return };
        let n = all.len() / self.call.heads.n_heads;
        let (of_head, reach) = (&all[query.head * n..][..n], n / 2);
        for (score, position) in scores[seen.clone()].iter_mut().zip(tile * TILE + seen.start..) {
            let from_first = (position + reach).saturating_sub(query.position).min(2 * reach);
            *score += of_head[from_first];
        }
    }

    /// tile = p · V over the positions that a query sees, ascending: [n_queries, head_dim]
    #[inline(always)]
    fn accumulate_values<L: Lanes>(
        &self,
        queries: &[Query],
        blocks: &[BlockId],
        (kv_head, tile): (usize, usize),
        scratch: &mut TileScratch,
        to: &mut WeightedValues,
    ) {
        let n = queries.len();
        let (scores, values) = (&scratch.scores[..n], &mut to.values[..n]);
        let n_lanes = self.call.heads.head_dim.next_multiple_of(LANES);
        values.iter_mut().for_each(|values| values[..n_lanes].fill(0.0));
        for (i, block) in blocks.iter().enumerate().skip(n_unseen_blocks(queries, tile)) {
            let v = self.kv.page_start(self.call.layer, block.0, kv_head) + self.kv.k_to_v_distance();
            let at = tile * TILE + i * POSITIONS;
            match self.widened_plane::<L>(v, n, &mut scratch.pages[0]) {
                KvPlane::F32(v) => self.add_page::<L, f32>(queries, v, at, scores, values),
                KvPlane::F16(v) => self.add_page::<L, u16>(queries, v, at, scores, values),
            }
        }
    }

    #[inline(always)]
    fn finish<L: Lanes>(&self, query: &Query, acc: &[f32; VALUES_MAX], sum: f32) {
        let dim = self.call.heads.head_dim;
        let start = query.row * self.call.heads.n_heads * dim + query.head * dim;
        // SAFETY: the op checked the shape; one item, and so one thread, has this head of this row.
        let out = unsafe { self.out.part(start, dim) };
        for (out, acc) in out.chunks_mut(LANES).zip(acc.as_chunks::<LANES>().0) {
            let value = L::load(acc).div(L::splat(sum));
            match out.first_chunk_mut::<LANES>() {
                Some(whole) => value.store(whole),
                None => value.store_first(out),
            }
        }
    }
}

/// Joins `of`, which stands for `positions`, with `into`, which stands for those from `start` up to them. What a query
/// does not see changes nothing of it.
#[inline(always)]
fn merge<L: Lanes>(
    queries: &[Query],
    positions: Range<usize>,
    of: &WeightedValues,
    start: usize,
    into: &mut WeightedValues,
    n_lanes: usize,
) {
    let (mut largest, mut keep, mut take) = ([0.0; QUERIES_MAX], [0.0; QUERIES_MAX], [0.0; QUERIES_MAX]);
    for i in 0..queries.len().div_ceil(LANES) {
        let (before, now) = (L::load(&into.largest.as_chunks().0[i]), L::load(&of.largest.as_chunks().0[i]));
        let both = before.max(now);
        both.store(&mut largest.as_chunks_mut().0[i]);
        exp(before.sub(both)).store(&mut keep.as_chunks_mut().0[i]);
        exp(now.sub(both)).store(&mut take.as_chunks_mut().0[i]);
    }
    for (i, query) in queries.iter().enumerate().filter(|(_, query)| query.sees(&positions)) {
        let (acc, values) = (&mut into.values[i][..n_lanes], &of.values[i][..n_lanes]);
        if query.first.max(start) >= positions.start {
            acc.copy_from_slice(values);
            (into.largest[i], into.sum[i]) = (of.largest[i], of.sum[i]);
            continue;
        }
        let (keep, take) = (keep[i], take[i]);
        for (acc, values) in acc.as_chunks_mut::<LANES>().0.iter_mut().zip(values.as_chunks::<LANES>().0) {
            let taken = L::load(values).mul(L::splat(take));
            L::load(acc).fma(L::splat(keep), taken).store(acc);
        }
        into.sum[i] = into.sum[i].mul_add(keep, of.sum[i] * take);
        into.largest[i] = largest[i];
    }
}
