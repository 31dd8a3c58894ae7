//! The owner of each plane in a sum over leaves, for all carriers. Has no knowledge of devices or links.

use std::ops::Range;
use types::Shares;
use types::leaves::{Fold, aligned_runs};

/// One plane of the sum.
#[derive(Clone, Debug)]
pub struct Plane {
    pub run: Range<u32>,
    /// The owning rank, and the plane's number among that rank's planes.
    pub tp: usize,
    pub number: usize,
}

/// The planes of all ranks of a stage for a sum over `n_leaves` leaves, in ascending order of their leaves.
#[derive(Debug)]
pub struct SumPlan {
    pub n_leaves: u32,
    pub planes: Vec<Plane>,
}

impl SumPlan {
    pub fn new(shares: &Shares, n_leaves: u32) -> SumPlan {
        let runs = |tp: u16| aligned_runs(shares.of(tp, n_leaves), n_leaves).into_iter().enumerate();
        let plane = |tp: u16| move |(number, run)| Plane { run, tp: tp.into(), number };
        let planes = (0..shares.n_ranks()).flat_map(|tp| runs(tp).map(plane(tp))).collect();
        SumPlan { n_leaves, planes }
    }

    pub fn runs_of(&self, tp: usize) -> impl Iterator<Item = &Range<u32>> {
        self.planes.iter().filter(move |plane| plane.tp == tp).map(|plane| &plane.run)
    }

    pub fn n_planes(&self, tp: usize) -> usize {
        self.runs_of(tp).count()
    }

    /// Returns the most planes that one rank has.
    pub fn n_planes_max(&self) -> usize {
        self.planes.iter().map(|plane| plane.number + 1).max().unwrap_or(0)
    }

    /// Returns how many planes come before those of rank `tp`.
    pub fn first_of(&self, tp: usize) -> usize {
        self.planes.iter().filter(|plane| plane.tp < tp).count()
    }

    /// Returns how often the tree merges after each plane.
    pub fn merges(&self) -> impl Iterator<Item = u32> {
        let mut tree = Fold::default();
        self.planes.iter().map(move |plane| tree.push(&plane.run))
    }
}

/// The plans used so far: a model has few.
#[derive(Debug, Default)]
pub struct SumPlans(Vec<SumPlan>);

impl SumPlans {
    pub fn of(&mut self, shares: &Shares, n_leaves: u32) -> &SumPlan {
        let found = self.0.iter().position(|plan| plan.n_leaves == n_leaves);
        let idx = found.unwrap_or_else(|| {
            self.0.push(SumPlan::new(shares, n_leaves));
            self.0.len() - 1
        });
        &self.0[idx]
    }
}

/// A row-parallel product to finish: each plane is `[n_rows, n_cols]`.
#[derive(Clone, Copy)]
pub struct RowParallelSum<'a> {
    pub plan: &'a SumPlan,
    pub n_rows: usize,
    pub n_cols: usize,
}

impl RowParallelSum<'_> {
    /// Returns the numbers in one plane.
    pub fn size(self) -> usize {
        self.n_rows * self.n_cols
    }
}
