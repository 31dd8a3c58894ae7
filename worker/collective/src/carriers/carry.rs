//! The trait of carriers, and the values from which they are chosen. Has no knowledge of any carrier.

use crate::error::Result;
use crate::mesh::Mesh;
use crate::sum::RowParallelSum;
use crate::transfer::OwnerFn;
use backend::Memory;
use std::fmt;

/// Carries numbers between the memory of a rank's device and that of its peers. A carrier owns the one below it, which
/// does what the carrier itself cannot. The lowest is the host's, which carries everything. `Ranks` documents the
/// operations. An operation may be only enqueued when it returns: call `settle` before results are used.
pub trait RankCarrier<D: Memory>: fmt::Debug + Send {
    /// Called only with several ranks; this rank's planes are those of the plan.
    fn all_reduce(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        planes: &mut D::Buffer,
        sum: RowParallelSum<'_>,
    ) -> Result<()>;

    fn share_rows(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        buffer: &mut D::Buffer,
        owner_of: OwnerFn<'_>,
        n_rows: usize,
    ) -> Result<()>;

    fn gather_columns(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        mine: &D::Buffer,
        whole: &mut D::Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()>;

    /// Called only if there is a next stage.
    fn send_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &D::Buffer, n_rows: usize) -> Result<()>;

    /// Called only if there is a previous stage.
    fn recv_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &mut D::Buffer, n_rows: usize) -> Result<()>;

    fn settle(&mut self, _mesh: &mut Mesh) -> Result<()> {
        Ok(())
    }

    fn adds_on_device(&self) -> bool {
        false
    }

    fn note_replay(&mut self, _mesh: &mut Mesh, _device: &D) -> Result<()> {
        Ok(())
    }

    /// Returns whether this carrier, or one below it, is of this kind.
    fn uses_carrier(&self, choice: CarrierChoice) -> bool;

    /// Called before the peers are notified that this rank leaves in good order. Work in progress may end, if it does
    /// so soon.
    fn finish(&mut self) {}

    /// Called after the peers are notified. Without it, the drop aborts everything that still waits.
    fn leave(&mut self) {}
}

/// Leaves the mesh and its carrier: in good order, unless this rank has already failed.
pub fn leave<D: Memory>(mesh: &mut Mesh, carrier: &mut dyn RankCarrier<D>) {
    // In both cases the peers are notified before communicators end, which may take long.
    if mesh.is_ended() || std::thread::panicking() {
        return mesh.leave();
    }
    carrier.finish();
    mesh.leave();
    carrier.leave();
}

/// The carrier that moves numbers between the ranks' devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CarrierChoice {
    /// NCCL if all ranks of the exchange have it, each with its own device; otherwise the host. Ranks whose devices
    /// reach each other's memory use that for sums: small sums only, or all of them without NCCL.
    #[default]
    Auto,
    /// The mesh, through the host.
    Host,
    /// NCCL, or an error if it cannot be used. From 2.30 on ranks may share a device.
    Nccl,
    /// Like `Auto`, but sums must use the devices' memory; ranks may share a device for that.
    Ipc,
}

/// The largest exchanges, for which memory is allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeLimits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// Columns of a row.
    pub hidden: usize,
    /// The most rows whose logits are needed in one pass.
    pub outputs_max: usize,
    pub n_vocab: usize,
    /// The leaf counts of the model's sums.
    pub n_leaves: Vec<u32>,
    pub chunks: ChunkLimits,
}

/// The sizes at which large exchanges are cut, in numbers of 32 bits. They change no bit of any sum, but must be the
/// same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLimits {
    /// Up to this size every rank gathers whole planes and folds them: the latency of one message instead of two.
    pub small_max: usize,
    /// Numbers in flight at a time when rows are sent; at least one row.
    pub chunk_max: usize,
}

impl Default for ChunkLimits {
    fn default() -> ChunkLimits {
        ChunkLimits { small_max: 256 << 10, chunk_max: 4 << 20 }
    }
}

impl ChunkLimits {
    /// Returns how many rows of `n_cols` columns are sent together.
    pub(crate) fn rows_at_once(self, n_cols: usize) -> usize {
        (self.chunk_max / n_cols.max(1)).max(1)
    }
}
