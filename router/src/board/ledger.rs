//! How much work a replica has, as far as this router knows, and how fast it is. Work from this router is counted at
//! once; work from other routers is reported by the replica. Knows numbers of tokens, no requests and no clock.

use crate::board::circuit::{LatencySum, LatencyWindow};
use proto::cluster::{Load, State};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use types::BLOCK_TOKENS;

/// A shorter time is too imprecise to measure a replica's speed.
const MEASURED_MICROS_MIN: u64 = 50_000;

/// How many ledgers share one array, so that their numbers are adjacent in memory.
const LOADS_PER_ARRAY: usize = 64;

/// What a choice reads of one replica.
#[derive(Debug)]
struct LoadCounters {
    own: AtomicU64,
    others: AtomicU64,
    /// Free positions of the cache; `u64::MAX` until the replica has reported them.
    tokens_free: AtomicU64,
    n_running: AtomicU32,
    /// Requests of this router that have not ended.
    n_own: AtomicU32,
}

impl Default for LoadCounters {
    fn default() -> LoadCounters {
        let (own, others, n_running, n_own) = Default::default();
        LoadCounters { own, others, tokens_free: AtomicU64::new(u64::MAX), n_running, n_own }
    }
}

/// The numbers of one ledger, for readers that go through many.
#[derive(Clone, Debug)]
pub struct Loads {
    numbers: Arc<[LoadCounters]>,
    at: usize,
}

/// Opens ledgers, and stores their numbers side by side.
#[derive(Debug, Default)]
pub struct Ledgers {
    /// The next free slot for a ledger's numbers.
    next: Option<Loads>,
}

impl Ledgers {
    pub fn open(&mut self) -> Ledger {
        let loads = self.next.take().unwrap_or_else(|| Loads::array(LOADS_PER_ARRAY));
        self.next = (loads.at + 1 < LOADS_PER_ARRAY).then(|| Loads { at: loads.at + 1, ..loads.clone() });
        Ledger::of(loads)
    }
}

impl Loads {
    fn array(n: usize) -> Loads {
        Loads { numbers: std::iter::repeat_with(LoadCounters::default).take(n).collect(), at: 0 }
    }

    #[inline]
    fn numbers(&self) -> &LoadCounters {
        &self.numbers[self.at]
    }

    #[inline]
    pub fn n_running(&self) -> u32 {
        self.numbers().n_running.load(Relaxed)
    }

    #[inline]
    pub fn n_own(&self) -> u32 {
        self.numbers().n_own.load(Relaxed)
    }

    /// Positions that the replica's cache has room for, including cached blocks that no request holds; `u64::MAX` until
    /// the replica has reported them.
    #[inline]
    pub fn tokens_free(&self) -> u64 {
        self.numbers().tokens_free.load(Relaxed)
    }

    #[inline]
    pub fn work(&self) -> u64 {
        let numbers = self.numbers();
        numbers.own.load(Relaxed).saturating_add(numbers.others.load(Relaxed))
    }
}

/// The ledger of one replica.
#[derive(Debug)]
pub struct Ledger {
    loads: Loads,
    n_waiting: AtomicU64,
    /// Microseconds per thousand prompt tokens; zero until known.
    micros_computing: AtomicU64,
    /// Microseconds between the starts of two requests while others wait; zero until known.
    micros_between: AtomicU64,
    measured: Mutex<Option<CounterSnapshot>>,
    seen: LatencyCounters,
}

/// The times of this router's requests since the last look.
#[derive(Debug, Default)]
struct LatencyCounters {
    n_first: AtomicU64,
    first_micros: AtomicU64,
    n_between: AtomicU64,
    between_micros: AtomicU64,
    n_done: AtomicU64,
    n_breaks: AtomicU64,
}

/// The replica's counters at the last look.
#[derive(Clone, Copy, Debug)]
struct CounterSnapshot {
    computed: u64,
    drawn: u64,
    begun: u64,
    busy_micros: u64,
    somebody_waits: bool,
}

impl CounterSnapshot {
    /// The growth since `last`. None if a counter fell: the replica was placed anew.
    fn since(self, last: CounterSnapshot) -> Option<CounterSnapshot> {
        Some(CounterSnapshot {
            computed: self.computed.checked_sub(last.computed)?,
            drawn: self.drawn.checked_sub(last.drawn)?,
            begun: self.begun.checked_sub(last.begun)?,
            busy_micros: self.busy_micros.checked_sub(last.busy_micros)?,
            somebody_waits: self.somebody_waits && last.somebody_waits,
        })
    }
}

/// A ledger outside a shared array.
impl Default for Ledger {
    fn default() -> Ledger {
        Ledger::of(Loads::array(1))
    }
}

impl Ledger {
    fn of(loads: Loads) -> Ledger {
        let (n_waiting, micros_computing, micros_between, measured, seen) = Default::default();
        Ledger { loads, n_waiting, micros_computing, micros_between, measured, seen }
    }

    pub fn loads(&self) -> &Loads {
        &self.loads
    }

    fn numbers(&self) -> &LoadCounters {
        self.loads.numbers()
    }

    pub fn record_first_token(&self, after: Duration) {
        self.seen.n_first.fetch_add(1, Relaxed);
        self.seen.first_micros.fetch_add(after.as_micros() as u64, Relaxed);
    }

    /// `n_tokens` came together, `apart` after those before.
    pub fn record_token_gap(&self, n_tokens: usize, apart: Duration) {
        self.seen.n_between.fetch_add(n_tokens as u64, Relaxed);
        self.seen.between_micros.fetch_add(apart.as_micros() as u64, Relaxed);
    }

    pub fn record_done(&self) {
        self.seen.n_done.fetch_add(1, Relaxed);
    }

    /// The replica's stream was lost, the replica was silent, or it failed.
    pub fn record_break(&self) {
        self.seen.n_breaks.fetch_add(1, Relaxed);
    }

    /// What happened since the last look.
    pub fn take_window(&self) -> LatencyWindow {
        let take = |counter: &AtomicU64| counter.swap(0, Relaxed);
        let seen = &self.seen;
        LatencyWindow {
            first: LatencySum { n: take(&seen.n_first), micros: take(&seen.first_micros) },
            between: LatencySum { n: take(&seen.n_between), micros: take(&seen.between_micros) },
            n_done: take(&seen.n_done),
            n_breaks: take(&seen.n_breaks),
        }
    }

    pub fn work(&self) -> u64 {
        self.loads.work()
    }

    /// Applies the total work that the replica reports. Work that does not come from this router comes from others.
    pub fn apply_state(&self, state: &State) {
        self.apply_load(&Load {
            n_waiting: state.n_waiting,
            n_running: state.n_running,
            backlog_tokens: state.backlog_tokens,
            running_tokens: 0,
            blocks_used: state.blocks_used,
            blocks_total: state.blocks_total,
        });
        let Some(actual) = &state.actual else { return };
        self.measure(CounterSnapshot {
            computed: actual.computed,
            drawn: actual.tokens,
            begun: actual.admissions,
            busy_micros: actual.busy_micros,
            somebody_waits: state.n_waiting > 0,
        });
    }

    /// Does the same for the load in a beat, several times a second.
    pub fn apply_load(&self, load: &Load) {
        let numbers = self.numbers();
        numbers.others.store(load.backlog_tokens.saturating_sub(numbers.own.load(Relaxed)), Relaxed);
        self.n_waiting.store(load.n_waiting.into(), Relaxed);
        numbers.n_running.store(load.n_running, Relaxed);
        let n_free = u64::from(load.blocks_total.saturating_sub(load.blocks_used));
        let tokens_free = if load.blocks_total == 0 { u64::MAX } else { n_free * u64::from(BLOCK_TOKENS) };
        numbers.tokens_free.store(tokens_free, Relaxed);
    }

    /// Measures the two things that requests wait for: how fast prompts are computed, while little else is computed;
    /// and how fast requests start one after the other, while more of them wait.
    fn measure(&self, now: CounterSnapshot) {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(done) = measured.and_then(|last| now.since(last)) else {
            *measured = Some(now);
            return;
        };
        if done.busy_micros < MEASURED_MICROS_MIN || (done.somebody_waits && done.begun == 0) {
            return;
        }
        *measured = Some(now);
        if done.computed > 0 && done.computed >= done.drawn.saturating_mul(2) {
            mix(&self.micros_computing, done.busy_micros, 1000, done.computed);
        }
        if done.somebody_waits {
            mix(&self.micros_between, done.busy_micros, 1, done.begun);
        }
    }

    /// The replica is gone. It may come back on another machine, so no measurement is kept.
    pub fn reset_measurements(&self) {
        let numbers = self.numbers();
        numbers.others.store(0, Relaxed);
        self.n_waiting.store(0, Relaxed);
        numbers.n_running.store(0, Relaxed);
        numbers.tokens_free.store(u64::MAX, Relaxed);
        self.micros_computing.store(0, Relaxed);
        self.micros_between.store(0, Relaxed);
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns the time until `n_tokens` more are computed behind all present work, or until the waiting requests have
    /// started, if that is longer. Returns None if the time is unknown or if there is no work: a wrong measurement is
    /// corrected only by requests that are let in.
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        let n_waiting = self.n_waiting.load(Relaxed);
        if self.work() == 0 && n_waiting == 0 {
            return None;
        }
        let computing = measured_mean(&self.micros_computing)
            .map(|micros| (u128::from(self.work()) + u128::from(n_tokens)) * u128::from(micros) / 1000);
        let between = measured_mean(&self.micros_between).filter(|_| n_waiting > 0);
        let beginning = between.map(|micros| (u128::from(n_waiting) + 1) * u128::from(micros));
        let micros = computing.max(beginning)?;
        Some(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Adds this much work, until the result is dropped.
    pub fn add_work(self: &Arc<Self>, n_tokens: u64) -> RemainingWork {
        self.numbers().own.fetch_add(n_tokens, Relaxed);
        self.numbers().n_own.fetch_add(1, Relaxed);
        RemainingWork { ledger: self.clone(), n_tokens }
    }
}

/// Mixes into `mean` the time of each of `n`, multiplied by `times`. Each look counts for a quarter.
fn mix(mean: &AtomicU64, micros: u64, times: u64, n: u64) {
    let now = u128::from(micros) * u128::from(times) / u128::from(n.max(1));
    let mixed = measured_mean(mean).map_or(now, |before| (3 * u128::from(before) + now) / 4);
    mean.store(u64::try_from(mixed).unwrap_or(u64::MAX).max(1), Relaxed);
}

fn measured_mean(mean: &AtomicU64) -> Option<u64> {
    Some(mean.load(Relaxed)).filter(|micros| *micros > 0)
}

/// The remaining work of one request, as far as it is known.
#[derive(Debug)]
pub struct RemainingWork {
    ledger: Arc<Ledger>,
    n_tokens: u64,
}

impl RemainingWork {
    /// The request's first token has come: its prompt is computed, and each further step computes one token.
    pub fn mark_prompt_computed(&mut self) {
        let done = self.n_tokens.saturating_sub(1);
        self.n_tokens -= done;
        self.ledger.numbers().own.fetch_sub(done, Relaxed);
    }
}

impl Drop for RemainingWork {
    fn drop(&mut self) {
        self.ledger.numbers().own.fetch_sub(self.n_tokens, Relaxed);
        self.ledger.numbers().n_own.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::cluster::Actual;

    fn backlog(backlog_tokens: u64) -> State {
        State { backlog_tokens, ..State::default() }
    }

    #[test]
    fn own_work_counts_at_once_others_when_reported() {
        let ledger = Arc::new(Ledger::default());
        let mut item = ledger.add_work(500);
        assert_eq!(ledger.work(), 500);
        ledger.apply_state(&backlog(700));
        assert_eq!(ledger.work(), 700);
        item.mark_prompt_computed();
        item.mark_prompt_computed();
        assert_eq!(ledger.work(), 201);
        drop(item);
        assert_eq!(ledger.work(), 200);
        // Part of what this router has sent has not arrived at the replica.
        let _item = ledger.add_work(500);
        ledger.apply_state(&backlog(20));
        assert_eq!(ledger.work(), 500);
    }

    fn seconds(ledger: &Ledger, n_tokens: u64) -> Option<u64> {
        ledger.wait(n_tokens).map(|wait| wait.as_secs_f64().round() as u64)
    }

    #[test]
    fn prompts_wait_for_prompts() {
        let ledger = Arc::new(Ledger::default());
        let report = |computed, tokens, busy_micros| {
            let actual = Actual { computed, tokens, busy_micros, ..Actual::default() };
            ledger.apply_state(&State { actual: Some(actual), ..backlog(3000) });
        };
        report(5000, 4000, 9_000_000);
        assert_eq!(seconds(&ledger, 1000), None, "earlier values are unknown");
        report(5020, 4000, 9_049_999);
        assert_eq!(seconds(&ledger, 1000), None, "the time is too short for a value");
        report(5200, 4000, 10_000_000);
        assert_eq!(seconds(&ledger, 1000), Some(20));
        // Tokens that are drawn one by one do not measure the speed of prompts.
        report(5210, 4010, 20_000_000);
        assert_eq!(seconds(&ledger, 1000), Some(20));
        // It has become slower.
        (1..40).for_each(|second| report(5210 + 100 * second, 4010, 20_000_000 + 1_000_000 * second));
        assert_eq!(seconds(&ledger, 1000), Some(40));
        ledger.reset_measurements();
        assert_eq!((seconds(&ledger, 1000), ledger.work()), (None, 0));
        report(0, 0, 0);
        report(0, 0, u64::MAX);
        assert_eq!(seconds(&ledger, u64::MAX), None, "nothing was computed");
    }

    #[test]
    fn requests_wait_for_those_before_them() {
        let ledger = Arc::new(Ledger::default());
        let report = |admissions, n_waiting, busy_micros| {
            let actual =
                Actual { admissions, busy_micros, computed: busy_micros, tokens: busy_micros, ..Actual::default() };
            ledger.apply_state(&State { actual: Some(actual), n_waiting, ..State::default() });
        };
        report(10, 0, 1_000_000);
        report(20, 4, 2_000_000);
        assert_eq!(seconds(&ledger, 1), None, "nothing waited when it began");
        report(20, 9, 3_000_000);
        report(21, 9, 6_000_000);
        assert_eq!(seconds(&ledger, 1), Some(40), "one in four seconds, and nine before it");
        // With no request before it, it starts at once.
        report(30, 0, 7_000_000);
        assert_eq!(seconds(&ledger, 1), None);
    }
}
