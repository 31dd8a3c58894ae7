//! Pairwise covers: runs that together contain every possible pair of values. A value is only its number here, and the
//! caller has its meaning.

use std::collections::BTreeSet;

/// One value number per factor, in order.
pub type Run = Vec<usize>;
/// A factor with its value, and a later factor with its value.
type Pair = (usize, usize, usize, usize);

/// Returns a greedy cover, the same each time: the next run is the first of those with the most missing pairs.
pub fn pairwise(n_values: &[usize], is_possible: impl Fn(&[usize]) -> bool) -> Vec<Run> {
    let possible: Vec<Run> = all(n_values).into_iter().filter(|run| is_possible(run)).collect();
    let mut left: BTreeSet<Pair> = possible.iter().flat_map(|run| pairs(run)).collect();
    let mut cover = Vec::new();
    while !left.is_empty() {
        let met = |run: &&Run| pairs(run).filter(|pair| left.contains(pair)).count();
        // `max_by_key` returns the last of equals.
        let next = possible.iter().rev().max_by_key(met).expect("some run covers each of the rest").clone();
        for pair in pairs(&next) {
            left.remove(&pair);
        }
        cover.push(next);
    }
    cover
}

/// The pairs that some possible run has and no run of `cover` has.
pub fn missing(cover: &[Run], n_values: &[usize], is_possible: impl Fn(&[usize]) -> bool) -> Vec<Pair> {
    let met: BTreeSet<Pair> = cover.iter().flat_map(|run| pairs(run)).collect();
    let possible = all(n_values).into_iter().filter(|run| is_possible(run));
    let required: BTreeSet<Pair> = possible.flat_map(|run| pairs(&run).collect::<Vec<_>>()).collect();
    required.difference(&met).copied().collect()
}

fn all(n_values: &[usize]) -> Vec<Run> {
    let mut runs = vec![Run::new()];
    for &n in n_values {
        runs = runs.iter().flat_map(|run| (0..n).map(move |value| [&run[..], &[value]].concat())).collect();
    }
    runs
}

fn pairs(run: &[usize]) -> impl Iterator<Item = Pair> {
    (0..run.len()).flat_map(move |i| (0..i).map(move |j| (j, run[j], i, run[i])))
}
