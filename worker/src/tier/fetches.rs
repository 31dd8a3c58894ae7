//! The threads that read pages into blocks, beside the steps.

use crate::tier::folder::PageMiss;
use crate::tier::pages::GroupPages;
use backend::WritePage;
use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;
use types::{Epoch, FetchDone, FetchId, Page};

/// Threads that read: a disk answers several requests at once, and hashing takes as long as reading from memory.
const READERS: RangeInclusive<usize> = 4..=16;

/// Sends the answer to a fetch to the coordinator.
pub type ReportFetch = Arc<dyn Fn(FetchDone) + Send + Sync>;

/// A fetch whose pages are being read.
pub(super) struct FetchJob {
    pub epoch: Epoch,
    pub id: FetchId,
    pub pages: Vec<Page>,
    pub groups: Vec<Arc<GroupPages>>,
    /// What writes the blocks of each group; none if the device has failed.
    writers: Vec<Option<WritePage>>,
    pub report: Option<ReportFetch>,
    begun: Instant,
    /// Whether no block is written any more. Threads that write blocks read it meanwhile.
    is_cancelled: RwLock<bool>,
    progress: Mutex<JobProgress>,
}

#[derive(Default)]
struct JobProgress {
    n_done: usize,
    missing: Vec<u32>,
}

impl FetchJob {
    pub fn new(
        epoch: Epoch,
        id: FetchId,
        pages: Vec<Page>,
        groups: Vec<Arc<GroupPages>>,
        report: Option<ReportFetch>,
    ) -> FetchJob {
        let writers = groups.iter().map(|group| group.mover.writer().ok()).collect();
        let (begun, is_cancelled, progress) = (Instant::now(), RwLock::new(false), Mutex::default());
        FetchJob { epoch, id, pages, groups, writers, report, begun, is_cancelled, progress }
    }

    /// From the return of this on, no block of the fetch is written.
    pub fn cancel(&self) {
        *self.is_cancelled.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Returns whether it was cancelled, which it will not be while the guard lives.
    fn is_cancelled(&self) -> RwLockReadGuard<'_, bool> {
        self.is_cancelled.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a page into its block, through buffers for a page and a head. The last one of the fetch sends the answer.
    fn read(&self, i: usize, [page, head]: &mut [Vec<u8>; 2]) {
        if *self.is_cancelled() {
            return;
        }
        let Page { key, block } = self.pages[i];
        let at = usize::from(key.group);
        let read = match (self.groups.get(at), self.writers.get(at)) {
            (Some(group), _) if group.n_bytes == 0 => Ok(None),
            (Some(group), Some(Some(write))) => {
                page.resize(group.n_bytes, 0);
                group.read(&key, page, head).map(|()| Some(write))
            }
            _ => Err(PageMiss::Absent),
        };
        let is_cancelled = self.is_cancelled();
        if *is_cancelled {
            return;
        }
        let is_there = read.is_ok_and(|write| write.is_none_or(|write| write(block, page).is_ok()));
        drop(is_cancelled);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_there {
            progress.missing.push(i as u32);
        }
        progress.n_done += 1;
        if progress.n_done == self.pages.len() {
            let mut missing = std::mem::take(&mut progress.missing);
            drop(progress);
            missing.sort_unstable();
            self.answer(missing);
        }
    }

    fn answer(&self, missing: Vec<u32>) {
        let micros = self.begun.elapsed().as_micros() as u64;
        if let Some(report) = &self.report {
            report(FetchDone { epoch: self.epoch, id: self.id, missing, micros });
        }
    }
}

/// The pages to read, in order.
#[derive(Default)]
struct ReadQueue {
    jobs: VecDeque<(Arc<FetchJob>, usize)>,
    is_closed: bool,
}

/// The reading threads. They end when this is dropped.
pub(super) struct PageReaders(Arc<(Mutex<ReadQueue>, Condvar)>);

impl PageReaders {
    pub fn start() -> io::Result<PageReaders> {
        let readers = PageReaders(Arc::default());
        let n_cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        for _ in 0..n_cores.clamp(*READERS.start(), *READERS.end()) {
            let queue = readers.0.clone();
            std::thread::Builder::new().name("kv-fetch".into()).spawn(move || {
                let mut buffers = [const { Vec::new() }; 2];
                while let Some((job, i)) = next(&queue) {
                    job.read(i, &mut buffers);
                }
            })?;
        }
        Ok(readers)
    }

    /// Reads all pages of a fetch.
    pub fn begin(&self, job: &Arc<FetchJob>) {
        let (queue, news) = &*self.0;
        queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .jobs
            .extend((0..job.pages.len()).map(|i| (job.clone(), i)));
        news.notify_all();
    }
}

impl Drop for PageReaders {
    fn drop(&mut self) {
        let (queue, news) = &*self.0;
        queue.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        news.notify_all();
    }
}

/// Waits for the next page to read. None if the threads are to end.
fn next((queue, news): &(Mutex<ReadQueue>, Condvar)) -> Option<(Arc<FetchJob>, usize)> {
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if queue.is_closed {
            return None;
        }
        if let Some(job) = queue.jobs.pop_front() {
            return Some(job);
        }
        queue = news.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}
