//! Everything that can happen to a replica. The set is closed, and one loop takes them in order.

use crate::changes::Reply;
use crate::library::FoundModel;
use crate::outbound::Outbound;
use proto::cluster as wire;
use std::fmt;
use tonic::Status;
use types::{Grid, RequestId, StepDone};

/// A worker's connection. Not its rank: that is what placement gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}", self.0)
    }
}

pub(crate) enum Event {
    RouterAttached {
        router: u32,
        /// Its number before, if it had one.
        former: Option<wire::FormerNumber>,
        frames: Outbound<wire::ReplicaFrame>,
    },
    Submit {
        router: u32,
        request: Box<wire::Request>,
    },
    /// A request that may be here already, under another id.
    Adopt {
        router: u32,
        of: RequestId,
        request: Box<wire::Request>,
        /// Tokens that the client has, with what stands beside them.
        n_had: u32,
    },
    Cancel {
        router: u32,
        id: RequestId,
        stopped: bool,
    },
    /// It has missed names of cached blocks.
    Recite {
        router: u32,
    },
    RouterGone {
        router: u32,
        why: Status,
    },
    WorkerJoined {
        worker: WorkerId,
        hello: wire::WorkerHello,
        frames: Outbound<wire::RankFrame>,
    },
    RankLoaded {
        worker: WorkerId,
        loaded: wire::Loaded,
    },
    RankReady {
        worker: WorkerId,
        ready: wire::Ready,
    },
    StepDone {
        worker: WorkerId,
        done: StepDone,
    },
    Heartbeat {
        worker: WorkerId,
        beat: wire::Heartbeat,
    },
    /// It cannot go on in its epoch, and may know whose fault that is.
    RankFailed {
        worker: WorkerId,
        failed: wire::Failed,
    },
    /// It was told to end.
    WorkerLeaves {
        worker: WorkerId,
    },
    RankLost {
        worker: WorkerId,
        why: Status,
    },
    /// An operator wants another grid.
    Scale {
        grid: Grid,
        reply: Reply<wire::ScaleReply>,
    },
    /// An operator wants the model to be read again; this is what its path means now.
    Reload {
        found: FoundModel,
        reply: Reply<wire::ReloadReply>,
    },
    Tick,
    Drain,
}
