//! Builds a worker from its settings, within `serve` or in a process of its own.

use super::coordinator_source::{CoordinatorSource, FoundCoordinator};
use super::page;
use super::presence::{PresenceLoader, RankPresence};
use super::process::{start_telemetry, stop_on_signals};
use crate::roles::handover::{self, HandedSettings};
use crate::settings::device::DeviceChoice;
use crate::settings::hub::{self, HubSettings};
use crate::settings::{
    ConfigSource, CudaGraphs, FolderChoice, JoinSettings, KvCommitChoice, WorkerRole, WorkerSettings, config_text,
    machine,
};
use anyhow::{Context, bail, ensure};
use checkpoint::Checkpoint;
use clap::{ArgMatches, Args};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use telemetry::Collector;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tools::out;
use wire::JoinToken;
use worker::fetch::{IntactChunks, ModelFetcher};
use worker::sim::SimModel;
use worker::source::{self, ModelSource};
use worker::tier::{KvDiskConfig, KvTiers, KvTiersConfig, PageSecret};
use worker::{
    Assignment, CancelFlag, ComputeDevice, Load, LoadError, LoadedModel, MeshSecret, ModelLoader, PackedCache,
    PackedCacheConfig, PeerListener, ReadyReport, Scrubber,
};

/// A worker's runtime carries one stream; the other cores are for computing.
const RUNTIME_THREADS: usize = 1;

#[derive(Args)]
pub struct WorkerCommand {
    #[command(flatten)]
    pub settings: WorkerRole,
    /// Started by `serve`, which sends all settings on standard input and ends this worker when it ends itself
    #[arg(long, hide = true)]
    pub supervised: bool,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl WorkerCommand {
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        let WorkerCommand { settings, supervised, source } = self;
        let shutdown = CancellationToken::new();
        let (role, token) = match supervised {
            true => {
                let HandedSettings { settings, token } = handover::receive(shutdown.clone())?;
                (settings, Some(JoinToken::new(&token).context("from the parent")?))
            }
            false => (source.merge_file(settings, matches)?, None),
        };
        let mut role = role.resolved()?;
        if source.print_config {
            out::print(&config_text(&role)?)?;
            return Ok(());
        }
        let kernels = || hub::kernels(&source.hub);
        let packed = || hub::packed(&source.hub).map(FolderChoice::Folder);
        role.worker.kernel_cache = role.worker.kernel_cache.or_else(kernels);
        role.worker.packed_cache = role.worker.packed_cache.or_else(packed);
        run_worker(&role, token, &source.hub, shutdown)
    }
}

/// Runs a worker until `shutdown`, or until the coordinator rejects it for good.
fn run_worker(
    role: &WorkerRole,
    token: Option<JoinToken>,
    hub: &HubSettings,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let coordinator_source =
        CoordinatorSource::of(role.join.join.as_deref(), role.join.replica.as_deref(), &role.store)?;
    // The coordinator decides whether steps have spans.
    let collector = role.watch.collector()?.map(|collector| Collector { steps: true, ..collector });
    let metrics = start_telemetry(&role.watch, collector.as_ref(), None)?;
    warn_if_crowded(role.device.device, role.join.local_workers);
    // A token from the parent is new at each start, and pages outlive the process.
    let page_secret = role.trust.token()?.map(|token| PageSecret::of(&token.link_key()));
    let link_key = role.trust.token()?.or_else(|| token.clone()).map(|token| MeshSecret(token.link_key()));
    let runtime = Builder::new_multi_thread().worker_threads(RUNTIME_THREADS).enable_all().build()?;
    runtime.block_on(async {
        tokio::spawn(stop_on_signals(shutdown.clone()));
        let finding = shutdown.run_until_cancelled(coordinator_source.find(role.trust.clone(), token));
        // A signal arrived before the coordinator was found.
        let Some(found) = finding.await else { return Ok(()) };
        let FoundCoordinator { address, channel } = found?;
        let WorkerSetup { loader, config } =
            set_up_worker(role, &address, model_source(&role.join, channel.clone(), hub)?, link_key, page_secret)?;
        let presence = RankPresence::default();
        let loader = Box::new(PresenceLoader { loader, presence: presence.clone() });
        if let Some(health) = role.health.health {
            let address = page::open(health, metrics, move || presence.is_present()).await?;
            tracing::info!(%address, "this worker serves its health pages");
        }
        Ok(worker::serve(channel, loader, config, shutdown).await?)
    })
}

/// A worker's device, and the worker's description of itself.
struct WorkerSetup {
    loader: Box<dyn Load>,
    config: worker::Config,
}

fn set_up_worker(
    role: &WorkerRole,
    coordinator: &str,
    source: ModelSource,
    link_key: Option<MeshSecret>,
    page_secret: Option<PageSecret>,
) -> anyhow::Result<WorkerSetup> {
    let (n_local, device_choice) = (role.join.local_workers, role.device.device);
    let device = device_choice.of_worker(0)?;
    let (door, mesh_address) = open_mesh_listener(&role.join, coordinator)?;
    let scrubber = scrubber(device, &role.worker)?;
    let peers = RankPeers { listener: Some(door), link_key };
    let loader = loader(device, &role.worker, n_local, peers, scrubber.clone(), page_secret)?;
    let memory = match role.join.memory {
        Some(memory) => memory.0,
        None => device_choice.memory_bytes_of_one(n_local, machine::memory_bytes())?,
    };
    let config = config(device, role.worker.threads(n_local), memory, mesh_address)?;
    // The machine of a separate worker is there for that worker, so its KV memory is committed from the start.
    let kv_memory = kv_memory(role.worker.kv_commit.unwrap_or(KvCommitChoice::All));
    let config = worker::Config { scrubber, kv_memory, speaks: role.spoken.speaks(), ..config };
    Ok(WorkerSetup { loader: source::load_from(source, loader), config })
}

/// Returns the listener for other workers, and the address that they receive.
fn open_mesh_listener(join: &JoinSettings, coordinator: &str) -> anyhow::Result<(Arc<PeerListener>, String)> {
    let listen = match join.mesh_listen {
        Some(listen) => listen,
        None => SocketAddr::new(own_address(coordinator)?, 0),
    };
    let door = listener(listen)?;
    let mut address = door.address();
    if address.ip().is_unspecified() {
        address.set_ip(own_address(coordinator)?);
    }
    Ok((door, address.to_string()))
}

fn model_source(join: &JoinSettings, coordinator: Channel, hub: &HubSettings) -> anyhow::Result<ModelSource> {
    Ok(match (&join.model_path, &join.models) {
        (Some(path), _) => ModelSource::Path(path.clone()),
        (None, Some(folder)) => ModelSource::Folder(folder.clone()),
        (None, None) if join.fetch => {
            let (runtime, cache) = (Handle::current(), hub::sources(hub)?.cache);
            ModelSource::Fetched(ModelFetcher {
                channel: coordinator,
                runtime,
                cache,
                checked: IntactChunks::default(),
            })
        }
        (None, None) => ModelSource::Assigned,
    })
}

/// Returns this machine's address as the coordinator sees it, unless something translates addresses. Sends no packet.
fn own_address(coordinator: &str) -> anyhow::Result<IpAddr> {
    let unknown = || format!("this worker's address for {coordinator} is unknown: give --mesh-listen ADDR");
    let there = coordinator.to_socket_addrs().with_context(unknown)?.next().with_context(unknown)?;
    let any: IpAddr = if there.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).with_context(unknown)?;
    socket.connect(there).with_context(unknown)?;
    Ok(socket.local_addr().with_context(unknown)?.ip())
}

/// Opens a listener for the other ranks.
pub fn listener(address: SocketAddr) -> anyhow::Result<Arc<PeerListener>> {
    let opened = PeerListener::bind(&address.to_string());
    Ok(Arc::new(opened.with_context(|| format!("cannot listen for other workers on {address}"))?))
}

/// How other ranks reach a rank, and the key that it shares with them; nothing where all ranks are in one process.
#[derive(Default)]
pub struct RankPeers {
    pub listener: Option<Arc<PeerListener>>,
    pub link_key: Option<MeshSecret>,
}

/// Returns the scrubber, which hashes a worker's weights again while they are in memory, if it is enabled.
pub fn scrubber(device: DeviceChoice, settings: &WorkerSettings) -> anyhow::Result<Option<Scrubber>> {
    if settings.scrub == 0.0 {
        return Ok(None);
    }
    let is_cpu = device.compute_device(None)? == Some(ComputeDevice::Cpu);
    ensure!(is_cpu, "--scrub needs weights in CPU memory, and the device is {}", device.device_kind()?);
    Ok(Some(Scrubber::new(settings.scrub)))
}

/// Warns if ranks that compute on cores may wait for one another because other programs use the cores.
pub fn warn_if_crowded(device: DeviceChoice, n_ranks: u16) {
    let is_cpu = matches!(device.compute_device(None), Ok(Some(ComputeDevice::Cpu)));
    if let Some(free_cores) = machine::free_cores()
        && is_cpu
        && n_ranks > 1
        && usize::from(n_ranks) > free_cores
    {
        let each =
            "there are fewer free cores than ranks: --tp ranks may wait in each layer, --pp ranks once in a step";
        tracing::warn!(n_ranks, free_cores, "{each}");
    }
}

/// Returns the loader of a rank on this machine, which has `n_local` ranks. Waiting threads spin only if there are as
/// many cores as threads.
pub fn loader(
    device: DeviceChoice,
    settings: &WorkerSettings,
    n_local: u16,
    peers: RankPeers,
    scrubber: Option<Scrubber>,
    page_secret: Option<PageSecret>,
) -> anyhow::Result<Box<dyn Load>> {
    let RankPeers { listener, link_key } = peers;
    let threads = settings.threads(n_local);
    settings.check_device(device.resolved())?;
    Ok(match device.compute_device(settings.kernel_cache.clone())? {
        Some(device) => Box::new(ModelLoader {
            device,
            isa: settings.isa.map_or_else(worker::Isa::detect, worker::Isa::from),
            spin: threads * usize::from(n_local) <= machine::cores(),
            listener,
            wire: settings.wire.into(),
            encryption: settings.link_encryption.into(),
            link_key,
            carrier: settings.collective.into(),
            graphs: settings.cuda_graphs == CudaGraphs::Auto,
            scrubber,
            packed_cache: packed_cache(settings),
            kv_tiers: kv_tiers(settings, page_secret)?,
            ..ModelLoader::new(threads)
        }),
        None if settings.kv_disk.is_some() || settings.kv_host.is_some() => {
            bail!("--kv-disk and --kv-host need a device with memory, and sim has none")
        }
        None => Box::new(SimLoader),
    })
}

fn packed_cache(settings: &WorkerSettings) -> Option<PackedCache> {
    let Some(FolderChoice::Folder(folder)) = settings.packed_cache.clone() else { return None };
    Some(PackedCache::new(PackedCacheConfig { folder, bytes_max: settings.packed_cache_max.0 }))
}

/// Opens the tiers behind the pools. A secret of theirs keys the hashes where the cluster has none.
fn kv_tiers(settings: &WorkerSettings, secret: Option<PageSecret>) -> anyhow::Result<Option<KvTiers>> {
    let host_bytes = settings.kv_host.map(|bytes| bytes.0);
    let disk = settings.kv_disk.clone().map(|disk| KvDiskConfig {
        folder: disk.folder,
        bytes_max: disk.bytes_max.0,
        write_rate: settings.kv_disk_rate.0,
    });
    let context = match &disk {
        Some(disk) => format!("--kv-disk {}", disk.folder.display()),
        None if host_bytes.is_none() => return Ok(None),
        None => "--kv-host".to_owned(),
    };
    KvTiers::open(KvTiersConfig { host_bytes, disk }, secret).context(context).map(Some)
}

/// The loader for the sim device, which needs a few facts about the real model.
struct SimLoader;

impl Load for SimLoader {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let path = &assignment.model_path;
        let failed = |source| LoadError::Model { path: path.clone(), source };
        let checkpoint = Checkpoint::open(path).map_err(|error| failed(error.into()))?;
        let spec = checkpoint.spec();
        SimModel { vocab: spec.vocab, groups: spec.cache_groups().groups().to_vec(), ..SimModel::default() }
            .load(assignment, cancel)
    }
}

pub fn config(
    device: DeviceChoice,
    threads: usize,
    memory_bytes: u64,
    mesh_address: String,
) -> anyhow::Result<worker::Config> {
    Ok(worker::Config {
        host: machine::host(),
        device: device.device_kind()?.to_string(),
        memory_bytes,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        cores: u32::try_from(machine::cores()).unwrap_or(u32::MAX),
        mesh_address,
        ..worker::Config::default()
    })
}

pub fn kv_memory(commit: KvCommitChoice) -> worker::KvMemory {
    worker::KvMemory { left: machine::memory_left, grows: commit == KvCommitChoice::Grow }
}
