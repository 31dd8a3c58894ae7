//! The values of flags that are a choice.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The CPU instructions to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Instructions {
    Plain,
    Avx2,
    Avx512,
}

impl From<Instructions> for worker::Isa {
    fn from(instructions: Instructions) -> worker::Isa {
        match instructions {
            Instructions::Plain => worker::Isa::Plain,
            Instructions::Avx2 => worker::Isa::Avx2,
            Instructions::Avx512 => worker::Isa::Avx512,
        }
    }
}

/// How a router picks a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PickChoice {
    Prefix,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Affinity,
}

impl From<PickChoice> for router::PickPolicy {
    fn from(policy: PickChoice) -> router::PickPolicy {
        match policy {
            PickChoice::Prefix => router::PickPolicy::Prefix,
            PickChoice::LeastWork => router::PickPolicy::LeastWork,
            PickChoice::PowerOfTwo => router::PickPolicy::PowerOfTwo,
            PickChoice::RoundRobin => router::PickPolicy::RoundRobin,
            PickChoice::Affinity => router::PickPolicy::Affinity,
        }
    }
}

/// What workers exchange numbers over, on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostWire {
    /// Memory where two workers are on one machine, otherwise TCP
    Auto,
    /// Memory that they share, or not at all
    Shm,
    /// TCP, on one machine too
    Tcp,
}

impl From<HostWire> for worker::Wire {
    fn from(wire: HostWire) -> worker::Wire {
        match wire {
            HostWire::Auto => worker::Wire::Any,
            HostWire::Shm => worker::Wire::Memory,
            HostWire::Tcp => worker::Wire::Socket,
        }
    }
}

/// What carries numbers between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuCarrier {
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

impl From<GpuCarrier> for worker::CarrierChoice {
    fn from(carrier: GpuCarrier) -> worker::CarrierChoice {
        match carrier {
            GpuCarrier::Auto => worker::CarrierChoice::Auto,
            GpuCarrier::Host => worker::CarrierChoice::Host,
            GpuCarrier::Nccl => worker::CarrierChoice::Nccl,
            GpuCarrier::Ipc => worker::CarrierChoice::Ipc,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CudaGraphs {
    /// Where every sequence says one token, as far as the memory for them goes
    Auto,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// Named as `OTEL_EXPORTER_OTLP_PROTOCOL` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    // An empty variable counts as unset, as the standard asks.
    #[value(alias = "")]
    Grpc,
    /// Protobuf over HTTP
    #[value(name = "http/protobuf", alias = "http")]
    #[serde(rename = "http/protobuf", alias = "http")]
    Http,
}
