//! `top`: the live cluster, again and again, on a terminal that is drawn anew each time. A page that cannot be had is
//! told and asked for again: a cluster that restarts is worth watching.

use crate::status::{Cluster, Look};
use clap::Args;
use std::io::{IsTerminal, Write};
use std::time::Duration;

#[derive(Args)]
pub struct Top {
    #[command(flatten)]
    pub look: Look,
    /// Seconds between two looks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub every: u64,
    /// Looks before it ends by itself [default: it does not]
    #[arg(long)]
    pub looks: Option<u64>,
}

/// Cursor home; what is below the new page is cleared after it.
const HOME: &str = "\x1b[H";
const CLEAR_ALL: &str = "\x1b[2J";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

pub fn run(top: &Top) -> anyhow::Result<()> {
    let cluster = Cluster::new(top.look.clone());
    let mut out = std::io::stdout();
    let is_terminal = out.is_terminal();
    if is_terminal {
        write!(out, "{CLEAR_ALL}")?;
    }
    let mut n_looks = 0;
    loop {
        let page = cluster.show().unwrap_or_else(|error| format!("{error:#}\n"));
        out.write_all(drawn(&page, is_terminal).as_bytes())?;
        out.flush()?;
        n_looks += 1;
        if top.looks.is_some_and(|max| n_looks >= max) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(top.every));
    }
}

/// Over the page before it, without the flicker of an empty screen.
fn drawn(page: &str, is_terminal: bool) -> String {
    match is_terminal {
        true => format!("{HOME}{}{CLEAR_BELOW}", page.replace('\n', &format!("{CLEAR_LINE}\n"))),
        false => format!("{page}\n"),
    }
}
