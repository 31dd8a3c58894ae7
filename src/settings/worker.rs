//! A worker's settings, in `serve` and by itself.

use super::bytes::ByteSize;
use super::choices::{CudaGraphs, GpuCarrier, HostWire, Instructions};
use super::device::DeviceSettings;
use super::health::HealthSettings;
use super::machine;
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
    /// Where kernels are kept that were compiled for a GPU [default: beside the models]
    #[arg(long, env = "LOCKSTEP_KERNEL_CACHE", value_name = "DIR")]
    pub kernel_cache: Option<PathBuf>,
    /// Whether a GPU begins passes that are like others as CUDA graphs; changes no bit
    #[arg(long, env = "LOCKSTEP_CUDA_GRAPHS", value_enum, default_value = "auto")]
    pub cuda_graphs: CudaGraphs,
    /// Which of the CPU's instructions to use; all give the same bits [default: the best there are]
    #[arg(long, env = "LOCKSTEP_ISA", value_enum)]
    pub isa: Option<Instructions>,
    /// What workers exchange numbers over
    #[arg(long, env = "LOCKSTEP_WIRE", value_enum, default_value = "auto")]
    pub wire: HostWire,
    /// What carries numbers between GPUs
    #[arg(long, env = "LOCKSTEP_COLLECTIVE", value_enum, default_value = "auto")]
    pub collective: GpuCarrier,
    /// Threads of each worker [default: the cores, divided among this machine's workers]
    #[arg(long, env = "LOCKSTEP_THREADS")]
    pub threads: Option<usize>,
}

impl WorkerSettings {
    /// Threads of each worker, where `n_workers` share this machine.
    pub fn threads(&self, n_workers: u16) -> usize {
        self.threads.unwrap_or_else(|| (machine::cores() / usize::from(n_workers.max(1))).max(1))
    }

    pub fn resolved(mut self, n_workers: u16) -> anyhow::Result<WorkerSettings> {
        let threads = self.threads(n_workers);
        ensure!(threads > 0, "--threads is 0; it must be at least 1");
        ensure!(threads <= 1024, "--threads is {threads}; it must be at most 1024");
        self.threads = Some(threads);
        Ok(self)
    }
}

/// Which place a worker by itself has, and what it has there. It needs to know nothing of the model: the coordinator
/// says what it is to hold.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct JoinSettings {
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
    /// Fetch this rank's part of the model from the coordinator, where it is not on this machine
    #[arg(
        long, env = "LOCKSTEP_FETCH", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true", conflicts_with_all = ["model_path", "models"]
    )]
    pub fetch: bool,
    /// Workers of this machine, which share its cores and memory, or its GPUs'
    #[arg(long, env = "LOCKSTEP_LOCAL_WORKERS", value_name = "N", default_value_t = 1)]
    pub local_workers: u16,
    /// Memory for weights and KV cache [default: this machine's]
    #[arg(long, env = "LOCKSTEP_MEMORY", value_name = "BYTES")]
    pub memory: Option<ByteSize>,
}

/// What `lockstep worker` heeds.
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
    pub watch: WatchSettings,
}

impl WorkerRole {
    pub fn resolved(mut self) -> anyhow::Result<WorkerRole> {
        self.worker = self.worker.resolved(self.join.local_workers)?;
        self.watch = self.watch.resolved()?;
        Ok(self)
    }
}
