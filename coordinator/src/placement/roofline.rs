//! How long a step takes, from what it reads, computes and exchanges, on ranks with a few known figures. `plan`
//! predicts one sequence with it, and `simulate` models many. Knows shapes, layouts and speeds; no names of devices, no
//! queue.
//!
//! A stage is as slow as its slowest rank. A rank multiplies with its weights (as slow as reading them or computing,
//! whichever is slower), attends (likewise with K and V), and exchanges with its stage: two sums a layer.

use super::shape::{PartMeasurer, PartSizes};
use super::{Blueprint, ModelShape, PlacementPolicy};
use std::ops::Range;
use types::{BLOCK_TOKENS, CacheGroup, DeviceClass, RankPart};

/// The speed that a rank's device achieves, in contrast to its maker's figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    pub bytes_per_s: f64,
    /// Operations in products with weights; a multiply-add counts as two.
    pub flops: f64,
    /// Operations in attention, whose operands are activations.
    pub attention_flops: f64,
}

/// The link from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub latency_micros: f64,
    pub bytes_per_s: f64,
}

impl Link {
    fn micros(&self, n_bytes: f64) -> f64 {
        self.latency_micros + n_bytes / self.bytes_per_s * 1e6
    }
}

/// The links of a stage's ranks: among each other, and to the next stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    pub within: Link,
    pub onward: Link,
}

/// Rows between ranks are f32, as sums are accumulated.
const EXCHANGED_BYTES: f64 = 4.0;

/// The work of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    n_rows: u64,
    n_draws: u64,
    /// One entry per cache group.
    attention: Vec<AttentionWork>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AttentionWork {
    /// Positions whose K and V are read; each slice counts its own.
    n_read: u64,
    /// Pairs of a query and a position that it attends to.
    n_pairs: u64,
}

impl StepWork {
    /// One row that attends to nothing and draws a token.
    pub fn one_row() -> StepWork {
        StepWork { n_rows: 1, n_draws: 1, attention: Vec::new() }
    }

    pub fn clear(&mut self) {
        (self.n_rows, self.n_draws) = (0, 0);
        self.attention.clear();
    }

    /// Adds a slice of a sequence, whose last row may draw a token.
    pub fn add(&mut self, groups: &[CacheGroup], range: &Range<u32>, draws: bool) {
        self.n_rows += u64::from(range.end - range.start);
        self.n_draws += u64::from(draws);
        self.attention.resize(groups.len(), AttentionWork::default());
        for (group, attention) in groups.iter().zip(&mut self.attention) {
            // A query attends to its own position and those before it, at most a window of them.
            let window = u64::from(group_window(*group));
            // Of a recurrence, the page that the slice goes on from.
            let n_state = group.is_state().then_some(BLOCK_TOKENS);
            attention.n_read += u64::from(n_state.unwrap_or(range.end - group.first_read(range.start)));
            attention.n_pairs += pairs(range.end.into(), window) - pairs(range.start.into(), window);
        }
    }
}

fn group_window(group: CacheGroup) -> u32 {
    group.layout.window().unwrap_or(u32::MAX)
}

/// The pairs of the first `n` queries of a sequence.
fn pairs(n: u64, window: u64) -> u64 {
    match n <= window {
        true => n * (n + 1) / 2,
        false => window * (window + 1) / 2 + (n - window) * window,
    }
}

/// The time of a step in one stage, in microseconds; and the bytes and operations of all its ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// The slowest rank's times: reading, computing, and both as they overlap.
    pub memory: f64,
    pub compute: f64,
    pub work: f64,
    pub exchange: f64,
    pub bytes_read: f64,
    pub operations: f64,
}

impl StageTime {
    pub fn micros(&self) -> f64 {
        self.work + self.exchange
    }
}

/// The cost model of one replica's layout.
#[derive(Clone, Debug)]
pub struct Roofline {
    stages: Vec<StageCosts>,
    hidden: f64,
    vocab: f64,
    /// The fraction of the experts that one row uses; one if there are no experts.
    expert_part: f64,
}

#[derive(Clone, Debug)]
struct StageCosts {
    ranks: Vec<RankCosts>,
    n_layers: f64,
    links: Links,
    is_first: bool,
    is_last: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct RankCosts {
    speed: Speed,
    /// Bytes read for any row, bytes read only for rows that draw, and bytes of its experts.
    dense: f64,
    head: f64,
    experts: f64,
    /// Operations of a row, and the additional ones of a row that draws.
    row: f64,
    draw: f64,
    /// For each cache group, bytes of a position and operations of a pair.
    position: Vec<f64>,
    pair: Vec<f64>,
}

impl Roofline {
    /// `speeds` has an entry per rank, `links` per stage.
    pub fn new(
        shape: &ModelShape,
        class: DeviceClass,
        policy: &PlacementPolicy,
        blueprint: &Blueprint,
        (speeds, links): (&[Speed], &[Links]),
    ) -> Roofline {
        let measure = PartMeasurer::new(shape, class, policy.kv_dtype);
        let operations = OperationsPerByte::of(&measure);
        let tp = usize::from(blueprint.grid.tp);
        let n_stages = blueprint.layout.stages().len();
        let stage = |(i, shards): (usize, &[super::Shard])| StageCosts {
            ranks: shards
                .iter()
                .map(|shard| operations.rank(&blueprint.layout.part(shard.rank), speeds[usize::from(shard.rank.0)]))
                .collect(),
            n_layers: shards[0].layers.len() as f64,
            links: links[i],
            is_first: i == 0,
            is_last: i + 1 == n_stages,
        };
        Roofline {
            stages: blueprint.shards.chunks(tp).enumerate().map(stage).collect(),
            hidden: shape.hidden.into(),
            vocab: shape.vocab.into(),
            expert_part: expert_part(shape),
        }
    }

    pub fn n_stages(&self) -> usize {
        self.stages.len()
    }

    pub fn stage(&self, stage: usize, work: &StepWork) -> StageTime {
        let stage = &self.stages[stage];
        // Experts that no row of the step uses are not read.
        let experts_read = 1.0 - power(1.0 - self.expert_part, work.n_rows);
        let mut took = StageTime { exchange: self.exchange(stage, work), ..StageTime::default() };
        for rank in &stage.ranks {
            let here = rank.took(work, experts_read);
            let is_slower = here.work > took.work;
            (took.bytes_read, took.operations) = (took.bytes_read + here.bytes_read, took.operations + here.operations);
            if is_slower {
                (took.memory, took.compute, took.work) = (here.memory, here.compute, here.work);
            }
        }
        took
    }

    /// Sums are cut by columns: each rank finishes its own and sends them to all. So are rows of the embedding, once,
    /// and logits go to the rank that draws. Every rank sends its rows on to the next stage.
    fn exchange(&self, stage: &StageCosts, work: &StepWork) -> f64 {
        let Links { within, onward } = &stage.links;
        let (tp, n_rows) = (stage.ranks.len() as f64, work.n_rows as f64);
        let row = n_rows * self.hidden * EXCHANGED_BYTES;
        let others = (tp - 1.0) / tp;
        let mut micros = 0.0;
        if tp > 1.0 {
            micros += 2.0 * stage.n_layers * within.micros(2.0 * others * row);
            if stage.is_first {
                micros += within.micros(others * row);
            }
            if stage.is_last {
                micros += within.micros(others * work.n_draws as f64 * self.vocab * EXCHANGED_BYTES);
            }
        }
        if self.stages.len() > 1 {
            // The last stage sends only tokens to the first.
            micros += onward.micros(if stage.is_last { 0.0 } else { row });
        }
        micros
    }

    /// Through all stages in turn.
    pub fn step(&self, work: &StepWork) -> StageTime {
        (0..self.n_stages()).map(|stage| self.stage(stage, work)).fold(StageTime::default(), |a, b| StageTime {
            memory: a.memory + b.memory,
            compute: a.compute + b.compute,
            work: a.work + b.work,
            exchange: a.exchange + b.exchange,
            bytes_read: a.bytes_read + b.bytes_read,
            operations: a.operations + b.operations,
        })
    }
}

impl RankCosts {
    fn took(&self, work: &StepWork, experts_read: f64) -> StageTime {
        let head = if work.n_draws > 0 { self.head } else { 0.0 };
        let weights = self.dense + head + self.experts * experts_read;
        let operations = self.row * work.n_rows as f64 + self.draw * work.n_draws as f64;
        let groups = || work.attention.iter().zip(self.position.iter().zip(&self.pair));
        let cache: f64 = groups().map(|(attention, (position, _))| attention.n_read as f64 * position).sum();
        let attending: f64 = groups().map(|(attention, (_, pair))| attention.n_pairs as f64 * pair).sum();
        let micros = |amount: f64, speed: f64| amount / speed * 1e6;
        let Speed { bytes_per_s, flops, attention_flops } = self.speed;
        let (reading, computing) = (micros(weights, bytes_per_s), micros(operations, flops));
        let (looking_back, matching) = (micros(cache, bytes_per_s), micros(attending, attention_flops));
        StageTime {
            memory: reading + looking_back,
            compute: computing + matching,
            work: reading.max(computing) + looking_back.max(matching),
            exchange: 0.0,
            bytes_read: weights + cache,
            operations: operations + attending,
        }
    }
}

/// The operations per byte of weights: each weight is used once per row, whatever its format.
struct OperationsPerByte<'a> {
    measure: &'a PartMeasurer<'a>,
    per_byte: f64,
    per_head_byte: f64,
    expert_part: f64,
}

impl OperationsPerByte<'_> {
    fn of<'a>(measure: &'a PartMeasurer<'a>) -> OperationsPerByte<'a> {
        let shape = measure.shape;
        let of = |a: u32, b: u32| 2.0 * f64::from(a) * f64::from(b);
        let attention = 2.0 * of((shape.n_heads + shape.n_kv_heads) * shape.head_dim, shape.hidden);
        let inner = shape.experts.map_or(shape.inner, |experts| experts.n_used * experts.inner);
        let layers = f64::from(shape.n_layers) * (attention + 3.0 * of(shape.hidden, inner));
        let whole = measure.stage(0, 1, 0..shape.n_layers);
        OperationsPerByte {
            measure,
            per_byte: layers / (whole.read - whole.head).max(1) as f64,
            per_head_byte: of(shape.vocab, shape.hidden) / measure.head_bytes().max(1) as f64,
            expert_part: expert_part(shape),
        }
    }

    fn rank(&self, part: &RankPart, speed: Speed) -> RankCosts {
        let shape = self.measure.shape;
        let PartSizes { read, experts, head, heads, block_bytes, .. } = self.measure.part(part);
        let dense = (read - head - self.measure.experts_read(experts)) as f64;
        let n_layers = shape.cache.n_layers(&part.layers);
        // For a pair and a head: the product of query and key, and a weighted value.
        let pair = 4.0 * heads.len() as f64 * f64::from(shape.head_dim);
        RankCosts {
            speed,
            dense,
            head: head as f64,
            experts: experts as f64,
            row: (dense + experts as f64 * self.expert_part) * self.per_byte,
            draw: head as f64 * self.per_head_byte,
            position: block_bytes.iter().map(|bytes| *bytes as f64 / f64::from(BLOCK_TOKENS)).collect(),
            pair: n_layers.map(|n_layers| n_layers as f64 * pair).collect(),
        }
    }
}

fn expert_part(shape: &ModelShape) -> f64 {
    shape.experts.map_or(1.0, |experts| f64::from(experts.n_used) / f64::from(experts.n.max(1)))
}

/// By squaring, so that every machine has the same bits.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(groups: &[CacheGroup], ranges: &[Range<u32>]) -> StepWork {
        let mut work = StepWork::default();
        ranges.iter().for_each(|range| work.add(groups, range, true));
        work
    }

    #[test]
    fn pairs_are_what_queries_see() {
        for window in [1, 3, 16, 17, u32::MAX] {
            let group = CacheGroup::FULL.with_window(window);
            for range in [0..1, 0..40, 7..9, 15..33, 39..40] {
                let seen = |at: u32| u64::from(at + 1 - group.first_read(at));
                let expected = range.clone().map(seen).sum::<u64>();
                assert_eq!(
                    work(&[group], std::slice::from_ref(&range)).attention[0].n_pairs,
                    expected,
                    "{window} {range:?}"
                );
            }
        }
        let full = work(&[CacheGroup::FULL], &[10..20, 5..6]);
        assert_eq!((full.n_rows, full.n_draws), (11, 2));
        assert_eq!(full.attention, [AttentionWork { n_read: 26, n_pairs: (11..=20).sum::<u64>() + 6 }]);
    }

    #[test]
    fn powers() {
        assert_eq!([0, 1, 2, 5, 10].map(|n| power(0.5, n)), [1.0, 0.5, 0.25, 0.031_25, 0.000_976_562_5]);
        assert_eq!(power(0.0, 3), 0.0);
    }
}
