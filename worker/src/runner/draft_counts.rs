//! Counts verified and accepted drafts at each place behind the log, by guesser. It counts in every step, and reports
//! in steps that start or end a sequence, because reports allocate. Has no knowledge of tokens.

use crate::runner::guesses::{GuessConfig, Guesser};
use telemetry::metrics;
use types::{DRAFT_ROWS_MAX, RequestId, Step, StepDone};

pub(super) struct DraftCounts([GuesserCounts; 4]);

struct GuesserCounts {
    guesser: Guesser,
    name: &'static str,
    proposed: [u64; DRAFT_ROWS_MAX as usize],
    accepted: [u64; DRAFT_ROWS_MAX as usize],
}

impl DraftCounts {
    pub fn new(config: &GuessConfig) -> DraftCounts {
        let none = [0; DRAFT_ROWS_MAX as usize];
        let of = |guesser| GuesserCounts { guesser, name: config.name_of(guesser), proposed: none, accepted: none };
        DraftCounts([Guesser::Source, Guesser::Grammar, Guesser::DraftModel, Guesser::Mtp].map(of))
    }

    pub fn count(&mut self, step: &Step, done: &StepDone, drafted_by: impl Fn(RequestId) -> Guesser) {
        for (slice, done) in step.slices.iter().zip(&done.slices).filter(|(slice, _)| slice.n_draft > 0) {
            let by = drafted_by(slice.id);
            let Some(counts) = self.0.iter_mut().find(|counts| counts.guesser == by) else { continue };
            let n_accepted = done.tokens.len().saturating_sub(1);
            counts.proposed.iter_mut().take(slice.n_draft.into()).for_each(|n| *n += 1);
            counts.accepted.iter_mut().take(n_accepted).for_each(|n| *n += 1);
        }
        if !(step.starts.is_empty() && step.ends.is_empty()) {
            self.0.iter_mut().for_each(GuesserCounts::report);
        }
    }
}

impl GuesserCounts {
    fn report(&mut self) {
        let counts = self.proposed.iter_mut().zip(&mut self.accepted).enumerate();
        for (position, (proposed, accepted)) in counts.filter(|(_, (proposed, _))| **proposed > 0) {
            let (proposed, accepted) = (std::mem::take(proposed), std::mem::take(accepted));
            metrics::drafts_at(self.name, position, proposed, accepted);
        }
    }
}

impl Drop for DraftCounts {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(GuesserCounts::report);
    }
}
