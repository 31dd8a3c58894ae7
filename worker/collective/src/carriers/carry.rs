//! What a carrier is, and what it is told when it is chosen. Knows none of them.

use crate::error::Result;
use crate::mesh::Mesh;
use crate::sum::Sum;
use crate::transfer::OwnerOf;
use backend::Memory;
use std::fmt;

/// Carries numbers between the memory of a rank's device and that of its peers. What it does not carry it leaves to the
/// carrier below it, in itself; at the bottom is the host, which carries everything. `Ranks` says what each operation
/// does. An operation may only be begun when it returns: whoever reads asks `settle`.
pub trait Carry<D: Memory>: fmt::Debug + Send {
    /// Of several ranks; this rank's planes are those of the plan.
    fn sum_leaves(&mut self, mesh: &mut Mesh, device: &D, planes: &mut D::Buffer, sum: Sum<'_>) -> Result<()>;

    fn share_rows(
        &mut self,
        mesh: &mut Mesh,
        device: &D,
        buffer: &mut D::Buffer,
        owner_of: OwnerOf<'_>,
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

    /// There is a next stage.
    fn send_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &D::Buffer, n_rows: usize) -> Result<()>;

    /// There is a stage before.
    fn recv_rows(&mut self, mesh: &mut Mesh, device: &D, buffer: &mut D::Buffer, n_rows: usize) -> Result<()>;

    fn settle(&mut self, _mesh: &mut Mesh) -> Result<()> {
        Ok(())
    }

    fn adds_on_device(&self) -> bool {
        false
    }

    fn has_repeated(&mut self, _mesh: &mut Mesh, _device: &D) -> Result<()> {
        Ok(())
    }

    /// Whether it, or one below it, is of this kind.
    fn has(&self, choice: CarrierChoice) -> bool;

    /// Before the peers hear that this rank leaves in good order: what was begun comes to its end, if it does so soon.
    fn finish(&mut self) {}

    /// After they have heard. Without it, whatever still waits is broken off when this is dropped.
    fn leave(&mut self) {}
}

/// Leaves the mesh and what carries for it: in good order, unless this rank's part has ended before.
pub fn leave<D: Memory>(mesh: &mut Mesh, carrier: &mut dyn Carry<D>) {
    // In either way the peers hear of it before communicators end, which may take long.
    if mesh.is_ended() || std::thread::panicking() {
        return mesh.leave();
    }
    carrier.finish();
    mesh.leave();
    carrier.leave();
}

/// What is to carry numbers between the ranks' devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CarrierChoice {
    /// NCCL where all who exchange have it, each with a device of its own; otherwise the host. Sums of ranks whose
    /// devices reach each other's memory go over that: small ones, and without NCCL all.
    #[default]
    Auto,
    /// The mesh, through the host.
    Host,
    /// NCCL alone, or nothing. From 2.30 on ranks may share a device.
    Nccl,
    /// As `Auto`, but sums go over the devices' memory or nowhere, and ranks may share a device for that.
    Ipc,
}

/// The largest exchanges: what memory is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeLimits {
    /// Rows of one pass.
    pub rows_max: usize,
    /// Columns of a row.
    pub hidden: usize,
    /// Rows whose logits are wanted.
    pub outputs_max: usize,
    pub n_vocab: usize,
    /// How many leaves the model's sums have.
    pub n_leaves: Vec<u32>,
    pub chunks: ChunkLimits,
}

/// How what is large is cut, in numbers of 32 bits. Changes no bit of any sum, but all ranks must cut alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLimits {
    /// A rank's planes up to here are gathered whole, and every rank folds them: one message's latency instead of two.
    pub small_max: usize,
    /// Rows on their way at a time: so many numbers, or one row.
    pub chunk_max: usize,
}

impl Default for ChunkLimits {
    fn default() -> ChunkLimits {
        ChunkLimits { small_max: 256 << 10, chunk_max: 4 << 20 }
    }
}

impl ChunkLimits {
    /// Rows of so many columns that go together.
    pub(crate) fn rows_at_once(self, n_cols: usize) -> usize {
        (self.chunk_max / n_cols.max(1)).max(1)
    }
}
