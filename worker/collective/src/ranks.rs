//! The collective operations of one rank, over the carrier chosen when the ranks met.

use crate::abort::AbortHandle;
use crate::cancel::CancelFlag;
use crate::carriers::RankDevice;
use crate::carriers::carry::{self, CarrierChoice, ExchangeLimits, RankCarrier};
use crate::carriers::host::HostCarrier;
use crate::error::{Error, Result};
use crate::mesh::{ExchangeTimes, Mesh};
use crate::notes;
use crate::sum::{RowParallelSum, SumPlans};
use crate::tokens::{TokenSender, receive_tokens};
use backend::Memory;
use std::fmt;
use std::ops::Range;
use types::{RankPart, StepId, Token};

/// A rank's place in its replica, and the operations that the ranks run together. Only the computing thread uses it.
pub struct Ranks<D: Memory> {
    // Dropped first: its transfers use the device, and the mesh names the rank to blame.
    carrier: Box<dyn RankCarrier<D>>,
    mesh: Mesh,
    plans: SumPlans,
    token_sender: TokenSender,
}

impl<D: Memory> Ranks<D> {
    /// Returns the only rank of a model of `n_layers` layers.
    pub fn solo(n_layers: u32) -> Ranks<D> {
        Ranks::over_host(Mesh::solo(n_layers))
    }

    /// Returns ranks that exchange through the host, whatever the device.
    pub fn over_host(mesh: Mesh) -> Ranks<D> {
        Ranks::new(Box::new(HostCarrier::default()), mesh)
    }

    /// Chooses the carrier between the ranks' devices, once the ranks have met. All of them do this at about the same
    /// time.
    pub fn with_carrier(
        device: &D,
        mut mesh: Mesh,
        choice: CarrierChoice,
        limits: &ExchangeLimits,
        cancel: &CancelFlag,
    ) -> Result<Ranks<D>>
    where
        D: RankDevice,
    {
        if mesh.is_alone() {
            return Ok(Ranks::over_host(mesh));
        }
        let carrier = device.carrier(&mut mesh, choice, limits, cancel)?;
        Ok(Ranks::new(carrier, mesh))
    }

    fn new(carrier: Box<dyn RankCarrier<D>>, mesh: Mesh) -> Ranks<D> {
        Ranks { carrier, mesh, plans: SumPlans::default(), token_sender: TokenSender::default() }
    }

    /// Returns whether any of this rank's exchanges use this carrier.
    pub fn uses_carrier(&self, choice: CarrierChoice) -> bool {
        self.carrier.uses_carrier(choice)
    }

    /// Checks the work begun so far: a pass is valid if this and then the device's own `settle` succeed.
    pub fn settle(&mut self) -> Result<()> {
        self.carrier.settle(&mut self.mesh)
    }

    /// Returns whether `all_reduce` only enqueues device operations, which may be recorded and run again.
    pub fn adds_on_device(&self) -> bool {
        self.stage_size() == 1 || self.carrier.adds_on_device()
    }

    /// Returns when all ranks of the stage are here. No rank has begun a sum that the others have not.
    pub fn stage_barrier(&mut self) -> Result<()> {
        if self.stage_size() == 1 {
            return Ok(());
        }
        notes::stage_barrier(&mut self.mesh)
    }

    /// Notifies the carrier that a recorded graph has run its sums again, without a call of `all_reduce`.
    pub fn note_replay(&mut self, device: &D) -> Result<()> {
        self.carrier.note_replay(&mut self.mesh, device)
    }

    pub fn is_alone(&self) -> bool {
        self.mesh.is_alone()
    }

    /// Returns this rank's part of the model.
    pub fn part(&self) -> &RankPart {
        self.mesh.part()
    }

    /// Returns this rank's number among the ranks of its stage.
    pub fn stage_rank(&self) -> u32 {
        self.part().place.tp.into()
    }

    /// Returns the number of ranks in the stage.
    pub fn stage_size(&self) -> u32 {
        self.part().shares.n_ranks().into()
    }

    /// Returns the units that this rank owns of `n_units` leaves, vocabulary rows or experts. It may own none.
    pub fn owned_units(&self, n_units: u32) -> Range<u32> {
        self.part().owned(n_units)
    }

    /// Finishes a row-parallel product in place. `planes` holds this rank's `runs`, one plane of `n_rows` rows each (or
    /// nothing yet, if it owns no leaf); afterwards its first plane is the sum over all leaves of all ranks of the
    /// stage.
    pub fn all_reduce(
        &mut self,
        device: &D,
        planes: &mut D::Buffer,
        runs: &[Range<u32>],
        n_leaves: u32,
        n_rows: usize,
    ) -> Result<()> {
        let plan = self.plans.of(&self.mesh.part().shares, n_leaves);
        if !plan.runs_of(self.mesh.tp()).eq(runs) {
            return Err(Error::LeavesMissing { have: runs.to_vec(), n_leaves });
        }
        if self.mesh.tp_size() == 1 {
            // A single plane is already the sum.
            return Ok(());
        }
        let sum = RowParallelSum { plan, n_rows, n_cols: device.cols(planes) };
        self.carrier.all_reduce(&mut self.mesh, device, planes, sum)
    }

    /// Sends each row from the rank of the stage that owns it to all others. All ranks must name the same owners.
    pub fn share_rows(
        &mut self,
        device: &D,
        buffer: &mut D::Buffer,
        owner_of: impl Fn(usize) -> u32,
        n_rows: usize,
    ) -> Result<()> {
        self.mesh.check_owners(&owner_of, n_rows)?;
        self.carrier.share_rows(&mut self.mesh, device, buffer, &owner_of, n_rows)
    }

    /// Gathers the columns of all ranks on rank 0 of the stage: `mine` is [n_rows, owned(n_units)] in its first
    /// columns, `whole` [n_rows, n_units]. The `whole` of the other ranks is left unchanged.
    pub fn gather_columns(
        &mut self,
        device: &D,
        mine: &D::Buffer,
        whole: &mut D::Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        self.carrier.gather_columns(&mut self.mesh, device, mine, whole, n_units, n_rows)
    }

    /// Sends the first `n_rows` rows to the same rank of the next stage.
    pub fn send_rows(&mut self, device: &D, buffer: &D::Buffer, n_rows: usize) -> Result<()> {
        if self.part().is_last() {
            return Err(Error::NoPeer("next stage"));
        }
        self.carrier.send_rows(&mut self.mesh, device, buffer, n_rows)
    }

    /// Receives the first `n_rows` rows from the same rank of the previous stage.
    pub fn recv_rows(&mut self, device: &D, buffer: &mut D::Buffer, n_rows: usize) -> Result<()> {
        if self.part().is_first() {
            return Err(Error::NoPeer("stage before"));
        }
        self.carrier.recv_rows(&mut self.mesh, device, buffer, n_rows)
    }

    /// Sends the sampler's tokens to every other rank of the first stage. No token is u32::MAX.
    pub fn send_tokens(&mut self, step: StepId, tokens: &[Option<Token>]) -> Result<()> {
        self.token_sender.send(&mut self.mesh, step, tokens)
    }

    /// Receives the tokens that the sampler drew in that step, on the other ranks of the first stage.
    pub fn recv_tokens(&mut self, step: StepId, tokens: &mut Vec<Option<Token>>) -> Result<()> {
        receive_tokens(&mut self.mesh, step, tokens)
    }

    pub fn abort_handle(&self) -> AbortHandle {
        self.mesh.abort_handle()
    }

    /// Returns the time in collectives.
    pub fn times(&self) -> ExchangeTimes {
        self.mesh.times()
    }
}

impl<D: Memory> fmt::Debug for Ranks<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks").field("carrier", &self.carrier).field("mesh", &self.mesh).finish_non_exhaustive()
    }
}

impl<D: Memory> Drop for Ranks<D> {
    fn drop(&mut self) {
        carry::leave(&mut self.mesh, &mut *self.carrier);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::cpu::Cpu;
    use types::leaves;

    #[test]
    fn a_rank_alone_owns_every_sum_whole() {
        let solo = Ranks::<Cpu>::solo(3);
        for n_leaves in 1..70 {
            let owned = solo.owned_units(n_leaves);
            assert_eq!(leaves::aligned_runs(owned.clone(), n_leaves), std::slice::from_ref(&owned));
            assert_eq!(owned, 0..n_leaves);
        }
    }
}
