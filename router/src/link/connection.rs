//! The connection to a coordinator: down, being dialled, or up. Knows frames, not what they mean.

use crate::config::{Config, Timeouts};
use crate::link::event::{AttachedStream, LinkEvent};
use crate::link::outbox::up;
use crate::link::view::ReplicaInfo;
use proto::ProtocolRange;
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
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

/// The connection to a coordinator, over all attempts to attach.
pub(super) struct CoordinatorConnection {
    stream: CoordinatorStream,
    /// The pause before the next attempt, if the present one fails.
    reattach: Duration,
    /// This router's number at the replica, in this attachment or the last one.
    former: Option<wire::FormerNumber>,
    /// Why the last dial failed, so that the same reason is not logged again and again.
    reason: String,
    timeouts: Timeouts,
    speaks: ProtocolRange,
}

impl CoordinatorConnection {
    pub fn new(config: &Config) -> CoordinatorConnection {
        CoordinatorConnection {
            stream: CoordinatorStream::Down { until: Instant::now() },
            reattach: config.timeouts.reattach_min,
            former: None,
            reason: String::new(),
            timeouts: config.timeouts.clone(),
            speaks: config.speaks.clone(),
        }
    }

    /// Waits for the next event. Safe to drop at any point: unfinished work stays here.
    pub async fn next(&mut self) -> LinkEvent {
        self.stream.next(self.timeouts.replica_silence_max).await
    }

    pub fn is_down(&self) -> bool {
        matches!(self.stream, CoordinatorStream::Down { .. })
    }

    /// Why the last coordinator was lost.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    pub fn dial(&mut self, channel: Channel) {
        let ProtocolRange { version, protocols } = self.speaks.clone();
        // The former number is sent when this router attaches again, so that the replica does not compute for a stream
        // that is gone.
        let hello = wire::RouterHello { version, protocols, former: self.former };
        self.stream = CoordinatorStream::Dialing(Box::pin(attach(channel, self.timeouts.attach_max, hello)));
    }

    pub fn open(&mut self, inbound: Box<Streaming<wire::ReplicaFrame>>, now: Instant) {
        self.stream = CoordinatorStream::Up { inbound, last_frame: now };
    }

    /// Reads a coordinator's welcome. An error if it speaks no protocol that this router speaks.
    pub fn read_welcome(&self, welcome: wire::Welcome) -> Result<ReplicaInfo, Status> {
        ReplicaInfo::of(welcome, &self.speaks)
    }

    /// Records that the replica has attached this router.
    pub fn record_attached(&mut self, replica: &ReplicaInfo) {
        self.reattach = self.timeouts.reattach_min;
        self.former = Some(wire::FormerNumber { incarnation: replica.incarnation, router: replica.first_id.router() });
    }

    /// Records why the coordinator was lost. Returns false if the last one was lost for the same reason.
    pub fn record_reason(&mut self, reason: &str) -> bool {
        let is_new = self.reason != reason;
        reason.clone_into(&mut self.reason);
        is_new
    }

    /// Closes the stream. The next attempt follows after a pause, which grows from one attempt to the next.
    pub fn close(&mut self, now: Instant) {
        self.stream = CoordinatorStream::Down { until: now + self.reattach };
        self.reattach = (self.reattach * 2).min(self.timeouts.reattach_max);
    }

    /// Begins the pauses anew, for another coordinator.
    pub fn reset_pause(&mut self) {
        self.reattach = self.timeouts.reattach_min;
    }

    /// Lets the next attempt begin now.
    pub fn end_pause(&mut self, now: Instant) {
        self.stream = CoordinatorStream::Down { until: now };
    }
}

enum CoordinatorStream {
    Down { until: Instant },
    Dialing(Pin<Box<dyn Future<Output = Result<AttachedStream, Status>> + Send>>),
    Up { inbound: Box<Streaming<wire::ReplicaFrame>>, last_frame: Instant },
}

impl CoordinatorStream {
    async fn next(&mut self, silence_max: Duration) -> LinkEvent {
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

async fn attach(channel: Channel, wait_max: Duration, hello: wire::RouterHello) -> Result<AttachedStream, Status> {
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
