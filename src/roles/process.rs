//! The common parts of every process: logs and metrics, ending on a signal, and secrets shared with its cluster.

use crate::settings::{LogFormat, WatchSettings};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use telemetry::Collector;
use telemetry::logs::LogOptions;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use types::BlockHash;
use wire::JoinToken;

/// Logs, spans and metrics of this process; the answer renders the page of the metrics. `model` is the label
/// `model_name` of its metrics, by which dashboards made for vLLM choose.
pub fn watch(
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

/// The first signal drains; a second one ends the process at once.
pub async fn stop_on_signals(shutdown: CancellationToken) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be watched: only SIGKILL ends this process");
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
        tracing::info!("draining: what runs may finish, nothing new is taken");
        shutdown.cancel();
    }
}

/// The salt of block hashes. It is derived from the cluster's token, so that all its replicas give the same tokens the
/// same hash. Without a token each process has its own: a cache does not outlive it.
pub fn salt(token: Option<&JoinToken>) -> anyhow::Result<[u8; 16]> {
    Ok(match token {
        Some(token) => BlockHash::salt(token.expose().as_bytes()),
        None => wire::random()?,
    })
}

/// The key for resume handles. It is derived from the cluster's token, so that every router can read every handle.
/// Routers without a token are on one machine and trust every client.
pub fn resume_key(token: Option<&JoinToken>) -> router::ResumeKey {
    router::ResumeKey::of(token.map_or(&[], |token| token.expose().as_bytes()))
}

/// The first epoch of a lone process, so that its epochs are later than those of the process before it.
pub fn micros_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
