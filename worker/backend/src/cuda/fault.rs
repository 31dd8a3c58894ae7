//! The first failure of what the device was asked. Nothing is begun after it, until somebody has been told. Whether
//! there is one is looked at before every launch, so that takes no lock.

use super::lock::lock;
use crate::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub(super) struct Fault {
    /// Only a hint to other threads: what failed is read under the lock.
    is_there: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Fault {
    pub fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// The first that fails is the cause of what comes after it.
    pub fn keep(&self, error: Error) {
        let mut first = lock(&self.first);
        first.get_or_insert(error);
        self.is_there.store(true, Ordering::Release);
    }

    pub fn take(&self) -> Option<Error> {
        let mut first = lock(&self.first);
        self.is_there.store(false, Ordering::Release);
        first.take()
    }

    /// Whoever calls it cannot go on if there is one.
    pub fn check(&self) {
        let first = lock(&self.first);
        assert!(first.is_none(), "the device failed: {}", first.as_ref().map_or_else(String::new, Error::to_string));
    }
}
