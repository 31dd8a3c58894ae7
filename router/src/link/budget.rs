//! The retry budget: how many requests may be tried again at any replica, as a share of those that get answers, and a
//! few more each second. So no replica without answers receives the same requests again and again. Knows no requests.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// For ten requests that get an answer, two may be tried once more.
const PER_ANSWER: f64 = 0.2;
/// Retries per second even without any answer, so that no request waits for ever.
const PER_SECOND: f64 = 10.0;

/// The budget that all links of a router share.
#[derive(Debug)]
pub struct RetryBudget {
    max: f64,
    state: Mutex<BudgetState>,
}

#[derive(Debug)]
struct BudgetState {
    left: f64,
    since: Instant,
}

impl RetryBudget {
    /// The budget begins full: all running requests may lose their replica at once.
    pub fn new(requests_max: usize, now: Instant) -> RetryBudget {
        let max = requests_max as f64;
        RetryBudget { max, state: Mutex::new(BudgetState { left: max, since: now }) }
    }

    pub fn record_answer(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = (state.left + PER_ANSWER).min(self.max);
    }

    /// Takes one retry. If there is none, the error is how long to wait.
    pub fn take(&self, now: Instant) -> Result<(), Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(state.since).as_secs_f64();
        state.left = (state.left + passed * PER_SECOND).min(self.max);
        state.since = now;
        if state.left < 1.0 {
            return Err(Duration::from_secs_f64(((1.0 - state.left) / PER_SECOND).max(0.01)));
        }
        state.left -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_requests_may_move_once_and_then_a_share_of_those_answered() {
        let now = Instant::now();
        let budget = RetryBudget::new(100, now);
        let takes = |now, n| (0..n).filter(|_| budget.take(now).is_ok()).count();
        assert_eq!(takes(now, 1000), 100);
        assert!(budget.take(now).is_err_and(|wait| wait <= Duration::from_millis(110)));
        (0..100).for_each(|_| budget.record_answer());
        assert!((19..=20).contains(&takes(now, 1000)));
        assert!((10..=11).contains(&takes(now + Duration::from_secs(1), 1000)));
        assert_eq!(takes(now + Duration::from_secs(1000), 1000), 100);
    }
}
