//! The values of flags that are a choice.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

/// A folder, or that there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum FolderChoice {
    Off,
    Folder(PathBuf),
}

impl FromStr for FolderChoice {
    type Err = Infallible;

    fn from_str(word: &str) -> Result<FolderChoice, Infallible> {
        Ok(FolderChoice::from(word.to_owned()))
    }
}

impl From<String> for FolderChoice {
    fn from(word: String) -> FolderChoice {
        if word == "off" { FolderChoice::Off } else { FolderChoice::Folder(word.into()) }
    }
}

impl From<FolderChoice> for String {
    fn from(choice: FolderChoice) -> String {
        match choice {
            FolderChoice::Off => "off".into(),
            FolderChoice::Folder(folder) => folder.to_string_lossy().into_owned(),
        }
    }
}

/// The CPU instructions to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Instructions {
    /// Nothing beyond the architecture's baseline
    Plain,
    /// AVX2 with FMA and F16C
    Avx2,
    /// AVX-512 with VNNI
    Avx512,
    #[value(name = "avx512bf16")]
    Avx512Bf16,
    /// AVX-512 with AMX's tiles of int8
    Amx,
}

impl From<Instructions> for worker::Isa {
    fn from(instructions: Instructions) -> worker::Isa {
        match instructions {
            Instructions::Plain => worker::Isa::Plain,
            Instructions::Avx2 => worker::Isa::Avx2,
            Instructions::Avx512 => worker::Isa::Avx512,
            Instructions::Avx512Bf16 => worker::Isa::Avx512Bf16,
            Instructions::Amx => worker::Isa::Amx,
        }
    }
}

/// When the memory of a KV cache is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCommitChoice {
    /// As requests need it; unused memory is released
    Grow,
    /// All of it, while the worker begins to serve
    All,
}

/// How workers exchange numbers on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostWire {
    /// Shared memory between workers on one machine, otherwise TCP
    Auto,
    /// Shared memory only: all workers must be on one machine
    Shm,
    /// TCP, even on one machine
    Tcp,
}

impl From<HostWire> for worker::WireChoice {
    fn from(wire: HostWire) -> worker::WireChoice {
        match wire {
            HostWire::Auto => worker::WireChoice::Any,
            HostWire::Shm => worker::WireChoice::Memory,
            HostWire::Tcp => worker::WireChoice::Socket,
        }
    }
}

/// Whether TCP connections between workers are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkPrivacy {
    /// Authenticated, not encrypted
    Off,
    /// Authenticated and encrypted
    On,
}

impl From<LinkPrivacy> for worker::LinkEncryption {
    fn from(privacy: LinkPrivacy) -> worker::LinkEncryption {
        match privacy {
            LinkPrivacy::Off => worker::LinkEncryption::Off,
            LinkPrivacy::On => worker::LinkEncryption::On,
        }
    }
}

/// The transport of numbers between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuCarrier {
    /// NCCL if all workers have it and a GPU each, otherwise through the hosts; on one host GPUs that reach each
    /// other's memory exchange small sums there, and without NCCL all sums
    Auto,
    /// Through the hosts, by --wire
    Host,
    /// NCCL only; from NCCL 2.30 on workers may share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1 is set
    Nccl,
    /// As auto, but sums only go through memory that GPUs of one host reach (CUDA IPC); workers may share a GPU
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
    /// For steps in which every sequence computes one token, as far as there is memory for graphs
    Auto,
    /// Never
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// The names are those of `OTEL_EXPORTER_OTLP_PROTOCOL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtlpProtocol {
    // An empty variable counts as unset, as the standard requires.
    #[value(alias = "")]
    Grpc,
    /// Protobuf over HTTP
    #[value(name = "http/protobuf", alias = "http")]
    #[serde(rename = "http/protobuf", alias = "http")]
    Http,
}
