//! How many drafts were verified and accepted at each place behind the log. Counted in every step, and told in steps
//! that start or end a sequence: telling allocates. Knows no tokens.

use telemetry::metrics;
use types::{DRAFT_ROWS_MAX, Step, StepDone};

pub(super) struct DraftCounts {
    source: &'static str,
    proposed: [u64; DRAFT_ROWS_MAX as usize],
    accepted: [u64; DRAFT_ROWS_MAX as usize],
}

impl DraftCounts {
    pub fn new(source: &'static str) -> DraftCounts {
        DraftCounts { source, proposed: [0; DRAFT_ROWS_MAX as usize], accepted: [0; DRAFT_ROWS_MAX as usize] }
    }

    pub fn count(&mut self, step: &Step, done: &StepDone) {
        for (slice, done) in step.slices.iter().zip(&done.slices).filter(|(slice, _)| slice.n_draft > 0) {
            let n_accepted = done.tokens.len().saturating_sub(1);
            self.proposed.iter_mut().take(slice.n_draft.into()).for_each(|n| *n += 1);
            self.accepted.iter_mut().take(n_accepted).for_each(|n| *n += 1);
        }
        if !(step.starts.is_empty() && step.ends.is_empty()) {
            self.tell();
        }
    }

    fn tell(&mut self) {
        let counts = self.proposed.iter_mut().zip(&mut self.accepted).enumerate();
        for (position, (proposed, accepted)) in counts.filter(|(_, (proposed, _))| **proposed > 0) {
            let (proposed, accepted) = (std::mem::take(proposed), std::mem::take(accepted));
            metrics::drafts_at(self.source, position, proposed, accepted);
        }
    }
}

impl Drop for DraftCounts {
    fn drop(&mut self) {
        self.tell();
    }
}
