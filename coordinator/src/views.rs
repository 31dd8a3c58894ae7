//! What the replica says of itself: its state to the routers, its figures to the metrics, its speed to the log.

use crate::replica::{Replica, micros};
use crate::serve::Told;
use proto::cluster as wire;
use proto::cluster::state::Phase;
use scheduler::Stats;
use std::time::Duration;
use telemetry::metrics;
use types::Micros;

/// Long enough for its times to mean something, short enough to see a change.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const SPEED_TOLD_EVERY: Duration = Duration::from_secs(60);

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
        let ranks = self.members.states(self.blueprint.as_ref());
        let n_ranks_ready = if self.is_ready { ranks.len() } else { 0 };
        self.measure(&stats, n_ranks_ready as u32);
        let grid = self.config.policy.grid;
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
            prediction: prediction.map(|prediction| wire::Prediction {
                tokens_per_s_low: prediction.low,
                tokens_per_s_high: prediction.high,
                bottleneck: prediction.bottleneck.to_string(),
            }),
            actual: Some(self.speed.actual(&stats.counters)),
            tp: grid.tp.into(),
            pp: grid.pp.into(),
            backlog_tokens: self.serving.as_ref().map_or(0, |serving| serving.scheduler.backlog_tokens()),
        }
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
            metrics::Planned {
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
        for (rank, times) in self.members.look(now, self.speed.in_flight_micros()) {
            metrics::bubble(&self.of, rank.0, times.in_flight_micros.saturating_sub(times.compute_micros));
        }
        if now.since(self.speed_told).0 >= micros(SPEED_TOLD_EVERY) {
            self.speed_told = now;
            self.tell_speed();
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
