//! The first failure of the device's operations. After it nothing is launched until the failure has been reported. It
//! is checked before every launch, so the check takes no lock.

use super::lock::lock;
use crate::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub(super) struct FirstError {
    /// Only a hint to other threads: the error is read under the lock.
    is_there: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl FirstError {
    pub fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Keeps the first error, which is the cause of the later ones.
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

    /// Panics if there is an error, for callers that cannot continue with one.
    pub fn check(&self) {
        let first = lock(&self.first);
        assert!(first.is_none(), "the device failed: {}", first.as_ref().map_or_else(String::new, Error::to_string));
    }
}
