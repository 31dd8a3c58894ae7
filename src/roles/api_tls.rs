//! TLS towards clients: read at the start, and again whenever one of its files has changed. Knows no listener.

use super::keys::LOOK_EVERY;
use crate::settings::RouterSettings;
use crate::settings::offered::ApiTlsFiles;
use std::future::Future;
use std::io;
use telemetry::metrics;
use wire::OfferedTls;

/// Returns the TLS settings that clients get at first, or None without TLS.
pub fn read(settings: &RouterSettings) -> anyhow::Result<Option<OfferedTls>> {
    let files = ApiTlsFiles::of(settings)?;
    files.map(|files| Ok(OfferedTls::new(files.read()?))).transpose()
}

/// Reads the files again for as long as this is polled. Unusable files are logged once, and the earlier settings stay
/// in force.
pub fn follow(settings: &RouterSettings, offered: Option<&OfferedTls>) -> impl Future<Output = ()> + use<> {
    let files = ApiTlsFiles::of(settings).ok().flatten().zip(offered.cloned());
    async move {
        match files {
            Some((files, offered)) => reload_on_change(&files, &offered).await,
            None => std::future::pending().await,
        }
    }
}

async fn reload_on_change(files: &ApiTlsFiles, offered: &OfferedTls) {
    let mut last = None;
    loop {
        let read = files.clone();
        let read = tokio::task::spawn_blocking(move || contents(&read)).await;
        if let Ok(now) = read
            && last.as_ref() != Some(&now)
        {
            reload(files, offered, last.is_none());
            last = Some(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Returns the contents of the files, or why one cannot be read. A mounted secret changes by links, so modification
/// times do not show a change.
fn contents(files: &ApiTlsFiles) -> Vec<Result<Vec<u8>, io::ErrorKind>> {
    files.paths().map(|path| std::fs::read(path).map_err(|error| error.kind())).collect()
}

fn reload(files: &ApiTlsFiles, offered: &OfferedTls, is_first: bool) {
    let read = files.read();
    metrics::config_reload("certificate", read.is_ok());
    if read.is_ok() {
        metrics::certificate_ends("certificate", files.ends_at());
    }
    match read {
        Ok(config) => {
            offered.replace(config);
            if !is_first {
                tracing::info!("clients get a new certificate: its files have changed");
            }
        }
        Err(problem) => {
            let problem = format!("{problem:#}");
            tracing::warn!(problem, "clients still get the last certificate: its new files cannot be used");
        }
    }
}
