//! The largest grid on which these machines can carry the model, when they cannot carry the configured grid.

use super::blueprint::{Blueprint, PlacementPolicy};
use super::machine::{Inventory, class_of, compatible_machines};
use super::plan::plan_grid;
use super::shape::{ModelShape, PartMeasurer};
use super::unplaceable::{STAGES_MAX, Unplaceable, UnplaceableReason};
use types::Grid;

/// The most grids that are tried when there are many machines.
const GRIDS_TRIED_MAX: usize = 64;

/// Lays the replica out on as many of these machines as some grid can use, at most as many as configured. The policy's
/// context must fit, as on the whole grid.
pub fn plan_fewer(
    inventory: &Inventory,
    shape: &ModelShape,
    policy: &PlacementPolicy,
    now: Option<&Blueprint>,
) -> Result<Blueprint, Unplaceable> {
    let machines = compatible_machines(inventory);
    let Grid { tp, pp } = policy.grid;
    let measure = PartMeasurer::new(shape, class_of(machines.first().copied()), policy.kv_dtype);
    let longest = (measure.n_leaves(), shape.n_layers.min(STAGES_MAX.into()));
    let mut why = None;
    for grid in smaller_grids(policy.grid, machines.len(), longest) {
        match plan_grid(&machines, shape, policy, grid, now) {
            Ok(blueprint) => return Ok(blueprint),
            // The reason for the largest grid, which is the nearest to being possible.
            Err(error) => drop(why.get_or_insert(error)),
        }
    }
    let needed = usize::from(tp) * usize::from(pp);
    Err(Unplaceable {
        why: why.unwrap_or(UnplaceableReason::TooFew { tp, pp, needed, there: machines.len() }),
        nearest: None,
    })
}

/// Grids with the most ranks first. Among equals, first those whose `tp` is at most what the operator chose for these
/// machines and links; then the longer `tp`, which answers a single sequence sooner. `longest` is the `tp` and `pp`
/// that the model can be cut into.
fn smaller_grids(requested: Grid, n_machines: usize, longest: (u32, u32)) -> Vec<Grid> {
    let n_ranks = |tp: u16, pp: u16| usize::from(tp) * usize::from(pp);
    let n_max = n_machines.min(n_ranks(requested.tp, requested.pp)).min(usize::from(u16::MAX));
    let up_to = |longest: u32| 1..=u16::try_from(longest).unwrap_or(u16::MAX).min(n_max as u16);
    let with_tp = |tp: u16| up_to(longest.1).map(move |pp| Grid { pp, tp });
    let is_another =
        |grid: &Grid| (grid.tp, grid.pp) != (requested.tp, requested.pp) && n_ranks(grid.tp, grid.pp) <= n_max;
    let mut grids: Vec<Grid> = up_to(longest.0).flat_map(with_tp).filter(is_another).collect();
    grids.sort_by_key(|grid| std::cmp::Reverse((n_ranks(grid.tp, grid.pp), grid.tp <= requested.tp, grid.tp)));
    grids.truncate(GRIDS_TRIED_MAX);
    grids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_ranks_come_first() {
        let names = |tp, pp, n, longest| {
            let grids = smaller_grids(Grid { tp, pp }, n, longest);
            grids.iter().map(|grid| format!("{}x{}", grid.tp, grid.pp)).collect::<Vec<_>>()
        };
        const DEEP: (u32, u32) = (64, 64);
        assert_eq!(names(2, 2, 4, DEEP), ["1x4", "4x1", "1x3", "3x1", "2x1", "1x2", "1x1"]);
        assert_eq!(names(2, 2, 3, DEEP), ["1x3", "3x1", "2x1", "1x2", "1x1"]);
        assert_eq!(names(4, 1, 3, DEEP), ["3x1", "1x3", "2x1", "1x2", "1x1"]);
        assert_eq!(names(3, 2, 5, DEEP)[..4], ["1x5", "5x1", "2x2", "1x4"]);
        // Never more ranks than configured, and no grid that the model cannot be cut into.
        assert_eq!(names(2, 1, 5, DEEP), ["1x2", "1x1"]);
        assert_eq!(names(2, 2, 3, (2, 2)), ["2x1", "1x2", "1x1"]);
        assert!(names(2, 2, 0, DEEP).is_empty() && names(1, 1, 5, DEEP).is_empty());
        assert_eq!(names(64, 16, 1023, (64, 4096)).len(), GRIDS_TRIED_MAX);
    }
}
