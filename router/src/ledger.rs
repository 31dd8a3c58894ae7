//! How much work a replica has, as far as this router knows: what it gave to the replica itself, at once, and what
//! others gave to it, as the replica tells; and how fast it works. Knows numbers of tokens, no requests and no clock.

use proto::cluster::Actual;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Less than this says little of how fast a replica is.
const MEASURED_MICROS_MIN: u64 = 50_000;

/// Of one replica.
#[derive(Debug, Default)]
pub struct Ledger {
    own: AtomicU64,
    others: AtomicU64,
    /// Tokens in a thousand seconds; zero until it is known.
    rate: AtomicU64,
    measured: Mutex<Option<Measured>>,
}

/// What the replica had done when it was last looked at.
#[derive(Clone, Copy, Debug)]
struct Measured {
    computed: u64,
    busy_micros: u64,
}

impl Ledger {
    pub fn work(&self) -> u64 {
        self.own.load(Relaxed).saturating_add(self.others.load(Relaxed))
    }

    /// The replica says what it has in all. What is not from here is other routers'.
    pub fn told(&self, n_tokens: u64) {
        self.others.store(n_tokens.saturating_sub(self.own.load(Relaxed)), Relaxed);
    }

    /// The replica says what it has done since it was placed. One that works otherwise now is known by what it does
    /// now: each look counts a quarter.
    pub fn worked(&self, actual: &Actual) {
        let Actual { computed, busy_micros, .. } = *actual;
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let since = measured.filter(|last| last.computed <= computed && last.busy_micros <= busy_micros);
        let since = since.unwrap_or(Measured { computed: 0, busy_micros: 0 });
        let micros = busy_micros - since.busy_micros;
        if micros < MEASURED_MICROS_MIN {
            return;
        }
        *measured = Some(Measured { computed, busy_micros });
        let now = u128::from(computed - since.computed) * 1_000_000_000 / u128::from(micros);
        let before = u128::from(self.rate.load(Relaxed));
        let rate = if before == 0 { now } else { (3 * before + now) / 4 };
        self.rate.store(u64::try_from(rate).unwrap_or(u64::MAX), Relaxed);
    }

    /// The replica is gone, and another life of it may be another machine.
    pub fn gone(&self) {
        self.told(0);
        self.rate.store(0, Relaxed);
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How long it takes until so many more tokens are computed, behind all that is there. None while nobody knows.
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        let rate = Some(self.rate.load(Relaxed)).filter(|rate| *rate > 0)?;
        let micros = u128::from(self.work().saturating_add(n_tokens)) * 1_000_000_000 / u128::from(rate);
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Until the result is dropped, so much more is to be done there.
    pub fn enter(self: &Arc<Self>, n_tokens: u64) -> Item {
        self.own.fetch_add(n_tokens, Relaxed);
        Item { ledger: self.clone(), n_tokens }
    }
}

/// What is left to do of one request, as far as anybody can know.
#[derive(Debug)]
pub struct Item {
    ledger: Arc<Ledger>,
    n_tokens: u64,
}

impl Item {
    /// It says tokens: its prompt is done, and each step of it is one token.
    pub fn begun(&mut self) {
        let done = self.n_tokens.saturating_sub(1);
        self.n_tokens -= done;
        self.ledger.own.fetch_sub(done, Relaxed);
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.ledger.own.fetch_sub(self.n_tokens, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_work_is_known_at_once_and_others_when_it_is_told() {
        let ledger = Arc::new(Ledger::default());
        let mut item = ledger.enter(500);
        assert_eq!(ledger.work(), 500);
        ledger.told(700);
        assert_eq!(ledger.work(), 700);
        item.begun();
        item.begun();
        assert_eq!(ledger.work(), 201);
        drop(item);
        assert_eq!(ledger.work(), 200);
        // Of what this router has sent, the replica has not got everything yet.
        let _item = ledger.enter(500);
        ledger.told(20);
        assert_eq!(ledger.work(), 500);
    }

    #[test]
    fn the_wait_is_the_work_by_the_rate_that_was_measured_last() {
        let ledger = Arc::new(Ledger::default());
        let worked = |computed, busy_micros| ledger.worked(&Actual { computed, busy_micros, ..Actual::default() });
        let seconds = |n_tokens| ledger.wait(n_tokens).map(|wait| wait.as_secs_f64().round() as u64);
        assert_eq!(seconds(1000), None);
        // Too short to know anything by.
        worked(10, 49_999);
        assert_eq!(seconds(1000), None);
        worked(200, 1_000_000);
        assert_eq!(seconds(1000), Some(5));
        let item = ledger.enter(1000);
        ledger.told(3000);
        assert_eq!(seconds(1000), Some(20));
        drop(item);
        // It has become slower, and then there is another in its place.
        (2..40).for_each(|second| worked(200 + 100 * (second - 1), 1_000_000 * second));
        assert_eq!(seconds(1000), Some(30));
        worked(600, 1_000_000);
        assert!(seconds(1000).unwrap() < 30);
        ledger.gone();
        assert_eq!(seconds(1000), None);
        worked(0, u64::MAX);
        assert_eq!(seconds(u64::MAX), None, "nothing was computed");
    }
}
