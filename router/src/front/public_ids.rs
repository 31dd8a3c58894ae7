//! Ids that clients see. Knows nothing of what has them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub struct PublicIds {
    /// Part of every public id: so two routers, or two runs of one, never give the same id.
    nonce: u32,
    /// Counts the requests to which their clients gave no id.
    n_unnamed: AtomicU64,
    /// Counts what clients keep here beside responses.
    n_kept: AtomicU64,
}

impl PublicIds {
    pub fn new(nonce: u32) -> PublicIds {
        PublicIds { nonce, n_unnamed: AtomicU64::new(0), n_kept: AtomicU64::new(0) }
    }

    pub fn nonce(&self) -> u32 {
        self.nonce
    }

    /// Returns the number of a request to which its client gave no id.
    pub fn next_request(&self) -> u64 {
        self.n_unnamed.fetch_add(1, Relaxed)
    }

    /// Returns an id that is unique among all things that are kept here.
    pub fn next_kept(&self) -> String {
        format!("{:08x}{:016x}", self.nonce, self.n_kept.fetch_add(1, Relaxed))
    }
}
