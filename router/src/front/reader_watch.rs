//! Gives up streams of replies when their readers take nothing, so that their resources are free for others. Knows no
//! protocol, and counts time only in rounds.
//!
//! A client may keep its HTTP/2 connection alive and not read one stream. Then the next reply is never requested, so
//! only a task beside the streams can notice it. One task checks all of them in rounds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use tokio::time::MissedTickBehavior;
use tokio_stream::Stream;
use tonic::Status;

/// The last reply to a reader that took nothing for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client did not read the stream for too long")]
pub struct ReadTimeout;

impl From<ReadTimeout> for Status {
    fn from(unread: ReadTimeout) -> Status {
        Status::aborted(unread.to_string())
    }
}

/// For how many rounds a reader may take nothing.
const ROUNDS_MAX: u64 = 8;
/// The value of `untaken` while no reply is available.
const NOTHING: u64 = u64::MAX;

/// Counts rounds, the unit of time here.
#[derive(Default)]
struct RoundCounter(AtomicU64);

impl RoundCounter {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// All streams of a server that a client reads.
#[derive(Default)]
pub struct ReaderWatch {
    slots: Mutex<StreamSlots>,
    rounds: Arc<RoundCounter>,
}

#[derive(Default)]
struct StreamSlots {
    taken: Vec<Option<Weak<dyn Watched>>>,
    free: Vec<usize>,
}

trait Watched: Send + Sync {
    /// Gives the stream up if it was not read for too long.
    fn look(&self, now: u64);
}

impl ReaderWatch {
    /// Checks all streams in rounds without end, so often that no reader takes nothing for much longer than
    /// `unread_max`.
    pub async fn watch(&self, unread_max: Duration) {
        let mut rounds = tokio::time::interval((unread_max / ROUNDS_MAX as u32).max(Duration::from_millis(1)));
        // While the process stood still, no round was made: missed rounds are not made up for.
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            rounds.tick().await;
            let now = self.rounds.0.fetch_add(1, Ordering::Relaxed) + 1;
            // A stream that is given up may free a slot when it is dropped, so it is dropped outside the lock.
            let slots: Vec<_> = lock(&self.slots).taken.iter().flatten().filter_map(Weak::upgrade).collect();
            for slot in &slots {
                // A panic while one stream is dropped ends no other.
                if catch_unwind(AssertUnwindSafe(|| slot.look(now))).is_err() {
                    tracing::error!("a stream panicked while it was dropped");
                }
            }
        }
    }

    pub fn watched<S: Send + 'static>(self: &Arc<ReaderWatch>, stream: S) -> WatchedStream<S> {
        let (rounds, untaken) = (self.rounds.clone(), AtomicU64::new(self.rounds.now()));
        let reader_waker = Arc::new(ReaderWaker { rounds, untaken, reader: Mutex::new(None) });
        let held = Mutex::new(StreamState { stream: Some(stream), is_given_up: false });
        let held = Arc::new(SharedStream { held, reader_waker: reader_waker.clone() });
        let place = lock(&self.slots).take(Arc::downgrade(&held) as Weak<dyn Watched>);
        WatchedStream { held, waker: Waker::from(reader_waker), reader_watch: self.clone(), place }
    }
}

impl StreamSlots {
    fn take(&mut self, slot: Weak<dyn Watched>) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.taken.push(None);
            self.taken.len() - 1
        });
        self.taken[place] = Some(slot);
        place
    }

    fn leave(&mut self, place: usize) {
        self.taken[place] = None;
        self.free.push(place);
    }
}

pub struct WatchedStream<S> {
    held: Arc<SharedStream<S>>,
    /// The waker that the stream is polled with.
    waker: Waker,
    reader_watch: Arc<ReaderWatch>,
    place: usize,
}

struct SharedStream<S> {
    held: Mutex<StreamState<S>>,
    reader_waker: Arc<ReaderWaker>,
}

struct StreamState<S> {
    /// None once the stream has ended, or was given up.
    stream: Option<S>,
    is_given_up: bool,
}

/// The waker that a stream gets: it notes when a reply is available, and wakes the reader. A reader that had every
/// reply but has full buffers of its own is woken and does not poll: its earlier poll is no sign of life.
struct ReaderWaker {
    rounds: Arc<RoundCounter>,
    /// The round since which the reader could have requested the next reply.
    untaken: AtomicU64,
    reader: Mutex<Option<Waker>>,
}

impl Wake for ReaderWaker {
    fn wake(self: Arc<ReaderWaker>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<ReaderWaker>) {
        let now = self.rounds.now();
        // If the reader was woken before, it has been away since then.
        let _rung_before = self.untaken.compare_exchange(NOTHING, now, Ordering::Relaxed, Ordering::Relaxed);
        let reader = lock(&self.reader).clone();
        reader.iter().for_each(Waker::wake_by_ref);
    }
}

impl ReaderWaker {
    /// Wakes this reader from now on.
    fn is_for(&self, reader: &Waker) {
        match &mut *lock(&self.reader) {
            Some(known) => known.clone_from(reader),
            none => *none = Some(reader.clone()),
        }
    }
}

impl<S: Send> Watched for SharedStream<S> {
    fn look(&self, now: u64) {
        let mut held = lock(&self.held);
        let untaken = self.reader_waker.untaken.load(Ordering::Relaxed);
        if untaken == NOTHING || now - untaken <= ROUNDS_MAX || held.stream.is_none() {
            return;
        }
        let given_up = held.stream.take();
        held.is_given_up = true;
        drop(held);
        tracing::debug!("dropping a stream that its client does not read");
        drop(given_up);
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S, T, E> Stream for WatchedStream<S>
where
    S: Stream<Item = Result<T, E>> + Unpin,
    E: From<ReadTimeout>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let reader_waker = &self.held.reader_waker;
        let mut held = lock(&self.held.held);
        let Some(stream) = &mut held.stream else {
            let last = std::mem::take(&mut held.is_given_up).then(|| Err(ReadTimeout.into()));
            return Poll::Ready(last);
        };
        reader_waker.is_for(context.waker());
        reader_waker.untaken.store(NOTHING, Ordering::Relaxed);
        let next = Pin::new(stream).poll_next(&mut Context::from_waker(&self.waker));
        if next.is_ready() {
            reader_waker.untaken.store(reader_waker.rounds.now(), Ordering::Relaxed);
        }
        if matches!(next, Poll::Ready(None)) {
            held.stream = None;
        }
        next
    }
}

impl<S> Drop for WatchedStream<S> {
    fn drop(&mut self) {
        lock(&self.reader_watch.slots).leave(self.place);
        // The stream is dropped now, and not in the next round: a client that leaves has cancelled its request.
        let stream = lock(&self.held.held).stream.take();
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

    fn reader_watch() -> Arc<ReaderWatch> {
        let reader_watch = Arc::new(ReaderWatch::default());
        let of_all = reader_watch.clone();
        tokio::spawn(async move { of_all.watch(MAX).await });
        reader_watch
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_waits_is_kept_and_one_that_takes_nothing_is_given_up() {
        let (replies, out) = mpsc::channel(8);
        let mut attended = reader_watch().watched(ReceiverStream::new(out));
        for i in 0..3 {
            replies.send(Ok::<_, ReadTimeout>(i)).await.unwrap();
        }
        assert_eq!(attended.next().await, Some(Ok(0)));
        assert_eq!((attended.next().await, attended.next().await), (Some(Ok(1)), Some(Ok(2))));
        // Nothing is available, so the reader may wait without limit.
        let quiet = tokio::time::timeout(10 * MAX, attended.next()).await;
        assert!(quiet.is_err() && !replies.is_closed());
        replies.send(Ok(3)).await.unwrap();
        replies.send(Ok(4)).await.unwrap();
        assert_eq!(attended.next().await, Some(Ok(3)));
        tokio::time::sleep(2 * MAX).await;
        assert!(replies.is_closed(), "the stream must be dropped");
        assert_eq!((attended.next().await, attended.next().await), (Some(Err(ReadTimeout)), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_had_all_and_does_not_come_for_more_is_given_up() {
        let (replies, out) = mpsc::channel(8);
        let mut attended = reader_watch().watched(ReceiverStream::new(out));
        replies.send(Ok::<_, ReadTimeout>(0)).await.unwrap();
        assert_eq!(attended.next().await, Some(Ok(0)));
        // It is polled once, as by a server that then waits for its connection.
        let mut poll_result = look(&mut attended);
        assert!(poll_result.is_pending());
        tokio::time::sleep(10 * MAX).await;
        assert!(!replies.is_closed(), "there was nothing to take");
        replies.send(Ok(1)).await.unwrap();
        tokio::time::sleep(2 * MAX).await;
        assert!(replies.is_closed());
        poll_result = look(&mut attended);
        assert_eq!(poll_result, Poll::Ready(Some(Err(ReadTimeout))));
    }

    /// One poll, by a reader that cannot be woken.
    fn look<S: Stream + Unpin>(stream: &mut S) -> Poll<Option<S::Item>> {
        Pin::new(stream).poll_next(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn a_dropped_stream_is_gone_at_once() {
        let (replies, out) = mpsc::channel::<Result<u8, ReadTimeout>>(8);
        let reader_watch = reader_watch();
        drop(reader_watch.watched(ReceiverStream::new(out)));
        assert!(replies.is_closed());
        let _next = reader_watch.watched(tokio_stream::empty::<Result<u8, ReadTimeout>>());
        assert_eq!(lock(&reader_watch.slots).taken.len(), 1, "its slot is reused");
    }
}
