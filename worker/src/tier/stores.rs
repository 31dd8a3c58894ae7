//! The thread that writes pages, beside the steps. What it cannot write in time is dropped: the page is then computed
//! when it is needed.

use crate::tier::evictor::evict;
use crate::tier::folder::PageFolder;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use telemetry::metrics;
use types::PageKey;

/// Pages that wait to be written. More are dropped.
const QUEUE_BYTES: u64 = 128 << 20;
/// The most pages of the queue.
const QUEUE_PAGES: usize = 4096;
/// After an error, such as a full disk, nothing is written for this long.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(5);
/// How long the end of a process may wait for pages to be written.
const FAREWELL: Duration = Duration::from_secs(2);
/// The folder's size is measured after so many parts of its limit were written.
const PARTS_PER_LOOK: u64 = 32;
/// It is measured this often too, since others may write to the folder.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Where pages are kept, how many bytes of them, and how fast they are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDiskConfig {
    pub folder: PathBuf,
    /// The most bytes of the folder.
    pub bytes_max: u64,
    /// The most bytes written per second.
    pub write_rate: u64,
}

impl KvDiskConfig {
    /// A folder of so many bytes, written as fast as its disk allows.
    pub fn new(folder: PathBuf, bytes_max: u64) -> KvDiskConfig {
        KvDiskConfig { folder, bytes_max, write_rate: u64::MAX }
    }
}

/// A page on its way to the folder, or the news that it must not be there.
pub(super) enum PageChange {
    Store { folder: Arc<PageFolder>, policy: Arc<str>, key: PageKey, bytes: Vec<u8> },
    Remove { folder: Arc<PageFolder>, key: PageKey },
}

/// The way to the thread. When the last copy is dropped, what waits is written, as far as it takes no longer than
/// `FAREWELL`.
#[derive(Clone, Debug)]
pub(super) struct StoreQueue(Arc<StoreThread>);

#[derive(Debug)]
struct StoreThread {
    /// None at the end.
    changes: Option<SyncSender<PageChange>>,
    n_bytes: Arc<AtomicU64>,
    /// Closed when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl StoreQueue {
    pub fn start(config: KvDiskConfig) -> io::Result<StoreQueue> {
        let (changes, queue) = sync_channel(QUEUE_PAGES);
        let (running, ended) = sync_channel(1);
        let n_bytes = Arc::new(AtomicU64::new(0));
        let writer = PageWriter {
            config,
            queue,
            n_bytes: n_bytes.clone(),
            measured: 0,
            unmeasured: 0,
            is_due: true,
            policy: None,
        };
        let run = move || {
            writer.run();
            drop(running);
        };
        std::thread::Builder::new().name("kv-store".into()).spawn(run)?;
        let thread = StoreThread { changes: Some(changes), n_bytes, ended: Mutex::new(ended) };
        Ok(StoreQueue(Arc::new(thread)))
    }

    /// Queues a page of this size, if there is room for it. Otherwise it is dropped and `make` is not called.
    pub fn push_page(&self, n_bytes: u64, make: impl FnOnce() -> PageChange) {
        let is_full = self.0.n_bytes.load(Relaxed) + n_bytes > QUEUE_BYTES;
        if is_full || !self.push(make()) {
            metrics::kv_disk_stored("dropped", 1);
        }
    }

    /// Queues a change. Returns whether there was room.
    pub fn push(&self, change: PageChange) -> bool {
        let Some(changes) = &self.0.changes else { return false };
        let n_bytes = change.n_bytes();
        self.0.n_bytes.fetch_add(n_bytes, Relaxed);
        let is_queued = changes.try_send(change).is_ok();
        if !is_queued {
            self.0.n_bytes.fetch_sub(n_bytes, Relaxed);
        }
        is_queued
    }
}

impl Drop for StoreThread {
    fn drop(&mut self) {
        self.changes = None;
        // A disk that hangs is not waited for.
        let _late = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(FAREWELL);
    }
}

impl PageChange {
    fn n_bytes(&self) -> u64 {
        match self {
            PageChange::Store { bytes, .. } => bytes.len() as u64,
            PageChange::Remove { .. } => 0,
        }
    }
}

struct PageWriter {
    config: KvDiskConfig,
    queue: Receiver<PageChange>,
    n_bytes: Arc<AtomicU64>,
    /// The bytes of the folder, when it was last measured, and those written since.
    measured: u64,
    unmeasured: u64,
    /// Whether it is to be measured whatever was written.
    is_due: bool,
    /// The policy of the last page.
    policy: Option<Arc<str>>,
}

impl PageWriter {
    fn run(mut self) {
        let mut paused_until = Instant::now();
        loop {
            match self.queue.recv_timeout(LOOK_EVERY) {
                Ok(change) => {
                    let n_bytes = change.n_bytes();
                    let is_paused = Instant::now() < paused_until;
                    if self.apply(change, is_paused).is_err() {
                        paused_until = Instant::now() + PAUSE_AFTER_ERROR;
                    }
                    self.n_bytes.fetch_sub(n_bytes, Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => self.is_due = true,
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.evict();
        }
    }

    fn apply(&mut self, change: PageChange, is_paused: bool) -> io::Result<()> {
        let (folder, policy, key, bytes) = match change {
            PageChange::Remove { folder, key } => {
                folder.remove(&key);
                return Ok(());
            }
            PageChange::Store { folder, policy, key, bytes } => (folder, policy, key, bytes),
        };
        if is_paused {
            metrics::kv_disk_stored("dropped", 1);
            return Ok(());
        }
        let begun = Instant::now();
        match folder.write(&key, &bytes) {
            Ok(n_written) => {
                self.unmeasured = self.unmeasured.saturating_add(n_written);
                self.policy = Some(policy);
                metrics::kv_disk_stored("written", 1);
                metrics::kv_disk_bytes(self.measured.saturating_add(self.unmeasured));
                let at_rate =
                    Duration::from_nanos(n_written.saturating_mul(1_000_000_000) / self.config.write_rate.max(1));
                std::thread::sleep(at_rate.saturating_sub(begun.elapsed()));
                Ok(())
            }
            Err(error) => {
                metrics::kv_disk_stored("failed", 1);
                let folder = self.config.folder.display();
                tracing::warn!(%folder, %error, "pages of the KV cache cannot be written: pausing for some seconds");
                Err(error)
            }
        }
    }

    /// Measures the folder if that is due, and removes what is too much.
    fn evict(&mut self) {
        let KvDiskConfig { folder, bytes_max, .. } = &self.config;
        let is_due = self.is_due || self.unmeasured > bytes_max / PARTS_PER_LOOK;
        let Some(policy) = self.policy.as_ref().filter(|_| is_due) else { return };
        (self.unmeasured, self.is_due) = (0, false);
        match evict(folder, policy, *bytes_max) {
            Ok(Some(n_bytes)) => {
                self.measured = n_bytes;
                metrics::kv_disk_bytes(n_bytes);
            }
            // Another process does it.
            Ok(None) => {}
            Err(error) => tracing::warn!(folder = %folder.display(), %error, "the folder of pages cannot be measured"),
        }
    }
}
