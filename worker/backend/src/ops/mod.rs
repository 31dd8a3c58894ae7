//! The operations that a model needs from a device, one file per kind, implemented in `cpu/` and `cuda/`. A `Pass`
//! describes the step to a device.

mod attention;
mod experts;
mod linear;
mod memory;
mod pointwise;
mod recurrence;
mod sample;

pub use attention::{Attention, AttentionCall, AttentionHeads};
pub use experts::{Clamp, Expert, ExpertActivation, ExpertStack, Experts, Routing, Scoring};
pub use linear::Linear;
pub use memory::{BatchLimits, BlockMemory, ChangeBlocks, KvSpec, Memory, PackedBytes, RopeStyle};
pub use pointwise::Pointwise;
pub use recurrence::{
    ConvolutionCall, ConvolvedChannels, Recurrence, RecurrenceCall, RecurrentHeads, RecurrentWeights, StateRule,
};
pub use sample::{Draw, DrawError, DrawMask, DrawsInFlight, Sample, ScoreRequest};

use crate::{Pass, Result};

/// A device with all operations that a model needs. An operation may only be enqueued when it returns; a reader of a
/// result waits for it.
pub trait Device: Linear + Attention + Recurrence + Pointwise + Experts + Sample + Send + Sync {
    /// Returns the failures of enqueued work since the last call. A pass is good if the call after it succeeds.
    fn take_failure(&self) -> Result<()> {
        Ok(())
    }

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
