//! Whether a coordinator's beats still arrive. Time is counted in expected beats: so a router that itself stood still
//! suspects no coordinator. Knows no frames.

use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug, Default)]
pub struct BeatMonitor {
    /// None if the coordinator promises no beats.
    every: Option<Duration>,
    missed_max: u32,
    n_missed: u32,
    next: Option<Instant>,
}

impl BeatMonitor {
    pub fn every(every: Duration, missed_max: u32, now: Instant) -> BeatMonitor {
        let every = Some(every).filter(|every| !every.is_zero());
        BeatMonitor { every, missed_max, n_missed: 0, next: every.map(|every| now + every) }
    }

    /// A frame arrived. True if the coordinator had been suspected.
    pub fn record_frame(&mut self, now: Instant) -> bool {
        let was_suspected = self.is_suspected();
        self.n_missed = 0;
        self.next = self.every.map(|every| now + every);
        was_suspected
    }

    pub fn is_suspected(&self) -> bool {
        self.every.is_some() && self.n_missed >= self.missed_max
    }

    /// When the next beat will have been missed.
    pub fn due(&self) -> Option<Instant> {
        self.next.filter(|_| !self.is_suspected())
    }

    /// Notes a missed beat, if one is due by now. True if the coordinator is suspected from this one on.
    pub fn pass(&mut self, now: Instant) -> bool {
        let (Some(due), Some(every)) = (self.due(), self.every) else { return false };
        if now < due {
            return false;
        }
        // However late this comes, it counts as one beat.
        self.n_missed += 1;
        self.next = Some(now + every);
        self.is_suspected()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(100);

    #[test]
    fn suspected_after_eight_missed_beats_until_next_frame() {
        let mut now = Instant::now();
        let mut beats = BeatMonitor::every(EVERY, 8, now);
        assert!(!beats.pass(now));
        let mut miss = |beats: &mut BeatMonitor| {
            now += EVERY;
            (beats.pass(now), now)
        };
        (0..7).for_each(|_| assert!(!miss(&mut beats).0));
        let (is_suspected, at) = miss(&mut beats);
        assert!(is_suspected && beats.record_frame(at), "it was suspected by then");
        (0..7).for_each(|_| assert!(!miss(&mut beats).0));
        assert!(!beats.is_suspected() && miss(&mut beats).0 && beats.is_suspected() && beats.due().is_none());
    }

    #[test]
    fn a_router_that_stood_still_missed_one_beat_and_without_beats_none_is_suspected() {
        let now = Instant::now();
        let mut beats = BeatMonitor::every(EVERY, 2, now);
        assert!(!beats.pass(now + 50 * EVERY) && !beats.pass(now + 50 * EVERY));
        assert!(beats.pass(now + 51 * EVERY));
        let mut none = BeatMonitor::every(Duration::ZERO, 0, now);
        assert!(none.due().is_none() && !none.pass(now + EVERY) && !none.is_suspected());
    }
}
