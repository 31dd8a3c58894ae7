//! The lines of a chat, from a terminal with editing and a history, or from a pipe. Has no knowledge of their meaning.

use anyhow::Context;
use rustyline::Editor;
use rustyline::config::{Behavior, Config};
use rustyline::error::ReadlineError;
use rustyline::history::{History, MemHistory};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, IsTerminal, Stdin, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The number of messages to keep, and the count at which the file's older half is dropped.
const HISTORY_MAX: usize = 1000;
const HISTORY_FILE_LINES_MAX: usize = 2 * HISTORY_MAX;
/// Longer messages are not kept.
const REMEMBERED_BYTES_MAX: usize = 64 << 10;

pub enum LineReader {
    Terminal { editor: Box<Editor<(), MemHistory>>, history: Option<PathBuf> },
    Pipe(BufReader<Stdin>),
}

pub enum InputLine {
    Text(String),
    /// Ctrl-C was pressed: the line is discarded.
    Dropped,
    End,
}

impl LineReader {
    /// Opens standard input, with the history file `history` if it is a terminal.
    pub fn open(history: Option<PathBuf>) -> anyhow::Result<LineReader> {
        if !std::io::stdin().is_terminal() {
            return Ok(LineReader::Pipe(BufReader::new(std::io::stdin())));
        }
        // Answers may go to a file; the prompt is shown on the terminal all the same.
        let behavior = if std::io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().max_history_size(HISTORY_MAX)?.behavior(behavior);
        let config = config.history_ignore_dups(true)?.build();
        let mut remembered = MemHistory::with_config(&config);
        for entry in history.iter().flat_map(|history| read_history(history)) {
            remembered.add(&entry)?;
        }
        let editor = Editor::with_history(config, remembered).context("the terminal cannot be used")?;
        Ok(LineReader::Terminal { editor: Box::new(editor), history })
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, LineReader::Terminal { .. })
    }

    /// Waits for a line.
    pub fn next(&mut self, prompt: &str) -> anyhow::Result<InputLine> {
        match self {
            LineReader::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(InputLine::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(InputLine::Dropped),
                Err(ReadlineError::Eof) => Ok(InputLine::End),
                Err(error) => Err(error).context("the terminal cannot be read"),
            },
            LineReader::Pipe(input) => {
                let mut line = Vec::new();
                let n = input.read_until(b'\n', &mut line).context("standard input cannot be read")?;
                // Invalid UTF-8 does not end the chat.
                Ok(if n == 0 { InputLine::End } else { InputLine::Text(String::from_utf8_lossy(&line).into_owned()) })
            }
        }
    }

    /// Keeps a message for the arrow keys, now and in the next chat. A failure to store it is ignored.
    pub fn remember(&mut self, message: &str) {
        let LineReader::Terminal { editor, history } = self else { return };
        let is_kept = message.len() <= REMEMBERED_BYTES_MAX;
        let is_new = is_kept && editor.add_history_entry(message).is_ok_and(|is_new| is_new);
        if let Some(history) = history.as_ref().filter(|_| is_new) {
            append_history(history, message)
                .unwrap_or_else(|error| tracing::debug!(%error, "the chat history cannot be saved"));
        }
    }
}

/// Each message is a line of JSON, because it may contain newlines. Lines that do not parse are skipped.
fn read_history(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut lines: Vec<&str> = text.lines().collect();
    if lines.len() > HISTORY_FILE_LINES_MAX {
        lines.drain(..lines.len() - HISTORY_MAX);
        // Two chats at the same time may overwrite each other's last messages. The history is only a convenience.
        let _kept_longer = open(path, true).and_then(|mut file| writeln!(file, "{}", lines.join("\n")));
    }
    let first = lines.len().saturating_sub(HISTORY_MAX);
    lines[first..].iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn append_history(path: &Path, message: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let line = serde_json::Value::from(message).to_string();
    open(path, false)?.write_all(format!("{line}\n").as_bytes())
}

/// Readable by its owner only, because it contains conversations.
fn open(path: &Path, anew: bool) -> std::io::Result<std::fs::File> {
    OpenOptions::new().create(true).write(true).append(!anew).truncate(anew).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_is_kept_with_its_lines_and_does_not_grow_for_ever() {
        let folder = std::env::temp_dir().join(format!("lockstep-history-{}", std::process::id()));
        let path = folder.join("history");
        append_history(&path, "one\n\"two\"").unwrap();
        append_history(&path, "three").unwrap();
        assert_eq!(read_history(&path), ["one\n\"two\"", "three"]);
        for i in 0..HISTORY_FILE_LINES_MAX {
            append_history(&path, &i.to_string()).unwrap();
        }
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "no JSON\n").unwrap();
        let kept = read_history(&path);
        assert_eq!((kept.len(), &*kept[0]), (HISTORY_MAX - 1, "1001"));
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), HISTORY_MAX);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
