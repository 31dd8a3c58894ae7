//! Short messages that ranks exchange while they choose carriers.

use crate::error::Result;
use crate::frame::FrameKind;
use crate::mesh::Mesh;
use crate::transfer::{Direction, NO_OWNERS, Payload, Transfer};

/// Sends `mine` to the ranks of `to` and receives from those of `from`. Returns one entry per rank of the grid; a rank
/// that sent nothing has this rank's own words.
pub fn swap_notes<const N: usize>(
    mesh: &mut Mesh,
    tag: u64,
    mine: [u32; N],
    to: &[usize],
    from: &[usize],
) -> Result<Vec<[u32; N]>> {
    let of = |direction| move |rank: &usize| Transfer::block(*rank, direction, 1, 0..N);
    let transfers = to.iter().map(of(Direction::Out)).chain(from.iter().map(of(Direction::In)));
    transfers.for_each(|transfer| mesh.plan([transfer]));
    let mut notes = Notes { mine, theirs: vec![mine; mesh.grid().n_ranks().into()] };
    mesh.exchange(FrameKind::Notes, tag, NO_OWNERS, &mut notes)?;
    Ok(notes.theirs)
}

/// Sends `mine` to the other ranks of the stage. Returns one entry per rank of the stage.
pub fn swap_stage_notes<const N: usize>(mesh: &mut Mesh, tag: u64, mine: [u32; N]) -> Result<Vec<[u32; N]>> {
    let others: Vec<usize> = mesh.other_stage_ranks().map(|tp| mesh.stage_rank(tp)).collect();
    let notes = swap_notes(mesh, tag, mine, &others, &others)?;
    Ok(notes[mesh.stage_rank(0)..][..mesh.tp_size()].to_vec())
}

/// Returns when all ranks of the stage are here.
pub fn stage_barrier(mesh: &mut Mesh) -> Result<()> {
    swap_stage_notes(mesh, AWAIT_TAG, [0]).map(drop)
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
