//! A memory of names that are gone, and of the owners of prompts by their first blocks: tables of a fixed size. A name
//! that another has pushed out of its place counts as never seen.

use crate::config::Config;
use crate::sequence::Sequence;
use alloc::vec;
use alloc::vec::Vec;
use types::{BLOCK_TOKENS, BlockHash, CacheOwner};

const NAMES: usize = 4096;

/// Names, each with another beside it. Each has one place, which the newest takes.
pub(crate) struct RecentBlockNames {
    places: Vec<(u64, u64)>,
}

impl RecentBlockNames {
    pub fn new() -> RecentBlockNames {
        RecentBlockNames { places: vec![(0, 0); NAMES] }
    }

    pub fn note(&mut self, name: &BlockHash, beside: u64) {
        let name = name.short();
        self.places[name as usize % NAMES] = (name, beside);
    }

    /// Returns the value beside a name, if it was noted.
    pub fn find(&self, name: &BlockHash) -> Option<u64> {
        let name = name.short();
        let (noted, beside) = self.places[name as usize % NAMES];
        (noted == name).then_some(beside)
    }
}

/// The first blocks of prompts, named without an owner, and their owners.
pub(crate) struct FirstBlockOwners {
    root: BlockHash,
    memory: RecentBlockNames,
}

impl FirstBlockOwners {
    pub fn new(config: &Config) -> FirstBlockOwners {
        let root = BlockHash::root(&config.policy, CacheOwner::default(), &config.salt);
        FirstBlockOwners { root, memory: RecentBlockNames::new() }
    }

    /// Whether the last prompt that began so had another owner. From now on its owner is this one's.
    pub fn replace_other_owner(&mut self, sequence: &mut Sequence) -> bool {
        let first = self.root.child(sequence.request.prompt.iter().take(BLOCK_TOKENS as usize).copied());
        let own = sequence.hash(0).short();
        let before = self.memory.find(&first);
        self.memory.note(&first, own);
        before.is_some_and(|before| before != own)
    }
}
