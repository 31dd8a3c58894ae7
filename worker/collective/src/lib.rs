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
use types::{Layout, Part, Rank, Unsupported};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    #[error("leaves {have:?} are here and nobody has the rest of {n_leaves}")]
    LeavesMissing { have: Vec<Range<u32>>, n_leaves: u32 },
}

pub type Result<T> = std::result::Result<T, Error>;

/// The ranks of this rank's stage, and its neighbours in the stages before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// One rank, which owns everything.
    Solo(Part),
}

impl Collective {
    pub fn solo(n_layers: u32) -> Collective {
        Collective::Solo(Layout::solo(n_layers).part(Rank(0)))
    }

    pub fn part(&self) -> &Part {
        match self {
            Collective::Solo(part) => part,
        }
    }

    /// Finishes a row-parallel product in place. `planes` holds this rank's `runs`, one plane of `n_rows` rows each;
    /// afterwards its first plane is the sum over all leaves of all ranks.
    pub fn sum_leaves<M: Memory>(
        &mut self,
        _device: &M,
        _planes: &mut M::Buffer,
        runs: &[Range<u32>],
        n_leaves: u32,
        _n_rows: usize,
    ) -> Result<()> {
        match self {
            Collective::Solo(_) if runs.len() == 1 && runs[0] == (0..n_leaves) => Ok(()),
            Collective::Solo(_) => Err(Error::LeavesMissing { have: runs.to_vec(), n_leaves }),
        }
    }

    /// Each row goes from its owner to the others of the stage.
    pub fn share_rows<M: Memory>(
        &mut self,
        _device: &M,
        _buffer: &mut M::Buffer,
        _owner_of: impl Fn(usize) -> u16,
        _n_rows: usize,
    ) -> Result<()> {
        Ok(())
    }

    /// The columns of all ranks, on rank 0 of the stage.
    pub fn gather_columns<M: Memory>(
        &mut self,
        _device: &M,
        _mine: &M::Buffer,
        _whole: &mut M::Buffer,
        _n_units: u32,
        _n_rows: usize,
    ) -> Result<()> {
        Ok(())
    }

    pub fn send_rows<M: Memory>(&mut self, _device: &M, _buffer: &M::Buffer, _n_rows: usize) -> Result<()> {
        Ok(())
    }

    pub fn recv_rows<M: Memory>(&mut self, _device: &M, _buffer: &mut M::Buffer, _n_rows: usize) -> Result<()> {
        Ok(())
    }
}
