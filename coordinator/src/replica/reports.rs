//! When and what a replica reports: its state to the routers and the store, its figures to the metrics.

use super::announcement::Announcement;
use crate::config::micros;
use scheduler::Stats;
use std::time::Duration;
use telemetry::metrics::{self, CacheLabels, ReplicaLabel};
use tokio::sync::watch;
use types::Micros;

/// Long enough for meaningful times, short enough to see a change.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(crate) struct Reports {
    /// The label of its metrics.
    of: ReplicaLabel,
    /// The announcement that the store publishes.
    announce: watch::Sender<Announcement>,
    state_sent: Micros,
    /// Whether routers do not have the present state yet.
    state_changed: bool,
    /// Whether no request ran when the load was measured last.
    was_still: bool,
    looked: Micros,
    /// The cache's layout as last reported.
    cache: Option<CacheLabels>,
}

impl Reports {
    pub fn new(of: ReplicaLabel, announce: watch::Sender<Announcement>) -> Reports {
        Reports {
            of,
            announce,
            state_sent: Micros(0),
            state_changed: false,
            was_still: true,
            looked: Micros(0),
            cache: None,
        }
    }

    /// The state has changed: routers are sent it after the events at hand.
    pub fn state_changed(&mut self) {
        self.state_changed = true;
    }

    /// The state counts as changed once it is so old.
    pub fn renew_state(&mut self, state_every: Duration, now: Micros) {
        self.state_changed |= now.since(self.state_sent).0 >= micros(state_every);
    }

    /// Whether routers must be sent the state now.
    pub fn take_state_changed(&mut self, now: Micros) -> bool {
        let is_due = std::mem::take(&mut self.state_changed);
        self.state_sent = if is_due { now } else { self.state_sent };
        is_due
    }

    pub fn announce(&self, announcement: Announcement) {
        self.announce.send_if_modified(|before| {
            let is_news = *before != announcement;
            *before = announcement;
            is_news
        });
    }

    /// Whether a second has passed since the last look at the ranks.
    pub fn begin_look(&mut self, now: Micros) -> bool {
        let is_due = now.since(self.looked).0 >= micros(LOOK_EVERY);
        self.looked = if is_due { now } else { self.looked };
        is_due
    }

    /// Measures the load when the last request ends, before its end is sent: a reader then finds that nothing runs.
    pub fn measure_when_still(&mut self, stats: &Stats) {
        let is_still = stats.n_running == 0 && stats.n_waiting == 0;
        if is_still && !self.was_still {
            self.publish_load(stats);
        }
        self.was_still = is_still;
    }

    fn publish_load(&self, stats: &Stats) {
        metrics::load(&self.of, stats.n_running, stats.n_waiting, stats.blocks_used, stats.blocks_total);
    }

    /// Called with every beat and every change of the state: the figures on a page may be so old.
    pub fn publish_metrics(&self, epoch_n: u32, n_ranks_ready: usize, stats: &Stats) {
        metrics::epoch(&self.of, epoch_n, n_ranks_ready as u32);
        self.publish_load(stats);
        metrics::planned(
            &self.of,
            metrics::PlannerCounts {
                steps: stats.steps,
                preemptions: stats.preemptions,
                tokens_out: stats.tokens_drawn,
                tokens_discarded: stats.tokens_discarded,
                draws_late: stats.draws_late,
                drafts: stats.drafts,
                drafts_accepted: stats.drafts_accepted,
                prefix_hit_tokens: stats.prefix_hit_tokens,
                starved: stats.starved,
                steps_early: stats.steps_early,
                cut_by_time: stats.cut_by_time,
                cut_by_tokens: stats.cut_by_tokens,
                cut_by_blocks: stats.cut_by_blocks,
                fetches: stats.fetches,
                fetches_refused: stats.fetches_refused,
                fetches_late: stats.fetches_late,
                pages_fetched: stats.pages_fetched,
                pages_missing: stats.pages_missing,
            },
        );
    }

    /// Publishes the cache's layout if it has changed.
    pub fn publish_cache(&mut self, now: CacheLabels) {
        if self.cache.as_ref() != Some(&now) {
            metrics::cache(&self.of, self.cache.as_ref(), &now);
            self.cache = Some(now);
        }
    }
}
