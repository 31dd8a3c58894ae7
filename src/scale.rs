//! `scale`: asks a coordinator for another grid, and says what came of it. Decides nothing.

use crate::trust::TrustSettings;
use anyhow::{Context, anyhow, bail};
use clap::Args;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{ScaleReply, ScaleRequest};
use proto::secure::{self, Refused};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::Status;

/// Beyond what a coordinator gives its workers to load by default.
const ANSWER_MAX: Duration = Duration::from_secs(3600);

#[derive(Args)]
pub struct Scale {
    /// The replica's coordinator
    #[arg(long, env = "LOCKSTEP_COORDINATOR", value_name = "HOST:PORT", default_value = "127.0.0.1:50100")]
    pub coordinator: String,
    /// Ranks that share each layer
    #[arg(long, value_name = "N")]
    pub tp: u16,
    /// Stages that follow each other
    #[arg(long, value_name = "N")]
    pub pp: u16,
    #[command(flatten)]
    pub trust: TrustSettings,
}

pub fn run(scale: &Scale) -> anyhow::Result<()> {
    let trust = scale.trust.resolve("router", &scale.coordinator, None)?;
    let asked = ScaleRequest { version: proto::VERSION.into(), tp: scale.tp.into(), pp: scale.pp.into() };
    let answer = Runtime::new()?.block_on(async {
        let mut client = CoordinatorClient::new(secure::channel(&scale.coordinator, trust));
        timeout(ANSWER_MAX, client.scale(asked)).await
    });
    let answer = answer.with_context(|| format!("{} does not answer", scale.coordinator))?;
    let reply = answer.map_err(|status| refused(&scale.coordinator, &status))?.into_inner();
    println!("{}", told(&reply));
    if (reply.tp, reply.pp) != (scale.tp.into(), scale.pp.into()) {
        bail!("a rank was lost meanwhile: the replica goes over to the grid that was asked for when it can");
    }
    Ok(())
}

fn refused(coordinator: &str, status: &Status) -> anyhow::Error {
    match Refused::cause_of(status) {
        Some(refused) => anyhow!("{coordinator}: {refused}"),
        None => anyhow!("{coordinator}: {}", status.message()),
    }
}

fn told(reply: &ScaleReply) -> String {
    let ScaleReply { tp, pp, micros, tokens_replayed } = reply;
    let seconds = Duration::from_micros(*micros).as_secs_f64();
    match micros {
        0 => format!("tp {tp} x pp {pp} is in force already"),
        _ => format!("tp {tp} x pp {pp} after {seconds:.2} s, {tokens_replayed} tokens computed again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_the_grid_and_what_it_took() {
        let reply = ScaleReply { tp: 2, pp: 1, micros: 1_234_000, tokens_replayed: 77 };
        assert_eq!(told(&reply), "tp 2 x pp 1 after 1.23 s, 77 tokens computed again");
        assert!(told(&ScaleReply { micros: 0, ..reply }).contains("already"));
    }
}
