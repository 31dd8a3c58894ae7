//! Plans steps. Knows nothing of time, sockets, devices, random sources or text: time is an argument, and the same
//! calls give the same steps.
//!
//! There is no prefill and no decode: a sequence has planned tokens (`n_computed`) and tokens in its log, and a step
//! lets the first catch up with the second. Chunks, prefix hits, recompute after a preemption and replay after a loss
//! are that one rule.
//!
//! ```text
//! submit -> waiting -> (admitted by next_step) -> running -> (finished by apply, cancel, expire) -> ending -> gone
//!              ^                                     |
//!              +------ preempted, or workers lost ---+
//! ```
#![no_std]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acceptance;
mod awaited;
mod block_names;
mod blocks;
mod config;
mod costs;
mod drafting;
mod drafts;
mod in_flight;
mod journal;
mod loss;
mod lru;
mod output;
mod pace;
mod pools;
mod prefix;
mod progress;
mod queue_key;
mod refusal;
mod request_index;
mod running;
mod scheduler;
mod seen;
mod sequence;
mod sequence_index;
mod slab;
mod stats;
mod step_plan;
mod table;
mod tenants;
mod tier;
mod turns;
mod waiting;

pub use config::Config;
pub use costs::{StepCost, StepTiming};
pub use drafting::{DraftPolicy, RowCost};
pub use journal::BlockNameChange;
pub use loss::WorkerLoss;
pub use output::RequestOutput;
pub use pace::StepPace;
pub use refusal::{RequestRejection, StaleAnswer};
pub use scheduler::Scheduler;
pub use stats::{Counters, Stats};
