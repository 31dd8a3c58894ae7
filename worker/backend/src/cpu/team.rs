//! A team of threads that does one thing at a time.

use std::ops::Range;

pub(crate) struct Team {
    n_threads: usize,
}

impl Team {
    pub fn new(n_threads: usize) -> std::io::Result<Team> {
        Ok(Team { n_threads: n_threads.max(1) })
    }

    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Calls `work` with ranges that together are `0..n_items`, each item once, on all threads; returns when all are done.
    pub fn run(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        if n_items > 0 {
            work(0..n_items);
        }
    }
}
