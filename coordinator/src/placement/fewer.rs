//! The largest part of a grid that these machines can carry, where they cannot carry it whole: its axes stay what
//! they are, because the operator chose them for these machines and wires.

use super::{Blueprint, Inventory, ModelShape, Policy, Unplaceable, Why, alike, plan_grid};
use types::Grid;

/// Of grids that are large, not every part is tried.
const GRIDS_TRIED_MAX: usize = 64;

/// Lays the replica out on as many of these machines as a part of the policy's grid can use. The context that the
/// policy asks for must fit, as on the whole grid.
pub fn plan_fewer(
    inventory: &Inventory,
    shape: &ModelShape,
    policy: &Policy,
    now: Option<&Blueprint>,
) -> Result<Blueprint, Unplaceable> {
    let machines = alike(inventory);
    let Grid { tp, pp, .. } = policy.grid;
    let mut why = None;
    for grid in parts(policy.grid, machines.len()) {
        match plan_grid(&machines, shape, policy, grid, now) {
            Ok(blueprint) => return Ok(blueprint),
            // Of the largest, which is the nearest to being possible.
            Err(error) => drop(why.get_or_insert(error)),
        }
    }
    let needed = usize::from(tp) * usize::from(pp);
    Err(Unplaceable { why: why.unwrap_or(Why::TooFew { tp, pp, needed, there: machines.len() }), nearest: None })
}

/// The most ranks first; of as many, those with the longer `tp`, which answers a single sequence sooner.
fn parts(of: Grid, n_machines: usize) -> Vec<Grid> {
    let with_tp = |tp: u16| (1..=of.pp).map(move |pp| Grid { pp, tp, ep: 1 });
    let n_ranks = |grid: &Grid| usize::from(grid.tp) * usize::from(grid.pp);
    let is_part = |grid: &Grid| (grid.tp, grid.pp) != (of.tp, of.pp) && n_ranks(grid) <= n_machines;
    let mut grids: Vec<Grid> = (1..=of.tp).flat_map(with_tp).filter(is_part).collect();
    grids.sort_by_key(|grid| std::cmp::Reverse((n_ranks(grid), grid.tp)));
    grids.truncate(GRIDS_TRIED_MAX);
    grids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_largest_first() {
        let names = |tp, pp, n| {
            let grids = parts(Grid { tp, pp, ep: 1 }, n);
            grids.iter().map(|grid| format!("{}x{}", grid.tp, grid.pp)).collect::<Vec<_>>()
        };
        assert_eq!(names(2, 2, 4), ["2x1", "1x2", "1x1"]);
        assert_eq!(names(2, 2, 3), ["2x1", "1x2", "1x1"]);
        assert_eq!(names(2, 2, 1), ["1x1"]);
        assert_eq!(names(3, 2, 5), ["2x2", "3x1", "2x1", "1x2", "1x1"]);
        assert!(names(2, 2, 0).is_empty() && names(1, 1, 5).is_empty());
        assert_eq!(names(64, 16, 1023).len(), GRIDS_TRIED_MAX);
    }
}
