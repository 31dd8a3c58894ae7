//! Catches a panic, which ends only its own request, with an error to its client. Has no knowledge of protocols.
//! `telemetry` counts panics.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanicError;

/// Runs a request's future. A future that panics is not polled again. State that it shares with others is behind locks
/// that tolerate a panic.
pub async fn catch_panic<F: Future>(future: F) -> Result<F::Output, PanicError> {
    let mut future = pin!(future);
    let poll = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(poll) => poll.map(Ok),
        Err(_) => Poll::Ready(Err(PanicError)),
    });
    poll.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_an_error() {
        assert_eq!(catch_panic(async { 5 }).await, Ok(5));
        let breaks = async {
            tokio::task::yield_now().await;
            assert!(std::hint::black_box(false), "the panic of this test");
        };
        assert_eq!(catch_panic(breaks).await, Err(PanicError));
    }
}
