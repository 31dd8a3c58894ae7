//! A file that is read at given positions, and must not change meanwhile. Knows nothing of the meaning of its bytes.
//!
//! Nothing is mapped: if a mapped file is truncated, the process ends at the missing page. A read reports that it came
//! short. `unchanged`, called after the last read, reports that the file has changed.

use crate::error::{Error, Result};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Properties that change when a file is cut short, extended, written to or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    n_bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    /// Device and inode.
    place: (u64, u64),
}

impl FileStamp {
    fn of(metadata: &Metadata) -> FileStamp {
        FileStamp {
            n_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            place: (metadata.dev(), metadata.ino()),
        }
    }

    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// The stamp without the number of the device, which may change when a machine starts.
    pub fn key_bytes(&self) -> [u8; 32] {
        let (seconds, nanos) = self.modified;
        let mut bytes = [0; 32];
        let fields = [self.n_bytes, seconds as u64, nanos as u64, self.place.1];
        bytes.as_chunks_mut().0.iter_mut().zip(fields).for_each(|(to, field)| *to = field.to_le_bytes());
        bytes
    }

    /// Returns what has changed since `self`, if anything.
    fn difference(&self, now: &FileStamp) -> Option<String> {
        if self.place != now.place {
            return Some("another file has replaced it".into());
        }
        if self.n_bytes != now.n_bytes {
            return Some(format!("it has {} bytes, but had {} before", now.n_bytes, self.n_bytes));
        }
        (self.modified != now.modified).then(|| "it has been written to".into())
    }
}

/// An open file, and its stamp when it was opened.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    file: File,
    stamp: FileStamp,
}

impl SourceFile {
    /// Opens a regular file: not a pipe, which would wait for a writer, nor a device.
    pub fn open(path: &Path) -> Result<SourceFile> {
        if !std::fs::metadata(path).map_err(Error::io(path))?.is_file() {
            return Err(Error::Malformed { path: path.to_owned(), what: "not a file".into() });
        }
        let file = File::open(path).map_err(Error::io(path))?;
        let stamp = FileStamp::of(&file.metadata().map_err(Error::io(path))?);
        Ok(SourceFile { path: path.to_owned(), file, stamp })
    }

    /// Opens it again; refuses a file that no longer has this stamp.
    pub fn open_again(path: &Path, stamp: &FileStamp) -> Result<SourceFile> {
        let again = SourceFile::open(path)?;
        match stamp.difference(&again.stamp) {
            None => Ok(again),
            Some(what) => Err(again.changed_error(what)),
        }
    }

    /// Opens a file that has bytes, so that no parser has to handle an empty one.
    pub(crate) fn open_filled(path: &Path) -> Result<SourceFile> {
        let opened = SourceFile::open(path)?;
        match opened.n_bytes() {
            0 => Err(Error::Malformed { path: path.to_owned(), what: "the file is empty".into() }),
            _ => Ok(opened),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length when it was opened.
    pub fn n_bytes(&self) -> u64 {
        self.stamp.n_bytes
    }

    pub fn stamp(&self) -> FileStamp {
        self.stamp
    }

    /// Fills `to` from position `at` on. The caller guarantees that the file had these bytes when it was opened.
    pub fn read_at(&self, at: u64, to: &mut [u8]) -> Result<()> {
        match self.file.read_exact_at(to, at) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(self.changed_error(format!("it ends before byte {}", at + to.len() as u64)))
            }
            Err(error) => Err(Error::io(&self.path)(error)),
        }
    }

    /// Checks that all reads saw one state of the file. Call it after the last read.
    pub fn check_unchanged(&self) -> Result<()> {
        let at_path = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => self.changed_error("it is gone".into()),
            _ => Error::io(&self.path)(error),
        };
        let open = self.file.metadata().map_err(Error::io(&self.path))?;
        let named = std::fs::metadata(&self.path).map_err(at_path)?;
        let different = [open, named].iter().find_map(|now| self.stamp.difference(&FileStamp::of(now)));
        different.map_or(Ok(()), |what| Err(self.changed_error(what)))
    }

    fn changed_error(&self, what: String) -> Error {
        Error::Changed { path: self.path.clone(), what }
    }
}
