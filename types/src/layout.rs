//! How a replica's layers, leaves and rows are divided among its ranks, as every rank has it. Knows nothing of
//! machines, bytes or the reasons for the cuts: placement decides, all other code reads the result here.
//!
//! ```text
//! stage 0  layers 0..15   shares 0 ── 8 Mi ── 16 Mi     rank 0 | rank 1
//! stage 1  layers 15..30  shares 0 ── 9 Mi ── 16 Mi     rank 2 | rank 3
//! ```
//! A share is a part of a scale, not a number of heads: the same cut falls among heads, leaves of an MLP, experts and
//! rows of the vocabulary wherever it falls, and all ranks compute it with one function.

use crate::topology::{Grid, GridPlace};
use crate::{Leaves, Rank, Unsupported};
use alloc::vec::Vec;
use core::ops::Range;

/// How the ranks of a stage divide anything that has units: rank i has the units between bounds i and i + 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    /// One more entry than there are ranks, ascending from 0 to `WHOLE`.
    bounds: Vec<u32>,
}

/// Consecutive layers, and the ranks that compute them together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub layers: Range<u32>,
    pub shares: Shares,
}

/// A replica's grid, laid over a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    stages: Vec<Stage>,
}

/// One rank's part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    pub place: GridPlace,
    pub layers: Range<u32>,
    pub shares: Shares,
    pub n_stages: u16,
}

impl Shares {
    /// Fine enough for any vocabulary.
    pub const WHOLE: u32 = 1 << 24;

    pub fn new(bounds: Vec<u32>) -> Result<Shares, Unsupported> {
        let ends = bounds.len() >= 2 && bounds[0] == 0 && bounds[bounds.len() - 1] == Shares::WHOLE;
        match ends && bounds.is_sorted() && u16::try_from(bounds.len()).is_ok() {
            true => Ok(Shares { bounds }),
            false => Err(Unsupported("shares that do not ascend from 0 to the whole")),
        }
    }

    /// Equal shares for each of `n` ranks, of which there is at least one.
    pub fn even(n: u16) -> Shares {
        let n = u32::from(n.max(1));
        Shares { bounds: (0..=n).map(|i| Shares::WHOLE / n * i + Shares::WHOLE % n * i / n).collect() }
    }

    pub fn bounds(&self) -> &[u32] {
        &self.bounds
    }

    pub fn n_ranks(&self) -> u16 {
        (self.bounds.len() - 1) as u16
    }

    /// The units of `n` that rank `tp` of the stage owns; an empty range if there are too few units for all.
    pub fn of(&self, tp: u16, n: u32) -> Range<u32> {
        let cut = |i: usize| {
            let scaled = u64::from(n) * u64::from(self.bounds[i]);
            // Rounds to the nearest, so that even shares of what divides evenly are even.
            ((scaled + u64::from(Shares::WHOLE) / 2) / u64::from(Shares::WHOLE)) as u32
        };
        cut(tp.into())..cut(usize::from(tp) + 1)
    }

    /// Which rank owns unit `i` of `n`.
    pub fn owner(&self, i: u32, n: u32) -> u16 {
        (0..self.n_ranks()).find(|tp| self.of(*tp, n).contains(&i)).unwrap_or(0)
    }
}

impl Layout {
    /// Takes stages of consecutive layers from layer 0 on, all with equally many ranks.
    pub fn new(stages: Vec<Stage>) -> Result<Layout, Unsupported> {
        let Some(first) = stages.first() else { return Err(Unsupported("a grid without stages")) };
        let n_ranks = first.shares.n_ranks();
        if stages.iter().any(|stage| stage.shares.n_ranks() != n_ranks) {
            return Err(Unsupported("stages of unequal numbers of ranks"));
        }
        let mut next = 0;
        for stage in &stages {
            if stage.layers.start != next || stage.layers.is_empty() {
                return Err(Unsupported("stages that do not follow each other, or have no layer"));
            }
            next = stage.layers.end;
        }
        match u32::from(n_ranks).checked_mul(stages.len() as u32).is_some_and(|n| n <= u32::from(u16::MAX)) {
            true => Ok(Layout { stages }),
            false => Err(Unsupported("a grid of more than 65535 ranks")),
        }
    }

    /// One rank with everything.
    pub fn solo(n_layers: u32) -> Layout {
        Layout { stages: [Stage { layers: 0..n_layers, shares: Shares::even(1) }].into() }
    }

    /// Equal shares, and stages whose layers differ by at most one.
    pub fn even(grid: Grid, n_layers: u32) -> Result<Layout, Unsupported> {
        let pp = u32::from(grid.pp);
        if pp == 0 || grid.tp == 0 || pp > n_layers {
            return Err(Unsupported("an empty grid, or more stages than layers"));
        }
        let stage =
            |i: u32| Stage { layers: n_layers * i / pp..n_layers * (i + 1) / pp, shares: Shares::even(grid.tp) };
        Layout::new((0..pp).map(stage).collect())
    }

    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    pub fn n_layers(&self) -> u32 {
        self.stages.last().map_or(0, |stage| stage.layers.end)
    }

    pub fn grid(&self) -> Grid {
        let tp = self.stages.first().map_or(1, |stage| stage.shares.n_ranks());
        Grid { pp: self.stages.len() as u16, tp }
    }

    /// Panics for a rank that the grid does not have.
    pub fn part(&self, rank: Rank) -> RankPart {
        let grid = self.grid();
        let place = grid.place(rank);
        let stage = &self.stages[usize::from(place.stage)];
        RankPart { place, layers: stage.layers.clone(), shares: stage.shares.clone(), n_stages: grid.pp }
    }
}

impl RankPart {
    /// True if this rank embeds the tokens.
    pub fn is_first(&self) -> bool {
        self.place.stage == 0
    }

    /// True if this rank makes the logits.
    pub fn is_last(&self) -> bool {
        self.place.stage + 1 == self.n_stages
    }

    /// True for the one rank that draws and answers for all.
    pub fn is_sampler(&self) -> bool {
        self.is_last() && self.place.tp == 0
    }

    /// Returns this rank's part of `n` units.
    pub fn owned(&self, n: u32) -> Range<u32> {
        self.shares.of(self.place.tp, n)
    }

    /// Returns this rank's heads, each with outputs of `head_dim`, if these leaves sum the outputs. No leaf cuts a
    /// head.
    pub fn owned_heads(&self, leaves: &Leaves, head_dim: u32) -> Range<u32> {
        let elements = leaves.elements(&self.owned(leaves.len() as u32));
        elements.start / head_dim..elements.end / head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn even_shares_of_what_divides_evenly_are_even() {
        for ranks in 1..=16u16 {
            let shares = Shares::even(ranks);
            for each in [0, 1, 3, 64, 9973] {
                let n = each * u32::from(ranks);
                assert!((0..ranks).all(|tp| shares.of(tp, n).len() == each as usize), "{ranks} ranks, {n} units");
            }
        }
    }

    #[test]
    fn shares_tile_and_every_unit_has_one_owner() {
        let uneven = Shares::new(vec![0, 2_000_000, 2_000_000, 12_000_000, Shares::WHOLE]).unwrap();
        for shares in [Shares::even(1), Shares::even(2), Shares::even(3), Shares::even(7), uneven] {
            for n in 0..130 {
                let mut next = 0;
                for tp in 0..shares.n_ranks() {
                    let owned = shares.of(tp, n);
                    assert_eq!(owned.start, next);
                    assert!(owned.clone().all(|i| shares.owner(i, n) == tp));
                    next = owned.end;
                }
                assert_eq!(next, n);
            }
        }
    }

    #[test]
    fn a_layout_covers_the_layers() {
        for pp in 1..=4 {
            let layout = Layout::even(Grid { pp, tp: 3 }, 30).unwrap();
            assert_eq!((layout.grid().pp, layout.grid().tp, layout.n_layers()), (pp, 3, 30));
            let last = layout.part(layout.grid().sampler());
            assert!(last.is_last() && last.is_sampler() && last.layers.end == 30);
            assert_eq!(last.is_first(), pp == 1);
        }
        assert!(Layout::even(Grid { pp: 4, tp: 1 }, 3).is_err());
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for bounds in [vec![], vec![0], vec![0, 5], vec![1, Shares::WHOLE], vec![0, 9, 8, Shares::WHOLE]] {
            assert!(Shares::new(bounds).is_err());
        }
        let stage = |layers| Stage { layers, shares: Shares::even(1) };
        let two = Stage { layers: 2..4, shares: Shares::even(2) };
        for stages in
            [vec![], vec![stage(1..2)], vec![stage(0..2), stage(3..4)], vec![stage(0..0)], vec![stage(0..2), two]]
        {
            assert!(Layout::new(stages).is_err());
        }
    }
}
