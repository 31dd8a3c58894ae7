//! How whoever asked for something says that he no longer wants it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Nobody wants any more what is under way. Raised once, from any thread; whoever takes long looks now and then.
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
