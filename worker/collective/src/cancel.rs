//! The flag by which a caller withdraws its request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set once, from any thread, when the result of the present work is not needed. Long operations poll it.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
