//! Tensors and kernels: the few fused operations of a device, and the devices that implement them.
//!
//! Knows nothing of models, requests or ranks. `unsafe` lives here, beside the reason that makes it sound.
#![allow(unsafe_code, reason = "kernels and their memory; each block has its SAFETY comment")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod cpu;
pub mod cuda;
#[cfg(test)]
#[path = "../../../tests/common/documents.rs"]
mod documents;
mod error;
pub mod library;
mod ops;
pub mod pass;
pub mod stored;

pub use error::Error;
pub use ops::{
    Attention, AttentionCall, AttentionHeads, BatchLimits, BlockMemory, ChangeBlocks, Clamp, ConvolutionCall,
    ConvolvedChannels, Device, Draw, DrawError, DrawMask, DrawsInFlight, ElementOp, Expert, ExpertStack, Experts,
    FillPiece, Gate, HeadNorms, KvPages, KvSpec, Linear, MatrixShape, Memory, MlpActivation, PACKED_PIECE_BYTES,
    PackedBytes, PageCopy, PageMover, PassStats, Pointwise, Recurrence, RecurrenceCall, RecurrentHeads,
    RecurrentWeights, RopeStyle, Routing, RunOutcome, Sample, ScoreRequest, ScoreTerms, Scoring, StateRule, Weights,
    WritePage,
};
pub use pass::{Batch, BlockTables, GroupBlockTables, Pass, PassSlice, Rows};
pub use stored::StoredMatrix;

pub type Result<T> = std::result::Result<T, Error>;
