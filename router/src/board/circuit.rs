//! Circuit breaker: a replica gets no new requests for a while if its stream breaks repeatedly or if it is far slower
//! than the others. Later it is tried with one request. If that succeeds, the replica is trusted again. Knows no
//! replicas and no clock: it looks once a second.

/// The number of breaks within `BREAKS_SECONDS` that opens the circuit. One death and return is fewer.
const BREAKS_MAX: usize = 3;
const BREAKS_SECONDS: u64 = 60;
/// A replica that is slow at this many looks in a row is shunned.
const SLOW_LOOKS: u32 = 5;
/// A look with fewer samples than this is ignored.
const SAMPLES_MIN: u64 = 3;
/// The least number of other replicas that define what is usual.
const OTHERS_MIN: usize = 2;
/// A replica is slow if it takes this many times the usual time, and this much longer in absolute terms. An older kind
/// of machine does not exceed both.
const SLOW_FACTOR: u64 = 4;
const SLOW_BETWEEN_MICROS: u64 = 20_000;
const SLOW_FIRST_MICROS: u64 = 500_000;
/// How long a replica is shunned until it is tried: doubles from the first to the second.
const SHUNNED_SECONDS_MIN: u64 = 10;
const SHUNNED_SECONDS_MAX: u64 = 300;

/// A sum of times of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySum {
    pub n: u64,
    pub micros: u64,
}

impl LatencySum {
    fn mean(self) -> Option<u64> {
        (self.n >= SAMPLES_MIN).then(|| self.micros / self.n)
    }
}

/// What a replica did since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyWindow {
    /// From sending a request to its first token.
    pub first: LatencySum,
    /// From one token to the next.
    pub between: LatencySum,
    /// Requests that have ended well.
    pub n_done: u64,
    /// How often its stream was lost, it was silent, or it failed.
    pub n_breaks: u64,
}

/// The usual times: the medians of the other replicas.
#[derive(Clone, Copy, Debug, Default)]
pub struct MedianTimes {
    first: Option<u64>,
    between: Option<u64>,
}

impl MedianTimes {
    pub fn of_others(windows: &[LatencyWindow], own: usize) -> MedianTimes {
        let median = |times: fn(&LatencyWindow) -> LatencySum| {
            let others = windows.iter().enumerate().filter(|(at, _)| *at != own);
            let mut means: Vec<u64> = others.filter_map(|(_, window)| times(window).mean()).collect();
            means.sort_unstable();
            (means.len() >= OTHERS_MIN).then(|| means[means.len() / 2])
        };
        MedianTimes { first: median(|window| window.first), between: median(|window| window.between) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShunCause {
    Breaks,
    Slow,
}

impl ShunCause {
    pub fn label(self) -> &'static str {
        match self {
            ShunCause::Breaks => "breaks",
            ShunCause::Slow => "slow",
        }
    }
}

/// The change that a look has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CircuitChange {
    Shunned {
        cause: ShunCause,
        seconds: u64,
    },
    /// It gets one request at a time.
    Tried,
    Trusted,
}

#[derive(Debug, Default)]
pub struct Circuit {
    state: CircuitState,
    /// The seconds of its recent breaks.
    breaks: Vec<u64>,
    n_slow: u32,
    /// How long it was shunned last.
    seconds: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CircuitState {
    #[default]
    Trusted,
    Shunned {
        until: u64,
        cause: ShunCause,
    },
    Tried {
        cause: ShunCause,
    },
}

impl Circuit {
    pub fn is_open(&self) -> bool {
        self.state != CircuitState::Trusted
    }

    /// Whether the replica may get one more request beside the `n_under_way` that it has.
    pub fn admits(&self, n_under_way: u32) -> bool {
        match self.state {
            CircuitState::Trusted => true,
            CircuitState::Shunned { .. } => false,
            CircuitState::Tried { .. } => n_under_way == 0,
        }
    }

    /// Judges one look, numbered by `second`. Breaks and slow looks are counted even if the circuit may not open.
    pub fn judge_window(
        &mut self,
        second: u64,
        seen: &LatencyWindow,
        usual: &MedianTimes,
        may_open: bool,
    ) -> Option<CircuitChange> {
        self.breaks.retain(|at| at + BREAKS_SECONDS > second);
        let room = BREAKS_MAX.saturating_sub(self.breaks.len());
        self.breaks.extend(std::iter::repeat_n(second, room.min(seen.n_breaks as usize)));
        let is_slow = is_slow(seen, usual);
        self.n_slow = match is_slow {
            Some(true) => self.n_slow + 1,
            Some(false) => 0,
            None => self.n_slow,
        };
        match self.state {
            CircuitState::Trusted if !may_open => None,
            CircuitState::Trusted if self.breaks.len() == BREAKS_MAX => Some(self.shun(second, ShunCause::Breaks)),
            CircuitState::Trusted if self.n_slow >= SLOW_LOOKS => Some(self.shun(second, ShunCause::Slow)),
            CircuitState::Trusted => None,
            CircuitState::Shunned { until, cause } if until <= second => {
                self.state = CircuitState::Tried { cause };
                Some(CircuitChange::Tried)
            }
            CircuitState::Shunned { .. } => None,
            CircuitState::Tried { .. } if seen.n_breaks > 0 => Some(self.shun(second, ShunCause::Breaks)),
            CircuitState::Tried { .. } if is_slow == Some(true) => Some(self.shun(second, ShunCause::Slow)),
            CircuitState::Tried { .. } if seen.n_done > 0 => {
                *self = Circuit { seconds: self.seconds, ..Circuit::default() };
                Some(CircuitChange::Trusted)
            }
            CircuitState::Tried { .. } => None,
        }
    }

    fn shun(&mut self, second: u64, cause: ShunCause) -> CircuitChange {
        self.seconds = (self.seconds * 2).clamp(SHUNNED_SECONDS_MIN, SHUNNED_SECONDS_MAX);
        self.state = CircuitState::Shunned { until: second + self.seconds, cause };
        (self.n_slow, self.breaks) = (0, Vec::new());
        CircuitChange::Shunned { cause, seconds: self.seconds }
    }
}

/// Whether the replica is slow. None if too little is known.
fn is_slow(seen: &LatencyWindow, usual: &MedianTimes) -> Option<bool> {
    let beyond = |times: LatencySum, usual: Option<u64>, more: u64| {
        Some(times.mean()? > usual?.saturating_mul(SLOW_FACTOR).saturating_add(more))
    };
    let first = beyond(seen.first, usual.first, SLOW_FIRST_MICROS);
    let between = beyond(seen.between, usual.between, SLOW_BETWEEN_MICROS);
    match (first, between) {
        (None, None) => None,
        (first, between) => Some(first == Some(true) || between == Some(true)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHUNNED: fn(ShunCause, u64) -> Option<CircuitChange> =
        |cause, seconds| Some(CircuitChange::Shunned { cause, seconds });

    fn decoding(micros: u64) -> LatencyWindow {
        LatencyWindow { between: LatencySum { n: 100, micros: 100 * micros }, ..LatencyWindow::default() }
    }

    fn usual() -> MedianTimes {
        MedianTimes::of_others(&[decoding(90_000), decoding(10_000), decoding(10_000), decoding(11_000)], 0)
    }

    #[test]
    fn a_slow_replica_is_shunned_then_tried_and_trusted_again() {
        let mut circuit = Circuit::default();
        let mut look = |second, window: LatencyWindow| circuit.judge_window(second, &window, &usual(), true);
        for second in 0..4 {
            assert_eq!(look(second, decoding(90_000)), None);
        }
        assert_eq!(look(4, decoding(40_000)), None, "a window that is not slow restarts the count");
        for second in 5..9 {
            assert_eq!(look(second, decoding(90_000)), None);
            assert_eq!(look(second, LatencyWindow::default()), None, "nothing is known of a second without tokens");
        }
        assert_eq!(look(9, decoding(90_000)), SHUNNED(ShunCause::Slow, 10));
        assert_eq!(look(18, decoding(9_000)), None);
        assert_eq!(look(19, LatencyWindow::default()), Some(CircuitChange::Tried));
        // The replica is still slow. It is tried later, and then it is fast enough.
        assert_eq!(look(20, decoding(90_000)), SHUNNED(ShunCause::Slow, 20));
        assert_eq!(look(40, LatencyWindow::default()), Some(CircuitChange::Tried));
        assert_eq!(look(41, decoding(10_000)), None);
        assert_eq!(look(42, LatencyWindow { n_done: 1, ..decoding(10_000) }), Some(CircuitChange::Trusted));
        assert!(circuit.admits(1000) && !circuit.is_open());
    }

    #[test]
    fn a_replica_that_breaks_often_is_shunned_longer_each_time_and_tried_with_one_request() {
        let mut circuit = Circuit::default();
        let breaks = |n_breaks| LatencyWindow { n_breaks, ..LatencyWindow::default() };
        let mut look = |second, n| circuit.judge_window(second, &breaks(n), &MedianTimes::default(), true);
        // Two breaks in a minute change nothing.
        assert_eq!([look(0, 1), look(30, 1), look(70, 1), look(85, 0)], [None; 4]);
        assert_eq!(look(91, 1), None);
        assert_eq!(look(92, 1), SHUNNED(ShunCause::Breaks, 10));
        let mut second = 92;
        for seconds in [20, 40, 80, 160, 300, 300] {
            while look(second, 0) != Some(CircuitChange::Tried) {
                second += 1;
            }
            assert_eq!(look(second, 1), SHUNNED(ShunCause::Breaks, seconds));
        }
        assert!(!circuit.admits(0));
        while circuit.judge_window(second, &breaks(0), &MedianTimes::default(), true) != Some(CircuitChange::Tried) {
            second += 1;
        }
        assert!(circuit.admits(0) && !circuit.admits(1));
    }

    #[test]
    fn a_replica_that_may_not_be_shunned_stays() {
        let mut circuit = Circuit::default();
        for second in 0..20 {
            assert_eq!(
                circuit.judge_window(second, &LatencyWindow { n_breaks: 9, ..decoding(90_000) }, &usual(), false),
                None
            );
        }
        // The breaks are remembered.
        assert_eq!(circuit.judge_window(20, &LatencyWindow::default(), &usual(), true), SHUNNED(ShunCause::Breaks, 10));
    }

    #[test]
    fn usual_latency_needs_more_than_one_other_replica() {
        let usual = MedianTimes::of_others(&[decoding(90_000), decoding(1)], 0);
        assert_eq!(is_slow(&decoding(90_000), &usual), None);
    }
}
