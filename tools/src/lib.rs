//! The programs that are clients of a running server, and the simulator. The binary gives them their subcommands.
//!
//! They know no role's settings and start no role: a caller that has a server passes its address.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod bench;
pub mod chat;
pub mod figures;
pub mod known_models;
pub mod logs;
pub mod out;
pub mod pick;
pub mod ps;
mod server;
pub mod server_trust;
pub mod simulate;
pub mod status;
pub mod top;
pub mod verify;
pub mod words;
