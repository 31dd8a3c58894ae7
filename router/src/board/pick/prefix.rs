//! Picks the replica at which the first token comes soonest: counted are the work that is there before the prompt, and
//! of the prompt what the cache does not have. Both are tokens, so that no weight stands between cache and load.

use crate::board::pick::row::{Open, Wish};

pub fn pick(open: &Open, wish: &Wish) -> Option<usize> {
    // Of equals the one whose cache has the least is picked: so all caches together keep the most.
    open.least(|at| (cost(open, at, wish), open.n_names[at]))
}

fn cost(open: &Open, at: usize, wish: &Wish) -> u64 {
    let missing = u64::from(wish.n_prompt.saturating_sub(open.n_cached[at]));
    // What others have cached makes room for it, and is computed again later.
    let displaced = missing.saturating_sub(open.tokens_free[at]);
    open.loads[at].saturating_add(missing).saturating_add(displaced)
}
