//! The line that a process writes to the standard input of a worker process that it starts: all settings and the join
//! token. So no argument has a secret, and a new setting needs no code here.

use crate::settings::{WorkerRole, to_table};
use anyhow::Context;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wire::JoinToken;

/// How long a child may take to end after its parent has ended.
const ORPHAN_MAX: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
pub struct HandedSettings {
    pub token: String,
    pub settings: WorkerRole,
}

#[derive(Serialize)]
struct HandedLine<'a> {
    token: &'a str,
    /// Without the settings that have no value.
    settings: toml::Table,
}

/// Makes the line, on the parent's side.
pub fn line(token: &JoinToken, settings: &WorkerRole) -> anyhow::Result<String> {
    Ok(serde_json::to_string(&HandedLine { token: token.expose(), settings: to_table(settings)? })?)
}

/// Reads the line, on the child's side, and ends the child when the parent ends.
pub fn receive(shutdown: CancellationToken) -> anyhow::Result<HandedSettings> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("the parent process cannot be watched")?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("the parent's message cannot be read")?;
    let handed = serde_json::from_str(&line).context("the parent's message is not a worker's settings")?;
    std::thread::Builder::new().name("parent".into()).spawn(move || {
        // The parent sends nothing more: this returns when the parent ends or closes the pipe.
        let _ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        shutdown.cancel();
        std::thread::sleep(ORPHAN_MAX);
        telemetry::logs::flush();
        std::process::exit(0);
    })?;
    Ok(handed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::parse_settings;

    #[test]
    fn worker_settings_are_handed_over_in_one_line() {
        let words = "--join a:1 --memory 3MiB --otlp-headers x=hidden --etcd-endpoints b:2,c:3 --wire tcp --fetch \
                     --link-encryption on \
                     --kernel-cache kernels --otlp-sample 0.25 --device cuda:1 --tls off --log debug";
        let settings = parse_settings::<WorkerRole>(words);
        let token = JoinToken::random().unwrap();
        let line = line(&token, &settings).unwrap();
        assert!(!line.contains('\n'));
        let handed: HandedSettings = serde_json::from_str(&line).unwrap();
        assert_eq!((handed.token.as_str(), handed.settings), (token.expose(), settings));
    }
}
