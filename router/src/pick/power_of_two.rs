//! Of two that are drawn, the one with less to do. What is known of replicas is a little old, and a router that always
//! takes the best sends all that comes in between to the same one, as do all other routers.

use crate::pick::{Open, Wish, scatter};

pub fn pick(open: &Open, wish: &Wish) -> Option<usize> {
    let n_open = open.len() as u64;
    let drawn = scatter(wish.n_before);
    let one = drawn.checked_rem(n_open)?;
    // Another one, where there is one.
    let step = (drawn >> 32).checked_rem(n_open - 1).map_or(0, |step| step + 1);
    let two = [one, (one + step) % n_open].map(|at| at as usize);
    two.into_iter().min_by_key(|&at| open.loads[at])
}
