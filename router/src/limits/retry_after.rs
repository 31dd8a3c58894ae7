//! When a refused client is to retry. Each gets a moment of its own, so that clients that were refused together do not
//! come back together, and only a few more come than there will be places. Knows counts and moments, no requests.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How many clients are given a moment for each place that gets free: some never come, and no place should stay empty.
const COMERS_PER_PLACE: f64 = 4.0;
/// The time over which moments are spread. By its end everything may be different, and it starts again.
const SPREAD_MAX: Duration = Duration::from_secs(15);
/// Freed places are counted for at least `WINDOW`; a count over more than `WINDOW_MAX` is ignored.
const WINDOW: Duration = Duration::from_secs(1);
const WINDOW_MAX: Duration = Duration::from_secs(3);
/// A window with a lower rate lowers the measured one at most by this factor, because a pause does not measure the
/// rate.
const KEPT: f64 = 0.8;

#[derive(Debug)]
pub struct RetryAfter {
    wait_min: Duration,
    /// Places freed per second, until that is measured: all of them within the shortest wait.
    rate_guessed: f64,
    /// The lowest rate that is assumed.
    rate_min: f64,
    rate_book: Mutex<RetryRate>,
}

#[derive(Debug, Default)]
struct RetryRate {
    /// The last moment that was given.
    given: Option<Instant>,
    /// The count starts when a client is refused; before that, places may have been free for lack of requests.
    counted_since: Option<Instant>,
    n_freed: u32,
    rate: Option<f64>,
}

impl RetryAfter {
    pub fn new(n_places: u32, wait_min: Duration) -> RetryAfter {
        let n_places = f64::from(n_places.max(1));
        RetryAfter {
            wait_min,
            rate_guessed: n_places / wait_min.as_secs_f64().max(0.001),
            rate_min: n_places / SPREAD_MAX.as_secs_f64(),
            rate_book: Mutex::default(),
        }
    }

    /// Counts freed places: their requests are answered.
    pub fn freed(&self, n: u32) {
        let mut rate_book = self.rate_book();
        rate_book.n_freed = rate_book.n_freed.saturating_add(n);
    }

    /// Returns how long the next refused client is to wait.
    pub fn wait(&self, now: Instant) -> Duration {
        let mut rate_book = self.rate_book();
        rate_book.measure(now);
        let first = now + self.wait_min.max(rate_book.next_place());
        let rate = rate_book.rate.unwrap_or(self.rate_guessed).max(self.rate_min);
        let apart = Duration::from_secs_f64(1.0 / (COMERS_PER_PLACE * rate));
        let next = rate_book.given.map_or(first, |given| (given + apart).max(first));
        let moment = if next > first + SPREAD_MAX { first } else { next };
        rate_book.given = Some(moment);
        moment - now
    }

    fn rate_book(&self) -> MutexGuard<'_, RetryRate> {
        self.rate_book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RetryRate {
    /// Returns how long the next place takes to get free, by the measured rate.
    fn next_place(&self) -> Duration {
        let seconds = self.rate.map_or(0.0, |rate| 1.0 / rate);
        Duration::from_secs_f64(seconds.min(SPREAD_MAX.as_secs_f64()))
    }

    /// Measures the rate at which places get free. Windows begin and end with refusals: in between there was always a
    /// client that would have taken a place.
    fn measure(&mut self, now: Instant) {
        let Some(since) = self.counted_since else { return self.begin(now) };
        let counted = now - since;
        if counted < WINDOW {
            return;
        }
        if counted <= WINDOW_MAX {
            let rate = f64::from(self.n_freed) / counted.as_secs_f64();
            self.rate = Some(self.rate.map_or(rate, |before| rate.max(before * KEPT)));
        }
        self.begin(now);
    }

    fn begin(&mut self, now: Instant) {
        (self.counted_since, self.n_freed) = (Some(now), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns the waits of `n` clients that are refused at once.
    fn refused_waits(estimator: &RetryAfter, now: Instant, n: usize) -> Vec<Duration> {
        (0..n).map(|_| estimator.wait(now)).collect()
    }

    #[test]
    fn refused_clients_come_back_one_after_the_other() {
        let (estimator, now) = (RetryAfter::new(25, SECOND), Instant::now());
        let waits = refused_waits(&estimator, now, 200);
        assert_eq!((waits[0], waits[199]), (SECOND, SECOND + 199 * Duration::from_millis(10)));
        assert!(waits.windows(2).all(|pair| pair[1] - pair[0] == Duration::from_millis(10)));
        // A client that comes after all that are expected waits as long as the first.
        assert_eq!(estimator.wait(now + 4 * SECOND), SECOND);
    }

    #[test]
    fn clients_come_back_at_the_rate_at_which_places_get_free() {
        let (estimator, now) = (RetryAfter::new(40, SECOND), Instant::now());
        estimator.freed(1000);
        assert_eq!(estimator.wait(now), SECOND);
        estimator.freed(10);
        // Places freed before the first refusal do not count; those until the window's end do.
        let later = now + 2 * SECOND;
        assert_eq!(estimator.wait(later), SECOND);
        assert_eq!(estimator.wait(later) - SECOND, Duration::from_millis(50));
        // Nothing got free: a pause lowers the rate slowly, and never to nothing.
        assert_eq!(estimator.wait(later + SECOND), SECOND);
        assert_eq!(estimator.wait(later + SECOND) - SECOND, Duration::from_micros(62_500));
        let mut at = later + SECOND;
        (0..50).for_each(|_| {
            at += SECOND;
            estimator.wait(at);
        });
        let waits = refused_waits(&estimator, at, 3);
        assert_eq!(waits[2] - waits[1], SPREAD_MAX / 160);
    }

    #[test]
    fn the_first_client_waits_until_a_place_gets_free() {
        let (estimator, now) = (RetryAfter::new(64, SECOND), Instant::now());
        estimator.wait(now);
        estimator.freed(1);
        assert_eq!(estimator.wait(now + 3 * SECOND), 3 * SECOND, "one place in three seconds");
        // No place gets free for a while: the wait gets longer, but stays bounded.
        let waits: Vec<Duration> = (4..40).map(|i| estimator.wait(now + i * SECOND)).collect();
        assert!(waits[5] > 4 * SECOND && waits.iter().all(|wait| *wait <= 2 * SPREAD_MAX), "{waits:?}");
    }

    #[test]
    fn every_wait_is_bounded_and_old_counts_are_forgotten() {
        let (estimator, now) = (RetryAfter::new(1, SECOND), Instant::now());
        let waits = refused_waits(&estimator, now, 10_000);
        assert!(waits.iter().all(|wait| (SECOND..=SECOND + SPREAD_MAX).contains(wait)));
        estimator.wait(now + 3600 * SECOND);
        assert_eq!(estimator.rate_book().rate, None);
    }
}
