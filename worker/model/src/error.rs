//! Why a model cannot be loaded, or a pass cannot be made.

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("tensor {tensor} has shape {shape:?}, not {expected:?}")]
    Shape { tensor: String, shape: [usize; 2], expected: [usize; 2] },
    #[error("layers {first}..{end} must be on one stage, and this rank has only some of them")]
    Parted { first: u32, end: u32 },
    #[error(transparent)]
    Unsupported(#[from] types::Unsupported),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Backend(#[from] backend::Error),
    #[error(transparent)]
    Collective(#[from] collective::Error),
    #[error("the load was cancelled")]
    BrokenOff,
}
