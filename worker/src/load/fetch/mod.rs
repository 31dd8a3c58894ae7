//! Fetches the parts of a model that a rank needs from the coordinator into a cache on this machine. Works with files,
//! chunks and layers; has no knowledge of their contents or of other fetching ranks.
//!
//! A file in the cache is as long as the original and has holes where nothing was needed. A journal beside the files
//! names the chunks that are there and were checked, so that an interrupted fetch continues. Chunks that were damaged
//! later are fetched again:
//!
//! ```text
//! file     [header][layer 0 ....][layer 1 ....][layer 2 ....]
//! rank 1    ======                =============                 and the ends of every tensor, for the fingerprint
//! ```

use crate::assignment::{Assignment, LoadError};
use crate::load::fetch::journal::FetchJournal;
use checkpoint::Checkpoint;
use collective::CancelFlag;
use lock::FolderLock;
use proto::ProtocolRange;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{GetModelRequest, ModelBytes, ModelFile, ModelFiles, ReadModelRequest};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;
use types::RankPart;

mod checks;
mod error;
mod journal;
mod lock;
mod room;

pub use checks::IntactChunks;
pub use error::FetchError;
use error::SILENCE_MAX;
use room::{has_room, write_failed};

/// In the cache, the folder of all fetched models; in a model's folder, the chunks that are there.
const FETCHED: &str = "fetched";
const JOURNAL: &str = "journal";
/// The unit that is fetched, checked and recorded.
const CHUNK_BYTES: u64 = 256 << 10;
/// The largest range of one read request.
const READ_BYTES_MAX: u64 = 64 << 20;
/// Bytes written between two entries of the journal.
const SYNC_BYTES: u64 = 32 << 20;
/// Bytes read at the beginning and end of every tensor on each rank, because the model's fingerprint covers them.
const SAMPLE_BYTES: u64 = 4096;
const FILES_MAX: usize = 8192;
const MODEL_BYTES_MAX: u64 = 1 << 45;

/// Limit for listing the files: the coordinator opens the model at the first request for it.
const LIST_MAX: Duration = Duration::from_secs(60);
/// The most attempts in a row that bring no chunk.
const FUTILE_MAX: u32 = 6;
const RETRY_MIN: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(5);
const LOG_EVERY: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(100);
/// Interval between checks of whether the assignment has ended.
const END_POLL: Duration = Duration::from_millis(50);
/// Limit for the cache's lock: as long as a coordinator by default waits for a rank to load.
const LOCK_MAX: Duration = Duration::from_secs(600);

/// The source of a fetch and its destination.
#[derive(Clone, Debug)]
pub struct ModelFetcher {
    pub channel: Channel,
    pub runtime: tokio::runtime::Handle,
    pub cache: PathBuf,
    /// The chunks of the cache that are known to be intact.
    pub checked: IntactChunks,
}

impl ModelFetcher {
    /// Returns the path of the model on this machine, with everything that this rank needs. Blocks: call it on a thread
    /// of its own.
    pub(crate) fn fetch_model(&self, assignment: &Assignment, cancel: &CancelFlag) -> Result<PathBuf, LoadError> {
        let part = assignment.layout.part(assignment.rank);
        let fetched = self.runtime.block_on(async {
            tokio::select! {
                biased;
                fetched = self.fetch_part(&assignment.model_path, &part, cancel) => fetched,
                // Chunks that the journal names by then are not fetched again.
                () = until_cancelled(cancel) => Err(FetchError::BrokenOff),
            }
        });
        fetched.map_err(|source| LoadError::Fetch { path: assignment.model_path.clone(), source })
    }

    async fn fetch_part(&self, model_path: &Path, part: &RankPart, cancel: &CancelFlag) -> Result<PathBuf, FetchError> {
        let mut client = CoordinatorClient::new(self.channel.clone()).max_decoding_message_size(proto::FRAME_BYTES_MAX);
        let ProtocolRange { version, protocols } = ProtocolRange::default();
        let listed = timeout(LIST_MAX, client.get_model(GetModelRequest { version, protocols })).await;
        let files = listed.map_err(|_| FetchError::Silence)?.map_err(refusal_error)?.into_inner();
        check(&files)?;
        if is_the_model(model_path, &files) {
            tracing::info!(path = %model_path.display(), "this machine already has the model");
            return Ok(model_path.to_owned());
        }
        let place = ModelFolder::open(&self.cache, files)?;
        let paths: Vec<PathBuf> = place.files.files.iter().map(|file| place.file(file)).collect();
        let required: Vec<BTreeSet<u64>> = place.files.files.iter().map(|file| needed_chunks(file, part)).collect();
        // Held until the digest has been checked.
        let _lock = match place.check_and_lock(&self.checked, &paths, &required, cancel).await? {
            LockedFolder::Whole(lock) => lock,
            LockedFolder::Incomplete(lock) => {
                let mut fetched = place.check_chunks(&self.checked, &paths, &required, cancel)?;
                place.fetch_with_retries(&mut client, &required, &mut fetched.journal).await?;
                lock
            }
        };
        let path = place.model_path();
        // A cache that failed is not trusted again.
        match Checkpoint::open(&path).and_then(|checkpoint| checkpoint.fingerprint()) {
            Ok(digest) if digest[..] == place.files.digest[..] => Ok(path),
            Ok(_) => place.forget().and(Err(FetchError::OtherModel)),
            Err(error) => place.forget().and(Err(error.into())),
        }
    }

    /// Drops the model at this path, because the coordinator rejected its bytes. If they were fetched, they are fetched
    /// anew: the coordinator's file may have been repaired since.
    pub(crate) fn forget(&self, model: &Path) {
        let fetched = self.cache.join(FETCHED);
        let Some(folder) = model.ancestors().find(|folder| folder.parent() == Some(&fetched)) else { return };
        match std::fs::remove_file(folder.join(JOURNAL)) {
            Ok(()) => tracing::warn!(folder = %folder.display(), "the fetched model is not trusted any more"),
            Err(error) => tracing::warn!(folder = %folder.display(), %error, "the fetched model cannot be distrusted"),
        }
    }
}

async fn until_cancelled(cancel: &CancelFlag) {
    while !cancel.is_cancelled() {
        tokio::time::sleep(END_POLL).await;
    }
}

fn refusal_error(status: Status) -> FetchError {
    FetchError::Refused(status.message().into())
}

fn is_the_model(path: &Path, files: &ModelFiles) -> bool {
    let digest = || Checkpoint::open(path)?.fingerprint();
    path.exists() && digest().is_ok_and(|digest: [u8; 32]| digest[..] == files.digest[..])
}

/// Rejects names that are not plain file names, because names become paths here.
fn check(files: &ModelFiles) -> Result<(), FetchError> {
    let plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    let plain = |name: &str| plain(name) && name.len() < 256;
    let inside = |name: &str| name.split('/').all(plain) && name.matches('/').count() < 2;
    let wrong = |what: &str| Err(FetchError::Manifest(what.into()));
    let names: BTreeSet<_> = files.files.iter().map(|file| &file.name).collect();
    let total = files.files.iter().try_fold(0u64, |total, file| total.checked_add(file.n_bytes));
    let spans_lie_in = |file: &ModelFile| {
        let ends = file.spans.iter().flat_map(|span| [span.start, span.end]);
        ends.is_sorted() && file.spans.last().is_none_or(|span| span.end <= file.n_bytes)
    };
    match () {
        () if files.digest.len() != 32 => wrong("its digest does not have 32 bytes"),
        () if files.files.is_empty() || files.files.len() > FILES_MAX => wrong("it has no file, or too many"),
        () if !plain(&files.name) => wrong("its name is not a plain file name"),
        () if !files.files.iter().all(|file| inside(&file.name)) => wrong("a file's name is not a plain file name"),
        () if names.len() != files.files.len() => wrong("two files have one name"),
        () if !files.is_folder && !names.contains(&files.name) => wrong("it lists no file with its own name"),
        () if total.is_none_or(|total| total > MODEL_BYTES_MAX) => wrong("it is larger than the limit for a model"),
        () if !files.files.iter().all(spans_lie_in) => wrong("layers are outside of their file, or overlap"),
        () => Ok(()),
    }
}

/// Returns the chunks of a file that a part needs, in ascending order.
fn needed_chunks(file: &ModelFile, part: &RankPart) -> BTreeSet<u64> {
    let mut chunks = BTreeSet::new();
    let mut want = |bytes: Range<u64>| {
        if !bytes.is_empty() {
            chunks.extend(bytes.start / CHUNK_BYTES..bytes.end.div_ceil(CHUNK_BYTES));
        }
    };
    let mut next = 0;
    for span in &file.spans {
        want(next..span.start);
        next = span.end;
        let is_ours = match span.layer {
            Some(layer) => part.layers.contains(&layer),
            None => part.is_first() || part.is_last(),
        };
        if is_ours {
            want(span.start..span.end);
        } else {
            want(span.start..(span.start + SAMPLE_BYTES).min(span.end));
            want(span.end.saturating_sub(SAMPLE_BYTES).max(span.start)..span.end);
        }
    }
    want(next..file.n_bytes);
    chunks
}

/// Returns ranges of neighbouring chunks, one read request each.
fn chunk_ranges(chunks: &BTreeSet<u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &chunk in chunks {
        match runs.last_mut() {
            Some(run) if run.end == chunk && (run.end - run.start) * CHUNK_BYTES < READ_BYTES_MAX => run.end += 1,
            _ => runs.push(chunk..chunk + 1),
        }
    }
    runs
}

/// The model's folder in the cache. Several ranks of one machine may read there at a time, and one may write.
struct ModelFolder {
    folder: PathBuf,
    files: ModelFiles,
}

/// Whether all required chunks are there. The answer holds while its lock is held.
enum LockedFolder {
    /// No rank writes.
    Whole(FolderLock),
    /// No other rank reads or writes.
    Incomplete(FolderLock),
}

/// The chunks of a running fetch. However the fetch ends, even by a drop, they are not hashed again.
struct FetchedChunks<'a> {
    checked: &'a IntactChunks,
    paths: &'a [PathBuf],
    required: &'a [BTreeSet<u64>],
    journal: FetchJournal,
}

impl Drop for FetchedChunks<'_> {
    fn drop(&mut self) {
        self.checked.record_fetched(self.paths, self.required, &self.journal);
    }
}

/// Progress, for the log.
struct ProgressLog {
    n_bytes: u64,
    n_all: u64,
    logged_at: Instant,
}

impl ModelFolder {
    fn open(cache: &Path, files: ModelFiles) -> Result<ModelFolder, FetchError> {
        let folder = cache.join(FETCHED).join(types::Hex(&files.digest).to_string());
        for file in &files.files {
            let path = folder.join(&files.name).join(&file.name);
            std::fs::create_dir_all(path.parent().unwrap_or(&folder)).map_err(io_at(&folder))?;
        }
        Ok(ModelFolder { folder, files })
    }

    /// Checks again after each write of another worker on this machine: most chunks may be there by then. It does not
    /// check again without a write: ranks that hash damaged chunks repeatedly would share the lock forever.
    async fn check_and_lock(
        &self,
        checked: &IntactChunks,
        paths: &[PathBuf],
        required: &[BTreeSet<u64>],
        cancel: &CancelFlag,
    ) -> Result<LockedFolder, FetchError> {
        let (since, mut must_look) = (Instant::now(), true);
        while since.elapsed() <= LOCK_MAX {
            match FolderLock::shared(&self.folder)? {
                Some(shared) if must_look => {
                    if self.is_whole(checked, paths, required, cancel)? {
                        return Ok(LockedFolder::Whole(shared));
                    }
                    must_look = false;
                }
                Some(_) => {}
                None => must_look = true,
            }
            if !must_look && let Some(ours) = FolderLock::exclusive(&self.folder)? {
                return Ok(LockedFolder::Incomplete(ours));
            }
            tokio::time::sleep(LOCK_POLL).await;
        }
        Err(FetchError::Locked)
    }

    /// Returns whether all required chunks are there and unchanged. Writes nothing.
    fn is_whole(
        &self,
        checked: &IntactChunks,
        paths: &[PathBuf],
        required: &[BTreeSet<u64>],
        cancel: &CancelFlag,
    ) -> Result<bool, FetchError> {
        let Some(mut there) = journal::read(&self.journal_path(), &self.files).map_err(io_at(&self.journal_path()))?
        else {
            return Ok(false);
        };
        checked.remove_damaged(&mut there, paths, required, cancel).ok_or(FetchError::BrokenOff)?;
        let is_there = |(file, chunks): (u32, &BTreeSet<u64>)| chunks.iter().all(|chunk| there.has(file, *chunk));
        let is_long = |(path, file): (&PathBuf, &ModelFile)| {
            std::fs::metadata(path).is_ok_and(|found| found.len() == file.n_bytes)
        };
        Ok((0..).zip(required).all(is_there) && paths.iter().zip(&self.files.files).all(is_long))
    }

    /// Returns the path for `Checkpoint::open`.
    fn model_path(&self) -> PathBuf {
        let folder = self.folder.join(&self.files.name);
        if self.files.is_folder { folder } else { folder.join(&self.files.name) }
    }

    fn file(&self, file: &ModelFile) -> PathBuf {
        self.folder.join(&self.files.name).join(&file.name)
    }

    fn journal_path(&self) -> PathBuf {
        self.folder.join(JOURNAL)
    }

    fn forget(&self) -> Result<(), FetchError> {
        match std::fs::remove_file(self.journal_path()) {
            // Another rank removed it first.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            forgotten => forgotten.map_err(io_at(&self.journal_path())),
        }
    }

    /// Checks the required chunks that are here, and removes damaged ones from the journal.
    fn check_chunks<'a>(
        &self,
        checked: &'a IntactChunks,
        paths: &'a [PathBuf],
        required: &'a [BTreeSet<u64>],
        cancel: &CancelFlag,
    ) -> Result<FetchedChunks<'a>, FetchError> {
        let mut journal = FetchJournal::open(&self.journal_path(), &self.files).map_err(io_at(&self.journal_path()))?;
        let n_damaged = checked.remove_damaged(&mut journal, paths, required, cancel).ok_or(FetchError::BrokenOff)?;
        if n_damaged > 0 {
            let folder = self.folder.display();
            tracing::warn!(%folder, n_damaged, "some fetched bytes are damaged: they are fetched again");
        }
        Ok(FetchedChunks { checked, paths, required, journal })
    }

    /// Fetches the required chunks that are missing, and repeats as long as an attempt brings any.
    async fn fetch_with_retries(
        &self,
        client: &mut CoordinatorClient<Channel>,
        required: &[BTreeSet<u64>],
        journal: &mut FetchJournal,
    ) -> Result<(), FetchError> {
        let n_required: usize = required.iter().map(BTreeSet::len).sum();
        let (mut futile, mut wait) = (0, RETRY_MIN);
        loop {
            let n_before = journal.len();
            let Err(error) = self.fetch_missing(client, required, journal).await else { return Ok(()) };
            if journal.len() > n_before {
                (futile, wait) = (0, RETRY_MIN);
            }
            futile += 1;
            if futile >= FUTILE_MAX || matches!(error, FetchError::Io { .. } | FetchError::NoRoom { .. }) {
                return Err(error);
            }
            tracing::warn!(%error, n_chunks = journal.len(), n_required, "the fetch failed: it continues from here");
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    async fn fetch_missing(
        &self,
        client: &mut CoordinatorClient<Channel>,
        required: &[BTreeSet<u64>],
        journal: &mut FetchJournal,
    ) -> Result<(), FetchError> {
        let missing: Vec<BTreeSet<u64>> = required
            .iter()
            .enumerate()
            .map(|(file, chunks)| chunks.iter().copied().filter(|chunk| !journal.has(file as u32, *chunk)).collect())
            .collect();
        let n_missing: usize = missing.iter().map(BTreeSet::len).sum();
        let mut progress = ProgressLog { n_bytes: 0, n_all: n_missing as u64 * CHUNK_BYTES, logged_at: Instant::now() };
        if n_missing > 0 {
            let folder = self.folder.display();
            tracing::info!(%folder, mebibytes = progress.n_all >> 20, "fetching this rank's part of the model");
            has_room(&self.folder, progress.n_all)?;
        }
        for (index, (file, chunks)) in self.files.files.iter().zip(&missing).enumerate() {
            let path = self.file(file);
            // Other ranks of this machine detect a write by the file's time, so a complete file is not touched.
            if chunks.is_empty() && std::fs::metadata(&path).is_ok_and(|found| found.len() == file.n_bytes) {
                continue;
            }
            let out = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
            let out = out.map_err(io_at(&path))?;
            out.set_len(file.n_bytes).map_err(io_at(&path))?;
            let mut drain = FileDownload { index: index as u32, file, path: &path, out, journal };
            for run in chunk_ranges(chunks) {
                drain.fetch(client, &self.files.digest, run, &mut progress).await?;
            }
        }
        Ok(())
    }
}

/// Writes what arrives for one file.
struct FileDownload<'a> {
    index: u32,
    file: &'a ModelFile,
    path: &'a Path,
    out: File,
    journal: &'a mut FetchJournal,
}

impl FileDownload<'_> {
    async fn fetch(
        &mut self,
        client: &mut CoordinatorClient<Channel>,
        digest: &[u8],
        chunks: Range<u64>,
        progress: &mut ProgressLog,
    ) -> Result<(), FetchError> {
        let (start, end) = (chunks.start * CHUNK_BYTES, (chunks.end * CHUNK_BYTES).min(self.file.n_bytes));
        let request = ReadModelRequest { digest: digest.to_vec(), file: self.index, start, end };
        let opened = timeout(SILENCE_MAX, client.read_model(request)).await.map_err(|_| FetchError::Silence)?;
        let mut messages = opened.map_err(refusal_error)?.into_inner();
        let (mut next, mut noted) = (start, start);
        let result = loop {
            if next == end {
                break Ok(());
            }
            let message = match timeout(SILENCE_MAX, messages.message()).await {
                Err(_) => break Err(FetchError::Silence),
                Ok(Err(status)) => break Err(refusal_error(status)),
                Ok(Ok(None)) => break Err(FetchError::Refused("the stream ended early".into())),
                Ok(Ok(Some(message))) => message,
            };
            if let Err(error) = self.write(&message, next, end) {
                break Err(error);
            }
            next += message.bytes.len() as u64;
            progress.add(message.bytes.len() as u64);
            if next - noted >= SYNC_BYTES {
                self.note(noted..next)?;
                noted = next - next % CHUNK_BYTES;
            }
        };
        // Chunks that came before an error are not fetched again.
        self.note(noted..next)?;
        result
    }

    fn write(&self, message: &ModelBytes, next: u64, end: u64) -> Result<(), FetchError> {
        let n_bytes = message.bytes.len() as u64;
        let is_next = message.start == next && n_bytes > 0 && n_bytes <= end - next;
        let is_whole = <[u8; 32]>::try_from(&message.checksum[..])
            .is_ok_and(|checksum| blake3::hash(&message.bytes) == blake3::Hash::from_bytes(checksum));
        if !is_next || !is_whole {
            return Err(FetchError::Damaged { file: self.file.name.clone(), start: next });
        }
        self.out.write_all_at(&message.bytes, next).map_err(write_failed(self.path, end - next))
    }

    /// Records the chunks that are complete. They are on disk before the journal names them.
    fn note(&mut self, bytes: Range<u64>) -> Result<(), FetchError> {
        let is_whole_to =
            if bytes.end == self.file.n_bytes { bytes.end.div_ceil(CHUNK_BYTES) } else { bytes.end / CHUNK_BYTES };
        let chunks = bytes.start / CHUNK_BYTES..is_whole_to;
        if chunks.is_empty() {
            return Ok(());
        }
        self.out.sync_data().map_err(io_at(self.path))?;
        let hash = checks::hash(&self.out, &chunks).map_err(io_at(self.path))?;
        self.journal.add(self.index, chunks, hash).map_err(io_at(self.path))
    }
}

impl ProgressLog {
    fn add(&mut self, n_bytes: u64) {
        self.n_bytes += n_bytes;
        if self.logged_at.elapsed() >= LOG_EVERY {
            self.logged_at = Instant::now();
            let percent = (self.n_bytes * 100 / self.n_all.max(1)).min(100);
            tracing::info!(mebibytes = self.n_bytes >> 20, percent, "fetching");
        }
    }
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> FetchError + '_ {
    |source| FetchError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
