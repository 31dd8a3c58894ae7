//! The operations that a model asks of a device, a file per family. `cpu/` and `cuda/` are their two homes. What a
//! device is told of the step that it computes is a `Pass`.

mod attention;
mod experts;
mod linear;
mod memory;
mod pointwise;
mod sample;

pub use attention::{Attention, AttentionCall, Heads};
pub use experts::{Expert, Experts, Routing};
pub use linear::Linear;
pub use memory::{BatchLimits, KvSpec, Memory, RopeStyle};
pub use pointwise::Pointwise;
pub use sample::{Draw, Drawing, Sample, Score};

use crate::{Pass, Result};

/// All that a model needs of a device. Operations may only be begun when they return: whoever reads waits for them.
pub trait Device: Linear + Attention + Pointwise + Experts + Sample + Send + Sync {
    /// What failed since this was asked last, of what was begun. A pass is good if this says so behind it.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// How many rows a pass is to have: its own, or some more, where passes of fewer shapes begin faster.
    fn rows_for(&self, pass: &Pass<'_>) -> usize {
        pass.n_rows()
    }

    /// Does `work`, which begins operations of this device for the pass that was begun, and does nothing else: the same
    /// operations for passes of the same shape. A device may keep a record of it, and begin that the next time. Says
    /// what it did.
    fn repeat<E>(&self, mut work: impl FnMut() -> std::result::Result<(), E>) -> std::result::Result<Repeat, E> {
        work().map(|()| Repeat::Done)
    }

    /// Records are forgotten: what they do is not to be done again, as others have to do with it who will be gone.
    fn forget(&self) {}

    /// What became of all that was to be repeated.
    fn repeats(&self) -> Repeats {
        Repeats::default()
    }
}

/// What became of work that may be begun from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// It was done.
    Done,
    /// What is recorded of it was begun.
    Begun,
    /// The work was recorded, or that was tried, and nothing of it has begun: the caller asks again. Before that it
    /// waits for the ranks that share sums with this one. Making a graph ready takes memory of the device, for which a
    /// driver may wait until the device is idle, and the other ranks' kernels wait for this rank's meanwhile.
    Recorded,
}

/// Since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// Records made.
    pub recorded: u64,
    /// Passes begun from a record.
    pub replayed: u64,
    /// Passes without one: the first of their shape, or of a shape that has none.
    pub plain: u64,
    /// Records that could not be made, or for which there was no room.
    pub refused: u64,
    /// How long the device was busy with passes that drew, and had nothing to do between two of them.
    pub busy_micros: u64,
    pub idle_micros: u64,
}
