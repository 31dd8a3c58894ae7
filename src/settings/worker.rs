//! A worker's settings, in `serve` and in a process of its own.

use super::bytes::ByteSize;
use super::choices::{CudaGraphs, FolderChoice, GpuCarrier, HostWire, Instructions, KvCommitChoice, LinkPrivacy};
use super::device::{DeviceChoice, DeviceSettings};
use super::health::HealthSettings;
use super::kv_disk::KvDiskChoice;
use super::machine;
use super::spoken::ProtocolSettings;
use super::store::StoreSettings;
use super::trust::TrustSettings;
use super::watch::WatchSettings;
use anyhow::ensure;
use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct WorkerSettings {
    /// Folder for compiled GPU kernels [default: kernels in the folder for fetched models]
    #[arg(long, env = "LOCKSTEP_KERNEL_CACHE", value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
    /// Folder for packed weights, or off: the next start of a CPU worker neither reads nor packs what is there
    /// [default: packed in the folder for fetched models]
    #[arg(long, env = "LOCKSTEP_PACKED_CACHE", value_name = "DIR|off")]
    pub packed_cache: Option<FolderChoice>,
    /// Maximum bytes of all files with packed weights; those that were used longest ago are removed first
    #[arg(long, env = "LOCKSTEP_PACKED_CACHE_MAX", value_name = "BYTES", default_value = "8GiB")]
    pub packed_cache_max: ByteSize,
    /// Folder for pages of the KV cache, and its most bytes: prompts that were computed before, also by an earlier
    /// process, are read from it
    #[arg(long, env = "LOCKSTEP_KV_DISK", value_name = "DIR:BYTES")]
    pub kv_disk: Option<KvDiskChoice>,
    /// Maximum bytes per second that each worker writes to the folder of --kv-disk
    #[arg(long, env = "LOCKSTEP_KV_DISK_RATE", value_name = "BYTES", default_value = "256MiB")]
    pub kv_disk_rate: ByteSize,
    /// Maximum bytes of host memory for pages of each GPU's KV cache: prompts whose blocks a GPU had to give up are
    /// copied back from it. Only on GPUs
    #[arg(long, env = "LOCKSTEP_KV_HOST", value_name = "BYTES")]
    pub kv_host: Option<ByteSize>,
    /// When to use CUDA graphs; tokens are the same without them
    #[arg(long, env = "LOCKSTEP_CUDA_GRAPHS", value_enum, default_value = "auto")]
    pub cuda_graphs: CudaGraphs,
    /// CPU instructions to use; all give the same tokens [default: the best that the CPU has]
    #[arg(long, env = "LOCKSTEP_ISA", value_enum)]
    pub isa: Option<Instructions>,
    /// How workers exchange activations through the hosts
    #[arg(long, env = "LOCKSTEP_WIRE", value_enum, default_value = "auto")]
    pub wire: HostWire,
    /// Encrypt TCP connections between workers, which are authenticated in any case; the same for all workers of a
    /// replica, whose GPUs then use no NCCL between hosts
    #[arg(long, env = "LOCKSTEP_LINK_ENCRYPTION", value_enum, default_value = "off")]
    pub link_encryption: LinkPrivacy,
    /// How GPUs exchange activations
    #[arg(long, env = "LOCKSTEP_COLLECTIVE", value_enum, default_value = "auto")]
    pub collective: GpuCarrier,
    /// Threads of each worker [default: the cores, divided by the number of workers on this machine]
    #[arg(long, env = "LOCKSTEP_THREADS")]
    pub threads: Option<usize>,
    /// When the memory of the KV cache is committed; tokens are the same [default: grow for serve and run, all for
    /// worker]
    #[arg(long, env = "LOCKSTEP_KV_COMMIT", value_enum)]
    pub kv_commit: Option<KvCommitChoice>,
    /// Share of one core's time, from 0 to 1, in which each worker hashes its weights in memory again, while it is idle
    ///
    /// A weight that changed in memory is logged and counted, and its rank loads again: tokens are the same. Only on
    /// CPUs.
    #[arg(long, env = "LOCKSTEP_SCRUB", value_name = "RATIO", default_value_t = 0.0)]
    pub scrub: f64,
}

impl WorkerSettings {
    /// Returns the threads of each worker, if `n_workers` share this machine.
    pub fn threads(&self, n_workers: u16) -> usize {
        self.threads.unwrap_or_else(|| (machine::cores() / usize::from(n_workers.max(1))).max(1))
    }

    /// Refuses what a device does not need.
    pub fn check_device(&self, device: DeviceChoice) -> anyhow::Result<()> {
        ensure!(
            self.kv_host.is_none() || device != DeviceChoice::Cpu,
            "--kv-host on the CPU: its KV cache is in host memory; --kv-disk DIR:BYTES keeps more of it on disk"
        );
        Ok(())
    }

    pub fn resolved(mut self, n_workers: u16) -> anyhow::Result<WorkerSettings> {
        let threads = self.threads(n_workers);
        ensure!(threads > 0, "--threads is 0; it must be at least 1");
        ensure!(threads <= 1024, "--threads is {threads}; it must be at most 1024");
        ensure!((0.0..=1.0).contains(&self.scrub), "--scrub is {}; it must be from 0 to 1", self.scrub);
        ensure!(self.kv_host.is_none_or(|bytes| bytes.0 > 0), "--kv-host is 0; it must be at least 1");
        ensure!(self.kv_disk_rate.0 > 0, "--kv-disk-rate is 0; it must be at least 1");
        self.threads = Some(threads);
        Ok(self)
    }
}

/// The place and the resources of a worker in a process of its own. The worker needs no settings of the model: it
/// receives its assignment from the coordinator.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct JoinSettings {
    /// Address of the coordinator to join
    #[arg(long, env = "LOCKSTEP_JOIN", value_name = "HOST:PORT")]
    pub join: Option<String>,
    /// Name of the replica to join; its coordinator's address comes from etcd
    #[arg(long, env = "LOCKSTEP_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
    /// Address to listen on for other workers [default: any free port, on the interface towards the coordinator]
    #[arg(long, env = "LOCKSTEP_MESH_LISTEN", value_name = "ADDR")]
    pub mesh_listen: Option<SocketAddr>,
    /// Path of the model on this machine [default: the coordinator's path]
    #[arg(long, env = "LOCKSTEP_MODEL_PATH", value_name = "PATH")]
    pub model_path: Option<PathBuf>,
    /// Folder that holds the model, under the same file name as at the coordinator
    #[arg(long, env = "LOCKSTEP_MODELS", value_name = "DIR", conflicts_with = "model_path")]
    pub models: Option<PathBuf>,
    /// Fetch this rank's part of the model from the coordinator, unless it is on this machine already
    #[arg(
        long, env = "LOCKSTEP_FETCH", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true", conflicts_with_all = ["model_path", "models"]
    )]
    pub fetch: bool,
    /// Number of workers on this machine, which share its cores, memory and GPUs
    #[arg(long, env = "LOCKSTEP_LOCAL_WORKERS", value_name = "N", default_value_t = 1)]
    pub local_workers: u16,
    /// Memory for weights and KV cache, such as 16GiB [default: this worker's share of the machine's, or of its GPU's]
    #[arg(long, env = "LOCKSTEP_MEMORY", value_name = "BYTES")]
    pub memory: Option<ByteSize>,
}

/// The settings of `lockstep worker`.
#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerRole {
    #[command(flatten)]
    #[serde(flatten)]
    pub join: JoinSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub device: DeviceSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub worker: WorkerSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub health: HealthSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub trust: TrustSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub spoken: ProtocolSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub watch: WatchSettings,
}

impl WorkerRole {
    pub fn resolved(mut self) -> anyhow::Result<WorkerRole> {
        self.worker = self.worker.resolved(self.join.local_workers)?;
        self.watch = self.watch.resolved()?;
        Ok(self)
    }
}
