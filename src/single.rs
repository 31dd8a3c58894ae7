//! One role in this process, for a cluster on several machines: a coordinator, a worker or a router. What they are
//! built from is `roles`'s; whom they trust is `trust`'s.

use crate::args;
use crate::children;
use crate::config::{
    self, Bytes, Carrier, CudaGraphs, File, Isa, LOG, LogFormat, METRICS_SECONDS, OtlpProtocol, Reached, Watched, Wire,
    cores,
};
use crate::device::Device;
use crate::presence::{self, Presence};
use crate::roles::{self, Behind, Doors};
use crate::routes::Others;
use crate::whereabouts::{Found, Whereabouts};
use crate::{models, page, stop_on_signals, store};
use anyhow::{Context, ensure};
use checkpoint::Checkpoint;
use clap::Args;
use cluster::{Addresses, Store};
use proto::secure;
use router::Membership;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use telemetry::Collector;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use worker::Doorway;
use worker::fetch::Fetch;
use worker::source::{self, Source};

/// What a coordinator is told besides what `serve` is told.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CoordinatorSettings {
    /// Where workers and routers reach this coordinator [default: 127.0.0.1:50100]
    #[arg(long, env = "LOCKSTEP_LISTEN", value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// The replica's name in logs and resume handles [default: this machine's name and the port]
    #[arg(long, env = "LOCKSTEP_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
    /// Where others reach this coordinator, as etcd tells it [default: where it listens, or this machine's name]
    #[arg(long, env = "LOCKSTEP_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// Address of this role's own /health, /ready and /metrics, over plain HTTP [default: none]
    #[arg(long, env = "LOCKSTEP_HEALTH", value_name = "ADDR")]
    pub health: Option<SocketAddr>,
}

/// What a router is told besides what `serve` is told.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RouterSettings {
    /// The coordinator of a replica that serves; several replicas share the requests
    #[arg(long, alias = "coordinators", env = "LOCKSTEP_COORDINATOR", value_name = "HOST:PORT", value_delimiter = ',')]
    #[serde(deserialize_with = "store::one_or_many")]
    pub coordinator: Option<Vec<String>>,
    /// Another model that replicas serve, and the name that they serve it by [default: MODEL's own]; MODEL itself is
    /// what all the rest are read with that a route names
    #[arg(long, env = "LOCKSTEP_TEXT", value_name = "NAME=MODEL", value_delimiter = ',')]
    #[serde(deserialize_with = "store::one_or_many")]
    pub text: Option<Vec<String>>,
    /// A name that clients say, and the versions behind it by weight, as chat=v1:90,v2:10; a version is the name that
    /// its replicas serve, with @ and the beginning of a policy digest where several serve it
    #[arg(long, env = "LOCKSTEP_ROUTE", value_name = "NAME=VERSION:WEIGHT,..", value_delimiter = ';')]
    #[serde(deserialize_with = "store::one_or_many")]
    pub route: Option<Vec<String>>,
    /// A file of routes, a line each; it is read again when it changes
    #[arg(long, env = "LOCKSTEP_ROUTES", value_name = "FILE")]
    pub routes: Option<PathBuf>,
}

/// A worker needs to know nothing of the model: the coordinator says what it is to hold.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct WorkerSettings {
    /// The coordinator to compute for
    #[arg(long, env = "LOCKSTEP_JOIN", value_name = "HOST:PORT")]
    pub join: Option<String>,
    /// The replica to compute for, wherever etcd says that its coordinator is
    #[arg(long, env = "LOCKSTEP_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
    /// Where other workers reach this one [default: any port of the address by which the coordinator is reached]
    #[arg(long, env = "LOCKSTEP_MESH_LISTEN", value_name = "ADDR")]
    pub mesh_listen: Option<SocketAddr>,
    /// The model on this machine, where it is not at the coordinator's path
    #[arg(long, env = "LOCKSTEP_MODEL_PATH", value_name = "PATH")]
    pub model_path: Option<PathBuf>,
    /// A folder that holds the model under the name that it has at the coordinator
    #[arg(long, env = "LOCKSTEP_MODELS", value_name = "DIR", conflicts_with = "model_path")]
    pub models: Option<PathBuf>,
    /// Fetch this rank's part of the model from the coordinator, where it is not on this machine [default: false]
    #[arg(
        long, env = "LOCKSTEP_FETCH", num_args = 0..=1, default_missing_value = "true",
        conflicts_with_all = ["model_path", "models"]
    )]
    pub fetch: Option<bool>,
    /// What computes: cpu, cuda, cuda:N, auto (a GPU if there is one), or sim (no model) [default: cpu]
    #[arg(long, env = "LOCKSTEP_DEVICE", value_name = "DEVICE")]
    pub device: Option<Device>,
    /// Where kernels are kept that were compiled for a GPU [default: beside the models]
    #[arg(long, env = "LOCKSTEP_KERNEL_CACHE", value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
    /// Whether a GPU begins passes that are like others as CUDA graphs; changes no bit [default: auto]
    #[arg(long, env = "LOCKSTEP_CUDA_GRAPHS", value_enum)]
    pub cuda_graphs: Option<CudaGraphs>,
    /// Which of the CPU's instructions to use; all give the same bits [default: the best there are]
    #[arg(long, env = "LOCKSTEP_ISA", value_enum)]
    pub isa: Option<Isa>,
    /// What workers exchange numbers over [default: auto]
    #[arg(long, env = "LOCKSTEP_WIRE", value_enum)]
    pub wire: Option<Wire>,
    /// What carries numbers between GPUs [default: auto]
    #[arg(long, env = "LOCKSTEP_COLLECTIVE", value_enum)]
    pub collective: Option<Carrier>,
    /// Threads that compute [default: one per core]
    #[arg(long, env = "LOCKSTEP_THREADS")]
    pub threads: Option<usize>,
    /// Workers of this machine, which share its cores and memory, or its GPUs' [default: 1]
    #[arg(long, env = "LOCKSTEP_LOCAL_WORKERS", value_name = "N")]
    pub local_workers: Option<u16>,
    /// Memory for weights and KV cache [default: this machine's]
    #[arg(long, env = "LOCKSTEP_MEMORY", value_name = "BYTES")]
    pub memory: Option<Bytes>,
    /// How logs are written to stderr [default: text]
    #[arg(long, env = "LOCKSTEP_LOG_FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
    /// Which logs are written, as info or router=debug,info [default: info]
    #[arg(long, env = "LOCKSTEP_LOG")]
    pub log: Option<String>,
    /// Where an OpenTelemetry collector takes OTLP, as http://host:4317 [default: nothing is sent]
    #[arg(long, alias = "otlp", env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// How it takes it [default: grpc]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_PROTOCOL", value_enum)]
    pub otlp_protocol: Option<OtlpProtocol>,
    /// Headers that it wants with everything, as name=value,name=value
    #[arg(long, env = "OTEL_EXPORTER_OTLP_HEADERS", value_name = "HEADERS", hide_env_values = true)]
    pub otlp_headers: Option<String>,
    /// PEM file with the authority of an https collector's certificate [default: the web's authorities]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_CERTIFICATE", value_name = "FILE")]
    pub otlp_certificate: Option<String>,
    /// Of traces that begin here, the part that is recorded, 0 to 1; a caller's own are as the caller says [default: 1]
    #[arg(long, env = "LOCKSTEP_OTLP_SAMPLE", value_name = "RATIO")]
    pub otlp_sample: Option<f64>,
    /// Seconds from one sending of the metrics to the next; 0 sends none [default: 15]
    #[arg(long, env = "LOCKSTEP_OTLP_METRICS_SECONDS", value_name = "SECONDS")]
    pub otlp_metrics_seconds: Option<u64>,
    /// Address of this role's own /health, /ready and /metrics, over plain HTTP [default: none]
    #[arg(long, env = "LOCKSTEP_HEALTH", value_name = "ADDR")]
    pub health: Option<SocketAddr>,
}

const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 50100);
/// A worker's runtime carries one stream; its cores are for computing.
const WORKER_RUNTIME_THREADS: usize = 1;

pub fn coordinator(args: args::Coordinator) -> anyhow::Result<()> {
    let mut file = File::read(args.source.config.as_deref())?;
    let (own, trust, store) = (file.under(args.own)?, file.under(args.trust)?, file.under(args.store)?);
    let mut config = file.under(args.settings)?.resolve()?;
    file.end()?;
    let listen = own.listen.unwrap_or(LISTEN);
    ensure!(config.replicas == 1, "--replicas {}: a coordinator has one replica; start another one", config.replicas);
    ensure!(own.advertise.is_none() || store.is_given(), "--advertise needs --etcd-endpoints HOST:PORT");
    store.check()?;
    if args.source.print_config {
        return print(&[&own, &store, &trust, &config]);
    }
    let located = models::ready(&config.model, &args.source.hub)?;
    config.served_model_name.get_or_insert(located.name);
    // Installed whether or not there is a page: the same counters are kept as in `serve`.
    let metrics = roles::watch(&config.watched()?)?;
    let checkpoint = Checkpoint::open(&located.path)?;
    let trust = trust.resolve("coordinator", &listen.to_string(), None)?;
    Runtime::new()?.block_on(async {
        let socket = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
        let address = socket.local_addr()?;
        let replica = own.replica.clone().unwrap_or_else(|| format!("{}:{}", roles::host(), address.port()));
        let shutdown = CancellationToken::new();
        tokio::spawn(stop_on_signals(shutdown.clone()));
        if let Some(health) = own.health {
            let (page, draining) = (metrics.clone(), shutdown.clone());
            let is_ready = move || !draining.is_cancelled() && page::has_ready_ranks(&page());
            page::open(health, metrics, is_ready).await?;
        }
        let store = store.open().await?.unwrap_or_else(roles::memory_store);
        let registration = roles::registration(&config, &checkpoint, own.advertised(address)?);
        let claiming = shutdown.run_until_cancelled(store.claim(&replica, registration));
        // A signal has come before the store did: there is nothing to drain.
        let Some(claim) = claiming.await else { return Ok(()) };
        let claim = claim?;
        let (incarnation, tls, token) = (claim.incarnation(), trust.tls.is_some(), trust.token.is_some());
        tracing::info!(%address, replica, incarnation, store = store.kind(), tls, token, "coordinating");
        let salt = roles::salt(trust.token.as_ref())?;
        let connections = secure::incoming(socket, trust);
        roles::coordinate(&config, &checkpoint, &replica, claim, salt, connections, shutdown)?.await
    })
}

impl CoordinatorSettings {
    /// What others are told of where it listens.
    fn advertised(&self, listens: SocketAddr) -> anyhow::Result<String> {
        match &self.advertise {
            Some(address) => {
                address.parse::<Addresses>().context("--advertise")?;
                Ok(address.clone())
            }
            None if listens.ip().is_unspecified() => Ok(format!("{}:{}", roles::host(), listens.port())),
            None => Ok(listens.to_string()),
        }
    }
}

pub fn router(args: args::Router) -> anyhow::Result<()> {
    let mut file = File::read(args.source.config.as_deref())?;
    let (own, trust, store) = (file.under(args.own)?, file.under(args.trust)?, file.under(args.store)?);
    let mut config = file.under(args.settings)?.resolve()?;
    file.end()?;
    if args.source.print_config {
        return print(&[&own, &store, &trust, &config]);
    }
    ensure!(config.replicas == 1, "--replicas {}: give --coordinator once for each replica", config.replicas);
    store.check()?;
    let given = own.given(store.is_given())?;
    let located = models::ready(&config.model, &args.source.hub)?;
    let name = config.served_model_name.get_or_insert(located.name).clone();
    let others = Others::of(&own, &name, &args.source.hub)?;
    let metrics = roles::watch(&config.watched()?)?;
    let checkpoint = Checkpoint::open(&located.path)?;
    for address in given.iter().flat_map(|Addresses(addresses)| addresses) {
        trust.resolve("router", address, None)?;
    }
    Runtime::new()?.block_on(async {
        let doors = Doors::open(&config).await?;
        crate::greet(&config, &doors)?;
        let shutdown = CancellationToken::new();
        tokio::spawn(stop_on_signals(shutdown.clone()));
        let store = match (given, store.open().await?) {
            (Some(given), _) => Store::fixed(given, 0),
            (None, store) => store.context("neither --coordinator nor --etcd-endpoints is given")?,
        };
        let resume_key = roles::resume_key(trust.token()?.as_ref());
        let dial = move |address: &str| {
            let trust = trust.resolve("router", address, None).map_err(|error| format!("{error:#}"))?;
            Ok(secure::channel(address, trust))
        };
        let membership = Membership::Followed { store, dial: Box::new(dial) };
        let behind = Behind { membership, resume_key, others };
        roles::route(&config, &checkpoint, metrics, behind, doors, shutdown)?.await
    })
}

impl RouterSettings {
    /// The coordinators that are given, or none where a store tells of them.
    fn given(&self, has_store: bool) -> anyhow::Result<Option<Addresses>> {
        let addresses = self.coordinator.clone().unwrap_or_default();
        ensure!(
            addresses.is_empty() == has_store,
            "give --coordinator HOST:PORT, where a replica is reached, or --etcd-endpoints HOST:PORT, which tells: one \
             of them"
        );
        if has_store {
            return Ok(None);
        }
        let twice = addresses.iter().enumerate().find(|(i, address)| addresses[..*i].contains(address));
        ensure!(twice.is_none(), "--coordinator {} is given twice", twice.map_or("", |(_, address)| address));
        Ok(Some(addresses.join(",").parse::<Addresses>().context("--coordinator")?))
    }
}

pub fn worker(args: args::Worker) -> anyhow::Result<()> {
    let mut file = File::read(args.config.as_deref())?;
    let (mut own, trust, store) = (file.under(args.own)?, file.under(args.trust)?, file.under(args.store)?);
    file.end()?;
    if args.print_config {
        // Headers are printed for nobody.
        own.otlp_headers = None;
        return print(&[&own, &store, &trust]);
    }
    own.kernel_cache = own.kernel_cache.or_else(|| models::kernels(&args.hub));
    let shutdown = CancellationToken::new();
    let handed = args.supervised.then(|| children::be_one(shutdown.clone())).transpose()?;
    let whereabouts = Whereabouts::of(own.join.as_deref(), own.replica.as_deref(), &store)?;
    let collector = own.collector()?;
    let log = own.log.as_deref().unwrap_or(LOG);
    let log_format = own.log_format.unwrap_or(LogFormat::Text);
    let watched = Watched { log, log_format, collector, model: None };
    let metrics = roles::watch(&watched)?;
    let cache = || Ok(models::sources(&args.hub)?.cache);
    let runtime = Builder::new_multi_thread().worker_threads(WORKER_RUNTIME_THREADS).enable_all().build()?;
    runtime.block_on(async {
        tokio::spawn(stop_on_signals(shutdown.clone()));
        let finding = shutdown.run_until_cancelled(whereabouts.find(trust, handed));
        // A signal has come before anybody said where it is.
        let Some(found) = finding.await else { return Ok(()) };
        let Found { address, channel } = found?;
        let source = own.source(channel.clone(), cache)?;
        let seat = own.seat(&address, source)?;
        let presence = Presence::default();
        let loader = Box::new(presence::Telling { loader: seat.loader, presence: presence.clone() });
        if let Some(health) = own.health {
            let address = page::open(health, metrics, move || presence.is_there()).await?;
            tracing::info!(%address, "this worker tells of itself");
        }
        Ok(worker::serve(channel, loader, seat.config, shutdown).await?)
    })
}

/// What a worker is built from.
struct Seat {
    loader: Box<dyn worker::Load>,
    config: worker::Config,
}

impl WorkerSettings {
    fn collector(&self) -> anyhow::Result<Option<Collector>> {
        let sample = self.otlp_sample.unwrap_or(1.0);
        config::check_sample(sample)?;
        let Some(endpoint) = self.otlp_endpoint.clone().filter(|endpoint| !endpoint.is_empty()) else {
            return Ok(None);
        };
        let reached = Reached {
            endpoint,
            protocol: self.otlp_protocol.unwrap_or_default(),
            headers: self.otlp_headers.as_deref(),
            certificate: self.otlp_certificate.as_deref().filter(|file| !file.is_empty()).map(Path::new),
            sample,
            metrics_seconds: self.otlp_metrics_seconds.unwrap_or(METRICS_SECONDS),
        };
        let collector = reached.collector()?;
        // Whether steps have spans is the coordinator's to say.
        Ok(Some(Collector { steps: true, ..collector }))
    }

    fn seat(&self, join: &str, source: Source) -> anyhow::Result<Seat> {
        let n_local = usize::from(self.local_workers.unwrap_or(1).max(1));
        let threads = self.threads.unwrap_or_else(|| (cores() / n_local).max(1));
        ensure!((1..=1024).contains(&threads), "--threads is {threads}; it must be 1 to 1024");
        let device = self.device.unwrap_or(Device::Cpu).of_worker(0)?;
        let (door, mesh_address) = self.doorway(join)?;
        let graphs = self.cuda_graphs.unwrap_or(CudaGraphs::Auto);
        let ways = (self.wire.unwrap_or(Wire::Auto), self.collective.unwrap_or(Carrier::Auto), graphs);
        let loader = roles::loader(device, self.kernel_cache.clone(), self.isa, threads, n_local, Some(door), ways)?;
        let said = self.device.unwrap_or(Device::Cpu);
        let memory = match self.memory {
            Some(memory) => memory.0,
            None => said.memory_bytes_of_one(self.local_workers.unwrap_or(1), roles::memory_bytes())?,
        };
        let config = roles::worker_config(device.told()?, threads, memory, mesh_address);
        Ok(Seat { loader: source::load_from(source, loader), config })
    }

    /// The door, and what others are told of it.
    fn doorway(&self, join: &str) -> anyhow::Result<(Arc<Doorway>, String)> {
        let listen = match self.mesh_listen {
            Some(listen) => listen,
            None => SocketAddr::new(own_address(join)?, 0),
        };
        let door = roles::doorway(listen)?;
        let mut address = door.address();
        if address.ip().is_unspecified() {
            address.set_ip(own_address(join)?);
        }
        Ok((door, address.to_string()))
    }

    fn source(&self, coordinator: Channel, cache: impl Fn() -> anyhow::Result<PathBuf>) -> anyhow::Result<Source> {
        Ok(match (&self.model_path, &self.models) {
            (Some(path), _) => Source::Path(path.clone()),
            (None, Some(folder)) => Source::Folder(folder.clone()),
            (None, None) if self.fetch.unwrap_or(false) => {
                Source::Fetched(Fetch { channel: coordinator, runtime: Handle::current(), cache: cache()? })
            }
            (None, None) => Source::AsTold,
        })
    }
}

/// This machine's address as the coordinator sees it, if nothing between them translates addresses. Nothing is sent.
fn own_address(coordinator: &str) -> anyhow::Result<IpAddr> {
    let unknown = || format!("no own address towards {coordinator}: give --mesh-listen ADDR");
    let there = coordinator.to_socket_addrs().with_context(unknown)?.next().with_context(unknown)?;
    let any: IpAddr = if there.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).with_context(unknown)?;
    socket.connect(there).with_context(unknown)?;
    Ok(socket.local_addr().with_context(unknown)?.ip())
}

fn print(parts: &[&dyn Printed]) -> anyhow::Result<()> {
    for part in parts {
        print!("{}", part.toml()?);
    }
    Ok(())
}

/// Settings that `--print-config` shows.
trait Printed {
    fn toml(&self) -> anyhow::Result<String>;
}

impl<T: Serialize> Printed for T {
    fn toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinators_are_one_or_several() {
        let read = |file: &str| toml::from_str::<RouterSettings>(file).unwrap().coordinator;
        let addresses = |list: &[&str]| Some(list.iter().map(|address| (*address).to_owned()).collect::<Vec<_>>());
        assert_eq!(read("coordinator = \"a:1\""), addresses(&["a:1"]));
        assert_eq!(read("coordinator = [\"a:1\", \"b:2\"]"), addresses(&["a:1", "b:2"]));
        assert_eq!(read(""), None);
    }
}
