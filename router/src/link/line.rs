//! The wire to a coordinator: down, being dialled, or up. Knows frames, not what they mean.

use crate::link::task::Event;
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

/// Frames handed to the transport at once.
const FRAMES_SENDING_MAX: usize = 16;

pub(super) enum Line {
    Down { until: Instant },
    Dialing(Pin<Box<dyn Future<Output = Result<Up, Status>> + Send>>),
    Up { inbound: Box<Streaming<wire::ReplicaFrame>>, heard: Instant },
}

pub(super) struct Up {
    pub outbound: mpsc::Sender<wire::RouterFrame>,
    pub inbound: Box<Streaming<wire::ReplicaFrame>>,
}

impl Line {
    /// Safe to drop at any point: what is half done stays in the line.
    pub(super) async fn next(&mut self, silence_max: Duration) -> Event {
        match self {
            Line::Down { until } => {
                sleep_until(*until).await;
                Event::Dial
            }
            Line::Dialing(attempt) => match attempt.await {
                Ok(up) => Event::Attached(up),
                Err(status) => Event::Lost(status),
            },
            Line::Up { inbound, heard } => match timeout_at(*heard + silence_max, inbound.message()).await {
                Ok(Ok(Some(wire::ReplicaFrame { frame }))) => {
                    *heard = Instant::now();
                    frame.map_or(Event::Lost(Status::internal("an empty frame")), Event::Frame)
                }
                Ok(Ok(None)) => Event::Lost(Status::unavailable("the coordinator closed the stream")),
                Ok(Err(status)) => Event::Lost(status),
                Err(_) => Event::Lost(Status::unavailable("the coordinator is silent")),
            },
        }
    }
}

pub(super) async fn attach(
    channel: Channel,
    wait_max: Duration,
    former: Option<wire::FormerNumber>,
) -> Result<Up, Status> {
    let (outbound, frames) = mpsc::channel(FRAMES_SENDING_MAX);
    let hello = wire::RouterHello { version: proto::VERSION.to_owned(), former };
    let said = outbound.try_send(up(wire::router_frame::Frame::Hello(hello)));
    debug_assert!(said.is_ok(), "a new queue has room for one frame");
    let mut client = CoordinatorClient::new(channel)
        .max_decoding_message_size(proto::FRAME_BYTES_MAX)
        .max_encoding_message_size(proto::FRAME_BYTES_MAX);
    let attached = timeout(wait_max, client.attach(ReceiverStream::new(frames))).await;
    let inbound = attached.map_err(|_| Status::unavailable("the coordinator does not answer"))??.into_inner();
    Ok(Up { outbound, inbound: Box::new(inbound) })
}

pub(super) fn up(frame: wire::router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

/// Hands the first frame to the transport when that has room. Nothing where there is no frame or no transport.
pub(super) async fn send_first(
    outbound: &Option<mpsc::Sender<wire::RouterFrame>>,
    outbox: &mut VecDeque<wire::RouterFrame>,
) -> Option<Event> {
    let outbound = outbound.as_ref().filter(|_| !outbox.is_empty())?;
    let Ok(permit) = outbound.reserve().await else {
        return Some(Event::Lost(Status::unavailable("the coordinator closed the stream")));
    };
    permit.send(outbox.pop_front()?);
    Some(Event::Sent)
}
