//! Short messages that ranks exchange while they choose carriers.

use crate::error::Result;
use crate::frame::FrameKind;
use crate::mesh::Mesh;
use crate::transfer::{Direction, NO_OWNERS, Payload, Transfer};

impl Mesh {
    /// Sends `mine` to the ranks of `to` and receives from those of `from`. Returns one entry per rank of the grid; a
    /// rank that sent nothing has this rank's own words.
    pub(crate) fn swap_notes<const N: usize>(
        &mut self,
        tag: u64,
        mine: [u32; N],
        to: &[usize],
        from: &[usize],
    ) -> Result<Vec<[u32; N]>> {
        let of = |direction| move |rank: &usize| Transfer::block(*rank, direction, 1, 0..N);
        let transfers = to.iter().map(of(Direction::Out)).chain(from.iter().map(of(Direction::In)));
        transfers.for_each(|transfer| self.plan([transfer]));
        let mut notes = Notes { mine, theirs: vec![mine; self.grid().n_ranks().into()] };
        self.exchange(FrameKind::Notes, tag, NO_OWNERS, &mut notes)?;
        Ok(notes.theirs)
    }

    /// Sends `mine` to the other ranks of the stage. Returns one entry per rank of the stage.
    pub(crate) fn swap_stage_notes<const N: usize>(&mut self, tag: u64, mine: [u32; N]) -> Result<Vec<[u32; N]>> {
        let others: Vec<usize> = self.other_stage_ranks().map(|tp| self.stage_rank(tp)).collect();
        let notes = self.swap_notes(tag, mine, &others, &others)?;
        Ok(notes[self.stage_rank(0)..][..self.tp_size()].to_vec())
    }

    /// Returns when all ranks of the stage are here.
    pub(crate) fn stage_barrier(&mut self) -> Result<()> {
        self.swap_stage_notes(AWAIT_TAG, [0]).map(drop)
    }
}

/// A tag that no other exchange of notes within a stage uses.
const AWAIT_TAG: u64 = 2 << 32;

struct Notes<const N: usize> {
    mine: [u32; N],
    theirs: Vec<[u32; N]>,
}

impl<const N: usize> Payload for Notes<N> {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.mine[col..][..out.len()]);
    }

    fn write(&mut self, peer: usize, _row: usize, col: usize, words: &[u32]) {
        self.theirs[peer][col..][..words.len()].copy_from_slice(words);
    }
}
