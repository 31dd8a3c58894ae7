//! The health address of a role without clients.

use clap::Args;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HealthSettings {
    /// Address of an HTTP server with /livez, /health, /ready and /metrics of this process [default: none]
    #[arg(long, env = "LOCKSTEP_HEALTH", value_name = "ADDR")]
    pub health: Option<SocketAddr>,
}
