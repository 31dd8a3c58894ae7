//! Ranks on GPUs exchange without the host, where NCCL is there for all of them: rows, planes and logits go from device
//! to device in the order of the devices' streams. Who meets whom, tokens, and whose fault it was stay the mesh's.
//!
//! ```text
//! table   the functions of the library
//! watch   communicators, what they still do, and the thread that ends them when nothing comes
//! cards   which ranks have it, and what their communicators are called
//! meet    communicators: one for the stage, one with each neighbouring stage
//! ops     the operations: what the host's do, by the same tree
//! ```

mod cards;
mod meet;
mod ops;
mod table;
mod watch;

pub use meet::{Carrier, DirectLimits, Pieces};
pub use table::{NcclError, NcclVersion, nccl_version};

pub(crate) use meet::Direct;
pub(crate) use ops::Planes;
pub(crate) use watch::{Fault, Watch};
