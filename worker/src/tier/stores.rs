//! The threads that keep pages, beside the steps: one for host memory, and one that writes files. What they cannot keep
//! in time is dropped: the page is then computed when it is needed.

use crate::tier::evictor::evict;
use crate::tier::pages::GroupPages;
use backend::PageCopy;
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

/// A page on its way to a tier, or the news that it must not be there.
pub(super) enum PageChange {
    Store { pages: Arc<GroupPages>, policy: Arc<str>, key: PageKey, page: PageCopy },
    Remove { pages: Arc<GroupPages>, key: PageKey },
}

/// What a thread does with the pages of its queue.
trait KeepPages: Send + 'static {
    fn apply(&mut self, change: PageChange);

    /// Called after each change, and from time to time.
    fn maintain(&mut self, _is_idle: bool) {}
}

/// The way to the thread of a tier. When the last copy is dropped, what waits is kept, as far as it takes no longer
/// than `FAREWELL`.
#[derive(Clone, Debug)]
pub(super) struct StoreQueue(Arc<StoreThread>);

#[derive(Debug)]
struct StoreThread {
    /// None at the end.
    changes: Option<SyncSender<(PageChange, u64)>>,
    n_bytes: Arc<AtomicU64>,
    count_dropped: fn(),
    /// Closed when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl StoreQueue {
    /// Starts the threads of the tiers that there are. Pages go through host memory to the folder.
    pub fn start(has_host: bool, disk: Option<KvDiskConfig>) -> io::Result<StoreQueue> {
        let files = match disk {
            Some(config) => {
                let dropped = || metrics::kv_disk_stored("dropped", 1);
                let writer = PageWriter { config, measured: 0, unmeasured: 0, policy: None, paused_until: None };
                Some(StoreQueue::spawn("kv-store", dropped, writer)?)
            }
            None => None,
        };
        match files {
            Some(files) if !has_host => Ok(files),
            files => StoreQueue::spawn("kv-host", || metrics::kv_host_stored("dropped", 1), HostKeeper { files }),
        }
    }

    fn spawn(name: &str, count_dropped: fn(), mut keeper: impl KeepPages) -> io::Result<StoreQueue> {
        let (changes, queue) = sync_channel::<(PageChange, u64)>(QUEUE_PAGES);
        let (running, ended) = sync_channel(1);
        let n_bytes = Arc::new(AtomicU64::new(0));
        let waiting = n_bytes.clone();
        let run = move || {
            loop {
                let is_idle = match queue.recv_timeout(LOOK_EVERY) {
                    Ok((change, n_bytes)) => {
                        keeper.apply(change);
                        waiting.fetch_sub(n_bytes, Relaxed);
                        false
                    }
                    Err(RecvTimeoutError::Timeout) => true,
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                keeper.maintain(is_idle);
            }
            // Tiers behind this one end before it.
            drop(keeper);
            drop(running);
        };
        std::thread::Builder::new().name(name.into()).spawn(run)?;
        let thread = StoreThread { changes: Some(changes), n_bytes, count_dropped, ended: Mutex::new(ended) };
        Ok(StoreQueue(Arc::new(thread)))
    }

    /// Queues a page of this size, if there is room for it. Otherwise it is dropped, and `make` is not called.
    pub fn push_page(&self, n_bytes: u64, make: impl FnOnce() -> Option<PageChange>) {
        let is_full = self.0.n_bytes.load(Relaxed) + n_bytes > QUEUE_BYTES;
        let is_queued = !is_full && make().is_some_and(|change| self.push(change, n_bytes));
        if !is_queued {
            (self.0.count_dropped)();
        }
    }

    /// Queues the removal of a page, or removes it at once.
    pub fn remove(&self, pages: &Arc<GroupPages>, key: &PageKey) {
        if !self.push(PageChange::Remove { pages: pages.clone(), key: *key }, 0) {
            pages.remove(key);
        }
    }

    /// Queues a change. Returns whether there was room.
    fn push(&self, change: PageChange, n_bytes: u64) -> bool {
        let Some(changes) = &self.0.changes else { return false };
        self.0.n_bytes.fetch_add(n_bytes, Relaxed);
        let is_queued = changes.try_send((change, n_bytes)).is_ok();
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

/// Keeps pages in host memory, and passes them on to the folder.
struct HostKeeper {
    files: Option<StoreQueue>,
}

impl KeepPages for HostKeeper {
    fn apply(&mut self, change: PageChange) {
        match change {
            PageChange::Store { pages, policy, key, page } => {
                // A device that has failed reports it in its next pass.
                let Ok(page) = page() else { return metrics::kv_host_stored("failed", 1) };
                pages.keep_in_host(&key, &page);
                if let Some(files) = &self.files {
                    let n_bytes = page.len() as u64;
                    let page: PageCopy = Box::new(move || Ok(page));
                    files.push_page(n_bytes, || Some(PageChange::Store { pages, policy, key, page }));
                }
            }
            PageChange::Remove { pages, key } => {
                pages.remove(&key);
                // A page that waits to be written is removed behind its write.
                self.files.iter().for_each(|files| files.remove(&pages, &key));
            }
        }
    }
}

/// Writes pages to the folder.
struct PageWriter {
    config: KvDiskConfig,
    /// The bytes of the folder, when it was last measured, and those written since.
    measured: u64,
    unmeasured: u64,
    /// The policy of the last page; none before the first, when the folder is not measured.
    policy: Option<Arc<str>>,
    /// After an error.
    paused_until: Option<Instant>,
}

impl KeepPages for PageWriter {
    fn apply(&mut self, change: PageChange) {
        let (pages, policy, key, page) = match change {
            PageChange::Remove { pages, key } => return pages.remove(&key),
            PageChange::Store { pages, policy, key, page } => (pages, policy, key, page),
        };
        if self.paused_until.is_some_and(|end| Instant::now() < end) {
            return metrics::kv_disk_stored("dropped", 1);
        }
        let begun = Instant::now();
        let written = page().map_err(io::Error::other).and_then(|page| pages.write(&key, &page));
        match written {
            Ok(n_written) => {
                self.unmeasured = self.unmeasured.saturating_add(n_written);
                // The first page has the folder measured.
                let is_first = self.policy.replace(policy).is_none();
                metrics::kv_disk_stored("written", 1);
                metrics::kv_disk_bytes(self.measured.saturating_add(self.unmeasured));
                let nanos = n_written.saturating_mul(1_000_000_000) / self.config.write_rate.max(1);
                std::thread::sleep(Duration::from_nanos(nanos).saturating_sub(begun.elapsed()));
                if is_first {
                    self.maintain(true);
                }
            }
            Err(error) => {
                metrics::kv_disk_stored("failed", 1);
                let folder = self.config.folder.display();
                tracing::warn!(%folder, %error, "pages of the KV cache cannot be written: pausing for some seconds");
                self.paused_until = Some(Instant::now() + PAUSE_AFTER_ERROR);
            }
        }
    }

    /// Measures the folder if that is due, and removes what is too much.
    fn maintain(&mut self, is_idle: bool) {
        let KvDiskConfig { folder, bytes_max, .. } = &self.config;
        let is_due = is_idle || self.unmeasured > bytes_max / PARTS_PER_LOOK;
        let Some(policy) = self.policy.as_ref().filter(|_| is_due) else { return };
        self.unmeasured = 0;
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
