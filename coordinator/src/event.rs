//! Every event that a replica handles. The set is closed, and one loop takes them in order.

use crate::WorkerId;
use crate::deployment::joined::ServedWeights;
use crate::outbound::Outbound;
use proto::cluster as wire;
use tokio::sync::oneshot;
use tonic::Status;
use types::{FetchDone, Grid, PieceRun, RequestId, StepDone};

/// Answers an operator that waits for a requested change.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// The present content of the model's path: its fingerprint and the hashes of its pieces.
#[derive(Debug)]
pub(crate) struct ModelOnDisk {
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
    /// The rank has ended a fetch from its tier.
    PagesFetched {
        worker: WorkerId,
        done: FetchDone,
    },
    /// Pages that the rank's tier has.
    PagesKept {
        worker: WorkerId,
        pages: wire::PagesKept,
    },
    /// The worker received a stop signal.
    WorkerLeaves {
        worker: WorkerId,
    },
    RankLost {
        worker: WorkerId,
        why: Status,
    },
    /// A router compares these weights with another replica's.
    Weights {
        reply: Reply<ServedWeights>,
    },
    /// An operator requests another grid.
    Scale {
        grid: Grid,
        reply: Reply<wire::ScaleReply>,
    },
    /// An operator requests that the model be read again; this is the present content of its path.
    Reload {
        found: ModelOnDisk,
        reply: Reply<wire::ReloadReply>,
    },
    Tick,
    Drain,
}
