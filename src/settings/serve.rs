//! The settings of `serve`, `run` and `plan`: every role of this machine.

use super::check::at_least_one;
use super::choices::KvCommitChoice;
use super::coordinator::{CoordinatorParts, CoordinatorSettings, RANKS_MAX};
use super::device::DeviceSettings;
use super::machine;
use super::model::ModelSettings;
use super::queue::QueueSettings;
use super::router::{RouterParts, RouterSettings};
use super::spoken::ProtocolSettings;
use super::watch::WatchSettings;
use super::worker::WorkerSettings;
use anyhow::ensure;
use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// The settings that exist only where all roles run on one machine.
#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LocalSettings {
    /// Loopback address where `lockstep scale` and `lockstep reload` reach this server [default: 127.0.0.1:50100]
    ///
    /// Each further replica takes the next port. If the default port is in use, the server starts without one.
    #[arg(long, env = "LOCKSTEP_CONTROL", value_name = "ADDR")]
    pub control: Option<SocketAddr>,
    /// Data parallel size: number of replicas behind the router, each with workers of its own
    #[arg(long, alias = "data-parallel-size", env = "LOCKSTEP_REPLICAS", value_name = "N", default_value_t = 1)]
    pub replicas: u16,
    /// Run workers as threads of this process instead of processes of their own
    #[arg(
        long, env = "LOCKSTEP_INPROC", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub inproc: bool,
}

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServeSettings {
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub router: RouterSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub local: LocalSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub device: DeviceSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub coordinator: CoordinatorSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub queue: QueueSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub worker: WorkerSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub watch: WatchSettings,
}

impl ServeSettings {
    /// Fills in everything that does not depend on the model, and checks it.
    pub fn resolved(mut self) -> anyhow::Result<ServeSettings> {
        at_least_one("replicas", self.local.replicas)?;
        self.device.device = self.device.device.resolved();
        self.worker.check_device(self.device.device)?;
        self.queue.check()?;
        self.coordinator = self.coordinator.resolved(&self.queue, self.device.device)?;
        let (n_ranks, replicas) = (u32::from(self.coordinator.n_ranks()), self.local.replicas);
        ensure!(
            n_ranks * u32::from(replicas) <= RANKS_MAX,
            "--replicas {replicas} of {n_ranks} ranks are more than {RANKS_MAX}"
        );
        ensure!(
            (self.worker.kv_disk.is_none() && self.worker.kv_host.is_none()) || self.coordinator.prefix_cache(),
            "--kv-disk or --kv-host without the prefix cache: their pages are found as cached prefixes are; set only \
             one of them"
        );
        let n_workers = self.n_workers();
        self.worker = self.worker.resolved(n_workers)?;
        self.router = self.router.resolved()?;
        self.watch = self.watch.resolved()?;
        Ok(self)
    }

    /// The number of workers on this machine, which share its cores and its memory.
    pub fn n_workers(&self) -> u16 {
        self.coordinator.n_ranks() * self.local.replicas
    }

    pub fn threads(&self) -> usize {
        self.worker.threads(self.n_workers())
    }

    /// Returns how KV memory is committed. The default is to grow, because a user's machine has other uses for memory.
    pub fn kv_commit(&self) -> KvCommitChoice {
        self.worker.kv_commit.unwrap_or(KvCommitChoice::Grow)
    }

    /// The memory that each of this machine's workers may use.
    pub fn worker_memory(&self) -> anyhow::Result<u64> {
        self.device.device.memory_bytes(self.n_workers(), machine::memory_bytes())
    }

    pub fn router(&self) -> RouterParts<'_> {
        // All roles are of this build.
        let spoken = ProtocolSettings::default();
        RouterParts { model: &self.model, queue: &self.queue, router: &self.router, spoken }
    }

    pub fn coordinator(&self) -> CoordinatorParts<'_> {
        let (model, queue) = (&self.model, &self.queue);
        let (coordinator, device, spoken) = (&self.coordinator, self.device.device, ProtocolSettings::default());
        CoordinatorParts { model, queue, coordinator, device, spoken }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{from_file, parse_settings};
    use super::*;
    use crate::settings::ByteSize;
    use crate::settings::device::DeviceChoice;
    use crate::settings::kv::KvDtypeChoice;
    use types::{Activations, KvDtype};

    fn resolve(words: &str) -> anyhow::Result<ServeSettings> {
        parse_settings::<ServeSettings>(words).resolved()
    }

    fn refused(words: &str, part: &str) {
        let message = resolve(words).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(part), "{words}: {message}");
    }

    #[test]
    fn zeroed_kv_disables_the_prefix_cache() {
        let shares = |words| resolve(words).unwrap().coordinator.prefix_cache();
        assert!(shares("") && shares("--zero-kv=false --prefix-cache true"));
        assert!(!shares("--zero-kv") && !shares("--zero-kv=true --prefix-cache false"));
        refused("--zero-kv=true --prefix-cache true", "--prefix-cache");
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() -> anyhow::Result<()> {
        let file = "threads = 1\nmax-running = 7\nkv-memory = \"64MiB\"";
        let settings = from_file::<ServeSettings>("--threads 3", file)?.resolved()?;
        let ServeSettings { worker, queue, coordinator, .. } = settings;
        assert_eq!((worker.threads, queue.max_running, queue.max_waiting), (Some(3), 7, 1024));
        assert_eq!(coordinator.kv_memory, Some(ByteSize(64 << 20)));
        Ok(())
    }

    #[test]
    fn vllms_names_of_flags_are_known() {
        for (theirs, ours) in [
            ("--tensor-parallel-size 2", "--tp 2"),
            ("--pipeline-parallel-size 3", "--pp 3"),
            ("--data-parallel-size 4", "--replicas 4"),
            ("--max-num-seqs 5", "--max-running 5"),
            ("--max-num-batched-tokens 600", "--max-batch-tokens 600"),
            ("--max-model-len 700", "--context 700"),
        ] {
            assert_eq!(parse_settings::<ServeSettings>(theirs), parse_settings(ours), "{theirs}");
            assert_ne!(parse_settings::<ServeSettings>(theirs), parse_settings(""), "{theirs}");
        }
    }

    #[test]
    fn what_is_printed_can_be_read_back() -> anyhow::Result<()> {
        let settings = resolve("--kv-memory 5MiB --port 81")?;
        let again = from_file::<ServeSettings>("", &crate::settings::config_text(&settings)?)?.resolved()?;
        assert_eq!(again, settings);
        Ok(())
    }

    #[test]
    fn a_device_brings_its_numbers() -> anyhow::Result<()> {
        let cuda = resolve("--device cuda:1")?;
        let numbers = (cuda.coordinator.activations, cuda.coordinator.kv_dtype);
        assert_eq!(numbers, (Some(Activations::Bf16), KvDtypeChoice::Of(KvDtype::Bf16)));
        for (words, dtype) in
            [("", KvDtype::F16), ("--kv-dtype auto", KvDtype::F16), ("--kv-dtype int8", KvDtype::Int8)]
        {
            assert_eq!(resolve(words)?.coordinator.kv_dtype, KvDtypeChoice::Of(dtype), "{words}");
        }
        assert_eq!(cuda.device.device, DeviceChoice::Cuda(Some(1)));
        let again = from_file::<ServeSettings>("", &crate::settings::config_text(&cuda)?)?.resolved()?;
        assert_eq!(again, cuda);
        refused("--numerics fast", "--numerics fast is for GPUs");
        refused("--device cuda --kv-dtype int8", "--kv-dtype int8: both are bf16 on a GPU");
        for wrong in ["--device cuda --activations int8", "--device cuda --kv-dtype f16", "--kv-dtype bf16"] {
            refused(wrong, "both are bf16 on a GPU");
        }
        Ok(())
    }

    #[test]
    fn wrong_names_and_values_are_reported() {
        let wrong = |file: &str| from_file::<ServeSettings>("", file).map_err(|e| format!("{e:#}")).unwrap_err();
        assert!(wrong("treads = 1").contains("treads"));
        assert!(wrong("threads = \"two\"").contains("threads"));
        assert!(wrong("kv-dtype = \"int3\"").contains("\"int3\" is not a KV dtype"));
        refused("--pp 17", "--pp 17 is more than 16 stages");
        refused("--threads 0", "--threads is 0");
        refused("--request-seconds 0", "--request-seconds is 0");
    }
}
