//! Counts what happened: a simulation in which nothing happens proves nothing.

use scheduler::{RequestRejection, Stats};
use types::Finish;

macro_rules! facts {
    ($($name:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Facts { $(pub $name: u64),* }

        impl Facts {
            pub fn add(&mut self, other: &Facts) {
                $(self.$name += other.$name;)*
            }

            /// The kinds of events that never happened.
            pub fn missing(&self) -> Vec<&'static str> {
                let facts = [$((stringify!($name), self.$name)),*];
                facts.into_iter().filter(|fact| fact.1 == 0).map(|fact| fact.0).collect()
            }
        }
    };
}

facts! {
    memory_grown, memory_refused, memory_returned,
    ticks, steps, tokens, ends_only, in_flight_peak,
    stages_busy_peak, chunks_in_flight, steps_early, starved,
    preemptions, prefix_hit_tokens, windowed_hits, blocks_passed, evictions,
    states_carried, state_hits, states_kept,
    slices_ahead, drafts, drafts_accepted, drafts_rejected, stopped_in_drafts,
    stopped_ahead, tokens_discarded, tokens_redrawn, draws_late, planned_behind_late,
    stores, state_pages, removals, fetches, fetches_refused, fetches_late, fetch_cancels, fetches_beside, fetches_torn,
    pages_fetched, pages_missing, fetched_outputs, late_answers, old_answers, tiers_lost, lies,
    restarted_in_flight, grids, losses, breaks, given_up, requeued, resumed, outgrown, narrowed, stale,
    cancelled_waiting, cancelled_running, expired,
    stopped, length, cancelled, deadline, failed,
    displaced, full, too_long, refused_narrowed, duplicates, refused_draining, refused_late, refused_finished,
}

impl Facts {
    pub fn count(&mut self, stats: &Stats) {
        self.steps = stats.steps;
        self.preemptions = stats.preemptions;
        self.prefix_hit_tokens = stats.prefix_hit_tokens;
        self.evictions = stats.evictions;
        self.states_kept = stats.states_kept;
        self.draws_late = stats.draws_late;
        self.slices_ahead = stats.slices_ahead;
        self.drafts = stats.drafts;
        self.drafts_accepted = stats.drafts_accepted;
        self.drafts_rejected = stats.drafts - stats.drafts_accepted;
        self.steps_early = stats.steps_early;
        self.starved = stats.starved;
        self.blocks_passed = stats.blocks_passed;
        self.tokens_discarded = stats.tokens_discarded;
        self.tokens_redrawn = stats.tokens_redrawn;
        self.requeued = stats.requeued;
        self.fetches = stats.fetches;
        self.fetches_refused = stats.fetches_refused;
        self.fetches_late = stats.fetches_late;
        self.pages_fetched = stats.pages_fetched;
        self.pages_missing = stats.pages_missing;
    }

    pub fn finish(&mut self, finish: Finish) {
        let count = match finish {
            Finish::Stop => &mut self.stopped,
            Finish::Length => &mut self.length,
            Finish::Cancelled => &mut self.cancelled,
            Finish::Deadline => &mut self.deadline,
            Finish::Failed | Finish::NoToken | Finish::Grammar(_) => &mut self.failed,
            Finish::Outgrown => &mut self.narrowed,
        };
        *count += 1;
    }

    pub fn refuse(&mut self, rejected: RequestRejection) {
        let count = match rejected {
            RequestRejection::Full { .. } => &mut self.full,
            RequestRejection::TooLong { .. } => &mut self.too_long,
            RequestRejection::Outgrown { .. } => &mut self.refused_narrowed,
            RequestRejection::Duplicate => &mut self.duplicates,
            RequestRejection::Draining => &mut self.refused_draining,
            RequestRejection::Deadline => &mut self.refused_late,
            RequestRejection::Finished(_) => &mut self.refused_finished,
            RequestRejection::Empty
            | RequestRejection::Encoder
            | RequestRejection::TooLarge { .. }
            | RequestRejection::OlderRanks => return,
        };
        *count += 1;
    }
}
