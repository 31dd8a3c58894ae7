//! The statistics of a run. Has no knowledge of the cluster.

use super::traffic::Nanos;
use serde::Serialize;

/// The window in which requests and tokens count: from the first time, up to but not including the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasurementWindow {
    pub from: Nanos,
    pub until: Nanos,
}

impl MeasurementWindow {
    pub fn contains(&self, at: Nanos) -> bool {
        (self.from..self.until).contains(&at)
    }

    /// Returns the part of a period that lies within the window.
    pub fn overlap(&self, from: Nanos, until: Nanos) -> Nanos {
        until.min(self.until).saturating_sub(from.max(self.from))
    }

    pub fn seconds(&self) -> f64 {
        (self.until - self.from) as f64 / 1e9
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

/// A histogram of times. Classes are a hundred and twenty-eighth apart, so its size does not depend on the number of
/// times.
#[derive(Default)]
pub struct TimeHistogram {
    counts: Vec<u64>,
    pub n: u64,
    /// The sum of all times, in nanoseconds.
    pub sum: u128,
}

/// A number's leading bits that determine its class.
const CLASS_BITS: u32 = 7;

impl TimeHistogram {
    pub fn add(&mut self, nanos: Nanos) {
        let class = class(nanos);
        if class >= self.counts.len() {
            self.counts.resize(class + 1, 0);
        }
        self.counts[class] += 1;
        self.n += 1;
        self.sum += u128::from(nanos);
    }

    /// Returns the smallest class that `percent` of a hundred do not exceed.
    fn percentile(&self, percent: u64) -> Nanos {
        let rank = (u128::from(self.n) * u128::from(percent)).div_ceil(100).max(1);
        let mut seen = 0u128;
        for (class, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= rank {
                return middle(class);
            }
        }
        0
    }

    /// Returns the percentiles, in milliseconds.
    pub fn percentiles(&self) -> Percentiles {
        let millis = |nanos: Nanos| nanos as f64 / 1e6;
        let at = |percent| millis(self.percentile(percent));
        let mean = self.sum as f64 / self.n.max(1) as f64 / 1e6;
        Percentiles { mean, p50: at(50), p90: at(90), p99: at(99) }
    }
}

/// Small numbers are classes of their own; above them each power of two has equally many.
fn class(nanos: Nanos) -> usize {
    let shift = (Nanos::BITS - nanos.leading_zeros()).saturating_sub(CLASS_BITS + 1);
    ((u64::from(shift) << CLASS_BITS) + (nanos >> shift)) as usize
}

fn middle(class: usize) -> Nanos {
    let per_power = 1 << CLASS_BITS;
    let shift = (class as u64 >> CLASS_BITS).saturating_sub(1);
    let lowest = (class as u64 - shift * per_power) << shift;
    lowest + (1 << shift >> 1)
}

/// The number of open items over time.
#[derive(Default)]
pub struct TimeWeightedCount {
    pub now: u64,
    since: Nanos,
    area: u128,
}

impl TimeWeightedCount {
    pub fn change(&mut self, by: i64, at: Nanos, window: &MeasurementWindow) {
        self.area += u128::from(self.now) * u128::from(window.overlap(self.since, at));
        self.now = self.now.checked_add_signed(by).expect("no more requests end than begin");
        self.since = at;
    }

    pub fn mean(&self, window: &MeasurementWindow) -> f64 {
        self.area as f64 / (window.until - window.from).max(1) as f64
    }
}

/// The mean and maximum of repeated samples.
#[derive(Clone, Copy, Debug, Default)]
pub struct SampledMean {
    n: u64,
    sum: f64,
    pub max: f64,
}

impl SampledMean {
    pub fn add(&mut self, value: f64) {
        self.n += 1;
        self.sum += value;
        self.max = self.max.max(value);
    }

    pub fn mean(&self) -> f64 {
        self.sum / self.n.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_in_order_and_close_to_what_they_hold() {
        let mut last = 0;
        let powers = (11..60).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) / 3]);
        for nanos in (0..2000).chain(powers) {
            let at = class(nanos);
            assert!(at >= last, "{nanos}");
            last = at;
            let error = middle(at).abs_diff(nanos) as f64;
            assert!(error <= nanos as f64 / 128.0, "{nanos} became {}", middle(at));
        }
    }

    #[test]
    fn percentiles_of_a_hundred_times() {
        let mut times = TimeHistogram::default();
        (1..=100).for_each(|ms| times.add(ms * 1_000_000));
        let Percentiles { mean, p50, p90, p99 } = times.percentiles();
        assert_eq!(mean, 50.5);
        for (got, expected) in [(p50, 50.0), (p90, 90.0), (p99, 99.0)] {
            assert!((got / expected - 1.0f64).abs() < 0.01, "{got} {expected}");
        }
        assert_eq!(TimeHistogram::default().percentiles(), Percentiles::default());
    }

    #[test]
    fn a_level_is_weighed_by_its_time_within_the_window() {
        let window = MeasurementWindow { from: 100, until: 200 };
        let mut level = TimeWeightedCount::default();
        level.change(2, 50, &window);
        level.change(2, 150, &window);
        level.change(-4, 300, &window);
        assert_eq!((level.mean(&window), level.now), (3.0, 0));
    }
}
