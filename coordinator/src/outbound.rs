//! The bounded queue of frames to one peer. It ends after the last frame, with a status that gives the reason.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

/// The loop's end. Dropping it ends the stream, and stops the peer's reader.
pub(crate) struct Outbound<T> {
    frames: mpsc::Sender<T>,
    end: oneshot::Sender<Status>,
    _closed: DropGuard,
}

/// The transport's end.
pub(crate) struct OutboundStream<T> {
    frames: mpsc::Receiver<T>,
    end: Option<oneshot::Receiver<Status>>,
}

/// A queue of at most `frames_max` frames, its stream, and a token that is cancelled when the loop drops the queue.
pub(crate) fn outbound<T>(frames_max: usize) -> (Outbound<T>, OutboundStream<T>, CancellationToken) {
    let (frames, queue) = mpsc::channel(frames_max);
    let (end, ended) = oneshot::channel();
    let closed = CancellationToken::new();
    let guard = closed.clone().drop_guard();
    (Outbound { frames, end, _closed: guard }, OutboundStream { frames: queue, end: Some(ended) }, closed)
}

impl<T> Outbound<T> {
    /// False: the peer is gone, or leaves too much unread.
    pub fn send(&self, frame: T) -> bool {
        self.frames.try_send(frame).is_ok()
    }

    /// True: the peer leaves too much unread. False for a peer that is gone; its reader reports that.
    pub fn is_full_for(&self, frame: T) -> bool {
        matches!(self.frames.try_send(frame), Err(TrySendError::Full(_)))
    }

    pub fn close(self, why: Status) {
        // A peer that is gone needs no reason.
        let _gone = self.end.send(why);
    }
}

impl<T> Stream for OutboundStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(frame) = ready!(self.frames.poll_recv(cx)) {
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some(end) = &mut self.end else { return Poll::Ready(None) };
        let why = ready!(Pin::new(end).poll(cx));
        self.end = None;
        Poll::Ready(why.ok().map(Err))
    }
}

#[cfg(test)]
mod tests {
    use super::outbound;

    #[test]
    fn a_queue_is_full_for_a_peer_that_does_not_read_and_not_for_one_that_is_gone() {
        let (queue, stream, closed) = outbound(1);
        assert!(!queue.is_full_for(0));
        assert!(queue.is_full_for(1), "one frame is unread");
        drop(stream);
        assert!(!queue.is_full_for(2), "a closed stream is not full");
        assert!(!closed.is_cancelled(), "the loop keeps the queue: the reader reports that the peer is gone");
    }
}
