//! How many blocks the pool of each cache group has. Knows groups and lengths; no machines, and no bytes but those that
//! are passed in.
//!
//! All pools grow together, on one scale: the blocks of a group without a window. A windowed group keeps less, so its
//! pool is smaller; how much smaller depends on the length of sequences. Up to one whole context the scale is that of a
//! single sequence. Beyond, pools are for `running_max` sequences of one length that share eight whole contexts: longer
//! ones exhaust the full pool first, shorter ones the windowed.
//!
//! A recurrence's pool has room for what running sequences go on from, as if it were a window, and beside it for the
//! states that the prefix cache keeps.

use types::cache::blocks_for;
use types::{BLOCKS_MAX, CacheGroup};

/// The default size in whole contexts, if no memory was given.
const CONTEXTS_BY_DEFAULT: u64 = 8;

/// The pools of sequences of at most `context` positions, computed in slices of at most `slice_max`.
#[derive(Clone, Debug)]
pub(crate) struct PoolSizing<'a> {
    pub groups: &'a [CacheGroup],
    pub context: u32,
    pub slice_max: u32,
    pub running_max: u32,
    pub states: StateCacheSize,
}

/// The blocks of each recurrent group that the prefix cache may keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateCacheSize {
    Blocks(u64),
    /// A part of the pools' size: so many blocks for so many of a group without a window.
    Part(u64, u64),
}

impl StateCacheSize {
    /// Where nothing keeps all positions, a state for so many blocks.
    const ALONE: StateCacheSize = StateCacheSize::Part(1, 32);

    /// Memory for states alone, if it was given; else as much as keys and values take that are kept for good. All bytes
    /// are of a block of the whole model.
    pub fn of(given: Option<u64>, state_bytes: u64, full_bytes: u64) -> StateCacheSize {
        match given {
            Some(bytes) => StateCacheSize::Blocks(bytes / state_bytes.max(1)),
            None if full_bytes == 0 => StateCacheSize::ALONE,
            None => StateCacheSize::Part(full_bytes, state_bytes.max(1)),
        }
    }

    fn at(self, size: u64) -> u64 {
        match self {
            StateCacheSize::Blocks(n) => n,
            StateCacheSize::Part(n, of) => size.saturating_mul(n).div_ceil(of),
        }
    }
}

impl PoolSizing<'_> {
    /// The size at which one whole context fits every pool.
    pub fn min(&self) -> u64 {
        blocks_for(self.context).into()
    }

    /// The default size.
    pub fn by_default(&self) -> u64 {
        self.contexts(CONTEXTS_BY_DEFAULT.min(self.n_running()))
    }

    /// The size from which on all running sequences fit.
    pub fn max(&self) -> u64 {
        self.contexts(self.n_running())
    }

    fn contexts(&self, n: u64) -> u64 {
        (n * self.min()).min(BLOCKS_MAX.into())
    }

    fn n_running(&self) -> u64 {
        self.running_max.max(1).into()
    }

    /// The blocks of each group's pool.
    pub fn at(&self, size: u64) -> impl Iterator<Item = u64> {
        self.groups.iter().map(move |group| self.of_group(group, size))
    }

    /// The bytes that a rank needs if it keeps `block_bytes` for a block of each group.
    pub fn bytes(&self, size: u64, block_bytes: &[u64]) -> u64 {
        self.at(size)
            .zip(block_bytes)
            .map(|(n_blocks, bytes)| n_blocks.saturating_mul(*bytes))
            .fold(0, u64::saturating_add)
    }

    /// Whether these bytes fit into what is available.
    pub fn fit(&self, size: u64, block_bytes: &[u64], available: u64) -> bool {
        self.bytes(size, block_bytes) <= available
    }

    fn of_group(&self, group: &CacheGroup, size: u64) -> u64 {
        if group.keeps_all() {
            return size;
        }
        let kept = if group.is_state() { self.states.at(size) } else { 0 };
        self.running(group, size).saturating_add(kept).min(size)
    }

    /// The blocks of a windowed group that running sequences go on from.
    fn running(&self, group: &CacheGroup, size: u64) -> u64 {
        let whole = u64::from(group.n_held_max(self.context, self.slice_max));
        if size <= self.min() {
            return size.min(whole);
        }
        // Most sequences decode: the extra blocks of a long slice are needed once, because steps are not longer.
        let decoding = u64::from(group.n_held_max(self.context, 1));
        let mean_length = (self.by_default() / self.n_running()).max(1);
        let n_sequences_held = size * decoding.min(mean_length);
        let due = n_sequences_held.div_ceil(mean_length) + (whole - decoding);
        due.max(whole).min(size).min(whole * self.n_running())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: CacheGroup = CacheGroup::FULL.with_window(512);

    fn pools(context: u32, running_max: u32) -> PoolSizing<'static> {
        let states = StateCacheSize::Blocks(0);
        PoolSizing { groups: &[LOCAL, CacheGroup::FULL], context, slice_max: 512, running_max, states }
    }

    #[test]
    fn a_window_has_a_part_of_what_all_is() {
        // (context, running, size of the full pool, blocks of the windowed one)
        let cases = [
            // One sequence: the window, a slice, and one block more because neither is aligned.
            (32_768, 64, 2048, 65),
            (32_768, 64, 100, 65),
            (32_768, 64, 10, 10),
            // Sequences of 4,096 positions: 33 of 256 blocks each, and one slice.
            (32_768, 64, 8 * 2048, 64 * 33 + 32),
            (32_768, 64, 4 * 2048, 32 * 33 + 32),
            // Sequences shorter than the window keep everything.
            (4096, 64, 8 * 256, 8 * 256),
            // Few run: each may be as long as the context.
            (32_768, 2, 2 * 2048, 2 * 33 + 32),
            (32_768, 1, 2 * 2048, 65),
        ];
        for (context, running_max, size, expected) in cases {
            let got: Vec<u64> = pools(context, running_max).at(size).collect();
            assert_eq!(got, [expected, size], "{context} {running_max}");
        }
    }

    #[test]
    fn states_have_room_for_what_runs_and_for_what_is_kept() {
        let at = |size, states| {
            let pools = PoolSizing { groups: &[CacheGroup::STATE, CacheGroup::FULL], states, ..pools(32_768, 64) };
            pools.at(size).collect::<Vec<u64>>()
        };
        // Each of 64 goes on from two pages, and one of them has drafts beside.
        let (none, all) = (StateCacheSize::Blocks(0), 8 * 2048);
        assert_eq!(at(all, none), [64 * 2 + 2, all]);
        assert_eq!(at(all, StateCacheSize::Blocks(100)), [64 * 2 + 2 + 100, all]);
        assert_eq!(at(2048, StateCacheSize::Blocks(100)), [4 + 100, 2048]);
        assert_eq!(at(50, StateCacheSize::Blocks(100)), [50, 50], "no more than one for each block");
        // As many bytes as the others have.
        assert_eq!(StateCacheSize::of(None, 4000, 100), StateCacheSize::Part(100, 4000));
        assert_eq!(at(all, StateCacheSize::Part(100, 4000)), [64 * 2 + 2 + all.div_ceil(40), all]);
        assert_eq!(StateCacheSize::of(Some(9000), 4000, 100), StateCacheSize::Blocks(2));
        assert_eq!(at(all, StateCacheSize::of(None, 4000, 0)), [64 * 2 + 2 + all / 32, all]);
    }

    #[test]
    fn pools_grow_together_and_each_holds_a_whole_context() {
        for (context, running_max) in [(16, 1), (500, 3), (4096, 64), (100_000, 7), (131_072, 256)] {
            let pools = pools(context, running_max);
            let at = |size| pools.at(size).collect::<Vec<u64>>();
            let whole = u64::from(LOCAL.n_held_max(context, 512));
            assert_eq!(at(pools.min()), [whole, pools.min()]);
            let sizes: Vec<u64> = (0..2000).map(|i| i * (pools.max() + 10) / 1999).collect();
            assert!(sizes.windows(2).all(|pair| at(pair[0])[0] <= at(pair[1])[0]), "{context} {running_max}");
            let all = at(pools.by_default())[0];
            assert!(all >= u64::from(running_max).min(8) * u64::from(LOCAL.n_held_max(context, 1)) || all >= whole);
            assert_eq!(pools.bytes(10, &[3, 5]), at(10)[0] * 3 + 50);
        }
        assert_eq!(pools(1 << 20, 64).bytes(9, &[u64::MAX, u64::MAX]), u64::MAX, "more than there is");
    }
}
