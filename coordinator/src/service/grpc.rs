//! The coordinator's two streams as gRPC: reads hellos and frames, and turns them into events. Decides nothing; an
//! invalid frame ends its own stream, with the reason, and no other.

use super::library::{ModelLibrary, ModelStream};
use crate::WorkerId;
use crate::config::Config;
use crate::event::{Event, Reply};
use crate::outbound::{OutboundStream, outbound};
use proto::ProtocolRange;
use proto::cluster::coordinator_server::{Coordinator, CoordinatorServer};
use proto::cluster::{GetHashesRequest, GetModelRequest, ModelFiles, Protocols, ReadModelRequest, WeightHashes};
use proto::cluster::{RankFrame, ReplicaFrame, RouterFrame, WorkerFrame, router_frame, worker_frame};
use proto::cluster::{ReloadReply, ReloadRequest, ScaleReply, ScaleRequest};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};
use types::{Grid, RequestId};

pub(crate) struct CoordinatorService {
    library: ModelLibrary,
    events: mpsc::Sender<Event>,
    hello_max: Duration,
    /// The time limit for a change to be in force: ranks load and meet.
    change_max: Duration,
    speaks: ProtocolRange,
    router_frames_max: usize,
    rank_frames_max: usize,
    /// Routers and workers are numbered in order of arrival. No number is used twice in one incarnation.
    next_router: AtomicU32,
    next_worker: AtomicU64,
}

impl CoordinatorService {
    pub fn server(events: mpsc::Sender<Event>, config: &Config) -> CoordinatorServer<CoordinatorService> {
        let service = CoordinatorService {
            library: ModelLibrary::new(config.model_path.clone()),
            events,
            hello_max: config.waits.hello_max,
            change_max: config.waits.load_max + config.waits.meet_max,
            speaks: config.speaks.clone(),
            router_frames_max: config.limits.router_frames_max,
            rank_frames_max: config.limits.rank_frames_max,
            next_router: AtomicU32::new(1),
            next_worker: AtomicU64::new(1),
        };
        CoordinatorServer::new(service)
            .max_decoding_message_size(proto::FRAME_BYTES_MAX)
            .max_encoding_message_size(proto::FRAME_BYTES_MAX)
    }

    async fn hello<T>(&self, inbound: &mut Streaming<T>) -> Result<T, Status> {
        match tokio::time::timeout(self.hello_max, inbound.message()).await {
            Err(_) => Err(Status::deadline_exceeded("no hello arrived in time")),
            Ok(Ok(None)) => Err(Status::invalid_argument("the stream ended before a hello")),
            Ok(Ok(Some(frame))) => Ok(frame),
            Ok(Err(status)) => Err(unreadable(status)),
        }
    }

    /// Requests a change from the loop, and waits until it is in force.
    async fn change<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<Response<T>, Status> {
        let (reply, answer) = oneshot::channel();
        self.send_event(event(reply)).await?;
        match tokio::time::timeout(self.change_max, answer).await {
            Ok(Ok(answer)) => answer.map(Response::new),
            Ok(Err(_)) => Err(Status::unavailable("this coordinator is shutting down")),
            Err(_) => Err(Status::deadline_exceeded("the change is not in force yet: the coordinator keeps trying")),
        }
    }

    /// Returns the protocol that this coordinator and a peer speak. Builds without a common one must fail here instead
    /// of giving wrong answers.
    fn agree_on_protocol(&self, version: &str, protocols: Option<Protocols>) -> Result<u32, Status> {
        let met = self.speaks.newest_common(ProtocolRange::of(version, protocols));
        met.map_err(|refusal| Status::failed_precondition(refusal.to_string()))
    }

    async fn send_event(&self, event: Event) -> Result<(), Status> {
        self.events.send(event).await.map_err(|_| Status::unavailable("this coordinator is shutting down"))
    }
}

/// Bytes that are no frame are the peer's fault; any other error is the connection's end.
fn unreadable(status: Status) -> Status {
    match status.code() {
        Code::Internal | Code::OutOfRange | Code::Unimplemented => {
            Status::invalid_argument(format!("malformed frame: {}", status.message()))
        }
        // The transport's message about a lost connection does not show which peer left.
        code if status.message().ends_with("error reading a body from connection") => {
            Status::new(code, "its connection closed unexpectedly: was it killed, or did it crash?")
        }
        _ => status,
    }
}

#[tonic::async_trait]
impl Coordinator for CoordinatorService {
    type AttachStream = OutboundStream<ReplicaFrame>;
    type JoinStream = OutboundStream<RankFrame>;
    type ReadModelStream = ModelStream;

    async fn get_model(&self, request: Request<GetModelRequest>) -> Result<Response<ModelFiles>, Status> {
        let GetModelRequest { version, protocols } = request.into_inner();
        self.agree_on_protocol(&version, protocols)?;
        Ok(Response::new(self.library.files().await?))
    }

    async fn read_model(&self, request: Request<ReadModelRequest>) -> Result<Response<ModelStream>, Status> {
        Ok(Response::new(self.library.read(request.get_ref()).await?))
    }

    async fn scale(&self, request: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        let ScaleRequest { version, tp, pp, protocols } = request.into_inner();
        self.agree_on_protocol(&version, protocols)?;
        let (Ok(tp), Ok(pp)) = (u16::try_from(tp), u16::try_from(pp)) else {
            return Err(Status::invalid_argument(format!("tp {tp} x pp {pp} is not a grid")));
        };
        self.change(|reply| Event::Scale { grid: Grid { tp, pp }, reply }).await
    }

    async fn reload(&self, request: Request<ReloadRequest>) -> Result<Response<ReloadReply>, Status> {
        let ReloadRequest { version, protocols } = request.into_inner();
        self.agree_on_protocol(&version, protocols)?;
        let found = self.library.read_from_disk().await?;
        self.change(|reply| Event::Reload { found, reply }).await
    }

    async fn get_hashes(&self, request: Request<GetHashesRequest>) -> Result<Response<WeightHashes>, Status> {
        let GetHashesRequest { version, weight, protocols } = request.into_inner();
        self.agree_on_protocol(&version, protocols)?;
        let (reply, served) = oneshot::channel();
        self.send_event(Event::Weights { reply }).await?;
        let served = served.await.map_err(|_| Status::unavailable("this coordinator is shutting down"))??;
        // This takes a while with some hundred thousand weights.
        let hashes = tokio::task::spawn_blocking(move || served.hashes(&weight)).await;
        hashes.map(Response::new).map_err(|_| Status::internal("the weights cannot be hashed"))
    }

    async fn attach(&self, request: Request<Streaming<RouterFrame>>) -> Result<Response<Self::AttachStream>, Status> {
        let mut inbound = request.into_inner();
        let Some(router_frame::Frame::Hello(hello)) = self.hello(&mut inbound).await?.frame else {
            return Err(Status::invalid_argument("a router's first frame must be its hello"));
        };
        let protocol = self.agree_on_protocol(&hello.version, hello.protocols)?;
        let former = hello.former;
        let router = self.next_router.fetch_add(1, Relaxed);
        if router >= RequestId::ROUTERS_MAX {
            return Err(Status::resource_exhausted("this coordinator has no router numbers left: restart it"));
        }
        tracing::debug!(router, version = hello.version, protocol, "a router attaches");
        let (frames, stream, closed) = outbound(self.router_frames_max);
        self.send_event(Event::RouterAttached { router, former, protocol, frames }).await?;
        let reader = FrameReader { inbound, events: self.events.clone(), closed };
        tokio::spawn(
            reader.run(move |frame| router_event(router, frame), move |why| Event::RouterGone { router, why }),
        );
        Ok(Response::new(stream))
    }

    async fn join(&self, request: Request<Streaming<WorkerFrame>>) -> Result<Response<Self::JoinStream>, Status> {
        let mut inbound = request.into_inner();
        let Some(worker_frame::Frame::Hello(hello)) = self.hello(&mut inbound).await?.frame else {
            return Err(Status::invalid_argument("a worker's first frame must be its hello"));
        };
        let protocol = self.agree_on_protocol(&hello.version, hello.protocols)?;
        let worker = WorkerId(self.next_worker.fetch_add(1, Relaxed));
        let (frames, stream, closed) = outbound(self.rank_frames_max);
        self.send_event(Event::WorkerJoined { worker, hello, protocol, frames }).await?;
        let reader = FrameReader { inbound, events: self.events.clone(), closed };
        tokio::spawn(reader.run(move |frame| worker_event(worker, frame), move |why| Event::RankLost { worker, why }));
        Ok(Response::new(stream))
    }
}

/// Reads one peer's frames until the peer, the loop or a bad frame ends it.
struct FrameReader<T> {
    inbound: Streaming<T>,
    events: mpsc::Sender<Event>,
    /// Cancelled when the loop has dropped this peer.
    closed: CancellationToken,
}

impl<T> FrameReader<T> {
    async fn run(mut self, event: impl Fn(T) -> Result<Event, Status>, gone: impl Fn(Status) -> Event) {
        let closed = self.closed.clone();
        let Some(why) = closed.run_until_cancelled(self.read(event)).await else { return };
        // If the loop has ended, no task receives this.
        let _ended = self.events.send(gone(why)).await;
    }

    async fn read(&mut self, event: impl Fn(T) -> Result<Event, Status>) -> Status {
        loop {
            let frame = match self.inbound.message().await {
                Ok(Some(frame)) => frame,
                Ok(None) => return Status::cancelled("the peer ended its stream"),
                Err(status) => return unreadable(status),
            };
            match event(frame) {
                Ok(event) => {
                    if self.events.send(event).await.is_err() {
                        return Status::unavailable("this coordinator is shutting down");
                    }
                }
                Err(status) => return status,
            }
        }
    }
}

fn router_event(router: u32, frame: RouterFrame) -> Result<Event, Status> {
    match frame.frame {
        Some(router_frame::Frame::Submit(request)) if RequestId(request.id).router() == router => {
            Ok(Event::Submit(Box::new(request)))
        }
        Some(router_frame::Frame::Submit(request)) => Err(not_of(router, request.id)),
        Some(router_frame::Frame::Adopt(adopt)) => match &adopt.request {
            Some(request) if RequestId(request.id).router() == router => Ok(Event::Adopt(Box::new(adopt))),
            Some(request) => Err(not_of(router, request.id)),
            None => Err(Status::invalid_argument("an adoption without a request")),
        },
        Some(router_frame::Frame::Cancel(cancel)) => {
            Ok(Event::Cancel { router, id: RequestId(cancel.id), stopped: cancel.stopped })
        }
        Some(router_frame::Frame::Recite(_)) => Ok(Event::Recite { router }),
        Some(router_frame::Frame::Hello(_)) => Err(Status::invalid_argument("a second hello")),
        None => Err(Status::invalid_argument("a frame without content")),
    }
}

fn not_of(router: u32, id: u64) -> Status {
    Status::invalid_argument(format!("request {} does not belong to router {router:x}", RequestId(id)))
}

fn worker_event(worker: WorkerId, frame: WorkerFrame) -> Result<Event, Status> {
    match frame.frame {
        Some(worker_frame::Frame::Done(done)) => Ok(Event::StepDone { worker, done: done.into() }),
        Some(worker_frame::Frame::Heartbeat(beat)) => Ok(Event::Heartbeat { worker, beat }),
        Some(worker_frame::Frame::Loaded(loaded)) => Ok(Event::RankLoaded { worker, loaded }),
        Some(worker_frame::Frame::Ready(ready)) => Ok(Event::RankReady { worker, ready }),
        Some(worker_frame::Frame::Fetched(done)) => Ok(Event::PagesFetched { worker, done: done.into() }),
        Some(worker_frame::Frame::Pages(pages)) => Ok(Event::PagesKept { worker, pages }),
        Some(worker_frame::Frame::Leaving(_)) => Ok(Event::WorkerLeaves { worker }),
        Some(worker_frame::Frame::Failed(failed)) => Ok(Event::RankFailed { worker, failed }),
        Some(worker_frame::Frame::Hello(_)) => Err(Status::invalid_argument("a second hello")),
        None => Err(Status::invalid_argument("a frame without content")),
    }
}
