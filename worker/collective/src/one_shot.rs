//! Ranks of a stage on one host whose devices reach each other's memory add without any library: each lays its planes
//! on a desk that the others see, and one kernel of each adds them by the leaves' tree (`backend::cuda`). Who meets
//! whom, and whose fault it was, stay the mesh's.
//!
//! ```text
//! meet    whether all of a stage can, and their desks
//! watch   the thread that ends what kernels wait for when nobody comes
//! ops     sums: what fits one launch, and where there is no NCCL all others too, piece by piece
//! ```

mod meet;
mod ops;
mod watch;

pub(crate) use meet::Desks;
pub(crate) use watch::Watch;
