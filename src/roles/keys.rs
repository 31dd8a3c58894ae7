//! The file of API keys: read at the start, and again whenever it has changed. Knows neither tenants nor limits.

use crate::settings::{RouterSettings, secret};
use anyhow::{Context, ensure};
use router::ApiKeys;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Interval between looks at the file. A mounted secret changes by links, which no watch reports.
pub const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The keys of the file and of the flag. A file without keys is refused: it would let in everybody.
pub fn read(settings: &RouterSettings) -> anyhow::Result<ApiKeys> {
    let mut lines = settings.api_keys.as_deref().map(keys_of).transpose()?.unwrap_or_default();
    if let Some(key) = &settings.api_key {
        ensure!(!key.trim().is_empty(), "--api-key is empty");
    }
    lines.push_str(&flag(settings));
    Ok(ApiKeys::parse(&lines)?)
}

fn keys_of(path: &Path) -> anyhow::Result<String> {
    let what = || format!("API keys in {}", path.display());
    let text = secret::read_text(path).with_context(what)?;
    ensure!(!ApiKeys::parse(&text).with_context(what)?.is_open(), "{}: there are none", what());
    Ok(text)
}

/// The keys of operators; without a file they are asked for none.
pub fn read_operators(settings: &RouterSettings) -> anyhow::Result<ApiKeys> {
    let lines = settings.admin_keys.as_deref().map(keys_of).transpose()?.unwrap_or_default();
    Ok(ApiKeys::parse(&lines)?)
}

/// The flag's key as a line of the file, named `api-key`: so the key itself may contain a colon.
fn flag(settings: &RouterSettings) -> String {
    settings.api_key.as_ref().map(|key| format!("\napi-key:{key}")).unwrap_or_default()
}

/// Reads the file again for as long as this is polled. An invalid file is logged once, and the old keys stay.
pub fn follow(settings: &RouterSettings, keys: &ApiKeys) -> impl Future<Output = ()> + use<> {
    follow_file(settings.api_keys.clone(), flag(settings), keys.clone())
}

/// The same for operators' keys.
pub fn follow_operators(settings: &RouterSettings, keys: Option<&ApiKeys>) -> impl Future<Output = ()> + use<> {
    follow_file(settings.admin_keys.clone(), String::new(), keys.cloned().unwrap_or_default())
}

async fn follow_file(path: Option<PathBuf>, flag: String, keys: ApiKeys) {
    match path {
        // A pipe can be read only once.
        Some(path) if path.is_file() => {
            let file = path.display().to_string();
            each_change(path, |text, is_first| take(&file, text, &flag, &keys, is_first)).await;
        }
        _ => std::future::pending().await,
    }
}

/// Calls `take` with a file's contents, and again when they have changed. Never ends.
pub async fn each_change(path: PathBuf, mut take: impl FnMut(&Result<String, String>, bool)) {
    // The first look reads what was read at the start, or a newer version.
    let mut last = None;
    loop {
        let now = text(&path).await;
        if last.as_ref() != Some(&now) {
            take(&now, last.is_none());
            last = Some(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn text(path: &Path) -> Result<String, String> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await;
    read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

fn take(file: &str, text: &Result<String, String>, flag: &str, keys: &ApiKeys, is_first: bool) {
    // The file has to have keys of its own, as at the start.
    let taken = text.as_ref().map_err(Clone::clone).and_then(|text| {
        let own = ApiKeys::parse(text).map_err(|error| error.to_string())?;
        let all = format!("{text}{flag}");
        if own.is_open() { Err("there are none".into()) } else { keys.replace(&all).map_err(|e| e.to_string()) }
    });
    match taken {
        Ok(()) if is_first => {}
        Ok(()) => tracing::info!(file, keys = ?keys, "the API keys were read again"),
        Err(problem) => tracing::warn!(file, problem, "the API keys stay what they were: the file cannot be used"),
    }
}
