//! Collectives between the ranks of a replica. Works with buffers and leaves; has no knowledge of models, steps or the
//! placement of ranks.
//!
//! # How a sum is finished
//!
//! A row-parallel product is a sum over leaves (`types::leaves`), and every rank owns a contiguous run of them:
//!
//! ```text
//! leaves     0 1 2 3 4 5 6 7 8
//! rank 0     [=========]              owns 0..5: planes 0..4 and 4..5
//! rank 1               [=======]      owns 5..9: planes 5..6, 6..8 and 8..9
//! ```
//! A rank's kernel reduces the largest aligned runs that the rank owns whole, one plane `[n_rows, n_out]` of f32 for
//! each (`Linear::linear_runs`). `all_reduce` merges the planes of all ranks in ascending order by `leaves::Fold`,
//! which is one fixed binary tree over the leaves. For every distribution of leaves, each element is added up in the
//! same order, so its bits are the same. For a small message every rank gathers all planes and folds them. For a large
//! one the ranks exchange columns all to all, each rank folds its columns, and the finished columns are gathered. A
//! rank alone owns the whole tree: its kernel has one plane, and that plane is the sum.
//!
//! # How ranks communicate
//!
//! Each pair of ranks that communicates has a link: two rings in shared memory, or a TCP connection. Frames carry
//! epoch, kind, shape or step, and a number: ranks that are out of step receive an error that names the peer, never
//! wrong numbers. All operations send and receive together, wait until a deadline, and can be aborted.
//!
//! # Reading order
//!
//! ```text
//! ranks      the operations, as the model calls them
//! carriers   what carries them, chosen once: host, nccl, one_shot
//! sum, fold  the tree over the planes of all ranks
//! mesh       a rank's links, and the loop that moves what an operation has to move; tokens, notes
//! join       how ranks meet: listener, arrivals, plan, the handshake; wiring for threads of one process
//! link       frames over rings in shared memory (shm) or a connection (tcp), sealed there (seal)
//! ring       indices and the doorbell; region is the memory that they lie in
//! wait       spinning and sleeping; abort and cancel end it from outside
//! ```
#![allow(unsafe_code, reason = "memory that processes share; each block has its SAFETY comment")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod error;
mod frame;
mod ring;
mod sync;

mod abort;
mod arrivals;
mod cancel;
mod carriers;
#[cfg(test)]
mod faults;
mod fold;
mod futex;
mod join;
mod link;
mod listener;
mod mesh;
mod notes;
mod plan;
mod ranks;
mod region;
mod sum;
mod tokens;
mod transfer;
mod wait;
mod wiring;

pub use abort::AbortHandle;
pub use cancel::CancelFlag;
pub use carriers::RankDevice;
pub use carriers::carry::{CarrierChoice, ChunkLimits, ExchangeLimits};
pub use carriers::nccl::api::{NcclError, NcclVersion, nccl_version};
pub use error::{Error, ExpectedFrame, JoinRefusal, Result};
pub use frame::FrameKind;
pub use listener::{PeerListener, RefusedPeer};
pub use mesh::{ExchangeTimes, Mesh};
pub use plan::{LinkEncryption, MeshPlan, MeshTimeouts, WireChoice};
pub use ranks::Ranks;
pub use wait::WaitPolicy;

const _: () = assert!(cfg!(target_endian = "little"), "words are sent in memory order");
