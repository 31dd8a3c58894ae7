//! Sums at desks. They begin what is to be done, in the device's own order, and return.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::nccl::{Fault, Planes};
use backend::Memory;
use backend::cuda::{Buffer, Cuda};

impl Mesh {
    /// Whether what was begun can be believed. Whoever has read from the device asks.
    pub fn settle(&mut self) -> Result<()> {
        match self.desks.as_ref().and_then(|desks| desks.watch.verdict()) {
            Some((fault, missing)) => Err(self.missed(&fault, Some(missing))),
            None => self.settle_direct(),
        }
    }

    /// Before what came of sums goes to ranks that were not at the same desks: what came of one that was given up must
    /// not leave this rank, and nobody else would see it. At the desks themselves nobody shows it.
    pub(crate) fn believe(&mut self) -> Result<()> {
        let Some(desks) = &self.desks else { return Ok(()) };
        desks.watch.wait();
        match desks.watch.verdict() {
            Some((fault, missing)) => Err(self.missed(&fault, Some(missing))),
            None => Ok(()),
        }
    }

    pub(crate) fn has_desks(&self) -> bool {
        self.desks.is_some()
    }

    /// Whether a sum is added at desks: one that is small, and every other where nothing else does it on the devices.
    pub(crate) fn adds_at_desks(&self, planes: Planes) -> bool {
        let sum = self.desks.as_ref().and_then(|desks| desks.sum(planes.n_leaves));
        sum.is_some_and(|sum| planes.n_rows * planes.n_cols <= sum.n_max() || !self.has_direct_stage())
    }

    pub(crate) fn sum_at_desks(&mut self, cuda: &Cuda, buffer: &Buffer, planes: Planes) -> Result<()> {
        let n_own = self.n_planes(planes.idx, self.tp()).max(1);
        let Some(desks) = &self.desks else { return Err(Error::NoPeer("desk to add at")) };
        let watch = &desks.watch;
        if let Some(fault) = watch.fault() {
            return Err(self.missed(&fault, None));
        }
        let Some(sum) = desks.sum(planes.n_leaves) else { return Err(Error::NoPeer("desk for such a sum")) };
        let (at, size) = (cuda.floats_of(buffer, n_own * planes.n_rows), planes.n_rows * planes.n_cols);
        watch.begins();
        for start in (0..size).step_by(sum.n_max()) {
            let numbers = start..(start + sum.n_max()).min(size);
            cuda.sum_one_shot(sum, at, numbers, size, (&watch.told, watch.deadline));
        }
        cuda.mark(&watch.mark).map_err(|error| self.fail(error.into()))
    }

    /// What was recorded is under way: the watch looks after it as after what was begun.
    pub(crate) fn has_repeated_at_desks<M: Memory>(&mut self, device: &M) -> Result<()> {
        let Some((cuda, desks)) = device.cuda().zip(self.desks.as_ref()) else { return Ok(()) };
        desks.watch.begins();
        cuda.mark(&desks.watch.mark).map_err(|error| self.fail(error.into()))
    }

    /// Who is to blame, as far as the links know; else whom the kernel waited for.
    fn missed(&mut self, fault: &Fault, missing: Option<usize>) -> Error {
        let silent = missing.filter(|_| *fault == Fault::Late).map(|tp| self.in_stage(tp));
        let error = match (silent, self.who_is_lost()) {
            (Some(_), Some(lost)) => lost,
            (Some(rank), None) => Error::Deadline { rank: types::Rank(rank as u16) },
            (None, _) => self.blamed_by(fault),
        };
        self.fail(error)
    }
}
