//! When a replica gets nothing new for a while: its stream breaks again and again, or it is far slower than the others.
//! Then it is tried with one request, and is as the others again if that goes well. Knows no replicas and no clock: it
//! looks once a second.

/// In a minute. One that dies and comes back is none that breaks often.
const BREAKS_MAX: usize = 3;
const BREAKS_SECONDS: u64 = 60;
/// Looks in a row at which it is slow.
const SLOW_LOOKS: u32 = 5;
/// Fewer in a look say nothing.
const SAMPLES_MIN: u64 = 3;
/// Others that say what is usual.
const OTHERS_MIN: usize = 2;
/// What is so many times the usual, and so much longer, is slow: a machine of an older kind is not.
const SLOW_FACTOR: u64 = 4;
const SLOW_BETWEEN_MICROS: u64 = 20_000;
const SLOW_FIRST_MICROS: u64 = 500_000;
/// Until it is tried: doubles from the first to the second.
const SHUNNED_SECONDS_MIN: u64 = 10;
const SHUNNED_SECONDS_MAX: u64 = 300;

/// Times of some kind, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    pub n: u64,
    pub micros: u64,
}

impl Times {
    fn mean(self) -> Option<u64> {
        (self.n >= SAMPLES_MIN).then(|| self.micros / self.n)
    }
}

/// What a replica did since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// From a request's being sent to its first token.
    pub first: Times,
    /// From one token to the next.
    pub between: Times,
    /// Requests that have ended well.
    pub n_done: u64,
    /// Times that its stream was lost, it was silent, or it failed.
    pub n_breaks: u64,
}

/// The others' medians.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usual {
    first: Option<u64>,
    between: Option<u64>,
}

impl Usual {
    pub fn of_others(windows: &[Window], own: usize) -> Usual {
        let median = |times: fn(&Window) -> Times| {
            let others = windows.iter().enumerate().filter(|(at, _)| *at != own);
            let mut means: Vec<u64> = others.filter_map(|(_, window)| times(window).mean()).collect();
            means.sort_unstable();
            (means.len() >= OTHERS_MIN).then(|| means[means.len() / 2])
        };
        Usual { first: median(|window| window.first), between: median(|window| window.between) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Breaks,
    Slow,
}

impl Cause {
    pub fn label(self) -> &'static str {
        match self {
            Cause::Breaks => "breaks",
            Cause::Slow => "slow",
        }
    }
}

/// What a look has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Shunned {
        cause: Cause,
        seconds: u64,
    },
    /// One request at a time.
    Tried,
    Trusted,
}

#[derive(Debug, Default)]
pub struct Circuit {
    state: State,
    /// When it broke lately.
    breaks: Vec<u64>,
    n_slow: u32,
    /// For how long it was shunned last.
    seconds: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Trusted,
    Shunned {
        until: u64,
        cause: Cause,
    },
    Tried {
        cause: Cause,
    },
}

impl Circuit {
    pub fn is_open(&self) -> bool {
        self.state != State::Trusted
    }

    /// Whether it may get one more request beside so many.
    pub fn admits(&self, n_under_way: u32) -> bool {
        match self.state {
            State::Trusted => true,
            State::Shunned { .. } => false,
            State::Tried { .. } => n_under_way == 0,
        }
    }

    /// `second` counts looks. Where it may not open, it is noted what speaks for it.
    pub fn look(&mut self, second: u64, seen: &Window, usual: &Usual, may_open: bool) -> Option<Turn> {
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
            State::Trusted if !may_open => None,
            State::Trusted if self.breaks.len() == BREAKS_MAX => Some(self.shun(second, Cause::Breaks)),
            State::Trusted if self.n_slow >= SLOW_LOOKS => Some(self.shun(second, Cause::Slow)),
            State::Trusted => None,
            State::Shunned { until, cause } if until <= second => {
                self.state = State::Tried { cause };
                Some(Turn::Tried)
            }
            State::Shunned { .. } => None,
            State::Tried { .. } if seen.n_breaks > 0 => Some(self.shun(second, Cause::Breaks)),
            State::Tried { .. } if is_slow == Some(true) => Some(self.shun(second, Cause::Slow)),
            State::Tried { .. } if seen.n_done > 0 => {
                *self = Circuit { seconds: self.seconds, ..Circuit::default() };
                Some(Turn::Trusted)
            }
            State::Tried { .. } => None,
        }
    }

    fn shun(&mut self, second: u64, cause: Cause) -> Turn {
        self.seconds = (self.seconds * 2).clamp(SHUNNED_SECONDS_MIN, SHUNNED_SECONDS_MAX);
        self.state = State::Shunned { until: second + self.seconds, cause };
        (self.n_slow, self.breaks) = (0, Vec::new());
        Turn::Shunned { cause, seconds: self.seconds }
    }
}

/// None where too little is known.
fn is_slow(seen: &Window, usual: &Usual) -> Option<bool> {
    let beyond = |times: Times, usual: Option<u64>, more: u64| {
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

    const SHUNNED: fn(Cause, u64) -> Option<Turn> = |cause, seconds| Some(Turn::Shunned { cause, seconds });

    fn decoding(micros: u64) -> Window {
        Window { between: Times { n: 100, micros: 100 * micros }, ..Window::default() }
    }

    fn usual() -> Usual {
        Usual::of_others(&[decoding(90_000), decoding(10_000), decoding(10_000), decoding(11_000)], 0)
    }

    #[test]
    fn who_is_slow_for_some_seconds_is_shunned_and_tried_and_trusted_again() {
        let mut circuit = Circuit::default();
        let mut look = |second, window: Window| circuit.look(second, &window, &usual(), true);
        for second in 0..4 {
            assert_eq!(look(second, decoding(90_000)), None);
        }
        assert_eq!(look(4, decoding(40_000)), None, "a look that is not slow begins anew");
        for second in 5..9 {
            assert_eq!(look(second, decoding(90_000)), None);
            assert_eq!(look(second, Window::default()), None, "nothing is known of a second without tokens");
        }
        assert_eq!(look(9, decoding(90_000)), SHUNNED(Cause::Slow, 10));
        assert_eq!(look(18, decoding(9_000)), None);
        assert_eq!(look(19, Window::default()), Some(Turn::Tried));
        // It is as slow as it was: tried later, and then it is well.
        assert_eq!(look(20, decoding(90_000)), SHUNNED(Cause::Slow, 20));
        assert_eq!(look(40, Window::default()), Some(Turn::Tried));
        assert_eq!(look(41, decoding(10_000)), None);
        assert_eq!(look(42, Window { n_done: 1, ..decoding(10_000) }), Some(Turn::Trusted));
        assert!(circuit.admits(1000) && !circuit.is_open());
    }

    #[test]
    fn who_breaks_often_is_shunned_for_longer_and_longer_and_gets_one_request_as_a_trial() {
        let mut circuit = Circuit::default();
        let breaks = |n_breaks| Window { n_breaks, ..Window::default() };
        let mut look = |second, n| circuit.look(second, &breaks(n), &Usual::default(), true);
        // Twice in a minute is nothing.
        assert_eq!([look(0, 1), look(30, 1), look(70, 1), look(85, 0)], [None; 4]);
        assert_eq!(look(91, 1), None);
        assert_eq!(look(92, 1), SHUNNED(Cause::Breaks, 10));
        let mut second = 92;
        for seconds in [20, 40, 80, 160, 300, 300] {
            while look(second, 0) != Some(Turn::Tried) {
                second += 1;
            }
            assert_eq!(look(second, 1), SHUNNED(Cause::Breaks, seconds));
        }
        assert!(!circuit.admits(0));
        while circuit.look(second, &breaks(0), &Usual::default(), true) != Some(Turn::Tried) {
            second += 1;
        }
        assert!(circuit.admits(0) && !circuit.admits(1));
    }

    #[test]
    fn who_may_not_be_shunned_is_not() {
        let mut circuit = Circuit::default();
        for second in 0..20 {
            assert_eq!(circuit.look(second, &Window { n_breaks: 9, ..decoding(90_000) }, &usual(), false), None);
        }
        // It is remembered.
        assert_eq!(circuit.look(20, &Window::default(), &usual(), true), SHUNNED(Cause::Breaks, 10));
    }

    #[test]
    fn one_other_says_nothing_of_what_is_usual() {
        let usual = Usual::of_others(&[decoding(90_000), decoding(1)], 0);
        assert_eq!(is_slow(&decoding(90_000), &usual), None);
    }
}
