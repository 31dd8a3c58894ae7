//! Exchanges between the ranks of a stage over their communicator. Every call enqueues work on the compute stream and
//! returns.

use super::api::NcclError;
use super::comms::{BeginResult, StageComm};
use super::watchdog::{CommStream, CommWatchdog};
use crate::mesh::Mesh;
use crate::sum::{RowParallelSum, SumPlan};
use backend::cuda::{Cuda, DeviceColumns, DeviceFloats, DeviceWords};
use std::ops::Range;

impl StageComm {
    /// Returns how often to merge after each plane, in device memory.
    pub fn merges(&mut self, cuda: &Cuda, plan: &SumPlan) -> backend::Result<usize> {
        if let Some(at) = self.merges.iter().position(|(n, _)| *n == plan.n_leaves) {
            return Ok(at);
        }
        let counts: Vec<u8> = plan.merges().map(|merges| merges as u8).collect();
        self.merges.push((plan.n_leaves, cuda.upload_words(&counts)?));
        Ok(self.merges.len() - 1)
    }
}

/// The parts that an exchange of the stage uses.
#[derive(Clone, Copy)]
pub(super) struct StageExchange<'a> {
    pub mesh: &'a Mesh,
    pub cuda: &'a Cuda,
    pub watchdog: &'a CommWatchdog,
    pub stage: &'a StageComm,
}

impl StageExchange<'_> {
    /// Adds this rank's planes, and then lets NCCL add over all ranks.
    pub fn reduce(self, at: DeviceFloats<'_>, sum: RowParallelSum<'_>) -> BeginResult {
        let (size, n_own) = (sum.size(), sum.plan.n_planes(self.mesh.tp()));
        let total = at.part(0..size);
        match n_own {
            0 => self.cuda.zero(total)?,
            1 => {}
            n => self.cuda.fold_planes(at.part(0..n * size), n, &self.stage.in_a_row, total),
        }
        if size > 0 {
            // SAFETY: the buffer has this many numbers and outlives the stream's work: freeing waits for it.
            self.begin(|lane| unsafe { lane.all_reduce(total.address(), size) })?;
        }
        Ok(())
    }

    /// Every rank receives all planes, in the order of their leaves, and folds them.
    pub fn gather_and_fold(self, at: DeviceFloats<'_>, sum: RowParallelSum<'_>, merges: &DeviceWords) -> BeginResult {
        let (size, me) = (sum.size(), self.mesh.tp());
        let n_of = |tp: usize| sum.plan.n_planes(tp) * size;
        let first_of = |tp: usize| sum.plan.first_of(tp) * size;
        let parts = self.stage.parts.floats();
        let n_all = first_of(self.mesh.tp_size());
        if (0..self.mesh.tp_size()).all(|tp| n_of(tp) == n_of(0)) {
            let (from, to) = (at.part(0..n_of(me)).address(), parts.part(0..n_all).address());
            // SAFETY: both lengths were checked, and both outlive the stream's work: freeing waits for it.
            self.begin(|lane| unsafe { lane.all_gather(from, to, n_of(me)) })?;
        } else {
            let own = parts.part(first_of(me)..first_of(me) + n_of(me));
            let as_row = |floats| DeviceColumns { floats, stride: n_of(me) };
            self.cuda.copy_columns(as_row(own), as_row(at), n_of(me), 1)?;
            let sends = |_| at.part(0..n_of(me));
            let comes = |tp: usize| parts.part(first_of(tp)..first_of(tp) + n_of(tp));
            self.begin(|lane| self.swap_floats(lane, sends, comes))?;
        }
        self.cuda.fold_planes(parts.part(0..n_all), n_all / size.max(1), merges, at.part(0..size));
        Ok(())
    }

    /// Each rank receives its columns of all planes and folds them; then all ranks receive the finished columns.
    pub fn fold_by_column(
        self,
        at: DeviceFloats<'_>,
        sum: RowParallelSum<'_>,
        merges: &DeviceWords,
        rows: Range<usize>,
    ) -> BeginResult {
        let (me, n_rows, n_cols) = (self.mesh.tp(), rows.len(), sum.n_cols);
        let cols = |tp: usize| self.mesh.columns_of(tp, n_cols);
        let n_own = sum.plan.n_planes(me);
        // This rank's planes, restricted to the receiver's columns.
        let out =
            |tp: usize| self.stage.out.floats().part(n_own * n_rows * cols(tp).start..n_own * n_rows * cols(tp).end);
        let plane = n_rows * cols(me).len();
        let first_of = |tp: usize| sum.plan.first_of(tp) * plane;
        let part = |tp: usize| self.stage.parts.floats().part(first_of(tp)..first_of(tp + 1));
        let whole = |number: usize, cols: &Range<usize>| DeviceColumns {
            floats: at.part((number * sum.n_rows + rows.start) * n_cols + cols.start..at.len()),
            stride: n_cols,
        };
        for tp in 0..self.mesh.tp_size() {
            let (to, width) = (if tp == me { part(me) } else { out(tp) }, cols(tp).len());
            for number in 0..n_own {
                let to = DeviceColumns { floats: to.part(number * n_rows * width..to.len()), stride: width };
                self.cuda.copy_columns(to, whole(number, &cols(tp)), width, n_rows)?;
            }
        }
        self.begin(|lane| self.swap_floats(lane, out, part))?;
        let (folded, n_all) = (self.stage.sum.floats().part(0..plane), first_of(self.mesh.tp_size()));
        if let Some(n_planes) = n_all.checked_div(plane) {
            self.cuda.fold_planes(self.stage.parts.floats().part(0..n_all), n_planes, merges, folded);
        }
        let finished = |tp: usize| self.stage.all.floats().part(n_rows * cols(tp).start..n_rows * cols(tp).end);
        self.begin(|lane| self.swap_floats(lane, |_| folded, finished))?;
        for tp in 0..self.mesh.tp_size() {
            let from = DeviceColumns { floats: if tp == me { folded } else { finished(tp) }, stride: cols(tp).len() };
            self.cuda.copy_columns(whole(0, &cols(tp)), from, cols(tp).len(), n_rows)?;
        }
        Ok(())
    }

    /// Sends this rank's rows together. The rows of all ranks arrive by owner and are put into their places.
    pub fn share_some(self, at: DeviceFloats<'_>, owners: &[usize], n_cols: usize) -> BeginResult {
        let rows_of = |tp: usize| (0..owners.len()).filter(move |row| owners[*row] == tp);
        let first_of = |tp: usize| (0..tp).map(|tp| rows_of(tp).count()).sum::<usize>() * n_cols;
        let parts = self.stage.parts.floats();
        let part = |tp: usize| parts.part(first_of(tp)..first_of(tp + 1));
        let mine: Vec<u32> = rows_of(self.mesh.tp()).map(|row| row as u32).collect();
        self.cuda.gather_floats(at, &mine, n_cols, part(self.mesh.tp()));
        self.begin(|lane| self.swap_floats(lane, |_| part(self.mesh.tp()), part))?;
        let mut place = vec![0u32; owners.len()];
        let in_order = (0..self.mesh.tp_size()).flat_map(rows_of);
        in_order.enumerate().for_each(|(i, row)| place[row] = i as u32);
        self.cuda.gather_floats(parts, &place, n_cols, at);
        Ok(())
    }

    /// Rank 0, which has the `whole`, receives the columns of all ranks for these rows and puts them into their places.
    /// The other ranks send theirs.
    pub fn gather_some(
        self,
        mine: DeviceFloats<'_>,
        whole: Option<DeviceFloats<'_>>,
        n_units: u32,
        n_rows: usize,
    ) -> BeginResult {
        let Some(whole) = whole else {
            // SAFETY: the buffer outlives the stream's work.
            let send = |lane: CommStream<'_>| unsafe { lane.send(mine.address(), mine.len(), 0) };
            return if mine.is_empty() { Ok(()) } else { self.begin(send) };
        };
        let (n_whole, cols) = (n_units as usize, |tp: usize| self.mesh.units_of(tp, n_units));
        let part = |tp: usize| self.stage.parts.floats().part(n_rows * cols(tp).start..n_rows * cols(tp).end);
        self.begin(|lane| {
            let mut others = self.mesh.other_stage_ranks().filter(|tp| !cols(*tp).is_empty()).map(|tp| (tp, part(tp)));
            // SAFETY: as above.
            others.try_for_each(|(tp, to)| unsafe { lane.recv(to.address(), to.len(), tp) })
        })?;
        for tp in 0..self.mesh.tp_size() {
            let from = DeviceColumns { floats: if tp == 0 { mine } else { part(tp) }, stride: cols(tp).len() };
            let to = DeviceColumns { floats: whole.part(cols(tp).start..whole.len()), stride: n_whole };
            self.cuda.copy_columns(to, from, cols(tp).len(), n_rows)?;
        }
        Ok(())
    }

    /// Exchanges with every other rank of the stage, both ways.
    pub fn swap_floats<'a>(
        &self,
        lane: CommStream<'_>,
        sends: impl Fn(usize) -> DeviceFloats<'a>,
        comes: impl Fn(usize) -> DeviceFloats<'a>,
    ) -> std::result::Result<(), NcclError> {
        for tp in self.mesh.other_stage_ranks() {
            let (to, from) = (sends(tp), comes(tp));
            // SAFETY: device memory that outlives the stream's work: freeing waits for it.
            unsafe {
                if !to.is_empty() {
                    lane.send(to.address(), to.len(), tp)?;
                }
                if !from.is_empty() {
                    lane.recv(from.address(), from.len(), tp)?;
                }
            }
        }
        Ok(())
    }

    /// Begins `calls` as one group.
    pub fn begin(&self, calls: impl FnOnce(CommStream<'_>) -> std::result::Result<(), NcclError>) -> BeginResult {
        Ok(self.watchdog.begin(self.stage.comm, self.cuda.raw_stream(), calls)?)
    }
}
