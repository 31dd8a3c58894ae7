//! A GPU of NVIDIA as a device. Built into every binary; the driver and its compiler are looked for when a device is
//! opened, and where they are missing that is an error like any other.
//!
//! ```text
//! driver       what the driver offers: contexts, streams, memory, launches
//! compiler     sources -> a cubin, kept on disk
//! table        which kernels there are: kernels/*.cu, which implement the contract kernels/kernels.cuh
//! kernels      their arguments, loading and launching
//! lt           cuBLASLt, for large products under `fast`
//! fault        what failed first
//! clock        when passes began and ended
//! outline      what passes have in common that may be begun from one record
//! graphs       those records, and the memory that they take
//! uploads      what a pass tells the device: positions, tables, tokens
//! scratch      what operations need besides their arguments; draws: what draws do
//! peer_buffer  memory that other ranks' devices see
//! device       all of that as one: `Cuda`
//!
//! buffer       rows of numbers; weights: stored matrices -> tiles of digits and scales
//! memory       what the device keeps, and how numbers get there and back
//! repeat       how a pass is begun: plainly, while it is recorded, or from its record
//! f8           large products with weights of eight bits
//! one_shot     sums of ranks whose devices reach each other's memory
//! direct       the device as a library sees it that moves memory between devices
//! the rest     the operations, each a launch or two
//! ```
//! Operations are begun in order on one stream and return at once; who reads waits. What fails is remembered and said
//! by `settle`, and nothing more is begun until then. All memory is made at load, and none is given back before the
//! rank ends: a driver may wait for all that its context has begun when memory is allocated or freed, and where ranks
//! share a device, or add over each other's memory, a peer's kernel may be waiting there for this rank's next one.
//!
//! Knows nothing of models or requests, nor of other ranks.

mod attention;
mod buffer;
mod clock;
mod compiler;
mod device;
mod direct;
mod draws;
mod driver;
mod experts;
mod f8;
mod fault;
mod graphs;
mod kernels;
mod linear;
mod lock;
mod lt;
mod memory;
mod one_shot;
mod outline;
mod peer_buffer;
mod pointwise;
mod recurrence;
mod repeat;
mod sample;
mod scratch;
mod table;
mod uploads;
mod weights;

pub use attention::{Kv, Rope};
pub use buffer::{Buffer, Vector};
pub use compiler::{Arch, Compiler, Program, Text};
pub use device::{Cuda, CudaConfig};
pub use direct::{Columns, Floats, Mark, Side, TransferBuffer, Words};
pub use driver::{Card, Driver};
pub use experts::Routes;
pub use kernels::{compile, kernel_names};
pub use lt::{LtVersion, lt_version};
pub use one_shot::{OneShot, Term};
pub use peer_buffer::{MappedBuffer, PeerBuffer, SumControl};
pub use weights::Matrix;
