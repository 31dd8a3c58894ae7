//! The pools of all cache groups. A sequence has a table in each, and takes and releases blocks of all at once.

mod committed;
mod reuse;
mod states;

use crate::blocks::BlockPool;
use crate::config::{Config, GROUPS_MAX};
use crate::journal::BlockNameChange;
use crate::seen::FirstBlockOwners;
use crate::sequence::Sequence;
use crate::stats::{Counters, Stats};
use crate::tier::Tier;
use alloc::vec::Vec;
use core::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, CacheGroup};

/// For each group, the blocks that running sequences will take until their logs are computed.
pub(crate) type PromisedBlocks = [u32; GROUPS_MAX];

pub(crate) struct BlockPools {
    /// One per cache group.
    pools: Vec<BlockPool>,
    /// Whether full blocks get names.
    has_names: bool,
    /// Whether some group releases blocks while its sequences run.
    has_windows: bool,
    /// States at multiples of so many positions are kept; zero: at none.
    state_stride: u32,
    /// The most tokens of any slice.
    slice_max: u32,
    first_blocks: FirstBlockOwners,
    pub tier: Tier,
}

fn empty_pools(config: &Config) -> Vec<BlockPool> {
    config.groups.iter().zip(&config.n_blocks).map(|(&group, &n_blocks)| BlockPool::new(group, n_blocks)).collect()
}

impl BlockPools {
    pub fn new(config: &Config) -> BlockPools {
        BlockPools {
            pools: empty_pools(config),
            has_names: config.prefix_cache && !config.keeps_nothing(),
            has_windows: !config.groups.iter().all(CacheGroup::keeps_all),
            state_stride: config.state_stride,
            slice_max: config.slice_max(),
            first_blocks: FirstBlockOwners::new(config),
            tier: Tier::new(config.tier_pages_max),
        }
    }

    /// The workers' caches are gone, and have a new size.
    pub fn reset(&mut self, config: &Config) {
        self.pools = empty_pools(config);
        self.tier.begin_epoch();
    }

    /// Whether full blocks get names, by which others find them.
    pub fn has_names(&self) -> bool {
        self.has_names
    }

    pub fn n_groups(&self) -> usize {
        self.pools.len()
    }

    /// Each group's pool.
    pub fn iter(&self) -> impl Iterator<Item = &BlockPool> + Clone {
        self.pools.iter()
    }

    /// Whether each group can give the blocks that a sequence lacks to have the positions before `end` computed, of
    /// which the last `n_drafts` are drafts.
    #[inline]
    pub fn has_blocks(&self, sequence: &Sequence, end: u32, n_drafts: u32) -> bool {
        self.pools.iter().all(|pool| sequence.n_lacking(&pool.group, end, n_drafts) <= pool.n_available())
    }

    /// Whether the blocks up to `end` are available once its slices in flight have landed and their windows have moved
    /// on. Nothing is preempted for blocks that come anyway.
    pub fn will_have_blocks(&self, sequence: &Sequence, end: u32, n_drafts: u32) -> bool {
        let mut groups = self.pools.iter().zip(&sequence.tables);
        groups.all(|(pool, table)| {
            let n_passed = pool.group.n_passed(sequence.earliest_start()) as usize;
            let n_given_back = table.held().take_while(|(i, _)| *i < n_passed).count() as u32;
            sequence.n_lacking(&pool.group, end, n_drafts) <= pool.n_available() + n_given_back
        })
    }

    /// Takes blocks of each group up to position `end`: all of them, or of a recurrence those of the end and, if the
    /// pool has more than two pages for each running sequence, those of places to come back to.
    pub fn take(
        &mut self,
        sequence: &mut Sequence,
        end: u32,
        n_drafts: u32,
        n_running: usize,
        counters: &mut Counters,
    ) {
        let (stride, n_spared) = (self.state_stride, 2 * n_running as u32);
        let entries = sequence.n_entries()..blocks_for(end);
        if entries.is_empty() {
            return;
        }
        let may_name = self.may_name(sequence);
        let mut tables = core::mem::take(&mut sequence.tables);
        for (pool, table) in self.pools.iter_mut().zip(&mut tables) {
            let before = pool.n_evictions();
            let n_lacking = sequence.n_lacking(&pool.group, end, n_drafts);
            let first = entries.end - n_lacking;
            for i in entries.clone() {
                let is_spared = || may_name && sequence.may_resume_after(i, stride);
                let is_taken = i >= first || (is_spared() && pool.n_available() > n_lacking + n_spared);
                let block = if is_taken { pool.take() } else { Some(BlockId::NONE) };
                table.push(block.expect("there are as many blocks as counted"));
            }
            counters.evictions += pool.n_evictions() - before;
        }
        sequence.tables = tables;
        sequence.set_n_entries(entries.end);
    }

    /// Releases all blocks of a sequence that ends or makes way.
    pub fn release(&mut self, sequence: &mut Sequence) {
        self.keep_last_state(sequence);
        let hint = sequence.request.cache_hint;
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            pool.release(table, hint);
        }
        sequence.set_n_entries(0);
    }

    /// Shares blocks that others have computed: `[0, n_passed) NONE · [n_passed, n_hits) shared`, in each group.
    pub fn share_prefix(&mut self, sequence: &mut Sequence, n_hits: u32) {
        let mut tables = core::mem::take(&mut sequence.tables);
        for (pool, table) in self.pools.iter_mut().zip(&mut tables) {
            table.n_passed = pool.group.n_passed(n_hits * BLOCK_TOKENS);
            table.blocks.resize(table.n_passed as usize, BlockId::NONE);
            for name in &sequence.hashes()[table.n_passed as usize..n_hits as usize] {
                let block = pool.find(name).expect("a hit is in the index");
                pool.share(block);
                table.push(block);
            }
        }
        sequence.tables = tables;
        sequence.set_n_entries(n_hits);
    }

    /// Whether each pool has blocks for its whole log, beside those that running sequences need for theirs and one more
    /// for each.
    pub fn fits(&self, sequence: &Sequence, n_hits: u32, promised: &PromisedBlocks) -> bool {
        let start = n_hits * BLOCK_TOKENS;
        self.pools.iter().zip(promised).all(|(pool, n_promised)| {
            let is_idle_block = |name| pool.find(name).is_some_and(|block| pool.is_cached(block));
            let shared = &sequence.hashes()[pool.group.n_passed(start) as usize..n_hits as usize];
            let n_revived = shared.iter().filter(|name| is_idle_block(name)).count() as u32;
            let n_needed = self.n_needed(pool.group, sequence.n_known(), start);
            n_needed.saturating_sub(shared.len() as u32) + n_revived + n_promised <= pool.n_available()
        })
    }

    /// The promised blocks of running sequences, each with the end of its planned positions.
    pub fn promised<'a>(&self, running: impl Iterator<Item = (&'a Sequence, u32)>) -> PromisedBlocks {
        let mut promised = [0; GROUPS_MAX];
        running.for_each(|(sequence, end)| self.promise(sequence, end, &mut promised));
        promised
    }

    /// Adds the blocks of each group that a running sequence needs for its log, and one more. It has planned positions
    /// before `end`.
    pub fn promise(&self, sequence: &Sequence, end: u32, promised: &mut PromisedBlocks) {
        let n_tokens = sequence.n_known().max(end);
        for ((pool, table), n_promised) in self.pools.iter().zip(&sequence.tables).zip(promised) {
            let n_needed = self.n_needed(pool.group, n_tokens, sequence.progress().n_computed);
            *n_promised += n_needed.saturating_sub(table.n_held) + 1;
        }
    }

    /// Blocks of a group that a sequence needs to go on from `start` until `n_tokens` positions are computed.
    fn n_needed(&self, group: CacheGroup, n_tokens: u32, start: u32) -> u32 {
        let slice_max = n_tokens.saturating_sub(start).clamp(1, self.slice_max);
        group.n_held_max(n_tokens, slice_max)
    }

    pub fn name_changes(&mut self, out: &mut Vec<BlockNameChange>) -> bool {
        self.reported_group().is_none_or(|group| self.pools[group].name_changes(out))
    }

    pub fn append_names(&self, blocks: Range<u32>, out: &mut Vec<u64>) -> bool {
        self.reported_group().is_some_and(|group| self.pools[group].append_names(blocks, out))
    }

    /// The group by which prefixes are found: a full one, if there is one. None without groups.
    fn reported_group(&self) -> Option<usize> {
        let full = self.pools.iter().position(|pool| pool.group.keeps_all());
        full.or((!self.pools.is_empty()).then_some(0))
    }

    /// The pools' part of the statistics.
    pub fn stats(&self) -> Stats {
        Stats {
            blocks_total: self.pools.iter().map(BlockPool::n_total).sum(),
            blocks_committed: self.pools.iter().map(BlockPool::n_committed).sum(),
            blocks_used: self.pools.iter().map(BlockPool::n_used).sum(),
            blocks_cached: self.pools.iter().map(BlockPool::n_cached).sum(),
            ..Stats::default()
        }
    }
}
