//! The pool of a group's blocks. Each is free (no name, no holder), used (some holders), or cached (a name, no holder).
//!
//! A used block with a name is full and computed, and is never written again; so it may have several holders.

use crate::journal::BlockNameChange;
use crate::lru::{KeepClass, Lru};
use crate::prefix::PrefixIndex;
use crate::seen::RecentBlockNames;
use crate::table::BlockTable;
use alloc::vec;
use alloc::vec::Vec;
use types::{BlockHash, BlockId, CacheGroup, CacheHint};

pub(crate) struct BlockPool {
    pub group: CacheGroup,
    /// How many tables hold each block.
    refs: Vec<u32>,
    /// The blocks below this id have memory; the others are neither free nor anything else yet.
    n_committed: u32,
    free: Vec<BlockId>,
    cached: Lru,
    index: PrefixIndex,
    n_evictions: u64,
    evicted: RecentBlockNames,
    /// The blocks that lose their names when their sequence has another full one.
    passing: Vec<bool>,
    /// How long each block is kept when it has no holder.
    classes: Vec<KeepClass>,
}

impl BlockPool {
    pub fn new(group: CacheGroup, n_blocks: u32) -> BlockPool {
        BlockPool {
            group,
            refs: vec![0; n_blocks as usize],
            n_committed: n_blocks,
            // The lowest id is taken first.
            free: (0..n_blocks).rev().map(BlockId).collect(),
            cached: Lru::new(n_blocks),
            index: PrefixIndex::new(n_blocks),
            n_evictions: 0,
            evicted: RecentBlockNames::new(),
            passing: vec![false; n_blocks as usize],
            classes: vec![KeepClass::default(); n_blocks as usize],
        }
    }

    pub fn n_total(&self) -> u32 {
        self.refs.len() as u32
    }

    pub fn n_committed(&self) -> u32 {
        self.n_committed
    }

    /// Only blocks below this id may be taken. Does nothing if one above is in use or cached.
    pub fn set_committed(&mut self, n_blocks: u32) {
        if n_blocks > self.n_committed {
            // The lowest id is taken first.
            self.free.splice(0..0, (self.n_committed..n_blocks).rev().map(BlockId));
            self.n_committed = n_blocks;
        } else if self.held_end() <= n_blocks {
            self.free.retain(|block| block.0 < n_blocks);
            self.n_committed = n_blocks;
        }
    }

    /// One more than the highest id of a block that is in use or cached.
    pub fn held_end(&self) -> u32 {
        let is_held = |id: &u32| self.refs[*id as usize] > 0 || self.is_cached(BlockId(*id));
        (0..self.n_committed).rev().find(is_held).map_or(0, |id| id + 1)
    }

    /// Blocks that can be taken now.
    pub fn n_available(&self) -> u32 {
        self.free.len() as u32 + self.cached.len()
    }

    pub fn n_used(&self) -> u32 {
        self.n_committed - self.n_available()
    }

    pub fn n_cached(&self) -> u32 {
        self.cached.len()
    }

    pub fn n_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn n_named(&self) -> u32 {
        self.index.n_named()
    }

    pub fn n_evictions(&self) -> u64 {
        self.n_evictions
    }

    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.0 as usize]
    }

    pub fn is_cached(&self, block: BlockId) -> bool {
        self.cached.contains(block)
    }

    pub fn free(&self) -> &[BlockId] {
        &self.free
    }

    pub fn name_of(&self, block: BlockId) -> Option<&BlockHash> {
        self.index.name_of(block)
    }

    /// Whether a block with this name was evicted, not too long ago.
    pub fn has_evicted(&self, name: &BlockHash) -> bool {
        self.evicted.find(name).is_some()
    }

    pub fn find(&self, name: &BlockHash) -> Option<BlockId> {
        self.index.find(name)
    }

    pub fn name_changes(&mut self, out: &mut Vec<BlockNameChange>) -> bool {
        self.index.journal.take(out)
    }

    pub fn append_names(&self, blocks: core::ops::Range<u32>, out: &mut Vec<u64>) -> bool {
        self.index.append_names(blocks, out)
    }

    /// Takes an empty block for one holder; evicts the content that is worth least if no block is free.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict()?,
        };
        debug_assert!(self.refs[block.0 as usize] == 0 && self.name_of(block).is_none());
        self.refs[block.0 as usize] = 1;
        self.passing[block.0 as usize] = false;
        self.classes[block.0 as usize] = KeepClass::default();
        Some(block)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.cached.pop()?;
        self.index.name_of(block).into_iter().for_each(|name| self.evicted.note(name, 0));
        self.index.remove(block);
        self.n_evictions += 1;
        Some(block)
    }

    /// Adds a holder to a block that has a name.
    pub fn share(&mut self, block: BlockId) {
        debug_assert!(self.name_of(block).is_some());
        if self.refs[block.0 as usize] == 0 {
            self.cached.remove(block);
        }
        self.refs[block.0 as usize] += 1;
        // A request has come back to it.
        self.passing[block.0 as usize] = false;
        let class = &mut self.classes[block.0 as usize];
        *class = (*class).max(KeepClass::Reused);
    }

    /// Names a block that is full and computed, unless another block with the same content has the name. Returns
    /// whether the block has just got it.
    pub fn name(&mut self, block: BlockId, name: BlockHash) -> bool {
        debug_assert!(self.refs[block.0 as usize] > 0);
        let is_new = self.name_of(block).is_none() && self.find(&name).is_none();
        if is_new {
            self.index.insert(block, name);
        }
        is_new
    }

    /// Sets whether the block that has just been named is passing or kept. A block that had the name before is kept if
    /// either is to be kept.
    pub fn set_temporary(&mut self, name: &BlockHash, block: BlockId, is_passing: bool) {
        match self.find(name) {
            Some(found) if found == block || !is_passing => self.passing[found.0 as usize] = is_passing,
            _ => {}
        }
    }

    /// Drops a passing name without holders: it is found no longer.
    pub fn drop_temporary(&mut self, name: &BlockHash) {
        let is_dropped = |block: BlockId| self.passing[block.0 as usize] && self.is_cached(block);
        if self.find(name).is_some_and(is_dropped) {
            self.forget(name);
        }
    }

    /// Makes a passing name permanent. Returns its block, if it was passing.
    pub fn make_permanent(&mut self, name: &BlockHash) -> Option<BlockId> {
        let block = self.find(name)?;
        core::mem::take(&mut self.passing[block.0 as usize]).then_some(block)
    }

    /// Makes the block with this name impossible to find. Its holders keep it.
    pub fn forget(&mut self, name: &BlockHash) {
        let Some(block) = self.find(name) else { return };
        self.index.remove(block);
        if self.refs[block.0 as usize] == 0 {
            self.cached.remove(block);
            self.free.push(block);
        }
    }

    /// Releases all blocks of a table, the last first: of a chain without holders the end is evicted before the blocks
    /// that it builds on. A hint says how long they are kept; those of other requests too are not demoted.
    pub fn release(&mut self, table: &mut BlockTable, hint: CacheHint) {
        for (_, block) in table.held().rev() {
            let class = &mut self.classes[block.0 as usize];
            match hint {
                CacheHint::Retain => *class = KeepClass::Retained,
                CacheHint::Demote if *class == KeepClass::Once => *class = KeepClass::Demoted,
                CacheHint::Demote | CacheHint::None => {}
            }
            self.drop_holder(block);
        }
        table.clear();
    }

    /// Releases those of the first `n_full` blocks that no query from `position` on reads, the first first, because it
    /// is the least recently used. Returns how many.
    pub fn release_passed(&mut self, table: &mut BlockTable, position: u32, n_full: u32) -> u32 {
        let passed = table.n_passed..self.group.n_passed(position).min(n_full).max(table.n_passed);
        let mut n_released = 0;
        for entry in &mut table.blocks[passed.start as usize..passed.end as usize] {
            let block = core::mem::replace(entry, BlockId::NONE);
            if block != BlockId::NONE {
                self.drop_holder(block);
                n_released += 1;
            }
        }
        table.n_passed = passed.end;
        table.n_held -= n_released;
        n_released
    }

    fn drop_holder(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        debug_assert!(*refs > 0);
        *refs -= 1;
        if *refs > 0 {
            return;
        }
        match self.name_of(block) {
            Some(_) => self.cached.push(block, self.classes[block.0 as usize]),
            None => self.free.push(block),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &mut BlockPool, n_blocks: u32) -> BlockTable {
        table((0..n_blocks).map(|_| pool.take().unwrap()))
    }

    fn table(blocks: impl IntoIterator<Item = BlockId>) -> BlockTable {
        let mut table = BlockTable::default();
        blocks.into_iter().for_each(|block| table.push(block));
        table
    }

    fn name(i: u8) -> BlockHash {
        BlockHash([i; 16])
    }

    #[test]
    fn named_blocks_stay_until_their_room_is_needed_and_the_end_of_a_chain_goes_first() {
        let mut pool = BlockPool::new(CacheGroup::FULL, 4);
        let mut table = take(&mut pool, 3);
        let (first, second) = (table.blocks[0], table.blocks[1]);
        pool.name(first, name(0));
        pool.name(second, name(1));
        pool.release(&mut table, CacheHint::None);
        assert_eq!((pool.n_free(), pool.n_cached(), pool.n_used()), (2, 2, 0));
        let mut taken = take(&mut pool, 3);
        assert_eq!((pool.find(&name(0)), pool.find(&name(1))), (Some(first), None), "the end goes first");
        assert!(taken.blocks.contains(&second));
        pool.share(first);
        assert_eq!(pool.take(), None);
        assert_eq!((pool.n_used(), pool.n_evictions()), (4, 1));
        pool.release(&mut taken, CacheHint::None);
        assert_eq!(pool.n_available(), 3);
    }

    #[test]
    fn a_shared_block_is_used_until_its_last_holder_lets_go() {
        let mut pool = BlockPool::new(CacheGroup::FULL, 2);
        let block = pool.take().unwrap();
        pool.name(block, name(7));
        pool.share(block);
        pool.release(&mut table([block]), CacheHint::None);
        assert_eq!((pool.refs(block), pool.n_used()), (1, 1));
        pool.release(&mut table([block]), CacheHint::None);
        assert_eq!((pool.refs(block), pool.n_used(), pool.n_cached()), (0, 0, 1));
    }

    #[test]
    fn blocks_behind_a_window_are_given_back_once_and_their_entries_stay() {
        let mut pool = BlockPool::new(CacheGroup::FULL.with_window(20), 4);
        let mut table = take(&mut pool, 4);
        let first = table.blocks[0];
        pool.name(first, name(0));
        assert_eq!(
            [(34, 9), (35, 0), (35, 1), (35, 9), (51, 9)]
                .map(|(position, n)| pool.release_passed(&mut table, position, n)),
            [0, 0, 1, 0, 1]
        );
        assert_eq!(
            (table.blocks.len(), table.held().count(), table.blocks[..2].to_vec()),
            (4, 2, vec![BlockId::NONE; 2])
        );
        assert_eq!((pool.n_cached(), pool.n_free(), pool.find(&name(0))), (1, 1, Some(first)));
        pool.release(&mut table, CacheHint::None);
        assert_eq!((pool.n_used(), table.n_passed, table.blocks.len()), (0, 0, 0));
    }

    #[test]
    fn forgotten_block_is_unnamed_and_free_once_released() {
        let mut pool = BlockPool::new(CacheGroup::FULL, 2);
        let (held, cached) = (pool.take().unwrap(), pool.take().unwrap());
        pool.name(held, name(1));
        pool.name(cached, name(2));
        pool.release(&mut table([cached]), CacheHint::None);
        (1..4).for_each(|i| pool.forget(&name(i)));
        assert_eq!((pool.find(&name(1)), pool.find(&name(2)), pool.n_named()), (None, None, 0));
        assert_eq!((pool.n_free(), pool.n_cached(), pool.refs(held)), (1, 0, 1));
        pool.release(&mut table([held]), CacheHint::None);
        assert_eq!((pool.n_free(), pool.n_cached()), (2, 0));
    }

    #[test]
    fn block_is_not_taken_until_it_is_committed() {
        let mut pool = BlockPool::new(CacheGroup::FULL, 5);
        pool.set_committed(2);
        assert_eq!((pool.n_total(), pool.n_available(), pool.n_used()), (5, 2, 0));
        let mut table = take(&mut pool, 2);
        assert_eq!((table.blocks.clone(), pool.take(), pool.n_used()), (vec![BlockId(0), BlockId(1)], None, 2));
        pool.set_committed(1);
        assert_eq!((pool.n_committed(), pool.n_used()), (2, 2), "taken blocks stay committed");
        pool.set_committed(4);
        assert_eq!((pool.take(), pool.n_available()), (Some(BlockId(2)), 1));
        pool.release(&mut table, CacheHint::None);
        assert_eq!((pool.n_available(), pool.n_used(), pool.held_end()), (3, 1, 3));
        pool.set_committed(5);
        assert_eq!((pool.n_available(), pool.n_used(), pool.n_committed()), (4, 1, 5));
        pool.set_committed(2);
        assert_eq!(pool.n_committed(), 5, "the third block is in use");
        pool.set_committed(3);
        assert_eq!((pool.n_committed(), pool.n_available()), (3, 2));
        let mut rest = take(&mut pool, 2);
        assert_eq!((pool.take(), rest.blocks.iter().all(|block| block.0 < 3)), (None, true));
        pool.name(BlockId(1), name(1));
        pool.release(&mut rest, CacheHint::None);
        pool.set_committed(0);
        assert_eq!((pool.n_committed(), pool.n_cached()), (3, 1), "cached blocks stay");
    }

    #[test]
    fn the_first_of_two_equal_blocks_keeps_the_name() {
        let mut pool = BlockPool::new(CacheGroup::FULL, 2);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        pool.name(a, name(1));
        pool.name(b, name(1));
        assert_eq!((pool.find(&name(1)), pool.name_of(b)), (Some(a), None));
    }
}
