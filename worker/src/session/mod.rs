//! One stream to a coordinator, from the hello to its end: an assignment, steps down and answers up. Never blocks: the
//! computing thread does. Has no knowledge of what a step computes.

pub mod committing;
pub mod heartbeat;
pub mod leases;
pub mod rank_thread;
pub mod scrubbing;

use crate::assignment::{Assignment, MeshSecret};
use crate::config::{Config, ExecutionMode};
use crate::error::Error;
use crate::runner::guesses::{DraftCost, DraftModelConfig, GuessConfig, GuessSource, MtpConfig};
use crate::session::committing::KvReporting;
use crate::session::heartbeat::{HeartbeatSender, HeartbeatSource, StepCounters};
use crate::session::leases::ThreadLeases;
use crate::session::rank_thread::{RankLost, RankWork, ReportSender};
use collective::MeshTimeouts;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{
    Assign, Failed, Guesses, KvTarget, Leaving, Meet, RankFrame, WorkerFrame, WorkerHello, rank_frame,
    worker_frame::Frame,
};
use proto::since;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use types::{Epoch, NgramLimits, Request, Step};
use wire::HandshakeRefusal;

/// The end of a session after which another may begin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("the coordinator is gone: {0}")]
    Gone(String),
    #[error("the coordinator dismissed this rank: {0}")]
    Left(String),
    #[error("this rank failed: {0}")]
    Failed(String),
    #[error("this worker received a stop signal")]
    Stopped,
}

impl SessionEnd {
    pub fn from_status(status: &Status) -> SessionEnd {
        SessionEnd::Gone(format!("{}: {}", status.code(), status.message()))
    }
}

/// The state that all sessions of a worker share.
pub(crate) struct Worker {
    pub config: Config,
    pub footing: ExecutionMode,
    pub work: mpsc::Sender<RankWork>,
    pub progress: Arc<StepCounters>,
    pub leases: Arc<ThreadLeases>,
    pub shutdown: CancellationToken,
}

/// Ends the session's lease on drop: a step left behind must not wait for other ranks.
struct LeaseGuard<'a>(&'a ThreadLeases);

impl Drop for LeaseGuard<'_> {
    fn drop(&mut self) {
        self.0.next();
    }
}

impl Worker {
    /// Runs one session to its end. An `Err` would only recur in another attempt.
    pub async fn session(&self, channel: Channel) -> Result<SessionEnd, Error> {
        let (up, frames) = mpsc::channel(self.config.frames_up_max);
        let hello = WorkerFrame { frame: Some(Frame::Hello(self.hello())) };
        up.try_send(hello).expect("an empty queue has room for one");
        let mut client = CoordinatorClient::new(channel)
            .max_decoding_message_size(proto::FRAME_BYTES_MAX)
            .max_encoding_message_size(proto::FRAME_BYTES_MAX);
        let join = timeout(self.config.join_timeout, client.join(ReceiverStream::new(frames)));
        let Some(joined) = self.shutdown.run_until_cancelled(join).await else { return Ok(SessionEnd::Stopped) };
        let down = match joined {
            Err(_) => return Ok(SessionEnd::Gone("it did not answer the hello".into())),
            Ok(Err(status)) if status.code() == Code::FailedPrecondition => {
                return Err(Error::Refused(status.message().into()));
            }
            Ok(Err(status)) => return classify_refusal(&status),
            Ok(Ok(response)) => response.into_inner(),
        };
        let pulse =
            HeartbeatSource { progress: self.progress.clone(), leases: self.leases.clone(), up: up.downgrade() };
        let _heart = HeartbeatSender::start(self.footing, pulse, self.config.heartbeat_every)?;
        let (lost, rank_lost) = mpsc::channel(1);
        let _end = LeaseGuard(&self.leases);
        let reports = ReportSender { up: up.downgrade(), lost: lost.downgrade() };
        // The strong `lost` lives here, so that the computing thread's weak one works for the whole session.
        let ended = Session { worker: self, up, reports, down, epoch: None }.run(rank_lost).await;
        drop(lost);
        ended
    }

    fn hello(&self) -> WorkerHello {
        let config = &self.config;
        WorkerHello {
            version: config.speaks.version.clone(),
            protocols: config.speaks.protocols,
            host: config.host.clone(),
            pid: config.pid,
            device: config.device.clone(),
            memory_bytes: config.memory_bytes,
            threads: config.threads,
            cores: config.cores,
            mesh_address: config.mesh_address.clone(),
        }
    }
}

/// Decides how a refusal ends the session. If one side does not trust the other, another attempt is useless.
fn classify_refusal(status: &Status) -> Result<SessionEnd, Error> {
    match HandshakeRefusal::cause_of(status) {
        Some(refused) if refused.is_final() => Err(Error::Refused(refused.to_string())),
        Some(refused) => Ok(SessionEnd::Gone(refused.to_string())),
        None => Ok(SessionEnd::from_status(status)),
    }
}

struct Session<'a> {
    worker: &'a Worker,
    up: mpsc::Sender<WorkerFrame>,
    reports: ReportSender,
    down: Streaming<RankFrame>,
    /// The epoch of the last assignment.
    epoch: Option<Epoch>,
}

impl Session<'_> {
    async fn run(mut self, lost: mpsc::Receiver<RankLost>) -> Result<SessionEnd, Error> {
        let shutdown = self.worker.shutdown.clone();
        match shutdown.run_until_cancelled(self.serve(lost)).await {
            Some(ended) => ended,
            None => Ok(self.leave().await),
        }
    }

    async fn serve(&mut self, mut lost: mpsc::Receiver<RankLost>) -> Result<SessionEnd, Error> {
        loop {
            let frame = tokio::select! {
                biased;
                Some(why) = lost.recv() => return self.rank_lost(why).await,
                frame = self.down.message() => frame,
            };
            let ended = match frame {
                Ok(Some(RankFrame { frame: Some(frame) })) => self.handle(frame).await,
                Ok(Some(RankFrame { frame: None })) => self.fail("a frame without content".into()).await,
                Ok(None) => Some(SessionEnd::Gone("it closed the stream".into())),
                // As at the hello: this worker is not what the replica needs, now or the next time.
                Err(status) if status.code() == Code::FailedPrecondition => {
                    return Err(Error::Refused(status.message().into()));
                }
                // The same applies to the bytes that it has loaded.
                Err(status) if status.code() == Code::DataLoss => {
                    self.reject_last_load().await;
                    return Err(Error::Refused(status.message().into()));
                }
                Err(status) => Some(SessionEnd::from_status(&status)),
            };
            if let Some(ended) = ended {
                return Ok(ended);
            }
        }
    }

    async fn handle(&mut self, frame: rank_frame::Frame) -> Option<SessionEnd> {
        match frame {
            rank_frame::Frame::Assign(assign) => self.assign(assign).await,
            rank_frame::Frame::Step(bytes) => match proto::decode_traced_step(&bytes) {
                Ok((step, traceparent)) => self.step(step, traceparent).await,
                Err(malformed) => self.fail(format!("invalid step: {malformed}")).await,
            },
            rank_frame::Frame::Meet(meet) => self.meet(meet).await,
            rank_frame::Frame::KvTarget(requested) => self.set_kv_target(requested).await,
            rank_frame::Frame::Release(_) => self.release().await,
            rank_frame::Frame::Leave(leave) => Some(SessionEnd::Left(leave.reason)),
        }
    }

    async fn assign(&mut self, assign: Assign) -> Option<SessionEnd> {
        let (protocol, reporting) = (assign.protocol, KvReporting::of(assign.protocol, assign.sends_kv_target));
        if assign.guesses.is_some() && !self.knows(since::GUESSES) {
            return self.fail("this build does not support guesses".into()).await;
        }
        let assignment = match assignment(assign) {
            Ok(assignment) => assignment,
            Err(malformed) => return self.fail(format!("invalid assignment: {malformed}")).await,
        };
        tracing::info!(epoch = %assignment.epoch, rank = assignment.rank.0, protocol, "received an assignment");
        self.epoch = Some(assignment.epoch);
        let lease = self.worker.leases.next();
        let (assignment, reports) = (Box::new(assignment), self.reports.clone());
        self.hand_over(RankWork::Load { assignment, lease, reports, reporting }).await
    }

    async fn meet(&mut self, meet: Meet) -> Option<SessionEnd> {
        let epoch = Epoch { incarnation: meet.epoch_incarnation, n: meet.epoch_n };
        if self.epoch != Some(epoch) {
            tracing::warn!(%epoch, "ignoring a meet frame of another epoch");
            return None;
        }
        self.hand_over(RankWork::Meet { epoch }).await
    }

    /// Queued behind earlier steps, which may use blocks that are to be given back.
    async fn set_kv_target(&mut self, requested: KvTarget) -> Option<SessionEnd> {
        self.hand_over(RankWork::SetKvTarget(requested)).await
    }

    /// Ends the thread's work for the finished assignment.
    async fn release(&mut self) -> Option<SessionEnd> {
        self.epoch = None;
        self.worker.leases.next();
        self.hand_over(RankWork::Release).await
    }

    /// This process ends soon. Before that, the next process must be kept from trusting the cached bytes.
    async fn reject_last_load(&mut self) {
        let (done, is_done) = oneshot::channel();
        self.worker.leases.next();
        let forgotten = async {
            let _gone = self.hand_over(RankWork::Distrust { done }).await;
            is_done.await
        };
        if !matches!(timeout(self.worker.config.farewell_timeout, forgotten).await, Ok(Ok(()))) {
            tracing::warn!("the next process may trust the rejected bytes again: the computing thread is busy");
        }
    }

    async fn step(&mut self, step: Step, traceparent: String) -> Option<SessionEnd> {
        if self.epoch != Some(step.epoch) {
            tracing::warn!(step = step.id.0, epoch = %step.epoch, "dropping a step of another epoch");
            return None;
        }
        let knows_all = self.knows(since::NEWEST_OF_REQUESTS);
        if !knows_all && step.starts.iter().any(Request::needs_newest_features) {
            return self
                .fail("this build does not support a request's grammar, named logprobs or penalty window".into())
                .await;
        }
        match step.supported() {
            Ok(()) => self.hand_over(RankWork::Step { step: Box::new(step), traceparent }).await,
            Err(unsupported) => self.fail(unsupported.to_string()).await,
        }
    }

    fn knows(&self, number: u32) -> bool {
        self.worker.config.speaks.knows(number)
    }

    /// The queue is as long as a coordinator may plan ahead. More work waits here, and the stream's window fills.
    async fn hand_over(&self, work: RankWork) -> Option<SessionEnd> {
        let sent = self.worker.work.send(work).await;
        sent.err().map(|_| SessionEnd::Failed("the computing thread is gone".into()))
    }

    async fn fail(&mut self, message: String) -> Option<SessionEnd> {
        let epoch = self.epoch.unwrap_or_default();
        let failed = Failed {
            epoch_incarnation: epoch.incarnation,
            epoch_n: epoch.n,
            message: message.clone(),
            guilty_rank: None,
            spoilt_weight: String::new(),
        };
        // If the queue stays full for so long, the stream is practically dead, and its end reports enough.
        let frame = WorkerFrame { frame: Some(Frame::Failed(failed)) };
        let _late = timeout(self.worker.config.farewell_timeout, self.up.send(frame)).await;
        self.until_closed().await;
        Some(SessionEnd::Failed(message))
    }

    /// Announces the departure before the rank is gone, so that another worker can take its place.
    async fn leave(&mut self) -> SessionEnd {
        let frame = WorkerFrame { frame: Some(Frame::Leaving(Leaving {})) };
        let _late = timeout(self.worker.config.farewell_timeout, self.up.send(frame)).await;
        self.until_closed().await;
        SessionEnd::Stopped
    }

    /// Waits until the coordinator closes the stream, which it does once it has read that this rank failed. An earlier
    /// end could lose that message.
    async fn until_closed(&mut self) {
        let until_closed = async { while let Ok(Some(_)) = self.down.message().await {} };
        let _late = timeout(self.worker.config.farewell_timeout, until_closed).await;
    }

    /// The computing thread is sending `Failed`.
    async fn rank_lost(&mut self, why: RankLost) -> Result<SessionEnd, Error> {
        self.until_closed().await;
        match why {
            RankLost::Load(error) => Err(Error::Load(error)),
            RankLost::Run(message) => Ok(SessionEnd::Failed(message)),
        }
    }
}

fn assignment(assign: Assign) -> Result<Assignment, proto::Malformed> {
    let (rank, layout) = assign.layout()?;
    let (mesh_secret, policy) = (MeshSecret(assign.secret()?), assign.policy()?);
    let (activations, kv_dtype, mode) = (assign.activations()?, assign.kv_dtype()?, assign.mode()?);
    let default = MeshTimeouts::default();
    let or = |millis: u64, default| if millis == 0 { default } else { Duration::from_millis(millis) };
    Ok(Assignment {
        epoch: Epoch { incarnation: assign.epoch_incarnation, n: assign.epoch_n },
        rank,
        layout,
        mesh_addresses: assign.mesh_addresses,
        mesh_secret,
        model_path: assign.model_path.into(),
        activations,
        kv_dtype,
        mode,
        n_blocks: assign.n_blocks,
        kv_bytes: assign.kv_bytes,
        context: assign.context,
        batch_tokens_max: assign.batch_tokens_max,
        running_max: assign.running_max,
        timeouts: MeshTimeouts {
            join: or(assign.meet_max_millis, default.join),
            op: or(assign.exchange_max_millis, default.op),
        },
        policy,
        reading: assign.reading,
        zero_kv: assign.zero_kv,
        guesses: assign.guesses.map_or_else(GuessConfig::default, guesses),
    })
}

fn guesses(guesses: Guesses) -> GuessConfig {
    let default = NgramLimits::default();
    let or = |n: u32, default: u16| if n == 0 { default } else { u16::try_from(n).unwrap_or(u16::MAX) };
    let least = or(guesses.ngram_least, default.least);
    let limits = NgramLimits { least, most: or(guesses.ngram_most, default.most) };
    let source = if guesses.no_ngrams { GuessSource::Off } else { GuessSource::Ngrams(limits) };
    let learns = |cost: &Option<proto::cluster::DraftCost>| cost.is_some_and(|cost| cost.is_learned);
    let cost = |cost: Option<proto::cluster::DraftCost>| {
        cost.map(|cost| DraftCost { row_permille: cost.row_permille, pass_permille: cost.pass_permille })
    };
    let draft_model = guesses.draft_model.map(|draft| DraftModelConfig {
        path: draft.path.into(),
        kv_bytes: draft.kv_bytes,
        learns_cost: learns(&draft.cost),
        cost: cost(draft.cost),
    });
    let mtp = guesses.mtp.map(|mtp| MtpConfig {
        kv_bytes: mtp.kv_bytes,
        learns_cost: learns(&mtp.cost),
        cost: cost(mtp.cost),
    });
    GuessConfig { source, n_max: or(guesses.n_max, u16::MAX), draft_model, mtp }
}
