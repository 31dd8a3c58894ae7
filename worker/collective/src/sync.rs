//! The atomics of rings. The loom test replaces them with loom's.

pub use std::sync::atomic::{AtomicU32, Ordering, fence};
