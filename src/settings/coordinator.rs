//! A coordinator's settings, in `serve` and in a process of its own.

use super::bytes::ByteSize;
use super::check::at_least_one;
use super::device::{DeviceChoice, DeviceSettings};
use super::health::HealthSettings;
use super::kv::KvDtypeChoice;
use super::memory_part::MemoryPart;
use super::model::ModelSettings;
use super::queue::QueueSettings;
use super::speculation::SpeculationSettings;
use super::spoken::ProtocolSettings;
use super::store::StoreSettings;
use super::trust::TrustSettings;
use super::watch::WatchSettings;
use super::words;
use anyhow::{bail, ensure};
use clap::{ArgAction, Args};
use coordinator::{STAGES_MAX, StepPace};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tools::words::{explained, parser};
use types::{Activations, DeviceClass, Grid, KvDtype, NumericsMode};

/// The most ranks on one machine. With more ranks sums would wait for more peers than they have leaves.
pub const RANKS_MAX: u32 = 1024;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CoordinatorSettings {
    /// Tensor parallel size: number of ranks that share each layer
    #[arg(long, alias = "tensor-parallel-size", env = "LOCKSTEP_TP", value_name = "N", default_value_t = 1)]
    pub tp: u16,
    /// Pipeline parallel size: number of stages, each with its own run of layers
    #[arg(long, alias = "pipeline-parallel-size", env = "LOCKSTEP_PP", value_name = "N", default_value_t = 1)]
    pub pp: u16,
    /// How GPUs compute: with the same tokens in every batch and on every grid, or faster
    #[arg(
        long, env = "LOCKSTEP_NUMERICS", default_value = "lockstep",
        value_parser = explained(NumericsMode::ALL, NumericsMode::name, meaning)
    )]
    #[serde(with = "words")]
    pub numerics: NumericsMode,
    /// Type of activations: int8 (bf16 for bf16 weights) or f32 on the CPU, bf16 on a GPU [default: int8 on the CPU,
    /// bf16 on a GPU]
    #[arg(long, env = "LOCKSTEP_ACTIVATIONS", value_parser = parser(Activations::ALL, Activations::name))]
    #[serde(default, with = "words::open")]
    pub activations: Option<Activations>,
    /// Type of the KV cache: f16, f32 or int8 (about half of f16's memory) on the CPU, bf16 on a GPU; auto is f16 on
    /// the CPU and bf16 on a GPU
    #[arg(
        long, env = "LOCKSTEP_KV_DTYPE", default_value = "auto",
        value_parser = parser(KvDtypeChoice::ALL, KvDtypeChoice::name)
    )]
    #[serde(default, with = "words")]
    pub kv_dtype: KvDtypeChoice,
    /// Memory for the KV cache of each worker, such as 512MiB or 4GiB
    ///
    /// The default on the CPU is room for 8 full contexts, but at most a quarter of the worker's memory; on a GPU it is
    /// nine tenths of what the weights leave.
    #[arg(long, env = "LOCKSTEP_KV_MEMORY", value_name = "BYTES")]
    pub kv_memory: Option<ByteSize>,
    /// Part of each worker's memory for weights and KV cache together, such as 0.9 [default: see --kv-memory]
    #[arg(
        long,
        alias = "mem-fraction-static",
        env = "LOCKSTEP_GPU_MEMORY_UTILIZATION",
        value_name = "PART",
        conflicts_with = "kv_memory"
    )]
    pub gpu_memory_utilization: Option<MemoryPart>,
    /// Part of the KV memory of each worker for states of recurrent layers that the prefix cache keeps, such as 1GiB
    /// [default: as much as keys and values have]
    #[arg(long, env = "LOCKSTEP_STATE_CACHE", value_name = "BYTES")]
    pub state_cache: Option<ByteSize>,
    /// Context length: maximum tokens of a request, prompt and answer together [default: the model's, or as much of it
    /// as the KV cache holds]
    #[arg(long, alias = "max-model-len", env = "LOCKSTEP_CONTEXT")]
    pub context: Option<u32>,
    /// Maximum tokens of one request in one step [default: --max-batch-tokens]
    #[arg(long, env = "LOCKSTEP_MAX_CHUNK_TOKENS")]
    pub max_chunk_tokens: Option<u32>,
    /// Maximum milliseconds of a step while requests generate: prompts get the time that is left, so that tokens keep
    /// coming at an even pace; 0 sets no limit [default: 40, or twice as long as a step in which all generate]
    #[arg(long, env = "LOCKSTEP_STEP_MILLIS", value_name = "MS")]
    pub step_millis: Option<u64>,
    /// Prefix caching: prompts that begin alike share KV blocks [default: true; false with --zero-kv]
    #[arg(long, env = "LOCKSTEP_PREFIX_CACHE", action = ArgAction::Set)]
    pub prefix_cache: Option<bool>,
    /// Overwrite a request's KV blocks with zeros when it ends; turns prefix caching off
    #[arg(
        long, env = "LOCKSTEP_ZERO_KV", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub zero_kv: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub speculation: SpeculationSettings,
    /// Seconds to wait for a worker in place of a lost one, before the replica continues with fewer ranks
    #[arg(long, env = "LOCKSTEP_REPLAN_SECONDS", default_value_t = 10)]
    pub replan_seconds: u64,
    /// Seconds that enough workers must have been present before the replica returns to more ranks
    #[arg(long, env = "LOCKSTEP_REGROW_SECONDS", default_value_t = 10)]
    pub regrow_seconds: u64,
    /// Seconds after a takeover of another replica's streams in which the replica does not return to more ranks
    #[arg(long, env = "LOCKSTEP_TAKEOVER_SECONDS", default_value_t = 60)]
    pub takeover_seconds: u64,
    /// Maximum seconds for a worker to load its part of the model
    #[arg(long, env = "LOCKSTEP_LOAD_SECONDS", default_value_t = 600)]
    pub load_seconds: u64,
    /// Also send a trace span for every step and rank, not only for requests
    #[arg(
        long, env = "LOCKSTEP_OTLP_STEPS", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub otlp_steps: bool,
}

fn meaning(mode: NumericsMode) -> &'static str {
    match mode {
        NumericsMode::Lockstep => "The same request gives the same tokens, whatever happens",
        NumericsMode::Fast => {
            "GPUs only: large products by cuBLASLt, sums between ranks by NCCL; tokens may differ with batch, grid \
             and faults"
        }
    }
}

impl CoordinatorSettings {
    pub fn grid(&self) -> Grid {
        Grid { pp: self.pp, tp: self.tp }
    }

    /// Returns the number of ranks of one replica. `resolved` has checked that there are at most a thousand.
    pub fn n_ranks(&self) -> u16 {
        self.tp * self.pp
    }

    pub fn activations(&self, class: DeviceClass) -> Activations {
        self.activations.unwrap_or(if class == DeviceClass::Cuda { Activations::Bf16 } else { Activations::Int8 })
    }

    pub fn kv_dtype(&self, class: DeviceClass) -> KvDtype {
        self.kv_dtype.dtype_on(class)
    }

    pub fn max_chunk_tokens(&self, queue: &QueueSettings) -> u32 {
        self.max_chunk_tokens.unwrap_or(queue.max_batch_tokens)
    }

    pub fn pace(&self) -> StepPace {
        match self.step_millis {
            None => StepPace::DEFAULT,
            Some(0) => StepPace::fixed(u64::MAX),
            Some(millis) => StepPace::fixed(millis.saturating_mul(1000)),
        }
    }

    pub fn prefix_cache(&self) -> bool {
        self.prefix_cache.unwrap_or(!self.zero_kv)
    }

    /// Fills in everything that does not depend on the model, and checks it.
    pub fn resolved(mut self, queue: &QueueSettings, device: DeviceChoice) -> anyhow::Result<CoordinatorSettings> {
        self.activations = Some(self.activations(device.class()));
        self.kv_dtype = KvDtypeChoice::Of(self.kv_dtype(device.class()));
        self.max_chunk_tokens = Some(self.max_chunk_tokens(queue));
        self.prefix_cache = Some(self.prefix_cache());
        self.check(device.class())?;
        Ok(self)
    }

    fn check(&self, class: DeviceClass) -> anyhow::Result<()> {
        at_least_one("tp", self.tp)?;
        at_least_one("pp", self.pp)?;
        at_least_one("load-seconds", self.load_seconds)?;
        self.speculation.check()?;
        self.max_chunk_tokens.map_or(Ok(()), |n| at_least_one("max-chunk-tokens", n))?;
        ensure!(self.pp <= STAGES_MAX, "--pp {} is more than {STAGES_MAX} stages", self.pp);
        let n_ranks = u32::from(self.tp) * u32::from(self.pp);
        ensure!(n_ranks <= RANKS_MAX, "--tp {} times --pp {} is more than {RANKS_MAX} ranks", self.tp, self.pp);
        ensure!(self.context.is_none_or(|n| n >= 2), "--context is below 2: a prompt and its answer need a token each");
        ensure!(
            !(self.zero_kv && self.prefix_cache()),
            "--zero-kv with --prefix-cache true: cached blocks cannot be overwritten; set only one of them"
        );
        self.check_numerics(class)
    }

    fn check_numerics(&self, class: DeviceClass) -> anyhow::Result<()> {
        let (activations, kv_dtype) = (self.activations(class), self.kv_dtype(class));
        let is_bf16 = (activations == Activations::Bf16, kv_dtype == KvDtype::Bf16);
        match (class, is_bf16) {
            (DeviceClass::Cuda, (true, true)) | (DeviceClass::Cpu | DeviceClass::Sim, (false, false)) => {}
            (class, _) => bail!(
                "--activations {activations} with --kv-dtype {kv_dtype}: both are bf16 on a GPU, and neither is on {}",
                if class == DeviceClass::Cuda { "cpu" } else { class.name() }
            ),
        }
        if self.numerics == NumericsMode::Fast && class != DeviceClass::Cuda {
            bail!("--numerics fast is for GPUs: other devices have one mode");
        }
        Ok(())
    }
}

/// The addresses and the name of a coordinator in a process of its own.
#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ListenSettings {
    /// Address to listen on for workers and routers
    #[arg(long, env = "LOCKSTEP_LISTEN", value_name = "ADDR", default_value_t = LISTEN)]
    pub listen: SocketAddr,
    /// Name of the replica, in etcd, logs and resume handles [default: host name and port]
    #[arg(long, env = "LOCKSTEP_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
    /// Address of this coordinator in etcd [default: --listen, with the host name in place of 0.0.0.0]
    #[arg(long, env = "LOCKSTEP_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,
}

const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 50100);

/// The settings of `lockstep coordinator`.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub struct CoordinatorRole {
    #[command(flatten)]
    #[serde(flatten)]
    pub listen: ListenSettings,
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
    pub model: ModelSettings,
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
    pub watch: WatchSettings,
}

impl CoordinatorRole {
    pub fn resolved(mut self) -> anyhow::Result<CoordinatorRole> {
        let is_advertisable = self.listen.advertise.is_none() || self.store.is_given();
        ensure!(is_advertisable, "--advertise needs --etcd-endpoints HOST:PORT");
        self.store.check()?;
        self.queue.check()?;
        self.device.device = self.device.device.resolved();
        self.coordinator = self.coordinator.resolved(&self.queue, self.device.device)?;
        self.watch = self.watch.resolved()?;
        Ok(self)
    }

    pub fn parts(&self) -> CoordinatorParts<'_> {
        let (model, queue) = (&self.model, &self.queue);
        let (coordinator, device) = (&self.coordinator, self.device.device);
        CoordinatorParts { model, queue, coordinator, device, spoken: self.spoken }
    }
}

/// The settings of a coordinator, from either role.
#[derive(Clone, Copy)]
pub struct CoordinatorParts<'a> {
    pub model: &'a ModelSettings,
    pub queue: &'a QueueSettings,
    pub coordinator: &'a CoordinatorSettings,
    pub device: DeviceChoice,
    pub spoken: ProtocolSettings,
}
