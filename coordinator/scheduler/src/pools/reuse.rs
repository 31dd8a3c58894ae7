//! How much of a prompt is reused, and why no more: the reason is decided once, when a request is first admitted.

use super::BlockPools;
use crate::config::GROUPS_MAX;
use crate::sequence::Sequence;
use types::{BLOCK_TOKENS, Goal, PrefixReuse, ReuseEnd};

impl BlockPools {
    /// Returns how many blocks at the front of its log need not be computed: each pool has the blocks that a query
    /// behind them reads. A full group needs all of them, a windowed one those that the window touches, and a
    /// recurrence the last. If full groups have more of it than there is a state for, this prompt diverges from
    /// another: its state is kept.
    pub fn n_prefix_hits(&self, sequence: &mut Sequence) -> u32 {
        if !self.has_names {
            return 0;
        }
        // For each group, how many consecutive blocks up to here its pool has.
        let mut n_in_row = [0; GROUPS_MAX];
        let (mut n_hits, mut n_known) = (0, 0);
        'blocks: for n_blocks in 1..=sequence.n_sharable() {
            let name = sequence.hash(n_blocks - 1);
            let (mut serves, mut is_known) = (true, false);
            for (pool, n_in_row) in self.pools.iter().zip(&mut n_in_row) {
                *n_in_row = if pool.find(&name).is_some() { *n_in_row + 1 } else { 0 };
                serves &= n_blocks - *n_in_row <= pool.group.n_passed(n_blocks * BLOCK_TOKENS);
                is_known |= pool.group.keeps_all();
                if *n_in_row == 0 && pool.group.keeps_all() {
                    break 'blocks;
                }
            }
            n_known = if is_known { n_blocks } else { n_known };
            n_hits = if serves { n_blocks } else { n_hits };
        }
        sequence.found.n_branch = n_known;
        n_hits
    }

    /// Why this sequence begins behind `n_hits` blocks, and no more. Full groups know `n_branch` of them.
    pub fn explain(&mut self, sequence: &mut Sequence, n_hits: u32) -> PrefixReuse {
        let n_known = sequence.found.n_branch.max(n_hits);
        let n_sharable = sequence.n_sharable();
        let refused = match () {
            () if !self.has_names => Some(ReuseEnd::Off),
            () if sequence.has_private_blocks() => Some(ReuseEnd::Apart),
            () if sequence.request.cache_bypass || sequence.request.goal != Goal::Generate => Some(ReuseEnd::Bypassed),
            () if n_sharable == 0 => Some(ReuseEnd::FirstUse),
            () if n_hits == n_sharable => Some(ReuseEnd::Whole),
            () => None,
        };
        let ended = refused.unwrap_or_else(|| self.reuse_end(sequence, n_hits, n_known));
        PrefixReuse { ended: Some(ended), position: n_known * BLOCK_TOKENS }
    }

    fn reuse_end(&mut self, sequence: &mut Sequence, n_hits: u32, n_known: u32) -> ReuseEnd {
        let hashes = sequence.hashes();
        let was_there = |i: u32| self.pools.iter().any(|pool| pool.has_evicted(&hashes[i as usize]));
        if n_known > n_hits {
            let has_states = self.pools.iter().any(|pool| pool.group.is_state());
            return if has_states && !was_there(n_known - 1) { ReuseEnd::StateNotKept } else { ReuseEnd::Evicted };
        }
        let was_there = was_there(n_known);
        let has_full_first = sequence.n_prompt() >= BLOCK_TOKENS;
        let are_others = has_full_first && self.first_blocks.replace_other_owner(sequence);
        match n_known {
            _ if was_there => ReuseEnd::Evicted,
            0 if are_others => ReuseEnd::OtherOwner,
            0 => ReuseEnd::FirstUse,
            _ => ReuseEnd::Differs,
        }
    }
}
