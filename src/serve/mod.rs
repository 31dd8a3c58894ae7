//! `serve`: the roles of one or more replicas on this machine. Router and coordinators run within this process; the
//! workers do too, or in processes of their own. In both cases they exchange the frames of a cluster.

mod children;
mod control;
pub mod fit;
mod parts;
pub mod plan;
pub mod private;
mod relay;
mod workers;

use crate::models;
use crate::roles::coordinator::{ClaimedReplica, coordinate};
use crate::roles::drafts;
use crate::roles::process::{hash_salt, micros_since_1970, start_telemetry, stop_on_signals};
use crate::roles::router::{Listeners, PageSources, ServedReplicas, check_clients, route};
use crate::roles::worker::warn_if_crowded;
use crate::settings::hub::{self, HubSettings};
use crate::settings::{ConfigSource, FolderChoice, ServeSettings, WorkerSettings, config_text};
use anyhow::Context;
use checkpoint::Checkpoint;
use checkpoint::catalogue::LocatedModel;
use clap::{ArgMatches, Args};
use cluster::MemoryStore;
use parts::{RoleTask, run_all};
use std::net::Ipv4Addr;
use std::sync::Arc;
use telemetry::Collector;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tools::out;
use types::{BlockHash, NumericsMode};
use wire::{JoinToken, Trust};
use worker::tier::open_secret;

const REPLICA: &str = "local";

#[derive(Args)]
pub struct ServeCommand {
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl ServeCommand {
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        let Some((settings, located)) = prepare(self.settings, &self.source, matches)? else { return Ok(()) };
        let (metrics, checkpoint) = start_and_check(&settings, &located)?;
        check_clients(settings.router())?;
        Runtime::new()?.block_on(async {
            let listeners = match matches.value_source("grpc") {
                Some(_) => Listeners::open(settings.router()).await?,
                None => Listeners::open_beside(settings.router()).await?,
            };
            let controls = control::open(settings.local.control, settings.local.replicas).await?;
            listeners.print_addresses(settings.router(), checkpoint.spec())?;
            let shutdown = CancellationToken::new();
            tokio::spawn(stop_on_signals(shutdown.clone()));
            let pages = PageSources { machine_models: Some(machine_models(self.source.hub.clone())), metrics };
            serve(&settings, &checkpoint, pages, listeners, controls, shutdown).await
        })
    }
}

/// Returns a function that lists the models on this machine, and whether those of the catalogue fit into its memory.
fn machine_models(hub: HubSettings) -> router::ListMachineModels {
    Arc::new(move || models::machine(&hub, &fit::fit).map_err(|error| format!("{error:#}")))
}

/// Resolves the settings and finds the model, or prints the settings if a flag requests that.
pub fn prepare(
    settings: ServeSettings,
    source: &ConfigSource,
    matches: &ArgMatches,
) -> anyhow::Result<Option<(ServeSettings, LocatedModel)>> {
    let settings = resolve_or_print(settings, source, matches)?;
    settings.map(|settings| with_model(settings, source)).transpose()
}

/// Fills in all settings that do not depend on the model. Returns None if they were printed instead.
pub fn resolve_or_print(
    settings: ServeSettings,
    source: &ConfigSource,
    matches: &ArgMatches,
) -> anyhow::Result<Option<ServeSettings>> {
    let mut settings = source.merge_file(settings, matches)?.resolved()?;
    let kernels = || hub::kernels(&source.hub);
    let packed = || hub::packed(&source.hub).map(FolderChoice::Folder);
    settings.worker.kernel_cache = settings.worker.kernel_cache.or_else(kernels);
    settings.worker.packed_cache = settings.worker.packed_cache.or_else(packed);
    if source.print_config {
        out::print(&config_text(&settings)?)?;
        return Ok(None);
    }
    Ok(Some(settings))
}

/// Finds the model of these settings, or fetches it.
pub fn with_model(mut settings: ServeSettings, source: &ConfigSource) -> anyhow::Result<(ServeSettings, LocatedModel)> {
    let located = models::locate_or_fetch(&settings.model.model, &source.hub)?;
    settings.model.served_name_or(located.name.clone());
    drafts::find(&mut settings.coordinator.speculation, &source.hub)?;
    Ok((settings, located))
}

/// Starts logs and metrics, and checks that the model can be placed.
pub fn start_and_check(
    settings: &ServeSettings,
    located: &LocatedModel,
) -> anyhow::Result<(router::Render, Checkpoint)> {
    let (steps, content) = (settings.coordinator.otlp_steps, settings.router.otlp_content);
    let collector = settings.watch.collector()?.map(|collector| Collector { steps, content, ..collector });
    let metrics = start_telemetry(&settings.watch, collector.as_ref(), settings.model.served_name())?;
    let checkpoint = open_placeable(settings, located)?;
    warn_if_crowded(settings.device.device, settings.n_workers());
    Ok((metrics, checkpoint))
}

/// Returns the model, if it can be placed.
pub fn open_placeable(settings: &ServeSettings, located: &LocatedModel) -> anyhow::Result<Checkpoint> {
    let checkpoint = Checkpoint::open(&located.path)?;
    plan::blueprint(settings, &checkpoint)?;
    Ok(checkpoint)
}

/// Runs router, coordinators and workers until `shutdown`, and then until they have ended. They end in the order in
/// which requests pass them, so that open requests can finish. `controls` are listeners for operators, one per replica,
/// or none.
pub async fn serve(
    settings: &ServeSettings,
    checkpoint: &Checkpoint,
    pages: PageSources,
    listeners: Listeners,
    controls: Vec<TcpListener>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    if settings.coordinator.numerics == NumericsMode::Fast {
        let version = worker::lt_version().context("--numerics fast")?;
        tracing::info!(cublaslt = %version, "cuBLASLt computes large products");
    }
    let mut controls = controls.into_iter();
    let (mut groups, mut coordinators, salt) = (Vec::new(), Vec::new(), page_salt(&settings.worker)?);
    for n in 0..settings.local.replicas {
        let (mut group, coordinator) = ReplicaTasks::start(settings, checkpoint, salt, n).await?;
        if let Some(door) = controls.next() {
            group.serve_control(door, coordinator.channel.clone())?;
        }
        groups.push(group);
        coordinators.push(coordinator);
    }
    let behind = ServedReplicas::of_channels(coordinators)?;
    let router = route(settings.router(), checkpoint, pages, behind, listeners, shutdown.clone())?;
    let end = CancellationToken::new();
    let replicas = RoleTask::start("the replica", end.clone(), run_replicas(groups, end));
    run_all(vec![RoleTask::start("the router", shutdown, router), replicas]).await
}

/// Returns the salt of block hashes. Pages on disk keep their names from one process to the next, so there the salt
/// follows from the folder's secret.
fn page_salt(settings: &WorkerSettings) -> anyhow::Result<[u8; 16]> {
    let Some(disk) = &settings.kv_disk else { return hash_salt(None) };
    let secret = open_secret(&disk.folder).with_context(|| format!("--kv-disk {}", disk.folder.display()))?;
    Ok(BlockHash::salt(&secret.0))
}

/// A replica: its coordinator and its workers.
struct ReplicaTasks {
    name: String,
    /// Ends the coordinator; the workers then end with it.
    end: CancellationToken,
    parts: Vec<RoleTask>,
}

impl ReplicaTasks {
    async fn start(
        settings: &ServeSettings,
        checkpoint: &Checkpoint,
        salt: [u8; 16],
        n: u16,
    ) -> anyhow::Result<(ReplicaTasks, router::CoordinatorChannel)> {
        let name = if settings.local.replicas > 1 { format!("{REPLICA}-{n}") } else { REPLICA.to_owned() };
        let (dialer, pipes) = wire::in_memory();
        let end = CancellationToken::new();
        let mut parts = Vec::new();
        let claim = MemoryStore::starting_at(micros_since_1970()).claim(&name, "in this process");
        let replica = ClaimedReplica { name: &name, claim, salt };
        let (coordinator, n_ranks) = (settings.coordinator(), settings.coordinator.n_ranks());
        if n_ranks == 1 || settings.local.inproc {
            let served = coordinate(coordinator, checkpoint, replica, Box::pin(pipes), end.clone())?;
            parts.push(RoleTask::start("the coordinator", end.clone(), served));
            parts.extend(workers::start_threads(settings, &dialer, n * n_ranks)?);
        } else {
            let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen for workers")?;
            let (address, token) = (socket.local_addr()?, JoinToken::random()?);
            let sockets = wire::incoming(socket, Trust { token: Some(token.clone()), tls: None });
            let connections = Box::pin(pipes.merge(sockets));
            let served = coordinate(coordinator, checkpoint, replica, connections, end.clone())?;
            parts.push(RoleTask::start("the coordinator", end.clone(), served));
            parts.push(workers::start_processes(settings, address, &token, n * n_ranks)?);
        }
        Ok((
            ReplicaTasks { name: name.clone(), end, parts },
            router::CoordinatorChannel { name, channel: dialer.channel() },
        ))
    }

    /// Serves `scale` and `reload` until its coordinator has ended.
    fn serve_control(&mut self, door: TcpListener, coordinator: Channel) -> anyhow::Result<()> {
        let (address, end) = (door.local_addr()?, CancellationToken::new());
        tracing::info!(replica = self.name, %address, "`scale` and `reload` can reach this replica");
        self.parts.push(RoleTask::start(
            "the server at --control",
            end.clone(),
            control::serve(door, coordinator, end),
        ));
        Ok(())
    }
}

/// Runs replicas until `end`, or until none is left. A failed replica is logged, and the others continue.
async fn run_replicas(groups: Vec<ReplicaTasks>, end: CancellationToken) -> anyhow::Result<()> {
    let ends: Vec<CancellationToken> = groups.iter().map(|group| group.end.clone()).collect();
    let mut running = JoinSet::new();
    for group in groups {
        running.spawn(async move { (group.name, run_all(group.parts).await) });
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
