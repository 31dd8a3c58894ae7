//! How much of the pools has memory at the ranks, and how much should have. Counted in parts of each pool (`KV_PARTS`
//! is all of it). Knows no rank.

use super::{BlockPools, PromisedBlocks};
use crate::waiting::WaitingQueue;
use types::{BLOCK_TOKENS, KV_PARTS, blocks_committed, parts_for};

impl BlockPools {
    /// Sets how much of each pool has memory.
    pub fn set_committed_parts(&mut self, parts: u32) {
        self.pools.iter_mut().for_each(|pool| pool.set_committed(blocks_committed(pool.n_total(), parts)));
    }

    /// How much should have memory: blocks in use and cached ones, what running requests still need for their logs
    /// (`promised`) and waiting ones for theirs, each at most a `context`, and `ahead` more positions. Too much rather
    /// than too little: of waiting requests it is not known which blocks they will share.
    pub fn parts_target(&self, promised: PromisedBlocks, waiting: &WaitingQueue, context: u32, ahead: u32) -> u32 {
        let slice_max = self.slice_max;
        let n_waiting = waiting.len() as u64;
        let targets = self.pools.iter().zip(promised).map(|(pool, n_promised)| {
            let group = pool.group;
            let of_waiting = n_waiting * u64::from(group.n_held_max(context, slice_max.min(context)));
            let of_waiting = of_waiting.min(waiting.n_tokens() / u64::from(BLOCK_TOKENS) + 2 * n_waiting);
            let n_ahead = group.n_held_max(ahead, slice_max.min(ahead));
            let n_taken = u64::from(pool.n_used()) + u64::from(pool.n_cached());
            parts_for(n_taken + u64::from(n_promised) + of_waiting + u64::from(n_ahead), pool.n_total())
        });
        targets.max().unwrap_or(KV_PARTS)
    }

    /// The parts that hold every block which is in use or cached.
    pub fn parts_held(&self) -> u32 {
        self.pools.iter().map(|pool| parts_for(pool.held_end().into(), pool.n_total())).max().unwrap_or(0)
    }
}
