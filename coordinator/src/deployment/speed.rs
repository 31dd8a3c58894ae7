//! The measured tokens a second, beside the prediction. Counts what the caller passes; knows no clock.

use crate::config::micros;
use crate::placement::Prediction;
use proto::cluster as wire;
use scheduler::Counters;
use std::time::Duration;
use types::Micros;

const LOG_EVERY: Duration = Duration::from_secs(60);

/// The measurements of the last placement.
#[derive(Default)]
pub(crate) struct Performance {
    pub measured: MeasuredSpeed,
    pub predicted: Option<Prediction>,
    logged_at: Micros,
}

impl Performance {
    /// Another placement: earlier measurements do not apply.
    pub fn placed(&mut self, predicted: Option<Prediction>) {
        if let Some(prediction) = &predicted {
            tracing::info!(%prediction, "predicted speed of this layout");
        }
        (self.measured, self.predicted) = (MeasuredSpeed::default(), predicted);
    }

    /// Call about once a second.
    pub fn log_if_due(&mut self, planned: &Counters, now: Micros) {
        if now.since(self.logged_at).0 >= micros(LOG_EVERY) {
            self.logged_at = now;
            self.log(planned);
        }
    }

    /// Logs the prediction and the measurement.
    pub fn log(&self, planned: &Counters) {
        let actual = self.measured.report(planned);
        let Some(prediction) = self.predicted.as_ref().filter(|_| self.measured.n_steps > 0) else { return };
        let text = |per_s: f64| if per_s > 0.0 { format!("{per_s:.0} tokens/s") } else { "none".into() };
        tracing::info!(
            predicted = %prediction,
            alone = text(actual.alone_tokens_per_s),
            together = text(actual.busy_tokens_per_s),
            steps = actual.steps,
            "predicted and actual speed"
        );
    }
}

/// Tokens and the time that they took, since the replica was placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MeasuredSpeed {
    /// For sequences that ran alone, from one token to the next.
    alone: SpeedSample,
    /// For all sequences, over the time in which any step was in flight.
    busy: SpeedSample,
    n_steps: u64,
    last_answer: Option<LastAnswer>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SpeedSample {
    tokens: u64,
    micros: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastAnswer {
    at: Micros,
    is_alone: bool,
}

impl SpeedSample {
    fn per_s(self) -> f64 {
        if self.micros == 0 { 0.0 } else { self.tokens as f64 * 1e6 / self.micros as f64 }
    }
}

impl MeasuredSpeed {
    /// A step was answered. `in_flight_since` is when this step, or the answer before it, began the wait for it.
    pub fn record_answer(&mut self, n_slices: usize, n_tokens: u64, in_flight_since: Micros, now: Micros) {
        let is_alone = n_slices == 1 && n_tokens == 1;
        let micros = now.since(in_flight_since).0;
        self.n_steps += 1;
        self.busy.tokens += n_tokens;
        self.busy.micros += micros;
        // The first token of a sequence alone took a prompt.
        if let Some(last) = self.last_answer.filter(|last| last.is_alone && is_alone && last.at == in_flight_since) {
            self.alone.tokens += 1;
            self.alone.micros += now.since(last.at).0;
        }
        self.last_answer = Some(LastAnswer { at: now, is_alone });
    }

    pub fn in_flight_micros(&self) -> u64 {
        self.busy.micros
    }

    /// The scheduler's counters are reported beside what is counted here.
    pub fn report(&self, planned: &Counters) -> wire::Actual {
        wire::Actual {
            alone_tokens_per_s: self.alone.per_s(),
            busy_tokens_per_s: self.busy.per_s(),
            tokens: self.busy.tokens,
            steps: self.n_steps,
            starved: planned.starved,
            steps_early: planned.steps_early,
            computed: planned.tokens_computed,
            busy_micros: self.busy.micros,
            admissions: planned.admissions,
            drafts: planned.drafts,
            drafts_accepted: planned.drafts_accepted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alone_is_counted_from_token_to_token() {
        let mut speed = MeasuredSpeed::default();
        // A prompt of 50 ms, two tokens of 10 ms, then idle, and a batch of four.
        speed.record_answer(1, 1, Micros(0), Micros(50_000));
        speed.record_answer(1, 1, Micros(50_000), Micros(60_000));
        speed.record_answer(1, 1, Micros(60_000), Micros(70_000));
        speed.record_answer(1, 1, Micros(900_000), Micros(950_000));
        speed.record_answer(4, 4, Micros(950_000), Micros(970_000));
        let actual = speed.report(&Counters::default());
        assert_eq!((actual.alone_tokens_per_s, actual.tokens, actual.steps), (100.0, 8, 5));
        assert_eq!(speed.in_flight_micros(), 140_000);
    }
}
