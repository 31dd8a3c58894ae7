//! Every event that a replica handles. The set is closed, and one loop takes them in order.

use crate::WorkerId;
use crate::outbound::Outbound;
use crate::replica::joined::ServedWeights;
use proto::cluster as wire;
use tokio::sync::oneshot;
use tonic::Status;
use types::{Grid, PieceRun, RequestId, StepDone};

/// Answers an operator who has asked for a change and waits.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// What the model's path holds now: its fingerprint and the hashes of its pieces.
#[derive(Debug)]
pub(crate) struct FoundModel {
    pub fingerprint: [u8; 32],
    pub runs: Vec<PieceRun>,
}

pub(crate) enum Event {
    RouterAttached {
        router: u32,
        /// The router's former number, if it had one.
        former: Option<wire::FormerNumber>,
        /// The protocol that both sides of its stream speak.
        protocol: u32,
        frames: Outbound<wire::ReplicaFrame>,
    },
    /// Its id names its router.
    Submit(Box<wire::Request>),
    /// A request that may be here already, under another id.
    Adopt(Box<wire::Adopt>),
    Cancel {
        router: u32,
        id: RequestId,
        stopped: bool,
    },
    /// The router has missed names of cached blocks.
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
        /// The protocol that both sides of its stream speak.
        protocol: u32,
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
    /// The rank cannot go on in its epoch; the frame may name the peer at fault.
    RankFailed {
        worker: WorkerId,
        failed: wire::Failed,
    },
    /// The worker was told to end.
    WorkerLeaves {
        worker: WorkerId,
    },
    RankLost {
        worker: WorkerId,
        why: Status,
    },
    /// A router wants to know where another replica differs.
    Weights {
        reply: Reply<ServedWeights>,
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
