//! Of two that are drawn, the one with less to do. What is known of replicas is a little old, and a router that always
//! takes the best sends all that comes in between to the same one, as do all other routers.

use crate::pick::{Row, Wish, open, scatter};

pub fn pick(table: &[Row], wish: &Wish) -> Option<usize> {
    let open = open(table, wish);
    let n_open = open.clone().count() as u64;
    let drawn = scatter(wish.n_before);
    let one = drawn.checked_rem(n_open)?;
    // Another one, where there is one.
    let step = (drawn >> 32).checked_rem(n_open - 1).map_or(0, |step| step + 1);
    let of = |at: u64| open.clone().nth(at as usize);
    let two = [of(one), of((one + step) % n_open)];
    two.into_iter().flatten().min_by_key(|(_, row)| row.load()).map(|(idx, _)| idx)
}
