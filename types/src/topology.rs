//! The grid of a replica: stages of layers, and ranks within a stage.

use crate::Rank;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    pub pp: u16,
    pub tp: u16,
}

/// One rank's place in the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GridPlace {
    pub stage: u16,
    pub tp: u16,
}

impl Grid {
    pub const SOLO: Grid = Grid { pp: 1, tp: 1 };

    /// Workers in the grid. The ranks of a stage divide its experts too.
    pub fn n_ranks(&self) -> u16 {
        self.pp * self.tp
    }

    pub fn place(&self, rank: Rank) -> GridPlace {
        GridPlace { stage: rank.0 / self.tp, tp: rank.0 % self.tp }
    }

    /// The rank that samples and answers: rank 0 of the last stage.
    pub fn sampler(&self) -> Rank {
        Rank((self.pp - 1) * self.tp)
    }
}
