//! The only crate that encodes: generated code, and conversions between it and `types`.
//!
//! A conversion from the wire checks everything that the types promise and nothing that only the receiver can know.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod v1 {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("lockstep.v1");
}

pub mod cluster {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("lockstep.cluster.v1");
}

/// The gRPC protocol that gateways use towards vLLM.
pub mod vllm {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("vllm.grpc.engine");
}

/// The protocol of vLLM's own gRPC server.
pub mod vllm_server {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("vllm");
}

/// The Open Inference Protocol.
pub mod kserve {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("inference");
}

mod assign;
mod details;
mod malformed;
mod protocol;
mod request;
mod reuse;
mod sampling;
mod step;
mod tier;
mod weights;

pub use assign::policy_digest;
pub use details::{StatusDetail, status_details};
pub use malformed::Malformed;
pub use protocol::{NEWEST, NoCommonProtocol, OLDEST, ProtocolRange, needed, since};
pub use request::stream_key;
pub use step::{decode_step, decode_traced_step, encode_step, encode_traced_step};

/// Every message of every service, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// A frame may carry whole logs, when many requests start or a replica replays. Set on both ends of both services.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// The build's version. `ProtocolRange` decides which builds can work together.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
