//! Picks the replica at which the first token comes soonest: counts the work before the prompt, and the part of the
//! prompt that the cache lacks. Both are tokens, so that no weight between cache and load is needed.

use crate::board::pick::row::{OpenReplicas, PickInfo};

pub fn pick(open: &OpenReplicas, info: &PickInfo) -> Option<usize> {
    // Among equals, picks the one with the fewest names: so all caches together keep the most.
    open.least(|at| (cost(open, at, info), open.n_names[at]))
}

fn cost(open: &OpenReplicas, at: usize, info: &PickInfo) -> u64 {
    let missing = u64::from(info.n_prompt.saturating_sub(open.n_cached[at]));
    // Cached blocks of others make room for it, and are computed again later.
    let displaced = missing.saturating_sub(open.tokens_free[at]);
    open.loads[at].saturating_add(missing).saturating_add(displaced)
}
