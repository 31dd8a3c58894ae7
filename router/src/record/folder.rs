//! The files of a record: written one after the other. A file gets its name when it is whole. The oldest are removed
//! when there are too many. Several routers may share a folder: each removes and finishes only files that no router
//! writes.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where a record is kept, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    pub dir: PathBuf,
    /// Whether prompts and answers are kept, and not only their hashes.
    pub prompts: bool,
    /// The bytes of all files together. One file has at most its share of them.
    pub bytes_max: u64,
    pub files_max: u32,
}

const WHOLE: &str = "jsonl";
const OPEN: &str = "open";
const PREFIX: &str = "answers-";

/// A folder in which one file is being written.
pub struct RecordFolder {
    config: RecordConfig,
    nonce: u32,
    now: Option<OpenFile>,
    /// The time in the last file's name; each name is later than the one before.
    last: u64,
    /// Lines that were lost with a file that was removed while it was written, until they are read.
    n_removed: u64,
}

struct OpenFile {
    path: PathBuf,
    /// Locked as long as it is open.
    file: File,
    n_bytes: u64,
    n_lines: u64,
}

impl OpenFile {
    /// Whether the file has lost its name: everything written to it is lost.
    fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|of| of.nlink() == 0)
    }
}

impl RecordFolder {
    /// Makes the folder if there is none, and finishes files that a killed router has left open.
    pub fn open(config: &RecordConfig, nonce: u32) -> io::Result<RecordFolder> {
        make_dir(&config.dir)?;
        let mut folder = RecordFolder { config: config.clone(), nonce, now: None, last: 0, n_removed: 0 };
        for path in files(&config.dir)?.into_iter().filter(|path| has_ending(path, OPEN)) {
            finish_left(&path)?;
        }
        folder.begin()?;
        Ok(folder)
    }

    /// Adds a line. After an error the file is as it was before.
    pub fn add(&mut self, line: &str) -> io::Result<()> {
        let n_bytes = line.len() as u64 + 1;
        let file_max = self.config.bytes_max / u64::from(self.config.files_max);
        if let Some(removed) = self.now.take_if(|now| now.is_removed()) {
            self.n_removed += removed.n_lines;
        }
        if self.now.as_ref().is_some_and(|now| now.n_bytes > 0 && now.n_bytes + n_bytes > file_max) {
            self.close()?;
        }
        if n_bytes > file_max {
            let why = format!("the record has {n_bytes} bytes; a file may have at most {file_max}");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
        if self.now.is_none() {
            self.begin()?;
        }
        let Some(now) = &mut self.now else { return Ok(()) };
        // One write: a reader finds whole lines and at most one half line at the end.
        match now.file.write_all(format!("{line}\n").as_bytes()) {
            Ok(()) => {
                now.n_bytes += n_bytes;
                now.n_lines += 1;
                Ok(())
            }
            Err(error) => {
                now.file.set_len(now.n_bytes)?;
                now.file.seek(SeekFrom::Start(now.n_bytes))?;
                Err(error)
            }
        }
    }

    /// Returns how many lines were lost, since the last call, with files that were removed while they were written.
    pub fn take_removed(&mut self) -> u64 {
        std::mem::take(&mut self.n_removed)
    }

    /// Gives the file its name, once its bytes are on the disk. An empty one is removed.
    pub fn close(&mut self) -> io::Result<()> {
        let Some(now) = self.now.take() else { return Ok(()) };
        finish(&now.path, &now.file, now.n_bytes)
    }

    fn begin(&mut self) -> io::Result<()> {
        let millis = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        self.last = millis.max(self.last + 1);
        let path = self.config.dir.join(format!("{PREFIX}{:016x}-{:08x}.{OPEN}", self.last, self.nonce));
        make_dir(&self.config.dir)?;
        // Requests and answers are readable only by this user of the machine.
        let file = OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(&path)?;
        file.lock()?;
        self.now = Some(OpenFile { path, file, n_bytes: 0, n_lines: 0 });
        self.make_room()
    }

    /// Removes the oldest whole files until there is room for one more file of full size.
    fn make_room(&self) -> io::Result<()> {
        let file_max = self.config.bytes_max / u64::from(self.config.files_max);
        let whole: Vec<(PathBuf, u64)> = files(&self.config.dir)?
            .into_iter()
            .filter(|path| has_ending(path, WHOLE))
            .filter_map(|path| std::fs::metadata(&path).ok().map(|of| (path, of.len())))
            .collect();
        let mut n_bytes = whole.iter().map(|(_, n)| n).sum::<u64>() + file_max;
        let mut n_files = whole.len() + 1;
        for (path, n) in whole {
            if n_bytes <= self.config.bytes_max && n_files <= self.config.files_max as usize {
                break;
            }
            // Another router may have removed it.
            let _gone = std::fs::remove_file(&path);
            (n_bytes, n_files) = (n_bytes - n, n_files - 1);
        }
        Ok(())
    }
}

fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Returns the record's own files in a folder, the oldest first.
pub(super) fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(PREFIX) && (has_ending(path, WHOLE) || has_ending(path, OPEN))
    };
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(is_ours).collect();
    files.sort();
    Ok(files)
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|of| of == ending)
}

/// Finishes a file that no router writes any more: up to its last whole line.
fn finish_left(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => {}
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let n_whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1) as u64;
    file.set_len(n_whole)?;
    finish(path, &file, n_whole)
}

fn finish(path: &Path, file: &File, n_bytes: u64) -> io::Result<()> {
    if n_bytes == 0 {
        return std::fs::remove_file(path);
    }
    file.sync_all()?;
    std::fs::rename(path, path.with_extension(WHOLE))?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{find, lines};

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let dir = std::env::temp_dir().join(format!("lockstep-record-{name}-{}", std::process::id()));
            let _none = std::fs::remove_dir_all(&dir);
            Dir(dir)
        }

        fn config(&self, bytes_max: u64, files_max: u32) -> RecordConfig {
            RecordConfig { dir: self.0.clone(), prompts: false, bytes_max, files_max }
        }

        fn endings(&self) -> Vec<String> {
            let ending = |path: PathBuf| path.extension().unwrap().to_str().unwrap().to_owned();
            files(&self.0).unwrap().into_iter().map(ending).collect()
        }

        fn all(&self) -> Vec<String> {
            lines(&self.0).unwrap().collect::<io::Result<Vec<_>>>().unwrap()
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _gone = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn records_are_readable_only_by_their_owner() {
        use std::os::unix::fs::PermissionsExt;
        let dir = Dir::new("private");
        let mut folder = RecordFolder::open(&dir.config(100, 4), 1).unwrap();
        folder.add("{}").unwrap();
        folder.close().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir.0), mode(&files(&dir.0).unwrap()[0])), (0o700, 0o600));
    }

    #[test]
    fn a_file_has_its_name_once_it_is_whole_and_the_oldest_go_first() {
        let dir = Dir::new("rotates");
        let mut folder = RecordFolder::open(&dir.config(100, 4), 1).unwrap();
        // Each file has room for 25 bytes: two lines of twelve.
        (10..23).for_each(|n| folder.add(&format!("line {n} ...")).unwrap());
        assert_eq!(dir.endings(), ["jsonl", "jsonl", "jsonl", "open"]);
        assert_eq!(dir.all().len(), 7, "of thirteen lines: {:?}", dir.all());
        assert_eq!(dir.all().last().unwrap(), "line 22 ...");
        assert!(folder.add(&"x".repeat(25)).unwrap_err().to_string().contains("at most 25"));
        folder.add("after").unwrap();
        folder.close().unwrap();
        let n_bytes: u64 = files(&dir.0).unwrap().iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(dir.endings().iter().all(|ending| ending == "jsonl") && n_bytes <= 100, "{n_bytes}");
    }

    #[test]
    fn a_file_that_is_removed_while_it_is_written_is_begun_anew_and_its_lines_are_counted() {
        let dir = Dir::new("removed");
        let mut folder = RecordFolder::open(&dir.config(1000, 4), 1).unwrap();
        (0..3).for_each(|n| folder.add(&format!("line {n}")).unwrap());
        assert_eq!(folder.take_removed(), 0);
        files(&dir.0).unwrap().iter().for_each(|path| std::fs::remove_file(path).unwrap());
        folder.add("line 3").unwrap();
        assert_eq!((dir.all(), folder.take_removed(), folder.take_removed()), (vec!["line 3".to_owned()], 3, 0));
        // The folder too.
        std::fs::remove_dir_all(&dir.0).unwrap();
        folder.add("line 4").unwrap();
        folder.close().unwrap();
        assert_eq!((dir.all(), folder.take_removed()), (vec!["line 4".to_owned()], 1));
    }

    #[test]
    fn what_a_killed_router_left_is_finished_without_its_half_line_and_others_files_are_left_alone() {
        let dir = Dir::new("left");
        let mut other = RecordFolder::open(&dir.config(1000, 4), 1).unwrap();
        other.add("whole").unwrap();
        let left = dir.0.join("answers-0000000000000001-00000009.open");
        std::fs::write(&left, "one\ntwo\nhal").unwrap();
        std::fs::write(dir.0.join("answers-0000000000000002-00000009.open"), "hal").unwrap();
        std::fs::write(dir.0.join("notes.txt"), "mine").unwrap();
        let folder = RecordFolder::open(&dir.config(1000, 4), 2).unwrap();
        assert_eq!(dir.all(), ["one", "two", "whole"]);
        assert_eq!(dir.endings(), ["jsonl", "open", "open"]);
        assert!(!left.exists() && dir.0.join("notes.txt").exists());
        drop((folder, other));
    }

    #[test]
    fn a_record_is_found_by_its_id_also_before_its_file_is_whole() {
        let dir = Dir::new("found");
        let mut folder = RecordFolder::open(&dir.config(4096, 4), 1).unwrap();
        let line = |id: &str, n: u32| format!("{{\"id\":\"{id}\",\"n\":{n}}}");
        for (id, n) in [("aa", 1), ("ab", 2), ("aa", 3)] {
            folder.add(&line(id, n)).unwrap();
        }
        let found = |id: &str| find(&dir.0, id).unwrap();
        assert_eq!((found("aa"), found("ab")), (Some(line("aa", 3)), Some(line("ab", 2))));
        assert_eq!((found("a"), found("zz"), found("")), (None, None, None));
        assert_eq!(found("cmpl-ab"), Some(line("ab", 2)), "as a page writes it");
        folder.close().unwrap();
        assert_eq!(found("aa"), Some(line("aa", 3)));
    }
}
