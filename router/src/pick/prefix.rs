//! Where the first token comes soonest: what is to be computed there before the prompt, and of the prompt what the
//! cache does not have. Both are counted in tokens, so that no weight stands between cache and load.

use crate::pick::{Row, Wish, open};

pub fn pick(table: &[Row], wish: &Wish) -> Option<usize> {
    // Of equals the one whose cache has the least: so all caches together keep the most.
    open(table, wish).min_by_key(|(_, row)| (cost(row, wish), row.n_names)).map(|(idx, _)| idx)
}

fn cost(row: &Row, wish: &Wish) -> u64 {
    let missing = u64::from(wish.n_prompt.saturating_sub(row.n_cached));
    // Others give up so much for it, and compute it again.
    let displaced = row.tokens_free.map_or(0, |free| missing.saturating_sub(free));
    row.load().saturating_add(missing).saturating_add(displaced)
}
