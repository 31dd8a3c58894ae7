//! How much of the pools has memory. Ranks commit it as the targets require, refuse to for a while, and give back the
//! rest.

use super::facts::Facts;
use super::rng::{Rng, mix};
use scheduler::{Config, Scheduler};
use types::{KV_PARTS, blocks_committed};

/// Positions with memory ahead of need.
const AHEAD: u32 = 24;

pub struct CommittedMemory {
    rng: Rng,
    /// False: the ranks have all of it from the start.
    grows: bool,
    parts: u32,
    /// Whether the machine has no free memory at this moment.
    refuses: bool,
}

impl CommittedMemory {
    pub fn new(seed: u64) -> CommittedMemory {
        let mut rng = Rng(mix(seed ^ 0x6d65_6d6f_7279));
        let grows = rng.chance(40);
        CommittedMemory { rng, grows, parts: KV_PARTS, refuses: false }
    }

    /// The workers are new: little of their caches has memory.
    pub fn begin(&mut self, scheduler: &mut Scheduler) {
        if self.grows {
            self.parts = self.rng.between(0, KV_PARTS / 4);
            scheduler.set_committed_parts(self.parts);
        }
    }

    pub fn change(&mut self, scheduler: &mut Scheduler, facts: &mut Facts) {
        if !self.grows {
            return;
        }
        if self.rng.chance(2) {
            self.refuses = !self.refuses;
        }
        let target = scheduler.parts_target(AHEAD);
        if target > self.parts && self.rng.chance(20) {
            let piece = self.rng.between(1, KV_PARTS / 8);
            let granted = if self.refuses { 0 } else { piece.min(target - self.parts) };
            self.parts += granted;
            facts.memory_refused += u64::from(granted == 0);
            facts.memory_grown += u64::from(granted > 0);
            scheduler.set_committed_parts(self.parts);
        } else if target < self.parts && self.rng.chance(20) {
            let least = target.max(scheduler.parts_held());
            facts.memory_returned += u64::from(least < self.parts);
            self.parts = self.parts.min(least);
            scheduler.set_committed_parts(self.parts);
        }
    }

    /// The blocks of each group that have memory at the ranks.
    pub fn n_blocks(&self, config: &Config) -> Vec<u32> {
        config.n_blocks.iter().map(|&n_blocks| blocks_committed(n_blocks, self.parts)).collect()
    }
}
