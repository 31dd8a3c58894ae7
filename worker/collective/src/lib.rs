//! What the ranks of a stage do together. Knows buffers and leaves; nothing of models, steps or who placed the ranks.
//!
//! # How a sum is finished
//!
//! A row-parallel product is a sum over leaves (`types::leaves`), and every rank owns a contiguous run of them:
//!
//! ```text leaves     0 1 2 3 4 5 6 7 8 rank 0     [=========]              owns 0..5: planes 0..4 and 4..5 rank 1
//! [=======]      owns 5..9: planes 5..6, 6..8 and 8..9 ``` A rank's kernel reduces the largest aligned runs that the
//! rank owns whole, one plane `[n_rows, n_out]` of f32 for each (`Linear::linear_runs`). `sum_leaves` merges the planes
//! of all ranks in ascending order by `leaves::Fold`, which is one fixed binary tree over the leaves: whoever owned
//! what, each element is added up in the same order, so its bits are the same. More ranks finish it so: small messages
//! gather all planes and every rank folds; large ones go all to all by column, each rank folds its columns, and the
//! finished rows are gathered. A rank that is alone owns the whole tree, its kernel has one plane, and that plane is
//! the sum.
//!
//! An enum and not a trait: there is one way to be a stage today, and its callers need no second type parameter for it.

use backend::Memory;
use std::ops::Range;
use types::{Grid, Rank, Unsupported};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    #[error("leaves {have:?} are here and nobody has the rest of {n_leaves}")]
    LeavesMissing { have: Vec<Range<u32>>, n_leaves: u32 },
}

/// The ranks of this rank's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// One rank, which owns every leaf.
    Solo,
}

impl Collective {
    /// What a place in the grid needs.
    pub fn join(grid: Grid, _rank: Rank) -> Result<Collective, Error> {
        grid.supported()?;
        Ok(Collective::Solo)
    }

    /// This rank's number among the ranks of its stage.
    pub fn rank(&self) -> u32 {
        match self {
            Collective::Solo => 0,
        }
    }

    /// Ranks in the stage.
    pub fn size(&self) -> u32 {
        match self {
            Collective::Solo => 1,
        }
    }

    /// The leaves that this rank owns of a sum over `n_leaves`.
    pub fn owned(&self, n_leaves: u32) -> Range<u32> {
        let (rank, size) = (u64::from(self.rank()), u64::from(self.size()));
        let cut = |i: u64| (u64::from(n_leaves) * i / size) as u32;
        cut(rank)..cut(rank + 1)
    }

    /// Finishes a row-parallel product in place. `planes` holds this rank's `runs`, one plane of `n_rows` rows each;
    /// afterwards its first plane is the sum over all leaves of all ranks.
    pub fn sum_leaves<M: Memory>(
        &self,
        _device: &M,
        _planes: &mut M::Buffer,
        runs: &[Range<u32>],
        n_leaves: u32,
        _n_rows: usize,
    ) -> Result<(), Error> {
        match self {
            Collective::Solo if runs.len() == 1 && runs[0] == (0..n_leaves) => Ok(()),
            Collective::Solo => Err(Error::LeavesMissing { have: runs.to_vec(), n_leaves }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::leaves;

    #[test]
    fn a_rank_alone_owns_every_sum_whole() {
        for n_leaves in 1..70 {
            let owned = Collective::Solo.owned(n_leaves);
            assert_eq!(leaves::aligned_runs(owned.clone(), n_leaves), std::slice::from_ref(&owned));
            assert_eq!(owned, 0..n_leaves);
        }
    }

    #[test]
    fn more_ranks_are_refused_by_name() {
        let refused = Collective::join(Grid { pp: 1, tp: 2, ep: 1 }, Rank(0));
        assert!(matches!(refused, Err(Error::Unsupported(Unsupported("tensor parallelism")))));
    }
}
