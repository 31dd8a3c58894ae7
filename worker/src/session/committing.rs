//! The thread that commits a rank's KV cache while the rank serves. The first piece is committed before the rank is
//! ready; each heartbeat reports how much is committed.

use crate::assignment::LoadError;
use crate::config::KvMemory;
use crate::runner::kv_commit::{CommitOutcome, KvPoolMemory, KvShortage};
use crate::session::heartbeat::StepCounters;
use crate::session::rank_thread::{RankLost, ReportSender, block_on};
use proto::cluster::{KvCommitted, KvTarget};
use proto::since;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use types::Epoch;

/// How long to wait before requesting memory again that the machine does not have.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What a coordinator does with reports of how much memory is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvReporting {
    /// It reads no report, and uses all blocks of a rank that is ready.
    Nothing,
    /// It uses the blocks that have memory.
    Parts,
    /// It also sends how much to commit.
    Targets,
}

impl KvReporting {
    pub fn of(protocol: u32, sends_targets: bool) -> KvReporting {
        match protocol >= since::KV_PARTS {
            false => KvReporting::Nothing,
            true if sends_targets => KvReporting::Targets,
            true => KvReporting::Parts,
        }
    }
}

/// How much of the pools is committed when the rank is ready.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InitialKvMemory {
    /// None if all is committed, or the coordinator reads no parts.
    pub parts: Option<u32>,
    /// Whether the rank will commit as much as the coordinator requests, and no more.
    pub grows: bool,
}

/// Commits memory until it is dropped. The drop waits for the present piece, because a successor needs the memory.
pub(crate) struct KvCommitter {
    counters: Arc<StepCounters>,
    target: Arc<TargetSlot>,
    /// Wakes the thread. Dropping it ends the thread.
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The newest target that the thread has not read yet. A replaced target is skipped.
#[derive(Default)]
struct TargetSlot(Mutex<Option<KvTarget>>);

/// The thread's data of its rank.
pub(crate) struct CommitContext {
    pub epoch: Epoch,
    pub reports: ReportSender,
    pub counters: Arc<StepCounters>,
    pub memory: KvMemory,
    pub reporting: KvReporting,
}

impl KvCommitter {
    /// Commits a first piece, and starts the thread for the rest. A coordinator that reads no parts uses all blocks at
    /// once, so for it all are committed here, as far as there is memory.
    pub fn begin(mut commit: KvPoolMemory, rank: CommitContext) -> Result<(KvCommitter, InitialKvMemory), LoadError> {
        let (counters, grows) = (rank.counters.clone(), rank.grows());
        let left = rank.memory.left;
        let first = match rank.reporting {
            KvReporting::Nothing => commit.commit_to_target(left)?,
            KvReporting::Targets if grows => commit.begin_to_grow(left).map(|()| CommitOutcome::Piece)?,
            KvReporting::Parts | KvReporting::Targets => commit.commit_piece(left())?,
        };
        let parts = (rank.reporting != KvReporting::Nothing).then_some(commit.parts());
        rank.report(commit.parts(), 0);
        let (wake, woken) = sync_channel(1);
        let target = Arc::new(TargetSlot::default());
        let thread = match first {
            CommitOutcome::Enough => None,
            CommitOutcome::Piece | CommitOutcome::Short => Some(begin_thread(commit, rank, (target.clone(), woken))?),
        };
        Ok((KvCommitter { counters, target, wake: Some(wake), thread }, InitialKvMemory { parts, grows }))
    }

    /// Sets how much to commit. No later step uses blocks above it until the rank has reported more.
    pub fn set_target(&self, requested: KvTarget) {
        self.target.set(requested);
        // A full queue wakes the thread as well. A thread that has ended has committed all, or its rank is lost.
        let _woken = self.wake.as_ref().map(|wake| wake.try_send(()));
    }
}

fn begin_thread(
    commit: KvPoolMemory,
    rank: CommitContext,
    (target, woken): (Arc<TargetSlot>, Receiver<()>),
) -> Result<JoinHandle<()>, LoadError> {
    let run = move || run(commit, &rank, &target, &woken);
    let thread = std::thread::Builder::new().name("kv-commit".into()).spawn(run);
    thread.map_err(|error| LoadError::Kv(error.into()))
}

impl Drop for KvCommitter {
    fn drop(&mut self) {
        self.wake = None;
        // A thread that panicked has no result.
        let _panicked = self.thread.take().map(JoinHandle::join);
        self.counters.set_kv(None);
    }
}

impl TargetSlot {
    fn set(&self, requested: KvTarget) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(requested);
    }

    fn take(&self) -> Option<KvTarget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl CommitContext {
    fn grows(&self) -> bool {
        self.memory.grows && self.reporting == KvReporting::Targets
    }

    /// Makes heartbeats report these parts, in answer to the `KvTarget` with this number.
    fn report(&self, parts: u32, target_n: u32) {
        if self.reporting == KvReporting::Nothing {
            return;
        }
        let Epoch { incarnation, n } = self.epoch;
        self.counters.set_kv(Some(KvCommitted { epoch_incarnation: incarnation, epoch_n: n, parts, target: target_n }));
    }

    /// Commits the next piece. For a growing cache, a refusal by the system means that it has no memory at this moment.
    fn commit_piece(&self, commit: &mut KvPoolMemory) -> Result<CommitOutcome, KvShortage> {
        match commit.commit_piece((self.memory.left)()) {
            Err(KvShortage::System(_)) if self.grows() => Ok(CommitOutcome::Short),
            went => went,
        }
    }
}

fn run(mut commit: KvPoolMemory, rank: &CommitContext, target: &TargetSlot, woken: &Receiver<()>) {
    let (begun, mut is_reported) = (Instant::now(), false);
    let (mut pause, mut answered) = (Some(Duration::ZERO), 0);
    loop {
        let wait = match pause {
            Some(pause) => woken.recv_timeout(pause),
            None => woken.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if wait == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        if let Some(requested) = target.take() {
            answered = requested.n;
            if let Err(error) = commit.set_target(requested.parts) {
                // The memory stays with this process, which is no reason to end.
                tracing::warn!(%error, "memory of the KV cache cannot be returned to the system");
            }
        }
        let piece = Instant::now();
        match rank.commit_piece(&mut commit) {
            // Half of the time belongs to the computing threads, whose cores this thread shares.
            Ok(CommitOutcome::Piece) => pause = Some(piece.elapsed()),
            Ok(CommitOutcome::Enough) if rank.grows() => pause = None,
            Ok(CommitOutcome::Enough) => {
                rank.report(commit.parts(), answered);
                let (n_bytes, millis) = (commit.n_bytes(), begun.elapsed().as_millis() as u64);
                return tracing::info!(n_bytes, millis, "the KV cache is committed");
            }
            Ok(CommitOutcome::Short) => {
                pause = Some(TRY_AGAIN);
                if !std::mem::replace(&mut is_reported, true) {
                    let (has, of) = (commit.committed_bytes(), commit.n_bytes());
                    tracing::warn!(has, of, "this machine lacks memory for the whole KV cache: less of it is used");
                }
            }
            Err(short) => {
                let (error, message) = (LoadError::Kv(short), "too little memory for the KV cache: this rank ends");
                tracing::error!(%error, message);
                return block_on(rank.reports.report_lost(rank.epoch, error.to_string(), None, RankLost::Load(error)));
            }
        }
        rank.report(commit.parts(), answered);
    }
}
