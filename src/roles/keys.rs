//! The file of API keys: read at the start, and again whenever it changes. Has no knowledge of tenants or limits.

use crate::settings::{RouterSettings, secret};
use anyhow::{Context, ensure};
use router::ApiKeys;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use telemetry::metrics;

/// Interval between looks at the file. A mounted secret changes by links, which no watch reports.
pub const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Returns the keys of the file and of the flag. A file without keys is an error, because it would admit every client.
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
    ensure!(!ApiKeys::parse(&text).with_context(what)?.is_open(), "{}: the file has no key", what());
    Ok(text)
}

/// Returns the keys of operators. Without a file operators need none.
pub fn read_operators(settings: &RouterSettings) -> anyhow::Result<ApiKeys> {
    let lines = settings.admin_keys.as_deref().map(keys_of).transpose()?.unwrap_or_default();
    Ok(ApiKeys::parse(&lines)?)
}

/// Returns the flag's key as a line of the file, named `api-key`, so that the key itself may contain a colon.
fn flag(settings: &RouterSettings) -> String {
    settings.api_key.as_ref().map(|key| format!("\napi-key:{key}")).unwrap_or_default()
}

/// Reads the file again for as long as this is polled.
pub fn follow(settings: &RouterSettings, keys: &ApiKeys) -> impl Future<Output = ()> + use<> {
    let grace = settings.api_keys_grace.map(Duration::from_secs);
    follow_file(settings.api_keys.clone(), KeyFile::new("api_keys", flag(settings), keys.clone(), grace))
}

/// Does the same for operators' keys.
pub fn follow_operators(settings: &RouterSettings, keys: Option<&ApiKeys>) -> impl Future<Output = ()> + use<> {
    let (keys, grace) = (keys.cloned().unwrap_or_default(), settings.api_keys_grace.map(Duration::from_secs));
    follow_file(settings.admin_keys.clone(), KeyFile::new("admin_keys", String::new(), keys, grace))
}

async fn follow_file(path: Option<PathBuf>, mut file: KeyFile) {
    match path {
        // A pipe can be read only once.
        Some(path) if path.is_file() => loop {
            file.handle_contents(read_contents(&path).await, Instant::now());
            tokio::time::sleep(LOOK_EVERY).await;
        },
        _ => std::future::pending().await,
    }
}

/// The last state of a file of keys, and the keys that are in force.
struct KeyFile {
    name: &'static str,
    /// The lines that do not come from the file.
    flag: String,
    keys: ApiKeys,
    /// How long the keys of an unreadable file stay in force; None means for ever.
    grace: Option<Duration>,
    last: Option<Result<String, String>>,
    /// The number of successive looks that found no key.
    n_empty: u32,
    unreadable_since: Option<Instant>,
}

/// A file may be empty for a moment while it is written. After this many empty looks in a row its keys are revoked.
const EMPTY_LOOKS_MAX: u32 = 3;

impl KeyFile {
    fn new(name: &'static str, flag: String, keys: ApiKeys, grace: Option<Duration>) -> KeyFile {
        KeyFile { name, flag, keys, grace, last: None, n_empty: 0, unreadable_since: None }
    }

    /// Handles the result of a look. The first look finds the text that was read at the start, or a newer one.
    fn handle_contents(&mut self, text: Result<String, String>, now: Instant) {
        let (is_same, is_first) = (self.last.as_ref() == Some(&text), self.last.is_none());
        match &text {
            Err(problem) => self.note_unreadable(problem, is_same, now),
            Ok(_) if is_same && self.n_empty == 0 => {}
            Ok(text) if ApiKeys::count(text) == 0 => self.note_empty(text),
            Ok(text) => {
                self.replace_keys(text, is_first);
                (self.n_empty, self.unreadable_since) = (0, None);
            }
        }
        self.last = Some(text);
    }

    fn replace_keys(&self, text: &str, is_first: bool) {
        let (name, keys) = (self.name, &self.keys);
        let replaced = keys.replace(&format!("{text}{}", self.flag));
        metrics::config_reload(name, replaced.is_ok());
        match replaced {
            Ok(()) if is_first => {}
            Ok(()) => tracing::info!(file = name, ?keys, "the API keys were read again"),
            Err(bad) => {
                let problem = bad.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                tracing::error!(file = name, problem, ?keys, "bad lines are ignored: only the other lines are keys");
            }
        }
    }

    fn note_empty(&mut self, text: &str) {
        (self.n_empty, self.unreadable_since) = ((self.n_empty + 1).min(EMPTY_LOOKS_MAX + 1), None);
        metrics::config_reload(self.name, false);
        match self.n_empty {
            1 => tracing::warn!(file = self.name, "the file has no key: if that stays so, its keys are revoked"),
            EMPTY_LOOKS_MAX => self.revoke(text, "there is no key in the file"),
            _ => {}
        }
    }

    fn note_unreadable(&mut self, problem: &str, is_same: bool, now: Instant) {
        self.n_empty = 0;
        metrics::config_reload(self.name, false);
        if !is_same {
            tracing::error!(file = self.name, problem, "the file cannot be read: the last keys stay in force");
        }
        let since = *self.unreadable_since.get_or_insert(now);
        let is_over = self.grace.is_some_and(|grace| now.duration_since(since) >= grace);
        // Only once: afterwards only the flag's key is left.
        if is_over && self.keys.n_keys() > ApiKeys::count(&self.flag) {
            self.revoke("", "the file could not be read within --api-keys-grace");
        }
    }

    fn revoke(&self, text: &str, why: &str) {
        let _bad = self.keys.replace(&format!("{text}{}", self.flag));
        tracing::error!(file = self.name, why, "all keys of the file are revoked");
    }
}

/// Calls `take` with a file's contents, and again whenever they have changed. Never ends.
pub async fn watch_file(path: PathBuf, mut take: impl FnMut(&Result<String, String>, bool)) {
    // The first look finds the text that was read at the start, or a newer one.
    let mut last = None;
    loop {
        let now = read_contents(&path).await;
        if last.as_ref() != Some(&now) {
            take(&now, last.is_none());
            last = Some(now);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn read_contents(path: &Path) -> Result<String, String> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await;
    read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(grace: Option<u64>) -> KeyFile {
        let keys = ApiKeys::parse("alice:k1\nbob:k2\napi-key:k3").unwrap();
        KeyFile::new("api_keys", "\napi-key:k3".into(), keys, grace.map(Duration::from_secs))
    }

    /// Returns which of three keys are in force.
    fn known(file: &KeyFile) -> [bool; 3] {
        ["k1", "k2", "k3"].map(|key| file.keys.tenant(key).is_some())
    }

    fn ok(text: &str) -> Result<String, String> {
        Ok(text.into())
    }

    #[test]
    fn a_file_that_is_empty_on_three_looks_has_no_keys() {
        for empty in ["", "# none", "alice:", "* weight=2"] {
            let mut file = file(None);
            let now = Instant::now();
            file.handle_contents(ok("alice:k1\nbob:k2"), now);
            for n in 1..=3 {
                file.handle_contents(ok(empty), now);
                assert_eq!(known(&file), if n < 3 { [true; 3] } else { [false, false, true] }, "{empty:?}, look {n}");
            }
            file.handle_contents(ok(empty), now);
            assert!(!file.keys.is_open());
            file.handle_contents(ok("bob:k2"), now);
            assert_eq!(known(&file), [false, true, true], "{empty:?}");
        }
        // The file was empty for a moment between two writes.
        let mut file = file(None);
        for text in ["", "", "alice:k1", "", ""] {
            file.handle_contents(ok(text), Instant::now());
        }
        assert_eq!(known(&file), [true, false, true]);
    }

    #[test]
    fn of_a_file_with_a_bad_line_the_good_ones_are_keys() {
        let mut file = file(None);
        file.handle_contents(ok("alice:k1\nbob:"), Instant::now());
        assert_eq!(known(&file), [true, false, true]);
    }

    #[test]
    fn keys_of_a_file_that_cannot_be_read_stay_for_a_grace() {
        for (grace, seconds, expect) in
            [(None, 1 << 20, [true; 3]), (Some(60), 59, [true; 3]), (Some(60), 60, [false, false, true])]
        {
            let (mut file, begun) = (file(grace), Instant::now());
            for at in [0, seconds / 2, seconds] {
                file.handle_contents(Err("no such file".into()), begun + Duration::from_secs(at));
            }
            assert_eq!(known(&file), expect, "{grace:?}");
            file.handle_contents(ok("alice:k1\nbob:k2"), begun);
            assert_eq!(known(&file), [true; 3]);
        }
    }
}
