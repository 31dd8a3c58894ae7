//! Causal attention over paged K and V, tile by tile from position 0.
//!
//! Each tile's maximum, sum and weighted V come from its own scores; tiles merge in ascending order into chunks, and
//! chunks in ascending order into the row. So a row's bits depend on its query and the positions up to its own, not on
//! how the rows were cut into steps, and a chunk is a unit of work that can be done apart.

mod int8;
mod pages;
mod products;

use super::isa::{Isa, Kernel, dispatch};
use super::kv::{HEAD_DIM_MAX, Kv, KvPlane, Rope, RopeStore};
use super::lanes::{LANES, Lanes, Real};
use super::math::exp;
use super::memory::SharedPtr;
use super::{Buffer, Cpu, Vector};
use crate::{Attention, AttentionCall, AttentionHeads, Pass, PassSlice};
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

    fn attend(&self, qkv: &mut Buffer, kv: &Kv, call: &AttentionCall<'_>, sinks: Option<&Vector>, out: &mut Buffer) {
        let AttentionCall { pass, heads, layer, .. } = *call;
        if heads.n_heads == 0 {
            return;
        }
        kv.check(heads, layer);
        assert!(pass.is_tiled(), "each row belongs to one slice");
        assert!(sinks.is_none_or(|sinks| sinks.len() == heads.n_heads), "a sink for each query head");
        let n_rows = pass.n_rows();
        let qkv = qkv.rows(n_rows, heads.qkv_cols());
        let out = out.shared(n_rows, heads.n_heads * heads.head_dim);
        let n_items = n_items(pass, heads);
        let attend = AttentionJob { qkv, kv, call, sinks: sinks.map(|sinks| &**sinks), out };
        self.team.run(n_items, &|items| attend.run(self.config.isa, items));
    }
}

const POSITIONS: usize = BLOCK_TOKENS as usize;
pub(super) const TILE: usize = 256;
const TILE_BLOCKS: usize = TILE / POSITIONS;
pub(super) const CHUNK: usize = 4096;
const CHUNK_TILES: usize = CHUNK / TILE;
/// Query heads that share each widened page: heads of one KV head, of consecutive rows.
const QUERIES_MAX: usize = 16;

/// Attention of some items; an item is a KV head of a run of rows.
pub(crate) struct AttentionJob<'a> {
    pub qkv: &'a [f32],
    pub kv: &'a Kv,
    pub call: &'a AttentionCall<'a>,
    /// [n_heads]
    pub sinks: Option<&'a [f32]>,
    /// [n_rows, n_heads * head_dim]
    pub out: SharedPtr<f32>,
}

/// Rows of a slice whose queries are walked together.
fn rows_per_item(heads: &AttentionHeads) -> usize {
    (QUERIES_MAX / heads.per_kv).max(1)
}

/// The query heads that read a KV head: fewer than `per_kv` where a rank's boundary cuts the group.
fn query_heads_of(heads: &AttentionHeads, kv_head: usize) -> Range<usize> {
    let start = (kv_head * heads.per_kv).saturating_sub(heads.first);
    let end = ((kv_head + 1) * heads.per_kv).saturating_sub(heads.first).min(heads.n_heads);
    start..end
}

/// How many items the rows of a pass make.
pub(crate) fn n_items(pass: &Pass<'_>, heads: &AttentionHeads) -> usize {
    let rows = rows_per_item(heads);
    pass.slices.iter().map(|slice| slice.rows.len().div_ceil(rows) * heads.n_kv_heads).sum()
}

impl Kernel for AttentionItems<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let AttentionItems { attend, items, state } = self;
        let AttentionCall { pass, heads, group, .. } = *attend.call;
        let (rows_max, n_kv_heads, tables) = (rows_per_item(heads), heads.n_kv_heads, pass.tables.group(group));
        let mut first = 0;
        for (i, slice) in pass.slices.iter().enumerate() {
            let n = slice.rows.len().div_ceil(rows_max) * n_kv_heads;
            for item in items.start.max(first)..items.end.min(first + n) {
                let (cut, kv_head) = ((item - first) / n_kv_heads, (item - first) % n_kv_heads);
                let row = slice.rows.start as usize + cut * rows_max;
                let rows = row..(row + rows_max).min(slice.rows.end as usize);
                attend.attend_item::<L>(slice, tables.blocks_of(i), rows, kv_head, state);
            }
            first += n;
        }
    }
}

/// One query: a head of a row, and how far it may look.
#[derive(Clone, Copy, Default)]
struct Query {
    row: usize,
    head: usize,
    /// `[0, first) is out of sight · [first, end) is seen`, its own position the last.
    first: usize,
    end: usize,
}

/// The largest score of some positions, the sum of their weights relative to it, and V weighted by these, per query.
struct WeightedValues {
    largest: [f32; QUERIES_MAX],
    sum: [f32; QUERIES_MAX],
    values: [[f32; HEAD_DIM_MAX]; QUERIES_MAX],
}

impl WeightedValues {
    const EMPTY: WeightedValues = WeightedValues {
        largest: [0.0; QUERIES_MAX],
        sum: [0.0; QUERIES_MAX],
        values: [[0.0; HEAD_DIM_MAX]; QUERIES_MAX],
    };
}

/// What is kept of the positions so far, and room for one tile.
struct AttentionState {
    /// The queries, as `products` reads them.
    queries: [f32; QUERIES_MAX * HEAD_DIM_MAX],
    scores: [[f32; TILE]; QUERIES_MAX],
    page: [f32; POSITIONS * HEAD_DIM_MAX],
    tile: WeightedValues,
    chunk: WeightedValues,
    row: WeightedValues,
    digits: int8::TileDigits,
}

impl AttentionState {
    const EMPTY: AttentionState = AttentionState {
        queries: [0.0; QUERIES_MAX * HEAD_DIM_MAX],
        scores: [[0.0; TILE]; QUERIES_MAX],
        page: [0.0; POSITIONS * HEAD_DIM_MAX],
        tile: WeightedValues::EMPTY,
        chunk: WeightedValues::EMPTY,
        row: WeightedValues::EMPTY,
        digits: int8::TileDigits::EMPTY,
    };
}

thread_local! {
    /// Kept, because clearing 80 KB would cost as much as a short sequence.
    static STATE: RefCell<AttentionState> = const { RefCell::new(AttentionState::EMPTY) };
}

impl AttentionJob<'_> {
    /// Computes some items; `items` is a part of `0..n_items`.
    pub fn run(&self, isa: Isa, items: Range<usize>) {
        STATE.with_borrow_mut(|state| dispatch(isa, AttentionItems { attend: self, items, state }));
    }
}

struct AttentionItems<'a> {
    attend: &'a AttentionJob<'a>,
    items: Range<usize>,
    state: &'a mut AttentionState,
}

impl AttentionJob<'_> {
    /// Walks the heads of one KV head of some rows, at most `QUERIES_MAX` at a time.
    #[inline(always)]
    fn attend_item<L: Lanes>(
        &self,
        slice: &PassSlice,
        blocks: &[BlockId],
        rows: Range<usize>,
        kv_head: usize,
        state: &mut AttentionState,
    ) {
        let readers = query_heads_of(self.call.heads, kv_head);
        let mut queries = [Query::default(); QUERIES_MAX];
        let mut n = 0;
        for row in rows.clone() {
            for head in readers.clone() {
                let end = slice.range.start as usize + row - slice.rows.start as usize + 1;
                let first = self.call.heads.window.map_or(0, |window| end.saturating_sub(window));
                queries[n] = Query { row, head, first, end };
                n += 1;
                let is_last = row + 1 == rows.end && head + 1 == readers.end;
                if n == QUERIES_MAX || is_last {
                    self.walk::<L>(&queries[..n], blocks, kv_head, state);
                    n = 0;
                }
            }
        }
    }

    /// All tiles that a query sees, chunk by chunk.
    #[inline(always)]
    fn walk<L: Lanes>(&self, queries: &[Query], blocks: &[BlockId], kv_head: usize, state: &mut AttentionState) {
        let seen = seen_by_any(queries);
        let n_lanes = self.call.heads.head_dim.next_multiple_of(LANES);
        let tiles = seen.start / TILE..seen.end.div_ceil(TILE);
        let blocks = &blocks[..seen.end.div_ceil(POSITIONS)];
        let is_int8 = self.kv.spec.dtype == KvDtype::Int8;
        if is_int8 {
            self.split_queries::<L>(queries, state);
        } else {
            self.lay_out::<L>(queries, &mut state.queries);
        }
        for (tile, blocks) in blocks.chunks(TILE_BLOCKS).enumerate().skip(tiles.start) {
            if is_int8 {
                self.score_int8::<L>(queries, blocks, kv_head, tile, state);
                self.weigh::<L>(queries, tile, state);
                self.add_values_int8::<L>(queries, blocks, kv_head, tile, state);
            } else {
                self.score::<L>(queries, blocks, kv_head, tile, state);
                self.weigh::<L>(queries, tile, state);
                self.accumulate_values::<L>(queries, blocks, kv_head, tile, state);
            }
            let (chunk_start, end) = (tile / CHUNK_TILES * CHUNK, (tile + 1) * TILE);
            merge::<L>(queries, tile * TILE..end, &state.tile, chunk_start, &mut state.chunk, n_lanes);
            if end.is_multiple_of(CHUNK) || tile + 1 == tiles.end {
                merge::<L>(queries, chunk_start..end, &state.chunk, 0, &mut state.row, n_lanes);
            }
        }
        for (i, query) in queries.iter().enumerate() {
            self.finish::<L>(query, &state.row.values[i], state.row.sum[i]);
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
        state: &mut AttentionState,
    ) {
        let n = queries.len();
        let (q, scores) = (&state.queries[..n * self.call.heads.head_dim], &mut state.scores[..n]);
        for (i, block) in blocks.iter().enumerate().skip(n_unseen_blocks(queries, tile)) {
            let k = self.kv.page_start(self.call.layer, block.0, kv_head);
            match self.widened_plane::<L>(k, n, &mut state.page) {
                KvPlane::F32(k) => self.score_page::<L, f32>(q, k, i, scores),
                KvPlane::F16(k) => self.score_page::<L, u16>(q, k, i, scores),
            }
        }
    }

    /// Scores become e^(score - largest of the tile), 0 where a query does not see.
    #[inline(always)]
    fn weigh<L: Lanes>(&self, queries: &[Query], tile: usize, state: &mut AttentionState) {
        for (i, query) in queries.iter().enumerate() {
            let Range { start, end: n } = query.seen_in(tile);
            state.scores[i][..start].fill(f32::NEG_INFINITY);
            let (scores, _) = state.scores[i].as_chunks_mut::<LANES>();
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
            (state.tile.largest[i], state.tile.sum[i]) = (largest, sum);
        }
    }

    /// tile = p · V over the positions that a query sees, ascending: [n_queries, head_dim]
    #[inline(always)]
    fn accumulate_values<L: Lanes>(
        &self,
        queries: &[Query],
        blocks: &[BlockId],
        kv_head: usize,
        tile: usize,
        state: &mut AttentionState,
    ) {
        let n = queries.len();
        let (scores, values) = (&state.scores[..n], &mut state.tile.values[..n]);
        let n_lanes = self.call.heads.head_dim.next_multiple_of(LANES);
        values.iter_mut().for_each(|values| values[..n_lanes].fill(0.0));
        for (i, block) in blocks.iter().enumerate().skip(n_unseen_blocks(queries, tile)) {
            let v = self.kv.page_start(self.call.layer, block.0, kv_head) + self.kv.k_to_v_distance();
            let at = tile * TILE + i * POSITIONS;
            match self.widened_plane::<L>(v, n, &mut state.page) {
                KvPlane::F32(v) => self.add_page::<L, f32>(queries, v, at, scores, values),
                KvPlane::F16(v) => self.add_page::<L, u16>(queries, v, at, scores, values),
            }
        }
    }

    #[inline(always)]
    fn finish<L: Lanes>(&self, query: &Query, acc: &[f32; HEAD_DIM_MAX], sum: f32) {
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
    for (i, query) in queries.iter().enumerate().filter(|(_, query)| query.sees(&positions)) {
        let (before, now) = (into.largest[i], of.largest[i]);
        let (acc, values) = (&mut into.values[i][..n_lanes], &of.values[i][..n_lanes]);
        if query.first.max(start) >= positions.start {
            acc.copy_from_slice(values);
            (into.largest[i], into.sum[i]) = (now, of.sum[i]);
            continue;
        }
        let largest = Real::max(before, now);
        let (keep, take) = (exp(before - largest), exp(now - largest));
        for (acc, values) in acc.as_chunks_mut::<LANES>().0.iter_mut().zip(values.as_chunks::<LANES>().0) {
            let taken = L::load(values).mul(L::splat(take));
            L::load(acc).fma(L::splat(keep), taken).store(acc);
        }
        into.sum[i] = into.sum[i].mul_add(keep, of.sum[i] * take);
        into.largest[i] = largest;
    }
}

impl Query {
    #[inline(always)]
    fn sees(&self, positions: &Range<usize>) -> bool {
        self.first < positions.end && positions.start < self.end
    }

    /// Whether this is the first tile that it sees.
    #[inline(always)]
    fn begins_in(&self, tile: usize) -> bool {
        self.first / TILE == tile
    }

    /// Positions within a tile.
    #[inline(always)]
    fn seen_in(&self, tile: usize) -> Range<usize> {
        self.seen_of(tile * TILE, TILE)
    }

    /// Of `n` positions from `start` on, counted from there.
    #[inline(always)]
    fn seen_of(&self, start: usize, n: usize) -> Range<usize> {
        let within = |position: usize| position.saturating_sub(start).min(n);
        within(self.first)..within(self.end)
    }
}

/// What any of the queries sees.
#[inline(always)]
fn seen_by_any(queries: &[Query]) -> Range<usize> {
    let first = queries.iter().map(|query| query.first).min().unwrap_or(0);
    first..queries.iter().map(|query| query.end).max().unwrap_or(0)
}

/// Blocks of a tile that no query sees any more: others may have them by now.
#[inline(always)]
fn n_unseen_blocks(queries: &[Query], tile: usize) -> usize {
    seen_by_any(queries).start.saturating_sub(tile * TILE) / POSITIONS
}
