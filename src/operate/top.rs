//! `top`: prints the live cluster repeatedly, redrawing the terminal. A failed request is reported and repeated: a
//! restarting cluster is worth watching.

use super::status::{ClusterPage, Look};
use clap::Args;
use std::io::{IsTerminal, Write};
use std::time::Duration;

#[derive(Args)]
pub struct TopCommand {
    #[command(flatten)]
    pub look: Look,
    /// Seconds between updates
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub every: u64,
    /// Number of updates before it exits [default: no limit]
    #[arg(long)]
    pub looks: Option<u64>,
}

/// Cursor home; what is below the new page is cleared after it.
const HOME: &str = "\x1b[H";
const CLEAR_ALL: &str = "\x1b[2J";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

impl TopCommand {
    pub fn run(&self) -> anyhow::Result<()> {
        let cluster = ClusterPage::new(self.look.clone())?;
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
            if self.looks.is_some_and(|max| n_looks >= max) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_secs(self.every));
        }
    }
}

/// Draws the page over the one before it, so that the screen does not flicker.
fn drawn(page: &str, is_terminal: bool) -> String {
    match is_terminal {
        true => format!("{HOME}{}{CLEAR_BELOW}", page.replace('\n', &format!("{CLEAR_LINE}\n"))),
        false => format!("{page}\n"),
    }
}
