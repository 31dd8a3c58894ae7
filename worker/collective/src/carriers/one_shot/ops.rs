//! The carrier of sums over peers' buffers. Sums are enqueued in stream order and return at once. The carrier below
//! does everything else.

use super::watchdog::SumWatchdog;
use crate::carriers::carry::{CarrierChoice, RankCarrier};
use crate::error::{Error, Result};
use crate::mesh::{Mesh, WaitFault};
use crate::sum::RowParallelSum;
use crate::transfer::OwnerFn;
use backend::cuda::{Buffer, Cuda, MappedBuffer, OneShotSum};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Sums of a stage, over buffers that all of its ranks can read.
#[derive(Debug)]
pub struct OneShotCarrier {
    // Communicators are dropped first: a sum may wait behind their work.
    pub below: Box<dyn RankCarrier<Cuda>>,
    pub buffers: PeerBuffers,
}

/// The buffers of a stage, and the watchdog over their sums.
#[derive(Debug)]
pub struct PeerBuffers {
    pub(super) watchdog: Arc<SumWatchdog>,
    pub(super) thread: Option<JoinHandle<()>>,
    /// One per rank of the stage.
    pub(super) shown: Vec<MappedBuffer>,
    /// One per number of leaves.
    pub(super) sums: Vec<(u32, OneShotSum)>,
}

impl RankCarrier<Cuda> for OneShotCarrier {
    fn all_reduce(&mut self, mesh: &mut Mesh, cuda: &Cuda, planes: &mut Buffer, sum: RowParallelSum<'_>) -> Result<()> {
        let found = self.buffers.sums.iter().find(|(n_leaves, _)| *n_leaves == sum.plan.n_leaves);
        // The carrier below takes a sum that needs several launches, if it adds on the device.
        let taken = found.filter(|(_, one)| sum.size() <= one.n_max() || !self.below.adds_on_device());
        match taken {
            Some((_, one_shot)) => self.buffers.add(mesh, cuda, planes, one_shot, sum),
            None => self.below.all_reduce(mesh, cuda, planes, sum),
        }
    }

    fn share_rows(
        &mut self,
        mesh: &mut Mesh,
        cuda: &Cuda,
        buffer: &mut Buffer,
        owner_of: OwnerFn<'_>,
        n_rows: usize,
    ) -> Result<()> {
        self.below.share_rows(mesh, cuda, buffer, owner_of, n_rows)
    }

    fn gather_columns(
        &mut self,
        mesh: &mut Mesh,
        cuda: &Cuda,
        mine: &Buffer,
        whole: &mut Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        if mesh.tp() != 0 {
            self.buffers.confirm_sums(mesh)?;
        }
        self.below.gather_columns(mesh, cuda, mine, whole, n_units, n_rows)
    }

    fn send_rows(&mut self, mesh: &mut Mesh, cuda: &Cuda, buffer: &Buffer, n_rows: usize) -> Result<()> {
        self.buffers.confirm_sums(mesh)?;
        self.below.send_rows(mesh, cuda, buffer, n_rows)
    }

    fn recv_rows(&mut self, mesh: &mut Mesh, cuda: &Cuda, buffer: &mut Buffer, n_rows: usize) -> Result<()> {
        self.below.recv_rows(mesh, cuda, buffer, n_rows)
    }

    fn settle(&mut self, mesh: &mut Mesh) -> Result<()> {
        self.buffers.settle(mesh)?;
        self.below.settle(mesh)
    }

    fn adds_on_device(&self) -> bool {
        true
    }

    /// Called when a recorded graph runs again: the watchdog watches it like newly begun work.
    fn note_replay(&mut self, mesh: &mut Mesh, cuda: &Cuda) -> Result<()> {
        let watchdog = &self.buffers.watchdog;
        watchdog.start_deadline();
        cuda.mark(&watchdog.mark).map_err(|error| mesh.fail(error.into()))?;
        self.below.note_replay(mesh, cuda)
    }

    fn uses_carrier(&self, choice: CarrierChoice) -> bool {
        choice == CarrierChoice::Ipc || self.below.uses_carrier(choice)
    }

    fn finish(&mut self) {
        self.buffers.watchdog.leave();
        self.below.finish();
    }

    fn leave(&mut self) {
        self.below.leave();
    }
}

impl PeerBuffers {
    fn add(
        &self,
        mesh: &mut Mesh,
        cuda: &Cuda,
        planes: &Buffer,
        one_shot: &OneShotSum,
        sum: RowParallelSum<'_>,
    ) -> Result<()> {
        let watchdog = &self.watchdog;
        if let Some(fault) = watchdog.fault() {
            return Err(fail_and_blame(mesh, fault, None));
        }
        let n_own = sum.plan.n_planes(mesh.tp()).max(1);
        let (at, size) = (cuda.floats_of(planes, n_own * sum.n_rows), sum.size());
        watchdog.start_deadline();
        for start in (0..size).step_by(one_shot.n_max()) {
            let numbers = start..(start + one_shot.n_max()).min(size);
            cuda.sum_one_shot(one_shot, at, numbers, size, (&watchdog.control, watchdog.deadline));
        }
        cuda.mark(&watchdog.mark).map_err(|error| mesh.fail(error.into()))
    }

    fn settle(&self, mesh: &mut Mesh) -> Result<()> {
        match self.watchdog.sum_fault() {
            Some((fault, missing)) => Err(fail_and_blame(mesh, fault, Some(missing))),
            None => Ok(()),
        }
    }

    /// Called before results of sums go to ranks outside the stage. An abandoned sum's result must not leave this rank,
    /// because the receiver could not detect it. Ranks that add together need no such check.
    fn confirm_sums(&self, mesh: &mut Mesh) -> Result<()> {
        self.watchdog.wait();
        self.settle(mesh)
    }
}

/// Blames the rank that the links show to be at fault, otherwise the rank that the kernel waited for.
fn fail_and_blame(mesh: &mut Mesh, fault: WaitFault, missing: Option<usize>) -> Error {
    let silent = missing.filter(|_| fault == WaitFault::Late).map(|tp| types::Rank(mesh.stage_rank(tp) as u16));
    let error = match silent {
        Some(rank) => mesh.lost_peer_error().unwrap_or(Error::Deadline { rank }),
        None => mesh.blame(fault),
    };
    mesh.fail(error)
}

impl Drop for PeerBuffers {
    fn drop(&mut self) {
        // Without an earlier fault this aborts the work in progress.
        self.watchdog.end(WaitFault::Aborted);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ended = thread.join();
        }
        if !self.watchdog.wait_until_unused() {
            // A kernel may still read the buffers: they stay mapped until the process ends.
            std::mem::forget((std::mem::take(&mut self.shown), self.watchdog.clone()));
        }
    }
}
