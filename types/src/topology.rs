//! The grid of a replica: stages of layers, ranks within a stage, ranks of experts.

use crate::{Rank, Unsupported};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    pub pp: u16,
    pub tp: u16,
    pub ep: u16,
}

/// One rank's place in the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GridPlace {
    pub stage: u16,
    pub tp: u16,
    pub ep: u16,
}

impl Grid {
    pub const SOLO: Grid = Grid { pp: 1, tp: 1, ep: 1 };

    /// Workers in the grid. Experts are spread over the ranks of a stage, so `ep` adds none.
    pub fn n_ranks(&self) -> u16 {
        self.pp * self.tp
    }

    pub fn place(&self, rank: Rank) -> GridPlace {
        let tp = rank.0 % self.tp;
        GridPlace { stage: rank.0 / self.tp, tp, ep: tp % self.ep }
    }

    /// The rank that samples and answers: rank 0 of the last stage.
    pub fn sampler(&self) -> Rank {
        Rank((self.pp - 1) * self.tp)
    }

    pub fn supported(&self) -> Result<(), Unsupported> {
        if self.ep == 1 { Ok(()) } else { Err(Unsupported("expert parallelism")) }
    }
}
