//! A router, a coordinator and a worker in this process, as they ship, over a simulated model: every step takes the
//! same time, so measurements show queueing. Has no knowledge of requests.

use checkpoint::Checkpoint;
use cluster::MemoryStore;
use coordinator::{ModelShape, PlacementPolicy};
use proto::v1::inference_client::InferenceClient;
use router::ApiKeys;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use types::{Activations, Grid, KvDtype};
use wire::{Dialer, in_memory, tcp};
use worker::sim::SimModel;

pub const MODEL: &str = "tests/reference/llama-f32-tied";
/// The modelled time of a step, without the roles' own.
const STEP_MICROS: u64 = 4000;

pub type Client = InferenceClient<Channel>;

/// The limits of each queue, and the keys.
pub struct Rooms {
    pub running_max: u32,
    pub waiting_max: u32,
    pub keys: ApiKeys,
}

pub struct House {
    pub client: Client,
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
    /// Kept to the end: a coordinator that no worker can reach has failed.
    _dialer: Dialer,
}

impl House {
    /// Returns before its replica is ready.
    pub async fn open(rooms: Rooms) -> House {
        let checkpoint = Checkpoint::open(Path::new(MODEL)).unwrap();
        let (dialer, pipes) = in_memory();
        let (shutdown, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let claim = MemoryStore::starting_at(1).claim("replica-0", "in memory");
        let coordinator =
            coordinator::serve(Box::pin(pipes), coordinator_config(&checkpoint, &rooms), claim, shutdown.clone());
        tasks.spawn(async { coordinator.await.unwrap() });
        let config = worker::Config { device: "sim".into(), memory_bytes: 1 << 30, ..worker::Config::default() };
        let sim = SimModel { vocab: checkpoint.spec().vocab, step_micros: STEP_MICROS, ..SimModel::default() };
        let worker = worker::serve(dialer.channel(), Box::new(sim), config, shutdown.clone());
        tasks.spawn(async { worker.await.unwrap() });
        let (http, grpc) = (listener().await, listener().await);
        let client = InferenceClient::new(tcp(&grpc.local_addr().unwrap().to_string()).unwrap());
        let coordinators = vec![router::CoordinatorChannel { name: "replica-0".into(), channel: dialer.channel() }];
        let requests_waiting_max = (rooms.running_max + rooms.waiting_max) as usize;
        let limits = router::RouterLimits { requests_waiting_max, ..router::RouterLimits::default() };
        let config = router::Config { limits, keys: rooms.keys, ..router::Config::default() };
        let router = faces::serve(config, coordinators, text(&checkpoint), http, grpc, shutdown.clone());
        tasks.spawn(async { router.await.unwrap() });
        House { client, shutdown, tasks, _dialer: dialer }
    }

    pub async fn close(mut self) {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }
}

fn coordinator_config(checkpoint: &Checkpoint, rooms: &Rooms) -> coordinator::Config {
    let policy = PlacementPolicy {
        grid: Grid::SOLO,
        activations: Activations::F32,
        kv_dtype: KvDtype::F16,
        kv_memory: Some(64 << 20),
        memory_permille: None,
        state_cache: None,
        context: None,
        running_max: rooms.running_max,
        slice_max: coordinator::Limits::default().chunk_tokens_max,
    };
    coordinator::Config {
        replica: "replica-0".into(),
        model: "sim".into(),
        model_path: checkpoint.path().to_owned(),
        shape: ModelShape::of(checkpoint),
        policy,
        prefix_cache: true,
        zero_kv: false,
        salt: [7; 16],
        policy_digest: None,
        mesh_seed: [7; 32],
        speaks: proto::ProtocolRange::default(),
        limits: coordinator::Limits { waiting_max: rooms.waiting_max, ..coordinator::Limits::default() },
        // No rank is lost only because a busy machine delays it.
        waits: coordinator::Timings {
            state_every: Duration::from_millis(10),
            beats_missed_max: 30_000,
            ..coordinator::Timings::default()
        },
    }
}

fn text(checkpoint: &Checkpoint) -> router::ModelText {
    router::ModelText::of(checkpoint).unwrap()
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}
