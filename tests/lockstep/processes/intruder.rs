//! A hand-made worker, which can send anything. It sends heartbeats, so that it is not lost by silence.

use crate::common::node::PATIENCE;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{self, Assign, Heartbeat, Loaded, Meet, RankFrame, Ready, WorkerFrame, WorkerHello};
use proto::cluster::{rank_frame, worker_frame::Frame};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use types::{PieceRun, PolicyDigest};
use wire::{Trust, channel};

const BEAT: Duration = Duration::from_millis(50);

pub struct Intruder {
    runtime: Runtime,
    up: mpsc::Sender<WorkerFrame>,
    down: Streaming<RankFrame>,
    place: Assign,
}

impl Intruder {
    pub fn join(address: &str, mesh_address: &str) -> Result<Intruder, Status> {
        let runtime = Runtime::new().unwrap();
        let (up, frames) = mpsc::channel(64);
        let hello = WorkerHello {
            version: proto::VERSION.into(),
            host: "elsewhere".into(),
            device: "cpu".into(),
            memory_bytes: 1 << 30,
            threads: 1,
            mesh_address: mesh_address.into(),
            ..WorkerHello::default()
        };
        let down = runtime.block_on(async {
            up.send(frame(Frame::Hello(hello))).await.unwrap();
            let mut client = CoordinatorClient::new(channel(address, Trust::default()));
            let joined = timeout(PATIENCE, client.join(ReceiverStream::new(frames))).await.unwrap()?;
            Ok::<_, Status>(joined.into_inner())
        })?;
        runtime.spawn(beat(up.clone()));
        Ok(Intruder { runtime, up, down, place: Assign::default() })
    }

    /// Waits until it receives an assignment.
    pub fn assigned(&mut self) {
        loop {
            let message = self.runtime.block_on(async { timeout(PATIENCE, self.down.message()).await });
            let frame = message.unwrap().unwrap().expect("the stream stays").frame;
            if let Some(rank_frame::Frame::Assign(assign)) = frame {
                self.place = assign;
                return;
            }
        }
    }

    pub fn loaded(&mut self, policy: PolicyDigest, read: &[PieceRun]) {
        let loaded = Loaded {
            epoch_incarnation: self.place.epoch_incarnation,
            epoch_n: self.place.epoch_n,
            policy_digest: policy.0.to_vec(),
            weight_bytes: 1,
            unread: String::new(),
            weights: read.iter().map(cluster::PieceRun::from).collect(),
        };
        self.runtime.block_on(self.up.send(frame(Frame::Loaded(loaded)))).unwrap();
    }

    /// Waits until the coordinator reports that all have loaded; then reports that it has met them.
    pub fn ready(&mut self) {
        loop {
            let message = self.runtime.block_on(async { timeout(PATIENCE, self.down.message()).await });
            let frame = message.unwrap().unwrap().expect("the stream stays").frame;
            if let Some(rank_frame::Frame::Meet(Meet { epoch_incarnation, epoch_n })) = frame {
                let ready = Ready { epoch_incarnation, epoch_n, kv_parts: None, kv_grows: false, kv_tier: false };
                return self.runtime.block_on(self.up.send(self::frame(Frame::Ready(ready)))).unwrap();
            }
        }
    }

    /// The status with which the coordinator ends its stream.
    pub fn ended(&mut self) -> Status {
        loop {
            match self.runtime.block_on(async { timeout(PATIENCE, self.down.message()).await }).unwrap() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without a reason"),
                Err(status) => return status,
            }
        }
    }
}

async fn beat(up: mpsc::Sender<WorkerFrame>) {
    while up.send(frame(Frame::Heartbeat(Heartbeat::default()))).await.is_ok() {
        tokio::time::sleep(BEAT).await;
    }
}

fn frame(frame: Frame) -> WorkerFrame {
    WorkerFrame { frame: Some(frame) }
}
