//! The errors between ranks. Each names the rank to blame.

use crate::carriers::nccl::api::NcclError;
use crate::frame::FrameKind;
use crate::plan::LinkEncryption;
use std::fmt;
use std::io;
use std::ops::Range;
use types::{Epoch, Rank, Unsupported};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    #[error("this rank has leaves {have:?} of {n_leaves}, but owns others")]
    LeavesMissing { have: Vec<Range<u32>>, n_leaves: u32 },
    /// The peer ended, its connection broke, or it gave up.
    #[error("rank {} is gone", .rank.0)]
    PeerLost { rank: Rank },
    /// The peer is connected and silent.
    #[error("rank {} was silent until the deadline", .rank.0)]
    Deadline { rank: Rank },
    /// Aborted by `AbortHandle`, or because an earlier operation had failed.
    #[error("the collective was aborted")]
    Aborted,
    #[error("rank {} is in epoch {theirs}, this rank in {ours}", .rank.0)]
    Stale { rank: Rank, ours: Epoch, theirs: Epoch },
    #[error("rank {} sent {what}", .rank.0)]
    Garbage { rank: Rank, what: &'static str },
    /// The ranks do not run the same operations in the same order.
    #[error("rank {} sent {found} instead of {expected}", .rank.0)]
    OutOfStep { rank: Rank, expected: ExpectedFrame, found: ExpectedFrame },
    #[error("rank {} refused this rank: {why}", .rank.0)]
    Refused { rank: Rank, why: JoinRefusal },
    #[error("this rank has no {0}")]
    NoPeer(&'static str),
    #[error("this rank and rank {} cannot share memory, and the plan allows no other link", .rank.0)]
    NoSharedMemory { rank: Rank },
    #[error("invalid plan: {0}")]
    Plan(&'static str),
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Several peers could be to blame.
    #[error("a device waited for other ranks until the deadline, or they are gone")]
    Silence,
    #[error(transparent)]
    Device(#[from] backend::Error),
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
}

/// A message as both sides should expect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedFrame {
    pub kind: FrameKind,
    pub seq: u32,
    pub tag: u64,
    pub n_words: u32,
}

impl fmt::Display for ExpectedFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} no. {} of {} words, tag {:x}", self.kind, self.seq, self.n_words, self.tag)
    }
}

/// Why a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinRefusal {
    #[error("another version of the protocol")]
    Version,
    #[error("the secret is wrong")]
    WrongSecret,
    #[error("--link-encryption is {theirs} there and {ours} here")]
    Encryption { ours: LinkEncryption, theirs: LinkEncryption },
    #[error("epoch {theirs} has ended: the current epoch is {ours}")]
    Stale { ours: Epoch, theirs: Epoch },
    #[error("epoch {theirs} has not begun: the current epoch is {ours}")]
    Early { ours: Epoch, theirs: Epoch },
    #[error("the rank is already connected")]
    Duplicate,
    #[error("the rank is not expected")]
    Unexpected,
    #[error("the handshake is invalid")]
    Garbage,
    #[error("no answer until the deadline")]
    Silence,
    #[error("the peer closed the connection")]
    Gone,
}

impl Error {
    /// Returns the rank to blame, if the fault is a rank's.
    pub fn rank(&self) -> Option<Rank> {
        match self {
            Error::PeerLost { rank }
            | Error::Deadline { rank }
            | Error::Stale { rank, .. }
            | Error::Garbage { rank, .. }
            | Error::OutOfStep { rank, .. }
            | Error::Refused { rank, .. }
            | Error::NoSharedMemory { rank } => Some(*rank),
            _ => None,
        }
    }
}
