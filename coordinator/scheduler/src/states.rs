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

use crate::config::GROUPS_MAX;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceIdx};
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, CacheGroup};

impl Sequence {
    /// Whether requests may come back to the end of block `i`: it ends at the stride, with the last full block of the
    /// prompt, or where this prompt leaves what others have computed.
    pub fn may_resume_after(&self, i: u32, stride: u32) -> bool {
        let n = i + 1;
        let at_stride = stride > 0 && (n * BLOCK_TOKENS).is_multiple_of(stride);
        let n_prompt = self.n_prompt();
        at_stride || n == n_prompt / BLOCK_TOKENS || n == (n_prompt - 1) / BLOCK_TOKENS || n == self.n_branch
    }

    /// The blocks of a group that it lacks to have the positions before `end` computed; optional ones are counted
    /// apart.
    #[inline]
    pub fn n_lacking(&self, group: &CacheGroup, end: u32) -> u32 {
        let n_entries = self.n_entries();
        let first = if group.is_state() { group.n_carried(end, self.n_drafts).max(n_entries) } else { n_entries };
        blocks_for(end).saturating_sub(first)
    }
}

impl Scheduler {
    /// Whether each group can give the blocks that a sequence lacks to have the positions before `end` computed.
    #[inline]
    pub(crate) fn has_blocks(&self, idx: SequenceIdx, end: u32) -> bool {
        let sequence = &self.sequences[idx];
        self.pools.iter().all(|pool| sequence.n_lacking(&pool.group, end) <= pool.n_available())
    }

    /// Takes blocks of each group up to position `end`: all of them, or of a recurrence those of the end and, if the
    /// pool has more than two pages for each running sequence, those of places to come back to.
    pub(crate) fn take_blocks(&mut self, idx: SequenceIdx, end: u32) {
        let may_name = self.config.prefix_cache && !self.sequences[idx].has_private_blocks();
        let (stride, n_spared) = (self.config.state_stride, 2 * self.running.len() as u32);
        let sequence = &mut self.sequences[idx];
        let entries = sequence.n_entries()..blocks_for(end);
        if entries.is_empty() {
            return;
        }
        let mut tables = core::mem::take(&mut sequence.tables);
        for (pool, table) in self.pools.iter_mut().zip(&mut tables) {
            let before = pool.n_evictions();
            let n_lacking = sequence.n_lacking(&pool.group, end);
            let first = entries.end - n_lacking;
            for i in entries.clone() {
                let is_spared = || may_name && sequence.may_resume_after(i, stride);
                let is_taken = i >= first || (is_spared() && pool.n_available() > n_lacking + n_spared);
                let block = if is_taken { pool.take() } else { Some(BlockId::NONE) };
                table.push(block.expect("there are as many blocks as counted"));
            }
            self.counters.evictions += pool.n_evictions() - before;
        }
        sequence.tables = tables;
        sequence.set_n_entries(entries.end);
    }

    /// Names the pages of states that have become full (`full`) and are kept: for good, or as the last full one until
    /// the next is. The page that was the last full one before loses that place.
    pub(crate) fn name_states(&mut self, idx: SequenceIdx, full: core::ops::Range<u32>) {
        let stride = self.config.state_stride;
        let sequence = &mut self.sequences[idx];
        for i in full.clone() {
            let (name, is_kept) = (sequence.hash(i), sequence.may_resume_after(i, stride));
            let states = self.pools.iter_mut().zip(&sequence.tables).filter(|(pool, _)| pool.group.is_state());
            for (pool, table) in states {
                let block = table.blocks[i as usize];
                if block != BlockId::NONE && (is_kept || i + 1 == full.end) {
                    self.counters.states_kept += u64::from(is_kept && pool.find(&name).is_none());
                    pool.name(block, name);
                    pool.set_temporary(&name, block, !is_kept);
                }
            }
        }
    }

    /// Drops the pages that were named as the last full ones and are so no longer: no request comes back to the middle
    /// of an answer.
    pub(crate) fn drop_temporary_states(&mut self, idx: SequenceIdx, n_full: u32) {
        let sequence = &mut self.sequences[idx];
        if sequence.n_passing < n_full {
            let before = core::mem::replace(&mut sequence.n_passing, n_full);
            if let Some(name) = before.checked_sub(1).and_then(|i| sequence.hashes.get(i as usize)) {
                self.pools.iter_mut().filter(|pool| pool.group.is_state()).for_each(|pool| pool.drop_temporary(name));
            }
        }
    }

    /// Keeps the last full page of a sequence that ends or makes way.
    pub(crate) fn keep_last_state(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        let last = core::mem::take(&mut sequence.n_passing).checked_sub(1);
        if let Some(name) = last.and_then(|i| sequence.hashes.get(i as usize)) {
            self.pools.iter_mut().for_each(|pool| pool.make_permanent(name));
        }
    }

    /// Returns how many blocks at the front of its log need not be computed: each pool has the blocks that a query
    /// behind them reads. A full group needs all of them, a windowed one those that the window touches, and a
    /// recurrence the last. If full groups have more of it than there is a state for, this prompt diverges from
    /// another: its state is kept.
    pub(crate) fn n_prefix_hits(&mut self, idx: SequenceIdx) -> u32 {
        if !self.config.prefix_cache {
            return 0;
        }
        let sequence = &mut self.sequences[idx];
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
        sequence.n_branch = n_known;
        n_hits
    }
}
