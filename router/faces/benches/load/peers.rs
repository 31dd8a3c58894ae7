//! The router's peers. A bare tonic server answers each request with one token, or forwards another server's answer. A
//! coordinator without a cluster returns one token of each request at once.

use crate::Client;
use proto::cluster as wire;
use proto::cluster::coordinator_server::{Coordinator, CoordinatorServer};
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame::Frame as Up;
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::inference_server::Inference;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

type Replies<T> = ReceiverStream<Result<T, Status>>;

/// Unread frames of one stream.
const FRAMES_MAX: usize = 1024;
/// How often the coordinator sends its state.
const STATE_EVERY: Duration = Duration::from_secs(1);

pub struct Bare {
    pub behind: Option<Client>,
}

#[tonic::async_trait]
impl Inference for Bare {
    type GenerateStream = Replies<v1::GenerateReply>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let (replies, out) = mpsc::channel(8);
        match self.behind.clone() {
            None => {
                let started = v1::Started { model: "bare".into(), prompt_tokens: 5, ..Default::default() };
                let delta = v1::Delta { text: "x".into(), token_ids: vec![1], ..Default::default() };
                let finished = v1::Finished { reason: 2, ..Default::default() };
                for event in [Event::Started(started), Event::Delta(delta), Event::Finished(finished)] {
                    let _gone = replies.try_send(Ok(v1::GenerateReply { event: Some(event) }));
                }
            }
            Some(mut behind) => {
                let mut peer_replies = behind.generate(request.into_inner()).await?.into_inner();
                tokio::spawn(async move {
                    while let Some(reply) = peer_replies.next().await {
                        if replies.send(reply).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
        Ok(Response::new(ReceiverStream::new(out)))
    }

    async fn embed(&self, _: Request<v1::EmbedRequest>) -> Result<Response<v1::EmbedReply>, Status> {
        Err(nothing())
    }

    async fn classify(&self, _: Request<v1::ClassifyRequest>) -> Result<Response<v1::ClassifyReply>, Status> {
        Err(nothing())
    }

    async fn tokenize(&self, _: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeReply>, Status> {
        Err(nothing())
    }

    async fn detokenize(&self, _: Request<v1::DetokenizeRequest>) -> Result<Response<v1::DetokenizeReply>, Status> {
        Err(nothing())
    }

    async fn list_models(&self, _: Request<v1::ListModelsRequest>) -> Result<Response<v1::ListModelsReply>, Status> {
        Err(nothing())
    }

    async fn get_topology(&self, _: Request<v1::GetTopologyRequest>) -> Result<Response<v1::Topology>, Status> {
        Err(nothing())
    }
}

fn nothing() -> Status {
    Status::unimplemented("this only generates")
}

pub struct Stub;

impl Stub {
    pub fn server() -> CoordinatorServer<Stub> {
        CoordinatorServer::new(Stub)
    }
}

#[tonic::async_trait]
impl Coordinator for Stub {
    type AttachStream = Replies<wire::ReplicaFrame>;
    type JoinStream = Replies<wire::RankFrame>;
    type ReadModelStream = Replies<wire::ModelBytes>;

    async fn attach(&self, up: Request<Streaming<wire::RouterFrame>>) -> Result<Response<Self::AttachStream>, Status> {
        let (frames, out) = mpsc::channel(FRAMES_MAX);
        tokio::spawn(serve_router(up.into_inner(), frames));
        Ok(Response::new(ReceiverStream::new(out)))
    }

    async fn join(&self, _: Request<Streaming<wire::WorkerFrame>>) -> Result<Response<Self::JoinStream>, Status> {
        Err(nothing())
    }

    async fn scale(&self, _: Request<wire::ScaleRequest>) -> Result<Response<wire::ScaleReply>, Status> {
        Err(nothing())
    }

    async fn reload(&self, _: Request<wire::ReloadRequest>) -> Result<Response<wire::ReloadReply>, Status> {
        Err(nothing())
    }

    async fn get_hashes(&self, _: Request<wire::GetHashesRequest>) -> Result<Response<wire::WeightHashes>, Status> {
        Err(nothing())
    }

    async fn get_model(&self, _: Request<wire::GetModelRequest>) -> Result<Response<wire::ModelFiles>, Status> {
        Err(nothing())
    }

    async fn read_model(&self, _: Request<wire::ReadModelRequest>) -> Result<Response<Self::ReadModelStream>, Status> {
        Err(nothing())
    }
}

async fn serve_router(mut up: Streaming<wire::RouterFrame>, frames: mpsc::Sender<Result<wire::ReplicaFrame, Status>>) {
    let send = async |frame| frames.send(Ok(wire::ReplicaFrame { frame: Some(frame) })).await.is_ok();
    let mut states = tokio::time::interval(STATE_EVERY);
    send(Frame::Welcome(welcome())).await;
    loop {
        let goes_on = tokio::select! {
            received = up.message() => match received {
                Ok(Some(wire::RouterFrame { frame: Some(Up::Submit(request)) })) => send(answer(&request)).await,
                Ok(Some(_)) => true,
                Ok(None) | Err(_) => false,
            },
            _ = states.tick() => send(Frame::State(state())).await,
        };
        if !goes_on {
            return;
        }
    }
}

/// Returns one token. It is the last if the request allows no more; otherwise nothing follows.
fn answer(request: &wire::Request) -> Frame {
    let n_tokens = request.sampling.as_ref().map_or(1, |sampling| sampling.tokens_max);
    let finish = if n_tokens == 1 { wire::Finish::Length } else { wire::Finish::Unspecified };
    let tokens = vec![wire::TokenOut { token: 65, ..Default::default() }];
    let output = wire::Output { id: request.id, tokens, finish: finish.into(), ..Default::default() };
    Frame::Outputs(wire::Outputs { outputs: vec![output] })
}

fn welcome() -> wire::Welcome {
    wire::Welcome {
        version: proto::VERSION.into(),
        router: 1,
        replica: "stub".into(),
        model: "stub".into(),
        context: 4096,
        policy_digest: vec![7; 32],
        salt: vec![7; 16],
        vocab: 256,
        incarnation: 1,
        ..Default::default()
    }
}

fn state() -> wire::State {
    wire::State { phase: wire::state::Phase::Ready.into(), epoch_incarnation: 1, epoch_n: 1, ..Default::default() }
}
