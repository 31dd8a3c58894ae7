//! `top`: the live cluster, its requests and its load, by keys on a terminal and as text in a pipe. On a terminal a
//! failed look is reported and repeated: a restarting cluster is worth watching. In a pipe it ends the command.

mod bars;
mod cluster;
mod draw;
mod live;
mod load;
mod requests;
mod screen;

pub use requests::timeline;

use crate::out;
use crate::server::{RouterArgs, RunningServer};
use crate::status::render;
use clap::Args;
use std::io::IsTerminal;
use std::time::Duration;

#[derive(Args)]
pub struct TopCommand {
    #[command(flatten)]
    pub look: RouterArgs,
    /// Seconds between updates
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub every: u64,
    /// Number of updates before it exits [default: no limit]
    #[arg(long)]
    pub looks: Option<u64>,
}

impl TopCommand {
    pub fn run(&self) -> anyhow::Result<()> {
        let server = RunningServer::new(self.look.clone())?;
        match std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
            true => live::run(&server, Duration::from_secs(self.every), self.looks),
            false => self.print(&server),
        }
    }

    fn print(&self, server: &RunningServer) -> anyhow::Result<()> {
        let mut n_looks = 0;
        loop {
            out::print_line(&render(&server.cluster()?))?;
            n_looks += 1;
            if self.looks.is_some_and(|max| n_looks >= max) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_secs(self.every));
        }
    }
}
