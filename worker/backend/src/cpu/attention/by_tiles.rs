//! Attention of a few rows: threads share the tiles of an item, and the results merge in the order of positions.
//!
//! A tile's weighted values do not depend on what was before it, and they merge as they do where one thread walks all
//! tiles. So the bits are the same, however many threads there are.

use super::{AttentionJob, AttentionState, STATE, TileWalk, WeightedValues};
use crate::cpu::isa::{Isa, Kernel, dispatch};
use crate::cpu::kv::WORKING_BYTES;
use crate::cpu::lanes::Lanes;
use crate::cpu::memory::SharedPtr;
use crate::cpu::team::Team;
use std::ops::Range;
use std::sync::PoisonError;

/// Tiles that are computed before they are merged. A step allocates nothing, so the cache has memory for their results.
const WAVE: usize = WORKING_BYTES / size_of::<WeightedValues>();

impl AttentionJob<'_> {
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
                STATE.with_borrow_mut(|state| {
                    dispatch(isa, TileWalk { attend: self, items: 0..usize::MAX, tiles, state, results: to })
                });
            });
            // SAFETY: the wave is over.
            let of = unsafe { to.part(0, n) };
            STATE
                .with_borrow_mut(|state| dispatch(isa, WaveMerge { attend: self, tiles: first..first + n, state, of }));
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
        let mut results = self.of.iter();
        for part in self.attend.parts(0..usize::MAX, self.tiles) {
            for (tile, of) in part.tiles.clone().zip(&mut results) {
                self.attend.merge_tile::<L>(part.queries(), tile, of, &mut self.state.sums);
            }
        }
    }
}
