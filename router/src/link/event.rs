//! Every event that a link's task handles, as one closed set.

use crate::link::request::LinkRequest;
use crate::link::ticket::Cancel;
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

#[expect(clippy::large_enum_variant, reason = "one at a time, taken at once: a box would cost an allocation a frame")]
pub(super) enum LinkEvent {
    Submit(u64, Box<LinkRequest>),
    Cancel(Cancel),
    Dial,
    Attached(AttachedStream),
    Frame(Frame),
    Lost(Status),
    Sent,
    /// The views of the replicas have changed.
    Seen,
    /// The store reports another address of the replica, or whether it is listed.
    Target,
    Due,
    End,
}

/// A stream that the coordinator has accepted.
pub(super) struct AttachedStream {
    pub(super) outbound: mpsc::Sender<wire::RouterFrame>,
    pub(super) inbound: Box<Streaming<wire::ReplicaFrame>>,
}
