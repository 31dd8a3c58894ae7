//! How much of a prompt is reused, and why no more: the reason is decided once, when a request is first admitted. What
//! only the tier has is brought back to the pools first.

use super::{BlockPools, PromisedBlocks};
use crate::blocks::BlockPool;
use crate::config::GROUPS_MAX;
use crate::sequence::Sequence;
use crate::stats::Counters;
use crate::table::BlockTable;
use crate::tier::FetchInFlight;
use alloc::vec;
use alloc::vec::Vec;
use types::{
    BLOCK_TOKENS, BlockHash, CacheHint, FetchDone, FetchId, Goal, Micros, Page, PageKey, PrefixReuse, ReuseEnd,
};

impl BlockPools {
    /// Returns how many blocks at the front of its log need not be computed: each pool has the blocks that a query
    /// behind them reads. A full group needs all of them, a windowed one those that the window touches, and a
    /// recurrence the last. If full groups have more of it than there is a state for, this prompt diverges from
    /// another: its state is kept.
    pub fn n_prefix_hits(&self, sequence: &mut Sequence) -> u32 {
        let (n_hits, n_known) = self.n_found(sequence, |_, pool, name| pool.find(name).is_some());
        sequence.found.n_branch = n_known;
        n_hits
    }

    /// The same with the pages that the tier has.
    pub fn n_hits_with_tier(&self, sequence: &mut Sequence) -> u32 {
        let has = |group, pool: &BlockPool, name: &BlockHash| {
            pool.find(name).is_some() || self.tier.has(&PageKey { group, name: *name })
        };
        self.n_found(sequence, has).0
    }

    /// Returns how many blocks at the front of its log need not be computed if `has` names the blocks that are there,
    /// and how many of them full groups have.
    fn n_found(&self, sequence: &mut Sequence, has: impl Fn(u8, &BlockPool, &BlockHash) -> bool) -> (u32, u32) {
        if !self.has_names {
            return (0, sequence.found.n_branch);
        }
        // For each group, how many consecutive blocks up to here its pool has.
        let mut n_in_row = [0; GROUPS_MAX];
        let (mut n_hits, mut n_known) = (0, 0);
        'blocks: for n_blocks in 1..=sequence.n_sharable() {
            let name = sequence.hash(n_blocks - 1);
            let (mut serves, mut is_known) = (true, false);
            for ((group, pool), n_in_row) in (0..).zip(&self.pools).zip(&mut n_in_row) {
                *n_in_row = if has(group, pool, &name) { *n_in_row + 1 } else { 0 };
                serves &= n_blocks - *n_in_row <= pool.group.n_passed(n_blocks * BLOCK_TOKENS);
                is_known |= pool.group.keeps_all();
                if *n_in_row == 0 && pool.group.keeps_all() {
                    break 'blocks;
                }
            }
            n_known = if is_known { n_blocks } else { n_known };
            n_hits = if serves { n_blocks } else { n_hits };
        }
        (n_hits, n_known)
    }

    /// Returns the pages of its first `n_blocks` blocks that the pools lack and a query behind them reads.
    pub fn n_pages_lacking(&self, sequence: &Sequence, n_blocks: u32) -> u32 {
        let lacking = |pool: &BlockPool| {
            let names = sequence.hashes_read_behind(pool.group, n_blocks).iter();
            names.filter(|name| pool.find(name).is_none()).count() as u32
        };
        self.pools.iter().map(lacking).sum()
    }

    /// Whether each pool has room to fetch them, beside the blocks that running sequences need.
    pub fn fits_fetch(&self, sequence: &Sequence, n_blocks: u32, promised: &PromisedBlocks) -> bool {
        self.pools.iter().zip(promised).all(|(pool, n_promised)| {
            let is_taken = |name: &&BlockHash| pool.find(name).is_none_or(|block| pool.is_cached(block));
            let names = sequence.hashes_read_behind(pool.group, n_blocks).iter();
            names.filter(is_taken).count() as u32 + n_promised <= pool.n_available()
        })
    }

    /// Begins to fetch them. Until the fetch ends, it holds their blocks and those that the pools have of this prefix.
    pub fn begin_fetch(
        &mut self,
        sequence: &Sequence,
        n_blocks: u32,
        (begun, deadline): (Micros, Micros),
        counters: &mut Counters,
    ) -> FetchId {
        let mut pages = Vec::new();
        let mut tables = vec![BlockTable::default(); self.pools.len()];
        for ((group, pool), table) in (0..).zip(&mut self.pools).zip(&mut tables) {
            let names = sequence.hashes_read_behind(pool.group, n_blocks);
            let before = pool.n_evictions();
            // What is there is held before room is made for the rest.
            for block in names.iter().filter_map(|name| pool.find(name)).collect::<Vec<_>>() {
                pool.share(block);
                table.push(block);
            }
            for &name in names.iter().filter(|name| pool.find(name).is_none()).collect::<Vec<_>>() {
                let block = pool.take().expect("there is room for the fetch");
                table.push(block);
                pages.push(Page { key: PageKey { group, name }, block });
            }
            counters.evictions += pool.n_evictions() - before;
        }
        self.tier.begin(pages, tables, begun, deadline)
    }

    /// The ranks have answered a fetch: names what has come, and gives up the rest. None if it was cancelled.
    pub fn finish_fetch(&mut self, done: &FetchDone) -> Option<FetchInFlight> {
        let mut fetch = self.tier.finish(done.id, done.micros.saturating_mul(1000))?;
        for (i, page) in (0..).zip(&fetch.pages) {
            if done.missing.binary_search(&i).is_ok() {
                self.tier.note_missing(&page.key);
            } else if !fetch.damaged.contains(&page.key) {
                self.pools[usize::from(page.key.group)].name(page.block, page.key.name);
            }
        }
        self.release_fetch(&mut fetch);
        Some(fetch)
    }

    /// Ends a fetch whose deadline has come, and gives up its blocks.
    pub fn cancel_late_fetch(&mut self, now: Micros) -> Option<FetchInFlight> {
        let mut fetch = self.tier.cancel_late(now)?;
        self.release_fetch(&mut fetch);
        Some(fetch)
    }

    fn release_fetch(&mut self, fetch: &mut FetchInFlight) {
        self.pools.iter_mut().zip(&mut fetch.tables).for_each(|(pool, table)| pool.release(table, CacheHint::None));
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
            () if sequence.found.n_in_tier > n_hits => Some(ReuseEnd::NotFetched),
            () => None,
        };
        let ended = refused.unwrap_or_else(|| self.reuse_end(sequence, n_hits, n_known));
        PrefixReuse { ended: Some(ended), position: n_known.max(sequence.found.n_in_tier) * BLOCK_TOKENS, fetched: 0 }
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
