//! Picks the replica with the least to do, and of equals the first: so a client that sends one request after the other
//! finds what the one before has cached.

use crate::board::pick::row::Open;

pub fn pick(open: &Open) -> Option<usize> {
    open.least(|at| open.loads[at])
}
