//! `scale` and `reload`: request another grid from a coordinator, or a new read of its model's files, and print the
//! result. They decide nothing.

use crate::settings::{TrustSettings, at_least_one};
use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use cluster::Addresses;
use proto::ProtocolRange;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{ReloadReply, ReloadRequest, ScaleReply, ScaleRequest, Unread};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Response, Status};
use tools::out;
use wire::HandshakeRefusal;

/// Longer than the default time that a coordinator gives its workers to load.
const ANSWER_MAX: Duration = Duration::from_secs(3600);

/// The coordinator that receives the request, and the trust between it and this command.
#[derive(Args)]
pub struct CoordinatorAddress {
    /// Address of the replica's coordinator
    #[arg(long, env = "LOCKSTEP_COORDINATOR", value_name = "HOST:PORT", default_value = "127.0.0.1:50100")]
    pub coordinator: String,
    #[command(flatten)]
    pub trust: TrustSettings,
}

#[derive(Args)]
pub struct ScaleCommand {
    /// Tensor parallel size: number of ranks that share each layer
    #[arg(long, value_name = "N")]
    pub tp: u16,
    /// Pipeline parallel size: number of stages, each with its own run of layers
    #[arg(long, value_name = "N")]
    pub pp: u16,
    #[command(flatten)]
    pub coordinator_address: CoordinatorAddress,
}

#[derive(Args)]
pub struct ReloadCommand {
    #[command(flatten)]
    pub coordinator_address: CoordinatorAddress,
}

impl ScaleCommand {
    pub fn run(&self) -> anyhow::Result<()> {
        at_least_one("tp", self.tp)?;
        at_least_one("pp", self.pp)?;
        let ProtocolRange { version, protocols } = ProtocolRange::default();
        let request = ScaleRequest { version, tp: self.tp.into(), pp: self.pp.into(), protocols };
        let reply = self.coordinator_address.call(async |mut client| client.scale(request).await)?;
        out::print_line(&scale_summary(&reply))?;
        if (reply.tp, reply.pp) != (self.tp.into(), self.pp.into()) {
            bail!("a rank was lost meanwhile: the replica changes to the requested grid when it can");
        }
        Ok(())
    }
}

impl ReloadCommand {
    pub fn run(&self) -> anyhow::Result<()> {
        let ProtocolRange { version, protocols } = ProtocolRange::default();
        let request = ReloadRequest { version, protocols };
        let reply = self.coordinator_address.call(async |mut client| client.reload(request).await)?;
        out::print_line(&reload_summary(&reply))?;
        for Unread { rank, host, why } in &reply.unread {
            eprintln!("rank {rank} of {host} keeps its earlier weights: {why}");
        }
        ensure!(reply.unread.is_empty(), "not every rank could read the model again");
        Ok(())
    }
}

impl CoordinatorAddress {
    fn call<T>(
        &self,
        rpc: impl AsyncFnOnce(CoordinatorClient<Channel>) -> Result<Response<T>, Status>,
    ) -> anyhow::Result<T> {
        let address = &self.coordinator;
        address.parse::<Addresses>().context("--coordinator")?;
        let trust = self.trust.resolve("router", address, None)?;
        let answer = Runtime::new()?.block_on(async {
            let client = CoordinatorClient::new(wire::channel(address, trust));
            timeout(ANSWER_MAX, rpc(client)).await
        });
        let answer = answer.with_context(|| format!("{address} does not answer"))?;
        Ok(answer.map_err(|status| refusal_error(address, &status))?.into_inner())
    }
}

fn refusal_error(coordinator: &str, status: &Status) -> anyhow::Error {
    match HandshakeRefusal::cause_of(status) {
        Some(refused) => anyhow!("{coordinator}: {refused}"),
        None if status.message().starts_with("no connection") => anyhow!(
            "no coordinator answers at {coordinator}: {}. Set --coordinator; `lockstep serve` logs its address",
            status.message()
        ),
        None => anyhow!("{coordinator}: {}", status.message()),
    }
}

fn scale_summary(reply: &ScaleReply) -> String {
    let ScaleReply { tp, pp, micros, tokens_replayed } = reply;
    let seconds = Duration::from_micros(*micros).as_secs_f64();
    match micros {
        0 => format!("tp {tp} x pp {pp} is already in use"),
        _ => format!("tp {tp} x pp {pp} after {seconds:.2} s, {tokens_replayed} tokens computed again"),
    }
}

fn reload_summary(reply: &ReloadReply) -> String {
    let ReloadReply { micros, tokens_replayed, ranks, unread } = reply;
    let (seconds, n_read) =
        (Duration::from_micros(*micros).as_secs_f64(), (*ranks as usize).saturating_sub(unread.len()));
    format!(
        "{n_read} of {ranks} ranks have read the model again, after {seconds:.2} s, {tokens_replayed} tokens computed \
         again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_summary_shows_grid_and_duration() {
        let reply = ScaleReply { tp: 2, pp: 1, micros: 1_234_000, tokens_replayed: 77 };
        assert_eq!(scale_summary(&reply), "tp 2 x pp 1 after 1.23 s, 77 tokens computed again");
        assert!(scale_summary(&ScaleReply { micros: 0, ..reply }).contains("already"));
    }

    #[test]
    fn ranks_that_did_not_reload_are_not_counted() {
        let unread = vec![Unread { rank: 1, host: "there".into(), why: "gone".into() }];
        let reply = ReloadReply { micros: 500_000, tokens_replayed: 9, ranks: 4, unread };
        assert_eq!(
            reload_summary(&reply),
            "3 of 4 ranks have read the model again, after 0.50 s, 9 tokens computed again"
        );
    }
}
