//! The workers of one replica on this machine: threads of this process, or separate processes.

use super::children::{self, WorkerLaunch};
use super::parts::RoleTask;
use crate::roles::worker::RankPeers;
use crate::roles::{handover, worker};
use crate::settings::device::DeviceSettings;
use crate::settings::{
    ByteSize, HealthSettings, JoinSettings, LogFormat, ProtocolSettings, ServeSettings, StoreSettings, TrustSettings,
    WatchSettings, WorkerRole, WorkerSettings,
};
use std::net::{Ipv4Addr, SocketAddr};
use tokio_util::sync::CancellationToken;
use wire::{Dialer, JoinToken};

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Starts a worker for each rank within this process, each with a computing thread of its own; `first` is the first
/// worker's number.
pub fn start_threads(settings: &ServeSettings, dialer: &Dialer, first: u16) -> anyhow::Result<Vec<RoleTask>> {
    let (n_ranks, n_workers) = (settings.coordinator.n_ranks(), settings.n_workers());
    let memory_bytes = settings.worker_memory()?;
    let start = |i| {
        let door = if n_ranks > 1 { Some(worker::listener(ANY_PORT)?) } else { None };
        let end = CancellationToken::new();
        let mesh_address = door.as_ref().map_or_else(String::new, |door| door.address().to_string());
        let device = settings.device.device.of_worker(first + i)?;
        let scrubber = worker::scrubber(device, &settings.worker)?;
        let config = worker::config(device, settings.threads(), memory_bytes, mesh_address)?;
        let kv_memory = worker::kv_memory(settings.kv_commit());
        let config = ::worker::Config { scrubber: scrubber.clone(), kv_memory, ..config };
        let peers = RankPeers { listener: door, ..RankPeers::default() };
        let loader = worker::loader(device, &settings.worker, n_workers, peers, scrubber, None)?;
        let worker = ::worker::serve(dialer.channel(), loader, config, end.clone());
        Ok(RoleTask::start("a worker", end, async { Ok(worker.await?) }))
    };
    (0..n_ranks).map(start).collect()
}

/// Starts a process for each rank. The processes join over loopback; `first` is the first worker's number.
pub fn start_processes(
    settings: &ServeSettings,
    coordinator: SocketAddr,
    token: &JoinToken,
    first: u16,
) -> anyhow::Result<RoleTask> {
    let numbers = first..first + settings.coordinator.n_ranks();
    let line = |number| handover::line(token, &role(settings, coordinator, number)?);
    let settings_lines = numbers.map(line).collect::<anyhow::Result<_>>()?;
    let end = CancellationToken::new();
    Ok(RoleTask::start("the workers", end.clone(), children::run(WorkerLaunch { first, settings_lines }, end)))
}

/// Returns the settings of the worker with this number.
fn role(settings: &ServeSettings, coordinator: SocketAddr, number: u16) -> anyhow::Result<WorkerRole> {
    Ok(WorkerRole {
        join: JoinSettings {
            join: Some(coordinator.to_string()),
            mesh_listen: Some(ANY_PORT),
            local_workers: settings.n_workers(),
            memory: Some(ByteSize(settings.worker_memory()?)),
            ..JoinSettings::default()
        },
        device: DeviceSettings { device: settings.device.device.of_worker(number)? },
        worker: WorkerSettings {
            threads: Some(settings.threads()),
            kv_commit: Some(settings.kv_commit()),
            ..settings.worker.clone()
        },
        health: HealthSettings::default(),
        store: StoreSettings::default(),
        trust: TrustSettings::default(),
        spoken: ProtocolSettings::default(),
        watch: WatchSettings { log_format: LogFormat::Json, ..settings.watch.clone() },
    })
}
