//! Reads a record: all of its lines, or the last one of an id. Knows of a line only where its id stands.

use super::folder::files;
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// No honest line is longer.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// All whole lines of a folder, in the order in which they were written.
pub fn lines(dir: &Path) -> io::Result<impl Iterator<Item = io::Result<String>> + use<>> {
    let files = files(dir)?;
    Ok(files.into_iter().flat_map(|path| match WholeLines::of(&path) {
        Ok(lines) => RecordFileLines::Lines(lines),
        Err(error) => RecordFileLines::Failed(Some(with_path(&path, error))),
    }))
}

/// The last record of an id, which may have the prefix of its page (`cmpl-`, `chatcmpl-`).
pub fn find(dir: &Path, id: &str) -> io::Result<Option<String>> {
    let bare = id.rsplit(['-', '_']).next().unwrap_or(id);
    if bare.is_empty() {
        return Ok(None);
    }
    for path in files(dir)?.into_iter().rev() {
        let lines = match WholeLines::of(&path) {
            // It was removed, or got its name, meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        let mut found = None;
        for line in lines {
            let line = line?;
            // Most lines are not parsed.
            if line.contains(bare) && serde_json::from_str::<Value>(&line).is_ok_and(|of| of["id"] == bare) {
                found = Some(line);
            }
        }
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

enum RecordFileLines {
    Lines(WholeLines),
    Failed(Option<io::Error>),
}

impl Iterator for RecordFileLines {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        match self {
            RecordFileLines::Lines(lines) => lines.next(),
            RecordFileLines::Failed(error) => error.take().map(Err),
        }
    }
}

/// The lines of a file that end: the last may be half.
struct WholeLines {
    path: PathBuf,
    file: BufReader<File>,
}

impl WholeLines {
    fn of(path: &Path) -> io::Result<WholeLines> {
        Ok(WholeLines { path: path.to_owned(), file: BufReader::new(File::open(path)?) })
    }
}

impl Iterator for WholeLines {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        let mut line = String::new();
        match self.file.by_ref().take(LINE_BYTES_MAX).read_line(&mut line) {
            Err(error) => Some(Err(with_path(&self.path, error))),
            Ok(_) => line.strip_suffix('\n').map(|line| Ok(line.to_owned())),
        }
    }
}

fn with_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
