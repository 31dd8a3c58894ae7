//! The last hour's load in bins of ten seconds. A bin is made when something happens in it. A missing bin means that
//! nothing happened, and that there are no percentiles to draw.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub const BIN: Duration = Duration::from_secs(10);
const BINS_MAX: usize = 360;
/// The most tenants with a count of their own in a bin, as in metrics.
const TENANTS_MAX: usize = 101;
/// A bin of waits ends at a quarter of an octave more than the one before it: from 0.1 ms to some minutes.
pub const WAITS: usize = 84;
const WAIT_MIN_MICROS: f64 = 100.0;

pub struct LastHour {
    began: Instant,
    bins: Mutex<VecDeque<LoadBin>>,
}

/// What happened within ten seconds.
#[derive(Clone, Debug, Default)]
pub struct LoadBin {
    /// Counted from when the router began.
    pub number: u64,
    pub n_arrived: u32,
    pub n_ended: u32,
    pub n_refused: u32,
    /// Requests that ended early: by deadlines, by failures, or because their clients left.
    pub n_broken: u32,
    pub n_prompt: u64,
    pub n_cached: u64,
    pub n_output: u64,
    /// The most requests that had no token yet, and that had one.
    pub waiting_max: u32,
    pub running_max: u32,
    pub first_token: WaitCounts,
    pub between_tokens: WaitCounts,
    /// Tokens by tenant.
    pub tenants: BTreeMap<Arc<str>, u64>,
}

/// A histogram of durations.
#[derive(Clone, Debug, Default)]
pub struct WaitCounts(Vec<u32>);

impl WaitCounts {
    fn add(&mut self, took: Duration) {
        self.0.resize(WAITS, 0);
        let octaves = (took.as_micros() as f64 / WAIT_MIN_MICROS).max(1.0).log2();
        self.0[((octaves * 4.0).ceil() as usize).min(WAITS - 1)] += 1;
    }

    /// Returns the bound in seconds below which this part of the durations lies, or None if there are none.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let n: u64 = self.0.iter().map(|n| u64::from(*n)).sum();
        let rank = ((n as f64 * part).ceil() as u64).max(1);
        let below = self.0.iter().scan(0, |sum, n| {
            *sum += u64::from(*n);
            Some(*sum)
        });
        let bin = below.take(WAITS).position(|sum| sum >= rank)?;
        Some(WAIT_MIN_MICROS / 1e6 * (bin as f64 / 4.0).exp2())
    }
}

impl Default for LastHour {
    fn default() -> LastHour {
        LastHour { began: Instant::now(), bins: Mutex::default() }
    }
}

impl LastHour {
    /// Returns the bins of the last hour, the oldest first; how old the newest bin's beginning is; and for how long
    /// there have been any.
    pub fn bins(&self, now: Instant) -> (Vec<LoadBin>, u64, Duration) {
        let lives = now.saturating_duration_since(self.began);
        let number = lives.as_secs() / BIN.as_secs();
        let oldest = (number + 1).saturating_sub(BINS_MAX as u64);
        let bins = self.lock().iter().filter(|bin| bin.number >= oldest).cloned().collect();
        (bins, number, lives)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<LoadBin>> {
        self.bins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn in_bin(&self, write: impl FnOnce(&mut LoadBin)) {
        let number = self.began.elapsed().as_secs() / BIN.as_secs();
        let mut bins = self.lock();
        if bins.back().is_none_or(|last| last.number < number) {
            if bins.len() >= BINS_MAX {
                bins.pop_front();
            }
            bins.push_back(LoadBin { number, ..LoadBin::default() });
        }
        if let Some(last) = bins.back_mut() {
            write(last);
        }
    }

    pub(super) fn record_arrival(&self, n_waiting: u32, n_running: u32) {
        self.in_bin(|bin| {
            bin.n_arrived += 1;
            bin.waiting_max = bin.waiting_max.max(n_waiting);
            bin.running_max = bin.running_max.max(n_running);
        });
    }

    /// The request is one of `n_running` from here on.
    pub(super) fn record_first_token(&self, after: Duration, n_running: u32) {
        self.in_bin(|bin| {
            bin.first_token.add(after);
            bin.running_max = bin.running_max.max(n_running);
        });
    }

    pub(super) fn record_tokens(&self, tenant: &Arc<str>, n: u32, since_last: Option<Duration>) {
        self.in_bin(|bin| {
            bin.n_output += u64::from(n);
            if let Some(took) = since_last {
                bin.between_tokens.add(took / n.max(1));
            }
            let is_full = bin.tenants.len() >= TENANTS_MAX;
            match bin.tenants.get_mut(tenant) {
                Some(of) => *of += u64::from(n),
                None if is_full => {}
                None => drop(bin.tenants.insert(tenant.clone(), n.into())),
            }
        });
    }

    /// `None`: it was refused before it had begun.
    pub(super) fn ended(&self, used: Option<(u64, u64)>, is_own_end: bool) {
        self.in_bin(|bin| match used {
            None => bin.n_refused += 1,
            Some((n_prompt, n_cached)) => {
                bin.n_ended += 1;
                bin.n_broken += u32::from(!is_own_end);
                bin.n_prompt += n_prompt;
                bin.n_cached += n_cached;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_have_the_quantiles_of_what_was_added_within_a_fifth() {
        let mut waits = WaitCounts::default();
        assert_eq!(waits.quantile(0.5), None);
        for ms in 1..=1000 {
            waits.add(Duration::from_millis(ms));
        }
        for (part, expect) in [(0.5, 0.5), (0.99, 0.99), (0.0, 0.001)] {
            let value = waits.quantile(part).unwrap();
            assert!(value >= expect && value <= expect * 1.2, "{part}: {value}");
        }
        waits.add(Duration::from_secs(1 << 20));
        assert!(waits.quantile(1.0).unwrap() > 100.0);
    }

    #[test]
    fn the_ring_is_bounded_and_an_hour_long() {
        let began = Instant::now().checked_sub(Duration::from_secs(2 * 3600)).unwrap();
        let load = LastHour { began, bins: Mutex::default() };
        load.lock().extend((0..BINS_MAX as u64).map(|number| LoadBin { number, ..LoadBin::default() }));
        load.record_arrival(3, 4);
        let (bins, now, _) = load.bins(Instant::now());
        assert_eq!((bins.len(), bins[0].number, now), (1, 720, 720), "bins older than an hour are left out");
        assert_eq!((load.lock().len(), bins[0].waiting_max, bins[0].running_max), (BINS_MAX, 3, 4));
        for tenant in 0..500 {
            load.record_tokens(&format!("t{tenant}").into(), 2, None);
        }
        assert_eq!(load.lock().back().unwrap().tenants.len(), TENANTS_MAX);
        assert_eq!(load.lock().back().unwrap().n_output, 1000);
    }
}
