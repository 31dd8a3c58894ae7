//! The workers: which have joined, what each reports, and which of them hang, are slow or cannot be reached. Knows no
//! requests.

mod distrusted;
pub mod hangs;
pub mod kv_target;
pub mod patience;
pub mod ranks;
pub mod slow;
pub mod unreachable;
mod window;
pub mod workers;
