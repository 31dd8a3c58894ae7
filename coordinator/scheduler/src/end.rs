//! Ends requests: by a cancel, by a deadline, or because they are complete.

use crate::scheduler::{RequestOutput, Scheduler};
use crate::sequence::{SequenceIdx, SequenceState};
use alloc::vec::Vec;
use types::{Finish, Micros, RequestId};

impl Scheduler {
    /// Ends a request that its client has given up. If it has already ended, nothing happens.
    pub fn cancel(&mut self, id: RequestId, out: &mut Vec<RequestOutput>) {
        if let Some(&idx) = self.by_id.get(&id) {
            self.end_early(idx, Finish::Cancelled, out);
        }
    }

    /// Ends every request whose deadline has come.
    pub fn expire(&mut self, now: Micros, out: &mut Vec<RequestOutput>) {
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            self.end_early(self.by_id[&id], Finish::Deadline, out);
        }
    }

    pub(crate) fn end_early(&mut self, idx: SequenceIdx, finish: Finish, out: &mut Vec<RequestOutput>) {
        let sequence = &self.sequences[idx];
        let (id, position) = (sequence.id, sequence.n_output());
        out.push(RequestOutput {
            id,
            position,
            slice: 0,
            n_tokens: 0,
            scored_position: 0,
            n_cached: sequence.n_cached,
            reuse: sequence.reuse,
            drafts_accepted: 0,
            drafts_rejected: 0,
            finish: Some(finish),
        });
        self.end(idx);
    }

    /// Nothing more is planned for it, so the next step ends it on the ranks.
    pub(crate) fn end(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        let (id, tenant, key, n_known) = (sequence.id, sequence.tenant, sequence.key, sequence.n_known());
        self.n_suspects -= u32::from(sequence.is_suspect());
        let before = core::mem::replace(&mut sequence.state, SequenceState::Ending);
        if sequence.held {
            self.ends.push(id);
        }
        if let Some(deadline) = sequence.request.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        self.by_id.remove(&id);
        match before {
            SequenceState::Waiting => {
                self.waiting.remove(tenant, key, n_known);
                self.tenants.remove_waiting(tenant, n_known);
            }
            SequenceState::Running => {
                let at = self.running.iter().position(|&other| other == idx);
                self.running.remove(at.expect("a running sequence is in the list of running ones"));
                self.tenants.remove_running(tenant);
                self.is_ranked = false;
            }
            SequenceState::Ending => debug_assert!(false, "a request ends once"),
        }
        self.forget_if_landed(idx);
    }

    /// Frees the blocks of an ended sequence once its last slice in flight has come back.
    pub(crate) fn forget_if_landed(&mut self, idx: SequenceIdx) {
        if self.sequences[idx].n_slices_in_flight == 0 {
            self.release(idx);
            self.sequences.remove(idx);
        }
    }

    /// Releases all blocks of a sequence.
    pub(crate) fn release(&mut self, idx: SequenceIdx) {
        self.keep_last_state(idx);
        let sequence = &mut self.sequences[idx];
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            pool.release(table);
        }
        sequence.set_n_entries(0);
    }
}
