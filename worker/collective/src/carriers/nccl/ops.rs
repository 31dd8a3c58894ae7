//! NCCL's carrier. Operations enqueue work in stream order and return. Sums equal the host's bit for bit, because the
//! same tree is folded; under `fast` they are NCCL's own all-reduce. Ranks without a communicator exchange through the
//! host.

use super::comms::{BEFORE, HopComm, NEXT, STAGE, StageComm, WatchedComms};
use super::stage::StageExchange;
use super::watchdog::CommStream;
use crate::carriers::carry::{CarrierChoice, ChunkLimits, RankCarrier};
use crate::carriers::host::HostCarrier;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::sum::RowParallelSum;
use crate::transfer::OwnerFn;
use backend::Memory;
use backend::cuda::{Buffer, Cuda, DeviceColumns, DeviceFloats};
use std::fmt;
use std::ops::Range;
use types::NumericsMode;

/// Exchanges with at least some of the neighbours without the host.
pub struct NcclCarrier {
    // Communicators are dropped first, because they use the memory of the other fields.
    pub(super) watched: WatchedComms,
    pub(super) stage: Option<StageComm>,
    /// The hop to the next stage, and the one from the previous stage.
    pub(super) next: Option<HopComm>,
    pub(super) before: Option<HopComm>,
    pub(super) chunks: ChunkLimits,
    pub(super) host: HostCarrier,
}

impl fmt::Debug for NcclCarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCarrier").field("watched", &self.watched).finish_non_exhaustive()
    }
}

impl RankCarrier<Cuda> for NcclCarrier {
    fn all_reduce(&mut self, mesh: &mut Mesh, cuda: &Cuda, planes: &mut Buffer, sum: RowParallelSum<'_>) -> Result<()> {
        let Some(stage) = &mut self.stage else { return self.host.all_reduce(mesh, cuda, planes, sum) };
        let n_own = sum.plan.n_planes(mesh.tp()).max(1);
        let (at, chunks) = (cuda.floats_of(planes, n_own * sum.n_rows), self.chunks);
        self.watched.begin(mesh, |mesh, watchdog| {
            if cuda.numerics_mode() == NumericsMode::Fast {
                StageExchange { mesh, cuda, watchdog, stage }.reduce(at, sum)?;
                return Ok(cuda.mark(watchdog.mark(STAGE))?);
            }
            let merges = stage.merges(cuda, sum.plan)?;
            let (exchange, merges) = (StageExchange { mesh, cuda, watchdog, stage }, &stage.merges[merges].1);
            if sum.plan.n_planes_max() * sum.size() <= chunks.small_max {
                exchange.gather_and_fold(at, sum, merges)?;
            } else {
                in_chunks(chunks, sum.n_rows, sum.n_cols)
                    .try_for_each(|rows| exchange.fold_by_column(at, sum, merges, rows))?;
            }
            Ok(cuda.mark(watchdog.mark(STAGE))?)
        })
    }

    fn share_rows(
        &mut self,
        mesh: &mut Mesh,
        cuda: &Cuda,
        buffer: &mut Buffer,
        owner_of: OwnerFn<'_>,
        n_rows: usize,
    ) -> Result<()> {
        let Some(stage) = &self.stage else { return self.host.share_rows(mesh, cuda, buffer, owner_of, n_rows) };
        let (at, n_cols) = (cuda.floats_of(buffer, n_rows), cuda.cols(buffer));
        self.watched.begin(mesh, |mesh, watchdog| {
            let exchange = StageExchange { mesh, cuda, watchdog, stage };
            for rows in in_chunks(self.chunks, n_rows, n_cols) {
                let owners: Vec<usize> = rows.clone().map(|row| owner_of(row) as usize).collect();
                exchange.share_some(at.part(rows.start * n_cols..rows.end * n_cols), &owners, n_cols)?;
            }
            Ok(cuda.mark(watchdog.mark(STAGE))?)
        })
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
        let Some(stage) = &self.stage else {
            return self.host.gather_columns(mesh, cuda, mine, whole, n_units, n_rows);
        };
        let (mine, n_mine) = (cuda.floats_of(mine, n_rows), mesh.units_of(mesh.tp(), n_units).len());
        let (whole, n_whole) = ((mesh.tp() == 0).then(|| cuda.floats_of(whole, n_rows)), n_units as usize);
        self.watched.begin(mesh, |mesh, watchdog| {
            let exchange = StageExchange { mesh, cuda, watchdog, stage };
            for rows in in_chunks(self.chunks, n_rows, n_whole) {
                let mine = mine.part(rows.start * n_mine..rows.end * n_mine);
                let whole = whole.map(|whole| whole.part(rows.start * n_whole..rows.end * n_whole));
                exchange.gather_some(mine, whole, n_units, rows.len())?;
            }
            Ok(cuda.mark(watchdog.mark(STAGE))?)
        })
    }

    /// Copies the rows to a side buffer and sends them from there while the next pass computes.
    fn send_rows(&mut self, mesh: &mut Mesh, cuda: &Cuda, buffer: &Buffer, n_rows: usize) -> Result<()> {
        let Some(hop) = &self.next else { return self.host.send_rows(mesh, cuda, buffer, n_rows) };
        let (at, n_cols) = (cuda.floats_of(buffer, n_rows), cuda.cols(buffer));
        self.watched.begin(mesh, |_, watchdog| {
            in_chunks(self.chunks, n_rows, n_cols).try_for_each(|rows| {
                let (from, aside) = of_hop(at, hop, rows.start * n_cols..rows.end * n_cols);
                // The previous send from this buffer has finished.
                cuda.wait_for_mark(watchdog.mark(NEXT))?;
                cuda.copy_columns(as_row(aside), as_row(from), from.len(), 1)?;
                cuda.hand_over(&hop.side)?;
                hop.side.follow()?;
                // SAFETY: the buffer lives as long as the hop, which is dropped after its stream has passed.
                let send = |lane: CommStream<'_>| unsafe { lane.send(aside.address(), aside.len(), hop.peer) };
                watchdog.begin(hop.comm, hop.side.raw(), send)?;
                Ok(hop.side.mark(watchdog.mark(NEXT))?)
            })
        })
    }

    /// Receives into a side buffer while the previous pass computes, and copies from there.
    fn recv_rows(&mut self, mesh: &mut Mesh, cuda: &Cuda, buffer: &mut Buffer, n_rows: usize) -> Result<()> {
        let Some(hop) = &self.before else { return self.host.recv_rows(mesh, cuda, buffer, n_rows) };
        let (at, n_cols) = (cuda.floats_of(buffer, n_rows), cuda.cols(buffer));
        self.watched.begin(mesh, |_, watchdog| {
            in_chunks(self.chunks, n_rows, n_cols).try_for_each(|rows| {
                let (to, aside) = of_hop(at, hop, rows.start * n_cols..rows.end * n_cols);
                // The rows that were received there before are copied out by now.
                hop.side.follow()?;
                // SAFETY: as above.
                let recv = |lane: CommStream<'_>| unsafe { lane.recv(aside.address(), aside.len(), hop.peer) };
                watchdog.begin(hop.comm, hop.side.raw(), recv)?;
                hop.side.mark(watchdog.mark(BEFORE))?;
                cuda.wait_for_mark(watchdog.mark(BEFORE))?;
                cuda.copy_columns(as_row(to), as_row(aside), to.len(), 1)?;
                Ok(cuda.hand_over(&hop.side)?)
            })
        })
    }

    fn settle(&mut self, mesh: &mut Mesh) -> Result<()> {
        match self.watched.watchdog.fault().cloned() {
            None => Ok(()),
            Some(fault) => Err(self.watched.end_with(mesh, fault)),
        }
    }

    fn adds_on_device(&self) -> bool {
        self.stage.is_some()
    }

    /// Called when a recorded graph runs again: the watchdog watches it like newly begun work.
    fn note_replay(&mut self, mesh: &mut Mesh, cuda: &Cuda) -> Result<()> {
        if self.stage.is_none() {
            return Ok(());
        }
        self.watched.begin(mesh, |_, watchdog| {
            watchdog.start_deadline();
            Ok(cuda.mark(watchdog.mark(STAGE))?)
        })
    }

    fn uses_carrier(&self, choice: CarrierChoice) -> bool {
        choice == CarrierChoice::Nccl || RankCarrier::<Cuda>::uses_carrier(&self.host, choice)
    }

    fn finish(&mut self) {
        self.watched.watchdog.finish();
    }

    fn leave(&mut self) {
        self.watched.watchdog.leave();
    }
}

/// Returns ranges of rows that are sent together.
fn in_chunks(chunks: ChunkLimits, n_rows: usize, n_cols: usize) -> impl Iterator<Item = Range<usize>> {
    let step = chunks.rows_at_once(n_cols);
    let n_rows = if n_cols > 0 { n_rows } else { 0 };
    (0..n_rows).step_by(step).map(move |start| start..(start + step).min(n_rows))
}

/// Returns these numbers of a buffer, and their place in the hop's buffer.
fn of_hop<'a>(at: DeviceFloats<'a>, hop: &'a HopComm, floats: Range<usize>) -> (DeviceFloats<'a>, DeviceFloats<'a>) {
    let n = floats.len();
    (at.part(floats), hop.room.floats().part(0..n))
}

fn as_row(floats: DeviceFloats<'_>) -> DeviceColumns<'_> {
    DeviceColumns { floats, stride: floats.len() }
}
