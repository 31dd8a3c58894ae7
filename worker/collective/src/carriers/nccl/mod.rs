//! Ranks on GPUs exchange without the host if all of them have NCCL: rows, planes and logits move from device to device
//! in stream order. The mesh still carries rendezvous, tokens and blame.
//!
//! ```text
//! api       the functions of the library
//! agree     which ranks have it, and what their communicators are called
//! watchdog  communicators, their unfinished work, and the thread that ends them when nothing comes
//! comms     communicators with their memory: one for the stage, one with each neighbouring stage
//! stage     what goes on among the ranks of a stage: the host's operations, by the same tree
//! meet      creates communicators between ranks that have met, each of which exchanges once before it is used
//! ops       the carrier: what goes over which communicator, and what is left to the host
//! ```

mod agree;
pub mod api;
mod comms;
mod meet;
mod ops;
mod stage;
mod watchdog;

pub use meet::meet;
