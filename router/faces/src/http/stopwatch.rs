//! How long an answer took, for APIs that report it, and the time of day in their format.

use std::time::{Duration, Instant};

/// `[arrived, first token) prompt · [first token, end) answer`. If it is known when the ranks began to compute the
/// prompt, the first interval begins there.
pub struct Stopwatch {
    arrived: Instant,
    computing: Option<Instant>,
    first: Option<Instant>,
}

/// The times of an answer that has ended.
pub struct AnswerTimes {
    pub prompt: Duration,
    pub answer: Duration,
}

impl Stopwatch {
    pub fn start() -> Stopwatch {
        Stopwatch { arrived: Instant::now(), computing: None, first: None }
    }

    /// Records that ranks compute the prompt.
    pub fn mark_computing(&mut self) {
        self.computing.get_or_insert_with(Instant::now);
    }

    /// Records that tokens have arrived.
    pub fn mark_first_token(&mut self) {
        self.first.get_or_insert_with(Instant::now);
    }

    /// Returns when it was started.
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Returns the times so far. Without a token, all of it counts as prompt.
    pub fn times(&self) -> AnswerTimes {
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        AnswerTimes { prompt: first - self.computing.unwrap_or(self.arrived), answer: now - first }
    }
}

impl AnswerTimes {
    pub fn total(&self) -> Duration {
        self.prompt + self.answer
    }
}

/// Formats as `2026-11-23T04:05:06Z`.
pub fn rfc3339(unix_seconds: u64) -> String {
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns year, month and day, counted from 1, of a day counted from 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let mut year = 1970;
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let length = |year: u64| if is_leap(year) { 366 } else { 365 };
    while days >= length(year) {
        days -= length(year);
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for n_days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < n_days {
            break;
        }
        days -= n_days;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day() {
        let check = |seconds, text: &str| assert_eq!(rfc3339(seconds), text);
        check(0, "1970-01-01T00:00:00Z");
        check(68_169_599, "1972-02-28T23:59:59Z");
        check(68_169_600, "1972-02-29T00:00:00Z");
        check(951_868_800, "2000-03-01T00:00:00Z");
        check(1_704_067_199, "2023-12-31T23:59:59Z");
        check(4_107_542_400, "2100-03-01T00:00:00Z");
    }

    #[test]
    fn an_answer_begins_with_its_first_token() {
        let mut watch = Stopwatch::start();
        assert_eq!(watch.times().answer, Duration::ZERO);
        watch.mark_first_token();
        let first = watch.times();
        watch.mark_first_token();
        let later = watch.times();
        assert_eq!((first.prompt, later.total()), (later.prompt, later.prompt + later.answer));
        assert!(later.answer >= first.answer);
    }
}
