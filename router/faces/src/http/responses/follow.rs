//! The events of a response that runs without its client, from any event on. A reader may disconnect and return: the
//! response does not end with its connection. Has no knowledge of JSON.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use router::front::frontend::Frontend;
use router::front::reader_watch::ReadTimeout;
use router::front::stored::{BackgroundRun, RunLog};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

/// A comment, so that proxies keep a silent stream open.
const STILL_HERE: &str = ": still here\n";

/// Streams the events after the first `n_had` as they arrive.
pub fn stream_events(front: &Frontend, run: &BackgroundRun, n_had: usize) -> Response {
    let (out, events) = mpsc::channel(1);
    tokio::spawn(send_events(run.log(), n_had, front.config.timeouts.sse_silence_max, out));
    let headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), ("x-accel-buffering", "no")];
    let body = Body::from_stream(front.reader_watch.watched(ReceiverStream::new(events)));
    (headers, body).into_response()
}

/// Sends events until there are no more, or the reader has left.
async fn send_events(
    mut log: watch::Receiver<RunLog>,
    mut n_had: usize,
    silence_max: Duration,
    out: mpsc::Sender<Result<Bytes, ReadTimeout>>,
) {
    loop {
        let (text, is_over) = {
            let log = log.borrow_and_update();
            let (text, n) = log.events_after(n_had);
            n_had = n;
            (Bytes::copy_from_slice(text.as_bytes()), log.is_over())
        };
        if text.is_empty() {
            if is_over {
                return;
            }
            tokio::select! {
                changed = log.changed() => if changed.is_err() { return },
                () = out.closed() => return,
                () = tokio::time::sleep(silence_max) => {
                    if out.send(Ok(STILL_HERE.into())).await.is_err() {
                        return;
                    }
                }
            }
        } else if out.send(Ok(text)).await.is_err() {
            return;
        }
    }
}
