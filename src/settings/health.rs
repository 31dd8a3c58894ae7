//! The health address of a role without clients.

use clap::Args;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HealthSettings {
    /// Address of this role's own /health, /ready and /metrics, over plain HTTP [default: none]
    #[arg(long, env = "LOCKSTEP_HEALTH", value_name = "ADDR")]
    pub health: Option<SocketAddr>,
}
