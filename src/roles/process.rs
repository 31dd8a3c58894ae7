//! The common parts of all processes: logs and metrics, the end on a signal, and secrets shared with the cluster.

use crate::settings::{LogFormat, WatchSettings};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use telemetry::Collector;
use telemetry::logs::LogOptions;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use types::BlockHash;
use wire::JoinToken;

/// Starts logs, spans and metrics of this process; returns the function that renders the metrics page. `model` is the
/// label `model_name` of its metrics, by which dashboards made for vLLM select.
pub fn start_telemetry(
    settings: &WatchSettings,
    collector: Option<&Collector>,
    model: Option<&str>,
) -> anyhow::Result<router::Render> {
    let format = match settings.log_format {
        LogFormat::Text => telemetry::logs::Format::Text,
        LogFormat::Json => telemetry::logs::Format::Json,
    };
    telemetry::logs::init(LogOptions { format, filter: &settings.log, collector })?;
    let labels: Vec<_> = model.iter().map(|model| ("model_name", *model)).collect();
    let exporter = telemetry::exporter::install(&labels)?;
    Ok(Arc::new(move || exporter.render()))
}

/// Drains on the first signal; a second one ends the process immediately.
pub async fn stop_on_signals(shutdown: CancellationToken) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be handled: only SIGKILL ends this process");
        return;
    };
    for is_first in [true, false] {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if !is_first {
            telemetry::logs::flush();
            std::process::exit(130);
        }
        tracing::info!("draining: running requests may finish, new ones are refused");
        shutdown.cancel();
    }
}

/// Returns the salt of block hashes. It is derived from the cluster's token, so that all replicas give the same tokens
/// the same hash. Without a token each process has its own, because a cache does not outlive its process.
pub fn hash_salt(token: Option<&JoinToken>) -> anyhow::Result<[u8; 16]> {
    Ok(match token {
        Some(token) => BlockHash::salt(token.expose().as_bytes()),
        None => wire::random()?,
    })
}

/// Returns the key for resume handles. It is derived from the cluster's token, so that every router can read every
/// handle. Routers without a token are on one machine and trust every client.
pub fn resume_key(token: Option<&JoinToken>) -> router::ResumeKey {
    router::ResumeKey::of(token.map_or(&[], |token| token.expose().as_bytes()))
}

/// Returns the first epoch of a single process, so that its epochs are later than those of an earlier process.
pub fn micros_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
