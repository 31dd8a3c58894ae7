//! The flag by which a caller withdraws what it asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set once, from any thread, when nobody wants the work in progress any more. Long operations poll it.
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
