//! Blocks without a holder, in the order in which they are given up: a list for each class, by last use. The lists are
//! linked in arrays, so that they never allocate.
//!
//! The age of a block grows at the pace of its class, and the oldest makes room: at a quarter of the pace a block stays
//! four times as long. Nothing stays for ever.

use alloc::vec;
use alloc::vec::Vec;
use types::BlockId;

const NONE: u32 = u32::MAX;

/// How long a block without a holder is kept, beside others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KeepClass {
    /// Its request does not expect another use.
    Demoted,
    #[default]
    Once,
    /// Another request has used it again.
    Reused,
    /// Its request expects another use.
    Retained,
}

impl KeepClass {
    const ALL: [KeepClass; 4] = [KeepClass::Demoted, KeepClass::Once, KeepClass::Reused, KeepClass::Retained];

    /// How many times as fast as that of the most valuable class its age grows.
    const fn pace(self) -> u64 {
        match self {
            KeepClass::Demoted => 1 << 20,
            KeepClass::Once => 16,
            KeepClass::Reused => 4,
            KeepClass::Retained => 1,
        }
    }
}

pub(crate) struct Lru {
    /// Links to the next older and the next newer block. The entries behind the blocks are the lists' heads and tails.
    older: Vec<u32>,
    newer: Vec<u32>,
    /// The number of each block's last use.
    used: Vec<u64>,
    n_uses: u64,
    len: u32,
}

impl Lru {
    pub fn new(n_blocks: u32) -> Lru {
        let n_links = n_blocks as usize + KeepClass::ALL.len();
        let mut lru = Lru {
            older: vec![NONE; n_links],
            newer: vec![NONE; n_links],
            used: vec![0; n_blocks as usize],
            n_uses: 0,
            len: 0,
        };
        for class in KeepClass::ALL {
            let ends = lru.ends(class);
            (lru.older[ends], lru.newer[ends]) = (ends as u32, ends as u32);
        }
        lru
    }

    fn ends(&self, class: KeepClass) -> usize {
        self.used.len() + class as usize
    }

    /// Adds a block as the newest of its class.
    pub fn push(&mut self, block: BlockId, class: KeepClass) {
        debug_assert!(!self.contains(block));
        let (ends, at) = (self.ends(class), block.0 as usize);
        let newest = self.older[ends];
        (self.older[at], self.newer[at]) = (newest, ends as u32);
        self.newer[newest as usize] = block.0;
        self.older[ends] = block.0;
        self.n_uses += 1;
        self.used[at] = self.n_uses;
        self.len += 1;
    }

    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        let (older, newer) = (self.older[block.0 as usize], self.newer[block.0 as usize]);
        self.newer[older as usize] = newer;
        self.older[newer as usize] = older;
        (self.older[block.0 as usize], self.newer[block.0 as usize]) = (NONE, NONE);
        self.len -= 1;
    }

    /// Removes the block that is worth least.
    pub fn pop(&mut self) -> Option<BlockId> {
        // Of equal ages the first counts, which is of the lowest class.
        let oldest = KeepClass::ALL.into_iter().rev().filter_map(|class| self.oldest(class));
        let (block, _) = oldest.max_by_key(|(_, age)| *age)?;
        self.remove(block);
        Some(block)
    }

    /// Returns the oldest block of a class and its age, at the class's pace.
    fn oldest(&self, class: KeepClass) -> Option<(BlockId, u64)> {
        let oldest = self.newer[self.ends(class)] as usize;
        let used = *self.used.get(oldest)?;
        Some((BlockId(oldest as u32), (self.n_uses + 1 - used).saturating_mul(class.pace())))
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.older[block.0 as usize] != NONE
    }

    pub fn len(&self) -> u32 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use KeepClass::{Demoted, Once, Retained, Reused};

    fn order(lru: &mut Lru) -> Vec<u32> {
        core::iter::from_fn(|| lru.pop()).map(|block| block.0).collect()
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut lru = Lru::new(5);
        assert_eq!(lru.pop(), None);
        for block in [3, 0, 4, 1] {
            lru.push(BlockId(block), Once);
        }
        lru.remove(BlockId(0));
        lru.remove(BlockId(1));
        lru.push(BlockId(0), Once);
        assert_eq!(lru.len(), 3);
        assert_eq!(order(&mut lru), [3, 4, 0]);
        assert!(!lru.contains(BlockId(3)));
    }

    #[test]
    fn valuable_blocks_stay_longer_but_not_for_ever() {
        let mut lru = Lru::new(9);
        for (block, class) in [(0, Retained), (1, Reused), (2, Once), (3, Demoted)] {
            lru.push(BlockId(block), class);
        }
        assert_eq!(order(&mut lru), [3, 2, 1, 0]);
        let mut kept = |class| {
            lru.push(BlockId(0), class);
            let n_others = (1..1000).take_while(|n| {
                lru.push(BlockId(1 + n % 8), Once);
                // Eight others have room.
                lru.len() < 9 || lru.pop() != Some(BlockId(0))
            });
            let n_others = n_others.count();
            while lru.pop().is_some() {}
            n_others
        };
        assert_eq!([Demoted, Once, Reused, Retained].map(&mut kept), [7, 7, 31, 127]);
    }
}
