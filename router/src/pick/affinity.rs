//! Requests of a session go where the session before them went, at every router and without a table of sessions:
//! replicas are ranked by a hash of session and replica, so that one that comes or goes moves only its own sessions.
//! Who has far more to do than the others is passed over. Without a session, as `prefix` has it.

use crate::pick::{Row, Wish, open, prefix, scatter};

pub fn pick(table: &[Row], wish: &Wish) -> Option<usize> {
    let Some(session) = wish.session else { return prefix::pick(table, wish) };
    let open = open(table, wish);
    let (n_open, load) =
        open.clone().fold((0_u128, 0_u128), |(n, sum), (_, row)| (n + 1, sum + u128::from(row.load())));
    let mean = load.checked_div(n_open)?;
    // A quarter above the mean, and one prompt: who is idle is not passed over for having just one.
    let load_max = mean + mean / 4 + u128::from(wish.n_prompt);
    let able = open.filter(|(_, row)| u128::from(row.load()) <= load_max);
    able.max_by_key(|(_, row)| scatter(session ^ scatter(row.id))).map(|(idx, _)| idx)
}
