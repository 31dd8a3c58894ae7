//! Settings from flags, then `LOCKSTEP_*`, then a file. Each is a field of one struct, with its flag, its variable and
//! its default, and the commands consist of these structs. No other code reads the environment.

mod answers;
mod bytes;
mod check;
mod choices;
mod coordinator;
pub mod device;
pub mod environment;
mod expiry;
mod file;
mod health;
pub mod hub;
mod identity;
mod kv;
pub mod kv_disk;
pub mod machine;
pub mod memory_part;
mod model;
pub mod offered;
mod queue;
mod router;
pub mod secret;
mod serve;
mod speculation;
mod spoken;
mod store;
mod trust;
mod watch;
pub mod words;
mod worker;

pub use bytes::ByteSize;
pub use check::at_least_one;
pub use choices::{CudaGraphs, FolderChoice, KvCommitChoice, LogFormat};
pub use coordinator::{CoordinatorParts, CoordinatorRole};
pub use file::{ConfigSource, config_text, to_table};
pub use health::HealthSettings;
pub use router::{GRPC_PORT, RouteSettings, RouterParts, RouterRole, RouterSettings};
pub use serve::ServeSettings;
pub use speculation::SpeculationSettings;
pub use spoken::ProtocolSettings;
pub use store::StoreSettings;
pub use trust::TrustSettings;
pub use watch::{LOG, WatchSettings};
pub use worker::{JoinSettings, WorkerRole, WorkerSettings};

#[cfg(test)]
pub mod tests;
