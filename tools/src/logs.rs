//! `logs`: the events of one request, from its arrival on. Reads the request's timeline, which has no text of the
//! request.

use crate::out;
use crate::server::{RouterArgs, RunningServer};
use crate::top::timeline;
use anyhow::{Context, ensure};
use clap::Args;

#[derive(Args)]
pub struct LogsCommand {
    /// Number of a request as `lockstep top` shows it, or the id of its answer
    pub request: String,
    #[command(flatten)]
    pub look: RouterArgs,
}

impl LogsCommand {
    pub fn run(self) -> anyhow::Result<()> {
        let request = self.request;
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        ensure!(
            !request.is_empty() && request.chars().all(is_name),
            "{request:?} is neither a request's number nor an answer's id, such as 7 or chatcmpl-1f2e3d4c"
        );
        let page = RunningServer::new(self.look)?.get(&format!("/requests/{request}"));
        let page = page.with_context(|| format!("request {request}"))?;
        out::print_line(&timeline(&page).join("\n"))
    }
}
