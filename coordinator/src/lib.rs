//! Owns a replica: its ranks, the plan of its steps, and the routing of its output. Knows nothing of tensors or text.
//!
//! One loop (`replica`) owns all state. Everything that happens is an `Event` on one bounded queue, and the loop's
//! decisions leave through one bounded queue per peer.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod config;
mod deployment;
mod epoch_start;
mod event;
mod members;
mod outbound;
pub mod placement;
mod replica;
mod requests;
mod service;
mod worker_id;

pub use config::{Config, DigestInputs, DraftModel, Limits, MtpDrafts, Speculation, Timings};
pub use placement::{
    Blueprint, Bottleneck, DraftModelCost, ExpertShape, Inventory, Link, Links, Machine, ModelShape, PlacementPolicy,
    PoolSize, Prediction, Roofline, STAGES_MAX, Shard, ShortenedContext, Speed, StageTime, StepWork, Unplaceable,
    UnplaceableReason, plan, plan_fewer, predict,
};
pub use scheduler::{DraftPolicy, RowCost, StepPace};
pub use service::serve::serve;
pub use worker_id::WorkerId;

/// Why a coordinator cannot serve, or go on serving.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("these limits are not supported")]
    Limits(#[from] types::Unsupported),
    #[error("connections are no longer accepted")]
    Server(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    ClaimLost(#[from] cluster::ClaimLost),
}
