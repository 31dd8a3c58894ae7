//! The thread that commits a rank's KV cache while the rank serves. The first piece is there before the rank is ready;
//! of the rest each heartbeat says how far it is.

use crate::assignment::LoadError;
use crate::config::MemoryLeft;
use crate::runner::kv_commit::{Committed, KvCommit};
use crate::session::heartbeat::StepCounters;
use crate::session::rank_thread::{RankLost, Reports, drive};
use proto::cluster::KvCommitted;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use types::Epoch;

/// How long to wait for memory that the machine does not have.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Commits until it is dropped, which waits for the piece at hand: a successor needs the memory.
pub(crate) struct Committing {
    counters: Arc<StepCounters>,
    alive: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread needs of its rank.
pub(crate) struct CommitsFor {
    pub epoch: Epoch,
    pub reports: Reports,
    pub counters: Arc<StepCounters>,
    pub memory_left: MemoryLeft,
    /// Whether its coordinator heeds how much there is.
    pub tells_parts: bool,
}

impl Committing {
    /// Commits a first piece, and begins the thread for the rest. Returns how much of the pools is there. A coordinator
    /// that does not hear of parts uses all blocks at once: then all are committed here, as far as there is memory.
    pub fn begin(mut commit: KvCommit, rank: CommitsFor) -> Result<(Committing, Option<u32>), LoadError> {
        let counters = rank.counters.clone();
        let first = match rank.tells_parts {
            true => commit.go_on((rank.memory_left)())?,
            false => commit.go_on_to_the_end(rank.memory_left)?,
        };
        let parts = rank.tells_parts.then_some(commit.parts());
        rank.tell(commit.parts());
        let (alive, ended) = sync_channel(0);
        let thread = match first {
            Committed::All => None,
            Committed::Piece | Committed::Short => Some(begin_thread(commit, rank, ended)?),
        };
        Ok((Committing { counters, alive: Some(alive), thread }, parts))
    }
}

fn begin_thread(commit: KvCommit, rank: CommitsFor, ended: Receiver<()>) -> Result<JoinHandle<()>, LoadError> {
    let thread = std::thread::Builder::new().name("kv-commit".into()).spawn(move || run(commit, &rank, &ended));
    thread.map_err(|error| LoadError::Kv(error.into()))
}

impl Drop for Committing {
    fn drop(&mut self) {
        self.alive = None;
        // A thread that panicked has nothing to hand over.
        let _panicked = self.thread.take().map(JoinHandle::join);
        self.counters.tell_kv(None);
    }
}

impl CommitsFor {
    fn tell(&self, parts: u32) {
        if !self.tells_parts {
            return;
        }
        let Epoch { incarnation, n } = self.epoch;
        self.counters.tell_kv(Some(KvCommitted { epoch_incarnation: incarnation, epoch_n: n, parts }));
    }
}

fn run(mut commit: KvCommit, rank: &CommitsFor, ended: &Receiver<()>) {
    let (begun, mut is_said) = (Instant::now(), false);
    let mut pause = Duration::ZERO;
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let piece = Instant::now();
        match commit.go_on((rank.memory_left)()) {
            // Half of the time belongs to the computing threads, whose cores this thread borrows.
            Ok(Committed::Piece) => pause = piece.elapsed(),
            Ok(Committed::All) => {
                rank.tell(commit.parts());
                let (n_bytes, millis) = (commit.n_bytes(), begun.elapsed().as_millis() as u64);
                return tracing::info!(n_bytes, millis, "the KV cache is committed");
            }
            Ok(Committed::Short) => {
                pause = TRY_AGAIN;
                if !std::mem::replace(&mut is_said, true) {
                    let (has, of) = (commit.committed_bytes(), commit.n_bytes());
                    tracing::warn!(has, of, "this machine lacks memory for the whole KV cache: less of it is used");
                }
            }
            Err(short) => {
                let (error, message) = (LoadError::Kv(short), "the rank ends before its memory does");
                tracing::error!(%error, message);
                return drive(rank.reports.lost(rank.epoch, error.to_string(), None, RankLost::Load(error)));
            }
        }
        rank.tell(commit.parts());
    }
}
