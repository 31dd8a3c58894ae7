//! What is known of each replica, as numbers, and the choice of one for a request: pure tables and functions over them.
//!
//! Knows no stream, no clock, no client and no text; the same code chooses in a simulated datacenter. Read `pick/` (the
//! choice), `table` (what it looks at), then where the numbers come from: `ledger` (work), `caches` (blocks), `circuit`
//! (who is shunned for a while).

pub mod caches;
pub mod circuit;
pub mod ledger;
pub mod pick;
mod table;

pub use table::{Board, ChoiceBuffers, Chosen, ReplicaFacts, Salt, names};
