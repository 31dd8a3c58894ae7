//! Requests of a session go where the session before them went, at every router and without a table of sessions:
//! replicas are ranked by a hash of session and replica, so that one that comes or goes moves only its own sessions.
//! Who has far more to do than the others is passed over. Without a session, as `prefix` has it.

use crate::pick::{Open, Wish, prefix, scatter};

pub fn pick(open: &Open, wish: &Wish) -> Option<usize> {
    let Some(session) = wish.session else { return prefix::pick(open, wish) };
    let load = open.loads.iter().map(|load| u128::from(*load)).sum::<u128>();
    let mean = load.checked_div(open.len() as u128)?;
    // A quarter above the mean, and one prompt: who is idle is not passed over for having just one.
    let load_max = mean + mean / 4 + u128::from(wish.n_prompt);
    let able = (0..open.len()).filter(|&at| u128::from(open.loads[at]) <= load_max);
    able.max_by_key(|&at| scatter(session ^ scatter(open.ids[at])))
}
