//! Builds a coordinator from its settings, within `serve` or in a process of its own.

use super::drafts::DraftModels;
use super::process::{hash_salt, micros_since_1970, start_telemetry, stop_on_signals};
use super::{drafts, page};
use crate::models;
use crate::settings::device::DeviceChoice;
use crate::settings::memory_part::MemoryPart;
use crate::settings::{ConfigSource, CoordinatorParts, CoordinatorRole, ServeSettings, config_text, machine};
use anyhow::Context;
use checkpoint::Checkpoint;
use clap::{ArgMatches, Args};
use cluster::{Addresses, Claim, MemoryStore, Registration, Store};
use coordinator::{DigestInputs, PlacementPolicy};
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use telemetry::Collector;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tools::out;
use wire::Incoming;

#[derive(Args)]
pub struct CoordinatorCommand {
    #[command(flatten)]
    pub settings: CoordinatorRole,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl CoordinatorCommand {
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        let CoordinatorCommand { settings, source } = self;
        let mut role = source.merge_shared_file::<_, ServeSettings>(settings, matches)?.resolved()?;
        if source.print_config {
            out::print(&config_text(&role)?)?;
            return Ok(());
        }
        let located = models::locate_or_fetch(&role.model.model, &source.hub)?;
        role.model.served_name_or(located.name);
        drafts::find(&mut role.coordinator.speculation, &source.hub)?;
        let steps = role.coordinator.otlp_steps;
        let collector = role.watch.collector()?.map(|collector| Collector { steps, ..collector });
        // Installed with or without a metrics page, so that the counters are the same as in `serve`.
        let metrics = start_telemetry(&role.watch, collector.as_ref(), role.model.served_name())?;
        let checkpoint = Checkpoint::open(&located.path)?;
        Runtime::new()?.block_on(listen(&role, &checkpoint, metrics))
    }
}

async fn listen(role: &CoordinatorRole, checkpoint: &Checkpoint, metrics: router::Render) -> anyhow::Result<()> {
    let listen = role.listen.listen;
    let follows = role.trust.follow("coordinator", listen.to_string())?;
    let trust = follows.borrow().clone();
    let socket = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    let address = socket.local_addr()?;
    let replica = role.listen.replica.clone().unwrap_or_else(|| format!("{}:{}", machine::host(), address.port()));
    let shutdown = CancellationToken::new();
    tokio::spawn(stop_on_signals(shutdown.clone()));
    if let Some(health) = role.health.health {
        let (page, draining) = (metrics.clone(), shutdown.clone());
        let is_ready = move || !draining.is_cancelled() && page::has_ready_ranks(&page());
        page::open(health, metrics, is_ready).await?;
    }
    let store = role.store.open().await?.unwrap_or_else(memory_store);
    let registration = registration(role.parts(), checkpoint, advertised(role, address)?);
    let claiming = shutdown.run_until_cancelled(store.claim(&replica, registration));
    // A signal arrived before the store replied, so there is nothing to drain.
    let Some(claim) = claiming.await else { return Ok(()) };
    let claim = claim?;
    let (incarnation, tls, token) = (claim.incarnation(), trust.tls.is_some(), trust.token.is_some());
    tracing::info!(%address, replica, incarnation, store = store.kind(), tls, token, "coordinating");
    let replica = ClaimedReplica { name: &replica, claim, salt: hash_salt(trust.token.as_ref())? };
    let connections = wire::incoming_by(socket, follows);
    coordinate(role.parts(), checkpoint, replica, connections, shutdown)?.await
}

/// Returns the address that the store gives to other roles.
fn advertised(role: &CoordinatorRole, listens: SocketAddr) -> anyhow::Result<String> {
    match &role.listen.advertise {
        Some(address) => {
            address.parse::<Addresses>().context("--advertise")?;
            Ok(address.clone())
        }
        None if listens.ip().is_unspecified() => Ok(format!("{}:{}", machine::host(), listens.port())),
        None => Ok(listens.to_string()),
    }
}

/// Returns the store of a coordinator that no other role looks up. Its claims are later than those of an earlier
/// process.
fn memory_store() -> Store {
    Store::Memory(MemoryStore::starting_at(micros_since_1970()))
}

/// Returns a coordinator's registration before its workers join. It has no policy digest, which depends on the bytes
/// that they read.
fn registration(parts: CoordinatorParts<'_>, checkpoint: &Checkpoint, address: String) -> Registration {
    let model = model_name(parts, checkpoint);
    let (tp, pp) = (parts.coordinator.tp, parts.coordinator.pp);
    Registration { address, model, policy_digest: String::new(), tp, pp, ranks_ready: 0 }
}

/// A coordinator's identity: its replica's name, the claim to that name, and the salt of its block hashes.
pub struct ClaimedReplica<'a> {
    pub name: &'a str,
    pub claim: Claim,
    pub salt: [u8; 16],
}

/// Runs a coordinator over incoming connections, until `shutdown`.
pub fn coordinate(
    parts: CoordinatorParts<'_>,
    checkpoint: &Checkpoint,
    replica: ClaimedReplica<'_>,
    connections: Incoming,
    shutdown: CancellationToken,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + use<>> {
    let ClaimedReplica { name, claim, salt } = replica;
    let config = coordinator::Config { salt, ..config(parts, checkpoint, name)? };
    Ok(async move { Ok(coordinator::serve(connections, config, claim, shutdown).await?) })
}

fn model_name(parts: CoordinatorParts<'_>, checkpoint: &Checkpoint) -> String {
    parts.model.served_name().map_or_else(|| checkpoint.spec().name.clone(), str::to_owned)
}

fn config(parts: CoordinatorParts<'_>, checkpoint: &Checkpoint, replica: &str) -> anyhow::Result<coordinator::Config> {
    let CoordinatorParts { queue, coordinator: settings, device, spoken, .. } = parts;
    let defaults = coordinator::Limits::default();
    let (shape, DraftModels { draft_model, mtp }) = drafts::shape(parts, checkpoint)?;
    Ok(coordinator::Config {
        replica: replica.into(),
        model: model_name(parts, checkpoint),
        model_path: checkpoint.path().to_owned(),
        shape,
        policy: policy(parts),
        policy_digest: (device != DeviceChoice::Sim).then(|| digest_of(parts, checkpoint)).transpose()?,
        prefix_cache: settings.prefix_cache(),
        zero_kv: settings.zero_kv,
        salt: [0; 16],
        mesh_seed: wire::random()?,
        speaks: spoken.speaks(),
        limits: coordinator::Limits {
            waiting_max: queue.max_waiting,
            batch_tokens_max: queue.max_batch_tokens,
            chunk_tokens_max: settings.max_chunk_tokens(queue),
            pace: settings.pace(),
            speculation: settings.speculation.speculation(settings.grid(), device.class()),
            draft_model,
            mtp,
            ..defaults
        },
        waits: coordinator::Timings {
            drain_max: Duration::from_secs(queue.drain_seconds),
            replan_after: Duration::from_secs(settings.replan_seconds),
            regrow_after: Duration::from_secs(settings.regrow_seconds),
            takeover_hold: Duration::from_secs(settings.takeover_seconds),
            load_max: Duration::from_secs(settings.load_seconds),
            ..coordinator::Timings::default()
        },
    })
}

fn digest_of(parts: CoordinatorParts<'_>, checkpoint: &Checkpoint) -> anyhow::Result<DigestInputs> {
    Ok(DigestInputs { weights: checkpoint.fingerprint()?, mode: parts.coordinator.numerics })
}

/// Returns the operator's placement policy for a replica.
pub fn policy(parts: CoordinatorParts<'_>) -> PlacementPolicy {
    let CoordinatorParts { queue, coordinator: settings, device, .. } = parts;
    PlacementPolicy {
        grid: settings.grid(),
        activations: settings.activations(device.class()),
        kv_dtype: settings.kv_dtype(device.class()),
        kv_memory: settings.kv_memory.map(|bytes| bytes.0),
        memory_permille: settings.gpu_memory_utilization.map(MemoryPart::permille),
        state_cache: settings.state_cache.map(|bytes| bytes.0),
        context: settings.context,
        running_max: queue.max_running,
        slice_max: settings.max_chunk_tokens(queue).min(queue.max_batch_tokens),
    }
}
