//! The filters that decide which tokens may be drawn, in the order given in `super`. Knows one row and no log.

use super::noise::Noise;
use crate::cpu::{Isa, math, rows};
use types::{Sampling, Token};

/// A row to be drawn from at a temperature above zero.
pub(super) struct ScaledLogits<'a> {
    row: &'a [f32],
    largest: f32,
    sampling: &'a Sampling,
    isa: Isa,
    scale: f64,
    /// top_n_sigma drops logits that are below the largest by more than this.
    deviation: f64,
    /// min_p drops scaled logits below this.
    least: f64,
}

/// The factor for logits: one over the temperature.
pub(super) fn inverse_temperature(sampling: &Sampling) -> f64 {
    1.0 / f64::from(sampling.temperature)
}

/// The scaled logit below which min_p drops a token.
pub(super) fn min_p_logit(min_p: f32) -> f64 {
    if min_p > 0.0 { libm::log(f64::from(min_p)) } else { f64::NEG_INFINITY }
}

/// `scale` in f32. The inverse of the smallest temperatures is infinite there, and zero times that would be NaN.
pub(super) fn inverse_temperature_f32(sampling: &Sampling) -> f32 {
    (1.0 / sampling.temperature).min(f32::MAX)
}

impl<'a> ScaledLogits<'a> {
    pub fn new(row: &'a [f32], largest: f32, sampling: &'a Sampling, isa: Isa) -> ScaledLogits<'a> {
        let deviation = match sampling.top_n_sigma > 0.0 {
            true => -f64::from(sampling.top_n_sigma) * deviation(row),
            false => f64::NEG_INFINITY,
        };
        ScaledLogits {
            row,
            largest,
            sampling,
            isa,
            scale: inverse_temperature(sampling),
            deviation,
            least: min_p_logit(sampling.min_p),
        }
    }

    /// The logit over the temperature, shifted so that the largest is zero.
    pub fn scaled(&self, token: Token) -> f64 {
        f64::from(self.row[token as usize] - self.largest) * self.scale
    }

    /// Whether top_n_sigma and min_p keep the token. They always keep the largest.
    pub fn keeps(&self, token: Token) -> bool {
        let below = f64::from(self.row[token as usize] - self.largest);
        below >= self.deviation && below * self.scale >= self.least
    }

    fn keeps_all(&self) -> bool {
        self.deviation == f64::NEG_INFINITY && self.least == f64::NEG_INFINITY
    }

    /// The probability relative to that of the largest.
    fn weight(&self, key: &LogitKey) -> f64 {
        f64::from(math::exp((self.row[key.token() as usize] - self.largest) * inverse_temperature_f32(self.sampling)))
    }

    fn top_k(&self) -> usize {
        if self.sampling.top_k == 0 { self.row.len() } else { self.row.len().min(self.sampling.top_k as usize) }
    }

    /// Whether `keeps` is the only filter: then nothing needs to be sorted.
    pub fn is_unordered(&self) -> bool {
        let Sampling { top_p, typical_p, xtc, .. } = self.sampling;
        self.top_k() == self.row.len() && *top_p >= 1.0 && *typical_p >= 1.0 && xtc.probability == 0.0
    }

    /// Fills `keys` with the tokens that all filters keep, the most likely first. At least one stays.
    pub fn select(&self, noise: &Noise, keys: &mut Vec<LogitKey>) {
        let Sampling { top_p, typical_p, xtc, .. } = self.sampling;
        let only_top_p = self.keeps_all() && self.top_k() == self.row.len() && *typical_p >= 1.0;
        match only_top_p && *top_p < 1.0 {
            true => self.top_p_of_all(keys),
            false => {
                self.candidates(keys);
                self.typical(keys);
                self.top_p(keys);
            }
        }
        // Masked tokens are no choice.
        let n = keys.partition_point(|key| self.row[key.token() as usize] > f32::NEG_INFINITY);
        keys.truncate(n);
        if xtc.probability > 0.0 && noise.coin() < f64::from(xtc.probability) {
            self.exclude_top_choices(keys);
        }
    }

    /// Thresholds and top_k drop tokens from the same end, so their order does not matter.
    fn candidates(&self, keys: &mut Vec<LogitKey>) {
        select_largest(self.row, self.top_k(), keys);
        let n = keys.partition_point(|key| self.keeps(key.token()));
        keys.truncate(n.max(1));
    }

    /// Keeps the tokens whose surprise is nearest to the expected one, until they reach typical_p.
    fn typical(&self, keys: &mut Vec<LogitKey>) {
        if self.sampling.typical_p >= 1.0 {
            return;
        }
        let total: f64 = keys.iter().map(|key| self.weight(key)).sum();
        let log_total = libm::log(total);
        let surprise = |key: &LogitKey| log_total - self.scaled(key.token());
        let expected = |key: &LogitKey| match self.weight(key) {
            0.0 => 0.0,
            weight => weight / total * surprise(key),
        };
        let entropy: f64 = keys.iter().map(expected).sum();
        // Sorted by nearness in place of the logit, and back.
        keys.iter_mut().for_each(|key| *key = LogitKey::new(key.token(), -((surprise(key) - entropy).abs() as f32)));
        keys.sort_unstable();
        let target = total * f64::from(self.sampling.typical_p);
        let n = self.n_reaching(target, keys).unwrap_or(keys.len());
        keys.truncate(n);
        keys.iter_mut().for_each(|key| *key = LogitKey::new(key.token(), self.row[key.token() as usize]));
        keys.sort_unstable();
    }

    fn top_p(&self, keys: &mut Vec<LogitKey>) {
        if self.sampling.top_p < 1.0 {
            let total: f64 = keys.iter().map(|key| self.weight(key)).sum();
            let n = self.n_reaching(total * f64::from(self.sampling.top_p), keys).unwrap_or(keys.len());
            keys.truncate(n);
        }
    }

    /// Tries a few of the most likely first: in most distributions they reach top_p.
    fn top_p_of_all(&self, keys: &mut Vec<LogitKey>) {
        const FIRST_LOOK: usize = 64;
        let total = f64::from(rows::sum_exp(self.isa, self.row, self.largest, inverse_temperature_f32(self.sampling)));
        let target = total * f64::from(self.sampling.top_p);
        let mut n_seen = FIRST_LOOK.min(self.row.len());
        loop {
            select_largest(self.row, n_seen, keys);
            if let Some(n) = self.n_reaching(target, keys) {
                return keys.truncate(n);
            }
            if n_seen == self.row.len() {
                return;
            }
            n_seen = (n_seen * 8).min(self.row.len());
        }
    }

    /// How many of the first keys reach a weight.
    fn n_reaching(&self, target: f64, keys: &[LogitKey]) -> Option<usize> {
        let mut reached = 0.0;
        let reaches = |key: &LogitKey| {
            reached += self.weight(key);
            reached >= target
        };
        keys.iter().position(reaches).map(|i| i + 1)
    }

    /// Of the tokens that reach the threshold only the least likely stays.
    fn exclude_top_choices(&self, keys: &mut Vec<LogitKey>) {
        let total: f64 = keys.iter().map(|key| self.weight(key)).sum();
        let threshold = total * f64::from(self.sampling.xtc.threshold);
        let n_top = keys.partition_point(|key| self.weight(key) >= threshold);
        if n_top > 1 {
            keys.drain(..n_top - 1);
        }
    }
}

/// The standard deviation of a row's logits, without masked ones.
fn deviation(row: &[f32]) -> f64 {
    let numbers = || row.iter().filter(|logit| **logit > f32::NEG_INFINITY).map(|logit| f64::from(*logit));
    let n = numbers().count().max(1) as f64;
    let mean = numbers().sum::<f64>() / n;
    (numbers().map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / n).sqrt()
}

/// A logit and its token as one number: a smaller number is more likely, or of equal logits the lower id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LogitKey(u64);

impl LogitKey {
    fn new(token: Token, logit: f32) -> LogitKey {
        // Adding zero turns -0 into 0. A positive float's bits grow with it, those of a negative one fall.
        let bits = (logit + 0.0).to_bits();
        let falling = if bits >> 31 == 0 { !bits & 0x7fff_ffff } else { bits };
        LogitKey(u64::from(falling) << 32 | u64::from(token))
    }

    pub fn token(self) -> Token {
        self.0 as Token
    }
}

/// The k largest of a row, sorted. One pass: tokens that cannot be among them are looked at once.
pub(super) fn select_largest(row: &[f32], k: usize, keys: &mut Vec<LogitKey>) {
    let room = row.len().min((2 * k).max(256));
    keys.clear();
    let mut bar = LogitKey(u64::MAX);
    for (token, &logit) in row.iter().enumerate() {
        let key = LogitKey::new(token as Token, logit);
        if key < bar {
            keys.push(key);
            if keys.len() == room && room < row.len() {
                keys.select_nth_unstable(k - 1);
                keys.truncate(k);
                bar = keys[k - 1];
            }
        }
    }
    keys.sort_unstable();
    keys.truncate(k);
}
