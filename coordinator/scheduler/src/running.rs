//! Running sequences in the order of their ranks and keys: the first is served first, the last is preempted first.

use crate::slab::{SequenceIdx, SequenceSlab};
use crate::tenants::{TenantIdx, Tenants};
use alloc::vec::Vec;

pub(crate) struct RunningSet {
    order: Vec<SequenceIdx>,
    running_max: u32,
    /// No sequence has come or gone since the ranks were computed.
    is_ranked: bool,
}

impl RunningSet {
    pub fn new(running_max: u32) -> RunningSet {
        RunningSet { order: Vec::with_capacity(running_max as usize), running_max, is_ranked: true }
    }

    /// Orders the sequences by their index within their tenant, divided by the tenant's weight, then by their keys. The
    /// last one is preempted first: it is the newest of the tenant that runs the most.
    ///
    /// ```text
    /// heavy, running 4: a b c d    light, running 1: x    weight 1 both    a x b c d
    /// ```
    pub fn rank(&mut self, sequences: &mut SequenceSlab, tenants: &mut Tenants) {
        if core::mem::replace(&mut self.is_ranked, true) {
            return;
        }
        self.order.sort_unstable_by_key(|&idx| sequences[idx].key);
        tenants.begin_ranks();
        for &idx in &self.order {
            sequences[idx].rank = tenants.rank(sequences[idx].tenant);
        }
        if tenants.are_many() {
            self.order.sort_unstable_by_key(|&idx| (sequences[idx].rank, sequences[idx].key));
        }
    }

    /// Adds a sequence, and returns its place.
    pub fn insert(&mut self, idx: SequenceIdx, sequences: &SequenceSlab) -> usize {
        let key = sequences[idx].key;
        let at = self.order.partition_point(|&other| sequences[other].key < key);
        self.order.insert(at, idx);
        self.is_ranked = false;
        at
    }

    pub fn remove(&mut self, idx: SequenceIdx) {
        let at = self.order.iter().position(|&other| other == idx);
        self.remove_at(at.expect("a running sequence is in the list of running ones"));
    }

    pub fn remove_at(&mut self, at: usize) -> SequenceIdx {
        self.is_ranked = false;
        self.order.remove(at)
    }

    pub fn clear(&mut self) {
        self.order.clear();
    }

    #[inline]
    pub fn order(&self) -> &[SequenceIdx] {
        &self.order
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn has_free_slot(&self) -> bool {
        self.order.len() < self.running_max as usize
    }

    /// The place of a tenant's newest sequence. One that starts in the step being planned is left out: the step already
    /// has its start.
    pub fn newest_of(&self, tenant: TenantIdx, sequences: &SequenceSlab) -> Option<usize> {
        let may_give = |&at: &usize| {
            let sequence = &sequences[self.order[at]];
            sequence.tenant == tenant && !sequence.is_starting()
        };
        (0..self.order.len()).filter(may_give).max_by_key(|&at| sequences[self.order[at]].key)
    }

    pub fn check(&self, sequences: &SequenceSlab, are_many_tenants: bool) {
        assert!(self.order.len() <= self.running_max as usize);
        let rank = |&idx: &SequenceIdx| (sequences[idx].rank, sequences[idx].key);
        assert!(!self.is_ranked || self.order.is_sorted_by_key(rank));
        assert!(!self.is_ranked || are_many_tenants || self.order.is_sorted_by_key(|idx| rank(idx).1));
        assert!(self.order.iter().filter(|&&idx| sequences[idx].is_suspect()).count() <= 1, "one suspect runs alone");
    }
}
