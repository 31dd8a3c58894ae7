//! Reports ten times a second, from a thread of its own, that this rank is alive and how far it is, so that a long step
//! does not look like a dead rank. On modelled time a task does it, because no step takes any time there.

use crate::config::ExecutionMode;
use crate::session::leases::ThreadLeases;
use proto::cluster::{Heartbeat, KvCommitted, WorkerFrame, worker_frame::Frame};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// Counters since the worker started; the coordinator takes differences.
#[derive(Debug, Default)]
pub struct StepCounters {
    steps_done: AtomicU64,
    compute_micros: AtomicU64,
    wait_micros: AtomicU64,
    idle_micros: AtomicU64,
    /// Whether the computing thread runs a step.
    in_step: AtomicBool,
    /// Whether the thread has any work at all.
    is_busy: AtomicBool,
    /// How much of the KV cache is committed, while that is reported.
    kv: Mutex<Option<KvCommitted>>,
}

impl StepCounters {
    pub(crate) fn begin_step(&self) {
        self.in_step.store(true, Relaxed);
    }

    /// Counts a step that took `took`, of which it waited `waited` for other ranks.
    pub(crate) fn add_step(&self, took: Duration, waited: Duration) {
        self.in_step.store(false, Relaxed);
        self.steps_done.fetch_add(1, Relaxed);
        self.compute_micros.fetch_add(took.saturating_sub(waited).as_micros() as u64, Relaxed);
        self.wait_micros.fetch_add(waited.as_micros() as u64, Relaxed);
    }

    pub(crate) fn add_idle(&self, took: Duration) {
        self.idle_micros.fetch_add(took.as_micros() as u64, Relaxed);
    }

    pub(crate) fn set_busy(&self, is_busy: bool) {
        self.is_busy.store(is_busy, Relaxed);
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.load(Relaxed)
    }

    pub(crate) fn set_kv(&self, kv: Option<KvCommitted>) {
        *self.kv.lock().unwrap_or_else(PoisonError::into_inner) = kv;
    }

    fn heartbeat(&self, leases: &ThreadLeases) -> Heartbeat {
        Heartbeat {
            in_step: self.in_step.load(Relaxed),
            waits_for: leases.waits_for().map(|rank| rank.0.into()),
            steps_done: self.steps_done.load(Relaxed),
            compute_micros: self.compute_micros.load(Relaxed),
            idle_micros: self.idle_micros.load(Relaxed),
            wait_micros: self.wait_micros.load(Relaxed),
            kv: *self.kv.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// The heartbeat of one worker, and its destination.
pub(crate) struct HeartbeatSource {
    pub progress: Arc<StepCounters>,
    pub leases: Arc<ThreadLeases>,
    pub up: mpsc::WeakSender<WorkerFrame>,
}

impl HeartbeatSource {
    /// Sends a heartbeat. Returns false if the receiver is gone.
    fn send(&self) -> bool {
        let frame = WorkerFrame { frame: Some(Frame::Heartbeat(self.progress.heartbeat(&self.leases))) };
        let Some(up) = self.up.upgrade() else { return false };
        // A full queue's frames are themselves a sign of life.
        !matches!(up.try_send(frame), Err(mpsc::error::TrySendError::Closed(_)))
    }
}

/// Sends heartbeats until it is dropped.
pub(crate) enum HeartbeatSender {
    Thread { _alive: SyncSender<()> },
    Task { _beats: AbortOnDropHandle<()> },
}

impl HeartbeatSender {
    pub fn start(footing: ExecutionMode, pulse: HeartbeatSource, every: Duration) -> io::Result<HeartbeatSender> {
        match footing {
            ExecutionMode::Threads => HeartbeatSender::on_a_thread(pulse, every),
            ExecutionMode::Tasks => Ok(HeartbeatSender::in_a_task(pulse, every)),
        }
    }

    fn on_a_thread(pulse: HeartbeatSource, every: Duration) -> io::Result<HeartbeatSender> {
        let (alive, stopped) = sync_channel(0);
        let beats = move || while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) && pulse.send() {};
        std::thread::Builder::new().name("heartbeat".into()).spawn(beats)?;
        Ok(HeartbeatSender::Thread { _alive: alive })
    }

    fn in_a_task(pulse: HeartbeatSource, every: Duration) -> HeartbeatSender {
        let beats = async move {
            loop {
                tokio::time::sleep(every).await;
                if !pulse.send() {
                    break;
                }
            }
        };
        HeartbeatSender::Task { _beats: AbortOnDropHandle::new(tokio::spawn(beats)) }
    }
}
