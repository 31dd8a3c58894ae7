//! Estimates when a full queue has room again. Counts what the caller passes; knows no clock.

use types::Micros;

/// How fast requests end: refused requests get a retry time from it.
#[derive(Debug, Default)]
pub(crate) struct CompletionRate {
    last_end: Option<Micros>,
    /// The mean time between two ends; each new one counts a sixteenth.
    mean_micros: u64,
}

impl CompletionRate {
    const RETRY_MIN_MS: u64 = 100;
    const RETRY_MAX_MS: u64 = 30_000;

    pub fn ended(&mut self, now: Micros) {
        if let Some(last) = self.last_end.replace(now) {
            self.mean_micros = (self.mean_micros * 15 + now.since(last).0) / 16;
        }
    }

    /// The time until all waiting requests have been served.
    pub fn retry_after_ms(&self, n_waiting: u32) -> u32 {
        let micros = self.mean_micros.saturating_mul(n_waiting.into());
        (micros / 1000).clamp(Self::RETRY_MIN_MS, Self::RETRY_MAX_MS) as u32
    }
}
