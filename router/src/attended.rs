//! A stream of replies that is given up where nobody takes them: what it holds goes back to the others. Knows no
//! protocol, and of time only how long it is.
//!
//! Who reads over HTTP/2 may keep its connection alive and take nothing of one stream. Nobody asks for the next reply
//! then, and so nobody but a task of its own can notice.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tonic::Status;

/// The last word to a reader that took nothing for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stream was not read for too long")]
pub struct Unread;

impl From<Unread> for Status {
    fn from(unread: Unread) -> Status {
        Status::aborted(unread.to_string())
    }
}

pub struct Attended<S> {
    held: Arc<Mutex<Held<S>>>,
    watch: AbortHandle,
}

struct Held<S> {
    /// None once it has ended, or was given up.
    stream: Option<S>,
    /// Since when the reader could have asked for the next reply. None while it waits for one.
    untaken: Option<Instant>,
    is_given_up: bool,
}

impl<S: Send + 'static> Attended<S> {
    pub fn new(stream: S, unread_max: Duration) -> Attended<S> {
        let held = Held { stream: Some(stream), untaken: Some(Instant::now()), is_given_up: false };
        let held = Arc::new(Mutex::new(held));
        let watch = tokio::spawn(watch(held.clone(), unread_max)).abort_handle();
        Attended { held, watch }
    }
}

async fn watch<S>(held: Arc<Mutex<Held<S>>>, unread_max: Duration) {
    loop {
        let (now, mut given_up) = (Instant::now(), None);
        let due = {
            let mut held = lock(&held);
            let due = held.untaken.unwrap_or(now) + unread_max;
            if due <= now {
                (given_up, held.is_given_up) = (held.stream.take(), true);
            }
            due
        };
        if due <= now {
            tracing::debug!("a stream is given up: nobody reads it");
            return drop(given_up);
        }
        sleep_until(due).await;
    }
}

fn lock<S>(held: &Mutex<Held<S>>) -> MutexGuard<'_, Held<S>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S, T, E> Stream for Attended<S>
where
    S: Stream<Item = Result<T, E>> + Unpin,
    E: From<Unread>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut held = lock(&self.held);
        let Some(stream) = &mut held.stream else {
            let last = std::mem::take(&mut held.is_given_up).then(|| Err(Unread.into()));
            return Poll::Ready(last);
        };
        let next = Pin::new(stream).poll_next(context);
        held.untaken = next.is_ready().then(Instant::now);
        if matches!(next, Poll::Ready(None)) {
            held.stream = None;
        }
        next
    }
}

impl<S> Drop for Attended<S> {
    fn drop(&mut self) {
        // Now, and not when the task is gone: a client that leaves has cancelled its request.
        let stream = lock(&self.held).stream.take();
        self.watch.abort();
        drop(stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;
    use tokio_stream::StreamExt;
    use tokio_stream::wrappers::ReceiverStream;

    const MAX: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_waited_for_and_who_takes_nothing_is_given_up() {
        let (replies, out) = mpsc::channel(8);
        let mut attended = Attended::new(ReceiverStream::new(out), MAX);
        for i in 0..3 {
            replies.send(Ok::<_, Unread>(i)).await.unwrap();
        }
        assert_eq!(attended.next().await, Some(Ok(0)));
        assert_eq!((attended.next().await, attended.next().await), (Some(Ok(1)), Some(Ok(2))));
        // Nothing is there for it: as long as it asks.
        let quiet = tokio::time::timeout(10 * MAX, attended.next()).await;
        assert!(quiet.is_err() && !replies.is_closed());
        replies.send(Ok(3)).await.unwrap();
        replies.send(Ok(4)).await.unwrap();
        assert_eq!(attended.next().await, Some(Ok(3)));
        tokio::time::sleep(2 * MAX).await;
        assert!(replies.is_closed(), "what the stream held went back");
        assert_eq!((attended.next().await, attended.next().await), (Some(Err(Unread)), None));
    }

    #[tokio::test]
    async fn what_is_dropped_is_gone_at_once() {
        let (replies, out) = mpsc::channel::<Result<u8, Unread>>(8);
        drop(Attended::new(ReceiverStream::new(out), MAX));
        assert!(replies.is_closed());
    }
}
