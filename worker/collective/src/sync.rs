//! The atomics that rings are made of. The test under loom puts loom's in their place.

pub use std::sync::atomic::{AtomicU32, Ordering, fence};
