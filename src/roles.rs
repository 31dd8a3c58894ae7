//! Starts the roles of a replica within this process. They talk over pipes in memory with the frames that a cluster
//! sends over sockets: there is no other way to serve.

use crate::config::{Activations, Config, Device, Isa, KvDtype};
use anyhow::Context;
use checkpoint::Checkpoint;
use cluster::MemoryStore;
use coordinator::{ModelShape, Policy};
use proto::transport;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use types::Grid;
use worker::{Load, ModelLoader, sim::Sim};

const REPLICA: &str = "local";

/// Where clients reach the router.
pub struct Doors {
    pub http: TcpListener,
    pub grpc: TcpListener,
}

impl Doors {
    pub async fn open(config: &Config) -> anyhow::Result<Doors> {
        let bind = async |what, address| {
            TcpListener::bind(address).await.with_context(|| format!("cannot listen for {what} on {address}"))
        };
        Ok(Doors { http: bind("HTTP", config.http).await?, grpc: bind("gRPC", config.grpc).await? })
    }
}

/// Runs router, coordinator and worker until `shutdown`, and then until what runs has ended. They end in the order in
/// which requests pass them, so that nothing under way loses what it needs.
pub async fn serve(
    config: &Config,
    checkpoint: &Checkpoint,
    metrics: router::Render,
    doors: Doors,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let (dialer, pipes) = transport::in_memory();
    let (router_end, coordinator_end, worker_end) = (shutdown, CancellationToken::new(), CancellationToken::new());

    let claim = MemoryStore::starting_at(micros_since_1970()).claim(REPLICA, "in this process");
    let coordinator = coordinator::serve(pipes, coordinator_config(config, checkpoint), claim, coordinator_end.clone());
    let worker =
        worker::serve(dialer.channel(), loader(config, checkpoint)?, worker_config(config), worker_end.clone());
    let router = router::serve(
        router_config(config, metrics),
        dialer.channel(),
        text(checkpoint)?,
        doors.http,
        doors.grpc,
        router_end.clone(),
    );

    let mut coordinator = Part::start("the coordinator", coordinator);
    let mut worker = Part::start("the worker", worker);
    let mut router = Part::start("the router", router);
    let first = tokio::select! {
        ended = router.ended() => ended,
        ended = coordinator.ended() => ended,
        ended = worker.ended() => ended,
    };
    let mut outcome = first;
    for (mut part, end) in [(router, router_end), (coordinator, coordinator_end), (worker, worker_end)] {
        end.cancel();
        // The first to fail is the cause; the rest must end all the same.
        let ended = part.ended().await;
        outcome = outcome.and(ended);
    }
    outcome
}

/// A role's task, and what it is called when it fails.
struct Part {
    name: &'static str,
    task: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Part {
    fn start<E>(name: &'static str, role: impl Future<Output = Result<(), E>> + Send + 'static) -> Part
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        Part { name, task: Some(tokio::spawn(async { Ok(role.await?) })) }
    }

    /// Cancel safe: the task is given up only once it has ended.
    async fn ended(&mut self) -> anyhow::Result<()> {
        let Some(task) = &mut self.task else { return Ok(()) };
        let result = task.await;
        self.task = None;
        result.with_context(|| format!("{} panicked", self.name))?.with_context(|| format!("{} failed", self.name))
    }
}

/// Epochs of this process are later than those of the one before it.
fn micros_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn router_config(config: &Config, metrics: router::Render) -> router::Config {
    let drain_max = Duration::from_secs(config.drain_seconds);
    let requests_max = config.max_waiting as usize + config.max_running as usize;
    router::Config {
        names: config.served_model_name.iter().cloned().collect(),
        limits: router::Limits {
            // Without a token yet: those that wait, and those whose prompts are being computed.
            requests_waiting_max: requests_max,
            requests_max,
            ..router::Limits::default()
        },
        waits: router::Waits { drain_max, ..router::Waits::default() },
        metrics,
    }
}

fn text(checkpoint: &Checkpoint) -> anyhow::Result<router::Text> {
    Ok(router::Text {
        tokenizer: checkpoint.tokenizer()?,
        template: checkpoint.chat_template()?,
        spec: checkpoint.spec().clone(),
        defaults: *checkpoint.defaults(),
    })
}

fn coordinator_config(config: &Config, checkpoint: &Checkpoint) -> coordinator::Config {
    let defaults = coordinator::Limits::default();
    coordinator::Config {
        replica: REPLICA.into(),
        model: config.served_model_name.clone().unwrap_or_else(|| checkpoint.spec().name.clone()),
        model_path: checkpoint.path().to_owned(),
        shape: ModelShape::of(checkpoint),
        policy: policy(config),
        prefix_cache: config.prefix_cache,
        // The cache does not outlive the process, so neither need the secret at its root.
        salt: random_salt(),
        limits: coordinator::Limits {
            waiting_max: config.max_waiting,
            batch_tokens_max: config.max_batch_tokens,
            chunk_tokens_max: config.max_chunk_tokens,
            ..defaults
        },
        waits: coordinator::Waits {
            drain_max: Duration::from_secs(config.drain_seconds),
            ..coordinator::Waits::default()
        },
    }
}

fn random_salt() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let half = || RandomState::new().hash_one(0u8).to_le_bytes();
    let mut salt = [0; 16];
    salt[..8].copy_from_slice(&half());
    salt[8..].copy_from_slice(&half());
    salt
}

pub fn policy(config: &Config) -> Policy {
    let activations = match config.activations {
        Activations::Int8 => "int8",
        Activations::F32 => "f32",
    };
    let kv_dtype = match config.kv_dtype {
        KvDtype::F16 => "f16",
        KvDtype::F32 => "f32",
    };
    Policy {
        grid: Grid::SOLO,
        activations: activations.into(),
        kv_dtype: kv_dtype.into(),
        kv_memory: config.kv_memory.map(|bytes| bytes.0),
        context: config.context,
        running_max: config.max_running,
    }
}

fn loader(config: &Config, checkpoint: &Checkpoint) -> anyhow::Result<Box<dyn Load>> {
    let isa = match config.isa {
        None => worker::Isa::detect(),
        Some(Isa::Plain) => worker::Isa::Plain,
        Some(Isa::Avx2) => worker::Isa::Avx2,
        Some(Isa::Avx512) => worker::Isa::Avx512,
    };
    Ok(match config.device {
        Device::Cpu => Box::new(ModelLoader { isa, ..ModelLoader::new(config.threads) }),
        Device::Sim => {
            let block_bytes = coordinator::block_bytes(&ModelShape::of(checkpoint), &policy(config))?;
            Box::new(Sim { vocab: checkpoint.spec().vocab, block_bytes, ..Sim::default() })
        }
    })
}

fn worker_config(config: &Config) -> worker::Config {
    let device = match config.device {
        Device::Cpu => "cpu",
        Device::Sim => "sim",
    };
    worker::Config {
        device: device.into(),
        memory_bytes: memory_bytes(),
        threads: u32::try_from(config.threads).unwrap_or(u32::MAX),
        ..worker::Config::default()
    }
}

/// What this machine has, or what the container was given if that is less.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let total = info.totalram * u64::from(info.mem_unit);
    let limit = std::fs::read_to_string(Path::new("/sys/fs/cgroup/memory.max")).ok();
    limit.and_then(|text| text.trim().parse().ok()).map_or(total, |limit: u64| limit.min(total))
}

/// Logs and metrics of this process; the answer renders the page of the metrics.
pub fn watch(config: &Config) -> anyhow::Result<router::Render> {
    let format = match config.log_format {
        crate::config::LogFormat::Text => telemetry::logs::Format::Text,
        crate::config::LogFormat::Json => telemetry::logs::Format::Json,
    };
    telemetry::logs::init(format, &config.log)?;
    let exporter = telemetry::metrics::install(&[])?;
    Ok(Arc::new(move || exporter.render()))
}
