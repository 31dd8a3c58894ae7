//! A response that runs without its client: its events so far, whether it is over, and the signal to end it. Knows no
//! JSON: an event is a text.

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The most bytes of events that a reader is given at once, unless one event is longer.
const BYTES_AT_ONCE_MAX: usize = 64 << 10;

pub struct BackgroundRun {
    log: watch::Sender<RunLog>,
    cancel: CancellationToken,
    is_streamed: bool,
}

/// The events so far, from the first.
#[derive(Default)]
pub struct RunLog {
    text: String,
    /// Where each event ends.
    ends: Vec<usize>,
    /// How it ended.
    end: Option<&'static str>,
}

impl BackgroundRun {
    /// Events are kept only if the client requested a stream.
    pub fn new(is_streamed: bool) -> BackgroundRun {
        BackgroundRun { log: watch::Sender::default(), cancel: CancellationToken::new(), is_streamed }
    }

    pub fn is_streamed(&self) -> bool {
        self.is_streamed
    }

    /// Adds events, each as it is sent.
    pub fn append(&self, events: Vec<String>) {
        self.log.send_modify(|log| {
            for event in events {
                log.text.push_str(&event);
                log.ends.push(log.text.len());
            }
        });
    }

    /// Marks the response as over, with this end. No event follows.
    pub fn finish(&self, end: &'static str) {
        self.log.send_modify(|log| log.end = Some(end));
    }

    /// Returns how it ended, once it has.
    pub fn end(&self) -> Option<&'static str> {
        self.log.borrow().end
    }

    /// Signals the response to end.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// Waits until it is over.
    pub async fn wait_until_over(&self) {
        let mut log = self.log.subscribe();
        let _ = log.wait_for(|log| log.end.is_some()).await;
    }

    pub fn log(&self) -> watch::Receiver<RunLog> {
        self.log.subscribe()
    }
}

impl RunLog {
    pub fn is_over(&self) -> bool {
        self.end.is_some()
    }

    /// Returns some events behind the first `n`, and how many there are up to their end.
    pub fn events_after(&self, n: usize) -> (&str, usize) {
        let Some(begin) = n.checked_sub(1).map_or(Some(0), |last| self.ends.get(last).copied()) else { return ("", n) };
        let n_fit = self.ends.partition_point(|end| *end <= begin + BYTES_AT_ONCE_MAX);
        let n_read = n_fit.max(n + 1).min(self.ends.len());
        let end = n_read.checked_sub(1).map_or(0, |last| self.ends[last]);
        (&self.text[begin..end.max(begin)], n_read.max(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_from_anywhere() {
        let run = BackgroundRun::new(true);
        assert_eq!(run.log().borrow().events_after(0), ("", 0));
        run.append(vec!["a".into(), "bc".into(), "x".repeat(BYTES_AT_ONCE_MAX + 1), "d".into()]);
        let log = run.log();
        let log = log.borrow();
        assert_eq!(log.events_after(0), ("abc", 2));
        assert_eq!(log.events_after(1), ("bc", 2));
        assert_eq!((log.events_after(2).0.len(), log.events_after(2).1), (BYTES_AT_ONCE_MAX + 1, 3));
        assert_eq!(log.events_after(3), ("d", 4));
        assert_eq!(log.events_after(4), ("", 4));
        assert_eq!(log.events_after(9), ("", 9));
    }
}
