//! An NVIDIA GPU as a device. Built into every binary; the driver and its compiler are loaded when a device is opened,
//! and a missing one is an ordinary error.
//!
//! ```text
//! driver       the driver's contexts, streams, memory, launches
//! compiler     sources -> a cubin, kept on disk
//! table        the list of kernels: kernels/*.cu, which implement the contract kernels/kernels.cuh
//! kernels      their arguments, loading and launching
//! lt           cuBLASLt, for large products under `fast`
//! fault        the first failure
//! clock        when passes began and ended
//! outline      the common shape of passes that may be replayed from one record
//! graphs       those records, and the memory that they take
//! uploads      the data that a pass sends to the device: positions, tables, tokens
//! scratch      memory for operations besides their arguments; draws: memory for draws
//! peer_buffer  memory that other ranks' devices see
//! device       all of that as one: `Cuda`
//!
//! buffer       rows of numbers; weights: stored matrices -> tiles of digits and scales
//! memory       the device's memory, and copies to and from it
//! pages        pages of the KV cache on their way to and from the host
//! repeat       how a pass is launched: plainly, while it is recorded, or from its record
//! f8           large products with weights of eight bits
//! one_shot     sums of ranks whose devices access each other's memory
//! direct       the device in the view of a library that moves memory between devices
//! the rest     the operations, each a launch or two
//! ```
//! Operations are launched in order on one stream and return at once; a reader waits. `settle` reports a failure, and
//! nothing more is launched before that. All memory is allocated at load, and none is freed before the rank ends: a
//! driver may wait for everything in its context when memory is allocated or freed. Where ranks share a device, or sum
//! over each other's memory, a peer's kernel there may be waiting for this rank's next one.
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
mod pages;
mod peer_buffer;
mod pointwise;
mod recurrence;
mod repeat;
mod sample;
mod scratch;
mod table;
mod tiled;
mod uploads;
mod weights;

pub use attention::{Kv, Rope};
pub use buffer::{Buffer, Vector};
pub use compiler::{Arch, Compiler, Program, SourceText};
pub use device::{Cuda, CudaConfig};
pub use direct::{DeviceColumns, DeviceFloats, DeviceWords, SideStream, StreamMark, TransferBuffer};
pub use driver::{Card, Driver};
pub use experts::Routes;
pub use kernels::{compile, kernel_names};
pub use lt::{LtVersion, lt_version};
pub use one_shot::{OneShotSum, SumTerm};
pub use peer_buffer::{MappedBuffer, PeerBuffer, SumControl};
pub use weights::Matrix;
