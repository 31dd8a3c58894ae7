//! An answer that ends when its request's key is revoked, or when its client's certificate ends: the computation is
//! dropped, and the client receives the reason. Has no knowledge of pages and messages.

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// The last frame of an answer whose key or certificate is no longer valid.
pub enum LastFrame<E> {
    /// The status of a gRPC call.
    Trailers(HeaderMap),
    /// An event of a stream of events.
    Event(Bytes),
    /// No frame fits: the answer breaks off.
    Break(E),
}

pub struct RevocableBody<B: Body> {
    /// None after the key was revoked.
    body: Option<B>,
    revoked: Pin<Box<WaitForCancellationFutureOwned>>,
    last: Option<LastFrame<B::Error>>,
}

impl<B: Body> RevocableBody<B> {
    pub fn new(body: B, revoked: CancellationToken, last: LastFrame<B::Error>) -> RevocableBody<B> {
        RevocableBody { body: Some(body), revoked: Box::pin(revoked.cancelled_owned()), last: Some(last) }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for RevocableBody<B>
where
    B::Error: Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        if this.revoked.as_mut().poll(context).is_pending() {
            return Pin::new(body).poll_frame(context);
        }
        this.body = None;
        Poll::Ready(this.last.take().map(|last| match last {
            LastFrame::Trailers(trailers) => Ok(Frame::trailers(trailers)),
            LastFrame::Event(event) => Ok(Frame::data(event)),
            LastFrame::Break(error) => Err(error),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::new, Body::size_hint)
    }
}
