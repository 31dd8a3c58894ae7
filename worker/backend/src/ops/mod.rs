//! The operations that a model needs from a device, one file per kind, implemented in `cpu/` and `cuda/`. A `Pass`
//! describes the step to a device.

mod attention;
mod elements;
mod experts;
mod linear;
mod memory;
mod pages;
mod pointwise;
mod recurrence;
mod sample;
mod weights;

pub use attention::{Attention, AttentionCall, AttentionHeads, HeadNorms, ScoreTerms};
pub use elements::{Clamp, ElementOp, Gate, MlpActivation};
pub use experts::{Expert, ExpertStack, Experts, Routing, Scoring};
pub use linear::Linear;
pub use memory::Memory;
pub use pages::{BlockMemory, ChangeBlocks, KvPages, KvSpec, PageCopy, PageMover, WritePage};
pub use pointwise::Pointwise;
pub use recurrence::{
    ConvolutionCall, ConvolvedChannels, Recurrence, RecurrenceCall, RecurrentHeads, RecurrentWeights, StateRule,
};
pub use sample::{Draw, DrawError, DrawMask, DrawsInFlight, Sample, ScoreRequest};
pub use weights::{FillPiece, MatrixShape, PACKED_PIECE_BYTES, PackedBytes, RopeStyle, Weights};

use crate::{Pass, Result};

/// The largest batch for which a device allocates memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub rows_max: usize,
    /// The most positions of one sequence.
    pub context: u32,
    /// Cache groups, each with tables of its own.
    pub n_groups: usize,
}

/// A device with all operations that a model needs. An operation may only be enqueued when it returns; a reader of a
/// result waits for it.
pub trait Device: Linear + Attention + Recurrence + Pointwise + Experts + Sample + Send + Sync {
    /// Returns the failures of enqueued work since the last call. A pass is good if the call after it succeeds.
    fn take_failure(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates memory for the batches that `begin_pass` takes.
    fn reserve_batches(&self, _limits: BatchLimits) -> Result<()> {
        Ok(())
    }

    /// Called at the start of every pass, so that the device can upload what it needs before it computes.
    fn begin_pass(&self, _pass: &Pass<'_>) {}

    /// The number of rows to which a pass is padded, where passes of fewer shapes begin faster.
    fn padded_rows(&self, pass: &Pass<'_>) -> usize {
        pass.n_rows()
    }

    /// Runs `work`, which only enqueues operations of this device for the current pass, and the same ones for passes of
    /// the same shape. A device may record it and replay the record the next time. Returns what it did.
    fn run_or_replay<E>(
        &self,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<RunOutcome, E> {
        work().map(|()| RunOutcome::Done)
    }

    /// Drops all records: they name other ranks' communicators, which are about to end.
    fn forget_records(&self) {}

    /// Counts of all `repeat` calls.
    fn pass_counts(&self) -> PassStats {
        PassStats::default()
    }
}

/// How a call of `repeat` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// The work ran without a record.
    Done,
    /// Its record was replayed.
    Begun,
    /// The work was recorded, or recording failed, and nothing of it has begun: the caller calls again. Before that it
    /// waits for the ranks that share sums with this one: instantiating a graph allocates device memory, for which a
    /// driver may wait until the device is idle, while other ranks' kernels wait for this rank's.
    Recorded,
}

/// Counts since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassStats {
    /// Records made.
    pub recorded: u64,
    /// Passes begun from a record.
    pub replayed: u64,
    /// Passes without a record: the first of their shape, or of a shape that cannot be recorded.
    pub plain: u64,
    /// Records that could not be made, or for which there was no room.
    pub refused: u64,
    /// Time for which the device was busy with passes that drew, and its idle time between two of them.
    pub busy_micros: u64,
    pub idle_micros: u64,
}
