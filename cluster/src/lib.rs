//! The store behind membership: who serves which replica, and since when. Knows nothing of what a replica does.
//!
//! A vanished entry is a suspicion; an open stream is the truth.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod addresses;
mod memory;

pub use addresses::{Addresses, BadAddress};
pub use memory::{Claim, Member, MemoryStore};
