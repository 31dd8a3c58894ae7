//! Picks the replica with the least work, and among equals the first: so a client that sends one request after the
//! other finds its earlier ones in the cache.

use crate::board::pick::row::Open;

pub fn pick(open: &Open) -> Option<usize> {
    open.least(|at| open.loads[at])
}
