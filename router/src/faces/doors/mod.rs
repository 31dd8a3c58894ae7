//! What connections and calls of every protocol pass: a place among the others, deadlines, gathered writes, a key, and
//! a guard by which a panic ends one call alone.
//!
//! Knows bytes and paths, no request. Read `socket`, `lines`, `gathered`, `panics`, `revocable`, then `call` and
//! `gate`, which are for gRPC.

pub mod call;
pub mod gate;
pub mod gathered;
pub mod lines;
pub mod panics;
pub mod revocable;
pub mod socket;
pub mod unread;
