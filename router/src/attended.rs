//! A stream of replies that is given up where nobody takes them: what it holds goes back to the others. Knows no
//! protocol, and of time only how long it is.
//!
//! Who reads over HTTP/2 may keep its connection alive and take nothing of one stream. Nobody asks for the next reply
//! then, and so nobody but a task of its own can notice.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
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
    bell: Arc<Bell>,
    watch: AbortHandle,
}

struct Held<S> {
    /// None once it has ended, or was given up.
    stream: Option<S>,
    is_given_up: bool,
}

/// What the stream rings when there is more. A reader that had all there was, and whose own buffers are full, is rung
/// for and does not come: that it asked once is no sign of life.
struct Bell {
    /// Since when the reader could have asked for the next reply. None while there is nothing to ask for.
    untaken: Mutex<Option<Instant>>,
    reader: Mutex<Option<Waker>>,
}

impl Wake for Bell {
    fn wake(self: Arc<Bell>) {
        lock(&self.untaken).get_or_insert_with(Instant::now);
        let reader = lock(&self.reader).clone();
        reader.iter().for_each(Waker::wake_by_ref);
    }
}

impl<S: Send + 'static> Attended<S> {
    pub fn new(stream: S, unread_max: Duration) -> Attended<S> {
        let held = Arc::new(Mutex::new(Held { stream: Some(stream), is_given_up: false }));
        let bell = Arc::new(Bell { untaken: Mutex::new(Some(Instant::now())), reader: Mutex::new(None) });
        let watch = tokio::spawn(watch(held.clone(), bell.clone(), unread_max)).abort_handle();
        Attended { held, bell, watch }
    }
}

async fn watch<S>(held: Arc<Mutex<Held<S>>>, bell: Arc<Bell>, unread_max: Duration) {
    loop {
        let (now, mut given_up) = (Instant::now(), None);
        let due = {
            let mut held = lock(&held);
            let due = lock(&bell.untaken).unwrap_or(now) + unread_max;
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

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
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
        *lock(&self.bell.reader) = Some(context.waker().clone());
        *lock(&self.bell.untaken) = None;
        let bell = Waker::from(self.bell.clone());
        let next = Pin::new(stream).poll_next(&mut Context::from_waker(&bell));
        if next.is_ready() {
            *lock(&self.bell.untaken) = Some(Instant::now());
        }
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

    #[tokio::test(start_paused = true)]
    async fn who_had_all_and_does_not_come_for_more_is_given_up() {
        let (replies, out) = mpsc::channel(8);
        let mut attended = Attended::new(ReceiverStream::new(out), MAX);
        replies.send(Ok::<_, Unread>(0)).await.unwrap();
        assert_eq!(attended.next().await, Some(Ok(0)));
        // Asked once, as by a server that then waits for its connection.
        let mut asked = look(&mut attended);
        assert!(asked.is_pending());
        tokio::time::sleep(10 * MAX).await;
        assert!(!replies.is_closed(), "there was nothing to take");
        replies.send(Ok(1)).await.unwrap();
        tokio::time::sleep(2 * MAX).await;
        assert!(replies.is_closed());
        asked = look(&mut attended);
        assert_eq!(asked, Poll::Ready(Some(Err(Unread))));
    }

    /// One look, by nobody who could be woken.
    fn look<S: Stream + Unpin>(stream: &mut S) -> Poll<Option<S::Item>> {
        Pin::new(stream).poll_next(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn what_is_dropped_is_gone_at_once() {
        let (replies, out) = mpsc::channel::<Result<u8, Unread>>(8);
        drop(Attended::new(ReceiverStream::new(out), MAX));
        assert!(replies.is_closed());
    }
}
