//! Where a model is cut for machines that have their ranks already: layers among stages, shares among the ranks of a
//! stage.
//!
//! The slowest stage sets the pace, so the cut makes it as fast as possible; but first it makes room. Pools of block
//! ids are as large as the smallest rank holds, so a rank that is short of memory gives up layers or shares until the
//! pools are large enough. Their size is a number of blocks on the scale of `PoolSizing`.

use super::pools::PoolSizing;
use super::shape::{PartMeasurer, PartSizes};
use std::ops::Range;
use types::{GridPlace, Layout, RankPart, Shares, Stage};

/// A machine as the cut sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub memory: u64,
    /// Bytes that it reads in a second, or any other figure in proportion.
    pub speed: u64,
}

/// How much memory a rank's KV may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvRule {
    /// Reserves these bytes of every rank, which weights may not use.
    Reserved(u64),
    /// All that the weights leave, at most a quarter of the machine's memory.
    Quarter,
    /// All that the weights leave of a device's own memory, less a tenth for workspace.
    Rest,
    /// All that the weights leave of so many thousandths of the memory.
    Within(u16),
}

impl KvRule {
    /// Returns the part of a memory for weights and KV together.
    pub fn usable(self, memory: u64) -> u64 {
        match self {
            KvRule::Within(permille) => (u128::from(memory) * u128::from(permille) / 1000) as u64,
            KvRule::Reserved(_) | KvRule::Quarter | KvRule::Rest => memory,
        }
    }

    /// KV bytes of a rank with these weights; None if the weights do not fit.
    pub fn budget(self, memory: u64, weights: u64) -> Option<u64> {
        match self {
            KvRule::Reserved(kv) => (weights.checked_add(kv)? <= memory).then_some(kv),
            KvRule::Quarter => Some(memory.checked_sub(weights)?.min(memory / 4)),
            KvRule::Rest => Some(memory.checked_sub(weights)? / 10 * 9),
            KvRule::Within(_) => self.usable(memory).checked_sub(weights),
        }
    }

    fn holds(self, memory: u64, holding: &PartSizes, kv: u64) -> bool {
        self.budget(memory, holding.weights).is_some_and(|budget| kv <= budget)
    }

    /// The largest part of a stage that fits a rank. `kv` is what the whole stage needs.
    fn portion_max(self, memory: u64, stage: &PartSizes, kv: u64) -> f64 {
        let sharded = (stage.weights - stage.replicated) as f64;
        let kv = kv as f64;
        let room = |bytes: u64, needed: f64| if needed > 0.0 { bytes as f64 / needed } else { f64::INFINITY };
        let beside = |taken: u64| memory.checked_sub(taken).and_then(|left| left.checked_sub(stage.replicated));
        match self {
            KvRule::Reserved(budget) => beside(budget).map_or(-1.0, |left| room(left, sharded).min(room(budget, kv))),
            KvRule::Quarter => beside(0).map_or(-1.0, |left| room(left, sharded + kv).min(room(memory / 4, kv))),
            KvRule::Rest => beside(0).map_or(-1.0, |left| room(left, sharded + kv / 0.9)),
            KvRule::Within(_) => {
                let left = self.usable(memory).checked_sub(stage.replicated);
                left.map_or(-1.0, |left| room(left, sharded + kv))
            }
        }
    }
}

pub(crate) struct StageCutter<'a> {
    pub measure: &'a PartMeasurer<'a>,
    pub pools: &'a PoolSizing<'a>,
    /// One entry per rank.
    pub machines: &'a [Capacity],
    pub tp: u16,
    pub rule: KvRule,
    /// False: cuts as if memory were endless.
    pub minds_memory: bool,
}

/// One stage's ranks, and how long the slowest of them takes.
struct StageAssignment {
    shares: Shares,
    time: f64,
}

/// A tenth of the possible pool is given up for speed.
const POOL_KEPT: (u64, u64) = (9, 10);
/// For each rank of a stage, how many deals are tried until no rank has more than fits.
const DEALS_TRIED_PER_RANK: usize = 12;
/// Halvings of the pace: more than a float's precision needs.
const PACE_HALVINGS: u32 = 48;

impl StageCutter<'_> {
    fn pp(&self) -> u16 {
        (self.machines.len() / usize::from(self.tp)) as u16
    }

    /// The fastest layout with a pool of `n_blocks_target`, or nearly the largest possible, but at least of
    /// `n_blocks_min` if that is possible. None: the weights alone do not fit.
    pub fn layout(&self, n_blocks_min: u64, n_blocks_target: u64) -> Option<Layout> {
        let n_blocks = self.pool(n_blocks_min, n_blocks_target)?;
        let mut pace = self.slowest(&self.ends(f64::INFINITY, n_blocks)?, n_blocks)?;
        let mut too_fast = 0.0;
        for _ in 0..PACE_HALVINGS {
            let middle = f64::midpoint(too_fast, pace);
            match self.ends(middle, n_blocks) {
                Some(_) => pace = middle,
                None => too_fast = middle,
            }
        }
        let ends = self.even_ends(pace, n_blocks).or_else(|| self.ends(f64::INFINITY, n_blocks))?;
        self.build(&ends, n_blocks)
    }

    fn pool(&self, n_blocks_min: u64, n_blocks_target: u64) -> Option<u64> {
        let fits = |n_blocks| self.ends(f64::INFINITY, n_blocks).is_some();
        if fits(n_blocks_target) {
            return Some(n_blocks_target);
        }
        if !fits(0) {
            return None;
        }
        let (mut held, mut too_many) = (0, n_blocks_target);
        while held + 1 < too_many {
            let middle = held.midpoint(too_many);
            if fits(middle) {
                held = middle;
            } else {
                too_many = middle;
            }
        }
        Some((held * POOL_KEPT.0 / POOL_KEPT.1).max(n_blocks_min.min(held)))
    }

    /// Returns the ends of the stages when each in turn takes as many layers as it can at this pace.
    fn ends(&self, pace: f64, n_blocks: u64) -> Option<Vec<u32>> {
        let mut ends = Vec::new();
        let mut start = 0;
        for stage in 0..self.pp() {
            start = self.reach(stage, start, pace, n_blocks)?;
            ends.push(start);
        }
        Some(ends)
    }

    /// The furthest end of a stage that starts here. Leaves a layer for each later stage; the last must end the model.
    fn reach(&self, stage: u16, start: u32, pace: f64, n_blocks: u64) -> Option<u32> {
        let n_layers = self.measure.shape.n_layers;
        let can = |end| self.assign_stage(stage, start..end, n_blocks).is_some_and(|dealt| dealt.time <= pace);
        if stage + 1 == self.pp() {
            return can(n_layers).then_some(n_layers);
        }
        let cuts = self.measure.shape.cuts();
        let end_max = cuts.at(cuts.n() - u32::from(self.pp() - 1 - stage));
        let end = cuts.last_to(last_layer_that(start + 1, end_max, can)?);
        (end > start).then_some(end)
    }

    /// The same pace with the work spread: each stage ends as near to its proportional part as the others allow.
    fn even_ends(&self, pace: f64, n_blocks: u64) -> Option<Vec<u32>> {
        let starts = self.earliest_starts(pace, n_blocks)?;
        let mut ends = Vec::new();
        let mut start = 0;
        for stage in 0..self.pp() - 1 {
            let end_max = self.reach(stage, start, pace, n_blocks)?;
            let end_min = starts[usize::from(stage) + 1].max(start + 1);
            let due = self.due_end(stage).clamp(end_min.min(end_max), end_max);
            let before = self.measure.shape.cuts().last_to(due);
            start =
                if before > start && before >= end_min { before } else { self.measure.shape.cuts().first_from(due) };
            ends.push(start);
        }
        ends.push(self.reach(self.pp() - 1, start, pace, n_blocks)?);
        Some(ends)
    }

    /// The earliest layer at which each stage may start so that the later ones can finish.
    fn earliest_starts(&self, pace: f64, n_blocks: u64) -> Option<Vec<u32>> {
        let mut starts = vec![0; usize::from(self.pp())];
        let mut end = self.measure.shape.n_layers;
        for stage in (1..self.pp()).rev() {
            let can =
                |back: u32| self.assign_stage(stage, end - back..end, n_blocks).is_some_and(|dealt| dealt.time <= pace);
            let cuts = self.measure.shape.cuts();
            let start_min = cuts.at(u32::from(stage) - 1);
            let start = cuts.first_from(end - last_layer_that(1, end.checked_sub(start_min)?, can)?);
            if start >= end {
                return None;
            }
            end = start;
            starts[usize::from(stage)] = end;
        }
        Some(starts)
    }

    /// Returns the end of a stage if work is divided by speed alone.
    fn due_end(&self, stage: u16) -> u32 {
        let n_layers = self.measure.shape.n_layers;
        let read_by = |end: u32| match end {
            0 => 0,
            end => self.measure.stage(0, 1 + u16::from(end < n_layers), 0..end).read,
        };
        let speed = |machines: &[Capacity]| machines.iter().map(|machine| machine.speed as f64).sum::<f64>();
        let n_ranks = (usize::from(stage) + 1) * usize::from(self.tp);
        let due = read_by(n_layers) as f64 * speed(&self.machines[..n_ranks]) / speed(self.machines);
        let off = |end: u32| (read_by(end) as f64 - due).abs();
        (1..=n_layers).min_by(|a, b| off(*a).total_cmp(&off(*b))).unwrap_or(n_layers)
    }

    fn slowest(&self, ends: &[u32], n_blocks: u64) -> Option<f64> {
        let times = stage_ranges(ends)
            .enumerate()
            .map(|(i, run)| self.assign_stage(i as u16, run, n_blocks).map(|dealt| dealt.time));
        times.collect::<Option<Vec<f64>>>().map(|times| times.into_iter().fold(0.0, f64::max))
    }

    fn build(&self, ends: &[u32], n_blocks: u64) -> Option<Layout> {
        let stage = |(i, layers): (usize, Range<u32>)| {
            let shares = self.assign_stage(i as u16, layers.clone(), n_blocks)?.shares;
            Some(Stage { layers, shares })
        };
        Layout::new(stage_ranges(ends).enumerate().map(stage).collect::<Option<_>>()?).ok()
    }

    /// Divides a stage among its ranks: by speed, and no more to any than fits.
    fn assign_stage(&self, stage: u16, layers: Range<u32>, n_blocks: u64) -> Option<StageAssignment> {
        let tp = usize::from(self.tp);
        let machines = &self.machines[usize::from(stage) * tp..][..tp];
        let whole = self.measure.stage(stage, self.pp(), layers.clone());
        let kv = |holding: &PartSizes| self.pools.bytes(n_blocks, &holding.block_bytes);
        let mut rooms: Vec<f64> = match self.minds_memory {
            true => machines.iter().map(|machine| self.rule.portion_max(machine.memory, &whole, kv(&whole))).collect(),
            false => vec![f64::INFINITY; tp],
        };
        // A cut falls on a leaf, which may be more than fits: then that rank's part is reduced a little.
        for _ in 0..DEALS_TRIED_PER_RANK * tp {
            let parts = portions(machines, &rooms, self.measure.n_leaves())?;
            let shares = shares(&parts);
            let holdings = self.holdings(stage, &layers, &shares);
            let is_over = |tp: &usize| !self.rule.holds(machines[*tp].memory, &holdings[*tp], kv(&holdings[*tp]));
            let Some(over) = (0..tp).find(is_over).filter(|_| self.minds_memory) else {
                let times =
                    holdings.iter().zip(machines).map(|(held, machine)| held.read as f64 / machine.speed.max(1) as f64);
                return Some(StageAssignment { shares, time: times.fold(0.0, f64::max) });
            };
            rooms[over] = parts[over] - 0.25 / f64::from(self.measure.n_leaves());
        }
        None
    }

    fn holdings(&self, stage: u16, layers: &Range<u32>, shares: &Shares) -> Vec<PartSizes> {
        let part = |tp| {
            let place = GridPlace { stage, tp };
            RankPart { place, layers: layers.clone(), shares: shares.clone(), n_stages: self.pp() }
        };
        (0..self.tp).map(|tp| self.measure.part(&part(tp))).collect()
    }
}

fn last_layer_that(first: u32, last: u32, can: impl Fn(u32) -> bool) -> Option<u32> {
    last_that(first.into(), last.into(), |layer| can(layer as u32)).map(|layer| layer as u32)
}

fn stage_ranges(ends: &[u32]) -> impl Iterator<Item = Range<u32>> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(ends).map(|(start, end)| start..*end)
}

/// Parts of one, in proportion to speed, each at least a leaf and no more than fits.
fn portions(machines: &[Capacity], rooms: &[f64], n_leaves: u32) -> Option<Vec<f64>> {
    // A little more than a leaf, so that rounding to the scale of shares loses none.
    let floor = (1.0 / f64::from(n_leaves) + 1e-6).min(1.0 / machines.len() as f64);
    if rooms.iter().any(|room| *room < floor - 1e-9) {
        return None;
    }
    let mut parts = divide_by_speed(machines, floor);
    let mut is_full = vec![false; machines.len()];
    for _ in 0..machines.len() {
        let over = |i: &usize| !is_full[*i] && parts[*i] > rooms[*i] + 1e-12;
        let newly_full: Vec<usize> = (0..machines.len()).filter(over).collect();
        if newly_full.is_empty() {
            break;
        }
        for i in newly_full {
            (parts[i], is_full[i]) = (rooms[i], true);
        }
        let sum =
            |full_parts: bool| (0..parts.len()).filter(|i| is_full[*i] == full_parts).map(|i| parts[i]).sum::<f64>();
        let (full, rest) = (sum(true), sum(false));
        let scale = (1.0 - full) / rest;
        (0..parts.len()).filter(|i| !is_full[*i]).for_each(|i| parts[i] *= scale);
    }
    let fits = parts.iter().zip(rooms).all(|(part, room)| *part <= room + 1e-9);
    (fits && (parts.iter().sum::<f64>() - 1.0).abs() < 1e-9).then_some(parts)
}

/// Divides in proportion to speed; a rank below the floor gets the floor, at the cost of those above.
fn divide_by_speed(machines: &[Capacity], floor: f64) -> Vec<f64> {
    let mut is_floored = vec![false; machines.len()];
    loop {
        let left = 1.0 - floor * is_floored.iter().filter(|floored| **floored).count() as f64;
        let free = machines.iter().zip(&is_floored).filter(|(_, floored)| !**floored);
        let speed: f64 = free.map(|(machine, _)| machine.speed.max(1) as f64).sum();
        let part = |i: usize| match is_floored[i] {
            true => floor,
            false => left * machines[i].speed.max(1) as f64 / speed,
        };
        let parts: Vec<f64> = (0..machines.len()).map(part).collect();
        let Some(low) = (0..machines.len()).find(|i| !is_floored[*i] && parts[*i] < floor - 1e-12) else {
            return parts;
        };
        is_floored[low] = true;
    }
}

fn shares(parts: &[f64]) -> Shares {
    let n = parts.len() as u16;
    if parts.iter().all(|part| (part - parts[0]).abs() < 1e-9) {
        return Shares::even(n);
    }
    let mut bounds = vec![0];
    let mut sum = 0.0;
    for part in &parts[..parts.len() - 1] {
        sum += part;
        bounds.push(((sum * f64::from(Shares::WHOLE)).round() as u32).min(Shares::WHOLE));
    }
    bounds.push(Shares::WHOLE);
    Shares::new(bounds).unwrap_or_else(|_| Shares::even(n))
}

/// The last value of `first..=last` up to which `can` holds for all.
pub(super) fn last_that(first: u64, last: u64, can: impl Fn(u64) -> bool) -> Option<u64> {
    if first > last || !can(first) {
        return None;
    }
    let (mut good, mut bad) = (first, last + 1);
    while good + 1 < bad {
        let middle = good.midpoint(bad);
        if can(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Some(good)
}
