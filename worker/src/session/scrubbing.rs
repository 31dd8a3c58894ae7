//! Checks the weights in memory while the rank is idle, on a thread of its own. Has no knowledge of the computing
//! thread, except whether it is busy and the queue of its work.

use crate::load::scrub::{ScrubResult, Scrubber};
use crate::session::heartbeat::StepCounters;
use crate::session::rank_thread::RankWork;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::metrics;
use tokio::sync::mpsc;

/// How often the thread checks whether there are weights to check, and whether the rank is idle.
const LOOK_EVERY: Duration = Duration::from_millis(2);
const NOTHING_EVERY: Duration = Duration::from_millis(100);
/// A rank that is busy for this long without a pause is checked all the same: a piece takes some hundred microseconds
/// of another core.
const BUSY_MAX: Duration = Duration::from_secs(1);

const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Runs until the queue's sender is dropped.
pub(crate) fn start(
    scrubber: Scrubber,
    progress: Arc<StepCounters>,
    work: mpsc::WeakSender<RankWork>,
) -> io::Result<()> {
    let scrub = move || {
        let mut pause = NOTHING_EVERY;
        while pause_until_idle(pause, &progress, &work) {
            let begun = Instant::now();
            pause = match scrubber.check_next_piece() {
                ScrubResult::Nothing => NOTHING_EVERY,
                ScrubResult::Sound => pause_after(begun.elapsed(), scrubber.share()),
                ScrubResult::Spoilt(spoilt) => {
                    let (weight, piece, rank) = (&spoilt.weight, spoilt.piece, spoilt.rank.0);
                    tracing::error!(weight, piece, rank, "a weight in memory differs from what was loaded");
                    if let Some(work) = work.upgrade() {
                        // The computing thread is gone only when the whole process ends.
                        let _gone = work.blocking_send(RankWork::Spoilt);
                    }
                    NOTHING_EVERY
                }
            };
            metrics::scrubbed(scrubber.take_bytes());
        }
    };
    std::thread::Builder::new().name("scrub".into()).spawn(scrub).map(drop)
}

/// Returns the pause after which work that took this long is `share` of the time.
fn pause_after(took: Duration, share: f64) -> Duration {
    Duration::try_from_secs_f64(took.as_secs_f64() * (1.0 / share - 1.0)).unwrap_or(PAUSE_MAX).min(PAUSE_MAX)
}

/// Waits for the pause, and then for an idle moment. Returns false when the worker has ended.
fn pause_until_idle(pause: Duration, progress: &StepCounters, work: &mpsc::WeakSender<RankWork>) -> bool {
    let due = Instant::now() + pause;
    let is_over = || work.upgrade().is_none();
    while !is_over() {
        let now = Instant::now();
        match due.checked_duration_since(now).filter(|left| !left.is_zero()) {
            Some(left) => std::thread::sleep(left.min(NOTHING_EVERY)),
            None if progress.is_busy() && now < due + BUSY_MAX => std::thread::sleep(LOOK_EVERY),
            None => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_time_is_kept() {
        let millis = |share| pause_after(Duration::from_millis(1), share).as_millis();
        assert_eq!([1.0, 0.5, 0.01, 1e-12].map(millis), [0, 1, 99, 60_000]);
    }
}
