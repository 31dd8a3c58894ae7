//! A folder with files of packed weights, so that the next start of a rank neither reads nor packs its matrices. A file
//! holds one rank's part of one model. Has no knowledge of the contents of a file.
//!
//! ```text
//! load        key of the part -> {key}.packed: there and sound? its matrices come from it
//! after it    a thread writes what was packed to {key}.packed.part.{pid}.{n}, then renames it
//! before      that thread removes the files that were used longest ago, down to `bytes_max`
//! ```
//! A file that is damaged or absent costs time and nothing else: each matrix has a hash, and is packed again if it
//! differs. Files are not synchronized to the disk for the same reason.

use backend::cpu::PACKING_VERSION;
use checkpoint::Checkpoint;
use model::{PackedImage, PackedKey, PackedMatrices};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use types::RankPart;

const EXTENSION: &str = "packed";
/// Room that a new file leaves on its disk.
const ROOM_MIN: u64 = 1 << 30;
/// A file that is being written changes more often than this. One that does not was left by a process that ended.
const STALE_AFTER: Duration = Duration::from_secs(600);

/// Where packed weights are kept, and how many bytes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCacheConfig {
    pub folder: PathBuf,
    /// The most bytes of all files together.
    pub bytes_max: u64,
}

/// The cache of one loader. A copy of the loader uses the same folder.
#[derive(Debug)]
pub struct PackedCache {
    config: PackedCacheConfig,
    last: Mutex<LastPackedFile>,
}

/// The file of the last load.
#[derive(Debug, Default)]
struct LastPackedFile {
    path: Option<PathBuf>,
    write: Option<PackedWrite>,
}

/// A thread that writes a file. It goes on when its loader is dropped: a worker that ends does not wait for it.
#[derive(Debug)]
struct PackedWrite {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PackedCache {
    pub fn new(config: PackedCacheConfig) -> PackedCache {
        PackedCache { config, last: Mutex::default() }
    }

    /// Opens what the cache has of this part; None if its key is unknown. Ends a write that still runs, which would
    /// keep the weights of the last load in memory.
    pub(crate) fn open(&self, checkpoint: &Checkpoint, part: &RankPart) -> Option<PackedMatrices> {
        let fingerprint = checkpoint
            .fingerprint()
            .inspect_err(|error| tracing::warn!(%error, "the key of the packed weights cannot be made"))
            .ok()?;
        let key = key(&fingerprint, checkpoint, part);
        let name = format!("{}{}.{EXTENSION}", prefix(&fingerprint), blake3::Hash::from(key).to_hex());
        let path = self.config.folder.join(name);
        self.lock().replace(Some(path.clone()));
        match PackedMatrices::open(&path, key) {
            Ok(packed) => {
                // The time of the last use, by which old files are found.
                let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
                Some(packed)
            }
            Err(why) => {
                tracing::info!(path = %path.display(), why, "no packed weights: this load packs them");
                Some(PackedMatrices::new(key))
            }
        }
    }

    /// Writes the file in the background, unless it is complete.
    pub(crate) fn store(&self, packed: PackedMatrices) {
        let (n_restored, n_packed) = packed.counts();
        if let Some(why) = packed.refused() {
            tracing::warn!(why, "a file of packed weights was not used for all matrices, and is replaced");
        }
        tracing::info!(n_restored, n_packed, "loaded matrices");
        let Some(image) = packed.into_image() else { return };
        let mut last = self.lock();
        let Some(path) = last.path.clone() else { return };
        last.write = PackedWrite::start(self.config.clone(), path, image)
            .inspect_err(|error| tracing::warn!(%error, "packed weights cannot be written"))
            .ok();
    }

    /// Removes the file of the last load: its weights are not trusted again.
    pub(crate) fn forget_last(&self) {
        if let Some(path) = self.lock().replace(None) {
            let _ = fs::remove_file(path);
        }
    }

    /// Waits until the file of the last load is written.
    pub fn wait_until_written(&self) {
        if let Some(mut write) = self.lock().write.take() {
            write.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, LastPackedFile> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for PackedCache {
    fn clone(&self) -> PackedCache {
        PackedCache::new(self.config.clone())
    }
}

/// Everything on which a part's packed bytes depend. Files with equal stamps have equal bytes.
fn key(fingerprint: &[u8; 32], checkpoint: &Checkpoint, part: &RankPart) -> PackedKey {
    let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 packed part of a model");
    hasher.update(&PACKING_VERSION.to_le_bytes()).update(fingerprint);
    checkpoint.stamps().iter().for_each(|stamp| _ = hasher.update(&stamp.key_bytes()));
    hasher.update(format!("{part:?} {}", std::env::consts::ARCH).as_bytes());
    hasher.finalize().into()
}

/// Returns the beginning of the names of a model's files.
fn prefix(fingerprint: &[u8; 32]) -> String {
    format!("{}-", &blake3::Hash::from(*fingerprint).to_hex()[..16])
}

/// Removes the files of a model from a folder. Returns their bytes.
pub fn remove_packed(folder: &Path, checkpoint: &Checkpoint) -> io::Result<u64> {
    let prefix = prefix(&checkpoint.fingerprint().map_err(io::Error::other)?);
    let mut n_bytes = 0;
    for entry in fs::read_dir(folder)?.filter_map(Result::ok) {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
            n_bytes += entry.metadata()?.len();
            fs::remove_file(entry.path())?;
        }
    }
    Ok(n_bytes)
}

impl PackedWrite {
    fn start(config: PackedCacheConfig, path: PathBuf, image: PackedImage) -> io::Result<PackedWrite> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stop = is_stopped.clone();
        let write = move || match config.write(&path, &image, &|| !stop.load(Relaxed)) {
            Ok(()) => tracing::info!(path = %path.display(), bytes = image.n_bytes(), "wrote packed weights"),
            Err(error) => tracing::warn!(path = %path.display(), %error, "packed weights were not written"),
        };
        let thread = Some(std::thread::Builder::new().name("packed".into()).spawn(write)?);
        Ok(PackedWrite { is_stopped, thread })
    }

    fn join(&mut self) {
        // The thread logs its own result.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl LastPackedFile {
    /// Stops the write of the file before, and returns its path.
    fn replace(&mut self, path: Option<PathBuf>) -> Option<PathBuf> {
        if let Some(mut write) = self.write.take() {
            write.is_stopped.store(true, Relaxed);
            write.join();
        }
        std::mem::replace(&mut self.path, path)
    }
}

impl PackedCacheConfig {
    fn write(&self, path: &Path, image: &PackedImage, goes_on: &dyn Fn() -> bool) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let Some(others_max) = self.bytes_max.checked_sub(image.n_bytes()) else {
            return Err(io::Error::other(format!("{} bytes are more than {}", image.n_bytes(), self.bytes_max)));
        };
        self.trim(path, others_max)?;
        let room = room(&self.folder)?;
        if room < image.n_bytes().saturating_add(ROOM_MIN) {
            let needed = image.n_bytes();
            return Err(io::Error::other(format!("the disk has {room} bytes left: {needed} and 1 GiB are needed")));
        }
        static N_PARTS: AtomicU64 = AtomicU64::new(0);
        let n = N_PARTS.fetch_add(1, Relaxed);
        let unfinished = path.with_extension(format!("{EXTENSION}.part.{}.{n}", std::process::id()));
        let written = File::create(&unfinished)
            .and_then(|mut file| image.write(&mut file, goes_on))
            .and_then(|()| fs::rename(&unfinished, path));
        written.inspect_err(|_| _ = fs::remove_file(&unfinished))
    }

    /// Removes files, the one used longest ago first, until all but `path` have at most `bytes_max`. Also removes what
    /// ended processes did not finish.
    fn trim(&self, path: &Path, bytes_max: u64) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)?.filter_map(Result::ok) {
            let (name, at) = (entry.file_name(), entry.path());
            let Some((_, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
            let Ok(metadata) = entry.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if kind == EXTENSION && at != path {
                files.push((used, metadata.len(), at));
            } else if kind.starts_with("packed.part.") && used.elapsed().is_ok_and(|age| age > STALE_AFTER) {
                fs::remove_file(at)?;
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, n_bytes, _)| n_bytes).sum();
        for (_, n_bytes, at) in files {
            if total <= bytes_max {
                break;
            }
            fs::remove_file(&at)?;
            total -= n_bytes;
        }
        Ok(())
    }
}

/// Bytes that this process may still write to the folder's disk.
fn room(folder: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests;
