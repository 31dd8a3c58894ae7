//! Starts the roles of one or more replicas on this machine: router and coordinators within this process, and the
//! workers too, or as processes of their own. Whatever the way, they send each other the frames that a cluster sends.

use crate::children::{self, Order};
use crate::config::{
    Activations, Bytes, Carrier, Config, CudaGraphs, Isa, KvDtype, LogFormat, Numerics, Watched, Wire, cores,
};
use crate::control;
use crate::device::Device;
use crate::keys;
use crate::routes::Others;
use anyhow::Context;
use checkpoint::Checkpoint;
use cluster::{Claim, MemoryStore, Registration, Store};
use coordinator::{DigestOf, ModelShape, Policy};
use proto::secure::{self, Connection, Token, Trust};
use proto::transport::{self, Dialer};
use router::Membership;
use std::ffi::OsString;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use telemetry::logs::Telling;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use types::{BlockHash, DeviceClass, Grid, PolicyDigest};
use worker::{Assignment, Doorway, Ended, Load, LoadError, Loaded, ModelLoader, Ready, sim::Sim};

const REPLICA: &str = "local";
/// By which a router's queues are sized where a store tells of replicas as they come.
const REPLICAS_EXPECTED: usize = 16;

/// Where clients reach the router.
pub struct Doors {
    pub http: TcpListener,
    pub grpc: TcpListener,
    /// For whoever operates the replicas of this machine, a door each; or none.
    pub control: Vec<TcpListener>,
}

impl Doors {
    pub async fn open(config: &Config) -> anyhow::Result<Doors> {
        let bind = async |what, address| {
            TcpListener::bind(address).await.with_context(|| format!("cannot listen for {what} on {address}"))
        };
        let (http, grpc) = (bind("HTTP", config.http).await?, bind("gRPC", config.grpc).await?);
        Ok(Doors { http, grpc, control: Vec::new() })
    }
}

/// Runs router, coordinators and workers until `shutdown`, and then until what runs has ended. They end in the order in
/// which requests pass them, so that nothing under way loses what it needs.
pub async fn serve(
    config: &Config,
    checkpoint: &Checkpoint,
    metrics: router::Render,
    mut doors: Doors,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    if config.numerics == Numerics::Fast {
        let version = worker::lt_version().context("--numerics fast")?;
        tracing::info!(cublaslt = %version, "large products are cuBLASLt's");
    }
    let mut controls = std::mem::take(&mut doors.control).into_iter();
    let (mut groups, mut coordinators, salt) = (Vec::new(), Vec::new(), salt(None)?);
    for n in 0..config.replicas {
        let (mut group, coordinator) = Group::start(config, checkpoint, salt, n).await?;
        if let Some(door) = controls.next() {
            group.open(door, coordinator.channel.clone())?;
        }
        groups.push(group);
        coordinators.push(coordinator);
    }
    let resume_key = resume_key(None);
    let behind = Behind { membership: coordinators.into(), resume_key, others: Others::default() };
    let router = route(config, checkpoint, metrics, behind, doors, shutdown.clone())?;
    let end = CancellationToken::new();
    let replicas = Part::start("the replica", end.clone(), run_groups(groups, end));
    run(vec![Part::start("the router", shutdown, router), replicas]).await
}

/// A replica: its coordinator and its workers.
struct Group {
    name: String,
    /// Of its coordinator; the rest ends with that.
    end: CancellationToken,
    parts: Vec<Part>,
}

impl Group {
    async fn start(
        config: &Config,
        checkpoint: &Checkpoint,
        salt: [u8; 16],
        n: u16,
    ) -> anyhow::Result<(Group, router::Coordinator)> {
        let name = if config.replicas > 1 { format!("{REPLICA}-{n}") } else { REPLICA.to_owned() };
        let (dialer, pipes) = transport::in_memory();
        let pipes = pipes.map(|pipe| pipe.map(Connection::Pipe));
        let end = CancellationToken::new();
        let mut parts = Vec::new();
        let claim = MemoryStore::starting_at(micros_since_1970()).claim(&name, "in this process");
        if config.n_ranks() == 1 || config.inproc {
            let served = coordinate(config, checkpoint, &name, claim, salt, pipes, end.clone())?;
            parts.push(Part::start("the coordinator", end.clone(), served));
            parts.extend(threads(config, &dialer, n * config.n_ranks())?);
        } else {
            let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen for workers")?;
            let (address, token) = (socket.local_addr()?, Token::random()?);
            let sockets = secure::incoming(socket, Trust { token: Some(token.clone()), tls: None });
            let served = coordinate(config, checkpoint, &name, claim, salt, pipes.merge(sockets), end.clone())?;
            parts.push(Part::start("the coordinator", end.clone(), served));
            parts.push(processes(config, address, token, n * config.n_ranks())?);
        }
        Ok((Group { name: name.clone(), end, parts }, router::Coordinator { name, channel: dialer.channel() }))
    }
}

impl Group {
    /// For `scale` and `reload`, until its coordinator has ended.
    fn open(&mut self, door: TcpListener, coordinator: Channel) -> anyhow::Result<()> {
        let (address, end) = (door.local_addr()?, CancellationToken::new());
        tracing::info!(replica = self.name, %address, "`scale` and `reload` reach this replica");
        self.parts.push(Part::start("the door for --control", end.clone(), control::serve(door, coordinator, end)));
        Ok(())
    }
}

/// Runs replicas until `end`, or until none is left: one that fails is told of, and the others go on.
async fn run_groups(groups: Vec<Group>, end: CancellationToken) -> anyhow::Result<()> {
    let ends: Vec<CancellationToken> = groups.iter().map(|group| group.end.clone()).collect();
    let mut running = JoinSet::new();
    for group in groups {
        running.spawn(async move { (group.name, run(group.parts).await) });
    }
    let mut outcome = Ok(());
    loop {
        let ended = tokio::select! {
            () = end.cancelled(), if !ends.iter().all(CancellationToken::is_cancelled) => {
                ends.iter().for_each(CancellationToken::cancel);
                continue;
            }
            ended = running.join_next() => ended,
        };
        let Some(ended) = ended else { return outcome };
        let (name, ended) = ended.context("a replica panicked")?;
        if let Err(error) = &ended {
            tracing::error!(replica = name, left = running.len(), error = format!("{error:#}"), "a replica has failed");
        }
        outcome = outcome.and(ended);
    }
}

/// A coordinator over the connections that come, until `shutdown`.
pub fn coordinate<C>(
    config: &Config,
    checkpoint: &Checkpoint,
    replica: &str,
    claim: Claim,
    salt: [u8; 16],
    connections: C,
    shutdown: CancellationToken,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + use<C>>
where
    C: Stream<Item = io::Result<Connection>>,
{
    let config = coordinator::Config { salt, ..coordinator_config(config, checkpoint, replica)? };
    Ok(async move { Ok(coordinator::serve(connections, config, claim, shutdown).await?) })
}

/// Whom a router serves for, and what it knows of their models besides its first.
pub struct Behind {
    pub membership: Membership,
    pub resume_key: router::ResumeKey,
    pub others: Others,
}

/// A router of the replicas that these coordinate, until `shutdown`.
pub fn route(
    settings: &Config,
    checkpoint: &Checkpoint,
    metrics: router::Render,
    behind: Behind,
    doors: Doors,
    shutdown: CancellationToken,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + use<>> {
    let Behind { membership, resume_key, others } = behind;
    let n_replicas = match &membership {
        Membership::Given(given) => given.len(),
        Membership::Followed { store: Store::Static { given, .. }, .. } => given.0.len(),
        Membership::Followed { .. } => REPLICAS_EXPECTED,
    };
    let path = checkpoint.path().to_owned();
    // Opened again when somebody asks, so that nothing of it is kept until then.
    let text_files: router::ReadTextFiles = Arc::new(move || Checkpoint::open(&path)?.text_bundle());
    let text_files = Some(text_files);
    let routes = others.routes.clone();
    let config = router::Config { resume_key, text_files, routes, ..router_config(settings, n_replicas, metrics)? };
    let mut texts = router::Texts::from(text(checkpoint)?);
    for (name, checkpoint) in &others.models {
        texts = texts.and(name.clone(), text(checkpoint).with_context(|| format!("--text {name}"))?);
    }
    let (keys_followed, routes_followed) = (keys::follow(settings, &config.keys), others.follow());
    let served = router::serve(config, membership, texts, doors.http, doors.grpc, shutdown);
    Ok(async move {
        tokio::select! {
            biased;
            served = served => Ok(served?),
            () = keys_followed => Ok(()),
            () = routes_followed => Ok(()),
        }
    })
}

/// A worker for each rank within this process, each with a computing thread of its own; `first` is the first one's
/// number.
fn threads(config: &Config, dialer: &Dialer, first: u16) -> anyhow::Result<Vec<Part>> {
    let (n_ranks, n_workers) = (config.n_ranks(), config.n_workers());
    let memory_bytes = worker_memory(config)?;
    let start = |i| {
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let door = if n_ranks > 1 { Some(doorway(any_port)?) } else { None };
        let end = CancellationToken::new();
        let mesh_address = door.as_ref().map_or_else(String::new, |door| door.address().to_string());
        let device = config.device.of_worker(first + i)?;
        let told = device.told()?;
        let cache = config.kernel_cache.clone();
        let ways = (config.wire, config.collective, config.cuda_graphs);
        let loader = loader(device, cache, config.isa, config.threads, n_workers.into(), door, ways)?;
        let worker_config = worker_config(told, config.threads, memory_bytes, mesh_address);
        let worker = worker::serve(dialer.channel(), loader, worker_config, end.clone());
        Ok(Part::start("a worker", end, async { Ok(worker.await?) }))
    };
    (0..n_ranks).map(start).collect()
}

/// Where other ranks find one of this machine.
pub fn doorway(address: SocketAddr) -> anyhow::Result<Arc<Doorway>> {
    let opened = Doorway::open(&address.to_string());
    Ok(Arc::new(opened.with_context(|| format!("cannot listen for other workers on {address}"))?))
}

/// A process for each rank, which join over loopback; `first` is the first one's number.
fn processes(config: &Config, coordinator: SocketAddr, token: Token, first: u16) -> anyhow::Result<Part> {
    let memory = Bytes(worker_memory(config)?);
    let mut arguments: Vec<OsString> = ["worker", "--supervised", "--log-format", "json"].map(OsString::from).into();
    let named = [
        ("--join", coordinator.to_string()),
        ("--mesh-listen", SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).to_string()),
        ("--local-workers", config.n_workers().to_string()),
        ("--threads", config.threads.to_string()),
        ("--memory", memory.to_string()),
        ("--wire", config.wire.name()),
        ("--collective", config.collective.name()),
        ("--cuda-graphs", config.cuda_graphs.name()),
        ("--log", config.log.clone()),
    ];
    for (name, value) in named.into_iter().chain(config.isa.map(|isa| ("--isa", isa.name()))) {
        arguments.extend([name.into(), value.into()]);
    }
    if let Some(collector) = &config.otlp_endpoint {
        let told = [
            ("--otlp-endpoint", collector.clone()),
            ("--otlp-protocol", config.otlp_protocol.name()),
            ("--otlp-sample", config.otlp_sample.to_string()),
            ("--otlp-metrics-seconds", config.otlp_metrics_seconds.to_string()),
        ];
        arguments.extend(told.into_iter().flat_map(|(name, value)| [name.into(), value.into()]));
        if let Some(certificate) = &config.otlp_certificate {
            arguments.extend(["--otlp-certificate".into(), certificate.into()]);
        }
    }
    if let Some(cache) = &config.kernel_cache {
        arguments.extend(["--kernel-cache".into(), cache.into()]);
    }
    let devices = (first..first + config.n_ranks()).map(|i| Ok(config.device.of_worker(i)?.to_string()));
    let devices = devices.collect::<anyhow::Result<_>>()?;
    let headers = config.otlp_headers.clone();
    let secrets = headers.map(|headers| ("OTEL_EXPORTER_OTLP_HEADERS", headers)).into_iter().collect();
    let end = CancellationToken::new();
    let order = Order { devices, first, arguments, secrets, token };
    Ok(Part::start("the workers", end.clone(), children::run(order, end)))
}

/// Runs parts until the first of them ends, and then ends the others one after the other.
async fn run(mut parts: Vec<Part>) -> anyhow::Result<()> {
    let first = poll_fn(|cx| {
        let ended = parts.iter_mut().find_map(|part| match pin!(part.ended()).poll(cx) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        });
        ended.map_or(Poll::Pending, Poll::Ready)
    });
    let mut outcome = first.await;
    for mut part in parts {
        part.end.cancel();
        // The first to fail is the cause; the rest must end all the same.
        let ended = part.ended().await;
        outcome = outcome.and(ended);
    }
    outcome
}

/// A role's task, and what it is called when it fails.
struct Part {
    name: &'static str,
    end: CancellationToken,
    task: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Part {
    /// `end` is what ends the role well.
    fn start(
        name: &'static str,
        end: CancellationToken,
        role: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) -> Part {
        Part { name, end, task: Some(tokio::spawn(role)) }
    }

    /// Cancel safe: the task is given up only once it has ended.
    async fn ended(&mut self) -> anyhow::Result<()> {
        let Some(task) = &mut self.task else { return Ok(()) };
        let result = task.await;
        self.task = None;
        result.with_context(|| format!("{} panicked", self.name))?.with_context(|| format!("{} failed", self.name))
    }
}

/// For a coordinator that nobody looks for. Its claims are later than those of the process before it.
pub fn memory_store() -> Store {
    Store::Memory(MemoryStore::starting_at(micros_since_1970()))
}

/// What a coordinator says of itself before its workers have come.
pub fn registration(config: &Config, checkpoint: &Checkpoint, address: String) -> Registration {
    let policy_digest = policy_digest(config, checkpoint).map(|digest| digest.to_string()).unwrap_or_default();
    let model = model_name(config, checkpoint);
    Registration { address, model, policy_digest, tp: config.tp, pp: config.pp, ranks_ready: 0 }
}

fn model_name(config: &Config, checkpoint: &Checkpoint) -> String {
    config.served_model_name.clone().unwrap_or_else(|| checkpoint.spec().name.clone())
}

/// Epochs of this process are later than those of the one before it.
fn micros_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn router_config(config: &Config, n_replicas: usize, metrics: router::Render) -> anyhow::Result<router::Config> {
    let drain_max = Duration::from_secs(config.drain_seconds);
    let replica_absence_max = Duration::from_secs(config.failover_max);
    let request_max = config.request_seconds.map(Duration::from_secs);
    let requests_max = (config.max_waiting as usize + config.max_running as usize) * n_replicas;
    Ok(router::Config {
        names: config.served_model_name.iter().cloned().collect(),
        policy: config.policy.into(),
        limits: router::Limits {
            // Without a token yet: those that wait, and those whose prompts are being computed.
            requests_waiting_max: requests_max,
            waiting_tokens_max: coordinator::Limits::default().waiting_tokens_max as usize * n_replicas,
            requests_max,
            ..router::Limits::default()
        },
        waits: router::Waits { drain_max, replica_absence_max, request_max, ..router::Waits::default() },
        keys: keys::read(config)?,
        metrics,
        ..router::Config::default()
    })
}

/// What the names of cached blocks begin with. From the cluster's token, so that all its replicas call the same tokens
/// by the same name. Where there is none, each process has its own: a cache does not outlive it.
pub fn salt(token: Option<&Token>) -> anyhow::Result<[u8; 16]> {
    Ok(match token {
        Some(token) => BlockHash::salt(token.expose().as_bytes()),
        None => secure::random()?,
    })
}

/// From the cluster's token, so that every router of it reads the handles that one has made. Where there is none, the
/// cluster stands on one machine and trusts whoever reaches it.
pub fn resume_key(token: Option<&Token>) -> router::ResumeKey {
    router::ResumeKey::of(token.map_or(&[], |token| token.expose().as_bytes()))
}

fn text(checkpoint: &Checkpoint) -> anyhow::Result<router::Text> {
    Ok(router::Text {
        tokenizer: checkpoint.tokenizer()?,
        template: checkpoint.chat_template()?,
        spec: checkpoint.spec().clone(),
        defaults: *checkpoint.defaults(),
    })
}

fn coordinator_config(config: &Config, checkpoint: &Checkpoint, replica: &str) -> anyhow::Result<coordinator::Config> {
    let defaults = coordinator::Limits::default();
    Ok(coordinator::Config {
        replica: replica.into(),
        model: model_name(config, checkpoint),
        model_path: checkpoint.path().to_owned(),
        shape: ModelShape::of(checkpoint),
        policy: policy(config),
        policy_digest: (config.device != Device::Sim).then(|| digest_of(config, checkpoint)),
        prefix_cache: config.prefix_cache,
        zero_kv: config.zero_kv,
        salt: [0; 16],
        mesh_seed: secure::random()?,
        limits: coordinator::Limits {
            waiting_max: config.max_waiting,
            batch_tokens_max: config.max_batch_tokens,
            chunk_tokens_max: config.max_chunk_tokens,
            ..defaults
        },
        waits: coordinator::Waits {
            drain_max: Duration::from_secs(config.drain_seconds),
            replan_after: Duration::from_secs(config.replan_seconds),
            regrow_after: Duration::from_secs(config.regrow_seconds),
            load_max: Duration::from_secs(config.load_seconds),
            ..coordinator::Waits::default()
        },
    })
}

/// The simulation has a policy of its own, which no model gives; a GPU's is known when it is there.
fn policy_digest(config: &Config, checkpoint: &Checkpoint) -> Option<PolicyDigest> {
    let DigestOf { weights, pace } = digest_of(config, checkpoint);
    let numerics = types::Numerics::plain("cpu", pace, activations(config), kv_dtype(config), weights);
    (config.device.class() == DeviceClass::Cpu).then(|| numerics.digest())
}

fn digest_of(config: &Config, checkpoint: &Checkpoint) -> DigestOf {
    DigestOf { weights: checkpoint.digest(), pace: config.numerics.into() }
}

fn activations(config: &Config) -> &'static str {
    match config.activations {
        Activations::Int8 => "int8",
        Activations::F32 => "f32",
        Activations::Bf16 => "bf16",
    }
}

fn kv_dtype(config: &Config) -> &'static str {
    match config.kv_dtype {
        KvDtype::F16 => "f16",
        KvDtype::F32 => "f32",
        KvDtype::Bf16 => "bf16",
    }
}

pub fn policy(config: &Config) -> Policy {
    Policy {
        grid: Grid { pp: config.pp, tp: config.tp, ep: 1 },
        activations: activations(config).into(),
        kv_dtype: kv_dtype(config).into(),
        kv_memory: config.kv_memory.map(|bytes| bytes.0),
        context: config.context,
        running_max: config.max_running,
        slice_max: config.max_chunk_tokens.min(config.max_batch_tokens),
    }
}

/// What makes a rank of this machine, which has `n_local` of them, whatever it is told to hold. Who waits keeps its
/// core only where there are as many cores as threads.
pub fn loader(
    device: Device,
    cache: Option<PathBuf>,
    isa: Option<Isa>,
    threads: usize,
    n_local: usize,
    door: Option<Arc<Doorway>>,
    (wire, carrier, graphs): (Wire, Carrier, CudaGraphs),
) -> anyhow::Result<Box<dyn Load>> {
    let isa = match isa {
        None => worker::Isa::detect(),
        Some(Isa::Plain) => worker::Isa::Plain,
        Some(Isa::Avx2) => worker::Isa::Avx2,
        Some(Isa::Avx512) => worker::Isa::Avx512,
    };
    Ok(match device.place(cache)? {
        Some(place) => Box::new(ModelLoader {
            place,
            isa,
            spin: threads * n_local <= cores(),
            doorway: door,
            wire: match wire {
                Wire::Auto => worker::Wire::Any,
                Wire::Shm => worker::Wire::Memory,
                Wire::Tcp => worker::Wire::Socket,
            },
            carrier: match carrier {
                Carrier::Auto => worker::Carrier::Auto,
                Carrier::Host => worker::Carrier::Host,
                Carrier::Nccl => worker::Carrier::Nccl,
            },
            graphs: graphs == CudaGraphs::Auto,
            ..ModelLoader::new(threads)
        }),
        None => Box::new(SimLoader),
    })
}

/// The sim needs a few facts of the model that it stands for.
struct SimLoader;

impl Load for SimLoader {
    fn load(&mut self, assignment: &Assignment, ended: &Ended) -> Result<(Box<dyn Loaded>, Ready), LoadError> {
        let path = &assignment.model_path;
        let failed = |source| LoadError::Model { path: path.clone(), source };
        let checkpoint = Checkpoint::open(path).map_err(|error| failed(error.into()))?;
        let spec = checkpoint.spec();
        Sim { vocab: spec.vocab, groups: spec.cache_groups().groups().to_vec(), ..Sim::default() }
            .load(assignment, ended)
    }
}

pub fn worker_config(device: String, threads: usize, memory_bytes: u64, mesh_address: String) -> worker::Config {
    worker::Config {
        host: host(),
        device,
        memory_bytes,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        cores: u32::try_from(cores()).unwrap_or(u32::MAX),
        mesh_address,
        ..worker::Config::default()
    }
}

/// This machine's name, as its network knows it.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What each of this machine's workers may use.
pub fn worker_memory(config: &Config) -> anyhow::Result<u64> {
    config.device.memory_bytes(config.n_workers(), memory_bytes())
}

/// What this machine has, or what the container was given if that is less.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    let total = info.totalram * u64::from(info.mem_unit);
    let limit = std::fs::read_to_string(Path::new("/sys/fs/cgroup/memory.max")).ok();
    limit.and_then(|text| text.trim().parse().ok()).map_or(total, |limit: u64| limit.min(total))
}

/// Logs, spans and metrics of this process; the answer renders the page of the metrics.
pub fn watch(watched: &Watched<'_>) -> anyhow::Result<router::Render> {
    let format = match watched.log_format {
        LogFormat::Text => telemetry::logs::Format::Text,
        LogFormat::Json => telemetry::logs::Format::Json,
    };
    let Watched { log: filter, collector, model, .. } = watched;
    telemetry::logs::init(Telling { format, filter, collector: collector.as_ref() })?;
    let labels: Vec<_> = model.iter().map(|model| ("model_name", *model)).collect();
    let exporter = telemetry::metrics::install(&labels)?;
    Ok(Arc::new(move || exporter.render()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn routers_wait_as_long_as_they_are_told() {
        let waits = |failover_max| {
            let config = Settings { failover_max, drain_seconds: Some(4), ..Settings::default() }.resolve().unwrap();
            let waits = router_config(&config, 1, Arc::new(String::new)).unwrap().waits;
            (waits.replica_absence_max.as_secs(), waits.drain_max.as_secs())
        };
        assert_eq!((waits(None), waits(Some(7)), waits(Some(0))), ((60, 4), (7, 4), (0, 4)));
        let request_max = |request_seconds| {
            let config = Settings { request_seconds, ..Settings::default() }.resolve().ok()?;
            Some(router_config(&config, 1, Arc::new(String::new)).unwrap().waits.request_max)
        };
        let minute = Some(Duration::from_secs(60));
        assert_eq!([None, Some(60), Some(0)].map(request_max), [Some(None), Some(minute), None]);
    }
}
