//! Picks, of two random replicas, the one with less work. Figures of replicas are a little old: a router that always
//! took the best would send everything to one replica until the next report, and so would all other routers.

use crate::board::pick::hash::scatter;
use crate::board::pick::row::{OpenReplicas, PickInfo};

pub fn pick(open: &OpenReplicas, info: &PickInfo) -> Option<usize> {
    let n_open = open.len() as u64;
    let drawn = scatter(info.n_before);
    let one = drawn.checked_rem(n_open)?;
    // The second is another replica, if there is one.
    let step = (drawn >> 32).checked_rem(n_open - 1).map_or(0, |step| step + 1);
    let two = [one, (one + step) % n_open].map(|at| at as usize);
    two.into_iter().min_by_key(|&at| open.loads[at])
}
