//! The connection to a coordinator: down, being dialled, or up. Knows frames, not what they mean.

use crate::link::event::{AttachedStream, LinkEvent};
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// The most frames that the transport holds.
const FRAMES_SENDING_MAX: usize = 16;

pub(super) enum CoordinatorStream {
    Down { until: Instant },
    Dialing(Pin<Box<dyn Future<Output = Result<AttachedStream, Status>> + Send>>),
    Up { inbound: Box<Streaming<wire::ReplicaFrame>>, last_frame: Instant },
}

impl CoordinatorStream {
    /// Waits for the next event. Safe to drop at any point: unfinished work stays here.
    pub(super) async fn next(&mut self, silence_max: Duration) -> LinkEvent {
        match self {
            CoordinatorStream::Down { until } => {
                sleep_until(*until).await;
                LinkEvent::Dial
            }
            CoordinatorStream::Dialing(attempt) => match attempt.await {
                Ok(attached) => LinkEvent::Attached(attached),
                Err(status) => LinkEvent::Lost(status),
            },
            CoordinatorStream::Up { inbound, last_frame } => {
                match timeout_at(*last_frame + silence_max, inbound.message()).await {
                    Ok(Ok(Some(wire::ReplicaFrame { frame }))) => {
                        *last_frame = Instant::now();
                        frame.map_or(LinkEvent::Lost(Status::internal("an empty frame")), LinkEvent::Frame)
                    }
                    Ok(Ok(None)) => LinkEvent::Lost(Status::unavailable("the coordinator closed the stream")),
                    Ok(Err(status)) => LinkEvent::Lost(status),
                    Err(_) => LinkEvent::Lost(Status::unavailable("the coordinator is silent")),
                }
            }
        }
    }
}

pub(super) async fn attach(
    channel: Channel,
    wait_max: Duration,
    hello: wire::RouterHello,
) -> Result<AttachedStream, Status> {
    let (outbound, frames) = mpsc::channel(FRAMES_SENDING_MAX);
    let sent = outbound.try_send(up(wire::router_frame::Frame::Hello(hello)));
    debug_assert!(sent.is_ok(), "a new queue has room for one frame");
    let mut client = CoordinatorClient::new(channel)
        .max_decoding_message_size(proto::FRAME_BYTES_MAX)
        .max_encoding_message_size(proto::FRAME_BYTES_MAX);
    let attached = timeout(wait_max, client.attach(ReceiverStream::new(frames))).await;
    let inbound = attached.map_err(|_| Status::unavailable("the coordinator does not answer"))??.into_inner();
    Ok(AttachedStream { outbound, inbound: Box::new(inbound) })
}

pub(super) fn up(frame: wire::router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

/// Passes the first frame to the transport when that has room. None if there is no frame or no transport.
pub(super) async fn send_first(
    outbound: &Option<mpsc::Sender<wire::RouterFrame>>,
    outbox: &mut VecDeque<wire::RouterFrame>,
) -> Option<LinkEvent> {
    let outbound = outbound.as_ref().filter(|_| !outbox.is_empty())?;
    let Ok(permit) = outbound.reserve().await else {
        return Some(LinkEvent::Lost(Status::unavailable("the coordinator closed the stream")));
    };
    permit.send(outbox.pop_front()?);
    Some(LinkEvent::Sent)
}
