//! The host's carrier: numbers move from the device to the host, through the links of the mesh, and back. It carries
//! everything for any device. For a small sum every rank gathers all planes and folds them. For a large one the ranks
//! exchange columns all to all, each rank folds its columns, and the finished columns are gathered.

use super::carry::{CarrierChoice, RankCarrier};
use crate::error::Result;
use crate::fold::{STACK, fold};
use crate::frame::{FRAME_WORDS_MAX, FrameKind};
use crate::mesh::Mesh;
use crate::sum::{Plane, RowParallelSum};
use crate::transfer::{Direction, NO_OWNERS, OwnerFn, Payload, Transfer};
use backend::Memory;
use std::ops::Range;
use std::time::Instant;

/// Up to this size a rank's planes are sent whole and every rank folds them: the latency of one message instead of two.
const SMALL_WORDS: usize = FRAME_WORDS_MAX;

/// Carries everything through the host. Its buffers are kept from step to step.
#[derive(Debug)]
pub struct HostCarrier {
    /// This rank's planes, or the columns of all planes that it folds for the stage.
    planes: Vec<f32>,
    /// The folded result.
    sum: Vec<f32>,
    stack: Vec<f32>,
}

impl Default for HostCarrier {
    fn default() -> HostCarrier {
        HostCarrier { planes: Vec::new(), sum: Vec::new(), stack: vec![0.0; STACK] }
    }
}

impl<D: Memory> RankCarrier<D> for HostCarrier {
    fn all_reduce(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        planes: &mut D::Buffer,
        sum: RowParallelSum<'_>,
    ) -> Result<()> {
        if sum.plan.n_planes_max() * sum.size() <= SMALL_WORDS {
            self.sum_small(mesh, device, planes, sum)
        } else {
            self.sum_large(mesh, device, planes, sum)
        }
    }

    fn share_rows(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        buffer: &mut D::Buffer,
        owner_of: OwnerFn<'_>,
        n_rows: usize,
    ) -> Result<()> {
        let n_cols = device.cols(buffer);
        let n_owned = |tp: usize| (0..n_rows).filter(|row| owner_of(*row) as usize == tp).count();
        for tp in mesh.other_stage_ranks() {
            let (rank, me) = (mesh.stage_rank(tp), mesh.tp());
            let to = Transfer::owned(rank, Direction::Out, me as u32, n_owned(me), n_cols);
            let from = Transfer::owned(rank, Direction::In, tp as u32, n_owned(tp), n_cols);
            mesh.plan([to, from]);
        }
        mesh.exchange(FrameKind::Rows, n_rows as u64, owner_of, &mut ExchangedBuffer { device, buffer })
    }

    fn gather_columns(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        mine: &D::Buffer,
        whole: &mut D::Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        let tag = u64::from(n_units) << 32 | n_rows as u64;
        let own = mesh.units_of(mesh.tp(), n_units);
        if mesh.tp() != 0 {
            mesh.plan([Transfer::block(mesh.stage_rank(0), Direction::Out, n_rows, 0..own.len())]);
            return mesh.exchange(FrameKind::Columns, tag, NO_OWNERS, &mut SentBuffer { device, buffer: mine });
        }
        for tp in mesh.other_stage_ranks() {
            mesh.plan([Transfer::block(mesh.stage_rank(tp), Direction::In, n_rows, mesh.units_of(tp, n_units))]);
        }
        grow(&mut self.sum, own.len());
        for row in 0..n_rows {
            let values = &mut self.sum[..own.len()];
            device.read_part(mine, row, 0, values);
            device.write_part(whole, row, own.start, values);
        }
        mesh.exchange(FrameKind::Columns, tag, NO_OWNERS, &mut ExchangedBuffer { device, buffer: whole })
    }

    fn send_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &D::Buffer, n_rows: usize) -> Result<()> {
        let to = usize::from(mesh.rank().0) + mesh.tp_size();
        mesh.plan([Transfer::block(to, Direction::Out, n_rows, 0..device.cols(buffer))]);
        mesh.exchange(FrameKind::Stream, n_rows as u64, NO_OWNERS, &mut SentBuffer { device, buffer })
    }

    fn recv_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &mut D::Buffer, n_rows: usize) -> Result<()> {
        let from = usize::from(mesh.rank().0) - mesh.tp_size();
        mesh.plan([Transfer::block(from, Direction::In, n_rows, 0..device.cols(buffer))]);
        mesh.exchange(FrameKind::Stream, n_rows as u64, NO_OWNERS, &mut ExchangedBuffer { device, buffer })
    }

    fn uses_carrier(&self, choice: CarrierChoice) -> bool {
        choice == CarrierChoice::Host
    }
}

impl HostCarrier {
    /// Every rank receives all planes and folds them in the memory in which they arrived.
    fn sum_small<D: Memory>(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        planes: &mut D::Buffer,
        sum: RowParallelSum<'_>,
    ) -> Result<()> {
        let (n_own, size) = (sum.plan.n_planes(mesh.tp()), sum.size());
        grow(&mut self.planes, n_own * size);
        device.read(planes, 0..n_own * sum.n_rows, &mut self.planes[..n_own * size]);
        for tp in mesh.other_stage_ranks() {
            let to = Transfer::block(mesh.stage_rank(tp), Direction::Out, n_own * sum.n_rows, 0..sum.n_cols);
            let n_theirs = sum.plan.n_planes(tp) * sum.n_rows;
            let from = Transfer::block(mesh.stage_rank(tp), Direction::Hold, n_theirs, 0..sum.n_cols);
            mesh.plan([to, from]);
        }
        let mut own = ReadPlanes { floats: &self.planes, n_cols: sum.n_cols };
        mesh.exchange(FrameKind::Planes, tag_of(sum), NO_OWNERS, &mut own)?;
        self.fold_held(mesh, sum);
        device.write(planes, 0, &self.sum[..size]);
        // A rank without planes sends none: the frame that is here may belong to a later operation.
        for tp in mesh.other_stage_ranks().filter(|tp| sum.plan.n_planes(*tp) > 0) {
            mesh.release(mesh.stage_rank(tp));
        }
        Ok(())
    }

    fn fold_held(&mut self, mesh: &mut Mesh, sum: RowParallelSum<'_>) {
        let begun = Instant::now();
        let (me, size) = (mesh.tp(), sum.size());
        grow(&mut self.sum, size);
        let own = self.planes.as_slice();
        let source = |plane: &Plane| {
            let held = || bytemuck::cast_slice(mesh.held_frame(mesh.stage_rank(plane.tp)));
            let from = if plane.tp == me { own } else { held() };
            &from[plane.number * size..][..size]
        };
        fold(&sum.plan.planes, source, &mut self.stack, &mut self.sum[..size]);
        mesh.add_fold_time(begun);
    }

    /// Each rank receives its columns of all planes and folds them; then all ranks receive the finished columns.
    fn sum_large<D: Memory>(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        planes: &mut D::Buffer,
        sum: RowParallelSum<'_>,
    ) -> Result<()> {
        self.gather_parts(mesh, device, planes, sum)?;
        self.fold_parts(mesh, sum);
        let cols = mesh.columns_of(mesh.tp(), sum.n_cols);
        for (row, values) in rows_of(&self.sum, sum.n_rows, cols.len()).enumerate() {
            device.write_part(planes, row, cols.start, values);
        }
        for tp in mesh.other_stage_ranks() {
            let (to, theirs) = (mesh.stage_rank(tp), mesh.columns_of(tp, sum.n_cols));
            let to_it = Transfer::block(to, Direction::Out, sum.n_rows, cols.clone());
            mesh.plan([to_it, Transfer::block(to, Direction::In, sum.n_rows, theirs)]);
        }
        mesh.exchange(FrameKind::Sums, tag_of(sum), NO_OWNERS, &mut ExchangedBuffer { device, buffer: planes })
    }

    /// planes: for each rank [n_planes * n_rows, this rank's columns]
    fn gather_parts<D: Memory>(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        planes: &mut D::Buffer,
        sum: RowParallelSum<'_>,
    ) -> Result<()> {
        let cols = mesh.columns_of(mesh.tp(), sum.n_cols);
        grow(&mut self.planes, sum.plan.planes.len() * sum.n_rows * cols.len());
        let (n_own, first) = (sum.plan.n_planes(mesh.tp()), sum.plan.first_of(mesh.tp()) * sum.n_rows);
        for row in 0..n_own * sum.n_rows {
            let at = (first + row) * cols.len();
            device.read_part(planes, row, cols.start, &mut self.planes[at..at + cols.len()]);
        }
        for tp in mesh.other_stage_ranks() {
            let (rank, n_theirs) = (mesh.stage_rank(tp), sum.plan.n_planes(tp) * sum.n_rows);
            let to = Transfer::block(rank, Direction::Out, n_own * sum.n_rows, mesh.columns_of(tp, sum.n_cols));
            mesh.plan([to, Transfer::block(rank, Direction::In, n_theirs, cols.clone())]);
        }
        let lowest = mesh.stage_rank(0);
        let start = |rank: usize| sum.plan.first_of(rank - lowest) * sum.n_rows;
        let mut parts = PlaneColumns { device, planes, parts: &mut self.planes, cols, start };
        mesh.exchange(FrameKind::Parts, tag_of(sum), NO_OWNERS, &mut parts)
    }

    fn fold_parts(&mut self, mesh: &mut Mesh, sum: RowParallelSum<'_>) {
        let begun = Instant::now();
        let size = sum.n_rows * mesh.columns_of(mesh.tp(), sum.n_cols).len();
        grow(&mut self.sum, size);
        // The planes of all ranks are in the order of their leaves, like parts.
        let parts = &self.planes;
        let source = |plane: &Plane| &parts[(sum.plan.first_of(plane.tp) + plane.number) * size..][..size];
        fold(&sum.plan.planes, source, &mut self.stack, &mut self.sum[..size]);
        mesh.add_fold_time(begun);
    }
}

fn tag_of(sum: RowParallelSum<'_>) -> u64 {
    u64::from(sum.plan.n_leaves) << 32 | sum.n_rows as u64
}

fn grow(floats: &mut Vec<f32>, n: usize) {
    if floats.len() < n {
        floats.resize(n, 0.0);
    }
}

fn rows_of(floats: &[f32], n_rows: usize, n_cols: usize) -> impl Iterator<Item = &[f32]> {
    (0..n_rows).map(move |row| &floats[row * n_cols..][..n_cols])
}

/// A buffer to send from and receive into.
struct ExchangedBuffer<'a, M: Memory> {
    device: &'a M,
    buffer: &'a mut M::Buffer,
}

impl<M: Memory> Payload for ExchangedBuffer<'_, M> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.buffer, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, _peer: usize, row: usize, col: usize, words: &[u32]) {
        self.device.write_part(self.buffer, row, col, bytemuck::cast_slice(words));
    }
}

/// A buffer only to send from.
struct SentBuffer<'a, M: Memory> {
    device: &'a M,
    buffer: &'a M::Buffer,
}

impl<M: Memory> Payload for SentBuffer<'_, M> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.buffer, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("this payload is only sent");
    }
}

/// Planes that were read already.
struct ReadPlanes<'a> {
    floats: &'a [f32],
    n_cols: usize,
}

impl Payload for ReadPlanes<'_> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(bytemuck::cast_slice(&self.floats[row * self.n_cols + col..][..out.len()]));
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("received words stay in the ring");
    }
}

/// Columns of planes: sent from the device, received side by side.
struct PlaneColumns<'a, M: Memory, F> {
    device: &'a M,
    planes: &'a M::Buffer,
    parts: &'a mut [f32],
    cols: Range<usize>,
    /// The first row of a rank's planes.
    start: F,
}

impl<M: Memory, F: Fn(usize) -> usize> Payload for PlaneColumns<'_, M, F> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.planes, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, peer: usize, row: usize, col: usize, words: &[u32]) {
        let at = ((self.start)(peer) + row) * self.cols.len() + col - self.cols.start;
        self.parts[at..at + words.len()].copy_from_slice(bytemuck::cast_slice(words));
    }
}
