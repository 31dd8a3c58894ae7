//! What the requests must know of an epoch's ranks when it begins.

use crate::placement::Blueprint;
use types::{Epoch, PolicyDigest};

/// Ranks that are ready for an epoch.
pub(crate) struct EpochStart<'a> {
    pub epoch: Epoch,
    pub blueprint: &'a Blueprint,
    /// The newest protocol that all ranks speak.
    pub protocol: u32,
    /// The policy by the model's fingerprint, and the one over all of its bytes.
    pub meant: PolicyDigest,
    pub policy: PolicyDigest,
    /// The parts of the ranks' pools that have memory.
    pub kv_parts: u32,
    /// Whether all ranks have a disk behind their pools.
    pub has_tier: bool,
}
