//! What is known of each replica, as numbers, and the choice of one for a request: pure tables and functions.
//!
//! Knows no stream, no clock, no client and no text; a simulated datacenter uses the same code. Read `pick/` (the
//! choice), `table` (its input), then the sources of the numbers: `ledger` (work), `caches` (blocks), `circuit`
//! (shunned replicas).

pub mod caches;
pub mod circuit;
pub mod ledger;
pub mod pick;
mod table;

pub use table::{ChoiceBuffers, ReplicaChoice, ReplicaFacts, ReplicaTable, Salt, names};
