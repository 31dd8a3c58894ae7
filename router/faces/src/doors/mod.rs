//! Limits for connections and calls of every protocol: a place among the others, deadlines, gathered writes, a key, and
//! a guard that confines a panic to one call.
//!
//! Reads bytes and paths. Has no knowledge of requests. Read `socket`, `lines`, `gathered`, `panics`, `revocable`, then
//! `call` and `gate`, which are for gRPC.

pub mod call;
pub mod gate;
pub mod gathered;
pub mod lines;
pub mod panics;
pub mod revocable;
pub mod socket;
pub mod unread;

/// The header of a request's session, over HTTP and gRPC.
pub const SESSION: &str = "x-session-id";
/// A header beside the field `cache_hint`.
pub const CACHE_HINT: &str = "x-cache-hint";
