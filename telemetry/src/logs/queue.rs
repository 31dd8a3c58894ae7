//! The queue between code that logs and the thread that writes: it stores the lines that fit, and counts the others.
//! Adding a line never waits. Has no knowledge of stderr or of the lines' contents.

use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most lines that wait or are being written: some seconds of a busy server at `debug`.
pub const LINES_MAX: usize = 4096;
pub const BYTES_MAX: usize = 1 << 20;
/// The most bytes written at once, except that the last line may exceed it.
const BATCH_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub struct LogQueue {
    lines_max: usize,
    bytes_max: usize,
    queued: Mutex<QueuedEntries>,
    filled: Condvar,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct QueuedEntries {
    entries: VecDeque<LogEntry>,
    /// Includes the lines that are being written.
    n_lines: usize,
    n_bytes: usize,
    /// The lines dropped since the queue became full. While there are any, the queue accepts no line, so that one entry
    /// reports them at their place.
    n_dropped: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub enum LogEntry {
    Line(Vec<u8>),
    /// Stands in the place of this many lines.
    Dropped(u64),
}

impl LogEntry {
    fn n_bytes(&self) -> usize {
        match self {
            LogEntry::Line(line) => line.len(),
            LogEntry::Dropped(_) => 0,
        }
    }
}

impl Default for LogQueue {
    fn default() -> LogQueue {
        LogQueue::new(LINES_MAX, BYTES_MAX)
    }
}

impl LogQueue {
    fn new(lines_max: usize, bytes_max: usize) -> LogQueue {
        let (filled, emptied) = (Condvar::new(), Condvar::new());
        LogQueue { lines_max, bytes_max, queued: Mutex::default(), filled, emptied }
    }

    /// Returns false if there is no room; the line then counts as dropped.
    #[must_use]
    pub fn put(&self, line: &[u8]) -> bool {
        let mut queued = self.lock();
        let has_room = queued.n_lines < self.lines_max && line.len() <= self.bytes_max - queued.n_bytes;
        let fits = has_room && queued.n_dropped == 0;
        if fits {
            queued.push(LogEntry::Line(line.to_vec()));
        } else {
            queued.n_dropped += 1;
        }
        drop(queued);
        self.filled.notify_one();
        fits
    }

    /// Waits for lines and returns what to write next; the caller then calls `written`.
    pub fn next_batch(&self) -> Vec<LogEntry> {
        let is_idle = |queued: &mut QueuedEntries| queued.entries.is_empty() && queued.n_dropped == 0;
        let queued = self.filled.wait_while(self.lock(), is_idle);
        let mut queued = queued.unwrap_or_else(PoisonError::into_inner);
        if queued.n_dropped > 0 && queued.n_lines <= self.lines_max / 2 && queued.n_bytes <= self.bytes_max / 2 {
            let n = std::mem::take(&mut queued.n_dropped);
            queued.push(LogEntry::Dropped(n));
        }
        let (mut batch, mut n_bytes) = (Vec::new(), 0);
        while n_bytes < BATCH_BYTES
            && let Some(entry) = queued.entries.pop_front()
        {
            n_bytes += entry.n_bytes();
            batch.push(entry);
        }
        batch
    }

    /// Frees the room of lines that were taken.
    pub fn free_batch(&self, batch: &[LogEntry]) {
        let mut queued = self.lock();
        queued.n_lines -= batch.len();
        queued.n_bytes -= batch.iter().map(LogEntry::n_bytes).sum::<usize>();
        drop(queued);
        self.emptied.notify_all();
    }

    /// Waits until all lines are written, at most for `wait_max`. Returns false if some are not.
    pub fn wait_until_written(&self, wait_max: Duration) -> bool {
        let is_busy = |queued: &mut QueuedEntries| queued.n_lines > 0 || queued.n_dropped > 0;
        let waited = self.emptied.wait_timeout_while(self.lock(), wait_max, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns true while the writing thread is so late that lines are lost.
    pub fn is_dropping(&self) -> bool {
        self.lock().n_dropped > 0
    }

    fn lock(&self) -> MutexGuard<'_, QueuedEntries> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueuedEntries {
    fn push(&mut self, entry: LogEntry) {
        self.n_lines += 1;
        self.n_bytes += entry.n_bytes();
        self.entries.push_back(entry);
    }
}

/// For the layer that formats events: each event arrives whole, in one call.
impl io::Write for &LogQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if !self.put(line) {
            crate::metrics::log_dropped(1);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const SOON: Duration = Duration::from_millis(1);

    fn line(n: usize) -> LogEntry {
        LogEntry::Line(n.to_string().into_bytes())
    }

    /// Returns whether each line was stored.
    fn put(queue: &LogQueue, numbers: impl IntoIterator<Item = usize>) -> Vec<bool> {
        numbers.into_iter().map(|n| queue.put(n.to_string().as_bytes())).collect()
    }

    #[test]
    fn dropped_lines_are_reported_in_their_place() {
        let queue = LogQueue::new(4, 100);
        assert_eq!(put(&queue, 0..6), [true, true, true, true, false, false]);
        let batch = queue.next_batch();
        assert_eq!(batch, [line(0), line(1), line(2), line(3)]);
        // The lines are still being written, so there is no more room than before.
        assert_eq!(put(&queue, 6..7), [false]);
        queue.free_batch(&batch);
        // The queue accepts no line before the missing ones are reported.
        assert_eq!(put(&queue, 7..8), [false]);
        assert!(queue.is_dropping());
        let batch = queue.next_batch();
        assert_eq!(batch, [LogEntry::Dropped(4)]);
        assert_eq!(put(&queue, 8..9), [true]);
        queue.free_batch(&batch);
        assert_eq!(queue.next_batch(), [line(8)]);
    }

    #[test]
    fn bytes_are_limited_as_lines_are() {
        let queue = LogQueue::new(100, 10);
        assert!(queue.put(b"12345678") && !queue.put(b"901") && !queue.put(b"9"));
        let batch = queue.next_batch();
        queue.free_batch(&batch);
        let report = queue.next_batch();
        assert_eq!(report, [LogEntry::Dropped(2)]);
        queue.free_batch(&report);
        // A line that is too long for the whole queue is dropped alone.
        assert!(!queue.put(b"12345678901"));
        let report = queue.next_batch();
        assert_eq!(report, [LogEntry::Dropped(1)]);
        queue.free_batch(&report);
        assert!(queue.put(b"1234567890") && !queue.wait_until_written(SOON));
    }

    #[test]
    fn drops_are_not_reported_before_queue_is_half_empty() {
        let queue = LogQueue::new(4, BATCH_BYTES * 4);
        let long = vec![b'x'; BATCH_BYTES];
        assert_eq!([0; 5].map(|_| queue.put(&long)), [true, true, true, true, false]);
        let mut batches = Vec::new();
        while queue.is_dropping() {
            let batch = queue.next_batch();
            queue.free_batch(&batch);
            batches.push(batch);
        }
        assert_eq!(batches.len(), 3, "each is a batch");
        assert_eq!(queue.next_batch(), [LogEntry::Line(long)]);
        assert_eq!(queue.next_batch(), [LogEntry::Dropped(1)]);
    }

    #[test]
    fn flush_waits_for_writes_up_to_its_timeout() {
        let queue = Arc::new(LogQueue::default());
        assert!(queue.wait_until_written(SOON), "there is nothing to write");
        assert!(queue.put(b"last"));
        assert!(!queue.wait_until_written(SOON));
        let batch = queue.next_batch();
        assert!(!queue.wait_until_written(SOON), "it is not written yet");
        let writer = queue.clone();
        let writing = std::thread::spawn(move || writer.free_batch(&batch));
        assert!(queue.wait_until_written(Duration::from_secs(60)));
        writing.join().unwrap();
    }

    /// Many threads add lines and one takes them: each line is written once or counted once, and each thread's lines
    /// are in order.
    #[test]
    fn each_line_is_written_or_counted() {
        const PUTTERS: usize = 4;
        const EACH: usize = 5000;
        let queue = Arc::new(LogQueue::new(16, 1 << 20));
        let putters: Vec<_> = (0..PUTTERS)
            .map(|putter| {
                let queue = queue.clone();
                let put = move |n: &usize| queue.put(format!("{putter} {n}").as_bytes());
                std::thread::spawn(move || (0..EACH).filter(put).count())
            })
            .collect();
        let (mut next, mut n_written, mut n_dropped) = ([0; PUTTERS], 0, 0);
        while n_written + n_dropped < PUTTERS * EACH {
            let batch = queue.next_batch();
            for entry in &batch {
                match entry {
                    LogEntry::Dropped(n) => n_dropped += *n as usize,
                    LogEntry::Line(line) => {
                        let text = std::str::from_utf8(line).unwrap();
                        let (putter, n) = text.split_once(' ').unwrap();
                        let (putter, n): (usize, usize) = (putter.parse().unwrap(), n.parse().unwrap());
                        assert!(n >= next[putter], "{text} is late");
                        next[putter] = n + 1;
                        n_written += 1;
                    }
                }
            }
            queue.free_batch(&batch);
        }
        let n_taken: usize = putters.into_iter().map(|putter| putter.join().unwrap()).sum();
        assert_eq!((n_taken, n_taken + n_dropped), (n_written, PUTTERS * EACH));
    }
}
