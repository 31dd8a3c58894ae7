//! Relays a child process's output to this process's log, with the child's name. Parses the form of a log line, and not
//! its contents.

use serde_json::{Map, Value};
use std::io::{BufRead, BufReader, Read};
use std::thread::JoinHandle;
use tracing::Level;

/// A longer line is logged in parts.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// Runs until the child has closed its output. Returns the last line that was not a log entry: the reason of a failure,
/// if there was one.
pub fn start(worker: u16, pid: u32, out: impl Read + Send + 'static) -> JoinHandle<Option<String>> {
    std::thread::spawn(move || {
        let mut out = BufReader::new(out);
        let mut voice = WorkerLog { worker, pid, rank: None, last_words: None };
        let mut line = Vec::new();
        while (&mut out).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            voice.relay_line(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
        voice.last_words
    })
}

struct WorkerLog {
    worker: u16,
    pid: u32,
    /// The rank that the child logged when it received an assignment.
    rank: Option<u64>,
    last_words: Option<String>,
}

impl WorkerLog {
    fn relay_line(&mut self, line: &str) {
        match serde_json::from_str::<Map<String, Value>>(line) {
            Ok(mut event) => {
                self.rank = event.get("rank").and_then(Value::as_u64).or(self.rank);
                let level = level(&event);
                self.log(level, &text(&mut event));
            }
            Err(_) if line.is_empty() => {}
            Err(_) => {
                self.last_words = Some(line.to_owned());
                self.log(Level::WARN, line);
            }
        }
    }

    fn log(&self, level: Level, text: &str) {
        let WorkerLog { worker, pid, rank, .. } = self;
        match level {
            Level::ERROR => tracing::error!(target: "worker", worker, pid, rank, "{text}"),
            Level::WARN => tracing::warn!(target: "worker", worker, pid, rank, "{text}"),
            Level::INFO => tracing::info!(target: "worker", worker, pid, rank, "{text}"),
            _ => tracing::debug!(target: "worker", worker, pid, rank, "{text}"),
        }
    }
}

fn level(event: &Map<String, Value>) -> Level {
    event.get("level").and_then(Value::as_str).and_then(|level| level.parse().ok()).unwrap_or(Level::WARN)
}

/// Returns the message followed by its fields, as in the text format.
fn text(event: &mut Map<String, Value>) -> String {
    let mut text = event.remove("message").map_or_else(String::new, |message| plain(&message));
    for (name, value) in event.iter().filter(|(name, _)| !["timestamp", "level", "target"].contains(&name.as_str())) {
        text.push_str(&format!(" {name}={}", plain(value)));
    }
    text
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_keep_fields_and_last_words_are_kept() {
        let mut event: Map<String, Value> = serde_json::from_str(
            r#"{"timestamp":"now","level":"WARN","message":"a peer is refused","why":"late","rank":3,"target":"x"}"#,
        )
        .unwrap();
        assert_eq!(level(&event), Level::WARN);
        assert_eq!(text(&mut event), "a peer is refused why=late rank=3");
        let lines = "{\"level\":\"INFO\",\"rank\":2}\nlockstep: no memory\n\n{\"level\":\"INFO\"}\n";
        assert_eq!(start(1, 2, lines.as_bytes()).join().unwrap().as_deref(), Some("lockstep: no memory"));
    }
}
