//! How the rows of a pass are cut into items, and which tiles each sees.

use super::{AttentionJob, POSITIONS, QUERIES_MAX, TILE};
use crate::{AttentionCall, AttentionHeads, PassSlice};
use std::ops::Range;
use types::BlockId;

/// Query heads of a KV head in a run of rows: at most `QUERIES_MAX` queries.
pub(super) struct AttentionItem<'a> {
    slice: &'a PassSlice,
    pub blocks: &'a [BlockId],
    rows: Range<usize>,
    pub kv_head: usize,
    heads: Range<usize>,
}

/// One query: a head of a row, and how far it may look.
#[derive(Clone, Copy, Default)]
pub(super) struct Query {
    pub row: usize,
    pub head: usize,
    pub position: usize,
    /// `[0, first) is out of sight · [first, end) is seen`
    pub first: usize,
    pub end: usize,
}

/// An item, its queries, and some of the tiles that they see.
pub(super) struct ItemTiles<'a> {
    pub item: AttentionItem<'a>,
    queries: [Query; QUERIES_MAX],
    n_queries: usize,
    pub tiles: Range<usize>,
}

impl ItemTiles<'_> {
    pub fn queries(&self) -> &[Query] {
        &self.queries[..self.n_queries]
    }
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

impl<'a> AttentionJob<'a> {
    pub(super) fn items(&self) -> impl Iterator<Item = AttentionItem<'a>> {
        let AttentionCall { pass, heads, group, .. } = *self.call;
        let (rows_max, tables) = (rows_per_item(heads), pass.tables.group(group));
        pass.slices.iter().enumerate().flat_map(move |(i, slice)| {
            let cuts = (slice.rows.start as usize..slice.rows.end as usize).step_by(rows_max);
            let cuts = cuts.flat_map(move |row| (0..heads.n_kv_heads).map(move |kv_head| (row, kv_head)));
            cuts.flat_map(move |(row, kv_head)| {
                let rows = row..(row + rows_max).min(slice.rows.end as usize);
                let all = query_heads_of(heads, kv_head);
                all.clone().step_by(QUERIES_MAX).map(move |head| AttentionItem {
                    slice,
                    blocks: tables.blocks_of(i),
                    rows: rows.clone(),
                    kv_head,
                    heads: head..(head + QUERIES_MAX).min(all.end),
                })
            })
        })
    }

    fn queries_of(&self, item: &AttentionItem<'_>) -> ([Query; QUERIES_MAX], usize) {
        let mut queries = [Query::default(); QUERIES_MAX];
        let all = item.rows.clone().flat_map(|row| item.heads.clone().map(move |head| (row, head)));
        let mut n = 0;
        for (query, (row, head)) in queries.iter_mut().zip(all) {
            let PassSlice { rows, range, .. } = item.slice;
            let position = range.start as usize + row - rows.start as usize;
            let Range { start: first, end } = self.call.heads.positions_seen(position, range.end as usize);
            *query = Query { row, head, position, first, end };
            n += 1;
        }
        (queries, n)
    }

    /// Some items, each with what it has of `tiles`, which counts the tiles of these items in order.
    pub(super) fn parts(&self, items: Range<usize>, tiles: Range<usize>) -> impl Iterator<Item = ItemTiles<'a>> {
        let mut first = 0;
        let parts = self.items().skip(items.start).take(items.len()).map(move |item| {
            let (queries, n_queries) = self.queries_of(&item);
            let (start, seen) = (first, tiles_seen(&queries[..n_queries]));
            first += seen.len();
            let within = |at: usize| at.clamp(start, first) - start + seen.start;
            ItemTiles { item, queries, n_queries, tiles: within(tiles.start)..within(tiles.end) }
        });
        parts.filter(|part| !part.tiles.is_empty())
    }

    /// The number of tiles that all items see.
    pub(super) fn n_tiles(&self) -> usize {
        self.parts(0..usize::MAX, 0..usize::MAX).map(|part| part.tiles.len()).sum()
    }
}

impl Query {
    #[inline(always)]
    pub fn sees(&self, positions: &Range<usize>) -> bool {
        self.first < positions.end && positions.start < self.end
    }

    /// Whether this is the first tile that it sees.
    #[inline(always)]
    pub fn begins_in(&self, tile: usize) -> bool {
        self.first / TILE == tile
    }

    /// Positions within a tile.
    #[inline(always)]
    pub fn seen_in(&self, tile: usize) -> Range<usize> {
        self.seen_of(tile * TILE, TILE)
    }

    /// Of `n` positions from `start` on, counted from there.
    #[inline(always)]
    pub fn seen_of(&self, start: usize, n: usize) -> Range<usize> {
        let within = |position: usize| position.saturating_sub(start).min(n);
        within(self.first)..within(self.end)
    }
}

/// What any of the queries sees.
#[inline(always)]
pub(super) fn seen_by_any(queries: &[Query]) -> Range<usize> {
    let first = queries.iter().map(|query| query.first).min().unwrap_or(0);
    first..queries.iter().map(|query| query.end).max().unwrap_or(0)
}

/// The tiles that any of the queries sees.
#[inline(always)]
pub(super) fn tiles_seen(queries: &[Query]) -> Range<usize> {
    let seen = seen_by_any(queries);
    seen.start / TILE..seen.end.div_ceil(TILE)
}

/// Blocks of a tile that no query sees any more: others may have them by now.
#[inline(always)]
pub(super) fn n_unseen_blocks(queries: &[Query], tile: usize) -> usize {
    seen_by_any(queries).start.saturating_sub(tile * TILE) / POSITIONS
}
