//! Says ten times a second, from a thread of its own, that this rank lives and how far it is: a step that takes long is
//! not taken for a death.

use crate::seat::Turns;
use proto::cluster::{Heartbeat, WorkerFrame, worker_frame::Frame};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;
use tokio::sync::mpsc;

/// Counters since the worker began; the coordinator takes differences.
#[derive(Debug, Default)]
pub struct Progress {
    steps_done: AtomicU64,
    compute_micros: AtomicU64,
    wait_micros: AtomicU64,
    idle_micros: AtomicU64,
    /// The computing thread is in a step.
    in_step: AtomicBool,
    /// It is in anything.
    is_busy: AtomicBool,
}

impl Progress {
    pub(crate) fn begin_step(&self) {
        self.in_step.store(true, Relaxed);
    }

    /// A step that took so long, `waited` of it for other ranks.
    pub(crate) fn add_step(&self, took: Duration, waited: Duration) {
        self.in_step.store(false, Relaxed);
        self.steps_done.fetch_add(1, Relaxed);
        self.compute_micros.fetch_add(took.saturating_sub(waited).as_micros() as u64, Relaxed);
        self.wait_micros.fetch_add(waited.as_micros() as u64, Relaxed);
    }

    pub(crate) fn add_idle(&self, took: Duration) {
        self.idle_micros.fetch_add(took.as_micros() as u64, Relaxed);
    }

    pub(crate) fn busy(&self, is_busy: bool) {
        self.is_busy.store(is_busy, Relaxed);
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.is_busy.load(Relaxed)
    }

    fn beat(&self, turns: &Turns) -> Heartbeat {
        Heartbeat {
            in_step: self.in_step.load(Relaxed),
            waits_for: turns.waits_for().map(|rank| rank.0.into()),
            steps_done: self.steps_done.load(Relaxed),
            compute_micros: self.compute_micros.load(Relaxed),
            idle_micros: self.idle_micros.load(Relaxed),
            wait_micros: self.wait_micros.load(Relaxed),
        }
    }
}

/// Beats until it is dropped.
pub(crate) struct Heart {
    _alive: SyncSender<()>,
}

impl Heart {
    pub fn start(
        progress: Arc<Progress>,
        turns: Arc<Turns>,
        up: mpsc::WeakSender<WorkerFrame>,
        every: Duration,
    ) -> io::Result<Heart> {
        let (alive, stopped) = sync_channel(0);
        let beat = move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let frame = WorkerFrame { frame: Some(Frame::Heartbeat(progress.beat(&turns))) };
                let Some(up) = up.upgrade() else { break };
                // A full queue is full of frames that say as much.
                if let Err(mpsc::error::TrySendError::Closed(_)) = up.try_send(frame) {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("heartbeat".into()).spawn(beat)?;
        Ok(Heart { _alive: alive })
    }
}
