//! The limits of a replica's load and of its drain. Its coordinator plans by them, and its routers reject requests by
//! them.

use super::check::at_least_one;
use anyhow::ensure;
use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct QueueSettings {
    /// Maximum tokens of one step, all requests together
    #[arg(long, alias = "max-num-batched-tokens", env = "LOCKSTEP_MAX_BATCH_TOKENS", default_value_t = 512)]
    pub max_batch_tokens: u32,
    /// Maximum number of requests that run at once, per replica
    #[arg(long, alias = "max-num-seqs", env = "LOCKSTEP_MAX_RUNNING", default_value_t = 64)]
    pub max_running: u32,
    /// Maximum number of requests that wait, per replica; more are refused with status 429
    #[arg(long, env = "LOCKSTEP_MAX_WAITING", default_value_t = 1024)]
    pub max_waiting: u32,
    /// Maximum seconds for running requests to finish after SIGTERM
    #[arg(long, env = "LOCKSTEP_DRAIN_SECONDS", default_value_t = 30)]
    pub drain_seconds: u64,
}

impl QueueSettings {
    pub fn check(&self) -> anyhow::Result<()> {
        at_least_one("max-batch-tokens", self.max_batch_tokens)?;
        at_least_one("max-running", self.max_running)?;
        at_least_one("max-waiting", self.max_waiting)?;
        ensure!(
            self.max_running <= self.max_batch_tokens,
            "--max-running {} is more than --max-batch-tokens {}: not all of them could run in one step",
            self.max_running,
            self.max_batch_tokens
        );
        Ok(())
    }
}
