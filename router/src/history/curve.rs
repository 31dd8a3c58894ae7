//! How many tokens came when, in a fixed number of bins that become wider as time passes.

use std::time::Duration;

const BINS_MAX: usize = 128;
const FIRST_WIDTH: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct TokenCurve {
    pub width: Duration,
    pub counts: Vec<u32>,
}

impl Default for TokenCurve {
    fn default() -> TokenCurve {
        TokenCurve { width: FIRST_WIDTH, counts: Vec::new() }
    }
}

impl TokenCurve {
    pub fn add(&mut self, at: Duration, n: u32) {
        while at.as_micros() / self.width.as_micros() >= BINS_MAX as u128 {
            self.widen();
        }
        let bin = (at.as_micros() / self.width.as_micros()) as usize;
        if self.counts.len() <= bin {
            self.counts.resize(bin + 1, 0);
        }
        self.counts[bin] += n;
    }

    fn widen(&mut self) {
        self.width *= 2;
        self.counts = self.counts.chunks(2).map(|pair| pair.iter().sum()).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_keeps_every_token_in_so_many_bins() {
        let mut curve = TokenCurve::default();
        for ms in 0..100_000 {
            curve.add(Duration::from_millis(ms), 1);
        }
        assert_eq!(curve.counts.iter().sum::<u32>(), 100_000);
        assert_eq!((curve.counts.len(), curve.width), (125, Duration::from_millis(800)));
        curve.add(Duration::from_secs(86_400), 1);
        assert!(curve.counts.len() <= BINS_MAX && curve.counts.iter().sum::<u32>() == 100_001);
    }
}
