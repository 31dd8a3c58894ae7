//! The thread that computes. It owns the loader and the runner, takes work from one bounded queue and reports up the
//! session that gave the work. Knows nothing of sockets; waits for work, for room to report, and within a step for
//! other ranks: that wait the session ends, when it has no use for the step any more.

use crate::heartbeat::Progress;
use crate::runner::{Assignment, Load, LoadError, Runner};
use collective::AbortHandle;
use proto::cluster::{Failed, Ready, WorkerFrame, worker_frame::Frame};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use telemetry::spans;
use tokio::sync::mpsc;
use types::{Epoch, Rank, Step, StepDone};

/// What a session asks of the thread.
pub(crate) enum Work {
    Load {
        assignment: Assignment,
        turn: Turn,
        reports: Reports,
    },
    /// With its span at the coordinator; empty where nobody records it.
    Step {
        step: Step,
        traceparent: String,
    },
}

/// Who may sit: of all places that sessions were given, the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turn(u64);

/// How a session frees the thread from a place that is over: what it waits for there ends at once.
#[derive(Default)]
pub(crate) struct Turns(Mutex<State>);

#[derive(Default)]
struct State {
    last: Turn,
    seated: Option<AbortHandle>,
}

impl Turns {
    /// Ends every turn before this one.
    pub fn next(&self) -> Turn {
        let mut state = self.state();
        state.last.0 += 1;
        if let Some(handle) = state.seated.take() {
            handle.abort();
        }
        state.last
    }

    fn is_over(&self, turn: Turn) -> bool {
        self.state().last != turn
    }

    /// False if the turn ended before its place was taken.
    fn sit(&self, turn: Turn, handle: Option<AbortHandle>) -> bool {
        let mut state = self.state();
        let is_on = state.last == turn;
        if is_on {
            state.seated = handle;
        }
        is_on
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where one session hears from the thread. Weak, so that a session's stream ends with the session and not with the
/// step that it left behind; then its work is skipped.
#[derive(Clone)]
pub(crate) struct Reports {
    /// Frames for the coordinator, in order.
    pub up: mpsc::WeakSender<WorkerFrame>,
    /// Why this rank cannot go on. The coordinator is told right afterwards.
    pub lost: mpsc::WeakSender<SeatLost>,
}

pub(crate) enum SeatLost {
    /// It would only be so again.
    Load(LoadError),
    Run(String),
}

impl SeatLost {
    fn by(error: LoadError) -> SeatLost {
        match error {
            // The next attempt may fare better.
            error @ (LoadError::Collective(_) | LoadError::Fetch { .. }) => SeatLost::Run(error.to_string()),
            error => SeatLost::Load(error),
        }
    }
}

/// Runs until the queue's sender is dropped.
pub(crate) fn run(
    mut loader: Box<dyn Load>,
    mut work: mpsc::Receiver<Work>,
    progress: Arc<Progress>,
    turns: Arc<Turns>,
) {
    let mut seat = None;
    let mut idle_since = Instant::now();
    while let Some(next) = work.blocking_recv() {
        progress.add_idle(idle_since.elapsed());
        match next {
            // A long load outlived the session that asked for this one.
            Work::Load { turn, .. } if turns.is_over(turn) => seat = None,
            Work::Load { assignment, turn, reports } => {
                // The old cache goes first: there may not be room for two.
                drop(seat.take());
                seat = Seat::take(&mut *loader, &assignment, turn, &turns, reports);
            }
            Work::Step { step, traceparent } => {
                seat = seat.and_then(|seat: Seat| seat.run(&step, &traceparent, &progress, &turns));
            }
        }
        idle_since = Instant::now();
    }
}

/// A place taken in one epoch.
struct Seat {
    epoch: Epoch,
    rank: Rank,
    turn: Turn,
    /// It samples; the others have nothing to say of a step.
    answers: bool,
    runner: Box<dyn Runner>,
    /// Of the runner's waiting, what has been reported.
    waited: Duration,
    done: StepDone,
    reports: Reports,
}

impl Seat {
    fn take(
        loader: &mut dyn Load,
        assignment: &Assignment,
        turn: Turn,
        turns: &Turns,
        reports: Reports,
    ) -> Option<Seat> {
        let epoch = assignment.epoch;
        if !turns.sit(turn, loader.abort_handle()) {
            return None;
        }
        let (runner, ready) = match catch_unwind(AssertUnwindSafe(|| loader.load(assignment))) {
            Ok(Ok(loaded)) => loaded,
            // Whoever ended the turn knows.
            _ if turns.is_over(turn) => return None,
            Ok(Err(error)) => {
                let (message, guilty) = (error.to_string(), error.guilty());
                reports.lost(epoch, message, guilty, SeatLost::by(error));
                return None;
            }
            Err(panic) => {
                let message = format!("the loader panicked: {}", panic_message(&*panic));
                reports.lost(epoch, message.clone(), None, SeatLost::Run(message));
                return None;
            }
        };
        if !turns.sit(turn, runner.abort_handle()) {
            return None;
        }
        let ready = Ready {
            epoch_incarnation: epoch.incarnation,
            epoch_n: epoch.n,
            policy_digest: ready.policy.0.to_vec(),
            weight_bytes: ready.weight_bytes,
        };
        let answers = assignment.layout.part(assignment.rank).is_sampler();
        let (rank, waited, done) = (assignment.rank, Duration::ZERO, StepDone::default());
        reports.send(Frame::Ready(ready)).then(|| Seat { epoch, rank, turn, answers, runner, waited, done, reports })
    }

    /// The seat is given up when the step fails or nobody listens any more.
    fn run(mut self, step: &Step, traceparent: &str, progress: &Progress, turns: &Turns) -> Option<Seat> {
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
        let pass = (!traceparent.is_empty()).then(|| spans::pass(traceparent, step.id.0, self.rank.0));
        let begun = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| self.runner.run(step, &mut self.done)));
        let waited = self.note(begun.elapsed(), progress);
        if let Some(pass) = pass {
            pass.waited(waited);
        }
        let (message, guilty) = match result {
            Ok(Ok(())) if self.answers => return self.reports.send(Frame::Done((&self.done).into())).then_some(self),
            Ok(Ok(())) => return Some(self),
            // Whoever ended the turn knows.
            _ if turns.is_over(self.turn) => return None,
            Ok(Err(error)) => (error.to_string(), error.guilty()),
            Err(panic) => (format!("step {} panicked: {}", step.id.0, panic_message(&*panic)), None),
        };
        self.reports.lost(self.epoch, message.clone(), guilty, SeatLost::Run(message));
        None
    }

    /// How long this step waited for other ranks.
    fn note(&mut self, took: Duration, progress: &Progress) -> Duration {
        let waited = self.runner.waited();
        let of_step = waited.saturating_sub(self.waited);
        progress.add_step(took, of_step);
        self.waited = waited;
        of_step
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

    /// Says that this rank cannot go on, and whose fault it is if another's. Then this one is sound, and waits for what
    /// the coordinator makes of it.
    fn lost(&self, epoch: Epoch, message: String, guilty: Option<Rank>, why: SeatLost) {
        let guilty_rank = guilty.map(|rank| rank.0.into());
        let failed = Failed { epoch_incarnation: epoch.incarnation, epoch_n: epoch.n, message, guilty_rank };
        // The session first: the coordinator closes the stream once it has read this, and the end gives no reason.
        if let Some(lost) = self.lost.upgrade().filter(|_| guilty.is_none()) {
            // A session that is gone needs no reason.
            let _gone = lost.blocking_send(why);
        }
        self.send(Frame::Failed(failed));
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
