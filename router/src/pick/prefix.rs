//! Where the first token comes soonest: what is to be computed there before the prompt, and of the prompt what the
//! cache does not have. Both are counted in tokens, so that no weight stands between cache and load.

use crate::pick::{Open, Wish};

pub fn pick(open: &Open, wish: &Wish) -> Option<usize> {
    // Of equals the one whose cache has the least: so all caches together keep the most.
    open.least(|at| (cost(open, at, wish), open.n_names[at]))
}

fn cost(open: &Open, at: usize, wish: &Wish) -> u64 {
    let missing = u64::from(wish.n_prompt.saturating_sub(open.n_cached[at]));
    // Others give up so much for it, and compute it again.
    let displaced = missing.saturating_sub(open.tokens_free[at]);
    open.loads[at].saturating_add(missing).saturating_add(displaced)
}
