//! Waiting and running sequences by the ids of their requests, and by their deadlines. A sequence that is ending is no
//! longer here: its id may be submitted again.

use crate::slab::{SequenceIdx, SequenceSlab};
use alloc::collections::{BTreeMap, BTreeSet};
use types::{Micros, Request, RequestId};

#[derive(Default)]
pub(crate) struct RequestIndex {
    by_id: BTreeMap<RequestId, SequenceIdx>,
    deadlines: BTreeSet<(Micros, RequestId)>,
}

impl RequestIndex {
    pub fn insert(&mut self, request: &Request, idx: SequenceIdx) {
        self.by_id.insert(request.id, idx);
        self.deadlines.extend(request.deadline.map(|deadline| (deadline, request.id)));
    }

    pub fn remove(&mut self, request: &Request) {
        self.by_id.remove(&request.id);
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, request.id));
        }
    }

    pub fn find(&self, id: RequestId) -> Option<SequenceIdx> {
        self.by_id.get(&id).copied()
    }

    /// A sequence whose deadline has come, the earliest first.
    pub fn first_expired(&self, now: Micros) -> Option<SequenceIdx> {
        let (deadline, id) = self.deadlines.first()?;
        if *deadline <= now { self.find(*id) } else { None }
    }

    pub fn iter(&self) -> impl Iterator<Item = SequenceIdx> + Clone {
        self.by_id.values().copied()
    }

    pub fn check(&self, sequences: &SequenceSlab, n_live: usize) {
        assert_eq!(self.by_id.len(), n_live);
        assert!(self.by_id.iter().all(|(id, &idx)| sequences[idx].id == *id));
        let n_deadlines = self.iter().filter(|&idx| sequences[idx].request.deadline.is_some()).count();
        assert_eq!(n_deadlines, self.deadlines.len());
        assert!(self.deadlines.iter().all(|(_, id)| self.by_id.contains_key(id)));
    }
}
