//! The store behind membership: which coordinator serves which replica, where, and since when. Knows nothing of what a
//! replica does.
//!
//! A coordinator claims its replica's name; the claim's revision is the incarnation of all its epochs, and a later
//! claim fences an earlier one. Routers follow the registration under the claim. A vanished entry is a suspicion; an
//! open stream is the truth.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod addresses;
mod claim;
mod etcd;
mod last_claim;
mod memory;
mod others;
mod post;
mod state;
mod store;

pub use addresses::{Addresses, BadAddress};
pub use claim::{Claim, ClaimLost};
pub use etcd::{EtcdConfig, EtcdStore, EtcdTimings, EtcdTls};
pub use last_claim::{LastClaim, follow_last_claim};
pub use memory::MemoryStore;
pub use others::{OtherReplicas, ReplicaCount};
pub use post::Post;
pub use state::{Member, MemberChange, MemberWatch, Members, Posts, Registration, StoreHealth};
pub use store::Store;

/// Why a store cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is not a replica's name: use 1 to {NAME_BYTES_MAX} printable characters without / or space")]
    Name(String),
    #[error("etcd at {0:?}: {1}")]
    Endpoint(String, String),
    #[error("the store refuses this user: {0}")]
    Refused(String),
    #[error("the store is unreachable: {0}")]
    Away(String),
}

pub const NAME_BYTES_MAX: usize = 253;

/// A name becomes part of a key, and people read it in logs.
fn check_name(name: &str) -> Result<(), Error> {
    let is_good = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
    if is_good { Ok(()) } else { Err(Error::Name(name.into())) }
}
