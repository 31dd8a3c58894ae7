//! Which machine takes which rank: a machine keeps its rank, and the ranks of a stage share a host where possible.

use super::{Blueprint, Machine};
use std::collections::BTreeMap;
use types::Grid;

/// A machine for each rank of the grid; there must be enough. `preferred` are the candidates, best first; of `now` only
/// ranks that candidates still hold count.
pub(super) fn machine_of_each_rank<'a>(
    preferred: &[&'a Machine],
    grid: Grid,
    now: Option<&Blueprint>,
) -> Vec<&'a Machine> {
    let mut ranks: Vec<Option<&Machine>> = vec![None; usize::from(grid.n_ranks())];
    for shard in now.iter().flat_map(|now| &now.shards) {
        let holder = preferred.iter().find(|machine| machine.worker == shard.worker);
        if let Some(rank) = ranks.get_mut(usize::from(shard.rank.0)) {
            *rank = holder.copied();
        }
    }
    let is_free = |machine: &&&Machine| !ranks.iter().flatten().any(|taken| taken.worker == machine.worker);
    let mut free: Vec<&Machine> = preferred.iter().filter(is_free).copied().collect();
    for stage in ranks.chunks_mut(usize::from(grid.tp)) {
        fill(stage, &mut free);
    }
    ranks.into_iter().flatten().collect()
}

/// Gives a stage's empty ranks to machines of as few hosts as possible.
fn fill<'a>(stage: &mut [Option<&'a Machine>], free: &mut Vec<&'a Machine>) {
    while let Some(empty) = stage.iter().position(Option::is_none) {
        let n_missing = stage.iter().filter(|rank| rank.is_none()).count();
        let Some(host) = host_for(stage, free, n_missing) else { return };
        let Some(next) = free.iter().position(|machine| machine.host == host) else { return };
        stage[empty] = Some(free.remove(next));
    }
}

/// A host that the stage uses already; else the one with the fewest free machines that suffice; else the one with the
/// most. Among equals, the preferred one.
fn host_for(stage: &[Option<&Machine>], free: &[&Machine], n_missing: usize) -> Option<String> {
    let mut n_free: BTreeMap<&str, usize> = BTreeMap::new();
    free.iter().for_each(|machine| *n_free.entry(&machine.host).or_default() += 1);
    let is_here = |machine: &&&Machine| stage.iter().flatten().any(|taken| taken.host == machine.host);
    let rank = |machine: &&&Machine| {
        let n = n_free[machine.host.as_str()];
        if n >= n_missing { n - n_missing } else { usize::MAX - n }
    };
    // `min_by_key` returns the first of equals.
    let chosen = free.iter().find(is_here).or_else(|| free.iter().min_by_key(rank));
    chosen.map(|machine| machine.host.clone())
}
