//! Waiting sequences, for each tenant in the order of admission.

use crate::queue_key::QueueKey;
use crate::sequence::Sequence;
use crate::slab::{SequenceIdx, SequenceSlab};
use crate::tenants::TenantIdx;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use types::{Micros, Priority, RequestId};

#[derive(Default)]
pub(crate) struct WaitingQueue {
    order: BTreeMap<(TenantIdx, QueueKey), SequenceIdx>,
    n_tokens: u64,
    /// Requests that lost their places, until they are read.
    displaced: Vec<RequestId>,
    /// The latest time of an arrival, so that a clock that goes backwards cannot overtake.
    latest: Micros,
    n_arrivals: u64,
}

impl WaitingQueue {
    /// The key of a request that arrives now.
    pub fn next_key(&mut self, priority: Priority, now: Micros, aging_micros: u64) -> QueueKey {
        self.latest = self.latest.max(now);
        let key = QueueKey::new(priority, self.latest, self.n_arrivals, aging_micros);
        self.n_arrivals += 1;
        key
    }

    pub fn insert(&mut self, idx: SequenceIdx, sequence: &Sequence) {
        let before = self.order.insert((sequence.tenant, sequence.key), idx);
        debug_assert!(before.is_none(), "keys are unique");
        self.n_tokens += u64::from(sequence.n_known());
    }

    pub fn remove(&mut self, sequence: &Sequence) {
        let removed = self.order.remove(&(sequence.tenant, sequence.key));
        debug_assert!(removed.is_some(), "only a waiting sequence is removed");
        self.n_tokens -= u64::from(sequence.n_known());
    }

    /// A request has lost its place to another tenant's.
    pub fn displace(&mut self, id: RequestId) {
        self.displaced.push(id);
    }

    pub fn take_displaced(&mut self) -> Option<RequestId> {
        self.displaced.pop()
    }

    pub fn iter(&self) -> impl Iterator<Item = SequenceIdx> + Clone {
        self.order.values().copied()
    }

    /// The waiting sequences of one tenant.
    pub fn of(&self, tenant: TenantIdx) -> impl DoubleEndedIterator<Item = SequenceIdx> + Clone {
        self.order.range((tenant, QueueKey::FIRST)..=(tenant, QueueKey::LAST)).map(|(_, &idx)| idx)
    }

    /// The first waiting sequence that may run, of tenants in this order. One whose prefix another computes is passed
    /// over. One past its deadline is reported by `expire`. Among suspects it is the least suspicious one; while a
    /// suspect runs all of them are passed over, and once that one gets a token, the next of them holds up the rest
    /// again.
    pub fn first_to_run(
        &self,
        tenants: &[TenantIdx],
        sequences: &SequenceSlab,
        now: Micros,
        is_suspect_running: bool,
    ) -> Option<SequenceIdx> {
        let is_in_time = |idx: &SequenceIdx| sequences[*idx].request.deadline.is_none_or(|deadline| now < deadline);
        let may_start = |idx: &SequenceIdx| is_in_time(idx) && !sequences.is_prefix_awaited(*idx);
        let mut in_time = tenants.iter().flat_map(|&tenant| self.of(tenant)).filter(may_start);
        if sequences.n_suspects() == 0 {
            return in_time.next();
        }
        let suspects = in_time.clone().filter(|&idx| sequences[idx].is_suspect() && !is_suspect_running);
        let least = suspects.min_by_key(|&idx| sequences[idx].suspicion());
        in_time.find(|&idx| !sequences[idx].is_suspect() || Some(idx) == least)
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Tokens in the logs of all waiting sequences.
    pub fn n_tokens(&self) -> u64 {
        self.n_tokens
    }

    pub fn check(&self, sequences: &SequenceSlab) {
        let n_tokens: u64 = self.iter().map(|idx| u64::from(sequences[idx].n_known())).sum();
        assert_eq!(n_tokens, self.n_tokens);
        assert_eq!(self.displaced.len(), 0, "every displaced request has been reported");
    }
}
