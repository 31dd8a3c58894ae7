//! What others speak over gRPC, in their words. Each only translates: requests go the way of all, through `generate`
//! and `embed`.

pub mod kserve;
pub mod vllm;

/// As health tells of them.
pub const SERVICES: [&str; 2] = ["vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService"];
