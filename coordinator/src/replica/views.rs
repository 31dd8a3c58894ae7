//! What the replica says of itself: its state to the routers, its figures to the metrics, its speed to the log.

use crate::WorkerId;
use crate::members::slow::{Change, Pass};
use crate::members::unreachable::Out;
use crate::placement::Shortened;
use crate::replica::{Replica, micros};
use crate::service::serve::Told;
use proto::cluster as wire;
use proto::cluster::state::Phase;
use scheduler::Stats;
use std::time::Duration;
use telemetry::metrics;
use types::{BLOCK_TOKENS, Micros, Rank};

/// Long enough for its times to mean something, short enough to see a change.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const SPEED_TOLD_EVERY: Duration = Duration::from_secs(60);

fn shortened(shortened: &Shortened) -> wire::Shortened {
    wire::Shortened { asked: shortened.asked, has: shortened.has, why: shortened.why.to_string() }
}

impl Replica {
    fn phase(&self) -> Phase {
        match (&self.draining_since, &self.serving, self.is_ready) {
            (Some(_), _, _) => Phase::Draining,
            (None, None, _) => Phase::Loading,
            (None, Some(_), true) => Phase::Ready,
            (None, Some(_), false) => Phase::Recovering,
        }
    }

    fn stats(&self) -> Stats {
        self.serving.as_ref().map(|serving| serving.scheduler.stats()).unwrap_or_default()
    }

    pub(crate) fn state(&self) -> wire::State {
        let stats = self.stats();
        let ranks = self.members.states(self.blueprint.as_ref(), &self.slowness);
        let n_ranks_ready = if self.is_ready { ranks.len() } else { 0 };
        self.measure(&stats, n_ranks_ready as u32);
        let grid = self.blueprint.as_ref().map_or(self.placing.wanted, |blueprint| blueprint.grid);
        self.tell_store(Told {
            policy: self.serving.as_ref().map(|serving| serving.policy),
            tp: grid.tp,
            pp: grid.pp,
            ranks_ready: n_ranks_ready as u16,
        });
        let prediction = self.prediction.filter(|_| self.blueprint.is_some());
        wire::State {
            phase: self.phase().into(),
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
            ranks,
            n_spares: self.members.n_spares() as u32,
            prediction: prediction.map(|prediction| {
                Box::new(wire::Prediction {
                    tokens_per_s_low: prediction.low,
                    tokens_per_s_high: prediction.high,
                    bottleneck: prediction.bottleneck.to_string(),
                })
            }),
            actual: Some(self.speed.actual(&stats.counters)),
            tp: grid.tp.into(),
            pp: grid.pp.into(),
            apart: self.apart(),
            wanted_tp: self.placing.wanted.tp.into(),
            wanted_pp: self.placing.wanted.pp.into(),
            unplaced: self.placing.unplaced(self.now()),
            shortened: self.blueprint.as_ref().and_then(|blueprint| blueprint.shortened.as_ref()).map(shortened),
            backlog_tokens: self.serving.as_ref().map_or(0, |serving| serving.scheduler.backlog_tokens()),
        }
    }

    fn apart(&self) -> Vec<wire::Apart> {
        let now = self.now();
        let apart = |(worker, out): (WorkerId, &Out)| wire::Apart {
            host: self.members.host(worker).to_owned(),
            address: self.members.mesh_address(worker),
            other_host: self.members.host(out.from).to_owned(),
            other_address: self.members.mesh_address(out.from),
            why: out.why.clone(),
            micros: out.until.since(now).0,
        };
        self.strangers.out(now).map(apart).collect()
    }

    fn tell_store(&self, told: Told) {
        self.tell.send_if_modified(|before| {
            let is_news = *before != told;
            *before = told;
            is_news
        });
    }

    fn measure(&self, stats: &Stats, n_ranks_ready: u32) {
        metrics::epoch(&self.of, self.epoch.n, n_ranks_ready);
        metrics::load(&self.of, stats.n_running, stats.n_waiting, stats.blocks_used, stats.blocks_total);
        metrics::planned(
            &self.of,
            metrics::PlannerCounts {
                steps: stats.steps,
                preemptions: stats.preemptions,
                tokens_out: stats.tokens_drawn,
                tokens_discarded: stats.tokens_discarded,
                prefix_hit_tokens: stats.prefix_hit_tokens,
                starved: stats.starved,
                steps_early: stats.steps_early,
            },
        );
    }

    /// Once a second: where each rank's time went, and how much of it was a bubble.
    pub(crate) fn look(&mut self, now: Micros) {
        if now.since(self.looked).0 < micros(LOOK_EVERY) {
            return;
        }
        self.looked = now;
        let times = self.members.look(now, self.speed.in_flight_micros());
        for (rank, times) in &times {
            metrics::bubble(&self.of, rank.0, times.in_flight_micros.saturating_sub(times.compute_micros));
            metrics::rank_slow(&self.of, rank.0, self.slowness.is_slow(*rank));
        }
        self.tell_cache();
        self.name_the_slow(&times);
        self.grow_if_due(now);
        if now.since(self.speed_told).0 >= micros(SPEED_TOLD_EVERY) {
            self.speed_told = now;
            self.tell_speed();
        }
    }

    fn tell_cache(&mut self) {
        let Some(serving) = self.serving.as_ref().filter(|_| self.is_ready) else { return };
        let now = metrics::Cache {
            block_size: BLOCK_TOKENS,
            n_blocks: serving.scheduler.stats().blocks_total,
            dtype: self.config.policy.kv_dtype.to_string(),
            prefix_caching: self.config.shares_blocks(),
        };
        if self.cache.as_ref() != Some(&now) {
            metrics::cache(&self.of, self.cache.as_ref(), &now);
            self.cache = Some(now);
        }
    }

    /// A slow rank is named and stays: to let it go would cost more than it does.
    fn name_the_slow(&mut self, times: &[(Rank, wire::RankTimes)]) {
        let Some(blueprint) = self.blueprint.as_ref().filter(|_| self.is_ready) else { return };
        let pass = |(rank, times): &(Rank, wire::RankTimes)| Pass {
            rank: *rank,
            stage: blueprint.grid.place(*rank).stage,
            n_steps: times.steps,
            compute_micros: times.compute_micros,
        };
        let passes: Vec<Pass> = times.iter().map(pass).collect();
        for Change { rank, is_slow, micros, others_micros } in self.slowness.look(&passes) {
            let host = blueprint.shards.iter().find(|shard| shard.rank == rank).map_or("", |shard| &shard.host);
            let word = if is_slow { "a rank is slow" } else { "a rank is as fast as others again" };
            tracing::warn!(rank = rank.0, host, micros, others_micros, "{word}");
            metrics::rank_slow(&self.of, rank.0, is_slow);
            self.state_changed = true;
        }
    }

    /// What was predicted beside what is.
    pub(crate) fn tell_speed(&self) {
        let actual = self.speed.actual(&self.stats().counters);
        let Some(prediction) = self.prediction.as_ref().filter(|_| self.speed.n_steps() > 0) else { return };
        let text = |per_s: f64| if per_s > 0.0 { format!("{per_s:.0} tokens/s") } else { "none ran so".into() };
        tracing::info!(
            predicted = %prediction,
            alone = text(actual.alone_tokens_per_s),
            together = text(actual.busy_tokens_per_s),
            steps = actual.steps,
            "predicted and actual speed"
        );
    }
}
