//! Settings from flags, then `LOCKSTEP_*`, then a file; resolved once into the one `Config` that the roles are built
//! from. Nothing else reads the environment.

use crate::device::Device;
use anyhow::{Context, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use coordinator::STAGES_MAX;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use telemetry::{Collector, Headers};
use types::{DeviceClass, Pace};

/// The tokenizer's crate tells of its tables as it builds them, which is nothing to tell an operator.
pub const LOG: &str = "info,tk_encode=warn";

/// Of one machine. Beyond it, sums would wait for more peers than they have leaves.
const RANKS_MAX: u32 = 1024;

/// What can be said, each of it optional. Flags and the file have the same names, because they are the same fields.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// A .gguf file, a Hugging Face folder, a catalogue name or a hub id [default: smollm2]
    #[arg(index = 1, env = "LOCKSTEP_MODEL")]
    pub model: Option<String>,
    /// The name that clients call the model by [default: the model's own]
    #[arg(long, env = "LOCKSTEP_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
    /// Address of the HTTP API [default: 127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_HTTP", value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// Address of the gRPC API [default: 127.0.0.1:50051]
    #[arg(long, env = "LOCKSTEP_GRPC", value_name = "ADDR")]
    pub grpc: Option<SocketAddr>,
    /// Host of both APIs, where no full address is given
    #[arg(long, env = "LOCKSTEP_HOST", value_name = "IP")]
    pub host: Option<IpAddr>,
    /// Port of the HTTP API, where no full address is given
    #[arg(long, env = "LOCKSTEP_PORT")]
    pub port: Option<u16>,
    /// Where `scale` and `reload` reach this machine's replicas, on loopback: a port each, from this one on
    /// [default: 127.0.0.1:50100, if it is free]
    #[arg(long, env = "LOCKSTEP_CONTROL", value_name = "ADDR")]
    pub control: Option<SocketAddr>,
    /// Ranks that share each layer [default: 1]
    #[arg(long, env = "LOCKSTEP_TP", value_name = "N")]
    pub tp: Option<u16>,
    /// Stages that follow each other, each with its own layers [default: 1]
    #[arg(long, env = "LOCKSTEP_PP", value_name = "N")]
    pub pp: Option<u16>,
    /// Replicas of the whole grid, each with workers of its own, behind the one router [default: 1]
    #[arg(long, env = "LOCKSTEP_REPLICAS", value_name = "N")]
    pub replicas: Option<u16>,
    /// Which of several replicas gets a request: prefix (where its first token comes soonest, by what caches have and
    /// what is to be done), least-work, power-of-two, round-robin, affinity (by session) [default: prefix]
    #[arg(long, env = "LOCKSTEP_POLICY", value_enum)]
    pub policy: Option<Policy>,
    /// Workers as threads of this process, not as processes of their own [default: false]
    #[arg(long, env = "LOCKSTEP_INPROC", num_args = 0..=1, default_missing_value = "true")]
    pub inproc: Option<bool>,
    /// What computes: cpu, cuda (each worker a GPU by turns), cuda:N, auto (a GPU if there is one), or sim (no model)
    /// [default: cpu]
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
    /// What workers of this machine exchange numbers over [default: auto]
    #[arg(long, env = "LOCKSTEP_WIRE", value_enum)]
    pub wire: Option<Wire>,
    /// What carries numbers between GPUs [default: auto]
    #[arg(long, env = "LOCKSTEP_COLLECTIVE", value_enum)]
    pub collective: Option<Carrier>,
    /// Whether sums on GPUs have one order on every grid and in any company [default: lockstep]
    #[arg(long, env = "LOCKSTEP_NUMERICS", value_enum)]
    pub numerics: Option<Numerics>,
    /// Threads of each worker [default: the cores, divided among this machine's workers]
    #[arg(long, env = "LOCKSTEP_THREADS")]
    pub threads: Option<usize>,
    /// What meets a weight: int8 or f32 where that is quantized on the CPU, bf16 on a GPU [default: int8, or bf16]
    #[arg(long, env = "LOCKSTEP_ACTIVATIONS", value_enum)]
    pub activations: Option<Activations>,
    /// What K and V are kept in: f16 or f32 on the CPU, bf16 on a GPU [default: f16, or bf16]
    #[arg(long, env = "LOCKSTEP_KV_DTYPE", value_enum)]
    pub kv_dtype: Option<KvDtype>,
    /// Memory for the KV cache, as 512MiB or 4GiB [default: what 8 full contexts need, at most a quarter of memory]
    #[arg(long, env = "LOCKSTEP_KV_MEMORY", value_name = "BYTES")]
    pub kv_memory: Option<Bytes>,
    /// Tokens that a request may have, prompt and answer [default: the model's]
    #[arg(long, alias = "max-model-len", env = "LOCKSTEP_CONTEXT")]
    pub context: Option<u32>,
    /// Tokens in one step at most [default: 512]
    #[arg(long, env = "LOCKSTEP_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: Option<u32>,
    /// Tokens of one request in one step at most [default: as many as in a step]
    #[arg(long, env = "LOCKSTEP_MAX_CHUNK_TOKENS")]
    pub max_chunk_tokens: Option<u32>,
    /// Requests that run at once [default: 64]
    #[arg(long, env = "LOCKSTEP_MAX_RUNNING")]
    pub max_running: Option<u32>,
    /// Requests that wait behind them; more are told to come again [default: 1024]
    #[arg(long, env = "LOCKSTEP_MAX_WAITING")]
    pub max_waiting: Option<u32>,
    /// Share the KV of equal beginnings between requests [default: true]
    #[arg(long, env = "LOCKSTEP_PREFIX_CACHE", action = clap::ArgAction::Set)]
    pub prefix_cache: Option<bool>,
    /// Overwrite a request's KV with zeros on every rank when it ends; requests share none then [default: false]
    #[arg(long, env = "LOCKSTEP_ZERO_KV", num_args = 0..=1, default_missing_value = "true")]
    pub zero_kv: Option<bool>,
    /// A file of API keys, a line each: key, or name:key; a name's requests share no cache with others'. Limits may
    /// stand behind it: weight=4 requests_per_minute=600 tokens_per_minute=90000 concurrent=16
    #[arg(long, env = "LOCKSTEP_API_KEYS", value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// One API key, beside those of the file
    #[arg(long, env = "LOCKSTEP_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Seconds that running requests have to finish after SIGTERM [default: 30]
    #[arg(long, env = "LOCKSTEP_DRAIN_SECONDS")]
    pub drain_seconds: Option<u64>,
    /// Seconds that a lost rank's place is kept for another worker, before fewer ranks carry the model [default: 10]
    #[arg(long, env = "LOCKSTEP_REPLAN_SECONDS")]
    pub replan_seconds: Option<u64>,
    /// Seconds that enough workers must have been there before the model is spread over them again [default: 10]
    #[arg(long, env = "LOCKSTEP_REGROW_SECONDS")]
    pub regrow_seconds: Option<u64>,
    /// Seconds that a worker may take to load its part of the model [default: 600]
    #[arg(long, env = "LOCKSTEP_LOAD_SECONDS")]
    pub load_seconds: Option<u64>,
    /// Seconds that a request whose replica is away waits for it or another one, before it fails [default: 60]
    #[arg(long, env = "LOCKSTEP_FAILOVER_MAX", value_name = "SECONDS")]
    pub failover_max: Option<u64>,
    /// Seconds that a request may take in all, whatever its client says [default: as long as it takes]
    #[arg(long, env = "LOCKSTEP_REQUEST_SECONDS", value_name = "SECONDS")]
    pub request_seconds: Option<u64>,
    /// How logs are written to stderr [default: text]
    #[arg(long, env = "LOCKSTEP_LOG_FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
    /// Which logs are written, as info or router=debug,info [default: info, but for the tokenizer]
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
    /// Send a span of each step and rank too, not only of requests [default: false]
    #[arg(long, env = "LOCKSTEP_OTLP_STEPS", num_args = 0..=1, default_missing_value = "true")]
    pub otlp_steps: Option<bool>,
    /// Send prompts and answers too, within the spans of requests [default: false]
    #[arg(long, env = "LOCKSTEP_OTLP_CONTENT", num_args = 0..=1, default_missing_value = "true")]
    pub otlp_content: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isa {
    Plain,
    Avx2,
    Avx512,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    Prefix,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Affinity,
}

impl From<Policy> for router::Policy {
    fn from(policy: Policy) -> router::Policy {
        match policy {
            Policy::Prefix => router::Policy::Prefix,
            Policy::LeastWork => router::Policy::LeastWork,
            Policy::PowerOfTwo => router::Policy::PowerOfTwo,
            Policy::RoundRobin => router::Policy::RoundRobin,
            Policy::Affinity => router::Policy::Affinity,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Memory where two workers are on one machine, otherwise TCP
    Auto,
    /// Memory that they share, or not at all
    Shm,
    /// TCP, on one machine too
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// NCCL where every worker has it and a GPU of its own, otherwise the host; between GPUs of one host that reach
    /// each other's memory small sums go over that, and without NCCL all
    Auto,
    /// The host, along --wire
    Host,
    /// NCCL alone, or not at all; from 2.30 on workers may share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set
    Nccl,
    /// As auto, but sums go over memory that GPUs of one host reach of each other (CUDA IPC), or not at all; workers
    /// may share a GPU
    Ipc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CudaGraphs {
    /// Where every sequence says one token, as far as the memory for them goes
    Auto,
    Off,
}

impl CudaGraphs {
    pub fn name(self) -> String {
        flag_value(&self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Numerics {
    /// The same request has the same tokens, whatever happens
    Lockstep,
    /// On GPUs: many rows multiplied by cuBLASLt, sums of ranks by NCCL; tokens may differ with company, grid and fault
    Fast,
}

impl From<Numerics> for Pace {
    fn from(numerics: Numerics) -> Pace {
        match numerics {
            Numerics::Lockstep => Pace::Lockstep,
            Numerics::Fast => Pace::Fast,
        }
    }
}

impl Carrier {
    pub fn name(self) -> String {
        flag_value(&self)
    }
}

impl Wire {
    pub fn name(self) -> String {
        flag_value(&self)
    }
}

impl Isa {
    pub fn name(self) -> String {
        flag_value(&self)
    }
}

/// As it is said on a command line.
fn flag_value(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    Int8,
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F16,
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// Named as `OTEL_EXPORTER_OTLP_PROTOCOL` names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    // As the variable's standard has it: empty is unset.
    #[default]
    #[value(alias = "")]
    Grpc,
    /// Protobuf over HTTP
    #[value(name = "http/protobuf", alias = "http")]
    #[serde(rename = "http/protobuf", alias = "http")]
    Http,
}

impl OtlpProtocol {
    pub fn name(self) -> String {
        flag_value(&self)
    }
}

/// A size in bytes, written as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| format!("{text:?} does not start with a whole number"))?;
        let scale: u64 = match unit.trim() {
            "" | "B" => 1,
            "KiB" | "K" => 1 << 10,
            "MiB" | "M" => 1 << 20,
            "GiB" | "G" => 1 << 30,
            "TiB" | "T" => 1 << 40,
            other => return Err(format!("{other:?} is no unit of bytes: use KiB, MiB, GiB or TiB")),
        };
        number.checked_mul(scale).map(Bytes).ok_or_else(|| format!("{text} is more than can be counted"))
    }
}

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Bytes, String> {
        text.parse()
    }
}

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> String {
        bytes.to_string()
    }
}

impl std::fmt::Display for Bytes {
    /// In the largest unit that loses nothing, so that what is printed can be read back.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let exact = units.iter().find(|(bits, _)| self.0 != 0 && self.0.is_multiple_of(1 << bits));
        match exact {
            Some((bits, unit)) => write!(f, "{}{unit}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Everything that the roles are built from; no option left open but those that the model decides.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Config {
    pub model: String,
    pub served_model_name: Option<String>,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub control: Option<SocketAddr>,
    pub tp: u16,
    pub pp: u16,
    pub replicas: u16,
    pub policy: Policy,
    pub inproc: bool,
    pub device: Device,
    pub kernel_cache: Option<PathBuf>,
    pub cuda_graphs: CudaGraphs,
    pub isa: Option<Isa>,
    pub wire: Wire,
    pub collective: Carrier,
    pub numerics: Numerics,
    pub threads: usize,
    pub activations: Activations,
    pub kv_dtype: KvDtype,
    pub kv_memory: Option<Bytes>,
    pub context: Option<u32>,
    pub max_batch_tokens: u32,
    pub max_chunk_tokens: u32,
    pub max_running: u32,
    pub max_waiting: u32,
    pub prefix_cache: bool,
    pub zero_kv: bool,
    pub api_keys: Option<PathBuf>,
    // Printed for nobody.
    #[serde(skip)]
    pub api_key: Option<String>,
    pub drain_seconds: u64,
    pub replan_seconds: u64,
    pub regrow_seconds: u64,
    pub load_seconds: u64,
    pub failover_max: u64,
    pub request_seconds: Option<u64>,
    pub log_format: LogFormat,
    pub log: String,
    pub otlp_endpoint: Option<String>,
    pub otlp_protocol: OtlpProtocol,
    // Printed for nobody.
    #[serde(skip)]
    pub otlp_headers: Option<String>,
    pub otlp_certificate: Option<String>,
    pub otlp_sample: f64,
    pub otlp_metrics_seconds: u64,
    pub otlp_steps: bool,
    pub otlp_content: bool,
}

/// What a process tells of itself.
pub struct Watched<'a> {
    pub log: &'a str,
    pub log_format: LogFormat,
    pub collector: Option<Collector>,
    /// The label `model_name` of its metrics, by which dashboards made for vLLM choose.
    pub model: Option<&'a str>,
}

impl Settings {
    /// These settings, with what they leave open taken from a file.
    pub fn over_file(self, path: Option<&Path>) -> anyhow::Result<Settings> {
        let Some(path) = path else { return Ok(self) };
        self.over(&read(path)?).with_context(|| format!("in {}", path.display()))
    }

    fn over(self, file: &str) -> anyhow::Result<Settings> {
        // Read once as settings, so that a wrong name or value in the file is told with its line.
        let _: Settings = toml::from_str(file)?;
        let mut merged: toml::Table = toml::from_str(file)?;
        merged.extend(toml::Table::try_from(self)?);
        Ok(merged.try_into()?)
    }

    pub fn resolve(self) -> anyhow::Result<Config> {
        let host = self.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let max_batch_tokens = self.max_batch_tokens.unwrap_or(512);
        let (tp, pp) = (self.tp.unwrap_or(1), self.pp.unwrap_or(1));
        let replicas = self.replicas.unwrap_or(1);
        let n_local = usize::from(tp) * usize::from(pp) * usize::from(replicas);
        let device = self.device.unwrap_or(Device::Cpu).resolved();
        let zero_kv = self.zero_kv.unwrap_or(false);
        let (activations, kv_dtype) = match device.class() {
            DeviceClass::Cuda => (Activations::Bf16, KvDtype::Bf16),
            DeviceClass::Cpu | DeviceClass::Sim => (Activations::Int8, KvDtype::F16),
        };
        let config = Config {
            model: self.model.unwrap_or_else(|| "smollm2".into()),
            served_model_name: self.served_model_name,
            http: self.http.unwrap_or(SocketAddr::new(host, self.port.unwrap_or(8000))),
            grpc: self.grpc.unwrap_or(SocketAddr::new(host, 50051)),
            control: self.control,
            tp,
            pp,
            replicas,
            policy: self.policy.unwrap_or(Policy::Prefix),
            inproc: self.inproc.unwrap_or(false),
            device,
            kernel_cache: self.kernel_cache,
            cuda_graphs: self.cuda_graphs.unwrap_or(CudaGraphs::Auto),
            isa: self.isa,
            wire: self.wire.unwrap_or(Wire::Auto),
            collective: self.collective.unwrap_or(Carrier::Auto),
            numerics: self.numerics.unwrap_or(Numerics::Lockstep),
            threads: self.threads.unwrap_or_else(|| (cores() / n_local.max(1)).max(1)),
            activations: self.activations.unwrap_or(activations),
            kv_dtype: self.kv_dtype.unwrap_or(kv_dtype),
            kv_memory: self.kv_memory,
            context: self.context,
            max_batch_tokens,
            max_chunk_tokens: self.max_chunk_tokens.unwrap_or(max_batch_tokens),
            max_running: self.max_running.unwrap_or(64),
            max_waiting: self.max_waiting.unwrap_or(1024),
            prefix_cache: self.prefix_cache.unwrap_or(!zero_kv),
            zero_kv,
            api_keys: self.api_keys,
            api_key: self.api_key,
            drain_seconds: self.drain_seconds.unwrap_or(30),
            replan_seconds: self.replan_seconds.unwrap_or(10),
            regrow_seconds: self.regrow_seconds.unwrap_or(10),
            load_seconds: self.load_seconds.unwrap_or(600),
            failover_max: self.failover_max.unwrap_or(60),
            request_seconds: self.request_seconds,
            log_format: self.log_format.unwrap_or(LogFormat::Text),
            log: self.log.unwrap_or_else(|| LOG.into()),
            // As the variable's standard has it: empty is unset.
            otlp_endpoint: self.otlp_endpoint.filter(|endpoint| !endpoint.is_empty()),
            otlp_protocol: self.otlp_protocol.unwrap_or_default(),
            otlp_headers: self.otlp_headers,
            otlp_certificate: self.otlp_certificate.filter(|file| !file.is_empty()),
            otlp_sample: self.otlp_sample.unwrap_or(1.0),
            otlp_metrics_seconds: self.otlp_metrics_seconds.unwrap_or(METRICS_SECONDS),
            otlp_steps: self.otlp_steps.unwrap_or(false),
            otlp_content: self.otlp_content.unwrap_or(false),
        };
        config.check()?;
        Ok(config)
    }
}

impl Config {
    pub fn watched(&self) -> anyhow::Result<Watched<'_>> {
        let reached = |endpoint: &String| Reached {
            endpoint: endpoint.clone(),
            protocol: self.otlp_protocol,
            headers: self.otlp_headers.as_deref(),
            certificate: self.otlp_certificate.as_deref().map(Path::new),
            sample: self.otlp_sample,
            metrics_seconds: self.otlp_metrics_seconds,
        };
        let collector = self.otlp_endpoint.as_ref().map(|endpoint| reached(endpoint).collector()).transpose()?;
        let told = |collector| Collector { steps: self.otlp_steps, content: self.otlp_content, ..collector };
        let (log, model) = (&*self.log, self.served_model_name.as_deref());
        Ok(Watched { log, log_format: self.log_format, collector: collector.map(told), model })
    }

    /// Of one replica.
    pub fn n_ranks(&self) -> u16 {
        // `check` has seen that it is no more than a thousand.
        self.tp * self.pp
    }

    /// Workers of this machine, which share its cores and its memory.
    pub fn n_workers(&self) -> u16 {
        self.n_ranks() * self.replicas
    }

    fn check(&self) -> anyhow::Result<()> {
        check_sample(self.otlp_sample)?;
        let at_least_one = [
            ("tp", self.tp.into()),
            ("pp", self.pp.into()),
            ("replicas", self.replicas.into()),
            ("threads", self.threads as u64),
            ("max-batch-tokens", self.max_batch_tokens.into()),
            ("max-chunk-tokens", self.max_chunk_tokens.into()),
            ("max-running", self.max_running.into()),
            ("max-waiting", self.max_waiting.into()),
            ("load-seconds", self.load_seconds),
        ];
        let said = self.request_seconds.map(|seconds| ("request-seconds", seconds));
        for (name, value) in at_least_one.into_iter().chain(said) {
            ensure!(value > 0, "--{name} is 0; it must be at least 1");
        }
        ensure!(self.pp <= STAGES_MAX, "--pp {} is more than {STAGES_MAX} stages", self.pp);
        let n_ranks = u32::from(self.tp) * u32::from(self.pp);
        ensure!(n_ranks <= RANKS_MAX, "--tp {} times --pp {} is more than {RANKS_MAX} ranks", self.tp, self.pp);
        let n_workers = n_ranks * u32::from(self.replicas);
        ensure!(n_workers <= RANKS_MAX, "--replicas {} of {n_ranks} ranks are more than {RANKS_MAX}", self.replicas);
        ensure!(self.context.is_none_or(|n| n >= 2), "--context is below 2: a prompt and its answer need a token each");
        ensure!(self.threads <= 1024, "--threads is {}; it must be at most 1024", self.threads);
        ensure!(
            !(self.zero_kv && self.prefix_cache),
            "--zero-kv with --prefix-cache true: what others may find cannot be overwritten; leave one of them out"
        );
        let is_bf16 = (self.activations == Activations::Bf16, self.kv_dtype == KvDtype::Bf16);
        match (self.device.class(), is_bf16) {
            (DeviceClass::Cuda, (true, true)) | (DeviceClass::Cpu | DeviceClass::Sim, (false, false)) => {}
            (class, _) => bail!(
                "--activations {} with --kv-dtype {}: both are bf16 on a GPU, and neither is on {}",
                flag_value(&self.activations),
                flag_value(&self.kv_dtype),
                if class == DeviceClass::Cuda { "cpu" } else { class.name() }
            ),
        }
        if self.numerics == Numerics::Fast && self.device.class() != DeviceClass::Cuda {
            bail!("--numerics fast is for GPUs: elsewhere there is one way to compute");
        }
        if self.max_running > self.max_batch_tokens {
            bail!(
                "--max-running {} is more than --max-batch-tokens {}: not all of them could take a step",
                self.max_running,
                self.max_batch_tokens
            );
        }
        Ok(())
    }
}

/// How often metrics are sent, unless somebody says otherwise.
pub const METRICS_SECONDS: u64 = 15;

/// Where a role sends what it tells of itself, and how.
pub struct Reached<'a> {
    pub endpoint: String,
    pub protocol: OtlpProtocol,
    pub headers: Option<&'a str>,
    pub certificate: Option<&'a Path>,
    pub sample: f64,
    pub metrics_seconds: u64,
}

impl Reached<'_> {
    pub fn collector(self) -> anyhow::Result<Collector> {
        let protocol = match self.protocol {
            OtlpProtocol::Grpc => telemetry::Protocol::Grpc,
            OtlpProtocol::Http => telemetry::Protocol::Http,
        };
        let headers = Headers::parse(self.headers.unwrap_or_default()).context("--otlp-headers")?;
        let authority = self.certificate.map(|path| read(path).map(String::into_bytes));
        let authority = authority.transpose().context("--otlp-certificate")?;
        let (endpoint, sample) = (self.endpoint, self.sample);
        let metrics_every = (self.metrics_seconds > 0).then(|| Duration::from_secs(self.metrics_seconds));
        Ok(Collector { endpoint, protocol, headers, authority, sample, metrics_every, ..Collector::default() })
    }
}

pub fn check_sample(ratio: f64) -> anyhow::Result<()> {
    ensure!((0.0..=1.0).contains(&ratio), "--otlp-sample is {ratio}; it must be from 0 to 1");
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// A file for a command whose settings have several parts: each takes what it knows, and nothing may be left.
#[derive(Default)]
pub struct File {
    name: String,
    table: toml::Table,
}

impl File {
    pub fn read(path: Option<&Path>) -> anyhow::Result<File> {
        let Some(path) = path else { return Ok(File::default()) };
        let name = path.display().to_string();
        let table = toml::from_str(&read(path)?).with_context(|| format!("in {name}"))?;
        Ok(File { name, table })
    }

    /// These flags, with what they leave open taken from the file.
    pub fn under<T: Args + Serialize + DeserializeOwned>(&mut self, flags: T) -> anyhow::Result<T> {
        let known = T::augment_args(clap::Command::new("settings"));
        let mut merged = toml::Table::new();
        for argument in known.get_arguments() {
            let name = argument.get_id().as_str().replace('_', "-");
            merged.extend(self.table.remove_entry(&name));
        }
        let _: T = merged.clone().try_into().with_context(|| format!("in {}", self.name))?;
        merged.extend(toml::Table::try_from(flags)?);
        Ok(merged.try_into()?)
    }

    pub fn end(self) -> anyhow::Result<()> {
        let left = self.table.keys().next();
        left.map_or(Ok(()), |name| Err(anyhow!("in {}: {name} is no setting of this command", self.name)))
    }
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_bytes(text: &str, expect: Result<u64, &str>) {
        let got = text.parse::<Bytes>().map(|bytes| bytes.0);
        match expect {
            Ok(bytes) => assert_eq!(got, Ok(bytes), "{text}"),
            Err(part) => assert!(got.clone().is_err_and(|e| e.contains(part)), "{text}: {got:?}"),
        }
    }

    #[test]
    fn bytes_are_read_as_people_write_them() {
        check_bytes("512MiB", Ok(512 << 20));
        check_bytes("4G", Ok(4 << 30));
        check_bytes("17", Ok(17));
        check_bytes("many", Err("whole number"));
        check_bytes("4Gb", Err("no unit"));
        check_bytes("99999999TiB", Err("more than"));
        assert_eq!(Bytes(1536 << 20).to_string(), "1536MiB");
        assert_eq!(Bytes(3 << 30).to_string(), "3GiB");
    }

    #[test]
    fn what_is_overwritten_is_shared_with_nobody() {
        let resolve = |zero_kv, prefix_cache| Settings { zero_kv, prefix_cache, ..Settings::default() }.resolve();
        let shares = |zero_kv, prefix_cache| resolve(zero_kv, prefix_cache).unwrap().prefix_cache;
        assert!(shares(None, None) && shares(Some(false), Some(true)));
        assert!(!shares(Some(true), None) && !shares(Some(true), Some(false)));
        assert!(resolve(Some(true), Some(true)).unwrap_err().to_string().contains("--prefix-cache"));
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() -> anyhow::Result<()> {
        let flags = Settings { threads: Some(3), ..Settings::default() };
        let config = flags.over("threads = 1\nmax-running = 7\nkv-memory = \"64MiB\"")?.resolve()?;
        assert_eq!((config.threads, config.max_running, config.max_waiting), (3, 7, 1024));
        assert_eq!(config.kv_memory, Some(Bytes(64 << 20)));
        Ok(())
    }

    #[test]
    fn what_is_printed_can_be_read_back() -> anyhow::Result<()> {
        let settings = Settings { kv_memory: Some(Bytes(5 << 20)), port: Some(81), ..Settings::default() };
        let config = settings.resolve()?;
        let again = Settings::default().over(&toml::to_string(&config)?)?.resolve()?;
        assert_eq!(again, config);
        Ok(())
    }

    #[test]
    fn each_part_of_a_command_takes_its_own_from_the_file() -> anyhow::Result<()> {
        let table = toml::from_str("threads = 5\ntls = \"on\"\nworse = 1")?;
        let mut file = File { name: "a file".into(), table };
        let settings = file.under(Settings { tp: Some(2), ..Settings::default() })?;
        assert_eq!((settings.threads, settings.tp), (Some(5), Some(2)));
        assert!(file.end().is_err_and(|e| e.to_string().contains("tls is no setting")));
        Ok(())
    }

    #[test]
    fn a_device_brings_its_numbers() -> anyhow::Result<()> {
        let on = |device| Settings { device: Some(device), ..Settings::default() };
        let cuda = on(Device::Cuda(Some(1))).resolve()?;
        assert_eq!((cuda.activations, cuda.kv_dtype), (Activations::Bf16, KvDtype::Bf16));
        let again = Settings::default().over(&toml::to_string(&cuda)?)?.resolve()?;
        assert_eq!(again, cuda);
        let fast = Settings { numerics: Some(Numerics::Fast), ..on(Device::Cpu) };
        assert!(fast.resolve().is_err_and(|e| e.to_string().contains("--numerics fast is for GPUs")));
        for wrong in [
            Settings { activations: Some(Activations::Int8), ..on(Device::Cuda(None)) },
            Settings { kv_dtype: Some(KvDtype::F16), ..on(Device::Cuda(None)) },
            Settings { kv_dtype: Some(KvDtype::Bf16), ..on(Device::Cpu) },
        ] {
            assert!(wrong.resolve().is_err_and(|e| e.to_string().contains("both are bf16 on a GPU")));
        }
        Ok(())
    }

    #[test]
    fn wrong_names_and_values_are_told() {
        let wrong = |file: &str| Settings::default().over(file).map_err(|e| format!("{e:#}")).unwrap_err();
        assert!(wrong("treads = 1").contains("treads"));
        assert!(wrong("threads = \"two\"").contains("threads"));
        let deep = Settings { pp: Some(17), ..Settings::default() };
        assert!(deep.resolve().is_err_and(|e| e.to_string().contains("--pp 17 is more than 16 stages")));
        let zero = Settings { threads: Some(0), ..Settings::default() };
        assert!(zero.resolve().is_err_and(|e| e.to_string().contains("--threads is 0")));
    }
}
