//! How long a request has had no replica that computes it. Knows moments, no requests.

use std::time::Duration;
use tokio::time::Instant;

/// How long no replica has computed a request, since its last token. Absences are added up: otherwise ranks that come
/// and go could make it wait for ever.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ComputeAbsence {
    since: Option<Instant>,
    before: Duration,
}

impl ComputeAbsence {
    pub fn begins(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    pub fn ends(&mut self, now: Instant) {
        self.before = self.so_far(now);
        self.since = None;
    }

    /// The request got a token.
    pub fn forget(&mut self) {
        self.before = Duration::ZERO;
    }

    pub fn so_far(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// The moment at which the absence has lasted for `max`. None while there is none.
    pub fn lasts_until(&self, max: Duration) -> Option<Instant> {
        self.since?.checked_add(max.saturating_sub(self.before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn absences_add_up_until_a_token_arrives() {
        let now = Instant::now();
        let mut absence = ComputeAbsence::default();
        assert_eq!(absence.lasts_until(3 * SECOND), None);
        absence.begins(now);
        absence.begins(now + SECOND);
        assert_eq!(absence.lasts_until(3 * SECOND), Some(now + 3 * SECOND));
        absence.ends(now + 2 * SECOND);
        absence.ends(now + 9 * SECOND);
        assert_eq!((absence.lasts_until(3 * SECOND), absence.so_far(now + 9 * SECOND)), (None, 2 * SECOND));
        absence.begins(now + 9 * SECOND);
        assert_eq!(absence.lasts_until(3 * SECOND), Some(now + 10 * SECOND));
        assert_eq!(absence.lasts_until(SECOND), Some(now + 9 * SECOND));
        absence.forget();
        assert_eq!(absence.lasts_until(3 * SECOND), Some(now + 12 * SECOND));
        assert_eq!(absence.lasts_until(Duration::MAX), None, "a limit beyond the clock means no limit");
    }
}
