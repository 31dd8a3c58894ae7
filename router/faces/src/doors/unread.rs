//! The part of a request's body that a page leaves unread. An HTTP/1 connection can be reused only after the whole
//! body. The rest is read within a limit, or the answer closes the connection. Has no knowledge of pages.

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio_stream::StreamExt;

/// The most bytes of an unread rest that are read and dropped.
const UNREAD_BYTES_MAX: u64 = 256 << 10;
/// How long a client may take to send that rest.
const UNREAD_MAX: Duration = Duration::from_secs(1);

pub async fn discard_unread_body(request: Request, next: Next) -> Response {
    let (is_newer, is_empty) =
        (request.version() > http::Version::HTTP_11, http_body::Body::is_end_stream(request.body()));
    if is_newer || is_empty {
        return next.run(request).await;
    }
    let left = Arc::new(Mutex::new(None));
    let lent = request.map(|body| {
        *left.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        Body::new(ReclaimableBody(left.clone()))
    });
    let mut response = next.run(lent).await;
    let left = left.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(body) = left
        && !drain_body(body).await
    {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Reads a body to its end. False if the end is beyond the limits.
async fn drain_body(body: Body) -> bool {
    if http_body::Body::size_hint(&body).lower() > UNREAD_BYTES_MAX {
        return false;
    }
    let (mut chunks, mut n_bytes) = (body.into_data_stream(), 0);
    let reading = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            n_bytes += chunk.len() as u64;
            if n_bytes > UNREAD_BYTES_MAX {
                return false;
            }
        }
        true
    };
    tokio::time::timeout(UNREAD_MAX, reading).await.unwrap_or(false)
}

/// A body that can be taken back from its reader. Empty once it has been read to its end, or has failed.
struct ReclaimableBody(Arc<Mutex<Option<Body>>>);

impl http_body::Body for ReclaimableBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(body) = lent.as_mut() else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(context);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            *lent = None;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lent.as_ref().map_or_else(|| SizeHint::with_exact(0), http_body::Body::size_hint)
    }
}
