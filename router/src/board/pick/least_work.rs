//! Picks the replica with the least work, and among equals the first: so a client that sends one request after the
//! other finds its earlier ones in the cache.

use crate::board::pick::row::OpenReplicas;

pub fn pick(open: &OpenReplicas) -> Option<usize> {
    open.least(|at| open.loads[at])
}
