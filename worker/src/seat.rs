//! The thread that computes. It owns the loader and the runner, takes work from one bounded queue and reports up the
//! session that gave the work. Knows nothing of sockets; never waits for anything but work and room to report.

use crate::heartbeat::Progress;
use crate::runner::{Assignment, Load, LoadError, Runner};
use proto::cluster::{Failed, Ready, WorkerFrame, worker_frame::Frame};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use types::{Epoch, Step, StepDone};

/// What a session asks of the thread.
pub(crate) enum Work {
    Load { assignment: Assignment, reports: Reports },
    Step(Step),
}

/// Where one session hears from the thread. Weak, so that a session's stream ends with the session and not with the
/// step that it left behind; then its work is skipped.
#[derive(Clone)]
pub(crate) struct Reports {
    /// Frames for the coordinator, in order.
    pub up: mpsc::WeakSender<WorkerFrame>,
    /// Why this rank cannot go on. The coordinator has been told when this arrives.
    pub lost: mpsc::WeakSender<SeatLost>,
}

pub(crate) enum SeatLost {
    Load(LoadError),
    Run(String),
}

/// Runs until the queue's sender is dropped.
pub(crate) fn run(mut loader: Box<dyn Load>, mut work: mpsc::Receiver<Work>, progress: Arc<Progress>) {
    let mut seat = None;
    let mut idle_since = Instant::now();
    while let Some(next) = work.blocking_recv() {
        progress.add_idle(idle_since.elapsed());
        match next {
            // A long load outlived the session that asked for this one.
            Work::Load { reports, .. } if reports.are_unheard() => seat = None,
            Work::Load { assignment, reports } => {
                // The old cache goes first: there may not be room for two.
                drop(seat.take());
                seat = Seat::take(&mut *loader, &assignment, reports);
            }
            Work::Step(step) => seat = seat.and_then(|seat: Seat| seat.run(&step, &progress)),
        }
        idle_since = Instant::now();
    }
}

/// A place taken in one epoch.
struct Seat {
    epoch: Epoch,
    runner: Box<dyn Runner>,
    done: StepDone,
    reports: Reports,
}

impl Seat {
    fn take(loader: &mut dyn Load, assignment: &Assignment, reports: Reports) -> Option<Seat> {
        let epoch = assignment.epoch;
        let (runner, ready) = match catch_unwind(AssertUnwindSafe(|| loader.load(assignment))) {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => {
                reports.lost(epoch, error.to_string(), SeatLost::Load(error));
                return None;
            }
            Err(panic) => {
                let message = format!("the loader panicked: {}", panic_message(&*panic));
                reports.lost(epoch, message.clone(), SeatLost::Run(message));
                return None;
            }
        };
        let ready = Ready {
            epoch_incarnation: epoch.incarnation,
            epoch_n: epoch.n,
            policy_digest: ready.policy.0.to_vec(),
            n_blocks: ready.n_blocks,
            weight_bytes: ready.weight_bytes,
        };
        reports.send(Frame::Ready(ready)).then(|| Seat { epoch, runner, done: StepDone::default(), reports })
    }

    /// The seat is given up when the step fails or nobody listens any more.
    fn run(mut self, step: &Step, progress: &Progress) -> Option<Seat> {
        if self.reports.are_unheard() {
            return None;
        }
        if step.epoch != self.epoch {
            let (step, epoch) = (step.id.0, step.epoch);
            tracing::warn!(step, %epoch, ours = %self.epoch, "a step of another epoch is dropped");
            return Some(self);
        }
        self.done.id = step.id;
        self.done.epoch = step.epoch;
        let begun = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| self.runner.run(step, &mut self.done)));
        progress.add_step(begun.elapsed());
        let message = match result {
            Ok(Ok(())) => return self.reports.send(Frame::Done((&self.done).into())).then_some(self),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("step {} panicked: {}", step.id.0, panic_message(&*panic)),
        };
        self.reports.lost(self.epoch, message.clone(), SeatLost::Run(message));
        None
    }
}

impl Reports {
    fn are_unheard(&self) -> bool {
        self.up.upgrade().is_none_or(|up| up.is_closed())
    }

    /// Waits for room: the session drains its queue, or closes it.
    fn send(&self, frame: Frame) -> bool {
        let frame = WorkerFrame { frame: Some(frame) };
        self.up.upgrade().is_some_and(|up| up.blocking_send(frame).is_ok())
    }

    fn lost(&self, epoch: Epoch, message: String, why: SeatLost) {
        let failed = Failed { epoch_incarnation: epoch.incarnation, epoch_n: epoch.n, message, guilty_rank: None };
        if !self.send(Frame::Failed(failed)) {
            return;
        }
        if let Some(lost) = self.lost.upgrade() {
            // A session that is gone needs no reason.
            let _gone = lost.blocking_send(why);
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
