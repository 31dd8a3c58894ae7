//! The loop's part that chooses the grid: the one that is wanted; a smaller one where workers are missing for long; the
//! wanted one again when they have come back.

use crate::Waits;
use crate::placement::{Blueprint, Machine, ModelShape, Policy, Unplaceable, Why, plan, plan_fewer};
use crate::replica::losses::Ending;
use crate::replica::{Replica, micros};
use proto::cluster as wire;
use types::{Grid, Micros};

/// Times that the wait before growing doubles when it turns out to be in vain.
const DOUBLINGS_MAX: u32 = 6;
/// A grid that was grown to and lasted for so many such waits was worth it.
const WORTH_IT: u64 = 4;

/// What is remembered from one placement to the next.
pub(crate) struct Placing {
    pub wanted: Grid,
    /// The blueprint that was in force last: who held a rank keeps it.
    last: Option<Blueprint>,
    /// Not before, because the ranks did not reach each other.
    not_before: Option<Micros>,
    /// Epochs in a row that ended so.
    n_fruitless: u32,
    ready_since: Option<Micros>,
    /// From when on a part of the grid will do.
    fewer_from: Option<Micros>,
    /// When it is to be tried again though nobody has come or gone.
    try_at: Option<Micros>,
    /// Since when more ranks than are in force could be had.
    wider_since: Option<Micros>,
    /// The grid in force was grown to.
    is_grown: bool,
    /// Growths in a row that did not last.
    n_relapses: u32,
    /// Present while there is no grid that these workers could have.
    unplaced: Option<Unplaced>,
}

/// There is no grid: why, and since when.
struct Unplaced {
    why: Unplaceable,
    since: Micros,
}

impl Placing {
    pub fn new(wanted: Grid) -> Placing {
        Placing {
            wanted,
            last: None,
            not_before: None,
            n_fruitless: 0,
            ready_since: None,
            fewer_from: None,
            try_at: None,
            wider_since: None,
            is_grown: false,
            n_relapses: 0,
            unplaced: None,
        }
    }

    pub fn is_due(&self, now: Micros) -> bool {
        [self.not_before, self.try_at].into_iter().flatten().any(|at| now >= at)
    }

    /// Otherwise what was due has come.
    pub fn must_wait(&mut self, now: Micros) -> bool {
        let must_wait = self.not_before.is_some_and(|not_before| now < not_before);
        if !must_wait {
            self.not_before = None;
            self.try_at = self.try_at.filter(|at| now < *at);
        }
        must_wait
    }

    /// Somebody came or went: what could be had is another question.
    pub fn crowd_changed(&mut self) {
        self.wider_since = None;
    }

    /// Or before, if something else comes before.
    pub fn try_again_at(&mut self, at: Option<Micros>) {
        self.try_at = [self.try_at, at].into_iter().flatten().min();
    }

    pub fn trust_again(&mut self) {
        self.not_before = None;
    }

    pub fn doubt(&mut self, now: Micros, waits: &Waits) {
        let replace_max = micros(waits.replace_max);
        self.n_fruitless = if self.lasted(now) > replace_max { 0 } else { self.n_fruitless + 1 };
        let doublings = self.n_fruitless.saturating_sub(1).min(20);
        let wait = (micros(waits.replace_min) << doublings).min(replace_max);
        self.not_before = Some(now.plus(wait));
    }

    fn lasted(&self, now: Micros) -> u64 {
        self.ready_since.map_or(0, |since| now.since(since).0)
    }

    pub fn begun(&mut self, blueprint: &Blueprint) {
        self.last = Some(blueprint.clone());
        self.unplaced = None;
    }

    pub fn ready(&mut self, now: Micros) {
        self.ready_since = Some(now);
        (self.fewer_from, self.try_at, self.wider_since) = (None, None, None);
    }

    /// A lost rank's place is kept for a while; but who had grown in vain need not wait for what it has just had.
    pub fn ended(&mut self, now: Micros, why: Ending, waits: &Waits) {
        let was_in_vain = self.is_grown && self.ready_since.is_none();
        if self.is_grown && !why.is_meant() {
            let was_worth_it = self.lasted(now) > WORTH_IT * micros(waits.regrow_after);
            self.n_relapses = if was_worth_it { 0 } else { (self.n_relapses + 1).min(DOUBLINGS_MAX) };
        }
        let keep = if was_in_vain || why.is_meant() { 0 } else { micros(waits.replan_after) };
        // A second loss does not begin the wait anew.
        let from = now.plus(keep);
        let from = self.fewer_from.map_or(from, |already| already.min(from));
        (self.fewer_from, self.try_at) = (Some(from), Some(from));
        (self.ready_since, self.wider_since, self.is_grown) = (None, None, false);
    }

    /// There is no grid now. Whether that is news: it is told once for each reason.
    pub fn cannot(&mut self, now: Micros, why: Unplaceable, n_workers: usize) -> bool {
        if self.unplaced.as_ref().is_some_and(|unplaced| unplaced.why == why) {
            return false;
        }
        match why.why {
            Why::TooFew { .. } => tracing::info!(%why, "the replica waits for workers"),
            _ => tracing::warn!(%why, n_workers, "the replica cannot be placed"),
        }
        let since = self.unplaced.as_ref().map_or(now, |unplaced| unplaced.since);
        self.unplaced = Some(Unplaced { why, since });
        true
    }

    /// There is a grid, though it may have to wait. Whether that is news.
    pub fn can(&mut self) -> bool {
        self.unplaced.take().is_some()
    }

    /// What routers are told, who have others to turn to.
    pub fn unplaced(&self, now: Micros) -> Option<wire::Unplaced> {
        let Unplaced { why, since } = self.unplaced.as_ref()?;
        Some(wire::Unplaced { why: why.to_string(), micros: now.since(*since).0 })
    }

    /// Whether more ranks could be had for so long that it is no passing guest.
    fn is_wider_for_long(&mut self, now: Micros, waits: &Waits) -> bool {
        let since = *self.wider_since.get_or_insert(now);
        now.since(since).0 >= micros(waits.regrow_after) << self.n_relapses
    }
}

impl Replica {
    /// Once it serves, the context is a promise to those who were welcomed.
    pub(crate) fn policy_on(&self, grid: Grid) -> Policy {
        Policy { grid, context: self.promised().or(self.config.policy.context), ..self.config.policy.clone() }
    }

    pub(crate) fn promised(&self) -> Option<u32> {
        self.serving.as_ref().map(|serving| serving.scheduler.config().context_max)
    }

    /// All that have joined, but for those that some other does not reach.
    pub(crate) fn candidates(&self, now: Micros) -> Vec<Machine> {
        let mut inventory = self.members.inventory();
        inventory.retain(|machine| !self.strangers.is_out(machine.worker, now));
        inventory
    }

    /// The wanted grid; or the most ranks that fit, when lost ranks have not been replaced for long enough.
    pub(crate) fn choose(&self, now: Micros, inventory: &[Machine]) -> Result<Blueprint, Unplaceable> {
        let last = self.placing.last.as_ref().map(|last| self.without_suspects(last));
        // Who has never served waits for what was asked for.
        let fewer_will_do = self.serving.is_some() && self.placing.fewer_from.is_some_and(|from| now >= from);
        match fewer_will_do {
            true => self.best(inventory, last.as_ref()),
            false => plan(inventory, &self.config.shape, &self.policy_on(self.placing.wanted), last.as_ref()),
        }
    }

    /// The wanted grid, or else fewer ranks, or else a shorter context: what was promised is kept as long as it can be.
    fn best(&self, inventory: &[Machine], last: Option<&Blueprint>) -> Result<Blueprint, Unplaceable> {
        let lay_out = |shape: &ModelShape, policy: &Policy| {
            plan(inventory, shape, policy, last).or_else(|_| plan_fewer(inventory, shape, policy, last))
        };
        let policy = self.policy_on(self.placing.wanted);
        lay_out(&self.config.shape, &policy).or_else(|why| match (self.config.policy.context, self.promised()) {
            // Nobody asked for its length: it is what the memory holds, and less of it serves those whom it is enough
            // for.
            (None, Some(context)) => {
                let shape = ModelShape { context, ..self.config.shape.clone() };
                lay_out(&shape, &Policy { context: None, ..policy }).map_err(|_| why)
            }
            _ => Err(why),
        })
    }

    /// A rank whose peers blame its worker is free for another.
    fn without_suspects(&self, blueprint: &Blueprint) -> Blueprint {
        let shards = blueprint.shards.iter().filter(|shard| !self.members.is_suspect(shard.worker)).cloned().collect();
        Blueprint { shards, ..blueprint.clone() }
    }

    // -- more ranks again

    /// Call about once a second. Where the replica runs on a part of its grid and more ranks have been there for long
    /// enough, it is spread over them.
    pub(crate) fn grow_if_due(&mut self, now: Micros) {
        let Some(blueprint) = self.blueprint.as_ref().filter(|_| self.is_ready) else { return };
        let is_whole = blueprint.grid == self.placing.wanted && self.promised() == Some(blueprint.context);
        if is_whole || self.draining_since.is_some() {
            return;
        }
        let grid = blueprint.grid;
        let Some(wider) = self.wider_than(blueprint, now) else { return self.placing.crowd_changed() };
        if self.placing.is_wider_for_long(now, &self.config.waits) {
            let (from_tp, from_pp, Grid { tp, pp, .. }) = (grid.tp, grid.pp, wider);
            tracing::info!(from_tp, from_pp, tp, pp, "workers have come back: the model is spread over them");
            self.end_epoch(Ending::Wanted);
            self.placing.is_grown = true;
            self.place();
        }
    }

    fn wider_than(&self, narrow: &Blueprint, now: Micros) -> Option<Grid> {
        if self.members.n_spares() == 0 {
            return None;
        }
        let wider = self.best(&self.candidates(now), None).ok()?;
        let is_wider = wider.grid.n_ranks() > narrow.grid.n_ranks() || wider.context > narrow.context;
        is_wider.then_some(wider.grid)
    }
}
