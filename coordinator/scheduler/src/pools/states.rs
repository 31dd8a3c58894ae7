//! Which states of recurrences are kept. A state page is as large as the keys and values of hundreds of positions, and
//! a hit needs only the last one: so a slice gets blocks for the pages that a later slice may begin from, and for those
//! of a few places that requests come back to. The rest of its entries are `NONE`.
//!
//! ```text
//! prompt  . . S . . . S . . B . P     S: a stride · B: where a prompt has left another · P: the prompt's end
//! answer  e e e e E                   E: its last full page so far, kept until the next one is full
//! ```
//!
//! A page without a name is free when its sequence leaves it behind. What is kept is optional: no sequence is preempted
//! for it, and it is not kept if the pool has nothing to spare.

use super::BlockPools;
use crate::sequence::Sequence;
use crate::stats::Counters;
use core::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, CacheGroup, Page, PageKey};

impl Sequence {
    /// Whether requests may come back to the end of block `i`: it ends at the stride, with the last full block of the
    /// prompt, or where this prompt leaves what others have computed.
    pub fn may_resume_after(&self, i: u32, stride: u32) -> bool {
        let n = i + 1;
        let at_stride = stride > 0 && (n * BLOCK_TOKENS).is_multiple_of(stride);
        let n_prompt = self.n_prompt();
        at_stride || n == n_prompt / BLOCK_TOKENS || n == (n_prompt - 1) / BLOCK_TOKENS || n == self.found.n_branch
    }

    /// The blocks of a group that it lacks to have the positions before `end` computed. The last `n_drafts` of
    /// these positions are drafts. Optional blocks are counted apart.
    #[inline]
    pub fn n_lacking(&self, group: &CacheGroup, end: u32, n_drafts: u32) -> u32 {
        let n_entries = self.n_entries();
        let first = if group.is_state() { group.n_carried(end, n_drafts).max(n_entries) } else { n_entries };
        blocks_for(end).saturating_sub(first)
    }
}

impl BlockPools {
    /// How many of a sequence's first `n_blocks` blocks others can begin behind, once it has computed them.
    pub fn n_resumable(&self, sequence: &Sequence, n_blocks: u32) -> u32 {
        if !self.pools.iter().any(|pool| pool.group.is_state()) {
            return n_blocks;
        }
        let is_kept = |n: &u32| sequence.may_resume_after(n - 1, self.state_stride);
        (1..=n_blocks).rev().find(is_kept).unwrap_or(0)
    }

    /// A slice from position `from` on has come back: names the blocks that became full for good, and releases those
    /// behind windows.
    pub fn settle(&mut self, sequence: &mut Sequence, from: u32, counters: &mut Counters) {
        let n_full = sequence.progress().n_sure / BLOCK_TOKENS;
        let first = from / BLOCK_TOKENS;
        if first < n_full && self.may_name(sequence) {
            self.name_full_blocks(sequence, first..n_full);
            self.name_states(sequence, first..n_full, counters);
        }
        if self.has_windows {
            self.release_passed_blocks(sequence, n_full, counters);
            self.drop_temporary_states(sequence, n_full);
        }
    }

    /// Whether a sequence's full blocks get names, so that others find them.
    #[inline]
    pub(super) fn may_name(&self, sequence: &Sequence) -> bool {
        self.has_names && !sequence.has_private_blocks()
    }

    fn name_full_blocks(&mut self, sequence: &mut Sequence, full: Range<u32>) {
        for i in full {
            let name = sequence.hash(i);
            for (group, (pool, table)) in (0..).zip(self.pools.iter_mut().zip(&sequence.tables)) {
                let block = table.blocks[i as usize];
                if !pool.group.is_state() && pool.name(block, name) {
                    self.tier.store(Page { key: PageKey { group, name }, block });
                }
            }
        }
    }

    /// Names the pages of states that have become full (`full`) and are kept: for good, or as the last full one until
    /// the next is. The page that was the last full one before loses that place.
    fn name_states(&mut self, sequence: &mut Sequence, full: Range<u32>, counters: &mut Counters) {
        for i in full.clone() {
            let (name, is_kept) = (sequence.hash(i), sequence.may_resume_after(i, self.state_stride));
            let groups = (0..).zip(self.pools.iter_mut().zip(&sequence.tables));
            for (group, (pool, table)) in groups.filter(|(_, (pool, _))| pool.group.is_state()) {
                let block = table.blocks[i as usize];
                if block != BlockId::NONE && (is_kept || i + 1 == full.end) {
                    counters.states_kept += u64::from(is_kept && pool.find(&name).is_none());
                    pool.name(block, name);
                    pool.set_temporary(&name, block, !is_kept);
                    if is_kept && pool.name_of(block) == Some(&name) {
                        self.tier.store(Page { key: PageKey { group, name }, block });
                    }
                }
            }
        }
    }

    /// Releases, of the first `n_full` blocks, those behind the windows of all positions that may yet be planned.
    /// Slices in flight may still read them: later steps may write them at once, because each rank runs steps in order.
    /// They are named by now.
    fn release_passed_blocks(&mut self, sequence: &mut Sequence, n_full: u32, counters: &mut Counters) {
        let position = sequence.earliest_start();
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            counters.blocks_passed += u64::from(pool.release_passed(table, position, n_full));
        }
    }

    /// Drops the pages that were named as the last full ones and are so no longer: no request comes back to the middle
    /// of an answer.
    fn drop_temporary_states(&mut self, sequence: &mut Sequence, n_full: u32) {
        if let Some(name) = sequence.pass_full_blocks(n_full) {
            self.pools.iter_mut().filter(|pool| pool.group.is_state()).for_each(|pool| pool.drop_temporary(name));
        }
    }

    /// Keeps the last full page of a sequence that ends or makes way.
    pub(super) fn keep_last_state(&mut self, sequence: &mut Sequence) {
        if let Some(name) = sequence.take_last_full() {
            for (group, pool) in (0..).zip(&mut self.pools) {
                if let Some(block) = pool.make_permanent(name) {
                    self.tier.store(Page { key: PageKey { group, name: *name }, block });
                }
            }
        }
    }

    /// Takes the names from a failed request's blocks, shared ones too: their content may be the cause, and no other
    /// request is to build on it. A sound prompt is computed again once.
    pub fn forget_names(&mut self, sequence: &mut Sequence) {
        if !self.may_name(sequence) {
            return;
        }
        for i in 0..sequence.progress().n_sure / BLOCK_TOKENS {
            let name = sequence.hash(i);
            for (group, pool) in (0..).zip(&mut self.pools) {
                pool.forget(&name);
                self.tier.forget(PageKey { group, name });
            }
        }
    }
}
