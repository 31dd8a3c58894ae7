//! Attention of a few rows: threads share the tiles of an item, and the results merge in the order of positions.
//!
//! A tile's weighted values do not depend on what was before it, and they merge as they do where one thread walks all
//! tiles. So the bits are the same, however many threads there are.

use super::{
    AttentionItem, AttentionJob, AttentionState, QUERIES_MAX, Query, STATE, WeightedValues, query_heads_of, tiles_seen,
};
use crate::cpu::isa::{Isa, Kernel, dispatch};
use crate::cpu::kv::WORKING_BYTES;
use crate::cpu::lanes::Lanes;
use crate::cpu::memory::SharedPtr;
use crate::cpu::team::Team;
use std::ops::Range;
use std::sync::PoisonError;

/// Tiles that are computed before they are merged. A step allocates nothing, so the cache has memory for their results.
const WAVE: usize = WORKING_BYTES / size_of::<WeightedValues>();

/// A tile of an item, and all of the item's queries.
struct TileWork<'a> {
    item: AttentionItem<'a>,
    queries: [Query; QUERIES_MAX],
    n_queries: usize,
    tile: usize,
}

impl<'a> AttentionJob<'a> {
    /// The number of tiles that all items see.
    pub(super) fn n_tiles(&self) -> usize {
        self.items().map(|item| self.tiles_of(&item).len()).sum()
    }

    fn tiles_of(&self, item: &AttentionItem<'_>) -> Range<usize> {
        let (queries, n) = self.queries_of(item);
        tiles_seen(&queries[..n])
    }

    fn queries_of(&self, item: &AttentionItem<'_>) -> ([Query; QUERIES_MAX], usize) {
        let mut queries = [Query::default(); QUERIES_MAX];
        let readers = query_heads_of(self.call.heads, item.kv_head);
        let all = item.rows.clone().flat_map(|row| readers.clone().map(move |head| (row, head)));
        let mut n = 0;
        for (query, (row, head)) in queries.iter_mut().zip(all) {
            *query = self.query(item, row, head);
            n += 1;
        }
        (queries, n)
    }

    /// Tiles `range` of those of all items, in order.
    fn tiles(&self, range: Range<usize>) -> impl Iterator<Item = TileWork<'a>> {
        let mut first = 0;
        self.items().flat_map(move |item| {
            let ((queries, n_queries), start) = (self.queries_of(&item), first);
            let tiles = if n_queries > 0 { tiles_seen(&queries[..n_queries]) } else { 0..0 };
            first += tiles.len();
            let within = |at: usize| at.clamp(start, first) - start + tiles.start;
            let tiles = within(range.start)..within(range.end);
            tiles.map(move |tile| TileWork { item: item.clone(), queries, n_queries, tile })
        })
    }

    /// Computes all items. Threads share the tiles of a wave, and then this one merges them.
    pub(super) fn run_by_tiles(&self, isa: Isa, team: &Team, n_tiles: usize) {
        // A wave writes what it reads, so the results of an aborted one do not matter.
        let results = self.kv.working.lock().unwrap_or_else(PoisonError::into_inner);
        let to = SharedPtr::new(results.start().cast::<WeightedValues>());
        for first in (0..n_tiles).step_by(WAVE) {
            let n = WAVE.min(n_tiles - first);
            team.run(n, &|part| {
                // SAFETY: a wave has at most as many tiles as there are results, and one thread has each.
                let to = unsafe { to.part(part.start, part.len()) };
                let tiles = first + part.start..first + part.end;
                STATE.with_borrow_mut(|state| dispatch(isa, WaveTiles { attend: self, tiles, state, to }));
            });
            // SAFETY: the wave is over.
            let of = unsafe { to.part(0, n) };
            STATE
                .with_borrow_mut(|state| dispatch(isa, WaveMerge { attend: self, tiles: first..first + n, state, of }));
        }
    }
}

/// Some tiles of a wave.
struct WaveTiles<'a> {
    attend: &'a AttentionJob<'a>,
    tiles: Range<usize>,
    state: &'a mut AttentionState,
    to: &'a mut [WeightedValues],
}

impl Kernel for WaveTiles<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (work, to) in self.attend.tiles(self.tiles).zip(self.to) {
            let queries = &work.queries[..work.n_queries];
            self.attend.prepare::<L>(queries, &mut self.state.scratch);
            self.attend.weigh_tile::<L>(queries, &work.item, work.tile, &mut self.state.scratch, to);
        }
    }
}

/// Merges the tiles of a wave, in order. An item may begin in one wave and end in another.
struct WaveMerge<'a> {
    attend: &'a AttentionJob<'a>,
    tiles: Range<usize>,
    state: &'a mut AttentionState,
    of: &'a [WeightedValues],
}

impl Kernel for WaveMerge<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (work, of) in self.attend.tiles(self.tiles).zip(self.of) {
            let queries = &work.queries[..work.n_queries];
            self.attend.merge_tile::<L>(queries, work.tile, of, &mut self.state.sums);
            if work.tile + 1 == tiles_seen(queries).end {
                self.attend.finish_all::<L>(queries, &self.state.sums.row);
            }
        }
    }
}
