//! Lays a replica out on a grid: a machine for each rank, a cut of the model, and the pools that fit beside it.
//! Otherwise returns why that is impossible.

use super::assign::machine_of_each_rank;
use super::blueprint::{Blueprint, PlacementPolicy, PoolSize, Shard, ShortenedContext};
use super::cut::{Capacity, KvRule, StageCutter, last_that};
use super::machine::{Inventory, Machine, class_of, compatible_machines};
use super::pools::{PoolSizing, StateCacheSize};
use super::predict::speeds;
use super::shape::{ModelShape, PartMeasurer, PartSizes};
use super::unplaceable::{STAGES_MAX, Unplaceable, UnplaceableReason};
use std::collections::BTreeMap;
use std::ops::Range;
use types::{BLOCK_TOKENS, CacheGroup, DeviceClass, Grid, Layout, Rank};

/// Lays the replica out on these machines. `now` is the blueprint in force, whose machines keep their ranks.
pub fn plan(
    inventory: &Inventory,
    shape: &ModelShape,
    policy: &PlacementPolicy,
    now: Option<&Blueprint>,
) -> Result<Blueprint, Unplaceable> {
    let machines = compatible_machines(inventory);
    let planned = plan_grid(&machines, shape, policy, policy.grid, now).map_err(|why| why.among(inventory));
    planned.map_err(|why| Unplaceable { nearest: nearest(&machines, shape, policy, &why), why })
}

impl UnplaceableReason {
    /// Names the other machines too, if too few are alike.
    fn among(self, inventory: &Inventory) -> UnplaceableReason {
        match self {
            UnplaceableReason::TooFew { tp, pp, needed, .. } if inventory.len() >= needed => {
                UnplaceableReason::Kinds { tp, pp, needed, kinds: describe_devices(inventory) }
            }
            why => why,
        }
    }
}

/// How many machines there are of each kind of device.
fn describe_devices(inventory: &Inventory) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    inventory.iter().for_each(|machine| *counts.entry(machine.device.to_string()).or_default() += 1);
    counts.iter().map(|(kind, n)| format!("{n} x {kind}")).collect::<Vec<_>>().join(", ")
}

/// The most ranks that are tried in the search for a grid that fits.
const RANKS_TRIED_MAX: u16 = 64;

/// The grid that fits and is nearest to the configured one: in ranks, then in `tp`. If one axis is too long, the other
/// stays if it can.
fn nearest(
    machines: &[&Machine],
    shape: &ModelShape,
    policy: &PlacementPolicy,
    why: &UnplaceableReason,
) -> Option<Grid> {
    let requested = policy.grid;
    let n_max = RANKS_TRIED_MAX.min(u16::try_from(machines.len()).unwrap_or(u16::MAX));
    let of_tp = |tp: u16| (1..=n_max / tp).map(move |pp| Grid { pp, tp });
    let mut grids: Vec<Grid> = (1..=n_max).flat_map(of_tp).filter(|grid| *grid != requested).collect();
    let n_requested = u32::from(requested.tp) * u32::from(requested.pp);
    let leaves = |grid: &Grid| match why {
        UnplaceableReason::Heads { .. } => grid.pp != requested.pp,
        UnplaceableReason::Layers { .. } | UnplaceableReason::Joined { .. } | UnplaceableReason::Stages { .. } => {
            grid.tp != requested.tp
        }
        _ => false,
    };
    let away = |grid: &Grid| (u32::from(grid.n_ranks()).abs_diff(n_requested), grid.tp.abs_diff(requested.tp));
    grids.sort_by_key(|grid| (leaves(grid), away(grid)));
    grids.into_iter().find(|grid| plan_grid(machines, shape, policy, *grid, None).is_ok())
}

pub(super) fn plan_grid(
    machines: &[&Machine],
    shape: &ModelShape,
    policy: &PlacementPolicy,
    grid: Grid,
    now: Option<&Blueprint>,
) -> Result<Blueprint, UnplaceableReason> {
    let measure = PartMeasurer::new(shape, class_of(machines.first().copied()), policy.kv_dtype);
    check(machines, &measure, policy, grid)?;
    let planner = Planner { measure, policy, grid };
    let by_need = planner.large_enough_first(machines);
    let n_ranks = usize::from(grid.n_ranks());
    let (largest_free, largest) = (largest(machines, n_ranks, now), largest(machines, n_ranks, None));
    let attempts = [(&by_need, now), (&largest_free, now), (&largest, None)];
    let mut result = Err(UnplaceableReason::NoGrid { tp: grid.tp, pp: grid.pp });
    for (preferred, now) in attempts {
        result = planner.plan_on(&machine_of_each_rank(preferred, grid, now));
        if result.is_ok() {
            break;
        }
    }
    result
}

fn check(
    machines: &[&Machine],
    measure: &PartMeasurer,
    policy: &PlacementPolicy,
    grid: Grid,
) -> Result<(), UnplaceableReason> {
    let Grid { tp, pp } = grid;
    if tp == 0 || pp == 0 {
        return Err(UnplaceableReason::NoGrid { tp, pp });
    }
    let (n_layers, n_leaves) = (measure.shape.n_layers, measure.n_leaves());
    if u32::from(tp) > n_leaves {
        return Err(UnplaceableReason::Heads { tp, n_leaves });
    }
    if u32::from(pp) > n_layers {
        return Err(UnplaceableReason::Layers { pp, n_layers });
    }
    let n_stages = measure.shape.cuts().n() + 1;
    if u32::from(pp) > n_stages {
        return Err(UnplaceableReason::Joined { pp, n_stages });
    }
    if pp > STAGES_MAX {
        return Err(UnplaceableReason::Stages { pp });
    }
    let (needed, there) = (usize::from(tp) * usize::from(pp), machines.len());
    if there < needed {
        return Err(UnplaceableReason::TooFew { tp, pp, needed, there });
    }
    let (requested, model) = (policy.context.unwrap_or(measure.shape.context), measure.shape.context);
    if requested > model {
        return Err(UnplaceableReason::Context { requested, model });
    }
    Ok(())
}

/// The machines that hold a rank now, then those with the most memory; equal ones in the order in which they joined.
fn largest<'a>(machines: &[&'a Machine], n: usize, now: Option<&Blueprint>) -> Vec<&'a Machine> {
    let holds =
        |machine: &Machine| now.is_some_and(|now| now.shards.iter().any(|shard| shard.worker == machine.worker));
    let mut sorted = machines.to_vec();
    sorted.sort_by_key(|machine| (!holds(machine), std::cmp::Reverse(machine.memory_bytes)));
    sorted.truncate(n);
    sorted
}

struct Planner<'a> {
    measure: PartMeasurer<'a>,
    policy: &'a PlacementPolicy,
    grid: Grid,
}

impl Planner<'_> {
    fn shape(&self) -> &ModelShape {
        self.measure.shape
    }

    fn rule(&self) -> KvRule {
        match (self.policy.kv_memory, self.policy.memory_permille, self.measure.class) {
            (Some(bytes), _, _) => KvRule::Reserved(bytes),
            (None, Some(permille), _) => KvRule::Within(permille),
            (None, None, DeviceClass::Cuda) => KvRule::Rest,
            (None, None, DeviceClass::Cpu | DeviceClass::Sim) => KvRule::Quarter,
        }
    }

    fn requested_context(&self) -> u32 {
        self.policy.context.unwrap_or(self.shape().context)
    }

    fn pools(&self, context: u32) -> PoolSizing<'_> {
        let PlacementPolicy { slice_max, running_max, .. } = *self.policy;
        let states = self.kept_states();
        PoolSizing { groups: self.shape().cache.groups(), context, slice_max: slice_max.max(1), running_max, states }
    }

    fn kept_states(&self) -> StateCacheSize {
        let blocks = self.measure.stage(0, 1, 0..self.shape().n_layers).block_bytes;
        let groups = || self.shape().cache.groups().iter().zip(&blocks);
        let state_bytes = groups().filter(|(group, _)| group.is_state()).map(|(_, bytes)| bytes).sum();
        let full_bytes = groups().filter(|(group, _)| group.keeps_all()).map(|(_, bytes)| bytes).sum();
        let n_ranks = u64::from(self.grid.n_ranks());
        let given = self.policy.state_cache.map(|bytes| bytes.saturating_mul(n_ranks));
        StateCacheSize::of(given, state_bytes, full_bytes)
    }

    /// The pool size that all running sequences could fill, or by default a few contexts.
    fn n_blocks_target(&self, pools: &PoolSizing) -> u64 {
        match self.rule() {
            KvRule::Reserved(_) | KvRule::Rest | KvRule::Within(_) => pools.max(),
            KvRule::Quarter => pools.by_default(),
        }
    }

    /// Machines that have room for an even part and a context beside it come first.
    fn large_enough_first<'a>(&self, machines: &[&'a Machine]) -> Vec<&'a Machine> {
        let whole = self.measure.stage(0, 1, 0..self.shape().n_layers);
        let n_ranks = u64::from(self.grid.n_ranks());
        let pools = self.pools(self.policy.context.unwrap_or(BLOCK_TOKENS));
        let kv = self.policy.kv_memory.unwrap_or(pools.bytes(pools.min(), &whole.block_bytes) / n_ranks);
        let needed = (whole.weights / n_ranks).saturating_add(kv);
        let (mut large, small): (Vec<_>, Vec<_>) =
            machines.iter().partition(|machine| self.rule().usable(machine.memory_bytes) >= needed);
        large.extend(small);
        large
    }

    fn plan_on(&self, machines: &[&Machine]) -> Result<Blueprint, UnplaceableReason> {
        let capacities = capacities(machines);
        let (measure, rule, tp) = (&self.measure, self.rule(), self.grid.tp);
        let pools = self.pools(self.requested_context());
        let cutter = StageCutter { measure, pools: &pools, machines: &capacities, tp, rule, minds_memory: true };
        if let Some(layout) = cutter.layout(pools.min(), self.n_blocks_target(&pools)) {
            return self.build_blueprint(machines, layout);
        }
        // The search uses fractions that fit, and a cut falls on leaves: the cut by speed alone may fit where the
        // search within the memory finds nothing.
        let by_speed = StageCutter { minds_memory: false, ..cutter };
        match by_speed.layout(0, 0).filter(|layout| self.weights_fit(machines, layout)) {
            Some(layout) => self.build_blueprint(machines, layout),
            None => Err(self.too_heavy(machines, &by_speed)),
        }
    }

    /// Whether each machine has room for the weights of its rank.
    fn weights_fit(&self, machines: &[&Machine], layout: &Layout) -> bool {
        let holdings = self.holdings(layout);
        let mut ranks = machines.iter().zip(&holdings);
        ranks.all(|(machine, held)| self.rule().budget(machine.memory_bytes, held.weights).is_some())
    }

    /// The blueprint of a layout whose weights fit.
    fn build_blueprint(&self, machines: &[&Machine], layout: Layout) -> Result<Blueprint, UnplaceableReason> {
        let holdings = self.holdings(&layout);
        let budgets: Vec<u64> =
            machines.iter().zip(&holdings).map(|(machine, held)| self.budget(machine, held)).collect();
        let fits = |pools: &PoolSizing, size: u64| {
            let mut ranks = holdings.iter().zip(&budgets);
            ranks.all(|(held, budget)| pools.fit(size, &held.block_bytes, *budget))
        };
        let shortened = self.shorten_context(&holdings, &budgets, |pools| fits(pools, pools.min()))?;
        let context = shortened.as_ref().map_or(self.requested_context(), |shortened| shortened.has);
        let pools = self.pools(context);
        let size =
            last_that(pools.min(), self.n_blocks_target(&pools), |size| fits(&pools, size)).unwrap_or(pools.min());
        let of_group = |(group, n_blocks): (&CacheGroup, u64)| PoolSize { group: *group, n_blocks: n_blocks as u32 };
        let sized: Vec<PoolSize> = pools.groups.iter().zip(pools.at(size)).map(of_group).collect();
        let shard = |(i, held): (usize, &PartSizes)| {
            let rank = Rank(i as u16);
            Shard {
                rank,
                place: self.grid.place(rank),
                worker: machines[i].worker,
                host: machines[i].host.clone(),
                layers: layout.part(rank).layers,
                heads: held.heads.clone(),
                kv_heads: held.kv_heads.clone(),
                weight_bytes: held.weights,
                kv_bytes: pools.bytes(size, &held.block_bytes),
                kv_tokens: self.kv_tokens(&sized, &layout.part(rank).layers),
            }
        };
        let shards = holdings.iter().enumerate().map(shard).collect();
        Ok(Blueprint { grid: self.grid, layout, context, shortened, pools: sized, shards })
    }

    fn holdings(&self, layout: &Layout) -> Vec<PartSizes> {
        (0..self.grid.n_ranks()).map(|rank| self.measure.part(&layout.part(Rank(rank)))).collect()
    }

    fn budget(&self, machine: &Machine, held: &PartSizes) -> u64 {
        self.rule().budget(machine.memory_bytes, held.weights).unwrap_or(0)
    }

    fn kv_tokens(&self, pools: &[PoolSize], layers: &Range<u32>) -> Vec<u64> {
        let n_layers = self.shape().cache.n_layers(layers);
        pools.iter().zip(n_layers).map(|(pool, n_layers)| if n_layers > 0 { pool.n_tokens() } else { 0 }).collect()
    }

    /// A requested context is granted or refused; otherwise it is the model's, as far as the memory holds it.
    fn shorten_context(
        &self,
        holdings: &[PartSizes],
        budgets: &[u64],
        fits: impl Fn(&PoolSizing) -> bool,
    ) -> Result<Option<ShortenedContext>, UnplaceableReason> {
        let requested = self.requested_context();
        if fits(&self.pools(requested)) {
            return Ok(None);
        }
        let why = self.too_little_kv(requested, holdings, budgets);
        let in_blocks = |n_blocks: u64| self.pools(n_blocks as u32 * BLOCK_TOKENS);
        let n_blocks = last_that(1, u64::from(requested / BLOCK_TOKENS), |n_blocks| fits(&in_blocks(n_blocks)));
        match (self.policy.context, n_blocks) {
            (None, Some(n_blocks)) => Ok(Some(ShortenedContext { requested, has: in_blocks(n_blocks).context, why })),
            _ => Err(why),
        }
    }

    /// Why this context does not fit, shown for the rank that lacks the most.
    fn too_little_kv(&self, requested: u32, holdings: &[PartSizes], budgets: &[u64]) -> UnplaceableReason {
        let pools = self.pools(requested);
        let needed = |rank: usize| pools.bytes(pools.min(), &holdings[rank].block_bytes);
        let lacks = |rank: &usize| i128::from(needed(*rank)) - i128::from(budgets[*rank]);
        let rank = (0..budgets.len()).max_by_key(lacks).unwrap_or(0);
        let (block_bytes, available) = (holdings[rank].block_bytes.iter().sum(), budgets[rank]);
        UnplaceableReason::Kv { rank: rank as u16, context: requested, block_bytes, needed: needed(rank), available }
    }

    /// Why the weights do not fit: shown on the cut by speed alone, for the rank that lacks the most.
    fn too_heavy(&self, machines: &[&Machine], endless: &StageCutter) -> UnplaceableReason {
        let Some(layout) = endless.layout(0, 0) else {
            return UnplaceableReason::NoGrid { tp: self.grid.tp, pp: self.grid.pp };
        };
        let holdings = self.holdings(&layout);
        let reserved = self.policy.kv_memory.unwrap_or(0);
        let usable = |machine: &Machine| self.rule().usable(machine.memory_bytes);
        let lacks = |rank: &usize| {
            let needed = holdings[*rank].weights.saturating_add(reserved);
            i128::from(needed) - i128::from(usable(machines[*rank]))
        };
        let rank = (0..holdings.len()).max_by_key(lacks).unwrap_or(0);
        let (host, available) = (machines[rank].host.clone(), usable(machines[rank]));
        let weights = holdings[rank].weights;
        match available.checked_sub(weights) {
            Some(beside) => {
                UnplaceableReason::KvMemory { rank: rank as u16, host, weights, needed: reserved, available: beside }
            }
            None => UnplaceableReason::Weights {
                rank: rank as u16,
                host,
                needed: weights,
                available,
                all_needed: holdings.iter().map(|held| held.weights).sum(),
                all_available: machines.iter().map(|machine| usable(machine)).sum(),
            },
        }
    }
}

/// Machines that differ by less than this count as equal, and get equal parts.
const SPEEDS_ALIKE: (u64, u64) = (5, 4);

fn capacities(machines: &[&Machine]) -> Vec<Capacity> {
    let speeds: Vec<u64> = speeds(machines);
    let (slowest, fastest) = (speeds.iter().min().copied().unwrap_or(1), speeds.iter().max().copied().unwrap_or(1));
    let are_alike = fastest.saturating_mul(SPEEDS_ALIKE.1) <= slowest.saturating_mul(SPEEDS_ALIKE.0);
    let capacity = |(machine, speed): (&&Machine, &u64)| Capacity {
        memory: machine.memory_bytes,
        speed: if are_alike { slowest } else { *speed },
    };
    machines.iter().zip(&speeds).map(capacity).collect()
}
