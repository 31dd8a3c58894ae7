//! What the ranks of a replica do together. Knows buffers and leaves; nothing of models, steps or who placed the ranks.
//!
//! # How a sum is finished
//!
//! A row-parallel product is a sum over leaves (`types::leaves`), and every rank owns a contiguous run of them:
//!
//! ```text
//! leaves     0 1 2 3 4 5 6 7 8
//! rank 0     [=========]              owns 0..5: planes 0..4 and 4..5
//! rank 1               [=======]      owns 5..9: planes 5..6, 6..8 and 8..9
//! ```
//! A rank's kernel reduces the largest aligned runs that the rank owns whole, one plane `[n_rows, n_out]` of f32 for
//! each (`Linear::linear_runs`). `sum_leaves` merges the planes of all ranks in ascending order by `leaves::Fold`,
//! which is one fixed binary tree over the leaves: whoever owned what, each element is added up in the same order, so
//! its bits are the same. Small messages gather all planes and every rank folds; large ones go all to all by column,
//! each rank folds its columns, and the finished columns are gathered. A rank that is alone owns the whole tree, its
//! kernel has one plane, and that plane is the sum.
//!
//! # How ranks talk
//!
//! Each pair that has something to say has a link: two rings in shared memory, or a TCP connection. Frames carry
//! epoch, kind, shape or step, and a number: ranks that are out of step get an error that names the peer, never wrong
//! numbers. All operations move what they send and what they receive together, wait until a deadline, and can be
//! aborted. Where all have NCCL, rows, planes and logits stay on the devices (`nccl`), and an operation only begins.
//! So it is with sums of ranks of one host whose devices reach each other's memory (`one_shot`), with NCCL or without.
//!
//! An enum and not a trait: there is one way to be several, and its callers need no second type parameter for it.
#![allow(unsafe_code, reason = "memory that processes share; each block says why it holds")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod error;
mod frame;
mod ring;
mod sync;

mod doom;
mod doorway;
#[cfg(test)]
mod faults;
mod fold;
mod join;
mod link;
mod mesh;
mod moves;
mod nccl;
mod one_shot;
mod ops;
mod plan;
mod region;
mod sleep;
mod wait;
mod wiring;

pub use doom::{AbortHandle, Ended};
pub use doorway::{Doorway, Refused};
pub use error::{Due, Error, Refusal, Result};
pub use frame::Kind;
pub use mesh::{Mesh, Times};
pub use nccl::{Carrier, DirectLimits, NcclError, NcclVersion, Pieces, nccl_version};
pub use plan::{MeshPlan, Timeouts, Wire};
pub use wait::Waits;

use backend::Memory;
use std::ops::Range;
use types::{Layout, Part, Rank, StepId, Token};

const _: () = assert!(cfg!(target_endian = "little"), "words travel as they lie in memory");

/// A rank's place among the ranks of its replica. The computing thread alone uses it.
#[derive(Debug)]
pub enum Collective {
    /// One rank, which owns everything.
    Solo(Part),
    /// One of several.
    Mesh(Box<Mesh>),
}

impl Collective {
    /// The only rank of a model of so many layers.
    pub fn solo(n_layers: u32) -> Collective {
        Collective::Solo(Layout::solo(n_layers).part(Rank(0)))
    }

    /// All ranks, by rank, for threads of one process. They sleep where they wait.
    pub fn in_process(layout: &Layout) -> Vec<Collective> {
        // As a Vec would.
        Collective::in_process_with(layout, Waits::default()).expect("memory for the rings of one process")
    }

    pub fn in_process_with(layout: &Layout, waits: Waits) -> Result<Vec<Collective>> {
        if layout.grid().n_ranks() == 1 {
            return Ok(vec![Collective::Solo(layout.part(Rank(0)))]);
        }
        let meshes = wiring::in_process(layout, waits)?;
        Ok(meshes.into_iter().map(|mesh| Collective::Mesh(Box::new(mesh))).collect())
    }

    /// Meets the other ranks of the plan's epoch: all of them join at about the same time, each with its own rank.
    pub fn join(doorway: &Doorway, plan: MeshPlan) -> Result<Collective> {
        Collective::join_until(doorway, plan, &Ended::default())
    }

    /// The same, broken off when it is said that the place is over: before it began, too.
    pub fn join_until(doorway: &Doorway, plan: MeshPlan, ended: &Ended) -> Result<Collective> {
        if plan.layout.grid().n_ranks() == 1 {
            return Ok(Collective::Solo(plan.layout.part(Rank(0))));
        }
        join::join(doorway, &plan, ended).map(|mesh| Collective::Mesh(Box::new(mesh)))
    }

    /// Settles what carries numbers between the ranks' devices, once the ranks have met. Says whether anything of this
    /// rank's goes through NCCL; `adds_at_desks` says whether anything goes over the devices' own memory.
    pub fn take_device<M: Memory>(
        &mut self,
        device: &M,
        carrier: Carrier,
        limits: &DirectLimits,
        ended: &Ended,
    ) -> Result<bool> {
        match self {
            Collective::Solo(_) => Ok(false),
            Collective::Mesh(mesh) => {
                let has_nccl = mesh.take_device(device, carrier, limits, ended)?;
                mesh.meet_at_desks(device, carrier, limits)?;
                Ok(has_nccl)
            }
        }
    }

    /// Whether sums that are small, at least, go over memory that the devices of the stage reach of each other.
    pub fn adds_at_desks(&self) -> bool {
        match self {
            Collective::Solo(_) => false,
            Collective::Mesh(mesh) => mesh.has_desks(),
        }
    }

    /// Whether what was begun can be believed: a pass is good if this and the device's own `settle` say so behind it.
    pub fn settle(&mut self) -> Result<()> {
        match self {
            Collective::Solo(_) => Ok(()),
            Collective::Mesh(mesh) => mesh.settle(),
        }
    }

    /// Whether `sum_leaves` only begins operations of the device, which may be recorded and begun again.
    pub fn adds_on_device(&self) -> bool {
        match self {
            Collective::Solo(_) => true,
            Collective::Mesh(mesh) => mesh.adds_on_device(),
        }
    }

    /// Sums were begun again from a record of the device's: what begins them here has not been called.
    pub fn has_repeated<M: Memory>(&mut self, device: &M) -> Result<()> {
        match self {
            Collective::Solo(_) => Ok(()),
            Collective::Mesh(mesh) => mesh.has_repeated(device),
        }
    }

    /// What this rank holds of the model.
    pub fn part(&self) -> &Part {
        match self {
            Collective::Solo(part) => part,
            Collective::Mesh(mesh) => &mesh.part,
        }
    }

    /// This rank's number among the ranks of its stage.
    pub fn rank(&self) -> u32 {
        self.part().place.tp.into()
    }

    /// Ranks in the stage.
    pub fn size(&self) -> u32 {
        self.part().shares.n_ranks().into()
    }

    /// What this rank owns of `n_units`: leaves, rows of the vocabulary, experts. It may be nothing.
    pub fn owned(&self, n_units: u32) -> Range<u32> {
        self.part().owned(n_units)
    }

    /// Finishes a row-parallel product in place. `planes` holds this rank's `runs`, one plane of `n_rows` rows each (or
    /// nothing yet, if it owns no leaf); afterwards its first plane is the sum over all leaves of all ranks of the
    /// stage.
    pub fn sum_leaves<M: Memory>(
        &mut self,
        device: &M,
        planes: &mut M::Buffer,
        runs: &[Range<u32>],
        n_leaves: u32,
        n_rows: usize,
    ) -> Result<()> {
        match self {
            Collective::Solo(_) if runs.len() == 1 && runs[0] == (0..n_leaves) => Ok(()),
            Collective::Solo(_) => Err(Error::LeavesMissing { have: runs.to_vec(), n_leaves }),
            Collective::Mesh(mesh) => mesh.sum_leaves(device, planes, runs, n_leaves, n_rows),
        }
    }

    /// Each row goes from the rank of the stage that owns it to all others. All ranks give the same owners.
    pub fn share_rows<M: Memory>(
        &mut self,
        device: &M,
        buffer: &mut M::Buffer,
        owner_of: impl Fn(usize) -> u32,
        n_rows: usize,
    ) -> Result<()> {
        match self {
            Collective::Solo(_) => Ok(()),
            Collective::Mesh(mesh) => mesh.share_rows(device, buffer, owner_of, n_rows),
        }
    }

    /// Rank 0 of the stage gets the columns of all: `mine` is [n_rows, owned(n_units)] in its first columns, `whole`
    /// [n_rows, n_units]. The `whole` of the others stays as it is.
    pub fn gather_columns<M: Memory>(
        &mut self,
        device: &M,
        mine: &M::Buffer,
        whole: &mut M::Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        match self {
            Collective::Solo(_) => copy_rows(device, mine, whole, n_units as usize, n_rows),
            Collective::Mesh(mesh) => mesh.gather_columns(device, mine, whole, n_units, n_rows)?,
        }
        Ok(())
    }

    /// The first rows to the same rank of the next stage.
    pub fn send_rows<M: Memory>(&mut self, device: &M, buffer: &M::Buffer, n_rows: usize) -> Result<()> {
        match self {
            Collective::Solo(_) => Err(Error::NoPeer("next stage")),
            Collective::Mesh(mesh) => mesh.send_rows(device, buffer, n_rows),
        }
    }

    /// The first rows from the same rank of the stage before.
    pub fn recv_rows<M: Memory>(&mut self, device: &M, buffer: &mut M::Buffer, n_rows: usize) -> Result<()> {
        match self {
            Collective::Solo(_) => Err(Error::NoPeer("stage before")),
            Collective::Mesh(mesh) => mesh.recv_rows(device, buffer, n_rows),
        }
    }

    /// What the sampler drew, to every other rank of the first stage. No token is u32::MAX.
    pub fn send_tokens(&mut self, step: StepId, tokens: &[Option<Token>]) -> Result<()> {
        match self {
            Collective::Solo(_) => Ok(()),
            Collective::Mesh(mesh) => mesh.send_tokens(step, tokens),
        }
    }

    /// What the sampler drew in that step, for the ranks of the first stage other than the sampler itself.
    pub fn recv_tokens(&mut self, step: StepId, tokens: &mut Vec<Option<Token>>) -> Result<()> {
        match self {
            Collective::Solo(_) => Err(Error::NoPeer("sampler to receive tokens from")),
            Collective::Mesh(mesh) => mesh.recv_tokens(step, tokens),
        }
    }

    pub fn abort_handle(&self) -> AbortHandle {
        match self {
            Collective::Solo(_) => AbortHandle::of_solo(),
            Collective::Mesh(mesh) => mesh.abort_handle(),
        }
    }

    /// Where the time went.
    pub fn times(&self) -> Times {
        match self {
            Collective::Solo(_) => Times::default(),
            Collective::Mesh(mesh) => mesh.times(),
        }
    }
}

fn copy_rows<M: Memory>(device: &M, from: &M::Buffer, to: &mut M::Buffer, n_cols: usize, n_rows: usize) {
    const PIECE: usize = 1024;
    let mut piece = [0.0; PIECE];
    for (row, col) in (0..n_rows).flat_map(|row| (0..n_cols).step_by(PIECE).map(move |col| (row, col))) {
        let piece = &mut piece[..PIECE.min(n_cols - col)];
        device.read_part(from, row, col, piece);
        device.write_part(to, row, col, piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::leaves;

    #[test]
    fn a_rank_alone_owns_every_sum_whole() {
        let solo = Collective::solo(3);
        for n_leaves in 1..70 {
            let owned = solo.owned(n_leaves);
            assert_eq!(leaves::aligned_runs(owned.clone(), n_leaves), std::slice::from_ref(&owned));
            assert_eq!(owned, 0..n_leaves);
        }
    }
}
