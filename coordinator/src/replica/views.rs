//! The replica's reports: its state to the routers, its figures to the metrics, its speed to the log.

use super::Replica;
use super::announcement::Announcement;
use super::phase::Phase;
use crate::WorkerId;
use crate::config::micros;
use crate::members::slow::{RankTime, SlownessChange};
use crate::members::unreachable::ExcludedWorker;
use crate::placement::ShortenedContext;
use proto::cluster as wire;
use std::time::Duration;
use telemetry::metrics;
use types::{BLOCK_TOKENS, Micros, Rank};

/// Long enough for meaningful times, short enough to see a change.
const LOOK_EVERY: Duration = Duration::from_secs(1);

fn shortened(shortened: &ShortenedContext) -> wire::Shortened {
    wire::Shortened { requested: shortened.requested, has: shortened.has, why: shortened.why.to_string() }
}

impl Replica {
    fn reported_phase(&self) -> wire::state::Phase {
        match (self.draining_since, self.requests.has_served(), &self.phase) {
            (Some(_), _, _) => wire::state::Phase::Draining,
            (None, false, _) => wire::state::Phase::Loading,
            (None, true, Phase::Serving(_)) => wire::state::Phase::Ready,
            (None, true, Phase::Waiting(_) | Phase::Placing(_)) => wire::state::Phase::Recovering,
        }
    }

    pub(super) fn state(&self) -> wire::State {
        let (now, stats) = (self.now(), self.requests.stats());
        let ranks = self.phase.placement().map_or_else(Vec::new, |placement| {
            self.members.states(&placement.blueprint, &placement.ranks, |rank| self.phase.is_slow(rank))
        });
        let n_ranks_ready = self.phase.serving().map_or(0, |_| ranks.len());
        let (blueprint, requested) = (self.phase.blueprint(), self.grids.requested);
        let grid = blueprint.map_or(requested, |blueprint| blueprint.grid);
        self.publish_announcement(Announcement {
            policy: self.requests.policy(),
            tp: grid.tp,
            pp: grid.pp,
            ranks_ready: n_ranks_ready as u16,
        });
        let prediction = self.performance.predicted.filter(|_| blueprint.is_some());
        wire::State {
            phase: self.reported_phase().into(),
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
            blocks_committed: stats.blocks_committed,
            ranks,
            n_spares: self.members.n_spares(self.phase.ranks()) as u32,
            prediction: prediction.map(|prediction| {
                Box::new(wire::Prediction {
                    tokens_per_s_low: prediction.low,
                    tokens_per_s_high: prediction.high,
                    bottleneck: prediction.bottleneck.to_string(),
                })
            }),
            actual: Some(self.performance.measured.report(&stats.counters)),
            tp: grid.tp.into(),
            pp: grid.pp.into(),
            apart: self.unreachable_workers(now),
            requested_tp: requested.tp.into(),
            requested_pp: requested.pp.into(),
            unplaced: match &self.phase {
                Phase::Waiting(waiting) => waiting.unplaced(now),
                Phase::Placing(_) | Phase::Serving(_) => None,
            },
            shortened: blueprint.and_then(|blueprint| blueprint.shortened.as_ref()).map(shortened),
            backlog_tokens: self.requests.backlog_tokens(),
            lost: self.lost.report(now),
            protocol: self.protocol(),
        }
    }

    /// The newest protocol that this coordinator and all ranks speak. Until they are placed, no rank limits it.
    fn protocol(&self) -> u32 {
        let own = self.config.speaks.protocols.map_or(proto::OLDEST, |protocols| protocols.newest);
        let of_ranks = self.phase.ranks().and_then(|ranks| self.members.protocol(ranks.workers()));
        of_ranks.map_or(own, |of_ranks| of_ranks.min(own))
    }

    fn unreachable_workers(&self, now: Micros) -> Vec<wire::Apart> {
        let apart = |(worker, out): (WorkerId, &ExcludedWorker)| wire::Apart {
            host: self.members.host(worker).to_owned(),
            address: self.members.mesh_address(worker),
            other_host: self.members.host(out.from).to_owned(),
            other_address: self.members.mesh_address(out.from),
            why: out.why.clone(),
            micros: out.until.since(now).0,
        };
        self.members.excluded(now).map(apart).collect()
    }

    fn publish_announcement(&self, announcement: Announcement) {
        self.announce.send_if_modified(|before| {
            let is_news = *before != announcement;
            *before = announcement;
            is_news
        });
    }

    /// Measures the load when the last request ends, before its end is sent: a reader then finds that nothing runs.
    pub(super) fn measure_when_still(&mut self) {
        let stats = self.requests.stats();
        let is_still = stats.n_running == 0 && stats.n_waiting == 0;
        if is_still && !self.was_still {
            metrics::load(&self.of, stats.n_running, stats.n_waiting, stats.blocks_used, stats.blocks_total);
        }
        self.was_still = is_still;
    }

    /// Called with every beat and every change of the state: the figures on a page may be so old.
    pub(super) fn publish_metrics(&self) {
        let stats = self.requests.stats();
        let n_ranks_ready = self.phase.serving().map_or(0, |serving| serving.placement.blueprint.shards.len());
        metrics::epoch(&self.of, self.epoch.n, n_ranks_ready as u32);
        metrics::load(&self.of, stats.n_running, stats.n_waiting, stats.blocks_used, stats.blocks_total);
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
            },
        );
    }

    /// Once a second: how each rank spent its time, and how much of it was a bubble.
    pub(super) fn report_each_second(&mut self, now: Micros) {
        if now.since(self.looked).0 < micros(LOOK_EVERY) {
            return;
        }
        self.looked = now;
        let times = self.phase.ranks().map_or_else(Vec::new, |ranks| {
            self.members.close_time_windows(ranks, now, self.performance.measured.in_flight_micros())
        });
        for (rank, times) in &times {
            metrics::bubble(&self.of, rank.0, times.in_flight_micros.saturating_sub(times.compute_micros));
            metrics::rank_slow(&self.of, rank.0, self.phase.is_slow(*rank));
        }
        self.report_cache();
        self.report_slow_ranks(&times);
        self.grow_if_due(now);
        self.performance.log_if_due(&self.requests.stats().counters, now);
    }

    fn report_cache(&mut self) {
        let Phase::Serving(_) = &self.phase else { return };
        let now = metrics::CacheLabels {
            block_size: BLOCK_TOKENS,
            n_blocks: self.requests.stats().blocks_total,
            dtype: self.config.policy.kv_dtype.to_string(),
            prefix_caching: self.config.shares_blocks(),
        };
        if self.cache.as_ref() != Some(&now) {
            metrics::cache(&self.of, self.cache.as_ref(), &now);
            self.cache = Some(now);
        }
    }

    /// A slow rank is named and stays: dismissing it would cost more.
    fn report_slow_ranks(&mut self, times: &[(Rank, wire::RankTimes)]) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        let blueprint = &serving.placement.blueprint;
        let time = |(rank, times): &(Rank, wire::RankTimes)| RankTime {
            rank: *rank,
            stage: blueprint.grid.place(*rank).stage,
            n_steps: times.steps,
            compute_micros: times.compute_micros,
        };
        let times: Vec<RankTime> = times.iter().map(time).collect();
        for SlownessChange { rank, is_slow, micros, others_micros } in serving.slowness.look(&times) {
            let host = blueprint.shards.iter().find(|shard| shard.rank == rank).map_or("", |shard| &shard.host);
            let word = if is_slow { "a rank is slow" } else { "a rank is no longer slow" };
            tracing::warn!(rank = rank.0, host, micros, others_micros, "{word}");
            metrics::rank_slow(&self.of, rank.0, is_slow);
            self.state_changed = true;
        }
    }
}
