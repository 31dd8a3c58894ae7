//! Which grid the replica is laid out on: the configured one; a smaller one when workers are missing for long; the
//! configured one again when they have come back. Remembers the outcome of earlier grids. The caller passes the time.

use super::endings::EpochEnding;
use super::phase::Phase;
use crate::config::micros;
use crate::members::workers::{Candidates, JoinedWorkers};
use crate::placement::{Blueprint, Machine, ModelShape, PlacementPolicy, Unplaceable, plan, plan_fewer};
use crate::{Config, Timings};
use types::{Grid, Micros};

/// How often the wait before growing doubles when growing was in vain.
const DOUBLINGS_MAX: u32 = 6;
/// A larger grid that lasted for this many such waits was worth the growth.
const WORTH_IT: u64 = 4;

/// The state that stays from one placement to the next.
pub(crate) struct GridChooser {
    requested: Grid,
    /// The last blueprint in force: its workers keep their ranks.
    last: Option<Blueprint>,
    /// How many epochs in a row ended because the ranks did not reach each other.
    n_fruitless: u32,
    /// From when on a smaller grid is acceptable.
    fewer_from: Option<Micros>,
    /// How many growths in a row did not last.
    n_relapses: u32,
}

/// The requirements for a grid.
#[derive(Clone, Copy)]
pub(crate) struct GridRequirements<'a> {
    pub config: &'a Config,
    /// Once the replica has served, its context is a promise to the routers that were welcomed.
    pub promised: Option<u32>,
}

impl GridRequirements<'_> {
    pub fn policy_on(&self, grid: Grid) -> PlacementPolicy {
        let policy = &self.config.policy;
        PlacementPolicy { grid, context: self.promised.or(policy.context), ..policy.clone() }
    }
}

impl GridChooser {
    pub fn new(requested: Grid) -> GridChooser {
        GridChooser { requested, last: None, n_fruitless: 0, fewer_from: None, n_relapses: 0 }
    }

    /// An operator requests this grid.
    pub fn request(&mut self, grid: Grid) {
        self.requested = grid;
    }

    pub fn requested(&self) -> Grid {
        self.requested
    }

    pub fn n_relapses(&self) -> u32 {
        self.n_relapses
    }

    /// Records that an epoch ended because ranks do not reach each other, or because it is unknown which one hangs.
    /// Both may be well, so the next placement waits until the returned time, each time longer.
    pub fn record_doubt(&mut self, served_micros: u64, now: Micros, waits: &Timings) -> Micros {
        let replace_max = micros(waits.replace_max);
        self.n_fruitless = if served_micros > replace_max { 0 } else { self.n_fruitless + 1 };
        let doublings = self.n_fruitless.saturating_sub(1).min(20);
        let wait = (micros(waits.replace_min) << doublings).min(replace_max);
        now.plus(wait)
    }

    pub fn begun(&mut self, blueprint: &Blueprint) {
        self.last = Some(blueprint.clone());
    }

    pub fn record_ready(&mut self) {
        self.fewer_from = None;
    }

    /// When a grid with fewer ranks becomes acceptable, if that is still to come.
    pub fn next_chance(&self, now: Micros) -> Option<Micros> {
        self.fewer_from.filter(|from| now < *from)
    }

    /// Keeps a lost rank free until the returned time. A grid that the replica grew to in vain keeps none: the replica
    /// returns at once to its grid before that.
    pub fn record_ended(&mut self, phase: &Phase, why: EpochEnding, now: Micros, waits: &Timings) -> Micros {
        let is_grown = phase.placement().is_some_and(|placement| placement.is_grown);
        let was_in_vain = is_grown && phase.serving().is_none();
        if is_grown && !why.is_meant() {
            let was_worth_it = phase.served_micros(now) > WORTH_IT * micros(waits.regrow_after);
            self.n_relapses = if was_worth_it { 0 } else { (self.n_relapses + 1).min(DOUBLINGS_MAX) };
        }
        let keep = if was_in_vain || why.is_meant() { 0 } else { micros(waits.replan_after) };
        // A second loss does not restart the wait.
        let from = now.plus(keep);
        let from = self.fewer_from.map_or(from, |already| already.min(from));
        self.fewer_from = Some(from);
        from
    }

    /// The configured grid; or the most ranks that fit, when lost ranks have not been replaced for long enough. A rank
    /// whose peers blame its worker is free for another. Distrusted workers are taken if there is no grid without them.
    pub fn choose(
        &self,
        requirements: GridRequirements<'_>,
        members: &JoinedWorkers,
        candidates: &Candidates,
        now: Micros,
    ) -> Result<Blueprint, Unplaceable> {
        let last = self.last.as_ref().map(|last| without_suspects(last, members));
        // A replica that has never served waits for the configured grid.
        let fewer_will_do = requirements.promised.is_some() && self.fewer_from.is_some_and(|from| now >= from);
        let lay_out = |inventory: &[Machine]| match fewer_will_do {
            true => self.best(requirements, inventory, last.as_ref()),
            false => {
                plan(inventory, &requirements.config.shape, &requirements.policy_on(self.requested), last.as_ref())
            }
        };
        let trusted = candidates.trusted().and_then(|trusted| lay_out(trusted).ok());
        trusted.map_or_else(|| lay_out(candidates.all()), Ok)
    }

    /// The configured grid, else fewer ranks, else a shorter context: the promised context is kept as long as possible.
    fn best(
        &self,
        requirements: GridRequirements<'_>,
        inventory: &[Machine],
        last: Option<&Blueprint>,
    ) -> Result<Blueprint, Unplaceable> {
        let lay_out = |shape: &ModelShape, policy: &PlacementPolicy| {
            plan(inventory, shape, policy, last).or_else(|_| plan_fewer(inventory, shape, policy, last))
        };
        let (config, policy) = (requirements.config, requirements.policy_on(self.requested));
        lay_out(&config.shape, &policy).or_else(|why| match (config.policy.context, requirements.promised) {
            // No context was configured, so it is what the memory holds; a shorter one still serves the requests that
            // fit it.
            (None, Some(context)) => {
                let shape = ModelShape { context, ..config.shape.clone() };
                lay_out(&shape, &PlacementPolicy { context: None, ..policy }).map_err(|_| why)
            }
            _ => Err(why),
        })
    }

    /// Returns a grid with more ranks, or a longer context, than the one in force.
    pub fn wider_than(
        &self,
        narrow: &Blueprint,
        requirements: GridRequirements<'_>,
        inventory: &[Machine],
    ) -> Option<Grid> {
        let wider = self.best(requirements, inventory, None).ok()?;
        let is_wider = wider.grid.n_ranks() > narrow.grid.n_ranks() || wider.context > narrow.context;
        is_wider.then_some(wider.grid)
    }
}

fn without_suspects(blueprint: &Blueprint, members: &JoinedWorkers) -> Blueprint {
    let shards = blueprint.shards.iter().filter(|shard| !members.is_suspect(shard.worker)).cloned().collect();
    Blueprint { shards, ..blueprint.clone() }
}
