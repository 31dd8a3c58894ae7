//! Sums between ranks of a stage on one host whose devices reach each other's memory, without any library. Each rank
//! copies its planes to a buffer that the others can read, and one kernel per rank adds them by the leaves' tree
//! (`backend::cuda`). The mesh still carries rendezvous and blame.
//!
//! ```text
//! watchdog  the thread that ends the kernels' wait for a peer that does not come
//! ops       the carrier: sums that fit one launch, and where there is no NCCL all others too, piece by piece
//! meet      whether all ranks of a stage can sum like this, and their buffers
//! ```

mod meet;
mod ops;
mod watchdog;

pub use meet::meet;
pub use ops::OneShotCarrier;
