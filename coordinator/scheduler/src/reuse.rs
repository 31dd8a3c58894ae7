//! Why no more of a prompt was reused: decided once, when a request is first admitted.

use crate::scheduler::Scheduler;
use crate::sequence::SequenceIdx;
use types::{BLOCK_TOKENS, Goal, PrefixReuse, ReuseEnd};

impl Scheduler {
    /// Why this sequence begins behind `n_hits` blocks, and no more. Full groups know `n_branch` of them.
    pub(crate) fn explain(&mut self, idx: SequenceIdx, n_hits: u32) -> PrefixReuse {
        let sequence = &self.sequences[idx];
        let n_known = sequence.n_branch.max(n_hits);
        let n_sharable = sequence.n_sharable();
        let refused = match () {
            () if !self.config.prefix_cache => Some(ReuseEnd::Off),
            () if sequence.has_private_blocks() => Some(ReuseEnd::Apart),
            () if sequence.request.cache_bypass || sequence.request.goal != Goal::Generate => Some(ReuseEnd::Bypassed),
            () if n_sharable == 0 => Some(ReuseEnd::FirstUse),
            () if n_hits == n_sharable => Some(ReuseEnd::Whole),
            () => None,
        };
        let ended = refused.unwrap_or_else(|| self.reuse_end(idx, n_hits, n_known));
        PrefixReuse { ended: Some(ended), position: n_known * BLOCK_TOKENS }
    }

    fn reuse_end(&mut self, idx: SequenceIdx, n_hits: u32, n_known: u32) -> ReuseEnd {
        let hashes = &self.sequences[idx].hashes;
        let was_there = |i: u32| self.pools.iter().any(|pool| pool.has_evicted(&hashes[i as usize]));
        if n_known > n_hits {
            let has_states = self.pools.iter().any(|pool| pool.group.is_state());
            return if has_states && !was_there(n_known - 1) { ReuseEnd::StateNotKept } else { ReuseEnd::Evicted };
        }
        let was_there = was_there(n_known);
        let has_full_first = self.sequences[idx].n_prompt() >= BLOCK_TOKENS;
        let are_others = has_full_first && self.first_blocks.replace_other_owner(&mut self.sequences[idx]);
        match n_known {
            _ if was_there => ReuseEnd::Evicted,
            0 if are_others => ReuseEnd::OtherOwner,
            0 => ReuseEnd::FirstUse,
            _ => ReuseEnd::Differs,
        }
    }
}
