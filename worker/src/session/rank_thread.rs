//! The computing thread, or a task where time is only modelled. It owns the loader and the runner, takes work from one
//! bounded queue, and reports to the session that queued it. It waits for work, for room to report, and within a step
//! for other ranks; the session ends that last wait when it does not need the step. Has no knowledge of sockets.

use crate::assignment::{Assignment, Load, LoadError, LoadedModel};
use crate::config::KvMemory;
use crate::load::fetch::FetchError;
use crate::load::scrub::{Scrubber, SpoiltWeight};
use crate::runner::{Runner, UpcomingSteps};
use crate::session::committing::{CommitContext, InitialKvMemory, KvCommitter, KvReporting};
use crate::session::heartbeat::StepCounters;
use crate::session::leases::{ThreadLease, ThreadLeases};
use crate::tier::TierReports;
use proto::cluster::{
    Failed, KvTarget, Loaded, PagesFetched, PagesKept, PieceRun, Ready, WorkerFrame, worker_frame::Frame,
};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, Wake};
use std::thread::Thread;
use std::time::Duration;
use telemetry::spans;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use types::{Epoch, Rank, Step, StepDone};

/// Work that a session gives to the thread.
pub(crate) enum RankWork {
    Load {
        assignment: Box<Assignment>,
        lease: ThreadLease,
        reports: ReportSender,
        /// How the coordinator uses reports of the KV cache's memory.
        reporting: KvReporting,
    },
    /// All ranks of the epoch have loaded.
    Meet { epoch: Epoch },
    /// How much of the KV cache to commit, queued behind earlier steps.
    SetKvTarget(KvTarget),
    /// A step with its span at the coordinator, which is empty if it is not recorded.
    Step { step: Box<Step>, traceparent: String },
    /// The assignment has ended, and its memory can be freed.
    Release,
    /// The weights in memory differ from what was loaded.
    Spoilt,
    /// The assignment is over because its loaded bytes were bad. Answered once no copy of them is trusted.
    Distrust { done: oneshot::Sender<()> },
}

/// The channels to one session. They are weak, so that a session's stream ends with the session and not with a step
/// left behind. That step's work is then skipped.
#[derive(Clone)]
pub(crate) struct ReportSender {
    /// Frames for the coordinator, in order.
    pub up: mpsc::WeakSender<WorkerFrame>,
    /// Why this rank cannot continue. The coordinator receives a message right afterwards.
    pub lost: mpsc::WeakSender<RankLost>,
}

pub(crate) enum RankLost {
    /// Loading failed for a reason that would recur.
    Load(LoadError),
    Run(String),
}

impl RankLost {
    fn from_load_error(error: LoadError) -> RankLost {
        match error {
            // Another attempt would find the disk full again.
            error @ LoadError::Fetch { source: FetchError::NoRoom { .. }, .. } => RankLost::Load(error),
            // The next attempt may succeed.
            error @ (LoadError::Collective(_) | LoadError::Fetch { .. } | LoadError::Changed(_)) => {
                RankLost::Run(error.to_string())
            }
            error => RankLost::Load(error),
        }
    }
}

/// Polls a future on this thread to its end, and sleeps while there is no work. It enters no runtime, so the future may
/// block, and may enter a runtime of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let thread_waker = Arc::new(ThreadWaker { sleeper: std::thread::current(), is_woken: AtomicBool::new(false) });
    let waker = thread_waker.clone().into();
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return out;
        }
        // Other code parks on this thread too, and may consume a wake-up meant for this loop.
        while !thread_waker.is_woken.swap(false, Relaxed) {
            std::thread::park();
        }
    }
}

struct ThreadWaker {
    sleeper: Thread,
    is_woken: AtomicBool,
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Relaxed);
        self.sleeper.unpark();
    }
}

/// The thread's work in order; the next item can be inspected before its turn.
struct WorkQueue {
    work: mpsc::Receiver<RankWork>,
    seen: Option<RankWork>,
}

impl WorkQueue {
    async fn next(&mut self) -> Option<RankWork> {
        match self.seen.take() {
            Some(work) => Some(work),
            None => self.work.recv().await,
        }
    }
}

/// The queue's next steps of one epoch.
struct EpochSteps<'a> {
    epoch: Epoch,
    queue: &'a mut WorkQueue,
}

impl UpcomingSteps for EpochSteps<'_> {
    fn next(&mut self) -> Option<&Step> {
        if self.queue.seen.is_none() {
            // A closed queue is noticed when its turn comes.
            self.queue.seen = self.queue.work.try_recv().ok();
        }
        match &self.queue.seen {
            Some(RankWork::Step { step, .. }) if step.epoch == self.epoch => Some(&**step),
            _ => None,
        }
    }
}

/// Runs until the queue's sender is dropped.
pub(crate) async fn run(
    mut loader: Box<dyn Load>,
    work: mpsc::Receiver<RankWork>,
    progress: Arc<StepCounters>,
    leases: Arc<ThreadLeases>,
    memory: KvMemory,
    scrubber: Option<Scrubber>,
) {
    let spoilt = || scrubber.as_ref().and_then(Scrubber::spoilt);
    let mut queue = WorkQueue { work, seen: None };
    let mut state = RankState::Idle;
    let mut idle_since = Instant::now();
    while let Some(next) = queue.next().await {
        progress.set_busy(true);
        progress.add_idle(idle_since.elapsed());
        state = match (next, state) {
            (RankWork::Load { assignment, lease, reports, reporting }, old) => {
                // The old KV cache is dropped first: there may not be room for two.
                drop(old);
                let place = LoadedRank::load(&mut *loader, &assignment, lease, (reports, reporting)).await;
                place.map_or(RankState::Idle, RankState::Loaded)
            }
            (RankWork::Meet { epoch }, RankState::Loaded(place)) if place.epoch == epoch => {
                place.join_peers(&leases, &progress, memory).await.map_or(RankState::Idle, RankState::Running)
            }
            (RankWork::SetKvTarget(requested), RankState::Running(rank)) => {
                rank.set_kv_target(requested);
                RankState::Running(rank)
            }
            // No step runs with weights that are known to be wrong.
            (RankWork::Step { .. }, state @ RankState::Running(_)) if spoilt().is_some() => {
                state.report_spoilt(spoilt()).await;
                RankState::Idle
            }
            (RankWork::Step { step, traceparent }, RankState::Running(rank)) => {
                let rank = rank.run(&step, &traceparent, &progress, &mut queue).await;
                rank.map_or(RankState::Idle, RankState::Running)
            }
            (RankWork::Release, _) => RankState::Idle,
            (RankWork::Spoilt, state) => {
                state.report_spoilt(spoilt()).await;
                RankState::Idle
            }
            (RankWork::Distrust { done }, _) => {
                loader.reject_last_load();
                // The session may have stopped waiting.
                let _late = done.send(());
                RankState::Idle
            }
            // Work for an assignment that was lost meanwhile.
            (RankWork::Meet { .. } | RankWork::Step { .. } | RankWork::SetKvTarget(_), same) => same,
        };
        progress.set_busy(false);
        idle_since = Instant::now();
    }
}

/// The progress of the thread's assignment.
enum RankState {
    Idle,
    Loaded(LoadedRank),
    Running(RunningRank),
}

impl RankState {
    /// Reports that the weights are spoilt. They are not kept for the next assignment.
    async fn report_spoilt(self, spoilt: Option<SpoiltWeight>) {
        let (epoch, reports) = match &self {
            RankState::Loaded(rank) => (rank.epoch, &rank.reports),
            RankState::Running(rank) => (rank.epoch, &rank.reports),
            RankState::Idle => return,
        };
        let Some(SpoiltWeight { weight, piece, .. }) = spoilt else { return };
        let message = format!("the weight {weight} (piece {piece}) in memory differs from what was loaded");
        reports.report_spoilt(epoch, weight, message).await;
    }
}

/// An assignment loaded in one epoch, before the ranks have met.
struct LoadedRank {
    epoch: Epoch,
    rank: Rank,
    lease: ThreadLease,
    /// Whether the rank samples; other ranks report nothing of a step.
    answers: bool,
    reporting: KvReporting,
    loaded: Box<dyn LoadedModel>,
    reports: ReportSender,
}

/// A rank that has met the others and runs steps.
struct RunningRank {
    epoch: Epoch,
    rank: Rank,
    lease: ThreadLease,
    answers: bool,
    /// Dropped before the cache.
    committing: Option<KvCommitter>,
    runner: Box<dyn Runner>,
    /// The part of the runner's waiting time that was already reported.
    waited: Duration,
    done: StepDone,
    reports: ReportSender,
}

impl LoadedRank {
    async fn load(
        loader: &mut dyn Load,
        assignment: &Assignment,
        lease: ThreadLease,
        (reports, reporting): (ReportSender, KvReporting),
    ) -> Option<LoadedRank> {
        // A long step may have outlived the session that gave this assignment.
        if lease.is_over() {
            return None;
        }
        let (epoch, rank) = (assignment.epoch, assignment.rank);
        let attempt = catch_panic(|| loader.load(assignment, lease.cancel_flag()));
        let (loaded, ready) = reports.ok_or_report(epoch, &lease, attempt).await?;
        let message = Loaded {
            epoch_incarnation: epoch.incarnation,
            epoch_n: epoch.n,
            policy_digest: ready.policy.0.to_vec(),
            weight_bytes: ready.weight_bytes,
            unread: ready.unread.unwrap_or_default(),
            weights: ready.weights.iter().map(PieceRun::from).collect(),
        };
        let answers = assignment.layout.part(rank).is_sampler();
        reports.send(Frame::Loaded(message)).await.then(|| LoadedRank {
            epoch,
            rank,
            lease,
            answers,
            reporting,
            loaded,
            reports,
        })
    }

    async fn join_peers(
        self,
        leases: &ThreadLeases,
        counters: &Arc<StepCounters>,
        memory: KvMemory,
    ) -> Option<RunningRank> {
        let LoadedRank { epoch, rank, lease, answers, reporting, loaded, reports } = self;
        let met = catch_panic(|| {
            let mut runner = loaded.join_peers(lease.cancel_flag())?;
            let (reports, counters) = (reports.clone(), counters.clone());
            let rank = || CommitContext { epoch, reports, counters, memory, reporting };
            let committing = runner.take_kv_memory().map(|commit| KvCommitter::begin(commit, rank())).transpose()?;
            Ok((runner, committing.unzip()))
        });
        let (mut runner, (committing, kv)) = reports.ok_or_report(epoch, &lease, met).await?;
        let InitialKvMemory { parts: kv_parts, grows: kv_grows } = kv.unwrap_or_default();
        if !leases.register_abort(&lease, runner.abort_handle()) {
            return None;
        }
        let (waited, done) = (Duration::ZERO, StepDone::default());
        let kv_tier = runner.start_tier(reports.tier_reports(epoch));
        let ready = Ready { epoch_incarnation: epoch.incarnation, epoch_n: epoch.n, kv_parts, kv_grows, kv_tier };
        reports.send(Frame::Ready(ready)).await.then(|| RunningRank {
            epoch,
            rank,
            lease,
            answers,
            committing,
            runner,
            waited,
            done,
            reports,
        })
    }
}

impl RunningRank {
    fn set_kv_target(&self, requested: KvTarget) {
        let epoch = Epoch { incarnation: requested.epoch_incarnation, n: requested.epoch_n };
        if let Some(committing) = self.committing.as_ref().filter(|_| epoch == self.epoch) {
            committing.set_target(requested);
        }
    }

    /// Runs a step. Gives the rank up if the step fails or the session is gone.
    async fn run(
        mut self,
        step: &Step,
        traceparent: &str,
        progress: &StepCounters,
        queue: &mut WorkQueue,
    ) -> Option<RunningRank> {
        if self.reports.are_closed() {
            return None;
        }
        if step.epoch != self.epoch {
            let (step, epoch) = (step.id.0, step.epoch);
            tracing::warn!(step, %epoch, ours = %self.epoch, "dropping a step of another epoch");
            return Some(self);
        }
        self.done.id = step.id;
        self.done.epoch = step.epoch;
        let pass = (!traceparent.is_empty()).then(|| spans::pass(traceparent, step.id.0, self.rank.0));
        let begun = Instant::now();
        progress.begin_step();
        let mut upcoming = EpochSteps { epoch: self.epoch, queue };
        let result = catch_unwind(AssertUnwindSafe(|| self.runner.run_with(step, &mut upcoming, &mut self.done)));
        let mut result = result.map_err(|panic| panic_message(&*panic).to_owned());
        if let (Ok(Ok(())), Some(rest)) = (&result, self.runner.remaining_wait()) {
            result = Ok(rest.await);
        }
        let waited = self.note(begun.elapsed(), progress);
        if let Some(pass) = pass {
            pass.record_wait(waited);
        }
        let (message, guilty) = match result {
            Ok(Ok(())) if self.answers => {
                let done = Frame::Done((&self.done).into());
                return self.reports.send(done).await.then_some(self);
            }
            Ok(Ok(())) => return Some(self),
            // The lease's end has its own reason, which is already known.
            _ if self.lease.is_over() => return None,
            Ok(Err(error)) => (error.to_string(), error.guilty()),
            Err(panicked) => (format!("step {} panicked: {panicked}", step.id.0), None),
        };
        self.reports.report_lost(self.epoch, message.clone(), guilty, RankLost::Run(message)).await;
        None
    }

    /// Returns how long this step waited for other ranks.
    fn note(&mut self, took: Duration, progress: &StepCounters) -> Duration {
        let waited = self.runner.total_wait();
        let of_step = waited.saturating_sub(self.waited);
        progress.add_step(took, of_step);
        self.waited = waited;
        of_step
    }
}

impl ReportSender {
    /// Returns what sends the reports of a tier, from threads of its own.
    fn tier_reports(&self, epoch: Epoch) -> TierReports {
        let [fetched, kept] = [(); 2].map(|()| self.up.clone());
        let send = |up: &mpsc::WeakSender<WorkerFrame>, frame: Frame| {
            // Without a stream the epoch is over.
            if let Some(up) = up.upgrade() {
                let _over = up.blocking_send(WorkerFrame { frame: Some(frame) });
            }
        };
        TierReports {
            fetched: Arc::new(move |done| send(&fetched, Frame::Fetched(PagesFetched::from(&done)))),
            kept: Box::new(move |keys| {
                PagesKept::of(epoch, &keys).into_iter().for_each(|pages| send(&kept, Frame::Pages(pages)));
            }),
        }
    }

    fn are_closed(&self) -> bool {
        self.up.upgrade().is_none_or(|up| up.is_closed())
    }

    /// Returns the result of loading or meeting. Returns None if it failed, which is then reported, or if the lease has
    /// ended.
    async fn ok_or_report<T>(&self, epoch: Epoch, lease: &ThreadLease, result: LoadOutcome<T>) -> Option<T> {
        if lease.is_over() {
            // The lease's end has its own reason, which is already known.
            return None;
        }
        match result {
            Ok(Ok(got)) => return Some(got),
            Ok(Err(error)) => {
                self.report_lost(epoch, error.to_string(), error.guilty(), RankLost::from_load_error(error)).await;
            }
            Err(panicked) => {
                let message = format!("the loader panicked: {panicked}");
                self.report_lost(epoch, message.clone(), None, RankLost::Run(message)).await;
            }
        }
        None
    }

    /// Sends a frame, and waits for room: the session drains its queue or closes it.
    async fn send(&self, frame: Frame) -> bool {
        let Some(up) = self.up.upgrade() else { return false };
        up.send(WorkerFrame { frame: Some(frame) }).await.is_ok()
    }

    /// Reports that this rank cannot continue, and names the rank to blame if that is another one. This rank is then
    /// sound, and waits for the coordinator's decision.
    pub async fn report_lost(&self, epoch: Epoch, message: String, guilty: Option<Rank>, why: RankLost) {
        let guilty_rank = guilty.map(|rank| rank.0.into());
        let Epoch { incarnation: epoch_incarnation, n: epoch_n } = epoch;
        let failed = Failed { epoch_incarnation, epoch_n, message, guilty_rank, ..Failed::default() };
        self.report_failed(failed, why).await;
    }

    /// Reports that this rank's weights have changed in its memory.
    async fn report_spoilt(&self, epoch: Epoch, spoilt_weight: String, message: String) {
        let Epoch { incarnation: epoch_incarnation, n: epoch_n } = epoch;
        let why = RankLost::Run(message.clone());
        self.report_failed(Failed { epoch_incarnation, epoch_n, message, guilty_rank: None, spoilt_weight }, why).await;
    }

    async fn report_failed(&self, failed: Failed, why: RankLost) {
        // The session receives the reason first: the coordinator closes the stream once it has read this frame, and
        // that end has no reason.
        if let Some(lost) = self.lost.upgrade().filter(|_| failed.guilty_rank.is_none()) {
            // A session that is gone needs no reason, and the first reason is enough.
            let _known = lost.try_send(why);
        }
        self.send(Frame::Failed(failed)).await;
    }
}

/// The result of loading or meeting, or the message of a panic.
type LoadOutcome<T> = Result<Result<T, LoadError>, String>;

fn catch_panic<T>(go: impl FnOnce() -> Result<T, LoadError>) -> LoadOutcome<T> {
    catch_unwind(AssertUnwindSafe(go)).map_err(|panic| panic_message(&*panic).to_owned())
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_would_fail_again_ends_the_worker_and_no_other_does() {
        let check = |source: FetchError, is_final: bool| {
            let lost = RankLost::from_load_error(LoadError::Fetch { path: "model".into(), source });
            assert_eq!(matches!(lost, RankLost::Load(_)), is_final);
        };
        check(FetchError::NoRoom { path: "cache".into(), needed: 2, free: 1 }, true);
        check(FetchError::Silence, false);
    }
}
